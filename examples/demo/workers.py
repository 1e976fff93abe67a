"""The txnkv data source with two additions: attempts leave notes, and one is killed.

The kill comes when the attempt has staged all of its rows, and before Spark hears of it:
the moment at which a careless sink would be left with every row twice.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceWriter
from pyspark.sql.types import StructType

from txnkv.spark.source import TxnkvDataSource
from txnkv.spark.writing import JobWriter, Written

NAME = "txnkv_demo"


class NotedSource(TxnkvDataSource):
    """Format "txnkv" with two more options.

    Options:
        notes: a directory for one file an attempt.
        kill: the partition whose first attempt is killed.
    """

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return NAME

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """A writer that leaves notes."""
        notes, kill = self.options.pop("notes"), self.options.pop("kill")
        writer = super().writer(schema, overwrite)
        return NotedWriter.around(writer, notes, int(kill))


class NotedWriter(JobWriter):
    """Writes as any other; see the module."""

    notes: str
    kill: int

    @classmethod
    def around(cls, writer: Any, notes: str, kill: int) -> NotedWriter:
        """The same writer, with notes."""
        made = cls.__new__(cls)
        made.__dict__.update(writer.__dict__, notes=notes, kill=kill)
        return made

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Stage the rows, leave a note; die if it is this attempt's turn."""
        done = super().write(iterator)
        task = TaskContext.get()
        assert task is not None
        part, attempt = task.partitionId(), task.attemptNumber()
        dies = part == self.kill and attempt == 0
        note = {
            "partition": part,
            "attempt": attempt,
            "rows": done.inserted,
            "pid": os.getpid(),
            "killed": dies,
        }
        Path(self.notes, f"{part}.{attempt}.json").write_text(json.dumps(note))
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return done


def read_notes(folder: Path) -> list[dict[str, Any]]:
    """Return the notes that the attempts left, by partition and attempt."""
    notes = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return sorted(notes, key=lambda note: (note["partition"], note["attempt"]))
