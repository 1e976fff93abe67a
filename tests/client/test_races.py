"""Threads and processes at the same keys and at one commit: who wins, who sees what."""

from __future__ import annotations

from functools import partial
from threading import Barrier
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from tests.threads import at_once
from txnkv.storage.faults import arm, disarm


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


@pytest.mark.parametrize(
    ("there", "ops", "told"),
    [
        ([], ("insert", "insert"), "insert"),
        ([], ("upsert", "insert"), "insert"),
        ([3], ("update", "update"), "upsert"),
        ([3], ("update", "delete"), "delete"),
        ([3], ("delete", "delete_ignore"), "delete"),
    ],
    ids=str,
)
def test_keys_that_two_processes_staged_unseen(
    client: txnkv.Client,
    table: txnkv.Table,
    process: Any,
    there: list[int],
    ops: tuple[str, str],
    told: str,
) -> None:
    """Each checked before the other staged: RowErrors at commit, and it stays OPEN."""
    for key in there:
        client.new_session().write(table, pa.table({"id": [key]}))
    txn = client.new_transaction()
    code = """
        import pyarrow as pa
        from txnkv.storage.faults import arm
        def meet():
            say("checked")
            wait()
        arm("stage.claimed", meet)
        with txnkv.Transaction.deserialize(client, token) as txn:
            txn.write("t", pa.table({"id": ids}), op)
    """
    workers = []
    for op, new in zip(ops, ([1, 2], [4, 5]), strict=True):
        ids = [3] if there else [3, *new]
        workers.append(process(code, token=txn.serialize(), ids=ids, op=op))
        assert workers[-1].hear() == "checked"
    for worker in workers:
        worker.tell()
        worker.finish()
    for _ in range(2):
        with pytest.raises(txnkv.RowErrors) as caught:
            txn.commit()
        (error,) = caught.value.errors
        assert (error.op, error.table, error.key) == (told, "t", 3)
        assert isinstance(error.error, txnkv.AlreadyPresentError)
        assert "two workers" in str(error)
        assert not caught.value.mendable
        assert txn.state is txnkv.TxnState.OPEN
    txn.rollback()
    assert [row["id"] for row in table.scan()] == there


@pytest.mark.parametrize("op", ["insert", "insert_ignore", "upsert"])
def test_keys_that_threads_wrote_unseen_are_told_once(
    client: txnkv.Client, table: txnkv.Table, op: str
) -> None:
    """By the keys of the rows, not those of an index; what is written later does not mend it."""
    client.create_index(table, ["v"])
    txn = client.new_transaction()
    handles = [txnkv.Transaction.deserialize(client, txn.serialize()) for _ in range(3)]
    arm("stage.claimed", Barrier(len(handles), timeout=60).wait)
    rows = pa.table({"id": [1, 2], "v": ["x", "x"]})
    at_once(*(partial(handle.write, table, rows, op) for handle in handles))
    disarm("stage.claimed")
    for _ in range(2):
        with pytest.raises(txnkv.RowErrors, match=r"2 rows refused, .* can only be") as caught:
            txn.commit()
        assert [(error.table, error.key) for error in caught.value.errors] == [("t", 1), ("t", 2)]
        assert "Give each key to one worker" in str(caught.value)
        txn.write(table, rows, "upsert")
    with pytest.raises(txnkv.RowErrors, match=r"rolled back with all others.*one worker"), txn:
        pass
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

        at_once(*(partial(run, f"t{n}") for n in range(4)))
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
    for one in (txn, other):
        one.serialize()  # what they write is staged
    txn.insert(table, (1, None))
    txn.flush()
    other.insert(table, (2, None))
    other.flush()
    assert seen() == (0, 0, 2)
    other.rollback()
    assert seen() == (0, 0, 1)
    txn.commit()
    assert seen() == (1, 1, 0)


