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
    delayed      nobody's, until a time of the wall clock (`DELAYED`)

A process reads ahead of `dispatched` by itself, so that what it has read is claimed in one short
write. A claim is not synced: after a power loss all consumers are dead, and what they had is
delivered again anyway.

An exclusive subscription without counted deliveries has no leases: what its one consumer has is in
the memory of that process, with the acks of small transactions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, NamedTuple

import apsw

from txnkv.coordinator import one
from txnkv.storage import Store, clock, declare_fault_point, fault_point
from txnkv.topics import topic_catalog
from txnkv.topics.acks import NONE, ack_rows
from txnkv.topics.delivery.redelivery import (
    FOR_EVER,
    DeliveryReader,
    PartitionSource,
    Trail,
    read_range,
    share_of,
)
from txnkv.topics.messages import Message, now_micros
from txnkv.topics.ranges import Ranges
from txnkv.topics.read import Ends
from txnkv.topics.subscription_catalog import (
    DELAYED,
    KEY_SHARED,
    Place,
    SubscriptionInfo,
    dropped,
)
from txnkv.topics.topics import Topics

declare_fault_point("leases.claimed", "messages are leased in status.db, nobody has them yet")

_NEAR: Final = 1000
"""Offsets between two messages that are still read together."""
_BEYOND: Final = 1 << 63
_NOBODY: Final = None, None, None
_CLAIMED: Final = 500
"""Leases that are claimed anew at a time: how large their messages are shows later."""


class _Claim(NamedTuple):
    """A lease that is this consumer's now, of a message that was delivered before.

    Attributes:
        before: how often.
        until: when it runs out.
    """

    partition_id: int
    offset: int
    before: int
    until: int


