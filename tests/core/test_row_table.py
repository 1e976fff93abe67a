"""The native codec of a table: the bytes of the Python codecs, at sight or by way of them."""

from __future__ import annotations

import gc
import math
import sys
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.test_row_layout import VALUES
from txnkv.core import CoreError, KeyCodec, RowLayout, RowTable, row_table, successor

OTHERS = (
    pa.list_(pa.int32()),
    pa.list_(pa.string()),
    pa.struct([("a", pa.int32()), ("b", pa.string())]),
    pa.map_(pa.string(), pa.int32()),
)
"""Types of which no value is known at sight."""

KEY_TYPES = [type_ for type_ in VALUES if type_ not in (*OTHERS, pa.json_())]


def table_of(keys, others, nullable=True):
    """A table whose key's columns stand in reverse between the others."""
    types = {}
    for i in range(max(len(keys), len(others))):
        if i < len(others):
            types[f"v{i}"] = others[i]
        if i < len(keys):
            types[f"k{i}"] = keys[i]
    order = [f"k{i}" for i in reversed(range(len(keys)))]
    left = [name for name in types if name not in order]
    return types, order, left, row_table(types, left if nullable else (), order)


@st.composite
def rows(draw):
    keys = draw(st.lists(st.sampled_from(KEY_TYPES), min_size=1, max_size=3))
    others = draw(st.lists(st.sampled_from(list(VALUES)), max_size=9))
    types, order, left, table = table_of(keys, others)
    row = {name: draw(VALUES[types[name]]) for name in types}
    for name in left:
        row[name] = draw(st.none() | st.just(row[name]))
    return types, order, left, table, row


@given(rows())
def test_it_has_the_bytes_of_the_python_codecs(made):
    types, order, left, table, row = made
    key = KeyCodec([types[name] for name in order]).encode_one([row[name] for name in order])
    value = RowLayout([types[name] for name in left]).encode_one([row[name] for name in left])
    whole = tuple(row.values())
    assert table.values(whole) == (key, value)
    assert list(table.dict(key, value).items()) == list(row.items())
    known = all(row[name] is None or at_sight(types[name], row[name]) for name in types)
    for given_row in (row, whole):
        assert table.row(given_row) == ((key, value) if known else None)
    wanted = tuple(row[name] for name in order)
    if all(at_sight(types[name], row[name]) for name in order):
        assert table.key(wanted[0] if len(wanted) == 1 else wanted) == key


@given(rows(), st.data())
def test_dicts_of_some_columns(made, data):
    types, order, left, table, row = made
    key = KeyCodec([types[name] for name in order]).encode_one([row[name] for name in order])
    value = RowLayout([types[name] for name in left]).encode_one([row[name] for name in left])
    names = data.draw(st.permutations([*types]).map(tuple))[: data.draw(st.integers(0, len(types)))]
    some = table.only(names)
    assert list(some.dict(key, value).items()) == [(name, row[name]) for name in names]
    assert list(some.only((*names, *names)).dict(key, value)) == list(names)
    assert some.values(tuple(row.values())) == (key, value)
    for damaged in ((key, value + b"x"), (key[:-1], value)):
        if (got := outcome(table, *damaged)) is CoreError:
            assert outcome(some, *damaged) in (got, {name: row[name] for name in names})


def outcome(table, key, value):
    try:
        return table.dict(key, value)
    except CoreError:
        return CoreError


@pytest.mark.parametrize(
    ("names", "error"), [(("a", "x"), ValueError), ((1,), ValueError), (["a"], TypeError)]
)
def test_dicts_of_what_is_no_column(names, error):
    with pytest.raises(error):
        row_table({"k": pa.int64(), "a": pa.int64()}, [], ["k"]).only(names)


@given(rows())
def test_keys_that_begin_with_some_values(made):
    types, order, _, table, row = made
    codec = KeyCodec([types[name] for name in order])
    for n in range(len(order) + 1):
        first = tuple(row[name] for name in order[:n])
        low = codec.encode_prefix(first)
        known = all(at_sight(types[name], row[name]) for name in order[:n])
        high = low + b"\0" if n == len(order) else successor(low)
        assert table.beginning(first) == ((low, high) if known else None)


def test_keys_that_begin_with_the_greatest_values():
    types = {"a": pa.uint8(), "b": pa.uint8(), "c": pa.uint8()}
    table = row_table(types, (), list(types))
    assert table.beginning((1, 255)) == (b"\x01\xff", b"\x02")
    assert table.beginning((255, 255)) == (b"\xff\xff", None)
    assert table.beginning((255, 255, 255)) == (b"\xff\xff\xff", b"\xff\xff\xff\0")
    for other in ((1, 2, 3, 4), [1], 1, (256,), ("a",)):
        assert table.beginning(other) is None


