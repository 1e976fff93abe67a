"""The holders of a subscription's leases and acks, and whether they live.

What the dead had shows in no change number. So a consumer that waits looks now and then whether
those whom it knows to have something still live, which costs no read; who they are it reads when
the store has changed since.
"""

from __future__ import annotations

from typing import Any, Final

import apsw

from txnkv.coordinator.query import one
from txnkv.storage.seam import clock
from txnkv.storage.store import Store
from txnkv.topics.redelivery import FOR_EVER

_APART: Final = 200_000
"""Microseconds between two looks."""


class LeaseHolders:
    """The holders of leases and acks of one subscription, for one of its consumers.

    Args:
        store: the store of the subscription.
        subscription_id: its id.
    """

    def __init__(self, store: Store, subscription_id: int) -> None:
        self._store = store
        self._id = subscription_id
        self._looked = 0
        self._dead = False
        self._number: int | None = None
        self._holders: list[tuple[int, int]] = []
        self._expires = FOR_EVER

    def have_died(self) -> bool:
        """Tell whether a holder died, or a deadline passed, whose leases or acks are not free yet.

        Looks at most so often; what it saw stands until `freed`.
        """
        now = clock.monotonic_micros()
        if self._dead or now < self._looked + _APART:
            return self._dead
        self._looked = now
        number = self._store.status.change_number()
        if number is None or number != self._number:
            with self._store.status.read(durable=False) as cur:
                self._read(cur)
            self._number = number
        alive = self._store.runtime.slot_alive
        self._dead = now > self._expires or not all(alive(*holder) for holder in self._holders)
        return self._dead

    def freed(self) -> None:
        """Note that what the dead had is free."""
        self._dead = False

    def _read(self, cur: apsw.Cursor) -> None:
        found: list[Any] = cur.execute(
            "SELECT slot, start FROM leases WHERE subscription_id = ?1 AND slot IS NOT NULL "
            "AND until IS NOT NULL "
            "UNION SELECT slot, start FROM pending_acks WHERE subscription_id = ?1 AND NOT stored",
            (self._id,),
        ).fetchall()
        self._holders = [(slot, start) for slot, start in found]
        (expires,) = one(
            cur,
            "SELECT min(expires) FROM pending_acks WHERE subscription_id = ? AND NOT stored",
            (self._id,),
        )
        self._expires = FOR_EVER if expires is None else expires


def free_dead(cur: apsw.Cursor, store: Store, subscription_id: int) -> None:
    """Let the leases of dead processes be anybody's."""
    found: list[Any] = cur.execute(
        "SELECT DISTINCT slot, start FROM leases WHERE subscription_id = ? "
        "AND slot IS NOT NULL AND until IS NOT NULL",
        (subscription_id,),
    ).fetchall()
    for slot, start in found:
        if not store.runtime.slot_alive(slot, start):
            cur.execute(
                "UPDATE leases SET slot = NULL, until = 0 WHERE subscription_id = ? "
                "AND slot = ? AND start = ? AND until IS NOT NULL",
                (subscription_id, slot, start),
            )
