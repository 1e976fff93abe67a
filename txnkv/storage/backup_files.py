"""The files of a backup, with a list of them that says what they are.

    BACKUP       a line of JSON, and a line with its CRC-32C: what was copied when, and for each
                 file its bytes and its CRC-32C. Written last
    status.db    as SQLite has it
    all else     entries of LMDB, one behind the other:

     0          4           8            12
    +----------+-----------+------------+----------+-----+-------+
    | database | key bytes | value bytes| database | key | value |     little-endian
    +----------+-----------+------------+----------+-----+-------+

A file that an earlier backup of the same store has is one file under two names (a hard link): what
was copied once is not copied again, and each backup is whole by itself, whatever becomes of the
others. So no file of a backup is ever written again.

**A whole folder** appears under its name, or nothing does.

    .shop.unfinished/     made beside the place, locked; filled; all names in it synced
    shop/                 rename, and the parent synced: there from here on

After a death the folder beside it is nobody's: its lock is free, and who makes the same one next
removes it. A power loss leaves the one or the other, for what is renamed is durable before.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import apsw

from txnkv.core import crc32c
from txnkv.errors import (
    CorruptionError,
    IncompatibleStoreError,
    StoreNotFoundError,
    TxnkvError,
    UnavailableError,
)
from txnkv.storage.directory import (
    FIRST_WITH_BACKUPS,
    FORMAT_VERSION,
    KNOWN_FEATURES,
    LIST,
    make_private_directory,
    make_private_file,
    sync,
    sync_directory,
    sync_folders,
)
from txnkv.storage.environment import Environment
from txnkv.storage.faults import (
    NO_DESCRIPTOR_ERRNOS,
    close_descriptor,
    declare_fault_point,
    disk_errors,
    fault_point,
    is_there,
    not_made,
    remove_folder,
    to_read,
    with_descriptor,
)
from txnkv.storage.sqlite_connection import sqlite_error
from txnkv.storage.threads import go_on

declare_fault_point("backup.file", "a file of a backup is durable, not listed")
declare_fault_point("backup.listed", "all of a backup is durable, it has not its name")

STATUS: Final = "status.db"
_NAME: Final = "txnkv backup"
_VERSION: Final = 2
_PLAIN_VERSION: Final = 1
"""The version of backups of stores that use no features."""
_HEAD: Final = struct.Struct("<III")
_READ_BYTES: Final = 4 << 20
_STEP_BYTES: Final = 16 << 20
"""Bytes that one read of LMDB gives, or one write takes."""

_PAUSE: Final = 0.1
"""Seconds of a pause, at most."""

Entry = tuple[bytes, bytes, bytes]
"""A database, a key and a value."""
Progress = Callable[[int], None]
"""Called with the number of bytes that were done since the last call."""


@dataclass(frozen=True)
class Listed:
    """A file as the list of a backup has it."""

    size: int
    crc: int


def copied(file: Any, take: Callable[[bytes], object]) -> Listed:
    """Give all that is left of an open file to `take`, piece by piece; what it was."""
    crc = size = 0
    while data := file.read(_READ_BYTES):
        go_on()
        take(data)
        crc, size = crc32c(data, crc), size + len(data)
    return Listed(size, crc)


class EntryFile:
    """A file of entries that is being written, or only counted.

    Attributes:
        size, crc: of what was put.
    """

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self.size = self.crc = 0

    def put(self, database: bytes, key: bytes, value: bytes) -> None:
        """Add an entry."""
        for part in (_HEAD.pack(len(database), len(key), len(value)), database, key, value):
            self._write(part)
            self.crc = crc32c(part, self.crc)
            self.size += len(part)


class BackupWriter:
    """A backup that is being written.

    Args:
        folder: where to.
        earlier: a backup of the same store, whose files are taken where they are the same.
        progress: see `Progress`.
        bytes_per_second: the most that is written.

    Attributes:
        files: by name.
        linked: bytes of those that are an earlier backup's.
    """

    def __init__(
        self,
        folder: Path,
        earlier: Backup | None,
        progress: Progress,
        bytes_per_second: float | None,
    ) -> None:
        self.files: dict[str, Listed] = {}
        self.linked = 0
        self._folder = folder
        self._earlier = earlier
        self._progress = progress
        self._rate = bytes_per_second
        self._began = time.monotonic()
        self._written = 0

    def add(self, name: str) -> None:
        """List a file that somebody else wrote at `path(name)`, and make it durable."""
        with to_read(self.path(name)) as file:
            listed = copied(file, lambda _: None)
            sync(file.fileno())
        self._done(name, listed)

    def entries(self, name: str, put_all: Callable[[EntryFile], object]) -> None:
        """Write a file of entries, which is durable then.

        Args:
            name: of the file.
            put_all: puts them; called twice where an earlier backup has a file of that name, for
                it may be the same.
        """
        if self._earlier is not None and name in self._earlier.files:
            counted = EntryFile(lambda _: None)
            put_all(counted)
            if self.link(name, Listed(counted.size, counted.crc)):
                return
        with self._opened(name) as write:
            written = EntryFile(write)
            put_all(written)
        self._done(name, Listed(written.size, written.crc))

    def link(self, name: str, wanted: Listed | None = None) -> bool:
        """Take a file of the earlier backup, if it has it.

        Args:
            name: of the file.
            wanted: it has to be that; None for a file that never changes.
        """
        earlier = self._earlier
        listed = None if earlier is None else earlier.files.get(name)
        if earlier is None or listed is None or wanted not in (None, listed):
            return False
        with suppress(OSError):  # on another disk, too many links: it is copied then
            if self._take(earlier, name, listed.size):
                self.files[name] = listed
                self.linked += listed.size
                self._progress(listed.size)
                return True
        return False

    def finish(self, content: dict[str, Any]) -> None:
        """Write the list; what is said of the backup as a whole goes with it."""
        files = {name: [file.size, file.crc] for name, file in sorted(self.files.items())}
        # One with features is of another version, so that who knows of none does not restore it.
        version = _VERSION if content.get("features") else _PLAIN_VERSION
        first = {"format": _NAME, "version": version, "store_version": FORMAT_VERSION}
        whole = {**first, **content, "files": files}
        line = json.dumps(whole).encode()
        self._put_list(b"%s\n%08x\n" % (line, crc32c(line)))
        fault_point("backup.listed")

    def _put_list(self, data: bytes) -> None:
        with self._opened(LIST) as write:
            write(data)

    @contextmanager
    def _opened(self, name: str) -> Iterator[Callable[[bytes], object]]:
        """A new file to write, durable at the end of the block."""
        path = self.path(name)
        make_private_file(path)
        with with_descriptor(lambda: path.open("r+b", buffering=1 << 20)) as file:
            yield file.write
            file.flush()
            sync(file.fileno())

    def _take(self, earlier: Backup, name: str, size: int) -> bool:
        """Have a file of an earlier backup here too, if it has its size."""
        if earlier.path(name).stat().st_size != size:
            return False
        os.link(earlier.path(name), self.path(name))
        return True

    def path(self, name: str) -> Path:
        """The place of a file; its folder is there."""
        path = self._folder / name
        for folder in reversed(path.relative_to(self._folder).parents[:-1]):
            make_private_directory(self._folder / folder)
        return path

    def _done(self, name: str, file: Listed) -> None:
        self.files[name] = file
        self._progress(file.size)
        fault_point("backup.file")
        self._written += file.size
        while self._rate is not None:
            ahead = self._written / self._rate - (time.monotonic() - self._began)
            if ahead <= 0:
                break
            go_on()
            time.sleep(min(ahead, _PAUSE))


class Backup:
    """A backup that is there.

    Attributes:
        place: it lies there, as people name it.
        content: what was said of it as a whole.
        files: by name.
    """

    def __init__(self, folder: Path, content: dict[str, Any]) -> None:
        self.place = str(folder)
        self.content = content
        self.files = {name: Listed(*file) for name, file in content["files"].items()}
        self._folder = folder

    @classmethod
    def open(cls, folder: Path) -> Backup:
        """Read the list of a backup.

        Raises:
            StoreNotFoundError: there is nothing.
            IncompatibleStoreError: it is no backup, or one of a newer version.
            CorruptionError: the list is damaged.
            UnavailableError: the disk failed.
        """
        path = folder / LIST
        with disk_errors(path):
            if not folder.is_dir():
                raise StoreNotFoundError(f"no backup at {folder}: there is no such folder")
            if not is_there(path):
                found = "a store" if is_there(folder / "FORMAT") else "another folder"
                raise IncompatibleStoreError(
                    f"{folder} is no backup, but {found}: it has no file {LIST}. Name a folder "
                    "that client.backup or `txnkv backup` made"
                )
            return cls(folder, content_of(str(path), path.read_bytes()))

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())

    def path(self, name: str) -> Path:
        """The place of a file on this machine."""
        return self._folder / name

    def verify(self, progress: Progress, aside: Path) -> None:
        """Compare all files with the list.

        Args:
            progress: see `Progress`.
            aside: a folder for what is to be fetched.

        Raises:
            CorruptionError: one is missing, or damaged.
        """
        for name, listed in self.files.items():
            try:
                with to_read(self.path(name)) as file:
                    found = copied(file, lambda data: progress(len(data)))
            except FileNotFoundError:
                raise damaged(self.path(name), "it is missing") from None
            require_listed(self.path(name), found, listed)

    def release(self, names: Iterable[str]) -> None:
        """These files are not needed any more: what was fetched of them goes."""

    def entries(self, name: str) -> Iterator[Entry]:
        """Yield the entries of a file that was verified."""
        with to_read(self.path(name)) as file:
            while head := file.read(_HEAD.size):
                database, key, value = _HEAD.unpack(head)
                yield file.read(database), file.read(key), file.read(value)


def content_of(place: str, data: bytes) -> dict[str, Any]:
    """The content of a list.

    Args:
        place: of the list, as people name it.
        data: all of it.

    Raises:
        CorruptionError: it is damaged.
        IncompatibleStoreError: it is of no backup, or of a newer version.
    """
    line, _, rest = data.partition(b"\n")
    if rest != b"%08x\n" % crc32c(line):
        raise damaged(place, "its checksum does not match")
    content: dict[str, Any] = json.loads(line)
    version, store = content.get("version"), content.get("store_version", 0)
    known = FIRST_WITH_BACKUPS <= store <= FORMAT_VERSION
    known &= KNOWN_FEATURES.issuperset(content.get("features", ()))
    known &= version in (_PLAIN_VERSION, _VERSION)
    if content.get("format") != _NAME or not known:
        raise IncompatibleStoreError(
            f"{place} has format {content.get('format')!r} version {version!r}, of a store of "
            f"version {store!r}; this is version {_VERSION}, of stores up to {FORMAT_VERSION}. "
            "Restore it with the txnkv that wrote it"
        )
    return content


def require_listed(place: object, found: Listed, listed: Listed) -> None:
    """Refuse a file that is not what the list says.

    Raises:
        CorruptionError: it is damaged.
    """
    if found.size != listed.size:
        raise damaged(place, f"it has {found.size} bytes, {listed.size} were written")
    if found.crc != listed.crc:
        raise damaged(place, "its checksum does not match")


def damaged(place: object, what: str) -> CorruptionError:
    """The error of a file that is not what was written."""
    return CorruptionError(
        f"{place} is damaged: {what}. Nothing of it was used: put the file back, or take another "
        "backup"
    )


# -- entries of LMDB -------------------------------------------------------------------


def each_between(
    environment: Environment,
    database: bytes,
    low: bytes,
    high: bytes,
    take: Callable[[bytes, bytes], object],
) -> None:
    """Call `take(key, value)` for the entries of a database with low <= key < high, in many short
    reads: what nobody changes meanwhile is as it is in one, and no page waits for a long one.
    """
    at: bytes | None = low
    while at is not None:
        go_on()
        at = _some_between(environment, database, at, high, take)


def _some_between(
    environment: Environment,
    database: bytes,
    low: bytes,
    high: bytes,
    take: Callable[[bytes, bytes], object],
) -> bytes | None:
    """Give some; where to go on, None at the end."""
    room = _STEP_BYTES
    with environment.read() as txn, txn.cursor(db=environment.db(database)) as cursor:
        found = cursor.set_range(low)
        while found and (key := bytes(cursor.key())) < high:
            if room <= 0:
                return key
            value = bytes(cursor.value())
            take(key, value)
            room -= len(value)
            found = cursor.next()
    return None


def put_entries(environment: Environment, entries: Iterator[Entry]) -> None:
    """Put entries into an environment that nobody else has; durable when it returns."""
    while some := list(_some(entries)):
        go_on()
        environment.write(lambda txn, some=some: _put(environment, txn, some))  # type: ignore[misc]


def _some(entries: Iterator[Entry]) -> Iterator[Entry]:
    room = _STEP_BYTES
    for entry in entries:
        yield entry
        room -= len(entry[2])
        if room <= 0:
            return


def _put(environment: Environment, txn: Any, entries: list[Entry]) -> None:
    for database, key, value in entries:
        txn.put(key, value, db=environment.db(database))


# -- folders ---------------------------------------------------------------------------

_TAKEN: Final = frozenset({errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR})


@contextmanager
def whole_folder(place: Path, what: str) -> Iterator[Path]:
    """Yield a private folder to fill, which stands at `place` once the block has ended well.

    Args:
        place: of `folder_at`, where nothing is, or an empty folder.
        what: as messages to people name what is made.

    Raises:
        ValueError: there is something at `place`, or its name is too long; nothing was written.
        NotSupportedError: this user may not write there, or nobody.
        UnavailableError: another process makes the same one, or the disk failed.
        StorageFullError: the disk is full; nothing is left of it.
    """
    try:
        _require_free(place, what)
        place.parent.mkdir(parents=True, exist_ok=True)
        aside = place.with_name(f".{place.name}.unfinished")
        descriptor = _locked(aside, what, place)
        try:
            yield aside
            sync_folders(aside)
            _rename(aside, place, what)
            try:
                sync_directory(place.parent)
            except OSError:  # nobody knows whether a power loss would leave it there
                place.rename(aside)
                raise
        except BaseException:
            with suppress(OSError):
                remove_folder(aside)
            raise
        finally:
            close_descriptor(descriptor)
    except OSError as error:
        if isinstance(error, TxnkvError):
            raise
        raise not_made(error, place, what) from error


def _require_free(place: Path, what: str) -> None:
    for folder in place.parents:
        if (folder / "FORMAT").is_file() and (folder / "status.db").is_file():
            raise ValueError(f"{place} lies in the store {folder}: name a folder outside")
    if not os.path.lexists(place):
        return
    if not place.is_dir():
        raise ValueError(f"{place} is a file: name a folder that is not there, for {what}")
    if os.path.ismount(place):  # nothing can be renamed there
        raise _mount_point(place, what)
    found = sorted(entry.name for entry in place.iterdir())[:5]
    if found:
        raise _taken(place, what, found)


def _taken(place: Path, what: str, found: list[str]) -> ValueError:
    return ValueError(
        f"{place} is not empty: it holds {', '.join(found)}. Nothing there is written over: name a "
        f"folder that is not there, for {what}"
    )


def _mount_point(place: Path, what: str) -> ValueError:
    return ValueError(f"{place} is a mount point: name a folder in it, for {what}")


def _locked(aside: Path, what: str, place: Path) -> int:
    """Make the folder anew and lock it; the descriptor of the lock."""
    while True:
        with suppress(FileExistsError):  # of who makes it, not of the owner of what it lies in
            aside.mkdir(mode=0o700)
        with ExitStack() as closing:
            try:
                descriptor = with_descriptor(os.open, aside, os.O_DIRECTORY | os.O_CLOEXEC)
                closing.callback(close_descriptor, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_it = os.path.samestat(os.fstat(descriptor), os.stat(aside))
                if is_it and not any(aside.iterdir()):
                    closing.pop_all()
                    return descriptor
                # It is of one that died, or went while its lock was waited for.
                remove_folder(aside)
            except BlockingIOError:
                text = f"another process makes {what} at {place}: wait, or name another folder"
                raise UnavailableError(text) from None
            except FileNotFoundError:
                pass  # it went
            except OSError as error:
                if error.errno in NO_DESCRIPTOR_ERRNOS:
                    raise
                raise UnavailableError(
                    f"{aside}, left of {what} that was not finished, cannot be removed: {error}. "
                    f"Remove it, or name another folder than {place}"
                ) from error


def _rename(aside: Path, place: Path, what: str) -> None:
    try:
        aside.rename(place)  # takes the place of an empty folder, and of nothing else
    except OSError as error:
        if error.errno in _TAKEN:
            raise _taken(place, what, ["something new"]) from None
        if error.errno == errno.EBUSY:  # a mount of a folder of the same disk
            raise _mount_point(place, what) from None
        raise


# -- copies of status.db ---------------------------------------------------------------


@contextmanager
def read_copy(path: Path) -> Iterator[apsw.Cursor]:
    """Yield a cursor on a file that nobody writes; nothing is made beside it.

    Raises:
        CorruptionError: it is no database, or is damaged.
    """
    name = f"file:{quote(str(path.resolve()))}?immutable=1"
    with _opened(path, name, apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI) as connection:
        yield connection.cursor()


@contextmanager
def changed_copy(path: Path) -> Iterator[apsw.Cursor]:
    """Yield a cursor of one transaction, which is committed at the end of the block; durable.

    Raises:
        CorruptionError: it is no database, or is damaged.
        StorageFullError: no room.
    """
    with _opened(path, str(path), apsw.SQLITE_OPEN_READWRITE) as connection:
        connection.execute("PRAGMA foreign_keys = ON; PRAGMA synchronous = FULL")
        with connection:
            yield connection.cursor()


@contextmanager
def _opened(path: Path, name: str, flags: int) -> Iterator[apsw.Connection]:
    connection: apsw.Connection | None = None
    try:
        connection = with_descriptor(apsw.Connection, name, flags=flags)
        yield connection
    except apsw.Error as error:
        raise sqlite_error(error, path, connection) or error from error
    finally:
        if connection is not None:
            connection.close()
