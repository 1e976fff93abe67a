"""Reads: one snapshot, projections, a transaction's own rows, filters pushed down."""

from __future__ import annotations

import datetime as dt
import shutil
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import txnkv
import txnkv.spark

from .conftest import SCHEMA

pytestmark = pytest.mark.spark


def write(client: txnkv.Client, *ids: int) -> txnkv.Timestamp:
    with client.transaction() as txn:
        for id in ids:
            txn.insert("t", {"id": id, "v": f"v{id}"})
    return txn.commit()


def test_a_snapshot_can_be_named(client: txnkv.Client, load: Callable[..., Any]) -> None:
    first = write(client, 1, 2)
    write(client, 3)

    assert load(snapshot=str(first)).count() == 2
    assert load().count() == 3
    assert load(snapshot=first.datetime.isoformat(), columns="id").count() <= 2


def test_columns_are_projected_in_their_order(
    client: txnkv.Client, load: Callable[..., Any]
) -> None:
    write(client, 1)
    assert load(columns="v, id").collect() == [("v1", 1)]
    assert load(columns="v").columns == ["v"]


def test_an_empty_table(load: Callable[..., Any]) -> None:
    assert load().collect() == []


def test_there_is_work_for_every_core(
    client: txnkv.Client, spark: Any, load: Callable[..., Any]
) -> None:
    data = pa.table({"id": range(300_000), "v": ["x"] * 300_000})
    with client.transaction() as txn:
        txn.write("t", data)

    frame = load()
    assert frame.rdd.getNumPartitions() >= spark.sparkContext.defaultParallelism
    assert frame.selectExpr("count(*)", "sum(id)").first() == (300_000, 150_000 * 299_999)


def reader_of(client: txnkv.Client, options: dict[str, str]) -> Any:
    from txnkv.spark.columns import arrow_schema, spark_schema
    from txnkv.spark.reading import TxnkvReader
    from txnkv.spark.settings import Settings

    schema = spark_schema(client.table("t").schema, None)
    return TxnkvReader(Settings.of_read(options), arrow_schema(schema))


def test_every_partition_reads_the_snapshot_of_planning(
    client: txnkv.Client, where: dict[str, str]
) -> None:
    """Rows that come in between planning and the tasks are not read by any task."""
    write(client, *range(100))
    reader = reader_of(client, where)
    parts = reader.partitions()
    write(client, *range(100, 200))

    found = [row["id"] for part in parts for b in reader.read(part) for row in b.to_pylist()]
    assert sorted(found) == list(range(100))


@pytest.mark.usefixtures("clients_are_closed")
@pytest.mark.parametrize("stream", [False, True])
def test_a_read_that_outlasts_the_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr("txnkv.spark.reading._in_stream", lambda: stream)
    advice = r"in a streaming query, .* foreach_batch" if stream else r"load\(\) again.*token"
    with txnkv.connect(tmp_path / "short", history=0.1) as client:
        client.create_table("t", SCHEMA)
        write(client, 1)
        reader = reader_of(client, {"path": client.path, "table": "t"})
        (part,) = reader.partitions()
        client.run(lambda txn: txn.upsert("t", {"id": 1, "v": "new"}))
        time.sleep(0.2)
        client.compact()
        with pytest.raises(txnkv.HistoryExpiredError, match=rf"back to \S+\. .*{advice}"):
            list(reader.read(part))


def test_with_a_token_it_sees_what_the_transaction_sees(
    client: txnkv.Client, load: Callable[..., Any]
) -> None:
    write(client, 1)
    with client.transaction() as txn:
        assert txn.get("t", 1)
        write(client, 2)
        txn.insert("t", {"id": 3, "v": "mine"})
        txn.flush()
        frame = load(**txnkv.spark.options(txn, "t"))
        assert sorted(row.id for row in frame.collect()) == [1, 3]
        assert load().count() == 2
        txn.rollback()


def test_all_tasks_see_one_point_of_their_transaction(
    client: txnkv.Client, load: Callable[..., Any]
) -> None:
    """What the transaction is given after the plan is of later reads."""
    write(client, *range(100))
    with client.transaction() as txn:
        frame = load(**txnkv.spark.options(txn, "t"))
        assert frame.count() == 100
        txn.delete("t", 0)
        txn.insert("t", {"id": 100, "v": "new"})
        txn.update("t", {"id": 1, "v": "new"})
        txn.flush()
        assert frame.where("v = 'new'").count() == 0
        assert frame.count() == 100
        again = load(**txnkv.spark.options(txn, "t"))
        assert sorted(row.id for row in again.where("v = 'new'").collect()) == [1, 100]
        txn.rollback()


