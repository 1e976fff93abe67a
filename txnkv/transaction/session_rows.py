"""Rows that a session keeps until it is flushed, by run; and a flush of an unknown outcome."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from txnkv.tables import PARTIAL, Adder, Outcome, RowWriter, Shape, Values, shape_of
from txnkv.topics import MessageId, SubscriptionInfo
from txnkv.transaction.context import TxnContext
from txnkv.transaction.send_buffer import Parcel
from txnkv.transaction.session_buffer import Room, size_of

Acks: TypeAlias = tuple[SubscriptionInfo, list[MessageId], bool]
"""Acknowledged messages of a subscription; whether each with all before it."""


class Run:
    """Rows of one table, operation and shape that were given one after the other."""

    __slots__ = ("op", "rows", "shape", "writer")

    def __init__(self, writer: RowWriter, op: str, shape: Shape) -> None:
        self.writer = writer
        self.op = op
        self.shape = shape
        self.rows: list[Values] = []

    def write(self, context: TxnContext, *, counted: bool = True) -> Outcome:
        return context.write_rows(self.writer, self.op, self.rows, counted=counted)


class SessionRows:
    """The rows of a session that wait, in the order in which they came.

    Args:
        room: what they may take, together with messages.
    """

    __slots__ = ("_room", "_runs")

    def __init__(self, room: Room) -> None:
        self._room = room
        self._runs: list[Run] = []

    def __bool__(self) -> bool:
        return bool(self._runs)

    def __len__(self) -> int:
        return sum(len(run.rows) for run in self._runs)

    def add(self, writer: RowWriter, op: str, row: Any) -> Run:
        """Check and keep a row; the run that it is in.

        Raises:
            SchemaError: it does not fit the table.
            InvalidTxnStateError: there is no room.
        """
        values = writer.checker.of(op)(row)
        self._room.take(values)
        run = self._run_for(writer, op, shape_of(values) if op in PARTIAL else None)
        run.rows.append(values)
        return run

    def _run_for(self, writer: RowWriter, op: str, shape: Shape) -> Run:
        """The last run, where a row of this kind goes on with it, or a new one."""
        if self._runs:
            last = self._runs[-1]
            if last.writer is writer and last.op == op and last.shape == shape:
                return last
        self._runs.append(Run(writer, op, shape))
        return self._runs[-1]

    def adder(self, run: Run) -> Adder:
        """Adds whole rows to a run, as long as it is the last and waits."""
        append = run.rows.append

        def more(values: Values) -> None:
            self._room.take(values)
            append(values)

        return run.writer.checker.adder(run.op, append, self._room.left, more)

    def take(self) -> list[Run]:
        """All of them. Messages were taken before, or are next: there is room again."""
        runs, self._runs = self._runs, []
        self._room.empty()
        return runs

    def put_back(self, runs: list[Run]) -> None:
        """Keep what could not be written, in front of what came since."""
        self._runs = runs + self._runs
        self._room.take_back(sum(size_of(row) for run in runs for row in run.rows))


class Lot(NamedTuple):
    """All that waited in a session, to be written together."""

    runs: list[Run]
    parcels: list[Parcel]
    acks: list[Acks]

    @property
    def is_empty(self) -> bool:
        return not (self.runs or self.parcels or self.acks)

    @property
    def sent(self) -> int:
        """The number of messages."""
        return sum(parcel.rows for parcel in self.parcels)

    @property
    def acked(self) -> int:
        """The number of acknowledged messages."""
        return sum(len(ids) for _, ids, _ in self.acks)

    def write(self, context: TxnContext) -> Outcome:
        """Write all of it in a transaction; return what became of the rows."""
        outcome = Outcome()
        for parcel in self.parcels:
            context.send(parcel.topic, parcel.parts)
        for info, ids, cumulative in self.acks:
            context.acknowledge(info, ids, cumulative=cumulative)
        context.settle()
        for run in self.runs:
            outcome.add(run.write(context))
        return outcome


class Unsure(NamedTuple):
    """A flush outside of a transaction that failed late: what it wrote is there, or nothing of it.

    Attributes:
        ask: tells which.
        outcome: of its rows, if it is there.
        lot: what it was to write.
    """

    ask: Callable[[], bool]
    outcome: Outcome
    lot: Lot
