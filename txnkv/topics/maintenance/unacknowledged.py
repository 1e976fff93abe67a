"""Messages of a partition that subscriptions have not acknowledged, and how many are gone.

A count of lost messages lies in the partition's database `state`, under "lost" + the id of the
subscription (u64 big-endian), as u64 little-endian. It changes in the LMDB transaction that takes
the messages, so that it counts each of them once, whoever dies.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import lmdb

from txnkv.topics.acks import Cursor, SubscriptionInfo, ack_rows, subscription_rows
from txnkv.topics.log import STATE
from txnkv.topics.partition import Partition
from txnkv.topics.ranges import Ranges
from txnkv.topics.read import OffsetReader
from txnkv.topics.topics import Topics

_LITTLE: Final = 4 << 10
"""Bytes of a fetch that looks for one message."""

_KEY: Final = struct.Struct(">4sQ")
_COUNT: Final = struct.Struct("<Q")


def count(topics: Topics, partition: Partition, cursor: Cursor, first: int, last: int) -> int:
    """Offsets in [first, last) that are not deleted, from the first message of each range of them
    on: 0 when all messages are deleted. All of it is decided, and in the log.
    """
    left = Ranges([(max(first, cursor.mark), last)])
    left.difference_update(cursor.deleted)
    return sum(last - _next_message(topics, partition, first, last) for first, last in left)


def _next_message(topics: Topics, partition: Partition, first: int, last: int) -> int:
    """The first message in [first, last), or its end: markers and aborted ones are none."""
    reader = OffsetReader(topics, partition, first, "read_committed", _LITTLE)
    while reader.position < last:
        if reader.load():
            return min(int(reader.take(1).column("offset")[0].as_py()), last)
        if not reader.moved:
            break
    return last


def below(
    topics: Topics, partition: Partition, start: int, offset: int
) -> list[tuple[SubscriptionInfo, int]]:
    """Subscriptions that have not acknowledged all of [start, offset), and how many they have not;
    acks of open transactions do not count.
    """
    found = []
    with topics.store.status.read() as cur:
        subscriptions = subscription_rows.of_topic(cur, partition.topic)
    for info in subscriptions:
        with topics.store.status.read() as cur:
            cursor = ack_rows.load_cursors(cur, info.id).get(partition.id)
        left = 0 if cursor is None else count(topics, partition, cursor, start, offset)
        if left:
            found.append((info, left))
    return found


def add_lost(txn: lmdb.Transaction, partition: Partition, subscription_id: int, more: int) -> None:
    """Count what the LMDB transaction takes."""
    db = partition.environment.db(STATE)
    total = _lost(txn, db, subscription_id) + more
    txn.put(_KEY.pack(b"lost", subscription_id), _COUNT.pack(total), db=db)


def lost(partition: Partition, subscription_id: int) -> int:
    """Count the messages that a subscription had not acknowledged when they were taken."""
    if not partition.exists:
        return 0
    with partition.environment.read() as txn:
        if not partition.environment.has(STATE):
            return 0
        return _lost(txn, partition.environment.db(STATE), subscription_id)


def _lost(txn: lmdb.Transaction, db: Any, subscription_id: int) -> int:
    found = txn.get(_KEY.pack(b"lost", subscription_id), db=db)
    return 0 if found is None else int(_COUNT.unpack(found)[0])
