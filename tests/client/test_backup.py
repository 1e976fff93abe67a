"""Backups: what is in them, who goes on meanwhile, what a restored store is taken for."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import fs

import txnkv
from tests import internals
from txnkv import aio
from txnkv.storage import arm, backup_files, clock, disarm

SCHEMA = txnkv.Schema({"id": "int64", "n": "int64"}, primary_key=["id"])


@pytest.fixture
def shop(tmp_path: Path):
    with txnkv.connect(tmp_path / "shop") as client:
        client.create_table("t", SCHEMA)
        client.create_topic("e")
        yield client
        disarm()
        assert client.check().problems == []


def values(topic: txnkv.Topic) -> list[bytes]:
    found: list[bytes] = []
    consumer = topic.consumer()
    while messages := consumer.poll(max_messages=1000, timeout=0.05):
        found += [message.value for message in messages]
    return found


def elsewhere(work: Callable[[], object]) -> Callable[[], None]:
    """The work on a thread of its own: that of a backup has its locks."""

    def run() -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(work).result()

    return run


def test_an_empty_store(tmp_path: Path) -> None:
    with txnkv.connect(tmp_path / "shop") as client:
        report = client.backup(tmp_path / "b")
    assert report.files == 1
    txnkv.restore(tmp_path / "b", tmp_path / "made")
    with txnkv.connect(tmp_path / "made", create=False) as made:
        assert (made.tables(), made.topics(), made.check().problems) == ([], [], [])


def test_what_comes_after_the_copy_of_status_db_is_not_in_it(shop, tmp_path: Path) -> None:
    """Each kind of change, between the copies of status.db and of logs and tablets."""
    table, topic = shop.table("t"), shop.topic("e")
    side = shop.create_topic("side", buffer="sidecar")
    sides = shop.new_transaction(timeout=None)
    for each in (topic, side):
        shop.new_transaction().rollback()
        sides.send(each, b"open")
    sides.serialize()
    sides.flush()
    with shop.transaction() as txn:
        txn.write(table, pa.table({"id": range(10), "n": range(10)}))
        txn.send(topic, b"before")
        txn.send(side, b"before")
    shop.topic("e").subscribe("s").close()

    def change() -> None:
        disarm()
        with shop.transaction() as txn:
            txn.delete_ignore(table, 1)
            txn.upsert(table, {"id": 2, "n": -2})
            txn.send(topic, b"later")
        with shop.transaction() as txn:
            txn.write(table, pa.table({"id": [3, 11], "n": [-3, 11]}), op="upsert")
            txn.delete_ignore(table, 4)
            txn.send(topic, b"later")
            txn.send(side, b"later")
            txn.serialize()
            txn.flush()
        sides.commit()
        with topic.subscribe("s") as subscription:
            subscription.ack(subscription.receive(timeout=1))
        shop.new_session().send(topic, b"later")
        internals.flush(shop)
        shop.compact()
        internals.maintenance(shop).round()
        shop.drop_table("t")
        shop.create_table("t", SCHEMA)
        shop.create_topic("new", exists_ok=True)

    for point in ("backup.status", "backup.logs"):
        arm(point, elsewhere(change))
        shop.backup(tmp_path / point)
        txnkv.restore(tmp_path / point, tmp_path / f"of {point}")
        with txnkv.connect(tmp_path / f"of {point}", create=False) as made:
            assert made.check().problems == []
            if point == "backup.logs":
                continue  # of what the first left: that it is sound
            assert made.table("t").scan(ordered=True).to_arrow().to_pylist() == [
                {"id": id, "n": id} for id in range(10)
            ]
            assert made.topics() == ["e", "side"]
            assert values(made.topic("e")) == values(made.topic("side")) == [b"before"]
            with made.topic("e").subscribe("s") as subscription:
                assert subscription.receive(timeout=1).value == b"before"
        table, topic = shop.table("t"), shop.topic("e")
        sides = shop.new_transaction()
        sides.send(topic, b"open")


def test_retention_waits_for_the_logs_and_goes_on_then(tmp_path: Path) -> None:
    with txnkv.connect(tmp_path / "shop") as client:
        topic = client.create_topic("e", retention_seconds=0.0)
        with client.transaction() as txn:
            txn.send(topic, b"old")
        internals.flush(client)

        def sweep() -> None:
            internals.topics(client)._enforced = None
            internals.maintenance(client).round()

        arm("backup.status", elsewhere(sweep))
        client.backup(tmp_path / "b")
        assert values(topic) == [b"old"]
        disarm()
        sweep()
        assert values(topic) == []
    txnkv.restore(tmp_path / "b", tmp_path / "made")
    with txnkv.connect(tmp_path / "made", create=False, read_only=True) as made:
        assert values(made.topic("e")) == [b"old"]


def test_a_restored_store_is_another_one(shop, tmp_path: Path) -> None:
    with shop.transaction() as done:
        done.insert("t", {"id": 1, "n": 1})
        done.serialize()
    left = shop.new_transaction()
    token = left.serialize()
    shop.backup(tmp_path / "b")
    ids = {internals.store(shop).store_id}
    for name in ("one", "two"):
        report = txnkv.restore(tmp_path / "b", tmp_path / name)
        ids.add(report.store_id)
        with txnkv.connect(tmp_path / name, create=False) as made:
            assert internals.store(made).store_id == report.store_id
            with pytest.raises(txnkv.InvalidTokenError):
                txnkv.Transaction.deserialize(made, token)
            with pytest.raises(txnkv.TxnNotFoundError):
                made.transaction_state(done.id)
            states = [info.state for info in made.transactions()]
            assert sorted(states) == [txnkv.TxnState.ABORTED, txnkv.TxnState.COMMITTED]
            with made.new_transaction() as txn:
                assert txn.id.tcid != done.id.tcid
                assert txn.id.local > done.id.local
    assert len(ids) == 3
    left.rollback()


def test_producers_and_applications_go_on(shop, tmp_path: Path) -> None:
    with shop.topic("e").producer("billing") as producer:
        producer.send(b"1").result()
    with shop.transaction() as txn:
        txn.mark_applied("daily", 7)
    shop.backup(tmp_path / "b")
    txnkv.restore(tmp_path / "b", tmp_path / "made")
    with txnkv.connect(tmp_path / "made", create=False) as made:
        assert made.applied("daily").version == 7
        with made.topic("e").producer("billing") as producer:
            producer.send(b"2").result()
        assert values(made.topic("e")) == [b"1", b"2"]
        assert made.check().problems == []


def test_an_incremental_one_links_what_is_there(shop, tmp_path: Path) -> None:
    table = shop.table("t")
    with shop.transaction() as txn:
        rows = range(20_000)
        txn.write(
            table, pa.table({"id": rows, "n": [i * 0x9E3779B97F4A7C15 % 2**62 for i in rows]})
        )
    first = shop.backup(tmp_path / "b" / "1")
    with shop.transaction() as txn:
        txn.upsert(table, {"id": 0, "n": -1})
    internals.flush(shop)
    second = shop.backup(tmp_path / "b" / "2", base=tmp_path / "b" / "1")
    assert first.linked == 0
    assert second.linked > 100_000
    linked = [path for path in (tmp_path / "b/2").rglob("*") if path.stat().st_nlink > 1]
    assert any(path.parent.parent.name == "tablets" for path in linked if path.is_file())
    for path in (tmp_path / "b/1").rglob("*"):  # one is gone, the other whole
        if path.is_file():
            path.unlink()
    txnkv.restore(tmp_path / "b" / "2", tmp_path / "made")
    with txnkv.connect(tmp_path / "made", create=False) as made:
        assert made.table("t").get(0) == {"id": 0, "n": -1}
        assert made.table("t").count() == 20_000
        assert made.check().problems == []
        with pytest.raises(ValueError, match="another store"):
            made.backup(tmp_path / "b" / "3", base=tmp_path / "b" / "2")


@pytest.mark.parametrize("distant", [False, True])
def test_a_base_is_of_what_the_store_comes_from(tmp_path: Path, distant: bool) -> None:
    """Two copies of a store give the same numbers to other rows, at the same time as it may be."""
    filesystem = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()) if distant else None

    def place(name: str) -> str:
        return f"backups/{name}" if distant else str(tmp_path / "backups" / name)

    def go_on(store: Path, n: int) -> txnkv.Client:
        client = txnkv.connect(store)
        with client.transaction() as txn:
            txn.write("t", pa.table({"id": range(1, 6), "n": [n] * 5}), op="upsert")
        client.compact()
        return client

    with txnkv.connect(tmp_path / "a") as client:
        client.create_table("t", SCHEMA).insert({"id": 0, "n": 0})
        client.compact()
        client.backup(place("common"), filesystem=filesystem)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    now = clock.now_micros()
    for name, other in (("a", "b"), ("b", "a")):
        with clock.replaced(wall=lambda: now), go_on(tmp_path / name, ord(name)) as client:
            client.backup(place(name), base=place("common"), filesystem=filesystem)
            if name == "b":
                with pytest.raises(ValueError, match=f"{other}' has the id of this store, which"):
                    client.backup(place("none"), base=place(other), filesystem=filesystem)
                assert not (tmp_path / "backups" / "none").exists()
            again = client.backup(place(f"{name}2"), base=place(name), filesystem=filesystem)
            assert again.linked
        txnkv.restore(place(f"{name}2"), tmp_path / f"of {name}", filesystem=filesystem)
        with txnkv.connect(tmp_path / f"of {name}") as made:
            assert made.table("t").get(3) == {"id": 3, "n": ord(name)}
            assert made.check().problems == []


def test_a_store_on_a_full_disk_gives_a_backup_that_is_no_base(shop, tmp_path: Path) -> None:
    def full() -> None:
        raise txnkv.StorageFullError("no room")

    arm("status.before_commit", full)
    shop.backup(tmp_path / "1")
    disarm()
    with pytest.raises(ValueError, match="while its disk was full"):
        shop.backup(tmp_path / "2", base=tmp_path / "1")
    txnkv.restore(tmp_path / "1", tmp_path / "made")


def test_a_backup_that_an_older_txnkv_took_is_no_base(shop, tmp_path: Path) -> None:
    """It noted none; the error named other causes alone."""
    shop.backup(tmp_path / "1")
    with internals.status(shop).write() as cur:
        cur.execute("DROP TABLE backups")
    with pytest.raises(ValueError, match="or by an older txnkv"):
        shop.backup(tmp_path / "2", base=tmp_path / "1")
    shop.backup(tmp_path / "2", base=None)
    shop.backup(tmp_path / "3", base=tmp_path / "2")


def test_a_compaction_that_left_rows_of_one_commit_alone(tmp_path: Path) -> None:
    client = txnkv.connect(tmp_path / "store")
    schema = txnkv.Schema({"k": "int64", "v": "int64"}, primary_key=["k"])
    table = client.create_table("t", schema)
    table.insert({"k": 1, "v": 1})
    client.compact()
    with client.transaction() as txn:  # of row 2, nothing is left that anybody may see
        txn.serialize()
        txn.insert(table, {"k": 2, "v": 1})
        txn.flush()
        txn.update(table, {"k": 2, "v": 2})
        txn.flush()
        txn.delete(table, 2)
    client.compact()
    client.backup(tmp_path / "one")
    table.insert({"k": 3, "v": 3})
    client.backup(tmp_path / "two", base=tmp_path / "one")
    for place, keys in (("one", [1]), ("two", [1, 3])):
        txnkv.restore(tmp_path / place, tmp_path / f"from {place}")
        with txnkv.connect(tmp_path / f"from {place}") as restored:
            assert restored.check().ok
            restored.compact()
            assert restored.table("t").scan(ordered=True).to_arrow()["k"].to_pylist() == keys
            restored.backup(tmp_path / f"of {place}")


def test_a_time_chooses_among_backups(shop, tmp_path: Path) -> None:
    taken = []
    for n in range(3):
        with shop.transaction() as txn:
            txn.upsert("t", {"id": 1, "n": n})
        taken.append(shop.backup(tmp_path / "all" / str(n)))
    early = taken[0].timestamp.datetime
    for at, n in ((None, 2), (taken[1].timestamp, 1), (early + timedelta(microseconds=1), 0)):
        made = txnkv.restore(tmp_path / "all", tmp_path / f"made {at}", at=at)
        assert made.backup == taken[n].path
        with txnkv.connect(made.path, create=False) as client:
            assert client.table("t").get(1) == {"id": 1, "n": n}
    with pytest.raises(txnkv.StoreNotFoundError, match="the first one is of"):
        txnkv.restore(tmp_path / "all", tmp_path / "none", at=early - timedelta(days=1))
    with pytest.raises(ValueError, match="time zone"):
        txnkv.restore(tmp_path / "all", tmp_path / "none", at=datetime(2026, 1, 1))
    assert not (tmp_path / "none").exists()
    assert early.tzinfo is UTC
    file = tmp_path / "all" / "1" / "BACKUP"
    file.write_bytes(b"#" + file.read_bytes()[1:])
    for at in (None, taken[1].timestamp, early + timedelta(microseconds=1)):
        with pytest.raises(txnkv.CorruptionError, match=rf"{file} .*\. Nobody knows when it was"):
            txnkv.restore(tmp_path / "all", tmp_path / "none", at=at)
    for n in (0, 2):  # nothing can be closer
        restored = txnkv.restore(tmp_path / "all", tmp_path / f"{n}", at=taken[n].timestamp)
        assert restored.backup == taken[n].path


def test_what_is_refused(shop, tmp_path: Path) -> None:
    shop.backup(tmp_path / "b")
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "b", tmp_path / "file"):
        with pytest.raises(ValueError, match=str(place)):
            shop.backup(place)
        with pytest.raises(ValueError, match=str(place)):
            txnkv.restore(tmp_path / "b", place)
    for make in (shop.backup, lambda place: txnkv.restore(tmp_path / "b", place)):
        with pytest.raises(ValueError, match="lies in the store"):
            make(tmp_path / "shop" / "b")
    with pytest.raises(ValueError, match="lies in the backup"):
        txnkv.restore(tmp_path / "b", tmp_path / "b" / "made")
    with pytest.raises(ValueError, match="bytes_per_second"):
        shop.backup(tmp_path / "c", bytes_per_second=0)
    with pytest.raises(txnkv.StoreNotFoundError):
        txnkv.restore(tmp_path / "none", tmp_path / "made")
    with pytest.raises(txnkv.IncompatibleStoreError, match="is no backup, but a store"):
        txnkv.restore(tmp_path / "shop", tmp_path / "made")
    with pytest.raises(txnkv.IncompatibleStoreError, match="another folder"):
        txnkv.restore(tmp_path / "shop" / "runtime", tmp_path / "made")
    refused = txnkv.IncompatibleStoreError, txnkv.StoreNotFoundError
    for create, error in zip((True, False), refused, strict=True):
        with pytest.raises(error, match="is a backup, and no store"):
            txnkv.connect(tmp_path / "b", create=create)
    (tmp_path / "empty").mkdir()
    txnkv.restore(tmp_path / "b", tmp_path / "empty")
    assert (tmp_path / "empty" / "FORMAT").exists()
    with (
        txnkv.connect(tmp_path / "shop", read_only=True) as reader,
        pytest.raises(txnkv.NotSupportedError),
    ):
        reader.backup(tmp_path / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("made", ["backup", "restore", "dump"])
def test_links_are_followed_and_names_that_are_none_refused(
    shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: str
) -> None:
    """A link to an empty folder was refused once all was copied, one to nothing as a file; an
    empty name was the working directory.
    """
    shop.backup(tmp_path / "b")
    for folder in ("cwd", "empty"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "cwd")

    def make(dest: Any) -> str:
        if made == "backup":
            return shop.backup(dest).path
        return (txnkv.dump(shop, dest) if made == "dump" else txnkv.restore("../b", dest)).path

    for name, error, text in (
        ("", ValueError, "'' names no folder"),
        (os.fsencode(tmp_path / "x"), TypeError, "not b'.*': os.fsdecode it"),
        ("what://x/y", (ValueError, txnkv.NotSupportedError), "names no file system|is an address"),
        (tmp_path / "b/BACKUP/x", txnkv.StoreNotFoundError, "no folder can be at .* over a file"),
        ("y" * 256, ValueError, "a name that is too long"),
        ("y" * 250, ValueError, "a name that is too long, with what"),
    ):
        with pytest.raises(error, match=text):
            make(name)
    for target in ("empty", "none"):
        (tmp_path / "link").symlink_to(target)
        assert make(tmp_path / "link") == str(tmp_path / target)
        assert (tmp_path / target / "status.db").exists() or made == "dump"
        (tmp_path / "link").unlink()
    assert sorted(os.listdir(tmp_path)) == ["b", "cwd", "empty", "none", "shop"]


@pytest.mark.parametrize("disk", ["another", "the same"])
def test_a_mount_point_is_refused(
    shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: str
) -> None:
    """All was written to the disk beside it, and it failed in the end, as if to be tried again."""
    shop.backup(tmp_path / "b")
    seen: list[str] = []
    (tmp_path / "x").mkdir()

    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if target == tmp_path / "x":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        return rename(path, target)

    if disk == "another":
        monkeypatch.setattr(os.path, "ismount", lambda place: place == tmp_path / "x")
        monkeypatch.setattr(backup_files, "_locked", lambda *args: seen.append(str(args)))
    else:
        monkeypatch.setattr(Path, "rename", refuse)
    for call in (shop.backup, partial(txnkv.restore, tmp_path / "b"), partial(txnkv.dump, shop)):
        with pytest.raises(ValueError, match="x is a mount point: name a folder in it, for a"):
            call(tmp_path / "x")
    assert seen == []
    assert sorted(os.listdir(tmp_path)) == ["b", "shop", "x"]


def test_where_nobody_may_write_it_is_not_tried_again(
    shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.backup(tmp_path / "b")

    def refuse(path: Path, *_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(backup_files, "_locked", refuse)
    for call in (shop.backup, partial(txnkv.restore, tmp_path / "b"), partial(txnkv.dump, shop)):
        with pytest.raises(txnkv.NotSupportedError, match=r"user \d+ cannot make .*/x: "):
            call(tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_the_rate_is_bounded_and_progress_ends(shop, tmp_path: Path) -> None:
    with shop.transaction() as txn:
        txn.write("t", pa.table({"id": range(20_000), "n": range(20_000)}))
    told: list[tuple[int, int]] = []
    began = time.monotonic()
    report = shop.backup(
        tmp_path / "b", bytes_per_second=2_000_000, progress=lambda *now: told.append(now)
    )
    assert time.monotonic() - began >= report.size / 2_000_000
    assert told[-1] == (report.size, report.size)
    assert all(before <= after for (before, _), (after, _) in pairwise(told))
    told.clear()
    txnkv.restore(tmp_path / "b", tmp_path / "made", progress=lambda *now: told.append(now))
    assert told[-1] == (2 * report.size, 2 * report.size)


def test_two_at_once_to_one_place(shop, tmp_path: Path) -> None:
    errors: list[Exception] = []

    def second() -> None:
        try:
            shop.backup(tmp_path / "b")
        except txnkv.UnavailableError as error:
            errors.append(error)

    arm("backup.logs", elsewhere(second))
    shop.backup(tmp_path / "b")
    assert "another process makes" in str(errors[0])
    txnkv.restore(tmp_path / "b", tmp_path / "made")


class _Alarm(Exception):
    """Raised by a signal handler."""


def test_an_exception_of_a_signal_handler_ends_it(shop, tmp_path: Path) -> None:
    def ring(*_: object) -> None:
        raise _Alarm

    with shop.transaction() as txn:
        txn.write("t", pa.table({"id": range(20_000), "n": range(20_000)}))
    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(_Alarm):
            shop.backup(tmp_path / "b", bytes_per_second=1000)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    deadline = time.monotonic() + 20
    while len(list(tmp_path.iterdir())) > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [path.name for path in tmp_path.iterdir()] == ["shop"]
    shop.backup(tmp_path / "b")


def test_modes(shop, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        shop.backup(tmp_path / "b")
        txnkv.restore(tmp_path / "b", tmp_path / "made")
    finally:
        os.umask(before)
    for folder in ("b", "made"):
        for path in (tmp_path / folder, *(tmp_path / folder).rglob("*")):
            wanted = 0o700 if path.is_dir() else 0o600
            assert path.stat().st_mode & 0o777 == wanted, path


def test_asyncio(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.connect(tmp_path / "shop") as client:
            await client.create_table("t", SCHEMA)
            await client.backup(tmp_path / "b")

    asyncio.run(main())
    txnkv.restore(tmp_path / "b", tmp_path / "made")
    with txnkv.connect(tmp_path / "made", create=False) as made:
        assert made.tables() == ["t"]


@pytest.mark.parametrize("part", ["tablets", "logs"])
def test_a_file_that_a_restored_store_loses_is_missed(tmp_path: Path, part: str) -> None:
    """Also one that nobody has written to since."""
    schema = txnkv.Schema({"id": "int64"}, primary_key=["id"])
    with txnkv.connect(tmp_path / "store") as client:
        table, topic = client.create_table("t", schema), client.create_topic("o", partitions=1)
        with client.transaction() as txn:
            txn.write(table, pa.table({"id": range(10)}))
            txn.send(topic, b"there")
        client.compact()
        client.backup(tmp_path / "backup")
    txnkv.restore(tmp_path / "backup", tmp_path / "restored")
    (file,) = (tmp_path / "restored" / part).glob("[0-9]*/data.mdb")
    file.unlink()
    with txnkv.connect(tmp_path / "restored") as restored:
        reads: dict[str, Callable[[], object]] = {
            "tablets": lambda: restored.table("t").count(),
            "logs": lambda: restored.topic("o").consumer().poll(timeout=0),
        }
        with pytest.raises(txnkv.CorruptionError, match=r"^[^:]*: /[^:]* is gone or empty"):
            reads[part]()
