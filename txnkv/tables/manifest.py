"""Row sets in status.db: claimed, staged, committed.

    WRITING    claimed by a writer; its blocks may be half there
    STAGED     its blocks are durable; it counts when its transaction commits, unless it
               is of an attempt that was not accepted
    COMMITTED  it has a plain commit timestamp

A row set is visible at snapshot T when its stamp, or the commit timestamp of its
transaction while that is being finalized, is at or below T. One query answers that in one
SQLite transaction, so a reader never meets a part of a commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import apsw

from txnkv.coordinator import jobs, status_table
from txnkv.coordinator.ids import Timestamp
from txnkv.coordinator.query import one
from txnkv.coordinator.states import TxnState

WRITING: Final = 0
STAGED: Final = 1
COMMITTED: Final = 2
KIND: Final = "tablet"


@dataclass(frozen=True)
class RowSetInfo:
    """A row set that can be read.

    Attributes:
        stamp: commit timestamp; None for one staged by a transaction still open.
        staged_seq: the order among the row sets of its transaction.
        checked_seq: its keys were checked against those that counted up to here.
        size: bytes of its blocks.
        min_key, max_key: encoded, inclusive.
    """

    id: int
    tablet_id: int
    stamp: Timestamp | None
    rows: int
    size: int
    min_key: bytes
    max_key: bytes
    staged_seq: int = 0
    checked_seq: int = 0
    attempt: str | None = None
    counts: bool = True

    def overlaps(self, low: bytes, high: bytes) -> bool:
        return self.min_key <= high and low <= self.max_key


@dataclass(frozen=True)
class Scope:
    """Under which name a writer stages: a transaction, and in it an attempt.

    Attributes:
        job_id: the job whose task's attempt it is; None for a write that is an attempt of its
            own, since it has many chunks, which count together or not at all.
    """

    txn_id: int
    job_id: str | None = None
    attempt: str | None = None


_COLUMNS = (
    "r.id, r.tablet_id, r.stamp, r.rows, r.bytes, r.min_key, r.max_key, "
    "r.staged_seq, r.checked_seq, r.attempt, r.counts"
)


def _info(values: tuple[Any, ...], stamp: int | None = None) -> RowSetInfo:
    fields: list[Any] = list(values)
    found = stamp if stamp is not None else fields[2]
    fields[2] = None if found is None else Timestamp(found)
    fields[-1] = bool(fields[-1])
    return RowSetInfo(*fields)


# -- writing ---------------------------------------------------------------------------


def claim(cur: apsw.Cursor, scope: Scope, tablet_ids: Sequence[int]) -> list[int]:
    """Register the tablets as participants and claim a new row set in each.

    Raises:
        TxnNotFoundError, InvalidTxnStateError: the transaction is not OPEN, or its job ended.
    """
    _require_open(cur, scope)
    status_table.register_participant(cur, scope.txn_id, KIND, tablet_ids)
    claimed = []
    for tablet_id in tablet_ids:
        cur.execute(
            "INSERT INTO row_sets (tablet_id, state, txn_id, job_id, attempt, counts) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            (
                tablet_id,
                WRITING,
                scope.txn_id,
                scope.job_id,
                scope.attempt,
                scope.attempt is None,
            ),
        )
        claimed.append(cur.connection.last_insert_rowid())
    return claimed


def stage(cur: apsw.Cursor, scope: Scope, written: Iterable[RowSetInfo]) -> list[int]:
    """WRITING -> STAGED, for row sets whose blocks are durable.

    Returns:
        Their sequence numbers.

    Raises:
        InvalidTxnStateError: the transaction or its job ended meanwhile.
    """
    _require_open(cur, scope)
    numbers = []
    for info in written:
        numbers.append(next_sequence(cur))
        cur.execute(
            "UPDATE row_sets SET state = ?, staged_seq = ?, checked_seq = ?, rows = ?, bytes = ?, "
            "min_key = ?, max_key = ? WHERE id = ? AND state = ?",
            (
                STAGED,
                numbers[-1],
                info.checked_seq,
                info.rows,
                info.size,
                info.min_key,
                info.max_key,
                info.id,
                WRITING,
            ),
        )
        if cur.connection.changes() != 1:
            raise status_table.not_open(status_table.get(cur, scope.txn_id), "stage rows")
    return numbers


def accept_attempts(cur: apsw.Cursor, txn_id: int, attempts: Iterable[str]) -> None:
    """From now on the row sets of these attempts count."""
    for attempt in attempts:
        cur.execute(
            "UPDATE row_sets SET counts = 1, staged_seq = ? "
            "WHERE txn_id = ? AND attempt = ? AND state = ?",
            (next_sequence(cur), txn_id, attempt, STAGED),
        )


def forget(cur: apsw.Cursor, row_set_ids: Iterable[int]) -> None:
    cur.executemany("DELETE FROM row_sets WHERE id = ?", [(id,) for id in row_set_ids])


def next_sequence(cur: apsw.Cursor) -> int:
    (value,) = one(
        cur, "UPDATE clock SET stage_sequence = stage_sequence + 1 RETURNING stage_sequence"
    )
    return int(value)


def sequence(cur: apsw.Cursor) -> int:
    (value,) = one(cur, "SELECT stage_sequence FROM clock")
    return int(value)


def _require_open(cur: apsw.Cursor, scope: Scope) -> None:
    status_table.get_open(cur, scope.txn_id, "stage rows")
    if scope.job_id is not None:
        jobs.require_running(cur, scope.txn_id, scope.job_id)


# -- reading ---------------------------------------------------------------------------


def committed(
    cur: apsw.Cursor, tablet_id: int, after: Timestamp, upto: Timestamp
) -> list[RowSetInfo]:
    """Row sets of a tablet with after < commit timestamp <= upto."""
    found = [
        _info(values)
        for values in cur.execute(
            f"SELECT {_COLUMNS} FROM row_sets r WHERE r.tablet_id = ? AND r.state = ? "
            "AND r.stamp > ? AND r.stamp <= ?",
            (tablet_id, COMMITTED, after, upto),
        )
    ]
    found.extend(
        _info(values[:-1], values[-1])
        for values in cur.execute(
            f"SELECT {_COLUMNS}, t.commit_ts FROM transactions t JOIN row_sets r "
            "ON r.txn_id = t.txn_id AND r.tablet_id = ? WHERE t.state = ? "
            "AND r.state = ? AND r.counts AND t.commit_ts > ? AND t.commit_ts <= ?",
            (tablet_id, int(TxnState.FINALIZE_IN_PROGRESS), STAGED, after, upto),
        )
    )
    return sorted(found, key=lambda info: info.id)


def staged(
    cur: apsw.Cursor, txn_id: int, tablet_id: int, attempt: str | None = None
) -> list[RowSetInfo]:
    """Row sets of an open transaction that count, and those of `attempt`."""
    return [
        _info(values)
        for values in cur.execute(
            f"SELECT {_COLUMNS} FROM row_sets r WHERE r.txn_id = ? AND r.tablet_id = ? "
            "AND r.state = ? AND (r.counts OR r.attempt = ?) ORDER BY r.staged_seq",
            (txn_id, tablet_id, STAGED, attempt),
        )
    ]


def readable(cur: apsw.Cursor, tablet_id: int) -> list[RowSetInfo]:
    """Every row set of a tablet whose blocks are all there, for checking."""
    return [
        _info(values)
        for values in cur.execute(
            f"SELECT {_COLUMNS} FROM row_sets r WHERE r.tablet_id = ? AND r.state != ?",
            (tablet_id, WRITING),
        )
    ]


def known_ids(cur: apsw.Cursor, tablet_id: int) -> set[int]:
    return {
        id for (id,) in cur.execute("SELECT id FROM row_sets WHERE tablet_id = ?", (tablet_id,))
    }


def is_swept(cur: apsw.Cursor, row_set_id: int) -> bool:
    """Whether the blocks of a row set are being removed or are gone: it is forgotten, or its
    transaction is over for it.
    """
    found = cur.execute(
        "SELECT r.counts, t.state FROM row_sets r LEFT JOIN transactions t USING (txn_id) "
        "WHERE r.id = ?",
        (row_set_id,),
    ).fetchone()
    if found is None:
        return True
    counts, state = found
    if state is None or state == TxnState.OPEN:
        return False
    return not counts or state in (TxnState.ABORT_IN_PROGRESS, TxnState.ABORTED)


# -- the end of a transaction ----------------------------------------------------------


def leftovers(cur: apsw.Cursor, txn_id: int, *, everything: bool) -> dict[int, list[int]]:
    """Row sets of a transaction that do not count, by tablet; with `everything`, all."""
    condition = "" if everything else " AND (state = 0 OR NOT counts)"
    found: dict[int, list[int]] = {}
    for id, tablet_id in cur.execute(
        f"SELECT id, tablet_id FROM row_sets WHERE txn_id = ?{condition}", (txn_id,)
    ):
        found.setdefault(tablet_id, []).append(id)
    return found


def finalize(cur: apsw.Cursor, txn_id: int, commit_ts: Timestamp) -> None:
    """Give what counts its plain stamp."""
    cur.execute(
        "UPDATE row_sets SET state = ?, stamp = ?, txn_id = NULL, job_id = NULL "
        "WHERE txn_id = ? AND state = ? AND counts",
        (COMMITTED, commit_ts, txn_id, STAGED),
    )
