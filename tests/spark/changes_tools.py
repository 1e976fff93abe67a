"""A query over the changes of a table as Spark drives it, without Spark: one process plans, tasks
get what is pickled, the checkpoint has the end of each batch and which batches are done.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql.streaming.datasource import ReadAllAvailable

from txnkv.spark import worker_client
from txnkv.spark.source import TxnkvDataSource
from txnkv.tables.read.diff import COMMIT_TIMESTAMP, OP

Row = dict[str, Any]


@dataclass
class Checkpoint:
    """The part of a query that outlives its process.

    Attributes:
        offsets: the end of each batch that was planned, as Spark writes it.
        done: the number of those that are done.
    """

    offsets: list[str] = field(default_factory=list)
    done: int = 0

    @property
    def end(self) -> dict[str, Any]:
        """The end of the last batch."""
        return dict(json.loads(self.offsets[-1]))


@dataclass
class Query:
    """A query, its checkpoint and its process.

    Attributes:
        options: of the source.
    """

    options: Mapping[str, str]
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    reader: Any = None

    def start(self) -> Any:
        """The process that plans, begun anew if there is none."""
        if self.reader is None:
            source = pickle.loads(pickle.dumps(TxnkvDataSource(dict(self.options))))
            self.reader = source.streamReader(source.schema())
        return self.reader

    def stop(self) -> None:
        """The end of its process."""
        if self.reader is not None:
            self.reader.stop()
            self.reader = None

    def plan(self) -> list[Any] | None:
        """The tasks of the next batch, or again of one that is not done; None for no batch."""
        reader, log = self.start(), self.checkpoint
        if log.done == len(log.offsets):
            at = self._begin(log.done)
            if log.done:
                reader.commit(json.loads(log.offsets[-1]))
            end = json.dumps(reader.latestOffset(json.loads(at), ReadAllAvailable()))
            if end == at and log.offsets:  # the first batch is run in any case
                return None
            log.offsets.append(end)
        return self.plan_again(log.done)

    def plan_again(self, batch: int) -> list[Any]:
        """The tasks of a batch that was planned before."""
        reader, end = self.start(), self.checkpoint.offsets[batch]
        tasks = reader.partitions(json.loads(self._begin(batch)), json.loads(end))
        return [pickle.loads(pickle.dumps(task)) for task in tasks]

    def _begin(self, batch: int) -> str:
        """Spark keeps no start of the first batch: it asks for another."""
        if batch:
            return self.checkpoint.offsets[batch - 1]
        return json.dumps(self.start().initialOffset())

    def read(self, tasks: list[Any]) -> list[Row]:
        """The rows of some tasks; batches have exactly the schema that Spark was promised."""
        worker = pickle.loads(pickle.dumps(self.start()))
        found: list[Row] = []
        for task in tasks:
            for batch in worker.read(task):
                assert batch.schema.equals(worker._expected)
                batch.validate(full=True)
                found += batch.to_pylist()
        return found

    def trigger(self) -> list[Row] | None:
        """One batch; None when there was none."""
        tasks = self.plan()
        if tasks is None:
            return None
        rows = self.read(tasks)
        self.checkpoint.done += 1
        return rows


def told(rows: list[Row], key: str) -> list[tuple[str, Any, int]]:
    """Return the operation, key and commit timestamp of each row, in the order of the keys."""
    return sorted(((r[OP], r[key], r[COMMIT_TIMESTAMP]) for r in rows), key=lambda one: one[1])


def close_clients() -> None:
    """Close what readers in this process have opened."""
    while worker_client._clients:
        worker_client._clients.popitem()[1][1].close()
