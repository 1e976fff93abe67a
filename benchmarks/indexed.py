"""A table with one index: written, and rows looked for by it, beside SQLite's index."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import apsw
import numpy as np

from . import rows
from .harness import Contestant, Line, race
from .latency import Operation, race_each
from .row_stores import SqliteRows, TxnkvRows, opened, require_equal

KEY = "what there is to say of {}"


def indexed(there: int, count: int, rounds: int, base: Path | None) -> list[Line]:
    """Rows with a unique index by a text of some 30 bytes.

    Args:
        there: rows of the table; its keys are the even numbers.
        count: operations of a round.
        rounds: counted rounds.
        base: where the stores are made.
    """
    with opened([TxnkvRows, SqliteRows], base) as stores:
        ours, sqlite = stores
        assert isinstance(ours, TxnkvRows)
        assert isinstance(sqlite, SqliteRows)
        keys = np.arange(there) * 2
        lines = race(
            f"insert {there:,} rows and their entries",
            Contestant("txnkv", _loads(ours, keys), lambda: _anew(ours)),
            [Contestant("sqlite", _loads(sqlite, keys), lambda: _anew_sqlite(sqlite))],
            rounds=rounds,
            ratios={"sqlite": 1.0},
        )
        require_equal(stores)
        lines += _lookups(ours, sqlite, there, count, rounds)
        lines += _single_writes(ours, sqlite, count, rounds)
        require_equal(stores)
        assert ours.client.check().ok
    return lines


def _anew(store: TxnkvRows) -> None:
    store.client.drop_table("t")
    store.table = store.client.create_table("t", rows.SCHEMA)
    store.client.create_index("t", "note", unique=True)


def _anew_sqlite(store: SqliteRows) -> None:
    store.db.execute("DROP TABLE t")
    store.db.execute(store.CREATE)
    store.db.execute("CREATE UNIQUE INDEX by_note ON t (note)")
    store.db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)


def _loads(store: TxnkvRows | SqliteRows, keys: np.ndarray) -> Callable[[], int]:
    def run() -> int:
        store.load(keys)
        return len(keys)

    return run


def _lookups(
    ours: TxnkvRows, sqlite: SqliteRows, there: int, count: int, rounds: int
) -> list[Line]:
    by_note = SqliteRows.GET.replace("id = ?", "note = ?")

    def find(note: str) -> Any:
        return ours.table.get_by("note", note)

    def find_in_sqlite(note: str) -> Any:
        return sqlite.db.execute(by_note, (note,)).fetchall()

    def notes(number: int) -> Iterable[str]:
        generator = np.random.default_rng(number)
        return [KEY.format(key * 2) for key in generator.integers(0, there, count)]

    for note in [*notes(0)[:50], "nothing"]:  # type: ignore[index]
        found = [tuple(row.values()) for row in find(note)]
        assert found == find_in_sqlite(note), note
    return race_each(
        f"look for one of {there:,} rows by an index",
        [Operation("txnkv", find, notes), Operation("sqlite", find_in_sqlite, notes)],
        rounds=rounds,
        ratios={"sqlite": 0.5},
    )


def _single_writes(ours: TxnkvRows, sqlite: SqliteRows, count: int, rounds: int) -> list[Line]:
    def new(number: int) -> Iterable[rows.Row]:
        first = 2 * number * count + 1
        return (rows.row(key) for key in itertools.islice(itertools.count(first, 2), count))

    def put_in_sqlite(row: rows.Row) -> None:
        with sqlite.db:
            sqlite.db.execute("INSERT INTO t VALUES (?, ?, ?, ?, ?)", row)

    def put(row: rows.Row) -> None:
        with ours.client.transaction() as txn:
            txn.insert(ours.table, row)

    return race_each(
        "insert a row and its entry, durable",
        [Operation("txnkv", put, new), Operation("sqlite", put_in_sqlite, new)],
        rounds=rounds,
        ratios={"sqlite": 0.5},
    )
