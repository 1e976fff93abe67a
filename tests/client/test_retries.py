"""Work that failed late and is tried again, in each way, is there once.

A disk that fails may fail after the work is done: LMDB's or SQLite's commit went through and an
error came all the same, or the sync behind it failed. The caller is told of the failure and tries
again. Each test runs its work with a failure at the first such moment, then at the second, until
there is none left.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from txnkv.errors import CommitOutcomeUnknownError, StorageFullError, UnavailableError
from txnkv.storage.faults import arm, disarm
from txnkv.storage.sqlite_connection import WalFile
from txnkv.tables import Operation
from txnkv.tables.write import write_buffer
from txnkv.topics import outbox
from txnkv.topics.messages.message import MessageId

POINTS = (
    "status.before_commit",
    "status.after_commit",
    "lmdb.before_commit",
    "lmdb.after_commit",
)
ONCE_OR_MORE = [1, pytest.param(3, marks=pytest.mark.slow)]
FAILURES = (StorageFullError, UnavailableError, CommitOutcomeUnknownError)
SCHEMA = txnkv.Schema({"id": "int64", "v": "string?"}, primary_key=["id"])


class Faults:
    """Fails one moment after the other: `at` counts from the call of `begin`, 0 is never."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._at = self._times = self._seen = 0
        sync = WalFile.sync

        def failing(file: WalFile) -> None:
            if self._hit():
                raise OSError(errno.EIO, "the disk failed")
            sync(file)

        monkeypatch.setattr(WalFile, "sync", failing)

    def begin(self, at: int, times: int) -> None:
        self._at, self._times, self._seen = at, times, 0
        for point in POINTS:
            arm(point, self._raise)

    def end(self) -> bool:
        """No more of them; whether there was one."""
        disarm()
        at, self._at = self._at, 0
        return self._seen >= at

    def _hit(self) -> bool:
        if not self._at:
            return False
        self._seen += 1
        return self._at <= self._seen < self._at + self._times

    def _raise(self) -> None:
        if self._hit():
            raise UnavailableError("the disk failed")


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch, by_hand: Any) -> Iterator[Faults]:
    yield Faults(monkeypatch)
    disarm()


@pytest.fixture(params=["marker", "sidecar"])
def topic(request: pytest.FixtureRequest, client: txnkv.Client) -> txnkv.Topic:
    client.create_table("t", SCHEMA)
    return client.create_topic("events", partitions=1, buffer=request.param)


def tried(call: Callable[[], Any], times: int = 8) -> Any:
    """Call until it succeeds."""
    for _ in range(times):
        try:
            return call()
        except FAILURES:
            continue
    return call()


class Model:
    """The content that is to be there: messages in their order, rows by id.

    One consumer reads on at each check: what was sent again, at whatever moment, comes as new.
    """

    def __init__(self, client: txnkv.Client, topic: txnkv.Topic) -> None:
        self.client, self.topic = client, topic
        self.messages: list[bytes] = []  # since the last check
        self.rows: set[int] = set()
        self._next = 0
        self._consumer = topic.consumer()

    def names(self, count: int) -> list[int]:
        self._next += count
        return list(range(self._next - count, self._next))

    def write(self, session: txnkv.Session, ids: list[int], op: str | None) -> None:
        for id in ids:
            tried(partial(session.send, self.topic, b"%d" % id))
            if op is not None:
                tried(partial(getattr(session, op), "t", {"id": id, "v": "x"}))

    def committed(self, ids: list[int], *, rows: bool) -> None:
        self.messages += [b"%d" % id for id in ids]
        self.rows |= set(ids) if rows else set()

    def check(self) -> None:
        for left in self.client.transactions():  # whose abort failed too; in time the leader does
            if not left.state.ended and not left.state.decided:
                self.client.abort_transaction(left.id)
        found: list[bytes | None] = []
        while some := self._consumer.poll(timeout=0):
            found += [message.value for message in some]
        assert found == self.messages
        self.messages.clear()
        rows = self.client.table("t").scan(["id"]).to_arrow()["id"].to_pylist()
        assert sorted(rows) == sorted(self.rows)


RETRIES = ["flush", "commit", "more"]


def moments(times: int) -> range:
    """The first of so many failures in a row, so that each moment is one of them."""
    return range(1, 200, times)


