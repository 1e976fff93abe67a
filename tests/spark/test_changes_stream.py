"""Changes of a table as a stream, driven call by call as Spark does it; with Spark itself at the
end.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from txnkv.coordinator.maintenance import Maintenance
from txnkv.spark.streams import stream_readers
from txnkv.spark.streams.stream_readers import changes_schema

from .changes_tools import Query, Row, close_clients, told

pytestmark = pytest.mark.spark

SCHEMA = txnkv.Schema({"id": "int64", "v": "string?"}, primary_key=["id"])
Make = Callable[..., Query]


@pytest.fixture
def make(
    request: pytest.FixtureRequest, store_path: Path, host: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Make]:
    """Queries over the changes of table t, with more options."""
    monkeypatch.setattr(Maintenance, "start", lambda self: None)
    made: list[Query] = []

    def query(**options: str) -> Query:
        here = host == "here"
        path = str(store_path) if here else request.getfixturevalue("client").path
        place = {"path": path, "table": "t", "changes": "true"}
        made.append(Query(place | options))
        return made[-1]

    yield query
    for one in made:
        one.stop()
    close_clients()


@pytest.fixture
def table(client: txnkv.Client) -> txnkv.Table:
    return client.create_table("t", SCHEMA, txnkv.hash_partition("id", 2))


def put(client: txnkv.Client, *ids: int, v: str = "", table: str = "t") -> txnkv.Timestamp:
    with client.transaction() as txn:
        rows = {"id": pa.array(ids, pa.int64()), "v": [v or f"v{id}" for id in ids]}
        txn.write(table, pa.table(rows), "upsert")
    return txn.commit()


def delete(client: txnkv.Client, *ids: int) -> txnkv.Timestamp:
    with client.transaction() as txn:
        txn.write("t", pa.table({"id": pa.array(ids, pa.int64())}), "delete")
    return txn.commit()


def compact(client: txnkv.Client) -> None:
    internals.flush(client)
    internals.compact(client)


def of(rows: list[Row] | None) -> list[tuple[str, Any, int]]:
    assert rows is not None
    return told(rows, "id")


# -- what a batch has --------------------------------------------------------------------


@pytest.mark.usefixtures("size")
def test_all_rows_then_what_changes(client: txnkv.Client, table: txnkv.Table, make: Make) -> None:
    put(client, 1, 2)
    loaded = put(client, 3)
    query = make()
    rows = query.trigger()
    assert of(rows) == [("insert", id, loaded) for id in (1, 2, 3)]
    assert query.trigger() is None
    put(client, 2, 4, v="between")
    changed = put(client, 2, 4, v="new")
    gone = delete(client, 1)
    put(client, 9)
    delete(client, 9)
    rows = query.trigger()
    assert of(rows) == [("delete", 1, gone), ("update", 2, changed), ("insert", 4, changed)]
    assert {row["id"]: row["v"] for row in rows or ()} == {1: "v1", 2: "new", 4: "new"}
    assert query.trigger() is None


def test_where_it_begins(client: txnkv.Client, table: txnkv.Table, make: Make) -> None:
    first = put(client, 1)
    second = put(client, 2)
    between = (second.datetime + timedelta(microseconds=1)).isoformat()
    latest, at, by_clock = (make(startingOffsets=text) for text in ("latest", str(first), between))
    assert of(latest.trigger()) == of(by_clock.trigger()) == []
    assert of(at.trigger()) == [("insert", 2, second)]
    third = put(client, 3)
    for query in (latest, at, by_clock):
        assert of(query.trigger()) == [("insert", 3, third)]
        assert query.trigger() is None
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    with pytest.raises(ValueError, match="future"):
        make(startingOffsets=tomorrow).trigger()


def test_a_table_without_rows(client: txnkv.Client, table: txnkv.Table, make: Make) -> None:
    query = make()
    assert query.trigger() == []
    assert query.trigger() is None
    at = put(client, 1)
    assert of(query.trigger()) == [("insert", 1, at)]


def test_other_tables_make_no_batches(client: txnkv.Client, table: txnkv.Table, make: Make) -> None:
    """Else a sink in the same store would set its own query off again and again."""
    client.create_table("other", SCHEMA)
    put(client, 1)
    query = make()
    query.trigger()
    for id in range(3):
        put(client, id, table="other")
        assert query.trigger() is None
    assert query.start().reportLatestOffset() == query.checkpoint.end
    at = put(client, 2)
    assert query.start().reportLatestOffset()["timestamp"] == at
    assert of(query.trigger()) == [("insert", 2, at)]
    assert query.checkpoint.end["since"] < at


def test_some_columns(client: txnkv.Client, table: txnkv.Table, make: Make) -> None:
    at = put(client, 1, 2)
    assert make(columns="_op,id").trigger() == [
        {"_op": "insert", "id": 1},
        {"_op": "insert", "id": 2},
    ]
    only = make(columns="_commit_timestamp")
    assert only.trigger() == [{"_commit_timestamp": at}] * 2
    later = delete(client, 2)
    assert only.trigger() == [{"_commit_timestamp": later}]
    with pytest.raises(txnkv.SchemaError, match="nope"):
        make(columns="id,nope").trigger()


def test_the_schema_that_spark_sees() -> None:
    schema = txnkv.Schema({"id": "uint64", "v": "string?", "_op": "int8"}, primary_key=["id"])
    found = changes_schema(schema, ["v", "id", "_commit_timestamp"])
    assert found.simpleString() == "struct<v:string,id:decimal(20,0),_commit_timestamp:bigint>"
    assert [field.nullable for field in found] == [True, False, False]
    for columns in (None, ["id", "_op"]):
        with pytest.raises(txnkv.SchemaError, match="option columns"):
            changes_schema(schema, columns)


def test_many_tasks(
    client: txnkv.Client, table: txnkv.Table, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first load and large changes are cut; small ones are one task, nothing is none."""
    monkeypatch.setattr(stream_readers, "LEAST_ROWS", 100)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    at = put(client, *range(2000))
    query = make()
    tasks = query.plan()
    assert tasks is not None
    assert 4 <= len(tasks) <= 16
    assert of(query.read(tasks)) == [("insert", id, at) for id in range(2000)]
    query.checkpoint.done += 1
    at = put(client, *range(0, 2000, 2), v="again")
    tasks = query.plan()
    assert tasks is not None
    assert 4 <= len(tasks) <= 16
    assert of(query.read(tasks)) == [("update", id, at) for id in range(0, 2000, 2)]
    query.checkpoint.done += 1
    put(client, 1, 2)
    tasks = query.plan()
    assert tasks is not None
    assert len(tasks) <= 2


