"""Answers of a transaction to each call in each of its states, also while another thread is in
the midst of its commit.

A small optimistic transaction was taken for open until its commit had come back: rolled back, it
said ABORTED and was COMMITTED as soon as a lock was free; rows that another thread flushed
meanwhile were acknowledged and lost; a token could be had of it, whose holder rolled back what
was committed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timedelta, tzinfo
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests.threads import Held, committed, held, shared
from txnkv.storage.faults import arm, disarm
from txnkv.tables import Run
from txnkv.transaction import commit_protocols
from txnkv.transaction.context import TxnContext
from txnkv.transaction.local_state import MOVES, Local, LocalState
from txnkv.transaction.session import Session

OPEN, COMMITTING = txnkv.TxnState.OPEN, txnkv.TxnState.COMMIT_IN_PROGRESS
ABORTED, COMMITTED = txnkv.TxnState.ABORTED, txnkv.TxnState.COMMITTED
SCHEMA = txnkv.Schema({"id": "int64", "v": "string?"}, primary_key=["id"])


@pytest.mark.parametrize("to", MOVES, ids=str)
@pytest.mark.parametrize("at", MOVES, ids=str)
def test_it_moves_along_the_table_alone(at: Local, to: Local) -> None:
    local = LocalState(stored=False)
    local.at = at
    if to in MOVES[at]:
        local.move(to)
        assert local.at is to
    else:
        with pytest.raises(ValueError, match="no transaction moves from"):
            local.move(to)
        assert local.at is at


# -- each call in each state -----------------------------------------------------------


class World:
    """A transaction that has flushed row 1, in some state; `go_on` ends what goes on in it."""

    def __init__(self, client: txnkv.Client, name: str) -> None:
        self.client = client
        self.table = client.create_table(name, SCHEMA)
        self.txn = client.new_transaction(lock_timeout=60)
        self.session = self.txn.new_session()
        self.session.insert(self.table, (1, "first"))
        self.session.flush()
        self.go_on: Callable[[], object] = lambda: None

    # -- states ------------------------------------------------------------------------

    def in_memory(self) -> None: ...

    def stored(self) -> None:
        self.txn.serialize()

    def waiting(self) -> None:
        """Its commit waits for the partition lock of a younger transaction."""
        young = self.client.new_transaction(locking="partition")
        young.insert(self.table, (9, "young"))
        young.flush()
        self.go_on = young.commit
        self.txn.start_commit()

    def hold(self, point: str, call: Callable[[], object]) -> None:
        """Another thread makes the call, and stands still at a point inside."""
        there, on = threading.Event(), threading.Event()

        def wait() -> None:
            if not there.is_set():
                there.set()
                assert on.wait(60)

        arm(point, wait)
        thread = threading.Thread(target=_quietly, args=(call,), daemon=True)
        thread.start()
        assert there.wait(60)

        def go_on() -> None:
            disarm()
            on.set()
            thread.join(60)

        self.go_on = go_on

    def finishing(self) -> None:
        self.stored()
        self.hold("commit.started", self.txn.commit)

    def unsure_committed(self) -> None:
        self._break_off("status.after_commit")

    def unsure_aborted(self) -> None:
        self._break_off("status.before_commit")

    def _break_off(self, point: str) -> None:
        arm(point, "error@1")
        with pytest.raises(txnkv.CommitOutcomeUnknownError):
            self.txn.commit()
        disarm()

    def committed(self) -> None:
        self.txn.commit()

    def committed_stored(self) -> None:
        self.stored()
        self.txn.commit()

    def aborted(self) -> None:
        self.txn.rollback()

    def aborted_stored(self) -> None:
        self.stored()
        self.txn.rollback()

    # -- calls -------------------------------------------------------------------------

    def answer(self, call: str) -> Any:
        """Return what the call gives; the name of the error, when there is one."""
        try:
            return CALLS[call](self)
        except txnkv.TxnkvError as error:
            return type(error).__name__

    def flush_late(self) -> int:
        """The flush of a row that was taken while the transaction was open."""
        writer = self.client.writer(self.table)
        row = writer.checker["insert"].take((2, "late"))
        return self.txn.context.write_rows(Run(writer, "insert", None, [row])).inserted


CALLS: dict[str, Callable[[World], Any]] = {
    "commit": lambda world: world.txn.commit() > world.txn.snapshot,
    "commit_async": lambda world: world.txn.commit_async().result(60) > world.txn.snapshot,
    "start_commit": lambda world: world.txn.start_commit(),
    "is_commit_complete": lambda world: world.txn.is_commit_complete(),
    "rollback": lambda world: world.txn.rollback(),
    "abort": lambda world: world.client.abort_transaction(world.txn.id),
    "state": lambda world: world.txn.state,
    "transaction_state": lambda world: world.client.transaction_state(world.txn.id),
    "keep_alive": lambda world: world.client.keep_transaction_alive(world.txn.id),
    "serialize": lambda world: bool(bytes(world.txn.serialize())),
    "new_session": lambda world: bool(world.txn.new_session()),
    "insert": lambda world: world.session.insert(world.table, (2, "late")),
    "flush": World.flush_late,
    "write": lambda world: world.session.write(world.table, pa.table({"id": [2]})).inserted,
    "get": lambda world: world.txn.get(world.table, 1),
    "get_many": lambda world: world.txn.get_many(world.table, [1]).num_rows,
    "scan": lambda world: world.txn.scan(world.table).to_arrow().num_rows,
    "mark": lambda world: world.txn.mark_applied(world.table.name, 1),
}

REFUSED = "InvalidTxnStateError"

OF_OPEN = {
    "commit": True,
    "commit_async": True,
    "start_commit": None,
    "is_commit_complete": REFUSED,
    "rollback": None,
    "abort": None,
    "state": OPEN,
    "transaction_state": OPEN,
    "keep_alive": None,
    "serialize": True,
    "new_session": True,
    "insert": None,
    "flush": 1,
    "write": 1,
    "get": {"id": 1, "v": "first"},
    "get_many": 1,
    "scan": 1,
    "mark": None,
}
CLOSED = dict.fromkeys(CALLS, REFUSED)  # to whatever only an open one takes
OF_COMMITTING = CLOSED | {
    "commit": True,
    "commit_async": True,
    "start_commit": None,
    "is_commit_complete": False,
    "state": COMMITTING,
    "transaction_state": COMMITTING,
}
OF_COMMITTED = OF_COMMITTING | {
    "is_commit_complete": True,
    "state": COMMITTED,
    "transaction_state": COMMITTED,
}
OF_ABORTED = CLOSED | {
    "rollback": None,
    "abort": None,
    "state": ABORTED,
    "transaction_state": ABORTED,
}

TOLD: dict[str, dict[str, Any]] = {
    "in_memory": OF_OPEN,
    "stored": OF_OPEN,
    "waiting": OF_COMMITTING | {"rollback": None, "abort": None},
    "finishing": OF_COMMITTING | {"rollback": None, "abort": None, "serialize": True},
    "unsure_committed": OF_COMMITTED,
    "unsure_aborted": OF_ABORTED,
    "committed": OF_COMMITTED,
    "committed_stored": OF_COMMITTED | {"serialize": True},
    "aborted": OF_ABORTED,
    "aborted_stored": OF_ABORTED | {"serialize": True},
}

WAITS = {"commit", "commit_async", "rollback", "abort"}
"""The calls that wait for the outcome of a commit that is on its way."""


def _quietly(call: Callable[[], object]) -> None:
    try:
        call()
    except txnkv.TxnkvError:
        return


def _ask(world: World, call: str, *, waits: bool) -> Any:
    """From another thread than the one that made the state."""
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(world.answer, call)
        if not waits:
            answer = asked.result(60)
        world.go_on()
        return asked.result(60) if waits else answer


def _whole(world: World, call: str, answer: Any) -> None:
    """Check that the answer holds, and goes on to hold."""
    for _ in range(2):
        state = world.txn.state
        if state is OPEN:
            world.txn.rollback()
            state = world.txn.state
        if not state.ended:  # it is finished in the background
            world.txn.commit()
            state = world.txn.state
        rows = {row["id"] for row in world.table.scan()} - {9}
        late = {2} if call in ("flush", "write") and answer == 1 else set()
        assert rows == (({1} | late) if state is COMMITTED else set())
        assert state is world.client.transaction_state(world.txn.id)
    if call in ("commit", "commit_async"):
        assert (state is COMMITTED) == (answer is True)
    if call in ("rollback", "abort"):
        assert (state is ABORTED) == (answer is None)


@pytest.mark.parametrize("state", TOLD)
def test_each_call_in_each_state(client: txnkv.Client, state: str) -> None:
    for call, expected in TOLD[state].items():
        world = World(client, call)
        getattr(world, state)()
        waits = expected is True and call in WAITS
        answer = _ask(world, call, waits=waits)
        assert answer == expected, call
        _whole(world, call, answer)
        client.drop_table(call)


@pytest.mark.parametrize("begin", ["commit", "commit_async", "start_commit"])
@pytest.mark.parametrize(
    "point", ["log.written", "status.before_commit", "status.after_commit", "log.durable"]
)
def test_each_call_inside_a_commit(client: txnkv.Client, point: str, begin: str) -> None:
    """The one thread stands still in the group commit, another one calls."""
    client.new_transaction().rollback()  # the range of ids
    for call, expected in OF_COMMITTING.items():
        world = World(client, call)
        world.hold(point, getattr(world.txn, begin))
        answer = _ask(world, call, waits=call in WAITS)
        assert answer == expected, call
        _whole(world, call, answer)
        assert world.txn.state is COMMITTED
        client.drop_table(call)


# -- threads ---------------------------------------------------------------------------


def test_what_a_flush_acknowledged_is_committed(client: txnkv.Client, table: txnkv.Table) -> None:
    """One thread commits while another one flushes rows: what was acknowledged is committed, and
    of the others at most the row that the session held then: a commit takes that along.
    """

    def write(txn: txnkv.Transaction, first: int, begun: threading.Event) -> int:
        session = txn.new_session()
        acknowledged = 0
        for id in range(first, first + 5_000):
            try:
                session.insert(table, (id, None))
                acknowledged += session.flush().inserted
            except txnkv.InvalidTxnStateError:
                break
            begun.set()
        return acknowledged

    for first in range(0, 200_000, 10_000):
        txn, begun = client.new_transaction(), threading.Event()
        with ThreadPoolExecutor(1) as thread:
            acknowledged = thread.submit(write, txn, first, begun)
            assert begun.wait(60)
            txn.commit()
        committed = table.count(where=[("id", ">=", first)])
        assert committed - acknowledged.result(60) in (0, 1)


def test_many_ask_for_one_end(client: txnkv.Client, table: txnkv.Table) -> None:
    """Threads commit, roll back and look at once: all are told the same end."""
    for turn in range(30):
        txn = client.new_transaction()
        txn.insert(table, (turn, None))
        txn.flush()
        meet = threading.Barrier(6)

        def end(how: str, txn: txnkv.Transaction = txn, meet: Any = meet) -> Any:
            meet.wait(60)
            try:
                return how, getattr(txn, how)()
            except txnkv.InvalidTxnStateError:
                return how, "refused"

        with ThreadPoolExecutor(6) as threads:
            asked = [threads.submit(end, how) for how in ["commit", "rollback"] * 3]
            told = {one.result(60) for one in asked}
        there = table.get(turn) is not None
        assert txn.state is (COMMITTED if there else ABORTED)
        won, lost = ("commit", "rollback") if there else ("rollback", "commit")
        assert {answer for how, answer in told if how == lost} == {"refused"}
        assert "refused" not in {answer for how, answer in told if how == won}
        assert len(told) == 2


def test_a_rollback_takes_nothing_from_a_commit_that_flushes(
    client: txnkv.Client, table: txnkv.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dropped the rows behind the messages that were flushed; the messages were committed."""
    topic = client.create_topic("e")
    txn = client.new_transaction()
    txn.insert(table, (1, "a"))
    txn.send(topic, b"1")
    txn.send(topic, b"2")
    flushing, go_on, dropped, committed = (threading.Event() for _ in range(4))
    flush_runs, abort = Session._flush_runs, txnkv.Transaction.abort_for

    def held(*args: Any, **options: Any) -> Any:
        flushing.set()
        assert go_on.wait(60)
        return flush_runs(*args, **options)

    def late(*args: Any) -> None:
        dropped.set()
        assert committed.wait(60)
        abort(*args)

    monkeypatch.setattr(Session, "_flush_runs", held)
    monkeypatch.setattr(txnkv.Transaction, "abort_for", late)
    with ThreadPoolExecutor(2) as threads:
        commit = threads.submit(txn.commit)
        assert flushing.wait(60)
        rollback = threads.submit(txn.rollback)
        dropped.wait(0.5)
        go_on.set()
        commit.result(60)
        committed.set()
        with pytest.raises(txnkv.InvalidTxnStateError, match="COMMITTED"):
            rollback.result(60)
    assert table.get(1) == {"id": 1, "v": "a"}
    found = topic.consumer().poll(timeout=0)
    assert [message.value for message in found] == [b"1", b"2"]


