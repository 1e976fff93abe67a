"""What changed in a table between two snapshots: the net change of each key.

    key       at start   since                      at end    op
    ant       -          insert 12                  ant@12    insert
    bee       bee@5      update 14, update 17       bee@17    update
    cat       cat@5      delete 13, insert 16       cat@16    update
    dog       dog@5      update 11, delete 15       -         delete, the row as it was at start
    eel       -          insert 12, delete 15       -         nothing

Stamps tell which keys something happened to: rows inserted or deleted in between, wherever a
flush or a compaction has put them, and entries of memory. What was seen of those keys at the
start and at the end is then looked up as by any other reader, a range of keys at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from txnkv import core
from txnkv.coordinator.ids import Timestamp
from txnkv.tables import lookup
from txnkv.tables.catalog import TableInfo
from txnkv.tables.lookup import Found
from txnkv.tables.manifest import TOMBSTONES, RowSetInfo
from txnkv.tables.predicate import KeyRange
from txnkv.tables.row_set import RowSet
from txnkv.tables.scan import plan_parts
from txnkv.tables.scan_tokens import pieces
from txnkv.tables.schema import Schema
from txnkv.tables.tablet import Pages
from txnkv.tables.view import ReadView, Sight, first_stamp

if TYPE_CHECKING:
    from txnkv.tables.engine import TableEngine

OP: Final = "_op"
COMMIT_TIMESTAMP: Final = "_commit_timestamp"
_RANGE_ROWS: Final = 1 << 18

Events = tuple[core.Keys, pa.UInt64Array]
"""Keys, and when something happened to each; a key may come more than once."""


def diff_schema(schema: Schema) -> pa.Schema:
    """The columns of a table, then what became of the row and by which commit."""
    added = [pa.field(OP, pa.string(), False), pa.field(COMMIT_TIMESTAMP, pa.int64(), False)]
    return pa.schema([*schema.arrow, *added])


def diff(
    engine: TableEngine, table: TableInfo, start: Timestamp, end: Timestamp
) -> pa.RecordBatchReader:
    """The net changes with start < commit timestamp <= end, by tablet and key.

    Returns:
        Batches in `diff_schema`, read as they are asked for. `_op` is "insert", "update" or
        "delete"; a row is as it is at `end`, a deleted one as it was at `start`;
        `_commit_timestamp` is that of the last change of the key in between.

    Raises:
        HistoryExpiredError: `start` is older than the history.
        ValueError: `start` is later than `end`.
    """
    if start > end:
        raise ValueError(f"diff goes from an earlier to a later time, not from {start} to {end}")
    engine.require_live(table)
    sights, pins = ReadView(start).pinned(engine, engine.tablets(table))
    schema = diff_schema(table.schema)

    def batches() -> Iterator[pa.RecordBatch]:
        try:
            for before in sights:
                after = Sight.of(before.tablet, end, before.state, None, ())
                yield from _tablet(before, after, schema)
        finally:
            pins.release()

    return pa.RecordBatchReader.from_batches(schema, batches())


def _tablet(before: Sight, after: Sight, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    parts = plan_parts(after, KeyRange())
    for piece, _ in pieces(after.tablet, parts, _RANGE_ROWS):
        happened = _last(list(_events(before, after, piece.key_range)))
        if happened is not None:
            batch = _changes(before, after, happened, schema)
            if batch.num_rows:
                yield batch


# -- what happened ---------------------------------------------------------------------


def _events(before: Sight, after: Sight, key_range: KeyRange) -> Iterator[Events]:
    start, end = int(before.snapshot), int(after.snapshot)
    low, high = key_range.low, key_range.high
    memory = after.state.memory
    if memory.n:
        entries = memory.select(low, high, max(start, after.after), end)
        if entries.n:
            yield entries.keys, entries.stamps
    touched = [
        info
        for info in (*after.unresolved, *after.settled)
        if max(int(info.stamp or 0), info.max_delete) > start
        and info.max_key >= (low or b"")
        and (high is None or info.min_key < high)
    ]
    if not touched:
        return
    with after.tablet.read() as pages:
        for info in touched:
            row_set = after.tablet.row_set(info)
            for number in row_set.blocks_between(pages, low, high):
                for keys, stamps in _of_block(row_set, info, pages, number, start, end):
                    yield from _inside(keys, stamps, key_range)


def _of_block(
    row_set: RowSet, info: RowSetInfo, pages: Pages, number: int, start: int, end: int
) -> Iterator[Events]:
    """Keys of rows that were inserted or deleted with start < stamp <= end, copied."""
    keys = row_set.keys(pages, number)
    stamp = int(info.stamp or 0)
    if stamp > start and first_stamp(info) <= end:
        inserts = row_set.inserts(pages, number)
        if info.uniform or inserts is None:
            yield core.Keys.concat([keys]), pa.repeat(pa.scalar(stamp, pa.uint64()), keys.n)
        else:
            fresh = pc.and_(
                pc.greater(inserts, pa.scalar(start, pa.uint64())),
                pc.less_equal(inserts, pa.scalar(end, pa.uint64())),
            )
            rows = core.Bitmap.from_arrow(fresh).positions()
            if rows.n:
                yield keys.gather(rows), inserts.take(rows.to_arrow())
    delta = None if info.kind == TOMBSTONES else row_set.deletes(pages, number)
    if delta is not None:
        numbers, stamps = delta
        fresh = pc.and_(
            pc.greater(stamps, pa.scalar(start, pa.uint64())),
            pc.less_equal(stamps, pa.scalar(end, pa.uint64())),
        )
        numbers = numbers.filter(fresh)
        if len(numbers):
            yield keys.gather(core.Rows.from_arrow(numbers)), stamps.filter(fresh)


def _inside(keys: core.Keys, stamps: pa.UInt64Array, key_range: KeyRange) -> Iterator[Events]:
    """Those of ascending keys that are in the range."""
    low, high = key_range.low, key_range.high
    lo = 0 if low is None else core.lower_bound(keys, low)
    hi = keys.n if high is None else core.lower_bound(keys, high)
    if lo < hi:
        yield keys.slice(lo, hi - lo), stamps.slice(lo, hi - lo)


def _last(events: Sequence[Events]) -> Events | None:
    """Each key once, strictly ascending, with the last thing that happened to it."""
    if not events:
        return None
    keys = core.Keys.concat([keys for keys, _ in events])
    stamps = pa.concat_arrays([stamps for _, stamps in events])
    latest = pc.sort_indices(stamps, sort_keys=[("", "descending")]).cast(pa.uint32())
    keys = keys.gather(core.Rows.from_arrow(latest))
    stamps = stamps.take(latest)
    order = core.sort_keys(keys)  # stable: of equal keys the latest comes first
    if order is not None:
        keys, stamps = keys.gather(order), stamps.take(order.to_arrow())
    doubles = core.mark_duplicates(keys, None)
    if doubles.count:
        once = doubles.zeros()
        keys, stamps = keys.gather(once), stamps.take(once.to_arrow())
    return keys, stamps


# -- what became of it -----------------------------------------------------------------


def _changes(before: Sight, after: Sight, happened: Events, schema: pa.Schema) -> pa.RecordBatch:
    keys, stamps = happened
    names = [name for name in schema.names if name not in (OP, COMMIT_TIMESTAMP)]
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
    where = pc.index_in(core.Rows.range(n).to_arrow(), value_set=positions)
    return pc.fill_null(stamps.take(where), pa.scalar(0, pa.uint64()))
