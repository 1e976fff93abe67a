"""Limits of what is read are in bytes as they lie in memory, not as they are stored."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from tests.spark.topic_tools import close_clients
from tests.topics.log_tools import data
from tests.topics.reading_tools import partition_of, put
from txnkv import core
from txnkv.spark.source import TxnkvDataSource
from txnkv.topics import weight
from txnkv.transaction.job import Job

PIECE = 256 << 10
COUNT = 40
STORED = 64 << 10
READS: list[dict[str, Any]] = [
    {},
    {"order": "commit"},
    {"isolation": "read_uncommitted"},
    {"isolation": "serializable"},
]


@pytest.fixture(params=["marker", "sidecar"])
def topic(client: txnkv.Client, request: Any) -> Any:
    """COUNT messages of zeros that are PIECE large each and next to nothing on the disk: of a
    large transaction, of a small one and, for a half, of the tail.
    """
    topic = client.create_topic("zeros", buffer=request.param, compression="zstd")
    with client.transaction() as txn:
        for _ in range(COUNT // 2):
            txn.send(topic, bytes(PIECE))
    for _ in range(COUNT // 2):
        with client.transaction() as txn:
            txn.send(topic, bytes(PIECE))
    return topic


def decoded(records: bytes) -> int:
    return sum(header.decoded_bytes for _, header in core.walk(records))


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
@pytest.mark.parametrize("most", [1, 3 * PIECE, 1 << 20])
def test_a_fetch(topic: Any, isolation: Any, most: int) -> None:
    at, count, end = 0, 0, topic.end_offsets()[0]
    while at < end:
        records = topic.fetch(0, at, most, isolation).records
        found = core.walk(records)
        assert len(found) == 1 or decoded(records) <= most
        at, count = found[-1][1].next_offset, count + sum(header.rows for _, header in found)
    assert count == COUNT
    assert len(topic.fetch(0, 0, 1 << 40, isolation).records) < STORED


@pytest.mark.parametrize(
    "options",
    READS,
    ids=["offset", "commit", "uncommitted", "serializable"],
)
@pytest.mark.parametrize("most", [1, 3 * PIECE, 1 << 20, 16 << 20])
def test_a_consumer(topic: Any, options: Any, most: int) -> None:
    consumer = topic.consumer(max_bytes=most, **options)
    before, found = pa.total_allocated_bytes(), []
    while (rows := consumer.poll_batch(timeout=0)).num_rows:
        found += rows["offset"].to_pylist()
        one = rows.nbytes // rows.num_rows
        assert rows.num_rows == 1 or rows.nbytes < most + one
        # What is held, one batch at least; what is given, and its parts before they were joined.
        held = max(most, 1 << 20) + (1 << 16)
        assert pa.total_allocated_bytes() - before <= held + 2 * (most + one)
        del rows
    assert len(found) == COUNT
    assert found == sorted(found) or options.get("order") or options.get("isolation")


@pytest.mark.parametrize(
    "options",
    READS,
    ids=["offset", "commit", "uncommitted", "serializable"],
)
def test_a_consumer_of_many_partitions(client: txnkv.Client, options: Any) -> None:
    topic = client.create_topic("many", partitions=20, compression="zstd")
    with client.transaction() as txn:
        for i in range(200):
            txn.send(topic, bytes(8 << 10), partition=i % 20)
    consumer = topic.consumer(max_bytes=128 << 10, **options)
    before, places = pa.total_allocated_bytes(), set()
    while rows := consumer.poll(max_messages=3, timeout=0):
        places |= {row.id for row in rows}
        if options != {"isolation": "serializable"}:  # there a batch of each
            assert pa.total_allocated_bytes() - before <= 256 << 10
    assert len(places) == 200


def test_transactions_over_partitions_come_several_in_a_poll(client: txnkv.Client) -> None:
    topic = client.create_topic("pairs", partitions=2)
    for i in range(5):
        with client.transaction() as txn:
            for partition in (0, 1):
                txn.send(topic, b"%d" % i, partition=partition)
    consumer = topic.consumer(isolation="serializable")
    assert [m.value for m in consumer.poll(timeout=0)] == [b"%d" % (i // 2) for i in range(10)]


def test_a_poll_ends_with_what_fits(client: txnkv.Client) -> None:
    topic = client.create_topic("mixed")
    with client.transaction() as txn:
        for size in (10, 300_000, 10, 10, 900_000, 10):
            txn.send(topic, bytes(size))
    consumer = topic.consumer(max_bytes=310_000)
    found = [[len(m.value) for m in consumer.poll(timeout=0)] for _ in range(5)]
    assert found == [[10, 300_000, 10, 10], [900_000], [10], [], []]
    with pytest.raises(ValueError, match="max_bytes"):
        topic.consumer(max_bytes=0)


@pytest.mark.parametrize("by", ["transaction", "alone", "bulk", "producer", "job"])
def test_a_batch_is_cut_by_keys_and_headers_too(client: txnkv.Client, by: str) -> None:
    topic = client.create_topic("events", compression="zstd")
    key, headers = bytes(60 << 10), [("h", bytes(40 << 10))]
    if by == "producer":
        with topic.producer() as producer:
            for _ in range(50):
                producer.send(b"v", key, headers=headers)
    elif by == "bulk":
        rows = {"value": [b"v"] * 50, "key": [key] * 50, "headers": [[("h", bytes(40 << 10))]] * 50}
        kinds = [pa.binary(), pa.binary(), pa.map_(pa.string(), pa.binary())]
        columns = [pa.array(rows[name], kind) for name, kind in zip(rows, kinds, strict=True)]
        with client.transaction() as txn:
            txn.send_batch(topic, pa.table(dict(zip(rows, columns, strict=True))))
    else:
        with client.new_transaction() as txn:
            job = Job.start(txn) if by == "job" else None
            made = client if by == "alone" else txn
            session = made.new_session() if job is None else job.session("1.0")
            for _ in range(50):
                session.send(topic, b"v", key, headers=headers)
            session.flush()
            if job is not None:
                job.commit(["1.0"])
            txn.commit()
    records = topic.fetch(0, 0, 1 << 40).records
    sizes = [(h.rows, h.decoded_bytes) for _, h in core.walk(records) if not h.is_control]
    assert sum(rows for rows, _ in sizes) == 50
    assert max(size for _, size in sizes) <= (1 << 20) + 1024
    assert len(sizes) <= 7 or by == "producer"
    assert {len(m.key) for m in topic.consumer().poll(timeout=0)} == {60 << 10}


def test_small_messages_count_what_stands_beside_them(client: txnkv.Client) -> None:
    topic = client.create_topic("empty", compression="zstd")
    put(client, topic, *[data(size=0, n=1000)] * 20)
    assert sum(h.rows for _, h in core.walk(topic.fetch(0, 0, 100_000).records)) == 3000


def test_ranges_weigh_what_they_are_in_memory(client: txnkv.Client, topic: Any) -> None:
    partition = partition_of(client, topic)
    engine = internals.topics(client)
    found = weight(engine, partition, 0, topic.end_offsets()[0])
    assert COUNT * PIECE * 0.9 < found < COUNT * PIECE * 1.1


def test_what_is_no_batch_counts_as_it_is() -> None:
    whole = data(size=100, n=2)
    assert core.within(whole * 3 + b"x" * 99, 1 << 20)[0] == 3 * len(whole) + 99
    assert core.within(whole * 3 + b"x" * 999, 1200)[0] == 3 * len(whole)
    assert core.within(b"", 5) == (0, 0)


@pytest.mark.parametrize("kind", ["exclusive", "shared"])
@pytest.mark.parametrize("most", [1, 3 * PIECE, 16 << 20])
def test_a_subscription(topic: Any, kind: Any, most: int) -> None:
    """New messages, and the same again after they were given back."""
    subscription = topic.subscribe("all", type=kind, max_bytes=most)
    assert offsets_in_parts(subscription, most) == sorted(offsets_in_parts(subscription, most))
    with pytest.raises(ValueError, match="max_bytes"):
        topic.subscribe("other", max_bytes=0)


def offsets_in_parts(subscription: txnkv.Subscription, most: int) -> list[int]:
    """Receive all, in parts that are as large as they may be; give all back at the end."""
    found: list[txnkv.Message] = []
    while some := subscription.receive_many(10 * COUNT, timeout=0):
        assert sum(m.nbytes for m in some[:-1]) < most
        found += some
    assert len(found) == COUNT
    subscription.nack(found)
    return [m.offset for m in found]


@pytest.mark.parametrize("kind", ["exclusive", "shared"])
def test_a_subscription_of_many_partitions(client: txnkv.Client, kind: Any) -> None:
    topic = client.create_topic("many", partitions=20, compression="zstd")
    with client.transaction() as txn:
        for i in range(200):
            txn.send(topic, bytes(8 << 10), partition=i % 20)
    subscription = topic.subscribe("all", type=kind, max_bytes=128 << 10)
    before, places = pa.total_allocated_bytes(), set()
    while rows := subscription.receive_many(3, timeout=0):
        places |= {row.id for row in rows}
        assert pa.total_allocated_bytes() - before <= 256 << 10
    assert len(places) == 200


@pytest.mark.spark
@pytest.mark.parametrize("order", ["offset", "commit"])
def test_a_task_of_spark(topic: Any, order: str, client: txnkv.Client) -> None:
    options = {"path": client.path, "topic": topic.name, "order": order, "maxBytes": str(PIECE * 2)}
    source = TxnkvDataSource(options)
    reader = source.reader(source.schema())
    batches = [batch for task in reader.partitions() for batch in reader.read(task)]
    close_clients()
    assert sum(batch.num_rows for batch in batches) == COUNT
    # One batch as it was sent, of at most 1 MiB; 2 MiB by default.
    assert max(batch.nbytes for batch in batches) <= 1 << 20
