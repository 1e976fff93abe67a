"""Changes of a table's schema: columns added, renamed and dropped; the key stays.

A column has a number for as long as it is there, and rows on disk know its number alone. So
a schema can be changed without a look at any row:

    id 0  total 1  note 2         renamed note to text, dropped total, added total
    id 0  text 2   total 3        row sets have 0 1 2: of them 1 is not read any more, and for 3
                                  they give the default

A value of a row that has no such column is the column's default, or null: so one that is added
is nullable or has a default.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import pyarrow as pa

from txnkv.errors import SchemaError
from txnkv.tables.schema import Column, Schema

AnyColumn: TypeAlias = str | pa.DataType | Column
"""A column as `Schema` takes it."""


def altered(
    schema: Schema,
    add: Mapping[str, AnyColumn],
    rename: Mapping[str, str],
    drop: Sequence[str],
) -> Schema:
    """Return the schema with columns renamed, dropped, and added at its end.

    Args:
        schema: of the table.
        add: new columns by name; each is nullable or has a default.
        rename: new names by those that there are.
        drop: names.

    Raises:
        SchemaError: there is no such column, it is of the key, or a name is taken; a new column
            has no value for rows that are there.
    """
    _require_changeable(schema, [*rename, *drop])
    both = [name for name in rename if name in drop]
    if both:
        raise SchemaError(f"column {both[0]!r} cannot be both renamed and dropped")
    kept = {name: rename.get(name, name) for name in schema.names if name not in drop}
    _require_free(kept.values(), add)
    columns: dict[str, AnyColumn] = {new: schema.columns[old] for old, new in kept.items()}
    ids = {new: schema.ids[old] for old, new in kept.items()}
    made = Schema.numbered({**columns, **add}, schema.primary_key, ids, schema.next_id)
    for name in add:
        column = made.columns[name]
        if not column.nullable and column.default is None:
            raise SchemaError(
                f"the new column {name!r} has no value for rows that are there: make it nullable "
                f"('{column.type}?'), or give it a default (Column('{column.type}', default=...))"
            )
        made.ids[name] = made.next_id
        made.next_id += 1
    return made


def _require_changeable(schema: Schema, names: Iterable[str]) -> None:
    for name in names:
        schema.position(name)
        if name in schema.primary_key:
            raise SchemaError(
                f"column {name!r} is of the primary key, which stays as it is: make another table "
                "and copy the rows"
            )


def _require_free(kept: Iterable[str], add: Iterable[str]) -> None:
    taken: set[str] = set()
    for name in [*kept, *add]:
        if name in taken:
            raise SchemaError(f"there would be two columns {name!r}: take another name")
        taken.add(name)


def evolved(schema: Schema, given: Schema) -> Schema:
    """Return the schema with the columns of another one added, where that is safe: what differs
    otherwise stays as it is.
    """
    new = {
        name: column
        for name, column in given.columns.items()
        if name not in schema.columns and (column.nullable or column.default is not None)
    }
    return altered(schema, new, {}, ()) if new else schema


def whole(schemas: Sequence[Schema]) -> Schema:
    """Return a schema that has every column of several ones of a table, of which the last counts:
    its names, and other names for what it has not.
    """
    last = schemas[-1]
    columns, ids = dict(last.columns), dict(last.ids)
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
    return Schema.numbered(columns, last.primary_key, ids, last.next_id)
