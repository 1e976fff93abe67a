"""Sorting, searching, merging and partitioning, against plain Python."""

from __future__ import annotations

from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from txnkv.core import (
    KeyCodec,
    Keys,
    Merger,
    Rows,
    find,
    hash_partition,
    lower_bound,
    mark_common,
    mark_duplicates,
    match_block,
    range_partition,
    scatter,
    sort_keys,
)

WORDS = st.binary(max_size=3) | st.binary(max_size=3).map(lambda tail: b"a common prefix" + tail)
NUMBERS = st.integers(-5, 5) | st.integers(-(1 << 63), (1 << 63) - 1)
SHAPES = {
    "int64": (KeyCodec([pa.int64()]), st.tuples(NUMBERS)),
    "int32": (KeyCodec([pa.int32()]), st.tuples(st.integers(-9, 9))),
    "composite": (KeyCodec([pa.int64(), pa.int32()]), st.tuples(NUMBERS, st.integers(-2, 2))),
    "binary": (KeyCodec([pa.binary()]), st.tuples(WORDS)),
    "text": (KeyCodec([pa.binary(), pa.int8()]), st.tuples(WORDS, st.integers(0, 1))),
}


@st.composite
def key_lists(draw, count=1, ascending=False):
    codec, rows = SHAPES[draw(st.sampled_from(list(SHAPES)))]
    lists = [draw(st.lists(rows, max_size=60)) for _ in range(count)]
    encoded = [[codec.encode_one(row) for row in rows] for rows in lists]
    if ascending:
        encoded = [sorted(set(values)) for values in encoded]
    return [made(codec, values) for values in encoded], encoded


def made(codec, values):
    return Keys.fixed(b"".join(values), codec.width) if codec.width else Keys.of(values)


@given(key_lists())
def test_sorting_is_stable_and_finds_duplicates(lists):
    (keys,), (values,) = lists
    order = sort_keys(keys)
    expected = sorted(range(len(values)), key=values.__getitem__)
    if order is None:
        assert all(a < b for a, b in pairwise(values))
    else:
        assert order.to_arrow().to_pylist() == expected
    marked = mark_duplicates(keys, order)
    listed = [values[i] for i in expected]
    assert [marked.get(i) for i in range(marked.n)] == [
        i > 0 and listed[i] == listed[i - 1] for i in range(len(listed))
    ]


@given(key_lists(), st.data())
def test_sorting_a_subset(lists, data):
    (keys,), (values,) = lists
    rows = data.draw(st.lists(st.integers(0, len(values) - 1))) if values else []
    order = sort_keys(keys, Rows.of(rows))
    expected = sorted(rows, key=values.__getitem__)
    assert (rows if order is None else order.to_arrow().to_pylist()) == expected
    with pytest.raises(IndexError):
        sort_keys(keys, Rows.of([len(values)]))


@pytest.mark.parametrize("n", [1000, 100_000])
def test_sorting_many(n):
    values = pa.array([(i * 7919) % n for i in range(n)])
    keys = KeyCodec([pa.int64()]).encode([values])
    order = sort_keys(keys).to_arrow()
    assert values.take(order).to_pylist() == list(range(n))


@given(key_lists(2, ascending=True))
def test_searching(lists):
    (keys, probes), (values, wanted) = lists
    expected = [values.index(w) if w in values else -1 for w in wanted]
    assert find(keys, probes).to_pylist() == expected
    backwards = Rows.of(range(len(wanted) - 1, -1, -1))
    assert find(keys, probes.gather(backwards)).to_pylist() == expected[::-1]
    for probe in wanted:
        assert lower_bound(keys, probe) == sum(v < probe for v in values)


@given(key_lists(count=2, ascending=True), st.integers(1, 90))
def test_rows_of_a_block_that_have_one_of_some_keys(lists, times):
    (keys, some), (present, wanted) = lists
    block = keys.to_block(0)
    rows, positions = match_block(block, some)
    expected = [(present.index(key), i) for i, key in enumerate(wanted) if key in present]
    assert list(zip(rows.to_pylist(), positions.to_pylist(), strict=True)) == expected
    # Versions of a key stand together; a long block is searched as it lies.
    versions = keys.gather(Rows.of([i for i in range(keys.n) for _ in range(times)])).to_block(0)
    rows, positions = match_block(versions, some, versioned=True)
    expected = [(row * times + k, i) for row, i in expected for k in range(times)]
    assert list(zip(rows.to_pylist(), positions.to_pylist(), strict=True)) == expected


