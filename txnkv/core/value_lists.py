"""Lists in typed values: a list is its elements one behind the other, as rows of one column.

So a column of lists becomes a binary column, and comes back, in a few calls whatever the lists
hold; a list of lists is such a column of such columns.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from txnkv.core import compute as pc
from txnkv.core.native import CoreError, allocate, check, ffi, lib, pointer
from txnkv.core.row_layout import SLICE_BYTES, RowLayout, fill_column

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