class LeaseReader(DeliveryReader):
    """For one of the consumers of a subscription with leases.

    Args:
        topics: of the store.
        info: the subscription.
        place: which consumer this is.
        numbers: of the partitions that it reads; None: all, those too that are added later.
        max_bytes: see `DeliveryReader`.
    """

    def __init__(
        self,
        topics: Topics,
        info: SubscriptionInfo,
        place: Place,
        numbers: Sequence[int] | None,
        max_bytes: int,
    ) -> None:
        super().__init__(max_bytes)
        self._topics = topics
        self._store, self._ends = topics.store, Ends(topics, info.topic)
        self._info, self._way = info, info.isolation
        self._place = place
        with self._store.status.read() as cur:
            dispatched = self._dispatched(cur)
        self._every = numbers is None
        self._sources: dict[int, PartitionSource] = {}
        self._add_sources(
            range(len(info.topic.partitions)) if numbers is None else numbers, dispatched
        )
        self._claims: deque[_Claim] = deque()
        self._failed: Exception | None = None
        self._holders = LeaseHolders(self._store, info)
        self._number: int | None = None
        self._next_due = 0
        self._next_delayed = FOR_EVER
        self._turn = self._looked_at = 0

    def _add_sources(self, numbers: Sequence[int], dispatched: dict[int, int]) -> None:
        partitions = self._topics.partitions(self._info.topic)
        share = share_of(self._max_bytes, len(self._sources) + len(numbers))
        for each in map(partitions.__getitem__, numbers):
            begin = dispatched.get(each.id, 0)
            source = PartitionSource(self._topics, each, begin, share, isolation=self._way)
            self._sources[each.id] = source
        for source in self._sources.values():
            source.share = share

    @property
    def pending(self) -> bool:
        """See `DeliveryReader`."""
        sources = self._sources.values()
        return bool(self._ready) or any(each.is_pending(self._ends) for each in sources)

    def stirred(self) -> bool:
        """See `DeliveryReader`."""
        return self._are_due or self._holders.have_died()

    @property
    def _are_due(self) -> bool:
        """The time of a lease has come, as of the last look."""
        if clock.monotonic_micros() >= self._next_due:
            return True
        return self._next_delayed < FOR_EVER and self._next_delayed <= DELAYED + now_micros()

    def _is_mine(self, message: Message) -> bool:
        return clock.monotonic_micros() < message.lease_end

    def seek(self, number: int, offset: int) -> None:
        """See `DeliveryReader`. The source follows `dispatched`, as those of other consumers do."""
        super().seek(number, offset)
        those = self._info.topic.partitions[number : number + 1]  # none, before it is known here
        self._claims = deque(each for each in self._claims if each.partition_id not in those)

    def _gather(self, most: int) -> None:
        self._failed = None
        self._read_claims()
        more, first, knows = True, FOR_EVER, self._knows_enough()  # when it claimed first
        while more and not self._full(most) and not self._is_late(first):
            dead = self._holders.have_died()
            more, knows = knows or self._look(), False
            if dead or self._are_due or self._has_new:
                first = min(first, clock.monotonic_micros())
                more |= self._claim(most - len(self._ready), dead)
        if self._failed is not None and not self._ready:
            raise self._failed

    def _knows_enough(self) -> bool:
        """A look was lately, and messages are ready: the write that claims them sees the rest."""
        if clock.monotonic_micros() >= self._looked_at + _APART:
            return False
        if not self._has_new:
            self._ends.look()
            self._fill()
        return self._has_new

    def _is_late(self, first: int) -> bool:
        """Leases that are ready last, but not for long, or claiming takes longer than they do."""
        if self._info.lease_time is None:
            return False
        lease, now = int(self._info.lease_time * 1e6), clock.monotonic_micros()
        if now > first + 2 * lease:
            return True
        return bool(self._ready) and now < self._ready[0].lease_end < now + lease * 3 // 4

    def _look(self) -> bool:
        """Find when leases are due, and read ahead; tell whether a source has more to look at."""
        number = self._store.runtime.change_number()
        if number is None or number != self._number:
            with self._store.status.read(durable=False) as cur:
                dispatched = self._dispatched(cur)
                due, delayed = self._due(cur)
            if not dispatched:
                self._topics.require_live(self._info.topic)
                raise dropped(self._info)
            if len(dispatched) > len(self._info.topic.partitions):
                self._follow(dispatched)
            self._number, self._next_due, self._next_delayed = number, due, delayed
            for partition_id, source in self._sources.items():
                source.go_to(dispatched.get(partition_id, 0))
        self._looked_at = clock.monotonic_micros()
        self._ends.look()
        return self._fill()

    def _fill(self) -> bool:
        """Read ahead; tell whether a source has passed something, and may have more."""
        for source in self._sources.values():
            source.fill(self._ends)
        return any(source.moved for source in self._sources.values())

    @property
    def _has_new(self) -> bool:
        """Messages are read that may be claimed."""
        return any(source.ready for source in self._sources.values())

    def _follow(self, dispatched: dict[int, int]) -> None:
        """Know the partitions that the topic has got, and read them if all are to be read."""
        with self._store.status.read(durable=False) as cur:
            topic = topic_catalog.by_partition(cur, min(dispatched))
        if topic is None:
            raise dropped(self._info)
        self._info = replace(self._info, topic=topic)
        there = range(len(topic.partitions))
        if self._every:
            new = [number for number in there if topic.partitions[number] not in self._sources]
            self._add_sources(new, dispatched)

    def _dispatched(self, cur: apsw.Cursor) -> dict[int, int]:
        found: list[Any] = cur.execute(
            "SELECT partition_id, dispatched FROM cursors WHERE subscription_id = ?",
            (self._info.id,),
        ).fetchall()
        return dict(found)

    def _due(self, cur: apsw.Cursor) -> tuple[int, int]:
        """Return when the first lease of these partitions that has a time can be claimed, and the
        first message that is delayed, by the wall clock.
        """
        first = (
            "(SELECT until FROM leases WHERE subscription_id = ?1 AND until >= {} "
            f"AND {self._is_here} ORDER BY until LIMIT 1)"
        )
        sql = f"SELECT ifnull({first.format(0)}, ?2), ifnull({first.format(DELAYED)}, ?2)"
        due, delayed = one(cur, sql, (self._info.id, FOR_EVER))
        return due if due < DELAYED else FOR_EVER, delayed

    @property
    def _is_here(self) -> str:
        return f"+partition_id IN ({', '.join(map(str, self._sources))})"  # +: sorted by its index

    # -- claiming ----------------------------------------------------------------------

    @property
    def _until(self) -> int:
        seconds = self._info.lease_time
        return FOR_EVER if seconds is None else clock.monotonic_micros() + int(seconds * 1e6)

    def _claim(self, most: int, dead: bool) -> bool:
        """Lease what there is; whether there may be more."""
        with self._topics.coordinator.write_beside() as cur:
            if dead:
                self._free_dead(cur)
            freed = self._claim_freed(cur, min(most, _CLAIMED))
            fresh, upto = self._claim_new(cur, most - len(freed))
        fault_point("leases.claimed")
        self._holders.freed()
        if freed:
            self._forget(freed)
        self._claims += freed
        try:
            self._read_claims()
        finally:
            self._add(fresh)
        for partition_id, offset in upto.items():
            self._sources[partition_id].go_to(offset)
        return bool(freed or fresh or upto)

    def _free_dead(self, cur: apsw.Cursor) -> None:
        """Let what the dead had be anybody's."""
        ack_rows.free_dead(cur, self._store, self._info.id)
        found: list[Any] = cur.execute(
            "SELECT DISTINCT slot, start FROM leases WHERE subscription_id = ? "
            "AND slot IS NOT NULL AND until IS NOT NULL",
            (self._info.id,),
        ).fetchall()
        for slot, start in found:
            if not self._store.runtime.slot_alive(slot, start):
                cur.execute(
                    "UPDATE leases SET slot = NULL, until = 0 WHERE subscription_id = ? "
                    "AND slot = ? AND start = ? AND until IS NOT NULL",
                    (self._info.id, slot, start),
                )

    def _forget(self, claims: Sequence[_Claim]) -> None:
        """These came again, as their leases had run out here before they were given."""
        again = {(claim.partition_id, claim.offset) for claim in claims}
        numbers = self._info.topic.partitions
        self._claims = deque(each for each in self._claims if each[:2] not in again)
        self._keep(lambda each: (numbers[each.partition], each.offset) not in again)

    @property
    def _spans(self) -> list[tuple[int, int]]:
        """The times of leases that have come, first and last, by either clock."""
        spans = [(0, clock.monotonic_micros())]
        if self._next_delayed < FOR_EVER:
            spans.append((DELAYED, DELAYED + now_micros()))
        return spans

    def _due_rows(self, cur: apsw.Cursor, span: tuple[int, int], most: int) -> list[Any]:
        found: list[Any] = cur.execute(
            "SELECT partition_id, message, deliveries, slot FROM leases "
            f"WHERE subscription_id = ? AND until BETWEEN ? AND ? AND {self._is_here} "
            "ORDER BY until, partition_id, message LIMIT ?",
            (self._info.id, *span, most),
        ).fetchall()
        return found

    def _claim_freed(self, cur: apsw.Cursor, most: int) -> list[_Claim]:
        spans = self._spans
        timeouts = self._topics.coordinator.metrics.messages_timed_out
        claims: list[_Claim] = []
        while spans and len(claims) < most:
            if not (due := self._due_rows(cur, spans[0], most - len(claims))):
                del spans[0]
            ids, offsets = {each[0] for each in due}, sorted(each[1] for each in due)
            blocked = {id: self._blocked_in(cur, id, offsets[0], offsets[-1]) for id in ids}
            for partition_id, offset, before, slot in due:
                timeouts.add(slot is not None)  # else it was given back
                if offset in blocked[partition_id]:
                    _lease(cur, self._info.id, partition_id, offset, None, None)
                else:
                    until = self._until
                    _lease(cur, self._info.id, partition_id, offset, self._place, until)
                    claims.append(_Claim(partition_id, offset, before, until))
        return sorted(claims)

    def _blocked_in(self, cur: apsw.Cursor, id: int, first: int, last: int) -> Ranges:
        """The acks of transactions that meet [first, last] of a partition."""
        found = Ranges()
        for held in ack_rows.pending(cur, self._store, self._info.id, id, first, last + 1):
            found.add(held.first, held.last)
        return found

    def _claim_new(self, cur: apsw.Cursor, most: int) -> tuple[list[Message], dict[int, int]]:
        """New messages; and up to where they, and what was passed over, are claimed."""
        found: list[Message] = []
        room = self._max_bytes - self._held
        moved: dict[int, int] = {}
        ids = list(self._sources)
        self._turn = (self._turn + 1) % len(ids)
        dispatched = self._dispatched(cur)
        for id in ids[self._turn :] + ids[: self._turn]:
            source, begin = self._sources[id], dispatched.get(id)
            if begin is None or not source.is_behind(begin):
                continue
            source.go_to(begin)
            blocked = deleted = NONE
            for message in source.ready:
                offset = message.offset
                if len(found) >= most or room <= 0:
                    break
                if id not in moved and ack_rows.any_from(cur, self._info.id, id, offset):
                    last = source.ready[-1].offset
                    blocked = self._blocked_in(cur, id, offset, last)
                    deleted = ack_rows.deleted_in(cur, self._info.id, id, offset, last + 1)
                moved[id] = offset + 1
                trail = source.trail_of(offset)
                if offset in deleted:
                    for first, last in trail.others:
                        ack_rows.delete(cur, self._info.id, id, first, last)
                    continue
                place, until = None, self._delay(message)
                if offset in blocked:
                    until = None
                elif until is None:
                    place, until = self._place, self._until
                new_lease(cur, self._info.id, id, trail, place, until)
                if place is not None and until is not None:
                    message.lease_end = until
                    found.append(message)
                    room -= message.nbytes
        cur.executemany(
            "UPDATE cursors SET dispatched = ? WHERE subscription_id = ? AND partition_id = ?",
            [(upto, self._info.id, id) for id, upto in moved.items()],
        )
        return found, moved

    def _delay(self, message: Message) -> int | None:
        """Return until when a message waits for its time, as a lease has it; None: it does not."""
        micros = message.deliver_micros
        if micros is None or not self._info.delays or micros <= now_micros():
            return None
        return DELAYED + micros

    # -- what was delivered before -----------------------------------------------------

    def _read_claims(self) -> None:
        """Have the messages of claims ready, as many as there is room for. One that cannot be read
        is tried again by the next call, and keeps no other from being given.
        """
        claims, self._claims = sorted(self._claims), deque()
        for run in _runs(claims):
            found = {} if self._held >= self._max_bytes else self._read_run(run)
            for claim in run:
                if self._held >= self._max_bytes:
                    self._claims.append(claim)
                    continue
                try:
                    self._add(self._read_again(claim, found.pop(claim.offset, None)))
                except Exception as error:
                    self._failed = error
                    self._claims.append(claim)

    def _read_run(self, run: Sequence[_Claim]) -> dict[int, Message]:
        """Messages of claims, by offset: those before the first that cannot be read, or that there
        is no room for.
        """
        room = self._max_bytes - self._held
        wanted = {claim.offset for claim in run}
        first, last = run[0].offset, run[-1].offset
        partition = self._sources[run[0].partition_id].partition
        found: dict[int, Message] = {}
        if len(run) > 1:
            with suppress(Exception):  # whose it is shows when they are read one by one
                for message in read_range(self._topics, partition, first, last + 1, self._way):
                    if message.offset in wanted:
                        found[message.offset] = message
                        room -= message.nbytes
                        if room <= 0:
                            break
        return found

    def _read_again(self, claim: _Claim, message: Message | None) -> list[Message]:
        """The message of a lease, if it is not read yet; none when retention took it, or the lease
        ran out.
        """
        if clock.monotonic_micros() >= claim.until:
            return []
        partition, at = self._sources[claim.partition_id].partition, claim.offset
        if message is None:
            message = next(read_range(self._topics, partition, at, at + 1, self._way), None)
        # An abort frees also what was acknowledged before its time, and never delivered.
        delay = None if message is None or claim.before else self._delay(message)
        if message is not None and delay is None:
            message.redelivery_count, message.lease_end = claim.before, claim.until
            return [message]
        with self._topics.coordinator.write_beside() as cur:
            if delay is None:
                ack_rows.delete_leased(cur, self._info.id, claim.partition_id, at, at + 1)
            else:
                self._put_off(cur, claim, delay)
        return []

    def _put_off(self, cur: apsw.Cursor, claim: _Claim, until: int) -> None:
        cur.execute(
            "UPDATE leases SET slot = NULL, until = ?, deliveries = 0 WHERE subscription_id = ? "
            "AND partition_id = ? AND message = ? AND until IS NOT NULL "
            "AND slot = ? AND start = ? AND consumer = ?",
            (until, self._info.id, claim.partition_id, claim.offset, *self._place),
        )

    # -- giving back -------------------------------------------------------------------

    def nack(self, ids: Sequence[tuple[int, int]], delay: float) -> None:
        """Deliver these again, after a delay in seconds; what is not leased here is left alone."""
        until = clock.monotonic_micros() + int(delay * 1e6)
        partitions = self._info.topic.partitions
        with self._topics.coordinator.write_beside() as cur:
            cur.executemany(
                "UPDATE leases SET slot = NULL, until = ? WHERE subscription_id = ? "
                "AND partition_id = ? AND message = ? AND until IS NOT NULL "
                "AND slot = ? AND start = ? AND consumer = ?",
                [
                    (until, self._info.id, partitions[number], offset, *self._place)
                    for number, offset in ids
                    if number < len(partitions) and -_BEYOND < offset < _BEYOND  # or none is here
                ],
            )

    def close(self) -> None:
        """Let others have at once what this consumer has."""
        with self._topics.coordinator.write_beside() as cur:
            cur.execute(
                "UPDATE leases SET slot = NULL, until = 0 WHERE subscription_id = ? "
                "AND slot = ? AND start = ? AND consumer = ? AND until IS NOT NULL",
                (self._info.id, *self._place),
            )


