"""LMDB in one process: growth, gates, handles, the table of environments."""

from __future__ import annotations

import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lmdb
import pytest

from txnkv.errors import (
    ClosedError,
    CorruptionError,
    NotSupportedError,
    StoreNotFoundError,
    UnavailableError,
)
from txnkv.storage import Environment, Environments, StoreDirectory, arm
from txnkv.storage.environments import _TABLE
from txnkv.storage.faults import InjectedFault
from txnkv.storage.lmdb_open import OpenLmdb, make_environment_files
from txnkv.storage.write_queue import FolderTurn

PAGE = b"v" * 4000


def put(environment: Environment, *keys: bytes, value: bytes = b"1") -> None:
    def fn(txn: Any) -> None:
        for key in keys:
            txn.put(key, value, db=environment.db(b"blocks"))

    environment.write(fn)


def get(environment: Environment, key: bytes) -> bytes | None:
    with environment.read() as txn:
        value = txn.get(key, db=environment.db(b"blocks"))
        return None if value is None else bytes(value)


@pytest.fixture
def environment(environments: Environments) -> Environment:
    return environments.get("tablets/1")


def test_what_is_written_is_read(environment: Environment) -> None:
    put(environment, b"a", b"b")
    assert get(environment, b"a") == b"1"
    assert get(environment, b"c") is None


def test_values_are_buffers(environment: Environment) -> None:
    put(environment, b"a")
    with environment.read() as txn:
        assert isinstance(txn.get(b"a", db=environment.db(b"blocks")), memoryview)


def test_files_are_private_and_the_lock_file_has_its_blocks(environment: Environment) -> None:
    # A reader that touches a hole of the lock file on a full disk dies of SIGBUS.
    put(environment, b"a")
    for name in ("data.mdb", "lock.mdb"):
        assert stat.S_IMODE((environment.path / name).stat().st_mode) == 0o600
    lock = (environment.path / "lock.mdb").stat()
    assert lock.st_blocks * 512 >= lock.st_size > 1024 * 64


def test_exception_aborts_and_goes_on(environment: Environment) -> None:
    put(environment, b"a")

    def fail(txn: Any) -> None:
        txn.put(b"a", b"2", db=environment.db(b"blocks"))
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        environment.write(fail)
    assert get(environment, b"a") == b"1"


