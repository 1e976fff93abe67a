"""Batch reads: of a table at one snapshot, of a topic from one point of it to another.

`reader()`, `pushFilters()` and `partitions()` run once, in a planner process; `read()` runs
in tasks, which get the reader as it was then, pickled. All they share is what was planned: scan
tokens, which name the snapshot and ranges of keys, or pinned ranges of a topic's partitions.
Streams use the plans and tasks of topics, too.

Messages are rows of Spark:

    key        binary                                    null: none
    value      binary                                    null: none; or the topic's declared
                                                         columns, first and in its place
    headers    array<struct<key string, value binary>>   null: none
    partition  int
    offset     long
    timestamp  timestamp
    txn_id     long                                      its local part; null: of none

A row has exactly the schema that Spark was promised; what was not asked for is not made.

Filters of Spark are predicates of a scan where both mean the same. They differ on floats: to Spark
NaN equals NaN and is above every number, to Arrow it is neither; and zone maps tell -0.0 from 0.0.
So of floats only those filters are pushed down that no NaN satisfies, with constants that are
neither NaN nor zero. A filter that is not pushed down Spark evaluates itself, which is always
right.

Spark 4.1 to 4.3 keeps one plan for each `load()`, not for each query. With one data frame df,

    df.where("id > 5").count()      plans a read of id > 5, and keeps it
    df.count()                      has no filter to push, so it takes the plan that is there,
                                    and counts the rows with id > 5

and so does `df.where("id > 5").union(df)`. No data source can see that coming. So filters are
pushed down where the caller says, by option pushFilters, that the data frame is for one query.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Final, TypeVar

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import datasource
from pyspark.sql import types as spark
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from txnkv import core
from txnkv.client import DiffToken, Planning, Topic
from txnkv.core import UUID, uuid_of
from txnkv.core import compute as pc
from txnkv.errors import HistoryExpiredError, SchemaChangedError, SchemaError
from txnkv.spark.columns import (
    ToSpark,
    arrow_schema,
    as_spark_has_it,
    require_promised,
    spark_type,
)
from txnkv.spark.settings import Settings, TopicRead
from txnkv.spark.worker_client import client_of, join_open, runs, schema_of
from txnkv.tables import Schema, parse
from txnkv.topics import TASKS_A_CORE, TopicOffset, TopicPart, ValueCodec
from txnkv.transaction import Scan, ScanToken

TASK_ROWS: Final = 1 << 20
"""At most about so many rows a task."""
T = TypeVar("T", ScanToken, DiffToken)


def cut(tokens: Callable[[int], list[T]], least: int = 1) -> list[T]:
    """Enough tokens for the cores of this machine, if there is enough for them to do.

    Args:
        tokens: cuts them, of about so many rows each.
        least: no more tokens where each would have fewer rows.
    """
    found = tokens(TASK_ROWS)
    wanted = TASKS_A_CORE * (os.cpu_count() or 1)
    rows = sum(token.rows for token in found)
    each = max(least, -(-rows // wanted))
    return tokens(each) if len(found) < wanted and rows > each else found


class ScanPartition(InputPartition):
    """The part of a scan that one task reads."""

    def __init__(self, token: ScanToken) -> None:
        super().__init__(None)
        self.token = token


class TxnkvReader(DataSourceReader):
    """Reads a table.

    Args:
        settings: of the read.
        expected: the Arrow schema that Spark expects.
    """

    def __init__(self, settings: Settings, expected: pa.Schema) -> None:
        self._settings = settings
        self._expected = expected
        self._where: list[tuple[Any, ...]] = []

    def partitions(self) -> Sequence[InputPartition]:
        """The scan at one snapshot, in at least enough parts for the cores of this machine.

        Raises:
            SchemaChangedError: the table was altered since Spark was told its columns.
        """
        return [ScanPartition(token) for token in cut(self._scan().tokens)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one part, as Arrow batches.

        Raises:
            HistoryExpiredError: the task began when the snapshot of the plan was gone.
        """
        if not isinstance(partition, ScanPartition):
            return  # Spark's own placeholder for a read without partitions
        convert = ToSpark(self._expected)
        try:
            for batch in partition.token.open(client_of(self._settings)).to_batches():
                yield convert.batch(batch)
        except HistoryExpiredError as error:
            found = str(error).partition(". Read at a later time")[0]
            advice = (
                "in a streaming query, call load() inside of foreach_batch, and join there"
                if _in_stream()
                else "call load() again; for a read that takes longer, give the store or the table "
                "a larger history=, or read with a token of an open transaction"
            )
            raise HistoryExpiredError(
                f"{found}. A data frame keeps the snapshot of its first action, but not its "
                f"history: {advice}"
            ) from error

    def _scan(self) -> Scan:
        settings, columns = self._settings, self._expected.names
        client, name = client_of(settings), settings.table
        planning = Planning.of(client)
        if settings.token is not None:
            txn = join_open(client, settings.token, "read")
            require_promised(name, planning.schema_of(name, txn), self._expected)
            return txn.scan(name, columns, self._where)
        snapshot = client.snapshot(settings.snapshot)
        seen = planning.schema_of(name, snapshot.timestamp)
        require_promised(name, seen, self._expected)
        return client.table(name).scan(columns, self._where, snapshot)


