"""In which order threads take locks, and which orders could end in a circle.

Every lock belongs to a kind: the line that makes it. A thread that has a lock of kind A and waits
for one of kind B makes the edge A -> B; edges that close a circle are a deadlock that may come,
even if it did not come this time. The fork gate is a kind too: while a fork drains it, entering it
is a wait like any other, so "a lock, then the gate" and "the gate, then that lock" are a circle. A
wait without end inside of the gate for what another thread does (a condition, an event, a baton)
is told as well: that thread may be at the gate.

    watch()             before anything else of txnkv is imported
    problems()          what was found since
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Set
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1] / "txnkv"
_PARTS = frozenset({"lock_order.py", "write_queue.py"})
"""Modules whose locks are parts of others: their kind is the line that makes the whole."""

_ENDING = ("storage/environment.py:Environment.__init__",)
"""The gates of environments: no wait for one is without end, since a drain lets newcomers in."""

_LAST_CLOSE = "in give_up\n"
"""The last user of a store closes it, when nobody else is left to take its locks."""

_plain = threading.Lock()
os.register_at_fork(after_in_child=_plain._at_fork_reinit)  # type: ignore[attr-defined]
_edges: dict[str, dict[str, str]] = {}
_problems: dict[tuple[str, str], str] = {}


class _Held(threading.local):
    def __init__(self) -> None:
        self.locks: list[tuple[str, int]] = []


_held = _Held()


def problems() -> list[str]:
    """Each circle and each wait inside of the gate, with the stacks that made it."""
    return list(_problems.values())


def watch() -> None:
    """Have all locks of txnkv watched."""
    assert "txnkv" not in sys.modules, "locks are made while txnkv is imported: watch before"
    locks = _loaded("locks")
    made, forget = locks._made, locks._forget

    def keep(lock: Any) -> Any:
        made.add(weakref.ref(lock, forget))
        return lock

    locks.new_lock = lambda: keep(_Watched(threading.Lock(), _kind()))
    locks.new_rlock = lambda: keep(_WatchedAgain(threading.RLock(), _kind()))
    locks.new_condition = lambda lock=None: keep(_Condition(lock or locks.new_lock(), _kind()))
    locks.new_event = lambda: keep(_Event(_kind()))
    locks.new_baton = lambda: _Baton(_kind())
    locks.RLock = _WatchedAgain
    _watch_gates(locks.SharedGate)


def _loaded(name: str) -> Any:
    """A module of the storage layer alone: the package makes locks while it is imported."""
    full = f"txnkv.storage.{name}"
    spec = importlib.util.spec_from_file_location(full, PACKAGE / "storage" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[full] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Watched:
    """A lock that tells of its taking."""

    def __init__(self, lock: Any, kind: str) -> None:
        self.lock = lock
        self.kind = kind
        self.key = id(self)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if blocking and timeout < 0:
            _wants(self.kind, self.key)
        taken: bool = self.lock.acquire(blocking, timeout)
        if taken:
            _held.locks.append((self.kind, self.key))
        return taken

    def release(self) -> None:
        self.lock.release()
        _gone(self.kind, self.key)

    def locked(self) -> bool:
        return bool(self.lock.locked())

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        self.lock._at_fork_reinit()


class _WatchedAgain(_Watched):
    def _is_owned(self) -> bool:
        return bool(self.lock._is_owned())


class _Condition(threading.Condition):
    def __init__(self, lock: Any, kind: str) -> None:
        super().__init__(lock)
        self.kind = kind

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is None:
            _waits(self.kind)
        return super().wait(timeout)


class _Event(threading.Event):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is None and not self.is_set():
            _waits(self.kind)
        return super().wait(timeout)


class _Baton:
    def __init__(self, kind: str) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()
        self.kind = kind
        self.release = self.lock.release

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if blocking and timeout < 0:
            _waits(self.kind)
        return self.lock.acquire(blocking, timeout)


def _watch_gates(gate: Any) -> None:
    """A gate is one lock to whoever watches, though each thread has a part of it."""
    begin, join, reopen = gate.__init__, gate._join, gate.reopen

    def watched_init(self: Any) -> None:
        self.kind = _kind(_PARTS | {"locks.py"})
        begin(self)

    def watched_join(self: Any) -> Any:
        part = join(self)
        part.kind, part.key = self.kind, id(self)
        return part

    def watched_reopen(self: Any) -> None:
        reopen(self)  # but not the parts of threads that ended meanwhile
        _held.locks = [held for held in _held.locks if held[1] != id(self)]

    gate.__init__, gate._join, gate.reopen = watched_init, watched_join, watched_reopen


def _kind(parts: Set[str] = _PARTS) -> str:
    frame = sys._getframe(2)
    while Path(frame.f_code.co_filename).name in parts:
        assert frame.f_back is not None
        frame = frame.f_back
    path = os.path.relpath(frame.f_code.co_filename, PACKAGE)
    return f"{path}:{frame.f_code.co_qualname}:{frame.f_lineno}"


def _wants(kind: str, lock: int) -> None:
    if any(held == lock for _, held in _held.locks) or kind.startswith(_ENDING):
        return
    for other, _ in list(_held.locks):
        if kind not in _edges.get(other, {}) and not other.startswith(_ENDING):
            with _plain:
                _edge(other, kind)


def _edge(first: str, then: str) -> None:
    stack = "".join(traceback.format_stack(sys._getframe(3), 12))
    if _LAST_CLOSE in stack:
        return
    circle = _way(then, first)
    _edges.setdefault(first, {})[then] = stack
    if circle is not None:
        steps = "".join(f"\n--- {a} -> {b}:\n{_edges[a][b]}" for a, b in [(first, then), *circle])
        _problems[first, then] = f"a circle:{steps}"


def _way(start: str, end: str) -> list[tuple[str, str]] | None:
    if start == end:
        return []
    before: dict[str, str] = {}
    ahead = [start]
    while ahead:
        here = ahead.pop()
        for there in _edges.get(here, {}):
            if there in before or there == start:
                continue
            before[there] = here
            if there == end:
                steps = [(here, there)]
                while steps[0][0] != start:
                    steps.insert(0, (before[steps[0][0]], steps[0][0]))
                return steps
            ahead.append(there)
    return None


def _waits(kind: str) -> None:
    inside = [held for held, _ in _held.locks if held.startswith("storage/fork.py")]
    if inside and (inside[0], kind) not in _problems:
        stack = "".join(traceback.format_stack(sys._getframe(1), 12))
        _problems[inside[0], kind] = f"a wait for {kind} inside of the gate:\n{stack}"


def _gone(kind: str, lock: int) -> None:
    if (kind, lock) in _held.locks:
        at = len(_held.locks) - 1 - _held.locks[::-1].index((kind, lock))
        del _held.locks[at]
