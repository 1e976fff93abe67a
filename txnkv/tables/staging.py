"""Staging rows: from Arrow batches to durable row sets that wait for a commit.

    chunk of up to 2 Mi rows
      -> placed in tablets, keys encoded, sorted              (this thread)
      -> refused: doubles in the chunk, keys staged before,
         keys in the table at the transaction's snapshot
      -> claimed in status.db, encoded into blocks
      -> blocks written to LMDB, staged in status.db          (a second thread, while the
                                                               next chunk is prepared)

What a chunk was checked against is recorded with it (`checked_seq`), so that commit looks
again only at pairs of row sets whose writers could not see each other. The chunk before, not
yet staged when this one is checked, is compared in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import lmdb
import pyarrow as pa
import pyarrow.compute as pc

from txnkv import core
from txnkv.coordinator import locks
from txnkv.coordinator.status_table import TxnRow
from txnkv.errors import (
    AlreadyPresentError,
    InvalidTxnStateError,
    NotSupportedError,
    RowError,
    RowErrors,
)
from txnkv.storage.seam import declare_fault_point, fault_point
from txnkv.tables import catalog, fence, manifest
from txnkv.tables.manifest import KIND, RowSetInfo, Scope
from txnkv.tables.row_set_writer import (
    EncodedRowSet,
    SortedRows,
    encode_row_set,
    put_row_set,
)
from txnkv.tables.tablet import Tablet

if TYPE_CHECKING:
    from txnkv.tables.engine import TableEngine

declare_fault_point("stage.claimed", "row sets are claimed, nothing is written")
declare_fault_point("stage.written", "all blocks are durable, the row sets are not staged")
declare_fault_point("stage.staged", "the row sets are staged")

OPERATIONS: Final = ("insert", "insert_ignore")
_LATER: Final = ("upsert", "update", "update_ignore", "delete", "delete_ignore")


def require_operation(op: str) -> None:
    """Refuse an operation that this version does not have.

    Raises:
        NotSupportedError: it comes in a later version.
        ValueError: there is no such operation.
    """
    if op in _LATER:
        raise NotSupportedError(
            f"{op} is not there yet: this version has {' and '.join(OPERATIONS)}"
        )
    if op not in OPERATIONS:
        raise ValueError(f"{op!r} is no operation; there are {', '.join(OPERATIONS + _LATER)}")


@dataclass(frozen=True)
class WriteContext:
    """On whose behalf rows are staged.

    Attributes:
        row: the transaction, whose OPEN row is stored.
        scope: the transaction, and in a job the task's attempt.
        transactional: False for a write outside of a transaction, which has one of its own.
    """

    row: TxnRow
    scope: Scope
    transactional: bool = True


@dataclass
class Outcome:
    """What became of some rows."""

    inserted: int = 0
    ignored: int = 0
    errors: list[RowError] = field(default_factory=list)
    refused: int = 0

    def add(self, other: Outcome) -> None:
        self.inserted += other.inserted
        self.ignored += other.ignored
        self.errors.extend(other.errors[: RowErrors.KEPT - len(self.errors)])
        self.refused += other.refused


_Present = tuple[RowSetInfo | None, pa.UInt32Array]
"""A row set, None for the chunk in flight, and the positions of the keys that it has."""


@dataclass(frozen=True)
class _Prepared:
    """Rows of one tablet, in key order and without doubles among them."""

    tablet: Tablet
    rows: SortedRows


@dataclass
class _Flight:
    """The chunk that is being written while the next one is prepared.

    Attributes:
        keys: by tablet; the next chunk is compared with them in memory.
        checked: the sequence number up to which it was checked.
        before: sequence numbers of the chunk before it.
        staged: its own, once it is staged.
    """

    keys: Sequence[tuple[Tablet, core.Keys]] = ()
    checked: int = 0
    before: Sequence[int] = ()
    staged: Sequence[int] = ()
    future: Future[None] | None = None

    def land(self) -> None:
        """Wait until it is staged."""
        future, self.future = self.future, None
        if future is not None:
            future.result()

    def common(self, part: _Prepared) -> pa.UInt32Array | None:
        """Positions of those of another chunk's keys that are in this one."""
        for tablet, keys in self.keys:
            if tablet is part.tablet and part.rows.overlaps(keys):
                doubles = core.mark_common(part.rows.keys, keys)
                return doubles.positions().to_arrow() if doubles.count else None
        return None

    def seen(self) -> int:
        """Up to where it was checked: also against the chunk before, if nobody else staged
        anything in between.
        """
        expected = range(self.checked + 1, self.checked + 1 + len(self.before))
        return (
            self.before[-1] if self.before and list(self.before) == list(expected) else self.checked
        )


