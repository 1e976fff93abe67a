"""Many partitions: a poll opens and looks at those alone that have something new."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import txnkv
from tests import internals
from tests.topics.reading_tools import partition_of
from tools.topic_writers import abort, begin, commit, send
from txnkv.storage import lmdb_open
from txnkv.topics import ranges, retention
from txnkv.topics.read import commit_reader, log_view, offset_reader

MANY = 60


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how often partitions are looked at, and environments opened."""
    looked: Counter[str] = Counter()

    def count(name: str, module: Any, attribute: str) -> None:
        real = getattr(module, attribute)

        def call(*args: Any, **options: Any) -> Any:
            looked[name] += 1
            return real(*args, **options)

        monkeypatch.setattr(module, attribute, call)

    count("looks", offset_reader, "glance_at")
    count("lengthy looks", offset_reader, "look_at")
    count("looks by commit", commit_reader, "look_at")
    count("opened", lmdb_open, "_open_env")
    return looked


@pytest.fixture
def topic(client: txnkv.Client) -> txnkv.Topic:
    return client.create_topic("events", partitions=MANY)


def send_to(client: txnkv.Client, topic: txnkv.Topic, *partitions: int) -> None:
    with client.transaction() as txn:
        for number in partitions:
            txn.send(topic, b"%d" % number, partition=number)


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
def test_an_empty_poll_looks_at_nothing(
    client: txnkv.Client, topic: txnkv.Topic, looked: Counter[str], isolation: str
) -> None:
    consumer = topic.consumer(isolation=isolation)
    send_to(client, topic, *range(MANY))
    assert len(consumer.poll(timeout=0)) == MANY
    assert consumer.poll(timeout=0) == []
    assert looked["opened"] == 0, "there are no logs yet, and none is made to read"
    looked.clear()
    assert consumer.poll(timeout=0) == []
    assert looked["looks"] == 0
    send_to(client, topic, 7, 12)
    assert sorted(message.partition for message in consumer.poll(timeout=0)) == [7, 12]
    assert looked == {"looks": 2}, "all is in memory"
    internals.flush(client)
    assert consumer.poll(timeout=0) == []  # 7 and 12 had not been looked at to their end
    looked.clear()
    assert consumer.poll(timeout=0) == []
    assert looked == {}, "a flush gives no offsets"


@pytest.mark.parametrize("order", ["offset", "commit"])
@pytest.mark.parametrize("buffer", ["marker", "sidecar"])
def test_what_is_decided_later_is_seen(client: txnkv.Client, order: Any, buffer: Any) -> None:
    topic = client.create_topic("large", partitions=3, buffer=buffer)
    consumer = topic.consumer(order=order)
    partition = partition_of(client, topic, 1)
    first, second = begin(client), begin(client)
    send(client, first, partition, [b"a"])
    send(client, second, partition, [b"b"])
    assert consumer.poll(timeout=0) == consumer.poll(timeout=0) == []
    abort(client, first)
    assert consumer.poll(timeout=0) == consumer.poll(timeout=0) == []
    commit(client, second)
    assert [message.value for message in consumer.poll(timeout=0)] == [b"b"]
    assert consumer.poll(timeout=0) == consumer.poll(timeout=0) == []


KINDS = [
    *(("offset", kind) for kind in ("exclusive", "failover", "shared", "key_shared")),
    ("commit", "exclusive"),
]


@pytest.mark.parametrize(("order", "kind"), KINDS)
def test_a_receive_looks_where_something_is_new(
    client: txnkv.Client, topic: txnkv.Topic, looked: Counter[str], order: Any, kind: Any
) -> None:
    subscription = topic.subscribe("s", type=kind, order=order)

    def received() -> list[int]:
        found = []
        while some := subscription.receive_many(10, timeout=0):
            found += some
            subscription.ack(some)
        return sorted(message.partition for message in found)

    send_to(client, topic, *range(MANY))
    assert received() == [*range(MANY)]
    looked.clear()
    assert received() == []
    assert looked.total() == 0
    send_to(client, topic, 7, 12)
    assert received() == [7, 12]
    assert 0 < looked.total() <= 12, "and not all of them"


