"""Scans: which blocks to read, reading them, filtering, in any order or in key order.

    plan     tablets -> row sets in the view -> blocks whose key range and zone maps admit
             the predicates                                                       (units)
    read     per unit: predicate columns, mask; then the other columns, only if a row is left
    ordered  units of row sets that overlap are merged by key, others follow one another

A scan holds no LMDB transaction between two batches, so a slow reader keeps no pages from
being used again, and what it returns lies in memory that Arrow owns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from txnkv import core
from txnkv.tables.manifest import RowSetInfo
from txnkv.tables.predicate import Filter, KeyRange
from txnkv.tables.row_set import RowSet
from txnkv.tables.tablet import LARGE_READ, Pages, Tablet

if TYPE_CHECKING:
    from txnkv.tables.engine import TableEngine

_AHEAD: Final = 4


@dataclass(frozen=True)
class Unit:
    """One block to read."""

    tablet: Tablet
    row_set: RowSet
    number: int


@dataclass(frozen=True)
class Part:
    """Blocks [start, stop) of one row set."""

    tablet: Tablet
    info: RowSetInfo
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.info.rows


@dataclass(frozen=True)
class Plan:
    """A scan that is ready to be read, any number of times.

    Attributes:
        columns: the projection.
        parts: what to read.
    """

    columns: tuple[str, ...]
    filter: Filter
    key_range: KeyRange
    parts: tuple[Part, ...]
    schema: pa.Schema
    ordered: bool = False
    limit: int | None = None

    def batches(self, threads: int = 1) -> Iterator[pa.RecordBatch]:
        """The rows. With `threads` above 1 blocks are read ahead."""
        source = self._ordered() if self.ordered else self._unordered(threads)
        left = self.limit
        for batch in source:
            if left is None:
                yield batch
                continue
            if left <= 0:
                return
            yield batch.slice(0, left) if batch.num_rows > left else batch
            left -= batch.num_rows

    def _unordered(self, threads: int) -> Iterator[pa.RecordBatch]:
        if threads <= 1 or sum(part.stop - part.start for part in self.parts) <= _AHEAD:
            for unit in self.units(self.parts):
                batch = self._read(unit)
                if batch is not None:
                    yield batch
            return
        with ThreadPoolExecutor(threads, thread_name_prefix="txnkv-scan") as pool:
            waiting: deque[Future[pa.RecordBatch | None]] = deque()
            for unit in self.units(self.parts):
                waiting.append(pool.submit(self._read, unit))
                if len(waiting) > _AHEAD:
                    batch = waiting.popleft().result()
                    if batch is not None:
                        yield batch
            while waiting:
                batch = waiting.popleft().result()
                if batch is not None:
                    yield batch

    def units(self, parts: Sequence[Part]) -> Iterator[Unit]:
        """The blocks of `parts` that their zone maps admit."""
        for part in parts:
            row_set = part.tablet.row_set(part.info)
            ids = part.tablet.schema.ids
            with part.tablet.read() as pages:
                blocks = row_set.header(pages).blocks
            for number in range(part.start, part.stop):
                block = blocks[number]
                if self.filter.may_hold(block.zones, ids, block.rows):
                    yield Unit(part.tablet, row_set, number)

    # -- one block ---------------------------------------------------------------------

    @cached_property
    def _large(self) -> bool:
        return sum(part.info.size for part in self.parts) > LARGE_READ

    def _read(self, unit: Unit) -> pa.RecordBatch | None:
        with unit.tablet.read(once=self._large) as pages:
            lo, n = self._rows(pages, unit)
            if n == 0:
                return None
            return self._project(pages, unit, lo, n)

    def _rows(self, pages: Pages, unit: Unit) -> tuple[int, int]:
        """First row and number of rows of the block that are in the key range."""
        block = unit.row_set.header(pages).blocks[unit.number]
        low, high = self.key_range.low, self.key_range.high
        cut_low = low is not None and block.first < low
        cut_high = high is not None and block.last >= high
        if not cut_low and not cut_high:
            return 0, block.rows
        keys = unit.row_set.keys(pages, unit.number)
        lo = core.lower_bound(keys, low) if cut_low and low is not None else 0
        hi = core.lower_bound(keys, high) if cut_high and high is not None else block.rows
        return lo, max(hi - lo, 0)

    def _project(self, pages: Pages, unit: Unit, lo: int, n: int) -> pa.RecordBatch | None:
        block = unit.row_set.header(pages).blocks[unit.number]

        def read(names: Sequence[str]) -> list[pa.Array]:
            return unit.row_set.read(pages, block, unit.number, names, lo, n)

        if self.filter.expression is not None:
            names = self.filter.columns
            whole = pa.record_batch(read(names), names=list(names))
            kept = whole.filter(self.filter.expression)
            return self._batch([kept.column(name) for name in self.columns], kept.num_rows)
        tested = self.filter.columns
        columns = dict(zip(tested, read(tested), strict=True))
        mask = self.filter.mask(columns)
        if mask is not None and mask.true_count == 0:
            return None
        missing = [name for name in self.columns if name not in columns]
        columns.update(zip(missing, read(missing), strict=True))
        arrays = [columns[name] for name in self.columns]
        if mask is not None and mask.true_count < n:
            arrays = [array.filter(mask) for array in arrays]
            n = mask.true_count
        return self._batch(arrays, n)

    def _batch(self, arrays: list[pa.Array], n: int) -> pa.RecordBatch | None:
        if n == 0:
            return None
        if not arrays:
            return _rows_without_columns(n)
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    # -- key order ---------------------------------------------------------------------

    def _ordered(self) -> Iterator[pa.RecordBatch]:
        for cluster in _clusters(self.parts):
            if len(cluster) == 1:
                for unit in self.units(cluster):
                    batch = self._read(unit)
                    if batch is not None:
                        yield batch
            else:
                yield from self._merged(cluster)

    def _merged(self, cluster: Sequence[Part]) -> Iterator[pa.RecordBatch]:
        names = list(dict.fromkeys((*self.columns, *self.filter.columns)))
        sources = [_Source(self, part, names) for part in cluster]
        sources = [source for source in sources if source.advance()]
        if not sources:
            return
        merger = core.Merger([source.keys for source in sources])
        live = len(sources)
        while live:
            which, index = merger.next(1 << 16)
            if len(which):
                batch = self._interleaved(sources, names, which, index)
                if batch is not None:
                    yield batch
            for i in merger.exhausted:
                if sources[i].advance():
                    merger.replace(i, sources[i].keys)
                else:
                    merger.finish(i)
                    live -= 1

    def _interleaved(
        self,
        sources: Sequence[_Source],
        names: Sequence[str],
        which: pa.UInt16Array,
        index: pa.UInt32Array,
    ) -> pa.RecordBatch | None:
        starts, total = [], 0
        for source in sources:
            starts.append(total)
            total += len(source.arrays[0]) if source.arrays else 0
        rows = pc.add(pc.take(pa.array(starts, pa.uint32()), which), index)
        columns = {
            name: pa.concat_arrays([source.arrays[i] for source in sources]).take(rows)
            for i, name in enumerate(names)
        }
        n = len(rows)
        if self.filter.expression is not None:
            batch = pa.record_batch(columns).filter(self.filter.expression)
            return self._batch([batch.column(name) for name in self.columns], batch.num_rows)
        mask = self.filter.mask(columns)
        arrays = [columns[name] for name in self.columns]
        if mask is not None:
            arrays = [array.filter(mask) for array in arrays]
            n = mask.true_count
        return self._batch(arrays, n)


class _Source:
    """One row set of a merge: its current block, copied out of LMDB."""

    keys: core.Keys

    def __init__(self, plan: Plan, part: Part, names: Sequence[str]) -> None:
        self._plan = plan
        self._names = names
        self._units = plan.units([part])
        self.arrays: list[pa.Array] = []

    def advance(self) -> bool:
        """Go to the next block that has rows in the key range; False at the end."""
        for unit in self._units:
            with unit.tablet.read(once=self._plan._large) as pages:
                lo, n = self._plan._rows(pages, unit)
                if n == 0:
                    continue
                block = unit.row_set.header(pages).blocks[unit.number]
                self.arrays = unit.row_set.read(pages, block, unit.number, self._names, lo, n)
                keys = unit.row_set.keys(pages, unit.number).slice(lo, n)
                self.keys = core.Keys.concat([keys])  # out of LMDB
            return True
        return False


def _clusters(parts: Sequence[Part]) -> list[list[Part]]:
    """Parts whose key ranges overlap stand together; clusters follow one another by key."""
    clusters: list[list[Part]] = []
    reach = b""
    for part in sorted(parts, key=lambda part: part.info.min_key):
        if clusters and part.info.min_key <= reach:
            clusters[-1].append(part)
            reach = max(reach, part.info.max_key)
        else:
            clusters.append([part])
            reach = part.info.max_key
    return clusters


def _rows_without_columns(n: int) -> pa.RecordBatch:
    """A batch of n rows and no columns, which pyarrow makes only by dropping some."""
    return pa.record_batch([pa.nulls(n)], names=["none"]).select([])


def plan_parts(
    engine: TableEngine,
    tablets: Sequence[Tablet],
    row_sets: Sequence[Sequence[RowSetInfo]],
    key_range: KeyRange,
) -> tuple[Part, ...]:
    """The blocks of each tablet's row sets that may hold keys of the range."""
    if key_range.empty:
        return ()
    low = key_range.low or b""
    parts = []
    for tablet, infos in zip(tablets, row_sets, strict=True):
        hit = [
            info
            for info in infos
            if info.max_key >= low and (key_range.high is None or info.min_key < key_range.high)
        ]
        if not hit:
            continue
        with tablet.read() as pages:
            for info in hit:
                span = tablet.row_set(info).blocks_between(pages, key_range.low, key_range.high)
                if span:
                    parts.append(Part(tablet, info, span.start, span.stop))
    return tuple(parts)
