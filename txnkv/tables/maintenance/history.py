"""The history of a store: its floor, and the collection of what nobody reads any more.

The history floor stands in status.db and only rises: no snapshot below it can be read. It is
`history` seconds behind the clock, but never above the latest commit, an open snapshot of any
process (a pin) or one of a transaction that has not ended. Flush and compaction leave out row
versions that were dead at the floor.

A reader pins its snapshot first and looks at the floor then; who raises the floor says first up to
where, and looks at the pins then, in a turn to write. So one of the two sees the other:

    reader    pin 40   floor? 30   rising? 30: fine
    raiser                                      [ rising := 50   pins? 40   floor := 40 ]

    reader                     pin 40   floor? 30   rising? 50: waits   floor? 50: expired, unpin
    raiser    [ rising := 50   pins? ...                floor := 50 ]

So only one that is older than a history waits for a writer. Who takes the latest snapshot looks at
the floor alone: none rises above what its raiser found on the disk before it looked at the pins.
What is dropped died at or below the least of the floor and of the pins once that is published.

A table may have a history of its own, longer or shorter, and then has a floor of its own
(`txnkv.tables.table_history`).

Row sets that were replaced stay until no manifest version that has them is pinned.
"""

from __future__ import annotations

import math
from typing import Any, Final

import apsw

from txnkv.coordinator import Coordinator, Timestamp, aging_micros, latest_snapshot, one
from txnkv.core import Holding
from txnkv.errors import HistoryExpiredError
from txnkv.storage import Store, clock, declare_fault_point, fault_point, settle_dropped
from txnkv.tables import table_history
from txnkv.tables.table_history import Floors
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
    """Refuse a snapshot whose history is gone in every table. The caller has pinned it.

    Raises:
        HistoryExpiredError: it lies below the floor.
    """
    _require(coordinator, snapshot)
    if snapshot < coordinator.store.runtime.rising:
        coordinator.store.status.let_write()  # from here on, the floor has risen or heeds the pin
        _require(coordinator, snapshot)


def _require(coordinator: Coordinator, snapshot: Timestamp) -> None:
    coordinator.latest()  # looks, if anything changed since the pin
    floor = coordinator.log.history_floor
    if snapshot >= floor:
        return
    with coordinator.store.status.read() as cur:
        own = table_history.load(cur)
    if snapshot < min((each.floor for each in own.values()), default=floor):
        raise expired(coordinator, snapshot, floor)


def expired(
    coordinator: Coordinator, snapshot: Timestamp, floor: Timestamp, table: str | None = None
) -> HistoryExpiredError:
    """The error of a snapshot below a floor, that of the store or of a table; it is counted."""
    coordinator.metrics.history_expired.add()
    if table is None:
        whose, longer = "the store's", "open the store with a larger history="
    else:
        whose, longer = f"table {table!r}'s", "alter the table with a larger history="
    return HistoryExpiredError(
        f"the snapshot at {snapshot.datetime.isoformat()} ({snapshot}) is gone: {whose} "
        f"history goes back to {floor.datetime.isoformat()}. Read at a later time; for longer "
        f"history {longer}, or keep a snapshot open"
    )


def hold_at(coordinator: Coordinator, snapshot: Timestamp) -> Holding:
    """A snapshot, readable until the holding is ended, or dropped.

    Raises:
        HistoryExpiredError: it lies below the floor.
    """
    made = coordinator.log.runtime.hold_snapshot(snapshot)
    try:
        require(coordinator, snapshot)
    except BaseException:  # whoever keeps the error keeps this frame
        made.end()
        raise
    return made


def hold_latest(coordinator: Coordinator) -> tuple[Timestamp, Holding]:
    """The latest snapshot, readable until the holding is ended, or dropped."""
    made = Holding(coordinator.log.runtime.snapshots)
    try:
        return _pin_latest(coordinator, made), made
    except BaseException:
        made.end()
        raise


def hold(coordinator: Coordinator, txn_id: int | None = None) -> Holding:
    """The latest snapshot, pinned, and an id: until the holding is ended, or dropped.

    Args:
        coordinator: of the store.
        txn_id: the id, which was given before and not used; None for a new one.
    """
    log, ids = coordinator.log, coordinator.ids
    made = Holding(log.runtime.snapshots, ids.numbers)
    if not made.begin(log.shown, log.history_floor, txn_id):
        _pin_latest(coordinator, made)
        while not made.take(txn_id):
            ids.reserve()
    return made


def _pin_latest(coordinator: Coordinator, made: Holding) -> Timestamp:
    log = coordinator.log
    guess = log.visible
    log.runtime.require_slot()
    while True:
        made.pin(guess)
        # Looked at after the pin. The floor may be above the latest snapshot for a moment: at a
        # commit of which this process does not know yet that it is on the disk.
        latest = log.latest()
        if latest == guess and latest >= log.history_floor:
            return latest
        guess = latest


