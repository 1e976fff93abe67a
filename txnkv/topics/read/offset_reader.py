"""One partition read in the order of its offsets: fetch, filter, decode, give.

    position      what the reader was given last, and one more
    fetched to    what was fetched and decoded, and waits here to be given

**A fetch** is raw batches, and what a reader needs to know to filter them:

    isolation          batches below              aborted list
    read_uncommitted   the high watermark         none: nothing is left out
    read_committed     the last stable offset     of the transactions that may be in the fetch

The batches are those of the log, whole, joined in one copy and not filtered: the reader drops
aborted ones by the list (`core.CommittedFilter`), which may name more transactions than the
fetch has, and never less. Their checksums are the reader's to look at, before it filters
(`core.intact`): a fetch looks at headers and offsets alone. A fetch at or behind the last stable
offset is empty and no error; one outside of what the partition holds is an error that says what
it holds.

A fetch is decoded once and given in slices. Control batches and aborted ones are passed over;
the position moves with them, so a reader never looks at them again.

**Large messages**: a reader that begins in the middle of one looks back for the pieces before.

    offset   10   11   12   13   14        F: a message in three pieces, at the offset of its last
    batch    F0   F1   b    F2   c
    given              | b(12) F(13) c     to one that begins at 12, and looks back as far as 10

So a position is one number, behind what was given, wherever large messages have begun.

**The ends** of a topic's partitions are asked of status.db for all of them at once. Whatever a
reader may see next takes an offset first: a message, the end marker of a transaction, a filler. So
a partition in which a look found nothing up to its end has nothing new while its next offset is
that end, and need not be looked at, nor its environment be opened:

    partition      0     1     2     3                 a poll looks at 2 alone, whether there
    nothing at    40    12     7     0                 are four partitions or four thousand
    next offset   40    12     9     0
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias

import pyarrow as pa

from txnkv.core import (
    CommittedFilter,
    CoreError,
    Spans,
    all_data,
    intact,
    read_chunk,
    read_header,
    walk,
)
from txnkv.errors import CorruptionError, OffsetOutOfRangeError
from txnkv.storage import brief
from txnkv.topics.log import behind, whole
from txnkv.topics.messages import Reassembly
from txnkv.topics.read.log_view import LogView, glance_at, look_at
from txnkv.topics.topic_catalog import TopicInfo
from txnkv.topics.topics import Partition, Topics

FetchIsolation: TypeAlias = Literal["read_committed", "read_uncommitted"]
ReadIsolation: TypeAlias = Literal["read_uncommitted", "read_committed", "serializable"]
Order: TypeAlias = Literal["offset", "commit"]
Start: TypeAlias = Literal["earliest", "latest"]

READ_UNCOMMITTED: Final = "read_uncommitted"
READ_COMMITTED: Final = "read_committed"
FETCH_BYTES: Final = 1 << 20
READ_AHEAD: Final = 2 << 20
"""Bytes that a reader fetches at a time, decoded: about what waits in the processor's cache."""
HELD_BYTES: Final = 16 << 20
"""Bytes of messages that a consumer has read ahead, of all partitions, and gives at once."""


class AbortedTxn(NamedTuple):
    """A transaction that was aborted.

    Attributes:
        producer_id: the transaction's local id, as it stands in its batches.
        first_offset: of its messages in this partition; what it sent before was committed.
    """

    producer_id: int
    first_offset: int


@dataclass(frozen=True, slots=True)
class FetchResult:
    """The answer to a fetch.

    Attributes:
        records: whole batches one behind the other, in offset order, not filtered; the first
            holds the offset that was asked for. Empty when there is nothing yet.
        high_watermark: behind the last message of the partition.
        last_stable_offset: below it all is decided.
        start_offset: the least offset that is readable.
        aborted: the aborted transactions that may be among the records; None when read
            uncommitted.
    """

    records: bytes
    high_watermark: int
    last_stable_offset: int
    start_offset: int
    aborted: list[AbortedTxn] | None


