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
"""

from __future__ import annotations

import os
import threading
from typing import Any, Final, TypeVar
from weakref import ref

T = TypeVar("T")

_RLOCK = type(threading.RLock())
_made: Final[set[ref[Any]]] = set()
_forget: Final = _made.discard


def new_lock() -> threading.Lock:
    """A lock that is free in a forked child."""
    return _known(threading.Lock())


def new_rlock() -> threading.RLock:
    """A lock that its thread may take again; free in a forked child, unless its thread forked."""
    return _known(threading.RLock())


def new_condition(lock: threading.Lock | None = None) -> threading.Condition:
    """A condition of a lock made here, its own for None; nobody waits for it in a forked child."""
    return _known(threading.Condition(lock or new_lock()))


def new_event() -> threading.Event:
    """An event, as set in a forked child as it was in the parent."""
    return _known(threading.Event())


def _known(made: T) -> T:
    _made.add(ref(made, _forget))
    return made


def new_baton() -> threading.Lock:
    """A lock that is taken already: one thread waits for it, and another releases it, once."""
    baton = threading.Lock()
    baton.acquire()
    return baton


def _after_fork_in_child() -> None:
    for made in [each() for each in list(_made)]:
        if made is None:
            continue
        # The thread that forked goes on in the child, and releases what it holds itself.
        mine = isinstance(made, _RLOCK) and made._is_owned()  # type: ignore[attr-defined]
        if not mine:
            made._at_fork_reinit()


os.register_at_fork(after_in_child=_after_fork_in_child)
