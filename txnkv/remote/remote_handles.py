"""Tables and scans of a store on another host, as a user holds them.

Each is the local handle's class, with every method sent to its twin at the server. A table or topic
is named by name and id, so that it outlives the server's process; the others are numbers there, and
those that can be made again (a scan of a known snapshot) are, when the server was started again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar, cast

import pyarrow as pa

from txnkv.client import Snapshot, Table
from txnkv.coordinator import Timestamp
from txnkv.core import FEW
from txnkv.errors import ClosedError, SchemaError, TableNotFoundError
from txnkv.remote.channel import Call, Channel
from txnkv.remote.wire import LostHandleError, arguments, at_hand, like, remote_calls
from txnkv.storage import new_lock
from txnkv.tables import TOKEN_ROWS, RowChecker, Schema
from txnkv.transaction import At, Scan, Transaction, WriteResult

_ROW_IDS: Final = 1000

T = TypeVar("T")


class RemoteHandle:
    """A handle whose twin is at the server.

    Attributes:
        twin: the class of that.
        number: of the handle at the server; 0: it is named otherwise.
    """

    twin: str

    _connection: Any
    number: int = 0

    @property
    def channel(self) -> Channel:
        """The way to the server."""
        found: Channel = self._connection._channel
        return found

    def reference(self) -> list[Any]:
        """Return what names it there."""
        return ["h", self.number]

    def numbered(self, number: int) -> None:
        """Be the handle of this number, and give it up when this is dropped."""
        self.number = number
        self._kept = self.channel.kept(number)

    def _made(self, source: Any, name: str, /, *args: Any, **named: Any) -> Any:
        """Make the handle, by a call on another; return what the server tells of it."""
        number = self.channel.new_handle()
        found = self.channel.call(Call(source.twin, source, name, args, named, makes=number))
        self.numbered(number)
        return found

    def _call(self, name: str, *args: Any, **named: Any) -> Any:
        call = Call(self.twin, self, name, args, named)
        return self._or_again(lambda: self.channel.call(call))

    def _or_again(self, do: Callable[[], T]) -> T:
        """Do what needs the handle; once more where the server has lost it and it is made again."""
        try:
            return do()
        except LostHandleError:
            if not self._make_again():
                raise
            return do()

    def _make_again(self) -> bool:
        """Make it again at the server, which has lost it; False: that cannot be."""
        return False


# -- tables ----------------------------------------------------------------------------


@remote_calls("Table", "insert upsert update delete", by="_put")
@remote_calls("Table", "get get_by get_many history indexes diff_tokens")
class RemoteTable(RemoteHandle, Table):
    """See `txnkv.Table`."""

    twin = "Table"

    def __init__(self, connection: Any, told: Mapping[str, Any]) -> None:
        self._connection = connection
        self._name: str = told["name"]
        self._id: int = told["id"]
        self._checker = RowChecker(told["schema"])  # and the schema that is known, as one
        self._connection.learn_schema(self._id, told["schema"])
        self._changes = self.channel.changes
        self._lock = new_lock()
        self._row_ids = iter(range(0))

    @property
    def id(self) -> int:
        """The id, which tells the table apart from another of its name."""
        return self._id

    def reference(self) -> list[Any]:
        return ["table", [self._name, self._id]]

    @property
    def name(self) -> str:
        """The name as this handle heard it last: `schema` and `client.table(handle)` ask."""
        return self._name

    @property
    def info(self) -> Any:  # type: ignore[override]  # nobody sets it
        """The table itself: handles of it for asyncio are known by it."""
        return self

    @property
    def schema(self) -> Schema:
        self._look()
        return self._checker.schema

    def _look(self) -> None:
        with suppress(TableNotFoundError, ClosedError):  # it is as it was
            told = self._connection._call("table", self)
            self.learn_name(told["name"])
            self.learn(told["schema"])

    def _at(self, at: At) -> Any:
        return self

    def learn_name(self, name: str) -> None:
        """Take a name for the table's present one."""
        self._name = name

    def learn(self, schema: Schema) -> None:
        """Take a schema for the table's present one."""
        self._connection.learn_schema(self._id, schema)
        if not is_same(schema, self._checker.schema):
            self._checker = RowChecker(schema)

    def checked(self, op: str, row: Any) -> tuple[tuple[Any, ...], RowChecker]:
        """Return the values of a row, or of a key that is deleted, and what has checked them: they
        are of the columns of its schema, while another thread may alter the table.

        Raises:
            SchemaError: it does not fit the table.
        """
        if self._changes != self.channel.changes:
            self._changes = self.channel.changes
            self._look()
        checker = self._checker
        try:
            return checker[op].take(row), checker
        except SchemaError:
            self._look()  # perhaps it was altered elsewhere
            before, checker = checker, self._checker
            if checker is before:
                raise
            return checker[op].take(row), checker

    def _put(self, op: str, *args: Any, **named: Any) -> None:
        self._connection.require_writable()
        self.checked(op, *args, *named.values())  # as it was given: on its way it may change
        self._call(op, *args, **named)

    @like(Table.alter)
    def alter(self, *args: Any, **named: Any) -> Schema:
        found: Schema = self._call("alter", **arguments(Table.alter, args, named))
        self.learn(found)
        return found

    @like(Table.count)
    def count(self, *args: Any, **named: Any) -> int:
        found: int = self._call("count", **arguments(Table.count, args, named))
        return found

    @like(Table.scan)
    def scan(self, *args: Any, **named: Any) -> Scan:
        return RemoteScan(self._connection, self, arguments(Table.scan, args, named))

    def diff(
        self, start: At, end: At = None, columns: Sequence[str] | None = None
    ) -> pa.RecordBatchReader:
        return reader_of(self, "diff", start, end, columns)

    def restore(self, to: At, txn: Transaction | None = None) -> WriteResult:
        if txn is not None:
            txn.flush()  # what waits here was written before
            cast(Any, txn).given = True
        found: WriteResult = self._call("restore", to, txn)
        return found

    def next_id(self) -> int:
        self._connection.require_writable()
        with self._lock:
            if (found := next(self._row_ids, None)) is None:
                found, last = self._call("next_ids", _ROW_IDS)
                self._row_ids = iter(range(found + 1, last))
            return int(found)


