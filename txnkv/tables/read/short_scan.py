"""Short scans: few rows, as dicts, without a plan.

    keys        where = of the first columns of the key, a range, or some values of it
    an index    where its columns are compared with values, or have a range
    an order    where the entries of an index have the order that is asked for, the first ones of
                which lead to as many rows as are wanted

Whoever wants a row of many waits for no block to be read, and for nothing of Arrow.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import pyarrow as pa

from txnkv import core
from txnkv.errors import CorruptionError, HistoryExpiredError, SchemaChangedError, SchemaError
from txnkv.tables.arrow_input import key_columns
from txnkv.tables.read import point, scan
from txnkv.tables.read.lookup import entries_in, is_ready_still, rows_of
from txnkv.tables.read.ordering import DESCENDING, By, by_columns, by_key, columns_by
from txnkv.tables.read.predicate import Filter, KeyRange, equal_to, key_range
from txnkv.tables.read.sources import tablets_for
from txnkv.tables.read.view import ReadView
from txnkv.tables.table_index import TableIndex
from txnkv.tables.tables import Tables
from txnkv.tables.tablets import Tablet

_FEW_DEAR: Final = 256
"""Entries of an index whose rows are looked up one by one, where that is dear or many may come."""

_AHEAD: Final = 16
"""So many rows more than are wanted are looked at, of those that a condition may leave out."""
_MOST_AHEAD: Final = 64
"""The most that are, of one tablet or index: where more are wanted, all have to be few. Also so
many entries in their order where each costs a look at staged rows.
"""
_MOST_BESIDE: Final = 256
"""The most of all tablets."""

_MOST_MERGED: Final = 32 * core.FEW
"""Rows of all tablets of which the first ones by key are taken one by one."""

_MOST_LOOKED: Final = 2048
"""Entries of an index that are looked at in their order, for rows that other conditions admit."""

_SLIM: Final = 16
_SLIM_BYTES: Final = 400
"""So many columns, and bytes on average with what memory takes to find it, has a slim row."""

_UNTOLD: Final = (
    CorruptionError, SchemaChangedError, core.CoreError, OverflowError, TypeError, ValueError,
)  # fmt: skip
"""Damage may be that of the index, which may be dropped, too, or of a column that nobody asks for;
and Python has no names for some instants, nor compares them.
"""


def few(tables: Tables, asked: scan.Request, view: ReadView) -> list[dict[str, Any]] | None:
    """The rows as dicts, where keys tell that they are few; None: they want a plan. Where there is
    a limit, and more than keys to choose rows by, they are the first by key, or the last.

    Args:
        asked: of the table as it is at the snapshot.
        view: pinned.

    Raises:
        HistoryExpiredError: the snapshot is older than the history.
    """
    filter, limit = asked.filter, asked.limit
    if isinstance(asked.ordered, tuple):
        return _few_in_order(tables, asked, view, columns_by(asked.table.schema, asked.ordered))
    is_range = filter.shape.is_key_range
    if not (is_range or filter.shape.is_of_values) or (filter.shape.several and _is_long(filter)):
        return None
    most = core.FEW
    if limit is not None and (is_range or limit + _AHEAD <= _MOST_AHEAD):
        most = min(limit, most) if is_range else limit + _AHEAD
    try:
        indexed = not is_range and bool(asked.table.schema.indexes)
        rows = _few_exact(tables, asked, view) if indexed and filter.shape.equal else None
        chosen = () if not indexed or rows is not None else scan.chosen_indexes(tables, asked)
        if chosen:
            writer = tables.row_writer(asked.table)
            first = *chosen[0], core.FEW if len(chosen) == 1 else _FEW_DEAR
            found = point.in_range(writer, view, *first) if most == core.FEW else None
            rows = None if found is None else _enough(asked, found, math.inf)
            if rows is None:
                rows = _few_by_index(tables, asked, view, chosen, most)
        elif rows is None:
            rows = _few_by_key(tables, asked, view, most)
        if rows is not None and not is_range and (asked.ordered or limit is not None):
            rows = by_key(asked.table.schema, rows, asked.ordered == DESCENDING)
    except _UNTOLD:
        return None
    if not rows or tuple(rows[0]) == asked.columns:
        return rows and rows[:limit]
    return _projected(asked, rows)


def _is_long(filter: Filter) -> bool:
    """Tell whether it lists more values than a few rows have."""
    return any(len(p.given) > core.FEW for p in filter.predicates if p.op == "in")


def _projected(asked: scan.Request, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: row[name] for name in asked.columns} for row in rows[: asked.limit]]


def _few_by_key(
    tables: Tables, asked: scan.Request, view: ReadView, most: int
) -> list[dict[str, Any]] | None:
    """The first `most` rows in the ranges of a request's keys; None where they are many."""
    writer, first, schema = tables.row_writer(asked.table), asked.filter.first, asked.table.schema
    is_range, last = asked.filter.shape.is_key_range, asked.ordered == DESCENDING
    sorts = len(writer.tablets) > 1 and (asked.ordered or (most < core.FEW and not is_range))
    tested = sorts or not is_range
    beside = (*asked.filter.columns, *schema.primary_key) if tested else ()
    codec = writer.rows
    if len(asked.columns) < len(schema.columns):
        codec = codec.only(asked.columns + beside)
    if not first and (keys := point.keys_for(asked.table, asked.filter)):
        each = rows_of(tables, writer, view, keys, point.FEW_BYTES)
        return None if each is None else _enough(asked, list(filter(None, each)), math.inf)
    tablets = tablets_for(asked.table, asked.filter, writer.tablets, short=True)
    if not is_range and most * len(tablets) > _MOST_BESIDE:
        most = core.FEW
    several = sorts and len(tablets) > 1
    ranges: Sequence[tuple[bytes | None, bytes | None]]
    if first and (beginning := writer.rows.beginning(first)) is not None:
        ranges, is_open = [beginning], beginning[1] is None
    else:
        of_keys = asked.filter.key_ranges(schema, tablets[0].codec)
        ranges = [each for each in of_keys if not each.empty][:: -1 if last else 1]
        is_open = any(None in each for each in ranges)
    cut = several and most < core.FEW
    if most == 0 or not ranges or (cut and most * len(tablets) > _MOST_MERGED):
        return None  # a plan has nothing to read either, or gets there sooner
    if is_open and most == core.FEW and not _are_slim(asked, tablets[0], view):
        return None
    rows: list[dict[str, Any]] = []
    for tablet in tablets:
        for low, high in ranges:
            if most < core.FEW and len(rows) >= most and not several:
                break
            found = point.find_dicts(tables, tablet, codec, view, low, high, most, last)
            if found is None:
                return None
            rows += found
            if len(rows) > core.FEW:
                if not cut or (kept := by_key(schema, rows, last)) is None:
                    return None
                rows = kept[:most]
    found_first = by_key(schema, rows, last) if several else rows
    if is_range or found_first is None:
        return found_first
    return _enough(asked, found_first[:most], most)