def panic(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have LMDB refuse the environment as it is open now, as after a commit that failed."""
    refused, begin = environment._lmdb, OpenLmdb.begin

    def begin_unless_refused(self: OpenLmdb, *args: Any) -> Any:
        if self is refused:
            raise lmdb.PanicError("mdb_txn_begin: MDB_PANIC")
        return begin(self, *args)

    monkeypatch.setattr(OpenLmdb, "begin", begin_unless_refused)


@pytest.mark.parametrize("writing", [False, True])
def test_who_comes_after_a_failed_commit_is_not_told(
    environment: Environment, monkeypatch: pytest.MonkeyPatch, writing: bool
) -> None:
    """Whoever read or wrote next was told of an error that was another's."""
    put(environment, b"a")
    panic(environment, monkeypatch)
    if writing:
        put(environment, b"a", value=b"2")
    assert get(environment, b"a") == (b"2" if writing else b"1")


def test_outer_read_keeps_what_a_failed_commit_left(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(environment, b"a")
    with environment.read() as txn:
        panic(environment, monkeypatch)
        with pytest.raises(UnavailableError, match="Nothing was changed"):
            get(environment, b"a")
        assert txn.get(b"a", db=environment.db(b"blocks")) == b"1"
    assert get(environment, b"a") == b"1"


def test_error_before_commit_commits_nothing(environment: Environment) -> None:
    put(environment, b"a")
    arm("lmdb.before_commit", "error@1")
    with pytest.raises(UnavailableError):
        put(environment, b"a", value=b"2")
    assert get(environment, b"a") == b"1"
    put(environment, b"a", value=b"3")
    assert get(environment, b"a") == b"3"


def test_error_after_commit_is_not_taken_for_a_failed_commit(environment: Environment) -> None:
    put(environment, b"a")
    arm("lmdb.after_commit", "error@1")
    with pytest.raises(InjectedFault):
        put(environment, b"a", value=b"2")
    assert get(environment, b"a") == b"2"


# -- growth ----------------------------------------------------------------------------


def test_full_map_grows_and_the_write_runs_again(environment: Environment) -> None:
    runs: list[int] = []

    def fill(txn: Any) -> int:
        runs.append(1)
        for key in range(100):
            txn.put(b"%d" % key, PAGE, db=environment.db(b"blocks"))
        return 7

    assert environment.write(fill) == 7
    assert len(runs) > 1
    assert environment.map_size >= 100 * 4096
    with environment.read() as txn:
        assert txn.stat(environment.db(b"blocks"))["entries"] == 100


def test_growth_waits_for_readers_of_this_process(environment: Environment) -> None:
    # Moving the map under a live reader is a SIGBUS: the test would die, not fail.
    put(environment, b"a", value=PAGE)
    size = environment.map_size
    reading, growing, checked = threading.Event(), threading.Event(), threading.Event()

    def read() -> bytes:
        with environment.read() as txn:
            value = txn.get(b"a", db=environment.db(b"blocks"))
            reading.set()
            growing.wait(60)
            while environment._gate._joining.acquire(blocking=False):
                environment._gate._joining.release()
            assert environment._lmdb is not None
            assert environment._lmdb.map_size == size
            checked.set()
            return bytes(value)

    def grow(txn: Any) -> None:
        growing.set()
        for key in range(200):
            txn.put(b"%d" % key, PAGE, db=environment.db(b"blocks"))

    with ThreadPoolExecutor(2) as pool:
        reader = pool.submit(read)
        reading.wait(60)
        pool.submit(environment.write, grow).result(60)
        assert checked.is_set()
        assert reader.result() == PAGE
    assert environment.map_size > size


def test_readers_and_growing_writers_side_by_side(environment: Environment) -> None:
    put(environment, b"0", value=PAGE)
    done = threading.Event()

    def read() -> int:
        count = 0
        while not done.is_set() or count == 0:
            with environment.read() as txn:
                cursor = txn.cursor(environment.db(b"blocks"))
                assert all(bytes(value) == PAGE for _, value in cursor)
                with environment.read() as inner:
                    assert inner.get(b"0", db=environment.db(b"blocks")) is not None
            count += 1
            # py-lmdb aborts a write (the map is full) in a moment when no call of another thread
            # is inside LMDB. Readers that do nothing else never leave it one.
            done.wait(0.001)
        return count

    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        for batch in range(40):
            put(environment, *(b"%d" % (batch * 20 + i) for i in range(20)), value=PAGE)
        done.set()
        assert all(reader.result(60) > 0 for reader in readers)
    assert environment.map_size >= 800 * 4096


def test_write_inside_a_transaction_of_the_thread_is_refused(environment: Environment) -> None:
    put(environment, b"a")
    with environment.read(), pytest.raises(RuntimeError, match="inside a read"):
        put(environment, b"b")
    with pytest.raises(RuntimeError, match="inside a write"):
        environment.write(lambda _: put(environment, b"b"))
    put(environment, b"c")
    assert get(environment, b"b") is None


# -- named databases -------------------------------------------------------------------


def test_missing_database_is_a_key_error_in_a_read(environment: Environment) -> None:
    with environment.read(), pytest.raises(KeyError, match="other"):
        environment.db(b"other")
    put(environment, b"a")
    assert get(environment, b"a") == b"1"


def test_database_is_made_outside_of_a_transaction(environment: Environment) -> None:
    environment.db(b"one")
    with environment.read() as txn:
        assert txn.get(b"a", db=environment.db(b"one")) is None


def test_database_of_an_aborted_write_is_not_kept(environment: Environment) -> None:
    # The slot of the aborted handle is given to the next one: kept, it would read "second".
    def fail(txn: Any) -> None:
        txn.put(b"a", b"first", db=environment.db(b"first"))
        raise LookupError

    with pytest.raises(LookupError):
        environment.write(fail)
    environment.write(lambda txn: txn.put(b"a", b"second", db=environment.db(b"second")))
    with environment.read(), pytest.raises(KeyError):
        environment.db(b"first")
    with environment.read() as txn:
        assert bytes(txn.get(b"a", db=environment.db(b"second"))) == b"second"


def test_read_that_began_before_the_database_is_told_to_begin_again(
    environment: Environment,
) -> None:
    environment.db(b"old")
    with environment.read() as txn:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(put, environment, b"a").result(60)
        with pytest.raises(UnavailableError, match="begin"):
            environment.db(b"blocks")
        assert txn.get(b"a", db=environment.db(b"old")) is None
    assert get(environment, b"a") == b"1"


def test_all_databases_are_there_after_reopening(environment: Environment) -> None:
    for name in (b"a", b"b", b"c"):
        environment.write(lambda txn, n=name: txn.put(b"k", n, db=environment.db(n)))
    assert environment.close()
    assert not environment.is_open
    with environment.read() as txn:
        found = [bytes(txn.get(b"k", db=environment.db(n))) for n in (b"c", b"a", b"b")]
    assert found == [b"c", b"a", b"b"]


def test_reading_does_not_wait_for_a_writer_of_another_process(
    environment: Environment, python
) -> None:
    # Opening handles read-write takes LMDB's write lock; a reader must not.
    put(environment, b"a")
    environment.close()
    code = """
    env = Environments(StoreDirectory.open(sys.argv[1])).get("tablets/1")
    env.write(lambda txn: (say("writing"), wait()))
    """
    writer = python(code, environment.path.parent.parent)
    assert writer.line() == "writing"
    assert get(environment, b"a") == b"1"
    writer.tell()
    writer.finish()


# -- the table -------------------------------------------------------------------------


def test_one_folder_is_one_object_whoever_asks(directory: StoreDirectory) -> None:
    first, second = Environments(directory), Environments(directory)
    environment = first.get("tablets/1")
    assert second.get("tablets/1") is environment is first.get("tablets/1")
    put(environment, b"a")
    first.close_all()
    assert get(environment, b"a") == b"1"
    second.close_all()
    with pytest.raises(ClosedError):
        get(environment, b"a")
    with pytest.raises(ClosedError):
        second.get("tablets/1")


def test_idle_environments_are_closed_above_the_cap(
    directory: StoreDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_TABLE, "open_cap", 3)
    environments = Environments(directory)
    all_of_them = [environments.get(f"tablets/{i}") for i in range(6)]
    for environment in all_of_them:
        put(environment, b"a")
        get(all_of_them[0], b"a")
    assert environments.open_count == 3
    assert all_of_them[0].is_open
    with all_of_them[1].read(), all_of_them[2].read(), all_of_them[3].read():
        # All that could be closed are in use: one more opens all the same.
        get(all_of_them[4], b"a")
    assert all(get(environment, b"a") == b"1" for environment in all_of_them)
    environments.close_all()


def test_who_goes_over_more_than_the_cap_finds_some_open(
    directory: StoreDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that were used longest ago were closed: just those that come next, all of them."""
    monkeypatch.setattr(_TABLE, "open_cap", 24)
    environments = Environments(directory)
    all_of_them = [environments.get(f"tablets/{i}") for i in range(30)]
    for environment in all_of_them:
        put(environment, b"a")
    found = 0
    for _ in range(20):
        for environment in all_of_them:
            found += environment.is_open
            get(environment, b"a")
    assert found > 20 * 30 // 3
    environments.close_all()


def test_missing_environment_is_not_made_without_create(environments: Environments) -> None:
    with pytest.raises(StoreNotFoundError, match="tablets/9"):
        environments.get("tablets/9", create=False)


def test_removed_environment_does_not_come_back_empty(
    directory: StoreDirectory, environments: Environments
) -> None:
    environment = environments.get("tablets/1")
    put(environment, b"a")
    environment.close()
    directory.remove_tablet_dir(1)
    with pytest.raises(StoreNotFoundError, match="removed"):
        get(environment, b"a")


def test_dropped_environment_can_be_made_again(
    directory: StoreDirectory, environments: Environments
) -> None:
    old = environments.get("tablets/1")
    put(old, b"a")
    environments.drop("tablets/1")
    environments.drop("tablets/1")
    directory.remove_tablet_dir(1)
    with pytest.raises(ClosedError):
        get(old, b"a")
    new = environments.get("tablets/1")
    put(new, b"b")
    assert get(new, b"a") is None


def test_drop_inside_a_read_is_refused(environments: Environments) -> None:
    environment = environments.get("tablets/1")
    put(environment, b"a")
    with environment.read(), pytest.raises(RuntimeError):
        environments.drop("tablets/1")
    assert environments.get("tablets/1") is environment


def test_a_read_whose_end_was_interrupted_does_not_hinder_closing(
    environments: Environments,
) -> None:
    environment = environments.get("tablets/1")
    put(environment, b"k")
    scope = environment.read()
    scope.__enter__()  # and a KeyboardInterrupt came before its end
    environments.close_all()
    assert environment.is_open
    scope.__exit__(None, None, None)
    assert environment.close()


def test_read_only_store_reads_and_does_not_write(directory: StoreDirectory) -> None:
    with_write = Environments(directory)
    put(with_write.get("tablets/1"), b"a")
    with_write.close_all()
    environments = Environments(StoreDirectory.open(directory.path, read_only=True))
    environment = environments.get("tablets/1")
    assert get(environment, b"a") == b"1"
    with pytest.raises(NotSupportedError, match="read only"):
        put(environment, b"b")
    with pytest.raises(StoreNotFoundError):
        environments.get("tablets/2")
    environments.close_all()


def test_file_that_is_not_lmdb_is_corruption(environments: Environments) -> None:
    environment = environments.get("tablets/1")
    (environment.path / "data.mdb").write_bytes(b"nonsense" * 1024)
    with pytest.raises(CorruptionError, match="tablets/1"):
        get(environment, b"a")


def test_open_twice_in_a_process_is_refused_by_lmdb(environment: Environment) -> None:
    # The reason for the table: lmdb itself says no, rather than break its locks.
    put(environment, b"a")
    with pytest.raises(lmdb.Error, match="already open"):
        lmdb.open(str(environment.path))


def test_reader_slots_run_out_with_a_clear_error(
    environments: Environments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txnkv.storage.lmdb_open.MAX_READERS", 8)
    environment = environments.get("tablets/1")
    (environment.path / "lock.mdb").unlink(missing_ok=True)
    put(environment, b"a")
    scopes = [environment.read() for _ in range(8)]
    for scope in scopes:
        scope.__enter__()
    with pytest.raises(UnavailableError, match="reader slots"):
        environment.read().__enter__()
    for scope in reversed(scopes):
        scope.__exit__()
    assert get(environment, b"a") == b"1"


def test_copy_is_consistent_and_complete(environment: Environment, tmp_path: Path) -> None:
    put(environment, b"a", b"b")
    (tmp_path / "copy").mkdir()
    environment.copy_to(tmp_path / "copy")
    with lmdb.open(str(tmp_path / "copy"), max_dbs=8, lock=False) as copy:
        db = copy.open_db(b"blocks")
        with copy.begin(db) as txn:
            assert list(txn.cursor().iternext(values=False)) == [b"a", b"b"]


def test_a_turn_ends_where_closing_is_put_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "close", lambda descriptor: None)  # gevent's closes a folder later
    make_environment_files(tmp_path / "1")
    turn = FolderTurn(tmp_path / "1")
    for _ in range(2):
        turn.acquire(wait=False)
        turn.release()
