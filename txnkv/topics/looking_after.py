"""The leader's work for topics, done now and then: retention, idle producers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from txnkv.coordinator.lease import Lease
from txnkv.storage.seam import clock
from txnkv.topics import producers, retention

if TYPE_CHECKING:
    from txnkv.topics.engine import TopicEngine

EVERY: Final = 60 * 1_000_000
"""Microseconds between two looks."""


class LookingAfter:
    """The leader's sweep, for `TopicEngine.add_sweep`."""

    def __init__(self, engine: TopicEngine) -> None:
        self._engine = engine
        self._last: int | None = None

    def sweep(self, lease: Lease) -> None:
        """Do the work, unless it was done less than a minute ago."""
        now = clock.monotonic_micros()
        if self._last is not None and now - self._last < EVERY:
            return
        retention.enforce_all(self._engine, retention.checked_by(self._engine, lease))
        forget_idle(self._engine, lease)
        self._last = now


def forget_idle(engine: TopicEngine, lease: Lease) -> int:
    """Forget producers that nobody used for long. Answers how many rows went."""
    now = clock.now_micros()
    gone = 0
    while True:
        with engine.store.status.read() as cur:
            if not producers.anything_idle(cur, now):
                return gone
        with engine.store.status.write() as cur:
            lease.confirm(cur)
            found = producers.sweep(cur, now)
        gone += found
        if not found:
            return gone
