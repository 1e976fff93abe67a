"""Rows as byte strings: the value columns of one row, as small writes and MemRowSets hold them.

The bytes are documented in docs/format-blocks.md, "Row". Many rows go through the core; one at a
time goes through its functions for Python values, and Python's `struct` where these do not know a
value at sight. All give the same bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from functools import cache
from itertools import accumulate
from typing import Any
from uuid import UUID

import pyarrow as pa

from txnkv.core.block import block_layout
from txnkv.core.native import CoreError, RowTable, allocate, check, ffi, lib, pointer
from txnkv.core.rows import Rows, rows_pointer
from txnkv.core.value_codecs import (
    DateCodec,
    DecimalCodec,
    DurationCodec,
    TimeCodec,
    TimestampCodec,
    key_type,
    value_codec,
)

_KINDS = {
    lib.BLOCK_BIT: lib.ROW_BIT,
    lib.BLOCK_FIXED: lib.ROW_FIXED,
    lib.BLOCK_VARLEN: lib.ROW_VARLEN,
    lib.BLOCK_OPAQUE: lib.ROW_VARLEN,
}
_NUMBERS = {
    pa.bool_(): "?",
    pa.int8(): "b",
    pa.int16(): "h",
    pa.int32(): "i",
    pa.int64(): "q",
    pa.uint8(): "B",
    pa.uint16(): "H",
    pa.uint32(): "I",
    pa.uint64(): "Q",
    pa.float32(): "f",
    pa.float64(): "d",
}


def row_shape(type_: pa.DataType) -> tuple[int, int]:
    """The kind of a type's slots in a row, and their bytes (0 when variable)."""
    kind, width = block_layout(type_)
    return _KINDS[kind], 1 if kind == lib.BLOCK_BIT else width


# -- values of nested types --------------------------------------------------------


def number_type(type_: pa.DataType) -> pa.DataType:
    """The type of the number that a date or time is stored as; of other types the same."""
    return {lib.KEY_I32: pa.int32(), lib.KEY_I64: pa.int64()}.get(key_type(type_), type_)


@cache
def value_of(type_: pa.DataType) -> Callable[[int], Any] | None:
    """Return what makes a date or time of the number that it is stored as; None for other types.

    It raises OverflowError for what Python cannot name.
    """
    column = _column(type_)
    return column.of if column.code in ("i", "q") else None


def is_opaque(type_: pa.DataType) -> bool:
    """Return True when a value of the type stands in a row as an Arrow IPC message."""
    return bool(block_layout(type_)[0] == lib.BLOCK_OPAQUE)


def to_messages(array: pa.Array) -> pa.BinaryArray:
    """Each value as the message of a batch of one row."""
    # Taken, not sliced: a slice of an empty list carries a byte of its neighbours.
    messages = [
        _message(array.take(pa.array([i]))) if array[i].is_valid else None
        for i in range(len(array))
    ]
    return pa.array(messages, pa.binary())


def from_messages(array: pa.BinaryArray, type_: pa.DataType) -> pa.Array:
    """Return the array that `to_messages` took apart.

    Raises:
        CoreError: a value is no such message.
    """
    parts = [_value(message.as_buffer(), type_) for message in array]
    return pa.concat_arrays(parts) if parts else pa.nulls(0, type_)


def _message(part: pa.Array) -> bytes:
    return bytes(pa.record_batch([part], names=["column"]).serialize())


def _value(message: pa.Buffer | None, type_: pa.DataType) -> pa.Array:
    if message is None:
        return pa.nulls(1, type_)
    try:
        batch = pa.ipc.read_record_batch(message, pa.schema([pa.field("column", type_)]))
        batch.validate(full=True)
    except (pa.ArrowInvalid, OSError) as error:
        raise _damaged(f"a value of {type_}: {error}") from error
    if batch.num_rows != 1:
        raise _damaged(f"a value of {type_} has {batch.num_rows} rows")
    return batch.column(0)


def _damaged(what: str) -> CoreError:
    return CoreError(f"reading a row: {what}. Check the store that it came from.")


