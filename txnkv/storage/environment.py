"""One LMDB environment: opened once a process, grown when full, safe to read meanwhile.

LMDB maps its file into memory, and keeps its locks with the process. From that follow:

- Moving the map while a transaction of this process is live is a SIGBUS. So every transaction
  holds the environment's gate, and whatever moves or unmaps (growing, adopting the growth of
  another process, closing) drains the gate first. The map is sparse and large, so this is rare.

      read:    gate.enter -> begin -> ... -> gate.leave
      grow:    gate.drain (waits for reads and the write) -> set_mapsize -> gate.reopen

- Handles of named databases belong to the environment as it is open now. All are opened with
  it. `lmdb_open` says why a process opens it to read first and to write when it first writes.

Ask `db()` inside each transaction and do not keep what it gives. Values are views of the map:
they end with the transaction, and are copied by whoever wants them longer.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import lmdb

from txnkv.errors import ClosedError, NotSupportedError, UnavailableError
from txnkv.storage import extents
from txnkv.storage.extents import Extent, Tracked
from txnkv.storage.faults import (
    NO_HOLES_ERRNOS,
    declare_fault_point,
    disk_errors,
    errno_of,
    fault_point,
    lmdb_error,
)
from txnkv.storage.fork import GATE
from txnkv.storage.lmdb_open import (
    EnvironmentOptions,
    Handles,
    LmdbScope,
    Map,
    OpenLmdb,
    ReopenError,
    StaleHandleError,
)
from txnkv.storage.locks import SharedGate, new_lock
from txnkv.storage.write_queue import BusyError, FolderTurn, waiting_for

T = TypeVar("T")

EPOCH: Final = memoryview(bytearray(8)).cast("Q")
"""One word, of this process: it changes with whatever makes stale what point reads remember."""

_EPOCHS: Final = itertools.count(1)


READ_ID: Final = lmdb.Transaction.id
"""`READ_ID(txn)` is the number of the last write that a read sees."""


def new_epoch() -> None:
    """Let nobody use what is remembered of maps, memory and manifests: they change."""
    EPOCH[0] = next(_EPOCHS)  # no value comes again: a late one spoils nothing


_PANIC_SECONDS = 10.0
HOLD_SECONDS: Final = 0.01
"""Seconds for which room is given back while other writers of the file wait."""

declare_fault_point("lmdb.before_commit", "an LMDB write transaction is complete, not committed")
declare_fault_point("lmdb.after_commit", "an LMDB write transaction is durable, not acknowledged")


class _Live(threading.local):
    scope: LmdbScope | None = None


class Environment:
    """An LMDB environment that opens by itself, and again after it was closed as idle.

    Shared by threads. Made by `Environments.get`, which sees to it that there is one a process.

    Attributes:
        map_bytes: address space that it had last.
    """

    def __init__(
        self,
        path: Path,
        options: EnvironmentOptions,
        with_room: Callable[[Environment, Callable[[], None]], None],
        tracked: Tracked | None = None,
    ) -> None:
        self.path = path
        self._with_room, self._tracked = with_room, tracked
        self._options, self.map_bytes = options, options.initial_map_size
        self._lmdb: OpenLmdb | None = None
        self._retired = self._stale = self._keeps_room = False
        self._handles, self._gate = Handles(path), SharedGate()
        self._opening, self._turn = new_lock(), FolderTurn(path)
        self._live = _Live()

    # -- transactions ------------------------------------------------------------------

    def read(self) -> ReadScope:
        """`with environment.read() as txn:` a read transaction, with `buffers=True`.

        It may stand inside another read of the same thread, and has its own snapshot.

        Raises:
            UnavailableError: all reader slots are taken by live readers, or another process
                grew the map while an outer read of this thread holds it; begin again.
            CorruptionError: the file is no LMDB file or is damaged.
            StoreNotFoundError: the environment is not there and was not to be made.
            DeniedError: this user may not open it.
        """
        return ReadScope(self)

    def look(self, name: bytes, fn: Callable[[Any, Any, Map | None], T]) -> T | None:
        """`fn(txn, handle, map)` in a short read that no exception of a signal handler leaves
        open: what it holds is made in C, and `with` enters and leaves that in one step.

        Returns:
            None when it is not open with that database, or with one that `fn` asks `db` for, or
            LMDB has to be asked otherwise: then `read` is the way.
        """
        with GATE.use(), self._gate.use():
            open_ = self._lmdb
            known = None if open_ is None else open_.handles.get(name)
            if open_ is None or known is None:
                return None
            try:
                with open_.env.begin(buffers=True) as txn:
                    return fn(txn, known[0], open_.map)
            except (lmdb.Error, StaleHandleError):
                return None

    def write(self, fn: Callable[[Any], T]) -> T:
        """Runs `fn(txn)` in a write transaction and commits; durable when it returns.

        `fn` may run more than once, each time in a new transaction: when the map is full it is
        grown and `fn` runs again, so `fn` leaves no marks elsewhere. An exception of `fn` aborts
        the transaction and goes on to the caller.

        Raises:
            StorageFullError: no room on the disk; nothing was written, reading goes on.
            UnavailableError: the disk failed; nothing was committed.
            NotSupportedError: the store is open to read only.
            RuntimeError: this thread has a transaction on this environment already: the map
                could not be moved under it, or the write would wait for itself.
        """
        self._refuse_write()
        until = self._turn.until()
        with GATE.use():
            while True:
                try:
                    result = self._write_once(fn)
                    break
                except lmdb.MapFullError:
                    self._move_map(lambda open_: open_.grow(self.map_bytes))
                except lmdb.MapResizedError:
                    self._move_map(OpenLmdb.adopt)
                except ReopenError:
                    self._close_to_reopen()
                except BusyError:  # opening does not wait: others may want it open to read
                    self._turn.look_again(until)
                except StaleHandleError:
                    continue  # a thread that had the write lock before made the database
                except (lmdb.Error, OSError) as error:
                    self.fail(error)
            fault_point("lmdb.after_commit")
            return result

    def db(self, name: bytes, **flags: bool) -> Any:
        """The handle of a named database, good for the transaction this thread is in.

        Inside `write` a missing database is made, with the `flags` of lmdb's `open_db`. Outside
        of any transaction it is made too, in a write of its own.

        Raises:
            KeyError: inside a read whose snapshot has no such database.
            UnavailableError: it was made after this transaction began, or another transaction
                is opening one and does not end; begin again.
        """
        scope = self._live.scope
        if scope is not None:
            assert self._lmdb is not None
            return self._handles.inside(self._lmdb, scope, name, flags)
        known = None if (open_ := self._lmdb) is None else open_.handles.get(name)
        if known is not None:
            return known[0]
        if self._gate.in_use_here:  # within `look`, which cannot make or open it
            raise StaleHandleError(
                f"database {name!r} of {self.path} is not open yet; begin the transaction again"
            )
        with GATE.use():
            try:
                with self._gate.use():
                    known = self._opened().handles.get(name)
            except (lmdb.Error, OSError) as error:
                self.fail(error)
            if known is None:
                return self.write(lambda _: self._made(name, flags))
            return known[0]

    def _made(self, name: bytes, flags: dict[str, bool]) -> Any:
        # Another thread may have made it while this one waited for the write lock; its handle
        # is no good for this transaction, which does not need it.
        assert self._lmdb is not None
        known = self._lmdb.handles.get(name)
        return known[0] if known is not None else self.db(name, **flags)

    # -- looking after -----------------------------------------------------------------

    def reader_check(self) -> int:
        """Frees the reader slots of dead processes; says how many."""
        with GATE.use(), self._gate.use():
            return int(self._opened().env.reader_check())

    def give_room_back(self, seconds: float) -> int:
        """Has the disk use again what the file does not need; see `extents`.

        Args:
            seconds: for which writers may have to wait for it.

        Returns:
            Bytes given back. 0 also where this process does not write, or another one does now.
        """
        with GATE.use(), self._gate.use(), waiting_for(None):
            open_ = self._lmdb
            if open_ is None or self._keeps_room:
                return 0
            try:
                return open_.give_room_back(seconds)
            except (BusyError, lmdb.Error, OSError) as error:
                self._keeps_room = errno_of(error) in NO_HOLES_ERRNOS
                return 0  # who writes to it is told what is wrong

    def give_all_room_back(self) -> None:
        """`give_room_back` where this process may not write yet, and until there is no more."""
        if (self.path / "data.mdb").stat().st_blocks * 512 > extents.LEAST_FREE_BYTES:
            self.write(lambda _: None)  # opens it to write
            while self.give_room_back(HOLD_SECONDS):
                pass

    def extent(self) -> Extent:
        """Read from the file which one it is, and how far it was written."""
        with GATE.use(), self._gate.use():
            return extents.read_extent(self._opened().env)

    def copy_to(self, folder: Path) -> None:
        """Copies a consistent snapshot into `folder`, which is there and empty. Copying the files
        by hand, in a process that has them open, drops LMDB's locks.
        """
        with GATE.use(), self._gate.use():
            try:
                extents.copy(self._opened().env, folder, self.map_bytes)
            except (lmdb.Error, OSError) as error:
                self.fail(error)

    @contextmanager
    def closed(self) -> Iterator[None]:
        """`with environment.closed():` nobody of this process has it open, or opens it."""
        with GATE.use(), self._gate.drained(), self._opening:
            self.close_now()
            yield

    @property
    def map_size(self) -> int:
        """Bytes of address space that the map takes."""
        with GATE.use(), self._gate.use():
            return self._opened().map_size

    @property
    def is_open(self) -> bool:
        """True while LMDB has the file mapped."""
        return self._lmdb is not None

    @property
    def is_writable(self) -> bool:
        """True while LMDB has it open to write."""
        return (open_ := self._lmdb) is not None and open_.writable

    def close(self, timeout: float | None = None) -> bool:
        """Closes LMDB once no transaction of this process is live; it opens again on use.

        Args:
            timeout: seconds to wait for them, None for ever, 0 to try.

        Returns:
            False when transactions were left; nothing was closed then.
        """
        return not self._gate.in_use_here and self._close(timeout)

    def retire(self, timeout: float | None = None) -> bool:
        """Closes LMDB for good; every later use raises ClosedError.

        Returns:
            False when transactions were left at the end of `timeout` seconds.

        Raises:
            RuntimeError: this thread has a transaction on the environment.
        """
        return self._close(timeout, for_good=True)

    def _close(self, timeout: float | None, *, for_good: bool = False) -> bool:
        if not self._gate.drain(timeout):
            return False
        try:
            self._retired |= for_good
            self.close_now()
        finally:
            self._gate.reopen()
        return True

    @property
    def in_use_here(self) -> bool:
        """True when this thread has a transaction on the environment."""
        return self._gate.in_use_here

    @property
    def is_retired(self) -> bool:
        """True once it was closed for good."""
        return self._retired

    # -- fork --------------------------------------------------------------------------

    def close_now(self) -> None:
        """Closes LMDB. Only where no transaction can be live: drained, or before a fork."""
        new_epoch()
        open_, self._lmdb = self._lmdb, None
        self._stale = False
        if open_ is not None:
            open_.close()

    def forget_after_fork(self) -> None:
        """Forgets the transactions of threads that are not in this process."""
        new_epoch()
        self._gate.reset()
        self._turn.forget_after_fork()
        self._live = _Live()

    def inherited(self) -> list[object]:
        """Return the objects that a child of an unquiet fork must never touch."""
        scope = self._live.scope
        return [self._lmdb and self._lmdb.env, scope and scope.txn, scope]

    # -- beginning and ending ----------------------------------------------------------

    def begin_read(self) -> LmdbScope:
        """Begins a read; `ReadScope` is the way to it."""
        GATE.enter()
        try:
            while True:
                try:
                    return self._begin(writing=False)
                except lmdb.MapResizedError:
                    self._adopt_for_read()
                except ReopenError:
                    self._close_to_reopen()
                except (lmdb.Error, OSError) as error:
                    self.fail(error)
        except BaseException:
            GATE.leave()
            raise

    def handle(self, scope: LmdbScope, name: bytes) -> Any:
        """The handle of a named database for a transaction of this thread: `db`, sooner."""
        open_ = self._lmdb
        assert open_ is not None
        known = open_.handles.get(name)
        if known is not None and known[1] <= scope.serial:
            return known[0]
        return self._handles.inside(open_, scope, name, {})

    @property
    def map(self) -> Map | None:
        """Stands for the map as it is now: another one when it was opened anew or moved."""
        return None if (open_ := self._lmdb) is None else open_.map

    def has(self, name: bytes) -> bool:
        """Return True when it is open and all transactions that begin now know the database."""
        return (open_ := self._lmdb) is not None and name in open_.handles

    def end_read(self, scope: LmdbScope) -> None:
        """Ends a read."""
        if GATE.refused:
            return
        try:
            scope.txn.abort()
        finally:
            self._end(scope)
            if self._stale:
                # A database that was not there when the environment was opened: opening the
                # environment again opens it for good. When others read now, they try next.
                self.close(timeout=0)
            GATE.leave()

    def _begin(self, *, writing: bool) -> LmdbScope:
        try:
            return self._begin_once(writing)
        except lmdb.PanicError:
            # The commit of another failed: LMDB refuses this environment until it is opened again.
            if not self.close(timeout=_PANIC_SECONDS):
                raise
            return self._begin_once(writing)

    def _begin_once(self, writing: bool) -> LmdbScope:
        live = self._live
        self._gate.enter()
        try:
            # The serial is read before the transaction begins: a handle that comes in between
            # is then taken for unusable, never the other way round.
            scope = LmdbScope(self._handles.serial, live.scope, writing)
            open_ = self._opened(writing)
            scope.txn = open_.begin(writing, self._tracked, scope.outer is None)
        except BaseException:
            self._gate.leave()
            raise
        live.scope = scope
        return scope

    def _end(self, scope: LmdbScope) -> None:
        self._live.scope = scope.outer
        # py-lmdb gives the reader slot back when the last reference goes, not when it ends.
        scope.txn = None
        if scope.writing and self._lmdb is not None:
            self._lmdb.end_write()
        if self._handles.end(scope):
            self._stale = True
        self._gate.leave()

    def _write_once(self, fn: Callable[[Any], T]) -> T:
        scope = self._begin(writing=True)
        try:
            try:
                result = fn(scope.txn)
                GATE.check()  # fn may have forked, and this be the child
                fault_point("lmdb.before_commit")
                number = scope.txn.id()
                scope.txn.commit()
            except BaseException:
                if not GATE.refused:
                    scope.txn.abort()
                raise
            assert self._lmdb is not None
            self._handles.keep(self._lmdb, scope)
            if self._tracked is not None and self._lmdb.last_number >= number:
                self._tracked.note(Extent(self._lmdb.identity, self._lmdb.base + number))
        finally:
            if not GATE.refused:
                self._end(scope)
        return result

    def _refuse_write(self) -> None:
        scope = self._live.scope
        if scope is not None:
            kind = "write" if scope.writing else "read"
            raise RuntimeError(
                f"write on {self.path} inside a {kind} of the same thread: end that one first, "
                "or use its transaction"
            )
        if self._options.read_only:
            raise NotSupportedError(f"write on {self.path}: the store is open to read only")

    # -- opening and moving ------------------------------------------------------------

    def _opened(self, writing: bool = False) -> OpenLmdb:
        open_ = self._lmdb
        if open_ is not None:
            return open_
        required = self._tracked.required() if self._tracked else None
        with self._opening:
            if self._retired:
                raise ClosedError(f"{self.path} was closed for good; ask for it again")
            if self._lmdb is None:
                with disk_errors(self.path):
                    self._with_room(self, lambda: self._open(writing, required))
            assert self._lmdb is not None
            return self._lmdb

    def _open(self, writing: bool, required: Extent | None) -> None:
        how = self._options, self.map_bytes, writing, self._turn, self._tracked, required
        self._lmdb = OpenLmdb.open(self.path, *how)

    def _move_map(self, move: Callable[[OpenLmdb], None]) -> None:
        with self._gate.drained():
            if self._lmdb is None:
                return
            new_epoch()
            try:
                move(self._lmdb)
                self.map_bytes = self._lmdb.map_size
            except BaseException as error:
                # LMDB unmaps before it maps: after a failure it has no map at all.
                self.close_now()
                if isinstance(error, lmdb.Error | OSError):
                    self.fail(error)
                raise

    def _close_to_reopen(self) -> None:
        if not self.close():  # which waits for other threads, not for this one
            raise UnavailableError(
                f"{self.path} has to be opened anew, to write or because its file was replaced, "
                "while an outer read of this thread has it open; end the outer read and begin again"
            )

    def _adopt_for_read(self) -> None:
        if self._gate.in_use_here:
            raise UnavailableError(
                f"{self.path} was grown by another process while an outer read of this thread "
                "holds the map; end the outer read and begin again"
            )
        self._move_map(OpenLmdb.adopt)

    def fail(self, error: Exception) -> NoReturn:
        """Raises the error of txnkv for one of LMDB or of the system, or that one itself."""
        translated = lmdb_error(error, self.path)
        if translated is None:
            raise error
        raise translated from error


class ReadScope:
    """A read transaction as a `with` block."""

    __slots__ = ("_environment", "_scope")

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._scope: LmdbScope | None = None

    def __enter__(self) -> Any:
        self._scope = self._environment.begin_read()
        return self._scope.txn

    def __exit__(self, *reason: object) -> None:
        assert self._scope is not None
        self._environment.end_read(self._scope)
        for error in reason:
            if isinstance(error, lmdb.Error):
                self._environment.fail(error)
