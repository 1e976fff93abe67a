"""Streams of a topic of which something is gone, by the calls that Spark makes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

import txnkv
from tests import internals
from tools.topic_writing import Writer
from txnkv.topics import retention
from txnkv.topics.topic_catalog import TopicOptions
from txnkv.topics.write import roll_forward

from .topic_tools import (
    BUFFERS,
    ORDERS,
    Query,
    close_clients,
    opened,
    options,
    rows_of,
    send,
    values,
)

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("clients_are_closed")]


def cut(client: txnkv.Client, offset: int, number: int = 0) -> None:
    """Take the beginning of a partition, as retention does."""
    partition = internals.topics(client).partitions(client.topic("events").info)[number]
    roll_forward.complete(internals.topics(client), partition)
    partition.environment.write(lambda txn: partition.log.advance_start(txn, offset))


@BUFFERS
@ORDERS
def test_retention_passed_the_checkpoint(
    client: txnkv.Client, buffer: str, order: str, caplog: pytest.LogCaptureFixture
) -> None:
    client.create_topic("events", 1, buffer)
    query = Query(options(client, order=order))
    send(client, "a", "b")
    query.trigger()
    for text in "cdef":
        send(client, text)
    cut(client, 4)
    words = "checkpoint stands at offset 2 of topic 'events', partition 0, which begins at 4"
    with pytest.raises(txnkv.OffsetOutOfRangeError, match=words):
        query.trigger()
    with pytest.raises(txnkv.OffsetOutOfRangeError, match="failOnDataLoss"):
        query.restarted().replay(0)
    careless = query.restarted()
    careless.options = options(client, order=order, failOnDataLoss="false")
    assert careless.trigger()
    assert values(careless.batches[-1][0]) == [b"e", b"f"]
    assert "which begins at 4" in caplog.text
    assert careless.replay(1) == careless.batches[1]
    assert careless.replay(0) == []


@BUFFERS
@ORDERS
def test_retention_comes_between_planning_and_reading(
    client: txnkv.Client, buffer: str, order: str
) -> None:
    """Nothing is left out in silence; where it may be lost, what is left is read."""
    client.create_topic("events", 1, buffer)
    for text in "abcdef":
        send(client, text)
    for careless in ("false", "true"):
        place = options(client, order=order, failOnDataLoss=careless)
        reader = Query(place).start()
        begun = reader.initialOffset()
        tasks = reader.partitions(begun, reader.latestOffset(begun, ReadAllAvailable()))
        cut(client, 3 if careless == "false" else 5)
        if careless == "true":
            with pytest.raises(txnkv.OffsetOutOfRangeError, match="holds \\[5, 6\\)"):
                rows_of(reader, tasks[0])
        else:
            assert values(rows_of(reader, tasks[0])) == [b"d", b"e", b"f"]


def test_retention_takes_the_beginning_of_a_transaction(client: txnkv.Client) -> None:
    """In commit order its place is behind what is gone; it is not given in part."""
    client.create_topic("events")
    query = Query(options(client, order="commit"))
    txn = opened(client, "t1")
    send(client, "t2", txn=txn)
    txn.flush()
    send(client, "a", "b")
    assert query.trigger()
    txn.commit()
    cut(client, 1)  # t1; the checkpoint is behind it
    with pytest.raises(txnkv.OffsetOutOfRangeError, match="asked for offset 0"):
        query.trigger()
    careless = query.restarted()
    careless.options = options(client, order="commit", failOnDataLoss="false")
    (task,) = careless.replay(1)
    assert values(task) == [b"t2"]
    new = Query(options(client, order="commit")).drain()  # what is gone is nobody's loss to it
    assert values(new.rows()) == [b"a", b"b", b"t2"]


def test_retention_takes_the_beginning_of_a_large_message(client: txnkv.Client) -> None:
    internals.topics(client).create("events", 1, "marker", TopicOptions(max_message_bytes=100))
    query = Query(options(client))
    send(client, "a", "F" * 350, "b")  # a is 0, F 1 to 4, b 5
    assert query.trigger(most=3)
    cut(client, 2)
    with pytest.raises(txnkv.OffsetOutOfRangeError, match="in the middle of a large message"):
        query.trigger()
    new = Query(options(client)).drain(most=1)
    assert values(new.rows()) == [b"b"]


@BUFFERS
@ORDERS
def test_what_was_truncated_behind_the_checkpoint_is_passed_over(
    client: txnkv.Client, buffer: str, order: str
) -> None:
    topic = client.create_topic("events", 1, buffer)
    query = Query(options(client, order=order))
    send(client, "a")
    send(client, "b")
    query.trigger()
    for text in "cde":
        send(client, text)
    (end,) = (m.offset for m in topic.consumer().poll(max_messages=9) if m.value == b"b")
    topic.truncate(after=end)
    assert not query.trigger() or values(query.batches[-1][0]) == []
    send(client, "f")
    assert query.restarted().replay(0) == query.batches[0]
    query = query.restarted()
    assert query.trigger()
    assert values(query.batches[-1][0]) == [b"f"]


@BUFFERS
@ORDERS
def test_messages_are_truncated_behind_the_checkpoint_between_planning_and_reading(
    client: txnkv.Client, buffer: str, order: str
) -> None:
    """What somebody took away on purpose is in no batch, nor in one that is read again."""
    topic = client.create_topic("events", 1, buffer)
    for text in "abc":
        send(client, text)
    reader = Query(options(client, order=order)).start()
    begun = reader.initialOffset()
    tasks = reader.partitions(begun, reader.latestOffset(begun, ReadAllAvailable()))
    assert values(rows_of(reader, tasks[0])) == [b"a", b"b", b"c"]
    (first,) = (m.offset for m in topic.consumer().poll(max_messages=9) if m.value == b"a")
    topic.truncate(after=first)
    send(client, "d")
    assert values(rows_of(reader, tasks[0])) == [b"a"]


def test_enforced_retention_is_seen(
    client: txnkv.Client, by_hand: Callable[[txnkv.Client], None]
) -> None:
    to = Writer(client, "events", options=TopicOptions(retention_bytes=500, segment_bytes=300))
    query = Query(options(client))
    to.small("first")
    query.trigger()
    for i in range(50):
        to.small(f"{i}".ljust(100, "."))
    roll_forward.complete(to.engine, to.partitions[0])
    retention.enforce(to.engine, to.partitions[0])
    with pytest.raises(txnkv.OffsetOutOfRangeError, match="retention took what lies before"):
        query.trigger()


@ORDERS
def test_a_topic_that_was_dropped(client: txnkv.Client, order: str) -> None:
    client.create_topic("events")
    send(client, "a", "b")
    query = Query(options(client, order=order))
    query.trigger()
    tasks = query.reader.partitions(query.reader.initialOffset(), json.loads(query.offsets[0]))
    client.drop_topic("events")
    for attempt in (query.trigger, query.restarted().trigger, lambda: query.replay(0)):
        with pytest.raises(txnkv.TopicNotFoundError, match="events"):
            attempt()
    with pytest.raises(txnkv.TopicNotFoundError, match="events"):
        rows_of(query.reader, tasks[0])
    client.create_topic("events")
    send(client, "c")
    for attempt in (query.trigger, query.restarted().trigger, lambda: query.replay(0)):
        with pytest.raises(txnkv.TopicNotFoundError, match="that was dropped \\(id 1\\)"):
            attempt()
    with pytest.raises(txnkv.TopicNotFoundError, match="was dropped while it was read"):
        rows_of(query.reader, tasks[0])
    careless = query.restarted()
    careless.options = options(client, order=order, failOnDataLoss="false")
    assert careless.replay(0) == []
    assert careless.trigger()
    assert values(careless.batches[-1][0]) == [b"c"]
    assert not careless.trigger()


@ORDERS
def test_a_store_that_was_restored_to_the_past(
    connect: Callable[..., txnkv.Client], store_path: Path, tmp_path: Path, order: str
) -> None:
    client = connect()
    client.create_topic("events")
    send(client, "a", "b")
    client.close()
    shutil.copytree(store_path, tmp_path / "backup")
    client = connect()
    query = Query(options(client, order=order))
    send(client, "c", "d")
    query.trigger()
    client.close()
    close_clients()
    shutil.rmtree(store_path)
    shutil.copytree(tmp_path / "backup", store_path)
    client = connect()
    words = "stands at offset 4 .* which ends at 2: the store is of an earlier time"
    for attempt in (query.restarted().trigger, lambda: query.restarted().replay(0)):
        with pytest.raises(txnkv.OffsetOutOfRangeError, match=words):
            attempt()
    careless = query.restarted()
    careless.options = options(client, order=order, failOnDataLoss="false")
    careless.trigger()
    send(client, "e")
    assert careless.trigger()
    assert values(careless.batches[-1][0]) == [b"e"]


def test_a_checkpoint_of_something_else(
    client: txnkv.Client, connect: Callable[..., txnkv.Client], tmp_path: Path
) -> None:
    client.create_topic("events")
    send(client, "a")
    query = Query(options(client))
    query.trigger()
    other = query.restarted()
    other.options = options(client, order="commit")
    with pytest.raises(ValueError, match="the checkpoint is of topic 'events', order 'offset'"):
        other.trigger()
    other = query.restarted()
    other.offsets = ['{"n": 5}']
    with pytest.raises(ValueError, match="is no place in a topic"):
        other.trigger()
    with txnkv.connect(tmp_path / "another") as another:
        another.create_topic("events")
        other = query.restarted()
        other.options = options(another)
        with pytest.raises(txnkv.TopicNotFoundError, match="of another store"):
            other.trigger()