@given(key_lists(2, ascending=True), st.data())
def test_common_keys(lists, data):
    (a, b), (left, right) = lists
    lo = data.draw(st.integers(0, len(left)))
    part = mark_common(a.slice(lo, len(left) - lo), b)
    assert [part.get(i) for i in range(part.n)] == [v in right for v in left[lo:]]
    assert part.count == len(set(left[lo:]) & set(right))


@given(key_lists(4), st.integers(1, 7), st.data())
def test_merging_block_by_block(lists, cap, data):
    keys, values = lists
    values = [sorted(source) for source in values]
    keys = [k.gather(sort_keys(k) or Rows.range(k.n)) for k in keys]
    cuts = [data.draw(st.integers(0, k.n)) for k in keys]
    ends = [cut == k.n and data.draw(st.booleans()) for k, cut in zip(keys, cuts, strict=True)]
    merger = Merger([k.slice(0, cut) for k, cut in zip(keys, cuts, strict=True)], ends)
    starts, later = [0] * 4, {i for i in range(4) if not ends[i]}
    merged = []
    while not merger.done:
        for i in merger.exhausted:
            if i in later:
                last = data.draw(st.booleans())
                merger.replace(i, keys[i].slice(cuts[i], keys[i].n - cuts[i]), last)
                starts[i] = cuts[i]
                later.discard(i)
            else:
                merger.finish(i)
        if merger.exhausted:
            continue
        source, index = merger.next(cap)
        assert len(source) <= cap
        pairs = zip(source.to_pylist(), index.to_pylist(), strict=True)
        merged += [(values[s][starts[s] + i], s) for s, i in pairs]
    assert merged == sorted((v, s) for s, source in enumerate(values) for v in source)
    assert [len(part) for part in merger.next(5)] == [0, 0]


def test_a_merger_waits_for_what_follows():
    merger = Merger([Keys.of([b"a"]), Keys.of([b"b"])])
    with pytest.raises(ValueError, match="still has keys"):
        merger.finish(0)
    assert merger.next(10)[0].to_pylist() == [0]
    assert merger.exhausted == [0]
    with pytest.raises(ValueError, match="ran out"):
        merger.next(10)


@given(key_lists(2, ascending=True), st.integers(1, 9))
def test_partitions(lists, buckets):
    (keys, bounds), (values, limits) = lists
    numbers = range_partition(keys, bounds)
    assert numbers.to_pylist() == [sum(limit <= v for limit in limits) for v in values]
    hashed = hash_partition(keys, buckets)
    for part in (numbers, hashed, hashed.slice(min(1, len(hashed)))):
        listed = part.to_pylist()
        parts = scatter(part, len(limits) + 10)
        assert [rows.to_arrow().to_pylist() for rows in parts] == [
            [i for i, number in enumerate(listed) if number == p] for p in range(len(limits) + 10)
        ]


def test_hash_partitions_are_frozen():
    keys = KeyCodec([pa.int64()]).encode([pa.array([0, 1, 2, 3, -1, 1 << 40])])
    assert hash_partition(keys, 4).to_pylist() == [0, 0, 2, 0, 3, 0]
    words = KeyCodec([pa.string()]).encode([pa.array(["", "a", "eu", "us", "asia", "x" * 100])])
    assert hash_partition(words, 4).to_pylist() == [0, 3, 0, 2, 1, 3]


def test_mistakes_are_errors():
    numbers = pa.array([0, 3], pa.uint16())
    with pytest.raises(IndexError):
        scatter(numbers, 3)
    with pytest.raises(ValueError, match="partitions"):
        scatter(numbers, 0)
    with pytest.raises(TypeError):
        scatter(pa.array([1]), 3)
    with pytest.raises(ValueError, match="partitions"):
        hash_partition(Keys.of([b"a"]), 65537)
