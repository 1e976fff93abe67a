"""Sources of a scan: blocks of row sets, and entries of memory, as rows of sorted keys.

Both give `Selection`s: the keys of some rows that the view sees, strictly ascending, and their
columns on demand. Rows that were deleted and rows that a mask hides are left out first, so that
predicates and merges meet each key once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Final, cast

import pyarrow as pa

from txnkv import core
from txnkv.core import compute as pc
from txnkv.tables.read.point import columns_of
from txnkv.tables.read.predicate import Filter, KeyRange
from txnkv.tables.read.view import Mask, RowSetMask, hidden
from txnkv.tables.table_catalog import TableInfo
from txnkv.tables.tablets import (
    EVERY_STAMP,
    KEYS,
    KnownKeys,
    Pages,
    RowSet,
    RowSetInfo,
    Tablet,
    TabletView,
)

BATCH_ROWS: Final = 1 << 16
_SPARSE: Final = 8
"""Up to one row in so many that is not seen, rows are copied in runs between those."""

_FEW: Final = 64
"""Below one masking key for so many of a block they are looked for in it as it lies."""

_MANY_MASKS: Final = 16
"""More of them are asked for together whether they may have keys of a block."""

_PLACED: Final = 64
"""Values of an "in", at most, that rule out tablets."""

_FEW_TABLETS: Final = 32
"""So many are looked into by a short read as fast as they are ruled out."""

_NO_PAGES: Final = cast(Pages, None)

Read = Callable[[Sequence[str]], list[pa.Array]]


def tablets_for(
    table: TableInfo, filter: Filter, tablets: Sequence[Tablet], short: bool = False
) -> Sequence[Tablet]:
    """Those of a table's tablets in which rows may satisfy a filter: where rows are placed that
    have its values of the columns by which the table is cut. These are of the columns' types, and
    equal ones have one place; where that is not certain, nothing is left out.

    Args:
        tablets: of the table, all of them, by number.
        short: a few rows are looked for in each.
    """
    if len(tablets) <= (_FEW_TABLETS if short else 1):
        return tablets
    values: dict[str, pa.Array] = {}
    for p in filter.predicates:
        if p.op not in ("=", "in") or not 0 < len(p.given) <= _PLACED:
            continue
        if pa.types.is_floating(p.type):  # NaN equals nothing, and is in [NaN]
            continue
        if p.column not in values or len(p.given) < len(values[p.column]):
            values[p.column] = p.values
    if not values:
        return tablets
    return [tablets[number] for number in table.partitioning.tablets_with(values)]


@dataclass(frozen=True)
class Selection:
    """Some rows of one source; valid as long as the pages that it came from.

    Attributes:
        n: how many rows, at least one.
        read: the columns of all of them, copied.
        keys: their keys, strictly ascending, copied.
        pick: columns of those at some positions, ascending; None where all have to be read.
    """

    n: int
    read: Read
    keys: Callable[[], core.Keys]
    pick: Callable[[Sequence[str], pa.UInt32Array], list[pa.Array]] | None = None


@dataclass(frozen=True)
class Unit:
    """The part of a source that is read at a time."""

    tablet: Tablet
    source: _Block | _Piece | ShortPart

    def pages(self, *, once: bool) -> AbstractContextManager[Pages]:
        """Pages to read it from; none for what is in memory, whose tablet may have no file yet."""
        if not isinstance(self.source, _Block) and not self.source.on_disk:
            return nullcontext(_NO_PAGES)
        return self.tablet.read(once=once)


@dataclass(frozen=True)
class Part:
    """Blocks [start, stop) of one row set.

    Attributes:
        masks: whose keys hide its rows.
    """

    view: TabletView
    info: RowSetInfo
    key_range: KeyRange
    start: int
    stop: int
    masks: Sequence[Mask]

    @property
    def tablet(self) -> Tablet:
        return self.view.tablet

    @property
    def low(self) -> bytes:
        """No key is below."""
        return self.info.min_key

    @property
    def high(self) -> bytes:
        """No key is above."""
        return self.info.max_key

    @property
    def blocks(self) -> int:
        return self.stop - self.start

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return self.info.size

    @property
    def width(self) -> float:
        """Bytes of a row, about."""
        return self.size / self.info.rows

    @property
    def plain(self) -> bool:
        """All rows without a delete stamp are seen, and no others.

        Stamps that are written and not yet counted in the info are of commits whose keys are
        masks, or are later than the snapshot.
        """
        low, high, info = self.key_range.low, self.key_range.high, self.info
        return (
            not self.masks
            and max(int(info.stamp or 0), info.max_delete) <= self.view.snapshot
            and (low is None or low <= info.min_key)
            and (high is None or info.max_key < high)
        )

    def narrowed(self, to: KeyRange) -> Part | None:
        """The part of a range of keys; None where no block is in it."""
        row_set = self.tablet.row_set(self.info)
        with self.tablet.read() as pages:
            span = row_set.blocks_between(pages, to.low, to.high)
        start, stop = max(self.start, span.start), min(self.stop, span.stop)
        if start >= stop:
            return None
        return replace(self, key_range=self.key_range.within(to), start=start, stop=stop)

    def units(self, filter: Filter) -> Iterator[Unit]:
        """The blocks that their zone maps admit."""
        row_set = self.tablet.row_set(self.info)
        ids = self.tablet.schema.ids
        with self.tablet.read() as pages:
            blocks = row_set.header(pages).blocks
        for number in range(self.start, self.stop):
            if filter.may_hold(blocks[number].zones, ids, blocks[number].rows):
                yield Unit(self.tablet, _Block(self, row_set, number))


@dataclass(frozen=True)
class _Block:
    part: Part
    row_set: RowSet
    number: int

    def select(self, pages: Pages) -> Selection | None:
        """The rows that are seen; None for none."""
        row_set, number = self.row_set, self.number
        lo, n = self._range(pages)
        if n == 0:
            return None
        gone = self._gone(pages, lo, n)
        block = row_set.header(pages).blocks[number]

        def pick(names: Sequence[str], positions: pa.UInt32Array) -> list[pa.Array]:
            if gone is None:
                rows = pc.add(positions, pa.scalar(lo, pa.uint32()))
            else:
                rows = _but(gone, lo, n, block.rows).to_arrow().take(positions)
            return row_set.gather(pages, number, names, core.Rows.from_arrow(rows))

        if gone is None:
            return Selection(
                n,
                lambda names: row_set.read(pages, block, number, names, lo, n),
                lambda: core.Keys.concat([row_set.keys(pages, number).slice(lo, n)]),
                pick,
            )
        if gone.n == n:
            return None
        if gone.n * _SPARSE < n:
            return Selection(
                n - gone.n,
                lambda names: row_set.read(pages, block, number, names, lo, n, gone),
                lambda: row_set.keys(pages, number).without(gone, lo, n),
                pick,
            )
        rows = _but(gone, lo, n, block.rows)
        return Selection(
            rows.n,
            lambda names: row_set.gather(pages, number, names, rows),
            lambda: row_set.keys_at(pages, number, rows),
        )

    def count(self, pages: Pages) -> int:
        """Count the rows that are seen."""
        lo, n = self._range(pages)
        gone = self._gone(pages, lo, n) if n else None
        return n if gone is None else n - gone.n

    def _range(self, pages: Pages) -> tuple[int, int]:
        """First row and number of rows of the block that are in the key range."""
        block = self.row_set.header(pages).blocks[self.number]
        low, high = self.part.key_range.low, self.part.key_range.high
        cut_low = low is not None and block.first < low
        cut_high = high is not None and block.last >= high
        if not cut_low and not cut_high:
            return 0, block.rows
        keys = self.row_set.block(pages, KEYS, self.number)
        lo = core.lower_bound_in(keys, low) if cut_low and low is not None else 0
        hi = core.lower_bound_in(keys, high) if cut_high and high is not None else block.rows
        return lo, max(hi - lo, 0)

    def _gone(self, pages: Pages, lo: int, n: int) -> core.Rows | None:
        """Those of rows [lo, lo + n) that are not seen, ascending; None for none."""
        part, row_set, number = self.part, self.row_set, self.number
        # A transaction's own rows are seen, and go on to be when it commits beside the scan.
        own = part.info.stamp is None
        seen = None if own else row_set.seen(pages, number, part.view.snapshot)
        gone = None if seen is None else core.Bitmap.from_arrow(seen).zeros()
        block = row_set.header(pages).blocks[number]
        of = block.rows
        if part.masks:
            inserts = None
            if any(mask.before != EVERY_STAMP for mask in part.masks):
                inserts = row_set.inserts(pages, number)
            keys: core.Keys | None = None
            masks = part.masks
            if len(masks) > _MANY_MASKS:
                keys = row_set.keys(pages, number)
                known = part.tablet.known_staged(keys)
                masks = [each for each in masks if not _lacks(each, known)]

            def rows_of(some: core.Keys) -> pa.UInt32Array:
                nonlocal keys
                if part.info.versioned or some.n * _FEW < of:
                    return row_set.matches(pages, number, some)[1]
                keys = keys or row_set.keys(pages, number)
                return core.mark_common(keys, some).positions().to_arrow()

            hits = hidden(pages, masks, block.first, block.last, of, rows_of, inserts)
            if gone is None or hits is None:
                gone = hits if gone is None else gone
            else:
                both = pa.concat_arrays([gone.to_arrow(), hits.to_arrow()])
                gone = core.Bitmap.of(of, both).positions()
        if gone is not None:
            gone = _between(gone, lo, n, of)
        return gone if gone is not None and gone.n else None


def _lacks(mask: Mask, known: KnownKeys) -> bool:
    return isinstance(mask, RowSetMask) and known.lacks(mask.row_set.id)


def _but(gone: core.Rows, lo: int, n: int, of: int) -> core.Rows:
    """Rows [lo, lo + n) of a block without those that are gone."""
    return _between(core.Bitmap.of(of, gone.to_arrow()).zeros(), lo, n, of)


def _between(rows: core.Rows, lo: int, n: int, of: int) -> core.Rows:
    """Those of ascending rows that are in [lo, lo + n)."""
    if lo == 0 and n == of:
        return rows
    numbers = rows.to_arrow()
    inside = pc.and_(
        pc.greater_equal(numbers, pa.scalar(lo, pa.uint32())),
        pc.less(numbers, pa.scalar(lo + n, pa.uint32())),
    )
    return core.Rows.from_arrow(numbers.filter(inside))


@dataclass(frozen=True)
class MemoryPart:
    """Rows in memory.

    Attributes:
        entries: of a range of keys, ascending, tombstones among them.
        masks: whose keys hide its rows.
        own: a transaction wrote them itself, with the schema that it reads with.
    """

    tablet: Tablet
    entries: core.Entries
    masks: Sequence[Mask]
    own: bool = False
    size: int = 0
    blocks: int = 1

    @property
    def width(self) -> float:
        """Bytes of a row, about."""
        return self.entries.width

    @property
    def keys(self) -> core.Keys:
        """The keys of the entries."""
        return self.entries.keys

    @property
    def low(self) -> bytes:
        """No key is below."""
        return self.keys.key(0)

    @property
    def high(self) -> bytes:
        """No key is above."""
        return self.keys.key(self.entries.n - 1)

    def narrowed(self, to: KeyRange) -> MemoryPart | None:
        """The part of a range of keys; None where there is none."""
        lo, n = _span(self.keys, to)
        if n in (0, self.entries.n):
            return self if n else None
        return replace(self, entries=self.entries.take(core.Rows.range(lo + n).slice(lo, n)))

    def units(self, filter: Filter) -> Iterator[Unit]:
        """Pieces of up to as many rows as a block has."""
        for start in range(0, self.entries.n, BATCH_ROWS):
            yield Unit(self.tablet, _Piece(self, start, min(BATCH_ROWS, self.entries.n - start)))


@dataclass(frozen=True)
class _Piece:
    part: MemoryPart
    start: int
    n: int

    @property
    def on_disk(self) -> bool:
        """True when masks are read from row sets."""
        return any(isinstance(mask, RowSetMask) for mask in self.part.masks)

    def select(self, pages: Pages) -> Selection | None:
        """The rows that are seen; None for none."""
        rows = self._rows(pages)
        if rows.n == 0:
            return None
        entries, tablet, own = self.part.entries, self.part.tablet, self.part.own

        def read(names: Sequence[str]) -> list[pa.Array]:
            return memory_columns(tablet, entries, names, rows, own=own)

        return Selection(rows.n, read, lambda: entries.keys.gather(rows))

    def count(self, pages: Pages) -> int:
        """Count the rows that are seen."""
        return self._rows(pages).n

    def _rows(self, pages: Pages) -> core.Rows:
        entries = self.part.entries
        keys = entries.keys.slice(self.start, self.n)
        there = pc.equal(entries.kinds.slice(self.start, self.n), 1)
        low, high = keys.key(0), keys.key(keys.n - 1)

        def rows_of(some: core.Keys) -> pa.UInt32Array:
            return core.mark_common(keys, some).positions().to_arrow()

        gone = hidden(pages, self.part.masks, low, high, keys.n, rows_of)
        if gone is not None:
            hits = core.Bitmap.of(keys.n, gone.to_arrow())
            there = pc.and_not(there, hits.to_arrow())
        rows = core.Bitmap.from_arrow(there).positions().to_arrow()
        if self.start:
            rows = pc.add(rows, pa.scalar(self.start, pa.uint32()))
        return core.Rows.from_arrow(rows)


def memory_columns(
    tablet: Tablet, entries: core.Entries, names: Sequence[str], rows: core.Rows, *, own: bool
) -> list[pa.Array]:
    """Columns of some entries, in the order of `rows`.

    Args:
        own: a transaction wrote them itself; else they are committed.
    """
    values = [name for name in names if name in tablet.value_names]
    numbers = [tablet.value_names.index(name) for name in values]
    if own:
        arrays = entries.columns(tablet.layout, numbers, rows)
    else:
        arrays = tablet.memory_rows.columns(entries, numbers, rows)
    columns = dict(zip(values, arrays, strict=True))
    if len(values) < len(names):
        key = tablet.schema.primary_key
        keys = entries.keys.gather(rows)
        for name in names:
            if name not in columns:
                columns[name] = tablet.codec.decode(keys, key.index(name))
    return [columns[name] for name in names]


@dataclass(frozen=True)
class ShortPart:
    """The rows of a short range of keys, all of which are seen: found as single ones are.

    Attributes:
        keys: of the rows, ascending; one at least.
        rows: their bytes.
    """

    tablet: Tablet
    keys: core.Keys
    rows: core.RowSlices
    on_disk: bool = False
    size: int = 0
    blocks: int = 1
    width: float = 1.0

    @property
    def low(self) -> bytes:
        """No key is below."""
        return self.keys.key(0)

    @property
    def high(self) -> bytes:
        """No key is above."""
        return self.keys.key(self.keys.n - 1)

    def narrowed(self, to: KeyRange) -> ShortPart | None:
        """The part of a range of keys; None where there is none."""
        lo, n = _span(self.keys, to)
        return (
            replace(self, keys=self.keys.slice(lo, n), rows=self.rows.slice(lo, n)) if n else None
        )

    def units(self, filter: Filter) -> Iterator[Unit]:
        """All of them at once."""
        yield Unit(self.tablet, self)

    def select(self, pages: Pages) -> Selection | None:
        """The rows."""

        def read(names: Sequence[str]) -> list[pa.Array]:
            return columns_of(self.tablet, names, self.keys, self.rows)

        return Selection(self.keys.n, read, lambda: self.keys)

    def count(self, pages: Pages) -> int:
        """Count the rows."""
        return self.keys.n


Source = Part | MemoryPart | ShortPart


def clusters(parts: Sequence[Source]) -> list[list[Source]]:
    """Parts whose key ranges overlap stand together; clusters follow one another by key."""
    found: list[list[Source]] = []
    reach = b""
    for low, part in sorted(((part.low, part) for part in parts), key=lambda pair: pair[0]):
        if found and low <= reach:
            found[-1].append(part)
            reach = max(reach, part.high)
        else:
            found.append([part])
            reach = part.high
    return found


def _span(keys: core.Keys, of: KeyRange) -> tuple[int, int]:
    """The first of the keys in a range, and how many there are."""
    lo = 0 if of.low is None else core.lower_bound(keys, of.low)
    hi = keys.n if of.high is None else core.lower_bound(keys, of.high)
    return lo, max(hi - lo, 0)


def cuts(parts: Sequence[Source], rows_each: int) -> Iterator[tuple[KeyRange, int]]:
    """Ranges that together are all keys, ascending, and about how many rows each holds."""
    steps = sorted(step for part in parts for step in _steps(part, rows_each))
    low: bytes | None = None
    rows = 0
    for key, count in steps:
        if rows and rows + count > rows_each and (low is None or key > low):
            yield KeyRange(low, key), rows
            low, rows = key, 0
        rows += count
    if rows:
        yield KeyRange(low, None), rows


def _steps(part: Source, rows_each: int) -> Iterator[tuple[bytes, int]]:
    """Keys to cut at, with about how many rows lie between one and the next."""
    if isinstance(part, Part):
        with part.tablet.read() as pages:
            blocks = part.tablet.row_set(part.info).header(pages).blocks
        for block in blocks[part.start : part.stop]:
            yield block.first, block.rows
        return
    keys = part.keys
    step = min(rows_each, keys.n)
    for start in range(0, keys.n, step):
        yield keys.key(start), min(step, keys.n - start)


class MergeCursor:
    """One source of a merge: the rows of its current block, copied out of LMDB.

    Attributes:
        at: of the next row that was not merged yet.
        next: what follows; None: nothing.
        width: bytes of a row, about.
    """

    keys: core.Keys
    at: int
    width: float

    def __init__(self, units: Iterator[Unit], names: Sequence[str], *, large: bool) -> None:
        self._units, self._names, self._large = units, names, large
        self.next = next(units, None)
        self.arrays: list[pa.Array] = []

    def advance(self) -> bool:
        """Go to the next block that has rows to be read; False at the end."""
        while (unit := self.next) is not None:
            self.next = next(self._units, None)
            with unit.pages(once=self._large) as pages:
                selection = unit.source.select(pages)
                if selection is None:
                    continue
                self.arrays = selection.read(self._names)
                self.keys = selection.keys()
            self.at = 0
            self.width = sum(array.nbytes for array in self.arrays) / max(self.keys.n, 1)
            return True
        return False
