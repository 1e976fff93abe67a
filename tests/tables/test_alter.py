"""Tables that are altered: what is refused, who sees which columns, what becomes of open writes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals

SCHEMA = txnkv.Schema(
    {"id": "int64", "a": "string?", "b": txnkv.Column("float64", default=1.5)}, primary_key=["id"]
)
NEW = txnkv.Column("int32", default=7)


@pytest.fixture
def table(client: txnkv.Client) -> txnkv.Table:
    """Row 1 is in a row set, row 2 in memory."""
    made = client.create_table("t", SCHEMA)
    for id in (1, 2):
        with client.transaction() as txn:
            txn.insert(made, (id, f"a{id}", float(id)))
        if id == 1:
            internals.flush(client)
    return made


def rows(table: txnkv.Table, **options: Any) -> list[dict[str, Any]]:
    return table.scan(ordered=True, **options).to_arrow().to_pylist()


# -- what is refused -------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"add": {"c": "int64"}}, "'c' has no value for rows that are there: make it nullable"),
    ({"add": {"a": "int64?"}}, "two columns 'a'"),
    ({"add": {"c": "int65?"}}, "column 'c': 'int65' is not a column type"),
    ({"add": {"c": txnkv.Column("int8", default=300)}}, "the default of column 'c' is int8"),
    ({"rename": {"a": "b"}}, "two columns 'b'"),
    ({"rename": {"x": "y"}}, "no column 'x'"),
    ({"rename": {"id": "key"}}, "'id' is of the primary key, which stays"),
    ({"drop": ["id"]}, "'id' is of the primary key, which stays"),
    ({"drop": ["x"]}, "no column 'x'"),
    ({"drop": ["a"], "rename": {"a": "c"}}, "'a' cannot be both changed and dropped"),
    ({"rename": {"a": ""}}, "a column's name is a non-empty string"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_refused(table: txnkv.Table, change: dict[str, Any], message: str) -> None:
    with pytest.raises(txnkv.SchemaError) as raised:
        table.alter(**change)
    assert message in str(raised.value)
    assert table.schema == SCHEMA


def test_a_text_is_no_list_of_names(table: txnkv.Table) -> None:
    with pytest.raises(TypeError, match=r"drop is a list of names, as \['a'\]"):
        table.alter(drop="a")
    with pytest.raises(TypeError, match=r"drop is a list of names, as \['a'\], not 5"):
        table.alter(**{"drop": 5})
    for what in ("add", "rename", "widen", "default", "nullable"):
        for given in ("a", 5, [("a", True)]):
            with pytest.raises(TypeError, match=f"^{what} is a mapping by column, as"):
                table.alter(**{what: given})


def test_nothing_to_change_is_no_change(client: txnkv.Client, table: txnkv.Table) -> None:
    before = internals.latest(client)
    assert table.alter() == table.alter(add={}, rename={"a": "a"}, drop=[]) == SCHEMA
    assert internals.latest(client) == before


def test_a_dropped_table(client: txnkv.Client, table: txnkv.Table) -> None:
    client.drop_table("t")
    with pytest.raises(txnkv.TableNotFoundError, match="was dropped"):
        table.alter(drop=["a"])
    assert table.schema == SCHEMA


def test_read_only(table: txnkv.Table, connect: Callable[..., txnkv.Client]) -> None:
    reader = connect(read_only=True)
    with pytest.raises(txnkv.NotSupportedError, match="read_only=True"):
        reader.table("t").alter(drop=["a"])
    table.alter(drop=["a"])
    assert rows(reader.table("t")) == [{"id": 1, "b": 1.0}, {"id": 2, "b": 2.0}]


# -- what is seen ----------------------------------------------------------------------


def test_all_at_once(table: txnkv.Table) -> None:
    """A name that is free by the same change may be given again, and has nothing of the old one."""
    schema = table.alter(add={"a": NEW, "d": "string?"}, rename={"a": "c"}, drop=["b"])
    assert schema.names == ["id", "c", "a", "d"] == table.schema.names
    assert rows(table) == [{"id": i, "c": f"a{i}", "a": 7, "d": None} for i in (1, 2)]
    assert table.count(where=[("a", "=", 7), ("d", "is null")]) == 2
    assert table.alter(rename={"a": "c", "c": "a"}).names == ["id", "a", "c", "d"]
    assert table.get(2) == {"id": 2, "a": "a2", "c": 7, "d": None}


@pytest.mark.parametrize("by", ["flush", "compact"])
def test_snapshots_keep_their_columns(client: txnkv.Client, table: txnkv.Table, by: str) -> None:
    """Also where what they need is written anew, or is written for the first time."""
    before = client.snapshot()
    was = rows(table)
    table.alter(drop=["a"], add={"c": NEW})
    with client.transaction() as txn:
        txn.update(table, {"id": 1, "c": 8})
        txn.insert(table, {"id": 3, "c": 9})
    for do in (lambda: None, getattr(internals, by)):
        do(client) if do is getattr(internals, by) else do()
        assert before.scan(table, ordered=True).to_arrow().to_pylist() == was
        assert before.get(table, 1) == was[0]
        assert before.get_many(table, [2, 3]).to_pylist() == [was[1], dict.fromkeys(was[1])]
        assert [row["c"] for row in rows(table)] == [8, 7, 9]
    before.close()


def test_former_columns_go_when_nobody_sees_them(
    connect: Callable[..., txnkv.Client], table: txnkv.Table, client: txnkv.Client
) -> None:
    client.close()
    with connect(history=0.0) as alone:
        one = alone.table("t")
        one.alter(drop=["a"])
        with alone.transaction() as txn:
            txn.upsert(one, (1, 0.5))
        internals.compact(alone)
        tablet = internals.tables(alone).tablet(one.info.tablets[0])
        assert tablet is not None
        (info,) = tablet.reload().infos
        with tablet.read() as pages:
            assert tablet.row_set(info).header(pages).columns == (2,)
        assert rows(one) == [{"id": 1, "b": 0.5}, {"id": 2, "b": 2.0}]


def test_a_scan_has_the_columns_of_its_first_read(table: txnkv.Table) -> None:
    scan, of_b = table.scan(), table.scan(columns=["b"])
    read = table.scan()
    assert read.to_arrow().column_names == ["id", "a", "b"]
    table.alter(drop=["b"], add={"c": NEW})
    assert pa.table(scan).column_names == ["id", "a", "c"] == scan.schema.names
    assert read.to_arrow().column_names == ["id", "a", "b"]
    with pytest.raises(txnkv.SchemaError, match="no column 'b'"):
        of_b.to_arrow()


def test_tokens_from_before(client: txnkv.Client, table: txnkv.Table) -> None:
    before = internals.latest(client)
    was = rows(table)
    tokens = table.scan().tokens()
    with client.transaction() as txn:
        txn.delete(table, 1)
    changes = table.diff_tokens(before)
    table.alter(drop=["a"], rename={"b": "c"})
    internals.flush(client)
    assert [row for token in tokens for row in token.open(client)] == was
    (change,) = [row for token in changes for row in token.open(client).read_all().to_pylist()]
    assert (change["_op"], change["a"], change["b"]) == ("delete", "a1", 1.0)


def test_diff_has_the_columns_of_its_end(client: txnkv.Client, table: txnkv.Table) -> None:
    before = internals.latest(client)
    table.alter(drop=["a"], add={"c": NEW})
    with client.transaction() as txn:
        txn.delete(table, 1)
        txn.update(table, {"id": 2, "c": 8})
    found = [tuple(row.values())[:4] for row in table.diff(before).read_all().to_pylist()]
    assert found == [(1, 1.0, 7, "delete"), (2, 2.0, 8, "update")]


def test_the_history_of_schemas_does_not_grow(
    connect: Callable[..., txnkv.Client], client: txnkv.Client, table: txnkv.Table
) -> None:
    """Numbers of columns are never given again, also when the schemas that had them are gone."""
    client.close()
    with connect(history=0.0) as alone:
        one = alone.table("t")
        for _ in range(20):
            one.alter(add={"c": NEW})
            one.alter(drop=["c"])
            internals.flush(alone)
            internals.compact(alone)
        info = internals.tables(alone).current(one.info)
        assert len(info.older) <= 3
        assert info.schema.next_id == 23


# -- open transactions -----------------------------------------------------------------


def test_a_small_transaction_begins_again(client: txnkv.Client, table: txnkv.Table) -> None:
    txn = client.new_transaction()
    txn.insert(table, (3, "a3", 3.0))
    txn.flush()
    table.alter(add={"c": NEW})
    assert txn.get(table, 3) == {"id": 3, "a": "a3", "b": 3.0}
    assert txn.scan(table).schema.names == ["id", "a", "b"]
    with pytest.raises(txnkv.SchemaChangedError, match="table 't' was altered") as raised:
        txn.commit()
    assert raised.value.retriable
    assert txn.state is txnkv.TxnState.ABORTED
    assert table.get(3) is None


def test_a_write_after_the_change_is_refused_at_once(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    txn = client.new_transaction()
    table.alter(add={"c": NEW})
    txn.insert(table, (3, "a3", 3.0))
    with pytest.raises(txnkv.SchemaChangedError):
        txn.flush()
    txn.rollback()


def test_a_handle_reads_the_columns_of_now(client: txnkv.Client, table: txnkv.Table) -> None:
    """A read of an older snapshot let the handle's short way answer with the columns of before."""
    before = table.get(1)
    assert before is not None
    txn = client.new_transaction()
    client.table("t").alter(add={"c": NEW})
    assert txn.get("t", 1) == txn.get(table, 1) == before
    assert table.get(1) == table.get(1) == before | {"c": NEW.default}
    assert txn.get(table, 1) == before
    txn.rollback()