# -- the same again ----------------------------------------------------------------------


def test_a_batch_gives_the_same_rows_in_other_processes(
    client: txnkv.Client, table: txnkv.Table, make: Make, process: Callable[..., Any]
) -> None:
    """Small commits are in this process's memory alone; they move; more come."""
    worker = process("""
        while word := wait():
            reader, tasks = pickle.loads(base64.b64decode(word))
            say([row for task in tasks for batch in reader.read(task) for row in batch.to_pylist()])
    """)
    put(client, *range(20))
    query = make()

    def ask(tasks: list[Any]) -> list[tuple[str, Any, int]]:
        worker.tell(base64.b64encode(pickle.dumps((query.start(), tasks))).decode())
        return of(worker.hear())

    for batch in range(2):
        tasks = query.plan()
        assert tasks is not None
        wanted = of(query.read(tasks))
        assert len(wanted) == (20, 3)[batch]
        assert ask(tasks) == wanted
        put(client, 3, 33, v="later")
        assert ask(tasks) == wanted
        compact(client)
        delete(client, 5 + batch)
        compact(client)
        assert ask(tasks) == wanted
        assert ask(query.plan_again(batch)) == wanted
        query.checkpoint.done += 1
    worker.tell("")


def test_the_first_batch_again_begins_where_it_began(
    client: txnkv.Client, table: txnkv.Table, make: Make
) -> None:
    """Spark asks anew for the start of a first batch that was planned and not run: "latest" is
    later then.
    """
    query = make(startingOffsets="latest")
    reader = query.start()
    start = reader.initialOffset()
    at = put(client, 1)
    query.checkpoint.offsets.append(json.dumps(reader.latestOffset(start, None)))
    query.stop()
    put(client, 2)
    assert of(query.trigger()) == [("insert", 1, at)]
    assert of(query.trigger())[0][1] == 2


# -- how long it is there ----------------------------------------------------------------