def fetch(
    topics: Topics,
    partition: Partition,
    offset: int,
    max_bytes: int = FETCH_BYTES,
    isolation: str = READ_COMMITTED,
) -> FetchResult:
    """Raw batches from the one that holds an offset on.

    Args:
        topics: of the store.
        partition: where to read.
        offset: of the first message that is wanted, in [start, high watermark].
        max_bytes: of all records when they are decoded, however small they are stored; one
            batch is given, however large it is.
        isolation: "read_uncommitted" or "read_committed".

    Raises:
        OffsetOutOfRangeError: the partition does not hold the offset, and it is not its end.
        TopicNotFoundError: the topic was dropped.
        ValueError: an argument makes no sense.
    """
    committed = is_committed(isolation)
    if max_bytes <= 0:
        raise ValueError(f"max_bytes is above 0, not {max_bytes!r}")
    see = partial(_fetched, offset=offset, max_bytes=max_bytes, committed=committed)
    return glance_at(topics, partition, see) or _look_briefly(topics, partition, see)


_look_briefly: Final = brief(look_at)


def _fetched(view: LogView, offset: int, max_bytes: int, committed: bool) -> FetchResult:
    view.require(offset)
    upto = view.last_stable_offset if committed else view.high_watermark
    parts = view.read(offset, max_bytes, upto) if offset < upto else []
    aborted: list[AbortedTxn] | None = None
    if committed:
        aborted = [AbortedTxn(*each) for each in view.aborted_of(offset, parts)]
    # Inside the transaction: the parts are views of LMDB's map.
    return FetchResult(
        b"".join(parts), view.high_watermark, view.last_stable_offset, view.start, aborted
    )


def is_committed(isolation: str) -> bool:
    """Tell whether an isolation level leaves out what is not committed.

    Raises:
        ValueError: a fetch knows no such level.
    """
    if isolation not in (READ_UNCOMMITTED, READ_COMMITTED):
        raise ValueError(
            f"isolation of a fetch is {READ_UNCOMMITTED!r} or {READ_COMMITTED!r}, not {isolation!r}"
        )
    return isolation == READ_COMMITTED


_END: Final = 1 << 63
_FIRST_REACH: Final = 64
"""Offsets, for the first look back; each further one goes four times as far."""


