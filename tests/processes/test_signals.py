"""An exception raised by a signal handler, at any instant of any call.

Ctrl-C in a notebook, or a time limit by SIGALRM, left the whole store locked for writing after 2 to
36 of them, in every process: one came after BEGIN and before the variable that would have said so.
Others left the fork gate held, pins, a transaction that was committed and said that it was
open, and sent its messages again when it was asked to commit once more.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from tools.interrupts import Interruption
from txnkv.storage import environments, settle_dropped
from txnkv.storage.fork import GATE
from txnkv.transaction.session_buffer import SessionRows

SCHEMA = txnkv.Schema({"id": "int64", "v": "string?"}, primary_key=["id"])
LARGE = 1 << 32


class World:
    """A store with a table in memory and on the disk, a topic, and a call for each operation."""

    def __init__(self, client: txnkv.Client, until: Callable[..., Any]) -> None:
        self.client = client
        self._until = until
        self.table = client.create_table("t", SCHEMA)
        self.indexed = client.create_table("i", SCHEMA)
        client.create_index(self.indexed, "v")
        rows = [(id, "many" if id % 2 else f"v{id}") for id in range(3000)]
        with client.transaction() as txn:
            txn.write(self.indexed, pa.table(list(zip(*rows, strict=True)), names=["id", "v"]))
        self.topic = client.create_topic("m")
        ids = pa.array(range(LARGE, LARGE + 20_000), pa.int64())
        with client.transaction() as txn:
            txn.write(self.table, pa.table({"id": ids, "v": ["x"] * len(ids)}))
        with client.transaction() as txn:
            txn.insert(self.table, (0, "x"))
        self.next = 1
        self.txn: txnkv.Transaction | None = None
        self.subscription = self.topic.subscribe("s")
        self.consumer = self.topic.consumer()
        self.given: list[int] = []

    # -- operations --------------------------------------------------------------------

    def get_memory(self) -> None:
        assert self.table.get(0) is not None

    def get_disk(self) -> None:
        assert self.table.get(LARGE + 1) is not None

    def get_many(self) -> None:
        assert self.table.get_many([0, LARGE]).num_rows == 2

    def scan(self) -> None:
        assert sum(batch.num_rows for batch in self.table.scan().to_batches()) > 20_000

    def scan_short(self) -> None:
        assert len(list(self.table.scan(where=[("id", ">=", LARGE + 5)], limit=3))) == 3

    def scan_by_key(self) -> None:
        where = [("id", ">=", LARGE), ("id", "<", LARGE + 5), ("v", "=", "x")]
        assert len(list(self.table.scan(where=where))) == self.table.count(where) == 5

    def get_by(self) -> None:
        self._forget_indexes()
        assert len(self.indexed.get_by("v", "v8")) == self.indexed.count([("v", "=", "v8")]) == 1

    def get_by_in_a_transaction(self) -> None:
        self._forget_indexes()
        with self.client.transaction() as txn:
            assert len(txn.get_by("i", "v", "v10")) == 1
            assert len(txn.get_by("i", "v", "many")) == 1500

    def _forget_indexes(self) -> None:
        tables = internals.tables(self.client)
        tables._indexes.clear()
        tables._writers.clear()

    def fetch(self) -> None:
        assert self.topic.fetch(0, 0).records

    def snapshot(self) -> None:
        with self.client.snapshot() as at:
            assert at.get("t", 0) is not None

    def read_in_a_transaction(self) -> None:
        with self.client.transaction() as txn:
            assert txn.get("t", LARGE + 2) is not None
            assert txn.get_many("t", [LARGE + 2, LARGE + 3]).num_rows == 2

    def commit(self) -> None:
        self.txn = txn = self.client.new_transaction()
        self._work(txn)
        txn.commit()

    def upsert(self) -> None:
        self.table.upsert((0, f"z{self.next}"))

    def next_id(self) -> None:
        assert self.table.next_id() > 0

    def commit_large(self) -> None:
        self.txn = txn = self.client.new_transaction()
        txn.serialize()
        self._work(txn)
        txn.commit()

    def with_block(self) -> None:
        with self.client.transaction() as txn:
            self._work(txn)

    def run(self) -> None:
        self.client.run(self._work)

    def flush(self) -> None:
        with self.client.new_session() as session:
            session.send("m", self._number())
            session.flush()

    def receive(self) -> None:
        message = self.subscription.receive(timeout=0)
        if message is not None:
            self.given.append(message.offset)
            self.subscription.ack(message)

    def poll(self) -> None:
        self.consumer.poll(timeout=0)

    def compact(self) -> None:
        self.client.compact()

    def recall(self) -> None:
        self.client.create_table("kept", SCHEMA, exists_ok=True)
        self.client.drop_table("kept", keep=60)
        self.client.recall_table("kept")

    def named(self) -> None:
        self.txn = txn = self.client.new_transaction(name="one")
        self._work(txn)
        txn.commit()

    def _number(self) -> bytes:
        return b"%d" % self.next

    def _work(self, txn: txnkv.Transaction) -> None:
        txn.insert("t", (self.next, "y"))
        txn.send("m", self._number())

    # -- afterwards --------------------------------------------------------------------

    def settle(self) -> None:
        """Nothing is left of the call that was broken off, and its transaction is whole."""
        txn, self.txn = self.txn, None
        if txn is not None and txn.context.has_written:
            self._end(txn)
        del txn
        runtime, ids = internals.runtime(self.client), internals.coordinator(self.client).ids
        _elsewhere(settle_dropped)
        held = (runtime.snapshots, runtime.manifests, ids.numbers)
        self._until(lambda: gc.collect() >= 0 and not any(map(len, held)))
        assert _elsewhere(lambda: _drains(GATE)), "the fork gate is in use"
        for environment, _ in list(environments._TABLE._environments.values()):
            assert _elsewhere(lambda e=environment: _drains(e._gate)), "a read of LMDB is left"
        _elsewhere(self._commit_beside)
        self.next += 2

    def _end(self, txn: txnkv.Transaction) -> None:
        """It says what it is, and a second commit writes nothing twice."""
        try:
            txn.commit()
        except txnkv.InvalidTxnStateError:
            assert txn.state is txnkv.TxnState.ABORTED
        else:
            assert txn.state is txnkv.TxnState.COMMITTED
            assert self.table.get(self.next) is not None or self._nothing_was_given(txn)

    def _nothing_was_given(self, txn: txnkv.Transaction) -> bool:
        """It was broken off before its row was taken in."""
        return self._number() not in self.messages()

    def _commit_beside(self) -> None:
        with self.client.transaction() as txn:
            txn.insert("t", (self.next + 1, "beside"))

    def messages(self) -> Counter[bytes]:
        consumer, found = self.topic.consumer(), Counter[bytes]()
        while messages := consumer.poll(timeout=0):
            found.update(message.value for message in messages)
        return found


def _elsewhere(fn: Callable[[], Any]) -> Any:
    """In a thread of its own, which handlers do not disturb and gates do not know."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(fn()), daemon=True)
    thread.start()
    thread.join(60)
    assert found, "it waits for what nobody gives back"
    return found[0]