def at_sight(type_, value):
    infinite = type_ == pa.float32() and math.isinf(value)
    return type_ not in OTHERS and not infinite


@given(st.lists(st.binary(max_size=4), min_size=3, max_size=3))
def test_zeros_in_keys(parts):
    table = row_table({"a": pa.binary(), "b": pa.binary(), "c": pa.binary()}, (), ["a", "b", "c"])
    codec = KeyCodec([pa.binary()] * 3)
    key = codec.encode_one(parts)
    assert table.row(tuple(parts)) == (key, b"")
    assert tuple(table.dict(key, b"").values()) == tuple(parts)


LEFT = [
    (pa.int64(), 1 << 63),
    (pa.int64(), -(1 << 63) - 1),
    (pa.int64(), True),
    (pa.int64(), 1.0),
    (pa.int8(), 128),
    (pa.int8(), -129),
    (pa.int32(), 1 << 31),
    (pa.uint8(), 256),
    (pa.uint32(), -1),
    (pa.uint64(), 1 << 64),
    (pa.bool_(), 1),
    (pa.float64(), 1),
    (pa.float32(), 1e300),
    (pa.float32(), float("inf")),
    (pa.string(), b"a"),
    (pa.string(), "\ud800"),
    (pa.binary(), "a"),
    (pa.binary(), bytearray(b"a")),
    (pa.date32(), datetime(2020, 1, 1)),
    (pa.timestamp("us"), datetime(2020, 1, 1, tzinfo=UTC)),
    (pa.timestamp("us", tz="UTC"), datetime(2020, 1, 1)),
    (pa.timestamp("us", tz="UTC"), datetime(2020, 1, 1, tzinfo=timezone(timedelta(hours=1)))),
    (pa.timestamp("us", tz="Europe/Berlin"), datetime(2020, 1, 1, tzinfo=UTC)),
    (pa.decimal128(4, 2), Decimal("1.001")),
    (pa.decimal128(4, 2), Decimal("100")),
    (pa.decimal128(4, 2), Decimal("NaN")),
    (pa.decimal128(4, 2), Decimal("1E-999999999")),
    (pa.decimal128(4, 2), Decimal("0E-999999999")),
    (pa.decimal128(4, 2), Decimal("1." + 100 * "0" + "1")),
    (pa.decimal128(4, 2), 1),
]


@pytest.mark.parametrize(("type_", "value"), LEFT)
def test_values_of_another_class_or_range_are_left_to_python(type_, value):
    assert row_table({"k": type_}, (), ["k"]).key(value) is None
    assert row_table({"k": pa.int64(), "v": type_}, ["v"], ["k"]).row((1, value)) is None


@pytest.mark.parametrize(
    "text", ["", "{", "nan", "'a'", "[1,]", '"\\ud800x', "\ud800", {"a": 1}, b"1"]
)
def test_what_is_no_json_is_left_to_python(text):
    table = row_table({"k": pa.int64(), "v": pa.json_()}, ["v"], ["k"])
    assert table.row((1, text)) is None
    assert not table.fits(1, text)
    assert table.fits(1, '{"a": [1.50, null, "\\ud800 é"]}')


def test_a_decimal_of_other_digits_has_the_same_bytes():
    table = row_table({"k": pa.decimal128(4, 2), "v": pa.decimal128(4, 2)}, ["v"], ["k"])
    assert table.row((Decimal("1.5"), Decimal("2"))) == table.row((Decimal("1.50"), Decimal("2.0")))
    assert table.dict(*table.row((Decimal("1.5"), Decimal("2E1")))) == {
        "k": Decimal("1.50"), "v": Decimal("20.00"),
    }  # fmt: skip


def test_rows_of_another_form_are_left_to_python():
    table = row_table({"k": pa.int64(), "n": pa.int32(), "v": pa.string()}, ["v"], ["k"])
    assert table.row((1, 2, None)) is not None
    for other in (
        (1, 2),
        (1, 2, "a", 3),
        {"k": 1, "n": 2},
        {"k": 1, "n": 2, "x": "a"},
        [1, 2, "a"],
    ):
        assert table.row(other) is None
    assert table.row((1, None, "a")) is None
    assert table.row((None, 2, "a")) is None
    assert table.key(None) is None
    assert row_table({"a": pa.int64(), "b": pa.int64()}, (), ["a", "b"]).key((1,)) is None


