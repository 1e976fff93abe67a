"""Schemas, the catalog and partitioning: what is accepted, what is refused, what is stored."""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from datetime import date
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from tests.threads import at_once
from txnkv.coordinator import status_table

NAMES = {
    "bool": pa.bool_(),
    "int8": pa.int8(),
    "int64": pa.int64(),
    "uint64": pa.uint64(),
    "float": pa.float32(),
    "float32": pa.float32(),
    "double": pa.float64(),
    "float64": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date32": pa.date32(),
    "date32[day]": pa.date32(),
    "timestamp[us]": pa.timestamp("us"),
    "timestamp[us, tz=UTC]": pa.timestamp("us", tz="UTC"),
    "decimal128(10, 2)": pa.decimal128(10, 2),
    "list<int64>": pa.list_(pa.int64()),
    "list<item: string>": pa.list_(pa.string()),
    "list<decimal128(5, 1)>": pa.list_(pa.decimal128(5, 1)),
}


@pytest.mark.parametrize(("name", "kind"), NAMES.items(), ids=NAMES.keys())
def test_types_by_name_and_by_arrow(name: str, kind: pa.DataType) -> None:
    for given in (name, kind, txnkv.Column(name), txnkv.Column(kind)):
        schema = txnkv.Schema({"id": "int64", "c": given}, primary_key=["id"])
        assert schema.columns["c"].type == kind
        assert not schema.columns["c"].nullable
    for given in (f"{name}?", txnkv.Column(f"{name}?"), txnkv.Column(kind, nullable=True)):
        assert txnkv.Schema({"id": "int64", "c": given}, primary_key="id").columns["c"].nullable


def test_types_as_arrow_prints_them() -> None:
    for kind in NAMES.values():
        schema = txnkv.Schema({"id": "int64", "c": str(kind)}, primary_key=["id"])
        assert schema.columns["c"].type == kind


BAD_SCHEMAS: list[tuple[str, dict[Any, Any], Any, str]] = [
    ("unknown type", {"id": "int65"}, ["id"], "'int65' is not a column type; there are"),
    ("no arrow column", {"id": pa.float16()}, ["id"], "not a column type"),
    ("no key", {"id": "int64"}, [], "at least one column"),
    ("key of no column", {"id": "int64"}, ["x"], "names 'x'"),
    ("key twice", {"id": "int64"}, ["id", "id"], "twice"),
    ("nullable key", {"id": "int64?"}, ["id"], "cannot be nullable"),
    ("list as key", {"id": "list<int64>"}, ["id"], "cannot be a key"),
    ("empty name", {"": "int64"}, [""], "non-empty string"),
    ("name is no string", {5: "int64"}, [5], "non-empty string"),
    (
        "default of another type",
        {"id": "int64", "c": txnkv.Column("int8", default="x")},
        ["id"],
        "default of column 'c'",
    ),
    (
        "default too large",
        {"id": "int64", "c": txnkv.Column("int8", default=1000)},
        ["id"],
        "default of column 'c'",
    ),
]


@pytest.mark.parametrize(
    ("columns", "key", "words"), [b[1:] for b in BAD_SCHEMAS], ids=[b[0] for b in BAD_SCHEMAS]
)
def test_schemas_that_are_refused(columns: Any, key: Any, words: str) -> None:
    with pytest.raises(txnkv.SchemaError, match=words):
        txnkv.Schema(columns, primary_key=key)


def test_from_arrow() -> None:
    given = pa.schema(
        [
            ("id", pa.int64()),
            ("name", pa.large_string()),
            ("kind", pa.dictionary(pa.int8(), pa.string())),
            ("when", pa.timestamp("s", tz="UTC")),
            pa.field("fixed", pa.int8(), nullable=False),
        ]
    )
    schema = txnkv.Schema.from_arrow(given, primary_key=["id"])
    assert schema == txnkv.Schema(
        {
            "id": "int64",
            "name": "string?",
            "kind": "string?",
            "when": "timestamp[us, tz=UTC]?",
            "fixed": "int8",
        },
        primary_key=["id"],
    )


