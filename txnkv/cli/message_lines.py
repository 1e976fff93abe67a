"""Messages as lines: plain ones, with keys, or JSON.

    plain      the value, to the end of the line
    with keys  key, a separator, value
    JSON       {"key": "k", "value": "v", "headers": [["name", "text"]], "timestamp": "2026-..."}

In JSON, bytes that are no UTF-8 are {"base64": "..."}, and null is none. Where the topic has a
value schema, a value is an object of its columns in all three: {"id": 7, "note": null}; and what
JSON has not is text: dates, times, UUIDs and decimals as they are printed, binary as base64.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime, time
from decimal import Decimal, InvalidOperation
from functools import reduce
from typing import Any, BinaryIO, Final, NamedTuple
from uuid import UUID

import pyarrow as pa

import txnkv
from txnkv.cli.console import (
    json_fields,
    json_form,
    json_text,
    object_text,
    objects,
    row_text,
)
from txnkv.core import (
    JSON,
    JsonKind,
    decimal_of,
    duration_of,
    encode_headers,
    json_members,
    json_texts,
    split_headers,
    type_name,
)
from txnkv.core import UUID as UUID_TYPE
from txnkv.core import compute as pc
from txnkv.errors import SchemaError
from txnkv.topics import TIME, Encoded, Message
from txnkv.transaction import encoder_of

_PIECE: Final = 1 << 20
_FIELDS: Final = ("value", "key", "headers", "timestamp", "partition")
_IGNORED: Final = ("offset", "txn_id")
_UTF8: Final = "utf-8-sig"  # with the mark that some begin a file with
_BESIDE: Final = {*_FIELDS, *_IGNORED} - {"value"}


def read_lines(stream: BinaryIO) -> Iterator[list[bytes]]:
    """The lines of a stream, as many together as there are at the moment, without their ends."""
    read = getattr(stream, "read1", stream.read)
    rest = b""
    while piece := read(_PIECE):
        *lines, rest = (rest + piece).split(b"\n")
        if lines:
            yield lines
    if rest:
        yield [rest]


# -- in --------------------------------------------------------------------------------


def plain(lines: Sequence[bytes], first: int) -> dict[str, Any]:
    """Lines as columns of messages: each a value."""
    return {"value": pa.array(lines, pa.binary())}


def with_keys(lines: Sequence[bytes], first: int, separator: bytes) -> dict[str, Any]:
    """Lines as columns of messages: key, separator, value.

    Raises:
        ValueError: a line has no separator; `first` is the number of the first line.
    """
    keys, values = [], []
    for number, line in enumerate(lines, first):
        key, found, value = line.partition(separator)
        if not found:
            raise ValueError(
                f"line {number} has no {separator.decode()!r} between key and value: {short(line)}"
            )
        keys.append(key)
        values.append(value)
    return {"value": pa.array(values, pa.binary()), "key": pa.array(keys, pa.binary())}


def from_json(lines: Sequence[bytes], first: int) -> dict[str, Any]:
    """Lines of JSON as columns of messages; empty ones are left out.

    Raises:
        ValueError: a line is no message; `first` is the number of the first line.
    """
    found = []
    for number, line in enumerate(lines, first):
        if line.strip():
            try:
                found.append(_fields(line.decode(_UTF8)))
            except _UNFIT as error:
                raise ValueError(f"line {number} is no message: {error}: {short(line)}") from None
    values, keys, headers, times, partitions = zip(*found, strict=True) if found else ((),) * 5
    columns = {
        "value": pa.array(values, pa.binary()),
        "key": pa.array(keys, pa.binary()),
        "headers": pa.array(headers, pa.binary()),
        "timestamp": pa.array(times, TIME),
        "partition": pa.array(partitions, pa.int32()),
    }
    return {
        name: column
        for name, column in columns.items()
        if name == "value" or column.null_count < len(column)
    }


def message_fields(message: Any) -> tuple[Any, Any, int | None]:
    """Headers, timestamp and partition of a message in JSON, as they stand there.

    Raises:
        ValueError: it is no message.
    """
    if not isinstance(message, dict):
        raise ValueError('write an object, as {"key": "k", "value": "v"}')
    unknown = [name for name in message if name not in (*_FIELDS, *_IGNORED)]
    if unknown or "value" not in message:
        raise ValueError(
            f"it has the fields {', '.join(map(repr, message)) or 'none'}; a message has 'value' "
            "and perhaps 'key', 'headers', 'timestamp', 'partition'"
        )
    partition = message.get("partition")
    if partition is not None and (isinstance(partition, bool) or not isinstance(partition, int)):
        raise ValueError(f"partition {str(partition)!r} is no whole number")
    return message.get("headers"), message.get("timestamp"), partition


def _fields(text: str) -> tuple[Any, ...]:
    message = json.loads(text)
    headers, time, partition = message_fields(message)
    return (
        _content(text, message, "value"),
        _content(text, message, "key"),
        encode_headers(as_headers(headers)) if headers else None,
        None if time is None else as_time(time),
        partition,
    )


def as_bytes(value: Any) -> bytes | None:
    """Bytes in JSON: text, or {"base64": "..."}."""
    if value is None:
        return None
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict) and list(value) == ["base64"] and isinstance(value["base64"], str):
        try:
            return base64.b64decode(value["base64"], validate=True)
        except binascii.Error as error:
            raise ValueError(f"base64: {error}") from None
    return json_text(value).encode()


def _content(text: str, message: Mapping[str, Any], name: str) -> bytes | None:
    """A value or key; what is JSON itself, an object or a number, is as it is written."""
    value = message.get(name)
    written = (
        value is None
        or isinstance(value, str)
        or (isinstance(value, dict) and list(value) == ["base64"])
    )
    return as_bytes(value) if written else str(_member(text, message, name)).encode()


def as_headers(headers: Any) -> list[tuple[str, bytes]]:
    """Headers in JSON: pairs, or an object."""
    pairs = headers.items() if isinstance(headers, dict) else headers
    return [(str(name), as_bytes(value) or b"") for name, value in pairs]


def as_time(text: Any) -> datetime:
    """A time with its zone.

    Raises:
        ValueError: it has none, or is no time.
    """
    when = datetime.fromisoformat(text)
    if when.tzinfo is None:
        raise ValueError(f"timestamp {text!r} has no time zone; end it with Z or +02:00")
    return when


def unescaped(separator: str) -> bytes:
    """A separator as it is typed: a tab is hard to type in a shell."""
    return separator.replace("\\t", "\t").encode()


def short(line: bytes) -> str:
    """The beginning of a line, for messages."""
    text = line.decode(errors="replace")
    return text if len(text) <= 60 else f"{text[:60]}..."


# -- out -------------------------------------------------------------------------------


def lines_of(
    messages: Sequence[Message] | pa.RecordBatch,
    separator: bytes | None,
    as_json: bool,
    typed: bool = False,
) -> bytes | pa.Buffer:
    """Messages as lines; no value, or no key, is nothing.

    Args:
        messages: or the batch of them, as `Consumer.poll_batch` gives it.
        typed: the batch has the columns of a value schema.
    """
    if isinstance(messages, pa.RecordBatch):
        return _batch_lines(messages, separator, as_json, typed)
    if as_json:
        lines: Iterable[bytes] = (_document(each).encode() for each in messages)
    elif separator is not None:
        lines = ((each.key or b"") + separator + _value(each) for each in messages)
    else:
        lines = (_value(each) for each in messages)
    return b"".join(line + b"\n" for line in lines)


def _batch_lines(
    batch: pa.RecordBatch, separator: bytes | None, as_json: bool, typed: bool
) -> pa.Buffer:
    value, form = (_objects(batch), JsonKind.RAW) if typed else (batch["value"], JsonKind.EITHER)
    if not as_json:
        if typed:
            value = pc.fill_null(value, "null").cast(pa.binary())
        pieces = [] if separator is None else [pc.fill_null(batch["key"], b""), separator]
        return _joined([*pieces, pc.fill_null(value, b""), b"\n"])
    ids = batch["txn_id"]
    return objects(
        [
            ("partition", *json_form(batch["partition"])),
            ("offset", *json_form(batch["offset"])),
            ("timestamp", *json_form(batch["timestamp"])),
            ("key", batch["key"], JsonKind.EITHER),
            ("value", value, form),
            ("headers", _headers(batch["headers"]), JsonKind.RAW),
            ("txn_id", *json_form(pc.if_else(pc.equal(ids, 0), None, ids))),
        ]
    )


def _objects(batch: pa.RecordBatch) -> pa.StringArray:
    """The columns of values as texts of objects; a row of nothing but nulls is no value."""
    names = [name for name in batch.schema.names if name not in _BESIDE]
    columns = [batch[name] for name in names]
    members = [(name, *json_form(batch[name])) for name in names]
    absent = reduce(pc.and_, map(pc.is_null, columns))
    return pc.if_else(absent, None, json_texts(json_fields(members), len(batch), "}"))


def _joined(pieces: Sequence[Any]) -> pa.Buffer:
    """Columns of texts, and texts between them, side by side, and all rows one behind the other."""
    lines = pc.binary_join_element_wise(*pieces, b"")
    ends, text = lines.buffers()[1:]
    first, last = (memoryview(ends).cast("i")[lines.offset + i] for i in (0, len(lines)))
    return text.slice(first, last - first)


def _headers(column: pa.BinaryArray) -> pa.StringArray:
    """Arrays of pairs, [["name", "value"], ...], as texts."""
    if column.null_count == len(column):
        return pa.array(["[]"]).take(pa.repeat(pa.scalar(0), len(column)))
    lists = split_headers(pc.fill_null(column, b""))
    names, values = lists.flatten().flatten()
    fields = [("[", names, JsonKind.STRING), (", ", values, JsonKind.EITHER)]
    pairs = json_texts(fields, len(names), "]")
    arrays = pc.binary_join(pa.ListArray.from_arrays(lists.offsets, pairs), ", ")
    return pc.binary_join_element_wise("[", arrays, "]", "")


def _value(message: Message) -> bytes:
    return (message.value or b"") if message.codec is None else _typed_value(message).encode()


def _typed_value(message: Message) -> str:
    assert message.codec is not None
    return "null" if message.value is None else row_text(message.value, message.codec.schema)


def _document(message: Message) -> str:
    typed = message.codec is not None
    document = {
        "partition": message.partition,
        "offset": message.offset,
        "timestamp": message.timestamp.isoformat(),
        "key": _text(message.key),
        "value": None if typed else _text(message.value),
        "headers": [[name, _text(value)] for name, value in message.headers],
        "txn_id": None if message.txn_id is None else message.txn_id.local,
    }
    members = {name: json_text(value) for name, value in document.items()}
    return object_text(members | {"value": _typed_value(message)} if typed else members)


def _text(value: bytes | None) -> Any:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}


# -- in, with a value schema -----------------------------------------------------------

Take = Callable[[Any], Any]


class Row(NamedTuple):
    """One message on its way, as `send` takes it."""

    value: Encoded | None
    key: bytes | None = None
    partition: int | None = None
    headers: list[tuple[str, bytes]] | None = None
    timestamp: datetime | None = None


class TypedLines:
    """Reads lines for one topic.

    Args:
        topic: with a value schema.
    """

    def __init__(self, topic: txnkv.Topic) -> None:
        encode = encoder_of(topic.info)
        assert encode is not None
        assert topic.value_schema is not None
        self._encode = encode
        self._rows_of = RowTexts({field.name: field.type for field in topic.value_schema})

    def plain(self, lines: Sequence[bytes], first: int) -> list[Row]:
        """Lines as messages: each a value. Empty ones are left out, here and below.

        Raises:
            ValueError: a line is no row; `first` is the number of the first line.
        """
        return self._rows(lines, first, lambda line: Row(self._value(line.decode(_UTF8))))

    def with_keys(self, lines: Sequence[bytes], first: int, separator: bytes) -> list[Row]:
        """Lines as messages: key, separator, value."""

        def row(line: bytes) -> Row:
            key, found, value = line.partition(separator)
            if not found:
                raise ValueError(f"it has no {separator.decode()!r} between key and value")
            return Row(self._value(value.decode(_UTF8)), key)

        return self._rows(lines, first, row)

    def from_json(self, lines: Sequence[bytes], first: int) -> list[Row]:
        """Lines of JSON as messages."""

        def row(line: bytes) -> Row:
            text = line.decode(_UTF8)
            message = json.loads(text)
            headers, time, partition = message_fields(message)
            return Row(
                self._value(_member(text, message, "value") or "null"),
                _content(text, message, "key"),
                partition,
                as_headers(headers) if headers else None,
                None if time is None else as_time(time),
            )

        return self._rows(lines, first, row)

    def _rows(self, lines: Sequence[bytes], first: int, row: Callable[[bytes], Row]) -> list[Row]:
        found = []
        for number, line in enumerate(lines, first):
            if not line.strip():
                continue
            try:
                found.append(row(line))
            except (*_UNFIT, SchemaError) as error:
                raise ValueError(f"line {number} is no message: {error}: {short(line)}") from None
        return found

    def _value(self, text: str) -> Encoded | None:
        row = self._rows_of.row_of(text)
        encoded = None if row is None else self._encode(row)
        return None if encoded is None else Encoded(encoded)


# -- values in JSON --------------------------------------------------------------------

_UNFIT: Final = (
    ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError
)  # fmt: skip


def parse_json(text: str, hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The value of a text, whose numbers keep their digits: with a point or exponent, Decimals."""
    return json.loads(text, parse_float=Decimal, object_pairs_hook=hook)


