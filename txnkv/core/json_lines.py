"""Rows of columns as text, in one pass of the core: lines of JSON, and texts of single columns."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import pyarrow as pa

from txnkv.core.native import allocate, check, ffi, lib, pointer
from txnkv.core.row_layout import fill_column


class JsonKind(IntEnum):
    """The form of a column's values. Nulls, NaN and infinities are null."""

    BOOL = lib.JSON_LINE_BOOL
    SIGNED = lib.JSON_LINE_SIGNED
    UNSIGNED = lib.JSON_LINE_UNSIGNED
    FLOAT = lib.JSON_LINE_FLOAT
    DATE = lib.JSON_LINE_DATE
    TIME = lib.JSON_LINE_TIME
    INSTANT = lib.JSON_LINE_INSTANT
    STRING = lib.JSON_LINE_STRING
    BYTES = lib.JSON_LINE_BYTES
    """Base64."""
    EITHER = lib.JSON_LINE_EITHER
    """A string where the bytes are UTF-8, else {"base64": "..."}."""
    RAW = lib.JSON_LINE_RAW
    """A string that is JSON already; ends of lines in it become a space."""


JsonField = tuple[str, pa.Array, JsonKind]
"""The text before each value, the values, their form."""


def json_kind(type_: pa.DataType) -> JsonKind | None:
    """The form of values of a type; None: there is none for them."""
    is_a = pa.types
    if is_a.is_timestamp(type_) and type_.unit == "us" and type_.tz in (None, "UTC"):
        return JsonKind.INSTANT if type_.tz else JsonKind.TIME
    for holds, kind in (
        (is_a.is_boolean, JsonKind.BOOL),
        (is_a.is_signed_integer, JsonKind.SIGNED),
        (is_a.is_unsigned_integer, JsonKind.UNSIGNED),
        (lambda each: each in (pa.float32(), pa.float64()), JsonKind.FLOAT),
        (is_a.is_date32, JsonKind.DATE),
        (is_a.is_string, JsonKind.STRING),
        (is_a.is_binary, JsonKind.BYTES),
    ):
        if holds(type_):
            return kind
    return None


def json_rows(fields: Sequence[JsonField], n: int, behind: str) -> pa.Buffer:
    """The texts of n rows one behind the other, each ended by `behind`.

    Raises:
        ValueError: a column is broken.
    """
    text, size = _written(fields, n, behind, None)
    return text.slice(0, size)


def json_texts(fields: Sequence[JsonField], n: int, behind: str = "") -> pa.StringArray:
    """The texts of n rows, one each.

    Raises:
        CoreError: they take more than 2 GiB.
        ValueError: a column is broken.
    """
    ends = allocate(4 * (n + 1))
    text, _ = _written(fields, n, behind, ends)
    return pa.Array.from_buffers(pa.string(), n, [None, ends, text], 0)


def _written(
    fields: Sequence[JsonField], n: int, behind: str, ends: pa.Buffer | None
) -> tuple[pa.Buffer, int]:
    c, last = ffi.new("json_field_t[]", len(fields)), behind.encode()
    held: list[Any] = []
    for field, (before, values, kind) in zip(c, fields, strict=True):
        varlen = kind >= JsonKind.STRING
        held.append(fill_column(field.values, values, lib.ROW_VARLEN if varlen else lib.ROW_FIXED))
        held.append(ffi.from_buffer("uint8_t[]", before.encode()))
        field.before, field.before_len, field.kind = held[-1], len(held[-1]), kind
        field.width = 0 if varlen or kind == JsonKind.BOOL else values.type.bit_width // 8
    bound = ffi.new("uint64_t *")
    what = f"writing {n} rows of JSON"
    check(lib.json_lines_bound(c, len(fields), n, len(last), ends is not None, bound), what)
    text = allocate(bound[0])
    into = ffi.NULL if ends is None else pointer(ends, "uint32_t *")
    size = lib.json_lines_write(c, len(fields), n, last, len(last), into, pointer(text), text.size)
    del held
    return text, size
