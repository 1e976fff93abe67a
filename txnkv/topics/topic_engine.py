"""The topics of one store in this process: catalog, partitions, offsets, sweeps.

How a message reaches the log, and who sees it when:

    small commit     its messages ride in the commit's payload; their offsets are taken in its
                     SQLite transaction; they are in every process's tail then, and in LMDB
                     after the next flush                                          (tail)
    large            batches go to LMDB as they come, before anybody knows how the
                     transaction ends                                              (append)
    commit, abort    an end marker takes its offset inside the commit point
                     (PartitionParticipants), and is written to the log by whoever
                     comes first                                            (roll_forward)

Every log is dense and written in the order of its offsets, so what it has is a prefix of what
was given, and whoever has LMDB's write lock can always bring it up to date.

Partitions take part in a transaction with end markers, in commit order:

    begin_commit     LMDB's lock is taken once in each partition: an append that saw the
                     transaction OPEN is over, and what it has there is final
    write_commit     inside the commit point: each end marker takes its offset and is noted, so
                     markers stand in the log as commits in time
    finalize         markers go into the logs, unless somebody was faster, and are forgotten
    commit_alone     of who sent to one partition only: the commit point and the marker at once
    abort            nothing has to be noted: under LMDB's lock the marker takes its offset and
                     is written, if the transaction has anything there

All of it may be done again, by any process: what is in the log says what is still to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

import apsw
import lmdb

from txnkv.coordinator import PARTITION as KIND
from txnkv.coordinator import (
    Coordinator,
    Lease,
    Participants,
    Timestamp,
    TxnRow,
    forget_extents,
    least_snapshot,
    low_water_mark,
    payload,
    raise_first,
    remove_strays,
    status_table,
    wall_timestamp,
)
from txnkv.core import ControlType, require_zones
from txnkv.errors import SchemaError, TopicExistsError, TopicNotFoundError, TxnkvError
from txnkv.storage import BusyError, clock, declare_fault_point, fault_point, settle_dropped
from txnkv.topics import key_compaction, retention, subscription_catalog, topic_catalog
from txnkv.topics.delivery import Subscriptions
from txnkv.topics.sidecar import close_all
from txnkv.topics.tail import EndMarker, is_noted, note_marker
from txnkv.topics.topic_catalog import TopicInfo, TopicOptions, ValuesOf
from txnkv.topics.topics import Partition, Topics
from txnkv.topics.write import StagedSendsFolder, producers, roll_forward

__all__ = ["KIND", "PartitionParticipants"]

declare_fault_point("marker.decided", "a commit of one partition is durable, unmarked")
declare_fault_point("marker.aborting", "an abort marker has its offset, it is not in the log")
declare_fault_point("marker.aborted", "an abort marker is in its log, durable")
declare_fault_point("marker.written", "all end markers of a commit are in their logs")
declare_fault_point("topic.altered", "a topic has other options, COMMIT was not called")
declare_fault_point("topic.alter_durable", "a topic has other options, nobody was told")


class PartitionParticipants(Participants):
    """Partitions of topics."""

    kind = KIND

    def __init__(self, topics: Topics) -> None:
        super().__init__(topics.log)
        self._topics = topics
        self._store = topics.store
        # By transaction and partition, as begin_commit saw it: final by then.
        self._ends: dict[int, dict[int, EndMarker]] = {}

    # -- alone -------------------------------------------------------------------------

    def commit_alone(
        self, row: TxnRow, id: int, decide: Callable[[apsw.Cursor], Timestamp | None]
    ) -> bool:
        """The commit point and the end marker under the log's lock, which waits for appends."""
        topics, partition = self._topics, self._topics.partition(id)
        if partition is None:
            return False
        decided: list[Timestamp] = []

        def write(txn: lmdb.Transaction) -> None:
            end = None if decided else _end_of(txn, partition, row.txn_id)
            with self._store.status.write() as cur:
                stamp = None if decided else decide(cur)
                if stamp is not None and end is not None:
                    _give_offset(cur, id, end, stamp)
                waiting = roll_forward.look(topics, cur, partition, partition.log.end(txn))
            if stamp is not None:
                decided.append(stamp)
                fault_point("marker.decided")
            roll_forward.write(txn, partition, waiting)

        try:
            partition.environment.write(write)
        except TxnkvError:
            # It is committed; the marker is noted, and whoever comes next writes it.
            if not decided:
                raise
        if decided:
            self._store.runtime.raise_durable(decided[0])
        return bool(decided)

    # -- COMMIT_IN_PROGRESS ------------------------------------------------------------

    def begin_commit(self, row: TxnRow, ids: Sequence[int]) -> Timestamp:
        """Wait for appends that are under way; see what end markers there will be."""
        ends = {}
        for id in ids:
            partition = self._topics.partition(id)
            if partition is not None:
                find = partial(_end_of, partition=partition, txn_id=row.txn_id)
                end = partition.environment.write(find)
                if end is not None:
                    ends[id] = end
        self._ends[row.txn_id] = ends
        return self._log.latest()

    def write_commit(
        self, cur: apsw.Cursor, row: TxnRow, ids: Sequence[int], commit_ts: Timestamp
    ) -> None:
        """Give each end marker its offset."""
        for id, end in self._ends[row.txn_id].items():
            _give_offset(cur, id, end, commit_ts)

    # -- the end -----------------------------------------------------------------------

    def finalize_commit(self, row: TxnRow, ids: Sequence[int]) -> None:
        """See to it that the end markers are in their logs."""
        self._ends.pop(row.txn_id, None)
        raise_first(roll_forward.complete_marked(self._topics, row.txn_id))
        fault_point("marker.written")

    def abort(self, row: TxnRow, ids: Sequence[int]) -> None:
        """Write abort markers where the transaction has sent anything."""
        self._ends.pop(row.txn_id, None)
        raise_first(
            self._topics.each(
                ids, "an abort", lambda partition: _abort_in(self._topics, partition, row.txn_id)
            )
        )


