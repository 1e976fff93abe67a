"""How often and after what pause `run` tries a transaction again."""

from __future__ import annotations

import random
from typing import Any, Final

from txnkv.errors import TransactionLockedError, TxnkvError
from txnkv.instance import Instance

DEFAULTS: Final[dict[str, Any]] = {
    "timeout": 60.0,
    "isolation": "snapshot",
    "locking": "optimistic",
    "keepalive": True,
}
"""The options of `new_transaction`."""

_FIRST: Final = 0.0005
_FIRST_AT_A_LOCK: Final = 0.002
"""Seconds, doubled with every attempt: a lock is held for longer than a commit takes."""
_LONGEST: Final = 0.5


class Retries:
    """Counts attempts.

    Args:
        instance: whose metrics count them.
        attempts: how many there may be.
    """

    def __init__(self, instance: Instance, attempts: int) -> None:
        if attempts < 1:
            raise ValueError(f"attempts is at least 1, not {attempts}")
        self._metrics = instance.coordinator.metrics
        self._left = attempts
        self._made = 0

    def pause(self, error: TxnkvError, *, retriable: bool) -> float:
        """Seconds to wait before the next attempt.

        Args:
            error: that of the attempt that failed.
            retriable: whether another may succeed.

        Raises:
            `error`, when there is to be no other attempt.
        """
        self._left -= 1
        self._made += 1
        if not retriable or self._left == 0:
            raise error
        self._metrics.retries.add()
        first = _FIRST_AT_A_LOCK if isinstance(error, TransactionLockedError) else _FIRST
        pause: float = min(first * 2**self._made, _LONGEST)
        return pause * random.uniform(0.5, 1.5)
