"""The compactor: a thread of the leader, a little at a time; and all at once for any caller."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

import pyarrow as pa

from txnkv.coordinator import Timestamp, held, payload, raise_first
from txnkv.core import compute as pc
from txnkv.errors import ClosedError, CorruptionError, TxnkvError
from txnkv.storage import BusyError, go_on, new_event, new_lock, not_waiting
from txnkv.tables import table_catalog
from txnkv.tables.maintenance import compaction, flush, history, intents
from txnkv.tables.maintenance.compaction import Compacted, Pick, ReplacedError
from txnkv.tables.table_history import Floors
from txnkv.tables.tables import Tables
from txnkv.tables.tablets import RowSetInfo, RowSetRetired, Tablet, manifest

_log = logging.getLogger("txnkv")

T = TypeVar("T")

REST: Final = 1.0
"""Seconds that the thread rests for each second it has worked."""

LOOK_AGAIN: Final = 10.0
"""Seconds, at least, until row sets that did not change are looked at again."""
_LONGEST: Final = 3600.0
"""Seconds, at most: what failed is tried again, too."""

Progress = Callable[[int, int], None]
"""Called with row versions done and row versions in all."""


_BUSY: Final = (BusyError,)


class _Stopped(Exception):
    """The store is being closed."""


class Compactor:
    """Compactions of one store in this process. The thread is there only while it has work."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._lock = new_lock()
        self._reset()

    def _reset(self) -> None:
        self._stop = new_event()
        self._thread: threading.Thread | None = None
        self._version = 0
        self._look_again = 0.0
        self._settled: dict[int, tuple[int, ...]] = {}
        self._failed: set[int] = set()
        self._dead: dict[int, tuple[int, Timestamp, int]] = {}

    # -- in the background -------------------------------------------------------------

    def wake(self) -> None:
        """Compact what is worth it, in a thread, unless that runs."""
        with self._lock:
            if self._stop.is_set() or (self._thread is not None and self._thread.is_alive()):
                return
            if not self._left_over() and self._next() is None:
                return
            thread = threading.Thread(target=self._run, name="txnkv-compaction", daemon=True)
            with suppress(RuntimeError):  # no thread is to be had: the next round tries again
                thread.start()
                self._thread = thread

    def close(self) -> None:
        """End the thread; what it has not finished is removed."""
        with self._lock:
            self._stop.set()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=30)

    def after_fork_in_child(self) -> None:
        """The thread belongs to the parent."""
        self._reset()

    def _run(self) -> None:
        guard = self._tables.coordinator.damage.guard("tables", "background compaction", _BUSY)
        try:
            with not_waiting(), guard:
                while not self._stop.is_set():
                    # Not held from one compaction to the next: somebody may wait to do all.
                    with self._tables.store.compaction():
                        compaction.sweep(self._tables)
                        if not self._one():
                            return
        except (_Stopped, ClosedError):
            return
        except TxnkvError as error:
            _log.warning("a compaction failed, it will be tried again: %s", error)
        except Exception:
            _log.exception("a compaction failed, it will be tried again")

    def _one(self) -> bool:
        found = self._next()
        if found is None:
            return False
        tablet, infos, floor = found
        pace = _Pace(self._stop).step
        self._try(tablet, partial(self._compact, infos=infos, floor=floor, pace=pace))
        history.collect(self._tables)
        return True

    def _try(
        self, tablet: Tablet, do: Callable[[Tablet], T | None]
    ) -> tuple[T | None, dict[int, Exception]]:
        """Do it to a tablet, unless that was dropped; a damaged one is left alone for a while, and
        the others go on.
        """
        found: list[T | None] = [None]
        errors = self._tables.each([tablet.id], "compaction", lambda it: found.append(do(it)))
        self._failed |= errors.keys()
        for error in errors.values():
            if not isinstance(error, CorruptionError):
                raise error
        return found[-1], errors

    def _left_over(self) -> bool:
        with self._tables.store.status.read() as cur:
            return bool(manifest.unfinished(cur, compaction.WHO))

    def _next(self) -> tuple[Tablet, tuple[RowSetInfo, ...], Timestamp] | None:
        """A compaction that is worth it. Tablets are looked at again when they have changed, or
        when rows that were dead too short a time have been so for longer.
        """
        tables = self._tables
        latest = tables.coordinator.latest()
        now = time.monotonic()
        if tables.log.version == self._version and now < self._look_again:
            return None
        if now >= self._look_again:
            self._settled.clear()
            self._failed.clear()
            wait = min(tables.coordinator.history / 4, _LONGEST)
            self._look_again = now + max(wait, LOOK_AGAIN)
        floors: Floors | None = None
        for id, mark in self._marks().items():
            settled = id in self._failed or self._settled.get(id) == mark
            tablet = None if settled else tables.tablet(id)
            if tablet is None:
                continue
            floors = history.compaction_floor(tables) if floors is None else floors
            floor = floors.of(tablet.table.history_id)
            chosen, _ = self._try(tablet, partial(self._pick, latest=latest, floor=floor))
            if chosen is not None:
                return tablet, chosen.infos, floor
            self._settled[id] = mark
        self._version = tables.log.version
        return None

    def _pick(self, tablet: Tablet, latest: Timestamp, floor: Timestamp) -> Pick | None:
        collectable = partial(self._collectable, tablet, floor)
        return compaction.pick(tablet.state(latest).settled, collectable)

    def _marks(self) -> dict[int, tuple[int, ...]]:
        """Return by tablet id a mark that changes with the tablet's row sets, and with their
        deletes. A tablet of one row set without deletes is left out: it has nothing to be done,
        and there may be thousands of those.
        """
        with self._tables.store.status.read() as cur:
            live = table_catalog.live_tablets(cur)
            return {
                id: tuple(mark)
                for id, *mark in cur.execute(
                    "SELECT tablet_id, count(*), max(id), sum(delta_seq) FROM row_sets "
                    "WHERE state = ? GROUP BY tablet_id HAVING count(*) > 1 OR sum(deleted) > 0",
                    (manifest.COMMITTED,),
                )
                if id in live
            }

    # -- all at once -------------------------------------------------------------------

    def compact_all(self, progress: Progress | None = None) -> Compacted:
        """Flush, then merge whatever overlaps or has dead rows, in every tablet, now.

        Raises:
            CorruptionError: a tablet is damaged; all others are done.
            StorageFullError: the disk is full; what is done is done.
        """
        tables = self._tables
        flush.flush(tables)
        total = Compacted()
        with tables.store.compaction():
            compaction.sweep(tables)
            floors = history.compaction_floor(tables)
            latest = tables.coordinator.latest()
            work: list[tuple[Tablet, tuple[RowSetInfo, ...]]] = []

            def pick(tablet: Tablet) -> None:
                floor = floors.of(tablet.table.history_id)
                collectable = partial(self._collectable, tablet, floor)
                groups = compaction.clusters(tablet.state(latest).settled, floor, collectable)
                work.extend((tablet, group) for group in groups)

            ids = [tablet.id for tablet in self.tablets()]
            failed = tables.each(ids, "compaction", pick)
            rows = sum(info.rows for _, group in work for info in group)
            done = 0
            for tablet, group in work:
                if progress is not None:
                    progress(done, rows)
                floor = floors.of(tablet.table.history_id)
                made, errors = self._try(tablet, partial(self._compact, infos=group, floor=floor))
                failed |= errors
                total = total if made is None else total + made
                done += sum(info.rows for info in group)
            if progress is not None:
                progress(rows, rows)
        history.collect(tables)
        raise_first(failed)
        return total

    def tablets(self) -> list[Tablet]:
        """Those of all tables that were not dropped."""
        with self._tables.store.status.read() as cur:
            ids = sorted(table_catalog.live_tablets(cur))
        return [tablet for tablet in map(self._tables.tablet, ids) if tablet is not None]

    # -- one ---------------------------------------------------------------------------

    def _compact(
        self,
        tablet: Tablet,
        infos: tuple[RowSetInfo, ...],
        floor: Timestamp,
        pace: Callable[[], None] = go_on,
    ) -> Compacted | None:
        upto = max(Timestamp(max(info.stamp or 0 for info in infos)), floor)
        # A floor above what it has in memory would make its rows look younger than that.
        with self._tables.store.status.read() as cur:
            held.refuse(held.ids(cur, payload.TABLET), [tablet.id])
        if not intents.settle(self._tables, [tablet.id], upto):
            intents.require_settled(self._tables, tablet, upto)
        try:
            return compaction.compact(self._tables, tablet, infos, floor, pace)
        except (ReplacedError, RowSetRetired):
            return None

    def _collectable(self, tablet: Tablet, floor: Timestamp, info: RowSetInfo) -> int:
        """Rows of a row set that were dead at the floor; counted anew when that says more."""
        if info.deleted == 0:
            return 0
        if info.max_delete <= floor:
            return info.deleted
        known = self._dead.get(info.id)
        if known is not None and known[0] == info.delta_seq and known[1] == floor:
            return known[2]
        dead = 0
        row_set = tablet.row_set(info)
        try:
            with tablet.read() as pages:
                for number in range(len(row_set.header(pages).blocks)):
                    delta = row_set.stored_delta(pages, number)
                    if delta is not None:
                        gone = pc.less_equal(delta.stamps, pa.scalar(int(floor), pa.uint64()))
                        dead += gone.true_count
        except RowSetRetired:  # others did it
            return 0
        self._dead[info.id] = (info.delta_seq, floor, dead)
        return dead


class _Pace:
    """Rests in proportion to the work done since the last rest."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._since = time.monotonic()

    def step(self) -> None:
        worked = time.monotonic() - self._since
        if self._stop.wait(min(worked * REST, 1.0)):
            raise _Stopped
        self._since = time.monotonic()
