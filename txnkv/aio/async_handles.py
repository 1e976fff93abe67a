"""Tables, snapshots and scans for asyncio; topics, consumers, subscriptions and producers.

A wait for messages holds a thread for a tenth of a second at a time. A call that is cancelled
while it waits loses nothing: what it would have returned is returned by the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Protocol, TypeVar

import pyarrow as pa

from txnkv.aio.calls import Calls, ClosingWrapper, InTurn, Wrapper
from txnkv.client import Consumer, DiffToken, Producer, Snapshot, Subscription, Table, Topic
from txnkv.coordinator import Timestamp
from txnkv.tables import TOKEN_ROWS, AnyColumn, Schema
from txnkv.topics import FetchResult, Message, MessageId, Start, SubscriptionType
from txnkv.transaction import Acknowledged, Scan, ScanToken

T = TypeVar("T")

_SLICE: Final = 0.1


class AsyncScan(Wrapper):
    """See `txnkv.Scan`. Belongs to one task at a time."""

    def __init__(self, scan: Scan, calls: Calls) -> None:
        self.blocking: Scan = scan
        self._calls = calls

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the batches."""
        return self.blocking.schema

    async def snapshot(self) -> Timestamp:
        """The snapshot that it reads."""
        return await self._calls(lambda: self.blocking.snapshot)

    async def to_arrow(self) -> pa.Table:
        """The rows as an Arrow table."""
        return await self._calls(self.blocking.to_arrow)

    async def to_pandas(self) -> Any:
        """The rows as a pandas data frame; needs pandas."""
        return await self._calls(self.blocking.to_pandas)

    async def to_polars(self) -> Any:
        """The rows as a polars data frame; needs polars."""
        return await self._calls(self.blocking.to_polars)

    async def to_batches(self) -> AsyncIterator[pa.RecordBatch]:
        """The rows as record batches of up to 64 Ki rows."""
        async for batch in self._calls.each(await self._calls(self.blocking.to_batches)):
            yield batch

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        async for batch in self.to_batches():
            for row in await self._calls(batch.to_pylist):
                yield row

    async def tokens(self, rows: int = TOKEN_ROWS) -> list[ScanToken]:
        """Parts that together are this scan, for other processes; each of about so many rows."""
        return await self._calls(self.blocking.tokens, rows)

    async def close(self) -> None:
        """Give the snapshot up."""
        await self._calls(self.blocking.close)


class AsyncTable(Wrapper):
    """See `txnkv.Table`."""

    def __init__(self, table: Table, calls: Calls) -> None:
        self.blocking: Table = table
        self._calls = calls

    @property
    def name(self) -> str:
        return self.blocking.name

    @property
    def schema(self) -> Schema:
        return self.blocking.schema

    async def alter(
        self,
        add: Mapping[str, AnyColumn] | None = None,
        rename: Mapping[str, str] | None = None,
        drop: Sequence[str] = (),
    ) -> Schema:
        """Add, rename and drop columns; see `txnkv.Table.alter`."""
        return await self._calls(self.blocking.alter, add, rename, drop)

    async def get(self, key: Any, snapshot: At = None) -> dict[str, Any] | None:
        """The row with this key, or None."""
        return await self._calls(self.blocking.get, key, plain_at(snapshot))

    async def get_many(self, keys: Sequence[Any], snapshot: At = None) -> pa.Table:
        """The rows with these keys, in their order; a row of nulls where there is none."""
        return await self._calls(self.blocking.get_many, keys, plain_at(snapshot))

    async def count(self, where: Any = None, snapshot: At = None) -> int:
        """Count all rows, or those that satisfy `where`."""
        return await self._calls(self.blocking.count, where, plain_at(snapshot))

    def scan(
        self,
        columns: Sequence[str] | None = None,
        where: Any = None,
        snapshot: At = None,
        ordered: bool = False,
        limit: int | None = None,
    ) -> AsyncScan:
        """See `txnkv.Table.scan`; nothing is read yet."""
        scan = self.blocking.scan(columns, where, plain_at(snapshot), ordered, limit)
        return AsyncScan(scan, self._calls)

    async def diff(
        self, start: At, end: At = None, columns: Sequence[str] | None = None
    ) -> pa.Table:
        """The net change of each key between two times; see `txnkv.Table.diff`."""
        return await self._calls(
            lambda: self.blocking.diff(plain_at(start), plain_at(end), columns).read_all()
        )

    async def diff_tokens(
        self,
        start: At,
        end: At = None,
        columns: Sequence[str] | None = None,
        rows: int = TOKEN_ROWS,
    ) -> list[DiffToken]:
        """Parts of a diff for other processes; see `txnkv.Table.diff_tokens`."""
        return await self._calls(
            lambda: self.blocking.diff_tokens(plain_at(start), plain_at(end), columns, rows)
        )

    async def insert(self, row: Any) -> None:
        """Insert a row, durably; see `txnkv.Table.insert`."""
        await self._calls(self.blocking.insert, row)

    async def upsert(self, row: Any) -> None:
        """Insert a row, or give the one that is there new values; see `txnkv.Table.upsert`."""
        await self._calls(self.blocking.upsert, row)

    async def update(self, row: Any) -> None:
        """Give the row with this key new values; see `txnkv.Table.update`."""
        await self._calls(self.blocking.update, row)

    async def delete(self, key: Any) -> None:
        """Delete the row with this key; see `txnkv.Table.delete`."""
        await self._calls(self.blocking.delete, key)

    async def next_id(self) -> int:
        """An id that no other call in any process gets."""
        return await self._calls(self.blocking.next_id)


