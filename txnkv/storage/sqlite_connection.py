"""Connections to the status database, and its WAL.

How connections are opened, what their errors mean, and a pool: those that read are used again by
whichever thread comes, for one transaction at a time.

The WAL is made durable without SQLite's help, and used again. SQLite's own fsync is part of COMMIT,
and so inside of the lock on which all writers queue. Here COMMIT writes the WAL alone
(`synchronous=NORMAL`), the lock goes to the next writer, and then the file is synced by a
descriptor of its own. A WAL is durable in order: whoever syncs it makes all commits before durable
as well, and a commit whose frames come later cannot outlive it.

A checkpoint moves the WAL into the database. A commit that overwrites its place in the WAL costs
about half of one that makes the file longer, for the file's size must become durable too. So the
WAL is not cut but begun again from its start, as soon as it has `REUSE_BYTES`: by a thread of its
own, for committers do not wait for that.

    commit, commit, ... 4 MiB    a thread: PASSIVE beside the writers, then, alone in their queue,
                                 the little that is left, and begin again from the start
    ... 64 MiB all the same      whoever commits does it, before it goes on

It is cut to nothing only after it has grown beyond the second limit.

SQLite passes no reader: while one is in a read that began before, what was committed since stays in
the WAL, however long it gets. Reads are short, but a process may be stopped inside of one. Then
writers do not wait for it any more, one line says who it is, and the file is cut when it goes on or
dies.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import Final

import apsw

from txnkv.core import SharedWords, SqliteWriter, sqlite_api
from txnkv.errors import (
    ClosedError,
    IncompatibleStoreError,
    NotSupportedError,
    StorageFullError,
    TxnkvError,
    UnavailableError,
)
from txnkv.storage.directory import FULL_SYNC, STATUS_PAGE_BYTES, FileIdentity, sync_data
from txnkv.storage.faults import (
    FULL_ERRNOS,
    DatabaseDamagedError,
    InjectedFault,
    could_not_open,
    database_denied,
    holders,
    is_protected,
    is_there,
    with_descriptor,
)
from txnkv.storage.fork import GATE
from txnkv.storage.locks import new_lock
from txnkv.storage.runtime_file import CHANGE, COMMITTED, PENDING
from txnkv.storage.threads import submitted
from txnkv.storage.write_queue import BusyError, WriteQueue, not_waiting

LEAST_SQLITE = (3, 51, 3)
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
        if connection.readonly("main"):
            raise apsw.ReadOnlyError("SQLite could open it to read alone")
        _prepare_read_write(connection)
        connection.pragma("synchronous", "normal")  # COMMIT writes; `WalFile` syncs the WAL
        connection.pragma("page_size", STATUS_PAGE_BYTES)
        if connection.pragma("journal_mode", "wal") != "wal":
            raise UnavailableError(f"{path} cannot be put into WAL mode; is it on a network disk?")

    return with_descriptor(_open, str(path), apsw.SQLITE_OPEN_READWRITE, prepare, cache_bytes)


def native_writer(connection: apsw.Connection, words: SharedWords) -> SqliteWriter:
    """The begin, the rows and the commit of writes on a connection, without steps of Python.

    Raises:
        NotSupportedError: apsw has an SQLite that loads no extensions.
    """
    return SqliteWriter(connection, sqlite_api(_load), words, CHANGE, PENDING, COMMITTED)


def _load(path: str, entry: str) -> None:
    """Have SQLite load an extension."""
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


def open_reader(path: Path, *, read_only: bool, cache_bytes: int) -> apsw.Connection:
    """A connection that reads, and may checkpoint unless it is `read_only`."""
    if read_only:
        return _open_read_only(path, cache_bytes)

    def prepare(connection: apsw.Connection) -> None:
        _prepare_read_write(connection)
        connection.pragma("query_only", 1)

    return with_descriptor(_open, str(path), apsw.SQLITE_OPEN_READWRITE, prepare, cache_bytes)


def _open(
    name: str, flags: int, prepare: Callable[[apsw.Connection], None], cache_bytes: int
) -> apsw.Connection:
    connection = apsw.Connection(name, flags=flags)
    try:
        connection.set_busy_timeout(BUSY_MILLISECONDS)
        connection.pragma("mmap_size", 0)
        connection.pragma("foreign_keys", 1)
        connection.pragma("cache_size", -min(max(cache_bytes // 1024, 1), 1 << 31))
        prepare(connection)
    except BaseException as error:
        code = connection.system_errno
        # Closed here and not by a destructor some time later: it must not be there at a fork.
        connection.close(True)
        if isinstance(error, apsw.IOError) and code in FULL_ERRNOS:
            raise apsw.FullError(os.strerror(code)) from error
        raise
    return connection


def _prepare_read_write(connection: apsw.Connection) -> None:
    # Checkpoints are the leader's. Without this the last connection to close would make one,
    # and every fork closes all connections.
    connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
    connection.pragma("synchronous", "full")
    if FULL_SYNC:
        connection.pragma("fullfsync", 1)
    connection.pragma("wal_autocheckpoint", 0)


def _open_read_only(path: Path, cache_bytes: int) -> apsw.Connection:
    try:
        return with_descriptor(_open, str(path), apsw.SQLITE_OPEN_READONLY, _look, cache_bytes)
    except (apsw.CantOpenError, apsw.ReadOnlyError):
        if denied := database_denied(path):
            raise denied from None
    # The folder cannot be written, so that SQLite cannot make its -shm file. Without a WAL
    # the database alone is the whole truth, and it cannot change under us.
    wal = path.with_name(path.name + "-wal")
    if is_there(wal) and wal.stat().st_size > 0:
        raise NotSupportedError(
            f"{path} has a WAL that cannot be read where nothing can be written: open the store "
            "once with its disk mounted to write, or copy the folder to one that can be written"
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
    error: BaseException, path: Path, connection: apsw.Connection | None, kept: str = ""
) -> TxnkvError | None:
    """The error of txnkv for one of SQLite; None when it is about the statement, not the store.
    `kept` is said of what was to be written; "": it was a transaction.
    """
    said, seen = _said(error), kept or "This transaction is not visible"
    if isinstance(error, apsw.CorruptError | apsw.NotADBError):
        # SQLite takes what the disk could not read for damage.
        if _code(error) == apsw.SQLITE_CORRUPT and _is_whole(path):
            return UnavailableError(f"{path} could not be read, but can be now. {seen}, try again")
        return DatabaseDamagedError(f"{path} is damaged: {said}. Restore a backup")
    if isinstance(error, apsw.ReadOnlyError):
        if is_protected(path) or (connection is not None and connection.pragma("query_only")):
            return NotSupportedError(f"{path} cannot be written: {said}. Was the store opened so?")
        return UnavailableError(
            f"{path} could not be opened to write: {said}. Nothing was changed, try again"
        )
    code = connection.system_errno if connection and isinstance(error, apsw.IOError) else 0
    if isinstance(error, apsw.FullError) or code in FULL_ERRNOS:
        return _full(path, os.strerror(code) if code else said, kept)
    if isinstance(error, apsw.CantOpenError) and (told := could_not_open(path)) is not None:
        return told
    if isinstance(error, apsw.IOError | apsw.CantOpenError | apsw.NoMemError | InjectedFault):
        return UnavailableError(f"{path} failed: {said}. {seen}")
    if isinstance(error, apsw.BusyError | apsw.LockedError | apsw.ProtocolError):
        return UnavailableError(f"{path} is busy: {said}. Nothing was changed, try again")
    return None


def _code(error: BaseException) -> int:
    return int(getattr(error, "extendedresult", -1))


def _said(error: BaseException) -> str:
    """The text of an error; of one without, the name of its code."""
    text = str(error)
    if text and text != "not an error":
        return text
    names = {**apsw.mapping_extended_result_codes, **apsw.mapping_result_codes}
    return str(names.get(_code(error), type(error).__name__))


def _is_whole(path: Path) -> bool:
    """Return True when all of a database that is in use makes sense to a new connection."""
    if not is_there(path.with_name(path.name + "-wal")):
        return False
    try:
        with GATE.use(), closing(open_reader(path, read_only=True, cache_bytes=CACHE_BYTES)) as new:
            return bool(new.execute("PRAGMA integrity_check(1)").get == "ok")
    except (apsw.Error, OSError, TxnkvError):
        return False


def _full(path: Path, text: str, kept: str) -> StorageFullError:
    kept = kept or "Nothing of this transaction was kept, what was acknowledged is"
    return StorageFullError(
        f"no room to write {path}: {text}. {kept}; free space or raise the limit and try again"
    )


_IDLE_KEPT = 16


class ReaderPool:
    """A pool of as many connections as threads read at once; the one used last is used first."""

    def __init__(self, path: Path, read_only: bool, cache_bytes: int) -> None:
        self.path = path
        self._read_only = read_only
        self._cache_bytes = cache_bytes
        self._idle: list[apsw.Connection] = []
        self._retired = False
        self.identity: FileIdentity | None = None  # of the file; None while it is made

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

    def give_back(self, connection: apsw.Connection, error: BaseException | None = None) -> None:
        """Keeps a connection for the next, if it is sound and there are not enough."""
        sound = not (connection.in_transaction or isinstance(error, apsw.Error))
        if self._retired or len(self._idle) >= _IDLE_KEPT or not sound:
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
            self._pool.give_back(self._connection, error)
            GATE.leave()
        if error is None and self._sync is not None:
            self._sync()
        if translated is not None:
            raise translated from error


# -- the WAL ---------------------------------------------------------------------------

_LOG = logging.getLogger("txnkv")

REUSE_BYTES: Final = 4 << 20
WAL_LIMIT_BYTES: Final = 64 << 20
_READING_SECONDS: Final = 1.0
"""A reader that is in the way for longer is not waited for."""
_FRAME_HEADER_BYTES: Final = 24
_CUT_MILLISECONDS: Final = 200
_REUSE_MILLISECONDS: Final = 10
"""The most that writers wait for readers of the WAL: when it is cut, and when it is begun again."""
_IN_WAL: Final = "What was committed is in the WAL still, and is read there"
_THREADS: Final = 4
"""That sync at once, at most."""


class WalFile:
    """The file beside a database. Shared by threads.

    SQLite keeps its locks on other files, so this one may be opened and closed at will.

    Attributes:
        descriptor: -1 until the first sync.
        note_failed: told where another sync of it failed.
    """

    def __init__(self, database: Path, note_failed: Callable[[bool], None]) -> None:
        self.note_failed = note_failed
        self.path = database.with_name(database.name + "-wal")
        self.descriptor = -1
        self._pool: ThreadPoolExecutor | None = None

    @property
    def size(self) -> int:
        """Bytes of the file; 0 when there is none."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def sync(self) -> None:
        """Makes all that was written durable.

        Raises:
            OSError: the disk failed; nothing is known of what was written since the last sync.
        """
        descriptor = self.descriptor
        if descriptor < 0:
            try:
                flags = os.O_RDONLY | os.O_CLOEXEC
                descriptor = self.descriptor = with_descriptor(os.open, self.path, flags)
            except FileNotFoundError:
                return  # nothing was ever committed
        sync_data(descriptor)

    def begin_sync(self) -> Future[None]:
        """`sync` on another thread, which uses nothing but the file."""
        pool = self._pool
        if pool is None:
            pool = self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="txnkv-sync")
        return submitted(pool, self.sync)

    def after_fork_in_child(self) -> None:
        """The threads are the parent's."""
        self._pool = None

    def close(self) -> None:
        """Closes the file; it opens again when it is needed. Nobody is syncing it."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class Checkpointer:
    """Checkpoints of one database in this process.

    Attributes:
        wal_bytes: that wait in the WAL, as of the last commit of this process.
        is_due: they are enough to ask for a checkpoint.
        limit: above it whoever commits makes a checkpoint.
    """

    def __init__(self, wal: WalFile, readers: ReaderPool, queue: WriteQueue) -> None:
        self.wal_bytes = 0
        self.is_due = False
        self.limit = WAL_LIMIT_BYTES
        self._wal = wal
        self._path = readers.path
        self._readers = readers
        self._queue = queue
        self._one = new_lock()
        self._starting = new_lock()
        self._thread: threading.Thread | None = None  # one that was started
        self._held_up_since: float | None = None
        self._again = 0.0
        self._told = False

    def is_long(self) -> bool:
        """The WAL has grown so long that it is to be cut; a checkpoint tries."""
        return self._wal.size > WAL_LIMIT_BYTES

    def note_pages(self, pages: int) -> None:
        """Hear how many pages wait after a commit."""
        self.wal_bytes = pages * (STATUS_PAGE_BYTES + _FRAME_HEADER_BYTES)
        self.is_due = self.wal_bytes > min(REUSE_BYTES, self.limit)

    def after_write(self, full: bool) -> None:
        """A write has ended, with or without success, and others may write.

        Args:
            full: it did not fit. Its pages are left in the WAL, and cutting it gives the room
                back that small transactions need.
        """
        if full or self.wal_bytes > self.limit:
            self._relieve()
        elif time.monotonic() < self._again:
            return  # a reader is in the way
        elif self.wal_bytes > REUSE_BYTES and not self._one.locked():
            with self._starting:
                if self._thread is not None and self._thread.is_alive():
                    return
                made = threading.Thread(None, self._in_background, "txnkv-checkpoint", daemon=True)
                with suppress(RuntimeError):  # no thread is to be had: the next commit tries again
                    made.start()
                    self._thread = made

    def run(self, *, cut: bool) -> None:
        """Move the WAL into the database. Where others are in the way, less of it.

        Args:
            cut: make the file empty, too.

        Raises:
            StorageFullError: no room in the database file; the WAL stays and all is readable.
            UnavailableError: the disk failed.
        """
        if not self._one.acquire(blocking=False):
            return
        try:
            with GATE.use():
                connection = failed = None
                try:
                    connection = self._readers.borrow()
                    self._checkpoint(connection, cut)
                except apsw.Error as error:
                    failed = error
                    if _code(error) == apsw.SQLITE_IOERR_FSYNC:  # the system tells it once
                        self._wal.note_failed(True)
                    raise sqlite_error(error, self._path, connection, _IN_WAL) or error from error
                finally:
                    if connection is not None:
                        self._readers.give_back(connection, failed)
        finally:
            self._one.release()

    def wait(self) -> None:
        """Until no thread of this process makes a checkpoint."""
        with self._starting:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def after_fork_in_child(self) -> None:
        """The thread is the parent's."""
        self._thread = None

    def _checkpoint(self, connection: apsw.Connection, cut: bool) -> None:
        cut = cut or self.is_long()
        mode = apsw.SQLITE_CHECKPOINT_TRUNCATE if cut else apsw.SQLITE_CHECKPOINT_RESTART
        try:
            # Passive beside the writers, so that little is left to do while they wait.
            there, moved = connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
            if moved < there and self._is_held_up():
                return
            connection.set_busy_timeout(_CUT_MILLISECONDS if cut else _REUSE_MILLISECONDS)
            with not_waiting():
                self._queue.acquire()
            try:
                connection.wal_checkpoint(mode=mode)
                self.wal_bytes = 0
                self._held_up_since, self._told = None, False
            finally:
                self._queue.release()
        except (apsw.BusyError, BusyError):
            self._is_held_up()  # a reader or another checkpointer; it is tried again
        finally:
            connection.set_busy_timeout(BUSY_MILLISECONDS)

    def _is_held_up(self) -> bool:
        """Somebody is in the way; true when it has been for long, and is not to be waited for."""
        now = time.monotonic()
        if self._held_up_since is None:
            self._held_up_since = now
        if now - self._held_up_since < _READING_SECONDS:
            return False
        self._again = now + _READING_SECONDS
        if self.is_long() and not self._told:
            self._told = True
            _LOG.warning(
                "the WAL of %s is long and grows with each commit: %s in a read or a checkpoint "
                "that does not end. It is cut by itself when that goes on or dies",
                self._path, holders(self._path),
            )  # fmt: skip
        return True

    def _in_background(self) -> None:
        try:
            self.run(cut=False)
        except ClosedError:
            pass
        except TxnkvError as error:
            self._note_failed(error)

    def _note_failed(self, error: TxnkvError) -> None:
        if not self._told:  # once, until one succeeds
            self._told = True
            _LOG.warning("checkpoint of %s failed: %s", self._path, error)

    def _relieve(self) -> None:
        before = self.wal_bytes
        try:
            self.run(cut=True)
        except TxnkvError as error:
            # The commit is done; that the WAL could not be cut is no failure of it.
            self._note_failed(error)
        self.limit = max(WAL_LIMIT_BYTES, 2 * before if self.wal_bytes else 0)
