"""The changes in a table between two snapshots: the net change of each key.

    key       at start   since                      at end    op
    ant       -          insert 12                  ant@12    insert
    bee       bee@5      update 14, update 17       bee@17    update
    cat       cat@5      delete 13, insert 16       cat@16    update
    dog       dog@5      update 11, delete 15       -         delete, the row as it was at start
    eel       -          insert 12, delete 15       -         nothing

Stamps tell which keys something happened to, the events:

    start < insert stamp <= end        the row came
    start < delete stamp <= end        it went
    start < stamp of an entry <= end   a small commit that no flush has written yet

A row set is looked at only if one of its stamps is in between, and of a block nothing but its
stamps until there are some: a diff costs by what was changed, not by what is there. What was seen
of those keys at the start and at the end is then looked up as by any other reader, a range of keys
at a time.

Tokens are parts of a diff for other processes. Like those of a scan they name ranges of keys, not
what holds them, so they stay good when a flush or a compaction has moved the rows. Whoever opens
one reads exactly what committed between the two times; but the history from the start on must
still be there, so whoever cuts tokens pins it (by a snapshot at the start) until they were read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from txnkv import core
from txnkv.coordinator import Timestamp
from txnkv.core import compute as pc
from txnkv.errors import InvalidTokenError, SchemaError, TableNotFoundError
from txnkv.tables.read import lookup
from txnkv.tables.read.lookup import Found
from txnkv.tables.read.predicate import KeyRange
from txnkv.tables.read.scan import Piece
from txnkv.tables.read.view import Pins, ReadView
from txnkv.tables.schema import Schema
from txnkv.tables.table_catalog import TableInfo
from txnkv.tables.tables import Tables
from txnkv.tables.tablets import TOMBSTONES, Pages, RowSet, RowSetInfo, TabletView, first_stamp

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
    views, pins = views_of(tables, asked, {piece.tablet_id for piece in pieces})
    schema = asked.schema

    def batches() -> Iterator[pa.RecordBatch]:
        try:
            for piece in pieces:
                before, after = views[piece.tablet_id]
                yield from _changes_in(before, after, piece.key_range, schema)
        finally:
            pins.release()

    return pa.RecordBatchReader.from_batches(schema, batches())


def views_of(
    tables: Tables, asked: DiffRequest, tablet_ids: set[int]
) -> tuple[dict[int, tuple[TabletView, TabletView]], Pins]:
    """Return the views of some tablets at the start and at the end, by tablet id; and the pins
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
        seen.tablet.id: (seen, TabletView.of(seen.tablet, asked.end, seen.state)) for seen in found
    }, pins


