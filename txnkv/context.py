"""A transaction as its handles and sessions share it inside a process.

It begins without any I/O and small: what it writes is kept in memory (`small_parts`) and rides in
one row of the commit log. It is stored, and large from then on, when somebody else needs its OPEN
row (a token, a job, a lock) or it writes too much:

    begin --> small: SmallParts in memory --- commit --> one row of the commit log
                |
                | ensure_large: token, job, partition lock, > 10,000 rows or 1 MiB
                v
              stored: OPEN row, rows staged and messages appended
                |
                | commit
                v
              COMMIT_IN_PROGRESS, ...
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from txnkv.coordinator.ids import Timestamp, TxnId
from txnkv.coordinator.orchestration import ending_error
from txnkv.coordinator.states import TxnState
from txnkv.coordinator.status_table import TxnRow
from txnkv.errors import (
    AckConflictError,
    InvalidTxnStateError,
    TransactionTimedOutError,
    TxnkvError,
)
from txnkv.heart import Beating, Flushable, unpin
from txnkv.instance import Instance
from txnkv.marking import MarkWrites
from txnkv.small_parts import SmallParts
from txnkv.storage import dropped
from txnkv.storage.seam import clock
from txnkv.tables import lookup, small, staging
from txnkv.tables.catalog import TableInfo
from txnkv.tables.incoming import Outcome
from txnkv.tables.manifest import Scope
from txnkv.tables.read_set import ReadSet
from txnkv.tables.row_checker import Values, to_batch
from txnkv.tables.row_writer import RowWriter
from txnkv.tables.staging import WriteContext
from txnkv.tables.validation import timed_out
from txnkv.tables.view import ReadView
from txnkv.topic_writes import TopicWrites

if TYPE_CHECKING:
    from txnkv.topics.holding import Hold

_PID = os.getpid()


def _after_fork_in_child() -> None:
    global _PID
    _PID = os.getpid()


os.register_at_fork(after_in_child=_after_fork_in_child)


class TxnContext(TopicWrites, MarkWrites):
    """One transaction in one process: its row, what it holds in memory, how it ended here.

    Args:
        instance: the store's.
        row: as it is stored, or will be.
        stored: its OPEN row is in status.db.
        scope: in whose name rows are staged, where that is not the transaction's.
        transactional: False for a write outside of any transaction, which has one of its own.

    One that is not stored has its snapshot pinned (`history.pin_latest`), and unpins it.

    Attributes:
        handle: gives who is told when it is stored, if they are still there.
        ended: how it ended, as far as this process knows; with `reason` and `error`, the name of
            a class, where it was aborted.
        commit_ts: of a small one that committed.
        pending: the commit of a small one that is on its way.
        unsure: a commit broke off, and whether it holds is not known yet.
        committing: the commit of a large one has begun.
        hold: keeps what it acknowledges from others, also after it was rolled back.
        name: under which it is found once it is stored (`coordinator.named`).
        has_written: it is more than a reader.
    """

    def __init__(
        self,
        instance: Instance,
        row: TxnRow,
        *,
        stored: bool,
        scope: Scope | None = None,
        transactional: bool = True,
    ) -> None:
        self.instance = instance
        self.row = row
        self.stored = stored
        self.scope = scope
        self.transactional = transactional
        self.sessions: list[Flushable] = []
        self.ended: TxnState | None = None
        self.commit_ts: Timestamp | None = None
        self.reason: str | None = None
        self.error: str | None = None
        self.commit_called = False
        self.handle: Callable[[], Beating | None] | None = None
        self.lock = threading.RLock()
        self._pid = _PID
        self._reads = ReadSet() if row.isolation == "serializable" and not stored else None
        self._own: SmallParts | None = None
        self._fixed: Timestamp | None = None
        self.has_written = stored
        self.pending: Future[Timestamp] | None = None
        self.unsure = False
        self.committing = False
        self.hold: Hold | None = None
        self.name: str | None = None
        self._known = self._pinned = False
        if not stored:
            dropped.ready()
            self._known = self._pinned = True
            instance.contexts[row.txn_id] = weakref.ref(self)

    def __del__(self) -> None:
        if self._known and self._pid == _PID:
            self.instance.contexts.pop(self.row.txn_id, None)
            if self._pinned:
                dropped.later(unpin, self.instance, self.row.txn_id, self.row.snapshot_ts)

    @property
    def id(self) -> TxnId:
        return self.instance.coordinator.txn_id(self.row.txn_id)

    @property
    def snapshot(self) -> Timestamp:
        """What a read would see now; a lock may move it until the first read."""
        if self._fixed is not None:
            return self._fixed
        if self.row.locking == "partition" and self.stored and self.ended is None:
            return self.instance.coordinator.snapshot_of(self.row)
        return self.row.snapshot_ts

    def _fixed_snapshot(self) -> Timestamp:
        """The snapshot to read at; with partition locks it moves no more (`coordinator.locks`)."""
        if self.row.locking != "partition":
            return self.row.snapshot_ts
        with self.lock:
            if self._fixed is None:
                coordinator, row = self.instance.coordinator, self.row
                self._fixed = (
                    coordinator.fix_snapshot(row.txn_id) if self.stored else row.snapshot_ts
                )
            return self._fixed

    # -- what it is --------------------------------------------------------------------

    def require_process(self) -> None:
        """Refuse a handle that a forked child inherited.

        Raises:
            InvalidTxnStateError: this process is not the one that made the handle.
        """
        if self._pid != _PID:
            raise InvalidTxnStateError(
                f"transaction {self.row.txn_id} belongs to process {self._pid}: hand it to another "
                "process as a token (serialize, Transaction.deserialize)"
            )

    def require_open(self, what: str) -> None:
        """Refuse what only an open transaction admits, as far as this process knows.

        Raises:
            InvalidTxnStateError: it was ended here, or is being committed.
            TransactionTimedOutError: it is past its timeout.
        """
        if self._pid != _PID:
            self.require_process()
        if self.ended is not None or self.pending is not None or self.committing:
            state = self.ended or TxnState.COMMIT_IN_PROGRESS
            raise InvalidTxnStateError(
                f"cannot {what}: transaction {self.row.txn_id} is not open: {state.name}. "
                "Begin a new transaction"
            )
        if not self.stored and self.past_deadline:
            raise timed_out(self.row, what)

    def look_open(self, what: str) -> None:
        """As `require_open`, for what would show much later: also as far as others know.

        Raises:
            InvalidTxnStateError, TransactionTimedOutError: as above.
            TxnNotFoundError: it ended so long ago that it was forgotten.
        """
        self.require_open(what)
        if self.stored:
            row = self.instance.coordinator.get(self.row.txn_id)
            if row.state is not TxnState.OPEN:
                raise ending_error(row, what)

    @property
    def past_deadline(self) -> bool:
        return self.row.deadline is not None and clock.monotonic_micros() > self.row.deadline

    def current(self) -> TxnRow:
        """The row as it stands in status.db, or would."""
        if self.stored:
            return self.instance.coordinator.get(self.row.txn_id)
        if self.pending is not None and not self.pending.done():
            return replace(self.row, state=TxnState.COMMIT_IN_PROGRESS)
        if self.ended is None and self.past_deadline:
            self.time_out("go on")
        return replace(
            self.row,
            state=self.ended or TxnState.OPEN,
            commit_ts=self.commit_ts,
            reason=self.reason,
            error=self.error,
        )

    def view(self) -> ReadView:
        """The snapshot and the transaction's own writes, in memory and staged."""
        return ReadView(
            self._fixed_snapshot(),
            self.row.txn_id if self.stored else None,
            None if self._own is None else self._own.shown,
            self._reads,
        )

    # -- large -------------------------------------------------------------------------

    def ensure_stored(self) -> TxnRow:
        """Store the OPEN row, once."""
        with self.lock:
            if not self.stored:
                self.row = self.instance.coordinator.write_open(
                    self.row, fixed=self._fixed is not None, name=self.name
                )
                self.stored = True
                handle = None if self.handle is None else self.handle()
                if handle is not None:
                    handle.start_heart()
            return self.row

    def ensure_large(self) -> WriteContext:
        """Store the OPEN row and stage what is in memory."""
        with self.lock:
            scope = self.scope or Scope(self.row.txn_id)
            context = WriteContext(
                self.ensure_stored(), scope, self.transactional, reads=self._reads
            )
            if self._own is not None:
                try:
                    self._own.stage(context)
                except AckConflictError as error:
                    self._abort_on_conflict(error)
                    raise
            self._own = None
            return context

    def with_scope(self, scope: Scope) -> TxnContext:
        """The same transaction, staging in the name of a job's attempt."""
        return TxnContext(self.instance, self.row, stored=True, scope=scope)

    # -- writing -----------------------------------------------------------------------

    def get(self, writer: RowWriter, key: Any) -> dict[str, Any] | None:
        """The row with this key, in the snapshot or the transaction's own writes."""
        if not self._may_be_small:
            return lookup.get(self.instance.engine, writer.table, self.view(), key)
        with self.lock:
            return self._parts().rows.get(writer, key)

    def write_rows(
        self, writer: RowWriter, op: str, rows: Sequence[Values], *, counted: bool = True
    ) -> Outcome:
        """An operation on checked rows of one shape. After an error nothing of it counts.

        Args:
            writer: of the table.
            op: the operation.
            rows: as its checker gives them.
            counted: whether the caller looks at the counts.
        """
        if self._may_be_small and len(rows) <= small.FEW_ROWS:
            outcome = Outcome()
            with self.lock:
                own = self._parts().rows
                self.has_written = True
                own.apply_rows(writer, op, rows, outcome, counted=counted)
                if own.too_large:
                    self.ensure_large()
            return outcome
        batch = to_batch(writer.schema, rows, op)
        return self.write_batches(writer.table, op, iter((batch,)))

    def write_batches(
        self, table: TableInfo, op: str, batches: Iterator[pa.RecordBatch]
    ) -> Outcome:
        """An operation on batches as `ingest.chunks` gives them."""
        ahead = list(islice(batches, 2))
        if not ahead:
            return Outcome()
        if len(ahead) == 1 and self._may_be_small and _is_small(ahead[0]):
            outcome = Outcome()
            with self.lock:
                own = self._parts().rows
                self.has_written = True
                own.apply_batch(table, op, ahead[0], outcome)
                if own.too_large:
                    self.ensure_large()
            return outcome
        context = self.ensure_large()
        return staging.stage(
            self.instance.engine, context, table, chain(_drained(ahead), batches), op
        )

    @property
    def _may_be_small(self) -> bool:
        return not self.stored and self.row.locking != "partition"

    def _parts(self) -> SmallParts:
        if self._own is None:
            self._own = SmallParts(
                self.instance, self.row, self._reads, self.hold, transactional=self.transactional
            )
        return self._own

    # -- the end -----------------------------------------------------------------------

    @property
    def small(self) -> SmallParts | None:
        """What it holds in memory; None when that is nothing."""
        own = self._own
        return None if own is None or own.empty else own

    def time_out(self, what: str) -> TransactionTimedOutError:
        """End it because it is past its timeout; what to raise."""
        error = timed_out(self.row, what)
        self.end(TxnState.ABORTED, "timed out", error)
        return error

    def end(
        self, state: TxnState, reason: str | None = None, error: TxnkvError | None = None
    ) -> None:
        """It has ended: give back what it held."""
        self.ended = TxnState.COMMITTED if state is TxnState.FINALIZE_IN_PROGRESS else state
        self.reason = reason
        self.error = None if error is None else type(error).__name__
        if self._own is not None:
            self._own.ended(self.ended is TxnState.COMMITTED)
        self._own = None
        for session in self.sessions:
            session.end()
        self.sessions = []  # they refer to this: nothing is left for the garbage collector
        if self._pinned:
            self._pinned = False
            unpin(self.instance, self.row.txn_id, self.row.snapshot_ts)

    # -- serializable ------------------------------------------------------------------

    def offer_reads(self) -> None:
        """Let the large commit that begins validate what was read here."""
        if self._reads is not None:
            self.instance.engine.read_sets[self.row.txn_id] = self._reads

    def withdraw_reads(self) -> None:
        self.instance.engine.read_sets.pop(self.row.txn_id, None)


def _is_small(batch: pa.RecordBatch) -> bool:
    return bool(batch.num_rows <= small.MAX_ROWS and batch.nbytes <= small.MAX_BYTES)


def _drained(batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Each once, without keeping it in memory behind."""
    while batches:
        yield batches.pop(0)
