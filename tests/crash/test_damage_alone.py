"""One part is damaged: it fails by name, and everything else goes on."""

from __future__ import annotations

import logging
from pathlib import Path

import lmdb
import pyarrow as pa
import pytest

import txnkv
from txnkv.coordinator.maintenance import Maintenance
from txnkv.options import Buffer
from txnkv.storage.environment import Environment
from txnkv.tables import row_set_format
from txnkv.tables.row_set_format import KEYS, block_key

SCHEMA = txnkv.Schema({"id": "int64", "text": "string"}, primary_key=["id"])


def spoil(folder: Path, db: bytes, key: bytes) -> None:
    """Flip a bit of a value; no process has the store open."""
    env = lmdb.open(str(folder), max_dbs=16)
    with env.begin(write=True, db=env.open_db(db, create=False)) as txn:
        value = bytearray(txn.get(key))
        value[len(value) // 2] ^= 0x10
        txn.put(key, bytes(value))
    env.close()


def spoil_topic(path: Path) -> None:
    """Flip a bit in the state record of the partition of "hurt"."""
    spoil(path / "logs" / "1", b"state", b"log")


def spoil_table(path: Path) -> None:
    """Flip a bit in the first block of keys of the first row set of "hurt table"."""
    spoil(path / "tablets" / "1", b"blocks", block_key(1, KEYS, 0))


def rows(first: int, count: int) -> pa.Table:
    ids = range(first, first + count)
    return pa.table({"id": ids, "text": [f"text {i}" for i in ids]})


def store_it(txn: txnkv.Transaction) -> None:
    """Stage what was written, so that another process can end the transaction."""
    txn._before_read()
    txn.context.ensure_large("commit")


def maintain(client: txnkv.Client) -> None:
    """A round of the leader, which resumes what others have left."""
    assert client.instance.coordinator.maintenance.round(resume_all=True)


def values(client: txnkv.Client, topic: str) -> list[bytes | None]:
    with client.topic(topic).consumer() as consumer:
        return [message.value for message in consumer.poll(max_messages=100, timeout=0.0)]


def states(client: txnkv.Client) -> dict[int, str]:
    with client.instance.store.status.read() as cur:
        return dict(cur.execute("SELECT txn_id, state FROM transactions WHERE state != 4"))


def failing(client: txnkv.Client) -> str:
    assert client.metrics()["failing_parts"] > 0
    return "; ".join(client.instance.coordinator.damage.parts())


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The background works when the test says so, and blocks are short."""
    monkeypatch.setattr(Maintenance, "start", lambda self: None)
    monkeypatch.setattr(row_set_format, "BLOCK_ROWS", 64)


@pytest.fixture(params=["marker", "sidecar"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Two topics and two tables, with something on the disk in each."""
    path = tmp_path / "store"
    buffer: Buffer = request.param
    with txnkv.connect(path) as client:
        for name in ("hurt", "sound"):
            client.create_topic(name, buffer=buffer)
            client.create_table(f"{name} table", SCHEMA)
        with client.transaction() as txn:
            for name in ("hurt", "sound"):
                txn.send(name, b"first", partition=0)
                txn.write(f"{name} table", rows(0, 200))
        client.instance.engine.flush()
        assert client.topic("hurt").info.partitions == (1,)
        assert client.table("hurt table").info.tablets == (1,)
    return path


def leave(path: Path, *, commit: bool) -> None:
    """A transaction over all of it that is decided, and whose process is gone."""
    with txnkv.connect(path) as client, pytest.MonkeyPatch.context() as patch:
        patch.setattr("txnkv.tables.small.MAX_ROWS", -1)
        patch.setattr("txnkv.topics.outbox.MAX_BYTES", -1)
        txn = client.new_transaction(timeout=None)
        for name in ("hurt", "sound"):
            txn.send(name, b"second", partition=0)
            txn.upsert(f"{name} table", {"id": 7, "text": "new"})
        store_it(txn)
        coordinator, id = client.instance.coordinator, txn.context.row.txn_id
        if commit:
            row = coordinator.orchestrator.start_commit(id)
            coordinator.orchestrator.decide(row, coordinator.metadata.participants(id))
        else:
            coordinator.orchestrator.start_abort(id, "by the test")


# -- a damaged partition ---------------------------------------------------------------


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
def test_end_of_a_transaction_over_a_damaged_partition(
    path: Path, commit: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends everywhere else, the store opens, and the topic can be dropped."""
    leave(path, commit=commit)
    spoil_topic(path)
    with txnkv.connect(path) as client:
        with caplog.at_level(logging.WARNING, "txnkv"):
            for _ in range(3):
                maintain(client)
        told = [text for text in caplog.messages if text.startswith("topic 'hurt', partition 0 is left alone")]
        assert told
        assert len(told) == len(set(told)), "each is told once"
        assert "topic 'hurt', partition 0" in failing(client)
        assert len(states(client)) == 1
        assert values(client, "sound") == [b"first", *([b"second"] if commit else [])]
        sound = client.table("sound table")
        assert sound.get(7) == {"id": 7, "text": "new" if commit else "text 7"}
        with client.transaction() as txn:
            txn.write("sound table", rows(1000, 10))
            txn.send("sound", b"third", partition=0)
        with pytest.raises(txnkv.CorruptionError):
            values(client, "hurt")
        client.drop_topic("hurt")
        maintain(client)
        assert states(client) == {} if commit else set(states(client).values()) == {2}
        assert client.metrics()["failing_parts"] == 0
        assert client.check().problems == []


def test_expired_transactions_are_aborted_beside_damage(path: Path) -> None:
    with txnkv.connect(path) as client, pytest.MonkeyPatch.context() as patch:
        patch.setattr("txnkv.topics.outbox.MAX_BYTES", -1)
        kept = []
        for name in ("hurt", "sound"):
            txn = client.new_transaction(timeout=0.01)
            txn.send(name, b"second", partition=0)
            store_it(txn)
            kept.append(txn)
    spoil_topic(path)
    with txnkv.connect(path) as client:
        maintain(client)
        # In a side log the abort of another one is noted without its log.
        assert sorted(states(client).values()) in ([2, 2], [2, 5])
        assert values(client, "sound") == [b"first"]


# -- a damaged tablet ------------------------------------------------------------------


def test_commit_over_a_damaged_tablet(path: Path) -> None:
    """Its rows are found in all other tablets; the damaged one answers with errors alone."""
    leave(path, commit=True)
    spoil_table(path)
    with txnkv.connect(path) as client:
        maintain(client)
        assert "table 'hurt table', tablet 1" in failing(client)
        assert list(states(client).values()) == [6]
        assert client.table("sound table").get(7) == {"id": 7, "text": "new"}
        assert client.table("sound table").count() == 200
        for _ in range(2):  # later commits find their place, too
            with client.transaction() as txn:
                txn.write("sound table", rows(1000, 10), op="upsert")
        with pytest.raises(txnkv.CorruptionError):
            client.table("hurt table").scan().to_arrow()
        client.drop_table("hurt table")
        maintain(client)
        assert states(client) == {}
        assert client.check().problems == []


def test_disk_that_is_full_behind_the_commit_point(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store opens, so that something can be dropped."""
    leave(path, commit=True)
    with monkeypatch.context() as full:

        def write(self: Environment, fn: object, *args: object, **kwargs: object) -> None:
            raise txnkv.StorageFullError("no room")

        full.setattr(Environment, "write", write)
        with txnkv.connect(path) as client:
            assert list(states(client).values()) == [6]
            assert failing(client)
            client.drop_table("hurt table")
            client.drop_topic("hurt")
            assert client.table("sound table").get(7) == {"id": 7, "text": "new"}
    with txnkv.connect(path) as client:
        maintain(client)
        assert states(client) == {}
        assert values(client, "sound") == [b"first", b"second"]
        assert client.check().problems == []
