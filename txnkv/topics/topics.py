"""The topics of one store in this process: what all of the package stands on.

A `Partition` has its LMDB environment, its log and its side logs; `Topics` has the catalog, the
partitions, the tails of all of them, and the waits for what comes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Literal, NamedTuple, Protocol
from weakref import WeakSet

import apsw
import pyarrow as pa

from txnkv.coordinator import EVERY, Catalog, Coordinator, Kinds, held, payload
from txnkv.errors import ClosedError, TopicNotFoundError, TxnkvError
from txnkv.storage import Environment, Store, WhenDropped, later, new_lock, shielded_unless
from txnkv.topics import topic_catalog
from txnkv.topics.acks import Exclusive, ack_rows
from txnkv.topics.log import DATABASES, LogOptions, PartitionLog
from txnkv.topics.messages import Message, ValueCodec, messages_of, topic_number
from txnkv.topics.ranges import Acked
from txnkv.topics.sidecar import SideLogs
from txnkv.topics.subscription_catalog import SubscriptionInfo
from txnkv.topics.tail import TopicTail, WriteOut, last_marker_end
from txnkv.topics.topic_catalog import TopicInfo
from txnkv.topics.waiting import Watch


class Opened(NamedTuple):
    """A partition's environment, and what is in it."""

    environment: Environment
    log: PartitionLog
    side: SideLogs | None


class Partition:
    """One partition. Shared by threads; nothing is opened before it is used.

    Attributes:
        id: by which status.db, the commit log and the folder know it.
        topic: its topic, as it was known last.
        number: in the topic, from 0.
    """

    def __init__(self, store: Store, topic: TopicInfo, number: int) -> None:
        self.id = topic.partitions[number]
        self.topic = topic
        self.number = number
        self._store = store
        self._folder = f"logs/{self.id}"
        self._file = str(store.directory.path / self._folder / "data.mdb")
        self._opened: Opened | None = None

    @property
    def label(self) -> str:
        """The partition, as messages to people name it."""
        return f"topic {self.topic.name!r}, partition {self.number}"

    @property
    def part(self) -> str:
        """The partition as `txnkv repair` takes it."""
        return f"topic:{self.topic.name}/{self.number}"

    @property
    def exists(self) -> bool:
        """Tell whether the environment was made; only a store open to write makes it.

        Raises:
            CorruptionError: it was made, and is gone.
        """
        return self._store.environments.was_made(self._folder, self.label, self.part)

    @property
    def is_made(self) -> bool:
        """The same as `exists`; no I/O once the partition was opened."""
        return self._opened is not None or self.exists

    @property
    def is_absent(self) -> bool:
        """Tell whether nothing is in LMDB now, be it that it was never made or is gone."""
        return self._opened is None and not os.path.exists(self._file)

    @property
    def environment(self) -> Environment:
        """The LMDB environment in which the log lies.

        Raises:
            StoreNotFoundError: it was never written to, and the store is open to read only.
        """
        return self._parts().environment

    @property
    def log_at_hand(self) -> PartitionLog | None:
        """The log, if it was opened: nothing is made."""
        opened = self._opened
        return None if opened is None or opened.environment.is_retired else opened.log

    @property
    def log(self) -> PartitionLog:
        """The log of what was written to the partition."""
        return self._parts().log

    @property
    def side(self) -> SideLogs | None:
        """The side logs, with batches of open transactions; None where the log itself has them."""
        return self._parts().side

    def _parts(self) -> Opened:
        opened = self._opened
        if opened is None or opened.environment.is_retired:
            opened = self._opened = self._open()
        return opened

    def _open(self) -> Opened:
        options = self.topic.options
        environment = self._store.environments.get(
            self._folder, label=self.label, part=self.part, databases=DATABASES
        )
        limits = LogOptions(
            segment_bytes=options.segment_bytes, segment_seconds=options.segment_seconds
        )
        side = None
        if self.topic.buffer == "sidecar":
            side = SideLogs(environment, self._store.environments, self._folder)
        log = PartitionLog(environment, limits, None if side is None else side.expand)
        if not self._store.directory.read_only:
            log.prepare()
        return Opened(environment, log, side)