class AsyncSnapshot(ClosingWrapper):
    """See `txnkv.Snapshot`; an `async with` block closes it."""

    def __init__(self, snapshot: Snapshot, calls: Calls) -> None:
        self.blocking: Snapshot = snapshot
        self._calls = calls

    @property
    def timestamp(self) -> Timestamp:
        """Everything that committed at or below it is seen."""
        return self.blocking.timestamp

    async def get(self, table: str | AsyncTable, key: Any) -> dict[str, Any] | None:
        """The row with this key, or None."""
        return await self._calls(self.blocking.get, plain(table), key)

    async def get_many(self, table: str | AsyncTable, keys: Sequence[Any]) -> pa.Table:
        """The rows with these keys, in their order; a row of nulls where there is none."""
        return await self._calls(self.blocking.get_many, plain(table), keys)

    async def scan(self, table: str | AsyncTable, **options: Any) -> AsyncScan:
        """A scan of a table at this snapshot; see `AsyncTable.scan`."""
        found = await self._calls(self.blocking.scan, plain(table), **options)
        return AsyncScan(found, self._calls)

    async def close(self) -> None:
        """Give the snapshot up. Twice is fine."""
        self.blocking.close()


At = AsyncSnapshot | Any


def plain(table: str | AsyncTable | Table) -> str | Table:
    """A table as the blocking client takes it."""
    return table.blocking if isinstance(table, AsyncTable) else table


def plain_at(at: At) -> Any:
    """A point in time as the blocking client takes it."""
    return at.blocking if isinstance(at, AsyncSnapshot) else at


# -- topics ----------------------------------------------------------------------------


class AsyncTopic(Wrapper):
    """See `txnkv.Topic`."""

    def __init__(self, topic: Topic, calls: Calls) -> None:
        self.blocking: Topic = topic
        self._calls = calls

    @property
    def name(self) -> str:
        return self.blocking.name

    @property
    def partitions(self) -> int:
        """The number of partitions."""
        return self.blocking.partitions

    @property
    def buffer(self) -> str:
        """The place where messages of open transactions wait: "marker" or "sidecar"."""
        return self.blocking.buffer

    @property
    def value_schema(self) -> pa.Schema | None:
        """The columns of values; None where they are bytes."""
        return self.blocking.value_schema

    async def end_offsets(self) -> dict[int, int]:
        """For each partition the offset behind its last message."""
        return await self._calls(self.blocking.end_offsets)

    async def last_stable_offsets(self) -> dict[int, int]:
        """For each partition the offset up to which readers of committed messages get."""
        return await self._calls(self.blocking.last_stable_offsets)

    async def fetch(self, partition: int, offset: int, **options: Any) -> FetchResult:
        """Raw batches of one partition; see `txnkv.Topic.fetch`."""
        return await self._calls(self.blocking.fetch, partition, offset, **options)

    async def consumer(self, **options: Any) -> AsyncConsumer:
        """A reader of messages; takes the options of `txnkv.Topic.consumer`."""
        made = await self._calls(self.blocking.consumer, **options)
        return AsyncConsumer(made, self._calls)

    async def subscribe(
        self,
        name: str,
        type: SubscriptionType = "exclusive",
        start: Start | Mapping[int, int] = "earliest",
        partitions: Sequence[int] | None = None,
        **options: Any,
    ) -> AsyncSubscription:
        """A consumer whose position is kept in the store; see `txnkv.Topic.subscribe`."""
        made = await self._calls(self.blocking.subscribe, name, type, start, partitions, **options)
        return AsyncSubscription(made, self._calls)

    async def subscriptions(self) -> list[str]:
        """The names of its subscriptions; see `txnkv.Topic.subscriptions`."""
        return await self._calls(self.blocking.subscriptions)

    async def drop_subscription(self, name: str, missing_ok: bool = False) -> None:
        """Forget a subscription; see `txnkv.Topic.drop_subscription`."""
        await self._calls(self.blocking.drop_subscription, name, missing_ok)

    async def producer(self, name: str | None = None, **options: Any) -> AsyncProducer:
        """An idempotent producer; see `txnkv.Topic.producer`."""
        made = await self._calls(self.blocking.producer, name, **options)
        return AsyncProducer(made, self._calls)


