"""Faults of the disk: points at which a test injects them, and errors that tell of real ones.

`fault_point(name)` is a named place where a test can kill, fail or pause the process. It does
nothing until it is armed, by `arm()` in the process or by the environment:

    TXNKV_FAULT="status.before_commit=kill@3,lmdb.before_commit=pause:0.5"

kills the process at its third commit and pauses half a second before every commit of LMDB.
Every point is declared where it is used, by `declare_fault_point(name, doc)`, so that
`FAULT_POINTS` lists them all and a crash test can go through the list.

Errors of LMDB and of the disk below it are translated into what they mean to a caller.
"""

from __future__ import annotations

import errno
import os
import posix
import resource
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, ParamSpec, TypeVar

import apsw
import lmdb

from txnkv.errors import (
    CorruptionError,
    IncompatibleStoreError,
    NotSupportedError,
    StorageFullError,
    TxnkvError,
    UnavailableError,
)

T = TypeVar("T")
P = ParamSpec("P")

FAULT_VARIABLE = "TXNKV_FAULT"


class InjectedFault(OSError):
    """The input/output error that the action "error" raises at a fault point."""

    def __init__(self, name: str) -> None:
        super().__init__(errno.EIO, f"injected at fault point {name!r}")


class DeniedError(NotSupportedError):
    """A file of a store that this user may not open."""


class DatabaseDamagedError(CorruptionError):
    """A database of SQLite is damaged, and no part of a store for it."""


Action = str | Callable[[], object]
"""The action of an armed fault point: a text as in TXNKV_FAULT, or a function to call."""

FAULT_POINTS: dict[str, str] = {}
"""Every fault point by name, with a line that says where it stands."""


@dataclass
class _Armed:
    run: Callable[[], object]
    at_hit: int | None
    hits: int = 0

    def hit(self) -> None:
        self.hits += 1
        if self.at_hit is None or self.hits == self.at_hit:
            self.run()


_armed: dict[str, _Armed] = {}
armed: Final[Mapping[str, object]] = _armed
"""All armed points: where each transaction passes, `if armed: fault_point(...)` spares a call."""


def declare_fault_point(name: str, doc: str) -> None:
    """Registers a fault point; called when the module that uses it is imported.

    Raises:
        ValueError: another module declared the name with another line of doc.
    """
    if FAULT_POINTS.setdefault(name, doc) != doc:
        raise ValueError(f"fault point {name!r} is declared twice; give each place its own name")


def fault_point(name: str) -> None:
    """Does nothing, unless the point is armed.

    Raises:
        ValueError: no such point was declared.
        InjectedFault: the point is armed with "error".
    """
    if name not in FAULT_POINTS:
        raise ValueError(f"fault point {name!r} was never declared; call declare_fault_point first")
    if _armed and (found := _armed.get(name)) is not None:
        found.hit()


def arm(name: str, action: Action) -> None:
    """Arms a point: "kill", "error", "pause:seconds", each with or without "@hit", or a function.

    Raises:
        ValueError: no such point was declared, or the action cannot be read.
    """
    if name not in FAULT_POINTS:
        raise ValueError(f"fault point {name!r} was never declared; FAULT_POINTS lists those there")
    _armed[name] = _parse_action(name, action)


def disarm(name: str | None = None) -> None:
    """Disarms one point, or all of them; disarming what is not armed does nothing."""
    if name is None:
        _armed.clear()
    else:
        _armed.pop(name, None)


def arm_from_environment(environment: Mapping[str, str] = os.environ) -> None:
    """Arms what TXNKV_FAULT names. Done once at import, before the points are declared.

    Raises:
        ValueError: the text cannot be read.
    """
    for part in environment.get(FAULT_VARIABLE, "").split(","):
        if part := part.strip():
            name, equals, action = part.partition("=")
            if not equals:
                raise ValueError(f"{FAULT_VARIABLE}: {part!r} has no action; write name=action")
            _armed[name.strip()] = _parse_action(name, action.strip())


def _parse_action(name: str, action: Action) -> _Armed:
    if not isinstance(action, str):
        return _Armed(action, None)
    what, at, hit = action.partition("@")
    if at and not (hit.isdecimal() and int(hit) > 0):
        raise ValueError(f"fault {name}={action}: after @ comes the number of the hit, from 1")
    at_hit = int(hit) if at else None
    if what == "kill":
        return _Armed(_kill, at_hit)
    if what == "error":
        return _Armed(lambda: _fail(name), at_hit)
    if what.startswith("pause:"):
        seconds = float(what.removeprefix("pause:"))
        return _Armed(lambda: time.sleep(seconds), at_hit)
    raise ValueError(f"fault {name}={action}: the actions are kill, error and pause:seconds")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fail(name: str) -> None:
    raise InjectedFault(name)


