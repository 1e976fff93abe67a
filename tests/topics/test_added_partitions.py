"""Partitions that are added to a topic which is being read and sent to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import txnkv
from tests import internals
from txnkv.client.replica import replicate
from txnkv.topics.messages.message_input import spread

TOPIC = "events"
BUFFERS = pytest.mark.parametrize("buffer", ["marker", "sidecar"])


@pytest.fixture
def topic(client: txnkv.Client) -> txnkv.Topic:
    """A topic of two partitions, with one message in each."""
    made = client.create_topic(TOPIC, partitions=2)
    send(client, 0, 1)
    return made


def send(client: txnkv.Client, *numbers: int, value: str = "in") -> None:
    """A message in each of these partitions, by one transaction."""
    with client.transaction() as txn:
        for number in numbers:
            txn.send(TOPIC, f"{value} {number}", partition=number)


def read(consumer: txnkv.Consumer) -> list[tuple[int, int]]:
    found = []
    while some := consumer.poll(timeout=0):
        found += [(each.partition, each.offset) for each in some]
    return sorted(found)


# -- the catalog -----------------------------------------------------------------------


def test_it_has_them_at_once_everywhere(
    client: txnkv.Client, topic: txnkv.Topic, connect: Callable[..., txnkv.Client]
) -> None:
    other = connect().topic(TOPIC)
    assert other.partitions == 2
    assert topic.alter(partitions=4, compression="lz4")["compression"] == "lz4"
    assert topic.partitions == other.partitions == client.topic(TOPIC).partitions == 4
    assert topic.end_offsets() == other.end_offsets() == {0: 1, 1: 1, 2: 0, 3: 0}
    before = topic.info.options.altered
    topic.alter(partitions=4)
    assert topic.info.options.altered == before
    with pytest.raises(ValueError, match="has 4 partitions: it can have more, not 3"):
        topic.alter(partitions=3, compression=None)
    assert other.options["compression"] == "lz4"
    client.drop_topic(TOPIC)
    assert topic.partitions == 4


def test_by_another_process(
    topic: txnkv.Topic, client: txnkv.Client, elsewhere: Callable[..., Any]
) -> None:
    consumer = topic.consumer()
    assert read(consumer) == [(0, 0), (1, 0)]
    elsewhere(
        "topic = client.topic('events')\n"
        "topic.alter(partitions=3)\n"
        "with client.transaction() as txn:\n"
        "    txn.send(topic, 'there', partition=2)\n"
    )
    assert read(consumer) == [(2, 0)]
    assert topic.partitions == 3


# -- those who send --------------------------------------------------------------------


def test_who_sends_spreads_over_all_of_them(client: txnkv.Client, topic: txnkv.Topic) -> None:
    """An open session and transaction, and one that is waiting: all of one count or the other."""
    session = client.new_session()
    with client.transaction() as txn:
        txn.send(topic, "early", key="k")
        session.send(TOPIC, "early", key="k")
        session.flush()
        topic.alter(partitions=16)
        txn.send(topic, "late", partition=15)
        session.send(TOPIC, "late", partition=14)
        session.flush()
    for number in range(40):
        session.send(TOPIC, b"%d" % number, key=b"%d" % number)
    session.close()
    ends = topic.end_offsets()
    assert ends[14] >= 1 <= ends[15]
    assert sum(end > 0 for end in ends.values()) > 10
    places = {each.key: each.partition for each in topic.consumer().poll(timeout=0)}
    assert places[b"7"] == partition_of(b"7", 16)


def partition_of(key: bytes, partitions: int) -> int:
    import pyarrow as pa

    from txnkv.topics import Outgoing

    messages = pa.record_batch({"value": pa.array([b""]), "key": pa.array([key])})
    return spread(Outgoing(messages, None), partitions, 0)[0][0]


def test_producers_follow(client: txnkv.Client, topic: txnkv.Topic) -> None:
    with topic.producer("p") as named, topic.producer() as plain:
        for producer in (named, plain):
            producer.send("early", key="k").result()
        with pytest.raises(ValueError, match="there is no partition 2"):
            named.send("too early", partition=2)
        topic.alter(partitions=8)
        assert named.send("late", partition=7).result().partition == 7
        found = {plain.send("late", key=f"{number}").result().partition for number in range(30)}
        assert len(found) > 4
    with topic.producer("p") as named:
        assert named.sent == 2


# -- those who read --------------------------------------------------------------------


@pytest.mark.parametrize("start", ["earliest", "latest", {0: 1}])
@pytest.mark.parametrize("order", ["offset", "commit"])
def test_a_consumer_reads_new_ones_from_their_beginning(
    client: txnkv.Client, topic: txnkv.Topic, start: Any, order: Any
) -> None:
    some = topic.consumer(partitions=[1], start="latest")
    with topic.consumer(start=start, order=order) as consumer:
        before = read(consumer)
        topic.alter(partitions=4)
        send(client, 0, 1, 2)
        send(client, 2, 3)
        at = {"earliest": 0, "latest": 1}.get(str(start), 0)
        assert before == ([] if at else [(1, 0)] if isinstance(start, dict) else [(0, 0), (1, 0)])
        found = consumer.poll(timeout=0)
        consumer.unpoll()
        assert [consumer.position(number) for number in (2, 3)] == [0, 0]
        assert [each.id for each in found] == [each.id for each in consumer.poll(timeout=0)]
        assert sorted(each.id for each in found) == [(0, 1), (1, 1), (2, 0), (2, 1), (3, 0)]
        assert consumer.partitions == [0, 1, 2, 3]
        assert consumer.lag() == 0
        consumer.seek(3, 0)
        assert read(consumer) == [(3, 0)]
    assert read(some) == [(1, 1)]
    assert some.partitions == [1]


@BUFFERS
def test_transactions_are_whole_over_new_ones(client: txnkv.Client, buffer: Any) -> None:
    """The consumer has the next snapshot before it knows of the partitions that it has."""
    topic = client.create_topic(TOPIC, partitions=2, buffer=buffer)
    with (
        topic.consumer("serializable") as whole,
        topic.consumer("serializable", start="latest") as late,
    ):
        for count in range(2, 6):
            topic.alter(partitions=count)
            for value in ("a", "b"):
                send(client, *range(count), value=value)
            for consumer in (whole, late):
                values = [each.value for each in consumer.poll(timeout=0)]
                assert values == [
                    f"{value} {number}".encode() for value in "ab" for number in range(count)
                ]


def test_a_poll_waits_for_new_ones_too(client: txnkv.Client, topic: txnkv.Topic) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as others, topic.consumer(start="latest") as consumer:
        waiting = others.submit(consumer.poll, timeout=60)
        topic.alter(partitions=3)
        send(client, 2)
        assert [each.id for each in waiting.result()] == [(2, 0)]


# -- subscriptions ---------------------------------------------------------------------

KINDS = pytest.mark.parametrize(
    ("type", "options"),
    [
        ("exclusive", {}),
        ("exclusive", {"max_deliveries": 3}),
        ("shared", {}),
        ("failover", {}),
    ],
)


@KINDS
def test_a_subscription_has_new_ones_from_their_beginning(
    client: txnkv.Client, topic: txnkv.Topic, type: Any, options: dict[str, Any]
) -> None:
    with topic.subscribe("s", type, start="latest", **options) as subscription:
        assert subscription.receive(timeout=0) is None
        topic.alter(partitions=4)
        send(client, *range(4))
        given = subscription.receive_many(9, timeout=0)
        assert sorted(each.id for each in given) == [(0, 1), (1, 1), (2, 0), (3, 0)]
        subscription.nack(next(each for each in given if each.partition == 3))
        again = subscription.receive(timeout=10)
        assert again is not None
        assert again.id == (3, 0)
        with client.transaction() as txn:
            txn.ack(subscription, [each for each in given if each.partition != 3])
        assert subscription.committed() == {0: 2, 1: 2, 2: 1, 3: 0}
        assert subscription.lag() == {0: 0, 1: 0, 2: 0, 3: 1}
        subscription.ack(again)
        subscription.seek(2, 0)
        assert [each.id for each in subscription.receive_many(9, timeout=0)] == [(2, 0)]
    with topic.subscribe("s", type, **options) as subscription:
        assert [each.id for each in subscription.receive_many(9, timeout=0)] == [(2, 0)]


@KINDS
def test_acks_of_who_knows_only_those_of_before(
    client: txnkv.Client, topic: txnkv.Topic, type: Any, options: dict[str, Any]
) -> None:
    """By what names the subscription, as it was sent to a worker; plain, small and stored ones."""
    with topic.subscribe("s", type, start="latest", **options) as subscription:
        early = subscription.info
        topic.alter(partitions=3)
        for _ in range(4):
            send(client, 2)
        given = subscription.receive_many(9, timeout=0)
        assert [each.id for each in given] == [(2, number) for number in range(4)]
        with client.transaction() as txn:
            txn.ack(early, given[0].id)
        with client.transaction() as txn:
            txn.serialize()
            txn.ack(early, given[1].id)
        with client.new_session() as session:
            session.ack(early, given[2].id)
        assert subscription.committed()[2] == 3
        with pytest.raises(txnkv.AckConflictError), client.transaction() as txn:
            txn.ack(early, given[0].id)


@KINDS
def test_plain_acks_before_the_consumer_has_looked(
    client: txnkv.Client, topic: txnkv.Topic, type: Any, options: dict[str, Any]
) -> None:
    with topic.subscribe("s", type, **options) as subscription:
        topic.alter(partitions=3)
        send(client, 2)
        with client.new_session() as session:
            session.ack(subscription, txnkv.MessageId(2, 0))
        assert subscription.committed()[2] == 1
        assert sorted(each.id for each in subscription.receive_many(9, timeout=0)) == [
            (0, 0),
            (1, 0),
        ]


def test_those_of_some_partitions_stay_with_them(client: txnkv.Client, topic: txnkv.Topic) -> None:
    for type in ("exclusive", "shared"):
        with topic.subscribe(type, type, partitions=[1]) as subscription:  # type: ignore[arg-type]
            count = topic.partitions + 1
            topic.alter(partitions=count)
            send(client, 1, count - 1)
            found = subscription.receive_many(9, timeout=0)
            assert {each.partition for each in found} == {1}
            subscription.seek(count - 1, 1)
            assert subscription.committed()[count - 1] == 1


def test_one_that_is_made_meanwhile_has_all_cursors(
    client: txnkv.Client, topic: txnkv.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its starts are looked up, the partitions added, and then it is written."""
    subscriptions = internals.topics(client).subscriptions
    starts = subscriptions._starts

    def then(*args: Any) -> dict[int, int]:
        found = starts(*args)
        topic.alter(partitions=3)
        return found

    monkeypatch.setattr(subscriptions, "_starts", then)
    with topic.subscribe("s", start="latest") as subscription:
        send(client, 0, 2)
        found = subscription.receive_many(9, timeout=0)
        assert sorted(each.id for each in found) == [(0, 1), (2, 0)]


