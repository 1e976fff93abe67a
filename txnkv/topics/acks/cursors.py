r"""Cursors: what a subscription has deleted of a partition, and so what it still has to deliver.

    offsets       0 1 2 3 4 5 6 7 8 9
    deleted       x x x . . x x . x .
                  \___/     \_/   |
             mark_delete 3  acked_ranges [5, 7) [8, 9)

Everything below `mark_delete` is deleted, and ranges beyond it; a range that comes to touch
`mark_delete` goes up in it. What is deleted stays deleted: only `seek` takes an offset back.

Offsets that are no messages (markers, aborted ones) lie between messages. A consumer knows them
when it has read past them, and an ack takes those beside its message along, or ranges would never
join.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import apsw

from txnkv.topics.ranges import Ranges


@dataclass
class Cursor:
    """The cursor of one partition, in memory.

    Attributes:
        mark: all below is deleted.
        deleted: what is deleted beyond.
    """

    mark: int
    deleted: Ranges = field(default_factory=Ranges)

    def __contains__(self, offset: int) -> bool:
        """Tell whether an offset is deleted."""
        return offset < self.mark or offset in self.deleted

    def delete(self, first: int, last: int) -> None:
        """[first, last) is deleted."""
        self.deleted.add(max(first, self.mark), last)
        self.mark = self.deleted.pop_from(self.mark)


def create(cur: apsw.Cursor, subscription_id: int, partition_id: int, offset: int) -> None:
    """A cursor that begins at an offset, unless there is one."""
    cur.execute(
        "INSERT OR IGNORE INTO cursors (subscription_id, partition_id, mark_delete, dispatched) "
        "VALUES (?, ?, ?, ?)",
        (subscription_id, partition_id, offset, offset),
    )


def load(cur: apsw.Cursor, subscription_id: int) -> dict[int, Cursor]:
    """The cursors of a subscription, by partition id."""
    found = {
        partition_id: Cursor(mark)
        for partition_id, mark in cur.execute(
            "SELECT partition_id, mark_delete FROM cursors WHERE subscription_id = ?",
            (subscription_id,),
        )
    }
    for partition_id, first, last in cur.execute(
        "SELECT partition_id, first, last FROM acked_ranges WHERE subscription_id = ? "
        "ORDER BY partition_id, first",
        (subscription_id,),
    ):
        found[partition_id].deleted.add(first, last)
    return found


def mark_delete(cur: apsw.Cursor, subscription_id: int, partition_id: int) -> int | None:
    """Return the offset below which all is deleted; None when there is no such cursor."""
    found: Any = cur.execute(
        "SELECT mark_delete FROM cursors WHERE subscription_id = ? AND partition_id = ?",
        (subscription_id, partition_id),
    ).fetchone()
    return None if found is None else int(found[0])


def least_mark(cur: apsw.Cursor, partition_id: int) -> int | None:
    """Return the offset below which all subscriptions deleted all; None when there are none."""
    found: Any = cur.execute(
        "SELECT min(mark_delete) FROM cursors WHERE partition_id = ?", (partition_id,)
    ).fetchone()
    return None if found[0] is None else int(found[0])


def deleted_in(
    cur: apsw.Cursor, subscription_id: int, partition_id: int, first: int, last: int
) -> Ranges:
    """Return the part of [first, last) that is deleted."""
    mark = mark_delete(cur, subscription_id, partition_id) or 0
    found = Ranges([(first, min(last, mark))])
    for low, high in cur.execute(
        "SELECT first, last FROM acked_ranges WHERE subscription_id = ? AND partition_id = ? "
        "AND first < ? ORDER BY first DESC",
        (subscription_id, partition_id, last),
    ):
        if high <= first:
            break
        found.add(max(low, first), min(high, last))
    return found


def delete(
    cur: apsw.Cursor, subscription_id: int, partition_id: int, first: int, last: int
) -> None:
    """[first, last) is deleted. Without a cursor, of a dropped subscription say, nothing is."""
    key = (subscription_id, partition_id)
    mark = mark_delete(cur, subscription_id, partition_id)
    if mark is None or last <= mark or last <= first:
        return
    first = max(first, mark)
    joined = []
    for low, high in cur.execute(
        "SELECT first, last FROM acked_ranges WHERE subscription_id = ? AND partition_id = ? "
        "AND first <= ? ORDER BY first DESC",
        (*key, last),
    ):
        if high < first:
            break
        joined.append(low)
        first, last = min(first, low), max(last, high)
    if joined:
        cur.executemany(
            "DELETE FROM acked_ranges WHERE subscription_id = ? AND partition_id = ? AND first = ?",
            [(*key, low) for low in joined],
        )
    if first > mark:
        cur.execute("INSERT INTO acked_ranges VALUES (?, ?, ?, ?)", (*key, first, last))
    else:
        cur.execute(
            "UPDATE cursors SET mark_delete = ? WHERE subscription_id = ? AND partition_id = ?",
            (last, *key),
        )


def advance(
    cur: apsw.Cursor, subscription_id: int, partition_id: int, first: int, last: int
) -> bool:
    """`delete` for a cursor that has nothing deleted beyond its mark, where [first, last) begins
    at the mark. False, and nothing is done, where it does not.
    """
    cur.execute(
        "UPDATE cursors SET mark_delete = ?3 WHERE subscription_id = ?1 AND partition_id = ?2 "
        "AND mark_delete BETWEEN ?4 AND ?3",
        (subscription_id, partition_id, last, first),
    )
    return bool(cur.connection.changes())


def is_unbroken(cur: apsw.Cursor, subscription_id: int, partition_id: int) -> bool:
    """Tell whether nothing is deleted beyond the mark."""
    found: Any = cur.execute(
        "SELECT 1 FROM acked_ranges WHERE subscription_id = ? AND partition_id = ? LIMIT 1",
        (subscription_id, partition_id),
    ).fetchone()
    return found is None


def raise_marks(cur: apsw.Cursor, partition_id: int, start: int) -> int:
    """Delete in all subscriptions what a log has lost to retention.

    Returns:
        How many cursors it moved.
    """
    behind = [
        subscription_id
        for (subscription_id,) in cur.execute(
            "SELECT subscription_id FROM cursors WHERE partition_id = ? AND mark_delete < ?",
            (partition_id, start),
        )
    ]
    for subscription_id in behind:
        delete(cur, subscription_id, partition_id, 0, start)
        cur.execute(
            "UPDATE cursors SET dispatched = max(dispatched, ?) WHERE subscription_id = ? "
            "AND partition_id = ?",
            (start, subscription_id, partition_id),
        )
        cur.execute(
            "DELETE FROM leases WHERE subscription_id = ? AND partition_id = ? AND message < ?",
            (subscription_id, partition_id, start),
        )
        bump(cur, subscription_id)
    return len(behind)


def seek(cur: apsw.Cursor, subscription_id: int, partition_id: int, offset: int) -> None:
    """All below an offset is deleted and nothing else, as if nothing had been delivered yet."""
    key = (subscription_id, partition_id)
    cur.execute(
        "UPDATE cursors SET mark_delete = ?1, dispatched = ?1 WHERE subscription_id = ?2 "
        "AND partition_id = ?3",
        (offset, *key),
    )
    for table in ("acked_ranges", "leases", "returned_acks"):
        cur.execute(f"DELETE FROM {table} WHERE subscription_id = ? AND partition_id = ?", key)
    bump(cur, subscription_id)


def bump(cur: apsw.Cursor, subscription_id: int) -> None:
    """Have an exclusive consumer read again what it remembers."""
    cur.execute("UPDATE subscriptions SET version = version + 1 WHERE id = ?", (subscription_id,))
