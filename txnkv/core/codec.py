"""Encoding of primary keys, in bulk from Arrow columns and one at a time from Python values.

The encoding is documented in docs/format-blocks.md, "Key encoding"; all ways give the same bytes.
Values that the core does not know at sight go through small codecs, one a column.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pyarrow as pa

from txnkv.core.keys import Keys
from txnkv.core.native import CoreError, allocate, check, ffi, lib, pointer
from txnkv.core.row_layout import row_table
from txnkv.core.rows import Rows, rows_pointer
from txnkv.core.value_codecs import KeyColumnCodec, key_type, value_codec


@lru_cache(maxsize=1024)
def key_codec(*types: pa.DataType) -> KeyCodec:
    """The codec of these types, made once.

    Raises:
        As `KeyCodec`.
    """
    return KeyCodec(types)


_VARYING = {lib.KEY_BYTES, lib.KEY_BOOL}


class KeyCodec:
    """The encoding of keys of given column types.

    Attributes:
        types: the Arrow types of the columns.
        width: bytes of a key, 0 when there is a string or binary column.
    """

    def __init__(self, types: Sequence[pa.DataType]) -> None:
        """Makes the codec.

        Raises:
            TypeError: a type cannot stand in a key.
            ValueError: there are no columns.
        """
        if not types:
            raise ValueError("a key has at least one column")
        self.types = list(types)
        kinds = [key_type(type_) for type_ in types]
        for type_, kind in zip(types, kinds, strict=True):
            if kind is None:
                raise TypeError(f"{type_} cannot stand in a key")
        self._kinds = ffi.new("key_type_t[]", kinds)
        self.width = int(lib.key_width(self._kinds, len(kinds)))
        last = len(types) - 1
        self._one: list[KeyColumnCodec] = [value_codec(t, i == last) for i, t in enumerate(types)]
        names = {str(i): type_ for i, type_ in enumerate(types)}
        self._at_sight = row_table(names, (), tuple(names))

    # -- in bulk -------------------------------------------------------------------

    def encode(self, columns: Sequence[pa.Array]) -> Keys:
        """The keys of as many rows as the columns have.

        Args:
            columns: one array a column, of its type, as long as each other, without nulls.

        Raises:
            CoreError: the keys pass 4 GiB.
            TypeError: a column is of another type.
            ValueError: the columns are too few or many, differ in length, have nulls, or are
                broken arrays.
        """
        n = self._demand_columns(columns)
        held = [column.buffers() for column in columns]
        cs = ffi.new("key_column_t[]", len(columns))
        for c, column, buffers, kind in zip(cs, columns, held, self._kinds, strict=True):
            _fill(c, column, buffers, kind)
        if self.width:
            data = allocate(n * self.width)
            check(lib.key_encode_fixed(cs, len(cs), n, pointer(data), data.size), "encoding keys")
            return Keys.adopt(data, None, self.width, n)
        offsets = allocate(4 * (n + 1))
        ends, size = pointer(offsets, "uint32_t *"), ffi.new("uint64_t *")
        what = f"encoding {n} keys"
        check(lib.key_encode_starts(cs, len(cs), n, ends, size), what)
        data = allocate(size[0])
        check(lib.key_encode_variable(cs, len(cs), n, ends, pointer(data), data.size), what)
        return Keys.adopt(data, offsets, 0, n)

    def decode(self, keys: Keys, column: int, lo: int = 0, n: int | None = None) -> pa.Array:
        """One column of keys [lo, lo + n).

        Args:
            keys: what this codec encoded.
            column: its number.
            lo: the first key.
            n: how many; None for all from `lo` on.

        Returns:
            An array of types[column].

        Raises:
            CoreError: the keys are not of this codec.
            IndexError: column or keys are not there.
        """
        n = keys.n - lo if n is None else n
        if not 0 <= column < len(self.types):
            raise IndexError(f"column {column} of {len(self.types)}")
        if lo < 0 or n < 0 or lo + n > keys.n:
            raise IndexError(f"keys [{lo}, {lo + n}) of {keys.n}")
        if keys.width != self.width:
            raise CoreError(f"decoding keys of width {keys.width}, this codec's is {self.width}")
        where = (keys.c, self._kinds, len(self._kinds), column, lo, n)
        type_ = self.types[column]
        what = f"decoding {n} keys"
        if self._kinds[column] == lib.KEY_BYTES:
            offsets, size = allocate(4 * (n + 1)), ffi.new("uint64_t *")
            ends = pointer(offsets, "uint32_t *")
            check(lib.key_decode_offsets(*where, ends, size), what)
            values = allocate(size[0])
            check(lib.key_decode_bytes(*where, ends, pointer(values), values.size), what)
            return pa.Array.from_buffers(type_, n, [None, offsets, values], 0)
        values = allocate((n * type_.bit_width + 7) // 8)
        check(lib.key_decode_fixed(*where, pointer(values), values.size), what)
        return pa.Array.from_buffers(type_, n, [None, values], 0)

    def decode_without(
        self, keys: Keys, column: int, gone: Rows, lo: int = 0, n: int | None = None
    ) -> pa.Array:
        """Decode one column of keys [lo, lo + n), without some of the keys.

        Args:
            keys: what this codec encoded.
            column: its number.
            gone: the keys to leave out, strictly ascending, all in [lo, lo + n).
            lo: the first key.
            n: how many, with those that are left out; None for all from `lo` on.

        Raises:
            CoreError: the keys are not of this codec.
            IndexError: column or keys are not there, or `gone` is not as it should be.
        """
        n = keys.n - lo if n is None else n
        if not 0 <= column < len(self.types) or self._kinds[column] in _VARYING:
            return self.decode(keys.without(gone, lo, n), column)
        if lo < 0 or n < 0 or keys.width != self.width:
            return self.decode(keys, column, lo, n)  # which refuses them
        type_, left = self.types[column], n - gone.n
        values = allocate(max(left, 0) * type_.bit_width // 8)
        where = (keys.c, self._kinds, len(self._kinds), column, lo, n)
        status = lib.key_decode_but(
            *where, rows_pointer(gone), gone.n, pointer(values), values.size
        )
        check(status, f"decoding {n} keys but {gone.n}")
        return pa.Array.from_buffers(type_, left, [None, values], 0)

    def _demand_columns(self, columns: Sequence[pa.Array]) -> int:
        if len(columns) != len(self.types):
            raise ValueError(f"{len(columns)} columns for a key of {len(self.types)}")
        for i, (column, type_) in enumerate(zip(columns, self.types, strict=True)):
            if column.type != type_:
                raise TypeError(f"key column {i} is {type_}, not {column.type}; cast it")
            if column.null_count:
                raise ValueError(f"key column {i} has {column.null_count} nulls; keys have none")
        n = len(columns[0])
        if any(len(column) != n for column in columns):
            raise ValueError(f"key columns of {[len(column) for column in columns]} rows")
        return n

    # -- one at a time -------------------------------------------------------------

    def encode_one(self, values: Sequence[object]) -> bytes:
        """The key of one row, as `encode` gives it.

        Args:
            values: dates as `date` or days, timestamps as `datetime` or microseconds, both since
                1970; the time zone of a `datetime` is there when the column has one, and only then.

        Raises:
            TypeError: a value is not of its column's type.
            ValueError: there are too few or many, or one is out of its type's range.
        """
        key: bytes | None = self._at_sight.key(tuple(values))
        if key is not None:
            return key
        if len(values) != len(self._one):
            raise ValueError(f"{len(values)} values for a key of {len(self._one)} columns")
        return self.encode_prefix(values)

    def encode_prefix(self, values: Sequence[object]) -> bytes:
        """The bytes with which every key begins whose first columns have these values.

        A string keeps its end mark, so "a" is no prefix of "ab", unless it is the key's
        last column.

        Raises:
            TypeError: a value is not of its column's type.
            ValueError: there are too many, or one is out of its type's range.
        """
        if values and (known := self._at_sight.beginning(tuple(values))) is not None:
            prefix: bytes = known[0]
            return prefix
        if len(values) > len(self._one):
            raise ValueError(f"{len(values)} values for a key of {len(self._one)} columns")
        codecs = self._one[: len(values)]
        return b"".join(c.encode(value) for c, value in zip(codecs, values, strict=True))

    def decode_one(self, key: bytes) -> tuple[Any, ...]:
        """The values of one key, as Python objects; dates and times that Python has not as numbers.

        Raises:
            CoreError: the bytes are no key of this codec.
        """
        values, at = [], 0
        try:
            for codec in self._one:
                value, at = codec.decode(key, at)
                values.append(value)
        except (ValueError, IndexError) as error:
            raise CoreError(f"decoding key {key!r}: {error}. Check where it came from.") from error
        if at != len(key):
            raise CoreError(f"decoding key {key!r}: {len(key) - at} bytes too many")
        return tuple(values)


def _fill(c: Any, column: pa.Array, buffers: list[pa.Buffer | None], kind: int) -> None:
    c.type, c.offset = kind, column.offset
    values = buffers[-1]
    c.values, c.values_len = pointer(values), 0 if values is None else values.size
    if kind == lib.KEY_BYTES:
        offsets = buffers[1]
        c.offsets, c.offsets_len = pointer(offsets), 0 if offsets is None else offsets.size


def successor(prefix: bytes) -> bytes | None:
    """The least byte string above every string that begins with `prefix`; None: there is none."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else None
