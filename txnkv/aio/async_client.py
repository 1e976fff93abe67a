"""The client for asyncio."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from inspect import isawaitable
from typing import Any, TypeVar, Unpack

from txnkv.aio.async_handles import (
    AsyncGroupConsumer,
    AsyncSession,
    AsyncSnapshot,
    AsyncTable,
    AsyncTopic,
    AsyncTransaction,
)
from txnkv.aio.calls import Calls, ClosingWrapper, calls_of_a_client, opening, same, twin
from txnkv.client import Attempts, Client, has_committed, require_done
from txnkv.errors import CommitOutcomeUnknownError
from txnkv.remote import connect as connect_blocking
from txnkv.transaction import (
    DEADLINE,
    Retries,
    Transaction,
    TransactionOptions,
    TxnToken,
    has_failed,
)

T = TypeVar("T")


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
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError(
                "no loop of asyncio runs here, and txnkv.aio is for asyncio alone: from trio call "
                "txnkv.connect in a thread"
            ) from None
        calls = calls_of_a_client()
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
            await self._client.__aexit__(*error)


class AsyncClient(ClosingWrapper[Client]):
    """A connection to a store for asyncio. Shared by tasks; see `txnkv.Client`."""

    path: str = same()

    create_table = twin(Client.create_table, AsyncTable)
    table = twin(Client.table, AsyncTable)
    tables = twin(Client.tables)
    drop_table = twin(Client.drop_table)
    recall_table = twin(Client.recall_table, AsyncTable)
    rename_table = twin(Client.rename_table, AsyncTable)
    create_index = twin(Client.create_index)
    drop_index = twin(Client.drop_index)
    create_topic = twin(Client.create_topic, AsyncTopic)
    topic = twin(Client.topic, AsyncTopic)
    topics = twin(Client.topics)
    consumer = twin(Client.consumer, AsyncGroupConsumer)
    drop_topic = twin(Client.drop_topic)

    new_transaction = twin(Client.new_transaction, AsyncTransaction)
    new_session = twin(Client.new_session, AsyncSession)
    transaction_state = twin(Client.transaction_state)
    transactions = twin(Client.transactions)
    abort_transaction = twin(Client.abort_transaction)
    keep_transaction_alive = twin(Client.keep_transaction_alive)
    applied = twin(Client.applied)
    applications = twin(Client.applications)
    forget_applied = twin(Client.forget_applied)

    snapshot = twin(Client.snapshot, AsyncSnapshot)
    stats = twin(Client.stats)
    metrics = twin(Client.metrics)
    check = twin(Client.check)
    compact = twin(Client.compact)
    backup = twin(Client.backup)
    accept_loss = twin(Client.accept_loss)
    repair_clock = twin(Client.repair_clock)

    def __init__(self, client: Client, calls: Calls) -> None:
        super().__init__(client, calls)
        self._closed = False
        # Of its own: who waits for the right of way keeps no thread from the one that has it.
        self._waits = Calls(8, may_wait=True)

    async def close(self) -> None:
        """Close. Twice is fine."""
        if not self._closed:
            self._closed = True
            await self._calls.to_the_end(self.blocking.close)
            self._waits.close()
            self._calls.close()

    async def __aexit__(self, *error: Any) -> None:
        if has_failed(error[1]):
            await self._calls.to_the_end(self.blocking._forget)
        await self.close()

    def transaction(self, **options: Unpack[TransactionOptions]) -> TransactionBlock:
        """`async with client.transaction() as txn:` commits at the end, rolls back on an
        exception.
        """
        return TransactionBlock(self, {**options})

    @opening
    async def join(self, token: TxnToken | bytes | str) -> AsyncTransaction:
        """Join a transaction by its token, as `AsyncTransaction.deserialize`."""
        return await AsyncTransaction.deserialize(self, token)

    async def run(
        self,
        fn: Callable[[AsyncTransaction], Awaitable[T]],
        attempts: int | None = None,
        deadline: float | None = DEADLINE,
        **options: Unpack[TransactionOptions],
    ) -> T:
        """Call `await fn(txn)` and commit; again on whatever is retriable."""
        made: list[Attempts] = []

        def first() -> Transaction | None:
            made.append(tries := self.blocking.attempts({**options}))
            return None if tries.blocked else tries.begin()

        try:
            return await self._run(fn, first, made, self.blocking.retries(attempts, deadline))
        finally:
            if made:
                await self._calls.to_the_end(made[0].close)

    async def _run(
        self,
        fn: Callable[[AsyncTransaction], Awaitable[T]],
        first: Callable[[], Transaction | None],
        made: list[Attempts],
        retries: Retries,
    ) -> T:
        """Try until it commits. `made`: what `first` has made, until it is closed."""

        def end(txn: Transaction) -> None:
            txn.__exit__(None, None, None)
            with suppress(Exception):  # it is committed; `run` closes them again, and tells
                made[0].close()
                made.clear()

        while True:
            if made and made[0].blocked:
                await (self._calls if made[0].ahead else self._waits)(made[0].wait)
            returned = False
            try:
                begun = await self._calls.to_the_end(made[0].begin if made else first)
                if begun is None:
                    continue
                txn = AsyncTransaction(begun, self._calls)
                try:
                    given = fn(txn)
                    if not isawaitable(given):
                        raise TypeError(
                            "run of txnkv.aio calls an `async def`, and awaits what it does; the "
                            f"function gave a {type(given).__name__}. Nothing was committed"
                        )
                    result = await given
                    require_done(result, txn, "await it in the function")
                    returned = True
                except BaseException:
                    await txn.__aexit__(*sys.exc_info())
                    raise
                await txn._turn.to_the_end(end, begun)
                return result
            except CommitOutcomeUnknownError as error:
                if not returned or not error.txn_id:
                    raise  # it is of a commit of the function's own, or there is nothing to ask by
                if await self._calls(has_committed, self.blocking.outcome, error):
                    return result
                pause = retries.pause(error)
            except Exception as error:
                if getattr(error, "retriable", None) is not True:
                    raise
                pause = retries.pause(error)
                if made:
                    made[0].failed(error)
            await asyncio.sleep(pause)


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
