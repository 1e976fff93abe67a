"""Text files to load, as streams of Arrow batches: CSV and JSON lines, gzipped or not.

Text needs types: those of the table that it goes to, or else those that are inferred from its first
megabytes. Whatever comes later in another type is an error that names the line, never a silent
change of type. CSV is read by pyarrow's streaming reader; JSON lines, one object a line, in blocks
of whole lines.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from csv import reader as read_lines
from dataclasses import dataclass
from json import JSONDecodeError, JSONDecoder, dumps, loads
from typing import Any, Final

import pyarrow as pa
from pyarrow import csv, json

from txnkv.cli.command_group import csv_words, json_words, mixed_column
from txnkv.cli.console import close_bytes, length_of, objects, open_bytes
from txnkv.cli.message_lines import short, taker
from txnkv.cli.text_types import (
    NumberError,
    Quotes,
    csv_type,
    is_coarse,
    is_raw,
    is_whole,
    kind_of_times,
    last_line_end,
    numbers,
    parsed,
    raw_columns,
    storable,
    unwired,
    wire,
    with_codes,
    with_whole_numbers,
)
from txnkv.core import (
    JSON,
    JsonKind,
    JsonLineError,
    element_type,
    json_members,
)
from txnkv.core import compute as pc

HEAD: Final = 8 << 20
BLOCK: Final = 1 << 20
_NO_SPACE: Final = re.compile(r"\S")
_DEPTH: Final = 512
"""Lists and objects in one another, at most, as for columns of JSON: at 10,000 Arrow crashes."""
_BRACES: Final = bytes.maketrans(b"[", b"{")
_NEITHER: Final = bytes(set(range(256)) - set(b"[{\n"))


@dataclass(frozen=True)
class Options:
    """Options of reading a source.

    Attributes:
        format: one of FORMATS; None goes by the file's name.
        delimiter: of CSV; None is a comma, or a tab in files named .tsv.
        header: CSV has the column names in its first line.
        nulls: what stands for null in CSV, unquoted.
    """

    format: str | None = None
    delimiter: str | None = None
    header: bool = True
    nulls: tuple[str, ...] = ("",)


class TextFile(io.RawIOBase):
    """A readable stream over a file or stdin ("-"), with its head for inference.

    Attributes:
        head: the first bytes, up to HEAD; they are part of the stream as well.
        whole: the head is all there is.
        total: bytes of the file as it lies on disk; None for a pipe.
        quotes: told of all that is read.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self.quotes: Quotes | None = None
        self._raw = open_bytes(path)
        self.total = length_of(self._raw)
        self.consumed, self._pushed, self._kept = 0, b"", b""
        self._inflate: Any = None
        self._begin()

    def _begin(self) -> None:
        magic = self._pushed = self._take(2)
        if magic == b"\x1f\x8b":  # gzip
            self._inflate = pa.CompressedInputStream(pa.PythonFile(_Raw(self), "r"), "gzip")
        head = bytearray()
        while len(head) < HEAD and (more := self._decoded(HEAD - len(head))):
            head += more
        self.head = bytes(head)
        self.whole = len(head) < HEAD
        self._at = 0

    def _take(self, n: int) -> bytes:
        """Bytes as they lie on disk."""
        if self._pushed:
            found, self._pushed = self._pushed, b""
            return found
        found = self._raw.read(n)
        self.consumed += len(found)
        return found

    def _decoded(self, n: int) -> bytes:
        return bytes(self._inflate.read(n)) if self._inflate is not None else self._take(n)

    def readable(self) -> bool:
        return True

    def read(self, n: int | None = -1) -> bytes:
        """Up to n bytes; empty at the end."""
        wanted = BLOCK if n is None or n < 0 else n
        more = self.head[self._at : self._at + wanted - len(self._kept)]
        self._at += len(more)
        more = more or self._decoded(wanted - len(self._kept))
        found, self._kept = self._kept + more, b""
        if more and found.endswith(b"\r"):  # Arrow drops a newline that begins the next block
            found, self._kept = found[:-1], b"\r"
            if not found:
                return self.read(n)
        if self.quotes is not None:
            self.quotes.read(found)
        return found

    def close(self) -> None:
        if not self.closed and hasattr(self, "_raw"):  # it may not have been opened
            close_bytes(self._raw)
        super().close()


