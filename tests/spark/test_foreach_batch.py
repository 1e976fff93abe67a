"""Functions for foreachBatch, each batch a transaction: what Spark calls, without Spark."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import txnkv
from tests import internals
from txnkv.remote.remote_transaction import RemoteTransaction
from txnkv.spark import foreach_batch, query_progress
from txnkv.spark.foreach_batch import ForeachBatch

SCHEMA = txnkv.Schema({"id": "int64", "v": "string?"}, primary_key=["id"])


class Frame:
    """A frame as Spark hands it over, of a query in this thread; it can be computed for nobody."""

    def __init__(self, query: str | None = "q1") -> None:
        context = SimpleNamespace(getLocalProperty=lambda name: query)
        self.sparkSession = SimpleNamespace(sparkContext=context)
        self.saved: list[str] = []
        self.write = self

    def format(self, name: str) -> Frame:
        self.saved.append(name)
        return self

    def mode(self, name: str) -> Frame:
        self.saved.append(name)
        return self

    def save(self) -> None:
        self.saved.append("saved")


def frame(query: str | None = "q1") -> Frame:
    return Frame(query)


@pytest.fixture
def table(client: txnkv.Client) -> txnkv.Table:
    return client.create_table("t", SCHEMA)


@pytest.fixture
def calls() -> list[int]:
    return []


@pytest.fixture
def insert(calls: list[int]) -> Callable[[Any, int, txnkv.Transaction], None]:
    """Inserts a row for each batch, and notes that it was called."""

    def fn(_: Any, batch_id: int, txn: txnkv.Transaction) -> None:
        calls.append(batch_id)
        txn.insert("t", (len(calls), f"batch {batch_id}"))

    return fn


@pytest.fixture
def place(client: txnkv.Client) -> str:
    return client.path


@pytest.fixture(autouse=True)
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the query's checkpoint is; there is none, until a test makes one."""
    monkeypatch.setattr(query_progress, "checkpoint_of", lambda _: (tmp_path / "c").as_uri())
    return tmp_path / "c"


def ids(table: txnkv.Table) -> list[int]:
    return sorted(row["id"] for row in table.scan())


def test_a_batch_is_done_once(
    place: str, client: txnkv.Client, table: txnkv.Table, insert: Any, calls: list[int]
) -> None:
    do = foreach_batch(place, insert, "daily")
    skipped = []
    for batch_id in (0, 0, 1, 1, 2):
        given = frame()
        do(given, batch_id)
        if given.saved:
            assert given.saved == ["noop", "append", "saved"]
            skipped.append(batch_id)
    assert (calls, skipped) == ([0, 1, 2], [0, 1])
    assert ids(table) == [1, 2, 3]
    found = client.applied("daily")
    assert found is not None
    assert (found.version, found.source) == (2, "q1")


def test_what_raises_leaves_nothing(place: str, client: txnkv.Client, table: txnkv.Table) -> None:
    def fn(_: Any, batch_id: int, txn: txnkv.Transaction) -> None:
        txn.insert("t", (1, "x"))
        txn.serialize()
        txn.flush()
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        foreach_batch(place, fn, "daily")(frame(), 0)
    assert ids(table) == []
    assert client.applied("daily") is None
    assert [info.state for info in client.transactions()] == [txnkv.TxnState.ABORTED]


def test_a_rollback_of_its_own_is_no_end(
    place: str, client: txnkv.Client, table: txnkv.Table
) -> None:
    do = foreach_batch(place, lambda df, n, txn: txn.rollback(), "daily")
    with pytest.raises(txnkv.InvalidTxnStateError, match="fn rolled back the transaction of batch"):
        do(frame(), 0)
    assert client.applied("daily") is None


