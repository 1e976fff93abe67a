"""The history of a store: its floor, and the collection of what nobody reads any more.

The history floor stands in status.db and only rises: no snapshot below it can be read. It is
`history` seconds behind the clock, but never above the latest commit, an open snapshot of any
process (a pin) or one of a transaction that has not ended. Flush and compaction leave out row
versions that were dead at the floor.

A reader pins its snapshot first and looks at the floor then; who raises the floor publishes it
first and looks at the pins then. So one of the two sees the other:

    reader    pin 40                  floor? 50: expired, unpin
    raiser           floor := 50                 pins? ...          drops what died at or below
                                                                    the least of floor and pins
    reader    pin 40   floor? 30: fine
    raiser                      floor := 50      pins? 40           the same: 40

Row sets that were replaced stay until no manifest version that has them is pinned.
"""

from __future__ import annotations

import math
from typing import Final

import apsw

from txnkv.coordinator import Coordinator, Timestamp, one
from txnkv.core import Holding
from txnkv.errors import HistoryExpiredError
from txnkv.storage import clock, declare_fault_point, fault_point, settle_dropped
from txnkv.tables.tables import Tables
from txnkv.tables.tablets import Tablet, delete_row_set, manifest

declare_fault_point("history.raised", "the history floor is raised, nothing is dropped")
declare_fault_point("history.removed", "the blocks of a replaced row set are gone, it is known")
declare_fault_point("history.forgotten", "replaced row sets are forgotten")
declare_fault_point("log.trimmed", "flushed commits are gone from the commit log")

KEEP_LOG: Final = 60 * 1_000_000
"""Microseconds for which a flushed small commit can still be asked for by its id."""


# -- readers ---------------------------------------------------------------------------


def require(coordinator: Coordinator, snapshot: Timestamp) -> None:
    """Refuse a snapshot whose history is gone. The caller has pinned it.

    Raises:
        HistoryExpiredError: it lies below the floor.
    """
    coordinator.latest()  # looks, if anything changed since the pin
    floor = coordinator.log.history_floor
    if snapshot >= floor:
        return
    coordinator.metrics.history_expired.add()
    raise HistoryExpiredError(
        f"the snapshot at {snapshot.datetime.isoformat()} ({snapshot}) is gone: the store's "
        f"history goes back to {floor.datetime.isoformat()}. Read at a later time; for longer "
        "history open the store with a larger history=, or keep a snapshot open"
    )


def pin(coordinator: Coordinator, snapshot: Timestamp) -> None:
    """Keep a snapshot readable until `runtime.unpin`.

    Raises:
        HistoryExpiredError: it lies below the floor; it is not pinned then.
    """
    runtime = coordinator.store.runtime
    runtime.pin_snapshot(snapshot)
    try:
        require(coordinator, snapshot)
    except BaseException:
        runtime.unpin(snapshot)
        raise


def pin_latest(coordinator: Coordinator) -> Timestamp:
    """The latest snapshot, pinned until `runtime.unpin`."""
    log = coordinator.log
    runtime, guess = log.runtime, log.visible
    while True:
        runtime.pin_snapshot(guess)
        # Looked at after the pin. The floor may be above the latest snapshot for a moment: at a
        # commit that is not on the disk yet.
        latest = log.latest()
        if latest == guess and latest >= log.history_floor:
            return latest
        runtime.unpin(guess)
        guess = latest


def hold(coordinator: Coordinator, txn_id: int | None = None) -> Holding:
    """The latest snapshot, pinned, and an id: until the holding is ended, or dropped.

    Args:
        coordinator: of the store.
        txn_id: the id, which was given before and not used; None for a new one.
    """
    log, ids = coordinator.log, coordinator.ids
    runtime, guess = log.runtime, log.visible
    made = Holding(runtime.snapshots, ids.numbers)
    if made.begin(log.shown, log.history_floor, txn_id):
        return made
    runtime.require_slot()
    while True:  # as `pin_latest`
        made.pin(guess)
        latest = log.latest()
        if latest == guess and latest >= log.history_floor:
            break
        guess = latest
    while not made.take(txn_id):
        ids.reserve()
    return made


# -- the floor -------------------------------------------------------------------------


