"""Sessions: the buffer between single rows or messages and batches; where row errors are told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa

from txnkv import core
from txnkv.coordinator import TxnId, status_table
from txnkv.errors import (
    ClosedError,
    CommitOutcomeUnknownError,
    InvalidTxnStateError,
    RowError,
    SchemaError,
    StorageFullError,
    TableNotFoundError,
    TopicNotFoundError,
    UnavailableError,
)
from txnkv.storage import WhenDropped, new_rlock, shielded, shielded_unless
from txnkv.tables import Operation, Outcome, arrow_input, require_operation
from txnkv.topics import message_input, topic_catalog
from txnkv.transaction.autocommit import Lot, Unsure, checked_acks, write_alone
from txnkv.transaction.begin import FLUSH_MODES, FlushMode, one_of
from txnkv.transaction.commit_protocols import flushes_soon, is_brief
from txnkv.transaction.connection import (
    INHERITED,
    Acknowledged,
    AnySubscription,
    AnyTable,
    AnyTopic,
    Closing,
    Connection,
    note_alone,
)
from txnkv.transaction.context import TxnContext
from txnkv.transaction.local_state import Intake
from txnkv.transaction.send_buffer import NO_SHORT_CUT, SendBuffer, encoder_of, send_alone, send_in
from txnkv.transaction.session_buffer import (
    Acks,
    Background,
    ErrorBuffer,
    Room,
    SessionRows,
    WriteResult,
    flush_rest,
)


class Session(Closing):
    """Writes rows and sends messages, in a transaction or, without one, each flush in its own.

    A row is a dict, a tuple in schema order or a dataclass. A column that a dict does not name has
    its default, or null, in a new row, and keeps its value in one that is there; None is null. Rows
    are checked at the call; whether their keys are there shows when they are flushed. Every
    operation on rows raises SchemaError when a column is unknown or missing or a value does not
    fit, and with flush mode auto_sync RowErrors when the row is refused. For one thread.

    In a transaction rows, messages and acknowledgements take effect at its commit, all or none.
    Without one, a client's close flushes auto_background; else what waits is lost, as the log says.

    Args:
        connection: to the store.
        context: the transaction, or None.
        flush_mode: "manual": all waits for `flush` or the commit; "auto_sync": each call flushes;
            "auto_background": a thread flushes, after a second or at 8,192 or half `buffer_bytes`.
        rows: that wait already, of the transaction's own session.
        buffer_bytes: about what may wait; None for no limit. Beyond it mode "manual" refuses more
            with InvalidTxnStateError until a flush, and "auto_background" waits for its thread.
    """

    _background: Background | None = None
    _lost: WhenDropped | None = None
    _was_small = False

    def __init__(
        self,
        connection: Connection,
        context: TxnContext | None,
        flush_mode: FlushMode,
        buffer_bytes: int | None,
        rows: SessionRows | None = None,
    ) -> None:
        one_of("flush_mode", flush_mode, FLUSH_MODES)
        self._room = Room(buffer_bytes, refuses=flush_mode == "manual")
        self._short, self._sent, self._closed, self._flushed = NO_SHORT_CUT, 0, False, Outcome()
        self._acks: list[Acks] = []
        self._unsent: tuple[Any, int] | None = None  # of `send_batch`: the data, and its messages
        self._connection, self._context, self._mode = connection, context, flush_mode
        self._local = Intake(None if context is None else context.local)
        self._rows = SessionRows(self._room) if rows is None else rows
        self._unsure: Unsure | None = None
        self._lock = new_rlock() if context is None or rows is None else context.lock
        self._sending, self._rows.in_session = SendBuffer(self._lock), True
        self._turn, self.flushing = new_rlock(), False  # held while, and whether, a thread flushes
        self._errors = ErrorBuffer(self._lock, context)
        if (lone := self._rows.lone) is not None:
            self._sending.appender(lone.topic)(lone.message)
            self._rows.lone = None
        INHERITED.add(self)
        if context is None:
            note_alone(connection, self, (self._rows, self._sending, self._acks))
        elif context.buffers is not None:
            context.buffers += (self._rows, self._sending) if rows is None else (self._sending,)

    # -- rows, batches ---------------------------------------------------------------

    def insert(self, table: AnyTable, row: Any) -> None:
        """A new row; refused when its key is there already."""
        if table is self._rows.table and self._rows.op == "insert":
            self._rows.more(row)
        else:
            self._add(table, "insert", row)

    def insert_ignore(self, table: AnyTable, row: Any) -> None:
        """A new row; ignored when its key is there already."""
        self._add(table, "insert_ignore", row)

    def upsert(self, table: AnyTable, row: Any) -> None:
        """A new row, or new values for the row that is there."""
        if table is self._rows.table and self._rows.op == "upsert":
            self._rows.more(row)
        else:
            self._add(table, "upsert", row)

    def update(self, table: AnyTable, row: Any) -> None:
        """New values for the row with this key; refused when there is none."""
        if table is self._rows.table and self._rows.op == "update":
            self._rows.more(row)
        else:
            self._add(table, "update", row)

    def update_ignore(self, table: AnyTable, row: Any) -> None:
        """New values for the row with this key; ignored when there is none."""
        self._add(table, "update_ignore", row)

    def delete(self, table: AnyTable, key: Any) -> None:
        """Delete the row with this key, a scalar or a tuple; refused when there is none."""
        if table is self._rows.table and self._rows.op == "delete":
            self._rows.more(key)
        else:
            self._add(table, "delete", key)

    def delete_ignore(self, table: AnyTable, key: Any) -> None:
        """Delete the row with this key; ignored when there is none."""
        self._add(table, "delete_ignore", key)

    def _add(self, table: AnyTable, op: str, row: Any) -> None:
        self._require_open(op)
        snapshot = None if self._context is None else self._context.row.snapshot_ts
        writer = self._connection.writer(table, snapshot)
        with self._lock:
            self._local.require_more(op)  # a commit may have begun meanwhile
            run = self._rows.add(writer, op, row)
            if self._mode == "manual":
                self._rows.expect(table, run, self._lock, self._local)
        self._after_call()

    def _after_call(self) -> None:
        if self._mode == "auto_sync":
            self.flush()
        elif self._mode == "auto_background":
            if self._background is None:
                self._background = Background(self._connection.instance, self._room, self._lock)
            self._background.added(self)

    @shielded
    def write(self, table: AnyTable, data: Any, op: Operation = "insert") -> WriteResult:
        """Write Arrow data at once, behind the rows that wait.

        Args:
            table: where to.
            data: pyarrow, pandas, polars, or any object with `__arrow_c_stream__` or
                `__arrow_c_array__`. Columns go by name. Of columns that are missing new rows
                get the default, those that are there keep what they have. A delete takes the
                key columns. Columns of other types are cast where that loses nothing, but
                for list views, and runs of views or dictionaries.
            op: "insert", "insert_ignore", "upsert", "update", "update_ignore", "delete" or
                "delete_ignore".

        Raises:
            SchemaError: the data does not fit the table. Nothing of it counts.
            RowErrors: some rows were refused; the others stand.
            InvalidTxnStateError: the transaction is not open.
        """
        require_operation(op)
        self._require_open("write")
        info = self._connection.table_info(table)
        if self.has_pending:
            self.flush()
        context = self._context
        share = arrow_input.TASKS if context is not None and context.scope is not None else 1

        def write(context: TxnContext) -> Outcome:
            then = context.table_at_begin(info)
            batches = arrow_input.chunks(then.schema, data, op, shared_by=share)
            return context.write_batches(then, op, batches)

        if context is not None:
            return self._errors.result(write(context))
        again = hasattr(data, "__len__")  # else it may be a stream, which is read once
        return self._errors.result(write_alone(self._connection.instance, write, again=again))

    # -- messages --------------------------------------------------------------------------

    def send(
        self,
        topic: AnyTopic,
        value: Any,
        key: bytes | str | None = None,
        partition: int | None = None,
        headers: Any = None,
        timestamp: Any = None,
        deliver_at: Any = None,
    ) -> None:
        """Send one message.

        Args:
            topic: to which.
            value: bytes; text is sent as UTF-8. Where the topic has a value schema, a row of it:
                a dict, a tuple in schema order or a dataclass. None: no value.
            key: bytes or text. Messages of one key go to one partition, in their order.
            partition: the number of the partition; by default it follows from the key, and
                without one all that is flushed together goes to one.
            headers: pairs of a name and bytes, or a mapping.
            timestamp: an aware datetime; by default the time of the flush.
            deliver_at: an aware datetime, before which shared subscriptions do not deliver it.

        Raises:
            TypeError, ValueError: one of these is not what it should be.
            SchemaError: the value is not of the topic's value schema.
            TopicNotFoundError: there is no such topic, or it was dropped.
            InvalidTxnStateError: the transaction is not open.
        """
        to, put, encode = short = self._short
        if topic is to and encode is not None:
            try:
                value = encode(value)
            except SchemaError:
                to = None  # the topic may have got another schema
        if topic is to and partition is headers is timestamp is deliver_at is None:
            message = core.put_message(put, self._room.left, value, key)
            if message is not None:
                if self._short is not short:  # flushed meanwhile
                    self._sending.require_taken(self._local, put, message)
                return
        self._require_open("send")
        if self._context is not None and self._context.stored:
            self._context.look_open("send")
        info = self._connection.topic_info(topic)
        topic_catalog.require_writable(info)
        if (topic is not to or encode is None) and (encode := encoder_of(info)) is not None:
            value = encode(value)
        count = len(info.partitions)
        put = self._sending.appender(info)
        row = message_input.pending(value, key, partition, headers, timestamp, count, deliver_at)
        with self._lock:
            self._local.require_more("send")
            self._room.take((row,) if isinstance(row, bytes) else row)
            put(row)
            if self._mode == "manual":
                self._short = topic, put, encode
        self._after_call()

    @shielded
    def send_batch(self, topic: AnyTopic, data: Any) -> WriteResult:
        """Send Arrow data at once, behind the messages that wait.

        Args:
            topic: to which.
            data: pyarrow, pandas, polars, or any object with `__arrow_c_stream__` or
                `__arrow_c_array__`: column value (binary or string), and where wanted key,
                headers (binary as a reader gives them, map, or list of name and value),
                timestamp (with a time zone) and partition. Where the topic has a value schema,
                its columns in place of value; a row in which all of them are null has no value.

        Raises:
            SchemaError: a column is missing, not known or of another type. Nothing is sent.
            ValueError: there is no such partition. Nothing is sent; of a stream, nothing
                from there on.
            TopicNotFoundError: there is no such topic, or it was dropped.
            InvalidTxnStateError: the transaction is not open.
            StorageFullError, UnavailableError: the disk is full or failed. Outside of a
                transaction, and in an attempt of a job, nothing was sent. Else what was taken
                goes with the next flush or the commit; call it again with the same object, and
                all of it is sent once.
        """
        self._require_open("send")
        info = self._connection.topic_info(topic)
        topic_catalog.require_writable(info)
        parcels: Any = self._sending.parcels_from(info, data)
        unsent = self._unsent
        if self.has_pending:
            self.flush()
        if unsent is not None and unsent[0] is data:
            self._unsent = None
            return WriteResult(sent=unsent[1])
        streamed = isinstance(data, pa.RecordBatchReader)
        if not streamed:  # looked at as a whole before any of it is sent
            parcels = list(parcels)
        result = WriteResult()

        def write(context: TxnContext) -> Outcome:
            result.sent = 0
            left = iter(parcels)
            try:
                for result.sent in send_in(context, left):
                    pass
            except (StorageFullError, UnavailableError):
                if context is self._context and context.scope is None:
                    self._note(sent=result.sent)
                    if not streamed:
                        self._sending.put_back([*left])
                        self._unsent = data, sum(parcel.rows for parcel in parcels)
                raise
            return Outcome()

        if self._context is not None:
            try:
                write(self._context)
            except BaseException:
                self._context.take_back()
                raise
        elif not streamed and send_alone(self._connection.instance.topics, parcels):
            result.sent = sum(parcel.rows for parcel in parcels)
        else:
            write_alone(self._connection.instance, write, again=not streamed)
        self._connection.instance.coordinator.metrics.messages_sent.add(result.sent)
        return result

    def _note(self, sent: int = 0, acked: int = 0) -> None:
        """Have these counted by the next flush and the metrics."""
        self._sent += sent
        self._rows.acked += acked
        metrics = self._connection.instance.coordinator.metrics
        metrics.messages_sent.value += sent
        metrics.messages_acked.value += acked

    def ack(self, subscription: AnySubscription, message: Acknowledged) -> None:
        """Acknowledge a message, its id, or a list of them: with the commit they are done with.

        Raises:
            AckConflictError: another transaction acknowledged it first, or it is done with. The
                transaction was aborted.
            InvalidTxnStateError: the transaction is not open.
            NotSupportedError: in an attempt of a job.
        """
        self._acknowledge(subscription, message, cumulative=False)

    def ack_cumulative(self, subscription: AnySubscription, message: Acknowledged) -> None:
        """Acknowledge all messages of a partition up to this one; of an exclusive subscription.

        Raises:
            AckConflictError: as for `ack`.
            InvalidTxnStateError: the transaction is not open.
        """
        self._acknowledge(subscription, message, cumulative=True)

    def _acknowledge(self, to: AnySubscription, message: Acknowledged, *, cumulative: bool) -> None:
        self._require_open("acknowledge")
        if self._context is None:
            acks = checked_acks(self._connection, to, message, cumulative=cumulative)
            with self._lock:
                self._local.require_more("acknowledge")
                self._acks.append(acks)
        else:
            self._rows.acknowledge(self._connection, self._context, to, message, cumulative)
        self._after_call()

    # -- flush -------------------------------------------------------------------------

    @shielded_unless(lambda self: self._is_brief)
    def flush(self) -> WriteResult:
        """Write the rows and send the messages that wait.

        Raises:
            RowErrors: some were refused, now or in the background since; the other rows stand.
        """
        self._before_flush()
        outcome, self._unsent = self._flush_all(), None
        sent, acked, self._sent, self._rows.acked = self._sent, self._rows.acked, 0, 0
        return replace(self._errors.result(outcome), sent=sent, acked=acked)

    def pending_errors(self) -> list[RowError]:
        """The rows refused since the last call, at most 1,000 of them, and forget them."""
        return self._errors.take()

    def __repr__(self) -> str:
        of = "" if self._context is None else f" of transaction {self._context.row.txn_id}"
        return f"<Session{of}, {self._mode}, {self.waiting()} waiting{', closed' * self._closed}>"

    @property
    def txn_id(self) -> TxnId | None:
        """The transaction that it belongs to; None where each flush is one of its own."""
        return None if self._context is None else self._context.id

    @property
    def flush_mode(self) -> FlushMode:
        """One of `FLUSH_MODES`. Setting it while something waits raises InvalidTxnStateError."""
        return self._mode

    @flush_mode.setter
    def flush_mode(self, mode: FlushMode) -> None:
        self._require_open("change the flush mode")
        one_of("flush_mode", mode, FLUSH_MODES)
        self._before_flush()
        if self.has_pending:
            said = f"cannot change the flush mode from {self._mode} to {mode}"
            raise InvalidTxnStateError(f"{said}: rows or messages wait. Flush the session first")
        self.end()  # the short cuts are of mode manual
        self._mode, self._room.refuses = mode, mode == "manual"

    @property
    def has_pending(self) -> bool:
        """Rows or messages wait to be flushed."""
        waits = bool(self._acks or self._unsure or self._rows or self._sending.pending)
        return waits or (self._context is not None and self._context.unsettled) or self.flushing

    @shielded_unless(lambda self: self._is_brief)
    def flush_for_commit(self) -> None:
        """Flush, and raise what nobody has been told of."""
        self._before_flush()
        if self.has_pending:
            self._errors.keep(self._flush_all(counted=False))
        self._errors.tell()

    def discard(self) -> None:
        """Forget what waits: the transaction is rolled back."""
        with self._lock:
            self._rows.take()
        self._sending.discard()
        self._acks[:], self._flushed, self._unsure, self._unsent = [], Outcome(), None, None
        self._errors.forget()
        self.end()

    def begin_anew(self) -> None:
        """Forget what a forked child inherited: its parent flushes what waits."""
        self._background, self._sent, self._rows.acked, self.flushing = None, 0, 0, False
        self.discard()
        self._errors.take()

    def end(self) -> None:
        """The transaction ends: the next call is to find out, and nothing else flushes."""
        with self._lock:  # or one that is under way would leave a short cut behind
            self._rows.table, self._short = None, NO_SHORT_CUT
        if self._background is not None:
            self._background.cancel()

    def look_anew(self, closed: object = None) -> None:
        """Have the next call find out what has changed; of a closed client no session flushes."""
        self._rows.table, self._short = None, NO_SHORT_CUT
        if closed is self._connection:
            self.end()

    def _take_no_more(self) -> None:
        """Refuse rows and messages from here on: who closes it flushes or tells what there is."""
        with self._lock:
            self._local.closed, self._was_small = True, self._room.is_small
            self._rows.withdraw()
            self.end()

    def close(self) -> None:
        """Flush and close.

        Raises:
            RowErrors: rows were refused that nobody was told of. The session is closed.
        """
        if self._closed:
            return self._leave()
        try:
            self._take_no_more()
            if self._context is None or not self._context.local.ended:
                self.flush()
            if self._lost is not None:  # or a thread would be woken to look for it
                self._lost.forget()
        except (TableNotFoundError, TopicNotFoundError):
            flush_rest(self)
            raise
        finally:
            self.end()
            self._closed = True
            self._leave()

    def _leave(self) -> None:
        """Be asked no more by the transaction, where nothing waits or is untold."""
        if (context := self._context) is None or self.has_pending or self._errors.untold:
            return
        with context.lock:
            context.sessions = tuple(each for each in context.sessions if each is not self)
            if (held := context.buffers) is not None:
                held[:] = [each for each in held if each not in (self._rows, self._sending)]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._take_no_more()
            self.discard()
            self._closed = True  # a flush that was broken off is not waited for
        self.close()

    def waiting(self) -> int:
        """Return the number of rows, messages and acks that wait."""
        return len(self._rows) + len(self._acks) + len(self._sending)

    @property
    def _is_brief(self) -> bool:
        context, is_small = self._context, self._was_small or self._room.is_small
        return is_small and (flushes_soon(self) if context is None else is_brief(context))

    def flush_untold(self) -> None:
        """Flush; what is refused is told at the next flush."""
        self._errors.keep(self._flush_all())

    # -- inside ------------------------------------------------------------------------

    def _require_open(self, what: str) -> None:
        if self._closed:
            raise ClosedError(f"cannot {what}: the session was closed; make a new one")
        self._connection.require_open()
        if self._context is not None:
            self._context.require_open(what)
            self._local.require_more(what)
        if self._background is not None:
            self._background.tell(self)

    def _before_flush(self) -> None:
        if self._background is not None:
            self._background.wait(self)
        if self.has_pending:
            self._connection.require_open()

    def _flush_all(self, *, counted: bool = True) -> Outcome:
        with self._turn:
            before, self.flushing = self.flushing, True  # first: `has_pending` looks at it last
            try:
                self._short = NO_SHORT_CUT
                if (context := self._context) is None:
                    self._flush_alone()
                else:
                    context.settle()  # what an earlier flush gave and could not stage
                    went = self._sending.give(context, self._note) and context.scope is None
                    self._flush_runs(context, went, counted=counted)
                outcome, self._flushed = self._flushed, Outcome()
                return outcome
            finally:
                self.flushing = before

    def _flush_runs(self, context: TxnContext, went: bool, *, counted: bool) -> None:
        """Write the rows that wait. Those that a passing fault keeps from it wait on."""
        try:
            self._rows.write(context, self._flushed.add, self._lock, counted=counted)
            context.settle()
        except BaseException as error:
            status_table.note_part(error, went)
            self._errors.keep(self._flushed)
            self._flushed = replace(self._flushed, errors=[], refused=0)
            raise

    def _flush_alone(self) -> None:
        """All that waits, in a transaction of its own. After an error all of it waits on, but
        what is of a table or topic that is gone.
        """
        self._ask_about_the_last()
        with self._lock:
            runs, parcels = self._rows.take(), self._sending.take()
            acks, self._acks[:] = self._acks[:], []
        if (lot := Lot(runs, parcels, acks)).is_empty:
            return
        try:
            if runs or acks or not send_alone(self._connection.instance.topics, parcels):
                write_alone(self._connection.instance, lot.write, again=True)
        except CommitOutcomeUnknownError as error:
            if error.ask is not None:
                self._unsure = Unsure(error.ask, lot)
            raise
        except BaseException as error:
            self._put_back(lot.without_gone(error, self._connection.instance))
            raise
        self._flushed.add(lot.outcome)
        self._note(sent=lot.sent, acked=lot.acked)

    def _ask_about_the_last(self) -> None:
        """Find out whether a flush that failed late has written. If not, all of it waits again."""
        if (unsure := self._unsure) is None:
            return
        there, self._unsure = unsure.ask(), None
        if there:
            self._flushed.add(unsure.lot.outcome)
            self._note(sent=unsure.lot.sent, acked=unsure.lot.acked)
        else:
            self._put_back(unsure.lot)

    def _put_back(self, lot: Lot) -> None:
        with self._lock:
            self._rows.put_back(lot.runs)
            self._acks[:0] = lot.acks
            self._room.take_back(sum(parcel.nbytes for parcel in lot.parcels))
            self._sending.put_back(lot.parcels)
