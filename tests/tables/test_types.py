"""Values of every type, from rows and from Arrow, in memory, in row sets and after an alter: what
goes in comes out, and what does not fit is refused with the reason.
"""

from __future__ import annotations

import json
import math
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any
from uuid import UUID

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import txnkv
from tests import internals
from txnkv import core

ID = UUID("0190a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a5b")
STRUCT = "struct<name: string, seen: timestamp[us], tags: list<string>>"

# A type, what is given, and what comes back.
VALUES: list[tuple[str, Any, Any]] = [
    ("json", '{"a": [1, 2.50]}', '{"a": [1, 2.50]}'),
    ("json", '"text"', '"text"'),
    ("json", {"a": [1, None], "é": True}, '{"a":[1,null],"é":true}'),
    ("json", 17, "17"),
    ("json", {1: 1, "1": 2}, '{"1":1,"1":2}'),
    ("uuid", ID, ID),
    ("uuid", str(ID), ID),
    ("uuid", ID.bytes, ID),
    ("time", time(12, 30, 0, 1), time(12, 30, 0, 1)),
    ("time32[s]", time(23, 59, 59), time(23, 59, 59)),
    ("time32[ms]", time(0, 0, 0, 5000), time(0, 0, 0, 5000)),
    ("duration", timedelta(days=-3, microseconds=1), timedelta(days=-3, microseconds=1)),
    ("duration", 5, timedelta(microseconds=5)),
    ("duration", pd.Timedelta(-5, "us"), timedelta(microseconds=-5)),
    ("date32", 5, date(1970, 1, 6)),
    ("timestamp[us]", 5, datetime(1970, 1, 1, 0, 0, 0, 5)),
    ("timestamp[us]", pd.Timestamp(5000), datetime(1970, 1, 1, 0, 0, 0, 5)),
    ("timestamp[us]", np.datetime64("2026-01-01", "ns"), datetime(2026, 1, 1)),
    ("duration", np.timedelta64(5000, "ns"), timedelta(microseconds=5)),
    ("binary", bytearray(b"q"), b"q"),
    ("decimal128(9, 2)", "12.50", Decimal("12.50")),
    ("decimal128(9, 2)", 12, Decimal("12.00")),
    ("list<decimal128(9, 2)>", [Decimal("1.5"), None], [Decimal("1.50"), None]),
    ("map<string, int64>", {"a": 1, "b": None}, [("a", 1), ("b", None)]),
    ("map<string, list<int8>>", [("a", [1])], [("a", [1])]),
    (
        STRUCT,
        {"name": "n", "tags": ["t", None]},
        {"name": "n", "seen": None, "tags": ["t", None]},
    ),
    ("list<struct<x: int64>>", [{"x": 1}, None], [{"x": 1}, None]),
]


@pytest.mark.parametrize(("kind", "given", "wanted"), VALUES)
@pytest.mark.parametrize("flushed", [False, True])
def test_a_value_comes_back(
    client: txnkv.Client, kind: str, given: Any, wanted: Any, flushed: bool
) -> None:
    table = client.create_table("t", txnkv.Schema({"id": "int64", "v": kind + "?"}, ["id"]))
    for id, value in ((1, given), (2, None), (3, given)):
        table.insert({"id": id, "v": value})
    if flushed:
        internals.flush(client)
    assert [row["v"] for row in table.scan(ordered=True)] == [wanted, None, wanted]
    assert table.get(1) == {"id": 1, "v": wanted}
    assert table.get_many([1, 2])["v"].to_pylist() == [wanted, None]
    assert table.scan(where=[("v", "is null")]).to_arrow()["id"].to_pylist() == [2]
    made = table.scan(ordered=True).to_arrow()
    assert made.schema.field("v").type == core.parse_type(kind)
    copy = client.create_table("copy", table.schema)
    with client.transaction() as txn:
        txn.write(copy, made)
    assert copy.scan(ordered=True).to_arrow() == made
    # As the default of a new column, over rows in memory and in row sets.
    altered = client.create_table("old", txnkv.Schema({"id": "int64"}, ["id"]))
    altered.insert({"id": 1})
    internals.flush(client)
    altered.insert({"id": 2})
    altered.alter(add={"v": txnkv.Column(kind, default=given)})
    altered.insert({"id": 3})
    assert altered.get_many([3, 1, 2])["v"].to_pylist() == [wanted] * 3
    assert altered.scan().to_arrow()["v"].to_pylist() == [wanted] * 3