def floor(tables: Tables) -> Timestamp:
    """Raise the history floor as far as it may go.

    Returns:
        What was dead at it, no snapshot sees, now or later.
    """
    store = tables.store
    settle_dropped()
    kept = tables.coordinator.history
    began = 0 if kept == math.inf else max(clock.now_micros() - int(kept * 1e6), 0)
    with store.status.read() as cur:
        wanted = _lowered(tables, cur, Timestamp.from_micros(began))
        (stored,) = one(cur, "SELECT history_floor FROM clock")
    if wanted > stored:
        with store.status.write() as cur:
            cur.execute("UPDATE clock_row SET history_floor = max(history_floor, ?)", (wanted,))
        fault_point("history.raised")
    with store.status.read() as cur:
        (stored,) = one(cur, "SELECT history_floor FROM clock")
        return _lowered(tables, cur, Timestamp(stored))


def compaction_floor(tables: Tables) -> Timestamp:
    """Call `floor`, and lower what it returns below every small commit that is in memory alone.

    A compaction gives rows that are older than the floor one insert stamp. Were that above the
    stamp of an entry in memory that replaces the row, the flush would not know it for older.
    """
    found = floor(tables)
    with tables.store.status.read() as cur:
        (oldest,) = one(
            cur,
            "SELECT min(commit_ts) FROM commit_log "
            "WHERE commit_ts > (SELECT flushed_ts FROM clock)",
        )
    return found if oldest is None else Timestamp(min(found, oldest - 1))


def _lowered(tables: Tables, cur: apsw.Cursor, wanted: Timestamp) -> Timestamp:
    """Not above the latest commit, pins, and transactions that have not ended or begun to abort."""
    last, live = one(
        cur,
        "SELECT last_commit, (SELECT min(snapshot_ts) FROM transactions "
        "WHERE state NOT IN (2, 4, 5)) FROM clock",
    )
    pinned = tables.store.runtime.least_pin()
    return Timestamp(min(ts for ts in (wanted, last, live, pinned) if ts is not None))


# -- collection ------------------------------------------------------------------------


def collect(tables: Tables) -> int:
    """Remove replaced row sets that nobody reads any more, and forget flushed commits.

    Any process may do this at any time, also two at once.

    Returns:
        How many row sets were removed.
    """
    store = tables.store
    settle_dropped()
    with store.status.read() as cur:
        (version,) = one(cur, "SELECT manifest_version FROM clock")
        # The pins are looked at after the version is known: who pins an older one later reads
        # its list of row sets later still, and finds the newer list.
        pinned = store.runtime.least_manifest_pin()
        doomed = manifest.retired(cur, version if pinned is None else min(version, pinned))

    def remove(tablet: Tablet) -> None:
        for id in doomed[tablet.id]:
            tablet.to_write().write(
                lambda txn, id=id: delete_row_set(txn, tablet, id)  # type: ignore[misc]
            )
            fault_point("history.removed")
        tablet.forget(doomed[tablet.id])

    failed = tables.each(doomed, "removal of old row sets", remove)
    gone = [id for tablet_id, ids in doomed.items() if tablet_id not in failed for id in ids]
    if gone:
        with store.status.write() as cur:
            manifest.forget(cur, gone)
        tables.coordinator.metrics.collected_row_sets.add(len(gone))
        fault_point("history.forgotten")
    trim(tables)
    return len(gone)


def trim(tables: Tables) -> int:
    """Forget small commits that are in row sets, a minute after they were made.

    Returns:
        How many.
    """
    status = tables.store.status
    with status.read() as cur:
        upto = _trimmed_upto(cur)
        if (
            cur.execute("SELECT 1 FROM commit_log WHERE commit_ts <= ? LIMIT 1", (upto,)).fetchone()
            is None
        ):
            return 0
    with status.write() as cur:
        cur.execute("DELETE FROM commit_log WHERE commit_ts <= ?", (upto,))
        count = cur.connection.changes()
    fault_point("log.trimmed")
    return count


def _trimmed_upto(cur: apsw.Cursor) -> Timestamp:
    (flushed,) = one(cur, "SELECT flushed_ts FROM clock")
    return Timestamp(min(flushed, Timestamp.from_micros(max(clock.now_micros() - KEEP_LOG, 0))))


def remembers(cur: apsw.Cursor, since: Timestamp) -> bool:
    """Return True when the commit log has all small commits that were made from `since` on."""
    return _trimmed_upto(cur) < since or bool(
        cur.execute("SELECT 1 FROM commit_log WHERE commit_ts <= ? LIMIT 1", (since,)).fetchone()
    )
