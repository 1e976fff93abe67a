"""The key encoding: golden vectors, a plain reference of it, and order as a property."""

from __future__ import annotations

import math
import struct
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from txnkv.core import CoreError, KeyCodec, Keys, successor

TIMESTAMP = pa.timestamp("us")
TIMESTAMP_UTC = pa.timestamp("us", tz="UTC")
DECIMAL = pa.decimal128(12, 3)

GOLDEN = [
    ([pa.bool_()], [False], "00"),
    ([pa.bool_()], [True], "01"),
    ([pa.int8()], [-128], "00"),
    ([pa.int16()], [1], "8001"),
    ([pa.int32()], [-2], "7ffffffe"),
    ([pa.int64()], [258], "8000000000000102"),
    ([pa.int64()], [-(1 << 63)], "0000000000000000"),
    ([pa.uint8()], [200], "c8"),
    ([pa.uint16()], [258], "0102"),
    ([pa.uint32()], [258], "00000102"),
    ([pa.uint64()], [(1 << 64) - 1], "ffffffffffffffff"),
    ([pa.float32()], [1.0], "bf800000"),
    ([pa.float32()], [-1.0], "407fffff"),
    ([pa.float32()], [-1e-60], "80000000"),
    ([pa.float32()], [math.nan], "ffc00000"),
    ([pa.float64()], [1.0], "bff0000000000000"),
    ([pa.float64()], [-0.0], "8000000000000000"),
    ([pa.float64()], [-math.inf], "000fffffffffffff"),
    ([pa.float64()], [math.nan], "fff8000000000000"),
    ([pa.date32()], [date(1970, 1, 2)], "80000001"),
    ([TIMESTAMP], [datetime(1970, 1, 1, 0, 0, 0, 5)], "8000000000000005"),
    ([TIMESTAMP_UTC], [datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC)], "7ffffffffff0bdc0"),
    ([DECIMAL], [Decimal("-0.002")], "7ffffffffffffffffffffffffffffffe"),
    ([pa.string()], ["a\0b"], "610062"),
    ([pa.binary(), pa.int8()], [b"a\0b", 0], "6100ff62000180"),
    ([pa.string(), pa.string()], ["", "x"], "000178"),
    ([pa.int16(), pa.string(), pa.bool_()], [-1, "é", True], "7fffc3a9000101"),
]


def one_row(types, values):
    return [pa.array([v], t) for v, t in zip(values, types, strict=True)]


@pytest.mark.parametrize(("types", "values", "expected"), GOLDEN)
def test_golden_vectors(types, values, expected):
    codec = KeyCodec(types)
    assert codec.encode_one(values).hex() == expected
    assert codec.encode(one_row(types, values)).key(0).hex() == expected
    assert reference(types, values).hex() == expected


# -- a reference that shares nothing with the code ---------------------------------------


