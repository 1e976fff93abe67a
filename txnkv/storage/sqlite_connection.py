"""Connections to the status database: how they are opened, what their errors mean, and a pool.

Those that read are used again by whichever thread comes, for one transaction at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import apsw

from txnkv.core import SharedWords, SqliteWriter, sqlite_api
from txnkv.errors import (
    ClosedError,
    CorruptionError,
    IncompatibleStoreError,
    NotSupportedError,
    StorageFullError,
    TxnkvError,
    UnavailableError,
)
from txnkv.storage.directory import FileIdentity
from txnkv.storage.faults import FULL_ERRNOS, InjectedFault, is_without_descriptor, no_descriptor
from txnkv.storage.fork import GATE
from txnkv.storage.runtime_file import CHANGE, COMMITTED, PENDING

LEAST_SQLITE = (3, 51, 3)
PAGE_BYTES = 4096
BUSY_MILLISECONDS = 5000
CACHE_BYTES = 8 << 20


def check_sqlite_version(version: str | None = None) -> None:
    """Refuses an SQLite in which two connections that write or checkpoint at once may corrupt.

    Raises:
        IncompatibleStoreError: SQLite is older than 3.51.3.
    """
    found = version or apsw.sqlite_lib_version()
    if tuple(int(part) for part in found.split(".")[:3]) < LEAST_SQLITE:
        raise IncompatibleStoreError(
            f"SQLite {found} can corrupt a WAL that several connections use; txnkv needs "
            f"{'.'.join(map(str, LEAST_SQLITE))} or later. Install a newer apsw"
        )


def open_writer(path: Path, cache_bytes: int) -> apsw.Connection:
    """A connection that may write, to a database file that is there."""

    def prepare(connection: apsw.Connection) -> None:
        _prepare_read_write(connection)
        connection.pragma("synchronous", "normal")  # COMMIT writes; the WAL is synced by `wal`
        connection.pragma("page_size", PAGE_BYTES)
        if connection.pragma("journal_mode", "wal") != "wal":
            raise UnavailableError(f"{path} cannot be put into WAL mode; is it on a network disk?")

    return _open(str(path), apsw.SQLITE_OPEN_READWRITE, prepare, cache_bytes)


def native_writer(connection: apsw.Connection, words: SharedWords) -> SqliteWriter:
    """The begin, the rows and the commit of writes on a connection, without steps of Python.

    Raises:
        NotSupportedError: apsw has an SQLite that loads no extensions.
    """

    def load(path: str, entry: str) -> None:
        if "OMIT_LOAD_EXTENSION" in apsw.compile_options:
            raise NotSupportedError(
                "apsw was built with an SQLite that loads no extensions, by which txnkv calls it: "
                "install one of its wheels (pip install --only-binary apsw apsw)"
            )
        loader = apsw.Connection(":memory:")
        try:
            loader.enable_load_extension(True)
            loader.load_extension(path, entry)
        finally:
            loader.close()

    return SqliteWriter(connection, sqlite_api(load), words, CHANGE, PENDING, COMMITTED)


def open_reader(path: Path, *, read_only: bool, cache_bytes: int) -> apsw.Connection:
    """A connection that reads, and may checkpoint unless it is `read_only`."""
    if read_only:
        return _open_read_only(path, cache_bytes)

    def prepare(connection: apsw.Connection) -> None:
        _prepare_read_write(connection)
        connection.pragma("query_only", 1)

    return _open(str(path), apsw.SQLITE_OPEN_READWRITE, prepare, cache_bytes)


def _open(
    name: str, flags: int, prepare: Callable[[apsw.Connection], None], cache_bytes: int
) -> apsw.Connection:
    connection = apsw.Connection(name, flags=flags)
    try:
        connection.set_busy_timeout(BUSY_MILLISECONDS)
        connection.pragma("mmap_size", 0)
        connection.pragma("foreign_keys", 1)
        connection.pragma("cache_size", -max(cache_bytes // 1024, 1))
        prepare(connection)
    except BaseException:
        # Closed here and not by a destructor some time later: it must not be there at a fork.
        connection.close(True)
        raise
    return connection


def _prepare_read_write(connection: apsw.Connection) -> None:
    # Checkpoints are the leader's. Without this the last connection to close would make one,
    # and every fork closes all connections.
    connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
    connection.pragma("synchronous", "full")
    connection.pragma("wal_autocheckpoint", 0)


def _open_read_only(path: Path, cache_bytes: int) -> apsw.Connection:
    try:
        return _open(str(path), apsw.SQLITE_OPEN_READONLY, _look, cache_bytes)
    except (apsw.CantOpenError, apsw.ReadOnlyError):
        pass
    # The folder cannot be written, so that SQLite cannot make its -shm file. Without a WAL
    # the database alone is the whole truth, and it cannot change under us.
    wal = path.with_name(path.name + "-wal")
    if wal.exists() and wal.stat().st_size > 0:
        raise UnavailableError(
            f"{path} has a WAL that cannot be read on a read-only file system; open the store "
            "once where it can be written"
        )
    uri = f"{path.as_uri()}?immutable=1"
    return _open(uri, apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI, _look, cache_bytes)


def _look(connection: apsw.Connection) -> None:
    connection.execute("SELECT 1 FROM sqlite_master").fetchall()


def end_transaction(connection: apsw.Connection) -> None:
    """Rolls back what is open; SQLite may have done so by itself after a failure."""
    if connection.in_transaction:
        connection.execute("ROLLBACK")


def sqlite_error(
    error: BaseException, path: Path, connection: apsw.Connection | None
) -> TxnkvError | None:
    """The error of txnkv for one of SQLite; None when it is about the statement, not the store."""
    if isinstance(error, apsw.CorruptError | apsw.NotADBError):
        return CorruptionError(f"{path} is damaged: {error}. Restore a backup")
    if isinstance(error, apsw.ReadOnlyError):
        return NotSupportedError(f"{path} cannot be written: {error}. Was the store opened so?")
    if isinstance(error, apsw.FullError):
        return _full(path, str(error))
    if isinstance(error, apsw.IOError) and connection is not None:
        code = connection.system_errno
        if code in FULL_ERRNOS:
            return _full(path, os.strerror(code))
    if isinstance(error, apsw.CantOpenError) and is_without_descriptor():
        return no_descriptor(path)
    if isinstance(error, apsw.IOError | apsw.CantOpenError | apsw.NoMemError | InjectedFault):
        return UnavailableError(f"{path} failed: {error}. This transaction is not visible")
    if isinstance(error, apsw.BusyError | apsw.LockedError | apsw.ProtocolError):
        return UnavailableError(f"{path} is busy: {error}. Nothing was changed, try again")
    return None


def _full(path: Path, text: str) -> StorageFullError:
    return StorageFullError(
        f"no room to write {path}: {text}. Nothing of this transaction was kept, what was "
        "acknowledged is; free space or raise the limit and try again"
    )


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
            translated = sqlite_error(error, self._pool.path, None)
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
            translated = error and sqlite_error(error, self._pool.path, self._connection)
            self._cursor.close(True)
            end_transaction(self._connection)
        finally:
            self._pool.give_back(self._connection)
            GATE.leave()
        if error is None and self._sync is not None:
            self._sync()
        if translated is not None:
            raise translated from error
