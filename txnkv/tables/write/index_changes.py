"""Entries of indexes for many rows at a time: from rows that change to rows of hidden tables.

A chunk of rows counts as a whole: an entry that goes with one of its rows makes room for another,
so values may be swapped. Each index makes two sorted lists of entries of it, each with the number
of its row in the chunk:

    rows of the chunk        come (new values)      go (values that they had)
    0   ant -> bee           bee  0                 ant  0
    1   bee -> cat           cat  1                 bee  1
    2   new:   dog           dog  2

In a unique index a row is refused whose new entry is there already, unless it goes with a row of
the chunk; or is that of another row of the chunk. A row that is refused keeps the entry that it
had, which may lead to the next one: so it is looked again until no other row is refused. What is
left of `come` is written, and what is left of `go` and does not come again is deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import pyarrow as pa

from txnkv import core
from txnkv.core import compute as pc
from txnkv.errors import AlreadyPresentError
from txnkv.tables.read import lookup
from txnkv.tables.table_index import TableIndex
from txnkv.tables.tablets import SortedRows, Tablet, TabletView, until_there

See: TypeAlias = Callable[[Tablet], TabletView]
Columns: TypeAlias = dict[str, pa.Array]

_ROUNDS: Final = 16
"""So often it is looked which rows are refused because others are; after that all that take over
the values of others are.
"""


@dataclass(frozen=True)
class ChangedRows:
    """Rows of a table that change.

    Attributes:
        key: their keys, by column.
        new: what the indexed columns are to be; None where the rows go.
        old: what they are, null where there is no row; None where there are none.
        had: whether there is a row.
    """

    key: Columns
    new: Columns | None
    old: Columns | None
    had: pa.BooleanArray | None

    @property
    def n(self) -> int:
        return len(next(iter(self.key.values())))

    @classmethod
    def joined(cls, parts: Sequence[ChangedRows]) -> ChangedRows:
        """All of them as one; rows of one operation."""
        if len(parts) == 1:
            return parts[0]
        new = None if parts[0].new is None else _joined([part.new or {} for part in parts])
        key = _joined([part.key for part in parts])
        if all(part.old is None for part in parts):
            return cls(key, new, None, None)
        had = [pa.repeat(False, part.n) if part.had is None else part.had for part in parts]
        names = {name: array.type for part in parts for name, array in (part.old or {}).items()}
        old = {
            name: pa.concat_arrays(
                [pa.nulls(part.n, kind) if part.old is None else part.old[name] for part in parts]
            )
            for name, kind in names.items()
        }
        return cls(key, new, old, pa.concat_arrays(had))


class IndexChange(NamedTuple):
    """Rows to write and keys to delete in the hidden table of an index."""

    tablet: Tablet
    rows: SortedRows | None
    deleted: core.Keys | None


class Refused(NamedTuple):
    """Rows that are refused.

    Attributes:
        rows: their numbers, ascending.
        tablet: of the index,
        keys: and those of their entries.
        error: gives why, of one of them.
    """

    rows: pa.UInt32Array
    tablet: Tablet
    keys: core.Keys
    error: Callable[[int], AlreadyPresentError]

    def of(self, rows: pa.UInt32Array) -> Callable[[int], AlreadyPresentError]:
        """The errors of some of the rows, by their numbers among these."""
        return lambda number: self.error(rows[number].as_py())


def derive(
    indexes: Sequence[TableIndex], rows: ChangedRows, see: See
) -> tuple[list[IndexChange], list[Refused]]:
    """Return what a chunk of rows changes in indexes, without the rows that one of them refuses.

    Args:
        indexes: of the table.
        rows: in any order.
        see: gives what the writer sees of a tablet.
    """
    made = [_Entries(index, rows, see) for index in indexes]
    active, refused = pa.repeat(True, rows.n), []
    rounds, again = 0, True
    while again:
        again = False
        rounds += 1
        for look in (_Entries.taken, _Entries.doubled):
            for entries in made:
                found = look(entries, active, rounds > _ROUNDS)
                if found is not None:
                    refused.append(found)
                    left = core.Bitmap.of(rows.n, found.rows).to_arrow()
                    active, again = pc.and_not(active, left), True
            if again:
                break
    changes = [change for entries in made for change in entries.changes(active)]
    return changes, refused


class _Sorted:
    """Entries by key; some may have the same.

    Attributes:
        keys: ascending.
        rows: of which each is.
        distinct: each key once.
        of: the place of each key there; None: it is the same.
    """

    def __init__(self, index: TableIndex, columns: Columns, rows: pa.UInt32Array) -> None:
        self.rows = rows
        if len(rows) == 0:
            self.keys = self.distinct = core.Keys.of([])
            self.of: pa.UInt32Array | None = None
            return
        keys = index.tablet.codec.encode([columns[name].take(rows) for name in index.key])
        order = core.sort_keys(keys)
        if order is not None:
            keys, self.rows = keys.gather(order), rows.take(order.to_arrow())
        self.keys = self.distinct = keys
        self.of = None
        if order is not None:
            again = core.mark_duplicates(keys, None)
            if again.count:
                self.distinct = keys.gather(again.zeros())
                first = pc.invert(again.to_arrow()).cast(pa.uint32())
                self.of = pc.subtract(pc.cumulative_sum(first), pa.scalar(1, pa.uint32()))

    @property
    def n(self) -> int:
        return self.keys.n

    def each(self, of_distinct: pa.Array) -> pa.Array:
        """Facts of distinct keys, by entry."""
        return of_distinct if self.of is None else of_distinct.take(self.of)

    def some(self, mask: pa.BooleanArray) -> tuple[core.Keys, pa.UInt32Array]:
        """The entries of a mask: keys, each once, and the row of each."""
        keys, rows = _filtered(self.keys, mask), self.rows.filter(mask)
        again = core.mark_duplicates(keys, None) if self.of is not None else None
        if again is None or not again.count:
            return keys, rows
        first = again.zeros()
        return keys.gather(first), rows.take(first.to_arrow())


class _Entries:
    """The entries of one index that come and go with a chunk of rows."""

    def __init__(self, index: TableIndex, rows: ChangedRows, see: See) -> None:
        self._index, self._rows = index, rows
        new = None if rows.new is None else rows.key | rows.new
        old = None if rows.old is None else rows.key | rows.old
        comes = None if new is None else _all_valid(index, new, rows.n)
        goes = None
        if old is not None:
            goes = pc.and_(rows.had, _all_valid(index, old, rows.n))
        if index.ready and new is not None and old is not None:
            same = pc.and_(pc.and_(comes, goes), _equal(old, new, index.beside, rows.n))
            comes, goes = pc.and_not(comes, same), pc.and_not(goes, same)
        self._come = _Sorted(index, new or {}, _positions(comes))
        self._go = _Sorted(index, old or {}, _positions(goes))
        self._kept: list[tuple[core.Keys, Columns, pa.UInt32Array]] = []
        if index.checked and not index.ready and self._go.n:
            self._leave_to_others(see)
        self._there: pa.BooleanArray | None = None
        self._match: pa.Int32Array | None = None
        if index.checked and self._come.n:
            present, _ = _look(index, see, self._come.distinct, [])
            if present.count:
                self._there = self._come.each(present.to_arrow())
            if present.count and self._go.n:
                match = core.find(self._go.distinct, self._come.distinct)
                none = pa.scalar(None, match.type)
                match = pc.if_else(pc.greater_equal(match, 0), match, none)
                self._match = self._come.each(match)

    def _leave_to_others(self, see: See) -> None:
        """While it is built: an entry that is another row's stays as it is."""
        index, go = self._index, self._go
        present, there = _look(index, see, go.distinct, index.tablet.value_names)
        if not present.count:
            return
        others = pc.and_not(go.each(present.to_arrow()), _own(index, go, there, self._rows.key))
        if not pc.any(others).as_py():
            return
        keys, rows = go.some(others)
        first = core.Rows.from_arrow(core.find(go.distinct, keys).cast(pa.uint32())).to_arrow()
        values = zip(index.tablet.value_names, there, strict=True)
        self._kept = [(keys, {name: column.take(first) for name, column in values}, rows)]
        mine = pc.invert(others)
        self._go = _Sorted(index, self._rows.key | (self._rows.old or {}), go.rows.filter(mine))

    # -- what is refused ---------------------------------------------------------------

    def taken(self, active: pa.BooleanArray, last: bool) -> Refused | None:
        """The rows whose new entries are there and stay there."""
        come, go = self._come, self._go
        if self._there is None:
            return None
        on = pc.and_(self._there, active.take(come.rows))
        if self._match is not None and not last:
            going = active.take(go.some(pa.repeat(True, go.n))[1])
            on = pc.and_not(on, pc.fill_null(going.take(self._match), False))
        return self._refused(on, earlier=False)

    def doubled(self, active: pa.BooleanArray, last: bool) -> Refused | None:
        """The rows whose new entries are those of other rows, all but the first."""
        come = self._come
        if come.of is None:
            return None
        on = active.take(come.rows)
        again = core.mark_duplicates(_filtered(come.keys, on), None)
        if not again.count:
            return None
        spots = _positions(on).take(again.positions().to_arrow())
        return self._refused(core.Bitmap.of(come.n, spots.sort()).to_arrow(), earlier=True)

    def _refused(self, which: pa.BooleanArray, *, earlier: bool) -> Refused | None:
        come = self._come
        rows = come.rows.filter(which)
        if not len(rows):
            return None

        def error(row: int) -> AlreadyPresentError:
            at = pc.index(come.rows, pa.scalar(row, pa.uint32())).as_py()
            return self._index.taken(come.keys.key(at), earlier=earlier)

        tablet = self._index.tablet
        return Refused(rows.sort(), tablet, _filtered(come.keys, which), error)

    # -- what is written ---------------------------------------------------------------

    def changes(self, active: pa.BooleanArray) -> list[IndexChange]:
        """Return what changes with the rows that are not refused."""
        index, come, go = self._index, self._come, self._go
        tablet, made = index.tablet, []
        keys, rows = come.some(active.take(come.rows)) if come.n else (come.keys, come.rows)
        names = tablet.value_names
        columns = {
            name: self._rows.key[of].take(rows) for name, of in zip(names, index.rest, strict=True)
        }
        written = keys
        for kept, values, of in self._kept:
            on = active.take(of)
            kept, values = _filtered(kept, on), {n: c.filter(on) for n, c in values.items()}
            keys, columns = _merged(keys, columns, kept, values)
        if keys.n:
            batch = pa.record_batch(list(columns.values()), names=list(columns))
            made.append(IndexChange(tablet, SortedRows(keys, batch, None), None))
        if go.n:
            gone, _ = go.some(active.take(go.rows))
            if gone.n and written.n:
                common = core.mark_common(gone, written)
                gone = gone.gather(common.zeros()) if common.count else gone
            if gone.n:
                made.append(IndexChange(tablet, None, gone))
        return made


