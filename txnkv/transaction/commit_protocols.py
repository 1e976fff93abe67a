"""The end of a transaction: of a small one by the commit log, of a large one in two phases.

A small one has no row of its own in status.db:

    commit      nothing written:  COMMITTED at its snapshot, no I/O
                else:             one row of the log, in the next group
    rollback    what is in memory is forgotten, no I/O

`local_state` tells which call is admitted in which state. A commit that breaks off at its commit
point leaves the transaction unsure. A caller that asks then writes to status.db, for a commit that
did not come to light by that write never does.

The commit of a large one is driven to its end also when the disk fails on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Final, TypeAlias

from txnkv.coordinator import (
    CommitRequest,
    ShieldedFuture,
    SmallCommit,
    Timestamp,
    TxnRow,
    TxnState,
    ending_error,
    payload,
    status_table,
    wall_timestamp,
)
from txnkv.errors import (
    AckConflictError,
    ClosedError,
    CommitOutcomeUnknownError,
    InvalidTxnStateError,
    ProducerFencedError,
    StorageFullError,
    TableNotFoundError,
    TopicNotFoundError,
    TransactionConflictError,
    TransactionLockedError,
    TransactionTimedOutError,
    TxnkvError,
    UnavailableError,
)
from txnkv.storage import clock, is_calm, lengthy, submitted
from txnkv.tables import LockedByYoungerError, history
from txnkv.transaction.context import TxnContext
from txnkv.transaction.local_state import Attempt, Local
from txnkv.transaction.session_buffer import SessionRows
from txnkv.transaction.uncommitted import Flushable

# -- small transactions ----------------------------------------------------------------

Begun: TypeAlias = tuple[Attempt | None, SmallCommit | None]
"""A commit that is on its way, and what the commit log is to be given where it begins. None in
place of an attempt: of a transaction that is stored, and goes the long way.
"""

_FEW: Final = 500
"""Rows, messages and acks that are flushed in no time."""
_SHORTEST_PAUSE: Final = 0.002
_LONGEST_PAUSE: Final = 0.05
"""Seconds between two tries to commit, while another transaction has a lock."""


def is_brief(context: TxnContext) -> bool:
    """Tell whether a commit would soon end: little waits, and nobody else is at it."""
    if context.local.at is not Local.IN_MEMORY:
        return False
    lock = context.lock
    if not lock.acquire(False):
        return False
    lock.release()
    if (gate := context.local.gate) is not None:
        if not gate.acquire(blocking=False):
            return False
        gate.release()
    return all(map(flushes_soon, context.sessions))


def flushes_soon(session: Flushable) -> bool:
    """Tell whether a flush would soon end: little waits, and not for a thread."""
    quick = session.flush_mode != "auto_background" and not session.flushing
    return quick and session.waiting() <= _FEW


def commit_small(context: TxnContext, begun: Begun) -> Timestamp | None:
    """Commit what was in memory, or wait for the commit that is on its way, as `begin` gave it.

    Returns:
        The commit timestamp, the snapshot when nothing was written; None when the transaction is
        stored, and goes the long way.

    Raises:
        TransactionConflictError, TransactionTimedOutError: it is aborted.
        TransactionLockedError: a tablet is locked by an older transaction, and it is
            aborted; or by a younger one for too long, and it is still open.
        CommitOutcomeUnknownError: the disk failed at the commit point.
    """
    attempt, commit = begun
    if attempt is None:
        return None
    if commit is not None:
        _drive(context, attempt, commit)
    if attempt.stamp is not None:
        return attempt.stamp
    try:
        return attempt.result() if attempt.done else _result(attempt)
    finally:
        del attempt, begun  # an error of it refers to this frame


@lengthy
def _result(attempt: Attempt) -> Timestamp:
    return attempt.result()


def submit(context: TxnContext, begun: Begun, large: Callable[[], Timestamp]) -> Future[Timestamp]:
    """Commit without waiting; `large` commits a stored one."""
    found = submit_small(context, begun)
    if found is None:
        found = context.local.going = ShieldedFuture[Timestamp]().begun()
        submitted(context.instance.pool, found.take, large)
    return found


def submit_small(context: TxnContext, begun: Begun) -> Future[Timestamp] | None:
    """`commit_small` without waiting: any number may be on their way at once."""
    attempt, commit = begun
    if attempt is None:
        return None
    with context.lock:
        future = attempt.future()
    if commit is not None:
        inner = context.instance.coordinator.log.commit_async(commit)
        inner.add_done_callback(lambda done: _submitted(done, context, attempt, commit))
    return future


def begin_behind(context: TxnContext, rows: SessionRows, flush: Callable[[bool], object]) -> Begun:
    """Flush what waits and begin to commit; from before the one to behind the other nothing is
    added to the transaction.

    Args:
        context: of the transaction.
        rows: of its single calls.
        flush: told whether also to flush sessions: not under the lock, which that wants.

    Raises:
        What `flush` raises, and `begin`.
    """
    context.require_process()
    (local := context.local).ending = "committed"
    if local.hand is not None:  # before the lock is had: who writes on and on would keep it
        local.hand.withdraw()
    while True:
        gated = bool(context.sessions)
        with local.new_gate() if gated else context.lock:  # who comes second finds all flushed
            local.ending = "committed"  # another may have failed
            try:
                opened = local.at is Local.IN_MEMORY or local.at is Local.STORED
                if opened and (gated or rows.lone or rows.runs or context.unsettled):
                    flush(gated)
                local.commit_called = True
                if (gated or not context.sessions) and (opened or not local.open):
                    return begin(context)
            finally:
                if local.at is Local.IN_MEMORY or local.at is Local.STORED:
                    local.ending = ""
                    local.withdraw()


def abort_behind(context: TxnContext, abort: Callable[[], None]) -> None:
    """Abort, not from under a commit that flushes; meanwhile nothing is added.

    What waits is to be forgotten then, not before: another commit would do without that.
    """
    context.require_process()
    if (going := (local := context.local).going) is not None:
        wait([going])  # or it would be told that it is committed, and then be aborted
    local.ending = "rolled back"
    local.withdraw()
    with local.new_gate():
        local.ending = "rolled back"  # another may have failed
        for session in context.sessions:
            session.end()  # its short cuts, too
        try:
            abort()
        finally:
            if local.open:
                local.ending = ""


def begin(context: TxnContext) -> Begun:
    """Begin to commit: nothing comes in any more.

    Raises:
        InvalidTxnStateError, TransactionTimedOutError: it is aborted.
    """
    if context.local.at is Local.UNSURE:
        make_sure(context)
    local = context.local
    with context.lock:
        if local.at is Local.ABORTED:
            raise context.not_open("commit")
        if local.at is Local.STORED:
            context.ensure_large("commit")
            local.move(Local.FINISHING)
        if local.stored:
            return None, None
        if local.attempt is not None:
            return local.attempt, None
        if local.at is Local.IN_MEMORY:
            return context.begin_to_commit()
        return Attempt(local.commit_ts or context.snapshot), None


def _drive(context: TxnContext, attempt: Attempt, commit: SmallCommit) -> None:
    """Have the commit log commit."""
    log, request = context.instance.coordinator.log, None
    try:
        stamp = log.commit_alone(commit)
        if stamp is None:
            request = log.offer(commit, context.row.deadline)
            stamp = request.stamp
    except BaseException as error:
        _failed(context, attempt, error)
        if not isinstance(error, Exception):
            raise
        return
    if stamp is not None:
        _committed(context, attempt, stamp)
    elif context.transactional:
        lengthy(_wait_for)(context, attempt, commit, request)
    else:
        _wait_for(context, attempt, commit, request)


def _wait_for(
    context: TxnContext, attempt: Attempt, commit: SmallCommit, request: CommitRequest | None
) -> None:
    """Wait for a commit, and try it again and again while a younger transaction has a lock."""
    log, deadline = context.instance.coordinator.log, context.row.deadline
    while True:
        try:
            request = request or log.offer(commit, deadline)
            stamp = log.outcome(request, deadline)
        except LockedByYoungerError as error:
            request = None
            if not _wait_for_lock(context, attempt, error):
                return
        except BaseException as error:
            _failed(context, attempt, error)
            if not isinstance(error, Exception):
                raise
            return
        else:
            _committed(context, attempt, stamp)
            return


def _wait_for_lock(context: TxnContext, attempt: Attempt, error: TxnkvError) -> bool:
    """Pause before the next try; False when there is to be none."""
    attempt.queued = False
    waited = attempt.elapsed
    if waited > context.lock_timeout:
        said = (
            f"{error}, and did not end within {context.lock_timeout:g} s. Transaction "
            f"{context.row.txn_id} is still open: commit it again"
        )
        _stays_open(context, attempt, TransactionLockedError(said))
        return False
    attempt.wait(min(max(waited, _SHORTEST_PAUSE), _LONGEST_PAUSE))
    with context.lock:
        return attempt.queue_again()


def _submitted(
    done: Future[Timestamp], context: TxnContext, attempt: Attempt, commit: SmallCommit
) -> None:
    error = done.exception()
    if error is None:
        _committed(context, attempt, done.result())
    elif isinstance(error, LockedByYoungerError):
        attempt.queued = False
        try:
            context.instance.waiting.submit(_go_on, context, attempt, commit, error)
        except RuntimeError:  # its threads are gone
            _stays_open(context, attempt, ClosedError(f"{error}, and the client was closed"))
    else:
        _failed(context, attempt, error)


def _go_on(context: TxnContext, attempt: Attempt, commit: SmallCommit, error: TxnkvError) -> None:
    if _wait_for_lock(context, attempt, error):
        _drive(context, attempt, commit)


# -- outcomes --------------------------------------------------------------------------


def _committed(context: TxnContext, attempt: Attempt, stamp: Timestamp) -> None:
    with context.lock:
        context.local.commit_ts = stamp
        try:
            context.end(TxnState.COMMITTED)
        finally:
            context.local.settle(attempt, stamp)
    if attempt.future_asked is not None:
        _tell(context, attempt)


def _tell(context: TxnContext, attempt: Attempt) -> None:
    """Complete the future, if there is one; not in a brief call: callbacks are the program's."""
    if is_calm() and attempt.future_asked is not None:
        context.instance.coordinator.log.queue.on_thread(attempt.tell)
    else:
        attempt.tell()


