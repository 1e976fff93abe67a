"""Cutting a range of a partition, so that several may read it side by side.

What a range weighs is guessed from its first batches, and a cut is moved to where a chunk of
the log begins, if there is one between it and the cut before. So both cost a look or two at
LMDB, however long the range is.
"""

from __future__ import annotations

from typing import Final

from txnkv.core import within
from txnkv.topics.log import KEY, LOG, behind, seek_at_or_below
from txnkv.topics.partition import Partition
from txnkv.topics.read.log_view import LogView, look_at
from txnkv.topics.topics import Topics

_SAMPLE_BYTES: Final = 256 << 10
_END: Final = 1 << 63


def weight(topics: Topics, partition: Partition, start: int, end: int) -> int:
    """About how many bytes, decoded, lie in [start, end), which the partition holds.

    Raises:
        OffsetOutOfRangeError: it does not hold it.
        TopicNotFoundError: the topic was dropped.
    """
    if start >= end:
        return 0

    def see(view: LogView) -> int:
        view.require(start)
        parts = view.read(start, _SAMPLE_BYTES, view.high_watermark)
        if not parts:
            return 0
        offsets = max(behind(parts[-1]) - start, 1)
        decoded = sum(within(part, _END)[1] for part in parts)
        return decoded * (end - start) // offsets

    return look_at(topics, partition, see)


def cuts(partition: Partition, start: int, end: int, parts: int) -> list[int]:
    """Offsets that cut [start, end) in at most so many parts; the first is `start`, the last `end`.

    Not inside a transaction on the partition's environment.
    """
    found = [start]
    if parts > 1 and partition.exists:
        step = max((end - start) / parts, 1)
        with partition.environment.read() as txn, txn.cursor(db=_log(partition)) as cursor:
            for i in range(1, parts):
                wanted = min(start + round(i * step), end)
                at = wanted
                if seek_at_or_below(cursor, KEY.pack(wanted)):
                    (base,) = KEY.unpack(cursor.key())
                    at = base if base > found[-1] else wanted
                if found[-1] < at < end:
                    found.append(at)
    return [*found, end]


def _log(partition: Partition) -> object:
    return partition.environment.db(LOG)
