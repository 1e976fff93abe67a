"""Values of typed messages: a row of columns, and before it which schema it has.

The bytes are documented in docs/format-topics.md, "Typed value". One value at a time and many
give the same bytes.

A list is its elements one behind the other, as rows of one column.

So a column of lists becomes a binary column, and comes back, in a few calls whatever the lists
hold; a list of lists is such a column of such columns.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from txnkv.core import compute as pc
from txnkv.core.native import CoreError, allocate, check, ffi, lib, pointer
from txnkv.core.row_layout import SLICE_BYTES, RowLayout, fill_column
from txnkv.core.rows import Rows, rows_pointer

_SLICES = ffi.typeof("row_slice_t *")
_BINARY = pa.binary()


class DamagedValueError(CoreError):
    """A value that is no value of its schema.

    Attributes:
        index: which one it is.
    """

    def __init__(self, why: str, index: int = 0) -> None:
        super().__init__(why)
        self.index = index


def flat(type_: pa.DataType) -> pa.DataType:
    """The type in which a column stands in a row: lists are binary."""
    return _BINARY if pa.types.is_list(type_) else type_


class ListCodec:
    """Lists of one type, to bytes and back. Shared by threads.

    Attributes:
        type: the Arrow type, a list.
    """

    def __init__(self, type_: pa.ListType) -> None:
        """Makes the codec."""
        self.type = type_
        element = type_.value_type
        self._inner = ListCodec(element) if pa.types.is_list(element) else None
        self._row = RowLayout([flat(element)])

    def encode(self, lists: pa.ListArray) -> pa.BinaryArray:
        """Each list as bytes.

        Raises:
            CoreError: they are more than 2 GiB.
        """
        n = len(lists)
        if n == 0:
            return pa.nulls(0, _BINARY)
        bounds = lists.offsets
        first, last = bounds[0].as_py(), bounds[n].as_py()
        elements = lists.values.slice(first, last - first)
        if self._inner is not None:
            elements = self._inner.encode(elements)
        rows = self._row.encode([elements])
        if rows.data.size > (1 << 31) - 1:
            raise CoreError("encoding lists: they are more than 2 GiB. Take fewer at a time.")
        ends = pa.Array.from_buffers(pa.int32(), rows.n + 1, [None, rows.offsets])
        offsets = ends.take(pc.subtract(bounds, pa.scalar(first, pa.int32())))
        present = lists.is_valid().buffers()[1] if lists.null_count else None
        buffers = [present, offsets.buffers()[1], rows.data]
        return pa.Array.from_buffers(_BINARY, n, buffers, lists.null_count)

    def decode(self, values: pa.BinaryArray) -> pa.ListArray:
        """Decode the lists that `encode` made.

        Raises:
            DamagedValueError: one of them is no list of this type.
        """
        n = len(values)
        given = ffi.new("row_column_t *")
        held = fill_column(given[0], values, lib.ROW_VARLEN)
        offsets, bad = allocate(4 * (n + 1)), ffi.new("uint32_t *")
        ends = pointer(offsets, "uint32_t *")
        status = lib.value_list_offsets(self._row.c, given, ends, bad)
        if status == lib.STATUS_CORRUPT:
            raise DamagedValueError(f"it has no {self.type} where one should be", bad[0])
        check(status, f"decoding {n} lists")
        count = ends[n]
        slices = allocate(SLICE_BYTES * count)
        lib.value_list_rows(self._row.c, given, pointer(slices, _SLICES))
        (elements,) = self._row.decode_checked(slices, count, [0])
        if self._inner is not None:
            elements = self._elements(elements, offsets)
        present = values.is_valid().buffers()[1] if values.null_count else None
        del held
        return pa.Array.from_buffers(
            self.type, n, [present, offsets], values.null_count, children=[elements]
        )

    def _elements(self, elements: pa.BinaryArray, offsets: pa.Buffer) -> pa.ListArray:
        assert self._inner is not None
        try:
            return self._inner.decode(elements)
        except DamagedValueError as error:
            ends = memoryview(offsets).cast("I")
            index = next(i for i in range(len(ends) - 1) if ends[i + 1] > error.index)
            raise DamagedValueError(str(error), index) from None

    def encode_one(self, values: Any) -> bytes | None:
        """One list.

        Raises:
            TypeError, ValueError: an element does not fit.
        """
        if values is None:
            return None
        if isinstance(values, str | bytes):
            raise TypeError(f"{values!r} for a column of {self.type}")
        row, inner = self._row.encode_one, self._inner
        if inner is not None:
            values = map(inner.encode_one, values)
        return b"".join([row((value,)) for value in values])

    def decode_one(self, value: bytes | None) -> list[Any] | None:
        """Decode the list that `encode_one` made.

        Raises:
            DamagedValueError: it is no list of this type.
        """
        if value is None:
            return None
        found: list[Any] = self.decode(pa.array([value], _BINARY))[0].as_py()
        return found


_HEAD = struct.Struct("<BH")
VALUE_HEAD = _HEAD.size
"""Bytes of a value before its row."""


class ValueLayout:
    """The layout of one schema's columns in a value. Shared by threads.

    Attributes:
        types: the Arrow types of the columns.
        schema: number of the schema.
        head: the bytes before the row of each value.
    """

    def __init__(self, types: Sequence[pa.DataType], schema: int) -> None:
        """Makes the layout of at least one column."""
        self.types = list(types)
        self.schema = schema
        self._rows = RowLayout([flat(type_) for type_ in self.types])
        self._lists = {
            i: ListCodec(type_) for i, type_ in enumerate(types) if pa.types.is_list(type_)
        }
        self.head = _HEAD.pack(lib.VALUE_VERSION, schema)

    def encode(self, arrays: Sequence[pa.Array], rows: Rows | None = None) -> pa.BinaryArray:
        """The values of as many rows as the columns have, or of some.

        Args:
            arrays: one a column, of its type, as long as each other.
            rows: the rows to take, in this order; None for all.

        Raises:
            CoreError: the values reach 2 GiB.
            IndexError: a row is not in the arrays.
            TypeError: an array is of another type.
            ValueError: the arrays are too few or many, differ in length, or are broken.
        """
        columns, n, held = self._rows.columns(self._flat(arrays))
        if rows is not None:
            n = rows.n
        offsets = allocate(4 * (n + 1))
        picked = (rows_pointer(rows), n)
        ends = pointer(offsets, "uint32_t *")
        layout = self._rows.c
        check(lib.value_encode_size(layout, columns, *picked, ends), f"encoding {n} values")
        data = allocate(ends[n] + lib.VALUE_HEAD)
        lib.value_encode(layout, columns, *picked, self.schema, ends, pointer(data), data.size)
        del held
        return pa.Array.from_buffers(_BINARY, n, [None, offsets, data], 0)

    def decode(self, values: pa.BinaryArray, columns: Sequence[int]) -> list[pa.Array]:
        """Some columns of values; of a null value all are null.

        Strings are not looked into: `validate(full=True)` says whether they are UTF-8.

        Args:
            values: binary.
            columns: their numbers.

        Raises:
            DamagedValueError: a value is not of this schema, or damaged.
            IndexError: a column is not there.
        """
        n = len(values)
        given = ffi.new("row_column_t *")
        held = fill_column(given[0], values, lib.ROW_VARLEN)
        slices, bad = allocate(SLICE_BYTES * n), ffi.new("uint32_t *")
        at = pointer(slices, _SLICES)
        status = lib.value_rows(self._rows.c, given, self.schema, at, bad)
        if status == lib.STATUS_CORRUPT:
            raise DamagedValueError(self._damage(values[bad[0]].as_py()), bad[0])
        check(status, f"decoding {n} values")
        found = self._rows.decode_checked(slices, n, columns)
        del held
        return [
            self._lists[column].decode(array) if column in self._lists else array
            for column, array in zip(columns, found, strict=True)
        ]

    def encode_one(self, values: Sequence[Any]) -> bytes:
        """One value; see `RowLayout.encode_one`."""
        if self._lists:
            values = list(values)
            for i, codec in self._lists.items():
                values[i] = codec.encode_one(values[i])
        return self.head + self._rows.encode_one(values)

    def decode_one(self, value: bytes) -> tuple[Any, ...]:
        """The columns of one value.

        Raises:
            DamagedValueError: it is not of this schema, or damaged.
        """
        if value[: len(self.head)] != self.head:
            raise DamagedValueError(self._damage(value))
        try:
            found = self._rows.decode_one(value[len(self.head) :])
        except CoreError as error:
            raise DamagedValueError(str(error).partition(". Check")[0]) from None
        if not self._lists:
            return found
        return tuple(
            self._lists[i].decode_one(each) if i in self._lists else each
            for i, each in enumerate(found)
        )

    def _flat(self, arrays: Sequence[pa.Array]) -> list[pa.Array]:
        """Lists as the binary columns that they stand as."""
        return [
            self._lists[i].encode(array)
            if i in self._lists and array.type == self.types[i]
            else array
            for i, array in enumerate(arrays)
        ]

    def _damage(self, value: bytes) -> str:
        """Describe the damage of a value that the core refused."""
        if len(value) < len(self.head):
            return f"it has {len(value)} bytes, too few"
        version, schema = _HEAD.unpack_from(value)
        if version != lib.VALUE_VERSION:
            return f"it begins with {version}, not with the version {lib.VALUE_VERSION}"
        if schema != self.schema:
            return f"it is of schema {schema}, not {self.schema}"
        return "its lengths do not add up"
