"""The published state of a tablet: its layers as the core reads single keys and short ranges.

The order of the layers is that of `TabletView`. What is committed is published once and asked many
times, by any thread, until it is of another state of the tablet or another map:

    TabletState ──> Published ──> core.Layers      memory, and steps over row sets
                        └─ row sets with the blocks that were asked for so far

Asking LMDB for a value brings all of its pages into the processor's cache: several microseconds.
But where blocks lie in the map is known from the last time: a value of several pages has pages of
its own, which LMDB neither moves nor rewrites until its key is removed, and a row set is removed at
once. Smaller ones are copied. So while a row set's header is there, its blocks are where they were:

    read 1    keys @ a0, Bloom @ b0, columns @ c0, d0      remembered
    read 2    the same map, nothing was written since      LMDB is not asked at all
    read 3    the same map, the header is there            nor for blocks
    read 4    another map, or this one has moved           all are asked for again
    read 5    no header: the row set is gone               as for any other reader
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Container, Sequence
from typing import Any, Final, TypeVar

import pyarrow as pa

from txnkv import core
from txnkv.core import compute as pc
from txnkv.storage import EPOCH, Map, brief
from txnkv.tables.read.predicate import Filter, KeyRange, one_zero, past
from txnkv.tables.read.view import ReadView, require_history
from txnkv.tables.row_writer import RowWriter, Values
from txnkv.tables.schema import Schema, widened
from txnkv.tables.table_catalog import TableInfo
from txnkv.tables.table_index import TableIndex
from txnkv.tables.tables import Tables
from txnkv.tables.tablets import (
    BLOOM,
    COLUMNS,
    FEW_KEYS,
    INSERTS,
    KEYS,
    TOMBSTONES,
    Pages,
    RowSet,
    RowSetInfo,
    Step,
    Tablet,
    TabletState,
    TabletView,
    first_stamp,
    manifest,
    until_there,
)

T = TypeVar("T")

FEW_BYTES: Final = 1 << 20
"""Few rows that have more, about, come in batches."""

Ask = Callable[["Published", core.Load], T]


class Published:
    """A tablet's committed layers, and those that a transaction staged, as one LMDB snapshot has
    them. Shared by threads.

    Attributes:
        state: what is committed.
        map, txn_id: LMDB's map and transaction that they were read in; None where nothing is on
            disk.
    """

    __slots__ = ("_epoch", "_row_sets", "_tablet", "layers", "map", "state", "txn_id")

    def __init__(
        self,
        tablet: Tablet,
        state: TabletState,
        pages: Pages | None,
        staged: Sequence[RowSetInfo] = (),
    ) -> None:
        self._tablet, self.state, self._epoch = tablet, state, -1
        self.map: Map | None = None if pages is None else pages.map
        self.txn_id = None if pages is None else pages.txn.id()
        self._row_sets: list[RowSet] = []
        own = [self._step(Step(info, hides=True), pages) for info in staged]
        steps = [self._step(step, pages) for step in state.every_step]
        self.layers = core.Layers(
            tablet.layout, tablet.fills, state.memory, state.flushed, steps, own
        )

    def _step(self, step: Step, pages: Pages | None) -> core.LayerStep:
        assert pages is not None, "row sets are read in pages"
        row_set = self._tablet.row_set(step.info)
        self._row_sets.append(row_set)
        # What is staged is seen, also when it is committed meanwhile.
        info = step.info if step.info.stamp is None else row_set.info
        return core.LayerStep(layer(self._tablet, row_set, info, pages), step.before, step.hides)

    def put(self, tables: Tables, tablet: Tablet, epoch: int) -> None:
        """Let keys be looked for in these layers without the way here, as long as the epoch is."""
        if self._epoch == epoch:
            return
        self._epoch = epoch
        layers, layout, defaults = self.layers.addresses
        tablet.at_hand.put(
            epoch,
            tables.store.runtime.change_view(),
            self,
            layers,
            layout,
            defaults,
            tablet.memory_rows.since,
            tablet.floor,
            None if self.map is None else self.map.begin,
            self.txn_id or 0,
            self.layers.nested,
        )

    def load(self, pages: Pages) -> core.Load:
        """A function that gives a row set one of its blocks."""

        def load(step: int, number: int) -> None:
            row_set = self._row_sets[step]
            self.layers.steps[step].row_set.put(number, block(self._tablet, row_set, pages, number))

        return load


def layer(tablet: Tablet, row_set: RowSet, info: RowSetInfo, pages: Pages) -> core.LayerRowSet:
    """Return a row set with the blocks that are known to be in this map."""
    row_set.require_there(pages)
    known: tuple[Map | None, RowSetInfo, core.LayerRowSet] | None = row_set.layer
    blocks: dict[int, core.LayerBlock] = {}
    if known is not None and known[0] is pages.map:
        if known[1] is info and not info.deleted:
            return known[2]
        for number, parsed in list(known[2].blocks.items()):
            blocks[number] = parsed.with_deletes(row_set.delta(pages, number))
        if known[1] is info and all(known[2].blocks[i] is blocks[i] for i in blocks):
            return known[2]
        keys = known[2].firsts, known[2].lasts
    else:
        row_set.header(pages)
        keys = tablet.keys_of(row_set.firsts), tablet.keys_of(row_set.lasts)
    stamps = None if info.stamp is None else (first_stamp(info), int(info.stamp))
    made = core.LayerRowSet(
        *keys, stamps, versioned=info.versioned, tombstones=info.kind == TOMBSTONES
    )
    for number, parsed in blocks.items():
        made.put(number, parsed)
    row_set.layer = pages.map, info, made
    return made


def block(tablet: Tablet, row_set: RowSet, pages: Pages, number: int) -> core.LayerBlock:
    """Return one of its blocks, verified."""
    zones = row_set.header(pages).blocks[number].zones
    columns = [_column(tablet, row_set, pages, number, zones, name) for name in tablet.value_names]
    return core.LayerBlock(
        row_set.block(pages, KEYS, number),
        row_set.block(pages, BLOOM, number),
        None if row_set.info.uniform else row_set.block(pages, INSERTS, number),
        columns,
        row_set.delta(pages, number),
        pages.page_bytes,
    )


def _column(
    tablet: Tablet,
    row_set: RowSet,
    pages: Pages,
    number: int,
    zones: Container[int],
    name: str,
) -> Any:
    """A column's block as it lies, or a new one where the column was widened since; or None."""
    found = tablet.schema.stored(name, zones)
    if found is None:
        return None
    id, kind = found
    block = row_set.block(pages, COLUMNS + id, number)
    if id == tablet.schema.ids[name]:
        return block
    wide = widened(core.decode_block(block, kind), tablet.schema.columns[name].type)
    return core.encode_block(wide, 0)


