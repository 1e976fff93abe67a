"""Who waits to commit, and who does it for all.

The first to come leads: it commits one group, all who wait when it has the write lock, then
passes the lead on to the first of those who came meanwhile. Each thread sleeps on a lock of its
own and is woken once, to lead or to go on with its answer. Futures are led by a thread of the
library.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import apsw

from txnkv.coordinator.ids import Timestamp
from txnkv.coordinator.payload import Section
from txnkv.errors import CommitOutcomeUnknownError, TxnkvError, UnavailableError

GROUP_MEMBERS: Final = 1024
GROUP_BYTES: Final = 16 << 20


@dataclass(frozen=True)
class SmallCommit:
    """What is to be committed in one row of the log.

    Attributes:
        txn_id: local id of the transaction.
        sections: what it changes in memory.
        validate: called with the cursor of the SQLite transaction and the latest commit
            timestamp, when all that committed before is in memory; raises to refuse.
        write: called with the same cursor and the commit's timestamp once `validate` has passed,
            for what it changes in status.db; gives the sections that were not known before.
            It refuses nothing: what it raises breaks the commit of all in the group.
        size: bytes of the sections that `write` will give.
    """

    txn_id: int
    sections: Sequence[Section]
    validate: Callable[[apsw.Cursor, Timestamp], None]
    write: Callable[[apsw.Cursor, Timestamp], Sequence[Section]] | None = None
    size: int = 0


class Waiting:
    """A commit in the queue, and how its thread hears of the end."""

    __slots__ = ("commit", "error", "future", "leads", "size", "stamp", "wake")

    def __init__(self, commit: SmallCommit, future: Future[Timestamp] | None) -> None:
        self.commit = commit
        self.future = future
        self.size = commit.size + sum(len(section.data) for section in commit.sections)
        self.stamp: Timestamp | None = None
        self.error: BaseException | None = None
        self.leads = False
        self.wake: threading.Lock | None = None
        if future is None:
            self.wake = threading.Lock()
            self.wake.acquire()

    @property
    def ended(self) -> bool:
        return self.stamp is not None or self.error is not None

    def tell(self) -> None:
        if self.wake is not None:
            self.wake.release()
        elif self.future is not None:
            if self.error is not None:
                self.future.set_exception(self.error)
            else:
                assert self.stamp is not None
                self.future.set_result(self.stamp)


class CommitQueue:
    """The commits of one process that wait for each other.

    Args:
        commit_group: takes a group with `take` once it has the write lock, and commits it:
            each member has a stamp or an error then. What it raises is everybody's error.
    """

    def __init__(self, commit_group: Callable[[list[Waiting]], None]) -> None:
        self._commit_group = commit_group
        self._queue: deque[Waiting] = deque()
        self._mutex = threading.Lock()
        self._leading = False
        self._committer: ThreadPoolExecutor | None = None

    def run(self, commit: SmallCommit) -> Timestamp:
        """Commit with whoever else does now; raises what refused it."""
        waiting = Waiting(commit, None)
        if not self._join(waiting):
            self._wait(waiting)
        if not waiting.ended:
            self._lead()
        if waiting.error is not None:
            raise waiting.error
        assert waiting.stamp is not None
        return waiting.stamp

    def submit(self, commit: SmallCommit) -> Future[Timestamp]:
        """As `run`, without waiting. The future cannot be cancelled."""
        future: Future[Timestamp] = Future()
        future.set_running_or_notify_cancel()
        if self._join(Waiting(commit, future)):
            self._hand_over()
        return future

    def take(self, group: list[Waiting]) -> None:
        """Add those who wait to a group, as many as one may have."""
        size = 0
        with self._mutex:
            while self._queue and len(group) < GROUP_MEMBERS and size < GROUP_BYTES:
                waiting = self._queue.popleft()
                size += waiting.size
                group.append(waiting)

    def close(self) -> None:
        """Wait for the commits that are on their way."""
        if self._committer is not None:
            self._committer.shutdown(wait=True)

    def _join(self, waiting: Waiting) -> bool:
        """Queue up; True when the caller is to lead."""
        with self._mutex:
            self._queue.append(waiting)
            waiting.leads, self._leading = not self._leading, True
            return waiting.leads

    def _wait(self, waiting: Waiting) -> None:
        """Until it has ended, or is to lead."""
        assert waiting.wake is not None
        try:
            waiting.wake.acquire()
        except BaseException:  # an interrupt of the waiting thread
            with self._mutex:
                if not waiting.leads and waiting in self._queue:
                    self._queue.remove(waiting)
                    raise
            waiting.wake.acquire()
            if not waiting.ended:
                self._lead()
            raise

    def _hand_over(self) -> None:
        if self._committer is None:
            with self._mutex:
                if self._committer is None:
                    self._committer = ThreadPoolExecutor(1, thread_name_prefix="txnkv-commit")
        self._committer.submit(self._lead)

    def _lead(self) -> None:
        """Commit one group, then pass the lead on to who came meanwhile."""
        group: list[Waiting] = []
        try:
            self._commit_group(group)
        except BaseException as error:
            if not group:  # it broke before the write lock was had: nobody else is concerned
                self.take(group)
            for waiting in group:
                if waiting.error is None:
                    waiting.error = _own(error, waiting)
                    waiting.stamp = None
            if not isinstance(error, Exception):
                raise
        finally:
            self._pass_on()
            for waiting in group:
                waiting.tell()

    def _pass_on(self) -> None:
        with self._mutex:
            next_one = self._queue[0] if self._queue else None
            self._leading = next_one is not None
            if next_one is None:
                return
            next_one.leads = True
        if next_one.wake is not None:
            next_one.wake.release()
        else:
            self._hand_over()


def _own(error: BaseException, waiting: Waiting) -> BaseException:
    """An error of its own for each member: threads raise them at the same time."""
    if isinstance(error, CommitOutcomeUnknownError):
        return CommitOutcomeUnknownError(str(error), waiting.commit.txn_id)
    if isinstance(error, TxnkvError):
        return type(error)(str(error))
    return UnavailableError(f"the commit broke off ({error!r}). Nothing was committed, try again")
