"""The right of way among transactions that lose to others again and again.

Of two that write a key, the first to commit wins, and begins its next one at once. Beside it, one
that comes back a moment later finds another commit since its snapshot, however often it tries. So
after a few conflicts it takes the right of way: those that begin, in all processes, wait until its
attempt has ended, or until LEASE has passed.

    winner      C  C  C  C  C           waits   C  C
    loser        x  x   x   takes it    C

It is a word of the runtime: the monotonic microsecond until which somebody has it, 0 for nobody.
Nothing rests on it. Two may take it at once, of whom one loses again; who dies with it keeps others
for LEASE; who begins without a look at it goes on; who needs longer than LEASE goes without it.
"""

from __future__ import annotations

import threading
import time
from typing import Final

from txnkv.storage.clocks import clock
from txnkv.storage.locks import new_lock
from txnkv.storage.runtime import Runtime
from txnkv.storage.threads import caller

CONFLICTS: Final = 2
"""After so many the next attempt has the right of way."""
LEASE: Final = 50_000
"""Microseconds, for an attempt and for those that have begun before it."""
_LOOK: Final = 0.0002


class RightOfWay:
    """The right of way in one store. Shared by threads."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.line = new_lock()  # the first of a process looks, the others stand behind it
        self.had: tuple[int, int | None] | None = None  # until when, in which thread of this one


class Contender:
    """A piece of work that is tried until it wins."""

    def __init__(self, way: RightOfWay) -> None:
        self._way = way
        self._conflicts = self._until = 0
        self._over = False

    def lost(self) -> None:
        """The last attempt ended with a conflict."""
        self._conflicts += 1
        # An attempt that is longer than a lease is not helped, and all others wait.
        self._over = self._over or 0 < self._until <= clock.monotonic_micros()

    @property
    def blocked(self) -> bool:
        """Others have the right of way."""
        until = self._way.runtime.way_until
        if until == 0 or until == self._until or (until, caller()) == self._way.had:
            return False
        now = clock.monotonic_micros()
        return now < until <= now + LEASE  # more than that away: the clock of a test went back

    def wait(self) -> None:
        """Wait while others have it, LEASE at most."""
        if self.blocked and not getattr(_here, "has_others_to_do", False):
            give_up = time.monotonic() + LEASE / 1e6
            with self._way.line:
                while self.blocked and time.monotonic() < give_up:
                    time.sleep(_LOOK)

    def take(self, thread: int | None = None) -> bool:
        """At the beginning of an attempt: take it when it is time, or have it for longer.

        Args:
            thread: in which the attempt is made: what begins there meanwhile does not wait for it.
                None: in no one of them.

        Returns:
            Whether it is had.
        """
        if self._over or self._conflicts < CONFLICTS or self.blocked:
            return False
        self._until = self._way.runtime.way_until = clock.monotonic_micros() + LEASE
        self._way.had = self._until, thread
        return True

    def end(self) -> None:
        """It is done, or given up: let others go on. Again is harmless, and the store may be
        closed.
        """
        self._over = True
        if self._until:
            self._way.runtime.end_way(self._until)


def has_others_to_do() -> None:
    """This thread serves many, and one of them may have the right of way: it does not wait."""
    _here.has_others_to_do = True


_here: Final = threading.local()
