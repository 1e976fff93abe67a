"""A table as a dataset of Arrow: the filters of others are told to scans, and answer the same."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

import duckdb
import polars
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import txnkv
from txnkv.client.dataset import TableDataset
from txnkv.tables.read.expressions import conditions

SCHEMA = txnkv.Schema(
    {
        "id": "int64",
        "n": "int8?",
        "f": "float64?",
        "s": "string?",
        "d": "date32?",
        "t": "timestamp[us, tz=UTC]?",
        "m": "decimal128(9, 2)?",
        "a b": "int32?",
    },
    ["id"],
)
TEXTS = ["", "a", 'b "x" and (y', "c\\", "ü", "it's", ") and (id"]
DAY = dt.date(2026, 1, 31)
NOON = dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC)
ROWS = [
    {
        "id": i,
        "n": None if i % 5 == 0 else i % 7,
        "f": None if i % 6 == 0 else i / 4,
        "s": None if i % 9 == 0 else TEXTS[i % len(TEXTS)],
        "d": DAY + dt.timedelta(i),
        "t": NOON + dt.timedelta(seconds=i),
        "m": Decimal(i) / 2,
        "a b": i,
    }
    for i in range(60)
]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    with txnkv.connect(tmp_path_factory.mktemp("dataset") / "store") as client:
        table = client.create_table("t", SCHEMA)
        with client.transaction() as txn:
            for row in ROWS:
                txn.insert(table, row)
        yield table


@pytest.fixture(scope="module")
def both(table):
    """DuckDB with the table as `t`, and as a table of its own, `plain`."""
    with duckdb.connect() as duck:
        duck.execute("SET TimeZone = 'UTC'")
        duck.register("t", table.dataset())
        duck.register("copied", table.scan().to_arrow())
        duck.execute("CREATE TABLE plain AS SELECT * FROM copied")
        yield duck


def test_what_is_asked_is_told_to_the_scan(table):
    asked = []

    def read(columns, where):
        asked.append((columns, conditions(*where, SCHEMA)))
        return table.scan(columns, where)

    t = TableDataset(SCHEMA, read)  # noqa: F841 (DuckDB finds it by its name)
    with duckdb.connect() as duck:
        duck.execute("SET TimeZone = 'UTC'")
        for sql in (
            "SELECT f FROM t WHERE id > 5 AND id <= 7 AND n IS NOT NULL",
            """SELECT id FROM t WHERE s = 'b "x" and (y' AND d >= DATE '2026-01-31'""",
            "SELECT id FROM t WHERE id IN (1, 3)",
            'SELECT id FROM t WHERE "a b" = 3 AND m < 1.75',
        ):
            assert duck.sql(sql).fetchall()
    assert [(columns, sorted(where, key=repr)) for columns, where in asked] == [
        (["f"], [("id", "<=", 7), ("id", ">", 5), ("n", "is not null")]),
        (["id"], [("d", ">=", DAY), ("s", "=", 'b "x" and (y')]),
        (["id"], [("id", "in", [1, 3])]),
        (["id"], [("a b", "=", 3), ("m", "<", Decimal("1.75"))]),
    ]


compared = st.sampled_from(["=", "<>", "<", "<=", ">", ">="])
tests = st.one_of(
    st.builds("{} {} {}".format, st.sampled_from(["id", "n", "f", "m", '"a b"']), compared,
              st.integers(-3, 40)),
    st.builds("s {} '{}'".format, compared,
              st.sampled_from([text.replace("'", "''") for text in TEXTS])),
    st.builds("d {} DATE '{}'".format, compared, st.sampled_from([row["d"] for row in ROWS])),
    st.builds("t {} TIMESTAMPTZ '{}'".format, compared, st.sampled_from([r["t"] for r in ROWS])),
    st.builds("{} IN {}".format, st.sampled_from(["id", "n"]),
              st.lists(st.integers(0, 9), min_size=2, max_size=30).map(tuple)),
    st.builds("{} IS {}NULL".format, st.sampled_from(["n", "f", "s"]),
              st.sampled_from(["", "NOT "])),
)  # fmt: skip
filters = st.recursive(
    tests,
    lambda inner: st.one_of(
        st.builds("({} AND {})".format, inner, inner), st.builds("({} OR {})".format, inner, inner)
    ),
    max_leaves=4,
)


@settings(max_examples=80, deadline=None)
@given(where=filters, columns=st.sampled_from(["id", "s, f", '"a b", n', "count(*)", "sum(m)"]))
def test_duckdb_answers_as_of_a_table_of_its_own(both, where, columns):
    sql = f"SELECT {columns} FROM {{}} WHERE {where}"
    found, wanted = (sorted(map(repr, both.sql(sql.format(t)).fetchall())) for t in ("t", "plain"))
    assert found == wanted


def test_what_is_no_list_of_conditions_stays_an_expression():
    column = pc.field("id")
    for expression in (
        (column == 1) | (column == 2),
        column + 1 == 2,
        column.isin(pa.array(range(100))),
        pc.field("s") == pa.scalar(5),
        pc.field("nope") == 1,
        ~(column == 1),
        pc.field("t") == pa.scalar(NOON.replace(tzinfo=None)),
    ):
        assert conditions(expression, SCHEMA) is None
    assert conditions((column > pa.scalar(1, pa.int64())), SCHEMA) == [("id", ">", 1)]


def test_others_read_it_too(table):
    dataset = table.dataset()
    frame = polars.scan_pyarrow_dataset(dataset)
    found = frame.filter(polars.col("id") < 3).select("s", "id").collect()
    assert found["id"].to_list() == [0, 1, 2]
    assert dataset.schema == table.scan().schema
    assert dataset.count_rows() == 60
    assert dataset.count_rows(filter=pc.field("id") < 5) == 5
    assert dataset.to_table(columns=["f", "id"]).column_names == ["f", "id"]
    assert dataset.to_table(columns={"twice": pc.field("id") * 2})["twice"][1].as_py() == 2
    assert dataset.head(7).num_rows == 7
    assert sum(batch.num_rows for batch in dataset.to_batches()) == 60
    for refused in (dataset.get_fragments, lambda: dataset.sort_by("id"),
                    lambda: dataset.filter(pc.field("id") < 1)):  # fmt: skip
        with pytest.raises(txnkv.NotSupportedError, match="no files"):
            refused()
    with pytest.raises(txnkv.SchemaError, match="nope"):
        dataset.to_table(columns=["nope"])


def test_it_stays_at_its_snapshot(tmp_path):
    with txnkv.connect(tmp_path / "store") as client:
        table = client.create_table("t", txnkv.Schema({"id": "int64"}, ["id"]))
        table.insert((1,))
        latest = table.dataset()
        with client.snapshot() as snap:
            pinned = table.dataset(snap)
            table.insert((2,))
            table.alter(add={"n": "int8?"})
            assert (pinned.count_rows(), latest.count_rows()) == (1, 2)
            assert pinned.schema.names == ["id"]
