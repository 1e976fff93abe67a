from __future__ import annotations

import errno
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from txnkv.errors import ClosedError, NotSupportedError, StoreNotFoundError
from txnkv.storage import Store

SCHEMA = "CREATE TABLE t (id INTEGER PRIMARY KEY, value INTEGER)"


def test_store_has_its_parts(store: Store, tmp_path: Path) -> None:
    assert store.directory.path == (tmp_path / "store").resolve()
    assert store.store_id == store.directory.store_id
    assert store.runtime.change_number() == store.runtime.change_number()
    assert store.environments.open_count == 0


def test_one_store_a_process_by_real_path(store: Store, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(store.directory.path)
    again = Store.open(tmp_path / "link" / ".." / "link")
    assert again is store
    again.close()
    assert not store.closed
    assert store.runtime.hold_snapshot(1).snapshot == 1


def test_a_mount_shows_the_store_that_is_open(store: Store, python) -> None:
    """Opened twice, the first to be closed took the locks of both: POSIX has one a file and
    process.
    """
    code = """
    import subprocess
    path, other = sys.argv[1:]
    with Store.open(path, schema_sql=SCHEMA) as store:
        os.mkdir(other)
        mount = ["mount", "--bind", path, other]
        if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
            say("no mount"); raise SystemExit
        try:
            again = Store.open(other)
            say(again is store)
            again.close()
            say(store.closed)
        finally:
            subprocess.run(["umount", "-l", other])
    """
    path = store.directory.path
    said = python(code, path, path.with_name("other")).finish()
    if said == ["no mount"]:
        pytest.skip("no right to mount")
    assert said == ["True", "False"]


def test_last_close_closes_all_parts(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s", schema_sql=SCHEMA)
    status, runtime, environments = store.status, store.runtime, store.environments
    environment = environments.get("tablets/1")
    environment.db(b"blocks")
    store.close()
    store.close()
    assert store.closed
    assert not environment.is_open
    uses = [
        lambda: store.status,
        lambda: store.runtime,
        lambda: store.environments,
        lambda: status.read().__enter__(),
        lambda: status.write().__enter__(),
        lambda: runtime.hold_snapshot(1),
        lambda: environments.get("tablets/1"),
        lambda: environment.read().__enter__(),
    ]
    for use in uses:
        with pytest.raises(ClosedError):
            use()


def test_store_opens_again_after_it_was_closed(tmp_path: Path) -> None:
    for i in range(3):
        with Store.open(tmp_path / "s", schema_sql=SCHEMA) as store:
            environment = store.environments.get("tablets/1")
            environment.write(lambda txn, e=environment: txn.put(b"k", b"v", db=e.db(b"blocks")))
            with store.status.write() as cursor:
                cursor.execute("INSERT INTO t VALUES (?, 0)", (i,))
    with Store.open(tmp_path / "s") as store, store.status.read() as cursor:
        assert cursor.execute("SELECT count(*) FROM t").get == 3


def test_failed_opening_leaves_nothing_open(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError):
        Store.open(tmp_path / "s", create=False)
    with pytest.raises(Exception, match="syntax"):
        Store.open(tmp_path / "s", schema_sql="CREATE NONSENSE")
    with Store.open(tmp_path / "s", schema_sql=SCHEMA) as store:
        assert store.runtime.slot == 0


def test_many_threads_open_one_store(tmp_path: Path) -> None:
    together = threading.Barrier(4)

    def open_(_: int) -> Store:
        together.wait(60)
        return Store.open(tmp_path / "s", schema_sql=SCHEMA)

    with ThreadPoolExecutor(4) as pool:
        stores = list(pool.map(open_, range(4)))
    assert len({id(store) for store in stores}) == 1
    for store in stores:
        assert not store.closed
        store.close()
    assert stores[0].closed


def test_two_stores_in_one_process(tmp_path: Path) -> None:
    with (
        Store.open(tmp_path / "a", schema_sql=SCHEMA) as a,
        Store.open(tmp_path / "b", schema_sql=SCHEMA) as b,
    ):
        assert a.store_id != b.store_id
        with a.status.write() as one, b.status.write() as two:
            one.execute("INSERT INTO t VALUES (1, 1)")
            two.execute("INSERT INTO t VALUES (2, 2)")
        assert a.environments.get("tablets/1") is not b.environments.get("tablets/1")


def test_read_only_store_is_not_opened_to_write_meanwhile(store: Store, python) -> None:
    code = """
    store = Store.open(sys.argv[1], read_only=True)
    try: Store.open(sys.argv[1])
    except ValueError as error: say("refused", "read only" in str(error))
    store.close()
    Store.open(sys.argv[1]).close()
    """
    assert python(code, store.directory.path).finish() == ["refused True"]


def test_read_only_store_on_a_read_only_file_system(tmp_path: Path, python) -> None:
    path = tmp_path / "s"
    with Store.open(path, schema_sql=SCHEMA) as store:
        environment = store.environments.get("tablets/1")
        environment.write(lambda txn: txn.put(b"k", b"v", db=environment.db(b"blocks")))
        with store.status.write() as cursor:
            cursor.execute("INSERT INTO t VALUES (1, 1)")
        store.status.checkpoint()
    dead = "Store.open(sys.argv[1], schema_sql=SCHEMA); os.kill(os.getpid(), 9)"
    python(dead, path / "wal").finish(code=-9)
    (path / "wal" / "status.db-shm").unlink()
    code = """
    import subprocess
    path = sys.argv[1]
    def run(*command): return subprocess.run(command, capture_output=True).returncode == 0
    if os.geteuid() != 0 or not run("mount", "--bind", path, path):
        say("no mount"); raise SystemExit
    try:
        if not run("mount", "-o", "remount,ro,bind", path):
            say("no mount"); raise SystemExit
        with Store.open(path, read_only=True) as store:
            with store.status.read() as cursor:
                say(cursor.execute("SELECT id FROM t").fetchall())
            env = store.environments.get("tablets/1")
            with env.read() as txn: say(bytes(txn.get(b"k", db=env.db(b"blocks"))).decode())
            pin = store.runtime.hold_snapshot(4)
            say(store.runtime.change_number(), store.runtime.least_pin())
        for name, read_only in ((path, False), (path + "/wal", True)):
            try: Store.open(name, read_only=read_only)
            except Exception as error:
                say(type(error).__name__, "copy the folder to" in " ".join(str(error).split()))
    finally:
        run("umount", "-l", path)
    """
    said = python(code, path).finish()
    if said == ["no mount"]:
        pytest.skip("no right to mount read-only")
    assert said == ["[(1,)]", "v", "None 4", *["NotSupportedError True"] * 2]


LONG = "x" * 240


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        (f"{LONG}/{LONG}/s", ValueError, r"too long by \d+ bytes for SQLite"),
        ("y" * 256, ValueError, "a name that is too long"),
        ("\udcff", ValueError, "not UTF-8: name another"),
        ("file/s", StoreNotFoundError, "no folder can be at .*file/s: Not a directory"),
        ("loop", StoreNotFoundError, "no folder can be at .*loop: Too many levels"),
        ("loop/s", StoreNotFoundError, "no folder can be at .*loop/s: Too many levels"),
    ],
)
def test_a_path_that_no_store_can_have(
    tmp_path: Path, name: str, error: type[Exception], text: str
) -> None:
    """It is refused before anything is made."""
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for create in (True, True, False):
        with pytest.raises(error, match=text) as caught:
            Store.open(tmp_path / name, create=create)
        assert type(caught.value) is error
    assert sorted(os.listdir(tmp_path)) == ["file", "loop"]


