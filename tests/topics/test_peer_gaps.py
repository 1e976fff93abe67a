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
from tests import internals
from tests.topics.log_tools import Log, LogOptions, data, script
from tests.topics.reading_tools import drained, given
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


# -- Kafka: TransactionsTest -----------------------------------------------------------


def test_offsets_in_transactions_that_commit_and_abort(client: txnkv.Client, size: str) -> None:
    """SendOffsetsWithGroupMetadata: 500 in, alternately aborted and committed, 500 out."""
    source, target = client.create_topic("in", 4), client.create_topic("out", 4)
    with client.new_session() as session:
        for number in range(500):
            session.send(source, str(number), key=str(number))
    subscription = source.subscribe("copier")
    turn = 0
    while messages := subscription.receive_many(20, timeout=0):
        txn = client.new_transaction()
        for message in messages:
            txn.send(target, message.value, key=message.key)
        txn.ack(subscription, messages)
        txn.commit() if turn % 2 else txn.rollback()
        turn += 1
    found = [message.value for message in drained(target.consumer())]
    assert Counter(found) == Counter(str(number).encode() for number in range(500))


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_an_empty_end_after_a_commit(client: txnkv.Client, size: str, end: str) -> None:
    """EmptyAbortAfterCommit."""
    topic = client.create_topic("events")
    with client.transaction() as txn:
        txn.send(topic, "a")
    empty = client.new_transaction()
    if size == "large":
        empty.serialize()
    getattr(empty, end)()
    with client.transaction() as txn:
        txn.send(topic, "b")
    assert [value for _, value in given(topic.consumer())] == [b"a", b"b"]


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


def test_one_committed_one_aborted_one_open(client: txnkv.Client) -> None:
    """Peer: testTopicTransactionMetrics."""
    (partition,) = create(client)
    rows = [begin(client) for _ in range(3)]
    for row in rows:
        send(client, row, partition, [b"x"])
    commit(client, rows[0])
    abort(client, rows[1])
    states = Counter(info.state.name for info in client.transactions())
    assert states == {"COMMITTED": 1, "ABORTED": 1, "OPEN": 1}


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


def test_ten_rounds_with_a_restart(connect: Callable[..., txnkv.Client]) -> None:
    """Peer: testSnapshotSegment; what is below an open one is read, what was aborted never."""
    expected: list[bytes] = []
    for number in range(10):
        client = connect()
        if number == 0:
            create(client)
        topic = client.topic("events")
        (partition,) = internals.topics(client).partitions(topic.info)
        rows = [begin(client) for _ in range(3)]
        committed, aborted, open_ = rows
        for row, word in zip(rows, (b"committed", b"aborted", b"open"), strict=True):
            send(client, row, partition, [word + b" %d" % number])
        abort(client, aborted)
        commit(client, committed)
        expected.append(b"committed %d" % number)
        small(client, [partition], [b"behind %d" % number])
        assert [value for _, value in given(topic.consumer())] == expected
        abort(client, open_)
        expected.append(b"behind %d" % number)
        assert [value for _, value in given(topic.consumer())] == expected
        client.close()


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


@pytest.mark.parametrize(("end", "after"), [(commit, "1 2 3"), (abort, "1 3")])
def test_the_stable_position(client: txnkv.Client, end: Callable[..., Any], after: str) -> None:
    """commitTxnTest, abortTxnTest, sortedTest: plain, in a transaction, plain."""
    (partition,) = create(client)
    topic = client.topic("events")
    small(client, [partition], [b"1"])
    row = begin(client)
    send(client, row, partition, [b"2"])
    small(client, [partition], [b"3"])
    consumer = topic.consumer()
    assert given(consumer) == [(0, b"1")]
    end(client, row)
    small(client, [partition], [b"4"])
    assert [m.value.decode() for m in drained(consumer)] == [*after.split()[1:], "4"]