def put_each_hour(client: txnkv.Client, now: Any, *ids: int, table: str = "t") -> None:
    """Commits, after each of which nothing is kept of the past that nobody holds."""
    for id in ids:
        now.forward(3600)
        put(client, id, table=table)
        compact(client)


def test_a_query_that_runs_is_not_overtaken(
    client: txnkv.Client, table: txnkv.Table, make: Make, now: Any
) -> None:
    """Neither before a batch is planned, nor while its tasks run, again and again."""
    put(client, 1)
    query = make()
    query.trigger()
    put_each_hour(client, now, 2, 3)
    tasks = query.plan()
    assert tasks is not None
    put_each_hour(client, now, 4, 2)
    rows = query.read(tasks)
    assert [id for _, id, _ in of(rows)] == [2, 3]
    assert query.read(query.plan_again(1)) == rows
    query.checkpoint.done += 1
    assert [id for _, id, _ in of(query.trigger())] == [2, 4]


def test_what_is_done_is_not_kept(
    client: txnkv.Client, table: txnkv.Table, make: Make, now: Any
) -> None:
    first = put(client, 1)
    query = make()
    query.trigger()
    put_each_hour(client, now, 2)
    assert of(query.trigger())
    assert query.trigger() is None
    put_each_hour(client, now, 3)
    assert internals.tables(client).log.history_floor > first
    query.stop()
    put_each_hour(client, now, 4)
    assert internals.runtime(client).least_pin() is None


def test_a_history_that_passed_a_stopped_query(
    client: txnkv.Client, table: txnkv.Table, make: Make, now: Any
) -> None:
    """The named error says when, and what to do; a start before the history gives it as well."""
    first = put(client, 1)
    query = make()
    query.trigger()
    at = query.checkpoint.end["timestamp"]
    put_each_hour(client, now, 2, 3)
    tasks = query.plan()
    query.stop()
    put_each_hour(client, now, 4, 5)
    for _ in range(2):
        with pytest.raises(txnkv.HistoryExpiredError, match="history=") as told:
            query.plan()
        floor = internals.tables(client).log.history_floor
        assert f"({at})" in str(told.value)
        assert f"({floor})" in str(told.value)
        query.stop()
    with pytest.raises(txnkv.HistoryExpiredError, match="goes back to"):
        query.read(tasks or [])
    with pytest.raises(txnkv.HistoryExpiredError, match="startingOffsets"):
        make(startingOffsets=str(first)).trigger()
    assert [id for _, id, _ in of(make().trigger())] == [1, 2, 3, 4, 5]


def test_a_history_of_its_own_that_passed_a_stopped_query(client: txnkv.Client, make: Make) -> None:
    """The store's goes back further, and of what was deleted nothing is left."""
    client.create_table("t", SCHEMA, history=0.0)
    put(client, 1)
    query = make()
    assert query.trigger()
    query.stop()
    close_clients()  # a server hears of the end
    delete(client, 1)
    compact(client)
    with pytest.raises(txnkv.HistoryExpiredError, match="changes of table 't' are gone"):
        query.plan()


def test_a_table_that_rests_in_a_store_that_does_not(
    client: txnkv.Client, table: txnkv.Table, make: Make, now: Any
) -> None:
    """The stream moves on, now and then, so that it can be stopped; in between it makes no batch,
    and holds no old history.
    """
    client.create_table("other", SCHEMA)
    put(client, 1)
    query = make()
    query.trigger()
    batches = 0
    for _ in range(60):
        now.forward(60)
        put(client, 1, table="other")
        rows = query.trigger()
        assert rows in (None, [])
        batches += rows == []
    assert 5 <= batches <= 10, "every 7.5 of 60 minutes"
    compact(client)
    assert client.snapshot().timestamp.micros - internals.tables(
        client
    ).log.history_floor.micros < (1000 * 1_000_000)
    query.stop()
    now.forward(7 * 60)
    at = put(client, 2)
    compact(client)
    assert of(query.trigger()) == [("insert", 2, at)]


# -- what it is not good for -------------------------------------------------------------


def test_a_table_made_anew(client: txnkv.Client, table: txnkv.Table, make: Make) -> None:
    put(client, 1)
    query = make()
    query.trigger()
    put(client, 2)
    tasks = query.plan()
    client.drop_table("t")
    with pytest.raises(txnkv.TableNotFoundError):
        query.plan()
    with pytest.raises(txnkv.TableNotFoundError, match="dropped"):
        query.read(tasks or [])
    client.create_table("t", SCHEMA)
    for _ in range(2):
        with pytest.raises(txnkv.TableNotFoundError, match="another was made under its name"):
            query.plan()
        query.stop()


