"""Topics, and the changes of tables, as sources of streams.

Spark asks for the end of the next batch, writes it into its checkpoint, has the batch planned,
and runs it: again, from the checkpoint, if it did not see it end. One long-lived process plans;
tasks get what it pinned. See `topic_planner` and `changes_planner` for what makes a batch the same
each time.

    id    total   _op      _commit_timestamp
    1     9.5     insert   890663553417482240     there when the query began: the first load
    2     4.0     insert   890663553417482240
    1     11.0    update   890663553731055616     then what changed: rows as they are now,
    2     4.0     delete   890663553731055616     deleted ones as they were

A batch of changes has the net change of each key between two commit timestamps: see `tables.diff`,
which tells it by stamps, wherever flush and compaction put them. Rows of the first load carry the
timestamp of the snapshot that they were read at; when each was committed may be forgotten, and a
batch that runs again must give the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import LongType, StringType, StructField, StructType

from txnkv.client import DiffToken
from txnkv.errors import NotSupportedError, SchemaError
from txnkv.spark.columns import ToSpark, spark_schema
from txnkv.spark.reading import planned, read_task, tasks
from txnkv.spark.settings import ChangesRead, TopicRead
from txnkv.spark.streams.changes_planner import ChangesOffset, ChangesPlanner
from txnkv.spark.worker_client import client_of
from txnkv.tables import BATCH_ROWS, COMMIT_TIMESTAMP, OP, Schema
from txnkv.topics import TopicOffset
from txnkv.transaction import ScanToken

_ADDED: Final = {
    OP: StructField(OP, StringType(), False),
    COMMIT_TIMESTAMP: StructField(COMMIT_TIMESTAMP, LongType(), False),
}


def changes_schema(table: Schema, columns: Sequence[str] | None) -> StructType:
    """The schema that Spark sees: columns of the table, `_op` and `_commit_timestamp`.

    Args:
        table: the table's schema.
        columns: the projection, in order; None for all columns.

    Raises:
        SchemaError: there is no such column, or Spark has no type for it, or the table has one
            of the name of a column that is added.
    """
    names = [*table.names, *_ADDED] if columns is None else list(columns)
    for name in names:
        if name in _ADDED and name in table.columns:
            raise SchemaError(
                f"the table has a column {name!r}, and so have its changes: leave it out by "
                "option columns"
            )
    own = spark_schema(table, _of_table(names))
    return StructType([_ADDED[name] if name in _ADDED else own[name] for name in names])


def _of_table(names: Sequence[str]) -> list[str]:
    return [name for name in names if name not in _ADDED]


class ChangesPartition(InputPartition):
    """The part of a batch that one task reads.

    Attributes:
        token: of changes; or of rows of the first load.
        at: when the batch ends.
    """

    def __init__(self, token: ScanToken | DiffToken, at: int) -> None:
        super().__init__(None)
        self.token = token
        self.at = at


class ChangesStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the changes of a table as a stream.

    Args:
        settings: of the read.
        expected: the Arrow schema that Spark expects.
    """

    def __init__(self, settings: ChangesRead, expected: pa.Schema) -> None:
        self._settings = settings
        self._expected = expected
        columns = [expected.field(name) for name in _of_table(expected.names)]
        self._planner = ChangesPlanner(settings, pa.schema(columns))

    def __reduce__(self) -> tuple[Any, ...]:
        """A task gets a reader that keeps nothing: what it is to read is in its partition."""
        return ChangesStreamReader, (self._settings, self._expected)

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the point where a new query begins.

        Raises:
            HistoryExpiredError: option startingOffsets names a time before the history.
            ValueError: it names one in the future.
        """
        return self._planner.initial().json()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """The end of the batch that begins at `start`; `start` when nothing changed.

        A batch takes all there is: how many rows changed since is known when they are read.

        Raises:
            HistoryExpiredError: what comes next is gone.
            OffsetOutOfRangeError: the store was restored to an earlier time.
            TableNotFoundError: the table was dropped.
        """
        begun = self._parsed(start)
        end = self._planner.latest(begun)
        # Spark compares texts: the same place must be the same text.
        return start if end is begun else end.json()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """The latest snapshot of the store, for the query's progress."""
        return self._planner.newest().json()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """From now on nothing new is read."""
        self._planner.stop_at_latest()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the changes between two points, cut for tasks; they stay readable until `commit`.

        Raises:
            HistoryExpiredError: some of it is gone.
            OffsetOutOfRangeError: the store was restored to an earlier time.
            TableNotFoundError: the table was dropped.
        """
        at, tokens = self._planner.tasks(self._parsed(start), self._parsed(end))
        return [ChangesPartition(token, int(at)) for token in tokens]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The changes of one part, as Arrow batches."""
        if not isinstance(partition, ChangesPartition):
            return  # Spark's own placeholder for a batch without partitions
        convert, names = ToSpark(self._expected), self._expected.names
        for batch in self._batches(partition):
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield convert.batch(batch.slice(start, BATCH_ROWS).select(names))

    def commit(self, end: dict[str, Any]) -> None:
        """Let go of the history before `end`."""
        self._planner.done(self._parsed(end))

    def stop(self) -> None:
        """Let go of all history; the process keeps its client, and ends with the query."""
        self._planner.close()

    def _batches(self, partition: ChangesPartition) -> Iterator[pa.RecordBatch]:
        token, client = partition.token, client_of(self._settings)
        if isinstance(token, DiffToken):
            yield from token.open(client)
            return
        for batch in token.open(client).to_batches():
            n = batch.num_rows
            at = pa.repeat(pa.scalar(partition.at, pa.int64()), n)
            columns = [*batch.columns, pa.repeat("insert", n), at]
            yield pa.RecordBatch.from_arrays(
                columns, names=[*batch.schema.names, OP, COMMIT_TIMESTAMP]
            )

    def _parsed(self, given: dict[str, Any]) -> ChangesOffset:
        return ChangesOffset.parse(given, self._settings.table)


class TopicStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a topic as a stream.

    Args:
        settings: of the read.
        expected: the Arrow schema that Spark expects.
    """

    def __init__(self, settings: TopicRead, expected: pa.Schema) -> None:
        self._settings = settings
        self._expected = expected
        self._target: TopicOffset | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the point where a new query begins.

        Raises:
            OffsetOutOfRangeError: option startingOffsets names an offset that is not there.
        """
        return self._planned("initial").json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Option maxOffsetsPerTrigger."""
        most = self._settings.max_offsets_per_trigger
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """The end of the batch that begins at `start`; `start` when there is nothing.

        Raises:
            OffsetOutOfRangeError: what comes next is gone, or the log ends before the start.
            TopicNotFoundError: the topic was dropped.
        """
        if not isinstance(limit, ReadAllAvailable | ReadMaxRows):
            raise NotSupportedError(f"a topic is read by offsets, not by {type(limit).__name__}")
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        begun = self._parsed(start)
        end = self._planned("latest", begun, most, self._target)
        # Spark compares texts: the same place must be the same text.
        return start if end == begun else end.json()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Up to where there is something to read, for the query's progress."""
        return self._planned("ends").json()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """From now on nothing new is read."""
        self._target = self._planned("ends")

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the tasks that read what lies between two points, pinned.

        Raises:
            OffsetOutOfRangeError: some of it is gone, or never was in this store.
            TopicNotFoundError: the topic was dropped.
        """
        return tasks(self._settings, self._parsed(start), self._parsed(end))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The messages of one part, as Arrow batches."""
        return read_task(self._settings, self._expected, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing to be done: topics are kept by retention, not by readers."""

    def stop(self) -> None:
        """Nothing is held: the process keeps its client, and ends with the query."""

    def _parsed(self, given: dict[str, Any]) -> TopicOffset:
        return TopicOffset.parse(given, self._settings.topic, self._settings.order)

    def _planned(self, what: str, *args: Any) -> TopicOffset:
        found: TopicOffset = planned(self._settings, what, *args)
        return found
