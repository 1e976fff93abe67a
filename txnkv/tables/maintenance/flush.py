"""The flush: what small commits left in memory and in the commit log becomes row sets.

    memory, (F, F']      ant 12            bee 15 deleted    bee 11     cat 13
    new row set          ant 12            -                 bee 11     cat 13
                         delete: never                       15         never
    older row sets       ant (10) dies at 12                 bee (9) dies at 11

All versions above the flushed timestamp F and at or below F' are written, newest first: each is
dead from the stamp of the next. The oldest of a key kills what the row sets have of it. Versions
that no snapshot sees any more are left out.

    write out what others than tables hold in memory, durable: messages, into their logs
    claim     row sets in status.db, so that what a death leaves is known
    write     their blocks, durable
    delete    deltas beside the rows that they replace, durable; readers have newer entries of
              those keys in memory, so it is all the same whether they see the deltas
    publish   row sets, counts of deletes and F' in one SQLite transaction

A death in between loses nothing: the log has it all still, and the next flush removes what was
claimed and begins again; putting the same deltas twice changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import apsw
import lmdb
import pyarrow as pa

from txnkv import core
from txnkv.coordinator import FAILING, Timestamp, held, payload
from txnkv.core import compute as pc
from txnkv.storage import clock, declare_fault_point, fault_point
from txnkv.tables import table_catalog
from txnkv.tables.maintenance import history, intents
from txnkv.tables.tables import Tables
from txnkv.tables.tablets import (
    RowPart,
    RowSetBuilder,
    RowSetInfo,
    Tablet,
    TabletState,
    delete_row_set,
    manifest,
    put_deletes,
    stored_counts,
)

_log = logging.getLogger("txnkv")

declare_fault_point("flush.claimed", "row sets of a flush are claimed, nothing is written")
declare_fault_point("flush.blocks", "a batch of a flush's blocks is durable")
declare_fault_point("flush.written", "all blocks of a flush are durable")
declare_fault_point("flush.deleted", "deletes of what a flush replaces are durable in a tablet")
declare_fault_point("flush.published", "a flush is published")

WHO: Final = "flush"
WORK: Final = "a flush"
ROW_SET_ROWS: Final = 1 << 21
"""Rows of a row set; more are cut."""


@dataclass(frozen=True)
class _Load:
    """The entries of one tablet that are to be flushed.

    Attributes:
        entries: all versions, by key and then newest first.
        deletes: a delete stamp for each.
        rows: numbers of those that become rows.
        oldest: numbers of the oldest version of each key.
    """

    tablet: Tablet
    state: TabletState
    entries: core.Entries
    deletes: pa.UInt64Array
    rows: core.Rows
    oldest: core.Rows

    @property
    def pieces(self) -> list[core.Rows]:
        """The rows of each row set."""
        n = self.rows.n
        return [self.rows.slice(lo, min(ROW_SET_ROWS, n - lo)) for lo in range(0, n, ROW_SET_ROWS)]


def flush_upto(tables: Tables, upto: Timestamp) -> None:
    """See to it that small commits at or below `upto` are in row sets."""
    with tables.store.status.read() as cur:
        flushed = manifest.flushed(cur)
    if flushed < upto:
        flush(tables)


def flush(tables: Tables, upto: Timestamp | None = None) -> Timestamp:
    """Write what small commits changed into row sets. Any process may; one does at a time.

    Args:
        tables: the tables.
        upto: commits above it stay in memory; None for all.

    Returns:
        All small commits at or below it are in row sets.

    Raises:
        StorageFullError: the disk is full; nothing changed for readers, the log keeps all.

    What cannot be written for a tablet or partition is damaged is held; see `held`.
    """
    with tables.maintenance():
        began = clock.monotonic_micros()
        sweep(tables)
        latest = tables.coordinator.latest()
        target = latest if upto is None else min(upto, latest)
        with tables.store.status.read() as cur:
            flushed = manifest.flushed(cur)
            logged = _is_logged(cur, flushed, target)
            live = table_catalog.live_tablets(cur)
            kept = held.parts(cur)
        if not logged and (not kept or target < flushed):
            return flushed
        ids = [id for id in tables.memory.tablet_ids if id in live]
        settled = intents.settle(tables, ids, target)
        floors = history.floor(tables)
        loads: dict[int, _Load] = {}

        def load(tablet: Tablet) -> None:
            if not settled:
                intents.require_settled(tables, tablet, target)
            floor = floors.of(tablet.table.history_id)
            found = _load(tables.whole(tablet, floor), target, floor)
            if found is not None:
                loads[tablet.id] = found

        failed = _failed(tables, tables.each(ids, WORK, load, FAILING))
        failed |= tables.log.write_out(target)
        _flush(tables, loads, failed, flushed, target)
        tables.coordinator.latest()  # drops from memory what is in row sets now
        _count(tables, list(loads.values()), clock.monotonic_micros() - began)
        return target


def _failed(tables: Tables, errors: Mapping[int, Exception]) -> dict[held.Key, str]:
    """Tablets to be held, and why."""
    found = {}
    for id, error in errors.items():
        tablet = tables.tablet(id)
        if tablet is not None:
            found[payload.TABLET, id] = held.why(tablet.label, error)
    return found


def _is_logged(cur: apsw.Cursor, after: Timestamp, upto: Timestamp) -> bool:
    return (
        cur.execute(
            "SELECT 1 FROM commit_log WHERE commit_ts > ? AND commit_ts <= ? LIMIT 1",
            (after, upto),
        ).fetchone()
        is not None
    )


def sweep(tables: Tables) -> None:
    """Remove row sets that a flush claimed and did not publish. Under the maintenance lock."""
    with tables.store.status.read() as cur:
        left = manifest.unfinished(cur, WHO)
    remove(tables, left)


def remove(tables: Tables, row_sets: dict[int, list[int]]) -> None:
    """Remove the blocks of row sets, by tablet, then forget them."""
    if not row_sets:
        return

    def clear(tablet: Tablet) -> None:
        for id in row_sets[tablet.id]:
            tablet.to_write().write(
                lambda txn, id=id: delete_row_set(txn, tablet, id)  # type: ignore[misc]
            )
        tablet.forget(row_sets[tablet.id])

    failed = tables.each(row_sets, "removal of unfinished row sets", clear)
    gone = [id for tablet_id, ids in row_sets.items() if tablet_id not in failed for id in ids]
    if gone:
        with tables.store.status.write() as cur:
            manifest.forget(cur, gone)


# -- what is to be written -------------------------------------------------------------


def _load(tablet: Tablet, upto: Timestamp, floor: Timestamp) -> _Load | None:
    # What was finalized just now must be committed in the state: the row that an entry replaces
    # may be among it, and its delete is noted with the row sets of the state.
    state = tablet.reload()
    tablet.require_whole(upto)
    entries = state.memory.select(None, None, state.flushed, upto, versions=True)
    if entries.n == 0:
        return None
    stamps = entries.stamps
    same = core.mark_duplicates(entries.keys, None).to_arrow()
    newer = pa.concat_arrays([pa.array([0], pa.uint64()), stamps.slice(0, entries.n - 1)])
    deletes = pc.if_else(same, newer, pa.scalar(core.STAMP_NEVER, pa.uint64()))
    is_row = pc.equal(entries.kinds, pa.scalar(1, pa.uint8()))
    needed = pc.greater(deletes, pa.scalar(int(floor), pa.uint64()))
    followed = pa.concat_arrays([same.slice(1), pa.array([False])])
    return _Load(
        tablet,
        state,
        entries,
        deletes,
        core.Bitmap.from_arrow(pc.and_(is_row, needed)).positions(),
        core.Bitmap.from_arrow(pc.invert(followed)).positions(),
    )


# -- the steps -------------------------------------------------------------------------


def _flush(
    tables: Tables,
    loads: dict[int, _Load],
    failed: dict[held.Key, str],
    after: Timestamp,
    upto: Timestamp,
) -> None:
    """Write, delete and publish.

    Args:
        loads: by tablet; those that fail are taken out.
        failed: parts to be held; those that fail are added.
        after: all at or below it is in row sets, but for what is held.
        upto: and now up to here.
    """
    status = tables.store.status
    with status.write() as cur:
        for id in table_catalog.purged(cur, loads):
            del loads[id]
        claims = {
            id: [manifest.claim_maintenance(cur, id, WHO) for _ in load.pieces]
            for id, load in loads.items()
        }
    fault_point("flush.claimed")
    written: dict[int, list[RowSetInfo]] = {}
    counts: dict[int, list[tuple[int, int, int]]] = {}

    def write(tablet: Tablet) -> None:
        load = loads[tablet.id]
        pieces = zip(claims[tablet.id], load.pieces, strict=True)
        written[tablet.id] = [_write(load, id, rows) for id, rows in pieces]

    def kill(tablet: Tablet) -> None:
        counts[tablet.id] = _kill(loads[tablet.id])

    failed |= _failed(tables, tables.each(loads, WORK, write, FAILING, side_by_side=True))
    fault_point("flush.written")
    failed |= _failed(tables, tables.each(written, WORK, kill, FAILING, side_by_side=True))
    for id in loads.keys() - counts.keys():
        del loads[id]
    with status.write() as cur:
        for info in (info for id in counts for info in written[id]):
            manifest.publish(cur, info)
        for id, deleted, highest in (count for found in counts.values() for count in found):
            if not manifest.set_deleted(cur, id, deleted, highest):
                raise RuntimeError(f"row set {id} was replaced under the maintenance lock")
        held.replace(cur, failed, after, upto)
        manifest.set_flushed(cur, upto)
        manifest.bump(cur)
    fault_point("flush.published")


def _write(load: _Load, id: int, rows: core.Rows) -> RowSetInfo:
    """Write one row set."""
    tablet, chosen = load.tablet, rows.to_arrow()
    inserts: pa.UInt64Array | None = load.entries.stamps.take(chosen)
    bounds = pc.min_max(inserts).as_py()
    claim = RowSetInfo(id, tablet.id, None, 0, 0, b"", b"")
    if bounds["min"] == bounds["max"]:
        stamp = Timestamp(bounds["min"])
        claim = RowSetInfo(id, tablet.id, stamp, 0, 0, b"", b"", min_stamp=stamp)
        inserts = None
    names = tablet.value_names
    arrays = tablet.memory_rows.columns(load.entries, range(len(names)), rows)
    builder = RowSetBuilder(tablet, claim, "flush.blocks")
    builder.add(
        RowPart(
            load.entries.keys.gather(rows),
            dict(zip(names, arrays, strict=True)),
            None,
            inserts,
            load.deletes.take(chosen),
        )
    )
    return builder.finish()


def _kill(load: _Load) -> list[tuple[int, int, int]]:
    """Delete the rows on disk that are replaced.

    Returns:
        Row set, rows deleted and the highest stamp, where status.db does not know them. A flush
        that died here before may have left deletes in row sets that need none now.
    """
    tablet, state = load.tablet, load.state
    keys = load.entries.keys.gather(load.oldest)
    stamps = load.entries.stamps.take(load.oldest.to_arrow())
    deletes = intents.supersede(tablet, state, keys, stamps)
    if deletes:
        put_deletes(tablet, deletes, _unfenced)
    fault_point("flush.deleted")
    low, high = keys.key(0), keys.key(keys.n - 1)
    known = {
        info.id: (info.deleted, info.max_delete)
        for info in state.infos
        if info.id in deletes or (info.resolved and info.overlaps(low, high))
    }
    stored = stored_counts(tablet, list(known)) if known else {}
    return [(id, *counted) for id, counted in stored.items() if counted != known[id]]


def _unfenced(_: lmdb.Transaction) -> None:
    """The maintenance lock is the fence."""


def _count(tables: Tables, loads: Sequence[_Load], micros: int) -> None:
    metrics = tables.coordinator.metrics
    rows = sum(load.rows.n for load in loads)
    puts = sum(pc.sum(pc.equal(load.entries.kinds, 1)).as_py() for load in loads)
    metrics.flushes.add()
    metrics.flushed_rows.add(rows)
    metrics.dropped_versions.add(puts - rows)
    metrics.flush_seconds.observe(micros / 1e6)
    _log.debug("flushed %d row versions of %d tablets", rows, len(loads))
