"""Writes outside of any transaction: each has one of its own.

No snapshot was promised to such a write, so when others commit first what it writes it looks
again and meets what they left: an insert finds its key there, an upsert replaces the new row.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from txnkv.coordinator import KEEPALIVE_TIME, TxnState, ending_error
from txnkv.errors import (
    CommitOutcomeUnknownError,
    InvalidTxnStateError,
    StorageFullError,
    TransactionConflictError,
    TxnkvError,
    UnavailableError,
)
from txnkv.storage import back_off
from txnkv.tables import Outcome
from txnkv.transaction.begin import begin
from txnkv.transaction.context import TxnContext
from txnkv.transaction.instance import Instance
from txnkv.transaction.one_phase_commit import commit_small, make_sure
from txnkv.transaction.uncommitted import Heart

_ATTEMPTS: Final = 20
_FIRST_PAUSE: Final = 0.0005
_LONGEST_PAUSE: Final = 0.064


def write_alone(
    instance: Instance, write: Callable[[TxnContext], Outcome], *, again: bool
) -> Outcome:
    """Write in a transaction of its own and commit it.

    Args:
        instance: the store's.
        write: writes in the transaction that it gets; may run several times.
        again: whether it can.

    Raises:
        TransactionConflictError: others were first, again and again.
        UnavailableError: the disk failed; nothing was written.
        CommitOutcomeUnknownError: the disk failed and fails; it was written whole or not at all,
            which its `ask` tells later.
        What `write` raises; nothing was written then.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return _attempt(instance, write)
        except TransactionConflictError as error:
            if not again or not error.retriable or attempt == _ATTEMPTS:
                raise
        if attempt > 2:
            time.sleep(back_off(attempt, _FIRST_PAUSE, _LONGEST_PAUSE))
    raise AssertionError("unreachable")


def _attempt(instance: Instance, write: Callable[[TxnContext], Outcome]) -> Outcome:
    coordinator = instance.coordinator
    context = begin(
        instance,
        timeout=None,
        isolation="snapshot",
        locking="optimistic",
        keepalive=KEEPALIVE_TIME,
        transactional=False,
    )
    hearts = _Hearts(context)
    context.handle = lambda: hearts
    try:
        outcome = write(context)
        if not _commit_small(context):
            _commit_large(context)
        return outcome
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
        return commit_small(context) is not None
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
    except (CommitOutcomeUnknownError, StorageFullError, UnavailableError) as error:
        _ask(error, committed)
        context.end(TxnState.COMMITTED)
        return
    context.end(ended.state)
    if ended.state is TxnState.ABORTED:
        raise ending_error(ended, "commit the write")


def _ask(error: TxnkvError, committed: Callable[[], bool]) -> None:
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


def _abort(context: TxnContext) -> None:
    """On the way out of an error, which says more than what comes up here."""
    with suppress(TxnkvError):
        if not context.stored:
            if context.local.open:
                context.end(TxnState.ABORTED)
            return
        with suppress(InvalidTxnStateError):
            context.instance.coordinator.abort(context.row.txn_id, "the write failed")
        context.end(TxnState.ABORTED)
