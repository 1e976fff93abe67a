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

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from txnkv.core.log_header import count_batches
from txnkv.core.native import check, ffi, lib, readable

_SPANS = ffi.typeof("messages_span_t[]")
_SHOWN = ffi.typeof("committed_shown_t *")
_ABORTED = ffi.typeof("committed_aborted_t *")


class Spans(Sequence[tuple[int, int]]):
    """The batches of a buffer that a reader is shown: (position, length), in offset order.

    Attributes:
        rows: the messages of all of them, those below the reader's offset included; -1: unknown.
        attributes: the attributes of all of them, joined by or, and perhaps others.
        next_offset: where to read on: behind the last batch that was looked at, shown or not.
    """

    __slots__ = ("_c", "_n", "_whole", "attributes", "next_offset", "rows")

    def __init__(self, c: Any, n: int, rows: int, attributes: int, next_offset: int) -> None:
        """Made by `CommittedFilter.keep`, `all_data`, `decided`, `of` and by slicing."""
        self._c = c
        self._n = n
        self._whole: Any = c  # a slice points into it
        self.rows = rows
        self.attributes = attributes
        self.next_offset = next_offset

    @classmethod
    def of(cls, pairs: Sequence[tuple[int, int]]) -> Spans:
        """Batches that a caller chose from a `walk`: (position, length), in offset order.

        What else there is to know of them is not known; `next_offset` is 0.
        """
        c = ffi.new(_SPANS, [(at, length, 0) for at, length in pairs])
        return cls(c, len(pairs), -1, lib.BATCH_ATTRIBUTES, 0)

    @property
    def c(self) -> Any:
        """The `messages_span_t *` of the core; this object must outlive its use."""
        return self._c

    @property
    def has_chunks(self) -> bool:
        """True when there may be pieces of large messages among the batches."""
        return bool(self.attributes & lib.BATCH_CHUNK)

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._slice(*index.indices(self._n))
        at = index + self._n if index < 0 else index
        if not 0 <= at < self._n:
            raise IndexError(f"span {index} of {self._n}")
        return self._c[at].position, self._c[at].length

    def _slice(self, lo: int, hi: int, step: int) -> Spans:
        if step != 1:
            raise ValueError(f"a slice of spans by {step}; they stand in offset order")
        n = max(hi - lo, 0)
        part = Spans(self._c + lo, n, -1, self.attributes, self.next_offset)
        part._whole = self._whole
        return part

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return (self[i] for i in range(self._n))

    def __repr__(self) -> str:
        return f"Spans({self._n}, next_offset={self.next_offset})"


class CommittedFilter:
    """The state of one READ_COMMITTED reader in one partition; it lives on over fetches.

    It belongs to one thread at a time.
    """

    __slots__ = ("_c",)

    def __init__(self) -> None:
        """Begins without aborted transactions.

        Raises:
            MemoryError: there is none.
        """
        c = lib.committed_create()
        if c == ffi.NULL:
            raise MemoryError("making a filter: no memory")
        self._c = ffi.gc(c, lib.committed_destroy)

    def reset(self) -> None:
        """Forgets all: the reader goes elsewhere."""
        lib.committed_reset(self._c)

    @property
    def held(self) -> tuple[int, int]:
        """Two counts of aborted transactions: those ahead, and those the reader is inside of."""
        numbers = ffi.new("uint64_t[3]")
        lib.committed_held(self._c, numbers, numbers + 1, numbers + 2)
        return numbers[0], numbers[1]

    @property
    def nbytes(self) -> int:
        """The memory of the state, in bytes."""
        numbers = ffi.new("uint64_t[3]")
        lib.committed_held(self._c, numbers, numbers + 1, numbers + 2)
        return int(numbers[2])

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
        memory = readable(buf)
        pairs = array("Q", chain.from_iterable(aborted))
        entries = ffi.cast(_ABORTED, ffi.from_buffer(pairs))
        n = count_batches(memory)
        spans, shown = ffi.new(_SPANS, n), ffi.new(_SHOWN)
        listed = (entries, len(pairs) // 2)
        asked = (memory, len(memory), *listed, from_offset, upto, spans, n, shown)
        check(lib.committed_keep(self._c, *asked), "filtering a fetch")
        return Spans(spans, shown.n, shown.rows, shown.attributes, shown.next_offset)


def all_data(buf: Any, from_offset: int, upto: int) -> Spans:
    """The data batches of a fetch with offsets in [from_offset, upto): READ_UNCOMMITTED.

    Raises:
        CoreError: the bytes are damaged.
    """
    return _plain(buf, lib.COMMITTED_ALL, from_offset, upto)


def decided(buf: Any, from_offset: int, upto: int) -> Spans:
    """Return the batches of `all_data` for which no marker comes: decided or of no transaction.

    Raises:
        CoreError: the bytes are damaged.
    """
    return _plain(buf, lib.COMMITTED_DECIDED, from_offset, upto)


def _plain(buf: Any, which: int, from_offset: int, upto: int) -> Spans:
    memory = readable(buf)
    n = count_batches(memory)
    spans, shown = ffi.new(_SPANS, n), ffi.new(_SHOWN)
    asked = (memory, len(memory), which, from_offset, upto, spans, n, shown)
    check(lib.committed_plain(*asked), "walking through a fetch")
    return Spans(spans, shown.n, shown.rows, shown.attributes, shown.next_offset)
