"""Indexes as a user makes them: built beside those who write, and compared with their table.

    create_index     the catalog has it, "building": whoever begins to write from now on writes its
                     entries too, and who began before is refused at the commit
    fill             by ranges of keys: what rows lack, looked for in a snapshot, is committed,
                     unless one of those rows was changed meanwhile; then again, with the right of
                     way if that goes on, and fewer at a time if that does not help
    ready            the catalog says so: snapshots from here on read it

A range that was filled stays so, for all that is written there since writes its entries. Who is
killed on the way leaves an index that is building, which is written and not read; the next
`create_index` by the same columns goes on, and begins at the first key. One is built at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa

from txnkv.coordinator import Timestamp
from txnkv.errors import (
    AlreadyPresentError,
    NotSupportedError,
    RowError,
    RowErrors,
    SchemaError,
    TableNotFoundError,
    TransactionConflictError,
    TransactionLockedError,
    TxnkvError,
)
from txnkv.storage import (
    CONFLICTS,
    Contender,
    MaintenanceLock,
    back_off,
    caller,
    declare_fault_point,
    fault_point,
)
from txnkv.tables import (
    ChangedRows,
    Evaluated,
    IndexInfo,
    KeyRange,
    Lacking,
    Piece,
    ReadView,
    Schema,
    TableEngine,
    TableIndex,
    TableInfo,
    Tablet,
    find_index,
    lacking,
    no_index,
    scan,
    staging,
    write_buffer,
)
from txnkv.transaction import Connection, Transaction, TxnContext

declare_fault_point("index.added", "a table has an index that is to be built")
declare_fault_point("index.filled", "entries of a range of keys are committed")
declare_fault_point("index.whole", "all entries are committed, the index is not ready")

_MOST_ROWS = 1 << 20
_FIRST_ROWS = 1 << 17
"""Rows of a range that is filled at once."""

_SETTLING: Final = 0.005
"""Seconds for those that began before it had the right of way, to end."""
_FIRST_PAUSE: Final = 0.001
_LONGEST_PAUSE: Final = 0.5
"""Seconds from one look at a lock to the next."""


@dataclass(frozen=True)
class Index:
    """An index of a table.

    Attributes:
        columns: that it is by, in their order.
        unique: no two rows have the same values there; rows with a null among them aside.
        state: "ready", or "building": it is written and not read yet.
    """

    columns: tuple[str, ...]
    unique: bool
    state: str

    @classmethod
    def all_of(cls, schema: Schema) -> list[Index]:
        """The indexes that a schema names."""
        return [
            cls(schema.names_of(each), each.unique, "ready" if each.ready else "building")
            for each in schema.indexes
        ]


def columns_of(columns: str | Sequence[str]) -> list[str]:
    """The columns that an index is by, as they are given.

    Raises:
        TypeError: they are no list.
    """
    if not isinstance(columns, Iterable):
        raise TypeError(f"columns is a name or a list of names, not {columns!r}")
    return [columns] if isinstance(columns, str) else list(columns)


def create_index(
    connection: Connection,
    table: TableInfo,
    columns: Sequence[str],
    *,
    unique: bool,
    progress: Callable[[int, int], None] | None = None,
) -> Index:
    """Make an index; see `Client.create_index`."""
    engine = connection.instance.engine
    engine.add_index(table, columns, unique=unique)
    connection.renew_sessions()  # their next rows are written with entries
    fault_point("index.added")
    lock = MaintenanceLock(Path(connection.path) / "index.lock", through_forks=True)
    try:
        with lock.hold():
            present = find_index(engine.current(table).schema, columns)
            if present is not None and not present.ready:
                _Build(connection, table, present, progress).run()
    finally:
        lock.close()
    connection.renew_sessions()
    found = find_index(engine.current(table).schema, columns)
    if found is None:
        raise _dropped(table)
    return Index(tuple(columns), found.unique, "ready" if found.ready else "building")


def drop_index(connection: Connection, table: TableInfo, columns: Sequence[str]) -> None:
    """Drop an index; see `Client.drop_index`."""
    engine = connection.instance.engine
    schema = engine.current(table).schema
    found = find_index(schema, columns)
    if found is None or not engine.drop_index(table, found):
        raise no_index(table.name, schema, columns)
    connection.renew_sessions()


def _dropped(table: TableInfo) -> SchemaError:
    return SchemaError(f"the index of table {table.name!r} was dropped while it was built")


class _Build:
    """The filling of one index."""

    def __init__(
        self,
        connection: Connection,
        table: TableInfo,
        index: IndexInfo,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._connection = connection
        self._engine: TableEngine = connection.instance.engine
        self._table = table
        self._index = index
        self._done = 0
        self._progress = progress
        self._total = 0
        if progress is not None:
            asked = scan.request(self._engine.current(table), [], None, False, None)
            self._total = scan.count(self._engine, asked, ReadView(self._engine.log.latest()))

    def run(self) -> None:
        """Fill all of it, and let it be read.

        Raises:
            RowErrors: it is unique, and two rows have the same values; it was dropped.
            SchemaError: it was dropped meanwhile.
            TableNotFoundError: the table was dropped.
        """
        try:
            for number in range(len(self._table.tablets)):
                self._fill(number)
        except RowErrors:
            self._engine.drop_index(self._table, self._index)
            raise
        fault_point("index.whole")
        self._engine.index_ready(self._table, self._index)

    def _fill(self, number: int) -> None:
        """Fill in the entries of the rows of one tablet."""
        low: bytes | None = None
        rows = _FIRST_ROWS
        while True:
            last, filled, lost = self._piece(number, low, rows)
            if last is None:
                return
            fault_point("index.filled")
            low = last + b"\0"
            rows = filled if lost else min(filled * 2, _MOST_ROWS)

    def _piece(self, number: int, low: bytes | None, rows: int) -> tuple[bytes | None, int, bool]:
        """Fill in the entries of some rows beside those who write.

        Returns:
            The last key, None at the end; in how many rows, at most, that succeeded; and whether it
            was tried before.
        """
        lost = locked = 0
        while True:
            turn, pause = Contender(self._connection.instance.store.right_of_way), 0.0
            try:
                for _ in range(CONFLICTS + 1):
                    turn.wait()
                    if turn.take(caller()):
                        time.sleep(_SETTLING)
                    try:
                        return self._step(number, low, rows), rows, lost > 0
                    except TransactionConflictError:
                        turn.lost()
                        lost += 1
                rows = max(rows // 4, 1)  # it takes longer than others wait, or they do not wait
            except TransactionLockedError:
                locked += 1
                pause = back_off(locked, _FIRST_PAUSE, _LONGEST_PAUSE)
            finally:
                turn.end()
            time.sleep(pause)

    def _step(self, number: int, low: bytes | None, rows: int) -> bytes | None:
        """Fill in the entries of some rows in the order of keys; return the last key, None at the
        end.

        Raises:
            TransactionConflictError, TransactionLockedError: others have changed one of them.
            RowErrors: two rows have the same values.
        """
        engine = self._engine
        with Transaction.begin(self._connection, None, "serializable") as txn:
            table = engine.at(self._table, txn.snapshot)
            index = next(
                (i for i in engine.indexes(table) if i.info.table == self._index.table), None
            )
            if index is None:
                raise _dropped(table)
            tablet = engine.tablets(table)[number]
            view = ReadView(txn.snapshot)
            found = rows_in_order(
                engine, table, index, view, Piece(tablet.id, KeyRange(low, None)), rows
            )
            if found is None:
                return None
            lacks = self._write_lacking(txn.context, tablet, index, found)
            if lacks.twice.n:
                raise self._twice(table, index, lacks.twice.n, lacks.twice.key(0))
            last = _last_key(tablet, table, found)
        self._done += found.num_rows
        if self._progress is not None:
            self._progress(self._done, max(self._done, self._total))
        return last

    def _write_lacking(
        self, context: TxnContext, tablet: Tablet, index: TableIndex, rows: pa.RecordBatch
    ) -> Lacking:
        """Write the entries that rows lack. The commit is refused if one of those rows is changed
        by others until then. Nothing is written where two rows have one value that may be of one
        alone.
        """
        engine, table = self._engine, tablet.table
        found = _lacking(engine, table, index, ReadView(context.row.snapshot_ts), rows)
        if found.entries is None or found.twice.n:
            return found
        assert context.reads is not None
        lack = [rows.column(name).take(found.rows) for name in key_of(table)]
        context.reads.add_keys(tablet.id, tablet.codec.encode(lack))
        made = [Evaluated(index.tablet, found.entries)]
        if found.entries.keys.n <= write_buffer.MAX_ROWS:
            with context.lock:
                context.rows.put_evaluated(made)
                context.settle()
        else:
            staging.stage_evaluated(engine, context.ensure_large("fill an index"), made)
        return found

    def _twice(self, table: TableInfo, index: TableIndex, count: int, key: bytes) -> RowErrors:
        error = AlreadyPresentError(
            f"several rows have it, so that no index by {', '.join(index.columns)} can be unique. "
            "None was made: change those rows, or create it with unique=False"
        )
        values = index.tablet.readable_key(key)
        return RowErrors([RowError("create_index", table.name, values, error)], count)


def key_of(table: TableInfo) -> list[str]:
    """The columns of a table's key."""
    return list(table.schema.primary_key)


