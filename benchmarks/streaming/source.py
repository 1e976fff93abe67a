"""A topic as a streaming source, beside one that does nothing.

Messages of 100 bytes without keys, in two partitions, go to Spark's own sink that does nothing,
in micro batches of a fifth of them each.
"""

from __future__ import annotations

import zlib
from contextlib import ExitStack, closing

import pyarrow as pa
from pyspark.sql import DataFrame

import txnkv
from benchmarks.harness import Line

from . import kafka
from .nothing import FORMAT, save
from .queries import Batch, Streamer, drain, race_queries
from .setting import PARTITIONS, TASKS, WORTH, Setting, chunks

NOTHING = "source that does nothing"
_SAMPLE = 1 << 14


def source(setting: Setting) -> list[Line]:
    """All columns of the messages, in the order of offsets and in that of commits."""
    rows = setting.rows(5000, 10_000_000)
    each = str(rows // setting.batches)
    with ExitStack() as stack:
        client = stack.enter_context(closing(setting.connect("source")))
        _fill(client, rows)
        limit = {"maxOffsetsPerTrigger": each}
        sample = save(_sample(setting, client, min(rows, _SAMPLE)), setting.base / "sample.arrow")
        nothing = setting.spark.readStream.format(FORMAT).options(
            batch=sample, rows=str(rows), perTrigger=each, tasks=str(TASKS)
        )
        by_offset = setting.topic(client, "messages", **limit)
        by_commit = setting.topic(client, "messages", order="commit", **limit)
        for stream in (by_offset,) if setting.tiny else (by_offset, by_commit):
            _require_all(setting, stream, rows)
        streamers = [
            _streamer(setting, "txnkv", by_offset),
            _streamer(setting, NOTHING, nothing.load()),
            _streamer(setting, "txnkv, order=commit", by_commit),
        ]
        if setting.broker is not None:
            topic = kafka.fill(setting.broker, chunks(rows))
            stack.callback(setting.broker.drop, topic)
            stream = kafka.stream(setting, topic, minPartitions=str(TASKS), **limit)
            streamers.append(_streamer(setting, "kafka, in the JVM", stream))
        return race_queries(
            f"a topic as a stream, {rows:,} messages of 100 bytes",
            streamers,
            rows,
            rounds=setting.rounds,
            warm=not setting.tiny,
            ratios={NOTHING: WORTH},
        )


def _fill(client: txnkv.Client, rows: int) -> None:
    topic = client.create_topic("messages", partitions=PARTITIONS)
    for chunk in chunks(rows):
        with client.transaction() as txn:
            txn.send_batch(topic, chunk)


def _sample(setting: Setting, client: txnkv.Client, rows: int) -> pa.RecordBatch:
    """Rows as txnkv gives them to Spark."""
    frame = setting.spark.read.format("txnkv").option("path", str(client.path))
    found = frame.option("topic", "messages").load().limit(rows).toArrow()
    if len(found) != rows:
        raise RuntimeError(f"the topic has {len(found)} messages, {rows} were asked for")
    (batch,) = found.combine_chunks().to_batches()
    return batch


def _require_all(setting: Setting, stream: DataFrame, rows: int) -> None:
    """Refuse a race in which messages are missing, doubled or others."""
    found: list[tuple[int, int]] = []

    def batch(frame: DataFrame, _: int) -> None:
        row = frame.selectExpr("count(*)", "coalesce(sum(crc32(value)), 0)").first()
        assert row is not None
        found.append((row[0], row[1]))

    drain(stream.writeStream.foreachBatch(batch), setting.base / "checkpoint")
    count, total = (sum(some) for some in zip(*found, strict=True))
    sent = sum(zlib.crc32(v) for chunk in chunks(rows) for v in chunk["value"].to_pylist())
    if (count, total) != (rows, sent):
        raise RuntimeError(f"the stream gave {count} messages of {rows}, or others than were sent")


def _streamer(setting: Setting, name: str, stream: DataFrame) -> Streamer:
    def run() -> list[Batch]:
        return drain(stream.writeStream.format("noop"), setting.base / "checkpoint")

    return Streamer(name, run)
