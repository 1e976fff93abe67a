"""The lock of who rewrites committed data: flush, compaction and their clean-up.

A flock, so that the kernel frees it when its holder dies: whoever gets it next finds either a
finished piece of work or leftovers that are nobody's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from txnkv.storage.fork import GATE
from txnkv.storage.write_queue import WriteQueue


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
    def hold(self) -> Iterator[None]:
        """Waits for the lock and has it for the block.

        Raises:
            RuntimeError: this thread has it already.
            BusyError: another one has it, inside of `not_waiting`.
            ClosedError: the store was closed.
        """
        with nullcontext() if self._through_forks else GATE.use():
            self._queue.acquire()
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
