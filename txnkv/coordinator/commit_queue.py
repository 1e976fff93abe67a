"""The queue of small commits, of which one thread commits a group for all.

The first to come leads: it commits one group, all who wait when it has the write lock, then
passes the lead on to the first of those who came meanwhile. Each thread sleeps on a lock of its
own and is woken once, to lead or to go on with its answer. Futures are led by a thread of the
library, and completed by it where a brief call leads: their callbacks are the program's. What they
do holds nobody up for long: who comes takes the lead over from a thread that has not begun with it,
and another takes the place of that thread (`TaskThread`).

Whoever has a deadline does not wait for the write lock itself: when it is not free, that thread
leads instead. What is still in the queue at its deadline is taken out and never written; what was
taken into a group by then is waited for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Final, NamedTuple, Self, TypeVar

import apsw

from txnkv.coordinator.ids import Timestamp
from txnkv.coordinator.payload import Section
from txnkv.errors import (
    CommitOutcomeUnknownError,
    TransactionTimedOutError,
    TxnkvError,
    UnavailableError,
)
from txnkv.storage import (
    BusyError,
    TaskThread,
    brief,
    clock,
    is_calm,
    new_baton,
    new_lock,
    patience,
    shielded,
)

_log = logging.getLogger("txnkv")

T = TypeVar("T")

GROUP_MEMBERS: Final = 1024
GROUP_BYTES: Final = 16 << 20


class SmallCommit(NamedTuple):
    """A small transaction that is to be committed in one row of the log.

    Attributes:
        txn_id: local id of the transaction.
        sections: what it changes in memory.
        validate: called with the cursor of the SQLite transaction and the latest commit
            timestamp, when all that committed before is in memory; raises to refuse. Where there is
            no `write` the cursor may be None: False, when one is needed.
        write: called with the same cursor and the commit's timestamp once `validate` has passed,
            for what it changes in status.db; gives the sections that were not known before.
            It refuses nothing: what it raises breaks the commit of all in the group.
        size: bytes of the sections that `write` will give.
    """

    txn_id: int
    sections: Sequence[Section]
    validate: Callable[[Any, Timestamp], bool | None]
    write: Callable[[apsw.Cursor, Timestamp], Sequence[Section]] | None = None
    size: int = 0


commit_of: Final = partial(tuple.__new__, SmallCommit)
"""A commit of a tuple of all its fields."""


_wait: Final = shielded(wait)
_error: Final = brief(Future[Any].exception)
_value: Final = brief(Future[Any].result)
_add: Final = brief(Future[Any].add_done_callback)


class ShieldedFuture(Future[T]):
    """A future for the program. No signal handler runs while it holds its condition: one that
    raised there could leave it held, and who completes the future would wait for it for ever.
    """

    cancel = brief(Future[T].cancel)
    cancelled = brief(Future[T].cancelled)
    done = brief(Future[T].done)
    running = brief(Future[T].running)
    __repr__ = brief(Future[T].__repr__)

    def begun(self) -> Self:
        """It is on its way, and cannot be cancelled."""
        self.set_running_or_notify_cancel()
        return self

    def take(self, fn: Callable[..., T], *args: Any) -> None:
        """Complete it by a call that is made now."""
        try:
            self.set_result(fn(*args))
        except BaseException as error:
            self.set_exception(error)
            if not isinstance(error, Exception):
                raise
        finally:
            del self  # the traceback has this frame

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Call it once this is done: at once where it is, as what the program does itself."""
        if not self.done():
            _add(self, fn)
            return
        try:
            fn(self)
        except Exception:  # as the base class does
            _log.exception("a callback of %r failed", self)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as the base class does, on another thread."""
        if not self.done():
            _wait([self], timeout)
        return _error(self, 0)

    def result(self, timeout: float | None = None) -> T:
        """Wait as `exception` does."""
        error = self.exception(timeout)
        try:
            if error is not None:
                raise error
            found: T = _value(self, 0)
            return found
        finally:
            del self, error  # as in `take`


class CommitRequest:
    """A commit in the queue, and how its thread hears of the end.

    Attributes:
        given: the stamp it was written with; its group is on its way to the disk, and may fail.
        ended: its group is on the disk or has failed. Until then there is no answer.
        stamp: of what is committed, from its end on.
        wake: released when it has ended or is to lead; None where nobody waits.
        began: monotonic seconds.
    """

    # Each commit makes one: what begins alike stands in the class.
    given: Timestamp | None = None
    ended = False
    stamp: Timestamp | None = None
    error: BaseException | None = None
    leads = False
    wake: threading.Lock | None = None

    def __init__(self, commit: SmallCommit, future: Future[Timestamp] | None) -> None:
        self.began = time.monotonic()
        self.commit, self.future = commit, future

    @property
    def size(self) -> int:
        """Bytes of its payload, about."""
        return self.commit.size + sum(len(section.data) for section in self.commit.sections)

    def tell(self) -> None:
        """Complete the future."""
        assert self.future is not None
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            assert self.stamp is not None
            self.future.set_result(self.stamp)


class CommitQueue:
    """The commits of one process that wait for each other.

    Args:
        commit_group: takes a group with `take` once it has the write lock, and commits it:
            each member was given a stamp or has an error then. What it raises is everybody's
            error, but for BusyError, when it is told not to wait for the lock.
    """

    def __init__(self, commit_group: Callable[[list[CommitRequest], bool], None]) -> None:
        self._commit_group = commit_group
        self._queue: deque[CommitRequest] = deque()
        self._mutex = new_lock()
        self._leading = False
        self._due = False  # the library's thread is to lead, and has not begun
        self._thread = TaskThread("txnkv-commit")

    def offer(self, commit: SmallCommit, deadline: int | None = None) -> CommitRequest:
        """Take a commit into the queue; where nobody leads, this thread does: it has ended then,
        but for one that finds the write lock taken, and has a deadline or is to be brief.
        """
        waiting = CommitRequest(commit, None)
        with self._mutex:
            if self._leading:
                waiting.wake = new_baton()
            self._queue.append(waiting)
            waiting.leads, self._leading = not self._leading, True
            leads, self._due = waiting.leads or self._due, False
        if leads:
            self._lead(wait=deadline is None and not is_calm())
        return waiting

    def lead(self) -> bool:
        """Begin to lead, where nobody does, for a commit that is in no queue; `pass_on` ends it."""
        with self._mutex:
            led, self._leading = self._leading, True
        return not led

    def pass_on(self) -> None:
        """End a lead: who came first meanwhile is the next to lead."""
        with self._mutex:
            next_one = self._queue[0] if self._queue else None
            self._leading = next_one is not None
            if next_one is not None:
                next_one.leads = True
        if next_one is not None and next_one.wake is not None:
            next_one.wake.release()
        elif next_one is not None:
            self._lead_on_thread()

    def outcome(self, waiting: CommitRequest, deadline: int | None = None) -> Timestamp:
        """Wait for the end of what was offered; raises what refused it.

        Raises:
            TransactionTimedOutError: it was not written by `deadline`, monotonic microseconds.
            BusyError: inside of `not_waiting`, it was not written soon.
        """
        while not waiting.ended:
            if self._wait(waiting, deadline):
                self._lead(wait=deadline is None)
        if waiting.error is not None:
            raise waiting.error
        assert waiting.stamp is not None
        return waiting.stamp

    def submit(self, commit: SmallCommit) -> Future[Timestamp]:
        """Commit as `run` does, without waiting. The future cannot be cancelled."""
        future: Future[Timestamp] = Future()
        future.set_running_or_notify_cancel()
        waiting = CommitRequest(commit, future)
        with self._mutex:
            self._queue.append(waiting)
            leads, self._leading = not self._leading, True
        if leads:
            self._lead_on_thread()
        return future

    def take(self, group: list[CommitRequest]) -> None:
        """Add those who wait to a group, as many as one may have."""
        size, queue = 0, self._queue
        with self._mutex:
            while queue and len(group) < GROUP_MEMBERS and size < GROUP_BYTES:
                group.append(queue.popleft())
                if queue:
                    size += group[-1].size

    def close(self) -> None:
        """Wait for the commits that are on their way."""
        self._thread.leave()
        while self._leading:
            time.sleep(0.001)
        self._thread.close()

    def _wait(self, waiting: CommitRequest, deadline: int | None) -> bool:
        """Until it has ended, or is to lead; True when it is to lead."""
        assert waiting.wake is not None
        self._thread.leave()
        seconds = patience()
        if seconds is None and deadline is not None:
            seconds = max(deadline - clock.monotonic_micros(), 0) / 1e6
        if seconds is not None:
            if waiting.wake.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
                return not waiting.ended
            self._withdraw(waiting)
        waiting.wake.acquire()
        return not waiting.ended

    def _withdraw(self, waiting: CommitRequest) -> None:
        with self._mutex:
            if waiting.leads or waiting not in self._queue:
                return  # it is being written, or its turn has come
            self._queue.remove(waiting)
        if patience() is not None:
            raise BusyError("others write to the store, and background work does not wait for them")
        raise TransactionTimedOutError(
            f"transaction {waiting.commit.txn_id} timed out while it waited for others that write "
            "to the store, and was not written. Begin a new transaction, with a longer timeout"
        )

    def on_thread(self, fn: Callable[[], object]) -> None:
        """Call on the library's thread; where none is to be had, here."""
        if not self._thread.hand(fn):
            fn()

    def _lead_on_thread(self) -> None:
        self._due = True
        self.on_thread(self._lead_when_due)

    def _lead_when_due(self) -> None:
        with self._mutex:
            due, self._due = self._due, False
        if due:
            self._lead()

    def _lead(self, *, wait: bool = True) -> bool:
        """Commit one group, then pass the lead on to who came meanwhile.

        Returns:
            False when it was not to wait, and handed the lead over to the library's thread.
        """
        group: list[CommitRequest] = []
        busy = False
        try:
            self._commit_group(group, wait)
        except BusyError:
            busy = True
        except BaseException as error:
            if not group:  # it broke before the write lock was had: nobody else is concerned
                self.take(group)
            for waiting in group:
                if waiting.error is None:
                    waiting.error = _own(error, waiting)
            if not isinstance(error, Exception):
                raise
        finally:
            if busy:
                with self._mutex:
                    first = self._queue[0]  # the caller's, that may be withdrawn now
                    first.leads = False
                    first.wake = first.wake or new_baton()
                self._lead_on_thread()
            else:
                asked: list[CommitRequest] = []
                for waiting in group:
                    waiting.stamp = waiting.given if waiting.error is None else None
                    waiting.ended = True
                    if waiting.future is not None:
                        asked.append(waiting)
                if asked and is_calm() and self._thread.hand(partial(_tell, asked)):
                    asked = []
                self.pass_on()
                for waiting in group:
                    if waiting.wake is not None:
                        waiting.wake.release()
                if asked:
                    _tell(asked)
        return not busy


def _tell(asked: list[CommitRequest]) -> None:
    for waiting in asked:
        waiting.tell()


def _own(error: BaseException, waiting: CommitRequest) -> BaseException:
    """An error of its own for each member: threads raise them at the same time."""
    if isinstance(error, CommitOutcomeUnknownError):
        return CommitOutcomeUnknownError(str(error), waiting.commit.txn_id)
    if isinstance(error, TxnkvError):
        return type(error)(str(error))
    return broke_off(error)


def broke_off(error: BaseException) -> UnavailableError:
    """Return the error of a commit that broke off before its commit point."""
    return UnavailableError(f"the commit broke off ({error!r}). Nothing was committed, try again")


def unknown(error: BaseException) -> CommitOutcomeUnknownError:
    """Return the error of a commit that broke off at its commit point."""
    return CommitOutcomeUnknownError(
        f"the transaction's commit broke off ({error}). It is wholly committed or wholly not: when "
        "the disk is well again, ask client.transaction_state(error.txn_id)",
        0,
    )
