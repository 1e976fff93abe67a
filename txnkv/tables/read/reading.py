"""From what a caller asks for to a plan of what to read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from txnkv.errors import HistoryExpiredError
from txnkv.tables.read.predicate import Filter, KeyRange, Where, parse
from txnkv.tables.read.scan import Plan, plan_parts
from txnkv.tables.read.view import ReadView
from txnkv.tables.table_catalog import TableInfo
from txnkv.tables.tables import Tables
from txnkv.tables.tablets import RowSetRetired


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


@dataclass(frozen=True)
class Piece:
    """The keys of one tablet in a range."""

    tablet_id: int
    key_range: KeyRange


def plan(
    tables: Tables, asked: Request, view: ReadView, pieces: Sequence[Piece] | None = None
) -> Plan:
    """Bind a request to what a view sees, in all of the table or in some pieces of it.

    Raises:
        TableNotFoundError: the table was dropped.
        HistoryExpiredError: the view's snapshot is older than the history.
    """
    tables.require_live(asked.table)
    tablets = tables.tablets(asked.table)
    wanted = asked.filter.key_range(asked.table.schema, tablets[0].codec)
    if pieces is None:
        ranges = [(tablet, wanted) for tablet in tablets]
    else:
        by_id = {tablet.id: tablet for tablet in tablets}
        ranges = [(by_id[piece.tablet_id], wanted.within(piece.key_range)) for piece in pieces]
    if view.reads is not None:
        for tablet, key_range in ranges:
            view.reads.add_range(tablet.id, key_range.low, key_range.high)
    touched = list({tablet.id: tablet for tablet, _ in ranges}.values())
    while True:
        sights, pins = view.pinned(tables, touched)
        by_tablet = {sight.tablet.id: sight for sight in sights}
        try:
            parts = [
                part
                for tablet, key_range in ranges
                for part in plan_parts(by_tablet[tablet.id], key_range)
            ]
        except RowSetRetired:
            continue
        return Plan(
            asked.columns,
            asked.filter,
            tuple(parts),
            asked.schema,
            pins,
            asked.ordered,
            asked.limit,
        )


def bound(tables: Tables, asked: Request, view: Callable[[], ReadView]) -> tuple[ReadView, Plan]:
    """Bind a request to what `view` gives now.

    Raises:
        As `plan`; a view of the latest snapshot is taken again when history goes by meanwhile.
    """
    seen = view()
    while True:
        try:
            return seen, plan(tables, asked, seen)
        except HistoryExpiredError:
            again = view()
            if again.snapshot == seen.snapshot:
                raise
            seen = again


def count(tables: Tables, asked: Request, view: ReadView) -> int:
    """Rows that satisfy a request, whose projection is empty."""
    made = plan(tables, asked, view)
    try:
        return made.count()
    finally:
        made.pins.release()
