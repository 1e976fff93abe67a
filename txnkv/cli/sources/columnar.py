"""Parquet files, and Arrow IPC files and streams."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
from pyarrow import parquet

from txnkv.cli.sources.base import storable

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
