"""Leases: deliveries as rows of status.db, where several processes share a subscription, or where
they are counted.

    offsets      0 1 2 3 4 5 6 7 8 9 ...
    deleted      x x   x
    leases           2   4 5          delivered and not deleted; each somebody's, or nobody's
    dispatched                6       what comes from here on nobody has looked at

    take         rows whose time has come (nobody's, run out, of a dead process), then messages
                 from `dispatched` on, which get rows and move it
    ack          pending: its time never comes; deleted: the row goes
    nack, abort  nobody's, after a delay or at once

A process reads ahead of `dispatched` by itself, so that what it has read is claimed in one short
write. A claim is not synced: after a power loss all consumers are dead, and what they had is
delivered again anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import apsw

from txnkv.coordinator.query import one
from txnkv.errors import TopicNotFoundError
from txnkv.storage.seam import clock, declare_fault_point, fault_point
from txnkv.topics import cursors, pending_acks
from txnkv.topics.message import Message, MessageId
from txnkv.topics.ranges import Ranges
from txnkv.topics.redelivery import Delivery, Source, read_range
from txnkv.topics.subscription_info import EXCLUSIVE, SubscriptionInfo
from txnkv.topics.subscription_rows import Place

if TYPE_CHECKING:
    from txnkv.topics.engine import TopicEngine

declare_fault_point("leases.claimed", "messages are leased in status.db, nobody has them yet")

_FOR_EVER: Final = 1 << 62
_LOOK_FOR_DEAD: Final = 200_000
"""Microseconds between two looks for processes that died with leases."""


class _Claim(NamedTuple):
    """A lease that is this consumer's now."""

    partition_id: int
    offset: int
    before: int


