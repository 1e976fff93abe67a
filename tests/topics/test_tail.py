"""The tail of a partition, as a member of the commit log."""

from __future__ import annotations

import pyarrow as pa

from txnkv import core
from txnkv.coordinator.ids import Timestamp
from txnkv.topics.tail import TopicTail

LATE = Timestamp(1000)


def section(base: int, *counts: int, stamp: int) -> bytes:
    """Batches of so many messages each, placed."""
    data = b""
    for count in counts:
        messages = pa.record_batch({"value": pa.array([b"v"] * count, pa.binary())})
        data += core.encode_batch(messages, timestamp=1)
    return core.place(data, base, stamp)


def made(*entries: tuple[int, int, int]) -> TopicTail:
    """With entries of base offset, count and stamp, of partition 1."""
    tail = TopicTail(lambda ids: {})
    for base, count, stamp in entries:
        tail.apply(1, section(base, count, stamp=stamp), stamp)
    return tail


def extents(tail: TopicTail, offset: int = 0, upto: int = LATE) -> list[tuple[int, int, int]]:
    found = tail.entries(1, offset, Timestamp(upto))
    return [(entry.base_offset, entry.next_offset, entry.stamp) for entry in found]


def test_entries_are_found_by_offset_and_stamp() -> None:
    tail = made((5, 2, 10), (7, 1, 11), (10, 3, 12))
    everything = [(5, 7, 10), (7, 8, 11), (10, 13, 12)]
    assert extents(tail) == everything
    for offset, first in ((0, 0), (5, 0), (6, 0), (7, 1), (8, 2), (9, 2), (10, 2), (12, 2)):
        assert extents(tail, offset) == everything[first:]
    assert extents(tail, 13) == []
    assert extents(tail, 0, 11) == everything[:2]
    assert extents(tail, 0, 9) == []
    assert tail.end(1) == 13
    assert tail.entries(2, 0, LATE) == []
    assert tail.end(2) == 0
    assert tail.partition_ids == [1]


def test_a_section_of_several_batches_is_one_entry() -> None:
    tail = TopicTail(lambda ids: {})
    data = section(4, 2, 3, 1, stamp=9)
    tail.apply(1, data, 9)
    (entry,) = tail.entries(1, 0, LATE)
    assert (entry.base_offset, entry.count, entry.data) == (4, 6, data)
    assert tail.nbytes == len(data)


def test_what_comes_twice_is_there_once() -> None:
    tail = made((0, 2, 10), (2, 1, 11), (3, 1, 12))
    size = tail.nbytes
    for base, count, stamp in ((0, 2, 10), (2, 1, 11), (3, 1, 12)):
        tail.apply(1, section(base, count, stamp=stamp), stamp)
    assert extents(tail) == [(0, 2, 10), (2, 3, 11), (3, 4, 12)]
    assert tail.nbytes == size


def test_offsets_of_a_failed_commit_are_given_again() -> None:
    """Another process takes them before this one has undone its own."""
    tail = made((0, 2, 10), (2, 5, 11))
    tail.apply(1, section(2, 1, stamp=12), 12)
    assert extents(tail) == [(0, 2, 10), (2, 3, 12)]
    tail.undo({1}, 10)
    assert extents(tail) == [(0, 2, 10)]


def test_a_reader_goes_on_with_what_it_has() -> None:
    tail = made((0, 1, 10), (1, 1, 11))
    found = tail.entries(1, 0, LATE)
    tail.flushed(Timestamp(10), ())
    assert [entry.base_offset for entry in found] == [0, 1]
    assert extents(tail) == [(1, 2, 11)]
    tail.undo({1, 2}, 10)
    assert extents(tail) == []
    assert tail.nbytes == 0


def test_only_partitions_that_have_something_are_written_out() -> None:
    asked: list[list[int]] = []
    tail = TopicTail(lambda ids: asked.append(ids) or {})
    tail.apply(1, section(0, 1, stamp=10), 10)
    tail.apply(3, section(0, 1, stamp=20), 20)
    tail.write_out(Timestamp(5))
    tail.write_out(Timestamp(10))
    tail.write_out(Timestamp(20))
    assert asked == [[1], [1, 3]]
    tail.reset()
    tail.write_out(LATE)
    assert asked == [[1], [1, 3]]
