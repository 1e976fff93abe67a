"""Row sets of one tablet beside one another by their keys: merged, and compared.

Merged into one stream of rows they stand by key, then newest first:

    row set 3   ant@10            cat@10           dog@10
    row set 5            bee@20   cat@20  cat@15                        dead rows are left out
    merged      ant@10   bee@20   cat@20  cat@15  cat@10  dog@10        as they are loaded

A source holds a slice of one block at a time, so that memory stays bounded however many sources
there are; all versions of one key come in one part.

Compared, as transactions stage them, each has a key once; stamps are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import pyarrow as pa

from txnkv import core
from txnkv.coordinator import Timestamp
from txnkv.core import compute as pc
from txnkv.tables.tablets.manifest import RowSetInfo
from txnkv.tables.tablets.row_set import RowSetBlocks
from txnkv.tables.tablets.row_set_writer import RowPart
from txnkv.tables.tablets.tablet import Tablet
from txnkv.tables.tablets.tablet_files import LARGE_CHECK

LOADED_ROWS: Final = 1 << 18
"""Rows that all sources together have in memory, about."""

LOADED_BYTES: Final = 64 << 20
"""Bytes of them, about; a row of each source at least."""

_LEAST_STEP: Final = 1 << 10
_WINDOW: Final = 1 << 16


class Source:
    """The rows of one row set that some snapshot at or above a floor sees, a slice at a time.

    Attributes:
        info: of the row set.
        part: the present slice; its stamps are there for every row.
        used: by block, the deletes that were looked at.
    """

    part: RowPart

    def __init__(
        self,
        tablet: Tablet,
        info: RowSetInfo,
        names: Sequence[str],
        floor: Timestamp,
        sources: int,
    ) -> None:
        self.info = info
        self.used: dict[int, core.Delta | None] = {}
        self._tablet = tablet
        self._row_set: RowSetBlocks = tablet.row_set(info)
        self._names = names
        self._floor = pa.scalar(int(floor), pa.uint64())
        self._step = step_of(sources)
        self._room = LOADED_BYTES // max(sources, 1)
        self._number = 0
        self._lo = 0

    def advance(self) -> bool:
        """Load the next slice that has rows left; False at the end."""
        while True:
            with self._tablet.read(once=True) as pages:
                blocks = self._row_set.header(pages).blocks
                if self._number == len(blocks):
                    return False
                number, lo = self._number, self._lo
                n = min(self._step, blocks[number].rows - lo)
                if lo == 0:
                    self.used[number] = self._row_set.stored_delta(pages, number)
                arrays = self._row_set.read(pages, blocks[number], number, self._names, lo, n)
                while n > 1 and (size := sum(array.nbytes for array in arrays)) > self._room:
                    n = max(1, n * self._room // size)
                    arrays = self._row_set.read(pages, blocks[number], number, self._names, lo, n)
                keys = core.Keys.concat([self._row_set.keys(pages, number).slice(lo, n)])
                inserts = self._row_set.inserts(pages, number)
            if lo + n == blocks[number].rows:
                self._number, self._lo = number + 1, 0
            else:
                self._lo = lo + n
            stamp = pa.scalar(int(self.info.stamp or 0), pa.uint64())
            whole = RowPart(
                keys,
                dict(zip(self._names, arrays, strict=True)),
                None,
                pa.repeat(stamp, n) if inserts is None else inserts.slice(lo, n),
                (self.used[number] or core.Delta.none()).expand(blocks[number].rows).slice(lo, n),
            )
            self.part = self._alive(whole)
            if self.part.keys.n:
                return True

    def _alive(self, part: RowPart) -> RowPart:
        """Without rows that were dead at the floor, or from the beginning: one that a
        transaction wrote and replaced itself.
        """
        assert part.inserts is not None
        assert part.deletes is not None
        kept = pc.and_(
            pc.greater(part.deletes, self._floor), pc.greater(part.deletes, part.inserts)
        )
        if kept.true_count == part.keys.n:
            return part
        return taken(part, core.Bitmap.from_arrow(kept).positions())


def taken(part: RowPart, rows: core.Rows) -> RowPart:
    """Some rows of a part that has no order of its own, in the order of `rows`."""
    numbers = rows.to_arrow()
    return replace(
        part,
        keys=part.keys.gather(rows),
        columns={name: array.take(numbers) for name, array in part.columns.items()},
        inserts=None if part.inserts is None else part.inserts.take(numbers),
        deletes=None if part.deletes is None else part.deletes.take(numbers),
    )


def step_of(sources: int) -> int:
    """Rows of a slice, when there are so many sources."""
    return max(_LEAST_STEP, LOADED_ROWS // max(sources, 1))


def merged(sources: Sequence[Source], pace: Callable[[], None]) -> Iterator[RowPart]:
    """The rows of all sources, by key and then newest first; the versions of a key in one part.

    Args:
        sources: at their beginning.
        pace: called before each step, to wait or to raise.
    """
    carried: RowPart | None = None
    for part in _windows(sources, pace):
        if carried is not None:
            own = core.lower_bound(part.keys, carried.keys.key(0) + b"\0")
            if own:
                carried = RowPart.concat([carried, part.slice(0, own)])
                part = part.slice(own, part.keys.n - own)
                if part.keys.n == 0:
                    continue
            yield _newest_first(carried)
        run = core.lower_bound(part.keys, part.keys.key(part.keys.n - 1))
        if run:
            yield _newest_first(part.slice(0, run))
        carried = part.slice(run, part.keys.n - run)
    if carried is not None:
        yield _newest_first(carried)


def _newest_first(part: RowPart) -> RowPart:
    assert part.inserts is not None
    same = core.mark_duplicates(part.keys, None)
    order = core.version_order(same, part.inserts) if same.count else None
    return part if order is None else taken(part, order)


def _windows(sources: Sequence[Source], pace: Callable[[], None]) -> Iterator[RowPart]:
    """Rows by key, as many at a time as come before a source must be loaded again."""
    live = [source for source in sources if source.advance()]
    merger = core.Merger([source.part.keys for source in live])
    at = [0] * len(live)
    while not merger.done:
        pace()
        which, index = merger.next(_WINDOW)
        if len(which):
            yield _window(live, at, which, index)
        for i in merger.exhausted:
            at[i] = 0
            if live[i].advance():
                merger.replace(i, live[i].part.keys)
            else:
                merger.finish(i)


def _window(
    sources: Sequence[Source], at: list[int], which: pa.UInt16Array, index: pa.UInt32Array
) -> RowPart:
    """Rows of a window. From each source come rows that stand together in it, from `at` on."""
    counted: dict[int, int] = {
        entry["values"]: entry["counts"] for entry in pc.value_counts(which).to_pylist()
    }
    if len(counted) == 1:
        ((i, n),) = counted.items()
        at[i] += n
        return sources[i].part.slice(at[i] - n, n)
    slices, shifts, total = [], [0] * len(sources), 0
    for i, n in sorted(counted.items()):
        slices.append(sources[i].part.slice(at[i], n))
        shifts[i] = total - at[i]
        at[i] += n
        total += n
    rows = pc.add(pc.take(pa.array(shifts, pa.int64()), which), index.cast(pa.int64()))
    return taken(RowPart.concat(slices), core.Rows.from_arrow(rows.cast(pa.uint32())))


_KEYS_AT_ONCE: Final = 1 << 18


def keys_of(
    tablet: Tablet, info: RowSetInfo, low: bytes | None = None, high: bytes | None = None
) -> Iterator[core.Keys]:
    """The keys of a row set with low <= key <= high, in order, many at a time and copied."""
    row_set = tablet.row_set(info)
    with tablet.read() as pages:
        blocks = row_set.header(pages).blocks
        span = row_set.blocks_between(pages, low, None if high is None else high + b"\0")
    start = span.start
    while start < span.stop:
        stop = start + 1
        while stop < span.stop and blocks[stop].start - blocks[start].start < _KEYS_AT_ONCE:
            stop += 1
        with tablet.read(once=info.size > LARGE_CHECK) as pages:
            parts = [row_set.keys(pages, number) for number in range(start, stop)]
            keys = core.Keys.concat(parts)
        yield keys_between(keys, low, high)
        start = stop


def keys_between(keys: core.Keys, low: bytes | None, high: bytes | None) -> core.Keys:
    first = 0 if low is None else core.lower_bound(keys, low)
    last = keys.n if high is None else core.lower_bound(keys, high + b"\0")
    return keys.slice(first, max(last - first, 0))


def common_keys(tablet: Tablet, a: RowSetInfo, b: RowSetInfo, limit: int) -> list[bytes]:
    """Up to `limit` keys that are in both of two row sets."""
    low, high = max(a.min_key, b.min_key), min(a.max_key, b.max_key)
    if low > high:
        return []
    smaller, larger = (a, b) if a.rows <= b.rows else (b, a)
    found: list[bytes] = []
    for keys in keys_of(tablet, smaller, low, high):
        found += common_with(tablet, larger, keys, limit - len(found))
        if len(found) >= limit:
            break
    return found


def common_with(tablet: Tablet, info: RowSetInfo, keys: core.Keys, limit: int) -> list[bytes]:
    """Up to `limit` of `keys`, strictly ascending, that a row set has."""
    found: list[bytes] = []
    if keys.n == 0 or not info.overlaps(keys.key(0), keys.key(keys.n - 1)):
        return found
    row_set = tablet.row_set(info)
    low, high = keys.key(0), keys.key(keys.n - 1) + b"\0"
    with tablet.read() as pages:
        blocks = row_set.header(pages).blocks
        for number in row_set.blocks_between(pages, low, high):
            some = keys_between(keys, blocks[number].first, blocks[number].last)
            there = core.mark_common(some, row_set.keys(pages, number)).positions()
            found += [some.key(i.as_py()) for i in there.to_arrow().slice(0, limit - len(found))]
            if len(found) >= limit:
                break
    return found
