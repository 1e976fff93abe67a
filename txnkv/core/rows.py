"""Row lists and bitmaps: the two ways in which the core names some rows of many. Batches of rows,
cut and joined.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa

from txnkv.core.native import allocate, check, ffi, lib, pointer

NULL_ROW = 0xFFFFFFFF
"""In a row list to gather: no row, give a null."""


class Rows:
    """A list of row numbers, each a uint32.

    Attributes:
        n: how many.
        buffer: n little-endian uint32, 4-byte aligned.
    """

    __slots__ = ("buffer", "n")

    def __init__(self, buffer: pa.Buffer, n: int) -> None:
        """Takes n uint32 from the front of `buffer`.

        Raises:
            ValueError: the buffer is too short, or not 4-byte aligned.
        """
        if buffer.size < 4 * n:
            raise ValueError(f"{n} rows need {4 * n} bytes, the buffer has {buffer.size}")
        if buffer.address % 4:
            raise ValueError("a row list must be 4-byte aligned; copy it first")
        self.buffer = buffer
        self.n = n

    @classmethod
    def from_arrow(cls, array: pa.UInt32Array) -> Rows:
        """Row numbers of an Arrow array without nulls, not copied.

        Raises:
            TypeError: the array is not uint32.
            ValueError: it has nulls.
        """
        if array.type != pa.uint32():
            raise TypeError(f"row numbers are uint32, not {array.type}; cast them")
        if array.null_count:
            raise ValueError(f"row numbers have {array.null_count} nulls; fill them first")
        n = len(array)
        if n == 0:
            return cls(allocate(0), 0)
        return cls(array.buffers()[1].slice(4 * array.offset, 4 * n), n)

    @classmethod
    def of(cls, rows: Iterable[int]) -> Rows:
        """Row numbers of a Python iterable; for few."""
        return cls.from_arrow(pa.array(rows, pa.uint32()))

    @classmethod
    def range(cls, n: int) -> Rows:
        """All rows from 0 to n - 1."""
        return Bitmap.none(n).zeros()

    def to_arrow(self) -> pa.UInt32Array:
        """The same memory as an Arrow array."""
        return pa.Array.from_buffers(pa.uint32(), self.n, [None, self.buffer])

    def slice(self, lo: int, n: int) -> Rows:
        """Rows [lo, lo + n) of the list, not copied.

        Raises:
            IndexError: they are not all in the list.
        """
        if lo < 0 or n < 0 or lo + n > self.n:
            raise IndexError(f"rows [{lo}, {lo + n}) of a list of {self.n}")
        return Rows(self.buffer.slice(4 * lo, 4 * n), n)

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        return f"Rows({self.n})"


class Bitmap:
    """One bit for each of n positions, in Arrow's order.

    Attributes:
        n: how many positions.
        buffer: (n + 7) / 8 bytes or more; bits behind n are not looked at.
    """

    __slots__ = ("_count", "buffer", "n")

    def __init__(self, n: int, buffer: pa.Buffer, count: int | None = None) -> None:
        """Takes n bits from the front of `buffer`.

        Args:
            n: how many bits.
            buffer: where they are.
            count: how many of them are set, when that is known.

        Raises:
            ValueError: the buffer is too short.
        """
        if buffer.size < (n + 7) // 8:
            raise ValueError(f"{n} bits need {(n + 7) // 8} bytes, the buffer has {buffer.size}")
        self.n = n
        self.buffer = buffer
        self._count = count

    @classmethod
    def from_arrow(cls, array: pa.BooleanArray) -> Bitmap:
        """The bits of a boolean array without nulls; copied when it has an offset.

        Raises:
            TypeError: the array is not boolean.
            ValueError: it has nulls.
        """
        if array.type != pa.bool_():
            raise TypeError(f"a bitmap is made from bool, not {array.type}")
        if array.null_count:
            raise ValueError(f"the array has {array.null_count} nulls; fill them first")
        n = len(array)
        if n == 0:
            return cls(0, allocate(0), 0)
        source = array.buffers()[1]
        if array.offset == 0:
            return cls(n, source)
        out = allocate((n + 7) // 8)
        count = lib.bitmap_copy(pointer(source), array.offset, n, pointer(out))
        return cls(n, out, count)

    @classmethod
    def none(cls, n: int) -> Bitmap:
        """All of n bits clear."""
        return cls(n, pa.py_buffer(bytes((n + 7) // 8)), 0)

    @classmethod
    def of(cls, n: int, positions: pa.UInt32Array) -> Bitmap:
        """Set, of n bits, those at the given positions, which may repeat.

        Raises:
            IndexError: a position is not below n.
            TypeError: the positions are not uint32.
            ValueError: they have nulls.
        """
        rows = Rows.from_arrow(positions)
        out = allocate((n + 7) // 8)
        status = lib.bitmap_of(pointer(rows.buffer, "uint32_t *"), rows.n, n, pointer(out))
        check(status, f"setting {rows.n} of {n} bits")
        return cls(n, out)

    @property
    def count(self) -> int:
        """The number of bits that are set."""
        if self._count is None:
            self._count = int(lib.bitmap_count(pointer(self.buffer), 0, self.n))
        return self._count

    def get(self, i: int) -> bool:
        """Bit i.

        Raises:
            IndexError: i is not in [0, n).
        """
        if not 0 <= i < self.n:
            raise IndexError(f"bit {i} of {self.n}")
        return bool(self.buffer[i >> 3] >> (i & 7) & 1)

    def to_arrow(self) -> pa.BooleanArray:
        """The same memory as an Arrow array."""
        return pa.Array.from_buffers(pa.bool_(), self.n, [None, self.buffer])

    def positions(self) -> Rows:
        """The positions of set bits, ascending."""
        return self._where(1, self.count)

    def zeros(self) -> Rows:
        """The positions of clear bits, ascending."""
        return self._where(0, self.n - self.count)

    def or_(self, other: Bitmap) -> Bitmap:
        """Bits set in either. ValueError when the lengths differ."""
        return self._combine(other, lib.bitmap_or)

    def and_(self, other: Bitmap) -> Bitmap:
        """Bits set in both. ValueError when the lengths differ."""
        return self._combine(other, lib.bitmap_and)

    def and_not(self, other: Bitmap) -> Bitmap:
        """Bits set here and clear there. ValueError when the lengths differ."""
        return self._combine(other, lib.bitmap_and_not)

    def _where(self, wanted: int, count: int) -> Rows:
        out = allocate(4 * count)
        lib.bitmap_positions(pointer(self.buffer), self.n, wanted, pointer(out, "uint32_t *"))
        return Rows(out, count)

    def _combine(self, other: Bitmap, operation: object) -> Bitmap:
        if self.n != other.n:
            raise ValueError(f"bitmaps of {self.n} and {other.n} bits; they must be as long")
        out = allocate((self.n + 7) // 8)
        assert callable(operation)
        count = operation(pointer(self.buffer), pointer(other.buffer), self.n, pointer(out))
        return Bitmap(self.n, out, int(count))

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        return f"Bitmap({self.count} of {self.n})"


def rows_pointer(rows: Rows | None) -> object:
    """The `uint32_t *` of a row list, NULL for None."""
    return ffi.NULL if rows is None else pointer(rows.buffer, "uint32_t *")


# -- batches ---------------------------------------------------------------------------


def slices_of(batch: pa.RecordBatch, rows: int, size: int) -> Iterator[pa.RecordBatch]:
    """Slices of a batch of at most so many rows, and about so many bytes, without copying."""
    if batch.num_rows == 0:
        return
    width = max(batch.nbytes / batch.num_rows, 1.0)
    step = max(1, min(rows, int(size / width)))
    for lo in range(0, batch.num_rows, step):
        yield batch.slice(lo, step)


def gathered(
    batches: Iterable[pa.RecordBatch], rows: int, size: int = 1 << 62
) -> Iterator[list[pa.RecordBatch]]:
    """Batches that have rows, in lists of together at most so many rows and bytes, or of one."""
    waiting: list[pa.RecordBatch] = []
    count = taken = 0
    for batch in batches:
        nbytes = batch.nbytes
        if batch.num_rows == 0:
            continue
        if waiting and (count + batch.num_rows > rows or taken + nbytes > size):
            yield waiting
            waiting, count, taken = [], 0, 0
        waiting.append(batch)
        count += batch.num_rows
        taken += nbytes
    if waiting:
        yield waiting


def joined(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Return batches as one; a single one is not copied."""
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)
