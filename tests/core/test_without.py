"""Rows of a block or keys but for some, against those that are left in a list."""

from __future__ import annotations

from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from txnkv.core import KeyCodec, Rows, decode_block_without, encode_block, find

VALUES = {
    pa.bool_(): st.booleans(),
    pa.int8(): st.integers(-128, 127),
    pa.int64(): st.integers(-(1 << 63), (1 << 63) - 1),
    pa.decimal128(9, 2): st.integers(-999, 999).map(lambda n: Decimal(n).scaleb(-2)),
    pa.string(): st.text(max_size=5),
    pa.list_(pa.int8()): st.lists(st.integers(0, 9), max_size=2),
}


@st.composite
def parts(draw, values):
    """A list, a range of it, and some of that range."""
    given_values = draw(st.lists(values, max_size=300))
    lo = draw(st.integers(0, len(given_values)))
    n = draw(st.integers(0, len(given_values) - lo))
    gone = draw(st.sets(st.integers(lo, lo + n - 1), max_size=20)) if n else set()
    left = [given_values[i] for i in range(lo, lo + n) if i not in gone]
    return given_values, lo, n, Rows.of(sorted(gone)), left


@given(
    st.sampled_from(list(VALUES)).flatmap(
        lambda t: st.tuples(st.just(t), parts(st.none() | VALUES[t]) | parts(VALUES[t]))
    )
)
def test_rows_of_a_block(made):
    type_, (values, lo, n, gone, left) = made
    array = decode_block_without(encode_block(pa.array(values, type_), 0), type_, gone, lo, n)
    array.validate(full=True)
    assert array.type == type_
    assert array.to_pylist() == left


@given(st.data())
def test_keys(data):
    types = data.draw(st.lists(st.sampled_from(list(VALUES)[:5]), min_size=1, max_size=3))
    row = st.tuples(*(VALUES[t] for t in types))
    values, lo, n, gone, left = data.draw(parts(row))
    codec = KeyCodec(types)
    keys = codec.encode([pa.array([v[i] for v in values], t) for i, t in enumerate(types)])
    some = keys.without(gone, lo, n)
    assert some.width == keys.width
    assert [some.key(i) for i in range(some.n)] == [codec.encode_one(value) for value in left]
    for i in range(len(types)):
        array = codec.decode_without(keys, i, gone, lo, n)
        array.validate(full=True)
        assert array.to_pylist() == [value[i] for value in left]


@pytest.mark.parametrize("gone", [[1], [5], [3, 3], [4, 3], [0xFFFFFFFF]])
def test_rows_that_are_not_there(gone):
    values = pa.array(range(9))
    codec = KeyCodec([pa.int64()])
    keys = codec.encode([values])
    with pytest.raises(IndexError):
        decode_block_without(encode_block(values, 0), pa.int64(), Rows.of(gone), 2, 3)
    with pytest.raises(IndexError):
        keys.without(Rows.of(gone), 2, 3)
    with pytest.raises(IndexError):
        codec.decode_without(keys, 0, Rows.of(gone), 2, 3)
    with pytest.raises(IndexError):
        codec.decode_without(keys, 0, Rows.of([]), 8, 2)


@pytest.mark.parametrize("type_", [pa.int64(), pa.int32()])
@given(st.data())
def test_few_keys_are_found_among_many(type_, data):
    """Evenly spread keys, and keys with leaps, in either order of the probes."""
    leap = data.draw(st.sampled_from([0, 10, 1 << 20]))
    values, at = [], data.draw(st.integers(-1000, 1000))
    for i in range(2000):
        at += 2 + (leap if i % 97 == 0 else 0)
        values.append(at)
    near = st.sampled_from(values).flatmap(lambda v: st.integers(v - 2, v + 2))
    probes = data.draw(st.lists(near, max_size=50))
    probes = sorted(probes) if data.draw(st.booleans()) else probes
    codec = KeyCodec([type_])
    found = find(codec.encode([pa.array(values, type_)]), codec.encode([pa.array(probes, type_)]))
    places = {value: i for i, value in enumerate(values)}
    assert found.to_pylist() == [places.get(probe, -1) for probe in probes]
