"""The operations of YCSB, on txnkv, SQLite and RocksDB.

A record has a string key and ten string fields of 100 bytes, as in YCSB's core. A read takes all
fields, an update writes one of them. Every write is durable when it returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final

import apsw
import numpy as np
import pyarrow as pa

import txnkv

from .rocks import open_rocks, rocksdict, synced
from .row_stores import open_sqlite
from .zipfian import fnv64

FIELDS: Final = 10
LENGTH: Final = 100

_NAMES: Final = [f"field{number}" for number in range(FIELDS)]
_SCHEMA: Final = txnkv.Schema(
    {"ycsb_key": "string"} | dict.fromkeys(_NAMES, "string"), primary_key=["ycsb_key"]
)

Record = tuple[str, ...]


def keys_of(numbers: np.ndarray) -> list[str]:
    """YCSB's key of each record number."""
    return [f"user{number}" for number in fnv64(numbers).tolist()]


def records(first: int, count: int) -> pa.Table:
    """Keys and random printable fields of these records, the same for each store."""
    keys = keys_of(np.arange(first, first + count))
    size = count * LENGTH
    letters = np.random.default_rng(first).integers(32, 127, FIELDS * size, dtype=np.uint8)
    offsets = pa.py_buffer(np.arange(0, size + 1, LENGTH, dtype=np.int32))
    fields = [
        pa.StringArray.from_buffers(
            count, offsets, pa.py_buffer(letters[n * size : n * size + size])
        )
        for n in range(FIELDS)
    ]
    return pa.table([pa.array(keys), *fields], schema=_SCHEMA.arrow)


class YcsbStore(ABC):
    """Records by key. A handle belongs to one thread."""

    name: ClassVar[str]

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def for_thread(self) -> Iterator[YcsbStore]:
        """A handle for another thread."""
        yield self

    @abstractmethod
    def load(self, data: pa.Table) -> None:
        """Bring in new records."""

    @abstractmethod
    def read(self, key: str) -> Any:
        """All of a record's fields, in the form in which this store gives them."""

    @abstractmethod
    def update(self, key: str, field: int, value: str) -> None:
        """Write one field."""

    @abstractmethod
    def modify(self, key: str, field: int, value: str) -> None:
        """Read a record, then write one of its fields, as one step where the store can."""

    @abstractmethod
    def fields(self, key: str) -> Record:
        """A record's ten fields."""

    @abstractmethod
    def close(self) -> None:
        """Close; the files stay."""


class TxnkvYcsb(YcsbStore):
    name = "txnkv"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._client = txnkv.connect(path / "txnkv")
        self._table = self._client.create_table("usertable", _SCHEMA, exists_ok=True)

    def load(self, data: pa.Table) -> None:
        with self._client.transaction(timeout=None) as txn:
            txn.write(self._table, data)

    def read(self, key: str) -> Any:
        return self._table.get(key)

    def update(self, key: str, field: int, value: str) -> None:
        change = {"ycsb_key": key, _NAMES[field]: value}
        self._client.run(lambda txn: txn.update(self._table, change), attempts=1000)

    def modify(self, key: str, field: int, value: str) -> None:
        def work(txn: txnkv.Transaction) -> None:
            txn.get(self._table, key)
            txn.update(self._table, {"ycsb_key": key, _NAMES[field]: value})

        self._client.run(work, attempts=1000)

    def fields(self, key: str) -> Record:
        found = self._table.get(key)
        assert found is not None
        return tuple(found[name] for name in _NAMES)

    def close(self) -> None:
        self._client.close()


class SqliteYcsb(YcsbStore):
    """SQLite, WAL, synchronous FULL, a connection for each thread."""

    name = "sqlite"

    _READ: Final = f"SELECT {', '.join(_NAMES)} FROM usertable WHERE ycsb_key = ?"
    _UPDATES: Final = [f"UPDATE usertable SET {name} = ? WHERE ycsb_key = ?" for name in _NAMES]

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._db = open_sqlite(path / "sqlite.db")
        columns = ", ".join(f"{name} TEXT" for name in _NAMES)
        self._db.execute(
            f"CREATE TABLE IF NOT EXISTS usertable (ycsb_key TEXT PRIMARY KEY, {columns})"
        )

    @contextmanager
    def for_thread(self) -> Iterator[YcsbStore]:
        another = SqliteYcsb(self.path)
        try:
            yield another
        finally:
            another.close()

    def load(self, data: pa.Table) -> None:
        marks = ", ".join("?" * (FIELDS + 1))
        tuples = zip(*(column.to_pylist() for column in data.columns), strict=True)
        with self._db:
            self._db.executemany(f"INSERT INTO usertable VALUES ({marks})", tuples)
        self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)

    def read(self, key: str) -> Any:
        return self._db.execute(self._READ, (key,)).fetchone()

    def update(self, key: str, field: int, value: str) -> None:
        self._db.execute(self._UPDATES[field], (value, key))

    def modify(self, key: str, field: int, value: str) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        self.read(key)
        self.update(key, field, value)
        self._db.execute("COMMIT")

    def fields(self, key: str) -> Record:
        return tuple(self.read(key))

    def close(self) -> None:
        self._db.close()


class RocksYcsb(YcsbStore):
    """RocksDB, sync on. A record is one value; writes of a field put all of it, unprotected."""

    name = "rocksdb, rocksdict"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._db = open_rocks(path)

    def load(self, data: pa.Table) -> None:
        batch = rocksdict.WriteBatch(raw_mode=True)
        for key, *fields in zip(*(column.to_pylist() for column in data.columns), strict=True):
            batch.put(key.encode(), "".join(fields).encode())
        self._db.write(batch, synced(False))

    def read(self, key: str) -> Any:
        value = self._db.get(key.encode()).decode()
        return [value[at : at + LENGTH] for at in range(0, FIELDS * LENGTH, LENGTH)]

    def update(self, key: str, field: int, value: str) -> None:
        fields = self.read(key)
        fields[field] = value
        self._db.put(key.encode(), "".join(fields).encode())

    def modify(self, key: str, field: int, value: str) -> None:
        self.update(key, field, value)

    def fields(self, key: str) -> Record:
        return tuple(self.read(key))

    def close(self) -> None:
        self._db.close()


def ycsb_kinds() -> list[type[YcsbStore]]:
    """The contenders that are installed, txnkv first."""
    rocks: list[type[YcsbStore]] = [RocksYcsb] if rocksdict is not None else []
    return [TxnkvYcsb, SqliteYcsb, *rocks]
