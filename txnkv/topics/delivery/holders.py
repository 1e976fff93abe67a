"""The holders of a subscription's messages, for people who wait for one.

    leased     delivered to a consumer that has not acknowledged it
    free       delivered before, and nobody's now: given back, or its lease ran out
    pending    acknowledged by an open transaction
    kept       acknowledged by a failed attempt of a `client.run` that goes on

An exclusive subscription without counted deliveries has no leases: what its one consumer has is in
the memory of that process, with the acks of small transactions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import apsw

from txnkv.coordinator import TxnId, one
from txnkv.storage import clock
from txnkv.topics.acks import SubscriptionInfo
from txnkv.topics.topics import Topics


@dataclass(frozen=True)
class HeldMessages:
    """Messages of a partition that somebody has.

    Attributes:
        partition: its number.
        first: offset of the first.
        last: behind the last.
        state: "leased", "free", "pending" or "kept".
        pid: of the process; None: nobody's, or a transaction's that others may join.
        txn_id: of the transaction, where an ack is pending.
        deliveries: how often it was delivered; None where nobody counts.
        seconds_left: until the lease runs out; None: it does not.
    """

    partition: int
    first: int
    last: int
    state: str
    pid: int | None
    txn_id: TxnId | None = None
    deliveries: int | None = None
    seconds_left: float | None = None


@dataclass(frozen=True)
class Holders:
    """The holders of a subscription's messages.

    Attributes:
        consumer_pid: the process of its one consumer; None: there is none, or it is shared.
        held: by partition and offset.
    """

    consumer_pid: int | None
    held: tuple[HeldMessages, ...]


def look(topics: Topics, info: SubscriptionInfo) -> Holders:
    """The holders now, as status.db has them."""
    with topics.store.status.read() as cur:
        slot, start = one(
            cur,
            "SELECT max(slot), max(start) FROM subscriptions WHERE id = ?",
            (info.id,),
        )
        held = [*_leased(topics, cur, info), *_pending(topics, cur, info)]
    held.sort(key=lambda each: (each.partition, each.first))
    return Holders(_pid(topics, slot, start), tuple(held))


def _pid(topics: Topics, slot: int | None, start: int | None) -> int | None:
    runtime = topics.store.runtime
    if slot is None or start is None or not runtime.slot_alive(slot, start):
        return None
    return runtime.slot_owner(slot)


def _leased(topics: Topics, cur: apsw.Cursor, info: SubscriptionInfo) -> list[HeldMessages]:
    now = clock.monotonic_micros()
    found: list[Any] = cur.execute(
        "SELECT partition_id, message, slot, start, until, deliveries FROM leases "
        "WHERE subscription_id = ? AND until IS NOT NULL",
        (info.id,),
    ).fetchall()
    held = []
    for partition_id, offset, slot, start, until, deliveries in found:
        pid = _pid(topics, slot, start) if until > now else None
        ends = pid is not None and info.lease_time is not None
        held.append(
            HeldMessages(
                info.topic.partitions.index(partition_id),
                offset,
                offset + 1,
                "free" if pid is None else "leased",
                pid,
                deliveries=deliveries,
                seconds_left=(until - now) / 1e6 if ends else None,
            )
        )
    return held


def _pending(topics: Topics, cur: apsw.Cursor, info: SubscriptionInfo) -> list[HeldMessages]:
    found: list[Any] = cur.execute(
        "SELECT partition_id, max(first, 0), last, txn_id, stored, slot, start FROM pending_acks "
        "WHERE subscription_id = ?",
        (info.id,),
    ).fetchall()
    return [
        HeldMessages(
            info.topic.partitions.index(partition_id),
            first,
            last,
            "pending" if txn_id > 0 else "kept",
            None if stored else _pid(topics, slot, start),
            topics.coordinator.txn_id(abs(txn_id)),
        )
        for partition_id, first, last, txn_id, stored, slot, start in found
    ]
