"""The coordinator's record of transactions: PIP-31's TransactionMetadataStore.

To drive a transaction takes these few steps and no others. Each is atomic, and is refused when the
transaction is not in the state that the step is for:

    new_transaction                     -            -> OPEN
    add_partitions, add_subscriptions   OPEN            before the first use of each
    update_status(expected, new)        expected     -> new, if the rules know such a move
    timeouts                            OPEN            those whose time is over

They are kept in status.db. A step of the protocol has more in it (locks are released, markers take
their offsets), so it can be had `within` a transaction of that database: all of it then happens,
or nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import apsw

from txnkv.coordinator import status_table
from txnkv.coordinator.ids import Timestamp
from txnkv.coordinator.status_table import MOVES, TxnRow, TxnState
from txnkv.errors import InvalidTxnStateError
from txnkv.storage import StatusDatabase, boot_id, clock

PARTITION: Final = "partition"
"""Kind of the participants that are partitions of topics."""

SUBSCRIPTION: Final = "subscription"
"""Kind of the participants that are subscriptions."""


def past_timeout(row: TxnRow) -> bool:
    """Return True when the time that a transaction asked for is over."""
    if row.deadline is None:
        return False
    if row.boot == boot_id():  # as of each operation of a transaction
        return clock.monotonic_micros() > row.deadline
    return late_by(row) > 0


def late_by(row: TxnRow) -> int:
    """Microseconds since the time is over that a transaction asked for; negative before that."""
    if row.deadline is None or row.timeout is None:
        return -1
    if row.boot == boot_id():
        return clock.monotonic_micros() - row.deadline
    # The monotonic clock began anew.
    return clock.now_micros() - row.begin_ts.micros - row.timeout


class TransactionMetadataStore:
    """The record of transactions and of their participants, in status.db. Shared by threads.

    Args:
        status: the database.
        cur: of a write of it that the caller has begun; each call is a transaction of its own
            without.
    """

    def __init__(self, status: StatusDatabase, cur: apsw.Cursor | None = None) -> None:
        self._status = status
        self._cur = cur

    def within(self, cur: apsw.Cursor) -> TransactionMetadataStore:
        """The same, inside of a transaction of status.db."""
        return TransactionMetadataStore(self._status, cur)

    @contextmanager
    def _reading(self) -> Iterator[apsw.Cursor]:
        if self._cur is not None:
            yield self._cur
        else:
            with self._status.read() as cur:
                yield cur

    @contextmanager
    def _writing(self) -> Iterator[apsw.Cursor]:
        if self._cur is not None:
            yield self._cur
        else:
            with self._status.write() as cur:
                yield cur

    def new_transaction(self, row: TxnRow) -> None:
        """Keep an OPEN transaction. Twice is harmless."""
        with self._writing() as cur:
            status_table.insert(cur, row)

    def get(self, txn_id: int) -> TxnRow:
        """A transaction.

        Raises:
            TxnNotFoundError: there is none of this id.
        """
        with self._reading() as cur:
            return status_table.get(cur, txn_id)

    def participants(self, txn_id: int) -> dict[str, list[int]]:
        """Return the participants of a transaction: ids by kind, each once, ascending."""
        with self._reading() as cur:
            return status_table.participants(cur, txn_id)

    def add_partitions(self, txn_id: int, ids: Iterable[int]) -> None:
        """Partitions that messages go to, before the first does. Twice is harmless.

        Raises:
            TxnNotFoundError: there is no such transaction.
            InvalidTxnStateError: it is not OPEN; nothing was added.
        """
        self._add(txn_id, PARTITION, ids, "send messages")

    def add_subscriptions(self, txn_id: int, ids: Iterable[int]) -> None:
        """Subscriptions that are acknowledged on, before the first ack. As `add_partitions`."""
        self._add(txn_id, SUBSCRIPTION, ids, "acknowledge messages")

    def _add(self, txn_id: int, kind: str, ids: Iterable[int], what: str) -> None:
        with self._writing() as cur:
            status_table.get_open(cur, txn_id, what)
            status_table.register_participant(cur, txn_id, kind, ids)

    def update_status(
        self,
        txn_id: int,
        expected: TxnState,
        new: TxnState,
        *,
        commit_ts: Timestamp | None = None,
        reason: str | None = None,
        error: str | None = None,
    ) -> TxnRow:
        """Compare and set the state; the transaction afterwards.

        Raises:
            TxnNotFoundError: there is no such transaction.
            InvalidTxnStateError: its state is another one, or no transaction moves so; it is
                unchanged.
        """
        with self._writing() as cur:
            row = status_table.get(cur, txn_id)
            if row.state is not expected:
                raise InvalidTxnStateError(
                    f"cannot make transaction {txn_id} {new.name}: it is "
                    f"{row.describe_state()}, not {expected.name}"
                )
            # Who has participants and no timestamp for them must ask them first.
            straight = expected is TxnState.OPEN and new is TxnState.COMMITTED
            unasked = straight and commit_ts is None and status_table.participants(cur, txn_id)
            if new not in MOVES[expected] or unasked:
                raise InvalidTxnStateError(
                    f"no transaction goes from {expected.name} to {new.name}"
                    + (" past its participants" if unasked else "")
                )
            status_table.move(
                cur, txn_id, expected, new, commit_ts=commit_ts, reason=reason, error=error
            )
            return status_table.get(cur, txn_id)

    def timeouts(self) -> list[TxnRow]:
        """OPEN transactions that are past their own timeout, by id."""
        with self._reading() as cur:
            rows = status_table.select(cur, [TxnState.OPEN])
        return [row for row in rows if past_timeout(row)]
