"""Buffers of a session until it is flushed, and what comes of the flush.

`SessionRows` has the rows that wait, in runs, and `Room` what they and messages may take.
`Background` flushes in mode auto_background, by a thread of the library's, when much waits or
after a while. `ErrorBuffer` has the rows that were refused until somebody is told.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

from txnkv.coordinator import status_table
from txnkv.errors import (
    InvalidTxnStateError,
    RowError,
    RowErrors,
    TableNotFoundError,
    TopicNotFoundError,
    require_number,
)
from txnkv.storage import done_here, shielded_unless
from txnkv.tables import (
    PARTIAL,
    Adder,
    Ahead,
    Outcome,
    RowWriter,
    Run,
    Values,
    Written,
    nothing,
    write_buffer,
)
from txnkv.topics import SubscriptionInfo
from txnkv.transaction.connection import (
    Acknowledged,
    AnySubscription,
    AnyTopic,
    Connection,
    acks_of,
)
from txnkv.transaction.context import TxnContext
from txnkv.transaction.local_state import Intake
from txnkv.transaction.send_buffer import Lone

BUFFER_BYTES: Final = 64 << 20
"""The default `buffer_bytes` of `new_session`."""

Acks: TypeAlias = tuple[SubscriptionInfo, list[tuple[int, int]], bool]
"""Acknowledged messages of a subscription; whether each with all before it."""

_SMALL_BYTES: Final = 1 << 20
_FEW: Final = 8
_FEW_ACKS: Final = 500
_BACKGROUND_ROWS: Final = 8192
_BACKGROUND_SECONDS: Final = 1.0
_BUFFERS: Final = 4
"""So many times `_BACKGROUND_ROWS` may wait; who adds more waits for the thread that flushes."""

_TEXT: Final = frozenset({str, bytes})
_NESTED: Final = frozenset({tuple, list})


def _acks_end_soon(context: TxnContext, message: object) -> bool:
    """Tell whether acks of a transaction are few, and written with nothing else."""
    few = not isinstance(message, list | tuple) or len(message) <= _FEW_ACKS
    return few and not context.stored and not context.unsettled


def size_of(values: Iterable[Any]) -> int:
    """About what values take: eight bytes each, and the length of text and bytes."""
    size = 0
    for value in values:
        kind = value.__class__
        size += 8
        if kind in _TEXT:
            size += len(value)
        elif kind in _NESTED:
            size += size_of(value)
    return size


class Room:
    """The bytes that rows and messages of a session may still take.

    Args:
        limit: bytes; None for no limit.

    Attributes:
        left: bytes, a list of one number: adders of many rows change it in place. Not above 0:
            full.
        refuses: nobody but the caller flushes, and nothing is taken where it is full.
    """

    __slots__ = ("left", "limit", "refuses")

    def __init__(self, limit: int | None, *, refuses: bool) -> None:
        require_number("buffer_bytes", limit or 1, "bytes")
        if limit is not None and limit <= 0:
            raise ValueError(f"buffer_bytes is bytes above 0, or None, not {limit!r}")
        self.limit, self.refuses = limit, refuses
        self.left: list[float] = [math.inf if limit is None else limit]

    def empty(self) -> None:
        """Make all room free again: nothing waits any more. Adders made before find none."""
        before, self.left = self.left, [math.inf if self.limit is None else self.limit]
        before[0] = 0

    def take(self, values: Iterable[Any]) -> None:
        """Make room for one row or message.

        Raises:
            InvalidTxnStateError: there is none, and the caller is to flush.
        """
        if self.limit is None:
            return
        if self.refuses and self.full:
            raise InvalidTxnStateError(
                f"cannot take more: the rows and messages that wait have {self.used} bytes, and "
                f"buffer_bytes of the session is {self.limit}. All of them still wait: flush the "
                "session, then make this call again"
            )
        self.left[0] -= size_of(values)

    def take_back(self, size: int) -> None:
        """Take room again for what could not be flushed and waits again."""
        self.left[0] -= size

    @property
    def used(self) -> int:
        """Bytes that wait; 0 where there is no limit."""
        return 0 if self.limit is None else int(self.limit - self.left[0])

    @property
    def is_small(self) -> bool:
        """Little waits, as far as its bytes are counted."""
        return self.used <= _SMALL_BYTES

    @property
    def full(self) -> bool:
        return self.left[0] <= 0

    @property
    def half_full(self) -> bool:
        return self.limit is not None and 2 * self.left[0] <= self.limit


NO_LIMIT: Final = Room(None, refuses=False)
"""Room for any number of rows."""


# -- rows that wait --------------------------------------------------------------------


class SessionRows:
    """The rows of a session that wait, in the order in which they came.

    Args:
        room: what they may take, together with messages.

    Attributes:
        runs: rows of one kind that follow each other.
        written: what became of rows, in front of them, that did not have to wait.
        lone: a message of a transaction that has no session yet.
        in_session: the transaction has one, which takes its messages.
        acked: the number of messages that were acknowledged since the last flush.
        table: whose rows `more` takes without ado, by the operation `op`; None: no table's.
    """

    __slots__ = (
        "_left", "_room", "acked", "in_session", "lone", "more", "op", "runs", "table", "written",
    )  # fmt: skip

    def __init__(self, room: Room) -> None:
        self._room = room
        self._left: list[float] | None = None  # of all adders since the last flush
        self.runs: list[Run] = []
        self.written: list[Written] = []
        self.lone: Lone | None = None
        self.in_session = False
        self.acked = 0
        self.table: object = None
        self.op = ""
        self.more: Adder = nothing

    def __bool__(self) -> bool:
        return bool(self.runs or self.written or self.lone)

    def __len__(self) -> int:
        return sum(len(run.rows) for run in self.runs)

    def add(self, writer: RowWriter, op: str, row: Any) -> Run:
        """Check and keep a row; the run that it is in.

        Raises:
            SchemaError: it does not fit the table.
            InvalidTxnStateError: there is no room.
        """
        return self.keep(writer, op, writer.checker[op].take(row))

    def keep(self, writer: RowWriter, op: str, values: Values) -> Run:
        """Keep a checked row; the run that it is in.

        Raises:
            InvalidTxnStateError: there is no room.
        """
        if self._room.limit is not None:
            self._room.take(values)
        shape = writer.rows.missing(values) if op in PARTIAL else None
        runs = self.runs
        if runs:
            last = runs[-1]
            if last.writer is writer and last.op == op and last.shape == shape:
                last.rows.append(values)
                return last
        self.table = None
        run = Run(writer, op, shape, [values])
        runs.append(run)
        return run

    @property
    def are_few(self) -> bool:
        """So few, of a transaction's single calls, that they wait without a session."""
        runs = self.runs
        return not runs or (len(runs) < _FEW and len(runs[-1].rows) < _FEW)

    def expect(self, table: object, run: Run, lock: threading.RLock, local: Intake) -> None:
        """Take more rows of a run by `more`, as long as it is the last and waits. Under the lock.

        Args:
            lock: held while rows are taken.
            local: of the session.
        """
        if run.shape is not None:
            self.table = None
            return
        writer, op = run.writer, run.op
        by_itself = partial(self._keep_more, lock, local, writer, op)
        self._left = self._left or ([math.inf] if self._room.limit is None else self._room.left)
        self.more = writer.checker[op].adder(run.rows, self._left, by_itself).add
        self.table, self.op = table, op

    def _keep_more(
        self,
        lock: threading.RLock,
        local: Intake,
        writer: RowWriter,
        op: str,
        values: Values,
    ) -> None:
        """Keep a row that an adder does not take: its run was flushed meanwhile, by another
        thread, or it is of another shape.
        """
        with lock:
            local.require_more(op)
            self.keep(writer, op, values)

    def take(self) -> list[Run]:
        """All of them. Messages were taken before, or are next: there is room again."""
        self.withdraw()  # what an adder has not taken yet, it takes no more
        self.table = self._left = None
        runs, self.runs = self.runs, []
        if self._room.limit is not None:
            self._room.empty()
        return runs

    def withdraw(self) -> None:
        """Have the adder ask before it takes another row."""
        if self._left is not None:
            self._left[0] = 0

    @shielded_unless(lambda self, _, context, to, message, __: _acks_end_soon(context, message))
    def acknowledge(
        self,
        connection: Connection,
        context: TxnContext,
        subscription: AnySubscription,
        message: Acknowledged,
        cumulative: bool,
    ) -> None:
        """Acknowledge messages in a transaction; raises as `Session.ack`."""
        connection.require_open()
        context.require_open("acknowledge")
        context.local.require_more("acknowledge")
        info, ids = acks_of(connection, subscription, message)
        context.acknowledge(info, ids, cumulative=cumulative)
        if not connection.is_open:
            context.local.withdraw()
        context.instance.coordinator.metrics.messages_acked.value += len(ids)
        self.acked += len(ids)

    def send(self, connection: Connection, context: TxnContext, topic: AnyTopic, said: Any) -> bool:
        """Keep the first message of a transaction; False where it takes a session.

        Args:
            connection: to the store.
            context: of the transaction.
            topic: to which.
            said: the other arguments of `Session.send`, which it raises as.
        """
        if self.in_session or self.lone is not None or not context.may_be_small:
            return False
        context.require_open("send")
        lone = Lone.checked(connection.topic_info(topic), said)  # which may read the catalog
        with context.lock:
            if self.in_session or self.lone is not None or not context.may_be_small:
                return False
            context.local.require_more("send")
            self.lone = lone
            return True

    def give(self, context: TxnContext) -> bool:
        """Give that message to the transaction; False where it takes a session.

        Raises:
            TopicNotFoundError: the topic was dropped; the message is gone.
        """
        with context.lock:
            if (lone := self.lone) is None:
                return True
            try:
                if not lone.give(context):
                    return False
            except TopicNotFoundError:
                self.lone = None
                raise
            self.lone = None
            return True

    def discard(self) -> None:
        """Forget all that waits."""
        self.take()
        self.lone = None

    def write(
        self,
        context: TxnContext,
        tell: Callable[[Outcome], object],
        lock: threading.RLock,
        *,
        counted: bool,
    ) -> None:
        """Write them in a transaction, one run after the other. Those that an error has kept from
        it wait on, but what is of a table that is gone, or of a transaction that has ended.

        Args:
            context: of the transaction.
            tell: is told of what became of a run; where it is not counted, if rows are refused.
            lock: held while they are taken.
            counted: whether the caller looks at the counts.
        """
        with lock:
            runs, went = Ahead(self.take()), False
            written, self.written[:] = self.written[:], []
        if counted and written:
            tell(write_buffer.outcome_of(written))
        while runs:
            run = runs[0]
            try:
                made = context.write_rows(run, counted=counted, ahead=runs)
            except BaseException as error:
                status_table.note_part(error, went)
                over = isinstance(error, InvalidTxnStateError)
                gone = isinstance(error, TableNotFoundError)
                if gone:
                    del runs[0]
                with lock:
                    self.put_back([] if over else [*runs])
                raise
            if counted or made.refused:
                tell(made)
            went = context.scope is None  # those of an attempt may not count
            del runs[0]

    def put_back(self, runs: list[Run]) -> None:
        """Keep what could not be written, in front of what came since."""
        self.runs = runs + self.runs
        self._room.take_back(sum(size_of(row) for run in runs for row in run.rows))


