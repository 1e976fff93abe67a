"""Subscriptions of a store in this process.

rows in status.db         what is deleted, pending, leased  (subscription_catalog, ack_rows, leases)
memory of the consumer    of an exclusive one whose consumer is here                    (exclusive)
acks of a transaction     in either                                              (transaction_acks)
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import apsw

from txnkv.coordinator import Lease, Participants, Timestamp, TxnRow, status_table
from txnkv.errors import (
    ClosedError,
    InvalidTxnStateError,
    OffsetOutOfRangeError,
    as_index,
    as_offsets,
)
from txnkv.storage import READ_OTHERWISE, clock, declare_fault_point, fault_point
from txnkv.topics import retention, subscription_catalog, topic_catalog
from txnkv.topics.acks import Acked, Cursor, Exclusive, ack_rows
from txnkv.topics.delivery.key_shared import (
    join_sharers,
    leave_sharers,
    provide_sharers,
    read_all_again,
    remove_dead_sharers,
)
from txnkv.topics.delivery.leases import LeaseReader
from txnkv.topics.delivery.transaction_acks import KIND
from txnkv.topics.messages import Message
from txnkv.topics.read import bounds
from txnkv.topics.subscription_catalog import (
    FAILOVER,
    KEY_SHARED,
    MANY,
    Place,
    SubscriptionInfo,
    SubscriptionOptions,
)
from txnkv.topics.topic_catalog import TopicInfo
from txnkv.topics.topics import Partition, Topics

declare_fault_point("acks.applied", "acks are applied inside the commit point")
declare_fault_point("acks.returned", "acks of an aborted transaction are given back")

_consumers: Final = itertools.count(1)


class Subscriptions:
    """The subscriptions of one store. Shared by threads.

    Attributes:
        handler: what the coordinator calls for stored transactions.
    """

    def __init__(self, topics: Topics) -> None:
        self.handler = SubscriptionParticipants(topics)
        self._topics = topics
        self._store = topics.store

    # -- what there is -----------------------------------------------------------------

    def subscribe(
        self,
        topic: TopicInfo,
        name: str,
        type: str,
        start: str | Mapping[int, int],
        options: SubscriptionOptions,
        id: int | None = None,
    ) -> tuple[SubscriptionInfo, Place | None]:
        """A consumer of this process begins; the subscription is made when there is none.

        All or nothing: who is refused has changed neither options nor leases. No place: another
        consumer of a failover one has it (`take_over`).

        Args:
            topic: of which topic.
            name: of the subscription.
            type: one of `subscription_catalog.TYPES`.
            start: where a new one begins: "earliest", "latest", or an offset by partition number.
            options: those to be set; a new one has defaults for the others.
            id: of the one that it is to be; none is made then.

        Raises:
            UnavailableError: an exclusive one has a live consumer; a failover one has, with
                other options.
            ValueError: the options make no sense, or there is one of the other type.
            OffsetOutOfRangeError: it is to start beyond the end.
            TopicNotFoundError: the topic was dropped, or the subscription of this id.
        """
        while True:
            with self._store.status.read() as cur:
                known = subscription_catalog.find(cur, topic, name)
            if id is not None and (known is None or known.id != id):
                raise subscription_catalog.dropped(SubscriptionInfo(id, topic, name, type))
            if known is not None and known.type != type:
                raise ValueError(
                    f"{known} is {known.type}, not {type}: subscribe so, or take another name"
                )
            info = (known or SubscriptionInfo(0, topic, name, type)).changed(options)
            subscription_catalog.check(info)
            starts = self._starts(topic, start) if known is None else {}
            named = not options.keys().isdisjoint(("dead_letter", "max_deliveries"))
            with self._store.status.write(sync=info != known or named) as cur:
                topic_catalog.require_live(cur, topic)
                if subscription_catalog.find(cur, topic, name) != known:
                    continue  # another process was first
                if known is None:
                    info = subscription_catalog.make(cur, info, starts)
                place = self._open(cur, info, changed=info != known)
                if info != known:
                    subscription_catalog.set_options(cur, info)
                    if info.reads_otherwise:
                        self._store.directory.add_feature(READ_OTHERWISE)
                elif named:
                    subscription_catalog.provide_dead_letter(cur, info)
            if known is None:
                retention.await_cuts(self._topics.partitions(topic))
            if place is not None:
                self._opened(info, place)
            return info, place

    def take_over(self, info: SubscriptionInfo) -> Place | None:
        """The place of a failover subscription; None: another consumer has it.

        Raises:
            TopicNotFoundError: the subscription was dropped, or its topic.
        """
        self._topics.require_live(info.topic)
        with self._store.status.read(durable=False) as cur:
            live = self._topics.local.consumers
            if subscription_catalog.consumer_of(cur, self._store, info, live) is not None:
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
        partitions = self._topics.partitions(topic)
        named = as_offsets(start) if isinstance(start, Mapping) else {}
        if not set(named) <= set(range(len(partitions))):
            raise ValueError(
                f"start names partitions {sorted(named)}; topic {topic.name!r} has 0 to "
                f"{len(partitions) - 1}"
            )
        found = {}
        for partition in partitions:
            ends = bounds(self._topics, partition)
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
            return subscription_catalog.of_topic(cur, topic)

    def find(self, topic: TopicInfo, name: str) -> SubscriptionInfo | None:
        """The subscription of this name, if the topic has one."""
        with self._store.status.read() as cur:
            return subscription_catalog.find(cur, topic, name)

    def require(self, info: SubscriptionInfo) -> None:
        """Refuse a subscription that was dropped.

        Raises:
            TopicNotFoundError: it was, or its topic.
        """
        with self._store.status.read() as cur:
            subscription_catalog.require(cur, info)

    def transactions_of(self, cur: apsw.Cursor, topic: TopicInfo) -> list[int]:
        """Stored transactions, not yet ended, that acknowledged messages of a topic."""
        ids = [info.id for info in subscription_catalog.of_topic(cur, topic)]
        return status_table.transactions_of(cur, KIND, ids)

    def drop(self, info: SubscriptionInfo) -> bool:
        """Forget a subscription; open transactions that acknowledged its messages are aborted,
        small ones at their commit.

        Returns:
            False when it is not there.
        """
        with self._store.status.write() as cur:
            there = subscription_catalog.drop(cur, info.id)
            touched = status_table.transactions_of(cur, KIND, [info.id])
        self._topics.coordinator.orchestrator.abort_all(touched, f"{info} was dropped")
        return there

    def committed(self, info: SubscriptionInfo) -> dict[int, int]:
        """Return the offset below which all is deleted, or was lost, by partition number."""
        with self._store.status.read() as cur:
            marks = ack_rows.marks(cur, info.id)
        return {
            each.number: max(marks[each.id], bounds(self._topics, each).start)
            for each in self._topics.partitions(info.topic)
            if each.id in marks
        }

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
        partition = self._topics.partitions(info.topic)[number]
        offset = self._offset(partition, to)
        owner, state = object(), self._topics.local.exclusive(info.id)
        self._topics.local.expire(info.id)
        if state is not None:
            state.look()
        try:
            with self._store.status.write() as cur:
                subscription_catalog.require(cur, info)
                ack_rows.free_dead(cur, self._store, info.id)
                # From here on no ack is made in memory until that has the new cursor, too.
                free = state is None or state.take_partition(owner, partition.id)
                if not free or ack_rows.pending(
                    cur, self._store, info.id, partition.id, plain=True
                ):
                    raise InvalidTxnStateError(
                        f"{info}: acknowledgements in partition {number} are pending in "
                        "transactions that are open, or flushes. End these, then seek"
                    )
                ack_rows.seek(cur, info.id, partition.id, offset)
                if info.type == KEY_SHARED:
                    read_all_again(cur, info.id)
            retention.await_cuts([partition])
            if state is not None:
                state.look()
                state.begin_anew(partition.id)
        finally:
            if state is not None:
                state.release(owner, Acked(positions={partition.id: 0}))
        return offset

    def _offset(self, partition: Partition, to: int | str) -> int:
        ends = bounds(self._topics, partition)
        if to in ("earliest", "latest"):
            return ends.start if to == "earliest" else ends.last_stable_offset
        if isinstance(to, str):
            raise ValueError(f"seek to an offset, 'earliest' or 'latest', not {to!r}")
        to = as_index("an offset", to)
        if not ends.start <= to <= ends.high_watermark:
            raise OffsetOutOfRangeError(
                f"{partition.label} holds [{ends.start}, {ends.high_watermark}): there is no "
                f"offset {to} to seek. Name one of these, or the end"
            )
        return to

    def lag(self, info: SubscriptionInfo, but: Collection[int] = ()) -> dict[int, int]:
        """Offsets that are decided and not deleted, by partition number, from the first message
        among them on: 0 when all messages are deleted; of one with an order or isolation of its
        own, those behind an open transaction too, decided or not. Partitions may be left out.
        """
        with self._store.status.read() as cur:
            found = ack_rows.load_cursors(cur, info.id)
        lag = {}
        for partition in self._topics.partitions(info.topic):
            if partition.number in but:
                continue
            cursor = found.get(partition.id, Cursor(0))
            ends = bounds(self._topics, partition)
            stable = ends.last_stable_offset
            spans = [(ends.start, stable, info.isolation)]
            if info.reads_otherwise:  # what is given behind it may be of open transactions
                spans.append((stable, ends.high_watermark, "read_uncommitted"))
            lag[partition.number] = sum(
                retention.count_unacknowledged(self._topics, partition, cursor, *span)
                for span in spans
            )
        return lag

    def lost(self, info: SubscriptionInfo, but: Collection[int] = ()) -> dict[int, int]:
        """Messages that retention took before they were acknowledged, by partition number."""
        return {
            partition.number: retention.lost_messages(partition, info.id)
            for partition in self._topics.partitions(info.topic)
            if partition.number not in but
        }

    # -- the place of an exclusive one -------------------------------------------------

    def _open(self, cur: apsw.Cursor, info: SubscriptionInfo, *, changed: bool) -> Place | None:
        runtime = self._store.runtime
        place = Place(*runtime.owner, next(_consumers))
        subscription_catalog.check_boot(cur, info)
        ack_rows.free_dead(cur, self._store, info.id)
        if info.type == KEY_SHARED:
            provide_sharers(cur, self._store)
            remove_dead_sharers(cur, self._store, info.id)
            join_sharers(cur, info.id, place)
        elif info.leased:
            subscription_catalog.look_again(cur, info.id)
        if info.type not in MANY:
            who = subscription_catalog.consumer_of(
                cur, self._store, info, self._topics.local.consumers
            )
            if who is not None and info.type == FAILOVER and not changed:
                return None
            if who is not None:
                raise subscription_catalog.has_consumer(info, who)
            subscription_catalog.take_place(cur, info, place)
        self._topics.local.consumers.add(
            place.consumer
        )  # before another thread can take the place for free
        return place

    def _opened(self, info: SubscriptionInfo, place: Place) -> None:
        if not info.leased:
            counted = self._topics.coordinator.metrics.messages_delivered
            self._topics.local.open(Exclusive(self._store, info, counted))

    def close(self, info: SubscriptionInfo, place: Place) -> None:
        """The consumer ends; acks of small transactions go on in status.db."""
        local = self._topics.local
        closed = local.close(info, place.consumer)
        if closed is None:
            return
        state, owners = closed
        try:
            if state is not None:
                for acks in owners:
                    acks.move_out(state)  # refuses nothing: the place is given in any case
        finally:
            local.consumers.discard(place.consumer)
        with self._store.status.write(sync=False) as cur:
            if state is not None:
                for partition_id, first, last in state.passed():
                    ack_rows.delete(cur, info.id, partition_id, first, last)
            if info.type == KEY_SHARED:
                leave_sharers(cur, info.id, place)
            subscription_catalog.give_place(cur, info, place)

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
                    retention.raise_marks(cur, partition.id, start)

        self._topics.each(marks, "cursors", follow)
        for (subscription_id,) in held:
            with self._store.status.write() as cur:
                lease.confirm(cur)
                ack_rows.free_dead(cur, self._store, subscription_id)


class SubscriptionParticipants(Participants):
    """Subscriptions of stored transactions: acks are rows from the call on, and keep others off,
    so that there is nothing to validate.
    """

    kind = KIND

    def __init__(self, topics: Topics) -> None:
        super().__init__(topics.log)
        self._store = topics.store

    def write_commit(
        self, cur: apsw.Cursor, row: TxnRow, ids: Sequence[int], commit_ts: Timestamp
    ) -> None:
        """Delete what is pending."""
        ack_rows.apply_pending(cur, self._store, row.txn_id)
        fault_point("acks.applied")

    def abort(self, row: TxnRow, ids: Sequence[int]) -> None:
        """Have what is pending delivered again."""
        with self._store.status.write() as cur:
            ack_rows.give_back(cur, self._store, row.txn_id)
        fault_point("acks.returned")


_LOOK: Final = 200_000
"""Microseconds between two looks for a consumer that died."""


class Standby:
    """The reader of a consumer without the place: there is nothing to be read."""

    pending = False

    def __init__(self) -> None:
        self._next_look = 0

    def stirred(self) -> bool:
        """The consumer that has the place may have died."""
        return clock.monotonic_micros() >= self._next_look

    def take(self, most: int) -> list[Message]:
        """Nothing; the place was looked at just now."""
        self._next_look = clock.monotonic_micros() + _LOOK
        return []

    def seek(self, number: int, offset: int) -> None:
        """Nothing was read."""

    def put_back(self, messages: Sequence[Message]) -> None:
        """Nothing was given."""


class Belongings:
    """The place and leases that a consumer has, and gives up when it is closed or dropped."""

    def __init__(self, subscriptions: Subscriptions, info: SubscriptionInfo) -> None:
        self._subscriptions = subscriptions
        self._info = info
        self.place: Place | None = None
        self.leases: LeaseReader | None = None

    def close(self) -> None:
        with suppress(ClosedError):  # the store went first, and with this process's slot the place
            if self.leases is not None:
                self.leases.close()
            self.give_up()

    def give_up(self) -> None:
        """Let the next one have the place."""
        place, self.place = self.place, None
        if place is not None:
            self._subscriptions.close(self._info, place)
