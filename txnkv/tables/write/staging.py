"""Staging rows: from Arrow batches to durable row sets that wait for a commit.

    chunk of up to 2 Mi rows
      -> placed in tablets, keys encoded, sorted              (this thread)
      -> looked for in what the transaction sees: rows to
         write, keys to delete, what is refused               (mutations)
      -> claimed in status.db, encoded into blocks
      -> blocks written to LMDB, staged in status.db          (a second thread, while the
                                                               next chunk is prepared)

Rows go to row sets of rows, which say whether they replace something; keys to delete go to row
sets of keys alone, tombstones.

What a chunk was checked against is recorded with it (`checked_seq`), so that commit looks
again only at pairs of row sets whose writers could not see each other. The chunk before, not
yet staged when this one is checked, is compared in memory.

A write of several chunks is an attempt of its own: they come to count together, at its end. One
that fails leaves nothing that counts.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import lmdb
import pyarrow as pa

from txnkv import core
from txnkv.coordinator import TxnRow, partition_locks, status_table
from txnkv.errors import InvalidTxnStateError, TxnNotFoundError
from txnkv.storage import declare_fault_point, done_here, fault_point
from txnkv.tables import table_catalog
from txnkv.tables.operations import DELETES, PARTIAL
from txnkv.tables.read_set import ReadSet
from txnkv.tables.tables import Tables
from txnkv.tables.tablets import (
    KIND,
    ROWS,
    TOMBSTONES,
    EncodedRowSet,
    InFlight,
    RowSetInfo,
    Scope,
    SortedRows,
    Tablet,
    TabletView,
    check_writer,
    encode_row_set,
    manifest,
    put_row_set,
)
from txnkv.tables.write.mutations import (
    Evaluated,
    Incoming,
    Outcome,
    arrange,
    decide,
    missing_columns,
    require_operation,
)

declare_fault_point("stage.claimed", "row sets are claimed, nothing is written")
declare_fault_point("stage.written", "all blocks are durable, the row sets are not staged")
declare_fault_point("stage.staged", "the row sets are staged")
declare_fault_point("stage.accepted", "all chunks of a write count")

_NO_COLUMNS = pa.record_batch([], schema=pa.schema([]))


@dataclass(frozen=True)
class WriteContext:
    """On whose behalf rows are staged.

    Attributes:
        row: the transaction, whose OPEN row is stored.
        scope: the transaction, and in a job the task's attempt.
        transactional: False for a write outside of a transaction, which has one of its own.
        reads: takes keys that are found and not changed, for a serializable transaction.
        lock_timeout: seconds for which it waits for the lock of a younger transaction.
    """

    row: TxnRow
    scope: Scope
    transactional: bool = True
    reads: ReadSet | None = None
    lock_timeout: float = partition_locks.LOCK_TIMEOUT


@dataclass
class _Flight:
    """The chunk that is being written while the next one is prepared.

    Attributes:
        keys: by tablet; the next chunk is compared with them in memory.
        deletes: they are to be deleted.
        checked: the sequence number up to which it was checked.
        before: sequence numbers of the chunk before it.
        staged: its own, once it is staged.
    """

    keys: Sequence[tuple[Tablet, core.Keys]] = ()
    deletes: bool = False
    checked: int = 0
    before: Sequence[int] = ()
    staged: Sequence[int] = ()
    future: Future[None] | None = None

    def land(self) -> None:
        """Wait until it is staged."""
        future, self.future = self.future, None
        if future is not None:
            future.result()

    def over(self, part: Incoming) -> InFlight | None:
        """Its keys, where some may be in another chunk."""
        if self.future is None:
            return None
        for tablet, keys in self.keys:
            if tablet.id == part.tablet.id and part.rows.overlaps(keys):
                return InFlight(keys, self.deletes)
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
    tables: Tables,
    context: WriteContext,
    table: table_catalog.TableInfo,
    batches: Iterator[pa.RecordBatch],
    op: str,
) -> Outcome:
    """Stage batches in the table's schema.

    Returns:
        What became of the rows. Rows that were refused are not staged, the others are.

    Raises:
        InvalidTxnStateError: the transaction is not OPEN.
        TransactionLockedError: a partition lock stands in the way.
        StorageFullError: the disk is full.

    After an error nothing of this call counts.
    """
    require_operation(op)
    tables.failed_writes.take_back(context.scope.txn_id)
    ahead = deque(islice(batches, 2))
    if len(ahead) < 2 or context.scope.attempt is not None:
        lone = len(ahead) < 2
        return _stage_chunks(tables, context, table, drained(ahead, batches), op, lone=lone)
    attempt = f"write/{uuid.uuid4().hex}"
    scope = replace(context.scope, attempt=attempt)
    outcome = _stage_chunks(
        tables, replace(context, scope=scope), table, drained(ahead, batches), op
    )
    with tables.failed_writes.noting(
        scope.txn_id, lambda cur: manifest.unstage(cur, scope.txn_id, attempt=attempt)
    ):
        with tables.store.status.write() as cur:
            status_table.get_open(cur, scope.txn_id, "stage rows")
            manifest.accept_attempts(cur, scope.txn_id, [attempt])
        fault_point("stage.accepted")
    return outcome


def drained(
    ahead: deque[pa.RecordBatch], rest: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Yield each once, without keeping it in memory behind."""
    while ahead:
        yield ahead.popleft()
    yield from rest


