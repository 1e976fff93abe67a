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

The target of a job is a table, a topic, or a table that changes are applied to. Rows of changes say
what is done with each of them, as a stream of changes has them:

    _op      id   total                      of each key the last row counts
    insert   1    10
    update   1    12         ->  put         1  12
    insert   2    20             delete      2
    delete   2    20

What comes is the state after each change, so a row of insert, update or upsert is put there
whatever was there, and a delete of what is not there is none. That makes it harmless to begin
with changes that the table has already.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, Final, Protocol, Self, TypeAlias

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from txnkv.client import Client, Planning
from txnkv.coordinator import TxnId, TxnState
from txnkv.core import compute as pc
from txnkv.core import gathered, is_text, key_codec, mark_duplicates, sort_keys
from txnkv.errors import (
    InvalidTokenError,
    InvalidTxnStateError,
    RowErrors,
    SchemaError,
    TransactionTimedOutError,
    TxnNotFoundError,
)
from txnkv.spark import keepalive
from txnkv.spark.columns import FromSpark, Retyped, arrow_schema
from txnkv.spark.settings import Settings, StreamWrite, TopicWrite
from txnkv.spark.worker_client import client_of, join_open
from txnkv.tables import Normaliser, Operation, Schema
from txnkv.topics import TopicInfo, message_input, topic_catalog
from txnkv.transaction import Job, Transaction, WriteResult

# -- targets ---------------------------------------------------------------------------


@dataclass
class Written(WriterCommitMessage):
    """The message from a task attempt to the committer.

    Attributes:
        partition: the task's partition; None outside of a task.
        attempt: the attempt's name in its job.
        inserted, updated, deleted, ignored: rows.
        sent: messages.
    """

    partition: int | None
    attempt: str
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    ignored: int = 0
    sent: int = 0

    def count(self, result: WriteResult) -> None:
        """Add the numbers of what was staged."""
        self.inserted += result.inserted
        self.updated += result.updated
        self.deleted += result.deleted
        self.ignored += result.ignored
        self.sent += result.sent


def attempt_of_task() -> tuple[int | None, str]:
    """The partition of the task that runs here, and a name that no other attempt ever has."""
    task = TaskContext.get()
    number = "0" if task is None else f"{task.partitionId()}.{task.attemptNumber()}"
    return None if task is None else task.partitionId(), f"{number}.{uuid.uuid4().hex[:12]}"


def one_each(messages: Sequence[WriterCommitMessage | None]) -> list[str]:
    """The attempts that count, one for each partition, in the order of the messages.

    Raises:
        InvalidTxnStateError: a task has no message, so what it wrote is missing.
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


Batches: TypeAlias = Iterator[pa.RecordBatch]

_OVERWRITE: Final = "overwrite"
"""The attempt that deletes what is there."""


class Target(Protocol):
    """A table or a topic."""

    @property
    def first(self) -> tuple[str, ...]:
        """Attempts of the job's own, below those of the tasks."""

    def require(self, client: Client, given: pa.Schema, txn: Transaction | None) -> None:
        """Refuse data that does not fit, by its schema.

        Args:
            txn: the transaction that it is written in, if that has begun.
        """

    def make_room(self, txn: Transaction, job: Job) -> None:
        """Stage what counts below all that tasks write."""

    def stage(
        self, client: Client, job: Job, done: Written, given: pa.Schema, batches: Batches
    ) -> None:
        """Stage one task's data in the name of its attempt, and note how much that was."""


def stage(target: Target, client: Client, job: Job, done: Written, batches: Batches) -> None:
    """Stage what a task has, if anything: without a batch it has no schema either."""
    first = next(batches, None)
    if first is not None:
        with nothing_of("this task"):
            target.stage(client, job, done, first.schema, chain([first], batches))