REFUSED: list[tuple[str, Any, str]] = [
    ("date32", np.float32(1.5), "is a float32"),
    ("date32", np.True_, "is a bool"),
    ("float64", np.uint64(2**64 - 1), "is too large"),
    ("date32", 1.9, "1.9 is a float"),
    ("date32", -2.0, "-2.0 is a float"),
    ("date32", Decimal("1.5"), "is a Decimal"),
    # Arrow makes zeros of some, and of others it ends the process.
    ("decimal128(9, 2)", Decimal("1E-999999999"), "more than 38 digits"),
    ("decimal128(9, 2)", Decimal("-1E-77"), "more than 38 digits"),
    ("decimal128(9, 2)", Decimal("0E-999999999"), "more than 38 digits"),
    ("decimal128(9, 2)", Decimal("1." + 100 * "0" + "1"), "more than 38 digits"),
    ("decimal128(9, 2)", Decimal(10**90), "data loss"),
    ("decimal128(9, 2)", "1E-999999999", "more than 38 digits"),
    ("list<decimal128(9, 2)>", [Decimal("1E-999999999")], "more than 38 digits"),
    ("date32", np.timedelta64(5, "ns"), "is a timedelta64"),
    ("timestamp[us]", 1.9, "1.9 is a float"),
    ("timestamp[us]", date(2026, 1, 1), "is a date: give a datetime"),
    ("timestamp[us, tz=UTC]", "2026-01-01", "is a str: give a datetime"),
    ("timestamp[us]", np.datetime64("NaT", "us"), "is a datetime64"),
    ("timestamp[us, tz=UTC]", 5.0, "5.0 is a float"),
    ("timestamp[us]", pd.Timestamp("2026-01-01 00:00:00.000000001"), "has more digits"),
    ("timestamp[us, tz=UTC]", pd.Timestamp(1, tz="UTC"), "has more digits"),
    ("duration", 1.9, "1.9 is a float"),
    ("duration", Fraction(1, 2), "is a Fraction"),
    ("duration", ID, "is a UUID"),
    ("duration", pd.Timedelta(5, "ns"), "has more digits"),
    ("duration", np.timedelta64("NaT", "us"), "is a timedelta64"),
    ("duration", pd.NaT, "NaT is no time: give None"),
    ("timestamp[us]", pd.NaT, "NaT is no time: give None"),
    ("timestamp[us, tz=UTC]", pd.NaT, "NaT is no time: give None"),
    ("date32", pd.NaT, "NaT is no time: give None"),
    ("date32", "2026-01-01", "'2026-01-01' is a str: give a date"),
    ("timestamp[us]", "2026-01-01", "'2026-01-01' is a str: give a date"),
    ("timestamp[us]", np.datetime64(1, "ns"), "timestamp"),
    ("list<date32>", [1.9], "1.9 is a float"),
    ("struct<a: timestamp[us]>", {"a": 0.5}, "0.5 is a float"),
    ("map<string, duration[us]>", {"a": 0.5}, "0.5 is a float"),
    ("string", bytearray(b"q"), "is a bytearray"),
    ("string", memoryview(b"q"), "is a memoryview"),
    ("string", 5, "column 'v' is string: 5 is a int"),
    ("binary", 5, "column 'v' is binary: 5 is a int"),
    ("list<string>", ["x", 5], "5 is a int"),
    ("list<string>", "abc", "'abc' is a str"),
    ("list<int64>", b"abc", "b'abc' is a bytes"),
    ("list<float32>", bytearray(b"abc"), "is a bytearray"),
    ("list<list<string>>", ["abc"], "'abc' is a str"),
    ("map<string, list<string>>", {"a": "bc"}, "'bc' is a str"),
    ("list<string>", [bytearray(b"q")], "is a bytearray"),
    ("list<float32>", [1.0, np.uint64(2**63)], "is too large"),
    ("list<float64>", np.array([1, 2**64 - 1], np.uint64), "is too large"),
    ("struct<a: float64>", {"a": np.uint64(2**64 - 1)}, "is too large"),
    ("map<string, float64>", {"a": np.uint64(2**64 - 1)}, "is too large"),
    ("json", "{'a': 1}", "{'a': 1}\" is no JSON: at character 1, \"'a': 1}\""),
    ("json", "[1", "'[1' is no JSON: it ends too early"),
    ("json", "é x", "at character 0, 'é x'"),
    ("json", float("nan"), "column 'v' is json: Out of range float values"),
    ("json", [float("inf")], "column 'v' is json: Out of range float values"),
    ("json", {"a": "\ud800"}, "column 'v' is json: 'utf-8' codec can't encode character"),
    ("json", {1, 2}, "column 'v' is json: Object of type set"),
    ("json", b"{}", "b'{}' is a bytes"),
    ("uuid", "0190", "column 'v' is uuid: badly formed"),
    ("uuid", 5, "5 is a int: give a uuid.UUID, its text or bytes"),
    ("time", time(1, tzinfo=UTC), "has a time zone, which would be lost"),
    ("time32[s]", time(1, 0, 0, 5), "has more digits, which would be lost"),
    ("time", 5, "5 is a int, not a datetime.time"),
    ("duration", timedelta.max, "column 'v' is duration[us]"),
    ("decimal128(9, 2)", "1,5", "'1,5' is no number"),
    ("decimal128(9, 2)", 12.5, "12.5 is a float, whose digits are not those that one sees"),
    ("decimal128(9, 2)", "1.234", "column 'v' is decimal128(9, 2)"),
    ("decimal128(9, 2)", "twelve", "column 'v' is decimal128(9, 2)"),
    ("decimal128(9, 2)", True, "True is a bool"),
    ("struct<a: int64>", {"a": 1, "b": 2}, "has 'b'; the fields are a"),
    ("struct<a: int64>", [1], "[1] is a list, not a dict of its fields"),
    ("struct<a: timestamp[us]>", {"a": datetime(2026, 1, 1, tzinfo=UTC)}, "has a time zone"),
    ("map<string, int64>", 5, "5 is no dict, and no list of pairs"),
    ("map<string, int8>", {"a": True}, "True is a bool"),
    ("float32", 1e300, "column 'v' is float: 1e+300 is too large for a float32"),
    ("float32", np.float64(-1e39), "-1e+39 is too large for a float32"),
    ("list<float32>", [-math.inf, *[1.0] * 70, 1e300], "1e+300 is too large for a float32"),
    ("list<list<float32>>", [[0.5], np.array([1e300])], "1e+300 is too large for a float32"),
    ("map<string, float32>", {"a": 1e300}, "1e+300 is too large for a float32"),
    ("struct<a: float32, b: float64>", {"a": 1e39, "b": 1e300}, " is too large for a float32"),
]


