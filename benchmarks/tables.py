"""Bulk insert and scan of 24-byte rows, beside DuckDB, SQLite and Parquet."""

from __future__ import annotations

from pathlib import Path

from .data import ascending, even, shuffled_odd
from .harness import Contestant, Line, race
from .stores import DuckStore, ParquetStore, SqliteStore, TxnkvStore


def insert_sorted(rows: int, rounds: int, base: Path | None) -> list[Line]:
    """Ascending keys into an empty table, durable."""
    data = ascending(0, rows)
    few = data.slice(0, max(rows // 10, 1))
    tuples = list(zip(*(column.to_pylist() for column in few.columns), strict=True))
    with (
        TxnkvStore(base) as ours,
        DuckStore(base) as duck,
        SqliteStore(base) as sqlite,
        ParquetStore(base) as parquet,
    ):
        lines = race(
            f"insert {rows:,} rows, sorted keys",
            Contestant("txnkv", lambda: ours.insert(data), ours.empty),
            [
                Contestant("duckdb, primary key", lambda: duck.insert(data), duck.empty),
                Contestant("sqlite executemany", lambda: sqlite.insert(tuples), sqlite.empty),
                Contestant("parquet file, no key", lambda: parquet.insert(data)),
            ],
            rounds=rounds,
            at_least=10e6,
            ratios={"duckdb, primary key": 4.0, "sqlite executemany": 10.0},
        )
        assert ours.table.count() == rows
        assert duck.scan().num_rows == rows
    return lines


def insert_random(rows: int, rounds: int, base: Path | None) -> list[Line]:
    """Random keys into a table that holds as many, each checked against them."""
    there = even(rows)
    data = shuffled_odd(rows, seed=1)
    with TxnkvStore(base) as ours, DuckStore(base) as duck:

        def prepare_ours() -> None:
            ours.empty()
            ours.insert(there)

        def prepare_duck() -> None:
            duck.empty()
            duck.insert(there)

        lines = race(
            f"insert {rows:,} rows, random keys, {rows:,} there",
            Contestant("txnkv", lambda: ours.insert(data), prepare_ours),
            [Contestant("duckdb, primary key", lambda: duck.insert(data), prepare_duck)],
            rounds=rounds,
            at_least=3e6,
        )
        assert ours.table.count() == 2 * rows
    return lines


def scan(rows: int, rounds: int, base: Path | None) -> list[Line]:
    """All rows to Arrow, and 1% of the keys."""
    data = ascending(0, rows)
    with TxnkvStore(base) as ours, DuckStore(base) as duck, ParquetStore(base) as parquet:
        for store in (ours, duck, parquet):
            store.insert(data)
        assert ours.table.scan(ordered=True).to_arrow().equals(data)
        low, high = rows // 2, rows // 2 + max(rows // 100, 1)
        part = [("id", ">=", low), ("id", "<", high)]
        lines = race(
            f"scan {rows:,} rows to Arrow",
            Contestant("txnkv", lambda: ours.table.scan().to_arrow().num_rows),
            [
                Contestant("duckdb", lambda: duck.scan().num_rows),
                Contestant("parquet file", lambda: parquet.scan().num_rows),
            ],
            rounds=rounds,
            at_least=100e6,
            ratios={"duckdb": 5.0},
        )
        streamed = race(
            f"scan {rows:,} rows, batch by batch",
            Contestant("txnkv", lambda: sum(b.num_rows for b in ours.table.scan().to_batches())),
            [Contestant("duckdb", lambda: sum(b.num_rows for b in duck.stream()))],
            rounds=rounds,
            at_least=100e6,
            ratios={"duckdb": 5.0},
        )
        by_key = race(
            f"scan 1% of {rows:,} rows by key",
            Contestant("txnkv", lambda: ours.table.scan(where=part).to_arrow().num_rows),
            [
                Contestant(
                    "duckdb",
                    lambda: duck.scan(f"WHERE id >= {low} AND id < {high}").num_rows,
                )
            ],
            rounds=max(rounds, 5),
        )
        assert ours.table.count(where=part) == high - low
    seconds = {
        "whole": rows / lines[0].rate,
        "part": (high - low) / by_key[0].rate,
    }
    share = seconds["part"] / seconds["whole"]
    by_key[0].extra = {"time of the 1% over time of all": f"{share:.3f}"}
    return lines + streamed + by_key
