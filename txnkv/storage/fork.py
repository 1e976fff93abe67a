"""Fork safety: what a child inherits is neither used nor closed.

A forked child shares the memory image of its parent, not its threads and not its fcntl locks.
Three things were seen to go wrong when it carries on with what it finds:

- it opens SQLite while it inherits the parent's connection: SQLite believes that the process
  has locks which it has not, and commits that were acknowledged are lost;
- it closes an inherited LMDB environment: the parent's reader slot goes, and pages that the
  parent reads are reused under it;
- it inherits a lock that a thread was holding, and waits for ever.

The last one's locks are ours, pyarrow's, and those of mimalloc, with which pyarrow allocates.

So all use of the storage layer stands inside `GATE.use()`, and `os.register_at_fork` does:

    before, in the parent      waits until nobody is inside; closes connections, environments
    after, in the parent       opens the gate; everything is opened again when it is needed
    after, in the child        the same, and the runtime file is mapped and locked anew

A hook cannot refuse a fork. When there is no quiet moment, because the forking thread itself
is inside an operation or other threads do not come out within `QUIET_SECONDS`, the fork goes
on, nothing is closed, the parent carries on, and the *child* is refused: every use of the
storage layer in it raises RuntimeError, and what it inherited is leaked on purpose so that no
destructor touches it. A child that only calls exec, as `subprocess` does, is not concerned.

Connections and servers of gRPC cannot be prepared: their threads stay with the parent, and a
destructor, or a call in the child, would wait for them for ever. So the child leaks them too, and
opens none of its own.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  its hook is to run after ours, see below
import ctypes
import os
import sys
import threading
import weakref
from contextlib import suppress
from typing import Protocol

from txnkv.errors import NotSupportedError
from txnkv.storage.locks import SharedGate, SharedWeakSet

QUIET_SECONDS = 30.0
"""The time for which a fork waits for other threads to leave the storage layer."""


class Forkable(Protocol):
    """A holder of resources that must not cross a fork."""

    def before_fork(self) -> None:
        """Closes what must not be inherited. Nobody uses the storage layer meanwhile."""

    def after_fork_in_child(self) -> None:
        """Forgets what was inherited, so that it is opened again when needed."""

    def inherited(self) -> list[object]:
        """Return what was open when a fork could not be prepared; a child must never touch it."""


class _Forking(threading.local):
    """The findings of the before-hook, for the after-hooks: all three run in the forking thread.

    Attributes:
        refusal: why the child may not use the store.
        outside: the thread did not use the gate: whatever it holds of it now is from draining.
        beside_threads: others were there that may have been allocating.
    """

    refusal: str | None = None
    outside = False
    beside_threads = False


class ForkGate(SharedGate):
    """The process-wide gate; see the module's text. There is one, `GATE`.

    `with GATE.use():` keeps forks out for the block, and raises RuntimeError in a process that was
    forked at a moment that was not quiet. Cheap and re-entrant.

    Attributes:
        refused: True in a child that must not touch what it inherited.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refused = False
        self._members = SharedWeakSet[Forkable]()
        self._threaded = SharedWeakSet[object]()
        self._threads_lost = False
        self._refusal: str | None = None
        self._forking = _Forking()

    def _wait(self) -> None:
        self.check()
        super()._wait()

    def check(self) -> None:
        """Raises RuntimeError in a child that must not touch what it inherited."""
        if self._refusal is not None:
            raise RuntimeError(self._refusal)

    def leave(self) -> None:
        """Ends the latest use of this thread."""
        lock = self._mine.lock
        if self._refusal is None and lock is not None:
            lock.release()

    def register(self, member: Forkable) -> None:
        """Has a member quiesced at every fork, for as long as it lives."""
        self._members.add(member)

    def add_threaded(self, thing: object) -> None:
        """Take note of a thing with threads of gRPC, until they end or it is dropped.

        Raises:
            NotSupportedError: this process was forked beside another one, and can have none.
        """
        if self._threads_lost:
            raise NotSupportedError(_FORKED_BESIDE_THREADS)
        self._threaded.add(thing)

    def discard_threaded(self, thing: object) -> None:
        """Take note that the threads of a thing have ended."""
        self._threaded.discard(thing)

    # -- the three hooks ---------------------------------------------------------------

    def before_fork(self) -> None:
        """In the parent, before: closes everything, or marks the child to come as refused."""
        _settle_pandas()
        forking = self._forking
        forking.outside = False
        forking.beside_threads = threading.active_count() > 1
        forking.refusal = self._refusal or self._quiesce()

    def after_fork_in_parent(self) -> None:
        """In the parent, after: lets users in again."""
        if self._forking.outside:
            self.reopen()

    def after_fork_in_child(self) -> None:
        """In the child: starts afresh, or refuses for good."""
        if self._forking.beside_threads:
            _allocate_with_malloc()
        for thing in list(self._threaded):
            leak(thing)
            _forget_at_exit(thing)
            self._threads_lost = True
        refusal = self._forking.refusal
        if refusal is not None:
            self._refuse(refusal)
            return
        self.reset()
        for member in list(self._members):
            member.after_fork_in_child()

    def _quiesce(self) -> str | None:
        """Close everything; why that could not be done."""
        self._forking.refusal = _FORKED_UNCLOSED  # if a signal breaks this off
        if self.in_use_here:
            return _FORKED_INSIDE
        self._forking.outside = True
        if not self.drain(QUIET_SECONDS):
            return _FORKED_BUSY
        refusal = None
        for member in list(self._members):
            try:
                member.before_fork()
            except Exception as error:
                refusal = f"{_FORKED_UNCLOSED}: {error}"
        return refusal

    def _refuse(self, refusal: str) -> None:
        if self._refusal is not None:
            return
        self._refusal, self.refused = refusal, True
        self._draining = True  # for good: whoever comes is refused
        for member in list(self._members):
            for thing in member.inherited():
                leak(thing)


