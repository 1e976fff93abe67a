"""A streaming source and a streaming sink that do nothing, as format "nothing-stream".

The source has the rows of one batch, which an Arrow file gives it, again and again, in the schema
of that file. There are as many as option `rows` says, or, with option `counter`, as a file says
that can be written while the query runs. The sink counts the rows that come.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

FORMAT: Final = "nothing-stream"
_ROWS: Final = "rows"


class Some(InputPartition):
    """So many rows."""

    def __init__(self, rows: int) -> None:
        super().__init__(None)
        self.rows = rows


class NothingStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Offsets are rows."""

    def __init__(self, options: dict[str, str], schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def _there(self) -> int:
        counter = self._options.get("counter")
        return int(Path(counter).read_text() if counter else self._options["rows"])

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Do nothing: the rows that are there stay as many."""

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        """The first row."""
        return {_ROWS: 0}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Option perTrigger; all without it."""
        each = self._options.get("pertrigger")
        return ReadMaxRows(int(each)) if each else ReadAllAvailable()

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        """Return the offset behind the rows that are there, within the limit."""
        there = self._there()
        if isinstance(limit, ReadMaxRows):
            there = min(there, start[_ROWS] + limit.max_rows)
        return {_ROWS: there}

    def reportLatestOffset(self) -> dict[str, int]:  # noqa: N802
        """Return the offset behind the rows that are there."""
        return {_ROWS: self._there()}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        """Cut the rows into as many tasks as option `tasks` says."""
        rows, tasks = end[_ROWS] - start[_ROWS], int(self._options["tasks"])
        step = max(-(-rows // tasks), 1)
        return [Some(min(step, rows - at)) for at in range(0, rows, step)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task."""
        if not isinstance(partition, Some):
            return  # Spark's own placeholder for a batch without partitions
        batch = _load(self._options["batch"]).cast(to_arrow_schema(self._schema, timezone="UTC"))
        for at in range(0, partition.rows, batch.num_rows):
            yield batch.slice(0, min(batch.num_rows, partition.rows - at))

    def commit(self, end: dict[str, int]) -> None:
        """Nothing is kept."""


@dataclass
class Counted(WriterCommitMessage):
    """Rows that a task got."""

    rows: int


class NothingSink(DataSourceStreamArrowWriter):
    """Counts rows."""

    def __init__(self, expected: int | None) -> None:
        self._expected = expected

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Counted:
        """One task."""
        return Counted(sum(batch.num_rows for batch in iterator))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Check that all rows came."""
        rows = sum(message.rows for message in messages if isinstance(message, Counted))
        if self._expected is not None and rows != self._expected:
            raise AssertionError(f"{rows} rows came, {self._expected} were sent")

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Nothing was done."""


class Nothing(DataSource):
    """The format."""

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return FORMAT

    def schema(self) -> StructType:
        """That of the Arrow file, with nothing said of nulls: Spark takes all as nullable."""
        return from_arrow_schema(_load(self.options["batch"]).schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """The source."""
        return NothingStream(_small_letters(self.options), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """The sink; option `rows` is what each micro batch has."""
        rows = self.options.get("rows")
        return NothingSink(None if rows is None else int(rows))


def save(batch: pa.RecordBatch, path: Path) -> str:
    """Keep the rows of the source that does nothing in a file, and answer its name."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)
    return str(path)


def advance(counter: Path, rows: int) -> None:
    """Let so many rows be there. A reader finds the one number or the other."""
    beside = counter.with_suffix(".new")
    beside.write_text(str(rows))
    os.replace(beside, counter)


_loaded: dict[str, pa.RecordBatch] = {}


def _load(path: str) -> pa.RecordBatch:
    if path not in _loaded:
        with pa.OSFile(path, "rb") as file:
            _loaded[path] = pa.ipc.open_file(file).get_batch(0)
    return _loaded[path]


def _small_letters(options: Any) -> dict[str, str]:
    return {key.lower(): value for key, value in options.items()}
