"""Outputs of scanned rows: a table for people, or CSV, JSON lines, Parquet and Arrow IPC."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import IO, Any, Final

import pyarrow as pa
from pyarrow import csv, parquet

from txnkv.cli.console import json_text, print_grid

FORMATS: Final = ("table", "json", "csv", "parquet", "arrow")
BINARY: Final = ("parquet", "arrow")
Batches = Iterable[pa.RecordBatch]
Writer = Callable[[pa.Schema, Batches, IO[bytes]], int]


def print_table(schema: pa.Schema, batches: Batches) -> int:
    """A table for people; returns the number of rows. Keeps all of them in memory."""
    rows = [list(row.values()) for batch in batches for row in batch.to_pylist()]
    numeric = [field.name for field in schema if _numeric(field.type)]
    if not schema.names:
        return len(rows)
    print_grid(schema.names, ([_cell(value) for value in row] for row in rows), right=numeric)
    return len(rows)


def _numeric(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    )


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(str(value).splitlines()) if isinstance(value, str) else str(value)


def write_file(kind: str, schema: pa.Schema, batches: Batches, path: Path) -> int:
    """Write a file, which is there when it is whole and not before; returns the rows."""
    with _whole(path) as file:
        return _WRITERS[kind](schema, batches, file)


def write_stdout(kind: str, schema: pa.Schema, batches: Batches) -> int:
    """Write to stdout; returns the rows."""
    sys.stdout.flush()
    rows = _WRITERS[kind](schema, batches, sys.stdout.buffer)
    sys.stdout.buffer.flush()
    return rows


@contextmanager
def _whole(path: Path) -> Iterator[IO[bytes]]:
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _write_json(schema: pa.Schema, batches: Batches, file: IO[bytes]) -> int:
    plain = all(_is_plain(field.type) for field in schema)
    rows = 0
    for batch in batches:
        found = batch.to_pylist()
        if not plain:
            found = [json_value(row) for row in found]
        if found:
            file.write(("\n".join(map(json_text, found)) + "\n").encode())
        rows += len(found)
    return rows


def _is_plain(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_boolean(kind)
        or pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_string(kind)
    )


def json_value(value: Any) -> Any:
    """A value for JSON: what it has not as text, binary as base64."""
    if isinstance(value, dict):
        return {name: json_value(item) for name, item in value.items()}
    if isinstance(value, list):
        return [json_value(item) for item in value]
    if isinstance(value, (date, datetime)):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def _write_csv(schema: pa.Schema, batches: Batches, file: IO[bytes]) -> int:
    for field in schema:
        if pa.types.is_binary(field.type) or pa.types.is_list(field.type):
            raise ValueError(
                f"column {field.name!r} is {field.type}: CSV cannot hold it; leave it out with "
                "--columns, or write json, parquet or arrow"
            )
    with csv.CSVWriter(file, schema) as writer:
        return _write_all(writer, batches)


def _write_parquet(schema: pa.Schema, batches: Batches, file: IO[bytes]) -> int:
    with parquet.ParquetWriter(file, schema) as writer:
        return _write_all(writer, batches)


def _write_arrow(schema: pa.Schema, batches: Batches, file: IO[bytes]) -> int:
    with pa.ipc.new_file(file, schema) as writer:
        return _write_all(writer, batches)


def _write_all(writer: Any, batches: Batches) -> int:
    rows = 0
    for batch in batches:
        writer.write_batch(batch)
        rows += batch.num_rows
    return rows


_WRITERS: dict[str, Writer] = {
    "json": _write_json,
    "csv": _write_csv,
    "parquet": _write_parquet,
    "arrow": _write_arrow,
}