# -- columns -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Column:
    """One column of a row: `code` is its struct format, "" when it is variable.

    `to` and `of` convert a value to what is packed and back; None when nothing is to be done.
    """

    type: pa.DataType
    code: str
    to: Callable[[Any], Any] | None
    of: Callable[[Any], Any] | None
    zero: Any

    def check(self, value: Any) -> None:
        packed = value if self.to is None else self.to(value)
        if self.code:
            struct.pack("<" + self.code, packed)


def _column(type_: pa.DataType) -> _Column:
    kind = pa.types
    if type_ in _NUMBERS:
        return _Column(type_, _NUMBERS[type_], None, None, 0)
    if kind.is_string(type_):
        return _Column(type_, "", _text, bytes.decode, "")
    if kind.is_binary(type_):
        return _Column(type_, "", _binary, None, b"")
    if kind.is_decimal128(type_):
        return _decimal(type_)
    if isinstance(type_, pa.BaseExtensionType):
        return _text_column(type_)
    codec = value_codec(type_, True) if kind.is_date32(type_) or _in_ticks(type_) else None
    if isinstance(codec, DateCodec | TimestampCodec | TimeCodec | DurationCodec):
        return _Column(type_, "i" if codec.width == 4 else "q", codec.number, codec.value, 0)
    if is_opaque(type_):
        return _nested(type_)
    raise TypeError(f"{type_} is no type of a column")


def _in_ticks(type_: pa.DataType) -> bool:
    """Return True for types of time that stand as a number of their unit."""
    if pa.types.is_time(type_):
        return bool(type_.unit != "ns")
    instants = pa.types.is_timestamp(type_) or pa.types.is_duration(type_)
    return bool(instants and type_.unit == "us")


def _text_column(type_: pa.DataType) -> _Column:
    """JSON, and UUIDs."""
    if pa.types.is_string(type_.storage_type):
        return _Column(type_, "", _text, bytes.decode, "")
    return _Column(type_, "16s", _uuid_bytes, lambda raw: UUID(bytes=raw), UUID(int=0))


def _uuid_bytes(value: Any) -> bytes:
    if not isinstance(value, UUID):
        raise TypeError(f"{value!r} for a column of UUIDs")
    return value.bytes


def _text(value: Any) -> bytes:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} for a column of strings")
    return value.encode()


def _binary(value: Any) -> bytes:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise TypeError(f"{value!r} for a column of binary")
    return bytes(value)


def _decimal(type_: pa.DataType) -> _Column:
    codec = value_codec(type_, True)
    assert isinstance(codec, DecimalCodec)
    number, value = codec.number, codec.value
    return _Column(
        type_,
        "16s",
        lambda given: number(given).to_bytes(16, "little", signed=True),
        lambda raw: value(int.from_bytes(raw, "little", signed=True)),
        0,
    )


def _nested(type_: pa.DataType) -> _Column:
    return _Column(
        type_,
        "",
        lambda value: _message(pa.array([value], type_)) if value is not _NO_VALUE else b"",
        lambda raw: _value(pa.py_buffer(raw), type_)[0].as_py() if raw else None,
        _NO_VALUE,
    )


_NO_VALUE = object()


# -- one row -----------------------------------------------------------------------


