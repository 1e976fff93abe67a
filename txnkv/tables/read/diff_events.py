"""The events between two times: which keys something happened to, by the stamps alone.

    start < insert stamp <= end      the row came
    start < delete stamp <= end      it went
    start < stamp of an entry <= end small commits that no flush has written yet

A row set is looked at only if one of its stamps is in between, and of a block nothing but its
stamps until there are some. So a look costs by what was changed, not by what is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa

from txnkv import core
from txnkv.core import compute as pc
from txnkv.tables.read.predicate import KeyRange
from txnkv.tables.read.view import Sight, first_stamp
from txnkv.tables.tablets import TOMBSTONES, Pages, RowSet, RowSetInfo

Events = tuple[core.Keys, pa.UInt64Array]
"""Keys, and when something happened to each; a key may come more than once."""


def anything(after: Sight, start: int) -> bool:
    """Return True when anything happened since `start`. No I/O.

    True also where a row came and went, or a commit changed nothing in the end.
    """
    if _touched(after, start, KeyRange()):
        return True
    memory, since = after.state.memory, max(start, after.after)
    if not memory.n or memory.changed(None, None, since) is None:
        return False
    return memory.select(None, None, since, int(after.snapshot)).n > 0


def events(after: Sight, start: int, key_range: KeyRange) -> Iterator[Events]:
    """All that happened since `start` to keys of a range, copied."""
    entries = _entries(after, start, key_range)
    if entries is not None:
        yield entries.keys, entries.stamps
    touched = _touched(after, start, key_range)
    if not touched:
        return
    end = int(after.snapshot)
    with after.tablet.read() as pages:
        for info in touched:
            row_set = after.tablet.row_set(info)
            for number in row_set.blocks_between(pages, key_range.low, key_range.high):
                for keys, stamps in _of_block(row_set, info, pages, number, start, end):
                    yield from _inside(keys, stamps, key_range)


def last(found: Sequence[Events]) -> Events | None:
    """Each key once, strictly ascending, with the last thing that happened to it."""
    if not found:
        return None
    keys = core.Keys.concat([keys for keys, _ in found])
    stamps = pa.concat_arrays([stamps for _, stamps in found])
    if pc.min(stamps) != pc.max(stamps):
        latest = pc.sort_indices(stamps, sort_keys=[("", "descending")]).cast(pa.uint32())
        keys = keys.gather(core.Rows.from_arrow(latest))
        stamps = stamps.take(latest)
    order = core.sort_keys(keys)  # stable: of equal keys the latest comes first
    if order is not None:
        keys, stamps = keys.gather(order), stamps.take(order.to_arrow())
    doubles = core.mark_duplicates(keys, None)
    if doubles.count:
        once = doubles.zeros()
        keys, stamps = keys.gather(once), stamps.take(once.to_arrow())
    return keys, stamps


def cut(
    after: Sight, start: int, key_range: KeyRange, events_each: int
) -> Iterator[tuple[KeyRange, int]]:
    """Parts of a range that together have all that happened in it, and about how much each.

    None where nothing happened. Cut at the first keys of blocks, and where much is in memory at
    every so many entries.
    """
    low, count = key_range.low, 0
    for key, more in sorted(_counts(after, start, key_range, events_each)):
        if count and count + more > events_each and (low is None or key > low):
            yield KeyRange(low, key), count
            low, count = key, 0
        count += more
    if count:
        yield KeyRange(low, key_range.high), count


def _counts(
    after: Sight, start: int, key_range: KeyRange, events_each: int
) -> Iterable[tuple[bytes, int]]:
    """Keys to cut at, with how much happened between one and the next."""
    entries = _entries(after, start, key_range)
    if entries is not None:
        keys = entries.keys
        for at in range(0, keys.n, events_each):
            yield keys.key(at), min(events_each, keys.n - at)
    touched = _touched(after, start, key_range)
    if not touched:
        return
    end = int(after.snapshot)
    with after.tablet.read() as pages:
        for info in touched:
            row_set = after.tablet.row_set(info)
            blocks = row_set.header(pages).blocks
            for number in row_set.blocks_between(pages, key_range.low, key_range.high):
                count = _how_many(row_set, info, pages, number, start, end)
                if count:
                    yield max(blocks[number].first, key_range.low or b""), count


# -- where ------------------------------------------------------------------------------


def _entries(after: Sight, start: int, key_range: KeyRange) -> core.Entries | None:
    memory = after.state.memory
    if not memory.n:
        return None
    since = max(start, after.after)
    entries = memory.select(key_range.low, key_range.high, since, int(after.snapshot))
    return entries if entries.n else None


def _touched(after: Sight, start: int, key_range: KeyRange) -> list[RowSetInfo]:
    """Row sets in which something may have happened since."""
    low, high = key_range.low, key_range.high
    return [
        info
        for info in (*after.unresolved, *after.settled)
        if max(int(info.stamp or 0), info.max_delete) > start
        and info.max_key >= (low or b"")
        and (high is None or info.min_key < high)
    ]


# -- one block --------------------------------------------------------------------------


def _of_block(
    row_set: RowSet, info: RowSetInfo, pages: Pages, number: int, start: int, end: int
) -> Iterator[Events]:
    """Keys of rows that were inserted or deleted with start < stamp <= end, copied."""
    if _may_insert(info, start, end):
        inserts = row_set.inserts(pages, number)
        if inserts is None:
            keys = core.Keys.concat([row_set.keys(pages, number)])
            yield keys, pa.repeat(pa.scalar(int(info.stamp or 0), pa.uint64()), keys.n)
        else:
            rows = core.Bitmap.from_arrow(_between(inserts, start, end)).positions()
            if rows.n:
                yield row_set.keys(pages, number).gather(rows), inserts.take(rows.to_arrow())
    delta = _deletes(row_set, info, pages, number)
    if delta is not None:
        numbers, stamps = delta
        fresh = _between(stamps, start, end)
        if fresh.true_count:
            rows = core.Rows.from_arrow(numbers.filter(fresh))
            yield row_set.keys(pages, number).gather(rows), stamps.filter(fresh)


def _how_many(
    row_set: RowSet, info: RowSetInfo, pages: Pages, number: int, start: int, end: int
) -> int:
    """Count the events that `_of_block` yields."""
    count = 0
    if _may_insert(info, start, end):
        inserts = row_set.inserts(pages, number)
        if inserts is None:
            count = row_set.header(pages).blocks[number].rows
        else:
            count = _between(inserts, start, end).true_count
    delta = _deletes(row_set, info, pages, number)
    return count if delta is None else count + _between(delta[1], start, end).true_count


def _may_insert(info: RowSetInfo, start: int, end: int) -> bool:
    return int(info.stamp or 0) > start and first_stamp(info) <= end


def _deletes(
    row_set: RowSet, info: RowSetInfo, pages: Pages, number: int
) -> tuple[pa.UInt32Array, pa.UInt64Array] | None:
    return None if info.kind == TOMBSTONES else row_set.deletes(pages, number)


def _between(stamps: pa.UInt64Array, start: int, end: int) -> pa.BooleanArray:
    return pc.and_(
        pc.greater(stamps, pa.scalar(start, pa.uint64())),
        pc.less_equal(stamps, pa.scalar(end, pa.uint64())),
    )


def _inside(keys: core.Keys, stamps: pa.UInt64Array, key_range: KeyRange) -> Iterator[Events]:
    """Those of ascending keys that are in the range."""
    low, high = key_range.low, key_range.high
    lo = 0 if low is None else core.lower_bound(keys, low)
    hi = keys.n if high is None else core.lower_bound(keys, high)
    if lo < hi:
        yield keys.slice(lo, hi - lo), stamps.slice(lo, hi - lo)
