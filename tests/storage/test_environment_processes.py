"""LMDB between processes: growth adopted, dead readers and writers, full disks."""

from __future__ import annotations

import _multiprocessing
import errno
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lmdb
import pytest

from tests.conftest import until
from txnkv.core import WriterLock
from txnkv.errors import NotSupportedError, StorageFullError, UnavailableError
from txnkv.storage import Environment, Environments, StoreDirectory, arm, lmdb_open, shrink
from txnkv.storage.faults import lmdb_error

PAGE = b"v" * 4000
OPEN = """
env = Environments(StoreDirectory.open(sys.argv[1]), initial_map_size=1 << 16).get("tablets/1")
def fill(first, count, size=4000):
    def fn(txn):
        for key in range(first, first + count):
            txn.put(b"%d" % key, b"v" * size, db=env.db(b"blocks"))
    env.write(fn)
def count():
    with env.read() as txn:
        return txn.stat(env.db(b"blocks"))["entries"]
"""


def fill(environment: Environment, first: int, count: int) -> None:
    def fn(txn: Any) -> None:
        for key in range(first, first + count):
            txn.put(b"%d" % key, PAGE, db=environment.db(b"blocks"))

    environment.write(fn)


def entries(environment: Environment) -> int:
    with environment.read() as txn:
        return int(txn.stat(environment.db(b"blocks"))["entries"])


def test_growth_of_another_process_is_adopted(
    directory: StoreDirectory, environments: Environments, python
) -> None:
    environment = environments.get("tablets/1")
    fill(environment, 0, 2)
    size = environment.map_size
    other = python(OPEN + "fill(0, 300); say('filled'); wait(); say(count())", directory.path)
    assert other.line() == "filled"
    assert entries(environment) == 300  # a read adopts
    assert environment.map_size > size
    fill(environment, 300, 1000)
    other.tell()
    assert other.line() == "1300"  # and so does the other
    other.finish()


@pytest.mark.parametrize("writes", [1, 2, 3, 4])
def test_who_waited_while_a_file_shrank_finds_all_of_it(
    directory: StoreDirectory, environments: Environments, python, writes: int
) -> None:
    """It took the number of the old file's latest transaction for the new one's, and read and
    wrote on from an older meta page: row sets that were committed were gone.
    """
    environment = environments.get("tablets/1")
    for number in range(writes):
        fill(environment, number, 1)
    other = python(
        OPEN + "wait(); say('opens'); say(count()); wait(); fill(1000, 1); say(count())",
        directory.path,
    )

    def let_it_open() -> None:
        other.tell()
        assert other.line() == "opens"
        until(lambda: waits_for_a_lock(other.popen.pid))

    arm("shrink.renamed", let_it_open)
    assert shrink(environment) is not None
    assert other.line() == str(writes)
    assert entries(environment) == writes
    other.tell()
    assert other.line() == str(writes + 1)
    fill(environment, 2000, 1)
    assert entries(environment) == writes + 2
    other.finish()


def waits_for_a_lock(pid: int) -> bool:
    """Tell whether a process waits for a file's lock; True where the system can't say."""
    locks = Path("/proc/locks")
    if not locks.exists():
        time.sleep(0.5)
        return True
    return any("->" in line and str(pid) in line.split() for line in locks.read_text().splitlines())


def test_write_adopts_growth_too(
    directory: StoreDirectory, environments: Environments, python
) -> None:
    environment = environments.get("tablets/1")
    fill(environment, 0, 2)
    python(OPEN + "fill(0, 300)", directory.path).finish()
    fill(environment, 300, 1)
    assert entries(environment) == 301


def test_growth_of_another_process_under_an_outer_read_is_an_error(
    directory: StoreDirectory, environments: Environments, python
) -> None:
    environment = environments.get("tablets/1")
    fill(environment, 0, 2)
    with environment.read() as txn:
        python(OPEN + "fill(0, 300)", directory.path).finish()
        with pytest.raises(UnavailableError, match="outer read"):
            environment.read().__enter__()
        assert txn.stat(environment.db(b"blocks"))["entries"] == 2
    assert entries(environment) == 300


def test_database_made_by_another_process_is_found_and_kept(
    directory: StoreDirectory, environments: Environments, python
) -> None:
    environment = environments.get("tablets/1")
    environment.db(b"early")
    python(OPEN + "fill(0, 3)", directory.path).finish()
    with environment.read() as txn:
        outer = environment.db(b"blocks")
        assert environment.db(b"blocks") is outer
        assert txn.stat(outer)["entries"] == 3
        with environment.read(), pytest.raises(UnavailableError, match="another transaction"):
            environment.db(b"blocks")
    assert not environment.is_open  # so that the next use opens the handle for good
    assert entries(environment) == 3
    assert environment._lmdb is not None
    assert b"blocks" in environment._lmdb.handles


