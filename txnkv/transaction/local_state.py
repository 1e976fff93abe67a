"""The state of a transaction in this process: one variable, moved under one lock.

Until a small transaction commits no other process knows of it, so nothing but this says whether
it may still be written to, committed or rolled back. Of a stored one status.db decides
(`coordinator.status_table`); this is what was done to it here.

    IN_MEMORY    open; its rows, messages and acks are in memory (`uncommitted`)
    STORED       open; its OPEN row is in status.db, what it writes is staged
    COMMITTING   what was in memory was taken for the commit log, as an `Attempt`
    UNSURE       that attempt broke off at the commit point, and status.db is to be asked
    FINISHING    stored, and its commit has begun in status.db
    COMMITTED, ABORTED

    begin --> IN_MEMORY -- commit --> COMMITTING -- outcome --> COMMITTED or ABORTED
                |   ^                   |    |                        ^
                |   +-- lock not had ---+    +-----> UNSURE -- asked -+
                | token, lock, size                                   |
                v                                                     |
              STORED -- commit --> FINISHING -- outcome in status.db -+
                ^                     |
                +------- refused -----+

What is open is aborted by a rollback, a conflict or its timeout, and is committed at once when it
has written nothing.

The lock is held while anything is put into memory and while a commit takes it out: what a flush
has acknowledged is in the commit, or the flush is refused. Nobody waits for an outcome under it.
Once COMMITTING, the outcome of the attempt is all that counts; nobody guesses, or queues again:

    T1 commit()     takes the rows, queues the attempt ............ returns its stamp
    T2 commit()                    waits for the attempt .......... returns its stamp
    T3 rollback()                  waits for the attempt .......... is refused: COMMITTED
    T4 flush()                     is refused: COMMIT_IN_PROGRESS

An attempt that met the partition lock of a younger transaction is in no queue (`Attempt.queued`)
until it is tried again. A rollback that comes in between aborts, and nothing is tried again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import ClassVar, Final

from txnkv.coordinator import ShieldedFuture, Timestamp, TxnState
from txnkv.core import AckRun
from txnkv.errors import ClosedError, InvalidTxnStateError
from txnkv.storage import new_baton, new_rlock
from txnkv.tables import SmallWrites


class Local:
    """A state of a transaction in this process.

    No Enum: before Python 3.12 each `Local.STORED` of one takes five times as long, and a small
    transaction asks 30 times.
    """

    IN_MEMORY: ClassVar[Local]
    STORED: ClassVar[Local]
    COMMITTING: ClassVar[Local]
    UNSURE: ClassVar[Local]
    FINISHING: ClassVar[Local]
    COMMITTED: ClassVar[Local]
    ABORTED: ClassVar[Local]

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


for _name in Local.__annotations__:
    setattr(Local, _name, Local(_name))


ROLLED_BACK: Final = "rolled back"
"""The reason of an abort that the transaction's own program wanted."""
_NEVER: Final = Timestamp(0)
_ENDS: Final = frozenset({Local.COMMITTED, Local.ABORTED})

MOVES: Final[Mapping[Local, frozenset[Local]]] = {
    Local.IN_MEMORY: _ENDS | {Local.STORED, Local.COMMITTING},
    Local.STORED: _ENDS | {Local.FINISHING},
    Local.COMMITTING: _ENDS | {Local.IN_MEMORY, Local.UNSURE},
    Local.UNSURE: _ENDS,
    Local.FINISHING: _ENDS | {Local.STORED},
    Local.COMMITTED: frozenset(),
    Local.ABORTED: frozenset(),
}

_TOLD: Final[Mapping[Local, TxnState]] = {
    Local.IN_MEMORY: TxnState.OPEN,
    Local.STORED: TxnState.OPEN,
    Local.COMMITTING: TxnState.COMMIT_IN_PROGRESS,
    Local.UNSURE: TxnState.COMMIT_IN_PROGRESS,
    Local.FINISHING: TxnState.COMMIT_IN_PROGRESS,
    Local.COMMITTED: TxnState.COMMITTED,
    Local.ABORTED: TxnState.ABORTED,
}


class Attempt:
    """One commit of what a small transaction had in memory, and its outcome.

    Attributes:
        began: monotonic seconds.
        queued: the commit log has it: nothing but its outcome ends it.
        stamp, error: the outcome, one of them.
        gate: released with the outcome, where somebody waits.
        future_asked: of the outcome, where somebody wants one.
    """

    error: BaseException | None = None
    future_asked: Future[Timestamp] | None = None
    gate: threading.Lock | None = None

    def __init__(self, stamp: Timestamp | None = None) -> None:
        self.began = time.monotonic()
        self.queued = stamp is None
        self.stamp = stamp

    @property
    def done(self) -> bool:
        """The outcome is there."""
        return self.stamp is not None or self.error is not None

    def wait(self, seconds: float) -> bool:
        """Wait for the outcome; False when it is not there in time."""
        # Most attempts nobody waits for. One lock for all who do; the outcome is looked for after.
        gate = self.gate or self.__dict__.setdefault("gate", new_baton())
        if not self.done and gate.acquire(timeout=seconds):
            gate.release()
        return self.done

    def result(self) -> Timestamp:
        """Wait for the outcome; the commit timestamp, or raise what refused it."""
        if self.stamp is not None:
            return self.stamp
        while not self.wait(1.0):
            pass
        if self.error is not None:
            try:
                raise self.error
            finally:
                self = None  # type: ignore[assignment]
        assert self.stamp is not None
        return self.stamp

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.began

    def queue_again(self) -> bool:
        """Give it to the commit log, under the lock of the state; False when it is over."""
        self.queued = not self.done
        return self.queued

    def future(self) -> Future[Timestamp]:
        """A future of the outcome. Asked for under the lock of the state."""
        if self.future_asked is not None:
            return self.future_asked
        future = ShieldedFuture[Timestamp]().begun()
        if self.done:
            self._complete(future)
        else:
            self.future_asked = future
        return future

    def tell(self) -> None:
        """Complete the future, if there is one. Whoever settled calls it, without the lock."""
        if self.future_asked is not None:
            self._complete(self.future_asked)

    def _complete(self, future: Future[Timestamp]) -> None:
        if self.error is not None:
            future.set_exception(self.error)
        else:
            assert self.stamp is not None
            future.set_result(self.stamp)


