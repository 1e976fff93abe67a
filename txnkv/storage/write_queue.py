"""The queue of writers: one of a process, then one of the machine; and locks made of it.

A process that is stopped (SIGSTOP, a debugger, a frozen container) keeps its place in the queue,
for ever perhaps. Whoever was asked to write waits for it. Background work has other things to do:
inside `not_waiting()` a turn that does not come soon is a BusyError, and for a while after that
the same queue is only tried, so that a hundred pieces of work behind one stopped process cost the
time of one.

    with not_waiting():
        ...                  whatever queues in here, in this thread

All are flocks, so that the kernel frees them when their holder dies. Whoever gets the lock of
maintenance next finds either a finished piece of work or leftovers that are nobody's.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from txnkv import core
from txnkv.errors import ClosedError, UnavailableError
from txnkv.storage.directory import removed
from txnkv.storage.faults import close_descriptor, lmdb_error, open_private, with_descriptor
from txnkv.storage.fork import GATE
from txnkv.storage.locks import new_lock

T = TypeVar("T")

PATIENCE: Final = 2.0
"""Seconds for which background work waits for its turn. A writer that lives and is busy gives the
turn back a thousand times in that."""
HASTE: Final = 0.02
"""Seconds for which a call waits for its turn that is handed to a thread of the library else."""
_TRIED_ONLY: Final = 10.0
"""Seconds for which a queue that took longer than that is only tried."""
_STEP: Final = 0.001


AGAIN: Final = object()
"""The answer of `hastily` for a call that has done nothing."""


class BusyError(UnavailableError):
    """Somebody else writes now, and the caller did not want to wait."""


class _Mine(threading.local):
    patience: float | None = None


_mine: Final = _Mine()


@contextmanager
def not_waiting() -> Iterator[None]:
    """For background work: in this thread nothing queues for longer than PATIENCE."""
    with waiting_for(PATIENCE):
        yield


@contextmanager
def waiting_for(seconds: float | None) -> Iterator[None]:
    """For a thread that works for another, with the `patience` of that."""
    before, _mine.patience = _mine.patience, seconds
    try:
        yield
    finally:
        _mine.patience = before


def hastily(fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T | object:
    """Call it where nothing queues for longer than HASTE; return AGAIN where it would have to."""
    before, _mine.patience = _mine.patience, HASTE
    try:
        return fn(*args, **kwargs)
    except BusyError:
        return AGAIN
    finally:
        _mine.patience = before


def patience() -> float | None:
    """Seconds for which this thread waits for its turn; None for ever."""
    return _mine.patience


class WriteTurn(ABC):
    """A lock of this process, then a flock: the kernel keeps the processes in order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = new_lock()
        self._owner: int | None = None
        self._tried_only = 0.0

    def until(self) -> float | None:
        """The monotonic second until which this thread waits for a turn; None for ever."""
        seconds = _mine.patience
        if seconds is None:
            return None
        now = time.monotonic()
        return now if now < self._tried_only else now + seconds

    def acquire(self, *, wait: bool = True) -> None:
        """Waits for its turn.

        Args:
            wait: False only to try.

        Raises:
            BusyError: it is not its turn, and `wait` is false; or inside of `not_waiting`.
            RuntimeError: this thread has the turn already.
            What `_opened` raises.
        """
        until = self.until() if wait else time.monotonic()
        self.acquire_here(until)
        try:
            descriptor = self._opened()
            if descriptor is not None:
                if until is None:
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                elif not _flock_until(descriptor, until):
                    raise self.busy()
                self._locked(descriptor)
        except BaseException:
            self._release_file()
            self.release_here()
            raise
        self._tried_only = 0.0

    def release(self) -> None:
        """Lets the next one go on."""
        self._owner = None
        try:
            self._release_file()
        finally:
            self._lock.release()

    @abstractmethod
    def _locked(self, descriptor: int) -> None:
        """Refuses the turn, where what was locked is not what it was."""

    @abstractmethod
    def _opened(self) -> int | None:
        """The descriptor of what is locked. Called with the lock of this process."""

    @abstractmethod
    def _release_file(self) -> None:
        """Unlocks it, if it is locked."""

    def acquire_here(self, until: float | None = None) -> None:
        """Waits for the lock of this process alone."""
        me = threading.get_ident()
        if self._owner == me:
            raise RuntimeError("a write inside a write of the same thread; use its cursor instead")
        if until is None:
            self._lock.acquire()
        elif not self._lock.acquire(timeout=max(until - time.monotonic(), 0)):
            raise self.busy()
        self._owner = me

    def release_here(self) -> None:
        """Gives the lock of this process back."""
        self._owner = None
        self._lock.release()

    def look_again(self, until: float | None) -> None:
        """A moment's pause of who will try again; raises BusyError when the time is over."""
        if until is not None and time.monotonic() >= until:
            raise self.busy()
        time.sleep(_STEP)

    def busy(self) -> BusyError:
        """The error of who does not wait any longer."""
        if _mine.patience is not None and _mine.patience >= PATIENCE:
            self._tried_only = time.monotonic() + _TRIED_ONLY
        return BusyError(
            f"{self._path}: another one is writing, or is stopped while it does. This goes on by "
            "itself when that one goes on or dies"
        )

    def forget_after_fork(self) -> None:
        """Forgets the owner: a thread that is not in this process may have been it."""
        self._owner = None
        self._tried_only = 0.0


