"""MemRowSets: rows by key and commit stamp, in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from txnkv.core.keys import Keys
from txnkv.core.native import MemRowSetBase, allocate, check, ffi, lib, pointer, readable
from txnkv.core.row_layout import SLICE_BYTES, RowBytes, RowLayout
from txnkv.core.rows import Rows, rows_pointer

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
