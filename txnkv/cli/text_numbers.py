"""Types of the numbers in text, such that none of their digits is lost."""

from __future__ import annotations

from collections.abc import Callable
from math import isinf
from typing import Any, Final

import pyarrow as pa

from txnkv.core import compute as pc

_WHOLE: Final = r"^\s*[+-]?\d+\s*$"
_PLAIN: Final = r"^\s*-?(0|[1-9]\d*)\s*$"
_PLAIN_LARGE: Final = r"^\s*(0|-?[1-9]\d*)\s*$"  # no uint64 is -0


def is_whole(column: pa.ChunkedArray) -> bool:
    """Return True for whole numbers, also where they are doubles."""
    if not pa.types.is_float64(column.type):
        return bool(pa.types.is_integer(column.type))
    return bool(pc.all(pc.equal(pc.floor(column), column)).as_py())


def with_codes(found: pa.Table, written: pa.Table) -> pa.Table:
    """Have whole numbers be text where some have a plus sign or zeros before them: +4179, 007.

    Args:
        found: the columns, with the types inferred.
        written: those of them that are whole, as they are written.
    """
    for name in written.column_names:
        at, texts = found.column_names.index(name), written.column(name)
        large = pa.types.is_floating(found.column(at).type)  # or reals
        if large and not _all_match(texts, _WHOLE):
            continue
        if not _all_match(texts, _PLAIN_LARGE if large else _PLAIN):
            found = found.set_column(at, name, texts)
    return found


def _any_matches(texts: Any, pattern: str) -> bool:
    return bool(pc.any(pc.match_substring_regex(texts, pattern)).as_py())


def _all_match(texts: pa.ChunkedArray, pattern: str) -> bool:
    return bool(pc.all(pc.match_substring_regex(texts, pattern)).as_py())


def with_whole_numbers(
    found: pa.Table, texts: Callable[[Any], Any], read: Callable[[Any], Any]
) -> pa.Schema:
    """The types inferred, with uint64 for whole numbers beyond int64: Arrow makes doubles of them.

    Args:
        found: the values.
        texts, read: read a column again, as its numbers are written and in another type.

    Raises:
        ValueError: neither int64 nor uint64 holds all of a column, or no float64 a number of it.
    """
    schema = found.schema
    for at, field in enumerate(schema):
        largest = _largest(found.column(at))
        if largest < 1 << 53:
            continue
        written = texts(field.with_type(pa.string()))
        if isinf(largest) and not _any_matches(written, "(?i)inf"):
            raise ValueError(
                f"column {field.name!r} has numbers larger than any float64: --schema says "
                "what they are, as string, or as json where they stand in JSON"
            )
        if _any_matches(written, "(?i)[.e]|nan|inf"):
            continue  # reals, and no digits lost that a double has
        schema = schema.set(at, field.with_type(replaced(field.type, pa.uint64())))
        try:
            read(schema.field(at))
        except ValueError:
            raise ValueError(
                f"column {field.name!r} has whole numbers that neither int64 nor uint64 holds all: "
                "--schema says what they are, as decimal128(38, 0), or float64, which rounds them"
            ) from None
    return schema


def _largest(column: pa.ChunkedArray) -> float:
    """The largest of doubles, or of lists of them, without signs; 0 for other types."""
    while pa.types.is_list(column.type):
        column = pc.list_flatten(column)
    if not pa.types.is_float64(column.type):
        return 0
    return float(pc.max(pc.abs(column.filter(pc.invert(pc.is_nan(column))))).as_py() or 0)


def replaced(kind: pa.DataType, element: pa.DataType) -> pa.DataType:
    """The type with another one for what its lists hold."""
    inner = getattr(kind, "value_type", None)
    return element if inner is None else pa.list_(replaced(inner, element))
