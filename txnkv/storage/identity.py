"""Which file stands at a path: a store may be removed, moved or replaced while it is open.

Its files live on for who has them open, and nobody else sees what is written there: a commit would
return as if it were durable. Device and inode tell. An inode is not given to another file while
this process has it open, and of the runtime file it always has the mapping.

    each write to status.db          the lock file on which writers queue is still linked (fstat)
    each new connection, and after   status.db is the file that was opened first
    a fork
    each open, and once a second     the folder, the runtime file and status.db are
    (maintenance)
"""

from __future__ import annotations

import os
from pathlib import Path

from txnkv.errors import StoreNotFoundError


class FileIdentity:
    """A file or folder as it stood at its path when this was made."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found = _identity(path)

    def require(self) -> None:
        """Refuse to go on where it stands there no more.

        Raises:
            StoreNotFoundError: it was removed, or another stands in its place.
        """
        if _identity(self._path) != self._found:
            raise removed(self._path)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def removed(path: Path) -> StoreNotFoundError:
    """The error of who wants to write to a store that is not there any more."""
    return StoreNotFoundError(
        f"{path} was removed, moved or replaced while the store was open: nothing is written there "
        "any more. Close its clients; to go on, put the store back and connect again"
    )
