"""The transactions of one `client.run`, one after the other until one commits."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from txnkv.coordinator import Timestamp, TxnState
from txnkv.errors import CommitOutcomeUnknownError, TxnkvError
from txnkv.topics import Hold
from txnkv.transaction import DEFAULTS, Connection, Retries, Transaction

T = TypeVar("T")


class Attempts:
    """The transactions of one `run`. Each has the age of the first, so that wait-die cannot starve
    it, and what one of them acknowledged is delivered to nobody else until `close`.

    Args:
        connection: to the store.
        options: of `new_transaction`.
    """

    def __init__(self, connection: Connection, options: dict[str, Any]) -> None:
        topics = connection.instance.topics
        self._connection = connection
        self._options = DEFAULTS | options
        self._hold = Hold(topics.store, topics.local)
        self._age: Timestamp | None = None

    def begin(self, spare: int | None = None) -> Transaction:
        """The next one.

        Args:
            spare: the id to take, as `Transaction.begin` has it.
        """
        options = self._options
        txn = Transaction.begin(self._connection, **options, age_ts=self._age, spare=spare)
        txn.context.hold = self._hold
        self._age = txn.age
        return txn

    def close(self) -> None:
        """The run is over. Twice is fine."""
        self._hold.release()


def run(
    attempts: Attempts,
    outcome: Callable[[int], TxnState],
    fn: Callable[[Transaction], T],
    retries: Retries,
) -> T:
    """Call `fn(txn)` and commit, until that succeeds or `retries` says that it is enough.

    Args:
        attempts: give the transactions.
        outcome: tells how a transaction has ended whose commit broke off.
    """
    while True:
        txn = attempts.begin()
        try:
            with txn:
                result = fn(txn)
            return result
        except CommitOutcomeUnknownError as error:
            if not error.txn_id:
                raise  # nothing to ask by
            if outcome(error.txn_id) is TxnState.COMMITTED:
                return result
            pause = retries.pause(error, retriable=True)
        except TxnkvError as error:
            pause = retries.pause(error, retriable=error.retriable)
        time.sleep(pause)