class Look(NamedTuple):
    """The state of a partition in status.db.

    Attributes:
        next_offset: given to the next message; the log ends at or below it.
        markers: there are end markers that may not be in the log.
        marker_end: the offset behind the last of them; 0 when there are none.
    """

    next_offset: int
    markers: bool
    marker_end: int


class _NextOffsets:
    """Next offsets as of a change number, by topic and partition, and who asked for them."""

    def __init__(self, number: int | None) -> None:
        self.number = number
        self.found: dict[int, dict[int, int]] = {}
        self.asked: set[int] = set()


class Topics(Catalog[TopicInfo]):
    """The catalog of topics, their partitions, and what of them is in memory. Shared by threads.

    Args:
        coordinator: of the store.
        write_out: writes partitions of the tail into their logs, for a flush.

    Attributes:
        tail: messages of small commits that are not flushed yet.
        watch: of those who wait for messages.
        local: what this process remembers of subscriptions.
    """

    def __init__(self, coordinator: Coordinator, write_out: WriteOut) -> None:
        super().__init__(coordinator.store, coordinator.log, topic_catalog)
        self.coordinator = coordinator
        self.tail = TopicTail(write_out)
        self.watch = Watch(self.store.runtime, self.log)
        self.local = LocalSubscriptions()
        self._lock = new_lock()
        self._partitions: dict[int, Partition] = {}
        self._looks: dict[int, tuple[int, Look]] = {}
        self._next_offsets = _NextOffsets(None)

    def current(self, topic: TopicInfo) -> TopicInfo:
        """Return a topic with the options and partitions that it has now.

        Raises:
            TopicNotFoundError: it was dropped.
        """
        self.require_live(topic)
        if self._seen is not None and self._seen.live.get(topic.id) == topic.options.altered:
            return topic
        found = self.find(topic.name)
        if found is None or found.id != topic.id:
            raise topic_catalog.dropped(topic)
        return found

    def codec_of(self, partition: Partition) -> ValueCodec | None:
        """The codec of values that were read before this is asked for: who asks first may meet one
        of a schema that came meanwhile.
        """
        topic = partition.topic
        if topic.options.codec is not None:
            with suppress(TopicNotFoundError):
                self.partitions(self.current(topic))
        return partition.topic.options.codec

    def messages_of(self, partition: Partition, rows: pa.RecordBatch) -> list[Message]:
        """Messages of what was read of a partition; see `messages.messages_of`."""
        txn_id, codec = self.coordinator.txn_id, self.codec_of(partition)
        topic = topic_number(self.store.store_id, partition.topic.id)
        return messages_of(rows, topic, partition.number, txn_id, codec)

    def require_writable(self, topic: TopicInfo) -> int:
        """Refuse to send to a topic that was dropped, or is a copy.

        Returns:
            The version of the catalog in which it was seen.

        Raises:
            TopicNotFoundError: it was dropped.
            NotSupportedError: it is copied from another store.
        """
        topic_catalog.require_writable(topic)
        return self.require_live(topic)

    def refuse_dropped(
        self,
        cur: apsw.Cursor,
        version: int | None,
        topics: Sequence[TopicInfo],
        partition_ids: Iterable[int] = (),
    ) -> None:
        """Refuse what was dropped or held since a look, inside a commit.

        Args:
            cur: of the commit.
            version: of the catalog that the look saw.
            topics, partition_ids: that are written to.

        Raises:
            TopicNotFoundError: one of the topics was dropped.
            CorruptionError: one of the partitions takes no writes.
        """
        if self.log.catalog_version != version:
            for topic in topics:
                topic_catalog.require_live(cur, topic)
            held.refuse(held.ids(cur, payload.TOPIC), partition_ids)

    # -- partitions --------------------------------------------------------------------

    def partitions(self, topic: TopicInfo) -> list[Partition]:
        """The partitions of a topic, by number."""
        with self._lock:
            found = []
            for number, id in enumerate(topic.partitions):
                known = self._partitions.get(id)
                if known is None:
                    known = self._partitions[id] = Partition(self.store, topic, number)
                elif known.topic.options.altered < topic.options.altered:
                    known.topic = topic
                found.append(known)
            return found

    def partition(self, id: int) -> Partition | None:
        """A partition by its id; None when its topic was dropped and purged."""
        known = self._partitions.get(id)
        if known is not None:
            return known
        with self.store.status.read() as cur:
            topic = topic_catalog.by_partition(cur, id)
        if topic is None:
            return None
        return next(each for each in self.partitions(topic) if each.id == id)

    def each(
        self,
        ids: Iterable[int],
        work: str,
        do: Callable[[Partition], object],
        only: Kinds = EVERY,
        *,
        side_by_side: bool = False,
    ) -> dict[int, Exception]:
        """Do a piece of work on those of these partitions that are there; see `Damage.each`."""
        there = (each for each in map(self.partition, ids) if each is not None)
        lives = self.is_live
        return self.coordinator.damage.each(
            there, work, do, lambda each: lives(each.topic), only, side_by_side=side_by_side
        )

    def forget(self, id: int) -> None:
        """A partition is gone for good."""
        gone = self._partitions.pop(id, None)
        if gone is not None:
            self.coordinator.damage.clear(gone.label)
        self._looks.pop(id, None)

    def forget_gone(self) -> None:
        """Forget partitions of topics that were purged, by whichever process."""
        if self._partitions:
            with self.store.status.read(durable=False) as cur:
                left = {id for (id,) in cur.execute("SELECT id FROM partitions")}
            for id in self._partitions.keys() - left:
                self.forget(id)

    # -- offsets --------------------------------------------------------------------------

    def look(self, partition_id: int) -> Look:
        """Return what was given of a partition. No I/O while nothing is committed in the store."""
        number = self.store.runtime.change_number()
        known = self._looks.get(partition_id)
        if known is not None and known[0] == number:
            return known[1]
        # What is not durable yet may be seen: this only says whether it is worth while to help.
        with self.store.status.read(durable=False) as cur:
            found = Look(
                topic_catalog.next_offset(cur, partition_id),
                *last_marker_end(cur, partition_id),
            )
        if number is not None:
            self._looks[partition_id] = (number, found)
        return found

    def next_offsets(self, topic_id: int) -> Mapping[int, int]:
        """Return the next offsets of a topic, by partition id; those that commits which are not
        durable yet gave count. No I/O while nothing is committed in the store: who asks first then
        reads for all that have asked since the change before, many perhaps that wait.
        """
        number, ends = self.store.runtime.change_number(), self._next_offsets
        wanted = {topic_id}
        if number is None or number != ends.number:
            wanted |= set() if number is None else ends.asked
            ends = _NextOffsets(number)
        if topic_id not in ends.found:
            with self.store.status.read(durable=False) as cur:
                for id in wanted:
                    ends.found[id] = dict(
                        cur.execute(
                            "SELECT id, next_offset FROM partitions WHERE topic_id = ?", (id,)
                        )
                    )
            if number is not None:
                self._next_offsets = ends
        ends.asked.add(topic_id)
        return ends.found[topic_id]

    def behind(self, partition_id: int, high_watermark: int) -> bool:
        """Tell whether something that is decided lies at or above what a reader found: `complete`
        brings it within reach.
        """
        if self.look(partition_id).marker_end > high_watermark:
            return True
        return bool(self.tail.entries(partition_id, high_watermark, self.log.latest()))

    def after_fork_in_child(self) -> None:
        """Forget what the parent looks at."""
        self._looks, self._next_offsets = {}, _NextOffsets(None)
        self.watch = Watch(self.store.runtime, self.log)
        self.local = LocalSubscriptions()


