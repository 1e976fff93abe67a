"""A file that is given up in part: a copy of what is there takes its place, as another file.

Nobody may have it open, as for `shrink`. The copy has an identity of its own, so that whatever a
process knew of the old file does not count for it:

    aside     a copy, or a new file where there is nothing to copy; what is lost is taken out
    status.db the extent of that file, and whatever else changes      from here on it is another one
    rename    into its place

After a death in between, the file is another one than status.db says, and it is begun again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import apsw
import lmdb

from txnkv.errors import UnavailableError
from txnkv.storage import extents
from txnkv.storage.directory import make_private_directory, sync_directory
from txnkv.storage.environment import Environment
from txnkv.storage.extents import Extent
from txnkv.storage.lmdb_open import EnvironmentOptions, make_environment_files
from txnkv.storage.seam import declare_fault_point, fault_point
from txnkv.storage.shrink import alone, copy, sync_file
from txnkv.storage.status_db import StatusDatabase

declare_fault_point("mending.written", "a file that takes a damaged one's place is durable, aside")
declare_fault_point("mending.named", "status.db names it, it is not in its place")

_ASIDE: Final = "mended"


class Mending:
    """A damaged environment that is aside.

    Attributes:
        environment: what could be copied of it; it may be read and changed.
        is_copy: False where there was nothing to copy.
    """

    def __init__(self, path: Path, name: str, map_size: int) -> None:
        self._path = path
        self._aside = path / _ASIDE
        self._name = name
        self._map_size = map_size
        self.is_copy = self._copied()
        self.environment = self._open()

    def make_anew(self) -> None:
        """Nothing of what could be copied is of use."""
        self.close()
        make_environment_files(self._aside)
        self.is_copy = False
        self.environment = self._open()

    def put_in_place(self, status: StatusDatabase, also: Callable[[apsw.Cursor], object]) -> None:
        """Have it take the place of the damaged one.

        Args:
            status: of the store.
            also: what changes with that in status.db.
        """
        self.environment.close_now()
        file = self._aside / "data.mdb"
        env = lmdb.open(str(self._aside), lock=False, map_size=self._map_size, create=False)
        try:
            number = extents.read_extent(env).written
            extent = Extent(extents.new_identity(), number + 1)
            extents.write_mark(env, extent)
        finally:
            env.close()
        sync_file(file)
        fault_point("mending.written")
        with status.write() as cur:
            extents.replace(cur, self._name, extent)
            also(cur)
        fault_point("mending.named")
        os.chmod(file, 0o600)
        os.replace(file, self._path / "data.mdb")
        sync_directory(self._path)
        sync_directory(self._path.parent)

    def close(self) -> None:
        """Remove what is aside."""
        self.environment.close_now()
        shutil.rmtree(self._aside, ignore_errors=True)

    def _open(self) -> Environment:
        options = EnvironmentOptions(self._map_size)
        return Environment(self._aside, options, lambda _, open_it: open_it())

    def _copied(self) -> bool:
        shutil.rmtree(self._aside, ignore_errors=True)  # of one that died
        make_private_directory(self._aside)
        with suppress(lmdb.Error, OSError):
            if _is_whole(self._path, self._map_size):
                env = lmdb.open(str(self._path), readonly=True, lock=False, map_size=self._map_size)
                try:
                    copy(env, self._aside, self._map_size)
                finally:
                    env.close()
                return True
        shutil.rmtree(self._aside, ignore_errors=True)
        make_environment_files(self._aside)
        return False


@contextmanager
def mend(environment: Environment, name: str, map_size: int) -> Iterator[Mending]:
    """Be alone with a damaged environment, as a `with` block.

    Raises:
        UnavailableError: another process has it open.
    """
    path = environment.path
    make_private_directory(path)
    with environment.closed(), alone(path) as is_alone:
        if not is_alone:
            raise UnavailableError(
                f"{path} is open in another process. Close the store there, and try again"
            )
        it = Mending(path, name, map_size)
        try:
            yield it
        finally:
            it.close()


def _is_whole(path: Path, map_size: int) -> bool:
    """Return True when the file is as long as LMDB believes: a read behind its end is a SIGBUS."""
    size = (path / "data.mdb").stat().st_size
    if size == 0:
        return False
    env = lmdb.open(str(path), readonly=True, lock=False, map_size=map_size)
    try:
        return bool((env.info()["last_pgno"] + 1) * env.stat()["psize"] <= size)
    finally:
        env.close()
