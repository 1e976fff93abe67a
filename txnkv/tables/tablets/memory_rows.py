"""Committed rows in memory, brought into one schema of their table.

The bytes of a row are laid out by the schema that its table had at its commit (`table_catalog`):

    stamp     10            20              30
    row       id, a         id, a           id, b, c       altered at 25: a dropped, b and c added
    as read   id, -, -      id, -, -        id, b, c       by a snapshot at 40; - is what fills

Columns go by their numbers, so that renamed and widened ones are found.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from txnkv import core
from txnkv.core import compute as pc
from txnkv.tables.schema import Schema, repeated, widened
from txnkv.tables.table_catalog import TableInfo


def layout_of(schema: Schema) -> core.RowLayout:
    """Return the layout of the value columns of a schema."""
    return core.RowLayout([schema.columns[name].type for name in schema.value_columns])


def _laid_out(schema: Schema) -> list[tuple[int, pa.DataType]]:
    return [(schema.ids[name], schema.columns[name].type) for name in schema.value_columns]


class MemoryRows:
    """The rows of committed memory, as `table.schema` has them. Shared by threads.

    Args:
        table: with the schemas that it had before.
        layout: of its schema.

    Attributes:
        since: rows from this stamp on are laid out by the schema.
    """

    def __init__(self, table: TableInfo, layout: core.RowLayout) -> None:
        older, since = list(table.older), int(table.since)
        while older and _laid_out(older[-1].schema) == _laid_out(table.schema):
            since = int(older.pop().since)
        self.since = self._since = since if older else 0
        self._schema = table.schema
        self._layout = layout
        self._begins = [int(each.since) for each in older]
        self._older = [each.schema for each in older]
        self._former: dict[int, _Former] = {}

    def row(self, stamp: int, row: bytes) -> bytes:
        """A row in the layout of the schema."""
        if stamp >= self._since:
            return row
        return self._layout.encode_one(self._of(self._number(stamp)).values(row))

    def columns(
        self, entries: core.Entries, numbers: Sequence[int], rows: core.Rows
    ) -> list[pa.Array]:
        """Some value columns of some entries, by their numbers, in the order of `rows`."""
        if not self._since:
            return entries.columns(self._layout, numbers, rows)
        stamps = entries.stamps.take(rows.to_arrow())
        least = pc.min(stamps).as_py()
        if least is None or least >= self._since:
            return entries.columns(self._layout, numbers, rows)
        parts: list[list[pa.Array]] = []
        places: list[pa.Array] = []
        for number in range(self._number(least), len(self._older) + 1):
            place = pc.indices_nonzero(self._within(stamps, number)).cast(pa.uint32())
            if not len(place):
                continue
            some = core.Rows.from_arrow(rows.to_arrow().take(place))
            places.append(place)
            if number == len(self._older):
                parts.append(entries.columns(self._layout, numbers, some))
            else:
                parts.append(self._of(number).columns(entries, numbers, some))
        if len(parts) == 1:
            return parts[0]
        order = pc.sort_indices(pa.concat_arrays(places))
        return [pa.concat_arrays(pieces).take(order) for pieces in zip(*parts, strict=True)]

    def _number(self, stamp: int) -> int:
        """The number of the former schema that counted at a stamp below `since`."""
        return max(bisect_right(self._begins, stamp) - 1, 0)

    def _within(self, stamps: pa.UInt64Array, number: int) -> pa.BooleanArray:
        begins = [0, *self._begins[1:], self._since, None]
        low, high = begins[number], begins[number + 1]
        inside = pc.greater_equal(stamps, pa.scalar(low, pa.uint64()))
        if high is None:
            return inside
        return pc.and_(inside, pc.less(stamps, pa.scalar(high, pa.uint64())))

    def _of(self, number: int) -> _Former:
        found = self._former.get(number)
        if found is None:
            found = self._former[number] = _Former(self._older[number], self._schema)
        return found


class _Former:
    """Rows that were written with a former schema, for a present one."""

    def __init__(self, former: Schema, present: Schema) -> None:
        self._layout = layout_of(former)
        at = {former.ids[name]: i for i, name in enumerate(former.value_columns)}
        self._sources = []
        for name in present.value_columns:
            found = present.stored(name, at)
            kind, fill = present.columns[name].type, present.fill(name)
            self._sources.append((None if found is None else at[found[0]], kind, fill))

    def values(self, row: bytes) -> tuple[Any, ...]:
        """The value columns of a row."""
        values = self._layout.decode_one(row)
        return tuple(fill if at is None else values[at] for at, _, fill in self._sources)

    def columns(
        self, entries: core.Entries, numbers: Sequence[int], rows: core.Rows
    ) -> list[pa.Array]:
        """Columns of entries that all have the former schema; see `MemoryRows.columns`."""
        wanted = [self._sources[number] for number in numbers]
        there = [at for at, _, _ in wanted if at is not None]
        found = iter(entries.columns(self._layout, there, rows))
        return [
            repeated(kind, fill, rows.n) if at is None else widened(next(found), kind)
            for at, kind, fill in wanted
        ]
