"""SQLite: reads, the queue of writers, the change number, checkpoints, failures."""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import apsw
import pytest

from txnkv.errors import (
    ClosedError,
    CorruptionError,
    IncompatibleStoreError,
    NotSupportedError,
    UnavailableError,
)
from txnkv.storage import GATE, StatusDatabase, Store, arm, disarm, sqlite_connection
from txnkv.storage.extents import Extent
from txnkv.storage.runtime import Runtime
from txnkv.storage.sqlite_connection import check_sqlite_version

SCHEMA = "CREATE TABLE t (id INTEGER PRIMARY KEY, value INTEGER)"


@pytest.fixture
def db(store: Store) -> StatusDatabase:
    return store.status


def insert(db: StatusDatabase, id_: int, value: object = 0) -> None:
    with db.write() as cursor:
        cursor.execute("INSERT INTO t VALUES (?, ?)", (id_, value))


def ids(db: StatusDatabase) -> list[int]:
    with db.read() as cursor:
        return [row[0] for row in cursor.execute("SELECT id FROM t ORDER BY id")]


def test_write_commits_and_read_sees_it(db: StatusDatabase) -> None:
    insert(db, 1)
    assert ids(db) == [1]


def insert_and_fail(db: StatusDatabase) -> None:
    with db.write() as cursor:
        cursor.execute("INSERT INTO t VALUES (1, 1)")
        raise LookupError("mine")


def test_exception_rolls_back_and_goes_on(db: StatusDatabase) -> None:
    with pytest.raises(LookupError, match="mine"):
        insert_and_fail(db)
    twice = "INSERT INTO t VALUES (1, 1); INSERT INTO t VALUES (1, 1)"
    with pytest.raises(apsw.ConstraintError), db.write() as cursor:
        cursor.execute(twice)
    assert ids(db) == []
    insert(db, 2)
    assert ids(db) == [2]


def test_read_sees_one_state_and_none_outlives_its_block(db: StatusDatabase) -> None:
    insert(db, 1)
    with db.read() as cursor:
        assert cursor.execute("SELECT count(*) FROM t").get == 1
        with ThreadPoolExecutor(1) as pool:
            pool.submit(insert, db, 2).result(60)
        assert cursor.execute("SELECT count(*) FROM t").get == 1
        rows = cursor.execute("SELECT id FROM t")
    with pytest.raises(apsw.CursorClosedError):
        next(rows)
    assert ids(db) == [1, 2]
    db.checkpoint()
    assert db.path.with_name("status.db-wal").stat().st_size == 0


def test_read_cannot_write(db: StatusDatabase) -> None:
    with pytest.raises(NotSupportedError), db.read() as cursor:
        cursor.execute("INSERT INTO t VALUES (1, 1)")
    assert ids(db) == []


def test_settings_of_the_connections(db: StatusDatabase) -> None:
    wanted = {
        "journal_mode": "wal",
        "synchronous": 2,
        "mmap_size": 0,
        "foreign_keys": 1,
        "page_size": 4096,
        "wal_autocheckpoint": 0,
    }
    for scope in (db.read, db.write):
        with scope() as cursor:
            names = [*wanted, "busy_timeout"]
            found = {name: cursor.execute(f"PRAGMA {name}").get for name in names}
        # COMMIT leaves the sync of the WAL to `StatusDatabase.sync`, checkpoints do not; and the
        # queue waits, `begin` for those who are in none.
        writes = {"synchronous": 1, "busy_timeout": 0}
        assert found == wanted | (writes if scope == db.write else {"busy_timeout": 5000})


# -- syncs -----------------------------------------------------------------------------