def oldest_read(store: Store, latest: Timestamp) -> dict[str, Any] | None:
    """The oldest snapshot that a process reads, for which versions are kept; None: the latest."""
    found = store.runtime.oldest_reader()
    if found is None or found[0] >= latest:
        return None
    age = (clock.now_micros() - Timestamp(found[0]).micros) / 1e6
    return {"timestamp": found[0], "seconds": max(age, 0.0), "pid": found[1]}


# -- the floor -------------------------------------------------------------------------


def floor(tables: Tables) -> Floors:
    """Raise the history floor as far as it may go, and those of tables with a history of their own.

    Returns:
        What was dead at it, no snapshot sees, now or later.
    """
    store = tables.store
    settle_dropped()
    kept = tables.coordinator.history
    latest = tables.coordinator.latest()  # before the pins
    with store.status.read() as cur:
        most = min(latest, _most(tables, cur))
        (stored,) = one(cur, "SELECT history_floor FROM clock")
        own = table_history.load(cur)
        now = aging_micros(cur)
    wanted = min(most, _began(kept, now))
    own_wanted = {
        id: floor
        for id, each in own.items()
        if (floor := min(most, _began(kept if each.seconds is None else each.seconds, now)))
        > each.floor
    }
    if wanted > stored or own_wanted:
        with store.status.write() as cur:
            store.runtime.raise_rising(max((wanted, *own_wanted.values())))
            raised = Floors(wanted, own_wanted).lowered(_most(tables, cur))
            cur.execute(
                "UPDATE clock_row SET history_floor = max(history_floor, ?)", (raised.store,)
            )
            table_history.raise_floors(cur, raised.own)
        fault_point("history.raised")
    with store.status.read() as cur:
        (stored,) = one(cur, "SELECT history_floor FROM clock")
        own = table_history.load(cur)
        found = Floors(Timestamp(stored), {id: each.floor for id, each in own.items()})
        return found.lowered(_most(tables, cur))


def _began(kept: float, now: int) -> Timestamp:
    """Return the beginning of a history of so many seconds."""
    if kept == math.inf:
        return Timestamp(0)
    return Timestamp.from_micros(max(now - int(kept * 1e6), 0))


def begin(cur: apsw.Cursor) -> None:
    """Have the history of a store, and of all its tables, begin with the latest commit. Inside a
    write transaction, while nobody reads.
    """
    latest = latest_snapshot(cur)
    cur.execute("UPDATE clock_row SET history_floor = max(history_floor, ?)", (latest,))
    table_history.raise_floors(cur, dict.fromkeys(table_history.load(cur), latest))


def compaction_floor(tables: Tables) -> Floors:
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
    return found if oldest is None else found.lowered(Timestamp(oldest - 1))


def _most(tables: Tables, cur: apsw.Cursor) -> Timestamp:
    """The latest commit, pins, and transactions that have not ended or begun to abort: no floor is
    above the least of them.
    """
    last, live = one(
        cur,
        "SELECT last_commit, (SELECT min(snapshot_ts) FROM transactions "
        "WHERE state NOT IN (2, 4, 5)) FROM clock",
    )
    pinned = tables.store.runtime.least_pin()
    return Timestamp(min(ts for ts in (last, live, pinned) if ts is not None))


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

    Where the wall clock says that no minute has passed, for timestamps are ahead of it, those that
    this process has found flushed a minute ago go all the same.

    Returns:
        How many.
    """
    status = tables.store.status
    with status.read() as cur:
        (flushed,) = one(cur, "SELECT flushed_ts FROM clock")
        old = Timestamp.from_micros(max(aging_micros(cur) - KEEP_LOG, 0))
        upto = min(flushed, max(old, _flushed_long(tables, flushed)))
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


def _flushed_long(tables: Tables, flushed: int) -> int:
    """Return up to where commits were flushed when it was looked before, if that is long ago."""
    now, (then, upto) = clock.monotonic_micros(), tables.seen_flushed
    if upto and now - then < KEEP_LOG:
        return 0
    tables.seen_flushed = now, flushed
    return upto


def remembers(cur: apsw.Cursor, since: Timestamp, began: int) -> bool:
    """Return True when the commit log has all small commits that were made from `since` on, which
    was at `began` of the monotonic clock: either clock alone may have a reason to trim it.
    """
    (flushed,) = one(cur, "SELECT flushed_ts FROM clock")
    age = max(clock.now_micros() - since.micros, clock.monotonic_micros() - began)
    if flushed < since or age < KEEP_LOG:
        return True
    earlier = cur.execute("SELECT 1 FROM commit_log WHERE commit_ts <= ? LIMIT 1", (since,))
    return earlier.fetchone() is not None
