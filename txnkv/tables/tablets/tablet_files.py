"""The ground of a tablet: its schema, its LMDB environment, reads of it, and who may write there.

The *fence* of the environment says who may still write. A row set is claimed in status.db, written
to LMDB, then marked staged in status.db. A process that is stopped between claim and write, and
goes on after its transaction ended and was swept, would leave blocks that nobody knows of:

    worker: claims row set 7 of transaction T ... stopped ...            writes blocks of 7
    leader:                                       aborts T, sweeps 7

So check and write are one: the sweep first writes "T has ended" into the environment, and
every writer looks for that inside its own LMDB write transaction. Ended ids below the low
water mark are covered by the mark itself.

A leader has no entry here. What it writes into a tablet is right whenever it comes, so that who
leads next has nothing to write into each of thousands of tablets first:

    flush, compaction     under a lock that a stopped process keeps and a dead one gives back
    delete stamps         of a commit that is decided; writing them twice changes nothing
    removal of row sets   that ended; their ids are never given again
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import lmdb
import pyarrow as pa

from txnkv import core
from txnkv.errors import InvalidTxnStateError
from txnkv.storage import Environment, Map, Store, brief
from txnkv.tables.table_catalog import TableInfo
from txnkv.tables.tablets import manifest
from txnkv.tables.tablets.memory import MemoryRows, layout_of
from txnkv.tables.tablets.row_set_format import BLOOM, COLUMNS, DELETES, INSERTS, KEYS

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

    @property
    def page_bytes(self) -> int:
        """From so many bytes on a value has pages of its own."""
        return 0 if self.map is None else self.map.page_bytes

    def get(self, key: bytes) -> memoryview | None:
        """The value of an LMDB key as it lies in the map: valid inside the transaction alone."""
        value: memoryview | None = self.txn.get(key, db=self.blocks)  # type: ignore[assignment]
        if self.seen is not None and value is not None:
            self.seen.append(value)
        return value


class Read:
    """A read transaction on a tablet as a `with` block. For one use."""

    __slots__ = ("_environment", "_once", "_pages", "_scope", "_tablet")

    def __init__(self, tablet: TabletFiles, once: bool) -> None:
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
            del pages.txn  # a generator may keep the pages: not a reader's slot with them
            self._environment.end_read(self._scope)
        if isinstance(error, lmdb.Error):
            self._environment.fail(error)


class TabletFiles:
    """The schema of a tablet and its environment in this process. Shared by threads."""

    def __init__(self, store: Store, table: TableInfo, number: int) -> None:
        self.id = table.tablets[number]
        self.number = number
        self.table = table
        self.schema = table.schema
        self.since = int(table.since)
        self.codec = core.KeyCodec(table.schema.key_types)
        self.value_names = tuple(table.schema.value_columns)
        self.layout = layout_of(table.schema)
        self.memory_rows = MemoryRows(table, self.layout)
        self.fills = self.layout.encode_one(tuple(map(table.schema.fill, self.value_names)))
        self._environment: Environment | None = None
        self._store = store

    # -- names for messages ------------------------------------------------------------

    def readable_key(self, key: bytes) -> Any:
        """Return an encoded key as users write it: a scalar, or a tuple of several."""
        values = self.codec.decode_one(key)
        return values[0] if len(values) == 1 else values

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
            for name in self.schema.names:
                if self.schema.stored(name, (section - COLUMNS,)) is not None:
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

    @brief
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

    def is_swept(self, row_set_id: int) -> bool:
        """Return True when a staged row set is gone, or about to go, with its transaction."""
        with self._store.status.read() as cur:
            return manifest.is_swept(cur, row_set_id)

    def is_retired(self, row_set_id: int) -> bool:
        """Return True when a committed row set was replaced, and its blocks may be gone."""
        with self._store.status.read() as cur:
            return manifest.is_retired(cur, row_set_id)

    @property
    def is_unseen(self) -> bool:
        """Others that write do not see what is read here: no file can be locked."""
        return self._store.runtime.is_alone

    def keys_of(self, keys: Sequence[bytes]) -> core.Keys:
        """Encoded keys as the core takes them."""
        width = self.codec.width
        return core.Keys.fixed(b"".join(keys), width) if width and keys else core.Keys.of(keys)

    def filler(self, name: str, n: int) -> pa.Array:
        """A column that a row set does not have: the default that it had at first, or nulls."""
        return core.repeated(self.schema.columns[name].type, self.schema.fill(name), n)


# -- the fence -------------------------------------------------------------------------

FENCE_DB: Final = b"fence"
_MARK, _ENDED = b"mark", b"ended"
_U64 = struct.Struct(">Q")


def check_writer(txn: lmdb.Transaction, db: Any, txn_id: int) -> None:
    """Refuse the write of a transaction that has ended.

    Raises:
        InvalidTxnStateError: it has; nothing was written.
    """
    mark = txn.get(_MARK, db=db)
    ended = txn.get(_ENDED + _U64.pack(txn_id), db=db)
    if ended is not None or (mark is not None and txn_id < _U64.unpack(mark)[0]):
        raise InvalidTxnStateError(
            f"cannot stage rows: transaction {txn_id} has ended meanwhile. Nothing was written"
        )


def mark_ended(txn: lmdb.Transaction, db: Any, txn_id: int, low_water_mark: int) -> None:
    """Refuse `txn_id`, and all below the mark, from now on."""
    txn.put(_ENDED + _U64.pack(txn_id), b"", db=db)
    stored = txn.get(_MARK, db=db)
    if stored is not None and _U64.unpack(stored)[0] >= low_water_mark:
        return
    txn.put(_MARK, _U64.pack(low_water_mark), db=db)
    with txn.cursor(db=db) as cursor:
        found = cursor.set_range(_ENDED)
        while found and bytes(cursor.key()) < _ENDED + _U64.pack(low_water_mark):
            found = cursor.delete()