def _in_stream() -> bool:
    task = TaskContext.get()
    return task is not None and task.getLocalProperty("sql.streaming.queryId") is not None


class PushingReader(TxnkvReader):
    """The same, where Spark's filter pushdown is on: see `pushdown_asked_for`."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        """Take the filters that a scan can evaluate; what is returned is left to Spark."""
        schema = schema_of(self._settings)
        for asked in filters:
            found = predicate_of(asked, schema)
            if found is None:
                yield asked
            else:
                self._where.append(found)


class TopicReader(DataSourceReader):
    """Reads a topic.

    Args:
        settings: of the read.
        expected: the Arrow schema that Spark expects.
    """

    def __init__(self, settings: TopicRead, expected: pa.Schema) -> None:
        self._settings = settings
        self._expected = expected

    def partitions(self) -> Sequence[InputPartition]:
        """Return the tasks that read what lies between options startingOffsets and endingOffsets.

        Raises:
            OffsetOutOfRangeError: one of them names an offset that is not there.
            ValueError: one of them makes no sense for this topic.
        """
        start = planned(self._settings, "initial")
        return tasks(self._settings, start, planned(self._settings, "final", start))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The messages of one part, as Arrow batches."""
        return read_task(self._settings, self._expected, partition)


# -- topics ----------------------------------------------------------------------------


def planned(settings: TopicRead, what: str, *args: Any) -> Any:
    """Return what the planner of a read of a topic says; see `TopicPlanner`."""
    return Planning.of(client_of(settings)).plan(settings.topic, settings.reading, what, *args)


