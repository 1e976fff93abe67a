"""Handles of named databases: who may open one, and which transactions may use it.

LMDB gives a handle the next free slot of a table. A transaction knows the slots that were there
when it began, so each handle kept has a serial, and serves transactions of that serial or later.
A transaction that opens a handle itself may use it at once, but two that do so side by side
would get the same slot: the lock is held from the first opening to the end of the transaction.

Kept are the handles that are opened with the environment, and those of a write that commits.
py-lmdb ends reads by aborting, which frees the slot: what a read opened is for that read alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lmdb

from txnkv.errors import UnavailableError
from txnkv.storage.lmdb_open import OpenLmdb
from txnkv.storage.locks import new_lock

_PATIENCE_SECONDS = 10.0


class StaleHandleError(UnavailableError):
    """The handle is younger than the transaction: begin it again."""


class Scope:
    """One transaction of one thread, and the handles that it opened itself."""

    __slots__ = ("opened", "outer", "serial", "txn", "writing")

    def __init__(self, serial: int, outer: Scope | None, writing: bool) -> None:
        self.txn: Any = None
        self.serial = serial
        self.outer = outer
        self.writing = writing
        self.opened: dict[bytes, Any] | None = None


class Handles:
    """The rules above, for one environment."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = new_lock()
        self.serial = 0

    def inside(self, open_: OpenLmdb, scope: Scope, name: bytes, flags: dict[str, bool]) -> Any:
        """The handle for a transaction that is under way; a write makes what is missing.

        Raises:
            KeyError: a read whose snapshot has no such database.
            UnavailableError: the transaction cannot use or open it now.
        """
        known = open_.handles.get(name)
        if known is not None:
            if known[1] <= scope.serial:
                return known[0]
            raise StaleHandleError(
                f"database {name!r} of {self._path} was made after this transaction began; begin "
                "the transaction again"
            )
        if scope.opened is not None and name in scope.opened:
            return scope.opened[name]
        return self._open(open_, scope, name, flags)

    def keep(self, open_: OpenLmdb, scope: Scope) -> None:
        """After a commit: what the write opened serves transactions that begin from now on."""
        if scope.opened:
            serial = self.serial + 1
            for name, handle in scope.opened.items():
                open_.handles[name] = (handle, serial)
            self.serial = serial

    def end(self, scope: Scope) -> bool:
        """At the end of every transaction; true when a read had to open a handle for itself."""
        if not scope.opened:
            return False
        scope.opened = None
        self._lock.release()
        return not scope.writing

    def _open(self, open_: OpenLmdb, scope: Scope, name: bytes, flags: dict[str, bool]) -> Any:
        opened = scope.opened or {}
        if not opened and not self._lock.acquire(timeout=_patience(scope)):
            raise UnavailableError(
                f"database {name!r} of {self._path} cannot be opened: another transaction is "
                "opening one and has not ended; begin the transaction again"
            )
        try:
            handle = open_.env.open_db(name, txn=scope.txn, create=scope.writing, **flags)
            opened[name] = handle
        except lmdb.NotFoundError:
            raise KeyError(f"no database {name!r} in {self._path}") from None
        finally:
            if opened:
                scope.opened = opened
            else:
                self._lock.release()
        return handle


def _patience(scope: Scope) -> float:
    # The wait is bounded: the holder may be waiting for this thread through another environment,
    # and an outer transaction of this very thread would never end.
    outer = scope.outer
    while outer is not None:
        if outer.opened:
            return 0.0
        outer = outer.outer
    return _PATIENCE_SECONDS
