"""Checksums, hashes, Bloom filters and visibility, against plain Python."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from txnkv.core import (
    STAMP_NEVER,
    STAMP_UNDECIDED,
    CoreError,
    Keys,
    bloom_build,
    bloom_probe,
    crc32c,
    decode_block,
    encode_block,
    hash64,
    hash_partition,
    verify_block,
    visible,
)

M64 = (1 << 64) - 1
P1, P2, P3, P4, P5 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)


def rotl(v, by):
    return (v << by | v >> (64 - by)) & M64


def mix(lane, word):
    return rotl((lane + word * P2) & M64, 31) * P1 & M64


def xxh64(data):
    at = 0
    if len(data) >= 32:
        lanes = [(P1 + P2) & M64, P2, 0, -P1 & M64]
        while at + 32 <= len(data):
            for i in range(4):
                lanes[i] = mix(lanes[i], int.from_bytes(data[at : at + 8], "little"))
                at += 8
        h = sum(rotl(lane, by) for lane, by in zip(lanes, (1, 7, 12, 18), strict=True)) & M64
        for lane in lanes:
            h = ((h ^ mix(0, lane)) * P1 + P4) & M64
    else:
        h = P5
    h = (h + len(data)) & M64
    while at + 8 <= len(data):
        h = (rotl(h ^ mix(0, int.from_bytes(data[at : at + 8], "little")), 27) * P1 + P4) & M64
        at += 8
    if at + 4 <= len(data):
        h = (rotl(h ^ int.from_bytes(data[at : at + 4], "little") * P1 & M64, 23) * P2 + P3) & M64
        at += 4
    for byte in data[at:]:
        h = rotl(h ^ byte * P5 & M64, 11) * P1 & M64
    h = (h ^ h >> 33) * P2 & M64
    h = (h ^ h >> 29) * P3 & M64
    return h ^ h >> 32


def plain_crc(data, seed=0):
    crc = seed ^ 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_golden_checksums_and_hashes():
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert hash64(b"") == 0xEF46DB3751D8E999
    assert hash64(b"abc") == 0x44BC2CF5AD770999
    assert hash64(b"Nobody inspects the spammish repetition") == 0xFBCEA83C8A378BF1


@given(st.binary(max_size=200), st.binary(max_size=50), st.integers(0, (1 << 32) - 1))
def test_checksums_and_hashes_against_plain_ones(data, more, seed):
    assert crc32c(data, seed) == plain_crc(data, seed)
    assert crc32c(data + more) == crc32c(more, crc32c(data))
    assert hash64(data) == xxh64(data)
    (number,) = hash_partition(Keys.one(data), 100).to_pylist()
    mixed = xxh64(data) * 0x9E3779B97F4A7C15 & M64
    assert number == (mixed >> 32) * 100 >> 32


def test_long_checksums():
    data = bytes(range(251)) * 200
    assert crc32c(data) == plain_crc(data)


SALTS = (
    0x47B6137B,
    0x44974D91,
    0x8824AD5B,
    0xA2B7289D,
    0x705495C7,
    0x2DF1424B,
    0x9EFC4947,
    0x5C6BFB31,
)


def plain_filter(keys):
    blocks = max(-(-len(keys) * 10 // 256), 1)
    words = [0] * (8 * blocks)
    for key in keys:
        h = xxh64(key)
        block, low = (h >> 32) * blocks >> 32, h & 0xFFFFFFFF
        for i, salt in enumerate(SALTS):
            words[8 * block + i] |= 1 << ((low * salt & 0xFFFFFFFF) >> 27)
    return b"".join(word.to_bytes(4, "little") for word in words)


@given(st.lists(st.binary(max_size=12), max_size=100), st.binary(max_size=12))
def test_filters_are_as_documented_and_never_miss(keys, other):
    block = bloom_build(Keys.of(keys), 5)
    assert verify_block(block, 5)
    assert block.to_pybytes()[32:] == plain_filter(keys)
    probes = Keys.of([*keys, other])
    assert bloom_probe(block, probes).positions().to_arrow().to_pylist()[: len(keys)] == [
        *range(len(keys))
    ]


def test_filters_seldom_err():
    keys = [i.to_bytes(8, "big") for i in range(20_000)]
    block = bloom_build(Keys.fixed(b"".join(keys[:10_000]), 8), 0)
    assert bloom_probe(block, Keys.fixed(b"".join(keys[10_000:]), 8)).count < 250


def test_a_hash_partition_has_filters_as_good():
    """The bucket must not be made of the bits that choose the filter's block."""
    keys = Keys.fixed(b"".join(i.to_bytes(8, "big") for i in range(80_000)), 8)
    numbers = hash_partition(keys, 16).to_pylist()
    mine = [keys.key(i) for i, number in enumerate(numbers) if number == 3]
    half = len(mine) // 2
    block = bloom_build(Keys.fixed(b"".join(mine[:half]), 8), 0)
    assert bloom_probe(block, Keys.fixed(b"".join(mine[half:]), 8)).count < half // 30


def test_other_blocks_are_no_filters():
    with pytest.raises(CoreError, match="filter"):
        bloom_probe(encode_block(pa.array([1]), 0), Keys.one(b"a"))
    with pytest.raises(CoreError):
        decode_block(bloom_build(Keys.of([b"a"]), 0), pa.int64())


# -- visibility --------------------------------------------------------------------------

OWN = STAMP_UNDECIDED + 7
STAMPS = st.integers(0, 20) | st.sampled_from([OWN, STAMP_UNDECIDED + 8, STAMP_NEVER])


def stamps(values):
    return pa.array(values, pa.uint64()).buffers()[1] or pa.py_buffer(b"")


@given(st.lists(st.tuples(STAMPS, STAMPS), max_size=200), st.integers(0, 20), st.booleans())
def test_visibility(rows, snapshot, mine):
    own = OWN if mine else 0

    def seen(stamp):
        return stamp <= snapshot if stamp < STAMP_UNDECIDED else stamp == own

    def foreign(stamp):
        return stamp >= STAMP_UNDECIDED and stamp != own

    inserts, deletes = stamps([a for a, _ in rows]), stamps([b for _, b in rows])
    bits, undecided = visible(inserts, deletes, len(rows), snapshot, own)
    assert bits.to_arrow().to_pylist() == [seen(a) and not seen(b) for a, b in rows]
    assert undecided == sum(foreign(a) or foreign(b) for a, b in rows)
    bits, undecided = visible(inserts, None, len(rows), snapshot, own)
    assert bits.to_arrow().to_pylist() == [seen(a) for a, _ in rows]
    assert bits.count == sum(seen(a) for a, _ in rows)
    assert undecided == sum(foreign(a) for a, _ in rows)


def test_stamps_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="bytes"):
        visible(b"", None, 1, 0, 0)
    with pytest.raises(ValueError, match="snapshot"):
        visible(b"", None, 0, STAMP_NEVER, 0)
    with pytest.raises(ValueError, match="own"):
        visible(b"", None, 0, 0, 5)