@contextmanager
def nothing_of(what: str) -> Iterator[None]:
    """Row errors say that nothing of it counts: the transaction is not up to who reads them."""
    try:
        yield
    except RowErrors as error:
        error.others = f"and nothing of {what} counts"
        raise


@contextmanager
def in_time(timeout: float | None) -> Iterator[None]:
    """Say which option ended a transaction that is the job's own.

    Args:
        timeout: the option; None where there is none.

    Raises:
        TransactionTimedOutError: in place of what speaks of a token that the user never saw.
    """
    try:
        yield
    except (InvalidTokenError, TransactionTimedOutError) as error:
        if timeout is None or "timeout" not in str(error):  # heartbeats were missing
            raise
        raise TransactionTimedOutError(
            f"the write took longer than {timeout:g} s, which is its option timeout, and nothing "
            "of it counts: give it more seconds, or leave the option out"
        ) from error


def _schema_of(table: str, client: Client, txn: Transaction | None) -> Schema:
    """The schema of a table as it is now, or as a transaction writes it."""
    return Planning.of(client).schema_of(table, txn)


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

    def require(self, client: Client, given: pa.Schema, txn: Transaction | None) -> None:
        """Refuse data that does not fit.

        Raises:
            TableNotFoundError, SchemaError: there is no such table, or the data does not fit.
        """
        FromSpark(_schema_of(self.table, client, txn), given, self.operation)

    def make_room(self, txn: Transaction, job: Job) -> None:
        """In mode overwrite: delete all rows that the transaction sees, if the job is committed."""
        if self.overwrite:
            schema = txn.connection.table_info(self.table).schema
            keys = txn.scan(self.table, columns=list(schema.primary_key))
            with job.session(_OVERWRITE) as session:
                session.write(self.table, keys, "delete")

    def stage(
        self, client: Client, job: Job, done: Written, given: pa.Schema, batches: Batches
    ) -> None:
        """Stage rows.

        Raises:
            RowErrors: keys are there already.
            SchemaError: a value does not fit its column.
            InvalidTxnStateError: the transaction is not open, or the job has ended.
        """
        schema = _schema_of(self.table, client, job.txn)
        rows = FromSpark(schema, given, self.operation).reader(batches)
        with job.session(done.attempt, alone=self.overwrite) as session:
            done.count(session.write(self.table, rows, self.operation))


@dataclass(frozen=True)
class TopicTarget:
    """Messages into a topic."""

    topic: str
    first: ClassVar[tuple[str, ...]] = ()

    def require(self, client: Client, given: pa.Schema, txn: Transaction | None) -> None:
        """Refuse data that is not of messages.

        Raises:
            TopicNotFoundError, SchemaError: there is no such topic, or the data does not fit.
            NotSupportedError: the topic takes no messages.
        """
        info = client.topic_info(self.topic)
        topic_catalog.require_writable(info)
        message_input.check_columns(_retyped(info, given).schema, info.options.codec)

    def make_room(self, txn: Transaction, job: Job) -> None:
        """A topic is only ever added to."""

    def stage(
        self, client: Client, job: Job, done: Written, given: pa.Schema, batches: Batches
    ) -> None:
        """Stage messages.

        Raises:
            SchemaError, ValueError: a value does not fit; there is no such partition.
            InvalidTxnStateError: the transaction is not open, or the job has ended.
        """
        info = client.topic_info(self.topic)
        reader = _retyped(info, given).reader(batches)
        with job.session(done.attempt) as session:
            done.count(session.send_batch(self.topic, reader))


def _retyped(info: TopicInfo, given: pa.Schema) -> Retyped:
    declared = info.options.value_schema
    types = {} if declared is None else dict(zip(declared.names, declared.types, strict=True))
    return Retyped(types, given)


# -- changes ---------------------------------------------------------------------------

_SAID: Final = pa.array(["insert", "update", "upsert", "delete"])
_SPLIT_ROWS: Final = 1 << 19
"""So many rows are looked at together."""


