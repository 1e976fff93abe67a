"""Blocks and their zone maps: round trips, a golden block, damage."""

from __future__ import annotations

import math
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from txnkv.core import (
    NULL_ROW,
    CoreError,
    KeyCodec,
    Rows,
    block_rows,
    crc32c,
    decode_block,
    decode_key_block,
    encode_block,
    gather_block,
    verify_block,
    zone,
)

NUMBERS = st.integers(0, 100)
VALUES = {
    pa.bool_(): st.booleans(),
    pa.int8(): NUMBERS,
    pa.int16(): NUMBERS,
    pa.int32(): st.integers(-(1 << 31), (1 << 31) - 1),
    pa.int64(): st.integers(-(1 << 63), (1 << 63) - 1),
    pa.uint64(): st.integers(0, (1 << 64) - 1),
    pa.float32(): st.floats(width=32, allow_nan=False),
    pa.float64(): st.floats(allow_nan=False),
    pa.date32(): st.dates(),
    pa.timestamp("us"): st.datetimes(),
    pa.timestamp("us", tz="UTC"): NUMBERS,
    pa.decimal128(12, 3): st.decimals(-99999, 99999, places=3),
    pa.string(): st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    pa.binary(): st.binary(max_size=20),
    pa.list_(pa.int64()): st.lists(NUMBERS, max_size=3),
    pa.list_(pa.string()): st.lists(st.text("ab", max_size=2), max_size=3),
    pa.struct({"a": pa.int64()}): st.fixed_dictionaries({"a": NUMBERS}),
}


@st.composite
def arrays(draw, values=VALUES):
    """An Arrow array, with nulls or without, that begins behind an offset."""
    type_ = draw(st.sampled_from(list(values)))
    item = values[type_] | st.none() if draw(st.booleans()) else values[type_]
    some = draw(st.lists(item, max_size=70))
    array = pa.array(some * draw(st.sampled_from([1, 1, 3])), type_)  # repeated: light blocks
    return array.slice(draw(st.integers(0, len(array))))


def exact(array):
    array.validate(full=True)
    return array.to_pylist()


@given(arrays(), st.data())
def test_blocks_give_back_their_rows(array, data):
    lo = data.draw(st.integers(0, len(array)))
    n = data.draw(st.integers(0, len(array) - lo))
    block = encode_block(array, 3, lo=lo, n=n)
    expected = array.slice(lo, n).to_pylist()
    assert verify_block(block, 3)
    assert block_rows(block) == n
    assert exact(decode_block(block, array.type)) == expected
    assert decode_block(block, array.type).type == array.type
    start = data.draw(st.integers(0, n))
    count = data.draw(st.integers(0, n - start))
    part = decode_block(block, array.type, start, count)
    assert exact(part) == expected[start : start + count]


@given(arrays(), st.data())
def test_gathers_on_both_sides(array, data):
    rows = data.draw(st.lists(st.integers(0, max(len(array) - 1, 0)))) if len(array) else []
    block = encode_block(array, 3, Rows.of(rows))
    values = array.to_pylist()
    stored = [values[i] for i in rows]
    assert verify_block(block, 3)
    assert exact(decode_block(block, array.type)) == stored
    wanted = st.sampled_from([*range(len(rows)), NULL_ROW])
    picked = data.draw(st.lists(wanted))
    expected = [None if i == NULL_ROW else stored[i] for i in picked]
    assert exact(gather_block(block, array.type, Rows.of(picked))) == expected


@given(arrays({t: v for t, v in VALUES.items() if not pa.types.is_nested(t)}))
def test_encoding_is_canonical(array):
    """The same values give the same bytes, whatever lies in Arrow's nulls and offsets."""
    fresh = pa.array(array.to_pylist(), array.type)
    every = Rows.range(len(array))
    block = encode_block(array, 9)
    assert block.equals(encode_block(fresh, 9))
    assert block.equals(encode_block(array, 9, every))


def test_nothing_of_a_null_reaches_the_block():
    values = pa.array([1, 0x5EC2E7, 3]).buffers()[1]
    array = pa.Array.from_buffers(pa.int64(), 3, [pa.py_buffer(b"\x05"), values])
    assert b"\xe7\xc2\x5e" not in encode_block(array, 0).to_pybytes()
    texts = pa.array(["a", "secret", "c"])
    array = pa.Array.from_buffers(pa.string(), 3, [pa.py_buffer(b"\x05"), *texts.buffers()[1:]])
    block = encode_block(array, 0)
    assert b"secret" not in block.to_pybytes()
    assert decode_block(block, pa.string()).to_pylist() == ["a", None, "c"]


