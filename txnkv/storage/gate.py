"""A gate that many may hold at once, or one alone after the others have left.

    with gate.use():            many threads, and again in the same thread
    with gate.drained():        one thread, when nobody uses the gate; newcomers wait

A thread that uses the gate may enter again while another waits to drain it: if it had to wait
for the drain, and the drain for it, neither would go on. A thread that uses the gate cannot
drain it, for the same reason: that is a RuntimeError at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Depth(threading.local):
    uses = 0


class SharedGate:
    """Shared by users, drained by whoever must be alone."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all users: for a forked child, in which their threads do not exist."""
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._users = 0
        self._draining = False
        self._depth = _Depth()

    def __enter__(self) -> None:
        self.enter()

    def __exit__(self, *_: object) -> None:
        self.leave()

    def use(self) -> SharedGate:
        """`with gate.use():` holds the gate with others."""
        return self

    @property
    def in_use_here(self) -> bool:
        """True when this thread uses the gate."""
        return self._depth.uses > 0

    def enter(self) -> None:
        """Begins a use; waits while another thread drains, unless this thread is inside."""
        depth = self._depth
        if depth.uses == 0:
            with self._lock:  # the condition's, without the calls that lead to it
                while self._draining:
                    self._changed.wait()
                self._users += 1
        depth.uses += 1

    def leave(self) -> None:
        """Ends the latest use of this thread."""
        depth = self._depth
        depth.uses -= 1
        if depth.uses == 0:
            with self._lock:
                self._users -= 1
                if self._draining and self._users == 0:
                    self._changed.notify_all()

    def drain(self, timeout: float | None = None) -> bool:
        """Waits until nobody uses the gate, then keeps all out until `reopen()`.

        Args:
            timeout: seconds to wait for the users, None for ever, 0 to try.

        Returns:
            False when users were left at the end of the timeout; the gate is as before.

        Raises:
            RuntimeError: this thread uses the gate and would wait for itself.
        """
        if self.in_use_here:
            raise RuntimeError("a thread that uses a gate cannot drain it; leave it first")
        with self._changed:
            if not self._changed.wait_for(lambda: not self._draining, timeout):
                return False
            self._draining = True
            if self._changed.wait_for(lambda: self._users == 0, timeout):
                return True
            self._draining = False
            self._changed.notify_all()
            return False

    def reopen(self) -> None:
        """Lets users in again after `drain()`."""
        with self._changed:
            self._draining = False
            self._changed.notify_all()

    @contextmanager
    def drained(self) -> Iterator[None]:
        """Alone inside the `with` block."""
        self.drain()
        try:
            yield
        finally:
            self.reopen()