class LeaseReader:
    """The messages of a subscription with leases, for one of its consumers. One thread at a time.

    Args:
        engine: of the topics.
        info: the subscription.
        place: which consumer this is.
        numbers: of the partitions that it reads.
    """

    def __init__(
        self, engine: TopicEngine, info: SubscriptionInfo, place: Place, numbers: Sequence[int]
    ) -> None:
        self._engine = engine
        self._store = engine.store
        self._info = info
        self._place = place
        partitions = engine.partitions(info.topic)
        with self._store.status.read() as cur:
            dispatched = self._dispatched(cur)
        self._sources = {
            partitions[n].id: Source(engine, partitions[n], dispatched[partitions[n].id])
            for n in numbers
        }
        self._next_due = 0
        self._looked_for_dead = 0
        self._turn = 0

    @property
    def pending(self) -> bool:
        """More may come without the change number saying so."""
        return any(source.pending for source in self._sources.values())

    def stirred(self) -> bool:
        """The time of a lease may have come."""
        now = clock.monotonic_micros()
        return now >= self._next_due or now >= self._looked_for_dead + _LOOK_FOR_DEAD

    def take(self, most: int) -> list[Delivery]:
        """The next messages, at most so many, leased; none when there are none now."""
        found: list[Delivery] = []
        more = True
        while more and len(found) < most:
            free, more = self._look()
            if free or any(source.peek() for source in self._sources.values()):
                more = self._claim(found, most)
        return found

    def _claim(self, found: list[Delivery], most: int) -> bool:
        """Lease what there is; whether there may be more."""
        wanted = most - len(found)
        with self._store.status.write(sync=False) as cur:
            freed = self._claim_freed(cur, wanted)
            fresh, passed = self._claim_new(cur, wanted - len(freed))
        fault_point("leases.claimed")
        for claim in freed:
            found += self._read_again(claim)
        found += [Delivery(message, 0) for message in fresh]
        return bool(freed or fresh or passed)

    def _look(self) -> tuple[bool, bool]:
        """Whether leases are free; whether a source has more to look at. Reads ahead."""
        now = clock.monotonic_micros()
        with self._store.status.read(durable=False) as cur:
            dispatched = self._dispatched(cur)
            (due,) = one(
                cur, "SELECT min(until) FROM leases WHERE subscription_id = ?", (self._info.id,)
            )
            dead = False
            if now >= self._looked_for_dead + _LOOK_FOR_DEAD:
                self._looked_for_dead = now
                dead = bool(self._dead(cur)) or _has_memory_of_others(cur, self._info.id)
        if not dispatched:
            self._engine.require_live(self._info.topic)
            raise TopicNotFoundError(f"{self._info} was dropped: subscribe again")
        self._next_due = _FOR_EVER if due is None else due
        moved = False
        for partition_id, source in self._sources.items():
            source.skip_to(dispatched.get(partition_id, 0))
            source.fill()
            moved |= source.moved
        return dead or self._next_due <= now, moved

    def _dispatched(self, cur: apsw.Cursor) -> dict[int, int]:
        found: list[Any] = cur.execute(
            "SELECT partition_id, dispatched FROM cursors WHERE subscription_id = ?",
            (self._info.id,),
        ).fetchall()
        return dict(found)

    def _dead(self, cur: apsw.Cursor) -> list[tuple[int, int]]:
        found: list[Any] = cur.execute(
            "SELECT DISTINCT slot, start FROM leases WHERE subscription_id = ? "
            "AND slot IS NOT NULL AND until IS NOT NULL",
            (self._info.id,),
        ).fetchall()
        alive = self._store.runtime.slot_alive
        return [(slot, start) for slot, start in found if not alive(slot, start)]

    # -- claiming ----------------------------------------------------------------------

    @property
    def _until(self) -> int:
        if self._info.type == EXCLUSIVE:
            return _FOR_EVER
        return clock.monotonic_micros() + int(self._info.lease_seconds * 1e6)

    def _claim_freed(self, cur: apsw.Cursor, most: int) -> list[_Claim]:
        info = self._info
        pending_acks.free_dead(cur, self._store, info.id)
        for slot, start in self._dead(cur):
            cur.execute(
                "UPDATE leases SET slot = NULL, until = 0 WHERE subscription_id = ? "
                "AND slot = ? AND start = ? AND until IS NOT NULL",
                (info.id, slot, start),
            )
        due: list[Any] = cur.execute(
            "SELECT partition_id, message, deliveries FROM leases WHERE subscription_id = ? "
            "AND until <= ? ORDER BY partition_id, message",
            (info.id, clock.monotonic_micros()),
        ).fetchall()
        claims: list[_Claim] = []
        blocked = self._blocked_in(cur)
        for partition_id, offset, before in due:
            if partition_id not in self._sources:
                continue
            if offset in blocked.get(partition_id, ()):
                _lease(cur, info.id, partition_id, offset, None, None)
            elif len(claims) < most:
                _lease(cur, info.id, partition_id, offset, self._place, self._until)
                claims.append(_Claim(partition_id, offset, before))
        return claims

    def _blocked_in(self, cur: apsw.Cursor) -> dict[int, Ranges]:
        blocked: dict[int, Ranges] = {}
        for id, first, last, _ in pending_acks.blocked(cur, self._store, self._info.id):
            blocked.setdefault(id, Ranges()).add(first, last)
        return blocked

    def _claim_new(self, cur: apsw.Cursor, most: int) -> tuple[list[Message], bool]:
        """New messages; and whether something was passed over."""
        found: list[Message] = []
        passed = False
        blocked: dict[int, Ranges] | None = None
        ids = list(self._sources)
        self._turn = (self._turn + 1) % len(ids)
        dispatched = self._dispatched(cur)
        for id in ids[self._turn :] + ids[: self._turn]:
            source, upto = self._sources[id], dispatched.get(id)
            if upto is None or len(found) >= most:
                continue
            source.skip_to(upto)
            before = upto
            while len(found) < most and (read := source.peek()) is not None:
                if blocked is None:
                    blocked = self._blocked_in(cur)
                source.next()
                offset = read.message.offset
                upto = offset + 1
                if offset in cursors.deleted_in(cur, self._info.id, id, offset, upto):
                    cursors.delete(cur, self._info.id, id, read.begin, upto)
                    passed = True
                    continue
                free = offset not in blocked.get(id, ())
                place, until = (self._place, self._until) if free else (None, None)
                _new_lease(cur, self._info.id, id, read, place, until)
                passed |= not free
                if free:
                    found.append(read.message)
            if upto != before:
                cur.execute(
                    "UPDATE cursors SET dispatched = ? WHERE subscription_id = ? "
                    "AND partition_id = ?",
                    (upto, self._info.id, id),
                )
        return found, passed

    def _read_again(self, claim: _Claim) -> list[Delivery]:
        """The message of a lease; none when retention took it."""
        partition = self._sources[claim.partition_id].partition
        at = claim.offset
        for begin in self._beginnings(claim):
            for message in read_range(self._engine, partition, begin, at + 1):
                if message.offset == at:
                    return [Delivery(message, claim.before)]
        with self._store.status.write(sync=False) as cur:
            pending_acks.delete(cur, self._info.id, claim.partition_id, at, at + 1)
        return []

    def _beginnings(self, claim: _Claim) -> list[int]:
        """Where to read from for a message: it may be a large one, among others' messages."""
        id = self._info.id
        with self._store.status.read(durable=False) as cur:
            found = cur.execute(
                "SELECT first FROM leases WHERE subscription_id = ? AND partition_id = ? "
                "AND message = ?",
                (id, claim.partition_id, claim.offset),
            ).fetchone()
            mark = cursors.mark_delete(cur, id, claim.partition_id) or 0
        return [claim.offset if found is None else int(found[0]), mark]

    # -- giving back -------------------------------------------------------------------

    def nack(self, ids: Sequence[MessageId], delay: float) -> None:
        """Deliver these again, after a delay in seconds; what is not leased here is left alone."""
        until = clock.monotonic_micros() + int(delay * 1e6)
        partitions = self._info.topic.partitions
        with self._store.status.write(sync=False) as cur:
            cur.executemany(
                "UPDATE leases SET slot = NULL, until = ? WHERE subscription_id = ? "
                "AND partition_id = ? AND message = ? AND until IS NOT NULL "
                "AND slot = ? AND start = ? AND consumer = ?",
                [
                    (until, self._info.id, partitions[number], offset, *self._place)
                    for number, offset in ids
                ],
            )

    def close(self) -> None:
        """What this consumer has goes to others at once."""
        with self._store.status.write(sync=False) as cur:
            cur.execute(
                "UPDATE leases SET slot = NULL, until = 0 WHERE subscription_id = ? "
                "AND slot = ? AND start = ? AND consumer = ? AND until IS NOT NULL",
                (self._info.id, *self._place),
            )