class LocalState:
    """The state of one transaction, and what is known of its end.

    Args:
        stored: its OPEN row is in status.db.

    Attributes:
        lock: held for every move.
        at: the state.
        stored: status.db knows the transaction, and is asked how it stands.
        commit_called: nobody makes sessions of it any more.
        ending: the word for what becomes of it, from before what waits is flushed for that: nobody
            adds to it. Empty while it is open, also again.
        gate: held by whoever flushes sessions for the end, or rolls back; made by the first.
        is_over: it has ended, and its owner knows: by a commit, or a rollback.
        attempt: the commit that is on its way.
        starting: the number of threads that begin a large one in status.db, or have.
        going: that of a large one, where a thread of the library is at it, or was.
        unsure_since: before the attempt began that broke off; and by the monotonic clock.
        commit_ts: of a small one that committed.
        reason, error: why it was aborted, and the name of a class of errors.
        hand: its rows, while single calls go straight to them.
        acks: a run of them, while single calls go straight to it.
    """

    commit_called = is_over = False
    ending = ""
    gate: threading.RLock | None = None
    attempt: Attempt | None = None
    starting = 0
    going: Future[Timestamp] | None = None
    unsure_since = _NEVER, 0
    commit_ts: Timestamp | None = None
    reason: str | None = None
    error: str | None = None
    hand: SmallWrites | None = None
    acks: AckRun | None = None

    def __init__(self, *, stored: bool) -> None:
        self.lock = new_rlock()
        self.at = Local.STORED if stored else Local.IN_MEMORY
        self.stored = stored

    @property
    def open(self) -> bool:
        """It may be written to."""
        return self.at is Local.IN_MEMORY or self.at is Local.STORED

    @property
    def ended(self) -> bool:
        """Committed or aborted."""
        return self.at in _ENDS

    @property
    def told(self) -> TxnState:
        """The state as users know it."""
        return _TOLD[self.at]

    def move(self, to: Local) -> None:
        """Move to another state. Under the lock.

        Raises:
            ValueError: no transaction moves so.
        """
        if to not in MOVES[self.at]:
            raise ValueError(f"no transaction moves from {self.at.name} to {to.name}")
        if to is Local.IN_MEMORY or (to is Local.STORED and self.at is Local.FINISHING):
            self.ending = ""
        if self.hand is not None:
            self.hand.withdraw()
            self.hand = None
        if self.acks is not None:
            self.acks.withdraw()
            self.acks = None
        self.at = to
        if to is Local.STORED:
            self.stored = True
        elif to is Local.COMMITTED:
            self.is_over = True
        elif to is Local.ABORTED:
            self.is_over = self.commit_called or self.reason == ROLLED_BACK

    def new_gate(self) -> threading.RLock:
        """The gate, made now where there is none."""
        return self.gate or vars(self).setdefault("gate", new_rlock())

    def require_more(self, what: str) -> None:
        """Refuse what would wait behind the last flush. Under the lock of that.

        Raises:
            InvalidTxnStateError: its end has begun.
        """
        if self.ending:
            raise InvalidTxnStateError(
                f"cannot {what}: the transaction is being {self.ending}: begin a new one"
            )

    def withdraw(self) -> None:
        """Have single calls ask again whether they may go straight to the rows, or the acks."""
        hand, acks, self.hand, self.acks = self.hand, self.acks, None, None
        if hand is not None:
            hand.withdraw()
        if acks is not None:
            acks.withdraw()

    def settle(
        self, attempt: Attempt, stamp: Timestamp | None, error: BaseException | None = None
    ) -> None:
        """The attempt that was on its way has its outcome. Under the lock, after the move;
        `Attempt.tell` comes next.
        """
        self.attempt = None
        attempt.stamp, attempt.error = stamp, error
        if attempt.gate is not None:
            attempt.gate.release()


class Intake:
    """The answer whether a session takes more: until it is closed, or its transaction ends.

    Args:
        local: of the transaction, or None.

    Attributes:
        closed: set under the session's lock, before its last flush.
    """

    closed = False

    def __init__(self, local: LocalState | None) -> None:
        self._local = local

    @property
    def ending(self) -> bool:
        """Rows that are taken now would wait behind the last flush."""
        return self.closed or (self._local is not None and bool(self._local.ending))

    def require_more(self, what: str) -> None:
        """Refuse what would wait behind the last flush. Under the lock of that.

        Raises:
            ClosedError: the session is closed.
            InvalidTxnStateError: the transaction's end has begun.
        """
        if self.closed:
            raise ClosedError(f"cannot {what}: the session was closed; make a new one")
        if self._local is not None and self._local.ending:
            self._local.require_more(what)
