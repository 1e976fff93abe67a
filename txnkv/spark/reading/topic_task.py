"""The part of a topic that a task reads: ranges that were pinned when Spark planned, as rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from txnkv.client import Client, Topic
from txnkv.errors import OffsetOutOfRangeError, TopicNotFoundError
from txnkv.spark.joining import client_of
from txnkv.spark.reading.topic_columns import TopicRows
from txnkv.spark.settings_topics import TopicRead
from txnkv.topics import READ_BYTES, CommitReader, Partition, PinnedRange, bounds, pinned_range

_ROWS: Final = 1 << 14
_BYTES: Final = READ_BYTES // 2
"""Batches below both are put together: each costs its own way to Spark."""


class TopicTask(InputPartition):
    """The part of a topic that one task reads.

    Args:
        topic_id: of the topic that it was planned for.
        ranges: with the numbers of their partitions.
        scattered: the ranges are of places of commits, whose messages stand before them.
    """

    def __init__(
        self, topic_id: int, ranges: tuple[tuple[int, PinnedRange], ...], scattered: bool
    ) -> None:
        super().__init__(None)
        self.topic_id = topic_id
        self.ranges = ranges
        self.scattered = scattered


def read_task(
    settings: TopicRead, expected: pa.Schema, task: InputPartition
) -> Iterator[pa.RecordBatch]:
    """The rows of a task, as Arrow batches.

    Raises:
        OffsetOutOfRangeError: retention took messages since they were planned.
        TopicNotFoundError: the topic was dropped since.
        CorruptionError: a batch is damaged.
    """
    if isinstance(task, TopicTask):  # else Spark's own placeholder for a read of nothing
        client = client_of(settings)
        topic = client.topic(settings.topic)
        if topic.info.id != task.topic_id:
            raise TopicNotFoundError(
                f"topic {topic.name!r} was dropped while it was read, and another was made under "
                "its name: begin again, with a new checkpoint"
            )
        yield from _gathered(_rows(client, topic, settings, expected, task))


def _rows(
    client: Client, topic: Topic, settings: TopicRead, expected: pa.Schema, task: TopicTask
) -> Iterator[pa.RecordBatch]:
    engine = client.instance.topics
    rows = TopicRows(expected, topic.info.options.codec)
    partitions = engine.partitions(topic.info)
    may_lose = not settings.fail_on_data_loss
    for number, pinned in task.ranges:
        partition = partitions[number]
        if task.scattered:
            found = _committed(client, partition, pinned, may_lose)
        else:
            found = pinned_range.read(engine, partition, pinned, skip_lost=may_lose)
        for messages in found:
            yield rows.batch(messages, number)


def _committed(
    client: Client, partition: Partition, pinned: PinnedRange, may_lose: bool
) -> Iterator[pa.RecordBatch]:
    """Messages of the commits that have their places in a range, commit by commit."""
    engine = client.instance.topics
    begin = None if may_lose else pinned.begin
    reader = CommitReader(engine, partition, pinned.start, READ_BYTES, end=pinned.end, begin=begin)
    while True:
        try:
            ready = reader.load()
        except OffsetOutOfRangeError:
            start = bounds(engine, partition).start
            if not may_lose or start <= reader.position:
                raise
            if start >= pinned.end:
                return
            reader.seek(start)
            continue
        if ready:
            yield reader.take(1 << 31)
        elif not reader.moved:
            return


def _gathered(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows, small batches put together."""
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        held.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if rows >= _ROWS or size >= _BYTES:
            yield _joined(held)
            held, rows, size = [], 0, 0
    if held:
        yield _joined(held)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)
