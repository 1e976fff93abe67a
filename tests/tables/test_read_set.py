"""The reads of a serializable transaction: keys and ranges, each once, in order."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txnkv import core
from txnkv.tables import read_set
from txnkv.tables.read_set import Range, ReadSet

BYTES = st.binary(max_size=3)
BOUND = st.one_of(st.none(), BYTES)


def test_nothing_was_read() -> None:
    reads = ReadSet()
    assert reads.tablet_ids == []
    assert reads.keys(1).n == 0
    assert reads.ranges(1) == []


def test_keys_come_once_and_in_order() -> None:
    reads = ReadSet()
    for key in (b"bbb", b"aaa", b"bbb"):
        reads.add_key(1, key)
    reads.add_keys(1, core.Keys.fixed(b"cccaaa", 3))
    reads.add_keys(1, core.Keys.fixed(b"", 3))
    reads.add_key(2, b"z")
    keys = reads.keys(1)
    assert [keys.key(i) for i in range(keys.n)] == [b"aaa", b"bbb", b"ccc"]
    assert keys.width == 3
    assert reads.tablet_ids == [1, 2]


def test_an_empty_range_is_none() -> None:
    reads = ReadSet()
    reads.add_range(1, b"b", b"b")
    reads.add_range(1, b"c", b"b")
    assert reads.tablet_ids == []


@given(
    st.lists(st.tuples(BOUND, BOUND), max_size=6),
    st.lists(BYTES, max_size=6),
    st.lists(BYTES, max_size=12),
)
def test_all_of_it_is_covered_and_nothing_else(
    ranges: list[tuple[bytes | None, bytes | None]], keys: list[bytes], probes: list[bytes]
) -> None:
    reads = ReadSet()
    for low, high in ranges:
        reads.add_range(1, low, high)
    for key in keys:
        reads.add_key(1, key)

    def inside(found: list[tuple[bytes | None, bytes | None]], key: bytes) -> bool:
        return any((low or b"") <= key and (high is None or key < high) for low, high in found)

    left = reads.ranges(1)
    assert [low or b"" for low, _ in left] == sorted({low or b"" for low, _ in left})
    single = reads.keys(1)
    there = [single.key(i) for i in range(single.n)]
    assert there == sorted(set(there))
    for probe in [*probes, *keys]:
        wanted = inside(ranges, probe) or probe in keys
        assert (inside(left, probe) or probe in there) == wanted


def test_the_key_behind_a_range_is_not_in_it() -> None:
    reads = ReadSet()
    reads.add_range(1, b"a", b"b")
    for key in (b"a", b"b"):
        reads.add_key(1, key)
    keys = reads.keys(1)
    assert [keys.key(i) for i in range(keys.n)] == [b"b"]


@pytest.mark.parametrize("step", [1, 5], ids=["one after the other", "apart from each other"])
def test_many_ranges_are_joined_as_often_as_their_number_doubles(
    monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    handled: list[int] = []
    join = read_set._joined

    def counted(ranges: list[Range]) -> list[Range]:
        handled.append(len(ranges))
        return join(ranges)

    monkeypatch.setattr(read_set, "_joined", counted)
    reads, n = ReadSet(), 8000
    wanted = [(i.to_bytes(8, "big"), (i + 1).to_bytes(8, "big")) for i in range(0, n * step, step)]
    for low, high in wanted:
        reads.add_range(1, low, high)
    for _ in range(2):
        assert reads.ranges(1) == (wanted if step > 1 else [(wanted[0][0], wanted[-1][1])])
        assert reads.keys(1).n == 0
    assert sum(handled) < 4 * n


@given(st.lists(st.tuples(st.integers(0, 999), st.integers(0, 9)), min_size=50, max_size=300))
def test_many_ranges_are_those_of_a_plain_set(found: list[tuple[int, int]]) -> None:
    reads, plain = ReadSet(), set()
    for at, (low, size) in enumerate(found):
        reads.add_range(1, low.to_bytes(2, "big"), (low + size).to_bytes(2, "big"))
        plain |= set(range(low, low + size))
        if at % 64 == 0:
            reads.ranges(1)
    ranges = [
        (int.from_bytes(low or b""), int.from_bytes(high or b"")) for low, high in reads.ranges(1)
    ]
    assert [at for low, high in ranges for at in range(low, high)] == sorted(plain)
    assert all(high < low for (_, high), (low, _) in pairwise(ranges))
