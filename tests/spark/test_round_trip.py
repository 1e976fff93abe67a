"""Every column type, with nulls and extremes, through Spark and back."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from decimal import Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

import txnkv

pytestmark = pytest.mark.spark

UTC = dt.UTC
INT64 = 2**63

VALUES: dict[str, list[Any]] = {
    "bool": [True, False],
    "int8": [-128, 127],
    "int16": [-(2**15), 2**15 - 1],
    "int32": [-(2**31), 2**31 - 1],
    "int64": [-INT64, INT64 - 1],
    "uint8": [0, 255],
    "uint16": [0, 2**16 - 1],
    "uint32": [0, 2**32 - 1],
    "uint64": [0, 2**64 - 1],
    "float32": [-0.5, float("inf")],
    "float64": [-0.0, 1e300],
    "string": ["", "naïve ☃ \0 end"],
    "binary": [b"", b"\0\xff"],
    "date32": [dt.date(1, 1, 1), dt.date(9999, 12, 31)],
    "timestamp[us]": [dt.datetime(1, 1, 1), dt.datetime(2024, 3, 10, 2, 30, 0, 1)],
    "timestamp[us, tz=UTC]": [
        dt.datetime(1969, 12, 31, 23, 59, 59, 999999, UTC),
        dt.datetime(2024, 3, 10, 7, 30, tzinfo=UTC),
    ],
    "timestamp[us, tz=Europe/Paris]": [
        dt.datetime(2024, 10, 27, 0, 30, tzinfo=UTC),
        dt.datetime(2024, 10, 27, 1, 30, tzinfo=UTC),
    ],
    "decimal128(38, 10)": [Decimal("-1E-10"), Decimal("9" * 28 + "." + "9" * 10)],
    "list<int32>": [[], [1, None, -1]],
    "list<string>": [["a", None], [""]],
    "list<uint64>": [[2**64 - 1, None], []],
    "list<list<float64>>": [[[1.5], None, []], []],
    "time64[us]": [dt.time(0), dt.time(23, 59, 59, 999999)],
    "time32[s]": [dt.time(0), dt.time(23, 59, 59)],
    "duration[us]": [dt.timedelta(days=-3, microseconds=1), dt.timedelta(0)],
    "map<string, int64>": [[("a", 1), ("b", None)], []],
    "struct<a: int32, b: list<string>>": [{"a": 1, "b": ["x", None]}, {"a": None, "b": None}],
    "map<string, uint64>": [[("a", 2**64 - 1), ("b", None)], []],
    "struct<a: uint64, b: struct<c: list<uint64>>>": [
        {"a": 2**64 - 1, "b": {"c": [2**63]}},
        {"a": None, "b": None},
    ],
    "json": ['{"a": [1.10]}', "null"],
    "uuid": [UUID(int=7), UUID("0190a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a5b")],
}


def every_type() -> txnkv.Schema:
    columns = {kind: f"{kind}?" for kind in VALUES}
    return txnkv.Schema({"id": "int64"} | columns, primary_key=["id"])


def table_of_values(schema: txnkv.Schema) -> pa.Table:
    """The values of each type in two rows, and a row of nulls."""
    columns = {kind: pa.array([*v, None], schema.columns[kind].type) for kind, v in VALUES.items()}
    return pa.table({"id": [1, 2, 3]} | columns, schema=schema.arrow)


def test_every_type_comes_back_as_it_went(
    client: txnkv.Client, load: Callable[..., Any], save: Callable[..., None]
) -> None:
    schema = every_type()
    there = client.create_table("there", schema)
    back = client.create_table("back", schema)
    with client.transaction() as txn:
        txn.write(there, table_of_values(schema))

    save(load(table="there"), table="back")

    expected = there.scan(ordered=True).to_arrow()
    assert expected.num_rows == 3
    assert back.scan(ordered=True).to_arrow().equals(expected)


def test_spark_sees_the_values(client: txnkv.Client, load: Callable[..., Any]) -> None:
    schema = every_type()
    with client.transaction() as txn:
        txn.write(client.create_table("there", schema), table_of_values(schema))

    frame = load(table="there").orderBy("id")
    first, second, third = (row.asDict() for row in frame.collect())

    other = ("tz=", "map<", "struct<", "uuid")
    plain = [kind for kind in VALUES if not any(part in kind for part in other)]
    assert first["map<string, int64>"] == {"a": 1, "b": None}
    assert first["struct<a: int32, b: list<string>>"].asDict() == {"a": 1, "b": ["x", None]}
    assert first["uuid"] == str(VALUES["uuid"][0])
    assert {kind: first[kind] for kind in plain} == {kind: VALUES[kind][0] for kind in plain}
    assert {kind: second[kind] for kind in plain} == {kind: VALUES[kind][1] for kind in plain}
    assert {third[kind] for kind in VALUES} == {None}
    zoned = [kind for kind in VALUES if "tz=" in kind]
    for kind in zoned:  # collect() gives local times of the Python driver
        assert second[kind].astimezone(UTC) == VALUES[kind][1]
    assert not frame.schema["id"].nullable
    assert frame.schema["string"].nullable


def test_columns_go_by_name_and_widen(
    client: txnkv.Client, spark: Any, save: Callable[..., None]
) -> None:
    wide = txnkv.Schema(
        {"k": "string", "n": "int64", "x": "float64?", "made": txnkv.Column("int32", default=7)},
        primary_key=["k", "n"],
    )
    client.create_table("wide", wide)
    save(spark.sql("SELECT float(0.5) AS x, smallint(3) AS n, 'a' AS k"), table="wide")

    assert client.table("wide").scan().to_arrow().to_pylist() == [
        {"k": "a", "n": 3, "x": 0.5, "made": 7}
    ]


def test_a_wide_string_batch_is_read_whole(
    client: txnkv.Client, load: Callable[..., Any], save: Callable[..., None], spark: Any
) -> None:
    """More rows than one Arrow batch of Spark's, and more than one block of the table's."""
    client.create_table("big", txnkv.Schema({"id": "int64", "v": "string"}, primary_key=["id"]))
    save(spark.range(150_000).selectExpr("id", "repeat('x', int(id % 50)) AS v"), table="big")

    found = load(table="big").selectExpr("count(*)", "sum(id)", "sum(length(v))").first()
    assert tuple(found) == (150_000, 150_000 * 149_999 // 2, 3000 * sum(range(50)))
