"""Rows as byte strings: the value columns of one row, as small writes and MemRowSets hold them.

The bytes are documented in docs/format-blocks.md, "Row". One row at a time goes through Python's
`struct`, many through the core; both give the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from txnkv.core.native import allocate, check, ffi, lib, pointer
from txnkv.core.row_one import from_messages, is_opaque, row_functions, row_shape, to_messages
from txnkv.core.rows import Rows, rows_pointer

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
        encode_one: `(values) -> bytes`, the row of one Python value a column: what `.as_py()`
            gives, or for dates and timestamps the number, for bool 0 and 1; None is a null.
            Raises TypeError or ValueError for a value that does not fit its column.
        decode_one: `(row) -> tuple`, the values of a row, as `.as_py()` would give them. Raises
            CoreError when the bytes are no row of this layout.
    """

    def __init__(self, types: Sequence[pa.DataType]) -> None:
        """Makes the layout; there may be no columns."""
        self.types = list(types)
        shapes = [row_shape(type_) for type_ in self.types]
        self._kinds = [kind for kind, _ in shapes]
        self._slots = ffi.new("row_slot_t[]", [(kind, width, 0) for kind, width in shapes])
        self.c = ffi.new("row_layout_t *")
        lib.row_layout_init(self._slots, len(shapes), self.c)
        self.encode_one, self.decode_one = row_functions(self.types)

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
