"""One partition read in the order of its offsets: fetch, filter, decode, give.

    position      what the reader was given last, and one more
    fetched to    what was fetched and decoded, and waits here to be given

A fetch is decoded once and given in slices. Control batches and aborted ones are passed over;
the position moves with them, so a reader never looks at them again.
"""

from __future__ import annotations

from typing import Protocol

import pyarrow as pa

from txnkv.core import CommittedFilter, CoreError, Spans, all_data, intact
from txnkv.errors import CorruptionError
from txnkv.topics.messages import Reassembly
from txnkv.topics.partition import Partition
from txnkv.topics.read.look_back import LookBack
from txnkv.topics.read.partition_fetch import FETCH_BYTES, FetchResult, fetch, is_committed
from txnkv.topics.topics import Topics


class PartitionReader(Protocol):
    """One partition as a consumer reads it, in whichever order."""

    @property
    def position(self) -> int:
        """The offset at which a new reader would go on after the messages that were given."""

    @property
    def empty_at(self) -> int | None:
        """The end of the partition when the last look found nothing; else None."""

    @property
    def pending(self) -> bool:
        """The last look saw signs of messages that are on their way."""

    @property
    def moved(self) -> bool:
        """The last `load` passed over something, and more may follow at once."""

    @property
    def held(self) -> int:
        """Bytes of messages that are ready, those given of them included."""

    def load(self, *, room: int | None = None) -> bool:
        """See to it that messages are ready, with one look at the log at most; whether they are.

        `room`: bytes of them, at most, unless one batch has more.
        """

    def take(self, most: int, room: int | None = None) -> pa.RecordBatch:
        """The next messages of those that are ready, of `room` bytes at most unless one has more;
        columns as `core.MESSAGES`.
        """

    def seek(self, offset: int) -> None:
        """Go elsewhere."""


def fitting(rows: pa.RecordBatch, room: int) -> pa.RecordBatch:
    """The first rows that have so many bytes together at most; one at least."""
    if rows.nbytes <= room:
        return rows
    low, high = 1, rows.num_rows
    while low < high:
        middle = (low + high + 1) // 2
        if rows.slice(0, middle).nbytes <= room:
            low = middle
        else:
            high = middle - 1
    return rows.slice(0, low)


class OffsetReader:
    """A reader in offset order. One thread at a time.

    Args:
        topics: of the store.
        partition: where to read.
        offset: where to begin.
        isolation: "read_uncommitted" or "read_committed".
        max_bytes: of one fetch.

    Attributes:
        empty_at, pending, moved, held: see `PartitionReader`.
    """

    def __init__(
        self,
        topics: Topics,
        partition: Partition,
        offset: int,
        isolation: str,
        max_bytes: int = FETCH_BYTES,
    ) -> None:
        self._topics = topics
        self._partition = partition
        self._isolation = isolation
        self._max_bytes = max_bytes
        self._filter = CommittedFilter() if is_committed(isolation) else None
        self._reassembly = Reassembly()
        self._look_back = LookBack(
            topics, partition, self._reassembly, begin=0, max_bytes=max_bytes, skip_lost=True
        )
        self.empty_at: int | None = None
        self.moved = False
        self.held = 0
        self._ready: pa.RecordBatch | None = None
        self._given = 0
        self._position = self._fetched_to = offset

    @property
    def position(self) -> int:
        """The offset at which a new reader would go on: behind the last message that was given, and
        before those that are not, large ones that have begun included.
        """
        return self._position

    @property
    def large(self) -> dict[int, int]:
        """Large messages of the last `load`: the offset of each, with that of its first piece."""
        return self._reassembly.completed

    @property
    def has_begun(self) -> bool:
        """A large message has begun of which not all pieces were found yet."""
        return self._reassembly.has_begun

    @property
    def pending(self) -> bool:
        """See `PartitionReader`."""
        at = self.empty_at
        return at is not None and self._topics.look(self._partition.id).next_offset > at

    def seek(self, offset: int) -> None:
        """Go elsewhere; what is known of aborted transactions is forgotten."""
        if self._filter is not None:
            self._filter.reset()
        self._reassembly.reset()
        self._ready, self.held, self.empty_at = None, 0, None
        self._position = self._fetched_to = offset

    def load(self, *, room: int | None = None) -> bool:
        """Have messages ready, with one fetch at most.

        Args:
            room: of that fetch, if it is less than `max_bytes`.

        Raises:
            OffsetOutOfRangeError: the partition does not hold the position.
            TopicNotFoundError: the topic was dropped.
            CorruptionError: a batch is damaged; the position stays before the fetch.
        """
        self.moved = False
        if self._ready is not None:
            return True
        self.empty_at = None
        at = self._fetched_to
        most = self._max_bytes if room is None else max(min(room, self._max_bytes), 1)
        found = fetch(self._topics, self._partition, at, most, self._isolation)
        try:
            rows, following = self._rows(found, at)
        except CoreError as error:
            raise CorruptionError(f"{self._partition.label}, offset {at}: {error}") from None
        self._fetched_to = following
        if rows is None:
            self._position = following
            self.moved = following > at
            self.empty_at = None if self.moved else found.high_watermark
            return False
        self._ready, self._given, self.held = rows, 0, rows.nbytes
        return True

    def take(self, most: int, room: int | None = None) -> pa.RecordBatch:
        """The next messages, `most` at most, of `room` bytes at most unless one has more. Only
        after `load` said that there are any.
        """
        ready = self._ready
        assert ready is not None, "nothing was loaded"
        given = self._given
        part = ready.slice(given, most)
        if room is not None and self.held > room:
            part = fitting(part, room)
        self._given = given + part.num_rows
        if self._given < ready.num_rows:
            self._position = ready.column("offset")[self._given - 1].as_py() + 1
        else:
            self._ready, self.held = None, 0
            self._position = self._fetched_to
        return part

    def _rows(self, found: FetchResult, at: int) -> tuple[pa.RecordBatch | None, int]:
        """The messages of a fetch, if it has any, and where to read on."""
        if not found.records:
            return None, at
        records = intact(found.records)
        spans: Spans
        if self._filter is None:
            spans = all_data(records, at, found.high_watermark)
        else:
            assert found.aborted is not None
            spans = self._filter.keep(records, found.aborted, at, found.last_stable_offset)
        self._look_back.complete(records, spans)
        rows = self._reassembly.decode(records, spans, at) if len(spans) else None
        if self._filter is None:
            self._reassembly.end_transactions(records)
        return (rows if rows is not None and rows.num_rows else None), spans.next_offset
