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
from txnkv.tables.tablets import BLOOM, COLUMNS, HEADER, KEYS, Pages, RowSet, Tablet, block_key

Values = tuple[Any, ...]


class PointBlock:
    """One block of a row set, as reads of single rows need it. Shared by threads.

    Attributes:
        probe: its keys and their filter.
        columns: its value columns, None for one that it does not have.
        fill: defaults of the columns that it does not have; None when it has all.
        map: the map that the addresses are of, None when they are good for one read alone.
        moving: numbers of columns that do move.
    """

    __slots__ = ("columns", "fill", "map", "moving", "probe")

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
        # From a page on a value has pages of its own, whatever else its leaf holds.
        at = pages.map
        page = 0 if at is None else at.page_bytes
        self.map = at if min(len(keys), len(bloom)) >= page else None
        self.moving = [i for i, each in enumerate(columns) if each is not None and len(each) < page]

    def here(self, tablet: Tablet, row_set: RowSet, pages: Pages, number: int) -> PointBlock:
        """The same in another read: with the columns that move as they lie now."""
        made = PointBlock.__new__(PointBlock)
        made.probe, made.fill, made.map, made.moving = self.probe, self.fill, None, []
        columns = list(self.columns.blocks)
        for i in self.moving:
            columns[i] = row_set.block(pages, COLUMNS + tablet.readers[i][0], number)
        made.columns = core.BlockList(columns)
        return made

    def values(self, tablet: Tablet, row: int) -> Values:
        """The columns beside the key of a row, as Python values."""
        return self._filled(tablet.row_reader(self.columns, row))

    def get(self, tablet: Tablet, key: bytes) -> Values | None:
        """The same of the row with this key; None where there is none."""
        found = tablet.row_reader.get(self.probe, self.columns, key)
        return found if found is None or self.fill is None else self._filled(found)

    def _filled(self, found: Values) -> Values:
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
        return known.here(tablet, row_set, pages, number) if known.moving else known
    made = PointBlock(tablet, row_set, pages, number)
    if made.map is not None:
        row_set.points[number] = made
    return made


def _is_there(row_set: RowSet, pages: Pages) -> bool:
    """Return True when the row set is not removed; LMDB is asked once while nothing is written."""
    txn = pages.txn.id()
    if row_set.there_at == txn:
        return True
    with pages.txn.cursor(db=pages.blocks) as cursor:
        if not cursor.set_key(block_key(row_set.id, HEADER, 0)):
            return False
    row_set.there_at = txn
    return True


def get(tablet: Tablet, row_set: RowSet, pages: Pages, key: bytes, snapshot: int) -> Values | None:
    """The columns beside the key of the version of a key that a snapshot sees in a row set."""
    block = _candidate(tablet, row_set, pages, key)
    if block is None:
        return None
    if _sees_all(row_set, snapshot):
        return block[1].get(tablet, key)
    found = _find(tablet, row_set, pages, key, snapshot, *block)
    return None if found is None else found[0].values(tablet, found[1])


def has(tablet: Tablet, row_set: RowSet, pages: Pages, key: bytes, snapshot: int) -> bool | None:
    """True when a snapshot sees a version of a key in a row set, else None."""
    block = _candidate(tablet, row_set, pages, key)
    if block is None:
        return None
    if _sees_all(row_set, snapshot):
        return True if block[1].probe.find(key) >= 0 else None
    return None if _find(tablet, row_set, pages, key, snapshot, *block) is None else True


def _candidate(
    tablet: Tablet, row_set: RowSet, pages: Pages, key: bytes
) -> tuple[int, PointBlock] | None:
    """The one block that may have a key, or its newest version."""
    row_set.header(pages)
    firsts, lasts = row_set.firsts, row_set.lasts
    number = bisect_left(lasts, key)
    if number == len(lasts) or key < firsts[number]:
        return None
    return number, at_hand(tablet, row_set, pages, number)


def _sees_all(row_set: RowSet, snapshot: int) -> bool:
    info = row_set.info
    return info.stamp is None or (not info.deleted and info.stamp <= snapshot)


def _find(
    tablet: Tablet,
    row_set: RowSet,
    pages: Pages,
    key: bytes,
    snapshot: int,
    number: int,
    block: PointBlock,
) -> tuple[PointBlock, int] | None:
    row = block.probe.find(key)
    if row < 0:
        return None
    if not row_set.info.versioned:
        return (block, row) if row_set.sees(pages, number, row, snapshot) else None
    at = row_set.find_one(pages, key, snapshot)
    if at is None:
        return None
    if at[0] != number:
        block = at_hand(tablet, row_set, pages, at[0])
    return block, at[1]
