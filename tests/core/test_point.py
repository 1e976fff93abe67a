"""Reads of single rows and of rows scattered over blocks, against the blocks read one by one."""

from __future__ import annotations

from datetime import UTC, date
from decimal import Decimal
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from txnkv.core import (
    NULL_ROW,
    BlockList,
    BlockTable,
    CoreError,
    KeyCodec,
    Keys,
    Probe,
    RowReader,
    Rows,
    address,
    bloom_build,
    encode_block,
    find_in_blocks,
    gather_blocks,
    point_find,
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
KEYS = {
    8: st.integers(0, 60).map(lambda n: n.to_bytes(8, "big")),
    4: st.integers(0, 60).map(lambda n: n.to_bytes(4, "big")),
    10: st.integers(0, 60).map(lambda n: b"12345678" + n.to_bytes(2, "big")),
    0: st.binary(max_size=3) | st.binary(max_size=2).map(lambda tail: b"a common start" + tail),
}


def keys_of(width, keys):
    return Keys.fixed(b"".join(keys), width) if width else Keys.of(keys)


@st.composite
def columns(draw):
    types = draw(st.lists(st.sampled_from(list(VALUES)), max_size=6))
    n = draw(st.integers(1, 20))
    rows = st.lists(st.tuples(*(st.none() | VALUES[t] for t in types)), min_size=n, max_size=n)
    return types, draw(rows)


@given(columns(), st.data())
def test_rows_are_read_as_from_their_blocks(made, data):
    types, rows = made
    blocks = [encode_block(pa.array([r[i] for r in rows], t), 0) for i, t in enumerate(types)]
    read = RowReader(types)
    kept = BlockList(blocks)
    for i, row in enumerate(rows):
        assert read(kept, i) == read(blocks, i) == row
    keys = Keys.fixed(b"".join(i.to_bytes(8, "big") for i in range(0, 2 * len(rows), 2)), 8)
    probe = Probe(keys.to_block(0), bloom_build(keys, 0))
    for i in range(2 * len(rows) + 1):
        there = i % 2 == 0 and i < 2 * len(rows)
        assert read.get(probe, kept, i.to_bytes(8, "big")) == (rows[i // 2] if there else None)
    if types:
        gone = data.draw(st.integers(0, len(types) - 1))
        some = [None if i == gone else block for i, block in enumerate(blocks)]
        expected = tuple(None if i == gone else value for i, value in enumerate(rows[0]))
        assert read(some, 0) == expected
        with pytest.raises(IndexError):
            read(blocks, len(rows))


def test_a_reader_serves_rows_longer_than_its_space():
    words = ["a" * 50_000, "", "b" * 300, "c" * 300]
    blocks = [encode_block(pa.array(words), 0)] * 3
    read = RowReader([pa.string()] * 3)
    keys = Keys.of([b"a", b"b", b"c", b"d"])
    for i in (0, 1, 0, 2, 3):
        assert read(blocks, i) == (words[i],) * 3
        assert read.get(Probe(keys.to_block(0), None), BlockList(blocks), keys.key(i)) == read(
            blocks, i
        )


def test_blocks_of_other_types_are_refused():
    numbers, keys = encode_block(pa.array([1, 2]), 0), Keys.of([b"a", b"b"])
    for type_ in (pa.int32(), pa.string(), pa.bool_(), pa.list_(pa.int64())):
        with pytest.raises(CoreError):
            RowReader([type_])([numbers], 0)
        with pytest.raises(CoreError):
            RowReader([type_]).get(Probe(keys.to_block(0), None), BlockList([numbers]), b"a")
        with pytest.raises(CoreError):
            gather_blocks(BlockList([numbers]), type_, u32([0]), u32([0]))
    with pytest.raises(CoreError):
        RowReader([pa.int64()])([bytes(numbers)[:-8]], 0)


@given(st.sampled_from(list(KEYS)), st.data())
def test_keys_are_found(width, data):
    """In blocks of ascending keys, one of them perhaps missing; doubles give the first."""
    values = sorted(data.draw(st.lists(KEYS[width], min_size=1, max_size=80)))
    probes = data.draw(st.lists(KEYS[width], max_size=60))
    cuts = (
        sorted(data.draw(st.sets(st.integers(1, len(values) - 1), max_size=4)))
        if values[1:]
        else []
    )
    cuts = [c for c in cuts if values[c - 1] != values[c]]
    bounds = [0, *cuts, len(values)]
    parts = [values[a:b] for a, b in pairwise(bounds)]
    blocks = [keys_of(width, part).to_block(0) for part in parts]
    blooms = [bloom_build(keys_of(width, part), 0) for part in parts]
    for probe in probes:
        for part, block, bloom in zip(parts, blocks, blooms, strict=True):
            expected = part.index(probe) if probe in part else -1
            assert point_find(block, None, probe) == point_find(block, bloom, probe) == expected
            assert Probe(block, bloom).find(probe) == expected
    gone = data.draw(st.none() | st.integers(0, len(parts) - 1))
    there = BlockList([None if i == gone else block for i, block in enumerate(blocks)])
    firsts = keys_of(width, [part[0] for part in parts])
    number, row = find_in_blocks(there, firsts, keys_of(width, probes))
    places = {
        key: (i, part.index(key)) for i, part in enumerate(parts) if i != gone for key in part
    }
    found = zip(number.to_pylist(), row.to_pylist(), strict=True)
    assert list(found) == [places.get(probe, (NULL_ROW, NULL_ROW)) for probe in probes]


def test_many_keys_are_found_in_large_blocks():
    codec = KeyCodec([pa.int64()])
    blocks = [
        codec.encode([pa.array(range(lo, lo + 20_000, 2))]) for lo in range(0, 100_000, 20_000)
    ]
    probes = [(i * 7919) % 100_100 for i in range(10_000)]
    number, row = find_in_blocks(
        BlockList([keys.to_block(0) for keys in blocks]),
        Keys.fixed(b"".join(keys.key(0) for keys in blocks), 8),
        codec.encode([pa.array(probes)]),
    )
    for probe, i, at in zip(probes, number.to_pylist(), row.to_pylist(), strict=True):
        there = probe % 2 == 0 and probe < 100_000
        assert (i, at) == ((probe // 20_000, probe % 20_000 // 2) if there else (NULL_ROW,) * 2)


@given(st.sampled_from(list(VALUES)), st.data())
def test_rows_are_gathered(type_, data):
    lists = st.lists(st.none() | VALUES[type_], min_size=1, max_size=12)
    values = data.draw(st.lists(st.none() | lists, min_size=1, max_size=4))
    place = st.integers(0, len(values) - 1).flatmap(
        lambda i: st.tuples(st.just(i), st.integers(0, len(values[i] or [0]) - 1))
    )
    places = data.draw(st.lists(place | st.just((NULL_ROW, 7)), max_size=60))
    blocks = BlockList([v and encode_block(pa.array(v, type_), 0) for v in values])
    array = gather_blocks(blocks, type_, u32([i for i, _ in places]), u32([r for _, r in places]))
    array.validate(full=True)
    assert array.type == type_
    expected = [None if i == NULL_ROW or values[i] is None else values[i][r] for i, r in places]
    assert array.to_pylist() == expected


@pytest.mark.parametrize("type_", [pa.int64(), pa.string(), pa.bool_(), pa.list_(pa.int64())])
def test_rows_that_are_not_there(type_):
    value = {pa.int64(): 1, pa.string(): "a", pa.bool_(): True}.get(type_, [1])
    blocks = BlockList([encode_block(pa.array([value], type_), 0)])
    for number, row in ((0, 1), (1, 0), (0, NULL_ROW)):
        with pytest.raises(IndexError):
            gather_blocks(blocks, type_, u32([0, number]), u32([0, row]))
    with pytest.raises(ValueError, match="2 numbers"):
        gather_blocks(blocks, type_, u32([0, 0]), u32([0]))
    with pytest.raises(TypeError):
        gather_blocks(blocks, pa.int64(), pa.array([0]), pa.array([0]))


def test_blocks_that_hold_no_keys_are_refused():
    keys = Keys.of([b"a"])
    bloom = bloom_build(keys, 0)
    for block in (bloom, b"", b"x" * 64):
        with pytest.raises(CoreError):
            point_find(block, None, b"a")
        with pytest.raises(CoreError):
            find_in_blocks(BlockList([block]), keys, keys)
    with pytest.raises(CoreError):
        point_find(keys.to_block(0), keys.to_block(0), b"a")
    with pytest.raises(ValueError, match="1 first keys of 2"):
        find_in_blocks(BlockList([bloom, bloom]), keys, keys)


def test_a_list_of_blocks_may_change():
    lists = [encode_block(pa.array([i]), 0) for i in range(3)]
    blocks = BlockList([None, lists[1]])
    blocks.put(0, lists[0])
    blocks.put(1, None)
    assert gather_blocks(blocks, pa.int64(), u32([0, 1]), u32([0, 0])).to_pylist() == [0, None]
    blocks.put(1, lists[2])
    assert RowReader([pa.int64()] * 2)(blocks, 0) == (0, 2)
    with pytest.raises(IndexError):
        blocks.put(2, lists[0])


@given(columns(), st.data())
def test_blocks_are_taken_column_by_column(made, data):
    types, rows = made
    cut = data.draw(st.integers(0, len(rows)))
    parts = [rows[:cut], rows[cut:]]
    lists = [
        BlockList([encode_block(pa.array([r[i] for r in part], t), 0) for i, t in enumerate(types)])
        for part in parts
    ]
    table = BlockTable([lists[0], None, lists[1]])
    places = [(0, i) for i in range(cut)] + [(1, 0)] + [(2, i) for i in range(len(rows) - cut)]
    which, at = Rows.of(b for b, _ in places), Rows.of(i for _, i in places)
    for i, type_ in enumerate(types):
        values = [row[i] for row in rows]
        gathered = gather_blocks(table.column(i), type_, which, at)
        assert gathered.to_pylist() == [*values[:cut], None, *values[cut:]]
    with pytest.raises(IndexError):
        table.column(len(types))


def test_keys_are_found_through_probes():
    keys = [Keys.of([b"a", b"c"]), Keys.of([b"e"])]
    probes = [Probe(some.to_block(0), bloom_build(some, 0)) for some in keys]
    blocks = BlockTable(probes).column(0)
    number, row = find_in_blocks(blocks, Keys.of([b"a", b"e"]), Keys.of([b"e", b"c", b"d"]))
    assert (number.to_pylist(), row.to_pylist()) == ([1, 0, NULL_ROW], [0, 1, NULL_ROW])
    with pytest.raises(ValueError, match="column of a table"):
        blocks.put(0, None)


def test_an_address_tells_where_bytes_are():
    memory = bytearray(100)
    assert address(memoryview(memory)[10:]) == address(memory) + 10


def u32(numbers):
    return pa.array(numbers, pa.uint32())
