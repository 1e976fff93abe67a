"""MemRowSets against a dict of versions."""

from __future__ import annotations

import gc
import struct
import threading

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from txnkv.core import CoreError, Keys, MemRowSet, RowLayout, Rows

LAYOUT = RowLayout([pa.int64(), pa.string()])
WIDTHS = {0: st.binary(max_size=3) | st.binary(max_size=2).map(lambda b: b"a common start" + b)}
WIDTHS |= {8: st.integers(0, 20).map(lambda n: n.to_bytes(8, "big"))}
WIDTHS |= {11: st.binary(min_size=1, max_size=1).map(lambda b: b"common key" + b)}
STAMPS = st.integers(1, 6)
VALUES = st.none() | st.tuples(st.integers(0, 9) | st.none(), st.text(max_size=3))
FOREVER = (1 << 64) - 1


def row_of(value):
    return None if value is None else LAYOUT.encode_one(value)


def rows_of(values):
    if values[0] is None:
        return None
    return LAYOUT.encode([pa.array([v[i] for v in values], LAYOUT.types[i]) for i in range(2)])


def keys_of(width, keys):
    return Keys.fixed(b"".join(keys), width) if width else Keys.of(keys)


@st.composite
def filled(draw):
    """A set, and the model: {key: {stamp: value}}; built by every way there is to write."""
    width = draw(st.sampled_from(list(WIDTHS)))
    some, model = MemRowSet(width), {}
    for _ in range(draw(st.integers(0, 12))):
        stamp = draw(STAMPS)
        way = draw(st.sampled_from(["put", "put_many", "apply"]))
        keys = draw(st.lists(WIDTHS[width], min_size=1, max_size=6, unique=way != "put_many"))
        values = draw(st.lists(VALUES, min_size=len(keys), max_size=len(keys)))
        if way == "put_many":
            kind = values[0] is None
            values = [None if kind else value or (None, "") for value in values]
            some.put_many(keys_of(width, keys), stamp, rows_of(values))
        elif way == "apply":
            other = MemRowSet(width)
            for key, value in zip(keys, values, strict=True):
                other.put(key, 3, (row_of(value)))
            some.apply(other.serialize(), stamp)
        else:
            for key, value in zip(keys, values, strict=True):
                some.put(key, stamp, row_of(value))
        for key, value in zip(keys, values, strict=True):
            model.setdefault(key, {}).setdefault(stamp, value)
    return some, model


def newest(versions, after, upto):
    stamps = [stamp for stamp in versions if after < stamp <= upto]
    return (max(stamps), versions[max(stamps)]) if stamps else None


def listed(entries):
    """(key, stamp, value) of each."""
    keys = [entries.keys.key(i) for i in range(entries.n)]
    kinds, stamps = entries.kinds.to_pylist(), entries.stamps.to_pylist()
    numbers, words = entries.columns(LAYOUT, [0, 1])
    values = zip(numbers.to_pylist(), words.to_pylist(), strict=True)
    found = [
        (key, stamp, value if kind == 1 else None)
        for key, stamp, kind, value in zip(keys, stamps, kinds, values, strict=True)
    ]
    for kind, value in zip(kinds, zip(numbers, words, strict=True), strict=True):
        assert kind == 1 or not (value[0].is_valid or value[1].is_valid)
    return found


@given(filled(), st.integers(0, 6), st.integers(0, 7))
def test_single_keys(made, after, upto):
    some, model = made
    assert some.n == len(some) == sum(map(len, model.values()))
    for key, versions in model.items():
        expected = newest(versions, after, upto)
        found = some.get(key, after, upto)
        assert found == (expected and (expected[0], row_of(expected[1])))
    assert some.get(b"\xfe" * (some.width or 3), 0, FOREVER) is None


@given(filled(), st.integers(0, 6), st.integers(0, 7), st.data())
def test_many_keys(made, after, upto, data):
    some, model = made
    asked = data.draw(st.lists(WIDTHS[some.width]))
    asked = sorted(asked) if data.draw(st.booleans()) else asked
    keys = keys_of(some.width, asked)
    entries = some.lookup(keys, after, upto)
    assert entries.keys is keys
    expected = [newest(model.get(key, {}), after, upto) for key in asked]
    assert [(stamp, value) for _, stamp, value in listed(entries)] == [
        e or (0, None) for e in expected
    ]
    assert [kind > 0 for kind in entries.kinds.to_pylist()] == [e is not None for e in expected]
    changed = [max(model.get(key, {0: None})) > after for key in asked]
    assert some.changed_keys(keys, after) == (changed.index(True) if any(changed) else -1)


@given(filled(), st.integers(0, 6), st.integers(0, 7), st.data())
def test_ranges(made, after, upto, data):
    some, model = made
    low, high = data.draw(st.tuples(*[st.none() | WIDTHS[some.width]] * 2))
    inside = sorted(k for k in model if (low is None or low <= k) and (high is None or k < high))
    every = [
        (key, stamp, model[key][stamp])
        for key in inside
        for stamp in sorted(model[key], reverse=True)
        if after < stamp <= upto
    ]
    assert listed(some.select(low, high, after, upto, versions=True)) == every
    found = [(key, newest(model[key], after, upto)) for key in inside]
    assert listed(some.select(low, high, after, upto)) == [(k, *e) for k, e in found if e]
    changed = [key for key in inside if max(model[key]) > after]
    assert some.changed(low, high, after) == (changed[0] if changed else None)
    copy = some.copy(after, upto)
    assert listed(copy.select(low, high, 0, FOREVER, versions=True)) == every


