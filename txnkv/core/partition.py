"""Spreading rows over partitions.

The numbers of `hash_partition` are frozen: a stored row stays in the tablet they name.
"""

from __future__ import annotations

import pyarrow as pa

from txnkv.core.keys import Keys
from txnkv.core.native import allocate, check, lib, pointer
from txnkv.core.rows import Rows


def hash_partition(keys: Keys, buckets: int) -> pa.UInt16Array:
    """For each key a bucket in [0, buckets), by the hash of its bytes.

    Args:
        keys: the columns hashed by, encoded with a codec of their own.
        buckets: 1 to 65536.

    Raises:
        ValueError: buckets is outside of that.
    """
    _demand_parts(buckets)
    out = allocate(2 * keys.n)
    lib.partition_hash(keys.c, buckets, pointer(out, "uint16_t *"))
    return pa.Array.from_buffers(pa.uint16(), keys.n, [None, out])


def range_partition(keys: Keys, bounds: Keys) -> pa.UInt16Array:
    """For each key how many of the ascending bounds are at or below it.

    So with bounds [10, 20] keys below 10 are in 0, 10 to 19 in 1, the rest in 2.

    Raises:
        ValueError: there are more than 65535 bounds.
    """
    _demand_parts(bounds.n + 1)
    out = allocate(2 * keys.n)
    lib.partition_range(keys.c, bounds.c, pointer(out, "uint16_t *"))
    return pa.Array.from_buffers(pa.uint16(), keys.n, [None, out])


def scatter(numbers: pa.UInt16Array, nparts: int) -> list[Rows]:
    """The rows of each partition, ascending.

    Args:
        numbers: for each row its partition, without nulls.
        nparts: how many partitions, 1 to 65536.

    Raises:
        IndexError: a number is not below nparts.
        TypeError: the numbers are not uint16.
        ValueError: nparts is outside of that, or there are nulls.
    """
    _demand_parts(nparts)
    if numbers.type != pa.uint16():
        raise TypeError(f"partition numbers are uint16, not {numbers.type}; cast them")
    if numbers.null_count:
        raise ValueError(f"partition numbers have {numbers.null_count} nulls")
    n = len(numbers)
    rows, starts = allocate(4 * n), allocate(4 * (nparts + 1))
    ends = pointer(starts, "uint32_t *")
    source = pointer(numbers.buffers()[1] if n else None, "uint16_t *")
    source = source + numbers.offset if n else source
    status = lib.partition_scatter(source, n, nparts, pointer(rows, "uint32_t *"), ends)
    check(status, f"spreading {n} rows over {nparts} partitions")
    whole = Rows(rows, n)
    return [whole.slice(ends[p], ends[p + 1] - ends[p]) for p in range(nparts)]


def _demand_parts(parts: int) -> None:
    if not 1 <= parts <= 65536:
        raise ValueError(f"{parts} partitions; there can be 1 to 65536")
