"""Removal of what was dropped: its files go when no snapshot reads them, its rows after them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import apsw

from txnkv.coordinator.query import one
from txnkv.coordinator.states import TxnState
from txnkv.storage import Store, extents


def least_snapshot(store: Store, cur: apsw.Cursor) -> int | None:
    """Return the oldest snapshot that may be read at, of a pin or an open transaction; or None."""
    pin = store.runtime.least_pin()
    (floor,) = one(
        cur,
        "SELECT min(snapshot_ts) FROM transactions WHERE state = ?",
        (int(TxnState.OPEN),),
    )
    return min((ts for ts in (pin, floor) if ts is not None), default=None)


def forget_extents(store: Store, folder: str, ids: Collection[int]) -> None:
    """Forget how far parts were written, before their files go.

    Args:
        store: the store.
        folder: "tablets" or "logs".
        ids: of the parts.
    """
    # Not synced, for what comes back is of nothing that is there.
    if ids:
        with store.status.write(sync=False) as cur:
            extents.forget(cur, [f"{folder}/{id}" for id in ids])


def remove_strays(
    store: Store,
    folder: Path,
    known: Callable[[apsw.Cursor], set[int]],
    remove: Callable[[int], None],
) -> None:
    """Remove the folders of parts that are not in the catalog: a writer that was stopped while its
    table or topic was dropped and purged makes one anew.

    Args:
        store: the store.
        folder: that has a folder for each part.
        known: ids of the parts in the catalog.
        remove: removes the files of one part.
    """
    there = {int(entry.name) for entry in folder.iterdir() if entry.name.isdigit()}
    with store.status.read() as cur:
        ids = known(cur)
        strays = extents.strays(cur, folder.name, ids)
    forget_extents(store, folder.name, strays | (there - ids))
    for id in there - ids:
        remove(id)