@pytest.mark.parametrize(("kind", "value", "words"), REFUSED)
def test_a_value_that_does_not_fit(client: txnkv.Client, kind: str, value: Any, words: str) -> None:
    table = client.create_table("t", txnkv.Schema({"id": "int64", "v": kind}, ["id"]))
    with pytest.raises(txnkv.SchemaError) as raised:
        table.insert((1, value))
    assert words in str(raised.value)
    assert table.count() == 0


def test_a_null_of_arrow_is_one(client: txnkv.Client) -> None:
    """A column that is not nullable took it, and it was there."""
    types = {"k": "int64", "s": "string", "n": "int64?"}
    table = client.create_table("t", txnkv.Schema(types, ["k"]))
    client.create_index(table, "n")
    number, text = pa.scalar(None, pa.int64()), pa.scalar(None, pa.string())
    table.insert((1, "a", number))
    assert table.get(1) == {"k": 1, "s": "a", "n": None}
    for op, row in (("insert", (2, text, 1)), ("upsert", (number, "b", 1)), ("delete", number)):
        with pytest.raises(txnkv.SchemaError, match="is not nullable"):
            getattr(table, op)(row)
    with pytest.raises(txnkv.SchemaError, match="is not nullable"):
        client.run(lambda txn: txn.update(table, {"k": 1, "s": text}))
    with pytest.raises(txnkv.SchemaError, match="compare with None by 'is null'"):
        table.count([("n", "=", number)])
    assert table.count([("n", "in", [number, 1])]) == 0
    assert table.get_by("n", number) == []