def test_a_serializable_poll_looks_where_something_is_new(
    client: txnkv.Client, topic: txnkv.Topic, looked: Counter[str]
) -> None:
    consumer = topic.consumer(isolation="serializable")
    send_to(client, topic, *range(MANY))
    assert len(consumer.poll(timeout=0)) == MANY
    assert consumer.poll(timeout=0) == []
    looked.clear()
    assert consumer.poll(timeout=0) == []
    assert looked.total() == 0
    send_to(client, topic, 7, 12)
    assert sorted(message.partition for message in consumer.poll(timeout=0)) == [7, 12]
    assert 0 < looked.total() <= 6, "and not all of them"
    topic.alter(partitions=MANY + 1)
    send_to(client, topic, MANY)
    assert [message.partition for message in consumer.poll(timeout=0)] == [MANY]


@pytest.mark.parametrize("cut", ["truncate", "retention"])
@pytest.mark.usefixtures("by_hand")
def test_a_cut_looks_at_the_cursors_of_its_partition(
    client: txnkv.Client, topic: txnkv.Topic, cut: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each partition loaded the cursors of all. Where none is behind, nothing is written."""
    topic.subscribe("s").close()
    send_to(client, topic, 0)
    topic.subscribe("s").seek(0, 1)
    send_to(client, topic, *range(1, MANY))
    raised: list[int] = []
    raise_marks = retention.raise_marks
    monkeypatch.setattr(
        retention, "raise_marks", lambda *args: (raised.append(args[1]), raise_marks(*args))
    )
    if cut == "retention":
        topic.alter(retention_seconds=0)
    made = 0
    real = ranges.Cursor.__init__

    def count(*args: Any, **options: Any) -> None:
        nonlocal made
        made += 1
        real(*args, **options)

    monkeypatch.setattr(ranges.Cursor, "__init__", count)
    if cut == "truncate":
        topic.truncate("latest")
    else:
        client.compact()
    assert MANY <= made <= 3 * MANY
    monkeypatch.undo()
    assert topic.subscribe("s").lost() == dict.fromkeys(range(MANY), 1) | {0: 0}
    assert raised == [*topic.info.partitions[1:]]


@pytest.mark.parametrize(("order", "kind"), KINDS)
def test_what_is_decided_later_is_received(client: txnkv.Client, order: Any, kind: Any) -> None:
    topic = client.create_topic("large", partitions=3, buffer="marker")
    subscription = topic.subscribe("s", type=kind, order=order)
    partition = partition_of(client, topic, 1)
    first, second = begin(client), begin(client)
    send(client, first, partition, [b"a"])
    send(client, second, partition, [b"b"])
    assert subscription.receive(timeout=0) is subscription.receive(timeout=0) is None
    abort(client, first)
    assert subscription.receive(timeout=0) is subscription.receive(timeout=0) is None
    commit(client, second)
    message = subscription.receive(timeout=0)
    assert message is not None
    assert message.value == b"b"
    subscription.nack(message)
    again = subscription.receive(timeout=0)
    assert again is not None
    assert again.value == b"b"
    subscription.ack(again)
    assert subscription.receive(timeout=0) is None
    subscription.seek(1, 0)
    assert subscription.receive(timeout=0) is not None


def test_a_topic_that_is_dropped_is_told(client: txnkv.Client, topic: txnkv.Topic) -> None:
    consumer = topic.consumer()
    assert consumer.poll(timeout=0) == []
    client.drop_topic("events")
    with pytest.raises(txnkv.TopicNotFoundError):
        consumer.poll(timeout=0)


def test_a_log_is_looked_at_where_the_tail_lacks_something(
    client: txnkv.Client, topic: txnkv.Topic
) -> None:
    send_to(client, topic, 3)
    internals.flush(client)
    assert log_view.bounds(internals.topics(client), partition_of(client, topic, 3)).start == 0
    assert [m.value for m in topic.consumer().poll(timeout=0)] == [b"3"]


def test_a_log_that_another_process_makes_is_found(
    client: txnkv.Client, topic: txnkv.Topic, elsewhere: Callable[..., Any]
) -> None:
    """What was read from memory alone lies on the disk, is longer, and begins later."""
    send_to(client, topic, *[3] * 10)
    assert len(topic.consumer().poll(timeout=0)) == 10
    elsewhere(
        """
        from tests import internals
        internals.flush(client)
        """
    )
    assert len(topic.consumer().poll(timeout=0)) == 10
    send_to(client, topic, 3)
    assert len(topic.consumer().poll(timeout=0)) == 11
    elsewhere(
        """
        from tests import internals
        from txnkv.topics import delete_below
        engine = internals.topics(client)
        delete_below(engine, engine.partitions(engine.find("events"))[3], 7)
        """
    )
    assert len(topic.consumer().poll(timeout=0)) == 4
