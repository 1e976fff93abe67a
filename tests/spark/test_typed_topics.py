"""Topics with a value schema in Spark itself: columns go in and out, in batches and streams."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import txnkv

pytestmark = pytest.mark.spark

COLUMNS = {
    "id": "int64",
    "small": "uint16?",
    "x": "float64?",
    "ok": "bool?",
    "name": "string?",
    "raw": "binary?",
    "day": "date32?",
    "at": "timestamp[us, tz=UTC]?",
    "price": "decimal128(9, 2)?",
    "tags": "list<string>?",
}
FULL = {
    "id": 1,
    "small": 65535,
    "x": 0.5,
    "ok": True,
    "name": "ü",
    "raw": b"\x00\xff",
    "day": date(2026, 1, 31),
    "at": datetime(2026, 1, 31, 12, 0, 0, 1, UTC),
    "price": Decimal("9.50"),
    "tags": ["a", None],
}
AS_SQL = (
    "id AS id, CAST(65535 AS INT) AS small, CAST(0.5 AS DOUBLE) AS x, true AS ok, 'ü' AS name, "
    "X'00FF' AS raw, DATE'2026-01-31' AS day, TIMESTAMP'2026-01-31T12:00:00.000001Z' AS at, "
    "CAST(9.50 AS DECIMAL(9, 2)) AS price, array('a', NULL) AS tags, CAST(id AS STRING) AS key"
)


def rows_of(topic: txnkv.Topic) -> list[Any]:
    with topic.consumer() as consumer:
        return sorted(
            (message.value for message in consumer.poll(timeout=0)),
            key=lambda row: (row is not None, row and row["id"]),
        )


def test_columns_go_through_spark_and_back(
    spark: Any, client: txnkv.Client, tmp_path: Path
) -> None:
    orders = client.create_topic("orders", partitions=2, value_schema=COLUMNS)
    copy = client.create_topic("copy", buffer="sidecar", value_schema=COLUMNS)
    source = spark.read.format("txnkv").option("path", client.path)
    with client.transaction() as txn:
        txn.send(orders, None, key=b"gone")
        txn.send(orders, {"id": 0}, headers={"h": b"1"})

    frame = spark.range(1, 5, numPartitions=2).selectExpr(f"struct({AS_SQL}) AS s").select("s.*")
    frame.write.format("txnkv").option("path", client.path).option("topic", "orders").mode(
        "append"
    ).save()
    empty = {**dict.fromkeys(COLUMNS), "id": 0}
    wanted = [None, empty, *({**FULL, "id": id} for id in range(1, 5))]
    assert rows_of(orders) == wanted

    read = source.option("topic", "orders").load()
    beside = ["key", "headers", "partition", "offset", "timestamp", "txn_id"]
    assert read.columns == [*COLUMNS, *beside]
    found = {row["id"]: row for row in read.collect()}
    assert bytes(found[None]["key"]) == b"gone"
    assert {name: found[None][name] for name in COLUMNS} == dict.fromkeys(COLUMNS)
    assert found[0]["headers"][0]["key"] == "h"
    assert (found[3]["small"], found[3]["price"], found[3]["tags"]) == (
        65535, Decimal("9.50"), ["a", None],
    )  # fmt: skip
    some = source.option("topic", "orders").option("columns", "name,id").load()
    assert sorted(tuple(row) for row in some.where("id > 2").collect()) == [("ü", 3), ("ü", 4)]

    stream = spark.readStream.format("txnkv").option("path", client.path).option("topic", "orders")
    query = (
        stream.load()
        .drop("partition", "offset", "txn_id")
        .writeStream.format("txnkv")
        .option("path", client.path)
        .option("topic", "copy")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(300)
    assert rows_of(copy) == wanted
    with copy.consumer() as consumer:
        copied = {message.key: message for message in consumer.poll(timeout=0)}
    assert copied[None].headers == [("h", b"1")]

    with pytest.raises(Exception, match="do not have: other"):
        spark.range(3).selectExpr("id", "1 AS other").write.format("txnkv").option(
            "path", client.path
        ).option("topic", "orders").mode("append").save()
    assert len(rows_of(orders)) == 6


def test_messages_of_a_schema_before_go_through_spark(
    spark: Any, client: txnkv.Client, tmp_path: Path
) -> None:
    topic = client.create_topic("t", value_schema={"id": "int32", "note": "string?"})
    with client.transaction() as txn:
        txn.send(topic, {"id": 1})
    source = spark.read.format("txnkv").option("path", client.path).option("topic", "t")
    planned = source.load()
    stream = spark.readStream.format("txnkv").option("path", client.path).option("topic", "t")

    def streamed() -> None:
        query = (
            stream.load()
            .writeStream.format("memory")
            .queryName("evolved")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(300)

    topic.alter(
        value_schema={"id": "int32", "note": "string?", "n": txnkv.Column("int8", False, 5)}
    )
    with client.transaction() as txn:
        txn.send(topic, {"id": 2, "n": 7})
    assert [tuple(row) for row in planned.select("id", "note").collect()] == [(1, None), (2, None)]
    streamed()
    assert spark.sql("SELECT id, n FROM evolved ORDER BY id").collect() == [(1, 5), (2, 7)]
    # A frame of the data before writes what it has.
    frame = spark.range(3, 4).selectExpr("CAST(id AS INT) AS id")
    frame.write.format("txnkv").option("path", client.path).option("topic", "t").mode(
        "append"
    ).save()
    topic.alter(
        value_schema={"id": "int64", "note": "string?", "n": txnkv.Column("int8", False, 5)}
    )
    with pytest.raises(Exception, match="column 'id' of its values is int64 now"):
        planned.select("id").collect()
    found = source.load().select("id", "n").collect()
    assert sorted(tuple(row) for row in found) == [(1, 5), (2, 7), (3, 5)]
