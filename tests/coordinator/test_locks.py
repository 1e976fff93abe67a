"""Partition locks: the table of wait-die, and the life of a lock."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import txnkv
from txnkv.coordinator import partition_locks
from txnkv.coordinator.partition_locks import Verdict
from txnkv.coordinator.status_table import TxnState

GRANTED, WAIT, DIE = Verdict.GRANTED, Verdict.WAIT, Verdict.DIE

# who asks, who holds the lock, how it asks, the verdict. Ages: old < mid < young.
WAIT_DIE = [
    ("mid", None, "lock", GRANTED),
    ("mid", "mid", "lock", GRANTED),
    ("old", "mid", "lock", WAIT),
    ("young", "mid", "lock", DIE),
    ("mid", None, "meet", GRANTED),
    ("mid", "mid", "meet", GRANTED),
    ("old", "mid", "meet", WAIT),
    ("young", "mid", "meet", DIE),
    ("nobody", None, "meet", GRANTED),
    ("nobody", "young", "meet", DIE),
    ("nobody", "old", "meet", DIE),
]


@pytest.mark.parametrize(
    ("who", "holder", "how", "verdict"),
    WAIT_DIE,
    ids=[f"{who}-{how}-held-by-{holder}" for who, holder, how, _ in WAIT_DIE],
)
def test_wait_die(world: Any, who: str, holder: str | None, how: str, verdict: Verdict) -> None:
    rows = {age: _locker(world) for age in ("old", "mid", "young")}
    rows["nobody"] = None
    with world.store.status.write() as cur:
        if holder is not None:
            assert partition_locks.request(cur, rows[holder], "page", [1, 2]).verdict is GRANTED
        ask = partition_locks.request if how == "lock" else partition_locks.meet
        answer = ask(cur, rows[who], "page", [0, 2])
        assert answer.verdict is verdict
        assert answer.holder == (None if verdict is GRANTED else rows[holder].txn_id)
        if verdict is not GRANTED:  # all or none
            assert partition_locks.holder_of(cur, "page", 0) is None
        elif how == "lock":
            assert partition_locks.holder_of(cur, "page", 0) == rows[who].txn_id
            assert partition_locks.granted_at(cur, rows[who].txn_id, "page", 2) is not None


def test_age_is_the_time_of_begin_not_the_id(world: Any) -> None:
    """A retry of client.run has a new id and the age of its first attempt."""
    first, holder = _locker(world), _locker(world)
    retry = world.coordinator.write_open(world.row(locking="partition", age_ts=first.begin_ts))
    assert retry.txn_id > holder.txn_id
    with world.store.status.write() as cur:
        partition_locks.request(cur, holder, "page", [1])
        assert partition_locks.request(cur, retry, "page", [1]).verdict is WAIT


def test_equal_begin_times_are_told_apart_by_id(world: Any) -> None:
    first = _locker(world)
    second = world.coordinator.write_open(world.row(locking="partition", age_ts=first.begin_ts))
    with world.store.status.write() as cur:
        partition_locks.request(cur, first, "page", [1])
        assert partition_locks.request(cur, second, "page", [1]).verdict is DIE
        partition_locks.request(cur, second, "page", [2])
        assert partition_locks.request(cur, first, "page", [2]).verdict is WAIT


def test_taken_again_it_keeps_its_time(world: Any) -> None:
    row = _locker(world)
    with world.store.status.write() as cur:
        partition_locks.request(cur, row, "page", [1])
        first = partition_locks.granted_at(cur, row.txn_id, "page", 1)
        partition_locks.request(cur, row, "page", [1, 2])
        assert partition_locks.granted_at(cur, row.txn_id, "page", 1) == first
        assert partition_locks.granted_at(cur, row.txn_id, "page", 2) > first
        assert partition_locks.granted_at(cur, row.txn_id, "page", 3) is None


def test_locks_survive_a_restart(world: Any) -> None:
    row = _locker(world)
    world.coordinator.admit(row, "page", [1], transactional=True)
    world.restart()
    with world.store.status.read() as cur:
        assert partition_locks.holder_of(cur, "page", 1) == row.txn_id
    with pytest.raises(txnkv.TransactionLockedError, match="does not wait"):
        world.coordinator.admit(world.row(), "page", [1], transactional=False)


@pytest.mark.parametrize("end", ["commit", "abort", "expiry", "empty commit"])
def test_locks_go_with_the_end(world: Any, now: Any, end: str) -> None:
    row = _locker(world)
    world.coordinator.admit(row, "page", [1, 2], transactional=True)
    if end != "empty commit":
        world.register(row.txn_id, 1, 2)
    match end:
        case "abort":
            world.coordinator.abort(row.txn_id, "test")
        case "expiry":
            now.forward(31)
            world.round()
        case _:
            world.coordinator.orchestrator.start_commit(row.txn_id)
            world.coordinator.orchestrator.finish(row.txn_id)
    with world.store.status.read() as cur:
        assert cur.execute("SELECT count(*) FROM locks").fetchall() == [(0,)]
    world.coordinator.admit(_locker(world), "page", [1, 2], transactional=True)


@pytest.mark.parametrize("state", [s for s in TxnState if s is not TxnState.OPEN])
def test_only_open_transactions_take_locks(world: Any, state: TxnState) -> None:
    row = _locker(world)
    world.register(row.txn_id, 1)
    world.put_into(row.txn_id, state)
    with pytest.raises(txnkv.InvalidTxnStateError, match=f"not open: {state.name}"):
        world.coordinator.admit(row, "page", [5], transactional=True)
    with world.store.status.read() as cur:
        assert partition_locks.holder_of(cur, "page", 5) is None


def test_the_younger_dies(world: Any) -> None:
    """BeginTxnLockAbort: its whole transaction is aborted, retriable."""
    older, younger = _locker(world), _locker(world)
    world.coordinator.admit(older, "page", [1], transactional=True)
    with pytest.raises(txnkv.TransactionLockedError, match="wait-die") as caught:
        world.coordinator.admit(younger, "page", [1], transactional=True)
    assert caught.value.retriable
    assert world.state(younger.txn_id) is TxnState.ABORTED
    assert world.state(older.txn_id) is TxnState.OPEN


def test_the_older_waits_until_the_younger_ends(world: Any, until: Any) -> None:
    older, younger = _locker(world), _locker(world)
    world.coordinator.admit(younger, "page", [1], transactional=True)
    waiter = threading.Thread(
        target=world.coordinator.admit, args=(older, "page", [1]), kwargs={"transactional": True}
    )
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    world.coordinator.abort(younger.txn_id, "test")
    waiter.join(10)
    with world.store.status.read() as cur:
        assert partition_locks.holder_of(cur, "page", 1) == older.txn_id


def test_the_older_gives_up_and_stays_open(world: Any) -> None:
    """BeginTxnLockRetry: row error TimedOut; the transaction goes on."""
    older, younger = _locker(world), _locker(world)
    world.coordinator.admit(younger, "page", [1], transactional=True)
    with pytest.raises(txnkv.TransactionLockedError, match="younger, and did not end") as caught:
        world.coordinator.admit(older, "page", [1], transactional=True, lock_timeout=0.05)
    assert f"Transaction {older.txn_id} is still open" in str(caught.value)
    assert world.state(older.txn_id) is TxnState.OPEN
    world.coordinator.admit(older, "page", [2], transactional=True)


def test_the_wait_ends_with_the_transactions_deadline(world: Any) -> None:
    older = world.coordinator.write_open(world.row(locking="partition", timeout=0.1))
    younger = _locker(world)
    world.coordinator.admit(younger, "page", [1], transactional=True)
    with pytest.raises(txnkv.TransactionTimedOutError, match=r"timed out: page 1 is locked"):
        world.coordinator.admit(older, "page", [1], transactional=True, lock_timeout=60)
    assert world.state(older.txn_id) is TxnState.ABORTED


def test_optimistic_writers_meet_locks_but_take_none(world: Any) -> None:
    optimist, locker = world.row(), _locker(world)
    optimist = world.coordinator.write_open(optimist)
    world.coordinator.admit(optimist, "page", [1], transactional=True)
    world.coordinator.admit(locker, "page", [1], transactional=True)
    with world.store.status.read() as cur:
        assert partition_locks.holder_of(cur, "page", 1) == locker.txn_id
    late = world.coordinator.write_open(world.row())
    with pytest.raises(txnkv.TransactionLockedError, match="wait-die"):
        world.coordinator.admit(late, "page", [1], transactional=True)


def test_no_ring_of_waits(world: Any) -> None:
    """Each wants what the other has: the younger dies, the older gets it."""
    older, younger = _locker(world), _locker(world)
    world.coordinator.admit(older, "page", [1], transactional=True)
    world.coordinator.admit(younger, "page", [2], transactional=True)
    waiter = threading.Thread(
        target=world.coordinator.admit, args=(older, "page", [2]), kwargs={"transactional": True}
    )
    waiter.start()
    with pytest.raises(txnkv.TransactionLockedError, match="wait-die"):
        world.coordinator.admit(younger, "page", [1], transactional=True)
    waiter.join(10)
    with world.store.status.read() as cur:
        assert {partition_locks.holder_of(cur, "page", n) for n in (1, 2)} == {older.txn_id}


def _locker(world: Any) -> Any:
    return world.coordinator.write_open(world.row(locking="partition"))
