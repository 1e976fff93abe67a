"""Batch reads: of a table at one snapshot, of a topic from one point of it to another.

`reader()`, `pushFilters()` and `partitions()` run once, in a planner process; `read()` runs
in tasks, which get the reader as it was then, pickled. All they share is what was planned: scan
tokens, which name the snapshot and ranges of keys, or pinned ranges of a topic's partitions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from txnkv.client import DiffToken
from txnkv.spark.columns import ToSpark, require_promised
from txnkv.spark.reading import pushdown
from txnkv.spark.reading.topic_planner import TASKS_A_CORE, TopicPlanner
from txnkv.spark.reading.topic_rows import read_task
from txnkv.spark.settings import Settings, TopicRead
from txnkv.spark.worker_client import client_of, join_open, schema_of
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
        """The rows of one part, as Arrow batches."""
        if not isinstance(partition, ScanPartition):
            return  # Spark's own placeholder for a read without partitions
        convert = ToSpark(self._expected)
        for batch in partition.token.open(client_of(self._settings)).to_batches():
            yield convert.batch(batch)

    def _scan(self) -> Scan:
        settings, columns = self._settings, self._expected.names
        client = client_of(settings)
        table = client.table_info(settings.table)
        if settings.token is not None:
            txn = join_open(client, settings.token, "read")
            seen = txn.context.table_at_begin(table)
            require_promised(table.name, seen.schema, self._expected)
            return txn.scan(settings.table, columns, self._where)
        snapshot = client.snapshot(settings.snapshot)
        seen = client.instance.engine.at(table, snapshot.timestamp)
        require_promised(table.name, seen.schema, self._expected)
        return client.table(settings.table).scan(columns, self._where, snapshot)


class PushingReader(TxnkvReader):
    """The same, where Spark's filter pushdown is on: see `pushdown.asked_for`."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        """Take the filters that a scan can evaluate; what is returned is left to Spark."""
        schema = schema_of(self._settings)
        for asked in filters:
            found = pushdown.predicate(asked, schema)
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
        planner = TopicPlanner(self._settings)
        start = planner.initial()
        return list(planner.tasks(start, planner.final(start)))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The messages of one part, as Arrow batches."""
        return read_task(self._settings, self._expected, partition)
