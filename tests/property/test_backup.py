"""Backups of a store in use against a model: lists of what committed when.

Threads commit at random, small and large, rows and messages and acks; another one flushes,
compacts, sweeps and drops; transactions are open, and are aborted. Beside all that backups are
taken, each onto the one before. Of each a store is made: it has what committed at or below its
timestamp, no more and no less, and a check finds nothing.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from txnkv.client import BackupReport

KEYS = 300
LARGE = 60
TOPICS = ("marker", "sidecar")
BACKUPS = 4
SEEDS = [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))]


class Commit:
    """A transaction as its writer knows it; its stamp once that is told."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.stamp = 0
        self.rows: dict[int, int | None] = {}
        self.sent: Counter[str] = Counter()
        self.acked = 0

    def fill(self, rng: random.Random, client: txnkv.Client, txn: Any) -> None:
        large = rng.random() < 0.3
        keys = rng.sample(range(KEYS), LARGE if large else rng.randint(1, 4))
        table = client.table("t")
        gone = {key for key in keys if rng.random() < 0.3}
        there = {key for key in gone if txn.get(table, key) is not None}
        self.rows = {key: None if key in there else self.number for key in keys}
        for key in gone - there:
            del self.rows[key]
        kept = [key for key, value in self.rows.items() if value is not None]
        if large and kept:
            txn.write(table, pa.table({"id": kept, "n": [self.number] * len(kept)}), op="upsert")
        for key, value in self.rows.items():
            if value is None:
                txn.delete(table, key)
            elif not large:
                txn.upsert(table, {"id": key, "n": value})
        for topic in TOPICS:
            self.sent[topic] = rng.randint(0, 30 if large else 2)
            for i in range(self.sent[topic]):
                txn.send(client.topic(topic), f"{self.number} {i}")
        if rng.random() < 0.3:
            txn.serialize()  # from here on it is a large one
            txn.flush()


class Load:
    """Writers beside backups."""

    def __init__(self, path: Path, seed: int) -> None:
        self.client = txnkv.connect(path)
        schema = txnkv.Schema({"id": "int64", "n": "int64"}, primary_key=["id"])
        self.client.create_table("t", schema, partition_by=txnkv.hash_partition("id", 2))
        self.client.create_topic("marker", partitions=2)
        self.client.create_topic("sidecar", buffer="sidecar")
        self.client.topic("marker").subscribe("s").close()
        self.committed: list[Commit] = []
        self.seed = seed
        self.stop = threading.Event()
        self.errors: list[BaseException] = []
        self._lock = threading.Lock()
        self._numbers = iter(range(1, 1 << 30))

    def run(self, take: Any) -> None:
        work = [self._write, self._write, self._acknowledge, self._maintain]
        threads = [
            threading.Thread(target=self._guarded, args=(do, random.Random(f"{self.seed} {n}")))
            for n, do in enumerate(work)
        ]
        for thread in threads:
            thread.start()
        try:
            take()
        finally:
            self.stop.set()
            for thread in threads:
                thread.join()
        assert self.errors == []

    def _guarded(self, do: Any, rng: random.Random) -> None:
        try:
            while not self.stop.is_set():
                do(rng)
        except BaseException as error:
            self.errors.append(error)

    def _write(self, rng: random.Random) -> None:
        with self._lock:
            commit = Commit(next(self._numbers))
        txn = self.client.new_transaction()
        commit.fill(rng, self.client, txn)
        if rng.random() < 0.2:
            txn.rollback()
            return
        with suppress(txnkv.TransactionConflictError):
            commit.stamp = txn.commit()
            with self._lock:
                self.committed.append(commit)

    def _acknowledge(self, rng: random.Random) -> None:
        with self.client.topic("marker").subscribe("s") as subscription:
            for _ in range(rng.randint(1, 20)):
                messages = subscription.receive_many(max_messages=3, timeout=0.05)
                if not messages:
                    break
                commit = Commit(0)
                commit.acked = len(messages)
                txn = self.client.new_transaction()
                for message in messages:
                    txn.ack(subscription, message)
                if rng.random() < 0.3:
                    txn.serialize()
                    txn.flush()
                commit.stamp = txn.commit()
                with self._lock:
                    self.committed.append(commit)

    def _maintain(self, rng: random.Random) -> None:
        what = rng.choice(["flush", "compact", "round", "drop"])
        if what == "flush":
            internals.flush(self.client)
        elif what == "compact":
            self.client.compact()
        elif what == "round":
            internals.maintenance(self.client).round()
        else:
            schema = txnkv.Schema({"id": "int64"}, primary_key=["id"])
            with self.client.transaction() as txn:
                txn.insert(self.client.create_table("gone", schema, exists_ok=True), {"id": 1})
                txn.send(self.client.create_topic("gone", exists_ok=True), b"gone")
            self.client.drop_table("gone")
            self.client.drop_topic("gone")
        self.stop.wait(rng.random() * 0.05)


def messages_of(topic: txnkv.Topic) -> Counter[int]:
    """How many messages of each transaction there are."""
    found: Counter[int] = Counter()
    consumer = topic.consumer()
    while messages := consumer.poll(max_messages=1000, timeout=0.05):
        found.update(int(message.value.split()[0]) for message in messages)
    return found


def compare(client: txnkv.Client, commits: list[Commit]) -> None:
    rows: dict[int, int | None] = {}
    for commit in commits:
        rows.update(commit.rows)
    found = {row["id"]: row["n"] for row in client.table("t").scan()}
    assert found == {key: n for key, n in rows.items() if n is not None}
    for name in TOPICS:
        sent = {each.number: each.sent[name] for each in commits if each.sent[name]}
        assert messages_of(client.topic(name)) == sent
    left = 0
    with client.topic("marker").subscribe("s") as subscription:
        while messages := subscription.receive_many(max_messages=1000, timeout=0.05):
            left += len(messages)
    sent_in_all = sum(each.sent["marker"] for each in commits)
    assert left == sent_in_all - sum(each.acked for each in commits)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_restored_store_is_the_store_at_the_timestamp(seed: int, tmp_path: Path) -> None:
    load = Load(tmp_path / "store", seed)
    rng = random.Random(seed)
    taken: list[BackupReport] = []

    def take() -> None:
        for number in range(BACKUPS):
            load.stop.wait(rng.random())
            base = taken[-1].path if taken else None
            taken.append(load.client.backup(tmp_path / "backups" / str(number), base=base))

    load.run(take)
    load.committed.sort(key=lambda commit: commit.stamp)
    for each in taken:
        made = txnkv.restore(each.path, tmp_path / "restored" / Path(each.path).name)
        assert made.timestamp == each.timestamp
        with txnkv.connect(made.path, create=False) as client:
            assert client.check().problems == []
            compare(client, [one for one in load.committed if one.stamp <= each.timestamp])
            with client.transaction() as txn:  # it goes on from there
                txn.upsert("t", {"id": -1, "n": 0})
                txn.send("marker", b"0 0")
            assert client.table("t").get(-1) == {"id": -1, "n": 0}
            assert client.check().problems == []
    load.client.close()