def _are_slim(asked: scan.Request, tablet: Tablet, view: ReadView) -> bool:
    """Return True where rows of a range that is open may be read whole, though they may be many."""
    shape, schema = asked.filter.shape, asked.table.schema
    of_key = shape.floating and schema.primary_key[: len(shape.columns)] == shape.columns
    if len(schema.columns) > _SLIM or not (shape.is_key_range or of_key):
        return False
    state = tablet.state(view.snapshot)
    count = state.memory.n + sum(info.rows for info in state.infos)
    size = state.memory.nbytes + sum(info.size for info in state.infos)
    return bool(size <= _SLIM_BYTES * count)


def _enough(
    asked: scan.Request, rows: list[dict[str, Any]], most: float
) -> list[dict[str, Any]] | None:
    """Those of the first `most` rows that satisfy the filter; None where others may behind them."""
    some = rows
    for predicate in asked.filter.predicates:
        some = predicate.among(some)
    short = asked.limit is not None and len(some) < asked.limit
    return None if short and len(rows) >= most else some


def _few_exact(tables: Tables, asked: scan.Request, view: ReadView) -> list[dict[str, Any]] | None:
    """The rows with one value in each column of an index; None: they are looked for otherwise."""
    predicates, writer = asked.filter.predicates, tables.row_writer(asked.table)
    values = {each.column: each.given[0] for each in predicates if each.given.__class__ is tuple}
    for index in writer.indexes if len(values) == len(predicates) else ():
        if values.keys() == {*index.columns} and index.ready:
            given = tuple(values[name] for name in index.columns)
            of, last = point.entries_with(index, given), asked.ordered == DESCENDING
            by = *of, min(asked.limit or core.FEW, core.FEW), last
            ready = is_ready_still(tables, asked.table, index)
            found = (point.by_entries(writer, view, index, *by) or ()) if ready else ()
            rows = [row for row in found if row is not None]
            return rows if rows and len(rows) == len(found) else None
    return None


