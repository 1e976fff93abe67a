"""A batch read: one snapshot, cut into scan tokens, a task each.

`reader()`, `pushFilters()` and `partitions()` run once, in a planner process; `read()` runs
in tasks, which get the reader as it was then, pickled. All they share is the tokens, which
name the snapshot and ranges of keys.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from txnkv.spark.columns import ToSpark
from txnkv.spark.joining import client_of, join_open
from txnkv.spark.reading import pushdown
from txnkv.spark.settings import Settings
from txnkv.transaction import Scan, ScanToken

TASK_ROWS: Final = 1 << 20
"""At most about so many rows a task."""
_TASKS_A_CORE: Final = 2


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
        """The scan at one snapshot, in at least enough parts for the cores of this machine."""
        scan = self._scan()
        tokens = scan.tokens(TASK_ROWS)
        wanted = _TASKS_A_CORE * (os.cpu_count() or 1)
        if len(tokens) < wanted:
            rows = sum(token.rows for token in tokens)
            tokens = scan.tokens(max(1, -(-rows // wanted)))
        return [ScanPartition(token) for token in tokens]

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
        if settings.token is not None:
            txn = join_open(client, settings.token, "read")
            return txn.scan(settings.table, columns, self._where)
        snapshot = client.snapshot(settings.snapshot)
        return client.table(settings.table).scan(columns, self._where, snapshot)


class PushingReader(TxnkvReader):
    """The same, where Spark's filter pushdown is on: see `pushdown.asked_for`."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        """Take the filters that a scan can evaluate; what is returned is left to Spark."""
        schema = client_of(self._settings).table(self._settings.table).schema
        for asked in filters:
            found = pushdown.predicate(asked, schema)
            if found is None:
                yield asked
            else:
                self._where.append(found)
