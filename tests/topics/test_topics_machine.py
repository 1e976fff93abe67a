"""Topics of both buffers against a plain model: a list of what was sent, and how each ended.

In the marker buffer a large transaction's messages stand where they were sent, and readers of
committed messages stop at the first one that is open; in the sidecar they stand where it was
committed. A small transaction's stand where it was committed in both.
"""

from __future__ import annotations

import tempfile
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import txnkv
from tools.topic_contents import partitions
from txnkv.errors import InvalidTxnStateError
from txnkv.storage import arm, disarm
from txnkv.topics.sidecar import side_own, side_sweep
from txnkv.topics.topic_catalog import TopicOptions
from txnkv.topics.write import truncation

SLOTS = st.integers(0, 3)
OPEN, COMMITTED, ABORTED = "open", "committed", "aborted"


class Dead(Exception):
    """Thrown where a process would die."""


def die() -> None:
    raise Dead


class Sender:
    """A transaction, and what the model knows of it."""

    def __init__(self, txn: txnkv.Transaction) -> None:
        self.txn = txn
        self.large = False
        self.state = OPEN
        self.waiting: list[bytes] = []


class TopicMachine(RuleBasedStateMachine):
    buffer = "marker"

    def __init__(self) -> None:
        super().__init__()
        self.kept = side_own.OWN_BYTES, side_sweep.COMPACT_BYTES
        side_own.OWN_BYTES, side_sweep.COMPACT_BYTES = 1500, 400
        self.folder = tempfile.TemporaryDirectory()
        self.path = f"{self.folder.name}/store"
        self.client = txnkv.connect(self.path)
        self.client.instance.coordinator.maintenance.close()  # rounds are a rule
        options = TopicOptions(segment_bytes=2000)
        self.client.instance.topics.create("events", 1, self.buffer, options)
        self.senders: dict[int, Sender] = {}
        self.numbers = count()
        self.log: list[tuple[Sender | None, bytes]] = []
        self.commits: list[tuple[Sender | None, bytes]] = []

    def teardown(self) -> None:
        side_own.OWN_BYTES, side_sweep.COMPACT_BYTES = self.kept
        disarm()
        for sender in self.senders.values():
            sender.txn.rollback()
        problems = self.client.check().problems
        self.client.close()
        self.folder.cleanup()
        assert problems == []

    # -- the model -----------------------------------------------------------------------

    def put(self, sender: Sender | None, values: list[bytes]) -> None:
        self.log += [(sender, value) for value in values]

    def committed(self) -> list[bytes]:
        found = []
        for sender, value in self.log:
            if sender is not None and sender.state == OPEN:
                break
            if sender is None or sender.state == COMMITTED:
                found.append(value)
        return found

    def made(self, n: int, size: int) -> list[bytes]:
        return [b"%d" % next(self.numbers) + b"." * size for _ in range(n)]

    def sender(self, slot: int) -> Sender:
        if slot not in self.senders:
            txn = self.client.new_transaction(timeout=None)
            self.senders[slot] = Sender(txn)
        return self.senders[slot]

    # -- what is done ----------------------------------------------------------------------

    @rule(slot=SLOTS, n=st.integers(1, 5), size=st.integers(0, 200))
    def send(self, slot: int, n: int, size: int) -> None:
        sender = self.sender(slot)
        values = self.made(n, size)
        for value in values:
            sender.txn.send("events", value)
        sender.txn.flush()
        sender.waiting += values
        if sender.large and self.buffer == "marker":
            self.put(sender, values)

    @rule(slot=SLOTS)
    def turn_large(self, slot: int) -> None:
        sender = self.sender(slot)
        if not sender.large:
            sender.txn.serialize()
            sender.large = True
            if self.buffer == "marker":
                self.put(sender, sender.waiting)

    @rule(slot=SLOTS)
    def commit(self, slot: int) -> None:
        sender = self.senders.pop(slot, None)
        if sender is None:
            return
        sender.txn.commit()
        sender.state = COMMITTED
        if not (sender.large and self.buffer == "marker"):
            self.put(sender, sender.waiting)
        self.commits += [(sender, value) for value in sender.waiting]

    @rule(slot=SLOTS)
    def rollback(self, slot: int) -> None:
        sender = self.senders.pop(slot, None)
        if sender is not None:
            sender.txn.rollback()
            sender.state = ABORTED

    @rule(n=st.integers(1, 3))
    def plain(self, n: int) -> None:
        values = self.made(n, 5)
        with self.client.new_session() as session:
            for value in values:
                session.send("events", value)
        self.put(None, values)
        self.commits += [(None, value) for value in values]

    # -- what changes nothing --------------------------------------------------------------

    @rule()
    def flush(self) -> None:
        self.client.instance.engine.flush()

    @rule()
    def round(self) -> None:
        self.client.instance.coordinator.maintenance.round(resume_all=True)

    @rule(point=st.sampled_from(["side.moving", "side.compacted", "side.removed", "side.dropped"]))
    def dies_in_a_sweep(self, point: str) -> None:
        partition = partitions(self.client, "events")[0]
        if partition.side is None:
            return
        arm(point, die)
        try:
            partition.side.sweep(partition.log)
        except Dead:
            pass
        finally:
            disarm()

    @rule()
    def reopen(self) -> None:
        """Open transactions go with their process."""
        for sender in self.senders.values():
            sender.txn.rollback()
            sender.state = ABORTED
        self.senders.clear()
        self.client.close()
        self.client = txnkv.connect(self.path)
        self.client.instance.coordinator.maintenance.close()

    @precondition(lambda self: not any(sender.large for sender in self.senders.values()))
    @rule(back=st.integers(1, 4))
    def truncate(self, back: int) -> None:
        """To where the last commits begin, as far as the log may be cut there."""
        topic = self.client.topic("events")
        at = topic.consumer(start="earliest")
        messages = []
        while given := at.poll(timeout=0):
            messages += given
        if len(messages) < back:
            return
        partition = partitions(self.client, "events")[0]
        offset = messages[-back].offset
        try:
            flush = self.client.instance.engine.flush
            end = truncation.truncate(self.client.instance.topics, partition, offset, flush)
        except InvalidTxnStateError:  # it would part messages from their end marker
            return
        gone = {m.value for m in messages if m.offset >= end}
        last = max((i for i, each in enumerate(self.log) if each[1] not in gone
                    and (each[0] is None or each[0].state == COMMITTED)), default=-1)  # fmt: skip
        self.log = self.log[: last + 1]
        self.commits = [each for each in self.commits if each[1] not in gone]

    # -- what readers see --------------------------------------------------------------------

    @invariant()
    def readers_see_the_model(self) -> None:
        topic = self.client.topic("events")
        expected = self.committed()
        assert _drained(topic.consumer()) == expected
        in_order = [value for _, value in self.commits]
        assert _drained(topic.consumer(order="commit")) == in_order
        assert _drained(topic.consumer(isolation="serializable")) == in_order
        if self.buffer == "sidecar":
            assert topic.end_offsets() == topic.last_stable_offsets()
        if expected:  # from the middle on
            consumer = topic.consumer()
            skipped = consumer.poll(max_messages=len(expected) // 2 + 1, timeout=0)
            consumer.seek(0, skipped[-1].offset)
            assert _drained(consumer) == expected[len(skipped) - 1 :]


def _drained(consumer: txnkv.Consumer) -> list[Any]:
    found: list[Any] = []
    while given := consumer.poll(max_messages=7, timeout=0):
        found += [message.value for message in given]
    return found


class SidecarMachine(TopicMachine):
    buffer = "sidecar"


@pytest.mark.parametrize("machine", [TopicMachine, SidecarMachine], ids=["marker", "sidecar"])
def test_topics_are_as_the_model(machine: type[TopicMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