class _Round:
    """One call on a thread that waits for messages.

    Attributes:
        found: what it gave.
        abandoned: its task was cancelled.
    """

    found: Any = None
    abandoned = False


class _Waiting:
    """Calls of one object that wait for messages. What one of them gave whose task was cancelled
    goes back to the object, before the next call for it, of whatever kind.

    Args:
        turn: of the object's calls.
        undo: as if the last of those calls had not been.
    """

    def __init__(self, turn: InTurn, undo: Callable[[], None]) -> None:
        self._turn = turn
        self._undo = undo
        self._last = _Round()

    async def __call__(self, call: Callable[[float], T], timeout: float | None) -> T:
        """Call until something comes, or the time is over; what it gave last."""
        loop = asyncio.get_running_loop()
        end = None if timeout is None else loop.time() + timeout
        while True:
            wait = _SLICE if end is None else min(_SLICE, max(0.0, end - loop.time()))
            made = _Round()
            inner = asyncio.ensure_future(self._turn(self._call, made, call, wait))
            inner.add_done_callback(_looked_at)
            try:
                found: T = await asyncio.shield(inner)
            except asyncio.CancelledError:
                made.abandoned = True
                raise
            if _some(found) or (end is not None and loop.time() >= end):
                return found

    async def now(self, fn: Callable[..., T], *args: Any) -> T:
        """Call once, when what was abandoned is back."""
        return await self._turn(self._settled, fn, *args)

    def _call(self, made: _Round, call: Callable[[float], T], wait: float) -> T:
        found = self._settled(call, wait)
        made.found, self._last = found, made
        return found

    def _settled(self, fn: Callable[..., T], *args: Any) -> T:
        last, self._last = self._last, _Round()
        if last.abandoned and _some(last.found):
            self._undo()
        return fn(*args)


def _looked_at(done: asyncio.Future[Any]) -> None:
    if not done.cancelled():
        done.exception()


def _some(found: Any) -> bool:
    if isinstance(found, pa.RecordBatch):
        return bool(found.num_rows)
    return found is not None and found != []


class _Held(ClosingWrapper):
    """Something that is closed at the end of an `async with` block."""

    def __init__(self, blocking: Any, calls: Calls) -> None:
        self._turn = InTurn(calls)
        self._close = blocking.close

    async def close(self) -> None:
        """Close. Twice is fine."""
        await self._turn.to_the_end(self._close)


class AsyncConsumer(_Held):
    """See `txnkv.Consumer`. Belongs to one task at a time."""

    def __init__(self, consumer: Consumer, calls: Calls) -> None:
        super().__init__(consumer, calls)
        self.blocking: Consumer = consumer
        self._waiting = _Waiting(self._turn, consumer.unpoll)

    async def poll(self, *, max_messages: int = 500, timeout: float = 1.0) -> list[Message]:
        """The next messages; none when the time is over."""
        poll = self.blocking.poll
        return await self._waiting(
            lambda wait: poll(max_messages=max_messages, timeout=wait), timeout
        )

    async def poll_batch(self, *, max_messages: int = 500, timeout: float = 1.0) -> pa.RecordBatch:
        """The next messages as `poll` gives them, in Arrow."""
        poll = self.blocking.poll_batch
        return await self._waiting(
            lambda wait: poll(max_messages=max_messages, timeout=wait), timeout
        )

    async def seek(self, partition: int, offset: int) -> None:
        """Go on from an offset of a partition."""
        await self._waiting.now(self.blocking.seek, partition, offset)

    async def seek_to_time(self, when: datetime) -> None:
        """Go on with the first message of each partition that is not older than a time."""
        await self._waiting.now(self.blocking.seek_to_time, when)

    async def position(self, partition: int) -> int:
        """The offset of the next message of a partition."""
        return await self._waiting.now(self.blocking.position, partition)

    async def lag(self, partition: int | None = None) -> int:
        """Offsets between a position and the end; of all partitions without an argument."""
        return await self._waiting.now(self.blocking.lag, partition)

    @property
    def partitions(self) -> list[int]:
        """The numbers of the partitions that are read."""
        return self.blocking.partitions

    async def __aiter__(self) -> AsyncIterator[Message]:
        while True:
            for message in await self.poll():
                yield message