def test_a_relative_path_in_a_folder_that_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    (tmp_path / "cwd").rmdir()
    with pytest.raises(StoreNotFoundError, match="s leads nowhere: the working directory"):
        Store.open("s")
    Store.open(tmp_path / "s").close()


def test_the_longest_path(tmp_path: Path) -> None:
    longest = 494 - len(str(tmp_path)) - len(f"/{'x' * 200}/")
    place = tmp_path / ("x" * 200) / ("y" * longest)
    Store.open(place, schema_sql="CREATE TABLE t (id INTEGER)").close()
    with pytest.raises(ValueError, match="too long by 1 bytes"):
        Store.open(place.with_name("y" * (longest + 1)))


def test_a_store_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may write the files, as by the group, was refused: their modes were set anew."""
    Store.open(tmp_path / "s", schema_sql=SCHEMA).close()
    lock = tmp_path / "s" / "runtime" / "opening.lock"
    lock.chmod(0o660)

    def refuse(*_: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))  # it names no path

    monkeypatch.setattr(os, "fchmod", refuse)
    with Store.open(tmp_path / "s") as store, store.status.write() as cursor:
        cursor.execute("INSERT INTO t VALUES (1, 0)")
    assert stat.S_IMODE(lock.stat().st_mode) == 0o660
    lock.unlink()
    with pytest.raises(
        NotSupportedError, match=r"user \d+ cannot open store .*/s: .*/opening.lock'. .*as the user"
    ):
        Store.open(tmp_path / "s")
