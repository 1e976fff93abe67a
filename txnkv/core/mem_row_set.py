"""MemRowSets: rows by key and commit stamp, in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from txnkv.core.keys import Keys
from txnkv.core.native import allocate, check, ffi, lib, pointer, readable
from txnkv.core.row_layout import SLICE_BYTES, RowBytes, RowLayout
from txnkv.core.rows import Rows, rows_pointer

_TOMBSTONE = 0xFFFFFFFF
_ENTRIES = ffi.typeof("mem_entry_t const **")
_SLICES = ffi.typeof("row_slice_t *")
_buffer = ffi.buffer


class MemRowSet:
    """Versions of rows by key, in the order of the keys, those of a key newest first.

    One thread writes at a time (the caller has a lock), others may read meanwhile without one.
    Nothing is changed by a call that raises.
    """

    __slots__ = ("__weakref__", "_c", "width")

    def __init__(self, width: int) -> None:
        """Makes an empty set.

        Args:
            width: bytes of a key, as the key codec has it; 0 for keys of any length.
        """
        self.width = width
        self._c = _own(lib.mem_row_set_create(width))

    @property
    def n(self) -> int:
        """The number of entries: versions and tombstones."""
        return int(lib.mem_row_set_count(self._c))

    @property
    def nbytes(self) -> int:
        """Bytes of all entries, with what it takes to find them."""
        return int(lib.mem_row_set_bytes(self._c))

    # -- writing -------------------------------------------------------------------

    def put(self, key: bytes, stamp: int, row: bytes | None) -> None:
        """Adds a version of a key; one with this stamp that is there stays as it is.

        Args:
            key: an encoded key.
            stamp: of the version.
            row: the encoded row; None for a tombstone.

        Raises:
            ValueError: the key has not the set's width.
        """
        if row is None:
            status = lib.mem_row_set_put(self._c, key, len(key), stamp, ffi.NULL, 0)
        else:
            status = lib.mem_row_set_put(self._c, key, len(key), stamp, row, len(row))
        if status:
            self._refuse(status)

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
        if status := lib.mem_row_set_put_many(self._c, keys.c, stamp, data, offsets):
            self._refuse(status)

    def apply(self, section: bytes, stamp: int) -> None:
        """Puts all that `serialize` gave.

        Raises:
            CoreError: the section is damaged, or of a set of another width.
        """
        if status := lib.mem_section_apply(self._c, section, len(section), stamp):
            check(status, f"applying a section of {len(section)} bytes at {stamp}")

    def copy(self, after: int, upto: int) -> MemRowSet:
        """A set of the entries with after < stamp <= upto."""
        made = MemRowSet.__new__(MemRowSet)
        made.width = self.width
        made._c = _own(lib.mem_row_set_copy(self._c, after, upto))
        return made

    def _refuse(self, status: int) -> None:
        if status == lib.STATUS_INPUT:
            raise ValueError(f"a key has not the {self.width} bytes of keys of this set")
        check(status, "adding rows to memory")

    # -- reading -------------------------------------------------------------------

    def get(self, key: bytes, after: int, upto: int) -> tuple[int, bytes | None] | None:
        """The newest version of a key with after < stamp <= upto.

        Returns:
            Its stamp and row (None for a tombstone); None when there is no such version.
        """
        entry = lib.mem_row_set_get(self._c, key, len(key), after, upto)
        if not entry:
            return None
        length = entry.row_len
        if length == _TOMBSTONE:
            return entry.stamp, None
        return entry.stamp, _buffer(entry.row, length)[:]

    def lookup(self, keys: Keys, after: int, upto: int) -> Entries:
        """Find what `get` finds, of many keys in any order; ascending ones go faster.

        Returns:
            Entry i belongs to key i; it has kind 0 when there is no such version.
        """
        found = allocate(8 * keys.n)
        lib.mem_row_set_lookup(self._c, keys.c, after, upto, pointer(found, _ENTRIES))
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
            n = lib.mem_row_set_select(self._c, wanted, last, cap, pointer(part, _ENTRIES))
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
        entry = lib.mem_row_set_changed(self._c, *bounds, after)
        return bytes(_buffer(entry.row - entry.key_len, entry.key_len)) if entry else None

    def changed_keys(self, keys: Keys, after: int) -> int:
        """The position of the first of these keys with an entry above `after`, or -1."""
        return int(lib.mem_row_set_changed_keys(self._c, keys.c, after))

    def serialize(self) -> bytes:
        """The newest entry of each key, without stamps, as a section that `apply` takes.

        No other thread may write meanwhile.

        Raises:
            CoreError: it would reach 4 GiB.
        """
        size = ffi.new("uint64_t *")
        if status := lib.mem_section_size(self._c, size):
            check(status, "writing a section")
        section = ffi.new("uint8_t[]", size[0])
        lib.mem_section_write(self._c, section, size[0])
        return bytes(_buffer(section))

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        return f"MemRowSet({self.n} entries, {self.nbytes} bytes)"


def _own(c: Any) -> Any:
    if not c:
        raise MemoryError("no memory for a MemRowSet")
    return ffi.gc(c, lib.mem_row_set_destroy)


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
