"""The choice of the partition that a message goes to.

    it names one      that one
    it has a key      by `hash64` of the key's bytes: equal keys meet in one partition, in order
    neither           one for all such messages of a flush, another the next time: few large
                      batches instead of many small ones

The numbers of keys are frozen: messages of one key stay together over versions of the library.
"""

from __future__ import annotations

import random
from typing import Final

import pyarrow as pa

from txnkv import core
from txnkv.core import compute as pc
from txnkv.topics.messages.message_input import Outgoing, Single

_MIX: Final = 0x9E3779B97F4A7C15


class Sticky:
    """The partition of messages that say nothing; another one with each flush."""

    def __init__(self) -> None:
        self._next = random.getrandbits(16)

    def turn(self, partitions: int) -> int:
        self._next += 1
        return self._next % partitions


def spread(outgoing: Outgoing, partitions: int, sticky: int) -> list[tuple[int, pa.RecordBatch]]:
    """The messages of each partition that gets some, in their order.

    Args:
        outgoing: the messages.
        partitions: how many there are.
        sticky: where those without key and partition go.
    """
    messages, given = outgoing
    if partitions == 1:
        return [(0, messages)]
    keys = messages.column("key") if "key" in messages.schema.names else None
    if given is None and keys is None:
        return [(sticky, messages)]
    if messages.num_rows == 1:
        number = None if given is None else given[0].as_py()
        key = None if keys is None else keys[0].as_py()
        if number is None:
            number = sticky if key is None else partition_of(key, partitions)
        return [(number, messages)]
    numbers = pa.scalar(sticky, pa.uint16())
    if keys is not None:
        hashed = core.hash_partition(_as_keys(keys), partitions)
        numbers = pc.if_else(keys.is_valid(), hashed, numbers) if keys.null_count else hashed
    if given is not None:
        numbers = pc.coalesce(given.cast(pa.uint16()), numbers)
    found = []
    for number, rows in enumerate(core.scatter(numbers, partitions)):
        if rows.n == messages.num_rows:
            return [(number, messages)]
        if rows.n:
            found.append((number, messages.take(rows.to_arrow())))
    return found


def partition_of_one(message: Single, partitions: int, sticky: int) -> int:
    """The partition of one message: where `spread` has it."""
    if partitions == 1:
        return 0
    return sticky if message.key is None else partition_of(message.key, partitions)


def partition_of(key: bytes, partitions: int) -> int:
    """Return the number of the partition of one key: as `core.hash_partition` has it."""
    mixed = core.hash64(key) * _MIX & 0xFFFFFFFFFFFFFFFF
    return (mixed >> 32) * partitions >> 32


def _as_keys(keys: pa.BinaryArray) -> core.Keys:
    _, offsets, data = keys.buffers()
    part = offsets.slice(4 * keys.offset, 4 * (len(keys) + 1))
    return core.Keys.variable(b"" if data is None else data, part)
