"""Two transactions, one table: who wins, what the other is told, what is seen when."""

from __future__ import annotations

import threading
from typing import Any

import pyarrow as pa
import pytest

import txnkv

# Scripts as in the peers' tests; see conftest.
CASES = {
    "overlapping keys: the first to commit wins": """
        begin a
        begin b
        write a 1..10
        write b 10..20
        commit a
        commit b -> TransactionConflictError: key 10: another transaction committed it first
        keys -> 1 2 3 4 5 6 7 8 9 10
        state b -> ABORTED
        staged -> 0
        commit b -> InvalidTxnStateError: not open: ABORTED
        rollback b
    """,
    "the later begun may win": """
        begin a
        begin b
        write a 1
        write b 1
        commit b
        commit a -> TransactionConflictError
        keys -> 1
    """,
    "disjoint keys: both commit": """
        begin a
        begin b
        write a 1 3 5 7
        write b 2 4 6 8
        commit a
        commit b
        keys -> 1 2 3 4 5 6 7 8
    """,
    "one key of many tablets: the whole is refused": """
        begin a
        begin b
        write a 1..40 @u
        write b 100..140 @u
        write b 40 @u
        write b 1..5
        commit a
        commit b -> TransactionConflictError: table 'u', key 40
        count -> 0
        count @u -> 40
        staged -> 0
    """,
    "three at once: one wins": """
        begin a
        begin b
        begin c
        write a 1 2
        write b 2 3
        write c 3 4
        commit b
        commit a -> TransactionConflictError: key 2
        commit c -> TransactionConflictError: key 3
        keys -> 2 3
    """,
    "a conflict with a write outside of transactions": """
        begin a
        write a 1
        plain 1
        commit a -> TransactionConflictError: key 1
        keys -> 1
    """,
    "a key that came after the snapshot is not seen, and refused at commit": """
        begin a
        sees a -> none
        plain 1
        sees a -> none
        write a 1 2 -> 2
        commit a -> TransactionConflictError: key 1
        keys -> 1
    """,
    "a key that was there at the snapshot is a row error": """
        plain 1
        begin a
        write a 1 2 -> RowErrors: key 1: a row with this key is in the table
        commit a
        keys -> 1 2
    """,
    "insert_ignore of a key that came after the snapshot conflicts too": """
        begin a
        ignore a 1
        plain 1
        commit a -> TransactionConflictError: key 1
    """,
    "insert_ignore of a key that was there": """
        plain 1
        begin a
        ignore a 1 2
        commit a
        keys -> 1 2
    """,
    "who was rolled back is no conflict": """
        begin a
        begin b
        write a 1
        write b 1
        rollback a
        commit b
        keys -> 1
    """,
    "who read only is no conflict": """
        begin a
        sees a -> none
        plain 1
        commit a
        keys -> 1
    """,
    "the same key in two tables": """
        begin a
        begin b
        write a 1 @t
        write b 1 @u
        commit a
        commit b
        count @u -> 1
    """,
    "reading own writes, and not those of others": """
        plain 1
        begin a
        begin b
        write a 2
        insert a 3
        write b 4
        sees a -> 1 2 3
        sees b -> 1 4
        plain 5
        sees a -> 1 2 3
        commit a
        sees b -> 1 4
        commit b
        keys -> 1 2 3 4 5
    """,
    "TestInsertIgnoreInTransactionMRS": """
        begin a
        write a 1 -> 1
        write a 1 -> RowErrors: this transaction has staged the key already
        ignore a 1
        flush a -> 0
        commit a
        count -> 1
    """,
    "TestInsertIgnoreInMainMRS": """
        plain 1
        begin a
        ignore a 1
        flush a -> 0
        write a 1 -> RowErrors: in the table
        commit a
        count -> 1
    """,
    "TestInsertToTransactionMRS": """
        begin a
        begin b
        write a 1
        write b 2 3
        count -> 0
        commit a
        count -> 1
        commit b
        count -> 3
    """,
    "TestDontReadAbortedInserts": """
        begin a
        write a 1
        rollback a
        count -> 0
        begin b
        write b 1
        arm commit.validated error
        commit b -> OSError
        disarm
        rollback b
        count -> 0
        plain 1
        count -> 1
    """,
    "two workers of one transaction stage one key": """
        begin a
        join b a
        session s b
        apply s 1 2
        insert a 2 3
        flush a -> 2
        push s -> RowErrors: staged the key already
        commit a
        keys -> 1 2 3
    """,
}

LOCKED = {
    "a partition lock wins the race": """
        begin a locking=partition
        begin b
        write b 2
        write a 1
        commit b -> TransactionLockedError: locked by transaction
        state b -> ABORTED
        commit a
        keys -> 1
    """,
    "its snapshot is taken when the lock is granted": """
        begin a locking=partition
        plain 1
        write a 1 2 -> RowErrors: key 1: a row with this key is in the table
        commit a
        keys -> 1 2
    """,
    "the younger dies": """
        begin a locking=partition
        begin b locking=partition
        write a 1
        write b 2 -> TransactionLockedError: wait-die
        commit b -> TransactionLockedError
        commit a
        keys -> 1
    """,
    "the older stays open": """
        begin a locking=partition
        begin b locking=partition
        write b 1
        shortwait
        write a 2 -> TransactionLockedError: is younger, and did not end
        state a -> OPEN
        commit b
        write a 2
        commit a
        keys -> 1 2
    """,
    "a younger optimist dies at the lock": """
        begin a locking=partition
        write a 1
        begin b
        write b 2 -> TransactionLockedError: wait-die
        rollback a
        begin c
        write c 2
        commit c
        keys -> 2
    """,
    "a write outside of transactions dies at once": """
        begin a locking=partition
        write a 1
        plain 2 -> TransactionLockedError: outside of a transaction does not wait
        plain 2 @u
        rollback a
        plain 2
        keys -> 2
    """,
    "other tablets are free": """
        begin a locking=partition
        begin b locking=partition
        write a 1
        write b 1 @u
        commit b
        commit a
        keys @u -> 1
    """,
    "a lock survives a restart": """
        begin a locking=partition
        write a 1
        close a
        restart
        plain 2 -> TransactionLockedError: locked by transaction
        forward 31
        round
        state a -> ABORTED
        plain 2
        keys -> 2
    """,
    "a lock goes with the transaction that expires": """
        begin a locking=partition timeout=5
        write a 1
        forward 6
        round
        plain 2
        keys -> 2
    """,
    "the waiting one gets what it waited for": """
        begin a locking=partition
        begin b locking=partition
        write b 1
        rollback b
        write a 1
        commit a
        keys -> 1
    """,
}


@pytest.mark.parametrize("text", CASES.values(), ids=CASES.keys())
def test_optimistic(script: Any, text: str) -> None:
    script(text)


@pytest.mark.parametrize("text", LOCKED.values(), ids=LOCKED.keys())
def test_partition_locks(script: Any, text: str) -> None:
    script(text)


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
