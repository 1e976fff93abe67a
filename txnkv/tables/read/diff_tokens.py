"""Parts of a diff, for other processes: which keys of which tablets, between which times.

Like the tokens of a scan they name ranges of keys, not what holds them, so they stay good when a
flush or a compaction has moved the rows. Whoever opens one reads exactly what committed between
the two times, whoever committed it; but the history from the start on must still be there, so
whoever cuts tokens pins it (by a snapshot at the start) until they have been read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from txnkv.coordinator import Timestamp
from txnkv.errors import InvalidTokenError, TableNotFoundError
from txnkv.tables.read import diff_events
from txnkv.tables.read.diff import DiffRequest, diff, request, sights_of
from txnkv.tables.read.predicate import KeyRange
from txnkv.tables.read.reading import Piece
from txnkv.tables.read.view import Sight
from txnkv.tables.table_catalog import TableInfo
from txnkv.tables.tables import Tables


@dataclass(frozen=True)
class DiffParts:
    """A request, and the part of the table that it is to read. Picklable.

    Attributes:
        parts: (tablet id, low, high): low <= encoded key < high, None is unbounded.
        rows: about how many changes, at most.
    """

    store_id: str
    table: str
    table_id: int
    columns: tuple[str, ...]
    start: int
    end: int
    parts: tuple[tuple[int, bytes | None, bytes | None], ...]
    rows: int


def split(tables: Tables, asked: DiffRequest, rows_each: int) -> list[DiffParts]:
    """Cut a diff into pieces of about `rows_each` changes. None for no change.

    Raises:
        TableNotFoundError: the table was dropped.
        HistoryExpiredError: the start is older than the history.
    """
    groups: list[list[Piece]] = []
    sizes: list[int] = []
    for piece, count in _pieces(tables, asked, rows_each):
        if not groups or sizes[-1] + count > rows_each:
            groups.append([])
            sizes.append(0)
        groups[-1].append(piece)
        sizes[-1] += count
    return [
        DiffParts(
            tables.store.store_id,
            asked.table.name,
            asked.table.id,
            asked.columns,
            int(asked.start),
            int(asked.end),
            tuple((p.tablet_id, p.key_range.low, p.key_range.high) for p in group),
            count,
        )
        for group, count in zip(groups, sizes, strict=True)
    ]


def _pieces(tables: Tables, asked: DiffRequest, rows_each: int) -> Iterator[tuple[Piece, int]]:
    sights, pins = sights_of(tables, asked, set(asked.table.tablets))
    try:
        for id in asked.table.tablets:
            _, after = sights[id]
            for part, count in diff_events.cut(after, int(asked.start), KeyRange(), rows_each):
                yield Piece(id, part), count
    finally:
        pins.release()


def reopen(tables: Tables, token: DiffParts) -> pa.RecordBatchReader:
    """The changes of a token, in any process.

    Raises:
        InvalidTokenError: it is of another store.
        TableNotFoundError: the table was dropped.
        HistoryExpiredError: nobody kept the history from its start on.
    """
    if token.store_id != tables.store.store_id:
        raise InvalidTokenError(
            f"the diff token is of store {token.store_id}, this is {tables.store.store_id}: "
            "open it with a client of its own store"
        )
    tablet = tables.tablet(token.parts[0][0]) if token.parts else None
    if tablet is None:
        raise TableNotFoundError(f"table {token.table!r} was dropped since the token was made")
    asked = request(tablet.table, Timestamp(token.start), Timestamp(token.end), token.columns)
    return diff(tables, asked, [Piece(id, KeyRange(low, high)) for id, low, high in token.parts])


def changed(tables: Tables, table: TableInfo, start: Timestamp, end: Timestamp) -> bool:
    """Return True when anything happened to a table with start < commit timestamp <= end.

    No I/O, unless the process must hear of commits of others first. True also where it came to
    nothing in the end. The caller has pinned the history from `start` on; without that, what
    happened may be forgotten.

    Raises:
        TableNotFoundError: the table was dropped.
    """
    tables.require_live(table)
    for tablet in tables.tablets(table):
        after = Sight.of(tablet, end, tablet.state(end), None, ())
        if diff_events.anything(after, int(start)):
            return True
    return False
