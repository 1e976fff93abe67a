"""How a small transaction ends: by the commit log, without a row of its own in status.db.

    commit      nothing written:  COMMITTED at its snapshot, no I/O
                else:             one row of the log, in the next group
    rollback    what is in memory is forgotten, no I/O

A commit that breaks off at its commit point leaves the transaction unsure. Who asks then writes
to status.db, for what did not come to light by that write never does.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import replace
from typing import Final

from txnkv.context import TxnContext
from txnkv.coordinator import commit_log, status_table
from txnkv.coordinator.ids import Timestamp
from txnkv.coordinator.states import TxnState
from txnkv.coordinator.status_table import TxnRow
from txnkv.errors import (
    CommitOutcomeUnknownError,
    InvalidTxnStateError,
    TableNotFoundError,
    TopicNotFoundError,
    TransactionConflictError,
    TransactionLockedError,
    TransactionTimedOutError,
)
from txnkv.tables.validation import LockedByYoungerError

_LOCK_WAIT: Final = 5.0
"""Seconds for which a commit waits for a younger transaction's lock."""


def commit_small(context: TxnContext) -> Timestamp:
    """Commit what is in memory; without I/O when that is nothing.

    Raises:
        TransactionConflictError, TransactionTimedOutError: it is aborted.
        TransactionLockedError: a tablet is locked by an older transaction, and it is
            aborted; or by a younger one for too long, and it is still open.
        CommitOutcomeUnknownError: the disk failed at the commit point.
    """
    if context.pending is not None:
        return context.pending.result()
    own = context.small
    if context.ended is not None or own is None:
        return _end_of_nothing(context)
    commit = own.commit()
    give_up = time.monotonic() + _LOCK_WAIT
    pause = 0.002
    while True:
        try:
            stamp = context.instance.coordinator.log.commit(commit)
        except LockedByYoungerError as error:
            if time.monotonic() > give_up:
                raise TransactionLockedError(
                    f"{error}, and did not end within {_LOCK_WAIT:g} s. Transaction "
                    f"{context.row.txn_id} is still open: commit it again"
                ) from None
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        except BaseException as error:
            raise _failed(context, error) from error.__cause__
        else:
            return _committed(context, stamp)


def submit_small(context: TxnContext) -> Future[Timestamp]:
    """`commit_small` without waiting: any number may be on their way at once.

    Raises:
        TransactionTimedOutError: it is past its timeout; it is aborted.
    """
    if context.pending is not None:
        return context.pending
    future: Future[Timestamp] = Future()
    future.set_running_or_notify_cancel()  # what is on its way is not called back
    own = context.small
    if context.ended is not None or own is None:
        future.set_result(_end_of_nothing(context))
        return future
    if context.past_deadline:
        raise context.time_out("commit")
    commit = own.commit()
    context.pending = future
    inner = context.instance.coordinator.log.commit_async(commit)
    inner.add_done_callback(lambda done: _submitted(context, done, future))
    return future


def _submitted(context: TxnContext, done: Future[Timestamp], future: Future[Timestamp]) -> None:
    error = done.exception()
    if isinstance(error, LockedByYoungerError):
        context.instance.pool.submit(_commit_waiting, context, future)
    elif error is not None:
        error = _failed(context, error)
        context.pending = None
        future.set_exception(error)
    else:
        future.set_result(_committed(context, done.result()))


def _commit_waiting(context: TxnContext, future: Future[Timestamp]) -> None:
    context.pending = None
    try:
        future.set_result(commit_small(context))
    except BaseException as error:
        future.set_exception(error)


def _end_of_nothing(context: TxnContext) -> Timestamp:
    """The commit of who wrote nothing, or has committed: its snapshot holds by itself."""
    if context.ended is None:
        if context.past_deadline:
            raise context.time_out("commit")
        context.end(TxnState.COMMITTED)
    return context.snapshot if context.commit_ts is None else context.commit_ts


def _committed(context: TxnContext, stamp: Timestamp) -> Timestamp:
    context.commit_ts = stamp
    context.end(TxnState.COMMITTED)
    return stamp


def _failed(context: TxnContext, error: BaseException) -> BaseException:
    """Note what became of a commit that raised `error`; what to raise."""
    if isinstance(error, CommitOutcomeUnknownError):
        context.unsure = True
        return CommitOutcomeUnknownError(str(error), int(context.id))
    if isinstance(error, (TableNotFoundError, TopicNotFoundError)) and context.transactional:
        error = InvalidTxnStateError(
            f"cannot commit: transaction {context.row.txn_id} is not open: ABORTED ({error})"
        )
        context.end(TxnState.ABORTED, str(error))
    elif isinstance(
        error, (TransactionConflictError, TransactionLockedError, TransactionTimedOutError)
    ):
        context.end(TxnState.ABORTED, str(error), error)
    _note(context, error)
    return error


def _note(context: TxnContext, error: BaseException) -> None:
    metrics = context.instance.coordinator.metrics
    if isinstance(error, TransactionConflictError):
        metrics.conflicts.add()
    elif isinstance(error, TransactionLockedError):
        metrics.locked.add()
    elif isinstance(error, TransactionTimedOutError):
        metrics.timeouts.add()


def make_sure(context: TxnContext) -> TxnState:
    """Find out how a commit ended whose outcome was not known.

    Raises:
        UnavailableError, StorageFullError: the disk still fails; it is as unsure as before.
    """
    txn_id = context.row.txn_id
    with context.instance.store.status.write() as cur:
        # A write after the failed one decides: what did not come to light by now never does.
        found = commit_log.find(cur, txn_id)
        if found is None:
            gone = replace(context.row, state=TxnState.ABORTED, reason="its commit failed")
            status_table.insert(cur, gone)
    context.unsure = False
    if found is not None:
        _committed(context, found)
    else:
        context.end(TxnState.ABORTED, "its commit failed")
    assert context.ended is not None
    return context.ended


def current(context: TxnContext) -> TxnRow:
    """The row of a transaction, small or large, as it stands or would stand in status.db."""
    if context.unsure:
        make_sure(context)
    return context.current()


def abort_small(context: TxnContext, reason: str) -> None:
    """Forget what was written. Twice is fine.

    Raises:
        InvalidTxnStateError: it is committed.
    """
    pending = context.pending
    if pending is not None:
        pending.exception()
    if context.unsure:
        make_sure(context)
    if context.ended is TxnState.COMMITTED:
        raise InvalidTxnStateError(f"cannot abort: transaction {context.id} is COMMITTED")
    if context.ended is None:
        context.end(TxnState.ABORTED, reason)
