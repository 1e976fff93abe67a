"""A range of a partition that is read elsewhere, as it was when somebody planned to.

    planner     pins [start, end) below its last stable offset, with the aborted list of it
    readers     read what lies there, uncommitted, and filter by that list

Below the last stable offset all is decided and nothing changes any more, so whoever reads the
range, in whichever process and however often, gets the same messages. A range may begin and end
anywhere, also inside of a batch. The message that is too large for a batch is in the range that
its last piece is in, where it has its offset; its reader looks back for the pieces before
(`look_back`).

Retention may take the beginning of the log while a range is read, or between the plan and the
read: that is an error, and nothing is left out in silence. `begin` is where the log began for
this reader; what was gone then is nobody's loss.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import pyarrow as pa

from txnkv.core import CommittedFilter, CoreError, Spans, intact
from txnkv.errors import CorruptionError, OffsetOutOfRangeError
from txnkv.topics.log import behind, whole
from txnkv.topics.messages import Reassembly
from txnkv.topics.partition import Partition
from txnkv.topics.read.log_view import LogView, look_at
from txnkv.topics.read.look_back import LookBack
from txnkv.topics.topics import Topics

READ_BYTES: Final = 2 << 20
"""Bytes of one look at the log, about."""


class PinnedRange(NamedTuple):
    """The range of a partition that is to be read. Picklable.

    Attributes:
        start, end: offsets, at or above `begin` and at or below the last stable offset.
        begin: what lies below is not looked for.
        aborted: transaction and first offset of those aborted that may be in the range, one
            behind the other as native u64.
    """

    start: int
    end: int
    begin: int
    aborted: bytes


def pin(topics: Topics, partition: Partition, start: int, end: int, begin: int) -> PinnedRange:
    """Pin a range.

    Raises:
        OffsetOutOfRangeError: the log does not hold it, or it is not all decided.
        TopicNotFoundError: the topic was dropped.
    """

    def see(view: LogView) -> list[tuple[int, int]]:
        view.require(start)
        if end > view.last_stable_offset:
            raise OffsetOutOfRangeError(
                f"{partition.label} was asked for messages up to offset {end} and is decided up "
                f"to {view.last_stable_offset}: end there"
            )
        return view.aborted(start, end) if start < end else []

    pairs = look_at(topics, partition, see)
    flat = array("Q", [number for pair in pairs for number in pair])
    return PinnedRange(start, end, begin, flat.tobytes())


def read(
    topics: Topics,
    partition: Partition,
    pinned: PinnedRange,
    max_bytes: int = READ_BYTES,
    *,
    skip_lost: bool = False,
) -> Iterator[pa.RecordBatch]:
    """The committed messages of a pinned range; columns as `core.MESSAGES`.

    Args:
        topics: of the store.
        partition: of the range.
        pinned: the range.
        max_bytes: of one look at the log, about.
        skip_lost: go on behind what retention took, rather than raise.

    Raises:
        OffsetOutOfRangeError: retention took a part of the range meanwhile, or the store is
            another than the one it was pinned in.
        TopicNotFoundError: the topic was dropped.
        CorruptionError: a batch is damaged.
    """
    return _Reading(topics, partition, pinned, max_bytes, skip_lost).rows()


class _Reading:
    def __init__(
        self,
        topics: Topics,
        partition: Partition,
        pinned: PinnedRange,
        max_bytes: int,
        skip_lost: bool,
    ) -> None:
        self._topics = topics
        self._partition = partition
        self._pinned = pinned
        self._max_bytes = max_bytes
        self._skip_lost = skip_lost
        self._filter = CommittedFilter()
        self._reassembly = Reassembly()
        self._look_back = LookBack(
            topics,
            partition,
            self._reassembly,
            begin=pinned.begin,
            max_bytes=max_bytes,
            skip_lost=skip_lost,
        )
        self._edge = 0

    def rows(self) -> Iterator[pa.RecordBatch]:
        at, end = self._pinned.start, self._pinned.end
        flat = array("Q", self._pinned.aborted)
        aborted = list(zip(flat[::2], flat[1::2], strict=True))
        while at < end:
            at, records = self._records(at)
            if at >= end:
                return
            try:
                records = intact(records)
                spans = self._filter.keep(records, aborted, at, self._edge)
                rows = self._decoded(records, spans, at) if len(spans) else None
            except CoreError as error:
                raise CorruptionError(f"{self._partition.label}, offset {at}: {error}") from None
            aborted = []  # the filter has them
            if spans.next_offset <= at:
                raise CorruptionError(f"{self._partition.label}, offset {at}: no batch is there")
            at = spans.next_offset
            if rows is not None and at > end:
                rows = rows.slice(0, _below(rows, end))
            if rows is not None and rows.num_rows:
                yield rows

    def _records(self, wanted: int) -> tuple[int, bytes]:
        """Batches from an offset on, or from where the log begins if that may be skipped to."""
        end = self._pinned.end

        def see(view: LogView) -> tuple[int, bytes]:
            at = max(wanted, view.start) if self._skip_lost else wanted
            if at >= end:
                return at, b""
            view.require(at)
            view.require(end)
            if self._edge < end:
                self._edge = _edge_of(view, end)
            return at, b"".join(view.read(at, self._max_bytes, self._edge))

        return look_at(self._topics, self._partition, see)

    def _decoded(self, records: Any, spans: Spans, at: int) -> pa.RecordBatch:
        self._look_back.complete(records, spans)
        return self._reassembly.decode(records, spans, at)


def _edge_of(view: LogView, end: int) -> int:
    """The edge of the batch that holds the last offset below `end`."""
    try:
        return behind(whole(view.read(end - 1, 1, view.high_watermark)[0]))
    except CorruptionError:
        return view.high_watermark  # what stands before the damage is read, and no further


def _below(rows: pa.RecordBatch, end: int) -> int:
    """Count the rows with an offset below `end`; they stand in order."""
    offsets = rows.column("offset")
    low, high = 0, len(offsets)
    while low < high:
        middle = (low + high) // 2
        if offsets[middle].as_py() < end:
            low = middle + 1
        else:
            high = middle
    return low
