"""Kafka's tests of consumers, as its FetcherTest, CompletedFetchTest and TransactionsTest have
them: logs put down batch by batch, with their offsets.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

import txnkv
from tests.topics.log_tools import ABORT, COMMIT, FILLER, data, marker, script
from tests.topics.reading_tools import given, offsets, partition_of, put, uncounted
from tools.topic_writers import abort, begin, commit, send
from txnkv import core

P1, P2, PID = 1, 2, 1000
LEVELS = ("read_committed", "read_uncommitted")


@pytest.fixture
def topic(client: txnkv.Client) -> Any:
    return client.create_topic("events")


def counts(topic: Any) -> tuple[int, int]:
    """Return how many messages a committed and an uncommitted consumer are given."""
    committed, uncommitted = (len(offsets(topic.consumer(isolation=level))) for level in LEVELS)
    return committed, uncommitted


# -- LSO tables ------------------------------------------------------------------------


def test_fetch_up_to_last_stable_offset(client: txnkv.Client, topic: Any) -> None:
    """UnifiedLogTest.testFetchUpToLastStableOffset."""
    put(client, topic, *[data(P1)] * 5, *[data()] * 3, *[data(P2)] * 2)
    put(client, topic, *[data(P1)] * 4, *[data()] * 2, *[data(P1)] * 10)
    assert_fetches(topic, lso=0, end=26)
    put(client, topic, marker(COMMIT, P1))
    assert_fetches(topic, lso=8, end=27)
    put(client, topic, marker(ABORT, P2))
    assert_fetches(topic, lso=28, end=28)


def assert_fetches(topic: Any, lso: int, end: int) -> None:
    for offset in range(end + 1):
        found = topic.fetch(0, offset)
        assert (found.last_stable_offset, found.high_watermark) == (lso, end)
        assert bool(found.records) == (offset < lso), offset
        assert bool(topic.fetch(0, offset, isolation="read_uncommitted").records) == (offset < end)
    with pytest.raises(txnkv.OffsetOutOfRangeError):
        topic.fetch(0, end + 1)


def test_first_unstable_offset(client: txnkv.Client, topic: Any) -> None:
    """ProducerStateManagerTest.testFirstUnstableOffset."""
    steps = [
        (data(n=99), 99), (data(P1), 99), (data(n=5), 99), (data(P2), 99), (data(n=3), 99),
        (marker(COMMIT, P1), 105), (data(n=2), 105), (marker(ABORT, P2), 113),
    ]  # fmt: skip
    for batch, lso in steps:
        put(client, topic, batch)
        assert topic.last_stable_offsets() == {0: lso}
    assert topic.end_offsets() == {0: 113}


def test_the_example_of_the_design(client: txnkv.Client, topic: Any) -> None:
    """Fetch 0-4 gives P2 at 2; fetch 5-8 gives P2 at 2 and P1 at 6."""
    put(client, topic, *script("P1 P1 P2 C1 P2 A2 P1 P2 P1 A1 C2"))
    size = len(topic.fetch(0, 0, max_bytes=1).records)
    first = topic.fetch(0, 0, max_bytes=_bytes_of(topic, 0, 5))
    assert first.aborted == [(P2, 2)]
    second = topic.fetch(0, 5, max_bytes=_bytes_of(topic, 5, 9))
    assert second.aborted == [(P2, 2), (P1, 6)]
    assert size < len(first.records)
    assert (first.last_stable_offset, first.high_watermark) == (11, 11)


def _bytes_of(topic: Any, first: int, end: int) -> int:
    batches = [topic.fetch(0, offset, max_bytes=1).records for offset in range(first, end)]
    return sum(core.read_header(batch).decoded_bytes for batch in batches)


# -- FetcherTest, CompletedFetchTest ---------------------------------------------------


def test_aborted_transaction_records_removed(client: txnkv.Client, topic: Any) -> None:
    """And returnAbortedTransactionsInUncommittedMode, skippingAbortedTransactions."""
    put(client, topic, data(PID, 10), marker(ABORT, PID))
    assert topic.fetch(0, 0).aborted == [(PID, 0)]
    assert topic.fetch(0, 0, isolation="read_uncommitted").aborted is None
    assert counts(topic) == (0, 10)


def test_committed_transaction_records_included(client: txnkv.Client, topic: Any) -> None:
    """And returnCommittedTransactions."""
    put(client, topic, data(PID, 10), marker(COMMIT, PID))
    assert counts(topic) == (10, 10)


def test_read_committed_with_committed_and_aborted_transactions(
    client: txnkv.Client, topic: Any
) -> None:
    values = [
        data(P1, 2, values=[b"commit1-1", b"commit1-2"]), data(P2, values=[b"abort2-1"]),
        marker(COMMIT, P1), data(P2, values=[b"abort2-2"]), marker(ABORT, P2),
        data(P1, values=[b"abort1-1"]), data(P2, values=[b"commit2-1"]),
        data(P1, values=[b"abort1-2"]), marker(ABORT, P1), marker(COMMIT, P2),
    ]  # fmt: skip
    put(client, topic, *values)
    assert topic.fetch(0, 0).aborted == [(P2, 2), (P1, 6)]
    assert given(topic.consumer()) == [(0, b"commit1-1"), (1, b"commit1-2"), (7, b"commit2-1")]
    assert given(topic.consumer(), most=1) == [
        (0, b"commit1-1"), (1, b"commit1-2"), (7, b"commit2-1")
    ]  # fmt: skip


def test_consumer_position_updated_when_skipping_aborted_transactions(
    client: txnkv.Client, topic: Any
) -> None:
    put(client, topic, data(P1, 2), marker(ABORT, P1))
    consumer = topic.consumer()
    assert consumer.poll(timeout=0) == []
    assert consumer.position(0) == 3


def test_empty_control_batch(client: txnkv.Client, topic: Any) -> None:
    """A marker of a transaction that has nothing here, then two messages and their commit."""
    put(client, topic, marker(COMMIT, P1), data(P1, 2), marker(COMMIT, P1))
    assert offsets(topic.consumer()) == [1, 2]


def test_update_position_on_empty_batch(client: txnkv.Client, topic: Any) -> None:
    """A batch from 37 to 54 that holds nothing."""
    put(client, topic, data(n=37), marker(FILLER, offsets=18))
    consumer = topic.consumer(start={0: 37})
    assert offsets(consumer) == []
    assert consumer.position(0) == 55


def test_update_position_with_last_record_missing_from_batch(
    client: txnkv.Client, topic: Any
) -> None:
    put(client, topic, uncounted(data(n=3), 4))
    consumer = topic.consumer()
    assert offsets(consumer) == [0, 1, 2]
    assert consumer.position(0) == 4


def test_fetcher_ignores_control_records(client: txnkv.Client, topic: Any) -> None:
    put(client, topic, data(P1), marker(COMMIT, P1))
    for level in LEVELS:
        consumer = topic.consumer(isolation=level)
        assert offsets(consumer) == [0]
        assert consumer.position(0) == 2


def test_read_committed_lag_metric(client: txnkv.Client, topic: Any) -> None:
    put(client, topic, data(n=50), data(P1, 50))
    consumer = topic.consumer()
    assert (topic.end_offsets(), topic.last_stable_offsets()) == ({0: 100}, {0: 50})
    assert consumer.lag() == 50
    assert len(consumer.poll(max_messages=3, timeout=0)) == 3
    put(client, topic, marker(COMMIT, P1), data(n=49), data(P2, 50))
    assert (topic.end_offsets(), topic.last_stable_offsets()) == ({0: 200}, {0: 150})
    assert consumer.lag(0) == 147
    assert topic.consumer(isolation="read_uncommitted").lag() == 200
    put(client, topic, marker(COMMIT, P2))


# -- TransactionsTest ------------------------------------------------------------------


def test_basic_transactions(client: txnkv.Client) -> None:
    """Abort 2, commit 2: committed consumer 2, uncommitted 4."""
    topic = client.create_topic("topic", partitions=2)
    first, second = (partition_of(client, topic, number) for number in (0, 1))
    aborted = begin(client)
    send(client, aborted, first, [b"2"])
    send(client, aborted, second, [b"4"])
    abort(client, aborted)
    committed = begin(client)
    send(client, committed, first, [b"1"])
    send(client, committed, second, [b"3"])
    commit(client, committed)
    assert {m.value for m in topic.consumer().poll(timeout=0)} == {b"1", b"3"}
    assert counts(topic) == (2, 4)


def test_read_committed_consumer_does_not_see_undecided_data(client: txnkv.Client) -> None:
    topic = client.create_topic("topic", partitions=2)
    for number in (0, 1):
        put(client, topic, data(P2), data(P1), data(P1), data(P2), number=number)
        # P2 commits what it sent first, P1 stays open
        put(client, topic, marker(COMMIT, P2), number=number)
    committed = topic.consumer()
    assert sorted((m.partition, m.offset) for m in committed.poll(timeout=0)) == [(0, 0), (1, 0)]
    latest = topic.consumer(start="latest")
    assert [latest.position(number) for number in (0, 1)] == [1, 1]
    latest.seek_to_time(datetime.fromtimestamp(0.001, UTC))  # all are of this time: the first
    assert [latest.position(number) for number in (0, 1)] == [0, 0]
    put(client, topic, data(P1, time=5_000_000))
    latest.seek_to_time(datetime.fromtimestamp(4, UTC))  # offsetsForTimes null: it is undecided
    assert [latest.position(number) for number in (0, 1)] == [1, 1]
    assert counts(topic) == (2, 9)
    for number in (0, 1):
        put(client, topic, marker(ABORT, P1), number=number)


def test_delayed_fetch_includes_aborted_transaction(client: txnkv.Client, topic: Any) -> None:
    put(client, topic, data(P2), data(P1), data(P1), data(P2))
    put(client, topic, marker(ABORT, P1), marker(COMMIT, P2))
    found = topic.fetch(0, 0, max_bytes=100_000)
    assert found.aborted == [(P1, 1)]
    assert offsets(topic.consumer()) == [0, 3]


def test_fencing_on_transaction_expiration(client: txnkv.Client, by_hand: Any, now: Any) -> None:
    """One record in the uncommitted view, none in the committed one."""
    topic = client.create_topic("topic")
    partition = partition_of(client, topic)
    row = begin(client, timeout=60)
    send(client, row, partition, [b"1"])
    now.forward(61)
    by_hand(client)
    with pytest.raises(txnkv.InvalidTxnStateError, match="timeout"):
        send(client, row, partition, [b"2"])
    assert counts(topic) == (0, 1)


def test_multiple_markers_one_leader(client: txnkv.Client) -> None:
    """20 partitions, 10,000 messages aborted and 1,000 committed."""
    topic = client.create_topic("topic", partitions=20)
    for number in range(20):
        put(client, topic, data(P1, 500), marker(ABORT, P1), number=number)
        put(client, topic, data(P2, 50), marker(COMMIT, P2), number=number)
    assert counts(topic) == (1000, 11000)
