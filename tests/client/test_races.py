"""Threads and processes at the same keys and at one commit: who wins, who sees what."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import Barrier
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from tests.threads import at_once, committed, held, shared, still_waits
from txnkv.storage.faults import arm, disarm
from txnkv.tables.tablets import TabletView
from txnkv.transaction import commit_protocols
from txnkv.transaction.context import TxnContext


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
        ([], ("insert", "insert"), "write"),
        ([], ("insert", "upsert"), "write"),
        ([3], ("update", "update"), "write"),
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


# -- threads that share a transaction --------------------------------------------------


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("what", ["write_rows", "send"])
@pytest.mark.parametrize("end", ["commit", "commit_async", "start_commit"])
def test_what_another_thread_flushes_is_in_the_commit(
    client: txnkv.Client, table: txnkv.Table, topic: txnkv.Topic, size: str, what: str, end: str
) -> None:
    """Its buffer was empty, and so was taken for flushed."""
    txn = shared(client, size)
    txn.upsert(table, (1, "a"))
    txn.send(topic, b"1")
    with held(TxnContext, what) as flush, ThreadPoolExecutor(2) as threads:
        reader = threads.submit(txn.get, table, 7)
        assert flush.there.wait(60)
        if end == "start_commit":
            with pytest.raises(txnkv.InvalidTxnStateError, match="not flushed"):
                txn.start_commit()
        ending = threads.submit(txn.commit)
        still_waits(ending)
        flush.go_on.set()
        assert ending.result(60) > txn.snapshot
        with suppress(txnkv.InvalidTxnStateError):
            reader.result(60)
    assert committed(table, topic) == ([1], [1])


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("what", ["get", "get_many", "scan", "delete"])
def test_who_wrote_sees_what_another_thread_flushes(
    client: txnkv.Client, table: txnkv.Table, size: str, what: str
) -> None:
    """Its row was neither in its buffer nor in the transaction."""
    txn = shared(client, size)
    txn.upsert(table, (1, "a"))
    asks: dict[str, Callable[[], Any]] = {
        "get": lambda: txn.get(table, 1),
        "get_many": lambda: txn.get_many(table, [1]).to_pylist()[0],
        "scan": lambda: txn.scan(table).to_arrow().to_pylist()[0],
        "delete": lambda: txn.write(table, pa.table({"id": [1]}), "delete").deleted,
    }
    with held(TxnContext, "write_rows") as flush, ThreadPoolExecutor(2) as threads:
        reader = threads.submit(txn.get, table, 7)
        assert flush.there.wait(60)
        found = threads.submit(asks[what])
        still_waits(found)
        flush.go_on.set()
        assert found.result(60) == (1 if what == "delete" else {"id": 1, "v": "a"})
        reader.result(60)
    txn.commit()
    assert table.count() == (what != "delete")


def test_threads_that_count_up_keys_of_their_own(client: txnkv.Client, table: txnkv.Table) -> None:
    """Their rows were staged by each other, unseen: two workers wrote the key, it said."""
    txn = shared(client, "large")

    def count(key: int) -> None:
        for n in range(8):
            row = txn.get(table, key)
            assert (row and row["v"]) == (str(n - 1) if n else None)
            txn.upsert(table, (key, str(n)))

    at_once(*(partial(count, key) for key in range(3)))
    txn.commit()
    assert table.scan(ordered=True).to_arrow()["v"].to_pylist() == ["7", "7", "7"]


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))]
)
def test_what_is_taken_is_committed_and_nothing_else(
    client: txnkv.Client, table: txnkv.Table, topic: txnkv.Topic, seed: int
) -> None:
    """Threads write, send, read, flush; one commits in the midst of it."""
    chance, taken = random.Random(seed), [list[int](), list[int]()]
    for round_ in range(24):
        txn = client.new_transaction() if round_ % 3 else shared(client, "large")

        def work(first: int, of: Any = txn, pace: float = chance.random()) -> None:
            dice = random.Random(first)
            with suppress(txnkv.InvalidTxnStateError):
                session = of.new_session(flush_mode="auto_background")
                for id in range(first, first + 1000):
                    by = of if dice.random() < 0.7 else session
                    if dice.random() < 0.5:
                        by.upsert(table, (id, "a"))
                        taken[0].append(id)
                    else:
                        by.send(topic, b"%d" % id)
                        taken[1].append(id)
                    if dice.random() < pace / 3:
                        assert of.get(table, id) or id not in taken[0]
                    elif dice.random() < pace / 9:
                        of.flush()

        with ThreadPoolExecutor(3) as threads:
            workers = [threads.submit(work, 10_000 * round_ + 1000 * n) for n in range(3)]
            wait = sum(map(len, taken)) + chance.choice([0, 1, 3, 100])
            while sum(map(len, taken)) < wait and not all(each.done() for each in workers):
                pass
            txn.commit() if round_ % 2 else txn.commit_async().result(60)
            for each in workers:
                each.result(60)
    assert committed(table, topic) == (sorted(taken[0]), sorted(taken[1]))


# -- beside its end --------------------------------------------------------------------


@pytest.mark.parametrize("what", ["get", "get_many", "scan", "update"])
def test_who_looks_while_another_thread_commits_sees_the_rows(
    client: txnkv.Client, table: txnkv.Table, what: str
) -> None:
    """Staged rows had the stamp of the commit, once a reader of the table had learned of it."""
    txn = shared(client, "large")
    txn.upsert(table, (1, "a"))
    txn.flush()
    asks: dict[str, Callable[[], Any]] = {
        "get": lambda: txn.get(table, 1),
        "get_many": lambda: txn.get_many(table, [1]).to_pylist()[0],
        "scan": lambda: txn.scan(table).to_arrow().to_pylist()[0],
        "update": lambda: txn.write(table, pa.table({"id": [1], "v": ["b"]}), "update").updated,
    }
    with held(TabletView, "of") as look, ThreadPoolExecutor(1) as threads:
        found = threads.submit(asks[what])
        assert look.there.wait(60)
        txn.commit()
        assert table.get(1) == {"id": 1, "v": "a"}
        look.go_on.set()
        if what == "update":
            with pytest.raises(txnkv.InvalidTxnStateError):
                found.result(60)
        else:
            assert found.result(60) == {"id": 1, "v": "a"}


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("what", ["get_many", "scan"])
def test_who_looks_behind_its_end_is_refused(
    client: txnkv.Client, table: txnkv.Table, what: str, end: str
) -> None:
    txn = shared(client, "small")
    txn.upsert(table, (1, "a"))
    with held(TxnContext, "view") as look, ThreadPoolExecutor(1) as threads:
        args = [[1]] if what == "get_many" else []
        found = threads.submit(lambda: list(getattr(txn, what)(table, *args)))
        assert look.there.wait(60)
        getattr(txn, end)()
        look.go_on.set()
        with pytest.raises(txnkv.InvalidTxnStateError, match="cannot read"):
            found.result(60)


def test_a_rollback_behind_commit_async_finds_it_committed(
    client: txnkv.Client, table: txnkv.Table, topic: txnkv.Topic
) -> None:
    """A large one was rolled back before the thread came to it, and the future raised."""
    txn = shared(client, "large")
    txn.upsert(table, (1, "a"))
    with held(commit_protocols, "commit_large") as commit, ThreadPoolExecutor(1) as threads:
        future = txn.commit_async()
        back = threads.submit(txn.rollback)
        still_waits(back)
        commit.go_on.set()
        assert future.result(60) > txn.snapshot
        with pytest.raises(txnkv.InvalidTxnStateError, match="is COMMITTED"):
            back.result(60)
    assert committed(table, topic) == ([1], [])


@pytest.mark.parametrize("end", ["commit", "start_commit"])
def test_what_comes_between_two_commits_is_in_the_one_that_goes_on(
    client: txnkv.Client,
    table: txnkv.Table,
    topic: txnkv.Topic,
    monkeypatch: pytest.MonkeyPatch,
    end: str,
) -> None:
    """The first failed, and the second took no row that was added since."""
    txn, orchestrator = shared(client, "large"), internals.coordinator(client).orchestrator
    txn.upsert(table, (1, "a"))

    def fail(txn_id: int) -> Any:
        monkeypatch.undo()
        raise txnkv.UnavailableError("no disk")

    with held(commit_protocols, "_start_large") as first, ThreadPoolExecutor(1) as threads:
        refused = txn.commit_async()
        assert first.there.wait(60)
        with held(commit_protocols, "_start_large") as second:
            other = threads.submit(getattr(txn, end))
            assert second.there.wait(60)
            monkeypatch.setattr(orchestrator, "start_commit", fail)
            first.go_on.set()
            with pytest.raises(txnkv.UnavailableError):
                refused.result(60)
            txn.upsert(table, (2, "b"))
            if end == "start_commit":
                txn.flush()
            second.go_on.set()
            other.result(60)
    txn.commit()
    assert committed(table, topic) == ([1, 2], [])
