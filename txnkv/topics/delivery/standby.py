"""Failover: consumers that wait for the place of the one that has it.

    active      reads and acknowledges, as the consumer of an exclusive subscription
    standby     is given nothing, and looks whether the place is free: when something is written in
                the store (one that closes writes), and now and then (one that is killed does not)

Who looks first has the place then. It begins at the cursors, as any new consumer does.
"""

from __future__ import annotations

from typing import Final

from txnkv.storage import clock
from txnkv.topics.delivery.redelivery import Delivery

_LOOK: Final = 200_000
"""Microseconds between two looks for a consumer that died."""


class Standby:
    """The reader of a consumer without the place: there is nothing to be read."""

    pending = False

    def __init__(self) -> None:
        self._next_look = 0

    def stirred(self) -> bool:
        """The consumer that has the place may have died."""
        return clock.monotonic_micros() >= self._next_look

    def take(self, most: int) -> list[Delivery]:
        """Nothing; the place was looked at just now."""
        self._next_look = clock.monotonic_micros() + _LOOK
        return []

    def seek(self, number: int, offset: int) -> None:
        """Nothing was read."""

    def put_back(self, given: list[Delivery]) -> None:
        """Nothing was given."""
