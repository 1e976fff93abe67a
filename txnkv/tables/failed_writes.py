"""Writes that failed when they may have been done: what they staged is taken back.

After an error nothing of a write counts. But the SQLite transaction that makes its row sets count
may be there when the error comes: the sync behind it failed. So another write takes them back; if
that fails too, the next one that looks at the transaction's row sets does it first:

    write     STAGED, sync: error        take back: STAGED -> WRITING      error: nothing counts
                                         error                             the same is told ...
    retry, or commit                     take back: STAGED -> WRITING      ... and comes true here
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeAlias

import apsw

from txnkv.errors import InvalidTxnStateError, TxnkvError
from txnkv.storage.store import Store

Undo: TypeAlias = Callable[[apsw.Cursor], None]


class FailedWrites:
    """The writes that are to be taken back, by transaction. Shared by threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._undo: dict[int, list[Undo]] = {}

    @contextmanager
    def noting(self, txn_id: int, undo: Undo) -> Iterator[None]:
        """If the block fails, take back what it may have done all the same."""
        try:
            yield
        except InvalidTxnStateError:  # refused inside: nothing was done
            raise
        except BaseException:
            self._undo.setdefault(txn_id, []).append(undo)
            with suppress(TxnkvError):
                self.take_back(txn_id)
            raise

    def take_back(self, txn_id: int) -> None:
        """See to it that nothing counts of what failed. No I/O when nothing did.

        Raises:
            StorageFullError, UnavailableError: the disk still fails.
        """
        waiting = self._undo.get(txn_id)
        if waiting is None:
            return
        with self._store.status.write() as cur:
            for undo in waiting:
                undo(cur)
        self._undo.pop(txn_id, None)
