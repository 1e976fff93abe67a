"""Keys that two row sets of one tablet have in common: a sorted merge of their key blocks."""

from __future__ import annotations

from txnkv import core
from txnkv.tables.manifest import RowSetInfo
from txnkv.tables.tablet import Tablet


def common_keys(tablet: Tablet, a: RowSetInfo, b: RowSetInfo, limit: int) -> list[bytes]:
    """Up to `limit` keys that are in both row sets."""
    low, high = max(a.min_key, b.min_key), min(a.max_key, b.max_key)
    if low > high:
        return []
    smaller, larger = (a, b) if a.rows <= b.rows else (b, a)
    found: list[bytes] = []
    with tablet.read() as pages:
        probe, other = tablet.row_set(smaller), tablet.row_set(larger)
        for number in probe.blocks_between(pages, low, high + b"\0"):
            keys = probe.keys(pages, number)
            start = core.lower_bound(keys, low)
            stop = core.lower_bound(keys, high + b"\0")
            for position in other.common(pages, keys.slice(start, stop - start)):
                found.append(keys.key(start + position.as_py()))
                if len(found) >= limit:
                    return found
    return found
