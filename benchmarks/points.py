"""Reading and writing rows one by one on a large table."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import apsw
import numpy as np

from . import rows
from .harness import Contestant, Line, race
from .latency import Operation, race_each
from .rocks import rocksdict_kinds
from .row_stores import LmdbRows, RowStore, SqliteRows, TxnkvRows, opened, require_equal, warm

MANY = 1000


def get(there: int, count: int, rounds: int, base: Path | None) -> list[Line]:
    """Random keys of a large table, warm: present ones, missing ones, a thousand at a time.

    Args:
        there: rows of the table; its keys are the even numbers.
        count: reads a round.
        rounds: counted rounds.
        base: where the stores are made.
    """
    with opened([TxnkvRows, SqliteRows, LmdbRows, *rocksdict_kinds()], base) as stores:
        all_keys = np.arange(there) * 2
        for store in stores:
            store.load(all_keys)
        warm(stores, all_keys)
        _require_same_answers(stores, there)
        lines = race_each(
            f"get of {there:,} rows",
            [Operation(store.name, store.get, _keys(there, count)) for store in stores],
            rounds=rounds,
            ratios={"sqlite": 0.5},
        )
        missing = race_each(
            f"get of a missing key, {there:,} rows",
            [Operation(store.name, store.get, _keys(there, count, odd=True)) for store in stores],
            rounds=rounds,
        )
        own = missing[0]
        own.goal, own.reached = "below a present one's", own.rate > lines[0].rate
        return lines + missing + _get_many(stores, there, count, rounds)


def _keys(there: int, count: int, odd: bool = False) -> Callable[[int], list[int]]:
    def keys(number: int) -> list[int]:
        generator = np.random.default_rng(number)
        return (generator.integers(0, there, count) * 2 + odd).tolist()  # type: ignore[no-any-return]

    return keys


def _distinct(there: int, seed: int) -> list[int]:
    return [key * 2 for key in random.Random(seed).sample(range(there), MANY)]


def _require_same_answers(stores: list[RowStore], there: int) -> None:
    for key in [*_keys(there, 50)(0), *_keys(there, 50, odd=True)(0), -2, there * 2]:
        expected = rows.row(key) if key % 2 == 0 and 0 <= key < there * 2 else None
        for store in stores:
            if key >= 0 or isinstance(store, TxnkvRows | SqliteRows):
                assert store.as_row(store.get(key)) == expected, (store.name, key)


def _get_many(stores: list[RowStore], there: int, count: int, rounds: int) -> list[Line]:
    operations = [way for store in stores for way in _ways(store)]
    some = _distinct(there, 0)
    expected = [rows.row(key) for key in some]
    for name, many in operations:
        assert sorted(map(tuple, _as_rows(many(some)))) == sorted(expected), name

    def arguments(number: int) -> Iterable[list[int]]:
        return (_distinct(there, number * count + i) for i in range(max(count // MANY, 3)))

    return race_each(
        f"get_many of {MANY:,} of {there:,} rows, a row",
        [Operation(name, many, arguments) for name, many in operations],
        rounds=rounds,
        ratios={"sqlite, select by select": 5.0, "sqlite, IN (carray)": 5.0},
        each=MANY,
    )


def _ways(store: RowStore) -> list[tuple[str, Callable[[list[int]], Any]]]:
    """Return the ways in which a store reads many keys at once, each with its name."""
    if isinstance(store, TxnkvRows):
        return [("txnkv", store.table.get_many)]
    if isinstance(store, SqliteRows):
        db = store.db
        found = SqliteRows.GET.replace("= ?", "IN carray(?)")
        return [
            ("sqlite, select by select", lambda keys: [store.get(key) for key in keys]),
            (
                "sqlite, IN (carray)",
                lambda keys: db.execute(found, (apsw.carray(_numbers(keys)),)).fetchall(),
            ),
        ]
    return [(store.name, lambda keys: [store.get(key) for key in keys])]


def _numbers(keys: list[int]) -> np.ndarray:
    return np.array(keys, np.int64)


def _as_rows(found: Any) -> list[Any]:
    if isinstance(found, list):
        return found
    return list(zip(*(column.to_pylist() for column in found.columns), strict=True))


def executemany(count: int, rounds: int, base: Path | None) -> list[Line]:
    """Tuples one by one into a session and a commit, beside `executemany` in a transaction.

    Args:
        count: rows.
        rounds: counted rounds.
        base: where the stores are made.
    """
    lines = []
    for order in ("sorted", "random"):
        keys = np.arange(count)
        if order == "random":
            keys = np.random.default_rng(5).permutation(keys)
        tuples = [row for some in rows.chunks(keys) for row in some]
        with opened([TxnkvRows, SqliteRows], base) as stores:
            ours, sqlite = stores
            assert isinstance(ours, TxnkvRows)
            assert isinstance(sqlite, SqliteRows)
            lines += race(
                f"{count:,} tuples one by one, {order} keys",
                Contestant("txnkv", _inserts(ours, tuples), _emptied(ours)),
                [Contestant("sqlite executemany", _many(sqlite, tuples), _deleted(sqlite))],
                rounds=rounds,
                ratios={"sqlite executemany": 1.0},
            )
            require_equal(stores)
    return lines


def _inserts(store: TxnkvRows, tuples: list[rows.Row]) -> Callable[[], int]:
    def run() -> int:
        with store.client.transaction() as txn, txn.new_session() as session:
            insert, table = session.insert, store.table
            for row in tuples:
                insert(table, row)
        return len(tuples)

    return run


def _emptied(store: TxnkvRows) -> Callable[[], None]:
    def prepare() -> None:
        store.client.drop_table("t")
        store.table = store.client.create_table("t", rows.SCHEMA)

    return prepare


def _many(store: SqliteRows, tuples: list[rows.Row]) -> Callable[[], int]:
    def run() -> int:
        with store.db:
            store.db.executemany("INSERT INTO t VALUES (?, ?, ?, ?, ?)", tuples)
        return len(tuples)

    return run


def _deleted(store: SqliteRows) -> Callable[[], None]:
    def prepare() -> None:
        store.db.execute("DROP TABLE t")
        store.db.execute(store.CREATE)
        store.db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)

    return prepare
