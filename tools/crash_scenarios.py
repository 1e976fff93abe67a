"""Scenarios of the crash driver: what its children do until they are killed.

A scenario is a function of the store's path (and a token, for one). It says on standard
output, line by line, what it was told is done: what it said has to be there afterwards. Row
sets are cut into small blocks and written in small batches here, so that little data passes
every fault point; and transactions of more than a few rows are large ones.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Final

import pyarrow as pa

import txnkv
from tools import (
    crash_alter,
    crash_applications,
    crash_jobs,
    crash_key_compaction,
    crash_logs,
    crash_plain,
    crash_producers,
    crash_side,
    crash_subscriptions,
    crash_topics,
)
from txnkv.client import admin
from txnkv.tables import arrow_input
from txnkv.tables.maintenance import history
from txnkv.tables.tablets import merging, row_set_format, row_set_writer
from txnkv.tables.write import write_buffer
from txnkv.transaction import Locking

TABLES: Final = ("left", "right")
TABLETS: Final = 4
ROWS: Final = 400
"""Rows that a scenario's transaction puts into each of the tables."""

BEFORE: Final = 40
"""Rows that are in each of the tables before."""

DELETED: Final = 20
TWICE: Final = 30
"""Rows that `replace` deletes, and those that it changes after it has added them."""

THREADS: Final = 8

ACKNOWLEDGED: Final = "acknowledged"


def say(*words: object) -> None:
    line = " ".join(map(str, words)) + "\n"
    os.write(sys.stdout.fileno(), line.encode())  # whole, whatever other threads say


def cut_small() -> None:
    """Make several chunks, blocks and LMDB writes of a few hundred rows."""
    arrow_input.CHUNK_ROWS = 250  # type: ignore[misc]
    row_set_format.BLOCK_ROWS = 32  # type: ignore[misc]
    row_set_writer.WRITE_BYTES = 512  # type: ignore[misc]
    write_buffer.MAX_ROWS = 100  # type: ignore[misc]


def stage_all() -> None:
    """Make every transaction that writes a large one."""
    write_buffer.MAX_ROWS = write_buffer.FEW_ROWS = -1  # type: ignore[misc]


def rows(first: int, count: int, word: str = "row") -> pa.Table:
    """Rows of the scenarios' tables, with keys from `first` on."""
    ids = range(first, first + count)
    texts = pa.array([f"{word} {i}" for i in ids])
    return pa.table({"id": pa.array(ids, pa.int64()), "text": texts})


def prepare(path: str) -> None:
    """Make a store with the two tables and the rows that are there before."""
    with txnkv.connect(path) as client:
        schema = txnkv.Schema({"id": "int64", "text": "string?"}, primary_key=["id"])
        for name in TABLES:
            client.create_table(name, schema, partition_by=txnkv.hash_partition("id", TABLETS))
        with client.transaction() as txn:
            for name in TABLES:
                txn.write(name, rows(0, BEFORE))
        crash_topics.prepare(client)
        client.instance.engine.flush()


def create(path: str) -> None:
    """Make a store."""
    with txnkv.connect(path):
        say(ACKNOWLEDGED)


def commit(path: str, *, locking: Locking = "optimistic") -> None:
    """Load both tables in one transaction and commit."""
    cut_small()
    client = txnkv.connect(path, create=False)
    txn = client.new_transaction(locking=locking)
    for name in TABLES:
        txn.write(name, rows(BEFORE, ROWS))
    txn.commit()
    say(ACKNOWLEDGED)


def commit_locked(path: str) -> None:
    """The same, with partition locks."""
    commit(path, locking="partition")


def commit_small(path: str) -> None:
    """The same rows in a transaction that stays small."""
    client = txnkv.connect(path, create=False)
    with client.transaction() as txn:
        for name in TABLES:
            txn.write(name, rows(BEFORE, ROWS))
    say(ACKNOWLEDGED)