@pytest.mark.parametrize("end", ["commit", "commit_async", "start_commit", "__exit__"])
def test_a_commit_of_its_own_is_refused(
    place: str, client: txnkv.Client, table: txnkv.Table, insert: Any, calls: list[int], end: str
) -> None:
    """Else the batch would pass for done, although the function fails after that."""
    given = [None] * 3 if end == "__exit__" else []

    def fn(df: Any, batch_id: int, txn: txnkv.Transaction) -> None:
        insert(df, batch_id, txn)
        getattr(txn, end)(*given)
        pytest.fail("it was committed")

    with pytest.raises(txnkv.InvalidTxnStateError, match="fn cannot commit the transaction of bat"):
        foreach_batch(place, fn, "daily")(frame(), 0)
    assert (client.applied("daily"), ids(table)) == (None, [])
    foreach_batch(place, insert, "daily")(frame(), 0)
    assert (calls, ids(table)) == ([0, 0], [2])


def test_another_query_is_refused_until_it_begins_anew(
    place: str, client: txnkv.Client, table: txnkv.Table, insert: Any
) -> None:
    """Its batches count from another beginning: a checkpoint was deleted."""
    do = foreach_batch(place, insert, "daily")
    do(frame(), 5)
    for batch_id in (0, 6):
        with pytest.raises(ValueError, match=r"driven by 'q1' and has version 5.*forget_applied"):
            do(frame("q2"), batch_id)
    assert ids(table) == [1]
    client.forget_applied("daily")
    do(frame("q2"), 0)
    assert ids(table) == [1, 2]


def test_a_store_that_was_restored_to_the_past(
    store_path: Path, client: txnkv.Client, table: txnkv.Table, insert: Any
) -> None:
    """The checkpoint is ahead of it: what lies between would be lost in silence."""
    do = foreach_batch(store_path, insert, "daily")
    do(frame(), 5)
    with pytest.raises(
        ValueError, match=r"has version 5, and batch 8.*6 to 7 are not in the store"
    ):
        do(frame(), 8)
    do(frame(), 6)
    client.forget_applied("daily")
    do(frame(), 8)
    assert ids(table) == [1, 2, 3]


def test_a_checkpoint_that_was_restored_to_the_past(
    place: str, table: txnkv.Table, insert: Any, calls: list[int]
) -> None:
    """Its batches have the numbers of others that are there, and rows that are nowhere."""
    do = foreach_batch(place, insert, "daily")
    for batch_id in (0, 1, 2):
        do(frame(), batch_id)
    given = frame()
    with pytest.raises(
        ValueError, match=r"has version 2, and batch 1 .* comes again.*older than.*forget_applied"
    ):
        do(given, 1)
    assert (calls, given.saved) == ([0, 1, 2], [])


@pytest.mark.parametrize("served", [False, True])
def test_a_checkpoint_that_lost_its_last_batch(
    place: str,
    client: txnkv.Client,
    table: txnkv.Table,
    insert: Any,
    calls: list[int],
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    served: bool,
) -> None:
    """Spark plans the batch anew: its number is there, its rows are others."""
    do = foreach_batch(place, insert, "daily")
    do(frame(), 0)
    applied = client.applied("daily")
    assert applied is not None
    if served:  # by a machine with a clock of its own
        monkeypatch.setattr(query_progress, "is_address", lambda path: True)
    committed = applied.commit_ts.datetime.timestamp()
    (checkpoint / "offsets").mkdir(parents=True)
    for seconds in (-1.0, 200.0 if served else 1.5, 301.0):
        planned = {"batchTimestampMs": int(1000 * (committed + seconds)), "conf": {}}
        (checkpoint / "offsets" / "0").write_text(f"v1\n{json.dumps(planned)}\n-")
        if seconds < 300:
            do(frame(), 0)
        else:
            said = r"batch 0 .* planned later.*forget_applied.*Or a clock was set back"
            with pytest.raises(ValueError, match=said):
                do(frame(), 0)
    assert calls == [0]


