"""Cases of Kafka's and Pulsar's tests that no other file of these tests has; each names its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import txnkv
from tests.topics.log_tools import (
    ABORT,
    COMMIT,
    FILLER,
    Log,
    LogOptions,
    data,
    marker,
    script,
)
from tests.topics.reading_tools import drained, given, offsets, put, uncounted
from tools.topic_contents import raw, stored
from tools.topic_writers import abort, begin, commit, create, send, small
from txnkv import core
from txnkv.topics.log.log_state import SNAPSHOTS, Snapshots
from txnkv.topics.log.partition_state import OpenTxn

EVERY_CHANGE = LogOptions(snapshot_changes=1, snapshot_seconds=1e9)


def snapshots(log: Log) -> list[int]:
    with log.environment.read() as txn:
        return Snapshots(txn, log.environment.db(SNAPSHOTS)).offsets()


# -- Kafka: ProducerStateManagerTest, UnifiedLogTest -------------------------------------


@pytest.mark.parametrize(
    ("operation", "offset", "left"),
    [
        ("truncate", 5, [0, 1, 2, 3, 4, 5]),
        ("truncate", 3, [0, 1, 2, 3]),
        ("truncate", 0, [0]),
        ("advance_start", 7, []),  # testTruncateFullyAndStartAt: all goes
    ],
)
def test_snapshots_out_of_range_are_removed(
    tmp_path: Path, operation: str, offset: int, left: list[int]
) -> None:
    """Peers: testTruncateAndReloadRemovesOutOfRangeSnapshots, testProducerIdMapTruncateTo."""
    with Log(tmp_path, EVERY_CHANGE) as log:
        log.append(*script("P1 P2 P3 P4 P5"))
        assert snapshots(log) == [0, 1, 2, 3, 4, 5]
        log.write(operation, offset)
        assert snapshots(log) == left


def test_snapshots_below_the_start_are_removed(tmp_path: Path) -> None:
    """Peers: testDeleteSnapshotsBefore, testLogStartOffsetMovementDeletesSnapshots."""
    with Log(tmp_path, EVERY_CHANGE) as log:
        for _ in range(2):
            log.append(*script("P1 C1"))
            log.write("roll")
        log.append(*script("P2"))
        for start, left in ((1, [0, 2, 3, 4, 5]), (2, [2, 3, 4, 5]), (4, [4, 5])):
            log.write("advance_start", start)
            assert snapshots(log) == left


@pytest.mark.parametrize(
    ("words", "opened"),
    [
        ("P1 P1", {1: 0}),  # testRecoverFromSnapshotUnfinishedTransaction
        ("P1 P1 A1", {}),  # testRecoverFromSnapshotFinishedTransaction
        ("A1", {}),  # testRecoverFromSnapshotEmptyTransaction
    ],
)
def test_recover_from_snapshot(tmp_path: Path, words: str, opened: dict[int, int]) -> None:
    with Log(tmp_path, EVERY_CHANGE) as log:
        log.append(*script(words))
        end = log.end
        log.write("roll")  # takes a snapshot
        log.append(*script("P7 P8 C7"))
        log.reopen()
        log.write("truncate", end)
        assert log.open_firsts() == opened
        assert log.lso == min(opened.values(), default=end)
        log.append(*script("P1 C1"))
        assert log.lso == end + 2


@pytest.mark.parametrize(
    ("step", "left"),
    [
        (("reopen",), [39, 57]),
        (("truncate", 1), [39]),
        (("truncate", 0), []),
        (("advance_start", 150), []),
    ],
)
def test_since_when_a_transaction_is_open(
    tmp_path: Path, step: tuple[Any, ...], left: list[int]
) -> None:
    """Peers: testHasLateTransaction and its variants; how long the oldest has been open."""
    with Log(tmp_path) as log:
        log.append(data(39, time=100_000), data(57, time=600_000))
        if step == ("reopen",):
            log.reopen()
        else:
            log.write(*step)
        since = [OpenTxn(39, 0, 100_000), OpenTxn(57, 1, 600_000)]
        assert log.ask("open_transactions") == since[: len(left)]


def test_a_new_name_raises_the_epoch_by_one(client: txnkv.Client) -> None:
    """Peer: testFailureToFenceEpoch."""
    topic = client.create_topic("events")
    for _ in range(3):
        with topic.producer("billing") as producer:
            producer.send("x").result(timeout=60)
    epochs = [one.header.epoch for one in stored(client, "events")]
    assert epochs == [epochs[0], epochs[0] + 1, epochs[0] + 2]
    assert len({one.header.producer_id for one in stored(client, "events")}) == 1


# -- Kafka: FetcherTest, CompletedFetchTest, TransactionsTest ----------------------------


@pytest.mark.parametrize(
    ("batches", "read", "position"),
    [
        # ConsumerPositionUpdatedWhenSkippingAbortedTransactions
        ([data(1, 2), marker(ABORT, 1)], [], 3),
        # EmptyControlBatch: of a transaction that has nothing here
        ([marker(COMMIT, 1), data(1, 2), marker(COMMIT, 1)], [1, 2], 4),
        # UpdatePositionOnEmptyBatch: a batch that holds nothing
        ([data(), marker(FILLER, offsets=18)], [0], 19),
        # UpdatePositionWithLastRecordMissingFromBatch
        ([uncounted(data(n=3), 4)], [0, 1, 2], 4),
        # FetcherIgnoresControlRecords
        ([data(1), marker(COMMIT, 1)], [0], 2),
    ],
)
def test_positions_behind_what_is_no_message(
    client: txnkv.Client, batches: list[bytes], read: list[int], position: int
) -> None:
    topic = client.create_topic("events")
    put(client, topic, *batches)
    consumer, uncommitted = topic.consumer(), topic.consumer("read_uncommitted")
    assert offsets(consumer) == read
    assert consumer.position(0) == position
    assert offsets(uncommitted) == (read or [0, 1])
    assert uncommitted.position(0) == position


def test_the_example_of_the_design(client: txnkv.Client) -> None:
    """Fetch 0-4 gives P2 at 2; fetch 5-8 gives P2 at 2 and P1 at 6."""
    topic = client.create_topic("events")
    put(client, topic, *script("P1 P1 P2 C1 P2 A2 P1 P2 P1 A1 C2"))

    def fetch(first: int, end: int) -> Any:
        batches = [topic.fetch(0, offset, max_bytes=1).records for offset in range(first, end)]
        size = sum(core.read_header(batch).decoded_bytes for batch in batches)
        return topic.fetch(0, first, max_bytes=size)

    assert fetch(0, 5).aborted == [(2, 2)]
    assert fetch(5, 9).aborted == [(2, 2), (1, 6)]
    assert (fetch(0, 5).last_stable_offset, fetch(0, 5).high_watermark) == (11, 11)
    assert topic.fetch(0, 0, isolation="read_uncommitted").aborted is None


def test_lag_ends_at_the_last_stable_offset(client: txnkv.Client) -> None:
    """ReadCommittedLagMetric."""
    topic = client.create_topic("events")
    put(client, topic, data(n=50), data(1, 50))
    consumer = topic.consumer()
    assert (topic.end_offsets(), topic.last_stable_offsets()) == ({0: 100}, {0: 50})
    assert consumer.lag() == 50
    assert len(consumer.poll(max_messages=3, timeout=0)) == 3
    put(client, topic, marker(COMMIT, 1), data(n=49), data(2, 50))
    assert consumer.lag(0) == 147
    assert topic.consumer("read_uncommitted").lag() == 200
    put(client, topic, marker(COMMIT, 2))


def test_a_time_behind_the_last_stable_offset(client: txnkv.Client, large: None) -> None:
    """ReadCommittedConsumerShouldNotSeeUndecidedData, offsetsForTimes: it is not shown."""
    topic = client.create_topic("events")
    first = datetime(2026, 1, 1, tzinfo=UTC)
    with client.transaction() as txn:
        txn.send(topic, "a", timestamp=first)
    open_ = client.new_transaction()
    open_.send(topic, "b", timestamp=first + timedelta(hours=1))
    open_.flush()
    consumer = topic.consumer()
    consumer.seek_to_time(first + timedelta(minutes=1))
    assert consumer.poll(timeout=0) == []
    open_.commit()
    assert [message.value for message in consumer.poll(timeout=0)] == [b"b"]


# -- Pulsar: TransactionEndToEndTest, TransactionTest ------------------------------------


def test_committed_by_another_client(
    client: txnkv.Client, connect: Callable[..., txnkv.Client]
) -> None:
    """txnMetadataHandlerRecoverTest: 20 transactions of 10 messages, 200 visible."""
    topic = client.create_topic("events")
    tokens = []
    for number in range(20):
        txn = client.new_transaction()
        token = txn.serialize()
        for n in range(10):
            txn.send(topic, f"{number} {n}")
        txn.flush()
        tokens.append(token)
    assert drained(topic.consumer()) == []
    other = connect()
    for token in tokens:
        txnkv.Transaction.deserialize(other, token).commit()
    assert len({message.value for message in drained(topic.consumer())}) == 200


def test_plain_messages_take_no_snapshots(tmp_path: Path) -> None:
    """Peer: testNotChangeMaxReadPositionCountWhenCheckIfNoSnapshot; no transaction, no costs."""
    with Log(tmp_path, replace(EVERY_CHANGE, snapshot_seconds=0)) as log:
        log.append(*script("N " * 20 + "D5 " * 20))
        assert snapshots(log) == [0]  # that of the first segment


def test_nothing_to_be_had_is_not_waited_for(client: txnkv.Client, connect: Any) -> None:
    """Peers: testPersistentTopicGetLastDispatchablePositionWithTxn,
    testNoEntryCanBeReadWhenRecovery.
    """
    (partition,) = create(client)
    small(client, [partition], [b"normal"])
    row = begin(client)
    send(client, row, partition, [b"aborted"] * 5)
    abort(client, row)
    for one in (client, connect()):
        topic = one.topic("events")
        consumer = topic.consumer()
        assert given(consumer) == [(0, b"normal")]
        assert consumer.lag() == 0
        assert consumer.poll(timeout=0) == []
        assert topic.last_stable_offsets() == topic.end_offsets()


def test_internal_things_are_in_no_list(client: txnkv.Client, size: str) -> None:
    """Peer: testGetSubPatternTopicFilterTxnInternalTopic."""
    topic = client.create_topic("events", buffer="sidecar")
    subscription = topic.subscribe("s")
    with client.transaction() as txn:
        txn.send(topic, "a")
    message = subscription.receive(timeout=0)
    assert message is not None
    open_ = client.new_transaction()
    open_.send(topic, "b")
    open_.ack(subscription, message)
    open_.flush()
    assert client.topics() == ["events"]
    assert client.tables() == []
    open_.rollback()


@pytest.mark.parametrize("end", ["rollback", "nack"])
@pytest.mark.parametrize("at_once", [1, 2, 5, 6, 100])
@pytest.mark.parametrize("options", [{}, {"type": "shared"}, {"max_deliveries": 9}])
def test_all_that_came_back_is_delivered_whatever_is_asked_for(
    client: txnkv.Client, options: dict[str, Any], at_once: int, end: str
) -> None:
    """An abort gives more back than the consumer asks for next: none of it may be dropped."""
    topic = client.create_topic("events", partitions=2)
    subscription = topic.subscribe("s", **options)
    with client.transaction() as txn:
        for number in range(12):
            txn.send(topic, str(number), partition=number % 2)
    messages = subscription.receive_many(100, timeout=0)
    if end == "rollback":
        txn = client.new_transaction()
        txn.ack(subscription, messages)
        txn.rollback()
    else:
        for message in messages:
            subscription.nack(message)
    again: list[txnkv.Message] = []
    while some := subscription.receive_many(at_once, timeout=0):
        assert len(some) <= at_once
        again += some
    assert Counter(m.id for m in again) == Counter(m.id for m in messages)
    assert len(again) == 12


# -- Pulsar: TransactionProduceTest, TransactionConsumeTest, TransactionStablePositionTest ---


@pytest.mark.parametrize("end", [commit, abort])
def test_entries_carry_their_transaction_and_one_marker_ends_it(
    client: txnkv.Client, end: Callable[..., Any]
) -> None:
    """produceAndCommitTest, produceAndAbortTest."""
    partitions = create(client, partitions=3)
    row = begin(client)
    for n in range(30):
        send(client, row, partitions[n % 3], [b"%d" % n])
    end(client, row)
    for number in range(3):
        batches = raw(client, "events", number)
        found = [header for _, header in core.walk(batches)]
        assert {header.txn_id for header in found} == {row.txn_id}
        assert [header.is_control for header in found] == [False] * 10 + [True]
        marker = core.read_control(batches, core.walk(batches)[-1][0])
        assert marker.type.name == end.__name__.upper()
