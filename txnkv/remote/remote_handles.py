"""Tables, scans and topics of a store on another host, as a user holds them.

Each is the local handle's class, with every method sent to its twin at the server. A table or topic
is named by name and id, so that it outlives the server's process; the others are numbers there, and
those that can be made again (a scan of a known snapshot, a consumer at its positions, a
subscription) are, when the server was started again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from operator import itemgetter
from typing import Any, Final, TypeVar

import pyarrow as pa

from txnkv.client import Consumer, Producer, Snapshot, Subscription, Table, Topic
from txnkv.coordinator import Timestamp
from txnkv.errors import (
    ClosedError,
    CommitOutcomeUnknownError,
    InvalidTxnStateError,
    TableNotFoundError,
    TopicNotFoundError,
    UnavailableError,
)
from txnkv.remote.channel import Call, Channel
from txnkv.remote.wire import LostHandleError, arguments, ids_of, like, remote_calls
from txnkv.storage import new_lock
from txnkv.tables import TOKEN_ROWS, RowChecker, Schema
from txnkv.topics import (
    Delivered,
    Message,
    Start,
    SubscriptionInfo,
    TopicInfo,
    messages_from_arrow,
)
from txnkv.transaction import At, Connection, Scan, Transaction, WriteResult

_POLL_SECONDS: Final = 2.0
"""A wait at the server is at most so long; then it is asked for again."""

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


@remote_calls(
    "Table",
    "get get_by get_many history indexes count diff_tokens insert upsert update delete",
)
class RemoteTable(RemoteHandle, Table):
    """See `txnkv.Table`."""

    twin = "Table"

    def __init__(self, connection: Any, told: Mapping[str, Any]) -> None:
        self._connection = connection
        self._name: str = told["name"]
        self._id: int = told["id"]
        self.known: Schema = told["schema"]
        self.checker = RowChecker(self.known)
        self._lock = new_lock()
        self._row_ids = range(0)

    @property
    def id(self) -> int:
        """The id, which tells the table apart from another of its name."""
        return self._id

    def reference(self) -> list[Any]:
        return ["table", [self._name, self._id]]

    @property
    def name(self) -> str:
        return self._name

    @property
    def info(self) -> Any:  # type: ignore[override]  # nobody sets it
        """The table itself: handles of it for asyncio are known by it."""
        return self

    @property
    def schema(self) -> Schema:
        with suppress(TableNotFoundError, ClosedError):  # it is as it was
            self.learn(self._call("schema"))
        return self.known

    def _at(self, at: At) -> Any:
        return self

    def learn_name(self, name: str) -> None:
        """Take a name for the table's present one."""
        self._name = name

    def learn(self, schema: Schema) -> None:
        """Take a schema for the table's present one."""
        if (schema, schema.ids, schema.ttl) != (self.known, self.known.ids, self.known.ttl):
            self.known, self.checker = schema, RowChecker(schema)

    @like(Table.alter)
    def alter(self, *args: Any, **named: Any) -> Schema:
        self.learn(self._call("alter", *args, **named))
        return self.known

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
        found: WriteResult = self._call("restore", to, txn)
        return found

    def next_id(self) -> int:
        with self._lock:
            if not self._row_ids:
                first, last = self._call("next_ids", _ROW_IDS)
                self._row_ids = range(first, last)
            found = self._row_ids[0]
            self._row_ids = self._row_ids[1:]
            return found


def reader_of(handle: Any, name: str, *args: Any) -> pa.RecordBatchReader:
    """The batches that a call is answered by."""
    schema, batches = handle.channel.stream(Call(handle.twin, handle, name, args))
    return pa.RecordBatchReader.from_batches(schema, batches)


class RemoteSnapshot(RemoteHandle, Snapshot):
    """See `txnkv.Snapshot`."""

    twin = "Snapshot"

    def __init__(self, connection: Any, at: At, planning: RemoteHandle | None = None) -> None:
        self._connection = connection
        self._closed = False
        maker = (connection, "snapshot", at) if planning is None else (planning, "latest")
        self._timestamp = self._made(*maker)["timestamp"]

    def __repr__(self) -> str:
        closed = ", closed" if self._closed else ""
        return f"<Snapshot {int(self._timestamp)} of {self._connection.path!r}{closed}>"

    def reference(self) -> list[Any]:
        self.require_open()
        return super().reference()

    def _table(self, table: Any) -> Table:
        return table if isinstance(table, Table) else self._connection.table(table)

    def require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"snapshot {int(self._timestamp)} was closed; take a new one")

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.channel.drop(self.number)