def test_a_conflict_is_tried_again(
    store_path: Path, client: txnkv.Client, table: txnkv.Table, calls: list[int]
) -> None:
    def fn(_: Any, batch_id: int, txn: txnkv.Transaction) -> None:
        calls.append(batch_id)
        txn.upsert("t", (1, f"try {len(calls)}"))
        if len(calls) == 1:
            with client.transaction() as other:
                other.upsert("t", (1, "other"))

    foreach_batch(store_path, fn, "daily")(frame(), 0)
    assert calls == [0, 0]
    assert table.get(1) == {"id": 1, "v": "try 2"}
    calls.clear()
    with pytest.raises(txnkv.TransactionConflictError):
        foreach_batch(store_path, fn, "daily", attempts=1)(frame(), 1)
    assert calls == [0 + 1]


def test_another_driver_that_was_faster(
    store_path: Path, client: txnkv.Client, table: txnkv.Table, calls: list[int]
) -> None:
    def fn(_: Any, batch_id: int, txn: txnkv.Transaction) -> None:
        calls.append(batch_id)
        txn.insert("t", (len(calls), "x"))
        with client.transaction() as other:
            other.mark_applied("daily", batch_id, "q1")

    do = foreach_batch(store_path, fn, "daily")
    with pytest.raises(txnkv.AlreadyAppliedError):
        do(frame(), 0)
    do(frame(), 0)
    assert calls == [0]
    assert ids(table) == []


def test_arguments(store_path: Path, tmp_path: Path, client: txnkv.Client) -> None:
    def fn(*_: object) -> None:
        raise AssertionError("not called")

    topic = client.create_topic("events")
    with pytest.raises(txnkv.StoreNotFoundError):
        foreach_batch(tmp_path / "nowhere", fn, "daily")
    with pytest.raises(txnkv.NotSupportedError, match="address of a server"):
        foreach_batch("hdfs://host/s", fn, "daily")
    with pytest.raises(TypeError, match="fn is called"):
        foreach_batch(store_path, "fn", "daily")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="application id"):
        foreach_batch(store_path, fn, "")
    with pytest.raises(ValueError, match="attempts"):
        foreach_batch(store_path, fn, "daily", attempts=0)
    for wrong in ("", 7, topic):
        with pytest.raises(TypeError, match="subscription is the name"):
            foreach_batch(store_path, fn, "daily", wrong)  # type: ignore[arg-type]
    with (
        topic.subscribe("shared", type="shared") as shared,
        pytest.raises(txnkv.NotSupportedError, match="is shared"),
    ):
        foreach_batch(store_path, fn, "daily", shared)


def test_nothing_is_open_between_batches(store_path: Path) -> None:
    """A driver may remove the store, or open it otherwise, when its query has ended."""
    txnkv.connect(store_path).close()
    do = foreach_batch(store_path, lambda df, n, txn: None, "daily")
    do(frame(), 0)
    do(frame(), 0)
    with txnkv.connect(store_path, read_only=True) as client:
        assert list(client.applications()) == ["daily"]


def test_it_is_picklable(store_path: Path, client: txnkv.Client) -> None:
    """Spark Connect wants to pickle the function; there it is not told which query calls."""
    topic = client.create_topic("events")
    with topic.subscribe("s") as subscription:
        do = foreach_batch(store_path, print, "daily", subscription)
    copy: ForeachBatch = pickle.loads(pickle.dumps(do))
    assert copy == do
    with pytest.raises(txnkv.NotSupportedError, match="Spark Connect"):
        copy(frame(None), 0)
    foreach_batch(store_path, print, "daily")(object(), 0)
    found = client.applied("daily")
    assert found is not None
    assert found.source is None


# -- subscriptions ---------------------------------------------------------------------


