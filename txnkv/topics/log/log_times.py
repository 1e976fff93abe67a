"""Messages by their time, in batches that stand one behind the other."""

from __future__ import annotations

from typing import Any

from txnkv.core import all_data, decode
from txnkv.topics.log.log_truncate import walked


def first_not_older(batches: Any, low: int, micros: int) -> int | None:
    """The offset of the first message at or behind `low` that is not older than a time.

    Args:
        batches: one or more whole ones.
        low: an offset.
        micros: microseconds since 1970.

    Returns:
        None when all are older.
    """
    for at, header in walked(batches):
        if header.max_timestamp < micros or header.is_control or header.next_offset <= low:
            continue
        if header.base_timestamp >= micros:
            return max(header.base_offset, low)
        found = _inside(batches[at : at + header.length], low, micros)
        if found is not None:
            return found
    return None


def _inside(batch: Any, low: int, micros: int) -> int | None:
    rows = decode(batch, all_data(batch, low, 1 << 63), low, None)
    times = rows.column("timestamp").cast("int64").to_pylist()
    offsets = rows.column("offset").to_pylist()
    pairs = zip(offsets, times, strict=True)
    return next((offset for offset, time in pairs if time >= micros), None)