def _stays_open(context: TxnContext, attempt: Attempt, error: TxnkvError) -> None:
    with context.lock:
        if attempt.done:  # it was rolled back meanwhile
            return
        context.reopen()
        context.local.settle(attempt, None, error)
    _tell(context, attempt)


def _failed(context: TxnContext, attempt: Attempt, error: BaseException) -> None:
    with context.lock:
        ago = int(attempt.elapsed * 1e6)
        context.local.unsure_since = wall_timestamp(ago), clock.monotonic_micros() - ago
        try:
            error = _move_after(context, error)
        finally:
            context.local.settle(attempt, None, error.with_traceback(None))
    _tell(context, attempt)
    _count(context, error)


def _move_after(context: TxnContext, error: BaseException) -> BaseException:
    """Note what became of a commit that raised `error`; what to raise."""
    if isinstance(error, (TableNotFoundError, TopicNotFoundError)) and context.transactional:
        context.end(TxnState.ABORTED, str(error))
        return context.not_open("commit")
    if isinstance(error, ProducerFencedError):
        context.end(TxnState.ABORTED, str(error), error)
        return context.not_open("commit")
    if isinstance(
        error, (TransactionConflictError, TransactionLockedError, TransactionTimedOutError)
    ):
        context.end(TxnState.ABORTED, str(error), error)
    elif isinstance(error, TxnkvError) and not isinstance(error, CommitOutcomeUnknownError):
        context.reopen()
    else:
        context.local.move(Local.UNSURE)
        if context.fence is not None:
            context.fence.forget()
        unknown = CommitOutcomeUnknownError(str(error), int(context.id))
        unknown.__cause__ = error.__cause__
        return unknown
    return error


