"""The consumers of a key_shared subscription, each with its part of the keys.

    hashes of keys    0 ....... 1/4 ....... 1/2 ................... 1
    sharers           | a        | c         | b                    |
                      low        low         low

Each has the hashes from its `low` on, up to that of the next one; the first one also those below.
Who joins gets half of the largest part, who leaves gives its part to its neighbour: all other keys
stay where they are. The rows change in writes, as leases do, so that all agree on them.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import apsw

from txnkv.storage import KEY_SHARING, Store
from txnkv.topics.subscription_catalog import Place

TOP: Final = 1 << 63
"""Above every hash of a key."""

_SCHEMA: Final = """
ALTER TABLE leases ADD COLUMN key_hash INTEGER;  -- of key_shared ones
CREATE INDEX leases_by_key ON leases (subscription_id, key_hash) WHERE key_hash IS NOT NULL;
CREATE TABLE sharers (
    subscription_id  INTEGER NOT NULL REFERENCES subscriptions ON DELETE CASCADE,
    low              INTEGER NOT NULL,
    slot             INTEGER NOT NULL,
    start            INTEGER NOT NULL,
    consumer         INTEGER NOT NULL,
    epoch            INTEGER NOT NULL,          -- changes when all are to read again
    PRIMARY KEY (subscription_id, low)
) WITHOUT ROWID;
"""


class Sharer(NamedTuple):
    """A consumer, and the first hash of its part."""

    low: int
    place: Place
    epoch: int


def provide(cur: apsw.Cursor, store: Store) -> None:
    """Have the tables of key_shared subscriptions; they are made with the first one."""
    there = cur.execute("SELECT 1 FROM sqlite_schema WHERE name = 'sharers'").fetchone()
    if there is None:
        store.directory.add_feature(KEY_SHARING)
        cur.execute(_SCHEMA)


def load(cur: apsw.Cursor, subscription_id: int) -> list[Sharer]:
    """The consumers of a subscription, by their parts."""
    found: list[Any] = cur.execute(
        "SELECT low, slot, start, consumer, epoch FROM sharers WHERE subscription_id = ? "
        "ORDER BY low",
        (subscription_id,),
    ).fetchall()
    return [Sharer(low, Place(*place), epoch) for low, *place, epoch in found]


def part_of(sharers: list[Sharer], place: Place) -> range:
    """The hashes that are a consumer's; none when it is no consumer."""
    lows = [0, *(each.low for each in sharers[1:]), TOP]
    for at, each in enumerate(sharers):
        if each.place == place:
            return range(lows[at], lows[at + 1])
    return range(0)


def join(cur: apsw.Cursor, subscription_id: int, place: Place) -> None:
    """A consumer gets half of the largest part, or all."""
    sharers, low = load(cur, subscription_id), 0
    if sharers:
        largest = max((part_of(sharers, each.place) for each in sharers), key=_size)
        low = largest.start + _size(largest) // 2
        cur.execute(
            "UPDATE sharers SET low = 0 WHERE subscription_id = ? AND low = ?",
            (subscription_id, sharers[0].low),
        )
    cur.execute(
        "INSERT INTO sharers (subscription_id, low, slot, start, consumer, epoch) "
        "VALUES (?, ?, ?, ?, ?, 0)",
        (subscription_id, low, *place),
    )
    read_again(cur, subscription_id)


def _size(part: range) -> int:
    return part.stop - part.start  # `len` has no room for it


def leave(cur: apsw.Cursor, subscription_id: int, place: Place) -> None:
    """A consumer gives its part to its neighbour."""
    cur.execute(
        "DELETE FROM sharers WHERE subscription_id = ? AND slot = ? AND start = ? AND consumer = ?",
        (subscription_id, *place),
    )
    read_again(cur, subscription_id)


def remove_dead(cur: apsw.Cursor, store: Store, subscription_id: int) -> None:
    """Have those leave whose process died."""
    for each in load(cur, subscription_id):
        if not store.runtime.slot_alive(each.place.slot, each.place.start):
            leave(cur, subscription_id, each.place)


def read_again(cur: apsw.Cursor, subscription_id: int) -> None:
    """Have all consumers begin at the cursors anew."""
    cur.execute(
        "UPDATE sharers SET epoch = epoch + 1 WHERE subscription_id = ?", (subscription_id,)
    )
