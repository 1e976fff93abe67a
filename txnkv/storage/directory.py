"""The directory of a store: its layout, its making, and the FORMAT file that identifies it.

    store/              0700
      FORMAT            JSON: format, version, features, store_id; there is a store when it is
      status.db         SQLite, made by the status database on first use
      tablets/<id>/     one LMDB environment each
      logs/<id>/        one LMDB environment each
      runtime/          volatile; made again when missing

FORMAT is renamed into place last. A crash before that leaves a directory that holds only the
file CREATING and empty folders, which the next creator completes; a directory with anything
else in it and no FORMAT is somebody else's and is refused.

A store may be removed, moved or replaced while it is open. Its files live on for who has them
open, and nobody else sees what is written there: a commit would return as if it were durable.
Device and inode tell (`FileIdentity`); an inode is not given to another file while this process
has it open, and of the runtime file it always has the mapping.

    each write to status.db          the lock file on which writers queue is still linked (fstat)
    each new connection, and after   status.db is the file that was opened first
    a fork
    each open, and once a second     the folder, the runtime file and status.db are
    (maintenance)
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from txnkv.errors import (
    CorruptionError,
    IncompatibleStoreError,
    NotSupportedError,
    StoreNotFoundError,
)
from txnkv.storage.faults import (
    close_descriptor,
    declare_fault_point,
    disk_errors,
    fault_point,
    give_to_owner,
    is_there,
    open_private,
    with_descriptor,
)

STATUS_PAGE_BYTES: Final = 4096
"""Bytes of a page of status.db."""
FORMAT_NAME = "txnkv"
FORMAT_VERSION = 10
OLDER_VERSIONS = frozenset({1, 2, 3, 4, 5, 6, 7, 8, 9})
"""Versions that are brought up to this one when a store is opened to write."""
FIRST_WITH_EXTENTS = 6
"""The first version that keeps how far environments were written."""
FIRST_WITH_BACKUPS = 8
"""The first version of which there are backups."""
INDEXES: Final = "indexes"
"""The feature of a store that has had an index: who does not know of it writes past it."""
KEY_SHARING: Final = "key_shared"
"""The feature of a store that has had a key_shared subscription: its leases have hashes of keys."""
PLACES: Final = "places"
"""The feature of a store of which a batch has had gaps between the offsets of its messages."""
VALUE_SCHEMAS: Final = "value_schemas"
"""The feature of a store of which a topic has had a second value schema, or one with defaults."""
READ_OTHERWISE: Final = "read_otherwise"
"""The feature of a store that has had a subscription with an order or isolation of its own."""
TABLE_HISTORY: Final = "table_history"
"""The feature of a store of which a table has had a history of its own."""
KNOWN_FEATURES: frozenset[str] = frozenset(
    {INDEXES, KEY_SHARING, PLACES, VALUE_SCHEMAS, READ_OTHERWISE, TABLE_HISTORY}
)

LIST: Final = "BACKUP"
"""The file that a backup has instead of FORMAT."""
_STATUS_PATH_BYTES: Final = 504
"""SQLite's limit is 512, with what it appends for other files."""
_CREATING = "CREATING"
_FORMAT_NEW = "FORMAT.new"
_FOLDERS = ("tablets", "logs", "runtime")
_REMOVED = ".removed-"

declare_fault_point("directory.before_format", "a new store has its folders, not its FORMAT")