def stage(
    engine: TableEngine,
    context: WriteContext,
    table: catalog.TableInfo,
    batches: Iterator[pa.RecordBatch],
    op: str,
) -> Outcome:
    """Stage batches in the table's schema.

    Returns:
        What became of the rows. Rows that were refused are not staged, the others are.

    Raises:
        InvalidTxnStateError: the transaction is not OPEN.
        TransactionLockedError: a partition lock stands in the way.
        StorageFullError: the disk is full. What this call staged before stays staged.
    """
    require_operation(op)
    outcome = Outcome()
    flight = _Flight()
    with ThreadPoolExecutor(1, thread_name_prefix="txnkv-stage") as writer:
        try:
            for batch in batches:
                flight = _stage_chunk(engine, context, table, batch, op, outcome, flight, writer)
                del batch  # or it would stay in memory while the next one is made
        finally:
            flight.land()
    return outcome


def _stage_chunk(
    engine: TableEngine,
    context: WriteContext,
    table: catalog.TableInfo,
    batch: pa.RecordBatch,
    op: str,
    outcome: Outcome,
    before: _Flight,
    writer: ThreadPoolExecutor,
) -> _Flight:
    """Send a chunk on its way, once the one before has landed; `before` if nothing is left."""
    prepared = _prepare(engine, table, batch, op, outcome)
    ids = [part.tablet.id for part in prepared]
    engine.coordinator.admit(context.row, KIND, ids, transactional=context.transactional)
    fresh, checked = _check_present(engine, context, prepared, before, op, outcome)
    if not fresh:
        return before
    encoded = _claim_and_encode(engine, context.scope, fresh)
    before.land()
    keys = [(part.tablet, part.rows.keys) for part in fresh]
    flight = _Flight(keys, checked, before.staged)
    flight.future = writer.submit(_write, engine, context.scope, encoded, flight)
    return flight


# -- sorting and checking --------------------------------------------------------------


def _prepare(
    engine: TableEngine, table: catalog.TableInfo, batch: pa.RecordBatch, op: str, outcome: Outcome
) -> list[_Prepared]:
    tablets = engine.tablets(table)
    keys = tablets[0].codec.encode([batch.column(name) for name in table.schema.primary_key])
    prepared = []
    for tablet, rows in zip(tablets, table.partitioning.place(batch), strict=True):
        if rows is not None and rows.n == 0:
            continue
        order = core.sort_keys(keys, rows)
        if order is None:
            ordered = keys if rows is None else keys.gather(rows)
            prepared.append(_Prepared(tablet, SortedRows(ordered, batch, rows)))
            continue
        ordered = keys.gather(order)
        doubles = core.mark_duplicates(ordered, None)
        if doubles.count:
            again = doubles.positions()
            _refuse(
                outcome,
                op,
                tablet,
                [ordered.key(i.as_py()) for i in _first(again.to_arrow())],
                again.n,
                "an earlier row of the same data has this key",
            )
            once = doubles.zeros()
            ordered = ordered.gather(once)
            order = core.Rows.from_arrow(order.to_arrow().take(once.to_arrow()))
        prepared.append(_Prepared(tablet, SortedRows(ordered, batch, order)))
    return prepared


