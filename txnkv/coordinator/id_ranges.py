"""Transaction ids in reserved ranges, and the low water mark.

A process takes ids a range at a time, so that begin costs no I/O. Each range has a row
with its least live id; the low water mark is the least over those and over the
transactions that have not ended. Whatever is staged under a lower id is garbage.

    range 1..1024 of process A, least live 7     transactions not ended: 9, 1030
    range 1025..2048 of process B, least live 1030
    low water mark = 7
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import apsw

from txnkv.coordinator.query import one
from txnkv.storage import Pin, Store, new_lock, shielded

RANGE: Final = 1024


class Held(Pin):
    """The id of a transaction that is not stored, and the pin of its snapshot.

    Attributes:
        txn_id: live until it is given back; None for none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.txn_id: int | None = None


class IdRanges:
    """The ids that this process gives out."""

    def __init__(self, store: Store) -> None:
        self._store = store
        # Order: _reserving, the write lock of status.db, _lock. `record` comes with the second.
        self._reserving = new_lock()
        self._lock = new_lock()
        self._next = 0
        self._end = 0
        self._live: set[int] = set()
        self._firsts: dict[int, int] = {}

    def begin(self, held: Held | None = None) -> int:
        """An id never given before, live until `ended`; `held` is told before it lives."""
        while True:
            with self._lock:
                if self._next < self._end:
                    txn_id = self._next
                    self._next = txn_id + 1
                    if held is not None:
                        held.txn_id = txn_id
                    self._live.add(txn_id)
                    return txn_id
            self._reserve()

    def ended(self, txn_id: int) -> None:
        with self._lock:
            self._live.discard(txn_id)

    def record(self, cur: apsw.Cursor) -> None:
        """Bring the least live ids of this process's ranges up to date, in a write that is
        done anyway, and drop the ranges that are used up.
        """
        with self._lock:
            for first, last in list(self._firsts.items()):
                least = min((id for id in self._live if first <= id <= last), default=None)
                if least is None and self._end == last + 1 and self._next < self._end:
                    least = self._next
                if least is None:
                    cur.execute("DELETE FROM id_ranges WHERE first = ?", (first,))
                    del self._firsts[first]
                else:
                    cur.execute(
                        "UPDATE id_ranges SET least_live = ? WHERE first = ? AND least_live < ?",
                        (least, first, least),
                    )

    def close(self) -> None:
        """Give back this process's ranges."""
        with self._lock:
            firsts, self._firsts = self._firsts, {}
            self._live.clear()
            self._next = self._end = 0
        if firsts:
            with self._store.status.write() as cur:
                drop(cur, firsts)

    @shielded
    def _reserve(self) -> None:
        with self._reserving:
            if self._next == self._end:
                self._take_range()

    def _take_range(self) -> None:
        runtime = self._store.runtime
        with self._store.status.write() as cur:
            self.record(cur)
            (first,) = one(cur, "SELECT next_txn_id FROM clock")
            cur.execute("UPDATE clock SET next_txn_id = ?", (first + RANGE,))
            cur.execute(
                "INSERT INTO id_ranges (first, last, least_live, owner_slot, owner_start) "
                "VALUES (?, ?, ?, ?, ?)",
                (first, first + RANGE - 1, first, runtime.slot, runtime.slot_start),
            )
        with self._lock:
            self._next, self._end = first, first + RANGE
            self._firsts[first] = first + RANGE - 1


def low_water_mark(cur: apsw.Cursor) -> int:
    """The least id that may still stage anything."""
    (mark,) = one(
        cur,
        "SELECT min(least) FROM (SELECT min(txn_id) AS least FROM transactions "
        "WHERE state NOT IN (2, 4) UNION ALL SELECT min(least_live) FROM id_ranges "
        "UNION ALL SELECT next_txn_id FROM clock)",
    )
    return int(mark)


def dead(cur: apsw.Cursor, store: Store) -> list[int]:
    """The ranges of processes that are gone, by their first ids."""
    rows: list[Any] = cur.execute("SELECT first, owner_slot, owner_start FROM id_ranges").fetchall()
    return [first for first, slot, start in rows if not store.runtime.slot_alive(slot, start)]


def drop(cur: apsw.Cursor, firsts: Iterable[int]) -> None:
    """Forget these ranges."""
    cur.executemany("DELETE FROM id_ranges WHERE first = ?", [(first,) for first in firsts])
