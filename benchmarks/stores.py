"""The contestants' databases, each in a directory of its own that goes with it."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Self

import apsw
import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

import txnkv

from .data import SCHEMA


class Store:
    """A database in a temporary directory."""

    def __init__(self, base: Path | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="txnkv-bench-", dir=base))

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TxnkvStore(Store):
    def __init__(self, base: Path | None = None) -> None:
        super().__init__(base)
        self.client = txnkv.connect(self.path / "store")
        self.table = self.client.create_table("t", SCHEMA)

    def insert(self, data: Any) -> int:
        with self.client.transaction(timeout=None) as txn:
            return txn.write(self.table, data).inserted

    def empty(self) -> None:
        self.client.drop_table("t", missing_ok=True)
        self.table = self.client.create_table("t", SCHEMA)

    def close(self) -> None:
        self.client.close()
        super().close()


class DuckStore(Store):
    """DuckDB with a primary key, its two threads, durable at COMMIT."""

    def __init__(self, base: Path | None = None) -> None:
        super().__init__(base)
        self.db = duckdb.connect(str(self.path / "duck.db"))
        self.empty()

    def insert(self, data: pa.Table) -> int:
        self.db.register("incoming", data)
        self.db.execute("BEGIN; INSERT INTO t SELECT * FROM incoming; COMMIT; CHECKPOINT")
        self.db.unregister("incoming")
        return len(data)

    def empty(self) -> None:
        self.db.execute("DROP TABLE IF EXISTS t")
        self.db.execute("CREATE TABLE t (id BIGINT PRIMARY KEY, x DOUBLE, n BIGINT)")

    def scan(self, where: str = "") -> pa.Table:
        return self.db.sql(f"SELECT * FROM t {where}").to_arrow_table()

    def stream(self) -> pa.RecordBatchReader:
        """The rows as batches of 64 Ki, of which none is kept."""
        return self.db.sql("SELECT * FROM t").to_arrow_reader(1 << 16)

    def close(self) -> None:
        self.db.close()
        super().close()


class SqliteStore(Store):
    """SQLite, WAL, synchronous FULL, rows by executemany in one transaction."""

    def __init__(self, base: Path | None = None) -> None:
        super().__init__(base)
        self.db = apsw.Connection(str(self.path / "sqlite.db"))
        self.db.pragma("journal_mode", "wal")
        self.db.pragma("synchronous", "FULL")
        self.empty()

    def insert(self, rows: list[tuple[Any, ...]]) -> int:
        with self.db:
            self.db.executemany("INSERT INTO t VALUES (?, ?, ?)", rows)
        return len(rows)

    def empty(self) -> None:
        self.db.execute("DROP TABLE IF EXISTS t")
        self.db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, x REAL, n INTEGER)")

    def close(self) -> None:
        self.db.close()
        super().close()


class ParquetStore(Store):
    """A Parquet file: no keys, no transactions; what the disk and Arrow can do."""

    def insert(self, data: pa.Table) -> int:
        file = self.path / "t.parquet"
        pq.write_table(data, file, compression="none", use_dictionary=False)
        with file.open("rb+") as handle:
            os.fsync(handle.fileno())
        return len(data)

    def scan(self) -> pa.Table:
        return pq.read_table(self.path / "t.parquet")
