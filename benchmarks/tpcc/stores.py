"""Doing TPC-C's transactions in txnkv and in SQLite."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import apsw
import pyarrow as pa

import txnkv
from benchmarks.row_stores import open_sqlite

from .schema import TABLES
from .transactions import Key, Rollback, Transaction


class TpccStore(ABC):
    """The tables in a store. A handle belongs to one thread."""

    name: ClassVar[str]

    @contextmanager
    def for_thread(self) -> Iterator[TpccStore]:
        """A handle for another thread."""
        yield self

    @abstractmethod
    def load(self, table: str, data: pa.Table) -> None:
        """Bring in rows of a table."""

    @abstractmethod
    def run(self, transaction: Transaction) -> None:
        """Do it, durably; again when it conflicts. A `Rollback` undoes it and is no error."""

    @abstractmethod
    def all(self, table: str) -> pa.Table:
        """A table, sorted by key."""

    @abstractmethod
    def close(self) -> None:
        """Close; the files stay."""


class TxnkvTpcc(TpccStore):
    name = "txnkv"

    def __init__(self, path: Path) -> None:
        self._client = txnkv.connect(path / "txnkv")
        self._tables = {
            name: self._client.create_table(name, schema, exists_ok=True)
            for name, schema in TABLES.items()
        }

    def load(self, table: str, data: pa.Table) -> None:
        with self._client.transaction(timeout=None) as txn:
            txn.write(self._tables[table], data)

    def run(self, transaction: Transaction) -> None:
        with suppress(Rollback):
            self._client.run(
                lambda txn: transaction.run(_TxnkvWork(txn, self._tables)), attempts=1000
            )

    def all(self, table: str) -> pa.Table:
        return self._tables[table].scan(ordered=True).to_arrow()

    def close(self) -> None:
        self._client.close()


class _TxnkvWork:
    def __init__(self, txn: txnkv.Transaction, tables: dict[str, txnkv.Table]) -> None:
        self._txn, self._tables = txn, tables

    def get(self, table: str, key: Key, *columns: str) -> tuple[Any, ...] | None:
        handle = self._tables[table]
        found = self._txn.get(handle, key if len(key) > 1 else key[0])
        return None if found is None else tuple([found[name] for name in columns])

    def insert(self, table: str, *row: Any) -> None:
        self._txn.insert(self._tables[table], row)

    def update(self, table: str, key: Key, **changes: Any) -> None:
        columns = zip(TABLES[table].primary_key, key, strict=True)
        self._txn.update(self._tables[table], dict(columns) | changes)

    def named(self, warehouse: int, district: int, last: str) -> list[int]:
        where = [("c_w_id", "=", warehouse), ("c_d_id", "=", district), ("c_last", "=", last)]
        names = self._txn.scan(
            self._tables["customer_name"], columns=["c_id"], where=where, ordered=True
        )
        return [row["c_id"] for row in names]


class SqliteTpcc(TpccStore):
    """SQLite, WAL, synchronous FULL, a connection for each thread, an index by name."""

    name = "sqlite"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db = open_sqlite(path / "sqlite.db")
        for name, schema in TABLES.items():
            columns = ", ".join(
                f"{field.name} {'TEXT' if field.type == pa.string() else 'INTEGER'}"
                for field in schema.arrow
            )
            key = ", ".join(schema.primary_key)
            self._db.execute(f"CREATE TABLE IF NOT EXISTS {name} ({columns}, PRIMARY KEY ({key}))")
        self._work = _SqliteWork(self._db)

    @contextmanager
    def for_thread(self) -> Iterator[TpccStore]:
        another = SqliteTpcc(self._path)
        try:
            yield another
        finally:
            another.close()

    def load(self, table: str, data: pa.Table) -> None:
        marks = ", ".join("?" * data.num_columns)
        tuples = zip(*(column.to_pylist() for column in data.columns), strict=True)
        with self._db:
            self._db.executemany(f"INSERT INTO {table} VALUES ({marks})", tuples)

    def run(self, transaction: Transaction) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            transaction.run(self._work)
        except Rollback:
            self._db.execute("ROLLBACK")
        else:
            self._db.execute("COMMIT")

    def all(self, table: str) -> pa.Table:
        schema = TABLES[table]
        key = ", ".join(schema.primary_key)
        found = self._db.execute(f"SELECT * FROM {table} ORDER BY {key}").fetchall()
        columns = zip(*found, strict=True) if found else [()] * len(schema.arrow)
        pairs = zip(columns, schema.arrow, strict=True)
        return pa.table(
            [pa.array(values, field.type) for values, field in pairs],
            schema=schema.arrow,
        )

    def close(self) -> None:
        self._db.close()


class _SqliteWork:
    def __init__(self, db: apsw.Connection) -> None:
        self._db = db
        self._texts: dict[tuple[str, ...], str] = {}

    def get(self, table: str, key: Key, *columns: str) -> tuple[Any, ...] | None:
        text = self._texts.get((table, *columns))
        if text is None:
            text = f"SELECT {', '.join(columns)} FROM {table} WHERE {_is_key(table)}"
            self._texts[table, *columns] = text
        return self._db.execute(text, key).fetchone()

    def insert(self, table: str, *row: Any) -> None:
        text = self._texts.get((table,))
        if text is None:
            marks = ", ".join("?" * len(row))
            text = self._texts[table,] = f"INSERT INTO {table} VALUES ({marks})"
        self._db.execute(text, row)

    def update(self, table: str, key: Key, **changes: Any) -> None:
        text = self._texts.get(("update", table, *changes))
        if text is None:
            sets = ", ".join(f"{name} = ?" for name in changes)
            text = f"UPDATE {table} SET {sets} WHERE {_is_key(table)}"
            self._texts["update", table, *changes] = text
        self._db.execute(text, (*changes.values(), *key))

    def named(self, warehouse: int, district: int, last: str) -> list[int]:
        found = self._db.execute(
            "SELECT c_id FROM customer_name WHERE c_w_id = ? AND c_d_id = ? AND c_last = ?"
            " ORDER BY c_first, c_id",
            (warehouse, district, last),
        )
        return [customer for (customer,) in found]


def _is_key(table: str) -> str:
    return " AND ".join(f"{name} = ?" for name in TABLES[table].primary_key)
