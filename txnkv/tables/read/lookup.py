"""Reads by primary key: one row, or many."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from txnkv import core
from txnkv.core import compute as pc
from txnkv.tables.arrow_input import key_values
from txnkv.tables.column_values import column_array
from txnkv.tables.read import point
from txnkv.tables.read.masks import RowSetMask
from txnkv.tables.read.point import find, present
from txnkv.tables.read.point_many import chains_of, find_some
from txnkv.tables.read.sources import memory_columns
from txnkv.tables.read.view import EVERY_STAMP, ReadView, Sight, hidden_before
from txnkv.tables.schema import Schema
from txnkv.tables.table_catalog import TableInfo
from txnkv.tables.tables import Tables
from txnkv.tables.tablets import LARGE_READ, TOMBSTONES, RowSetInfo, RowSetRetired, Tablet

_FEW: Final = 1 << 14
"""So many keys are looked for in all blocks of a row set at once; more go block by block."""

__all__ = [
    "Found",
    "find",
    "find_many",
    "get",
    "get_many",
    "present",
    "present_many",
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
    """

    positions: pa.UInt32Array
    columns: list[pa.Array]
    stamps: pa.UInt64Array | None = None


def find_many(
    tables: Tables,
    tablet: Tablet,
    view: ReadView,
    keys: core.Keys,
    names: Sequence[str],
    *,
    stamps: bool = False,
) -> list[Found]:
    """The rows of some keys of a tablet, in pieces; no key is in two of them.

    Args:
        tables: of the store.
        tablet: where the keys belong.
        view: what is seen.
        keys: strictly ascending.
        names: columns to read.
        stamps: whether to tell when each row was inserted; not for a transaction's own.

    Raises:
        TxnNotFoundError, InvalidTxnStateError: the view's transaction is not OPEN.
        HistoryExpiredError: the snapshot is older than the history.
    """
    if keys.n == 0:
        return []
    if view.reads is not None:
        view.reads.add_keys(tablet.id, keys)
    while True:
        try:
            return search(view.sight(tables, tablet), keys, names, stamps=stamps)
        except RowSetRetired:
            tables.log.latest()


def search(
    sight: Sight, keys: core.Keys, names: Sequence[str], *, stamps: bool = False
) -> list[Found]:
    """Return the rows of some keys, as `find_many` does, by a sight that was taken before.

    Raises:
        RowSetRetired: the sight is too old; take a new one.
    """
    return list(_Search(sight, keys, names, stamps).run()) if keys.n else []


def present_many(tables: Tables, tablet: Tablet, view: ReadView, keys: core.Keys) -> pa.UInt32Array:
    """Positions, ascending, of those of `keys` (strictly ascending) that have a row."""
    found = [piece.positions for piece in find_many(tables, tablet, view, keys, ())]
    if not found:
        return pa.nulls(0, pa.uint32())
    return found[0] if len(found) == 1 else pc.sort(pa.concat_arrays(found))


