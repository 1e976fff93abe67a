"""Rows of a topic with a value schema as JSON lines.

    plain      the value: {"id": 7, "note": null}; null is no value
    with keys  key, a separator, the same
    JSON       {"value": {"id": 7, "note": null}, "key": "k", ...}, as of any message

What JSON has not is text: dates, times and decimals as they are printed, binary as base64.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any, NamedTuple

import pyarrow as pa

import txnkv
from txnkv.cli.message_lines import as_bytes, as_headers, as_time, json_fields, short
from txnkv.errors import SchemaError
from txnkv.topics import Encoded
from txnkv.transaction import encoder_of

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
        self._takes = {field.name: _take(field.type) for field in topic.value_schema}

    def plain(self, lines: Sequence[bytes], first: int) -> list[Row]:
        """Lines as messages: each a value. Empty ones are left out, here and below.

        Raises:
            ValueError: a line is no row; `first` is the number of the first line.
        """
        return self._rows(lines, first, lambda line: Row(self._value(json.loads(line))))

    def with_keys(self, lines: Sequence[bytes], first: int, separator: bytes) -> list[Row]:
        """Lines as messages: key, separator, value."""

        def row(line: bytes) -> Row:
            key, found, value = line.partition(separator)
            if not found:
                raise ValueError(f"it has no {separator.decode()!r} between key and value")
            return Row(self._value(json.loads(value)), key)

        return self._rows(lines, first, row)

    def from_json(self, lines: Sequence[bytes], first: int) -> list[Row]:
        """Lines of JSON as messages."""

        def row(line: bytes) -> Row:
            value, key, headers, time, partition = json_fields(json.loads(line))
            return Row(
                self._value(value),
                as_bytes(key),
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
            except (ValueError, TypeError, KeyError, SchemaError) as error:
                raise ValueError(f"line {number} is no message: {error}: {short(line)}") from None
        return found

    def _value(self, given: Any) -> Encoded | None:
        if given is None:
            return None
        if not isinstance(given, dict):
            raise ValueError(
                f"the topic's values have the columns {', '.join(self._takes)}: write an object "
                "of them"
            )
        takes = self._takes
        row = {
            name: value if value is None or name not in takes else takes[name](value)
            for name, value in given.items()
        }
        encoded = self._encode(row)
        return None if encoded is None else Encoded(encoded)


def _take(kind: pa.DataType) -> Take:
    """From what JSON has to what the column takes."""
    is_a = pa.types
    if is_a.is_date(kind):
        return date.fromisoformat
    if is_a.is_timestamp(kind):
        return as_time if kind.tz is not None else datetime.fromisoformat
    if is_a.is_decimal(kind):
        return lambda value: Decimal(str(value))
    if is_a.is_binary(kind):
        return lambda value: base64.b64decode(value, validate=True)
    if is_a.is_list(kind):
        take = _take(kind.value_type)
        return lambda value: [None if each is None else take(each) for each in value]
    return lambda value: value