def _look(
    index: TableIndex, see: See, keys: core.Keys, names: Sequence[str]
) -> tuple[core.Bitmap, list[pa.Array]]:
    """The keys that are there; and columns of those, null where there are none."""
    tablet = index.tablet
    found = until_there(lambda: lookup.search(see(tablet), keys, names), tablet.reload)
    at = [hit.positions for hit in found]
    positions = pa.concat_arrays(at) if at else pa.array([], pa.uint32())
    spots = pc.index_in(core.Rows.range(keys.n).to_arrow(), value_set=positions)
    columns = [
        pa.concat_arrays([hit.columns[i] for hit in found]).take(spots)
        for i in range(len(names) if found else 0)
    ]
    return core.Bitmap.of(keys.n, positions), columns


def _own(
    index: TableIndex, entries: _Sorted, there: Sequence[pa.Array], key: Columns
) -> pa.BooleanArray:
    """Which entries are there as those of their rows."""
    same: Any = pa.repeat(True, entries.n)
    for column, name in zip(there, index.rest, strict=True):
        a = core.comparable(entries.each(column))
        b = core.comparable(key[name].take(entries.rows))
        equal = pc.equal(a, b)
        if pa.types.is_floating(a.type):
            equal = pc.or_(equal, pc.and_(pc.is_nan(a), pc.is_nan(b)))
        same = pc.and_(same, pc.fill_null(equal, False))
    return same


