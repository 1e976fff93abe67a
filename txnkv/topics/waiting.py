"""Waiting for messages without I/O: the change number says whether there is anything to look at.

    consumer    mark()  look: nothing   sleep 1 ms, 2 ms, 4 ms ... 10 ms   wait() -> look again
    others      mark()  look: nothing   asleep, until the first wakes them

Small commits of this process cut a sleep short, as soon as they are durable; those of others are
found when it is over.

Two things do not show in the number. A commit can be seen before it is durable: then readers
leave it out, and the log of commits asks the disk until it is. And offsets are given before
their batches are in LMDB: a reader that saw such (`pending`) looks at each step.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Final

from txnkv.coordinator import CommitLog, Timestamp
from txnkv.errors import require_number
from txnkv.storage import Runtime, clock, new_baton, new_lock, pass_baton

_FIRST: Final = 0.001
_LONGEST: Final = 0.010
_ASLEEP: Final = 5.0
"""Seconds after which one that sleeps looks by itself, should the leader have been stopped."""
_ROUND: Final = 100_000
"""Microseconds between two looks for what no change shows: leases that run out, the dead."""


def require_time(timeout: object) -> None:
    """Refuse a `timeout` with TypeError that is no number, with ValueError that is nan."""
    require_number("timeout", timeout)
    if timeout != timeout:
        raise ValueError(f"timeout is a number of seconds or None, not {timeout!r}")


def deadline(timeout: float | None) -> int | None:
    """Return when a wait that begins now is over, in monotonic microseconds; None for never."""
    if timeout is None or timeout == math.inf:
        return None
    require_time(timeout)
    return clock.monotonic_micros() + int(min(max(timeout, 0.0), 1e9) * 1e6)


class Watch:
    """All waits of one process for one store: one of them looks, for itself and the others.

    The leader sleeps in steps; the others sleep until it wakes them. When it has what it waited
    for, another leads. So a hundred that wait cost what one does.

    Args:
        runtime: has the change number.
        log: asks the disk until what was seen is durable.

    Attributes:
        next_round: when all are asked whether something else than a change concerns them, in
            monotonic microseconds.
    """

    def __init__(self, runtime: Runtime, log: CommitLog) -> None:
        self._runtime = runtime
        self._log = log
        self._lock = new_lock()
        self._led = False
        self.next_round = 0
        self._asleep: dict[Waiting, threading.Lock] = {}

    def nap(self, waiting: Waiting, seconds: float) -> None:
        """Sleep for so long, or until a small commit of this process is durable."""
        baton = self._log.sleepers[waiting] = new_baton()
        try:
            if not waiting.is_committed():  # else it was before the log knew of this one
                baton.acquire(timeout=seconds)
        finally:
            self._log.sleepers.pop(waiting, None)

    def lead(self) -> bool:
        """Look for all from now on, unless another does."""
        with self._lock:
            if self._led:
                return False
            self._led = True
            return True

    def leave(self, leads: bool) -> None:
        """A wait ends: somebody else is to lead."""
        with self._lock:
            self._led = self._led and not leads
            if not self._led and self._asleep:
                pass_baton(next(iter(self._asleep.values())))

    def sleep(self, waiting: Waiting, seconds: float) -> None:
        """Until the leader wakes it, or for so long."""
        baton = new_baton()
        with self._lock:
            if not self._led:
                return
            self._asleep[waiting] = baton
        try:
            if not waiting.is_new():  # else it was before the leader knew of this one
                baton.acquire(timeout=seconds)
        finally:
            with self._lock:
                del self._asleep[waiting]

    def now(self) -> tuple[int, Timestamp]:
        """Return what changes with the store."""
        return self._runtime.change_word(), self._log.latest()

    def wake(self, among: Callable[[Waiting], bool]) -> None:
        """Wake those that are concerned."""
        with self._lock:
            asleep = list(self._asleep.items())
        for waiting, baton in asleep:
            if among(waiting):
                pass_baton(baton)


class Waiting:
    """One wait for something new in a store.

    Args:
        watch: of the store.
        until: from `deadline`.
        check: called at each step, also by the one that looks for all; what it raises ends the
            wait.
    """

    def __init__(
        self, watch: Watch, until: int | None, check: Callable[[], object] = lambda: None
    ) -> None:
        self._watch = watch
        self._until = until
        self._check = check
        self._seen = (0, Timestamp(0))
        self._step = _FIRST

    @property
    def is_over(self) -> bool:
        """Tell whether the time is over."""
        return self._until is not None and clock.monotonic_micros() >= self._until

    def mark(self) -> None:
        """Before a look: what it finds, or does not, is as of now or later."""
        self._seen = self._watch.now()

    def wait(self, pending: bool) -> bool:
        """Until there may be something new since `mark`.

        Args:
            pending: the look saw signs of messages that are on their way.

        Returns:
            False when the time is over.
        """
        leads = False
        try:
            while not self.is_over:
                leads = leads or self._watch.lead()
                if leads or pending:
                    self._pause(leads)
                else:
                    self._watch.sleep(self, self._at_most(_ASLEEP))
                self._check()
                if pending or self.is_new():
                    return True
            return False
        finally:
            self._watch.leave(leads)

    def is_new(self) -> bool:
        """Tell whether the store has changed since `mark`."""
        now = self._watch.now()
        return now != self._seen or now[0] & 1 == 1

    def is_committed(self) -> bool:
        """Tell whether something became durable since `mark`, that a small commit changed."""
        return self._watch.now()[1] != self._seen[1]

    def _pause(self, leads: bool) -> None:
        self._watch.nap(self, self._at_most(self._step))
        self._step = min(self._step * 2, _LONGEST)
        if leads and self.is_new():
            self._watch.wake(lambda other: True)
        elif leads and clock.monotonic_micros() >= self._watch.next_round:
            self._watch.next_round = clock.monotonic_micros() + _ROUND
            self._watch.wake(Waiting._is_stirred)

    def _is_stirred(self) -> bool:
        try:
            self._check()
        except Exception:
            return True
        return False

    def _at_most(self, seconds: float) -> float:
        if self._until is None:
            return seconds
        return min(seconds, max(self._until - clock.monotonic_micros(), 0) / 1e6)
