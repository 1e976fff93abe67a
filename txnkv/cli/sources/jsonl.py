"""JSON lines: one object a line, read in blocks of whole lines."""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Iterator
from json import dumps
from typing import Any, Final

import pyarrow as pa
from pyarrow import json

from txnkv.cli.sources.base import storable
from txnkv.cli.sources.text import BLOCK, TextFile
from txnkv.core import compute as pc
from txnkv.core import element_type

_ROW: Final = re.compile(r"(?:JSON parse error: )?(?P<what>.*?) in row (?P<row>\d+)$", re.DOTALL)
_CHANGED: Final = re.compile(
    r"Column\(/(?P<column>.*?)\) changed from (?P<wanted>\w+) to (?P<got>\w+)"
)


class JsonSource:
    """A file of JSON lines.

    Args:
        path: of the file; "-" is stdin.
        types: the columns' types, of which the file may have fewer; None infers them.
    """

    def __init__(self, path: str, types: pa.Schema | None) -> None:
        self.name = path if path != "-" else "stdin"
        self._file = TextFile(path)
        self.total = self._file.total
        if self._file.head.lstrip()[:1] == b"[":
            raise ValueError(
                "this is one JSON array, not JSON lines (one object a line); "
                "`jq -c '.[]'` makes them"
            )
        self.schema = self._infer() if types is None else types
        self._read_as = pa.schema([_wire(field) for field in self.schema])

    def _infer(self) -> pa.Schema:
        head = self._file.head
        if not self._file.whole and b"\n" in head:
            head = head[: head.rfind(b"\n") + 1]
        if not head.strip():
            raise ValueError("there are no rows to infer the types from: give --schema")
        found = self._read(head, None, 0).schema
        times = [field.name for field in found if pa.types.is_timestamp(element_type(field.type))]
        if times:
            # The reader passes over time zones: whether there are some shows in the text.
            as_text = pa.schema([_wire(found.field(name)) for name in times])
            texts = self._read(head, as_text, 0, unexpected="ignore")
            for name in times:
                at = found.get_field_index(name)
                kind = _kind_of_times(texts.column(name), found.field(at).type)
                found = found.set(at, pa.field(name, kind))
        return storable(found)

    @property
    def position(self) -> int:
        """Bytes of the file that were read."""
        return self._file.consumed

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows; fields that a line does not have are null."""
        line = 0
        for block in self._blocks():
            if block.strip():
                for batch in self._read(block, self._read_as, line).to_batches():
                    yield self._typed(batch)
            line += block.count(b"\n")

    def _blocks(self) -> Iterator[bytes]:
        """Pieces that end with a line."""
        rest: list[bytes] = []
        while data := self._file.read(BLOCK):
            end = data.rfind(b"\n") + 1
            if end:
                yield b"".join([*rest, data[:end]])
                rest = []
            rest.append(data[end:])
        yield b"".join(rest)

    def _read(
        self, block: bytes, types: pa.Schema | None, line: int, unexpected: str = "error"
    ) -> pa.Table:
        behaviour = "infer" if types is None else unexpected
        try:
            return json.read_json(
                io.BytesIO(block),
                read_options=json.ReadOptions(block_size=len(block) + 1),
                parse_options=json.ParseOptions(
                    explicit_schema=types, unexpected_field_behavior=behaviour
                ),
            )
        except pa.ArrowInvalid as error:
            if "unexpected field" in str(error):
                raise ValueError(self._unexpected(block, line)) from error
            raise ValueError(_translated(str(error), line)) from error

    def _unexpected(self, block: bytes, line: int) -> str:
        found = self._read(block, None, line).schema.names
        unknown = [name for name in found if name not in self.schema.names]
        first = max(block.find(dumps(unknown[0], ensure_ascii=False).encode()), 0)
        line += block.count(b"\n", 0, first) + 1
        return (
            f"line {line:,}: there is no column "
            f"{', '.join(map(repr, unknown))}; the columns are {', '.join(self.schema.names)} "
            "(--schema sets them)"
        )

    def _typed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = [
            _unwired(column, field)
            for column, field in zip(batch.columns, self.schema, strict=True)
        ]
        return pa.record_batch(
            columns, schema=pa.schema([pa.field(f.name, f.type) for f in self.schema])
        )

    def close(self) -> None:
        """Give the file back."""
        self._file.close()


def _wire(field: Any) -> Any:
    """Return the field to read a column as: JSON has no dates, times are text, bytes base64."""
    kind = field.type
    if pa.types.is_date(kind):
        kind = pa.timestamp("s")
    elif pa.types.is_binary(kind):
        kind = pa.string()
    elif pa.types.is_timestamp(element_type(kind)):
        kind = _replaced(kind, pa.string())
    return pa.field(field.name, kind)


def _unwired(column: pa.Array, field: Any) -> pa.Array:
    if pa.types.is_date(field.type):
        return pc.cast(column, field.type)
    if pa.types.is_timestamp(element_type(field.type)):
        try:
            return pc.cast(column, field.type)
        except pa.ArrowInvalid as error:
            raise ValueError(
                f"column {field.name!r} is {field.type}: {error} (--schema sets the types)"
            ) from None
    if pa.types.is_binary(field.type):
        try:
            return pa.array(
                [
                    None if v is None else base64.b64decode(v, validate=True)
                    for v in column.to_pylist()
                ],
                field.type,
            )
        except binascii.Error as error:
            raise ValueError(f"column {field.name!r}: a value is not base64: {error}") from None
    return column


def _kind_of_times(texts: pa.ChunkedArray, inferred: pa.DataType) -> pa.DataType:
    """Times without a zone, or all of them with one; text where they are mixed."""
    for time in (pa.timestamp("us"), pa.timestamp("us", "UTC")):
        kind = _replaced(inferred, time)
        try:
            pc.cast(texts, kind)
        except pa.ArrowInvalid:
            continue
        return kind
    return texts.type


def _replaced(kind: pa.DataType, element: pa.DataType) -> pa.DataType:
    """The type with another one for what its lists hold."""
    return pa.list_(_replaced(kind.value_type, element)) if pa.types.is_list(kind) else element


def _translated(message: str, line: int) -> str:
    """Pyarrow's words in a user's: the line in the file."""
    found = _ROW.match(message)
    if found is None:
        return message.removeprefix("JSON parse error: ")
    what = found["what"]
    if changed := _CHANGED.match(what):
        what = (
            f"column {changed['column']!r}: a {changed['got']} where a {changed['wanted']} was "
            "expected (--schema sets the types)"
        )
    return f"line {line + int(found['row']) + 1:,}: {what}"
