"""Bloom filters over keys: no false no, and a false yes for one absent key in a hundred."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from txnkv.core.keys import Keys
from txnkv.core.native import CoreError, allocate, check, ffi, lib, pointer, readable
from txnkv.core.rows import Bitmap


def bloom_build(keys: Keys, seed: int) -> pa.Buffer:
    """A filter of the keys at 10 bits each, as an opaque block.

    Args:
        keys: in any order.
        seed: of the block's checksum, a uint32.
    """
    bits = allocate(lib.bloom_size(keys.n))
    lib.bloom_build(keys.c, pointer(bits), bits.size)
    block = allocate(lib.block_size_of_opaque(bits.size))
    lib.block_encode_opaque(pointer(bits), bits.size, keys.n, 0, seed, pointer(block), block.size)
    return block


def bloom_may_contain(block: Any, key: bytes) -> bool:
    """False: the key is in no set that the filter was built of. True: it may be.

    Args:
        block: what `bloom_build` made, verified.
        key: an encoded key.

    Raises:
        CoreError: the block is no filter.
    """
    view, memory = _filter(block)
    has = lib.bloom_probe(view.data, view.data_len, readable(key), len(key))
    del memory
    return bool(has)


def bloom_probe(block: Any, probes: Keys) -> Bitmap:
    """Return a bit for each probe: what `bloom_may_contain` says of it.

    Raises:
        CoreError: the block is no filter.
    """
    view, memory = _filter(block)
    bits = allocate((probes.n + 7) // 8)
    count = ffi.new("uint32_t *")
    lib.bloom_probe_batch(view.data, view.data_len, probes.c, pointer(bits), count)
    del memory
    return Bitmap(probes.n, bits, count[0])


def _filter(block: Any) -> tuple[Any, Any]:
    memory = readable(block)
    view = ffi.new("block_t *")
    check(lib.block_parse(memory, len(memory), view), "reading a Bloom filter")
    if view.kind != lib.BLOCK_OPAQUE or view.data_len == 0 or view.data_len % 32:
        raise CoreError("reading a Bloom filter: this block is none. Check where it came from.")
    return view, memory