def rows_in_order(
    engine: TableEngine,
    table: TableInfo,
    index: TableIndex,
    view: ReadView,
    piece: Piece,
    rows: int,
) -> pa.RecordBatch | None:
    """The first rows of a piece of a table, by key: the columns of their keys and of an index."""
    asked = scan.request(table, [*key_of(table), *index.beside], None, True, rows)
    plan = scan.plan(engine, asked, view, [piece])
    try:
        found = pa.Table.from_batches(list(plan.batches()), asked.schema).combine_chunks()
    finally:
        plan.pins.release()
    return found.to_batches()[0] if found.num_rows else None


def _lacking(
    engine: TableEngine, table: TableInfo, index: TableIndex, view: ReadView, rows: pa.RecordBatch
) -> Lacking:
    """The entries that rows of a view, of `rows_in_order`, lack there."""
    key = {name: rows.column(name) for name in key_of(table)}
    new = {name: rows.column(name) for name in index.beside}
    return lacking(index, ChangedRows(key, new, None, None), lambda at: view.of(engine, at))


# -- check -----------------------------------------------------------------------------


def check_indexes(engine: TableEngine, table: TableInfo, snapshot: Timestamp) -> Iterator[str]:
    """Compare the indexes of a table with its rows, at a snapshot that is pinned.

    Yields:
        What is wrong, one line for an index.
    """
    view = ReadView(snapshot)
    try:
        then = engine.at(table, snapshot)
        indexes = engine.indexes(then)
    except TxnkvError:
        return  # dropped or altered meanwhile
    for index in indexes:
        try:
            there, no = _compared(engine, then, index, view)
            hidden = engine.at(index.tablet.table, snapshot)
            entries = scan.count(engine, scan.request(hidden, [], None, False, None), view)
        except (TableNotFoundError, TransactionConflictError):
            return
        lost = no if index.ready else 0  # while it is built, rows may lack an entry
        if lost or entries != there:
            yield (
                f"table {then.name!r}, index by {', '.join(index.columns)}: rows without an entry: "
                f"{lost}, entries without a row: {entries - there} of {entries}. Drop it and "
                "create it again; the table itself is whole"
            )


def _compared(
    engine: TableEngine, table: TableInfo, index: TableIndex, view: ReadView
) -> tuple[int, int]:
    """Rows with their entry, and without it."""
    there = no = 0
    for tablet in engine.tablets(table):
        low: bytes | None = None
        while True:
            piece = Piece(tablet.id, KeyRange(low, None))
            rows = rows_in_order(engine, table, index, view, piece, _FIRST_ROWS)
            if rows is None:
                break
            found = _lacking(engine, table, index, view, rows)
            there += found.there
            no += len(found.rows)
            low = _last_key(tablet, table, rows) + b"\0"
    return there, no


def _last_key(tablet: Tablet, table: TableInfo, rows: pa.RecordBatch) -> bytes:
    last = rows.slice(rows.num_rows - 1)
    return tablet.codec.encode([last.column(name) for name in key_of(table)]).key(0)


def refuse_index_part(name: str) -> None:
    """Refuse to give up a part of an index, which has nothing that its table has not.

    Raises:
        NotSupportedError: the name is that of an index.
    """
    if " (index by " in name:
        raise NotSupportedError(
            f"{name!r} is an index, and all that it has its table has too: "
            "client.drop_index(table, columns) and client.create_index(...) make it anew"
        )
