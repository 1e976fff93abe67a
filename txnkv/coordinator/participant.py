"""The participant interface: calls of the coordinator to those that hold a transaction's data.

One object serves all participants of a kind (all tablets, say); the coordinator knows
nothing else of them. Every call may come again after a crash, from another process.

    check            OPEN            errors in the rows; the transaction stays OPEN
    begin_commit     COMMIT_IN_...   may it commit? answers a timestamp above its operations
    validate         same            what came in since begin_commit, inside the transaction
                                     that writes the commit point
    write_commit     same            what goes with the commit point in status.db
    finalize_commit  FINALIZE_IN_... staged data gets its plain timestamp
    abort            ABORT_IN_...    staged data goes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import apsw

from txnkv.coordinator.commit_log import CommitLog
from txnkv.coordinator.ids import Timestamp
from txnkv.coordinator.status_table import TxnRow


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
