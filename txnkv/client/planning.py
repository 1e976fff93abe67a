"""Work on a store that is planned in one process and done in many: what Spark asks of it. And looks
at topics for people, which the command line takes.

`Planning` is what that takes beside the calls of users. It is the same for a store that is here and
for one on another host, where each call is one request.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

import pyarrow as pa

from txnkv.client.client import Client
from txnkv.client.table import Snapshot
from txnkv.coordinator import Mark, Timestamp, applications, name_transaction, names_below, one
from txnkv.errors import (
    InvalidTxnStateError,
    OffsetOutOfRangeError,
    TopicNotFoundError,
    TransactionTimedOutError,
    TxnNotFoundError,
)
from txnkv.storage import CachedProperty, boot_id
from txnkv.tables import Schema, history
from txnkv.tables import changed as has_changed
from txnkv.topics import (
    CommitReader,
    Cursor,
    Holders,
    Partition,
    PinnedRange,
    SubscriptionInfo,
    TopicOverview,
    TopicPart,
    TopicPlanner,
    TopicReading,
    ack_rows,
    bounds,
    held_messages,
    overview_of,
    pinned_range,
    subscription_stats,
)
from txnkv.transaction import At, Handle, Local, Transaction

_PLANS: Final = frozenset(["initial", "final", "ends", "latest", "parts"])


def inode_of(folder: str) -> tuple[int, int]:
    """Return the device and the inode of a folder."""
    found = os.stat(folder)
    return found.st_dev, found.st_ino


class Planning(Handle):
    """Calls of planners, their tasks and the command line, beside those that users have.

    Args:
        client: which has the store open.

    Attributes:
        store_id: of the store.
        folder: of the store, on its host.
        inode: of the folder: a copy of the store has the same id.
    """

    store_id: str
    folder: str
    inode: tuple[int, int]

    def __init__(self, client: Client) -> None:
        self._client = client
        self.store_id = client.instance.store.store_id
        self.folder = client.path
        self.inode = inode_of(self.folder)

    @CachedProperty
    def boot(self) -> str:
        """A text that tells the store's host, since it was started, from all others."""
        return boot_id()

    @classmethod
    def of(cls, client: Client) -> Planning:
        """Return that of a client's store, wherever it is."""
        if client.elsewhere is not None:
            found: Planning = client.elsewhere("planning", None)
            return found
        return cls(client)

    # -- tables ------------------------------------------------------------------------

    def schema_of(self, table: str, at: At | Transaction = None) -> Schema:
        """Return the schema that a table has now, at a time, or in a transaction.

        Raises:
            TableNotFoundError: there is no such table, or was none.
        """
        info = self._client.table_info(table)
        if isinstance(at, Transaction):
            return at.context.table_at_begin(info).schema
        if at is None:
            return info.schema
        return self._client.instance.engine.at(info, self._client.timestamp_of(at)).schema

    def changed(self, table: str, since: Timestamp, upto: Timestamp) -> bool:
        """Tell whether anything happened to a table with since < commit timestamp <= upto.

        Raises:
            TableNotFoundError: there is no such table.
        """
        client = self._client
        return has_changed(client.instance.engine, client.table_info(table), since, upto)

    # -- time --------------------------------------------------------------------------

    def latest(self) -> Snapshot:
        """Return the latest snapshot, which keeps its history."""
        instance = self._client.instance
        at, pin = history.hold_latest(instance.coordinator)
        try:
            return self._client.snapshot(at)
        finally:
            pin.end()

    def timestamp_of(self, at: At) -> Timestamp:
        """Return the timestamp that `at` names; the latest snapshot for None.

        Raises:
            ValueError: it is in the future.
        """
        return self._client.timestamp_of(at)

    def kept(self, table: str) -> tuple[float, Timestamp, Timestamp]:
        """Return the seconds of the past that are kept of a table, where it begins, and the last
        commit.
        """
        instance = self._client.instance
        with instance.store.status.read() as cur:
            (last,) = one(cur, "SELECT last_timestamp FROM clock")
        found = instance.engine.find(table)
        kept, floor = instance.coordinator.history, instance.engine.log.history_floor
        if found is not None and (own := instance.engine.own_history(found)) is not None:
            kept, floor = kept if own.seconds is None else own.seconds, own.floor
        return kept, floor, Timestamp(last)

    # -- topics ------------------------------------------------------------------------

    def plan(self, topic: str, reading: TopicReading, what: str, *args: Any) -> Any:
        """Return what a planner of the topic's reads says to `what`, one of its methods.

        Raises:
            TopicNotFoundError, OffsetOutOfRangeError, ValueError: as that raises.
        """
        if what not in _PLANS:
            raise ValueError(f"a read of a topic has no plan {what!r}")
        info = self._client.topic(topic).info
        planner = TopicPlanner(self._client.instance.topics, info, reading)
        return getattr(planner, what)(*args)

    def read_part(
        self, topic: str, part: TopicPart, number: int, max_bytes: int, may_lose: bool
    ) -> Iterator[pa.RecordBatch]:
        """The committed messages of one range of a part; columns as `core.MESSAGES`.

        Args:
            number: of the range.
            max_bytes: of messages in memory at a time, about.
            may_lose: go on behind what retention took, rather than raise.

        Raises:
            OffsetOutOfRangeError: retention took messages since they were planned.
            TopicNotFoundError: the topic was dropped since.
            CorruptionError: a batch is damaged.
        """
        info = self._client.topic(topic).info
        if info.id != part.topic_id:
            raise TopicNotFoundError(
                f"topic {topic!r} was dropped while it was read, and another was made under its "
                "name: begin again, with a new checkpoint"
            )
        engine = self._client.instance.topics
        partition, pinned = engine.partitions(info)[part.ranges[number][0]], part.ranges[number][1]
        if part.scattered:
            return self._committed(partition, pinned, max_bytes, may_lose)
        return pinned_range.read(engine, partition, pinned, max_bytes, skip_lost=may_lose)

    def _committed(
        self, partition: Partition, pinned: PinnedRange, most: int, may_lose: bool
    ) -> Iterator[pa.RecordBatch]:
        """Messages of the commits that have their places in a range, commit by commit."""
        engine = self._client.instance.topics
        begin = None if may_lose else pinned.begin
        reader = CommitReader(engine, partition, pinned.start, most, end=pinned.end, begin=begin)
        while True:
            try:
                ready = reader.load()
            except OffsetOutOfRangeError:
                start = bounds(engine, partition).start
                if not may_lose or start <= reader.position:
                    raise
                if start >= pinned.end:
                    return
                reader.seek(start)
                continue
            if ready:
                yield reader.take(1 << 31)
            elif not reader.moved:
                return

    def pending(self, info: SubscriptionInfo, ends: Mapping[int, int]) -> dict[int, int]:
        """Return, by partition, the last offset below an end that is not acknowledged, if any."""
        with self._client.instance.store.status.read() as cur:
            cursors = ack_rows.load_cursors(cur, info.id)
        found = {}
        for number, end in ends.items():
            cursor = cursors.get(info.topic.partitions[number])
            last = None if cursor is None else _last_pending(cursor, end)
            if last is not None:
                found[number] = last
        return found

    # -- topics as people see them -----------------------------------------------------

    def overview(self, topic: str) -> TopicOverview:
        """A topic as it is now."""
        return overview_of(self._client.instance.topics, self._client.topic(topic).info)

    def subscriptions(self, topic: str) -> dict[str, dict[str, Any]]:
        """The numbers of a topic's subscriptions, as `subscription_stats` has them, by name."""
        engine = self._client.instance.topics
        found = engine.subscriptions.of_topic(self._client.topic(topic).info)
        return {info.name: subscription_stats(engine, info) for info in found}

    def subscription(
        self, topic: str, name: str
    ) -> tuple[SubscriptionInfo, Holders, dict[int, int], dict[int, int]]:
        """A subscription, who has which of its messages, and by partition its lag and what is
        acknowledged.

        Raises:
            TopicNotFoundError: there is none.
        """
        engine = self._client.instance.topics
        for info in engine.subscriptions.of_topic(self._client.topic(topic).info):
            if info.name == name:
                lag = engine.subscriptions.lag(info)
                committed = engine.subscriptions.committed(info)
                return info, held_messages(engine, info), lag, committed
        raise TopicNotFoundError(f"topic {topic!r} has no subscription {name!r}")

    # -- transactions ------------------------------------------------------------------

    def is_applied(self, app_id: str, version: int, source: str | None) -> bool:
        """Tell whether a version of an application is committed.

        Raises:
            ValueError: the application is driven by another source.
        """
        with self._client.instance.store.status.read() as cur:
            return applications.is_applied(cur, Mark(app_id, version, source))

    def end_named(self, name: str) -> None:
        """End the transaction that was left under a name, if there is one."""
        self._client.instance.coordinator.end_named(name)

    def names_below(self, beginning: str) -> list[str]:
        """Return names that begin so, of transactions that are open or were ended from outside."""
        with self._client.instance.store.status.read() as cur:
            return names_below(cur, beginning)

    def name(self, txn: Transaction, names: list[str], job: str) -> None:
        """Give a stored transaction and its job names; without a job, once it is stored."""
        if not job:
            (txn.context.name,) = names
            return
        with self._client.instance.store.status.write() as cur:
            for name in names:
                name_transaction(cur, name, txn.context.row.txn_id, job)

    def abandon(self, txn: Transaction, reason: str, timed_out: bool = False) -> None:
        """Abort a stored transaction, unless its commit has begun, which then ends by itself."""
        orchestrator = self._client.instance.coordinator.orchestrator
        error = TransactionTimedOutError if timed_out else None
        txn_id = txn.context.row.txn_id
        with suppress(InvalidTxnStateError, TxnNotFoundError):
            orchestrator.start_abort(txn_id, reason, error, only_open=True)
            orchestrator.finish(txn_id)

    def was_rolled_back(self, txn: Transaction) -> bool:
        """Tell whether it was, by this handle."""
        return txn.context.local.at is Local.ABORTED


def _last_pending(cursor: Cursor, end: int) -> int | None:
    """The last offset below `end` that is not deleted: all before it goes with it."""
    last = end - 1
    for low, high in reversed(list(cursor.deleted)):
        if low <= last < high:
            last = low - 1
    return last if last >= cursor.mark else None
