"""Column types: names, what may be a key, and which casts lose nothing."""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from numbers import Real
from operator import is_not
from typing import Any, Final

import pyarrow as pa

from txnkv.core import compute as pc
from txnkv.core.column_texts import JSON, UUID, require_decimals, require_json, uuids_of
from txnkv.core.value_codecs import zone
from txnkv.errors import SchemaError

DAY_MICROS: Final = 86_400_000_000
"""Times are in [0, a day), whatever their unit."""
_FLOAT32_END: Final = 2.0**128 - 2.0**103
"""From here on numbers are infinite as float32."""
_FEW: Final = 64
_TIMES: Final = (date, timedelta)
_NUMBERS: Final = (int, float)

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
    "time": pa.time64("us"),
    "time32[s]": pa.time32("s"),
    "time32[ms]": pa.time32("ms"),
    "time64[us]": pa.time64("us"),
    "duration": pa.duration("us"),
    "duration[us]": pa.duration("us"),
    "uuid": UUID,
    str(UUID): UUID,
    "json": JSON,
    str(JSON): JSON,
}
_DECIMAL = re.compile(r"decimal128\(\s*(\d+)\s*,\s*(-?\d+)\s*\)")
_ZONE = re.compile(r"tz=([^\]]+)\]")
_ZONED = re.compile(r"timestamp\[us,\s*tz=([^\]]+)\]")
_NESTED = re.compile(r"(list|map|struct)\s*<(.*)>", re.DOTALL)
_ELEMENT = re.compile(r"(?:\w+:\s*)?(.+?)(?:\s+not null)?", re.DOTALL)