class RowTexts:
    """Reads objects of JSON as rows, whose values are as their columns take them.

    Args:
        columns: names and types.
    """

    def __init__(self, columns: Mapping[str, pa.DataType]) -> None:
        self._columns = columns
        self._takes = {name: taker(kind) for name, kind in columns.items() if kind != JSON}
        self._pairs: list[tuple[str, Any]] = []

    def row_of(self, text: str) -> dict[str, Any] | None:
        """The row of a text; None of a null. A column of JSON has what is written there.

        Raises:
            ValueError: the text is no object, or a value does not fit its column.
        """
        given = parse_json(text, self._object)
        if given is None:
            return None
        if not isinstance(given, dict):
            raise ValueError(f"write an object of the columns {', '.join(self._columns)}")
        names = [name for name, _ in self._pairs]
        if len(names) > len(given):
            raise ValueError(
                f"it has column {next(n for n in names if names.count(n) > 1)!r} twice"
            )
        return {
            name: value if value is None else self._taken(name, value, given, text)
            for name, value in given.items()
        }

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        self._pairs = pairs  # at last those of the outermost
        return dict(pairs)

    def _taken(self, name: str, value: Any, given: Mapping[str, Any], text: str) -> Any:
        kind = self._columns.get(name)
        if kind == JSON:
            return _member(text, given, name)
        try:
            return self._takes.get(name, _as_it_is)(value)
        except _UNFIT as error:
            raise ValueError(f"column {name!r} is {type_name(kind)}: {error}") from None


