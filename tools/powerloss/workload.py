"""A run of a store whose outcome can be computed: several writers, each with keys of its own.

What a writer does in its n-th transaction follows from the seed alone, so whoever knows how many
of a writer's transactions were acknowledged knows the rows that must be there. Each transaction
touches both tables, and each value tells which transaction wrote it.

Writers are threads at first, then processes. Those that pipeline have several commits in flight;
they insert only, so that it does not matter in which order their transactions are done.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from json import dumps, loads
from pathlib import Path
from random import Random
from typing import Any, Final

import pyarrow as pa

import txnkv
from tools.crash_scenarios import cut_small
from tools.powerloss.recording import mark
from txnkv import compacting

TABLES: Final = ("left", "right")
BRIEF: Final = "brief"
"""A table that is made, filled and dropped."""

BRIEF_ROWS: Final = 50
KEYS: Final = 1_000_000
"""The writer of a key is key // KEYS; from the last writer on keys are free."""

WINDOW: Final = 4
"""Commits that a pipelining writer has in flight."""

INSERT, UPSERT, UPDATE, DELETE = "insert", "upsert", "update", "delete"
SCHEMA: Final = txnkv.Schema({"id": "int64", "text": "string?"}, primary_key=["id"])

Rows = dict[tuple[str, int], str]
"""The text of each row, by table and key."""


@dataclass(frozen=True)
class Write:
    """One change of one row; `text` is None for a delete."""

    op: str
    table: str
    id: int
    text: str | None


@dataclass(frozen=True)
class Transaction:
    """What a writer does in one transaction.

    Attributes:
        bulk: written by Arrow batch, one for each table and operation; else row by row.
        commits: it is rolled back otherwise.
    """

    number: int
    writes: tuple[Write, ...]
    bulk: bool
    commits: bool


@dataclass(frozen=True)
class Workload:
    """What a run does.

    Attributes:
        writers: threads of one process, that write at the same time.
        pipelines: further writers in threads, with several commits in flight.
        processes: further writers, each a process, that write at the same time afterwards.
        transactions: of each writer.
        operations: of rows.
        bulk_rows: of a bulk transaction.
        upkeep: after so many transactions the first writer flushes, compacts and checkpoints.
        history: seconds for which versions are kept.
    """

    seed: int = 1
    writers: int = 3
    pipelines: int = 0
    processes: int = 0
    transactions: int = 12
    operations: tuple[str, ...] = (INSERT, UPSERT, UPDATE, DELETE)
    bulk_rows: int = 300
    upkeep: int = 4
    history: float = 0.2

    @property
    def threads(self) -> int:
        """Writers that are threads; those that pipeline are the last of them."""
        return self.writers + self.pipelines

    @property
    def all_writers(self) -> int:
        """How many there are; the processes are the last of them."""
        return self.threads + self.processes

    def pipelined(self, writer: int) -> bool:
        """Whether a writer has several commits in flight."""
        return self.writers <= writer < self.threads


# -- what is to be done ----------------------------------------------------------------


