"""All locks of the package, made in one place, so that a forked child gets each of them free.

A child inherits the memory of its parent and not its threads: a lock that another thread held
at that moment is never released there. Every lock, condition and event comes from here, is
kept by a weak reference, and is made anew in the child before anything else runs. What keeps
and what drops the reference is C: each transaction makes some, and no signal gets in between.

The order: the fork gate (`fork.GATE`), then a lock. Whoever holds a lock under which the store is
read enters the gate first. The other way round stops all:

    T1  holds a lock, waits at the gate, which is shut for a fork
    T2  is inside of the gate, waits for that lock
    T3  forks, waits until T2 has left

A lock that nobody wants inside of the gate may be held on the way into it. `tests/lock_order.py`
records in which order threads take locks, and finds what could end in a circle.

A gate is a lock that many may hold at once, or one alone after the others have left.

    with gate.use():            many threads, and again in the same thread
    with gate.drained():        one thread, when nobody uses the gate; newcomers wait

Each thread has a lock of its own; to use the gate is to hold it, and to drain the gate is to hold
those of all threads:

    thread A    lock a  ####      ####
    thread B    lock b    ######
    drain       a, b                    ####     new threads wait too: they have no lock yet

So users of several threads do not meet. The locks are made in C, and so is what `with` does to
them: an exception of a signal handler finds the gate held inside of the block, or not at all.

A thread that uses the gate may enter again while another waits to drain it: if it had to wait
for the drain, and the drain for it, neither would go on. A thread that uses the gate cannot
drain it, for the same reason: that is a RuntimeError at once. A user may also wait for what a
newcomer has, a lock or the turn to write: a drain that has not succeeded within `ROUND_SECONDS`
lets those who wait in, and begins again.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from _thread import RLock
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Final, Generic, TypeVar
from weakref import ref

T = TypeVar("T")

_made: Final[set[ref[Any]]] = set()
_forget: Final = _made.discard


class CachedProperty(functools.cached_property[T]):
    """`cached_property` without the lock that it has before Python 3.12, of all objects: who is
    inside has it for ever in a forked child. Two that ask at once may both compute the value.
    """

    def __init__(self, func: Callable[[Any], T]) -> None:
        super().__init__(func)
        self.lock = nullcontext()


class SharedWeakSet(Generic[T]):
    """A weak set that a thread may look through while others add to it: it sees those of before.

    What drops one is C: no handler runs in it, of which the exception would be printed and lost.
    """

    def __init__(self) -> None:
        self._known: set[ref[T]] = set()
        self._forget = self._known.discard

    def __iter__(self) -> Iterator[T]:
        known = self._known.copy()  # at once, in C
        return (each for one in known if (each := one()) is not None)

    def add(self, one: T) -> None:
        """Know it as long as others do."""
        self._known.add(ref(one, self._forget))

    def discard(self, one: T) -> None:
        """Forget it, if it is there."""
        self._forget(ref(one))


def new_lock() -> threading.Lock:
    """A lock that is free in a forked child."""
    made = threading.Lock()
    _made.add(ref(made, _forget))
    return made


def new_rlock() -> threading.RLock:
    """A lock that its thread may take again; free in a forked child, unless its thread forked."""
    made = RLock()
    _made.add(ref(made, _forget))
    return made


def new_condition(lock: threading.Lock | None = None) -> threading.Condition:
    """A condition of a lock made here, its own for None; nobody waits for it in a forked child."""
    made = threading.Condition(lock or new_lock())
    _made.add(ref(made, _forget))
    return made


def new_event() -> threading.Event:
    """An event, as set in a forked child as it was in the parent."""
    made = threading.Event()
    _made.add(ref(made, _forget))
    return made


def new_baton() -> threading.Lock:
    """A lock that is taken already: one thread waits for it, and another releases it, once.

    To wait for it is one call of C; an event's `wait` that a signal interrupts may raise another
    error than the handler did.
    """
    baton = threading.Lock()
    baton.acquire()
    return baton


def pass_baton(baton: threading.Lock) -> None:
    """Release a baton that several may release."""
    with suppress(RuntimeError):  # another did
        baton.release()


def _after_fork_in_child() -> None:
    for made in [each() for each in list(_made)]:
        if made is None:
            continue
        # The thread that forked goes on in the child, and releases what it holds itself.
        mine = isinstance(made, RLock) and made._is_owned()  # type: ignore[attr-defined]
        if not mine:
            made._at_fork_reinit()


os.register_at_fork(after_in_child=_after_fork_in_child)


ROUND_SECONDS: Final = 1.0
_LET_IN_SECONDS: Final = 0.05


class _Mine(threading.local):
    lock: RLock | None = None


class SharedGate:
    """Shared by users, drained by whoever must be alone."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all users: for a forked child, in which their threads do not exist."""
        self._mine = _Mine()
        self._draining = False
        self._locks: list[ref[RLock]] = []  # a thread's goes with the thread
        self._joining = new_rlock()  # held to add to them, and by whoever drains

    def use(self) -> RLock:
        """`with gate.use():` holds the gate with others; waits while another thread drains."""
        if self._draining:
            self._wait()
        return self._mine.lock or self._join()

    def enter(self) -> None:
        """Begins a use; waits while another thread drains, unless this thread is inside."""
        self.use().acquire()

    def leave(self) -> None:
        """Ends the latest use of this thread."""
        lock = self._mine.lock
        if lock is not None:
            lock.release()

    def _wait(self) -> None:
        """Wait at the gate, unless this thread is inside."""
        if not self.in_use_here:
            with self._joining:  # a lock goes to whoever is quick: a busy thread would stay inside
                pass

    @property
    def in_use_here(self) -> bool:
        """True when this thread uses the gate."""
        lock = self._mine.lock
        return lock is not None and _is_mine(lock)

    def _join(self) -> RLock:
        with self._joining:
            lock = new_rlock()
            self._locks = [ref(lock), *(each for each in self._locks if each() is not None)]
            self._mine.lock = lock
        return lock

    def _living(self) -> list[RLock]:
        return [lock for lock in (each() for each in self._locks) if lock is not None]

    def drain(self, timeout: float | None = None) -> bool:
        """Waits until nobody uses the gate, then keeps all out until `reopen()`.

        Args:
            timeout: seconds to wait for the users, None for ever, 0 to try.

        Returns:
            False when users were left at the end of the timeout; the gate is as before.

        Raises:
            RuntimeError: this thread uses the gate and would wait for itself.
        """
        if self.in_use_here:
            raise RuntimeError("a thread that uses a gate cannot drain it; leave it first")
        until = None if timeout is None else time.monotonic() + timeout
        while not self._drain_until(_sooner(until, time.monotonic() + ROUND_SECONDS)):
            if until is not None and time.monotonic() >= until:
                return False
            time.sleep(_LET_IN_SECONDS)
        return True

    def _drain_until(self, until: float) -> bool:
        if not self._joining.acquire(timeout=_left(until)):
            return False
        self._draining = True
        for lock in self._living():
            if not lock.acquire(timeout=_left(until)):
                self.reopen()
                return False
        return True

    def reopen(self) -> None:
        """Lets users in again after `drain()`; in the thread that drained, or broke off."""
        self._draining = False
        for lock in self._living():
            if _is_mine(lock):
                lock.release()
        if _is_mine(self._joining):
            self._joining.release()

    @contextmanager
    def drained(self) -> Iterator[None]:
        """Alone inside the `with` block."""
        self.drain()
        try:
            yield
        finally:
            self.reopen()


def _is_mine(lock: RLock) -> bool:
    return lock._is_owned()  # type: ignore[attr-defined, no-any-return]


def _sooner(until: float | None, other: float) -> float:
    return other if until is None else min(until, other)


def _left(until: float) -> float:
    return max(until - time.monotonic(), 0)
