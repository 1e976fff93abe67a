"""Tables that are altered: before Spark plans, before it reads, and while it writes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import txnkv
import txnkv.spark

from .changes_tools import Query, close_clients

pytestmark = pytest.mark.spark

NEW = txnkv.Column("int32", default=7)


@pytest.fixture
def table(client: txnkv.Client, where: dict[str, str]) -> Iterator[txnkv.Table]:
    """Table t, with row 1."""
    with client.transaction() as txn:
        txn.insert("t", (1, "v1"))
    yield client.table("t")
    close_clients()


def planned(where: dict[str, str], **options: str) -> Any:
    source = txnkv.spark.TxnkvDataSource(where | options)
    return source.reader(source.schema())


def read(reader: Any) -> list[dict[str, Any]]:
    parts = pickle.loads(pickle.dumps(reader.partitions()))
    found = [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]
    return sorted(found, key=lambda row: row["id"])


def test_spark_reads_and_writes_an_altered_table(
    table: txnkv.Table,
    client: txnkv.Client,
    spark: Any,
    save: Callable[..., None],
    load: Callable[..., Any],
    nothing_is_left: Callable[[], None],
) -> None:
    before = client.snapshot()
    table.alter(add={"n": NEW}, rename={"v": "w"})
    save(spark.sql("SELECT 2L AS id, 'v2' AS w, 8 AS n UNION ALL SELECT 3L, 'v3', 9"))
    save(spark.sql("SELECT 1L AS id, 1 AS n"), operation="update")
    assert load().orderBy("id").collect() == [(1, "v1", 1), (2, "v2", 8), (3, "v3", 9)]
    assert load().filter("n = 8").collect() == [(2, "v2", 8)]
    assert load(snapshot=str(before.timestamp)).collect() == [(1, "v1")]
    table.alter(drop=["w"])
    assert load().orderBy("id").collect() == [(1, 1), (2, 8), (3, 9)]
    before.close()
    nothing_is_left()


def test_a_transaction_reads_the_columns_of_its_begin(
    table: txnkv.Table, client: txnkv.Client, where: dict[str, str]
) -> None:
    with client.transaction() as txn:
        token = str(txn.serialize())
        table.alter(rename={"v": "w"}, add={"n": NEW})
        assert read(planned(where, token=token)) == [{"id": 1, "v": "v1"}]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"drop": ["v"]}, "column 'v' is not there any more"),
        ({"rename": {"v": "w"}}, "column 'v' is not there any more"),
        ({"drop": ["v"], "add": {"v": "int64?"}}, "column 'v' is int64"),
    ],
)
def test_what_was_promised_is_not_there_any_more(
    table: txnkv.Table, where: dict[str, str], change: dict[str, Any], words: str
) -> None:
    reader = planned(where)
    table.alter(**change)
    with pytest.raises(txnkv.SchemaChangedError, match=words) as raised:
        reader.partitions()
    assert raised.value.retriable
    assert [row["id"] for row in read(planned(where))] == [1]


def test_what_came_since_is_not_read(table: txnkv.Table, where: dict[str, str]) -> None:
    reader = planned(where)
    table.alter(add={"n": NEW})
    assert read(reader) == [{"id": 1, "v": "v1"}]


def test_tasks_read_as_it_was_planned(table: txnkv.Table, where: dict[str, str]) -> None:
    reader = planned(where)
    parts = reader.partitions()
    table.alter(drop=["v"])
    found = [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]
    assert found == [{"id": 1, "v": "v1"}]


def test_a_job_writes_the_columns_of_its_begin(
    table: txnkv.Table,
    where: dict[str, str],
    nothing_is_left: Callable[[], None],
) -> None:
    """Tasks before and after the change, and the commit."""
    from pyspark.sql.types import LongType, StringType, StructField, StructType

    schema = StructType([StructField("id", LongType(), False), StructField("v", StringType())])
    writer = txnkv.spark.TxnkvDataSource(where).writer(schema, overwrite=False)
    writer = pickle.loads(pickle.dumps(writer))

    def stage(id: int) -> Any:
        return writer.write(iter([pa.record_batch({"id": [id], "v": [f"v{id}"]})]))

    told = [stage(2)]
    table.alter(rename={"v": "w"}, add={"n": NEW})
    told.append(stage(3))
    writer.commit(told)
    rows = table.scan(ordered=True).to_arrow().to_pylist()
    assert rows == [{"id": id, "w": f"v{id}", "n": 7} for id in (1, 2, 3)]
    nothing_is_left()


def test_a_stream_of_changes(table: txnkv.Table, client: txnkv.Client, store_path: Path) -> None:
    """A new column is no affair of a query that runs; one that is gone ends it."""
    pytest.importorskip("pyspark.sql.streaming.datasource")
    query = Query({"path": str(store_path), "table": "t", "changes": "true"})

    def step() -> list[tuple[Any, ...]]:
        tasks = query.plan()
        assert tasks is not None
        found = query.read(tasks)
        query.checkpoint.done += 1
        return [(row["id"], row["v"], row["_op"]) for row in found]

    assert step() == [(1, "v1", "insert")]
    table.alter(add={"n": NEW})
    with client.transaction() as txn:
        txn.update(table, {"id": 1, "v": "new", "n": 8})
    assert step() == [(1, "new", "update")]
    table.alter(rename={"v": "w"})
    with client.transaction() as txn:
        txn.update(table, {"id": 1, "w": "last"})
    with pytest.raises(txnkv.SchemaChangedError, match="'v' is not there any more"):
        query.plan()
    query.stop()  # begun again, it has the columns there are
    tasks = query.plan_again(query.checkpoint.done)
    (row,) = query.read(tasks)
    assert (row["w"], row["n"], row["_op"]) == ("last", 8, "update")
    query.stop()


@pytest.mark.parametrize("batch", [0, 1])
def test_a_batch_that_is_run_again(
    table: txnkv.Table, client: txnkv.Client, store_path: Path, batch: int
) -> None:
    """It was planned before the change, and not done: rows of then in the columns of now."""
    pytest.importorskip("pyspark.sql.streaming.datasource")
    table.alter(add={"k": "int16?", "gone": "string?"})
    query = Query({"path": str(store_path), "table": "t", "changes": "true"})
    with client.transaction() as txn:
        txn.upsert(table, {"id": 1, "v": "v1", "k": 3})
    assert query.plan()
    if batch:
        query.checkpoint.done += 1
        with client.transaction() as txn:
            txn.delete(table, 1)
            txn.insert(table, {"id": 2, "v": "v2", "k": None})
        assert query.plan()
    query.stop()
    new = {"n": NEW, "j": "json?", "u": "uuid?", "gone": txnkv.Column("int64", default=4)}
    table.alter(drop=["gone"])
    table.alter(rename={"v": "w"}, widen={"k": "int64"}, add=new)
    with client.transaction() as txn:
        txn.upsert(table, {"id": 2, "w": "later"})
    rows = sorted(query.read(query.plan_again(batch)), key=lambda row: row["id"])
    added = {"n": 7, "j": None, "u": None, "gone": 4}
    told = [{name: value for name, value in row.items() if name[0] != "_"} for row in rows]
    assert told[0] == {"id": 1, "w": "v1", "k": 3, **added}
    assert told[1:] == [{"id": 2, "w": "v2", "k": None, **added}] * batch
    assert [row["_op"] for row in rows] == [["insert"], ["delete", "insert"]][batch]
    query.checkpoint.done += 1
    assert [(row["id"], row["w"]) for row in query.trigger() or ()] == [(2, "later")]
    query.stop()


def test_a_batch_that_is_run_again_with_nulls(
    table: txnkv.Table, client: txnkv.Client, store_path: Path
) -> None:
    """A column may not be null any more, and Spark would look at none: it says the way out."""
    pytest.importorskip("pyspark.sql.streaming.datasource")
    query = Query({"path": str(store_path), "table": "t", "changes": "true"})
    with client.transaction() as txn:
        txn.insert(table, (2, None))
    assert query.plan()
    query.stop()
    with client.transaction() as txn:
        txn.update(table, {"id": 2, "v": "v2"})
    table.alter(nullable={"v": False})
    tasks = query.plan_again(0)
    with pytest.raises(txnkv.SchemaChangedError, match=r"nullable=\{'v': True\}"):
        query.read(tasks)
    query.stop()
    table.alter(nullable={"v": True})
    rows = query.read(query.plan_again(0))
    assert sorted((row["id"], row["v"]) for row in rows) == [(1, "v1"), (2, None)]
    query.stop()
    query.checkpoint.done += 1
    table.alter(nullable={"v": False})
    assert [(row["id"], row["v"]) for row in query.trigger() or ()] == [(2, "v2")]
    query.stop()
