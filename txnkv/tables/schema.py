"""The schema of a table: typed columns and a primary key."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, time
from decimal import InvalidOperation
from typing import Any, Final, NamedTuple, TypeAlias

import pyarrow as pa

from txnkv.core import (
    JSON,
    UUID,
    column_type,
    decimal_of,
    inexact,
    json_of,
    may_be_key,
    no_decimal,
    numpy_kind,
    other_unit,
    parse_type,
    plain_values,
    require_finite,
    require_json,
    type_name,
    uuid_of,
)
from txnkv.errors import SchemaError, as_names, require_number, require_text


@dataclass(frozen=True)
class Column:
    """A column's type, whether it may be null, and its default.

    Args:
        type: an Arrow type, or its name; a "?" behind the name means nullable.
        nullable: whether the column may hold nulls.
        default: the value of rows that are inserted without one.
    """

    type: pa.DataType | str
    nullable: bool = False
    default: Any = None

    def resolved(self) -> Column:
        """The same with an Arrow type that columns can have."""
        if isinstance(self.type, str):
            nullable = self.nullable or self.type.endswith("?")
            return Column(parse_type(self.type.removesuffix("?")), nullable, self.default)
        return Column(column_type(self.type), self.nullable, self.default)


class Before(NamedTuple):
    """A column in rows that are older than it is now.

    Attributes:
        fill: the value in rows that have no such column: its default when it was added.
        former: the numbers and types that it had before it was widened, the latest first.
    """

    fill: Any
    former: tuple[tuple[int, pa.DataType], ...] = ()


class IndexInfo(NamedTuple):
    """An index of a table, as the schema of the table names it.

    Attributes:
        table: id of the hidden table that has its entries.
        columns: numbers of the indexed columns, in their order.
        unique: no two rows have the same values there; those with a null among them aside.
        ready: every row has its entry. Else it is being built: written, and not read.
    """

    table: int
    columns: tuple[int, ...]
    unique: bool
    ready: bool


_LONGEST: Final = 100 * 366 * 86400
"""Seconds that a row may be given to live."""


class TimeToLive(NamedTuple):
    """The time for which rows of a table live.

    Attributes:
        column: a timestamp; a row without one lives for ever.
        seconds: from then on.
    """

    column: str
    seconds: float


class Schema:
    """Typed columns with a primary key of one or more of them.

    Args:
        columns: name to type; a type is an Arrow type, its name ("int64", "float64?" for a
            nullable one), or a `Column`.
        primary_key: names of the key columns, in key order. They are never null.
        ttl: a column of timestamps, and seconds: a row is deleted so long after the time that it
            has there, within about a minute, by whoever has the store open, and is seen until then.

    Attributes:
        ids: by name, the number of a column in its table: it stays when the column is renamed.
        next_id: the number of the next column that the table is given; none is given twice.
        before: by name, how rows on disk that are older than a change have a column.
        indexes: those of the table; no part of what makes two schemas equal.

    Raises:
        SchemaError: a type is unknown, or the key names no column or a list; `ttl` names no column
            of timestamps.
    """

    def __init__(
        self,
        columns: Mapping[str, str | pa.DataType | Column],
        primary_key: Sequence[str],
        ttl: tuple[str, float] | None = None,
    ) -> None:
        self.primary_key = tuple(as_names("primary_key", primary_key))
        self.columns: dict[str, Column] = {}
        if not isinstance(columns, Mapping):
            raise TypeError(
                "columns is a mapping of names to types, as {'id': 'int64', 'note': 'string?'}, "
                f"not {type(columns).__name__}; of Arrow data Schema.from_arrow(...) takes them"
            )
        for name, given in columns.items():
            if not isinstance(name, str) or not name:
                raise SchemaError(f"a column's name is a non-empty string, not {name!r}")
            column = given if isinstance(given, Column) else Column(given)
            try:
                require_text("its name", name)
                self.columns[name] = column.resolved()
            except (SchemaError, ValueError) as error:
                raise SchemaError(f"column {name!r}: {error}") from None
        self.ids: dict[str, int] = {name: id for id, name in enumerate(self.columns)}
        self.next_id = len(self.columns)
        self.before: dict[str, Before] = {}
        self.indexes: tuple[IndexInfo, ...] = ()
        self.shapes: dict[Any, Any] = {}  # see `read.predicate`
        self.orders: dict[Any, Any] = {}  # see `read.ordering`
        self._check_key()
        self.arrow: pa.Schema = pa.schema(
            [pa.field(name, column.type, column.nullable) for name, column in self.columns.items()]
        )
        for name, column in self.columns.items():
            if column.default is not None:
                self.columns[name] = replace(column, default=_default(name, column))
        self.ttl = None if ttl is None else self._checked_ttl(ttl)

    def _checked_ttl(self, ttl: tuple[str, float]) -> TimeToLive:
        try:
            made = TimeToLive(*ttl)
            require_number("ttl", made.seconds)
            valid = 0 <= made.seconds <= _LONGEST and isinstance(made.column, str)
        except TypeError:
            valid = False
        if not valid:
            raise SchemaError(
                f"ttl is a column and seconds, as ('seen', 3600), at most {_LONGEST:,}; not {ttl!r}"
            )
        kind = self.arrow.field(self.position(made.column)).type
        if not pa.types.is_timestamp(kind):
            made_of = f"{made.column!r} is {type_name(kind)}"
            raise SchemaError(f"ttl goes by a column of timestamps, and {made_of}")
        return made

    @classmethod
    def from_arrow(cls, schema: pa.Schema, primary_key: Sequence[str]) -> Schema:
        """The schema of Arrow data; key columns become non-nullable."""
        keys = as_names("primary_key", primary_key)
        columns = {f.name: Column(f.type, f.nullable and f.name not in keys) for f in schema}
        return cls(columns, primary_key=keys)

    @classmethod
    def numbered(
        cls,
        columns: Mapping[str, str | pa.DataType | Column],
        primary_key: Sequence[str],
        ids: Mapping[str, int],
        next_id: int,
        before: Mapping[str, Before] | None = None,
        indexes: Iterable[IndexInfo] = (),
        ttl: tuple[str, float] | None = None,
    ) -> Schema:
        """The schema of a table whose columns have these numbers, and had others before."""
        made = cls(columns, primary_key, ttl)
        made.ids, made.next_id, made.before = dict(ids), next_id, dict(before or {})
        made.indexes = tuple(indexes)
        return made

    def with_indexes(self, indexes: Iterable[IndexInfo]) -> Schema:
        """The same with these indexes."""
        numbers = self.ids, self.next_id, self.before
        return Schema.numbered(self.columns, self.primary_key, *numbers, indexes, self.ttl)

    def names_of(self, index: IndexInfo) -> tuple[str, ...]:
        """The columns of an index by their names."""
        names = {id: name for name, id in self.ids.items()}
        return tuple(names[id] for id in index.columns)

    @property
    def names(self) -> list[str]:
        return list(self.columns)

    @property
    def key_types(self) -> list[pa.DataType]:
        return [self.columns[name].type for name in self.primary_key]

    @property
    def value_columns(self) -> list[str]:
        """The columns that are not of the key."""
        return [name for name in self.columns if name not in self.primary_key]

    def position(self, name: str) -> int:
        """The column's number in the schema.

        Raises:
            SchemaError: there is no such column.
        """
        position: int = self.arrow.get_field_index(name) if isinstance(name, str) else -1
        if position < 0:
            raise SchemaError(f"there is no column {name!r}; there are {', '.join(self.columns)}")
        return position

    def stored(self, name: str, there: Container[int]) -> tuple[int, pa.DataType] | None:
        """Find a column in rows that have the columns of some numbers.

        Returns:
            The number under which they have it, and its type there; None where they have it not.
        """
        if (id := self.ids[name]) in there:
            return id, self.columns[name].type
        before = self.before.get(name)
        former = () if before is None else before.former
        return next((each for each in former if each[0] in there), None)

    def fill(self, name: str) -> Any:
        """Return the value of a column in rows that have no such column; None for null."""
        before = self.before.get(name)
        return self.columns[name].default if before is None else before.fill

    def differences(self, given: Schema) -> list[str]:
        """Return, for people, how this schema differs from another; nothing when they are equal."""
        found = [f"it has a column {name!r}" for name in self.names if name not in given.columns]
        found += [f"it has no column {name!r}" for name in given.names if name not in self.columns]
        for name in [name for name in self.names if name in given.columns]:
            here, there = self.columns[name], given.columns[name]
            if here != there:
                found.append(f"its column {name!r} is {_described(here)}, not {_described(there)}")
        if not found and self.names != given.names:
            found.append(f"its columns are in the order {', '.join(self.names)}")
        if self.primary_key != given.primary_key:
            keys = (", ".join(self.primary_key), ", ".join(given.primary_key))
            found.append("its primary key is ({}), not ({})".format(*keys))
        if self.ttl != given.ttl:
            found.append(f"its rows live {_lives(self.ttl)}, not {_lives(given.ttl)}")
        return found

    def _check_key(self) -> None:
        if not self.primary_key:
            raise SchemaError("a primary key names at least one column, as primary_key=['id']")
        if len(set(self.primary_key)) != len(self.primary_key):
            raise SchemaError(f"the primary key {list(self.primary_key)} names a column twice")
        for name in self.primary_key:
            column = self.columns.get(name)
            if column is None:
                raise SchemaError(
                    f"the primary key names {name!r}; the columns are {', '.join(self.columns)}"
                )
            if not may_be_key(column.type):
                raise SchemaError(
                    f"key column {name!r} is {type_name(column.type)}, which cannot be a key: its "
                    "values have no order"
                )
            if column.nullable:
                raise SchemaError(f"key column {name!r} cannot be nullable: leave out its '?'")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schema) or self.primary_key != other.primary_key:
            return False
        return list(self.columns.items()) == list(other.columns.items())

    def __hash__(self) -> int:
        return hash((tuple(self.columns), self.primary_key))

    def type_names(self) -> dict[str, str]:
        """The types by column as they are written, with a ? behind those that may be null."""
        return {
            name: f"{type_name(column.type)}{'?' if column.nullable else ''}"
            for name, column in self.columns.items()
        }

    def __repr__(self) -> str:
        columns = ", ".join(f"{name!r}: '{kind}'" for name, kind in self.type_names().items())
        ttl = "" if self.ttl is None else f", ttl={tuple(self.ttl)}"
        return f"Schema({{{columns}}}, primary_key={list(self.primary_key)}{ttl})"

    # -- stored form -------------------------------------------------------------------

    def to_json(self) -> str:
        # With indexes under another name: a version that knows of none, and has the store open by
        # now, is not to read the schema and write past them.
        return json.dumps(
            {
                "indexed_columns" if self.indexes else "columns": [
                    {
                        "id": self.ids[name],
                        "name": name,
                        "type": type_name(column.type),
                        "nullable": column.nullable,
                        "default": _value_text(column.type, column.default),
                        **self._before_entries(name, column),
                    }
                    for name, column in self.columns.items()
                ],
                "primary_key": list(self.primary_key),
                "next_id": self.next_id,
                **({"indexes": self.indexes} if self.indexes else {}),
                **({} if self.ttl is None else {"ttl": self.ttl}),
            }
        )

    def _before_entries(self, name: str, column: Column) -> dict[str, Any]:
        before = self.before.get(name)
        if before is None:
            return {}
        former = [[id, type_name(kind)] for id, kind in before.former]
        return {"fill": _value_text(column.type, before.fill), "former": former}

    @classmethod
    def from_json(cls, text: str) -> Schema:
        stored = json.loads(text)
        columns = stored["indexed_columns" if "indexes" in stored else "columns"]
        return cls.numbered(
            {
                entry["name"]: Column(
                    parse_type(entry["type"]), entry["nullable"], _value_of(entry["default"])
                )
                for entry in columns
            },
            stored["primary_key"],
            {entry["name"]: entry["id"] for entry in columns},
            stored.get("next_id", len(columns)),  # before tables could be altered: none was
            {
                entry["name"]: Before(
                    _value_of(entry["fill"]),
                    tuple((id, parse_type(kind)) for id, kind in entry["former"]),
                )
                for entry in columns
                if "fill" in entry
            },
            (
                IndexInfo(table, tuple(numbers), unique, ready)
                for table, numbers, unique, ready in stored.get("indexes", ())
            ),
            stored.get("ttl"),
        )


def _default(name: str, column: Column) -> Any:
    """The default of a column, as the column gives it back."""
    try:
        return normal(name, column.type, column.default)
    except SchemaError as error:
        raise SchemaError(f"the default of {error}") from None


def _lives(ttl: TimeToLive | None) -> str:
    return "for ever" if ttl is None else f"{ttl.seconds:g} s from {ttl.column!r} on"


def _described(column: Column) -> str:
    default = "" if column.default is None else f" with default {column.default!r}"
    return f"{type_name(column.type)}{'?' if column.nullable else ''}{default}"


def _value_text(kind: pa.DataType | str, value: Any) -> str | None:
    if value is None:
        return None
    batch = pa.record_batch([pa.array([value], kind)], names=["default"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return base64.b64encode(sink.getvalue()).decode()


def _value_of(text: str | None) -> Any:
    if text is None:
        return None
    return pa.ipc.open_stream(base64.b64decode(text)).read_all()["default"][0].as_py()


def widened(array: pa.Array, kind: pa.DataType | str) -> pa.Array:
    """Return a stored column in the type that it has by now, which has all values of its own."""
    return array if array.type == kind else array.cast(kind)


_Complaint: TypeAlias = Callable[[Any], str | None]
"""A function that says what is wrong with a value; None when nothing is known to be."""


def column_array(name: str, kind: pa.DataType, values: Sequence[Any]) -> pa.Array:
    """Python values as a column, when they fit without loss.

    Raises:
        SchemaError: one does not.
    """
    complaint = _complaint(kind)
    if complaint is not None:
        for value in values:
            wrong = None if value is None else complaint(value)
            if wrong is not None:
                raise SchemaError(f"column {name!r} is {type_name(kind)}: {wrong}")
    try:
        array = pa.array(_converted(kind, values), kind)
        require_finite(array, values)
    except (pa.ArrowException, OverflowError, TypeError, ValueError, InvalidOperation) as error:
        if (plain := plain_values(values)) is not None:
            return column_array(name, kind, plain)
        raise SchemaError(f"column {name!r} is {type_name(kind)}: {error}") from None
    if kind == JSON:
        require_json(array, name)
    return array


def normal(name: str, kind: pa.DataType, value: Any) -> Any:
    """A value as the column gives it back; SchemaError where it does not fit."""
    scalar = column_array(name, kind, [value])[0]
    try:
        return scalar.as_py()
    except (ValueError, OverflowError):  # an instant that Python cannot name is taken as a number
        return getattr(scalar, "value", value)


def _converted(kind: pa.DataType, values: Sequence[Any]) -> Sequence[Any]:
    """Values that pyarrow does not take, as ones that it does."""
    if kind == JSON:
        return [json_of(value) for value in values]
    if kind == UUID:
        return [uuid_of(value) for value in values]
    if pa.types.is_decimal(kind):
        return list(map(decimal_of, values))
    return values


def _complaint(kind: pa.DataType) -> _Complaint | None:
    """Return what finds values that pyarrow would change in silence, or refuse in its own words."""
    is_a = pa.types
    if is_a.is_integer(kind):
        return _of_type(lambda value: isinstance(value, bool) or not hasattr(value, "__index__"))
    if kind == JSON:
        return _of_type(lambda value: isinstance(value, bytes | bytearray | memoryview))
    if is_a.is_string(kind) or is_a.is_binary(kind):
        texts = _TEXTS if is_a.is_string(kind) else _BYTES
        return _of_type(lambda value: not isinstance(value, texts))
    if is_a.is_date(kind):
        return _no_date
    if is_a.is_time(kind):
        return _no_time(_TICKS[kind.unit])
    if is_a.is_timestamp(kind):
        return _without_zone if kind.tz is not None else _with_zone
    if is_a.is_duration(kind):
        return inexact
    if is_a.is_decimal(kind):
        return no_decimal
    if is_a.is_map(kind):
        return _in_map(_complaint(kind.key_type), _complaint(kind.item_type))
    if is_a.is_struct(kind):
        return _in_struct({field.name: _complaint(field.type) for field in kind})
    if is_a.is_floating(kind):
        return _too_large
    if is_a.is_list(kind):
        of = kind.value_type
        return _no_text(_too_large if is_a.is_floating(of) else _in_list(_complaint(of)))
    return None


def _of_type(unfit: Callable[[Any], bool]) -> _Complaint:
    return lambda value: f"{value!r} is a {type(value).__name__}" if unfit(value) else None


_TEXTS: Final = str | pa.Scalar
_BYTES: Final = _TEXTS | bytes | bytearray | memoryview
_TICKS: Final = {"s": 1_000_000, "ms": 1_000, "us": 1}


def _no_time(tick: int) -> _Complaint:
    def look(value: Any) -> str | None:
        if not isinstance(value, time):
            return f"{value!r} is a {type(value).__name__}, not a datetime.time"
        if value.tzinfo is not None:
            return f"{value!r} has a time zone, which would be lost: value.replace(tzinfo=None)"
        if value.microsecond % tick:
            return f"{value!r} has more digits, which would be lost; time64[us] keeps them"
        return None

    return look


def _no_date(value: Any) -> str | None:
    kind = numpy_kind(value)
    is_fine = kind == "M" and value.dtype.str[-3] in "npfa"  # finer than a microsecond
    if (isinstance(value, datetime) and value == value) or kind == "m" or is_fine:
        return f"{value!r} is a {type(value).__name__}"
    return inexact(value)


def _without_zone(value: Any) -> str | None:
    naive = isinstance(value, datetime) and value.tzinfo is None and value == value  # no NaT
    if naive or numpy_kind(value) == "M":  # numpy's have no zone
        return (
            f"{value!r} has no time zone and so names no instant. Say whose time it is, as "
            "value.replace(tzinfo=timezone.utc); a column of timestamp[us] takes it as it is"
        )
    return _no_instant(value)


def _with_zone(value: Any) -> str | None:
    if isinstance(value, datetime) and value.tzinfo is not None:
        return (
            f"{value!r} has a time zone, which would be lost. Say whose clock is meant, as "
            "value.astimezone(timezone.utc).replace(tzinfo=None); a column of "
            "timestamp[us, tz=UTC] takes it as it is"
        )
    return _no_instant(value)


def _no_instant(value: Any) -> str | None:
    if isinstance(value, str) or (isinstance(value, date) and not isinstance(value, datetime)):
        return f"{value!r} is a {type(value).__name__}: give a datetime"
    return inexact(value)


def _too_large(value: Any) -> str | None:
    """An unsigned number of numpy, or some, which pyarrow takes for signed ones."""
    if numpy_kind(value) == "u" and value.size and value.max() >= 1 << 63:
        return f"{value!r} is too large: a float has not all its digits"
    kinds = set(map(type, value)) if isinstance(value, list | tuple) else ()
    return _first(map(_too_large, value)) if any(hasattr(T, "dtype") for T in kinds) else None


def _first(found: Iterable[str | None]) -> str | None:
    return next((wrong for wrong in found if wrong is not None), None)


def _no_text(look: _Complaint | None) -> _Complaint:
    """Text and bytes are no lists of their parts."""
    text = _of_type(lambda value: isinstance(value, str | bytes | bytearray))
    return lambda value: text(value) or (None if look is None else look(value))


def _in_list(complaint: _Complaint | None) -> _Complaint | None:
    if complaint is None:
        return None

    def look(values: Any) -> str | None:
        if not isinstance(values, Iterable) or not getattr(values, "ndim", 1):
            return None  # pyarrow says what it is
        wrong = other_unit(values, "D" if complaint is _no_date else "us")
        return wrong or _first(complaint(value) for value in values if value is not None)

    return look


def _in_map(key: _Complaint | None, item: _Complaint | None) -> _Complaint | None:
    looks = (_in_list(key), _in_list(item))

    def look(values: Any) -> str | None:
        try:
            pairs = list(values.items() if isinstance(values, Mapping) else values)
            columns = ([name for name, _ in pairs], [value for _, value in pairs])
        except (TypeError, ValueError):
            return f"{values!r} is no dict, and no list of pairs"
        return _first(look(part) for look, part in zip(looks, columns, strict=True) if look)

    return look


def _in_struct(complaints: Mapping[str, _Complaint | None]) -> _Complaint:
    def look(value: Any) -> str | None:
        if not isinstance(value, Mapping):
            return f"{value!r} is a {type(value).__name__}, not a dict of its fields"
        unknown = [name for name in value if name not in complaints]
        if unknown:
            return f"{value!r} has {unknown[0]!r}; the fields are {', '.join(complaints)}"
        given = [(complaints[name], part) for name, part in value.items() if part is not None]
        return _first(look(part) for look, part in given if look is not None)

    return look