# -- subscriptions that this process has a part in -------------------------------------


class Owner(Protocol):
    """The acks of a transaction of this process."""

    def move_out(self, state: Exclusive) -> None:
        """Have acks go on in status.db: the consumer gives up its place."""

    def expire(self) -> None:
        """Give back what is held long past the transaction's deadline."""


class LocalSubscriptions:
    """The subscriptions that this process remembers something of. Shared by threads.

    Attributes:
        consumers: numbers of this process's consumers that are open.
        ends: by partition id: an offset below which all is decided.
    """

    def __init__(self) -> None:
        self._lock = new_lock()
        self._states: dict[int, Exclusive] = {}
        self._owners: dict[int, WeakSet[Owner]] = {}
        self.consumers: set[int] = set()
        self.ends: dict[int, int] = {}

    def open(self, state: Exclusive) -> None:
        """Remember an exclusive one, whose consumer is here from now on."""
        with self._lock:
            self._states[state.info.id] = state
            self._owners[state.info.id] = WeakSet()

    def close(
        self, info: SubscriptionInfo, consumer: int
    ) -> tuple[Exclusive | None, list[Owner]] | None:
        """Forget a consumer's subscription; what there was, and whose acks are in it.

        Returns:
            None for a consumer that was closed before.
        """
        with self._lock:
            if consumer not in self.consumers:
                return None
            if info.leased:
                return None, []
            if (state := self._states.pop(info.id, None)) is not None:
                state.delivery.end()
            return state, list(self._owners.pop(info.id, ()))

    def exclusive(self, id: int, owner: Owner | None = None) -> Exclusive | None:
        """Return the state of an exclusive one; None if its consumer is elsewhere.

        Args:
            id: of the subscription.
            owner: whose acks are to be there.
        """
        with self._lock:
            found = self._states.get(id)
            if found is not None and owner is not None:
                self._owners[id].add(owner)
            return found

    def expire(self, id: int) -> None:
        """Give back what transactions of this process hold that are long past their deadline."""
        with self._lock:
            owners = list(self._owners.get(id, ()))
        for owner in owners:
            owner.expire()

    def end_hold(self, id: int) -> None:
        """A `client.run` has ended."""
        with self._lock:
            states = list(self._states.values())
        for state in states:
            state.end_hold(id)


