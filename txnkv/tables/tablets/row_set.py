"""Keys in a disk row set: which are there, for whom, and what was done to them since.

Everything that is asked of many keys at once goes block by block in C: the keys that may be in
a block are a slice of those asked for, matched with the block's by merge or search. What a
match yields is a pair of numbers, and the stamps of the row decide who sees it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

import pyarrow as pa

from txnkv import core
from txnkv.core import compute as pc
from txnkv.tables.tablets.row_set_blocks import RowSetBlocks, RowSetRetired
from txnkv.tables.tablets.row_set_format import BLOOM, KEYS
from txnkv.tables.tablets.tablet_files import Pages

__all__ = ["RowSet", "RowSetRetired"]

_PROBE_SHARE = 64
"""Below one probe for so many rows of a block, its Bloom filter is asked first."""

_U32, _U64 = pa.uint32(), pa.uint64()


class RowSet(RowSetBlocks):
    """One row set of a tablet. Shared by threads."""

    # -- many keys ---------------------------------------------------------------------

    def find_many(
        self, pages: Pages, probes: core.Keys, snapshot: int
    ) -> Iterator[tuple[int, int, pa.UInt32Array]]:
        """Find those of `probes` (strictly ascending) that a snapshot sees here.

        Yields:
            Block number, position of the first probe, and for it and those behind it the
            row in the block, null where absent.
        """
        for number, start, some in self._promising(pages, probes):
            positions, rows = self._seen_matches(pages, number, some, snapshot)
            if len(rows) == 0:
                continue
            if len(rows) < some.n:
                asked = core.Rows.range(some.n).to_arrow()
                rows = rows.take(pc.index_in(asked, value_set=positions))
            yield number, start, rows

    def common(self, pages: Pages, keys: core.Keys, snapshot: int | None = None) -> pa.UInt32Array:
        """Positions of those of `keys` (strictly ascending) that a snapshot sees here; without one
        of all that are here, whatever their stamps.
        """
        found: list[pa.Array] = []
        for number, start, some in self._promising(pages, keys):
            if snapshot is None or self.visible(pages, number, snapshot) is None:
                hits = core.mark_common(some, self.keys(pages, number))
                positions = hits.positions().to_arrow()
            else:
                positions, _ = self._seen_matches(pages, number, some, snapshot)
            if len(positions):
                found.append(_raised(positions, start))
        return _joined(found)

    def locate(
        self, pages: Pages, keys: core.Keys, snapshot: int | pa.UInt64Array
    ) -> tuple[pa.UInt32Array, pa.UInt32Array]:
        """Find those of `keys` (strictly ascending) that a snapshot sees here.

        Args:
            pages: a read.
            keys: what to look for.
            snapshot: one for all keys, or one for each.

        Returns:
            Positions of keys, ascending, and the number in the row set of the row of each.
        """
        found: list[pa.Array] = []
        numbers: list[pa.Array] = []
        blocks = self.header(pages).blocks
        for number, start, some in self._promising(pages, keys):
            at = snapshot if isinstance(snapshot, int) else snapshot.slice(start, some.n)
            positions, rows = self._seen_matches(pages, number, some, at)
            if len(rows):
                found.append(_raised(positions, start))
                numbers.append(_raised(rows, blocks[number].start))
        return _joined(found), _joined(numbers)

    def _seen_matches(
        self, pages: Pages, number: int, some: core.Keys, snapshot: int | pa.UInt64Array
    ) -> tuple[pa.UInt32Array, pa.UInt32Array]:
        """Positions of `some` and rows of a block that have the same key and are seen."""
        positions, rows = self._matches(pages, number, some)
        if len(rows) == 0 or self.info.stamp is None:
            return positions, rows
        if isinstance(snapshot, int):
            seen = self.seen(pages, number, snapshot)
            if seen is None:
                return positions, rows
            kept = seen.take(rows)
        else:
            inserts, deletes = self.stamps_of(pages, number, rows)
            own = snapshot.take(positions)
            kept = pc.and_(pc.less_equal(inserts, own), pc.greater(deletes, own))
        return positions.filter(kept), rows.filter(kept)

    def _matches(
        self, pages: Pages, number: int, some: core.Keys
    ) -> tuple[pa.UInt32Array, pa.UInt32Array]:
        """Positions of `some` and rows of a block that have the same key, both ascending."""
        keys = self.keys(pages, number)
        if self.info.versioned:  # equal keys: each row is looked for among those asked for
            found = core.find(some, keys)
            rows = _where(pc.greater_equal(found, 0))
            return found.take(rows).cast(_U32), rows
        found = core.find(keys, some)
        positions = _where(pc.greater_equal(found, 0))
        return positions, found.take(positions).cast(_U32)

    # -- changes -----------------------------------------------------------------------

    def touched(self, pages: Pages, keys: core.Keys, after: int) -> int:
        """The position of the first of `keys` (strictly ascending) that was inserted or deleted
        here above `after`, or -1.
        """
        if not self._changed_after(after):
            return -1
        for number, start, some in self._promising(pages, keys):
            positions, rows = self._matches(pages, number, some)
            if len(rows) == 0:
                continue
            changed = self.changed(pages, number, after)
            if changed is not None:
                positions = positions.filter(changed.take(rows))
            if len(positions):
                return start + int(positions[0].as_py())
        return -1

    def touched_range(
        self, pages: Pages, low: bytes | None, high: bytes | None, after: int
    ) -> bytes | None:
        """The first key with low <= key < high that was inserted or deleted here above `after`."""
        if not self._changed_after(after):
            return None
        for number in self.blocks_between(pages, low, high):
            keys = self.block(pages, KEYS, number)
            lo = 0 if low is None else core.lower_bound_in(keys, low)
            hi = core.block_rows(keys) if high is None else core.lower_bound_in(keys, high)
            if lo >= hi:
                continue
            changed = self.changed(pages, number, after)
            at = 0 if changed is None else pc.index(changed.slice(lo, hi - lo), True).as_py()
            if at >= 0:
                return self.keys(pages, number).key(lo + at)
        return None

    def _changed_after(self, after: int) -> bool:
        info = self.info
        return info.stamp is None or info.stamp > after or info.max_delete > after

    # -- which blocks ------------------------------------------------------------------

    def _promising(self, pages: Pages, keys: core.Keys) -> Iterator[tuple[int, int, core.Keys]]:
        """Blocks that may hold some of `keys`: which, the position of the first, and those keys.

        A Bloom filter is asked where they are few for the block, for its key block is larger.
        """
        if keys.n == 0:
            return
        blocks = self.header(pages).blocks
        for number in self._candidates(pages, keys):
            block = blocks[number]
            start = core.lower_bound(keys, block.first)
            stop = core.lower_bound(keys, block.last + b"\0")
            if start == stop:
                continue
            some = keys.slice(start, stop - start)
            if some.n * _PROBE_SHARE < block.rows:
                maybe = core.bloom_probe(self.block(pages, BLOOM, number), some)
                if maybe.count == 0:
                    continue
            yield number, start, some

    def _candidates(self, pages: Pages, keys: core.Keys) -> Sequence[int]:
        """Blocks whose key range may meet `keys`; by key where the keys are few."""
        span = self.blocks_between(pages, keys.key(0), keys.key(keys.n - 1) + b"\0")
        if keys.n >= len(span):
            return span
        numbers: set[int] = set()
        for i in range(keys.n):
            key = keys.key(i)
            numbers.update(range(bisect_left(self.lasts, key), bisect_right(self.firsts, key)))
        return sorted(numbers)


def _where(mask: pa.BooleanArray) -> pa.UInt32Array:
    return core.Bitmap.from_arrow(mask).positions().to_arrow()


def _raised(positions: pa.Array, by: int) -> pa.Array:
    return positions if by == 0 else pc.add(positions, pa.scalar(by, _U32))


def _joined(parts: list[pa.Array]) -> pa.UInt32Array:
    if len(parts) == 1:
        return parts[0]
    return pa.concat_arrays(parts) if parts else pa.nulls(0, _U32)