def test_a_small_transaction_that_wrote_elsewhere_commits(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    other = client.create_table("other", SCHEMA)
    txn = client.new_transaction()
    txn.insert(other, (1, None, 1.0))
    assert txn.get(table, 1) is not None
    table.alter(drop=["a"])
    txn.commit()
    assert other.count() == 1


def test_run_begins_again(client: txnkv.Client, table: txnkv.Table) -> None:
    tries = []

    def work(txn: txnkv.Transaction) -> None:
        tries.append(txn.scan(table).schema.names)
        txn.upsert(table, {"id": 1, "b": 9.0})
        if len(tries) == 1:
            table.alter(drop=["a"])

    client.run(work)
    assert tries == [["id", "a", "b"], ["id", "b"]]
    assert table.get(1) == {"id": 1, "b": 9.0}


def test_a_large_transaction_goes_on(client: txnkv.Client, table: txnkv.Table) -> None:
    """What it staged, before and after the change, is read by the numbers of its columns."""
    txn = client.new_transaction()
    txn.serialize()
    txn.insert(table, (3, "a3", 3.0))
    txn.flush()
    table.alter(drop=["a"], rename={"b": "c"}, add={"d": NEW})
    txn.insert(table, (4, "a4", 4.0))
    txn.update(table, {"id": 1, "b": 0.5})
    assert [row["b"] for row in txn.scan(table, ordered=True)] == [0.5, 2.0, 3.0, 4.0]
    txn.commit()
    assert rows(table) == [
        {"id": 1, "c": 0.5, "d": 7},
        {"id": 2, "c": 2.0, "d": 7},
        {"id": 3, "c": 3.0, "d": 7},
        {"id": 4, "c": 4.0, "d": 7},
    ]


def test_one_that_grows_large_after_the_change(client: txnkv.Client, table: txnkv.Table) -> None:
    txn = client.new_transaction()
    txn.insert(table, (3, "a3", 3.0))
    txn.flush()
    table.alter(rename={"a": "c"}, drop=["b"])
    txn.serialize()
    txn.commit()
    assert table.get(3) == {"id": 3, "c": "a3"}


def test_a_lock_that_is_granted_after_the_change(client: txnkv.Client, table: txnkv.Table) -> None:
    """It reads rows as they are when it gets the lock, and would write them back with less."""
    txn = client.new_transaction(locking="partition")
    table.alter(add={"c": NEW})
    with client.transaction() as other:
        other.update(table, {"id": 1, "c": 8})
    txn.update(table, {"id": 1, "b": 0.5})
    with pytest.raises(txnkv.SchemaChangedError):
        txn.flush()
    txn.rollback()
    with client.transaction(locking="partition") as txn:
        txn.update(table, {"id": 1, "b": 0.5})
    assert table.get(1) == {"id": 1, "a": "a1", "b": 0.5, "c": 8}


# -- sessions --------------------------------------------------------------------------


def test_rows_that_wait_are_written_with_the_columns_there_are(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    session = client.new_session()
    session.insert(table, (3, "a3", 3.0))
    session.update(table, {"id": 1, "a": "new"})
    session.upsert(table, (2, "whole", 4.0))
    session.delete(table, 2)
    table.alter(rename={"a": "c"}, add={"d": NEW}, drop=["b"])
    session.insert(table, {"id": 4, "d": 5})
    assert session.flush().inserted == 2
    assert rows(table) == [
        {"id": 1, "c": "new", "d": 7},
        {"id": 3, "c": "a3", "d": 7},
        {"id": 4, "c": None, "d": 5},
    ]


def test_a_batch_outside_of_a_transaction(client: txnkv.Client, table: txnkv.Table) -> None:
    session = client.new_session()
    table.alter(add={"c": NEW})
    data = pa.table({"id": [3], "c": pa.array([1], pa.int32())})
    assert session.write(table, data).inserted == 1
    table.alter(drop=["c"])
    with pytest.raises(txnkv.SchemaError, match="columns that the table does not have: c"):
        session.write(table, data)


# -- evolve ----------------------------------------------------------------------------


def schema_with(**more: Any) -> txnkv.Schema:
    return txnkv.Schema({**SCHEMA.columns, **more}, primary_key=["id"])


def test_evolve_adds_what_is_safe(client: txnkv.Client, table: txnkv.Table) -> None:
    wanted = schema_with(c=NEW, d="string?")
    again = client.create_table("t", wanted, evolve=True)
    assert again.schema == wanted == table.schema
    before = internals.latest(client)
    assert client.create_table("t", wanted, evolve=True).schema == wanted
    assert client.create_table("t", wanted, exists_ok=True).schema == wanted
    assert internals.latest(client) == before
    assert client.create_table("fresh", wanted, evolve=True).count() == 0


EVOLVED: list[tuple[txnkv.Schema, str]] = [
    (schema_with(c="int64"), "it has no column 'c'"),
    (txnkv.Schema({"id": "int64", "a": "string?"}, ["id"]), "it has a column 'b'"),
    (schema_with(c=NEW, a="int64?"), "its column 'a' is string?, not int64?"),
    (
        txnkv.Schema({"id": "int64", "c": "int8?", "a": "string?", "b": SCHEMA.columns["b"]}, "id"),
        "new columns come behind those that it has: give them in the order id, a, b, c",
    ),
]


@pytest.mark.parametrize(("wanted", "difference"), EVOLVED)
def test_evolve_names_what_is_not_safe(
    client: txnkv.Client, table: txnkv.Table, wanted: txnkv.Schema, difference: str
) -> None:
    with pytest.raises(txnkv.TableExistsError) as raised:
        client.create_table("t", wanted, evolve=True)
    assert difference in str(raised.value)
    assert table.schema == SCHEMA


def test_evolve_leaves_the_partitioning(client: txnkv.Client, table: txnkv.Table) -> None:
    with pytest.raises(txnkv.TableExistsError, match="it is partitioned by"):
        client.create_table(
            "t", schema_with(c=NEW), partition_by=txnkv.hash_partition("id", 3), evolve=True
        )
    assert table.schema == SCHEMA


def test_a_name_means_the_table_of_now(client: txnkv.Client, table: txnkv.Table) -> None:
    with client.snapshot() as before, client.transaction() as txn:
        assert before.get("t", 1) == txn.get("t", 1) is not None
        client.drop_table("t")
        for read in (before, txn):
            with pytest.raises(txnkv.TableNotFoundError, match="was dropped"):
                read.get(table, 1)
        client.create_table("t", SCHEMA).insert((1, "new", 1.0))
        for read in (before, txn):
            assert read.get("t", 1) is None
            with pytest.raises(txnkv.TableNotFoundError, match="was dropped"):
                read.get(table, 1)


# -- what a process keeps --------------------------------------------------------------


def test_tablets_of_former_schemas_are_not_kept(client: txnkv.Client, table: txnkv.Table) -> None:
    engine = internals.tables(client)
    for number in range(8):
        with client.snapshot() as before:
            table.alter(add={f"c{number}": NEW})
            assert before.get(table, 1) is not None
            assert rows(table)
    engine.forget_gone()
    gc.collect()
    kept = [each for each in gc.get_objects() if type(each).__name__ == "Tablet"]
    store = internals.store(client)
    assert len([each for each in kept if each._store is store]) == 1


def test_of_many_former_schemas_few_are_read(
    client: txnkv.Client, table: txnkv.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each alter, and each commit after it, read all of them: the 200th took half a second."""
    for number in range(40):
        table.alter(add={f"c{number}": "string?"})
    made, read = txnkv.Schema.numbered, []

    def numbered(*args: Any) -> txnkv.Schema:
        read.append(args)
        return made(*args)

    monkeypatch.setattr(txnkv.Schema, "numbered", numbered)
    table.alter(add={"one_more": "string?"})
    client.run(lambda txn: txn.upsert(table, {"id": 1}))
    assert len(read) < 10
