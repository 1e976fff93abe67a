"""The tables of one store in this process: catalog, tablets, sweeps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field

from txnkv.coordinator import held, payload, status_table
from txnkv.coordinator.coordinator import Coordinator
from txnkv.coordinator.damage import EVERY, Kinds
from txnkv.coordinator.ids import Timestamp
from txnkv.coordinator.lease import Lease
from txnkv.coordinator.query import one
from txnkv.coordinator.states import TxnState
from txnkv.errors import InvalidTxnStateError
from txnkv.storage import dropped, extents
from txnkv.storage.locks import new_lock
from txnkv.storage.seam import clock
from txnkv.storage.shield import shielded
from txnkv.tables import catalog, flush, manifest, upkeep
from txnkv.tables.catalog import TableInfo
from txnkv.tables.compactor import Compactor
from txnkv.tables.failed_writes import FailedWrites
from txnkv.tables.manifest import KIND, RowSetInfo
from txnkv.tables.memory import CommittedMemory
from txnkv.tables.participant import TabletParticipants
from txnkv.tables.partitioning import Partitioning
from txnkv.tables.read_set import ReadSet
from txnkv.tables.row_set_writer import delete_row_set
from txnkv.tables.row_writer import RowWriter
from txnkv.tables.schema import Schema
from txnkv.tables.tablet import Tablet


@dataclass
class _Catalog:
    """The remembered part of one version of the catalog, or of a later one.

    Attributes:
        live: ids of the tables that are not dropped.
        held: ids of tablets that take no writes, and why.
        tables: by name, those that were asked for.
    """

    version: int
    live: frozenset[int]
    held: dict[int, str]
    tables: dict[str, TableInfo] = field(default_factory=dict)


class TableEngine:
    """Tables over a store and its coordinator. Shared by threads.

    Attributes:
        read_sets: by transaction, what serializable ones that this process commits have read.
        failed_writes: what is to be taken back.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.store = coordinator.store
        self.log = coordinator.log
        self.memory = CommittedMemory(self._key_width, self._on_flushed)
        self.log.add_member(payload.TABLET, self.memory)
        self._lock = new_lock()
        self._tablets: dict[int, Tablet] = {}
        self._writers: dict[int, RowWriter] = {}
        self._catalog: _Catalog | None = None
        self.read_sets: dict[int, ReadSet] = {}
        self.failed_writes = FailedWrites(self.store)
        self._swept_term: int | None = None
        self.compactor = Compactor(self)
        coordinator.orchestrator.add_handler(TabletParticipants(self))
        coordinator.maintenance.add_sweep(self.sweep)
        coordinator.maintenance.add_look(self.forget_gone)

    # -- catalog -----------------------------------------------------------------------

    def create(self, name: str, schema: Schema, partitioning: Partitioning) -> TableInfo:
        with self.store.status.write() as cur:
            return catalog.create(cur, name, schema, partitioning)

    def find(self, name: str) -> TableInfo | None:
        """The table of this name. No I/O while the catalog does not change."""
        known = self._known().tables
        return known.get(name) or self._find(name, known)

    @shielded
    def _find(self, name: str, known: dict[str, TableInfo]) -> TableInfo | None:
        with self.store.status.read() as cur:
            found = catalog.find(cur, name)
        if found is not None:
            known[name] = found
        return found

    def get(self, name: str) -> TableInfo:
        """The table of this name.

        Raises:
            TableNotFoundError: there is none.
        """
        return self.find(name) or self._look_again(name)

    @shielded
    def _look_again(self, name: str) -> TableInfo:
        with self.store.status.read() as cur:
            return catalog.get(cur, name)

    def names(self) -> list[str]:
        with self.store.status.read() as cur:
            return catalog.names(cur)

    def require_live(self, table: TableInfo) -> None:
        """Refuse a table that was dropped. No I/O while the catalog does not change.

        Raises:
            TableNotFoundError: it was dropped.
        """
        if table.id not in self._known().live:
            raise catalog.dropped(table)

    def live_at(self, table: TableInfo) -> int:
        """The version of the catalog in which the table was seen not to be dropped.

        Raises:
            TableNotFoundError: it was dropped.
        """
        known = self._known()
        if table.id not in known.live:
            raise catalog.dropped(table)
        return known.version

    def refuse_held(self, tablet_ids: Iterable[int]) -> None:
        """Refuse to write to damaged tablets. No I/O while the catalog does not change.

        Raises:
            CorruptionError: one of them takes no writes.
        """
        known = self._catalog  # the commit asks again, where that has changed since
        if known is None or known.held:
            held.refuse(self._known().held, tablet_ids)

    def _known(self) -> _Catalog:
        self.log.latest()
        version = self.log.catalog_version
        known = self._catalog
        if known is None or known.version != version:
            return self._read_catalog(version)
        return known

    @shielded
    def _read_catalog(self, version: int) -> _Catalog:
        with self.store.status.read() as cur:
            known = _Catalog(version, catalog.live_tables(cur), held.ids(cur, payload.TABLET))
        self._catalog = known
        return known

    def drop(self, name: str, keep: float = 0) -> bool:
        """Drop a table; open transactions that touched it are aborted.

        Args:
            keep: seconds for which `recall` brings it back.

        Returns:
            False when there is no such table.
        """
        with self.store.status.write() as cur:
            table = catalog.find(cur, name)
            if table is None:
                return False
            catalog.drop(cur, table, keep)
            touched = status_table.transactions_of(cur, KIND, table.tablets)
        orchestrator = self.coordinator.orchestrator
        for txn_id in touched:
            with suppress(InvalidTxnStateError):  # one with its commit timestamp goes on
                orchestrator.start_abort(txn_id, f"table {name!r} was dropped")
            orchestrator.finish(txn_id)
        self.purge()
        return True

    def recall(self, name: str) -> TableInfo:
        """Bring back a table that was dropped and is kept.

        Raises:
            As `catalog.recall`.
        """
        with self.store.status.write() as cur:
            return catalog.recall(cur, name)

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
            found = self._writers.setdefault(table.id, RowWriter(self, table))
        return found

    def tablet(self, id: int) -> Tablet | None:
        """A tablet by its id; None when its table was dropped and purged."""
        known = self._tablets.get(id)
        if known is not None:
            return known
        with self.store.status.read() as cur:
            table = catalog.by_tablet(cur, id)
        if table is None:
            return None
        return next(tablet for tablet in self.tablets(table) if tablet.id == id)

    def discard(self, written: Sequence[RowSetInfo]) -> None:
        """Remove row sets that could not be staged."""
        for info in written:
            tablet = self.tablet(info.tablet_id)
            if tablet is not None:
                tablet.environment().write(
                    lambda txn, tablet=tablet, id=info.id: delete_row_set(txn, tablet, id)  # type: ignore[misc]
                )
        with self.store.status.write() as cur:
            manifest.forget(cur, [info.id for info in written])

    # -- memory and row sets -----------------------------------------------------------

    def maintenance(self) -> AbstractContextManager[None]:
        """`with engine.maintenance():` nobody else flushes or compacts, in any process."""
        return self.store.maintenance()

    def flush(self, upto: Timestamp | None = None) -> Timestamp:
        """Write what small commits changed into row sets; see `txnkv.tables.flush`."""
        return flush.flush(self, upto)

    def flush_upto(self, upto: Timestamp) -> None:
        """See to it that small commits at or below `upto` are in row sets."""
        with self.store.status.read() as cur:
            flushed = manifest.flushed(cur)
        if flushed < upto:
            flush.flush(self)

    def _key_width(self, tablet_id: int) -> int | None:
        tablet = self.tablet(tablet_id)
        return None if tablet is None else tablet.codec.width

    def _on_flushed(self, tablet_id: int, upto: Timestamp) -> None:
        tablet = self._tablets.get(tablet_id)
        if tablet is None:
            self.memory.drop_flushed(tablet_id, upto)
        else:
            tablet.reload()

    # -- background --------------------------------------------------------------------

    def sweep(self, lease: Lease) -> None:
        """The leader's work on tables: flush, compact, purge what was dropped."""
        guard = self.coordinator.damage.guard
        with guard("tables", "the first round of a leader"):
            if lease.term is not None and lease.term != self._swept_term:
                self._remove_strays()
                self._swept_term = lease.term
        with guard("tables", "removal of what was dropped"):
            self.purge()
        upkeep.look_after(self)

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
            return tablet.id in flush.live_tablets(cur)

    def close(self) -> None:
        """End the background work of tables."""
        self.compactor.close()

    def after_fork_in_child(self) -> None:
        """The background work belongs to the parent."""
        self.compactor.after_fork_in_child()

    def purge(self) -> None:
        """Remove the files of dropped tables that no snapshot can read any more."""
        dropped.settle()
        self._let_go()
        pin = self.store.runtime.least_pin()
        with self.store.status.read() as cur:
            (floor,) = one(
                cur,
                "SELECT min(snapshot_ts) FROM transactions WHERE state = ?",
                (int(TxnState.OPEN),),
            )
            least = min((ts for ts in (pin, floor) if ts is not None), default=None)
            gone = cur.execute(
                "SELECT id FROM tables "
                "WHERE dropped_ts > 0 AND dropped_ts < coalesce(?, dropped_ts + 1)",
                (least,),
            ).fetchall()
            doomed = {
                table_id: [
                    id
                    for (id,) in cur.execute(
                        "SELECT id FROM tablets WHERE table_id = ?", (table_id,)
                    )
                ]
                for (table_id,) in gone
            }
        self._forget_extents([id for ids in doomed.values() for id in ids])
        for table_id, tablet_ids in doomed.items():
            for id in tablet_ids:
                self.store.environments.drop(f"tablets/{id}")
                self.store.directory.remove_tablet_dir(id)
            with self.store.status.write() as cur:
                cur.execute("DELETE FROM tables WHERE id = ?", (table_id,))
        if doomed:
            self.forget_gone()

    def forget_gone(self) -> None:
        """Forget tablets of tables that were purged, by whichever process."""
        if not self._tablets:
            return
        with self.store.gate.use(), self.log.lock:
            with self.store.status.read(durable=False) as cur:
                left = {id for (id,) in cur.execute("SELECT id FROM tablets")}
                tables = {id for (id,) in cur.execute("SELECT id FROM tables")}
            for id in self._tablets.keys() - left:
                self.coordinator.damage.clear(self._tablets.pop(id).label)
                self.memory.forget(id)
        for id in self._writers.keys() - tables:
            self._writers.pop(id, None)

    def _forget_extents(self, ids: Collection[int]) -> None:
        # Before the files go; not synced, for what comes back is of no table that is there.
        if ids:
            with self.store.status.write(sync=False) as cur:
                extents.forget(cur, [f"tablets/{id}" for id in ids])

    def _let_go(self) -> None:
        """Tables whose time to be recalled is over are dropped as others."""
        now = Timestamp.from_micros(clock.now_micros())
        with self.store.status.read() as cur:
            until = catalog.kept_until(cur)
        if until is not None and until <= now:
            with self.store.status.write() as cur:
                catalog.let_go(cur, now)

    def _remove_strays(self) -> None:
        """Remove folders of tablets that are not in the catalog: a writer that was stopped while
        its table was dropped and purged makes one anew.
        """
        folder = self.store.directory.tablet_dir(0).parent
        there = {int(entry.name) for entry in folder.iterdir() if entry.name.isdigit()}
        with self.store.status.read() as cur:
            known = {id for (id,) in cur.execute("SELECT id FROM tablets")}
            strays = extents.strays(cur, "tablets", known)
        self._forget_extents(strays | (there - known))
        for id in there - known:
            self.store.environments.drop(f"tablets/{id}")
            self.store.directory.remove_tablet_dir(id)
