"""Orders of keys: sorting, searching, comparing two sets, and merging sources a block at a time."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from txnkv.core.keys import Keys
from txnkv.core.native import allocate, check, ffi, lib, pointer, readable
from txnkv.core.rows import Bitmap, Rows, rows_pointer


def sort_keys(keys: Keys, rows: Rows | None = None) -> Rows | None:
    """The stable ascending order of keys.

    Args:
        keys: in any order, equal ones among them.
        rows: the keys to sort, in this order; None for all.

    Returns:
        Row numbers of `keys`; or None when they stand in strictly ascending order as they
        are, and there is nothing to do.

    Raises:
        IndexError: a row is not in `keys`.
        MemoryError: there is no room for 32 bytes a key.
    """
    n = keys.n if rows is None else rows.n
    order = allocate(4 * n)
    ascending = ffi.new("int *")
    status = lib.sort_order(keys.c, rows_pointer(rows), n, pointer(order, "uint32_t *"), ascending)
    check(status, f"sorting {n} keys")
    return None if ascending[0] else Rows(order, n)


def mark_duplicates(keys: Keys, order: Rows | None) -> Bitmap:
    """Marks the keys that equal the one before them.

    Args:
        keys: the keys.
        order: how they stand; None for as they are.

    Returns:
        A bit for each position in `order`; the first is never set.

    Raises:
        IndexError: a row of `order` is not in `keys`.
    """
    n = keys.n if order is None else order.n
    bits = allocate((n + 7) // 8)
    count = ffi.new("uint32_t *")
    status = lib.sort_mark_duplicates(keys.c, rows_pointer(order), n, pointer(bits), count)
    check(status, f"marking duplicates of {n} keys")
    return Bitmap(n, bits, count[0])


def lower_bound(keys: Keys, key: bytes) -> int:
    """Return the number of ascending keys that are below `key`."""
    return int(lib.search_lower_bound(keys.c, readable(key), len(key)))


def find(keys: Keys, probes: Keys) -> pa.Int32Array:
    """The position of each probe in strictly ascending keys, -1 when absent.

    Probes may come in any order; ascending ones go faster.

    Raises:
        ValueError: there are 2^31 keys or more.
    """
    if keys.n > 0x7FFFFFFF:
        raise ValueError(f"positions are int32, {keys.n} keys are too many; search slices")
    out = allocate(4 * probes.n)
    lib.search_batch(keys.c, probes.c, pointer(out, "int32_t *"))
    return pa.Array.from_buffers(_INT32, probes.n, [None, out])


_INT32 = pa.int32()


def mark_common(a: Keys, b: Keys) -> Bitmap:
    """Marks the keys of `a` that are in `b`; both strictly ascending.

    Returns:
        A bit for each key of `a`.
    """
    bits = allocate((a.n + 7) // 8)
    count = ffi.new("uint32_t *")
    lib.merge_common(a.c, b.c, pointer(bits), count)
    return Bitmap(a.n, bits, count[0])


class Merger:
    """Merges ascending sources; equal keys come in the order of their sources.

    `next` stops when a source has run out of keys, for only its owner knows whether another
    block of it follows: every source in `exhausted` is then either continued with `replace`
    or ended with `finish`, and the merge goes on.

        merger = Merger(sources)
        while not merger.done:
            for i in merger.exhausted:
                more = next_block(i)
                merger.replace(i, more) if more else merger.finish(i)
            source, index = merger.next(65536)

    Attributes:
        exhausted: sources without keys left that are not finished.
    """

    def __init__(self, sources: Sequence[Keys]) -> None:
        """Begins a merge.

        Raises:
            ValueError: there are more than 65536 sources.
        """
        if len(sources) > 65536:
            raise ValueError(f"{len(sources)} sources; merge 65536 at most, then their results")
        k = len(sources)
        self._keys = list(sources)
        self._c = ffi.new("keys_t[]", k)
        self._cursors = ffi.new("uint32_t[]", k)
        self._n = ffi.new("uint32_t *")
        self._finished: set[int] = set()
        self.exhausted: list[int] = []
        for i, keys in enumerate(sources):
            self._c[i] = keys.c[0]
        self._look()

    @property
    def done(self) -> bool:
        """True when every source is finished."""
        return len(self._finished) == len(self._keys)

    def next(self, cap: int) -> tuple[pa.UInt16Array, pa.UInt32Array]:
        """The next keys, `cap` at most.

        Returns:
            For each key its source, and its index in that source's present keys. Empty when
            all is done.

        Raises:
            ValueError: a source in `exhausted` was neither replaced nor finished.
            MemoryError: there is no memory; nothing was taken.
        """
        if self.exhausted:
            raise ValueError(f"sources {self.exhausted} ran out: replace or finish them first")
        left = sum(keys.n - self._cursors[i] for i, keys in enumerate(self._keys))
        cap = min(cap, left)
        source, index = allocate(2 * cap), allocate(4 * cap)
        to = pointer(source, "uint16_t *"), pointer(index, "uint32_t *")
        status = lib.merge_kway(self._c, len(self._keys), self._cursors, cap, *to, self._n)
        check(status, f"merging {len(self._keys)} sources")
        n = self._n[0]
        self._look()
        return (
            pa.Array.from_buffers(pa.uint16(), n, [None, source]),
            pa.Array.from_buffers(pa.uint32(), n, [None, index]),
        )

    def replace(self, i: int, keys: Keys) -> None:
        """Continues an exhausted source with its next keys; they are not below its last.

        Raises:
            ValueError: the source is not exhausted.
        """
        self._demand_exhausted(i)
        self._keys[i] = keys
        self._c[i] = keys.c[0]
        self._cursors[i] = 0
        self._look()

    def finish(self, i: int) -> None:
        """Says that nothing follows of an exhausted source.

        Raises:
            ValueError: the source is not exhausted.
        """
        self._demand_exhausted(i)
        self._finished.add(i)
        self._look()

    def _demand_exhausted(self, i: int) -> None:
        if i not in self.exhausted:
            raise ValueError(f"source {i} still has keys, or is finished: {self.exhausted} ran out")

    def _look(self) -> None:
        self.exhausted = [
            i
            for i, keys in enumerate(self._keys)
            if self._cursors[i] == keys.n and i not in self._finished
        ]
