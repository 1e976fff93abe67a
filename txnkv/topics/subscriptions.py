"""Subscriptions of a store in this process.

rows in status.db          what is deleted, pending, leased        (subscription_rows, cursors,
                                                                    pending_acks, leases)
memory of the consumer     of an exclusive one whose consumer is here            (exclusive)
acks of a transaction      in either                                             (acks)
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

import apsw

from txnkv.coordinator import status_table
from txnkv.coordinator.lease import Lease
from txnkv.errors import InvalidTxnStateError, NotSupportedError, OffsetOutOfRangeError
from txnkv.storage.locks import new_lock
from txnkv.topics import (
    catalog,
    cursors,
    pending_acks,
    retention,
    subscription_rows,
    unacknowledged,
)
from txnkv.topics.acks import KIND, PendingAcks
from txnkv.topics.catalog import TopicInfo
from txnkv.topics.cursors import Cursor
from txnkv.topics.exclusive import Exclusive
from txnkv.topics.held_acks import by_partition, refuse_unknown
from txnkv.topics.log_view import bounds
from txnkv.topics.message import MessageId
from txnkv.topics.subscription_info import (
    EXCLUSIVE,
    FAILOVER,
    SHARED,
    SubscriptionInfo,
    SubscriptionOptions,
)
from txnkv.topics.subscription_participant import SubscriptionParticipants
from txnkv.topics.subscription_rows import Place

if TYPE_CHECKING:
    from txnkv.topics.engine import TopicEngine
    from txnkv.topics.partition import Partition

__all__ = [
    "EXCLUSIVE",
    "FAILOVER",
    "SHARED",
    "Place",
    "SubscriptionInfo",
    "SubscriptionOptions",
    "Subscriptions",
]

_consumers: Final = itertools.count(1)


class Subscriptions:
    """The subscriptions of one store. Shared by threads.

    Attributes:
        handler: what the coordinator calls for stored transactions.
    """

    def __init__(self, engine: TopicEngine) -> None:
        self.handler = SubscriptionParticipants(engine)
        self._engine = engine
        self._store = engine.store
        self._lock = new_lock()
        self._start()

    def _start(self) -> None:
        self._exclusive: dict[int, Exclusive] = {}
        self._owners: dict[int, WeakSet[PendingAcks]] = {}
        self._live: set[int] = set()
        self._ends: dict[int, int] = {}

    # -- what there is -----------------------------------------------------------------

    def subscribe(
        self,
        topic: TopicInfo,
        name: str,
        type: str,
        start: str | Mapping[int, int],
        options: SubscriptionOptions,
    ) -> tuple[SubscriptionInfo, Place | None]:
        """A consumer of this process begins; the subscription is made when there is none.

        All or nothing: who is refused has changed neither options nor leases. No place: another
        consumer of a failover one has it (`take_over`).

        Args:
            topic: of which topic.
            name: of the subscription.
            type: "exclusive", "shared" or "failover".
            start: where a new one begins: "earliest", "latest", or an offset by partition number.
            options: those to be set; a new one has defaults for the others.

        Raises:
            UnavailableError: an exclusive one has a live consumer; a failover one has, with
                other options.
            ValueError: the options make no sense, or there is one of the other type.
            OffsetOutOfRangeError: it is to start beyond the end.
            TopicNotFoundError: the topic was dropped.
        """
        while True:
            with self._store.status.read() as cur:
                known = subscription_rows.find(cur, topic, name)
            if known is not None and known.type != type:
                raise ValueError(
                    f"{known} is {known.type}, not {type}: subscribe so, or take another name"
                )
            info = (known or SubscriptionInfo(0, topic, name, type)).changed(options)
            subscription_rows.check(info)
            starts = self._starts(topic, start) if known is None else {}
            with self._store.status.write(sync=info != known) as cur:
                catalog.require_live(cur, topic)
                if subscription_rows.find(cur, topic, name) != known:
                    continue  # another process was first
                if known is None:
                    info = subscription_rows.make(cur, info, starts)
                place = self._open(cur, info, changed=info != known)
                if info != known:
                    subscription_rows.set_options(cur, info)
            if known is None:
                retention.await_cuts(self._engine.partitions(topic))
            if place is not None:
                self._opened(info, place)
            return info, place

    def take_over(self, info: SubscriptionInfo) -> Place | None:
        """The place of a failover subscription; None: another consumer has it.

        Raises:
            TopicNotFoundError: the subscription was dropped, or its topic.
        """
        self._engine.require_live(info.topic)
        with self._store.status.read(durable=False) as cur:
            if subscription_rows.consumer_of(cur, self._store, info, self._live) is not None:
                return None
        with self._store.status.write(sync=False) as cur:
            place = self._open(cur, info, changed=False)
        if place is not None:
            self._opened(info, place)
        return place

    def _starts(self, topic: TopicInfo, start: str | Mapping[int, int]) -> dict[int, int]:
        if start not in ("earliest", "latest") and not isinstance(start, Mapping):
            raise ValueError(
                f"start is 'earliest', 'latest' or a dict of offsets by partition, not {start!r}"
            )
        partitions = self._engine.partitions(topic)
        named = start if isinstance(start, Mapping) else {}
        if not set(named) <= set(range(len(partitions))):
            raise ValueError(
                f"start names partitions {sorted(named)}; topic {topic.name!r} has 0 to "
                f"{len(partitions) - 1}"
            )
        found = {}
        for partition in partitions:
            ends = bounds(self._engine, partition)
            first = ends.last_stable_offset if start == "latest" else ends.start
            found[partition.id] = offset = named.get(partition.number, first)
            if not 0 <= offset <= ends.high_watermark:
                raise OffsetOutOfRangeError(
                    f"{partition.label} holds [{ends.start}, {ends.high_watermark}): there is no "
                    f"offset {offset} to start at. Name one of these, or the end"
                )
        return found

    def of_topic(self, topic: TopicInfo) -> list[SubscriptionInfo]:
        """The subscriptions of a topic, by name."""
        with self._store.status.read() as cur:
            return subscription_rows.of_topic(cur, topic)

    def transactions_of(self, cur: apsw.Cursor, topic: TopicInfo) -> list[int]:
        """Stored transactions, not yet ended, that acknowledged messages of a topic."""
        ids = [info.id for info in subscription_rows.of_topic(cur, topic)]
        return status_table.transactions_of(cur, KIND, ids)

    def drop(self, info: SubscriptionInfo) -> bool:
        """Forget a subscription; open transactions that acknowledged its messages are aborted,
        small ones at their commit.

        Returns:
            False when it is not there.
        """
        with self._store.status.write() as cur:
            there = subscription_rows.drop(cur, info.id)
            touched = status_table.transactions_of(cur, KIND, [info.id])
        self._engine.abort_all(touched, f"{info} was dropped")
        return there

    def committed(self, info: SubscriptionInfo) -> dict[int, int]:
        """Return the offset below which all is deleted, by partition number."""
        with self._store.status.read() as cur:
            found = cursors.load(cur, info.id)
        numbers = enumerate(info.topic.partitions)
        return {number: found[id].mark for number, id in numbers if id in found}

    def seek(self, info: SubscriptionInfo, number: int, to: int | str) -> int:
        """Move the cursor of a partition, for its consumer, or one of them; durable.

        Args:
            info: the subscription.
            number: of the partition.
            to: an offset, "earliest" or "latest".

        Returns:
            The offset. Nothing was changed when it raises.

        Raises:
            OffsetOutOfRangeError: the partition does not hold it.
            InvalidTxnStateError: acks of its messages are pending.
            TopicNotFoundError: the subscription was dropped, or its topic.
        """
        partition = self._engine.partitions(info.topic)[number]
        offset = self._offset(partition, to)
        owner, state = object(), self.exclusive(info.id)
        self.expire(info.id)
        if state is not None:
            state.look()
        try:
            with self._store.status.write() as cur:
                subscription_rows.require(cur, info)
                pending_acks.free_dead(cur, self._store, info.id)
                # From here on no ack is made in memory until that has the new cursor, too.
                free = state is None or state.take_partition(owner, partition.id)
                if not free or pending_acks.blocked(cur, self._store, info.id, partition.id):
                    raise InvalidTxnStateError(
                        f"{info}: acknowledgements in partition {number} are pending in "
                        "transactions that are open. End these, then seek"
                    )
                cursors.seek(cur, info.id, partition.id, offset)
            retention.await_cuts([partition])
            if state is not None:
                state.look()
                state.begin_anew(partition.id)
        finally:
            if state is not None:
                state.release(owner, {}, {partition.id: 0})
        return offset

    def _offset(self, partition: Partition, to: int | str) -> int:
        ends = bounds(self._engine, partition)
        if to in ("earliest", "latest"):
            return ends.start if to == "earliest" else ends.last_stable_offset
        if not isinstance(to, int):
            raise ValueError(f"seek to an offset, 'earliest' or 'latest', not {to!r}")
        if not ends.start <= to <= ends.high_watermark:
            raise OffsetOutOfRangeError(
                f"{partition.label} holds [{ends.start}, {ends.high_watermark}): there is no "
                f"offset {to} to seek. Name one of these, or the end"
            )
        return to

    def lag(self, info: SubscriptionInfo, but: Collection[int] = ()) -> dict[int, int]:
        """Offsets that are decided and not deleted, by partition number, from the first message
        among them on: 0 when all messages are deleted. Partitions may be left out.
        """
        with self._store.status.read() as cur:
            found = cursors.load(cur, info.id)
        lag = {}
        for partition in self._engine.partitions(info.topic):
            if partition.number in but:
                continue
            cursor = found.get(partition.id, Cursor(0))
            ends = bounds(self._engine, partition)
            lag[partition.number] = unacknowledged.count(
                self._engine, partition, cursor, ends.start, ends.last_stable_offset
            )
        return lag

    def lost(self, info: SubscriptionInfo, but: Collection[int] = ()) -> dict[int, int]:
        """Messages that retention took before they were acknowledged, by partition number."""
        return {
            partition.number: unacknowledged.lost(partition, info.id)
            for partition in self._engine.partitions(info.topic)
            if partition.number not in but
        }

    # -- the place of an exclusive one -------------------------------------------------

    def _open(self, cur: apsw.Cursor, info: SubscriptionInfo, *, changed: bool) -> Place | None:
        runtime = self._store.runtime
        place = Place(runtime.slot, runtime.slot_start, next(_consumers))
        subscription_rows.check_boot(cur, info)
        pending_acks.free_dead(cur, self._store, info.id)
        if info.type != SHARED:
            who = subscription_rows.consumer_of(cur, self._store, info, self._live)
            if who is not None and info.type == FAILOVER and not changed:
                return None
            if who is not None:
                raise subscription_rows.has_consumer(info, who)
            subscription_rows.take_place(cur, info, place)
        self._live.add(place.consumer)  # before another thread can take the place for free
        return place

    def _opened(self, info: SubscriptionInfo, place: Place) -> None:
        state = None if info.leased else Exclusive(self._store, info)
        with self._lock:
            if state is not None:
                self._exclusive[info.id] = state
                self._owners[info.id] = WeakSet()

    def close(self, info: SubscriptionInfo, place: Place) -> None:
        """The consumer ends; acks of small transactions go on in status.db."""
        with self._lock:
            if place.consumer not in self._live:
                return
            state = None if info.leased else self._exclusive.pop(info.id, None)
            owners = list(self._owners.pop(info.id, ()))
        try:
            if state is not None:
                for acks in owners:
                    acks.move_out(state)  # refuses nothing: the place is given in any case
        finally:
            self._live.discard(place.consumer)
        with self._store.status.write(sync=False) as cur:
            if state is not None:
                for partition_id, first, last in state.passed():
                    cursors.delete(cur, info.id, partition_id, first, last)
            subscription_rows.give_place(cur, info, place)

    def exclusive(self, id: int, acks: PendingAcks | None = None) -> Exclusive | None:
        """Return what this process remembers of an exclusive subscription; None if its consumer
        is elsewhere.

        Args:
            id: of the subscription.
            acks: whose acks are to be there.
        """
        with self._lock:
            found = self._exclusive.get(id)
            if found is not None and acks is not None:
                self._owners[id].add(acks)
            return found

    def expire(self, id: int) -> None:
        """Give back what transactions of this process hold that are long past their deadline."""
        with self._lock:
            owners = list(self._owners.get(id, ()))
        for acks in owners:
            acks.expire()

    # -- for acks ----------------------------------------------------------------------

    def refuse(
        self, info: SubscriptionInfo, ids: Sequence[MessageId], *, cumulative: bool
    ) -> dict[int, list[int]]:
        """Refuse acks that make no sense whatever others do.

        Returns:
            Offsets in order, by partition number; of a cumulative ack the highest.

        Raises:
            NotSupportedError: a cumulative ack of a shared subscription.
            OffsetOutOfRangeError: there is no such message, or it is not decided yet: it cannot
                have been delivered.
            TopicNotFoundError: the topic was dropped.
        """
        if cumulative and info.type == SHARED:
            raise NotSupportedError(
                f"{info} is {info.type}: others have messages before this one. Acknowledge "
                "them one by one, or subscribe exclusively"
            )
        self._engine.require_live(info.topic)
        named = by_partition(info, ids, cumulative=cumulative)
        for number, offsets in named.items():
            end = self._known_end(info.topic.partitions[number], offsets[-1])
            refuse_unknown(info, number, offsets, end)
        return named

    def _known_end(self, partition_id: int, offset: int) -> int:
        """Return the offset below which all is decided, or an older one that is behind `offset`. 0
        for a partition that is gone.
        """
        end = self._ends.get(partition_id, 0)
        if offset >= end:
            partition = self._engine.partition(partition_id)
            end = 0 if partition is None else bounds(self._engine, partition).last_stable_offset
            self._ends[partition_id] = end
        return end

    def end_hold(self, id: int) -> None:
        """A `client.run` has ended."""
        with self._lock:
            states = list(self._exclusive.values())
        for state in states:
            state.end_hold(id)

    # -- looking after -----------------------------------------------------------------

    def sweep(self, lease: Lease) -> None:
        """Do the leader's part: cursors follow logs that lost their beginning, and what the dead
        held is given back.

        Raises:
            LeaseLostError: this process leads no more.
        """
        with self._store.status.read() as cur:
            least: list[Any] = cur.execute(
                "SELECT partition_id, min(mark_delete) FROM cursors GROUP BY partition_id"
            ).fetchall()
            held: list[Any] = cur.execute(
                "SELECT DISTINCT subscription_id FROM pending_acks WHERE NOT stored"
            ).fetchall()
        marks = dict(least)

        def follow(partition: Partition) -> None:
            if not partition.exists:
                return
            with partition.environment.read() as txn:
                start = partition.log.start(txn)
            if start > marks[partition.id]:
                with self._store.status.write() as cur:
                    lease.confirm(cur)
                    cursors.raise_marks(cur, partition.id, start)

        self._engine.each(marks, "cursors", follow)
        for (subscription_id,) in held:
            with self._store.status.write() as cur:
                lease.confirm(cur)
                pending_acks.free_dead(cur, self._store, subscription_id)

    def after_fork_in_child(self) -> None:
        """Consumers and their memory are the parent's."""
        self._start()
