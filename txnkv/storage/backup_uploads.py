"""Backups in a file system of pyarrow: S3, GCS, Azure, HDFS, or what fsspec reaches.

    monday/BACKUP.unfinished    put first, and again with the list
    monday/status.db, ...       each put once, whole
    monday/BACKUP               the list, moved to its name: a backup is there from here on

No file has two names there. What an earlier backup has, the file system copies by itself, and each
backup is whole as on a disk. What a dead writer left has no list and is no backup; it stays until
somebody deletes it, for nothing there tells a dead writer from one that is slow.

To restore, files are fetched one by one, compared with the list, and removed when they are used.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from txnkv.errors import (
    CorruptionError,
    IncompatibleStoreError,
    NotSupportedError,
    StorageFullError,
    StoreNotFoundError,
    TxnkvError,
    UnavailableError,
)
from txnkv.storage.backup_files import (
    Backup,
    BackupWriter,
    Progress,
    content_of,
    copied,
    damaged,
    require_listed,
    whole_folder,
)
from txnkv.storage.directory import LIST, folder_at, make_private_directory
from txnkv.storage.faults import (
    FULL_ERRNOS,
    disk_errors,
    is_there,
    lmdb_error,
    to_read,
    with_descriptor,
)

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

_UNFINISHED = f"{LIST}.unfinished"
_BUFFER_BYTES = 1 << 20


class Distant(NamedTuple):
    """A folder in a file system of pyarrow.

    Attributes:
        files: the file system.
        path: in it.
        name: of the folder, as people say it.
    """

    files: FileSystem
    path: str
    name: str

    def __str__(self) -> str:
        return self.name

    def at(self, name: str) -> str:
        """The path of a file in it."""
        return f"{self.path}/{name}"

    def below(self, name: str) -> Distant:
        """A folder in it."""
        return Distant(self.files, self.at(name), f"{self.name}/{name}")

    def names(self) -> list[str]:
        """Files and folders in it, sorted; none where it is not there."""
        from pyarrow.fs import FileSelector

        found = self.files.get_file_info(FileSelector(self.path, allow_not_found=True))
        return sorted(info.base_name for info in found if info.base_name)

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where it is not there."""
        info = self.files.get_file_info(self.at(name))
        return int(info.size) if info.is_file else None


Place = Path | Distant


def place_of(given: str | os.PathLike[str], filesystem: FileSystem | None) -> Place:
    """The place that a path or an address names.

    Args:
        given: a path, of this machine or of `filesystem`; or an address, s3://bucket/folder.
        filesystem: where the path is; None for this machine, or as an address says.

    Raises:
        ValueError: nobody knows a file system of that name, or an address names none of it; or
            as for `folder_at`.
        StoreNotFoundError: it leads nowhere.
    """
    if filesystem is None and "://" not in os.fsdecode(given):
        return folder_at(given)
    from pyarrow.fs import FileSystem, LocalFileSystem

    path = text = os.fspath(given)
    if filesystem is None:
        try:
            filesystem, path = FileSystem.from_uri(text)
        except ValueError as error:
            raise ValueError(
                f"{text!r} names no file system: {error}. Addresses begin with s3://, gs://, "
                "abfs://, hdfs:// or file://; give other file systems as filesystem="
            ) from None
        text = text.partition("?")[0]
    if isinstance(filesystem, LocalFileSystem):
        return folder_at(path)
    path = path.rstrip("/")
    if not path:
        raise ValueError(f"{text!r} names a file system, and no folder in it")
    return Distant(filesystem, path, text.rstrip("/"))