def _published(
    tablet: Tablet, state: TabletState, pages: Pages | None, staged: Sequence[RowSetInfo] = ()
) -> Published:
    """Return what is published of a state, for a read; anew where it is of another."""
    known: Published | None = tablet.published
    if (
        known is None
        or staged
        or known.state is not state
        or (pages is not None and (known.map is not pages.map or known.txn_id != pages.txn.id()))
    ):
        known = Published(tablet, state, pages, staged)
        if not staged:
            tablet.published = known
    return known


def _nothing(step: int, number: int) -> None:
    raise AssertionError("there are no row sets")


def committed(
    tablet: Tablet, state: TabletState, ask: Ask[T], staged: Sequence[RowSetInfo] = ()
) -> T:
    """Return what `ask` gives of the published layers of a state, and of what a transaction staged.

    Raises:
        RowSetRetired: the state is too old; take a new one.
        CorruptionError: a block is damaged.
    """
    if not state.infos and not staged:
        return ask(_published(tablet, state, None), _nothing)

    def look(pages: Pages) -> T:
        published = _published(tablet, state, pages, staged)
        return ask(published, published.load(pages))

    return tablet.look(look)


def _asked(
    tables: Tables,
    tablet: Tablet,
    view: ReadView,
    ask: Ask[T],
    sought: manifest.Sought | None = None,
) -> T:
    def look() -> T:
        if view.txn_id is not None:
            seen = view.of(tables, tablet, sought)
            return committed(tablet, seen.state, ask, seen.staged)
        epoch = EPOCH[0]  # what changes from here on is seen, or makes a new one
        state = tablet.state(view.snapshot)
        if view.snapshot < tablet.floor:
            require_history(tables, tablet, view.snapshot)

        def asked(published: Published, load: core.Load) -> T:
            found = ask(published, load)
            if tablet.id not in tables.memory.damaged:  # else each snapshot is asked for
                published.put(tables, tablet, epoch)
            return found

        return committed(tablet, state, asked)

    return until_there(look, tables.log.latest)


