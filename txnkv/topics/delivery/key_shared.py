"""Messages for one of the consumers of a key_shared subscription: those of its part of the keys.

    hashes of keys    0 ....... 1/4 ....... 1/2 ................... 1
    sharers           | a        | c         | b                    |
                      low        low         low

Each consumer has the hashes from its `low` on, up to that of the next one; the first one also those
below. Who joins gets half of the largest part, who leaves gives its part to its neighbour: all
other keys stay where they are. The rows change in writes, as leases do, so that all agree on them.

    partition      k a b k c a k ...          each consumer reads all, from the cursor on,
    its part         a     . a                and lets messages of other keys pass
    waiting        [a, a]                     its own that are not leased to it yet

A message is leased to the consumer whose part has its key, when nobody else has a message of that
key, and none that came back waits before it. So one consumer at a time works on a key, in the order
of offsets; when a part goes to another consumer, a key follows as soon as what the old one has of
it is acknowledged, given back, or its lease ran out. A message that waits for its key keeps none of
other keys waiting, as far as there is room for it.

Nothing is noted of messages that are read and not leased, so all consumers begin at the cursors
anew when the parts have changed. A lease has the hash of its message's key. A message without a key
is a key of its own. A delayed one comes at its time, and keeps none of its key waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import closing
from typing import Any, Final, NamedTuple

import apsw

from txnkv.coordinator import one
from txnkv.storage import KEY_SHARING, Store, clock
from txnkv.topics.acks import NONE, ack_rows
from txnkv.topics.delivery.leases import LeaseReader, new_lease
from txnkv.topics.delivery.redelivery import AHEAD, FOR_EVER, Trail
from txnkv.topics.messages import Message, key_hash, now_micros
from txnkv.topics.ranges import Ranges
from txnkv.topics.subscription_catalog import DELAYED, Place

# -- who has which keys ----------------------------------------------------------------

TOP_HASH: Final = 1 << 63
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


def provide_sharers(cur: apsw.Cursor, store: Store) -> None:
    """Have the tables of key_shared subscriptions; they are made with the first one."""
    there = cur.execute("SELECT 1 FROM sqlite_schema WHERE name = 'sharers'").fetchone()
    if there is None:
        store.directory.add_feature(KEY_SHARING)
        cur.execute(_SCHEMA)


def load_sharers(cur: apsw.Cursor, subscription_id: int) -> list[Sharer]:
    """The consumers of a subscription, by their parts."""
    found: list[Any] = cur.execute(
        "SELECT low, slot, start, consumer, epoch FROM sharers WHERE subscription_id = ? "
        "ORDER BY low",
        (subscription_id,),
    ).fetchall()
    return [Sharer(low, Place(*place), epoch) for low, *place, epoch in found]


def part_of(sharers: list[Sharer], place: Place) -> range:
    """The hashes that are a consumer's; none when it is no consumer."""
    lows = [0, *(each.low for each in sharers[1:]), TOP_HASH]
    for at, each in enumerate(sharers):
        if each.place == place:
            return range(lows[at], lows[at + 1])
    return range(0)


def join_sharers(cur: apsw.Cursor, subscription_id: int, place: Place) -> None:
    """A consumer gets half of the largest part, or all."""
    sharers, low = load_sharers(cur, subscription_id), 0
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
    read_all_again(cur, subscription_id)


def _size(part: range) -> int:
    return part.stop - part.start  # `len` has no room for it


def leave_sharers(cur: apsw.Cursor, subscription_id: int, place: Place) -> None:
    """A consumer gives its part to its neighbour."""
    cur.execute(
        "DELETE FROM sharers WHERE subscription_id = ? AND slot = ? AND start = ? AND consumer = ?",
        (subscription_id, *place),
    )
    read_all_again(cur, subscription_id)


def remove_dead_sharers(cur: apsw.Cursor, store: Store, subscription_id: int) -> None:
    """Have those leave whose process died."""
    for each in load_sharers(cur, subscription_id):
        if not store.runtime.slot_alive(each.place.slot, each.place.start):
            leave_sharers(cur, subscription_id, each.place)


def read_all_again(cur: apsw.Cursor, subscription_id: int) -> None:
    """Have all consumers begin at the cursors anew."""
    cur.execute(
        "UPDATE sharers SET epoch = epoch + 1 WHERE subscription_id = ?", (subscription_id,)
    )


