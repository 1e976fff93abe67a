"""Jobs under the crash driver: attempts that write rows and send messages, of which some count.

Each partition of the topics has all messages of the named attempts, in their order, if the rows
are there, and nothing of any attempt if not; no staged file is left.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import pyarrow as pa

import txnkv
from tools.crash_topics import ACKNOWLEDGED, TOPICS, committed, partitions
from txnkv.topics.write import staged_sends
from txnkv.transaction.job import Job

MESSAGES: Final = 6
"""Messages of an attempt, to each partition."""

Say = Callable[..., None]
Write = Callable[[txnkv.Session, int], None]
"""Has an attempt write its rows, by the number of its task."""

ATTEMPTS: Final = ("1.1", "0.0")
"""In the order in which they count."""


def load(path: str, say: Say, write: Write, end: str) -> None:
    """Two tasks, one of them tried twice; small commits in between.

    Args:
        path: of the store.
        say: takes what is acknowledged.
        write: has an attempt write rows.
        end: "commit"; "rollback"; "abort" of the job, then the rows are written without it.
    """
    staged_sends.FRAME_BYTES = 256  # type: ignore[misc]
    staged_sends.APPEND_BYTES = 1200  # type: ignore[misc]
    client = txnkv.connect(path, create=False)
    txn = client.new_transaction()
    job = Job.start(txn)
    for attempt in ("0.0", "1.0", "1.1"):
        with job.session(attempt) as session:
            for topic in TOPICS:
                session.send_batch(topic, _messages(attempt, 0, MESSAGES // 2))
                for i in range(MESSAGES // 2, MESSAGES):
                    for number in range(2):
                        session.send(topic, _message(attempt, i), partition=number)
            write(session, int(attempt[0]))
    if end == "commit":
        job.commit(ATTEMPTS)
        txn.commit()
    elif end == "rollback":
        txn.rollback()
    else:
        job.abort()
        with txn.new_session() as session:
            for task in range(2):
                write(session, task)
        txn.commit()
    say(ACKNOWLEDGED)


def _messages(attempt: str, first: int, count: int) -> pa.Table:
    both = [(number, i) for i in range(first, first + count) for number in range(2)]
    return pa.table(
        {
            "value": [_message(attempt, i) for _, i in both],
            "partition": [number for number, _ in both],
        }
    )


def _message(attempt: str, i: int) -> bytes:
    return b"%s message %d" % (attempt.encode(), i)


def examine(there: bool, client: txnkv.Client) -> list[str]:
    """List what is wrong.

    Args:
        there: the messages are to be there.
        client: of the store.
    """
    wanted = [b"before"]
    if there:
        wanted += [_message(attempt, i) for attempt in ATTEMPTS for i in range(MESSAGES)]
    problems = []
    for each in partitions(client):
        values = committed(client, each)
        if values != wanted:
            problems.append(f"{each.label} has {values}, not {wanted}")
    folder = client.instance.topics.staged.folder
    if folder.exists():
        problems += [f"staged file {file.name} is left" for file in folder.iterdir()]
    with client.instance.store.status.read() as cur:
        for (id,) in cur.execute("SELECT id FROM staged_sends"):
            problems.append(f"staged file {id} is in status.db")
        for (id,) in cur.execute(
            "SELECT jobs.id FROM jobs JOIN transactions t USING (txn_id) "
            "WHERE t.state = 4 AND jobs.state IN ('running', 'ending')"
        ):
            problems.append(f"job {id} of a committed transaction has not ended")
    return problems


def scenarios(say: Say, write: Write) -> dict[str, Callable[[str], None]]:
    """By name."""
    return {
        "job": partial(load, say=say, write=write, end="commit"),
        "job_rollback": partial(load, say=say, write=write, end="rollback"),
        "job_abort": partial(load, say=say, write=write, end="abort"),
    }
