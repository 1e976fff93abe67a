"""Partition locks with wait-die.

A transaction with `locking="partition"` holds each tablet it writes to alone, from its
first write until it ends; the lock is a row of status.db, so it survives a restart
together with its transaction.

Wait-die (Rosenkrantz, Stearns, Lewis 1978) goes by the time of begin: a requester that is
older than the holder waits, a younger one dies. So waits always point from old to young
and cannot form a ring.

    T1 begins, T2 begins, T2 locks tablet 7
    T1 wants 7: older than the holder  -> waits, and gets it when T2 ends
    T3 wants 7: younger than the holder -> dies (its transaction is aborted, retriable)

A write outside of a transaction counts as the youngest of all. A retry by `client.run`
keeps the begin time of its first attempt, so that it is not younger each time.

The snapshot of such a transaction is taken when a lock is granted, and taken again with each
further lock: nobody else has written to the tablets that it holds, so what it found there is
as true at the later one. Its first read fixes it, as a row of kind "snapshot": what was read
from other tablets would not be true later. A lock that comes after that lets it write upon
its snapshot alone, and the commit fails where others were faster.

    T1 begins, T2 sets x, T1 locks x's tablet, reads x: it has what T2 wrote
    T1 begins, T1 reads x, T2 sets x, T1 locks x's tablet, sets x: a conflict at commit
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final

import apsw

from txnkv.coordinator import status_table
from txnkv.coordinator.ids import Timestamp, next_timestamp
from txnkv.coordinator.status_schema import one
from txnkv.coordinator.status_table import TxnRow

LOCK_TIMEOUT: Final = 5.0
"""Seconds for which an older transaction waits for a younger one's lock, if none are given."""

_SNAPSHOT: Final = "snapshot"
"""The kind of a row that is no lock: since when others' changes count; its id is the owner's."""


class Verdict(Enum):
    GRANTED = "granted"
    WAIT = "wait"
    DIE = "die"


@dataclass(frozen=True)
class LockAnswer:
    verdict: Verdict
    holder: int | None = None
    id: int = 0
    """The one that the holder has locked."""


def holder_of(cur: apsw.Cursor, kind: str, id: int) -> int | None:
    found = cur.execute("SELECT txn_id FROM locks WHERE kind = ? AND id = ?", (kind, id)).fetchone()
    return None if found is None else int(found[0])


def judge(cur: apsw.Cursor, row: TxnRow | None, holder: int, id: int) -> LockAnswer:
    """Decide what a writer does that met a lock of `holder` on `id`; a `row` of None writes outside
    of transactions.
    """
    if row is None or row.age() > status_table.get(cur, holder).age():
        return LockAnswer(Verdict.DIE, holder, id)
    return LockAnswer(Verdict.WAIT, holder, id)


def request(cur: apsw.Cursor, row: TxnRow, kind: str, ids: Iterable[int]) -> LockAnswer:
    """Lock all of `ids` for an OPEN transaction, or none. Taking a lock again is harmless."""
    wanted = list(ids)
    for id in wanted:
        holder = holder_of(cur, kind, id)
        if holder is not None and holder != row.txn_id:
            return judge(cur, row, holder, id)
    granted = granted_at(cur, row.txn_id, _SNAPSHOT, row.txn_id) or next_timestamp(cur)
    cur.executemany(
        "INSERT OR IGNORE INTO locks (kind, id, txn_id, granted_ts) VALUES (?, ?, ?, ?)",
        [(kind, id, row.txn_id, granted) for id in wanted],
    )
    return LockAnswer(Verdict.GRANTED)


def meet(cur: apsw.Cursor, row: TxnRow | None, kind: str, ids: Iterable[int]) -> LockAnswer:
    """Decide what an optimistic or non-transactional writer does before it writes to `ids`."""
    for id in ids:
        holder = holder_of(cur, kind, id)
        if holder is not None and (row is None or holder != row.txn_id):
            return judge(cur, row, holder, id)
    return LockAnswer(Verdict.GRANTED)


def snapshot_of(cur: apsw.Cursor, row: TxnRow) -> Timestamp:
    """Return the snapshot that a transaction reads now: that of its begin or latest lock."""
    if row.locking != "partition":
        return row.snapshot_ts
    fixed = granted_at(cur, row.txn_id, _SNAPSHOT, row.txn_id)
    if fixed is None:
        (fixed,) = one(cur, "SELECT max(granted_ts) FROM locks WHERE txn_id = ?", (row.txn_id,))
    return max(row.snapshot_ts, Timestamp(fixed or 0))


def fix_snapshot(cur: apsw.Cursor, row: TxnRow) -> Timestamp:
    """Let no further lock move the snapshot of an OPEN transaction; what it is."""
    snapshot = snapshot_of(cur, row)
    cur.execute(
        "INSERT OR IGNORE INTO locks (kind, id, txn_id, granted_ts) VALUES (?, ?, ?, ?)",
        (_SNAPSHOT, row.txn_id, row.txn_id, snapshot),
    )
    return snapshot


def granted_at(cur: apsw.Cursor, txn_id: int, kind: str, id: int) -> Timestamp | None:
    """The snapshot that the transaction has of what it locked: changes by others since then
    are conflicts.
    """
    found = cur.execute(
        "SELECT granted_ts FROM locks WHERE kind = ? AND id = ? AND txn_id = ?", (kind, id, txn_id)
    ).fetchone()
    return None if found is None else Timestamp(found[0])


def release(cur: apsw.Cursor, txn_id: int) -> None:
    cur.execute("DELETE FROM locks WHERE txn_id = ?", (txn_id,))
