"""Jobs: work under a transaction that other processes do by its token.

A job (a Spark write, say) runs in tasks, and a task in attempts, of which some fail, are
retried or are run twice. What an attempt stages carries the attempt's name and counts for
nothing until the job is committed with the list of attempts that count. While a job runs
its transaction does not commit; once it has ended, nothing more is staged for it.
"""

from __future__ import annotations

import apsw

from txnkv.coordinator import status_table
from txnkv.errors import InvalidTxnStateError

RUNNING, COMMITTED, ABORTED = "running", "committed", "aborted"


def start(cur: apsw.Cursor, txn_id: int, job_id: str) -> None:
    """Record that a job runs under an OPEN transaction."""
    status_table.get_open(cur, txn_id, "start a job")
    cur.execute("INSERT INTO jobs (id, txn_id, state) VALUES (?, ?, ?)", (job_id, txn_id, RUNNING))


def state(cur: apsw.Cursor, txn_id: int, job_id: str) -> str | None:
    found = cur.execute(
        "SELECT state FROM jobs WHERE id = ? AND txn_id = ?", (job_id, txn_id)
    ).fetchone()
    return None if found is None else str(found[0])


def require_running(cur: apsw.Cursor, txn_id: int, job_id: str) -> None:
    """Refuse an attempt of a job that ended.

    Raises:
        InvalidTxnStateError: the job is not running under this transaction.
    """
    found = state(cur, txn_id, job_id)
    if found != RUNNING:
        raise InvalidTxnStateError(
            f"job {job_id} is {found or 'unknown'}, so this attempt of one of its tasks came "
            "too late; nothing of it is staged"
        )


def end(cur: apsw.Cursor, txn_id: int, job_id: str, outcome: str) -> bool:
    """RUNNING -> `outcome`. True also when it ended so before.

    Raises:
        InvalidTxnStateError: it ended with the other outcome, or is unknown.
    """
    found = state(cur, txn_id, job_id)
    if found == outcome:
        return False
    if found != RUNNING:
        raise InvalidTxnStateError(f"job {job_id} is {found or 'unknown'}, not {RUNNING}")
    cur.execute("UPDATE jobs SET state = ? WHERE id = ?", (outcome, job_id))
    return True


def refuse_running(cur: apsw.Cursor, txn_id: int) -> None:
    """Refuse to commit under a running job.

    Raises:
        InvalidTxnStateError: a job still runs.
    """
    running = [
        job
        for (job,) in cur.execute(
            "SELECT id FROM jobs WHERE txn_id = ? AND state = ?", (txn_id, RUNNING)
        )
    ]
    if running:
        raise InvalidTxnStateError(
            f"cannot commit: transaction {txn_id} has a job that still runs: "
            f"{', '.join(running)}. Wait for it to end, or roll back"
        )
