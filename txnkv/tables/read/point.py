"""One key: what a view has of it.

The way of a key through the sources, newest first, is that of `view`. Most keys end in the
committed memory or in the one row set whose key range, Bloom filter and key block admit them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from txnkv.coordinator import Timestamp
from txnkv.storage import shielded
from txnkv.tables.read import point_blocks
from txnkv.tables.read.point_blocks import Values
from txnkv.tables.read.view import (
    EVERY_STAMP,
    ReadView,
    committed_at,
    hidden_before,
    require_history,
)
from txnkv.tables.tables import Tables
from txnkv.tables.tablets import (
    TOMBSTONES,
    Pages,
    RowSet,
    RowSetInfo,
    RowSetRetired,
    Tablet,
    TabletState,
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
    return look(tables, tablet, view, key, tablet.layout.decode_one, point_blocks.get)


def present(tables: Tables, tablet: Tablet, view: ReadView, key: bytes) -> bool:
    """Return True when there is a row with this key; raises as `find`."""
    look = _look if view.txn_id is None else _look_stored
    return look(tables, tablet, view, key, _there, point_blocks.has) is not None


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
    snapshot = view.snapshot
    while True:
        try:
            if view.txn_id is not None:
                sight = view.sight(tables, tablet)
                staged = [info for info in sight.staged if info.overlaps(key, key)]
                if staged:
                    decided, found = tablet.look(partial(_staged, tablet, staged, key, of_disk))
                    if decided:
                        return found
                state = sight.state
            else:
                state = tablet.state(snapshot)
                if snapshot < tables.log.history_floor:
                    require_history(tables, snapshot)
            entry = state.memory.get(key, state.flushed, snapshot)
            if entry is not None:
                return None if entry[1] is None else of_memory(entry[1])
            if state.unresolved:
                return tablet.look(partial(_unresolved, tablet, state, snapshot, key, of_disk))
            infos = [info for info in state.settled if info.min_key <= key <= info.max_key]
            if not infos:
                return None
            return tablet.look(partial(_first, tablet, infos, key, snapshot, of_disk))
        except RowSetRetired:
            tables.log.latest()


_look_stored = shielded(_look)
"""For a stored transaction, whose reads ask status.db."""


def _first(
    tablet: Tablet,
    infos: Sequence[RowSetInfo],
    key: bytes,
    snapshot: int,
    of_disk: OnDisk[T],
    pages: Pages,
) -> T | None:
    for info in infos:
        found = of_disk(tablet, tablet.row_set(info), pages, key, snapshot)
        if found is not None:
            return found
    return None


def _staged(
    tablet: Tablet,
    staged: Sequence[RowSetInfo],
    key: bytes,
    of_disk: OnDisk[T],
    pages: Pages,
) -> tuple[bool, T | None]:
    """Look for a key in the transaction's own row sets.

    Returns:
        True when they say what became of the key; and what `of_disk` gives for its row, None when
        there is none.
    """
    for info in staged:
        row_set = tablet.row_set(info)
        if info.kind == TOMBSTONES:
            if row_set.find_one(pages, key, EVERY_STAMP) is not None:
                return True, None
            continue
        found = of_disk(tablet, row_set, pages, key, EVERY_STAMP)
        if found is not None:
            return True, found
    return False, None


def _unresolved(
    tablet: Tablet,
    state: TabletState,
    snapshot: int,
    key: bytes,
    of_disk: OnDisk[T],
    pages: Pages,
) -> T | None:
    """Look for a key in row sets while commits are being finalized.

    The latest unresolved one that has the key hides what is older, be its own row alive or not;
    a row that is newer counts before it.
    """
    unresolved, settled = committed_at(state, Timestamp(snapshot))
    mask: RowSetInfo | None = None
    for info in unresolved:
        if info.overlaps(key, key) and tablet.row_set(info).find_any(pages, key):
            mask = info
            break
    for info in settled:
        if not info.overlaps(key, key):
            continue
        before = 0 if mask is None else hidden_before(mask, info)
        row_set = tablet.row_set(info)
        where = None if before == EVERY_STAMP else row_set.find_one(pages, key, snapshot)
        if where is not None and _insert_of(row_set, pages, *where) >= before:
            return of_disk(tablet, row_set, pages, key, snapshot)
    if mask is None or mask.kind == TOMBSTONES:
        return None
    return of_disk(tablet, tablet.row_set(mask), pages, key, snapshot)


def _insert_of(row_set: RowSet, pages: Pages, number: int, row: int) -> int:
    stamps = row_set.insert_view(pages, number)
    return int(row_set.info.stamp or 0) if stamps is None else stamps[row]