# -- flushes in the background ---------------------------------------------------------


class Pooled(Protocol):
    """A store, or the client of one on another host."""

    @property
    def pool(self) -> Executor:
        """Threads for what is done in the background."""


class Buffered(Protocol):
    """A session, as the thread that flushes it sees it."""

    @property
    def has_pending(self) -> bool: ...

    def waiting(self) -> int:
        """Return the number of rows, messages and acks that wait."""

    def flush(self) -> object: ...

    def flush_untold(self) -> None:
        """Flush; what is refused is told later."""


def flush_rest(session: Buffered) -> None:
    """Flush what is of others than the tables and topics that are gone."""
    left = session.waiting() + 1
    while session.waiting() < left:  # each time one of them goes
        left = session.waiting()
        with suppress(TableNotFoundError, TopicNotFoundError):
            session.flush()


class Background:
    """The flushes of one session. An error of one waits for the session's next call.

    Args:
        source: has the threads.
        room: the session's.
        lock: held while rows are added and taken.
    """

    def __init__(self, source: Pooled, room: Room, lock: threading.RLock) -> None:
        self._source = source
        self._room = room
        self._lock = lock
        self._flushing: Future[None] | None = None
        self._timer: threading.Timer | None = None

    def added(self, session: Buffered) -> None:
        """Flush soon; wait if more is kept than may be. After a flush that failed there is no other
        before that is told.
        """
        with self._lock:
            waiting = session.waiting()
            full = waiting >= _BUFFERS * _BACKGROUND_ROWS or self._room.full
            if self._is_much(waiting):
                self._start(session)
            else:
                self._start_timer(session)
            flushing = self._flushing
        if full and flushing is None:  # no thread is to be had
            self._flushing = done_here(self._flush, session)
        elif full and flushing is not None:
            flushing.exception()

    def wait(self, session: Buffered) -> None:
        """Wait for the flush that is on its way.

        Raises:
            What it has raised.
        """
        if (flushing := self._flushing) is not None:
            flushing.exception()
            self.tell(session)

    def tell(self, session: Buffered) -> None:
        """Raise what the last flush has raised: before a call has taken anything. What waits is
        flushed again after a while.
        """
        with self._lock:
            flushing = self._flushing
            if flushing is None or not flushing.done():
                return
            self._flushing = None
            if flushing.exception() is not None:
                self._start_timer(session)
        flushing.result()

    def cancel(self) -> None:
        """Flush no more by time, until rows are added."""
        with self._lock:
            timer, self._timer = self._timer, None
            if timer is not None:
                timer.cancel()

    def _is_much(self, waiting: int) -> bool:
        return waiting >= _BACKGROUND_ROWS or self._room.half_full

    def _start_timer(self, session: Buffered) -> None:
        if self._timer is not None:
            return
        known = weakref.ref(session)  # an abandoned session is not flushed

        def tick() -> None:
            if (session := known()) is not None:
                self._on_timer(session)

        timer = threading.Timer(_BACKGROUND_SECONDS, tick)
        timer.daemon = True
        with suppress(RuntimeError):  # no thread is to be had: the next call tries again
            timer.start()
            self._timer = timer

    def _on_timer(self, session: Buffered) -> None:
        with self._lock:
            if self._timer is None:
                return  # cancelled too late to stop it
            self._timer = None
            if session.has_pending:
                self._start(session)

    def _start(self, session: Buffered) -> None:
        if (last := self._flushing) and not (last.done() and last.exception() is None):
            return  # it looks again when it has done what it has, or the next call tells of it
        self._flushing = None
        with suppress(RuntimeError):  # as with the timer
            self._flushing = self._source.pool.submit(self._flush, session)

    def _flush(self, session: Buffered) -> None:
        while True:
            session.flush_untold()
            with self._lock:
                if not self._is_much(session.waiting()):
                    if session.has_pending:
                        self._start_timer(session)
                    return


