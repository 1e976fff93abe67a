"""The topics of one store in this process: catalog, partitions, offsets, sweeps.

How a message reaches the log, and who sees it when:

    small commit     its messages ride in the commit's payload; their offsets are taken in its
                     SQLite transaction; they are in every process's tail then, and in LMDB
                     after the next flush                                          (tail)
    large            batches go to LMDB as they come, before anybody knows how the
                     transaction ends                                              (append)
    commit, abort    an end marker takes its offset inside the commit point
                     (partition_participants), and is written to the log by whoever
                     comes first                                            (roll_forward)

Every log is dense and written in the order of its offsets, so what it has is a prefix of what
was given, and whoever has LMDB's write lock can always bring it up to date.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from txnkv.coordinator import (
    Coordinator,
    Lease,
    forget_extents,
    least_snapshot,
    payload,
    remove_strays,
    status_table,
)
from txnkv.storage import clock, settle_dropped
from txnkv.topics import topic_catalog
from txnkv.topics.delivery import Subscriptions
from txnkv.topics.maintenance import retention
from txnkv.topics.partition import Partition
from txnkv.topics.partition_participants import KIND, PartitionParticipants
from txnkv.topics.sidecar import close_all
from txnkv.topics.topic_catalog import TopicInfo, TopicOptions
from txnkv.topics.topics import Topics
from txnkv.topics.write import StagedSendsFolder, producers, roll_forward

ENFORCED_EVERY: Final = 60 * 1_000_000
"""Microseconds between two rounds of retention, and of what idle producers left."""


class TopicEngine(Topics):
    """Topics, and the work on them: takes part in transactions and in the leader's rounds.

    Attributes:
        subscriptions: of the store.
        staged: messages of a job's attempts, which wait for its end.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        super().__init__(coordinator, partial(roll_forward.write_out, self))
        self.log.add_member(payload.TOPIC, self.tail)
        self.subscriptions = Subscriptions(self)
        self.staged = StagedSendsFolder(self)
        self._swept_term: int | None = None
        self._enforced: int | None = None
        handlers = PartitionParticipants(self), self.subscriptions.handler, self.staged.handler
        for handler in handlers:
            coordinator.orchestrator.add_handler(handler)
        coordinator.maintenance.add_sweep(self.sweep)
        coordinator.maintenance.add_look(self.forget_gone)

    def create(self, name: str, partitions: int, buffer: str, options: TopicOptions) -> TopicInfo:
        """Add a topic.

        Raises:
            TopicExistsError: the name is taken.
            ValueError: an argument makes no sense.
        """
        with self.store.status.write() as cur:
            return topic_catalog.create(cur, name, partitions, buffer, options)

    def drop(self, name: str) -> bool:
        """Drop a topic; open transactions that touched it are aborted.

        Returns:
            False when there is no such topic.
        """
        with self.store.status.write() as cur:
            topic = topic_catalog.find(cur, name)
            if topic is None:
                return False
            topic_catalog.drop(cur, topic)
            touched = status_table.transactions_of(cur, KIND, topic.partitions)
            touched += self.subscriptions.transactions_of(cur, topic)
        self.coordinator.orchestrator.abort_all(touched, f"topic {name!r} was dropped")
        self.purge()
        return True

    def sweep(self, lease: Lease) -> None:
        """The leader's work on topics: markers that nobody wrote, what was dropped."""
        guard = self.coordinator.damage.guard
        with guard("topics", "end markers"):
            roll_forward.complete_marked(self)
        with guard("topics", "removal of what was dropped"):
            if lease.term is not None and lease.term != self._swept_term:
                folder = self.store.directory.log_dir(0).parent
                remove_strays(self.store, folder, topic_catalog.partition_ids, self._remove)
                self._swept_term = lease.term
            self.purge()
        with guard("topics", "side logs"):
            self._sweep_side_logs(lease)
        with guard("topics", "retention and idle producers"):
            self._enforce(lease)
        with guard("topics", "subscriptions"):
            self.subscriptions.sweep(lease)
        with guard("topics", "staged messages"):
            self.staged.sweep(lease)

    def _enforce(self, lease: Lease) -> None:
        now = clock.monotonic_micros()
        if self._enforced is None or now - self._enforced >= ENFORCED_EVERY:
            retention.enforce_all(self, retention.checked_by(self, lease))
            producers.forget_idle(self.store, lease)
            self._enforced = now

    def _sweep_side_logs(self, lease: Lease) -> None:
        def check() -> None:
            with self.store.status.read(durable=False) as cur:
                lease.confirm(cur)

        with self.store.status.read() as cur:
            ids = topic_catalog.sidecar_partitions(cur)

        def sweep(partition: Partition) -> None:
            if partition.exists and partition.side is not None:
                partition.side.sweep(partition.log, check)

        self.each(ids, "its side logs", sweep)

    def purge(self) -> None:
        """Remove the files of dropped topics that nobody reads any more."""
        settle_dropped()
        with self.store.status.read() as cur:
            gone = topic_catalog.dropped_before(cur, least_snapshot(self.store, cur))
        ids = [id for topic in gone for id in topic.partitions]
        forget_extents(self.store, "logs", ids)
        for id in ids:
            self.forget(id)
            self._remove(id)
        if gone:
            with self.store.status.write() as cur:
                cur.executemany("DELETE FROM topics WHERE id = ?", [(topic.id,) for topic in gone])

    def _remove(self, id: int) -> None:
        folder = self.store.directory.log_dir(id)
        close_all(self.store.environments, folder, f"logs/{id}")
        self.store.environments.drop(f"logs/{id}")
        self.store.directory.remove_log_dir(id)