arm_from_environment()


NO_DESCRIPTOR_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE})
NO_HOLES_ERRNOS = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY})
FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DENIED_ERRNOS = frozenset({errno.EACCES, errno.EPERM, errno.EISDIR})
_FAILED_ERRNOS = frozenset(
    getattr(errno, name, errno.EIO)  # macOS has fewer
    for name in ("EIO", "EUCLEAN", "EBADMSG", "EINTR", "ENODEV", "ENXIO", "ESTALE", "ETIMEDOUT")
)
"""Words of a system for a disk that fails; of LMDB any is, as EROFS of one mounted anew."""
_CORRUPT = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError)
_PROBE_BYTES = 4 << 20
_SHM_LOCKS = frozenset([121, *range(123, 128)])
"""Bytes of status.db-shm that SQLite locks: of who makes a checkpoint, and of readers."""
_OF_SQLITE = 3
"""Files of a database: its own, the WAL and the index of that."""


def lmdb_error(error: BaseException, path: Path) -> TxnkvError | None:
    """The error of txnkv for one of LMDB or of the system; None when it is not about storage."""
    if isinstance(error, _CORRUPT):
        return CorruptionError(f"LMDB environment {path} is damaged: {error}. Restore a backup")
    if isinstance(error, lmdb.VersionMismatchError):
        return IncompatibleStoreError(f"LMDB environment {path} is of another LMDB: {error}")
    if isinstance(error, lmdb.ReadersFullError):
        return UnavailableError(
            f"{path}: all reader slots are taken; end some processes that read, or try again"
        )
    code = errno_of(error)
    if code in NO_DESCRIPTOR_ERRNOS:
        return no_descriptor(path)
    if code in FULL_ERRNOS or (code == errno.EIO and _is_full(path)):
        return storage_full(path, code)
    if code == errno.EAGAIN:  # LMDB's copy has a thread of its own; a read locks a byte, by its pid
        return same_pid(path) if "txn_begin" in str(error) else no_thread(error)
    if code == errno.ENOMEM:
        return UnavailableError(
            f"no memory for {path}: {error}. Each part of a store maps 64 GiB of address space, of "
            "which only what is in use takes memory. `ulimit -v` limits the address space, as do "
            "Spark's spark.executor.pyspark.memory and spark.sql.planner.pythonExecution.memory: "
            "leave them out, or raise them, and try again. Nothing was changed"
        )
    if code in _DENIED_ERRNOS:
        return DeniedError(
            f"user {os.geteuid()} cannot open {getattr(error, 'filename', None) or path}: "
            f"{os.strerror(code)}. Go on as the user that it belongs to, or give this one the "
            "right to all files there"
        )
    of_lmdb = isinstance(error, lmdb.Error) and code > 0 and code != errno.EINVAL
    if code in _FAILED_ERRNOS or of_lmdb or isinstance(error, lmdb.PanicError):
        what = "LMDB environment " if isinstance(error, lmdb.Error) else ""
        return UnavailableError(f"{what}{path} failed: {error}. Nothing was changed, try again")
    return None


def could_not_open(path: Path) -> TxnkvError | None:
    """The error for a database of SQLite that could not be opened, by what is seen of the reason:
    no descriptor, no inode, or a file that this user may not read. None: it is another.
    """
    if is_without_descriptor():
        return no_descriptor(path)
    with suppress(OSError):
        of_system = os.statvfs(path.parent)
        if of_system.f_files and of_system.f_favail < _OF_SQLITE:
            return storage_full(path, errno.ENOSPC)
    return database_denied(path)


def database_denied(path: Path) -> TxnkvError | None:
    """The error for a database of SQLite, or its WAL, that this user may not read; else None."""
    for file in (path, path.with_name(path.name + "-wal")):
        if is_there(file) and not os.access(file, os.R_OK):  # opened and closed, it loses its locks
            return lmdb_error(PermissionError(errno.EACCES, os.strerror(errno.EACCES)), file)
    return None


