"""Waiting for partition locks: nothing is lost, nobody starves, and no lock outlives its owner."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tools.isolation.interleaving import LEVELS, SCHEMA


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


def test_wait_for_a_lock_ends_with_the_patience(client: txnkv.Client, table: txnkv.Table) -> None:
    """BeginTxnLockRetry: the older small one is told, stays open, and may commit later."""
    older = client.new_transaction(lock_timeout=0.05)
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
