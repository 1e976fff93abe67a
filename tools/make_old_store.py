"""Makes the store that `tests/format` keeps of a format version.

    python -m tools.make_old_store tests/format/stores

Run it once, when a version is released, and never again for that version: the test shows that
later programs read what this one wrote.
"""

from __future__ import annotations

import datetime
import decimal
import json
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import txnkv
from txnkv.storage.directory import FORMAT_VERSION
from txnkv.topics import Buffer

COLUMNS = {
    "k": "string",
    "n": "int32",
    "flag": "bool?",
    "small": "int8?",
    "count": "uint64?",
    "ratio": "float64?",
    "single": "float32?",
    "data": "binary?",
    "day": "date32?",
    "at": "timestamp[us, tz=UTC]?",
    "price": "decimal128(12, 2)?",
    "tags": "list<string>?",
}

BUFFERS: tuple[Buffer, ...] = ("marker", "sidecar")
"""Buffers of topics, each with a topic of its name; from version 3 on."""


def rows(first: int, count: int) -> list[dict[str, Any]]:
    """Rows of all types, every seventh with nulls."""
    made = []
    for i in range(first, first + count):
        row: dict[str, Any] = {"k": f"key {i % 5}", "n": i}
        if i % 7:
            row |= {
                "flag": i % 2 == 0,
                "small": i % 100 - 50,
                "count": 2**64 - 1 - i,
                "ratio": i / 8,
                "single": i / 4,
                "data": bytes([i % 256, 0, 255]),
                "day": datetime.date(2026, 1, 1) + datetime.timedelta(days=i),
                "at": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
                + datetime.timedelta(microseconds=i),
                "price": decimal.Decimal(i) / 4,
                "tags": [f"t{j}" for j in range(i % 3)],
            }
        made.append(row)
    return made


def make(path: Path) -> dict[str, Any]:
    """A store with two tables, some commits, a rollback and two topics; what it should answer."""
    with txnkv.connect(path) as client:
        schema = txnkv.Schema(COLUMNS, primary_key=["k", "n"])
        table = client.create_table("all_types", schema, txnkv.hash_partition("k", 2))
        ranged = client.create_table(
            "ranged",
            txnkv.Schema({"id": "int64", "name": "string"}, primary_key=["id"]),
            txnkv.range_partition("id", [100, 200]),
        )
        snapshots = []
        for first in (0, 40):
            with client.transaction() as txn:
                for row in rows(first, 40):
                    txn.insert(table, row)
                for i in range(first, first + 40):
                    txn.insert(ranged, (i * 4, f"name {i}"))
            snapshots.append([int(client.snapshot().timestamp), table.count(), ranged.count()])
            if first == 0:
                client.instance.engine.flush()  # the rest stays in the commit log
        undone = client.new_transaction()
        undone.insert(table, rows(500, 1)[0])
        undone.flush()
        undone.rollback()
        topics = {name: make_topic(client, name) for name in BUFFERS}
        client.instance.store.status.checkpoint()
        return {"rows": 80, "snapshots": snapshots, "topics": topics}


def make_topic(client: txnkv.Client, buffer: Buffer) -> dict[str, Any]:
    """A topic of two partitions, named as its buffer: what committed and what was rolled back, in
    small transactions and large ones; a producer; a subscription that has acknowledged a little.
    """
    topic = client.create_topic(buffer, partitions=2, buffer=buffer)
    with client.transaction() as txn:
        for i in range(10):
            txn.send(topic, f"small {i}", key=f"k{i}", headers={"n": b"%d" % i})
    for last, ends in (("large", True), ("undone", False)):
        txn = client.new_transaction()
        for i in range(20):
            txn.send(topic, f"{last} {i}", partition=i % 2)
        txn.serialize()  # large from here on: its messages go into the logs
        txn.flush()
        if ends:
            txn.commit()
        else:
            txn.rollback()
    client.instance.engine.flush()  # what comes now stays in the commit log
    with topic.producer("old") as producer:
        sent = [producer.send(f"produced {i}", partition=0) for i in range(3)]
        producer.flush()
        assert all(future.done() for future in sent)
    with topic.subscribe("reader") as subscription:
        messages = subscription.receive_many(100, timeout=1)
        subscription.ack([messages[0], messages[2]])
        acked = [messages[0].id, messages[2].id]
    return {"messages": messages_of(topic), "acked": [[id.partition, id.offset] for id in acked]}


def messages_of(topic: txnkv.Topic) -> list[list[Any]]:
    """The committed messages of a topic: partition, offset, value, key, headers."""
    with topic.consumer() as consumer:
        found = [
            [
                m.partition,
                m.offset,
                _text(m.value),
                _text(m.key),
                [[n, _text(v)] for n, v in m.headers],
            ]
            for m in consumer.poll(max_messages=1000, timeout=1)
        ]
    return sorted(found)


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()


def main() -> None:
    target = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        expected = make(store)
        name = f"store-v{FORMAT_VERSION}"
        with tarfile.open(target / f"{name}.tar.xz", "w:xz") as archive:
            archive.add(
                store, "store", filter=lambda info: None if "runtime/" in info.name else info
            )
    (target / f"{name}.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
