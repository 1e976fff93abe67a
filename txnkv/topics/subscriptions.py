"""Subscriptions of a store in this process.

rows in status.db          what is deleted, pending, leased        (subscription_rows, cursors,
                                                                    pending_acks, leases)
memory of the consumer     of an exclusive one whose consumer is here            (exclusive)
acks of a transaction      in either                                             (acks)
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

import apsw

from txnkv.coordinator import status_table
from txnkv.coordinator.lease import Lease
from txnkv.topics import cursors, pending_acks, subscription_rows
from txnkv.topics.acks import KIND, PendingAcks
from txnkv.topics.catalog import TopicInfo
from txnkv.topics.exclusive import Exclusive
from txnkv.topics.log_view import bounds
from txnkv.topics.ranges import Ranges
from txnkv.topics.subscription_info import EXCLUSIVE, SHARED, SubscriptionInfo
from txnkv.topics.subscription_participant import SubscriptionParticipants
from txnkv.topics.subscription_rows import Place

if TYPE_CHECKING:
    from txnkv.topics.engine import TopicEngine

__all__ = ["EXCLUSIVE", "SHARED", "Place", "SubscriptionInfo", "Subscriptions"]

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
        self._start()

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._exclusive: dict[int, Exclusive] = {}
        self._owners: dict[int, WeakSet[PendingAcks]] = {}
        self._live: set[int] = set()
        self._ends: dict[int, int] = {}

    # -- what there is -----------------------------------------------------------------

    def make(
        self, wanted: SubscriptionInfo, start: str | Mapping[int, int] = "earliest"
    ) -> SubscriptionInfo:
        """The subscription of this name and topic, made when there is none.

        Args:
            wanted: name, type and options; the id does not count.
            start: where a new one begins: "earliest", "latest", or an offset by partition number.

        Raises:
            ValueError: the options make no sense, or there is one of the other type.
            TopicNotFoundError: the topic was dropped.
        """
        subscription_rows.check(wanted)
        with self._store.status.read() as cur:
            known = subscription_rows.find(cur, wanted.topic, wanted.name)
        if known is not None and known == replace(wanted, id=known.id):
            self._engine.require_live(wanted.topic)
            return known
        starts = self._starts(wanted.topic, start) if known is None else {}
        with self._store.status.write() as cur:
            return subscription_rows.make(cur, self._store, wanted, starts)

    def _starts(self, topic: TopicInfo, start: str | Mapping[int, int]) -> dict[int, int]:
        if start not in ("earliest", "latest") and not isinstance(start, Mapping):
            raise ValueError(
                f"start is 'earliest', 'latest' or a dict of offsets by partition, not {start!r}"
            )
        found = {}
        for partition in self._engine.partitions(topic):
            ends = bounds(self._engine, partition)
            found[partition.id] = ends.last_stable_offset if start == "latest" else ends.start
            if isinstance(start, Mapping) and partition.number in start:
                found[partition.id] = start[partition.number]
        if isinstance(start, Mapping) and not set(start) <= set(range(len(topic.partitions))):
            raise ValueError(
                f"start names partitions {sorted(start)}; topic {topic.name!r} has 0 to "
                f"{len(topic.partitions) - 1}"
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
        """Forget a subscription. False when it is not there."""
        with self._store.status.write() as cur:
            return subscription_rows.drop(cur, info.id)

    def lag(self, info: SubscriptionInfo) -> dict[int, int]:
        """Offsets that are decided and not deleted, by partition number: messages, and markers
        that no consumer has passed.
        """
        with self._store.status.read() as cur:
            found = cursors.load(cur, info.id)
        lag = {}
        for partition in self._engine.partitions(info.topic):
            cursor = found.get(partition.id)
            ends = bounds(self._engine, partition)
            mark = max(ends.start, 0 if cursor is None else cursor.mark)
            left = Ranges([(mark, ends.last_stable_offset)])
            if cursor is not None:
                left.difference_update(cursor.deleted)
            lag[partition.number] = left.count
        return lag

    # -- the place of an exclusive one -------------------------------------------------

    def open(self, info: SubscriptionInfo) -> Place:
        """A consumer of this process begins.

        Raises:
            UnavailableError: an exclusive one has a live consumer.
            TopicNotFoundError: it was dropped.
        """
        runtime = self._store.runtime
        place = Place(runtime.slot, runtime.slot_start, next(_consumers))
        with self._store.status.write(sync=False) as cur:
            subscription_rows.require(cur, info)
            subscription_rows.check_boot(cur, info)
            pending_acks.free_dead(cur, self._store, info.id)
            if info.type == EXCLUSIVE:
                subscription_rows.take_place(cur, self._store, info, place, self._live)
        with self._lock:
            self._live.add(place.consumer)
            if not info.leased:
                self._exclusive[info.id] = Exclusive(self._store, info)
                self._owners[info.id] = WeakSet()
        return place

    def close(self, info: SubscriptionInfo, place: Place) -> None:
        """The consumer ends; acks of small transactions go on in status.db."""
        with self._lock:
            if place.consumer not in self._live:
                return
            self._live.discard(place.consumer)
            state = None if info.leased else self._exclusive.pop(info.id, None)
            owners = list(self._owners.pop(info.id, ()))
        if state is not None:
            for acks in owners:
                acks.move_out(state)
        with self._store.status.write(sync=False) as cur:
            if state is not None:
                for partition_id, first, last in state.passed():
                    cursors.delete(cur, info.id, partition_id, first, last)
            subscription_rows.give_place(cur, info, place)

    def exclusive(self, id: int, acks: PendingAcks | None = None) -> Exclusive | None:
        """What is in this process's memory of an exclusive subscription whose consumer is here.

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

    def known_end(self, partition_id: int, offset: int) -> int:
        """Behind the last offset that was given, or at least behind `offset` if that was."""
        end = self._ends.get(partition_id, 0)
        if offset >= end:
            end = self._ends[partition_id] = self._engine.look(partition_id).next_offset
        return end

    def end_hold(self, id: int) -> None:
        """A `client.run` has ended."""
        with self._lock:
            states = list(self._exclusive.values())
        for state in states:
            state.end_hold(id)

    # -- looking after -----------------------------------------------------------------

    def sweep(self, lease: Lease) -> None:
        """As the leader: cursors follow logs that lost their beginning, and what the dead
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
        for partition_id, mark in least:
            partition = self._engine.partition(partition_id)
            if partition is None or not partition.exists:
                continue
            with partition.environment.read() as txn:
                start = partition.log.start(txn)
            if start > mark:
                with self._store.status.write() as cur:
                    lease.confirm(cur)
                    cursors.raise_marks(cur, partition_id, start)
        for (subscription_id,) in held:
            with self._store.status.write() as cur:
                lease.confirm(cur)
                pending_acks.free_dead(cur, self._store, subscription_id)

    def after_fork_in_child(self) -> None:
        """Consumers and their memory are the parent's."""
        self._start()