_asked_stored = brief(_asked)
"""For a stored transaction, whose reads ask status.db."""


def _found(
    tables: Tables,
    tablet: Tablet,
    view: ReadView,
    keys: core.Keys,
    rows: core.Rows | None,
    *,
    ascending: bool = False,
) -> tuple[core.Bitmap, core.RowSlices]:
    own = None if view.own is None else view.own.memory(tablet.id)

    def ask(published: Published, load: core.Load) -> tuple[core.Bitmap, core.RowSlices]:
        found = published.layers.find(own, keys, rows, view.snapshot, load)
        return found.present(), found.rows(tablet.memory_rows.since, tablet.memory_rows.row)

    if view.txn_id is None:
        return _asked(tables, tablet, view, ask)
    sought = tablet.sought(keys) if ascending or keys.n <= FEW_KEYS else None
    return _asked_stored(tables, tablet, view, ask, sought)


def find_rows(
    tables: Tables, tablet: Tablet, view: ReadView, keys: core.Keys, rows: core.Rows | None = None
) -> tuple[core.Bitmap, core.RowSlices]:
    """The rows of some keys (all, for None), in their order: which are there, and their bytes.

    Raises:
        TxnNotFoundError, InvalidTxnStateError: the view's transaction is not OPEN.
        HistoryExpiredError: the snapshot is older than the history.
    """
    if view.reads is not None:
        view.reads.add_keys(tablet.id, keys if rows is None else keys.gather(rows))
    return _found(tables, tablet, view, keys, rows)


def find_some(
    tables: Tables, tablet: Tablet, view: ReadView, keys: Collection[bytes]
) -> dict[bytes, bytes | None]:
    """The bytes of the rows with some keys, None for no row; who asks notes what it reads.

    Raises:
        As `find_rows`.
    """
    width, each = tablet.codec.width, sorted(keys)
    asked = core.Keys.fixed(b"".join(each), width) if width else core.Keys.of(each)
    there, rows = _found(tables, tablet, view, asked, None, ascending=True)
    found: dict[bytes, bytes | None] = dict.fromkeys(each)
    for i in there.positions().to_arrow().to_pylist():
        found[each[i]] = rows.row(i)
    return found


def find_range(
    view: TabletView, low: bytes, high: bytes | None, most: int, *, descending: bool = False
) -> tuple[core.Keys, core.RowSlices] | None:
    """The first `most` rows with low <= key < high, ascending, or the last ones: keys, and bytes.

    Returns:
        None when they are many, or lie far apart: they are to be scanned. With `core.FEW` all rows
        are given.

    Raises:
        RowSetRetired: the state is too old; take a new one.
        CorruptionError: a block is damaged.
    """
    tablet = view.tablet

    def ask(published: Published, load: core.Load) -> tuple[core.Keys, core.RowSlices] | None:
        asked = view.own, low, high, view.snapshot, load, most
        found = published.layers.range(*asked, descending=descending)
        if found is None:
            return None
        return found[0], found[1].rows(tablet.memory_rows.since, tablet.memory_rows.row)

    return committed(tablet, view.state, ask, view.staged)


