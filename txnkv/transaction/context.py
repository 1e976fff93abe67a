"""A transaction as its handles and sessions share it inside a process.

It begins without any I/O and small: what it writes is kept in memory (`uncommitted`) and rides in
one row of the commit log. It is stored, and large from then on, when somebody else needs its OPEN
row (a token, a job, a lock) or it writes too much:

    begin --> small: SmallParts in memory --- commit --> one row of the commit log
                | ensure_large: token, job, partition lock, > 10,000 rows or 1 MiB
                v
              stored: OPEN row, messages appended, rows staged; rows that come later wait in memory
                |             until they are as many again, as long as nobody else may read them
                | commit
                v
              COMMIT_IN_PROGRESS, ...

Which of these it is, and what it may do then, is said by `local_state`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import suppress
from dataclasses import replace
from itertools import islice

import pyarrow as pa

from txnkv.coordinator import (
    LOCK_TIMEOUT,
    Mark,
    PartIds,
    SmallCommit,
    Timestamp,
    TxnId,
    TxnRow,
    TxnState,
    applications,
    ending_error,
    past_timeout,
    status_table,
)
from txnkv.core import Holding
from txnkv.errors import (
    AckConflictError,
    AlreadyAppliedError,
    InvalidTxnStateError,
    NotSupportedError,
    StorageFullError,
    TableNotFoundError,
    TransactionTimedOutError,
    TxnkvError,
    UnavailableError,
)
from txnkv.storage import BusyError, clock, fault_point, is_calm, patience
from txnkv.tables import (
    Ahead,
    Outcome,
    ReadSet,
    ReadView,
    Run,
    Scope,
    SmallWrites,
    TableInfo,
    WriteContext,
    staging,
    timed_out,
    write_buffer,
)
from txnkv.topics import Hold, StagedSends, SubscriptionInfo, TopicInfo, as_arrow
from txnkv.transaction.instance import Instance
from txnkv.transaction.local_state import Attempt, Local, LocalState
from txnkv.transaction.uncommitted import Fence, Flushable, HeartOwner, Parts, SmallParts


class TxnContext:
    """One transaction in one process: its row, what it holds in memory, how it ended here.

    Args:
        instance: the store's.
        row: as it is stored, or will be.
        stored: its OPEN row is in status.db.
        scope: in whose name rows are staged, where that is not the transaction's.
        transactional: False for a write outside of any transaction, which has one of its own.
        holding: its id and the pin of its snapshot, while it is not stored.

    Attributes:
        local: its state here.
        reads: what it has read, of a serializable one.
        lock: that of its state; held while anything is put into memory.
        lock_timeout: seconds for which it waits for the partition lock of a younger one.
        handle: gives who is told when it is stored, if they are still there.
        hold: keeps what it acknowledges from others, also after it was rolled back.
        on_commit: called once it has committed.
        fence: of one that has a name, while it is not stored.
        name: under which it is found once it is stored (`coordinator.jobs`).
        touched: it was given more than the rows in memory.
        shared: others read what it stages, or wait for it; else rows wait until they are many.
        buffers: what waits, of one that was joined.
    """

    lock_timeout: float = LOCK_TIMEOUT
    handle: Callable[[], HeartOwner | None] | None = None
    hold: Hold | None = None
    on_commit: Callable[[], None] | None = None
    name: str | None = None
    fence: Fence | None = None
    buffers: list[Sized] | None = None
    _own: SmallParts | None = None
    _fixed: Timestamp | None = None
    _storing = False
    _flying = 0  # batches that are being staged: what is staged meanwhile sees none of them
    _staged_sends: StagedSends | None = None
    _unsure_acks: tuple[tuple[int, Sequence[tuple[int, int]], bool], ...] = ()

    def __init__(
        self,
        instance: Instance,
        row: TxnRow,
        *,
        stored: bool,
        scope: Scope | None = None,
        transactional: bool = True,
        holding: Holding | None = None,
    ) -> None:
        self.instance, self.row = instance, row
        self.local = LocalState(stored=stored)
        self.lock = self.local.lock
        self.scope, self.transactional = scope, transactional
        self.sessions: tuple[Flushable, ...] = ()  # changed under the lock
        self.reads = ReadSet() if row.isolation == "serializable" and not stored else None
        self.touched, self.shared = stored, stored or row.locking == "partition"
        self._holding, self._pid = holding, instance.pid
        if not stored:
            instance.know(self)

    @property
    def id(self) -> TxnId:
        return self.instance.coordinator.txn_id(self.row.txn_id)

    @property
    def snapshot(self) -> Timestamp:
        """The snapshot that a read would see now; a lock may move it until the first read."""
        if self._fixed is not None:
            return self._fixed
        if self.row.locking == "partition" and self.stored and not self.local.ended:
            return self.instance.coordinator.snapshot_of(self.row)
        return self.row.snapshot_ts

    def _fixed_snapshot(self) -> Timestamp:
        """The snapshot to read at; with partition locks it moves no more (`coordinator.locks`)."""
        if self.row.locking != "partition":
            return self.row.snapshot_ts
        with self.lock:
            if self._fixed is None:
                fix, row = self.instance.coordinator.fix_snapshot, self.row
                self._fixed = fix(row.txn_id) if self.stored else row.snapshot_ts
            return self._fixed

    # -- what it is --------------------------------------------------------------------

    def require_process(self) -> None:
        """Refuse with InvalidTxnStateError a handle that a forked child inherited."""
        if self._pid != self.instance.pid:
            raise InvalidTxnStateError(
                f"transaction {self.row.txn_id} belongs to process {self._pid}: hand it to another "
                "process as a token (serialize, Transaction.deserialize)"
            )

    @property
    def stored(self) -> bool:
        """Its row is in status.db, which says how it stands."""
        return self.local.stored

    @property
    def has_written(self) -> bool:
        """It is more than a reader."""
        return self.touched or (self._own is not None and self._own.shown is not None)

    def require_open(self, what: str) -> None:
        """Refuse what only an open transaction admits, as far as this process knows.

        Raises:
            InvalidTxnStateError: it was ended here, or is being committed.
            TransactionTimedOutError: it is past its timeout.
        """
        if self._pid != self.instance.pid:
            self.require_process()
        if self.local.at is Local.IN_MEMORY:
            if self.row.deadline is not None and past_timeout(self.row):
                raise timed_out(self.row, what)
            if self.fence is not None:
                self.lose_name()
        if self.local.at not in (Local.IN_MEMORY, Local.STORED):
            raise self.not_open(what)

    def lose_name(self, *, surely: bool = False) -> None:
        """End it, if it is small and open, and another one has its name, as it has `surely`."""
        with self.lock:
            fence = self.fence if self.local.at is Local.IN_MEMORY else None
            if fence is not None and (surely or fence.is_lost):
                self.end(TxnState.ABORTED, str(fence.error), fence.error)

    def look_open(self, what: str) -> None:
        """Refuse as `require_open`, for what would show much later: also by the row in status.db.

        Raises as `require_open`, and:
            TxnNotFoundError: it ended so long ago that it was forgotten.
        """
        self.require_open(what)
        if self.stored:
            row = self.instance.coordinator.get(self.row.txn_id)
            if row.state is not TxnState.OPEN:
                raise ending_error(row, what)

    def not_open(self, what: str) -> InvalidTxnStateError:
        """The error for what only an open transaction admits."""
        return status_table.not_open(self._as_known(), what)

    def current(self) -> TxnRow:
        """The row as it stands in status.db, or would."""
        if self.stored:
            return self.instance.coordinator.get(self.row.txn_id)
        self.lose_name()
        if past_timeout(self.row):
            with self.lock:
                if self.local.at is Local.IN_MEMORY:
                    self.time_out("go on")
        return self._as_known()

    def _as_known(self) -> TxnRow:
        at = self.local
        return replace(
            self.row, state=at.told, commit_ts=at.commit_ts, reason=at.reason, error=at.error
        )

    def table_at_begin(self, table: TableInfo) -> TableInfo:
        """Return a table as it was when this began, and as it writes and reads it."""
        return self.instance.engine.at(table, self.row.snapshot_ts)

    def view(self) -> ReadView:
        """The snapshot and the own writes, in memory and staged; raises as `require_open`."""
        snapshot = self._fixed_snapshot()
        with self.lock:  # what moves from memory to disk is in one of them
            self.require_open("read")  # ended meanwhile, it has nothing in memory
            own = None if self._own is None else self._own.shown
            return ReadView(snapshot, self.row.txn_id if self.stored else None, own, self.reads)

    # -- large -------------------------------------------------------------------------

    def ensure_stored(self, what: str = "write", parts: PartIds | None = None) -> TxnRow:
        """Store the OPEN row, once, and `parts` as `write_open` does.

        Raises:
            InvalidTxnStateError: it was ended here, or is being committed.
            TransactionTimedOutError: it is past its timeout.
        """
        with self.lock:
            if self.local.at is not Local.STORED:
                self.require_open(what)
                if is_calm() and patience() is not None:
                    raise BusyError("it is more than is written in no time")
                at, fixed = self.instance.coordinator, self._fixed is not None
                at.heartbeats.start()
                self.local.withdraw()
                self._storing = True  # also if it fails: the row may be there
                parts = parts or (None if self.fence is None else {})  # or the row of its name is
                self.row = at.write_open(self.row, fixed=fixed, name=self.name, parts=parts)
                self.local.move(Local.STORED)
                if self.handle is not None and (handle := self.handle()) is not None:
                    handle.start_heart()
            if self.fence is not None and not self.fence.take(self.row.txn_id):
                self._abort(self.fence.error)
                raise self.not_open(what)
            self.fence = None  # from now on who takes its name ends it
            return self.row

    def share(self, what: str) -> TxnRow:
        """Stage all, now and from now on, for others to read; raises as `ensure_stored`."""
        with self.lock:
            row = self.ensure_large(what).row
            self.shared = True
            return row

    def ensure_large(self, what: str = "write", *, rows: bool = True) -> WriteContext:
        """Store the OPEN row and stage what is in memory, `rows` too; raises as `ensure_stored`."""
        with self.lock:
            row, scope = self.ensure_stored(what), self.scope or Scope(self.row.txn_id)
            context = WriteContext(row, scope, self.transactional, self.reads, self.lock_timeout)
            if self._own is not None:
                try:
                    self._own.stage(context, rows=rows)
                except (AckConflictError, TableNotFoundError) as error:  # it cannot commit any more
                    self._abort_for_all(error)
                    raise
            if rows:
                self._own = None
            return context

    def with_scope(self, scope: Scope) -> TxnContext:
        """The same transaction, staging in the name of a job's attempt."""
        context = TxnContext(self.instance, self.row, stored=True, scope=scope)
        context.lock_timeout = self.lock_timeout
        of = self.row, scope.job_id or "", scope.attempt or ""
        context._staged_sends = StagedSends(self.instance.topics.staged, *of)
        return context

    # -- writing -----------------------------------------------------------------------

    def rows_at_hand(self, what: str) -> SmallWrites | None:
        """The rows of a small transaction, for one to be read or written, under the lock; None: it
        is not small. Raises as `require_open`.
        """
        row, deadline = self.row, self.row.deadline
        if self.local.at is not Local.IN_MEMORY or self._pid != self.instance.pid:
            self.require_open(what)
            return None
        if deadline is not None and clock.monotonic_micros() > deadline:  # begun here: on this boot
            raise timed_out(row, what)
        if self._storing or row.locking == "partition":
            return None
        return self.rows if self._own is None else self._own.rows

    @property
    def rows(self) -> SmallWrites:
        """The rows that it holds."""
        if self.stored:
            self.instance.engine.failed_writes.take_back(self.row.txn_id)
        return self._parts().rows

    def write_rows(self, run: Run, *, counted: bool = True, ahead: Ahead | None = None) -> Outcome:
        """An operation on checked rows of one shape. After an error nothing of it counts.

        Args:
            run: the rows, as the checker of their table's writer gives them.
            counted: whether the caller looks at the counts.
            ahead: as `SmallWrites.apply_rows` takes it.

        Raises:
            InvalidTxnStateError: the transaction is not open.
        """
        writer, op, rows = run.writer, run.op, run.rows
        singly = len(rows) > 1 and writer.counts_singly(op)
        few = write_buffer.few_rows(writer, self.reads, stored=self.stored)
        if singly or len(rows) <= few:
            with self.lock:
                if self._own is not None or self._storing or self._staged_sends is not None:
                    self.settle()
                if self.holds_rows:
                    outcome = Outcome()
                    self.rows.apply_rows(run, outcome, counted=counted, ahead=ahead)
                    self.settle_if_possible()
                    return outcome
        return self.write_batches(writer.table, op, writer.to_batches(op, rows))

    def write_batches(
        self, table: TableInfo, op: str, batches: Iterator[pa.RecordBatch]
    ) -> Outcome:
        """An operation on batches as `arrow_input.chunks` gives them."""
        self.settle()
        ahead = deque(islice(batches, 2))
        if not ahead:
            return Outcome()
        if len(ahead) == 1 and write_buffer.is_small(ahead[0], stored=self.stored):
            with self.lock:
                if self.holds_rows:
                    outcome, own = Outcome(), self.rows
                    own.apply_batch(table, op, ahead[0], outcome)
                    self.settle_if_possible()
                    return outcome
        with self.lock:
            context = self.ensure_large()
            self._flying += 1
        try:
            left = staging.drained(ahead, batches)
            return staging.stage(self.instance.engine, context, table, left, op)
        finally:
            with self.lock:
                self._flying -= 1

    @property
    def may_be_small(self) -> bool:
        """It is open for all that this process knows, and what it writes stays in memory."""
        at_first = self.local.at is Local.IN_MEMORY and not self._storing
        return at_first and self.row.locking != "partition"

    @property
    def holds_rows(self) -> bool:
        """The rows that it writes stay in memory while they are few, large as it may be."""
        alone = not (self.shared or self._flying)
        return self.may_be_small or (alone and self.local.at is Local.STORED)

    def _parts(self, what: str = "write") -> SmallParts:
        at = self.local.at
        if at is not Local.IN_MEMORY and at is not Local.STORED:
            raise self.not_open(what)
        if self._own is None:
            own = self.instance, self.row, self.reads
            self._own = SmallParts(*own, stored=self.stored, transactional=self.transactional)
        self._own.hold = self.hold
        return self._own

    # -- messages and acks -----------------------------------------------------------------

    def send(self, topic: TopicInfo, parts: Parts, *, more: bool = False) -> None:
        """Take messages for partitions of a topic; all or, after an error, none of them.

        They are in memory then: `settle` comes next. Those of an attempt are staged, and count
        from now on; with `more`, only with those that come next.

        Raises:
            TopicNotFoundError: it was dropped.
            InvalidTxnStateError: the transaction is not open, or the attempt's job has ended.
            StorageFullError: no room to stage them.
        """
        with self.lock:
            self.require_open("send")
            if self._staged_sends is not None:
                self._staged_sends.send(topic, [(n, as_arrow(some)) for n, some in parts])
                self.settle(more=more)
                return
            outbox = self._parts().outbox
            outbox.require_live(topic)
            self.touched = True
            for number, messages in parts:
                outbox.add(topic, number, messages)

    def acknowledge(
        self, info: SubscriptionInfo, ids: Sequence[tuple[int, int]], *, cumulative: bool
    ) -> None:
        """Take acknowledgements of a subscription.

        Raises:
            AckConflictError: another transaction has one of them.
            InvalidTxnStateError: the transaction is not open.
            NotSupportedError: in an attempt of a job.
        """
        self.refuse_attempt("acknowledge")
        with self.lock:
            self.require_open("acknowledge")
            self.settle()
            follows, self.touched = self.touched, True
            again = (call := (info.id, ids, cumulative)) in self._unsure_acks
            try:
                self._parts().outbox.acknowledge(info, ids, cumulative=cumulative, again=again)
            except AckConflictError as error:
                self._abort_for_all(error)
                raise
            except BusyError:  # it did nothing
                raise
            except (StorageFullError, UnavailableError):
                self._unsure_acks += (call,)
                raise
            self._unsure_acks = tuple(one for one in self._unsure_acks if one != call)
            self.settle_if_possible()
            if follows and len(ids) == 1 and self.may_be_small and not self.local.ending:
                self.local.acks = self._parts().outbox.more_acks(info, ids[0], self.local.acks)

    def take_back(self) -> None:
        """Have nothing count that an attempt has sent since it settled."""
        if self._staged_sends is not None:
            self._staged_sends.take_back()

    def settle(self, *, more: bool = False) -> None:
        """Stage what was sent and acknowledged, where it may not stay in memory.

        What could not be staged is staged the next time, at the latest by the commit.

        Args:
            more: what comes next belongs to it; of an attempt it counts with that.
        """
        if self._staged_sends is None and not self.unsettled:
            return
        with self.lock:
            if self._staged_sends is not None and not more:
                self._staged_sends.settle()
            if self.unsettled:
                own = self._own
                self.ensure_large(rows=own is None or own.too_large or not self.holds_rows)

    def settle_if_possible(self) -> None:
        """Stage what has become too large; what fails is tried again, and told, by what follows."""
        if self.unsettled:
            with suppress(StorageFullError, UnavailableError):
                self.settle()

    @property
    def unsettled(self) -> bool:
        """Something is in memory that may not stay there, or the OPEN row may not be stored."""
        own = self._own
        if own is None:
            return self._storing and not self.local.stored
        if self.local.stored:
            return self.shared or own.too_large or own.has_more
        return self._storing or own.too_large or self.row.locking == "partition"

    def _abort_for_all(self, error: TxnkvError) -> None:
        """Another transaction has the message, or a table is gone: all of this one ends here."""
        if self.transactional:
            if isinstance(error, AckConflictError):
                self.instance.coordinator.metrics.ack_conflicts.add()
            self._abort(error)

    def _abort(self, error: TxnkvError) -> None:
        if self.stored:
            orchestrator = self.instance.coordinator.orchestrator
            orchestrator.start_abort(self.row.txn_id, str(error), type(error))
            orchestrator.finish(self.row.txn_id)
        self.end(TxnState.ABORTED, str(error), error)

    def refuse_attempt(self, what: str) -> None:
        """Refuse what an attempt of a job cannot take back."""
        if self.scope is not None:
            raise NotSupportedError(
                f"cannot {what} in an attempt of a job: should the attempt fail, that could not "
                "be taken back. Do it in the transaction itself"
            )

    # -- versions of applications ----------------------------------------------------------

    def mark(self, mark: Mark) -> None:
        """Take a mark; see `Transaction.mark_applied`."""
        status = self.instance.store.status
        with self.lock:
            self.require_open("mark it as a version of an application")
            try:
                with status.read() as cur:
                    applications.refuse_applied(cur, mark)
                if self.may_be_small:
                    self._parts().marks.add(mark)
                else:
                    self.ensure_large()
                    with status.write() as cur:
                        applications.stage(cur, self.row.txn_id, mark)
                    fault_point("applications.staged")
            except AlreadyAppliedError as error:  # nobody is to commit without the mark
                self._abort(error)
                raise
            self.touched = True

    # -- the end -----------------------------------------------------------------------

    def time_out(self, what: str) -> TransactionTimedOutError:
        """End it because it is past its timeout; what to raise."""
        error = timed_out(self.row, what)
        self.end(TxnState.ABORTED, "timed out", error)
        return error

    def begin_to_commit(self) -> tuple[Attempt, SmallCommit | None]:
        """Take what is in memory for the commit log, under the lock: nothing comes in any more.
        None when there is nothing; it has ended then, for its snapshot holds by itself.
        """
        if self.local.acks is not None:
            self.local.withdraw()
        commit = None if self._own is None else self._own.commit()
        if commit is not None:
            if self.fence is not None:
                commit = self.fence.within(commit)
            self.local.move(Local.COMMITTING)
            attempt = self.local.attempt = Attempt()
            return attempt, commit
        if past_timeout(self.row):
            raise self.time_out("commit")
        self.require_open("commit")
        self.end(TxnState.COMMITTED)
        return Attempt(self.snapshot), None

    def reopen(self) -> None:
        """Nothing was committed: it is as open as before."""
        self.local.move(Local.IN_MEMORY)
        if self._own is not None:
            self._own.reopen()

    def end(
        self, state: TxnState, reason: str | None = None, error: TxnkvError | None = None
    ) -> None:
        """It has ended: give back what it held. Again is harmless."""
        local = self.local
        with self.lock:
            if local.at is Local.COMMITTED or local.at is Local.ABORTED:
                return
            if reason is not None or error is not None:
                local.reason = reason
                local.error = None if error is None else type(error).__name__
            committed = state is TxnState.COMMITTED or state is TxnState.FINALIZE_IN_PROGRESS
            local.move(Local.COMMITTED if committed else Local.ABORTED)
            own, self._own = self._own, None
            if own is not None and own.rows.memories:
                self.touched = True
            for session in self.sessions:
                session.end()
            self.sessions = ()  # they refer to this: nothing is left for the collector
            if self._holding is not None:
                self._holding.end()
            if own is not None:
                own.ended(committed)
            if committed and self.on_commit is not None:
                self.on_commit()
