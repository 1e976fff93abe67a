"""Flush mode auto_background: a thread of the library flushes, when much waits or after a while."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import Future
from typing import Final, Protocol

from txnkv.instance import Instance
from txnkv.transaction.session_buffer import Room

_BACKGROUND_ROWS: Final = 8192
_BACKGROUND_SECONDS: Final = 1.0
_BUFFERS: Final = 4
"""So many times `_BACKGROUND_ROWS` may wait; who adds more waits for the thread that flushes."""


class Buffered(Protocol):
    """A session, as the thread that flushes it sees it."""

    @property
    def has_pending(self) -> bool: ...

    def waiting(self) -> int:
        """Return the number of rows, messages and acks that wait."""

    def flush_untold(self) -> None:
        """Flush; what is refused is told later."""


class Background:
    """The flushes of one session. An error of one waits for the session's next call.

    Args:
        instance: the store's.
        room: the session's.
        lock: held while rows are added and taken.
    """

    def __init__(self, instance: Instance, room: Room, lock: threading.RLock) -> None:
        self._instance = instance
        self._room = room
        self._lock = lock
        self._flushing: Future[None] | None = None
        self._timer: threading.Timer | None = None

    def added(self, session: Buffered) -> None:
        """Flush soon; wait if more is kept than may be.

        Raises:
            What the last flush has raised.
        """
        with self._lock:
            waiting = session.waiting()
            full = waiting >= _BUFFERS * _BACKGROUND_ROWS or self._room.full
            if self._is_much(waiting):
                self._start(session)
            else:
                self._start_timer(session)
            flushing = self._flushing
        if full and flushing is not None:
            flushing.exception()

    def wait(self) -> None:
        """Wait for the flush that is on its way.

        Raises:
            What it has raised.
        """
        flushing = self._flushing
        if flushing is not None:
            flushing.exception()
            self._take_error()

    def cancel(self) -> None:
        """Flush no more by time, until rows are added."""
        with self._lock:
            timer, self._timer = self._timer, None
            if timer is not None:
                timer.cancel()

    def _is_much(self, waiting: int) -> bool:
        return waiting >= _BACKGROUND_ROWS or self._room.half_full

    def _start_timer(self, session: Buffered) -> None:
        if self._timer is not None:
            return
        known = weakref.ref(session)  # an abandoned session is not flushed

        def tick() -> None:
            session = known()
            if session is not None:
                self._on_timer(session)

        self._timer = threading.Timer(_BACKGROUND_SECONDS, tick)
        self._timer.daemon = True
        self._timer.start()

    def _on_timer(self, session: Buffered) -> None:
        with self._lock:
            if self._timer is None:
                return  # cancelled too late to stop it
            self._timer = None
            last = self._flushing
            if last is not None and last.done() and last.exception() is not None:
                return  # the caller is told at the next call
            if session.has_pending:
                self._start(session)

    def _start(self, session: Buffered) -> None:
        if self._flushing is not None and not self._flushing.done():
            return  # it looks again when it has done what it has
        self._take_error()
        self._flushing = self._instance.pool.submit(self._flush, session)

    def _flush(self, session: Buffered) -> None:
        while True:
            session.flush_untold()
            with self._lock:
                if not self._is_much(session.waiting()):
                    if session.has_pending:
                        self._start_timer(session)
                    return

    def _take_error(self) -> None:
        flushing, self._flushing = self._flushing, None
        if flushing is not None:
            flushing.result()
