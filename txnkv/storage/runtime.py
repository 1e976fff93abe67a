"""The runtime of a store: memory that its processes share; no I/O, no daemon.

The change number says whether the status database may have changed. It is one u64, even at
rest. A writer makes it odd before COMMIT and even again, two higher, before it acknowledges:

    writer    6 -> 7     COMMIT     7 -> 8     acknowledge
    reader    6          None       8

A reader that sees an odd number has to look. If the writer dies at 7, everybody looks until the
next writer has gone 7 -> 8; no number is ever at rest twice, so a reader that kept 6 looks at 8.
Only the holder of the status write lock changes it.

A commit is made durable after its writer has let the next one go on: so it can be seen before it
is durable. Three counts tell: commits begun, commits done, and commits known to be on the disk.

    writer    PENDING 4 -> 5   COMMIT   COMMITTED = 5   (next writer may go on)   fsync   SYNCED = 5
    reader    sees PENDING != SYNCED after it has read: syncs by itself before it uses what it saw

A process slot is held with a lock (`slots`) and says what the process pins; heartbeats are
words that a transaction's owner writes and a checker reads. Pins are published before anything
relies on them: a caller pins, then checks that what it pinned was not already given up.
"""

from __future__ import annotations

import errno
import os
import weakref
from pathlib import Path
from typing import Final

from txnkv.core import Holding, PinSet, SharedWords, StoreWords
from txnkv.errors import ClosedError, UnavailableError
from txnkv.storage.clocks import clock
from txnkv.storage.faults import same_pid
from txnkv.storage.fork import GATE, leak
from txnkv.storage.locks import new_lock
from txnkv.storage.runtime_file import (
    CHANGE,
    COMMITTED,
    DURABLE,
    GENERATION,
    HEARTBEAT_BASE,
    HEARTBEATS,
    PENDING,
    REGAINED,
    RIGHT_OF_WAY,
    RISING,
    SLOT_BASE,
    SLOT_WORDS,
    SLOTS,
    SLOTS_USED,
    SYNC_FAILED,
    SYNCED,
    RuntimeFile,
    opening_lock,
)
from txnkv.storage.threads import brief

NOTHING = (1 << 64) - 1
"""The word of a slot that pins nothing."""

_WORDS: Final = CHANGE, PENDING, COMMITTED, SYNCED, SYNC_FAILED, DURABLE

_PID, _START, _SNAPSHOT, _MANIFEST = 0, 1, 2, 3


