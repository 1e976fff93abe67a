"""Waiting for messages without I/O: the change number says whether there is anything to look at.

    consumer    mark()  look: nothing   sleep 1 ms, 2 ms, 4 ms ... 10 ms   wait() -> look again
    others      mark()  look: nothing   asleep, until the first wakes them
    tasks       mark()  look: nothing   told by the first, which is a thread of the library if no
                                        consumer waits in one of its own

Small commits of this process cut a sleep short, as soon as they are durable; those of others are
found when it is over.

Two things do not show in the number. A commit can be seen before it is durable: then readers
leave it out, and the log of commits asks the disk until it is. And offsets are given before
their batches are in LMDB: a reader that saw such (`pending`) looks at each step.

Those that share a subscription are a group, for which one looks at a time, the one that has not
looked for the longest. When it found something, the next one looks; where each has keys of its own,
in any case. All the others of the group look in their turn, one in each round; twice as many, where
those of the last round did not look.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from itertools import islice
from typing import Final

from txnkv.coordinator import CommitLog, Timestamp
from txnkv.errors import ClosedError, TxnkvError, require_number
from txnkv.storage import Runtime, clock, new_baton, new_lock, pass_baton

_FIRST: Final = 0.001
_LONGEST: Final = 0.010
_ASLEEP: Final = 5.0
"""Seconds after which one that sleeps looks by itself, should the leader have been stopped."""
_ROUND: Final = 100_000
"""Microseconds between two looks for what no change shows: leases that run out, the dead."""
_NO_TURN: Final = (0, 1)
_MOST_AT_ONCE: Final = 1024
_STAYS: Final = 1.0
"""Seconds for which the thread that looks for tasks is kept when none waits."""


def require_time(timeout: object) -> None:
    """Refuse a `timeout` with TypeError that is no number, with ValueError that is nan."""
    require_number("timeout", timeout)
    if timeout != timeout:
        raise ValueError(f"timeout is a number of seconds or None, not {timeout!r}")


def deadline(timeout: float | None) -> int | None:
    """Return when a wait that begins now is over, in monotonic microseconds; None for never."""
    if timeout is None or timeout == math.inf:
        return None
    require_time(timeout)
    return clock.monotonic_micros() + int(min(max(timeout, 0.0), 1e9) * 1e6)


class Watch:
    """All waits of one process for one store: one of them looks, for itself and the others.

    The leader sleeps in steps; the others sleep until it wakes them. When it has what it waited
    for, another leads. So a hundred that wait cost what one does.

    Args:
        runtime: has the change number.
        log: asks the disk until what was seen is durable.

    Attributes:
        noticed: the state of the store for which the leader woke others last.
    """

    def __init__(self, runtime: Runtime, log: CommitLog) -> None:
        self._runtime = runtime
        self._log = log
        self._lock = new_lock()
        self._leader: Waiting | None = None
        self.noticed = (0, Timestamp(0))
        self._next_round = 0
        self._asleep: dict[Waiting, threading.Lock] = {}
        self._told: dict[Waiting, Callable[[], object]] = {}
        # By group: until when no other of it is woken, and how many are then.
        self._turns: dict[Hashable, tuple[int, int]] = {}
        self._onlooker: _Onlooker | None = None
        self._more = new_baton()

    def now(self) -> tuple[int, Timestamp]:
        """Return what changes with the store."""
        return self._runtime.change_word(), self._log.latest()

    # -- threads ---------------------------------------------------------------------------

    def nap(self, waiting: Waiting, since: Timestamp, seconds: float) -> None:
        """Sleep for so long, or until a small commit of this process above `since` is durable."""
        baton = self._log.sleepers[waiting] = new_baton()
        try:
            if self._log.latest() == since:  # else it was before the log knew of this one
                baton.acquire(timeout=seconds)
        finally:
            self._log.sleepers.pop(waiting, None)

    def lead(self, waiting: Waiting) -> bool:
        """Look for all from now on, unless another does."""
        with self._lock:
            if self._leader is None:
                self._leader, self.noticed = waiting, waiting.seen
            return self._leader is waiting

    def leave(self, waiting: Waiting) -> None:
        """A wait ends: somebody else is to lead."""
        with self._lock:
            self._leave(waiting)

    def _leave(self, waiting: Waiting) -> None:
        if self._leader is waiting:
            self._leader = None
        if self._leader is None and self._asleep:
            pass_baton(next(iter(self._asleep.values())))

    def sleep(self, waiting: Waiting, seconds: float) -> bool:
        """Until somebody wakes it, or for so long.

        Returns:
            False: it was woken, to look when that is its turn, or else to lead.
        """
        baton = new_baton()
        with self._lock:
            if self._leader is None:
                return False
            self._asleep[waiting] = baton
        try:
            return self._is_due(waiting) or not baton.acquire(timeout=seconds)
        finally:
            with self._lock:
                self._asleep.pop(waiting, None)

    # -- tasks -----------------------------------------------------------------------------

    def tell(self, waiting: Waiting, wake: Callable[[], object]) -> None:
        """Have `wake` called once, by whichever thread, when this one may find something."""
        with self._lock:
            if waiting.is_ended:
                return
            self._told[waiting] = wake
            if self._onlooker is None:
                self._onlooker = _Onlooker(self, None, lambda: not self._told)
                try:
                    threading.Thread(
                        target=self._look_for_tasks, name="txnkv-waiting", daemon=True
                    ).start()
                except RuntimeError:  # the machine gives none
                    self._onlooker = None
                    del self._told[waiting]
                    raise
            self._onlooker.hurry()
        pass_baton(self._more)
        if self._is_due(waiting):
            self._wake_in_turn([waiting])

    def _look_for_tasks(self) -> None:
        onlooker = self._onlooker
        assert onlooker is not None
        try:
            while True:
                onlooker.wait(False)
                if not self._more.acquire(timeout=_STAYS):
                    with self._lock:
                        if not self._told:
                            self._onlooker = None
                            return
        except BaseException as error:  # each of them meets it
            with self._lock:
                self._onlooker, told = None, list(self._told)
            for waiting in told:
                self._wake(waiting)
            if not isinstance(error, ClosedError):
                raise

    def forget(self, waiting: Waiting) -> None:
        """Tell this one no more; and do what a signal kept its `wait` from doing at its end."""
        with self._lock:
            waiting.is_ended = True
            self._told.pop(waiting, None)
            self._asleep.pop(waiting, None)
            self._log.sleepers.pop(waiting, None)
            self._leave(waiting)

    def drop(self, waiting: Waiting) -> None:
        """`forget` in a finalizer, whose thread may have the lock."""
        waiting.is_ended = True
        self._told.pop(waiting, None)

    # -- whose turn it is ------------------------------------------------------------------

    def notice(self) -> None:
        """Wake whom a change concerns; now and then also whom something else does."""
        now, due = self.now(), clock.monotonic_micros()
        is_round = due >= self._next_round
        if now == self.noticed and now[0] & 1 == 0 and not is_round:
            return
        self.noticed = now
        waiting = self._all()
        self._wake_in_turn(each for each in waiting if each.is_new(now))
        if is_round:
            self._next_round = due + _ROUND
            stirred = []
            for each in waiting:
                try:
                    if each.is_stirred():
                        stirred.append(each)
                except TxnkvError:  # not what a handler raises
                    self._wake(each)
            self._wake_in_turn(stirred)

    def pass_on(self, waiting: Waiting, *, leaves: bool) -> None:
        """One of a group has looked: it is the turn of another."""
        if waiting.group is None:
            return
        if waiting.is_chosen:
            waiting.is_chosen = False
            self._turns.pop(waiting.group, None)
        elif not leaves:
            return
        if leaves or waiting.each_its_own:
            with suppress(ClosedError):
                now = self.now()
                others = (each for each in self._all() if each.group == waiting.group)
                self._wake_in_turn(
                    [each for each in others if each is not waiting and each.is_behind(now)]
                )

    def _is_due(self, waiting: Waiting) -> bool:
        """Tell whether something changed before this one was known here, which no other of its
        group looks for: who does passes on to it.
        """
        is_behind = waiting.is_behind(self.now())
        return is_behind and self._turns.get(waiting.group, _NO_TURN)[0] <= clock.monotonic_micros()

    def _all(self) -> list[Waiting]:
        with self._lock:
            found = [*self._asleep, *self._told]
            return found if self._leader is None else [*found, self._leader]

    def _wake_in_turn(self, waiting: Iterable[Waiting]) -> None:
        """Wake these; of each group the one that has not looked for the longest, unless another
        of it is looking. That one has its turn for a while. Where it does not pass it on, as one
        of a loop that is blocked or closed, it is the turn of two, then of four.
        """
        groups: dict[Hashable, list[Waiting]] = {}
        for each in waiting:
            if each.group is None:
                self._wake(each)
            else:
                groups.setdefault(each.group, []).append(each)
        for group, members in groups.items():
            until, several = self._turns.get(group, _NO_TURN)
            if until <= clock.monotonic_micros():
                # One that is awake looks, or passes on, before it sleeps.
                able = (each for each in sorted(members, key=_seen) if self._choose(each, several))
                deque(islice(able, several), maxlen=0)

    def _choose(self, waiting: Waiting, several: int) -> bool:
        """It is the turn of this one, unless it is awake."""
        with self._lock:
            if not (waiting in self._asleep or waiting in self._told or waiting is self._leader):
                return False
            next_time = min(2 * several, _MOST_AT_ONCE)
            self._turns[waiting.group] = clock.monotonic_micros() + _ROUND, next_time
            waiting.is_chosen = True
        self._wake(waiting)
        return True

    def _wake(self, waiting: Waiting) -> None:
        with self._lock:
            wake = self._told.pop(waiting, None)
            baton = self._asleep.get(waiting) or self._log.sleepers.get(waiting)
        if wake is not None:
            wake()
        elif baton is not None:
            pass_baton(baton)


class Waiting:
    """One wait for something new in a store. A thread calls `wait`, or a task lets itself be told.

    Args:
        watch: of the store.
        until: from `deadline`.
        check: called at each step, also by the one that looks for all: whether something may be
            there that no change shows; what it raises ends the wait.
        group: of which one looks at a time; None: it looks whenever something changes.
        each_its_own: what one of the group does not find another may.
        is_concerned: called in whichever thread when the store has changed: whether there may be
            something new for this one. Where it raises, a look is to meet that.

    Attributes:
        seen: the state of the store at the last look.
        is_chosen: it is this one's turn to look.
        is_ended: it waits no more.
    """

    def __init__(
        self,
        watch: Watch,
        until: int | None,
        check: Callable[[], object] = lambda: None,
        group: Hashable | None = None,
        *,
        each_its_own: bool = False,
        is_concerned: Callable[[], bool] = lambda: True,
    ) -> None:
        self._watch = watch
        self._is_concerned = is_concerned
        self._until = until
        self._check = check
        self.group, self.each_its_own = group, each_its_own
        self.seen = (0, Timestamp(0))
        self._step = _FIRST
        self.is_chosen = self.is_ended = False

    @property
    def is_over(self) -> bool:
        """Tell whether the time is over."""
        return self._until is not None and clock.monotonic_micros() >= self._until

    def mark(self) -> None:
        """Before a look: what it finds, or does not, is as of now or later."""
        self.seen = self._watch.now()

    def wait(self, pending: bool) -> bool:
        """Until there may be something new since `mark`.

        Args:
            pending: the look saw signs of messages that are on their way.

        Returns:
            False when the time is over.
        """
        watch = self._watch
        watch.pass_on(self, leaves=False)
        try:
            while not self.is_over:
                leads, alone = watch.lead(self), self.group is None
                if leads or pending:
                    since = watch.noticed[1] if leads else self.seen[1]
                    watch.nap(self, since, self._at_most(self._step))
                    self._step = min(self._step * 2, _LONGEST)
                    if leads:
                        watch.notice()
                else:
                    alone |= watch.sleep(self, self._at_most(_ASLEEP))
                if self._check() or pending:
                    return True
                if (alone or self.is_chosen) and self.is_new(watch.now()):
                    return True
            return False
        finally:
            watch.leave(self)

    def tell(self, wake: Callable[[], object]) -> None:
        """Have `wake` called once, in whichever thread, when there may be something new since
        `mark`. After `end` it is not called.
        """
        self._watch.pass_on(self, leaves=False)
        self._watch.tell(self, wake)

    def end(self) -> None:
        """Wait no more: what comes next is for another of the group."""
        if not self.is_ended:
            self._watch.forget(self)
            self._watch.pass_on(self, leaves=True)

    def drop(self) -> None:
        """`end` in a finalizer: without a lock, and without a word to the others of the group, for
        whom its turn runs out.
        """
        self._watch.drop(self)

    def is_behind(self, now: tuple[int, Timestamp]) -> bool:
        """Tell whether the store has changed since `mark`."""
        return now != self.seen and self._may_find()

    def is_new(self, now: tuple[int, Timestamp]) -> bool:
        """Tell whether the store has changed since `mark`, or is about to."""
        return (now != self.seen or now[0] & 1 == 1) and self._may_find()

    def _may_find(self) -> bool:
        try:
            return self._is_concerned()
        except TxnkvError:  # not what a handler raises
            return True

    def is_stirred(self) -> bool:
        """Tell whether something may be there that no change shows; raise what ends the wait."""
        return bool(self._check())

    def _at_most(self, seconds: float) -> float:
        if self._until is None:
            return seconds
        return min(seconds, max(self._until - clock.monotonic_micros(), 0) / 1e6)


class _Onlooker(Waiting):
    """A wait of the library's thread, which looks for tasks and wants nothing itself."""

    def hurry(self) -> None:
        """A wait begins: most are short."""
        self._step = _FIRST

    def is_new(self, now: tuple[int, Timestamp]) -> bool:
        """Tell that it is not: nothing concerns this one."""
        return False

    def is_behind(self, now: tuple[int, Timestamp]) -> bool:
        """Tell that it is not."""
        return False

    def is_stirred(self) -> bool:
        """Tell whether none waits that it looks for."""
        return False


def _seen(waiting: Waiting) -> tuple[int, Timestamp]:
    return waiting.seen
