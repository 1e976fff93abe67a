"""A stream over a topic as Spark drives it, without Spark: each call with what Spark would send."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

import txnkv
from txnkv.spark import worker_client
from txnkv.spark.columns import arrow_schema
from txnkv.spark.source import TxnkvDataSource

BUFFERS = pytest.mark.parametrize("buffer", ["marker", "sidecar"])
ORDERS = pytest.mark.parametrize("order", ["offset", "commit"])

Rows = list[list[dict[str, Any]]]
"""Rows that the tasks of a batch gave, task by task."""


@dataclass
class Query:
    """A query over a topic, its checkpoint and its process.

    Attributes:
        options: of the source.
        offsets: the checkpoint: the end of each batch, as Spark writes it.
        batches: what each batch gave when it was run first.
    """

    options: Mapping[str, str]
    offsets: list[str] = field(default_factory=list)
    batches: list[Rows] = field(default_factory=list)
    reader: Any = None

    def start(self) -> Any:
        """The process that plans, begun anew if there is none."""
        if self.reader is None:
            source = pickle.loads(pickle.dumps(TxnkvDataSource(dict(self.options))))
            self.reader = source.streamReader(source.schema())
        return self.reader

    def restarted(self) -> Query:
        """The same query in a new process, with a copy of the checkpoint."""
        return Query(self.options, list(self.offsets), list(self.batches))

    def trigger(self, most: int | None = None) -> bool:
        """One micro batch; whether there was anything."""
        reader = self.start()
        at = self.offsets[-1] if self.offsets else json.dumps(reader.initialOffset())
        limit = reader.getDefaultReadLimit() if most is None else ReadMaxRows(most)
        end = json.dumps(reader.latestOffset(json.loads(at), limit))
        if end == at:
            return False
        self.offsets.append(end)
        self.batches.append(self.planned(at, end))
        return True

    def replay(self, batch: int) -> Rows:
        """A batch again, as after a crash before its end was written."""
        reader = self.start()
        at = self.offsets[batch - 1] if batch else json.dumps(reader.initialOffset())
        return self.planned(at, self.offsets[batch])

    def same_again(self) -> bool:
        """Tell whether a new process gives what each batch gave; the cut into tasks may differ."""
        again = self.restarted()
        return all(flat(again.replay(i)) == flat(batch) for i, batch in enumerate(self.batches))

    def planned(self, at: str, end: str) -> Rows:
        """Return the rows between two points of a checkpoint, task by task."""
        reader = self.start()
        tasks = reader.partitions(json.loads(at), json.loads(end))
        worker = pickle.loads(pickle.dumps(reader))
        return [rows_of(worker, pickle.loads(pickle.dumps(task))) for task in tasks]

    def rows(self) -> list[dict[str, Any]]:
        """All that was given, in order."""
        return [row for batch in self.batches for row in flat(batch)]

    def drain(self, most: int | None = None) -> Query:
        """Batches until there is nothing more."""
        while self.trigger(most):
            pass
        return self


def rows_of(reader: Any, task: Any) -> list[dict[str, Any]]:
    """The rows of a task; each batch has exactly the schema that Spark was promised."""
    found: list[dict[str, Any]] = []
    for batch in reader.read(task):
        assert batch.schema.equals(reader._expected)
        batch.validate(full=True)
        found += batch.to_pylist()
    return found


def batch_read(options: Mapping[str, str]) -> Rows:
    """Return the rows that the tasks of a batch read give."""
    source = TxnkvDataSource(dict(options))
    reader = source.reader(source.schema())
    return [rows_of(reader, pickle.loads(pickle.dumps(task))) for task in reader.partitions()]


def flat(batch: Rows) -> list[dict[str, Any]]:
    """The rows of all tasks, in order."""
    return [row for task in batch for row in task]


def close_clients() -> None:
    """Close the clients of this process's readers; Spark's processes never close theirs."""
    while worker_client._clients:
        worker_client._clients.popitem()[1][1].close()


def values(rows: list[dict[str, Any]]) -> list[bytes]:
    """Their values."""
    return [row["value"] for row in rows]


def schema_of(options: Mapping[str, str]) -> pa.Schema:
    """The Arrow schema of a read."""
    return arrow_schema(TxnkvDataSource(dict(options)).schema())


def options(client: txnkv.Client, **more: str) -> dict[str, str]:
    return {"path": client.path, "topic": "events", **more}


def send(client: txnkv.Client, *texts: str, partition: int = 0, txn: Any = None) -> None:
    """In a transaction that is open, or in one of their own."""
    if txn is None:
        with client.transaction() as own:
            send(client, *texts, partition=partition, txn=own)
    else:
        for text in texts:
            txn.send("events", text.encode(), partition=partition)


def opened(client: txnkv.Client, *texts: str, partition: int = 0) -> Any:
    """An open transaction whose messages went to the log."""
    txn = client.new_transaction(timeout=None)
    txn.serialize()
    send(client, *texts, partition=partition, txn=txn)
    txn.flush()
    return txn
