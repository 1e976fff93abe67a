"""Messages into topics by the engine alone, without sessions: for tests and the crash driver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import apsw
import lmdb
import pyarrow as pa

import txnkv
from txnkv import core
from txnkv.coordinator import payload
from txnkv.coordinator.commit_queue import SmallCommit
from txnkv.coordinator.ids import Timestamp
from txnkv.coordinator.payload import Section
from txnkv.coordinator.status_table import TxnRow
from txnkv.topics import delete_after, topic_catalog
from txnkv.topics.messages.message_input import now_micros
from txnkv.topics.topic_catalog import TopicOptions
from txnkv.topics.write import roll_forward
from txnkv.topics.write.append import AppendAttempt, append

_TIMEOUT: Final = 600.0


class Writer:
    """Writes to one topic, which it makes when it is not there.

    Args:
        client: of the store.
        topic: its name.
        partitions, buffer, options: of the topic.
    """

    def __init__(
        self,
        client: txnkv.Client,
        topic: str,
        partitions: int = 1,
        buffer: str = "marker",
        options: TopicOptions | None = None,
    ) -> None:
        self.client = client
        self.engine = client.instance.topics
        found = self.engine.find(topic)
        if found is None:
            found = self.engine.create(topic, partitions, buffer, options or TopicOptions())
        self.topic = found
        self.partitions = self.engine.partitions(found)

    def small(self, *texts: str, number: int = 0, timestamp: int | None = None) -> Timestamp:
        """Commit messages as one small transaction."""
        partition = self.partitions[number]
        ids = self.client.instance.coordinator.ids
        txn_id = ids.begin()
        batch = _batch(texts, txn_id, decided=True, timestamp=timestamp)

        def write(cur: apsw.Cursor, stamp: Timestamp) -> Sequence[Section]:
            base = topic_catalog.take_offsets(cur, partition.id, len(texts))
            placed = core.place(batch, base, stamp)
            return [Section(payload.TOPIC, partition.id, placed, base, len(texts))]

        commit = SmallCommit(txn_id, (), lambda cur, latest: None, write, len(batch))
        try:
            return self.engine.log.commit(commit)
        finally:
            ids.ended(txn_id)

    def begin(self) -> TxnRow:
        """A transaction whose messages go to the log at once."""
        coordinator = self.client.instance.coordinator
        row = coordinator.begin(
            timeout=_TIMEOUT, isolation="snapshot", locking="optimistic", keepalive=_TIMEOUT
        )
        return coordinator.write_open(row)

    def append(
        self, row: TxnRow, *texts: str, number: int = 0, key: bytes | None = None
    ) -> list[int]:
        """Messages of an open transaction; the offset of the first, if they have any yet."""
        batch = _batch(texts, row.txn_id, decided=False, timestamp=None, key=key)
        partition, attempt = self.partitions[number], AppendAttempt()
        append(self.engine, row, partition, [batch], attempt)
        return [attempt.at] if partition.side is None and attempt.at is not None else []

    def commit(self, row: TxnRow) -> None:
        """Commit it, with its end markers."""
        orchestrator = self.client.instance.coordinator.orchestrator
        orchestrator.start_commit(row.txn_id)
        orchestrator.finish(row.txn_id)

    def abort(self, row: TxnRow) -> None:
        """Abort it, with its end markers."""
        self.client.instance.coordinator.abort(row.txn_id, "as the scenario has it")

    def truncate(self, offset: int, number: int = 0) -> int:
        """Cut the end of a partition off: an offset, and all behind it."""
        flush = self.client.instance.engine.flush
        return delete_after(self.engine, self.partitions[number], offset - 1, flush)

    def lose(self, offset: int, number: int = 0) -> None:
        """Lose the end of a partition, and that it was there, as a store that is put back."""
        partition = self.partitions[number]
        flush = self.client.instance.engine.flush
        flush()
        roll_forward.complete(self.engine, partition)

        def cut(txn: lmdb.Transaction) -> int:
            if partition.side is not None:
                partition.side.truncate(txn, offset)
            return partition.log.truncate(txn, offset)

        end = partition.environment.write(cut)
        with self.client.instance.store.status.write() as cur:
            cur.execute("UPDATE partitions SET next_offset = ? WHERE id = ?", (end, partition.id))
            cur.execute(
                "DELETE FROM end_markers WHERE partition_id = ? AND first_offset >= ?",
                (partition.id, end),
            )


def _batch(
    texts: Sequence[str],
    txn_id: int,
    *,
    decided: bool,
    timestamp: int | None,
    key: bytes | None = None,
) -> bytes:
    values = pa.array([text.encode() for text in texts], pa.binary())
    keys = pa.array([key] * len(texts), pa.binary())
    messages = pa.record_batch({"key": keys, "value": values})
    at = now_micros() if timestamp is None else timestamp
    return core.encode_batch(messages, timestamp=at, txn_id=txn_id, decided=decided)
