"""Liveness: a process is alive while it holds an fcntl lock on its byte of runtime/slots.

A pid says little: it is used again, it means nothing across containers, and asking for it needs
rights. A record lock is dropped by the kernel at the instant the process ends, however it ends,
and anyone can ask who has it.

    byte 0 .. 1023   exclusive: the slot of one process
    byte 1024        shared: "I have the runtime file mapped"; so it is replaced under nobody

fcntl locks belong to the process, and closing *any* descriptor of the file drops them all. So
this file is opened once in a process, never closed while locks are wanted, and never copied by
a backup. They are not inherited by a forked child, which opens the file anew and must leave the
inherited descriptor alone: closing it would drop the locks of its own.
"""

from __future__ import annotations

import fcntl
import os
import struct
import sys
from pathlib import Path

SLOTS = 1024
_PRESENCE = SLOTS

# struct flock of the platform, for F_GETLK: Python has no wrapper that asks without locking,
# and a lock that is tried and taken would look alive to whoever asks at that moment.
if sys.platform == "darwin":
    _FLOCK = struct.Struct("@qqihh")

    def _pack(start: int) -> bytes:
        return _FLOCK.pack(start, 1, 0, fcntl.F_WRLCK, os.SEEK_SET)

    def _kind(answer: bytes) -> int:
        return int(_FLOCK.unpack(answer)[3])

else:
    _FLOCK = struct.Struct("@hhqqi4x")

    def _pack(start: int) -> bytes:
        return _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, 1, 0)

    def _kind(answer: bytes) -> int:
        return int(_FLOCK.unpack(answer)[0])


class SlotLocks:
    """The lock file, open in this process."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.fchmod(self._descriptor, 0o600)

    def take(self, slot: int) -> bool:
        """Tries to take a slot for this process; the one it has counts as taken."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def is_held(self, slot: int) -> bool:
        """True while another process holds the slot. One's own is not seen."""
        answer = fcntl.fcntl(self._descriptor, fcntl.F_GETLK, _pack(slot))
        return _kind(answer) != fcntl.F_UNLCK

    def enter(self) -> None:
        """Says that this process has the runtime file mapped."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_SH, 1, _PRESENCE)

    def take_all(self) -> bool:
        """Tries to take every byte: true when no other process is here."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, SLOTS + 1, 0)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def give_all(self) -> None:
        """Gives back what `take_all` took."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, SLOTS + 1, 0)

    def close(self) -> None:
        """Drops every lock of this process. Never in a child, for an inherited object."""
        os.close(self._descriptor)