def test_the_ends_of_float32(client: txnkv.Client) -> None:
    """What is infinite stays so; what rounds to the largest number is that."""
    schema = {"k": "float32", "v": "struct<a: float32, b: float64>?", "m": "map<int8, float32>?"}
    table = client.create_table("t", txnkv.Schema(schema, ["k"]))
    table.insert((math.inf, {"a": -math.inf, "b": 1e300}, {1: math.inf, 2: math.nan}))
    assert table.get(math.inf)["v"] == {"a": -math.inf, "b": 1e300}
    table.insert((3.4028235e38, None, None))
    assert table.get(3.4028234663852886e38) is not None
    for key in (3.4028236e38, -1e300):
        with pytest.raises(txnkv.SchemaError, match="too large for a float32"):
            table.insert((key, None, None))
        with pytest.raises(txnkv.SchemaError, match="too large for a float32"):
            table.get(key)
    with pytest.raises(txnkv.SchemaError, match="too large for a float32"):
        client.create_table(
            "d", txnkv.Schema({"k": "int8", "v": txnkv.Column("float32", default=1e39)}, ["k"])
        )


ARROW: list[tuple[str, pa.Array, Any]] = [
    ("json", pa.array(['{"a": 1}', None]), ['{"a": 1}', None]),
    ("uuid", pa.array([str(ID), None, ID.hex.upper()]), [ID, None, ID]),
    ("uuid", pa.array([str(ID), str(ID)]).slice(1), [ID]),
    ("uuid", pa.array([ID.bytes], pa.binary(16)), [ID]),
    ("time", pa.array([1_000_000], pa.time64("ns")), [time(0, 0, 0, 1000)]),
    ("time", pa.array([61], pa.time32("s")), [time(0, 1, 1)]),
    ("duration", pa.array([5, None], pa.duration("s")), [timedelta(seconds=5), None]),
    ("decimal128(9, 2)", pa.array(["1.5", "2"]), [Decimal("1.50"), Decimal("2.00")]),
    ("decimal128(9, 2)", pa.array([7], pa.int64()), [Decimal("7.00")]),
    ("struct<a: int64, b: string>", pa.array([{"a": 1}]), [{"a": 1, "b": None}]),
    ("struct<a: float64>", pa.array([{"a": 1}, None]), [{"a": 1.0}, None]),
    (
        "map<string, int64>",
        pa.array([[("a", 1)]], pa.map_(pa.large_string(), pa.int8())),
        [[("a", 1)]],
    ),
]


@pytest.mark.parametrize(("kind", "array", "wanted"), ARROW)
def test_arrow_data_of_other_types(
    client: txnkv.Client, kind: str, array: pa.Array, wanted: list[Any]
) -> None:
    table = client.create_table("t", txnkv.Schema({"id": "int64", "v": kind + "?"}, ["id"]))
    with client.transaction() as txn:
        txn.write(table, pa.table({"id": range(len(array)), "v": array}))
    assert table.scan(ordered=True).to_arrow()["v"].to_pylist() == wanted


