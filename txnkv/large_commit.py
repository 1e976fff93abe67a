"""How the commit of a large transaction comes to its end, also when the disk fails on the way."""

from __future__ import annotations

from txnkv.context import TxnContext
from txnkv.coordinator.ids import Timestamp
from txnkv.coordinator.orchestration import ending_error
from txnkv.coordinator.states import TxnState
from txnkv.coordinator.status_table import TxnRow
from txnkv.errors import (
    CommitOutcomeUnknownError,
    StorageFullError,
    TxnkvError,
    UnavailableError,
)


def finish(context: TxnContext) -> Timestamp:
    """Drive a transaction whose commit has begun to its end.

    Returns:
        Its commit timestamp.

    Raises:
        TransactionConflictError, TransactionLockedError, InvalidTxnStateError: it was aborted.
        StorageFullError, UnavailableError: the disk failed before its commit point; it is
            aborted.
        CommitOutcomeUnknownError: the disk failed, and neither could be made sure of.
    """
    try:
        row = context.instance.coordinator.orchestrator.finish(context.row.txn_id)
    except (StorageFullError, UnavailableError) as error:
        row = _after_failed_finish(context, error)
    context.end(row.state)
    if row.state is TxnState.ABORTED:
        raise ending_error(row, "commit")
    return context.snapshot if row.commit_ts is None else row.commit_ts


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
