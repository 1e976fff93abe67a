"""A run of a store whose outcome can be computed: several writers, each with keys of its own.

What a writer does in its n-th transaction follows from the seed alone, so whoever knows how many
of a writer's transactions were acknowledged knows the rows that must be there. Each transaction
touches both tables, and each value tells which transaction wrote it.

Writers are threads at first, then processes. Those that pipeline have several commits in flight;
they insert only, so that it does not matter in which order their transactions are done.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from json import dumps, loads
from random import Random
from typing import Final

import txnkv
from txnkv.tables import Operation

TABLES: Final = ("left", "right")
BRIEF: Final = "brief"
"""A table that is made, filled and dropped."""

BRIEF_ROWS: Final = 50
KEYS: Final = 1_000_000
"""The writer of a key is key // KEYS; from the last writer on keys are free."""

WINDOW: Final = 4
"""Commits that a pipelining writer has in flight."""

INSERT: Final = "insert"
UPSERT: Final = "upsert"
UPDATE: Final = "update"
DELETE: Final = "delete"
SCHEMA: Final = txnkv.Schema({"id": "int64", "text": "string?"}, primary_key=["id"])

Rows = dict[tuple[str, int], str]
"""The text of each row, by table and key."""


@dataclass(frozen=True)
class Write:
    """One change of one row; `text` is None for a delete."""

    op: Operation
    table: str
    id: int
    text: str | None


@dataclass(frozen=True)
class Transaction:
    """The work of a writer in one transaction.

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
    """The parameters of a run.

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
    operations: tuple[Operation, ...] = (INSERT, UPSERT, UPDATE, DELETE)
    bulk_rows: int = 300
    upkeep: int = 4
    history: float = 0.2

    @property
    def threads(self) -> int:
        """Writers that are threads; those that pipeline are the last of them."""
        return self.writers + self.pipelines

    @property
    def all_writers(self) -> int:
        """The number of writers; the processes are the last of them."""
        return self.threads + self.processes

    def pipelined(self, writer: int) -> bool:
        """Tell whether a writer has several commits in flight."""
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


# -- for a command line ------------------------------------------------------------------


def to_text(workload: Workload) -> str:
    """A workload for a command line."""
    return dumps(asdict(workload))


def from_text(text: str) -> Workload:
    """The workload of `to_text`."""
    fields = loads(text)
    return Workload(**{**fields, "operations": tuple(fields["operations"])})