def _drains(gate: Any) -> bool:
    drained: bool = gate.drain(20)
    if drained:
        gate.reopen()
    return drained


@pytest.fixture
def world(client: txnkv.Client, until: Callable[..., Any]) -> Iterator[World]:
    made = World(client, until)
    yield made
    made.subscription.close()


OPERATIONS = [
    "get_memory", "get_disk", "get_many", "scan", "scan_short", "scan_by_key", "get_by",
    "get_by_in_a_transaction", "snapshot", "read_in_a_transaction", "commit", "commit_large",
    "with_block", "run", "flush", "receive", "poll", "fetch", "compact", "recall", "named",
    "upsert", "next_id",
]  # fmt: skip


@pytest.mark.parametrize("operation", OPERATIONS)
def test_interrupted_at_some_instants(world: World, operation: str) -> None:
    _interrupt(world, getattr(world, operation), 5)


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
def test_interrupted_at_every_instant(world: World, operation: str) -> None:
    _interrupt(world, getattr(world, operation), None)


def _interrupt(world: World, call: Callable[[], None], some: int | None) -> None:
    with world.client.transaction() as txn:
        for _ in range(50):
            txn.send("m", b"to be received")
    call()
    world.settle()
    whole = Interruption(1 << 40)
    whole.run(call)
    world.settle()
    instants = range(1, whole.passed + 1)
    assert len(instants) > 1  # a get has few, fewer from 3.12 on: most of it is one call of C
    for n in instants if some is None else random.sample(instants, min(some, len(instants))):
        interruption = Interruption(n)
        interruption.run(call)
        try:
            world.settle()
        except BaseException as error:
            error.add_note(f"instant {n} of {whole.passed}: {interruption.where}")
            raise
    twice = {value for value, count in world.messages().items() if count > 1}
    assert twice <= {b"to be received"}
    assert len(set(world.given)) == len(world.given), "what was acknowledged came again"


