"""The commit log: small transactions become durable together, and all processes hear of them.

A small transaction's changes are the payload of one row of the commit log; that row is its
commit point. Threads that commit at one moment share one SQLite transaction and one fsync: the
first to come leads, takes all who wait by the time it has the write lock, and while the disk
works the next ones gather. Who finds nobody commits by itself, with fewer steps (`commit_alone`).

    T1 leads   [ T1            ]        validate, stamp, apply, COMMIT; the lock is free; fsync
    T2, T3, T4 wait ...         [ T2 T3 T4 ]        one of them leads
    T5 ...                                  [ T5 ... ]

The write lock is free before the fsync, so that groups of several processes are on their way to
the disk at once. A commit can then be seen in status.db before it is durable; `latest` leaves
those out until they are, or makes them so.

Each member is validated against all that committed before it, earlier members of its group
included: those are applied to this process's memory at once, under stamps that no snapshot
reaches before the COMMIT has succeeded. If it fails, memory is put back.

Other processes tail the log: `latest` reads what came since the last look, whenever the change
number says that there may be something. A commit stays in the log until a flush has put it into
row sets, and for a while longer, for those who ask what became of it.

Lock order: the fork gate, the write lock of status.db, then `lock`; a reader takes the first and
the last.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Final

import apsw

from txnkv.coordinator import commit_queue, held
from txnkv.coordinator import payload as payloads
from txnkv.coordinator.commit_queue import CommitQueue, CommitRequest, SmallCommit
from txnkv.coordinator.held import Key
from txnkv.coordinator.ids import Timestamp, following, reach, stamp_of
from txnkv.coordinator.payload import LogMember, PayloadError, Section
from txnkv.coordinator.status_schema import one_whole
from txnkv.errors import CorruptionError, StorageFullError, TxnkvError, UnavailableError
from txnkv.metrics import Metrics
from txnkv.storage import (
    GATE,
    BusyError,
    Store,
    armed,
    brief,
    clock,
    declare_fault_point,
    fault_point,
    new_epoch,
    new_rlock,
    pass_baton,
)

declare_fault_point("log.written", "a group of small commits is written, COMMIT was not called")
declare_fault_point("log.durable", "a group of small commits is durable, nobody was told")

_INSERT: Final = "INSERT INTO commit_log VALUES (?, ?, ?)"
_NO_NUMBER: Final = (1 << 64) - 1

_PATIENCE: Final = 10_000
"""Microseconds for which a commit of another process that is not durable is left out."""


class CommitLog:
    """Small commits of one store in this process. Shared by threads.

    Attributes:
        lock: held while memory takes commits in; whoever pairs memory with row sets holds it.
        runtime: the store's.
        visible: the latest snapshot as of the last look.
        shown: five words (csrc/native/published.h): the change number for which memory is complete,
            the latest snapshot, the change numbers while this process's group is written, and up to
            where memory has all, durable or not.
        sleepers: batons that are passed when a group of commits is durable.
        version, catalog_version, history_floor: of the manifest, the catalog and the history, as
            of the last look.
    """

    def __init__(
        self, store: Store, metrics: Metrics, on_commit: Callable[[], None] = lambda: None
    ) -> None:
        """Begins with empty memory; `on_commit` is called after each group of commits."""
        self._status = store.status
        self.runtime = store.runtime
        self._metrics = metrics
        self._on_commit = on_commit
        self._members: dict[int, LogMember] = {}
        self._lost: set[Key] = set()
        self.lock = new_rlock()
        self.shown = memoryview(bytearray(40)).cast("Q")
        self._start()

    def _start(self) -> None:
        self.history_floor = Timestamp(0)
        self._last_given = 0
        self.visible = Timestamp(0)
        self._after: int | None = None  # change number after the last group of this process
        self._before: Timestamp | None = None  # the group: the latest commit, where it was had
        self._taken: list[Sequence[Section]] = []  # what the group has changed in memory
        self._waiting_since = 0
        self.sleepers: dict[object, threading.Lock] = {}
        self.queue = CommitQueue(self._commit_group)
        self.locked = True
        self._begin_again()

    def _begin_again(self) -> None:
        """Hold nothing: the next look reads all of it."""
        self.version = self.catalog_version = 0
        self._applied = self._flushed = Timestamp(0)
        self._current: int | None = None  # change number for which memory and clock are complete
        self._known: tuple[int, Timestamp] | None = None
        self._in_flight: tuple[int, ...] = ()  # change numbers while this process's group is
        self.pending_bytes = self.pending_commits = 0
        self._show()
        for member in self._members.values():
            member.reset()

    def add_member(self, kind: int, member: LogMember) -> None:
        """Let `member` hold what sections of this kind change."""
        self._members[kind] = member

    def _show(self) -> None:
        """Have point reads, which go no further, know what `latest` may answer; after each change
        of it.
        """
        known, shown = self._known, self.shown
        shown[0] = _NO_NUMBER  # first: nobody reads the rest by halves
        shown[4] = self._applied
        if known is not None:
            shown[2], shown[3] = self._in_flight or (_NO_NUMBER, _NO_NUMBER)
            shown[1] = known[1]
            shown[0] = known[0]

    # -- reading -----------------------------------------------------------------------

    def latest(self) -> Timestamp:
        """The latest snapshot. All small commits at or below it are in memory here."""
        known = self._known
        if known is not None:
            number = self.runtime.change_word()
            # Nothing was acknowledged since then, if all that is on its way to the disk is this
            # process's own group: its COMMIT makes the number odd, and then one higher.
            if number == known[0] or number in self._in_flight:
                return known[1]
        return self._look()

    def refresh(self) -> None:
        """Know the catalog and the manifest, and hold in memory what is committed, durable or not,
        as of now.
        """
        number = self.runtime.change_word()
        if number != self._current and number not in self._in_flight:
            self._look()

    def show_others(self) -> None:
        """After a conflict: have the next snapshot see what other processes committed, also where
        it is not on the disk yet. A group of this process is on its way there.
        """
        if not self._in_flight:
            with suppress(UnavailableError):  # they see to it
                self._status.sync_what_was_seen()

    def tail(self, upto: Timestamp) -> None:
        """Make sure that all commits at or below `upto`, a snapshot of any process, are here."""
        if upto > self._applied:
            self._look()

    def catch_up(self, cur: apsw.Cursor) -> Timestamp:
        """Take in all that committed before the transaction of this cursor, durable or not, and so
        never goes back: of a write of status.db, or a read that has not read anything yet.

        Returns:
            The latest commit timestamp: above what `latest` answers, if it is not durable yet.
        """
        with self.lock:
            self._catch_up(cur)
            return self._applied

    @brief
    def _look(self) -> Timestamp:
        with GATE.use(), self.lock:
            number = self.runtime.change_number()
            first = self.visible == 0
            if first or number is None or number != self._current:
                with self._status.read(durable=first) as cur:
                    self._catch_up(cur)
                self._current = number
            if first:  # its end has made all of it durable
                self.runtime.raise_durable(self._applied)
            durable = self._applied if first else self._durable()
            self.visible = max(self.visible, durable)
            complete = number is not None and self.visible >= self._applied
            self._known = (number, self.visible) if complete else None  # type: ignore[assignment]
            self._show()
            return self.visible

    def _known_at(self, number: int | None) -> tuple[int, Timestamp] | None:
        """Return what `latest` may go on answering while this process has the write lock."""
        if number is None or (self._known is not None and self._known[0] == number):
            return self._known if number is not None else None
        if self.runtime.durable_upto(self._applied) < self._applied:
            return None
        self.visible = max(self.visible, self._applied)
        return number, self.visible

    def _durable(self) -> Timestamp:
        """Up to where what is in memory is on the disk; after a while, all of it."""
        durable = Timestamp(self.runtime.durable_upto(self._applied))
        if durable >= self._applied:
            self._waiting_since = 0
            return durable
        now = clock.monotonic_micros()
        if self._waiting_since == 0:
            self._waiting_since = now
        elif now - self._waiting_since > _PATIENCE:  # its writer may be dead, or stopped
            self._status.sync()
            self.runtime.raise_durable(self._applied)
            self._waiting_since = 0
            return self._applied
        return durable

    def _catch_up(self, cur: apsw.Cursor) -> None:
        last, self._last_given, version, catalog_version, flushed, floor, self.locked = one_whole(
            cur,
            "SELECT last_commit, last_timestamp, manifest_version, catalog_version, flushed_ts, "
            "history_floor, EXISTS (SELECT 1 FROM locks) FROM clock",
        )
        if self._lost and catalog_version != self.catalog_version:
            self._read_lost_again(cur, flushed)
        if flushed > self._applied:
            for section, stamp in held.sections(cur, self._applied):
                self._take(section, stamp)
        if last > self._applied:
            self._metrics.tails.add()
            size = commits = 0
            for stamp, payload in payloads.logged(cur, max(self._applied, flushed), last):
                whole = payloads.unpack_whole(payload, stamp)
                if whole is None:
                    for section in self._unpacked(payload, stamp):
                        self._take(section, stamp)
                else:
                    for kind, id, data in whole:
                        self._members[kind].apply(id, data, stamp)
                size += len(payload)
                commits += 1
            self._count(size, commits)
            self._metrics.tailed_commits.add(commits)
        before = self.version, self.catalog_version
        self.version, self.catalog_version = version, catalog_version
        if (version, catalog_version) != before:
            new_epoch()
        # Last: `tail` asks no more, and who reads then finds the row sets of large commits too.
        self._applied = max(self._applied, Timestamp(last))
        self.raise_floor(floor)
        if flushed > self._flushed:
            self._flushed = Timestamp(flushed)
            self.pending_bytes = self.pending_commits = 0
            self._metrics.log_bytes.set(0)
            self._metrics.log_commits.set(0)
            kept = held.parts(cur)
            for kind, member in self._members.items():
                member.flushed(self._flushed, {id for each, id in kept if each == kind})

    def write_out(self, upto: Timestamp) -> dict[Key, str]:
        """Before a flush is published: as `LogMember.write_out`, of all members."""
        failed: dict[Key, str] = {}
        for member in self._members.values():
            failed |= member.write_out(upto)
        return failed

    def raise_floor(self, floor: int) -> None:
        """Remember a history floor that status.db was seen to have."""
        if floor > self.history_floor:
            self.history_floor = Timestamp(floor)
            new_epoch()

    def _unpacked(self, payload: bytes, stamp: int) -> list[Section]:
        try:
            return payloads.unpack(payload, stamp)
        except PayloadError as error:
            raise CorruptionError(
                f"{self._status.path}, commit log, commit {stamp}: {error}. Nothing of it was "
                "returned. Restore the store from a backup"
            ) from None

    def _take(self, section: Section, stamp: int) -> None:
        """Apply a stored section, or have it known that it is damaged."""
        if section.is_whole(stamp):
            self._members[section.kind].apply(section.id, section.data, stamp)
            return
        self._lost.add((section.kind, section.id))
        error = f"what commit {stamp} changed there is damaged in {self._status.path}, commit log"
        self._members[section.kind].lose(section, stamp, error)

    def _read_lost_again(self, cur: apsw.Cursor, flushed: int) -> None:
        """Somebody may have given up what was damaged, or have put it back."""
        lost, self._lost = self._lost, set()
        for kind, id in lost:
            self._members[kind].forget(id)
        again = list(held.sections(cur, Timestamp(0)))
        for stamp, payload in payloads.logged(cur, flushed, self._applied):
            again += [(section, Timestamp(stamp)) for section in self._unpacked(payload, stamp)]
        for section, stamp in again:
            if (section.kind, section.id) in lost:
                self._take(section, stamp)

    def _count(self, size: int, commits: int) -> None:
        self.pending_bytes += size
        self.pending_commits += commits
        self._metrics.log_bytes.value = self.pending_bytes
        self._metrics.log_commits.value = self.pending_commits

    # -- committing --------------------------------------------------------------------

    def commit(self, commit: SmallCommit, deadline: int | None = None) -> Timestamp:
        """Make a small transaction durable and visible. Called where no signal interrupts.

        Args:
            commit: what it changes.
            deadline: monotonic microseconds until which it may wait for its turn.

        Raises:
            TransactionTimedOutError: it was not written by then, and is not any more.
            What `validate` raises; nothing was committed.
            StorageFullError: no room; nothing was committed.
            CommitOutcomeUnknownError: the disk failed at the commit point.
        """
        return self.outcome(self.offer(commit, deadline), deadline)

    def offer(self, commit: SmallCommit, deadline: int | None = None) -> CommitRequest:
        """Begin to `commit`; it has ended already, where nobody else commits."""
        request = self.queue.offer(commit, deadline)
        if request.stamp is not None:
            self._metrics.commit_seconds.observe(time.monotonic() - request.began)
        return request

    def outcome(self, request: CommitRequest, deadline: int | None = None) -> Timestamp:
        """Wait for what was offered; raises as `commit`."""
        if request.stamp is not None:
            return request.stamp
        stamp = self.queue.outcome(request, deadline)
        self._metrics.commit_seconds.observe(time.monotonic() - request.began)
        return stamp

    def commit_alone(self, commit: SmallCommit) -> Timestamp | None:
        """`commit` with fewer steps, where nobody else in this process is about to.

        Returns:
            None when nothing was done: `offer` is the way.
        """
        if commit.write is not None or not commit.sections or not self.queue.lead():
            return None
        began = time.monotonic()
        try:
            try:
                with GATE.use():
                    written = self._write_alone(commit)
            except StorageFullError:
                self._status.after_turn(full=True)
                raise
            if written is None:
                return None
            self._status.after_turn()
            self._on_commit()
            self._make_durable(*written)
        finally:
            self.queue.pass_on()
        self._metrics.commit_seconds.observe(time.monotonic() - began)
        return written[1]

    def commit_async(self, commit: SmallCommit) -> Future[Timestamp]:
        """`commit` on the library's thread: any number may be under way at once."""
        return self.queue.submit(commit)

    def _commit_group(self, group: list[CommitRequest], wait: bool) -> None:
        """Commit all who wait, durably."""
        number, last = self._commit_unsynced(group, wait)
        if last is not None:
            self._on_commit()
            self._make_durable(number, last)

    def _make_durable(self, number: int | None, last: Timestamp) -> None:
        """See to it that a group is on the disk, and that this is known; `number`: as it was after
        it, None where another thing came between; `last`: the highest stamp of the group.
        """
        try:
            self._status.sync()
            if armed:
                fault_point("log.durable")
            self.runtime.raise_durable(last)
        except BaseException as error:
            self._forget()
            raise commit_queue.unknown(error) from error
        with self.lock:
            self._in_flight = ()
            if last > self.visible:
                self.visible = last
            self._known = None if number is None else (number, last)
            self._show()
        if self.sleepers:
            self.wake()

    def moved_on(self, number: int | None) -> None:
        """A write of this process was the next after `number`, and changed nothing that is here."""
        with self.lock:
            if number is not None and number == self._current:
                self._after = None if self._after != number else number + 2
                self._current = number + 2
                if self._known is not None and self._known[0] == number:
                    self._known = number + 2, self._known[1]
                    self._show()

    def wake(self) -> None:
        """Wake the sleepers: something is durable, here or in a log."""
        for baton in tuple(self.sleepers.values()):
            pass_baton(baton)

    def _forget(self) -> None:
        """Nothing of this process is on its way, and nothing is known: the next one looks."""
        with self.lock:
            self._in_flight = ()
            self._known = None
            self._show()

    def _undo(self) -> None:
        """Before the next writer's turn: what it takes in must not find the group here."""
        with self.lock:
            if self._before is not None:
                # What others committed and was taken in meanwhile comes again.
                self._applied = min(self._applied, self._before)
            self._forget()
            self._current = None
            if self._before is None:
                return
            try:
                touched = {section[:2] for sections in self._taken for section in sections}
                for kind, member in self._members.items():
                    member.undo({id for each, id in touched if each == kind}, self._before)
            except MemoryError:  # nothing of it may stay
                self._begin_again()

    def _commit_unsynced(
        self, group: list[CommitRequest], wait: bool
    ) -> tuple[int | None, Timestamp | None]:
        """Commit all who wait. Answers the change number after, and the last stamp given."""
        status, last = self._status, None
        try:
            cur, failed = status.begin_write(wait=wait), None
            try:
                self._taken, self._before = [], None
                self.queue.take(group)
                with self.lock:
                    number = self.runtime.change_number()
                    if number is None or self._current != number:
                        self._catch_up(cur)
                    self._before = self._applied
                    last = self._write_group(cur, group)
                    self._let_fly(number)
                if armed:
                    fault_point("log.written")
            except BaseException as error:
                failed = error
                raise
            finally:
                status.end_write(cur, failed, False, self._undo)
        except BaseException as error:
            if last is not None and not isinstance(error, StorageFullError):
                raise commit_queue.unknown(error) from error
            raise
        # Every write of status.db moves the number on by two; another's since shows.
        number = None if number is None else number + 2
        self._note_written(number, last)
        return number, last

    def _let_fly(self, number: int | None) -> None:
        """Others go on with what is known, while a group is on its way to the disk."""
        known = self._known
        if number is None or known is None or known[0] != number:
            known = self._known = self._known_at(number)
            self._show()
        if number is not None and known is not None:
            self._in_flight = self.shown[2], self.shown[3] = (number + 1, number + 2)

    def _note_written(self, number: int | None, last: Timestamp | None) -> None:
        with self.lock:
            self._current = self._after = number
            if last is None:
                self._in_flight = ()
                self._show()
            else:
                self._applied = max(self._applied, last)
                self._last_given = max(self._last_given, last)

    def _write_alone(self, commit: SmallCommit) -> tuple[int, Timestamp] | None:
        """Write one commit of rows; as `_commit_unsynced`, or None as `commit_alone`."""
        status, written, self._before = self._status, False, None
        if not status.take_turn():
            return None
        try:
            with self.lock:
                number = self.runtime.change_number()
                if number is None or self._current != number:
                    with status.reading() as cur:
                        self._catch_up(cur)
                latest = self._applied
                if number is None or not commit.validate(None, latest):
                    return None
                stamp = following(self._last_given)
                # Others would wait for their turn meanwhile.
                nobody_else = number == self._after
                self._taken, self._before = [commit.sections], latest
                payload = payloads.take_in(self._members, commit.sections, stamp)
                self._let_fly(number)
            if armed:
                fault_point("log.written")
            written = True
            status.put(_INSERT, stamp, commit.txn_id, payload, hasten=nobody_else)
        except BusyError:
            self._undo()
            return None
        except BaseException as error:
            if self._before is not None:
                self._undo()
            if written and not isinstance(error, StorageFullError):
                raise commit_queue.unknown(error) from error
            if isinstance(error, Exception) and not isinstance(error, TxnkvError):
                raise commit_queue.broke_off(error) from error
            raise
        finally:
            status.end_turn()
        self._note_written(number + 2, stamp)
        self._count_written(1, 1, len(payload))
        return number + 2, stamp

    def _write_group(self, cur: apsw.Cursor, group: Sequence[CommitRequest]) -> Timestamp | None:
        """Validate, stamp and write the members. Answers the last stamp given."""
        stamp = following(self._last_given)
        latest = self._applied
        rows = []
        made = size = 0
        for waiting in group:
            commit = waiting.commit
            if made:
                stamp = stamp_of(latest + 1)
            try:
                commit.validate(cur, latest)
            except TxnkvError as error:
                waiting.error = error
                continue
            sections = commit.sections
            if commit.write is not None:
                sections = [*sections, *commit.write(cur, stamp)]
            waiting.given = latest = stamp
            made += 1
            if not sections and commit.txn_id == 0:
                continue  # nobody asks for it, and there is nothing to be told
            self._taken.append(sections)
            payload = payloads.take_in(self._members, sections, stamp)
            size += len(payload)
            rows.append((stamp, commit.txn_id, payload))
        if not made:
            return None
        for row in rows:
            self._status.append(_INSERT, *row)
        if not rows or rows[-1][0] != latest:  # else the row says so
            reach(cur, latest)
        self._count_written(made, len(rows), size)
        return latest

    def _count_written(self, made: int, rows: int, size: int) -> None:
        self._count(size, rows)
        metrics = self._metrics
        metrics.group_size.observe(made)
        metrics.commit_groups.value += 1
        metrics.small_commits.value += made
        metrics.commits.value += made
        metrics.log_written_bytes.value += size

    # -- looking after -----------------------------------------------------------------

    def close(self) -> None:
        """Wait for the commits that are on their way."""
        self.queue.close()

    def after_fork_in_child(self) -> None:
        """Memory may have been inherited half written: everything is read again."""
        self._start()
