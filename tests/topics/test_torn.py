"""Retention under readers of whole transactions: all of one, or none of it."""

from __future__ import annotations

from typing import Any

import pytest

import txnkv
from tests import internals
from tests.topics.reading_tools import given, partition_of

READERS: list[dict[str, Any]] = [{"order": "commit"}, {"isolation": "serializable"}]


def lose(client: txnkv.Client, topic: txnkv.Topic, start: int, number: int = 0) -> None:
    """Let retention take what lies before an offset."""
    internals.flush(client)
    partition = partition_of(client, topic, number)
    partition.environment.write(lambda txn: partition.log.advance_start(txn, start))


def spread(client: txnkv.Client, topic: txnkv.Topic, name: str, *numbers: int) -> Any:
    """An open transaction whose messages are in the log: one in each of these partitions."""
    txn = client.new_transaction()
    txn.serialize()
    for number in numbers:
        txn.send(topic, f"{name}{number}", partition=number)
    txn.flush()
    return txn


@pytest.mark.parametrize("options", READERS)
def test_a_part_that_retention_took_is_an_error(
    client: txnkv.Client, options: dict[str, Any]
) -> None:
    """The rest of the transaction was given, as if that had been all of it."""
    topic = client.create_topic("events")
    torn = spread(client, topic, "first", 0)
    whole = spread(client, topic, "whole", 0)
    torn.send(topic, "second", partition=0)
    torn.commit()
    whole.commit()
    began = topic.consumer(start="earliest", **options)
    resumed = topic.consumer(start={0: 1}, **options)
    lose(client, topic, 1)
    began.seek(0, 1)
    for consumer in (began, resumed):
        for _ in range(2):
            with pytest.raises(txnkv.OffsetOutOfRangeError, match=r"part of the .* seek to 4"):
                consumer.poll(timeout=0)
        assert consumer.position(0) <= 3
        consumer.seek(0, 4)
        assert given(consumer) == [(1, b"whole0")]
    assert given(topic.consumer(**options)) == [(1, b"whole0")]


def test_what_goes_while_a_transaction_is_read_is_an_error(client: txnkv.Client) -> None:
    topic = client.create_topic("events")
    txn = client.new_transaction()
    txn.serialize()
    for number in range(4):
        txn.send(topic, f"{number}")
        txn.flush()
    txn.commit()
    consumer = topic.consumer(order="commit")
    consumer._readers[0]._max_bytes = 1  # type: ignore[attr-defined]  # a batch at a time
    assert [m.value for m in consumer.poll(max_messages=1, timeout=0)] == [b"0"]
    lose(client, topic, 3)
    with pytest.raises(txnkv.OffsetOutOfRangeError, match="took a part"):
        consumer.poll(max_messages=1, timeout=0)


def test_a_serializable_consumer_begins_behind_what_any_partition_has_lost(
    client: txnkv.Client,
) -> None:
    topic = client.create_topic("events", partitions=2)
    for name in ("a", "b", "c"):
        spread(client, topic, name, 0, 1).commit()
    lose(client, topic, 3, number=1)  # all of a, and b's message
    found = given(topic.consumer(isolation="serializable"))
    assert sorted(value for _, value in found) == [b"c0", b"c1"]


@pytest.mark.parametrize("options", READERS)
def test_a_small_transaction_in_part(client: txnkv.Client, options: dict[str, Any]) -> None:
    """The rest of it was given in commit order; who names an offset inside gets what follows."""
    topic = client.create_topic("events")
    for name in "ab":
        with client.transaction() as txn:
            for number in range(3):
                txn.send(topic, f"{name}{number}")
    lose(client, topic, 2)
    starts: list[tuple[Any, list[str]]] = [
        ("earliest", ["b0", "b1", "b2"]),
        ({0: 4}, ["b1", "b2"]),
        ({0: 2}, ["a2", "b0", "b1", "b2"]),
    ]
    for start, values in starts:
        found = given(topic.consumer(start=start, **options))
        assert [value for _, value in found] == [value.encode() for value in values]