_IS_MINE = "{0}.slot IS NOT NULL AND {0}.slot = ?2 AND {0}.start = ?3 AND {0}.consumer = ?4"

_BLOCKED = f"""
SELECT 1 FROM leases INDEXED BY leases_by_key WHERE subscription_id = ?1 AND key_hash = ?6
AND NOT ({_IS_MINE.format("leases")} AND ifnull(until, {FOR_EVER}) > ?5)
AND NOT (slot IS NULL AND ifnull(until, 0) >= {DELAYED}) LIMIT 1
"""
"""A message of a key that another has, whose ack is pending, or that is to be given again."""

_DUE = """
SELECT key_hash FROM leases INDEXED BY leases_by_time
WHERE subscription_id = ?1 AND until BETWEEN ?2 AND ?3 AND key_hash BETWEEN ?4 AND ?5
ORDER BY until, partition_id, message
"""
"""Keys of leases whose time has come, some of them several times."""

_OF_KEY = f"""
SELECT partition_id, message, deliveries, slot, ifnull(until BETWEEN ?7 AND ?8, 0),
    ifnull(until, {FOR_EVER}) > ?5 AND NOT ({_IS_MINE.format("leases")})
    AND NOT (slot IS NULL AND ifnull(until, 0) >= {DELAYED}),
    slot IS NOT NULL OR until IS NULL
FROM leases INDEXED BY leases_by_key WHERE subscription_id = ?1 AND key_hash = ?6
ORDER BY partition_id, message
"""
"""Leases of a key, and of each whether its time has come, others wait for it, and it is held."""


def due_leases(
    cur: apsw.Cursor, at: Sequence[int], span: tuple[int, int], part: range, most: int
) -> list[tuple[int, int, int, int | None]]:
    """Find leases whose time has come, of keys that no other has and of which none before has to
    wait. It takes as long as there are leases of the keys that it looks at, until there are enough.

    Args:
        at: the subscription, the place of its consumer, and now.
        span: the times that have come, first and last.
        part: hashes of the keys.

    Returns:
        partition id, offset, deliveries and slot, of each key in the order of offsets.
    """
    found: list[Any] = []
    seen: set[int] = set()
    with closing(cur.connection.cursor()) as keys:
        due: Any = keys.execute(_DUE, (at[0], *span, part.start, part.stop - 1))
        for (hash,) in due:
            if hash not in seen:
                seen.add(hash)
                found += _due_of_key(cur.execute(_OF_KEY, (*at, hash, *span)).fetchall())
                if len(found) >= most:
                    break
    return found[:most]


def _due_of_key(leases: list[Any]) -> list[Any]:
    found, behind = [], None
    for id, offset, deliveries, slot, due, shut, held in leases:
        if shut and held:
            return []
        if shut:
            behind = id
        elif due and id != behind:
            found.append((id, offset, deliveries, slot))
    return found


class _Waiting(NamedTuple):
    """A message of this consumer's part.

    Attributes:
        trail: what goes with it.
        hash: of its key.
    """

    message: Message
    trail: Trail
    hash: int


def _but(trail: Trail, leased: Ranges) -> Trail:
    """The trail of a message without those that go by themselves."""
    if trail.first < 0:
        return trail._replace(loose=trail.loose.minus(leased))
    offset, loose = trail.offset, trail.others.minus(leased)
    first, _ = loose.touching(offset, offset)
    loose.remove(first, offset)
    return Trail(offset, first, loose)


