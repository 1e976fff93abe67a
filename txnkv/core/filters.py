"""Answers about a block without reading it: Bloom filters over keys, zone maps of values.

A filter never says no of a key that is there, and yes of one absent key in a hundred. A zone map
has a block's least and greatest value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from txnkv.core.keys import Keys
from txnkv.core.native import CoreError, allocate, check, ffi, lib, pointer, readable
from txnkv.core.rows import Bitmap
from txnkv.core.value_codecs import key_type


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


def bloom_probe(block: Any, probes: Keys) -> Bitmap:
    """Return a bit for each probe. 0: it is in no set that the filter was built of. 1: it may be.

    Raises:
        CoreError: the block is no filter.
    """
    view = _filter(block)
    bits = allocate((probes.n + 7) // 8)
    count = ffi.new("uint32_t *")
    lib.bloom_probe_batch(view.data, view.data_len, probes.c, pointer(bits), count)
    return Bitmap(probes.n, bits, count[0])


def _filter(block: Any) -> Any:
    memory = readable(block)
    view = ffi.new("block_t *")
    check(lib.block_parse(memory, len(memory), view), "reading a Bloom filter")
    if view.kind != lib.BLOCK_OPAQUE or view.data_len == 0 or view.data_len % 32:
        raise CoreError("reading a Bloom filter: this block is none. Check where it came from.")
    return view


@dataclass(frozen=True, slots=True)
class Zone:
    """The range of a block's values, encoded as the last column of a key, cut to 16 bytes.

    Attributes:
        min: at or below every value; None when there is none, or no order is known.
        max: the greatest value; when not `exact`, every value that begins with it is possible.
        null_count: how many rows are null.
        exact: whether nothing was cut. False with no min: the type has no order, and nothing
            is known.
    """

    min: bytes | None
    max: bytes | None
    null_count: int
    exact: bool

    def overlaps(self, low: bytes | None, high: bytes | None) -> bool:
        """Return True when a value v with low <= v <= high may be in the block.

        Args:
            low: an encoded value, not cut; None for no bound.
            high: the same.
        """
        if self.min is None or self.max is None:
            return not self.exact
        if high is not None and self.min > high:
            return False
        if low is None or low <= self.max:
            return True
        return not self.exact and low.startswith(self.max)


def zone(block: Any, type_: pa.DataType) -> Zone:
    """The zone map of a verified block.

    Args:
        block: what `encode_block` made, any buffer object.
        type_: of its values.

    Raises:
        CoreError: the block is damaged, or not of this type.
    """
    memory = readable(block)
    view = ffi.new("block_t *")
    check(lib.block_parse(memory, len(memory), view), f"mapping a block of {type_}")
    kind = key_type(type_)
    if kind is None:
        return Zone(None, None, view.null_count, exact=view.rows == view.null_count)
    out = ffi.new("zone_t *")
    if status := lib.zone_compute(view, kind, out):
        check(status, f"mapping a block of {type_}")
    if not out.has_values:
        return Zone(None, None, out.null_count, exact=True)
    return Zone(
        bytes(ffi.buffer(out.min, out.min_len)),
        bytes(ffi.buffer(out.max, out.max_len)),
        out.null_count,
        bool(out.exact),
    )
