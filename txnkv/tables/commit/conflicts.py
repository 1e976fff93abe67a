"""Conflicts: what others changed, and the validation of a small transaction that asks for it.

First-committer-wins compares the keys that a transaction wrote (and, when it is serializable,
read) with those that were inserted, updated or deleted since its snapshot. A change leaves its
stamp in one of these places, and there it is looked for:

    committed memory        entries of small commits above the flushed timestamp
    row sets                insert stamps of their rows
    deletes beside them     delete stamps
    being finalized         all keys of a row set, those that are tombstones too

Row sets whose highest stamps lie below are passed by without a look, so where nothing was
changed nothing is read.

A small transaction is validated inside the SQLite transaction of its commit point. By then all
that committed before is in memory, earlier members of its group included, so what is asked there is
asked once. Whatever can be seen not to have changed since it began is not asked at all: the
catalog by its version, locks by whether there are any, keys by the latest commit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import apsw

from txnkv import core
from txnkv.coordinator import (
    Timestamp,
    TxnRow,
    Verdict,
    held,
    partition_locks,
    payload,
)
from txnkv.errors import TransactionConflictError, TransactionLockedError, TransactionTimedOutError
from txnkv.storage import clock
from txnkv.tables import table_catalog
from txnkv.tables.read_set import ReadSet
from txnkv.tables.table_catalog import TableInfo
from txnkv.tables.tables import Tables
from txnkv.tables.tablets import (
    EVERY_STAMP,
    KIND,
    RowSetInfo,
    Tablet,
    TabletState,
    until_there,
)


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


def changed_of(tablet: Tablet, own: core.MemRowSet, after: Timestamp) -> bytes | None:
    """The first key of a transaction's own rows that was changed with a stamp above `after`."""
    state = tablet.state(after)  # memory has all of the log: to ask for more would be a look
    if state.newest <= after:
        return state.memory.changed_of(own, after)
    return changed(tablet, own.select(None, None, 0, EVERY_STAMP).keys, after, after)


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


def refuse_dropped(tables: Tables, reads: ReadSet, cur: apsw.Cursor) -> None:
    """Refuse the commit of a serializable transaction that read a table which was dropped, or by
    such an index: what others write since, to another of the name perhaps, is not in it.

    Raises:
        SchemaChangedError: it was dropped.
    """
    read = [tables.tablet(id) for id in reads.tablet_ids]
    for table in {each.table.id: each.table for each in read if each is not None}.values():
        if table_catalog.is_dropped(cur, table):
            raise table_catalog.changed(table)


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


class RowWatch:
    """A row of which it is asked whether others changed it.

    Args:
        tables: of the store.
        table: of the row.
        key: of the row, as a program gives it.
    """

    def __init__(self, tables: Tables, table: TableInfo, key: Any) -> None:
        self._log, self._catalog = tables.log, tables.log.catalog_version
        writer = tables.row_writer(table)
        values = writer.checker["delete"].take(key)
        encoded = writer.key(values)
        self._tablet, self._keys = writer.tablet(values, encoded), core.Keys.of([encoded])

    @property
    def needs_cursor(self) -> bool:
        """Its table may have been dropped since."""
        return self._log.catalog_version != self._catalog

    def changed(self, after: Timestamp, cur: apsw.Cursor | None) -> bool:
        """Tell whether it was changed above `after`, or its table dropped.

        Args:
            after: a snapshot.
            cur: of status.db, where one is needed.
        """
        if cur is not None and table_catalog.is_dropped(cur, self._tablet.table):
            return True
        return changed(self._tablet, self._keys, after, after) is not None


def _least(a: bytes | None, b: bytes | None) -> bytes | None:
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)


class LockedByYoungerError(TransactionLockedError):
    """A tablet is locked by a younger transaction: who meets it may wait and try again."""


def validate(
    tables: Tables,
    row: TxnRow,
    transactional: bool,
    catalog: int | None,
    reads: ReadSet | None,
    tablets: Mapping[int, Tablet],
    memories: Mapping[int, core.MemRowSet],
    cur: apsw.Cursor | None,
    latest: Timestamp,
) -> bool:
    """Validate what a small transaction writes to tables.

    Args:
        tables: of the store.
        row: of the transaction.
        transactional: False for a write outside of any transaction, which waits for no lock.
        catalog: a version of the catalog in which the tables were live.
        reads: what it read, of a serializable one.
        tablets: those that it writes to, by id.
        memories: what it writes there.
        cur: of the SQLite transaction of the commit; or None, while nobody else commits.
        latest: the latest commit timestamp.

    Returns:
        False when it needs a cursor and has none.

    Raises:
        TransactionConflictError: others changed what it wrote, or a serializable one read.
        TransactionLockedError: a tablet is locked by another.
        TransactionTimedOutError: it is past its deadline.
        TableNotFoundError: a table was dropped.
        SchemaChangedError: a table was altered.
        CorruptionError: a tablet is damaged, and takes no writes.
    """
    log, deadline = tables.log, row.deadline
    if deadline is not None and clock.monotonic_micros() > deadline:  # begun here: on this boot
        raise timed_out(row, "commit")
    if cur is None:
        if log.catalog_version != catalog or log.locked or reads is not None:
            return False
    elif log.catalog_version != catalog:
        for tablet in tablets.values():
            table_catalog.require_unchanged(cur, tablet.table)
        held.refuse(held.ids(cur, payload.TABLET), tablets)
    if cur is not None and log.locked:
        _refuse_locked(cur, row if transactional else None, tablets)
    since = row.snapshot_ts
    if latest > since:
        for id, own in memories.items():
            key = changed_of(tablets[id], own, since)
            if key is not None:
                raise _conflict(tablets[id], key)
        if reads is not None and cur is not None:
            refuse_dropped(tables, reads, cur)
            validate_reads(tables, reads, since, since)
    return True


def timed_out(row: TxnRow, what: str) -> TransactionTimedOutError:
    return TransactionTimedOutError(
        f"cannot {what}: transaction {row.txn_id} timed out, after {(row.timeout or 0) / 1e6:g} s. "
        "Begin a new transaction, with a longer timeout"
    )


def _conflict(tablet: Tablet, key: bytes) -> TransactionConflictError:
    return TransactionConflictError(
        f"table {tablet.table.name!r}, key {tablet.readable_key(key)!r}: another transaction "
        "committed it first. This transaction was aborted whole; run it again"
    )


def _refuse_locked(cur: apsw.Cursor, row: TxnRow | None, tablets: Mapping[int, Tablet]) -> None:
    answer = partition_locks.meet(cur, row, KIND, tablets)
    if answer.verdict is Verdict.GRANTED:
        return
    holder = f"{tablets[answer.id].part} is locked by transaction {answer.holder}"
    if row is None:
        raise TransactionLockedError(
            f"{holder}; a write outside of a transaction does not wait. Try it again later"
        )
    if answer.verdict is Verdict.WAIT:
        raise LockedByYoungerError(f"{holder}, which is younger")
    raise TransactionLockedError(
        f"{holder}, which is older: transaction {row.txn_id} was aborted (wait-die). Run it again"
    )
