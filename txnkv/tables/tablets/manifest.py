"""Row sets in status.db: claimed, staged, committed, replaced.

    WRITING    claimed by a writer; its blocks may be half there
    STAGED     its blocks are durable; it counts when its transaction commits, unless it
               is of an attempt that was not accepted
    COMMITTED  it has plain commit timestamps
    RETIRED    flush or compaction replaced it; its blocks go when nobody reads them any more

What of a tablet is committed is one query in one SQLite transaction, so a reader never meets a
part of a commit: the row sets that are COMMITTED, those of transactions that have their commit
timestamp and are being finalized, and the flushed timestamp, above which small commits are in
memory alone. The manifest version changes with all that.

Flush and compaction claim row sets for nobody's transaction (`claim_maintenance`), publish them,
retire those that these replace, and note deletes (`set_deleted`): each is a step of a SQLite
transaction of theirs, which also gives the manifest a new version.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, NamedTuple

import apsw

from txnkv import core
from txnkv.coordinator import Timestamp, TxnState, jobs, one, payload, reach, status_table

WRITING: Final = 0
STAGED: Final = 1
COMMITTED: Final = 2
RETIRED: Final = 3
ROWS: Final = 0
TOMBSTONES: Final = 1
KIND: Final = "tablet"


@dataclass(frozen=True)
class RowSetInfo:
    """A row set that can be read.

    Attributes:
        stamp: highest commit timestamp of its rows; None for one staged by a transaction still
            open.
        staged_seq: the order among the row sets of its transaction.
        checked_seq: its keys were checked against those that counted up to here.
        size: bytes of its blocks.
        min_key, max_key: encoded, inclusive.
        kind: ROWS, or TOMBSTONES: keys that a transaction deletes, until it is finalized.
        supersedes: some of its keys were there before.
        min_stamp: lowest commit timestamp of its rows.
        deleted: how many rows have a delete stamp.
        max_delete: the highest of those, 0 for none.
        delta_seq: changes whenever its deletes do.
        versioned: a key may have several versions, newest first.
        resolved: what it replaced has delete stamps; False while it must hide rows by key.
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
    kind: int = ROWS
    supersedes: bool = False
    min_stamp: Timestamp | None = None
    deleted: int = 0
    max_delete: int = 0
    delta_seq: int = 0
    versioned: bool = False
    resolved: bool = True

    @property
    def uniform(self) -> bool:
        """All rows have one insert stamp."""
        return self.min_stamp == self.stamp

    @property
    def live_rows(self) -> int:
        """Rows without a delete stamp."""
        return self.rows - self.deleted

    def overlaps(self, low: bytes, high: bytes) -> bool:
        return self.min_key <= high and low <= self.max_key


@dataclass(frozen=True)
class Scope:
    """Under which name a writer stages: a transaction, and in it an attempt.

    Attributes:
        job_id: the job whose task's attempt it is; None for a write that is an attempt of its
            own, since it has many chunks, which count together or not at all.
        alone: it sees nothing but what its attempt staged: all else is deleted.
    """

    txn_id: int
    job_id: str | None = None
    attempt: str | None = None
    alone: bool = False


_KNOWN: Final = 2_048
"""Row sets as they were last read: of a tablet with many, each commit changes a few."""

_COLUMNS = (
    "r.id, r.tablet_id, r.stamp, r.rows, r.bytes, r.min_key, r.max_key, "
    "coalesce(r.staged_seq, 0), coalesce(r.checked_seq, 0), r.attempt, r.counts, r.kind, "
    "r.supersedes, r.min_stamp, r.deleted, "
    "r.max_delete, r.delta_seq, r.versioned"
)


@lru_cache(_KNOWN)
def _info(values: tuple[Any, ...], commit_ts: int | None = None) -> RowSetInfo:
    """A row of `_COLUMNS`; with `commit_ts`, of a transaction that is being finalized. The same
    object for the same row: what is known of a row set is looked up by it.
    """
    info = RowSetInfo(*values)
    stamp, least = (info.stamp, info.min_stamp) if commit_ts is None else (commit_ts, commit_ts)
    replaces = info.supersedes or info.kind == TOMBSTONES
    return replace(
        info,
        stamp=None if stamp is None else Timestamp(stamp),
        min_stamp=None if least is None else Timestamp(least),
        counts=bool(info.counts),
        supersedes=bool(info.supersedes),
        versioned=bool(info.versioned),
        resolved=not replaces or (commit_ts is None and info.stamp is not None),
    )


# -- writing ---------------------------------------------------------------------------


