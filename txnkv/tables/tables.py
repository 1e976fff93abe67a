"""The tables of one store in this process: what all of the package stands on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import TypeAlias

import apsw

from txnkv.coordinator import EVERY, Catalog, Coordinator, Kinds, Timestamp
from txnkv.errors import InvalidTxnStateError, TxnkvError
from txnkv.storage import GATE, Store, new_lock
from txnkv.tables import table_catalog
from txnkv.tables.read_set import ReadSet
from txnkv.tables.row_writer import RowWriter
from txnkv.tables.table_catalog import TableInfo
from txnkv.tables.tablets import CommittedMemory, RowSetInfo, Tablet, delete_row_set, manifest


class Tables(Catalog[TableInfo]):
    """The catalog of tables, their tablets, and what of them is in memory. Shared by threads.

    Attributes:
        memory: rows of small commits that are not flushed yet.
        read_sets: by transaction, what serializable ones that this process commits have read.
        failed_writes: what is to be taken back.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        super().__init__(coordinator.store, coordinator.log, table_catalog)
        self.coordinator = coordinator
        self.memory = CommittedMemory(self._key_width, self._on_flushed)
        self.read_sets: dict[int, ReadSet] = {}
        self.failed_writes = FailedWrites(self.store)
        self._lock = new_lock()
        self._tablets: dict[int, Tablet] = {}
        self._writers: dict[int, RowWriter] = {}

    # -- tablets -----------------------------------------------------------------------

    def tablets(self, table: TableInfo) -> list[Tablet]:
        with self._lock:
            found = []
            for number, id in enumerate(table.tablets):
                if id not in self._tablets:
                    self._tablets[id] = Tablet(self.store, table, number, self.log, self.memory)
                found.append(self._tablets[id])
            return found

    def row_writer(self, table: TableInfo) -> RowWriter:
        """Return the writer of a table, which checks, encodes and places single rows and keys."""
        found = self._writers.get(table.id)
        if found is None:
            found = self._writers.setdefault(table.id, RowWriter(table, self.tablets(table)))
        return found

    def tablet(self, id: int) -> Tablet | None:
        """A tablet by its id; None when its table was dropped and purged."""
        known = self._tablets.get(id)
        if known is not None:
            return known
        with self.store.status.read() as cur:
            table = table_catalog.by_tablet(cur, id)
        if table is None:
            return None
        return next(tablet for tablet in self.tablets(table) if tablet.id == id)

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
        for id in self._writers.keys() - tables:
            self._writers.pop(id, None)


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
