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
from typing import Any

from txnkv import core
from txnkv.tables.row_set import RowSet
from txnkv.tables.row_set_format import BLOOM, COLUMNS, HEADER, KEYS, block_key
from txnkv.tables.tablet import Pages, Tablet

Values = tuple[Any, ...]


class PointBlock:
    """One block of a row set, as reads of single rows need it. Shared by threads.

    Attributes:
        probe: its keys and their filter.
        columns: its value columns, None for one that it does not have.
        map: the map that the addresses are of, None when they are good for one read alone.
        fill: defaults of the columns that it does not have; None when it has all.
    """

    __slots__ = ("columns", "fill", "map", "probe")

    def __init__(self, tablet: Tablet, row_set: RowSet, pages: Pages, number: int) -> None:
        zones = row_set.header(pages).blocks[number].zones
        keys, bloom = row_set.block(pages, KEYS, number), row_set.block(pages, BLOOM, number)
        self.probe = core.Probe(keys, bloom)
        columns = [
            row_set.block(pages, COLUMNS + id, number) if id in zones else None
            for id, _, _ in tablet.readers
        ]
        self.columns = core.BlockList(columns)
        self.fill: list[Any] | None = None
        if None in columns:
            self.fill = [default for _, _, default in tablet.readers]
        held = [keys, bloom, *(column for column in columns if column is not None)]
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
    row = block.probe.find(key)
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
