"""Opening and moving the map of an LMDB environment, with the handles of all its named databases.

A handle of a named database outlives its transaction only when that commits for real, and
py-lmdb commits for real in two cases: a write transaction, or the opening of a handle in an
environment that was opened read-only (measured; ends of other reads abort). A write transaction
waits for the write lock, behind whatever another process is writing. So that a reader never
waits for a writer, an environment is opened read-only at first, with the handles of all its
databases, and again read-write when this process writes for the first time.

LMDB gives a handle the next free slot of a table. A transaction knows the slots that were there
when it began, so each handle kept has a serial, and serves transactions of that serial or later.
A transaction that opens a handle itself may use it at once, but two that do so side by side
would get the same slot: the lock is held from the first opening to the end of the transaction.
Kept are the handles that are opened with the environment, and those of a write that commits; what
a read opened, whose end frees the slot, is for that read alone.

On Linux LMDB's lock of writers is a mutex that the kernel frees when its holder dies. On macOS it
is a semaphore, which stays taken then. As every writer has the turn (a flock, which the kernel
frees) before it asks for LMDB's lock, one who has the turn and finds the semaphore taken knows that
a dead one took it, and gives it back.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lmdb

from txnkv.core import WriterLock, fill_holes
from txnkv.errors import CorruptionError, StoreNotFoundError, UnavailableError
from txnkv.storage import extents
from txnkv.storage.clocks import clock
from txnkv.storage.directory import (
    allocate,
    make_private_directory,
    make_private_file,
    opened,
    sync_directory,
)
from txnkv.storage.extents import Extent, Tracked
from txnkv.storage.faults import FULL_ERRNOS, fault_point, is_there
from txnkv.storage.locks import new_lock
from txnkv.storage.write_queue import FolderTurn

MAX_DATABASES = 16
MAX_READERS = 1024
"""Readers of all processes together. The file of their slots has 64 KiB, for each environment."""
_SPARE_TRANSACTIONS = 8
_LEAST_MAP = 1 << 30
_TRIES = 10
_NEW_MAP = 1 << 20
_BORN = 1
"""Number of the transaction that makes the mark and the databases of a new environment."""
_FREED_AT_DEATH = sys.platform == "linux"
"""LMDB's lock of writers."""
_LOOK_EVERY = 1_000_000
"""Microseconds after which a reader looks whether the file is still in its place."""


class ReopenError(Exception):
    """It is to be opened anew: to write, or for the file was removed or replaced."""


@dataclass(frozen=True)
class EnvironmentOptions:
    """The options with which environments are opened.

    Attributes:
        initial_map_size: bytes of address space at first; the file is as long as its content.
        read_only: never write; where the file system refuses locks, read without them.
    """

    initial_map_size: int = 64 << 30
    read_only: bool = False


@dataclass(frozen=True, eq=False)
class Map:
    """Stands for a map as long as it stays where it is.

    Attributes:
        page_bytes: of LMDB's pages.
        begin: begins a read.
    """

    page_bytes: int
    begin: Callable[[], Any]


