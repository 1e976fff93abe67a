"""Threads that wait at the start of each round with their stores open, and work when it begins."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

PATIENCE = 600.0
"""Seconds after which waiting threads give up."""

H = TypeVar("H")


class Crew(Generic[H]):
    """Threads with a handle each.

    Args:
        count: of threads.
        handle: makes a thread's handle, in that thread.
        work: given the handle, the thread's number and the round's number, does what is not
            timed and returns what is.
    """

    def __init__(
        self,
        count: int,
        handle: Callable[[], AbstractContextManager[H]],
        work: Callable[[H, int, int], Callable[[], Any]],
    ) -> None:
        self._handle, self._work = handle, work
        self._stopped = False
        self._ready, self._done = (threading.Barrier(count + 1, timeout=PATIENCE) for _ in range(2))
        self._pool = ThreadPoolExecutor(count)
        self._futures = [self._pool.submit(self._run, number) for number in range(count)]

    def round(self) -> None:
        """All do one round's work."""
        try:
            self._ready.wait()
            self._done.wait()
        except threading.BrokenBarrierError:
            for error in self._errors():
                raise error from None
            raise

    def _run(self, number: int) -> None:
        try:
            with self._handle() as handle:
                for done in itertools.count():
                    work = self._work(handle, number, done)
                    self._ready.wait()
                    if self._stopped:
                        return
                    work()
                    self._done.wait()
        except BaseException:
            self._ready.abort()
            self._done.abort()
            raise

    def _errors(self) -> Iterator[BaseException]:
        """Why threads failed; not that they heard of it."""
        for future in self._futures:
            error = future.exception()
            if error is not None and not isinstance(error, threading.BrokenBarrierError):
                yield error

    def __enter__(self) -> Crew[H]:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stopped = True
        if kind is None:
            self._ready.wait()
        else:
            self._ready.abort()
            self._done.abort()
        self._pool.shutdown()
