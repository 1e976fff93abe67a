"""Checks of a store after a power loss, given what the run was told before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import txnkv
from tools.powerloss.workload import (
    BRIEF,
    BRIEF_ROWS,
    KEYS,
    SCHEMA,
    TABLES,
    WINDOW,
    Rows,
    Transaction,
    Workload,
    history,
)
from txnkv.errors import TxnkvError


@dataclass
class Promised:
    """All that was acknowledged before the power went.

    Attributes:
        words: all marks but those of transactions.
        done: of each writer: how many of its transactions; they are acknowledged in order.
        seen: transactions that a reader saw, as writer and number.
    """

    words: set[str] = field(default_factory=set)
    done: dict[int, int] = field(default_factory=dict)
    seen: set[tuple[int, int]] = field(default_factory=set)

    @classmethod
    def by(cls, marks: list[tuple[int, str]], cut: int) -> Promised:
        """Return what the marks before a cut say."""
        promised = cls()
        for position, line in marks:
            if position >= cut:
                continue
            match line.split():
                case ["done", writer, number]:
                    promised.done[int(writer)] = int(number) + 1
                case ["saw", writer, number]:
                    promised.seen.add((int(writer), int(number)))
                case _:
                    promised.words.add(line)
        return promised


def is_volatile(path: str) -> bool:
    """Tell whether a file, by its path below the recorded root, is void after a power loss.

    LMDB's lock file, SQLite's shared memory, the lock on which writers queue, and runtime/: all
    of them are made anew by whoever opens the store first.
    """
    parts = path.split("/")
    return "runtime" in parts or parts[-1] in _VOID


_VOID = ("lock.mdb", "status.lock", "maintenance.lock", "status.db-shm")


def examine(store: Path, workload: Workload, promised: Promised) -> list[str]:
    """Opens a store that a power loss left and tells all that is wrong with it, a line each.

    Every acknowledged transaction is wholly there, every other one wholly or not at all, `check`
    finds no damage, recovery changes nothing of what was read before, and the store takes writes.
    """
    try:
        with txnkv.connect(store, create="store" not in promised.words) as client:
            return list(_problems(client, workload, promised))
    except TxnkvError as error:
        return [f"opening: {type(error).__name__}: {error}"]


def _problems(client: txnkv.Client, workload: Workload, promised: Promised) -> Iterator[str]:
    there = client.tables()
    for table in TABLES:
        if table not in there and f"table {table}" in promised.words:
            yield f"table {table} is gone"
    yield from _brief(client, promised, BRIEF in there)
    there = [table for table in TABLES if table in there]
    found = _read(client, there)
    yield from _wrong_rows(found, workload, promised)
    yield from (f"check: {problem}" for problem in client.check().problems)
    client.instance.coordinator.maintenance.round(resume_all=True)
    if _read(client, there) != found:
        yield "other rows are there after recovery than before"
    yield from _new_writes(client, workload, there, found)
    yield from (f"check at the end: {problem}" for problem in client.check().problems)


def _brief(client: txnkv.Client, promised: Promised, there: bool) -> Iterator[str]:
    made, filled, dropped = (f"{what} {BRIEF}" in promised.words for what in _BRIEF_MARKS)
    if there and dropped:
        yield f"table {BRIEF} is there again"
    if made and not there and not filled:
        yield f"table {BRIEF} is gone"
    if there:
        count = client.table(BRIEF).count()
        if count != BRIEF_ROWS and (filled or count != 0):
            yield f"table {BRIEF} has {count} rows"


_BRIEF_MARKS = ("table", "filled", "dropped")


def _read(client: txnkv.Client, tables: list[str]) -> Rows:
    rows: Rows = {}
    for table in tables:
        read = client.table(table).scan().to_arrow()
        for id, text in zip(read["id"].to_pylist(), read["text"].to_pylist(), strict=True):
            if (table, id) in rows:
                rows[table, -1 - id] = "a second row of the same key"
            rows[table, id] = text
    return rows


def _wrong_rows(found: Rows, workload: Workload, promised: Promised) -> Iterator[str]:
    by_writer: dict[int, Rows] = {writer: {} for writer in range(workload.all_writers)}
    for (table, id), text in found.items():
        by_writer.setdefault(id // KEYS, {})[table, id] = text
    for writer, rows in by_writer.items():
        if writer not in range(workload.all_writers):
            yield f"rows that nobody wrote: {list(rows.items())[:3]}"
            continue
        transactions, states = history(workload, writer)
        done = promised.done.get(writer, 0)
        seen = {number for by, number in promised.seen if by == writer}
        if workload.pipelined(writer):
            flying = transactions[done : done + WINDOW]
            possible = _with_flying(states[done], flying, rows, seen)
        else:
            # A writer's next transaction begins when the one before is done.
            least = max(done, *(number + 1 for number in seen), 0)
            possible = list(states[least : done + 2])
        if rows not in possible:
            wrong = _difference(rows, possible[0])
            yield (
                f"writer {writer} was told that {done} transactions are done, and of others "
                f"{sorted(seen)} were seen, but {wrong}"
            )


def _with_flying(
    rows: Rows, flying: Sequence[Transaction], found: Rows, seen: set[int]
) -> list[Rows]:
    """The rows with those of the transactions in flight that show in the first row they insert."""
    rows = dict(rows)
    for transaction in flying:
        inserted = {(write.table, write.id): write.text or "" for write in transaction.writes}
        if transaction.number in seen or next(iter(inserted)) in found:
            rows |= inserted
    return [rows]


def _difference(rows: Rows, expected: Rows) -> str:
    missing = sorted(expected.items() - rows.items())
    surplus = sorted(rows.items() - expected.items())
    return (
        f"{len(missing)} of {len(expected)} rows are missing, as {missing[:2]}, and "
        f"{len(surplus)} are there instead or besides, as {surplus[:2]}"
    )


def _new_writes(
    client: txnkv.Client, workload: Workload, tables: list[str], found: Rows
) -> Iterator[str]:
    if not tables:
        client.create_table(TABLES[0], SCHEMA)
        tables = [TABLES[0]]
    id = workload.all_writers * KEYS
    new: Rows = {(table, id): "new" for table in tables}
    with client.transaction() as txn:
        for table in tables:
            txn.insert(table, {"id": id, "text": "new"})
            old = next((key for name, key in found if name == table), None)
            if old is not None:
                txn.update(table, {"id": old, "text": "changed"})
                new[table, old] = "changed"
    if _read(client, tables) != {**found, **new}:
        yield "new writes do not show, or show in other rows"
