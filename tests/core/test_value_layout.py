"""Typed values: one at a time and in bulk the same bytes, and nothing damaged gets through."""

from __future__ import annotations

from contextlib import suppress

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.test_row_layout import arrays_of, tables
from txnkv.core import CoreError, DamagedValueError, Rows, ValueLayout


@given(tables(), st.integers(0, 65535))
def test_one_value_and_many_have_the_same_bytes(table, schema):
    types, rows = table
    if not types:
        return
    layout = ValueLayout(types, schema)
    values = layout.encode(arrays_of(types, rows))
    values.validate(full=True)
    assert values.to_pylist() == [layout.encode_one(row) for row in rows]
    assert [layout.decode_one(value) for value in values.to_pylist()] == rows


@given(tables(), st.data())
def test_columns_come_back_also_of_nulls_slices_and_some_rows(table, data):
    types, rows = table
    if not types:
        return
    layout = ValueLayout(types, 1)
    picked = data.draw(st.lists(st.sampled_from(range(len(rows))))) if rows else []
    values = layout.encode(arrays_of(types, rows), Rows.from_arrow(pa.array(picked, pa.uint32())))
    given_rows = [rows[i] for i in picked]
    if given_rows:
        gone = data.draw(st.integers(0, len(given_rows) - 1))
        mixed = values.to_pylist()
        mixed[gone] = None
        values = pa.array(mixed, pa.binary())
        given_rows[gone] = (None,) * len(types)
    first = data.draw(st.integers(0, len(given_rows)))
    columns = data.draw(st.lists(st.sampled_from(range(len(types)))))
    found = layout.decode(values.slice(first), columns)
    assert found == arrays_of(
        [types[c] for c in columns], [tuple(row[c] for c in columns) for row in given_rows[first:]]
    )


@given(tables(), st.data())
def test_damage_is_refused_or_read_within_the_value(table, data):
    types, rows = table
    if not types or not rows:
        return
    layout = ValueLayout(types, 3)
    value = bytearray(layout.encode_one(rows[0]))
    value[data.draw(st.integers(0, len(value) - 1))] ^= data.draw(st.integers(1, 255))
    value = value[: data.draw(st.integers(0, len(value)))]
    for read in (
        lambda: layout.decode(pa.array([bytes(value)], pa.binary()), range(len(types))),
        lambda: layout.decode_one(bytes(value)),
    ):
        with suppress(CoreError, ValueError, OverflowError):
            read()


def test_the_bytes_of_the_format():
    layout = ValueLayout([pa.int32(), pa.string(), pa.list_(pa.string())], 1)
    golden = bytes.fromhex(
        "010100 02 07000000 00000000 0b000000 00 01000000 61 01 00000000".replace(" ", "")
    )
    assert layout.encode_one((7, None, ["a", None])) == golden
    assert layout.decode_one(golden) == (7, None, ["a", None])


def test_another_version_schema_or_length_is_named():
    layout = ValueLayout([pa.int32(), pa.string()], 7)
    right = layout.encode_one((1, "a"))
    for wrong, said in [
        (b"\x02" + right[1:], "version 1"),
        (right[:1] + b"\x08\x00" + right[3:], "schema 8, not 7"),
        (right[:2], "2 bytes"),
        (right[:-1], "do not add up"),
        (right + b"x", "do not add up"),
    ]:
        with pytest.raises(DamagedValueError, match=said) as found:
            layout.decode(pa.array([right, None, wrong], pa.binary()), [0])
        assert found.value.index == 2
        with pytest.raises(DamagedValueError):
            layout.decode_one(wrong)


NESTED = pa.list_(pa.list_(pa.list_(pa.string())))


def levels(kind):
    """Values of a type of lists of lists."""
    if not pa.types.is_list(kind):
        return st.none() | st.text(max_size=3)
    return st.none() | st.lists(levels(kind.value_type), max_size=3)


@given(st.lists(levels(NESTED), max_size=6), st.data())
def test_lists_of_lists_come_back(rows, data):
    layout = ValueLayout([NESTED], 1)
    first = data.draw(st.integers(0, len(rows)))
    values = layout.encode([pa.array(rows, NESTED).slice(first)])
    assert values.to_pylist() == [layout.encode_one((row,)) for row in rows[first:]]
    assert layout.decode(values, [0])[0].to_pylist() == rows[first:]
    assert [layout.decode_one(value)[0] for value in values.to_pylist()] == rows[first:]


def test_lists_whose_nulls_stand_over_elements():
    array = pa.ListArray.from_arrays([0, 2, 3], pa.array([1, 2, 3]), mask=pa.array([True, False]))
    layout = ValueLayout([array.type], 1)
    assert layout.decode(layout.encode([array]), [0])[0].to_pylist() == [None, [3]]


def test_a_damaged_list_is_named():
    layout = ValueLayout([pa.list_(pa.list_(pa.string()))], 1)
    right = layout.encode_one(([["a"], ["bc", "d"]],))
    for at in range(len(right) - 12, len(right)):
        wrong = right[:at] + bytes([right[at] ^ 0x40]) + right[at + 1 :]
        for damaged in (wrong, right[:at]):
            named = []
            try:
                layout.decode(pa.array([right, damaged], pa.binary()), [0])
            except DamagedValueError as error:
                named.append(error.index)
            assert named in ([], [1])


def test_more_than_arrow_offsets_can_say_is_refused():
    layout = ValueLayout([pa.binary()], 1)
    long = pa.array([b"x" * (1 << 20)])
    with pytest.raises(CoreError, match="fewer rows"):
        layout.encode([long], Rows.from_arrow(pa.array([0] * 2048, pa.uint32())))