def test_a_token_of_an_ended_transaction(client: txnkv.Client, load: Callable[..., Any]) -> None:
    from pyspark.errors import AnalysisException

    with client.transaction() as txn:
        frame = load(**txnkv.spark.options(txn, "t"))
    with pytest.raises(AnalysisException, match=r"InvalidTxnStateError: cannot read.*COMMITTED"):
        frame.collect()


def test_a_store_that_is_made_anew(tmp_path: Path, load: Callable[..., Any]) -> None:
    """Spark's workers live on from the store that was there to the one that is."""
    path = tmp_path / "remade"
    for number in range(1, 4):
        with txnkv.connect(path) as client:
            client.create_table("t", txnkv.Schema({"id": "int64"}, primary_key=["id"]))
            write_ids(client, number)
            assert load(path=str(path)).collect() == [(number,)]
        shutil.rmtree(path)


def write_ids(client: txnkv.Client, *ids: int) -> None:
    with client.transaction() as txn:
        for id in ids:
            txn.insert("t", {"id": id})


# -- filters ---------------------------------------------------------------------------

KINDS = txnkv.Schema(
    {
        "id": "int64",
        "n": "int32?",
        "u": "uint64?",
        "x": "float64?",
        "s": "string?",
        "raw": "binary?",
        "yes": "bool?",
        "day": "date32?",
        "at": "timestamp[us, tz=UTC]?",
        "local": "timestamp[us]?",
        "d": "decimal128(10, 2)?",
    },
    primary_key=["id"],
)
NAN = float("nan")

FILTERS = [
    "id = 7",
    "id > 5 AND id <= 9",
    "id >= 5 AND id < 9",
    "id IN (1, 3, 99)",
    "n IN (1, NULL)",
    "n = 3",
    "n <> 3",
    "n > 2147483647L",
    "n <=> NULL",
    "n IS NULL",
    "n IS NOT NULL AND n < 0",
    "u = 18446744073709551615BD",
    "u > 9223372036854775807BD",
    "u < 1.5BD",
    "day = DATE'1582-10-10'",
    "day > DATE'1582-10-20'",
    "at > TIMESTAMP'1582-10-10 00:00:00Z'",
    "x = 0D",
    "x = -0D",
    "x <= -0D",
    "x >= 0D",
    "x > 2D",
    "x < 2D",
    "x <= 2.5D",
    "x = double('NaN')",
    "x <= double('NaN')",
    "x < double('NaN')",
    "x IN (2.5D, double('NaN'))",
    "x > double('inf')",
    "s = 'b' OR s = 'c'",
    "s > 'b'",
    "s LIKE 'b%'",
    "s IN ('', 'é')",
    "raw = X'00FF'",
    "raw < X'01'",
    "yes",
    "NOT yes",
    "day >= DATE'2024-01-03'",
    "day = DATE'2024-01-02'",
    "at < TIMESTAMP'2024-01-03 00:00:00Z'",
    "at = TIMESTAMP'2024-01-03 00:00:00 Asia/Tokyo'",
    "local >= TIMESTAMP_NTZ'2024-01-02 00:00:00'",
    "d = 1.5BD",
    "d > 2.00BD AND d IN (2.25BD, 3BD)",
    "id > 3 AND length(s) = 1 AND s IS NOT NULL",
]


@pytest.fixture
def pushing(spark: Any) -> Iterator[Callable[[bool], None]]:
    """Turns filter pushdown on and off."""
    name = "spark.sql.python.filterPushdown.enabled"

    def turn(on: bool) -> None:
        spark.conf.set(name, str(on).lower())

    yield turn
    spark.conf.unset(name)


def kinds(client: txnkv.Client) -> None:
    table = client.create_table("kinds", KINDS)
    day, at = dt.date(2024, 1, 1), dt.datetime(2024, 1, 1)
    xs = [0.0, -0.0, 1.0, 2.5, NAN, -1.0, float("inf"), float("-inf"), None, 2.0, NAN, 3.0]
    texts = ["a", "b", "ba", "c", "", None, "é", "B", "b", "z", "bb", "c"]
    with client.transaction() as txn:
        txn.insert(table, {"id": 20, "day": dt.date(1582, 10, 10), "x": None, "s": None})
        txn.insert(table, {"id": 21, "day": dt.date(1582, 10, 20), "x": None, "s": None})
        for id, (x, s) in enumerate(zip(xs, texts, strict=True)):
            some = {
                "n": id - 4,
                "u": [0, 1, 2, 2**63, 2**64 - 1][id % 5],
                "raw": bytes([0, 255])[: id % 3],
                "yes": id % 2 == 0,
                "day": day + dt.timedelta(id),
                "at": (at + dt.timedelta(hours=9 * id)).replace(tzinfo=dt.UTC),
                "local": at + dt.timedelta(hours=9 * id),
                "d": Decimal(id) * Decimal("0.75"),
            }
            txn.insert(table, {"id": id, "x": x, "s": s} | ({} if id == 9 else some))