class Runtime(StoreWords):
    """The runtime file of a store in this process. Shared by threads; one a process and store.

    What every commit and read asks of it is in C (csrc/native/store_words.c).

    Attributes:
        folder: runtime/ of the store.
        words: of the file, by index; None while it is not mapped.
        snapshots, manifests: what is pinned here.
    """

    LEADER = HEARTBEATS - 1  # the heartbeat of who leads; those before it are of transactions
    HEARTBEATS = LEADER
    SLOTS = SLOTS

    def __init__(self, folder: Path, read_only: bool = False) -> None:
        self.folder = folder
        self._read_only = read_only
        self._lock = new_lock()
        self._file: RuntimeFile | None = None
        self.words: memoryview | None = None
        self._slot: int | None = None
        self._started = 0
        self._forget_pins()
        self._closed = False
        GATE.register(self)
        _runtimes.add(self)

    def _forget_pins(self) -> None:
        self.snapshots, self.manifests = PinSet(), PinSet()

    def withdraw_pins(self) -> None:
        """Tell nobody of pins any more, whatever becomes of those that are there."""
        for pins in (self.snapshots, self.manifests):
            pins.aim(None, 0, 0)

    @classmethod
    def open(cls, folder: Path, read_only: bool = False) -> Runtime:
        """Attaches to the runtime folder of a store, made when it is missing.

        Args:
            folder: runtime/ of the store.
            read_only: where the folder cannot be written, go on with memory of this process
                only: nobody sees its pins, and its change number always says "look".

        Raises:
            UnavailableError: the file is damaged or of another version while it is in use.
            StorageFullError: no room for the file.
        """
        runtime = cls(folder, read_only)
        runtime._attach()
        return runtime

    @property
    def generation(self) -> int:
        """A random number drawn when the file was made: another one means all was forgotten."""
        return self._attached()[GENERATION]

    def is_current(self) -> bool:
        """False when runtime/ was deleted or replaced under this process."""
        return (self._file or self._attach()).is_current(self.folder)

    def close(self) -> None:
        """Gives up the slot, the pins and the mapping; every later use raises ClosedError."""
        with GATE.use(), self._lock:
            self._closed = True
            file, self._file = self._file, None
            if file is not None:
                self._clear_slot()
                self.words = None
                self.aim(None, _WORDS)
                file.detach()

    # -- the change number -------------------------------------------------------------

    def change_view(self) -> memoryview:
        """The word itself, which lives as long as its view."""
        return self._attached()[CHANGE : CHANGE + 1]

    @property
    def shared(self) -> SharedWords:
        """The words, as the core takes them."""
        return (self._file or self._attach()).shared

    # -- what is on the disk -----------------------------------------------------------

    def note_sync_failed(self, failed: bool) -> None:
        """A sync failed, or what came before was made durable in another way."""
        (self._file or self._attach()).store(SYNC_FAILED, int(failed))

    @property
    def durable(self) -> int:
        """The timestamp of the last commit that is known to be on the disk; 0: none is known of."""
        return (self._file or self._attach()).load(DURABLE)

    def durable_upto(self, latest: int) -> int:
        """Return the timestamp up to which all commits are known to be on the disk.

        It is `latest` at most; the caller has seen the commits up to that.
        """
        if not self.all_synced():
            return min(latest, (self._file or self._attach()).load(DURABLE))
        # Their writers may not have said so yet, and others are to see no less than the caller.
        self.raise_durable(latest)
        return latest

    @property
    def regained(self) -> bool:
        """Since this file was made, somebody has looked at what a power loss may have taken.

        The file is made anew by who opens the store first after the machine was started.
        """
        return (self._file or self._attach()).load(REGAINED) != 0

    def note_regained(self) -> None:
        """That was done."""
        (self._file or self._attach()).store(REGAINED, 1)

    @property
    def rising(self) -> int:
        """The timestamp up to which a history floor was last to rise. To be looked at after a pin,
        and raised in a turn to write, before the pins are looked at.
        """
        return (self._file or self._attach()).load(RISING)

    def raise_rising(self, upto: int) -> None:
        """Say that a history floor is to rise."""
        (self._file or self._attach()).store(RISING, max(upto, self.rising))

    @property
    def way_until(self) -> int:
        """The word of the right of way."""
        words = self.words
        return (self._attached() if words is None else words)[RIGHT_OF_WAY]

    @way_until.setter
    def way_until(self, until: int) -> None:
        (self._file or self._attach()).store(RIGHT_OF_WAY, until)

    def end_way(self, until: int) -> None:
        """Nobody has it, if it was had until then."""
        words, file = self.words, self._file
        if words is not None and file is not None and words[RIGHT_OF_WAY] == until:
            file.store(RIGHT_OF_WAY, 0)

    # -- slots -------------------------------------------------------------------------

    @property
    def slot(self) -> int:
        """The slot of this process, taken at first use.

        Raises:
            UnavailableError: all slots are held by live processes.
        """
        slot = self._slot
        return self.require_slot() if slot is None else slot

    @brief
    def require_slot(self) -> int:
        """Have a slot, in which others see what is pinned here.

        Raises:
            UnavailableError: all slots are held by live processes.
            NotSupportedError: one is held by another process of the same pid.
            ClosedError: the store was closed.
        """
        with GATE.use():
            self._attached()
            with self._lock:
                return self._take_slot()

    @property
    def owner(self) -> tuple[int, int]:
        """The slot, and when this process took it in monotonic microseconds: its name."""
        slot = self._slot
        return (self.slot if slot is None else slot), self._started

    def slot_alive(self, slot: int, start: int | None = None) -> bool:
        """Return True when a live process holds the slot; with `start`, the same one still."""
        file = self._file or self._attach()
        if start is not None and file.load(_word(slot, _START)) != start:
            return False
        return slot == self._slot or (file.slots is not None and file.slots.is_held(slot))

    def slot_owner(self, slot: int) -> int:
        """The pid that the slot's last holder wrote, alive or not; 0 when it was never held."""
        return self._attached()[_word(slot, _PID)]

    def pid(self, slot: int | None, start: int | None) -> int | None:
        """The pid of the process that took the slot then; None once it is dead, and of no slot."""
        if slot is None or start is None or not self.slot_alive(slot, start):
            return None
        return self.slot_owner(slot)

    # -- pins --------------------------------------------------------------------------

    def hold_snapshot(self, timestamp: int) -> Holding:
        """Publish that this process reads at a timestamp, until the holding is ended or dropped."""
        return self._hold(self.snapshots, timestamp)

    def hold_manifest(self, version: int) -> Holding:
        """Publish that this process reads by a manifest version; as `hold_snapshot`."""
        return self._hold(self.manifests, version)

    def least_pin(self) -> int | None:
        """The least snapshot that a live process pins; None when none does."""
        found = self._least(_SNAPSHOT)
        return None if found is None else found[0]

    def oldest_reader(self) -> tuple[int, int] | None:
        """`least_pin`, and the pid of the process."""
        found = self._least(_SNAPSHOT)
        return None if found is None else (found[0], self.slot_owner(found[1]))

    def least_manifest_pin(self) -> int | None:
        """The least manifest version that a live process pins; None when none does."""
        found = self._least(_MANIFEST)
        return None if found is None else found[0]

    # No fork gate: a fork leaves the mapping and the slot alone.

    def _hold(self, pins: PinSet, value: int) -> Holding:
        if not 0 <= value < NOTHING:
            raise ValueError(f"cannot pin {value}: it does not fit a word")
        if self._slot is None:
            self.require_slot()
        made = Holding(pins)
        made.pin(value)
        return made

    def _least(self, field: int) -> tuple[int, int] | None:
        words = self._attached()
        used = words[SLOTS_USED]
        values = words[SLOT_BASE + field : SLOT_BASE + used * SLOT_WORDS : SLOT_WORDS].tolist()
        pinned = ((value, slot) for slot, value in enumerate(values) if value != NOTHING)
        for value, slot in sorted(pinned):
            if self.slot_alive(slot):
                return int(value), slot
        return None

    # -- heartbeats --------------------------------------------------------------------

    def heartbeat_register(self, index: int, txn_id: int, now: int) -> None:
        """Gives entry `index` to a transaction, whoever had it.

        Args:
            index: 0 .. HEARTBEATS - 1.
            txn_id: local id, 1 .. 2**64 - 1; 0 means nobody.
            now: monotonic microseconds.
        """
        file, at = self._file or self._attach(), _heartbeat_word(index)
        # The time first: a reader of the new id never sees the old one's time with it.
        file.store(at, 0)
        file.store(at + 1, now)
        file.store(at, txn_id)

    def heartbeat(self, index: int, txn_id: int, now: int | None = None) -> bool:
        """Says that the transaction lives, at `now`; False when the entry is another's by now."""
        file, at = self._file or self._attach(), _heartbeat_word(index)
        if file.load(at) != txn_id:
            return False
        file.store(at + 1, clock.monotonic_micros() if now is None else now)
        return file.load(at) == txn_id

    def heartbeat_read(self, index: int) -> tuple[int, int]:
        """The transaction's local id and its last heartbeat in monotonic microseconds."""
        file, at = self._file or self._attach(), _heartbeat_word(index)
        while True:
            txn_id, beat = file.load(at), file.load(at + 1)
            if file.load(at) == txn_id:
                return txn_id, beat

    # -- fork --------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Nothing: the parent keeps its mapping, its slot and so its liveness."""

    def after_fork_in_child(self) -> None:
        """Forgets mapping, slot and pins; the inherited descriptors are left open on purpose.

        The mapping has one, whose number may be another file's in a child that closed all.
        """
        leak(self._file)
        self.words = None
        self.aim(None, _WORDS)
        self._file = None
        self._slot = None
        self.withdraw_pins()
        self._forget_pins()

    def inherited(self) -> list[object]:
        """Return the objects that a child of an unquiet fork must never touch."""
        return [self._file]

    # -- attaching ---------------------------------------------------------------------

    def _attached(self) -> memoryview:
        words = self.words
        return self._attach().words if words is None else words

    def _attach(self) -> RuntimeFile:
        with GATE.use(), self._lock:
            if self._closed:
                raise self._is_closed()
            if self._file is None:
                file = self._open_file()
                self.aim(file.shared, _WORDS)
                self.words, self._file = file.words, file
            return self._file

    def _is_closed(self) -> ClosedError:
        return ClosedError(f"runtime {self.folder} is closed; open the store again")

    @property
    def is_alone(self) -> bool:
        """Nothing can be written: others know nothing of this process."""
        return self._file is not None and self._file.slots is None

    def _open_file(self) -> RuntimeFile:
        try:
            return RuntimeFile.attach(self.folder)
        except OSError as error:
            if self._read_only and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
                return RuntimeFile.alone(self.folder)
            raise

    def _take_slot(self) -> int:
        if self._slot is not None:
            return self._slot
        if self._file is None:
            raise self._is_closed()
        if self._file.slots is None:
            self._fill_slot(0)
            return 0
        with opening_lock(self.folder):
            self._refuse_same_pid(self._file)
            for slot in range(SLOTS):
                if self._file.slots.take(slot):
                    self._fill_slot(slot)
                    return slot
        raise UnavailableError(
            f"all {SLOTS} process slots of {self.folder} are held by live processes; close some"
        )

    def _refuse_same_pid(self, file: RuntimeFile) -> None:
        """Nobody else takes a slot meanwhile, and this process has none: its own would not be seen.

        LMDB locks a byte by the pid for its readers, and takes those of a namesake for its own.
        """
        used, slots = file.load(SLOTS_USED), file.slots
        pids = file.words[_word(0, _PID) : SLOT_BASE + used * SLOT_WORDS : SLOT_WORDS].tolist()
        for slot, pid in enumerate(pids):
            if pid == os.getpid() and slots is not None and slots.is_held(slot):
                raise same_pid(self.folder.parent)

    def _fill_slot(self, slot: int) -> None:
        file = self._file
        assert file is not None
        file.store(_word(slot, _SNAPSHOT), NOTHING)
        file.store(_word(slot, _MANIFEST), NOTHING)
        self._started = clock.monotonic_micros()
        file.store(_word(slot, _START), self._started)
        file.store(_word(slot, _PID), os.getpid())
        file.store(SLOTS_USED, max(file.load(SLOTS_USED), slot + 1))
        self._slot = slot
        self.snapshots.aim(file.shared, _word(slot, _SNAPSHOT), CHANGE)
        self.manifests.aim(file.shared, _word(slot, _MANIFEST), CHANGE)

    def _clear_slot(self) -> None:
        slot, self._slot = self._slot, None
        self.withdraw_pins()
        if slot is not None and self.words is not None:
            self.words[_word(slot, _SNAPSHOT)] = NOTHING
            self.words[_word(slot, _MANIFEST)] = NOTHING


def _word(slot: int, field: int) -> int:
    if not 0 <= slot < SLOTS:
        raise ValueError(f"slot {slot} is not one of 0 .. {SLOTS - 1}")
    return SLOT_BASE + slot * SLOT_WORDS + field


def _heartbeat_word(index: int) -> int:
    if not 0 <= index < HEARTBEATS:
        raise ValueError(f"heartbeat {index} is not one of 0 .. {HEARTBEATS - 1}")
    return HEARTBEAT_BASE + index * 2


_runtimes: weakref.WeakSet[Runtime] = weakref.WeakSet()


def _withdraw_in_child() -> None:
    """The slots are the parent's, also where the child may not use the store."""
    for runtime in list(_runtimes):
        runtime.withdraw_pins()


os.register_at_fork(after_in_child=_withdraw_in_child)