@dataclass(frozen=True)
class StoreDirectory:
    """The paths of one store that exists and has a format which this version knows.

    Attributes:
        path: the real, absolute path of the store.
        store_id: 32 hexadecimal digits, drawn when the store was made.
        read_only: True when nothing may be written below `path`.
        version: of the format, as FORMAT had it when the store was opened.
    """

    path: Path
    store_id: str
    read_only: bool
    version: int = FORMAT_VERSION

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], create: bool = True, read_only: bool = False
    ) -> StoreDirectory:
        """Opens the store at `path`, and makes it when it is missing and `create` is true.

        Any number of processes may do this at once: one makes the store, all open it.

        Raises:
            StoreNotFoundError: there is none and it was not to be made.
            IncompatibleStoreError: the format is unknown, or the directory holds other things.
            CorruptionError: FORMAT cannot be read as what it is.
        """
        real = store_path(path)
        if not is_there(real / "FORMAT"):
            if read_only or not create:
                raise StoreNotFoundError(_not_found(real))
            _create(real)
        store_id, version, _ = _read_format(real)
        if read_only and version != FORMAT_VERSION:
            raise IncompatibleStoreError(
                f"store {real} has format version {version}, this is version {FORMAT_VERSION}: "
                "open it once to write, which brings it up to date"
            )
        store = cls(real, store_id, read_only, version)
        if not read_only:
            store._mend()
        return store

    @property
    def status_path(self) -> Path:
        """The SQLite database of the store."""
        return self.path / "status.db"

    @property
    def status_lock_path(self) -> Path:
        """The file on which writers of the status database queue."""
        return self.path / "status.lock"

    def mark_upgraded(self) -> None:
        """Names the current version in FORMAT, once all else is of that version."""
        if self.version != FORMAT_VERSION:
            _write_format(self.path, self.store_id, self.features)

    @property
    def features(self) -> list[str]:
        """The features that FORMAT names by now."""
        return _read_format(self.path)[2]

    def add_feature(self, feature: str) -> None:
        """Name a feature in FORMAT, durably: from here on versions that do not know it refuse the
        store. Called while status.db is locked, so that others do not at the same time.

        Raises:
            StorageFullError: the disk is full; nothing was changed.
            UnavailableError: it failed.
        """
        with disk_errors(self.path / "FORMAT"):
            features = self.features
            if feature not in features:
                _write_format(self.path, self.store_id, [*features, feature])

    @property
    def runtime_path(self) -> Path:
        """The folder of what is volatile."""
        return self.path / "runtime"

    def refuse_lost_status(self, used: bool, no_schema: bool) -> bool:
        """Refuse to begin anew where status.db or its WAL had something. By the files at first:
        SQLite would empty the WAL of a database that is missing, and make what is missing.

        Args:
            used: commits are known to be on the disk, by what was there before this look.
            no_schema: SQLite has looked, and there is none. Else by the size: one has more pages.

        Returns:
            The store was used before this look: for the one at the schema, beside which another
            process may make the store.

        Raises:
            CorruptionError: one of them is lost; nothing was changed.
        """
        files = self.status_path, self.path / "status.db-wal"
        if not no_schema:
            used = used or any(_holds_something(self.path / name) for name in ("tablets", "logs"))
            used = used or is_there(self.path / "maintenance.lock")
        # The WAL first: who makes a store writes to the database before.
        wal, size = _size(files[1]), _size(files[0])
        lost = [file for file, bytes_ in zip(files, (size, wal), strict=True) if bytes_ == 0]
        is_lost = no_schema or size == 0 or (wal == 0 and size <= STATUS_PAGE_BYTES)
        if not (is_lost and used) and not (wal and size == 0):
            return used
        what = "missing or empty" if lost else "damaged"
        raise CorruptionError(
            f"{' and '.join(map(str, lost or files))}: {what}, and the store was written to. The "
            "two files are one database: the catalog and the last commits. Nothing was changed: "
            "put back what was there, both of one time, or restore the store from a backup"
        )

    def tablet_dir(self, tablet_id: int) -> Path:
        """The folder of a tablet's LMDB environment, there or not."""
        return self.path / "tablets" / str(tablet_id)

    def log_dir(self, log_id: int) -> Path:
        """The folder of a log's LMDB environment, there or not."""
        return self.path / "logs" / str(log_id)

    def remove_tablet_dir(self, tablet_id: int) -> None:
        """Removes a tablet's files; one that is not there is fine. Drop its environment first.

        Raises:
            UnavailableError: the disk failed; it is to be tried again.
        """
        self._remove(self.tablet_dir(tablet_id))

    def remove_log_dir(self, log_id: int) -> None:
        """Removes a log's files; one that is not there is fine. Drop its environment first.

        Raises:
            UnavailableError: the disk failed; it is to be tried again.
        """
        self._remove(self.log_dir(log_id))

    def _remove(self, folder: Path) -> None:
        # Renamed first, so that after a crash there is a whole environment or none.
        aside = folder.with_name(f"{_REMOVED}{folder.name}-{uuid.uuid4().hex}")
        with disk_errors(folder):
            try:
                folder.rename(aside)
            except FileNotFoundError:
                return
            try:
                sync_directory(folder.parent)
            finally:
                shutil.rmtree(aside, ignore_errors=True)

    def _mend(self) -> None:
        for name in _FOLDERS:
            make_private_directory(self.path / name)
        for parent in ("tablets", "logs"):
            for left in (self.path / parent).glob(f"{_REMOVED}*"):
                shutil.rmtree(left, ignore_errors=True)