class Stream:
    """A topic of one partition with messages, and a query that reads it."""

    def __init__(self, client: txnkv.Client, path: str, monkeypatch: Any, buffer: str) -> None:
        self.client = client
        self.path = path
        self.topic = client.create_topic("events", buffer=buffer)
        self.ends: list[dict[str, Any]] = []
        monkeypatch.setattr(query_progress, "end_offsets", lambda frame, batch_id: self.ends)
        self.sent = 0
        self.send(10)

    def send(self, count: int) -> None:
        with self.client.transaction() as txn:
            for _ in range(count):
                txn.send(self.topic, str(self.sent))
                self.sent += 1

    def end(self, offset: int, **more: Any) -> dict[str, Any]:
        return {
            "topic": "events",
            "id": self.topic.info.id,
            "order": "offset",
            "offsets": {"0": offset},
        } | more

    def do(self, batch_id: int, end: int, subscription: Any = "s", fn: Any = None) -> None:
        self.ends = [self.end(end)]
        fn = fn or (lambda df, n, txn: None)
        foreach_batch(self.path, fn, "daily", subscription)(frame(), batch_id)

    def left(self) -> list[int]:
        """Return the messages that the subscription would deliver."""
        with self.topic.subscribe("s") as subscription:
            return [int(m.value or b"") for m in subscription.receive_many(1000, timeout=0)]


@pytest.fixture(params=["marker", "sidecar"])
def stream(request: Any, client: txnkv.Client, monkeypatch: pytest.MonkeyPatch) -> Stream:
    return Stream(client, client.path, monkeypatch, request.param)


def test_what_was_read_is_acknowledged(stream: Stream) -> None:
    stream.do(0, 4)
    assert stream.left() == [4, 5, 6, 7, 8, 9]
    stream.do(1, 4)  # a batch for another source of the query
    stream.do(2, 10)
    assert stream.left() == []
    stream.send(3)
    stream.do(2, 13)  # a replay of what was committed
    assert stream.left() == [10, 11, 12]


def test_acks_and_work_are_one(stream: Stream, table: txnkv.Table) -> None:
    def fails(df: Any, batch_id: int, txn: txnkv.Transaction) -> None:
        txn.insert("t", (1, "x"))
        txn.send("events", "more")
        txn.serialize()
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        stream.do(0, 4, fn=fails)
    assert stream.left() == list(range(10))
    assert ids(table) == []
    stream.do(0, 4, fn=lambda df, n, txn: txn.serialize())
    assert stream.left() == [4, 5, 6, 7, 8, 9]


def test_a_conflict_gives_the_acks_to_the_next_attempt(
    stream: Stream, table: txnkv.Table, client: txnkv.Client
) -> None:
    calls: list[int] = []

    def fn(_: Any, batch_id: int, txn: txnkv.Transaction) -> None:
        calls.append(batch_id)
        if len(calls) % 2:
            txn.serialize()
        txn.upsert("t", (1, f"try {len(calls)}"))
        if len(calls) < 3:
            with client.transaction() as other:
                other.upsert("t", (1, "other"))

    stream.do(0, 4, fn=fn)
    assert calls == [0, 0, 0]
    assert stream.left() == [4, 5, 6, 7, 8, 9]


def test_acks_that_are_there_already(stream: Stream) -> None:
    """A consumer had the subscription before the stream: the stream does not go by that."""
    with stream.topic.subscribe("s") as subscription:
        messages = subscription.receive_many(10, timeout=5)
        subscription.ack([messages[1], messages[3], messages[4], messages[7]])
    stream.do(0, 5)
    assert stream.left() == [5, 6, 8, 9]
    stream.do(1, 8)
    assert stream.left() == [8, 9]
    with stream.topic.subscribe("s") as subscription:
        subscription.ack_cumulative(subscription.receive_many(10, timeout=5)[-1])
    stream.do(2, 9)
    assert stream.left() == []


def test_what_was_rolled_back_is_acknowledged_along(stream: Stream) -> None:
    txn = stream.client.new_transaction()
    txn.send(stream.topic, "never")
    txn.serialize()
    txn.flush()
    txn.rollback()
    stream.do(0, stream.topic.end_offsets()[0])
    assert stream.left() == []
    stream.send(1)
    assert stream.left() == [10]