def _count(context: TxnContext, error: BaseException) -> None:
    metrics = context.instance.coordinator.metrics
    if isinstance(error, TransactionConflictError):
        metrics.conflicts.add()
        metrics.ack_conflicts.add(isinstance(error, AckConflictError))
    elif isinstance(error, TransactionLockedError):
        metrics.locked.add()
    elif isinstance(error, TransactionTimedOutError):
        metrics.timeouts.add()


# -- asking, and giving up -------------------------------------------------------------


def current(context: TxnContext) -> TxnRow:
    """The row of a transaction, small or large, as it stands or would stand in status.db.

    Raises:
        CommitOutcomeUnknownError: its commit broke off, and how it ended was forgotten since.
        UnavailableError, StorageFullError: it broke off, and the disk still fails.
    """
    if context.local.at is Local.UNSURE:
        make_sure(context)
    return context.current()


def is_complete(context: TxnContext) -> bool:
    """True when the commit of a transaction is done and finalized, False while it goes on.

    Raises:
        InvalidTxnStateError: it is still open, or was aborted.
    """
    row = current(context)
    if row.state is TxnState.OPEN:
        raise InvalidTxnStateError(
            f"transaction {row.txn_id} is still open: start_commit() comes first"
        )
    if row.state in (TxnState.ABORT_IN_PROGRESS, TxnState.ABORTED):
        raise ending_error(row, "commit")
    if row.state is not TxnState.COMMITTED:
        return False
    context.end(TxnState.COMMITTED)
    return True


