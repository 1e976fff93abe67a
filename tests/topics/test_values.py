"""Typed values as topics see them: any batch comes back, and what does not fit is named."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.test_row_layout import VALUES
from txnkv.errors import CorruptionError, SchemaError
from txnkv.topics.messages.values import value_codec
from txnkv.topics.topic_catalog import TopicOptions

TYPES = [kind for kind in VALUES if not (pa.types.is_struct(kind) or pa.types.is_map(kind))]
SCHEMA = pa.schema([pa.field("id", pa.int64(), False), ("note", pa.string())])


@st.composite
def typed_batches(draw, max_rows=6):
    """A batch of any value schema, tombstones among its rows."""
    kinds = draw(st.lists(st.sampled_from(TYPES), min_size=1, max_size=10))
    fields = [pa.field(f"c{i}", kind, draw(st.booleans())) for i, kind in enumerate(kinds)]
    row = st.tuples(*(VALUES[f.type] | st.none() if f.nullable else VALUES[f.type] for f in fields))
    rows = draw(st.lists(row | st.just((None,) * len(fields)), max_size=max_rows))
    arrays = [pa.array([row[i] for row in rows], f.type) for i, f in enumerate(fields)]
    loose = pa.schema([f.with_nullable(True) for f in fields])
    return pa.schema(fields), pa.RecordBatch.from_arrays(arrays, schema=loose)


@given(typed_batches(), st.data())
def test_any_batch_comes_back(made, data):
    schema, batch = made
    codec = pickle.loads(pickle.dumps(value_codec(schema)))
    cut = data.draw(st.integers(0, batch.num_rows))
    values = codec.encode(batch.slice(cut))
    assert codec.decode(values) == batch.slice(cut)
    names = data.draw(st.lists(st.sampled_from(schema.names), min_size=1, unique=True))
    assert codec.decode(values, names) == batch.slice(cut).select(names)
    for value, row in zip(values.to_pylist(), batch.slice(cut).to_pylist(), strict=True):
        if value is None:
            assert all(each is None for each in row.values())
        else:
            assert codec.decode_one(value) == row
            assert codec.encode_one(list(row.values())) == value


@given(typed_batches(), st.data())
def test_a_damaged_value_is_a_corruption_or_another_value(made, data):
    schema, batch = made
    codec = value_codec(schema)
    stored = [value for value in codec.encode(batch).to_pylist() if value is not None]
    if not stored:
        return
    value = bytearray(stored[0])
    value[data.draw(st.integers(0, len(value) - 1))] ^= data.draw(st.integers(1, 255))
    value = bytes(value[: data.draw(st.integers(0, len(value)))])
    try:
        found = codec.decode(pa.array([value, None], pa.binary()))
    except CorruptionError:
        return
    found.validate(full=True)
    assert all(found.column(f.name)[0].is_valid or f.nullable for f in schema)


def test_the_catalog_keeps_it():
    options = TopicOptions(
        value_schema=pa.schema([(f"c{i}", kind) for i, kind in enumerate(TYPES)])
    )
    assert TopicOptions.from_json(options.to_json()) == options
    assert "value_schema" not in TopicOptions().to_json()
    assert TopicOptions.from_json(TopicOptions().to_json()) == TopicOptions()


@pytest.mark.parametrize("name", ["key", "Timestamp", "partition", "txn_id", "offset", "HEADERS"])
def test_names_that_every_message_has_are_refused(name):
    with pytest.raises(SchemaError, match="Take another name"):
        TopicOptions(value_schema=pa.schema([(name, pa.int64())]))


def test_other_schemas_that_cannot_be_are_refused():
    for schema, said in [
        (pa.schema([]), "at least one column"),
        (pa.schema([("a", pa.int64()), ("a", pa.int64())]), "more than once"),
        (pa.schema([("a", pa.duration("s"))]), "duration"),
        (pa.schema([("a", pa.struct([("x", pa.int8())]))]), "cannot be struct<x: int8>; json"),
        (pa.schema([("a", pa.list_(pa.map_(pa.string(), pa.int8())))]), "json holds"),
        (pa.schema([("a", pa.large_string())]), "large_string"),
    ]:
        with pytest.raises(SchemaError, match=said):
            TopicOptions(value_schema=schema)


def test_data_is_cast_where_nothing_is_lost():
    codec = value_codec(SCHEMA)
    batch = pa.record_batch(
        {"note": pa.array(["a", None]).dictionary_encode(), "id": pa.array([1, 2], pa.int8())}
    )
    assert codec.decode(codec.encode(batch)).to_pylist() == [
        {"id": 1, "note": "a"},
        {"id": 2, "note": None},
    ]
    assert codec.decode(codec.encode(pa.record_batch({"id": [7]}))).to_pylist() == [
        {"id": 7, "note": None}
    ]


def test_data_that_does_not_fit_is_named():
    codec = value_codec(SCHEMA)
    for columns, said in [
        ({"id": [1], "other": [2]}, r"do not have: other; they are \(id int64, note string\?\)"),
        ({"note": ["a"]}, "no column 'id'"),
        ({"id": [1.5]}, "convert it first"),
        ({"id": pa.array([1 << 63], pa.uint64())}, "without loss"),
        ({"id": [1, None], "note": ["a", "b"]}, "'id' is not nullable, and 1 of the 2"),
    ]:
        with pytest.raises(SchemaError, match=said):
            codec.encode(pa.record_batch(columns))


def test_rows_of_nothing_but_nulls_are_no_values():
    codec = value_codec(SCHEMA)
    batch = pa.record_batch({"id": pa.array([None, 1, None]), "note": pa.array([None, None, None])})
    values = codec.encode(batch)
    assert [value is None for value in values.to_pylist()] == [True, False, True]
    assert codec.encode_one((None, None)) is None


def test_what_the_schema_does_not_allow_is_a_corruption():
    codec = value_codec(SCHEMA)
    loose = value_codec(pa.schema([("id", pa.int64()), ("note", pa.binary())]))
    right = codec.encode_one((1, "a"))
    for wrong, said in [
        (loose.encode_one((None, b"a")), "column 'id' is null"),
        (loose.encode_one((1, b"\xff\xfe")), "(?i)utf-?8|another form"),
        (b"", "0 bytes"),
        (right + b"!", "do not add up"),
    ]:
        with pytest.raises(CorruptionError, match=said):
            codec.decode(pa.array([right, wrong], pa.binary()))
        with pytest.raises(CorruptionError, match=said):
            codec.decode_one(wrong)


def test_a_time_that_python_has_not_is_read_as_arrow():
    schema = pa.schema([("at", pa.timestamp("us", "UTC")), ("x", pa.decimal128(5, 2))])
    codec = value_codec(schema)
    late = pa.array([1 << 62]).cast(schema.field("at").type)
    batch = pa.record_batch([late, pa.array([Decimal("1.25")], pa.decimal128(5, 2))], schema=schema)
    values = codec.encode(batch)
    assert codec.decode(values) == batch
    with pytest.raises(ValueError, match="poll_batch"):
        codec.decode_one(values[0].as_py())
    now = datetime.now(UTC)
    assert codec.decode_one(codec.encode_one((now, None))) == {"at": now, "x": None}
