"""Reads by primary key, or by the columns of an index: one row, or many.

Single keys, and lists of them, are looked for in the published layers of a tablet (`point`). A
search by a view that was taken before goes layer by layer, and takes in what is in flight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from txnkv import core
from txnkv.core import compute as pc
from txnkv.errors import CorruptionError, SchemaChangedError, SchemaError
from txnkv.storage import brief, lengthy
from txnkv.tables.arrow_input import key_columns
from txnkv.tables.read import point, scan
from txnkv.tables.read.point import find_row, find_some, rows_with, text_bytes
from txnkv.tables.read.predicate import KeyRange
from txnkv.tables.read.sources import memory_columns
from txnkv.tables.read.view import ReadView
from txnkv.tables.row_writer import RowWriter, Values, dicts
from txnkv.tables.schema import normal
from txnkv.tables.table_catalog import TableInfo
from txnkv.tables.table_index import TableIndex, find_index, no_index
from txnkv.tables.tables import Tables
from txnkv.tables.tablets import (
    EVERY_STAMP,
    LARGE_CHECK,
    LARGE_READ,
    TOMBSTONES,
    InFlight,
    Pages,
    RowSet,
    RowSetInfo,
    Step,
    TabletView,
)

_SAMPLED: Final = 16
"""One of so many rows is looked at for its size."""

_FEW_VALUES: Final = 256
"""So many values, in all columns of rows that are got together, are looked up row by row."""
_SEVERAL: Final = 4
"""The most times as many, of a table of so many tablets: arrays cost more there."""

_FEW: Final = 1 << 14
"""So many keys are looked for in all blocks of a row set at once; more go block by block."""

__all__ = [
    "Found", "entries_in", "find_row", "find_some", "get", "get_by", "get_many", "is_ready_still",
    "rows_of", "rows_with", "search", "text_bytes",
]  # fmt: skip


def get(tables: Tables, writer: RowWriter, view: ReadView, key: Any) -> dict[str, Any] | None:
    """The row with this key, or None.

    Raises:
        SchemaError: the key does not fit the table.
        As `point.find_rows`.
    """
    if view.own is None and view.txn_id is None:
        add_key = None if view.reads is None else view.reads.add_key
        row: dict[str, Any] | None = writer.reader.get(key, view.snapshot, add_key)
        if row is not NotImplemented:
            return row
    values = writer.checker["delete"].take(key)
    encoded = writer.key(values)
    tablet = writer.tablet(values, encoded)
    found = find_row(tables, tablet, view, encoded)
    return None if found is None else writer.rows.dict(encoded, found)


@brief
def get_by(
    tables: Tables, table: TableInfo, view: ReadView, columns: str | Sequence[str], values: Any
) -> list[dict[str, Any]]:
    """The rows with these values in the columns of an index.

    Args:
        columns: a name, or several in the order of the index.
        values: one, or a tuple or list of as many.

    Raises:
        SchemaError: there is no index by these columns, or a value does not fit.
        HistoryExpiredError: the snapshot is older than the history.
    """
    if not isinstance(columns, Iterable):
        raise TypeError(f"columns is a name or a list of names, not {columns!r}")
    names = (columns,) if isinstance(columns, str) else tuple(columns)
    writer, types = tables.row_writer(table), table.schema.columns
    index: TableIndex | None = None
    with suppress(SchemaChangedError):  # one of them was dropped since
        index = next((each for each in writer.indexes if each.columns == names), None)
    if index is None and find_index(table.schema, names) is None:
        now = tables.current(table).schema  # a snapshot of before the index is scanned
        if names not in map(now.names_of, now.indexes):
            raise no_index(table.name, table.schema, names)
    given = tuple(values) if isinstance(values, tuple | list) else (values,)
    if len(given) != len(names):
        raise SchemaError(f"{len(given)} values for the columns {', '.join(names)}: {values!r}")
    if index is not None and not all(map(writer.rows.fits, index.positions, given)):
        given = tuple(map(normal, names, (types[name].type for name in names), given))
    if None in given:
        return []
    if index is not None and index.ready and is_ready_still(tables, table, index):
        with suppress(CorruptionError):  # of the index, maybe, which has nothing of its own
            found = _rows_by(tables, writer, view, index, given)
            if found is not None:
                return found
    # NaN is in [NaN], as it is in an index, and equal to nothing.
    where = [(name, "in", [value]) for name, value in zip(names, given, strict=True)]
    return _scanned(tables, scan.request(table, None, where, False, None), view)


@lengthy
def _scanned(tables: Tables, asked: scan.Request, view: ReadView) -> list[dict[str, Any]]:
    made = scan.plan(tables, asked, view)
    try:
        return [row for batch in made.batches() for row in dicts(batch)]
    finally:
        made.pins.release()


def is_ready_still(tables: Tables, table: TableInfo, index: TableIndex) -> bool:
    now = tables.current(table)
    return now.since == table.since or index.info in now.schema.indexes


def _rows_by(
    tables: Tables, writer: RowWriter, view: ReadView, index: TableIndex, values: Values
) -> list[dict[str, Any]] | None:
    """The same by an index that is ready; None where they are many."""
    tablet = index.tablet
    if index.info.unique:
        key = tablet.codec.encode_one(values)
        entry = find_row(tables, tablet, view, key)
        if entry is None:
            return []
        found = get(tables, writer, view, index.row_key(values + tablet.layout.decode_one(entry)))
        return [] if found is None else [found]
    key_range, skip = point.entries_with(index, values)
    rows = point.by_entries(writer, view, index, key_range, skip, core.FEW)
    if rows is None:
        entries = entries_in(tables, view, index, [key_range], core.FEW)
        if entries is None:
            return None
        rows = rows_of(tables, writer, view, index.row_keys(entries))
    return [row for row in rows or () if row is not None]


def entries_in(
    tables: Tables,
    view: ReadView,
    index: TableIndex,
    ranges: Sequence[KeyRange],
    most: int,
    last: bool = False,
) -> list[dict[str, Any]] | None:
    """The first `most` entries in each of some ranges of an index, or the last ones, descending;
    None where they are many.
    """
    tablet, rows = index.tablet, tables.row_writer(index.tablet.table).rows
    found: list[dict[str, Any]] = []
    for low, high in ranges:
        some = point.find_dicts(tables, tablet, rows, view, low, high, most, last)
        if some is None or len(found) + len(some) > core.FEW:
            return None
        found += some
    return found


def rows_of(
    tables: Tables,
    writer: RowWriter,
    view: ReadView,
    keys: Iterable[Any],
    left: float = math.inf,
) -> list[dict[str, Any] | None] | None:
    """The rows with some keys; None where they have more than `left` bytes, about."""
    found: list[dict[str, Any] | None] = []
    look, at, own = writer.reader.get, view.snapshot, view.own
    alone = own is None and view.txn_id is None and view.reads is None
    for key in keys:
        row: Any = NotImplemented
        if alone:
            row = look(key, at, None)
        elif view.txn_id is None and isinstance(own, core.Writes):
            # A small transaction reads at its own snapshot.
            row = own.read(writer.reader, key)
        if row is NotImplemented:
            row = get(tables, writer, view, key)
        found.append(row)
        if len(found) % _SAMPLED == 0 and row is not None:
            left -= _SAMPLED * text_bytes(row)
            if left < 0:
                return None
    return found


def get_many(tables: Tables, table: TableInfo, view: ReadView, keys: Sequence[Any]) -> pa.Table:
    """The rows with these keys, in their order; a row of nulls where there is none."""
    writer, rows = tables.row_writer(table), None
    limit, result = _FEW_VALUES * min(len(writer.tablets), _SEVERAL), point.nullable(table.schema)
    if isinstance(keys, list) and 0 < len(keys) * point.weight(result) <= limit:
        with suppress(CorruptionError, SchemaError, TypeError, OverflowError):  # said below
            rows = rows_of(tables, writer, view, keys, point.FEW_BYTES)
    if rows is not None:
        return point.in_arrow(rows, result)
    return rows_with(tables, table, view, key_columns(table.schema, keys))


# -- many keys of one tablet ---------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """Rows that were found in one place.

    Attributes:
        positions: of the keys asked for, ascending.
        columns: of the rows, in that order.
        stamps: when each was inserted, where that was asked for.
        own: the transaction wrote them itself.
    """

    positions: pa.UInt32Array
    columns: list[pa.Array]
    stamps: pa.UInt64Array | None = None
    own: bool = False


def search(
    view: TabletView, keys: core.Keys, names: Sequence[str], *, stamps: bool = False
) -> list[Found]:
    """The rows of some keys of a tablet, in pieces; no key is in two of them.

    Args:
        view: what is seen, taken before.
        keys: strictly ascending.
        names: columns to read.
        stamps: whether to tell when each row was inserted; not for a transaction's own.

    Raises:
        RowSetRetired: the view is too old; take a new one.
    """
    return list(_Search(view, keys, names, stamps).run()) if keys.n else []


class _Search:
    """One look for many keys, layer by layer; see `TabletView`."""

    def __init__(
        self, view: TabletView, keys: core.Keys, names: Sequence[str], stamps: bool
    ) -> None:
        self._view = view
        self._tablet = view.tablet
        self._names = names
        self._stamps = stamps
        self._keys = keys
        self._left: pa.UInt32Array | None = None  # positions of _keys among all; None: the same

    def run(self) -> Iterator[Found]:
        view = self._view
        if view.own is not None:
            yield from self._memory(view.own, 0, EVERY_STAMP, own=True)
        if view.flight is not None:
            yield from self._in_flight(view.flight)
        yield from self._staged()
        if (n := self._keys.n) == 0:
            return
        if self._names and not self._stamps and n <= _FEW:
            yield from self._committed()
            return
        ends = self._keys.key(0), self._keys.key(n - 1)
        if view.has_memory:
            yield from self._memory(view.state.memory, view.after, view.snapshot)
        for step in (step for step in view.steps if step.info.overlaps(*ends)):
            yield from self._row_set(step, decide=bool(view.unresolved))

    def _staged(self) -> Iterator[Found]:
        """Rows in own row sets, of the keys alone that may be there, where that is known."""
        steps, some = self._view.staged_steps(self._keys)
        if some is None:
            for step in steps:
                yield from self._row_set(step, decide=True, own=True)
            return
        keys, n = self._keys.gather(some), self._keys.n
        look = _Search(self._view, keys, self._names, self._stamps)
        look._left = some.to_arrow()
        for step in steps:
            for found in look._row_set(step, decide=True, own=True):
                yield self._found(found.positions, found.columns, found.stamps, found.own)
        left = core.Bitmap.of(n, look._left)
        self._decided(core.Bitmap.of(n, some.to_arrow()).and_not(left).positions().to_arrow())

    def _committed(self) -> Iterator[Found]:
        """Rows of few keys in all that is committed."""
        view, keys = self._view, self._keys

        def ask(published: point.Published, load: core.Load) -> tuple[core.Bitmap, core.RowSlices]:
            found = published.layers.find(None, keys, None, view.snapshot, load)
            of = self._tablet.memory_rows
            return found.present(), found.rows(of.since, of.row)

        there, rows = point.committed(self._tablet, view.state, ask)
        if there.count:
            positions = there.positions().to_arrow()
            columns = point.columns_of(self._tablet, self._names, keys, rows)
            if there.count < keys.n:
                columns = [column.take(positions) for column in columns]
            yield self._found(positions, columns)

    def _decided(self, positions: pa.UInt32Array) -> None:
        """Look no further for the keys at these positions of those that are left."""
        if len(positions) == 0:
            return
        rest = core.Bitmap.of(self._keys.n, positions).zeros()
        numbers = rest.to_arrow()
        self._left = numbers if self._left is None else self._left.take(numbers)
        self._keys = self._keys.gather(rest)

    def _found(
        self,
        positions: pa.UInt32Array,
        columns: list[pa.Array],
        stamps: pa.UInt64Array | None = None,
        own: bool = False,
    ) -> Found:
        left = self._left
        return Found(positions if left is None else left.take(positions), columns, stamps, own)

    def _memory(
        self, memory: core.MemRowSet, after: int, upto: int, *, own: bool = False
    ) -> Iterator[Found]:
        keys = self._keys
        if keys.n == 0:
            return
        if memory.n >= keys.n:
            entries, where = memory.lookup(keys, after, upto), None
        else:
            entries = memory.select(keys.key(0), keys.key(keys.n - 1) + b"\0", after, upto)
            where = core.find(keys, entries.keys)
        kinds = entries.kinds
        if where is not None:  # other keys lie in between
            kinds = pc.if_else(pc.greater_equal(where, 0), kinds, pa.scalar(0, kinds.type))
        known = core.Bitmap.from_arrow(pc.greater(kinds, 0))
        if known.count == 0:
            return
        rows = core.Bitmap.from_arrow(pc.equal(kinds, 1)).positions()
        if rows.n:
            columns = memory_columns(self._tablet, entries, self._names, rows, own=own)
            stamps = entries.stamps.take(rows.to_arrow()) if self._stamps else None
            yield self._found(_at(where, rows), columns, stamps, own)
        self._decided(_at(where, known.positions()))

    def _in_flight(self, flight: InFlight) -> Iterator[Found]:
        both = core.mark_common(self._keys, flight.keys) if self._keys.n else None
        if both is None or not both.count:
            return
        assert not self._names, "rows in flight are staged before their columns are asked for"
        positions = both.positions().to_arrow()
        if not flight.deletes:
            yield self._found(positions, [], own=True)
        self._decided(positions)

    def _row_set(self, step: Step, *, decide: bool, own: bool = False) -> Iterator[Found]:
        """Rows of a row set that are inserted at or above `step.before` and seen."""
        keys, info = self._keys, step.info
        if keys.n == 0 or not info.overlaps(keys.key(0), keys.key(keys.n - 1)):
            return
        row_set = self._tablet.row_set(info)
        done: list[pa.Array] = []
        with self._tablet.read(once=self._is_large(info)) as pages:
            self._tablet.note_staged(row_set, pages)
            if info.kind != TOMBSTONES:
                for positions, columns, stamps in self._rows(pages, step, row_set):
                    yield self._found(positions, columns, stamps, own)
                    done.append(positions)
            if step.hides and (info.kind == TOMBSTONES or info.deleted):
                done = [row_set.common(pages, keys)]
        if decide and done:
            self._decided(pa.concat_arrays(done))

    def _rows(
        self, pages: Pages, step: Step, row_set: RowSet
    ) -> Iterator[tuple[pa.UInt32Array, list[pa.Array], pa.UInt64Array | None]]:
        before, own = step.before, step.info.stamp is None
        snapshot = None if own else self._view.snapshot  # its own also when it commits meanwhile
        if not (before or self._stamps or self._names):
            positions = row_set.common(pages, self._keys, snapshot)
            if len(positions):
                yield positions, [], None
            return
        for number, start, hits in row_set.find_many(pages, self._keys, snapshot):
            there = core.Bitmap.from_arrow(pc.is_valid(hits)).positions()
            positions, rows = _raised(there, start), hits.drop_null()
            inserts: Any = None
            if before or self._stamps:
                inserts, _ = row_set.stamps_of(pages, number, rows)
            if before:
                newer = pc.greater_equal(inserts, pa.scalar(before, pa.uint64()))
                positions, rows = positions.filter(newer), rows.filter(newer)
                inserts = inserts.filter(newer)
            if len(rows):
                columns = row_set.gather(pages, number, self._names, core.Rows.from_arrow(rows))
                yield positions, columns, inserts if self._stamps else None

    def _is_large(self, info: RowSetInfo) -> bool:
        """Return True when the memory of what is read should be given back."""
        if self._names:
            return info.size > LARGE_READ
        return info.rows * len(self._keys.key(0)) > LARGE_CHECK


def _at(where: pa.Int32Array | None, rows: core.Rows) -> pa.UInt32Array:
    """Return the positions of the keys of some entries."""
    numbers = rows.to_arrow()
    return numbers if where is None else where.take(numbers).cast(pa.uint32())


def _raised(rows: core.Rows, by: int) -> pa.UInt32Array:
    numbers = rows.to_arrow()
    return pc.add(numbers, pa.scalar(by, pa.uint32())) if by else numbers
