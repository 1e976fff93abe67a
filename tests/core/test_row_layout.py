"""Rows: one at a time and in bulk the same bytes, and the values come back."""

from __future__ import annotations

import json
import struct
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from txnkv.core import CoreError, RowBytes, RowLayout, Rows

DATES = st.dates(date(1, 1, 2))
MOMENTS = st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30))


def integers(bits, signed):
    return (
        st.integers(-(1 << bits - 1), (1 << bits - 1) - 1)
        if signed
        else st.integers(0, (1 << bits) - 1)
    )


VALUES = {
    pa.bool_(): st.booleans(),
    pa.int8(): integers(8, True),
    pa.int16(): integers(16, True),
    pa.int32(): integers(32, True),
    pa.int64(): integers(64, True),
    pa.uint8(): integers(8, False),
    pa.uint16(): integers(16, False),
    pa.uint32(): integers(32, False),
    pa.uint64(): integers(64, False),
    pa.float32(): st.floats(width=32, allow_nan=False),
    pa.float64(): st.floats(allow_nan=False),
    pa.date32(): DATES,
    pa.timestamp("us"): MOMENTS,
    pa.timestamp("us", tz="UTC"): MOMENTS.map(lambda at: at.replace(tzinfo=UTC)),
    pa.decimal128(10, 3): st.integers(-(10**10) + 1, 10**10 - 1).map(
        lambda n: Decimal(n).scaleb(-3)
    ),
    pa.decimal128(38, 0): st.integers(-(10**38) + 1, 10**38 - 1).map(Decimal),
    pa.string(): st.text(max_size=8),
    pa.binary(): st.binary(max_size=8),
    pa.list_(pa.int32()): st.lists(integers(32, True) | st.none(), max_size=3),
    pa.list_(pa.string()): st.lists(st.text(max_size=3), max_size=3),
    pa.time64("us"): st.times(),
    pa.time32("s"): st.times().map(lambda at: at.replace(microsecond=0)),
    pa.duration("us"): st.timedeltas(timedelta(-100_000_000), timedelta(100_000_000)),
    pa.uuid(): st.uuids(),
    pa.json_(): st.integers().map(str) | st.text(max_size=8).map(json.dumps),
    pa.struct([("a", pa.int32()), ("b", pa.string())]): st.fixed_dictionaries(
        {"a": integers(32, True) | st.none(), "b": st.text(max_size=3) | st.none()}
    ),
    pa.map_(pa.string(), pa.int32()): st.lists(
        st.tuples(st.text(max_size=3), integers(32, True) | st.none()), max_size=3
    ),
}


@st.composite
def tables(draw, max_rows=5):
    types = draw(st.lists(st.sampled_from(list(VALUES)), max_size=10))
    row = st.tuples(*(st.none() | VALUES[type_] for type_ in types))
    return types, draw(st.lists(row, max_size=max_rows))


def arrays_of(types, rows):
    return [pa.array([row[i] for row in rows], type_) for i, type_ in enumerate(types)]


@given(tables())
def test_one_row_and_many_have_the_same_bytes(table):
    types, rows = table
    layout = RowLayout(types)
    many = layout.encode(arrays_of(types, rows), None if types else Rows.range(len(rows)))
    assert many.n == len(rows)
    for i, row in enumerate(rows):
        assert layout.encode_one(row) == layout.encode_one(list(row)) == many.row(i)
        assert layout.decode_one(many.row(i)) == row


@given(tables(), st.data())
def test_columns_come_back(table, data):
    types, rows = table
    layout = RowLayout(types)
    order = data.draw(st.lists(st.integers(0, len(rows) - 1))) if rows else []
    columns = data.draw(st.lists(st.integers(0, len(types) - 1))) if types else []
    padded = arrays_of(types, [*rows[:1], *rows])
    encoded = layout.encode([array.slice(len(rows[:1])) for array in padded], Rows.of(order))
    for column, array in zip(columns, layout.decode(encoded, columns), strict=True):
        array.validate(full=True)
        assert array.type == types[column]
        assert array.to_pylist() == [rows[i][column] for i in order]


def test_the_bytes_of_a_row():
    layout = RowLayout([pa.string(), pa.int16(), pa.bool_(), pa.binary(), pa.int32()])
    row = layout.encode_one(("é", -2, True, b"xyz", None))
    assert row == bytes.fromhex("10 FEFF 01 00000000 02000000 05000000 C3A9 78797A")


