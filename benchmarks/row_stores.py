"""Stores of single rows: txnkv, SQLite and LMDB; RocksDB is in `rocks`.

Each offers the same few operations, so that a race is written once. A handle belongs to one
thread; `for_thread` gives another one on the same store. Every `put` is durable when it returns.
"""

from __future__ import annotations

import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final, Self, cast

import apsw
import lmdb
import numpy as np

import txnkv

from . import rows
from .rows import Row

CACHE_BYTES: Final = 1 << 30
"""For peers with a cache of their own: enough for all that is read."""

_WARM_SHARE: Final = 20
_WARM_MOST: Final = 1_000_000


class RowStore(ABC):
    """Rows by key, in a directory.

    Attributes:
        name: in the table of results.
        many_processes: other processes may have it open at the same time.
    """

    name: ClassVar[str]
    many_processes: ClassVar[bool] = True

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def for_thread(self) -> Iterator[RowStore]:
        """A handle for another thread."""
        yield self

    @abstractmethod
    def load(self, keys: np.ndarray) -> None:
        """Bring in many new rows."""

    @abstractmethod
    def put(self, row: Row) -> None:
        """Write one row, new or not; durable on return."""

    @abstractmethod
    def get(self, key: int) -> Any:
        """A row, in the form in which this store gives it, or None."""

    @abstractmethod
    def all(self) -> list[Row]:
        """Every row, by key."""

    def as_row(self, found: Any) -> Row | None:
        """Return a row that `get` gave as a tuple; None stays None."""
        return cast("Row | None", found)

    @abstractmethod
    def close(self) -> None:
        """Close; the files stay."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TxnkvRows(RowStore):
    name = "txnkv"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.client = txnkv.connect(path / "txnkv")
        self.table = self.client.create_table("t", rows.SCHEMA, exists_ok=True)

    def load(self, keys: np.ndarray) -> None:
        with self.client.transaction(timeout=None) as txn:
            txn.write(self.table, rows.table(keys))

    def put(self, row: Row) -> None:
        with self.client.transaction() as txn:
            txn.upsert(self.table, row)

    def get(self, key: int) -> dict[str, Any] | None:
        return self.table.get(key)

    def as_row(self, found: Any) -> Row | None:
        return None if found is None else cast(Row, tuple(found.values()))

    def all(self) -> list[Row]:
        data = self.table.scan(ordered=True).to_arrow()
        return list(zip(*(column.to_pylist() for column in data.columns), strict=True))

    def close(self) -> None:
        self.client.close()


class SqliteRows(RowStore):
    """SQLite as it is made durable: WAL, synchronous FULL, a connection for each thread."""

    name = "sqlite"
    PUT: Final = "INSERT OR REPLACE INTO t VALUES (?, ?, ?, ?, ?)"
    GET: Final = "SELECT id, region, total, n, note FROM t WHERE id = ?"
    CREATE: Final = (
        "CREATE TABLE IF NOT EXISTS t"
        " (id INTEGER PRIMARY KEY, region TEXT, total REAL, n INTEGER, note TEXT)"
    )

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.db = open_sqlite(path / "sqlite.db")
        self.db.execute(self.CREATE)

    @contextmanager
    def for_thread(self) -> Iterator[RowStore]:
        with SqliteRows(self.path) as another:
            yield another

    def load(self, keys: np.ndarray) -> None:
        with self.db:
            for some in rows.chunks(keys):
                self.db.executemany("INSERT INTO t VALUES (?, ?, ?, ?, ?)", some)
        self.db.wal_checkpoint()

    def put(self, row: Row) -> None:
        self.db.execute(self.PUT, row)

    def get(self, key: int) -> Any:
        return self.db.execute(self.GET, (key,)).fetchone()

    def all(self) -> list[Row]:
        return cast("list[Row]", self.db.execute("SELECT * FROM t ORDER BY id").fetchall())

    def close(self) -> None:
        self.db.close()


def open_sqlite(file: Path) -> apsw.Connection:
    """A connection as durable as what it is compared with, with a large cache."""
    db = apsw.Connection(str(file))
    db.set_busy_timeout(120_000)
    db.pragma("journal_mode", "wal")
    db.pragma("synchronous", "FULL")
    db.pragma("cache_size", -CACHE_BYTES // 1024)
    db.pragma("mmap_size", 1 << 36)
    return db


class LmdbRows(RowStore):
    """LMDB with its default durability, by the binding that txnkv itself uses."""

    name = "lmdb"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.env = lmdb.open(str(path / "lmdb"), map_size=1 << 36, max_readers=256)

    def load(self, keys: np.ndarray) -> None:
        for some in rows.chunks(keys):
            with self.env.begin(write=True) as txn, txn.cursor() as cursor:
                cursor.putmulti((rows.pack_key(row[0]), rows.pack(row)) for row in some)

    def put(self, row: Row) -> None:
        with self.env.begin(write=True) as txn:
            txn.put(rows.pack_key(row[0]), rows.pack(row))

    def get(self, key: int) -> Any:
        with self.env.begin() as txn:
            value = txn.get(rows.pack_key(key))
        return None if value is None else rows.unpack(key, value)

    def all(self) -> list[Row]:
        with self.env.begin() as txn, txn.cursor() as cursor:
            return [rows.unpack(int.from_bytes(key, "big"), value) for key, value in cursor]

    def close(self) -> None:
        self.env.close()


@contextmanager
def opened(kinds: list[type[RowStore]], base: Path | None) -> Iterator[list[RowStore]]:
    """A store of each kind, in directories that go at the end."""
    with ExitStack() as stack:
        stores: list[RowStore] = []
        for kind in kinds:
            path = Path(tempfile.mkdtemp(prefix="txnkv-bench-", dir=base))
            stack.callback(shutil.rmtree, path, ignore_errors=True)
            stores.append(stack.enter_context(kind(path)))
        yield stores


def warm(stores: list[RowStore], keys: np.ndarray) -> None:
    """Read many of `keys` from all, so that what is read later is in memory and mapped.

    A page that is in memory but was never touched by this process still costs a page fault,
    which is more than the read that meets it.
    """
    chance = np.random.default_rng(99)
    some = chance.choice(keys, min(max(len(keys) // _WARM_SHARE, 100), _WARM_MOST)).tolist()
    for store in stores:
        for key in some:
            store.get(key)


def require_equal(stores: list[RowStore]) -> None:
    """All hold the same rows.

    Raises:
        AssertionError: one differs from the first.
    """
    first = stores[0].all()
    for store in stores[1:]:
        assert store.all() == first, f"{store.name} holds other rows than {stores[0].name}"
