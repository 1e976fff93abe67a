"""foreach_batch under Spark: tables, topics and acks of a micro batch are one commit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import txnkv
import txnkv.spark
from tools.children import Children

pytest.importorskip("pyspark.sql.streaming.datasource")

KEYS = 7
PATIENCE = 300.0
"""Seconds in which a driver that starts a Spark of its own has to come to its end."""

SEEN = txnkv.Schema({"message": "string", "key": "string"}, primary_key=["message"])


class Pipeline:
    """Puts each message into a table, and sends it on to a second topic."""

    def __init__(self, spark: Any, client: txnkv.Client, folder: Path) -> None:
        self.spark = spark
        self.client = client
        self.path = client.path
        self.checkpoint = folder / "checkpoint"
        self.called: list[int] = []
        self.fails: int | None = None
        self.sent = 0
        client.create_topic("events", partitions=2, exists_ok=True)
        client.create_topic("passed", partitions=2, buffer="sidecar", exists_ok=True)
        client.create_table("seen", SEEN, exists_ok=True)
        batches = txnkv.Schema({"id": "int64"}, primary_key=["id"])
        client.create_table("batches", batches, exists_ok=True)

    def send(self, count: int) -> None:
        with self.client.transaction() as txn:
            for _ in range(count):
                txn.send("events", f"m{self.sent}", key=f"k{self.sent % KEYS}")
                self.sent += 1

    def fn(self, df: Any, batch_id: int, txn: txnkv.Transaction) -> None:
        self.called.append(batch_id)
        df.persist()
        seen = df.selectExpr("CAST(value AS STRING) AS message", "CAST(key AS STRING) AS key")
        _save(seen, **txnkv.spark.options(txn, table="seen"))
        _save(df.select("key", "value"), **txnkv.spark.options(txn, topic="passed"))
        txn.insert("batches", (batch_id,))
        df.unpersist()
        if batch_id == self.fails:
            raise RuntimeError(f"batch {batch_id} fails")

    def run(self, **options: Any) -> None:
        """All that there is now, a few messages a batch."""
        do = txnkv.spark.foreach_batch(self.path, self.fn, "counting", "counter")
        stream = self.spark.readStream.format("txnkv").option("path", self.path)
        stream = stream.option("topic", "events").options(**{"maxOffsetsPerTrigger": 20} | options)
        writer = stream.load().writeStream.foreachBatch(do).trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(self.checkpoint)).start()
        try:
            query.awaitTermination()
        finally:
            query.stop()

    def check(self) -> None:
        """Check that acknowledged messages are seen and passed on, each once, and nothing else."""
        done = self.acknowledged()
        rows = {row["message"]: row["key"] for row in self.client.table("seen").scan()}
        assert rows == {f"m{n}": f"k{n % KEYS}" for n in done}
        assert _values(self.client.topic("passed")) == {f"m{n}" for n in done}

    def acknowledged(self) -> set[int]:
        with self.client.topic("events").subscribe("counter") as subscription:
            left = subscription.receive_many(10_000, timeout=0)
        return set(range(self.sent)) - {int((m.value or b"")[1:]) for m in left}

    def batches(self) -> list[int]:
        return sorted(row["id"] for row in self.client.table("batches").scan())


def _save(frame: Any, **options: str) -> None:
    frame.write.format("txnkv").options(**options).mode("append").save()


def _values(topic: txnkv.Topic) -> set[str]:
    with topic.consumer() as consumer:
        values = [(m.value or b"").decode() for m in consumer.poll(max_messages=10_000, timeout=0)]
    assert len(set(values)) == len(values)
    return set(values)


@pytest.fixture
def pipeline(spark: Any, client: txnkv.Client, tmp_path: Path) -> Pipeline:
    return Pipeline(spark, client, tmp_path)


def test_tables_topics_and_acks_are_one_commit(
    pipeline: Pipeline, client: txnkv.Client, nothing_is_left: Callable[[], None]
) -> None:
    """A batch fails when all of it is staged. The query goes on with it, and seems to have died
    after the commit, before Spark noted it: its next run is given the batch again. In the end
    another query comes, which would count batches from 0.
    """
    pipeline.send(30)
    pipeline.fails = 1
    with pytest.raises(Exception, match="batch 1 fails"):
        pipeline.run()
    assert pipeline.called == [0, 1]
    assert pipeline.batches() == [0]
    assert 15 < len(pipeline.acknowledged()) < 25
    pipeline.check()
    found = client.applied("counting")
    assert found is not None
    assert found.version == 0

    pipeline.fails = None
    pipeline.called.clear()
    pipeline.run()
    assert pipeline.called == [1]
    assert len(pipeline.acknowledged()) == 30
    pipeline.check()

    for name in ("1", ".1.crc"):
        (pipeline.checkpoint / "commits" / name).unlink()
    pipeline.send(5)
    pipeline.called.clear()
    pipeline.run()
    assert pipeline.called == [2]
    assert pipeline.batches() == [0, 1, 2]
    assert len(pipeline.acknowledged()) == 35
    pipeline.check()

    pipeline.checkpoint = pipeline.checkpoint.with_name("another")
    pipeline.called.clear()
    with pytest.raises(Exception, match=r"(?s)ValueError.*forget_applied"):
        pipeline.run()
    assert pipeline.called == []
    pipeline.check()
    nothing_is_left()


DRIVER = """
from pathlib import Path
from pyspark.sql import SparkSession
from tests.spark.conftest import KEEP_QUIET
from tests.spark.test_foreach_batch_streams import Pipeline
from txnkv.storage.faults import arm_from_environment

builder = SparkSession.builder.master("local[2]")
for key, value in KEEP_QUIET:
    builder = builder.config(key, value)
spark = builder.getOrCreate()
arm_from_environment({"TXNKV_FAULT": args[2]})
pipeline = Pipeline(spark, txnkv.connect(args[0], create=False), Path(args[1]))
pipeline.run()
say("ran", *pipeline.called)
spark.stop()
"""


@pytest.mark.slow
def test_a_driver_that_is_killed_goes_on_where_it_was(client: txnkv.Client, tmp_path: Path) -> None:
    """At steps of its commit, the one after the other: before, in and after the commit point."""
    pipeline = Pipeline(None, client, tmp_path)
    pipeline.send(200)
    faults = [
        "applications.staged=kill@1",
        "commit.started=kill@2",
        "applications.written=kill@1",
        "commit.decided=kill@2",
        "commit.ended=kill@1",
    ]
    with Children() as children:
        for fault in faults:
            killed = children.start(DRIVER, client.path, tmp_path, fault)
            code = killed.popen.wait(timeout=PATIENCE)
            assert code == -9, killed.popen.communicate(timeout=PATIENCE)
            done = pipeline.batches()
            assert done == list(range(len(done)))
        last = children.start(DRIVER, client.path, tmp_path, "")
        said, errors = last.popen.communicate(timeout=PATIENCE)
        assert last.popen.returncode == 0, errors
    assert said.split()[:2] == ["ran", str(len(done))]
    assert len(pipeline.acknowledged()) == 200
    pipeline.check()
    with client.topic("events").subscribe("counter") as subscription:
        assert set(subscription.lag().values()) == {0}