class _AnyRow:
    """Rows of values that `row_table` does not know at sight."""

    def __init__(self, columns: Sequence[_Column]) -> None:
        self._columns = columns
        fixed = "".join(column.code for column in columns)
        ends = "I" * sum(not column.code for column in columns)
        self._head = struct.Struct(f"<{(len(columns) + 7) // 8}s{fixed}{ends}")

    def encode(self, values: Sequence[Any]) -> bytes:
        columns = self._columns
        if len(values) != len(columns):
            raise ValueError(f"{len(values)} values for a row of {len(columns)} columns")
        bits, kept = self._without_nulls(values)
        try:
            packed = [
                (c.code, each if c.to is None else c.to(each))
                for c, each in zip(columns, kept, strict=True)
            ]
            fixed = [each for code, each in packed if code]
            texts = [each for code, each in packed if not code]
            return self._head.pack(bits, *fixed, *accumulate(map(len, texts))) + b"".join(texts)
        except (struct.error, OverflowError):
            raise _explained(columns, kept) from None

    def _without_nulls(self, values: Sequence[Any]) -> tuple[bytes, list[Any]]:
        bits, kept = 0, list(values)
        for i, column in enumerate(self._columns):
            if kept[i] is None:
                bits |= 1 << i
                kept[i] = column.zero
        return bits.to_bytes((len(kept) + 7) // 8, "little"), kept


def _explained(columns: Sequence[_Column], values: Sequence[Any]) -> Exception:
    """Return the error that says why values could not be packed."""
    for column, value in zip(columns, values, strict=True):
        try:
            column.check(value)
        except OverflowError:
            return ValueError(f"{value!r} is out of the range of {column.type}")
        except (TypeError, ValueError) as error:
            return error
        except struct.error as error:
            kind = ValueError if isinstance(value, int) else TypeError
            return kind(f"{value!r} for a column of {column.type}: {error}")
    return ValueError(f"the values of a row pass 4 GiB, or cannot be stored: {len(values)} columns")


# -- whole rows of a table -------------------------------------------------------------

_RAW, _TEXT, _JSON = 100, 101, 102  # csrc/native/row_table.h


def row_table(
    types: Mapping[str, pa.DataType],
    nullable: Collection[str],
    key: Sequence[str],
    missing: object = ...,
) -> RowTable:
    """The native codec of a table's rows: keys as `KeyCodec` has them, the rest as `RowLayout`.

    It takes a value at sight when that is what the column's type gives back, as `.as_py()` does,
    and answers None to any other.

    Args:
        types: the columns in schema order.
        nullable: those that may be null.
        key: those of the primary key, in its order.
        missing: stands in values for a column that keeps what it has.
    """
    columns = tuple(_native_column(name, type_, name in nullable) for name, type_ in types.items())
    names = list(types)
    return RowTable(columns, tuple(names.index(name) for name in key), CoreError, missing)


def _native_column(name: str, type_: pa.DataType, nullable: bool) -> tuple[Any, ...]:
    column, kind = _column(type_), pa.types
    code, (_, width) = key_type(type_), row_shape(type_)
    exact: type | None = None
    zone = None
    if kind.is_string(type_) or isinstance(type_, pa.JsonType):
        text = _TEXT if kind.is_string(type_) else _JSON
        return name, text, 0, nullable, str, False, None, None, None
    if kind.is_binary(type_):
        return name, lib.KEY_BYTES, 0, nullable, bytes, False, None, None, None
    if kind.is_boolean(type_):
        exact = bool
    elif kind.is_integer(type_):
        exact = int
    elif kind.is_float32(type_) or kind.is_float64(type_):
        exact = float
    elif kind.is_date32(type_):
        exact = date
    elif kind.is_timestamp(type_) and type_.unit == "us" and type_.tz in (None, "UTC"):
        exact, zone = datetime, type_.tz and UTC
    elif kind.is_time(type_):
        exact = time
    elif kind.is_duration(type_):
        exact = timedelta
    elif code == lib.KEY_UUID:
        exact = UUID
    elif kind.is_decimal128(type_):
        exact = Decimal
    if code is None:
        code = lib.KEY_BYTES if width == 0 else _RAW
    return name, code, width, nullable, exact, exact is datetime, zone, column.to, column.of


# -- many rows ---------------------------------------------------------------------------

_SLICES = ffi.typeof("row_slice_t *")
SLICE_BYTES = ffi.sizeof("row_slice_t")


class RowBytes:
    """n encoded rows, one behind the other.

    Attributes:
        n: how many.
        data: their bytes.
        offsets: n + 1 uint32: row i is data[offsets[i]:offsets[i + 1]].
    """

    __slots__ = ("data", "n", "offsets")

    def __init__(self, n: int, data: pa.Buffer, offsets: pa.Buffer) -> None:
        """Takes n rows.

        Raises:
            ValueError: there are no n + 1 aligned offsets.
        """
        if offsets.size < 4 * (n + 1) or offsets.address % 4:
            raise ValueError(f"{n} rows need {n + 1} aligned uint32 offsets")
        self.n = n
        self.data = data
        self.offsets = offsets

    def row(self, i: int) -> bytes:
        """Row i.

        Raises:
            IndexError: i is not in [0, n).
        """
        if not 0 <= i < self.n:
            raise IndexError(f"row {i} of {self.n}")
        ends = pointer(self.offsets, "uint32_t *")
        return bytes(self.data[ends[i] : ends[i + 1]])

    def __len__(self) -> int:
        return self.n


class RowLayout:
    """The layout of a table's value columns in a row.

    Attributes:
        types: the Arrow types of the columns.
    """

    def __init__(self, types: Sequence[pa.DataType]) -> None:
        """Makes the layout; there may be no columns."""
        self.types = list(types)
        shapes = [row_shape(type_) for type_ in self.types]
        self._kinds = [kind for kind, _ in shapes]
        self._slots = ffi.new("row_slot_t[]", [(kind, width, 0) for kind, width in shapes])
        self.c = ffi.new("row_layout_t *")
        lib.row_layout_init(self._slots, len(shapes), self.c)
        columns = {str(i): type_ for i, type_ in enumerate(self.types)}
        self._at_sight = row_table(columns, columns, ())
        self._any = _AnyRow([_column(type_) for type_ in self.types])

    def encode_one(self, values: Sequence[Any]) -> bytes:
        """The row of one Python value a column.

        Args:
            values: what `.as_py()` gives, or for dates and times the number, for bool 0 and 1; None
                is a null.

        Raises:
            TypeError, ValueError: a value does not fit its column; there are too few or many.
        """
        made = self._at_sight.row(tuple(values))
        return self._any.encode(values) if made is None else made[1]

    def decode_one(self, row: bytes) -> tuple[Any, ...]:
        """The values of a row, as `.as_py()` would give them.

        Raises:
            CoreError: the bytes are no row of this layout.
            OverflowError: a date or time is none that Python has.
        """
        return tuple(self._at_sight.dict(b"", row).values())

    def decoder(self, wanted: Collection[int]) -> Callable[[bytes], tuple[Any, ...]]:
        """Return a `decode_one` that gives dates and times as numbers, so that it has all of them.

        Args:
            wanted: the columns that somebody looks at; others come in any form.
        """
        columns = []
        for i, type_ in enumerate(self.types):
            column = _native_column(str(i), type_, True)
            if i not in wanted or number_type(type_) != type_:
                column = *column[:-1], None
            columns.append(column)
        table = RowTable(tuple(columns), (), CoreError, ...)
        return lambda row: tuple(table.dict(b"", row).values())

    def encode(self, arrays: Sequence[pa.Array], rows: Rows | None = None) -> RowBytes:
        """The rows of as many as the columns have, or of some.

        Args:
            arrays: one a column, of its type, as long as each other.
            rows: the rows to take, in this order; None for all, of which there are none when
                there are no columns.

        Raises:
            CoreError: the rows reach 4 GiB.
            IndexError: a row is not in the arrays.
            TypeError: an array is of another type.
            ValueError: the arrays are too few or many, differ in length, or are broken.
        """
        columns, length, held = self.columns(arrays)
        n = length if rows is None else rows.n
        offsets = allocate(4 * (n + 1))
        picked = (rows_pointer(rows), n, pointer(offsets, "uint32_t *"))
        check(lib.row_encode_size(self.c, columns, *picked), f"encoding {n} rows")
        data = allocate(picked[2][n])
        lib.row_encode(self.c, columns, *picked, pointer(data), data.size)
        del held
        return RowBytes(n, data, offsets)

    def columns(self, arrays: Sequence[pa.Array]) -> tuple[Any, int, Any]:
        """Arrays as the core takes them, their length, and what is to be held meanwhile.

        Raises:
            TypeError: an array is of another type.
            ValueError: the arrays are too few or many, or differ in length.
        """
        length = self._demand_arrays(arrays)
        plain = [to_messages(a) if is_opaque(a.type) else a for a in arrays]
        columns = ffi.new("row_column_t[]", len(plain))
        held = [fill_column(*each) for each in zip(columns, plain, self._kinds, strict=True)]
        return columns, length, held

    def decode(self, rows: RowBytes, columns: Sequence[int]) -> list[pa.Array]:
        """Some columns of rows.

        Args:
            rows: what this layout encoded.
            columns: their numbers.

        Raises:
            CoreError: the bytes are no rows of this layout.
            IndexError: a column is not there.
        """
        slices = allocate(SLICE_BYTES * rows.n)
        what = f"taking {rows.n} rows"
        data, ends = rows.data, pointer(rows.offsets, "uint32_t *")
        check(
            lib.row_slices(pointer(data), data.size, ends, rows.n, pointer(slices, _SLICES)), what
        )
        return self.decode_slices(slices, rows.n, columns)

    def decode_slices(self, slices: pa.Buffer, n: int, columns: Sequence[int]) -> list[pa.Array]:
        """Decode as `decode` does, n `row_slice_t` in a buffer; no row reads as nulls."""
        at = pointer(slices, _SLICES)
        check(lib.row_check(self.c, at, n), f"decoding {n} rows")
        return self.decode_checked(slices, n, columns)

    def decode_checked(self, slices: pa.Buffer, n: int, columns: Sequence[int]) -> list[pa.Array]:
        """Decode as `decode_slices` does, rows that the core has checked."""
        at = pointer(slices, _SLICES)
        return [self._column(at, n, column) for column in columns]

    def _column(self, slices: Any, n: int, column: int) -> pa.Array:
        if not 0 <= column < len(self.types):
            raise IndexError(f"column {column} of {len(self.types)}")
        type_, kind = self.types[column], self._kinds[column]
        validity = allocate((n + 7) // 8)
        if kind != lib.ROW_VARLEN:
            values = allocate((n * type_.bit_width + 7) // 8)
            out = pointer(validity), pointer(values)
            nulls = lib.row_decode_fixed(self.c, slices, n, column, *out)
            return pa.Array.from_buffers(type_, n, [validity if nulls else None, values], nulls)
        offsets, count = allocate(4 * (n + 1)), ffi.new("uint32_t *")
        ends = pointer(offsets, "uint32_t *")
        status = lib.row_decode_offsets(self.c, slices, n, column, pointer(validity), ends, count)
        check(status, f"decoding {n} rows")
        values = allocate(ends[n])
        lib.row_decode_bytes(self.c, slices, n, column, ends, pointer(values))
        opaque = is_opaque(type_)
        buffers = [validity if count[0] else None, offsets, values]
        array = pa.Array.from_buffers(pa.binary() if opaque else type_, n, buffers, count[0])
        return from_messages(array, type_) if opaque else array

    def _demand_arrays(self, arrays: Sequence[pa.Array]) -> int:
        if len(arrays) != len(self.types):
            raise ValueError(f"{len(arrays)} arrays for rows of {len(self.types)} columns")
        for i, (array, type_) in enumerate(zip(arrays, self.types, strict=True)):
            if array.type != type_:
                raise TypeError(f"column {i} is {type_}, not {array.type}; cast it")
        lengths = {len(array) for array in arrays}
        if len(lengths) > 1:
            raise ValueError(f"arrays of {sorted(lengths)} rows; columns are as long as each other")
        return lengths.pop() if lengths else 0


def fill_column(c: Any, array: pa.Array, kind: int) -> list[pa.Buffer | None]:
    """Fill a `row_column_t`; the caller keeps what it is given while that is used."""
    buffers: list[pa.Buffer | None] = array.buffers()
    validity, values = buffers[0], buffers[-1]
    offsets = buffers[1] if kind == lib.ROW_VARLEN else None
    c.values, c.values_len = pointer(values), 0 if values is None else values.size
    c.offsets, c.offsets_len = pointer(offsets), 0 if offsets is None else offsets.size
    c.validity, c.validity_len = pointer(validity), 0 if validity is None else validity.size
    c.offset, c.length = array.offset, len(array)
    return buffers