def test_numbers_stand_for_dates_and_times():
    layout = RowLayout([pa.date32(), pa.timestamp("us")])
    assert layout.encode_one((1, 2)) == layout.encode_one(
        (date(1970, 1, 2), datetime(1970, 1, 1, 0, 0, 0, 2))
    )


@pytest.mark.parametrize(
    ("type_", "value", "error"),
    [
        (pa.int8(), 128, ValueError),
        (pa.int64(), "1", TypeError),
        (pa.int64(), 1 << 63, ValueError),
        (pa.float32(), 1e300, ValueError),
        (pa.float64(), "x", TypeError),
        (pa.string(), b"x", TypeError),
        (pa.string(), 1, TypeError),
        (pa.binary(), "x", TypeError),
        (pa.binary(), 3, TypeError),
        (pa.decimal128(4, 2), Decimal("1.234"), ValueError),
        (pa.date32(), datetime(2020, 1, 1), TypeError),
        (pa.timestamp("us"), datetime(2020, 1, 1, tzinfo=UTC), ValueError),
    ],
)
def test_values_that_do_not_fit_are_refused(type_, value, error):
    layout = RowLayout([pa.string(), type_])
    with pytest.raises(error):
        layout.encode_one(("before", value))
    with pytest.raises(error):
        layout.encode_one((None, value))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_too_few_or_many_values_are_refused(count):
    layout = RowLayout([pa.int64(), pa.int64()])
    for value in (1, None):
        with pytest.raises(ValueError, match="values for a row of 2"):
            layout.encode_one([value] * count)


def test_arrays_that_do_not_fit_are_refused():
    layout = RowLayout([pa.int64(), pa.string()])
    numbers, words = pa.array([1, 2]), pa.array(["a", "b"])
    with pytest.raises(TypeError):
        layout.encode([words, numbers])
    with pytest.raises(ValueError, match="1 arrays"):
        layout.encode([numbers])
    with pytest.raises(ValueError, match="as long as"):
        layout.encode([numbers, words.slice(1)])
    with pytest.raises(IndexError):
        layout.encode([numbers, words], Rows.of([2]))
    with pytest.raises(IndexError):
        layout.decode(layout.encode([numbers, words]), [2])
    offsets = pa.py_buffer(struct.pack("<iii", 0, 5, 3))
    past = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"abcd")])
    with pytest.raises(ValueError, match="broken"):
        layout.encode([numbers, past])


def test_damaged_rows_are_found():
    layout = RowLayout([pa.int32(), pa.string(), pa.binary()])
    row = layout.encode_one((7, "abc", b"de"))
    head = len(row) - 5
    damaged = [row[:cut] for cut in range(len(row))] + [row + b"x"]
    damaged.append(row[: head - 8] + struct.pack("<II", 6, 5) + row[head:])
    damaged.append(row[: head - 8] + struct.pack("<II", 3, 0xFFFFFFFF) + row[head:])
    for bytes_ in damaged:
        with pytest.raises(CoreError):
            layout.decode_one(bytes_)
        with pytest.raises(CoreError):
            layout.decode(rows_of(bytes_), [0])
    with pytest.raises(CoreError):
        layout.decode_one(row.replace(b"abc", b"a\xff\xff"))


def test_offsets_that_fall_are_found():
    layout = RowLayout([pa.int8()])
    for ends in ((0, 9), (2, 0)):
        with pytest.raises(CoreError):
            layout.decode(
                RowBytes(1, pa.py_buffer(b"ab"), pa.py_buffer(struct.pack("<II", *ends))), [0]
            )
    with pytest.raises(ValueError, match="offsets"):
        RowBytes(1, pa.py_buffer(b"ab"), pa.py_buffer(bytes(4)))


def test_a_damaged_nested_value_is_found():
    layout = RowLayout([pa.list_(pa.int8())])
    row = layout.encode_one(([1, 2],))
    broken = bytes(1) + struct.pack("<I", 3) + b"abc"
    assert layout.decode_one(row) == ([1, 2],)
    with pytest.raises(CoreError):
        layout.decode_one(broken)
    with pytest.raises(CoreError):
        layout.decode(rows_of(broken), [0])


def rows_of(*rows):
    ends = [sum(map(len, rows[:i])) for i in range(len(rows) + 1)]
    data = pa.py_buffer(b"".join(rows))
    return RowBytes(len(rows), data, pa.py_buffer(struct.pack(f"<{len(ends)}I", *ends)))
