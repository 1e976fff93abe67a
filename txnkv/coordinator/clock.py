"""Hybrid time, kept in status.db.

Commit timestamps are taken inside the SQLite transaction that writes the commit point, so
they grow in commit order, and a reader that sees `last_commit` = T in status.db sees every
commit at or below T there too. A snapshot above `last_commit` first raises the stored clock
past itself: no later commit can then appear inside it.

Timestamps go on from the last one, however far ahead of the wall clock it is: a clock that went
ahead and came back costs nothing but the names of snapshots by time, and versions that are kept
until the wall clock has passed them. A wall clock more than `MAX_JUMP` ahead of the last timestamp
is refused before it leaves any: then the clock is wrong, or the store was not used for long, and
`repair` says that it is so. The stored clock never goes back: a snapshot that was given out, in a
token too, would change.
"""

from __future__ import annotations

from typing import Final

import apsw

from txnkv.coordinator.ids import Timestamp
from txnkv.coordinator.query import one
from txnkv.errors import UnavailableError
from txnkv.storage import clock

MAX_JUMP: Final = 3_653 * 86_400 * 1_000_000
"""Ten years: what a clock shows that was never set, or runs over; few stores sleep for longer."""


def following(last: int) -> Timestamp:
    """The timestamp to give after `last`: the wall clock's, or one more.

    Raises:
        UnavailableError: the wall clock is more than ten years ahead of the store's.
    """
    now = max(clock.now_micros(), 0)
    refuse_jump(last, now)
    return Timestamp(max(last + 1, Timestamp.from_micros(now)))


def refuse_jump(last: int, micros: int) -> None:
    """Refuse a time too far ahead of the last timestamp of a store.

    Raises:
        UnavailableError: it is more than ten years ahead.
    """
    ahead = micros - Timestamp(last).micros
    if last and ahead > MAX_JUMP:
        raise UnavailableError(
            f"this machine's clock is {ahead / 86_400e6:.0f} days ahead of the store's last "
            f"timestamp ({Timestamp(last).datetime.isoformat()}): set it right; if it is right, "
            "and the store was not used for so long, run `txnkv repair STORE --clock` once"
        )


def repair(cur: apsw.Cursor) -> Timestamp:
    """Set the stored clock to the wall clock, where that is ahead. Inside a write transaction.

    Returns:
        The last timestamp as it is stored then.
    """
    raise_clock(cur, Timestamp.from_micros(max(clock.now_micros(), 0)))
    (last,) = one(cur, "SELECT last_timestamp FROM clock")
    return Timestamp(last)


def next_timestamp(cur: apsw.Cursor) -> Timestamp:
    """A timestamp above every one given before. Inside a write transaction.

    Raises:
        UnavailableError: the wall clock is more than ten years ahead of the store's.
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
