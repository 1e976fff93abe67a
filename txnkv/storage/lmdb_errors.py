"""Errors of LMDB and of the disk below it, translated into what they mean to a caller."""

from __future__ import annotations

import errno
import os
import resource
import tempfile
from pathlib import Path

import lmdb

from txnkv.errors import (
    CorruptionError,
    IncompatibleStoreError,
    StorageFullError,
    TxnkvError,
    UnavailableError,
)

NO_DESCRIPTOR_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE})
FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_CORRUPT = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError)
_PROBE_BYTES = 4 << 20


def translate(error: BaseException, path: Path) -> TxnkvError | None:
    """The error of txnkv for one of LMDB or of the system; None when it is not about storage."""
    if isinstance(error, _CORRUPT):
        return CorruptionError(f"LMDB environment {path} is damaged: {error}. Restore a backup")
    if isinstance(error, lmdb.VersionMismatchError):
        return IncompatibleStoreError(f"LMDB environment {path} is of another LMDB: {error}")
    code = errno_of(error)
    if code in NO_DESCRIPTOR_ERRNOS:
        return no_descriptor(path)
    if code in FULL_ERRNOS or (code == errno.EIO and _is_full(path)):
        return storage_full(path, code)
    if isinstance(error, lmdb.PanicError) or code in (errno.EIO, errno.ENOMEM):
        return UnavailableError(f"LMDB environment {path} failed: {error}. Nothing was committed")
    return None


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


def is_without_descriptor() -> bool:
    """Return True when no file can be opened now, for want of a descriptor."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
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
            os.posix_fallocate(probe.fileno(), end, _PROBE_BYTES)
    except OSError as error:
        return error.errno in FULL_ERRNOS
    return False