def make_sure(context: TxnContext) -> TxnState:
    """Find out how a commit ended whose outcome was not known.

    Raises:
        As `current`; it is as unsure as before.
    """
    local, txn_id = context.local, context.row.txn_id
    with context.lock:
        if local.at is Local.UNSURE:
            with context.instance.store.status.write() as cur:
                # A write after the failed one decides: what did not come to light by now never
                # does.
                found = payload.find(cur, txn_id)
                if found is None:
                    if not history.remembers(cur, *local.unsure_since):
                        raise CommitOutcomeUnknownError(
                            f"the commit of transaction {txn_id} broke off, and the commit log has "
                            "forgotten since how it ended: look for what it wrote",
                            int(context.id),
                        )
                    gone = replace(context.row, state=TxnState.ABORTED, reason="its commit failed")
                    status_table.insert(cur, gone)
            if found is None:
                context.end(TxnState.ABORTED, "its commit failed")
            else:
                local.commit_ts = found
                context.end(TxnState.COMMITTED)
        return local.told


def abort_small(context: TxnContext, reason: str) -> bool:
    """Forget what was written. Twice is fine.

    A commit that is on its way is waited for; one that waits for a lock is given up.

    Returns:
        False when the transaction is stored, and goes the long way.

    Raises:
        InvalidTxnStateError: it is committed.
        CommitOutcomeUnknownError, UnavailableError, StorageFullError: as `current`.
    """
    local = context.local
    while True:
        if local.at is Local.UNSURE:
            make_sure(context)
        with context.lock:
            attempt = local.attempt
            if local.stored:
                return False
            if local.at is Local.COMMITTED:
                raise InvalidTxnStateError(f"cannot abort: transaction {context.id} is COMMITTED")
            if local.at is not Local.UNSURE and (attempt is None or not attempt.queued):
                try:
                    context.end(TxnState.ABORTED, reason)
                finally:
                    if attempt is not None:
                        local.settle(attempt, None, context.not_open("commit"))
                break
        if attempt is not None:
            attempt.wait(1.0)
    if attempt is not None:
        _tell(context, attempt)
    return True


