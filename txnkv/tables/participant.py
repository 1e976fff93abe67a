"""Tablets as participants of a transaction: validate, finalize, abort.

Optimistic commit is first-committer-wins: what a transaction staged must have no key in
common with what others committed in that tablet since its snapshot. Most of that is
compared unlocked, up to some timestamp V; the commit point compares the rest, (V, now],
inside its own SQLite transaction, or asks for another round when that is much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import apsw
import lmdb

from txnkv.coordinator import id_ranges, locks
from txnkv.coordinator.clock import latest_snapshot
from txnkv.coordinator.ids import Timestamp
from txnkv.coordinator.status_table import TxnRow
from txnkv.errors import (
    AlreadyPresentError,
    RowError,
    RowErrors,
    TransactionConflictError,
    TransactionLockedError,
)
from txnkv.tables import fence, manifest
from txnkv.tables.incoming import readable_key
from txnkv.tables.manifest import KIND, RowSetInfo
from txnkv.tables.overlap import common_keys
from txnkv.tables.row_set_writer import delete_row_set
from txnkv.tables.tablet import Tablet

if TYPE_CHECKING:
    from txnkv.tables.engine import TableEngine

_INSIDE_ROWS: Final = 1 << 16
"""Rows of others that may be compared while status.db is locked."""


class TabletParticipants:
    """The coordinator's handler for tablets."""

    kind = KIND

    def __init__(self, engine: TableEngine) -> None:
        self._engine = engine
        self._store = engine.store

    # -- OPEN --------------------------------------------------------------------------

    def check(self, row: TxnRow, ids: Sequence[int]) -> int:
        """Keys that two writers of the transaction staged without seeing each other."""
        with self._store.status.read() as cur:
            sequence = manifest.sequence(cur)
            staged = {id: manifest.staged(cur, row.txn_id, id) for id in ids}
        errors: list[RowError] = []
        count = 0
        for id, infos in staged.items():
            tablet = self._engine.tablet(id)
            if tablet is None:
                continue
            for earlier, later in _unseen_pairs(infos):
                found = common_keys(tablet, earlier, later, RowErrors.KEPT)
                count += len(found)
                errors += [
                    RowError(
                        "insert",
                        tablet.table.name,
                        readable_key(tablet, key),
                        AlreadyPresentError("two workers of this transaction staged the key"),
                    )
                    for key in found
                ]
        if errors:
            raise RowErrors(errors, count)
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
        since = row.snapshot_ts
        while True:
            with self._store.status.read() as cur:
                upto = latest_snapshot(cur)
                rows = self._compare(cur, row, ids, since, upto, compare=None)
            if rows == 0:
                return upto
            self._validate_between(row, ids, since, upto)
            if rows <= _INSIDE_ROWS:
                return upto
            since = upto

    def validate(
        self, cur: apsw.Cursor, row: TxnRow, ids: Sequence[int], validated: Timestamp
    ) -> bool:
        """What came in since, and locks of others, inside the commit point's transaction."""
        for id in ids:
            holder = locks.holder_of(cur, KIND, id)
            if holder is not None and holder != row.txn_id:
                raise TransactionLockedError(
                    f"tablet {id} is locked by transaction {holder}: transaction {row.txn_id} "
                    "was aborted. Run it again when that has ended"
                )
        upto = latest_snapshot(cur)
        if upto == validated:
            return True
        if self._compare(cur, row, ids, validated, upto, compare=None) > _INSIDE_ROWS:
            return False
        self._compare(cur, row, ids, validated, upto, compare=self._refuse_common)
        return True

    def _validate_between(
        self, row: TxnRow, ids: Sequence[int], since: Timestamp, upto: Timestamp
    ) -> None:
        pairs = []
        with self._store.status.read() as cur:
            self._compare(cur, row, ids, since, upto, compare=lambda *found: pairs.append(found))
        for tablet, own, other in pairs:
            self._refuse_common(tablet, own, other)

    def _compare(
        self,
        cur: apsw.Cursor,
        row: TxnRow,
        ids: Sequence[int],
        since: Timestamp,
        upto: Timestamp,
        compare: Callable[[Tablet, RowSetInfo, RowSetInfo], None] | None,
    ) -> int:
        """Go through the pairs of own and others' row sets that overlap.

        Returns:
            How many rows the others have in them.
        """
        rows = 0
        for id in ids:
            tablet = self._engine.tablet(id)
            if tablet is None:
                continue
            after = max(since, locks.granted_at(cur, row.txn_id, KIND, id) or since)
            others = tablet.committed_between(cur, after, upto)
            if not others:
                continue
            own = manifest.staged(cur, row.txn_id, id)
            for other in others:
                overlapping = [info for info in own if info.overlaps(other.min_key, other.max_key)]
                if overlapping:
                    rows += other.rows
                if compare is not None:
                    for info in overlapping:
                        compare(tablet, info, other)
        return rows

    def _refuse_common(self, tablet: Tablet, own: RowSetInfo, other: RowSetInfo) -> None:
        found = common_keys(tablet, own, other, 1)
        if found:
            raise TransactionConflictError(
                f"table {tablet.table.name!r}, key {readable_key(tablet, found[0])!r}: another "
                f"transaction committed it first, at {other.stamp}. This transaction was "
                "aborted whole; run it again"
            )

    # -- the end -----------------------------------------------------------------------

    def finalize_commit(self, row: TxnRow, ids: Sequence[int]) -> None:
        """Plain stamps in status.db; what does not count is fenced off and removed."""
        assert row.commit_ts is not None
        self._sweep(row.txn_id, everything=False)
        with self._store.status.write() as cur:
            manifest.finalize(cur, row.txn_id, row.commit_ts)

    def abort(self, row: TxnRow, ids: Sequence[int]) -> None:
        """Remove every row set of the transaction, and refuse its late writers."""
        self._sweep(row.txn_id, everything=True)

    def _sweep(self, txn_id: int, *, everything: bool) -> None:
        with self._store.status.read() as cur:
            found = manifest.leftovers(cur, txn_id, everything=everything)
            mark = id_ranges.low_water_mark(cur)
        for tablet_id, row_set_ids in found.items():
            tablet = self._engine.tablet(tablet_id)
            if tablet is not None:
                sweep_row_sets(tablet, row_set_ids, txn_id, mark)
        if found:
            with self._store.status.write() as cur:
                manifest.forget(cur, [id for ids in found.values() for id in ids])


def sweep_row_sets(
    tablet: Tablet, row_set_ids: Sequence[int], txn_id: int, low_water_mark: int
) -> None:
    """Fence an ended transaction off a tablet and remove row sets of it, one at a time."""
    environment = tablet.environment(create=True)

    def end(txn: lmdb.Transaction) -> None:
        fence.mark_ended(txn, tablet.fence_db, txn_id, low_water_mark)

    environment.write(end)
    for id in row_set_ids:
        environment.write(lambda txn, id=id: delete_row_set(txn, tablet, id))  # type: ignore[misc]
    tablet.forget(row_set_ids)


def _unseen_pairs(infos: Sequence[RowSetInfo]) -> list[tuple[RowSetInfo, RowSetInfo]]:
    """Pairs of row sets whose key ranges overlap and of which neither was checked against
    the other.
    """
    pairs = []
    for i, later in enumerate(infos):
        for earlier in infos[:i]:
            same = later.attempt is not None and later.attempt == earlier.attempt
            seen = later.checked_seq >= earlier.staged_seq or same
            if not seen and later.overlaps(earlier.min_key, earlier.max_key):
                pairs.append((earlier, later))
    return pairs