class _Raw(io.RawIOBase):
    """The file as it lies on disk, for the inflater."""

    def __init__(self, file: TextFile) -> None:
        super().__init__()
        self._file = file

    def readable(self) -> bool:
        return True

    def read(self, n: int | None = -1) -> bytes:
        return self._file._take(BLOCK if n is None or n < 0 else n)


def _require_once(names: Sequence[str]) -> None:
    for name, times in Counter(names).items():
        if times > 1:
            raise ValueError(f"it has column {name!r} twice")


class _TextSource:
    """A file of text: its name, its length, and how much of it was read."""

    def __init__(self, path: str) -> None:
        self.name = path if path != "-" else "stdin"
        self._file = TextFile(path)
        self.total = self._file.total
        if self._file.head.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise ValueError("this is UTF-16, not UTF-8; `iconv -f UTF-16 -t UTF-8` makes it that")

    @property
    def position(self) -> int:
        """Bytes of the file that were read."""
        return self._file.consumed

    def close(self) -> None:
        """Give the file back."""
        self._file.close()


# -- CSV ------------------------------------------------------------------------------


class CsvSource(_TextSource):
    """A CSV file.

    Args:
        path: of the file; "-" is stdin.
        options: delimiter, header, what stands for null.
        types: the columns' types, of which the file may have fewer; None infers them.
        inferred: `types` were, from another file.
    """

    def __init__(
        self, path: str, options: Options, types: pa.Schema | None, *, inferred: bool = False
    ) -> None:
        super().__init__(path)
        self._path = path
        self._options = options
        self._delimiter = options.delimiter or ("\t" if ".tsv" in path.lower() else ",")
        self._names = types.names if types is not None and not options.header else None
        self._quotes = self._file.quotes = Quotes(self._delimiter)
        self.schema = self._infer() if types is None else types
        unseen = inferred if types is not None else not self._file.whole
        # Behind what the types were inferred from there may be zeros before such numbers.
        self._digits = {f.name for f in self.schema if unseen and pa.types.is_integer(f.type)}
        self._digits |= {f.name for f in self.schema if pa.types.is_decimal(f.type)}
        self._rows = 0

    def _infer(self) -> pa.Schema:
        if not self._options.header:
            raise ValueError("--no-header needs --schema, for the columns' names")
        head = self._file.head
        if self._file.whole:
            Quotes(self._delimiter).require_closed([head])
        else:
            head = head[: last_line_end(head, self._delimiter)]
        if not head.strip():
            raise ValueError("there are no rows to infer the types from: give --schema")
        try:
            found = self._read_head(head)
        except pa.ArrowInvalid as error:
            raise ValueError(csv_words(str(error), [])) from error
        if found.num_rows == 0:
            raise ValueError("there are no rows to infer the types from: give --schema")
        _require_once(found.column_names)
        whole = [name for name in found.column_names if is_whole(found[name])]
        if whole:
            found = with_codes(found, self._read_head(head, dict.fromkeys(whole, pa.string())))

        def again(field: Any) -> pa.ChunkedArray:
            return self._read_head(head, {field.name: field.type}).column(0)

        for field in found.schema:
            if pa.types.is_binary(field.type):
                said = f"is not UTF-8: use iconv, or --schema {field.name}:binary"
                raise ValueError(f"column {field.name!r} {said}")
        return storable(with_whole_numbers(found, again, again), inferred=True)

    def _read_head(self, head: bytes, types: dict[str, pa.DataType] | None = None) -> pa.Table:
        """Read the columns of these types; all, where none are given, in those that fit."""
        return csv.read_csv(
            io.BytesIO(head),
            # With threads its errors tell no line.
            read_options=csv.ReadOptions(block_size=len(head) + 1, use_threads=False),
            parse_options=self._parse_options(),
            convert_options=self._convert_options(types, list(types or ())),
        )

    def _parse_options(self) -> Any:
        return csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=True)

    def _convert_options(self, types: dict[str, pa.DataType] | None, only: Sequence[str]) -> Any:
        return csv.ConvertOptions(
            column_types=types,
            include_columns=only,
            null_values=list(self._options.nulls),
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        )

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows; empty text in a column that takes no null stays empty text."""
        try:
            rows = self._open(self._file, threads=True)
            self._require_known(rows.schema.names)
            for batch in rows:
                yield self._filled(batch)
        except pa.ArrowInvalid as error:
            if self._quotes.ended:
                self._quotes.require_closed()
            raise ValueError(self._error_with_line(str(error))) from error
        self._quotes.require_closed()

    def _require_known(self, names: Sequence[str]) -> None:
        """Refuse columns that are not known, or no text can hold, also where no row follows."""
        _require_once(names)
        unknown = [name for name in names if name not in self.schema.names]
        if unknown:
            raise ValueError(
                f"there is no column {', '.join(map(repr, unknown))}; the columns are "
                f"{', '.join(self.schema.names)} (--schema sets them)"
            )
        for field in map(self.schema.field, names):
            if pa.types.is_nested(field.type):
                raise ValueError(f"column {field.name!r} is {field.type}: CSV cannot hold it")

    def _open(self, file: Any, *, threads: bool) -> Any:
        return csv.open_csv(
            file,
            read_options=csv.ReadOptions(
                block_size=BLOCK, use_threads=threads, column_names=self._names
            ),
            parse_options=self._parse_options(),
            convert_options=self._convert_options(
                {
                    f.name: pa.string() if f.name in self._digits else csv_type(f.type)
                    for f in self.schema
                    if not pa.types.is_nested(f.type)
                },
                (),
            ),
        )

    def _filled(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = map(self._filled_column, batch.columns, batch.schema.names)
        filled = pa.record_batch(list(columns), names=batch.schema.names)
        self._rows += batch.num_rows
        return filled

    def _filled_column(self, column: pa.Array, name: str) -> pa.Array:
        field = self.schema.field(name)
        if pa.types.is_duration(field.type) or is_coarse(field.type):
            return parsed(column, field, taker(field.type))
        if name in self._digits:
            try:
                return numbers(column, field.type)
            except NumberError as error:
                line = self._rows + error.row + 1 + self._options.header  # behind the names
                raise ValueError(
                    f"line {line:,}: column {name!r}: {error} (--schema sets the types)"
                ) from None
        if column.null_count and not field.nullable and pa.types.is_string(column.type):
            return pc.fill_null(column, "")
        return column

    def _error_with_line(self, message: str) -> str:
        """The error with its line, for which the file is read again without threads."""
        if "straddl" in message:
            if self._path != "-":
                with TextFile(self._path) as file:
                    Quotes(self._delimiter).require_closed(iter(file.read, b""))
            line = self._quotes.opened
            row = "a row" if line is None else f"line {line:,}: a quote is opened here, and the row"
            return f"{row} is longer than {BLOCK:,} bytes; JSON lines and Parquet can hold it"
        if self._path != "-" and "Row #" not in message:
            try:
                with TextFile(self._path) as file:
                    for _ in self._open(file, threads=False):
                        pass
            except pa.ArrowInvalid as error:
                message = str(error)
        return csv_words(message, self._names or self._header())

    def _header(self) -> list[str]:
        text = self._file.head.decode(errors="replace").splitlines()[:1]
        return next(read_lines(text, delimiter=self._delimiter), [])


# -- JSON lines ------------------------------------------------------------------------


class JsonSource(_TextSource):
    """A file of JSON lines.

    Args:
        path, types: as `CsvSource` takes them.
    """

    def __init__(self, path: str, types: pa.Schema | None) -> None:
        super().__init__(path)
        if self._file.head.lstrip()[:1] == b"[":
            raise ValueError(
                "this is one JSON array, not JSON lines (one object a line); "
                "`jq -c '.[]'` makes them"
            )
        self.schema = self._infer() if types is None else types

    def _infer(self) -> pa.Schema:
        head = self._file.head
        if not self._file.whole and b"\n" in head:
            head = head[: head.rfind(b"\n") + 1]
        if not head.strip():
            raise ValueError("there are no rows to infer the types from: give --schema")
        if not _is_plain(head):
            _require_objects(head, 0)
        values, names = self._read_mixed(head)

        def texts(field: Any) -> pa.Array:
            rows = _objects_of(head, JSONDecoder(parse_int=str, parse_float=str))
            return pa.array((dumps(row.get(field.name)) for row in rows), field.type)

        def again(*fields: Any) -> pa.Table:
            return self._read(head, pa.schema(fields), 0, unexpected="ignore")

        found = with_whole_numbers(values, texts, again)
        times = [field for field in found if pa.types.is_timestamp(element_type(field.type))]
        if times:
            # The reader passes over time zones: whether there are some shows in the text.
            written = again(*map(wire, times))
            for field in times:
                kind = kind_of_times(written.column(field.name), field.type)
                found = found.set(found.get_field_index(field.name), field.with_type(kind))
        fields = {name: pa.field(name, JSON) for name in names} | {
            field.name: field.with_type(JSON) if is_raw(field.type) else field for field in found
        }
        return storable(pa.schema(list(fields.values())))

    def _read_mixed(self, head: bytes) -> tuple[pa.Table, list[str]]:
        """Infer types, but of columns whose objects and lists have no one type in Arrow.

        Returns:
            The other columns; and, where there are such, the names of all.

        Raises:
            ValueError: a column has mixed values and none of them is an object or a list.
        """
        rows: list[dict[str, Any]] = []
        names: list[str] = []
        while True:
            try:
                return self._read(head, None, 0), names
            except ValueError as error:
                column = mixed_column(error.__cause__)
                if column is None:
                    raise
                if not rows:
                    digits = JSONDecoder(parse_int=lambda text: int(text[:4000]))  # as Python can
                    rows = list(_objects_of(head, digits))
                    names = list(dict.fromkeys(name for row in rows for name in row))
                if column not in names:
                    raise
            for row in rows:
                row.pop(column, None)
            head = "\n".join(map(dumps, rows)).encode()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows; fields that a line does not have are null."""
        line = 0
        for block in self._blocks():
            if block.strip():
                if not _is_plain(block):
                    _require_objects(block, line)
                yield from self._rows(block, line)
            line += block.count(b"\n")

    def _rows(self, block: bytes, line: int) -> Iterator[pa.RecordBatch]:
        raw = raw_columns(self.schema, block)
        read_as = pa.schema([wire(field) for field in self.schema if field.name not in raw])
        if not raw:
            for batch in self._read(block, read_as, line).to_batches():
                yield self._typed(batch)
            return
        # Arrow's reader does not give JSON as it is written: such members are cut from the lines.
        every = pc.list_flatten(pc.split_pattern(pa.array([block.decode()]), "\n"))
        there = pc.not_equal(pc.utf8_trim_whitespace(every), "")
        lines, names = every.filter(there), self.schema.names
        try:
            cut = {name: json_members(lines, names, name) for name in raw}
            read: Any = self._read_others(block, read_as, lines, line) if len(read_as) else {}
        except JsonLineError as error:
            number = line + pc.indices_nonzero(there)[error.row].as_py() + 1
            raise ValueError(f"line {number:,}: {error}") from None
        columns = [
            cut[name] if name in cut else pa.concat_arrays(read[name].chunks) for name in names
        ]
        batch = pa.record_batch(columns, names=names)
        try:
            typed = self._typed(batch)
        except ValueError:
            for row, before in enumerate(pc.indices_nonzero(there).to_pylist()):
                try:
                    self._typed(batch.slice(row, 1))
                except ValueError as error:
                    raise ValueError(f"line {line + before + 1:,}: {error}") from None
            raise
        yield typed

    def _read_others(self, block: bytes, types: pa.Schema, lines: Any, line: int) -> pa.Table:
        """Read what Arrow's reader reads, though it refuses some JSON that is cut by us."""
        try:
            found = self._read(block, types, line, unexpected="ignore")
        except ValueError:
            _require_alone(lines)
            cut = {name: json_members(lines, self.schema.names, name) for name in types.names}
            kept = [(name, pc.fill_null(cut[name], "null"), JsonKind.RAW) for name in cut]
            with suppress(ValueError):
                return self._read(bytes(objects(kept)), types, line)
            raise
        if len(found) != len(lines):
            _require_alone(lines)
        return found

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
            if re.search(r"Column\(\)|document is empty", str(error)):  # with a wrong line
                _require_objects(block, line)
            raise ValueError(json_words(str(error), line)) from error

    def _unexpected(self, block: bytes, line: int) -> str:
        found = self._read(block, None, line).schema.names
        unknown = [name for name in found if name not in self.schema.names]
        first = max(block.find(dumps(unknown[0], ensure_ascii=False).encode()), 0)
        line += block.count(b"\n", 0, first) + 1
        return (
            f"line {line:,}: there is no column {', '.join(map(repr, unknown))}; the columns are "
            f"{', '.join(self.schema.names)} (--schema sets them)"
        )

    def _typed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = [unwired(*each) for each in zip(batch.columns, self.schema, strict=True)]
        return pa.record_batch(columns, names=self.schema.names)