class KeySharedReader(LeaseReader):
    """For one of the consumers of a key_shared subscription; see `LeaseReader`."""

    _sharers: Sequence[Sharer] = ()
    _part = range(0)
    _anew = False  # the parts have changed since the sources began

    def __init__(self, *args: Any) -> None:
        self._marks: dict[int, int] = {}
        self._waiting: dict[int, deque[_Waiting]] = {}
        self._looked: dict[int, tuple[int, list[_Waiting]]] = {}
        super().__init__(*args)

    # -- reading -----------------------------------------------------------------------

    def _dispatched(self, cur: apsw.Cursor) -> dict[int, int]:
        """Return the marks, to read from: nothing is noted of what was dispatched."""
        self._marks = ack_rows.marks(cur, self._info.id)
        return self._marks

    def _adopt(self, cur: apsw.Cursor) -> bool:
        """Know the parts as they are; tell whether they have changed."""
        found = load_sharers(cur, self._info.id)
        if found == self._sharers:
            return False
        self._sharers, self._anew = found, True
        self._part = part_of(found, self._place)
        return True

    def _due(self, cur: apsw.Cursor) -> tuple[int, int]:
        """See `LeaseReader`. What waits for others is due when one of theirs is."""
        self._adopt(cur)
        spans = self._spans
        found = self._first_of(cur, *(begin for begin, _ in spans))
        if all(first > last for first, (_, last) in zip(found, spans, strict=True)):
            return found
        if any(self._due_rows(cur, span, 1) for span in spans):
            return 0, FOR_EVER
        return self._first_of(cur, *(last + 1 for _, last in spans))

    def _first_of(self, cur: apsw.Cursor, begin: int, delayed: int) -> tuple[int, int]:
        """Return the times of the first leases from these times on."""
        first = "(SELECT min(until) FROM leases WHERE subscription_id = ?1 AND until >= {})"
        due, delayed = one(
            cur,
            f"SELECT ifnull({first.format('?2')}, ?4), ifnull({first.format('?3')}, ?4)",
            (self._info.id, begin, delayed, FOR_EVER),
        )
        return due if due < DELAYED else FOR_EVER, delayed

    def _fill(self) -> bool:
        if self._anew:
            self._anew, self._waiting = False, {}
            for id, source in self._sources.items():
                source.restart(self._marks.get(id, 0))
        moved = False
        for id, source in self._sources.items():
            waiting = self._waiting.setdefault(id, deque())
            source.moved = False
            while len(waiting) < AHEAD and source.fill(self._ends):
                if sum(each.message.nbytes for each in waiting) >= source.share:
                    break
                for message in source.take():
                    hash = key_hash(message)
                    if hash in self._part:
                        waiting.append(_Waiting(message, source.trail_of(message.offset), hash))
            moved |= source.moved
        return moved

    @property
    def _has_new(self) -> bool:
        return any(self._waiting.values())

    def _knows_enough(self) -> bool:
        return False  # what waits for its key may be due

    def seek(self, number: int, offset: int) -> None:
        """See `DeliveryReader`."""
        super().seek(number, offset)
        for each in self._info.topic.partitions[number : number + 1]:
            self._waiting.pop(each, None)

    # -- claiming ----------------------------------------------------------------------

    def _claim(self, most: int, dead: bool) -> bool:
        """See `LeaseReader`. Nothing is written when there is nothing to claim."""
        before = sum(map(len, self._waiting.values()))
        with self._store.status.read(durable=False) as cur:
            if self._next_due:  # what is due stays so until somebody writes
                self._next_due, self._next_delayed = self._due(cur)
            some = not self._anew and (self._next_due == 0 or self._can_claim(cur))
        more = False
        if not self._anew and (dead or some):
            more = super()._claim(most, dead)
            for id, (looked, left) in self._looked.items():
                waiting = self._waiting[id]
                for _ in range(looked):
                    waiting.popleft()
                waiting.extendleft(reversed(left))
        # Where some that others did with were dropped, there is room to read on.
        return more or self._anew or sum(map(len, self._waiting.values())) < before

    def _free_dead(self, cur: apsw.Cursor) -> None:
        super()._free_dead(cur)
        self._next_due = 0
        remove_dead_sharers(cur, self._store, self._info.id)

    @property
    def _spans(self) -> list[tuple[int, int]]:
        return [(0, clock.monotonic_micros()), (DELAYED, DELAYED + now_micros())]

    def _claim_freed(self, cur: apsw.Cursor, most: int) -> list[Any]:
        self._looked = {}
        if self._adopt(cur) or self._next_due:
            return []
        return super()._claim_freed(cur, most)

    def _due_rows(self, cur: apsw.Cursor, span: tuple[int, int], most: int) -> list[Any]:
        at = self._info.id, *self._place, clock.monotonic_micros()
        return due_leases(cur, at, span, self._part, most)

    def _can_claim(self, cur: apsw.Cursor) -> bool:
        """Tell whether one that waits can be claimed; what others did with is dropped."""
        shut: set[int] = set()
        for id, waiting in self._waiting.items():
            kept: deque[_Waiting] = deque()
            while waiting:
                each = waiting[0]
                known = self._is_known(cur, id, each)
                if self._gap(cur, id, each) if known else not self._is_blocked(cur, each, shut):
                    break
                if not known:
                    kept.append(each)
                waiting.popleft()
            found = bool(waiting)
            waiting.extendleft(reversed(kept))
            if found:
                return True
        return False

    def _claim_new(self, cur: apsw.Cursor, most: int) -> tuple[list[Message], dict[int, int]]:
        """Those that wait and can be claimed; where the source is does not depend on it. How many
        were looked at, and which of them are left, is noted for when it is committed.
        """
        found: list[Message] = []
        if self._anew or not self._waiting:
            return found, {}
        room = self._max_bytes - self._held
        shut: set[int] = set()
        ids = list(self._waiting)
        self._turn += 1
        for id in ids[self._turn % len(ids) :] + ids[: self._turn % len(ids)]:
            left, blocked, upto = list[_Waiting](), NONE, -1
            for looked, each in enumerate(self._waiting[id]):
                self._looked[id] = looked, left
                if len(found) >= most or room <= 0:
                    break
                self._looked[id] = looked + 1, left
                if self._is_known(cur, id, each):
                    for first, last in self._gap(cur, id, each):
                        ack_rows.delete(cur, self._info.id, id, first, last)
                    continue
                if self._is_blocked(cur, each, shut):
                    left.append(each)
                    continue
                if (offset := each.message.offset) > upto:
                    few = min(looked + most - len(found), len(self._waiting[id]))
                    upto = self._waiting[id][few - 1].message.offset
                    blocked = self._blocked_in(cur, id, offset, upto)
                message = self._lease(cur, id, each, blocked)
                if message is not None:
                    found.append(message)
                    room -= message.nbytes
        return found, {}

    def _lease(self, cur: apsw.Cursor, id: int, each: _Waiting, blocked: Ranges) -> Message | None:
        message, at = each.message, (self._info.id, id, each.message.offset)
        place, until = None, self._delay(message)
        if message.offset in blocked:
            until = None
        elif until is None:
            place, until = self._place, self._until
        trail = each.trail
        if trail.first != trail.offset or trail.loose:
            trail = _but(trail, self._leased_in(cur, id, trail.others))
        new_lease(cur, self._info.id, id, trail, place, until)
        cur.execute(
            "UPDATE leases SET key_hash = ? WHERE subscription_id = ? AND partition_id = ? "
            "AND message = ?",
            (each.hash, *at),
        )
        if place is None or until is None:
            return None
        message.lease_end = until
        return message

    def _is_known(self, cur: apsw.Cursor, id: int, each: _Waiting) -> bool:
        """Tell whether a message is deleted, or has its lease."""
        offset = each.message.offset
        there = cur.execute(
            "SELECT 1 FROM leases WHERE subscription_id = ? AND partition_id = ? AND message = ?",
            (self._info.id, id, offset),
        ).fetchone()
        if there is not None:
            return True
        return offset in ack_rows.deleted_in(cur, self._info.id, id, offset, offset + 1)

    def _gap(self, cur: apsw.Cursor, id: int, each: _Waiting) -> Ranges:
        """Find what goes with a message that is deleted, and had no lease to go with: not those
        that have leases themselves.
        """
        gap, at = each.trail.others, each.message.offset
        if not gap or at not in ack_rows.deleted_in(cur, self._info.id, id, at, at + 1):
            return NONE
        gap = gap.minus(ack_rows.deleted_in(cur, self._info.id, id, *gap.span))
        return gap.minus(self._leased_in(cur, id, gap))

    def _leased_in(self, cur: apsw.Cursor, id: int, gap: Ranges) -> Ranges:
        """Find messages that key compaction hides, and that are delivered."""
        if not gap:
            return NONE
        found = cur.execute(
            "SELECT message FROM leases WHERE subscription_id = ? AND partition_id = ? "
            "AND message >= ? AND message < ? ORDER BY message",
            (self._info.id, id, *gap.span),
        )
        return Ranges.of([offset for (offset,) in found])

    def _is_blocked(self, cur: apsw.Cursor, each: _Waiting, shut: set[int]) -> bool:
        """Tell whether another has messages of a key, or some of them come before.

        Args:
            shut: hashes of those; added to.
        """
        if self._delay(each.message) is not None:
            return False
        if each.hash not in shut:
            now = clock.monotonic_micros()
            key = (self._info.id, *self._place, now, each.hash)
            if cur.execute(_BLOCKED, key).fetchone() is None:
                return False
            shut.add(each.hash)
        return True
