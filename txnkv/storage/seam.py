"""The one seam for time, chance and I/O faults.

Whatever the engine asks of the outside world that a test may want to bend goes through here:

- `clock`: wall time and monotonic time, both in microseconds;
- `boot_id()`: which boot of the machine the monotonic clock belongs to;
- `fault_point(name)`: a named place where a test can kill, fail or pause the process.

A fault point does nothing until it is armed, by `arm()` in the process or by the environment:

    TXNKV_FAULT="status.before_commit=kill@3,lmdb.before_commit=pause:0.5"

kills the process at its third commit and pauses half a second before every commit of LMDB.
Every point is declared where it is used, by `declare_fault_point(name, doc)`, so that
`FAULT_POINTS` lists them all and a crash test can go through the list.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

EPOCH_SECONDS = 1_577_836_800
"""2020-01-01 00:00 UTC in Unix seconds: where the wall clock of the store begins."""

FAULT_VARIABLE = "TXNKV_FAULT"


def back_off(tries: int, first: float, longest: float) -> float:
    """Return the seconds to wait before another try: twice as long each time, with chance in it,
    so that those who failed together do not meet again.

    Args:
        tries: that failed, at least 1.
        first: seconds after the first of them.
        longest: seconds, at most.
    """
    pause: float = min(first * 2 ** min(tries - 1, 20), longest)
    return pause * random.uniform(0.5, 1.5)


# -- time ------------------------------------------------------------------------------


def _wall_micros() -> int:
    return time.time_ns() // 1000 - EPOCH_SECONDS * 1_000_000


def _monotonic_micros() -> int:
    # Not time.monotonic_ns: CLOCK_MONOTONIC by name is what other processes compare with.
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000


class Clock:
    """Wall and monotonic time in microseconds; tests replace either source."""

    def __init__(self) -> None:
        self._wall: Callable[[], int] = _wall_micros
        self._monotonic: Callable[[], int] = _monotonic_micros

    def now_micros(self) -> int:
        """Wall time: microseconds since 2020-01-01 UTC. It may jump either way."""
        return self._wall()

    def monotonic_micros(self) -> int:
        """Monotonic time in microseconds, comparable between processes of one boot."""
        return self._monotonic()

    @contextmanager
    def replaced(
        self,
        *,
        wall: Callable[[], int] | None = None,
        monotonic: Callable[[], int] | None = None,
    ) -> Iterator[None]:
        """Takes time from these functions inside the `with` block, in this process."""
        before = self._wall, self._monotonic
        self._wall = wall or self._wall
        self._monotonic = monotonic or self._monotonic
        try:
            yield
        finally:
            self._wall, self._monotonic = before


clock = Clock()
"""The clock that all of txnkv reads."""


# -- boot ------------------------------------------------------------------------------


@cache
def boot_id() -> str:
    """A text that is the same in all processes of one boot, and in no other boot."""
    if sys.platform == "darwin":
        return _darwin_boot_id()
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        # A sandbox may hide it; the second at which the machine was started stands in.
        stat = Path("/proc/stat").read_text("ascii")
        started = next(line for line in stat.splitlines() if line.startswith("btime"))
        return hashlib.sha256(started.encode()).hexdigest()[:32]


def _darwin_boot_id() -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_size_t(64)
    text = ctypes.create_string_buffer(size.value)
    name = b"kern.bootsessionuuid"
    if libc.sysctlbyname(name, text, ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"sysctl kern.bootsessionuuid: {os.strerror(code)}")
    return text.value.decode("ascii")


# -- faults ----------------------------------------------------------------------------


class InjectedFault(OSError):
    """The input/output error that the action "error" raises at a fault point."""

    def __init__(self, name: str) -> None:
        super().__init__(errno.EIO, f"injected at fault point {name!r}")


Action = str | Callable[[], object]
"""The action of an armed fault point: a text as in TXNKV_FAULT, or a function to call."""

FAULT_POINTS: dict[str, str] = {}
"""Every fault point by name, with a line that says where it stands."""


@dataclass
class _Armed:
    run: Callable[[], object]
    at_hit: int | None
    hits: int = 0

    def hit(self) -> None:
        self.hits += 1
        if self.at_hit is None or self.hits == self.at_hit:
            self.run()


_armed: dict[str, _Armed] = {}


def declare_fault_point(name: str, doc: str) -> None:
    """Registers a fault point; called when the module that uses it is imported.

    Raises:
        ValueError: another module declared the name with another line of doc.
    """
    if FAULT_POINTS.setdefault(name, doc) != doc:
        raise ValueError(f"fault point {name!r} is declared twice; give each place its own name")


def fault_point(name: str) -> None:
    """Does nothing, unless the point is armed.

    Raises:
        ValueError: no such point was declared.
        InjectedFault: the point is armed with "error".
    """
    if name not in FAULT_POINTS:
        raise ValueError(f"fault point {name!r} was never declared; call declare_fault_point first")
    if _armed and (armed := _armed.get(name)) is not None:
        armed.hit()


def arm(name: str, action: Action) -> None:
    """Arms a point: "kill", "error", "pause:seconds", each with or without "@hit", or a function.

    Raises:
        ValueError: no such point was declared, or the action cannot be read.
    """
    if name not in FAULT_POINTS:
        raise ValueError(f"fault point {name!r} was never declared; FAULT_POINTS lists those there")
    _armed[name] = _parse_action(name, action)


def disarm(name: str | None = None) -> None:
    """Disarms one point, or all of them; disarming what is not armed does nothing."""
    if name is None:
        _armed.clear()
    else:
        _armed.pop(name, None)


def arm_from_environment(environment: Mapping[str, str] = os.environ) -> None:
    """Arms what TXNKV_FAULT names. Done once at import, before the points are declared.

    Raises:
        ValueError: the text cannot be read.
    """
    for part in environment.get(FAULT_VARIABLE, "").split(","):
        if part := part.strip():
            name, equals, action = part.partition("=")
            if not equals:
                raise ValueError(f"{FAULT_VARIABLE}: {part!r} has no action; write name=action")
            _armed[name.strip()] = _parse_action(name, action.strip())


def _parse_action(name: str, action: Action) -> _Armed:
    if not isinstance(action, str):
        return _Armed(action, None)
    what, at, hit = action.partition("@")
    if at and not (hit.isdecimal() and int(hit) > 0):
        raise ValueError(f"fault {name}={action}: after @ comes the number of the hit, from 1")
    at_hit = int(hit) if at else None
    if what == "kill":
        return _Armed(_kill, at_hit)
    if what == "error":
        return _Armed(lambda: _fail(name), at_hit)
    if what.startswith("pause:"):
        seconds = float(what.removeprefix("pause:"))
        return _Armed(lambda: time.sleep(seconds), at_hit)
    raise ValueError(f"fault {name}={action}: the actions are kill, error and pause:seconds")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fail(name: str) -> None:
    raise InjectedFault(name)


arm_from_environment()
