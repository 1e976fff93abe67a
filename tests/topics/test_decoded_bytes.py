"""Limits of what is read are in bytes as they lie in memory, not as they are stored."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests.topics.log_tools import data
from tests.topics.reading_tools import partition_of, put
from txnkv import core
from txnkv.spark.reading.topic_planner import weight

PIECE = 256 << 10
COUNT = 40
STORED = 64 << 10


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
    [{}, {"order": "commit"}, {"isolation": "read_uncommitted"}],
    ids=["offset", "commit", "uncommitted"],
)
def test_a_consumer(topic: Any, options: Any) -> None:
    consumer = topic.consumer(**options)
    before, count = pa.total_allocated_bytes(), 0
    while (rows := consumer.poll_batch(timeout=0)).num_rows:
        count += rows.num_rows
        assert rows.nbytes <= 2 << 20
        assert pa.total_allocated_bytes() - before <= 4 << 20
        del rows
    assert count == COUNT


def test_small_messages_count_what_stands_beside_them(client: txnkv.Client) -> None:
    topic = client.create_topic("empty", compression="zstd")
    put(client, topic, *[data(size=0, n=1000)] * 20)
    assert sum(h.rows for _, h in core.walk(topic.fetch(0, 0, 100_000).records)) == 3000


def test_ranges_weigh_what_they_are_in_memory(client: txnkv.Client, topic: Any) -> None:
    partition = partition_of(client, topic)
    engine = client.instance.topics
    found = weight(engine, partition, 0, topic.end_offsets()[0])
    assert COUNT * PIECE * 0.9 < found < COUNT * PIECE * 1.1


def test_what_is_no_batch_counts_as_it_is() -> None:
    whole = data(size=100, n=2)
    assert core.within(whole * 3 + b"x" * 99, 1 << 20)[0] == 3 * len(whole) + 99
    assert core.within(whole * 3 + b"x" * 999, 1200)[0] == 3 * len(whole)
    assert core.within(b"", 5) == (0, 0)