def _flock_until(descriptor: int, until: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(_STEP)


class FolderTurn(WriteTurn):
    """A turn over a folder, which is open during the turn alone: there may be thousands."""

    _descriptor: int | None = None

    @property
    def is_locked(self) -> bool:
        """Return True in a turn, but where the folder was removed."""
        return self._descriptor is not None

    def _opened(self) -> int | None:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        with suppress(FileNotFoundError):  # it was removed: nobody else can write into it
            self._descriptor = with_descriptor(os.open, self._path, flags)
        return self._descriptor

    def _locked(self, descriptor: int) -> None:
        """Nothing is refused: who may write a folder is asked of the folder itself."""

    def _release_file(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            close_descriptor(descriptor)  # and so unlocked


class WriteQueue(core.Turn, WriteTurn):
    """A turn over a file of its own, which stays open.

    As a rule nobody else has it for long, here or on the machine: `take` tries for half a
    millisecond, ahead of those that queue for it. `acquire` also raises ClosedError when the queue
    was retired, and StoreNotFoundError when the file was removed or the queue refuses.
    """

    _retired = False

    def acquire(self, *, wait: bool = True) -> None:
        """Waits for its turn."""
        if self.take():
            self._tried_only = 0.0
        else:
            WriteTurn.acquire(self, wait=wait)

    def _locked(self, descriptor: int) -> None:
        if self._refusing or os.fstat(descriptor).st_nlink == 0:
            raise removed(self._path)  # unlocked: others wait for it, to find the same

    def _release_file(self) -> None:
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def refuse(self) -> None:
        """Gives nobody a turn any more: the store is gone."""
        self._refusing = True

    def retire(self) -> None:
        """Waits for the writer of this process and closes the file; nobody gets a turn any more."""
        self.acquire_here()
        self._retired = True
        self.close()
        self.release_here()

    def close(self) -> None:
        """Closes the file. Nobody is in the queue: a forked child would share the lock."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            close_descriptor(descriptor)

    def _opened(self) -> int:
        if self._retired:
            raise ClosedError(f"{self._path} is closed; open the store again")
        if self._descriptor is None:
            try:
                self._descriptor = open_private(self._path, os.O_RDWR | os.O_CREAT)
            except FileNotFoundError:
                raise removed(self._path) from None
            except OSError as error:
                raise lmdb_error(error, self._path) or error from error
        return self._descriptor


class MaintenanceLock:
    """One holder at a time among all threads and processes of a store.

    Args:
        path: the file.
        through_forks: a fork does not wait until the lock is free, for that may take long. The
            parent keeps it; the child closes its copy of the file, which frees nothing.
    """

    def __init__(self, path: Path, *, through_forks: bool = False) -> None:
        self._queue = WriteQueue(path)
        self._through_forks = through_forks
        GATE.register(self)

    @contextmanager
    def hold(self, *, wait: bool = True) -> Iterator[None]:
        """Waits for the lock and has it for the block.

        Args:
            wait: False only to try.

        Raises:
            RuntimeError: this thread has it already.
            BusyError: another one has it, and `wait` is false; or inside of `not_waiting`.
            ClosedError: the store was closed.
        """
        with nullcontext() if self._through_forks else GATE.use():
            self._queue.acquire(wait=wait)
            try:
                yield
            finally:
                if not GATE.refused:
                    self._queue.release()

    def close(self) -> None:
        """Waits for the holder in this process; nobody gets the lock any more."""
        with nullcontext() if self._through_forks else GATE.use():
            self._queue.retire()

    def before_fork(self) -> None:
        """Closes the file: a child would share its lock."""
        if not self._through_forks:
            self._queue.close()

    def after_fork_in_child(self) -> None:
        """Makes a new lock of the process."""
        self._queue.close()
        self._queue.forget_after_fork()

    def inherited(self) -> list[object]:
        """Nothing that a destructor could harm."""
        return []
