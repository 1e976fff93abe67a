"""Reads by primary key: one row, or many.

Some keys at once are looked for in all settled row sets of a tablet as if they were one. Row sets
whose key ranges do not overlap follow one another like the blocks of one; most row sets of a tablet
do, those of a load and those that compaction has merged. So their blocks are strung together, and
what is asked for is found and read in a call for each column, not in one for each column and block.
Row sets that overlap make a chain each.

    row set 7    blocks from  a, f
    row set 4    blocks from  m, p, t         one chain: a f m p t w
    row set 9    blocks from  w
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from txnkv import core
from txnkv.core import compute as pc
from txnkv.tables.arrow_input import key_values
from txnkv.tables.read import point
from txnkv.tables.read.point import PointBlock, at_hand, find, present
from txnkv.tables.read.sources import memory_columns
from txnkv.tables.read.view import ReadView
from txnkv.tables.schema import Schema, column_array
from txnkv.tables.table_catalog import TableInfo
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
    Tablet,
    TabletState,
    TabletView,
    until_there,
)

_FEW: Final = 1 << 14
"""So many keys are looked for in all blocks of a row set at once; more go block by block."""

__all__ = [
    "Found",
    "find",
    "find_many",
    "get",
    "get_many",
    "present",
    "search",
]


def get(tables: Tables, table: TableInfo, view: ReadView, key: Any) -> dict[str, Any] | None:
    """The row with this key, or None.

    Raises:
        SchemaError: the key does not fit the table.
        As `point.find`.
    """
    writer = tables.row_writer(table)
    values = writer.checker.of("delete")(key)
    encoded = writer.key(values)
    found = point.find(tables, writer.tablet(values, encoded), view, encoded)
    return None if found is None else writer.row(values, found)


def get_many(tables: Tables, table: TableInfo, view: ReadView, keys: Sequence[Any]) -> pa.Table:
    """The rows with these keys, in their order; a row of nulls where there is none."""
    schema = table.schema
    result = pa.schema([field.with_nullable(True) for field in schema.arrow])
    columns = _key_columns(schema, keys)
    batch = pa.record_batch(columns, names=list(schema.primary_key))
    if batch.num_rows == 0:
        return result.empty_table()
    tablets = tables.tablets(table)
    encoded = tablets[0].codec.encode(columns)
    numbers: list[pa.Array] = []
    pieces: list[pa.RecordBatch] = []
    for tablet, rows in zip(tablets, table.partitioning.place(batch), strict=True):
        if rows is not None and rows.n == 0:
            continue
        order, probes, first = _ascending(encoded, rows)
        for found in find_many(tables, tablet, view, probes, schema.names):
            asked, taken = _asked(found.positions, order, first, probes.n)
            arrays = found.columns if taken is None else [a.take(taken) for a in found.columns]
            pieces.append(pa.RecordBatch.from_arrays(arrays, schema=result))
            numbers.append(asked)
    if not pieces:
        return pa.table([pa.nulls(batch.num_rows, field.type) for field in result], schema=result)
    wanted = core.Rows.range(batch.num_rows).to_arrow()
    position = pc.index_in(wanted, value_set=pa.concat_arrays(numbers))
    return pa.Table.from_batches(pieces, result).combine_chunks().take(position)


def _key_columns(schema: Schema, keys: Sequence[Any]) -> list[pa.Array]:
    if isinstance(keys, pa.ChunkedArray):
        keys = keys.combine_chunks()
    if len(schema.primary_key) == 1:
        (name,) = schema.primary_key
        at_once = _as_array(schema.columns[name].type, keys)
        if at_once is not None:
            return [at_once]
    if isinstance(keys, pa.Array):
        keys = keys.to_pylist()
    rows = [key_values(schema, key) for key in keys]
    return [
        column_array(name, schema.columns[name].type, [row[i] for row in rows])
        for i, name in enumerate(schema.primary_key)
    ]


def _as_array(kind: pa.DataType, keys: Sequence[Any]) -> pa.Array | None:
    """Keys that can be seen to fit, without a look at each; None for others."""
    if isinstance(keys, pa.Array):
        return keys if keys.type == kind and keys.null_count == 0 else None
    plain = int if pa.types.is_integer(kind) else str if pa.types.is_string(kind) else None
    if set(map(type, keys)) != {plain}:
        return None
    try:
        return pa.array(keys, kind)
    except (pa.ArrowInvalid, OverflowError, UnicodeError):
        return None


def _ascending(
    keys: core.Keys, rows: core.Rows | None
) -> tuple[pa.UInt32Array, core.Keys, pa.UInt32Array | None]:
    """Some of `keys` in strictly ascending order.

    Returns:
        Their positions in ascending order of the keys; the keys, each once; and, when one was
        there twice, at which of those positions each different key begins.
    """
    order = core.sort_keys(keys, rows) or rows or core.Rows.range(keys.n)
    probes = keys.gather(order)
    doubles = core.mark_duplicates(probes, None)
    if doubles.count == 0:
        return order.to_arrow(), probes, None
    once = doubles.zeros()
    return order.to_arrow(), probes.gather(once), once.to_arrow()


def _asked(
    positions: pa.UInt32Array, order: pa.UInt32Array, first: pa.UInt32Array | None, n: int
) -> tuple[pa.UInt32Array, pa.UInt32Array | None]:
    """Which of the asked keys the found ones are, and, where a key was asked for twice, which
    found row each gets.
    """
    if first is None:
        return (order if len(positions) == n else order.take(positions)), None
    # Asked position i has the different key number of the last beginning at or before i.
    begins = core.Bitmap.of(len(order), first).to_arrow().cast(pa.uint32())
    number = pc.subtract(pc.cumulative_sum(begins), pa.scalar(1, pa.uint32()))
    taken = pc.index_in(number, value_set=positions)
    there = pc.is_valid(taken)
    return order.filter(there), taken.filter(there).cast(pa.uint32())


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


def find_many(
    tables: Tables, tablet: Tablet, view: ReadView, keys: core.Keys, names: Sequence[str]
) -> list[Found]:
    """The rows of some keys of a tablet, in pieces; no key is in two of them.

    Args:
        tables: of the store.
        tablet: where the keys belong.
        view: what is seen.
        keys: strictly ascending.
        names: columns to read.

    Raises:
        TxnNotFoundError, InvalidTxnStateError: the view's transaction is not OPEN.
        HistoryExpiredError: the snapshot is older than the history.
    """
    if view.reads is not None:
        view.reads.add_keys(tablet.id, keys)
    return until_there(lambda: search(view.of(tables, tablet), keys, names), tables.log.latest)


def search(
    view: TabletView, keys: core.Keys, names: Sequence[str], *, stamps: bool = False
) -> list[Found]:
    """Return the rows of some keys, as `find_many` does, by a view that was taken before.

    Args:
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
        for step in view.staged_steps:
            yield from self._row_set(step, decide=True, own=True)
        if view.has_memory:
            yield from self._memory(view.state.memory, view.after, view.snapshot)
        steps = view.steps
        if not view.unresolved and self._names and not self._stamps and self._keys.n <= _FEW:
            steps = yield from self._chained(steps)
        for step in steps:
            yield from self._row_set(step, decide=bool(view.unresolved))

    def _chained(self, steps: tuple[Step, ...]) -> Generator[Found, None, tuple[Step, ...]]:
        """Rows of few keys in settled row sets; answers where they were not looked for."""
        view = self._view
        if self._keys.n == 0 or not steps or view.snapshot < view.state.highest:
            return steps
        with self._tablet.read() as pages:
            known = chains_of(self._tablet, view.state, pages)
            for chain in known.chains:
                for some in find_some(
                    self._tablet, chain, pages, self._keys, self._names, view.snapshot
                ):
                    yield self._found(*some)
        return tuple(map(Step, known.others))

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
            if info.kind != TOMBSTONES:
                for positions, columns, stamps in self._rows(pages, row_set, step.before):
                    yield self._found(positions, columns, stamps, own)
                    done.append(positions)
            if step.hides and (info.kind == TOMBSTONES or info.deleted):
                done = [row_set.common(pages, keys)]
        if decide and done:
            self._decided(pa.concat_arrays(done))

    def _rows(
        self, pages: Pages, row_set: RowSet, before: int
    ) -> Iterator[tuple[pa.UInt32Array, list[pa.Array], pa.UInt64Array | None]]:
        snapshot = self._view.snapshot
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


