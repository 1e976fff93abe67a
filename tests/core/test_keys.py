"""Arrays of keys: slices, gathers, blocks; and what becomes of their memory."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from txnkv.core import CoreError, Keys, Rows, verify_block

VARIABLE = st.lists(st.binary(max_size=12), min_size=1, max_size=30).map(lambda v: (Keys.of(v), v))


@st.composite
def fixed(draw):
    width = draw(st.integers(1, 17))
    values = draw(st.lists(st.binary(min_size=width, max_size=width), min_size=1, max_size=30))
    return Keys.fixed(b"".join(values), width), values


ANY = VARIABLE | fixed()


def listed(keys):
    return [keys.key(i) for i in range(keys.n)]


@given(ANY, st.data())
def test_slices_and_gathers(pair, data):
    keys, values = pair
    assert listed(keys) == values
    lo = data.draw(st.integers(0, keys.n))
    n = data.draw(st.integers(0, keys.n - lo))
    part = keys.slice(lo, n)
    assert listed(part) == values[lo : lo + n]
    assert part.nbytes == sum(map(len, values[lo : lo + n]))
    rows = data.draw(st.lists(st.integers(0, keys.n - 1)))
    assert listed(keys.gather(Rows.of(rows))) == [values[i] for i in rows]
    if n:
        rows = data.draw(st.lists(st.integers(0, n - 1)))
        assert listed(part.gather(Rows.of(rows))) == [values[lo + i] for i in rows]


@given(ANY, st.data())
def test_blocks_hold_what_was_put_in(pair, data):
    keys, values = pair
    lo = data.draw(st.integers(0, keys.n))
    n = data.draw(st.integers(0, keys.n - lo))
    block = keys.to_block(7, lo, n)
    assert verify_block(block, 7)
    assert not verify_block(block, 8)
    back = Keys.from_block(memoryview(block))
    assert listed(back) == values[lo : lo + n]
    assert listed(keys.slice(lo, n)) == listed(Keys.from_block(keys.slice(lo, n).to_block(1)))


@given(ANY)
def test_joined_keys_are_copied(pair):
    keys, values = pair
    assert (
        listed(Keys.concat([keys, keys.slice(1, keys.n - 1), keys])) == values + values[1:] + values
    )
    memory = bytearray(keys.to_block(0))
    joined = Keys.concat([Keys.from_block(memory)])
    memory[32:] = bytes(len(memory) - 32)
    assert listed(joined) == values


def test_raw_buffers_are_those_of_the_keys():
    keys = Keys.of([b"a", b"", b"bcd"])
    assert Keys.variable(keys.data, keys.offsets).key(2) == b"bcd"
    fixed_keys = Keys.fixed(b"abcdef", 2).slice(1, 2)
    assert fixed_keys.data.to_pybytes() == b"cdef"
    assert fixed_keys.offsets is None


def test_memory_outlives_the_names_of_it():
    part = Keys.fixed(bytes(range(64)), 8).slice(2, 2).slice(1, 1)
    data = part.data
    del part
    assert data.to_pybytes() == bytes(range(24, 32))


def test_mistakes_are_errors():
    keys = Keys.of([b"a", b"b"])
    for bad in ((-1, 1), (0, 3), (2, 1), (0, -1)):
        with pytest.raises(IndexError):
            keys.slice(*bad)
    with pytest.raises(IndexError):
        keys.key(2)
    with pytest.raises(IndexError):
        keys.gather(Rows.of([2]))
    with pytest.raises(ValueError, match="whole number"):
        Keys.fixed(b"abc", 2)
    with pytest.raises(ValueError, match="width"):
        Keys.concat([keys, Keys.fixed(b"ab", 1)])
    with pytest.raises(CoreError):
        Keys.variable(b"ab", pa.array([0, 2, 1], pa.uint32()).buffers()[1].slice(0, 12))
    with pytest.raises(CoreError):
        Keys.variable(b"ab", pa.array([0, 3], pa.uint32()).buffers()[1].slice(0, 8))
    with pytest.raises(CoreError):
        Keys.from_block(b"no block")
