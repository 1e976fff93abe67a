"""Two transactions, one table: who wins, what the other is told, what is seen when."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from tests.scripts import scripts
from txnkv.tables.commit.tablet_participants import TabletParticipants

CASES = scripts("""
== overlapping keys: the first to commit wins
begin a; begin b; write a 1..10; write b 10..20; commit a
commit b -> TransactionConflictError: key 10: another transaction committed it first
keys -> 1 2 3 4 5 6 7 8 9 10; state b -> ABORTED; staged -> 0
commit b -> InvalidTxnStateError: not open: ABORTED; rollback b
== the later begun may win
begin a; begin b; write a 1; write b 1; commit b; commit a -> TransactionConflictError
keys -> 1
== disjoint keys: both commit
begin a; begin b; write a 1 3 5 7; write b 2 4 6 8; commit a; commit b; keys -> 1 2 3 4 5 6 7 8
== one key of many tablets: the whole is refused
begin a; begin b; write a 1..40 @u; write b 100..140 @u; write b 40 @u; write b 1..5; commit a
commit b -> TransactionConflictError: table 'u', key 40; count -> 0; count @u -> 40; staged -> 0
== three at once: one wins
begin a; begin b; begin c; write a 1 2; write b 2 3; write c 3 4; commit b
commit a -> TransactionConflictError: key 2; commit c -> TransactionConflictError: key 3
keys -> 2 3
== a conflict with a write outside of transactions
begin a; write a 1; plain 1; commit a -> TransactionConflictError: key 1; keys -> 1
== a key that came after the snapshot is not seen, and refused at commit
begin a; sees a -> none; plain 1; sees a -> none; write a 1 2 -> 2
commit a -> TransactionConflictError: key 1; keys -> 1
== a key that was there at the snapshot is a row error
plain 1; begin a; write a 1 2 -> RowErrors: key 1: a row with this key is in the table; commit a
keys -> 1 2
== insert_ignore of a key that came after the snapshot conflicts too
begin a; ignore a 1; plain 1; commit a -> TransactionConflictError: key 1
== insert_ignore of a key that was there
plain 1; begin a; ignore a 1 2; commit a; keys -> 1 2
== who was rolled back is no conflict
begin a; begin b; write a 1; write b 1; rollback a; commit b; keys -> 1
== who read only is no conflict
begin a; sees a -> none; plain 1; commit a; keys -> 1
== the same key in two tables
begin a; begin b; write a 1 @t; write b 1 @u; commit a; commit b; count @u -> 1
== reading own writes, and not those of others
plain 1; begin a; begin b; write a 2; insert a 3; write b 4; sees a -> 1 2 3; sees b -> 1 4
plain 5; sees a -> 1 2 3; commit a; sees b -> 1 4; commit b; keys -> 1 2 3 4 5
== TestInsertIgnoreInTransactionMRS
begin a; write a 1 -> 1; write a 1 -> RowErrors: this transaction has staged the key already
ignore a 1; flush a -> 0; commit a; count -> 1
== TestInsertIgnoreInMainMRS
plain 1; begin a; ignore a 1; flush a -> 0; write a 1 -> RowErrors: in the table; commit a
count -> 1
== TestInsertToTransactionMRS
begin a; begin b; write a 1; write b 2 3; count -> 0; commit a; count -> 1; commit b; count -> 3
== TestDontReadAbortedInserts
large; begin a; write a 1; rollback a; count -> 0; begin b; write b 1
arm commit.validated error; commit b -> OSError; disarm; rollback b; count -> 0; plain 1
count -> 1
== two workers of one transaction stage one key
begin a; join b a; session s b; apply s 1 2; insert a 2 3; flush a -> 2
push s -> RowErrors: staged the key already; commit a; keys -> 1 2 3
""")

LOCKED = scripts("""
== a partition lock wins the race
begin a locking=partition; begin b; write b 2; write a 1
commit b -> TransactionLockedError: locked by transaction; state b -> ABORTED; commit a
keys -> 1
== its snapshot is taken when the lock is granted
begin a locking=partition; plain 1
write a 1 2 -> RowErrors: key 1: a row with this key is in the table; commit a; keys -> 1 2
== the younger dies
begin a locking=partition; begin b locking=partition; write a 1
write b 2 -> TransactionLockedError: wait-die; commit b -> TransactionLockedError; commit a
keys -> 1
== the older stays open
begin a locking=partition; begin b locking=partition; write b 1; shortwait
write a 2 -> TransactionLockedError: is younger, and did not end; state a -> OPEN; commit b
write a 2; commit a; keys -> 1 2
== a younger optimist dies at the lock
large; begin a locking=partition; write a 1; begin b
write b 2 -> TransactionLockedError: wait-die; rollback a; begin c; write c 2; commit c
keys -> 2
== a small optimist dies at its commit
begin a locking=partition; write a 1; begin b; write b 2
commit b -> TransactionLockedError: wait-die; state b -> ABORTED; rollback a; keys -> none
== a write outside of transactions dies at once
begin a locking=partition; write a 1
plain 2 -> TransactionLockedError: outside of a transaction does not wait; plain 2 @u
rollback a; plain 2; keys -> 2
== other tablets are free
begin a locking=partition; begin b locking=partition; write a 1; write b 1 @u; commit b
commit a; keys @u -> 1
== a lock survives a restart
begin a locking=partition; write a 1; close a; restart
plain 2 -> TransactionLockedError: locked by transaction; forward 31; round; state a -> ABORTED
plain 2; keys -> 2
== a lock goes with the transaction that expires
begin a locking=partition timeout=5; write a 1; forward 6; round; plain 2; keys -> 2
== the waiting one gets what it waited for
begin a locking=partition; begin b locking=partition; write b 1; rollback b; write a 1; commit a
keys -> 1
""")


@CASES
def test_optimistic(script: Any, text: str) -> None:
    script(text)


@LOCKED
def test_partition_locks(script: Any, text: str) -> None:
    script(text)


# -- operations of one key, small and in bulk, in each order ---------------------------

THERE = ("update", "delete_ignore")
NEW = ("insert", "upsert")
MEANWHILE = ("nothing", "flush", "compact")


@pytest.fixture
def some(client: txnkv.Client, table: txnkv.Table) -> txnkv.Table:
    """Keys 0, 2, 4 .. 98 are there, half of them in memory."""
    for first in (0, 2):
        ids = range(first, 100, 4)
        client.new_session().write(table, _rows(ids))
        if first == 0:
            internals.flush(client)
    return table


def _rows(ids: Iterable[int], v: str | None = "old") -> pa.Table:
    found = list(ids)
    return pa.table({"id": pa.array(found, pa.int64()), "v": pa.array([v] * len(found))})


def _begin(client: txnkv.Client, size: str) -> txnkv.Transaction:
    txn = client.new_transaction()
    if size == "bulk":
        txn.serialize()  # what it writes is staged from now on
    return txn


def _meanwhile(client: txnkv.Client, what: str) -> None:
    if what != "nothing":
        internals.flush(client)
    if what == "compact":
        client.compact()


@pytest.mark.parametrize("second", ["small", "bulk"])
@pytest.mark.parametrize("first", ["small", "bulk"])
@pytest.mark.parametrize("meanwhile", MEANWHILE)
@pytest.mark.parametrize("key", [50, 51], ids=["there", "new"])
def test_both_change_a_key(
    client: txnkv.Client, some: txnkv.Table, key: int, meanwhile: str, first: str, second: str
) -> None:
    """Whatever each of them does to it: the first to commit wins, the other is told the key."""
    ops = THERE if key == 50 else NEW
    for winning in ops:
        for losing in ops:
            winner, loser = _begin(client, first), _begin(client, second)
            loser.write(some, _rows([7, 21], "lost"), "upsert")
            loser.write(some, _rows([key], "lost"), losing)
            winner.write(some, _rows([key], "won"), winning)
            winner.commit()
            _meanwhile(client, meanwhile)
            with pytest.raises(txnkv.TransactionConflictError, match=f"'t', key {key}: another"):
                loser.commit()
            gone = winning.startswith("delete")
            assert some.get(key) == (None if gone else {"id": key, "v": "won"})
            assert some.get(7) is None
            with client.transaction() as txn:  # as it was
                op = "upsert" if key == 50 else "delete"
                txn.write(some, _rows([key]), op)


@pytest.mark.parametrize("second", ["small", "bulk"])
@pytest.mark.parametrize("first", ["small", "bulk"])
@pytest.mark.parametrize("meanwhile", MEANWHILE)
def test_they_change_neighbours(
    client: txnkv.Client, some: txnkv.Table, meanwhile: str, first: str, second: str
) -> None:
    """Keys next to those of the other, in the same blocks and row sets, are no conflict."""
    one, other = _begin(client, first), _begin(client, second)
    one.write(some, _rows(range(0, 100, 8), "one"), "update")
    one.write(some, _rows(range(2, 100, 8)).select(["id"]), "delete")
    one.write(some, _rows(range(1, 100, 8), "one"), "insert")
    other.write(some, _rows(range(4, 100, 8), "other"), "update")
    other.write(some, _rows(range(6, 100, 8)).select(["id"]), "delete")
    other.write(some, _rows(range(3, 100, 8), "other"), "upsert")
    one.commit()
    _meanwhile(client, meanwhile)
    other.commit()
    expected = dict.fromkeys((*range(0, 100, 8), *range(1, 100, 8)), "one")
    expected |= dict.fromkeys((*range(4, 100, 8), *range(3, 100, 8)), "other")
    found = some.scan().to_arrow()
    assert dict(zip(found["id"].to_pylist(), found["v"].to_pylist(), strict=True)) == expected
    assert some.count() == len(expected)


@pytest.mark.parametrize("second", ["small", "bulk"])
@pytest.mark.parametrize("first", ["small", "bulk"])
def test_what_is_ignored_is_not_written(
    client: txnkv.Client, some: txnkv.Table, first: str, second: str
) -> None:
    one, other = _begin(client, first), _begin(client, second)
    assert other.write(some, _rows([50]), "insert_ignore").ignored == 1
    assert other.write(some, _rows([51]), "update_ignore").ignored == 1
    assert other.write(some, _rows([51]), "delete_ignore").ignored == 1
    one.write(some, _rows([50, 51], "one"), "upsert")
    one.commit()
    other.commit()
    assert [some.get(i) for i in (50, 51)] == [{"id": i, "v": "one"} for i in (50, 51)]


@pytest.mark.parametrize("second", ["small", "bulk"])
@pytest.mark.parametrize("first", ["small", "bulk"])
def test_deleted_and_put_back_is_changed(
    client: txnkv.Client, some: txnkv.Table, first: str, second: str
) -> None:
    """A key that is as it was before has been changed all the same."""
    loser = _begin(client, second)
    loser.write(some, _rows([50], "lost"), "update")
    for op in ("delete", "insert"):
        txn = _begin(client, first)
        txn.write(some, _rows([50]), op)
        txn.commit()
    with pytest.raises(txnkv.TransactionConflictError, match="key 50"):
        loser.commit()
    assert some.get(50) == {"id": 50, "v": "old"}


@pytest.mark.parametrize("size", ["small", "bulk"])
@pytest.mark.parametrize("how", ["insert_ignore", "update_ignore", "refused"])
def test_serializable_takes_what_it_did_not_change_as_read(
    client: txnkv.Client, some: txnkv.Table, size: str, how: str
) -> None:
    """Nothing was written for the key, and that hung on whether it was there."""
    txn = client.new_transaction(isolation="serializable")
    if size == "bulk":  # too much for a small one
        txn.write(some, _rows(range(1000, 20_000)), "insert")
    if how == "insert_ignore":
        txn.write(some, _rows([50, 1]), how)
    elif how == "update_ignore":
        txn.write(some, _rows([51, 52]), how)
    else:
        with pytest.raises(txnkv.RowErrors):
            txn.write(some, _rows([51, 52]), "update")
    key = 50 if how == "insert_ignore" else 51
    with client.transaction() as other:
        other.write(some, _rows([key]), "delete" if key == 50 else "insert")
    with pytest.raises(txnkv.TransactionConflictError, match=f"key {key}"):
        txn.commit()


def test_a_commit_that_another_driver_aborts_tells_its_reason(
    client: txnkv.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row sets that are being validated were swept meanwhile: the error of that was one that `run`
    does not retry.
    """
    schema = txnkv.Schema({"id": "int64"}, primary_key=["id"])
    table = client.create_table("taken", schema, txnkv.hash_partition("id", 2))
    orchestrator = internals.coordinator(client).orchestrator
    refuse = TabletParticipants._refuse_changed
    txn = client.new_transaction()

    def overtaken(self: TabletParticipants, written: Any, *bounds: Any) -> None:
        monkeypatch.undo()
        orchestrator.start_abort(
            txn.context.row.txn_id, "it was first", txnkv.TransactionConflictError
        )
        orchestrator.finish(txn.context.row.txn_id)
        for part in written:
            part.tablet.reload()  # forgets what it had read of the row sets
        refuse(self, written, *bounds)

    txn.write(table, pa.table({"id": pa.array(range(40_000), pa.int64())}))
    with client.transaction() as other:
        other.insert(table, {"id": 5})
    monkeypatch.setattr(TabletParticipants, "_refuse_changed", overtaken)
    with pytest.raises(txnkv.TransactionConflictError, match="it was first"):
        txn.commit()
    assert txn.state is txnkv.TxnState.ABORTED
