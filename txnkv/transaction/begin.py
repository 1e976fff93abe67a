"""The begin of a transaction, in memory, without any I/O; and how often `run` begins another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias, TypedDict, get_args

from txnkv.coordinator import LOCK_TIMEOUT, Timestamp, stamp_of
from txnkv.errors import (
    TransactionConflictError,
    TransactionLockedError,
    require_number,
)
from txnkv.metrics import Metrics
from txnkv.storage import back_off, clock
from txnkv.tables import history
from txnkv.transaction.connection import Connection
from txnkv.transaction.context import TxnContext
from txnkv.transaction.instance import Instance

Isolation: TypeAlias = Literal["snapshot", "serializable"]
Locking: TypeAlias = Literal["optimistic", "partition"]
FlushMode: TypeAlias = Literal["manual", "auto_background", "auto_sync"]


class TransactionOptions(TypedDict, total=False):
    """The options of `Client.new_transaction`."""

    timeout: float | None
    isolation: Isolation
    locking: Locking
    keepalive: bool
    lock_timeout: float
    name: str | None


ISOLATIONS: Final = get_args(Isolation)
LOCKINGS: Final = get_args(Locking)
FLUSH_MODES: Final = get_args(FlushMode)


def one_of(option: str, given: object, words: Sequence[str]) -> None:
    """Refuse what is none of the words that an option takes.

    Raises:
        ValueError: it is none.
    """
    if given not in words:
        raise ValueError(f"{option} is one of {', '.join(words)}, not {given!r}")


def require_client(client: object) -> None:
    """Refuse what is no client.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(client, Connection):
        raise TypeError(f"a client is what txnkv.connect(...) gives, not {type(client).__name__}")


def begin(
    instance: Instance,
    *,
    timeout: float | None,
    isolation: str,
    locking: str,
    keepalive: float,
    lock_timeout: float = LOCK_TIMEOUT,
    age_ts: Timestamp | None = None,
    transactional: bool = True,
    spare: int | None = None,
) -> TxnContext:
    """A new transaction at the latest snapshot, which stays pinned until its end. No I/O.

    Args:
        age_ts: it is as old for wait-die as one that began then; None: it is as old as it is.
        spare: the id to take, which was given before and not used.

    Raises:
        ValueError: an option makes no sense.
    """
    if isolation not in ISOLATIONS or locking not in LOCKINGS:
        one_of("isolation", isolation, ISOLATIONS)
        one_of("locking", locking, LOCKINGS)
    if timeout is not None:
        if timeout.__class__ is not float:  # else it takes a while to tell
            require_number("timeout", timeout)
        if not timeout > 0:
            raise ValueError(f"timeout is seconds above 0, or None, not {timeout!r}")
    if lock_timeout.__class__ is not float:
        require_number("lock_timeout", lock_timeout)
    if not lock_timeout >= 0:
        raise ValueError(f"lock_timeout is seconds, 0 or above, not {lock_timeout!r}")
    coordinator = instance.coordinator
    holding = history.hold(coordinator, spare)
    row = coordinator.begin(
        timeout=timeout,
        isolation=isolation,
        locking=locking,
        keepalive=keepalive,
        age_ts=age_ts,
        snapshot=stamp_of(holding.snapshot),
        txn_id=holding.txn_id,
    )
    context = TxnContext(instance, row, stored=False, transactional=transactional, holding=holding)
    context.lock_timeout = lock_timeout
    return context


DEFAULTS: Final[dict[str, Any]] = {
    "timeout": 60.0,
    "isolation": "snapshot",
    "locking": "optimistic",
    "keepalive": True,
    "lock_timeout": LOCK_TIMEOUT,
    "name": None,
}
"""The options of `new_transaction`."""

AT_ONCE: Final = 8
"""Conflicts that are followed by another attempt without a pause."""
_FIRST: Final = 0.0005
_FIRST_AT_A_LOCK: Final = 0.002
"""Seconds, doubled with every attempt: a lock is held for longer than a commit takes."""
DEADLINE: Final = 30.0
_LONGEST: Final = 0.5


class Retries:
    """Counts attempts and time.

    Args:
        metrics: count them.
        attempts: how many there may be; None for any number.
        deadline: seconds from now after which no other begins; None for never.
    """

    def __init__(self, metrics: Metrics, attempts: int | None, deadline: float | None) -> None:
        require_number("attempts", 1 if attempts is None else attempts, "attempts", whole=True)
        require_number("deadline", 0 if deadline is None else deadline)
        if attempts is not None and attempts < 1:
            raise ValueError(f"attempts is None or at least 1, not {attempts}")
        if deadline is not None and not deadline >= 0:
            raise ValueError(f"deadline is None or seconds, at least 0, not {deadline}")
        self._metrics = metrics
        self._attempts = attempts
        self._deadline = deadline
        self._made = 0
        self._began = clock.monotonic_micros()

    def pause(self, error: Exception) -> float:
        """Seconds to wait before the next attempt.

        Args:
            error: that of the attempt that failed; another one may succeed.

        Raises:
            `error`, when there is to be no other attempt.
        """
        self._made += 1
        passed = (clock.monotonic_micros() - self._began) / 1e6
        late = self._deadline is not None and passed >= self._deadline
        if late or self._made == self._attempts:
            error.add_note(
                f"run gave up after {self._made} attempts in {passed:.1f} s "
                f"(attempts={self._attempts}, deadline={self._deadline})"
            )
            raise error
        self._metrics.retries.add()
        tries = self._made
        if isinstance(error, TransactionConflictError):
            tries -= AT_ONCE  # what came first is committed: the next snapshot has it
        if tries < 1:
            return 0
        first = _FIRST_AT_A_LOCK if isinstance(error, TransactionLockedError) else _FIRST
        pause = back_off(tries, 2 * first, _LONGEST)
        return pause if self._deadline is None else min(pause, self._deadline - passed)
