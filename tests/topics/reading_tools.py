"""Tools of the tests of readers: logs put down batch by batch, and what consumers were given."""

from __future__ import annotations

import random
from typing import Any

import txnkv
from tests import internals
from tests.topics.log_tools import data
from txnkv import core
from txnkv.topics.topics import Partition


def partition_of(client: txnkv.Client, topic: Any, number: int = 0) -> Partition:
    """A partition of a topic."""
    return internals.topics(client).partitions(topic.info)[number]


def put(client: txnkv.Client, topic: Any, *batches: bytes, number: int = 0, ts: int = 0) -> int:
    """Put batches at the end of a log as if they had been appended; the offset of the first."""
    partition = partition_of(client, topic, number)

    def write(txn: Any) -> int:
        first = at = partition.log.end(txn)
        for batch in batches:
            partition.log.put(txn, [core.place(batch, at, ts)])
            at = partition.log.end(txn)
        with internals.status(client).write() as cur:
            cur.execute("UPDATE partitions SET next_offset = ? WHERE id = ?", (at, partition.id))
        return first

    return int(partition.environment.write(write))


def drained(consumer: Any, most: int = 500) -> list[Any]:
    """All messages that a consumer is given now."""
    found: list[Any] = []
    while messages := consumer.poll(max_messages=most, timeout=0):
        found += messages
    return found


def looped(consumer: Any, counts: list[int], order: str, seed: int) -> None:
    """Loop over a consumer of a topic with so many messages in its partitions; leave the loop, go
    on by another one or by polls, ask where it is and seek: nothing is passed over nor given twice.
    """
    chosen, at = random.Random(seed), [0] * len(counts)

    def note(partition: int, offset: int) -> None:
        assert offset == at[partition]
        at[partition] += 1

    while left := sum(counts) - sum(at):
        way, count = chosen.random(), chosen.randint(1, min(left, 9))
        if way < 0.2:
            for message in consumer.poll(max_messages=count, timeout=0):
                note(message.partition, message.offset)
        elif way < 0.4:
            batch = consumer.poll_batch(max_messages=count, timeout=0).to_pydict()
            for pair in zip(batch["partition"], batch["offset"], strict=True):
                note(*pair)
        for message in consumer if way >= 0.4 else ():
            note(message.partition, message.offset)
            count -= 1
            if order == "offset" and chosen.random() < 0.5:
                known = [consumer.position(n) for n in range(len(counts))]
                # A marker stands behind the messages.
                assert [min(*pair) for pair in zip(known, counts, strict=True)] == at
                more = [max(end - n, 0) for end, n in zip(counts, at, strict=True)]
                assert consumer.lag() - sum(more) in range(len(counts) + 1)
            else:
                assert all(consumer.position(n) <= at[n] + 1 for n in range(len(counts)))
            if order != "serializable" and chosen.random() < 0.05:
                number = chosen.randrange(len(counts))
                at[number] = chosen.randrange(counts[number])
                consumer.seek(number, at[number])
                break
            if count <= 0:
                break


def given(consumer: Any, most: int = 500) -> list[tuple[int, bytes]]:
    """(offset, value) of all messages that a consumer is given now."""
    return [(m.offset, m.value) for m in drained(consumer, most)]


def offsets(consumer: Any) -> list[int]:
    """The offsets of all messages that a consumer is given now."""
    return [m.offset for m in drained(consumer)]


def uncounted(batch: bytes, count: int) -> bytes:
    """A batch that takes more offsets than it has messages, as compaction leaves one."""
    header = bytearray(batch)
    header[28:32] = count.to_bytes(4, "little")
    header[16:20] = core.crc32c(memoryview(header)[20:]).to_bytes(4, "little")
    return bytes(header)


__all__ = ["data", "drained", "given", "offsets", "partition_of", "put", "uncounted"]
