"""Orders of keys: sorting, searching, comparing two sets."""

from __future__ import annotations

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


def find_one(keys: Keys, key: bytes) -> int:
    """The position of `key` in strictly ascending keys, or -1."""
    return int(lib.search_find(keys.c, readable(key), len(key)))


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
