"""The sink of a stream: each micro batch is one transaction, and counts once.

    planner          tasks                              committer
    begin            a batch that is committed?  no  -> mark: version `batch` of the application
    start a job  ->  stage, as in a batch write         the job's accepted attempts
                                                 yes    COMMIT: data and version, one instant
                                                  |  -> roll back: the batch is there
                                                  v
                                         take the rows, write nothing

Spark writes down what a batch is (its offsets) before it runs it, and that it is done after
`commit`. A driver that dies in between runs the same batch again under the same number. The
number is committed in the transaction of the data, as a version of an application (see
`coordinator.applications`), so the second run finds it and does nothing.

Who knows what, in Spark 4:

    planner      runs once each batch; knows the options, not the query nor the batch
    task         has the planner's writer, by pickle; knows query and batch, as local properties
    committer    makes a writer anew, from the options; is told the batch, and what tasks answered

So the tasks tell the committer the transaction, and whose batch it is. A batch that fails may
leave the committer without an answer: then it finds the transaction by the name under which the
planner left it. The next batch finds it too, so that what a killed driver left goes at once.

Where neither the checkpoint nor an application is told by options (the checkpoint is of Spark's
conf, say), queries that write side by side look alike to planner and committer. There each
transaction has a name of its own, to which the tasks add the batch, and the committer of a batch
that fails ends the one that it can only be. If it might be that of another query, it stays.
"""

from __future__ import annotations

import logging
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from txnkv.client import Client, Planning
from txnkv.coordinator import Mark
from txnkv.errors import (
    AlreadyAppliedError,
    InvalidTokenError,
    InvalidTxnStateError,
    TxnNotFoundError,
)
from txnkv.spark import java
from txnkv.spark.columns import arrow_schema
from txnkv.spark.query_progress import is_committed, require_replay
from txnkv.spark.settings import StreamWrite
from txnkv.spark.worker_client import client_of, runs
from txnkv.spark.writing import (
    Begun,
    ChangesTarget,
    TableTarget,
    Target,
    TopicTarget,
    Written,
    attempt_of_task,
    begin_own,
    in_time,
    nothing_of,
    one_each,
    stage,
)
from txnkv.transaction import Transaction

_COMMITTER: Final = "pyspark.sql.worker.python_streaming_sink_runner"
_log = logging.getLogger("txnkv")


@dataclass
class Streamed(Written):
    """The message from a task attempt of a stream to the committer.

    Attributes:
        begun: the transaction and the job in which the attempt staged.
        query: the query's id.
        was_there: the batch was committed before, and nothing was staged.
    """

    begun: Begun | None = None
    query: str | None = None
    was_there: bool = False


