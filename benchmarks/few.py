"""Ten rows that belong together, as a service asks for them, beside SQLite: by the beginning of
their key, and by an index.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import txnkv

from .harness import Line
from .latency import Operation, race_each
from .row_stores import open_sqlite

EACH = 10
"""Orders of a customer, and orders of a day."""

SCHEMA = txnkv.Schema(
    {"customer": "int64", "id": "int64", "day": "string", "total": "int64"},
    primary_key=["customer", "id"],
)
_CREATE = (
    "CREATE TABLE orders (customer INTEGER, id INTEGER, day TEXT, total INTEGER,"
    " PRIMARY KEY (customer, id)) WITHOUT ROWID; CREATE INDEX by_day ON orders (day)"
)


def few(there: int, count: int, rounds: int, base: Path | None) -> list[Line]:
    """Orders of one customer, all and the first three; the number of them; those of one day.

    Args:
        there: orders in the table.
        count: questions of a round.
        rounds: counted rounds.
        base: where the stores are made.
    """
    some = there // EACH
    with (
        tempfile.TemporaryDirectory(dir=base) as path,
        txnkv.connect(Path(path) / "txnkv") as client,
        closing(open_sqlite(Path(path) / "sqlite.db")) as db,
    ):
        orders = client.create_table("orders", SCHEMA)
        client.create_index("orders", "day")
        data = _orders(there)
        with client.transaction(timeout=None) as txn:
            txn.write(orders, data)
        db.execute(_CREATE)
        with db:
            tuples = zip(*(column.to_pylist() for column in data.columns), strict=True)
            db.executemany("INSERT INTO orders VALUES (?, ?, ?, ?)", tuples)
        lines: list[Line] = []
        for title, by_day, ours, sql in _questions(orders):

            def theirs(of: Any, sql: str = sql) -> list[Any]:
                return db.execute(sql, (of,)).fetchall()

            asked = _days(some, count) if by_day else _customers(some, count)
            lines += _race(title, ours, theirs, asked, rounds)
    return lines


def _orders(there: int) -> pa.Table:
    ids = np.arange(there)
    days = np.char.add("day ", (ids % (there // EACH)).astype(str))
    return pa.table(
        {"customer": ids // EACH, "id": ids % EACH, "day": days.astype(object), "total": ids},
        schema=SCHEMA.arrow,
    )


def _questions(orders: txnkv.Table) -> list[tuple[str, bool, Callable[[Any], Any], str]]:
    def of(customer: int) -> list[tuple[str, str, int]]:
        return [("customer", "=", customer)]

    def large(customer: int) -> list[tuple[str, str, int]]:
        return [*of(customer), ("total", ">", 0)]

    return [
        (
            f"{EACH} rows by the beginning of their key",
            False,
            lambda customer: list(orders.scan(where=of(customer))),
            "SELECT * FROM orders WHERE customer = ?",
        ),
        (
            "the first 3 of them",
            False,
            lambda customer: list(orders.scan(where=of(customer), ordered=True, limit=3)),
            "SELECT * FROM orders WHERE customer = ? ORDER BY id LIMIT 3",
        ),
        (
            "those of them with another condition",
            False,
            lambda customer: list(orders.scan(where=large(customer))),
            "SELECT * FROM orders WHERE customer = ? AND total > 0",
        ),
        (
            "how many they are",
            False,
            lambda customer: [(orders.count(of(customer)),)],
            "SELECT COUNT(*) FROM orders WHERE customer = ?",
        ),
        (
            f"{EACH} rows by an index",
            True,
            lambda day: orders.get_by("day", day),
            "SELECT * FROM orders WHERE day = ?",
        ),
    ]


def _customers(some: int, count: int) -> Callable[[int], Iterable[Any]]:
    def asked(number: int) -> Iterable[Any]:
        found: list[int] = np.random.default_rng(number).integers(0, some, count).tolist()
        return found

    return asked


def _days(some: int, count: int) -> Callable[[int], Iterable[Any]]:
    customers = _customers(some, count)
    return lambda number: [f"day {customer}" for customer in customers(number)]


def _race(
    title: str,
    ours: Callable[[Any], Any],
    theirs: Callable[[Any], list[Any]],
    asked: Callable[[int], Iterable[Any]],
    rounds: int,
) -> list[Line]:
    for of in list(asked(0))[:20]:
        found = [tuple(row.values()) if isinstance(row, dict) else row for row in ours(of)]
        assert sorted(found) == sorted(theirs(of)), (title, of)
    return race_each(
        title,
        [Operation("txnkv", ours, asked), Operation("sqlite", theirs, asked)],
        rounds=rounds,
    )