@contextmanager
def writing(
    place: Place, earlier: Backup | None, progress: Progress, bytes_per_second: float | None
) -> Iterator[BackupWriter]:
    """Yield the writer of a backup, that is at `place` once the block has ended well.

    Args:
        place: where nothing is, or an empty folder.
        earlier: see `BackupWriter`.
        progress: see `Progress`.
        bytes_per_second: the most that is written.

    Raises:
        ValueError: there is something at `place`; nothing was written.
        UnavailableError: another one makes the same, died at it, or the file system failed.
        StorageFullError: a disk is full; nothing is left of it.
    """
    if isinstance(place, Path):
        with whole_folder(place, "a backup") as folder:
            yield BackupWriter(folder, earlier, progress, bytes_per_second)
        return
    with _temporary_folder() as aside, _failures(place, "a backup"):
        _require_free(place)
        writer = _Uploads(place, aside, earlier, progress, bytes_per_second)
        try:
            writer.put(_UNFINISHED, b"")
            yield writer
            place.files.move(place.at(_UNFINISHED), place.at(LIST))
        except BaseException:
            with suppress(Exception):
                place.files.delete_dir(place.path)
            raise


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    with ExitStack() as stack:
        try:
            aside = stack.enter_context(tempfile.TemporaryDirectory(prefix="txnkv-backup-"))
        except OSError as error:
            raise lmdb_error(error, Path(error.filename or "TMPDIR")) or NotSupportedError(
                f"no temporary folder can be made for the backup: {error}. Have TMPDIR name a "
                "folder that is there and can be written"
            ) from error
        yield Path(aside)


def _require_free(place: Distant) -> None:
    found = place.names()
    if _UNFINISHED in found:
        raise UnavailableError(
            f"{place} is an unfinished backup: another process makes it, or died at it. Wait "
            "for its end, or delete it there; or name another place"
        )
    if found:
        raise ValueError(
            f"{place} is not empty: it holds {', '.join(found[:5])}. Nothing there is written "
            "over: name a folder that is not there, for a backup"
        )


@contextmanager
def _failures(place: Distant, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, TxnkvError):
            raise
        said = str(error).rstrip(".")
        if error.errno in FULL_ERRNOS:
            raise StorageFullError(
                f"no room for {what} at {place}: {said}. Free space and try again; what may be "
                "left of it there has no list, and is no backup"
            ) from error
        raise UnavailableError(
            f"{what} at {place} failed: {said}. See to the address, the rights there and the "
            "connection, and try again; what may be left of it there has no list, and is no backup"
        ) from error


class _Uploads(BackupWriter):
    """A backup that is being written to a file system of pyarrow.

    Args:
        at: where to.
        aside: a folder for what somebody else writes.
        earlier, progress, bytes_per_second: see `BackupWriter`.
    """

    def __init__(
        self,
        at: Distant,
        aside: Path,
        earlier: Backup | None,
        progress: Progress,
        bytes_per_second: float | None,
    ) -> None:
        super().__init__(aside, earlier, progress, bytes_per_second)
        self._at = at
        self._folders: set[str] = set()

    def add(self, name: str) -> None:
        """Put a file that somebody else wrote at `path(name)`, and list it."""
        with to_read(self.path(name)) as file, self._opened(name) as write:
            listed = copied(file, write)
        self._done(name, listed)

    def put(self, name: str, data: bytes) -> None:
        """Put a small file, which is not listed."""
        with self._opened(name) as write:
            write(data)

    def _put_list(self, data: bytes) -> None:
        self.put(_UNFINISHED, data)

    @contextmanager
    def _opened(self, name: str) -> Iterator[Callable[[bytes], object]]:
        path = self._path(name)
        with self._at.files.open_output_stream(path, buffer_size=_BUFFER_BYTES) as file:
            yield file.write

    def _take(self, earlier: Backup, name: str, size: int) -> bool:
        if not isinstance(earlier, DistantBackup) or earlier.at.size(name) != size:
            return False
        self._at.files.copy_file(earlier.at.at(name), self._path(name))
        return True

    def _path(self, name: str) -> str:
        """The path of a file; its folder is there."""
        path = self._at.at(name)
        folder = path.rpartition("/")[0]
        if folder not in self._folders:
            self._at.files.create_dir(folder, recursive=True)
            self._folders.add(folder)
        return path


