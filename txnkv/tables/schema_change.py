"""Changes of a table's schema: columns added, renamed, dropped, widened; the key stays.

A column has a number for as long as it is there with one type, and rows on disk know its number
alone. So a schema can be changed without a look at any row:

    id 0  total 1  note 2         renamed note to text, dropped total, added total
    id 0  text 2   total 3        row sets have 0 1 2: of them 1 is not read any more, and for 3
                                  they give the default
    id 0  text 2   total 4        total widened, from int32 to int64: row sets with 3 are read as
                                  int32 and cast; what is written from here on has 4

A value of a row that has no such column is the *fill*: the default that the column had when it was
added, or null. So a column that is added is nullable or has a default; a later default is that of
rows that are inserted later, and the fill stays.

A column that is not to be nullable any more has to have a value in every row: `tightened` names
those that are to be looked at. Rows that a transaction had written before may have none, so it is
refused at its commit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import pyarrow as pa

from txnkv.coordinator import Timestamp
from txnkv.core import type_name
from txnkv.errors import SchemaError
from txnkv.tables.schema import Before, Column, Schema

AnyColumn: TypeAlias = str | pa.DataType | Column
"""A column as `Schema` takes it."""
TtlChange: TypeAlias = tuple[str, float] | Literal["keep"] | None
"""The `ttl` of a `Schema`, or that it stays."""


@dataclass(frozen=True)
class SchemaChange:
    """A change of a schema; columns are named as they were before it.

    Attributes:
        add: new columns by name, behind those that there are; each is nullable or has a default.
        rename: new names by those that there are.
        drop: names.
        widen: types that have all values of the present ones.
        default: values, None for no default.
        nullable: whether columns may hold nulls.
        ttl: as of a `Schema`, of the columns as they are named then; "keep" as it is.
    """

    add: Mapping[str, AnyColumn] = field(default_factory=dict)
    rename: Mapping[str, str] = field(default_factory=dict)
    drop: Sequence[str] = ()
    widen: Mapping[str, str | pa.DataType] = field(default_factory=dict)
    default: Mapping[str, Any] = field(default_factory=dict)
    nullable: Mapping[str, bool] = field(default_factory=dict)
    ttl: TtlChange = "keep"

    @classmethod
    def of(
        cls,
        add: Mapping[str, AnyColumn] | None,
        rename: Mapping[str, str] | None,
        drop: Sequence[str],
        widen: Mapping[str, str | pa.DataType] | None,
        default: Mapping[str, Any] | None,
        nullable: Mapping[str, bool] | None,
        ttl: TtlChange,
    ) -> SchemaChange:
        """Return the change of these arguments of `Table.alter`.

        Raises:
            TypeError: `drop` is no list, another one no mapping, or `nullable` is neither True nor
                False.
        """
        if isinstance(drop, str):
            raise TypeError(f"drop is a list of names, as [{drop!r}]")
        if not isinstance(drop, Iterable):
            raise TypeError(f"drop is a list of names, as ['a'], not {drop!r}")
        named = {"add": add, "rename": rename, "widen": widen}
        for what, given in (*named.items(), ("default", default), ("nullable", nullable)):
            if given is not None and not isinstance(given, Mapping):
                raise TypeError(f"{what} is a mapping by column, as {{'a': ...}}, not {given!r}")
        for name, value in (nullable or {}).items():
            if not isinstance(value, bool):
                raise TypeError(f"nullable is True or False by column, not {value!r} for {name!r}")
        return cls(
            dict(add or {}),
            dict(rename or {}),
            list(drop),
            dict(widen or {}),
            dict(default or {}),
            dict(nullable or {}),
            ttl,
        )


class _Kept(NamedTuple):
    column: Column
    widened: bool
    before: Before | None


def altered(schema: Schema, change: SchemaChange) -> Schema:
    """Return the schema with the change made.

    Raises:
        SchemaError: there is no such column, it is of the key, or a name is taken; a new column
            has no value for rows that are there; a type has not all values of the present one, or
            a default does not fit; an index is over a column that is dropped or widened.
    """
    drop, rename = change.drop, change.rename
    changed = [*rename, *change.widen, *change.default, *change.nullable]
    _require_changeable(schema, [*changed, *drop])
    both = [name for name in changed if name in drop]
    if both:
        raise SchemaError(f"column {both[0]!r} cannot be both changed and dropped")
    _require_not_indexed(schema, [*drop, *change.widen])
    names = {name: rename.get(name, name) for name in schema.names if name not in drop}
    _require_free(names.values(), change.add)
    kept = {new: _kept(schema, old, change) for old, new in names.items()}
    ids, next_id = {new: schema.ids[old] for old, new in names.items()}, schema.next_id
    for name in [name for name, each in kept.items() if each.widened] + list(change.add):
        ids[name] = next_id
        next_id += 1
    columns: dict[str, AnyColumn] = {name: each.column for name, each in kept.items()}
    before = {name: each.before for name, each in kept.items() if each.before is not None}
    columns |= change.add
    ttl: Any = _kept_ttl(schema, names) if change.ttl == "keep" else change.ttl
    numbers = ids, next_id, before
    made = type(schema).numbered(columns, schema.primary_key, *numbers, schema.indexes, ttl)
    for name in change.add:
        column = made.columns[name]
        if not column.nullable and column.default is None:
            raise SchemaError(
                f"the new column {name!r} has no value for rows that are there: make it nullable "
                f"('{column.type}?'), or give it a default (Column('{column.type}', default=...))"
            )
    return made


def _kept_ttl(schema: Schema, names: Mapping[str, str]) -> tuple[str, float] | None:
    """Return the ttl by the names that columns have after a change."""
    if schema.ttl is None:
        return None
    column, seconds = schema.ttl
    if column not in names:
        raise SchemaError(
            f"rows live by column {column!r}, which is to be dropped: give ttl=None with it, or "
            "another column"
        )
    return names[column], seconds


def _kept(schema: Schema, name: str, change: SchemaChange) -> _Kept:
    """Return a column that stays, as it is after a change."""
    column, fill = schema.columns[name], schema.fill(name)
    before = schema.before.get(name)
    former = () if before is None else before.former
    given = change.widen.get(name)
    wider = None if given is None else _wider(name, column.type, given)
    if wider is not None:
        former = ((schema.ids[name], column.type), *former)
        column = replace(column, type=wider)
    if name in change.default:
        column = replace(column, default=change.default[name])
    if name in change.nullable:
        column = replace(column, nullable=change.nullable[name])
    if before is None and not former and fill == column.default:
        return _Kept(column, False, None)
    return _Kept(column, wider is not None, Before(fill, former))


def _wider(name: str, kind: Any, given: str | pa.DataType) -> pa.DataType | None:
    """Return the type that a column is given; None when it has it.

    Raises:
        SchemaError: it has not all values of the present one.
    """
    if isinstance(given, str) and given.endswith("?"):
        raise SchemaError(
            f"column {name!r}: widen takes the type alone, as {given[:-1]!r}; "
            f"nullable={{{name!r}: True}} lets it hold nulls"
        )
    try:
        wanted = Column(given).resolved().type
    except SchemaError as error:
        raise SchemaError(f"column {name!r}: {error}") from None
    assert isinstance(wanted, pa.DataType)
    if wanted == kind:
        return None
    if not _has_all(wanted, kind):
        raise SchemaError(
            f"column {name!r} is {type_name(kind)}, and not all its values are {type_name(wanted)}:"
            " integers and floats take one of more bits, decimals more digits with the same scale; "
            "else add another column and copy the values"
        )
    return wanted


def _has_all(wide: pa.DataType, narrow: pa.DataType) -> bool:
    """Return True when a type has every value of another one, of the same meaning."""
    is_a = pa.types
    if is_a.is_decimal128(wide) and is_a.is_decimal128(narrow):
        return bool(wide.scale == narrow.scale and wide.precision >= narrow.precision)
    if is_a.is_floating(wide) and is_a.is_floating(narrow):
        return bool(wide.bit_width >= narrow.bit_width)
    if not (is_a.is_integer(wide) and is_a.is_integer(narrow)):
        return False
    if is_a.is_signed_integer(wide) is is_a.is_signed_integer(narrow):
        return bool(wide.bit_width >= narrow.bit_width)
    return bool(is_a.is_signed_integer(wide) and wide.bit_width > narrow.bit_width)


def _require_changeable(schema: Schema, names: Iterable[str]) -> None:
    for name in names:
        schema.position(name)
        if name in schema.primary_key:
            raise SchemaError(
                f"column {name!r} is of the primary key, which stays as it is: make another table "
                "and copy the rows"
            )


def _require_not_indexed(schema: Schema, names: Iterable[str]) -> None:
    for index in schema.indexes:
        columns = schema.names_of(index)
        for name in names:
            if name in columns:
                raise SchemaError(
                    f"column {name!r} is in the index by {', '.join(columns)}, which has it as it "
                    f"is: client.drop_index(table, {list(columns)}) first, and create the index "
                    "again behind it"
                )


def _require_free(kept: Iterable[str], add: Iterable[str]) -> None:
    taken: set[str] = set()
    for name in [*kept, *add]:
        if name in taken:
            raise SchemaError(f"there would be two columns {name!r}: take another name")
        taken.add(name)


def evolved(schema: Schema, given: Schema) -> Schema:
    """Return the schema with the columns of another one added, widened, made nullable and with its
    defaults, where that is safe: what differs otherwise stays as it is.
    """
    new = {
        name: column
        for name, column in given.columns.items()
        if name not in schema.columns and (column.nullable or column.default is not None)
    }
    both = [name for name in schema.value_columns if name in given.columns]
    here, there = schema.columns, given.columns
    widen = {
        name: there[name].type
        for name in both
        if here[name].type != there[name].type and _has_all(there[name].type, here[name].type)
    }
    nullable = {name: True for name in both if there[name].nullable and not here[name].nullable}
    default = {
        name: there[name].default
        for name in both
        if there[name].default != here[name].default
        and there[name].type == widen.get(name, here[name].type)
    }
    if not (new or widen or nullable or default):
        return schema
    return altered(schema, SchemaChange(add=new, widen=widen, nullable=nullable, default=default))


def tightened(then: Schema, now: Schema) -> list[str]:
    """Return the columns that rows of one schema may lack a value of, and those of a later one may
    not: names of the later one.
    """
    there = {id: name for name, id in then.ids.items()}

    def may_be_null(name: str) -> bool:
        found = now.stored(name, there)
        return now.fill(name) is None if found is None else then.columns[there[found[0]]].nullable

    return [
        name for name in now.value_columns if not now.columns[name].nullable and may_be_null(name)
    ]


def places_of(schema: Schema, columns: Mapping[str, int]) -> list[tuple[str, int]] | None:
    """Return where rows that were given by these columns have those of a schema.

    Args:
        columns: numbers by name, in the order of the rows' values.

    Returns:
        Names of the schema's that the rows have, and positions; None: a name that they were given
        by is another column's by now.
    """
    at = {id: i for i, id in enumerate(columns.values())}
    found = {name: at[had[0]] for name in schema.names if (had := schema.stored(name, at))}
    if any(name in schema.columns and found.get(name) != at[id] for name, id in columns.items()):
        return None
    return [*found.items()]


def whole(schemas: Sequence[Schema]) -> Schema:
    """Return a schema that has every column of several ones of a table, of which the last counts:
    its names, and other names for what it has not.
    """
    last = schemas[-1]
    columns, ids, before = dict(last.columns), dict(last.ids), dict(last.before)
    there = set(ids.values())
    for schema in reversed(schemas[:-1]):
        for name, id in schema.ids.items():
            if id in there:
                continue
            there.add(id)
            other = f"{name}, column {id}"
            while other in columns:
                other += "'"
            columns[other] = replace(schema.columns[name], nullable=True)
            ids[other] = id
            if name in schema.before:
                before[other] = schema.before[name]
    return Schema.numbered(columns, last.primary_key, ids, last.next_id, before)


_schema_of: Final = lru_cache(maxsize=64)(Schema.from_json)


@dataclass(frozen=True)
class DatedSchema:
    """A schema that a table had before, as text: few of many are asked for.

    Attributes:
        since: when it got it; 0: from the beginning.
    """

    since: Timestamp
    text: str

    @property
    def schema(self) -> Schema:
        """The schema itself."""
        return _schema_of(self.text)


@lru_cache(maxsize=4)
def dated_schemas(text: str) -> tuple[DatedSchema, ...]:
    """Return the schemas that a table had before, as the catalog keeps them."""
    return tuple(DatedSchema(Timestamp(each["since"]), each["schema"]) for each in json.loads(text))