def _changes_in(
    before: TabletView, after: TabletView, key_range: KeyRange, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    start = int(before.snapshot)
    for part, _ in cut(after, start, key_range, _RANGE_EVENTS):
        happened = last(list(events(after, start, part)))
        if happened is not None:
            batch = _changes(before, after, happened, schema)
            if batch.num_rows:
                yield batch


# -- what became of it -----------------------------------------------------------------


def _changes(
    before: TabletView, after: TabletView, happened: Events, schema: pa.Schema
) -> pa.RecordBatch:
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


Events = tuple[core.Keys, pa.UInt64Array]
"""Keys, and when something happened to each; a key may come more than once."""


def anything(after: TabletView, start: int) -> bool:
    """Return True when anything happened since `start`. No I/O.

    True also where a row came and went, or a commit changed nothing in the end.
    """
    if _touched(after, start, KeyRange()):
        return True
    memory, since = after.state.memory, max(start, after.after)
    if not memory.n or memory.changed(None, None, since) is None:
        return False
    return memory.select(None, None, since, int(after.snapshot)).n > 0


def events(after: TabletView, start: int, key_range: KeyRange) -> Iterator[Events]:
    """All that happened since `start` to keys of a range, copied."""
    entries = _entries(after, start, key_range)
    if entries is not None:
        yield entries.keys, entries.stamps
    touched = _touched(after, start, key_range)
    if not touched:
        return
    end = int(after.snapshot)
    with after.tablet.read() as pages:
        for info in touched:
            row_set = after.tablet.row_set(info)
            for number in row_set.blocks_between(pages, key_range.low, key_range.high):
                for keys, stamps in _of_block(row_set, info, pages, number, start, end):
                    yield from _inside(keys, stamps, key_range)


def last(found: Sequence[Events]) -> Events | None:
    """Each key once, strictly ascending, with the last thing that happened to it."""
    if not found:
        return None
    keys = core.Keys.concat([keys for keys, _ in found])
    stamps = pa.concat_arrays([stamps for _, stamps in found])
    if pc.min(stamps) != pc.max(stamps):
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


def cut(
    after: TabletView, start: int, key_range: KeyRange, events_each: int
) -> Iterator[tuple[KeyRange, int]]:
    """Parts of a range that together have all that happened in it, and about how much each.

    None where nothing happened. Cut at the first keys of blocks, and where much is in memory at
    every so many entries.
    """
    low, count = key_range.low, 0
    for key, more in sorted(_counts(after, start, key_range, events_each)):
        if count and count + more > events_each and (low is None or key > low):
            yield KeyRange(low, key), count
            low, count = key, 0
        count += more
    if count:
        yield KeyRange(low, key_range.high), count


def _counts(
    after: TabletView, start: int, key_range: KeyRange, events_each: int
) -> Iterable[tuple[bytes, int]]:
    """Keys to cut at, with how much happened between one and the next."""
    entries = _entries(after, start, key_range)
    if entries is not None:
        keys = entries.keys
        for at in range(0, keys.n, events_each):
            yield keys.key(at), min(events_each, keys.n - at)
    touched = _touched(after, start, key_range)
    if not touched:
        return
    end = int(after.snapshot)
    with after.tablet.read() as pages:
        for info in touched:
            row_set = after.tablet.row_set(info)
            blocks = row_set.header(pages).blocks
            for number in row_set.blocks_between(pages, key_range.low, key_range.high):
                count = _how_many(row_set, info, pages, number, start, end)
                if count:
                    yield max(blocks[number].first, key_range.low or b""), count


# -- where ------------------------------------------------------------------------------


def _entries(after: TabletView, start: int, key_range: KeyRange) -> core.Entries | None:
    memory = after.state.memory
    if not memory.n:
        return None
    since = max(start, after.after)
    entries = memory.select(key_range.low, key_range.high, since, int(after.snapshot))
    return entries if entries.n else None


def _touched(after: TabletView, start: int, key_range: KeyRange) -> list[RowSetInfo]:
    """Row sets in which something may have happened since."""
    low, high = key_range.low, key_range.high
    return [
        info
        for info in (*after.unresolved, *after.settled)
        if max(int(info.stamp or 0), info.max_delete) > start
        and info.max_key >= (low or b"")
        and (high is None or info.min_key < high)
    ]


# -- one block --------------------------------------------------------------------------


def _of_block(
    row_set: RowSet, info: RowSetInfo, pages: Pages, number: int, start: int, end: int
) -> Iterator[Events]:
    """Keys of rows that were inserted or deleted with start < stamp <= end, copied."""
    if _may_insert(info, start, end):
        inserts = row_set.inserts(pages, number)
        if inserts is None:
            keys = core.Keys.concat([row_set.keys(pages, number)])
            yield keys, pa.repeat(pa.scalar(int(info.stamp or 0), pa.uint64()), keys.n)
        else:
            rows = core.Bitmap.from_arrow(_between(inserts, start, end)).positions()
            if rows.n:
                yield row_set.keys_at(pages, number, rows), inserts.take(rows.to_arrow())
    delta = _deletes(row_set, info, pages, number)
    if delta is not None:
        numbers, stamps = delta
        fresh = _between(stamps, start, end)
        if fresh.true_count:
            rows = core.Rows.from_arrow(numbers.filter(fresh))
            yield row_set.keys_at(pages, number, rows), stamps.filter(fresh)


def _how_many(
    row_set: RowSet, info: RowSetInfo, pages: Pages, number: int, start: int, end: int
) -> int:
    """Count the events that `_of_block` yields."""
    count = 0
    if _may_insert(info, start, end):
        inserts = row_set.inserts(pages, number)
        if inserts is None:
            count = row_set.header(pages).blocks[number].rows
        else:
            count = _between(inserts, start, end).true_count
    delta = _deletes(row_set, info, pages, number)
    return count if delta is None else count + _between(delta[1], start, end).true_count


def _may_insert(info: RowSetInfo, start: int, end: int) -> bool:
    return int(info.stamp or 0) > start and first_stamp(info) <= end


def _deletes(
    row_set: RowSet, info: RowSetInfo, pages: Pages, number: int
) -> tuple[pa.UInt32Array, pa.UInt64Array] | None:
    return None if info.kind == TOMBSTONES else row_set.deletes(pages, number)


def _between(stamps: pa.UInt64Array, start: int, end: int) -> pa.BooleanArray:
    return pc.and_(
        pc.greater(stamps, pa.scalar(start, pa.uint64())),
        pc.less_equal(stamps, pa.scalar(end, pa.uint64())),
    )


def _inside(keys: core.Keys, stamps: pa.UInt64Array, key_range: KeyRange) -> Iterator[Events]:
    """Those of ascending keys that are in the range."""
    low, high = key_range.low, key_range.high
    lo = 0 if low is None else core.lower_bound(keys, low)
    hi = keys.n if high is None else core.lower_bound(keys, high)
    if lo < hi:
        yield keys.slice(lo, hi - lo), stamps.slice(lo, hi - lo)


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
    views, pins = views_of(tables, asked, set(asked.table.tablets))
    try:
        for id in asked.table.tablets:
            _, after = views[id]
            for part, count in cut(after, int(asked.start), KeyRange(), rows_each):
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
    end = Timestamp(token.end)
    asked = request(tables.at(tablet.table, end), Timestamp(token.start), end, token.columns)
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
        after = TabletView.of(tablet, end, tablet.state(end))
        if anything(after, int(start)):
            return True
    return False
