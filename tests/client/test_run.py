"""client.run: what it repeats, how often, and how old the attempts are."""

from __future__ import annotations

import threading
from typing import Any

import pyarrow as pa
import pytest

import txnkv


def test_run_returns_the_result(client: txnkv.Client, table: txnkv.Table) -> None:
    assert client.run(lambda txn: txn.insert(table, (1, None)) or "done") == "done"
    assert table.count() == 1


def test_run_tries_again_what_is_retriable(client: txnkv.Client, table: txnkv.Table) -> None:
    attempts: list[txnkv.Transaction] = []

    def work(txn: txnkv.Transaction) -> int:
        attempts.append(txn)
        rows = txn.scan(table).to_arrow().num_rows
        txn.insert(table, (rows, None))
        if len(attempts) < 3:
            with client.new_session() as session:
                session.insert(table, (rows, "first"))
        return rows

    assert client.run(work) == 2
    assert [txn.state.name for txn in attempts] == ["ABORTED", "ABORTED", "COMMITTED"]
    assert len({txn.id for txn in attempts}) == 3
    assert len({txn.age for txn in attempts}) == 1  # it keeps its age
    assert len({txn.snapshot for txn in attempts}) == 3
    assert table.count() == 3


def test_run_gives_up_after_its_attempts(client: txnkv.Client, table: txnkv.Table) -> None:
    tried: list[int] = []

    def work(txn: txnkv.Transaction) -> None:
        tried.append(1)
        txn.insert(table, (len(tried), None))
        with client.new_session() as session:
            session.insert(table, (len(tried), None))

    with pytest.raises(txnkv.TransactionConflictError):
        client.run(work, attempts=3)
    assert len(tried) == 3


@pytest.mark.parametrize("error", [ValueError, txnkv.SchemaError, txnkv.RowErrors])
def test_run_does_not_repeat_what_is_not_retriable(
    client: txnkv.Client, table: txnkv.Table, error: type[Exception]
) -> None:
    tried: list[txnkv.Transaction] = []

    def work(txn: txnkv.Transaction) -> None:
        tried.append(txn)
        txn.write(table, pa.record_batch({"id": pa.array([1], pa.int64())}))
        raise error([]) if error is txnkv.RowErrors else error("no")

    with pytest.raises(error):
        client.run(work)
    assert [txn.state.name for txn in tried] == ["ABORTED"]
    assert table.count() == 0


def test_run_wants_an_attempt(client: txnkv.Client) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        client.run(lambda txn: None, attempts=0)


def test_run_grows_old_enough_for_its_lock(client: txnkv.Client, table: txnkv.Table) -> None:
    """Dead for being younger, a retry is as old as its first attempt, and waits."""
    holder = client.new_transaction(locking="partition")
    holder.insert(table, (1, None))
    holder.flush()
    began = threading.Event()
    ages: list[int] = []

    def work(txn: txnkv.Transaction) -> None:
        ages.append(txn.age)
        began.set()
        txn.insert(table, (2, None))
        txn.flush()

    runner = threading.Thread(
        target=client.run, args=(work,), kwargs={"locking": "partition", "attempts": 100}
    )
    runner.start()
    began.wait(10)
    holder.commit()
    younger = client.new_transaction(locking="partition")
    runner.join(20)
    assert len(set(ages)) == 1
    assert ages[0] < younger.age
    assert table.count() == 2


def test_run_asks_for_the_outcome_when_it_is_unknown(
    client: txnkv.Client, table: txnkv.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CommitOutcomeUnknownError: run never runs blindly again."""
    commit = txnkv.Transaction.commit
    tried: list[int] = []

    def lost(txn: txnkv.Transaction) -> Any:
        commit(txn)
        raise txnkv.CommitOutcomeUnknownError("the answer was lost", int(txn.id))

    monkeypatch.setattr(txnkv.Transaction, "commit", lost)

    def work(txn: txnkv.Transaction) -> str:
        tried.append(1)
        txn.insert(table, (1, None))
        return "done"

    assert client.run(work) == "done"
    assert tried == [1]
    assert table.count() == 1