@dataclass
class OpenLmdb:
    """LMDB as it is open now, in this process.

    Attributes:
        env: the `lmdb.Environment`.
        writable: whether it was opened to write.
        handles: named databases: the handle, and the serial from which transactions know it.
        map: where it is mapped.
        identity, base: of the file; see `extents`.
        turn: that of its writers. LMDB's own lock cannot be tried; nobody waits for that one, as
            all come by here.
        lock: LMDB's own, where it is not freed at the death of its holder.
    """

    env: Any
    path: Path
    writable: bool
    turn: FolderTurn
    handles: dict[bytes, tuple[Any, int]] = field(default_factory=dict)
    map: Map | None = None
    identity: bytes = b""
    base: int = 0
    lock: WriterLock | None = None
    _inode: tuple[int, int] = (0, 0)
    _seen: int = 0
    _roomless: int = -1

    @classmethod
    def open(
        cls,
        path: Path,
        options: EnvironmentOptions,
        map_size: int,
        writing: bool,
        turn: FolderTurn | None = None,
        tracked: Tracked | None = None,
        required: Extent | None = None,
    ) -> OpenLmdb:
        """Maps the environment at `path`.

        Args:
            path, options: its folder, and how it is opened.
            map_size: address space.
            writing: open it to write.
            turn: of its writers.
            tracked: whose extent is kept.
            required: how far it was written at least, as of before.

        Raises:
            BusyError: it is to be written, and somebody else writes to it at the moment.
            StoreNotFoundError: it is missing.
            CorruptionError: it is missing or behind, and something was written to it.
            lmdb.Error, OSError: LMDB or the system refused.
        """
        size = _data_bytes(path, tracked if required is not None else None)
        writing = writing or size == 0
        lock = _writer_lock(path) if writing and not _FREED_AT_DEATH else None
        env, inode = _opened_in_place(path, options, map_size, writing)
        opened = cls(env, path, writing, turn or FolderTurn(path), _inode=inode)
        try:
            opened.lock = lock if lock is not None and lock.named else None
            if writing and opened.last_number <= _BORN:
                # LMDB syncs what it writes, not the names of its files. Before the first commit, so
                # that whoever finds a later one, in this process or another, finds it durable.
                sync_directory(path)
                sync_directory(path.parent)
            opened._cover()
            opened.identity, opened.base = extents.read_mark(env)
            if tracked is not None and required is not None:
                found = Extent(opened.identity, opened.base + opened.last_number)
                tracked.refuse(path, found, required)
            opened._open_handles()
            opened._mapped()
        except BaseException:
            opened.env.close()
            raise
        return opened

    def begin(self, writing: bool, tracked: Tracked | None = None, outermost: bool = False) -> Any:
        """Begins a transaction, and looks whether the file is in its place.

        Raises:
            BusyError: inside of `not_waiting`, another writer does not end.
            As `require_in_place`.
        """
        txn = self._begin(writing)
        try:
            if outermost and (writing or tracked is not None):
                self.require_in_place(tracked, txn, writing)
        except BaseException:
            txn.abort()
            if writing:
                self.end_write()
            raise
        return txn

    def _begin(self, writing: bool) -> Any:
        # Slots of dead readers are freed when there is no other.
        if writing:
            return self._begin_write()
        try:
            return self.env.begin(buffers=True)
        except lmdb.ReadersFullError:
            self.env.reader_check()
        return self.env.begin(buffers=True)

    def _begin_write(self, *, wait: bool = True) -> Any:
        if not self.writable:
            raise ReopenError
        self.turn.acquire(wait=wait)
        try:
            if self.lock is not None and self.turn.is_locked:
                self.lock.free(self.last_number)
            return self.env.begin(write=True, buffers=True)
        except BaseException:
            self.end_write()
            raise

    def end_write(self) -> None:
        """After the end of a write: the next one has its turn."""
        self.turn.release()

    @property
    def last_number(self) -> int:
        """The number of the last transaction, as the file has it."""
        return int(self.env.info()["last_txnid"])

    def require_in_place(self, tracked: Tracked | None, txn: Any, writing: bool) -> None:
        """Looks whether the file is still that which stands at its path: each writer, and readers
        now and then.

        Raises:
            ReopenError: it is not, or another was copied over it; one that was dropped may be.
        """
        now = clock.monotonic_micros()
        if not writing and now - self._seen < _LOOK_EVERY:
            return
        self._seen = now
        # LMDB counts in its lock file, too.
        if self.last_number >= txn.id() - writing and _inode_of(self.path) == self._inode:
            return
        if tracked is None or tracked.required() is not None:
            raise ReopenError

    @property
    def map_size(self) -> int:
        """Bytes of address space that the map takes."""
        return int(self.env.info()["map_size"])

    def grow(self, seen: int) -> None:
        """Doubles the map, unless it is larger than `seen` by now. No transaction is live."""
        now = self.map_size
        if now <= seen:
            self.env.set_mapsize(now * 2)
            self._mapped()

    def adopt(self) -> None:
        """Takes over the map size that another process gave. No transaction is live."""
        self.env.set_mapsize(0)
        self._mapped()

    def give_room_back(self, seconds: float) -> int:
        """Makes holes of free pages, if this process writes to the file and nobody does now. Where
        those that the last write freed are missing, it makes a write that changes nothing.

        Args:
            seconds: for which other writers may wait for it.

        Returns:
            Bytes that the disk has again; not all that it may have, when the time was over.

        Raises:
            BusyError: somebody else writes.
            lmdb.Error, OSError: LMDB or the disk refused.
        """
        if not self.writable or self.last_number == self._roomless:
            return 0
        given, wrote = self._make_holes(seconds)
        if wrote:
            fault_point("holes.awaited")
            given += self._make_holes(seconds)[0]
        return given

    def _make_holes(self, seconds: float) -> tuple[int, bool]:
        """The bytes given back, and whether a write was made that lets more be given."""
        txn = self._begin_write(wait=False)
        try:
            number, until = txn.id(), time.monotonic() + seconds
            with opened(self.path / "data.mdb", os.O_RDWR) as descriptor:
                status = os.fstat(descriptor)
                if (status.st_dev, status.st_ino) != self._inode:
                    return 0, False
                read = list(extents.numbers_read(self.env))
                go_on = lambda: time.monotonic() < until  # noqa: E731
                room = extents.make_holes(descriptor, number, read, go_on)
            self._roomless = -1 if room.given or room.waits else number - 1
            if wrote := room.waits and not read:
                extents.put_mark(txn, Extent(self.identity, self.base + number))
                txn.commit()
            return room.given, wrote
        finally:
            txn.abort()
            self.end_write()

    def close(self) -> None:
        """Unmaps the environment. No transaction is live."""
        self.handles.clear()
        self.env.close()

    def _mapped(self) -> None:
        self.map = Map(int(self.env.stat()["psize"]), self.env.begin)

    def _cover(self) -> None:
        """Makes the file as long as LMDB takes it to be.

        A file that was cut off (a copy that broke off, a damaged file system) is a SIGBUS to
        whoever reads beyond its end; zeros there are found out by LMDB and by the checksums.

        Raises:
            CorruptionError: it may not be made longer, and pages that are in use are cut off.
        """
        end = (self.env.info()["last_pgno"] + 1) * self.env.stat()["psize"]
        file = self.path / "data.mdb"
        if file.stat().st_size >= end:
            return
        # AttributeError: of systems without it. Unlike ftruncate it never shortens what another
        # process has written meanwhile.
        with suppress(OSError, AttributeError), opened(file, os.O_RDWR) as descriptor:
            status = os.fstat(descriptor)
            if status.st_size < end and (status.st_dev, status.st_ino) == self._inode:
                os.posix_fallocate(descriptor, status.st_size, end - status.st_size)
        with opened(file, os.O_RDONLY) as descriptor:
            size = os.fstat(descriptor).st_size
            if size < end and extents.is_cut_off(descriptor):
                raise CorruptionError(
                    f"{file} was cut off: it ends after {size:,} bytes of {end:,}. Restore a backup"
                )

    def _open_handles(self) -> None:
        with self.env.begin() as txn:
            names = [bytes(name) for name in self.env.dbs(txn)]
        if not names:
            return
        if not self.writable:
            self.handles = {name: (self.env.open_db(name, create=False), 0) for name in names}
            return
        txn = self._begin_write(wait=False)
        try:
            with txn:
                self.handles = {
                    name: (self.env.open_db(name, txn=txn, create=False), 0) for name in names
                }
        finally:
            self.end_write()


