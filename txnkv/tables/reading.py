"""From what a caller asks for to a plan of blocks; scan tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from txnkv.coordinator.ids import Timestamp
from txnkv.errors import InvalidTokenError, TableNotFoundError
from txnkv.tables.catalog import TableInfo
from txnkv.tables.predicate import Filter, KeyRange, Where, parse
from txnkv.tables.scan import Part, Plan, plan_parts
from txnkv.tables.view import ReadView

if TYPE_CHECKING:
    from txnkv.tables.engine import TableEngine

TOKEN_ROWS: Final = 1 << 20
"""About how many rows one scan token covers, unless another number is asked for."""


@dataclass(frozen=True)
class Request:
    """A checked scan request, not yet bound to a snapshot."""

    table: TableInfo
    columns: tuple[str, ...]
    where: Where
    filter: Filter
    ordered: bool = False
    limit: int | None = None

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([self.table.schema.arrow.field(name) for name in self.columns])


def request(
    table: TableInfo,
    columns: Sequence[str] | None,
    where: Where,
    ordered: bool,
    limit: int | None,
) -> Request:
    """Check a scan's arguments.

    Raises:
        SchemaError: a column or operator is unknown, or a constant does not fit.
        ValueError: `limit` is negative.
    """
    if isinstance(columns, str):
        raise TypeError(f"columns is a list of names, as [{columns!r}]")
    names = tuple(table.schema.names if columns is None else columns)
    for name in names:
        table.schema.position(name)
    if limit is not None and limit < 0:
        raise ValueError(f"limit is a number of rows, not {limit}")
    return Request(table, names, where, parse(where, table.schema), ordered, limit)


def plan(engine: TableEngine, asked: Request, view: ReadView) -> Plan:
    """Bind a request to what a view sees."""
    engine.require_live(asked.table)
    tablets = engine.tablets(asked.table)
    key_range = asked.filter.key_range(asked.table.schema, tablets[0].codec)
    row_sets = [view.row_sets(engine, tablet) for tablet in tablets]
    parts = plan_parts(engine, tablets, row_sets, key_range)
    return _plan(asked, key_range, parts)


def _plan(asked: Request, key_range: KeyRange, parts: tuple[Part, ...]) -> Plan:
    return Plan(
        asked.columns, asked.filter, key_range, parts, asked.schema, asked.ordered, asked.limit
    )


def count(engine: TableEngine, asked: Request, view: ReadView) -> int:
    """Rows that satisfy a request without reading their columns; its projection is empty."""
    made = plan(engine, asked, view)
    if not asked.filter.predicates and asked.filter.expression is None:
        return sum(part.info.rows for part in made.parts)
    return sum(batch.num_rows for batch in made.batches())


@dataclass(frozen=True)
class TokenParts:
    """The picklable part of a plan: which blocks of which row sets.

    Attributes:
        parts: (tablet id, row set id, first block, past the last block).
    """

    store_id: str
    table: str
    table_id: int
    columns: tuple[str, ...]
    where: Any
    ordered: bool
    limit: int | None
    snapshot: int
    txn_id: int | None
    parts: tuple[tuple[int, int, int, int], ...]
    rows: int


def split(
    engine: TableEngine, asked: Request, view: ReadView, made: Plan, rows_each: int
) -> list[TokenParts]:
    """Cut a plan into pieces of about `rows_each` rows; an ordered one by tablet."""
    groups: list[list[Part]] = []
    if made.ordered:
        by_tablet: dict[int, list[Part]] = {}
        for part in made.parts:
            by_tablet.setdefault(part.tablet.id, []).append(part)
        groups = list(by_tablet.values())
    else:
        filled = 0
        for part in made.parts:
            each = max(1, part.info.rows // max(1, _blocks(part)))
            step = max(1, rows_each // each)
            for start in range(part.start, part.stop, step):
                piece = Part(part.tablet, part.info, start, min(start + step, part.stop))
                rows = each * (piece.stop - piece.start)
                if not groups or filled + rows > rows_each:
                    groups.append([])
                    filled = 0
                groups[-1].append(piece)
                filled += rows
    return [
        TokenParts(
            engine.store.store_id,
            asked.table.name,
            asked.table.id,
            asked.columns,
            asked.where,
            asked.ordered,
            asked.limit,
            view.snapshot,
            view.txn_id,
            tuple((part.tablet.id, part.info.id, part.start, part.stop) for part in group),
            sum(part.info.rows * (part.stop - part.start) // _blocks(part) for part in group),
        )
        for group in groups
    ]


def _blocks(part: Part) -> int:
    with part.tablet.read() as pages:
        return len(part.tablet.row_set(part.info).header(pages).blocks)


def reopen(engine: TableEngine, token: TokenParts) -> tuple[Request, Plan]:
    """The request and plan of a token, in another process.

    Raises:
        InvalidTokenError: it is of another store.
        TableNotFoundError: the table was dropped and its files are gone.
    """
    if token.store_id != engine.store.store_id:
        raise InvalidTokenError(
            f"the scan token is of store {token.store_id}, this is {engine.store.store_id}: "
            "open it with a client of its own store"
        )
    view = ReadView(Timestamp(token.snapshot), token.txn_id)
    parts = []
    table: TableInfo | None = None
    for tablet_id in dict.fromkeys(part[0] for part in token.parts):
        tablet = engine.tablet(tablet_id)
        if tablet is None:
            raise TableNotFoundError(f"table {token.table!r} was dropped since the token was made")
        table = tablet.table
        infos = {info.id: info for info in view.row_sets(engine, tablet)}
        parts += [
            Part(tablet, infos[row_set_id], start, stop)
            for owner, row_set_id, start, stop in token.parts
            if owner == tablet_id
        ]
    if table is None:
        table = engine.get(token.table)
    asked = request(table, token.columns, token.where, token.ordered, token.limit)
    key_range = asked.filter.key_range(table.schema, engine.tablets(table)[0].codec)
    return asked, _plan(asked, key_range, tuple(parts))