# -- copies ----------------------------------------------------------------------------


def test_a_replica_gets_them(client: txnkv.Client, topic: txnkv.Topic, tmp_path: Path) -> None:
    with txnkv.connect(tmp_path / "copy") as copy:
        replicate(client, copy)
        with copy.topic(TOPIC).consumer() as consumer:
            assert read(consumer) == [(0, 0), (1, 0)]
            topic.alter(partitions=3)
            send(client, 1, 2)
            replicate(client, copy)
            assert read(consumer) == [(1, 1), (2, 0)]
        with pytest.raises(txnkv.NotSupportedError, match="it is a copy"):
            copy.topic(TOPIC).alter(partitions=4)
        assert copy.check().ok


@BUFFERS
def test_backups_of_before_and_after(client: txnkv.Client, tmp_path: Path, buffer: Any) -> None:
    topic = client.create_topic(TOPIC, partitions=2, buffer=buffer)
    with topic.subscribe("s") as subscription:
        send(client, 0, 1)
        client.backup(tmp_path / "first")
        topic.alter(partitions=3)
        send(client, 2)
        client.backup(tmp_path / "second")
        assert subscription.lag() == {0: 1, 1: 1, 2: 1}
    for name, count in (("first", 2), ("second", 3)):
        txnkv.restore(tmp_path / name, tmp_path / f"{name} back")
        with txnkv.connect(tmp_path / f"{name} back") as back:
            assert back.topic(TOPIC).partitions == count
            assert len(read(back.topic(TOPIC).consumer())) == count
            with back.topic(TOPIC).subscribe("s") as subscription:
                assert len(subscription.receive_many(9, timeout=0)) == count
            assert back.check().ok