def _few_by_index(
    tables: Tables, asked: scan.Request, view: ReadView, chosen: scan.Chosen, most: int
) -> list[dict[str, Any]] | None:
    """The rows that the index with the fewest entries leads to, the first `most` where these stand
    in the order of the rows; None where they are many, or one of them is not there.
    """
    equal = {p.column for p in asked.filter.predicates if p.op == "="}
    of_rows = [name for name in asked.table.schema.primary_key if name not in equal]
    least: tuple[int, TableIndex, list[dict[str, Any]]] | None = None
    for index, ranges in chosen:
        entry = [name for name in (*index.key, *index.rest) if name not in equal]
        exact = len(asked.filter.predicates) == len(equal) and equal == set(index.columns)
        first = min(asked.limit or core.FEW, most) if exact else most
        first = first if len(ranges) == 1 and entry == of_rows else core.FEW
        enough = first if least is None else min(first, least[0])
        last = asked.ordered == DESCENDING
        entries = entries_in(tables, view, index, ranges, enough, last)
        dear = view.own is not None or any(None in each for each in ranges)
        if entries is not None and not (dear and len(entries) > _FEW_DEAR):
            size = len(entries) if exact or len(entries) < first else core.FEW  # it was cut
            if least is None or size < least[0]:
                least = size, index, entries
        if view.reads is not None:
            break  # it is told of all that is looked at
    if least is None:
        return None
    keys, writer = least[1].row_keys(least[2]), tables.row_writer(asked.table)
    found = rows_of(tables, writer, view, keys, point.FEW_BYTES)
    rows = [row for row in found or () if row is not None]
    if found is None or None in found:
        return None
    return _enough(asked, rows, len(rows) if least[0] == core.FEW else core.FEW)


# -- in the order of columns ---------------------------------------------------------------


def _few_in_order(
    tables: Tables, asked: scan.Request, view: ReadView, by: Sequence[By]
) -> list[dict[str, Any]] | None:
    """`few` in the order of columns; also the first ones of many, where an index has them so."""
    rows = None
    try:
        rows = _first_by_index(tables, asked, view, by)
        if rows is None:
            all_of = asked._replace(columns=asked.seen, ordered=False, limit=None)
            rows = few(tables, all_of, view)
            rows = None if rows is None else by_columns(asked.table.schema, rows, by)
    except _UNTOLD:
        return None
    return rows and _projected(asked, rows)


def _first_by_index(
    tables: Tables, asked: scan.Request, view: ReadView, by: Sequence[By]
) -> list[dict[str, Any]] | None:
    """The first rows in the order of columns, where the entries of an index have that order; None
    where none has, or many of them lead to rows that are not wanted.
    """
    filter, limit, known = asked.filter, asked.limit, asked.filter.shape.constant
    ways = {each.descending for each in by if each.column not in known}
    left = _MOST_LOOKED if view.own is None else _FEW_DEAR
    if view.txn_id is not None:  # what it staged is looked at for each row
        left = _MOST_AHEAD
    if limit is None or limit > left or not filter.shape.is_of_values or len(ways) > 1:
        return None
    found = [
        (index, ranges)
        for index in tables.indexes(asked.table)
        if index.ready and is_ready_still(tables, asked.table, index)
        if (ranges := _ordered_ranges(filter, index, by)) is not None
    ]
    if not found:
        return None
    index, ranges = max(found, key=lambda of: filter.narrowness(of[0].key) + (len(of[1]) > 1))
    narrows = {p.column for p in filter.predicates}.issubset(index.columns)
    rows: list[dict[str, Any]] = []
    for each, skip in ranges:
        of = index, each, skip
        most = min(limit if narrows else limit + _AHEAD, core.FEW - 1)
        some, left = _first_of(tables, asked, view, of, most, left, True in ways)
        if some is None:
            return None
        rows += some
    return rows if len(ranges) == 1 else by_columns(asked.table.schema, rows, by)