class Acknowledging(Protocol):
    """A transaction that acknowledgements go with: an `AsyncTransaction`."""

    async def ack(self, subscription: AsyncSubscription, message: Acknowledged) -> None:
        """Acknowledge with the commit."""

    async def ack_cumulative(self, subscription: AsyncSubscription, message: Acknowledged) -> None:
        """Acknowledge all messages up to this one, with the commit."""


class AsyncSubscription(_Held):
    """See `txnkv.Subscription`. Belongs to one task at a time."""

    def __init__(self, subscription: Subscription, calls: Calls) -> None:
        super().__init__(subscription, calls)
        self.blocking: Subscription = subscription
        self._waiting = _Waiting(self._turn, subscription.unreceive)

    async def receive(self, timeout: float | None = None) -> Message | None:
        """The next message; None when the time is over."""
        return await self._waiting(lambda wait: self.blocking.receive(timeout=wait), timeout)

    async def receive_many(
        self, max_messages: int = 100, timeout: float | None = None
    ) -> list[Message]:
        """The next messages, at least one; none when the time is over."""
        receive = self.blocking.receive_many
        return await self._waiting(lambda wait: receive(max_messages, timeout=wait), timeout)

    async def ack(self, message: Acknowledged, txn: Acknowledging | None = None) -> None:
        """Acknowledge a message or its id, at once or with a transaction."""
        if txn is not None:
            await txn.ack(self, message)
        else:
            await self._turn(self.blocking.ack, message)

    async def ack_cumulative(self, message: Acknowledged, txn: Acknowledging | None = None) -> None:
        """Acknowledge all messages of a partition up to this one."""
        if txn is not None:
            await txn.ack_cumulative(self, message)
        else:
            await self._turn(self.blocking.ack_cumulative, message)

    async def nack(self, message: Message | MessageId) -> None:
        """Let a message be delivered again."""
        await self._turn(self.blocking.nack, message)

    async def seek(self, partition: int, offset: int | Start) -> None:
        """Move the subscription in a partition; see `txnkv.Subscription.seek`."""
        await self._waiting.now(self.blocking.seek, partition, offset)

    @property
    def name(self) -> str:
        """Unique in the topic."""
        return self.blocking.name

    @property
    def is_active(self) -> bool:
        """True when messages come to this consumer; False while it waits for the place."""
        return self.blocking.is_active

    async def lag(self) -> dict[int, int]:
        """Messages that are not deleted, by partition."""
        return await self._turn(self.blocking.lag)

    async def lost(self) -> dict[int, int]:
        """Messages that retention took before they were acknowledged, by partition."""
        return await self._turn(self.blocking.lost)

    async def committed(self) -> dict[int, int]:
        """By partition, the offset below which all is acknowledged."""
        return await self._turn(self.blocking.committed)

    async def __aiter__(self) -> AsyncIterator[Message]:
        while True:
            message = await self.receive()
            if message is not None:
                yield message


class AsyncProducer(_Held):
    """See `txnkv.Producer`. Shared by tasks."""

    def __init__(self, producer: Producer, calls: Calls) -> None:
        super().__init__(producer, calls)
        self.blocking: Producer = producer

    @property
    def name(self) -> str | None:
        """The name by which a later producer fences this one; None: nobody can."""
        return self.blocking.name

    async def sent(self) -> int:
        """The number of durable messages that were sent under this name."""
        return await self._turn(lambda: self.blocking.sent)

    async def send(self, value: Any, key: Any = None, **options: Any) -> MessageId:
        """Send a message; returns when it is durable. Cancelled, it is sent all the same."""
        send = self.blocking.send
        return await self._turn.submitted(lambda: send(value, key, **options))

    async def flush(self) -> None:
        """Return when all that was sent is durable."""
        await self._turn(self.blocking.flush)


def plain_topic(topic: str | AsyncTopic | Topic) -> str | Topic:
    """A topic as the blocking client takes it."""
    return topic.blocking if isinstance(topic, AsyncTopic) else topic


def plain_subscription(subscription: Any) -> Any:
    """A subscription as the blocking client takes it."""
    if isinstance(subscription, AsyncSubscription):
        return subscription.blocking
    return subscription
