"""Targets of a job of Spark: what is checked while it is planned, and how a task stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol

import pyarrow as pa

from txnkv.client import Client
from txnkv.options import Operation
from txnkv.spark.columns import FromSpark, Retyped
from txnkv.spark.writing.attempts import Written, again
from txnkv.topics import TopicInfo, message_batches, topic_catalog
from txnkv.transaction import Job, Transaction

_OVERWRITE: Final = "overwrite"
"""The attempt that deletes what is there."""


class Target(Protocol):
    """A table or a topic."""

    @property
    def first(self) -> tuple[str, ...]:
        """Attempts of the job's own, below those of the tasks."""

    def require(self, client: Client, given: pa.Schema) -> None:
        """Refuse data that does not fit, by its schema."""

    def make_room(self, txn: Transaction, job: Job) -> None:
        """Stage what counts below all that tasks write."""

    def stage(
        self, client: Client, job: Job, done: Written, batches: Iterator[pa.RecordBatch]
    ) -> None:
        """Stage one task's data in the name of its attempt, and note how much that was."""


@dataclass(frozen=True)
class TableTarget:
    """Rows into a table.

    In mode overwrite an attempt of the job's own deletes, before any task runs, all rows that
    the transaction sees. It counts with the tasks' attempts, which therefore see no rows but
    their own.
    """

    table: str
    operation: Operation = "insert"
    overwrite: bool = False

    @property
    def first(self) -> tuple[str, ...]:
        return (_OVERWRITE,) if self.overwrite else ()

    def require(self, client: Client, given: pa.Schema) -> None:
        """Refuse data that does not fit.

        Raises:
            TableNotFoundError, SchemaError: there is no such table, or the data does not fit.
        """
        FromSpark(client.table(self.table).schema, given, self.operation)

    def make_room(self, txn: Transaction, job: Job) -> None:
        """In mode overwrite: delete all rows that the transaction sees, if the job is committed."""
        if self.overwrite:
            schema = txn.connection.table_info(self.table).schema
            keys = txn.scan(self.table, columns=list(schema.primary_key))
            with job.session(_OVERWRITE) as session:
                session.write(self.table, keys, "delete")

    def stage(
        self, client: Client, job: Job, done: Written, batches: Iterator[pa.RecordBatch]
    ) -> None:
        """Stage rows.

        Raises:
            RowErrors: keys are there already.
            SchemaError: a value does not fit its column.
            InvalidTxnStateError: the transaction is not open, or the job has ended.
        """
        first = next(batches, None)
        if first is None:
            return
        table = client.table(self.table)
        rows = FromSpark(table.schema, first.schema, self.operation).reader(again(first, batches))
        with job.session(done.attempt, alone=self.overwrite) as session:
            done.count(session.write(table, rows, self.operation))


@dataclass(frozen=True)
class TopicTarget:
    """Messages into a topic."""

    topic: str
    first: ClassVar[tuple[str, ...]] = ()

    def require(self, client: Client, given: pa.Schema) -> None:
        """Refuse data that is not of messages.

        Raises:
            TopicNotFoundError, SchemaError: there is no such topic, or the data does not fit.
            NotSupportedError: the topic takes no messages.
        """
        info = client.topic_info(self.topic)
        topic_catalog.require_writable(info)
        message_batches.check_columns(_retyped(info, given).schema, info.options.codec)

    def make_room(self, txn: Transaction, job: Job) -> None:
        """A topic is only ever added to."""

    def stage(
        self, client: Client, job: Job, done: Written, batches: Iterator[pa.RecordBatch]
    ) -> None:
        """Stage messages.

        Raises:
            SchemaError, ValueError: a value does not fit; there is no such partition.
            InvalidTxnStateError: the transaction is not open, or the job has ended.
        """
        first = next(batches, None)
        if first is None:
            return
        info = client.topic_info(self.topic)
        reader = _retyped(info, first.schema).reader(again(first, batches))
        with job.session(done.attempt) as session:
            done.count(session.send_batch(self.topic, reader))


def _retyped(info: TopicInfo, given: pa.Schema) -> Retyped:
    declared = info.options.value_schema
    types = {} if declared is None else dict(zip(declared.names, declared.types, strict=True))
    return Retyped(types, given)