def _ordered_ranges(
    filter: Filter, index: TableIndex, by: Sequence[By]
) -> list[tuple[KeyRange, int]] | None:
    """The ranges of an index's keys in each of which the entries are in the order of columns, with
    the bytes of the indexed ones in each entry, 0 where they differ; None where the index lacks
    rows that may satisfy a filter, or has another order.
    """
    choices, known = filter.choices(index.key), filter.shape.constant
    if choices[0] is not filter.predicates:
        known |= {choices[0][-1].column}
    entry = [name for name in (*index.key, *index.rest) if name not in known]
    if entry != [name for name, _ in by if name not in known] or filter.admits_null(index):
        return None
    codec, found = index.tablet.codec, []
    for one in choices:
        equal = equal_to(one, index.columns)
        behind = index.widths[len(equal)]
        skip = 0 if behind is None else len(codec.encode_prefix(equal)) + behind
        found.append((key_range(one, index.key, codec), skip))
    return found


def _first_of(
    tables: Tables,
    asked: scan.Request,
    view: ReadView,
    of: tuple[TableIndex, KeyRange, int],
    most: int,
    left: int,
    last: bool,
) -> tuple[list[dict[str, Any]] | None, int]:
    """The first rows, as many as are wanted, by the entries in a range of an index.

    Args:
        most: so many entries are looked at first.
        left: that many are, together.

    Returns:
        None in place of the rows, where these lead to rows that are not wanted; what is left.
    """
    writer, (index, (low, high), skip) = tables.row_writer(asked.table), of
    rows: list[dict[str, Any]] = []
    while left > 0:
        now = KeyRange(low, high)
        found = point.by_entries(writer, view, index, now, skip, most, last) if skip else None
        if found is None:
            entries = entries_in(tables, view, index, [now], most, last)
            if entries is None:
                break
            found = rows_of(tables, writer, view, index.row_keys(entries))
        there = [row for row in found or () if row is not None]
        if found is None or len(there) < len(found):
            break
        left -= len(there)
        rows += _enough(asked, there, math.inf) or ()
        if len(rows) >= (asked.limit or 0) or len(there) < most:
            return rows, left
        most = min(2 * most, core.FEW - 1)
        key = index.tablet.codec.encode_prefix([there[-1][name] for name in index.key])
        low, high = (low, key) if last else (key + b"\0", high)
    return None, left


# -- plans ---------------------------------------------------------------------------------


def bound(
    tables: Tables,
    asked: scan.Request,
    view: Callable[[], ReadView],
    pieces: Sequence[scan.Piece] | None = None,
) -> tuple[scan.Request, ReadView, scan.Plan]:
    """Bind a request to what `view` gives now, with the schema of then.

    Raises:
        SchemaError: the table was altered, and a column is not there.
        As `plan`; a view of the latest snapshot is taken again when history goes by meanwhile.
    """
    seen = view()
    while True:
        try:
            then = asked.of(tables.at(asked.table, seen.snapshot))
            return then, seen, _plan(tables, then, seen, pieces)
        except HistoryExpiredError:
            again = view()
            if again.snapshot == seen.snapshot:
                raise
            seen = again


def _plan(
    tables: Tables,
    asked: scan.Request,
    view: ReadView,
    pieces: Sequence[scan.Piece] | None,
) -> scan.Plan:
    """The plan of a request; of the first rows alone, where an index has them in its order."""
    if not isinstance(asked.ordered, tuple) or pieces is not None:
        return scan.plan(tables, asked, view, pieces)
    schema, batch = asked.table.schema, None
    _, pins = view.pinned(tables, [])
    with suppress(*_UNTOLD, SchemaError):  # Arrow has no room for some durations of Python
        rows = _first_by_index(tables, asked, view, columns_by(schema, asked.ordered))
        if rows is not None:
            key = operator.itemgetter(*schema.primary_key)
            columns = key_columns(schema, list(map(key, rows)))
            batch = pa.record_batch(columns, names=list(schema.primary_key))
    if batch is not None:
        ranges = [(tablet, KeyRange()) for tablet in tables.tablets(asked.table)]
        parts = scan.rows_of_keys(tables, asked.table, view, pa.Table.from_batches([batch]), ranges)
        if parts is not None:
            whole = asked._replace(columns=asked.seen)
            made = scan.Plan(whole.columns, asked.filter, parts, whole.schema, pins)
            return made.in_order_of(asked)
    return scan.plan(tables, asked, view)
