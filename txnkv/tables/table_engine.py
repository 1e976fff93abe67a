"""The tables of one store in this process: catalog, tablets, sweeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Final, Literal

import apsw

from txnkv.coordinator import (
    Coordinator,
    Lease,
    Timestamp,
    forget_extents,
    least_snapshot,
    one,
    payload,
    remove_strays,
    status_table,
    wall_timestamp,
)
from txnkv.errors import (
    HistoryExpiredError,
    SchemaError,
    TableExistsError,
    TableNotFoundError,
)
from txnkv.storage import INDEXES, clock, declare_fault_point, fault_point, settle_dropped
from txnkv.tables import table_catalog, table_history
from txnkv.tables.commit import TabletParticipants
from txnkv.tables.maintenance import Compactor, flush, history
from txnkv.tables.partitioning import Partitioning
from txnkv.tables.read import ReadView, scan
from txnkv.tables.schema import IndexInfo, Schema
from txnkv.tables.schema_change import evolved, tightened
from txnkv.tables.table_catalog import TableInfo
from txnkv.tables.table_index import entry_schema, find_index
from txnkv.tables.tables import Tables
from txnkv.tables.tablets import KIND, manifest

declare_fault_point("alter.written", "a table has another schema, COMMIT was not called")
declare_fault_point("alter.durable", "a table has another schema, nobody was told")

FLUSH_BYTES: Final = 16 << 20
FLUSH_COMMITS: Final = 1 << 16
FLUSH_AGE: Final = 60 * 1_000_000
"""Microseconds for which a small commit may be in the log alone."""


class TableEngine(Tables):
    """Tables, and the work on them: takes part in transactions and in the leader's rounds."""

    def __init__(self, coordinator: Coordinator) -> None:
        super().__init__(coordinator)
        self.log.add_member(payload.TABLET, self.memory)
        self.compactor = Compactor(self)
        self._swept_term: int | None = None
        coordinator.orchestrator.add_handler(TabletParticipants(self))
        coordinator.maintenance.add_sweep(self.sweep)
        coordinator.maintenance.add_look(self.forget_gone)

    # -- catalog -----------------------------------------------------------------------

    def create(
        self, name: str, schema: Schema, partitioning: Partitioning, kept: float | None = None
    ) -> TableInfo:
        with self.store.status.write() as cur:
            made = table_catalog.create(cur, name, schema, partitioning)
            table_history.set_history(cur, self.store, made.id, kept)
            return made

    def provide(
        self,
        name: str,
        schema: Schema,
        partitioning: Partitioning,
        kept: float | None = None,
        *,
        evolve: bool = False,
    ) -> TableInfo:
        """Return the table of this name, which is made where there is none.

        Args:
            kept: seconds of its history; None: as the store, or as it is.
            evolve: add columns that it has not, where nothing else differs.

        Raises:
            TableExistsError: it was made otherwise.
        """
        while True:
            try:
                return self.create(name, schema, partitioning, kept)
            except TableExistsError:
                found = self._alike(name, schema, partitioning, evolve=evolve)
                if found is not None:  # else it was dropped meanwhile
                    return self._require_history(found, kept)

    def _require_history(self, table: TableInfo, kept: float | None) -> TableInfo:
        if kept is not None and (found := self.kept(table)) != kept:
            raise TableExistsError(
                f"there is a table {table.name!r} already, and its history is "
                f"{'that of the store' if found is None else f'{found:g} seconds'}, not {kept:g}: "
                "alter it, with history="
            )
        return table

    def kept(self, table: TableInfo) -> float | None:
        """Return the seconds for which a table keeps versions; None: as long as the store."""
        own = self.own_history(table)
        return None if own is None else own.seconds

    def own_history(self, table: TableInfo) -> table_history.Own | None:
        """Return the history of a table that has one of its own."""
        with self.store.status.read() as cur:
            return table_history.of_table(cur, table.history_id)

    def _alike(
        self, name: str, schema: Schema, partitioning: Partitioning, *, evolve: bool
    ) -> TableInfo | None:
        found = self.find(name)
        if found is None or not evolve:
            if found is not None:
                found.require_alike(schema, partitioning)
            return found

        def change(present: Schema) -> Schema:
            made = evolved(present, schema)
            if (
                made is not present
                and set(made.names) == set(schema.names)
                and (made.names != schema.names)
            ):
                raise TableExistsError(
                    f"there is a table {name!r} already, and new columns come behind those that it "
                    f"has: give them in the order {', '.join(made.names)}"
                )
            replace(found, schema=made).require_alike(schema, partitioning)
            return made

        if change(found.schema) is found.schema:
            return found
        try:
            return self.alter(found, change)
        except TableNotFoundError:
            return None

    def drop(self, given: str | TableInfo, keep: float = 0) -> bool:
        """Drop a table; open transactions that touched it are aborted.

        Args:
            given: its name, or what it was once.
            keep: seconds for which `recall` brings it back.

        Returns:
            False when there is no such table.
        """
        with self.store.status.write() as cur:
            if isinstance(given, str):
                table = table_catalog.find(cur, given)
            else:
                table = table_catalog.by_id(cur, given.id)
            if table is None:
                return False
            table_catalog.drop(cur, table, keep)
            touched = status_table.transactions_of(cur, KIND, table.tablets)
        self.coordinator.orchestrator.abort_all(touched, f"table {table.name!r} was dropped")
        self._purge_or_note()
        return True

    def alter(
        self,
        table: TableInfo,
        change: Callable[[Schema], Schema],
        name: str | None = None,
        kept: float | Literal["keep"] | None = "keep",
    ) -> TableInfo:
        """Give a table another schema, or another name; see `table_catalog.alter`.

        Args:
            table: as it was.
            change: returns the new schema for the present one; what it raises, nothing changed.
            name: a new name.
            kept: seconds of its history; None: as long as the store; "keep" as it is.

        Raises:
            SchemaError: a column is to be not nullable, and rows have no value there.
            As `table_catalog.alter`.
        """

        def checked(present: TableInfo, snapshot: Timestamp) -> Schema:
            made = change(present.schema)
            self._require_values(present, made, snapshot)
            return made

        with suppress(HistoryExpiredError):  # most is looked through while others write
            checked(self.current(table), self.log.latest())
        with self.store.status.write() as cur:
            found = table_catalog.alter(
                cur, table, lambda present: checked(present, self.log.catch_up(cur)), name
            )
            if kept != "keep":
                table_history.set_history(cur, self.store, table.id, kept)
                manifest.bump(cur)  # what is known of tablets is read again
            fault_point("alter.written")
        fault_point("alter.durable")
        self.store.runtime.raise_durable(found.since)
        return found

    # -- indexes -----------------------------------------------------------------------

    def add_index(self, table: TableInfo, columns: Sequence[str], *, unique: bool) -> IndexInfo:
        """Give a table an index that is to be built: whoever begins to write from now on keeps it
        in step, and what began before is refused at its commit.

        Returns:
            The index; also one that is there already.

        Raises:
            SchemaError: no index can be over these columns, or there is another one.
            TableNotFoundError: the table was dropped.
        """
        with self._changed_catalog(table) as (cur, present):
            found = find_index(present.schema, columns)
            if found is not None:
                if found.unique != unique:
                    kind = "unique" if found.unique else "not unique"
                    raise SchemaError(
                        f"table {present.name!r} has an index by {', '.join(columns)}, which is "
                        f"{kind}: client.drop_index(table, {list(columns)}) first"
                    )
                return found
            entries = entry_schema(present.schema, columns, unique=unique)
            self.store.directory.add_feature(INDEXES)
            id = table_catalog.create_hidden(cur, present, entries)
            numbers = tuple(present.schema.ids[name] for name in columns)
            made = IndexInfo(id, numbers, unique, ready=False)
            self._set_indexes(cur, present, (*present.schema.indexes, made))
        return made

    def index_ready(self, table: TableInfo, index: IndexInfo) -> None:
        """Let an index be read, by snapshots from here on.

        Raises:
            SchemaError: it was dropped meanwhile.
            TableNotFoundError: the table was.
        """
        with self._changed_catalog(table) as (cur, present):
            there = present.schema.indexes
            if all(each.table != index.table for each in there):
                raise SchemaError(
                    f"the index of table {present.name!r} was dropped while it was built"
                )
            ready = [e._replace(ready=True) if e.table == index.table else e for e in there]
            self._set_indexes(cur, present, ready)

    def drop_index(self, table: TableInfo, index: IndexInfo) -> bool:
        """Drop an index.

        Returns:
            False when it was dropped before.

        Raises:
            TableNotFoundError: the table was dropped.
        """
        with self._changed_catalog(table) as (cur, present):
            left = [each for each in present.schema.indexes if each.table != index.table]
            if len(left) == len(present.schema.indexes):
                return False
            altered = self._set_indexes(cur, present, left)
            table_catalog.drop_hidden(cur, [index], altered.since)
        self._purge_or_note()
        return True

    @contextmanager
    def _changed_catalog(self, table: TableInfo) -> Iterator[tuple[apsw.Cursor, TableInfo]]:
        """Change the catalog with a cursor, knowing a table as it is."""
        with self.store.status.write() as cur:
            present = table_catalog.by_id(cur, table.id)
            if present is None:
                raise table_catalog.dropped(table)
            yield cur, present
            made = table_catalog.by_id(cur, table.id)
            fault_point("alter.written")
        fault_point("alter.durable")
        if made is not None:
            self.store.runtime.raise_durable(made.since)

    def _set_indexes(
        self, cur: apsw.Cursor, table: TableInfo, indexes: Sequence[IndexInfo]
    ) -> TableInfo:
        made = table.schema.with_indexes(indexes)
        return table_catalog.alter(cur, table, lambda _: made)

    # -- rows that a change of the schema asks for -----------------------------------------

    def _require_values(self, table: TableInfo, schema: Schema, snapshot: Timestamp) -> None:
        """Refuse a schema in which a column may not be null that is null in some row."""
        for name in tightened(table.schema, schema):
            (old,) = (
                old
                for old, id in table.schema.ids.items()
                if schema.stored(name, (id,)) is not None
            )
            asked = scan.request(table, [], [(old, "is null")], False, None)
            rows = scan.count(self, asked, ReadView(snapshot))
            if rows:
                raise SchemaError(
                    f"column {old!r} of table {table.name!r} cannot be made not nullable: rows "
                    f"without a value there: {rows:,}. Give them one, or delete them, and try again"
                )

    def recall(self, name: str) -> TableInfo:
        """Bring back a table that was dropped and is kept.

        Raises:
            As `table_catalog.recall`.
        """
        with self.store.status.write() as cur:
            return table_catalog.recall(cur, name)

    # -- memory and row sets -----------------------------------------------------------

    def flush(self, upto: Timestamp | None = None) -> Timestamp:
        """Write what small commits changed into row sets; see `txnkv.tables.maintenance.flush`."""
        return flush.flush(self, upto)

    # -- background --------------------------------------------------------------------

    def sweep(self, lease: Lease) -> None:
        """Do the leader's work on tables.

        Compaction has a thread of its own, for it takes long and the round has transactions to
        look after.
        """
        guard = self.coordinator.damage.guard
        with guard("tables", "the first round of a leader"):
            if lease.term is not None and lease.term != self._swept_term:
                folder = self.store.directory.tablet_dir(0).parent
                remove_strays(self.store, folder, table_catalog.tablet_ids, self._remove)
                self._swept_term = lease.term
        self._purge_or_note()
        with guard("tables", "flush"):
            if self._flush_due():
                flush.flush(self)
            else:
                self._remove_leftovers()
        with guard("tables", "collection of old row sets"):
            history.collect(self)
        with guard("tables", "compaction"):
            self.compactor.wake()

    def _flush_due(self) -> bool:
        """Tell whether the commit log is long or old enough to be flushed."""
        self.log.latest()
        lag = self._lag()
        metrics = self.coordinator.metrics
        metrics.flush_lag_seconds.set(lag / 1e6)
        metrics.memory_bytes.set(self.memory.nbytes)
        log = self.log
        long = log.pending_bytes > FLUSH_BYTES or log.pending_commits > FLUSH_COMMITS
        return long or lag > FLUSH_AGE

    def _lag(self) -> int:
        """Age in microseconds of the oldest commit that is in the log alone; 0 for none."""
        with self.store.status.read() as cur:
            (oldest,) = one(
                cur,
                "SELECT min(commit_ts) FROM commit_log "
                "WHERE commit_ts > (SELECT flushed_ts FROM clock)",
            )
        return 0 if oldest is None else max(clock.now_micros() - Timestamp(oldest).micros, 0)

    def _remove_leftovers(self) -> None:
        with self.store.status.read() as cur:
            left = manifest.unfinished(cur, flush.WHO)
        if left:
            with self.maintenance():
                flush.sweep(self)

    def close(self) -> None:
        """End the background work of tables."""
        self.compactor.close()

    def after_fork_in_child(self) -> None:
        """The background work belongs to the parent."""
        self.compactor.after_fork_in_child()

    def _purge_or_note(self) -> None:
        """`purge` of what stays dropped: where it fails, the leader tries again."""
        with self.coordinator.damage.guard("tables", "removal of what was dropped"):
            self.purge()

    def purge(self) -> None:
        """Remove the files of dropped tables that no snapshot can read any more."""
        settle_dropped()
        self._let_go()
        with self.store.status.read() as cur:
            gone = table_catalog.dropped_before(cur, least_snapshot(self.store, cur))
        ids = [id for table in gone for id in table.tablets]
        forget_extents(self.store, "tablets", ids)
        for table in gone:
            for id in table.tablets:
                self._remove(id)
            with self.store.status.write() as cur:
                cur.execute("DELETE FROM tables WHERE id = ?", (table.id,))
        if gone:
            self.forget_gone()

    def _remove(self, id: int) -> None:
        self.store.environments.drop(f"tablets/{id}")
        self.store.directory.remove_tablet_dir(id)

    def _let_go(self) -> None:
        """Tables whose time to be recalled is over are dropped as others."""
        now = wall_timestamp()
        with self.store.status.read() as cur:
            until = table_catalog.kept_until(cur)
        if until is not None and until <= now:
            with self.store.status.write() as cur:
                table_catalog.let_go(cur, now)
