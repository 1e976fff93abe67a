"""Scans as a user holds them, and the tokens by which other processes read parts of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import pyarrow as pa

from txnkv.coordinator import Timestamp
from txnkv.errors import ClosedError
from txnkv.storage import Runtime, new_lock, shielded, shielded_steps
from txnkv.tables import (
    TOKEN_ROWS,
    Plan,
    ReadView,
    Request,
    TableInfo,
    TokenParts,
    scan,
    scan_tokens,
)
from txnkv.transaction.connection import Closing, Connection, Grid

_THREADS: Final = 2
_SHOWN: Final = 10
"""Rows that a notebook shows."""


@dataclass(frozen=True)
class ScanToken:
    """A part of a scan, to be opened by any process. Picklable.

    Attributes:
        parts: which keys, at which snapshot.
    """

    parts: TokenParts

    @property
    def rows(self) -> int:
        """About how many rows it covers, before predicates."""
        return self.parts.rows

    @shielded
    def open(self, client: Connection) -> Scan:
        """The part as a scan.

        Raises:
            InvalidTokenError: the token is of another store.
            TableNotFoundError: the table was dropped since.
        """
        client.require_open()
        if client.elsewhere is not None:
            made: Scan = client.elsewhere("open_scan", self.parts)
            return made
        engine = client.instance.engine
        asked, view, pieces = scan_tokens.reopen(engine, self.parts)
        found = Scan(client, asked, lambda: (asked, view, scan.plan(engine, asked, view, pieces)))
        found._planned()  # pinned from here on
        return found


class Scan(Closing):
    """Rows of one table. Lazy, repeatable, pinned to a snapshot at its first read.

    Belongs to one thread at a time.
    """

    _elsewhere = "hand on scan.tokens() and open them there"

    def __init__(
        self,
        connection: Connection,
        asked: Request,
        bind: Callable[[], tuple[Request, ReadView, Plan]],
    ) -> None:
        self._connection = connection
        self._asked = asked
        self._bind = bind
        self._share: Callable[[], ReadView] | None = None
        self._bound: tuple[ReadView, Plan] | None = None
        self._lock = new_lock()

    @classmethod
    def over(
        cls,
        connection: Connection,
        table: TableInfo,
        view: Callable[[], ReadView],
        columns: Sequence[str] | None,
        where: Any,
        ordered: bool,
        limit: int | None,
        share: Callable[[], ReadView] | None = None,
    ) -> Scan:
        """A scan of what `view` gives at the first read.

        Args:
            share: called before tokens are cut; makes a transaction's own writes readable for
                other processes, and answers the view that has them.

        Raises:
            SchemaError: a column or operator is unknown, or a constant does not fit.
        """
        asked = scan.request(table, columns, where, ordered, limit)

        def bind() -> tuple[Request, ReadView, Plan]:
            return scan.bound(connection.instance.engine, asked, view)

        made = cls(connection, asked, bind)
        made._share = share
        return made

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the batches; before the first read as the table is by then."""
        return self._asked.schema

    def __repr__(self) -> str:
        asked, bound = self._asked, self._bound
        at = "not read yet" if bound is None else f"at {int(bound[0].snapshot)}"
        return f"<Scan of {asked.table.name!r}, columns {', '.join(asked.columns)}, {at}>"

    def _grid(self) -> Grid:
        rows = islice(self, _SHOWN)
        return self._asked.columns, [list(row.values()) for row in rows]

    @property
    def snapshot(self) -> Timestamp:
        """The snapshot that it reads."""
        self._connection.require_open()
        return self._both()[0].snapshot

    def to_batches(self) -> Iterator[pa.RecordBatch]:
        """The rows as record batches of up to 64 Ki rows."""
        self._connection.require_open()
        return shielded_steps(self._planned().batches())

    @shielded
    def to_arrow(self) -> pa.Table:
        """The rows as an Arrow table."""
        self._connection.require_open()
        batches = list(self._planned().batches(threads=_THREADS))
        if not self._asked.columns:
            return pa.Table.from_batches(batches) if batches else pa.table({})
        return pa.Table.from_batches(batches, self.schema)

    def to_pandas(self) -> Any:
        """The rows as a pandas data frame; needs pandas."""
        return self.to_arrow().to_pandas()

    def to_polars(self) -> Any:
        """The rows as a polars data frame; needs polars."""
        import polars

        return polars.from_arrow(self.to_arrow())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.to_batches():
            yield from batch.to_pylist()

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        batches = self.to_batches()  # binds it, so that the schema is that of what is read
        reader = pa.RecordBatchReader.from_batches(self.schema, batches)
        return reader.__arrow_c_stream__(requested_schema)

    @shielded
    def tokens(self, rows: int = TOKEN_ROWS) -> list[ScanToken]:
        """Parts that together are this scan, for other processes.

        Args:
            rows: about how many rows a part covers. An ordered scan is cut by tablet, each
                part ordered in itself; a limit holds for each part.
        """
        self._connection.require_open()
        view, plan = self._both()
        engine = self._connection.instance.engine
        if self._share is not None:
            view = self._share()
            plan = scan.plan(engine, self._asked, view)
        return [
            ScanToken(parts)
            for parts in scan_tokens.split(engine, self._asked, view, plan, max(1, rows))
        ]

    @shielded
    def close(self) -> None:
        """Give the snapshot up. Batches that were read stay; the next read pins anew."""
        with self._lock:
            self._bound = None

    def _planned(self) -> Plan:
        return self._both()[1]

    @shielded
    def _both(self) -> tuple[ReadView, Plan]:
        with self._lock:
            if self._bound is None:
                self._asked, view, plan = self._bind()
                self._bound = view, plan
            return self._bound


def unpin(runtime: Runtime, snapshot: Timestamp) -> None:
    """Give back a pin, unless the store was closed meanwhile."""
    with suppress(ClosedError):
        runtime.unpin(snapshot)