def test_a_look_that_asks_for_a_database_which_is_not_open_leaves_it_to_a_read(
    directory: StoreDirectory, environments: Environments, python
) -> None:
    environment = environments.get("tablets/1")
    environment.db(b"early")
    environment.close()
    with environment.read() as txn:
        assert txn.stat(environment.db(b"early"))["entries"] == 0
    python(OPEN + "fill(0, 3)", directory.path).finish()
    asked = []

    def ask(txn: Any, *_: object) -> object:
        asked.append(not environment.is_writable)
        return txn.stat(environment.db(b"blocks"))["entries"]

    assert environment.look(b"early", ask) is None
    assert entries(environment) == 3
    assert environment.look(b"early", ask) is None  # it was closed by the read
    with environment.read():
        pass
    assert (environment.look(b"early", ask), asked) == (3, [True, True])


def test_a_write_within_a_look_that_has_it_open_to_read_is_refused(
    environments: Environments,
) -> None:
    environment = environments.get("tablets/1")
    environment.db(b"early")
    environment.close()
    with environment.read():
        environment.db(b"early")
    with pytest.raises(UnavailableError, match="opened anew"):
        environment.look(b"early", lambda *_: environment.write(lambda _: None))
    environment.write(lambda _: None)


def test_four_processes_write_and_grow_one_environment(
    directory: StoreDirectory, environments: Environments, python
) -> None:
    code = OPEN + "first = int(sys.argv[2])\nfor i in range(40): fill(first + i * 5, 5)"
    writers = [python(code, directory.path, first) for first in (0, 1000, 2000, 3000)]
    for writer in writers:
        writer.finish()
    assert entries(environments.get("tablets/1")) == 800


def test_slots_of_killed_readers_are_freed(
    directory: StoreDirectory, environments: Environments, python
) -> None:
    environment = environments.get("tablets/1")
    fill(environment, 0, 1)
    reader = python(
        OPEN + "scope = env.read(); scope.__enter__(); say('in'); wait()", directory.path
    )
    reader.line()
    reader.kill()
    assert environments.reader_check() == 1
    assert environments.reader_check() == 0


@pytest.mark.parametrize(("point", "expected"), [("before", 1), ("after", 2)])
def test_writer_killed_at_commit(
    directory: StoreDirectory, environments: Environments, python, point: str, expected: int
) -> None:
    environment = environments.get("tablets/1")
    fill(environment, 0, 1)
    code = OPEN + "fill(1, 1)"
    python(code, directory.path, fault=f"lmdb.{point}_commit=kill").finish(code=-9)
    assert entries(environment) == expected
    fill(environment, 2, 1)  # the lock of the dead is recovered
    assert entries(environment) == expected + 1


# -- full disks ------------------------------------------------------------------------


def test_a_semaphore_of_lmdb_that_a_dead_writer_took_is_given_back(
    tmp_path: Path, in_child: Callable[[Callable[[], object]], int]
) -> None:
    """The next writer builds on what the dead one may have committed without saying so."""
    name = f"/MDBw{os.getpid()}"
    semaphore = _multiprocessing.SemLock(1, 1, 1, name, False)  # counts from 1 to 1
    file = tmp_path / "lock.mdb"
    file.write_bytes(b"12345678" + b"/MDBrx".ljust(56, b"\0") + name.encode().ljust(64, b"\0"))
    try:
        with file.open("r+b") as opened:
            lock = WriterLock(opened.fileno())

        def take() -> None:
            assert semaphore.acquire(False)
            os.kill(os.getpid(), signal.SIGKILL)

        assert in_child(take) == -signal.SIGKILL
        assert not semaphore.acquire(False)
        assert lock.named
        assert lock.free(7)
        assert file.read_bytes()[40:48] == (7).to_bytes(8, sys.byteorder)
        assert not lock.free(9)  # nobody had it
        assert file.read_bytes()[40:48] == (7).to_bytes(8, sys.byteorder)
        assert semaphore.acquire(False)
        assert not semaphore.acquire(False)  # it was given back once
    finally:
        _multiprocessing.sem_unlink(name)
    with pytest.raises(OSError, match="No such file"):
        lock.free(9)
    file.write_bytes(bytes(128))
    assert not lock.named
    assert not lock.free(9)