@given(filled())
def test_sections(made):
    some, model = made
    section = some.serialize()
    other = MemRowSet(some.width)
    other.apply(section, 9)
    expected = [(key, 9, newest(model[key], 0, FOREVER)[1]) for key in sorted(model)]
    assert listed(other.select(None, None, 0, FOREVER)) == expected
    assert other.serialize() == section
    for cut in range(len(section)):
        with pytest.raises(CoreError):
            other.apply(section[:cut], 10)
    with pytest.raises(CoreError):
        other.apply(section + b"\0", 10)
    assert other.n == len(model)
    assert other.changed(None, None, 9) is None


def test_the_bytes_of_a_section():
    some = MemRowSet(0)
    some.put(b"key", 1, b"old")
    some.put(b"key", 2, b"row")
    some.put(b"gone", 1, None)
    items = struct.pack("<II", 4, 0xFFFFFFFF) + b"gone" + struct.pack("<II", 3, 3) + b"keyrow"
    assert some.serialize() == struct.pack("<I", 2) + items


@pytest.mark.parametrize("length", [0x7FFFFFFF, 0xFFFFFFFE, 0xFFFFFFFF])
def test_lengths_past_the_end_are_found(length):
    some = MemRowSet(0)
    for lengths in ((length, 0), (0, length - 1), (1, length - 1)):
        with pytest.raises(CoreError):
            some.apply(struct.pack("<III", 1, *lengths) + b"x", 1)
    with pytest.raises(CoreError):
        some.apply(struct.pack("<I", length), 1)
    assert some.n == 0


def test_keys_of_another_width_are_refused():
    some, other = MemRowSet(4), MemRowSet(0)
    other.put(b"abcd", 1, b"")
    other.put(b"abc", 1, b"")
    with pytest.raises(ValueError, match="4 bytes"):
        some.put(b"abc", 1, b"")
    with pytest.raises(ValueError, match="4 bytes"):
        some.put_many(Keys.of([b"abcd", b"abc"]), 1, None)
    with pytest.raises(CoreError):
        some.apply(other.serialize(), 1)
    with pytest.raises(ValueError, match="0 rows for 1 keys"):
        some.put_many(Keys.one(b"abcd"), 1, LAYOUT.encode([pa.array([], t) for t in LAYOUT.types]))
    assert some.n == 0
    assert some.nbytes == 0


def test_entries_by_row_list():
    some = MemRowSet(0)
    for i in range(5):
        some.put(b"%d" % i, 1, LAYOUT.encode_one((i, str(i))))
    some.put(b"2", 2, None)
    entries = some.select(None, None, 0, 9)
    (numbers,) = entries.columns(LAYOUT, [0], Rows.of([4, 2, 0xFFFFFFFF, 0]))
    assert numbers.to_pylist() == [4, None, None, 0]
    assert [key for key, *_ in listed(entries.take(Rows.of([3, 2, 3])))] == [b"3", b"2", b"3"]
    with pytest.raises(IndexError):
        entries.columns(LAYOUT, [0], Rows.of([5]))
    with pytest.raises(IndexError):
        entries.take(Rows.of([5]))
    with pytest.raises(CoreError):
        entries.columns(RowLayout([pa.int64()] * 9), [0])


def test_entries_keep_their_set():
    some = MemRowSet(8)
    for i in range(10_000):
        some.put(i.to_bytes(8, "big"), 1, LAYOUT.encode_one((i, "")))
    entries = some.select(None, None, 0, 9)
    del some
    gc.collect()
    assert entries.columns(LAYOUT, [0])[0].to_pylist() == list(range(10_000))


def test_more_entries_than_there_were_when_asked():
    class Growing(MemRowSet):
        n = property(lambda self: 2)

    some = Growing(8)
    for i in range(20):
        some.put(i.to_bytes(8, "big"), 1, LAYOUT.encode_one((i, "")))
    entries = some.select(None, None, 0, 9)
    assert entries.columns(LAYOUT, [0])[0].to_pylist() == list(range(20))


def test_readers_beside_the_writer():
    """Each batch has 100 keys and one stamp: a reader at a stamp that is complete sees it whole."""
    some, done, wrong = MemRowSet(8), [0], []
    keys = [
        Keys.fixed(b"".join((i * 7919 % 10_007).to_bytes(8, "big") for i in range(lo, lo + 100)), 8)
        for lo in range(0, 10_000, 100)
    ]

    def read():
        while done[0] < len(keys):
            upto = done[0]
            entries = some.select(None, None, 0, upto)
            stamps = entries.stamps.to_pylist()
            if sorted(stamps) != [s for s in range(1, upto + 1) for _ in range(100)]:
                wrong.append(upto)
            if upto and some.lookup(keys[upto - 1], upto - 1, upto).kinds.to_pylist() != [2] * 100:
                wrong.append(upto)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for stamp, some_keys in enumerate(keys, 1):
        some.put_many(some_keys, stamp, None)
        done[0] = stamp
    for reader in readers:
        reader.join()
    assert not wrong


def test_the_keys_of_another_set_that_changed() -> None:
    committed, own = MemRowSet(0), MemRowSet(0)
    for key, stamp in ((b"a", 3), (b"b", 7), (b"b", 9), (b"d", 8)):
        committed.put(key, stamp, b"")
    for key in (b"a", b"b", b"c", b"d"):
        own.put(key, 1, None)
    own.put(b"b", 2, b"row")
    answers = [committed.changed_of(own, after) for after in (2, 3, 8, 9)]
    assert answers == [b"a", b"b", b"b", None]
    assert committed.changed_of(MemRowSet(0), 0) is None
    with pytest.raises(TypeError, match="a MemRowSet is needed"):
        committed.changed_of(b"a", 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes 2 arguments"):
        committed.changed_of(own)  # type: ignore[call-arg]