# -- signals at random moments -------------------------------------------------------------

STRESS = """
import random, signal, threading, time
from txnkv.errors import TxnkvError

class Alarm(BaseException):
    pass

def ring(*_):
    raise Alarm

signal.signal(signal.SIGALRM, ring)
chance = random.Random(seed)
table, topic = client.table("t"), client.topic("m")
subscription = topic.subscribe("s")
late = topic.consumer(start="latest")
stopping = threading.Event()
beside = []

def write_beside():
    while not stopping.wait(0.001):
        beside.append(len(beside))
        with client.transaction() as txn:
            txn.insert("t", (-len(beside), "beside"))

threads = [threading.Thread(target=write_beside)]
for thread in threads:
    thread.start()

def commit(number, txn):
    txn.insert("t", (number, "y"))
    txn.send("m", b"%d" % number)
    txn.commit()

def commit_large(number, txn):
    txn.serialize()
    commit(number, txn)

def in_block(number, txn):
    with txn:
        txn.insert("t", (number, "y"))
        txn.send("m", b"%d" % number)

def run(number, txn):
    def work(txn):
        txn.insert("t", (number, "y"))
        txn.send("m", b"%d" % number)
    client.run(work)

def read(number, txn):
    for id in range(number - 20, number):
        table.get(id)
    table.scan(limit=100).to_arrow()

def receive(number, txn):
    message = subscription.receive(timeout=0)
    if message is not None:
        txn.ack(subscription, message)
        txn.commit()

def wait(number, txn):
    until = time.monotonic() + 1  # an alarm is lost that comes within a callback of the collector's
    while time.monotonic() < until:
        late.poll(timeout=0.003)

works = [commit, commit_large, in_block, run, read, receive, wait]
number = rung = 0
aborted = set()
while rung < signals:
    number += 1
    txn = client.new_transaction()
    work = chance.choice(works)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 3e-3))
            work(number, txn)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except Alarm:
        rung += 1
    except TxnkvError as error:
        if not error.retriable:
            raise
    if work in (commit, commit_large, in_block) and txn.context.has_written:
        try:
            txn.commit()
        except TxnkvError:
            assert txn.state.name == "ABORTED", txn.state
            aborted.add(number)
    else:
        try:
            txn.rollback()
        except TxnkvError:
            pass
stopping.set()
for thread in threads:
    thread.join(60)
    assert not thread.is_alive()
subscription.close()
del txn
client.close()
say((aborted, len(beside), number))
"""