def _lease(
    cur: apsw.Cursor,
    id: int,
    partition_id: int,
    offset: int,
    place: Place | None,
    until: int | None,
) -> None:
    """The lease is this consumer's, with one delivery more; or its time does not come."""
    cur.execute(
        "UPDATE leases SET slot = ?, start = ?, consumer = ?, until = ?, "
        "deliveries = deliveries + ? WHERE subscription_id = ? AND partition_id = ? "
        "AND message = ?",
        (*(place or (None, None, None)), until, place is not None, id, partition_id, offset),
    )


def _new_lease(
    cur: apsw.Cursor,
    id: int,
    partition_id: int,
    read: tuple[int, Message],
    place: Place | None,
    until: int | None,
) -> None:
    first, message = read
    cur.execute(
        "INSERT OR REPLACE INTO leases (subscription_id, partition_id, message, first, "
        "deliveries, slot, start, consumer, until) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            id,
            partition_id,
            message.offset,
            first,
            int(place is not None),
            *(place or (None, None, None)),
            until,
        ),
    )


def _has_memory_of_others(cur: apsw.Cursor, id: int) -> bool:
    """Whether acks are pending that go with a process or a deadline."""
    found = cur.execute(
        "SELECT 1 FROM pending_acks WHERE subscription_id = ? AND NOT stored LIMIT 1", (id,)
    ).fetchone()
    return found is not None