def find_dicts(
    tables: Tables,
    tablet: Tablet,
    rows: core.RowTable,
    view: ReadView,
    low: bytes | None,
    high: bytes | None,
    most: int = core.FEW,
    last: bool = False,
) -> list[dict[str, Any]] | None:
    """The rows of a short range as `find_range` finds them, as dicts; None also where they have
    more than `FEW_BYTES`.

    Args:
        rows: the codec of the tablet's table.
        last: the last `most` rows, descending.

    Raises:
        As `find_rows`.
    """
    if view.reads is not None:
        view.reads.add_range(tablet.id, low, high)
    own = None if view.own is None else view.own.memory(tablet.id)
    if view.txn_id is None:
        asked = low, high, most, last, view.snapshot, own
        known: list[dict[str, Any]] = tablet.at_hand.range(rows, *asked)
        if known is not NotImplemented:
            return known

    def ask(published: Published, load: core.Load) -> list[dict[str, Any]] | None:
        asked = own, low or b"", high, view.snapshot, load, most
        found = published.layers.range(*asked, descending=last)
        if found is None:
            return None
        slices = found[1].rows(tablet.memory_rows.since, tablet.memory_rows.row)
        left, made = FEW_BYTES, []
        for i in range(found[0].n):
            row = slices.row(i)
            left -= len(row)
            if left < 0:
                return None
            made.append(rows.dict(found[0].key(i), row))
        return made

    return (_asked if view.txn_id is None else _asked_stored)(tables, tablet, view, ask)


def by_entries(
    writer: RowWriter,
    view: ReadView,
    index: TableIndex,
    key_range: KeyRange,
    skip: int,
    most: int,
    last: bool = False,
) -> list[dict[str, Any] | None] | None:
    """The rows of the first `most` entries in a range, or the last ones, descending; None for one
    that is not there; None: they are many, or to be looked for in Python.

    Args:
        skip: bytes of the index's columns in each entry, in front of the row's key.
    """
    ends_with_key = index.beside == index.columns and not index.info.unique
    alone = view.own is None and view.reads is None and view.txn_id is None
    if not (ends_with_key and alone):
        return None
    asked = index.tablet.at_hand, *key_range, most, last, view.snapshot, skip
    found: Any = writer.reader.by_entries(*asked)
    rows: list[dict[str, Any] | None] | None = None if found is NotImplemented else found
    return rows


def in_range(
    writer: RowWriter, view: ReadView, index: TableIndex, ranges: Sequence[KeyRange], most: int
) -> list[dict[str, Any]] | None:
    """The rows in the one range of an index whose columns have one length; None where there are
    `most` or more, or they are to be looked for otherwise.
    """
    if len(ranges) > 1 or (width := index.widths[0]) is None:
        return None
    found = by_entries(writer, view, index, ranges[0], width, most)
    rows = [row for row in found or () if row is not None]
    many = found is None or len(found) >= most or len(rows) < len(found)
    return None if many else rows


def entries_with(index: TableIndex, values: Values) -> tuple[KeyRange, int]:
    """The range of an index's entries with some values, and the bytes that these take."""
    low = index.tablet.codec.encode_prefix(values)
    return KeyRange(low, past(low, index.tablet.codec, len(values))), len(low)


def find_row(tables: Tables, tablet: Tablet, view: ReadView, key: bytes) -> bytes | None:
    """The bytes of the row with this key; None: no row. Raises as `find_rows`."""
    if view.reads is not None:
        view.reads.add_key(tablet.id, key)
    if view.own is None and view.txn_id is None:
        found: bytes | None = tablet.at_hand.find(key, view.snapshot)
        if found is not NotImplemented:
            return found
    there, rows = _found(tables, tablet, view, core.Keys.one(key), None)
    return rows.row(0) if there.count else None


