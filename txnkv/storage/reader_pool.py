"""Connections to read with: reused by whichever thread comes, one transaction at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import apsw

from txnkv.errors import ClosedError
from txnkv.storage.fork import GATE
from txnkv.storage.identity import FileIdentity
from txnkv.storage.sqlite_connection import end_transaction, open_reader, translate

_IDLE_KEPT = 16


class ReaderPool:
    """A pool of as many connections as threads read at once; the one used last is used first.

    Attributes:
        identity: the file that is read; None while it is made.
    """

    def __init__(self, path: Path, read_only: bool, cache_bytes: int) -> None:
        self.path = path
        self._read_only = read_only
        self._cache_bytes = cache_bytes
        self._idle: list[apsw.Connection] = []
        self._retired = False
        self.identity: FileIdentity | None = None

    def borrow(self) -> apsw.Connection:
        """A connection that nobody else uses until it is given back.

        Raises:
            ClosedError: the pool was retired.
            StoreNotFoundError: a connection is to be opened, and the file is another one by now.
        """
        if self._retired:
            raise ClosedError(f"{self.path} is closed; open the store again")
        try:
            return self._idle.pop()
        except IndexError:
            self.require_there()
            return open_reader(self.path, read_only=self._read_only, cache_bytes=self._cache_bytes)

    def require_there(self) -> None:
        """Refuses to open what stands at the path in place of the file that was opened first.

        Raises:
            StoreNotFoundError: it was removed or replaced.
        """
        if self.identity is not None:
            self.identity.require()

    def give_back(self, connection: apsw.Connection) -> None:
        """Keeps a connection for the next, if it is sound and there are not enough."""
        if self._retired or len(self._idle) >= _IDLE_KEPT or connection.in_transaction:
            connection.close(True)
        else:
            self._idle.append(connection)

    def close(self) -> None:
        """Closes the idle connections; new ones open when they are needed."""
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close(True)

    def retire(self) -> None:
        """Lets nobody borrow any more; what is out is closed when it comes back."""
        self._retired = True
        self.close()

    def inherited(self) -> list[object]:
        """Return the objects that a child of an unquiet fork must never touch."""
        return [self._idle, *self._idle]


class ReadTransaction:
    """A read as a `with` block."""

    __slots__ = ("_connection", "_cursor", "_pool", "_sync")

    def __init__(self, pool: ReaderPool, sync: Callable[[], None] | None) -> None:
        """Begins at the `with`.

        Args:
            pool: whose connection to use.
            sync: called at the end: makes what was read durable.
        """
        self._pool = pool
        self._sync = sync

    def __enter__(self) -> apsw.Cursor:
        GATE.enter()
        try:
            self._connection = self._pool.borrow()
            try:
                self._cursor = self._connection.cursor()
                self._cursor.execute("BEGIN")
            except BaseException:
                self._connection.close(True)
                raise
        except BaseException as error:
            GATE.leave()
            translated = translate(error, self._pool.path, None)
            if translated is not None:
                raise translated from error
            raise
        return self._cursor

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if GATE.refused:
            return
        try:
            translated = error and translate(error, self._pool.path, self._connection)
            self._cursor.close(True)
            end_transaction(self._connection)
        finally:
            self._pool.give_back(self._connection)
            GATE.leave()
        if error is None and self._sync is not None:
            self._sync()
        if translated is not None:
            raise translated from error
