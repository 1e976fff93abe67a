"""The committed MemRowSets of this process: what small commits changed and no flush wrote yet.

One for each tablet, filled by the commit log: by this process's commits as they are made, by
those of others when the log is tailed. Entries that a flush has put into row sets are dropped by
making a new MemRowSet of the rest; readers that hold the old one go on with it.

They are read as rows of one schema of their table (`MemoryRows`). The bytes of a row are laid out
by the schema that its table had at its commit (`table_catalog`):

    stamp     10            20              30
    row       id, a         id, a           id, b, c       altered at 25: a dropped, b and c added
    as read   id, -, -      id, -, -        id, b, c       by a snapshot at 40; - is what fills

Columns go by their numbers, so that renamed and widened ones are found.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pyarrow as pa

from txnkv import core
from txnkv.coordinator import MAX_TIMESTAMP, Key, Section, Timestamp
from txnkv.core import compute as pc
from txnkv.storage import new_epoch
from txnkv.tables.schema import Schema, widened
from txnkv.tables.table_catalog import TableInfo


class CommittedMemory:
    """By tablet id. Changed under the commit log's lock alone.

    Args:
        width_of: the key width of a tablet; None when it was dropped and is gone.
        on_flushed: called for each tablet with entries when a flush has taken place.

    Attributes:
        damaged: by tablet, the commits that it lacks, for they are damaged in the commit log, and
            why.
    """

    def __init__(
        self,
        width_of: Callable[[int], int | None],
        on_flushed: Callable[[int, Timestamp], object],
    ) -> None:
        self._sets: dict[int, core.MemRowSet] = {}
        self._dropped: dict[int, Timestamp] = {}
        self.damaged: dict[int, dict[int, str]] = {}
        self._width_of = width_of
        self._on_flushed = on_flushed

    def of(self, tablet_id: int, width: int) -> core.MemRowSet:
        """The committed MemRowSet of a tablet whose keys have this width."""
        found = self._sets.get(tablet_id)
        if found is None:
            found = self._sets.setdefault(tablet_id, core.MemRowSet(width))
        return found

    def is_current(self, tablet_id: int, memory: core.MemRowSet) -> bool:
        """Return True when this is the tablet's MemRowSet still."""
        return self._sets.get(tablet_id) is memory

    @property
    def tablet_ids(self) -> list[int]:
        """Tablets that have entries, or lack some."""
        return sorted({id for id, memory in list(self._sets.items()) if memory.n} | {*self.damaged})

    @property
    def nbytes(self) -> int:
        """Bytes that all of them hold."""
        return sum(memory.nbytes for memory in list(self._sets.values()))

    def drop_flushed(self, tablet_id: int, upto: Timestamp) -> None:
        """Keep the entries above `upto`, in a new MemRowSet."""
        memory = self._sets.get(tablet_id)
        if memory is not None and memory.n and upto > self._dropped.get(tablet_id, 0):
            self._sets[tablet_id] = memory.copy(upto, MAX_TIMESTAMP)
            new_epoch()
            self._dropped[tablet_id] = upto

    def forget(self, tablet_id: int) -> None:
        """A tablet is gone for good."""
        self._sets.pop(tablet_id, None)
        new_epoch()
        self._dropped.pop(tablet_id, None)
        self.damaged.pop(tablet_id, None)

    def damage(self, tablet_id: int, upto: Timestamp) -> str | None:
        """Return what is damaged in the commit log of what commits at or below `upto` changed in a
        tablet; None when nothing is.
        """
        found = self.damaged.get(tablet_id, {})
        return next((error for stamp, error in found.items() if stamp <= upto), None)

    # -- as a member of the commit log -------------------------------------------------

    def apply(self, id: int, data: bytes, stamp: int) -> None:
        """Take in what one commit changes in a tablet."""
        memory = self._sets.get(id)
        if memory is None:
            width = self._width_of(id)
            if width is None:
                return
            memory = self.of(id, width)
        memory.apply(data, stamp)

    def lose(self, section: Section, stamp: int, error: str) -> None:
        """Remember that a tablet lacks what one commit changed in it."""
        if self._width_of(section.id) is not None:
            self.damaged.setdefault(section.id, {})[stamp] = error
            new_epoch()

    def undo(self, ids: set[int], upto: int) -> None:
        """Drop entries above `upto`."""
        for id in ids:
            if id in self._sets:
                self._sets[id] = self._sets[id].copy(0, upto)
                new_epoch()

    def write_out(self, upto: Timestamp) -> dict[Key, str]:
        """Nothing: the flush writes row sets itself."""
        return {}

    def flushed(self, upto: Timestamp, held: Collection[int]) -> None:
        """Let the tablets pair their memory with the new row sets."""
        for id in self.tablet_ids:
            if id not in held:
                self._on_flushed(id, upto)

    def reset(self) -> None:
        """Forget all: in a forked child the log reads it again."""
        new_epoch()
        self._sets = {}
        self._dropped = {}
        self.damaged = {}


# -- its rows, in one schema -----------------------------------------------------------


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
        self._older = older
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
            found = self._former[number] = _Former(self._older[number].schema, self._schema)
        return found


class _Former:
    """Rows that were written with a former schema, for a present one."""

    def __init__(self, former: Schema, present: Schema) -> None:
        self._layout = layout_of(former)
        self._decode = self._layout.decoder(range(len(self._layout.types)))
        at = {former.ids[name]: i for i, name in enumerate(former.value_columns)}
        self._sources = []
        for name in present.value_columns:
            found = present.stored(name, at)
            kind, fill = present.columns[name].type, present.fill(name)
            self._sources.append((None if found is None else at[found[0]], kind, fill))

    def values(self, row: bytes) -> tuple[Any, ...]:
        """The value columns of a row, with dates and times as numbers."""
        values = self._decode(row)
        return tuple(fill if at is None else values[at] for at, _, fill in self._sources)

    def columns(
        self, entries: core.Entries, numbers: Sequence[int], rows: core.Rows
    ) -> list[pa.Array]:
        """Columns of entries that all have the former schema; see `MemoryRows.columns`."""
        wanted = [self._sources[number] for number in numbers]
        there = [at for at, _, _ in wanted if at is not None]
        found = iter(entries.columns(self._layout, there, rows))
        return [
            core.repeated(kind, fill, rows.n) if at is None else widened(next(found), kind)
            for at, kind, fill in wanted
        ]
