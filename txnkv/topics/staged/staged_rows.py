"""Staged files in status.db: whose they are, and how much of each counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import apsw

from txnkv.coordinator import jobs, status_table
from txnkv.storage import boot_id

KIND: Final = "staged"
"""The kind of the participant that has a transaction's files removed at an abort; its id is 0."""

_COLUMNS: Final = "id, txn_id, job_id, attempt, bytes, boot"


class StagedFile(NamedTuple):
    """A row of `staged_sends`.

    Attributes:
        id: names the file.
        txn_id: of the transaction.
        job_id: of the job.
        attempt: as row sets name it: job and attempt.
        bytes: at the beginning of the file, that count.
        boot: in which it was written.
    """

    id: int
    txn_id: int
    job_id: str
    attempt: str
    bytes: int
    boot: str


def register(cur: apsw.Cursor, txn_id: int, job_id: str, attempt: str) -> StagedFile:
    """Note a new file, of which nothing counts yet.

    Raises:
        TxnNotFoundError, InvalidTxnStateError: the transaction is not OPEN, or its job ended.
    """
    require_running(cur, txn_id, job_id)
    status_table.register_participant(cur, txn_id, KIND, [0])
    boot = boot_id()
    cur.execute(
        "INSERT INTO staged_sends (txn_id, job_id, attempt, boot) VALUES (?, ?, ?, ?)",
        (txn_id, job_id, attempt, boot),
    )
    return StagedFile(cur.connection.last_insert_rowid(), txn_id, job_id, attempt, 0, boot)


def count(cur: apsw.Cursor, file: StagedFile, upto: int) -> None:
    """From now on so many bytes of the file count.

    Raises:
        TxnNotFoundError, InvalidTxnStateError: as for `register`.
    """
    require_running(cur, file.txn_id, file.job_id)
    cur.execute("UPDATE staged_sends SET bytes = ? WHERE id = ?", (upto, file.id))


def require_running(cur: apsw.Cursor, txn_id: int, job_id: str) -> None:
    """Refuse a session that comes too late.

    Raises:
        TxnNotFoundError, InvalidTxnStateError: the transaction is not OPEN, or its job ended.
    """
    status_table.get_open(cur, txn_id, "send messages")
    jobs.require_running(cur, txn_id, job_id)


def of_attempts(cur: apsw.Cursor, txn_id: int, attempts: Sequence[str]) -> list[StagedFile]:
    """Files of which something counts: by attempt in this order, then as they were begun."""
    if not attempts or not _any(cur, txn_id):
        return []
    found: dict[str, list[StagedFile]] = {}
    for file in _select(cur, "txn_id = ? AND bytes > 0", (txn_id,)):
        found.setdefault(file.attempt, []).append(file)
    return [file for attempt in attempts for file in found.get(attempt, ())]


def of_job(cur: apsw.Cursor, txn_id: int, job_id: str) -> list[StagedFile]:
    return _select(cur, "txn_id = ? AND job_id = ?", (txn_id, job_id))


def of_transaction(cur: apsw.Cursor, txn_id: int) -> list[StagedFile]:
    return _select(cur, "txn_id = ?", (txn_id,))


def all_files(cur: apsw.Cursor) -> list[StagedFile]:
    return _select(cur, "1", ())


def wanted(cur: apsw.Cursor) -> list[StagedFile]:
    """Those whose job may still take them: all others are garbage, and stay so."""
    return _select(
        cur,
        "EXISTS (SELECT 1 FROM jobs WHERE jobs.id = job_id AND jobs.state IN (?, ?)) AND "
        "EXISTS (SELECT 1 FROM transactions t WHERE t.txn_id = staged_sends.txn_id "
        "AND t.state NOT IN (2, 4))",
        (jobs.RUNNING, jobs.ENDING),
    )


def forget(cur: apsw.Cursor, files: Iterable[StagedFile]) -> None:
    """Forget files that are gone; with the last one the transaction's participant."""
    gone = list(files)
    cur.executemany("DELETE FROM staged_sends WHERE id = ?", [(file.id,) for file in gone])
    for txn_id in {file.txn_id for file in gone}:
        if not _any(cur, txn_id):
            cur.execute("DELETE FROM participants WHERE txn_id = ? AND kind = ?", (txn_id, KIND))


def _any(cur: apsw.Cursor, txn_id: int) -> bool:
    found = cur.execute("SELECT 1 FROM staged_sends WHERE txn_id = ? LIMIT 1", (txn_id,))
    return found.fetchone() is not None


def _select(cur: apsw.Cursor, where: str, bindings: tuple[object, ...]) -> list[StagedFile]:
    found = cur.execute(f"SELECT {_COLUMNS} FROM staged_sends WHERE {where} ORDER BY id", bindings)
    return [StagedFile(*row) for row in found]
