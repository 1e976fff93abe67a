"""Parts of a scan, for other processes: which keys of which tablets, at which snapshot.

A token names ranges of keys, not what holds them, so it stays good when a flush or a compaction
has moved the rows, and small commits that lie in memory are seen by whoever opens it. Ranges
are cut at the first keys of blocks, and where many rows are in memory at every so many of them.

In a transaction it names a point in that one's own writes, too: whenever the parts of a scan are
opened, all of them see what was staged before the tokens were made, and nothing later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from txnkv.coordinator import Timestamp
from txnkv.errors import InvalidTokenError, TableNotFoundError
from txnkv.tables.read.ordering import Order
from txnkv.tables.read.predicate import KeyRange
from txnkv.tables.read.scan import Piece, Plan, Request, request
from txnkv.tables.read.sources import Source, cuts
from txnkv.tables.read.view import ReadView
from txnkv.tables.tables import Tables
from txnkv.tables.tablets import manifest

TOKEN_ROWS: Final = 1 << 20
"""About how many rows one scan token covers, unless another number is asked for."""


@dataclass(frozen=True)
class TokenParts:
    """A request, and the part of the table that it is to read. Picklable.

    Attributes:
        parts: (tablet id, low, high): low <= encoded key < high, None is unbounded.
        rows: about how many, before predicates.
        upto: a `manifest.Upto` of the transaction.
    """

    store_id: str
    table: str
    table_id: int
    columns: tuple[str, ...]
    where: Any
    ordered: Order
    limit: int | None
    snapshot: int
    txn_id: int | None
    parts: tuple[tuple[int, bytes | None, bytes | None], ...]
    rows: int
    upto: tuple[int, tuple[str, ...]] | None = None


def split(
    tables: Tables, asked: Request, view: ReadView, made: Plan, rows_each: int
) -> list[TokenParts]:
    """Cut a plan into pieces of about `rows_each` rows; an ordered one by tablet."""
    by_tablet: dict[int, list[Source]] = {}
    for part in made.parts:
        by_tablet.setdefault(part.tablet.id, []).append(part)
    groups: list[list[tuple[Piece, int]]] = []
    filled = 0
    for parts in by_tablet.values():
        id = parts[0].tablet.id
        found = [(Piece(id, keys), rows) for keys, rows in cuts(parts, rows_each)]
        if asked.ordered:
            rows = sum(rows for _, rows in found)
            groups.append([(Piece(id, KeyRange()), rows)])
            continue
        for piece, rows in found:
            if not groups or filled + rows > rows_each:
                groups.append([])
                filled = 0
            groups[-1].append((piece, rows))
            filled += rows
    return [
        TokenParts(
            tables.store.store_id,
            asked.table.name,
            asked.table.id,
            asked.columns,
            asked.where,
            asked.ordered,
            asked.limit,
            view.snapshot,
            view.txn_id,
            tuple((p.tablet_id, p.key_range.low, p.key_range.high) for p, _ in group),
            sum(rows for _, rows in group),
            view.upto,
        )
        for group in groups
    ]


def reopen(tables: Tables, token: TokenParts) -> tuple[Request, ReadView, list[Piece]]:
    """The request of a token in another process, what it sees, and where.

    Raises:
        InvalidTokenError: it is of another store.
        TableNotFoundError: the table was dropped and its files are gone.
    """
    if token.store_id != tables.store.store_id:
        raise InvalidTokenError(
            f"the scan token is of store {token.store_id}, this is {tables.store.store_id}: "
            "open it with a client of its own store"
        )
    tablet = tables.tablet(token.parts[0][0]) if token.parts else None
    if tablet is None:
        raise TableNotFoundError(f"table {token.table!r} was dropped since the token was made")
    upto = None if token.upto is None else manifest.Upto(*token.upto)
    view = ReadView(Timestamp(token.snapshot), token.txn_id, upto=upto)
    table = tables.at(tablet.table, view.snapshot)
    asked = request(table, token.columns, token.where, token.ordered, token.limit)
    pieces = [Piece(id, KeyRange(low, high)) for id, low, high in token.parts]
    return asked, view, pieces