class Lacking(NamedTuple):
    """The rows that have no entry, of some.

    Attributes:
        entries: what they lack; None for nothing.
        rows: the numbers of those rows.
        there: how many rows have theirs.
        twice: keys of entries that two rows would have.
    """

    entries: SortedRows | None
    rows: pa.UInt32Array
    there: int
    twice: core.Keys


def lacking(index: TableIndex, rows: ChangedRows, see: See) -> Lacking:
    """Look for the entries of rows that are there.

    Args:
        index: of the table.
        rows: their keys, and `new`.
        see: gives what is seen of a tablet, the same as of the rows.
    """
    columns = rows.key | (rows.new or {})
    should = _Sorted(index, columns, _positions(_all_valid(index, columns, rows.n)))
    nothing = should.keys.slice(0, 0)
    if not should.n:
        return Lacking(None, should.rows, 0, nothing)
    names = index.tablet.value_names
    present, there = _look(index, see, should.distinct, names)
    has = pc.and_(
        should.each(present.to_arrow()),
        _own(index, should, there, rows.key) if present.count else pa.repeat(False, should.n),
    )
    no = pc.invert(has)
    taken = pc.and_(no, should.each(present.to_arrow()))
    again = core.mark_duplicates(should.keys, None) if should.of is not None else None
    twice = pc.or_(taken, again.to_arrow()) if again is not None else taken
    keys, of = should.some(no)
    named = zip(names, index.rest, strict=True)
    made = {name: rows.key[column].take(of) for name, column in named}
    batch = pa.record_batch(list(made.values()), names=list(made))
    lack = SortedRows(keys, batch, None) if keys.n else None
    found = core.Bitmap.from_arrow(has).count
    return Lacking(lack, of, found, _filtered(should.keys, twice))


