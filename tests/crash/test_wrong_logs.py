"""A file that is sound and says what is wrong: a log without its record, another part's file."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

import txnkv
from tests import internals
from txnkv.coordinator.maintenance import Maintenance

SCHEMA = txnkv.Schema({"id": "int64", "text": "string"}, primary_key=["id"])
PAGE = 4096


@pytest.fixture(autouse=True)
def background_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Maintenance, "start", lambda self: None)


def send(client: txnkv.Client, *values: bytes, partition: int = 0) -> None:
    with client.transaction() as txn:
        for value in values:
            txn.send("q", value, partition=partition)
    internals.flush(client)


def read(client: txnkv.Client) -> list[bytes | None]:
    with client.topic("q").consumer() as consumer:
        return [message.value for message in consumer.poll(max_messages=100, timeout=0.0)]


def void(file: Path) -> None:
    """Make zeros of the record of a log's state: LMDB finds nothing under its name then."""
    env = lmdb.open(str(file.parent), lock=False, readonly=True, max_dbs=16)
    with env.begin() as txn:
        (root,) = struct.unpack("<Q", txn.get(b"state")[-8:])
    env.close()
    with open(file, "r+b") as data:
        data.seek(root * PAGE + PAGE // 2)
        data.write(bytes(PAGE // 2))


def forget(file: Path) -> None:
    """Take the database with the record away."""
    env = lmdb.open(str(file.parent), max_dbs=16)
    with env.begin(write=True) as txn:
        txn.drop(env.open_db(b"state", txn=txn))
    env.close()


@pytest.mark.parametrize("lose", [void, forget])
def test_a_log_whose_record_is_gone_is_not_taken_for_an_empty_one(
    tmp_path: Path, lose: Callable[[Path], None], large: None
) -> None:
    """It was read as empty, `check` found nothing, and it took messages at offsets of others."""
    with txnkv.connect(tmp_path / "store") as client:
        client.create_topic("q")
        client.create_topic("new")
        for n in range(4):
            send(client, b"%d" % n)
    lose(tmp_path / "store" / "logs" / "1" / "data.mdb")
    for read_only in (True, False):
        with txnkv.connect(tmp_path / "store", read_only=read_only) as client:
            with pytest.raises(txnkv.CorruptionError, match="record of its state is damaged"):
                read(client)
            with pytest.raises(txnkv.CorruptionError, match="record of its state is damaged"):
                client.topic("q").end_offsets()
            assert "topic 'q', partition 0: log: the record" in client.check().problems[0]
            assert client.topic("new").end_offsets() == {0: 0}
    with txnkv.connect(tmp_path / "store") as client:
        with pytest.raises(txnkv.CorruptionError, match="record of its state is damaged"):
            send(client, b"more")
        loss = client.accept_loss("q/0")
        assert next(loss.lines()) == "topic 'q', partition 0: offsets 0 to 7"
        send(client, b"more")
        assert read(client) == [b"more"]
        assert client.check().problems == []


def test_another_partition_s_log_is_not_adopted(tmp_path: Path) -> None:
    """Its messages were then those of this partition."""
    path = tmp_path / "store"
    with txnkv.connect(path) as client:
        client.create_topic("q", partitions=2)
        send(client, b"zero", b"zero", b"zero", b"zero")
        send(client, b"one", b"one", partition=1)
    shutil.copyfile(path / "logs/2/data.mdb", path / "logs/1/data.mdb")
    with txnkv.connect(path) as client:
        assert client.accept_loss("q/0").offsets == ((0, 4),)
        assert read(client) == [b"one", b"one"]  # once
        assert client.check().problems == []
        send(client, b"more")
        assert read(client) == [b"more", b"one", b"one"]


def test_another_store_s_tablet_is_not_adopted(tmp_path: Path) -> None:
    """Its row sets have the same numbers."""
    for name in ("store", "other"):
        with txnkv.connect(tmp_path / name) as client:
            client.create_table("t", SCHEMA)
            with client.transaction() as txn:
                txn.upsert("t", {"id": 1, "text": name})
            internals.flush(client)
    file = Path("tablets", "1", "data.mdb")
    shutil.copyfile(tmp_path / "other" / file, tmp_path / "store" / file)
    with txnkv.connect(tmp_path / "store") as client:
        assert client.accept_loss("t/0").rows[0].live == 1
        assert client.table("t").count() == 0
        assert client.check().problems == []
