"""Lines of JSON that the core writes, against Python's own way, byte for byte."""

from __future__ import annotations

import datetime as dt
import random

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from txnkv import core
from txnkv.cli.console import json_lines, json_text, json_value, row_text

INTEGERS = {
    str(kind): (kind, st.integers(least, most))
    for kind, least, most in (
        (pa.int8(), -(2**7), 2**7 - 1),
        (pa.int16(), -(2**15), 2**15 - 1),
        (pa.int32(), -(2**31), 2**31 - 1),
        (pa.int64(), -(2**63), 2**63 - 1),
        (pa.uint8(), 0, 2**8 - 1),
        (pa.uint16(), 0, 2**16 - 1),
        (pa.uint32(), 0, 2**32 - 1),
        (pa.uint64(), 0, 2**64 - 1),
    )
}
COLUMNS = INTEGERS | {
    "f": (pa.float64(), st.floats()),
    "f32": (pa.float32(), st.floats(width=32)),
    "b": (pa.bool_(), st.booleans()),
    'a "name"': (pa.string(), st.text()),
    "d": (pa.date32(), st.dates()),
    "t": (pa.timestamp("us", "UTC"), st.datetimes(timezones=st.just(dt.UTC))),
    "local": (pa.timestamp("us"), st.datetimes() | st.just(dt.datetime(2026, 1, 2))),
    "x": (pa.binary(), st.binary()),
    "n": (pa.decimal128(9, 2), st.decimals(-1000, 1000, places=2)),
    "l": (pa.list_(pa.string()), st.lists(st.text())),
    "s": (pa.struct({"a": pa.int64()}), st.fixed_dictionaries({"a": st.integers(0, 9)})),
    "m": (
        pa.map_(pa.date32(), pa.int64()),
        st.dictionaries(st.dates(), st.integers(0, 9), min_size=1).map(lambda m: [*m.items()]),
    ),
    "clock": (pa.time64("us"), st.times()),
    "u": (pa.uuid(), st.uuids()),
    "always": (pa.string(), st.text('ab\\"\n\x00é')),
    "plain": (pa.string(), st.text("ab")),
}


@given(
    st.lists(
        st.tuples(
            *(
                values if name in ("always", "plain") else st.none() | values
                for name, (_, values) in COLUMNS.items()
            )
        )
    ),
    st.integers(0, 3),
)
def test_json_by_columns_says_what_rows_say(rows, skipped):
    schema = pa.schema([(name, kind) for name, (kind, _) in COLUMNS.items()])
    arrays = [pa.array([row[i] for row in rows], kind) for i, kind in enumerate(schema.types)]
    batch = pa.record_batch(arrays, schema=schema).slice(skipped)
    names = [json_text(name) for name in schema.names]
    wanted = ""
    for row in zip(*map(_texts, batch.columns), strict=True):
        members = ", ".join(f"{name}: {value}" for name, value in zip(names, row, strict=True))
        wanted += f"{{{members}}}\n"
    assert bytes(json_lines(batch)).decode() == wanted


def _texts(column):
    """The values as Python writes them; floats with the digits of Arrow."""
    if not pa.types.is_floating(column.type):
        return [json_text(json_value(value)) for value in column.to_pylist()]
    texts = column.cast(pa.float64()).cast(pa.string()).to_pylist()
    return [
        "null" if text in (None, "nan", "inf", "-inf")
        # Arrow leaves .0 out
        else text if set(".e") & set(text) else f"{text}.0"
        for text in texts
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_floats_are_as_short_as_they_can_be(seed):
    bits = random.Random(seed).randbytes(8 * 30_000)
    column = pa.Array.from_buffers(pa.float64(), 30_000, [None, pa.py_buffer(bits)])
    prices = pc.divide(pa.array(range(30_000), pa.float64()), 100)
    for each in (column, pc.divide(pc.round(column), 1e290), prices):
        lines = bytes(json_lines(pa.record_batch([each], ["f"]))).decode().splitlines()
        assert [line[6:-1] for line in lines] == _texts(each)


@given(st.lists(st.none() | st.binary() | st.text().map(str.encode)), st.integers(0, 3))
def test_bytes_are_text_where_they_can_be(values, skipped):
    column = pa.array(values, pa.binary()).slice(skipped)
    texts = core.json_texts([("", column, core.JsonKind.EITHER)], len(column))
    texts.validate(full=True)
    assert texts.to_pylist() == [json_text(_either(value)) for value in column.to_pylist()]


def _either(value):
    try:
        return value if value is None else value.decode()
    except UnicodeDecodeError:
        return {"base64": json_value(value)}


def test_columns_of_json_are_a_part_of_the_line():
    column = pa.array(['{"a":\r\n 1}', None, "[]"], core.JSON)
    lines = bytes(json_lines(pa.record_batch([column], ["j"]))).decode()
    assert lines == '{"j": {"a":  1}}\n{"j": null}\n{"j": []}\n'


def test_a_map_without_pairs_is_an_object():
    column = pa.array([[], None], pa.map_(pa.string(), pa.int64()))
    lines = bytes(json_lines(pa.record_batch([column], ["m"]))).decode()
    assert lines == '{"m": {}}\n{"m": null}\n'
    schema = pa.schema([("l", pa.list_(column.type))])
    assert row_text({"l": [[], [("a", 1)]]}, schema) == '{"l": [{}, {"a": 1}]}'


def test_years_of_more_than_four_digits():
    """Arrow cut their texts at places of other years: 10000-01-0T 00:00:0."""
    column = pa.array([253402300800000000, -62135596800000001], pa.int64())
    batch = pa.record_batch([column.cast(pa.timestamp("us", "UTC"))], ["t"])
    assert bytes(json_lines(batch)).decode().splitlines() == [
        '{"t": "10000-01-01T00:00:00+00:00"}',
        '{"t": "0000-12-31T23:59:59.999999+00:00"}',
    ]


def test_json_of_no_columns_has_a_line_for_each_row():
    batch = pa.record_batch([pa.nulls(2)], names=["none"]).select([])
    assert json_lines(batch) == b"{}\n{}\n"
