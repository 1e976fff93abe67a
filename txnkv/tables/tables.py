"""The tables of one store in this process: what all of the package stands on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import TypeAlias

import apsw

from txnkv.coordinator import EVERY, MAX_TIMESTAMP, Catalog, Coordinator, Kinds, Timestamp
from txnkv.core import RowReader
from txnkv.errors import CorruptionError, InvalidTxnStateError, TxnkvError
from txnkv.storage import EPOCH, GATE, Store, brief, clock, new_lock
from txnkv.tables import table_catalog
from txnkv.tables.read_set import ReadSet
from txnkv.tables.row_writer import RowWriter
from txnkv.tables.table_catalog import TableInfo
from txnkv.tables.table_index import TableIndex
from txnkv.tables.tablets import CommittedMemory, RowSetInfo, Tablet, delete_row_set, manifest


class Tables(Catalog[TableInfo]):
    """The catalog of tables, their tablets, and what of them is in memory. Shared by threads.

    Attributes:
        memory: rows of small commits that are not flushed yet.
        read_sets: by transaction, what serializable ones that this process commits have read.
        failed_writes: what is to be taken back.
        seen_flushed: up to where commits were flushed at a time of the monotonic clock.
        readers: of tables that transactions call by their names.
        ground: that of the rows of all small transactions (`core.Writes`).
    """

    def __init__(self, coordinator: Coordinator) -> None:
        super().__init__(coordinator.store, coordinator.log, table_catalog)
        self.coordinator = coordinator
        self.memory = CommittedMemory(self._key_width, self._on_flushed)
        self.read_sets: dict[int, ReadSet] = {}
        self.failed_writes = FailedWrites(self.store)
        self.seen_flushed = 0, 0
        self._lock = new_lock()
        self._tablets: dict[int, Tablet] = {}
        self._former: dict[tuple[int, int], Tablet] = {}  # by id and `since`: of older schemas
        self._writers: dict[tuple[int, int], RowWriter] = {}  # by id and `since` of tables
        self._indexes: dict[tuple[int, int], tuple[TableIndex, ...]] = {}  # the same
        self._current: dict[int, tuple[int, TableInfo]] = {}  # by id, as of a catalog version
        self.readers: dict[str, RowReader] = {}
        self.ground = self, self.readers, clock, "_reader", "monotonic_micros"

    # -- schemas -----------------------------------------------------------------------

    def current(self, table: TableInfo) -> TableInfo:
        """Return a table as it is now.

        Raises:
            TableNotFoundError: it was dropped.
        """
        log = self.log
        log.refresh()
        known = self._current.get(table.id)
        if known is None or known[0] != log.catalog_version:
            known = self._look_at(table)
        return known[1]

    def require_unchanged(self, table: TableInfo) -> int:
        """Refuse a table that has another schema by now.

        Returns:
            The version of the catalog in which it was seen.

        Raises:
            TableNotFoundError: it was dropped.
            SchemaChangedError: it was altered.
        """
        log = self.log
        log.refresh()
        known = self._current.get(table.id)
        if known is None or known[0] != log.catalog_version:
            known = self._look_at(table)
        if known[1].since != table.since:
            raise table_catalog.changed(table)
        return known[0]

    def require_writable(self, tablet: Tablet) -> int:
        """Refuse a tablet that is damaged, or whose table has another schema by now.

        Returns:
            As `require_unchanged`.

        Raises:
            As `require_unchanged`.
            CorruptionError: it takes no writes.
        """
        seen, version = self._seen, self.require_unchanged(tablet.table)
        if seen is None or seen.held:
            self.refuse_held((tablet.id,))
        return version

    def at(self, table: TableInfo, snapshot: Timestamp) -> TableInfo:
        """Return a table as a snapshot of any process has it.

        Raises:
            TableNotFoundError: it was dropped.
        """
        found = self.current(table)  # all that a snapshot has seen is known after this look
        return found if snapshot >= found.since else found.at(snapshot)

    def _look_at(self, table: TableInfo) -> tuple[int, TableInfo]:
        """The table as it is now, and the version of the catalog that says so."""
        now = self._now()
        since = now.live.get(table.id)
        if since is None:
            raise table_catalog.dropped(table)
        _, known = self._current.get(table.id, (0, table))
        same = next((each for each in (known, table) if each.since == since), None)
        found = self._current[table.id] = now.number, same or self._read_table(table)
        return found

    @brief
    def _read_table(self, table: TableInfo) -> TableInfo:
        with self.store.status.read() as cur:
            found = table_catalog.by_id(cur, table.id)
        if found is None:
            raise table_catalog.dropped(table)
        return found

    # -- tablets -----------------------------------------------------------------------

    def tablets(self, table: TableInfo) -> list[Tablet]:
        """Return the tablets of a table, which have its rows as `table.schema` has them."""
        with self._lock:
            return [self._tablet(table, number) for number in range(len(table.tablets))]

    def _tablet(self, table: TableInfo, number: int) -> Tablet:
        id, since = table.tablets[number], int(table.since)
        last = self._tablets.get(id)
        if last is not None and last.since == since:
            return last
        found = self._former.get((id, since))
        if found is None:
            found = Tablet(self.store, table, number, self.log, self.memory)
        if last is None or last.since < since:
            self._tablets[id] = found
            if last is not None:
                self._former[id, last.since] = last
        else:
            self._former[id, since] = found
        return found

    def whole(self, tablet: Tablet, floor: Timestamp) -> Tablet:
        """Return a tablet with every column that some snapshot from `floor` on has, for who writes
        its rows anew.
        """
        if self._now().live.get(tablet.table.id) == 0:
            return tablet  # it was never altered
        with self.store.status.read() as cur:
            table = table_catalog.by_tablet(cur, tablet.id)
        if table is None:
            return tablet
        table = table.whole(floor)
        if table.since == MAX_TIMESTAMP:
            return Tablet(self.store, table, tablet.number, self.log, self.memory)
        return self.tablets(table)[tablet.number]

    def known_writer(self, table: TableInfo) -> RowWriter | None:
        """Return the writer of a table that is as it is now, if it is known already that it is; its
        reader knows it then.
        """
        log = self.log
        log.refresh()
        epoch = EPOCH[0]  # who changes the catalog after this makes a new one
        known = self._current.get(table.id)
        if known is None or known[0] != log.catalog_version or known[1] is not table:
            return None
        found = self._writers.get((table.id, table.since))
        if found is not None:
            found.reader.confirm(epoch)
        return found

    def row_writer(self, table: TableInfo) -> RowWriter:
        """Return the writer of a table, which checks, encodes and places single rows and keys."""
        at = table.id, table.since
        found = self._writers.get(at)
        if found is None:
            asked = (lambda: self.indexes(table)), self.row_writer
            made = RowWriter(table, self.tablets(table), self, *asked)
            found = self._writers.setdefault(at, made)
        return found

    def indexes(self, table: TableInfo) -> tuple[TableIndex, ...]:
        """Return the indexes that who writes into a table keeps in step with it.

        Raises:
            SchemaChangedError: one of them was dropped since the table was as it is here.
        """
        if not table.schema.indexes:
            return ()
        at = table.id, table.since
        found = self._indexes.get(at)
        if found is None:
            found = self._indexes.setdefault(at, self._indexes_of(table))
        return found

    @brief
    def _indexes_of(self, table: TableInfo) -> tuple[TableIndex, ...]:
        made = []
        for info in table.schema.indexes:
            with self.store.status.read() as cur:
                hidden = table_catalog.by_id(cur, info.table)
            if hidden is None:
                raise table_catalog.changed(table)
            made.append(TableIndex(table.schema, info, self.tablets(hidden)[0]))
        return tuple(made)

    def tablet(self, id: int) -> Tablet | None:
        """A tablet by its id; None when its table was dropped and purged."""
        known = self._tablets.get(id)
        if known is not None:
            return known
        with self.store.status.read() as cur:
            table = table_catalog.by_tablet(cur, id)
        if table is None:
            return None
        found = [tablet for tablet in self.tablets(table) if tablet.id == id]
        if not found:
            raise CorruptionError(f"status.db: tablet {id} is half gone. Restore a backup")
        return found[0]

    def part_of(self, id: int) -> str:
        """The name of a tablet, as messages tell it."""
        tablet = self.tablet(id)
        return f"tablet {id}" if tablet is None else tablet.part

    # -- row sets and memory --------------------------------------------------------------

    def maintenance(self) -> AbstractContextManager[None]:
        """`with engine.maintenance():` nobody else flushes or compacts, in any process."""
        return self.store.maintenance()

    def discard(self, written: Sequence[RowSetInfo]) -> None:
        """Remove row sets that could not be staged."""
        for info in written:
            tablet = self.tablet(info.tablet_id)
            if tablet is not None:
                remove = partial(delete_row_set, tablet=tablet, row_set_id=info.id)
                tablet.environment().write(remove)
        with self.store.status.write() as cur:
            manifest.forget(cur, [info.id for info in written])

    def _key_width(self, tablet_id: int) -> int | None:
        tablet = self.tablet(tablet_id)
        return None if tablet is None else tablet.codec.width

    def _on_flushed(self, tablet_id: int, upto: Timestamp) -> None:
        tablet = self._tablets.get(tablet_id)
        if tablet is None:
            self.memory.drop_flushed(tablet_id, upto)
        else:
            tablet.reload()

    # -- work -----------------------------------------------------------------------------

    def each(
        self,
        ids: Iterable[int],
        work: str,
        do: Callable[[Tablet], object],
        only: Kinds = EVERY,
        *,
        side_by_side: bool = False,
    ) -> dict[int, Exception]:
        """Do a piece of work on those of these tablets that are there; see `Damage.each`."""
        there = (each for each in map(self.tablet, ids) if each is not None)
        return self.coordinator.damage.each(
            there, work, do, self._lives, only, side_by_side=side_by_side
        )

    def _lives(self, tablet: Tablet) -> bool:
        with self.store.status.read() as cur:
            return tablet.id in table_catalog.live_tablets(cur)

    def forget_gone(self) -> None:
        """Forget tablets of tables that were purged, by whichever process."""
        if not self._tablets:
            return
        with GATE.use(), self.log.lock:
            with self.store.status.read(durable=False) as cur:
                left = {id for (id,) in cur.execute("SELECT id FROM tablets")}
                tables = {id for (id,) in cur.execute("SELECT id FROM tables")}
            for id in self._tablets.keys() - left:
                self.coordinator.damage.clear(self._tablets.pop(id).label)
                self.memory.forget(id)
        self._former.clear()  # who still reads by an older schema has what it needs, or makes it
        for at in {*self._writers, *self._indexes}:
            known = self._current.get(at[0])
            if at[0] not in tables or (known is not None and at[1] < known[1].since):
                if (writer := self._writers.pop(at, None)) is not None:
                    writer.reader.forget()
                self._indexes.pop(at, None)
        for id in self._current.keys() - tables:
            self._current.pop(id, None)
        live = {writer.reader for writer in self._writers.values()}
        for name, reader in list(self.readers.items()):
            if reader not in live:
                self.readers.pop(name, None)


Undo: TypeAlias = Callable[[apsw.Cursor], None]


class FailedWrites:
    """Writes that failed when they may have been done, by transaction. Shared by threads.

    After an error nothing of a write counts. But the SQLite transaction that makes its row sets
    count may be there when the error comes: the sync behind it failed. So another write takes them
    back; if that fails too, the next one that looks at the transaction's row sets does it first:

        write     STAGED, sync: error        take back: STAGED -> WRITING      error: nothing counts
                                             error                             the same is told ...
        retry, or commit                     take back: STAGED -> WRITING      ... and is true here
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._undo: dict[int, list[Undo]] = {}

    @contextmanager
    def noting(self, txn_id: int, undo: Undo) -> Iterator[None]:
        """If the block fails, take back what it may have done all the same."""
        try:
            yield
        except InvalidTxnStateError:  # refused inside: nothing was done
            raise
        except BaseException:
            self._undo.setdefault(txn_id, []).append(undo)
            with suppress(TxnkvError):
                self.take_back(txn_id)
            raise

    def take_back(self, txn_id: int) -> None:
        """See to it that nothing counts of what failed. No I/O when nothing did.

        Raises:
            StorageFullError, UnavailableError: the disk still fails.
        """
        waiting = self._undo.get(txn_id)
        if waiting is None:
            return
        with self._store.status.write() as cur:
            for undo in waiting:
                undo(cur)
        self._undo.pop(txn_id, None)
