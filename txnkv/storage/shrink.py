"""Gives the space of free pages back: an LMDB file is copied without them and replaced.

LMDB uses pages again but never makes its file shorter. A copy can take the file's place only
while nobody has it open: a process that maps the old one would go on writing to a file that is
gone. LMDB itself says who that is. Each process that has an environment open holds a shared lock
on the first byte of lock.mdb; with the exclusive lock on that byte nobody has it open, and who
opens it waits for us:

    we       lock -> void lock.mdb -> copy -> sync -> rename -> sync -> unlock
    another          open: waits for its shared lock ...  has it, lock.mdb is void: opens again

Who opens it alone fills in lock.mdb, with the number of the file's latest transaction; who waited
for a shared lock takes that as it finds it. The copy counts from 1 again: with the old file's
number, LMDB would read and write on from whichever of the two meta pages that number falls on,
and what was committed last would be gone. So nobody finds it. How far the file was written is kept
all the same: `extents`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import lmdb

from txnkv.storage import extents
from txnkv.storage.directory import sync_directory
from txnkv.storage.lmdb_errors import translate
from txnkv.storage.seam import declare_fault_point, fault_point

declare_fault_point("shrink.copied", "a smaller copy of an LMDB file is durable, not in its place")
declare_fault_point("shrink.renamed", "a smaller copy of an LMDB file took its place")

_COPY: Final = "compact"
_VOID: Final = bytes(8)
"""Instead of the magic number and the format of lock.mdb: LMDB refuses to share that."""


def shrink(folder: Path, map_size: int) -> tuple[int, int] | None:
    """Replace the LMDB file of a folder by a copy without free pages.

    This process must not have it open, nor open it meanwhile.

    Args:
        folder: of the environment.
        map_size: address space to map it with.

    Returns:
        Bytes of the file before and after; None when another process has it open.

    Raises:
        StorageFullError: no room for the copy; the file is as it was.
    """
    with alone(folder) as is_alone:
        if not is_alone:
            return None
        aside = folder / _COPY
        shutil.rmtree(aside, ignore_errors=True)  # of one that died
        try:
            return _replace(folder, aside, map_size)
        except (lmdb.Error, OSError) as error:
            translated = translate(error, folder)
            if translated is None:
                raise
            raise translated from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def _replace(folder: Path, aside: Path, map_size: int) -> tuple[int, int]:
    file, smaller = folder / "data.mdb", aside / "data.mdb"
    aside.mkdir(mode=0o700)
    # Without LMDB's locks, for closing its lock file would drop ours.
    env = lmdb.open(str(folder), readonly=True, lock=False, map_size=map_size, create=False)
    try:
        copy(env, aside, map_size)
    finally:
        env.close()
    os.chmod(smaller, 0o600)
    sync_file(smaller)
    fault_point("shrink.copied")
    sizes = file.stat().st_size, smaller.stat().st_size
    os.replace(smaller, file)
    sync_directory(folder)
    fault_point("shrink.renamed")
    return sizes


def copy(env: Any, folder: Path, map_size: int) -> None:
    """Copy an `lmdb.Environment` without free pages; how far it was written is kept. Not synced.

    Args:
        env: what is written to it meanwhile may be in the copy, and is not counted.
        folder: there and empty.
        map_size: address space to map the copy with.
    """
    extent = extents.read_extent(env)
    env.copy(str(folder), compact=True)
    copied = lmdb.open(str(folder), lock=False, sync=False, map_size=map_size, create=False)
    try:
        extents.write_mark(copied, extent)
    finally:
        copied.close()


@contextmanager
def alone(folder: Path) -> Iterator[bool]:
    """The exclusive lock on the first byte of lock.mdb; False when somebody has it open."""
    descriptor = os.open(folder / "lock.mdb", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
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
    finally:
        os.close(descriptor)


def sync_file(file: Path) -> None:
    """Make what was written to a file durable."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
