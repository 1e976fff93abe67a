"""A tablet: one partition of a table, its LMDB environment and its row sets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeVar

import lmdb
import pyarrow as pa

from txnkv import core
from txnkv.coordinator import held
from txnkv.coordinator.commit_log import CommitLog
from txnkv.coordinator.ids import Timestamp
from txnkv.errors import CorruptionError
from txnkv.storage.environment import Environment
from txnkv.storage.lmdb_open import Map
from txnkv.storage.shield import shielded
from txnkv.storage.store import Store
from txnkv.tables import manifest
from txnkv.tables.catalog import TableInfo
from txnkv.tables.fence import FENCE_DB
from txnkv.tables.manifest import RowSetInfo
from txnkv.tables.memory import CommittedMemory
from txnkv.tables.row_set import RowSet
from txnkv.tables.row_set_format import BLOOM, COLUMNS, DELETES, INSERTS, KEYS

T = TypeVar("T")

BLOCKS_DB = b"blocks"


LARGE_CHECK: Final = 16 << 20
LARGE_READ: Final = 128 << 20
"""A check against, or a scan of, more bytes than this gives the pages back that it is
done with: else a large table would fill the process's resident memory with LMDB's map."""


class Pages:
    """A read transaction on a tablet's environment, with the handle of its blocks.

    Attributes:
        seen: the values read, when they are to be given back.
        map: stands for LMDB's map as long as it is not closed.
    """

    __slots__ = ("blocks", "map", "seen", "txn")

    def __init__(
        self, txn: lmdb.Transaction, blocks: Any, seen: list[memoryview] | None, map: Map | None
    ) -> None:
        self.txn = txn
        self.map = map
        self.blocks = blocks
        self.seen = seen

    def get(self, key: bytes) -> memoryview | None:
        """The value of an LMDB key as it lies in the map: valid inside the transaction alone."""
        value: memoryview | None = self.txn.get(key, db=self.blocks)  # type: ignore[assignment]
        if self.seen is not None and value is not None:
            self.seen.append(value)
        return value


class Read:
    """A read transaction on a tablet as a `with` block. For one use."""

    __slots__ = ("_environment", "_once", "_pages", "_scope", "_tablet")

    def __init__(self, tablet: Tablet, once: bool) -> None:
        self._tablet = tablet
        self._once = once

    def __enter__(self) -> Pages:
        environment = self._environment = self._tablet.opened()
        scope = self._scope = environment.begin_read()
        try:
            blocks = environment.handle(scope, BLOCKS_DB)
        except BaseException:
            environment.end_read(scope)
            raise
        seen: list[memoryview] | None = [] if self._once else None
        pages = self._pages = Pages(scope.txn, blocks, seen, environment.map)
        return pages

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        pages = self._pages
        try:
            for value in pages.seen or ():
                core.release_pages(value)
        finally:
            self._environment.end_read(self._scope)
        if isinstance(error, lmdb.Error):
            self._environment.fail(error)


@dataclass(frozen=True)
class TabletState:
    """All of a tablet that is committed: row sets, and the memory that goes with them.

    Complete for every snapshot that this process knew when it was taken.

    Attributes:
        version: of the manifest.
        flushed: of `memory`, entries above it count; those at or below are in row sets too.
        infos: row sets by id; those that are not `resolved` hide rows of others by key.
        memory: what small commits changed.
    """

    version: int
    flushed: Timestamp
    infos: tuple[RowSetInfo, ...]
    memory: core.MemRowSet

    @cached_property
    def unresolved(self) -> tuple[RowSetInfo, ...]:
        """Those that hide rows of others by key, latest first."""
        return tuple(sorted((i for i in self.infos if not i.resolved), key=_latest_first))

    @cached_property
    def settled(self) -> tuple[RowSetInfo, ...]:
        """Rows whose own stamps and deletes say who sees them, latest first."""
        return tuple(sorted((i for i in self.infos if i.resolved), key=_latest_first))

    @cached_property
    def highest(self) -> Timestamp:
        """The highest insert stamp of all; 0 when there are no row sets."""
        return max((i.stamp for i in self.infos if i.stamp is not None), default=Timestamp(0))


def _latest_first(info: RowSetInfo) -> tuple[int, int, int]:
    return (-(info.stamp or 0), -info.staged_seq, -info.id)


class Tablet:
    """One tablet in this process. Shared by threads."""

    def __init__(
        self, store: Store, table: TableInfo, number: int, log: CommitLog, memory: CommittedMemory
    ) -> None:
        self.id = table.tablets[number]
        self.number = number
        self.table = table
        self.schema = table.schema
        self.codec = core.KeyCodec(table.schema.key_types)
        self.value_names = tuple(
            name for name in table.schema.names if name not in table.schema.primary_key
        )
        self.layout = core.RowLayout([table.schema.columns[n].type for n in self.value_names])
        self.row_reader = core.RowReader(self.layout.types)
        self.readers = tuple(
            (
                table.schema.ids[name],
                core.ValueReader(table.schema.columns[name].type),
                table.schema.columns[name].default,
            )
            for name in self.value_names
        )
        self._environment: Environment | None = None
        self._store = store
        self._log = log
        self._memory = memory
        self._state: TabletState | None = None
        self._row_sets: dict[int, RowSet] = {}
        self.chains: Any = None  # of `point_many`

    # -- names for messages ------------------------------------------------------------

    @property
    def store_path(self) -> str:
        return str(self._store.directory.path)

    @property
    def label(self) -> str:
        return f"table {self.table.name!r}, tablet {self.id}"

    @property
    def part(self) -> str:
        """The tablet as `txnkv repair` takes it."""
        return f"table:{self.table.name}/{self.number}"

    def section_name(self, section: int) -> str:
        if section >= COLUMNS:
            for name, id in self.schema.ids.items():
                if id == section - COLUMNS:
                    return repr(name)
        names = {KEYS: "key", BLOOM: "Bloom filter", INSERTS: "insert stamps", DELETES: "deletes"}
        return names.get(section, f"section {section}")

    # -- storage -----------------------------------------------------------------------

    def to_write(self) -> Environment:
        """The tablet's environment, made where there is none; it is not opened yet: to be opened
        to write at once, where it is not open to read.
        """
        return self._store.environments.get(
            f"tablets/{self.id}",
            label=self.label,
            part=self.part,
            databases=(BLOCKS_DB, FENCE_DB),
        )

    def environment(self) -> Environment:
        """The tablet's environment, with its databases opened.

        Opened outside of a transaction: one that began before could not use them.
        """
        environment = self._store.environments.get(
            f"tablets/{self.id}", create=False, label=self.label, part=self.part
        )
        environment.db(BLOCKS_DB)
        environment.db(FENCE_DB)
        return environment

    @property
    def blocks_db(self) -> Any:
        """The handle of the blocks, for the LMDB transaction this thread is in."""
        return self.environment().db(BLOCKS_DB)

    def read(self, *, once: bool = False) -> Read:
        """`with tablet.read() as pages:` a read transaction; short, for it keeps pages from being
        used again.

        Args:
            once: what is read is not needed again soon: give its memory back.
        """
        return Read(self, once)

    def look(self, fn: Callable[[Pages], T]) -> T:
        """`fn(pages)` in a read as short as that of one row, in the calling thread; no exception of
        a signal handler leaves it open.
        """
        environment = self._environment
        if environment is not None:
            found = environment.look(
                BLOCKS_DB, lambda txn, blocks, map: (fn(Pages(txn, blocks, None, map)),)
            )
            if found is not None:
                return found[0]
        return self._look(fn)

    @shielded
    def _look(self, fn: Callable[[Pages], T]) -> T:
        with self.read() as pages:
            return fn(pages)

    def opened(self) -> Environment:
        """The environment, to read from; asked for anew when it was closed."""
        environment = self._environment
        if environment is None or not environment.has(BLOCKS_DB):
            environment = self._environment = self.environment()
        return environment

    @property
    def fence_db(self) -> Any:
        return self.environment().db(FENCE_DB)

    # -- row sets ----------------------------------------------------------------------

    def state(self, snapshot: Timestamp) -> TabletState:
        """Return the state, complete for `snapshot`. No I/O while the manifest does not change.

        Raises:
            CorruptionError: a small commit at or below `snapshot` is damaged in the commit log.
        """
        self._log.tail(snapshot)
        if self._memory.damaged:
            self.require_whole(snapshot)
        state = self._state
        if (
            state is None
            or state.version < self._log.version
            or not self._memory.is_current(self.id, state.memory)
        ):
            return self.reload()
        return state

    def require_whole(self, upto: Timestamp) -> None:
        """Refuse to read or flush a tablet that lacks a commit.

        Raises:
            CorruptionError: a small commit at or below `upto` is damaged in the commit log.
        """
        error = self._memory.damage(self.id, upto)
        if error is not None:
            raise CorruptionError(f"{self.label}: {error}{held.accept_loss(self.part)}")

    @shielded
    def reload(self) -> TabletState:
        """The state as status.db has it now."""
        with self._store.gate.use(), self._log.lock:
            with self._store.status.read(durable=False) as cur:
                found = manifest.committed_state(cur, self.id)
            self._log.raise_floor(found.floor)
            self._memory.drop_flushed(self.id, found.flushed)
            memory = self._memory.of(self.id, self.codec.width)
            state = self._state = TabletState(found.version, found.flushed, found.infos, memory)
            # What is left out here is loaded again for who still reads it: an older state, a
            # transaction of its own. Kept, it would never go in a process that only reads.
            live = {info.id for info in found.infos}
            self._row_sets = {id: each for id, each in self._row_sets.copy().items() if id in live}
            return state

    def row_set(self, info: RowSetInfo) -> RowSet:
        found = self._row_sets.get(info.id)
        if found is None:
            found = self._row_sets.setdefault(info.id, RowSet(self, info))
        elif found.info is not info:
            found.adopt(info)
        return found

    def is_swept(self, row_set_id: int) -> bool:
        """Return True when a staged row set is gone, or about to go, with its transaction."""
        with self._store.status.read() as cur:
            return manifest.is_swept(cur, row_set_id)

    def is_retired(self, row_set_id: int) -> bool:
        """Return True when a committed row set was replaced, and its blocks may be gone."""
        with self._store.status.read() as cur:
            return manifest.is_retired(cur, row_set_id)

    def forget(self, row_set_ids: Iterable[int]) -> None:
        for id in row_set_ids:
            self._row_sets.pop(id, None)

    def keys_of(self, keys: Sequence[bytes]) -> core.Keys:
        """Encoded keys as the core takes them."""
        width = self.codec.width
        return core.Keys.fixed(b"".join(keys), width) if width and keys else core.Keys.of(keys)

    def filler(self, name: str, n: int) -> pa.Array:
        """A column that a row set does not have: its default, or nulls."""
        column = self.schema.columns[name]
        if column.default is None:
            return pa.nulls(n, column.type)
        return pa.repeat(pa.scalar(column.default, column.type), n)
