"""Tablets as participants of a transaction: validate, finalize, abort.

Optimistic commit is first-committer-wins: what a transaction staged must have no key in common
with what others changed in that tablet since its snapshot: `changes`. Most of that is compared
unlocked, up to some timestamp V; the commit point compares the rest, (V, now], inside its own
SQLite transaction, or asks for another round when that is much.

Before that the small commits below the snapshot are flushed, where there may be some of the same
keys: what is in memory hides all that is on disk, so it must not be older than it.

    memory   k (stamp 8)                  a reader at 12 finds k in memory, at 8, though
    disk     k (stamp 10, staged here)    a bulk commit at 10 replaced it: flushed first, it lies
                                          on disk and gets its delete stamp as any other row
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import apsw
import lmdb

from txnkv import core
from txnkv.coordinator import (
    Participants,
    Timestamp,
    TxnRow,
    held,
    low_water_mark,
    partition_locks,
    payload,
    raise_first,
)
from txnkv.errors import (
    AlreadyPresentError,
    RowError,
    RowErrors,
    TransactionConflictError,
    TransactionLockedError,
)
from txnkv.tables import table_catalog
from txnkv.tables.commit import conflicts
from txnkv.tables.maintenance import Resolution, flush
from txnkv.tables.tables import Tables
from txnkv.tables.tablets import (
    KIND,
    TOMBSTONES,
    RowSetInfo,
    Tablet,
    TabletState,
    common_keys,
    common_with,
    delete_row_set,
    keys_of,
    manifest,
    mark_ended,
    until_there,
)

_INSIDE_ROWS: Final = 1 << 16
"""Rows of others that may be compared while status.db is locked."""


@dataclass(frozen=True)
class _Written:
    """The row sets that a transaction wrote in one tablet.

    Attributes:
        after: the snapshot it goes by; that of its partition lock when it has one.
        infos: its row sets.
    """

    tablet: Tablet
    after: Timestamp
    infos: Sequence[RowSetInfo]

    @property
    def low(self) -> bytes:
        return min(info.min_key for info in self.infos)

    @property
    def high(self) -> bytes:
        return max(info.max_key for info in self.infos)


class TabletParticipants(Participants):
    """Tablets: what is staged in them is committed by the row of the transaction."""

    kind = KIND

    def __init__(self, tables: Tables) -> None:
        super().__init__(tables.log)
        self._tables = tables
        self._store = tables.store

    # -- OPEN --------------------------------------------------------------------------

    def check(self, row: TxnRow, ids: Sequence[int]) -> int:
        """Keys that two writers of the transaction staged without seeing each other."""
        self._tables.failed_writes.take_back(row.txn_id)
        with self._store.status.read() as cur:
            sequence = manifest.sequence(cur)
            staged = {id: manifest.staged(cur, row.txn_id, id) for id in ids}
        tablets = [found for id in ids if (found := self._tables.tablet(id)) is not None]
        errors: list[RowError] = []
        told = set()
        for tablet in sorted(tablets, key=lambda each: each.table.index_of is not None):
            table = tablet.table
            if table.index_of in told:
                continue  # the keys of its rows say it
            for key, later in _unseen_keys(tablet, staged[tablet.id]).items():
                told.add(table.id)
                why = AlreadyPresentError(
                    "two workers of this transaction (tasks, processes or threads) wrote the key, "
                    "and neither saw what the other wrote"
                )
                shown = tablet.readable_key(key)
                op = "delete" if later.kind == TOMBSTONES else "write"  # no more is known of it
                errors.append(RowError(op, table.name, shown, why))
        if errors:
            refused = RowErrors(errors, None, self._tables.coordinator.txn_id(row.txn_id))
            refused.mendable = False
            raise refused
        return sequence

    def checked_all(self, cur: apsw.Cursor, row: TxnRow, checked: int) -> bool:
        """Nothing came to count after `check`."""
        found = cur.execute(
            "SELECT 1 FROM row_sets WHERE txn_id = ? AND state = ? AND counts AND staged_seq > ?",
            (row.txn_id, manifest.STAGED, checked),
        ).fetchone()
        return found is None

    # -- COMMIT_IN_PROGRESS ------------------------------------------------------------

    def begin_commit(self, row: TxnRow, ids: Sequence[int]) -> Timestamp:
        """Compare with what committed since the snapshot, in rounds until little is left."""
        written = self._written(row, ids)
        self._flush_older(written)
        with self._store.status.read() as cur:
            since = partition_locks.snapshot_of(cur, row)
        while True:
            upto = self._tables.log.latest()
            rows = self._changed_rows(written, since, upto)
            self._validate_reads(row, since, upto)
            if rows == 0:
                return upto
            self._refuse_changed(written, since, upto)
            if rows <= _INSIDE_ROWS:
                return upto
            since = upto

    def validate(
        self, cur: apsw.Cursor, row: TxnRow, ids: Sequence[int], validated: Timestamp
    ) -> bool:
        """Compare with what came in since, and refuse what others have locked, inside the commit
        point's transaction. Return False when too much came in to be compared there.
        """
        for id in ids:
            holder = partition_locks.holder_of(cur, KIND, id)
            if holder is not None and holder != row.txn_id:
                raise TransactionLockedError(
                    f"{self._tables.part_of(id)} is locked by transaction {holder}: transaction "
                    f"{row.txn_id} was aborted. Run it again when that has ended"
                )
        table_catalog.refuse_tightened(cur, ids, row.snapshot_ts)
        if (reads := self._tables.read_sets.get(row.txn_id)) is not None:
            conflicts.refuse_dropped(self._tables, reads, cur)
        # What they have in memory would hide what is staged.
        held.refuse(held.ids(cur, payload.TABLET), ids)
        upto = self._tables.log.catch_up(cur)
        if upto == validated:
            return True
        written = self._written(row, ids, cur)
        if self._changed_rows(written, validated, upto) > _INSIDE_ROWS:
            return False
        self._refuse_changed(written, validated, upto)
        self._validate_reads(row, validated, upto)
        return True

    def _written(
        self, row: TxnRow, ids: Sequence[int], cur: apsw.Cursor | None = None
    ) -> list[_Written]:
        if cur is None:
            with self._store.status.read() as cur:
                return self._written(row, ids, cur)
        found = []
        for id in ids:
            tablet = self._tables.tablet(id)
            infos = manifest.staged(cur, row.txn_id, id)
            if tablet is not None and infos:
                granted = partition_locks.granted_at(cur, row.txn_id, KIND, id)
                after = max(row.snapshot_ts, granted or row.snapshot_ts)
                found.append(_Written(tablet, after, infos))
        return found

    def _flush_older(self, written: Sequence[_Written]) -> None:
        """Flush what others committed in memory before the snapshot, if it may be replaced."""
        for part in written:
            state = part.tablet.state(part.after)
            older = state.memory.n and state.memory.select(
                part.low, part.high + b"\0", state.flushed, part.after
            )
            if older and older.n:
                flush.flush_upto(self._tables, part.after)

    def _changed_rows(self, written: Sequence[_Written], since: Timestamp, upto: Timestamp) -> int:
        """Count the rows of others that are to be compared."""
        rows = 0
        for part in written:
            after = max(since, part.after)
            state = part.tablet.state(upto)
            for other in conflicts.changed_row_sets(state, after):
                if any(info.overlaps(other.min_key, other.max_key) for info in part.infos):
                    rows += conflicts.changed_rows(other, after)
            rows += _entries(part, state, after, upto).n if state.memory.n else 0
        return rows

    def _refuse_changed(
        self, written: Sequence[_Written], since: Timestamp, upto: Timestamp
    ) -> None:
        """Raise for a key that both changed."""
        for part in written:
            after = max(since, part.after)
            key = until_there(partial(_first_common, part, after, upto), part.tablet.reload)
            if key is not None:
                raise TransactionConflictError(
                    f"table {part.tablet.table.name!r}, key {part.tablet.readable_key(key)!r}: "
                    f"another transaction committed it first, after {after}. This transaction was "
                    "aborted whole; run it again"
                )

    def _validate_reads(self, row: TxnRow, since: Timestamp, upto: Timestamp) -> None:
        if row.isolation != "serializable":
            return
        reads = self._tables.read_sets.get(row.txn_id)
        if reads is None:
            raise TransactionConflictError(
                f"transaction {row.txn_id} is serializable, and what it read is not known any "
                "more: its process is gone. It was aborted whole; run it again"
            )
        conflicts.validate_reads(self._tables, reads, since, upto)

    # -- the end -----------------------------------------------------------------------

    def finalize_commit(self, row: TxnRow, ids: Sequence[int]) -> None:
        """Give what the transaction replaced delete stamps, and its rows plain ones; fence off and
        remove what does not count.
        """
        swept = self._sweep(row.txn_id, everything=False)
        raise_first(swept | Resolution(self._tables, row, ids).finalize())
        metrics = self._tables.coordinator.metrics
        metrics.commits.add()
        metrics.bulk_commits.add()

    def abort(self, row: TxnRow, ids: Sequence[int]) -> None:
        """Remove every row set of the transaction, and refuse its late writers."""
        raise_first(self._sweep(row.txn_id, everything=True))
        self._tables.coordinator.metrics.aborts.add()

    def _sweep(self, txn_id: int, *, everything: bool) -> dict[int, Exception]:
        with self._store.status.read() as cur:
            found = manifest.leftovers(cur, txn_id, everything=everything)
            mark = low_water_mark(cur)
        failed = self._tables.each(
            found,
            "removal of row sets that do not count",
            lambda tablet: sweep_row_sets(tablet, found[tablet.id], txn_id, mark),
        )
        gone = [id for tablet_id, ids in found.items() if tablet_id not in failed for id in ids]
        if gone:
            with self._store.status.write() as cur:
                manifest.forget(cur, gone)
        return failed


def sweep_row_sets(
    tablet: Tablet, row_set_ids: Sequence[int], txn_id: int, low_water_mark: int
) -> None:
    """Fence an ended transaction off a tablet and remove row sets of it, one at a time."""
    environment = tablet.to_write()

    def end(txn: lmdb.Transaction) -> None:
        mark_ended(txn, tablet.fence_db, txn_id, low_water_mark)

    environment.write(end)
    for id in row_set_ids:
        environment.write(lambda txn, id=id: delete_row_set(txn, tablet, id))  # type: ignore[misc]
    tablet.forget(row_set_ids)


_LOOK, _COMPARE, _NOTE = 2e-4, 0.075, 0.06
_COMPARE_ROW, _NOTE_ROW = 3e-6, 150e-6
"""Milliseconds, about: to look at a pair of row sets, to compare one, to note the keys of one; and
for a row of it. Only their ratios count.
"""
_NOTED_AT_ONCE: Final = 1 << 25
"""Keys, 8 bytes each."""
_MOST_PAIRS: Final = 1 << 16
"""So many are not all of different keys that have the same hash by chance."""


def _unseen_keys(tablet: Tablet, infos: Sequence[RowSetInfo]) -> dict[bytes, RowSetInfo]:
    """The keys that row sets, in the order in which they were staged, have in common, where the
    later was not checked against the earlier; each once, with the later row set of the first such
    pair. Of many keys some.
    """
    seen = [
        bisect_right(infos, later.checked_seq, hi=i, key=lambda info: info.staged_seq)
        for i, later in enumerate(infos)
    ]
    found: dict[bytes, RowSetInfo] = {}
    for earlier, later in _pairs(tablet, infos, seen):
        for key in common_keys(tablet, earlier, later, RowErrors.KEPT):
            found.setdefault(key, later)
        if len(found) >= RowErrors.KEPT:
            break
    return found


def _pairs(
    tablet: Tablet, infos: Sequence[RowSetInfo], seen: Sequence[int]
) -> list[tuple[RowSetInfo, RowSetInfo]]:
    """Pairs whose key ranges overlap; those that may have keys in common, where it would take
    longer to compare all the others than to find these.
    """
    numbers = dict[object, int]()  # an attempt knows of all its row sets
    names = (info.id if info.attempt is None else info.attempt for info in infos)
    writers = [numbers.setdefault(name, len(numbers)) for name in names]
    if len(numbers) < 2:
        return []
    left = sum(_NOTE + _NOTE_ROW * info.rows for info in infos)
    pairs = []
    for i, later in enumerate(infos):
        for k in range(seen[i], i):
            if writers[k] == writers[i]:
                continue
            earlier = infos[k]
            left -= _LOOK
            if later.overlaps(earlier.min_key, earlier.max_key):
                pairs.append((earlier, later))
                left -= _COMPARE + _COMPARE_ROW * (earlier.rows + later.rows)
        if left < 0:
            found: list[tuple[RowSetInfo, RowSetInfo]] = []
            for group in _overlapping(infos):
                if len({writers[number] for number in group}) > 1:
                    found += _likely_pairs(tablet, infos, group, seen, writers)
            return found
    return pairs


def _overlapping(infos: Sequence[RowSetInfo]) -> list[list[int]]:
    """Positions of row sets whose key ranges overlap, together."""
    groups: list[list[int]] = []
    reach = b""
    for i in sorted(range(len(infos)), key=lambda i: infos[i].min_key):
        if not groups or infos[i].min_key > reach:
            groups.append([])
        groups[-1].append(i)
        reach = max(reach, infos[i].max_key)
    return groups


def _likely_pairs(
    tablet: Tablet,
    infos: Sequence[RowSetInfo],
    group: list[int],
    seen: Sequence[int],
    writers: Sequence[int],
) -> list[tuple[RowSetInfo, RowSetInfo]]:
    """Pairs of some row sets that may have keys in common, by the hashes of all their keys."""
    group = sorted(group)
    own = [infos[i] for i in group]
    known = core.Rows.of(bisect_left(group, seen[i]) for i in group)
    by = core.Rows.of(writers[i] for i in group)
    found: list[tuple[int, int]] = []
    shares = 1 + sum(info.rows for info in own) // _NOTED_AT_ONCE
    for share in range(shares):
        owners = core.KeyOwners()
        for number, info in enumerate(own):
            for keys in keys_of(tablet, info):
                owners.add(keys, number, share, shares)
        found += owners.pairs(known, by, _MOST_PAIRS)
    return [(own[a], own[b]) for a, b in sorted(found, key=lambda pair: pair[::-1])]


def _entries(part: _Written, state: TabletState, after: Timestamp, upto: Timestamp) -> core.Entries:
    """Return the entries of small commits in the key range of what was written."""
    return state.memory.select(part.low, part.high + b"\0", after, upto)


def _first_common(part: _Written, after: Timestamp, upto: Timestamp) -> bytes | None:
    """A key that was written and that others changed as well."""
    tablet = part.tablet
    state = tablet.state(upto)
    if state.memory.n:
        keys = _entries(part, state, after, upto).keys
        for info in tablet.that_may_have(keys, part.infos):
            found = common_with(tablet, info, keys, 1)
            if found:
                return found[0]
    for other in conflicts.changed_row_sets(state, after):
        for info in part.infos:
            found = _common_changes(tablet, info, other, after)
            if found:
                return found[0]
    return None


def _common_changes(
    tablet: Tablet, own: RowSetInfo, other: RowSetInfo, after: Timestamp
) -> list[bytes]:
    """A key of `own` that was changed in `other`."""
    low, high = max(own.min_key, other.min_key), min(own.max_key, other.max_key)
    if low > high:
        return []
    if other.uniform and not other.versioned and (other.stamp or 0) > after:
        return common_keys(tablet, own, other, 1)
    for keys in conflicts.changes_in(tablet, other, low, high, after):
        found = common_with(tablet, own, keys, 1)
        if found:
            return found
    return []
