"""The changes in a table between two snapshots: the net change of each key.

    key       at start   since                      at end    op
    ant       -          insert 12                  ant@12    insert
    bee       bee@5      update 14, update 17       bee@17    update
    cat       cat@5      delete 13, insert 16       cat@16    update
    dog       dog@5      update 11, delete 15       -         delete, the row as it was at start
    eel       -          insert 12, delete 15       -         nothing

Stamps tell which keys something happened to: rows inserted or deleted in between, wherever a
flush or a compaction has put them, and entries of memory (`diff_events`). What was seen of those
keys at the start and at the end is then looked up as by any other reader, a range of keys at a
time. Parts of it can be read by other processes (`diff_tokens`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from txnkv import core
from txnkv.coordinator import Timestamp
from txnkv.core import compute as pc
from txnkv.errors import SchemaError
from txnkv.tables.read import diff_events, lookup
from txnkv.tables.read.diff_events import Events
from txnkv.tables.read.lookup import Found
from txnkv.tables.read.pins import Pins
from txnkv.tables.read.predicate import KeyRange
from txnkv.tables.read.reading import Piece
from txnkv.tables.read.view import ReadView, Sight
from txnkv.tables.schema import Schema
from txnkv.tables.table_catalog import TableInfo
from txnkv.tables.tables import Tables

OP: Final = "_op"
COMMIT_TIMESTAMP: Final = "_commit_timestamp"
_RANGE_EVENTS: Final = 1 << 18


@dataclass(frozen=True)
class DiffRequest:
    """A checked request for changes.

    Attributes:
        columns: of the table, those to read.
        start, end: changes with start < commit timestamp <= end.
    """

    table: TableInfo
    columns: tuple[str, ...]
    start: Timestamp
    end: Timestamp

    @property
    def schema(self) -> pa.Schema:
        """The columns, then what became of the row and by which commit."""
        return diff_schema(self.table.schema, self.columns)


def request(
    table: TableInfo, start: Timestamp, end: Timestamp, columns: Sequence[str] | None
) -> DiffRequest:
    """Check the arguments of a diff.

    Raises:
        SchemaError: there is no such column, or one has the name of a column that a diff adds.
        ValueError: `start` is later than `end`.
    """
    if isinstance(columns, str):
        raise TypeError(f"columns is a list of names, as [{columns!r}]")
    names = tuple(table.schema.names if columns is None else columns)
    for name in names:
        table.schema.position(name)
        if name in (OP, COMMIT_TIMESTAMP):
            raise SchemaError(
                f"table {table.name!r} has a column {name!r}, and so has every diff: leave it "
                "out by columns="
            )
    if start > end:
        raise ValueError(f"diff goes from an earlier to a later time, not from {start} to {end}")
    return DiffRequest(table, names, start, end)


def diff_schema(schema: Schema, columns: Sequence[str]) -> pa.Schema:
    """Columns of a table, then what became of the row and by which commit."""
    added = [pa.field(OP, pa.string(), False), pa.field(COMMIT_TIMESTAMP, pa.int64(), False)]
    return pa.schema([*(schema.arrow.field(name) for name in columns), *added])


def diff(
    tables: Tables, asked: DiffRequest, pieces: Sequence[Piece] | None = None
) -> pa.RecordBatchReader:
    """The net changes of all keys, or of those in some pieces of the table, by tablet and key.

    Returns:
        Batches, read as they are asked for. `_op` is "insert", "update" or "delete"; a row is
        as it is at the end, a deleted one as it was at the start; `_commit_timestamp` is that of
        the last change of the key in between.

    Raises:
        TableNotFoundError: the table was dropped.
        HistoryExpiredError: the start is older than the history.
    """
    if pieces is None:
        pieces = [Piece(id, KeyRange()) for id in asked.table.tablets]
    sights, pins = sights_of(tables, asked, {piece.tablet_id for piece in pieces})
    schema = asked.schema

    def batches() -> Iterator[pa.RecordBatch]:
        try:
            for piece in pieces:
                before, after = sights[piece.tablet_id]
                yield from _changes_in(before, after, piece.key_range, schema)
        finally:
            pins.release()

    return pa.RecordBatchReader.from_batches(schema, batches())


def sights_of(
    tables: Tables, asked: DiffRequest, tablet_ids: set[int]
) -> tuple[dict[int, tuple[Sight, Sight]], Pins]:
    """Return the sights of some tablets at the start and at the end, by tablet id; and the pins
    that keep them readable while they are held.

    Raises:
        As `diff`.
    """
    tables.require_live(asked.table)
    # The end may be a snapshot of another process, with commits that are not here yet.
    tables.log.tail(asked.end)
    tablets = [tablet for tablet in tables.tablets(asked.table) if tablet.id in tablet_ids]
    found, pins = ReadView(asked.start).pinned(tables, tablets)
    return {
        sight.tablet.id: (sight, Sight.of(sight.tablet, asked.end, sight.state, None, ()))
        for sight in found
    }, pins


def _changes_in(
    before: Sight, after: Sight, key_range: KeyRange, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    start = int(before.snapshot)
    for part, _ in diff_events.cut(after, start, key_range, _RANGE_EVENTS):
        happened = diff_events.last(list(diff_events.events(after, start, part)))
        if happened is not None:
            batch = _changes(before, after, happened, schema)
            if batch.num_rows:
                yield batch


# -- what became of it -----------------------------------------------------------------


def _changes(before: Sight, after: Sight, happened: Events, schema: pa.Schema) -> pa.RecordBatch:
    keys, stamps = happened
    names = schema.names[:-2]
    was = _stamps(lookup.search(before, keys, (), stamps=True), keys.n)
    found = lookup.search(after, keys, names, stamps=True)
    now = _stamps(found, keys.n)
    none = pa.scalar(0, pa.uint64())
    gone = pc.and_(pc.greater(was, none), pc.equal(now, none))
    parts = []
    for piece in found:
        old = was.take(piece.positions)
        changed = pc.not_equal(old, piece.stamps)
        op = pc.if_else(pc.equal(old, none), "insert", "update")
        parts.append(_rows(piece, op, changed))
    if gone.true_count:
        positions = core.Bitmap.from_arrow(gone).positions()
        for piece in lookup.search(before, keys.gather(positions), names):
            piece = Found(positions.to_arrow().take(piece.positions), piece.columns)
            n = len(piece.positions)
            parts.append(_rows(piece, pa.repeat("delete", n), pa.repeat(True, n)))
    if not parts:
        return pa.RecordBatch.from_pylist([], schema)
    positions = pa.concat_arrays([position for position, _ in parts])
    columns = [
        pa.concat_arrays(pieces) for pieces in zip(*(made for _, made in parts), strict=True)
    ]
    order = pc.sort_indices(positions)
    at = stamps.take(positions).cast(pa.int64())
    return pa.RecordBatch.from_arrays(
        [column.take(order) for column in [*columns, at]], schema=schema
    )


def _rows(
    piece: Found, op: pa.StringArray, kept: pa.BooleanArray
) -> tuple[pa.UInt32Array, list[pa.Array]]:
    columns = [*piece.columns, op]
    if kept.true_count == len(kept):
        return piece.positions, columns
    return piece.positions.filter(kept), [column.filter(kept) for column in columns]


def _stamps(found: Sequence[Found], n: int) -> pa.UInt64Array:
    """For each of n keys when its row was inserted; 0 where there is none."""
    if not found:
        return pa.repeat(pa.scalar(0, pa.uint64()), n)
    positions = pa.concat_arrays([piece.positions for piece in found])
    stamps = pa.concat_arrays([piece.stamps for piece in found])
    order = pc.sort_indices(positions)
    stamps = stamps.take(order)
    if len(stamps) == n:
        return stamps
    there = core.Bitmap.of(n, positions.take(order)).to_arrow()
    return pc.replace_with_mask(pa.repeat(pa.scalar(0, pa.uint64()), n), there, stamps)