def test_a_store_restored_to_the_past(
    connect: Any, store_path: Path, tmp_path: Path, make: Make
) -> None:
    client = connect()
    client.create_table("t", SCHEMA)
    put(client, 1)
    client.close()
    shutil.copytree(store_path, tmp_path / "backup")
    client = connect()
    query = make()
    query.trigger()
    at = put(client, 2)
    query.trigger()
    query.stop()
    client.close()
    close_clients()
    shutil.rmtree(store_path)
    shutil.copytree(tmp_path / "backup", store_path)
    with pytest.raises(txnkv.OffsetOutOfRangeError, match=f"\\({at}\\).*restored to an earlier"):
        query.trigger()


def test_another_store_or_table(
    client: txnkv.Client, table: txnkv.Table, make: Make, tmp_path: Path
) -> None:
    put(client, 1)
    query = make()
    query.trigger()
    client.create_table("u", SCHEMA)
    with pytest.raises(ValueError, match="of table 't', the query reads those of 'u'"):
        Query({**query.options, "table": "u"}, query.checkpoint).trigger()
    with txnkv.connect(tmp_path / "other") as other:
        other.create_table("t", SCHEMA)
        elsewhere = Query({**query.options, "path": other.path}, query.checkpoint)
        with pytest.raises(txnkv.TableNotFoundError, match="another was made there"):
            elsewhere.trigger()
        elsewhere.stop()
        close_clients()
    query.stop()
    query.checkpoint.offsets.append('{"0": 17}')
    with pytest.raises(ValueError, match="of another source"):
        query.trigger()


def test_available_now_ends(client: txnkv.Client, table: txnkv.Table, make: Make) -> None:
    put(client, 1)
    query = make()
    query.start().prepareForTriggerAvailableNow()
    put(client, 2)
    assert [id for _, id, _ in of(query.trigger())] == [1]
    assert query.trigger() is None
    query.stop()
    query.start().prepareForTriggerAvailableNow()
    put(client, 3)
    assert [id for _, id, _ in of(query.trigger())] == [2]
    assert query.trigger() is None


# -- with Spark --------------------------------------------------------------------------


@pytest.mark.slow
def test_a_copy_that_follows(
    client: txnkv.Client, table: txnkv.Table, spark: Any, store_path: Path, tmp_path: Path
) -> None:
    """Changes of one table written into another of the same store: it does not set itself off,
    ends, and both are equal; a batch whose end Spark did not see changes nothing.
    """
    copy = client.create_table("copy", SCHEMA)
    place = {"path": str(store_path)}

    def run() -> Any:
        read = spark.readStream.format("txnkv").options(**place, table="t", changes="true")
        write = read.option("columns", "id,v,_op").load().writeStream.format("txnkv")
        write = write.options(**place, table="copy", operationColumn="_op")
        write = write.option("checkpointLocation", str(tmp_path / "c"))
        query = write.trigger(availableNow=True).start()
        query.awaitTermination()
        assert copy.scan(ordered=True).to_arrow() == table.scan().to_arrow().sort_by("id")
        return query

    put(client, *range(100))
    assert run().lastProgress["numInputRows"] == 100
    put(client, 5, 500, v="new")
    delete(client, *range(50, 60))
    assert run().lastProgress["numInputRows"] == 12
    for name in ("1", ".1.crc"):
        (tmp_path / "c" / "commits" / name).unlink()
    assert run().lastProgress["batchId"] == 1


def test_it_stops_with_the_named_error(
    client: txnkv.Client, table: txnkv.Table, spark: Any, store_path: Path, tmp_path: Path
) -> None:
    put(client, 1)

    def run() -> None:
        place = {"path": str(store_path), "table": "t", "changes": "true"}
        rows = spark.readStream.format("txnkv").options(**place).load()
        query = rows.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "c"))
        query.trigger(availableNow=True).start().awaitTermination()

    run()
    client.drop_table("t")
    client.create_table("t", SCHEMA)
    with pytest.raises(Exception, match="TableNotFoundError: table 't' of the checkpoint"):
        run()
