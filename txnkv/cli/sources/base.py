"""The interface and the options of all sources of rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import pyarrow as pa

from txnkv.core import column_type
from txnkv.errors import SchemaError

FORMATS: Final = ("csv", "json", "parquet", "arrow")


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


class Source(Protocol):
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


def storable(schema: pa.Schema) -> pa.Schema:
    """The schema with types that columns can have: nothing but nulls, and times, become text.

    Raises:
        SchemaError: a column has a type that no column can have, as a struct.
    """
    return pa.schema([_storable_field(field) for field in schema])


def _storable_field(field: Any) -> Any:
    if pa.types.is_null(field.type) or pa.types.is_time(field.type):
        return pa.field(field.name, pa.string())
    try:
        return pa.field(field.name, column_type(field.type), field.nullable)
    except SchemaError as error:
        raise SchemaError(f"column {field.name!r}: {error}") from None
