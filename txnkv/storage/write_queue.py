"""The queue of writers: one of a process, then one of the machine."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

from txnkv.errors import ClosedError
from txnkv.storage.identity import removed
from txnkv.storage.lmdb_errors import translate
from txnkv.storage.locks import new_lock


class BusyError(Exception):
    """Somebody else writes now, and the caller did not want to wait."""


class WriteQueue:
    """A lock of this process, then a flock: the kernel keeps the processes in order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = new_lock()
        self._owner: int | None = None
        self._descriptor: int | None = None
        self._retired = False
        self._refusing = False

    def acquire(self, *, wait: bool = True) -> None:
        """Waits for its turn.

        Raises:
            BusyError: it is not its turn, and `wait` is false.
            RuntimeError: this thread has the turn already.
            ClosedError: the queue was retired.
            StoreNotFoundError: the file was removed, or the queue refuses.
        """
        self._acquire_here(wait=wait)
        try:
            descriptor = self._opened()
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._refusing or os.fstat(descriptor).st_nlink == 0:
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # others wait for it, to find the same
                raise removed(self._path)
        except BaseException as error:
            self._owner = None
            self._lock.release()
            if isinstance(error, BlockingIOError):
                raise BusyError from None
            raise

    def refuse(self) -> None:
        """Gives nobody a turn any more: the store is gone."""
        self._refusing = True

    def retire(self) -> None:
        """Waits for the writer of this process and closes the file; nobody gets a turn any more."""
        self._acquire_here()
        self._retired = True
        self.close()
        self._owner = None
        self._lock.release()

    def _acquire_here(self, *, wait: bool = True) -> None:
        me = threading.get_ident()
        if self._owner == me:
            raise RuntimeError("a write inside a write of the same thread; use its cursor instead")
        if not self._lock.acquire(wait):
            raise BusyError
        self._owner = me

    def release(self) -> None:
        """Lets the next one go on."""
        self._owner = None
        try:
            if self._descriptor is not None:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Closes the file. Nobody is in the queue: a forked child would share the lock."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def forget_after_fork(self) -> None:
        """Forgets the owner: a thread that is not in this process may have been it."""
        self._owner = None

    def _opened(self) -> int:
        if self._retired:
            raise ClosedError(f"{self._path} is closed; open the store again")
        if self._descriptor is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            try:
                self._descriptor = os.open(self._path, flags, 0o600)
            except FileNotFoundError:
                raise removed(self._path) from None
            except OSError as error:
                raise translate(error, self._path) or error from error
            os.fchmod(self._descriptor, 0o600)
        return self._descriptor