def stream_writer_of(settings: StreamWrite, schema: StructType) -> StreamWriter:
    """The sink as planner and committer make it; the planner begins a transaction.

    Raises:
        TableNotFoundError, TopicNotFoundError, SchemaError: there is no such table or topic, or
            the data does not fit.
    """
    writer = StreamWriter(settings)
    if not runs(_COMMITTER):  # which gets its writer without its state
        writer.begin(schema)
    return writer


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes micro batches into a table or topic."""

    def __init__(self, settings: StreamWrite) -> None:
        self._settings = settings
        self._target = _target_of(settings)
        self._begun: Begun | None = None
        self._single: str | None = None

    # -- planner -----------------------------------------------------------------------

    def begin(self, schema: StructType) -> None:
        """Check that the data fits, then begin the transaction of the batch that comes."""
        settings = self._settings
        client = client_of(settings)
        self._target.require(client, arrow_schema(schema), None)
        names = _names_of(settings)
        for stream in names[:1]:
            Planning.of(client).end_named(stream)
        if not names and (alike := _alike(settings)) is not None:
            self._single = alike + uuid.uuid4().hex
            names = [self._single]
        self._begun = begin_own(client, self._target, settings, names)

    # -- tasks -------------------------------------------------------------------------

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Streamed:
        """Stage one task's data under this attempt's own name; nothing for a batch that counts.

        Raises:
            RowErrors: keys are there already.
            SchemaError: a value does not fit its column.
            InvalidTxnStateError: the transaction is not open, or the job has ended.
            ValueError: the application is driven by another query, or has later batches.
        """
        begun = self._begun
        if begun is None:
            raise InvalidTxnStateError("cannot write: no planner has begun this batch")
        query, batch = _query_and_batch()
        done = Streamed(*attempt_of_task(), begun=begun, query=query)
        client = client_of(self._settings)
        if batch is not None and is_committed(client, self._mark(query, batch)):
            # Spark keeps what it counts and joins only if the rows are taken, to the last one.
            deque(iterator, maxlen=0)
            done.was_there = True
            return done
        with in_time(self._settings.timeout):
            job = begun.joined(client)
            if self._single is not None:
                Planning.of(client).name(job.txn, [f"{self._single} {batch}"], job.id)
            stage(self._target, client, job, done, iterator)
        return done

    # -- committer ---------------------------------------------------------------------

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Commit the batch, once: a batch that was committed before is left as it is.

        Raises:
            RowErrors: two tasks wrote the same key.
            TransactionConflictError: another transaction committed a key first.
            InvalidTxnStateError: the transaction was aborted meanwhile.
            ValueError: the application is driven by another query, or the checkpoint is older
                than the store.
        """
        attempts = one_each(messages)
        told = _told(messages)
        if told is None or told.begun is None:
            raise InvalidTxnStateError("cannot commit the batch: no task says where it staged")
        mark = self._mark(told.query, batchId)
        client = client_of(self._settings)
        if is_committed(client, mark):
            require_replay(client, mark, self._settings.checkpoint)
            _log.info("batch %d of %s is committed already", mark.version, mark.app_id)
            _roll_back(client, told.begun.token)
            return
        if any(isinstance(message, Streamed) and message.was_there for message in messages):
            raise InvalidTxnStateError(
                f"cannot commit batch {batchId}: it was in the store when its tasks looked, so "
                "they wrote nothing, and is not any more (client.forget_applied?). Run the query "
                "again"
            )
        try:
            with in_time(self._settings.timeout):
                job = told.begun.joined(client)
                job.txn.mark_applied(mark.app_id, mark.version, mark.source)
                job.commit(attempts, first=self._target.first)
                with nothing_of("the batch"):
                    job.txn.commit()
        except AlreadyAppliedError:  # by another driver of the same query, meanwhile
            if not is_committed(client, mark):
                raise

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Nothing of the batch counts."""
        client = client_of(self._settings)
        told = _told(messages)
        if told is not None and told.begun is not None:
            _roll_back(client, told.begun.token)
            return
        names = _names_of(self._settings)
        for own in names[1:] if names else _only_one(client, _alike(self._settings), batchId):
            Planning.of(client).end_named(own)

    def _mark(self, query: str | None, batch: int) -> Mark:
        app_id = self._settings.app_id or query
        if app_id is None:
            raise InvalidTxnStateError(
                "cannot tell whose batch it is: Spark gives no query id; name it by option appId"
            )
        return Mark(app_id, batch, query)


def _target_of(settings: StreamWrite) -> Target:
    if settings.topic is not None:
        return TopicTarget(settings.topic)
    assert settings.table is not None
    if settings.operation_column is not None:
        if settings.overwrite:
            raise ValueError(
                "option operationColumn is of changes, and output mode complete hands over all "
                "rows anew: take mode append, or leave the option out"
            )
        return ChangesTarget(settings.table, settings.operation_column)
    return TableTarget(settings.table, settings.operation, settings.overwrite)


def _query_and_batch() -> tuple[str | None, int | None]:
    task = TaskContext.get()
    if task is None:
        return None, None
    batch = task.getLocalProperty("streaming.sql.batchId")
    return task.getLocalProperty("sql.streaming.queryId"), None if batch is None else int(batch)


def _told(messages: Sequence[WriterCommitMessage | None]) -> Streamed | None:
    return next((message for message in messages if isinstance(message, Streamed)), None)


# -- names -----------------------------------------------------------------------------


def _names_of(settings: StreamWrite) -> list[str]:
    """Names of the open transaction of a stream: for whoever comes next, and for this driver.

    A driver that was replaced must not end what its successor began: so it looks for its own.
    """
    if settings.checkpoint is not None:
        stream = f"checkpoint {settings.checkpoint}"
    elif settings.app_id is not None:
        stream = f"application {settings.app_id}"
    else:
        return []
    stream += f", {settings.table or settings.topic}"
    jvm = java.jvm()
    return [stream] if jvm is None else [stream, f"{stream}, {jvm.pid} {jvm.started}"]


def _alike(settings: StreamWrite) -> str | None:
    """The beginning of the names of transactions of queries of this driver that look alike."""
    jvm = java.jvm()
    if jvm is None:
        return None
    target = (settings.table, settings.topic)
    return f"query {settings.query!r} into {target!r}, {jvm.pid} {jvm.started}, "


def _only_one(client: Client, alike: str | None, batch: int) -> list[str]:
    """The name of the only transaction that may be of this batch: its tasks have said so, or
    nothing yet. One that passed its time may be it, too.
    """
    batches: dict[str, str] = {}
    for name in [] if alike is None else Planning.of(client).names_below(alike):
        single, _, said = name[len(alike or "") :].partition(" ")
        batches[single] = said or batches.get(single, "")
    found = [single for single, said in batches.items() if said in ("", str(batch))]
    return [f"{alike}{single}" for single in found] if len(found) == 1 else []


def _roll_back(client: Client, token: str) -> None:
    """Abort, unless it has begun to commit: then it ends by itself."""
    with suppress(InvalidTokenError, TxnNotFoundError):  # it is over
        txn = Transaction.deserialize(client, token)
        Planning.of(client).abandon(txn, "its micro batch failed")
