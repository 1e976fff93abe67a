"""A disk that is full: the writer gets an error, the store stays readable, nothing is lost.

Once with a limit on the size of files, which needs no rights, and once with a small file
system in memory, which needs those of root.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from tools.children import Children
from tools.crash import leftovers, settle
from tools.crash_scenarios import BEFORE, TABLES, prepare, rows
from txnkv.transaction.job import Job

DISK_MIB = 24
PAYLOAD = 1000


def bulk(first: int, mib: float) -> pa.Table:
    """So many MiB of rows that do not compress."""
    count = int(mib * (1 << 20) / PAYLOAD)
    return pa.table(
        {
            "id": pa.array(range(first, first + count), pa.int64()),
            "text": pa.array([os.urandom(PAYLOAD // 2).hex() for _ in range(count)]),
        }
    )


class Disk:
    """A small file system, and a ballast file on it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    def occupy(self, mib: int) -> None:
        """Take room that `make_room` gives back."""
        self._ballast.write_bytes(bytes(mib << 20))

    def leave(self, kib: int) -> None:
        """Fill it, but for so much."""
        with open(self._ballast, "ab", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1 << 12))
            except OSError:
                pass
            file.truncate(max(0, file.seek(0, 2) - (kib << 10)))

    def make_room(self) -> None:
        self._ballast.unlink(missing_ok=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    path = tmp_path / "disk"
    path.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(path)]
    try:
        mounted = subprocess.run(["mount", *options], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted: {mounted.stderr.decode().strip()}")
    yield Disk(path)
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_bulk_load_on_a_full_disk(disk: Disk) -> None:
    path = disk.path / "store"
    prepare(str(path))
    with txnkv.connect(path, create=False) as client:
        with client.transaction() as txn:
            txn.write("left", bulk(1000, 2))
        disk.occupy(4)
        kept = client.table("left").count()
        txn = client.new_transaction(timeout=None)
        txn.write("right", rows(BEFORE, 10))
        with pytest.raises(txnkv.StorageFullError):
            txn.write("left", bulk(100_000, DISK_MIB))
        assert client.table("left").count() == kept
        assert client.table("left").scan().to_arrow().num_rows == kept
        disk.make_room()
        txn.rollback()
        assert leftovers(client) == []
        assert client.check().problems == []
        for _ in range(6):  # 9 MiB into the 4 of the ballast: what was lost would be missed
            again = client.new_transaction()
            again.write("left", bulk(100_000, 1.5))
            again.rollback()
            assert client.table("left").count() == kept
        with client.transaction() as last:
            last.write("left", bulk(100_000, 1.5))
        assert client.check().problems == []
    with txnkv.connect(path, create=False) as client:
        assert client.table("left").count() > kept


@pytest.mark.parametrize("kib", [0, 4, 8, 16, 32, 64, 128])
def test_commit_on_a_full_disk_is_whole(kib: int, disk: Disk, size: str) -> None:
    path = disk.path / "store"
    prepare(str(path))
    with txnkv.connect(path, create=False) as client:
        txn = client.new_transaction(timeout=None)
        for name in TABLES:
            txn.write(name, rows(BEFORE, 400))
        disk.leave(kib)
        failed: Exception | None = None
        try:
            txn.commit()
        except (txnkv.StorageFullError, txnkv.CommitOutcomeUnknownError) as error:
            failed = error
        counts = [client.table(name).count() for name in TABLES]
        assert counts in ([BEFORE] * 2, [BEFORE + 400] * 2)
        assert failed is None or counts == [BEFORE] * 2 or is_unknown(failed)
        assert failed is not None or counts == [BEFORE + 400] * 2
        disk.make_room()
        settle(client)
        after = [client.table(name).count() for name in TABLES]
        assert after in ([BEFORE] * 2, [BEFORE + 400] * 2)
        assert failed is not None or after == counts
        state = client.transaction_state(txn.id)
        if size == "small" and state is txnkv.TxnState.OPEN:  # it may be committed again
            assert not is_unknown(failed)
            assert after == [BEFORE] * 2
            txn.commit()
            after = [BEFORE + 400] * 2
            state = txn.state
        committed = state is txnkv.TxnState.COMMITTED
        assert committed or state is txnkv.TxnState.ABORTED
        assert after == [BEFORE + (400 if committed else 0)] * 2
        assert leftovers(client) == []
        assert client.check().problems == []
        with client.transaction() as new:
            new.write("left", bulk(100_000, 2))
    with txnkv.connect(path, create=False) as client:
        assert client.table("right").count() == after[1]
    if kib == 0:
        assert failed is not None, "there was no room at all"


def is_unknown(error: Exception | None) -> bool:
    return isinstance(error, txnkv.CommitOutcomeUnknownError)


def test_full_disk_can_be_opened_to_read(disk: Disk) -> None:
    path = disk.path / "store"
    prepare(str(path))
    disk.leave(0)
    for read_only in (True, False):
        with txnkv.connect(path, create=False, read_only=read_only) as client:
            assert client.table("left").count() == BEFORE
            assert client.table("left").get(3) is not None
            assert client.check().problems == []
    disk.make_room()
    with txnkv.connect(path, create=False) as client:
        with client.transaction() as txn:
            txn.write("left", rows(BEFORE, 10))
        assert client.table("left").count() == BEFORE + 10


def test_store_is_not_half_made_on_a_full_disk(disk: Disk) -> None:
    path = disk.path / "store"
    for kib in (0, 4, 16, 64, 256):
        disk.leave(kib)
        with pytest.raises((txnkv.StorageFullError, OSError)):
            txnkv.connect(path).close()
        disk.make_room()
    prepare(str(path))
    with txnkv.connect(path) as client:
        assert client.table("left").count() == BEFORE
        assert client.check().problems == []


def test_messages_of_a_job_on_a_full_disk(disk: Disk) -> None:
    """The attempt that finds no room leaves nothing; a job that finds none for its logs is over."""
    path = disk.path / "store"
    prepare(str(path))
    topic = "crash-marker"
    with txnkv.connect(path, create=False) as client:
        before = client.topic(topic).end_offsets()
        txn = client.new_transaction(timeout=None)
        job = Job.start(txn)
        disk.occupy(4)
        with job.session("0") as session:
            session.send_batch(topic, messages(1))
        with job.session("1") as session, pytest.raises(txnkv.StorageFullError):
            session.send_batch(topic, messages(DISK_MIB))
        assert client.check().problems == []
        disk.leave(0)
        with pytest.raises(txnkv.StorageFullError):
            job.commit(["0"])
        disk.make_room()
        txn.rollback()
        assert leftovers(client) == []
        assert staged(client) == []
        again = client.new_transaction(timeout=None)
        job = Job.start(again)
        with job.session("0") as session:
            session.send_batch(topic, messages(1))
        job.commit(["0"])
        again.commit()
        assert staged(client) == []
        assert client.topic(topic).end_offsets()[0] > before[0] + MESSAGES
        assert client.check().problems == []
    with txnkv.connect(path, create=False) as client, client.topic(topic).consumer() as consumer:
        found = 0
        while some := consumer.poll_batch(max_messages=10_000, timeout=0).num_rows:
            found += some
        assert found == MESSAGES + 2, "one in each partition was there before"


MESSAGES = 1 << 10


def messages(mib: int) -> pa.Table:
    """So many MiB of messages for one partition."""
    values = [os.urandom(1 << 10) for _ in range(MESSAGES * mib)]
    return pa.table({"value": values, "partition": [0] * len(values)})


def staged(client: txnkv.Client) -> list[str]:
    return [file.name for file in internals.topics(client).staged.folder.iterdir()]


LIMITED = """
import resource
client = txnkv.connect(args[0], create=False)
kept = client.table("left").count()
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

def load(txn, first, count):
    ids = range(first, first + count)
    text = pa.array([os.urandom(500).hex() for _ in ids])
    txn.write("left", pa.table({"id": pa.array(ids, pa.int64()), "text": text}))

limit(1 << 20)
for turn in range(3):
    txn = client.new_transaction()
    try:
        load(txn, 1000, 20_000)
        say("no error")
    except txnkv.StorageFullError:
        say("full")
    assert client.table("left").count() == kept
    assert client.table("left").scan().to_arrow().num_rows == kept
    txn.rollback()
    assert client.check().problems == []
with client.transaction() as txn:
    txn.insert("left", {"id": 500, "text": "small"})
limit(hard)
with client.transaction() as txn:
    load(txn, 1000, 20_000)
assert client.check().problems == []
say(client.table("left").count() - kept)
"""


def test_a_full_disk_without_the_files_of_locks(disk: Disk, children: Children) -> None:
    """A power loss may take them: LMDB made them with holes, and its reader died of SIGBUS."""
    path = disk.path / "store"
    prepare(str(path))
    for file in path.glob("*/*/lock.mdb"):
        file.unlink()
    code = """
    for read_only in (True, False):
        try:
            with txnkv.connect(args[0], create=False, read_only=read_only) as client:
                client.table("left").count()
            say("no error")
        except txnkv.StorageFullError:
            say("full")
    """
    disk.leave(0)
    assert children.start(code, path).finish() == ["full", "full"]
    disk.make_room()
    with txnkv.connect(path, create=False) as client:
        assert client.table("left").count() == BEFORE


def test_a_store_that_cannot_be_opened_for_want_of_room(children: Children, store: Path) -> None:
    code = """
    import resource
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        txnkv.connect(args[0], create=False)
        say("no error")
    except txnkv.StorageFullError:
        say("full")
    """
    assert children.start(code, store).finish() == ["full"]


def test_file_size_limit(children: Children, store: Path) -> None:
    assert children.start(LIMITED, store).finish() == ["full"] * 3 + ["20001"]
    with txnkv.connect(store, create=False) as client:
        assert client.table("left").count() == BEFORE + 20_001
        assert leftovers(client) == []


def test_full_disk_stops_a_worker_not_its_transaction(disk: Disk, children: Children) -> None:
    path = disk.path / "store"
    prepare(str(path))
    code = """
    client = txnkv.connect(args[0], create=False)
    txn = txnkv.Transaction.deserialize(client, args[1])
    try:
        ids = range(1000, 1000 + 40_000)
        text = pa.array([os.urandom(500).hex() for _ in ids])
        txn.write("left", pa.table({"id": pa.array(ids, pa.int64()), "text": text}))
        say("no error")
    except txnkv.StorageFullError:
        say("full")
    """
    with txnkv.connect(path, create=False) as client:
        txn = client.new_transaction(timeout=None)
        txn.write("right", rows(BEFORE, 10))
        disk.occupy(2)
        assert children.start(code, path, str(txn.serialize())).finish() == ["full"]
        disk.make_room()
        txn.commit()
        assert client.table("left").count() == BEFORE
        assert client.table("right").count() == BEFORE + 10
        assert leftovers(client) == []
        with client.transaction() as again:
            again.write("left", bulk(1000, 1))
        assert client.check().problems == []