def test_filters_mean_the_same_pushed_down_or_not(
    client: txnkv.Client, load: Callable[..., Any], pushing: Callable[[bool], None]
) -> None:
    kinds(client)

    # Without pushdown, all in one query: each condition as a column.
    tests = [f"coalesce({condition}, false)" for condition in FILTERS]
    table = load(table="kinds").selectExpr("id", *tests).collect()
    by_spark = {c: sorted(row[0] for row in table if row[i]) for i, c in enumerate(FILTERS, 1)}
    pushing(True)
    by_scan = {}
    for condition in FILTERS:
        frame = load(table="kinds", pushFilters="true").where(condition)
        by_scan[condition] = sorted(row.id for row in frame.collect())
    assert by_scan == by_spark
    assert by_scan["id > 5 AND id <= 9"] == [6, 7, 8, 9]
    assert by_scan["x = 0D"] == [0, 1]


def test_what_is_pushed_down_spark_does_not_do_again(
    client: txnkv.Client, load: Callable[..., Any], pushing: Callable[[bool], None]
) -> None:
    kinds(client)
    pushing(True)

    def plan(condition: str) -> str:
        made = load(table="kinds", pushFilters="true").where(condition)
        return str(made._jdf.queryExecution().executedPlan().toString())

    assert "Filter (" not in plan("id > 5 AND n IN (1, 2) AND s IS NOT NULL AND s <= 'b'")
    assert "Filter (" in plan("x > 2D")


def test_a_data_frame_serves_many_queries(
    client: txnkv.Client, load: Callable[..., Any], pushing: Callable[[bool], None]
) -> None:
    """Spark keeps the plan of a data frame's last pushed filters, and takes it for queries
    that push none, which then would read too little.
    """
    write(client, *range(10))
    pushing(True)
    frame = load()
    assert frame.where("id > 5").count() == 4
    assert frame.count() == 10
    both = frame.where("id < 3").union(frame.where("id = 9")).union(frame)
    assert sorted(row.id for row in both.collect()) == sorted([0, 1, 2, 9, *range(10)])


def test_which_filters_a_scan_takes() -> None:
    from pyspark.sql import datasource as ds

    from txnkv.spark.reading import predicate_of

    assert predicate_of(ds.EqualTo(("id",), 1), KINDS) == ("id", "=", 1)
    assert predicate_of(ds.GreaterThan(("id",), 1), KINDS) == ("id", ">", 1)
    assert predicate_of(ds.GreaterThanOrEqual(("s",), "a"), KINDS) == ("s", ">=", "a")
    assert predicate_of(ds.LessThan(("x",), 1.5), KINDS) == ("x", "<", 1.5)
    assert predicate_of(ds.LessThanOrEqual(("d",), Decimal(1)), KINDS) == ("d", "<=", Decimal(1))
    assert predicate_of(ds.In(("n",), (1, None)), KINDS) == ("n", "in", [1])
    assert predicate_of(ds.IsNull(("n",)), KINDS) == ("n", "is null")
    assert predicate_of(ds.IsNotNull(("n",)), KINDS) == ("n", "is not null")
    assert predicate_of(ds.EqualTo(("u",), Decimal(2**64 - 1)), KINDS) == ("u", "=", 2**64 - 1)
    for left_to_spark in (
        ds.Not(ds.EqualTo(("id",), 1)),
        ds.StringStartsWith(("s",), "a"),
        ds.EqualTo(("id", "nested"), 1),
        ds.EqualTo(("nobody",), 1),
        ds.EqualTo(("u",), Decimal(-1)),
        ds.GreaterThan(("x",), 1.5),
        ds.EqualTo(("x",), 0.0),
        ds.LessThan(("x",), NAN),
        ds.EqualTo(("n",), None),
        ds.EqualTo(("day",), dt.datetime(2024, 1, 1)),
    ):
        assert predicate_of(left_to_spark, KINDS) is None
