"""Offsets that only a log knows of, as a power loss in the middle of an append leaves them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import txnkv
from tests import internals
from tools.topic_writers import batch, begin, send
from txnkv.topics.topics import Partition
from txnkv.topics.write import append


def _forget(path: Path, forget: Callable[[txnkv.Client, Partition], object]) -> tuple[int, int]:
    """Make messages whose offsets are lost; the end of the log and its last commit."""
    with txnkv.connect(path) as client:
        client.create_topic("t", partitions=2)
        engine = internals.topics(client)
        partition = engine.partitions(engine.get("t"))[0]
        append.append_alone(engine, partition, [batch([b"told"])])
        status = internals.status(client)
        with status.read() as cur:
            before = cur.execute("SELECT last_timestamp, last_commit FROM clock").fetchone()
        forget(client, partition)
        with partition.environment.read() as txn:
            end = partition.log.end(txn)
            (*_, last) = partition.log.commits(txn, 0, 100)
        with status.write() as cur:
            cur.execute("UPDATE partitions SET next_offset = 1 WHERE id = ?", (partition.id,))
            cur.execute("UPDATE clock_row SET last_timestamp = ?, last_commit = ?", before)
            cur.execute("DELETE FROM end_markers")
    shutil.rmtree(path / "runtime")  # as after a start of the machine
    return end, last.commit_ts


def _send(client: txnkv.Client, value: bytes) -> None:
    with client.transaction() as txn:
        txn.send("t", value, partition=0)


def _values(client: txnkv.Client, **options: str) -> list[bytes | None]:
    with client.topic("t").consumer(**options) as consumer:  # type: ignore[arg-type]
        return [message.value for message in consumer.poll(max_messages=100, timeout=0.0)]


@pytest.mark.parametrize("isolation", ["read_committed", "serializable"])
def test_messages_that_outlived_their_offsets_stay(tmp_path: Path, isolation: str) -> None:
    path = tmp_path / "store"
    end, stamp = _forget(
        path,
        lambda client, partition: append.append_alone(
            internals.topics(client), partition, [batch([b"a", b"b"]), batch([b"c"])]
        ),
    )
    assert end == 4
    with txnkv.connect(path) as client:
        assert client.topic("t").end_offsets()[0] == 4
        with internals.status(client).read() as cur:
            clock = cur.execute("SELECT last_timestamp, last_commit FROM clock").fetchone()
        assert clock is not None
        assert min(clock) >= stamp
        assert client.check().problems == []
        assert _values(client, isolation=isolation) == [b"told", b"a", b"b", b"c"]
        _send(client, b"next")
        assert _values(client, isolation=isolation)[-1] == b"next"
        assert client.check().problems == []


def test_an_open_transaction_whose_batches_outlived_them_can_end(tmp_path: Path) -> None:
    path = tmp_path / "store"
    ids = []

    def forget(client: txnkv.Client, partition: Partition) -> None:
        txn = begin(client)
        ids.append(txn)
        send(client, txn, partition, [b"one"])
        send(client, txn, partition, [b"two"])

    end, _ = _forget(path, forget)
    assert end == 3
    with txnkv.connect(path) as client:
        assert client.topic("t").end_offsets()[0] == 3
        _send(client, b"behind")
        internals.maintenance(client).round(resume_all=True)
        internals.flush(client)
        assert client.check().problems == []


def test_it_is_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store"
    with txnkv.connect(path) as client:
        client.create_topic("t")
        _send(client, b"x")
        assert internals.runtime(client).regained
    monkeypatch.setattr("txnkv.topics.write.roll_forward._partitions", lambda engine: 1 / 0)
    with txnkv.connect(path):
        pass
