"""End markers in status.db: noted inside the commit point, until they are in their logs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import apsw

from txnkv.coordinator import one
from txnkv.storage import Store


class EndMarker(NamedTuple):
    """A row of `end_markers`: how a transaction ends in one log."""

    first_offset: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    txn_id: int
    type: int
    commit_ts: int  # of an abort, when it was
    low_water_mark: int
    txn_first_offset: int

    @property
    def next_offset(self) -> int:
        return self.first_offset + self.count


_COLUMNS = "first_offset, count, txn_id, type, commit_ts, low_water_mark, txn_first_offset"


def add(cur: apsw.Cursor, partition_id: int, marker: EndMarker) -> None:
    """Note an end marker whose offsets were just taken."""
    cur.execute(
        f"INSERT INTO end_markers (partition_id, {_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (partition_id, *marker),
    )


def between(cur: apsw.Cursor, partition_id: int, offset: int, upto: int) -> list[EndMarker]:
    """End markers at or above `offset` and below `upto`, ascending."""
    return [
        EndMarker(*row)
        for row in cur.execute(
            f"SELECT {_COLUMNS} FROM end_markers WHERE partition_id = ? AND first_offset >= ? "
            "AND first_offset < ? ORDER BY first_offset",
            (partition_id, offset, upto),
        )
    ]


def partitions_of(cur: apsw.Cursor, txn_id: int | None = None) -> list[int]:
    """Partitions that have end markers noted: of one transaction, or of any."""
    found = cur.execute(
        "SELECT DISTINCT partition_id FROM end_markers WHERE txn_id = coalesce(?, txn_id)",
        (txn_id,),
    )
    return [id for (id,) in found]


def is_noted(cur: apsw.Cursor, partition_id: int, txn_id: int) -> bool:
    """Tell whether an end marker of a transaction waits to be written into a log."""
    found = cur.execute(
        "SELECT 1 FROM end_markers WHERE partition_id = ? AND txn_id = ?", (partition_id, txn_id)
    )
    return found.fetchone() is not None


def last_end(cur: apsw.Cursor, partition_id: int) -> tuple[bool, int]:
    """Tell whether a partition has end markers noted, and where the last one ends."""
    (end,) = one(
        cur,
        "SELECT max(first_offset + count) FROM end_markers WHERE partition_id = ?",
        (partition_id,),
    )
    return end is not None, end or 0


def forget(store: Store, written: Sequence[tuple[int, int]]) -> None:
    """Forget end markers that are in their logs.

    Args:
        store: the store.
        written: the end of each log, and the partition's id.
    """
    # Not synced: one that comes back is below its log's end, and nobody minds it.
    with store.status.write(sync=False) as cur:
        cur.executemany(
            "DELETE FROM end_markers WHERE first_offset < ? AND partition_id = ?", written
        )
