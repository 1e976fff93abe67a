"""Scans as a user holds them, and the tokens by which other processes read parts of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

import pyarrow as pa

from txnkv.coordinator import Timestamp
from txnkv.core import FEW, Holding
from txnkv.core import compute as pc
from txnkv.errors import HistoryExpiredError
from txnkv.storage import brief, new_lock, shielded, shielded_steps
from txnkv.tables import (
    TOKEN_ROWS,
    OwnThen,
    Piece,
    Plan,
    ReadView,
    Request,
    TableInfo,
    TokenParts,
    lookup,
    point,
    scan,
    scan_tokens,
    short_scan,
)
from txnkv.tables import Order as Order
from txnkv.transaction.begin import require_client
from txnkv.transaction.connection import Closing, Connection, Grid

_THREADS: Final = 2
_SHOWN: Final = 10
"""Rows that a notebook shows."""
_FEW: Final = 50
_FEW_VALUES: Final = 150
"""Rows, and their values, that are made an Arrow table out of dicts; that takes longer for more."""
_FEWEST: Final = 4
_DICTS: Final = 512
"""Rows that are made dicts together: who wants the first row waits for so many."""


def _are_floats(column: pa.ChunkedArray) -> bool:
    """Return True for integers that a float has all digits of."""
    ends = pc.min_max(column).as_py()
    return all(each is None or -(1 << 53) <= each <= 1 << 53 for each in ends.values())


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
        require_client(client)
        client.require_open()
        if client.elsewhere is not None:
            made: Scan = client.elsewhere("open_scan", self.parts)
            return made
        engine = client.instance.engine
        asked, view, pieces = scan_tokens.reopen(engine, self.parts)
        found = Scan(client, asked, lambda: view, pieces=pieces)
        found._planned()  # pinned from here on
        return found


class Scan(Closing):
    """Rows of one table. Lazy, pinned to a snapshot at its first read, and repeatable as long as
    the table is there.

    Belongs to one thread at a time.

    Args:
        connection: to the store.
        asked: what to read.
        view: gives what it sees, at the first read.
        share: called before tokens are cut; makes a transaction's own writes readable for other
            processes, and answers the view that has them.
        pieces: of the table, where it is not all of it.
    """

    _elsewhere = "hand on scan.tokens() and open them there"

    def __init__(
        self,
        connection: Connection,
        asked: Request,
        view: Callable[[], ReadView],
        share: Callable[[], ReadView] | None = None,
        pieces: Sequence[Piece] | None = None,
    ) -> None:
        self._connection = connection
        self._asked = asked
        self._view, self._share, self._pieces = view, share, pieces
        self._seen: tuple[ReadView, Holding] | None = None  # of a first read without a plan
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
        ordered: Order,
        limit: int | None,
        share: Callable[[], ReadView] | None = None,
    ) -> Scan:
        """A scan with checked arguments.

        Raises:
            SchemaError: a column or operator is unknown, or a constant does not fit.
            ValueError: it has no such limit.
        """
        asked = scan.request(table, columns, where, ordered, limit)
        return cls(connection, asked, view, share)

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the batches; before the first read as the table is by then."""
        return self._asked.schema

    def __repr__(self) -> str:
        asked, bound = self._asked, self._bound or self._seen
        at = "not read yet" if bound is None else f"at {int(bound[0].snapshot)}"
        return f"<Scan of {asked.table.name!r}, columns {', '.join(asked.columns)}, {at}>"

    def _grid(self) -> Grid:
        rows = islice(self, _SHOWN)
        return self._asked.columns, [list(row.values()) for row in rows]

    @property
    def snapshot(self) -> Timestamp:
        """The snapshot that it reads."""
        self._connection.require_open()
        return (self._seen or self._both())[0].snapshot

    def to_batches(self) -> Iterator[pa.RecordBatch]:
        """The rows as record batches of up to 64 Ki rows."""
        self._connection.require_open()
        return shielded_steps(self._planned().batches())

    def to_arrow(self) -> pa.Table:
        """The rows as an Arrow table."""
        asked, schema = self._asked, self.schema
        most = min(_FEW, _FEW_VALUES / point.weight(schema)) if schema else 0
        few = most >= _FEWEST and (asked.limit or 0) <= most
        rows = self._few(int(most)) if few else None
        if rows is None or self._asked.table is not asked.table:
            return self._all_in_arrow()
        return point.in_arrow(rows, schema)

    @shielded
    def _all_in_arrow(self) -> pa.Table:
        self._connection.require_open()
        batches = list(self._planned().batches(threads=_THREADS))
        if not self._asked.columns:
            return pa.Table.from_batches(batches) if batches else pa.table({})
        return pa.Table.from_batches(batches, self.schema)

    def to_pandas(self) -> Any:
        """The rows as a pandas data frame; needs pandas. Whole numbers beside nulls are floats, as
        Arrow makes them; where some of a column might not be the same then, Int64 or UInt64.
        """
        import pandas

        table = self.to_arrow()
        whole = {pa.int64(): pandas.Int64Dtype(), pa.uint64(): pandas.UInt64Dtype()}
        kinds = {
            column.type: whole[column.type]
            for column in table.columns
            if column.type in whole and column.null_count and not _are_floats(column)
        }
        return table.to_pandas(types_mapper=kinds.get)

    def to_polars(self) -> Any:
        """The rows as a polars data frame; needs polars."""
        import polars

        return polars.from_arrow(self.to_arrow())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        few = self._few()
        return self._in_batches() if few is None else iter(few)

    def _in_batches(self) -> Iterator[dict[str, Any]]:
        for batch in self.to_batches():
            for start in range(0, batch.num_rows, _DICTS):
                yield from lookup.dicts(batch.slice(start, _DICTS))

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

    @brief
    def close(self) -> None:
        """Give the snapshot up. Batches that were read stay; the next read pins anew."""
        with self._lock:
            self._bound = self._seen = None

    def _planned(self) -> Plan:
        return self._both()[1]

    @shielded
    def _both(self) -> tuple[ReadView, Plan]:
        with self._lock:
            if self._bound is None:
                engine, seen = self._connection.instance.engine, self._seen
                view = self._view if seen is None else lambda: seen[0]
                self._asked, now, plan = short_scan.bound(engine, self._asked, view, self._pieces)
                self._bound, self._seen = (now, plan), None
            return self._bound

    def _few(self, most: int = FEW) -> list[dict[str, Any]] | None:
        """The rows, where keys or an index tell that they are few, `most` of them at most; None:
        they come in batches.
        """
        if self._pieces is not None or self._bound is not None:
            return None
        self._connection.require_open()
        seen = self._seen
        return self._find_few(self._view() if seen is None else seen[0], most)

    @brief
    def _find_few(self, view: ReadView, most: int) -> list[dict[str, Any]] | None:
        engine, own = self._connection.instance.engine, view.own
        pin = engine.log.runtime.hold_snapshot(view.snapshot)
        then = view = view.until_now(engine)
        if own is not None:  # what the transaction writes later the scan goes on to leave out
            then = replace(view, own=OwnThen(own) if own.memories else None)
        try:
            engine.log.latest()  # what was given up before the pin was there is known from here on
            asked = self._asked.of(engine.at(self._asked.table, view.snapshot))
            cut = most < FEW and asked.limit is None
            rows = short_scan.few(engine, asked._replace(limit=most + 1) if cut else asked, view)
            if cut and rows is not None and len(rows) > most:
                rows = None
        except HistoryExpiredError:
            return None
        except BaseException:  # whoever keeps the error keeps this frame
            pin.end()
            raise
        with self._lock:
            if rows is not None and self._seen is None and self._bound is None:
                if asked.limit is not None and not asked.filter.shape.is_key_range:
                    asked = asked._replace(ordered=asked.ordered or True)  # as the rows are
                self._asked = asked
                self._seen = then, pin
            first = self._seen or self._bound
            # Another call may have been first, that nobody waits for.
            return rows if first is not None and first[0].snapshot == view.snapshot else None
