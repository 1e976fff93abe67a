"""Column types: names, what may be a key, and which casts lose nothing."""

from __future__ import annotations

import re
from datetime import date, datetime
from decimal import Decimal
from typing import Final

import pyarrow as pa

from txnkv.core import compute as pc
from txnkv.errors import SchemaError

_SIMPLE: Final[dict[str, pa.DataType]] = {
    "bool": pa.bool_(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "uint8": pa.uint8(),
    "uint16": pa.uint16(),
    "uint32": pa.uint32(),
    "uint64": pa.uint64(),
    "float": pa.float32(),
    "float32": pa.float32(),
    "double": pa.float64(),
    "float64": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date32": pa.date32(),
    "date32[day]": pa.date32(),
    "timestamp[us]": pa.timestamp("us"),
}
_DECIMAL = re.compile(r"decimal128\(\s*(\d+)\s*,\s*(-?\d+)\s*\)")
_ZONED = re.compile(r"timestamp\[us,\s*tz=([^\]]+)\]")
_LIST = re.compile(r"list<(?:\w+:\s*)?(.+?)(?:\s+not null)?>")

NAMES: Final = (
    "bool, int8..int64, uint8..uint64, float32, float64, string, binary, date32, "
    "timestamp[us], timestamp[us, tz=UTC], decimal128(p, s), list<...>"
)

_MEANT: Final[dict[object, str]] = {
    bool: ": write 'bool'",
    int: ": write 'int64'",
    float: ": write 'float64'",
    str: ": write 'string'",
    bytes: ": write 'binary'",
    date: ": write 'date32'",
    datetime: ": write 'timestamp[us, tz=UTC]', or 'timestamp[us]' for times without a zone",
    Decimal: ": write 'decimal128(18, 2)' or other digits",
}


def parse_type(text: str) -> pa.DataType:
    """The Arrow type of a name, as Arrow prints it.

    Raises:
        SchemaError: no column has such a type.
    """
    name = text.strip()
    if name in _SIMPLE:
        return _SIMPLE[name]
    if found := _DECIMAL.fullmatch(name):
        return pa.decimal128(int(found[1]), int(found[2]))
    if found := _ZONED.fullmatch(name):
        return pa.timestamp("us", tz=found[1].strip())
    if found := _LIST.fullmatch(name):
        return pa.list_(parse_type(found[1]))
    raise SchemaError(f"{text!r} is not a column type; there are {NAMES}")


def column_type(given: pa.DataType) -> pa.DataType:
    """The type in which a column of Arrow type `given` is stored.

    Raises:
        SchemaError: no column can hold it.
    """
    if not isinstance(given, pa.DataType):
        hint = _MEANT.get(given, "") if isinstance(given, type) else ""
        raise SchemaError(
            f"{given!r} is no column type{hint}; there are {NAMES}, as text or pyarrow's"
        )
    if pa.types.is_dictionary(given):
        return column_type(given.value_type)
    if pa.types.is_large_string(given) or given == pa.string_view():
        return pa.string()
    if pa.types.is_large_binary(given) or given == pa.binary_view():
        return pa.binary()
    if pa.types.is_timestamp(given):
        return pa.timestamp("us", tz=given.tz)
    if pa.types.is_list(given) or pa.types.is_large_list(given):
        return pa.list_(column_type(given.value_type))
    return parse_type(str(given))


def may_be_key(given: pa.DataType) -> bool:
    return not pa.types.is_list(given)


def _family(given: pa.DataType) -> str:
    if pa.types.is_dictionary(given):
        return _family(given.value_type)
    for name, test in (
        ("integer", pa.types.is_integer),
        ("float", pa.types.is_floating),
        ("decimal", pa.types.is_decimal),
        ("date", pa.types.is_date),
        ("list", lambda t: pa.types.is_list(t) or pa.types.is_large_list(t)),
    ):
        if test(given):
            return name
    if pa.types.is_timestamp(given):
        return "instant" if given.tz is not None else "timestamp"
    if pa.types.is_string(given) or pa.types.is_large_string(given) or given == pa.string_view():
        return "string"
    if pa.types.is_binary(given) or pa.types.is_large_binary(given) or given == pa.binary_view():
        return "binary"
    return str(given)


_WIDENINGS: Final = {("integer", "float"), ("integer", "decimal"), ("date", "timestamp")}


_REMEDIES: Final = {
    ("timestamp", "instant"): "say whose time it is, as pyarrow.compute.assume_timezone(column, "
    "'UTC') or pandas' tz_localize('UTC')",
    ("instant", "timestamp"): "say whose clock is meant, as pyarrow.compute.local_timestamp("
    "column) or pandas' tz_convert('UTC').dt.tz_localize(None)",
}


def element_type(given: pa.DataType) -> pa.DataType:
    """Return the innermost element type of a list; any other type as it is."""
    while pa.types.is_list(given) or pa.types.is_large_list(given):
        given = given.value_type
    return given


def _castable(source: pa.DataType, target: pa.DataType) -> bool:
    if pa.types.is_null(source):
        return True
    families = (_family(source), _family(target))
    if families == ("list", "list"):
        return _castable(source.value_type, target.value_type)
    if families == ("float", "float"):
        return bool(source.bit_width <= target.bit_width)
    return families[0] == families[1] or families in _WIDENINGS


def cast(column: pa.ChunkedArray, target: pa.DataType, name: str) -> pa.ChunkedArray:
    """`column` as `target`, when that loses nothing.

    Raises:
        SchemaError: the types do not fit, or a value does not.
    """
    if column.type == target:
        return column
    if not _castable(column.type, target):
        pair = _family(element_type(column.type)), _family(element_type(target))
        remedy = _REMEDIES.get(pair, "convert it first")
        raise SchemaError(f"column {name!r} is {target}, the data has {column.type}: {remedy}")
    try:
        if pa.types.is_integer(column.type) and pa.types.is_decimal(target):
            # Arrow asks for digits enough for every int of the type; the values may have fewer.
            column = pc.cast(column, pa.decimal256(76, target.scale))
        return pc.cast(column, target, safe=True)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise SchemaError(
            f"column {name!r} is {target}, and a value of the data ({column.type}) does not fit "
            f"without loss: {error}"
        ) from None
