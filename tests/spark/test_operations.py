"""Operations other than insert, and mode overwrite: whole or not at all, under Spark's tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

import txnkv
import txnkv.spark
from txnkv.spark.source import TxnkvDataSource
from txnkv.spark.writing import _Split

pytestmark = pytest.mark.spark

Ids = Callable[..., list[int]]


@pytest.fixture
def overwrite(where: dict[str, str]) -> Callable[..., None]:
    """Replaces table t by a data frame."""

    def run(frame: Any, **options: str) -> None:
        frame.write.format("txnkv").options(**(where | options)).mode("overwrite").save()

    return run


def _values(client: txnkv.Client) -> dict[int, str | None]:
    found = client.table("t").scan().to_arrow()
    return dict(zip(found["id"].to_pylist(), found["v"].to_pylist(), strict=True))


def test_each_operation(
    client: txnkv.Client,
    save: Callable[..., None],
    rows: Callable[..., Any],
    nothing_is_left: Callable[[], None],
) -> None:
    save(rows(1, 40))
    new = rows(31, 50).selectExpr("id", "concat('new ', id) AS v")
    save(new, operation="upsert")
    expected = {i: f"v{i}" for i in range(1, 31)} | {i: f"new {i}" for i in range(31, 51)}
    assert _values(client) == expected
    save(rows(45, 60).selectExpr("id", "'updated' AS v"), operation="update_ignore")
    expected |= dict.fromkeys(range(45, 51), "updated")
    assert _values(client) == expected
    save(rows(1, 10).select("id"), operation="delete")
    save(rows(5, 15), operation="delete_ignore")
    assert _values(client) == {i: v for i, v in expected.items() if i > 15}
    with pytest.raises(Exception, match="no row has this key"):
        save(rows(10, 20), operation="update")
    with pytest.raises(Exception, match="no row has this key"):
        save(rows(10, 20), operation="delete")
    assert _values(client) == {i: v for i, v in expected.items() if i > 15}
    nothing_is_left()


def test_columns_that_a_data_frame_does_not_have(
    client: txnkv.Client, save: Callable[..., None], rows: Callable[..., Any]
) -> None:
    schema = txnkv.Schema({"id": "int64", "a": "string?", "b": "int64?"}, primary_key=["id"])
    client.create_table("wide", schema)
    save(rows(1, 20).selectExpr("id", "v AS a", "id AS b"), table="wide")
    save(rows(11, 30).selectExpr("id", "-id AS b"), table="wide", operation="upsert")
    assert list(client.table("wide").scan(ordered=True)) == [
        {"id": i, "a": f"v{i}" if i <= 20 else None, "b": i if i <= 10 else -i}
        for i in range(1, 31)
    ]


def test_overwrite_replaces_the_rows(
    client: txnkv.Client,
    save: Callable[..., None],
    overwrite: Callable[..., None],
    rows: Callable[..., Any],
    ids: Ids,
    nothing_is_left: Callable[[], None],
) -> None:
    overwrite(rows(1, 5))
    save(rows(10, 30))
    with client.transaction() as txn:
        txn.insert("t", {"id": 99})
    before = client.snapshot()
    overwrite(rows(20, 40).selectExpr("id", "'new' AS v"))
    assert _values(client) == dict.fromkeys(range(20, 41), "new")
    with before:
        found = before.scan("t").to_arrow()["id"].to_pylist()
        assert sorted(found) == [*range(1, 6), *range(10, 31), 99]
    overwrite(rows(1, 0))
    assert ids() == []
    nothing_is_left()


def test_overwrite_under_a_token(
    client: txnkv.Client,
    save: Callable[..., None],
    overwrite: Callable[..., None],
    rows: Callable[..., Any],
    ids: Ids,
    nothing_is_left: Callable[[], None],
) -> None:
    """It deletes what the transaction sees, its own rows as well; a failed job deletes nothing."""
    save(rows(1, 10))
    with client.transaction(timeout=None) as txn:
        options = txnkv.spark.options(txn, "t")
        save(rows(20, 25), **options)
        twice = rows(1, 20).selectExpr("v", "if(id = 20, 1, id) AS id").coalesce(1)
        with pytest.raises(Exception, match="an earlier row of the same data"):
            overwrite(twice, **options)
        seen = txn.scan("t").to_arrow()["id"].to_pylist()
        assert sorted(seen) == [*range(1, 11), *range(20, 26)]
        overwrite(rows(5, 22), **options)
        assert sorted(txn.scan("t").to_arrow()["id"].to_pylist()) == list(range(5, 23))
        assert ids() == list(range(1, 11))
    assert ids() == list(range(5, 23))
    nothing_is_left()


def test_overwrite_meets_a_row_that_came_meanwhile(
    client: txnkv.Client,
    save: Callable[..., None],
    overwrite: Callable[..., None],
    rows: Callable[..., Any],
    ids: Ids,
) -> None:
    """Deleted rows are written rows: who changed one of them first wins."""
    save(rows(1, 10))
    txn = client.new_transaction(timeout=None)
    overwrite(rows(20, 25), **txnkv.spark.options(txn, "t"))
    client.new_session().write("t", client.table("t").scan(where=[("id", "=", 3)]), "upsert")
    with pytest.raises(txnkv.TransactionConflictError, match="key 3"):
        txn.commit()
    assert ids() == list(range(1, 11))


UPPER = "0AAAAAAA-0000-0000-0000-00000000000B"


@pytest.mark.parametrize(
    ("kind", "first", "again"),
    [("uuid", UPPER, UPPER.lower()), ("float64", -0.0, 0.0), ("int64", 1, 1), ("string", "a", "a")],
)
def test_the_last_change_of_a_key_counts_however_it_is_spelled(
    kind: str, first: Any, again: Any
) -> None:
    """Deletes and puts are apart: a key in two spellings was in both."""
    schema = txnkv.Schema({"id": kind, "v": "int64?"}, primary_key=["id"])
    other = UPPER.replace("B", "C") if kind == "uuid" else type(first)(7)
    given = pa.table(
        {
            "id": [first, again, other, other],
            "v": pa.array([1, 2, 3, None], pa.int64()),
            "op": ["delete", "insert", "insert", "delete"],
        }
    )
    split = _Split(schema, given.schema, "op")
    found = {op: rows.read_all().num_rows for op, rows in split.operations(given)}
    assert found == {"upsert": 1, "delete_ignore": 1}
    first_alone = {op: rows.read_all().to_pylist() for op, rows in split.operations(given[:1])}
    assert list(first_alone) == ["delete_ignore"]
    assert list(split.operations(given[:0])) == []


def test_a_unique_value_that_moves_to_another_key_within_a_batch(
    client: txnkv.Client, where: dict[str, str]
) -> None:
    client.create_index(where["table"], "v", unique=True)
    for id, value in enumerate("abcd", 1):
        client.table("t").insert((id, value))
    given = pa.table(
        {
            "id": [1, 2, 3, 4, 20],
            "v": ["a", "c", "d", "b", "a"],
            "op": ["delete", "update", "update", "update", "insert"],
        }
    )
    split = _Split(client.table("t").schema, given.schema, "op")
    with client.transaction() as txn:
        for operation, rows in split.operations(given):
            txn.write("t", rows, operation)
    assert _values(client) == {2: "c", 3: "d", 4: "b", 20: "a"}


@pytest.mark.usefixtures("where")
def test_what_a_transaction_was_given_comes_before_its_next_job(client: txnkv.Client) -> None:
    """Also where it had a job before: its rows were applied behind those of the later ones."""
    columns = pa.schema([pa.field("id", pa.int64(), False), ("v", pa.string())])
    spark = StructType([StructField("id", LongType(), False), StructField("v", StringType())])

    def job(txn: txnkv.Transaction, value: str) -> None:
        options = txnkv.spark.options(txn, "t") | {"operation": "upsert"}
        writer = TxnkvDataSource(options).writer(spark, False)
        rows = pa.RecordBatch.from_pylist([{"id": 1, "v": value}], schema=columns)
        writer.commit([writer.write(iter([rows]))])

    with client.transaction(timeout=None) as txn:
        for number in range(3):
            txn.upsert("t", (1, f"driver {number}"))
            job(txn, f"job {number}")
            assert txn.get("t", 1) == {"id": 1, "v": f"job {number}"}
    assert _values(client) == {1: "job 2"}
    with client.transaction() as txn:
        txn.insert("t", (1, "again"))
        with pytest.raises(txnkv.RowErrors):
            txnkv.spark.options(txn, "t")