def test_a_table_is_found_again_as_it_was_made(client: txnkv.Client, elsewhere: Any) -> None:
    schema = txnkv.Schema(
        {
            "id": "int64",
            "price": txnkv.Column("decimal128(10, 2)", default=Decimal("1.50")),
            "tags": txnkv.Column("list<string>", nullable=True, default=["new"]),
            "day": "date32",
        },
        primary_key=["day", "id"],
    )
    by = [txnkv.hash_partition("id", 2), txnkv.range_partition(["day", "id"], [(_day(1), 5)])]
    client.create_table("goods", schema, by)
    client.close()
    found = elsewhere(
        """
        goods = client.table("goods")
        with client.transaction() as txn:
            txn.insert(goods, {"id": 1, "day": day})
        s = goods.schema
        say((repr(s), s.primary_key, {n: (c.nullable, c.default) for n, c in s.columns.items()},
             goods.get((day, 1)), len(goods.info.tablets)))
        """,
        day=_day(2),
    )
    assert found == (
        repr(schema),
        ("day", "id"),
        {name: (column.nullable, column.default) for name, column in schema.columns.items()},
        {"id": 1, "price": Decimal("1.50"), "tags": ["new"], "day": _day(2)},
        4,
    )


# -- catalog ---------------------------------------------------------------------------


def test_catalog(client: txnkv.Client) -> None:
    """CheckOpenTxnStatusTable and its like: the system's own tables are not listed."""
    schema = txnkv.Schema({"id": "int64"}, primary_key=["id"])
    assert client.tables() == []
    b = client.create_table("b", schema)
    client.create_table("a", schema)
    assert client.tables() == ["a", "b"]
    assert client.table("b").schema == schema
    assert b.name == "b"
    with pytest.raises(txnkv.TableExistsError, match="'b' already"):
        client.create_table("b", schema)
    assert client.create_table("b", schema, exists_ok=True).info.id == b.info.id
    other = txnkv.Schema({"id": "int32"}, primary_key=["id"])
    with pytest.raises(txnkv.TableExistsError):
        client.create_table("b", other, exists_ok=True)
    with pytest.raises(txnkv.TableNotFoundError, match="no table 'c'; the tables are: a, b"):
        client.table("c")
    client.drop_table("a")
    client.drop_table("a", missing_ok=True)
    with pytest.raises(txnkv.TableNotFoundError):
        client.drop_table("a")
    client.drop_table(b)
    assert client.tables() == []


