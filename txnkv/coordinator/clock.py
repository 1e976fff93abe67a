"""Hybrid time, kept in status.db.

Commit timestamps are taken inside the SQLite transaction that writes the commit point, so
they grow in commit order, and a reader that sees `last_commit` = T in status.db sees every
commit at or below T there too. A snapshot above `last_commit` first raises the stored clock
past itself: no later commit can then appear inside it.

A wall clock that stands behind the stored one is carried as logical time, up to
`MAX_BEHIND`; past that a commit is refused, for the machine's clock is wrong.
"""

from __future__ import annotations

import apsw

from txnkv.coordinator.ids import Timestamp
from txnkv.coordinator.query import one
from txnkv.errors import UnavailableError
from txnkv.storage.seam import clock

MAX_BEHIND = 3600 * 1_000_000


def following(last: int) -> Timestamp:
    """The timestamp to give after `last`: the wall clock's, or one more.

    Raises:
        UnavailableError: the wall clock is more than an hour behind the store's.
    """
    now = clock.now_micros()
    behind = Timestamp(last).micros - now
    if behind > MAX_BEHIND:
        raise UnavailableError(
            f"this machine's clock is {behind / 1e6:.0f} s behind the store's last timestamp "
            f"({Timestamp(last).datetime.isoformat()}): set the clock right, then try again"
        )
    return Timestamp(max(last + 1, Timestamp.from_micros(now)))


def next_timestamp(cur: apsw.Cursor) -> Timestamp:
    """A timestamp above every one given before. Inside a write transaction.

    Raises:
        UnavailableError: the wall clock is more than an hour behind the store's.
    """
    (last,) = one(cur, "SELECT last_timestamp FROM clock")
    stamp = following(last)
    cur.execute("UPDATE clock SET last_timestamp = ?", (stamp,))
    return stamp


def latest_snapshot(cur: apsw.Cursor) -> Timestamp:
    (last,) = one(cur, "SELECT last_commit FROM clock")
    return Timestamp(last)


def raise_clock(cur: apsw.Cursor, past: Timestamp) -> None:
    """No timestamp at or below `past` is given from now on. Inside a write transaction."""
    cur.execute("UPDATE clock SET last_timestamp = max(last_timestamp, ?)", (past,))
