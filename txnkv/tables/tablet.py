"""A tablet: one partition of a table, its LMDB environment and its row sets."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import apsw
import lmdb
import pyarrow as pa

from txnkv import core
from txnkv.coordinator.clock import latest_snapshot
from txnkv.coordinator.ids import Timestamp
from txnkv.storage.environment import Environment
from txnkv.storage.store import Store
from txnkv.tables import manifest
from txnkv.tables.catalog import TableInfo
from txnkv.tables.fence import FENCE_DB
from txnkv.tables.manifest import RowSetInfo
from txnkv.tables.row_set import RowSet
from txnkv.tables.row_set_format import BLOOM, COLUMNS, KEYS

BLOCKS_DB = b"blocks"


LARGE_CHECK: Final = 16 << 20
LARGE_READ: Final = 128 << 20
"""A check against, or a scan of, more bytes than this gives the pages back that it is
done with: else a large table would fill the process's resident memory with LMDB's map."""


@dataclass(frozen=True)
class Pages:
    """A read transaction on a tablet's environment, with the handle of its blocks.

    Attributes:
        seen: the values read, when they are to be given back.
    """

    txn: lmdb.Transaction
    blocks: Any
    seen: list[memoryview] | None

    def get(self, key: bytes) -> memoryview | None:
        """The value of an LMDB key as it lies in the map: valid inside the transaction alone."""
        value: memoryview | None = self.txn.get(key, db=self.blocks)  # type: ignore[assignment]
        if self.seen is not None and value is not None:
            self.seen.append(value)
        return value


class Tablet:
    """One tablet in this process. Shared by threads.

    Committed row sets are remembered by commit timestamp: what committed at or below a
    timestamp never changes, so only what came later is asked for.
    """

    def __init__(self, store: Store, table: TableInfo, number: int) -> None:
        self.id = table.tablets[number]
        self.number = number
        self.table = table
        self.schema = table.schema
        self.codec = core.KeyCodec(table.schema.key_types)
        self._store = store
        self._lock = threading.Lock()
        self._infos: list[RowSetInfo] = []
        self._stamps: list[int] = []
        self._upto = Timestamp(0)
        self._row_sets: dict[int, RowSet] = {}

    # -- names for messages ------------------------------------------------------------

    @property
    def store_path(self) -> str:
        return str(self._store.directory.path)

    @property
    def label(self) -> str:
        return f"table {self.table.name!r}, tablet {self.id}"

    def section_name(self, section: int) -> str:
        if section >= COLUMNS:
            for name, id in self.schema.ids.items():
                if id == section - COLUMNS:
                    return repr(name)
        return {KEYS: "key", BLOOM: "Bloom filter"}.get(section, f"section {section}")

    # -- storage -----------------------------------------------------------------------

    def environment(self, *, create: bool = False) -> Environment:
        """The tablet's environment, with its databases opened.

        Opened outside of a transaction: one that began before could not use them.
        """
        environment = self._store.environments.get(f"tablets/{self.id}", create=create)
        environment.db(BLOCKS_DB)
        environment.db(FENCE_DB)
        return environment

    @property
    def blocks_db(self) -> Any:
        """The handle of the blocks, for the LMDB transaction this thread is in."""
        return self.environment().db(BLOCKS_DB)

    @contextmanager
    def read(self, *, once: bool = False) -> Iterator[Pages]:
        """A read transaction; short, for it keeps pages from being used again.

        Args:
            once: what is read is not needed again soon: give its memory back.
        """
        environment = self.environment()
        with environment.read() as txn:
            pages = Pages(txn, environment.db(BLOCKS_DB), [] if once else None)
            yield pages
            for value in pages.seen or ():
                core.release_pages(value)

    @property
    def fence_db(self) -> Any:
        return self.environment().db(FENCE_DB)

    # -- row sets ----------------------------------------------------------------------

    def visible(self, snapshot: Timestamp) -> list[RowSetInfo]:
        """The row sets that are committed at `snapshot`, in the order of their commits."""
        with self._lock:
            if snapshot > self._upto:
                self._catch_up()
            return self._infos[: bisect_right(self._stamps, snapshot)]

    def committed_between(
        self, cur: apsw.Cursor, after: Timestamp, upto: Timestamp
    ) -> list[RowSetInfo]:
        """What committed with after < timestamp <= upto, as status.db has it now."""
        return manifest.committed(cur, self.id, after, upto)

    def row_set(self, info: RowSetInfo) -> RowSet:
        found = self._row_sets.get(info.id)
        if found is None:
            found = self._row_sets.setdefault(info.id, RowSet(self, info))
        return found

    def is_swept(self, row_set_id: int) -> bool:
        """Whether a row set that was staged is gone, or about to go, with its transaction."""
        with self._store.status.read() as cur:
            return manifest.is_swept(cur, row_set_id)

    def forget(self, row_set_ids: Iterable[int]) -> None:
        for id in row_set_ids:
            self._row_sets.pop(id, None)

    def common(
        self, infos: Sequence[RowSetInfo], keys: core.Keys
    ) -> list[tuple[RowSetInfo, pa.UInt32Array]]:
        """For each row set that has some of `keys` (strictly ascending): which positions."""
        if keys.n == 0:
            return []
        low, high = keys.key(0), keys.key(keys.n - 1)
        found = []
        candidates = [info for info in infos if info.overlaps(low, high)]
        if not candidates:
            return []
        large = sum(info.rows for info in candidates) * len(low) > LARGE_CHECK
        for info in candidates:
            with self.read(once=large) as pages:
                positions = self.row_set(info).common(pages, keys)
            if len(positions):
                found.append((info, positions))
        return found

    def filler(self, name: str, n: int) -> pa.Array:
        """A column that a row set does not have: its default, or nulls."""
        column = self.schema.columns[name]
        if column.default is None:
            return pa.nulls(n, column.type)
        return pa.repeat(pa.scalar(column.default, column.type), n)

    def _catch_up(self) -> None:
        with self._store.status.read() as cur:
            latest = latest_snapshot(cur)
            fresh = manifest.committed(cur, self.id, self._upto, latest)
        fresh.sort(key=lambda info: (info.stamp or 0, info.id))
        self._infos = self._infos + fresh
        self._stamps = self._stamps + [info.stamp or 0 for info in fresh]
        self._upto = max(self._upto, latest)
