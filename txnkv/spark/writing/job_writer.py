"""A batch write: a job under a transaction, in which each task attempt stages for itself.

Spark calls `start` (through `writer()`), `write` and `commit` in different processes, and
`write` for a partition as often as it sees fit: again when a task failed, twice at once when
it speculates. What an attempt stages carries a name of its own and counts for nothing until
`commit` names it, so a copy too many is as if it never was.

    with a token   the job joins the caller's transaction, who commits it
    without        the transaction is the job's own: `commit` commits it, `abort` rolls it back

Nobody's Python lives as long as a job that is its own transaction: the planner that begins it
may be stopped after an idle minute. So a keeper, a small process, heartbeats for it as long
as Spark's JVM lives: see `keepalive`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Self

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from txnkv.client import Client, Planning
from txnkv.errors import TxnNotFoundError
from txnkv.spark import keepalive
from txnkv.spark.columns import arrow_schema
from txnkv.spark.settings import Settings, StorePlace, TopicWrite
from txnkv.spark.worker_client import client_of, join_open
from txnkv.spark.writing.targets import (
    TableTarget,
    Target,
    TopicTarget,
    Written,
    attempt_of_task,
    one_each,
    stage,
)
from txnkv.transaction import Job, Transaction


class JobWriter(DataSourceArrowWriter):
    """Writes into a table or topic.

    Args:
        place: the store.
        target: what is written to.
        token: of the transaction.
        job: the job's id.
        own: whether the transaction is the job's own.
    """

    def __init__(self, place: StorePlace, target: Target, token: str, job: str, own: bool) -> None:
        self._place = place
        self._target = target
        self._token = token
        self._job = job
        self._own = own

    @classmethod
    def start(cls, settings: Settings | TopicWrite, schema: StructType) -> Self:
        """Check that the data fits, then begin the job, and its transaction without a token.

        Raises:
            TableNotFoundError, TopicNotFoundError, SchemaError: there is no such table or topic,
                or the data does not fit.
            InvalidTokenError, InvalidTxnStateError: the token's transaction cannot be joined.
        """
        target: Target
        if isinstance(settings, TopicWrite):
            target = TopicTarget(settings.topic)
        else:
            target = TableTarget(settings.table, settings.operation, settings.overwrite)
        client, token = client_of(settings), settings.token
        txn = None if token is None else join_open(client, token, "write")
        target.require(client, arrow_schema(schema), txn)
        if token is not None and txn is not None:
            job = Job.start(txn)
            try:
                target.make_room(txn, job)
            except BaseException:
                job.abort()
                raise
            return cls(settings, target, token, job.id, own=False)
        token, job_id = begin_own(client, target, settings, settings.timeout)
        return cls(settings, target, token, job_id, own=True)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Stage one task's data under this attempt's own name.

        Raises:
            RowErrors: keys are there already.
            SchemaError: a value does not fit its column.
            InvalidTxnStateError: the transaction is not open, or the job has ended.
        """
        done = Written(*attempt_of_task())
        client = client_of(self._place)
        job = Job.join(Transaction.deserialize(client, self._token), self._job)
        stage(self._target, client, job, done, iterator)
        return done

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Let the attempts that Spark chose count; commit the transaction when it is the job's.

        Raises:
            RowErrors: two tasks wrote the same key.
            TransactionConflictError: another transaction committed a key first.
            InvalidTxnStateError: the transaction was aborted meanwhile.
        """
        txn = Transaction.deserialize(client_of(self._place), self._token)
        Job.join(txn, self._job).commit(one_each(messages), first=self._target.first)
        if self._own:
            txn.commit()

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Nothing of the job counts; its own transaction is rolled back."""
        with suppress(TxnNotFoundError):
            txn = Transaction.deserialize(client_of(self._place), self._token)
            if self._own:
                txn.rollback()
            else:
                Job.join(txn, self._job).abort()


def begin_own(
    client: Client,
    target: Target,
    place: StorePlace,
    timeout: float | None,
    names: Sequence[str] = (),
) -> tuple[str, str]:
    """A transaction and its one job, both to outlive this process.

    Args:
        names: for others to find the transaction by.

    Returns:
        The transaction's token, and the job's id.
    """
    txn = client.new_transaction(timeout=timeout)
    try:
        job = Job.start(txn)
        if names:
            Planning.of(client).name(txn, list(names), job.id)
        target.make_room(txn, job)
        token = str(txn.serialize())
        keepalive.hand_over(txn, place)
    except BaseException:
        txn.rollback()
        raise
    return token, job.id