def is_same(one: Schema, other: Schema) -> bool:
    """Tell whether two schemas of a table are one, with the numbers of its columns."""
    return (one, one.ids, one.ttl) == (other, other.ids, other.ttl)


class TableThen(RemoteTable):
    """A table as a transaction has it, by the columns of its begin."""

    def __init__(self, table: RemoteTable, schema: Schema) -> None:
        self._connection, self._name, self._id = table._connection, table._name, table.id
        self._changes = table._changes
        self._checker = RowChecker(schema)

    def _look(self) -> None:
        """It stays as it was."""


def reader_of(handle: Any, name: str, *args: Any) -> pa.RecordBatchReader:
    """The batches that a call is answered by."""
    call = Call(handle.twin, handle, name, tuple(map(at_hand, args)))
    schema, batches = handle.channel.stream(call)
    return pa.RecordBatchReader.from_batches(schema, batches)


class RemoteSnapshot(RemoteHandle, Snapshot):
    """See `txnkv.Snapshot`."""

    twin = "Snapshot"

    def __init__(self, connection: Any, at: At, planning: RemoteHandle | None = None) -> None:
        self._connection = connection
        self._closed = False
        maker = (connection, "snapshot", at) if planning is None else (planning, "latest")
        self._timestamp = self._made(*maker)["timestamp"]
        self.channel.shared.add(self)

    def revive(self) -> None:
        """See that the server has it, which keeps its history."""
        self._call("timestamp")

    def _make_again(self) -> bool:
        self._made(self._connection, "snapshot", self._timestamp)
        if self._closed:  # meanwhile
            self.channel.drop(self.number)
        return True

    def __repr__(self) -> str:
        closed = ", closed" if self._closed else ""
        return f"<Snapshot {int(self._timestamp)} of {self._connection.path!r}{closed}>"

    def reference(self) -> list[Any]:
        self.require_open()
        return super().reference()

    def _table(self, table: Any) -> Table:
        if isinstance(table, RemoteTable) and table._connection is self._connection:
            return table
        found: Table = self._connection.table(table)
        return found

    def require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"snapshot {int(self._timestamp)} was closed; take a new one")

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.channel.shared.discard(self)
            self.channel.drop(self.number)