def _stage_chunks(
    tables: Tables,
    context: WriteContext,
    table: table_catalog.TableInfo,
    batches: Iterator[pa.RecordBatch],
    op: str,
    *,
    lone: bool = False,
) -> Outcome:
    """Stage chunks, one after the other; a `lone` one is written on this thread."""
    outcome = Outcome()
    flight = _Flight()
    pool = None if lone else ThreadPoolExecutor(1, thread_name_prefix="txnkv-stage")
    with nullcontext() if pool is None else pool as writer:
        try:
            for batch in batches:
                flight = _stage_chunk(tables, context, table, batch, op, outcome, flight, writer)
                del batch  # or it would stay in memory while the next one is made
        finally:
            flight.land()
    return outcome


def _stage_chunk(
    tables: Tables,
    context: WriteContext,
    table: table_catalog.TableInfo,
    batch: pa.RecordBatch,
    op: str,
    outcome: Outcome,
    before: _Flight,
    writer: ThreadPoolExecutor | None,
) -> _Flight:
    """Send a chunk on its way, once the one before has landed; `before` if nothing is left."""
    prepared = arrange(tables.tablets(table), table.partitioning, batch, op)
    indexes = tables.indexes(table)
    tablets = [part.tablet for part in prepared] + [index.tablet for index in indexes]
    _admit(tables, context, [tablet.id for tablet in tablets])
    if indexes:
        before.land()  # what rows of this chunk have had may be there
    if op in PARTIAL and missing_columns(table.schema, batch) and any(map(before.over, prepared)):
        before.land()  # columns left out may have their values there
    over = {part.tablet.id: before.over(part) for part in prepared}
    sought = {part.tablet.id: part.tablet.sought(part.rows.keys) for part in prepared}
    see, checked = _look_around(tables, context, tablets, over, sought)
    fresh = decide(prepared, see, op, outcome, context.reads, indexes)
    if not fresh:
        return before
    encoded = _claim_and_encode(tables, context.scope, fresh)
    before.land()
    keys = [(made.tablet, made.keys) for made in fresh]
    flight = _Flight(keys, op in DELETES, checked, before.staged)
    write = partial(_write, tables, context.scope, encoded, flight)
    if writer is None:
        flight.future = done_here(write)
        return flight
    try:
        flight.future = writer.submit(write)
    except RuntimeError:  # no thread is to be had
        writer.shutdown(cancel_futures=True)  # or it would write that, too, with the next one
        flight.future = done_here(write)
    return flight


def _admit(tables: Tables, context: WriteContext, ids: Sequence[int]) -> None:
    tables.refuse_held(ids)
    tables.coordinator.admit(
        context.row,
        KIND,
        ids,
        transactional=context.transactional,
        lock_timeout=context.lock_timeout,
        named=tables.part_of,
    )