def abort_unknown(topics: Topics, txn_id: int) -> bool:
    """End a transaction that logs call open and status.db does not know; its messages are aborted.

    Returns:
        False when no log has it.
    """
    found: list[Partition] = []

    def abort(partition: Partition) -> None:
        # Those of a copy are another store's.
        if partition.topic.options.replica_of is None and txn_id in open_in(partition):
            _abort_in(topics, partition, txn_id)
            found.append(partition)

    with topics.store.status.read() as cur:
        ids = sorted(topic_catalog.live_partitions(cur))
    topics.each(ids, "an abort", abort)
    return bool(found)


def end_strays(topics: Topics, partition: Partition) -> None:
    """End the transactions that a log calls open and that are over; their messages are aborted."""
    for txn_id in open_in(partition):
        with topics.store.status.read() as cur:
            row = status_table.find(cur, txn_id)
            noted = is_noted(cur, partition.id, txn_id)
        if (row is None or row.state.ended) and not noted:
            _abort_in(topics, partition, txn_id)


def open_in(partition: Partition) -> dict[int, int | None]:
    """Transactions that a log or its side logs have open, and their first offsets in the log."""
    if not partition.exists:
        return {}
    with partition.environment.read() as txn:
        found: dict[int, int | None] = {
            each.txn_id: each.first_offset for each in partition.log.open_transactions(txn)
        }
        if partition.side is not None:
            found |= {id: None for id, _ in partition.side.open_transactions(txn)}
    return found


def _end_of(txn: lmdb.Transaction, partition: Partition, txn_id: int) -> EndMarker | None:
    """The end marker that a commit needs, without offset; None where nothing was sent."""
    if partition.side is not None:
        count = partition.side.count(txn, txn_id)
        if count == 0:
            return None
        return EndMarker(0, count, txn_id, int(ControlType.SIDE_LIST), 0, 0, 0)
    first = partition.log.first_offset_of(txn, txn_id)
    if first is None:
        return None
    return EndMarker(0, 1, txn_id, int(ControlType.COMMIT), 0, 0, first)


def _give_offset(cur: apsw.Cursor, id: int, end: EndMarker, commit_ts: Timestamp) -> None:
    # In a log with a side log nothing is ever open, and nothing comes late.
    mark = low_water_mark(cur) if end.type == ControlType.COMMIT else 0
    first = topic_catalog.take_offsets(cur, id, end.count)
    marker = end._replace(first_offset=first, commit_ts=commit_ts, low_water_mark=mark)
    note_marker(cur, id, marker)


