"""Sessions: the buffer between single rows and batches, and where row errors are told."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from txnkv.closing import Closing
from txnkv.context import Heart, TxnContext
from txnkv.coordinator.coordinator import KEEPALIVE_TIME
from txnkv.coordinator.orchestration import ending_error
from txnkv.coordinator.states import TxnState
from txnkv.errors import (
    ClosedError,
    InvalidTxnStateError,
    RowError,
    RowErrors,
    TableNotFoundError,
    TransactionConflictError,
)
from txnkv.instance import Instance
from txnkv.row_operations import RowOperations
from txnkv.tables import incoming, ingest, staging
from txnkv.tables.catalog import TableInfo
from txnkv.tables.incoming import Outcome
from txnkv.tables.manifest import Scope
from txnkv.tables.staging import WriteContext

if TYPE_CHECKING:
    from txnkv.client import Client
    from txnkv.table import Table

FLUSH_MODES: Final = ("manual", "auto_background", "auto_sync")
_BACKGROUND_ROWS: Final = 8192
_BACKGROUND_SECONDS: Final = 1.0
_RETRIES: Final = 5
_TASKS: Final = 4
"""Tasks of a job that a machine is thought to run at once."""


@dataclass
class WriteResult:
    """How many rows and messages a flush or write brought in."""

    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    ignored: int = 0
    sent: int = 0
    acked: int = 0


@dataclass
class _Run:
    """Rows of one table and operation that were given one after the other."""

    table: TableInfo
    op: str
    rows: list[tuple[Any, ...]]


Write = tuple[TableInfo, Callable[[], Iterator[pa.RecordBatch]], str]


class Session(RowOperations, Closing):
    """Writes rows, in a transaction or, without one, each flush in a transaction of its own.

    Belongs to one thread at a time.

    Args:
        client: whose tables it writes.
        context: the transaction, or None.
        flush_mode: "manual": rows wait for `flush` or the commit; "auto_sync": each call is
            a flush; "auto_background": rows are flushed by a thread, after a second or 8,192
            rows.
    """

    def __init__(self, client: Client, context: TxnContext | None, flush_mode: str) -> None:
        if flush_mode not in FLUSH_MODES:
            raise ValueError(f"flush_mode is one of {', '.join(FLUSH_MODES)}, not {flush_mode!r}")
        self._client = client
        self._instance: Instance = client.instance
        self._context = context
        self._mode = flush_mode
        self._runs: list[_Run] = []
        self._checkers: dict[int, ingest.RowChecker] = {}
        self._errors: list[RowError] = []
        self._untold = 0
        self._closed = False
        self._lock = threading.RLock()
        self._background: Future[None] | None = None
        self._timer: threading.Timer | None = None

    # -- rows --------------------------------------------------------------------------

    def _add(self, table: str | Table, op: str, row: Any) -> None:
        incoming.require_operation(op)
        self._require_open(op)
        info = self._client.table_info(table)
        checker = self._checkers.get(info.id)
        if checker is None:
            checker = self._checkers[info.id] = ingest.RowChecker(info.schema)
        values = checker.row(row)
        with self._lock:
            if not self._runs or self._runs[-1].table.id != info.id or self._runs[-1].op != op:
                self._runs.append(_Run(info, op, []))
            self._runs[-1].rows.append(values)
        if self._mode == "auto_sync":
            self.flush()
        elif self._mode == "auto_background":
            self._flush_soon()

    # -- batches -----------------------------------------------------------------------

    def write(self, table: str | Table, data: Any, op: str = "insert") -> WriteResult:
        """Write Arrow data at once, behind the rows that wait.

        Args:
            table: where to.
            data: pyarrow, pandas, polars, or any object with `__arrow_c_stream__` or
                `__arrow_c_array__`. Columns go by name; missing ones get their default.
            op: "insert" or "insert_ignore".

        Raises:
            SchemaError: the data does not fit the table. Nothing of it counts.
            RowErrors: some keys were there already; the other rows stand.
            InvalidTxnStateError: the transaction is not open.
        """
        incoming.require_operation(op)
        self._require_open("write")
        info = self._client.table_info(table)
        if self._runs:
            self.flush()

        in_a_job = self._context is not None and self._context.scope.job_id is not None

        def batches() -> Iterator[pa.RecordBatch]:
            return ingest.chunks(info.schema, data, shared_by=_TASKS if in_a_job else 1)

        again = not isinstance(data, pa.RecordBatchReader)
        return self._told(self._stage([(info, batches, op)], again=again))

    # -- flush -------------------------------------------------------------------------

    def flush(self) -> WriteResult:
        """Write the rows that wait.

        Raises:
            RowErrors: some were refused, in this flush or in the background since the last
                one; the other rows stand.
        """
        self._wait_for_background()
        return self._told(self._flush_runs())

    def pending_errors(self) -> list[RowError]:
        """The rows refused since the last call, at most 1,000 of them, and forget them."""
        with self._lock:
            errors, self._errors = self._errors, []
            self._untold = 0
            return errors

    @property
    def has_pending(self) -> bool:
        """Rows wait to be flushed."""
        return bool(self._runs)

    def flush_for_commit(self) -> None:
        """Flush, and raise what nobody has been told of."""
        if not self._closed or self._runs or self._untold:
            self.flush()

    def discard(self) -> None:
        """Forget the rows that wait: the transaction is rolled back."""
        with self._lock:
            self._runs = []
            self._untold = 0
            if self._timer is not None:
                self._timer.cancel()

    def close(self) -> None:
        """Flush and close.

        Raises:
            RowErrors: rows were refused that nobody was told of. The session is closed.
        """
        if self._closed:
            return
        try:
            if self._context is None or self._context.ended is None:
                self.flush()
        finally:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.discard()
        self.close()

    # -- inside ------------------------------------------------------------------------

    def _require_open(self, what: str) -> None:
        if self._closed:
            raise ClosedError(f"cannot {what}: the session was closed; make a new one")
        if self._context is not None:
            self._context.require_open(what)

    def _flush_runs(self) -> Outcome:
        """Write the rows that wait. Those that a passing fault keeps from it wait on."""
        with self._lock:
            runs, self._runs = self._runs, []
        total = Outcome()
        while runs:
            # Outside of a transaction all of a flush is one; inside, each run stands by itself.
            some = runs if self._context is None else runs[:1]
            rest = runs[len(some) :]
            try:
                total.add(self._stage([_write_of(run) for run in some], again=True))
            except BaseException as error:
                over = isinstance(error, InvalidTxnStateError)
                gone = isinstance(error, TableNotFoundError)
                with self._lock:
                    self._keep(total)
                    self._runs = ([] if over else rest if gone else some + rest) + self._runs
                raise
            runs = rest
        return total

    def _stage(self, writes: list[Write], *, again: bool) -> Outcome:
        engine = self._instance.engine
        if self._context is not None:
            self._context.require_open("write")
            return _stage_all(self._instance, self._context.write_context(), writes)
        for attempt in range(_RETRIES):
            with own_transaction(self._instance) as context:
                outcome = _stage_all(self._instance, context, writes)
            try:
                engine.coordinator.orchestrator.start_commit(context.row.txn_id)
                ended = engine.coordinator.orchestrator.finish(context.row.txn_id)
                if ended.state is TxnState.ABORTED:
                    raise ending_error(ended, "commit the write")
                return outcome
            except TransactionConflictError:
                # No snapshot was promised: looked at again, the keys are simply there.
                if not again or attempt == _RETRIES - 1:
                    raise
        raise AssertionError("unreachable")

    def _told(self, outcome: Outcome) -> WriteResult:
        """The result, or RowErrors for what was refused since the caller was last told."""
        with self._lock:
            self._keep(outcome)
            count, self._untold = self._untold, 0
            errors = self._errors[-count:] if count else []
        if count:
            raise RowErrors(errors, count)
        return WriteResult(inserted=outcome.inserted, ignored=outcome.ignored)

    def _keep(self, outcome: Outcome) -> None:
        self._errors = (self._errors + outcome.errors)[-RowErrors.KEPT :]
        self._untold += outcome.refused

    # -- auto_background ---------------------------------------------------------------

    def _flush_soon(self) -> None:
        with self._lock:
            if self._waiting() >= _BACKGROUND_ROWS:
                self._start_background()
            else:
                self._start_timer()

    def _waiting(self) -> int:
        return sum(len(run.rows) for run in self._runs)

    def _start_timer(self) -> None:
        if self._timer is not None:
            return
        itself = weakref.ref(self)  # an abandoned session is not flushed

        def tick() -> None:
            session = itself()
            if session is not None:
                session._on_timer()

        self._timer = threading.Timer(_BACKGROUND_SECONDS, tick)
        self._timer.daemon = True
        self._timer.start()

    def _on_timer(self) -> None:
        with self._lock:
            self._timer = None
            last = self._background
            if last is not None and last.done() and last.exception() is not None:
                return  # the caller is told at the next call
            if self._runs and not self._closed:
                self._start_background()

    def _start_background(self) -> None:
        if self._background is not None and not self._background.done():
            return  # it looks again when it has done what it has
        self._take_background_error()
        self._background = self._instance.pool.submit(self._flush_in_background)

    def _flush_in_background(self) -> None:
        while True:
            outcome = self._flush_runs()
            with self._lock:
                self._keep(outcome)
                if self._waiting() < _BACKGROUND_ROWS:
                    if self._runs:
                        self._start_timer()
                    return

    def _wait_for_background(self) -> None:
        background = self._background
        if background is not None:
            background.exception()
            self._take_background_error()

    def _take_background_error(self) -> None:
        background, self._background = self._background, None
        if background is not None:
            background.result()


def _write_of(run: _Run) -> Write:
    batch = ingest.rows_to_batch(run.table.schema, run.rows)
    return run.table, lambda: iter([batch]), run.op


def _stage_all(instance: Instance, context: WriteContext, writes: list[Write]) -> Outcome:
    total = Outcome()
    for table, batches, op in writes:
        total.add(staging.stage(instance.engine, context, table, batches(), op))
    return total


@contextmanager
def own_transaction(instance: Instance) -> Iterator[WriteContext]:
    """A transaction for one write outside of any; aborted when the block fails."""
    coordinator = instance.coordinator
    row = coordinator.write_open(
        coordinator.begin(
            timeout=None, isolation="snapshot", locking="optimistic", keepalive=KEEPALIVE_TIME
        )
    )
    heart = Heart(row)
    coordinator.heartbeats.add(heart)
    context = WriteContext(row, Scope(row.txn_id), transactional=False)
    try:
        yield context
    except BaseException:
        with suppress(InvalidTxnStateError):
            coordinator.abort(row.txn_id, "the write failed")
        raise
    finally:
        coordinator.heartbeats.remove(heart)
