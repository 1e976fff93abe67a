"""A status.db that lacks what was durable: a bit of its WAL, an older file, an index that is cut.

SQLite takes the first bad frame of a WAL for its end, and an older file for the database. The
commits behind it were gone without a word, and what was sent next went where the log had messages.
"""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from tests.conftest import Process

WRITES = """
import os, pyarrow as pa, shutil, sys, txnkv
path = sys.argv[1]
client = txnkv.connect(path)
table = client.create_table("t", txnkv.Schema({"id": "int64", "n": "int64"}, primary_key=["id"]))
topic = client.create_topic("e")
for name in ("status.db", "status.db-wal"):
    shutil.copy(os.path.join(path, name), os.path.join(path, "..", name))
for first in (0, 3000):
    with client.transaction() as txn:
        txn.write(table, pa.table({"id": range(first, first + 3000), "n": [1] * 3000}))
        for i in range(2000):
            txn.send(topic, b"old" + bytes(100))
with client.transaction() as txn:
    txn.insert(table, (6000, 1))
    txn.send(topic, b"old")
os._exit(0)
"""
ROWS, MESSAGES = 6001, 4001

Hurt = Callable[[Path], None]


def _flip(path: Path) -> None:
    """A bit, in the first frame after the catalog was made."""
    wal, size = path / "status.db-wal", (path.parent / "status.db-wal").stat().st_size
    content = bytearray(wal.read_bytes())
    content[size + 2048] ^= 1
    wal.write_bytes(content)


def _put_back(path: Path) -> None:
    for name in ("status.db", "status.db-wal"):
        shutil.copy(path.parent / name, path / name)


@pytest.fixture
def killed(store_path: Path) -> Path:
    """A store whose process died."""
    subprocess.run([sys.executable, "-c", WRITES, str(store_path)], check=True)
    return store_path


def _values(client: txnkv.Client) -> list[bytes]:
    found, consumer = [], client.topic("e").consumer()
    while messages := consumer.poll(timeout=0):
        found += [m.value for m in messages]
    return found


@pytest.mark.parametrize("hurt", [_flip, _put_back])
@pytest.mark.parametrize("read_only", [False, True])
def test_what_was_durable_is_missed_and_nothing_is_touched(
    killed: Path, hurt: Hurt, read_only: bool
) -> None:
    names = "status.db", "status.db-wal"
    whole = {name: (killed / name).read_bytes() for name in names}
    hurt(killed)
    for _ in range(2):
        with pytest.raises(txnkv.CorruptionError, match=r"status\.db .* Put both back"):
            txnkv.connect(killed, read_only=read_only)
    for name, content in whole.items():
        (killed / name).write_bytes(content)
    with txnkv.connect(killed) as client:
        assert (client.table("t").count(), len(_values(client))) == (ROWS, MESSAGES)
        assert client.check().problems == []


@pytest.mark.parametrize("hurt", [_flip, _put_back])
def test_going_on_without_it(killed: Path, hurt: Hurt) -> None:
    """What is sent then comes after what the logs still have."""
    hurt(killed)
    shutil.rmtree(killed / "runtime")
    with txnkv.connect(killed) as client:
        there = _values(client)
        with client.transaction() as txn:
            txn.send("e", b"new")
        with client.transaction() as txn:
            txn.write("t", pa.table({"id": range(9000, 12_000), "n": [2] * 3000}))
            for _ in range(1500):
                txn.send("e", b"new" + bytes(100))
        client.compact()
    with txnkv.connect(killed) as client:
        after = _values(client)
        assert after[: len(there)] == there
        assert [value[:3] for value in after[len(there) :]] == [b"new"] * 1501
        assert client.table("t").count() >= 3000
        assert not [each for each in client.check().problems if "next offset" in each]


def test_a_log_that_ends_above_its_next_offset_takes_no_writes(
    client: txnkv.Client, store_path: Path
) -> None:
    """Until somebody repairs it, and nothing is lost by that."""
    topic, other = client.create_topic("e"), client.create_topic("other")
    with topic.producer("p") as producer:
        for _ in range(20):
            producer.send(bytes(100_000))
    client.compact()
    with internals.status(client).write() as cur:
        cur.execute("UPDATE partitions SET next_offset = 5 WHERE topic_id = ?", (topic.info.id,))
    with client.transaction() as txn:
        txn.send(other, b"beside")
    with pytest.raises(txnkv.CorruptionError, match=r"'e', partition 0: its log ends at 20.*e/0"):
        client.run(lambda txn: [txn.send(topic, bytes(100_000)) for _ in range(20)])
    assert len(_values(client)) == 20
    assert client.accept_loss("e/0").offsets == ()
    client.run(lambda txn: [txn.send(topic, b"new") for _ in range(20)])
    assert [len(value) for value in _values(client)] == [100_000] * 20 + [3] * 20
    assert client.check().problems == []


@pytest.mark.parametrize("point", ["mending.written", "mending.named", "offsets.regained"])
def test_killed_while_such_a_log_is_accepted(
    store_path: Path, process: Callable[..., Process], point: str
) -> None:
    """It is begun again, and loses nothing."""
    with txnkv.connect(store_path) as client:
        topic = client.create_topic("e")
        client.run(lambda txn: [txn.send(topic, bytes(100_000)) for _ in range(20)])
        with internals.status(client).write() as cur:
            cur.execute("UPDATE partitions SET next_offset = 5")
    process('client.accept_loss("e/0")', fault=f"{point}=kill").finish(-9)
    with txnkv.connect(store_path) as client:
        assert client.accept_loss("e/0").offsets == ()
        client.run(lambda txn: [txn.send("e", b"new") for _ in range(20)])
        assert [len(value) for value in _values(client)] == [100_000] * 20 + [3] * 20
        assert client.check().problems == []


def test_a_table_whose_tablets_are_gone(store_path: Path) -> None:
    """It was taken for an empty one."""
    with txnkv.connect(store_path) as client:
        client.create_table("t", txnkv.Schema({"id": "int64"}, primary_key=["id"])).insert((1,))
        internals.status(client).checkpoint()
    with closing(sqlite3.connect(store_path / "status.db", isolation_level=None)) as database:
        database.execute("DELETE FROM tablets")
    with (
        pytest.raises(txnkv.CorruptionError, match=r"status\.db: table 't' has no tablets"),
        txnkv.connect(store_path) as client,
    ):
        client.table("t").count()


def test_a_clock_with_nulls_is_damage(store_path: Path) -> None:
    """SQLite reads a row that is zeroed as one of nulls; whoever added to them got a TypeError."""
    with txnkv.connect(store_path) as client:
        client.create_table("t", txnkv.Schema({"id": "int64"}, primary_key=["id"]))
        internals.status(client).checkpoint()
    with closing(sqlite3.connect(store_path / "status.db", isolation_level=None)) as database:
        database.execute("PRAGMA writable_schema = ON")
        database.execute(
            "UPDATE sqlite_master SET sql = replace(sql, 'NOT NULL', '') WHERE name = 'clock_row'"
        )
        database.execute("PRAGMA schema_version = 999")
    with closing(sqlite3.connect(store_path / "status.db", isolation_level=None)) as database:
        database.execute("UPDATE clock_row SET last_commit = NULL")
    with pytest.raises(txnkv.CorruptionError, match=r"status\.db: nulls in"):
        txnkv.connect(store_path)
