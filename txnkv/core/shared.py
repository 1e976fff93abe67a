"""64-bit atomics in memory that processes share, as a mapped file.

All are sequentially consistent. `offset` is in bytes, a multiple of 8.
"""

from __future__ import annotations

from typing import Any

from txnkv.core.native import lib, readable, writable

_MASK = 0xFFFFFFFFFFFFFFFF


def _fits(memory: Any, offset: int) -> int:
    size = len(memory)
    if offset < 0 or offset % 8 or offset + 8 > size:
        raise IndexError(f"a 64-bit word at byte {offset} of {size}; take a multiple of 8 inside")
    return size


def shared_load(buf: Any, offset: int) -> int:
    """The word at `offset`."""
    memory = readable(buf)
    return int(lib.shared_load(memory, _fits(memory, offset), offset))


def shared_store(buf: Any, offset: int, value: int) -> None:
    """Sets the word at `offset`."""
    memory = writable(buf)
    lib.shared_store(memory, _fits(memory, offset), offset, value)


def shared_add(buf: Any, offset: int, delta: int) -> int:
    """Adds to the word at `offset`, modulo 2^64; `delta` may be negative.

    Returns:
        The value before.
    """
    memory = writable(buf)
    return int(lib.shared_add(memory, _fits(memory, offset), offset, delta & _MASK))


def shared_cas(buf: Any, offset: int, expected: int, desired: int) -> bool:
    """Sets the word to `desired` if it is `expected`; says whether it did."""
    memory = writable(buf)
    return bool(lib.shared_cas(memory, _fits(memory, offset), offset, expected, desired))