class RemoteScan(RemoteHandle, Scan):
    """See `txnkv.Scan`."""

    twin = "Scan"

    def __init__(
        self,
        connection: Any,
        source: Any,
        named: dict[str, Any],
        *,
        table: Any = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        self._at: At = named.get("snapshot")
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
        if not isinstance(self._source, Table) or isinstance(self._at, Snapshot):
            return False
        self._make()
        return True

    def __repr__(self) -> str:
        name = self._source.name if isinstance(self._source, Table) else self._of.name
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
        self._call("close")

    def _few(self) -> list[dict[str, Any]] | None:
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


# -- topics ----------------------------------------------------------------------------


@remote_calls(
    "Topic",
    "drop_subscription end_offsets fetch last_stable_offsets options partitions "
    "subscriptions truncate",
)
class RemoteTopic(RemoteHandle, Topic):
    """See `txnkv.Topic`."""

    twin = "Topic"

    def __init__(self, connection: Any, told: Mapping[str, Any]) -> None:
        self._connection = connection
        self.info: TopicInfo = told["info"]

    def reference(self) -> list[Any]:
        return ["topic", [self.info.name, self.info.id]]

    @like(Topic.alter)
    def alter(self, *args: Any, **named: Any) -> Any:
        found = self._call("alter", *args, **named)
        self._look()
        return found

    def _look(self) -> None:
        with suppress(TopicNotFoundError, ClosedError):
            found = self._connection.topic_info(self.info.name)
            self.info = found if found.id == self.info.id else self.info

    @like(Topic.consumer)
    def consumer(self, *args: Any, **named: Any) -> Consumer:
        return RemoteConsumer(self, arguments(Topic.consumer, args, named))

    @like(Topic.subscribe)
    def subscribe(self, *args: Any, **named: Any) -> Subscription:
        return RemoteSubscription(self, args, named)

    def producer(self, name: str | None = None, **options: Any) -> Producer:
        return RemoteProducer(self._connection, self.info, name, **options)


class _Polling(RemoteHandle):
    """A reader of messages, which are waited for at the server."""

    _info: TopicInfo
    _tcid: int

    def _wait_for(self, name: str, most: int, timeout: float | None) -> Any:
        """Ask until there is something, or the time is over."""
        end = None if timeout is None else time.monotonic() + timeout
        longest = min(_POLL_SECONDS, self.channel.patience / 2)
        while True:
            left = longest if end is None else min(max(end - time.monotonic(), 0), longest)
            try:
                found = self._call(name, most, left)
            except CommitOutcomeUnknownError as error:  # what was given comes again
                raise UnavailableError(f"{self.channel.address} was lost; ask again") from error
            if found["rows"].num_rows or (end is not None and time.monotonic() >= end):
                return found

    def _messages(self, found: Mapping[str, Any]) -> list[Message]:
        if found.get("stages", 0) > len(self._info.options.values):
            self._info = self._connection.topic_info(self._info.name)
        return messages_from_arrow(found["rows"], self._tcid, self._info.options.codec)


@remote_calls("Consumer", "position lag")
class RemoteConsumer(_Polling, Consumer):
    """See `txnkv.Consumer`."""

    twin = "Consumer"

    def __init__(self, topic: RemoteTopic, options: dict[str, Any]) -> None:
        self._connection = topic._connection
        self._topic_handle, self._options, self._start = topic, options, options.pop("start")
        self._info, self._closed = topic.info, False
        self._at: dict[int, list[int]] = {}  # by partition; its position comes first
        self._make()
        self._was = self._at  # before the last poll

    def _make(self) -> None:
        told = self._made(self._topic_handle, "consumer", self._start, self._at, **self._options)
        self._tcid: int = told["tcid"]
        self._at = told["at"]

    def _make_again(self) -> bool:
        self._make()
        return True

    def poll(self, *, max_messages: int = 500, timeout: float | None = 1.0) -> list[Message]:
        return self._polled("poll", max_messages, timeout, self._messages)

    def _polled(self, name: str, most: int, timeout: float | None, read: Callable[[Any], T]) -> T:
        self._require_open()
        try:
            found = self._wait_for(name, most, timeout)
            rows = read(found)
        except (UnavailableError, KeyboardInterrupt):
            self._go_back(self._at)  # the server may have given what did not come here
            raise
        self._was, self._at = self._at, found["at"]
        return rows

    def _go_back(self, at: dict[int, list[int]]) -> None:
        """Be made anew there, at the next call: the server may be out of reach."""
        self._at, self.number, self._kept = at, 0, None

    def _or_again(self, do: Callable[[], T]) -> T:
        if not self.number:
            self._make()
        return super()._or_again(do)

    @like(Consumer.unpoll)
    def unpoll(self) -> None:
        self._go_back(self._was)

    def poll_batch(
        self, *, max_messages: int = 65536, timeout: float | None = 1.0
    ) -> pa.RecordBatch:
        found: pa.RecordBatch = self._polled(
            "poll_batch", max_messages, timeout, itemgetter("rows")
        )
        return found

    @property
    def partitions(self) -> list[int]:
        return list(self._at)

    def seek(self, partition: int, offset: int) -> None:
        self._at = self._call("seek", partition, offset)
        self._was = self._was | {partition: self._at[partition]}

    def seek_to_time(self, when: datetime) -> None:
        self._was = self._at = self._call("seek_to_time", when)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.channel.drop(self.number)

    def __repr__(self) -> str:
        closed = ", closed" if self._closed else ""
        isolation = self._options["isolation"]
        places = ", ".join(f"{number}@{at[0]}" for number, at in self._at.items())
        return f"<Consumer of {self._info.name!r}, {isolation}: {places}{closed}>"

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"this consumer of {self._info.name!r} was closed; make another")
        self._connection.require_open()