class Hold:
    """The messages that attempts of one `client.run` have acknowledged, and failed with.

        attempt 1   ack(m) ... conflict: aborted      m is not delivered: attempt 2 works on it
        attempt 2   ack(m) ... committed              m is deleted
        run is over                                   what no attempt deleted is delivered again

    `release` ends the run; so it ends when this is dropped.

    Attributes:
        id: of the run.
        late: transactions that failed while others wrote, or without room: rows of their acks are
            to be given back before the next attempt, or with the end.
    """

    _is_over = False

    def __init__(self, store: Store, local: LocalSubscriptions) -> None:
        self.id = int.from_bytes(os.urandom(7), "big") + 1
        self.late: list[int] = []
        self._store = store
        self._where: set[Literal["memory", "status"]] = set()
        self._work = store, local, self.id, self._where, self.late
        self._over = WhenDropped(self, _end, *self._work)

    def keep(self, state: Exclusive, acked: Acked) -> None:
        """Keep what an attempt had in memory that has failed."""
        self._where.add("memory")
        state.hold(self.id, acked)
        if self._is_over:  # it did not wait for a commit
            state.end_hold(self.id)

    def for_rows(self) -> int | None:
        """The id for rows of acks; None: the run is over, and has no more of them."""
        self._where.add("status")
        return None if self._is_over else self.id

    def put_off(self, txn_id: int) -> bool:
        """Have rows of a transaction given back later; False: the run is over."""
        self.late.append(txn_id)
        return not self._is_over

    @shielded_unless(lambda self: not self.late)
    def give_back(self) -> None:
        """Have what is late given back.

        Raises:
            StorageFullError, UnavailableError: it is as late as before.
        """
        some = self.late.copy()
        with self._store.status.write(sync=False) as cur:
            _give_back(cur, self._store, some)
        del self.late[: len(some)]

    @shielded_unless(lambda self: not self._where)
    def release(self) -> None:
        """The run is over. Twice is fine."""
        self._is_over = True  # first: others add to what the end does, and look at this then
        try:
            self._over()
        except TxnkvError:  # the disk is full; how the run has ended stands
            later(_end, *self._work)


def _end(
    store: Store, local: LocalSubscriptions, id: int, where: set[str], late: list[int]
) -> None:
    if "memory" in where:
        local.end_hold(id)
    if "status" in where:
        with suppress(ClosedError), store.status.write(sync=False) as cur:
            _give_back(cur, store, late)
            ack_rows.end_hold(cur, id)


def _give_back(cur: apsw.Cursor, store: Store, late: list[int]) -> None:
    for txn_id in late:
        ack_rows.give_back(cur, store, txn_id, stored=False)