def reference_value(type_, value, last):
    if pa.types.is_floating(type_):
        width = type_.bit_width
        form = {32: "f", 64: "d"}[width]
        if math.isnan(value):
            bits = "0" + "1" * {32: 9, 64: 12}[width]
            bits = bits.ljust(width, "0")
        else:
            raw = struct.pack(">" + form, value)
            bits = "".join(f"{byte:08b}" for byte in raw)
            if set(bits[1:]) == {"0"}:
                bits = "0" * width
        negative = bits[0] == "1"
        flipped = bits.translate({48: 49, 49: 48}) if negative else "1" + bits[1:]
        return bytes(int(flipped[i : i + 8], 2) for i in range(0, width, 8))
    if pa.types.is_string(type_) or pa.types.is_binary(type_):
        raw = value.encode() if isinstance(value, str) else value
        if last:
            return raw
        return b"".join(b"\0\xff" if byte == 0 else bytes([byte]) for byte in raw) + b"\0\x01"
    if pa.types.is_decimal(type_):
        return (int(value * 10**type_.scale) + (1 << 127)).to_bytes(16, "big")
    if pa.types.is_temporal(type_):
        value = pa.scalar(value, type_).value
    width = max(type_.bit_width // 8, 1)
    signed = pa.types.is_temporal(type_) or pa.types.is_signed_integer(type_)
    return (int(value) + ((1 << (8 * width - 1)) if signed else 0)).to_bytes(width, "big")


def reference(types, values):
    last = len(types) - 1
    parts = [
        reference_value(t, v, i == last) for i, (t, v) in enumerate(zip(types, values, strict=True))
    ]
    return b"".join(parts)


# -- properties --------------------------------------------------------------------------

FEW = st.text(alphabet="\0\x01aé\U0010ffff", max_size=3)
STRATEGIES = {
    pa.bool_(): st.booleans(),
    pa.int8(): st.integers(-(1 << 7), (1 << 7) - 1),
    pa.int16(): st.integers(-(1 << 15), (1 << 15) - 1),
    pa.int32(): st.integers(-(1 << 31), (1 << 31) - 1),
    pa.int64(): st.integers(-(1 << 63), (1 << 63) - 1),
    pa.uint8(): st.integers(0, (1 << 8) - 1),
    pa.uint16(): st.integers(0, (1 << 16) - 1),
    pa.uint32(): st.integers(0, (1 << 32) - 1),
    pa.uint64(): st.integers(0, (1 << 64) - 1),
    pa.float32(): st.floats(width=32),
    pa.float64(): st.floats(),
    pa.date32(): st.dates(),
    TIMESTAMP: st.datetimes(),
    TIMESTAMP_UTC: st.datetimes(timezones=st.just(UTC)),
    DECIMAL: st.decimals(-(10**9) + 1, 10**9 - 1, places=3),
    pa.string(): FEW | st.text(st.characters(exclude_categories=["Cs"])),
    pa.binary(): st.binary(max_size=4) | st.lists(st.sampled_from([0, 1, 255])).map(bytes),
}
TYPES = list(STRATEGIES)


def order(value):
    """Sorts as the encoding must: NaN last, -0.0 as 0.0, strings by their bytes."""
    if isinstance(value, float):
        return (math.isnan(value), 0.0 if math.isnan(value) else value + 0.0)
    return value.encode() if isinstance(value, str) else value


@st.composite
def tables(draw):
    types = draw(st.lists(st.sampled_from(TYPES), min_size=1, max_size=4))
    # Columns that often agree let later ones decide.
    columns = [
        st.sampled_from(draw(st.lists(STRATEGIES[t], min_size=1, max_size=4))) for t in types
    ]
    return types, draw(st.lists(st.tuples(*columns), min_size=1, max_size=30))


def columns_of(types, rows):
    return [pa.array(c, t) for c, t in zip(zip(*rows, strict=True), types, strict=True)]


@given(tables())
def test_encoding_orders_as_values_do_and_matches_the_reference(table):
    types, rows = table
    codec = KeyCodec(types)
    keys = codec.encode(columns_of(types, rows))
    encoded = [keys.key(i) for i in range(keys.n)]
    assert encoded == [reference(types, row) for row in rows]
    assert encoded == [codec.encode_one(row) for row in rows]
    assert codec.width == (len(encoded[0]) if codec.width else 0)
    order_of_values = sorted(range(len(rows)), key=lambda i: tuple(map(order, rows[i])))
    assert order_of_values == sorted(range(len(rows)), key=lambda i: encoded[i])


def same(a, b):
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    return a == b


@given(tables(), st.data())
def test_decoding_gives_the_values_back(table, data):
    types, rows = table
    codec = KeyCodec(types)
    keys = codec.encode(columns_of(types, rows))
    lo = data.draw(st.integers(0, len(rows)))
    for i, type_ in enumerate(types):
        decoded = codec.decode(keys, i, lo)
        decoded.validate(full=True)
        assert decoded.type == type_
        values = [row[i] for row in rows[lo:]]
        assert all(same(a, b) for a, b in zip(decoded.to_pylist(), values, strict=True))
    for i, row in enumerate(rows):
        one = codec.decode_one(keys.key(i))
        assert all(same(a, b) for a, b in zip(one, row, strict=True))


@given(tables(), st.data())
def test_arrow_offsets_are_respected(table, data):
    types, rows = table
    lo = data.draw(st.integers(0, len(rows)))
    codec = KeyCodec(types)
    whole = codec.encode(columns_of(types, rows))
    part = codec.encode([column.slice(lo) for column in columns_of(types, rows)])
    assert [part.key(i) for i in range(part.n)] == [whole.key(i) for i in range(lo, whole.n)]


@given(tables(), st.data())
def test_a_prefix_and_its_successor_enclose_exactly_the_keys_with_it(table, data):
    types, rows = table
    codec = KeyCodec(types)
    width = data.draw(st.integers(1, len(types)))
    wanted = rows[0][:width]
    low = codec.encode_prefix(wanted)
    high = successor(low)
    # A last string column is not ended, so it matches all strings that begin with it.
    open_end = (
        width == len(types) and codec.width == 0 and codec.types[-1] in (pa.string(), pa.binary())
    )
    for row in rows:
        key = codec.encode_one(row)
        inside = key >= low and (high is None or key < high)
        has = [order(v) for v in row[:width]] == [order(v) for v in wanted]
        assert inside == has or (open_end and inside and key.startswith(low))


def test_successor():
    assert successor(b"a") == b"b"
    assert successor(b"a\xff\xff") == b"b"
    assert successor(b"\xff\xff") is None
    assert successor(b"") is None


# -- what is refused ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("type_", "value", "error"),
    [
        (pa.int8(), 128, ValueError),
        (pa.uint8(), -1, ValueError),
        (pa.int64(), "1", TypeError),
        (pa.int64(), 1.5, TypeError),
        (pa.bool_(), 2, ValueError),
        (pa.float32(), 1e39, ValueError),
        (pa.string(), b"a", TypeError),
        (pa.binary(), "a", TypeError),
        (pa.date32(), datetime(2020, 1, 1), TypeError),
        (TIMESTAMP, datetime(2020, 1, 1, tzinfo=UTC), ValueError),
        (TIMESTAMP_UTC, datetime(2020, 1, 1), ValueError),
        (DECIMAL, Decimal("0.0001"), ValueError),
        (DECIMAL, Decimal("1000000000"), ValueError),
        (DECIMAL, Decimal("NaN"), ValueError),
    ],
)
def test_values_that_do_not_fit_are_refused(type_, value, error):
    with pytest.raises(error):
        KeyCodec([type_]).encode_one([value])