def test_writers_give_the_lock_of_a_dead_one_back(
    environments: Environments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the system does not; no process has the turn then but this one."""
    freed: list[int] = []
    lock = SimpleNamespace(named=True, free=freed.append)
    monkeypatch.setattr(lmdb_open, "_FREED_AT_DEATH", False)
    monkeypatch.setattr(lmdb_open, "WriterLock", lambda _: lock)
    environment = environments.get("tablets/1")
    fill(environment, 0, 1)
    before = len(freed)
    for number in range(3):
        fill(environment, number, 1)
    assert freed[before:] == list(range(freed[before], freed[before] + 3))
    assert entries(environment) == 3


LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
"""


@pytest.mark.parametrize("size", [4000, 2_000_000])
def test_file_size_limit_is_storage_full_and_reading_goes_on(
    directory: StoreDirectory, environments: Environments, python, size: int
) -> None:
    environment = environments.get("tablets/1")
    fill(environment, 0, 3)
    code = f"""
    from txnkv.errors import StorageFullError
    env.db(b"blocks")
    for _ in range(2):
        try:
            fill(10, {1000 if size == 4000 else 2}, {size})
        except StorageFullError as error:
            say(type(error).__name__, str(error).count("tablets/1"), count())
    fill(3, 1)
    say(count())
    """
    import textwrap

    process = python(OPEN + LIMITED + textwrap.dedent(code), directory.path)
    assert process.finish() == ["StorageFullError 1 3", "StorageFullError 1 3", "4"]
    assert entries(environment) == 4


def test_full_file_system(tmp_path: Path, python) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    code = """
    import subprocess
    from txnkv.errors import StorageFullError
    mount = sys.argv[1]
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", mount]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        say("no mount"); raise SystemExit
    try:
        store = Store.open(mount + "/s", schema_sql=SCHEMA)
        env = store.environments.get("tablets/1")
        env.write(lambda txn: txn.put(b"k", b"v", db=env.db(b"blocks")))
        ballast = mount + "/ballast"
        with open(ballast, "wb") as file: file.write(bytes(500_000))
        try:
            env.write(lambda txn: txn.put(b"big", b"x" * (8 << 20), db=env.db(b"blocks")))
        except StorageFullError:
            say("lmdb full")
        try:
            with store.status.write() as cur:
                cur.execute("INSERT INTO t VALUES (1, zeroblob(8000000))")
        except StorageFullError:
            say("sqlite full")
        with env.read() as txn:
            say(bytes(txn.get(b"k", db=env.db(b"blocks"))).decode())
        os.unlink(ballast)
        with store.status.write() as cur:
            cur.execute("INSERT INTO t VALUES (2, 3)")
        with store.status.read() as cur:
            say(cur.execute("SELECT id, value FROM t").fetchall())
        store.close()
    finally:
        subprocess.run(["umount", "-l", mount], check=True)
    """
    said = python(code, mount).finish()
    if said == ["no mount"]:
        pytest.skip("no right to mount a small file system")
    assert said == ["lmdb full", "sqlite full", "v", "[(2, 3)]"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_errors_of_a_full_disk_name_path_and_reason(tmp_path: Path, code: int) -> None:
    error = lmdb_error(OSError(code, "x"), tmp_path)
    assert isinstance(error, StorageFullError)
    assert str(tmp_path) in str(error)


@pytest.mark.parametrize("name", ["EUCLEAN", "EINTR", "ENODEV", "ESTALE"])
def test_errors_of_a_disk_that_fails_are_retriable(tmp_path: Path, name: str) -> None:
    """They came as those of LMDB, also of a commit that was done."""
    code = getattr(errno, name, errno.EIO)
    of_lmdb = lmdb.Error("mdb_txn_commit")
    of_lmdb.code = code
    read_only = lmdb.Error("mdb_txn_commit")
    read_only.code = errno.EROFS
    for error in (OSError(code, "x"), of_lmdb, read_only):
        assert isinstance(lmdb_error(error, tmp_path), UnavailableError)


def test_no_memory_names_what_limits_it(tmp_path: Path) -> None:
    error = lmdb_error(OSError(errno.ENOMEM, "x"), tmp_path)
    assert "spark.executor.pyspark.memory" in str(error)


def test_no_thread_for_a_copy_is_told_as_such(tmp_path: Path) -> None:
    error = lmdb_error(OSError(errno.EAGAIN, "mdb_env_copy3"), tmp_path)
    assert "ulimit -u" in str(error)


def test_a_lock_of_another_of_the_same_pid_is_told_as_such(tmp_path: Path) -> None:
    error = lmdb_error(OSError(errno.EAGAIN, "mdb_txn_begin"), tmp_path)
    assert isinstance(error, NotSupportedError)
    assert f"has pid {os.getpid()} too" in str(error)


def test_input_output_error_with_room_on_the_disk_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("os.posix_fallocate", raising=False)  # macOS has none
    (tmp_path / "data.mdb").write_bytes(b"x")
    assert isinstance(lmdb_error(OSError(errno.EIO, "x"), tmp_path), UnavailableError)
    assert lmdb_error(LookupError(), tmp_path) is None
