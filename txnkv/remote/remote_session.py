"""Sessions of a store on another host: what waits does so here, checked, until the next request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from typing import Any, Final, TypeVar, get_args

import pyarrow as pa

from txnkv.coordinator import TxnId
from txnkv.core import require_valid_columns, slices_of
from txnkv.errors import (
    ClosedError,
    InvalidTxnStateError,
    RowError,
    RowErrors,
    SchemaError,
    TableNotFoundError,
    TopicNotFoundError,
    TxnkvError,
    UnavailableError,
)
from txnkv.remote.channel import Call
from txnkv.remote.remote_handles import RemoteHandle, RemoteTable
from txnkv.remote.remote_topics import RemoteTopic
from txnkv.remote.wire import LostHandleError, ids_of
from txnkv.storage import new_rlock
from txnkv.tables import DELETES, MISSING, Operation, arrow_input, require_operation
from txnkv.topics import pending
from txnkv.transaction import (
    Background,
    FlushMode,
    Room,
    Session,
    SessionRows,
    WriteResult,
    encoder_of,
    flush_rest,
    note_alone,
    size_of,
    subscription_info,
)

T = TypeVar("T")

_REQUEST_BYTES: Final = 16 << 20
"""Rows that take more are sent, and flushed later."""

_SMALL_BYTES: Final = 256 << 10
"""Arrow data of so much goes in the request itself, not as a stream."""


_BATCH_BYTES: Final = 8 << 20
"""Arrow data is sent in pieces of so much."""


_MODES: Final = get_args(FlushMode)


def _require_mode(mode: str) -> None:
    if mode not in _MODES:
        raise ValueError(f"flush_mode is one of {', '.join(_MODES)}, not {mode!r}")


def _pieces(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Batches that a message holds, the next of which is on its way while one is written."""
    for batch in batches:
        require_valid_columns(batch)
        yield from slices_of(batch, batch.num_rows, _BATCH_BYTES)


class Changes:
    """Rows and messages that wait, in the order of their calls, for the next request."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all that waits."""
        # Op, table, numbers of columns by name, and rows: of all of these, or some by name.
        self.rows: list[list[Any]] = []
        self.sends: list[list[Any]] = []  # topic, messages
        self.count = 0
        self.size = 0  # bytes

    def __len__(self) -> int:
        return self.count

    def add_row(self, table: RemoteTable, op: str, row: Any) -> tuple[Any, ...]:
        """Check a row, and have it wait.

        Raises:
            SchemaError: it does not fit the table.
        """
        values, checker = table.checked(op, row)
        last = self.rows[-1] if self.rows else None
        if last is None or last[1] is not table or last[0] != op or last[4] is not checker:
            known = checker.schema
            names = known.primary_key if op in DELETES else known.names
            last = [op, table, {name: known.ids[name] for name in names}, [], checker]
            self.rows.append(last)
        if MISSING in values:  # by name, as it may name few of many columns
            named = {n: v for n, v in zip(last[2], values, strict=True) if v is not MISSING}
            last[3].append(named)
            self.size += size_of(named.values())
        else:
            last[3].append(list(values))
            self.size += size_of(values)
        self.count += 1
        return values

    def add_message(self, topic: RemoteTopic, message: list[Any]) -> None:
        """Have a message wait, as `topics.pending` makes it."""
        if not self.sends or self.sends[-1][0] is not topic:
            self.sends.append([topic, []])
        self.sends[-1][1].append(message)
        self.count += 1
        self.size += size_of(message)

    def calls(self, twin: str, target: Any) -> list[Call]:
        """Return the calls that send it."""
        found = []
        if self.sends:
            found.append(Call(twin, target, "sends", (self.sends,)))
        if self.rows:
            found.append(Call(twin, target, "rows", ([run[:4] for run in self.rows],)))
        return found


class _Left:
    """A number of rows, messages and acks that wait at the server."""

    count = 0

    def __len__(self) -> int:
        return self.count