def _check_present(
    engine: TableEngine,
    context: WriteContext,
    prepared: Sequence[_Prepared],
    flight: _Flight,
    op: str,
    outcome: Outcome,
) -> tuple[list[_Prepared], int]:
    """Leave out keys that are there already. Answers also what was checked against."""
    row, scope = context.row, context.scope
    with engine.store.status.read() as cur:
        live = catalog.live_tables(cur)
        checked = manifest.sequence(cur)
        own = {
            part.tablet.id: manifest.staged(cur, row.txn_id, part.tablet.id, scope.attempt)
            for part in prepared
        }
        granted = {
            part.tablet.id: locks.granted_at(cur, row.txn_id, KIND, part.tablet.id)
            for part in prepared
        }
    fresh = []
    for part in prepared:
        tablet = part.tablet
        if tablet.table.id not in live:
            raise catalog.dropped(tablet.table)
        snapshot = max(row.snapshot_ts, granted[tablet.id] or row.snapshot_ts)
        there = tablet.visible(snapshot)
        present: list[_Present] = [*tablet.common([*there, *own[tablet.id]], part.rows.keys)]
        positions = flight.common(part)
        if positions is not None:
            present.append((None, positions))
        if present:
            part = _without(part, present, op, outcome)
        if part.rows.keys.n:
            outcome.inserted += part.rows.keys.n
            fresh.append(part)
    return fresh, checked


def _without(
    part: _Prepared,
    present: Sequence[_Present],
    op: str,
    outcome: Outcome,
) -> _Prepared:
    rows = part.rows
    for info, positions in present:
        why = (
            "this transaction has staged the key already"
            if info is None or info.stamp is None
            else "a row with this key is in the table"
        )
        _refuse(
            outcome,
            op,
            part.tablet,
            [rows.keys.key(i.as_py()) for i in _first(positions)],
            len(positions),
            why,
        )
    gone = core.Bitmap.of(
        rows.keys.n, pc.unique(pa.concat_arrays([positions for _, positions in present]))
    )
    kept = gone.zeros()
    order = kept
    if rows.order is not None:
        order = core.Rows.from_arrow(rows.order.to_arrow().take(kept.to_arrow()))
    return replace(part, rows=SortedRows(rows.keys.gather(kept), rows.batch, order))


def _first(array: pa.Array) -> pa.Array:
    return array.slice(0, RowErrors.KEPT)


def _refuse(
    outcome: Outcome, op: str, tablet: Tablet, keys: Sequence[bytes], count: int, why: str
) -> None:
    if op == "insert_ignore":
        outcome.ignored += count
        return
    errors = [
        RowError(op, tablet.table.name, readable_key(tablet, key), AlreadyPresentError(why))
        for key in keys
    ]
    outcome.add(Outcome(errors=errors, refused=count))


def readable_key(tablet: Tablet, key: bytes) -> Any:
    """An encoded key as users write it: a scalar, or a tuple of several."""
    values = tablet.codec.decode_one(key)
    return values[0] if len(values) == 1 else values


# -- writing ---------------------------------------------------------------------------


def _claim_and_encode(
    engine: TableEngine, scope: Scope, fresh: Sequence[_Prepared]
) -> list[EncodedRowSet]:
    with engine.store.status.write() as cur:
        for part in fresh:
            catalog.require_live(cur, part.tablet.table)
        ids = manifest.claim(cur, scope, [part.tablet.id for part in fresh])
    fault_point("stage.claimed")
    return [
        encode_row_set(part.tablet, RowSetInfo(id, part.tablet.id, None, 0, 0, b"", b""), part.rows)
        for id, part in zip(ids, fresh, strict=True)
    ]


def _write(
    engine: TableEngine, scope: Scope, encoded: Sequence[EncodedRowSet], flight: _Flight
) -> None:
    for row_set in encoded:
        put_row_set(row_set, _fenced(row_set.tablet, scope))
    fault_point("stage.written")
    written = [replace(row_set.info, checked_seq=flight.seen()) for row_set in encoded]
    try:
        with engine.store.status.write() as cur:
            flight.staged = manifest.stage(cur, scope, written)
    except InvalidTxnStateError:
        # Swept already if the transaction was aborted; a job that ended leaves it to us.
        engine.discard(written)
        raise
    fault_point("stage.staged")


def _fenced(tablet: Tablet, scope: Scope) -> Any:
    def check(txn: lmdb.Transaction) -> None:
        fence.check_writer(txn, tablet.fence_db, scope.txn_id)

    return check
