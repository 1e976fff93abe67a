"""Compaction: several row sets of a tablet become new ones, without what nobody sees any more.

`pick` says which are worth it, from what status.db knows alone:

    overlap   a point read asks every row set whose key range has the key. Where DEPTH of them
              lie over one key, the small ones among them are merged: each is taken while it is
              not larger than all before it together twice, so that a large one is written again
              only when there is as much to merge it with
    deleted   a row set of which so much was dead at the history floor is written without it
    crumbs    small neighbours, as flushes of rising keys leave them, become one

A result is never larger than a limit a row set, so merged large ones lie side by side.

    claim     new row sets in status.db, as they are needed
    merge     blocks of the sources, a few at a time, into blocks of the new row sets; nothing
              is locked, flushes and bulk commits go on meanwhile
    catch up  what was deleted in the sources since their blocks were read, is deleted in the
              new row sets too
    swap      in one SQLite transaction: the sources must be as they were last looked at;
              the new ones are committed, the sources retired

A bulk commit that puts deletes beside a source notes them in status.db afterwards. Either it
comes before the swap, which then sees that the source changed and catches up once more, or it
finds the source retired and begins again with what took its place:

    commit    deltas beside 3                 3 retired? -> beside 9
    swap           catch up ...      3 -> 9

Row versions that were dead at the floor are left out. When all that is left was inserted at or
below it, the result is uniform: no snapshot can tell the stamps apart. The floor is that of the
history, and below whatever is in memory alone, so that a flush still knows newer from older.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final

import apsw
import lmdb
import pyarrow as pa

from txnkv import core
from txnkv.coordinator import Timestamp
from txnkv.core import compute as pc
from txnkv.errors import CorruptionError
from txnkv.storage import BusyError, clock, declare_fault_point, fault_point
from txnkv.tables.maintenance.flush import ROW_SET_ROWS, remove
from txnkv.tables.tables import Tables
from txnkv.tables.tablets import (
    Deletes,
    RowPart,
    RowSetBuilder,
    RowSetInfo,
    Source,
    Tablet,
    manifest,
    merged,
    put_deletes,
)

_log = logging.getLogger("txnkv")

declare_fault_point("compact.claimed", "a new row set of a compaction is claimed")
declare_fault_point("compact.blocks", "a batch of a compaction's blocks is durable")
declare_fault_point("compact.written", "all blocks of a compaction are durable")
declare_fault_point("compact.caught_up", "later deletes are in the new row sets, not published")
declare_fault_point("compact.swapped", "the new row sets took the place of the old ones")

WHO: Final = "compact"


class ReplacedError(Exception):
    """A source is not there any more: another compaction was quicker."""


@dataclass(frozen=True)
class Compacted:
    """The outcome of a compaction, or the sum of several.

    Attributes:
        sources, results: how many row sets.
        rows_before, rows_after: row versions in them.
    """

    sources: int = 0
    results: int = 0
    rows_before: int = 0
    rows_after: int = 0

    def __add__(self, other: Compacted) -> Compacted:
        return Compacted(*(a + b for a, b in zip(_values(self), _values(other), strict=True)))


def _values(of: Compacted) -> tuple[int, ...]:
    return tuple(vars(of).values())


def compact(
    tables: Tables,
    tablet: Tablet,
    infos: Sequence[RowSetInfo],
    floor: Timestamp,
    pace: Callable[[], None],
) -> Compacted:
    """Merge committed row sets of a tablet. Under the compaction lock.

    Args:
        infos: resolved ones, as the tablet's state has them now.
        floor: `history.compaction_floor`.
        pace: called before each step, to wait; what it raises ends the compaction.

    Raises:
        ReplacedError: a row set is not there any more; nothing changed.
        StorageFullError: the disk is full; nothing changed.
    """
    began = clock.monotonic_micros()
    work = _Compaction(tables, tables.whole(tablet, floor), infos, floor)
    try:
        work.merge(pace)
        work.swap(pace)
    except BaseException:
        work.discard()
        raise
    tables.coordinator.latest()
    done = work.done()
    metrics = tables.coordinator.metrics
    metrics.compactions.add()
    metrics.compacted_rows.add(done.rows_after)
    metrics.dropped_versions.add(done.rows_before - done.rows_after)
    metrics.compaction_seconds.observe((clock.monotonic_micros() - began) / 1e6)
    _log.debug("compacted %s: %s", tablet.label, done)
    return done


def sweep(tables: Tables) -> None:
    """Remove row sets that a compaction claimed and did not publish. Under its lock."""
    with tables.store.status.read() as cur:
        left = manifest.unfinished(cur, WHO)
    remove(tables, left)


class _Compaction:
    """One compaction of one tablet."""

    def __init__(
        self,
        tables: Tables,
        tablet: Tablet,
        infos: Sequence[RowSetInfo],
        floor: Timestamp,
    ) -> None:
        self._tables = tables
        self._tablet = tablet
        self._infos = infos
        self._floor = floor
        self._claimed: list[int] = []
        self._results: list[RowSetInfo] = []
        names, count = tablet.value_names, len(infos)
        self._sources = [Source(tablet, info, names, floor, count) for info in infos]
        # One stamp for all: no snapshot lies between two of theirs.
        stamps = {info.stamp for info in infos} | {info.min_stamp for info in infos}
        highest = Timestamp(max(stamp or 0 for stamp in stamps))
        self._stamp = highest if len(stamps) == 1 or highest <= floor else None

    # -- merge -------------------------------------------------------------------------

    def merge(self, pace: Callable[[], None]) -> None:
        """Write the new row sets; they are durable when it returns."""
        builder: RowSetBuilder | None = None
        for part in merged(self._sources, pace):
            if builder is None:
                builder = self._begin()
            builder.add(self._plain(part))
            if builder.rows >= ROW_SET_ROWS:
                self._results.append(builder.finish())
                builder = None
        if builder is not None:
            self._results.append(builder.finish())
        fault_point("compact.written")

    def _begin(self) -> RowSetBuilder:
        with self._tables.store.status.write() as cur:
            id = manifest.claim_maintenance(cur, self._tablet.id, WHO)
        self._claimed.append(id)
        fault_point("compact.claimed")
        stamp = self._stamp
        claim = RowSetInfo(id, self._tablet.id, stamp, 0, 0, b"", b"", min_stamp=stamp)
        return RowSetBuilder(self._tablet, claim, "compact.blocks")

    def _plain(self, part: RowPart) -> RowPart:
        """Without stamps where all rows have one."""
        if self._stamp is None:
            return part
        if core.mark_duplicates(part.keys, None).count:
            raise CorruptionError(
                f"store {self._tablet.store_path}, {self._tablet.label}: row sets "
                f"{[info.id for info in self._infos]} have two versions of one key that are both "
                "alive. Nothing was changed; `txnkv check` says more"
            )
        return replace(part, inserts=None)

    # -- swap --------------------------------------------------------------------------

    def swap(self, pace: Callable[[], None]) -> None:
        """Put the new row sets in the place of the old ones."""
        status = self._tables.store.status
        with ExitStack() as alone:
            self._wait_for_turn(alone, pace)
            while True:
                with status.read() as cur:
                    before = self._delta_numbers(cur)
                self._catch_up()
                fault_point("compact.caught_up")
                with status.write() as cur:
                    if self._delta_numbers(cur) == before:
                        for info in self._results:
                            manifest.publish(cur, info)
                        version = manifest.bump(cur)
                        manifest.retire(cur, [info.id for info in self._infos], version)
                        break
        fault_point("compact.swapped")

    def _wait_for_turn(self, alone: ExitStack, pace: Callable[[], None]) -> None:
        """Take the maintenance lock. A compaction in the background tries again while that is busy:
        it gives up what it has merged only when it is told to end.
        """
        while True:
            try:
                alone.enter_context(self._tables.maintenance())
                return
            except BusyError:
                pace()

    def _delta_numbers(self, cur: apsw.Cursor) -> list[int]:
        """Return the `delta_seq` of each source, which changes whenever its deletes do.

        Raises:
            ReplacedError: a source is not committed any more.
        """
        numbers = []
        for info in self._infos:
            found = cur.execute(
                "SELECT delta_seq FROM row_sets WHERE id = ? AND state = ?",
                (info.id, manifest.COMMITTED),
            ).fetchone()
            if found is None:
                raise ReplacedError(f"{self._tablet.label}, row set {info.id}")
            numbers.append(found[0])
        return numbers

    def _catch_up(self) -> None:
        """Delete in the new row sets what was deleted in the sources meanwhile."""
        for info, source in zip(self._infos, self._sources, strict=True):
            for keys, inserts, stamps in self._later_deletes(info, source):
                self._delete(keys, inserts, stamps)

    def _later_deletes(
        self, info: RowSetInfo, source: Source
    ) -> Iterator[tuple[core.Keys, pa.UInt64Array, pa.UInt64Array]]:
        """Keys (strictly ascending) that were deleted since, with insert and delete stamps."""
        row_set = self._tablet.row_set(info)
        for number, used in source.used.items():
            with self._tablet.read() as pages:
                now = row_set.stored_delta(pages, number)
                if now is None or now == used:
                    continue
                found = row_set.inserts(pages, number)
                inserts = (
                    pa.repeat(pa.scalar(int(info.stamp or 0), pa.uint64()), now.n)
                    if found is None
                    else found.take(now.rows)
                )
                # Rows that were dead when they were loaded are not in the new row sets, or are
                # dead there: looked for, another version of the key might be taken for them.
                known = (used or core.Delta.none()).rows
                alive = pc.invert(pc.is_in(now.rows, value_set=known))
                rows = now.rows.filter(alive)
                keys = row_set.keys_at(pages, number, core.Rows.from_arrow(rows))
            source.used[number] = now
            yield from _strictly(keys, inserts.filter(alive), now.stamps.filter(alive))

    def _delete(self, keys: core.Keys, inserts: pa.UInt64Array, stamps: pa.UInt64Array) -> None:
        """Delete the versions of these keys that were inserted then."""
        low, high = keys.key(0), keys.key(keys.n - 1)
        if self._stamp is not None:  # a row dies when it is born, at the earliest
            stamps = pc.max_element_wise(stamps, pa.scalar(int(self._stamp), pa.uint64()))
        deletes: Deletes = {}
        for info in self._results:
            if info.overlaps(low, high):
                at = inserts if self._stamp is None else int(self._stamp)
                with self._tablet.read() as pages:
                    positions, rows = self._tablet.row_set(info).locate(pages, keys, at)
                if len(rows):
                    deletes[info.id] = (rows, stamps.take(positions))
        if not deletes:
            return
        counts = put_deletes(self._tablet, deletes, _unfenced)
        self._results = [
            replace(
                info,
                deleted=counts[info.id][0],
                max_delete=counts[info.id][1],
                delta_seq=info.delta_seq + 1,
            )
            if info.id in counts
            else info
            for info in self._results
        ]

    # -- the end -----------------------------------------------------------------------

    def discard(self) -> None:
        """Remove what was written for nothing; after a swap that came through, nothing."""
        with self._tables.store.status.read() as cur:
            left = manifest.unfinished(cur, WHO)
        mine = [id for id in left.get(self._tablet.id, []) if id in self._claimed]
        if mine:
            remove(self._tables, {self._tablet.id: mine})

    def done(self) -> Compacted:
        return Compacted(
            len(self._infos),
            len(self._results),
            sum(info.rows for info in self._infos),
            sum(info.rows for info in self._results),
        )


def _strictly(
    keys: core.Keys, inserts: pa.UInt64Array, stamps: pa.UInt64Array
) -> Iterator[tuple[core.Keys, pa.UInt64Array, pa.UInt64Array]]:
    """Versions of one key, which stand together, one after the other."""
    while keys.n:
        again = core.mark_duplicates(keys, None)
        if not again.count:
            yield keys, inserts, stamps
            return
        once, more = again.zeros(), again.positions()
        yield (
            keys.gather(once),
            inserts.take(once.to_arrow()),
            stamps.take(once.to_arrow()),
        )
        keys = keys.gather(more)
        inserts, stamps = inserts.take(more.to_arrow()), stamps.take(more.to_arrow())


def _unfenced(_: lmdb.Transaction) -> None:
    """Nobody knows of the new row sets yet."""


DEPTH: Final = 4
DELETED_SHARE: Final = 0.25
CRUMBS: Final = 8
CRUMB_ROWS: Final = 1 << 18
MOST_SOURCES: Final = 32
MOST_ROWS: Final = 1 << 24
"""Rows of one compaction in the background."""

_GROWTH: Final = 2


@dataclass(frozen=True)
class Pick:
    """Row sets to be merged, and why."""

    infos: tuple[RowSetInfo, ...]
    reason: str


def pick(infos: Sequence[RowSetInfo], collectable: Callable[[RowSetInfo], int]) -> Pick | None:
    """The next compaction of a tablet, or None when there is nothing worth it.

    Args:
        infos: committed, resolved row sets.
        collectable: how many rows of a row set no snapshot sees any more.
    """
    for info in infos:
        least = max(DELETED_SHARE * info.rows, 1)
        if info.deleted >= least and collectable(info) >= least:
            return Pick((info,), "deleted")
    over = _small_ones(deepest(infos))
    if over is not None:
        return Pick(over, "overlap")
    some = _crumbs(infos)
    return None if some is None else Pick(some, "crumbs")


def deepest(infos: Sequence[RowSetInfo]) -> list[RowSetInfo]:
    """The most row sets that lie over one key."""
    best: list[RowSetInfo] = []
    open_: list[RowSetInfo] = []
    for info in sorted(infos, key=lambda info: info.min_key):
        open_ = [other for other in open_ if other.max_key >= info.min_key]
        open_.append(info)
        if len(open_) > len(best):
            best = list(open_)
    return best


def _small_ones(infos: Sequence[RowSetInfo]) -> tuple[RowSetInfo, ...] | None:
    if len(infos) < DEPTH:
        return None
    ordered = sorted(infos, key=lambda info: info.rows)
    # The smallest may stand alone below a group of equals that is worth it.
    for start in range(len(ordered) - DEPTH + 1):
        taken, rows = [ordered[start]], ordered[start].rows
        for info in ordered[start + 1 :]:
            if info.rows > _GROWTH * rows or len(taken) == MOST_SOURCES:
                break
            if rows + info.rows > MOST_ROWS and len(taken) >= DEPTH:
                break
            taken.append(info)
            rows += info.rows
        if len(taken) >= DEPTH:
            return tuple(ordered[:start]) + tuple(taken)
    return None


def _crumbs(infos: Sequence[RowSetInfo]) -> tuple[RowSetInfo, ...] | None:
    """Neighbours by key that are small, when they are many."""
    run: list[RowSetInfo] = []
    for info in sorted(infos, key=lambda info: info.min_key):
        if info.rows < CRUMB_ROWS:
            run.append(info)
            if len(run) == MOST_SOURCES:
                break
        elif len(run) >= CRUMBS:
            break
        else:
            run = []
    return tuple(run) if len(run) >= CRUMBS else None


def clusters(
    infos: Sequence[RowSetInfo], floor: Timestamp, collectable: Callable[[RowSetInfo], int]
) -> list[tuple[RowSetInfo, ...]]:
    """All that a full compaction has to do: what overlaps, has dead rows or is a crumb."""
    groups: list[list[RowSetInfo]] = []
    reach = b""
    for info in sorted(infos, key=lambda info: info.min_key):
        if groups and (info.min_key <= reach or _both_crumbs(groups[-1], info)):
            groups[-1].append(info)
            reach = max(reach, info.max_key)
        else:
            groups.append([info])
            reach = info.max_key
    return [
        tuple(group)
        for group in groups
        if len(group) > 1 or _worth(group[0], floor, collectable(group[0]))
    ]


def _both_crumbs(group: Sequence[RowSetInfo], info: RowSetInfo) -> bool:
    return info.rows < CRUMB_ROWS and sum(other.rows for other in group) < CRUMB_ROWS


def _worth(info: RowSetInfo, floor: Timestamp, dead: int) -> bool:
    plain = info.uniform or info.stamp is None or info.stamp > floor
    return dead > 0 or not plain
