"""A range of a partition that is read elsewhere, as it was when somebody planned to.

    planner     pins [start, end) below its last stable offset, with the aborted list of it
    readers     read what lies there, uncommitted, and filter by that list

Below the last stable offset all is decided and nothing changes any more, so whoever reads the
range, in whichever process and however often, gets the same messages. A range may begin and end
anywhere, also inside of a batch. The message that is too large for a batch is in the range that
its last piece is in, where it has its offset; its reader looks back for the pieces before
(`offset_reader`).

Retention may take the beginning of the log while a range is read, or between the plan and the
read: that is an error, and nothing is left out in silence. `begin` is where the log began for
this reader; what was gone then is nobody's loss.

**A range is cut** so that several may read it side by side. What it weighs is guessed from its
first batches, and a cut is moved to where a chunk of the log begins, if there is one between it and
the cut before. So both cost a look or two at LMDB, however long the range is.

**Up to a commit.** A range may end where a partition has what was committed at a timestamp:

    offset     0   1   2   3        4   5        6        7
    log        P1  P2  P2  C2 @11   d   P1       C1 @13   d @14
    up to      10: 3    11, 12: 4 (d is @12)    13: 7    14: 8, the end

Markers, and batches that are decided when they are written, stand in the order of their commits.
So a place is found by search, without a look at what lies between; and one timestamp cuts all
partitions of a topic so that no transaction is cut in two.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Final, NamedTuple

import pyarrow as pa

from txnkv.core import within
from txnkv.errors import OffsetOutOfRangeError
from txnkv.topics.log import KEY, LOG, behind, seek_at_or_below
from txnkv.topics.read.log_view import Bounds, LogView, look_at
from txnkv.topics.read.offset_reader import READ_COMMITTED, AbortedTxn, OffsetReader
from txnkv.topics.topics import Partition, Topics

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
    max_bytes: int,
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
    flat = array("Q", pinned.aborted)
    reader = OffsetReader(
        topics,
        partition,
        pinned.start,
        READ_COMMITTED,
        max_bytes,
        skip_lost=skip_lost,
        end=pinned.end,
        begin=pinned.begin,
        aborted=[AbortedTxn(*pair) for pair in zip(flat[::2], flat[1::2], strict=True)],
    )
    return reader.batches(pinned.end)


_SAMPLE_BYTES: Final = 256 << 10
_END: Final = 1 << 63


def weight(topics: Topics, partition: Partition, start: int, end: int) -> int:
    """About how many bytes, decoded, lie in [start, end), which the partition holds.

    Raises:
        OffsetOutOfRangeError: it does not hold it.
        TopicNotFoundError: the topic was dropped.
    """
    if start >= end:
        return 0

    def see(view: LogView) -> int:
        view.require(start)
        parts = view.read(start, _SAMPLE_BYTES, view.high_watermark)
        if not parts:
            return 0
        offsets = max(behind(parts[-1]) - start, 1)
        decoded = sum(within(part, _END)[1] for part in parts)
        return decoded * (end - start) // offsets

    return look_at(topics, partition, see)


def cuts(partition: Partition, start: int, end: int, parts: int) -> list[int]:
    """Offsets that cut [start, end) in at most so many parts; the first is `start`, the last `end`.

    Not inside a transaction on the partition's environment.
    """
    found = [start]
    if parts > 1 and partition.exists:
        step = max((end - start) / parts, 1)
        with partition.environment.read() as txn, txn.cursor(db=_log(partition)) as cursor:
            for i in range(1, parts):
                wanted = min(start + round(i * step), end)
                at = wanted
                if seek_at_or_below(cursor, KEY.pack(wanted)):
                    (base,) = KEY.unpack(cursor.key())
                    at = base if base > found[-1] else wanted
                if found[-1] < at < end:
                    found.append(at)
    return [*found, end]


def _log(partition: Partition) -> object:
    return partition.environment.db(LOG)


class Reach(NamedTuple):
    """The part of a partition that can be read at a timestamp.

    Attributes:
        bounds: of the partition.
        place: of the first commit above the timestamp; the high watermark when there is none.
    """

    bounds: Bounds
    place: int


def reach_at(topics: Topics, partition: Partition, timestamp: int, start: int = 0) -> Reach:
    """Find the place up to which a partition has what was committed at or below a timestamp.

    Args:
        topics: of the store.
        partition: where to look.
        timestamp: at or below the latest commit.
        start: where the search begins: the place of a commit that is above, or before it.

    Raises:
        TopicNotFoundError: the topic was dropped.
    """

    def see(view: LogView) -> Reach:
        high = view.high_watermark
        return Reach(view.bounds, _first_above(view, timestamp, max(start, view.start), high))

    return look_at(topics, partition, see, whole=True)


def next_timestamp(topics: Topics, partition: Partition, start: int) -> int | None:
    """Return the timestamp of the first commit at or behind an offset; None when there is none.

    Raises:
        TopicNotFoundError: the topic was dropped.
    """

    def see(view: LogView) -> int | None:
        found = view.commits(start, 1)
        return _dated(view, found[0].marker_offset + 1) if found else None

    return look_at(topics, partition, see, whole=True)


def timestamp_before(topics: Topics, partition: Partition, start: int, upto: int) -> int | None:
    """Return the timestamp of the last commit in [start, upto); None when there is none.

    Raises:
        TopicNotFoundError: the topic was dropped.
    """

    def see(view: LogView) -> int | None:
        found = view.commit_before(upto)
        return found.commit_ts if found is not None and found.marker_offset >= start else None

    return look_at(topics, partition, see, whole=True)


def between_commits(topics: Topics, partition: Partition, offset: int, start: int, end: int) -> int:
    """The first place in [offset, end] that cuts no transaction in two; offset is above start.

    Raises:
        TopicNotFoundError: the topic was dropped.
    """

    def see(view: LogView) -> int:
        found = view.commit_before(offset)
        if found is None or found.marker_offset < start:
            return offset
        return _first_above(view, found.commit_ts, offset, end)

    return look_at(topics, partition, see)


def _first_above(view: LogView, timestamp: int, low: int, high: int) -> int:
    """The place of the first commit above a timestamp in [low, high); `high` when none is."""
    first = low
    while low < high:
        middle = (low + high) // 2
        found = view.commit_before(middle + 1)
        if found is None or found.marker_offset < first or found.commit_ts <= timestamp:
            low = middle + 1
        else:
            high = found.marker_offset
    return low


def _dated(view: LogView, offset: int) -> int:
    found = view.commit_before(offset)
    return 0 if found is None else found.commit_ts
