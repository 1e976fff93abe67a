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
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from txnkv.storage.faults import arm, disarm
from txnkv.transaction.context import TxnContext
from txnkv.transaction.local_state import MOVES, Local, LocalState
from txnkv.transaction.session import Session

OPEN, COMMITTING = txnkv.TxnState.OPEN, txnkv.TxnState.COMMIT_IN_PROGRESS
ABORTED, COMMITTED = txnkv.TxnState.ABORTED, txnkv.TxnState.COMMITTED
SCHEMA = txnkv.Schema({"id": "int64", "v": "string?"}, primary_key=["id"])


@pytest.mark.parametrize("to", Local)
@pytest.mark.parametrize("at", Local)
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
        return self.txn.context.write_rows(writer, "insert", [row]).inserted


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
