"""The time that all of txnkv reads, the boot that it belongs to, and pauses between tries.

Tests replace either source of time: `clock.replaced`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from txnkv.core import monotonic_micros, wall_micros
from txnkv.errors import NotSupportedError

EPOCH_SECONDS = 1_577_836_800
"""2020-01-01 00:00 UTC in Unix seconds: where the wall clock of the store begins."""


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


class Clock:
    """Time in microseconds; tests replace either source.

    Attributes:
        now_micros: wall time since 2020-01-01 UTC. It may jump either way.
        monotonic_micros: comparable between processes of one boot.
    """

    def __init__(self) -> None:
        self.now_micros: Callable[[], int] = wall_micros
        self.monotonic_micros: Callable[[], int] = monotonic_micros

    @contextmanager
    def replaced(
        self,
        *,
        wall: Callable[[], int] | None = None,
        monotonic: Callable[[], int] | None = None,
    ) -> Iterator[None]:
        """Takes time from these functions inside the `with` block, in this process."""
        before = self.now_micros, self.monotonic_micros
        self.now_micros = wall or self.now_micros
        self.monotonic_micros = monotonic or self.monotonic_micros
        try:
            yield
        finally:
            self.now_micros, self.monotonic_micros = before


clock = Clock()
"""The clock that all of txnkv reads."""


@cache
def boot_id() -> str:
    """A text that is the same in all processes of one boot, and in no other boot."""
    if sys.platform == "darwin":
        return _darwin_boot_id()
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        # A sandbox may hide it; the second at which the machine was started stands in.
        try:
            stat = Path("/proc/stat").read_text("ascii")
        except OSError as error:
            raise NotSupportedError(
                f"{error}: it tells which boot this is. Have /proc mounted where txnkv runs"
            ) from error
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