NAMES: Final = (
    "bool, int8..int64, uint8..uint64, float32, float64, string, binary, date32, "
    "timestamp[us], timestamp[us, tz=UTC], time32[s], time32[ms], time64[us], duration[us], "
    "decimal128(p, s), uuid, json, list<...>, map<..., ...>, struct<name: ..., ...>"
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
    time: ": write 'time64[us]'",
    timedelta: ": write 'duration[us]'",
    uuid.UUID: ": write 'uuid'",
    list: ": write 'list<string>' or other elements",
    dict: ": write 'json', or 'map<string, int64>', or 'struct<name: string, age: int64>'",
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
        try:
            return pa.decimal128(int(found[1]), int(found[2]))
        except (ValueError, OverflowError) as error:
            raise SchemaError(f"{name!r}: {error}") from None
    if found := _ZONED.fullmatch(name):
        return pa.timestamp("us", tz=found[1].strip())
    if found := _NESTED.fullmatch(name):
        return _nested_type(found[1], found[2], text)
    raise SchemaError(f"{text!r} is not a column type; there are {NAMES}")


def _nested_type(kind: str, inside: str, text: str) -> pa.DataType:
    parts = [part.strip() for part in split_outside(inside)]
    if kind == "list" and (found := _ELEMENT.fullmatch(inside.strip())):
        return pa.list_(_inner(parse_type(found[1])))
    if kind == "map" and len(parts) == 2:
        return pa.map_(*(_inner(parse_type(part)) for part in parts))
    if kind == "struct":
        named = [part.partition(":")[::2] for part in parts]
        fields = {name.strip(): kind.strip().removesuffix(" not null") for name, kind in named}
        if all(fields) and all(fields.values()) and len(fields) == len(parts):
            return pa.struct([(name, _inner(parse_type(kind))) for name, kind in fields.items()])
    raise SchemaError(
        f"{text!r} is not a column type: write list<string>, map<string, int64>, or "
        "struct<name: string, age: int64> with a name for each field"
    )


def _inner(given: pa.DataType) -> pa.DataType:
    if isinstance(given, pa.BaseExtensionType):
        raise SchemaError(
            f"{type_name(given)} stands in a column of its own, not within a list, map or struct; "
            f"write {'string' if given == JSON else 'binary'} there"
        )
    return given


_OPENING: Final = "(<["
_CLOSING: Final = ")>]"


def split_outside(text: str, at: str = ",") -> list[str]:
    """Split at the commas, or another letter, outside of brackets."""
    parts, depth, start = [], 0, 0
    for i, letter in enumerate(text):
        depth += (letter in _OPENING) - (letter in _CLOSING)
        if letter == at and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    parts.append(text[start:])
    return parts


def type_name(given: pa.DataType) -> str:
    """The name of a type, which `parse_type` takes."""
    if isinstance(given, pa.BaseExtensionType):
        return "uuid" if given == UUID else "json" if given == JSON else str(given)
    return str(given)


def is_text(given: pa.DataType) -> bool:
    """Return True for each of Arrow's types of text."""
    return given in (pa.string(), pa.large_string(), pa.string_view())


def storage_type(given: pa.DataType) -> pa.DataType:
    """The type of the buffers of arrays of a type."""
    return given.storage_type if isinstance(given, pa.BaseExtensionType) else given


def comparable(column: pa.Array) -> pa.Array:
    """Return a column as Arrow's kernels compare it: UUIDs as bytes, 7 hundreds, decimals, as 7."""
    if pa.types.is_decimal(column.type) and column.type.scale < 0:
        return column.view(pa.decimal128(column.type.precision, 0))
    return column.storage if isinstance(column, pa.ExtensionArray) else column


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
    if is_text(given):
        return pa.string()
    if pa.types.is_large_binary(given) or given == pa.binary_view():
        return pa.binary()
    if pa.types.is_timestamp(given):
        return pa.timestamp("us", tz=given.tz)
    if pa.types.is_time64(given):
        return pa.time64("us")
    if pa.types.is_duration(given):
        return pa.duration("us")
    if pa.types.is_list(given) or pa.types.is_large_list(given):
        return pa.list_(_inner(column_type(given.value_type)))
    if pa.types.is_map(given):
        return pa.map_(_inner(column_type(given.key_type)), _inner(column_type(given.item_type)))
    if pa.types.is_struct(given):
        made = pa.struct([(field.name, _inner(column_type(field.type))) for field in given])
        if made != _parsed(made):
            raise SchemaError(
                f"{given} cannot be a column: the names of its fields differ from each other, and "
                "have no brackets, commas or colons"
            )
        return made
    if isinstance(given, pa.BaseExtensionType) and given.extension_name == "arrow.json":
        return JSON
    return parse_type(str(given))


def _parsed(given: pa.DataType) -> pa.DataType | None:
    try:
        return parse_type(str(given))
    except SchemaError:
        return None


def require_zones(schema: Iterable[pa.Field]) -> None:
    """Refuse time zones that are none, also within lists, maps and structs.

    Raises:
        SchemaError: there is one.
    """
    for field in schema:
        for name in _ZONE.findall(str(field.type)):
            zone(name)


def may_be_key(given: pa.DataType) -> bool:
    """Return True when values of the type have an order: they may be keys, and be compared."""
    return not pa.types.is_nested(given) and given != JSON


def _is_list(given: pa.DataType) -> bool:
    """Return True for Arrow's types of lists but views, which Arrow casts wrongly."""
    tests = pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list
    return any(test(given) for test in tests)


def _family(given: pa.DataType) -> str:
    if pa.types.is_dictionary(given):
        return _family(given.value_type)
    for name, test in (
        ("integer", pa.types.is_integer),
        ("float", pa.types.is_floating),
        ("decimal", pa.types.is_decimal),
        ("date", pa.types.is_date),
        ("time", pa.types.is_time),
        ("duration", pa.types.is_duration),
        ("map", pa.types.is_map),
        ("struct", pa.types.is_struct),
        ("list", _is_list),
    ):
        if test(given):
            return name
    if pa.types.is_timestamp(given):
        return "instant" if given.tz is not None else "timestamp"
    if is_text(given):
        return "string"
    if pa.types.is_binary(given) or pa.types.is_large_binary(given) or given == pa.binary_view():
        return "binary"
    return type_name(given)


_WIDENINGS: Final = {
    ("integer", "float"),
    ("integer", "decimal"),
    ("string", "decimal"),
    ("date", "timestamp"),
    ("string", "json"),
    ("json", "string"),
    ("string", "uuid"),
    ("string", "binary"),
    ("fixed_size_binary[16]", "uuid"),
    ("binary", "uuid"),
}


_REMEDIES: Final = {
    ("timestamp", "instant"): "say whose time it is, as pyarrow.compute.assume_timezone(column, "
    "'UTC') or pandas' tz_localize('UTC')",
    ("instant", "timestamp"): "say whose clock is meant, as pyarrow.compute.local_timestamp("
    "column) or pandas' tz_convert('UTC').dt.tz_localize(None)",
    ("struct", "json"): "make a text of each value, as json.dumps(value)",
}


def element_type(given: pa.DataType) -> pa.DataType:
    """Return the innermost element type of a list; any other type as it is."""
    while _is_list(given):
        given = given.value_type
    return given


def _narrowed(given: pa.DataType, target: pa.DataType) -> pa.DataType:
    """The type to cast to on the way to another: Arrow overflows in silence where a decimal has
    more digits before the point than the other one has room for.
    """
    of = pa.types
    if of.is_decimal(target):
        if _family(given) == "string":
            return pa.decimal256(76, target.scale)
        if not of.is_decimal(given):
            return given
        digits = max(target.precision - target.scale + given.scale, 1)
        kind = pa.decimal256 if of.is_decimal256(given) else pa.decimal128
        return given if digits >= given.precision else kind(digits, given.scale)
    if _is_list(given) and _is_list(target):
        inner = _narrowed(given.value_type, target.value_type)
        return given if inner == given.value_type else pa.list_(inner)
    if of.is_map(given) and of.is_map(target):
        return pa.map_(given.key_type, _narrowed(given.item_type, target.item_type))
    if of.is_struct(given) and of.is_struct(target) and given.names == target.names:
        pairs = zip(given, target, strict=True)
        return pa.struct([each.with_type(_narrowed(each.type, to.type)) for each, to in pairs])
    return given


def castable(source: pa.DataType, target: pa.DataType) -> bool:
    """Return True when values of one type may be ones of another without loss."""
    families = (_family(source), _family(target))
    if families[0] == families[1] and pa.types.is_nested(target):
        return all(castable(*pair) for pair in _children(source, target))
    if families == ("float", "float"):
        return bool(source.bit_width <= target.bit_width)
    if families[1] == "binary" and families[0].startswith("fixed_size_binary"):
        return True
    return pa.types.is_null(source) or families[0] == families[1] or families in _WIDENINGS


def _children(
    source: pa.DataType, target: pa.DataType
) -> Iterator[tuple[pa.DataType, pa.DataType]]:
    """The types within two nested types of a family; of a field that is new or lost, no pair that
    could be cast.
    """
    if pa.types.is_map(target):
        yield source.key_type, target.key_type
        yield source.item_type, target.item_type
    elif pa.types.is_struct(target):
        for field in source:
            at = target.get_field_index(field.name)
            yield field.type, pa.null() if at < 0 else target.field(at).type
    else:
        yield source.value_type, target.value_type


def cast(column: pa.ChunkedArray, target: pa.DataType, name: str) -> pa.ChunkedArray:
    """`column` as `target`, when that loses nothing, and when the values are what they should be.

    Raises:
        SchemaError: the types do not fit, or a value does not.
    """
    if column.type == target:
        return _sound(column, name)
    if isinstance(column.type, pa.BaseExtensionType) and column.type not in (UUID, JSON):
        storage = column.type.storage_type  # as who does not know the type reads it
        column = pa.chunked_array([chunk.storage for chunk in column.chunks], storage)
        return cast(column, target, name)
    if pa.types.is_run_end_encoded(column.type):
        with suppress(pa.ArrowNotImplementedError):  # runs of views and of dictionaries
            return cast(pc.run_end_decode(column), target, name)
    if not castable(column.type, target):
        pair = _family(element_type(column.type)), _family(element_type(target))
        remedy = _REMEDIES.get(pair, "convert it first")
        wanted, found = type_name(target), type_name(column.type)
        raise SchemaError(f"column {name!r} is {wanted}, the data has {found}: {remedy}")
    try:
        if pa.types.is_integer(column.type) and pa.types.is_decimal(target):
            # Arrow asks for digits enough for every int of the type; the values may have fewer.
            column = pc.cast(column, pa.decimal256(76, target.scale))
        if pa.types.is_decimal(target) and _family(column.type) == "string":
            require_decimals(column)
        if (narrow := _narrowed(column.type, target)) != column.type:
            column = pc.cast(column, narrow)
        if target == UUID and _family(column.type) == "string":
            return uuids_of(column, name)
        if target == UUID and _family(column.type) == "binary":
            column = pc.cast(pc.cast(column, pa.binary()), pa.binary(16))
        return _sound(pc.cast(column, target, safe=True), name)
    except (ValueError, pa.ArrowNotImplementedError) as error:
        raise SchemaError(
            f"column {name!r} is {type_name(target)}, and a value of the data "
            f"({type_name(column.type)}) does not fit without loss: {error}"
        ) from None


def numpy_kind(value: Any) -> str:
    """The kind of a value's type as numpy names it; "none" for one of others."""
    return getattr(getattr(value, "dtype", None), "kind", "none")


def plain_values(values: Iterable[Any]) -> list[Any] | None:
    """Values with numpy's scalars as those of Python, where these are the same; None: with none."""
    plain = list(map(_plain, values))
    return plain if any(map(is_not, plain, values)) else None


def _plain(value: Any) -> Any:
    kind = numpy_kind(value)
    if isinstance(value, pa.TimestampScalar | pa.DurationScalar) and value.type.unit == "ns":
        zoned = isinstance(value, pa.TimestampScalar)
        with suppress(pa.ArrowInvalid):  # it has more digits
            return value.cast(pa.timestamp("us", value.type.tz) if zoned else pa.duration("us"))
    if kind == "none" or value.ndim:
        return value
    found = value.item()
    if kind in "mM" and isinstance(found, int):  # of a finer unit, with digits that are 0 perhaps
        coarse = value.astype(f"{kind}8[us]")
        found = coarse.item() if coarse == value else found
    return found if isinstance(found, _TIMES if kind in "mM" else _NUMBERS) else value


def inexact(value: Any) -> str | None:
    """Say what is wrong with a value of which pyarrow takes a part for a time; None: nothing is."""
    kind = numpy_kind(value)
    if isinstance(value, str):
        return f"{value!r} is a str: give a date, datetime or timedelta"
    if type(value).__name__ == "NaTType":
        return "pandas' NaT is no time: give None"
    if kind == "none" and getattr(value, "nanosecond", getattr(value, "nanoseconds", 0)) > 0:
        return f"{value!r} has more digits of a second than the column, which would be lost"
    has_part = hasattr(value, "__int__") and not hasattr(value, "__index__")
    is_nat = kind in "mM" and not value.ndim and value != value
    if kind in "fbc" or (kind == "none" and has_part) or is_nat:
        return f"{value!r} is a {type(value).__name__}"
    return None


def other_unit(values: Any, unit: str) -> str | None:
    """Say what is wrong with an array of numpy's times, whose unit pyarrow does not look at in a
    list; None: nothing is.
    """
    if numpy_kind(values) not in "mM" or values.dtype.str.endswith(f"[{unit}]"):
        return None
    right = f"{values.dtype.kind}8[{unit}]"
    return f"it is an array of {values.dtype}: give .astype({right!r}).tolist()"


def require_finite(array: pa.Array, values: Iterable[Any]) -> None:
    """Refuse numbers that Arrow made infinite, for float32 has none as large.

    Args:
        array: made of the values.
        values: Python's.

    Raises:
        ValueError: there is such a number.
    """
    if "float" not in str(array.type) or not any(map(_is_infinite, _leaves(array))):
        return
    given = [*_numbers(values)]
    if sum(map(math.isinf, _numbers(array.to_pylist()))) > sum(map(math.isinf, given)):
        large = next(each for each in given if _FLOAT32_END <= abs(each) < math.inf)
        raise ValueError(f"{large!r} is too large for a float32")


def _is_infinite(leaf: pa.Array) -> bool:
    if not pa.types.is_float32(leaf.type):
        return False
    if len(leaf) > _FEW:
        return bool(pc.any(pc.is_inf(leaf)).as_py())
    values = leaf.to_pylist()  # loading Arrow's functions takes a while
    return math.inf in values or -math.inf in values


def _leaves(array: pa.Array) -> Iterator[pa.Array]:
    """Arrays without parts, of which one is made."""
    if pa.types.is_map(array.type):
        yield from _leaves(array.keys)
        yield from _leaves(array.items)
    elif pa.types.is_nested(array.type):
        parts = array.flatten()
        for part in [parts] if isinstance(parts, pa.Array) else parts:
            yield from _leaves(part)
    else:
        yield array


def _numbers(value: Any) -> Iterator[float]:
    """All numbers in a Python value."""
    if isinstance(value, Mapping):
        value = [*value.items()]
    if isinstance(value, Real):
        yield float(value)
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
        for each in value:
            yield from _numbers(each)


def require_valid(array: pa.Array, name: str) -> None:
    """Refuse what Arrow lets stand in its buffers, and no reader takes: texts that are no UTF-8,
    decimals of too many digits, lists whose ends do not fit, and times within lists and structs
    that are not of a day; `cast` looks at those of a column itself.

    Raises:
        SchemaError: there is such a value.
    """
    if pa.types.is_primitive(array.type):
        return
    try:
        array.validate()
        sized = pa.types.is_nested(array.type) and "union<" not in str(array.type)  # nbytes crashes
        if sized and 2 * array.nbytes < array.get_total_buffer_size():
            # A small part of a large array: Arrow would look at all values that it lies among.
            array = pa.concat_arrays([array, array[:0]])
        array.validate(full=True)
    except pa.ArrowInvalid as error:
        raise SchemaError(f"column {name!r} is {type_name(array.type)}: {error}") from None


def repeated(kind: pa.DataType | str, value: Any, n: int) -> pa.Array:
    """Return a column of n times the same value; None for nulls."""
    return pa.nulls(n, kind) if value is None else pa.repeat(pa.scalar(value, kind), n)


def require_valid_columns(data: pa.RecordBatch | pa.Table) -> None:
    """`require_valid` of all columns, before they are sent: a writer reads where they point.

    Raises:
        SchemaError: there is such a value.
    """
    for name, column in zip(data.schema.names, data.columns, strict=True):
        for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
            require_valid(chunk, name)


def _sound(column: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    """Refuse texts that are no JSON, and times that are not of a day."""
    if column.type == JSON:
        for chunk in column.chunks:
            require_json(chunk, name)
    elif pa.types.is_time(column.type):
        bounds = pc.min_max(pc.cast(pc.cast(column, pa.time64("us")), pa.int64())).as_py()
        if bounds["min"] is not None and (bounds["min"] < 0 or bounds["max"] >= DAY_MICROS):
            raise SchemaError(f"column {name!r} is {column.type}: a value is no time of a day")
    return column
