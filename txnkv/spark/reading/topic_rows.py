"""Messages as rows of Spark, and the tasks that read them, ranges that were pinned by the plan.

    key        binary                                    null: none
    value      binary                                    null: none; or the topic's declared
                                                         columns, first and in its place
    headers    array<struct<key string, value binary>>   null: none
    partition  int
    offset     long
    timestamp  timestamp
    txn_id     long                                      its local part; null: of none

A row has exactly the schema that Spark was promised; what was not asked for is not made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa
from pyspark.sql import types as spark
from pyspark.sql.datasource import InputPartition

from txnkv import core
from txnkv.client import Client, Topic
from txnkv.core import compute as pc
from txnkv.errors import OffsetOutOfRangeError, SchemaError, TopicNotFoundError
from txnkv.spark.columns import as_spark_has_it, spark_type
from txnkv.spark.settings import TopicRead
from txnkv.spark.worker_client import client_of
from txnkv.topics import (
    CommitReader,
    Partition,
    PinnedRange,
    ValueCodec,
    bounds,
    pinned_range,
)

_HEADER: Final = spark.StructType(
    [
        spark.StructField("key", spark.StringType(), False),
        spark.StructField("value", spark.BinaryType(), False),
    ]
)
_KEY: Final = spark.StructField("key", spark.BinaryType(), True)
_VALUE: Final = spark.StructField("value", spark.BinaryType(), True)
_REST: Final = (
    spark.StructField("headers", spark.ArrayType(_HEADER, False), True),
    spark.StructField("partition", spark.IntegerType(), False),
    spark.StructField("offset", spark.LongType(), False),
    spark.StructField("timestamp", spark.TimestampType(), False),
    spark.StructField("txn_id", spark.LongType(), True),
)


def topic_schema(topic: Topic, columns: Sequence[str] | None) -> spark.StructType:
    """The schema that Spark sees.

    Args:
        topic: what is read.
        columns: the projection, in order; None for all columns.

    Raises:
        SchemaError: there is no such column, or Spark has no type for it.
    """
    codec = topic.info.options.codec
    kinds = {} if codec is None else {field.name: field.type for field in codec.columns}
    fields: dict[str, spark.StructField | None] = dict.fromkeys(kinds)
    own = (_KEY, _VALUE, *_REST) if codec is None else (_KEY, *_REST)
    fields.update({field.name: field for field in own})
    for name in columns or ():
        if name not in fields:
            raise SchemaError(
                f"there is no column {name!r}: messages of topic {topic.name!r} have "
                f"{', '.join(fields)}"
            )
    return spark.StructType(
        [
            fields[name] or spark.StructField(name, spark_type(kinds[name], name), True)
            for name in (fields if columns is None else columns)
        ]
    )


class TopicRows:
    """Brings messages into the schema that Spark expects.

    Args:
        expected: the Arrow schema of what Spark was promised.
        codec: of the topic's values; None for bytes.
    """

    def __init__(self, expected: pa.Schema, codec: ValueCodec | None) -> None:
        self._expected = expected
        self._codec = codec
        declared = () if codec is None else codec.columns.names
        self._declared = [name for name in expected.names if name in declared]

    def batch(self, messages: pa.RecordBatch, partition: int) -> pa.RecordBatch:
        """Rows of one partition's messages, whose columns are those of `core.MESSAGES`."""
        decoded: dict[str, pa.Array] = {}
        if self._codec is not None and self._declared:
            values = self._codec.decode(messages.column("value"), self._declared)
            decoded = dict(zip(self._declared, values.columns, strict=True))
        arrays = []
        for field in self._expected:
            if field.name in decoded:
                made = decoded[field.name]
            else:
                made = self._column(field, messages, partition)
            same = made.type.equals(field.type) and not pa.types.is_nested(field.type)
            kept = same or field.name == "headers"
            arrays.append(made if kept else as_spark_has_it(made, field.type))
        return pa.RecordBatch.from_arrays(arrays, schema=self._expected)

    def _column(self, field: pa.Field, messages: pa.RecordBatch, partition: int) -> pa.Array:
        if field.name == "partition":
            return pa.repeat(pa.scalar(partition, pa.int32()), messages.num_rows)
        found = messages.column(field.name)
        if field.name == "offset":
            return found.view(pa.int64())
        if field.name == "txn_id":
            return _ids(found.view(pa.int64()))
        if field.name == "headers":
            return _headers(found, field.type)
        return found


def _ids(locals_: pa.Int64Array) -> pa.Int64Array:
    """Null for 0, which is no transaction's."""
    if pc.min(locals_).as_py() == 0:
        return pc.if_else(pc.not_equal(locals_, 0), locals_, None)
    return locals_


def _headers(blobs: pa.BinaryArray, kind: pa.DataType) -> pa.Array:
    if blobs.null_count == len(blobs):
        return pa.nulls(len(blobs), kind)
    made = core.split_headers(blobs)
    return made if made.type.equals(kind) else made.cast(kind)


# -- tasks -----------------------------------------------------------------------------

_ROWS: Final = 1 << 14
"""Rows of a batch that is not put together with others."""


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
        rows = _rows(client, topic, settings, expected, task)
        yield from _gathered(rows, settings.max_bytes // 2)


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
            found = _committed(client, partition, pinned, settings.max_bytes, may_lose)
        else:
            found = pinned_range.read(
                engine, partition, pinned, settings.max_bytes, skip_lost=may_lose
            )
        for messages in found:
            yield rows.batch(messages, number)


def _committed(
    client: Client, partition: Partition, pinned: PinnedRange, most: int, may_lose: bool
) -> Iterator[pa.RecordBatch]:
    """Messages of the commits that have their places in a range, commit by commit."""
    engine = client.instance.topics
    begin = None if may_lose else pinned.begin
    reader = CommitReader(engine, partition, pinned.start, most, end=pinned.end, begin=begin)
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


def _gathered(batches: Iterator[pa.RecordBatch], most: int) -> Iterator[pa.RecordBatch]:
    """The same rows; batches below both limits are put together: each costs its own way to Spark.

    Args:
        batches: as they are read.
        most: bytes.
    """
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        held.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if rows >= _ROWS or size >= most:
            yield _joined(held)
            held, rows, size = [], 0, 0
    if held:
        yield _joined(held)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)
