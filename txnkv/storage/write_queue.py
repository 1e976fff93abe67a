"""The queue of writers: one of a process, then one of the machine."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

from txnkv.errors import ClosedError, StoreNotFoundError


class WriteQueue:
    """A lock of this process, then a flock: the kernel keeps the processes in order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._descriptor: int | None = None
        self._retired = False

    def acquire(self) -> None:
        """Waits for its turn.

        Raises:
            RuntimeError: this thread has the turn already.
            ClosedError: the queue was retired.
            StoreNotFoundError: its folder is gone.
        """
        self._acquire_here()
        try:
            fcntl.flock(self._opened(), fcntl.LOCK_EX)
        except BaseException:
            self._owner = None
            self._lock.release()
            raise

    def retire(self) -> None:
        """Waits for the writer of this process and closes the file; nobody gets a turn any more."""
        self._acquire_here()
        self._retired = True
        self.close()
        self._owner = None
        self._lock.release()

    def _acquire_here(self) -> None:
        me = threading.get_ident()
        if self._owner == me:
            raise RuntimeError("a write inside a write of the same thread; use its cursor instead")
        self._lock.acquire()
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
        """Makes a new lock: a thread that is not in this process may have held the old one."""
        self._lock = threading.Lock()
        self._owner = None

    def _opened(self) -> int:
        if self._retired:
            raise ClosedError(f"{self._path} is closed; open the store again")
        if self._descriptor is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            try:
                self._descriptor = os.open(self._path, flags, 0o600)
            except FileNotFoundError:
                raise StoreNotFoundError(
                    f"{self._path.parent} was removed or moved while it was in use: nothing can be "
                    "written there any more"
                ) from None
            os.fchmod(self._descriptor, 0o600)
        return self._descriptor
