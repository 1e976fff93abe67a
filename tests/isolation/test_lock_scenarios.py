"""Partition locks and wait-die where small transactions and bulk loads meet.

As in Kudu's txn_write_ops-itest (BeginTxnLockAbort, BeginTxnLockRetry) and what its design says
of locks, with small transactions beside: they take no lock, and meet those of others when
they commit. Scripts as in test_hermitage.py; nobody has begun. `locking=partition` is the
locker; all of them are at both isolation levels, in one process and in two.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tools.isolation.interleaving import LEVELS, SCHEMA

LOCKED = "TransactionLockedError"

SMALL_AND_LOCKER = {
    "BeginTxnLockAbort: a younger small one dies at its commit": f"""
        1 begin locking=partition
        1 update 1 11
        1 flush
        2 begin
        2 update 2 22
        2 all -> 1=10 2=22
        2 commit -> {LOCKED}: older
        2 state -> ABORTED
        1 commit
        rows -> 1=11 2=20
    """,
    "BeginTxnLockAbort: the next try of it is no matter of the lock that is gone": f"""
        1 begin locking=partition
        1 update 1 11
        1 flush
        2 begin
        2 update 2 22
        2 commit -> {LOCKED}
        1 commit
        2 begin
        2 get 1 -> 11
        2 update 2 22
        2 commit
        rows -> 1=11 2=22
    """,
    "BeginTxnLockRetry: an older small one waits for the end of the younger": """
        2 begin
        2 update 2 22
        1 begin locking=partition
        1 update 1 11
        1 flush
        2 commit &
        2 waits
        1 commit
        2 answers
        rows -> 1=11 2=22
    """,
    "BeginTxnLockRetry: when the younger is rolled back too": """
        2 begin
        2 update 1 12
        1 begin locking=partition
        1 update 1 11
        1 flush
        2 commit &
        2 waits
        1 rollback
        2 answers
        rows -> 1=12 2=20
    """,
    "an older small one that waited for the same key conflicts": """
        2 begin
        2 update 1 12
        1 begin locking=partition
        1 update 1 11
        1 flush
        2 commit &
        2 waits
        1 commit
        2 answers -> TransactionConflictError: key 1
        rows -> 1=11 2=20
    """,
    "a small one that committed before the lock is in the locker's snapshot": """
        1 begin locking=partition
        2 begin
        2 update 1 12
        2 commit
        1 update 2 22
        1 flush
        1 get 1 -> 12
        1 commit
        rows -> 1=12 2=22
    """,
    "a locker writes what a small one wrote since it began": """
        1 begin locking=partition
        2 begin
        2 update 1 12
        2 delete 2
        2 commit
        1 insert 2 21
        1 update 1 11
        1 flush
        1 commit
        rows -> 1=11 2=21
    """,
    "a locker that read before it locked loses no update": """
        1 begin locking=partition
        1 get 1 -> 10
        2 begin
        2 update 1 12
        2 commit
        1 update 1 11
        1 commit -> TransactionConflictError: key 1
        rows -> 1=12 2=20
    """,
    "a locker that read before it locked, and nobody wrote": """
        1 begin locking=partition
        1 get 1 -> 10
        1 update 1 11
        1 commit
        rows -> 1=11 2=20
    """,
    "readers meet no lock": """
        1 begin locking=partition
        1 update 1 11
        1 flush
        2 begin
        2 all -> 1=10 2=20
        2 get 1 -> 10
        2 commit
        rows -> 1=10 2=20
        1 commit
        rows -> 1=11 2=20
    """,
    "a write of a row outside of transactions does not wait": f"""
        1 begin locking=partition
        1 update 1 11
        1 flush
        outside plain update 2 22 -> {LOCKED}: outside of a transaction does not wait
        outside plain delete 2 -> {LOCKED}: outside of a transaction does not wait
        outside load upsert 2..9 22 -> {LOCKED}: outside of a transaction does not wait
        1 commit
        outside plain update 2 22
        rows -> 1=11 2=22
    """,
    "a lock that is given back is nobody's": """
        1 begin locking=partition
        1 update 1 11
        1 flush
        1 rollback
        2 begin
        2 update 1 12
        2 commit
        rows -> 1=12 2=20
    """,
    "a small one that is rolled back while another holds the lock": """
        1 begin locking=partition
        1 update 1 11
        1 flush
        2 begin
        2 update 1 12
        2 rollback
        1 commit
        rows -> 1=11 2=20
    """,
    "a small one that outgrows itself meets the lock at once": f"""
        1 begin locking=partition
        1 update 1 11
        1 flush
        2 begin
        2 insert 1000..12999 7 -> {LOCKED}: wait-die
        2 state -> ABORTED
        1 commit
        rows -> 1=11 2=20
    """,
    "one that outgrew itself goes after a locker of other keys": """
        2 begin
        2 delete 1
        2 insert 1000..12999 7
        2 delete 1000..12999
        1 begin locking=partition
        1 update 2 22
        1 flush
        1 commit
        2 commit
        rows -> 2=22
    """,
}

LOCKERS = {
    "BeginTxnLockAbort: the younger dies at its first write": f"""
        1 begin locking=partition
        2 begin locking=partition
        1 update 1 11
        1 flush
        2 update 2 22
        2 flush -> {LOCKED}: wait-die
        2 state -> ABORTED
        1 commit
        rows -> 1=11 2=20
    """,
    "BeginTxnLockRetry: the older waits, and sees what the younger committed": """
        1 begin locking=partition
        2 begin locking=partition
        2 update 1 12
        2 delete 2
        2 insert 3 30
        2 flush
        1 upsert 3 31
        1 flush &
        1 waits
        2 commit
        1 answers
        1 all -> 1=12 3=31
        1 commit
        rows -> 1=12 3=31
    """,
    "BeginTxnLockRetry: a row of the younger stands in the older's way": """
        1 begin locking=partition
        2 begin locking=partition
        2 insert 3 30
        2 flush
        1 insert 3 31
        1 flush &
        1 waits
        2 commit
        1 answers -> RowErrors: key 3: a row with this key is in the table
        1 commit
        rows -> 1=10 2=20 3=30
    """,
    "the older waits for one that is rolled back": """
        1 begin locking=partition
        2 begin locking=partition
        2 delete 1
        2 flush
        1 update 1 11
        1 flush &
        1 waits
        2 rollback
        1 answers
        1 commit
        rows -> 1=11 2=20
    """,
    "an optimistic load of other keys that came first": """
        2 begin large
        2 update 2 22
        1 begin locking=partition
        1 update 1 11
        1 flush
        1 commit
        2 commit
        rows -> 1=11 2=22
    """,
    "an optimistic load of the same key that came first": """
        2 begin large
        2 update 1 12
        1 begin locking=partition
        1 update 1 11
        1 flush
        1 commit
        2 commit -> TransactionConflictError: key 1
        rows -> 1=11 2=20
    """,
}


@pytest.mark.parametrize("cast", ["small", "elsewhere"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("script", SMALL_AND_LOCKER.values(), ids=SMALL_AND_LOCKER.keys())
def test_small_and_locker(perform: Callable[..., None], script: str, level: str, cast: str) -> None:
    perform(script, level, cast, begun=False)


@pytest.mark.parametrize("cast", ["small", "elsewhere"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("script", LOCKERS.values(), ids=LOCKERS.keys())
def test_lockers(perform: Callable[..., None], script: str, level: str, cast: str) -> None:
    perform(script, level, cast, begun=False)


@pytest.fixture
def counters(client: txnkv.Client) -> txnkv.Table:
    """Rows 0..3 of 0, in as many tablets as hashing makes of them."""
    table = client.create_table("counters", SCHEMA, txnkv.hash_partition("id", 2))
    with client.transaction() as txn:
        for id in range(4):
            txn.insert(table, (id, 0))
    return table


@pytest.mark.parametrize("level", LEVELS)
def test_no_increment_is_lost_between_lockers_and_small_ones(
    client: txnkv.Client, counters: txnkv.Table, level: str
) -> None:
    """By age nobody starves: all get through, with the retries of `run`."""
    failed: list[BaseException] = []

    def work(locking: str, first: int) -> None:
        def increment(txn: txnkv.Transaction) -> None:
            if locking == "partition":
                txn.upsert(counters, (100 + first, 0))  # takes the lock before it reads
                txn.flush()
            for id in range(4):
                row = txn.get(counters, id)
                assert row is not None
                txn.update(counters, {"id": id, "value": row["value"] + 1})

        try:
            for _ in range(8):
                client.run(increment, attempts=1000, isolation=level, locking=locking)
        except BaseException as error:
            failed.append(error)

    threads = [
        threading.Thread(target=work, args=(locking, number))
        for number, locking in enumerate(["partition", "optimistic", "partition", "optimistic"])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failed == []
    assert not any(thread.is_alive() for thread in threads)
    found = counters.scan(where=[("id", "<", 4)], ordered=True).to_arrow()
    assert found["value"].to_pylist() == [32] * 4


def test_wait_for_a_lock_ends_with_the_patience(
    client: txnkv.Client, table: txnkv.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BeginTxnLockRetry: the older small one is told, stays open, and may commit later."""
    monkeypatch.setattr("txnkv.small_commit._LOCK_WAIT", 0.05)
    older = client.new_transaction()
    older.insert(table, (1, "older"))
    younger = client.new_transaction(locking="partition")
    younger.insert(table, (2, "younger"))
    younger.flush()
    with pytest.raises(txnkv.TransactionLockedError, match="still open"):
        older.commit()
    assert older.state is txnkv.TxnState.OPEN
    younger.commit()
    older.commit()
    assert table.count() == 2


