"""The offset where messages of a time begin: in the log, in memory, for writers and readers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import txnkv
from tests import internals

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def _at(minute: int) -> datetime:
    return BEGIN + timedelta(minutes=minute)


def _fill(path: Path, flushed: int, count: int) -> None:
    """Messages of the minutes 0, 2, 4 ..., of which so many are in the log."""
    with txnkv.connect(path) as client:
        client.create_topic("t", partitions=1)
        for number in range(count):
            with client.transaction() as txn:
                txn.send("t", b"%d" % number, timestamp=_at(2 * number))
            if number + 1 == flushed:
                internals.flush(client)


@pytest.mark.parametrize("read_only", [False, True], ids=["writer", "reader"])
@pytest.mark.parametrize("flushed", [0, 2, 5])
def test_a_consumer_goes_to_a_time(tmp_path: Path, flushed: int, read_only: bool) -> None:
    path = tmp_path / "store"
    _fill(path, flushed, 5)
    with (
        txnkv.connect(path, read_only=read_only) as client,
        client.topic("t").consumer() as consumer,
    ):
        for minute in range(-1, 12):
            consumer.seek_to_time(_at(minute))
            found = [message.value for message in consumer.poll(max_messages=10, timeout=0.0)]
            assert found == [b"%d" % n for n in range(5) if 2 * n >= minute], minute


def test_a_batch_in_memory_is_looked_into(tmp_path: Path) -> None:
    with txnkv.connect(tmp_path / "store") as client:
        client.create_topic("t", partitions=1)
        with client.transaction() as txn:
            for minute in (3, 1, 5, 4):
                txn.send("t", b"%d" % minute, timestamp=_at(minute))
        with client.topic("t").consumer() as consumer:
            for minute, offset in ((0, 0), (3, 0), (4, 2), (5, 2), (6, 4)):
                consumer.seek_to_time(_at(minute))
                assert consumer.position(0) == offset
