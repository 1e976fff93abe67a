"""Copies whose source was cut where batches lie over the start or the end of one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tools.topic_contents import partitions, raw, values
from tools.topic_writing import Writer
from txnkv.client.replica import replicate
from txnkv.storage import arm, disarm

TOPIC = "events"


def bounds(client: txnkv.Client) -> tuple[int, int, int]:
    """Start, end and last stable offset of a log."""
    (partition,) = partitions(client, TOPIC)
    with partition.environment.read() as txn:
        return partition.log.bounds(txn)


def same_as(source: txnkv.Client, dest: txnkv.Client) -> None:
    """Replicate, twice, and compare what is there and what its readers get."""
    for copied in (True, False):
        done = replicate(source, dest)
        assert copied or done.copied_bytes == 0
        there = raw(source, TOPIC)
        low, end, stable = bounds(source)
        assert raw(dest, TOPIC, 0, low) == there
        assert bounds(dest)[1:] == (end, stable)
        for isolation in ("read_uncommitted", "read_committed"):
            consumers = [
                each.topic(TOPIC).consumer(start={0: low}, isolation=isolation)
                for each in (source, dest)
            ]
            sent, here = ([m.id for m in each.poll(timeout=0)] for each in consumers)
            assert here == sent


def send(client: txnkv.Client, *values: str, **more: Any) -> None:
    """Send messages in one transaction: one batch."""
    with client.transaction() as txn:
        txn.send_batch(TOPIC, pa.table({"value": [value.encode() for value in values]}), **more)


def cut_while_it_copies(source: txnkv.Client, dest: txnkv.Client, cut: Callable[[], None]) -> None:
    """Replicate batch by batch, with `cut` behind each, and compare."""
    arm("follow.put", cut)
    try:
        replicate(source, dest, max_bytes=1)
    finally:
        disarm()
    same_as(source, dest)


@pytest.mark.parametrize("buffer", ["marker", "sidecar"])
def test_a_batch_that_its_source_begins_within_was_truncated(
    buffer: Any, client: txnkv.Client, dest: txnkv.Client
) -> None:
    """The copy has messages at the start of the source, which has a filler there."""
    topic = client.create_topic(TOPIC, buffer=buffer)
    send(client, *["kept"] * 10)
    send(client, *["secret"] * 20)
    replicate(client, dest)
    topic.truncate(after=9)
    topic.truncate(20)
    send(client, "new")
    same_as(client, dest)
    assert values(dest, TOPIC) == [b"new"]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("before", [19, 20, 25, 29, 30])
def test_it_ends_within_a_batch_that_its_source_begins_within(
    before: int, keep: bool, client: txnkv.Client, dest: txnkv.Client
) -> None:
    """A filler from below both. What a subscription of the copy has still to get stays there."""
    topic = client.create_topic(TOPIC, retain_unacknowledged=keep)
    for i in range(25):
        send(client, f"{i}")
    replicate(client, dest)
    with dest.topic(TOPIC).subscribe("s") as subscription:
        send(client, *["lost"] * 5)
        topic.truncate(after=9)
        send(client, "new")
        topic.truncate(before)
        same_as(client, dest)
        assert values(dest, TOPIC)[-1] == b"new"
        if keep and before <= 25:
            found = subscription.receive_many(20, timeout=5)
            assert [m.value for m in found][:10] == [b"%d" % i for i in range(10)]


@pytest.mark.parametrize("begins", [0, 50])
def test_fillers_of_its_source_are_merged_over_both_starts(
    begins: int, client: txnkv.Client, dest: txnkv.Client
) -> None:
    """By key compaction, from below the start of the copy on."""
    topic = client.create_topic(TOPIC, cleanup="compact")
    for round in range(2):
        for i in range(100):
            with client.transaction() as txn:
                txn.send(topic, b"%d" % i, key=b"a")
        if round == 0:
            client.compact()
            replicate(client, dest)
            topic.truncate(50)
            if begins:
                replicate(client, dest)
    client.compact()
    same_as(client, dest)
    assert values(dest, TOPIC) == [b"99"]


def test_the_source_is_truncated_while_it_is_copied(
    client: txnkv.Client, dest: txnkv.Client
) -> None:
    """What was copied before goes, too; and where the source goes on nothing shows it any more."""
    topic = client.create_topic(TOPIC)
    for i in range(20):
        send(client, f"{i}")
    puts = iter(range(100))

    def cut() -> None:
        if next(puts) == 9:
            topic.truncate(after=4)
            for i in range(10):
                send(client, f"new {i}")

    cut_while_it_copies(client, dest, cut)
    assert values(dest, TOPIC) == [
        *(b"%d" % i for i in range(5)),
        *(b"new %d" % i for i in range(10)),
    ]


@pytest.mark.parametrize("buffer", ["marker", "sidecar"])
def test_retention_overtakes_a_copy(buffer: Any, client: txnkv.Client, dest: txnkv.Client) -> None:
    """It ended with an OffsetOutOfRangeError, and the next one went on."""
    topic = client.create_topic(TOPIC, buffer=buffer)
    for i in range(40):
        send(client, f"{i}")
    puts = iter(range(100))

    def cut() -> None:
        if (done := next(puts)) in (9, 12):
            topic.truncate(30 if done == 9 else "latest")
            send(client, "new")

    cut_while_it_copies(client, dest, cut)
    assert values(dest, TOPIC)[-1:] == [b"new"]


def test_what_is_open_in_a_copy_was_truncated_below_the_start_of_its_source(
    client: txnkv.Client, dest: txnkv.Client
) -> None:
    """Its end would never come, and readers of the copy would wait for it."""
    source = Writer(client, TOPIC)
    row = source.begin()
    source.append(row, "a", "b")
    source.commit(row)
    replicate(client, dest)
    source.truncate(0)  # each batch is a filler by itself: the end of the transaction was noted
    client.topic(TOPIC).truncate(2)
    source.small("new")
    same_as(client, dest)
    assert bounds(dest) == (2, 4, 4)
    assert values(dest, TOPIC) == [b"new"]


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_what_is_open_in_a_copy_was_left_out_of_its_source(
    end: str, client: txnkv.Client, dest: txnkv.Client
) -> None:
    """With its end, by key compaction."""
    topic = client.create_topic(TOPIC, cleanup="compact")
    source = Writer(client, TOPIC)
    row = source.begin()
    source.append(row, "old", key=b"a")
    source.small("kept")
    replicate(client, dest)
    getattr(source, end)(row)
    with client.transaction() as txn:
        txn.send(topic, b"new", key=b"a")
    client.compact()
    same_as(client, dest)
    assert values(dest, TOPIC) == [b"kept", b"new"]


@pytest.mark.parametrize("compacts", [True, False])
@pytest.mark.parametrize("end", ["commit", "abort"])
def test_what_is_open_in_a_copy_began_below_the_start_of_its_source(
    end: str, compacts: bool, client: txnkv.Client, dest: txnkv.Client
) -> None:
    """Key compaction leaves out its end as well: no batch shows it. Else the copy goes on."""
    topic = client.create_topic(TOPIC, cleanup="compact")
    source = Writer(client, TOPIC)
    row = source.begin()
    source.append(row, *["old"] * 5, key=b"a")
    for i in range(3):
        source.small(f"{i}")
    replicate(client, dest)
    getattr(source, end)(row)
    with client.transaction() as txn:
        txn.send(topic, b"new", key=b"a")
    topic.truncate(5)
    if compacts:
        client.compact()
    done = replicate(client, dest)
    assert done.copied_bytes == len(raw(client, TOPIC, 0, 5 if compacts else 8))
    same_as(client, dest)
    assert values(dest, TOPIC) == [b"0", b"1", b"2", b"new"]
