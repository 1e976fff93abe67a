"""Stamps of rows: which rows of an immutable block were deleted and when, which a snapshot sees."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, Literal

import pyarrow as pa

from txnkv.core import compute as pc
from txnkv.core.native import allocate, check, ffi, lib, pointer, readable
from txnkv.core.rows import Bitmap, Rows

STAMP_UNDECIDED = 1 << 63
"""The top bit of a stamp: the rest of it is the id of an undecided transaction."""

STAMP_NEVER = STAMP_UNDECIDED - 1
"""The delete stamp of a row that is not deleted. No snapshot reaches it."""


def visible(insert: Any, delete: Any | None, n: int, snapshot: int, own: int) -> tuple[Bitmap, int]:
    """The rows that a snapshot sees: inserted for it, and not deleted for it.

    A stamp counts when it is at or below the snapshot, or is the reader's own.

    Args:
        insert: n uint64 insert stamps, any buffer object.
        delete: as many delete stamps (`STAMP_NEVER`: not deleted), or None for no deletes.
        n: how many rows.
        snapshot: a commit timestamp, below `STAMP_NEVER`.
        own: the reader's own undecided stamp, top bit set, or 0 for none.

    Returns:
        A bit for each row, and the number of rows that have an undecided stamp of another:
        those are taken as not inserted, or not deleted, and their owner must be asked.

    Raises:
        ValueError: the stamps are fewer than n, the snapshot has its top bit set or is
            `STAMP_NEVER`, or `own` is not 0 and has no top bit.
    """
    if not 0 <= snapshot < STAMP_NEVER:
        raise ValueError(f"snapshot {snapshot} is no commit timestamp (0 to 2^63 - 2)")
    if own and own < STAMP_UNDECIDED:
        raise ValueError(f"own stamp {own} has no top bit; it must be 0 or an undecided stamp")
    inserts = _stamps(insert, n)
    deletes = ffi.NULL if delete is None else _stamps(delete, n)
    bits = allocate((n + 7) // 8)
    counts = ffi.new("uint32_t[2]")
    lib.visible_bitmap(inserts, deletes, n, snapshot, own, pointer(bits), counts, counts + 1)
    return Bitmap(n, bits, counts[0]), int(counts[1])


def _stamps(stamps: Any, n: int) -> Any:
    memory = readable(stamps)
    if len(memory) < 8 * n:
        raise ValueError(f"{n} stamps need {8 * n} bytes, the buffer has {len(memory)}")
    return memory


_U32, _U64 = pa.uint32(), pa.uint64()


class Delta:
    """Rows, strictly ascending, and the stamp at which each was deleted. Not changed once made.

    Attributes:
        n: how many rows.
        rows: uint32.
        stamps: uint64, as many.
    """

    __slots__ = ("_c", "_views", "n", "rows", "stamps")

    def __init__(self, rows: pa.UInt32Array, stamps: pa.UInt64Array) -> None:
        """Takes two arrays without nulls, not copied.

        Raises:
            ValueError: they differ in length, have nulls or are of another type.
        """
        if (rows.type, stamps.type) != (_U32, _U64) or len(rows) != len(stamps):
            raise ValueError(
                f"a delta has as many uint32 rows as uint64 stamps, these are {len(rows)} "
                f"{rows.type} and {len(stamps)} {stamps.type}"
            )
        if rows.null_count or stamps.null_count:
            raise ValueError("rows and stamps of a delta have no nulls")
        self.n = len(rows)
        self.rows = rows
        self.stamps = stamps
        self._views: tuple[memoryview, memoryview] | None = None
        fields = (_address(rows, 4), _address(stamps, 8), self.n)
        self._c = ffi.new("delta_t *", fields)

    @property
    def c(self) -> Any:
        """The delta as the core has it, which lives as long as this."""
        return self._c

    @classmethod
    def none(cls) -> Delta:
        """No rows."""
        return cls(pa.nulls(0, _U32), pa.nulls(0, _U64))

    def check(self, limit: int) -> None:
        """Refuses rows that are not strictly ascending or not below `limit`.

        Raises:
            CoreError: they are not.
        """
        check(lib.delta_check(self._c, limit), f"reading a delta of {self.n} of {limit} rows")

    def row(self, i: int) -> int:
        """The row of entry i."""
        return int(self._numbers()[0][i])

    def find(self, row: int) -> int:
        """Return the number of entries with rows below `row`."""
        return bisect_left(self._numbers()[0], row)

    def _numbers(self) -> tuple[memoryview, memoryview]:
        if self._views is None:
            self._views = _numbers(self.rows, 4, "I"), _numbers(self.stamps, 8, "Q")
        return self._views

    def slice(self, lo: int, n: int, minus: int = 0) -> Delta:
        """Entries [lo, lo + n), with `minus` taken from the row numbers."""
        rows = self.rows.slice(lo, n)
        if minus:
            rows = pc.subtract(rows, pa.scalar(minus, _U32))
        return Delta(rows, self.stamps.slice(lo, n))

    def merge(self, other: Delta) -> Delta:
        """All rows of both; the lower stamp where both have a row, for a row dies once."""
        room = self.n + other.n
        rows, stamps = allocate(4 * room), allocate(8 * room)
        n = ffi.new("uint32_t *")
        lib.delta_merge(self._c, other._c, pointer(rows), pointer(stamps), n)
        return Delta(
            pa.Array.from_buffers(_U32, n[0], [None, rows]),
            pa.Array.from_buffers(_U64, n[0], [None, stamps]),
        )

    def expand(self, n: int) -> pa.UInt64Array:
        """A delete stamp for each of n rows, `STAMP_NEVER` where there is none.

        Raises:
            IndexError: a row is not below n.
        """
        stamps = allocate(8 * n)
        status = lib.delta_expand(self._c, n, pointer(stamps))
        check(status, f"spreading a delta of {self.n} over {n} rows")
        return pa.Array.from_buffers(_U64, n, [None, stamps])

    def between(self, n: int, after: int, upto: int) -> Bitmap:
        """Mark, of n rows, those with after < delete stamp <= upto.

        Raises:
            IndexError: a row is not below n.
        """
        bits, count = allocate((n + 7) // 8), ffi.new("uint32_t *")
        status = lib.delta_between(self._c, n, after, upto, pointer(bits), count)
        check(status, f"looking at a delta of {self.n} over {n} rows")
        return Bitmap(n, bits, count[0])

    def dead(self, n: int, snapshot: int) -> Bitmap:
        """Mark, of n rows, those that are deleted at a snapshot. A stamp of 0 is no stamp."""
        return self.between(n, 0, snapshot)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Delta):
            return NotImplemented
        return bool(self.rows.equals(other.rows) and self.stamps.equals(other.stamps))

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        return f"Delta({self.n})"


def version_order(same: Bitmap, inserts: pa.UInt64Array) -> Rows | None:
    """The order that puts the versions of each key newest first.

    Args:
        same: of ascending keys, those that equal the one before them (`mark_duplicates`).
        inserts: the insert stamp of each.

    Returns:
        Positions; None when they stand in that order as they are.

    Raises:
        MemoryError: there is no room for 4 bytes a key.
    """
    n = same.n
    if len(inserts) != n:
        raise ValueError(f"{n} keys and {len(inserts)} stamps; they must be as many")
    order, moved = allocate(4 * n), ffi.new("int *")
    out = pointer(order, "uint32_t *")
    status = lib.delta_order(pointer(same.buffer), _address(inserts, 8), n, out, moved)
    check(status, f"ordering {n} versions")
    return Rows(order, n) if moved[0] else None


def _numbers(array: pa.Array, width: int, code: Literal["I", "Q"]) -> memoryview:
    buffer = array.buffers()[1]
    if buffer is None or len(array) == 0:
        return memoryview(b"").cast(code)
    lo = width * array.offset
    return memoryview(buffer)[lo : lo + width * len(array)].cast("B").cast(code)


def _address(array: pa.Array, width: int) -> Any:
    buffer = array.buffers()[1]
    if buffer is None:
        return ffi.NULL
    return ffi.cast("uint8_t *", buffer.address + width * array.offset)
