"""Replacing an LMDB file: by a smaller copy of it, or by what is left of a damaged one.

LMDB uses pages again but never makes its file shorter; a copy without free pages is shorter
(`shrink`). A damaged file is given up in part: a copy of what can be read takes its place, as
another file with an identity of its own, so that whatever a process knew of the old one does not
count for it (`mend`).

A file can be replaced only while nobody has it open: a process that maps the old one would go on
writing to a file that is gone. LMDB itself says who that is. Each process that has an environment
open holds a shared lock on the first byte of lock.mdb; with the exclusive lock on that byte nobody
has it open, and who opens it waits for us:

    we       lock -> void lock.mdb -> copy -> sync -> rename -> sync -> unlock
    another          open: waits for its shared lock ...  has it, lock.mdb is void: opens again

Who opens it alone fills in lock.mdb, with the number of the file's latest transaction; who waited
for a shared lock takes that as it finds it. The copy counts from 1 again: with the old file's
number, LMDB would read and write on from whichever of the two meta pages that number falls on,
and what was committed last would be gone. So nobody finds it. How far the file was written is kept
all the same: `extents`.

Mending has one step more, for status.db knows the file:

    aside     a copy, or a new file where there is nothing to copy; what is lost is taken out
    status.db the extent of that file, and whatever else changes      from here on it is another one
    rename    into its place

After a death in between, the file is another one than status.db says, and that one is aside still:
it is begun again with it. Any other file that is not the one of status.db, as that of another part
or store, is of no use.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import apsw
import lmdb

from txnkv.errors import UnavailableError
from txnkv.storage import extents
from txnkv.storage.directory import make_private_directory, opened, sync, sync_directory
from txnkv.storage.environment import Environment
from txnkv.storage.extents import Extent
from txnkv.storage.faults import (
    declare_fault_point,
    disk_errors,
    errno_of,
    fault_point,
    lmdb_error,
    remove_folder,
)
from txnkv.storage.lmdb_open import EnvironmentOptions, make_environment_files
from txnkv.storage.status_db import StatusDatabase

declare_fault_point("shrink.copied", "a smaller copy of an LMDB file is durable, not in its place")
declare_fault_point("shrink.renamed", "a smaller copy of an LMDB file took its place")

_COPY: Final = "compact"
_VOID: Final = bytes(8)
"""Instead of the magic number and the format of lock.mdb: LMDB refuses to share that."""


def shrink(environment: Environment) -> tuple[int, int] | None:
    """Replace the file of an environment by a copy without free pages.

    Returns:
        Bytes of the file before and after; None when another process has it open.

    Raises:
        StorageFullError: no room for the copy; the file is as it was.
    """
    folder = environment.path
    with environment.closed(), alone(folder) as is_alone:
        if not is_alone:
            return None
        aside = folder / _COPY
        shutil.rmtree(aside, ignore_errors=True)  # of one that died
        try:
            return _replace(folder, aside, environment.map_bytes)
        except (lmdb.Error, OSError) as error:
            translated = lmdb_error(error, folder)
            if translated is None:
                raise
            raise translated from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def _replace(folder: Path, aside: Path, map_size: int) -> tuple[int, int]:
    file, smaller = folder / "data.mdb", aside / "data.mdb"
    make_private_directory(aside)
    with _opened(folder, map_size, readonly=True) as env:
        extents.copy(env, aside, map_size)
    sync_file(smaller)
    fault_point("shrink.copied")
    sizes = file.stat().st_size, smaller.stat().st_size
    os.replace(smaller, file)
    sync_directory(folder)
    fault_point("shrink.renamed")
    return sizes


@contextmanager
def alone(folder: Path) -> Iterator[bool]:
    """The exclusive lock on the first byte of lock.mdb; False when somebody has it open."""
    with opened(folder / "lock.mdb", os.O_RDWR | os.O_CREAT) as descriptor:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            yield False
        else:
            if os.fstat(descriptor).st_size:
                os.pwrite(descriptor, _VOID, 0)
            yield True


def sync_file(file: Path) -> None:
    """Make what was written to a file durable."""
    with opened(file, os.O_RDONLY) as descriptor:
        sync(descriptor)


def _opened(folder: Path, map_size: int, *, readonly: bool) -> closing[Any]:
    """An environment without LMDB's locks, of which closing the lock file would drop ours."""
    return closing(
        lmdb.open(str(folder), readonly=readonly, lock=False, map_size=map_size, create=False)
    )


declare_fault_point("mending.written", "a file that takes a damaged one's place is durable, aside")
declare_fault_point("mending.named", "status.db names it, it is not in its place")

_ASIDE: Final = "mended"


