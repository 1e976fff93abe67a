"""Sessions: the buffer between single rows or messages and batches; where row errors are told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from txnkv.coordinator.ids import TxnId
from txnkv.errors import (
    ClosedError,
    CommitOutcomeUnknownError,
    InvalidTxnStateError,
    RowError,
    TableNotFoundError,
)
from txnkv.options import FlushMode, Operation, one_of
from txnkv.storage.locks import new_rlock
from txnkv.storage.shield import shielded
from txnkv.tables import ingest
from txnkv.tables.incoming import Outcome
from txnkv.tables.operations import require_operation
from txnkv.tables.row_checker import Adder
from txnkv.transaction.autocommit import write_alone
from txnkv.transaction.closeable import Closing
from txnkv.transaction.context import TxnContext
from txnkv.transaction.row_operations import RowOperations
from txnkv.transaction.sending import Parcel, alone, send_alone
from txnkv.transaction.session_background import Background
from txnkv.transaction.session_buffer import Room
from txnkv.transaction.session_messages import Acks, SessionMessages
from txnkv.transaction.session_rows import Rows, Run, Unsure, write_all
from txnkv.transaction.write_result import ErrorBuffer, WriteResult

if TYPE_CHECKING:
    from txnkv.client.client import Client
    from txnkv.client.table import Table

_TASKS: Final = 4
"""Tasks of a job that a machine is thought to run at once."""


def _nothing(row: object) -> None: ...


class Session(RowOperations, SessionMessages, Closing):
    """Writes rows and sends messages, in a transaction or, without one, each flush in a transaction
    of its own.

    Belongs to one thread at a time.

    Args:
        client: whose tables it writes.
        context: the transaction, or None.
        flush_mode: "manual": rows and messages wait for `flush` or the commit; "auto_sync": each
            call is a flush; "auto_background": a thread flushes them, after a second or when they
            are 8,192 or half of `buffer_bytes`.
        buffer_bytes: about what rows and messages that wait may take. Once they do, mode "manual"
            refuses more with InvalidTxnStateError until they are flushed, and "auto_background"
            waits for its thread. None for no limit.
    """

    def __init__(
        self,
        client: Client,
        context: TxnContext | None,
        flush_mode: FlushMode,
        buffer_bytes: int | None,
    ) -> None:
        one_of("flush_mode", flush_mode, FlushMode)
        self._room = Room(buffer_bytes, refuses=flush_mode == "manual")
        self._begin_messages()
        self._client = client
        self._context = context
        self._mode: FlushMode = flush_mode
        self._rows = Rows(self._room)
        self._unsure: Unsure | None = None
        self._flushed = Outcome()
        self._errors = ErrorBuffer(None if context is None else context.id)
        self._closed = False
        self._lock = new_rlock()
        self._background: Background | None = None
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
        with self._lock:
            run = self._rows.add(writer, op, row)
        if self._mode == "manual":
            self._table, self._op = table, op
            if op == "insert":
                self._take = self._rows.adder(run)
        else:
            self._after_call()

    def _after_call(self) -> None:
        if self._mode == "auto_sync":
            self.flush()
        elif self._mode == "auto_background":
            if self._background is None:
                self._background = Background(self._client.instance, self._room, self._lock)
            self._background.added(self)

    # -- batches -----------------------------------------------------------------------

    @shielded
    def write(self, table: str | Table, data: Any, op: Operation = "insert") -> WriteResult:
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

    @shielded
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
        self._unsent = None
        return replace(self._errors.result(outcome), sent=sent, acked=acked)

    def pending_errors(self) -> list[RowError]:
        """The rows refused since the last call, at most 1,000 of them, and forget them."""
        return self._errors.take()

    def __repr__(self) -> str:
        whose = "" if self._context is None else f" of transaction {self._context.row.txn_id}"
        closed = ", closed" if self._closed else ""
        return f"<Session{whose}, {self._mode}, {self.waiting()} waiting{closed}>"

    @property
    def txn_id(self) -> TxnId | None:
        """The transaction that it belongs to; None where each flush is one of its own."""
        return None if self._context is None else self._context.id

    @property
    def flush_mode(self) -> FlushMode:
        """One of "manual", "auto_background" and "auto_sync".

        Setting it raises InvalidTxnStateError while rows or messages wait: flush them first.
        """
        return self._mode

    @flush_mode.setter
    def flush_mode(self, mode: FlushMode) -> None:
        self._require_open("change the flush mode")
        one_of("flush_mode", mode, FlushMode)
        self._wait_for_background()
        if self.has_pending:
            raise InvalidTxnStateError(
                f"cannot change the flush mode from {self._mode} to {mode}: rows or messages wait. "
                "Flush the session first"
            )
        self.end()  # the short cuts are of mode manual
        self._mode = mode
        self._room.refuses = mode == "manual"

    @property
    def has_pending(self) -> bool:
        """Rows or messages wait to be flushed."""
        if self._rows or self._acks or self._unsure is not None or self._sending.pending:
            return True
        return self._context is not None and self._context.unsettled

    @shielded
    def flush_for_commit(self) -> None:
        """Flush, and raise what nobody has been told of."""
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
        self._unsure = self._unsent = None
        self._flushed = Outcome()
        self._errors.forget()
        if self._background is not None:
            self._background.cancel()

    def end(self) -> None:
        """The transaction has ended: the next call is to find out."""
        self._table = None
        self._stop_short_cut()

    @shielded
    def close(self) -> None:
        """Flush and close.

        Raises:
            RowErrors: rows were refused that nobody was told of. The session is closed.
        """
        if self._closed:
            return
        try:
            if self._context is None or not self._context.local.ended:
                self.flush()
        finally:
            self._closed = True
            self._table = None
            self._stop_short_cut()
            if self._background is not None:
                self._background.cancel()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.discard()
        self.close()

    def waiting(self) -> int:
        """Return the number of rows, messages and acks that wait."""
        return len(self._rows) + len(self._acks) + len(self._sending)

    def flush_untold(self) -> None:
        """Flush; what is refused is told at the next flush."""
        self._errors.keep(self._flush_all())

    # -- inside ------------------------------------------------------------------------

    def _require_open(self, what: str) -> None:
        if self._closed:
            raise ClosedError(f"cannot {what}: the session was closed; make a new one")
        self._client.require_open()
        if self._context is not None:
            self._context.require_open(what)

    def _wait_for_background(self) -> None:
        if self._background is not None:
            self._background.wait()

    def _take_runs(self) -> list[Run]:
        with self._lock:
            self._table = None
            return self._rows.take()

    def _flush_all(self, *, counted: bool = True) -> Outcome:
        context = self._context
        self._stop_short_cut()
        if context is None:
            return self._flush_alone()
        context.settle()  # what an earlier flush gave and could not stage
        if self._sending.pending:
            self._note(sent=self._sending.give(context))
            context.settle()
        return self._flush_runs(context, counted=counted)

    def _flush_runs(self, context: TxnContext, *, counted: bool) -> Outcome:
        """Write the rows that wait. Those that a passing fault keeps from it wait on."""
        runs = self._take_runs()
        while runs:
            some, rest = runs[:1], runs[1:]
            try:
                outcome = runs[0].write(context, counted=counted)
            except BaseException as error:
                over = isinstance(error, InvalidTxnStateError)
                gone = isinstance(error, TableNotFoundError)
                self._errors.keep(self._flushed)
                self._flushed = replace(self._flushed, errors=[], refused=0)
                with self._lock:
                    self._table = None
                    self._rows.put_back([] if over else rest if gone else some + rest)
                raise
            self._flushed.add(outcome)
            runs = rest
        context.settle()
        return self._take_flushed()

    def _take_flushed(self) -> Outcome:
        outcome, self._flushed = self._flushed, Outcome()
        return outcome

    def _flush_alone(self) -> Outcome:
        """All that waits, in a transaction of its own. After an error all of it waits on, but
        what is of a table or topic that is gone.
        """
        self._ask_about_the_last()
        runs = self._take_runs()
        parcels = self._sending.take()
        with self._lock:
            acks, self._acks = self._acks, []
        if not runs and not parcels and not acks:
            return self._take_flushed()
        outcome = Outcome()

        def write(context: TxnContext) -> Outcome:
            nonlocal outcome
            outcome = write_all(context, runs, parcels, acks)
            return outcome

        try:
            if not runs and not acks and alone(parcels):
                send_alone(self._client.instance.topics, parcels)
            else:
                write_alone(self._client.instance, write, again=True)
        except CommitOutcomeUnknownError as error:
            if error.ask is not None:
                self._unsure = Unsure(error.ask, outcome, runs, parcels, acks)
            raise
        except BaseException as error:
            gone = isinstance(error, TableNotFoundError)
            self._put_back([] if gone else runs, parcels, acks)
            raise
        self._flushed.add(outcome)
        self._count_sent(parcels, acks)
        return self._take_flushed()

    def _ask_about_the_last(self) -> None:
        """Find out whether a flush that failed late has written. If not, all of it waits again."""
        unsure = self._unsure
        if unsure is None:
            return
        there = unsure.ask()
        self._unsure = None
        if there:
            self._flushed.add(unsure.outcome)
            self._count_sent(unsure.parcels, unsure.acks)
        else:
            self._put_back(unsure.runs, unsure.parcels, unsure.acks)

    def _put_back(self, runs: list[Run], parcels: list[Parcel], acks: list[Acks]) -> None:
        with self._lock:
            self._table = None
            self._rows.put_back(runs)
            self._acks = self._living(acks) + self._acks
            self._room.take_back(sum(parcel.nbytes for parcel in parcels))
            self._sending.put_back_living(self._client.instance.topics, parcels)

    def _count_sent(self, parcels: list[Parcel], acks: list[Acks]) -> None:
        sent = sum(parcel.rows for parcel in parcels)
        self._note(sent=sent, acked=sum(len(ids) for _, ids, _ in acks))
