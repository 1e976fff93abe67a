"""One byte of a small commit is another one: all readers say so, and none gives what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import txnkv
from tools.flips import changes
from txnkv.coordinator.maintenance import Maintenance


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is small stays in the commit log."""
    monkeypatch.setattr(Maintenance, "start", lambda self: None)


def make(path: Path) -> None:
    """Three small commits of rows, messages and acknowledgements."""
    schema = txnkv.Schema({"id": "int64", "text": "string?"}, primary_key=["id"])
    with txnkv.connect(path) as client:
        client.create_table("t", schema)
        topic = client.create_topic("out", partitions=2)
        client.create_topic("in")
        with client.transaction() as txn:
            txn.send("in", b"work")
        with topic.subscribe("readers"), client.topic("in").subscribe("work") as work:
            for id in range(2):
                with client.transaction() as txn:
                    txn.insert("t", (id, "text"))
                    txn.insert("t", (id + 10, None))
                    txn.send("out", b"message", key=b"%d" % id, headers=[("a", b"1")])
                    if id:
                        message = work.receive(timeout=5)
                        assert message is not None
                        txn.ack(work, message)


def polled(client: txnkv.Client, **how: Any) -> list[Any]:
    with client.topic("out").consumer(**how) as consumer:
        return sorted(m.value for m in consumer.poll(timeout=0.0))


READERS: dict[str, Callable[[txnkv.Client], Any]] = {
    "get": lambda client: client.table("t").get(0),
    "scan": lambda client: list(client.table("t").scan()),
    "read_committed": polled,
    "read_uncommitted": lambda client: polled(client, isolation="read_uncommitted"),
    "serializable": lambda client: polled(client, isolation="serializable"),
    "begin": lambda client: client.snapshot().scan("t").to_arrow().to_pylist(),
}


def answers(path: Path) -> dict[str, Any]:
    """What each reader gives, or the text of its CorruptionError, and what `check` says."""
    found: dict[str, Any] = {}
    with txnkv.connect(path, create=False) as client:
        for name, reader in READERS.items():
            try:
                found[name] = reader(client)
            except txnkv.CorruptionError as error:
                found[name] = str(error)
        found["check"] = client.check().problems
    return found


def sweep(path: Path, stride: int) -> int:
    make(path)
    right = answers(path)
    assert right["check"] == []
    assert not any(isinstance(found, str) for found in right.values())

    def status(sql: str, *values: Any) -> list[Any]:
        with txnkv.connect(path, create=False) as client, client.instance.store.status.write() as c:
            return list(c.execute(sql, values))

    count = 0
    wrong = []
    for stamp, payload in status("SELECT commit_ts, payload FROM commit_log"):
        for at, to in changes(payload, stride):
            count += 1
            changed = payload[:at] + bytes([to]) + payload[at + 1 :]
            status("UPDATE commit_log SET payload = ? WHERE commit_ts = ?", changed, stamp)
            found = answers(path)
            if not found.pop("check"):
                wrong.append(f"{stamp}, byte {at}: check says nothing")
            for name, each in found.items():
                if each != right[name] and not (isinstance(each, str) and str(stamp) in each):
                    wrong.append(f"{stamp}, byte {at}: {name}: {each}")
        status("UPDATE commit_log SET payload = ? WHERE commit_ts = ?", payload, stamp)
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(line[:300] for line in wrong[:50])
    assert answers(path) == right
    return count


def test_some_bytes_of_a_commit(tmp_path: Path) -> None:
    assert sweep(tmp_path / "store", stride=37) > 10


@pytest.mark.slow
def test_each_byte_of_a_commit(tmp_path: Path) -> None:
    assert sweep(tmp_path / "store", stride=1) > 300
