"""Serializable transactions: what they read must be as they read it when they commit."""

from __future__ import annotations

from typing import Any

import pytest

import txnkv
from tests import internals

ABORTED, COMMITTED = txnkv.TxnState.ABORTED, txnkv.TxnState.COMMITTED
SCHEMA = txnkv.Schema({"id": "int64", "v": "string?"}, primary_key=["id"])


@pytest.fixture
def rows(client: txnkv.Client) -> txnkv.Table:
    """Keys 1, 2 and 10 to 19."""
    table = client.create_table("rows", SCHEMA)
    with client.new_session() as session:
        for id in (1, 2, *range(10, 20)):
            session.insert(table, (id, "old"))
    return table


def _begin(client: txnkv.Client, isolation: str = "serializable") -> txnkv.Transaction:
    return client.new_transaction(isolation=isolation)


@pytest.mark.usefixtures("size")
@pytest.mark.parametrize("isolation", ["snapshot", "serializable"])
def test_write_skew(client: txnkv.Client, rows: txnkv.Table, isolation: str) -> None:
    """Each reads both rows and changes the other's: allowed by snapshots, by no serial order."""
    a, b = _begin(client, isolation), _begin(client, isolation)
    for txn in (a, b):
        assert txn.get(rows, 1) is not None
        assert txn.get(rows, 2) is not None
    a.update(rows, (1, "a"))
    b.update(rows, (2, "b"))
    a.commit()
    if isolation == "snapshot":
        b.commit()
        assert rows.get(2) == {"id": 2, "v": "b"}
        return
    with pytest.raises(txnkv.TransactionConflictError):
        b.commit()
    assert b.state is ABORTED
    assert rows.get(2) == {"id": 2, "v": "old"}


READS: dict[str, Any] = {
    "get": lambda txn, table: txn.get(table, 15),
    "get of a key that is not there": lambda txn, table: txn.get(table, 25),
    "get_many": lambda txn, table: txn.get_many(table, [3, 15, 25]),
    "get_by": lambda txn, table: txn.get_by(table, "v", "old"),
    "scan": lambda txn, table: txn.scan(table).to_arrow(),
    "scan of a range": lambda txn, table: txn.scan(
        table, where=[("id", ">=", 12), ("id", "<", 30)]
    ).to_arrow(),
}
CHANGES: dict[str, Any] = {
    "update": lambda session, table: session.update(table, (15, "new")),
    "delete": lambda session, table: session.delete(table, 15),
    "insert": lambda session, table: session.insert(table, (25, "new")),
}
SEES_15 = {"get", "get_by", "get_many", "scan", "scan of a range"}
SEES_25 = set(READS) - {"get", "get_by"}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("change", CHANGES)
def test_what_was_read_is_as_it_was(
    client: txnkv.Client, rows: txnkv.Table, read: str, change: str
) -> None:
    if read == "get_by":
        client.create_index(rows, "v")
    txn = _begin(client)
    READS[read](txn, rows)
    txn.update(rows, (1, "mine"))
    with client.new_session() as session:
        CHANGES[change](session, rows)
    if read in (SEES_25 if change == "insert" else SEES_15):
        with pytest.raises(txnkv.TransactionConflictError):
            txn.commit()
        assert rows.get(1) == {"id": 1, "v": "old"}
    else:
        txn.commit()
        assert rows.get(1) == {"id": 1, "v": "mine"}


@pytest.mark.usefixtures("size")
@pytest.mark.parametrize("unique", [False, True])
def test_a_row_that_comes_to_have_a_value_that_none_had(
    client: txnkv.Client, rows: txnkv.Table, unique: bool
) -> None:
    values = client.create_table("values", SCHEMA)
    values.insert((1, "a"))
    client.create_index(values, "v", unique=unique)
    for value, kind in (("b", ABORTED), ("c", COMMITTED)):
        txn = _begin(client)
        assert txn.get_by(values, "v", value) == []
        txn.upsert(rows, (1, value))
        values.update((1, "b"))
        values.update((1, "a"))
        if kind is ABORTED:
            with pytest.raises(txnkv.TransactionConflictError):
                txn.commit()
        else:
            txn.commit()
        assert txn.state is kind


@pytest.mark.usefixtures("size")
@pytest.mark.parametrize("read", ["scan", "get_by"])
def test_an_index_that_is_dropped_hides_no_row_from_who_read_by_it(
    client: txnkv.Client, rows: txnkv.Table, read: str
) -> None:
    """It has no entry of a row that comes after it: a serializable reader cannot tell any more."""
    values = client.create_table("values", SCHEMA)
    client.create_index(values, "v")
    txn = _begin(client)
    txn.insert(rows, (30, "mine"))
    scan = txn.scan(values, where=[("v", "=", "x")])
    assert list(scan if read == "scan" else txn.get_by(values, "v", "x")) == []
    client.drop_index(values, "v")
    values.insert((1, "x"))
    with pytest.raises(txnkv.SchemaChangedError, match="it read what is gone, as an index"):
        txn.commit()
    assert txn.state is ABORTED
    assert rows.get(30) is None