def test_what_a_killed_driver_left_is_ended(stream: Stream, table: txnkv.Table) -> None:
    """Its transaction is open, and would hold the messages until heartbeats are missed."""
    left: list[int] = []

    def killed(df: Any, batch_id: int, txn: txnkv.Transaction) -> None:
        txn.insert("t", (1, "x"))
        txn.serialize()
        txn.flush()
        left.append(txn.id)
        raise SystemExit

    def no_rollback(txn: txnkv.Transaction, error: BaseException) -> None:
        """It is killed."""

    with pytest.MonkeyPatch.context() as patch:
        for kind in (txnkv.Transaction, RemoteTransaction):
            patch.setattr(kind, "_leave", no_rollback)
        with pytest.raises(SystemExit):
            stream.do(0, 4, fn=killed)
    assert stream.client.transaction_state(left[0]).name == "OPEN"
    stream.do(0, 4)
    assert stream.client.transaction_state(left[0]).name == "ABORTED"
    assert stream.left() == [4, 5, 6, 7, 8, 9]
    assert ids(table) == []


def test_a_live_consumer_keeps_the_stream_off(stream: Stream) -> None:
    calls: list[int] = []
    with (
        stream.topic.subscribe("s"),
        pytest.raises(txnkv.UnavailableError, match="consumer"),
    ):
        stream.do(0, 4, fn=lambda df, n, txn: calls.append(n))
    assert calls == []
    stream.do(0, 4)
    assert stream.left() == [4, 5, 6, 7, 8, 9]


def test_a_consumer_of_the_caller_s(stream: Stream) -> None:
    with stream.topic.subscribe("s") as subscription:
        stream.do(0, 4, subscription)
        assert [m.offset for m in subscription.receive_many(10, timeout=0)] == [4, 5, 6, 7, 8, 9]


def test_a_message_that_another_transaction_holds(stream: Stream) -> None:
    calls: list[int] = []
    with stream.topic.subscribe("s") as subscription:
        message = subscription.receive_many(3, timeout=5)[2]
        txn = stream.client.new_transaction()
        txn.ack(subscription, message)
        with pytest.raises(txnkv.AckConflictError, match="acknowledged by"):
            stream.do(0, 4, subscription, fn=lambda df, n, txn: calls.append(n))
        assert calls == []
        txn.rollback()
        stream.do(0, 4, subscription)
    assert stream.left() == [4, 5, 6, 7, 8, 9]


def test_the_topic_is_the_one_that_the_query_reads(stream: Stream) -> None:
    def refused(error: type[Exception], match: str, subscription: Any = "s") -> None:
        do = foreach_batch(stream.path, print, "daily", subscription)
        with pytest.raises(error, match=match):
            do(frame(), 0)

    other = stream.client.create_topic("other")
    stream.ends = []
    refused(ValueError, "reads no topic of this store")
    stream.ends = [stream.end(4, store="0" * 32), {"topic": "other"}]
    refused(ValueError, "reads no topic of this store")
    stream.ends = [stream.end(4), stream.end(4) | {"topic": "other", "id": other.info.id}]
    refused(ValueError, "reads the topics events, other")
    stream.ends = [stream.end(4, order="commit")]
    refused(txnkv.NotSupportedError, "order of commits")
    with other.subscribe("o") as subscription:
        stream.ends = [stream.end(4)]
        refused(ValueError, "does not read the topic of subscription 'o'", subscription)
    stream.ends = [stream.end(4) | {"id": 99}]
    refused(ValueError, "does not read the topic")
    stream.ends = [stream.end(4) | {"topic": "gone"}]
    refused(txnkv.TopicNotFoundError, "gone")
    with stream.topic.subscribe("shared", type="shared"):
        stream.ends = [stream.end(4)]
        refused(ValueError, "shared", "shared")
    assert stream.client.applied("daily") is None


def test_of_a_topic_that_is_read_twice_what_both_have_read(stream: Stream) -> None:
    stream.ends = [stream.end(7), stream.end(4, store=internals.store(stream.client).store_id)]
    foreach_batch(stream.path, lambda df, n, txn: None, "daily", "s")(frame(), 0)
    assert stream.left() == [4, 5, 6, 7, 8, 9]
