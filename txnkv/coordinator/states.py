"""The states of a transaction and the only moves between them.

    OPEN -> COMMIT_IN_PROGRESS -> FINALIZE_IN_PROGRESS -> COMMITTED
      |             |             (the commit point)
      |             v
      +-----> ABORT_IN_PROGRESS -> ABORTED

A transaction without participants goes from OPEN to COMMITTED at once. The numbers are
part of the on-disk format; they are Kudu's.
"""

from __future__ import annotations

from enum import IntEnum


class TxnState(IntEnum):
    """The state of a transaction, by its number in status.db."""

    OPEN = 1
    ABORTED = 2
    COMMIT_IN_PROGRESS = 3
    COMMITTED = 4
    ABORT_IN_PROGRESS = 5
    FINALIZE_IN_PROGRESS = 6

    @property
    def ended(self) -> bool:
        """Nothing more happens to it."""
        return self in (TxnState.COMMITTED, TxnState.ABORTED)

    @property
    def outcome(self) -> TxnState:
        """The state in which a transaction ends that is decided; else the state itself."""
        ends = {
            TxnState.FINALIZE_IN_PROGRESS: TxnState.COMMITTED,
            TxnState.ABORT_IN_PROGRESS: TxnState.ABORTED,
        }
        return ends.get(self, self)

    @property
    def committing(self) -> bool:
        return self in (
            TxnState.COMMIT_IN_PROGRESS,
            TxnState.FINALIZE_IN_PROGRESS,
            TxnState.COMMITTED,
        )

    @property
    def decided(self) -> bool:
        """Its outcome can no longer change."""
        return self not in (TxnState.OPEN, TxnState.COMMIT_IN_PROGRESS)


MOVES: dict[TxnState, frozenset[TxnState]] = {
    TxnState.OPEN: frozenset(
        {TxnState.COMMIT_IN_PROGRESS, TxnState.ABORT_IN_PROGRESS, TxnState.COMMITTED}
    ),
    TxnState.COMMIT_IN_PROGRESS: frozenset(
        {TxnState.FINALIZE_IN_PROGRESS, TxnState.ABORT_IN_PROGRESS}
    ),
    TxnState.FINALIZE_IN_PROGRESS: frozenset({TxnState.COMMITTED}),
    TxnState.ABORT_IN_PROGRESS: frozenset({TxnState.ABORTED}),
    TxnState.COMMITTED: frozenset(),
    TxnState.ABORTED: frozenset(),
}
