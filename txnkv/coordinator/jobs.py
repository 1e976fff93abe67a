"""Jobs: work under a transaction that other processes do by its token.

A job (a Spark write, say) runs in tasks, and a task in attempts, of which some fail, are
retried or are run twice. What an attempt stages carries the attempt's name and counts for
nothing until the job is committed with the list of attempts that count. While a job runs
its transaction does not commit; once it has ended, nothing more is staged for it.

    RUNNING -> COMMITTED               no accepted attempt has sent messages
    RUNNING -> ENDING -> COMMITTED     their messages are appended to logs while it is ENDING
    RUNNING -> ABORTED
    COMMITTED -> REVOKED               Spark, say, took it for failed: no answer came

Who appends them may die in ENDING. Then some are in the logs and nobody goes on, so the
transaction can only be aborted, with all that is in them. So it can under a REVOKED job, which may
have been run again since: both would count.

What is done again and again, one transaction after the other, finds by its name the one that it
began last, and its job, also after all of its processes died.

    driver    begins 17 with a job, and names it:  "stream s" -> 17
              commits 17, begins 18, names it:     "stream s" -> 18
              dies
    driver'   begins 19 and names it:              "stream s" -> 19, and is told of 18: nobody
                                                   else goes on with that one, so it aborts it

A name stands until it is given anew, or its transaction is forgotten (`history` after its end).
"""

from __future__ import annotations

from typing import NamedTuple

import apsw

from txnkv.coordinator import status_table
from txnkv.coordinator.status_table import TxnRow, TxnState
from txnkv.errors import InvalidTxnStateError

RUNNING, ENDING, COMMITTED, ABORTED = "running", "ending", "committed", "aborted"
REVOKED = "revoked"


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


def may_end(cur: apsw.Cursor, txn_id: int, job_id: str, outcome: str) -> bool:
    """Tell whether a job is RUNNING; False when it has this outcome.

    Raises:
        InvalidTxnStateError: it is ENDING, ended with the other outcome, or is unknown.
    """
    found = state(cur, txn_id, job_id)
    if found == outcome:
        return False
    if found == REVOKED:
        raise revoked(txn_id, job_id)
    if found == ENDING:
        raise InvalidTxnStateError(
            f"job {job_id} is being committed, or who committed it broke off in the midst of it: "
            "the messages of its attempts may be in the logs in part. If nobody is at it, roll "
            f"transaction {txn_id} back, which takes them away; then run the job again"
        )
    if found != RUNNING:
        raise InvalidTxnStateError(f"job {job_id} is {found or 'unknown'}, not {RUNNING}")
    return True


def end(cur: apsw.Cursor, txn_id: int, job_id: str, outcome: str) -> bool:
    """RUNNING -> `outcome`. False when it ended so before.

    Raises:
        InvalidTxnStateError: as `may_end`.
    """
    found = may_end(cur, txn_id, job_id, outcome)
    if found:
        _set(cur, job_id, outcome)
    return found


def revoke(cur: apsw.Cursor, txn_id: int, job_id: str) -> bool:
    """COMMITTED -> REVOKED, under an OPEN transaction. False when it is not COMMITTED there."""
    if state(cur, txn_id, job_id) != COMMITTED:
        return False
    if status_table.get(cur, txn_id).state is not TxnState.OPEN:
        return False
    _set(cur, job_id, REVOKED)
    return True


def revoked(txn_id: int, job_id: str) -> InvalidTxnStateError:
    return InvalidTxnStateError(
        f"job {job_id} was committed, but whoever ran it was told that it failed: roll "
        f"transaction {txn_id} back, then run the job again"
    )


def ending(cur: apsw.Cursor, job_id: str) -> None:
    """RUNNING -> ENDING, for who asked `may_end` in the same transaction."""
    _set(cur, job_id, ENDING)


def ended(cur: apsw.Cursor, txn_id: int, job_id: str) -> None:
    """ENDING -> COMMITTED, by who made it ENDING.

    Raises:
        InvalidTxnStateError: it is not ENDING.
    """
    found = state(cur, txn_id, job_id)
    if found != ENDING:
        raise InvalidTxnStateError(f"job {job_id} is {found or 'unknown'}, not {ENDING}")
    _set(cur, job_id, COMMITTED)


def _set(cur: apsw.Cursor, job_id: str, state: str) -> None:
    cur.execute("UPDATE jobs SET state = ? WHERE id = ?", (state, job_id))


def not_ended(cur: apsw.Cursor, txn_id: int) -> tuple[str, ...]:
    """The ids of the jobs that are RUNNING or ENDING."""
    found = cur.execute(
        "SELECT id FROM jobs WHERE txn_id = ? AND state IN (?, ?) ORDER BY id",
        (txn_id, RUNNING, ENDING),
    )
    return tuple(id for (id,) in found)


def refuse_running(cur: apsw.Cursor, txn_id: int) -> None:
    """Refuse to commit under a job that has not ended.

    Raises:
        InvalidTxnStateError: a job still runs, its end broke off, or it was revoked.
    """
    found = dict(
        cur.execute(
            "SELECT id, state FROM jobs WHERE txn_id = ? AND state IN (?, ?, ?)",
            (txn_id, RUNNING, ENDING, REVOKED),
        )
    )
    running = [job for job, state in found.items() if state == RUNNING]
    if running:
        raise InvalidTxnStateError(
            f"cannot commit: transaction {txn_id} has a job that still runs: "
            f"{', '.join(running)}. Wait for it to end, or roll back"
        )
    for job in (job for job, state in found.items() if state == REVOKED):
        raise revoked(txn_id, job)
    if found:
        raise InvalidTxnStateError(
            f"cannot commit: transaction {txn_id} has a job that is being committed, or whose "
            f"commit broke off: {', '.join(found)}. Wait for it to end; if nobody is at it, roll "
            "back"
        )


class NamedRow(NamedTuple):
    """The transaction under a name, open or ended, and its job; "" where it has none."""

    row: TxnRow
    job_id: str


def find_named(cur: apsw.Cursor, name: str) -> NamedRow | None:
    """Return the transaction and job under a name; None when there is none."""
    found = cur.execute(
        "SELECT txn_id, job_id FROM named_transactions WHERE name = ?", (name,)
    ).fetchone()
    return None if found is None else NamedRow(status_table.get(cur, found[0]), found[1])


def names_below(cur: apsw.Cursor, beginning: str) -> list[str]:
    """Return names that begin so, of transactions that are open or were ended from outside."""
    begin_so = cur.execute(
        "SELECT name FROM named_transactions WHERE substr(name, 1, ?) = ?",
        (len(beginning), beginning),
    ).fetchall()
    found = {str(name): find_named(cur, str(name)) for (name,) in begin_so}
    return [name for name, it in found.items() if it and (it.row.error or not it.row.state.ended)]


def name_transaction(cur: apsw.Cursor, name: str, txn_id: int, job_id: str = "") -> NamedRow | None:
    """Give a stored transaction and its job a name. Answers what was under it."""
    before = find_named(cur, name)
    cur.execute(
        "INSERT OR REPLACE INTO named_transactions (name, txn_id, job_id) VALUES (?, ?, ?)",
        (name, txn_id, job_id),
    )
    return before
