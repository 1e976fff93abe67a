"""Row sets compared by their keys, as they stand, whatever stamps their rows have.

These are row sets as transactions stage them: each has a key once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pyarrow as pa

from txnkv import core
from txnkv.core import compute as pc
from txnkv.tables.tablets.manifest import RowSetInfo
from txnkv.tables.tablets.tablet import Tablet
from txnkv.tables.tablets.tablet_files import LARGE_CHECK

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


def rows_of(tablet: Tablet, info: RowSetInfo, keys: core.Keys) -> pa.UInt32Array:
    """Numbers of the rows of a row set that have one of `keys`, strictly ascending."""
    found: list[pa.Array] = [pa.nulls(0, pa.uint32())]
    if keys.n == 0 or not info.overlaps(keys.key(0), keys.key(keys.n - 1)):
        return found[0]
    row_set = tablet.row_set(info)
    low, high = keys.key(0), keys.key(keys.n - 1) + b"\0"
    with tablet.read() as pages:
        blocks = row_set.header(pages).blocks
        for number in row_set.blocks_between(pages, low, high):
            block = blocks[number]
            some = keys_between(keys, block.first, block.last)
            there = core.mark_common(row_set.keys(pages, number), some)
            if there.count:
                rows = there.positions().to_arrow()
                found.append(pc.add(rows, pa.scalar(block.start, pa.uint32())))
    return pa.concat_arrays(found)


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
