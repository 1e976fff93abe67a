"""Threads and processes at the same keys and at one commit: who wins, who sees what."""

from __future__ import annotations

import threading
from typing import Any

import pyarrow as pa
import pytest

import txnkv


def test_conflict_is_retriable_and_names_the_key(client: txnkv.Client, table: txnkv.Table) -> None:
    first, second = client.new_transaction(), client.new_transaction()
    for txn in (first, second):
        txn.insert(table, (7, None))
    first.commit()
    with pytest.raises(txnkv.TransactionConflictError) as caught:
        second.commit()
    assert caught.value.retriable
    assert "table 't', key 7" in str(caught.value)
    assert "run it again" in str(caught.value)


def test_keys_that_two_processes_staged_unseen(
    client: txnkv.Client, table: txnkv.Table, process: Any, now: Any
) -> None:
    """Each checked before the other staged: RowErrors at commit, and it stays OPEN."""
    txn = client.new_transaction()
    code = """
        from txnkv.storage.seam import arm
        def meet():
            say("checked")
            wait()
        arm("stage.claimed", meet)
        with txnkv.Transaction.deserialize(client, token) as txn:
            for id in ids:
                txn.insert("t", (id, "worker"))
    """
    workers = [process(code, token=txn.serialize(), ids=ids) for ids in ([1, 2, 3], [3, 4])]
    for worker in workers:
        assert worker.hear() == "checked"
    for worker in workers:
        worker.tell()
        worker.finish()
    for _ in range(2):
        with pytest.raises(txnkv.RowErrors) as caught:
            txn.commit()
        (error,) = caught.value.errors
        assert (error.op, error.table, error.key) == ("insert", "t", 3)
        assert isinstance(error.error, txnkv.AlreadyPresentError)
        assert "two workers" in str(error)
        assert txn.state is txnkv.TxnState.OPEN
    txn.rollback()
    assert table.count() == 0


@pytest.mark.parametrize("who", ["threads", "processes"])
def test_many_writers_of_the_same_keys(
    client: txnkv.Client, table: txnkv.Table, process: Any, who: str
) -> None:
    """Every key goes to one of them, whole transactions only."""
    if who == "processes":
        code = """
            won = []
            for n in range(15):
                try:
                    with client.transaction() as txn:
                        txn.insert("t", (2 * n, me))
                        txn.insert("t", (2 * n + 1, me))
                    won.append(n)
                except (txnkv.TransactionConflictError, txnkv.RowErrors):
                    pass
            say((me, won))
        """
        others = [process(code, me=f"p{n}") for n in range(3)]
        winners = dict(other.finish() for other in others)
    else:
        winners = {}

        def run(me: str) -> None:
            won = winners[me] = []
            for n in range(15):
                try:
                    with client.transaction() as txn:
                        txn.insert(table, (2 * n, me))
                        txn.insert(table, (2 * n + 1, me))
                    won.append(n)
                except (txnkv.TransactionConflictError, txnkv.RowErrors):
                    pass

        threads = [threading.Thread(target=run, args=(f"t{n}",)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    expected = {id: me for me, won in winners.items() for n in won for id in (2 * n, 2 * n + 1)}
    found = table.scan().to_arrow().to_pydict()
    assert dict(zip(found["id"], found["v"], strict=True)) == expected
    assert sorted(expected) == list(range(30))


def test_a_reader_never_sees_a_part(client: txnkv.Client, process: Any) -> None:
    """A commit over 8 tablets of 2 tables, polled by another process: none, then all."""
    schema = txnkv.Schema({"id": "int64"}, primary_key=["id"])
    for name in ("x", "y"):
        client.create_table(name, schema, txnkv.hash_partition("id", 4))
    reader = process(
        """
        x, y = client.table("x"), client.table("y")
        seen = set()
        say("reading")
        while True:
            with client.snapshot() as snapshot:
                counts = tuple(t.count(snapshot=snapshot) for t in (x, y))
            later = (y.count(), x.count())
            seen.add(counts)
            assert later[0] >= counts[1] and later[1] >= counts[0]
            if counts == (800, 800):
                break
        say(seen)
        """
    )
    assert reader.hear() == "reading"
    for round_ in range(4):
        txn = client.new_transaction()
        ids = pa.array(range(round_ * 200, round_ * 200 + 200), pa.int64())
        for name in ("x", "y"):
            txn.write(name, pa.record_batch({"id": ids}))
        txn.commit()
    assert reader.finish() <= {(n, n) for n in range(0, 801, 200)}


def test_transactions_commit_at_once(client: txnkv.Client, table: txnkv.Table) -> None:
    """TestConcurrentCommitCalls, TestConcurrentTransactions: all complete, all rows."""
    txns = [client.new_transaction() for _ in range(8)]
    for n, txn in enumerate(txns):
        txn.write(table, pa.record_batch({"id": pa.array(range(n * 10, n * 10 + 10), pa.int64())}))
    stamps = [future.result(60) for future in [txn.commit_async() for txn in txns]]
    assert len(set(stamps)) == 8
    assert table.count() == 80
    for n, txn in enumerate(sorted(txns, key=lambda txn: txn.commit())):
        assert table.count(snapshot=txn.commit()) == 10 * (n + 1)


def test_one_commit_from_many_handles(
    client: txnkv.Client, table: txnkv.Table, process: Any
) -> None:
    """TestConcurrentRepeatedCommitCalls: all succeed with one timestamp, rows exactly once."""
    txn = client.new_transaction()
    txn.write(table, pa.record_batch({"id": pa.array(range(50), pa.int64())}))
    code = """
        txn = txnkv.Transaction.deserialize(client, token)
        say()
        wait()
        say(txn.commit())
    """
    others = [process(code, token=txn.serialize()) for _ in range(2)]
    for other in others:
        other.hear()
    for other in others:
        other.tell()
    futures = [txn.commit_async() for _ in range(4)]
    stamps = {future.result(60) for future in futures} | {other.finish() for other in others}
    assert len(stamps) == 1
    assert table.count() == 50


def test_counts_change_at_commit_alone(client: txnkv.Client, table: txnkv.Table) -> None:
    """TestLiveRowCount, TestSize: what is staged counts for nothing yet."""

    def seen() -> tuple[int, int, int]:
        stats = client.stats()
        return stats["tables"]["t"]["rows"], table.count(), stats["staged_row_sets"]

    txn, other = client.new_transaction(), client.new_transaction()
    txn.insert(table, (1, None))
    txn.flush()
    other.insert(table, (2, None))
    other.flush()
    assert seen() == (0, 0, 2)
    other.rollback()
    assert seen() == (0, 0, 1)
    txn.commit()
    assert seen() == (1, 1, 0)