class RemoteScan(RemoteHandle, Scan):
    """See `txnkv.Scan`."""

    twin = "Scan"

    _at: At = None
    _is_read = False

    def __init__(
        self,
        connection: Any,
        source: Any,
        named: dict[str, Any],
        *,
        table: Any = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        self._at = named.get("snapshot")
        if isinstance(self._at, Snapshot):
            self._at.require_open()
        self._connection = connection
        self._source = source
        self._named = named
        self._of = table
        self._before = before
        self._bound: Any = None  # the snapshot, once it is known
        self._make()

    def _make(self) -> None:
        named = dict(self._named)
        args = () if self._of is None else (self._of,)
        if self._of is None and self._bound is not None:
            named["snapshot"] = self._bound
        told = self._made(self._source, "scan", *args, **named)
        self._schema: pa.Schema = told["schema"]

    def _make_again(self) -> bool:
        if not isinstance(self._source, Table):
            return False
        self._make()
        return True

    def __repr__(self) -> str:
        name = (self._source if self._of is None else self._of)._name
        at = "not read yet" if self._bound is None else f"at {int(self._bound)}"
        return f"<Scan of {name!r}, columns {', '.join(self._schema.names)}, {at}>"

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    @property
    def snapshot(self) -> Timestamp:
        self._ready()
        found: Timestamp = self._call("snapshot")
        self._bound = found
        return found

    def to_batches(self) -> Iterator[pa.RecordBatch]:
        self._ready()
        call = Call(self.twin, self, "to_batches")
        self._schema, batches = self._or_again(lambda: self.channel.stream(call))
        return batches

    def to_arrow(self) -> pa.Table:
        batches = list(self.to_batches())
        if not self._schema.names:
            return pa.Table.from_batches(batches) if batches else pa.table({})
        return pa.Table.from_batches(batches, self._schema)

    def tokens(self, rows: int = TOKEN_ROWS) -> Any:
        self._ready()
        return self._call("tokens", rows)

    def close(self) -> None:
        self._is_read = False
        if not self.channel.closed:
            self._call("close")

    def _few(self, most: int = FEW) -> list[dict[str, Any]] | None:
        self._ready()
        found: dict[str, Any] | None = self._call("few")
        if found is None:
            return None
        self._bound = Timestamp(found["snapshot"])
        self._schema = found["schema"] or self._schema
        rows: list[dict[str, Any]] = found["rows"]
        return rows

    def _ready(self) -> None:
        self._connection.require_open()
        if not self._is_read and isinstance(self._at, Snapshot):
            self._at.require_open()
        self._is_read = True
        if self._before is not None:
            self._before()


class TokenScan(RemoteScan):
    """A scan that a token opened."""

    def __init__(self, connection: Any, parts: Any) -> None:
        self._connection = connection
        self._source, self._of, self._before, self._bound = connection, parts, None, None
        self._parts = parts
        self._make()

    def _make(self) -> None:
        self._schema = self._made(self._connection, "open_scan", self._parts)["schema"]
        self._bound = Timestamp(self._parts.snapshot)

    def _make_again(self) -> bool:
        self._make()
        return True

    def __repr__(self) -> str:
        return f"<Scan of {self._parts.table!r}, a part of it, at {int(self._bound)}>"
