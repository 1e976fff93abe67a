"""Which rows of a block a snapshot sees."""

from __future__ import annotations

from typing import Any

from txnkv.core.native import allocate, ffi, lib, pointer, readable
from txnkv.core.rows import Bitmap

STAMP_UNDECIDED = 1 << 63
"""The top bit of a stamp: the rest of it is the id of an undecided transaction."""

STAMP_NEVER = STAMP_UNDECIDED - 1
"""The delete stamp of a row that is not deleted. No snapshot reaches it."""


def visible(insert: Any, delete: Any | None, n: int, snapshot: int, own: int) -> tuple[Bitmap, int]:
    """The rows that a snapshot sees: inserted for it, and not deleted for it.

    A stamp counts when it is at or below the snapshot, or is the reader's own.

    Args:
        insert: n uint64 insert stamps, any buffer object.
        delete: as many delete stamps (`STAMP_NEVER`: not deleted), or None for no deletes.
        n: how many rows.
        snapshot: a commit timestamp, below `STAMP_NEVER`.
        own: the reader's own undecided stamp, top bit set, or 0 for none.

    Returns:
        A bit for each row, and the number of rows that have an undecided stamp of another:
        those are taken as not inserted, or not deleted, and their owner must be asked.

    Raises:
        ValueError: the stamps are fewer than n, the snapshot has its top bit set or is
            `STAMP_NEVER`, or `own` is not 0 and has no top bit.
    """
    if not 0 <= snapshot < STAMP_NEVER:
        raise ValueError(f"snapshot {snapshot} is no commit timestamp (0 to 2^63 - 2)")
    if own and own < STAMP_UNDECIDED:
        raise ValueError(f"own stamp {own} has no top bit; it must be 0 or an undecided stamp")
    inserts = _stamps(insert, n)
    deletes = ffi.NULL if delete is None else _stamps(delete, n)
    bits = allocate((n + 7) // 8)
    counts = ffi.new("uint32_t[2]")
    lib.visible_bitmap(inserts, deletes, n, snapshot, own, pointer(bits), counts, counts + 1)
    return Bitmap(n, bits, counts[0]), int(counts[1])


def _stamps(stamps: Any, n: int) -> Any:
    memory = readable(stamps)
    if len(memory) < 8 * n:
        raise ValueError(f"{n} stamps need {8 * n} bytes, the buffer has {len(memory)}")
    return memory
