"""Topics whose options change, and those that are truncated by their users."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest

import txnkv
from tests import internals
from tools.topic_contents import raw
from tools.topic_writing import Writer
from txnkv.errors import NotSupportedError, OffsetOutOfRangeError, TopicNotFoundError
from txnkv.topics import retention
from txnkv.topics.topic_catalog import TopicOptions

TOPIC = "events"
LONG = b"the same again and again, " * 40


@pytest.fixture
def to(client: txnkv.Client, by_hand: None) -> Writer:
    """Nine messages in three segments or so."""
    writer = Writer(client, TOPIC, options=TopicOptions(segment_bytes=300))
    for number in range(9):
        writer.small(f"{number}".ljust(40, "."))
    return writer


def left(client: txnkv.Client, partition: int = 0) -> list[int]:
    with client.topic(TOPIC).consumer(partitions=[partition]) as consumer:
        found = consumer.poll(timeout=0)
    return [int((each.value or b"").rstrip(b".")) for each in found]


# -- options ---------------------------------------------------------------------------


def test_options(client: txnkv.Client, connect: Callable[..., txnkv.Client]) -> None:
    topic = client.create_topic("t", compression="lz4", retention_bytes=1000)
    other = connect().topic("t")
    assert topic.alter(retention_seconds=5.0, compression=None) == {
        "compression": None,
        "retention_seconds": 5.0,
        "retention_bytes": 1000,
        "retain_unacknowledged": False,
        "cleanup": "delete",
        "tombstone_seconds": 86400.0,
    }
    assert other.options == topic.options == client.topic("t").options
    assert topic.alter(retention_bytes=None)["retention_seconds"] == 5.0
    before = topic.info.options.altered
    topic.alter(retention_bytes=None)
    assert topic.info.options.altered == before
    same = client.create_topic("t", retention_seconds=5.0, exists_ok=True)
    assert same.info.id == topic.info.id
    with pytest.raises(txnkv.TopicExistsError, match="its retention_seconds is 5"):
        client.create_topic("t", exists_ok=True)


def test_in_another_process(client: txnkv.Client, elsewhere: Callable[..., Any]) -> None:
    topic = client.create_topic("t")
    elsewhere("say(client.topic('t').alter(compression='zstd', retain_unacknowledged=True))")
    assert topic.options["compression"] == "zstd"
    topic.alter(retention_bytes=7)
    assert elsewhere("say(client.topic('t').options)")["retention_bytes"] == 7


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"retention_seconds": -1}, ValueError, "retention_seconds is None or at least 0"),
    ({"retention_seconds": math.nan}, ValueError, "retention_seconds is None or at least 0"),
    ({"tombstone_seconds": math.nan}, ValueError, "tombstone_seconds is None or at least 0"),
    ({"compression": "gzip"}, ValueError, "compression is None, 'lz4' or 'zstd'"),
    ({"retain_unacknowledged": 1}, ValueError, "True or False"),
    ({"buffer": "sidecar"}, TypeError, "can be changed, not buffer"),
    ({"partitions": 0}, ValueError, "a topic has 1 to 1024 partitions, not 0"),
    ({"partitions": 1025}, ValueError, "a topic has 1 to 1024 partitions, not 1025"),
    ({"partitions": "4"}, ValueError, "partitions, not '4'"),
    ({"partitions": True}, ValueError, "partitions, not True"),
    ({"retention_seconds": False}, TypeError, "retention_seconds is a number of seconds"),
    ({"retention_bytes": False}, TypeError, "retention_bytes is a number of bytes"),
    ({"altered": 4}, TypeError, "can be changed, not altered"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG)
def test_refused(
    client: txnkv.Client, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    topic = client.create_topic("t")
    was = topic.options
    with pytest.raises(error, match=message):
        topic.alter(**changes)
    assert topic.options == was


def test_seconds_without_end(client: txnkv.Client) -> None:
    seconds: dict[str, Any] = {"retention_seconds": math.inf, "tombstone_seconds": math.inf}
    topic = client.create_topic("t", cleanup="compact", segment_seconds=1e300, **seconds)
    for _ in range(2):
        with client.transaction() as txn:
            txn.serialize()
            txn.send(topic, "v", key="k")
            txn.flush()
        client.compact()
        topic.alter(**seconds)
    assert [message.offset for message in topic.consumer().poll(timeout=0)] == [2]
    with pytest.raises(ValueError, match="segment_seconds is above 0, not nan"):
        client.create_topic("u", segment_seconds=math.nan)


def test_of_a_dropped_one(client: txnkv.Client) -> None:
    topic = client.create_topic("t", retention_bytes=3)
    client.drop_topic("t")
    client.create_topic("t")
    for call in (lambda: topic.alter(retention_bytes=4), lambda: topic.truncate("latest")):
        with pytest.raises(TopicNotFoundError, match="was dropped"):
            call()
    assert topic.options["retention_bytes"] == 3


@pytest.mark.parametrize("type", ["exclusive", "failover", "shared", "key_shared"])
def test_what_is_cut_off_counts_as_acknowledged(client: txnkv.Client, type: str) -> None:
    """`seek` to where all is acknowledged was refused: no such message was there any more."""
    topic = client.create_topic("t")
    client.run(lambda txn: [txn.send(topic, b"x") for _ in range(5)])
    with topic.subscribe("s", type=type) as subscription:
        topic.truncate(3)
        assert subscription.committed() == {0: 3}
        subscription.seek(0, subscription.committed()[0])
        found = subscription.receive(timeout=0)
        assert found is not None
        assert found.offset == 3


def test_later_messages_are_compressed(client: txnkv.Client) -> None:
    topic = client.create_topic(TOPIC)
    sizes = []
    for codec in (None, "lz4", "zstd", None):
        topic.alter(compression=codec)  # type: ignore[arg-type]
        before = len(raw(client, TOPIC))
        with client.transaction() as txn:
            txn.send(topic, LONG)
        internals.flush(client)
        sizes.append(len(raw(client, TOPIC)) - before)
    assert max(sizes[1:3]) < min(sizes[0], sizes[3]) / 2
    with topic.consumer() as consumer:
        assert [each.value for each in consumer.poll(timeout=0)] == [LONG] * 4


def test_retention_goes_by_what_a_topic_has_now(to: Writer) -> None:
    engine, topic = to.engine, to.client.topic(TOPIC)
    internals.flush(to.client)
    retention.enforce_all(engine)
    assert left(to.client) == list(range(9))
    topic.alter(retention_bytes=1)
    retention.enforce_all(engine)
    kept = left(to.client)
    assert 0 < len(kept) < 9
    to.small("9".ljust(300, "."))
    internals.flush(to.client)
    topic.alter(retention_bytes=None)
    retention.enforce_all(engine)
    assert left(to.client) == [*kept, 9]


def test_what_is_not_acknowledged_stays_from_then_on(to: Writer) -> None:
    topic = to.client.topic(TOPIC)
    with topic.subscribe("s") as subscription:
        subscription.ack_cumulative(subscription.receive_many(5, timeout=0)[-1])
    internals.flush(to.client)
    topic.alter(retain_unacknowledged=True, retention_bytes=1)
    retention.enforce_all(to.engine)
    assert left(to.client)[-4:] == [5, 6, 7, 8]
    topic.alter(retain_unacknowledged=False)
    retention.enforce_all(to.engine)
    assert len(left(to.client)) < 4


def test_a_copy_follows(client: txnkv.Client, tmp_path: Any) -> None:
    topic = client.create_topic(TOPIC)
    with txnkv.connect(tmp_path / "copy") as copy:
        txnkv.replicate(client, copy)
        topic.alter(compression="lz4", retention_bytes=9)
        txnkv.replicate(client, copy)
        there = copy.topic(TOPIC)
        assert there.options == topic.options
        with pytest.raises(NotSupportedError, match="alter topic 'events': it is a copy"):
            there.alter(retention_bytes=None)
        with pytest.raises(NotSupportedError, match="truncate topic 'events': it is a copy"):
            there.truncate("latest")


# -- truncated -------------------------------------------------------------------------


@pytest.mark.parametrize("buffer", ["marker", "sidecar"])
def test_what_is_below_an_offset_goes(
    client: txnkv.Client, connect: Callable[..., txnkv.Client], by_hand: None, buffer: str
) -> None:
    to = Writer(client, TOPIC, buffer=buffer, options=TopicOptions(segment_bytes=300))
    for number in range(12):
        if number % 4 == 3:
            txn = to.begin()
            to.append(txn, f"{number}".ljust(40, "."))
            to.commit(txn)
        else:
            to.small(f"{number}".ljust(40, "."))
    topic = client.topic(TOPIC)
    with topic.consumer() as consumer:
        offsets = [each.offset for each in consumer.poll(timeout=0)]
    behind = topic.consumer()
    for at, left_over in ((0, 12), (5, 7), (6, 6), (5, 6), (11, 1)):
        before = offsets[at]
        assert topic.truncate(before)[0] >= before
        assert left(client) == list(range(12 - left_over, 12))
        assert left(connect()) == list(range(12 - left_over, 12))
    with pytest.raises(OffsetOutOfRangeError):
        behind.poll(timeout=0)
    (end,) = topic.end_offsets().values()
    assert topic.truncate("latest") == {0: end}
    assert left(client) == []
    to.small("12")
    assert left(client) == [12]
    with to.partitions[0].environment.read() as txn:
        assert len(to.partitions[0].log.segments(txn)) <= 2
    assert client.check().ok


def test_of_several_partitions(client: txnkv.Client) -> None:
    topic = client.create_topic(TOPIC, partitions=3)
    with client.transaction() as txn:
        for number in range(9):
            txn.send(topic, b"%d" % number, partition=number % 3)
    with pytest.raises(ValueError, match="has 3 partitions: say which, as truncate"):
        topic.truncate(2)
    with pytest.raises(ValueError, match="there is no partition 3"):
        topic.truncate({3: 0})
    with pytest.raises(TypeError, match="an offset is a number"):
        topic.truncate({0: "2"})  # type: ignore[dict-item]
    assert topic.truncate({2: 1, 0: 3}) == {0: 3, 2: 1}
    assert [left(client, number) for number in range(3)] == [[], [1, 4, 7], [5, 8]]
    assert topic.truncate("latest") == {0: 3, 1: 3, 2: 3}


def test_an_offset_that_is_not_there(to: Writer) -> None:
    topic = to.client.topic(TOPIC)
    for offset in (-1, 10):
        with pytest.raises(OffsetOutOfRangeError, match=r"holds \[0, 9\): it cannot be truncated"):
            topic.truncate(offset)
    empty = to.client.create_topic("empty")
    assert empty.truncate(0) == empty.truncate("latest") == {0: 0}
    with pytest.raises(OffsetOutOfRangeError, match=r"holds \[0, 0\)"):
        empty.truncate(1)
    assert left(to.client) == list(range(9))


def test_what_is_not_decided_stays(to: Writer) -> None:
    topic = to.client.topic(TOPIC)
    txn = to.begin()
    to.append(txn, "9")
    to.small("10")
    with pytest.raises(OffsetOutOfRangeError, match="an open transaction has messages from 9 on"):
        topic.truncate(10)
    assert topic.truncate("latest") == {0: 9}
    to.commit(txn)
    assert left(to.client) == [9, 10]


def test_what_a_topic_keeps_for_a_subscription_stays(to: Writer) -> None:
    topic = to.client.topic(TOPIC)
    topic.alter(retain_unacknowledged=True)
    with topic.subscribe("s") as subscription:
        subscription.ack_cumulative(subscription.receive_many(4, timeout=0)[-1])
        with pytest.raises(OffsetOutOfRangeError, match="keeps what is not acknowledged, from 4"):
            topic.truncate(5)
        assert topic.truncate("latest") == {0: 4}
        rest = subscription.receive_many(9, timeout=0)
        assert [each.offset for each in rest] == [4, 5, 6, 7, 8]
        subscription.ack_cumulative(rest[-1])
    assert topic.truncate("latest") == {0: 9}


def test_what_a_subscription_loses_is_told(to: Writer, caplog: pytest.LogCaptureFixture) -> None:
    topic = to.client.topic(TOPIC)
    with topic.subscribe("s") as subscription:
        subscription.ack(subscription.receive_many(2, timeout=0)[1])
        with caplog.at_level(logging.WARNING, logger="txnkv"):
            topic.truncate(4)
        assert "truncation took messages below offset 4 that subscription 's'" in caplog.text
        assert subscription.lost() == {0: 3}
