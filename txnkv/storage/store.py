"""A store in this process: its directory, environments, status database and runtime file.

Opening a store that this process has open gives the same object again, and counts: LMDB, SQLite
and the slot locks each must be opened once a process. A mount, or a move, gives a store another
path; the runtime file tells, whose inode is no other file's as long as the process has it mapped.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import apsw

from txnkv.errors import ClosedError, NotSupportedError, StoreNotFoundError
from txnkv.storage.directory import (
    FIRST_WITH_EXTENTS,
    FileIdentity,
    StoreDirectory,
    removed,
    store_path,
)
from txnkv.storage.environments import Environments
from txnkv.storage.extents import expect_files
from txnkv.storage.faults import disk_errors
from txnkv.storage.fork import GATE
from txnkv.storage.locks import new_rlock
from txnkv.storage.right_of_way import RightOfWay
from txnkv.storage.runtime import Runtime
from txnkv.storage.sqlite_connection import CACHE_BYTES
from txnkv.storage.status_db import StatusDatabase
from txnkv.storage.write_queue import MaintenanceLock


class Store:
    """One open store, shared by all who opened it in this process.

    Attributes:
        directory: its paths and its identity.
        gate: the process-wide fork gate; all parts of the store use it inside.
        cache_bytes: of status.db that each connection to it keeps in memory.
        extents: how far its environments were written.
    """

    def __init__(
        self,
        directory: StoreDirectory,
        schema_sql: str,
        initialise: Callable[[apsw.Cursor], None] | None,
        upgrades: Sequence[str] = (),
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self.directory = directory
        self.cache_bytes = cache_bytes
        self._users = 1
        self._runtime = Runtime.open(directory.runtime_path, directory.read_only)
        self.right_of_way = RightOfWay(self._runtime)
        try:
            self._runtime.require_slot()  # before LMDB reads: no other process has this one's pid
            self._status = StatusDatabase(
                directory.status_path,
                directory.status_lock_path,
                self._runtime,
                schema_sql,
                initialise=initialise,
                upgrades=upgrades,
                refuse_lost=directory.refuse_lost_status,
                read_only=directory.read_only,
                cache_bytes=cache_bytes,
            )
        except BaseException:
            self._runtime.close()
            raise
        self.extents = self._status.extents
        if not directory.read_only:
            self._upgrade(directory)
        self._gone = False
        self._files = [FileIdentity(directory.path), FileIdentity(directory.status_path)]
        self._shared = FileIdentity(directory.runtime_path / "shared")
        self.extents.require_there = self.require_there
        self._environments = Environments(directory, extents=self.extents)
        self._maintenance = MaintenanceLock(directory.path / "maintenance.lock")
        self._compaction = MaintenanceLock(directory.path / "compaction.lock", through_forks=True)
        self._log_cuts = MaintenanceLock(directory.path / "cuts.lock", through_forks=True)

    def _upgrade(self, directory: StoreDirectory) -> None:
        if directory.version < FIRST_WITH_EXTENTS:
            with self._status.write() as cur:
                expect_files(cur, directory.path)
        directory.mark_upgraded()

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        create: bool = True,
        read_only: bool = False,
        *,
        schema_sql: str = "",
        initialise: Callable[[apsw.Cursor], None] | None = None,
        upgrades: Sequence[str] = (),
        cache_bytes: int | None = None,
    ) -> Store:
        """Opens the store at `path`; each `open` is matched by one `close`.

        Args:
            path: the directory of the store.
            create: make the store when it is missing.
            read_only: write nothing. A store that this process has open to write is shared as
                it is; one that it has open to read only cannot be opened to write meanwhile.
            schema_sql: SQL that makes the schema of the status database, run once in its life.
            initialise: fills the new schema, in the same transaction.
            upgrades: SQL that brings the schema of an older store up to date, a version each.
            cache_bytes: of status.db that each connection to it keeps in memory; None for the
                default, or for what this process has the store open with.

        Raises:
            StoreNotFoundError: there is none and it was not to be made, or this process has it
                open and it was removed, moved or replaced since.
            IncompatibleStoreError: the format or SQLite is not one that this version takes.
            UnavailableError: the runtime file cannot be used now, too many files are open, or the
                disk failed.
            StorageFullError: the disk is full.
            NotSupportedError: this user may not, or another process that has the store open has
                the pid of this one, in another PID namespace.
            ValueError: the path is too long or not UTF-8; this process has the store open to read
                only, and `read_only` is false; or with other `cache_bytes`, or they are below 1.
        """
        if cache_bytes is not None and cache_bytes < 1:
            raise ValueError(f"cache_bytes={cache_bytes}: a number of bytes above 0, or None")
        with disk_errors(Path(path)), GATE.use():
            try:
                return _STORES.open(
                    Path(path), create, read_only, schema_sql, initialise, upgrades, cache_bytes
                )
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                    raise
                way = "as the user that it belongs to, or to read only, or name another path"
                if error.errno == errno.EROFS:
                    way = "to read only, or name another path; for a backup or a dump, copy the "
                    way += "folder to a disk that can be written"
                raise NotSupportedError(
                    f"user {os.geteuid()} cannot open store {path}: {error}. Open it {way}"
                ) from error

    @property
    def store_id(self) -> str:
        """32 hexadecimal digits that no other store has."""
        return self.directory.store_id

    @property
    def environments(self) -> Environments:
        """The LMDB environments."""
        if self._users == 0:
            raise self._is_closed()
        return self._environments

    @property
    def status(self) -> StatusDatabase:
        """The status database."""
        if self._users == 0:
            raise self._is_closed()
        return self._status

    @property
    def runtime(self) -> Runtime:
        """The runtime file."""
        if self._users == 0:
            raise self._is_closed()
        return self._runtime

    def is_at(self, real: Path) -> bool:
        """Return True where it was opened at this path, or the path leads to it by now."""
        return real == self.directory.path or self._shared.is_at(real / "runtime" / "shared")

    def require_there(self) -> None:
        """Refuse to go on with a store that was removed, moved or replaced while it is open.

        Raises:
            StoreNotFoundError: it was; every write raises this from now on.
        """
        try:
            if self._gone:  # also where it was put back: writes are refused already
                raise removed(self.directory.path)
            for file in self._files:
                file.require()
            if not self.runtime.is_current():
                raise removed(self.directory.runtime_path)
        except StoreNotFoundError:
            self._gone = True
            self._status.refuse_writes()
            raise

    def maintenance(self) -> AbstractContextManager[None]:
        """`with store.maintenance():` alone among all threads and processes of the store."""
        if self._users == 0:
            raise self._is_closed()
        return self._maintenance.hold()

    def compaction(self) -> AbstractContextManager[None]:
        """Hold a lock as `maintenance` does, for work that takes long.

        Where both are held, this one is taken first.
        """
        if self._users == 0:
            raise self._is_closed()
        return self._compaction.hold()

    def log_cuts(self, *, wait: bool = True) -> AbstractContextManager[None]:
        """Hold a lock as `compaction` does: alone among those who take anything out of logs, and
        those who want all of it to stay.

        Where others are held, this one is taken first.
        """
        if self._users == 0:
            raise self._is_closed()
        return self._log_cuts.hold(wait=wait)

    @property
    def closed(self) -> bool:
        """True once every `open` was matched by a `close`."""
        return self._users == 0

    def close(self) -> None:
        """Gives one `open` back; the last one closes all parts, after their transactions ended."""
        with GATE.use():
            _STORES.close(self)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_closed(self) -> ClosedError:
        return ClosedError(f"store {self.directory.path} is closed; open it again")

    def share(self) -> Store:
        """Counts one user more; called with the table of stores locked."""
        self._users += 1
        return self

    def give_up(self) -> bool:
        """Counts one user less, and closes at none; called with the table of stores locked."""
        self._users = max(self._users - 1, 0)
        if self._users == 0:
            self._log_cuts.close()
            self._compaction.close()
            self._maintenance.close()
            self._environments.close_all()
            self._status.close()
            self._runtime.close()
        return self._users == 0


def require_same(option: str, asked: float | None, there: float) -> None:
    """Refuse an option that is not that of what this process has open; None is any.

    Raises:
        ValueError: it is another.
    """
    if asked is not None and asked != there:
        raise ValueError(
            f"{option}={asked}: this process has the store open with {option}={there}, for all of "
            f"its clients. Connect with that value or without {option}, or close them first"
        )


class _Stores:
    """The stores of this process by the real path at which each was opened."""

    def __init__(self) -> None:
        self._lock = new_rlock()
        self._open: dict[Path, Store] = {}
        GATE.register(self)

    def open(
        self,
        path: Path,
        create: bool,
        read_only: bool,
        schema_sql: str,
        initialise: Callable[[apsw.Cursor], None] | None,
        upgrades: Sequence[str],
        cache_bytes: int | None,
    ) -> Store:
        with self._lock:
            real = store_path(path)
            store = self._open.get(real) or next(
                (each for each in self._open.values() if each.is_at(real)), None
            )
            if store is not None:
                if store.directory.read_only and not read_only:
                    raise ValueError(
                        f"store {path} is open to read only in this process; close it, then open "
                        "it to write"
                    )
                store.require_there()
                require_same("cache_bytes", cache_bytes, store.cache_bytes)
                return store.share()
            directory = StoreDirectory.open(path, create, read_only)
            kept = CACHE_BYTES if cache_bytes is None else cache_bytes
            store = Store(directory, schema_sql, initialise, upgrades, kept)
            self._open[directory.path] = store
            return store

    def close(self, store: Store) -> None:
        with self._lock:
            if not store.closed and store.give_up():
                self._open.pop(store.directory.path, None)

    def before_fork(self) -> None:
        """Nothing: the parts of a store are quiesced one by one."""

    def after_fork_in_child(self) -> None:
        """Nothing: the parts of a store forget one by one."""

    def inherited(self) -> list[object]:
        """The stores, so that none is destroyed."""
        return list(self._open.values())


_STORES = _Stores()