def is_protected(path: Path) -> bool:
    """Return True when the files of a database, or their folder, are not for this process to write.

    Else one of them could not be opened to write just then, and SQLite opened it to read.
    """
    files = (path.with_name(path.name + end) for end in ("", "-wal", "-shm"))
    there = [file for file in files if is_there(file)]
    return not all(os.access(file, os.W_OK) for file in [path.parent, *there])


def holders(path: Path) -> str:
    """Name the processes whose locks are in the way, as far as the system tells. From the
    kernel's list: opening the file here, and closing it, would drop this process's own locks.
    """
    try:
        file = os.stat(path.with_name(path.name + "-shm"))
        at = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
        lines = [line.split() for line in Path("/proc/locks").read_text("ascii").splitlines()]
    except OSError:
        return "some process is"
    found = {
        line[4] for line in lines if len(line) == 8 and line[5] == at and int(line[6]) in _SHM_LOCKS
    } - {str(os.getpid())}
    return f"process {', '.join(sorted(found))} is" if found else "some process is"


def is_there(path: Path) -> bool:
    """Tell whether a file or folder is there.

    Raises:
        PermissionError: this user may not look; `Path.exists` has not told that since 3.14.
    """
    try:
        path.stat()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return False
    return True


def require_of_store(error: TxnkvError) -> None:
    """Raise again what says nothing of the store: this process may have no more memory or files."""
    if errno_of(error.__cause__ or error) in (errno.ENOMEM, *NO_DESCRIPTOR_ERRNOS):
        raise error


@contextmanager
def disk_errors(path: Path, *, denied: bool = True) -> Iterator[None]:
    """Tell what the disk refuses inside of the block as of a path.

    Args:
        path: as it is told.
        denied: also what the user may not open.

    Raises:
        StorageFullError: it is full.
        UnavailableError: it failed, or too many files are open.
        DeniedError: the user may not open it.
    """
    try:
        yield
    except (lmdb.Error, OSError) as error:
        told = lmdb_error(error, path)
        if told is None or (isinstance(told, DeniedError) and not denied):
            raise
        raise told from error


def storage_full(path: Path, code: int) -> StorageFullError:
    """The error for a disk, quota or file size limit that is reached."""
    text = os.strerror(code) if code != errno.EIO else "short write"
    return StorageFullError(
        f"no room to write {path}: {text}. Nothing of this write was kept, what was acknowledged "
        "is; free space or raise the limit and try again"
    )


def descriptor_limit() -> int:
    """Return the number of files that this process may have open at once."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def no_descriptor(path: Path) -> UnavailableError:
    """The error for a file that can't be opened, because too many are."""
    return UnavailableError(
        f"cannot open {path}: this process, or the machine, has as many files open as it may. The "
        f"process may have {descriptor_limit()} (RLIMIT_NOFILE); raise that (`ulimit -n`, "
        "LimitNOFILE= of systemd), or close other files, and try again. Nothing was changed"
    )


def no_thread(error: BaseException) -> UnavailableError:
    """The error where the machine gives no thread, or the interpreter ends."""
    return UnavailableError(
        f"no thread could be started ({error}): this user or container has as many as it may. "
        "Raise that (`ulimit -u`, pids.max), or end others, and try again. Nothing was changed"
    )


def same_pid(path: Path) -> NotSupportedError:
    """The error where another process has this pid, too: LMDB takes readers of both for one's."""
    return NotSupportedError(
        f"another process that has {path} open has pid {os.getpid()} too, as in another container, "
        "and processes of a store need pids that differ. Let the containers share a PID namespace "
        "(docker run --pid=container:NAME, Kubernetes shareProcessNamespace: true), or start this "
        "one with another pid, or go through `txnkv serve`"
    )


