"""Errors of SQLite: what they say, and what comes after a file that could not be opened once."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import apsw
import pytest

from txnkv.errors import NotSupportedError, StorageFullError, UnavailableError
from txnkv.storage import DatabaseDamagedError, Store, sqlite_connection
from txnkv.storage.directory import STATUS_PAGE_BYTES
from txnkv.storage.sqlite_connection import sqlite_error

Fail = Callable[[str, int], None]

_OPEN = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_int, use_errno=True
)  # fmt: skip
_READ = ctypes.CFUNCTYPE(
    ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, use_errno=True
)


def test_an_error_without_a_text_is_told_by_its_code(tmp_path: Path) -> None:
    """It said "status.db failed: . This transaction is not visible"."""
    failed = sqlite_error(apsw.exception_for(apsw.SQLITE_IOERR_WRITE), tmp_path, None)
    assert isinstance(failed, UnavailableError)
    assert "failed: SQLITE_IOERR_WRITE. This" in str(failed)
    full = sqlite_error(apsw.exception_for(apsw.SQLITE_FULL), tmp_path, None)
    assert isinstance(full, StorageFullError)
    assert ": SQLITE_FULL. Nothing" in str(full)
    odd = sqlite_error(apsw.IOError("not an error"), tmp_path, None)
    assert "failed: IOError. This" in str(odd)


@pytest.mark.parametrize(
    ("files", "free", "kind"),
    [(12, 0, StorageFullError), (12, 9, UnavailableError), (0, 0, UnavailableError)],
)
def test_a_disk_without_inodes_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int, free: int, kind: type[Exception]
) -> None:
    told = SimpleNamespace(f_files=files, f_favail=free)
    monkeypatch.setattr(os, "statvfs", lambda path: told)
    failed = sqlite_error(apsw.exception_for(apsw.SQLITE_CANTOPEN), tmp_path / "status.db", None)
    assert type(failed) is kind


@pytest.fixture
def fail() -> Iterator[Fail]:
    """Has SQLite's next try to open a file of this name to write fail."""
    vfs = apsw.VFS("of the test", base="unix")
    real = vfs.xGetSystemCall("open")
    call, armed = _OPEN(real), []

    def opened(path: bytes, flags: int, mode: int) -> int:
        if armed and flags & os.O_RDWR and path.endswith(armed[0][0]):
            ctypes.set_errno(armed.pop()[1])
            return -1
        return int(call(path, flags, mode))

    mine = _OPEN(opened)
    vfs.xSetSystemCall("open", ctypes.cast(mine, ctypes.c_void_p).value)
    yield lambda name, code: armed.append((name.encode(), code))
    vfs.xSetSystemCall("open", real)
    vfs.unregister()


def insert(store: Store, id: int) -> None:
    with store.status.write() as cur:
        cur.execute("INSERT INTO t VALUES (?, 1)", (id,))


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("name", ["status.db", "status.db-wal", "status.db-shm"])
def test_a_file_that_cannot_be_opened_once(store: Store, fail: Fail, name: str, code: int) -> None:
    """SQLite opened it to read, and all writes of the process were told that the store was."""
    insert(store, 1)
    store.status._close_connections()
    fail(name, code)
    with pytest.raises(UnavailableError, match="could not be opened to write"):
        insert(store, 2)
    insert(store, 3)
    with store.status.read() as cur:
        assert cur.execute("SELECT id FROM t").fetchall() == [(1,), (3,)]


def test_a_file_that_is_not_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = apsw.exception_for(apsw.SQLITE_READONLY)
    assert isinstance(sqlite_error(error, tmp_path / "status.db", None), UnavailableError)
    monkeypatch.setattr(sqlite_connection.os, "access", lambda *_: False)
    assert isinstance(sqlite_error(error, tmp_path / "status.db", None), NotSupportedError)


@pytest.fixture
def fail_read() -> Iterator[list[int]]:
    """Has SQLite's read of a file fail that is the last of so many; or gives wrong bytes once, for
    the page at the second of these numbers.
    """
    vfs = apsw.VFS("of reads", base="unix")
    name = next(each for each in ("pread64", "pread") if vfs.xGetSystemCall(each))
    real, left = vfs.xGetSystemCall(name), [0]
    call = _READ(real)

    def read(file: int, data: int, size: int, at: int) -> int:
        left[0] -= 1
        if left[0] == 0:
            ctypes.set_errno(errno.EIO)
            return -1
        found = int(call(file, data, size, at))
        if left[1:] == [at] and size == STATUS_PAGE_BYTES:
            ctypes.memset(data, 0xFF, size)
            left.pop()
        return found

    mine = _READ(read)
    vfs.xSetSystemCall(name, ctypes.cast(mine, ctypes.c_void_p).value)
    yield left
    vfs.xSetSystemCall(name, real)
    vfs.unregister()


def test_a_read_that_fails_once_is_no_damage(store: Store, fail_read: list[int]) -> None:
    """To SQLite it is; a backup was to be restored, and a tablet took no writes for a while."""
    insert(store, 1)
    told = []
    for at in range(1, 50):
        store.status._close_connections()
        fail_read[0] = at
        try:
            with store.status.read() as cur:
                assert cur.execute("SELECT id FROM t").fetchall() == [(1,)]
        except UnavailableError as error:
            told.append(str(error))
        if fail_read[0] > 0:
            break
    assert any("could not be read, but can be now" in each for each in told)


@pytest.mark.parametrize("begin", ["read", "write"])
def test_a_page_of_which_wrong_bytes_came_once_is_read_again(
    store: Store, fail_read: list[int], begin: str
) -> None:
    """It was kept in the cache of the connection, and all that used that failed for ever."""
    insert(store, 1)
    with store.status.read() as cur:
        (page,) = cur.execute("SELECT rootpage FROM sqlite_master WHERE name = 't'").fetchone()
    with store.status.read():  # one is open, so that the WAL is there
        store.status.checkpoint()
        store.status._close_connections()
        fail_read.append((page - 1) * STATUS_PAGE_BYTES)
        refused = pytest.raises(UnavailableError, match="can be now")
        with refused, getattr(store.status, begin)() as cur:
            cur.execute("SELECT id FROM t").fetchall()
    with getattr(store.status, begin)() as cur:
        assert cur.execute("SELECT id FROM t").fetchall() == [(1,)]


def test_damage_is_told_as_such(store: Store) -> None:
    insert(store, 1)
    with store.status.read() as cur:
        page = cur.execute("SELECT rootpage FROM sqlite_master WHERE name = 't'").get
    store.status.checkpoint()
    path = store.status.path
    error = apsw.exception_for(apsw.SQLITE_CORRUPT_INDEX)  # no read is told so
    assert isinstance(sqlite_error(error, path, None), DatabaseDamagedError)
    with path.open("r+b") as file:
        file.seek((page - 1) * STATUS_PAGE_BYTES)
        file.write(b"\xff" * STATUS_PAGE_BYTES)
    store.status._close_connections()
    with pytest.raises(DatabaseDamagedError, match="is damaged"), store.status.read() as cur:
        cur.execute("SELECT id FROM t").fetchall()