def test_golden_block():
    block = encode_block(pa.array([1, None, 3], pa.int32()), 77).to_pybytes()
    body = bytes.fromhex(
        "01010100 03000000 01000000 04000000 00000000 1400000000000000"
        "0500000000000000 01000000 00000000 03000000 00000000"
    )
    assert block == crc32c(body, 77).to_bytes(4, "little") + body
    strings = encode_block(pa.array(["ab", "", "c"]), 0).to_pybytes()
    assert strings[4:] == bytes.fromhex(
        "01030000 03000000 00000000 00000000 00000000 1300000000000000"
        "00000000 02000000 02000000 03000000 6162630000000000"
    )


def test_golden_light_blocks():
    """The blocks of docs/format-blocks.md."""
    block = encode_block(pa.array([1000 + 3 * i + i % 2 for i in range(64)]), 77).to_pybytes()
    assert block == bytes.fromhex(
        "8CD81B1602010000 4000000000000000 0800000001000000 9800000000000000"
        "E803000000000000 1004030000000000 0000000001100000"
    ) + 8 * bytes.fromhex("0000000000000000 0F00000000000000")
    runs = encode_block(pa.array([i // 40 for i in range(120)]), 0).to_pybytes()
    assert runs == bytes.fromhex(
        "61AF7EC102010000 7800000000000000 0800000004000000 3800000000000000 0300000000000000"
        "2800000000000000 0000280000000000 0000000000100000"
        "0000000000000000 0100000000000000 0200000000000000"
    )


LIGHT = [
    pa.array([7] * 90),
    pa.array([None, *range(80)]),
    pa.array([i // 30 for i in range(200)], pa.int16()),
    pa.array([i / 4 - 9 for i in range(100)]),
    pa.array([i / 10 for i in range(100)], pa.float32()),
    pa.array(["red", "green", None, "blue"] * 40),
    pa.array([f"name {i}" for i in range(70)]),
    pa.array([Decimal(i) / 4 for i in range(70)], pa.decimal128(12, 2)),
]


@pytest.mark.parametrize("array", LIGHT, ids=lambda array: f"{array.type} {array[2]}")
def test_light_blocks_are_read_as_plain_ones(array):
    light, plain = encode_block(array, 5), encode_block(array, 5, plain=True)
    n = len(array)
    picked = Rows.of([n - 1, NULL_ROW, 0, n // 2])
    assert light.size < plain.size
    assert verify_block(light, 5)
    assert verify_block(plain, 5)
    assert exact(decode_block(light, array.type)) == array.to_pylist()
    for lo, some in ((0, n), (3, n // 2), (n, 0)):
        assert decode_block(light, array.type, lo, some).equals(array.slice(lo, some))
    assert gather_block(light, array.type, picked).equals(gather_block(plain, array.type, picked))
    assert zone(light, array.type) == zone(plain, array.type)


@pytest.mark.parametrize(
    "type_", [pa.int32(), pa.uint64(), pa.timestamp("us"), pa.date32()], ids=str
)
def test_a_key_column_is_read_from_packed_keys(type_):
    first = 5 if pa.types.is_unsigned_integer(type_) else -3000
    width = type_.bit_width
    numbers = pa.array(range(first, first + 7 * 2500, 7), f"int{width}")
    array = numbers.cast(f"uint{width}").cast(type_) if first > 0 else numbers.view(type_)
    block = KeyCodec([type_]).encode([array]).to_block(0)
    for lo, n in ((0, 2500), (1000, 100), (1, 1023), (2500, 0)):
        assert decode_key_block(block, type_, lo, n).equals(array.slice(lo, n))
        gone = Rows.of(range(lo, lo + n, 3))
        left = array.take(pa.array([i for i in range(lo, lo + n) if (i - lo) % 3], pa.int64()))
        assert decode_key_block(block, type_, lo, n, gone).equals(left)
    with pytest.raises(IndexError):
        decode_key_block(block, type_, 2400, 101)
    with pytest.raises(IndexError):
        decode_key_block(block, type_, 0, 100, Rows.of([100]))
    assert decode_key_block(KeyCodec([type_]).encode([array[:3]]).to_block(0), type_, 0, 3) is None


# -- damage ------------------------------------------------------------------------------

SMALL = [
    pa.array([1, None, 3]),
    pa.array(["ab", None, "cde", ""]),
    pa.array([True, None, False]),
    pa.array([[1], None, [2, 3]]),
]


@pytest.mark.parametrize("array", [*SMALL, *LIGHT[:3], LIGHT[5]], ids=str)
def test_every_cut_and_every_flip_is_seen(array):
    block = encode_block(array, 5).to_pybytes()
    assert verify_block(block, 5)
    for cut in range(len(block)):
        assert not verify_block(block[:cut], 5)
    assert not verify_block(block + bytes(8), 5)
    for at in range(len(block)):
        for flip in (1, 0x80, 0xFF):
            changed = bytearray(block)
            changed[at] ^= flip
            assert not verify_block(changed, 5)


@pytest.mark.parametrize("array", SMALL, ids=str)
def test_damage_that_the_checksum_does_not_see_is_an_error_or_data(array):
    """Blocks as by a writer that was itself wrong: never a crash."""
    block = encode_block(array, 5).to_pybytes()
    for at in range(4, len(block)):
        for flip in (1, 0x80, 0xFF):
            changed = bytearray(block)
            changed[at] ^= flip
            changed[:4] = crc32c(changed[4:], 5).to_bytes(4, "little")
            try:
                decode_block(changed, array.type)
                gather_block(changed, array.type, Rows.of([0, NULL_ROW]))
                zone(changed, array.type)
            except (CoreError, IndexError):
                pass


def test_other_mistakes_are_errors():
    block = encode_block(pa.array([1, 2, 3]), 0)
    with pytest.raises(CoreError, match="type"):
        decode_block(block, pa.int32())
    with pytest.raises(CoreError, match="type"):
        decode_block(block, pa.string())
    with pytest.raises(IndexError):
        decode_block(block, pa.int64(), 2, 2)
    with pytest.raises(IndexError):
        gather_block(block, pa.int64(), Rows.of([3]))
    with pytest.raises(IndexError):
        encode_block(pa.array([1]), 0, Rows.of([1]))
    with pytest.raises(IndexError):
        encode_block(pa.array([1]), 0, lo=1, n=1)
    with pytest.raises(CoreError):
        block_rows(b"")


def test_arrow_offsets_that_fall_are_refused():
    offsets = pa.array([0, 2, 1], pa.int32()).buffers()[1].slice(0, 12)
    array = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"abc")])
    for rows in (None, Rows.of([1])):
        with pytest.raises(ValueError, match="broken"):
            encode_block(array, 0, rows)
    with pytest.raises(ValueError, match="broken"):
        KeyCodec([array.type]).encode([array])


# -- zones -------------------------------------------------------------------------------


@given(arrays({t: v for t, v in VALUES.items() if not pa.types.is_nested(t)}), st.data())
def test_zones_never_hide_a_value(array, data):
    found = zone(encode_block(array, 0), array.type)
    codec = KeyCodec([array.type])
    keys = [codec.encode_one([v]) for v in array.to_pylist() if v is not None]
    assert found.null_count == array.null_count
    if not keys:
        assert (found.min, found.max, found.exact) == (None, None, True)
        assert not found.overlaps(None, None)
        return
    assert found.min == min(keys)[:16]
    assert found.max == max(keys)[:16]
    assert found.exact == (max(len(min(keys)), len(max(keys))) <= 16)
    for key in keys:
        assert found.overlaps(key, key)
        assert found.overlaps(key, None)
        assert found.overlaps(None, key)
    low, high = sorted(data.draw(st.tuples(st.sampled_from(keys), st.binary(max_size=20))))
    assert found.overlaps(low, high) or not any(low <= key <= high for key in keys)


def test_zones_exclude_what_lies_outside():
    codec = KeyCodec([pa.int64()])
    found = zone(encode_block(pa.array([10, 20]), 0), pa.int64())
    assert not found.overlaps(codec.encode_one([21]), None)
    assert not found.overlaps(None, codec.encode_one([9]))
    assert found.overlaps(codec.encode_one([11]), codec.encode_one([12]))


def test_a_cut_max_stands_for_all_that_begin_with_it():
    found = zone(encode_block(pa.array(["b" * 20]), 0), pa.string())
    assert (found.max, found.exact) == (b"b" * 16, False)
    assert found.overlaps(b"b" * 18, None)
    assert not found.overlaps(b"c", None)
    assert not found.overlaps(None, b"a")


def test_nan_is_the_greatest_value_of_a_zone():
    found = zone(encode_block(pa.array([math.nan, 1.0, -0.0]), 0), pa.float64())
    codec = KeyCodec([pa.float64()])
    assert found.min == codec.encode_one([0.0])
    assert found.max == codec.encode_one([math.nan])


def test_types_without_order_have_an_open_zone():
    found = zone(encode_block(pa.array([[1], None]), 0), pa.list_(pa.int64()))
    assert (found.min, found.max, found.null_count) == (None, None, 1)
    assert found.overlaps(b"a", b"b")
    assert zone(encode_block(pa.array([Decimal(1)]), 0), pa.decimal128(1, 0)).exact