def not_made(error: OSError, place: Path, what: str) -> TxnkvError | ValueError:
    """The error for a folder that could not be made and filled; nothing is left of it.

    Args:
        error: of the system.
        place: of the folder.
        what: as messages to people name it.
    """
    if error.errno in NO_DESCRIPTOR_ERRNOS:
        return no_descriptor(place)
    if error.errno in FULL_ERRNOS:
        return storage_full(place, error.errno or errno.ENOSPC)
    if error.errno == errno.ENAMETOOLONG:
        return ValueError(
            f"{place} has a name that is too long, with what is put around it until all is there: "
            f"name a shorter one, for {what}"
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return NotSupportedError(
            f"user {os.geteuid()} cannot make {what} at {place}: {error}. Name another place"
        )
    return UnavailableError(
        f"{what} at {place} could not be made: {error}. Nothing is left of it; see to the disk and "
        "try again"
    )


close_descriptor: Final = posix.close
"""`os.close`, which gevent replaces by one that puts it off: the descriptor's lock would go on."""
CLOSE_IDLE: Final[list[Callable[[], None]]] = []
"""Functions that close files which nobody uses now."""


def with_descriptor(open_it: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return `open_it(*args)`; where no descriptor is left, idle files make room and it is tried
    once more.
    """
    try:
        return open_it(*args, **kwargs)
    except (lmdb.Error, OSError, apsw.CantOpenError) as error:
        lacks = isinstance(error, apsw.CantOpenError) and is_without_descriptor()
        if not lacks and errno_of(error) not in NO_DESCRIPTOR_ERRNOS:
            raise
    for close in CLOSE_IDLE:
        close()
    return open_it(*args, **kwargs)


def open_private(path: Path, flags: int) -> int:
    """Return a descriptor of a file; what is made has mode 0600, whatever the umask, and the owner
    of its folder. One that is there keeps its mode: it may be another's, who lets this user write.
    """
    descriptor, made = _opened_or_made(path, flags | os.O_CLOEXEC)
    try:
        if made:
            os.fchmod(descriptor, 0o600)
        if flags & os.O_CREAT:
            give_to_owner(descriptor, path)
    except BaseException as error:
        close_descriptor(descriptor)
        if isinstance(error, OSError):
            error.filename = str(path)
        raise
    return descriptor


def _opened_or_made(path: Path, flags: int) -> tuple[int, bool]:
    """The descriptor, and whether this call made the file."""
    if flags & os.O_CREAT and not flags & os.O_EXCL:
        with suppress(FileNotFoundError):
            return with_descriptor(os.open, path, flags & ~os.O_CREAT), False
        with suppress(FileExistsError):  # it is there by now, or a link that leads nowhere yet
            return with_descriptor(os.open, path, flags | os.O_EXCL, 0o600), True
    return with_descriptor(os.open, path, flags, 0o600), bool(flags & os.O_EXCL)


def give_to_owner(descriptor: int, path: Path) -> None:
    """Give what root has made to the owner of the folder that it lies in, who could not open it
    else. Not what a link leads to: that may be anything.
    """
    if os.geteuid() != 0:
        return
    with suppress(OSError):  # the disk knows no owners, or it went
        owner, file = path.parent.stat(), os.fstat(descriptor)
        alone = file.st_nlink == 1 or stat.S_ISDIR(file.st_mode)
        if owner.st_uid and not file.st_uid and alone and os.path.samestat(file, path.lstat()):
            os.fchown(descriptor, owner.st_uid, owner.st_gid)


def remove_folder(folder: Path) -> None:
    """Remove a folder by one descriptor at a time, where `rmtree` wants one for each level."""

    def refuse(error: OSError) -> None:
        raise error

    walk = with_descriptor(lambda: [*os.walk(folder, topdown=False, onerror=refuse)])
    for path, _, names in walk:
        for name in names:
            os.unlink(os.path.join(path, name))
        os.rmdir(path)


def to_read(path: Path) -> BinaryIO:
    """Open a file of bytes."""
    return with_descriptor(lambda: path.open("rb", buffering=1 << 20))


def is_without_descriptor() -> bool:
    """Return True when SQLite can open no database now, for want of descriptors."""
    with ExitStack() as taken:
        try:
            for _ in range(_OF_SQLITE):
                descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                taken.callback(os.close, descriptor)
        except OSError as error:
            return error.errno in NO_DESCRIPTOR_ERRNOS
    return False


def errno_of(error: BaseException) -> int:
    """The system's number for an error of LMDB or of the system; 0 when it has none."""
    if isinstance(error, lmdb.MemoryError):
        return errno.ENOMEM
    if isinstance(error, lmdb.Error):
        return int(getattr(error, "code", 0))
    if isinstance(error, OSError):
        return error.errno or 0
    return 0


def _is_full(path: Path) -> bool:
    """Return True when an EIO was LMDB's word for a short write, which is how a full disk begins.

    A write is tried where the next page would go: in the same folder, at the same offset, so
    that free space, quota and file size limit all have their say.
    """
    try:
        end = (path / "data.mdb").stat().st_size
        with tempfile.TemporaryFile(dir=path) as probe:
            return os.pwrite(probe.fileno(), bytes(_PROBE_BYTES), end) < _PROBE_BYTES
    except OSError as error:
        return error.errno in FULL_ERRNOS