def _is_plain(block: bytes) -> bool:
    """Return True for objects of one line each that cannot be deep."""
    inner = block.count(b"\n") - block.endswith(b"\n")
    return (
        block.startswith(b"{")
        and inner in (block.count(b"}\n{"), block.count(b"}\r\n{"))
        and b"{" * (_DEPTH + 2) not in block.translate(_BRACES, _NEITHER)
    )


def _require_objects(block: bytes, line: int) -> None:
    """Refuse values that are no objects, and deep ones: Arrow's reader crashes at some of them.

    Where a block is no JSON, the reader has the words for it.
    """
    with suppress(JSONDecodeError):
        decoder = JSONDecoder(strict=False, parse_int=str)  # which takes any number of digits
        for _ in _objects_of(block, decoder, line):
            pass


def _objects_of(head: bytes, decoder: JSONDecoder, line: int = 0) -> Iterator[dict[str, Any]]:
    """Objects, of which one may have several lines, and a line several of them."""
    text, at = head.decode("utf-8-sig", "replace"), 0
    while found := _NO_SPACE.search(text, at):
        start = found.start()
        if text[start] != "{":
            before, rest = text[:start].rpartition("\n")[2], text[start:].partition("\n")[0]
            told = short(rest.encode())
            why = f"{told!r} behind its object: one a line" if before.strip() else ""
            raise _refused(text, start, line, why or f"{told} is no object")
        try:
            value, at = decoder.raw_decode(text, start)
        except RecursionError:
            at = start
        except JSONDecodeError as error:  # whose line is that of a later one
            error.args = _refused(text, start, line, error.msg).args
            raise
        if at == start or (at - start > 2 * _DEPTH and _is_deep(value)):
            raise _refused(text, start, line, f"it is nested more than {_DEPTH} deep")
        yield value


def _refused(text: str, at: int, line: int, why: str) -> ValueError:
    return ValueError(f"line {line + text.count(chr(10), 0, at) + 1:,}: {why}")


def _is_deep(value: dict[str, Any]) -> bool:
    level: list[Any] = [value]
    for _ in range(_DEPTH + 1):
        values = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for inner in values for each in inner if isinstance(each, dict | list)]
        if not level:
            return False
    return True


def _require_alone(lines: pa.StringArray) -> None:
    """Refuse what stands behind the object of a line, which `json_members` does not read."""
    for row, text in enumerate(lines.to_pylist()):
        try:
            loads(text, strict=False, parse_int=str)
        except JSONDecodeError as error:
            if error.msg == "Extra data":
                behind = short(text[error.pos :].encode())
                raise JsonLineError(f"{behind!r} behind its object: one a line", row) from None