def _abort_in(topics: Topics, partition: Partition, txn_id: int) -> None:
    def write(txn: lmdb.Transaction) -> bool:
        if partition.side is not None:
            partition.side.abort(txn, txn_id)
            return False
        first = partition.log.first_offset_of(txn, txn_id)
        if first is None:
            return False
        end = partition.log.end(txn)
        with topics.store.status.write() as cur:
            waiting = roll_forward.look(topics, cur, partition, end)
            offset = topic_catalog.take_offsets(cur, partition.id, 1)
            mark = low_water_mark(cur)
        fault_point("marker.aborting")
        now = wall_timestamp()
        marker = EndMarker(offset, 1, txn_id, int(ControlType.ABORT), now, mark, first)
        roll_forward.write(
            txn,
            partition,
            waiting._replace(upto=offset + 1, markers=[*waiting.markers, marker]),
        )
        return True

    if partition.environment.write(write):
        fault_point("marker.aborted")


_REMOVAL: Final = "removal of what was dropped"
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
        self._compacted: int | None = None
        handlers = PartitionParticipants(self), self.subscriptions.handler, self.staged.handler
        for handler in handlers:
            coordinator.orchestrator.add_handler(handler)
        coordinator.maintenance.add_sweep(self.sweep)
        coordinator.maintenance.add_sweep(self.compact_keys, beside="txnkv-compact")
        coordinator.maintenance.add_look(self.forget_gone)

    def create(
        self,
        name: str,
        partitions: int,
        buffer: str,
        options: TopicOptions,
        *,
        exists_ok: bool = False,
        values_of: ValuesOf | None = None,
    ) -> TopicInfo:
        """Add a topic.

        Args:
            values_of: with `exists_ok`: the values of one that is there get these schemas.

        Raises:
            SchemaError: a column of values has a time zone that is none.
            TopicExistsError: the name is taken; with `exists_ok`, by one that is different.
            ValueError: an argument makes no sense.
            NotSupportedError: key compaction of a topic with buffer="sidecar".
        """
        with self.store.status.write() as cur:
            found = topic_catalog.find(cur, name) if exists_ok else None
            if found is None:
                require_zones(options.value_schema or ())
                topic_catalog.declare_values(self.store.directory, options)
                return topic_catalog.create(cur, name, partitions, buffer, options)
            made = found if values_of is None else _with_values(found, values_of)
            made.require_alike(partitions, buffer, options)
        if made == found:
            return found
        topic_catalog.require_writable(found, "alter")
        try:
            return self.alter(found, {}, None, values_of)
        except TopicNotFoundError:  # it was dropped meanwhile
            return self.create(
                name, partitions, buffer, options, exists_ok=True, values_of=values_of
            )

    def alter(
        self,
        topic: TopicInfo,
        changes: Mapping[str, Any],
        partitions: int | None = None,
        values_of: ValuesOf | None = None,
    ) -> TopicInfo:
        """Give a topic other options, more partitions, or another schema of values, which topics of
        dead letters get too that have its schemas; see `topic_catalog.alter`. No round of retention
        that goes by those of before is under way when it returns.
        """
        # A backup has the partitions of its moment: only options wait until it has copied logs.
        cuts = self.store.log_cuts() if changes or values_of else nullcontext()
        with cuts, self.store.status.write() as cur:
            letters = subscription_catalog.letters_alike(cur, topic) if values_of else ()
            topic = topic_catalog.alter(cur, topic, changes, partitions, values_of)
            if values_of is not None:
                require_zones(topic.options.value_schema or ())
            topic_catalog.declare_values(self.store.directory, topic.options)
            for each in letters:
                topic_catalog.alter(cur, each, {}, None, lambda _: topic.options.values)
            if partitions is not None:
                subscription_catalog.cover(cur, topic)
            fault_point("topic.altered")
        fault_point("topic.alter_durable")
        return topic

    def drop(self, given: str | TopicInfo) -> bool:
        """Drop a topic; open transactions that touched it are aborted.

        Args:
            given: its name, or what it was once.

        Returns:
            False when there is no such topic.
        """
        with self.store.status.write() as cur:
            topic = topic_catalog.find(cur, given if isinstance(given, str) else given.name)
            if topic is None or (isinstance(given, TopicInfo) and topic.id != given.id):
                return False
            topic_catalog.drop(cur, topic)
            touched = status_table.transactions_of(cur, KIND, topic.partitions)
            touched += self.subscriptions.transactions_of(cur, topic)
        self.coordinator.orchestrator.abort_all(touched, f"topic {topic.name!r} was dropped")
        # It stays dropped: what fails here is tried again by the leader.
        with self.coordinator.damage.guard("topics", _REMOVAL):
            self.purge()
        return True

    def sweep(self, lease: Lease) -> None:
        """The leader's work on topics: markers that nobody wrote, what was dropped."""
        guard = self.coordinator.damage.guard
        with guard("topics", "end markers"):
            roll_forward.complete_marked(self)
        with guard("topics", _REMOVAL):
            if lease.term is not None and lease.term != self._swept_term:
                folder = self.store.directory.log_dir(0).parent
                remove_strays(self.store, folder, topic_catalog.partition_ids, self._remove)
                self._swept_term = lease.term
            self.purge()
        with guard("topics", "side logs"), suppress(BusyError):  # a backup copies logs
            self._sweep_side_logs(lease)
        with guard("topics", "retention and idle producers"), suppress(BusyError):
            self._enforce(lease)
        with guard("topics", "subscriptions"):
            self.subscriptions.sweep(lease)
        with guard("topics", "staged messages"):
            self.staged.sweep(lease)

    def _enforce(self, lease: Lease) -> None:
        now = clock.monotonic_micros()
        if self._enforced is None or now - self._enforced >= ENFORCED_EVERY:
            with self.store.log_cuts(wait=False):
                retention.enforce_all(self, retention.checked_by(self, lease))
            producers.forget_idle(self.store, lease)
            self._enforced = now

    def compact_keys(self, lease: Lease) -> None:
        """The leader's compaction of keys, on a thread beside its sweeps."""
        now = clock.monotonic_micros()
        if self._compacted is not None and now - self._compacted < ENFORCED_EVERY:
            return
        leads = retention.checked_by(self, lease)

        def check() -> None:
            self.coordinator.maintenance.require_running()
            leads()

        with self.coordinator.damage.guard("topics", "compaction of keys"), suppress(BusyError):
            key_compaction.compact_all(self, check)
            self._compacted = now

    def _sweep_side_logs(self, lease: Lease) -> None:
        def check() -> None:
            with self.store.status.read(durable=False) as cur:
                lease.confirm(cur)

        with self.store.status.read() as cur:
            ids = topic_catalog.sidecar_partitions(cur)

        def sweep(partition: Partition) -> None:
            if partition.exists and partition.side is not None:
                partition.side.sweep(partition.log, check)

        if ids:
            with self.store.log_cuts(wait=False):
                self.each(ids, "its side logs", sweep)

    def compact(self) -> key_compaction.HiddenLeftOut:
        """Compact all topics that are to be, and give up what others do not retain, as far as they
        are decided; behind a backup, if there are some. The disk has the room then.
        """

        def give(partition: Partition) -> None:
            if partition.exists:
                partition.environment.give_all_room_back()

        topics = [each for each in map(self.find, self.names()) if each]
        if any(map(retention.is_limited, topics)):
            with self.store.log_cuts():
                retention.enforce_all(self, force=True)
        done = key_compaction.compact_all(self, force=True)
        for topic in topics:
            self.partitions(topic)
            self.each(topic.partitions, "its room", give)
        return done

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


def _with_values(topic: TopicInfo, values_of: ValuesOf) -> TopicInfo:
    """Return the topic with other schemas of values.

    Raises:
        TopicExistsError: its values cannot be of these.
    """
    try:
        options = topic.options.with_values(values_of(topic.options))
    except SchemaError as error:
        raise TopicExistsError(
            f"there is a topic {topic.name!r} already, and its values cannot get this schema: "
            f"{error}"
        ) from None
    return replace(topic, options=options)
