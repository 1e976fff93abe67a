"""Syncs that fail, of which the system tells one thread alone, and those that others left out."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import apsw
import pytest

from tests.storage.conftest import SCHEMA
from txnkv.errors import StorageFullError, UnavailableError
from txnkv.storage import GATE, Store, sqlite_connection


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside other work"])
def test_nothing_is_durable_by_a_sync_during_which_another_failed(
    store: Store, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    status, runtime = store.status, store.runtime
    with status.write(sync=False) as cursor:
        cursor.execute("INSERT INTO t VALUES (1, 1)")
    inside, failed = threading.Event(), threading.Event()

    def fdatasync(_: int) -> None:
        if threading.current_thread() is threading.main_thread():
            assert inside.wait(60)
            raise OSError(5, "the disk failed")
        if not inside.is_set():
            inside.set()
            assert failed.wait(60)

    def sync() -> None:
        if beside:
            with GATE.use():
                status.begin_sync()()
        else:
            status.sync()

    monkeypatch.setattr(sqlite_connection, "sync_data", fdatasync)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(sync)
        with pytest.raises(UnavailableError, match="the disk failed"):
            status.sync()
        assert not runtime.all_synced()
        failed.set()
        other.result(60)
    assert runtime.to_sync() is not None  # it was moved into the database
    assert runtime.all_synced()


@pytest.fixture
def failed(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once the next sync of the WAL has failed; those after it do nothing."""
    found = threading.Event()

    def once(_: int) -> None:
        if not found.is_set():
            found.set()
            raise OSError(5, "the disk failed")

    monkeypatch.setattr(sqlite_connection, "sync_data", once)
    return found


def test_after_a_sync_that_failed_once_the_pages_are_written_anew(
    store: Store, failed: threading.Event
) -> None:
    """A later sync of the WAL would tell nothing of the pages that the disk lost."""
    status = store.status
    with GATE.use():
        with status.write(sync=False) as cursor:
            cursor.execute("INSERT INTO t VALUES (1, 1)")
        wait = status.begin_sync()
        assert failed.wait(60)
        wait()
    assert status._wal.size == 0  # it was moved into the database
    assert store.runtime.all_synced()


def test_a_write_whose_sync_fails_once_is_done(store: Store, failed: threading.Event) -> None:
    """It was told as one to be tried again: a table was made, and then was there already."""
    status = store.status
    with status.write() as cursor:
        cursor.execute("INSERT INTO t VALUES (1, 1)")
    assert failed.is_set()
    assert status._wal.size == 0  # it was moved into the database
    assert store.runtime.all_synced()


def test_after_a_sync_of_a_checkpoint_that_failed_the_pages_are_written_anew(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system tells it to SQLite alone, where nobody else has the WAL open at that time."""
    status = store.status
    checkpointer = status._checkpointer

    def fail(*_: object) -> None:
        raise apsw.exception_for(apsw.SQLITE_IOERR_FSYNC)

    with status.write(sync=False) as cursor:
        cursor.execute("INSERT INTO t VALUES (1, 1)")
    with monkeypatch.context() as broken:
        broken.setattr(checkpointer, "_checkpoint", fail)
        with pytest.raises(UnavailableError, match="What was committed is in the WAL still"):
            status.checkpoint()
    status.sync()
    assert status._wal.size == 0  # it was moved into the database
    assert store.runtime.all_synced()


def test_a_connection_that_came_to_read_alone_is_left_at_its_first_checkpoint(store: Store) -> None:
    """SQLite opens one so where the file could not be opened to write just then."""
    status = store.status
    with status.write() as cursor:
        cursor.execute("INSERT INTO t VALUES (1, 1)")
    made = apsw.Connection(str(status.path), flags=apsw.SQLITE_OPEN_READONLY)
    assert made.execute("SELECT count(*) FROM t").get == 1
    status._readers._idle.append(made)
    with pytest.raises(UnavailableError, match="What was committed is in the WAL still"):
        status.checkpoint()
    status.checkpoint()
    assert status._wal.size == 0


def test_a_checkpoint_that_fails_again_and_again_is_told_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer, full = store.status._checkpointer, StorageFullError("no room")

    def run(*, cut: bool) -> None:
        raise full

    with monkeypatch.context() as broken:
        broken.setattr(checkpointer, "run", run)
        for _ in range(5):
            checkpointer.after_write(full=True)
    assert caplog.text.count("no room") == 1
    checkpointer.after_write(full=True)  # one that succeeds
    monkeypatch.setattr(checkpointer, "run", run)
    checkpointer.after_write(full=True)
    assert caplog.text.count("no room") == 2


def test_what_a_backup_has_is_durable_in_the_store(store: Store, tmp_path: Path) -> None:
    with store.status.write(sync=False) as cursor:
        cursor.execute("INSERT INTO t VALUES (1, 1)")
    store.status.backup_to(tmp_path / "copy.db")
    assert store.runtime.all_synced()


def test_a_backup_whose_source_cannot_be_opened(store: Store, tmp_path: Path) -> None:
    def fail() -> apsw.Connection:
        raise apsw.exception_for(apsw.SQLITE_IOERR_READ)

    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(store.status._readers, "borrow", fail)
        with pytest.raises(UnavailableError, match=r"status\.db failed"):
            store.status.backup_to(tmp_path / "copy.db")


def test_what_killed_processes_wrote_is_synced_when_the_store_is_opened(
    tmp_path: Path, python: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the memory that they shared, which knew of it, is gone."""
    path = tmp_path / "store"
    child = python(
        """
        store = Store.open(sys.argv[1], schema_sql=SCHEMA)
        arm("status.unsynced", "kill")
        with store.status.write() as cursor:
            cursor.execute("INSERT INTO t VALUES (1, 1)")
        """,
        path,
    )
    child.finish(-signal.SIGKILL)
    shutil.rmtree(path / "runtime")
    synced: list[int] = []

    def note(file: int) -> None:
        synced.append(os.fstat(file).st_ino)

    monkeypatch.setattr(sqlite_connection, "sync_data", note)
    wal = next(path.rglob("*-wal")).stat()
    assert wal.st_size > 0
    with Store.open(path, schema_sql=SCHEMA):
        assert wal.st_ino in synced


@pytest.mark.parametrize("refused", [0, errno.ENOTSUP])
def test_each_sync_empties_the_cache_of_the_disk_where_fsync_does_not(
    tmp_path: Path, refused: int
) -> None:
    """By a command of fcntl, as macOS has it; not every file system there knows it."""
    code = f"""
    import fcntl, os, sys
    synced, commands, fsync, other = [], [], os.fsync, fcntl.fcntl
    fcntl.F_FULLFSYNC = 51
    def plain(descriptor):
        synced.append(descriptor)
        fsync(descriptor)
    def command(descriptor, number, *argument):
        if number != 51: return other(descriptor, number, *argument)
        commands.append(descriptor)
        if {refused}: raise OSError({refused}, "no such command")
    os.fsync, os.fdatasync, fcntl.fcntl = plain, None, command
    from txnkv.storage import Store
    with Store.open(sys.argv[1], schema_sql="CREATE TABLE t (id)") as store:
        made = len(commands)
        for i in range(5):
            with store.status.write() as cursor:
                cursor.execute("INSERT INTO t VALUES (?)", (i,))
                (of_sqlite,) = cursor.execute("PRAGMA fullfsync").fetchone()
        print(made > 2, len(commands) - made >= 5, of_sqlite)
    print(synced == (commands if {refused} else []))
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "store")]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert said.stdout.split() == ["True", "True", "1", "True"], said.stderr