@dataclass(frozen=True)
class Chain:
    """Blocks of row sets that do not overlap, in key order.

    Attributes:
        firsts: the first key of each.
        blocks: of which row set each is, and its number there.
        deleted: some of their rows are.
    """

    firsts: core.Keys
    blocks: Sequence[tuple[RowSet, int]]
    deleted: bool


@dataclass(frozen=True)
class Chains:
    """The settled row sets of a state: strung together, and those that cannot be, as they may
    hold several versions of a key.
    """

    state: TabletState
    chains: Sequence[Chain]
    others: Sequence[RowSetInfo]


def chains_of(tablet: Tablet, state: TabletState, pages: Pages) -> Chains:
    """The chains of a state, remembered while it stays the same."""
    known: Chains | None = tablet.chains
    if known is None or known.state is not state:
        known = tablet.chains = _made(tablet, state, pages)
    return known


def _made(tablet: Tablet, state: TabletState, pages: Pages) -> Chains:
    strung: list[list[RowSetInfo]] = []
    others = []
    for info in sorted(state.settled, key=lambda info: info.min_key):
        if info.versioned:
            others.append(info)
            continue
        chain = next((c for c in strung if c[-1].max_key < info.min_key), None)
        if chain is None:
            strung.append([info])
        else:
            chain.append(info)
    chains = []
    for infos in strung:
        row_sets = [tablet.row_set(info) for info in infos]
        numbers = [range(len(row_set.header(pages).blocks)) for row_set in row_sets]
        chains.append(
            Chain(
                tablet.keys_of([first for row_set in row_sets for first in row_set.firsts]),
                [(r, n) for r, each in zip(row_sets, numbers, strict=True) for n in each],
                any(info.deleted for info in infos),
            )
        )
    return Chains(state, chains, others)