@pytest.mark.parametrize("size", ["small", "bulk", "both"])
def test_no_change_is_lost(
    client: txnkv.Client, table: txnkv.Table, process: Any, size: str
) -> None:
    """Processes count up the same rows, in bulk and one by one: as often as they were told."""
    client.new_session().write(table, pa.table({"id": range(20), "v": ["0"] * 20}))
    code = """
        import pyarrow as pa, random
        rng = random.Random(me)
        done = 0
        def up(txn):
            if bulk:
                txn.serialize()
                rows = txn.scan("t", where=[("id", "<", 10)]).to_arrow().to_pylist()
                new = pa.table({"id": [r["id"] for r in rows], "v": [str(int(r["v"]) + 1) for r in rows]})
                txn.write("t", new, rng.choice(["update", "upsert"]))
            else:
                id = rng.randrange(8, 12)
                v = txn.get("t", id)["v"]
                txn.update("t", {"id": id, "v": str(int(v) + 1)})
                return id
        ups = {}
        for _ in range(rounds):
            id = client.run(up, attempts=200)
            ups[id] = ups.get(id, 0) + 1
        say(ups)
    """  # noqa: E501
    kinds = {"small": [False] * 3, "bulk": [True] * 3, "both": [True, False, False]}[size]
    others = [
        process(code, me=n, bulk=bulk, rounds=6 if bulk else 20) for n, bulk in enumerate(kinds)
    ]
    expected = dict.fromkeys(range(20), 0)
    for other in others:
        for id, count in other.finish().items():
            for key in range(10) if id is None else [id]:
                expected[key] += count
    found = {row["id"]: int(row["v"]) for row in table.scan()}
    assert found == expected


def test_a_reader_sees_all_of_an_update_or_nothing(client: txnkv.Client, process: Any) -> None:
    """Bulk commits replace, delete and add rows; each commit is uniform, and is seen so while
    it is being finalized, flushed or compacted.
    """
    schema = txnkv.Schema({"id": "int64", "n": "int64"}, primary_key=["id"])
    ids = pa.array(range(300), pa.int64())
    table = client.create_table("x", schema, txnkv.hash_partition("id", 3))
    client.new_session().write(table, pa.table({"id": ids, "n": pa.repeat(0, 300)}))
    reader = process(
        """
        x = client.table("x")
        seen = set()
        say("reading")
        while True:
            with client.snapshot() as snapshot:
                rows = x.scan(snapshot=snapshot).to_arrow()
                one = x.get(4, snapshot=snapshot)
                some = x.get_many(range(300), snapshot=snapshot)
                count = x.count(snapshot=snapshot)
            values = set(rows["n"].to_pylist())
            assert len(values) == 1 and rows.num_rows == count, (values, rows.num_rows, count)
            assert len(set(rows["id"].to_pylist())) == count
            assert (one["n"],) == tuple(values)
            assert set(some["n"].drop_null().to_pylist()) == values
            seen |= values
            if values == {12}:
                break
        say(seen)
        """
    )
    assert reader.hear() == "reading"
    for n in range(1, 13):
        with client.transaction(timeout=None) as txn:
            txn.serialize()
            gone = ids.slice(n * 10, 50)
            txn.write(table, pa.table({"id": gone}), "delete_ignore")
            new = pa.table({"id": ids, "n": pa.repeat(n, len(ids))})
            txn.write(table, new, "update_ignore" if n % 2 else "upsert")
        if n % 3 == 0:
            internals.flush(client)
    assert reader.finish() <= set(range(13))


@pytest.mark.parametrize("size", ["small", "bulk"])
def test_a_commit_that_is_not_durable_yet_is_a_conflict(
    client: txnkv.Client, table: txnkv.Table, process: Any, size: str
) -> None:
    """It can be seen in status.db while its writer waits for the disk; no snapshot has it yet,
    but who commits the same key comes after it.
    """
    client.new_session().write(table, pa.table({"id": [1, 2]}))
    txn = client.new_transaction()
    if size == "bulk":
        txn.serialize()
    txn.write(table, pa.table({"id": [2], "v": ["lost"]}), "update")
    other = process(
        """
        from txnkv.storage.faults import arm
        def meet():
            say("unsynced")
            wait()
        with client.transaction() as txn:
            txn.update("t", {"id": 2, "v": "first"})
            txn.flush()
            say("ready")
            wait()
            arm("status.unsynced", meet)
        """
    )
    assert other.hear() == "ready"

    def commit_the_other() -> None:
        other.tell()
        assert other.hear() == "unsynced"

    if size == "bulk":
        arm("commit.validated", commit_the_other)
    else:
        commit_the_other()
    with pytest.raises(txnkv.TransactionConflictError, match="key 2"):
        txn.commit()
    other.tell()
    other.finish()
    assert table.get(2) == {"id": 2, "v": "first"}