class _Search:
    """One look for many keys, source by source."""

    def __init__(self, sight: Sight, keys: core.Keys, names: Sequence[str], stamps: bool) -> None:
        self._sight = sight
        self._tablet = sight.tablet
        self._all = keys
        self._names = names
        self._stamps = stamps
        self._keys = keys
        self._left: pa.UInt32Array | None = None  # positions of _keys among all; None: the same

    def run(self) -> Iterator[Found]:
        sight = self._sight
        if sight.own is not None:
            yield from self._memory(sight.own, 0, EVERY_STAMP)
        for info in sight.staged:
            yield from self._hiding(info, EVERY_STAMP)
        if sight.has_memory:
            yield from self._memory(sight.state.memory, sight.after, sight.snapshot)
        # Rows that are newer than an unresolved row set, then that, and so on down.
        settled = list(sight.settled)
        for mask in sight.unresolved:
            for info in settled:
                before = hidden_before(mask, info)
                if before != EVERY_STAMP:
                    yield from self._rows(info, before, decide=True)
            yield from self._hiding(mask, sight.snapshot)
        if not sight.unresolved and not self._stamps and self._keys.n <= _FEW:
            settled = list((yield from self._chained(settled)))
        for info in settled:
            yield from self._rows(info, 0, decide=bool(sight.unresolved))

    def _chained(self, settled: list[RowSetInfo]) -> Generator[Found, None, Sequence[RowSetInfo]]:
        """Rows of few keys; answers the row sets that were not looked at."""
        sight = self._sight
        if self._keys.n == 0 or not settled or sight.snapshot < sight.state.highest:
            return settled
        with self._tablet.read() as pages:
            found = chains_of(self._tablet, sight.state, pages)
            for chain in found.chains:
                for some in find_some(
                    self._tablet, chain, pages, self._keys, self._names, sight.snapshot
                ):
                    yield self._found(*some, None)
        return found.others

    def _decided(self, positions: pa.UInt32Array) -> None:
        """Look no further for the keys at these positions of those that are left."""
        if len(positions) == 0:
            return
        rest = core.Bitmap.of(self._keys.n, positions).zeros()
        numbers = rest.to_arrow()
        self._left = numbers if self._left is None else self._left.take(numbers)
        self._keys = self._keys.gather(rest)

    def _found(
        self, positions: pa.UInt32Array, columns: list[pa.Array], stamps: pa.UInt64Array | None
    ) -> Found:
        left = self._left
        return Found(positions if left is None else left.take(positions), columns, stamps)

    def _memory(self, memory: core.MemRowSet, after: int, upto: int) -> Iterator[Found]:
        if self._keys.n == 0:
            return
        entries = memory.lookup(self._keys, after, upto)
        kinds = entries.kinds
        known = core.Bitmap.from_arrow(pc.greater(kinds, 0))
        if known.count == 0:
            return
        rows = core.Bitmap.from_arrow(pc.equal(kinds, 1)).positions()
        if rows.n:
            columns = memory_columns(self._tablet, entries, self._names, rows)
            stamps = entries.stamps.take(rows.to_arrow()) if self._stamps else None
            yield self._found(rows.to_arrow(), columns, stamps)
        self._decided(known.positions().to_arrow())

    def _hiding(self, info: RowSetInfo, snapshot: int) -> Iterator[Found]:
        """A row set that hides all its keys from here on."""
        if not self._meets(info):
            return
        if info.kind != TOMBSTONES:
            yield from self._rows(info, 0, decide=False, snapshot=snapshot)
        hits = []
        low, high = self._keys.key(0), self._keys.key(self._keys.n - 1)
        with self._tablet.read(once=info.size > LARGE_READ) as pages:
            for some in RowSetMask(self._tablet.row_set(info)).between(pages, low, high):
                hits.append(core.mark_common(self._keys, some).positions().to_arrow())
        if hits:
            self._decided(pa.concat_arrays(hits))

    def _rows(
        self, info: RowSetInfo, before: int, *, decide: bool, snapshot: int | None = None
    ) -> Iterator[Found]:
        """Rows of a row set that are inserted at or above `before` and seen."""
        if not self._meets(info):
            return
        row_set = self._tablet.row_set(info)
        at = self._sight.snapshot if snapshot is None else snapshot
        done: list[pa.Array] = []
        with self._tablet.read(once=info.size > LARGE_READ) as pages:
            for number, start, hits in row_set.find_many(pages, self._keys, at):
                there = core.Bitmap.from_arrow(pc.is_valid(hits)).positions()
                positions, rows = _raised(there, start), hits.drop_null()
                inserts: Any = None
                if before or self._stamps:
                    inserts, _ = row_set.stamps_of(pages, number, rows)
                if before:
                    newer = pc.greater_equal(inserts, pa.scalar(before, pa.uint64()))
                    positions, rows = positions.filter(newer), rows.filter(newer)
                    inserts = inserts.filter(newer)
                if len(rows) == 0:
                    continue
                columns = row_set.gather(pages, number, self._names, core.Rows.from_arrow(rows))
                yield self._found(positions, columns, inserts if self._stamps else None)
                done.append(positions)
        if decide and done:
            self._decided(pa.concat_arrays(done))

    def _meets(self, info: RowSetInfo) -> bool:
        keys = self._keys
        return keys.n > 0 and info.overlaps(keys.key(0), keys.key(keys.n - 1))


def _raised(rows: core.Rows, by: int) -> pa.UInt32Array:
    numbers = rows.to_arrow()
    return pc.add(numbers, pa.scalar(by, pa.uint32())) if by else numbers
