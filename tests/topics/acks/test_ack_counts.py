"""Acks as people see them: who holds which message, lag, counts; pieces of large messages."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import txnkv
from tests import internals
from tests.topics.acks.ack_tools import COUNT, TAKE_CUMULATIVE, Acks
from tests.topics.reading_tools import offsets, partition_of
from txnkv.topics import held_messages
from txnkv.topics.acks import ack_rows
from txnkv.topics.acks.ack_rows import Cursor
from txnkv.topics.messages.message import MessageId
from txnkv.topics.ranges import Ranges
from txnkv.topics.read.offset_reader import OffsetReader
from txnkv.topics.retention import count_unacknowledged
from txnkv.topics.topic_catalog import TopicOptions

# -- what people see -------------------------------------------------------------------


def test_who_holds_which_message(acks: Acks) -> None:
    a = acks.begin("A")
    acks.ack(1, a)
    acks.sub.nack(acks.messages[4])
    found = held_messages(internals.topics(acks.client), acks.sub.info)
    states = {each.first: (each.state, each.pid) for each in found.held}
    pending = ("pending", None if "A" in acks._stored else os.getpid())
    if (
        internals.topics(acks.client).local.exclusive(acks.sub.info.id) is None
    ):  # counted, or shared
        leased = ("leased", os.getpid())
        free = ("free", None)
        assert states == {0: leased, 1: pending, 2: leased, 3: leased, 4: free, 5: leased}
    else:
        assert states == ({1: pending} if "A" in acks._stored else {})
    shared = acks.sub.info.type == "shared"
    assert found.consumer_pid == (None if shared else os.getpid())
    assert {each.txn_id for each in found.held} <= {a.id, None}
    seen = acks.client.stats()["topics"]["events"]["subscriptions"]["s"]
    assert (seen["lag"], seen["type"]) == (6, acks.sub.info.type)
    a.rollback()


def test_lag_is_0_when_all_is_done(acks: Acks) -> None:
    """Markers and aborted messages behind the last one were counted."""
    for end in ("rollback", "commit"):
        txn = acks.client.new_transaction()
        txn.serialize()
        txn.send("events", b"6")
        getattr(txn, end)()
    last = acks.sub.receive(timeout=0)
    assert last is not None
    acks.sub.ack(acks.messages)
    assert acks.sub.lag()[0] > 0
    acks.sub.ack(last)
    assert acks.sub.lag() == {0: 0}


@pytest.mark.parametrize("reads", [{"order": "commit"}, {"isolation": "read_uncommitted"}])
def test_lag_counts_what_is_given_behind_an_open_transaction(
    client: txnkv.Client, reads: dict[str, Any]
) -> None:
    """It was 0, and then they were received."""
    topic = client.create_topic("numbers")
    open_one = client.new_transaction()
    open_one.send(topic, b"open")
    open_one.serialize()
    with client.transaction() as txn:
        for number in range(3):
            txn.send(topic, b"%d" % number)
    with topic.subscribe("s", **reads) as sub:
        assert sub.lag() == {0: 4}
        sub.ack([each for each in sub.receive_many(4) if each.value != b"open"])
        assert sub.lag() == {0: 1}
        open_one.rollback()
        if reads == {"order": "commit"}:
            assert sub.lag() == {0: 0}


@pytest.fixture
def mixed(client: txnkv.Client) -> txnkv.Topic:
    """A topic of messages, large ones, markers and what was aborted, all in short batches."""
    internals.topics(client).create("mixed", 1, "marker", TopicOptions(max_message_bytes=100))
    chosen = random.Random(1)
    for _ in range(60):
        txn = client.new_transaction()
        txn.serialize()
        for _ in range(chosen.randint(1, 4)):
            txn.send("mixed", b"x" * chosen.choice([1, 9, 300]))
            txn.flush()
        (txn.commit if chosen.random() < 0.5 else txn.rollback)()
    with client.new_session() as session:
        for _ in range(50):
            session.send("mixed", b"s")
    return client.topic("mixed")


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
@given(seed=st.integers(0, 1 << 30), mark=st.integers(0, 300), last=st.integers(0, 300))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_left_counts_from_the_first_message_of_each_gap_on(
    client: txnkv.Client, mixed: txnkv.Topic, isolation: Any, seed: int, mark: int, last: int
) -> None:
    partition, end = partition_of(client, mixed), mixed.end_offsets()[0]
    with mixed.consumer(isolation=isolation) as consumer:
        messages = offsets(consumer)
    chosen, last = random.Random(seed), min(last, end)
    at = [chosen.randint(mark, end + 20) for _ in range(chosen.choice([0, 1, 10, 100]))]
    deleted = Ranges((first, first + chosen.choice([1, 2, 20])) for first in at)
    left = Ranges([(mark, last)]).minus(deleted)
    begun = [
        (next((at for at in messages if first <= at < last), last), last) for first, last in left
    ]
    cursor = Cursor(mark, deleted)
    found = count_unacknowledged(internals.topics(client), partition, cursor, 0, last, isolation)
    assert found == sum(last - first for first, last in begun)


def topic_of(client: txnkv.Client, messages: int) -> txnkv.Topic:
    topic = client.create_topic("many")
    with client.transaction() as txn:
        for _ in range(messages):
            txn.send(topic, b"x")
    return topic


def test_gaps_in_the_same_messages_are_counted_by_one_look(
    client: txnkv.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for each of them made a large subscription's lag a matter of minutes."""
    topic = topic_of(client, 1200)
    sub = topic.subscribe("s", "shared")
    messages = sub.receive_many(1200, timeout=0)
    looks: list[OffsetReader] = []
    load = OffsetReader.load
    monkeypatch.setattr(
        OffsetReader, "load", lambda self, **kw: looks.append(self) or load(self, **kw)
    )
    seen = []
    for gaps in (100, 400):
        sub.ack(messages[1 : 2 * gaps : 2])
        looks.clear()
        assert sub.lag() == {0: 1200 - gaps}
        seen.append(len(looks))
    assert seen == [1, 1]