def test_run_waits_out_a_lock(client: txnkv.Client, table: txnkv.Table) -> None:
    """Dead for being younger than the holder, a retry comes through when the holder ends."""
    holder = client.new_transaction(locking="partition")
    holder.insert(table, (1, "holder"))
    holder.flush()
    tried = threading.Event()

    def insert(txn: txnkv.Transaction) -> None:
        if txn.state is txnkv.TxnState.OPEN:
            txn.insert(table, (2, "small"))
        tried.set()

    runner = threading.Thread(target=client.run, args=(insert,), kwargs={"attempts": 1000})
    runner.start()
    assert tried.wait(10)
    holder.commit()
    runner.join(30)
    assert not runner.is_alive()
    assert sorted(table.scan(["id"]).to_arrow()["id"].to_pylist()) == [1, 2]


def test_other_tablets_are_free(client: txnkv.Client) -> None:
    """A small transaction meets the locks of the tablets that it wrote to, no others."""
    table = client.create_table("days", SCHEMA, txnkv.range_partition("id", [100]))
    locker = client.new_transaction(locking="partition")
    locker.insert(table, (1, 1))
    locker.flush()
    with client.transaction() as txn:
        txn.insert(table, (101, 1))
    both = client.new_transaction()
    both.insert(table, (102, 1))
    both.insert(table, (2, 1))
    with pytest.raises(txnkv.TransactionLockedError):
        both.commit()
    locker.commit()
    assert table.scan(ordered=True).to_arrow()["id"].to_pylist() == [1, 101]


