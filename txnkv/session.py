"""Sessions: the buffer between single rows or messages and batches; where row errors are told."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from txnkv.closing import Closing
from txnkv.context import TxnContext
from txnkv.errors import (
    ClosedError,
    CommitOutcomeUnknownError,
    InvalidTxnStateError,
    RowError,
    TableNotFoundError,
)
from txnkv.own_transaction import write_alone
from txnkv.row_operations import RowOperations
from txnkv.sending import alone, send_alone
from txnkv.session_messages import SessionMessages
from txnkv.tables import ingest
from txnkv.tables.incoming import Outcome
from txnkv.tables.operations import PARTIAL, require_operation
from txnkv.tables.row_checker import Adder, Shape, Values, shape_of
from txnkv.tables.row_writer import RowWriter
from txnkv.write_result import ErrorBuffer, WriteResult

if TYPE_CHECKING:
    from txnkv.client import Client
    from txnkv.table import Table

FLUSH_MODES: Final = ("manual", "auto_background", "auto_sync")
_BACKGROUND_ROWS: Final = 8192
_BACKGROUND_SECONDS: Final = 1.0
_BUFFERS: Final = 4
"""So many times `_BACKGROUND_ROWS` may wait; who adds more waits for the thread that flushes."""
_TASKS: Final = 4
"""Tasks of a job that a machine is thought to run at once."""


def _nothing(row: object) -> None: ...


class _Run:
    """Rows of one table, operation and shape that were given one after the other."""

    __slots__ = ("op", "rows", "shape", "writer")

    def __init__(self, writer: RowWriter, op: str, shape: Shape) -> None:
        self.writer = writer
        self.op = op
        self.shape = shape
        self.rows: list[Values] = []

    def write(self, context: TxnContext, *, counted: bool = True) -> Outcome:
        return context.write_rows(self.writer, self.op, self.rows, counted=counted)


class Session(RowOperations, SessionMessages, Closing):
    """Writes rows and sends messages, in a transaction or, without one, each flush in a transaction
    of its own.

    Belongs to one thread at a time.

    Args:
        client: whose tables it writes.
        context: the transaction, or None.
        flush_mode: "manual": rows and messages wait for `flush` or the commit; "auto_sync": each
            call is a flush; "auto_background": a thread flushes them, after a second or when they
            are 8,192.
    """

    def __init__(self, client: Client, context: TxnContext | None, flush_mode: str) -> None:
        if flush_mode not in FLUSH_MODES:
            raise ValueError(f"flush_mode is one of {', '.join(FLUSH_MODES)}, not {flush_mode!r}")
        self._begin_messages()
        self._client = client
        self._context = context
        self._mode = flush_mode
        self._runs: list[_Run] = []
        self._errors = ErrorBuffer()
        self._closed = False
        self._lock = threading.RLock()
        self._background: Future[None] | None = None
        self._timer: threading.Timer | None = None
        # The run that rows are added to without ado, while table and operation stay the same.
        self._table: str | Table | None = None
        self._op = ""
        self._take: Adder = _nothing

    # -- rows --------------------------------------------------------------------------

    def insert(self, table: str | Table, row: Any) -> None:
        """A new row; refused when its key is there already."""
        if table is self._table and self._op == "insert":
            self._take(row)
        else:
            self._add(table, "insert", row)

    def _add(self, table: str | Table, op: str, row: Any) -> None:
        self._require_open(op)
        writer = self._client.writer(table)
        values = writer.checker.of(op)(row)
        with self._lock:
            run = self._run_for(writer, op, shape_of(values) if op in PARTIAL else None)
            run.rows.append(values)
        if self._mode == "manual":
            self._table, self._op = table, op
            if op == "insert":
                self._take = writer.checker.adder(op, run.rows.append)
        else:
            self._after_call()

    def _after_call(self) -> None:
        if self._mode == "auto_sync":
            self.flush()
        elif self._mode == "auto_background":
            self._flush_soon()

    def _run_for(self, writer: RowWriter, op: str, shape: Shape) -> _Run:
        if self._runs:
            last = self._runs[-1]
            if last.writer is writer and last.op == op and last.shape == shape:
                return last
        run = _Run(writer, op, shape)
        self._runs.append(run)
        return run

    # -- batches -----------------------------------------------------------------------

    def write(self, table: str | Table, data: Any, op: str = "insert") -> WriteResult:
        """Write Arrow data at once, behind the rows that wait.

        Args:
            table: where to.
            data: pyarrow, pandas, polars, or any object with `__arrow_c_stream__` or
                `__arrow_c_array__`. Columns go by name. Of columns that are missing new rows
                get the default, those that are there keep what they have. A delete takes the
                key columns.
            op: "insert", "insert_ignore", "upsert", "update", "update_ignore", "delete" or
                "delete_ignore".

        Raises:
            SchemaError: the data does not fit the table. Nothing of it counts.
            RowErrors: some rows were refused; the others stand.
            InvalidTxnStateError: the transaction is not open.
        """
        require_operation(op)
        self._require_open("write")
        info = self._client.table_info(table)
        if self.has_pending:
            self.flush()
        context = self._context
        in_a_job = context is not None and context.scope is not None

        def write(context: TxnContext) -> Outcome:
            batches: Iterator[pa.RecordBatch] = ingest.chunks(
                info.schema, data, op, shared_by=_TASKS if in_a_job else 1
            )
            return context.write_batches(info, op, batches)

        if context is not None:
            return self._errors.result(write(context))
        again = not isinstance(data, pa.RecordBatchReader)
        return self._errors.result(write_alone(self._client.instance, write, again=again))

    # -- flush -------------------------------------------------------------------------

    def flush(self) -> WriteResult:
        """Write the rows and send the messages that wait.

        Raises:
            RowErrors: some were refused, in this flush or in the background since the last
                one; the other rows stand.
        """
        self._wait_for_background()
        if self.has_pending:
            self._client.require_open()
        outcome = self._flush_all()
        sent, acked, self._sent, self._acked = self._sent, self._acked, 0, 0
        return replace(self._errors.result(outcome), sent=sent, acked=acked)

    def pending_errors(self) -> list[RowError]:
        """The rows refused since the last call, at most 1,000 of them, and forget them."""
        return self._errors.take()

    @property
    def flush_mode(self) -> str:
        """One of "manual", "auto_background" and "auto_sync"."""
        return self._mode

    @property
    def has_pending(self) -> bool:
        """Rows or messages wait to be flushed."""
        return bool(self._runs or self._acks or self._sending.pending)

    def flush_for_commit(self) -> None:
        """Flush, and raise what nobody has been told of."""
        if self._background is not None:
            self._wait_for_background()
        if self.has_pending:
            self._client.require_open()
            outcome = self._flush_all(counted=False)
            if outcome.refused:
                self._errors.keep(outcome)
        if self._errors.untold:
            self._errors.tell()

    def discard(self) -> None:
        """Forget what waits: the transaction is rolled back."""
        self._take_runs()
        self._stop_short_cut()
        self._sending.discard()
        self._acks = []
        self._errors.forget()
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()

    def end(self) -> None:
        """The transaction has ended: the next call is to find out."""
        self._table = None
        self._stop_short_cut()

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
            self._table = None
            self._stop_short_cut()
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

    def _take_runs(self) -> list[_Run]:
        with self._lock:
            self._table = None
            runs, self._runs = self._runs, []
            return runs

    def _flush_all(self, *, counted: bool = True) -> Outcome:
        context = self._context
        self._stop_short_cut()
        if context is not None and self._sending.pending:
            self._sent += self._sending.give(context)
            context.settle()
        return self._flush_runs(counted=counted)

    def _flush_runs(self, *, counted: bool = True) -> Outcome:
        """Write the rows that wait. Those that a passing fault keeps from it wait on."""
        runs = self._take_runs()
        total: Outcome | None = None
        if self._context is None:
            return self._flush_alone(runs)
        while runs:
            some, rest = runs[:1], runs[1:]
            try:
                outcome = runs[0].write(self._context, counted=counted)
            except BaseException as error:
                over = isinstance(error, InvalidTxnStateError)
                gone = isinstance(error, TableNotFoundError)
                if total is not None:
                    self._errors.keep(total)
                with self._lock:
                    self._table = None
                    self._runs = ([] if over else rest if gone else some + rest) + self._runs
                raise
            if total is None:
                total = outcome
            else:
                total.add(outcome)
            runs = rest
        return total or Outcome()

    def _flush_alone(self, runs: list[_Run]) -> Outcome:
        """All that waits, in a transaction of its own. After an error all of it waits on, but
        what is of a table or topic that is gone.
        """
        parcels = self._sending.take()
        with self._lock:
            acks, self._acks = self._acks, []
        if not runs and not parcels and not acks:
            return Outcome()

        def write(context: TxnContext) -> Outcome:
            total = Outcome()
            for parcel in parcels:
                context.send(parcel.topic, parcel.parts)
            for info, ids, cumulative in acks:
                context.acknowledge(info, ids, cumulative=cumulative)
            context.settle()
            for run in runs:
                total.add(run.write(context))
            return total

        try:
            outcome = Outcome()
            if not runs and not acks and alone(parcels):
                send_alone(self._client.instance.topics, parcels)
            else:
                outcome = write_alone(self._client.instance, write, again=True)
        except BaseException as error:
            with self._lock:
                self._table = None
                self._runs = ([] if isinstance(error, TableNotFoundError) else runs) + self._runs
                if not isinstance(error, CommitOutcomeUnknownError):  # else they may be sent
                    self._acks = acks + self._acks
                    self._sending.put_back_living(self._client.instance.topics, parcels)
            raise
        self._sent += sum(parcel.rows for parcel in parcels)
        self._acked += sum(len(ids) for _, ids, _ in acks)
        return outcome

    # -- auto_background ---------------------------------------------------------------

    def _flush_soon(self) -> None:
        with self._lock:
            waiting = self._waiting()
            if waiting >= _BACKGROUND_ROWS:
                self._start_background()
            else:
                self._start_timer()
            background = self._background
        if waiting >= _BUFFERS * _BACKGROUND_ROWS and background is not None:
            background.exception()

    def _waiting(self) -> int:
        rows = sum(len(run.rows) for run in self._runs)
        return rows + len(self._acks) + len(self._sending)

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
            if self.has_pending and not self._closed:
                self._start_background()

    def _start_background(self) -> None:
        if self._background is not None and not self._background.done():
            return  # it looks again when it has done what it has
        self._take_background_error()
        self._background = self._client.instance.pool.submit(self._flush_in_background)

    def _flush_in_background(self) -> None:
        while True:
            self._errors.keep(self._flush_all())
            with self._lock:
                if self._waiting() < _BACKGROUND_ROWS:
                    if self.has_pending:
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
