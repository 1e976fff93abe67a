"""Writes outside of any transaction: each has one of its own.

No snapshot was promised to such a write, so when others commit first what it writes it looks
again and meets what they left: an insert finds its key there, an upsert replaces the new row.
A flush of a session writes a `Lot`; where nobody knows whether that was written, it is `Unsure`.

Rows whose time is over (`ttl` of their table) are deleted here, too, by the leader, in transactions
as any other:

    begin       at the latest snapshot
    look        for rows of which column + seconds is past, some at a time
    delete      them; committed if nobody changed one of them since the snapshot

So no snapshot changes by the clock, counts and differences are of what was committed, and a row
that somebody gives another time meanwhile stays: one of the two is refused. Rejected: leaving rows
out as they are read. Each `get`, count and conflict would have to look at a clock, and a key that
nobody sees could not be inserted, or be inserted twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, NamedTuple

import pyarrow as pa

from txnkv.coordinator import EPOCH, KEEPALIVE_TIME, Catalog, Lease, TxnState, ending_error
from txnkv.errors import (
    CommitOutcomeUnknownError,
    InvalidTxnStateError,
    RowErrors,
    SchemaError,
    StorageFullError,
    TableNotFoundError,
    TopicNotFoundError,
    TransactionConflictError,
    TransactionLockedError,
    TxnkvError,
    UnavailableError,
)
from txnkv.storage import BusyError, Contender, back_off, brief, clock, is_calm, shielded_unless
from txnkv.tables import (
    Ahead,
    Outcome,
    RowWriter,
    Run,
    TableInfo,
    Values,
    arrow_input,
    scan,
    write_buffer,
)
from txnkv.topics import SubscriptionInfo, TopicInfo, refuse
from txnkv.transaction.begin import AT_ONCE, begin
from txnkv.transaction.commit_protocols import begin as begin_commit
from txnkv.transaction.commit_protocols import commit_small, make_sure
from txnkv.transaction.connection import Acknowledged, AnySubscription, Connection, acks_of
from txnkv.transaction.context import TxnContext
from txnkv.transaction.instance import Instance
from txnkv.transaction.send_buffer import Parcel
from txnkv.transaction.session_buffer import Acks, size_of
from txnkv.transaction.uncommitted import Heart

_ATTEMPTS: Final = 20
_FIRST_PAUSE: Final = 0.002
_LONGEST_PAUSE: Final = 0.064
_LATE: Final = (CommitOutcomeUnknownError, StorageFullError, UnavailableError)
"""Errors that may come after the commit point."""
_BRIEF_BYTES: Final = 1 << 16
"""Bytes of a row that is written in no time."""
EXPIRY_EVERY: Final = 10 * 1_000_000
"""Microseconds from one look for rows whose time is over to the next."""
EXPIRY_ROWS: Final = 100_000
"""Rows that one transaction deletes, at most; where there are more, the next round goes on."""


@dataclass
class Lot:
    """All that waited in a session, to be written together.

    Attributes:
        outcome: of its rows, when they are written.
    """

    runs: list[Run]
    parcels: list[Parcel]
    acks: list[Acks]
    outcome: Outcome = field(default_factory=Outcome)

    @property
    def is_empty(self) -> bool:
        return not (self.runs or self.parcels or self.acks)

    @property
    def sent(self) -> int:
        """The number of messages."""
        return sum(parcel.rows for parcel in self.parcels)

    @property
    def acked(self) -> int:
        """The number of acknowledged messages."""
        return sum(len(ids) for _, ids, _ in self.acks)

    def write(self, context: TxnContext) -> Outcome:
        """Write all of it in a transaction; return what became of the rows."""
        self.outcome = Outcome()
        for parcel in self.parcels:
            context.send(parcel.topic, parcel.parts)
        for info, ids, cumulative in self.acks:
            context.acknowledge(info, ids, cumulative=cumulative)
        context.settle()
        left = Ahead(self.runs)
        while left:
            self.outcome.add(_write_now(context, left[0], ahead=left))
            del left[0]
        return self.outcome

    def without_gone(self, error: BaseException, instance: Instance) -> Lot:
        """Return what waits on after an error: all but what is of the table or topic that it names
        as gone.
        """
        if isinstance(error, TableNotFoundError):
            gone = _first_gone(instance.engine, [run.writer.table for run in self.runs])
            return Lot([r for r in self.runs if r.writer.table.id != gone], self.parcels, self.acks)
        if isinstance(error, TopicNotFoundError):
            topics = [
                *(each.topic for each in self.parcels),
                *(each[0].topic for each in self.acks),
            ]
            gone = _first_gone(instance.topics, topics)
            acks = [acks for acks in self.acks if acks[0].topic.id != gone]
            if gone is None:
                acks = [each for each in acks if _is_there(instance, each[0])]
            return Lot(self.runs, [p for p in self.parcels if p.topic.id != gone], acks)
        return self


@brief
def checked_acks(
    connection: Connection, to: AnySubscription, message: Acknowledged, *, cumulative: bool
) -> Acks:
    """Return acks that are to wait for a flush, or raise as that would now."""
    info, ids = acks_of(connection, to, message)
    refuse(connection.instance.topics, info, ids, cumulative=cumulative)
    return info, ids, cumulative


class Unsure(NamedTuple):
    """A flush outside of a transaction that failed late: what it wrote is there, or nothing of it.

    Attributes:
        ask: tells which.
        lot: what it was to write.
    """

    ask: Callable[[], bool]
    lot: Lot


def _first_gone(catalog: Catalog[Any], entries: Sequence[TableInfo | TopicInfo]) -> int | None:
    """Return the id of the first of some tables or topics that was dropped; None for none."""
    for each in entries:
        with suppress(TxnkvError):  # the disk fails: the next try will tell
            if not catalog.is_live(each):
                return each.id
    return None


def _is_there(instance: Instance, info: SubscriptionInfo) -> bool:
    try:
        instance.topics.subscriptions.require(info)
    except TopicNotFoundError:
        return False
    except TxnkvError:  # as above
        return True
    return True


def _write_now(
    context: TxnContext, run: Run, *, counted: bool = True, ahead: Ahead | None = None
) -> Outcome:
    """Write checked rows, which may have waited while the table was altered."""
    op, former = run.op, run.writer
    now = context.instance.engine.row_writer(context.table_at_begin(former.table))
    rows, unfit = now.adapted(run.rows, op, former)
    run = Run(now, op, run.shape, rows)
    outcome = context.write_rows(run, counted=counted, ahead=ahead)
    for values, name in unfit:
        error = SchemaError(f"column {name!r} may not be null any more, and the row has no value")
        outcome.add(write_buffer.refusal(now, op, values, error))
    return outcome


def write_alone(
    instance: Instance, write: Callable[[TxnContext], Outcome], *, again: bool
) -> Outcome:
    """Write in a transaction of its own and commit it. Called where no signal interrupts; in a
    brief call without waiting.

    Args:
        instance: the store's.
        write: writes in the transaction that it gets; may run several times.
        again: whether it can.

    Raises:
        TransactionConflictError: others were first, again and again.
        InvalidTxnStateError: others aborted it, again and again, or it cannot run again.
        UnavailableError: the disk failed; nothing was written.
        CommitOutcomeUnknownError: the disk failed and fails; it was written whole or not at all,
            which its `ask` tells later.
        What `write` raises; nothing was written then.
        BusyError: in a brief call, where it would wait; nothing was written.
    """
    contender, in_haste = Contender(instance.store.right_of_way), is_calm()
    try:
        for attempt in range(1, _ATTEMPTS + 1):
            if in_haste and (attempt > AT_ONCE or contender.blocked):
                raise BusyError("others write the same")
            contender.wait()
            contender.take()
            try:
                return _attempt(instance, write)
            except (TransactionConflictError, InvalidTxnStateError) as error:
                if not again or not error.retriable or attempt == _ATTEMPTS:
                    raise
            contender.lost()
            instance.coordinator.log.show_others()
            if attempt > AT_ONCE:
                time.sleep(back_off(attempt - AT_ONCE, _FIRST_PAUSE, _LONGEST_PAUSE))
    finally:
        contender.end()
    raise AssertionError("unreachable")


@shielded_unless(lambda _, __, ___, values: size_of(values) <= _BRIEF_BYTES)
def write_row(instance: Instance, writer: RowWriter, op: str, values: Values) -> None:
    """Write a checked row in a transaction of its own; raises as `write_alone`, and RowErrors where
    the row is refused.
    """
    outcome = write_alone(
        instance,
        lambda context: _write_now(context, Run(writer, op, None, [values]), counted=False),
        again=True,
    )
    if outcome.refused:
        raise RowErrors(outcome.errors)


def _attempt(
    instance: Instance, write: Callable[[TxnContext], Outcome], *, transactional: bool = False
) -> Outcome:
    coordinator = instance.coordinator
    context = begin(
        instance,
        timeout=None,
        isolation="snapshot",
        locking="optimistic",
        keepalive=KEEPALIVE_TIME,
        transactional=transactional,
    )
    hearts = _Hearts(context)
    context.handle = lambda: hearts
    try:
        outcome = write(context)
        context.settle()  # what it has suppressed, for the next operation to try again
        if not _commit_small(context):
            _commit_large(context)
        return outcome
    except InvalidTxnStateError as error:  # others ended it; the next try meets what they dropped
        error.retriable = _abort(context)
        raise
    except BaseException:
        _abort(context)
        raise
    finally:
        context.handle = None
        if hearts.one is not None:
            coordinator.heartbeats.remove(hearts.one)


class _Hearts:
    """The heart of a write that turned out large."""

    def __init__(self, context: TxnContext) -> None:
        self.one: Heart | None = None
        self._context = context

    def start_heart(self) -> None:
        self.one = Heart(self._context.row)
        self._context.instance.coordinator.heartbeats.add(self.one)


def _commit_small(context: TxnContext) -> bool:
    """False when it has become large."""

    def committed() -> bool:
        return make_sure(context) is TxnState.COMMITTED

    try:
        return commit_small(context, begin_commit(context)) is not None
    except CommitOutcomeUnknownError as error:
        _ask(error, committed)
        return True


def _commit_large(context: TxnContext) -> None:
    coordinator, txn_id = context.instance.coordinator, context.row.txn_id

    def committed() -> bool:
        try:
            coordinator.abort(txn_id, "the disk failed while it was committing")
        except InvalidTxnStateError:  # past its commit point
            return True
        return False

    try:
        coordinator.orchestrator.start_commit(txn_id)
        ended = coordinator.orchestrator.finish(txn_id)
    except Exception as error:
        if isinstance(error, TxnkvError) and not isinstance(error, _LATE):
            raise
        _ask(error, committed)
        context.end(TxnState.COMMITTED)
        return
    context.end(ended.state)
    if ended.state is TxnState.ABORTED:
        raise ending_error(ended, "commit the write")


def _ask(error: Exception, committed: Callable[[], bool]) -> None:
    """Return if what broke off is committed all the same; else say that nothing was written, or
    that nobody knows.
    """
    try:
        there = committed()
    except TxnkvError:
        txn_id = getattr(error, "txn_id", 0)
        raise CommitOutcomeUnknownError(str(error), txn_id, committed) from error.__cause__
    if not there:
        raise UnavailableError(f"{error.__cause__ or error}. Nothing was written") from error


def _abort(context: TxnContext) -> bool:
    """On the way out of an error, which says more than what comes up here. False: nobody knows
    whether it is committed.
    """
    aborted = False
    with suppress(TxnkvError):
        if not context.stored:
            if context.local.open:
                context.end(TxnState.ABORTED)
            return True
        with suppress(InvalidTxnStateError):
            context.instance.coordinator.abort(context.row.txn_id, "the write failed")
            aborted = True
        context.end(TxnState.ABORTED)
    return aborted


class Expiry:
    """The rows of a store whose time is over, and their deletion; a sweep of the leader."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._again = 0

    def sweep(self, lease: Lease) -> None:
        """Delete some of them, of every table with a `ttl`; nothing where it was done just now."""
        now = clock.monotonic_micros()
        if now < self._again:
            return
        self._again = now + EXPIRY_EVERY
        engine = self._instance.engine
        for name in engine.names():
            table = engine.find(name)
            if table is None or table.schema.ttl is None:
                continue
            with engine.coordinator.damage.guard("tables", f"expiry of rows of {name!r}"):
                if self._expire(table) >= EXPIRY_ROWS:
                    self._again = 0

    def _expire(self, table: TableInfo) -> int:
        def delete(context: TxnContext) -> Outcome:
            there = context.table_at_begin(table)
            found = _expired(self._instance, there, context)
            if found is None:
                return Outcome()
            keys = arrow_input.chunks(there.schema, found, "delete_ignore")
            return context.write_batches(there, "delete_ignore", keys)

        try:
            return _attempt(self._instance, delete, transactional=True).deleted
        except (TransactionConflictError, TransactionLockedError):
            return 0  # somebody is at these rows: a later round looks again


def _expired(instance: Instance, table: TableInfo, context: TxnContext) -> pa.Table | None:
    """Keys of some rows whose time is over in the snapshot of a transaction; None for none."""
    if table.schema.ttl is None:
        return None
    column, seconds = table.schema.ttl
    until = EPOCH + timedelta(microseconds=clock.now_micros()) - timedelta(seconds=seconds)
    if table.schema.arrow.field(column).type.tz is None:
        until = until.replace(tzinfo=None)
    names = list(table.schema.primary_key)
    asked = scan.request(table, names, [(column, "<=", until)], False, EXPIRY_ROWS)
    plan = scan.plan(instance.engine, asked, context.view())
    try:
        found = pa.Table.from_batches(plan.batches(), asked.schema)
    finally:
        plan.pins.release()
    return found if found.num_rows else None


def expiring(instance: Instance) -> Instance:
    """Have rows deleted whose time is over, while this process leads."""
    if not instance.expires:
        instance.expires = True
        instance.coordinator.maintenance.add_sweep(Expiry(instance).sweep)
    return instance