ARROW_REFUSED: list[tuple[str, pa.Array, str]] = [
    ("json", pa.array(["1", None, "{"]), "column 'v' is json: '{' is no JSON: it ends too early"),
    ("json", pa.array(["1", "x"], pa.json_()), "'x' is no JSON: at character 0, 'x'"),
    ("json", pa.array([{"a": 1}]), "make a text of each value, as json.dumps(value)"),
    ("uuid", pa.array([str(ID), "none"]), "column 'v' is uuid: 'none' is none"),
    ("uuid", pa.array([5]), "column 'v' is uuid, the data has int64"),
    ("time", pa.array([1], pa.time64("ns")), "does not fit without loss"),
    ("time", pa.array([86_400_000_000], pa.time64("us")), "a value is no time of a day"),
    ("time32[s]", pa.array([-1], pa.time32("s")), "a value is no time of a day"),
    ("decimal128(9, 2)", pa.array(["1.555"]), "does not fit without loss"),
    ("decimal128(9, 2)", pa.array(["1", "1E-999999999"]), "more than 38 digits"),
    ("decimal128(9, 2)", pa.array([None, " -1e-77"]), "more than 38 digits"),
    ("decimal128(9, 2)", pa.array([1.5]), "column 'v' is decimal128(9, 2), the data has double"),
    ("struct<a: int64>", pa.array([{"a": 1, "b": 2}]), "the data has struct<a: int64, b: int64>"),
    ("struct<a: int64>", pa.array([{"a": 1.5}]), "the data has struct<a: double>"),
    ("map<string, int64>", pa.array([{"a": 1}]), "the data has struct<a: int64>"),
]


@pytest.mark.parametrize(("kind", "array", "words"), ARROW_REFUSED)
def test_arrow_data_that_does_not_fit(
    client: txnkv.Client, kind: str, array: pa.Array, words: str
) -> None:
    table = client.create_table("t", txnkv.Schema({"id": "int64", "v": kind + "?"}, ["id"]))
    with pytest.raises(txnkv.SchemaError) as raised, client.transaction() as txn:
        txn.write(table, pa.table({"id": range(len(array)), "v": array}))
    assert words in str(raised.value)
    assert table.count() == 0


@pytest.mark.parametrize("kind", ["json", "list<int64>", "map<string, int64>", "struct<a: int64>"])
def test_what_has_no_order_is_no_key_and_is_not_compared(client: txnkv.Client, kind: str) -> None:
    with pytest.raises(txnkv.SchemaError, match="which cannot be a key: its values have no order"):
        txnkv.Schema({"id": kind}, ["id"])
    table = client.create_table("t", txnkv.Schema({"id": "int64", "v": kind + "?"}, ["id"]))
    value: Any = {"json": "1", "list<int64>": [1], "map<string, int64>": {}}.get(kind, {"a": 1})
    for op, constant in (("=", value), ("in", [value]), ("in", [])):
        with pytest.raises(txnkv.SchemaError, match="only 'is null' and 'is not null' work on it"):
            table.scan(where=[("v", op, constant)])
    assert table.scan(where=[("id", "in", [])]).to_arrow().num_rows == 0


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("list<uuid>", "uuid stands in a column of its own"),
        ("struct<a: json>", "write string there"),
        ("struct<int64>", "struct<name: string, age: int64> with a name for each field"),
        ("struct<a: int64, a: int8>", "with a name for each field"),
        ("map<string>", "map<string, int64>"),
        ("map<string, int65>", "'int65' is not a column type"),
        (pa.struct([("a, b: int64", pa.int8())]), "the names of its fields"),
        (pa.binary(16), "not a column type"),
        (dict, "write 'json'"),
        (UUID, "write 'uuid'"),
    ],
)
def test_types_that_are_none(kind: Any, words: str) -> None:
    with pytest.raises(txnkv.SchemaError) as raised:
        txnkv.Schema({"id": "int64", "v": kind}, ["id"])
    assert words in str(raised.value)