class Mending:
    """A damaged environment that is aside.

    Attributes:
        environment: what could be copied of it; it may be read and changed.
        is_copy: False where there was nothing to copy.
    """

    def __init__(self, path: Path, name: str, map_size: int, status: StatusDatabase) -> None:
        self._path = path
        self._aside = path / _ASIDE
        self._name = name
        self._map_size = map_size
        self._status = status
        with status.read() as cur:
            self._required = extents.find(cur, name)
        # It may be the file that status.db names.
        self._is_named = self._required is not None and self._is_usable(self._aside)
        self.is_copy = self._is_named or self._copied()
        self.environment = self._open()

    def make_anew(self) -> None:
        """Nothing of what could be copied is of use."""
        self._is_named = False
        self.environment.close_now()
        _remove(self._aside)
        make_environment_files(self._aside)
        self.is_copy = False
        self.environment = self._open()

    def put_in_place(self, also: Callable[[apsw.Cursor], object]) -> None:
        """Have it take the place of the damaged one; `also` changes what does with that in
        status.db.
        """
        self.environment.close_now()
        file = self._aside / "data.mdb"
        with _opened(self._aside, self._map_size, readonly=False) as env:
            extent = extents.read_extent(env)
            if not self._is_named:
                extent = Extent(extents.new_identity(), extent.written + 1)
                extents.write_mark(env, extent)
        sync_file(file)
        fault_point("mending.written")
        self._is_named = True
        with self._status.write() as cur:
            extents.replace(cur, self._name, extent)
            also(cur)
        fault_point("mending.named")
        os.chmod(file, 0o600)
        os.replace(file, self._path / "data.mdb")
        self._is_named = False
        sync_directory(self._path)
        sync_directory(self._path.parent)

    def close(self) -> None:
        """Remove what is aside, unless it is to be begun again with it."""
        self.environment.close_now()
        if not self._is_named:
            shutil.rmtree(self._aside, ignore_errors=True)

    def _open(self) -> Environment:
        options = EnvironmentOptions(self._map_size)
        return Environment(self._aside, options, lambda _, open_it: open_it())

    def _copied(self) -> bool:
        _remove(self._aside)  # of one that died
        make_private_directory(self._aside)
        try:
            if self._is_usable(self._path):
                with _opened(self._path, self._map_size, readonly=True) as env:
                    extents.copy(env, self._aside, self._map_size)
                return True
        except BaseException as error:
            told = lmdb_error(error, self._path)  # a disk is full as long as the copy is there
            _remove(self._aside)
            if not _is_damage(error):
                if told is None:
                    raise
                raise told from error
        make_environment_files(self._aside)
        return False

    def _is_usable(self, path: Path) -> bool:
        """Return True when a file is whole, and the one of status.db, if that knows one."""
        file = path / "data.mdb"
        try:
            # A read behind its end is a SIGBUS.
            if size := file.stat().st_size:
                with _opened(path, self._map_size, readonly=True) as env:
                    end = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
                    required = self._required
                    return end <= size and (
                        required is None or extents.read_mark(env)[0] == required.identity
                    )
        except lmdb.MemoryError:
            with opened(file, os.O_RDONLY) as descriptor:
                if not extents.is_cut_off(descriptor):  # else it asks for what no file has
                    raise
        except (lmdb.Error, OSError) as error:
            if not _is_damage(error):
                raise
        return False


def _is_damage(error: BaseException) -> bool:
    """Return True for an error that tells of the file which is read. Any other, as of a disk that
    is full or fails, says nothing of it: what cannot be read now is not lost.
    """
    if isinstance(error, lmdb.Error):  # LMDB's own numbers are negative; EFAULT: no such page
        return errno_of(error) < 0 or errno_of(error) == errno.EFAULT
    return isinstance(error, FileNotFoundError)


def _remove(folder: Path) -> None:
    with suppress(FileNotFoundError):
        remove_folder(folder)


@contextmanager
def mend(environment: Environment, name: str, status: StatusDatabase) -> Iterator[Mending]:
    """Be alone with a damaged environment, as a `with` block.

    Args:
        environment: the damaged one.
        name: in status.db.
        status: of the store.

    Raises:
        UnavailableError: another process has it open, or the disk failed.
        StorageFullError: no room for the copy; nothing was changed.
        DeniedError: this user may not read it; so it may be well.
    """
    path = environment.path
    with disk_errors(path), suppress(FileNotFoundError), opened(path / "data.mdb", os.O_RDONLY):
        pass
    with environment.closed(), disk_errors(path), ExitStack() as held:
        make_private_directory(path)
        if not held.enter_context(alone(path)):
            raise UnavailableError(
                f"{path} is open in another process. Close the store there, and try again"
            )
        it = Mending(path, name, environment.map_bytes, status)
        try:
            yield it
        finally:
            it.close()