@pytest.mark.usefixtures("size")
@pytest.mark.parametrize("read", ["get", "scan"])
def test_a_table_that_is_dropped_has_no_row_for_who_read_it(
    client: txnkv.Client, rows: txnkv.Table, read: str
) -> None:
    """Another of its name has: neither saw what the other wrote."""
    shifts = client.create_table("shifts", SCHEMA)
    txn = _begin(client)
    assert not (txn.get(shifts, 1) if read == "get" else list(txn.scan(shifts)))
    client.drop_table("shifts")
    client.create_table("shifts", SCHEMA)
    other = _begin(client)
    assert other.get(rows, 30) is None
    other.insert("shifts", (1, "x"))
    other.commit()
    txn.insert(rows, (30, "mine"))
    with pytest.raises(txnkv.SchemaChangedError, match="table 'shifts' was altered, or dropped"):
        txn.commit()
    assert txn.state is ABORTED
    assert rows.get(30) is None


def test_what_was_not_read_may_change(client: txnkv.Client, rows: txnkv.Table) -> None:
    txn = _begin(client)
    txn.get(rows, 10)
    txn.scan(rows, where=[("id", "<", 5)]).to_arrow()
    txn.update(rows, (1, "mine"))
    with client.new_session() as session:
        session.update(rows, (11, "new"))
        session.insert(rows, (99, "new"))
    txn.commit()
    assert txn.state is COMMITTED


def test_an_ignored_insert_has_read_its_key(client: txnkv.Client, rows: txnkv.Table) -> None:
    """It did nothing because the row was there: that must hold when it commits."""
    txn = _begin(client)
    txn.insert_ignore(rows, (15, "mine"))
    txn.insert(rows, (30, "mine"))
    assert txn.flush().ignored == 1
    with client.new_session() as session:
        session.delete(rows, 15)
    with pytest.raises(txnkv.TransactionConflictError):
        txn.commit()
    assert rows.get(30) is None


def test_a_reader_costs_nothing_and_never_fails(client: txnkv.Client, rows: txnkv.Table) -> None:
    """Its snapshot is a state that a serial order had: there is nothing to validate."""
    txn = _begin(client)
    assert txn.scan(rows).to_arrow().num_rows == 12
    with client.new_session() as session:
        session.update(rows, (15, "new"))
    before = internals.store(client).runtime.change_number()
    assert txn.get(rows, 15) == {"id": 15, "v": "old"}
    assert txn.commit() == txn.snapshot
    assert internals.store(client).runtime.change_number() == before


def test_its_own_writes_are_no_conflict(client: txnkv.Client, rows: txnkv.Table) -> None:
    txn = _begin(client)
    for id in (15, 40):
        txn.get(rows, id)
        txn.upsert(rows, (id, "mine"))
        assert txn.get(rows, id) == {"id": id, "v": "mine"}
    txn.scan(rows).to_arrow()
    txn.commit()
    assert rows.count() == 13


def test_a_large_one_validates_what_it_read(
    client: txnkv.Client, rows: txnkv.Table, large: None
) -> None:
    for change, outcome in ((15, ABORTED), (1, COMMITTED)):
        txn = _begin(client)
        txn.scan(rows, where=[("id", ">", 5)]).to_arrow()
        txn.upsert(rows, (2, str(change)))
        txn.flush()
        with client.new_session() as session:
            session.upsert(rows, (change, "new"))
        if outcome is ABORTED:
            with pytest.raises(txnkv.TransactionConflictError):
                txn.commit()
        else:
            txn.commit()
        assert txn.state is outcome
    assert rows.get(2) == {"id": 2, "v": "1"}
    assert internals.tables(client).read_sets == {}


def test_one_that_outgrows_takes_what_it_read_along(
    client: txnkv.Client, rows: txnkv.Table
) -> None:
    txn = _begin(client)
    txn.get(rows, 15)
    txn.update(rows, (1, "mine"))
    txn.flush()
    for id in range(100, 10_200):
        txn.insert(rows, (id, "many"))
    txn.flush()
    with client.new_session() as session:
        session.update(rows, (15, "new"))
    with pytest.raises(txnkv.TransactionConflictError):
        txn.commit()
    assert rows.count() == 12


def test_it_is_not_shared(client: txnkv.Client, rows: txnkv.Table) -> None:
    """Reads of other processes under the transaction could not be validated."""
    txn = _begin(client)
    txn.insert(rows, (50, "mine"))
    with pytest.raises(txnkv.NotSupportedError, match="several processes share"):
        txn.serialize()
    with pytest.raises(txnkv.NotSupportedError):
        txn.scan(rows).tokens()
    txn.commit()
    assert rows.get(50) == {"id": 50, "v": "mine"}


def test_run_repeats_it_until_it_holds(client: txnkv.Client, rows: txnkv.Table) -> None:
    tries = []

    def work(txn: txnkv.Transaction) -> None:
        tries.append(txn)
        found = txn.get(rows, 15)
        if len(tries) == 1:
            with client.new_session() as session:
                session.update(rows, (15, "new"))
        txn.upsert(rows, (1, found["v"] if found else "none"))

    client.run(work, isolation="serializable")
    assert len(tries) == 2
    assert rows.get(1) == {"id": 1, "v": "new"}