def test_long_values_and_many_columns():
    types = {"k": pa.string(), **{f"v{i}": pa.string() for i in range(100)}}
    table = row_table(types, list(types)[1:], ["k"])
    row = {"k": "k" * 1000, **{f"v{i}": "x" * i if i % 3 else None for i in range(100)}}
    key, value = table.row(row)
    assert (key, value) == table.values(tuple(row.values()))
    assert value == RowLayout(list(types.values())[1:]).encode_one(list(row.values())[1:])
    assert table.dict(key, value) == row


def test_damaged_bytes_are_found():
    table = row_table(
        {"k": pa.string(), "b": pa.bool_(), "n": pa.int32(), "v": pa.string(), "w": pa.binary()},
        (),
        ["k", "b"],
    )
    key, row = table.row(("a\0b", True, 7, "abc", b"de"))
    assert table.dict(key, row) == {"k": "a\0b", "b": True, "n": 7, "v": "abc", "w": b"de"}
    damaged = [(key, row[:cut]) for cut in range(len(row))] + [(key, row + b"x")]
    damaged += [(key[:cut], row) for cut in range(len(key))] + [(key + b"x", row)]
    damaged += [(key[:-1] + b"\2", row), (key.replace(b"\0\xff", b"\0\2"), row)]
    damaged += [(key.replace(b"a", b"\xff"), row), (key, row.replace(b"abc", b"a\xff\xff"))]
    for some in damaged:
        with pytest.raises(CoreError, match="reading a row"):
            table.dict(*some)


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_any_bytes_are_a_row_or_damaged(key, row):
    table = row_table(
        {"k": pa.string(), "d": pa.date32(), "v": pa.string(), "w": pa.float32()}, (), ["k", "d"]
    )
    try:
        found = table.dict(key, row)
    except CoreError:
        return
    assert list(found) == ["k", "d", "v", "w"]


def test_errors_of_python_come_through():
    table = row_table({"k": pa.int64(), "v": pa.decimal128(4, 2)}, (), ["k"])
    with pytest.raises(ValueError, match="loss"):
        table.values((1, Decimal("1.234")))
    with pytest.raises(TypeError):
        table.values(("1", Decimal("1.23")))
    with pytest.raises(ValueError, match="columns"):
        table.values((1,))
    with pytest.raises(ValueError, match="code"):
        RowTable((("k", 4, 0, False, int, False, None, None, None),), (0,), CoreError, ...)
    with pytest.raises(ValueError, match="no column"):
        RowTable((("k", 4, 8, False, int, False, None, None, None),), (1,), CoreError, ...)


def test_nothing_is_kept_or_given_up_too_often():
    table = row_table({"k": pa.string(), "d": pa.date32(), "v": pa.binary()}, ["v"], ["k", "d"])
    parts = ["key-" * 3, date(2024, 5, 17), b"value" * 3, object()]
    before = [sys.getrefcount(part) for part in parts]
    for _ in range(100):
        key, row = table.row(tuple(parts[:3]))
        table.row(dict(zip("kdv", parts[:3], strict=True)))
        table.row((*parts[:2], parts[3]))
        table.key((parts[0], parts[1]))
        table.dict(key, row)
        table.only(("v", "k")).dict(key, row)
        with pytest.raises(ValueError, match="not all are columns"):
            table.only(("v", parts[0]))
        with pytest.raises(CoreError):
            table.dict(key, row + b"x")
    gc.collect()
    assert [sys.getrefcount(part) for part in parts] == before


@given(rows(), st.data())
def test_a_row_over_an_older_one_keeps_what_is_missing(made, data):
    types, _, left, table, row = made
    newer = {name: data.draw(VALUES[types[name]]) if name in left else row[name] for name in row}
    dropped = data.draw(st.sets(st.sampled_from(left))) if left else set()
    given_row = tuple(... if name in dropped else newer[name] for name in row)
    _, old = table.values(tuple(row.values()))
    merged = tuple(row[name] if name in dropped else newer[name] for name in row)
    assert table.values(given_row, old) == table.values(merged)
    flags = bytes(name in dropped for name in row)
    assert table.missing(given_row) == (flags if dropped else None)
    if dropped:
        with pytest.raises(ValueError, match="columns"):
            table.values(given_row)


def test_an_older_row_that_is_damaged_is_refused():
    table = row_table({"k": pa.int64(), "v": pa.string(), "w": pa.string()}, (), ["k"])
    _, old = table.values((1, "ab", "cd"))
    for broken in (old[:-1], old + b"x", old[:5], b""):
        with pytest.raises(CoreError, match="lengths"):
            table.values((1, ..., "x"), broken)
