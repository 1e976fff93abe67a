"""Tables, snapshots and scans for asyncio; topics, consumers, subscriptions and producers;
sessions and transactions.

A task that waits for messages holds no thread: it looks, and is told when to look again. On another
host it is asked for, with a thread that has nothing else to do. A call that is cancelled while it
waits loses nothing: what it would have returned is returned by the next one.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, Self, TypeVar, overload

import pyarrow as pa

from txnkv.aio.calls import Calls, ClosingWrapper, InTurn, Wrapper, opening, same, twin
from txnkv.client import (
    Client,
    Consumer,
    GroupConsumer,
    Index,
    Producer,
    Snapshot,
    Subscription,
    Table,
    Topic,
)
from txnkv.coordinator import Timestamp, TxnId, TxnState
from txnkv.errors import RowError
from txnkv.storage import HASTE, BusyError, waiting_for
from txnkv.tables import Schema, TableInfo, lookup
from txnkv.topics import (
    Message,
    MessageId,
    SubscriptionInfo,
    TopicChanges,
    TopicInfo,
    Waiting,
    require_time,
)
from txnkv.transaction import (
    BUFFER_BYTES,
    Acknowledged,
    At,
    FlushMode,
    Order,
    Scan,
    Session,
    Transaction,
    TxnToken,
    WriteResult,
)

T = TypeVar("T")
W = TypeVar("W", bound=Session | Transaction)
C = TypeVar("C", bound=Consumer | GroupConsumer | Subscription | Producer)

_UNTIL: Final = 1e9
_SLICE: Final = 0.1
"""Seconds for which another host is asked to wait at first; later for longer."""
_LOOK: Final = 1.0
"""Seconds between two looks whether the turn before is that of a loop that was closed."""
_LONGEST: Final = 0.25
_PENDING: Final = 0.002
"""Seconds until the next look for what is on its way."""
_UNTOLD: Final = 5.0
"""Seconds after which a task looks all the same."""


# -- transactions ----------------------------------------------------------------------


class AsyncScan(ClosingWrapper[Scan]):
    """See `txnkv.Scan`. Belongs to one task at a time; awaited, it is itself, and nothing read."""

    __await__ = ClosingWrapper._itself
    schema: pa.Schema = same()
    to_arrow = twin(Scan.to_arrow)
    to_pandas = twin(Scan.to_pandas)
    to_polars = twin(Scan.to_polars)
    tokens = twin(Scan.tokens)
    close = twin(Scan.close, by="_calls.to_the_end")

    async def snapshot(self) -> Timestamp:
        """The snapshot that it reads."""
        blocking = (await self).blocking
        return await self._calls(lambda: blocking.snapshot)

    async def to_batches(self) -> AsyncIterator[pa.RecordBatch]:
        """The rows as record batches of up to 64 Ki rows."""
        async for batch in self._calls.each(await self._calls((await self).blocking.to_batches)):
            yield batch

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        few = await self._calls((await self).blocking._few)
        for row in few or ():
            yield row
        if few is None:
            async for batch in self.to_batches():
                for row in await self._calls(lookup.dicts, batch):
                    yield row


class AsyncRows(Wrapper[W]):
    """The seven operations by row, and those on topics; see `txnkv.Session`."""

    def __init__(self, blocking: W, calls: Calls, turn: InTurn | None = None) -> None:
        super().__init__(blocking, calls)
        self._call = self._turn = turn or InTurn(calls)

    insert = twin(Session.insert, by="_quick")
    insert_ignore = twin(Session.insert_ignore, by="_quick")
    upsert = twin(Session.upsert, by="_quick")
    update = twin(Session.update, by="_quick")
    update_ignore = twin(Session.update_ignore, by="_quick")
    delete = twin(Session.delete, by="_quick")
    delete_ignore = twin(Session.delete_ignore, by="_quick")
    write = twin(Session.write)
    send = twin(Session.send, by="_quick")
    send_batch = twin(Session.send_batch)
    ack = twin(Session.ack)
    ack_cumulative = twin(Session.ack_cumulative)
    flush = twin(Session.flush)

    def pending_errors(self) -> list[RowError]:
        """The rows refused since the last call."""
        return self.blocking.pending_errors()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._turn.to_the_end(self.blocking.__exit__, *error)

    @property
    def _quick(self) -> Callable[..., Any]:
        """The caller of what only touches memory."""
        return self._turn.quick


class AsyncSession(AsyncRows[Session]):
    """See `txnkv.Session`. Belongs to one task at a time; `async with` flushes and closes it."""

    has_pending: bool = same()
    txn_id: TxnId | None = same()
    flush_mode: FlushMode = same()
    close = twin(Session.close, by="_turn.to_the_end")

    async def set_flush_mode(self, mode: FlushMode) -> None:
        """Change the flush mode; see `txnkv.Session.flush_mode`."""
        await self._turn(setattr, self.blocking, "flush_mode", mode)

    @property
    def _quick(self) -> Callable[..., Any]:
        return self._turn.quick if self.blocking.flush_mode == "manual" else self._turn


class AsyncTransaction(AsyncRows[Transaction]):
    """See `txnkv.Transaction`. `async with` commits at the end and rolls back on an exception,
    a cancellation among them.
    """

    def __init__(self, blocking: Transaction, calls: Calls) -> None:
        context = getattr(blocking, "context", None)  # None: of another host
        waits = context is not None and context.row.locking == "partition"
        super().__init__(blocking, calls.patient if waits else calls)

    @classmethod
    async def deserialize(
        cls, client: Wrapper[Client], token: TxnToken | bytes | str
    ) -> AsyncTransaction:
        """Join a transaction by its token; see `txnkv.Transaction.deserialize`."""
        joined = await client._calls(Transaction.deserialize, client.blocking, token)
        return cls(joined, client._calls)

    id: TxnId = same()
    snapshot: Timestamp = same()
    start_commit = twin(Transaction.start_commit)
    is_commit_complete = twin(Transaction.is_commit_complete, by="_calls")
    rollback = twin(Transaction.rollback, by="_turn.to_the_end")
    close = twin(Transaction.close, by="_turn.to_the_end")
    mark_applied = twin(Transaction.mark_applied)
    serialize = twin(Transaction.serialize)
    get = twin(Transaction.get)
    get_by = twin(Transaction.get_by)
    get_many = twin(Transaction.get_many)
    scan = twin(Transaction.scan, AsyncScan, later=True)

    async def state(self) -> TxnState:
        """The state in the status table. It waits for a commit that was cancelled, for no other."""
        await self._turn.settled()
        return await self._calls(lambda: self.blocking.state)

    async def commit(self) -> Timestamp:
        """Flush the sessions, commit, and return when new snapshots everywhere see it."""
        return await self._turn.submitted(self.blocking.commit_async)

    @opening
    async def new_session(
        self, flush_mode: FlushMode = "manual", buffer_bytes: int | None = BUFFER_BYTES
    ) -> AsyncSession:
        """A session of this transaction."""
        session = await self._turn(self.blocking.new_session, flush_mode, buffer_bytes)
        return AsyncSession(session, self._calls, self._turn)


# -- tables ----------------------------------------------------------------------------


class AsyncTable(ClosingWrapper[Table]):
    """See `txnkv.Table`."""

    info: TableInfo = same()
    name: str = same()
    schema: Schema = same()
    indexes: list[Index] = same()
    history: float | None = same()
    alter = twin(Table.alter)
    close = twin(Table.close, by="_calls.to_the_end")
    get = twin(Table.get)
    get_by = twin(Table.get_by)
    get_many = twin(Table.get_many)
    count = twin(Table.count)
    diff_tokens = twin(Table.diff_tokens)
    dataset = twin(Table.dataset)
    insert = twin(Table.insert)
    upsert = twin(Table.upsert)
    update = twin(Table.update)
    delete = twin(Table.delete)
    next_id = twin(Table.next_id)

    def scan(
        self,
        columns: Sequence[str] | None = None,
        where: Any = None,
        snapshot: At = None,
        ordered: Order = False,
        limit: int | None = None,
    ) -> AsyncScan:
        """See `txnkv.Table.scan`; nothing is read yet."""
        return AsyncScan(self.blocking.scan(columns, where, snapshot, ordered, limit), self._calls)

    async def restore(self, to: At, txn: AsyncTransaction | None = None) -> WriteResult:
        """Give the table the rows of a time; see `txnkv.Table.restore`."""
        calls = self._calls if txn is None else txn._turn
        return await calls(self.blocking.restore, to, txn and txn.blocking)

    async def diff(
        self, start: At, end: At = None, columns: Sequence[str] | None = None
    ) -> pa.Table:
        """The net change of each key between two times; see `txnkv.Table.diff`."""
        return await self._calls(lambda: self.blocking.diff(start, end, columns).read_all())


class AsyncSnapshot(ClosingWrapper[Snapshot]):
    """See `txnkv.Snapshot`; an `async with` block closes it."""

    timestamp: Timestamp = same()
    get = twin(Snapshot.get)
    get_by = twin(Snapshot.get_by)
    get_many = twin(Snapshot.get_many)
    scan = twin(Snapshot.scan, AsyncScan, later=True)

    def require_open(self) -> None:
        """Refuse a snapshot that keeps its history no more."""
        self.blocking.require_open()

    async def close(self) -> None:
        """Give the snapshot up. Twice is fine."""
        self.blocking.close()


# -- topics ----------------------------------------------------------------------------


class _Round:
    """One call on a thread that looks for messages.

    Attributes:
        found: what it gave.
        taken: its task has that. One that was cancelled has not.
    """

    found: Any = None
    taken = False


class _Told(asyncio.Event):
    """Set when there may be something new.

    Attributes:
        pending: something is on its way, of which nobody tells.
    """

    def __init__(self) -> None:
        super().__init__()
        self._task_loop = asyncio.get_running_loop()
        self.pending = False

    def tell(self) -> None:
        """Set it, from whichever thread."""
        with suppress(RuntimeError):  # the loop was closed
            self._task_loop.call_soon_threadsafe(self.set)


class _Waiting:
    """Calls of one object that wait for messages. What one of them gave whose task was cancelled
    goes back to the object, before the next call for it, of whatever kind.

    Args:
        turn: of the object's calls.
        blocking: the object.
        undo: as if the last of those calls had not been.
    """

    def __init__(self, turn: InTurn, blocking: Any, undo: Callable[[], None]) -> None:
        self._turn = turn
        self._blocking = blocking
        self._undo = undo
        self._last = _Round()

    async def __call__(self, call: Callable[[float], T], timeout: float | None) -> T:
        """Call until something comes, or the time is over; what it gave last."""
        if timeout is not None:
            require_time(timeout)
        loop = asyncio.get_running_loop()
        end = math.inf if timeout is None else loop.time() + min(timeout, _UNTIL)
        waiting: Waiting | None = self._blocking._waiting(None)
        if waiting is None:
            return await self._at_the_server(call, end)
        told, pause = _Told(), _PENDING
        look, hastily = (call, waiting, told), waiting_for(HASTE)(self._look)
        try:
            while True:
                told.clear()
                try:
                    found: T = await self._round(self._turn.calls.looks, hastily, *look)
                except BusyError:
                    found = await self._round(self._turn.calls.patient, self._look, *look)
                left = end - loop.time()
                if _some(found) or left <= 0:
                    return found
                most = pause if told.pending else _UNTOLD
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left, most)):
                        await told.wait()
                pause = min(pause * 2, _SLICE) if told.pending else _PENDING
        except GeneratorExit:  # of a closed loop, by the collector
            waiting.drop()
            raise
        finally:
            waiting.end()

    async def _at_the_server(self, call: Callable[[float], T], end: float) -> T:
        """Call, each time for longer, but not so long that one that is cancelled keeps the next
        one for long.
        """
        loop, wait = asyncio.get_running_loop(), _SLICE
        while True:
            left = max(0.0, end - loop.time())
            found: T = await self._round(self._turn.calls.patient, call, min(wait, left))
            if _some(found) or loop.time() >= end:
                return found
            wait = min(wait * 1.5, _LONGEST)

    async def _round(self, calls: Calls, fn: Callable[..., T], *args: Any) -> T:
        """Call on a thread of these. Cancelled when it has begun, it goes on."""
        made = _Round()
        call = self._turn.kept(calls, self._call, made, fn, *args)
        future = asyncio.wrap_future(call)
        try:
            while call.waits:  # maybe for a loop that is closed only then
                try:
                    await asyncio.wait((future,), timeout=_LOOK)
                except asyncio.CancelledError:
                    future.cancel()
                    raise
                call.pass_by()
            found: T = await future
        except BaseException:
            call.end()
            raise
        made.taken = True
        call.end()
        return found

    async def now(self, fn: Callable[..., T], *args: Any) -> T:
        """Call once, when what was abandoned is back."""
        return await self._turn(self.settled, fn, *args)

    def _call(self, made: _Round, fn: Callable[..., T], *args: Any) -> T:
        found = self.settled(fn, *args)
        made.found, self._last = found, made
        return found

    def _look(self, call: Callable[[float], T], waiting: Waiting, told: _Told) -> T:
        """Call, and have the task told when to call again."""
        waiting.mark()
        found = call(0)
        if _some(found):
            waiting.end()
        else:
            told.pending = self._blocking._is_pending()
            waiting.tell(told.tell)
        return found

    def settled(self, fn: Callable[..., T], *args: Any) -> T:
        """Call when what was abandoned is back."""
        if not self._last.taken and _some(self._last.found):
            self._undo()
        self._last = _Round()
        return fn(*args)


def _some(found: Any) -> bool:
    if isinstance(found, pa.RecordBatch):
        return bool(found.num_rows)
    return found is not None and found != []


class _Held(ClosingWrapper[C]):
    """Something that is closed at the end of an `async with` block."""

    def __init__(self, blocking: C, calls: Calls) -> None:
        super().__init__(blocking, calls)
        self._call = self._turn = InTurn(calls)

    async def close(self) -> None:
        """Close. Twice is fine."""
        await self._turn.to_the_end(self.blocking.close)


class AsyncConsumer(_Held[Consumer]):
    """See `txnkv.Consumer`. Belongs to one task at a time."""

    partitions: list[int] = same()
    seek = twin(Consumer.seek, by="_waiting.now")
    seek_to_time = twin(Consumer.seek_to_time, by="_waiting.now")
    position = twin(Consumer.position, by="_waiting.now")
    lag = twin(Consumer.lag, by="_waiting.now")

    def __init__(self, consumer: Consumer, calls: Calls) -> None:
        super().__init__(consumer, calls)
        self._waiting = _Waiting(self._turn, consumer, consumer.unpoll)

    async def poll(self, *, max_messages: int = 500, timeout: float | None = 1.0) -> list[Message]:
        """The next messages; none when the time is over."""
        poll = self.blocking.poll
        return await self._waiting(lambda s: poll(max_messages=max_messages, timeout=s), timeout)

    async def poll_batch(
        self, *, max_messages: int = 65536, timeout: float | None = 1.0
    ) -> pa.RecordBatch:
        """The next messages as `poll` gives them, in Arrow."""
        poll = self.blocking.poll_batch
        return await self._waiting(lambda s: poll(max_messages=max_messages, timeout=s), timeout)

    async def __aiter__(self) -> AsyncIterator[Message]:
        while True:
            for message in self.blocking._each(await self.poll()):
                yield message


class AsyncGroupConsumer(_Held[GroupConsumer]):
    """See `txnkv.GroupConsumer`. Belongs to one task at a time."""

    partitions: list[int] = same()
    position = twin(GroupConsumer.position, by="_waiting.now")
    seek = twin(GroupConsumer.seek, by="_waiting.now")
    rewind = twin(GroupConsumer.rewind, by="_waiting.now")
    committed = twin(GroupConsumer.committed)
    lag = twin(GroupConsumer.lag, by="_waiting.now")

    def __init__(self, consumer: GroupConsumer, calls: Calls) -> None:
        super().__init__(consumer, calls)
        self._waiting = _Waiting(self._turn, consumer, consumer.unpoll)

    async def poll(self, *, max_messages: int = 500, timeout: float | None = 1.0) -> list[Message]:
        """The next messages of its partitions; none when the time is over."""
        poll = self.blocking.poll
        return await self._waiting(lambda s: poll(max_messages=max_messages, timeout=s), timeout)

    async def commit(self, txn: AsyncTransaction | None = None) -> None:
        """Commit the positions behind all that was given, with a transaction or at once."""
        commit = self.blocking.commit
        if txn is None:
            await self._waiting.now(commit)
        else:  # the turns of both: a poll that was cancelled may be under way
            both = InTurn(txn._turn.calls, (txn._turn, self._turn))
            await both(self._waiting.settled, commit, txn.blocking)


class AsyncSubscription(_Held[Subscription]):
    """See `txnkv.Subscription`. Belongs to one task at a time."""

    info: SubscriptionInfo = same()
    name: str = same()
    is_active: bool = same()
    nack = twin(Subscription.nack)
    seek = twin(Subscription.seek, by="_waiting.now")
    lag = twin(Subscription.lag)
    lost = twin(Subscription.lost)
    committed = twin(Subscription.committed)

    def __init__(self, subscription: Subscription, calls: Calls) -> None:
        super().__init__(subscription, calls)
        self._waiting = _Waiting(self._turn, subscription, subscription.unreceive)

    @overload
    async def receive(self, timeout: None = None) -> Message: ...

    @overload
    async def receive(self, timeout: float | None) -> Message | None: ...

    async def receive(self, timeout: float | None = None) -> Message | None:
        """The next message; None when the time is over."""
        return await self._waiting(lambda wait: self.blocking.receive(timeout=wait), timeout)

    async def receive_many(
        self, max_messages: int = 100, timeout: float | None = None
    ) -> list[Message]:
        """The next messages, at least one; none when the time is over."""
        receive = self.blocking.receive_many
        return await self._waiting(lambda wait: receive(max_messages, timeout=wait), timeout)

    async def ack(self, message: Acknowledged, txn: AsyncTransaction | None = None) -> None:
        """Acknowledge a message or its id, at once or with a transaction."""
        if txn is not None:
            await txn.ack(self, message)
        else:
            await self._turn(self.blocking.ack, message)

    async def ack_cumulative(
        self, message: Acknowledged, txn: AsyncTransaction | None = None
    ) -> None:
        """Acknowledge all messages of a partition up to this one."""
        if txn is not None:
            await txn.ack_cumulative(self, message)
        else:
            await self._turn(self.blocking.ack_cumulative, message)

    async def __aiter__(self) -> AsyncIterator[Message]:
        while True:
            yield await self.receive()


class AsyncProducer(_Held[Producer]):
    """See `txnkv.Producer`. Shared by tasks; messages are stored in the order of the sends."""

    name: str | None = same()
    flush = twin(Producer.flush)

    async def sent(self) -> int:
        """The number of durable messages that were sent under this name."""
        return await self._turn(lambda: self.blocking.sent)

    async def send(self, value: Any, key: Any = None, **options: Any) -> MessageId:
        """Send a message; returns when it is durable. Cancelled, it is sent all the same."""
        producer = self.blocking

        def send() -> Future[MessageId]:
            sent = producer.send(value, key, **options)
            producer._hasten()
            return sent

        return await self._turn.submitted(send)


class AsyncTopic(ClosingWrapper[Topic]):
    """See `txnkv.Topic`."""

    info: TopicInfo = same()
    name: str = same()
    partitions: int = same()
    buffer: str = same()
    value_schema: pa.Schema | None = same()
    options: TopicChanges = same()
    alter = twin(Topic.alter)
    close = twin(Topic.close, by="_calls.to_the_end")
    truncate = twin(Topic.truncate)
    end_offsets = twin(Topic.end_offsets)
    last_stable_offsets = twin(Topic.last_stable_offsets)
    fetch = twin(Topic.fetch)
    consumer = twin(Topic.consumer, AsyncConsumer)
    subscribe = twin(Topic.subscribe, AsyncSubscription)
    subscriptions = twin(Topic.subscriptions)
    drop_subscription = twin(Topic.drop_subscription)

    @opening
    async def producer(self, name: str | None = None, **options: Any) -> AsyncProducer:
        """An idempotent producer; see `txnkv.Topic.producer`."""
        made = await self._calls(self.blocking.producer, name, **options)
        return AsyncProducer(made, self._calls)
