"""Keys of one source that hide rows in the sources below it.

A mask is tried on one block of keys at a time: those of its keys that lie within the block's
are searched in it, so that a few masked rows cost little on a large table, and the other way
round a large mask is never in memory as a whole.

Between unresolved and settled row sets the stamps decide: a row set that was written or merged
after an unresolved commit may hold rows older than that commit and newer ones in one block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from txnkv import core
from txnkv.core import compute as pc
from txnkv.tables.read.view import EVERY_STAMP, Sight, hidden_before, hides
from txnkv.tables.tablets import Pages, RowSet, RowSetInfo

_FEW: Final = 8
"""Below one masking key for so many of a block they are searched, else both are merged."""


@dataclass(frozen=True)
class KeyMask:
    """Keys in memory, strictly ascending."""

    keys: core.Keys
    before: int = EVERY_STAMP

    def between(self, pages: Pages, low: bytes, high: bytes) -> Iterator[core.Keys]:
        """The keys with low <= key <= high."""
        found = _between(self.keys, low, high)
        if found.n:
            yield found


@dataclass(frozen=True)
class RowSetMask:
    """The keys of a row set on disk.

    Attributes:
        before: rows inserted below this stamp are hidden.
    """

    row_set: RowSet
    before: int = EVERY_STAMP

    def between(self, pages: Pages, low: bytes, high: bytes) -> Iterator[core.Keys]:
        """The keys with low <= key <= high, in pieces."""
        info = self.row_set.info
        if info.max_key < low or high < info.min_key:
            return
        for number in self.row_set.blocks_between(pages, low, high + b"\0"):
            found = _between(self.row_set.keys(pages, number), low, high)
            if found.n:
                yield found


Mask = KeyMask | RowSetMask


def _between(keys: core.Keys, low: bytes, high: bytes) -> core.Keys:
    start = core.lower_bound(keys, low)
    return keys.slice(start, core.lower_bound(keys, high + b"\0") - start)


class Masks:
    """The masks of one sight, for scans: which of them a source has above it.

    Args:
        own: the entries of the transaction's memory, in the range that is read.
        memory: the entries of committed memory that are seen, in that range.
    """

    def __init__(self, sight: Sight, own: core.Entries | None, memory: core.Entries | None) -> None:
        self._tablet = sight.tablet
        self._sight = sight
        self._own = [KeyMask(own.keys)] if own is not None and own.n else []
        self._memory = [KeyMask(memory.keys)] if memory is not None and memory.n else []

    @property
    def over_memory(self) -> list[Mask]:
        """Above committed memory."""
        return [*self._own, *self._row_sets(self._sight.staged)]

    def over(self, info: RowSetInfo) -> list[Mask]:
        """Above one row set, those alone whose keys may meet its own."""
        found = [*self._own, *self._above(info)]
        return [mask for mask in found if _may_meet(mask, info)]

    def _above(self, info: RowSetInfo) -> list[Mask]:
        sight = self._sight
        if info in sight.staged:
            return self._row_sets(sight.staged[: sight.staged.index(info)])
        return [
            *self._row_sets(sight.staged),
            *self._memory,
            *(
                RowSetMask(self._tablet.row_set(mask), before)
                for mask in sight.unresolved
                if (before := hidden_before(mask, info))
            ),
        ]

    def _row_sets(self, infos: Sequence[RowSetInfo]) -> list[Mask]:
        return [RowSetMask(self._tablet.row_set(info)) for info in infos if hides(info)]


def _may_meet(mask: Mask, info: RowSetInfo) -> bool:
    if isinstance(mask, RowSetMask):
        return mask.row_set.info.overlaps(info.min_key, info.max_key)
    keys = mask.keys
    return keys.key(0) <= info.max_key and info.min_key <= keys.key(keys.n - 1)


def hidden(
    pages: Pages,
    masks: Sequence[Mask],
    keys: core.Keys,
    inserts: pa.UInt64Array | None = None,
    *,
    versioned: bool = False,
) -> core.Rows | None:
    """Which of some keys (ascending) masks hide, ascending; None when none is.

    Args:
        pages: a read, for masks that lie on disk.
        masks: what is above.
        keys: of the rows.
        inserts: the insert stamps of the rows; needed by masks that hide older rows alone, and
            None where all rows have the same, which those masks are known to hide then.
        versioned: a key may be there several times.
    """
    if keys.n == 0:
        return None
    low, high = keys.key(0), keys.key(keys.n - 1)
    found: list[pa.Array] = []
    for mask in masks:
        for some in mask.between(pages, low, high):
            hits = _all_of(keys, some) if versioned else _common(keys, some)
            if mask.before != EVERY_STAMP and inserts is not None:
                older = pc.less(inserts.take(hits), pa.scalar(mask.before, pa.uint64()))
                hits = hits.filter(older)
            if len(hits):
                found.append(hits)
    if not found:
        return None
    if len(found) == 1:
        return core.Rows.from_arrow(found[0])
    return core.Bitmap.of(keys.n, pa.concat_arrays(found)).positions()


def _common(keys: core.Keys, some: core.Keys) -> pa.UInt32Array:
    if some.n * _FEW >= keys.n:
        return core.mark_common(keys, some).positions().to_arrow()
    found = core.find(keys, some)
    return found.filter(pc.greater_equal(found, 0)).cast(pa.uint32())


def _all_of(keys: core.Keys, some: core.Keys) -> pa.UInt32Array:
    """Return the positions in `keys` of those in `some`; `keys` may have one several times."""
    there = pc.greater_equal(core.find(some, keys), 0)
    return core.Bitmap.from_arrow(there).positions().to_arrow()
