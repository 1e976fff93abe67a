"""Changes by others: the question that every commit asks before its commit point.

First-committer-wins compares the keys that a transaction wrote (and, when it is serializable,
read) with those that were inserted, updated or deleted since its snapshot. A change leaves its
stamp in one of these places, and there it is looked for:

    committed memory        entries of small commits above the flushed timestamp
    row sets                insert stamps of their rows
    deletes beside them     delete stamps
    being finalized         all keys of a row set, those that are tombstones too

Row sets whose highest stamps lie below are passed by without a look, so where nothing was
changed nothing is read.
"""

from __future__ import annotations

from collections.abc import Iterator

from txnkv import core
from txnkv.coordinator import Timestamp
from txnkv.errors import TransactionConflictError
from txnkv.tables.read_set import ReadSet
from txnkv.tables.tables import Tables
from txnkv.tables.tablets import RowSetInfo, Tablet, TabletState, until_there


def changed(tablet: Tablet, keys: core.Keys, after: int, upto: Timestamp) -> bytes | None:
    """The first of some keys that was changed with after < stamp.

    Args:
        keys: strictly ascending, few.
        after: a snapshot.
        upto: all that committed at or below it is looked through; it may be more.
    """
    if keys.n == 0:
        return None
    low, high = keys.key(0), keys.key(keys.n - 1)

    def look() -> bytes | None:
        state = tablet.state(upto)
        first = state.memory.changed_keys(keys, after) if state.memory.n else -1
        found = None if first < 0 else keys.key(first)
        for info in changed_row_sets(state, after):
            if info.overlaps(low, high):
                with tablet.read() as pages:
                    position = tablet.row_set(info).touched(pages, keys, after)
                found = _least(found, None if position < 0 else keys.key(position))
        return found

    return until_there(look, tablet.reload)


def changed_range(
    tablet: Tablet, low: bytes | None, high: bytes | None, after: int, upto: Timestamp
) -> bytes | None:
    """The first key with low <= key < high that was changed with after < stamp."""

    def look() -> bytes | None:
        state = tablet.state(upto)
        found = state.memory.changed(low, high, after) if state.memory.n else None
        for info in changed_row_sets(state, after):
            if (low is None or info.max_key >= low) and (high is None or info.min_key < high):
                with tablet.read() as pages:
                    key = tablet.row_set(info).touched_range(pages, low, high, after)
                found = _least(found, key)
        return found

    return until_there(look, tablet.reload)


def validate_reads(tables: Tables, reads: ReadSet, after: int, upto: Timestamp) -> None:
    """Refuse the commit of a serializable transaction that read what is changed by now.

    Raises:
        TransactionConflictError: a key, or a range, that it read was changed after `after`.
    """
    for tablet_id in reads.tablet_ids:
        tablet = tables.tablet(tablet_id)
        if tablet is None:
            continue
        key = changed(tablet, reads.keys(tablet_id), after, upto)
        if key is None:
            for low, high in reads.ranges(tablet_id):
                key = changed_range(tablet, low, high, after, upto)
                if key is not None:
                    break
        if key is not None:
            raise TransactionConflictError(
                f"table {tablet.table.name!r}, key {tablet.readable_key(key)!r}: another "
                "transaction changed it after this serializable one had read it, or the range that "
                "it lies in. This transaction was aborted whole; run it again"
            )


def changed_row_sets(state: TabletState, after: int) -> list[RowSetInfo]:
    """The row sets of a state in which something has a stamp above `after`."""
    return [info for info in state.infos if (info.stamp or 0) > after or info.max_delete > after]


def changed_rows(info: RowSetInfo, after: int) -> int:
    """Return how many rows, at most, a look for changes in a row set goes through."""
    return info.rows if (info.stamp or 0) > after else min(info.deleted, info.rows)


def changes_in(
    tablet: Tablet, info: RowSetInfo, low: bytes, high: bytes, after: int
) -> Iterator[core.Keys]:
    """The keys with low <= key <= high of rows that were inserted or deleted after `after`;
    strictly ascending, block by block.
    """
    row_set = tablet.row_set(info)
    with tablet.read() as pages:
        numbers = row_set.blocks_between(pages, low, high + b"\0")
    for number in numbers:
        with tablet.read() as pages:
            mask = row_set.changed(pages, number, after)
            if mask is not None and mask.true_count == 0:
                continue
            keys = row_set.keys(pages, number)
            rows = None if mask is None else core.Bitmap.from_arrow(mask).positions()
            keys = core.Keys.concat([keys]) if rows is None else keys.gather(rows)
        again = core.mark_duplicates(keys, None)
        if again.count:
            keys = keys.gather(again.zeros())
        start = core.lower_bound(keys, low)
        stop = core.lower_bound(keys, high + b"\0")
        if stop > start:
            yield keys.slice(start, stop - start)


def _least(a: bytes | None, b: bytes | None) -> bytes | None:
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)