@remote_calls("Subscription", "committed is_active lag lost unreceive")
class RemoteSubscription(_Polling, Subscription):
    """See `txnkv.Subscription`."""

    twin = "Subscription"

    def __init__(self, topic: RemoteTopic, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._connection = topic._connection
        self._topic_handle, self._args, self._options = topic, args, options
        self._info, self._pid, self._closed = topic.info, os.getpid(), False
        self._make("subscribe", *args, **options)

    def _make(self, how: str, /, *args: Any, **options: Any) -> None:
        told = self._made(self._topic_handle, how, *args, **options)
        self.info: SubscriptionInfo = told["info"]
        self._tcid: int = told["tcid"]

    def _make_again(self) -> bool:
        named = arguments(Topic.subscribe, self._args, self._options)
        del named["options"]  # others may have set them otherwise since
        self._make("subscribe_again", self.info.id, named)
        return True

    def __repr__(self) -> str:
        closed = ", closed" if self._closed else ""
        info = self.info
        return f"<Subscription {info.name!r} of {info.topic.name!r}, {info.type}{closed}>"

    def receive_many(self, max_messages: int = 100, timeout: float | None = None) -> list[Message]:
        self._require_open()
        return self._messages(self._wait_for("receive_many", max_messages, timeout))

    def _acknowledge(self, how: str, message: Any, txn: Any) -> None:
        self._require_open()
        if txn is not None:
            getattr(txn, how)(self, message)
        else:
            self._call(how, ids_of(message))

    def nack(self, message: Any) -> None:
        self._require_open()
        self._call("nack", ids_of(message))

    def seek(self, partition: int, offset: int | Start) -> None:
        self._require_open()
        self._call("seek", partition, offset)

    def close(self) -> None:
        if not self._closed and os.getpid() == self._pid:
            self._closed = True
            if not self.channel.closed:
                with suppress(UnavailableError):  # with its server it is closed
                    self.channel.call(Call(self.twin, self, "close"))
            self.channel.drop(self.number)

    def _require_open(self) -> None:
        if os.getpid() != self._pid:
            raise InvalidTxnStateError(
                f"{self.info} was opened by process {self._pid}: subscribe in this one"
            )
        self._connection.require_open()
        if self._closed:
            raise ClosedError(f"{self.info}: this consumer was closed; subscribe again")


# -- producers -------------------------------------------------------------------------


class RemoteProducer(Producer):
    """See `txnkv.Producer`: what waits does so here, and one request sends it."""

    def _make_sender(self, connection: Connection, name: str | None, patience: float) -> Any:
        return _RemoteSender(connection, self._topic, name, patience)


class _RemoteSender(RemoteHandle):
    """A sender at the server. Made again it goes on as the producer that it was, or is fenced."""

    twin = "Sender"

    def __init__(
        self, connection: Any, topic: TopicInfo, name: str | None, patience: float
    ) -> None:
        self._connection, self._name, self.patience = connection, name, patience
        self._topic = RemoteTopic(connection, {"info": topic})
        self._producer: list[int] | None = None  # id and epoch
        self._make_again()

    def _make_again(self) -> bool:
        told = self._made(self._topic, "sender", self._name, self.patience, self._producer)
        self.sent: int = told["sent"]
        self.partitions: int = told["partitions"]
        self._producer = told["producer"]
        return True

    def look(self) -> int:
        """Ask for the number of partitions."""
        self.partitions = self._topic.partitions
        return self.partitions

    def deliver(self, shares: Sequence[tuple[int, pa.RecordBatch]]) -> list[Delivered]:
        told = self._call("deliver", [list(share) for share in shares])
        self.sent += sum(batch.num_rows for _, batch in shares)
        self.partitions, self._producer = told["partitions"], told["producer"]
        found: list[Delivered] = told["delivered"]
        return found
