"""Waiting for messages without I/O: the change number says whether there is anything to look at.

    consumer    mark()  look: nothing   sleep 1 ms, 2 ms, 4 ms ... 10 ms   wait() -> look again

Two things do not show in the number. A commit can be seen before it is durable: then readers
leave it out, and the log of commits asks the disk until it is. And offsets are given before
their batches are in LMDB: a reader that saw such (`pending`) looks at each step.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from txnkv.coordinator.ids import Timestamp
from txnkv.storage.seam import clock

if TYPE_CHECKING:
    from collections.abc import Callable

    from txnkv.topics.engine import TopicEngine

_FIRST: Final = 0.001
_LONGEST: Final = 0.010


def deadline(timeout: float | None) -> int | None:
    """When a wait that begins now is over, in monotonic microseconds; None for never."""
    return None if timeout is None else clock.monotonic_micros() + int(timeout * 1e6)


class Waiting:
    """One wait for something new in a store.

    Args:
        engine: of the topics.
        until: from `deadline`.
        check: called at each step; what it raises ends the wait.
    """

    def __init__(
        self, engine: TopicEngine, until: int | None, check: Callable[[], object] = lambda: None
    ) -> None:
        self._engine = engine
        self._runtime = engine.store.runtime
        self._until = until
        self._check = check
        self._seen = (0, Timestamp(0))
        self._step = _FIRST

    @property
    def is_over(self) -> bool:
        """Whether the time is over."""
        return self._until is not None and clock.monotonic_micros() >= self._until

    def mark(self) -> None:
        """Before a look: what it finds, or does not, is as of now or later."""
        self._seen = (self._runtime.change_word(), self._engine.log.latest())

    def wait(self, pending: bool) -> bool:
        """Until there may be something new since `mark`.

        Args:
            pending: the look saw signs of messages that are on their way.

        Returns:
            False when the time is over.
        """
        while not self.is_over:
            step = self._step
            if self._until is not None:
                step = min(step, max(self._until - clock.monotonic_micros(), 0) / 1e6)
            time.sleep(step)
            self._step = min(self._step * 2, _LONGEST)
            self._check()
            if pending or self._is_new():
                return True
        return False

    def _is_new(self) -> bool:
        word, latest = self._seen
        now = self._runtime.change_word()
        return now != word or now & 1 == 1 or self._engine.log.latest() != latest
