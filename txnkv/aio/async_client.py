"""The client for asyncio, its transactions and sessions."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Generator, Sequence
from functools import partial
from typing import Any, Self, TypeVar

import pyarrow as pa

from txnkv.aio.async_handles import (
    AsyncScan,
    AsyncSnapshot,
    AsyncSubscription,
    AsyncTable,
    AsyncTopic,
    plain,
    plain_subscription,
    plain_topic,
)
from txnkv.aio.calls import Calls, ClosingWrapper, InTurn, Wrapper
from txnkv.client import BackupReport, CheckReport, Client, CompactReport, TxnInfo
from txnkv.client import connect as connect_blocking
from txnkv.coordinator import Applied, Loss, Timestamp, TxnId, TxnState
from txnkv.errors import CommitOutcomeUnknownError, RowError, TxnkvError
from txnkv.metrics import MetricsSnapshot
from txnkv.tables import Operation, PartitionBy, Schema
from txnkv.topics import Hold
from txnkv.transaction import (
    BUFFER_BYTES,
    DEADLINE,
    DEFAULTS,
    Acknowledged,
    FlushMode,
    Retries,
    Session,
    Transaction,
    TxnToken,
    WriteResult,
)

T = TypeVar("T")


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

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._turn.to_the_end(self.blocking.__exit__, *error)

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


def connect(path: str | os.PathLike[str], **options: Any) -> Connecting:
    """Open a store, to be awaited or entered with `async with`.

    Takes the options of `txnkv.connect`.
    """
    return Connecting(path, options)


class Connecting:
    """A client that is being opened."""

    def __init__(self, path: str | os.PathLike[str], options: dict[str, Any]) -> None:
        self._path = path
        self._options = options
        self._client: AsyncClient | None = None

    def __repr__(self) -> str:
        return f"<Connecting to {str(self._path)!r}>"

    def __await__(self) -> Generator[Any, None, AsyncClient]:
        return self._open().__await__()

    async def _open(self) -> AsyncClient:
        calls = Calls()
        opened: list[Client] = []
        try:
            await calls.to_the_end(
                lambda: opened.append(connect_blocking(self._path, **self._options))
            )
        except BaseException:
            for client in opened:  # cancelled: nobody gets it
                client.close()
            calls.close()
            raise
        self._client = AsyncClient(opened[0], calls)
        return self._client

    async def __aenter__(self) -> AsyncClient:
        return await self._open()

    async def __aexit__(self, *error: Any) -> None:
        if self._client is not None:
            await self._client.close()


class AsyncClient(ClosingWrapper):
    """A connection to a store for asyncio. Shared by tasks; see `txnkv.Client`."""

    def __init__(self, client: Client, calls: Calls) -> None:
        self.blocking: Client = client
        self._calls = calls
        self._closed = False

    async def close(self) -> None:
        """Close. Twice is fine."""
        if not self._closed:
            self._closed = True
            await self._calls.to_the_end(self.blocking.close)
            self._calls.close()

    @property
    def path(self) -> str:
        """The store's directory."""
        return self.blocking.path

    # -- catalog -----------------------------------------------------------------------

    async def create_table(
        self,
        name: str,
        schema: Schema,
        partition_by: PartitionBy = None,
        exists_ok: bool = False,
        evolve: bool = False,
    ) -> AsyncTable:
        """Make a table."""
        made = await self._calls(
            self.blocking.create_table, name, schema, partition_by, exists_ok, evolve
        )
        return AsyncTable(made, self._calls)

    async def table(self, name: str) -> AsyncTable:
        """The table of this name."""
        return AsyncTable(await self._calls(self.blocking.table, name), self._calls)

    async def tables(self) -> list[str]:
        """The names of all tables, sorted."""
        return await self._calls(self.blocking.tables)

    async def drop_table(
        self, name: str | AsyncTable, missing_ok: bool = False, keep: float = 0.0
    ) -> None:
        """Drop a table at once, to be recalled for `keep` seconds."""
        await self._calls(self.blocking.drop_table, plain(name), missing_ok, keep)

    async def recall_table(self, name: str) -> AsyncTable:
        """Bring back a table that was dropped with `keep`."""
        return AsyncTable(await self._calls(self.blocking.recall_table, name), self._calls)

    async def create_topic(self, name: str, partitions: int = 1, **options: Any) -> AsyncTopic:
        """Make a topic; takes the options of `txnkv.Client.create_topic`."""
        made = await self._calls(self.blocking.create_topic, name, partitions, **options)
        return AsyncTopic(made, self._calls)

    async def topic(self, name: str) -> AsyncTopic:
        """The topic of this name."""
        return AsyncTopic(await self._calls(self.blocking.topic, name), self._calls)

    async def topics(self) -> list[str]:
        """The names of all topics, sorted."""
        return await self._calls(self.blocking.topics)

    async def drop_topic(self, name: str | AsyncTopic, missing_ok: bool = False) -> None:
        """Drop a topic at once."""
        await self._calls(self.blocking.drop_topic, plain_topic(name), missing_ok)

    # -- transactions ------------------------------------------------------------------

    async def new_transaction(self, **options: Any) -> AsyncTransaction:
        """Begin a transaction; see `txnkv.Client.new_transaction`."""
        return AsyncTransaction(
            await self._calls(self.blocking.new_transaction, **options), self._calls
        )

    def transaction(self, **options: Any) -> TransactionBlock:
        """`async with client.transaction() as txn:` commits at the end, rolls back on an
        exception.
        """
        return TransactionBlock(self, options)

    async def join(self, token: TxnToken | bytes | str) -> AsyncTransaction:
        """Join a transaction by its token; see `txnkv.Transaction.deserialize`."""
        txn = await self._calls(Transaction.deserialize, self.blocking, token)
        return AsyncTransaction(txn, self._calls)

    async def run(
        self,
        fn: Callable[[AsyncTransaction], Awaitable[T]],
        attempts: int | None = None,
        deadline: float | None = DEADLINE,
        **options: Any,
    ) -> T:
        """Call `await fn(txn)` and commit; again, after a pause, on whatever is retriable."""
        topics = self.blocking.instance.topics
        hold = Hold(topics.store, topics.local)
        try:
            retries = Retries(self.blocking.instance, attempts, deadline)
            return await self._run(fn, retries, DEFAULTS | options, hold)
        finally:
            await self._calls.to_the_end(hold.release)

    async def _run(
        self,
        fn: Callable[[AsyncTransaction], Awaitable[T]],
        retries: Retries,
        settings: dict[str, Any],
        hold: Hold,
    ) -> T:
        age_ts: Timestamp | None = None
        while True:
            begun = await self._calls(Transaction.begin, self.blocking, **settings, age_ts=age_ts)
            begun.context.hold = hold
            age_ts = begun.age
            try:
                async with AsyncTransaction(begun, self._calls) as txn:
                    result = await fn(txn)
                return result
            except CommitOutcomeUnknownError as error:
                state = await self._calls(self.blocking.outcome, error.txn_id)
                if state is TxnState.COMMITTED:
                    return result
                pause = retries.pause(error, retriable=True)
            except TxnkvError as error:
                pause = retries.pause(error, retriable=error.retriable)
            await asyncio.sleep(pause)

    async def new_session(
        self, flush_mode: FlushMode = "manual", buffer_bytes: int | None = BUFFER_BYTES
    ) -> AsyncSession:
        """A session outside of any transaction: each flush is one of its own."""
        session = await self._calls(self.blocking.new_session, flush_mode, buffer_bytes)
        return AsyncSession(session, InTurn(self._calls), self._calls)

    async def transaction_state(self, id: int) -> TxnState:
        """The state of a transaction."""
        return await self._calls(self.blocking.transaction_state, id)

    async def transactions(self) -> list[TxnInfo]:
        """All transactions in the status table."""
        return await self._calls(self.blocking.transactions)

    async def abort_transaction(self, id: int) -> None:
        """Abort a transaction of any process."""
        await self._calls(self.blocking.abort_transaction, id)

    async def keep_transaction_alive(self, id: int) -> None:
        """Send one heartbeat for an open transaction of any process."""
        await self._calls(self.blocking.keep_transaction_alive, id)

    async def applied(self, app_id: str) -> Applied | None:
        """The last version of an application that is committed."""
        return await self._calls(self.blocking.applied, app_id)

    async def applications(self) -> dict[str, Applied]:
        """The last version of every application, by its id."""
        return await self._calls(self.blocking.applications)

    async def forget_applied(self, app_id: str) -> bool:
        """Let an application begin anew."""
        return await self._calls(self.blocking.forget_applied, app_id)

    # -- reading -----------------------------------------------------------------------

    async def snapshot(self, at: Any = None) -> AsyncSnapshot:
        """The store at one instant; see `txnkv.Client.snapshot`."""
        return AsyncSnapshot(await self._calls(self.blocking.snapshot, at), self._calls)

    # -- maintenance -------------------------------------------------------------------

    async def stats(self) -> dict[str, Any]:
        """Numbers about the store."""
        return await self._calls(self.blocking.stats)

    async def metrics(self) -> MetricsSnapshot:
        """Counters, gauges and histograms of this process."""
        return await self._calls(self.blocking.metrics)

    async def check(self, progress: Callable[[int, int], None] | None = None) -> CheckReport:
        """Read everything and compare it with what it should be."""
        return await self._calls(self.blocking.check, progress)

    async def compact(self, progress: Callable[[int, int], None] | None = None) -> CompactReport:
        """Merge row sets now, and give back space; see `txnkv.Client.compact`."""
        return await self._calls(self.blocking.compact, progress)

    async def backup(
        self,
        dest: str | os.PathLike[str],
        *,
        base: str | os.PathLike[str] | None = None,
        bytes_per_second: float | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> BackupReport:
        """Copy all that is committed now; see `txnkv.Client.backup`."""
        return await self._calls(
            partial(
                self.blocking.backup,
                dest,
                base=base,
                bytes_per_second=bytes_per_second,
                progress=progress,
            )
        )

    async def accept_loss(self, part: str, *, dry_run: bool = False) -> Loss:
        """Give up what a damaged part has lost; see `txnkv.Client.accept_loss`."""
        return await self._calls(partial(self.blocking.accept_loss, part, dry_run=dry_run))

    async def repair_clock(self) -> Timestamp:
        """Set the store's clock to this machine's; see `txnkv.Client.repair_clock`."""
        return await self._calls(self.blocking.repair_clock)


class TransactionBlock:
    """A transaction block that is about to begin."""

    def __init__(self, client: AsyncClient, options: dict[str, Any]) -> None:
        self._client = client
        self._options = options
        self._txn: AsyncTransaction | None = None

    def __repr__(self) -> str:
        return f"<TransactionBlock of {self._txn or 'a transaction'!r} by {self._client!r}>"

    async def __aenter__(self) -> AsyncTransaction:
        self._txn = await self._client.new_transaction(**self._options)
        return self._txn

    async def __aexit__(self, *error: Any) -> None:
        assert self._txn is not None
        await self._txn.__aexit__(*error)