def _inode_of(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path / "data.mdb")
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _opened_in_place(
    path: Path, options: EnvironmentOptions, map_size: int, writing: bool
) -> tuple[Any, tuple[int, int]]:
    """Opens LMDB on the file that has the name, also when `lmdb_replace` put it there meanwhile.

    To read alone, LMDB opens the data file first and waits for its lock then: whoever holds the
    lock may have replaced the file by that time. Of a file in the lower layer of an overlay its map
    would stay that of the lower one, when another process writes: it is copied up before.
    """
    while True:
        if not options.read_only:
            with suppress(OSError), opened(path / "data.mdb", os.O_RDWR):
                pass
        before = _inode_of(path)
        env = _open_env(path, options, map_size, writing)
        if before and _inode_of(path) == before and not extents.frees_left_slots(env):
            return env, before
        env.close()


def _open_env(path: Path, options: EnvironmentOptions, map_size: int, writing: bool) -> Any:
    try:
        _fill_lock_file(path / "lock.mdb")
    except OSError as error:
        if error.errno in FULL_ERRNOS:
            raise
    try:
        return _open_smaller(path, map_size, writing, lock=True)
    except lmdb.Error as error:
        # Without locks a writer may reuse pages under a reader. Accepted only where locking is
        # refused: a read-only client on a file system where it cannot write the lock file.
        refused = getattr(error, "code", 0) in (errno.EROFS, errno.EACCES, errno.EPERM)
        if not (options.read_only and refused):
            raise
        return _open_smaller(path, map_size, writing, lock=False)


def _open_smaller(path: Path, map_size: int, writing: bool, *, lock: bool) -> Any:
    tries = 0
    while True:
        try:
            return lmdb.open(
                str(path),
                map_size=map_size,
                subdir=True,
                readonly=not writing,
                create=False,
                mode=0o600,
                readahead=False,
                meminit=False,
                max_readers=MAX_READERS,
                max_dbs=MAX_DATABASES,
                max_spare_txns=_SPARE_TRANSACTIONS,
                lock=lock,
            )
        except lmdb.InvalidError:
            # The first opener fills in the lock file while the others wait. Killed before it is
            # done, it leaves it empty, which LMDB tells them as damage; the next to try is first.
            tries += 1
            if tries > _TRIES:
                raise
            time.sleep(0.001 * tries)
        except lmdb.Error as error:
            # Address space is short (a limit, or hundreds of environments). A smaller map will
            # grow when it must.
            short = isinstance(error, lmdb.MemoryError) or getattr(error, "code", 0) == errno.ENOMEM
            if not short or map_size <= _LEAST_MAP:
                raise
            map_size //= 2