def folder_at(path: str | os.PathLike[str]) -> Path:
    """The real, absolute path of a folder of this machine, there or not.

    Raises:
        ValueError: it is empty or ":memory:", not UTF-8, or a name in it is too long.
        NotSupportedError: it is an address.
        StoreNotFoundError: it leads nowhere.
    """
    if isinstance(path, bytes):
        raise TypeError(f"a path is a str or an os.PathLike of one, not {path!r}: os.fsdecode it")
    given = Path(path)
    if os.fspath(path) in ("", ":memory:"):
        raise ValueError(
            f"{path!r} names no folder. For one that goes with the program take "
            "tempfile.TemporaryDirectory(), below /dev/shm for one in memory"
        )
    if "://" in os.fspath(path):
        raise NotSupportedError(f"{path!r} is an address: name a folder of this machine")
    try:
        real = Path(os.path.realpath(given))
        str(real).encode()
    except UnicodeEncodeError:  # SQLite wants it
        raise ValueError(f"{os.fspath(path)!r} is not UTF-8: name another path") from None
    except FileNotFoundError as error:
        raise StoreNotFoundError(
            f"{path} leads nowhere: the working directory of this process was removed. Change to "
            "another, or name an absolute path"
        ) from error
    try:
        os.stat(real)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ValueError(f"{path} has a name that is too long: name a shorter path") from error
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise StoreNotFoundError(
                f"no folder can be at {path}: {error.strerror}. Check the path: it leads over a "
                "file, or over links that lead back"
            ) from error
    return real


def store_path(path: str | os.PathLike[str]) -> Path:
    """The real, absolute path of a store, there or not.

    Raises:
        ValueError: as for `folder_at`; or it is too long for SQLite.
        NotSupportedError, StoreNotFoundError: as for `folder_at`.
    """
    real = folder_at(path)
    over = len(str(real / "status.db").encode()) - _STATUS_PATH_BYTES
    if over > 0:
        raise ValueError(
            f"{real} is too long by {over} bytes for SQLite to open status.db below it: name a "
            "shorter one. A link counts as what it leads to"
        )
    return real


# -- making ----------------------------------------------------------------------------


def _create(path: Path) -> None:
    _make_store_folder(path)
    with _creation_lock(path):
        if is_there(path / "FORMAT"):
            return
        # A power loss may keep any of the names that are not durable: without CREATING the
        # others would look like somebody else's, without a name of its own the store is gone.
        sync_directory(path)
        sync_directory(path.parent)
        for name in _FOLDERS:
            make_private_directory(path / name)
        fault_point("directory.before_format")
        _write_format(path, uuid.uuid4().hex, [])
        (path / _CREATING).unlink(missing_ok=True)
        sync_directory(path)


def _make_store_folder(path: Path) -> None:
    missing = [parent for parent in path.parents if not is_there(parent)]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for made in missing:
            sync_directory(made.parent)
        path.mkdir(mode=0o700)
    except FileNotFoundError as error:  # as /proc says it
        raise NotSupportedError(
            f"no folder can be made in {path.parent}: {error}. Name another path"
        ) from error
    except FileExistsError:
        if not path.is_dir():
            raise StoreNotFoundError(f"{path} is a file; a store is a directory") from None
        _refuse_foreign(path)
    path.chmod(0o700)


def _refuse_foreign(path: Path) -> None:
    names = {entry.name for entry in path.iterdir()}
    if not names or "FORMAT" in names:
        return
    ours = {_CREATING, _FORMAT_NEW, *_FOLDERS}
    half_made = _CREATING in names and names <= ours
    if half_made and not any(_holds_something(path / name) for name in _FOLDERS):
        return
    if LIST in names:
        raise IncompatibleStoreError(_not_found(path))
    shown = ", ".join(sorted(names - {_CREATING})[:5])
    # The maker may have finished between the two looks.
    if is_there(path / "FORMAT"):
        return
    raise IncompatibleStoreError(
        f"{path} is no txnkv store (it has no FORMAT file) and is not empty: it holds {shown}. "
        "Name a directory that is empty or not there, or put the FORMAT file back"
    )


