"""Keys and short ranges in the layers of a tablet: rows of all types, out of blocks and memory.

The order of the layers is held against a plain walk in csrc/tests/test_layers.c.
"""

from __future__ import annotations

from datetime import UTC, date
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from txnkv.core import (
    CoreError,
    Keys,
    LayerBlock,
    LayerRowSet,
    Layers,
    LayerStep,
    MemRowSet,
    RowLayout,
    Rows,
    bloom_build,
    encode_block,
)

VALUES = {
    pa.bool_(): st.booleans(),
    pa.int8(): st.integers(-128, 127),
    pa.int32(): st.integers(-(1 << 31), (1 << 31) - 1),
    pa.uint64(): st.integers(0, (1 << 64) - 1),
    pa.float64(): st.floats(allow_nan=False),
    pa.date32(): st.dates(date(1, 1, 2)),
    pa.timestamp("us", tz="UTC"): st.datetimes().map(lambda at: at.replace(tzinfo=UTC)),
    pa.decimal128(20, 2): st.integers(-(10**19), 10**19).map(lambda n: Decimal(n).scaleb(-2)),
    pa.string(): st.text(max_size=9),
    pa.binary(): st.binary(max_size=9) | st.just(bytes(2000)),
    pa.list_(pa.int16()): st.lists(st.integers(-9, 9), max_size=3),
}
NOTHING = MemRowSet(8)


def key(i):
    return i.to_bytes(8, "big")


@st.composite
def tables(draw):
    types = draw(st.lists(st.sampled_from(list(VALUES)), max_size=6))
    n = draw(st.integers(1, 20))
    row = st.tuples(*(st.none() | VALUES[t] for t in types))
    return types, draw(st.lists(row, min_size=n, max_size=n)), draw(row)


def row_set_of(blocks, n, least=0):
    """Keys 0, 2, 4 ... in one block, which is given when it is asked for."""
    keys = Keys.fixed(b"".join(key(2 * i) for i in range(n)), 8)
    first, last = Keys.one(key(0)), Keys.one(key(2 * n - 2))
    row_set = LayerRowSet(first, last, (5, 5), versioned=False, tombstones=False)

    def load(step, number):
        assert (step, number) == (0, 0)
        row_set.put(
            0, LayerBlock(keys.to_block(0), bloom_build(keys, 0), None, blocks, None, least)
        )

    return row_set, load


@given(tables(), st.data())
def test_rows_of_all_types_are_read_as_they_were_written(made, data):
    types, rows, default = made
    layout, n = RowLayout(types), len(rows)
    blocks = [encode_block(pa.array([r[i] for r in rows], t), 0) for i, t in enumerate(types)]
    gone = data.draw(st.sets(st.integers(0, len(types) - 1))) if types else set()
    some = [None if i in gone else block for i, block in enumerate(blocks)]
    row_set, load = row_set_of(some, n, data.draw(st.sampled_from([0, 4096])))
    step = LayerStep(row_set)
    layers = Layers(layout, layout.encode_one(default), NOTHING, 0, [step])
    own = MemRowSet(8)
    own.put(key(0), 1, layout.encode_one(default))
    own.put(key(2 * n), 1, None)

    def as_read(row):
        return tuple(default[i] if i in gone else value for i, value in enumerate(row))

    wanted = {2 * i: as_read(row) for i, row in enumerate(rows)} | {0: default}
    asked = Keys.fixed(b"".join(map(key, range(2 * n + 2))), 8)
    found = layers.find(own, asked, None, 5, load)
    there = found.present().to_arrow().to_pylist()
    assert there == [i in wanted for i in range(2 * n + 2)]
    read = found.rows(0, lambda _, row: row)
    for i, row in wanted.items():
        assert layout.decode_one(read.row(i)) == row
    columns = [column.to_pylist() for column in read.columns(range(len(types)))]
    for i, column in enumerate(columns):
        assert column == [wanted[k][i] if k in wanted else None for k in range(2 * n + 2)]

    low, high = sorted(data.draw(st.tuples(*[st.integers(0, 2 * n + 2)] * 2)))
    keys, part = layers.range(own, key(low), key(high), 5, load)
    inside = [k for k in sorted(wanted) if low <= k < high]
    assert [keys.key(i) for i in range(keys.n)] == list(map(key, inside))
    read = part.rows(0, lambda _, row: row)
    assert [layout.decode_one(read.row(i)) for i in range(len(inside))] == [
        wanted[k] for k in inside
    ]


def test_rows_of_memory_with_another_layout_are_brought_into_this_one():
    layout, memory = RowLayout([pa.int64()]), MemRowSet(8)
    memory.put(key(1), 3, b"as it was")
    memory.put(key(2), 9, layout.encode_one((2,)))
    layers = Layers(layout, layout.encode_one((0,)), memory, 0, [])
    asked = Keys.fixed(key(2) + key(1) + key(3), 8)
    found = layers.find(None, asked, Rows.of([1, 0]), 10, lambda *_: None)

    def adapt(stamp, row):
        assert (stamp, row) == (3, b"as it was")
        return layout.encode_one((1,))

    assert found.rows(5, adapt).columns([0])[0].to_pylist() == [1, 2]


def test_blocks_of_another_type_and_damaged_ones_are_refused():
    layout = RowLayout([pa.int64()])
    for column in (pa.array(["a", "b"]), pa.array([1, 2], pa.int32()), pa.array([True, False])):
        row_set, load = row_set_of([encode_block(column, 0)], 2)
        layers = Layers(layout, layout.encode_one((0,)), NOTHING, 0, [LayerStep(row_set)])
        found = layers.find(None, Keys.one(key(2)), None, 5, load)
        with pytest.raises(CoreError):
            found.rows(0, lambda _, row: row)
    with pytest.raises(CoreError):
        LayerBlock(b"no block", None, None, [], None, 0)
    row_set, _ = row_set_of([], 2)
    strings = encode_block(pa.array([None, "b"]), 0)
    row_set.put(0, LayerBlock(strings, None, None, [encode_block(pa.array([1, 2]), 0)], None, 0))
    layers = Layers(layout, layout.encode_one((0,)), NOTHING, 0, [LayerStep(row_set)])
    with pytest.raises(CoreError):
        layers.find(None, Keys.one(key(2)), None, 5, lambda *_: None)


def test_many_rows_are_no_short_range():
    n = 2000
    row_set, load = row_set_of([], n)
    layout = RowLayout([])
    layers = Layers(layout, b"", NOTHING, 0, [LayerStep(row_set)])
    assert layers.range(None, key(0), key(2 * n), 5, load) is None
    keys, found = layers.range(None, key(100), key(200), 5, load)
    assert keys.n == found.n == 50