class RemoteSession(RemoteHandle, Session):
    """See `txnkv.Session`.

    Args:
        connection: to the server.
        txn: its transaction; None: each flush is one of its own.
        flush_mode, buffer_bytes: as `Session` takes them.
        own: it is the transaction's own session.
        makes: the name of the call that makes it at the server.

    Attributes:
        given: it was, or may have been, given a row, a message or an acknowledgement.
    """

    twin = "Session"

    def __init__(
        self,
        connection: Any,
        txn: Any,
        flush_mode: FlushMode,
        buffer_bytes: int | None,
        *,
        own: bool = False,
        made_by: Call | None = None,
    ) -> None:
        _require_mode(flush_mode)
        self._room = Room(buffer_bytes, refuses=flush_mode == "manual")
        self._connection = connection
        self._txn = txn
        self._own = own
        self._mode: FlushMode = flush_mode
        self._changes = Changes()
        self._left = _Left()
        self._ends = self._closed = self.given = False
        self._refused: list[RowError] = []
        self._lock = new_rlock()
        self._flusher = Background(connection, self._room, self._lock)
        self._rows = SessionRows(self._room)  # none wait there: all go the long way
        self._tables: dict[str, RemoteTable] = {}
        self._topics: dict[str, RemoteTopic] = {}
        self._source = txn or connection
        if own:
            self.twin = "Transaction"
        if made_by is not None:
            self.numbered(made_by.makes)
        else:
            self.make()
        if txn is None:
            note_alone(connection, self, (self._changes, self._left))
        connection.sessions.add(self)

    def make(self) -> None:
        """Have it made at the server, or made again with its transaction."""
        if self._own:
            self.number = self._txn.number
            return
        number = self.channel.new_handle()
        call = Call(self._source.twin, self._source, "new_session", ("manual", None), {}, number)
        self.channel.later(call)
        self.numbered(number)

    def _make_again(self) -> bool:
        """Make it again; False where what waited at the server is gone, which the caller tells."""
        if self._txn is not None:
            return bool(self._txn._make_again())
        self.make()
        lost, self._left.count = self._left.count, 0
        return not lost

    # -- rows and messages -------------------------------------------------------------

    def _add(self, table: Any, op: str, row: Any) -> None:
        self._require_open(op)
        found = self._table_of(table)
        if self._txn is not None:
            found = self._txn.table_then(found)
        with self._lock:
            self._require_open(op)  # or a commit that has begun meanwhile would miss it
            if self._room.limit is not None:
                self._room.take(())
            values = self._changes.add_row(found, op, row)
            self._room.take(values)
            self._refuse_over()
        self._after_call()

    def _refuse_over(self) -> None:
        """Have the server say why it takes no more, before another thread's request is told so."""
        if self._txn is not None and self._txn.over:
            self._request(Call(self.twin, self, "flush"))

    def _after_call(self) -> None:
        if self._mode == "auto_sync":
            self.flush()
            return
        if self._changes.size > _REQUEST_BYTES:
            self._send_much()
        if self._mode == "auto_background":
            self._flusher.added(self)

    def _send_much(self) -> None:
        """Let the server have what waits; it goes on to take room until the next flush."""
        with self._lock:
            left = self._room.left[0]
            self._request()
            self._room.left[0] = left

    def write(self, table: Any, data: Any, op: Operation = "insert") -> WriteResult:
        require_operation(op)
        self._require_open("write")
        found = self._table_of(table)
        schema, batches = arrow_input.open_stream(data)
        return self._data("write", found, schema, batches, data, op)

    def send_batch(self, topic: Any, data: Any) -> WriteResult:
        self._require_open("send")
        schema, batches = arrow_input.open_stream(data, "send_batch")
        return self._data("send_batch", self._topic_of(topic), schema, batches, data)

    def _data(
        self, name: str, to: Any, schema: pa.Schema, batches: Any, data: Any, *more: Any
    ) -> WriteResult:
        small = isinstance(data, pa.Table | pa.RecordBatch) and data.nbytes <= _SMALL_BYTES
        found: WriteResult
        try:
            if small:
                table = pa.Table.from_batches(batches, schema)
                found = self._request(Call(self.twin, self, name, (to, table, *more)))
                return found
            if self._changes.count:
                self._request()
            call = Call(self.twin, self, name, (to, None, *more))
            found = self._ask(lambda: self.channel.put(call, schema, _pieces(batches)))
        except pa.ArrowNotImplementedError as error:  # Arrow's messages lack the type
            raise SchemaError(
                f"the data has a type that Arrow does not send ({error}): convert it first"
            ) from None
        except LostHandleError:
            if isinstance(data, pa.RecordBatchReader) or not self._make_again():
                raise
            schema, batches = arrow_input.open_stream(data)
            found = self._ask(lambda: self.channel.put(call, schema, _pieces(batches)))
        return found

    def send(
        self,
        topic: Any,
        value: Any,
        key: bytes | str | None = None,
        partition: int | None = None,
        headers: Any = None,
        timestamp: Any = None,
        deliver_at: Any = None,
    ) -> None:
        self._require_open("send")
        to = self._topic_of(topic)
        encode = encoder_of(to.info)
        if encode is not None:
            try:
                value = encode(value)
            except SchemaError:
                encode = encoder_of(self._connection.topic_info(to.info.name))
                if encode is None:
                    raise
                value = encode(value)
        count = len(to.info.partitions)
        if isinstance(partition, int) and partition >= count:
            count = to.partitions
        message = pending(value, key, partition, headers, timestamp, count, deliver_at)
        row = (message,) if isinstance(message, bytes) else message
        with self._lock:
            self._require_open("send")  # as with rows
            self._room.take(row)
            self._changes.add_message(to, list(row))
            self._refuse_over()
        self._after_call()

    def _acknowledge(self, subscription: Any, message: Any, *, cumulative: bool) -> None:
        self._require_open("acknowledge")
        info = subscription_info(subscription)
        name = "ack_cumulative" if cumulative else "ack"
        self._request(Call(self.twin, self, name, (info, ids := ids_of(message, info))))
        if self._txn is None:
            self._left.count += len(ids)
        self._after_call()

    # -- flush -------------------------------------------------------------------------

    def flush(self) -> WriteResult:
        if self._closed:  # with nothing left, and no handle
            return WriteResult()
        self._flusher.wait(self)
        found: WriteResult = self._request(Call(self.twin, self, "flush"))
        return found

    def pending_errors(self) -> list[RowError]:
        if self._closed:
            found, self._refused = self._refused, []
        else:
            found = self._call("pending_errors")
        return found

    def flush_untold(self) -> None:
        self._request(Call(self.twin, self, "flush_untold"))

    def flush_for_commit(self) -> None:
        self._flusher.wait(self)
        if not self._closed and (self.has_pending or not self.channel.closed):
            self.flush()

    def calls(self) -> list[Call]:
        """Return the calls that send what waits, which go in front of another."""
        with self._lock:
            self._tables, self._topics = {}, {}
            return self._changes.calls(self.twin, self)

    def taken(self, held: ExitStack | None = None) -> list[Call]:
        """Return those calls; until what is held is let go, no other thread has them or adds.

        Raises:
            InvalidTxnStateError: a commit has them, and they were to be held.
        """
        with self._lock:  # a commit has this flag first, so that it has them or finds none
            found = self.calls()
            if found:
                found[-1].done = lambda _: self.sent()
                if held is not None:
                    if self._is_committed:
                        raise InvalidTxnStateError(
                            "the transaction is being committed: begin a new one"
                        )
                    held.enter_context(self._lock)
            return found

    def sent(self) -> None:
        """All that waited is at the server."""
        with self._lock:
            self._changes.clear()
            self._room.empty()

    def _request(self, *calls: Call) -> Any:
        with self._lock:
            before = [] if self._is_committed else self.calls()
            if before:
                before[-1].done = lambda _: self._arrived()
            every = (*before, *calls)
            try:
                found = self._or_again(lambda: self._ask(lambda: self.channel.call(*every)))
            except UnavailableError:
                raise
            except (RowErrors, InvalidTxnStateError) as error:
                self._left.count = 0
                if self._txn is not None and isinstance(error, InvalidTxnStateError):
                    self.sent()  # nobody takes it any more
                raise
            except (TxnkvError, ValueError, TypeError):
                if before and self._changes.count:
                    self._arrived()  # or not, and the server does not take it
                raise
            if any(call.name.startswith("flush") for call in calls):
                self._left.count = 0
                self._room.empty()
            return found

    @property
    def _is_committed(self) -> bool:
        """All that waits is in the hands of its transaction's commit."""
        return self._txn is not None and bool(self._txn.committing)

    def _ask(self, do: Callable[[], T]) -> T:
        return do() if self._txn is None else self._txn.ask(do)

    def _arrived(self) -> None:
        self._left.count += self._changes.count
        self.sent()

    # -- as it is ----------------------------------------------------------------------

    @property
    def txn_id(self) -> TxnId | None:
        return None if self._txn is None else self._txn.id

    @property
    def flush_mode(self) -> FlushMode:
        return self._mode

    @flush_mode.setter
    def flush_mode(self, mode: FlushMode) -> None:
        self._require_open("change the flush mode")
        _require_mode(mode)
        self._flusher.wait(self)
        if self.has_pending:
            raise InvalidTxnStateError(
                f"cannot change the flush mode from {self._mode} to {mode}: rows or messages wait. "
                "Flush the session first"
            )
        self._mode = mode
        self._room.refuses = mode == "manual"

    @property
    def has_pending(self) -> bool:
        return bool(self._changes.count or self._left)

    def waiting(self) -> int:
        return self._changes.count

    def __repr__(self) -> str:
        whose = "" if self._txn is None else f" of {self._txn!r}"
        closed = ", closed" if self._closed else ""
        return f"<Session{whose}, {self._mode}, {self.waiting()} waiting{closed}>"

    def before_commit(self) -> None:
        """Wait for what goes on behind the caller, and raise what that has met."""
        self._flusher.wait(self)

    def discard(self) -> None:
        self._flusher.cancel()
        self.sent()
        if self._left and not self.channel.closed:
            with suppress(UnavailableError):
                self.channel.call(Call(self.twin, self, "discard"))
        self._left.count = 0

    def end(self) -> None:
        self._tables, self._topics = {}, {}
        self._flusher.cancel()

    def _take_no_more(self) -> None:
        with self._lock:
            self._ends = True

    def close(self) -> None:
        if self._closed:
            return self._leave()
        self._take_no_more()
        try:
            try:
                over = self._txn is not None and self._txn.over
                told = self._mode == "manual" and not self.has_pending  # else rows may be refused
                if not over and not (told and self.channel.closed):
                    self._flusher.wait(self)
                    calls = [Call(self.twin, self, name) for name in ("flush", "pending_errors")]
                    self._refused = self._request(*calls)
                if self._lost is not None:
                    self._lost.forget()
            except (TableNotFoundError, TopicNotFoundError):
                flush_rest(self)
                raise
        except RowErrors as error:
            self._refused = error.errors
            raise
        finally:
            self._flusher.cancel()
            self._closed = True
            if not self._is_committed:  # else the commit may fail, and be called again
                self.sent()
                if not self._own:
                    self.channel.drop(self.number)
            self._leave()

    def _leave(self) -> None:
        if (txn := self._txn) is not None and not (self._is_committed or self.has_pending):
            with txn._lock:
                txn.given = txn.given or self.given
                txn._sessions = tuple(each for each in txn._sessions if each is not self)

    def _require_open(self, what: str) -> None:
        if self._closed or self._ends:
            raise ClosedError(f"cannot {what}: the session was closed; make a new one")
        self._connection.require_open()
        if self._txn is not None and self._txn.ending and not self._txn.over:
            said = "the transaction is being committed: begin a new one"
            raise InvalidTxnStateError(f"cannot {what}: {said}")
        self._flusher.tell(self)
        self.given = True

    def _table_of(self, table: Any) -> RemoteTable:
        if isinstance(table, RemoteTable) and table._connection is self._connection:
            return table
        found = self._tables.get(table) if isinstance(table, str) else None
        if found is None:
            found = self._tables[table] = self._connection.table_of(table)
        return found

    def _topic_of(self, topic: Any) -> RemoteTopic:
        if isinstance(topic, RemoteTopic) and topic._connection is self._connection:
            return topic
        found = self._topics.get(topic) if isinstance(topic, str) else None
        if found is None:
            found = self._topics[topic] = self._connection.topic_of(topic)
        return found