def find_some(
    tablet: Tablet,
    chain: Chain,
    pages: Pages,
    keys: core.Keys,
    names: Sequence[str],
    snapshot: int,
) -> Iterator[tuple[pa.UInt32Array, list[pa.Array]]]:
    """Rows of some keys (ascending) in a chain, of which a snapshot sees all row sets.

    Yields:
        Positions of keys, and columns of their rows; nothing when none is there.
    """
    held: list[PointBlock | None] = [None] * len(chain.blocks)
    for number in pc.unique(core.range_partition(keys, chain.firsts)).to_pylist():
        if number:
            row_set, block = chain.blocks[number - 1]
            held[number - 1] = at_hand(tablet, row_set, pages, block)
    if not any(held):
        return
    probes = core.BlockTable([None if block is None else block.probe for block in held])
    which, rows = core.find_in_blocks(probes.column(0), chain.firsts, keys)
    there = pc.not_equal(which, pa.scalar(core.NULL_ROW, pa.uint32()))
    if chain.deleted:
        for number, (row_set, block) in enumerate(chain.blocks):
            delta = None if held[number] is None else row_set.delta(pages, block)
            if delta is not None:
                there = pc.and_(there, _alive(which, rows, number, delta, snapshot))
    positions = core.Bitmap.from_arrow(there).positions()
    if positions.n == 0:
        return
    if positions.n < keys.n:
        which, rows = which.filter(there), rows.filter(there)
        keys = keys.gather(positions)
    yield positions.to_arrow(), _columns(tablet, held, keys, names, which, rows)


def _columns(
    tablet: Tablet,
    held: Sequence[PointBlock | None],
    keys: core.Keys,
    names: Sequence[str],
    which: pa.UInt32Array,
    rows: pa.UInt32Array,
) -> list[pa.Array]:
    key = tablet.schema.primary_key
    table = core.BlockTable([None if block is None else block.columns for block in held])
    numbers = core.Rows.from_arrow(which), core.Rows.from_arrow(rows)
    columns = []
    for name in names:
        if name in key:
            columns.append(tablet.codec.decode(keys, key.index(name)))
            continue
        at = tablet.value_names.index(name)
        column = core.gather_blocks(table.column(at), tablet.layout.types[at], *numbers)
        columns.append(_filled(column, held, at, which))
    return columns


def _filled(
    column: pa.Array, held: Sequence[PointBlock | None], at: int, which: pa.UInt32Array
) -> pa.Array:
    """Defaults where a block has not the column."""
    for number, block in enumerate(held):
        if block is None or block.fill is None or block.columns.blocks[at] is not None:
            continue
        if block.fill[at] is not None:
            here = pc.equal(which, pa.scalar(number, pa.uint32()))
            n = len(column)
            rows = pc.if_else(here, pa.scalar(n, pa.uint32()), core.Rows.range(n).to_arrow())
            fill = pa.array([block.fill[at]], column.type)
            column = pa.concat_arrays([column, fill]).take(rows)
    return column


def _alive(
    which: pa.UInt32Array, rows: pa.UInt32Array, block: int, delta: core.Delta, snapshot: int
) -> pa.BooleanArray:
    """False for rows of one block that are deleted at a snapshot."""
    dead = delta.rows.filter(pc.less_equal(delta.stamps, pa.scalar(snapshot, pa.uint64())))
    here = pc.equal(which, pa.scalar(block, pa.uint32()))
    return pc.invert(pc.and_(here, pc.is_in(rows, value_set=dead)))
