"""Files to load, as streams of Arrow batches: the interface, Parquet and Arrow IPC, and which of
them reads a file. Text is read by `text_sources`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any, Final, Protocol

import pyarrow as pa
from pyarrow import parquet

from txnkv.cli.text_sources import CsvSource, JsonSource, Options, storable
from txnkv.errors import SchemaError

FORMATS: Final = ("csv", "json", "parquet", "arrow")


class RowSource(Protocol):
    """One input.

    Attributes:
        name: for messages.
        total: its length, in bytes or rows; None when that is unknown.
    """

    name: str
    total: int | None

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the batches, of types that columns can have."""

    @property
    def position(self) -> int:
        """The part of `total` that was read, in bytes or rows."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, once.

        Raises:
            ValueError: the input is malformed; the message names the line where it can.
        """

    def close(self) -> None:
        """Give the file back."""


@contextmanager
def named(name: str) -> Iterator[None]:
    """Name the input in what is wrong with it.

    Raises:
        ValueError: for any error about the content; those about opening stay as they are.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise ValueError(f"{name}: {error}") from error
    except (ValueError, pa.ArrowException, SchemaError) as error:
        raise ValueError(f"{name}: {error}") from error


_BATCH_ROWS: Final = 1 << 16
_READ_BYTES: Final = 1 << 20
_FILE_MAGIC: Final = b"ARROW1"


class ParquetSource:
    """A Parquet file."""

    def __init__(self, path: str) -> None:
        if path == "-":
            raise ValueError("Parquet cannot be read from a pipe: give a file")
        self.name = path
        open(path, "rb").close()  # Its errors name the file; those of Arrow do not.
        self._raw = pa.OSFile(path)
        try:
            self._file = parquet.ParquetFile(self._raw, pre_buffer=False, buffer_size=_READ_BYTES)
        except (pa.ArrowInvalid, OSError) as error:
            self._raw.close()
            raise ValueError(f"this is no Parquet file: {error}") from error
        self.schema = storable(self._file.schema_arrow)
        self.total: int | None = self._file.metadata.num_rows
        self.position = 0

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows."""
        for batch in self._file.iter_batches(batch_size=_BATCH_ROWS):
            self.position += batch.num_rows
            yield batch

    def close(self) -> None:
        """Give the file back."""
        self._raw.close()


class ArrowSource:
    """An Arrow IPC file or stream; from stdin, a stream."""

    def __init__(self, path: str) -> None:
        self.name = path if path != "-" else "stdin"
        self._raw: Any = sys.stdin.buffer if path == "-" else open(path, "rb")  # noqa: SIM115
        self.total: int | None = None
        self.position = 0
        try:
            self._reader, self._is_file = self._open(path)
        except (pa.ArrowInvalid, OSError) as error:
            self.close()
            raise ValueError(f"this is no Arrow IPC file or stream: {error}") from error
        self.schema = storable(self._reader.schema)
        if self._is_file:
            self.total = self._reader.num_record_batches

    def _open(self, path: str) -> tuple[Any, bool]:
        if path != "-":
            magic = self._raw.read(len(_FILE_MAGIC))
            self._raw.seek(0)
            if magic == _FILE_MAGIC:
                return pa.ipc.open_file(self._raw), True
        return pa.ipc.open_stream(self._raw), False

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows."""
        if self._is_file:
            for number in range(self._reader.num_record_batches):
                self.position = number + 1
                yield self._reader.get_batch(number)
        else:
            yield from self._reader

    def close(self) -> None:
        """Give the file back."""
        if self._raw is not sys.stdin.buffer:
            self._raw.close()


SUFFIXES: Final = {
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".arrows": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}


def format_of(path: str) -> str | None:
    """The format that a file's name tells, if it does."""
    plain = PurePath(path.lower().removesuffix(".gz"))
    return SUFFIXES.get(plain.suffix)


def open_source(path: str, options: Options, types: pa.Schema | None) -> RowSource:
    """Open a file to load; "-" is stdin.

    Args:
        path: of the file.
        options: how to read it.
        types: the columns of the table, for text formats; None infers them.

    Raises:
        ValueError: the format is unknown, or the file is not of it.
        OSError: it cannot be read.
    """
    kind = options.format or format_of(path)
    if kind is None:
        raise ValueError(
            f"{path}: the name does not tell the format; give --format {'|'.join(FORMATS)}"
        )
    with named("stdin" if path == "-" else path):
        return _opened(kind, path, options, types)


def _opened(kind: str, path: str, options: Options, types: pa.Schema | None) -> RowSource:
    if kind == "csv":
        return CsvSource(path, options, types)
    if kind == "json":
        return JsonSource(path, types)
    if kind == "parquet":
        return ParquetSource(path)
    return ArrowSource(path)
