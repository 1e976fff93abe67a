"""Which batches of a fetch a reader is shown.

READ_UNCOMMITTED shows every data batch. READ_COMMITTED leaves out those of aborted
transactions: of the fetch's list (transaction, first offset) the least first offset stands on
top of a heap; when the walk reaches it, the transaction joins the set of aborted ones, and
leaves it with its ABORT marker. So a reader keeps one entry for an aborted transaction that it
is in the middle of, and none for an open one, however long it is.

    offset     0   1   2   3         4   5
    batch     P1  P1  P2  P1 commit  P2  P2 abort      aborted list: (P2, 2)
    shown      x   x
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any

from txnkv.core.log_header import Attributes, ControlType, read_control, walk


class Spans(Sequence[tuple[int, int]]):
    """The batches of a buffer that a reader is shown: (position, length), in offset order.

    Attributes:
        rows: the messages of all of them.
        attributes: the attributes of all of them, joined by or.
        next_offset: where to read on: behind the last batch that was looked at, shown or not.
    """

    __slots__ = ("_items", "attributes", "next_offset", "rows")

    def __init__(
        self, items: list[tuple[int, int]], rows: int, attributes: int, next_offset: int
    ) -> None:
        """Made by `CommittedFilter.keep` and `all_data`."""
        self._items = items
        self.rows = rows
        self.attributes = attributes
        self.next_offset = next_offset

    @property
    def has_chunks(self) -> bool:
        """Whether there are pieces of large messages among them."""
        return bool(self.attributes & Attributes.CHUNK)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Spans(self._items[index], self.rows, self.attributes, self.next_offset)
        return self._items[index]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._items)


class CommittedFilter:
    """The state of one READ_COMMITTED reader in one partition; it lives on over fetches."""

    def __init__(self) -> None:
        """Begins without aborted transactions."""
        self._heap: list[tuple[int, int]] = []
        self._aborted: dict[int, int] = {}

    def reset(self) -> None:
        """Forgets all: the reader goes elsewhere."""
        self._heap.clear()
        self._aborted.clear()

    def keep(
        self, buf: Any, aborted: Sequence[tuple[int, int]], from_offset: int, upto: int
    ) -> Spans:
        """The data batches of a fetch that are committed and hold offsets in [from_offset, upto).

        Args:
            buf: whole batches in offset order.
            aborted: (transaction, first offset) of those that are aborted, as the fetch gave it.
            from_offset: where the reader stands.
            upto: the last stable offset; batches that end behind it are not looked at.

        Raises:
            CoreError: the bytes are damaged. The state is as before.
        """
        for txn_id, first in set(aborted):
            heapq.heappush(self._heap, (first, txn_id))
        items, rows, attributes = [], 0, 0
        following = from_offset
        for at, header in walk(buf):
            if header.next_offset > upto:
                break
            following = max(following, header.next_offset)
            while self._heap and self._heap[0][0] <= header.last_offset:
                first, txn_id = heapq.heappop(self._heap)
                self._aborted[txn_id] = min(first, self._aborted.get(txn_id, first))
            if header.is_control:
                if header.txn_id and read_control(buf, at).type == ControlType.ABORT:
                    self._aborted.pop(header.txn_id, None)
                continue
            first = self._aborted.get(header.txn_id, upto) if header.is_transactional else upto
            if header.base_offset + header.rows <= from_offset:
                continue
            if first <= header.base_offset and not header.is_decided:
                continue
            items.append((at, header.length))
            rows += header.rows
            attributes |= header.attributes
        return Spans(items, rows, attributes, following)


def all_data(buf: Any, from_offset: int, upto: int) -> Spans:
    """The data batches of a fetch with offsets in [from_offset, upto): READ_UNCOMMITTED.

    Raises:
        CoreError: the bytes are damaged.
    """
    items, rows, attributes = [], 0, 0
    following = from_offset
    for at, header in walk(buf):
        if header.next_offset > upto:
            break
        following = max(following, header.next_offset)
        if not header.is_control and header.base_offset + header.rows > from_offset:
            items.append((at, header.length))
            rows += header.rows
            attributes |= header.attributes
    return Spans(items, rows, attributes, following)
