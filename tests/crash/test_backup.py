"""Backups that break off: killed at each step, a full disk, damage. A whole one or none."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import lmdb
import pyarrow as pa
import pytest

import txnkv
from tests import internals
from tests.property.machine_tools import in_child
from tools.children import Children
from txnkv.storage import arm, backup_files, disarm

BACKUP_POINTS = (
    "backup.status",
    "backup.marked",
    "backup.file",
    "backup.logs",
    "backup.listed",
    "backup.renamed",
)
RESTORE_POINTS = (
    "restore.part",
    "restore.filled",
    "restore.opened",
    "restore.renamed",
    "lmdb.before_commit",
    "status.before_commit",
    "directory.before_format",
)


def make(path: Path) -> None:
    """A store with something of everything, and a transaction that its process left open."""
    with txnkv.connect(path) as client:
        schema = txnkv.Schema({"id": "int64", "n": "int64"}, primary_key=["id"])
        table = client.create_table("t", schema, partition_by=txnkv.hash_partition("id", 2))
        topics = [client.create_topic("marker"), client.create_topic("sidecar", buffer="sidecar")]
        with client.transaction() as txn:
            txn.write(table, pa.table({"id": range(100), "n": range(100)}))
            for topic in topics:
                txn.send(topic, b"large")
            txn.serialize()
            txn.flush()
        internals.flush(client)
        with client.transaction() as txn:
            txn.delete(table, 1)
            txn.upsert(table, {"id": 2, "n": 0})
            for topic in topics:
                txn.send(topic, b"small")
        txn = client.new_transaction(timeout=None)
        txn.upsert(table, {"id": 3, "n": -1})
        txn.send("marker", b"open")
        txn.serialize()
        txn.flush()
        txn.close()


def require_whole(path: Path) -> None:
    with txnkv.connect(path, create=False) as client:
        assert client.check().problems == []
        table = client.table("t")
        assert table.count() == 99
        assert [table.get(id) for id in (1, 2, 3)] == [
            None,
            {"id": 2, "n": 0},
            {"id": 3, "n": 3},
        ]
        for name in ("marker", "sidecar"):
            found = client.topic(name).consumer().poll(timeout=0.1)
            assert [message.value for message in found] == [b"large", b"small"]


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    make(tmp_path / "shop")
    return tmp_path / "shop"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("point", BACKUP_POINTS)
def test_a_backup_that_is_killed_is_none_and_the_one_before_stays(
    point: str, shop: Path, tmp_path: Path
) -> None:
    with txnkv.connect(shop) as client:
        client.backup(tmp_path / "first")

    def work(say: Callable[[object], object]) -> None:
        with txnkv.connect(shop) as client:
            client.backup(tmp_path / "second", base=tmp_path / "first")
        say("done")

    deaths = 0
    for hit in range(1, 4):
        if in_child(work, point, hit):
            break
        deaths += 1
        assert (tmp_path / "second").exists() == (point == "backup.renamed")
        if point == "backup.renamed":
            break
    assert deaths
    with txnkv.connect(shop) as client:
        client.backup(tmp_path / "third", base=tmp_path / "first")
        if not (tmp_path / "second").exists():
            client.backup(tmp_path / "second")  # what the dead one left is in nobody's way
        assert client.check().problems == []
    for name in ("first", "second", "third"):
        txnkv.restore(tmp_path / name, tmp_path / f"of {name}")
        require_whole(tmp_path / f"of {name}")
    assert not [name for name in names(tmp_path) if name.endswith(".unfinished")]


def test_what_a_dead_one_left_and_cannot_be_removed(
    shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was tried again without end."""
    aside, unlink, tries = tmp_path / ".made.unfinished", os.unlink, []

    def refuse(path: str | Path, **where: int) -> None:
        if Path(path).name == "left":
            tries.append(path)
            assert len(tries) < 9
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), "left")
        unlink(path, **where)

    with txnkv.connect(shop) as client:
        client.backup(tmp_path / "backup")
    aside.mkdir()
    (aside / "left").touch()
    monkeypatch.setattr(os, "unlink", refuse)
    there = os.listdir("/dev/fd")
    with pytest.raises(txnkv.UnavailableError, match=r"\.made\.unfinished, left .* Remove it, or"):
        txnkv.restore(tmp_path / "backup", tmp_path / "made")
    assert os.listdir("/dev/fd") == there
    assert names(tmp_path) == [".made.unfinished", "backup", "shop"]
    monkeypatch.undo()
    txnkv.restore(tmp_path / "backup", tmp_path / "made")
    require_whole(tmp_path / "made")


@pytest.mark.parametrize("point", RESTORE_POINTS)
def test_a_restore_that_is_killed_leaves_no_store(point: str, shop: Path, tmp_path: Path) -> None:
    with txnkv.connect(shop) as client:
        client.backup(tmp_path / "backup")
    made = tmp_path / "made"

    def work(say: Callable[[object], object]) -> None:
        txnkv.restore(tmp_path / "backup", made)
        say("done")

    deaths = 0
    for hit in (1, 2, 5, 9):
        if in_child(work, point, hit) or made.exists():
            break
        deaths += 1
    assert deaths or point == "restore.renamed"
    if not made.exists():
        txnkv.restore(tmp_path / "backup", made)
    require_whole(made)
    assert names(tmp_path) == ["backup", "made", "shop"]


