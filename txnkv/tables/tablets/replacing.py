"""Row sets in status.db that flush and compaction write, replace and give deletes.

    claim_maintenance   WRITING, nobody's transaction
    publish             -> COMMITTED
    retire              COMMITTED -> RETIRED: another took its place
    set_deleted         rows of it have delete stamps

Each is a step of a SQLite transaction of the caller's, which also gives the manifest a new
version.
"""

from __future__ import annotations

from collections.abc import Iterable

import apsw

from txnkv.tables.tablets.manifest import COMMITTED, RETIRED, STAGED, WRITING, RowSetInfo


def claim_maintenance(cur: apsw.Cursor, tablet_id: int, who: str) -> int:
    """A new row set that `who`, "flush" or "compact", writes under its lock."""
    cur.execute(
        "INSERT INTO row_sets (tablet_id, state, counts, attempt) VALUES (?, ?, 1, ?)",
        (tablet_id, WRITING, who),
    )
    return cur.connection.last_insert_rowid()


def unfinished(cur: apsw.Cursor, who: str) -> dict[int, list[int]]:
    """Row sets by tablet that `who` claimed and did not publish.

    Who has the lock and is not writing them knows that they are left over.
    """
    found: dict[int, list[int]] = {}
    for id, tablet_id in cur.execute(
        "SELECT id, tablet_id FROM row_sets WHERE state = ? AND txn_id IS NULL AND attempt = ?",
        (WRITING, who),
    ):
        found.setdefault(tablet_id, []).append(id)
    return found


def publish(cur: apsw.Cursor, info: RowSetInfo) -> None:
    """WRITING -> COMMITTED, for a row set of maintenance whose blocks are durable."""
    cur.execute(
        "UPDATE row_sets SET state = ?, stamp = ?, min_stamp = ?, rows = ?, bytes = ?, "
        "min_key = ?, max_key = ?, deleted = ?, max_delete = ?, delta_seq = ?, versioned = ?, "
        "attempt = NULL WHERE id = ? AND state = ?",
        (
            COMMITTED,
            info.stamp,
            info.min_stamp,
            info.rows,
            info.size,
            info.min_key,
            info.max_key,
            info.deleted,
            info.max_delete,
            info.delta_seq,
            info.versioned,
            info.id,
            WRITING,
        ),
    )


def retire(cur: apsw.Cursor, row_set_ids: Iterable[int], version: int) -> None:
    """To RETIRED: `version` of the manifest does not have them any more."""
    cur.executemany(
        "UPDATE row_sets SET state = ?, retired = ?, txn_id = NULL, job_id = NULL "
        "WHERE id = ? AND state IN (?, ?)",
        [(RETIRED, version, id, STAGED, COMMITTED) for id in row_set_ids],
    )


def retired(cur: apsw.Cursor, before: int) -> dict[int, list[int]]:
    """Row sets by tablet that no manifest version at or above `before` has."""
    found: dict[int, list[int]] = {}
    for id, tablet_id in cur.execute(
        "SELECT id, tablet_id FROM row_sets WHERE state = ? AND retired <= ?", (RETIRED, before)
    ):
        found.setdefault(tablet_id, []).append(id)
    return found


def set_deleted(cur: apsw.Cursor, row_set_id: int, deleted: int, max_delete: int) -> bool:
    """Note that deletes of a row set were written.

    Args:
        deleted: rows that have a delete stamp now.
        max_delete: the highest of those stamps.

    Returns:
        False when the row set is neither committed nor being finalized: a compaction replaced
        it meanwhile, and the deletes must be found again in what took its place.
    """
    cur.execute(
        "UPDATE row_sets SET deleted = max(deleted, ?), max_delete = max(max_delete, ?), "
        "delta_seq = delta_seq + 1 WHERE id = ? AND state IN (?, ?)",
        (deleted, max_delete, row_set_id, STAGED, COMMITTED),
    )
    return cur.connection.changes() == 1