@pytest.mark.parametrize(
    ("name", "schema", "kind"),
    [("", None, ValueError), (5, None, ValueError), ("x", {"id": "int64"}, TypeError)],
)
def test_create_table_checks(
    client: txnkv.Client, name: Any, schema: Any, kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        client.create_table(name, schema or txnkv.Schema({"id": "int64"}, primary_key=["id"]))


def test_a_handle_of_a_dropped_table(client: txnkv.Client, table: txnkv.Table) -> None:
    with client.new_session() as session:
        session.insert(table, (1, "old"))
    client.drop_table("t")
    fresh = client.create_table("t", table.schema)
    for call in (
        lambda: table.get(1),
        table.count,
        lambda: table.scan().to_arrow(),
        lambda: table.get_many([1]),
        table.next_id,
        lambda: client.new_session().insert(table, (2, None)),
        lambda: client.new_transaction().get(table, 1),
    ):
        with pytest.raises(txnkv.TableNotFoundError, match="was dropped: this handle"):
            call()
    assert fresh.count() == 0
    assert fresh.get(1) is None


def test_drop_while_a_scan_runs(
    client: txnkv.Client, table: txnkv.Table, put: Any, small_blocks: None, store_path: Any
) -> None:
    """Running scans finish; then the files go."""
    put(table, pa.table({"id": range(100)}))
    folder = store_path / "tablets" / str(table.info.tablets[0])
    scan = table.scan(["id"])
    batches = scan.to_batches()
    found = next(batches)["id"].to_pylist()
    client.drop_table("t")
    assert folder.exists()
    for batch in batches:
        found += batch["id"].to_pylist()
    assert found == list(range(100))
    assert len(list(scan)) == 100
    scan.close()
    del scan, batches, batch
    gc.collect()
    internals.tables(client).purge()
    assert not folder.exists()


@pytest.mark.usefixtures("large")
def test_drop_aborts_open_transactions(client: txnkv.Client, table: txnkv.Table) -> None:
    other = client.create_table("other", table.schema)
    touched, reader, elsewhere_ = (client.new_transaction() for _ in range(3))
    touched.insert(table, (1, None))
    touched.insert(other, (1, None))
    touched.flush()
    reader.get(other, 1)
    elsewhere_.insert(other, (2, None))
    elsewhere_.flush()
    client.drop_table(table)
    assert touched.state is txnkv.TxnState.ABORTED
    with pytest.raises(txnkv.InvalidTxnStateError, match="table 't' was dropped"):
        touched.commit()
    reader.commit()
    elsewhere_.commit()
    assert [row["id"] for row in other.scan()] == [2]


def test_drop_ends_a_small_transaction_at_its_commit(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    """Nobody but its own thread knows what it has touched."""
    other = client.create_table("other", table.schema)
    txn = client.new_transaction()
    for each in (table, other):
        txn.insert(each, (1, None))
    txn.flush()
    client.drop_table(table)
    with pytest.raises(txnkv.InvalidTxnStateError, match="table 't' was dropped"):
        txn.commit()
    assert txn.state is txnkv.TxnState.ABORTED
    assert other.count() == 0


def test_rows_that_wait_for_a_dropped_table(client: txnkv.Client, table: txnkv.Table) -> None:
    txn = client.new_transaction()
    txn.insert(table, (1, None))
    client.drop_table("t")
    with pytest.raises(txnkv.TableNotFoundError, match="was dropped"):
        txn.flush()
    txn.commit()


@pytest.mark.usefixtures("large")
def test_drop_after_the_commit_point(client: txnkv.Client) -> None:
    """One with its commit timestamp goes on; the table is gone all the same."""
    schema = txnkv.Schema({"id": "int64"}, primary_key=["id"])
    gone, kept = client.create_table("gone", schema), client.create_table("kept", schema)
    txn = client.new_transaction()
    for table in (gone, kept):
        txn.insert(table, (1,))
    txn.flush()
    coordinator = internals.coordinator(client)
    local = txn.id.local
    row = coordinator.orchestrator.start_commit(local)
    with internals.status(client).read() as cur:
        parts = status_table.participants(cur, local)
    coordinator.orchestrator.decide(row, parts)
    client.drop_table("gone")
    assert client.transaction_state(txn.id) is txnkv.TxnState.COMMITTED
    assert kept.count() == 1


def test_next_id(client: txnkv.Client, table: txnkv.Table, elsewhere: Any) -> None:
    """Unique over threads, handles and processes; known before commit."""
    taken = at_once(*[lambda: [table.next_id() for _ in range(300)]] * 3)
    found = [id for ids in taken for id in ids]
    found += [client.table("t").next_id() for _ in range(5)]
    found += elsewhere("t = client.table('t'); say([t.next_id() for _ in range(1500)])")
    assert len(set(found)) == len(found) == 900 + 5 + 1500
    assert min(found) >= 1


@pytest.mark.parametrize("by", ["here", "another process"])
def test_next_id_of_a_dropped_table(
    client: txnkv.Client, table: txnkv.Table, elsewhere: Any, by: str
) -> None:
    """Also where ids are at hand; brought back, the table goes on."""
    before = table.next_id()
    if by == "here":
        client.drop_table(table, keep=600)
    else:
        elsewhere("client.drop_table('t', keep=600)")
    with pytest.raises(txnkv.TableNotFoundError, match="dropped"):
        table.next_id()
    client.recall_table("t")
    assert table.next_id() == before + 1


def test_next_id_in_a_forked_child(client: txnkv.Client, table: txnkv.Table) -> None:
    """It gave what the parent gave next."""
    before, (read, write) = table.next_id(), os.pipe()
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            os.write(write, str(table.next_id()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    there = int(os.read(read, 99))
    os.close(read)
    os.close(write)
    assert table.next_id() == before + 1 < there


# -- partitioning ----------------------------------------------------------------------


HASH, RANGE = txnkv.hash_partition, txnkv.range_partition
KEYED = txnkv.Schema({"a": "int64", "b": "string", "v": "int64?"}, primary_key=["a", "b"])
PARTITIONINGS: list[tuple[str, Any, int]] = [
    ("none", None, 1),
    ("hash", HASH("a", 4), 4),
    ("hash of two", HASH(["a", "b"], 3), 3),
    ("one bucket", HASH("b", 1), 1),
    ("two hashes", [HASH("a", 2), HASH("b", 3)], 6),
    ("range", RANGE("a", [-10, 0, 10]), 4),
    ("range of two", RANGE(["a", "b"], [(0, ""), (0, "m"), (5, "x")]), 4),
    ("range of the second", RANGE("b", ["g", "p"]), 3),
    ("both", [HASH("b", 2), RANGE("a", [0])], 4),
    ("all", [RANGE("a", [0, 12]), HASH("a", 2), HASH(["b"], 2)], 12),
]


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(
    ("by", "tablets"), [p[1:] for p in PARTITIONINGS], ids=[p[0] for p in PARTITIONINGS]
)
def test_rows_spread_and_are_found(client: txnkv.Client, put: Any, by: Any, tablets: int) -> None:
    table = client.create_table("p", KEYED, by)
    assert len(table.info.tablets) == tablets
    keys = [(a, b) for a in range(-12, 24, 3) for b in ("", "g", "m", "zz")]
    put(table, [(a, b, n) for n, (a, b) in enumerate(keys)])
    assert [(r["a"], r["b"]) for r in table.scan(ordered=True)] == sorted(keys)
    assert table.get_many(keys)["v"].to_pylist() == list(range(len(keys)))
    for n, key in enumerate(keys):
        assert table.get(key)["v"] == n
    with client.new_session() as session:
        for a, b in keys:
            session.insert_ignore(table, (a, b, None))
        assert session.flush().ignored == len(keys)
    with pytest.raises(txnkv.RowErrors) as caught, client.new_session() as session:
        session.insert(table, (*keys[7], None))
    assert caught.value.errors[0].key == keys[7]
    used = {seen.tablet_id for seen in _row_sets(client, table)}
    assert used == set(table.info.tablets)


@pytest.mark.usefixtures("large")
def test_a_row_equal_to_a_bound_lies_above_it(client: txnkv.Client, put: Any) -> None:
    table = client.create_table(
        "p", txnkv.Schema({"a": "int64"}, primary_key=["a"]), RANGE("a", [0, 10])
    )
    put(table, [(-1,), (0,), (9,), (10,)])
    rows = {seen.tablet_id: seen.rows for seen in _row_sets(client, table)}
    assert [rows[id] for id in table.info.tablets] == [1, 2, 1]


BAD_PARTITIONINGS = [
    ("column not of the key", lambda: HASH("v", 2), "not of the primary key"),
    ("range column not of the key", lambda: RANGE("v", [1]), "not of the primary key"),
    ("bounds descend", lambda: RANGE("a", [2, 1]), "not ascending"),
    ("bounds twice", lambda: RANGE("a", [1, 1]), "not ascending"),
    ("bound of another type", lambda: RANGE("a", ["x"]), "does not fit: column 'a'"),
    ("bound is null", lambda: RANGE("a", [None]), "is null"),
    ("two ranges", lambda: [RANGE("a", [1]), RANGE("b", ["x"])], "one range_partition"),
    ("too many tablets", lambda: [HASH("a", 1024), HASH("b", 2)], "2048 tablets"),
]


@pytest.mark.parametrize(
    ("by", "words"), [b[1:] for b in BAD_PARTITIONINGS], ids=[b[0] for b in BAD_PARTITIONINGS]
)
def test_partitionings_that_are_refused(client: txnkv.Client, by: Any, words: str) -> None:
    with pytest.raises(txnkv.SchemaError, match=words):
        client.create_table("p", KEYED, by())
    assert client.tables() == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: HASH([], 2),
        lambda: HASH("a", 0),
        lambda: HASH("a", 5000),
        lambda: RANGE("a", []),
        lambda: RANGE([], [1]),
        lambda: RANGE(["a", "b"], [(1,)]),
    ],
)
def test_partitionings_that_make_no_sense(make: Any) -> None:
    with pytest.raises(ValueError, match=r"partition|bound"):
        make()


def test_partition_by_takes_partitionings(client: txnkv.Client) -> None:
    with pytest.raises(TypeError, match="partition_by takes"):
        client.create_table("p", KEYED, ["a"])  # type: ignore[list-item]


def _row_sets(client: txnkv.Client, table: txnkv.Table) -> list[Any]:
    engine = internals.tables(client)
    latest = internals.latest(client)
    return [seen for tablet in engine.tablets(table.info) for seen in tablet.state(latest).infos]


def _day(n: int) -> Any:
    return date(2026, 1, n)