def _holds_something(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is not None
    except (FileNotFoundError, NotADirectoryError):
        return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


@contextmanager
def _creation_lock(path: Path) -> Iterator[None]:
    # The winner unlinks the file once FORMAT is there. Whoever waited on the unlinked file gets
    # its lock then and finds FORMAT; whoever comes later finds FORMAT before it looks for a lock.
    # A loser that opens the name again in between makes a file which it must take away itself.
    with opened(path / _CREATING, os.O_RDWR | os.O_CREAT) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
        if is_there(path / "FORMAT"):
            (path / _CREATING).unlink(missing_ok=True)


def _write_format(path: Path, store_id: str, features: Sequence[str]) -> None:
    content = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "features": sorted(features),
        "store_id": store_id,
    }
    new = path / _FORMAT_NEW
    with open(open_private(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
        file.write(json.dumps(content) + "\n")
        file.flush()
        sync(file.fileno())
    new.rename(path / "FORMAT")
    sync_directory(path)


# -- opening ---------------------------------------------------------------------------


def _not_found(path: Path) -> str:
    if path.is_file():
        return f"{path} is a file; a store is a directory"
    if is_there(path / LIST):
        made = "txnkv.restore or `txnkv restore` makes a store of it"
        return f"{path} is a backup, and no store: {made}, in another folder"
    if is_there(path / "status.db") and is_there(path / "tablets"):
        return f"no store at {path}: there is all but its FORMAT file; put that back"
    found = "there is no FORMAT file" if is_there(path) else "there is nothing"
    return f"no store at {path}: {found}. Check the path; txnkv.connect(path) makes a store there"


def _read_format(path: Path) -> tuple[str, int, list[str]]:
    """The id of the store, the version of its format, and the features that it uses."""
    text = (path / "FORMAT").read_bytes()
    content = _parse_json(path, text)
    name, version = content.get("format"), content.get("version")
    if name != FORMAT_NAME or version not in (FORMAT_VERSION, *OLDER_VERSIONS):
        raise IncompatibleStoreError(
            f"store {path} has format {name!r} version {version!r}; this is version "
            f"{FORMAT_VERSION} of {FORMAT_NAME!r}. Open it with the txnkv that wrote it"
        )
    features, store_id = content.get("features"), content.get("store_id")
    if not isinstance(features, list) or not _is_store_id(store_id):
        raise CorruptionError(_damaged_format(path, text))
    unknown = sorted(str(feature) for feature in features if feature not in KNOWN_FEATURES)
    if unknown:
        raise IncompatibleStoreError(
            f"store {path} (format version {version}) uses features that this version does not "
            f"know: {', '.join(unknown)}. Open it with a newer txnkv"
        )
    assert isinstance(version, int)
    return str(store_id), version, [str(feature) for feature in features]


def _parse_json(path: Path, text: bytes) -> dict[str, object]:
    with suppress(ValueError):
        if isinstance(content := json.loads(text), dict):
            return content
    raise CorruptionError(_damaged_format(path, text))


def _is_store_id(text: object) -> bool:
    return isinstance(text, str) and re.fullmatch("[0-9a-f]{32}", text) is not None


def _damaged_format(path: Path, text: bytes) -> str:
    return f"{path / 'FORMAT'} makes no sense: {text[:200]!r}. Put it back from a backup"


# -- files -----------------------------------------------------------------------------


def make_private_directory(path: Path) -> None:
    """Makes a directory of mode 0700, whatever the umask, of the owner of the one it lies in; one
    that is there stays as it is.
    """
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        return
    path.chmod(0o700)
    if os.geteuid() == 0:
        with opened(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) as descriptor:
            give_to_owner(descriptor, path)


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """A descriptor of `open_private`, closed at the end."""
    descriptor = open_private(path, flags)
    try:
        yield descriptor
    finally:
        close_descriptor(descriptor)


def numbers_in(folder: Path) -> set[int]:
    """Return the numbers by which the entries of a folder are named.

    Raises:
        FileNotFoundError: there is no such folder.
        UnavailableError: the disk failed, or too many files are open.
    """
    with disk_errors(folder):
        return {int(name) for name in with_descriptor(os.listdir, folder) if name.isdigit()}


def make_private_file(path: Path) -> None:
    """Makes an empty file of mode 0600, whatever the umask; one that is there stays as it is.

    Never called for a file on which this process may hold locks: closing any descriptor of a
    file drops every fcntl lock that the process has on it.
    """
    with suppress(FileExistsError), opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL):
        pass


FULL_SYNC: Final[int | None] = getattr(fcntl, "F_FULLFSYNC", None)
"""Command of macOS, whose fsync leaves what was written in the cache of the disk."""


def _sync_fully(descriptor: int) -> None:
    try:
        fcntl.fcntl(descriptor, FULL_SYNC or 0)
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY):
            raise
        os.fsync(descriptor)  # a file system that knows no other


sync: Final[Callable[[int], None]] = _sync_fully if FULL_SYNC else os.fsync
"""Makes what was written to a file durable, by its descriptor."""
sync_data: Final = _sync_fully if FULL_SYNC else getattr(os, "fdatasync", os.fsync)
"""The same, but for what reading it does not need."""


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        sync(descriptor)


def allocate(descriptor: int, length: int) -> None:
    """Gives a file blocks, for a write through a map to meet no full disk; what is in it stays.

    Raises:
        OSError: no room.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, length)
        return
    there = os.fstat(descriptor).st_size
    while there < length:
        there += os.pwrite(descriptor, bytes(length - there), there)


class FileIdentity:
    """A file or folder as it stood at its path when this was made."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found = _identity(path)

    def is_at(self, path: Path) -> bool:
        """Return True where `path` leads to it, too; False for one that was not there."""
        return self._found is not None and _identity(path) == self._found

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
        "any more. Close its clients; to go on, put the store back, or connect to where it is now"
    )


def sync_folders(folder: Path) -> None:
    """Makes the names in a directory durable, and those in the ones below it."""

    def refuse(error: OSError) -> None:
        raise error

    walk = with_descriptor(lambda: [*os.walk(folder, topdown=False, onerror=refuse)])
    for path, _, _ in walk:
        sync_directory(Path(path))