def test_a_schema_is_what_it_was_when_it_is_read_again() -> None:
    kinds = ["json", "uuid", "time", "time32[s]", "duration", "map<string, list<int8>>", STRUCT]
    columns = {f"c{i}": kind for i, kind in enumerate(kinds)}
    schema = txnkv.Schema({"id": "uuid", **columns}, ["id"])
    assert txnkv.Schema.from_json(schema.to_json()) == schema
    assert txnkv.Schema.from_arrow(schema.arrow, ["id"]) == schema
    assert "'c0': 'json'" in repr(schema)


JSONS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(JSONS, max_size=5), st.booleans(), st.sampled_from([None, 2]), st.data())
def test_texts_of_json_are_those_that_python_reads(
    values: list[Any], plain: bool, indent: int | None, data: st.DataObject
) -> None:
    """Of Python's `json` but for its NaN and infinities, and half a surrogate pair."""
    texts = [json.dumps(value, ensure_ascii=not plain, indent=indent) for value in values]
    texts = [text for text in texts if text.isprintable() or not plain]
    core.require_json(pa.array([*texts, None], pa.string()), "v")
    for text in texts:
        at = data.draw(st.integers(0, len(text)))
        changed = text[:at] + data.draw(st.sampled_from(["", ",", "}", '"', "1", "\\", "e"]))
        changed += text[data.draw(st.integers(at, len(text))) :]
        try:
            json.loads(changed, parse_constant=int)
            sound = True
        except ValueError:
            sound = False
        try:
            core.require_json(pa.array([changed]), "v")
            assert sound, changed
        except txnkv.SchemaError:
            assert not sound, changed


@given(st.timedeltas())
def test_a_duration_is_read_as_it_is_written(value: timedelta) -> None:
    assert core.duration_of(core.duration_text(value)) == value


@pytest.mark.parametrize(
    ("text", "micros"),
    [("PT0S", 0), ("P1D", 86_400_000_000), ("-PT0.5S", -500_000), ("P1DT2H3M4.000005S", None)],
)
def test_durations_as_text(text: str, micros: int | None) -> None:
    found = core.duration_of(text)
    assert core.duration_text(found) == text
    wanted = timedelta(days=1, hours=2, minutes=3, seconds=4, microseconds=5)
    assert found == (wanted if micros is None else timedelta(microseconds=micros))
    for wrong in ("", "P", "PT", "1D", "P1H", "PT1.0000001S", "P1Y"):
        with pytest.raises(ValueError, match="is no duration, as P1DT2H"):
            core.duration_of(wrong)


@pytest.mark.parametrize(
    ("kind", "number", "shown"),
    [("date32", 2**31 - 1, "date32"), ("timestamp[us, tz=UTC]", -(2**62), "timestamp")],
)
def test_times_that_python_has_not(
    client: txnkv.Client, kind: str, number: int, shown: str
) -> None:
    """They are read as Arrow; a row in Python is refused with the way to read it, and a key is
    named by its number.
    """
    schema = txnkv.Schema({"id": kind, "v": kind + "?"}, primary_key=["id"])
    table, of_schema = client.create_table("t", schema), schema.arrow
    raw = pa.array([number], pa.int32() if kind == "date32" else pa.int64())
    data = pa.table([raw.cast(field.type) for field in of_schema], schema=of_schema)
    with client.transaction() as txn:
        txn.write(table, data)
    assert table.scan().to_arrow() == data
    assert table.get_many([number]).columns == data.columns
    with pytest.raises(OverflowError, match=f"{shown}.* {number} is outside .* read it as Arrow"):
        table.get(number)
    with pytest.raises(OverflowError, match="read it as Arrow"):
        list(table.scan())
    with (
        pytest.raises(txnkv.RowErrors, match=f"key {number}: ") as refused,
        client.transaction() as t,
    ):
        t.write(table, data)
    assert refused.value.errors[0].key == number
    table.delete(number)
    assert table.count() == 0