def _writer_lock(path: Path) -> WriterLock:
    """That of an environment which is to be opened: this process has no lock on its file yet."""
    make_private_file(path / "lock.mdb")
    with opened(path / "lock.mdb", os.O_RDWR) as descriptor:
        return WriterLock(descriptor)


def _data_bytes(path: Path, written: Tracked | None) -> int:
    size = 0
    with suppress(FileNotFoundError, NotADirectoryError):
        size = (path / "data.mdb").stat().st_size
        if written is None:
            return size
    if written is None:
        raise StoreNotFoundError(f"no LMDB environment at {path}; never made, or removed")
    if size == 0:
        raise written.gone(path)
    return size


def make_environment_files(path: Path, databases: Sequence[bytes] = ()) -> None:
    """Makes the folder and the files of an environment; those that are there stay.

    A new one has the databases: each that is made later is a commit more.

    Opening never does this: an environment that was closed as idle and meanwhile removed by
    another process must not come back as an empty one.

    Raises:
        lmdb.Error, OSError: LMDB or the system refused; there is no environment then.
    """
    make_private_directory(path)
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as folder:
        fcntl.flock(folder, fcntl.LOCK_EX)
        make_private_file(path / "lock.mdb")
        _fill_lock_file(path / "lock.mdb")
        if not is_there(path / "data.mdb"):
            _make_data_file(path, databases)


def _make_data_file(path: Path, databases: Sequence[bytes]) -> None:
    # LMDB writes the first two pages without a sync, and a file whose pages did not arrive before
    # a power loss is damaged for good. So it has another name until they are durable.
    new = path / "data.mdb.new"
    new.unlink(missing_ok=True)
    make_private_file(new)
    how = {"subdir": False, "lock": False, "sync": False, "meminit": False}
    with closing(lmdb.open(str(new), map_size=_NEW_MAP, max_dbs=MAX_DATABASES, **how)) as env:
        with env.begin(write=True) as txn:
            for name in databases:
                env.open_db(name, txn=txn)
            extents.put_mark(txn, Extent(extents.new_identity(), 1))
        env.sync(True)
    new.rename(path / "data.mdb")


def _fill_lock_file(path: Path) -> None:
    # LMDB maps this file and leaves it sparse, as a copy may be: a reader that takes a slot on a
    # full disk would die of SIGBUS. This process has no lock on it yet: closing it drops none.
    if not is_there(path):  # after a power loss
        make_private_file(path)
    found = path.stat()
    # mdb_env_setup_locks: one MDB_txninfo, then a MDB_reader of a cache line for each reader.
    size = found.st_size or 64 * (MAX_READERS + 2)
    if found.st_blocks * 512 < size:
        with opened(path, os.O_RDWR) as descriptor:
            (fill_holes if found.st_size else allocate)(descriptor, size)  # others may use it


_PATIENCE_SECONDS = 10.0


class StaleHandleError(UnavailableError):
    """The handle is younger than the transaction: begin it again."""


class LmdbScope:
    """One transaction of one thread, and the handles that it opened itself."""

    __slots__ = ("opened", "outer", "serial", "txn", "writing")

    def __init__(self, serial: int, outer: LmdbScope | None, writing: bool) -> None:
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

    def inside(self, open_: OpenLmdb, scope: LmdbScope, name: bytes, flags: dict[str, bool]) -> Any:
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

    def keep(self, open_: OpenLmdb, scope: LmdbScope) -> None:
        """After a commit: what the write opened serves transactions that begin from now on."""
        if scope.opened:
            serial = self.serial + 1
            for name, handle in scope.opened.items():
                open_.handles[name] = (handle, serial)
            self.serial = serial

    def end(self, scope: LmdbScope) -> bool:
        """At the end of every transaction; true when a read had to open a handle for itself."""
        if not scope.opened:
            return False
        scope.opened = None
        self._lock.release()
        return not scope.writing

    def _open(self, open_: OpenLmdb, scope: LmdbScope, name: bytes, flags: dict[str, bool]) -> Any:
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


def _patience(scope: LmdbScope) -> float:
    # The wait is bounded: the holder may be waiting for this thread through another environment,
    # and an outer transaction of this very thread would never end.
    outer = scope.outer
    while outer is not None:
        if outer.opened:
            return 0.0
        outer = outer.outer
    return _PATIENCE_SECONDS
