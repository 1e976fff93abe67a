"""The folder runtime/: `shared`, the memory that the processes share, and `slots`, their locks.

    0        magic, version, generation, boot, slots used            u64 each, one page
    128      change number                                           a cache line of its own
    192      commits that are under way, done and synced; 240 where the history floor is to rise
    256      the right of way
    4096     1024 process slots of 64 bytes
    69632    65536 heartbeats of 16 bytes

All words are u64 in the machine's order and aligned. What one process writes for another to see
is written and read by the core's atomics (`store`, `load`); a plain look through `words`, ten
times as fast, serves where a moment's delay is harmless. The file is volatile:
one of another boot, another version or another length is replaced, once no process is present
(`SlotLocks`), by a new one that is written aside and renamed, with a new generation. Its blocks
are allocated when it is made, since writing to a hole on a full disk is a SIGBUS.

A process is alive while it holds an fcntl lock on its byte of runtime/slots.

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
import hashlib
import mmap
import os
import struct
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from txnkv.core import SharedWords, fill_holes
from txnkv.errors import UnavailableError
from txnkv.storage.clocks import boot_id
from txnkv.storage.directory import (
    FORMAT_VERSION,
    allocate,
    make_private_directory,
    opened,
    removed,
)
from txnkv.storage.faults import (
    FULL_ERRNOS,
    close_descriptor,
    disk_errors,
    open_private,
    storage_full,
)

SLOTS = 1024
_PRESENCE = SLOTS

# struct flock of the platform, for F_GETLK: Python has no wrapper that asks without locking,
# and a lock that is tried and taken would look alive to whoever asks at that moment.
if sys.platform == "darwin":
    _FLOCK = struct.Struct("@qqihh")

    def _pack(start: int, n: int = 1) -> bytes:
        return _FLOCK.pack(start, n, 0, fcntl.F_WRLCK, os.SEEK_SET)

    def _kind(answer: bytes) -> int:
        return int(_FLOCK.unpack(answer)[3])

else:
    _FLOCK = struct.Struct("@hhqqi4x")

    def _pack(start: int, n: int = 1) -> bytes:
        return _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, n, 0)

    def _kind(answer: bytes) -> int:
        return int(_FLOCK.unpack(answer)[0])


class SlotLocks:
    """The lock file, open in this process."""

    def __init__(self, path: Path) -> None:
        self._descriptor = open_private(path, os.O_RDWR | os.O_CREAT)

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
        close_descriptor(self._descriptor)


MAGIC = int.from_bytes(b"txnkvrun", "little")
VERSION = FORMAT_VERSION
"""Programs of two formats never have one store open at once: the elder would not understand what
the other one writes."""
HEARTBEATS = 65536

# Indices of u64 words.
GENERATION, SLOTS_USED, CHANGE = 2, 4, 16
PENDING, COMMITTED, SYNCED, SYNC_FAILED, DURABLE, REGAINED, RISING = 24, 25, 26, 27, 28, 29, 30
RIGHT_OF_WAY = 32
SLOT_BASE, SLOT_WORDS = 512, 8
HEARTBEAT_BASE = SLOT_BASE + SLOTS * SLOT_WORDS
WORDS = HEARTBEAT_BASE + HEARTBEATS * 2
FILE_BYTES = WORDS * 8


_looked: dict[tuple[int, int], int] = {}
"""Descriptors of lock files that cannot be written, by inode. They stay open: this process may have
locks of the same file, under another path.
"""


def _is_open_elsewhere(slots: Path) -> bool:
    """Return True when another process holds a slot, which a file that is only read tells, too."""
    try:
        found = slots.stat()
        key = found.st_dev, found.st_ino
        if key not in _looked:
            _looked[key] = os.open(slots, os.O_RDONLY | os.O_CLOEXEC)
        answer = fcntl.fcntl(_looked[key], fcntl.F_GETLK, _pack(0, SLOTS))
    except OSError:  # nobody was here, or the file system has no locks
        return False
    return _kind(answer) != fcntl.F_UNLCK


class RuntimeFile:
    """The mapped words and the lock file beside them, in this process.

    Attributes:
        words: u64 words, by index.
        shared: the same, for the core.
        load: `load(index)` is a word, with everything that was written before it.
        store: `store(index, value)` writes a word, after everything that was written before.
        lift: `lift(index, value)` writes it if it is less.
        slots: the lock file; None where nothing can be written, and this process is alone.
    """

    def __init__(self, memory: mmap.mmap, slots: SlotLocks | None, inode: int | None) -> None:
        self.words = memoryview(memory).cast("Q")
        self.shared = SharedWords(memory)
        self.load = self.shared.load
        self.store = self.shared.store
        self.lift = self.shared.lift
        self.slots = slots
        self._inode = inode

    @classmethod
    def attach(cls, folder: Path) -> RuntimeFile:
        """Maps the file, made or replaced when it must be.

        Raises:
            UnavailableError: the file is damaged, or of another version or boot, while processes
                use it.
        """
        make_private_directory(folder)
        with opening_lock(folder):
            slots = SlotLocks(folder / "slots")
            try:
                shared = folder / "shared"
                if not _is_valid(shared):
                    _replace(shared, slots)
                slots.enter()
                return _map(shared, slots)
            except BaseException:
                slots.close()
                raise

    @classmethod
    def alone(cls, folder: Path) -> RuntimeFile:
        """Memory of this process only, for a store on a file system that cannot be written.

        Raises:
            UnavailableError: others have the store open, who know nothing of what is read here.
        """
        if _is_open_elsewhere(folder / "slots"):
            raise UnavailableError(
                f"{folder.parent} cannot be written here, and another process has it open, which "
                "would write over what is read. Mount it to be written to, and open it with "
                "read_only=True; or read a copy (`txnkv backup`), or through `txnkv serve`"
            )
        file = cls(mmap.mmap(-1, FILE_BYTES), None, None)
        file.words[GENERATION] = _new_generation()
        file.words[CHANGE] = 1
        return file

    def is_current(self, folder: Path) -> bool:
        """False when runtime/ was deleted or replaced while this process had it."""
        if self._inode is None:
            return True
        try:
            return (folder / "shared").stat().st_ino == self._inode
        except FileNotFoundError:
            return False

    def detach(self) -> None:
        """Gives up all locks of this process.

        The mapping goes with the last reference to this object: a thread that is at a word while
        another one closes the store would be killed by its sudden end.
        """
        if self.slots is not None:
            self.slots.close()


@contextmanager
def opening_lock(folder: Path) -> Iterator[None]:
    """Alone among the processes that attach to the runtime file or take a slot in it."""
    with disk_errors(folder, denied=False), ExitStack() as stack:
        try:
            lock = stack.enter_context(opened(folder / "opening.lock", os.O_RDWR | os.O_CREAT))
        except FileNotFoundError:
            raise removed(folder) from None
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _is_valid(shared: Path, *, of_any_boot: bool = False) -> bool:
    try:
        with shared.open("rb") as file:
            if os.fstat(file.fileno()).st_size != FILE_BYTES:
                return False
            head = memoryview(file.read(32)).cast("Q")
    except FileNotFoundError:
        return False
    of_this_boot = of_any_boot or head[3] == _boot_word()
    return (head[0], head[1]) == (MAGIC, VERSION) and of_this_boot and head[2] != 0


def _replace(shared: Path, slots: SlotLocks) -> None:
    if not slots.take_all():
        if _is_valid(shared, of_any_boot=True):
            raise UnavailableError(
                f"this process sees another boot id than those that have {shared.parent.parent} "
                "open, as in a container with a boot id of its own. Give it the host's "
                "/proc/sys/kernel/random/boot_id, or close the store there first"
            )
        raise UnavailableError(
            f"{shared} is damaged or of another version, and other processes use it; close them "
            "and open the store again"
        )
    try:
        _write_new(shared.with_suffix(".new"))
        shared.with_suffix(".new").rename(shared)
    finally:
        slots.give_all()


def _write_new(path: Path) -> None:
    head = b"".join(
        word.to_bytes(8, sys.byteorder)
        for word in (MAGIC, VERSION, _new_generation(), _boot_word())
    )
    # A change number that begins anywhere is not taken for one of the file before.
    change = _new_generation() & ~1
    try:
        with opened(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC) as descriptor:
            allocate(descriptor, FILE_BYTES)
            os.pwrite(descriptor, change.to_bytes(8, sys.byteorder), CHANGE * 8)
            os.pwrite(descriptor, head, 0)
    except OSError as error:
        if error.errno in FULL_ERRNOS:
            raise storage_full(path, error.errno) from error
        raise


def _map(shared: Path, slots: SlotLocks) -> RuntimeFile:
    with opened(shared, os.O_RDWR) as descriptor:
        if os.fstat(descriptor).st_blocks * 512 < FILE_BYTES:  # a copy with holes
            fill_holes(descriptor, FILE_BYTES)
        memory = mmap.mmap(descriptor, FILE_BYTES)
        return RuntimeFile(memory, slots, os.fstat(descriptor).st_ino)


def _new_generation() -> int:
    return int.from_bytes(os.urandom(8), "little") >> 1 | 1


def _boot_word() -> int:
    return int.from_bytes(hashlib.sha256(boot_id().encode()).digest()[:8], "little")