@pytest.mark.parametrize("times", ONCE_OR_MORE)
@pytest.mark.parametrize("retry", RETRIES)
@pytest.mark.parametrize("stored", [True, False], ids=["stored", "grows"])
@pytest.mark.parametrize("op", ["insert", "upsert", None])
def test_a_flush_in_a_transaction(
    client: txnkv.Client,
    topic: txnkv.Topic,
    faults: Faults,
    monkeypatch: pytest.MonkeyPatch,
    stored: bool,
    retry: str,
    op: str | None,
    times: int,
) -> None:
    monkeypatch.setattr(outbox, "MAX_BYTES", 200)
    model = Model(client, topic)
    for at in moments(times):
        txn = client.new_transaction(timeout=None)
        if stored:
            txn.serialize()
        ids = model.names(8)
        session = txn.new_session()
        model.write(session, ids, op)
        faults.begin(at, times)
        failed: Exception | None = None
        try:
            session.flush()
        except FAILURES as error:
            failed = error
        if retry == "more":
            more = model.names(20)
            ids += more
            model.write(session, more, op)
        if retry != "commit":
            tried(session.flush)
        reached = faults.end()
        txn.commit()
        model.committed(ids, rows=op is not None)
        model.check()
        if not reached:
            assert failed is None
            return
    pytest.fail("it never came to an end")


