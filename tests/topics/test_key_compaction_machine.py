"""Key compaction under random use, against a dict.

Messages come small and in transactions that are open side by side, some of which are aborted; some
are in pieces. Readers of each kind go on while the log is compacted and the store is closed and
opened. Nothing is lost that was not hidden, nothing comes twice or elsewhere, and whoever puts what
comes into a dict has the last value of each key.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import txnkv
from tests import internals
from tools.topic_writing import Writer
from txnkv import core
from txnkv.topics import key_compaction
from txnkv.topics.messages.message import cut_messages
from txnkv.topics.messages.message_input import now_micros
from txnkv.topics.topic_catalog import TopicOptions
from txnkv.topics.write.append import AppendAttempt, append

TOPIC = "state"
LARGE = 200
OPTIONS = st.builds(
    TopicOptions,
    cleanup=st.just("compact"),
    segment_bytes=st.sampled_from([1000, 64 << 20]),
    max_message_bytes=st.just(LARGE),
    tombstone_seconds=st.just(3600.0),
    compression=st.sampled_from([None, "lz4"]),
)
KEYS = st.none() | st.sampled_from([b"a", b"b", b"c", b"d"])
KINDS = st.sampled_from(["value", "value", "value", "large", "tombstone"])
SENDS = st.lists(st.tuples(KEYS, KINDS), min_size=1, max_size=5)
OLD = b"old"
"""Tombstones of this key are older than `tombstone_seconds`."""

READERS: list[dict[str, Any]] = [
    {"order": "offset"},
    {"order": "commit"},
    {"isolation": "serializable"},
    {"isolation": "read_uncommitted"},
]


class CompactionMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.sent: dict[int, tuple[bytes | None, bytes | None]] = {}
        """Every message that was ever committed below the last stable offset."""
        self.there: set[int] = set()
        self.open: list[Any] = []
        self.number = 0

    @initialize(options=OPTIONS)
    def make(self, options: TopicOptions) -> None:
        self.options = options
        self._connect()
        self.subscription = self.topic.subscribe("s")
        self.given: list[list[Any]] = [[] for _ in (*READERS, self.subscription)]

    def _connect(self) -> None:
        self.client = txnkv.connect(self.folder / "store")
        self.writer = Writer(self.client, TOPIC, options=self.options)
        self.topic = self.client.topic(TOPIC)
        self.witness = self.topic.consumer(start={0: max(self.sent, default=-1) + 1})
        self.readers = [self.topic.consumer(**each) for each in READERS]

    # -- what is done ------------------------------------------------------------------

    @rule(sends=SENDS)
    def send(self, sends: list[tuple[bytes | None, str]]) -> None:
        with self.client.transaction() as txn:
            for key, kind in sends:
                txn.send(self.topic, self._value(kind), key=key)

    @rule(value=st.booleans())
    def send_old(self, value: bool) -> None:
        long_ago = datetime.now(UTC) - timedelta(days=1)
        made = self._value("value") if value else None
        self.client.run(lambda txn: txn.send(self.topic, made, key=OLD, timestamp=long_ago))

    @precondition(lambda self: len(self.open) < 3)
    @rule()
    def begin(self) -> None:
        self.open.append(self.writer.begin())

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 2), sends=SENDS)
    def send_in_one(self, which: int, sends: list[tuple[bytes | None, str]]) -> None:
        row = self.open[which % len(self.open)]
        values = [self._value(kind) for _, kind in sends]
        messages = pa.record_batch(
            {
                "value": pa.array(values, pa.binary()),
                "key": pa.array([key for key, _ in sends], pa.binary()),
            }
        )
        batches = [
            core.encode_batch(part, timestamp=now_micros(), txn_id=row.txn_id, chunk=chunk)
            for part, chunk in cut_messages(messages, LARGE)
        ]
        append(self.writer.engine, row, self.writer.partitions[0], batches, AppendAttempt())

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 2), commits=st.booleans())
    def end(self, which: int, commits: bool) -> None:
        row = self.open.pop(which % len(self.open))
        (self.writer.commit if commits else self.writer.abort)(row)

    def _value(self, kind: str) -> bytes | None:
        self.number += 1
        if kind == "tombstone":
            return None
        return b"%d" % self.number + (b"." * 3 * LARGE if kind == "large" else b"")

    @rule(force=st.booleans())
    def compact(self, force: bool) -> None:
        self._look()
        if force:
            internals.flush(self.client)
        partition = self.writer.partitions[0]
        key_compaction.compact(self.writer.engine, partition, force=force)
        with self.topic.consumer() as consumer:
            now = dict(_polled(consumer))
        assert now == {at: self.sent[at] for at in now}
        gone = self.there - now.keys()
        for at in gone:
            key, value = self.sent[at]
            hidden = any(self.sent[later][0] == key for later in self.sent if later > at)
            assert key is not None and (hidden or (value is None and key == OLD)), (at, key)  # noqa: PT018
        self.there = set(now)
        if force and not self.open:
            left = [key for key, _ in now.values() if key is not None]
            assert len(left) == len(set(left))
            assert (OLD, None) not in now.values()
        assert self.client.check().problems == []

    @rule(which=st.integers(0, len(READERS)), most=st.integers(1, 9))
    def read(self, which: int, most: int) -> None:
        self._look()
        self._read(which, most)

    def _read(self, which: int, most: int) -> None:
        if which == len(READERS):
            for message in self.subscription.receive_many(most, timeout=0):
                self.given[which].append(message)
                self.subscription.ack(message)
        else:
            self.given[which] += self.readers[which].poll(max_messages=most, timeout=0)

    @precondition(lambda self: not self.open)
    @rule()
    def reopen(self) -> None:
        self._look()
        for which, each in enumerate(READERS):
            if each.get("order") == "commit" or each.get("isolation") == "serializable":
                self._read(which, 10_000)  # its place is that of a commit, before all of it
        places = [reader.position(0) for reader in self.readers]
        self._close()
        self._connect()
        for reader, place in zip(self.readers, places, strict=True):
            reader.seek(0, place)
        self.subscription = self.topic.subscribe("s")

    def _look(self) -> None:
        for at, message in _polled(self.witness):
            assert at not in self.sent
            self.sent[at] = message
            self.there.add(at)

    # -- what is seen ------------------------------------------------------------------

    def teardown(self) -> None:
        if hasattr(self, "client"):
            for row in self.open:
                self.writer.abort(row)
            self._look()
            for which in range(len(READERS) + 1):
                while True:
                    before = len(self.given[which])
                    self._read(which, 1000)
                    if len(self.given[which]) == before:
                        break
            for which, given in enumerate(self.given):
                self._compare(given, READERS[which] if which < len(READERS) else {})
            self._close()
        shutil.rmtree(self.folder)

    def _compare(self, given: list[Any], reader: dict[str, Any]) -> None:
        """Compare what a reader was given, and the dict that it makes of it."""
        offsets = [message.offset for message in given]
        assert len(set(offsets)) == len(offsets), reader
        if reader.get("order") != "commit" and reader.get("isolation") != "serializable":
            assert offsets == sorted(offsets), reader
        found = {message.offset: (message.key, message.value) for message in given}
        if reader.get("isolation") == "read_uncommitted":
            found = {at: message for at, message in found.items() if at in self.sent}
        assert found == {at: self.sent[at] for at in found}, reader
        assert _state(found) == _state(self.sent), reader

    def _close(self) -> None:
        self.subscription.close()
        for each in (self.witness, *self.readers):
            each.close()
        self.client.close()


def _polled(consumer: Any) -> Iterator[tuple[int, tuple[bytes | None, bytes | None]]]:
    while messages := consumer.poll(max_messages=10_000, timeout=0):
        for each in messages:
            yield each.offset, (each.key, each.value)


def _state(messages: dict[int, tuple[bytes | None, bytes | None]]) -> dict[bytes, bytes | None]:
    """The last value of each key; those of `OLD` may be gone before one sees that they are."""
    found = {key: value for _, (key, value) in sorted(messages.items()) if key is not None}
    found.pop(OLD, None)
    return found


TestCompactionMachine = CompactionMachine.TestCase
TestCompactionMachine.settings = settings(
    max_examples=20,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
