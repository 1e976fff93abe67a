"""A whole pipeline: messages in, counts by key into a table, alerts into a second topic.

    messages  -->  every micro batch:  counts of its keys, added to those of the table  --> counts
                                       messages that begin with ERROR                   --> alerts

The same function of Spark's foreachBatch runs on three sets of stores:

    txnkv    topic -> table and topic, by `txnkv.spark.foreach_batch`: one commit a micro batch
    parquet  files -> the counts as a new version each batch, alerts appended, with a checkpoint
    kafka    topic -> the counts as for parquet, alerts to a topic, with a checkpoint

Only the first is exactly-once over both outputs: a driver of the others that is killed after the
alerts and before the checkpoint gives them again. One message in a hundred is an alert.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

import txnkv
import txnkv.spark
from benchmarks.harness import Line
from benchmarks.kafka import Broker

from . import kafka
from .queries import Batch, Streamer, drain, race_queries
from .setting import MESSAGE, PARTITIONS, Setting, chunks, standing

KEYS: Final = 1000
_COUNTS: Final = txnkv.Schema({"key": "binary", "n": "int64"}, primary_key=["key"])
_ALERT: Final = "startswith(value, cast('ERROR' AS binary))"


def pipeline(setting: Setting) -> list[Line]:
    """The race of the pipelines, in micro batches of a fifth of the messages each."""
    rows = setting.rows(2000, 2_000_000)
    with ExitStack() as stack:
        client = stack.enter_context(closing(setting.connect("pipeline")))
        streamers = [_ours(setting, client, rows), _parquet(setting, rows)]
        if setting.broker is not None:
            streamers.append(stack.enter_context(_kafka(setting, setting.broker, rows)))
        return race_queries(
            f"a pipeline: {rows:,} messages, counts by key and alerts",
            streamers,
            rows,
            rounds=setting.rounds,
            warm=not setting.tiny,
        )


# -- what is the same for all ----------------------------------------------------------


def lines(rows: int) -> Iterator[pa.Table]:
    """Messages with one of a thousand keys; one in a hundred is an alert."""

    def columns(some: range) -> dict[str, Any]:
        chance = np.random.default_rng(some.start)
        keys = [b"k%03d" % key for key in chance.integers(0, KEYS, len(some))]
        tail = b"x" * (MESSAGE - 14)
        words = [b"ERROR" if number % 100 == 0 else b"  all" for number in some]
        texts = [
            b"%b %08d" % (word, number) + tail for number, word in zip(some, words, strict=True)
        ]
        return {"key": pa.array(keys, pa.binary()), "value": pa.array(texts, pa.binary())}

    return chunks(rows, columns)


def expected(rows: int) -> dict[bytes, int]:
    """Count the messages of each key."""
    keys = pa.chunked_array([chunk["key"].chunk(0) for chunk in lines(rows)])
    return {one["values"].as_py(): one["counts"].as_py() for one in pc.value_counts(keys)}


def process(
    frame: DataFrame,
    before: DataFrame,
    counts: Callable[[DataFrame], None],
    alerts: Callable[[DataFrame], None],
) -> None:
    """A micro batch.

    Args:
        frame: its messages.
        before: the counts before it: key and n.
        counts: takes the new counts of all keys that were there or came.
        alerts: takes the messages that are alerts.
    """
    frame.persist()
    try:
        here = frame.groupBy("key").count()
        joined = before.join(here, "key", "full")
        counts(joined.selectExpr("key", "coalesce(n, 0L) + coalesce(count, 0L) AS n"))
        alerts(frame.where(_ALERT).select("key", "value"))
    finally:
        frame.unpersist()


def _require(name: str, rows: int, counts: pa.Table, alerts: int) -> None:
    found = dict(zip(counts["key"].to_pylist(), counts["n"].to_pylist(), strict=True))
    if found != expected(rows) or len(counts) != len(found):
        raise RuntimeError(f"{name} counted {sum(found.values())} messages of {rows}, or wrongly")
    if alerts != -(-rows // 100):
        raise RuntimeError(f"{name} gave {alerts} alerts")


# -- txnkv -----------------------------------------------------------------------------


def _ours(setting: Setting, client: txnkv.Client, rows: int) -> Streamer:
    topic = client.create_topic("lines", partitions=PARTITIONS)
    for chunk in lines(rows):
        with client.transaction() as txn:
            txn.send_batch(topic, chunk)
    path = str(client.path)

    def empty() -> None:
        client.drop_table("counts", missing_ok=True)
        client.create_table("counts", _COUNTS)
        client.drop_topic("alerts", missing_ok=True)
        client.create_topic("alerts", partitions=PARTITIONS)
        client.forget_applied("pipeline")

    def batch(frame: DataFrame, number: int, txn: txnkv.Transaction) -> None:
        table = txnkv.spark.options(txn, table="counts")

        def counts(found: DataFrame) -> None:
            writer = found.write.format("txnkv").options(**table).option("operation", "upsert")
            writer.mode("append").save()

        def alerts(found: DataFrame) -> None:
            options = txnkv.spark.options(txn, topic="alerts")
            found.write.format("txnkv").options(**options).mode("append").save()

        before = frame.sparkSession.read.format("txnkv").options(**table).load()
        process(frame, before, counts, alerts)

    def run() -> list[Batch]:
        stream = setting.topic(
            client, "lines", columns="key,value", maxOffsetsPerTrigger=str(rows // setting.batches)
        )
        callback = txnkv.spark.foreach_batch(path, batch, app_id="pipeline")
        return drain(stream.writeStream.foreachBatch(callback), setting.base / "checkpoint")

    def check(_: int) -> None:
        counts = client.table("counts").scan().to_arrow()
        _require("txnkv", rows, counts, standing(client.topic("alerts")))

    return Streamer("txnkv", run, empty, check)


# -- Parquet files ---------------------------------------------------------------------


class _Versions:
    """Counts as Parquet files, a directory for each micro batch."""

    def __init__(self, setting: Setting, name: str) -> None:
        self._place = setting.base / f"{name}-counts"

    def _of(self, number: int) -> Path:
        return self._place / str(number)

    def empty(self) -> None:
        """Begin with no version."""
        shutil.rmtree(self._place, ignore_errors=True)

    def before(self, spark: SparkSession, number: int) -> DataFrame:
        """The counts before a micro batch."""
        if number == 0:
            return spark.createDataFrame([], "key BINARY, n BIGINT")
        return spark.read.parquet(str(self._of(number - 1)))

    def write(self, number: int, counts: DataFrame) -> None:
        """The counts after a micro batch; written again, the same."""
        counts.write.mode("overwrite").parquet(str(self._of(number)))

    def last(self) -> pa.Table:
        """The latest version."""
        return pq.read_table(self._of(max(int(path.name) for path in self._place.iterdir())))


def _parquet(setting: Setting, rows: int) -> Streamer:
    files, alerts_in = setting.base / "lines", setting.base / "alerts"
    _write_files(files, rows, setting.batches * PARTITIONS)
    versions = _Versions(setting, "parquet")

    def empty() -> None:
        versions.empty()
        shutil.rmtree(alerts_in, ignore_errors=True)

    def batch(frame: DataFrame, number: int) -> None:
        def alerts(found: DataFrame) -> None:
            found.write.mode("append").parquet(str(alerts_in))

        before = versions.before(frame.sparkSession, number)
        process(frame, before, lambda found: versions.write(number, found), alerts)

    def run() -> list[Batch]:
        reader = setting.spark.readStream.schema("key BINARY, value BINARY")
        stream = reader.option("maxFilesPerTrigger", PARTITIONS).parquet(str(files))
        return drain(stream.writeStream.foreachBatch(batch), setting.base / "checkpoint")

    def check(_: int) -> None:
        _require("parquet", rows, versions.last(), len(pq.read_table(alerts_in)))

    return Streamer("parquet files, checkpoint", run, empty, check)


def _write_files(place: Path, rows: int, count: int) -> None:
    place.mkdir()
    everything = pa.concat_tables(lines(rows)).select(["key", "value"]).combine_chunks()
    each = -(-rows // count)
    for number in range(count):
        pq.write_table(everything.slice(number * each, each), place / f"{number:03d}.parquet")


# -- Kafka -----------------------------------------------------------------------------


@contextmanager
def _kafka(setting: Setting, broker: Broker, rows: int) -> Iterator[Streamer]:
    topic = kafka.fill(broker, lines(rows))
    versions = _Versions(setting, "kafka")
    with closing(kafka.KafkaOut(broker, synced=False)) as out:

        def empty() -> None:
            versions.empty()
            out.empty()

        def batch(frame: DataFrame, number: int) -> None:
            def alerts(found: DataFrame) -> None:
                found.write.format("kafka").options(**out.options()).save()

            before = versions.before(frame.sparkSession, number)
            process(frame, before, lambda found: versions.write(number, found), alerts)

        def run() -> list[Batch]:
            limit = str(rows // setting.batches)
            stream = kafka.stream(setting, topic, maxOffsetsPerTrigger=limit)
            writer = stream.select("key", "value").writeStream.foreachBatch(batch)
            return drain(writer, setting.base / "checkpoint")

        def check(_: int) -> None:
            _require("kafka", rows, versions.last(), out.count())

        try:
            yield Streamer("kafka, parquet, checkpoint", run, empty, check)
        finally:
            broker.drop(topic)