@pytest.mark.parametrize("point", [*BACKUP_POINTS[:-1], *RESTORE_POINTS[:3]])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_after_an_error_of_the_disk_nothing_is_left(
    point: str, number: int, shop: Path, tmp_path: Path
) -> None:
    def fail() -> None:
        raise OSError(number, os.strerror(number))

    wanted = txnkv.StorageFullError if number == errno.ENOSPC else txnkv.UnavailableError
    with txnkv.connect(shop) as client:
        make: Callable[[], object] = partial(client.backup, tmp_path / "backup")
        if point in RESTORE_POINTS:
            make()
            make = partial(txnkv.restore, tmp_path / "backup", tmp_path / "made")
        before = names(tmp_path)
        arm(point, fail)
        try:
            with pytest.raises(wanted) as caught:
                make()
        finally:
            disarm()
        assert str(tmp_path) in str(caught.value)
        assert names(tmp_path) == before
        with client.transaction() as txn:  # nothing is held any more
            txn.send("marker", b"after")
        internals.maintenance(client).round()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_after_its_last_sync_failed_nothing_is_left(
    number: int, shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it was there under its name, and the error said that nothing was."""
    left = [1]

    def fail(folder: Path) -> None:
        if folder == tmp_path and left:
            left.pop()
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(backup_files, "sync_directory", fail)
    with txnkv.connect(shop) as client:
        with pytest.raises((txnkv.StorageFullError, txnkv.UnavailableError)):
            client.backup(tmp_path / "backup")
        assert names(tmp_path) == ["shop"]
        client.backup(tmp_path / "backup")
    left.append(1)
    with pytest.raises((txnkv.StorageFullError, txnkv.UnavailableError)):
        txnkv.restore(tmp_path / "backup", tmp_path / "made")
    assert names(tmp_path) == ["backup", "shop"]


def test_each_damaged_file_is_named(shop: Path, tmp_path: Path) -> None:
    with txnkv.connect(shop) as client:
        client.backup(tmp_path / "backup")
    files = sorted(path for path in (tmp_path / "backup").rglob("*") if path.is_file())
    listed = json.loads((tmp_path / "backup" / "BACKUP").read_bytes().splitlines()[0])["files"]
    assert len(files) == len(listed) + 1 > 6
    for file in files:
        whole = file.read_bytes()
        flipped = bytearray(whole)
        for at in range(len(whole) // 2, len(whole) // 2 + 1 if whole else 0):
            flipped[at] ^= 1
        for damaged in {bytes(flipped), whole[:-1], whole + b"x", None} - {whole}:
            if damaged is None:
                file.unlink()
            else:
                file.write_bytes(damaged)
            if damaged is None and file.name == "BACKUP":
                kind: type[Exception] = txnkv.IncompatibleStoreError
            else:
                kind = txnkv.CorruptionError
            with pytest.raises(kind, match=file.name):
                txnkv.restore(tmp_path / "backup", tmp_path / "made")
            assert names(tmp_path) == ["backup", "shop"]
            file.write_bytes(whole)
    txnkv.restore(tmp_path / "backup", tmp_path / "made")
    require_whole(tmp_path / "made")


@pytest.mark.parametrize(
    ("part", "database", "label"),
    [("tablets/1", b"blocks", "table 't'"), ("logs/1", b"log", "topic 'marker'")],
)
def test_a_damaged_store_gives_no_backup(
    part: str, database: bytes, label: str, shop: Path, tmp_path: Path
) -> None:
    with lmdb.open(str(shop / part), max_dbs=16) as env, env.begin(write=True) as txn:
        cursor = txn.cursor(env.open_db(database, txn, create=False))
        assert cursor.first()
        value = bytearray(cursor.value())
        value[-9] ^= 1
        cursor.put(cursor.key(), bytes(value))
    with txnkv.connect(shop) as client:
        with pytest.raises(txnkv.CorruptionError, match=label):
            client.backup(tmp_path / "backup")
        assert names(tmp_path) == ["shop"]


WRITER = """
client = txnkv.connect(args[0])
say("ready")
number = int(args[1])
while True:
    number += 1
    with client.transaction() as txn:
        if number % 3 == 0:
            txn.write("t", pa.table({"id": [number], "n": [number]}))
            txn.serialize()
        else:
            txn.upsert("t", {"id": number, "n": number})
        txn.send("marker", str(number))
        txn.send("sidecar", str(number))
        if number % 3 == 0:
            txn.flush()
"""


def test_backups_while_processes_are_killed(tmp_path: Path, children: Children) -> None:
    with txnkv.connect(tmp_path / "shop") as client:
        schema = txnkv.Schema({"id": "int64", "n": "int64"}, primary_key=["id"])
        table = client.create_table("t", schema)
        client.create_topic("marker")
        client.create_topic("sidecar", buffer="sidecar")
        taken = []
        for number in range(3):
            writers = [
                children.start(WRITER, str(tmp_path / "shop"), str((2 * number + n) * 1_000_000))
                for n in range(2)
            ]
            for writer in writers:
                assert writer.line() == "ready"
            time.sleep(0.3)
            writers[0].kill()
            taken.append(client.backup(tmp_path / f"backup {number}"))
            writers[1].kill()
        assert client.check().problems == []
        for each in taken:
            made = txnkv.restore(each.path, each.path + " restored")
            with txnkv.connect(made.path) as restored:
                assert restored.check().problems == []
                wanted = client.snapshot(each.timestamp).scan(table).to_arrow().sort_by("id")
                found = restored.table("t").scan().to_arrow().sort_by("id")
                assert found.equals(wanted)
                ids = [str(id).encode() for id in found.column("id").to_pylist()]
                for name in ("marker", "sidecar"):
                    consumer, values = restored.topic(name).consumer(), []
                    while messages := consumer.poll(max_messages=1000, timeout=0.05):
                        values += [message.value for message in messages]
                    assert sorted(values) == sorted(ids)