def _settle_pandas() -> None:
    """Have pyarrow know whether pandas is there.

    It finds out at the first list that is made an array, under a lock that no child makes anew:
    one that is forked meanwhile would wait for ever.
    """
    if "pyarrow" in sys.modules:
        with suppress(Exception):
            sys.modules["pyarrow"].array([])


def _allocate_with_malloc() -> None:
    """Have pyarrow take memory from malloc, whose locks libc makes anew in a child.

    mimalloc, its default, has locks that nobody makes anew: a get in a child of a process whose
    other threads allocated was seen to wait for one of them for ever.
    """
    arrow = sys.modules.get("pyarrow")
    if arrow is not None and arrow.default_memory_pool().backend_name == "mimalloc":
        arrow.set_memory_pool(arrow.system_memory_pool())


_FORKED_INSIDE = (
    "this process was forked by a thread inside a txnkv operation and cannot use the store; "
    "fork outside of operations, or start processes with spawn"
)
_FORKED_UNCLOSED = (
    "this process was forked when txnkv could not close its files and cannot use the store; "
    "start processes with spawn"
)
_FORKED_BESIDE_THREADS = (
    "this process was forked beside a Server, or a client of one, that was open, and whose threads "
    "did not come along: open it in a process that was spawned, or forked before"
)
_FORKED_BUSY = (
    f"this process was forked while txnkv operations of other threads had run for "
    f"{QUIET_SECONDS:.0f} s and cannot use the store; start processes with spawn"
)


def _forget_at_exit(thing: object) -> None:
    """Have no finalizer of a thing run when the process ends, as pyarrow's of a server does."""
    for each in list(getattr(weakref.finalize, "_registry", ())):
        found = each.peek()
        if found is not None and found[0] is thing:
            each.atexit = False


def leak(thing: object) -> None:
    """Have no destructor touch it in this process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


GATE = ForkGate()
"""The gate of this process."""

# Hooks before a fork run last one first. Those of executors and of logging take a lock of all of
# their users: were it taken before ours, who is in the gate and wants it would never leave.
os.register_at_fork(
    before=GATE.before_fork,
    after_in_parent=GATE.after_fork_in_parent,
    after_in_child=GATE.after_fork_in_child,
)
