"""The commit of a large transaction, driven to its end also when the disk fails on the way."""

from __future__ import annotations

from txnkv.coordinator import Timestamp, TxnRow, TxnState, ending_error
from txnkv.errors import (
    CommitOutcomeUnknownError,
    StorageFullError,
    TxnkvError,
    TxnNotFoundError,
    UnavailableError,
)
from txnkv.topics import abort_unknown
from txnkv.transaction.context import TxnContext
from txnkv.transaction.instance import Instance
from txnkv.transaction.local_state import Local


def commit(context: TxnContext) -> Timestamp:
    """Commit a stored transaction, or help one whose commit has begun to its end.

    Returns:
        Its commit timestamp, the snapshot when nothing was written.

    Raises:
        RowErrors: workers staged the same key. The transaction stays OPEN.
        TransactionConflictError, TransactionLockedError, InvalidTxnStateError: it was aborted.
        StorageFullError, UnavailableError: the disk failed before its commit point; it is
            aborted.
        CommitOutcomeUnknownError: the disk failed, and neither end could be made sure of.
    """
    try:
        row = _start(context)
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


def start(context: TxnContext) -> None:
    """Begin to commit a stored transaction; a thread of the library drives it to its end.

    Raises:
        RowErrors: workers staged the same key. The transaction stays OPEN.
        InvalidTxnStateError: it was aborted, or a job still runs under it.
    """
    try:
        _start(context)
    except BaseException:
        _withdraw_reads(context)
        raise
    context.instance.pool.submit(_finish_in_background, context)


def abort_by_hand(instance: Instance, txn_id: int) -> None:
    """Abort a transaction of any process.

    Raises:
        TxnNotFoundError: no transaction has this id.
        InvalidTxnStateError: it is committed.
    """
    try:
        instance.coordinator.abort(txn_id, "aborted by hand")
    except TxnNotFoundError:
        # A log may have it open all the same, and keep its readers waiting.
        if not abort_unknown(instance.topics, txn_id):
            raise


def _start(context: TxnContext) -> TxnRow:
    local = context.local
    _offer_reads(context)
    with context.lock:
        begins = local.at is Local.STORED
        if begins:
            context.ensure_large("commit")
            local.move(Local.FINISHING)
    try:
        return context.instance.coordinator.orchestrator.start_commit(context.row.txn_id)
    except BaseException:
        with context.lock:
            if begins and local.at is Local.FINISHING:
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