@pytest.mark.parametrize("call", ["scan", "get_many"])
def test_a_read_while_it_outgrows_memory(
    client: txnkv.Client, table: txnkv.Table, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The rows of the transaction were in neither: not in memory any more, nor staged yet."""
    txn = client.new_transaction()
    txn.insert(table, (1, "a"))
    txn.flush()
    context, stored = txn.context, TxnContext.stored.fget
    assert stored is not None

    def outgrow() -> None:
        if context.lock.acquire(blocking=False):  # else nothing comes between
            context.lock.release()
            context.ensure_large()

    def between(self: TxnContext) -> bool:
        before = stored(self)
        if not before:
            monkeypatch.setattr(TxnContext, "stored", property(stored))
            with ThreadPoolExecutor(1) as pool:
                pool.submit(outgrow).result(60)
        return bool(before)

    monkeypatch.setattr(TxnContext, "stored", property(between))
    found = txn.scan(table).to_arrow() if call == "scan" else txn.get_many(table, [1])
    assert found.to_pylist() == [{"id": 1, "v": "a"}]


# -- what other threads add meanwhile ----------------------------------------------------


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("end", ["commit", "commit_async", "rollback"])
def test_nothing_is_added_to_one_that_ends(
    client: txnkv.Client, table: txnkv.Table, topic: txnkv.Topic, size: str, end: str
) -> None:
    """It was taken, behind the flush, and lost."""
    with client.transaction() as first:
        first.send(topic, b"0")
    subscription = topic.subscribe("s", start="earliest")
    message = subscription.receive(timeout=0)
    assert message is not None
    txn = shared(client, size)
    session = txn.new_session()
    for number in (1, 2):
        txn.upsert(table, (number, "a"))
        txn.send(topic, b"%d" % number)
        session.upsert(table, (number + 2, "a"))
        session.send(topic, b"%d" % (number + 2))
    upsert, send, more = txn.upsert, txn.send, session.upsert  # short cuts
    adds: list[Callable[[], object]] = [
        lambda: upsert(table, (9, "late")),
        lambda: more(table, (9, "late")),
        lambda: txn.delete(table, 1),
        lambda: send(topic, b"9"),
        lambda: session.send(topic, b"9"),
        lambda: txn.write(table, pa.table({"id": [9]})),
        lambda: txn.send_batch(topic, pa.table({"value": [b"9"]})),
        lambda: txn.ack(subscription, message),
    ]
    at = (
        held(txnkv.Transaction, "abort_for")
        if end == "rollback"
        else held(commit_protocols, "begin")
    )
    with at as point, ThreadPoolExecutor(1) as threads:
        ending = threads.submit(getattr(txn, end))
        assert point.there.wait(60)
        word = "rolled back" if end == "rollback" else "committed"
        for add in adds:
            with pytest.raises(txnkv.InvalidTxnStateError, match=f"is being {word}"):
                add()
        point.go_on.set()
        future = ending.result(60)
        if end == "commit_async":
            future.result(60)
    for add in adds:
        with pytest.raises(txnkv.InvalidTxnStateError, match="is not open"):
            add()
    expected = ([], [0]) if end == "rollback" else ([1, 2, 3, 4], [0, 1, 2, 3, 4])
    assert committed(table, topic) == expected


def test_nothing_is_added_behind_the_call_of_commit_async(
    client: txnkv.Client, table: txnkv.Table, topic: txnkv.Topic
) -> None:
    """A large one commits on a thread, and was open until that came to it."""
    txn = shared(client, "large")
    txn.upsert(table, (1, "a"))
    with held(commit_protocols, "commit_large") as commit:
        future = txn.commit_async()
        with pytest.raises(txnkv.InvalidTxnStateError):
            txn.upsert(table, (2, "late"))
        with pytest.raises(txnkv.InvalidTxnStateError):
            txn.send(topic, b"2")
        commit.go_on.set()
        future.result(60)
    assert committed(table, topic) == ([1], [])


@pytest.mark.parametrize("size", ["in memory", "small", "large"])
@pytest.mark.parametrize("end", ["commit", "commit_async", "start_commit"])
def test_one_that_is_refused_is_added_to_again(
    client: txnkv.Client, table: txnkv.Table, topic: txnkv.Topic, size: str, end: str
) -> None:
    table.insert((1, "there"))
    txn = client.new_transaction() if size == "in memory" else shared(client, size)
    txn.insert(table, (1, "refused"))
    ends: dict[str, Callable[[], object]] = {
        "commit": txn.commit,
        "commit_async": lambda: txn.commit_async().result(60),
        "start_commit": txn.start_commit,
    }
    with pytest.raises((txnkv.RowErrors, txnkv.InvalidTxnStateError)):
        ends[end]()
    if end == "start_commit":
        with suppress(txnkv.RowErrors):
            txn.flush()
    txn.upsert(table, (2, "a"))
    txn.upsert(table, (3, "a"))
    txn.send(topic, b"2")
    txn.send(topic, b"3")
    txn.commit()
    assert committed(table, topic) == ([1, 2, 3], [2, 3])


class Slow(tzinfo):
    """Holds up who converts a time in it, once."""

    def __init__(self) -> None:
        self.held = Held(lambda: timedelta(0))

    def utcoffset(self, _: object) -> timedelta:
        found: timedelta = self.held()
        return found

    def dst(self, _: object) -> None:
        return None


@pytest.mark.parametrize("what", ["row", "message"])
@pytest.mark.parametrize("do", ["get", "commit", "commit_async"])
def test_what_is_converted_while_another_thread_flushes(
    client: txnkv.Client, what: str, do: str
) -> None:
    """It was added to what had been flushed already: by a reader or a commit, and lost."""
    columns: dict[str, Any] = {"id": "int64", "at": pa.timestamp("us", "UTC")}
    table = client.create_table("times", txnkv.Schema(columns, primary_key=["id"]))
    topic = client.create_topic("times", value_schema=columns)
    txn = shared(client, "small")
    slow = Slow()

    def add(id: int, zone: Any) -> None:
        value = {"id": id, "at": datetime(2026, 1, 1, tzinfo=zone)}
        if what == "row":
            txn.upsert(table, value)
        else:
            txn.send(topic, value)

    known = datetime.now().astimezone().tzinfo
    add(1, known)
    add(2, known)  # by a short cut from here on
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(add, 3, slow)
        assert slow.held.there.wait(60)
        if do == "get":
            assert txn.get(table, 9) is None
        else:
            found: Any = getattr(txn, do)()
            if do == "commit_async":
                found.result(60)
        slow.held.go_on.set()
        if do == "get":
            late.result(60)
            txn.commit()
        else:
            with pytest.raises(txnkv.InvalidTxnStateError):
                late.result(60)
    ids = [row["id"] for row in table.scan(ordered=True)]
    if what == "message":
        ids = [message.value["id"] for message in topic.consumer().poll(timeout=0)]
    assert ids == ([1, 2, 3] if do == "get" else [1, 2])


@pytest.mark.parametrize("limit", [None, 1 << 20])
def test_a_short_cut_that_a_thread_has_in_hand_takes_nothing_behind_a_flush(
    client: txnkv.Client, table: txnkv.Table, limit: int | None
) -> None:
    """As of a thread that stood still between the look at it and the call."""
    txn = client.new_transaction()
    session = txn.new_session(buffer_bytes=limit)
    session.upsert(table, (1, "a"))
    adders = [session._rows.more]
    session.delete(table, 5)
    session.upsert(table, (2, "a"))
    adders.append(session._rows.more)
    assert session.pending_errors() == []
    with pytest.raises(txnkv.RowErrors):
        session.flush()
    for number, adder in enumerate(adders, start=3):
        adder((number, "a"))
    txn.commit()
    assert [row["id"] for row in table.scan(ordered=True)] == [1, 2, 3, 4]
    for adder in adders:
        with pytest.raises(txnkv.InvalidTxnStateError):
            adder((9, "late"))
