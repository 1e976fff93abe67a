"""Bytes of a request into a dict, and a dict into the bytes of an answer, by the tables.

Whatever comes is checked before it is believed: a length that passes what was sent, an array of
more elements than bytes are left, a null where there can be none, or text that is no UTF-8 or too
long is a MalformedError, and no memory is taken for what was only announced.

    Request    length i32 | key i16 | version i16 | correlation i32 | client id | [tags] | fields
    Answer     length i32 | correlation i32 | [tags] | fields              [tags]: flexible versions
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final, NamedTuple

from txnkv.kafka.api_tables import API_VERSIONS, APIS, Api, Field

_HEAD: Final = struct.Struct(">hhi")
_NUMBERS: Final = {
    "i8": struct.Struct(">b"),
    "i16": struct.Struct(">h"),
    "u16": struct.Struct(">H"),
    "i32": struct.Struct(">i"),
    "i64": struct.Struct(">q"),
    "bool": struct.Struct(">?"),
}
_I16, _I32 = _NUMBERS["i16"], _NUMBERS["i32"]
_UUID_BYTES: Final = 16
MOST_TEXT: Final = 0x7FFF
"""Bytes of a text at most, though a varint counts more: versions before had 16 bits."""
_MOST_ELEMENTS: Final = 20_000
"""The most of all arrays of a request: each takes far more memory than bytes."""

_MANY_ELEMENTS: Final = 1_000
"""Requests with more are read, and answers written, in turns: a crowd would keep others waiting."""


def _at_once() -> None:
    """Wait for nobody."""


class MalformedError(ValueError):
    """Bytes that are no request; the connection is closed."""


class UnknownVersionError(MalformedError):
    """A request of a kind or version that is not spoken; of ApiVersions it is answered."""

    def __init__(self, key: int, version: int, correlation: int) -> None:
        known = APIS.get(key)
        spoken = "" if known is None else f", of which {known.first} to {known.last} are spoken"
        super().__init__(f"request {key} in version {version}{spoken}")
        self.key = key
        self.correlation = correlation


class KafkaRequest(NamedTuple):
    """A request as it came.

    Attributes:
        body: its fields by name; structs are dicts.
    """

    api: Api
    version: int
    correlation: int
    client_id: str | None
    body: dict[str, Any]


class _Reader:
    """The bytes of a request, read from their begin to their end."""

    __slots__ = ("at", "data", "elements", "flexible", "many")

    def __init__(self, data: memoryview, many: Callable[[], None] = _at_once) -> None:
        self.data = data
        self.many = many
        self.at = 0
        self.elements = 0
        self.flexible = False

    def number(self, kind: struct.Struct) -> int:
        try:
            (found,) = kind.unpack_from(self.data, self.at)
        except struct.error:
            raise MalformedError("it ends within a number") from None
        self.at += kind.size
        return int(found)

    def varint(self) -> int:
        found = 0
        for shift in range(0, 35, 7):
            if self.at >= len(self.data):
                break
            byte = self.data[self.at]
            self.at += 1
            found |= (byte & 0x7F) << shift
            if byte < 0x80:
                return found
        raise MalformedError("a varint has no end")

    def length(self, short: bool) -> int | None:
        """Return a length, at most what is left; None for a null."""
        found = self.varint() - 1 if self.flexible else self.number(_I16 if short else _I32)
        if found < 0:
            return None
        if found > len(self.data) - self.at:
            raise MalformedError(f"a length of {found} where {len(self.data) - self.at} are left")
        return found

    def take(self, size: int) -> memoryview:
        found = self.data[self.at : self.at + size]
        self.at += size
        return found

    def text(self) -> str | None:
        size = self.length(short=True)
        if size is None:
            return None
        if size > MOST_TEXT:
            raise MalformedError(f"a text of {size:,} bytes: {MOST_TEXT:,} are the most")
        try:
            return str(self.take(size), "utf-8")
        except UnicodeDecodeError:
            raise MalformedError("a text is no UTF-8") from None

    def tags(self) -> None:
        """Pass over tagged fields."""
        for _ in range(self.varint()):
            self.varint()
            size = self.varint()
            if size > len(self.data) - self.at:
                raise MalformedError("a tagged field is longer than what is left")
            self.at += size

    def struct(self, fields: Sequence[Field]) -> dict[str, Any]:
        found = {field.name: self.field(field) for field in fields}
        if self.flexible:
            self.tags()
        return found

    def field(self, field: Field) -> Any:
        if not field.array:
            found = self.value(field)
        else:
            size = self.length(short=False)
            self.elements += size or 0
            if self.elements > _MOST_ELEMENTS:
                raise MalformedError(f"arrays of more than {_MOST_ELEMENTS:,} elements")
            if self.elements > _MANY_ELEMENTS:
                self.many()
            found = None if size is None else [self.value(field) for _ in range(size)]
        if found is None and not field.nullable:
            raise MalformedError(f"{field.name} is null")
        return found

    def value(self, field: Field) -> Any:
        kind = _NUMBERS.get(field.kind)
        if kind is not None:
            found = self.number(kind)
            return bool(found) if field.kind == "bool" else found
        if field.kind == "str":
            return self.text()
        if field.kind == "struct":
            return self.struct(field.fields)
        if field.kind == "uuid":
            if len(self.data) - self.at < _UUID_BYTES:
                raise MalformedError("it ends within an id")
            return bytes(self.take(_UUID_BYTES))
        size = self.length(short=False)
        return None if size is None else self.take(size)


def read_request(data: bytes | bytearray, many: Callable[[], None] = _at_once) -> KafkaRequest:
    """Return the request that some bytes are, those of its length left away.

    Args:
        data: the bytes.
        many: waits for the turn of one that has many elements; is called again and again.

    Raises:
        UnknownVersionError: of a kind or version that is not spoken.
        MalformedError: they are none.
    """
    reader = _Reader(memoryview(data), many)
    key, version, correlation = (reader.number(kind) for kind in (_I16, _I16, _I32))
    api = APIS.get(key)
    if api is None or not api.first <= version <= api.last:
        raise UnknownVersionError(key, version, correlation)
    client_id = reader.text()
    reader.flexible = version >= api.flexible
    if reader.flexible:
        reader.tags()
    body = reader.struct(_fields_of(key, version, False))
    # Bytes behind the end are passed over, as by Kafka: librdkafka sends one with Metadata.
    return KafkaRequest(api, version, correlation, client_id, body)


@lru_cache(maxsize=1024)
def _fields_of(key: int, version: int, answer: bool) -> tuple[Field, ...]:
    """Return the fields that a version has."""

    def those(fields: tuple[Field, ...]) -> tuple[Field, ...]:
        return tuple(
            replace(each, fields=those(each.fields))
            for each in fields
            if each.first <= version <= each.last
        )

    return those(APIS[key].answer if answer else APIS[key].request)


class _Writer:
    __slots__ = ("elements", "flexible", "many", "parts")

    def __init__(self, flexible: bool, many: Callable[[], None] = _at_once) -> None:
        self.parts: list[bytes] = []
        self.elements = 0
        self.many = many
        self.flexible = flexible

    def length(self, size: int, short: bool) -> None:
        """Write a length; -1 for a null."""
        if self.flexible:
            self.parts.append(_varint(size + 1))
        else:
            self.parts.append((_I16 if short else _I32).pack(size))

    def struct(self, fields: Sequence[Field], values: Mapping[str, Any]) -> None:
        for field in fields:
            value = values.get(field.name)
            if value is None and not field.nullable:
                value = () if field.array else _DEFAULTS[field.kind]
            if field.array:
                self.array(field, value)
            else:
                self.value(field, value)
        if self.flexible:
            self.parts.append(b"\0")

    def array(self, field: Field, value: Sequence[Any] | None) -> None:
        if value is None:
            self.length(-1, short=False)
            return
        self.length(len(value), short=False)
        self.elements += len(value)
        if self.elements > _MANY_ELEMENTS:
            self.many()
        for each in value:
            self.value(field, each)

    def value(self, field: Field, value: Any) -> None:
        kind = _NUMBERS.get(field.kind)
        if kind is not None:
            self.parts.append(kind.pack(value))
        elif field.kind == "struct":
            self.struct(field.fields, value)
        elif field.kind == "uuid":
            self.parts.append(value)
        elif value is None:
            self.length(-1, short=field.kind == "str")
        else:
            data = value.encode() if field.kind == "str" else value
            if field.kind == "str" and len(data) > MOST_TEXT:  # a name of the store, or of an error
                data = str(data[:MOST_TEXT], "utf-8", "ignore").encode()
            self.length(len(data), short=field.kind == "str")
            self.parts.append(data)


_DEFAULTS: Final[dict[str, Any]] = dict.fromkeys(_NUMBERS, 0) | {
    "uuid": bytes(_UUID_BYTES),
    "str": "",
    "bytes": b"",
    "records": b"",
}


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def write_answer(
    api: Api,
    version: int,
    correlation: int,
    body: Mapping[str, Any],
    many: Callable[[], None] = _at_once,
) -> list[bytes]:
    """Return the bytes of an answer, in parts, its length before them.

    Args:
        api: of the request.
        version: of the request.
        correlation: of the request.
        body: fields by name; those that are not there are 0, empty, or null where they may be.
        many: as of `read_request`.
    """
    writer = _Writer(version >= api.flexible, many)
    writer.parts.append(_I32.pack(correlation))
    if writer.flexible and api.key != API_VERSIONS:  # whose answer anybody can read
        writer.parts.append(b"\0")
    writer.struct(_fields_of(api.key, version, True), body)
    size = sum(map(len, writer.parts))
    return [_I32.pack(size), *writer.parts]
