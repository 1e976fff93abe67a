"""What is to be done when an object is dropped, by a thread that holds no lock.

The garbage collector runs finalizers wherever it happens to run, also in a thread that holds
the very lock that they want, and then nothing goes on any more:

    a thread takes the lock of the ids, allocates -> the collector drops a transaction
    -> its finalizer waits for the lock of the ids

So a finalizer puts its work into a queue, which is safe anywhere, and a thread does it.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final

_log = logging.getLogger("txnkv")

_PATIENCE: Final = 1.0
"""Seconds; the work may want a lock that waits for the one who waits for it."""

_Work = tuple[Callable[..., object], tuple[Any, ...]]


class _Worker:
    """The queue of this process and its thread, which the first user starts."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[_Work] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="txnkv-dropped", daemon=True)
                self._thread.start()

    def settle(self) -> None:
        if self._thread in (None, threading.current_thread()):
            return
        done = threading.Event()
        self.queue.put((done.set, ()))
        done.wait(_PATIENCE)

    def _run(self) -> None:
        while True:
            fn, args = self.queue.get()
            try:
                fn(*args)
            except Exception:
                _log.exception("tidying up after a dropped object failed")
            del fn, args


_worker = _Worker()


class WhenDropped:
    """Calls `fn(*args)` once: on another thread when `owner` is dropped, or here when called.

    Nothing happens in a forked child, whose inherited objects are the parent's, nor at exit.
    """

    def __init__(self, owner: object, fn: Callable[..., object], *args: Any) -> None:
        _worker.start()
        self._work = (fn, args)
        self._finalizer = weakref.finalize(owner, _worker.queue.put, self._work)
        self._finalizer.atexit = False

    @property
    def alive(self) -> bool:
        """Not called yet, nor dropped."""
        return self._finalizer.alive

    def __call__(self) -> None:
        if self._finalizer.detach() is not None:
            fn, args = self._work
            fn(*args)


def ready() -> None:
    """Have the thread run that `later` needs."""
    _worker.start()


def later(fn: Callable[..., object], *args: Any) -> None:
    """For `__del__` of objects made by the thousand, after `ready`: call `fn(*args)` on the
    other thread. It must do nothing in a forked child.
    """
    _worker.queue.put((fn, args))


def settle() -> None:
    """Wait a little until what was dropped before is tidied up, and has given up its pins.

    For who looks at pins next. Not to be called with a lock or inside a read of status.db.
    """
    _worker.settle()


def _after_fork_in_child() -> None:
    global _worker
    _worker = _Worker()


os.register_at_fork(after_in_child=_after_fork_in_child)