def _merged(
    keys: core.Keys, columns: Columns, more: core.Keys, values: Columns
) -> tuple[core.Keys, Columns]:
    if not (keys.n and more.n):
        return (keys, columns) if keys.n else (more, values)
    both = core.Keys.concat([keys, more])
    joined = {name: pa.concat_arrays([columns[name], values[name]]) for name in columns}
    order = core.sort_keys(both)
    if order is None:
        return both, joined
    at = order.to_arrow()
    return both.gather(order), {name: column.take(at) for name, column in joined.items()}


def _joined(parts: Sequence[Columns]) -> Columns:
    return {name: pa.concat_arrays([part[name] for part in parts]) for name in parts[0]}


def _filtered(keys: core.Keys, mask: pa.BooleanArray) -> core.Keys:
    bits = core.Bitmap.from_arrow(mask)
    return keys if bits.count == keys.n else keys.gather(bits.positions())


def _positions(mask: pa.BooleanArray | None) -> pa.UInt32Array:
    if mask is None:
        return pa.array([], pa.uint32())
    return pc.indices_nonzero(mask).cast(pa.uint32())


def _all_valid(index: TableIndex, columns: Columns, n: int) -> pa.BooleanArray:
    """Which rows have no null among the indexed columns."""
    found: Any = pa.repeat(True, n)
    for name in index.beside:
        if columns[name].null_count:
            found = pc.and_(found, pc.is_valid(columns[name]))
    return found


def _equal(a: Columns, b: Columns, names: Sequence[str], n: int) -> pa.BooleanArray:
    """Which rows have the same values in two places; those with a null have not."""
    found: Any = pa.repeat(True, n)
    for name in names:
        same = pc.equal(core.comparable(a[name]), core.comparable(b[name]))
        found = pc.and_(found, pc.fill_null(same, False))
    return found
