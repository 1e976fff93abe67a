"""Tables and snapshots as a user holds them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeVar

import pyarrow as pa

from txnkv import core
from txnkv.client.indexes import Index
from txnkv.coordinator import Timestamp
from txnkv.core import compute as pc
from txnkv.errors import ClosedError, HistoryExpiredError, TableNotFoundError
from txnkv.storage import brief, new_lock, shielded
from txnkv.tables import (
    OP,
    TOKEN_ROWS,
    AnyColumn,
    DiffParts,
    DiffRequest,
    History,
    Operation,
    ReadView,
    Schema,
    SchemaChange,
    TableEngine,
    TableInfo,
    TtlChange,
    altered,
    diff,
    history,
    lookup,
    scan,
    seconds_of,
    short_scan,
    table_catalog,
)
from txnkv.transaction import (
    AnyTable,
    At,
    Closing,
    Connection,
    Grid,
    Order,
    Scan,
    Transaction,
    WriteResult,
    require_client,
    write_row,
)

T = TypeVar("T")

_few: Final = brief(short_scan.few)
_count: Final = shielded(scan.count)
_ROW_IDS: Final = 1000


class Snapshot(Closing):
    """The store at one instant. A context manager; keeps history from being collected.

    Args:
        connection: to the store.
        timestamp: everything that committed at or below it is seen.

    Raises:
        HistoryExpiredError: it is older than the history that the store keeps.
    """

    def __init__(self, connection: Connection, timestamp: Timestamp) -> None:
        self._connection = connection
        self._timestamp = timestamp
        self._held = history.hold_at(connection.instance.coordinator, timestamp)

    @property
    def timestamp(self) -> Timestamp:
        """Everything that committed at or below it is seen."""
        return self._timestamp

    def get(self, table: AnyTable, key: Any) -> dict[str, Any] | None:
        """The row with this key, or None."""
        return self._table(table).get(key, snapshot=self)

    def get_by(
        self, table: AnyTable, columns: str | Sequence[str], values: Any
    ) -> list[dict[str, Any]]:
        """The rows with these values in the columns of an index; see `Table.get_by`."""
        return self._table(table).get_by(columns, values, self)

    def get_many(self, table: AnyTable, keys: Sequence[Any]) -> pa.Table:
        """The rows with these keys, in their order; a row of nulls where there is none."""
        return self._table(table).get_many(keys, snapshot=self)

    def scan(
        self,
        table: AnyTable,
        columns: Sequence[str] | None = None,
        where: Any = None,
        ordered: Order = False,
        limit: int | None = None,
    ) -> Scan:
        """A scan of a table at this snapshot; see `Table.scan`."""
        return self._table(table).scan(columns, where, self, ordered, limit)

    def _table(self, table: AnyTable) -> Table:
        if isinstance(table, Table) and table._connection is self._connection:
            return table
        return Table(self._connection, self._connection.table_info(table))

    def __repr__(self) -> str:
        closed = ", closed" if self._held.snapshot is None else ""
        at = f"{int(self._timestamp)}, {self._timestamp.datetime:%Y-%m-%d %H:%M:%S} UTC,"
        return f"<Snapshot {at} of {self._connection.path!r}{closed}>"

    def _grid(self) -> Grid:
        tables = self._connection.instance.engine.names()
        return ["table", "rows"], [(name, self._table(name).count(None, self)) for name in tables]

    def require_open(self) -> None:
        """Refuse a closed snapshot.

        Raises:
            ClosedError: it was closed.
        """
        if self._held.snapshot is None:
            raise ClosedError(f"snapshot {int(self._timestamp)} was closed; take a new one")

    @brief
    def close(self) -> None:
        """Give the snapshot up. Twice is fine."""
        self._held.end()


class Table(Closing):
    """A table. Shared by threads."""

    def __init__(self, connection: Connection, info: TableInfo) -> None:
        self._connection = connection
        self.info = info
        self._lock = new_lock()
        self._row_ids, self._ids_of = iter(range(0)), 0  # of which process
        self._reader: core.RowReader | None = None

    @property
    def name(self) -> str:
        """The name as it is now; as it was, once the table was dropped or the client closed."""
        return self._now().name

    @property
    def schema(self) -> Schema:
        """Columns and key as they are now; as they were, once the table was dropped or the client
        closed.
        """
        return self._now().schema

    @property
    @shielded
    def history(self) -> float | None:
        """The seconds for which versions are kept, math.inf for ever; None: as long as the store
        says.
        """
        return self._engine().kept(self._now())

    def _now(self) -> TableInfo:
        with suppress(TableNotFoundError, ClosedError):
            self._connection.require_open()
            self.info = self._connection.instance.engine.current(self.info)
        return self.info

    @shielded
    def alter(
        self,
        add: Mapping[str, AnyColumn] | None = None,
        rename: Mapping[str, str] | None = None,
        drop: Sequence[str] = (),
        widen: Mapping[str, str | pa.DataType] | None = None,
        default: Mapping[str, Any] | None = None,
        nullable: Mapping[str, bool] | None = None,
        ttl: TtlChange = "keep",
        history: History | Literal["keep"] = "keep",
    ) -> Schema:
        """Change columns, at once for any number of rows; the key stays.

        Takes effect at once, outside of transactions. Rows that are there have the default of a new
        column, or null. Snapshots from before go on to see the columns that they had, and so does a
        transaction that began before: once it is to commit rows into the table, and is small, it
        gets SchemaChangedError and is run again.

        Args:
            add: new columns by name, behind those that there are; nullable, or with a default.
            rename: new names by old ones.
            drop: names. Another column of the same name has nothing of their values.
            widen: types with all values of the present ones, by column: integers and floats of more
                bits, decimals of more digits. Rows are cast as they are read.
            default: values for rows that are inserted from here on; None for no default.
            nullable: True lets a column hold nulls. With False all rows are looked through, while
                others may read and, but for the last look, write; a transaction that began before
                and wrote into the table gets SchemaChangedError, also a large one.
            ttl: how long rows live, as of a `Schema`; None: for ever.
            history: how long versions are kept, as of `client.create_table`. What is gone by now
                does not come back.

        Returns:
            The new schema.

        Raises:
            SchemaError: a column is not there, is of the key, or its name is taken; a new one is
                neither nullable nor has a default; a type has not all values of the present one;
                a default does not fit; a column that is to be not nullable is null in some row.
                Nothing was changed.
            TableNotFoundError: the table was dropped.
        """
        self._connection.require_writable()
        change = SchemaChange.of(add, rename, drop, widen, default, nullable, ttl)
        self.info = self._connection.instance.engine.alter(
            self.info,
            lambda schema: altered(schema, change),
            kept="keep" if history == "keep" else seconds_of(history),
        )
        self._connection.renew_sessions()  # their next rows are checked by the new schema
        return self.info.schema

    def __repr__(self) -> str:
        schema = self.info.schema
        columns = ", ".join(f"{name} {kind}" for name, kind in schema.type_names().items())
        return f"<Table {self.info.name!r}, {columns}; key {', '.join(schema.primary_key)}>"

    def _grid(self) -> Grid:
        schema = self.schema
        key = schema.primary_key
        return ["column", "type", "default", "key"], [
            (name, kind, schema.columns[name].default, key.index(name) + 1 if name in key else None)
            for name, kind in schema.type_names().items()
        ]

    def close(self) -> None:
        """Nothing to give up: the table stays, and other handles of it."""

    def get(self, key: Any, snapshot: At = None) -> dict[str, Any] | None:
        """The row with this key, or None.

        Args:
            key: a scalar, or a tuple for a composite key.
            snapshot: where to read; the latest by default.

        Raises:
            SchemaError: the key does not fit the table.
            TableNotFoundError: the table was dropped.
            HistoryExpiredError: the snapshot is older than the history that the store keeps.
        """
        if snapshot is None and self._connection.is_open:
            if self._reader is not None:
                found: dict[str, Any] | None = self._reader.get(key)
                if found is not NotImplemented:
                    return found
            self._connection.writer(self)

        def get(engine: TableEngine, info: TableInfo, view: ReadView) -> dict[str, Any] | None:
            return lookup.get(engine, engine.row_writer(info), view, key)

        return self._read(snapshot, get)

    def get_many(self, keys: Sequence[Any], snapshot: At = None) -> pa.Table:
        """The rows with these keys, in their order; a row of nulls where there is none."""
        return self._read(
            snapshot, lambda engine, info, view: lookup.get_many(engine, info, view, keys)
        )

    @property
    def indexes(self) -> list[Index]:
        """The indexes, ready or building; see `Client.create_index`."""
        return Index.all_of(self.schema)

    def get_by(
        self, columns: str | Sequence[str], values: Any, snapshot: At = None
    ) -> list[dict[str, Any]]:
        """The rows with these values in the columns of an index; of a unique one at most one.

        Args:
            columns: that there is an index by, a name or several in its order.
            values: one, or a tuple or list of as many; no row has a null among them.
            snapshot: where to read; the latest by default.

        Raises:
            SchemaError: there is no such index, or a value does not fit its column.
        """
        return self._read(
            snapshot, lambda engine, info, view: lookup.get_by(engine, info, view, columns, values)
        )

    def count(self, where: Any = None, snapshot: At = None) -> int:
        """Count all rows, or those that satisfy `where`."""

        def count(engine: TableEngine, info: TableInfo, view: ReadView) -> int:
            asked = scan.request(info, [], where, False, None)
            few = _few(engine, asked, view)
            return _count(engine, asked, view) if few is None else len(few)

        return self._read(snapshot, count)

    def scan(
        self,
        columns: Sequence[str] | None = None,
        where: Any = None,
        snapshot: At = None,
        ordered: Order = False,
        limit: int | None = None,
    ) -> Scan:
        """Read rows.

        Args:
            columns: names; all by default.
            where: a list of (column, op, value) joined by AND, with op one of = != < <= > >= in,
                or (column, "is null"), (column, "is not null"); or an expression of Arrow, alone
                or in the list, tried on rows if not as plain. NaN is = to nothing, found by in.
            snapshot: where to read; by default the latest at the first read.
            ordered: by primary key, "descending" the last first; or by columns, as "due",
                "-due", ["region", "-due"]. An index in that order finds the first ones.
            limit: at most so many rows.

        Raises:
            SchemaError: a column or operator is unknown, or a constant does not fit.
        """
        connection = self._connection
        connection.require_open()
        if snapshot is not None and isinstance(snapshot, Snapshot):
            snapshot.require_open()
        asked = partial(self._view, snapshot), columns, where, ordered, limit
        return Scan.over(connection, self._at(snapshot), *asked)

    def dataset(self, snapshot: At = None) -> pa.dataset.Dataset:
        """The table as a dataset of Arrow, for DuckDB, polars and others.

        They ask it for the columns and the rows that they need, and its scans skip what is not
        asked for: `duckdb.sql("SELECT ... FROM orders WHERE ...")` with `orders` a variable that
        holds it, or `polars.scan_pyarrow_dataset(orders)`.

        Args:
            snapshot: where all is read; by default each reading is of the latest.
        """
        from txnkv.client.dataset import TableDataset  # what it imports takes a while

        self._connection.require_open()
        return TableDataset(
            self._at(snapshot).schema,
            lambda columns, where: self.scan(columns, where, snapshot),
        )

    @shielded
    def diff(
        self, start: At, end: At = None, columns: Sequence[str] | None = None
    ) -> pa.RecordBatchReader:
        """The net change of each key with start < commit timestamp <= end.

        Args:
            start: a timestamp, aware datetime or snapshot.
            end: the same; the latest by default.
            columns: names of columns of the table; all by default.

        Returns:
            Arrow batches, read as they are asked for: the columns of the table as they are at
            `end` (of a deleted row as they were at `start`), `_op` ("insert", "update" or
            "delete") and `_commit_timestamp`, of the key's last change. A row that came and
            went in between is not in it.

        Raises:
            HistoryExpiredError: `start` is older than the history that the store keeps.
            SchemaError: there is no such column.
            ValueError: `start` is later than `end`, or one of them is in the future.
        """
        return diff.diff(self._engine(), self._diff_request(start, end, columns))

    @shielded
    def diff_tokens(
        self,
        start: At,
        end: At = None,
        columns: Sequence[str] | None = None,
        rows: int = TOKEN_ROWS,
    ) -> list[DiffToken]:
        """Parts that together are `diff`, for other processes.

        Keep a snapshot at `start` open until they have been read: it keeps the history that
        they need.

        Args:
            start: as for `diff`.
            end: the same.
            columns: the same.
            rows: about how many changes a part covers.

        Returns:
            Picklable tokens, none where nothing changed; `token.open(connection)` reads one.

        Raises:
            HistoryExpiredError, SchemaError, ValueError: as `diff`.
        """
        parts = diff.split(self._engine(), self._diff_request(start, end, columns), max(1, rows))
        return [DiffToken(one) for one in parts]

    def _diff_request(self, start: At, end: At, columns: Sequence[str] | None) -> DiffRequest:
        if start is None:
            raise ValueError("diff takes the time to start from: a timestamp or aware datetime")
        of = self._connection.timestamp_of
        upto = of(end)
        return diff.request(self._engine().at(self.info, upto), of(start), upto, columns)

    @shielded
    def restore(self, to: At, txn: Transaction | None = None) -> WriteResult:
        """Give the table the rows that it had at a time: what was changed since is written back.

        Columns stay as they are; rows have of a column that came later its default or null. The
        time must lie in the history that the store keeps: a snapshot that is open does.

        Args:
            to: a timestamp, aware datetime or snapshot.
            txn: write in this transaction, which commits it with all else; the rows are then those
                that differ between the time and the transaction's snapshot, and what it has
                written to the table itself before is overwritten where it lies among them. By
                default it is committed at once.

        Returns:
            How many rows were inserted, updated and deleted.

        Raises:
            HistoryExpiredError: the history does not go back that far.
            TransactionConflictError: another transaction changed one of the rows meanwhile; nothing
                was restored. `client.run(lambda txn: orders.restore(to, txn))` tries again.
            SchemaError: a row of then has no value for a column that may not be null by now.
            ValueError: the time is later than the transaction's snapshot.
        """
        self._connection.require_writable()
        if to is None:
            raise ValueError("restore takes a time: a timestamp, aware datetime or snapshot")
        then = self._connection.timestamp_of(to)
        if txn is not None:
            return self._restore(then, txn)
        # Begun after the time is known: all until then is in its snapshot, which may be earlier.
        with Transaction.begin(self._connection, timeout=None) as own:
            return self._restore(then, own) if then < own.snapshot else WriteResult()

    def _restore(self, then: Timestamp, txn: Transaction) -> WriteResult:
        engine, upto = self._engine(), txn.snapshot
        table = engine.at(self.info, upto)
        names = list(table.schema.primary_key)
        asked = diff.request(table, then, upto, names)

        def changed(come: bool) -> Iterator[pa.RecordBatch]:
            """Keys that came since, or the rows of then of those that changed or went."""
            for batch in diff.diff(engine, asked):
                fresh = pc.equal(batch.column(OP), "insert")
                keys = batch.filter(fresh if come else pc.invert(fresh)).select(names)
                if come:
                    yield keys
                elif keys.num_rows:
                    rows = lookup.rows_with(engine, table, ReadView(then), keys.columns)
                    yield from rows.to_batches()

        def stream(come: bool, schema: pa.Schema) -> pa.RecordBatchReader:
            fields = [field.with_nullable(not come) for field in schema]
            return pa.RecordBatchReader.from_batches(pa.schema(fields), changed(come))

        with Snapshot(self._connection, then):
            whole = table.schema.arrow
            keys = pa.schema([whole.field(name) for name in names])
            gone = txn.write(self, stream(True, keys), "delete_ignore")
            again = 0
            if engine.row_writer(table).may_refuse:  # values may have gone from row to row since
                batches = (batch.select(names) for batch in changed(come=False))
                first = pa.RecordBatchReader.from_batches(keys, batches)
                again = txn.write(self, first, "delete_ignore").deleted
            back = txn.write(self, stream(False, whole), "upsert")
        return WriteResult(back.inserted - again, back.updated + again, gone.deleted)

    def next_id(self) -> int:
        """An id that no other call in any process gets, known before commit; gaps happen.

        Ids follow neither time nor commits: each process takes a block of them. Who reads on behind
        the largest one misses rows that commit later: see "Number rows" in docs/howto.md.
        """
        self._connection.require_writable()
        self._connection.instance.engine.require_live(self.info)
        # A forked child has none of those that it inherits.
        found = next(self._row_ids, None) if self._ids_of == os.getpid() else None
        return self._reserve_ids() if found is None else found

    @shielded
    def _reserve_ids(self) -> int:
        with self._lock:
            here = os.getpid()
            found = next(self._row_ids, None) if self._ids_of == here else None
            if found is None:
                with self._engine().store.status.write() as cur:
                    found = table_catalog.reserve_row_ids(cur, self.info, _ROW_IDS)
                self._row_ids, self._ids_of = iter(range(found + 1, found + _ROW_IDS)), here
            return found

    # -- one row, in a transaction of its own ------------------------------------------

    def insert(self, row: Any) -> None:
        """Insert a row, durably; its key is not to be there.

        Args:
            row: a dict, a tuple in schema order or a dataclass.

        Raises:
            RowErrors: the key is there already.
            SchemaError: the row does not fit the table.
            TransactionLockedError: a transaction holds the partition's lock.
            StorageFullError, UnavailableError: the disk is full or failed; nothing was written.
            CommitOutcomeUnknownError: the disk failed at the commit point; its `ask` tells later.
        """
        self._write("insert", row)

    def upsert(self, row: Any) -> None:
        """Insert a row, or give the one that is there new values, durably; raises as `insert`."""
        self._write("upsert", row)

    def update(self, row: Any) -> None:
        """Give the row with this key new values, durably; raises as `insert`, and RowErrors where
        there is none.
        """
        self._write("update", row)

    def delete(self, key: Any) -> None:
        """Delete the row with this key, a scalar or a tuple, durably; raises as `update`."""
        self._write("delete", key)

    def _write(self, op: Operation, row: Any) -> None:
        self._connection.require_writable()
        writer = self._connection.writer(self)
        write_row(self._connection.instance, writer, op, writer.checker[op].take(row))

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.scan().__arrow_c_stream__(requested_schema)

    def _engine(self) -> TableEngine:
        self._connection.require_open()
        engine = self._connection.instance.engine
        engine.require_live(self.info)
        return engine

    def _at(self, at: At) -> TableInfo:
        """The table as it is, or was at some time."""
        engine = self._connection.instance.engine
        if at is None:
            return engine.current(self.info)
        return engine.at(self.info, self._connection.timestamp_of(at))

    def _read(self, at: At, read: Callable[[TableEngine, TableInfo, ReadView], T]) -> T:
        self._connection.require_open()
        engine = self._connection.instance.engine
        while True:
            snapshot = self._connection.timestamp_of(at)
            try:
                return read(engine, engine.at(self.info, snapshot), ReadView(snapshot))
            except HistoryExpiredError:
                # Not pinned, the latest snapshot may be overtaken by the history.
                if at is not None or self._connection.timestamp_of(at) == snapshot:
                    raise

    def _view(self, at: At) -> ReadView:
        return ReadView(self._connection.timestamp_of(at))


@dataclass(frozen=True)
class DiffToken:
    """A part of a diff, to be opened by any process. Picklable.

    Attributes:
        parts: which keys, between which times.
    """

    parts: DiffParts

    @property
    def rows(self) -> int:
        """About how many changes it covers, at most."""
        return self.parts.rows

    @shielded
    def open(self, client: Connection) -> pa.RecordBatchReader:
        """Its changes, as `Table.diff` gives them.

        Raises:
            InvalidTokenError: the token is of another store.
            TableNotFoundError: the table was dropped since.
            HistoryExpiredError: nobody kept the history from its start on.
        """
        require_client(client)
        client.require_open()
        if client.elsewhere is not None:
            found: pa.RecordBatchReader = client.elsewhere("open_diff", self.parts)
            return found
        return diff.reopen(client.instance.engine, self.parts)
