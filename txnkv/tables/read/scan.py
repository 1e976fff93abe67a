"""Scans: which blocks to read, reading them, filtering, in any order or in key order.

    plan     tablets -> what the view sees of each: row sets, memory, and whose keys hide whose
             -> blocks whose key range and zone maps admit the predicates          (units)
    read     per unit: the rows that are seen; predicate columns, mask; then the other columns,
             only if a row is left
    ordered  units of sources that overlap are merged by key, others follow one another; descending,
             ranges of keys are read so, the last one first, and each is turned round

A scan holds no LMDB transaction between two batches, so a slow reader keeps no pages from
being used again, and what it returns lies in memory that Arrow owns. Its pins keep the row sets
from being removed when a flush or a compaction has replaced them.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeAlias

import pyarrow as pa

from txnkv import core
from txnkv.core import compute as pc
from txnkv.errors import CorruptionError, SchemaChangedError
from txnkv.storage import CachedProperty, go_on, submitted
from txnkv.tables.read.ordering import DESCENDING, By, Order, checked, columns_by, in_order
from txnkv.tables.read.point import find_range, find_rows
from txnkv.tables.read.predicate import Filter, KeyRange, Where, parse
from txnkv.tables.read.sources import (
    BATCH_ROWS,
    MemoryPart,
    MergeCursor,
    Part,
    Selection,
    ShortPart,
    Source,
    Unit,
    clusters,
    cuts,
    tablets_for,
)
from txnkv.tables.read.view import Masks, Pins, ReadView
from txnkv.tables.table_catalog import TableInfo
from txnkv.tables.table_index import TableIndex
from txnkv.tables.tables import Tables
from txnkv.tables.tablets import EVERY_STAMP, LARGE_READ, Tablet, TabletView, until_there

Batches: TypeAlias = Generator[pa.RecordBatch, None, None]
_FEW: Final = 8
"""Below one row that is wanted for so many, its other columns are read by themselves."""

_AHEAD: Final = 4
BATCH_BYTES: Final = 16 << 20
"""Bytes of a merged batch, about and at most; one row may have more."""


@dataclass(frozen=True)
class Plan:
    """A scan that is ready to be read, any number of times.

    Attributes:
        columns: the projection.
        parts: what to read.
        pins: keep all of it readable.
        by: columns to sort the rows by; then those behind the first `shown` are for that alone.
    """

    columns: tuple[str, ...]
    filter: Filter
    parts: tuple[Source, ...]
    schema: pa.Schema
    pins: Pins
    ordered: Order = False
    limit: int | None = None
    by: tuple[By, ...] = ()
    shown: int = 0

    def batches(self, threads: int = 1) -> Iterator[pa.RecordBatch]:
        """The rows; with `threads` above 1 blocks are read ahead."""
        left = self.limit
        if left == 0:
            return
        if self.by:
            whole = replace(self, ordered=False, limit=None, by=()).batches(threads)
            for batch in in_order(whole, self.schema, self.by, left):
                yield batch.select(range(self.shown))
            return
        if self.ordered == DESCENDING:
            source = self._descending()
        elif self.ordered:  # a limit is mostly a few of the first rows
            source = self._ordered(threads if left is None else 1)
        else:
            source = self._in_turn(self.parts, threads)
        with closing(source):  # here, and not by the collector in some other thread
            for batch in source:
                go_on()
                if left is None:
                    yield batch
                    continue
                yield batch.slice(0, left)
                left -= batch.num_rows
                if left <= 0:
                    return

    def _in_turn(self, parts: Sequence[Source], threads: int) -> Batches:
        """The rows of parts one after the other, in the order of each."""
        if threads <= 1 or sum(part.blocks for part in parts) <= _AHEAD:
            for unit in self.units(parts):
                batch = self._read(unit)
                if batch is not None:
                    yield batch
            return
        pool = ThreadPoolExecutor(threads, thread_name_prefix="txnkv-scan")
        try:
            waiting: deque[Future[pa.RecordBatch | None]] = deque()
            for unit in self.units(parts):
                waiting.append(submitted(pool, self._read, unit))
                if len(waiting) > _AHEAD:
                    batch = waiting.popleft().result()
                    if batch is not None:
                        yield batch
            while waiting:
                batch = waiting.popleft().result()
                if batch is not None:
                    yield batch
        finally:
            # Not waited for: what was broken off may be dropped by whoever has the lock they want.
            pool.shutdown(wait=False, cancel_futures=True)

    def in_order_of(self, asked: Request) -> Plan:
        """The same of `asked.seen`, in the order of columns."""
        by = columns_by(asked.table.schema, asked.ordered)
        of_all = replace(self, ordered=asked.ordered, limit=asked.limit)
        return replace(of_all, by=by, shown=len(asked.columns))

    def units(self, parts: Sequence[Source]) -> Iterator[Unit]:
        """Yield the units that are to be read of `parts`."""
        for part in parts:
            yield from part.units(self.filter)

    def count(self) -> int:
        """Count the rows. With an empty projection no column is read but those of predicates."""
        if not self.filter.is_empty:
            return sum(batch.num_rows for batch in self.batches())
        total = 0
        for part in self.parts:
            if isinstance(part, Part) and part.plain:
                total += part.info.live_rows
                continue
            for unit in part.units(self.filter):
                with unit.pages(once=self._large) as pages:
                    total += unit.source.count(pages)
        return total

    # -- one block ---------------------------------------------------------------------

    @CachedProperty
    def _large(self) -> bool:
        return sum(part.size for part in self.parts) > LARGE_READ

    def _read(self, unit: Unit) -> pa.RecordBatch | None:
        with unit.pages(once=self._large) as pages:
            selection = unit.source.select(pages)
            return None if selection is None else self._project(selection)

    def _project(self, selection: Selection) -> pa.RecordBatch | None:
        read, n = selection.read, selection.n
        tested = self.filter.columns
        columns = dict(zip(tested, read(tested), strict=True))
        mask = self.filter.mask(columns, n)
        if mask is not None and mask.true_count == 0:
            return None
        missing = [name for name in self.columns if name not in columns]
        left = n if mask is None else mask.true_count
        if mask is not None and missing and selection.pick is not None and left * _FEW < n:
            known = pc.fill_null(mask, False) if mask.null_count else mask
            rows = core.Bitmap.from_arrow(known).positions().to_arrow()
            columns = {name: array.take(rows) for name, array in columns.items()}
            columns.update(zip(missing, selection.pick(missing, rows), strict=True))
            return self._batch([columns[name] for name in self.columns], left)
        columns.update(zip(missing, read(missing), strict=True))
        arrays = [columns[name] for name in self.columns]
        if left < n:
            arrays = [array.filter(mask) for array in arrays]
        return self._batch(arrays, left)

    def _batch(self, arrays: list[pa.Array], n: int) -> pa.RecordBatch | None:
        if n == 0:
            return None
        if not arrays:
            return _rows_without_columns(n)
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    # -- key order ---------------------------------------------------------------------

    def _ordered(self, threads: int, parts: Sequence[Source] | None = None) -> Batches:
        for cluster in clusters(self.parts if parts is None else parts):
            if len(cluster) == 1:
                yield from self._in_turn(cluster, threads)
            else:
                yield from self._merged(cluster)

    def _descending(self) -> Batches:
        for cluster in reversed(clusters(self.parts)):
            widest = max(part.width for part in cluster)
            rows_each = max(1, min(BATCH_ROWS, int(BATCH_BYTES / max(widest, 1.0))))
            for key_range, _ in reversed(list(cuts(cluster, rows_each))):
                some = [part.narrowed(key_range) for part in cluster]
                batches = list(self._ordered(1, [part for part in some if part is not None]))
                for batch in reversed(batches):
                    last = pa.scalar(batch.num_rows - 1, pa.uint32())
                    rows = pc.subtract(last, core.Rows.range(batch.num_rows).to_arrow())
                    yield batch.take(rows) if batch.num_columns else batch

    def _merged(self, cluster: Sequence[Source]) -> Iterator[pa.RecordBatch]:
        names = list(dict.fromkeys((*self.columns, *self.filter.columns)))
        large = self._large
        sources = [MergeCursor(self.units([part]), names, large=large) for part in cluster]
        sources = [source for source in sources if source.advance()]
        ends = [source.next is None for source in sources]
        merger = core.Merger([source.keys for source in sources], ends)
        while not merger.done:
            which, index = merger.next(_rows_of(sources))
            if len(which):
                batch = self._interleaved(sources, names, which, index)
                if batch is not None:
                    yield batch
            for i in merger.exhausted:
                if sources[i].advance():
                    merger.replace(i, sources[i].keys, sources[i].next is None)
                else:
                    merger.finish(i)

    def _interleaved(
        self,
        sources: Sequence[MergeCursor],
        names: Sequence[str],
        which: pa.UInt16Array,
        index: pa.UInt32Array,
    ) -> pa.RecordBatch | None:
        parts: list[list[pa.Array]] = [[] for _ in names]
        shifts, total = [0] * len(sources), 0
        for entry in pc.value_counts(which).to_pylist():
            i, n = entry["values"], entry["counts"]  # rows that stand together in this source
            source = sources[i]
            for of, array in zip(parts, source.arrays, strict=True):
                of.append(array.slice(source.at, n))
            shifts[i] = total - source.at
            source.at += n
            total += n
        rows = pc.add(pc.take(pa.array(shifts, pa.int64()), which), index.cast(pa.int64()))
        columns = {
            name: pa.concat_arrays(of).take(rows) for name, of in zip(names, parts, strict=True)
        }
        n = len(rows)
        mask = self.filter.mask(columns, n)
        arrays = [columns[name] for name in self.columns]
        if mask is not None:
            arrays = [array.filter(mask) for array in arrays]
            n = mask.true_count
        return self._batch(arrays, n)


def _rows_of(sources: Sequence[MergeCursor]) -> int:
    """Rows of a batch, so that it has about `BATCH_BYTES` at most, or one row."""
    widest = max(source.width for source in sources)
    return max(1, min(BATCH_ROWS, int(BATCH_BYTES / max(widest, 1.0))))


def _rows_without_columns(n: int) -> pa.RecordBatch:
    """A batch of n rows and no columns, which pyarrow makes only by dropping some."""
    return pa.record_batch([pa.nulls(n)], names=["none"]).select([])


def plan_parts(
    view: TabletView,
    key_range: KeyRange,
    most: int | None = None,
    *,
    last: bool = False,
    short: bool = True,
) -> list[Source]:
    """Return the sources of one tablet that may hold keys of a range.

    Args:
        most: no more rows of it than these, its first ones, are wanted.
        last: its last ones are.
        short: they may be few.
    """
    if key_range.empty or most == 0:
        return []
    low, high = key_range.low, key_range.high
    first = core.FEW if most is None else min(most, core.FEW)
    if last and first < core.FEW:
        found = find_range(view, low or b"", high, first, descending=True)
        if found is None:
            first = core.FEW
        elif found[0].n:
            low = found[0].key(found[0].n - 1)
        else:
            return []
    if short and (first < core.FEW or (low is not None and high is not None)):
        few = find_range(view, low or b"", high, first)
        if few is not None:
            return [ShortPart(view.tablet, *few)] if few[0].n else []
    own = memory = None
    if view.own is not None:
        own = view.own.select(low, high, 0, EVERY_STAMP)
    if view.has_memory:
        memory = view.state.memory.select(low, high, view.after, view.snapshot)
    masks = Masks(view, own, memory)
    parts: list[Source] = []
    infos = [
        info
        for info in view.readable
        if info.max_key >= (low or b"") and (high is None or info.min_key < high)
    ]
    if infos:
        with view.tablet.read() as pages:
            for info in sorted(infos, key=lambda info: info.id):
                row_set = view.tablet.row_set(info)
                span = row_set.blocks_between(pages, low, high)
                if span:
                    over = masks.over(info)
                    parts.append(Part(view, info, key_range, span.start, span.stop, over))
    if memory is not None and memory.n:
        parts.append(MemoryPart(view.tablet, memory, masks.over_memory))
    if own is not None and own.n:
        parts.append(MemoryPart(view.tablet, own, (), own=True))
    return parts


class Request(NamedTuple):
    """A checked scan request, not yet bound to a snapshot.

    Attributes:
        every: it asks for all columns, whichever there are.
    """

    table: TableInfo
    columns: tuple[str, ...]
    where: Where
    filter: Filter
    ordered: Order = False
    limit: int | None = None
    every: bool = False

    def of(self, table: TableInfo) -> Request:
        """The same of the table with another schema.

        Raises:
            SchemaError: a column is not there.
        """
        if table.since == self.table.since:
            return self
        columns = None if self.every else self.columns
        return request(table, columns, self.where, self.ordered, self.limit)

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([self.table.schema.arrow.field(name) for name in self.columns])

    @property
    def seen(self) -> tuple[str, ...]:
        """Its columns, and behind them those of its order that it does not ask for."""
        by = columns_by(self.table.schema, self.ordered)
        return (*self.columns, *(name for name, _ in by if name not in self.columns))


def request(
    table: TableInfo,
    columns: Sequence[str] | None,
    where: Where,
    ordered: Order,
    limit: int | None,
) -> Request:
    """Check a scan's arguments.

    Raises:
        SchemaError: a column or operator is unknown, or a constant does not fit, or what is to be
            ordered by has no order.
        TypeError: an argument is of another type.
        ValueError: `limit` is negative.
    """
    if columns is not None and (isinstance(columns, str) or not isinstance(columns, Iterable)):
        raise TypeError(f"columns is a list of names, as ['id'], not {columns!r}")
    if limit is not None:
        if not hasattr(limit, "__index__"):
            raise TypeError(f"limit is a number of rows, not {limit!r}")
        limit = min(operator.index(limit), 1 << 62)
    names = tuple(table.schema.columns if columns is None else columns)
    for name in () if columns is None else names:
        table.schema.position(name)
    if limit is not None and limit < 0:
        raise ValueError(f"limit is a number of rows, not {limit}")
    filter = parse(where, table.schema)
    if ordered.__class__ is not bool and ordered != DESCENDING:
        ordered = checked(table.schema, ordered, filter.shape.constant)
    return Request(table, names, where, filter, ordered, limit, columns is None)


@dataclass(frozen=True)
class Piece:
    """The keys of one tablet in a range."""

    tablet_id: int
    key_range: KeyRange


def plan(
    tables: Tables,
    asked: Request,
    view: ReadView,
    pieces: Sequence[Piece] | None = None,
    *,
    short: bool = True,
) -> Plan:
    """Bind a request to what a view sees, in all of the table or in some pieces of it.

    Args:
        short: its range of keys may have few.

    Raises:
        TableNotFoundError: the table was dropped.
        HistoryExpiredError: the view's snapshot is older than the history.
    """
    if isinstance(asked.ordered, tuple):
        whole = asked._replace(columns=asked.seen, ordered=False, limit=None)
        return plan(tables, whole, view, pieces).in_order_of(asked)
    tables.require_live(asked.table)
    tablets = tables.tablets(asked.table)
    wanted = asked.filter.key_range(asked.table.schema, tablets[0].codec)
    if pieces is None:
        ranges = [(each, wanted) for each in tablets_for(asked.table, asked.filter, tablets)]
    else:
        by_id = {tablet.id: tablet for tablet in tablets}
        ranges = [(by_id[piece.tablet_id], wanted.within(piece.key_range)) for piece in pieces]
    filter = asked.filter
    by_index = _by_index(tables, asked, view, ranges)
    if by_index is not None:
        parts, pins = by_index
        return Plan(asked.columns, filter, parts, asked.schema, pins, asked.ordered, asked.limit)
    if view.reads is not None:
        for tablet, key_range in ranges:
            view.reads.add_range(tablet.id, key_range.low, key_range.high)
    touched = list({tablet.id: tablet for tablet, _ in ranges}.values())
    if filter.shape.is_key_range:
        filter = Filter()
    most, last = asked.limit if filter.is_empty else None, asked.ordered == DESCENDING

    def parts_of_all() -> tuple[tuple[Source, ...], Pins]:
        views, pins = view.pinned(tables, touched)
        by_tablet = {seen.tablet.id: seen for seen in views}
        return tuple(
            part
            for tablet, key_range in ranges
            for part in plan_parts(by_tablet[tablet.id], key_range, most, last=last, short=short)
        ), pins

    found, pins = until_there(parts_of_all, tables.log.latest)
    return Plan(asked.columns, filter, found, asked.schema, pins, asked.ordered, asked.limit)


# -- by an index -----------------------------------------------------------------------

_MOST_ENTRIES: Final = 1 << 16
_FEWEST_ENTRIES: Final = 1 << 10
_SHARE: Final = 64
"""An index finds one row of so many; where it leads to more, all are scanned."""

Ranges: TypeAlias = Sequence[tuple[Tablet, KeyRange]]

Chosen: TypeAlias = Sequence[tuple[TableIndex, Sequence[KeyRange]]]
"""Indexes, and the ranges of their keys in which is all that satisfies a filter."""


def _by_index(
    tables: Tables, asked: Request, view: ReadView, ranges: Ranges
) -> tuple[tuple[Source, ...], Pins] | None:
    """Return the rows that an index leads to; None where a scan is to find them."""
    for index, key_ranges in chosen_indexes(tables, asked):
        # What is damaged may be the index alone, which has nothing of its own.
        with suppress(CorruptionError):
            found = _found_by(tables, asked, view, ranges, index, key_ranges)
            if found is not None:
                return found
    return None


def _found_by(
    tables: Tables,
    asked: Request,
    view: ReadView,
    ranges: Ranges,
    index: TableIndex,
    key_ranges: Sequence[KeyRange],
) -> tuple[tuple[Source, ...], Pins] | None:
    states = [each.state(view.snapshot) for each in {t.id: t for t, _ in ranges}.values()]
    rows = sum(sum(info.live_rows for info in each.infos) + each.memory.n for each in states)
    most = max(_FEWEST_ENTRIES, min(rows // _SHARE, _MOST_ENTRIES))

    def entries() -> tuple[list[Source], Pins]:
        (seen,), pins = view.pinned(tables, [index.tablet])
        return [part for each in key_ranges for part in plan_parts(seen, each)], pins

    parts, pins = until_there(entries, tables.log.latest)
    if sum(max(part.blocks - 2, 0) for part in parts) * BATCH_ROWS > most:
        return None
    hidden = index.tablet.schema
    of = dict(
        zip((*index.key, *index.rest), (*hidden.primary_key, *hidden.value_columns), strict=True)
    )
    names = tuple(of[name] for name in asked.table.schema.primary_key)
    schema = pa.schema([hidden.arrow.field(name) for name in names])
    found = list(Plan(names, Filter(), tuple(parts), schema, pins, limit=most + 1).batches())
    if sum(batch.num_rows for batch in found) > most:
        return None
    if view.reads is not None:
        for each in key_ranges:
            view.reads.add_range(index.tablet.id, each.low, each.high)
    keys = pa.Table.from_batches(found, schema).rename_columns(asked.table.schema.primary_key)
    rows_found = rows_of_keys(tables, asked.table, view, keys.combine_chunks(), ranges)
    return None if rows_found is None else (rows_found, pins)


def chosen_indexes(tables: Tables, asked: Request) -> Chosen:
    """The indexes that narrow a filter, as much as the key at least, with their keys' ranges; those
    that narrow it most come first.
    """
    schema, filter = asked.table.schema, asked.filter
    if not schema.indexes or not filter.predicates or filter.shape.is_key_range:
        return []
    narrow = filter.narrowness(schema.primary_key)
    if narrow == 2 * len(schema.primary_key):
        return []  # one row at most
    try:
        indexes = tables.indexes(asked.table)
    except SchemaChangedError:  # the snapshot had one that was dropped since
        return []
    chosen: list[tuple[int, TableIndex, Sequence[KeyRange]]] = []
    for index in indexes:
        found = filter.index_ranges(index) if index.ready else None
        if found is None or found[0] < narrow:
            continue
        now = tables.current(asked.table).schema.indexes
        if any(each.ready and each.table == index.info.table for each in now):
            chosen.append((-found[0], index, found[1]))
    chosen.sort(key=operator.itemgetter(0))
    return [(index, ranges) for _, index, ranges in chosen]


def rows_of_keys(
    tables: Tables, table: TableInfo, view: ReadView, keys: pa.Table, ranges: Ranges
) -> tuple[Source, ...] | None:
    """The rows of some keys that lie in ranges; None where one of them is not there."""
    batches = keys.to_batches()
    if not batches:
        return ()
    (batch,) = batches
    tablets = tables.tablets(table)
    encoded = tablets[0].codec.encode(batch.columns)
    parts: list[Source] = []
    for tablet, rows in zip(tablets, table.partitioning.place(batch), strict=True):
        if rows is not None and rows.n == 0:
            continue
        order = core.sort_keys(encoded, rows) or rows
        of = encoded if order is None else encoded.gather(order)
        for at, key_range in ranges:
            if at.id != tablet.id:
                continue
            low = 0 if key_range.low is None else core.lower_bound(of, key_range.low)
            high = of.n if key_range.high is None else core.lower_bound(of, key_range.high)
            if low < high:
                some = of.slice(low, high - low)
                there, found = find_rows(tables, tablet, view, some)
                if there.count < some.n:
                    return None
                parts.append(ShortPart(tablet, some, found))
    return tuple(parts)


def count(tables: Tables, asked: Request, view: ReadView) -> int:
    """Rows that satisfy a request, whose projection is empty; `short_scan.few` finds them many."""
    made = plan(tables, asked, view, short=False)
    try:
        return made.count()
    finally:
        made.pins.release()
