"""The tool itself: that the record is complete, and that it finds what was planted.

The planted writers are right in all but one sync. If the tool did not lose their data, it would
prove nothing that it loses none of a store's.
"""

from __future__ import annotations

import filecmp
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import lmdb
import pytest

from tools.powerloss.disk import MODELS, Disk, Model
from tools.powerloss.log import DURABLE, Kind, Log, Operation
from tools.powerloss.recording import Recording, RunFailedError
from tools.powerloss.states import PAGE, SECTOR, States

SEEDS = range(8)

Recordings = Callable[[str], Recording]
Look = Callable[[Path, int], bool]
"""A check whether so many acknowledged steps are in a folder."""


def loses(recording: Recording, log: Log, look: Look, model: Model, scratch: Path) -> bool:
    """Tell whether any state of a log lacks what was acknowledged before its cut."""
    states = States(Disk(log, str(recording.root)), is_volatile)
    marks = [position for position, _ in log.marks()]
    for cut in log.boundaries():
        done = sum(position < cut for position in marks)
        for seed in SEEDS:
            folder = scratch / f"{cut}-{seed}-{model}"
            states.write(folder, cut, seed, model)
            sound = look(folder, done)
            shutil.rmtree(folder)
            if not sound:
                return True
    return False


def is_volatile(path: str) -> bool:
    return path.endswith(("-shm", "lock.mdb"))


# -- the record ------------------------------------------------------------------------

EVERY_CALL = """
import fcntl, shutil, subprocess, threading
def sync_all():
    for folder, _, names in os.walk(root):
        for name in [".", *names]:
            fd = os.open(os.path.join(folder, name), os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
(root / "a/b").mkdir(parents=True)
(root / "text").write_text("some text" * 1000)
with open(root / "text", "ab") as file:
    file.write(b"appended" * 500)
fd = os.open(root / "a/b/data", os.O_RDWR | os.O_CREAT, 0o600)
os.write(fd, b"x" * 10_000)
os.pwrite(fd, b"in the middle", 4090)
os.writev(fd, [b"one", b"two" * 3000])
os.pwritev(fd, [b"three", b"four"], 20_001)
os.fdatasync(os.dup(fd))
os.ftruncate(fd, 15_000)
os.posix_fallocate(fd, 0, 30_000)
os.lseek(fd, 100, os.SEEK_SET)
os.write(fd, b"at 100")
again = os.open("b/data", os.O_WRONLY | os.O_DSYNC, dir_fd=os.open(root / "a", os.O_RDONLY))
os.pwrite(again, b"durable", 29_998)
mark("half")
os.rename(root / "a/b", root / "moved")
os.pwrite(fd, b"after the move", 12_345)
os.truncate(root / "text", 5_000)
shutil.copyfile(root / "text", root / "copy")
os.link(root / "copy", root / "second name")
(root / "copy").write_text("cut and written anew")
os.replace(root / "text", root / "a/text")
(root / "gone").mkdir()
(root / "gone/file").touch()
shutil.rmtree(root / "gone")
def write(number):
    with open(root / f"thread {number}", "wb", buffering=0) as file:
        for i in range(50):
            file.write(bytes([number]) * 100 * i)
threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
program = "import os, sys; open(sys.argv[1], 'w').write('by a child'); os.mkdir(sys.argv[2])"
subprocess.run([sys.executable, "-c", program, root / "child", root / "folder"], check=True)
if os.fork() == 0:
    (root / "forked").write_text("by a fork")
    os._exit(0)
os.wait()
if args:
    sync_all()
"""


def same(one: Path, other: Path) -> bool:
    """Tell whether two folders hold the same, byte for byte."""
    found = filecmp.dircmp(one, other)
    names = sorted(entry.name for entry in one.iterdir())
    if names != sorted(entry.name for entry in other.iterdir()):
        return False
    files = [name for name in names if (one / name).is_file()]
    if filecmp.cmpfiles(one, other, files, shallow=False)[0] != files:
        return False
    return all(same(one / name, other / name) for name in found.common_dirs)


def test_record_is_complete(new_recording: Recordings, tmp_path: Path) -> None:
    recording = new_recording("run")
    log = recording.run(EVERY_CALL)
    states = States(Disk(log, str(recording.root)))
    states.write(tmp_path / "all", log.length, 0, "strict", "most")
    assert sorted(each.name for each in (tmp_path / "all").iterdir()) == [
        "a", "child", "copy", "folder", "forked", "moved", "second name",
        "thread 0", "thread 1", "thread 2", "thread 3",
    ]  # fmt: skip
    assert same(tmp_path / "all", recording.root)


@pytest.mark.parametrize("model", MODELS)
def test_what_was_synced_is_there_in_every_state(
    model: Model, new_recording: Recordings, tmp_path: Path
) -> None:
    recording = new_recording("run")
    log = recording.run(EVERY_CALL, "sync")
    states = States(Disk(log, str(recording.root)))
    for seed in SEEDS:
        states.write(tmp_path / f"{seed}", log.length, seed, model)
        assert same(tmp_path / f"{seed}", recording.root)