@pytest.mark.parametrize("times", [*ONCE_OR_MORE, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("retry", ["flush", "more"])
@pytest.mark.parametrize("kind", ["small", "alone", "large"])
def test_a_flush_outside_of_a_transaction(
    client: txnkv.Client,
    topic: txnkv.Topic,
    faults: Faults,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    retry: str,
    times: int,
) -> None:
    if kind != "small":
        monkeypatch.setattr(outbox, "MAX_BYTES", -1)
    model = Model(client, topic)
    for at in moments(times):
        ids = model.names(4)
        session = client.new_session()
        op = None if kind == "alone" else "insert"
        model.write(session, ids, op)
        faults.begin(at, times)
        try:
            told = session.flush()
            sent = told.sent
        except FAILURES:
            sent = 0
        if retry == "more":
            ids += (more := model.names(4))
            model.write(session, more, op)
        told = tried(session.flush, 12)
        reached = faults.end()
        assert sent + told.sent == len(ids)
        model.committed(ids, rows=kind != "alone")
        model.check()
        if not reached:
            return
    pytest.fail("it never came to an end")


@pytest.mark.parametrize("times", ONCE_OR_MORE)
@pytest.mark.parametrize("way", ["flush", "with"])
def test_a_worker_that_joined(
    client: txnkv.Client,
    topic: txnkv.Topic,
    faults: Faults,
    way: str,
    times: int,
) -> None:
    """Messages that a worker is told were sent are sent: its own commit never tries them again."""
    model = Model(client, topic)
    for at in moments(times):
        txn = client.new_transaction(timeout=None)
        token = txn.serialize()
        ids = model.names(2)
        worker = txnkv.Transaction.deserialize(client, token)
        for id in ids:
            worker.send(topic, b"%d" % id)
            worker.insert("t", {"id": id, "v": "x"})
        faults.begin(at, times)
        if way == "flush":
            told = tried(worker.flush)
            assert (told.sent, told.inserted) == (len(ids), len(ids))
        else:

            def end(worker: txnkv.Transaction = worker) -> None:
                with worker:
                    pass

            tried(end)
        reached = faults.end()
        txn.commit()
        model.committed(ids, rows=True)
        model.check()
        if not reached:
            return
    pytest.fail("it never came to an end")


@pytest.mark.parametrize("times", ONCE_OR_MORE)
@pytest.mark.parametrize("stored", [True, False], ids=["stored", "grows"])
@pytest.mark.parametrize("op", ["insert", "upsert"])
def test_batches_in_a_transaction(
    client: txnkv.Client,
    topic: txnkv.Topic,
    faults: Faults,
    monkeypatch: pytest.MonkeyPatch,
    stored: bool,
    op: Operation,
    times: int,
) -> None:
    """A write or a `send_batch` that failed is called again with the same data."""
    monkeypatch.setattr(write_buffer, "MAX_ROWS", 5)
    monkeypatch.setattr(outbox, "MAX_BYTES", 100)
    model = Model(client, topic)
    for at in moments(times):
        txn = client.new_transaction(timeout=None)
        if stored:
            txn.serialize()
        ids = model.names(8)
        session = txn.new_session()
        faults.begin(at, times)
        sent = 0
        for some in (ids[:4], ids[4:]):
            rows = pa.table({"id": pa.array(some), "v": ["x"] * 4})
            written = tried(partial(session.write, "t", rows, op))
            assert (written.inserted, written.updated) == (4, 0)
            values = pa.table({"value": [b"%d" % id for id in some]})
            sent += tried(partial(session.send_batch, topic, values)).sent
        assert sent == len(ids)
        reached = faults.end()
        txn.commit()
        model.committed(ids, rows=True)
        model.check()
        if not reached:
            return
    pytest.fail("it never came to an end")


# -- acknowledgements ------------------------------------------------------------------


class Consumer:
    """A subscription, and what its messages became: each is acknowledged once or comes again."""

    def __init__(self, client: txnkv.Client, type: str, cumulative: bool) -> None:
        self.client = client
        self.cumulative = cumulative
        self.topic = client.create_topic("in")
        self.how: Any = {"max_deliveries": 1000} if type == "counted" else {"type": type}
        self.sub = self.topic.subscribe("s", **self.how)

    def messages(self, count: int) -> list[txnkv.Message]:
        with self.client.transaction() as txn:
            for _ in range(count):
                txn.send("in", b"x")
        found = self.sub.receive_many(100, timeout=0)
        assert len(found) == count
        return found

    def ack(self, offsets: list[int]) -> None:
        self.sub.ack([MessageId(0, offset) for offset in offsets])

    def left(self) -> list[int]:
        """Offsets of what a new consumer gets."""
        self.sub.close()
        self.sub = self.topic.subscribe("s", **self.how)
        return sorted(message.offset for message in self.sub.receive_many(100, timeout=0))


ACKS = ["exclusive", "exclusive cumulative", "counted", "counted cumulative", "shared"]


@pytest.fixture(params=ACKS)
def consumer(request: pytest.FixtureRequest, client: txnkv.Client) -> Iterator[Consumer]:
    type, *cumulative = request.param.split()
    found = Consumer(client, type, bool(cumulative))
    yield found
    found.sub.close()


@pytest.mark.parametrize("times", ONCE_OR_MORE)
@pytest.mark.parametrize("retry", ["again", "later", "commit", "rollback"])
@pytest.mark.parametrize("kind", ["small", "stored", "grows"])
def test_an_ack_in_a_transaction(
    consumer: Consumer, faults: Faults, kind: str, retry: str, times: int
) -> None:
    """It met itself, and ended its transaction for a conflict; one that was not tried again was
    left pending when the transaction had ended.
    """
    cumulative = consumer.cumulative
    for at in moments(times):
        sub = consumer.sub
        ack = sub.ack_cumulative if cumulative else sub.ack
        first, second, third = consumer.messages(3)
        txn = consumer.client.new_transaction(timeout=None)
        if kind == "stored":
            txn.serialize()
        ack(first, txn)
        faults.begin(at, times)
        if kind == "grows":
            with suppress(*FAILURES):
                txn.serialize()
        failed = False
        try:
            ack(second, txn)
        except FAILURES:
            failed = True
        if retry == "later":
            tried(partial(ack, third, txn))
        if failed and (retry == "again" or (retry == "later" and not cumulative)):
            tried(partial(ack, second, txn))
        if retry == "again":
            tried(partial(ack, third, txn))
        reached = faults.end()
        offsets = [message.offset for message in (first, second, third)]
        if retry == "rollback":
            txn.rollback()
            assert consumer.left() == offsets
            consumer.ack(offsets)
        else:
            txn.commit()
            if retry == "commit":
                left = consumer.left()
                assert left in (offsets[1:], offsets[2:])
                consumer.ack(left)
        assert consumer.sub.lag() == {0: 0}
        if not reached:
            return
    pytest.fail("it never came to an end")


@pytest.mark.parametrize("times", ONCE_OR_MORE)
def test_acks_of_a_session_outside_of_a_transaction(
    consumer: Consumer, faults: Faults, times: int
) -> None:
    for at in moments(times):
        session = consumer.client.new_session()
        messages = consumer.messages(3)
        if consumer.cumulative:
            session.ack_cumulative(consumer.sub, messages)
        else:
            session.ack(consumer.sub, messages)
        faults.begin(at, times)
        acked = 0
        with suppress(*FAILURES):
            acked = session.flush().acked
        acked += tried(session.flush).acked
        reached = faults.end()
        assert acked == len(messages)
        assert consumer.sub.lag() == {0: 0}
        if not reached:
            return
    pytest.fail("it never came to an end")