def claim(cur: apsw.Cursor, scope: Scope, tablet_ids: Sequence[int], kind: int = ROWS) -> list[int]:
    """Register the tablets as participants and claim a new row set in each.

    Raises:
        TxnNotFoundError, InvalidTxnStateError: the transaction is not OPEN, or its job ended.
    """
    _require_open(cur, scope)
    status_table.register_participant(cur, scope.txn_id, KIND, tablet_ids)
    claimed = []
    for tablet_id in tablet_ids:
        cur.execute(
            "INSERT INTO row_sets (tablet_id, state, txn_id, job_id, attempt, counts, kind) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                tablet_id,
                WRITING,
                scope.txn_id,
                scope.job_id,
                scope.attempt,
                scope.attempt is None,
                kind,
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
            "UPDATE row_sets SET state = ?, staged_seq = ?, checked_seq = ?, supersedes = ?, "
            "rows = ?, bytes = ?, min_key = ?, max_key = ? WHERE id = ? AND state = ?",
            (
                STAGED,
                numbers[-1],
                info.checked_seq,
                info.supersedes,
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


def unstage(cur: apsw.Cursor, txn_id: int, ids: Iterable[int] = (), attempt: str = "") -> None:
    """STAGED -> WRITING, of row sets that do not count after all: by id, or all of an attempt."""
    cur.executemany(
        "UPDATE row_sets SET state = ? WHERE id = ? AND txn_id = ? AND state = ?",
        [(WRITING, id, txn_id, STAGED) for id in ids],
    )
    if attempt:
        cur.execute(
            "UPDATE row_sets SET state = ?, counts = 0 WHERE txn_id = ? AND attempt = ? "
            "AND state = ?",
            (WRITING, txn_id, attempt, STAGED),
        )


def accept_attempts(
    cur: apsw.Cursor, txn_id: int, attempts: Iterable[str], *, in_place: bool = False
) -> None:
    """From now on the row sets of these attempts count.

    Args:
        in_place: below what was staged since; those who did knew of them. Else above it all.
    """
    if in_place:
        cur.executemany(
            "UPDATE row_sets SET counts = 1 WHERE txn_id = ? AND attempt = ? AND state = ?",
            [(txn_id, attempt, STAGED) for attempt in attempts],
        )
        return
    for attempt in attempts:
        cur.execute(
            "UPDATE row_sets SET counts = 1, staged_seq = ? "
            "WHERE txn_id = ? AND attempt = ? AND state = ?",
            (next_sequence(cur), txn_id, attempt, STAGED),
        )


def forget(cur: apsw.Cursor, row_set_ids: Iterable[int]) -> None:
    cur.executemany("DELETE FROM row_sets WHERE id = ?", [(id,) for id in row_set_ids])


def forget_replaced(cur: apsw.Cursor) -> None:
    """Forget row sets of maintenance that are replaced or unfinished: they have no blocks."""
    cur.execute(
        "DELETE FROM row_sets WHERE state = ? OR (state = ? AND txn_id IS NULL)", (RETIRED, WRITING)
    )


def next_sequence(cur: apsw.Cursor) -> int:
    (value,) = one(
        cur, "UPDATE clock_row SET stage_sequence = stage_sequence + 1 RETURNING stage_sequence"
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


@dataclass(frozen=True)
class Committed:
    """The committed state of one tablet, as status.db has it.

    Attributes:
        version: of the manifest.
        flushed: small commits at or below it are in the row sets.
        last_commit: the latest snapshot.
        floor: of the history.
        infos: the row sets, by id.
    """

    version: int
    flushed: Timestamp
    last_commit: Timestamp
    floor: Timestamp
    infos: tuple[RowSetInfo, ...]


def committed_state(cur: apsw.Cursor, tablet_id: int) -> Committed:
    """All of a tablet that is committed, as status.db has it now."""
    version, flushed, last, floor = one(
        cur,
        "SELECT manifest_version, coalesce((SELECT flushed_ts FROM held_parts WHERE kind = ? "
        "AND id = ?), flushed_ts), last_commit, history_floor FROM clock",
        (payload.TABLET, tablet_id),
    )
    found = [
        _info(values)
        for values in cur.execute(
            f"SELECT {_COLUMNS} FROM row_sets r WHERE r.tablet_id = ? AND r.state = ?",
            (tablet_id, COMMITTED),
        )
    ]
    found.extend(
        _info(values[:-1], values[-1])
        for values in cur.execute(
            f"SELECT {_COLUMNS}, t.commit_ts FROM transactions t JOIN row_sets r "
            "ON r.txn_id = t.txn_id AND r.tablet_id = ? WHERE t.state = ? "
            "AND r.state = ? AND r.counts",
            (tablet_id, int(TxnState.FINALIZE_IN_PROGRESS), STAGED),
        )
    )
    return Committed(
        version,
        Timestamp(flushed),
        Timestamp(last),
        Timestamp(floor),
        tuple(sorted(found, key=lambda i: i.id)),
    )


class Upto(NamedTuple):
    """A point in the own writes of a transaction: those before it are seen, and no later ones.

    Attributes:
        sequence: the number that was staged last.
        running: jobs that had not ended. When they do, some of what they staged may come to count
            below `sequence`.
    """

    sequence: int
    running: tuple[str, ...]

    def has(self, info: RowSetInfo) -> bool:
        """Tell whether a row set that counts did so at this point."""
        job = (info.attempt or "").partition("/")[0]
        return info.staged_seq <= self.sequence and job not in self.running


def upto_now(cur: apsw.Cursor, txn_id: int) -> Upto:
    """All that the transaction has staged until now."""
    return Upto(sequence(cur), jobs.not_ended(cur, txn_id))


class KnownKeys(NamedTuple):
    """Some keys in row sets that are known, by their ids.

    Attributes:
        numbers: of the row sets; those below `below` are known.
        may: numbers of those that may have one of the keys.
        positions: of the keys that one of them may have.
    """

    numbers: dict[int, int]
    below: int
    may: frozenset[int]
    positions: core.Rows

    def has(self, id: int) -> bool:
        """A row set is known."""
        return self.numbers.get(id, self.below) < self.below

    def lacks(self, id: int) -> bool:
        """A row set is known to have none of the keys."""
        return self.has(id) and self.numbers[id] not in self.may


class Sought(NamedTuple):
    """Keys that are looked for, the lowest, the highest, and what is known of them."""

    keys: core.Keys
    low: bytes
    high: bytes
    known: KnownKeys


def staged(
    cur: apsw.Cursor,
    txn_id: int,
    tablet_id: int,
    attempt: str | None = None,
    upto: Upto | None = None,
    sought: Sought | None = None,
) -> list[RowSetInfo]:
    """Row sets of an open transaction that count, and those of `attempt`.

    Args:
        upto: a point of the transaction: those before it alone.
        sought: those that may have some of these keys alone.
    """
    asked: tuple[Any, ...] = (txn_id, tablet_id, STAGED, attempt)
    meet = ""
    if sought is not None:
        asked, meet = (*asked, sought.low, sought.high), "AND r.max_key >= ? AND r.min_key <= ? "
    found = [
        _info(values)
        for values in cur.execute(
            f"SELECT {_COLUMNS} FROM row_sets r WHERE r.txn_id = ? AND r.tablet_id = ? "
            f"AND r.state = ? AND (r.counts OR r.attempt = ?) {meet}ORDER BY r.staged_seq",
            asked,
        )
        if sought is None or not sought.known.lacks(values[0])
    ]
    return found if upto is None else [info for info in found if upto.has(info)]


def readable(cur: apsw.Cursor, tablet_id: int) -> list[RowSetInfo]:
    """Every row set of a tablet whose blocks are all there, for checking."""
    return [
        _info(values)
        for values in cur.execute(
            f"SELECT {_COLUMNS} FROM row_sets r WHERE r.tablet_id = ? AND r.state IN (?, ?)",
            (tablet_id, STAGED, COMMITTED),
        )
    ]


def known_ids(cur: apsw.Cursor, tablet_id: int) -> set[int]:
    return {
        id for (id,) in cur.execute("SELECT id FROM row_sets WHERE tablet_id = ?", (tablet_id,))
    }


def is_swept(cur: apsw.Cursor, row_set_id: int) -> bool:
    """Return True when the blocks of a row set are being removed or are gone: it is forgotten, or
    its transaction is over for it.
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


def is_retired(cur: apsw.Cursor, row_set_id: int) -> bool:
    """Return True when a row set was replaced: its blocks are gone or about to go."""
    found = cur.execute("SELECT state FROM row_sets WHERE id = ?", (row_set_id,)).fetchone()
    return found is None or found[0] == RETIRED


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


def finalize(
    cur: apsw.Cursor, txn_id: int, commit_ts: Timestamp, tablet_ids: Iterable[int]
) -> None:
    """Give the rows in these tablets their plain stamp; keys to delete have done their work."""
    cur.executemany(
        "UPDATE row_sets SET state = ?, stamp = ?, min_stamp = ?, txn_id = NULL, job_id = NULL "
        "WHERE txn_id = ? AND tablet_id = ? AND state = ? AND counts AND kind = ?",
        [(COMMITTED, commit_ts, commit_ts, txn_id, id, STAGED, ROWS) for id in tablet_ids],
    )
    bump(cur)


# -- versions ----------------------------------------------------------------------------


def bump(cur: apsw.Cursor) -> int:
    """A new manifest version: what is committed, where it lies or what of it is deleted changed."""
    (version,) = one(
        cur,
        "UPDATE clock_row SET manifest_version = manifest_version + 1 RETURNING manifest_version",
    )
    return int(version)


def flushed(cur: apsw.Cursor) -> Timestamp:
    """Small commits at or below it are in row sets."""
    (stamp,) = one(cur, "SELECT flushed_ts FROM clock")
    return Timestamp(stamp)


def set_flushed(cur: apsw.Cursor, stamp: Timestamp) -> None:
    """Small commits at or below `stamp` are in row sets from now on; never goes back."""
    reach(cur, stamp)  # what is trimmed is at or below it, and no longer tells the last commit
    cur.execute("UPDATE clock_row SET flushed_ts = max(flushed_ts, ?)", (stamp,))


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
