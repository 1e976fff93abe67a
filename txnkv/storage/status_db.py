"""The status database: SQLite in WAL mode, shared by all processes of a store.

Reads are short: a deferred transaction inside a `with` block, on a pooled connection. None
outlives its block, or checkpoints could not finish.

Writers queue. SQLite makes a second writer poll with growing sleeps, and of four processes one
then waited for seconds. So a writer first takes a lock of its process, then a flock on a file
beside the database, on which the kernel keeps order; BEGIN IMMEDIATE then finds no other.

    process lock -> flock -> BEGIN IMMEDIATE -> ... -> change number busy -> COMMIT
        -> change number bumped -> flock free -> process lock free -> WAL synced -> acknowledged

A write of one row (`put`) is an INSERT by itself in the place of BEGIN, COMMIT and what is between.

The change number is busy before the COMMIT can be seen and bumped before it is acknowledged, so
a reader that finds the number it knows has missed nothing (`runtime`). A writer killed in
between leaves it busy, which means "look"; its flock goes with it.

The disk works while the next writer does: a commit can be seen before it is durable. So a read
ends with a sync, when there is something to sync: what it has seen is durable when its caller
goes on. A sync that fails leaves in doubt what the disk has, and later ones would not tell; the
next then moves the whole WAL into the database and begins a new one.

Lock order: LMDB's write lock before this one, never the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, NoReturn

import apsw

from txnkv.core import SqliteWriter
from txnkv.errors import (
    ClosedError,
    NotSupportedError,
    StorageFullError,
    StoreNotFoundError,
    UnavailableError,
)
from txnkv.storage.directory import (
    STATUS_PAGE_BYTES,
    FileIdentity,
    make_private_file,
    sync_directory,
)
from txnkv.storage.extents import LEAST_FREE_BYTES, Extents
from txnkv.storage.faults import armed, declare_fault_point, fault_point, is_there, with_descriptor
from txnkv.storage.fork import GATE
from txnkv.storage.runtime import Runtime
from txnkv.storage.sqlite_connection import (
    BUSY_MILLISECONDS,
    CACHE_BYTES,
    Checkpointer,
    ReaderPool,
    ReadTransaction,
    WalFile,
    check_sqlite_version,
    end_transaction,
    native_writer,
    open_writer,
    sqlite_error,
)
from txnkv.storage.write_queue import BusyError, WriteQueue

declare_fault_point("status.before_commit", "the change number is busy, COMMIT was not called")
declare_fault_point("status.after_commit", "COMMIT is done, the change number not bumped")
declare_fault_point("status.unsynced", "COMMIT is done and can be seen, the WAL is not synced")
declare_fault_point("status.shortened", "the database is as short as its content, in the WAL alone")

_PAGES: Final = "freelist_count", "page_count"
Initialise = Callable[[apsw.Cursor], None] | None
RefuseLost = Callable[[bool, bool], bool]


class StatusDatabase:
    """The status database in this process. Shared by threads; one a process and store."""

    def __init__(
        self,
        path: Path,
        lock_path: Path,
        runtime: Runtime,
        script: str,
        *,
        initialise: Initialise = None,
        upgrades: Sequence[str] = (),
        refuse_lost: RefuseLost = lambda used, no_schema: used,
        read_only: bool = False,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        """Opens the database, and makes it when it is empty.

        Args:
            path: the database file.
            lock_path: the file on which writers queue.
            runtime: where changes are announced.
            script: SQL that makes the schema, run once in the life of the database.
            initialise: fills the new schema, in the same transaction.
            upgrades: SQL that brings a schema of version 1 to 2, 2 to 3 and so on; `script`
                makes the last one.
            refuse_lost: raises where there was a schema; see `StoreDirectory.refuse_lost_status`.
            read_only: write nothing; the database is there then.

        Raises:
            IncompatibleStoreError: SQLite is too old.
            StoreNotFoundError: the database is missing and is not to be written.
            CorruptionError: the file is no database or is damaged.
        """
        check_sqlite_version()
        self.path = path
        self._runtime = runtime
        self._read_only, self._closed = read_only, False
        self.extents = Extents(self)
        self._cache_bytes = cache_bytes
        self._readers = ReaderPool(path, read_only, cache_bytes)
        self._writer: apsw.Connection | None = None
        self._native: SqliteWriter | None = None
        self._queue = WriteQueue(lock_path)
        self._wal = WalFile(path, runtime.note_sync_failed)
        self._checkpointer = Checkpointer(self._wal, self._readers, self._queue)
        self.wal_is_long = self._checkpointer.is_long
        GATE.register(self)
        try:
            with GATE.use():
                self._make(script, initialise, upgrades, refuse_lost)
                self._readers.identity = FileIdentity(path)
                if not read_only:
                    self.sync()  # what processes that were killed had written
        except BaseException:
            self.close()
            raise

    # -- transactions ------------------------------------------------------------------

    def read(self, *, durable: bool = True) -> ReadTransaction:
        """`with db.read() as cursor:` one consistent view; use all rows inside the block.

        Args:
            durable: at the end of the block, see to it that what was read is on the disk.

        Raises:
            UnavailableError: the database is busy or the disk failed.
            CorruptionError: the database is damaged.
            ClosedError: the store was closed.
        """
        return ReadTransaction(self._readers, self.sync_what_was_seen if durable else None)

    def write(
        self, *, sync: bool = True, undo: Callable[[], None] | None = None, wait: bool = True
    ) -> WriteTransaction:
        """`with db.write() as cursor:` commits at the end, durably; rolls back on an exception.

        When the block ends without an error, the commit is on the disk and visible to all.

        Args:
            sync: False for a caller that calls `sync` itself before it acknowledges anything.
            undo: called when it was not committed, before the next writer's turn.
            wait: False for a caller that has others to do, and gets BusyError then.

        Raises:
            RuntimeError: this thread is in a write already.
            StorageFullError: no room; the transaction was rolled back.
            UnavailableError: the disk failed. What was to be written is visible or not: ask
                for its state afterwards.
            NotSupportedError: the store is open to read only.
        """
        return WriteTransaction(self, sync, undo, wait)

    def sync(self) -> None:
        """Makes all commits durable that are done.

        Raises:
            UnavailableError: the disk failed; they are visible, and may go with a power loss.
        """
        runtime = self._runtime
        with GATE.use():
            count = runtime.to_sync()
            if count is None:
                self._begin_new_wal()
                count = runtime.to_sync() or 0
            try:
                if armed:
                    fault_point("status.unsynced")
                self._wal.sync()
            except OSError as error:
                runtime.note_sync_failed(True)
                raise UnavailableError(
                    f"{self._wal.path} failed: {error}. What was committed last is visible, but a "
                    "power loss may take it away; the next write tries again to make it durable"
                ) from error
        if not runtime.note_synced(count):
            self.sync()

    def begin_sync(self) -> Callable[[], None]:
        """`sync` beside what the caller does next. It is inside `GATE.use()` until it has called
        what is returned: that waits for the end of the sync, and raises what `sync` raises.
        """
        runtime = self._runtime
        count = runtime.to_sync()
        if count is None:
            self.sync()
            return lambda: None
        fault_point("status.unsynced")
        syncing = self._wal.begin_sync()

        def wait() -> None:
            if syncing.cancel():  # the thread had no turn yet: this one is as good
                self.sync()
                return
            try:
                syncing.result()
            except OSError:
                runtime.note_sync_failed(True)
                self.sync()
            else:
                if not runtime.note_synced(count):
                    self.sync()

        return wait

    def sync_what_was_seen(self) -> None:
        """Makes durable what a read that has ended may have seen."""
        if not self._runtime.all_synced():
            self.sync()

    def _begin_new_wal(self) -> None:
        self._checkpointer.run(cut=True)
        if self._wal.size > 0:
            raise UnavailableError(
                f"{self._wal.path} failed before, and could not be moved into the database yet. "
                "Nothing was lost so far; try again"
            )
        self._runtime.note_sync_failed(False)

    # -- looking after -----------------------------------------------------------------

    def refuse_writes(self) -> None:
        """From now on every write raises StoreNotFoundError: the store is gone."""
        self._queue.refuse()

    def checkpoint(self, *, cut: bool = True) -> None:
        """Moves the WAL into the database. Where others are in the way, less of it.

        Args:
            cut: make the WAL empty, too; else its file is used again from the start.

        Raises:
            StorageFullError: no room in the database file; the WAL stays and all is readable.
            UnavailableError: the disk failed.
        """
        if not self._read_only:
            self._checkpointer.run(cut=cut)

    def backup_to(self, path: Path) -> None:
        """Copies a consistent state into a new file; copying it by hand drops SQLite's locks.

        What is in the copy is durable in the store when it returns. The copy is not synced.
        """
        make_private_file(path)
        at, target, flags = self.path, None, apsw.SQLITE_OPEN_READWRITE
        with GATE.use(), ExitStack() as held:
            try:
                source = self._readers.borrow()
                held.callback(self._readers.give_back, source)
                at = path
                target = with_descriptor(apsw.Connection, str(path), flags=flags)
                held.callback(target.close)
                with target.backup("main", source, "main") as backup:
                    backup.step(-1)
            except apsw.Error as error:
                raise sqlite_error(error, at, target) or error from error
        self.sync_what_was_seen()

    def shorten(self) -> None:
        """Make the file as short as its content, where more than half is free. Others may read.

        Raises:
            StorageFullError: no room for what it holds a second time; nothing was changed.
            UnavailableError: the disk failed.
        """
        with self.read() as cursor:
            free, pages = (int(cursor.execute(f"PRAGMA {each}").get) for each in _PAGES)
        if pages > 2 * (pages - free + LEAST_FREE_BYTES // STATUS_PAGE_BYTES):
            self._vacuum()
            fault_point("status.shortened")
        elif self.path.stat().st_size <= pages * STATUS_PAGE_BYTES:
            return  # else it was made so before, and others were in the way of the checkpoint
        self.sync()
        self._checkpointer.wait()
        self.checkpoint()

    def _vacuum(self) -> None:
        with GATE.use():
            self._queue.acquire()
            try:
                self._readers.require_there()
                with closing(open_writer(self.path, self._cache_bytes)) as connection:
                    connection.execute("VACUUM")  # one transaction, as any other
            except apsw.Error as error:
                raise sqlite_error(error, self.path, None) or error from error
            finally:
                self._queue.release()

    @property
    def wal_bytes(self) -> int:
        """Bytes that wait in the WAL, as of the last commit of this process."""
        return self._checkpointer.wal_bytes

    def close(self) -> None:
        """Closes all connections; every later use raises ClosedError."""
        self._checkpointer.wait()
        with GATE.use():
            self._queue.retire()
            self._closed = True
            self._readers.retire()
            self._close_connections()

    # -- connections -------------------------------------------------------------------

    def _open_writer(self) -> SqliteWriter:
        self._readers.require_there()
        self._writer = open_writer(self.path, self._cache_bytes)
        self._native = native_writer(self._writer, self._runtime.shared)
        return self._native

    def _close_writer(self) -> None:
        native, self._native = self._native, None
        if native is not None:
            native.close()
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close(True)

    def _close_connections(self) -> None:
        self._readers.close()
        self._wal.close()
        self._close_writer()

    # -- the course of a write ---------------------------------------------------------

    def begin_write(self, *, wait: bool = True) -> apsw.Cursor:
        """Queues and begins; `write()` is the way to it."""
        if self._read_only:
            raise NotSupportedError(f"write to {self.path}: the store is open to read only")
        gate = GATE.use()
        gate.acquire()
        try:
            if self._closed:
                raise ClosedError(f"{self.path} is closed; open the store again")
            self._queue.acquire(wait=wait)
            try:
                if code := (self._native or self._open_writer()).begin(BUSY_MILLISECONDS):
                    raise apsw.exception_for(code)
                assert self._writer is not None
                return self._writer.cursor()
            except BaseException as error:
                if isinstance(error, apsw.ReadOnlyError):  # it stays so as long as it is open
                    self._readers.close()
                    self._close_writer()
                self._queue.release()
                if (translated := sqlite_error(error, self.path, self._writer)) is not None:
                    raise translated from error
                raise
        except BaseException:
            gate.release()
            raise

    def end_write(
        self,
        cursor: apsw.Cursor,
        error: BaseException | None,
        sync: bool,
        undo: Callable[[], None] | None,
    ) -> None:
        """Commits, or rolls back after an error; lets the next writer go on, and syncs."""
        if GATE.refused:
            if error is None:
                GATE.check()
            return
        full = committed = False
        try:
            try:
                cursor.close(True)
                if error is None:
                    self._commit()
                    committed = True
                else:
                    translated = sqlite_error(error, self.path, self._writer)
                    self._roll_back(error)
                    if translated is not None:
                        raise translated from error
            finally:
                try:
                    if undo is not None and not committed:
                        undo()
                finally:
                    self._queue.release()
            if error is None and sync:
                try:
                    self.sync()
                except UnavailableError:
                    self.sync()  # the pages anew: who is told that it failed would do it again
        except StorageFullError:
            full = True
            raise
        finally:
            GATE.leave()
            if full or self._checkpointer.is_due:
                self._checkpointer.after_write(full)

    def take_turn(self) -> bool:
        """Take the turn to write, inside of `GATE.use()`, for a write of one row; False: it is not
        to be had at once, or the write has more to do. `end_turn` gives it back.
        """
        if self._closed or self.extents.noted or not self._queue.take():
            return False
        if self._native is None:  # the next write opens it
            self._queue.release()
            return False
        return True

    @contextmanager
    def reading(self) -> Iterator[apsw.Cursor]:
        """Read in a turn, in which nobody else writes."""
        assert self._writer is not None
        cursor = self._writer.cursor()
        try:
            yield cursor
        except apsw.BusyError as error:
            raise BusyError(f"{self.path}: {error}") from error
        except BaseException as error:
            self._fail(error)
        finally:
            cursor.close(True)

    def put(self, sql: str, a: int, b: int, data: bytes, *, hasten: bool) -> None:
        """Write a row of two numbers and bytes, in a turn; to be synced. With `hasten` it is on
        its way to the disk then: the turn takes 12 us longer, and the sync waits shorter.

        Raises:
            BusyError: somebody is in the way; nothing was done.
            StorageFullError: no room; nothing was done.
            UnavailableError: the disk failed. The row is visible or not.
        """
        assert self._native is not None
        try:
            hook, wal = fault_point if armed else None, self._wal.descriptor if hasten else -1
            code = self._native.put(sql, a, b, data, hook, wal)
            if code > 0:
                if code & 0xFF == apsw.SQLITE_BUSY:
                    raise BusyError(f"{self.path} is busy: try again")
                raise apsw.exception_for(code)
        except BaseException as error:
            self._fail(error)
        if code < -1:
            self._checkpointer.note_pages(-1 - code)

    def end_turn(self) -> None:
        """Let the next writer go on."""
        if not GATE.refused:
            self._queue.release()

    def after_turn(self, *, full: bool = False) -> None:
        """Move the WAL into the database, where there is enough of it or no room. In no turn."""
        if full or self._checkpointer.is_due:
            self._checkpointer.after_write(full)

    def let_write(self) -> None:
        """Wait until whoever writes now is done, and can be seen to be; raises as a write does."""
        with GATE.use():
            self._queue.acquire()
            self.end_turn()

    def append(self, sql: str, a: int, b: int, data: bytes) -> None:
        """Insert a row of two numbers and bytes, inside of a write."""
        assert self._native is not None
        code = self._native.append(sql, a, b, data)
        if code:
            raise apsw.exception_for(code)

    def _commit(self) -> None:
        assert self._writer is not None
        assert self._native is not None
        try:
            noted = self.extents.record(self._writer) if self.extents.noted else ()
            code = self._native.commit(fault_point if armed else None)
            if code > 0:
                raise apsw.exception_for(code)
            if noted:
                self.extents.recorded(noted)
        except BaseException as error:
            self._fail(error)
        if code < -1:
            self._checkpointer.note_pages(-1 - code)

    def _fail(self, error: BaseException) -> NoReturn:
        """Roll back after an error, and raise it."""
        translated = sqlite_error(error, self.path, self._writer)
        self._roll_back(error)
        if translated is not None:
            raise translated from error
        raise error

    def _roll_back(self, error: BaseException) -> None:
        assert self._writer is not None
        sound = not isinstance(error, apsw.CorruptError)  # what was read wrongly is in its cache
        try:
            end_transaction(self._writer)
        except apsw.Error:
            sound = False
        if not sound:  # closing rolls back too, and the next write gets a sound connection
            self._close_writer()

    # -- making ------------------------------------------------------------------------

    def _make(
        self, script: str, initialise: Initialise, upgrades: Sequence[str], refuse_lost: RefuseLost
    ) -> None:
        used = refuse_lost(self._runtime.durable > 0, False)
        if not self._read_only and not is_there(self.path):
            make_private_file(self.path)
            sync_directory(self.path.parent)
        if is_there(self.path) and self.path.stat().st_size > 0:
            with self.read() as cursor:
                version = schema_version(cursor)
            if version == len(upgrades) + 1 or (version and self._read_only):
                return
        if self._read_only:
            refuse_lost(used, True)
            raise StoreNotFoundError(f"{self.path} is not made yet; open the store once to write")
        with self.write() as cursor:
            if schema_version(cursor) == 0:
                refuse_lost(used, True)
            bring_up_to_date(cursor, script, initialise, upgrades)

    # -- fork --------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Closes all connections and the lock file; see `txnkv.storage.fork`."""
        self._close_connections()
        self._queue.close()

    def after_fork_in_child(self) -> None:
        """Makes new locks; connections open when they are needed."""
        self._queue.forget_after_fork()
        self._checkpointer.after_fork_in_child()
        self._wal.after_fork_in_child()

    def inherited(self) -> list[object]:
        """Return the objects that a child of an unquiet fork must never touch."""
        return [*self._readers.inherited(), self._writer, self._native]


class WriteTransaction:
    """A write as a `with` block."""

    __slots__ = ("_cursor", "_database", "_sync", "_undo", "_wait")

    def __init__(
        self, database: StatusDatabase, sync: bool, undo: Callable[[], None] | None, wait: bool
    ) -> None:
        self._database = database
        self._sync = sync
        self._undo = undo
        self._wait = wait

    def __enter__(self) -> apsw.Cursor:
        self._cursor = self._database.begin_write(wait=self._wait)
        return self._cursor

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._database.end_write(self._cursor, error, self._sync, self._undo)


def schema_version(cursor: apsw.Cursor) -> int:
    """0: there is no schema yet."""
    return int(cursor.execute("PRAGMA user_version").get)


def bring_up_to_date(
    cursor: apsw.Cursor, script: str, initialise: Initialise, upgrades: Sequence[str]
) -> None:
    """Make the schema, by `script` and `initialise`, or upgrade it; in a write."""
    version = schema_version(cursor)
    if version == 0:
        cursor.execute(script)
        if initialise is not None:
            initialise(cursor)
    else:
        for upgrade in upgrades[version - 1 :]:
            cursor.execute(upgrade)
    cursor.execute(f"PRAGMA user_version = {len(upgrades) + 1}")