def tasks(settings: TopicRead, start: TopicOffset, end: TopicOffset) -> list[InputPartition]:
    """Return the tasks that read what lies between two points of a topic."""
    parts = planned(settings, "parts", start, end, os.cpu_count() or 1)
    return [TopicTask(part) for part in parts]


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

    Raises:
        SchemaChangedError: a column of values was widened since.
    """

    def __init__(self, expected: pa.Schema, codec: ValueCodec | None) -> None:
        self._expected = expected
        self._codec = codec
        kinds = {} if codec is None else {field.name: field.type for field in codec.columns}
        self._declared = [name for name in expected.names if name in kinds]
        for name in self._declared:
            field = spark.StructField(name, spark_type(kinds[name], name), True)
            (now,) = arrow_schema(spark.StructType([field]))
            if now.type != expected.field(name).type:
                raise SchemaChangedError(
                    f"the topic was altered since Spark planned to read it: column {name!r} of its "
                    f"values is {now.type} now. Make the data frame or the query anew"
                )

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
    """The part of a topic that one task reads."""

    def __init__(self, part: TopicPart) -> None:
        super().__init__(None)
        self.part = part


def read_task(
    settings: TopicRead, expected: pa.Schema, task: InputPartition
) -> Iterator[pa.RecordBatch]:
    """The rows of a task of a topic, as Arrow batches.

    Raises:
        OffsetOutOfRangeError: retention took messages since they were planned.
        TopicNotFoundError: the topic was dropped since.
        CorruptionError: a batch is damaged.
    """
    # Batches are put together, for each costs its own way to Spark.
    if isinstance(task, TopicTask):  # else Spark's own placeholder for a read of nothing
        batches = _rows(settings, expected, task.part)
        yield from map(core.joined, core.gathered(batches, _ROWS, settings.max_bytes // 2))


def _rows(settings: TopicRead, expected: pa.Schema, part: TopicPart) -> Iterator[pa.RecordBatch]:
    client = client_of(settings)
    planning = Planning.of(client)
    rows = TopicRows(expected, client.topic(settings.topic).info.options.codec)
    may_lose = not settings.fail_on_data_loss
    for n, (number, _) in enumerate(part.ranges):
        for messages in planning.read_part(settings.topic, part, n, settings.max_bytes, may_lose):
            yield rows.batch(messages, number)


# -- filters ---------------------------------------------------------------------------

_COMPARE: Final[dict[type, str]] = {
    datasource.EqualTo: "=",
    datasource.GreaterThan: ">",
    datasource.GreaterThanOrEqual: ">=",
    datasource.LessThan: "<",
    datasource.LessThanOrEqual: "<=",
    datasource.In: "in",
}
_NULL: Final[dict[type, str]] = {
    datasource.IsNull: "is null",
    datasource.IsNotNull: "is not null",
}
_WORKER: Final = "pyspark.sql.worker.data_source_pushdown_filters"


def pushdown_asked_for() -> bool:
    """Tell whether this process plans a read with filter pushdown.

    Spark refuses a reader that implements `pushFilters` while its setting is off, and tells
    the reader nothing of the setting; but with it on, another worker program plans the read.
    """
    return runs(_WORKER)


def predicate_of(asked: datasource.Filter, table: Schema) -> tuple[Any, ...] | None:
    """The predicate that means the same as a filter of Spark, or None."""
    attribute: tuple[str, ...] = getattr(asked, "attribute", ())
    if len(attribute) != 1 or attribute[0] not in table.columns:
        return None
    name = attribute[0]
    if type(asked) in _NULL:
        return (name, _NULL[type(asked)])
    op = _COMPARE.get(type(asked))
    if op is None:
        return None
    kind = table.columns[name].type
    value: Any = asked.value  # type: ignore[attr-defined]
    constants = [_constant(item, kind) for item in (value if op == "in" else [value])]
    if op == "in":
        constants = [constant for constant in constants if constant is not None]
    if not all(_same_meaning(constant, op, kind) for constant in constants):
        return None
    found = (name, op, constants if op == "in" else constants[0])
    try:
        parse([found], table)
    except (SchemaError, TypeError):
        return None
    return found


def _constant(value: Any, kind: pa.DataType) -> Any:
    """Spark holds uint64 as a decimal."""
    if pa.types.is_integer(kind) and isinstance(value, Decimal) and value == int(value):
        return int(value)
    return value


_GAP: Final = date(1582, 10, 4), date(1582, 10, 26)
"""Java's calendar has no October 5 to 14 of this year: Spark gives later days for them."""


def _same_meaning(constant: Any, op: str, kind: pa.DataType) -> bool:
    if constant is None:
        return False
    if pa.types.is_floating(kind):
        number = isinstance(constant, float) and not math.isnan(constant) and constant != 0
        return number and op in ("=", "in", "<", "<=")
    if isinstance(constant, date) and _GAP[0] <= date(*constant.timetuple()[:3]) < _GAP[1]:
        return False
    if pa.types.is_date(kind):
        return not isinstance(constant, datetime)
    if kind == UUID:  # Spark compares texts
        return isinstance(constant, str) and _is_as_printed(constant)
    return True


def _is_as_printed(text: str) -> bool:
    try:
        return str(uuid_of(text)) == text
    except ValueError:
        return False