# -- results ---------------------------------------------------------------------------


@dataclass
class WriteResult:
    """Numbers of rows and messages that a flush or write brought in."""

    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    ignored: int = 0
    sent: int = 0
    acked: int = 0


class ErrorBuffer:
    """The refused rows of a session, the last `RowErrors.KEPT` of them, and how many nobody
    was told of yet. Shared by threads.

    Args:
        lock: the session's.
        context: its transaction, or None.
    """

    def __init__(self, lock: threading.RLock, context: TxnContext | None) -> None:
        self._lock = lock
        self._context = context
        self._errors: list[RowError] = []
        self.untold = 0

    def keep(self, outcome: Outcome) -> None:
        """Take what was refused."""
        if outcome.refused:
            with self._lock:
                self._errors = (self._errors + outcome.errors)[-RowErrors.KEPT :]
                self.untold += outcome.refused

    def take(self) -> list[RowError]:
        """The rows refused since the last call, and forget them: their taker is told."""
        with self._lock:
            errors, self._errors = self._errors, []
            self.untold = 0
            return errors

    def forget(self) -> None:
        """Nobody needs to be told."""
        with self._lock:
            self.untold = 0

    def result(self, outcome: Outcome) -> WriteResult:
        """Return the result of a flush or write to its caller.

        Raises:
            RowErrors: rows were refused that nobody was told of.
        """
        self.keep(outcome)
        self.tell()
        return WriteResult(outcome.inserted, outcome.updated, outcome.deleted, outcome.ignored)

    def tell(self) -> None:
        """Raise what nobody was told of.

        Raises:
            RowErrors: there is some.
        """
        if self.untold:
            with self._lock:
                count, self.untold = self.untold, 0
                errors = self._errors[-count:]
            if count:
                raise RowErrors(errors, count, None if (of := self._context) is None else of.id)