@pytest.mark.parametrize("signals", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_signals_at_random_moments(
    client: txnkv.Client, process: Callable[..., Any], signals: int
) -> None:
    client.create_table("t", SCHEMA)
    client.create_topic("m")
    seed = random.randrange(1 << 32)
    print("seed", seed)
    stress = process(STRESS, seed=seed, signals=signals)
    aborted, beside, last = stress.finish(timeout=max(120, signals / 5))
    with client.transaction() as txn:
        txn.insert("t", (1 << 40, "it is not locked"))
    rows = {row["id"] for row in client.table("t").scan()}
    sent: Counter[int] = Counter()
    consumer = client.topic("m").consumer()
    while messages := consumer.poll(timeout=0):
        sent.update(int(message.value) for message in messages)
    assert max(sent.values()) == 1, "a message was sent twice"
    written = {id for id in rows if 0 < id <= last}
    assert sent.keys() <= written
    # One that was broken off between its row and its message commits its row alone.
    assert aborted.isdisjoint(written)
    assert aborted.isdisjoint(sent)
    assert sum(id < 0 for id in rows) == beside


def test_a_read_that_is_interrupted_loses_no_row(
    client: txnkv.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes the rows that wait; the signal came when they were taken out of the list."""
    table = client.create_table("t", SCHEMA)
    take, signals = SessionRows.take, [signal.SIGINT]

    def taken(rows: SessionRows) -> Any:
        found = take(rows)
        while signals:
            signal.raise_signal(signals.pop())
        return found

    with client.transaction() as txn:
        txn.insert(table, (1, "x"))  # waits, for nothing was read of the table so far
        monkeypatch.setattr(SessionRows, "take", taken)
        with pytest.raises(KeyboardInterrupt):
            txn.get(table, 1)
        assert txn.get(table, 1) == {"id": 1, "v": "x"}
    assert table.get(1) == {"id": 1, "v": "x"}


def test_ctrl_c_leaves_a_run(client: txnkv.Client) -> None:
    """It was taken for a failed commit, and the run went on."""
    client.create_table("t", SCHEMA)
    runs: list[txnkv.Transaction] = []

    def work(txn: txnkv.Transaction) -> None:
        runs.append(txn)
        txn.insert("t", (1, "x"))
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass

    with pytest.raises(KeyboardInterrupt):
        client.run(work)
    assert [txn.state for txn in runs] == [txnkv.TxnState.ABORTED]
    assert client.table("t").get(1) is None


def test_ctrl_c_in_the_commit_of_a_run(client: txnkv.Client, until: Callable[..., Any]) -> None:
    """The commit goes on to its end; the exception comes out at once, or when it is there."""
    client.create_table("t", SCHEMA)
    runs: list[txnkv.Transaction] = []
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with internals.status(client).write():
            held.set()
            let_go.wait(60)

    def work(txn: txnkv.Transaction) -> None:
        runs.append(txn)
        txn.insert("t", (1, "x"))

    client.new_transaction().rollback()  # takes a range of ids
    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(60)

    def interrupt() -> None:
        until(lambda: internals.coordinator(client).log.queue._queue)
        os.kill(os.getpid(), signal.SIGINT)
        let_go.set()

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        client.run(work)
    holder.join()
    assert runs[0].commit() > 0
    assert [txn.state for txn in runs] == [txnkv.TxnState.COMMITTED]
    assert client.table("t").get(1) == {"id": 1, "v": "x"}


def _commit(world: World, timeout: float | None = 60.0) -> None:
    with world.client.transaction(timeout=timeout) as txn:
        txn.upsert(world.table, (1, "x"))


WAITING: dict[str, Callable[[World], object]] = {
    "upsert": lambda world: world.table.upsert((1, "x")),
    "upsert a large row": lambda world: world.table.upsert((1, "x" * (2 << 20))),
    "ack": lambda world: world.subscription.ack(txnkv.MessageId(0, 0)),
    "flush": lambda world: world.flush(),
    "commit": _commit,
    "commit without a timeout": lambda world: _commit(world, None),
    "snapshot at a time": lambda world: world.client.snapshot(datetime.now(UTC)),
}


@pytest.mark.parametrize("call", WAITING)
def test_ctrl_c_while_another_writes(world: World, call: str) -> None:
    """It comes out of a call that waits, however short the call is when nobody is in the way."""
    world.client.new_transaction().rollback()  # takes a range of ids
    world.client.run(lambda txn: txn.send("m", b"0"))
    _interrupt_while_another_writes(world, lambda: WAITING[call](world))
    world.settle()


def _interrupt_while_another_writes(world: World, call: Callable[[], object]) -> None:
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with internals.status(world.client).write():
            held.set()
            let_go.wait(60)
        held.clear()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(60)
    try:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            call()
        assert held.is_set(), "it waited until the other was done"
    finally:
        let_go.set()
        holder.join()


def test_a_flush_that_is_interrupted_writes_once(world: World) -> None:
    """It went on, and what it wrote waited in the session again."""
    session = world.client.new_session()
    session.insert("t", (1, "x"))
    session.send("m", b"1")
    _interrupt_while_another_writes(world, session.flush)
    world._until(lambda: world.table.get(1))
    session.close()
    assert world.table.get(1) == {"id": 1, "v": "x"}
    assert world.messages() == Counter({b"1": 1})
