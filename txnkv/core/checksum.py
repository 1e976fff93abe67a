"""Checksums and hashes."""

from __future__ import annotations

from typing import Any

from txnkv.core.native import lib, readable


def crc32c(data: Any, seed: int = 0) -> int:
    """CRC-32C of a buffer object, continued from `seed`.

    The checksum of a + b is `crc32c(b, crc32c(a))`.
    """
    memory = readable(data)
    return int(lib.crc32c(seed, memory, len(memory)))


def hash64(data: Any) -> int:
    """XXH64, seed 0, of a buffer object. Frozen: stored filters and partitions rest on it."""
    memory = readable(data)
    return int(lib.hash64(memory, len(memory)))
