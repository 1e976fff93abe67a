"""Transaction ids and hybrid timestamps: their form, and how new ones are given.

A timestamp is 63 bits: 51 of microseconds since 2020-01-01 UTC, then 12 of logical time
(Kulkarni et al., "Logical Physical Clocks", 2014, as used by Kudu). The top bit of a stamp
is free to say "undecided, this is a transaction id".

    bit 63        62 ............ 12  11 ...... 0
       0          microseconds        logical

Commit timestamps are taken inside the SQLite transaction that writes the commit point, so
they grow in commit order, and a reader that sees `last_commit` = T in status.db sees every
commit at or below T there too. A snapshot above `last_commit` first raises the stored clock
past itself: no later commit can then appear inside it.

A commit of the log does not write the row of the clock, for it is there to be seen itself: `clock`
is a view of both, and a flush raises the row before what it has flushed is trimmed.

Timestamps go on from the last one, however far ahead of the wall clock it is: a clock that went
ahead and came back costs nothing but the names of snapshots by time, and versions that are kept
until the wall clock has passed them. A wall clock more than `MAX_JUMP` ahead of the last timestamp
is refused before it leaves any: then the clock is wrong, or the store was not used for long, and
`repair` says that it is so. Until then nothing is removed for its age: see `aging_micros`. The
stored clock never goes back: a snapshot that was given out, in a token too, would change.

A transaction id is 128 bits: the top 16 name the store's coordinator (TCID), the rest counts up
from 1; inside a store 63 bits of it are used. A process takes ids a range at a time, so that begin
costs no I/O. Each range has a row with its least live id; the low water mark is the least over
those and over the transactions that have not ended. Whatever is staged under a lower id is garbage.

    range 1..1024 of process A, least live 7     transactions not ended: 9, 1030
    range 1025..2048 of process B, least live 1030
    low water mark = 7
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final

import apsw

from txnkv.coordinator.status_schema import one
from txnkv.core import IdSet
from txnkv.errors import ClosedError, UnavailableError
from txnkv.storage import Store, clock, new_lock, shielded

_log = logging.getLogger("txnkv")

EPOCH = datetime(2020, 1, 1, tzinfo=UTC)
LOGICAL_BITS = 12
MAX_TIMESTAMP = (1 << 63) - 1
_MICROSECOND = timedelta(microseconds=1)
_LOCAL_BITS = 112


class Timestamp(int):
    """A hybrid time: microseconds since 2020-01-01 UTC shifted by 12 bits, plus logical time."""

    __slots__ = ()

    def __new__(cls, value: int | str) -> Timestamp:
        number = int(value)
        if not 0 <= number <= MAX_TIMESTAMP:
            raise ValueError(f"a timestamp has 63 bits, {number} does not fit")
        return super().__new__(cls, number)

    @classmethod
    def from_micros(cls, micros: int, logical: int = 0) -> Timestamp:
        """The timestamp of `micros` microseconds since 2020-01-01 UTC."""
        return cls((micros << LOGICAL_BITS) | logical)

    @classmethod
    def from_datetime(cls, when: datetime) -> Timestamp:
        """The last timestamp within the microsecond `when`.

        Raises:
            ValueError: `when` is naive, before 2020 or beyond 2091.
        """
        if when.tzinfo is None:
            raise ValueError(
                f"{when!r} has no time zone: a snapshot is named by an aware datetime, "
                "as datetime.now(timezone.utc)"
            )
        micros = (when - EPOCH) // _MICROSECOND
        if micros < 0:
            raise ValueError(f"{when.isoformat()} is before 2020-01-01 UTC, where time begins here")
        if micros > MAX_TIMESTAMP >> LOGICAL_BITS:
            raise ValueError(f"{when.isoformat()} is in the future, beyond where time ends here")
        return cls.from_micros(micros, (1 << LOGICAL_BITS) - 1)

    @property
    def micros(self) -> int:
        """Microseconds since 2020-01-01 UTC."""
        return self >> LOGICAL_BITS

    @property
    def datetime(self) -> datetime:
        """The physical part as an aware datetime in UTC."""
        return EPOCH + timedelta(microseconds=self.micros)

    def __repr__(self) -> str:
        return f"Timestamp({int(self)})"

    def __str__(self) -> str:
        return int.__repr__(self)


stamp_of: Final = partial(int.__new__, Timestamp)
"""A `Timestamp` of a number that is one, without a look at it: each transaction takes a few."""


class TxnId(int):
    """A transaction id of 128 bits."""

    __slots__ = ()

    @classmethod
    def of(cls, tcid: int, local: int) -> TxnId:
        return cls((tcid << _LOCAL_BITS) | local)

    @property
    def tcid(self) -> int:
        """The 16-bit coordinator id of the store that gave this id."""
        return self >> _LOCAL_BITS

    @property
    def local(self) -> int:
        """The id inside its store, as it stands in stamps."""
        return self & ((1 << _LOCAL_BITS) - 1)

    def __repr__(self) -> str:
        return f"TxnId({self.tcid}:{self.local})"


MAX_JUMP: Final = 3_653 * 86_400 * 1_000_000
"""Ten years: what a clock shows that was never set, or runs over; few stores sleep for longer."""


_MAX_JUMP: Final = MAX_JUMP << LOGICAL_BITS


def following(last: int) -> Timestamp:
    """The timestamp to give after `last`: the wall clock's, or one more.

    Raises:
        UnavailableError: the wall clock is more than ten years ahead of the store's.
    """
    now = clock.now_micros() << LOGICAL_BITS
    if now - last > _MAX_JUMP:
        refuse_jump(last, now >> LOGICAL_BITS)
    stamp: Timestamp = stamp_of(now if now > last else last + 1)
    return stamp


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


def aging_micros(cur: apsw.Cursor) -> int:
    """The wall clock, for what is removed for its age; while it is refused, when the last timestamp
    was.
    """
    (last,) = one(cur, "SELECT last_timestamp FROM clock")
    now, then = clock.now_micros(), Timestamp(last).micros
    return then if last and now - then > MAX_JUMP else now


def ahead_of_clock(latest: int) -> float:
    """Return the seconds that a latest timestamp is ahead of the wall clock; 0 where it is no more
    than a minute. Until the clock has caught up, all that is committed comes behind its time.
    """
    ahead = Timestamp(latest).micros - clock.now_micros()
    return ahead / 1e6 if ahead > 60_000_000 else 0.0


def warn_ahead(latest: int, whose: str) -> bool:
    """Tell who names a time by a datetime that timestamps are ahead of the wall clock.

    Returns:
        They are.
    """
    ahead = ahead_of_clock(latest)
    if ahead:
        _log.warning(
            "timestamps of %s are %.0f s ahead of this machine's clock, as a clock that was wrong "
            "leaves them: a datetime leaves out what was committed since. Give a timestamp; the "
            "latest is %d, of %s",
            whose,
            ahead,
            latest,
            Timestamp(latest).datetime.isoformat(),
        )
    return bool(ahead)


def wall_timestamp(ago: int = 0) -> Timestamp:
    """The wall clock's timestamp, or that of so many microseconds before; the first one there is,
    where that is before 2020: some machines begin in 1970, until they are told the time.
    """
    return Timestamp.from_micros(max(clock.now_micros() - ago, 0))


def repair_clock(cur: apsw.Cursor) -> Timestamp:
    """Set the stored clock to the wall clock, where that is ahead. Inside a write transaction.

    Returns:
        The last timestamp as it is stored then.
    """
    raise_clock(cur, wall_timestamp())
    (last,) = one(cur, "SELECT last_timestamp FROM clock")
    return Timestamp(last)


def next_timestamp(cur: apsw.Cursor) -> Timestamp:
    """A timestamp above every one given before. Inside a write transaction.

    Raises:
        UnavailableError: the wall clock is more than ten years ahead of the store's.
    """
    (last,) = one(cur, "SELECT last_timestamp FROM clock")
    stamp = following(last)
    cur.execute("UPDATE clock_row SET last_timestamp = ?", (stamp,))
    return stamp


def latest_snapshot(cur: apsw.Cursor) -> Timestamp:
    (last,) = one(cur, "SELECT last_commit FROM clock")
    return Timestamp(last)


def raise_clock(cur: apsw.Cursor, past: Timestamp) -> None:
    """No timestamp at or below `past` is given from now on. Inside a write transaction."""
    cur.execute("UPDATE clock_row SET last_timestamp = max(last_timestamp, ?)", (past,))


def reach(cur: apsw.Cursor, commit_ts: Timestamp) -> None:
    """The latest snapshot is at `commit_ts` or later from now on. Inside a write transaction."""
    raise_clock(cur, commit_ts)
    cur.execute("UPDATE clock_row SET last_commit = max(last_commit, ?)", (commit_ts,))


RANGE: Final = 1024


class IdRanges:
    """The ids that this process gives out.

    Attributes:
        numbers: those to be given, and those that live.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        # Before the write lock of status.db, with which `record` comes.
        self._reserving = new_lock()
        self.numbers = IdSet()
        self._firsts: dict[int, int] = {}
        self._closed = False

    def begin(self) -> int:
        """An id never given before, live until `ended`."""
        while (txn_id := self.numbers.take()) is None:
            self.reserve()
        return txn_id

    def ended(self, txn_id: int) -> None:
        self.numbers.ended(txn_id)

    def record(self, cur: apsw.Cursor) -> None:
        """Bring the least live ids of this process's ranges up to date, in a write that is
        done anyway, and drop the ranges that are used up.
        """
        for first, last in list(self._firsts.items()):
            least = self.numbers.least(first, last)
            if least is None:
                cur.execute("DELETE FROM id_ranges WHERE first = ?", (first,))
                del self._firsts[first]
            else:
                cur.execute(
                    "UPDATE id_ranges SET least_live = ? WHERE first = ? AND least_live < ?",
                    (least, first, least),
                )

    def close(self) -> None:
        """Give back this process's ranges, and take no more."""
        with self._reserving:
            self._closed = True
            firsts, self._firsts = self._firsts, {}
            self.numbers = IdSet()
        if firsts:
            with self._store.status.write() as cur:
                drop_ranges(cur, firsts)

    @shielded
    def reserve(self) -> None:
        """Have ids to give.

        Raises:
            ClosedError: the store was closed; who holds its former ids would ask for ever.
        """
        with self._reserving:
            if self._closed:
                raise ClosedError(f"store {self._store.directory.path} is closed; open it again")
            if not self.numbers.left:
                self._take_range()

    def _take_range(self) -> None:
        runtime = self._store.runtime
        with self._store.status.write() as cur:
            self.record(cur)
            (first,) = one(cur, "SELECT next_txn_id FROM clock")
            cur.execute("UPDATE clock_row SET next_txn_id = ?", (first + RANGE,))
            cur.execute(
                "INSERT INTO id_ranges (first, last, least_live, owner_slot, owner_start) "
                "VALUES (?, ?, ?, ?, ?)",
                (first, first + RANGE - 1, first, *runtime.owner),
            )
        self.numbers.give(first, first + RANGE)
        self._firsts[first] = first + RANGE - 1  # now: `record` takes what has no ids for used up


def low_water_mark(cur: apsw.Cursor) -> int:
    """The least id that may still stage anything."""
    (mark,) = one(
        cur,
        "SELECT min(least) FROM (SELECT min(txn_id) AS least FROM transactions "
        "WHERE state NOT IN (2, 4) UNION ALL SELECT min(least_live) FROM id_ranges "
        "UNION ALL SELECT next_txn_id FROM clock)",
    )
    return int(mark)


def dead_ranges(cur: apsw.Cursor, store: Store) -> list[int]:
    """The ranges of processes that are gone, by their first ids."""
    rows: list[Any] = cur.execute("SELECT first, owner_slot, owner_start FROM id_ranges").fetchall()
    return [first for first, slot, start in rows if not store.runtime.slot_alive(slot, start)]


def drop_ranges(cur: apsw.Cursor, firsts: Iterable[int]) -> None:
    """Forget these ranges."""
    cur.executemany("DELETE FROM id_ranges WHERE first = ?", [(first,) for first in firsts])