class DistantBackup(Backup):
    """A backup that is there, in a file system of pyarrow.

    Attributes:
        at: its folder.
    """

    def __init__(self, at: Distant, content: dict[str, Any]) -> None:
        super().__init__(Path(), content)
        self.place = at.name
        self.at = at
        self._progress: Progress = lambda _: None

    def verify(self, progress: Progress, aside: Path) -> None:
        """Look for all files of the list. What they are is seen when they are fetched."""
        with _failures(self.at, "a restore"):
            for name, listed in self.files.items():
                size = self.at.size(name)
                if size is None:
                    raise damaged(self.at.at(name), "it is missing")
                if size != listed.size:
                    raise damaged(
                        self.at.at(name), f"it has {size} bytes, {listed.size} were written"
                    )
        self._folder, self._progress = aside, progress

    def path(self, name: str) -> Path:
        """The place of a file on this machine, where it is fetched to.

        Raises:
            CorruptionError: it is damaged.
            UnavailableError: the file system failed.
        """
        path = self._folder / name
        if not is_there(path):
            for folder in reversed(path.relative_to(self._folder.parent).parents[:-1]):
                make_private_directory(self._folder.parent / folder)
            fetched = path.with_name(path.name + ".part")
            with (
                _failures(self.at, "a restore"),
                self.at.files.open_input_stream(self.at.at(name)) as stream,
                with_descriptor(lambda: fetched.open("wb")) as file,
            ):
                found = copied(stream, lambda data: self._fetched(file, data))
            require_listed(self.at.at(name), found, self.files[name])
            fetched.rename(path)
        return path

    def _fetched(self, file: Any, data: bytes) -> None:
        file.write(data)
        self._progress(len(data))

    def release(self, names: Iterable[str]) -> None:
        """These files are not needed any more."""
        for name in names:
            (self._folder / name).unlink(missing_ok=True)


def open_backup(place: Place) -> Backup:
    """The backup at a place.

    Raises:
        StoreNotFoundError: there is nothing.
        IncompatibleStoreError: it is no backup, or one of a newer version.
        CorruptionError: the list is damaged.
        UnavailableError: the file system failed.
    """
    if isinstance(place, Path):
        return Backup.open(place)
    with _failures(place, "a look"):
        if place.size(LIST) is None:
            names = place.names()
            if not names:
                raise StoreNotFoundError(f"no backup at {place}: there is nothing")
            why = "its writer died, or is at it" if _UNFINISHED in names else f"no file {LIST}"
            raise IncompatibleStoreError(
                f"{place} is no backup ({why}). Name a folder that client.backup or "
                "`txnkv backup` made"
            )
        with place.files.open_input_stream(place.at(LIST)) as file:
            data = file.read()
    return DistantBackup(place, content_of(place.at(LIST), data))


def backups_at(place: Place) -> tuple[list[Backup], list[CorruptionError]]:
    """The backup at a place, or all those in a folder; and errors of those whose list is damaged.

    Raises:
        As `open_backup`.
    """
    if isinstance(place, Path):
        with disk_errors(place):
            below: list[Place] = [path.parent for path in sorted(place.glob(f"[!.]*/{LIST}"))]
            is_one = is_there(place / LIST) or not place.is_dir()
    else:
        with _failures(place, "a look"):
            is_one = place.size(LIST) is not None
            found = [] if is_one else [place.below(name) for name in place.names()]
            below = [each for each in found if each.size(LIST) is not None]
    if is_one or not below:  # the one says why it is none
        return [open_backup(place)], []
    backups, errors = [], []
    for each in below:
        try:
            backups.append(open_backup(each))
        except CorruptionError as error:
            errors.append(error)
    return backups, errors


def check_backup(place: Place, progress: Callable[[int, int], None]) -> Backup:
    """Read all files of a backup, and compare them with its list.

    Args:
        place: of the backup.
        progress: called with (bytes done, bytes in all).

    Raises:
        CorruptionError: one is missing or damaged: it is named.
        As `open_backup`.
    """
    backup, done = open_backup(place), 0

    def told(count: int) -> None:
        nonlocal done
        done += count
        progress(done, backup.size)

    with _temporary_folder() as folder:
        backup.verify(told, folder / "fetched")
        for name in backup.files:
            backup.path(name)  # fetches and compares it, if it is not of this machine
            backup.release([name])
    return backup


@contextmanager
def fetching(place: Path) -> Iterator[Path]:
    """Yield the folder for files that are fetched for what is to be at `place`.

    The caller alone makes that. What a dead one left there goes before, and all of it at the end.
    """
    aside = place.with_name(f".{place.name}.fetched")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)
