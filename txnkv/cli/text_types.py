"""Types of the values in text, such that no digit or zone of them is lost; and CSV's quotes."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from json import dumps
from math import isinf
from typing import Any, Final

import pyarrow as pa

from txnkv.cli.message_lines import parse_json, taker
from txnkv.core import (
    JSON,
    MANY_DIGITS,
    UUID,
    cast,
    column_type,
    element_type,
    type_name,
)
from txnkv.core import compute as pc
from txnkv.errors import SchemaError

_WHOLE: Final = r"^\s*[+-]?\d+\s*$"
_PLAIN: Final = r"^\s*-?(0|[1-9]\d*)\s*$"
_PLAIN_LARGE: Final = r"^\s*(0|-?[1-9]\d*)\s*$"  # no uint64 is -0


def is_whole(column: pa.ChunkedArray) -> bool:
    """Return True for whole numbers, also where they are doubles."""
    if not pa.types.is_float64(column.type):
        return bool(pa.types.is_integer(column.type))
    return bool(pc.all(pc.equal(pc.floor(column), column)).as_py())


def with_codes(found: pa.Table, written: pa.Table) -> pa.Table:
    """Have whole numbers be text where some have a plus sign or zeros before them: +4179, 007.

    Args:
        found: the columns, with the types inferred.
        written: those of them that are whole, as they are written.
    """
    for name in written.column_names:
        at, texts = found.column_names.index(name), written.column(name)
        large = pa.types.is_floating(found.column(at).type)  # or reals
        if large and not _all_match(texts, _WHOLE):
            continue
        if not _all_match(texts, _PLAIN_LARGE if large else _PLAIN):
            found = found.set_column(at, name, texts)
    return found


def numbers(texts: pa.StringArray, kind: pa.DataType) -> pa.Array:
    """Whole numbers and decimals as they are written: Arrow's reader of CSV passes over zeros
    before them and over 0x, and takes 1E-77 for a decimal 0.

    Raises:
        NumberError: a text is none, or has such zeros or 0x, or more digits than the type.
    """
    with suppress(ValueError, SchemaError):
        found, plain = _numbers(texts, kind)
        if plain:
            return found
    row, end = 0, len(texts)
    while end - row > 1:  # the first one that is wrong
        middle = (row + end) // 2
        with suppress(ValueError, SchemaError):
            if _numbers(texts.slice(row, middle - row), kind)[1]:
                row = middle
                continue
        end = middle
    text = texts[row].as_py()
    try:
        _numbers(texts.slice(row, 1), kind)
    except (ValueError, SchemaError) as error:
        cause = str(error.__context__).replace("decimal256", "decimal")
        why = f": {cause}" if pa.types.is_decimal(kind) else ""
        raise NumberError(f"{text!r} is no {kind}{why}", row) from None
    what = "is hexadecimal, which" if "x" in text.lower() else "has zeros that"
    raise NumberError(f"{text!r} {what} {kind} does not keep", row)


def _numbers(texts: pa.StringArray, kind: pa.DataType) -> tuple[pa.Array, bool]:
    """The numbers, and whether no whole one has a zero before it."""
    texts = pc.ascii_trim(texts, characters=" \t")
    if pa.types.is_decimal(kind):
        return cast(pa.chunked_array([texts]), kind, "").combine_chunks(), True
    found, size = pc.cast(texts, kind), pc.binary_length(texts)
    for zero in ("0", "-0"):
        if pc.any(pc.and_(pc.starts_with(texts, zero), pc.greater(size, len(zero)))).as_py():
            return found, False
    return found, True


class NumberError(ValueError):
    """A text that is no number of its column.

    Attributes:
        row: which one it is.
    """

    def __init__(self, why: str, row: int) -> None:
        super().__init__(why)
        self.row = row


def _any_matches(texts: Any, pattern: str) -> bool:
    return bool(pc.any(pc.match_substring_regex(texts, pattern)).as_py())


def _all_match(texts: pa.ChunkedArray, pattern: str) -> bool:
    return bool(pc.all(pc.match_substring_regex(texts, pattern)).as_py())


def with_whole_numbers(
    found: pa.Table, texts: Callable[[Any], Any], read: Callable[[Any], Any]
) -> pa.Schema:
    """The types inferred, with uint64 for whole numbers beyond int64: Arrow makes doubles of them.

    Args:
        found: the values.
        texts, read: read a column again, as its numbers are written and in another type.

    Raises:
        ValueError: neither int64 nor uint64 holds all of a column, or no float64 a number of it.
    """
    schema = found.schema
    for at, field in enumerate(schema):
        largest = _largest(found.column(at))
        if largest < 1 << 53:
            continue
        written = texts(field.with_type(pa.string()))
        if isinf(largest) and _infinities(found.column(at)) > _count(written, "(?i)inf"):
            raise ValueError(
                f"column {field.name!r} has numbers larger than any float64: --schema says "
                "what they are, as string, or as json where they stand in JSON"
            )
        if _any_matches(written, "(?i)[.e]|nan|inf"):
            continue  # reals, and no digits lost that a double has
        schema = schema.set(at, field.with_type(replaced(field.type, pa.uint64())))
        try:
            read(schema.field(at))
        except ValueError:
            raise ValueError(
                f"column {field.name!r} has whole numbers that neither int64 nor uint64 holds all: "
                "--schema says what they are, as decimal128(38, 0), or float64, which rounds them"
            ) from None
    return schema


def _flat(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The values of a column, or of its lists."""
    while pa.types.is_list(column.type):
        column = pc.list_flatten(column)
    return column