def _member(text: str, document: Mapping[str, Any], name: str) -> Any:
    """A member of an object as it is written in its text."""
    return json_members(pa.array([text]), list(document), name)[0].as_py()


def _decimal(value: Any) -> Decimal:
    if isinstance(value, (str, int, Decimal)) and not isinstance(value, bool):
        with suppress(InvalidOperation):
            return Decimal(decimal_of(Decimal(value)))
    raise ValueError(f"{value!r} is no decimal number")


def _binary(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise ValueError(f"{text!r} is not base64: {error}") from None


def taker(kind: pa.DataType) -> Take:
    """From what JSON has to what the column takes; what does not fit is a ValueError."""
    is_a = pa.types
    if kind == JSON:
        return json_text
    if is_a.is_decimal(kind):
        return _decimal
    if is_a.is_integer(kind):
        return _whole
    if is_a.is_list(kind):
        take = _or_none(taker(kind.value_type))
        return _only(list, "list", lambda value: [take(each) for each in value])
    if is_a.is_map(kind):
        item = _or_none(taker(kind.item_type))
        return _only(
            dict,
            "object",
            lambda value: [
                (value_of(name, kind.key_type), item(each)) for name, each in value.items()
            ],
        )
    if is_a.is_struct(kind):
        takes = {field.name: _or_none(taker(field.type)) for field in kind}
        return _only(dict, "object", lambda value: _fields_taken(value, takes))
    read = _text_taker(kind)
    return _as_it_is if read is None else _only(str, "text", read)


def _text_taker(kind: pa.DataType) -> Take | None:
    """From a text in JSON to what the column takes; None where there is nothing to make of it."""
    is_a = pa.types
    if is_a.is_date(kind):
        return date.fromisoformat
    if is_a.is_time(kind):
        return time.fromisoformat
    if is_a.is_duration(kind):
        return duration_of
    if is_a.is_timestamp(kind):
        return as_time if kind.tz is not None else datetime.fromisoformat
    if is_a.is_binary(kind):
        return _binary
    return UUID if kind == UUID_TYPE else None


def _only(wanted: type, words: str, take: Take) -> Take:
    """Take what is of a type in JSON alone: of texts and objects Python makes lists as well."""

    def taken(value: Any) -> Any:
        if not isinstance(value, wanted):
            raise ValueError(f"{_short_json(value)} is no {words}")
        return take(value)

    return taken


def _short_json(value: Any) -> str:
    return short(json.dumps(value, ensure_ascii=False, default=float).encode())


def _fields_taken(value: dict[str, Any], takes: Mapping[str, Take]) -> dict[str, Any]:
    unknown = [name for name in value if name not in takes]
    if unknown:
        raise ValueError(
            f"{_short_json(value)} has {unknown[0]!r}; the fields are {', '.join(takes)}"
        )
    return {name: takes[name](part) for name, part in value.items()}


def _whole(value: Any) -> Any:
    if isinstance(value, Decimal):
        raise ValueError(f"{value} is no whole number")
    return value


def _as_it_is(value: Any) -> Any:
    return float(value) if isinstance(value, Decimal) else value


def _or_none(take: Take) -> Take:
    return lambda value: None if value is None else take(value)


def value_of(text: str, kind: pa.DataType) -> Any:
    """The value of a column's type that a text of the command line stands for.

    Raises:
        ValueError: it stands for none.
    """
    is_a = pa.types
    if is_a.is_nested(kind) or kind == JSON:
        try:
            value = parse_json(text)
            return text if kind == JSON else taker(kind)(value)
        except _UNFIT as error:
            raise ValueError(f"{text!r} is no {type_name(kind)}: {error}") from None
    if is_a.is_time(kind) or is_a.is_duration(kind) or is_a.is_binary(kind) or kind == UUID_TYPE:
        return taker(kind)(text)
    return pa.array([text]).cast(kind)[0].as_py()
