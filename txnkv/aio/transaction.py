"""Transactions and sessions for asyncio."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from txnkv.aio.calls import Calls, InTurn, Wrapper
from txnkv.aio.reading import AsyncScan, AsyncTable, plain
from txnkv.aio.topics import AsyncSubscription, AsyncTopic, plain_subscription, plain_topic
from txnkv.coordinator import Timestamp, TxnId, TxnState
from txnkv.errors import RowError
from txnkv.options import FlushMode, Operation
from txnkv.transaction import (
    BUFFER_BYTES,
    Acknowledged,
    Session,
    Transaction,
    TxnToken,
    WriteResult,
)


class AsyncRows(Wrapper):
    """The seven operations by row, and those on topics; see `txnkv.Session`."""

    def __init__(self, blocking: Transaction | Session, turn: InTurn, calls: Calls) -> None:
        self.blocking: Transaction | Session = blocking
        self._turn = turn
        self._calls = calls

    async def insert(self, table: str | AsyncTable, row: Any) -> None:
        """A new row; refused when its key is there already."""
        await self._row("insert", table, row)

    async def insert_ignore(self, table: str | AsyncTable, row: Any) -> None:
        """A new row; ignored when its key is there already."""
        await self._row("insert_ignore", table, row)

    async def upsert(self, table: str | AsyncTable, row: Any) -> None:
        """A new row, or new values for the row that is there."""
        await self._row("upsert", table, row)

    async def update(self, table: str | AsyncTable, row: Any) -> None:
        """New values for the row with this key; refused when there is none."""
        await self._row("update", table, row)

    async def update_ignore(self, table: str | AsyncTable, row: Any) -> None:
        """New values for the row with this key; ignored when there is none."""
        await self._row("update_ignore", table, row)

    async def delete(self, table: str | AsyncTable, key: Any) -> None:
        """Delete the row with this key; refused when there is none."""
        await self._row("delete", table, key)

    async def delete_ignore(self, table: str | AsyncTable, key: Any) -> None:
        """Delete the row with this key; ignored when there is none."""
        await self._row("delete_ignore", table, key)

    async def write(
        self, table: str | AsyncTable, data: Any, op: Operation = "insert"
    ) -> WriteResult:
        """Write Arrow data; see `txnkv.Session.write`."""
        return await self._turn(self.blocking.write, plain(table), data, op)

    async def send(
        self,
        topic: str | AsyncTopic,
        value: bytes | str | None,
        key: bytes | str | None = None,
        partition: int | None = None,
        headers: Any = None,
        timestamp: Any = None,
    ) -> None:
        """Send one message; see `txnkv.Session.send`."""
        await self._quick(
            self.blocking.send, plain_topic(topic), value, key, partition, headers, timestamp
        )

    async def send_batch(self, topic: str | AsyncTopic, data: Any) -> WriteResult:
        """Send Arrow data; see `txnkv.Session.send_batch`."""
        return await self._turn(self.blocking.send_batch, plain_topic(topic), data)

    async def ack(self, subscription: AsyncSubscription, message: Acknowledged) -> None:
        """Acknowledge a message, its id, or a list of them."""
        await self._turn(self.blocking.ack, plain_subscription(subscription), message)

    async def ack_cumulative(self, subscription: AsyncSubscription, message: Acknowledged) -> None:
        """Acknowledge all messages of a partition up to this one."""
        await self._turn(self.blocking.ack_cumulative, plain_subscription(subscription), message)

    async def flush(self) -> WriteResult:
        """Write the rows and send the messages that wait."""
        return await self._turn(self.blocking.flush)

    def pending_errors(self) -> list[RowError]:
        """The rows refused since the last call."""
        return self.blocking.pending_errors()

    async def _row(self, op: str, table: str | AsyncTable, row: Any) -> None:
        await self._quick(getattr(self.blocking, op), plain(table), row)

    async def _quick(self, fn: Callable[..., None], *args: Any) -> None:
        """Call what may only touch memory."""
        await self._turn.quick(fn, *args)


class AsyncSession(AsyncRows):
    """See `txnkv.Session`. Belongs to one task at a time; `async with` flushes and closes it."""

    def __init__(self, session: Session, turn: InTurn, calls: Calls) -> None:
        super().__init__(session, turn, calls)
        self.blocking: Session = session

    async def _quick(self, fn: Callable[..., None], *args: Any) -> None:
        call = self._turn.quick if self.blocking.flush_mode == "manual" else self._turn
        await call(fn, *args)

    @property
    def has_pending(self) -> bool:
        """Rows or messages wait to be flushed."""
        return self.blocking.has_pending

    @property
    def txn_id(self) -> TxnId | None:
        """The transaction that it belongs to, if any."""
        return self.blocking.txn_id

    @property
    def flush_mode(self) -> FlushMode:
        """One of "manual", "auto_background" and "auto_sync"."""
        return self.blocking.flush_mode

    async def set_flush_mode(self, mode: FlushMode) -> None:
        """Change the flush mode; see `txnkv.Session.flush_mode`."""
        await self._turn(setattr, self.blocking, "flush_mode", mode)

    async def close(self) -> None:
        """Flush and close."""
        await self._turn(self.blocking.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._turn.to_the_end(self.blocking.__exit__, kind, error, trace)


class AsyncTransaction(AsyncRows):
    """See `txnkv.Transaction`. `async with` commits at the end and rolls back on an exception,
    a cancellation among them.
    """

    def __init__(self, txn: Transaction, calls: Calls) -> None:
        super().__init__(txn, InTurn(calls), calls)
        self.blocking: Transaction = txn

    @property
    def id(self) -> TxnId:
        return self.blocking.id

    @property
    def snapshot(self) -> Timestamp:
        """Everything that committed at or below it is what the transaction reads."""
        return self.blocking.snapshot

    async def state(self) -> TxnState:
        """The state in the status table. It does not wait for a commit that is under way."""
        return await self._calls(lambda: self.blocking.state)

    async def commit(self) -> Timestamp:
        """Flush the sessions, commit, and return when new snapshots everywhere see it."""
        return await self._turn.submitted(self.blocking.commit_async)

    async def start_commit(self) -> None:
        """Begin to commit and return at once."""
        await self._turn(self.blocking.start_commit)

    async def is_commit_complete(self) -> bool:
        """True when the commit is done and finalized, False while it goes on."""
        return await self._calls(self.blocking.is_commit_complete)

    async def rollback(self) -> None:
        """Abort. Twice is fine."""
        await self._turn.to_the_end(self.blocking.rollback)

    async def close(self) -> None:
        """Stop heartbeats from this handle. Ends nothing."""
        await self._calls(self.blocking.close)

    async def mark_applied(self, app_id: str, version: int, source: str | None = None) -> None:
        """This transaction is a version of an application; see `txnkv.Transaction`."""
        await self._turn(self.blocking.mark_applied, app_id, version, source)

    async def serialize(self, keepalive: bool = False) -> TxnToken:
        """A token by which other processes join."""
        return await self._turn(self.blocking.serialize, keepalive)

    async def new_session(
        self, flush_mode: FlushMode = "manual", buffer_bytes: int | None = BUFFER_BYTES
    ) -> AsyncSession:
        """A session of this transaction."""
        session = await self._turn(self.blocking.new_session, flush_mode, buffer_bytes)
        return AsyncSession(session, self._turn, self._calls)

    async def get(self, table: str | AsyncTable, key: Any) -> dict[str, Any] | None:
        """The row with this key in the transaction's snapshot or its own writes, or None."""
        return await self._turn(self.blocking.get, plain(table), key)

    async def get_many(self, table: str | AsyncTable, keys: Sequence[Any]) -> pa.Table:
        """The rows with these keys, in their order; a row of nulls where there is none."""
        return await self._turn(self.blocking.get_many, plain(table), keys)

    async def scan(self, table: str | AsyncTable, **options: Any) -> AsyncScan:
        """A scan of the transaction's snapshot and its own writes."""
        found = await self._turn(self.blocking.scan, plain(table), **options)
        return AsyncScan(found, self._calls)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._turn.to_the_end(self.blocking.__exit__, kind, error, trace)
