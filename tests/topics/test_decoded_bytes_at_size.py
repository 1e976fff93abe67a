"""Compressible data, in amounts that do not fit into memory: every reader holds little of it."""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from txnkv import core

MOST = 200_000_000
ROW = {"name": "x" * 60, "number": 1234567, "flag": True}
JSON = json.dumps([ROW] * 200).encode()[:20_000]


@contextmanager
def little_held() -> Iterator[None]:
    """The largest sum that Arrow and Python held meanwhile is below MOST."""
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    gc.collect()
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        yield
        in_python = tracemalloc.get_traced_memory()[1]
        print(f"Arrow {pool.max_memory():,}, Python {in_python:,}")
        assert pool.max_memory() + in_python < MOST
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(before)


def by_poll(topic: Any, **options: Any) -> Iterator[Any]:
    with topic.consumer(**options) as consumer:
        while messages := consumer.poll(timeout=0):
            yield from messages
            del messages


def by_batches(topic: Any, **options: Any) -> Iterator[Any]:
    with topic.consumer(**options) as consumer:
        while (rows := consumer.poll_batch(timeout=0)).num_rows:
            yield from (value.as_buffer() for value in rows["value"])


def by_subscription(topic: Any) -> Iterator[Any]:
    with topic.subscribe("all") as subscription:
        while messages := subscription.receive_many(10, timeout=0):
            yield from (message.value for message in messages)
            if messages[-1].offset % 200 < 10:
                subscription.ack_cumulative(messages[-1])
            del messages


def by_fetch(topic: Any) -> Iterator[Any]:
    at, end = 0, topic.end_offsets()[0]
    while at < end:
        records = topic.fetch(0, at).records
        for _, header in core.walk(records):
            at = header.next_offset
            if not header.is_control:
                yield from [None] * header.rows


READERS: dict[str, Callable[[Any], Iterator[Any]]] = {
    "poll": by_poll,
    "batches": by_batches,
    "uncommitted": lambda topic: by_poll(topic, isolation="read_uncommitted"),
    "commit": lambda topic: by_poll(topic, order="commit"),
    "serializable": lambda topic: by_poll(topic, isolation="serializable"),
    "subscription": by_subscription,
    "fetch": by_fetch,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "count"), [(bytes(1 << 20), 2400), (JSON, 100_000)], ids=["zeros", "json"]
)
def test_readers_hold_little(client: txnkv.Client, value: bytes, count: int) -> None:
    topic = client.create_topic("large", compression="zstd")
    for _ in range(8):
        with client.transaction() as txn:
            for _ in range(count // 8):
                txn.send(topic, value)
    for name, reader in READERS.items():
        print(name, end=": ", flush=True)
        with little_held():
            found = 0
            for given in reader(topic):
                assert given is None or len(getattr(given, "value", given)) == len(value)
                found += 1
        assert found == count, name
