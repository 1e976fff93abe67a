"""The order of a scan's rows: by primary key, or by columns.

    ordered=True                    by primary key
    ordered="descending"            by primary key, the last rows first
    ordered="due"                   by due, and where that is equal by primary key
    ordered="-due"                  the other way round
    ordered=["-priority", "due"]    by priority, the highest first; where that is equal by due

The order of a column's values is that of keys: NaN is above all numbers, -0.0 is 0.0. A null is
below all values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any, Final, NamedTuple, TypeAlias

import pyarrow as pa

from txnkv import core
from txnkv.core import compute as pc
from txnkv.errors import SchemaError
from txnkv.tables.schema import Schema

Order: TypeAlias = bool | str | Sequence[str]
"""The order that is asked for: any for False."""
DESCENDING: Final = "descending"
_MORE: Final = 1 << 16
_BYTES: Final = 64 << 20
"""Rows, and bytes, that are kept beside those that are wanted before they are sorted."""
_MOST_ORDERS: Final = 256
_AT_ONCE: Final = 1 << 30
"""Bytes of rows that Arrow brings into another order at once: of texts it takes no 2 GiB."""


class By(NamedTuple):
    """One column to sort by."""

    column: str
    descending: bool


def checked(schema: Schema, ordered: Order, constant: frozenset[str]) -> Order:
    """An order as requests have it: columns as a tuple, where it is not that by primary key. A
    schema keeps those that came up.

    Args:
        constant: columns with one value in all rows.

    Raises:
        SchemaError: there is no such column, or its values have no order.
        TypeError: it is no order.
    """
    if not isinstance(ordered, Iterable):
        return bool(ordered)
    ordered = (ordered,) if isinstance(ordered, str) else tuple(ordered)
    known: Order | None = None
    with suppress(TypeError):  # of a list in place of a name, which is told below
        known = schema.orders.get((ordered, constant))
    if known is not None:
        return known
    for each in ordered:
        if not isinstance(each, str):
            raise TypeError(f"ordered names columns, as ['-total', 'id'], and {each!r} is no name")
        name = _by(schema, each).column
        if name not in schema.columns:
            there = ", ".join(schema.columns)
            raise SchemaError(
                f"no column {name!r} to order by; there are {there}. By primary key is "
                f"ordered=True or {DESCENDING!r}"
            )
        if not core.may_be_key(schema.columns[name].type):
            kind = core.type_name(schema.columns[name].type)
            raise SchemaError(f"column {name!r} is {kind}, whose values have no order")
    if not ordered:
        return False
    by = [each for each in columns_by(schema, ordered) if each.column not in constant]
    descends = any(each.descending for each in by)
    key = [By(name, descends) for name in schema.primary_key if name not in constant]
    found = (DESCENDING if descends else True) if by == key else ordered
    _keep(schema, (ordered, constant), found)
    return found


def columns_by(schema: Schema, ordered: Order) -> tuple[By, ...]:
    """The columns of an order, those of the primary key behind, with which it ends; none of one
    that is not by columns.
    """
    if not isinstance(ordered, tuple):
        return ()
    known: tuple[By, ...] | None = schema.orders.get(ordered)
    if known is not None:
        return known
    by: dict[str, By] = {}
    key, last = schema.primary_key, _by(schema, ordered[-1]).descending
    for each in (*(_by(schema, each) for each in ordered), *(By(name, last) for name in key)):
        if by.keys() >= {*key}:
            break
        by.setdefault(each.column, each)
    found = tuple(by.values())
    _keep(schema, ordered, found)
    return found


def _keep(schema: Schema, asked: tuple[Any, ...], found: Any) -> None:
    if len(schema.orders) >= _MOST_ORDERS:
        schema.orders.clear()
    schema.orders[asked] = found


def _by(schema: Schema, said: str) -> By:
    descends = said.startswith("-") and said not in schema.columns
    return By(said[1:] if descends else said, descends)


# -- few rows, as dicts --------------------------------------------------------------------


def by_key(
    schema: Schema, rows: list[dict[str, Any]], descending: bool = False
) -> list[dict[str, Any]] | None:
    """Rows in the order of their keys; None where that is another one than Python's."""
    key = schema.primary_key
    if len(rows) < 2 or all(_is_ordered(schema.columns[name].type, name, rows) for name in key):
        return sorted(rows, key=itemgetter(*key), reverse=descending)
    return None


