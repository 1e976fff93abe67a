"""Rows and their stamps: in memory by key and commit stamp, and in immutable blocks.

A `MemRowSet` has versions of rows in memory. A row of a block stays where it is when it is deleted:
a `Delta` beside the block says when that was, and `visible` which rows a snapshot sees.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Literal

import pyarrow as pa

from txnkv.core import compute as pc
from txnkv.core.keys import Keys
from txnkv.core.native import MemRowSetBase, allocate, check, ffi, lib, pointer, readable
from txnkv.core.row_layout import SLICE_BYTES, RowBytes, RowLayout
from txnkv.core.rows import Bitmap, Rows, rows_pointer

_ENTRIES = ffi.typeof("mem_entry_t const **")
_SLICES = ffi.typeof("row_slice_t *")
_SET = ffi.typeof("mem_row_set_t *")
_buffer = ffi.buffer


class MemRowSet(MemRowSetBase):
    """Versions of rows by key, in the order of the keys, those of a key newest first.

    One thread writes at a time (the caller has a lock), others may read meanwhile without one.
    Nothing is changed by a call that raises. Part of it is native:

        MemRowSet(width)         an empty set of keys of `width` bytes; 0: of any length
        width, n, nbytes         that, the number of entries, and bytes with what finds them
        put(key, stamp, row)     adds a version, None: a tombstone; one that is there stays.
                                 ValueError: the key has not the set's width
        get(key, after, upto)    (stamp, row) of the newest version with after < stamp <= upto,
                                 the row None for a tombstone; None when there is none
        apply(section, stamp)    puts all that `serialize` gave. CoreError: it is damaged, or of
                                 a set of another width
        serialize()              the newest entry of each key, without stamps; nobody writes
                                 meanwhile. CoreError: it would reach 4 GiB
        changed_of(own, after)   the first key of the set `own` that has an entry above `after`
                                 here; None when there is none
        copy(after, upto)        a set of the entries with after < stamp <= upto
    """

    __slots__ = ("__weakref__",)

    @property
    def c(self) -> Any:
        """The set as the core has it, which lives as long as this."""
        return ffi.cast(_SET, self.address)

    # -- writing -------------------------------------------------------------------

    def put_many(self, keys: Keys, stamp: int, rows: RowBytes | None) -> None:
        """Adds a version of each key.

        Args:
            keys: in any order; ascending ones go faster.
            stamp: of all versions.
            rows: one a key; None for tombstones.

        Raises:
            ValueError: a key has not the set's width, or there are not as many rows as keys.
        """
        data = offsets = ffi.NULL
        if rows is not None:
            if rows.n != keys.n:
                raise ValueError(f"{rows.n} rows for {keys.n} keys")
            data, offsets = pointer(rows.data), pointer(rows.offsets, "uint32_t *")
        if status := lib.mem_row_set_put_many(self.c, keys.c, stamp, data, offsets):
            self._refuse(status)

    def _refuse(self, status: int) -> None:
        if status == lib.STATUS_INPUT:
            raise ValueError(f"a key has not the {self.width} bytes of keys of this set")
        check(status, "rows of memory")

    # -- reading -------------------------------------------------------------------

    def lookup(self, keys: Keys, after: int, upto: int) -> Entries:
        """Find what `get` finds, of many keys in any order; ascending ones go faster.

        Returns:
            Entry i belongs to key i; it has kind 0 when there is no such version.
        """
        found = allocate(8 * keys.n)
        lib.mem_row_set_lookup(self.c, keys.c, after, upto, pointer(found, _ENTRIES))
        return Entries(self, found, keys.n, keys)

    def select(
        self,
        low: bytes | None,
        high: bytes | None,
        after: int,
        upto: int,
        versions: bool = False,
    ) -> Entries:
        """The versions with after < stamp <= upto of the keys in [low, high), ascending.

        Args:
            low: an encoded key; None for no bound.
            high: the same.
            after: stamps above it are taken,
            upto: up to this one.
            versions: all versions of a key, newest first, instead of the newest.
        """
        held = [None if bound is None else readable(bound) for bound in (low, high)]
        bounds: list[Any] = []
        for memory in held:
            bounds += [ffi.NULL, 0] if memory is None else [memory, len(memory)]
        wanted = ffi.new("mem_range_t *", [*bounds, after, upto, versions])
        last = ffi.new("mem_entry_t const **")
        parts, total = [], 0
        while True:  # once, unless a writer adds more than there were
            cap = self.n + 1
            part = allocate(8 * cap)
            n = lib.mem_row_set_select(self.c, wanted, last, cap, pointer(part, _ENTRIES))
            parts.append(part.slice(0, 8 * n))
            total += n
            if n < cap:
                break
        found = parts[0] if len(parts) == 1 else pa.py_buffer(b"".join(map(bytes, parts)))
        return Entries(self, found, total)

    def changed(self, low: bytes | None, high: bytes | None, after: int) -> bytes | None:
        """The first key in [low, high) with an entry above `after`; None when there is none."""
        bounds: list[Any] = []
        for bound in (low, high):
            bounds += [ffi.NULL, 0] if bound is None else [bound, len(bound)]
        entry = lib.mem_row_set_changed(self.c, *bounds, after)
        return bytes(_buffer(entry.row - entry.key_len, entry.key_len)) if entry else None

    def changed_keys(self, keys: Keys, after: int) -> int:
        """The position of the first of these keys with an entry above `after`, or -1."""
        return int(lib.mem_row_set_changed_keys(self.c, keys.c, after))

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        return f"MemRowSet({self.n} entries, {self.nbytes} bytes)"


class Entries:
    """Entries of a MemRowSet, which lives as long as they do.

    Attributes:
        n: how many.
    """

    __slots__ = ("_found", "_keys", "_set", "n")

    def __init__(self, of: MemRowSet, found: pa.Buffer, n: int, keys: Keys | None = None) -> None:
        """Wraps n pointers to entries of a set."""
        self.n = n
        self._set = of
        self._found = found
        self._keys = keys

    @property
    def keys(self) -> Keys:
        """The key of each; of a lookup, the keys that were asked for."""
        if self._keys is None:
            size = ffi.new("uint64_t *")
            check(lib.mem_entries_keys_size(self._pointer, self.n, size), f"taking {self.n} keys")
            width = self._set.width
            data = allocate(size[0])
            offsets = None if width else allocate(4 * (self.n + 1))
            ends = pointer(offsets, "uint32_t *")
            lib.mem_entries_keys(self._pointer, self.n, pointer(data), data.size, ends)
            self._keys = Keys.adopt(data, offsets, width, self.n)
        return self._keys

    @property
    def width(self) -> float:
        """Bytes of an entry of their set, on average."""
        return self._set.nbytes / max(self._set.n, 1)

    @property
    def stamps(self) -> pa.UInt64Array:
        """The stamp of each, 0 where there is no entry."""
        out = allocate(8 * self.n)
        lib.mem_entries_stamps(self._pointer, self.n, pointer(out, "uint64_t *"))
        return pa.Array.from_buffers(pa.uint64(), self.n, [None, out], 0)

    @property
    def kinds(self) -> pa.UInt8Array:
        """0 where there is no entry, 1 for a row, 2 for a tombstone."""
        out = allocate(self.n)
        lib.mem_entries_kinds(self._pointer, self.n, pointer(out))
        return pa.Array.from_buffers(pa.uint8(), self.n, [None, out], 0)

    def columns(
        self, layout: RowLayout, columns: Sequence[int], rows: Rows | None = None
    ) -> list[pa.Array]:
        """Some columns of the rows; nulls for tombstones and where there is no entry.

        Args:
            layout: that the rows were encoded with.
            columns: their numbers.
            rows: numbers of the entries to take, in this order; `NULL_ROW` for nulls.

        Raises:
            CoreError: a row is not of this layout.
            IndexError: an entry or a column is not there.
        """
        m = self.n if rows is None else rows.n
        slices = allocate(SLICE_BYTES * m)
        out = pointer(slices, _SLICES)
        status = lib.mem_entries_rows(self._pointer, self.n, rows_pointer(rows), m, out)
        check(status, f"taking {m} of {self.n} entries")
        return layout.decode_slices(slices, m, columns)

    def take(self, rows: Rows) -> Entries:
        """The entries of a row list, in its order.

        Raises:
            IndexError: a number is not in [0, n).
        """
        found = pa.Array.from_buffers(pa.uint64(), self.n, [None, self._found], 0)
        taken = found.take(rows.to_arrow())
        keys = None if self._keys is None else self._keys.gather(rows)
        return Entries(self._set, taken.buffers()[1], rows.n, keys)

    @property
    def _pointer(self) -> Any:
        return pointer(self._found, _ENTRIES)

    def __len__(self) -> int:
        return self.n


# -- deleted rows of blocks ------------------------------------------------------------

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
