"""Rows on their way in: what an operation makes of them.

batch -> arrange     placed in tablets, keys encoded and sorted, doubles taken out
      -> look        which keys are there                              (read.lookup)
      -> decide      rows to write, keys to delete, what is refused or ignored
      -> complete    columns that an update leaves out, from the rows that are there
      -> index       entries of those rows in indexes, and of the rows that they replace
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Final

import pyarrow as pa

from txnkv import core
from txnkv.core import compute as pc
from txnkv.errors import (
    RowError,
    RowErrors,
    TxnkvError,
)
from txnkv.tables.operations import (
    DELETES,
    INSERTS,
    PARTIAL,
    RULES,
    Effect,
    already_there,
    incomplete,
    not_there,
    require_operation,
)
from txnkv.tables.partitioning import Partitioning
from txnkv.tables.read import ReadView, lookup
from txnkv.tables.read_set import ReadSet
from txnkv.tables.schema import Schema
from txnkv.tables.table_catalog import TableInfo
from txnkv.tables.table_index import TableIndex
from txnkv.tables.tables import Tables
from txnkv.tables.tablets import (
    RowSetInfo,
    SortedRows,
    Tablet,
    TabletView,
    manifest,
    until_there,
)
from txnkv.tables.write.index_changes import ChangedRows, IndexChange, Refused, derive

__all__ = ["Evaluated", "Incoming", "Outcome", "arrange", "evaluate", "require_operation"]

_NONE: Final = pa.nulls(0, pa.uint32())


@dataclass
class Outcome:
    """The outcome for some rows: counts, and the errors of those that were refused.

    Attributes:
        errors: the first `RowErrors.KEPT` of those that were refused.
        refused: how many were.
    """

    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    ignored: int = 0
    errors: list[RowError] = field(default_factory=list)
    refused: int = 0

    def add(self, other: Outcome) -> None:
        self.inserted += other.inserted
        self.updated += other.updated
        self.deleted += other.deleted
        self.ignored += other.ignored
        self.errors.extend(other.errors[: RowErrors.KEPT - len(self.errors)])
        self.refused += other.refused


@dataclass
class _Sorting(Outcome):
    """The outcome for a batch, of which `errors` are made at the end.

    Attributes:
        found: what is refused, with the places of these rows in the batch.
    """

    found: list[tuple[int, RowError]] = field(default_factory=list)

    def sort(self) -> Outcome:
        """Put what is refused in the order of the batch."""
        self.found.sort(key=itemgetter(0))
        self.errors = [error for _, error in self.found[: RowErrors.KEPT]]
        return self


@dataclass(frozen=True)
class Incoming:
    """Rows of one tablet, in key order and without doubles among them.

    Attributes:
        again: of each row left out for another of its key, the position of that one.
        doubles: and its own place in the batch.
    """

    tablet: Tablet
    rows: SortedRows
    again: pa.UInt32Array = field(default_factory=lambda: _NONE)
    doubles: pa.UInt32Array = field(default_factory=lambda: _NONE)


@dataclass(frozen=True)
class Evaluated:
    """The changes of an operation in one tablet: rows to write, or keys to delete.

    Attributes:
        rows: with all columns of the table; None for a delete.
        replaces: some of their keys are there already.
        deleted: ascending.
    """

    tablet: Tablet
    rows: SortedRows | None
    replaces: bool = False
    deleted: core.Keys | None = None

    @property
    def keys(self) -> core.Keys:
        keys = self.deleted if self.rows is None else self.rows.keys
        assert keys is not None
        return keys


@dataclass(frozen=True)
class Presence:
    """The result of a look for n keys, strictly ascending.

    Attributes:
        found: where rows are; no key is in two of them.
        names: of the columns of these that were asked for.
    """

    n: int
    found: Sequence[lookup.Found]
    names: Sequence[str]

    @property
    def positions(self) -> pa.UInt32Array:
        """The keys that are there, ascending."""
        if not self.found:
            return _NONE
        if len(self.found) == 1:
            return self.found[0].positions
        return self.bitmap.positions().to_arrow()

    @property
    def bitmap(self) -> core.Bitmap:
        """A bit for each key that is there."""
        if not self.found:
            return core.Bitmap.none(self.n)
        return core.Bitmap.of(self.n, pa.concat_arrays([hit.positions for hit in self.found]))


def evaluate(
    tables: Tables,
    table: TableInfo,
    view: ReadView,
    batch: pa.RecordBatch,
    op: str,
    outcome: Outcome,
) -> list[Evaluated]:
    """Return the changes of an operation on a batch, in each tablet, for a writer that sees `view`.

    Args:
        batch: as `arrow_input.chunks` makes them for `op`.
        outcome: takes the counts, and what is refused.

    Raises:
        InvalidTxnStateError: the view's transaction is not OPEN.
    """
    parts = arrange(tables.tablets(table), table.partitioning, batch, op)
    stored = () if view.txn_id is None else parts
    sought = {part.tablet.id: part.tablet.sought(part.rows.keys) for part in stored}

    def see(tablet: Tablet) -> TabletView:
        staged: Sequence[RowSetInfo] = ()
        if view.txn_id is not None:
            with tables.store.status.read() as cur:
                staged = manifest.staged(cur, view.txn_id, tablet.id, sought=sought.get(tablet.id))
        own = None if view.own is None else view.own.memory(tablet.id)
        state = tablet.state(view.snapshot)
        asked = sought.get(tablet.id)
        return TabletView.of(tablet, view.snapshot, state, own, staged, sought=asked)

    return decide(parts, see, op, outcome, view.reads, tables.indexes(table))


# -- placing ---------------------------------------------------------------------------


def arrange(
    tablets: Sequence[Tablet],
    partitioning: Partitioning,
    batch: pa.RecordBatch,
    op: str,
) -> list[Incoming]:
    """Place, encode and sort the rows of a batch. Of rows with one key the first stands for
    inserts and deletes, the last for upserts and updates.

    Args:
        tablets: of the table, by number.
        partitioning: of the table.
        batch: with the key columns at least.
    """
    key = [batch.column(name) for name in tablets[0].schema.primary_key]
    keys = tablets[0].codec.encode(key)
    prepared = []
    for tablet, rows in zip(tablets, partitioning.place(batch), strict=True):
        if rows is not None and rows.n == 0:
            continue
        order = core.sort_keys(keys, rows)
        if order is None:
            ordered = keys if rows is None else keys.gather(rows)
            prepared.append(Incoming(tablet, SortedRows(ordered, batch, rows)))
            continue
        ordered = keys.gather(order)
        doubles = core.mark_duplicates(ordered, None)
        if not doubles.count:
            prepared.append(Incoming(tablet, SortedRows(ordered, batch, order)))
            continue
        spots, one = doubles.positions().to_arrow(), pa.scalar(1, pa.uint32())
        before = pc.add(core.Rows.range(len(spots)).to_arrow(), one)
        kept = _last_of_each(doubles) if op in PARTIAL else doubles.zeros().to_arrow()
        once = SortedRows(
            ordered.gather(core.Rows.from_arrow(kept)),
            batch,
            core.Rows.from_arrow(order.to_arrow().take(kept)),
        )
        left = order.to_arrow().take(pc.subtract(spots, one) if op in PARTIAL else spots)
        prepared.append(Incoming(tablet, once, pc.subtract(spots, before), left))
    return prepared


def _last_of_each(doubles: core.Bitmap) -> pa.UInt32Array:
    """The last of each run of equal keys; `doubles` marks all but the first."""
    firsts = doubles.zeros().to_arrow()
    end = pa.array([doubles.n], pa.uint32())
    return pc.subtract(pa.concat_arrays([firsts.slice(1), end]), pa.scalar(1, pa.uint32()))


# -- deciding --------------------------------------------------------------------------


def decide(
    parts: Sequence[Incoming],
    see: Callable[[Tablet], TabletView],
    op: str,
    outcome: Outcome,
    reads: ReadSet | None = None,
    indexes: Sequence[TableIndex] = (),
) -> list[Evaluated]:
    """Look for the keys of some parts; return what is left of them, rows or deletes, and what that
    changes in indexes.

    Args:
        parts: of a batch, by tablet.
        see: gives what the writer sees of a tablet now.
        outcome: takes the counts, and what is refused or ignored.
        reads: takes the keys, when some of them are not written.
        indexes: of the table.
    """
    made = _Sorting()
    fresh = _decided(parts, see, op, made, reads, indexes)
    outcome.add(made.sort())
    return fresh


def _decided(
    parts: Sequence[Incoming],
    see: Callable[[Tablet], TabletView],
    op: str,
    outcome: _Sorting,
    reads: ReadSet | None,
    indexes: Sequence[TableIndex],
) -> list[Evaluated]:
    if not indexes:
        made = (_counted(_look(part, see, op, ()), op, outcome, reads) for part in parts)
        return [each for each in made if each is not None]
    beside = list(dict.fromkeys(name for index in indexes for name in index.beside))
    looked = [_look(part, see, op, beside) for part in parts]
    left = [each for each in looked if each.rows is not None]
    changes: list[IndexChange] = []
    if left:
        rows = ChangedRows.joined([_changed(each, op, beside) for each in left])
        changes, refused = derive(indexes, rows, see)
        for some in refused:
            _refuse(left, some, op, outcome)
            if reads is not None:
                reads.add_keys(some.tablet.id, some.keys)
    found = (_counted(each, op, outcome, reads) for each in looked)
    return [
        *(each for each in found if each is not None),
        *(Evaluated(at, rows, rows is not None, gone) for at, rows, gone in changes),
    ]


@dataclass
class _Looked:
    """A part, and which of its keys are there.

    Attributes:
        rows: those that the operation takes, with all columns of the table; None for none.
        kept: their positions in the part; None: all.
        old: columns of the rows that are there, with the positions of these in the part.
        refused: positions in `rows` of those that an index refuses.
    """

    part: Incoming
    present: Presence
    rows: SortedRows | None
    kept: core.Rows | None
    refused: pa.UInt32Array | None = None


def _look(
    part: Incoming, see: Callable[[Tablet], TabletView], op: str, beside: Sequence[str]
) -> _Looked:
    """Look for the keys of a part.

    Args:
        beside: columns of the rows that are there which indexes have, too.
    """
    keys = part.rows.keys
    missing = missing_columns(part.tablet.schema, part.rows.batch) if op in PARTIAL else []
    names = missing
    if beside and op not in INSERTS:
        names = [*missing, *(name for name in beside if name not in missing)]
    found = until_there(lambda: lookup.search(see(part.tablet), keys, names), part.tablet.reload)
    present = Presence(keys.n, found, names)
    kept, some = _chosen(part, present, op)
    rows = None if not some else part.rows if kept is None else _some(part.rows, kept)
    if rows is not None and missing:
        rows = _complete(part, rows, present, missing)
    return _Looked(part, present, rows, kept)


def _counted(
    looked: _Looked, op: str, outcome: _Sorting, reads: ReadSet | None
) -> Evaluated | None:
    """Count what became of a part; return what is left of it."""
    part, rows = looked.part, looked.rows
    _count(part, looked.present, op, outcome)
    if rows is not None and looked.refused is not None:
        left = core.Bitmap.of(rows.keys.n, looked.refused).zeros()
        rows = _some(rows, left) if left.n else None
    if reads is not None and (rows is None or rows.keys.n < part.rows.keys.n):
        reads.add_keys(part.tablet.id, part.rows.keys)
    if rows is None:
        return None
    if op in DELETES:
        return Evaluated(part.tablet, None, deleted=rows.keys)
    replaces = op not in INSERTS and bool(looked.present.found)
    return Evaluated(part.tablet, rows, replaces=replaces)


def _chosen(part: Incoming, present: Presence, op: str) -> tuple[core.Rows | None, bool]:
    """The positions whose keys are as the operation wants them, None for all; and whether there
    are any.
    """
    n, found = part.rows.keys.n, len(present.positions)
    if RULES[op].there is Effect.REFUSED:
        kept = None if found == 0 else present.bitmap.zeros()
    elif RULES[op].absent is Effect.REFUSED or _missing_required(part):
        kept = None if found == n else core.Rows.from_arrow(present.positions)
    else:
        kept = None
    return kept, bool(n if kept is None else kept.n)


def _some(rows: SortedRows, kept: core.Rows) -> SortedRows:
    order = kept
    if rows.order is not None:
        order = core.Rows.from_arrow(rows.order.to_arrow().take(kept.to_arrow()))
    return SortedRows(rows.keys.gather(kept), rows.batch, order)


def _changed(looked: _Looked, op: str, beside: Sequence[str]) -> ChangedRows:
    """Return the rows of a part as indexes look at them."""
    part, rows, present = looked.part, looked.rows, looked.present
    assert rows is not None
    at = None if rows.order is None else rows.order.to_arrow()

    def given(names: Sequence[str]) -> dict[str, pa.Array]:
        columns = {name: rows.batch.column(name) for name in names}
        return columns if at is None else {name: c.take(at) for name, c in columns.items()}

    key = given(part.tablet.schema.primary_key)
    new = None if op in DELETES else given(beside)
    if op in INSERTS or not present.found:
        return ChangedRows(key, new, None, None)
    absent = present.bitmap.zeros() if rows.keys.n > len(present.positions) else None
    columns = part.tablet.schema.columns
    none = [pa.nulls(absent.n if absent else 0, columns[name].type) for name in present.names]
    there = [(hit.positions, hit.columns) for hit in present.found]
    if absent is not None:
        there.append((absent.to_arrow(), none))
    old = dict(zip(present.names, _by_position(there), strict=True))
    had = pa.repeat(True, rows.keys.n) if absent is None else present.bitmap.to_arrow()
    return ChangedRows(key, new, {name: old[name] for name in beside}, had)


def _refuse(left: Sequence[_Looked], refused: Refused, op: str, outcome: _Sorting) -> None:
    """Take out the rows that an index refuses, and what will be counted for them."""
    start = 0
    for looked in left:
        rows, part = looked.rows, looked.part
        assert rows is not None
        n = rows.keys.n
        inside = pc.and_(pc.greater_equal(refused.rows, start), pc.less(refused.rows, start + n))
        here = refused.rows.filter(inside)
        mine = pc.subtract(here, pa.scalar(start, pa.uint32()))
        if len(mine):
            looked.refused = mine if looked.refused is None else _joined(looked.refused, mine)
            at = mine if looked.kept is None else looked.kept.to_arrow().take(mine)
            had = pc.sum(looked.present.bitmap.to_arrow().take(at)).as_py() or 0
            again = 0  # earlier rows of their keys
            if op in PARTIAL:
                again = pc.sum(pc.is_in(part.again, value_set=at)).as_py() or 0
            outcome.inserted -= len(at) - had
            outcome.updated -= had + again
            _leave(outcome, op, part, at, refused.of(here))
            if RULES[op].ignores:
                outcome.ignored += again
            else:
                outcome.refused += again
        start += n


def _count(part: Incoming, present: Presence, op: str, outcome: _Sorting) -> None:
    """Add what became of the rows of a part."""
    n, found, rule = part.rows.keys.n, len(present.positions), RULES[op]
    if rule.there is Effect.REFUSED:
        _leave(outcome, op, part, part.again, lambda _: already_there(earlier=True), part.doubles)
        for hit in present.found:
            _leave(outcome, op, part, hit.positions, _there(own=hit.own))
        outcome.inserted += n - found
        return
    again, doubles = part.again, part.doubles
    lost = late = _NONE
    if len(again) and found < n:
        known = present.bitmap.to_arrow().take(again)
        unknown = pc.invert(known)
        lost, late = again.filter(unknown), doubles.filter(unknown)
        again, doubles = again.filter(known), doubles.filter(known)
    absent = _NONE if found == n else present.bitmap.zeros().to_arrow()
    if rule.there is Effect.GONE:
        outcome.deleted += found
        _leave(outcome, op, part, again, lambda _: not_there(earlier=True), doubles)
    else:
        outcome.updated += found + len(again)
    required = [] if rule.absent is Effect.REFUSED else _missing_required(part)
    if rule.absent is Effect.REFUSED or required:
        columns = ", ".join(required)
        for rows, places in ((absent, None), (lost, late)):
            _leave(
                outcome,
                op,
                part,
                rows,
                lambda _: incomplete(columns) if columns else not_there(),
                places,
            )
        return
    outcome.inserted += len(absent)
    outcome.updated += len(lost)


def _there(*, own: bool) -> Callable[[int], TxnkvError]:
    return lambda _: already_there(own=own)


def _joined(a: pa.UInt32Array, b: pa.UInt32Array) -> pa.UInt32Array:
    return pa.concat_arrays([a, b]) if len(a) and len(b) else a if len(a) else b


def _leave(
    outcome: _Sorting,
    op: str,
    part: Incoming,
    positions: pa.UInt32Array,
    error: Callable[[int], TxnkvError],
    places: pa.UInt32Array | None = None,
) -> None:
    """Refuse or ignore the rows of these positions.

    Args:
        error: gives why, of one of them by its number among them.
        places: theirs in the batch; None: those of the rows that stand at the positions.
    """
    if not len(positions):
        return
    if RULES[op].ignores:
        outcome.ignored += len(positions)
        return
    outcome.refused += len(positions)
    if places is None:
        order = part.rows.order
        places = positions if order is None else order.to_arrow().take(positions)
    tablet, keys = part.tablet, part.rows.keys
    firsts = pc.sort_indices(places).slice(0, RowErrors.KEPT)
    columns = (each.to_pylist() for each in (firsts, positions.take(firsts), places.take(firsts)))
    for number, position, place in zip(*columns, strict=True):
        key = tablet.readable_key(keys.key(position))
        outcome.found.append((place, RowError(op, tablet.table.name, key, error(number))))


# -- completing ------------------------------------------------------------------------


def missing_columns(schema: Schema, batch: pa.RecordBatch) -> list[str]:
    """The columns of a table that a batch leaves out."""
    return [name for name in schema.names if name not in batch.schema.names]


def _missing_required(part: Incoming) -> list[str]:
    """Columns left out that a new row needs."""
    columns = part.tablet.schema.columns
    return [
        name
        for name in missing_columns(part.tablet.schema, part.rows.batch)
        if not columns[name].nullable and columns[name].default is None
    ]


def _complete(
    part: Incoming, rows: SortedRows, present: Presence, missing: Sequence[str]
) -> SortedRows:
    """`rows` with all columns: those left out keep what is there, or take their default."""
    tablet = part.tablet
    there = [(hit.positions, hit.columns[: len(missing)]) for hit in present.found]
    if rows.keys.n > len(present.positions):
        absent = present.bitmap.zeros()
        columns = tablet.schema.columns
        new = [
            core.repeated(columns[name].type, columns[name].default, absent.n) for name in missing
        ]
        there.append((absent.to_arrow(), new))
    found = dict(zip(missing, _by_position(there), strict=True))
    for name in rows.batch.schema.names:
        column = rows.batch.column(name)
        found[name] = column if rows.order is None else column.take(rows.order.to_arrow())
    schema = tablet.schema
    whole = pa.record_batch([found[name] for name in schema.names], schema=schema.arrow)
    return replace(rows, batch=whole, order=None)


def _by_position(hits: Sequence[tuple[pa.UInt32Array, list[pa.Array]]]) -> Iterator[pa.Array]:
    """Columns of rows from several places, put together in the order of their positions."""
    if len(hits) == 1:
        yield from hits[0][1]
        return
    order = pc.sort_indices(pa.concat_arrays([positions for positions, _ in hits]))
    for pieces in zip(*(arrays for _, arrays in hits), strict=True):
        yield pa.concat_arrays(pieces).take(order)
