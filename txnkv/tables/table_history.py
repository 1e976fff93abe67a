"""A history of its own for a table: how long versions are kept there, whatever the store says.

    status.db, table_history    table_id    seconds (NULL: for ever; -1: as the store)    floor

The floor of such a table only rises, as that of the store does, and in its place: no snapshot below
it can be read in that table. The indexes of a table go with it. The table in status.db is made with
the first history, and a row stays as long as its table does: a history that was shorter than the
store's left a floor above that of the store.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

import apsw

from txnkv.coordinator import Timestamp, one
from txnkv.storage import TABLE_HISTORY, Store

History: TypeAlias = float | Literal["unlimited"] | None
"""A time for which versions are kept: seconds, for ever, or as long as the store says."""

_MADE: Final = """
CREATE TABLE IF NOT EXISTS table_history (
    table_id  INTEGER PRIMARY KEY REFERENCES tables ON DELETE CASCADE,
    seconds   REAL,                 -- NULL: for ever; below 0: as long as the store says
    floor     INTEGER NOT NULL      -- no snapshot below it can be read there
)
"""


class Own(NamedTuple):
    """The history of a table.

    Attributes:
        seconds: math.inf for ever; None as long as the store says.
    """

    seconds: float | None
    floor: Timestamp


def seconds_of(history: History) -> float | None:
    """Return a history in seconds.

    Raises:
        TypeError, ValueError: it is none.
    """
    if history is None:
        return None
    if history == "unlimited":
        return math.inf
    if isinstance(history, bool) or not isinstance(history, int | float):
        raise TypeError(
            f"history is seconds, 'unlimited' or None, as long as the store's, not {history!r}"
        )
    if not history >= 0:
        raise ValueError(f"history is at least 0 seconds, not {history!r}")
    return float(history)


def load(cur: apsw.Cursor) -> dict[int, Own]:
    """The histories of tables that have one of their own, by the tables' ids."""
    if not _is_made(cur):
        return {}
    return {
        id: _own(seconds, floor)
        for id, seconds, floor in cur.execute("SELECT table_id, seconds, floor FROM table_history")
    }


def of_table(cur: apsw.Cursor, table_id: int) -> Own | None:
    """The own history of a table, if it has one."""
    if not _is_made(cur):
        return None
    found = cur.execute(
        "SELECT seconds, floor FROM table_history WHERE table_id = ?", (table_id,)
    ).fetchone()
    return None if found is None else _own(*found)


def set_history(cur: apsw.Cursor, store: Store, table_id: int, seconds: float | None) -> None:
    """Give a table a history; what is gone by now stays gone."""
    if not _is_made(cur):
        if seconds is None:
            return
        store.directory.add_feature(TABLE_HISTORY)
        cur.execute(_MADE)
    kept = -1.0 if seconds is None else None if seconds == math.inf else seconds
    (floor,) = one(cur, "SELECT history_floor FROM clock")
    # One that has a row keeps its floor but where it went with the store's.
    cur.execute(
        "INSERT INTO table_history VALUES (?, ?, ?) ON CONFLICT (table_id) DO UPDATE SET "
        "floor = CASE WHEN seconds < 0 THEN max(floor, excluded.floor) ELSE floor END, "
        "seconds = excluded.seconds",
        (table_id, kept, floor),
    )


def raise_floors(cur: apsw.Cursor, floors: Mapping[int, Timestamp]) -> None:
    """Raise the floors of tables; none falls."""
    cur.executemany(
        "UPDATE table_history SET floor = max(floor, ?) WHERE table_id = ?",
        [(floor, id) for id, floor in floors.items()],
    )


def _is_made(cur: apsw.Cursor) -> bool:
    found = cur.execute("SELECT 1 FROM sqlite_schema WHERE name = 'table_history'").fetchone()
    return found is not None


def _own(seconds: float | None, floor: int) -> Own:
    kept = math.inf if seconds is None else None if seconds < 0 else seconds
    return Own(kept, Timestamp(floor))


@dataclass(frozen=True)
class Floors:
    """Floors of a moment: rows that were dead there, no snapshot sees, now or later.

    Attributes:
        store: of tables without a history of their own.
        own: of the others, by their ids.
    """

    store: Timestamp
    own: Mapping[int, Timestamp]

    def of(self, table_id: int) -> Timestamp:
        """The floor of a table."""
        return self.own.get(table_id, self.store)

    def lowered(self, most: Timestamp) -> Floors:
        """None of them above a timestamp."""
        own = {id: Timestamp(min(floor, most)) for id, floor in self.own.items()}
        return Floors(Timestamp(min(self.store, most)), own)