def _infinities(column: pa.ChunkedArray) -> int:
    return pc.sum(pc.is_inf(_flat(column))).as_py() or 0


def _count(texts: Any, pattern: str) -> int:
    return pc.sum(pc.count_substring_regex(texts, pattern)).as_py() or 0


def _largest(column: pa.ChunkedArray) -> float:
    """The largest of doubles, or of lists of them, without signs; 0 for other types."""
    column = _flat(column)
    if not pa.types.is_float64(column.type):
        return 0
    return float(pc.max(pc.abs(column.filter(pc.invert(pc.is_nan(column))))).as_py() or 0)


def replaced(kind: pa.DataType, element: pa.DataType) -> pa.DataType:
    """The type with another one for what its lists hold."""
    inner = getattr(kind, "value_type", None)
    return element if inner is None else pa.list_(replaced(inner, element))


def storable(schema: pa.Schema, *, inferred: bool = False) -> pa.Schema:
    """The schema with types that columns can have: nothing but nulls becomes text.

    Args:
        schema: of a file.
        inferred: from its first rows; times of later ones may have more digits.

    Raises:
        SchemaError: a column has a type that no column can have.
    """
    return pa.schema([_storable_field(field, inferred) for field in schema])


def _storable_field(field: Any, inferred: bool) -> Any:
    if pa.types.is_null(element_type(field.type)):
        return pa.field(field.name, replaced(field.type, pa.string()))
    if inferred and pa.types.is_time(field.type):
        return pa.field(field.name, pa.time64("us"), field.nullable)
    try:
        return pa.field(field.name, column_type(field.type), field.nullable)
    except SchemaError as error:
        raise SchemaError(f"column {field.name!r}: {error}") from None


def csv_type(kind: pa.DataType) -> pa.DataType:
    """The type to read a column as: JSON, UUIDs and what `taker` reads are text there."""
    text = pa.types.is_duration(kind) or is_coarse(kind) or kind in (JSON, UUID)
    return pa.string() if text else kind


def is_coarse(kind: pa.DataType) -> bool:
    """Return True for decimals written as 1.5E+3, of which Arrow's readers count the digits."""
    return bool(pa.types.is_decimal(kind) and kind.scale < 0)


def raw_columns(schema: pa.Schema, block: bytes) -> list[str]:
    """The columns that Arrow's reader of JSON does not read as they are written in a block."""
    return [
        field.name
        for field in schema
        if is_raw(field.type)
        or (pa.types.is_decimal(element_type(field.type)) and _exponents(field.name).search(block))
    ]


@cache
def _exponents(name: str) -> re.Pattern[bytes]:
    """Find decimals of a column, alone or in a list, of which Arrow may not count the digits."""
    names = b"|".join(re.escape(dumps(name, ensure_ascii=way).encode()) for way in (True, False))
    before = rb'(?:%b)\s*:\s*(?:"\s*|\[[^\]]*)?[-+0-9.]*' % names
    return re.compile(before + b"(?:%b)" % MANY_DIGITS.encode())


def wire(field: Any) -> Any:
    """Return the field to read a column as: JSON has no dates, times are text, bytes base64."""
    kind = field.type
    if pa.types.is_date(kind):
        kind = pa.timestamp("s")
    elif pa.types.is_binary(kind) or pa.types.is_time(kind) or csv_type(kind) != kind:
        kind = pa.string()
    elif pa.types.is_timestamp(element_type(kind)):
        kind = replaced(kind, pa.string())
    elif pa.types.is_decimal(element_type(kind)):  # of a narrower one it overflows in silence
        kind = replaced(kind, pa.decimal256(76, element_type(kind).scale))
    return pa.field(field.name, kind)