# -- large transactions ----------------------------------------------------------------


def commit_large(context: TxnContext) -> Timestamp | None:
    """Commit a stored transaction, or help one whose commit has begun to its end.

    Returns:
        Its commit timestamp, the snapshot when nothing was written; None: another
        thread's commit, which had begun, has failed, and it is open again.

    Raises:
        RowErrors: workers staged the same key. The transaction stays OPEN.
        TransactionConflictError, TransactionLockedError, InvalidTxnStateError: it was aborted.
        StorageFullError, UnavailableError: the disk failed before its commit point; it is
            aborted, or as open as before.
        CommitOutcomeUnknownError: the disk failed, and neither end could be made sure of.
    """
    try:
        if (row := _start_large(context)) is None:
            return None
        if row.state is not TxnState.COMMITTED:
            row = context.instance.coordinator.orchestrator.finish(context.row.txn_id)
    except (StorageFullError, UnavailableError) as error:
        if context.local.at is not Local.FINISHING:
            raise
        row = _after_failed_finish(context, error)
    finally:
        _withdraw_reads(context)
    context.end(row.state, row.reason)
    if row.state is TxnState.ABORTED:
        raise ending_error(row, "commit")
    return context.snapshot if row.commit_ts is None else row.commit_ts


def start(context: TxnContext, begun: Begun) -> bool:
    """Begin to commit; a thread of the library goes on to its end. False: the commit that had begun
    has failed, and it is open again.

    Raises:
        RowErrors: workers staged the same key. The transaction stays OPEN.
        InvalidTxnStateError: it was aborted, or a job still runs under it.
    """
    if submit_small(context, begun) is not None:
        return True
    try:
        started = _start_large(context) is not None
    except BaseException:
        _withdraw_reads(context)
        raise
    if started:
        context.instance.pool.submit(_finish_in_background, context)
    return started


def _start_large(context: TxnContext) -> TxnRow | None:
    local = context.local
    with context.lock:
        if local.at is Local.STORED:
            return None  # what was added since is to be flushed
        local.starting += 1
    _offer_reads(context)
    try:
        return context.instance.coordinator.orchestrator.start_commit(context.row.txn_id)
    except BaseException:
        with context.lock:
            local.starting -= 1
            if local.at is Local.FINISHING and not local.starting:
                local.move(Local.STORED)  # or whatever status.db says
        raise


def _finish_in_background(context: TxnContext) -> None:
    try:
        context.instance.coordinator.orchestrator.finish(context.row.txn_id)
    finally:
        _withdraw_reads(context)


def _after_failed_finish(context: TxnContext, error: TxnkvError) -> TxnRow:
    """Past the commit point all is well, before it the transaction aborts."""
    coordinator = context.instance.coordinator
    txn_id = context.row.txn_id
    try:
        row = coordinator.get(txn_id)
        if row.state in (TxnState.FINALIZE_IN_PROGRESS, TxnState.COMMITTED):
            return row
        coordinator.abort(txn_id, f"the commit failed: {error}")
    except TxnkvError:
        raise CommitOutcomeUnknownError(
            f"the disk failed while transaction {txn_id} was committing ({error}). It is "
            "wholly committed or wholly not: when the disk is well again, ask "
            "client.transaction_state(error.txn_id)",
            int(context.id),
        ) from error
    context.end(TxnState.ABORTED)
    raise error


def _offer_reads(context: TxnContext) -> None:
    """Let the commit that begins validate what was read here."""
    if context.reads is not None:
        context.instance.engine.read_sets[context.row.txn_id] = context.reads


def _withdraw_reads(context: TxnContext) -> None:
    context.instance.engine.read_sets.pop(context.row.txn_id, None)