def group(path: str) -> None:
    """Threads that commit one row in both tables each, again and again."""
    client = txnkv.connect(path, create=False)
    start = threading.Barrier(THREADS)

    def commit_rows(thread: int) -> None:
        start.wait()
        for number in range(ROWS // THREADS):
            id = BEFORE + number * THREADS + thread
            with client.transaction() as txn:
                for name in TABLES:
                    txn.insert(name, (id, f"row {id}"))
            say(ACKNOWLEDGED, id)

    threads = [threading.Thread(target=commit_rows, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def replace(path: str) -> None:
    """Change, delete and add rows of both tables in one transaction, some of them twice."""
    cut_small()
    client = txnkv.connect(path, create=False)
    txn = client.new_transaction()
    txn.serialize()  # all of it is staged
    for name in TABLES:
        txn.write(name, rows(0, BEFORE, "new"), "update")
        txn.write(name, rows(0, DELETED).select(["id"]), "delete")
        txn.write(name, rows(BEFORE, ROWS + DELETED), "upsert")
        txn.write(name, rows(BEFORE, TWICE, "new"), "update")
    txn.commit()
    say(ACKNOWLEDGED)


def replaced() -> pa.Table:
    """Return what `replace` leaves in each of the tables: as many rows as `commit` does."""
    new = rows(DELETED, BEFORE - DELETED + TWICE, "new")
    return pa.concat_tables([new, rows(BEFORE + TWICE, ROWS + DELETED - TWICE)])


def maintain(path: str) -> None:
    """Do what `replace` does, in two small transactions, each flushed; then compact all."""
    row_set_format.BLOCK_ROWS = 32  # type: ignore[misc]
    row_set_writer.WRITE_BYTES = 512  # type: ignore[misc]
    merging.LOADED_ROWS = 128  # type: ignore[misc]
    client = txnkv.connect(path, create=False, history=0.0)
    client.table(TABLES[1]).alter(history=0)  # a floor of its own rises beside that of the store
    with client.transaction() as txn:
        for name in TABLES:
            txn.write(name, rows(BEFORE, ROWS))
    say(ACKNOWLEDGED)
    # From here on: before it, the background would come to the points.
    admin.SLACK = admin.LEAST_BYTES = 0  # type: ignore[misc]
    history.KEEP_LOG = 0  # type: ignore[misc]
    client.instance.engine.flush()
    with client.transaction() as txn:
        for name in TABLES:
            txn.write(name, rows(0, BEFORE, "new"), "update")
            txn.write(name, rows(0, DELETED).select(["id"]), "delete")
            txn.write(name, rows(BEFORE + ROWS, DELETED), "insert")
            txn.write(name, rows(BEFORE, TWICE, "new"), "update")
    client.instance.engine.flush()
    client.compact()


def rollback(path: str) -> None:
    """Load one of the tables, change the other, and roll back."""
    cut_small()
    client = txnkv.connect(path, create=False)
    txn = client.new_transaction()
    txn.write(TABLES[0], rows(BEFORE, ROWS))
    txn.write(TABLES[1], rows(0, BEFORE, "new"), "update")
    txn.write(TABLES[1], rows(0, DELETED).select(["id"]), "delete")
    txn.rollback()
    say(ACKNOWLEDGED)


def recover(path: str) -> None:
    """Open the store, which finishes what a dead process left in a middle state."""
    with txnkv.connect(path, create=False):
        say(ACKNOWLEDGED)


def work(path: str, token: str) -> None:
    """Join a transaction by its token and load the first table."""
    cut_small()
    client = txnkv.connect(path, create=False)
    txnkv.Transaction.deserialize(client, token).write(TABLES[0], rows(BEFORE, ROWS))
    say(ACKNOWLEDGED)


def topics_commit(path: str) -> None:
    """A large transaction in topics and tables that commits, small ones in between."""
    crash_topics.load(path, say, _load, "commit")


def topics_rollback(path: str) -> None:
    """The same, rolled back."""
    crash_topics.load(path, say, _load, "rollback")


def _load(txn: txnkv.Transaction) -> None:
    for name in TABLES:
        txn.write(name, rows(BEFORE, ROWS))


def topics_alone(path: str) -> None:
    """Large transactions that send to one partition each."""
    crash_topics.alone(path, say)


def topics_small(path: str) -> None:
    """Small commits in topics, and flushes."""
    crash_topics.trickle(path, say)


def topics_widen(path: str) -> None:
    """Partitions are added to topics with subscriptions."""
    crash_topics.widen(path, say)


def topics_evolve(path: str) -> None:
    """Topics get other value schemas."""
    crash_topics.evolve(path, say)


def _write_task(session: txnkv.Session, task: int) -> None:
    cut_small()
    session.write(TABLES[task], rows(BEFORE, ROWS))


def log(path: str) -> None:
    """Change a partition's log, in every way there is."""
    crash_logs.change(path, say)


def side(path: str) -> None:
    """Send in large transactions to a topic with side logs; sweep, give up its beginning."""
    crash_side.change(path, say)


SCENARIOS: Final[dict[str, Callable[..., None]]] = {
    "create": create,
    "commit": commit,
    "commit_locked": commit_locked,
    "commit_small": commit_small,
    "group": group,
    "replace": replace,
    "rollback": rollback,
    "maintain": maintain,
    "recover": recover,
    "work": work,
    "log": log,
    "side": side,
    "topics_commit": topics_commit,
    "topics_rollback": topics_rollback,
    "topics_small": topics_small,
    "topics_alone": topics_alone,
    "topics_widen": topics_widen,
    "topics_evolve": topics_evolve,
    **{name: partial(do, say) for name, do in crash_alter.SCENARIOS.items()},
    **{name: partial(do, say) for name, do in crash_applications.SCENARIOS.items()},
    **crash_jobs.scenarios(say, _write_task),
    **{name: partial(do, say) for name, do in crash_plain.SCENARIOS.items()},
    **{name: partial(do, say) for name, do in crash_producers.SCENARIOS.items()},
    "hide": partial(crash_key_compaction.hide, say),
    **{name: partial(do, say) for name, do in crash_subscriptions.SCENARIOS.items()},
}