def test_lock_of_a_dead_process_goes_and_small_ones_go_on(
    client: txnkv.Client, table: txnkv.Table, process: Callable[..., Any]
) -> None:
    dead = process(
        """
        txn = client.new_transaction(locking="partition")
        txn.insert("t", (1, "dead"))
        txn.flush()
        say(txn.id)
        wait()
        """
    )
    id = dead.hear()
    dead.kill()
    small = client.new_transaction()
    small.insert(table, (2, "small"))
    with pytest.raises(txnkv.TransactionLockedError):
        small.commit()
    client.abort_transaction(id)
    with client.transaction() as txn:
        txn.insert(table, (2, "small"))
    assert table.scan(["id"]).to_arrow()["id"].to_pylist() == [2]


def test_lock_of_one_that_expired_goes(
    client: txnkv.Client, table: txnkv.Table, by_hand: Callable[[txnkv.Client], None], now: Any
) -> None:
    locker = client.new_transaction(locking="partition", timeout=5)
    locker.write(table, pa.table({"id": [1], "v": ["locker"]}))
    now.forward(6)
    by_hand(client)
    with client.transaction() as txn:
        txn.insert(table, (2, "small"))
    assert table.count() == 1
    with pytest.raises(txnkv.TransactionTimedOutError):
        locker.commit()
