"""The LMDB environments of a store: one object for each folder in a process, few open at once.

Opening an environment twice in a process breaks its locks, so the objects are kept in one table
for the whole process, by real path, and counted: two stores, or two clients on one store, that
name the same folder get the same object.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from txnkv.errors import ClosedError, StoreNotFoundError
from txnkv.storage.directory import StoreDirectory
from txnkv.storage.environment import HOLD_SECONDS, Environment
from txnkv.storage.extents import Extents, Tracked
from txnkv.storage.faults import (
    CLOSE_IDLE,
    descriptor_limit,
    disk_errors,
    is_there,
    with_descriptor,
)
from txnkv.storage.fork import GATE
from txnkv.storage.lmdb_open import EnvironmentOptions, make_environment_files
from txnkv.storage.locks import new_lock
from txnkv.storage.write_queue import BusyError, patience

OPEN_CAP = 1024
WRITABLE_CAP = 64
"""The most that are open to write: for each of them LMDB keeps some 3 MiB of lists."""
_SHARE = 32
"""The part of a cap that is closed when it is reached: not one for each that comes."""
_CHANCE: Final = random.Random()
"""Not the common one, of which a program that seeds it expects its own numbers."""
_GIVING_SECONDS = 0.5
"""Seconds for which that goes on with one file, with writers in between."""


class _Table:
    """Every environment of the process, with the number of `Environments` that have it."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._environments: dict[str, tuple[Environment, int]] = {}
        # Those that are open, in that order, and open to write; and some that were.
        self._opened: dict[Environment, None] = {}
        self._writable: dict[Environment, None] = {}
        self.open_cap = OPEN_CAP
        GATE.register(self)

    def acquire(
        self, path: Path, options: EnvironmentOptions, tracked: Tracked | None
    ) -> Environment:
        """The object for this folder; count it once more."""
        key = str(path)
        with self._lock:
            found = self._environments.get(key)
            environment = found[0] if found else Environment(path, options, self.with_room, tracked)
            self._environments[key] = (environment, found[1] + 1 if found else 1)
            return environment

    def release(self, environment: Environment) -> None:
        """Counts it once less; at none it is closed for good and forgotten."""
        key = str(environment.path)
        with self._lock:
            kept, count = self._environments.get(key, (None, 0))
            if kept is not environment:
                return
            self._environments[key] = (environment, count - 1)
        # What a signal interrupted may have left its transaction open: then it stays, until the
        # process ends.
        while not environment.in_use_here and not self._forget_unused(key, environment):
            environment.close()

    def _forget_unused(self, key: str, environment: Environment) -> bool:
        # Waiting for transactions happens outside of the lock, which their threads may want.
        with self._lock:
            kept, count = self._environments.get(key, (None, 0))
            if kept is not environment or count > 0:
                return True
            if not environment.retire(timeout=0):
                return False
            del self._environments[key]
            self._discard(environment)
            return True

    def drop(self, environment: Environment) -> None:
        """Closes it for good, whoever counts on it.

        Raises:
            BusyError: it is in use here, inside of `not_waiting`.
        """
        if not environment.retire(patience()):
            raise BusyError(f"{environment.path} is to be closed, and is still in use here")
        with self._lock:
            kept, _ = self._environments.get(str(environment.path), (None, 0))
            if kept is environment:
                del self._environments[str(environment.path)]
            self._discard(environment)

    def _discard(self, environment: Environment) -> None:
        self._opened.pop(environment, None)
        self._writable.pop(environment, None)

    def opened(self) -> list[Environment]:
        """Those that LMDB has mapped now."""
        return self._swept(self._opened, lambda each: each.is_open)

    @staticmethod
    def _swept(
        noted: dict[Environment, None], is_so: Callable[[Environment], bool]
    ) -> list[Environment]:
        """Those of which it is so still; the others are taken out."""
        found = []
        for each in list(noted):
            if is_so(each):
                found.append(each)
            else:
                noted.pop(each, None)
                if is_so(each):  # opened meanwhile
                    noted[each] = None
        return found

    def with_room(self, environment: Environment, open_it: Callable[[], None]) -> None:
        """Opens one more, and before that closes idle ones, any of them.

        Each takes three descriptors (on macOS five, for there LMDB's locks are files too), and a
        quarter of them is left to the program. Where that has more open itself, half of the idle
        ones are closed, and no more are open from then on.
        """
        cap = min(self.open_cap, descriptor_limit() // (7 if sys.platform == "darwin" else 4))
        if len(self._writable) >= WRITABLE_CAP:
            writable = self._swept(self._writable, lambda each: each.is_writable)
            self._make_room(writable, WRITABLE_CAP)
        if len(self._opened) >= cap:
            self._make_room(self.opened(), cap)
        with_descriptor(open_it)
        # No sooner: what is not open is taken out.
        self._discard(environment)
        self._opened[environment] = None
        if environment.is_writable:
            self._writable[environment] = None

    def close_half(self) -> None:
        """Closes half of them, idle ones; see `with_room`."""
        with GATE.use():
            opened = self.opened()
            self.open_cap = max(len(opened) // 2, 1)
            self._close_idle(opened, self.open_cap - 1)

    def _make_room(self, opened: Sequence[Environment], cap: int) -> None:
        if len(opened) >= cap:
            self._close_idle(opened, cap - max(cap // _SHARE, 1))

    @staticmethod
    def _close_idle(opened: Sequence[Environment], left: int) -> None:
        surplus = len(opened) - left
        # Not those that were used longest ago: whoever goes over more than may be open, time and
        # again, comes to these next. Half are such as were opened last, so that the others stay.
        late = _CHANCE.sample(opened[-surplus:], surplus - surplus // 2)
        for environment in late + _CHANCE.sample(opened, len(opened)):
            if surplus <= 0:
                return
            surplus -= environment.is_open and environment.close(timeout=0)

    # -- fork --------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Closes all; see `txnkv.storage.fork`."""
        for environment in self.opened():
            environment.close_now()
        self._opened.clear()
        self._writable.clear()

    def after_fork_in_child(self) -> None:
        """Keeps the objects, which open anew."""
        for environment, _ in self._environments.values():
            environment.forget_after_fork()

    def inherited(self) -> list[object]:
        """Return the objects that a child of an unquiet fork must never touch."""
        kept: list[object] = []
        for environment, _ in list(self._environments.values()):
            kept += environment.inherited()
        return kept


_TABLE = _Table()
CLOSE_IDLE.append(_TABLE.close_half)


class Environments:
    """The environments of one store, by name: "tablets/12", "logs/3"."""

    def __init__(
        self,
        directory: StoreDirectory,
        initial_map_size: int = 64 << 30,
        extents: Extents | None = None,
    ) -> None:
        """Prepares; nothing is opened yet.

        Args:
            directory: the store.
            initial_map_size: bytes of address space of each environment at first.
            extents: how far each was written; None where that is not kept.
        """
        self._directory = directory
        self._extents = extents
        self.map_size = initial_map_size
        self._lock = new_lock()
        self._held: dict[str, Environment] = {}
        self._closed = False

    def get(
        self,
        name: str,
        create: bool = True,
        label: str = "",
        part: str = "",
        databases: Sequence[bytes] = (),
    ) -> Environment:
        """The environment of this name, below the store's folder; the same object every time.

        Args:
            name: of the folder.
            create: make it when it is missing.
            label: as messages to people name it.
            part: as people name it to `txnkv repair`.
            databases: that a new one has from the beginning.

        Raises:
            StoreNotFoundError: there is none and `create` is false, or the store is read-only.
            CorruptionError: it was there, and is gone.
            DeniedError: this user may not look.
            ClosedError: the store was closed.
        """
        with GATE.use():
            with self._lock:
                found = self._known(name)
            if found is None:
                # Not under the lock: many are made side by side, and each waits for the disk.
                tracked = self._tracked(name, label, part)
                path = self._made(name, create, tracked, databases)
                options = EnvironmentOptions(self.map_size, read_only=self._directory.read_only)
                with self._lock:
                    found = self._known(name)
                    if found is None:
                        found = self._held[name] = _TABLE.acquire(path, options, tracked)
            return found

    def _known(self, name: str) -> Environment | None:
        held = self._held.get(name)
        if held is not None and not held.is_retired:
            return held
        if self._closed:
            raise ClosedError(f"store {self._directory.path} is closed; open it again")
        return None

    def was_made(self, name: str, label: str, part: str) -> bool:
        """Return True when there is an environment of this name.

        Raises:
            CorruptionError: it was there, and is gone.
        """
        return self._is_there(self._directory.path / name, self._tracked(name, label, part))

    def known(self, name: str, label: str, part: str) -> Environment:
        """The environment of this name, whether it is there or not: for whoever mends it."""
        with GATE.use(), self._lock:
            held = self._held.get(name)
            if held is None or held.is_retired:
                path = Path(os.path.realpath(self._directory.path / name))
                options = EnvironmentOptions(self.map_size)
                held = _TABLE.acquire(path, options, self._tracked(name, label, part))
                self._held[name] = held
            return held

    def require_there(self) -> None:
        """Refuse a store that was removed, moved or replaced: no file is gone alone there.

        Raises:
            StoreNotFoundError: it was.
        """
        if self._extents is not None:
            self._extents.require_there()

    def _is_there(self, path: Path, tracked: Tracked | None) -> bool:
        with disk_errors(path):
            if is_there(path / "data.mdb"):
                return True
            # Looked at again: it may have been made meanwhile.
            if tracked is not None and tracked.required() and not is_there(path / "data.mdb"):
                raise tracked.gone(path)
            return is_there(path / "data.mdb")

    def _tracked(self, name: str, label: str, part: str) -> Tracked | None:
        # Side logs of their own are accounted for in that of their partition.
        if self._extents is None or name.count("/") != 1:
            return None
        return Tracked(self._extents, name, label, part)

    def _made(
        self, name: str, create: bool, tracked: Tracked | None, databases: Sequence[bytes]
    ) -> Path:
        path = Path(os.path.realpath(self._directory.path / name))
        read_only = self._directory.read_only
        if not self._is_there(path, tracked):
            if read_only or not create:
                raise StoreNotFoundError(
                    f"no LMDB environment {name!r} in store {self._directory.path}; it was never "
                    "made, or was removed"
                )
            with disk_errors(path):
                with_descriptor(make_environment_files, path, databases)
        return path

    def drop(self, name: str) -> None:
        """Closes an environment for good, so that its files may go; one not known is fine.

        The files stay: `StoreDirectory.remove_tablet_dir` removes them.
        """
        with GATE.use():
            if self._extents is not None:
                self._extents.discard(name)
            environment = self._held.get(name)
            if environment is not None:
                _TABLE.drop(environment)
                with self._lock:
                    if self._held.get(name) is environment:
                        del self._held[name]

    def close_gone(self) -> None:
        """Closes those whose files were removed by another process: as long as they are open, the
        disk has them still.
        """
        for name, environment in list(self._held.items()):
            if environment.is_open and not is_there(environment.path / "data.mdb"):
                self.drop(name)

    def close_all(self) -> None:
        """Closes all, once their transactions have ended. `get` raises ClosedError from now on."""
        with GATE.use():
            with self._lock:
                self._closed = True
                held, self._held = list(self._held.values()), {}
            for environment in held:
                _TABLE.release(environment)

    def reader_check(self) -> int:
        """Frees the reader slots of dead processes in all open environments; says how many."""
        return sum(each.reader_check() for each in list(self._held.values()) if each.is_open)

    def give_room_back(self) -> int:
        """Has the disk use again what the open files do not need; returns the bytes.

        A file whose writers are held up for long is gone on with the next time.
        """
        given = 0
        for each in list(self._held.values()):
            until = time.monotonic() + _GIVING_SECONDS
            while time.monotonic() < until and (more := each.give_room_back(HOLD_SECONDS)):
                given += more
        return given

    @property
    def open_count(self) -> int:
        """The number of environments of this store that LMDB has mapped."""
        return sum(each.is_open for each in list(self._held.values()))