class BatchDecoder:
    """Raw batches into messages, for one reader of a partition: without what was aborted, and with
    large ones whole.

    Args:
        topics: of the store.
        partition: where the reader reads.
        committed: leave out what was aborted.
        begin: pieces of large messages below it are not looked for.
        max_bytes: of one look at the log, about.
        skip_lost: leave out large messages that retention took a part of, rather than raise.
    """

    def __init__(
        self,
        topics: Topics,
        partition: Partition,
        *,
        committed: bool,
        begin: int,
        max_bytes: int,
        skip_lost: bool,
    ) -> None:
        self._topics = topics
        self._partition = partition
        self._filter = CommittedFilter() if committed else None
        self._reassembly = Reassembly()
        self._begin = begin
        self._max_bytes = max_bytes
        self._skip_lost = skip_lost
        self._lost: set[int] = set()

    @property
    def large(self) -> dict[int, list[int]]:
        """Large messages of the last `decode`: the offset of each, with those of its pieces."""
        return self._reassembly.completed

    @property
    def begun(self) -> set[int]:
        """The pieces of large messages of which not all were found yet."""
        return self._reassembly.begun

    def reset(self) -> None:
        """Forget what has begun and what was aborted: the reader goes elsewhere."""
        if self._filter is not None:
            self._filter.reset()
        self._reassembly.reset()

    def decode(
        self, data: bytes, aborted: Sequence[tuple[int, int]], at: int, upto: int
    ) -> tuple[pa.RecordBatch | None, int]:
        """The messages of batches, if they have any, and where to read on.

        Args:
            data: whole batches; what stands behind a damaged one is left for the next call.
            aborted: transactions, and from where on: those that no call before named.
            at: the first offset that is wanted.
            upto: all below is decided, if only committed messages are wanted.

        Raises:
            OffsetOutOfRangeError: retention took pieces of a message since the reader began.
            CorruptionError: the first batch is damaged.
        """
        try:
            records = intact(data)
            spans: Spans
            if self._filter is None:
                spans = all_data(records, at, upto)
            else:
                spans = self._filter.keep(records, aborted, at, upto)
            self._complete(records, spans)
            rows = self._reassembly.decode(records, spans, at) if len(spans) else None
            if self._filter is None:
                self._reassembly.end_transactions(records)
        except CoreError as error:
            raise CorruptionError(f"{self._partition.label}, offset {at}: {error}") from None
        return (rows if rows is not None and rows.num_rows else None), spans.next_offset

    def _complete(self, records: Any, spans: Spans) -> None:
        """Take in the pieces that lie before these batches, of messages that go on in them."""
        seen: set[int] = set()
        for place, _ in spans if spans.has_chunks else ():
            chunk = read_chunk(records, place)
            if chunk is None:
                continue
            id = chunk.message_id
            known = chunk.piece == 0 or id in seen or id in self._lost or self._reassembly.has(id)
            if not known and not self._look_back(id, read_header(records, place).base_offset):
                self._lost.add(id)
            seen.add(id)
            if chunk.piece + 1 == chunk.pieces:
                self._lost.discard(id)

    def _look_back(self, message_id: int, before: int) -> bool:
        reach = _FIRST_REACH
        while True:
            low = max(self._begin, before - reach)
            start, found = look_at(
                self._topics,
                self._partition,
                lambda view, low=low: self._pieces(view, message_id, low, before),  # type: ignore[misc]
            )
            if found and read_chunk(found[0]).piece == 0:  # type: ignore[union-attr]
                for piece in found:
                    self._reassembly.decode(piece, all_data(piece, 0, _END), 0)
                return True
            if start > low and not self._skip_lost:
                raise OffsetOutOfRangeError(
                    f"{self._partition.label} begins at offset {start} now, in the middle of a "
                    f"large message that is read at {before}: retention took its first pieces"
                )
            if start > low or low == self._begin:
                return False  # it had no beginning when the reader began, or has none any more
            reach *= 4

    def _pieces(
        self, view: LogView, message_id: int, low: int, before: int
    ) -> tuple[int, list[bytes]]:
        """Find where the log begins, and the pieces of a message in [low, before)."""
        at = max(low, view.start)
        found: list[bytes] = []
        while at < before:
            for part in view.read(at, self._max_bytes, view.high_watermark):
                if at >= before:
                    break
                checked = whole(part)
                for place, header in walk(checked):
                    at = header.next_offset
                    if header.base_offset >= before:
                        break
                    if not header.is_chunk:
                        continue
                    chunk = read_chunk(checked, place)
                    if chunk is not None and chunk.message_id == message_id:
                        found.append(bytes(checked[place : place + header.length]))
                if len(checked) < len(part):
                    break  # the next read begins with what is damaged
        return view.start, found


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
    """The reader in offset order. One thread at a time.

    Args:
        topics: of the store.
        partition: where to read.
        offset: where to begin.
        isolation: "read_uncommitted" or "read_committed".
        max_bytes: of one fetch.
        skip_lost: go on behind what retention took, rather than raise.
        end: the end of a range below which all is decided, and which is read as it was when it
            was pinned; None to read on and on.
        begin: pieces of large messages below it are not looked for.
        aborted: of a pinned range, the aborted transactions that may be in it.

    Attributes:
        empty_at, pending, moved, held: see `PartitionReader`.
    """

    def __init__(
        self,
        topics: Topics,
        partition: Partition,
        offset: int,
        isolation: str,
        max_bytes: int = READ_AHEAD,
        *,
        skip_lost: bool = False,
        end: int | None = None,
        begin: int = 0,
        aborted: Sequence[AbortedTxn] = (),
    ) -> None:
        self._topics = topics
        self._partition = partition
        self._committed = is_committed(isolation)
        self._max_bytes = max_bytes
        self._skip_lost = skip_lost
        self._end = end
        self._edge, self._rewritten = 0, -1
        self._aborted = list(aborted)
        self._decoder = BatchDecoder(
            topics,
            partition,
            committed=self._committed,
            begin=begin,
            max_bytes=max_bytes,
            skip_lost=skip_lost or end is None,
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
    def large(self) -> dict[int, list[int]]:
        """Large messages of the last `load`: the offset of each, with those of its pieces."""
        return self._decoder.large

    @property
    def begun(self) -> set[int]:
        """The pieces of large messages of which not all were found yet."""
        return self._decoder.begun

    @property
    def pending(self) -> bool:
        """See `PartitionReader`."""
        at = self.empty_at
        return at is not None and self._topics.look(self._partition.id).next_offset > at

    def seek(self, offset: int) -> None:
        """Go elsewhere; what is known of aborted transactions is forgotten."""
        self._decoder.reset()
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
        most = self._max_bytes if room is None else max(min(room, self._max_bytes), 1)
        before = self._fetched_to
        see = partial(self._see, most=most)
        at, found = glance_at(self._topics, self._partition, see) or look_at(
            self._topics, self._partition, see
        )
        if at > before and self._end is None:
            self._decoder.reset()
        rows, following = None, at
        if found.records:
            upto = found.high_watermark if found.aborted is None else found.last_stable_offset
            rows, following = self._decoder.decode(found.records, found.aborted or (), at, upto)
        if self._end is not None and following <= before:
            raise CorruptionError(f"{self._partition.label}, offset {at}: no batch is there")
        self._aborted = []  # the decoder has them
        self._fetched_to = following
        if rows is None:
            self._position = following
            self.moved = following > before
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
        part = ready if given == 0 and ready.num_rows <= most else ready.slice(given, most)
        if room is not None and self.held > room:
            part = fitting(part, room)
        self._given = given + part.num_rows
        if self._given < ready.num_rows:
            self._position = ready.column("offset")[self._given - 1].as_py() + 1
        else:
            self._ready, self.held = None, 0
            self._position = self._fetched_to
        return part

    def batches(self, end: int, most: int = _END - 1) -> Iterator[pa.RecordBatch]:
        """The messages below `end` that are there now, from the position on, up to `most` at a
        time. Raises as `load`.
        """
        while self._position < end:
            if self.load():
                rows = self.take(most)
                if self._position > end:
                    rows = rows.slice(0, bisect_left(rows.column("offset"), end, key=_as_int))
                if rows.num_rows:
                    yield rows
            elif not self.moved:
                return

    def _see(self, view: LogView, most: int) -> tuple[int, FetchResult]:
        """Find where to read, and what is there."""
        at, end = self._fetched_to, self._end
        if self._skip_lost:
            at = max(at, view.start)
        if end is None:
            return at, _fetched(view, at, most, self._committed)
        records = b""
        if at < end:
            view.require(at)
            view.require(end)
            rewritten = view.rewritten
            if self._edge < end or self._rewritten != rewritten:
                self._edge, self._rewritten = _edge_of(view, end), rewritten
            records = b"".join(view.read(at, most, self._edge))
        return at, FetchResult(records, view.high_watermark, self._edge, view.start, self._aborted)


def _edge_of(view: LogView, end: int) -> int:
    """The edge of the batch that holds the last offset below `end`."""
    try:
        return behind(whole(view.read(end - 1, 1, view.high_watermark)[0]))
    except CorruptionError:
        return view.high_watermark  # what stands before the damage is read, and no further


def _as_int(number: pa.UInt64Scalar) -> int:
    found: int = number.as_py()
    return found


class Ends:
    """The next offsets of a topic. No I/O while nothing is written in the store."""

    def __init__(self, topics: Topics, topic: TopicInfo) -> None:
        self._topics = topics
        self._topic = topic
        self._offsets: Mapping[int, int] = {}
        # The log of a copy is written first, its next offset later.
        self._says_all = topic.options.replica_of is None

        self._due = True

    def look(self) -> None:
        """Have the next question that takes them read the next offsets as they are then; those of
        commits not durable yet are seen.
        """
        self._due = True

    @brief
    def _read(self) -> None:
        self._offsets = self._topics.next_offsets(self._topic.id)
        self._due = False

    def has_new(self, partition_id: int, reader: PartitionReader) -> bool:
        """Tell whether there may be something that the last look of a reader did not find."""
        at = reader.empty_at
        if at is None or not self._says_all:
            return True
        if self._due:
            self._read()
        return self._offsets.get(partition_id) != at

    def is_ahead(self, partition_id: int, reader: PartitionReader) -> bool:
        """Tell whether more was given than a reader's last look found: it is on its way."""
        at = reader.empty_at
        if at is None:
            return False
        if self._due:
            self._read()
        return self._offsets.get(partition_id, 0) > at
