"""Streams over topics of both buffers, in both orders, against plain consumers.

Whatever is sent, committed, aborted, flushed, compacted, and however batches are limited and cut
into tasks: what the batches of a query gave together is what a consumer is given, and a batch
that is planned again gives what it gave. In commit order no transaction is in two batches.
"""

from __future__ import annotations

import os
import tempfile
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

import txnkv
from tests import internals
from txnkv.server import Server
from txnkv.topics.read import offset_reader, pinned_range, topic_planner
from txnkv.topics.sidecar import side_store, side_sweep
from txnkv.topics.topic_catalog import TopicOptions

from .topic_tools import Query, batch_read, close_clients, flat

pytestmark = pytest.mark.spark

SLOTS = st.integers(0, 2)
SIZES = st.sampled_from([0, 20, 400])  # the last ones are large messages
MOST = st.sampled_from([None, 1, 2, 3, 7])
PARTITIONS = 2


class StreamMachine(RuleBasedStateMachine):
    buffer = "marker"

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(side_store, "OWN_BYTES", 1500)
        self.patch.setattr(side_sweep, "COMPACT_BYTES", 400)
        self.patch.setattr(topic_planner, "TASK_BYTES", 100)
        self.patch.setattr(os, "cpu_count", lambda: 8)
        self.patch.setattr(pinned_range, "_SAMPLE_BYTES", 300)
        self.patch.setattr(offset_reader, "_FIRST_REACH", 2)
        self.folder = tempfile.TemporaryDirectory()
        path = f"{self.folder.name}/store"
        self.client = txnkv.connect(path)
        internals.maintenance(self.client).close()  # rounds are a rule
        options = TopicOptions(segment_bytes=2000, max_message_bytes=150)
        internals.topics(self.client).create("events", PARTITIONS, self.buffer, options)
        self.txns: dict[int, txnkv.Transaction] = {}
        self.numbers = count()
        place = {"topic": "events", "maxBytes": "300", **self.reached(path)}
        self.queries = {order: Query(place | {"order": order}) for order in ("offset", "commit")}

    def reached(self, path: str) -> dict[str, str]:
        """The options of the queries that tell where the store is."""
        return {"path": path}

    def leave(self) -> None:
        """The end of what `reached` began."""

    def teardown(self) -> None:
        try:
            for query in self.queries.values():
                assert query.same_again()
        finally:
            self.patch.undo()
            for txn in self.txns.values():
                txn.rollback()
            close_clients()
            self.leave()
            problems = self.client.check().problems
            self.client.close()
            self.folder.cleanup()
        assert problems == []

    # -- what is done ----------------------------------------------------------------------

    @rule(
        slot=SLOTS, n=st.integers(1, 5), size=SIZES, number=st.integers(0, 1), large=st.booleans()
    )
    def send(self, slot: int, n: int, size: int, number: int, large: bool) -> None:
        txn = self.txns.get(slot)
        if txn is None:
            txn = self.txns[slot] = self.client.new_transaction(timeout=None)
        for _ in range(n):
            value = b"%d" % next(self.numbers) + b"." * size
            txn.send("events", value, partition=number, headers=[("n", b"%d" % n)])
        if large:
            txn.serialize()
        txn.flush()

    @rule(slot=SLOTS, commits=st.sampled_from([True, True, False]))
    def end(self, slot: int, commits: bool) -> None:
        txn = self.txns.pop(slot, None)
        if txn is not None:
            (txn.commit if commits else txn.rollback)()

    @rule(n=st.integers(1, 3), number=st.integers(0, 1))
    def plain(self, n: int, number: int) -> None:
        with self.client.new_session() as session:
            for _ in range(n):
                session.send("events", b"%d" % next(self.numbers), key=b"k", partition=number)

    @rule(whole=st.booleans())
    def flush(self, whole: bool) -> None:
        internals.flush(self.client)
        if whole:
            internals.maintenance(self.client).round(resume_all=True)

    # -- what is read ----------------------------------------------------------------------

    @rule(order=st.sampled_from(["offset", "commit"]), most=MOST)
    def trigger(self, order: str, most: int | None) -> None:
        query = self.queries[order]
        if query.trigger(most) and order == "commit":
            self.is_whole(query)

    @rule(order=st.sampled_from(["offset", "commit"]))
    def restart(self, order: str) -> None:
        query = self.queries[order] = self.queries[order].restarted()
        if query.batches:
            assert flat(query.replay(len(query.batches) - 1)) == flat(query.batches[-1])

    @invariant()
    def queries_are_given_what_consumers_are(self) -> None:
        topic = self.client.topic("events")
        for order, query in self.queries.items():
            expected = by_partition(topic.consumer(order=order))
            for number, given in given_of(query).items():
                assert given == expected[number][: len(given)], (order, number)

    @rule(order=st.sampled_from(["offset", "commit"]), most=MOST)
    def drain(self, order: str, most: int | None) -> None:
        query = self.queries[order].drain(most)
        expected = by_partition(self.client.topic("events").consumer(order=order))
        assert given_of(query) == expected
        assert split(flat(batch_read(query.options))) == expected

    def is_whole(self, query: Query) -> None:
        seen: set[int] = set()
        for batch in query.batches:
            ids = {row["txn_id"] for row in flat(batch)} - {None}
            assert not ids & seen
            seen |= ids


Expected = dict[int, list[tuple[int, bytes]]]


def by_partition(consumer: txnkv.Consumer) -> Expected:
    found: Expected = {number: [] for number in range(PARTITIONS)}
    while given := consumer.poll(max_messages=50, timeout=0):
        for message in given:
            found[message.partition].append((message.offset, message.value or b""))
    return found


def given_of(query: Query) -> Expected:
    return split(query.rows())


def split(rows: list[dict[str, Any]]) -> Expected:
    found: Expected = {number: [] for number in range(PARTITIONS)}
    for row in rows:
        found[row["partition"]].append((row["offset"], row["value"]))
    return found


class SidecarStreamMachine(StreamMachine):
    buffer = "sidecar"


class Served(StreamMachine):
    """The queries go over a server."""

    def reached(self, path: str) -> dict[str, str]:
        self.server = Server(path, "grpc://127.0.0.1:0")
        return {"path": f"grpc://127.0.0.1:{self.server.port}", "direct": "false"}

    def leave(self) -> None:
        self.server.close()


class ServedStreamMachine(Served, StreamMachine):
    pass


class ServedSidecarStreamMachine(Served, SidecarStreamMachine):
    pass


QUICK = settings(
    max_examples=15,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("machine", [StreamMachine, SidecarStreamMachine])
def test_streams_against_consumers(machine: Any) -> None:
    run_state_machine_as_test(machine, settings=QUICK)


@pytest.mark.slow
@pytest.mark.parametrize(
    "machine",
    [StreamMachine, SidecarStreamMachine, ServedStreamMachine, ServedSidecarStreamMachine],
)
def test_streams_against_consumers_long(machine: Any) -> None:
    run_state_machine_as_test(machine, settings=settings(QUICK, max_examples=400))
