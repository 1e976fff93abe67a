"""CSV, by pyarrow's streaming reader."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from csv import reader as read_lines
from typing import Any, Final

import pyarrow as pa
from pyarrow import csv

from txnkv.cli.sources.base import Options, storable
from txnkv.cli.sources.text import BLOCK, TextFile
from txnkv.core import compute as pc

_CONVERSION: Final = re.compile(
    r"In CSV column #(?P<column>\d+): (?:Row #(?P<row>\d+): )?(?P<what>.*)", re.DOTALL
)
_VALUE: Final = re.compile(r"CSV conversion error to (?P<kind>.+?): invalid value '(?P<value>.*)'")
_PARSE: Final = re.compile(r"CSV parse error: (?:Row #(?P<row>\d+): )?(?P<what>.*)", re.DOTALL)


class CsvSource:
    """A CSV file.

    Args:
        path: of the file; "-" is stdin.
        options: delimiter, header, what stands for null.
        types: the columns' types, of which the file may have fewer; None infers them.
    """

    def __init__(self, path: str, options: Options, types: pa.Schema | None) -> None:
        self.name = path if path != "-" else "stdin"
        self._path = path
        self._file = TextFile(path)
        self.total = self._file.total
        self._options = options
        self._delimiter = options.delimiter or ("\t" if ".tsv" in path.lower() else ",")
        self._types = types
        self._names = types.names if types is not None and not options.header else None
        if types is not None:
            for field in types:
                if pa.types.is_list(field.type):
                    raise ValueError(f"column {field.name!r} is {field.type}: CSV cannot hold it")
        self.schema = self._infer() if types is None else types

    def _infer(self) -> pa.Schema:
        if not self._options.header:
            raise ValueError("--no-header needs --schema, for the columns' names")
        head = self._file.head
        if not self._file.whole:
            head = head[: _last_line_end(head)]
        if not head.strip():
            raise ValueError("there are no rows to infer the types from: give --schema")
        try:
            found = self._read_head(head, threads=True)
        except pa.ArrowInvalid:
            try:  # Again, since only the reader without threads tells the line.
                found = self._read_head(head, threads=False)
            except pa.ArrowInvalid as error:
                raise ValueError(_translated(str(error), [])) from error
        if found.num_rows == 0:
            raise ValueError("there are no rows to infer the types from: give --schema")
        return storable(found.schema)

    def _read_head(self, head: bytes, *, threads: bool) -> pa.Table:
        return csv.read_csv(
            io.BytesIO(head),
            read_options=csv.ReadOptions(block_size=len(head) + 1, use_threads=threads),
            parse_options=self._parse_options(),
            convert_options=self._convert_options(None),
        )

    def _parse_options(self) -> Any:
        return csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=True)

    def _convert_options(self, types: pa.Schema | None) -> Any:
        return csv.ConvertOptions(
            column_types=types,
            null_values=list(self._options.nulls),
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        )

    @property
    def position(self) -> int:
        """Bytes of the file that were read."""
        return self._file.consumed

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows; empty text in a column that takes no null stays empty text."""
        try:
            rows = self._open(self._file, threads=True)
            self._require_known(rows.schema.names)
            for batch in rows:
                yield self._filled(batch)
        except pa.ArrowInvalid as error:
            raise ValueError(self._told(str(error))) from error

    def _require_known(self, names: Sequence[str]) -> None:
        """Refuse unknown columns also where no row follows."""
        unknown = [name for name in names if name not in self.schema.names]
        if unknown:
            raise ValueError(
                f"there is no column {', '.join(map(repr, unknown))}; the columns are "
                f"{', '.join(self.schema.names)} (--schema sets them)"
            )

    def _open(self, file: Any, *, threads: bool) -> Any:
        return csv.open_csv(
            file,
            read_options=csv.ReadOptions(
                block_size=BLOCK, use_threads=threads, column_names=self._names
            ),
            parse_options=self._parse_options(),
            convert_options=self._convert_options(self.schema),
        )

    def _filled(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = [
            self._filled_column(column, name)
            for column, name in zip(batch.columns, batch.schema.names, strict=True)
        ]
        return pa.record_batch(columns, names=batch.schema.names)

    def _filled_column(self, column: pa.Array, name: str) -> pa.Array:
        position = self.schema.get_field_index(name)
        required = position >= 0 and not self.schema.field(position).nullable
        if column.null_count and required and pa.types.is_string(column.type):
            return pc.fill_null(column, "")
        return column

    def _told(self, message: str) -> str:
        """The error with its line, for which the file is read again without threads."""
        if self._path != "-" and "Row #" not in message:
            try:
                with TextFile(self._path) as file:
                    for _ in self._open(file, threads=False):
                        pass
            except pa.ArrowInvalid as error:
                message = str(error)
        return _translated(message, self._names or self._header())

    def _header(self) -> list[str]:
        """The names in the first line."""
        text = self._file.head.decode(errors="replace").splitlines()[:1]
        return next(read_lines(text, delimiter=self._delimiter), [])

    def close(self) -> None:
        """Give the file back."""
        self._file.close()


def _last_line_end(head: bytes) -> int:
    """Behind the last newline that is not inside quotes."""
    end = len(head)
    while (end := head.rfind(b"\n", 0, end)) >= 0:
        if head.count(b'"', 0, end) % 2 == 0:
            return end + 1
    return len(head)


def _translated(message: str, names: list[str]) -> str:
    """Pyarrow's words in a user's: line and column by name."""
    if found := _CONVERSION.match(message):
        number = int(found["column"])
        column = repr(names[number]) if number < len(names) else f"number {number + 1}"
        what = found["what"]
        if value := _VALUE.match(what):
            what = f"{value['value']!r} is no {value['kind']} (--schema sets the types)"
        return f"{_line(found['row'])}column {column}: {what}"
    if found := _PARSE.match(message):
        return f"{_line(found['row'])}{found['what']}"
    return message


def _line(row: str | None) -> str:
    return f"line {int(row):,}: " if row is not None else ""