def test_gaps_are_found_in_numbers_not_in_what_arrow_makes_of_each(
    client: txnkv.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Whole:
        """Offsets that are not to be had one by one."""

        def __init__(self, rows: pa.RecordBatch) -> None:
            padded = pa.concat_arrays([pa.array([7] * 3, pa.uint64()), rows.column("offset")])
            self._offsets = padded.slice(3)  # so it may lie
            self.offset, self.buffers = self._offsets.offset, self._offsets.buffers

        def __len__(self) -> int:
            return len(self._offsets)

        def column(self, name: str) -> Whole:
            assert name == "offset"
            return self

    topic = topic_of(client, 100)
    partition, take = partition_of(client, topic), OffsetReader.take
    cursor = Cursor(0, Ranges((at, at + 1) for at in range(1, 100, 2)))
    monkeypatch.setattr(OffsetReader, "take", lambda *args: Whole(take(*args)))
    asked = (internals.topics(client), partition, cursor, 0, 100, "read_committed")
    assert count_unacknowledged(*asked) == 50


def test_an_ack_looks_at_no_pending_acks_beside_it(
    client: txnkv.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = topic_of(client, 60)
    sub = topic.subscribe("s", "shared")
    *held, last = sub.receive_many(60, timeout=0)
    open_ones = [client.new_transaction() for _ in held]
    for txn, message in zip(open_ones, held, strict=True):
        txn.ack(sub, message)
    looks: list[Any] = []
    lives = ack_rows._lives
    monkeypatch.setattr(ack_rows, "_lives", lambda *args: looks.append(args) or lives(*args))
    sub.ack(last)
    assert looks == []
    sub.ack(held[7:9])  # what is pending stays so
    assert len(looks) == 2
    open_ones[7].rollback()
    (again,) = sub.receive_many(60, timeout=0)
    assert again.offset == held[7].offset
    sub.ack(again)
    for txn in open_ones[:7] + open_ones[8:]:
        txn.commit()
    assert sub.lag() == {0: 0}


def test_redeliveries_are_counted(acks: Acks) -> None:
    assert [m.redelivery_count for m in acks.messages] == [0] * COUNT
    for count in (1, 2):
        acks.sub.nack(acks.messages[2])
        (again,) = acks.sub.receive_many(10, timeout=0)
        assert (again.offset, again.redelivery_count) == (2, count)
    a = acks.begin("A")
    acks.ack(2, a)
    a.rollback()
    (again,) = acks.sub.receive_many(10, timeout=0)
    assert again.redelivery_count == 3
    assert again == acks.messages[2]
    metrics = acks.client.metrics()
    assert (metrics["messages_delivered"], metrics["messages_redelivered"]) == (COUNT + 3, 3)
    other, late = acks.begin("A"), acks.begin("B")
    acks.ack(1, other)
    acks.refused(acks.ack, 1, late)
    assert acks.client.metrics()["ack_conflicts"] == 1
    other.rollback()


def test_messages_sent_and_acknowledged_are_counted(acks: Acks) -> None:
    """Once each, whatever becomes of the transaction."""
    metrics = acks.client.metrics

    def counts() -> tuple[int, int]:
        found = metrics()
        return found["messages_sent"], found["messages_acked"]

    assert counts() == (COUNT, 0)
    with acks.begin("A") as a:
        acks.sub.ack(acks.messages[:2], a)
        a.send("events", b"6")
    acks.ack(2)
    assert counts() == (COUNT + 1, 3)
    b = acks.begin("B")
    acks.ack(3, b)
    b.send("events", b"7")
    b.flush()
    b.rollback()
    assert counts() == (COUNT + 2, 4)
    with acks.topic.producer() as producer:
        producer.send(b"8")
    with acks.client.new_session() as session:
        session.send("events", b"9")
        session.ack(acks.sub, acks.messages[4])
        session.send_batch("events", pa.table({"value": [b"10", b"11"]}))
    assert counts() == (COUNT + 6, 5)


@pytest.mark.parametrize(("by", "who"), [("A", "by this transaction"), ("B", "by .*transaction")])
def test_who_has_acknowledged_a_message_is_told(acks: Acks, by: str, who: str) -> None:
    """One that had done so itself was sent to look for another."""
    a = acks.begin("A")
    first = a if by == "A" else acks.begin("B")
    acks.ack(1, first)
    with pytest.raises(txnkv.AckConflictError, match=f"message 0:1 is acknowledged {who}") as told:
        acks.ack(1, a)
    assert ("this transaction" in str(told.value)) == (first is a)
    first.rollback()


@TAKE_CUMULATIVE
def test_a_message_below_its_own_cumulative_ack_is_its_own(acks: Acks) -> None:
    a = acks.begin("A")
    acks.ack_to(2, a)
    with pytest.raises(txnkv.AckConflictError, match="acknowledged by this transaction"):
        acks.ack(1, a)


# -- large messages --------------------------------------------------------------------


@pytest.fixture(params=["plainly", "in a transaction"])
def large(
    request: pytest.FixtureRequest, client: txnkv.Client, type: str
) -> Callable[..., list[int]]:
    """Acknowledges offsets 0 (a), 1 to 3 (a large message in pieces) or 4 (b); answers what a new
    consumer gets.
    """
    internals.topics(client).create("large", 1, "marker", TopicOptions(max_message_bytes=1000))
    topic = client.topic("large")
    options: Any = {"max_deliveries": 1000} if type == "counted" else {"type": type}
    with client.transaction() as txn:
        for value in ("a", "L" * 2500, "b"):
            txn.send("large", value)

    def left(how: str, *offsets: int) -> list[int]:
        ids = [MessageId(0, offset) for offset in offsets]
        with topic.subscribe("s", **options) as sub:
            sub.receive_many(9, timeout=0)
            if request.param == "plainly":
                getattr(sub, how)(ids)
            else:
                with client.transaction() as txn:
                    getattr(txn, how)(sub, ids)
        with topic.subscribe("s", **options) as sub:
            return sorted(message.offset for message in sub.receive_many(9, timeout=0))

    return left


def test_an_ack_of_a_piece_is_of_no_message(large: Callable[..., list[int]]) -> None:
    assert large("ack", 1) == [0, 3, 4]
    assert large("ack", 0, 2) == [3, 4]
    assert large("ack", 3) == [4]


@TAKE_CUMULATIVE
@pytest.mark.parametrize("piece", [1, 2])
def test_a_cumulative_ack_of_a_piece_is_of_the_messages_before(
    large: Callable[..., list[int]], piece: int
) -> None:
    """The cursor stands inside of the large message, which was left out then."""
    assert large("ack_cumulative", piece) == [3, 4]
    assert large("ack_cumulative", 3) == [4]


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("how", ["ack", "ack_cumulative"])
def test_small_messages_before_a_large_one_come_again(
    client: txnkv.Client, type: str, stored: bool, how: str
) -> None:
    """Only the large one did, and a cumulative ack of what came next lost the others."""
    internals.topics(client).create("large", 1, "marker", TopicOptions(max_message_bytes=100))
    topic = client.topic("large")
    options: Any = {"max_deliveries": 1000} if type == "counted" else {"type": type}
    values = [b"a", b"b", b"x" * 1000, b"c"]
    with client.transaction() as txn:
        for value in values:
            txn.send(topic, value)
    sub = topic.subscribe("s", **options)
    messages = sub.receive_many(9, timeout=0)
    a = client.new_transaction()
    if stored:
        a.serialize()
    if how == "ack_cumulative" and type != "shared":
        a.ack_cumulative(sub, messages[2])
    else:
        a.ack(sub, messages[:3])
    a.rollback()
    assert [m.value for m in sub.receive_many(9, timeout=0)] == values[:3]
    sub.ack(messages[3])
    sub.close()
    again = topic.subscribe("s", **options)
    assert [m.value for m in again.receive_many(9, timeout=0)] == values[:3]