@cache
def history(workload: Workload, writer: int) -> tuple[tuple[Transaction, ...], tuple[Rows, ...]]:
    """A writer's transactions, and its rows after the first 0, 1, 2, ... of them."""
    random = Random(f"{workload.seed} {writer}")
    rows: list[Rows] = [{}]
    transactions = []
    fresh = writer * KEYS
    pipelined = workload.pipelined(writer)
    for number in range(workload.transactions):
        bulk = random.random() < 0.25 and not pipelined
        count = workload.bulk_rows if bulk else random.randint(1, 4)
        writes: list[Write] = []
        for table in TABLES:
            op = INSERT if pipelined else random.choice(workload.operations)
            here = sorted(id for name, id in rows[-1] if name == table)
            ids = list(range(fresh, fresh + count))
            if op in (UPDATE, DELETE):
                ids = sorted(random.sample(here, min(count, len(here))))
            elif op == UPSERT:
                ids = sorted({*ids, *random.sample(here, min(count // 2, len(here)))})
            fresh += count
            # Long and short ones, so that rows and payloads cross pages in many ways.
            filler = "." * random.choice((0, 10, 300))
            writes += [
                Write(op, table, id, None if op == DELETE else f"{writer}/{number}/{id}{filler}")
                for id in ids
            ]
        commits = pipelined or random.random() < 0.85
        transaction = Transaction(number, tuple(writes), bulk, commits)
        transactions.append(transaction)
        rows.append(_after(rows[-1], transaction))
    return tuple(transactions), tuple(rows)


def _after(rows: Rows, transaction: Transaction) -> Rows:
    after = dict(rows)
    for write in transaction.writes if transaction.commits else ():
        if write.text is None:
            del after[write.table, write.id]
        else:
            after[write.table, write.id] = write.text
    return after


# -- doing it, in the recorded process -------------------------------------------------


def run(store: Path, workload: Workload) -> None:
    """The whole run; marks say what was acknowledged."""
    _cut_small()
    with txnkv.connect(store, history=workload.history) as client:
        mark("store")
        for table, tablets in zip(TABLES, (2, 1), strict=True):
            client.create_table(table, SCHEMA, partition_by=txnkv.hash_partition("id", tablets))
            mark(f"table {table}")
        with ThreadPoolExecutor(workload.threads) as pool:
            # All begin at once, so that they commit together.
            start = threading.Barrier(workload.threads)
            for done in [
                pool.submit(_thread, client, workload, writer, start)
                for writer in range(workload.threads)
            ]:
                done.result()
        _brief(client)
        keep_up(client)
    _processes(store, workload)
    with txnkv.connect(store, create=False, history=workload.history) as client:
        keep_up(client)


def _cut_small() -> None:
    """Make little data do what much data does: several chunks and blocks, files that shrink."""
    cut_small()
    compacting.LEAST_BYTES = 0  # type: ignore[misc]


def recover(state: Path, root: Path, store: Path, workload: Workload) -> None:
    """Another run: a state that a power loss left is put into the root, opened and tidied up."""
    _cut_small()
    copy_durably(state, root)
    mark("put")
    with txnkv.connect(store, history=workload.history) as client:
        keep_up(client)


def copy_durably(source: Path, target: Path) -> None:
    """Copies what is in a folder into one that is there, and syncs all of it."""
    for entry in sorted(source.iterdir()):
        copied = target / entry.name
        if entry.is_dir():
            copied.mkdir(mode=0o700)
            copy_durably(entry, copied)
        else:
            copied.write_bytes(entry.read_bytes())
            copied.chmod(0o600)
            _sync(copied)
    _sync(target)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _thread(
    client: txnkv.Client, workload: Workload, writer: int, start: threading.Barrier
) -> None:
    start.wait()
    if workload.pipelined(writer):
        _pipeline(client, workload, writer)
    else:
        write(client, workload, writer)


def write(client: txnkv.Client, workload: Workload, writer: int) -> None:
    """All transactions of one writer."""
    for transaction in history(workload, writer)[0]:
        fill = _filling(transaction)
        if transaction.commits:
            client.run(fill)
        else:
            txn = client.new_transaction()
            fill(txn)
            txn.rollback()
        mark(f"done {writer} {transaction.number}")
        if writer == 0 and transaction.number % workload.upkeep == workload.upkeep - 1:
            keep_up(client)


def _pipeline(client: txnkv.Client, workload: Workload, writer: int) -> None:
    flying: deque[tuple[int, Future[txnkv.Timestamp]]] = deque()
    for transaction in history(workload, writer)[0]:
        txn = client.new_transaction()
        _filling(transaction)(txn)
        flying.append((transaction.number, txn.commit_async()))
        if len(flying) == WINDOW:
            _land(writer, *flying.popleft())
    for number, commit in flying:
        _land(writer, number, commit)


def _land(writer: int, number: int, commit: Future[txnkv.Timestamp]) -> None:
    commit.result()
    mark(f"done {writer} {number}")


def _filling(transaction: Transaction) -> Callable[[txnkv.Transaction], object]:
    groups: dict[tuple[str, str], list[Write]] = {}
    for write in transaction.writes:
        groups.setdefault((write.op, write.table), []).append(write)

    def fill(txn: txnkv.Transaction) -> None:
        for (op, table), writes in groups.items():
            if transaction.bulk:
                txn.write(table, _batch(op, writes), op=op)
                continue
            for each in writes:
                key_or_row = each.id if op == DELETE else {"id": each.id, "text": each.text}
                getattr(txn, op)(table, key_or_row)

    return fill


def _batch(op: str, writes: list[Write]) -> pa.Table:
    columns: dict[str, Any] = {"id": pa.array([write.id for write in writes], pa.int64())}
    if op != DELETE:
        columns["text"] = pa.array([write.text for write in writes])
    return pa.table(columns)


def keep_up(client: txnkv.Client) -> None:
    """What the leader does now and then: rounds, flush, checkpoints, compaction, collection."""
    instance = client.instance
    instance.coordinator.maintenance.round(resume_all=True)
    instance.engine.flush()
    instance.store.status.checkpoint(cut=False)
    client.compact()
    instance.store.status.checkpoint()


def _brief(client: txnkv.Client) -> None:
    client.create_table(BRIEF, SCHEMA)
    mark(f"table {BRIEF}")
    with client.transaction() as txn:
        txn.write(BRIEF, pa.table({"id": pa.array(range(BRIEF_ROWS), pa.int64())}))
    mark(f"filled {BRIEF}")
    client.drop_table(BRIEF)
    mark(f"dropped {BRIEF}")


def _processes(store: Path, workload: Workload) -> None:
    code = "import sys\nfrom tools.powerloss.workload import process\nprocess(*sys.argv[1:])"
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(store), to_text(workload), str(writer)])
        for writer in range(workload.threads, workload.all_writers)
    ]
    for each in started:
        if each.wait() != 0:
            raise RuntimeError(f"a writing process ended with {each.returncode}")


def process(store: str, workload: str, writer: str) -> None:
    """What a further process does; arguments as texts."""
    _cut_small()
    does = from_text(workload)
    with txnkv.connect(store, create=False, history=does.history) as client:
        write(client, does, int(writer))


def to_text(workload: Workload) -> str:
    """A workload for a command line."""
    return dumps(asdict(workload))


def from_text(text: str) -> Workload:
    """The workload of `to_text`."""
    fields = loads(text)
    return Workload(**{**fields, "operations": tuple(fields["operations"])})