def test_times_that_python_has_not_in_rows_of_a_former_schema(client: txnkv.Client) -> None:
    """Such a row could neither be changed nor deleted before the next flush."""
    types = {"id": "int64", "at": "timestamp[us, tz=UTC]?", "day": "date32?", "n": "int32?"}
    table = client.create_table("t", txnkv.Schema(types, primary_key=["id"]))
    for key in (1, 2):
        table.upsert({"id": key, "at": 2**62, "day": 2**31 - 1, "n": 1})
    table.alter(add={"more": "date32?"}, widen={"n": "int64"})
    table.update({"id": 1, "n": 2**40})
    table.delete(2)
    found = table.scan().to_arrow()
    assert found["at"].cast(pa.int64()).to_pylist() == [2**62]
    assert found["day"].cast(pa.int32()).to_pylist() == [2**31 - 1]
    assert found["n"].to_pylist() == [2**40]


def test_time_zones_are_looked_up_when_a_column_is_made(client: txnkv.Client) -> None:
    """One that is none was taken, and nothing of its table was to be had, nor `stats`."""
    types = {"id": "timestamp[us, tz=+05:30]", "v": "timestamp[us, tz=-11:00]?"}
    table = client.create_table("t", txnkv.Schema(types, primary_key=["id"]))
    noon = datetime(2026, 1, 2, 12, tzinfo=UTC)
    table.insert({"id": noon, "v": noon})
    assert table.get(noon) == {"id": noon, "v": noon}
    assert list(table.scan()) == [{"id": noon, "v": noon}]
    found = table.get(noon)
    assert found is not None
    assert (found["id"].hour, found["v"].hour) == (17, 1)
    for kind in ("timestamp[us, tz=No/Where]", "list<timestamp[us, tz=No/Where]>"):
        with pytest.raises(txnkv.SchemaError, match="there is no time zone 'No/Where'"):
            client.create_table("u", txnkv.Schema({"id": "int64", "v": kind + "?"}, ["id"]))
        with pytest.raises(txnkv.SchemaError, match="there is no time zone 'No/Where'"):
            table.alter(add={"w": kind + "?"})
    with pytest.raises(txnkv.SchemaError, match="there is no time zone 'No/Where'"):
        client.create_topic("e", value_schema={"v": "timestamp[us, tz=No/Where]"})
    assert client.tables() == ["t"]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("list<timestamp[us]>", np.array(["2026-01-02"], "M8[D]")),
        ("list<duration[us]>", np.array([1, 5], "m8[s]")),
        ("list<date32>", np.array([5], "M8[ns]")),
        ("list<list<duration[us]>>", [np.array([1], "m8[s]")]),
        ("date32", np.datetime64(5, "ns")),
        ("date32", np.complex128(3 + 2j)),
        ("timestamp[us]", np.array(["2026-01-02", "2026-01-03"], "M8[us]")),
        ("duration[us]", np.array([1, 2], "m8[us]")),
    ],
)
def test_times_of_numpy_that_would_be_others(client: txnkv.Client, kind: str, value: Any) -> None:
    """They were stored as other times, or raised an error of numpy's."""
    table = client.create_table("t", txnkv.Schema({"id": "int64", "v": kind + "?"}, ["id"]))
    with pytest.raises(txnkv.SchemaError, match="column 'v'"):
        table.upsert({"id": 1, "v": value})


def test_a_time_of_numpy_that_python_has_not_is_written(client: txnkv.Client) -> None:
    """A session that had one could write nothing any more."""
    table = client.create_table("t", txnkv.Schema({"id": "int64", "v": "timestamp[us]"}, ["id"]))
    with client.new_session() as session:
        session.upsert(table, (1, np.datetime64("30000-01-01", "us")))
        session.upsert(table, (2, pa.scalar(2**62, pa.timestamp("us"))))
    found = table.scan(ordered=True).to_arrow()["v"].cast(pa.int64()).to_pylist()
    assert found == [884541340800000000, 2**62]
