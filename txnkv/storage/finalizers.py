"""Finalizers: the work to be done when an object is dropped, by a thread that holds no lock.

The garbage collector runs finalizers wherever it happens to run, also in a thread that holds
the very lock that they want, and then nothing goes on any more:

    a thread takes the lock of the ids, allocates -> the collector drops a transaction
    -> its finalizer waits for the lock of the ids

So a finalizer puts its work into a queue, which is safe anywhere, and a thread does it. The
finalizer is the queue's own `put`, which is C: one in Python could be broken off by a signal.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final

from txnkv.storage.locks import new_event, new_lock

_log = logging.getLogger("txnkv")

_PATIENCE: Final = 1.0
"""Seconds; the work may want a lock that waits for the one who waits for it."""

_Work = tuple[Callable[..., object], tuple[Any, ...]]


class _Watch(weakref.ref[Any]):
    """Says that its object was dropped, and what is to be done."""

    __slots__ = ("work",)
    work: _Work


class _Worker:
    """The queue of this process and its thread, which the first user starts."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[_Work | _Watch] = SimpleQueue()
        self.watched: dict[int, _Watch] = {}
        self._lock = new_lock()
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
        done = new_event()
        self.queue.put((done.set, ()))
        done.wait(_PATIENCE)

    def _run(self) -> None:
        while True:
            found = self.queue.get()
            if isinstance(found, _Watch):
                watch = self.watched.pop(id(found), None)
                if watch is None:
                    continue  # it was called
                found = watch.work
                del watch
            fn, args = found
            try:
                fn(*args)
            except Exception:
                _log.exception("tidying up after a dropped object failed")
            del fn, args, found


_worker = _Worker()


class WhenDropped:
    """Calls `fn(*args)` once: on another thread when `owner` is dropped, or here when called.

    Nothing happens in a forked child, whose inherited objects are the parent's, nor at exit.
    """

    def __init__(self, owner: object, fn: Callable[..., object], *args: Any) -> None:
        _worker.start()
        self._watch: _Watch | None = _Watch(owner, _worker.queue.put)
        self._watch.work = (fn, args)
        _worker.watched[id(self._watch)] = self._watch

    @property
    def alive(self) -> bool:
        """Not called yet, nor dropped."""
        watch = self._watch
        return watch is not None and watch() is not None

    def __call__(self) -> None:
        work = self.forget()
        if work is not None:
            fn, args = work
            fn(*args)

    def forget(self) -> _Work | None:
        """Nothing is to be done any more; answers what was."""
        watch, self._watch = self._watch, None
        if watch is None or _worker.watched.pop(id(watch), None) is None:
            return None
        return watch.work


def settle() -> None:
    """Wait a little until what was dropped before is tidied up, and has given up its pins.

    For who looks at pins next. Not to be called with a lock or inside a read of status.db.
    """
    _worker.settle()


def _after_fork_in_child() -> None:
    global _worker
    _worker = _Worker()


os.register_at_fork(after_in_child=_after_fork_in_child)