def _look_around(
    tables: Tables,
    context: WriteContext,
    tablets: Sequence[Tablet],
    over: Mapping[int, InFlight | None],
    sought: Mapping[int, manifest.Sought],
) -> tuple[Callable[[Tablet], TabletView], int]:
    """Prepare the look for the keys of a chunk.

    Args:
        tablets: that it is written to.
        over: the chunk before, by tablet, where it is not staged yet.
        sought: the keys that are looked for, by tablet, where they are known.

    Returns:
        A function that gives what the writer sees of a tablet; and the sequence number up to which
        that has what its transaction staged.
    """
    row, scope = context.row, context.scope
    with tables.store.status.read() as cur:
        # The claim asks too, but there is none when nothing is left of the rows.
        status_table.get_open(cur, row.txn_id, "write rows")
        live = table_catalog.live(cur)
        checked = manifest.sequence(cur)
        own = {
            tablet.id: manifest.staged(
                cur, row.txn_id, tablet.id, scope.attempt, sought=sought.get(tablet.id)
            )
            for tablet in tablets
        }
        granted = {
            tablet.id: partition_locks.granted_at(cur, row.txn_id, KIND, tablet.id)
            for tablet in tablets
        }
    if scope.alone:
        own = {id: [i for i in infos if i.attempt == scope.attempt] for id, infos in own.items()}
    for tablet in tablets:
        table, lock = tablet.table, granted[tablet.id]
        if table.id not in live:
            raise table_catalog.dropped(table)
        if lock is not None and tables.at(table, lock).since > table.since:
            raise table_catalog.changed(table)  # rows that it reads may have more than it writes

    def see(tablet: Tablet) -> TabletView:
        snapshot = max(row.snapshot_ts, granted[tablet.id] or row.snapshot_ts)
        state = None if scope.alone else tablet.state(snapshot)
        layers = None, own[tablet.id], over.get(tablet.id), sought.get(tablet.id)
        return TabletView.of(tablet, snapshot, state, *layers)

    return see, checked


def stage_evaluated(tables: Tables, context: WriteContext, changes: Sequence[Evaluated]) -> None:
    """Stage what a transaction has looked up already, and held in memory until now: it has staged
    nothing else meanwhile.

    Raises:
        As `stage`.
    """
    if not changes:
        return
    tables.failed_writes.take_back(context.scope.txn_id)
    ids = [made.tablet.id for made in changes]
    _admit(tables, context, ids)
    with tables.store.status.read() as cur:
        checked = manifest.sequence(cur)
    encoded = _claim_and_encode(tables, context.scope, changes)
    _write(tables, context.scope, encoded, _Flight(checked=checked))


# -- writing ---------------------------------------------------------------------------


def _claim_and_encode(
    tables: Tables, scope: Scope, fresh: Sequence[Evaluated]
) -> list[EncodedRowSet]:
    claims = []
    with tables.store.status.write() as cur:
        for made in fresh:
            table_catalog.require_live(cur, made.tablet.table)
            kind = TOMBSTONES if made.rows is None else ROWS
            (id,) = manifest.claim(cur, scope, [made.tablet.id], kind)
            claims.append(
                RowSetInfo(
                    id,
                    made.tablet.id,
                    None,
                    0,
                    0,
                    b"",
                    b"",
                    kind=kind,
                    supersedes=made.replaces,
                )
            )
    fault_point("stage.claimed")
    return [
        encode_row_set(made.tablet, claim, made.rows or SortedRows(made.keys, _NO_COLUMNS, None))
        for made, claim in zip(fresh, claims, strict=True)
    ]


def _write(tables: Tables, scope: Scope, encoded: Sequence[EncodedRowSet], flight: _Flight) -> None:
    try:
        for row_set in encoded:
            put_row_set(row_set, _fenced(row_set.tablet, scope))
    except InvalidTxnStateError:
        with tables.store.status.read() as cur, suppress(TxnNotFoundError):
            status_table.get_open(cur, scope.txn_id, "stage rows")  # says what ended it
        raise
    fault_point("stage.written")
    written = [replace(row_set.info, checked_seq=flight.seen()) for row_set in encoded]
    ids = [info.id for info in written]
    try:
        with (
            tables.failed_writes.noting(
                scope.txn_id, lambda cur: manifest.unstage(cur, scope.txn_id, ids)
            ),
            tables.store.status.write() as cur,
        ):
            flight.staged = manifest.stage(cur, scope, written)
    except InvalidTxnStateError:
        # Swept already if the transaction was aborted; a job that ended leaves it to us.
        tables.discard(written)
        raise
    fault_point("stage.staged")


def _fenced(tablet: Tablet, scope: Scope) -> Any:
    def check(txn: lmdb.Transaction) -> None:
        check_writer(txn, tablet.fence_db, scope.txn_id)

    return check