@dataclass(frozen=True)
class ChangesTarget:
    """Changes applied to a table.

    Attributes:
        column: says for each row what is done: insert, update, upsert or delete.
    """

    table: str
    column: str

    @property
    def first(self) -> tuple[str, ...]:
        return ()

    def require(self, client: Client, given: pa.Schema, txn: Transaction | None) -> None:
        """Refuse data that does not fit.

        Raises:
            TableNotFoundError, SchemaError: there is no such table, or the data does not fit.
        """
        _Split(_schema_of(self.table, client, txn), given, self.column)

    def make_room(self, txn: Transaction, job: Job) -> None:
        """Changes are of single rows."""

    def stage(
        self, client: Client, job: Job, done: Written, given: pa.Schema, batches: Batches
    ) -> None:
        """Stage what the changes come to.

        Raises:
            SchemaError: a value does not fit its column, or is no operation.
            InvalidTxnStateError: the transaction is not open, or the job has ended.
        """
        split = _Split(_schema_of(self.table, client, job.txn), given, self.column)
        with job.session(done.attempt) as session:
            for some in map(pa.Table.from_batches, gathered(batches, _SPLIT_ROWS)):
                for operation, rows in split.operations(some):
                    done.count(session.write(self.table, rows, operation))


class _Split:
    def __init__(self, table: Schema, given: pa.Schema, column: str) -> None:
        if column not in given.names:
            raise SchemaError(
                f"option operationColumn names {column!r}, and the data has no such column; it "
                f"has {', '.join(given.names)}"
            )
        if given.names.count(column) > 1:
            raise SchemaError(f"the data has a column twice: {', '.join(given.names)}")
        if column in table.columns:
            raise SchemaError(
                f"option operationColumn names {column!r}, which is a column of the table: give "
                "the column that says what is done another name"
            )
        if not is_text(given.field(column).type):
            raise SchemaError(
                f"column {column!r} (option operationColumn) is a string, not "
                f"{given.field(column).type}"
            )
        self._column = column
        self._keys = list(table.primary_key)
        rows = given.remove(given.get_field_index(column))
        self._put = FromSpark(table, rows, "upsert")
        key_fields = [given.field(name) for name in self._keys]
        self._delete = FromSpark(table, pa.schema(key_fields), "delete_ignore")
        self._normal = Normaliser(table, self._delete.schema, "delete_ignore")
        self._codec = key_codec(*table.key_types)

    def operations(self, rows: pa.Table) -> Iterator[tuple[Operation, pa.RecordBatchReader]]:
        """Yield operations with their rows: no key is in two of them. Deletes are first, so that a
        value of a unique index is free for the key that it moves to.
        """
        if not rows.num_rows:
            return
        said = pc.cast(rows[self._column], pa.string())
        rows = rows.set_column(rows.column_names.index(self._column), self._column, said)
        known = pc.is_in(said, value_set=_SAID)
        if not pc.all(known).as_py():
            wrong = said.filter(pc.invert(known))[0].as_py()
            raise SchemaError(
                f"column {self._column!r} says insert, update, upsert or delete, not {wrong!r}"
            )
        last = self._last_of_each_key(rows)
        deletes = pc.equal(last[self._column], "delete")
        kept = last.filter(pc.invert(deletes)).drop_columns([self._column])
        gone = last.filter(deletes).select(self._keys)
        parts: list[tuple[FromSpark, Operation, pa.Table]] = [
            (self._delete, "delete_ignore", gone),
            (self._put, "upsert", kept),
        ]
        for convert, operation, some in parts:
            if some.num_rows:
                yield operation, convert.reader(iter(some.to_batches()))

    def _last_of_each_key(self, rows: pa.Table) -> pa.Table:
        """By the keys as the table has them: UUIDs are texts in Spark, of either case."""
        given = rows.select(self._keys).combine_chunks().to_batches()
        (batch,) = map(self._normal.batch, self._delete.reader(iter(given)))
        keys = self._codec.encode([batch.column(name) for name in self._keys])
        order = sort_keys(keys)
        if order is None:  # they ascend
            return rows
        firsts = mark_duplicates(keys, order).zeros().to_arrow()
        # The order is stable: the last one of a key stands before the first of the next.
        lasts = pc.subtract(pa.concat_arrays([firsts[1:], pa.array([keys.n], pa.uint32())]), 1)
        return rows.take(order.to_arrow().take(lasts))


