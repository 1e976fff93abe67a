"""Places of commits by time: up to where a partition has what was committed at a timestamp.

    offset     0   1   2   3        4   5        6        7
    log        P1  P2  P2  C2 @11   d   P1       C1 @13   d @14
    up to      10: 3    11, 12: 4 (d is @12)    13: 7    14: 8, the end

Markers, and batches that are decided when they are written, stand in the order of their commits.
So a place is found by search, without a look at what lies between; and one timestamp cuts all
partitions of a topic so that no transaction is cut in two.
"""

from __future__ import annotations

from typing import NamedTuple

from txnkv.topics.partition import Partition
from txnkv.topics.read.log_view import Bounds, LogView, look_at
from txnkv.topics.topics import Topics


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
