"""The contents of a topic's logs, read without a consumer: for tests and for the crash driver."""

from __future__ import annotations

from typing import NamedTuple

import txnkv
from txnkv import core
from txnkv.topics.topic_catalog import TopicInfo
from txnkv.topics.topics import Partition
from txnkv.topics.write import roll_forward


class Stored(NamedTuple):
    """One data batch as it lies in the log."""

    offset: int
    values: list[bytes | None]
    header: core.BatchHeader


def partitions(client: txnkv.Client, topic: str) -> list[Partition]:
    """The partitions of a topic."""
    info: TopicInfo = client.instance.topics.get(topic)
    return client.instance.topics.partitions(info)


def raw(client: txnkv.Client, topic: str, number: int = 0, start: int | None = None) -> bytes:
    """All batches of a partition, with what waited for its log."""
    partition = partitions(client, topic)[number]
    roll_forward.complete(client.instance.topics, partition)
    with partition.environment.read() as txn:
        offset = partition.log.start(txn) if start is None else start
        return b"".join(bytes(part) for part in partition.log.read(txn, offset, 1 << 62))


def stored(client: txnkv.Client, topic: str, number: int = 0) -> list[Stored]:
    """The data batches of a partition, in offset order, whether committed or not."""
    data = raw(client, topic, number)
    found = []
    for at, header in core.walk(data):
        if header.is_control:
            continue
        batch = data[at : at + header.length]
        offset = header.base_offset
        rows = core.decode(batch, core.all_data(batch, offset, header.next_offset), offset, None)
        found.append(Stored(offset, rows.column("value").to_pylist(), header))
    return found


def values(client: txnkv.Client, topic: str, number: int = 0) -> list[bytes | None]:
    """The values in a partition, in offset order."""
    return [value for batch in stored(client, topic, number) for value in batch.values]
