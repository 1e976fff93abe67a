"""Subscriptions in status.db: making, finding and dropping them, and who has one to itself."""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

import apsw

from txnkv.coordinator.query import one
from txnkv.errors import TopicNotFoundError, UnavailableError
from txnkv.storage.seam import boot_id
from txnkv.storage.store import Store
from txnkv.topics import catalog, cursors
from txnkv.topics.catalog import TopicInfo
from txnkv.topics.subscription_info import EXCLUSIVE, SHARED, SubscriptionInfo

OPTIONS: Final = ("lease_seconds", "max_deliveries", "dead_letter", "redelivery_delay")


class Place(NamedTuple):
    """The one consumer of an exclusive subscription: a process, and which one of it."""

    slot: int
    start: int
    consumer: int


def check(info: SubscriptionInfo) -> None:
    """Refuse options that make no sense.

    Raises:
        ValueError: they make none.
    """
    if not info.name or not isinstance(info.name, str):
        raise ValueError(f"a subscription's name is a non-empty string, not {info.name!r}")
    if info.type not in (EXCLUSIVE, SHARED):
        raise ValueError(f"type is 'exclusive' or 'shared', not {info.type!r}")
    if not info.lease_seconds > 0:
        raise ValueError(f"lease_seconds is above 0, not {info.lease_seconds!r}")
    if info.max_deliveries is not None and info.max_deliveries < 1:
        raise ValueError(f"max_deliveries is None or at least 1, not {info.max_deliveries!r}")
    if info.dead_letter is not None and info.max_deliveries is None:
        raise ValueError("dead_letter goes with max_deliveries, the number of deliveries before it")
    if not info.redelivery_delay >= 0:
        raise ValueError(f"redelivery_delay is at least 0, not {info.redelivery_delay!r}")
    if info.dead_letter == info.topic.name:
        raise ValueError(f"{info} cannot be its own dead letter topic")


def find(cur: apsw.Cursor, topic: TopicInfo, name: str) -> SubscriptionInfo | None:
    found: Any = cur.execute(
        "SELECT id, type, options FROM subscriptions WHERE topic_id = ? AND name = ?",
        (topic.id, name),
    ).fetchone()
    if found is None:
        return None
    id, type, options = found
    return SubscriptionInfo(id, topic, name, type, **json.loads(options))


def of_topic(cur: apsw.Cursor, topic: TopicInfo) -> list[SubscriptionInfo]:
    found: list[Any] = cur.execute(
        "SELECT id, name, type, options FROM subscriptions WHERE topic_id = ? ORDER BY name",
        (topic.id,),
    ).fetchall()
    return [
        SubscriptionInfo(id, topic, name, type, **json.loads(options))
        for id, name, type, options in found
    ]


def make(
    cur: apsw.Cursor, store: Store, wanted: SubscriptionInfo, starts: dict[int, int]
) -> SubscriptionInfo:
    """Add a subscription, or give the one of this name the options of `wanted`.

    Args:
        wanted: its id does not count.
        starts: where cursors begin, by partition id, if it is new.

    Raises:
        ValueError: there is one of the other type.
    """
    catalog.require_live(cur, wanted.topic)
    options = json.dumps({name: getattr(wanted, name) for name in OPTIONS})
    known = find(cur, wanted.topic, wanted.name)
    if known is None:
        cur.execute(
            "INSERT INTO subscriptions (topic_id, name, type, options, leased) "
            "VALUES (?, ?, ?, ?, ?)",
            (wanted.topic.id, wanted.name, wanted.type, options, wanted.leased),
        )
        id = cur.connection.last_insert_rowid()
        for partition_id, offset in starts.items():
            cursors.create(cur, id, partition_id, offset)
    else:
        if known.type != wanted.type:
            raise ValueError(
                f"{known} is {known.type}, not {wanted.type}: subscribe so, or take another name"
            )
        id = known.id
    if known is None or known.leased != wanted.leased:
        _begin_anew(cur, id)
    cur.execute(
        "UPDATE subscriptions SET options = ?, leased = ? WHERE id = ?",
        (options, wanted.leased, id),
    )
    return SubscriptionInfo(
        id, wanted.topic, wanted.name, wanted.type, **{n: getattr(wanted, n) for n in OPTIONS}
    )


def _begin_anew(cur: apsw.Cursor, id: int) -> None:
    """Whatever was delivered and not deleted is delivered again, from the cursors on."""
    cur.execute("DELETE FROM leases WHERE subscription_id = ?", (id,))
    cur.execute("DELETE FROM returned_acks WHERE subscription_id = ?", (id,))
    cur.execute("UPDATE cursors SET dispatched = mark_delete WHERE subscription_id = ?", (id,))


def drop(cur: apsw.Cursor, id: int) -> bool:
    """Forget a subscription, with its cursors and what is pending."""
    cur.execute("DELETE FROM subscriptions WHERE id = ?", (id,))
    return cur.connection.changes() > 0


def require(cur: apsw.Cursor, info: SubscriptionInfo) -> None:
    """Refuse a subscription that was dropped.

    Raises:
        TopicNotFoundError: it was, or its topic.
    """
    catalog.require_live(cur, info.topic)
    if cur.execute("SELECT 1 FROM subscriptions WHERE id = ?", (info.id,)).fetchone() is None:
        raise TopicNotFoundError(f"{info} was dropped: subscribe again")


def take_place(
    cur: apsw.Cursor, store: Store, info: SubscriptionInfo, place: Place, live: set[int]
) -> None:
    """Be the one consumer of an exclusive subscription; of leases, the boot they belong to.

    Args:
        place: this one.
        live: consumers of this process.

    Raises:
        UnavailableError: another lives.
    """
    slot, start, consumer = one(
        cur, "SELECT slot, start, consumer FROM subscriptions WHERE id = ?", (info.id,)
    )
    if slot is not None and store.runtime.slot_alive(slot, start):
        own = (slot, start) == (place.slot, place.start)
        if not own or consumer in live:
            who = "this process" if own else f"process {store.runtime.slot_owner(slot)}"
            raise UnavailableError(
                f"{info} is exclusive, and has a consumer in {who}: close that one, or subscribe "
                "with type='shared'"
            )
    cur.execute(
        "UPDATE subscriptions SET slot = ?, start = ?, consumer = ? WHERE id = ?",
        (*place, info.id),
    )
    cur.execute("DELETE FROM returned_acks WHERE subscription_id = ?", (info.id,))


def give_place(cur: apsw.Cursor, info: SubscriptionInfo, place: Place) -> None:
    """The next one may consume, if it is this one's place still."""
    cur.execute(
        "UPDATE subscriptions SET slot = NULL WHERE id = ? AND slot = ? AND start = ? "
        "AND consumer = ?",
        (info.id, *place),
    )


def check_boot(cur: apsw.Cursor, info: SubscriptionInfo) -> None:
    """Times of leases that an earlier boot of the machine noted have passed."""
    boot = boot_id()
    found: Any = cur.execute("SELECT boot FROM subscriptions WHERE id = ?", (info.id,)).fetchone()
    if found is not None and found[0] != boot:
        cur.execute(
            "UPDATE leases SET slot = NULL, until = 0 WHERE subscription_id = ? "
            "AND until IS NOT NULL",
            (info.id,),
        )
        cur.execute("UPDATE subscriptions SET boot = ? WHERE id = ?", (boot, info.id))