def by_columns(
    schema: Schema, rows: list[dict[str, Any]], by: Sequence[By]
) -> list[dict[str, Any]] | None:
    """Rows in the order of columns; None where that is another one than Python's."""
    for name, descending in reversed(by):
        if any(row[name] is None for row in rows):
            there = [row for row in rows if row[name] is not None]
            if not _is_ordered(schema.columns[name].type, name, there):
                return None
            rows = sorted(
                rows, key=lambda row: (row[name] is not None, row[name]), reverse=descending
            )
        elif _is_ordered(schema.columns[name].type, name, rows):
            rows = sorted(rows, key=itemgetter(name), reverse=descending)
        else:
            return None
    return rows


def _is_ordered(kind: pa.DataType, name: str, rows: list[dict[str, Any]]) -> bool:
    if pa.types.is_floating(kind):
        return all(row[name] == row[name] for row in rows)  # no NaN
    of = pa.types
    is_text, is_number = of.is_string(kind) or of.is_binary(kind), of.is_integer(kind)
    is_time = of.is_timestamp(kind) and kind.tz in (None, "UTC")  # else by what clocks show
    is_plain = is_text or is_number or is_time or of.is_boolean(kind)
    return bool(is_plain or of.is_decimal(kind) or of.is_date32(kind))


# -- many, in Arrow ------------------------------------------------------------------------


def in_order(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, by: Sequence[By], limit: int | None
) -> Iterator[pa.RecordBatch]:
    """The rows of batches in the order of columns, the first ones alone where there is a limit.
    All that may be among them is in memory.
    """
    kept: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        kept.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if limit is not None and rows > 2 * limit and (rows > 2 * limit + _MORE or size > _BYTES):
            kept = list(_sorted(kept, schema, by, limit))
            rows, size = limit, sum(batch.nbytes for batch in kept)
    yield from _sorted(kept, schema, by, limit)


def _sorted(
    batches: list[pa.RecordBatch], schema: pa.Schema, by: Sequence[By], limit: int | None
) -> Iterator[pa.RecordBatch]:
    table = pa.Table.from_batches(batches, schema)
    columns: list[pa.ChunkedArray] = []
    ways: list[str] = []
    for name, descending in by:
        column = table.column(schema.names.index(name))
        keys = [pc.is_valid(column)] if column.null_count else []
        if pa.types.is_floating(column.type):
            keys += [pc.is_nan(column)]
        keys.append(pa.chunked_array(map(core.comparable, column.chunks), _plain(column.type)))
        columns += keys
        ways += len(keys) * ["descending" if descending else "ascending"]
    names = list(map(str, range(len(columns))))
    order = pc.sort_indices(
        pa.table(columns, names=names), sort_keys=list(zip(names, ways, strict=True))
    )[:limit]
    if table.nbytes <= _AT_ONCE:
        yield from table.take(order).to_batches(max_chunksize=_MORE)
        return
    each = max(1, min(_MORE, _BYTES * table.num_rows // table.nbytes))
    for start in range(0, len(order), each):
        yield _taken(batches, order.slice(start, each))


def _taken(batches: Sequence[pa.RecordBatch], rows: pa.UInt64Array) -> pa.RecordBatch:
    """Rows by their numbers in all batches."""
    some, numbers, begin = [], [], 0
    for batch in batches:
        end = begin + batch.num_rows
        mine = rows.filter(pc.and_(pc.greater_equal(rows, begin), pc.less(rows, end)))
        if len(mine):
            some.append(batch.take(pc.subtract(mine, pa.scalar(begin, mine.type))))
            numbers.append(mine)
        begin = end
    places = pc.index_in(rows, value_set=pa.concat_arrays(numbers))
    return pa.concat_batches(some).take(places)


def _plain(kind: pa.DataType) -> pa.DataType:
    return core.comparable(pa.array([], kind)).type
