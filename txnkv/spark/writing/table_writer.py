"""A batch write: a job under a transaction, in which each task attempt stages for itself.

Spark calls `start` (through `writer()`), `write` and `commit` in different processes, and
`write` for a partition as often as it sees fit: again when a task failed, twice at once when
it speculates. What an attempt stages carries a name of its own and counts for nothing until
`commit` names it, so a copy too many is as if it never was.

    with a token   the job joins the caller's transaction, who commits it
    without        the transaction is the job's own: `commit` commits it, `abort` rolls it back

In mode overwrite an attempt of the job's own deletes, before any task runs, all rows that the
transaction sees. It counts with the tasks' attempts, which therefore see no rows but their own.

Nobody's Python lives as long as a job that is its own transaction: the planner that begins it
may be stopped after an idle minute. So a keeper, a small process, heartbeats for it as long
as Spark's JVM lives: see `keeper`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from txnkv.client import Client
from txnkv.errors import InvalidTxnStateError, TxnNotFoundError
from txnkv.job import Job
from txnkv.spark import keeping
from txnkv.spark.columns import FromSpark, arrow_schema
from txnkv.spark.joining import client_of, join_open
from txnkv.spark.settings import Settings
from txnkv.transaction import Transaction


@dataclass
class Written(WriterCommitMessage):
    """What a task attempt tells the committer.

    Attributes:
        partition: the task's partition; None outside of a task.
        attempt: the attempt's name in its job.
        inserted, updated, deleted, ignored: rows.
    """

    partition: int | None
    attempt: str
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    ignored: int = 0


_OVERWRITE: Final = "overwrite"
"""The attempt that deletes what is there."""


class TxnkvWriter(DataSourceArrowWriter):
    """Writes a table.

    Args:
        settings: of the write.
        token: of the transaction.
        job: the job's id.
        own: whether the transaction is the job's own.
    """

    def __init__(self, settings: Settings, token: str, job: str, own: bool) -> None:
        self._settings = settings
        self._token = token
        self._job = job
        self._own = own

    @classmethod
    def start(cls, settings: Settings, schema: StructType) -> TxnkvWriter:
        """Check that the data fits, then begin the job, and its transaction without a token.

        Raises:
            TableNotFoundError, SchemaError: there is no such table, or the data does not fit.
            InvalidTokenError, InvalidTxnStateError: the token's transaction cannot be joined.
        """
        client = client_of(settings)
        FromSpark(client.table(settings.table).schema, arrow_schema(schema), settings.operation)
        if settings.token is not None:
            txn = join_open(client, settings.token, "write")
            job = Job.start(txn)
            try:
                _make_room(txn, job, settings)
            except BaseException:
                job.abort()
                raise
            return cls(settings, settings.token, job.id, own=False)
        return cls._start_own(client, settings)

    @classmethod
    def _start_own(cls, client: Client, settings: Settings) -> TxnkvWriter:
        txn = client.new_transaction(timeout=settings.timeout)
        try:
            job = Job.start(txn)
            _make_room(txn, job, settings)
            token = str(txn.serialize())
            keeping.hand_over(txn, settings.path)
        except BaseException:
            txn.rollback()
            raise
        return cls(settings, token, job.id, own=True)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Stage one task's rows under this attempt's own name.

        Raises:
            RowErrors: keys are there already.
            SchemaError: a value does not fit its column.
            InvalidTxnStateError: the transaction is not open, or the job has ended.
        """
        task = TaskContext.get()
        number = "0" if task is None else f"{task.partitionId()}.{task.attemptNumber()}"
        done = Written(
            None if task is None else task.partitionId(), f"{number}.{uuid.uuid4().hex[:12]}"
        )
        first = next(iterator, None)
        if first is None:
            return done
        client = client_of(self._settings)
        table = client.table(self._settings.table)
        op, alone = self._settings.operation, self._settings.overwrite
        rows = FromSpark(table.schema, first.schema, op).reader(_again(first, iterator))
        with self._job_of(client).session(done.attempt, alone=alone) as session:
            result = session.write(table, rows, op)
        done.inserted, done.updated = result.inserted, result.updated
        done.deleted, done.ignored = result.deleted, result.ignored
        return done

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Let the attempts that Spark chose count; commit the transaction when it is the job's.

        Raises:
            RowErrors: two tasks wrote the same key.
            TransactionConflictError: another transaction committed a key first.
            InvalidTxnStateError: the transaction was aborted meanwhile.
        """
        client = client_of(self._settings)
        txn = Transaction.deserialize(client, self._token)
        first = [_OVERWRITE] if self._settings.overwrite else []
        Job.join(txn, self._job).commit(_one_each(messages), first=first)
        if self._own:
            txn.commit()

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Nothing of the job counts; its own transaction is rolled back."""
        client = client_of(self._settings)
        with suppress(TxnNotFoundError):
            txn = Transaction.deserialize(client, self._token)
            if self._own:
                txn.rollback()
            else:
                Job.join(txn, self._job).abort()

    def _job_of(self, client: Client) -> Job:
        return Job.join(Transaction.deserialize(client, self._token), self._job)


def _make_room(txn: Transaction, job: Job, settings: Settings) -> None:
    """In mode overwrite: delete all rows that the transaction sees, if the job is committed."""
    if settings.overwrite:
        table = txn.client.table(settings.table)
        keys = txn.scan(table, columns=list(table.schema.primary_key))
        with job.session(_OVERWRITE) as session:
            session.write(table, keys, "delete")


def _again(first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from rest


def _one_each(messages: Sequence[WriterCommitMessage | None]) -> list[str]:
    """The attempts that count, one for each partition.

    Raises:
        InvalidTxnStateError: a task has no message, so its rows are missing.
    """
    chosen: dict[int | str, str] = {}
    for message in messages:
        if not isinstance(message, Written):
            raise InvalidTxnStateError(
                f"cannot commit the write: a task answered {message!r} in place of what it wrote"
            )
        key = message.attempt if message.partition is None else message.partition
        chosen.setdefault(key, message.attempt)
    return list(chosen.values())
