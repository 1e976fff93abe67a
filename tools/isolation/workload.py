"""Random transactions on lists and registers, that record what they did.

    prepare(client)
    history = work(client, Load(session="t1", seed=1, isolation="serializable"))
    check([*history, *of_other_sessions, read_all(client)])

A list is a row of table `lists`, appended to by reading it and writing the longer one; a
register is a row of table `registers`, written unread. Few keys and many sessions: most
transactions meet another.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

import txnkv
from tools.isolation.histories import (
    Append,
    Op,
    Outcome,
    Read,
    ReadList,
    Recording,
    Txn,
    Write,
    record,
)
from txnkv.transaction import Isolation, Locking

__all__ = ["KEYS", "Load", "prepare", "read_all", "work"]

KEYS: Final = 6
"""Lists, and as many registers."""

_LISTS: Final = txnkv.Schema({"id": "int64", "values": "list<int64>"}, primary_key=["id"])
_REGISTERS: Final = txnkv.Schema({"id": "int64", "value": "int64"}, primary_key=["id"])
_ARROW: Final = {
    "lists": pa.schema([("id", pa.int64()), ("values", pa.list_(pa.int64()))]),
    "registers": pa.schema([("id", pa.int64()), ("value", pa.int64())]),
}
_KINDS: Final = {
    "rows": 10,  # written row by row
    "batch": 4,  # many keys, written as Arrow batches
    "large": 2,  # the same, staged as bulk loads are
    "locking": 1,  # with partition locks, staged too
    "reading": 3,  # a transaction that writes nothing
    "snapshot": 1,  # a snapshot of the client's
}


@dataclass(frozen=True)
class Load:
    """The work of one session.

    Attributes:
        session: its name, of all sessions alone.
        seed: of what it does; also what its values are made of, so of all sessions alone.
        isolation: of its transactions.
        transactions: how many it tries at most.
        seconds: when it stops, if it has done `least` by then.
        least: transactions that it commits however long that takes.
    """

    session: str
    seed: int
    isolation: Isolation
    transactions: int = 1000
    seconds: float = 2.0
    least: int = 20


def prepare(client: txnkv.Client) -> None:
    """Make the tables, each of two tablets."""
    client.create_table("lists", _LISTS, txnkv.hash_partition("id", 2))
    client.create_table("registers", _REGISTERS, txnkv.hash_partition("id", 2))


def work(client: txnkv.Client, load: Load) -> list[Txn]:
    """Do random transactions; what is told is their history. Each is tried once."""
    history: list[Txn] = []
    session = _Session(client, load)
    end = time.monotonic() + load.seconds
    while len(history) < load.transactions and (time.monotonic() < end or _few(history, load)):
        with record(history, load.session) as running:
            session.transaction(running)
    return history


def _few(history: list[Txn], load: Load) -> bool:
    return sum(txn.outcome is Outcome.COMMITTED for txn in history) < load.least


def read_all(client: txnkv.Client, name: str = "last") -> Txn:
    """A transaction that reads every key, when all others have ended."""
    history: list[Txn] = []
    with record(history, name) as running, client.snapshot() as snapshot:
        running.did(*_read_at(snapshot, range(KEYS)))
        running.snapshot = int(snapshot.timestamp)
        running.committed()
    return history[0]


class _Session:
    def __init__(self, client: txnkv.Client, load: Load) -> None:
        self._client = client
        self._load = load
        self._random = random.Random(load.seed)
        self._value = load.seed * 1_000_000

    def transaction(self, running: Recording) -> None:
        kind = self._random.choices([*_KINDS], [*_KINDS.values()])[0]
        if kind == "snapshot":
            with self._client.snapshot() as snapshot:
                running.snapshot = int(snapshot.timestamp)
                running.did(*_read_at(snapshot, self._keys()))
                running.committed()
            return
        locking: Locking = "partition" if kind == "locking" else "optimistic"
        txn = self._client.new_transaction(isolation=self._load.isolation, locking=locking)
        if kind == "large":
            txn.context.ensure_large()  # as if it had outgrown the small path
        try:
            for _ in range(self._random.randint(1, 4)):
                running.did(*self._step(txn, kind))
            running.snapshot = int(txn.snapshot)  # which locks may have moved until now
            stamp = int(txn.commit())
        except (
            txnkv.TransactionConflictError,
            txnkv.TransactionLockedError,
            txnkv.RowErrors,
        ):
            txn.rollback()
            running.aborted()
            return
        wrote = any(isinstance(op, Append | Write) for op in running.ops)
        running.committed(stamp if wrote else None)

    def _step(self, txn: txnkv.Transaction, kind: str) -> Iterator[Op]:
        """One call or a few; what they did comes when they have returned."""
        if kind == "reading" or self._random.random() < 0.4:
            yield from self._read(txn)
        elif kind == "rows":
            key = self._random.randrange(KEYS)
            if self._random.random() < 0.5:
                yield from self._append(txn, key)
            else:
                yield from self._write(txn, key)
        else:
            yield from self._write_many(txn, self._keys())

    def _keys(self) -> list[int]:
        return sorted(self._random.sample(range(KEYS), self._random.randint(1, KEYS)))

    def _new(self) -> int:
        self._value += 1
        return self._value

    # -- one row -----------------------------------------------------------------------

    def _append(self, txn: txnkv.Transaction, key: int) -> Iterator[Op]:
        found = txn.get("lists", key)
        value = self._new()
        row = {"id": key, "values": [*(found["values"] if found else []), value]}
        if self._random.random() < 0.3:
            (txn.update if found else txn.insert)("lists", row)
        else:
            txn.upsert("lists", row)
        yield Append(f"l{key}", value)

    def _write(self, txn: txnkv.Transaction, key: int) -> Iterator[Op]:
        value = self._new()
        if self._random.random() < 0.3:  # of the same effect, but it goes through a delete
            txn.delete_ignore("registers", key)
            txn.insert("registers", {"id": key, "value": value})
        else:
            txn.upsert("registers", {"id": key, "value": value})
        yield Write(f"r{key}", value)

    # -- many rows ---------------------------------------------------------------------

    def _write_many(self, txn: txnkv.Transaction, keys: list[int]) -> Iterator[Op]:
        values = [self._new() for _ in keys]
        if self._random.random() < 0.5:
            before = txn.get_many("lists", keys)["values"].to_pylist()
            after = [[*(old or []), value] for old, value in zip(before, values, strict=True)]
            txn.write("lists", pa.table([keys, after], schema=_ARROW["lists"]), "upsert")
            yield from (Append(f"l{key}", value) for key, value in zip(keys, values, strict=True))
        else:
            batch = pa.table([keys, values], schema=_ARROW["registers"])
            txn.write("registers", batch, "upsert")
            yield from (Write(f"r{key}", value) for key, value in zip(keys, values, strict=True))

    # -- reading -----------------------------------------------------------------------

    def _read(self, txn: txnkv.Transaction) -> Iterator[Op]:
        table = self._random.choice(["lists", "registers"])
        keys: Iterable[int]
        match self._random.choice(["get", "get_many", "range", "scan"]):
            case "get":
                key = self._random.randrange(KEYS)
                row = txn.get(table, key)
                keys, rows = [key], [] if row is None else [row]
            case "get_many":
                keys = self._keys()
                rows = [
                    row for row in txn.get_many(table, keys).to_pylist() if row["id"] is not None
                ]
            case "range":
                low, high = sorted(self._random.sample(range(KEYS + 1), 2))
                keys = range(low, high)
                where = [("id", ">=", low), ("id", "<", high)]
                rows = txn.scan(table, where=where).to_arrow().to_pylist()
            case _:
                keys, rows = range(KEYS), txn.scan(table).to_arrow().to_pylist()
        yield from _reads(table, keys, rows)


def _read_at(snapshot: txnkv.Snapshot, keys: Iterable[int]) -> Iterator[Op]:
    for table in ("lists", "registers"):
        rows = snapshot.scan(table).to_arrow().to_pylist()
        yield from _reads(table, keys, rows)


def _reads(table: str, keys: Iterable[int], rows: Iterable[dict[str, Any]]) -> Iterator[Op]:
    """Yield the read of each key, also where nothing was found."""
    found = {row["id"]: row for row in rows}
    for key in keys:
        row = found.get(key)
        if table == "lists":
            yield ReadList(f"l{key}", tuple(row["values"]) if row else ())
        else:
            yield Read(f"r{key}", row["value"] if row else None)