def is_raw(kind: pa.DataType) -> bool:
    """Return True for what is read as it is written, and for what Arrow's reader does not read."""
    element, is_a = element_type(kind), pa.types
    if kind == JSON or is_coarse(element) or is_a.is_struct(element) or is_a.is_map(element):
        return True
    texts = (is_a.is_binary, is_a.is_date, is_a.is_time, is_a.is_duration)
    return element != kind and any(is_text(element) for is_text in texts)


def unwired(column: pa.Array, field: Any) -> pa.Array:
    kind, is_a = field.type, pa.types
    if kind == JSON:
        return column
    take = taker(kind)
    if is_raw(kind) or (
        pa.types.is_decimal(element_type(kind)) and pa.types.is_string(column.type)
    ):
        return parsed(column, field, lambda text: take(parse_json(text)))
    if is_a.is_time(kind) or is_a.is_duration(kind) or is_a.is_binary(kind):
        return parsed(column, field, take)
    of = element_type(kind)
    if is_a.is_date(kind) or is_a.is_timestamp(of) or is_a.is_decimal(of):
        try:
            return pc.cast(column, kind)
        except pa.ArrowInvalid as error:
            raise ValueError(
                f"column {field.name!r} is {kind}: {error} (--schema sets the types)"
            ) from None
    return column


def parsed(column: pa.Array, field: Any, parse: Callable[[str], Any]) -> pa.Array:
    """Values of their texts, one by one."""
    try:
        values = [None if text is None else parse(text) for text in column.to_pylist()]
        return pa.array(values, field.type)
    except (ValueError, TypeError, LookupError, ArithmeticError, pa.ArrowException) as error:
        raise ValueError(
            f"column {field.name!r} is {type_name(field.type)}: {error} (--schema sets the types)"
        ) from None


def kind_of_times(texts: pa.ChunkedArray, inferred: pa.DataType) -> pa.DataType:
    """Times without a zone, or all of them with one; text where they are mixed."""
    for time in (pa.timestamp("us"), pa.timestamp("us", "UTC")):
        kind = replaced(inferred, time)
        try:
            pc.cast(texts, kind)
        except pa.ArrowInvalid:
            continue
        return kind
    return texts.type


class Quotes:
    """Tells of the bytes of CSV, as they come, where a quote is opened that is not closed.

    Args:
        delimiter: of the fields.
    """

    _QUOTED: Final = rb'[^"]*(?:""[^"]*)*'
    _CLOSES: Final = re.compile(_QUOTED + rb'"(?!")')

    def __init__(self, delimiter: str) -> None:
        # A quote opens at the start of a field alone; elsewhere it is a character like others. Not
        # by possessive groups: Python before 3.11.5 matches these wrongly.
        start = b'(?<=[\\r\\n%b])"' % re.escape(delimiter.encode())
        asked = start, self._CLOSES.pattern, self._QUOTED
        self._fields = re.compile(b"%b(?:%b|(%b)\\Z)" % asked)
        self._before, self._line, self._begun, self.ended = b"\n", 1, False, False
        self.opened: int | None = None
        """The line of the quote that is open."""
        self.at = self._read = 0
        """The bytes that were read before that quote, and at all."""

    def read(self, data: bytes) -> None:
        """Take what comes next; nothing at the end."""
        self.ended = not data
        if not self._begun:
            self._begun = True
            if data.startswith(b"\xef\xbb\xbf"):
                self._read, data = 3, data[3:]
        text, before = self._before + data, self._read - len(self._before)
        self._read += len(data)
        # Quotes at the end may be halves of doubled ones.
        whole = text.rstrip(b'"') if data else text
        at = 1
        if self.opened is not None and (found := self._CLOSES.match(whole, at)):
            self.opened, at = None, found.end()
        if self.opened is None and b'"' in whole:
            last = deque(self._fields.finditer(whole, at), maxlen=1)
            if last and last[0][1] is not None:
                self.at = before + last[0].start()
                self.opened = self._line + whole.count(b"\n", 1, last[0].start())
        self._line += whole.count(b"\n", 1)
        self._before = whole[-1:] + text[len(whole) :]

    def require_closed(self, rest: Iterable[bytes] = ()) -> None:
        """Refuse that a quote is open at the end.

        Raises:
            ValueError: it names the line.
        """
        for data in rest:
            self.read(data)
        self.read(b"")
        if self.opened is not None:
            raise ValueError(f"line {self.opened:,}: a quote is opened here and never closed")


def last_line_end(head: bytes, delimiter: str) -> int:
    """Behind the last newline that is not inside quotes."""
    end = len(head)
    while (line := head.rfind(b"\n", 0, end)) >= 0:
        quotes = Quotes(delimiter)
        quotes.read(head[:line])
        quotes.read(b"")
        if quotes.opened is None:
            return line + 1
        end = quotes.at
    return len(head)