def columns_of(
    tablet: Tablet, names: Sequence[str], keys: core.Keys, rows: core.RowSlices
) -> list[pa.Array]:
    """Columns of rows that are there, and of which these are the keys."""
    at = [tablet.value_names.index(name) for name in names if name in tablet.value_names]
    values = iter(rows.columns(at))
    key = tablet.schema.primary_key
    return [
        tablet.codec.decode(keys, key.index(name)) if name in key else next(values)
        for name in names
    ]


def keys_for(table: TableInfo, filter: Filter) -> list[Any] | None:
    """The only keys that may satisfy a filter which tells each column of them, as values; None: it
    may want others, or they are many.
    """
    columns: list[pa.Array] = []
    for name in table.schema.primary_key if filter.shape.several else ():
        mine = [p.values for p in filter.predicates if p.column == name and p.op in ("=", "in")]
        columns += mine[:1]
    if len(columns) < len(table.schema.primary_key):
        return None
    if any(pa.types.is_floating(array.type) for array in columns):
        return None
    if not 0 < math.prod(map(len, columns)) <= core.FEW:
        return None
    values = [array.to_pylist() for array in columns]
    return list(dict.fromkeys(values[0] if len(values) == 1 else itertools.product(*values)))


_WEIGHTS: Final = {
    kind.id: weight
    for weight, kinds in (
        (1, (pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16())),
        (1, (pa.uint32(), pa.uint64(), pa.float32(), pa.float64(), pa.string(), pa.binary())),
        (3, (pa.date32(), pa.decimal128(1), pa.timestamp("us"))),
    )
    for kind in kinds
}
"""The time that a value of a type takes in Python, of those that are there as they are in Arrow."""
_ZONED: Final = 12


def weight(schema: pa.Schema) -> float:
    """Return what a dict of a row weighs on its way into Arrow; infinite where values change."""
    zoned = [getattr(field.type, "tz", None) not in (None, "UTC") for field in schema]
    return _ZONED * sum(zoned) + sum(_WEIGHTS.get(field.type.id, math.inf) for field in schema)


def in_arrow(rows: Sequence[dict[str, Any] | None], schema: pa.Schema) -> pa.Table:
    """Rows as an Arrow table; of nulls, where there is none."""
    columns = [
        pa.array([None if row is None else row[field.name] for row in rows], field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def nullable(schema: Schema) -> pa.Schema:
    """The columns of rows of which some are not there."""
    return pa.schema([field.with_nullable(True) for field in schema.arrow])


def rows_with(
    tables: Tables, table: TableInfo, view: ReadView, columns: Sequence[pa.Array]
) -> pa.Table:
    """The same of keys by column, of the key's types."""
    schema = table.schema
    result = nullable(schema)
    columns = [one_zero(column) for column in columns]
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
        there, found = find_rows(tables, tablet, view, encoded, rows)
        of_keys = dict(zip(schema.primary_key, columns, strict=True))
        if rows is not None:
            numbers.append(rows.to_arrow())
            of_keys = {name: array.take(rows.to_arrow()) for name, array in of_keys.items()}
        if there.count < there.n:
            rows_or_none = pc.if_else(
                there.to_arrow(), core.Rows.range(there.n).to_arrow(), pa.scalar(None, pa.uint32())
            )
            of_keys = {name: array.take(rows_or_none) for name, array in of_keys.items()}
        values = found.columns(range(len(tablet.value_names)))
        of_all = of_keys | dict(zip(tablet.value_names, values, strict=True))
        pieces.append(
            pa.RecordBatch.from_arrays([of_all[name] for name in schema.names], schema=result)
        )
    whole = pa.Table.from_batches(pieces, result)
    if len(pieces) == 1 and not numbers:
        return whole
    wanted = core.Rows.range(batch.num_rows).to_arrow()
    return whole.combine_chunks().take(pc.index_in(wanted, value_set=pa.concat_arrays(numbers)))


def text_bytes(row: dict[str, Any]) -> int:
    """Bytes of the texts and of the bytes in a row."""
    return sum(len(value) for value in row.values() if isinstance(value, str | bytes))
