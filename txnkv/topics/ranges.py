"""Sets of offsets as ranges: what a cursor, an acknowledgement and a gap are made of.

    {3, 4, 5, 9}   is   [3, 6) [9, 10)

Ranges in a set are in order and do not touch, so a set is as long as it has holes, however many
offsets it has.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field


class Ranges:
    """A set of offsets. Not for two threads at a time.

    Args:
        ranges: half open, in any order.
    """

    __slots__ = ("_first", "_last")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._first: list[int] = []
        self._last: list[int] = []
        for first, last in ranges:
            self.add(first, last)

    @classmethod
    def of(cls, offsets: Sequence[int]) -> Ranges:
        """Return a set of ascending offsets."""
        if offsets and offsets[-1] - offsets[0] == len(offsets) - 1:
            return cls([(offsets[0], offsets[-1] + 1)])
        return cls((offset, offset + 1) for offset in offsets)

    def add(self, first: int, last: int) -> None:
        """Put [first, last) in."""
        if first >= last:
            return
        if not self._last or first > self._last[-1]:
            self._first.append(first)
            self._last.append(last)
            return
        if first == self._last[-1]:
            self._last[-1] = last
            return
        low = bisect_left(self._last, first)
        high = bisect_right(self._first, last)
        if low < high:
            first = min(first, self._first[low])
            last = max(last, self._last[high - 1])
        self._first[low:high] = [first]
        self._last[low:high] = [last]

    def remove(self, first: int, last: int) -> None:
        """Take [first, last) out, as far as it is in."""
        low = bisect_right(self._last, first)
        high = bisect_left(self._first, last)
        if first >= last or low >= high:
            return
        if first <= self._first[low] and self._last[high - 1] <= last:
            del self._first[low:high], self._last[low:high]
            return
        kept = []
        if self._first[low] < first:
            kept.append((self._first[low], first))
        if self._last[high - 1] > last:
            kept.append((last, self._last[high - 1]))
        self._first[low:high] = [part for part, _ in kept]
        self._last[low:high] = [part for _, part in kept]

    def pop_from(self, mark: int) -> int:
        """Take out the range that begins at or below `mark`; behind it, or `mark`."""
        if self._first and self._first[0] <= mark:
            del self._first[0]
            mark = max(mark, self._last.pop(0))
        return mark

    def pop(self, near: int, most: int) -> Ranges:
        """Take out the first range, and those that follow at most so far apart, so many in all."""
        first, last, n = self._first, self._last, 1
        while n < min(most, len(first)) and first[n] - last[n - 1] <= near:
            n += 1
        found = Ranges()
        found._first, found._last = first[:n], last[:n]
        del first[:n], last[:n]
        return found

    def update(self, other: Ranges) -> None:
        """Put all of another set in."""
        for first, last in other:
            self.add(first, last)

    def difference_update(self, other: Ranges) -> None:
        """Take all of another set out."""
        for first, last in other:
            self.remove(first, last)

    def first_in(self, first: int, last: int) -> int | None:
        """Return the first offset of [first, last) that is in the set; None where none is."""
        at = bisect_right(self._last, first)
        if first < last and at < len(self._first) and self._first[at] < last:
            return max(first, self._first[at])
        return None

    def gap_from(self, offset: int) -> tuple[int, int]:
        """The first offset at or behind this one that is not in, and the next behind it that is;
        2^63 where there is none.
        """
        at = bisect_right(self._last, offset)
        if at < len(self._first) and self._first[at] <= offset:
            offset = self._last[at]
            at += 1
        return offset, self._first[at] if at < len(self._first) else 1 << 63

    def touching(self, first: int, last: int) -> tuple[int, int]:
        """[first, last), made longer by what lies at either end of it."""
        low = bisect_left(self._last, first)
        if low < len(self._first) and self._first[low] < first:
            first = self._first[low]
        high = bisect_right(self._first, last) - 1
        if high >= 0 and self._last[high] > last:
            last = self._last[high]
        return first, last

    def minus(self, other: Ranges) -> Ranges:
        """Return what is in this set and not in the other."""
        left = Ranges(self)
        left.difference_update(other)
        return left

    @property
    def count(self) -> int:
        """The number of offsets in the set."""
        return sum(self._last) - sum(self._first)

    @property
    def span(self) -> tuple[int, int]:
        """From the first in the set to behind the last; it is not empty."""
        return self._first[0], self._last[-1]

    @property
    def bounds(self) -> tuple[list[int], list[int]]:
        """Each range's first offset, and what is behind its last: the lists themselves."""
        return self._first, self._last

    @property
    def end(self) -> int:
        """The offset behind the highest in the set; 0 when it is empty."""
        return self._last[-1] if self._last else 0

    def __contains__(self, offset: int) -> bool:
        at = bisect_right(self._first, offset) - 1
        return at >= 0 and offset < self._last[at]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(list(zip(self._first, self._last, strict=True)))

    def __len__(self) -> int:
        return len(self._first)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "Ranges(" + ", ".join(f"[{first}, {last})" for first, last in self) + ")"


def in_the_way(mark: int, deleted: Ranges, more: Ranges, gaps: Ranges) -> list[tuple[int, int]]:
    """Return the gaps before which a mark comes to stand, one behind the other, when it passes what
    is deleted and these.
    """
    found = []
    while True:
        before = mark
        for ranges in (deleted, more):
            _, mark = ranges.touching(mark, mark)
        _, behind = gaps.touching(mark, mark)
        if behind > mark:
            found.append((mark, behind))
            mark = behind
        elif mark == before:
            return found


Held = dict[int, Ranges]
"""Offsets by partition id."""


@dataclass
class Acked:
    """Messages of one subscription that one transaction acknowledges.

    Attributes:
        held: individual ones, by partition id.
        positions: cumulative ones, by partition id: all below.
    """

    held: Held = field(default_factory=dict)
    positions: dict[int, int] = field(default_factory=dict)

    def ranges(self, partition_id: int) -> Ranges:
        """The individual ones of a partition, to be added to."""
        return self.held.setdefault(partition_id, Ranges())

    def whole(self, mark: Callable[[int], int]) -> Held:
        """All of them: a position as the range below it, from the cursor's mark on."""
        found = {partition_id: Ranges(ranges) for partition_id, ranges in self.held.items()}
        for partition_id, position in self.positions.items():
            found.setdefault(partition_id, Ranges()).add(mark(partition_id), position)
        return found


@dataclass
class Cursor:
    """The cursor of one partition, in memory.

    Attributes:
        mark: all below is deleted.
        deleted: what is deleted beyond.
    """

    mark: int
    deleted: Ranges = field(default_factory=Ranges)

    def __contains__(self, offset: int) -> bool:
        """Tell whether an offset is deleted."""
        return offset < self.mark or offset in self.deleted

    def first_in(self, first: int, last: int) -> int | None:
        """Return the first offset of [first, last) that is deleted; None where none is."""
        return first if first < min(self.mark, last) else self.deleted.first_in(first, last)

    def delete(self, first: int, last: int) -> None:
        """[first, last) is deleted."""
        self.deleted.add(max(first, self.mark), last)
        self.mark = self.deleted.pop_from(self.mark)
