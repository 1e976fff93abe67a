"""Tables, snapshots and scans for asyncio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from txnkv.aio.calls import Calls, Wrapper
from txnkv.client import DiffToken, Snapshot, Table
from txnkv.coordinator import Timestamp
from txnkv.tables import TOKEN_ROWS, Schema
from txnkv.transaction import Scan, ScanToken


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

    async def next_id(self) -> int:
        """An id that no other call in any process gets."""
        return await self._calls(self.blocking.next_id)


class AsyncSnapshot(Wrapper):
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

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.blocking.close()


At = AsyncSnapshot | Any


def plain(table: str | AsyncTable | Table) -> str | Table:
    """A table as the blocking client takes it."""
    return table.blocking if isinstance(table, AsyncTable) else table


def plain_at(at: At) -> Any:
    """A point in time as the blocking client takes it."""
    return at.blocking if isinstance(at, AsyncSnapshot) else at