# -- the job ---------------------------------------------------------------------------


class JobWriter(DataSourceArrowWriter):
    """Writes into a table or topic.

    Args:
        place: the store.
        target: what is written to.
        begun: the transaction, and the job in it.
        own: whether the transaction is the job's own.
    """

    def __init__(
        self, place: Settings | TopicWrite, target: Target, begun: Begun, own: bool
    ) -> None:
        self._place = place
        self._target = target
        self._begun = begun
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
            return cls(settings, target, Begun(token, job.id, txn.id), own=False)
        return cls(settings, target, begin_own(client, target, settings), own=True)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Stage one task's data under this attempt's own name.

        Raises:
            RowErrors: keys are there already.
            SchemaError: a value does not fit its column.
            InvalidTxnStateError: the transaction is not open, or the job has ended.
        """
        done = Written(*attempt_of_task())
        client = client_of(self._place)
        with in_time(self._place.timeout):
            stage(self._target, client, self._begun.joined(client), done, iterator)
        return done

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Let the attempts that Spark chose count; commit the transaction when it is the job's.

        Raises:
            RowErrors: two tasks wrote the same key.
            TransactionConflictError: another transaction committed a key first.
            InvalidTxnStateError: the transaction was aborted meanwhile.
        """
        with in_time(self._place.timeout):
            job = self._begun.joined(client_of(self._place))
            job.commit(one_each(messages), first=self._target.first)
            if self._own:
                with nothing_of("the job"):
                    job.txn.commit()

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Nothing of the job counts; its own transaction is rolled back. One that is aborted, as
        it passed its timeout, needs nothing more: Spark tells the user of the first error then.

        Raises:
            InvalidTxnStateError: it was committed: its committer died before its answer, say.
        """
        client, begun = client_of(self._place), self._begun
        try:
            job = begun.joined(client)
            (job.txn.rollback if self._own else job.abort)()
        except (InvalidTokenError, InvalidTxnStateError, TxnNotFoundError) as error:
            state = _state_of(client, begun.txn_id)
            if self._own and state.committing:
                raise InvalidTxnStateError(
                    f"the write is committed, all of it is there (transaction "
                    f"{begun.txn_id.local} is {state.name}): do not write it again"
                ) from error
            if isinstance(error, InvalidTxnStateError) and state.outcome is not TxnState.ABORTED:
                raise


def _state_of(client: Client, txn_id: TxnId) -> TxnState:
    """ABORTED where it was forgotten."""
    try:
        return client.transaction_state(txn_id)
    except TxnNotFoundError:
        return TxnState.ABORTED


@dataclass(frozen=True)
class Begun:
    """A transaction, and the job in it.

    Attributes:
        token: of the transaction.
        job: the job's id.
    """

    token: str
    job: str
    txn_id: TxnId

    def joined(self, client: Client) -> Job:
        """The job, in this process.

        Raises:
            InvalidTokenError, TxnNotFoundError: its transaction is over.
        """
        return Job.join(Transaction.deserialize(client, self.token), self.job)


def begin_own(
    client: Client,
    target: Target,
    place: Settings | TopicWrite | StreamWrite,
    names: Sequence[str] = (),
) -> Begun:
    """A transaction and its one job, both to outlive this process.

    Args:
        names: for others to find the transaction by.
    """
    txn = client.new_transaction(timeout=place.timeout)
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
    return Begun(token, job.id, txn.id)