def _runs(claims: Sequence[_Claim]) -> Iterator[list[_Claim]]:
    """Claims that are near each other, in their order."""
    run: list[_Claim] = []
    for claim in claims:
        if run and (claim.partition_id, claim.offset) > (
            run[-1].partition_id, run[-1].offset + _NEAR
        ):  # fmt: skip
            yield run
            run = []
        run.append(claim)
    if run:
        yield run


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
        (*(place or _NOBODY), until, place is not None, id, partition_id, offset),
    )


def new_lease(
    cur: apsw.Cursor,
    id: int,
    partition_id: int,
    at: Trail,
    place: Place | None,
    until: int | None,
) -> None:
    """Add the lease of a message that was not delivered yet; without a place it is nobody's."""
    cur.execute(
        "INSERT OR REPLACE INTO leases (subscription_id, partition_id, message, first, "
        "deliveries, slot, start, consumer, until) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (id, partition_id, at.offset, at.first, place is not None, *(place or _NOBODY), until),
    )
    for first, last in at.loose:
        ack_rows.delete(cur, id, partition_id, first, last)


_APART: Final = 200_000
"""Microseconds between two looks."""


class LeaseHolders:
    """The holders of leases and acks of one subscription, and whether they live.

    The death of a holder shows in no change number. So a consumer that waits looks now and then
    whether the holders that it knows still live, which costs no read; who they are it reads when
    the store has changed since.
    """

    def __init__(self, store: Store, info: SubscriptionInfo) -> None:
        self._store = store
        self._id = info.id
        self._shares_keys = info.type == KEY_SHARED
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
        number = self._store.runtime.change_number()
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
            "UNION SELECT slot, start FROM pending_acks WHERE subscription_id = ?1 AND NOT stored"
            + self._shares_keys
            * " UNION SELECT slot, start FROM sharers WHERE subscription_id = ?1",
            (self._id,),
        ).fetchall()
        self._holders = [(slot, start) for slot, start in found]
        (expires,) = one(
            cur,
            "SELECT min(expires) FROM pending_acks WHERE subscription_id = ? AND NOT stored",
            (self._id,),
        )
        self._expires = FOR_EVER if expires is None else expires
