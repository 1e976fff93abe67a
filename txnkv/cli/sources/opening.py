"""The format of a file, and the source that reads it."""

from __future__ import annotations

from pathlib import PurePath
from typing import Final

import pyarrow as pa

from txnkv.cli.sources.base import FORMATS, Options, Source, named
from txnkv.cli.sources.columnar import ArrowSource, ParquetSource
from txnkv.cli.sources.csv import CsvSource
from txnkv.cli.sources.jsonl import JsonSource

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


def open_source(path: str, options: Options, types: pa.Schema | None) -> Source:
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


def _opened(kind: str, path: str, options: Options, types: pa.Schema | None) -> Source:
    if kind == "csv":
        return CsvSource(path, options, types)
    if kind == "json":
        return JsonSource(path, types)
    if kind == "parquet":
        return ParquetSource(path)
    return ArrowSource(path)
