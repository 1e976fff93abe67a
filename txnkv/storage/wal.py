"""The WAL of the status database as a file: making it durable without SQLite's help.

SQLite's own fsync is part of COMMIT, and so inside of the lock on which all writers queue. Here
COMMIT writes the WAL alone (`synchronous=NORMAL`), the lock goes to the next writer, and then the
file is synced by a descriptor of its own. A WAL is durable in order: whoever syncs it makes all
commits before durable as well, and a commit whose frames come later cannot outlive it.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

_THREADS: Final = 4


class WalFile:
    """The file beside a database. Shared by threads.

    SQLite keeps its locks on other files, so this one may be opened and closed at will.
    """

    def __init__(self, database: Path) -> None:
        self.path = database.with_name(database.name + "-wal")
        self._descriptor: int | None = None
        self._pool: ThreadPoolExecutor | None = None

    def sync(self) -> None:
        """Makes all that was written durable.

        Raises:
            OSError: the disk failed; nothing is known of what was written since the last sync.
        """
        descriptor = self._descriptor
        if descriptor is None:
            try:
                descriptor = self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
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
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
