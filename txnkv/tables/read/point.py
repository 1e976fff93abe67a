"""One key: what a view has of it.

The way of a key through the layers is that of `TabletView`. Most keys end in the committed memory
or in the one row set whose key range, Bloom filter and key block admit them.

A row is read out of a key block, its Bloom filter and a block for each column. Each is a value of
LMDB of its own, and asking for one brings all of its pages into the processor's cache: several
microseconds for each. But where they lie in the map is known from the last time: a value of
several pages has pages of its own, which LMDB neither moves nor rewrites until its key is removed,
and a row set is removed at once. So while the row set's header is there, in the map that they
were seen in, blocks are where they were:

    read 1    keys @ a0, Bloom @ b0, columns @ c0, d0      remembered
    read 2    the same map, nothing was written since      LMDB is not asked at all
    read 3    the same map, the header is there            nor for blocks
    read 4    another map, or this one has moved           all are asked for again
    read 5    no header: the row set is gone               as for any other reader

Small values share their pages with others and do move: they are asked for again whenever something
was written.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from txnkv import core
from txnkv.storage import shielded
from txnkv.tables.read.view import ReadView, require_history
from txnkv.tables.tables import Tables
from txnkv.tables.tablets import (
    BLOOM,
    COLUMNS,
    EVERY_STAMP,
    HEADER,
    KEYS,
    TOMBSTONES,
    Pages,
    RowSet,
    Step,
    Tablet,
    block_key,
    until_there,
)

T = TypeVar("T")


OnDisk = Callable[[Tablet, RowSet, Pages, bytes, int], T | None]
"""A function that looks up the version a snapshot sees in a row set; None when it sees none."""


def _there(row: bytes) -> bool:
    return True


def find(tables: Tables, tablet: Tablet, view: ReadView, key: bytes) -> Values | None:
    """The columns beside the key of the row with this key, in schema order; None: no row.

    Raises:
        TxnNotFoundError, InvalidTxnStateError: the view's transaction is not OPEN.
        HistoryExpiredError: the snapshot is older than the history.
    """
    look = _look if view.txn_id is None else _look_stored
    return look(tables, tablet, view, key, tablet.layout.decode_one, _get)


def present(tables: Tables, tablet: Tablet, view: ReadView, key: bytes) -> bool:
    """Return True when there is a row with this key; raises as `find`."""
    look = _look if view.txn_id is None else _look_stored
    return look(tables, tablet, view, key, _there, _has) is not None


def _look(
    tables: Tables,
    tablet: Tablet,
    view: ReadView,
    key: bytes,
    of_memory: Callable[[bytes], T],
    of_disk: OnDisk[T],
) -> T | None:
    if view.reads is not None:
        view.reads.add_key(tablet.id, key)
    if view.own is not None:
        own = view.own.memory(tablet.id)
        entry = None if own is None else own.get(key, 0, EVERY_STAMP)
        if entry is not None:
            return None if entry[1] is None else of_memory(entry[1])

    def look() -> T | None:
        snapshot = view.snapshot
        if view.txn_id is None:
            state = tablet.state(snapshot)
            if snapshot < tables.log.history_floor:
                require_history(tables, snapshot)
        else:
            seen = view.of(tables, tablet)
            state = seen.state
            steps = _meeting(seen.staged_steps, key)
            if steps:
                decided, found = tablet.look(partial(_walk, tablet, steps, key, snapshot, of_disk))
                if decided:
                    return found
        entry = state.memory.get(key, state.flushed, snapshot)
        if entry is not None:
            stamp, row = entry
            if row is None:
                return None
            return of_memory(row if stamp >= tablet.since else tablet.memory_rows.row(stamp, row))
        steps = _meeting(state.steps(snapshot), key)
        if not steps:
            return None
        return tablet.look(partial(_walk, tablet, steps, key, snapshot, of_disk))[1]

    return until_there(look, tables.log.latest)


_look_stored = shielded(_look)
"""For a stored transaction, whose reads ask status.db."""


def _meeting(steps: Sequence[Step], key: bytes) -> list[Step]:
    """Those whose row sets may have a key."""
    return [step for step in steps if step.info.min_key <= key <= step.info.max_key]


def _walk(
    tablet: Tablet,
    steps: Sequence[Step],
    key: bytes,
    snapshot: int,
    of_disk: OnDisk[T],
    pages: Pages,
) -> tuple[bool, T | None]:
    """Look for a key in row sets, step by step.

    Returns:
        True when they say what became of the key; and what `of_disk` gives for its row, None when
        there is none.
    """
    for info, before, hides in steps:
        row_set = tablet.row_set(info)
        if info.kind != TOMBSTONES and not (
            before and _is_older(row_set, pages, key, snapshot, before)
        ):
            found = of_disk(tablet, row_set, pages, key, snapshot)
            if found is not None:
                return True, found
        if hides and row_set.find_any(pages, key):
            return True, None
    return False, None


def _is_older(row_set: RowSet, pages: Pages, key: bytes, snapshot: int, before: int) -> bool:
    """Return True when the version that a snapshot sees was inserted below a stamp."""
    where = row_set.find_one(pages, key, snapshot)
    if where is None:
        return False
    number, row = where
    stamps = row_set.insert_view(pages, number)
    return (int(row_set.info.stamp or 0) if stamps is None else stamps[row]) < before


Values = tuple[Any, ...]


class PointBlock:
    """One block of a row set, as reads of single rows need it. Shared by threads.

    Attributes:
        probe: its keys and their filter.
        columns: its value columns, None for one that it does not have.
        fill: defaults of the columns that it does not have; None when it has all.
        map: the map that the addresses are of.
        txn_id: the LMDB transaction in which all of them are good, whatever moves later.
        stays: keys and filter do not move.
        moving: numbers of columns that do.
    """

    __slots__ = ("columns", "fill", "map", "moving", "probe", "stays", "txn_id")

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
        self.map = at = pages.map
        self.txn_id = pages.txn.id()
        # From a page on a value has pages of its own, whatever else its leaf holds.
        page = 0 if at is None else at.page_bytes
        self.stays = min(len(keys), len(bloom)) >= page
        self.moving = [i for i, each in enumerate(columns) if each is not None and len(each) < page]

    def here(self, tablet: Tablet, row_set: RowSet, pages: Pages, number: int) -> PointBlock:
        """The same in another read: with the columns that move as they lie now."""
        made = PointBlock.__new__(PointBlock)
        made.probe, made.fill, made.map = self.probe, self.fill, self.map
        made.stays, made.moving, made.txn_id = True, self.moving, pages.txn.id()
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
    if known is not None and known.map is pages.map:
        if known.txn_id == pages.txn.id():
            return known
        if known.stays and _is_there(row_set, pages):
            if known.moving:
                known = row_set.points[number] = known.here(tablet, row_set, pages, number)
            return known
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


def _get(tablet: Tablet, row_set: RowSet, pages: Pages, key: bytes, snapshot: int) -> Values | None:
    """The columns beside the key of the version of a key that a snapshot sees in a row set."""
    block = _candidate(tablet, row_set, pages, key)
    if block is None:
        return None
    if _sees_all(row_set, snapshot):
        return block[1].get(tablet, key)
    found = _find(tablet, row_set, pages, key, snapshot, *block)
    return None if found is None else found[0].values(tablet, found[1])


def _has(tablet: Tablet, row_set: RowSet, pages: Pages, key: bytes, snapshot: int) -> bool | None:
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
