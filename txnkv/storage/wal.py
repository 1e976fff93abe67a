"""The WAL of the status database: made durable without SQLite's help, and used again.

SQLite's own fsync is part of COMMIT, and so inside of the lock on which all writers queue. Here
COMMIT writes the WAL alone (`synchronous=NORMAL`), the lock goes to the next writer, and then the
file is synced by a descriptor of its own. A WAL is durable in order: whoever syncs it makes all
commits before durable as well, and a commit whose frames come later cannot outlive it.

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
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import apsw

from txnkv.errors import ClosedError, TxnkvError
from txnkv.storage.fork import GATE
from txnkv.storage.locks import new_lock
from txnkv.storage.sqlite_connection import BUSY_MILLISECONDS, PAGE_BYTES, ReaderPool, sqlite_error
from txnkv.storage.write_queue import BusyError, WriteQueue, not_waiting

_LOG = logging.getLogger("txnkv")

REUSE_BYTES: Final = 4 << 20
WAL_LIMIT_BYTES: Final = 64 << 20
_READING_SECONDS: Final = 1.0
"""A reader that is in the way for longer is not waited for."""
_SHM_LOCKS: Final = frozenset([121, *range(123, 128)])
"""Bytes of status.db-shm that SQLite locks: of who makes a checkpoint, and of readers."""
_FRAME_HEADER_BYTES: Final = 24
_CUT_MILLISECONDS: Final = 200
_REUSE_MILLISECONDS: Final = 10
"""The most that writers wait for readers of the WAL: when it is cut, and when it is begun again."""
_THREADS: Final = 4
"""That sync at once, at most."""


class WalFile:
    """The file beside a database. Shared by threads.

    SQLite keeps its locks on other files, so this one may be opened and closed at will.

    Attributes:
        descriptor: -1 until the first sync.
    """

    def __init__(self, database: Path) -> None:
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
                descriptor = self.descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return  # nothing was ever committed
        if hasattr(os, "fdatasync"):
            os.fdatasync(descriptor)
        else:
            os.fsync(descriptor)

    def begin_sync(self) -> Future[None]:
        """`sync` on another thread, which uses nothing but the file."""
        pool = self._pool
        if pool is None:
            pool = self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="txnkv-sync")
        try:
            return pool.submit(self.sync)
        except RuntimeError:  # the interpreter is ending, and starts no threads
            self.sync()
            done: Future[None] = Future()
            done.set_result(None)
            return done

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
        self._thread: threading.Thread | None = None
        self._held_up_since: float | None = None
        self._again = 0.0
        self._told = False

    def is_long(self) -> bool:
        """The WAL has grown so long that it is to be cut; a checkpoint tries."""
        return self._wal.size > WAL_LIMIT_BYTES

    def note_pages(self, pages: int) -> None:
        """Hear how many pages wait after a commit."""
        self.wal_bytes = pages * (PAGE_BYTES + _FRAME_HEADER_BYTES)
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
        elif self.wal_bytes > REUSE_BYTES and self._thread is None and not self._one.locked():
            self._thread = threading.Thread(
                target=self._in_background, name="txnkv-checkpoint", daemon=True
            )
            try:
                self._thread.start()
            except RuntimeError:  # no thread is to be had: the next commit tries again
                self._thread = None

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
                connection = self._readers.borrow()
                try:
                    self._checkpoint(connection, cut)
                except apsw.Error as error:
                    raise sqlite_error(error, self._path, connection) or error from error
                finally:
                    self._readers.give_back(connection)
        finally:
            self._one.release()

    def wait(self) -> None:
        """Until no thread of this process makes a checkpoint."""
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
                self._path, _holders(self._path),
            )  # fmt: skip
        return True

    def _in_background(self) -> None:
        try:
            self.run(cut=False)
        except ClosedError:
            pass
        except TxnkvError as error:
            _LOG.warning("checkpoint of %s failed: %s", self._path, error)
        finally:
            self._thread = None

    def _relieve(self) -> None:
        before = self.wal_bytes
        try:
            self.run(cut=True)
        except TxnkvError as error:
            # The commit is done; that the WAL could not be cut is no failure of it.
            _LOG.warning("checkpoint of %s failed: %s", self._path, error)
        self.limit = max(WAL_LIMIT_BYTES, 2 * before if self.wal_bytes else 0)


def _holders(path: Path) -> str:
    """Name the processes whose locks are in the way, as far as the system tells. From the kernel's
    list: opening the file here, and closing it, would drop this process's own locks.
    """
    try:
        file = os.stat(path.with_name(path.name + "-shm"))
        at = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
        lines = [line.split() for line in Path("/proc/locks").read_text("ascii").splitlines()]
    except OSError:
        return "some process is"
    found = {
        line[4] for line in lines if len(line) == 8 and line[5] == at and int(line[6]) in _SHM_LOCKS
    } - {str(os.getpid())}
    return f"process {', '.join(sorted(found))} is" if found else "some process is"