def test_nothing_synced_may_leave_nothing(new_recording: Recordings, tmp_path: Path) -> None:
    recording = new_recording("run")
    log = recording.run("(root / 'a').mkdir(); (root / 'a/b').write_text('c')")
    states = States(Disk(log, str(recording.root)))
    seen = set()
    for seed in range(100):
        states.write(tmp_path / f"{seed}", log.length, seed, "strict")
        file = tmp_path / f"{seed}/a/b"
        seen.add(file.read_text() if file.exists() else file.parent.exists())
    assert seen == {False, True, "", "\0", "c"}  # no folder, no file, three contents


def test_a_state_follows_from_its_seed(new_recording: Recordings, tmp_path: Path) -> None:
    recording = new_recording("run")
    log = recording.run(EVERY_CALL)
    for name in ("one", "other"):
        for cut in (log.length, log.length // 2):
            States(Disk(log, str(recording.root))).write(
                tmp_path / f"{name} {cut}", cut, 7, "strict"
            )
    for cut in (log.length, log.length // 2):
        assert same(tmp_path / f"one {cut}", tmp_path / f"other {cut}")
    assert not same(tmp_path / f"one {log.length}", tmp_path / f"one {log.length // 2}")


def test_pages_are_torn_and_sectors_are_not(new_recording: Recordings, tmp_path: Path) -> None:
    recording = new_recording("run")
    log = recording.run(
        """
        fd = os.open(root / "pages", os.O_RDWR | os.O_CREAT)
        os.write(fd, b"a" * 4 * 4096)
        os.fsync(fd)
        os.fsync(os.open(root, os.O_RDONLY))
        os.pwrite(fd, b"b" * 4 * 4096, 0)
        """
    )
    states = States(Disk(log, str(recording.root)))
    torn = out_of_order = False
    for seed in range(60):
        states.write(tmp_path / f"{seed}", log.length, seed, "strict")
        content = (tmp_path / f"{seed}/pages").read_bytes()
        assert len(content) == 4 * PAGE
        for at in range(0, len(content), SECTOR):
            assert content[at : at + SECTOR] in (b"a" * SECTOR, b"b" * SECTOR)
        torn |= any(len({*content[at : at + PAGE]}) > 1 for at in range(0, len(content), PAGE))
        out_of_order |= b"ab" in content
    assert torn
    assert out_of_order


def test_a_write_never_overtakes_one_to_the_same_sector(
    new_recording: Recordings, tmp_path: Path
) -> None:
    recording = new_recording("run")
    log = recording.run(
        """
        fd = os.open(root / "file", os.O_RDWR | os.O_CREAT)
        for i in range(30):
            os.write(fd, b"0123456789")
        os.fsync(os.open(root, os.O_RDONLY))
        """
    )
    states = States(Disk(log, str(recording.root)))
    for seed in range(60):
        states.write(tmp_path / f"{seed}", log.length, seed, "strict")
        content = (tmp_path / f"{seed}/file").read_bytes()
        assert (b"0123456789" * 30).startswith(content.rstrip(b"\0"))


def test_writing_through_a_map_is_refused(new_recording: Recordings, tmp_path: Path) -> None:
    recording = new_recording("run")
    log = recording.run(
        """
        import mmap
        with open(root / "file", "w+b") as file:
            file.truncate(4096)
            mmap.mmap(file.fileno(), 4096)[0] = 1
        """
    )
    disk = Disk(log, str(recording.root))
    with pytest.raises(ValueError, match="file was mapped"):
        States(disk).write(tmp_path / "refused", log.length, 0, "strict", "most")
    void = States(disk, lambda path: path == "file")
    void.write(tmp_path / "left out", log.length, 0, "strict", "most")
    assert not (tmp_path / "left out/file").exists()


def test_failed_run_is_told(new_recording: Recordings) -> None:
    with pytest.raises(RunFailedError, match="no such thing"):
        new_recording("run").run("raise SystemExit('no such thing')")


# -- planted faults --------------------------------------------------------------------

APPEND = """
def sync_folder():
    fd = os.open(root, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
fd = os.open(root / "lines", os.O_RDWR | os.O_CREAT | {flags})
if {names}:
    sync_folder()
for n in range(12):
    os.write(fd, f"{{n:1000d}}\\n".encode())
    if {content}:
        os.fdatasync(fd)
    mark(str(n))
"""


def lines(folder: Path, done: int) -> bool:
    file = folder / "lines"
    found = file.read_text(errors="replace").splitlines() if file.exists() else []
    return found[:done] == [f"{n:1000d}" for n in range(done)]


@pytest.mark.parametrize(
    ("content", "names", "flags", "lost"),
    [
        (True, True, "0", ()),
        (False, True, "os.O_DSYNC", ()),
        (False, True, "0", MODELS),
        (True, False, "0", ("strict",)),
    ],
    ids=["right", "durable writes", "told before the sync", "folder not synced"],
)
def test_appending(
    content: bool,
    names: bool,
    flags: str,
    lost: tuple[Model, ...],
    new_recording: Recordings,
    tmp_path: Path,
) -> None:
    recording = new_recording("run")
    log = recording.run(APPEND.format(content=content, names=names, flags=flags))
    for model in MODELS:
        assert loses(recording, log, lines, model, tmp_path) == (model in lost), model


REPLACE = """
def sync(path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
for n in range(8):
    (root / "new").write_text(f"{{n:5000d}}")
    if {content}:
        sync(root / "new")
    os.rename(root / "new", root / "value")
    if {names}:
        sync(root)
    mark(str(n))
"""


def value(folder: Path, done: int) -> bool:
    file = folder / "value"
    if not file.exists():
        return done == 0
    return file.read_text(errors="replace") in (f"{done - 1:5000d}", f"{done:5000d}")


@pytest.mark.parametrize(
    ("content", "names", "lost"),
    [(True, True, ()), (False, True, MODELS), (True, False, MODELS)],
    ids=["right", "renamed before the sync", "folder not synced"],
)
def test_replacing(
    content: bool,
    names: bool,
    lost: tuple[Model, ...],
    new_recording: Recordings,
    tmp_path: Path,
) -> None:
    recording = new_recording("run")
    log = recording.run(REPLACE.format(content=content, names=names))
    for model in MODELS:
        assert loses(recording, log, value, model, tmp_path) == (model in lost), model


SQLITE = """
import apsw
db = apsw.Connection(str(root / "db"))
db.pragma("journal_mode", "wal")
db.pragma("synchronous", args[0])
db.pragma("wal_autocheckpoint", 5)
db.execute("CREATE TABLE t (n, filler)")
for n in range(6):
    db.execute("INSERT INTO t VALUES (?, zeroblob(3000))", (n,))
    mark(str(n))
"""


def rows(folder: Path, done: int) -> bool:
    if done == 0:
        return True
    try:
        with apsw.Connection(str(folder / "db")) as db:
            found = [n for (n,) in db.execute("SELECT n FROM t ORDER BY n")]
            sound = db.pragma("integrity_check") == "ok"
        db.close()
    except apsw.Error:
        return False
    return sound and found in (list(range(done)), list(range(done + 1)))


@pytest.mark.parametrize(("synchronous", "lost"), [("full", False), ("normal", True)])
def test_sqlite(synchronous: str, lost: bool, new_recording: Recordings, tmp_path: Path) -> None:
    recording = new_recording("run")
    log = recording.run(SQLITE, synchronous)
    assert loses(recording, log, rows, "ordered", tmp_path) == lost


LMDB = """
import lmdb
env = lmdb.open(str(root / "env"), map_size=1 << 20, sync=args[0] == "sync")
for n in range(8):
    with env.begin(write=True) as txn:
        txn.put(b"%d" % n, bytes(2000))
    mark(str(n))
"""


def entries(folder: Path, done: int) -> bool:
    if done == 0:
        return True
    try:
        with (
            lmdb.open(str(folder / "env"), map_size=1 << 20, create=False) as env,
            env.begin() as txn,
        ):
            found = {int(key) for key, _ in txn.cursor()}
    except lmdb.Error:
        return False
    return found in ({*range(done)}, {*range(done + 1)})


@pytest.mark.parametrize(("sync", "lost"), [("sync", False), ("no sync", True)])
def test_lmdb(sync: str, lost: bool, new_recording: Recordings, tmp_path: Path) -> None:
    recording = new_recording("run")
    log = recording.run(LMDB, sync)
    assert loses(recording, log, entries, "ordered", tmp_path) == lost


def test_a_file_that_is_opened_before_its_rename_has_told_of_its_end(tmp_path: Path) -> None:
    """On a busy machine: its first half was lost in every state, as if another file was there."""

    def op(kind: Kind, begin: int, end: int, path: str = "", **more: Any) -> Operation:
        given = {"flags": 0, "inode": 7, "offset": 0, "data": b"", "other": "", **more}
        return Operation(kind=kind, begin=begin, end=end, path=path, **given)

    log = Log(
        [
            op(Kind.OPEN, 0, 1, "/root/new"),
            op(Kind.WRITE, 2, 3, data=b"one", flags=DURABLE),
            op(Kind.RENAME, 4, 11, "/root/new", other="/root/data"),
            op(Kind.OPEN, 5, 6, "/root/data"),
            op(Kind.WRITE, 7, 8, data=b"two", offset=3, flags=DURABLE),
            op(Kind.SYNC, 12, 13, "/root"),
        ],
        14,
    )
    for model in MODELS:
        States(Disk(log, "/root"), is_volatile).write(tmp_path / model, 14, 0, model)
        assert (tmp_path / model / "data").read_bytes() == b"onetwo"
        assert not (tmp_path / model / "new").exists()
