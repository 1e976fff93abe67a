"""The result of a write, and the rows that it refused until somebody is told."""

from __future__ import annotations

from dataclasses import dataclass

from txnkv.errors import RowError, RowErrors
from txnkv.storage import new_lock
from txnkv.tables import Outcome


@dataclass
class WriteResult:
    """Numbers of rows and messages that a flush or write brought in."""

    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    ignored: int = 0
    sent: int = 0
    acked: int = 0


class ErrorBuffer:
    """The refused rows of a session, the last `RowErrors.KEPT` of them, and how many nobody
    was told of yet. Shared by threads.

    Args:
        txn_id: the session's transaction.
    """

    def __init__(self, txn_id: int | None) -> None:
        self._txn_id = txn_id
        self._lock = new_lock()
        self._errors: list[RowError] = []
        self._untold = 0

    def keep(self, outcome: Outcome) -> None:
        """Take what was refused."""
        if outcome.refused:
            with self._lock:
                self._errors = (self._errors + outcome.errors)[-RowErrors.KEPT :]
                self._untold += outcome.refused

    def take(self) -> list[RowError]:
        """The rows refused since the last call, and forget them: their taker is told."""
        with self._lock:
            errors, self._errors = self._errors, []
            self._untold = 0
            return errors

    def forget(self) -> None:
        """Nobody needs to be told."""
        with self._lock:
            self._untold = 0

    def result(self, outcome: Outcome) -> WriteResult:
        """Return the result of a flush or write to its caller.

        Raises:
            RowErrors: rows were refused that nobody was told of.
        """
        self.keep(outcome)
        self.tell()
        return WriteResult(outcome.inserted, outcome.updated, outcome.deleted, outcome.ignored)

    def tell(self) -> None:
        """Raise what nobody was told of.

        Raises:
            RowErrors: there is some.
        """
        if self._untold:
            with self._lock:
                count, self._untold = self._untold, 0
                errors = self._errors[-count:]
            if count:
                raise RowErrors(errors, count, self._txn_id)
