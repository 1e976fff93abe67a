"""Values that come as text, JSON, UUIDs, durations, and rows that go out as lines of JSON.

A column of JSON holds texts as they were given, each checked by the core. UUIDs are 16 bytes;
data that has them as text (pandas, CSV, Spark) is turned to bytes a column at a time. A duration
is written as in ISO 8601, by days and less: P1DT2H3M4.5S. Rows of columns become lines of JSON,
or a text each, in one pass of the core.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from datetime import timedelta
from decimal import Decimal, InvalidOperation
from enum import IntEnum
from itertools import accumulate
from typing import Any, Final

import pyarrow as pa

from txnkv.core import compute as pc
from txnkv.core.native import allocate, check, ffi, lib, pointer
from txnkv.core.row_layout import fill_column
from txnkv.core.value_codecs import DIGITS, has_few_digits
from txnkv.errors import SchemaError

UUID: Final = pa.uuid()
JSON: Final = pa.json_()

# -- JSON ------------------------------------------------------------------------------


def require_json(texts: pa.Array, name: str) -> None:
    """Refuse a column in which a text is no JSON.

    Args:
        texts: of JSON or strings; nulls are passed over.
        name: of the column.

    Raises:
        SchemaError: it names the text, and where it goes wrong.
    """
    column, row, at = ffi.new("row_column_t *"), ffi.new("uint32_t *"), ffi.new("uint64_t *")
    held = fill_column(column[0], texts, lib.ROW_VARLEN)
    check(lib.json_column(column, row, at), f"checking {len(texts)} texts of JSON")
    del held
    if row[0] < len(texts):
        text = texts[row[0]].as_py()
        raise SchemaError(f"column {name!r} is json: {json_fault(text, at[0])}")


def json_fault(text: str, at: int) -> str:
    """Say, for people, where a text is no JSON.

    Args:
        text: which is none.
        at: the byte that cannot stand there.
    """
    before = text.encode()[:at].decode(errors="ignore")
    rest = text[len(before) : len(before) + 12]
    where = f"at character {len(before)}, {rest!r}" if rest else "it ends too early"
    return f"{text[:60]!r} is no JSON: {where}. Give the text of one value, as json.dumps makes it"


class JsonLineError(ValueError):
    """A text that is no object of the members that there may be.

    Attributes:
        row: which one it is.
    """

    def __init__(self, why: str, row: int) -> None:
        super().__init__(why)
        self.row = row


def json_members(texts: pa.StringArray, names: Sequence[str], wanted: str) -> pa.StringArray:
    """One member of each of some objects, as it is written there; null where there is none.

    Args:
        texts: of objects.
        names: of the members that they may have.
        wanted: one of them.

    Raises:
        JsonLineError: a text is no object, or has another member, the wanted one twice, or a name
            with an escape.
    """
    n = len(texts)
    column, row, at = ffi.new("row_column_t *"), ffi.new("uint32_t *"), ffi.new("uint64_t *")
    held = fill_column(column[0], texts, lib.ROW_VARLEN)
    encoded = [name.encode() for name in names]
    ends = ffi.new("uint32_t[]", list(accumulate(map(len, encoded))))
    joined = ffi.from_buffer("uint8_t[]", b"".join(encoded))
    known = ffi.new("json_names_t *", (joined, ends, len(names)))
    number = names.index(wanted)
    validity, offsets = allocate((n + 7) // 8), allocate(4 * (n + 1))
    found = pointer(offsets, "uint32_t *")
    status = lib.json_member_offsets(column, known, number, pointer(validity), found, row, at)
    if status == lib.STATUS_CORRUPT:
        raise _no_object(texts[row[0]].as_py(), at[0], names, row[0])
    check(status, f"reading {n} objects")
    values = allocate(found[n])
    lib.json_member_bytes(column, known, number, found, pointer(values), values.size)
    del held, joined
    return pa.Array.from_buffers(pa.string(), n, [validity, offsets, values])


def _no_object(text: str, at: int, names: Sequence[str], row: int) -> JsonLineError:
    raw = text.encode()
    if at and raw[at - 1 : at] == b'"':
        name = raw[at:].partition(b'"')[0].decode()
        if name in names:
            return JsonLineError(f"it has column {name!r} twice", row)
        escaped = " (its name is written with an escape)" if "\\" in name else ""
        return JsonLineError(
            f"there is no column {name!r}{escaped}; the columns are {', '.join(names)} "
            "(--schema sets them)",
            row,
        )
    return JsonLineError(json_fault(text, at), row)


_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def json_of(value: Any) -> Any:
    """The text of a Python value for a column of JSON; a text is one already.

    Raises:
        TypeError, ValueError: JSON has no such value.
    """
    if value is None or isinstance(value, str):
        return value
    return _ENCODER.encode(value)


# -- UUIDs -----------------------------------------------------------------------------

_UUID: Final = r"^[0-9a-fA-F]{8}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{12}$"
_NIL: Final = "0" * 32


def uuids_of(texts: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    """UUIDs of their texts, with hyphens or without.

    Raises:
        SchemaError: a text is none.
    """
    return pa.chunked_array([_uuids(chunk, name) for chunk in texts.chunks], UUID)


def _uuids(texts: pa.Array, name: str) -> pa.Array:
    texts = pc.cast(texts, pa.string())
    wrong = pc.index(pc.match_substring_regex(texts, _UUID), False).as_py()
    if wrong >= 0:
        raise SchemaError(f"column {name!r} is uuid: {texts[wrong].as_py()!r} is none")
    digits = pc.replace_substring(pc.fill_null(texts, _NIL), "-", "")
    ends = memoryview(digits.buffers()[1]).cast("i")
    first, last = ends[digits.offset], ends[digits.offset + len(digits)]
    text = bytes(digits.buffers()[2][first:last]) if last > first else b""
    valid = pc.is_valid(texts).buffers()[1] if texts.null_count else None
    raw = pa.py_buffer(bytes.fromhex(text.decode()))
    return pa.Array.from_buffers(UUID, len(texts), [valid, raw], texts.null_count)


def uuid_of(value: Any) -> Any:
    """A UUID, given as one, as its text or its 16 bytes.

    Raises:
        TypeError: it is something else.
        ValueError: it is no UUID.
    """
    if value is None or isinstance(value, uuid.UUID):
        return value
    if isinstance(value, str):
        return uuid.UUID(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return uuid.UUID(bytes=bytes(value))
    raise TypeError(f"{value!r} is a {type(value).__name__}: give a uuid.UUID, its text or bytes")


MANY_DIGITS: Final = r"[eE][+-]?[0-9]{2}|\.[0-9]{38}"
"""In the text of a decimal of which Arrow may not be able to count the digits."""


def decimal_of(value: Any) -> Any:
    """A decimal that is given as its text; what else is given as it is.

    Raises:
        ValueError: a text is no number.
    """
    try:
        made = Decimal(value) if isinstance(value, str) else value
    except InvalidOperation:
        raise ValueError(f"{value!r} is no number") from None
    if (wrong := no_decimal(made)) is not None:
        raise ValueError(wrong)
    return made


def no_decimal(value: Any) -> str | None:
    """Say what is wrong with a value for a column of decimals; None when nothing is known to be."""
    if isinstance(value, float):
        return (
            f"{value!r} is a float, whose digits are not those that one sees: give a Decimal, or "
            f"the text {str(value)!r}"
        )
    if isinstance(value, Decimal) and value.is_finite() and not has_few_digits(value):
        return f"{value!r} has more than {DIGITS} digits, or zeros, on a side of its point"
    return f"{value!r} is a bool" if isinstance(value, bool) else None


def require_decimals(texts: pa.ChunkedArray) -> None:
    """Refuse texts of decimals of which `no_decimal` says that Arrow cannot count the digits."""
    for text in texts.filter(pc.match_substring_regex(texts, MANY_DIGITS)).to_pylist():
        decimal_of(text.strip())


def uuid_texts(uuids: pa.Array) -> pa.StringArray:
    """The texts of UUIDs, with hyphens."""
    n = len(uuids)
    raw = uuids.buffers()[1]
    digits = raw[16 * uuids.offset : 16 * (uuids.offset + n)].to_pybytes().hex() if n else ""
    valid = pc.is_valid(uuids).buffers()[1] if uuids.null_count else None
    buffers = [valid, pa.py_buffer(digits.encode())]
    fixed = pa.Array.from_buffers(pa.binary(32), n, buffers, uuids.null_count)
    text = pc.cast(pc.cast(fixed, pa.binary()), pa.string())
    cuts = [(0, 8), (8, 12), (12, 16), (16, 20), (20, 32)]
    parts = [pc.utf8_slice_codeunits(text, start, stop) for start, stop in cuts]
    return pc.binary_join_element_wise(*parts, "-")


# -- durations -------------------------------------------------------------------------

_DURATION: Final = re.compile(
    r"(-?)P(?=.)(?:(\d+)D)?(?:T(?=.)(?:(\d+)H)?(?:(\d+)M)?(?:(\d+)(?:\.(\d{1,6}))?S)?)?"
)


def duration_text(value: timedelta) -> str:
    """A duration as ISO 8601 writes it: P1DT2H, -PT0.5S, PT0S."""
    sign, value = ("-", -value) if value < timedelta(0) else ("", value)
    minutes, seconds = divmod(value.seconds, 60)
    hours, minutes = divmod(minutes, 60)
    rest = f".{value.microseconds:06}".rstrip("0") if value.microseconds else ""
    written = f"{hours}H" if hours else ""
    written += f"{minutes}M" if minutes else ""
    written += f"{seconds}{rest}S" if seconds or rest else ""
    days = f"{value.days}D" if value.days else ""
    return f"{sign}P{days}{'T' + written if written else ''}" if days or written else "PT0S"


def duration_of(text: str) -> timedelta:
    """The duration of a text as `duration_text` makes it.

    Raises:
        ValueError: it is none.
    """
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no duration, as P1DT2H3M4.5S, PT90S or -PT0.5S")
    sign, days, hours, minutes, seconds, rest = found.groups()
    try:
        value = timedelta(
            days=int(days or 0),
            hours=int(hours or 0),
            minutes=int(minutes or 0),
            seconds=int(seconds or 0),
            microseconds=int((rest or "").ljust(6, "0")),
        )
    except OverflowError:
        raise ValueError(f"{text!r} is longer than durations are") from None
    return -value if sign else value


# -- rows as text ----------------------------------------------------------------------


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
