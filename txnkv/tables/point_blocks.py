"""Blocks at hand for reads of one row or a few, so that LMDB is not asked for each again.

A row is read out of a key block, its Bloom filter and a block for each column. Each is a value of
LMDB of its own, and asking for one brings all of its pages into the processor's cache: several
microseconds for each. But where they lie in the map is known from the last time: a value of
several pages has pages of its own, which LMDB neither moves nor rewrites until its key is removed,
and a row set is removed at once. So while the row set's header is there, in the map that they
were seen in, blocks are where they were:

    read 1    keys @ a0, Bloom @ b0, columns @ c0, d0      remembered
    read 2    the same map, the header is there            LMDB is not asked for blocks
    read 3    another map, or this one has moved           all are asked for again
    read 4    no header: the row set is gone               as for any other reader

Small values share their pages with others and do move: they are asked for each time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from txnkv import core
from txnkv.core import point_find
from txnkv.tables.row_set import RowSet
from txnkv.tables.row_set_format import BLOOM, COLUMNS, HEADER, KEYS, block_key
from txnkv.tables.tablet import Pages, Tablet

Values = tuple[Any, ...]


class PointBlock:
    """One block of a row set, as reads of single rows need it. Shared by threads.

    Attributes:
        map: the map that the addresses are of, None when they are good for one read alone.
        fill: defaults of the columns that it does not have; None when it has all.
    """

    __slots__ = ("bloom", "columns", "fill", "keys", "map")

    def __init__(self, tablet: Tablet, row_set: RowSet, pages: Pages, number: int) -> None:
        zones = row_set.header(pages).blocks[number].zones
        self.keys = row_set.block(pages, KEYS, number)
        self.bloom = row_set.block(pages, BLOOM, number)
        columns = [
            row_set.block(pages, COLUMNS + id, number) if id in zones else None
            for id, _, _ in tablet.readers
        ]
        self.columns = core.BlockList(columns)
        self.fill: list[Any] | None = None
        if None in columns:
            self.fill = [default for _, _, default in tablet.readers]
        held = [self.keys, self.bloom, *(column for column in columns if column is not None)]
        at = pages.map
        # From a page on a value has pages of its own, whatever else its leaf holds.
        self.map = at if at is not None and min(map(len, held)) >= at.page_bytes else None

    def values(self, tablet: Tablet, row: int) -> Values:
        """The columns beside the key of a row, as Python values."""
        found = tablet.row_reader(self.columns, row)
        if self.fill is None:
            return found
        return tuple(
            default if block is None else value
            for value, block, default in zip(found, self.columns.blocks, self.fill, strict=True)
        )


def at_hand(tablet: Tablet, row_set: RowSet, pages: Pages, number: int) -> PointBlock:
    """A block of a row set; good inside `pages` alone."""
    known: PointBlock | None = row_set.points.get(number)
    if known is not None and known.map is pages.map and _is_there(row_set, pages):
        return known
    made = PointBlock(tablet, row_set, pages, number)
    if made.map is not None:
        row_set.points[number] = made
    return made


def _is_there(row_set: RowSet, pages: Pages) -> bool:
    """Whether the row set has not been removed; not asked again while nothing is written."""
    txn = pages.txn.id()
    if row_set.there_at == txn:
        return True
    with pages.txn.cursor(db=pages.blocks) as cursor:
        if not cursor.set_key(block_key(row_set.id, HEADER, 0)):
            return False
    row_set.there_at = txn
    return True


def find(
    tablet: Tablet, row_set: RowSet, pages: Pages, key: bytes, snapshot: int
) -> tuple[PointBlock, int] | None:
    """The version of a key that a snapshot sees in a row set: its block and row, or None."""
    row_set.header(pages)
    firsts, lasts = row_set.firsts, row_set.lasts
    number = bisect_left(lasts, key)
    if number == len(lasts) or key < firsts[number]:
        return None
    block = at_hand(tablet, row_set, pages, number)
    row = point_find(block.keys, block.bloom, key)
    if row < 0:
        return None
    info = row_set.info
    if info.stamp is None or (not info.deleted and info.stamp <= snapshot):
        return block, row
    if not info.versioned:
        return (block, row) if row_set.sees(pages, number, row, snapshot) else None
    at = row_set.find_one(pages, key, snapshot)
    if at is None:
        return None
    if at[0] != number:
        block = at_hand(tablet, row_set, pages, at[0])
    return block, at[1]


def find_some(
    tablet: Tablet,
    row_set: RowSet,
    pages: Pages,
    keys: core.Keys,
    names: Sequence[str],
    snapshot: int,
) -> tuple[pa.UInt32Array, list[pa.Array]] | None:
    """Rows of some keys (ascending) that a snapshot sees: positions of keys, and columns.

    Answers None where that is not to be had at once: of row sets whose rows differ in their
    insert stamps for the snapshot, or that lack a column which has a default.
    """
    info = row_set.info
    if info.versioned or info.stamp is None or info.stamp > snapshot:
        return None
    row_set.header(pages)
    firsts = row_set.first_keys
    asked = pc.unique(core.range_partition(keys, firsts)).to_pylist()
    numbers = sorted(number - 1 for number in asked if number)
    blocks = [at_hand(tablet, row_set, pages, number) for number in numbers]
    if any(block.fill is not None for block in blocks):
        return None
    firsts = firsts.gather(core.Rows.of(numbers))
    which, rows = core.find_in_blocks(core.BlockList([b.keys for b in blocks]), firsts, keys)
    there = pc.not_equal(which, pa.scalar(core.NULL_ROW, pa.uint32()))
    if info.deleted:
        for i, number in enumerate(numbers):
            delta = row_set.delta(pages, number)
            if delta is not None:
                there = pc.and_(there, _alive(which, rows, i, delta, snapshot))
    positions = core.Bitmap.from_arrow(there).positions()
    if positions.n < keys.n:
        which, rows = which.filter(there), rows.filter(there)
        keys = keys.gather(positions)
    columns = []
    for name in names:
        if name in tablet.schema.primary_key:
            columns.append(tablet.codec.decode(keys, tablet.schema.primary_key.index(name)))
            continue
        at = tablet.value_names.index(name)
        column = core.BlockList([block.columns.blocks[at] for block in blocks])
        columns.append(core.gather_blocks(column, tablet.layout.types[at], which, rows))
    return positions.to_arrow(), columns


def _alive(
    which: pa.UInt32Array, rows: pa.UInt32Array, block: int, delta: core.Delta, snapshot: int
) -> pa.BooleanArray:
    """False for rows of one block that are deleted at a snapshot."""
    dead = delta.rows.filter(pc.less_equal(delta.stamps, pa.scalar(snapshot, pa.uint64())))
    here = pc.equal(which, pa.scalar(block, pa.uint32()))
    return pc.invert(pc.and_(here, pc.is_in(rows, value_set=dead)))