@pytest.fixture
def syncs(db: StatusDatabase, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the syncs of the log: whether another could have had the write lock meanwhile."""
    found: list[str] = []
    real = db._wal.sync

    def sync() -> None:
        free = db._queue._owner is None
        found.append("lock free" if free else "lock held")
        real()

    monkeypatch.setattr(db._wal, "sync", sync)
    return found


def test_a_write_is_synced_when_the_lock_is_free(db: StatusDatabase, syncs: list[str]) -> None:
    insert(db, 1)
    assert syncs == ["lock free"]
    assert ids(db) == [1]
    assert syncs == ["lock free"]  # all is on the disk: a read has nothing to do


def test_a_read_makes_durable_what_it_saw(db: StatusDatabase, syncs: list[str]) -> None:
    with db.write(sync=False) as cursor:
        cursor.execute("INSERT INTO t VALUES (1, 1)")
    assert syncs == []
    with db.read(durable=False) as cursor:
        assert cursor.execute("SELECT count(*) FROM t").get == 1
    assert syncs == []
    assert ids(db) == [1]
    assert syncs == ["lock free"]
    db.sync_what_was_seen()
    assert syncs == ["lock free"]


def test_a_later_sync_covers_what_came_before(db: StatusDatabase, syncs: list[str]) -> None:
    with db.write(sync=False) as cursor:
        cursor.execute("INSERT INTO t VALUES (1, 1)")
    insert(db, 2)
    assert ids(db) == [1, 2]
    assert syncs == ["lock free"]


def test_after_a_failed_sync_the_wal_is_begun_anew(db: StatusDatabase) -> None:
    """The disk may have lost pages of it that no later sync would write."""
    insert(db, 1)
    arm("status.unsynced", "error")
    with pytest.raises(UnavailableError, match="tries again"):
        insert(db, 2)
    disarm("status.unsynced")
    insert(db, 3)
    assert db.path.stat().st_size > 0
    assert db._runtime.to_sync() is not None
    assert ids(db) == [1, 2, 3]


def test_no_write_is_acknowledged_while_a_failed_wal_cannot_be_moved(
    db: StatusDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    arm("status.unsynced", "error")
    with pytest.raises(UnavailableError):
        insert(db, 1)
    disarm("status.unsynced")
    with monkeypatch.context() as patched:
        patched.setattr(db._checkpointer, "run", lambda *, cut: None)
        with pytest.raises(UnavailableError, match="failed before"):
            insert(db, 2)
    insert(db, 3)
    assert ids(db) == [1, 2, 3]


def test_files_are_private(db: StatusDatabase) -> None:
    insert(db, 1)
    for path in db.path.parent.glob("status*"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_old_sqlite_is_refused() -> None:
    check_sqlite_version("3.51.3")
    check_sqlite_version("3.60.0")
    for old in ("3.51.2", "3.7.17"):
        with pytest.raises(IncompatibleStoreError, match=f"SQLite {old}"):
            check_sqlite_version(old)


def test_schema_is_made_once_with_what_initialise_adds(tmp_path: Path) -> None:
    calls: list[int] = []

    def initialise(cursor: apsw.Cursor) -> None:
        calls.append(1)
        cursor.execute("INSERT INTO t VALUES (1, 1)")

    for _ in range(2):
        with Store.open(tmp_path / "s", schema_sql=SCHEMA, initialise=initialise) as store:
            assert ids(store.status) == [1]
    assert calls == [1]


def test_failed_initialise_leaves_nothing_half_made(tmp_path: Path) -> None:
    def fail(cursor: apsw.Cursor) -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError):
        Store.open(tmp_path / "s", schema_sql=SCHEMA, initialise=fail)
    with Store.open(tmp_path / "s", schema_sql=SCHEMA) as store:
        assert ids(store.status) == []


def test_schema_is_made_by_one_of_many_processes(tmp_path: Path, python) -> None:
    code = """
    def initialise(cursor): cursor.execute("INSERT INTO t VALUES (1, 1)")
    say("ready"); wait()
    store = Store.open(sys.argv[1], schema_sql=SCHEMA, initialise=initialise)
    with store.status.read() as cursor: say(cursor.execute("SELECT count(*) FROM t").get)
    """
    openers = [python(code, tmp_path / "s") for _ in range(4)]
    assert [opener.line() for opener in openers] == ["ready"] * 4
    for opener in openers:
        opener.tell()
    assert [opener.line() for opener in openers] == ["1"] * 4


# -- the queue -------------------------------------------------------------------------


def test_write_inside_a_write_of_the_thread_is_a_bug(db: StatusDatabase) -> None:
    with db.write() as cursor:
        cursor.execute("INSERT INTO t VALUES (1, 1)")
        with pytest.raises(RuntimeError, match="inside a write"):
            db.write().__enter__()
    assert ids(db) == [1]
    insert(db, 2)


def test_threads_queue(db: StatusDatabase) -> None:
    with db.write() as cursor:
        cursor.execute("INSERT INTO t VALUES (0, 0)")

    def increment() -> None:
        for _ in range(25):
            with db.write() as cursor:
                value = cursor.execute("SELECT value FROM t WHERE id = 0").get
                cursor.execute("UPDATE t SET value = ? WHERE id = 0", (value + 1,))

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(increment) for _ in range(4)]:
            future.result(120)
    with db.read() as cursor:
        assert cursor.execute("SELECT value FROM t").get == 100


def test_processes_queue(store: Store, python) -> None:
    code = """
    store = Store.open(sys.argv[1])
    say("ready"); wait()
    for i in range(50):
        with store.status.write() as cursor:
            cursor.execute("INSERT INTO t VALUES (?, 0)", (int(sys.argv[2]) + i,))
    """
    writers = [python(code, store.directory.path, first) for first in (0, 100, 200, 300)]
    for writer in writers:
        assert writer.line() == "ready"
    for writer in writers:
        writer.tell()
    for writer in writers:
        writer.finish()
    assert len(ids(store.status)) == 200


def test_writers_wait_outside_of_sqlite(db: StatusDatabase) -> None:
    # With SQLite's busy handler alone, waiting writers sleep and poll, and some wait for seconds.
    waiting = threading.Event()

    def second() -> None:
        waiting.set()
        insert(db, 2)

    with ThreadPoolExecutor(1) as pool:
        with db.write() as cursor:
            cursor.execute("INSERT INTO t VALUES (1, 1)")
            future = pool.submit(second)
            waiting.wait(60)
        future.result(60)
    assert ids(db) == [1, 2]


# -- the change number -----------------------------------------------------------------


def test_change_number_moves_with_each_commit(db: StatusDatabase) -> None:
    before = db._runtime.change_number()
    assert before == db._runtime.change_number()
    insert(db, 1)
    after = db._runtime.change_number()
    assert before is not None
    assert after is not None
    assert after > before


def test_change_number_is_busy_in_commit(db: StatusDatabase) -> None:
    seen, number = dict[str, int | None](), db._runtime.change_number
    for point in ("before", "after"):
        arm(f"status.{point}_commit", lambda point=point: seen.update({point: number()}))
    insert(db, 1)
    assert seen == {"before": None, "after": None}
    assert db._runtime.change_number() is not None


def test_rollback_leaves_the_change_number(db: StatusDatabase) -> None:
    before = db._runtime.change_number()
    with pytest.raises(LookupError):
        insert_and_fail(db)
    assert db._runtime.change_number() == before


def test_failed_commit_moves_the_change_number(db: StatusDatabase) -> None:
    before = db._runtime.change_number()
    arm("status.before_commit", "error@1")
    with pytest.raises(UnavailableError):
        insert(db, 1)
    assert db._runtime.change_number() not in (None, before)
    assert ids(db) == []
    insert(db, 2)
    assert ids(db) == [2]


def fail() -> None:
    raise LookupError("mine")


def test_any_exception_at_commit_leaves_a_sound_connection(db: StatusDatabase) -> None:
    arm("status.before_commit", fail)
    with pytest.raises(LookupError):
        insert(db, 1)
    arm("status.before_commit", lambda: None)
    insert(db, 2)
    assert ids(db) == [2]


@pytest.mark.parametrize(("point", "expected"), [("before", []), ("after", [1])])
def test_writer_killed_in_commit_leaves_busy_and_that_means_look(
    store: Store, python, point: str, expected: list[int]
) -> None:
    known = store.runtime.change_number()
    code = """
    with Store.open(sys.argv[1]).status.write() as cursor:
        cursor.execute("INSERT INTO t VALUES (1, 1)")
    """
    python(code, store.directory.path, fault=f"status.{point}_commit=kill").finish(code=-9)
    assert store.runtime.change_number() is None  # never `known`: the commit may be there
    assert ids(store.status) == expected
    insert(store.status, 9)  # the flock of the dead is free, and the number comes to rest
    assert store.runtime.change_number() not in (None, known)
    assert ids(store.status) == [*expected, 9]


def test_commit_of_another_process_is_told(store: Store, python) -> None:
    known = store.runtime.change_number()
    code = """
    with Store.open(sys.argv[1]).status.write() as cursor:
        cursor.execute("INSERT INTO t VALUES (1, 1)")
    """
    python(code, store.directory.path).finish()
    assert store.runtime.change_number() not in (None, known)


# -- checkpoints -----------------------------------------------------------------------


def wal_size(db: StatusDatabase) -> int:
    return db.path.with_name("status.db-wal").stat().st_size


def test_committers_do_not_checkpoint(db: StatusDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_connection, "REUSE_BYTES", 1 << 30)  # nor does anybody for them
    for i in range(300):
        insert(db, i, b"x" * 20000)
    assert wal_size(db) == pytest.approx(db.wal_bytes, abs=100)
    assert db.wal_bytes > 1000 * 4096  # where SQLite by itself would have made one
    db.checkpoint()
    assert wal_size(db) == 0


def test_the_wal_is_used_again_from_its_start(
    db: StatusDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_connection, "REUSE_BYTES", 1 << 20)
    sizes = []
    for i in range(400):
        insert(db, i, b"x" * 20000)
        if i % 20 == 19:
            db._checkpointer.wait()
            sizes.append(wal_size(db))
    assert len(ids(db)) == 400
    assert max(sizes) < 2 << 20  # 8 MB went through it
    assert db.wal_bytes <= sizes[-1]


def test_writer_above_the_limit_checkpoints(
    db: StatusDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_connection, "WAL_LIMIT_BYTES", 1 << 20)
    monkeypatch.setattr(db._checkpointer, "limit", 1 << 20)
    for i in range(200):
        insert(db, i, b"x" * 20000)
    assert wal_size(db) <= 2 << 20
    assert len(ids(db)) == 200


def test_checkpoint_beside_a_reader_gives_up_and_comes_again(db: StatusDatabase) -> None:
    insert(db, 1)
    with db.read() as cursor:
        cursor.execute("SELECT 1 FROM t").fetchall()
        insert(db, 2)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(db.checkpoint).result(60)
        assert wal_size(db) > 0
    db.checkpoint()
    assert wal_size(db) == 0


@pytest.mark.parametrize("end", ["goes on", "dies"])
def test_a_stopped_reader_is_named_and_then_the_wal_is_cut(
    store: Store,
    python,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    end: str,
) -> None:
    """The WAL grew to gigabytes beside it, and stayed so for ever."""
    monkeypatch.setattr(sqlite_connection, "WAL_LIMIT_BYTES", 1 << 20)
    monkeypatch.setattr(sqlite_connection, "_READING_SECONDS", 0.0)
    db = store.status
    insert(db, 0)
    code = """
    import os, signal
    db = Store.open(sys.argv[1]).status
    with db.read() as cursor:
        cursor.execute("SELECT * FROM t").fetchall()
        say(os.getpid())
        os.kill(os.getpid(), signal.SIGSTOP)
    say("done")
    wait()
    """
    other = python(code, store.directory.path)
    pid = int(other.line())
    os.waitpid(pid, os.WUNTRACED)
    for i in range(1, 120):
        insert(db, i, b"x" * 20000)
    db.checkpoint(cut=False)
    assert wal_size(db) > 2 << 20
    assert db.wal_is_long()
    (told,) = [each for each in caplog.messages if "grows with each commit" in each]
    assert f"process {pid} is" in told or not Path("/proc/locks").exists()
    os.kill(pid, signal.SIGCONT if end == "goes on" else signal.SIGKILL)
    if end == "goes on":
        assert other.line() == "done"
    else:
        other.popen.wait(60)
    give_up = time.monotonic() + 60
    while db.wal_is_long() and time.monotonic() < give_up:
        db.checkpoint(cut=False)  # what the background does now and then
    assert wal_size(db) < 1 << 20
    assert len(ids(db)) == 120


def test_closing_the_last_connection_makes_no_checkpoint(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s", schema_sql=SCHEMA) as store:
        insert(store.status, 1)
    assert (tmp_path / "s" / "status.db-wal").stat().st_size > 0


# -- failures --------------------------------------------------------------------------


def test_file_size_limit_is_storage_full(store: Store, python) -> None:
    code = """
    import resource
    from txnkv.errors import StorageFullError
    db = Store.open(sys.argv[1]).status
    def insert(id_, size):
        with db.write() as cursor:
            cursor.execute("INSERT INTO t VALUES (?, zeroblob(?))", (id_, size))
    insert(1, 10)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    for id_ in (2, 3):
        try: insert(id_, 4_000_000)
        except StorageFullError as error: say(type(error).__name__, "status.db" in str(error))
    insert(4, 10)
    with db.read() as cursor: say(cursor.execute("SELECT id FROM t").fetchall())
    """
    said = python(code, store.directory.path).finish()
    assert said == ["StorageFullError True"] * 2 + ["[(1,), (4,)]"]
    assert ids(store.status) == [1, 4]


def test_damaged_file_is_corruption(tmp_path: Path) -> None:
    Store.open(tmp_path / "s", schema_sql=SCHEMA).close()
    for name in ("status.db-wal", "status.db-shm"):
        (tmp_path / "s" / name).unlink(missing_ok=True)
    (tmp_path / "s" / "status.db").write_bytes(b"no database" * 1000)
    with pytest.raises(CorruptionError, match=r"status\.db"):
        Store.open(tmp_path / "s")


def test_closed_database_says_so(directory) -> None:
    runtime = Runtime.open(directory.runtime_path)
    db = StatusDatabase(directory.status_path, directory.status_lock_path, runtime, SCHEMA)
    insert(db, 1)
    db.close()
    for scope in (db.read, db.write):
        with pytest.raises(ClosedError, match="open the store again"):
            scope().__enter__()
    runtime.close()


def test_backup_is_a_consistent_copy(db: StatusDatabase, tmp_path: Path) -> None:
    insert(db, 1)
    db.backup_to(tmp_path / "copy.db")
    copy = apsw.Connection(str(tmp_path / "copy.db"))
    assert copy.execute("SELECT id FROM t").fetchall() == [(1,)]
    copy.close()
    insert(db, 2)


def test_read_only_store(store: Store, python) -> None:
    insert(store.status, 1)
    code = """
    from txnkv.errors import NotSupportedError
    db = Store.open(sys.argv[1], read_only=True).status
    with db.read() as cursor: say(cursor.execute("SELECT id FROM t").fetchall())
    try:
        with db.write() as cursor: pass
    except NotSupportedError: say("refused")
    """
    assert python(code, store.directory.path).finish() == ["[(1,)]", "refused"]


def test_a_sync_beside_other_work_makes_durable(db: StatusDatabase, store: Store) -> None:
    with db.write(sync=False) as cursor:
        cursor.execute("INSERT INTO t VALUES (1, 1)")
    assert not store.runtime.all_synced()
    with GATE.use():
        wait = db.begin_sync()
        assert ids(db) == [1]
        wait()
    assert store.runtime.all_synced()


def test_a_sync_beside_other_work_that_fails_is_made_up_for(
    db: StatusDatabase, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    insert(db, 1)

    def fail(_: int) -> None:
        raise OSError(5, "the disk failed")

    with GATE.use(), monkeypatch.context() as broken:
        with db.write(sync=False) as cursor:
            cursor.execute("INSERT INTO t VALUES (2, 1)")
        broken.setattr(sqlite_connection, "sync_data", fail)
        wait = db.begin_sync()
        with pytest.raises(UnavailableError, match="the disk failed"):
            wait()
        assert store.runtime.to_sync() is None
    db.begin_sync()()
    assert store.runtime.to_sync() is not None
    assert store.runtime.all_synced()
    assert ids(db) == [1, 2]


def test_an_extent_that_is_noted_while_a_commit_runs_is_left_for_the_next(
    db: StatusDatabase,
) -> None:
    """The list of them was looked at again after COMMIT, and its names taken for extents."""
    extents, extent = db.extents, Extent(b"x" * 16, 1)
    extents.keep()
    arm("status.before_commit", lambda: extents.note("logs/1", extent))
    with db.write():
        pass
    disarm()
    assert extents.noted == {"logs/1": extent}
