"""Encoding of primary keys, in bulk from Arrow columns and one at a time from Python values.

The encoding is documented in docs/format-blocks.md, "Key encoding"; both ways give the same bytes.

One value at a time goes through small codecs, one a column; many through the core, which has a key
type for each Arrow type that may stand in a key.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import pyarrow as pa

from txnkv.core.keys import Keys
from txnkv.core.native import CoreError, allocate, check, ffi, lib, pointer
from txnkv.core.rows import Rows, rows_pointer
from txnkv.core.value_codecs import (
    BoolCodec,
    BytesCodec,
    DecimalCodec,
    IntegerCodec,
    KeyColumnCodec,
    value_codec,
)

_BY_ID: dict[int, int] = {
    pa.bool_().id: lib.KEY_BOOL,
    pa.int8().id: lib.KEY_I8,
    pa.int16().id: lib.KEY_I16,
    pa.int32().id: lib.KEY_I32,
    pa.int64().id: lib.KEY_I64,
    pa.uint8().id: lib.KEY_U8,
    pa.uint16().id: lib.KEY_U16,
    pa.uint32().id: lib.KEY_U32,
    pa.uint64().id: lib.KEY_U64,
    pa.float32().id: lib.KEY_F32,
    pa.float64().id: lib.KEY_F64,
    pa.date32().id: lib.KEY_I32,
    pa.timestamp("us").id: lib.KEY_I64,
    pa.time32("s").id: lib.KEY_I32,
    pa.time64("us").id: lib.KEY_I64,
    pa.duration("us").id: lib.KEY_I64,
    pa.decimal128(38).id: lib.KEY_DECIMAL128,
    pa.string().id: lib.KEY_BYTES,
    pa.binary().id: lib.KEY_BYTES,
}


_UUID = pa.uuid()


def key_type(type_: pa.DataType) -> int | None:
    """The core's `key_type_t` of an Arrow type, None when it cannot stand in a key."""
    if type_ == _UUID:
        return int(lib.KEY_UUID)
    return _BY_ID.get(type_.id)


def key_encoder(
    codecs: Sequence[KeyColumnCodec], slow: Callable[[Sequence[Any]], bytes]
) -> Callable[[Sequence[Any]], bytes]:
    """A function that encodes keys of these columns, and no others.

    For (int64, int32, string) it is

        def encode(values):
            try:
                (v0, v1, v2) = values
                return pack0(v0 + 0x8000000000000000, v1 + 0x80000000) + v2.encode()
            except ERRORS:
                return slow(values)

    Args:
        codecs: of the columns.
        slow: the same, for values that it cannot take; it raises what is wrong with them.
    """
    names: dict[str, Any] = {"slow": slow, "ERRORS": _REFUSALS}
    parts: list[str] = []
    run: list[tuple[str, str]] = []
    for i, codec in enumerate(codecs):
        if isinstance(codec, IntegerCodec) and not isinstance(codec, BoolCodec | DecimalCodec):
            plain = type(codec) is IntegerCodec
            names[f"number{i}"] = codec.number
            value = f"v{i}" if plain else f"number{i}(v{i})"
            run.append((_CODES[codec.width], value + _raised(codec)))
            continue
        _close(run, parts, names)
        names[f"encode{i}"] = codec.encode
        text = isinstance(codec, BytesCodec) and codec.text and codec.last
        parts.append(f"v{i}.encode()" if text else f"encode{i}(v{i})")
    _close(run, parts, names)
    given = "".join(f"v{i}, " for i in range(len(codecs)))
    source = (
        "def encode(values):\n"
        "    try:\n"
        f"        ({given}) = values\n"
        f"        return {' + '.join(parts)}\n"
        "    except ERRORS:\n"
        "        return slow(values)\n"
    )
    exec(source, names)
    encode: Callable[[Sequence[Any]], bytes] = names["encode"]
    return encode


_CODES = {1: "B", 2: "H", 4: "I", 8: "Q"}
_REFUSALS = (struct.error, TypeError, ValueError, OverflowError, AttributeError)


def _raised(codec: IntegerCodec) -> str:
    return f" + {1 << (8 * codec.width - 1):#x}" if codec.signed else ""


def _close(run: list[tuple[str, str]], parts: list[str], names: dict[str, Any]) -> None:
    """Packs a run of integer columns in one call."""
    if run:
        name = f"pack{len(parts)}"
        names[name] = struct.Struct(">" + "".join(code for code, _ in run)).pack
        parts.append(f"{name}({', '.join(value for _, value in run)})")
        run.clear()


@lru_cache(maxsize=1024)
def key_codec(*types: pa.DataType) -> KeyCodec:
    """The codec of these types, made once: that compiles a function.

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
        encode_one: `(values) -> bytes`, the key of one row, as `encode` gives it. Dates are
            `date` or days, timestamps `datetime` or microseconds, both since 1970; the time zone
            of a `datetime` is there when the column has one, and only then. Raises TypeError when
            a value is not of its column's type, ValueError when there are too few or many, or one
            is out of its type's range.
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
        self.encode_one = key_encoder(self._one, self._encode_any)

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

    def _encode_any(self, values: Sequence[object]) -> bytes:
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
