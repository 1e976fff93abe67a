"""The topics of one store in this process: catalog, partitions, offsets, sweeps.

How a message reaches the log, and who sees it when:

    small commit     its messages ride in the commit's payload; their offsets are taken in its
                     SQLite transaction; they are in every process's tail then, and in LMDB
                     after the next flush                                          (tail)
    large            batches go to LMDB as they come, before anybody knows how the
                     transaction ends                                              (append)
    commit, abort    an end marker takes its offset inside the commit point        (participant)
                     and is written to the log by whoever comes first              (completing)

Every log is dense and written in the order of its offsets, so what it has is a prefix of what
was given, and whoever has LMDB's write lock can always bring it up to date.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import apsw

from txnkv.coordinator import held, payload, status_table
from txnkv.coordinator.coordinator import Coordinator
from txnkv.coordinator.damage import DAMAGE, EVERY, Kinds
from txnkv.coordinator.held import Key
from txnkv.coordinator.lease import Lease
from txnkv.coordinator.status_table import TxnRow
from txnkv.errors import InvalidTxnStateError
from txnkv.storage.locks import new_lock
from txnkv.storage.shield import shielded
from txnkv.topics import append, catalog, completing, purging
from txnkv.topics.append import Attempt
from txnkv.topics.catalog import TopicInfo, TopicOptions
from txnkv.topics.looking_after import LookingAfter
from txnkv.topics.participant import KIND, PartitionParticipants
from txnkv.topics.partition import Partition
from txnkv.topics.staged_sends import StagedSendsFolder
from txnkv.topics.subscriptions import Subscriptions
from txnkv.topics.tail import TopicTail
from txnkv.topics.waiting import Watch


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


@dataclass
class _Catalog:
    """The facts that are remembered of one version of the catalog, or of a later one.

    Attributes:
        live: ids of the topics that are not dropped.
        held: ids of partitions that take no writes, and why.
        topics: by name, those that were asked for.
    """

    version: int
    live: frozenset[int]
    held: dict[int, str]
    topics: dict[str, TopicInfo] = field(default_factory=dict)


class TopicEngine:
    """Topics over a store and its coordinator. Shared by threads.

    Attributes:
        tail: messages of small commits that are not flushed yet.
        staged: messages of a job's attempts, which wait for its end.
        watch: of those who wait for messages.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.store = coordinator.store
        self.log = coordinator.log
        self.tail = TopicTail(self._write_out)
        self.log.add_member(payload.TOPIC, self.tail)
        self._lock = new_lock()
        self._partitions: dict[int, Partition] = {}
        self._looks: dict[int, tuple[int, Look]] = {}
        self._catalog: _Catalog | None = None
        self._sweeps: list[Callable[[Lease], None]] = []
        self._swept_term: int | None = None
        self.watch = Watch()
        coordinator.orchestrator.add_handler(PartitionParticipants(self))
        coordinator.maintenance.add_sweep(self.sweep)
        coordinator.maintenance.add_look(self.forget_gone)
        self.add_sweep(LookingAfter(self).sweep)
        self.subscriptions = Subscriptions(self)
        coordinator.orchestrator.add_handler(self.subscriptions.handler)
        self.add_sweep(self.subscriptions.sweep)
        self.staged = StagedSendsFolder(self)
        coordinator.orchestrator.add_handler(self.staged.handler)
        self.add_sweep(self.staged.sweep)

    # -- catalog -----------------------------------------------------------------------

    def create(self, name: str, partitions: int, buffer: str, options: TopicOptions) -> TopicInfo:
        """Add a topic.

        Raises:
            TopicExistsError: the name is taken.
            ValueError: an argument makes no sense.
        """
        with self.store.status.write() as cur:
            return catalog.create(cur, name, partitions, buffer, options)

    def find(self, name: str) -> TopicInfo | None:
        """The topic of this name. No I/O while the catalog does not change."""
        known = self._known().topics
        return known.get(name) or self._find(name, known)

    @shielded
    def _find(self, name: str, known: dict[str, TopicInfo]) -> TopicInfo | None:
        with self.store.status.read() as cur:
            found = catalog.find(cur, name)
        if found is not None:
            known[name] = found
        return found

    def get(self, name: str) -> TopicInfo:
        """The topic of this name.

        Raises:
            TopicNotFoundError: there is none.
        """
        return self.find(name) or self._look_again(name)

    @shielded
    def _look_again(self, name: str) -> TopicInfo:
        with self.store.status.read() as cur:
            return catalog.get(cur, name)

    def names(self) -> list[str]:
        with self.store.status.read() as cur:
            return catalog.names(cur)

    def require_live(self, topic: TopicInfo) -> None:
        """Refuse a topic that was dropped. No I/O while the catalog does not change.

        Raises:
            TopicNotFoundError: it was dropped.
        """
        if not self.is_live(topic):
            raise catalog.dropped(topic)

    def is_live(self, topic: TopicInfo) -> bool:
        """Tell whether a topic was not dropped. No I/O while the catalog does not change."""
        return topic.id in self._known().live

    def live_at(self, topic: TopicInfo) -> int:
        """The version of the catalog in which the topic was seen not to be dropped, to send to it.

        Raises:
            TopicNotFoundError: it was dropped.
            NotSupportedError: it is copied from another store.
        """
        catalog.require_writable(topic)
        return self.readable_at(topic)

    def readable_at(self, topic: TopicInfo) -> int:
        """The same, to acknowledge its messages: of a copy, too.

        Raises:
            TopicNotFoundError: it was dropped.
        """
        known = self._known()
        if topic.id not in known.live:
            raise catalog.dropped(topic)
        return known.version

    def refuse_held(self, partition_ids: Iterable[int]) -> None:
        """Refuse to send to damaged partitions. No I/O while the catalog does not change.

        Raises:
            CorruptionError: one of them takes no writes.
        """
        known = self._catalog  # the commit asks again, where that has changed since
        if known is None or known.held:
            held.refuse(self._known().held, partition_ids)

    def refuse_dropped(
        self,
        cur: apsw.Cursor,
        version: int | None,
        topics: Sequence[TopicInfo],
        partition_ids: Iterable[int] = (),
    ) -> None:
        """Inside a commit, where the catalog is not of the version of `live_at` any more.

        Raises:
            TopicNotFoundError: one of the topics was dropped.
            CorruptionError: one of the partitions takes no writes.
        """
        if self.log.catalog_version != version:
            for topic in topics:
                catalog.require_live(cur, topic)
            held.refuse(held.ids(cur, payload.TOPIC), partition_ids)

    def _known(self) -> _Catalog:
        self.log.latest()
        version = self.log.catalog_version
        known = self._catalog
        if known is None or known.version != version:
            return self._read_catalog(version)
        return known

    @shielded
    def _read_catalog(self, version: int) -> _Catalog:
        with self.store.status.read() as cur:
            known = _Catalog(version, catalog.live_topics(cur), held.ids(cur, payload.TOPIC))
        self._catalog = known
        return known

    def drop(self, name: str) -> bool:
        """Drop a topic; open transactions that touched it are aborted.

        Returns:
            False when there is no such topic.
        """
        with self.store.status.write() as cur:
            topic = catalog.find(cur, name)
            if topic is None:
                return False
            catalog.drop(cur, topic)
            touched = status_table.transactions_of(cur, KIND, topic.partitions)
            touched += self.subscriptions.transactions_of(cur, topic)
        self.abort_all(touched, f"topic {name!r} was dropped")
        purging.purge(self)
        return True

    def abort_all(self, txn_ids: Iterable[int], reason: str) -> None:
        """Abort stored transactions that touched what was dropped."""
        orchestrator = self.coordinator.orchestrator
        for txn_id in set(txn_ids):
            with suppress(InvalidTxnStateError):  # one with its commit timestamp goes on
                orchestrator.start_abort(txn_id, reason)
            orchestrator.finish(txn_id)

    # -- partitions --------------------------------------------------------------------

    def partitions(self, topic: TopicInfo) -> list[Partition]:
        """The partitions of a topic, by number."""
        with self._lock:
            found = []
            for number, id in enumerate(topic.partitions):
                if id not in self._partitions:
                    self._partitions[id] = Partition(self.store, topic, number)
                found.append(self._partitions[id])
            return found

    def partition(self, id: int) -> Partition | None:
        """A partition by its id; None when its topic was dropped and purged."""
        known = self._partitions.get(id)
        if known is not None:
            return known
        with self.store.status.read() as cur:
            topic = catalog.by_partition(cur, id)
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

    # -- offsets -----------------------------------------------------------------------

    def take_offsets(self, cur: apsw.Cursor, partition_id: int, count: int) -> int:
        """The first of `count` offsets for a small commit, inside its SQLite transaction."""
        return catalog.take_offsets(cur, partition_id, count)

    def look(self, partition_id: int) -> Look:
        """Return what was given of a partition. No I/O while nothing is committed in the store."""
        number = self.store.status.change_number()
        known = self._looks.get(partition_id)
        if known is not None and known[0] == number:
            return known[1]
        # What is not durable yet may be seen: this only says whether it is worth while to help.
        with self.store.status.read(durable=False) as cur:
            found = Look(
                catalog.next_offset(cur, partition_id),
                *completing.marker_end(cur, partition_id),
            )
        if number is not None:
            self._looks[partition_id] = (number, found)
        return found

    def behind(self, partition_id: int, high_watermark: int) -> bool:
        """Tell whether something that is decided lies at or above what a reader found: `complete`
        brings it within reach.
        """
        if self.look(partition_id).marker_end > high_watermark:
            return True
        return bool(self.tail.entries(partition_id, high_watermark, self.log.latest()))

    def complete(self, partition: Partition) -> int:
        """Bring a log up to the next offset; see `txnkv.topics.completing`. Answers its end."""
        return completing.complete(self, partition)

    # -- writing -----------------------------------------------------------------------

    def append(
        self,
        row: TxnRow,
        partition: Partition,
        batches: Sequence[bytes],
        attempt: Attempt | None = None,
    ) -> list[int]:
        """Append batches of a large transaction; see `txnkv.topics.append`."""
        return append.append(self, row, partition, batches, attempt)

    def append_alone(
        self, partition: Partition, batches: Sequence[bytes], attempt: Attempt | None = None
    ) -> list[int]:
        """Append plain batches, outside of a transaction; see `txnkv.topics.append`."""
        return append.append_alone(self, partition, batches, attempt)

    def _write_out(self, partition_ids: list[int]) -> dict[Key, str]:
        with self.store.status.read() as cur:
            live = catalog.live_partitions(cur)
        ids = [id for id in partition_ids if id in live]
        complete = partial(completing.complete, self)
        errors = self.each(ids, "a flush", complete, DAMAGE, side_by_side=True)
        return {
            (payload.TOPIC, id): f"{self._partitions[id].label} is damaged: {error}"
            for id, error in errors.items()
        }

    # -- background --------------------------------------------------------------------

    def add_sweep(self, sweep: Callable[[Lease], None]) -> None:
        """Add work on topics that the leader does in each round."""
        self._sweeps.append(sweep)

    def sweep(self, lease: Lease) -> None:
        """The leader's work on topics: markers that nobody wrote, what was dropped."""
        guard = self.coordinator.damage.guard
        with guard("topics", "end markers"):
            self.complete_marked()
        with guard("topics", "removal of what was dropped"):
            if lease.term is not None and lease.term != self._swept_term:
                purging.remove_strays(self)
                self._swept_term = lease.term
            purging.purge(self)
        with guard("topics", "side logs"):
            self._sweep_side_logs(lease)
        for sweep in self._sweeps:
            with guard("topics", sweep.__qualname__):
                sweep(lease)

    def _sweep_side_logs(self, lease: Lease) -> None:
        def check() -> None:
            with self.store.status.read(durable=False) as cur:
                lease.confirm(cur)

        with self.store.status.read() as cur:
            ids = catalog.sidecar_partitions(cur)

        def sweep(partition: Partition) -> None:
            if partition.exists and partition.side is not None:
                partition.side.sweep(partition.log, check)

        self.each(ids, "its side logs", sweep)

    def complete_marked(self, txn_id: int | None = None) -> dict[int, Exception]:
        """Write end markers that are noted into their logs: of one transaction, or all.

        Returns:
            Errors, by partition.
        """
        with self.store.status.read() as cur:
            ids = completing.partitions_of(cur, txn_id)
        written: list[tuple[int, int]] = []

        def complete(partition: Partition) -> None:
            with partition.environment.read() as txn:
                end = partition.log.end(txn)
            if self.look(partition.id).marker_end > end:
                end = completing.complete(self, partition)
            written.append((end, partition.id))

        errors = self.each(ids, "its end markers", complete)
        if written:
            completing.forget_markers(self.store, written)
        return errors

    def after_fork_in_child(self) -> None:
        """Forget what the parent looks at."""
        self._looks = {}
        self.watch = Watch()
        self.subscriptions.after_fork_in_child()
