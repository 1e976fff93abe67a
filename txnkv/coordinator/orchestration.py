"""Driving a transaction to its end.

The commit point is one SQLite transaction: it checks that the state is still
COMMIT_IN_PROGRESS, lets every participant validate what came in last, takes the commit
timestamp and writes FINALIZE_IN_PROGRESS with it. Before that the transaction can still
abort; after that it is committed, whatever dies.

    client            status.db                          participants
    commit() ------>  OPEN -> COMMIT_IN_PROGRESS
                                                         begin_commit: validate, unlocked
                      [validate the rest,
                       COMMIT_IN_PROGRESS ->
                       FINALIZE_IN_PROGRESS + ts]        <- the commit point
                                                         finalize_commit: plain stamps
                      FINALIZE_IN_PROGRESS -> COMMITTED

Each step is a compare-and-set and each handler call may be repeated, so any number of
processes may drive one transaction at once: the client that called commit(), and a leader
that resumes what a dead process left.

Participants are those that hold a transaction's data. One object serves all participants of a kind
(all tablets, say); the coordinator knows nothing else of them. Every call may come again after a
crash, from another process.

    check            OPEN            errors in the rows; the transaction stays OPEN
    begin_commit     COMMIT_IN_...   may it commit? answers a timestamp above its operations
    validate         same            what came in since begin_commit, inside the transaction
                                     that writes the commit point
    write_commit     same            what goes with the commit point in status.db
    finalize_commit  FINALIZE_IN_... staged data gets its plain timestamp
    abort            ABORT_IN_...    staged data goes
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar

import apsw

from txnkv.coordinator import jobs, partition_locks, status_table
from txnkv.coordinator.commit_log import CommitLog
from txnkv.coordinator.damage import EVERY, Damage
from txnkv.coordinator.ids import Timestamp, TxnId, next_timestamp, reach
from txnkv.coordinator.status_table import TxnRow, TxnState, past_timeout
from txnkv.errors import (
    CommitOutcomeUnknownError,
    CorruptionError,
    InvalidTxnStateError,
    StorageFullError,
    TransactionConflictError,
    TransactionLockedError,
    TransactionTimedOutError,
    TxnkvError,
    TxnNotFoundError,
    UnavailableError,
)
from txnkv.storage import Store, declare_fault_point, fault_point


class Participants:
    """All participants of a kind; by default without errors, conflicts, or data.

    Args:
        log: tells the latest commit.

    Attributes:
        kind: as it stands in the participants table.
    """

    kind: ClassVar[str]

    def __init__(self, log: CommitLog) -> None:
        self._log = log

    def check(self, row: TxnRow, ids: Sequence[int]) -> int:
        """Find row errors that no writer could see alone. Answers what `checked_all` compares.

        Raises:
            RowErrors: two workers staged the same key. The transaction stays OPEN.
        """
        return 0

    def checked_all(self, cur: apsw.Cursor, row: TxnRow, checked: int) -> bool:
        """Nothing was staged since `check` answered `checked`."""
        return True

    def commit_alone(
        self, row: TxnRow, id: int, decide: Callable[[apsw.Cursor], Timestamp | None]
    ) -> bool:
        """Commit the only participant of a transaction in one step, where the kind can: take its
        lock, so that no write to it is under way, and decide.

        Args:
            row: of the transaction, OPEN when it was read.
            id: of the participant.
            decide: writes the commit point with the cursor of a write of status.db; the commit
                timestamp. None when something came in between: that write is to change nothing.

        Returns:
            Whether it was decided.
        """
        return False

    def begin_commit(self, row: TxnRow, ids: Sequence[int]) -> Timestamp:
        """Validate against what committed since the snapshot, unlocked.

        Returns:
            The timestamp up to which was validated.

        Raises:
            TransactionConflictError, TransactionLockedError: it must abort.
        """
        return self._log.latest()

    def validate(
        self, cur: apsw.Cursor, row: TxnRow, ids: Sequence[int], validated: Timestamp
    ) -> bool:
        """Validate what committed after `validated`. False when that is too much to do here.

        Raises:
            TransactionConflictError, TransactionLockedError: it must abort.
        """
        return True

    def write_commit(
        self, cur: apsw.Cursor, row: TxnRow, ids: Sequence[int], commit_ts: Timestamp
    ) -> None:
        """Change in status.db what changes with the commit. It cannot be refused any more."""

    def finalize_commit(self, row: TxnRow, ids: Sequence[int]) -> None:
        """Give the staged data its commit timestamp. `row.commit_ts` is set.

        Raises:
            TxnkvError: some participant failed; all others are done.
        """

    def abort(self, row: TxnRow, ids: Sequence[int]) -> None:
        """Remove the staged data, and let nothing late be staged.

        Raises:
            TxnkvError: some participant failed; all others are done.
        """


declare_fault_point("commit.started", "the state is COMMIT_IN_PROGRESS")
declare_fault_point("commit.validated", "validated unlocked, before the commit point")
declare_fault_point("commit.in_point", "the commit point is written, not yet committed")
declare_fault_point("commit.decided", "the commit point is durable, nothing is finalized")
declare_fault_point("commit.finalized", "participants are finalized, the state is not")
declare_fault_point("commit.ended", "the state is COMMITTED")
declare_fault_point("abort.started", "the state is ABORT_IN_PROGRESS")
declare_fault_point("abort.swept", "staged data is gone, the state is ABORT_IN_PROGRESS")
declare_fault_point("abort.ended", "the state is ABORTED")


class Orchestrator:
    """The moves of transactions, over the handlers of their participants.

    Attributes:
        tcid: the store's, for errors that name a transaction.
        damage: takes what fails while others go on.
    """

    def __init__(self, store: Store, damage: Damage | None = None) -> None:
        self._store = store
        self.damage = damage or Damage()
        self.tcid = 0
        self._handlers: dict[str, Participants] = {}

    def add_handler(self, handler: Participants) -> None:
        self._handlers[handler.kind] = handler

    def start_commit(self, txn_id: int) -> TxnRow:
        """OPEN -> COMMIT_IN_PROGRESS, or COMMITTED where there are no participants.

        Returns:
            The row after the move; that of a transaction already committing, unchanged.

        Raises:
            RowErrors: workers staged the same key. The transaction stays OPEN.
            InvalidTxnStateError: it is aborted, or a job still runs under it.
            TransactionTimedOutError: it passed its timeout; it is aborted.
            StorageFullError, UnavailableError: the disk failed. It stays OPEN.
            CommitOutcomeUnknownError: the disk failed, and goes on to.
        """
        while True:
            row, parts = self._seen(txn_id)
            if row.state.committing:
                return row
            if row.state is not TxnState.OPEN:
                raise status_table.ending_error(row, "commit")
            if past_timeout(row):
                row = self.start_abort(txn_id, "timed out", TransactionTimedOutError)
                raise status_table.ending_error(self.finish(row.txn_id), "commit")
            checked = {kind: self._handlers[kind].check(row, ids) for kind, ids in parts.items()}
            if self._commit_alone(row, parts):
                return self._row(txn_id)
            moved = False
            try:
                with self._store.status.write() as cur:
                    if status_table.participants(cur, txn_id) != parts or not all(
                        self._handlers[kind].checked_all(cur, row, checked[kind]) for kind in parts
                    ):
                        continue  # a worker came in between
                    jobs.refuse_running(cur, txn_id)
                    if status_table.get(cur, txn_id).state is not TxnState.OPEN:
                        continue
                    target = TxnState.COMMIT_IN_PROGRESS if parts else TxnState.COMMITTED
                    row = status_table.advance(cur, txn_id, TxnState.OPEN, target)
                    moved = True
                    if not parts:
                        partition_locks.release(cur, txn_id)
            except (StorageFullError, UnavailableError) as error:
                if not moved or not self._state_after(row, error).committing:
                    raise
                continue
            fault_point("commit.started")
            return row

    def _seen(self, txn_id: int) -> tuple[TxnRow, dict[str, list[int]]]:
        with self._store.status.read() as cur:
            return status_table.get(cur, txn_id), status_table.participants(cur, txn_id)

    def _row(self, txn_id: int) -> TxnRow:
        with self._store.status.read() as cur:
            return status_table.get(cur, txn_id)

    def _commit_alone(self, row: TxnRow, parts: Mapping[str, list[int]]) -> bool:
        """The short way of who has one participant: from OPEN to COMMITTED in one step.

        Returns:
            False when it has to go the long way; nothing has changed then.
        """
        if len(parts) != 1 or row.isolation == "serializable":
            return False
        ((kind, ids),) = parts.items()
        handler = self._handlers[kind]
        if len(ids) != 1:
            return False

        def decide(cur: apsw.Cursor) -> Timestamp | None:
            still = status_table.get(cur, row.txn_id).state is TxnState.OPEN
            if not still or status_table.participants(cur, row.txn_id) != parts:
                return None
            jobs.refuse_running(cur, row.txn_id)
            commit_ts = next_timestamp(cur)
            status_table.advance(
                cur, row.txn_id, TxnState.OPEN, TxnState.COMMITTED, commit_ts=commit_ts
            )
            _note_commit(cur, commit_ts)
            status_table.set_participants(cur, row.txn_id, kind, TxnState.COMMITTED, commit_ts)
            partition_locks.release(cur, row.txn_id)
            return commit_ts

        try:
            return handler.commit_alone(row, ids[0], decide)
        except (StorageFullError, UnavailableError) as error:
            if self._state_after(row, error) is not TxnState.COMMITTED:
                raise
            return True

    def _state_after(self, row: TxnRow, error: TxnkvError) -> TxnState:
        """Return how it stands where a step of its commit broke off by an error.

        Raises:
            CommitOutcomeUnknownError: the disk goes on to fail.
        """
        try:
            with self._store.status.write() as cur:
                # A write after the failed one decides: what did not come to light never does.
                return status_table.get(cur, row.txn_id).state
        except TxnkvError:
            raise CommitOutcomeUnknownError(
                f"the disk failed while transaction {row.txn_id} was committing ({error}). It is "
                "wholly committed or wholly not: when the disk is well again, ask "
                "client.transaction_state(error.txn_id)",
                TxnId.of(self.tcid, row.txn_id),
            ) from error

    def start_abort(
        self,
        txn_id: int,
        reason: str,
        error: type[TxnkvError] | None = None,
        *,
        only_open: bool = False,
    ) -> TxnRow:
        """Move to ABORT_IN_PROGRESS; an abort already begun is left as it is.

        Raises:
            InvalidTxnStateError: it is committed, or past its commit point.
        """
        with self._store.status.write() as cur:
            row = self.start_abort_in(cur, txn_id, reason, error, only_open=only_open)
        fault_point("abort.started")
        return row

    def abort_all(self, txn_ids: Iterable[int], reason: str) -> None:
        """Abort stored transactions; those past their commit point go on to their end."""
        for txn_id in set(txn_ids):
            with suppress(InvalidTxnStateError):
                self.start_abort(txn_id, reason)
            self.finish(txn_id)

    def start_abort_in(
        self,
        cur: apsw.Cursor,
        txn_id: int,
        reason: str,
        error: type[TxnkvError] | None = None,
        *,
        only_open: bool = False,
    ) -> TxnRow:
        row = status_table.get(cur, txn_id)
        if row.state in (TxnState.ABORT_IN_PROGRESS, TxnState.ABORTED):
            return row
        if row.state.decided or (only_open and row.state is not TxnState.OPEN):
            raise InvalidTxnStateError(
                f"cannot abort: transaction {txn_id} is {row.state.name}"
                + (": it has its commit timestamp" if row.state.decided else "")
            )
        return status_table.advance(
            cur,
            txn_id,
            row.state,
            TxnState.ABORT_IN_PROGRESS,
            reason=reason,
            error=None if error is None else error.__name__,
        )

    def finish(self, txn_id: int) -> TxnRow:
        """Drive a transaction that is no longer OPEN to COMMITTED or ABORTED.

        Where a part of it fails, the others come to their end, and the background goes on trying:
        it is decided, and the row that is returned says how it ends.
        """
        while True:
            row, parts = self._seen(txn_id)
            if row.state is TxnState.OPEN:
                raise InvalidTxnStateError(f"transaction {txn_id} is still open")
            if row.state.ended:
                return row
            if row.state is TxnState.COMMIT_IN_PROGRESS:
                self.decide(row, parts)
            elif not self._end_parts(row, parts):
                return replace(row, state=row.state.outcome)

    def give_up(self, txn_ids: Iterable[int], reason: str) -> None:
        """End transactions that touched what was lost: those that are not decided are aborted."""
        for txn_id in txn_ids:
            with suppress(InvalidTxnStateError):
                self.start_abort(txn_id, reason)
            with suppress(TxnNotFoundError):
                self.finish(txn_id)

    def decide(self, row: TxnRow, parts: Mapping[str, list[int]]) -> None:
        """From COMMIT_IN_PROGRESS to the commit point, or to ABORT_IN_PROGRESS.

        Return with nothing done where another driver was faster: an abort by it takes away what is
        validated here.
        """
        asked = dict(parts)
        if row.isolation == "serializable":  # what it has read counts where it wrote nothing
            asked |= {kind: [] for kind in self._handlers if kind not in parts}
        try:
            while True:
                validated = {
                    kind: self._handlers[kind].begin_commit(row, ids) for kind, ids in asked.items()
                }
                fault_point("commit.validated")
                with self._store.status.write() as cur:
                    now = status_table.get(cur, row.txn_id)
                    if now.state is not TxnState.COMMIT_IN_PROGRESS:
                        return
                    if not all(
                        self._handlers[kind].validate(cur, row, ids, validated[kind])
                        for kind, ids in asked.items()
                    ):
                        continue
                    commit_ts = self._write_commit_point(cur, row, parts)
                    for kind, ids in parts.items():
                        self._handlers[kind].write_commit(cur, row, ids, commit_ts)
                    fault_point("commit.in_point")
                self._store.runtime.raise_durable(commit_ts)
                fault_point("commit.decided")
                return
        except (TransactionConflictError, TransactionLockedError, CorruptionError) as error:
            with suppress(InvalidTxnStateError):  # another one who drives it was faster
                self.start_abort(row.txn_id, str(error), type(error))
        except InvalidTxnStateError:
            if self._row(row.txn_id).state is TxnState.COMMIT_IN_PROGRESS:
                raise

    def _write_commit_point(
        self, cur: apsw.Cursor, row: TxnRow, parts: Mapping[str, list[int]]
    ) -> Timestamp:
        for kind in parts:
            status_table.set_participants(
                cur, row.txn_id, kind, TxnState.COMMIT_IN_PROGRESS, next_timestamp(cur)
            )
        commit_ts = next_timestamp(cur)
        status_table.advance(
            cur,
            row.txn_id,
            TxnState.COMMIT_IN_PROGRESS,
            TxnState.FINALIZE_IN_PROGRESS,
            commit_ts=commit_ts,
        )
        _note_commit(cur, commit_ts)
        return commit_ts

    def _end_parts(self, row: TxnRow, parts: Mapping[str, list[int]]) -> bool:
        """Have every participant finalize or abort; False when some could not."""
        commits = row.state is TxnState.FINALIZE_IN_PROGRESS
        failed = False
        for kind, ids in parts.items():
            handler = self._handlers[kind]
            end = f"transaction {row.txn_id}", f"its end, {kind}"
            with self.damage.guard(*end, (*EVERY, MemoryError)) as one:
                (handler.finalize_commit if commits else handler.abort)(row, ids)
            failed = failed or one.error is not None
        if failed:
            with self._store.status.write() as cur:
                partition_locks.release(
                    cur, row.txn_id
                )  # nobody is to wait for what may never be mended
            return False
        fault_point("commit.finalized" if commits else "abort.swept")
        self._end(row, parts, row.state.outcome)
        fault_point("commit.ended" if commits else "abort.ended")
        return True

    def _end(self, row: TxnRow, parts: Mapping[str, list[int]], state: TxnState) -> None:
        with self._store.status.write() as cur:
            for kind in parts:
                status_table.set_participants(cur, row.txn_id, kind, state)
            partition_locks.release(cur, row.txn_id)
            with suppress(InvalidTxnStateError):  # another one who drives it was faster
                status_table.advance(cur, row.txn_id, row.state, state, commit_ts=row.commit_ts)


def _note_commit(cur: apsw.Cursor, commit_ts: Timestamp) -> None:
    reach(cur, commit_ts)
    cur.execute("UPDATE clock_row SET manifest_version = manifest_version + 1")
