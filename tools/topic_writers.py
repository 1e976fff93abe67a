"""Sends messages the small and the large way, by the engine alone: for tests and crash scenarios.

small(client, partitions, values)    one commit, its messages in the payload
begin(client)                        a transaction whose row is stored
send(client, row, partition, values) a batch of it, into LMDB at once
commit(client, row), abort(client, row)
"""

from __future__ import annotations

from collections.abc import Sequence

import apsw
import pyarrow as pa

import txnkv
from txnkv import core
from txnkv.coordinator import payload
from txnkv.coordinator.commit_queue import SmallCommit
from txnkv.coordinator.ids import Timestamp
from txnkv.coordinator.payload import Section
from txnkv.coordinator.status_table import TxnRow
from txnkv.topics import topic_catalog
from txnkv.topics.topic_catalog import TopicInfo, TopicOptions
from txnkv.topics.topics import Partition
from txnkv.topics.write.append import AppendAttempt, append


def create(
    client: txnkv.Client, name: str = "events", partitions: int = 1, buffer: str = "marker"
) -> list[Partition]:
    """A topic; its partitions."""
    engine = client.instance.topics
    topic: TopicInfo = engine.create(name, partitions, buffer, TopicOptions())
    return engine.partitions(topic)


def batch(values: Sequence[bytes], txn_id: int = 0, *, decided: bool = False) -> bytes:
    """A batch without offsets."""
    messages = pa.record_batch({"value": pa.array(values, pa.binary())})
    return core.encode_batch(messages, timestamp=1, txn_id=txn_id, decided=decided)


def _begin(client: txnkv.Client, timeout: float | None, keepalive: float) -> TxnRow:
    return client.instance.coordinator.begin(
        timeout=timeout, isolation="snapshot", locking="optimistic", keepalive=keepalive
    )


def small_commit(
    client: txnkv.Client, partitions: Sequence[Partition], values: Sequence[bytes]
) -> SmallCommit:
    """A commit that sends the values to each of the partitions."""
    engine = client.instance.topics
    row = _begin(client, 60, 30)
    data = batch(values, row.txn_id, decided=True)

    def write(cur: apsw.Cursor, stamp: Timestamp) -> list[Section]:
        sections = []
        for partition in partitions:
            first = topic_catalog.take_offsets(cur, partition.id, len(values))
            placed = core.place(data, first, stamp)
            sections.append(Section(payload.TOPIC, partition.id, placed, first, len(values)))
        return sections

    versions = [engine.require_writable(partition.topic) for partition in partitions]

    def validate(cur: apsw.Cursor, _: Timestamp) -> None:
        engine.refuse_dropped(cur, min(versions), [partition.topic for partition in partitions])

    return SmallCommit(row.txn_id, (), validate, write, len(data) * len(partitions))


def small(
    client: txnkv.Client, partitions: Sequence[Partition], values: Sequence[bytes]
) -> Timestamp:
    """Commit a small transaction that sends the values to each of the partitions."""
    return client.instance.topics.log.commit(small_commit(client, partitions, values))


def begin(client: txnkv.Client, timeout: float | None = 60, keepalive: float = 30) -> TxnRow:
    """A large transaction: its OPEN row is stored."""
    return client.instance.coordinator.write_open(_begin(client, timeout, keepalive))


def send(
    client: txnkv.Client, row: TxnRow, partition: Partition, values: Sequence[bytes]
) -> list[int]:
    """Send one batch of a large transaction; its offset, if it has one yet."""
    attempt = AppendAttempt()
    append(client.instance.topics, row, partition, [batch(values, row.txn_id)], attempt)
    return [attempt.at] if partition.side is None and attempt.at is not None else []


def commit(client: txnkv.Client, row: TxnRow) -> TxnRow:
    """Commit a large transaction."""
    orchestrator = client.instance.coordinator.orchestrator
    orchestrator.start_commit(row.txn_id)
    return orchestrator.finish(row.txn_id)


def abort(client: txnkv.Client, row: TxnRow) -> TxnRow:
    """Roll a large transaction back."""
    return client.instance.coordinator.abort(row.txn_id, "rolled back")