def test_columns_that_do_not_fit_are_refused():
    codec = KeyCodec([pa.int64(), pa.string()])
    good = [pa.array([1]), pa.array(["a"])]
    with pytest.raises(ValueError, match="nulls"):
        codec.encode([pa.array([None], pa.int64()), good[1]])
    with pytest.raises(TypeError, match="int32"):
        codec.encode([pa.array([1], pa.int32()), good[1]])
    with pytest.raises(ValueError, match="columns"):
        codec.encode(good[:1])
    with pytest.raises(ValueError, match="rows"):
        codec.encode([pa.array([1, 2]), good[1]])
    with pytest.raises(ValueError, match="values"):
        codec.encode_one([1])
    with pytest.raises(TypeError, match="list"):
        KeyCodec([pa.list_(pa.int64())])
    with pytest.raises(ValueError, match="column"):
        KeyCodec([])


def test_other_time_zones_keep_the_instant():
    codec = KeyCodec([pa.timestamp("us", tz="Europe/Berlin")])
    instant = datetime(2024, 7, 1, 12, tzinfo=UTC)
    (back,) = codec.decode_one(codec.encode_one([instant]))
    assert back == instant
    assert back.utcoffset() == timedelta(hours=2)


def test_truncated_and_damaged_keys_are_refused():
    codec = KeyCodec([pa.int32(), pa.string(), pa.bool_(), pa.float64()])
    key = codec.encode_one([1, "a\0b", True, 1.0])
    for cut in range(len(key)):
        with pytest.raises(CoreError):
            codec.decode_one(key[:cut])
        with pytest.raises(CoreError):
            codec.decode(Keys.of([key[:cut]]), 3)
    bad_escape = key.replace(b"\0\xff", b"\0\x02")
    with pytest.raises(CoreError):
        codec.decode_one(bad_escape)
    with pytest.raises(CoreError):
        codec.decode(Keys.of([bad_escape]), 1)
    with pytest.raises(CoreError):
        codec.decode_one(key + b"x")
    with pytest.raises(CoreError):
        codec.decode(Keys.fixed(b"12345678", 8), 0)
