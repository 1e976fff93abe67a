"""Mistakes are refused while Spark plans, with a message that says what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import txnkv
import txnkv.spark
from txnkv.spark.settings import Settings

from .changes_tools import close_clients

pytestmark = pytest.mark.spark

PLACE = {"path": "/somewhere", "table": "t"}


def test_options_are_taken() -> None:
    read = Settings.of_read(PLACE | {"columns": "id, v", "SNAPSHOT": "123"})
    assert (read.path, read.table, read.columns) == ("/somewhere", "t", ("id", "v"))
    assert read.snapshot == txnkv.Timestamp(123)
    assert Settings.of_read(PLACE | {"columns": ' ["x,y", " z"]'}).columns == ("x,y", " z")
    dated = Settings.of_read(PLACE | {"snapshot": "2024-01-02T03:04:05+00:00"})
    assert dated.snapshot == datetime(2024, 1, 2, 3, 4, 5, tzinfo=UTC)
    write = Settings.of_write(
        PLACE | {"operation": "insert_ignore", "timeout": "60", "keepalivetime": "2.5"}
    )
    assert (write.operation, write.timeout, write.keepalive_time) == ("insert_ignore", 60.0, 2.5)


def test_a_path_is_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert Settings.of_read({"path": "store", "table": "t"}).path == str(tmp_path / "store")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"table": "t"}, ValueError, "option path is missing"),
        ({"path": "/s"}, ValueError, "option table is missing"),
        (PLACE | {"colums": "id"}, ValueError, "no option 'colums'; its options are path, cred"),
        (
            PLACE | {"operation": "insert"},
            ValueError,
            "a read of a table has no option 'operation'",
        ),
        (PLACE | {"columns": "id,,v"}, ValueError, "names with commas"),
        *(
            (PLACE | {"columns": given}, ValueError, "or a JSON list of them")
            for given in ("", "[]", '["id", ""]', '["id", 1]', '["id"')
        ),
        (PLACE | {"columns": "id,id"}, ValueError, "twice"),
        (PLACE | {"columns": '["id", "id"]'}, ValueError, "twice"),
        (PLACE | {"snapshot": "yesterday"}, ValueError, "ISO 8601"),
        (PLACE | {"token": "x", "snapshot": "1"}, ValueError, "exclude each other"),
        (PLACE | {"appId": "a"}, ValueError, "a read of a table has no option 'appId'"),
        (PLACE | {"credentials": '{"tokn": "x"}'}, ValueError, "ca, cert and key, not tokn"),
        (PLACE | {"pushFilters": "yes"}, ValueError, "option pushFilters: 'true' or 'false'"),
        ({"path": "hdfs://host/t", "table": "t"}, txnkv.NotSupportedError, "address of a server"),
    ],
)
def test_options_of_a_read_are_checked(
    options: dict[str, str], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Settings.of_read(options)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"columns": "id"}, ValueError, "a write into a table has no option 'columns'"),
        ({"operation": "replace"}, ValueError, "'replace' is no operation"),
        ({"timeout": "soon"}, ValueError, ": seconds, from"),
        ({"timeout": "0"}, ValueError, ": seconds, from"),
        ({"keepaliveTime": "nan"}, ValueError, ": seconds, from"),
        ({"keepaliveTime": "0.1"}, ValueError, "option keepaliveTime: at least 0.5 seconds"),
        ({"token": "x", "timeout": "1"}, ValueError, "of its own"),
    ],
)
def test_options_of_a_write_are_checked(
    options: dict[str, str], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Settings.of_write(PLACE | options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"path": "/no/such/store"}, "StoreNotFoundError.*Spark makes no store: txnkv.connect"),
        ({"table": "nobody"}, "TableNotFoundError"),
        ({"columns": "id,nobody"}, "there is no column 'nobody'"),
        ({"snapshot": str(1 << 62)}, "is in the future"),
        ({"token": "forged"}, "InvalidTokenError"),
    ],
)
def test_a_read_is_refused(where: dict[str, str], options: dict[str, str], words: str) -> None:
    source = txnkv.spark.TxnkvDataSource(where | options)
    with pytest.raises((ValueError, txnkv.TxnkvError)) as refused:
        source.reader(source.schema()).partitions()
    close_clients()
    assert re.search(words, repr(refused.value))


def test_columns_and_a_schema_that_say_otherwise(where: dict[str, str]) -> None:
    from pyspark.sql.types import StructType

    source = txnkv.spark.TxnkvDataSource(where | {"columns": "id"})
    source.reader(source.schema())
    with pytest.raises(ValueError, match="option columns names id, and the schema given has v"):
        source.reader(StructType().add("v", "string"))
    close_clients()


def test_times_with_a_zone_and_without(spark: Any, client: txnkv.Client) -> None:
    columns = {"id": "int64", "at": "timestamp[us]?", "when": "timestamp[us, tz=UTC]?"}
    client.create_table("times", txnkv.Schema(columns, primary_key=["id"]))
    source = txnkv.spark.TxnkvDataSource({"path": client.path, "table": "times"})
    for name, given, wanted in (
        ("at", "TIMESTAMP", "TIMESTAMP_NTZ"),
        ("when", "TIMESTAMP_NTZ", "TIMESTAMP"),
    ):
        frame = spark.sql(f"SELECT 1L AS id, CAST(null AS {given}) AS {name}")
        with pytest.raises(txnkv.SchemaError, match=rf"'{name}' .*CAST\(\.\.\. AS {wanted}\)"):
            source.writer(frame.schema, overwrite=False)
    close_clients()


def test_a_read_is_refused_in_planning(load: Callable[..., Any]) -> None:
    from pyspark.errors import AnalysisException

    with pytest.raises(AnalysisException, match="TableNotFoundError"):
        load(table="nobody")
    with pytest.raises(AnalysisException, match="is in the future"):
        load(snapshot=str(1 << 62)).collect()


@pytest.mark.parametrize(
    ("select", "options", "words"),
    [
        ("SELECT 1L AS id, 'a' AS v", {"table": "nobody"}, "TableNotFoundError"),
        ("SELECT 'a' AS v", {"operation": "update"}, "no column 'id', which is of the primary key"),
        ("SELECT 1L AS id, 'a' AS v", {"operation": "replace"}, "'replace' is no operation"),
        ("SELECT 1L AS id, 'a' AS v", {"token": "forged"}, "InvalidTokenError"),
        ("SELECT 1L AS id, 'a' AS v, 2 AS w", {}, "columns that the table does not have: w"),
        ("SELECT 'a' AS v", {}, "no column 'id'"),
        ("SELECT 1L AS id, 1L AS v", {}, "column 'v' is string, the data has int64"),
        ("SELECT 1.5D AS id, 'a' AS v", {}, "column 'id' is int64, the data has double"),
        ("SELECT 1L AS id, named_struct('a', 1) AS v", {}, "column 'v' is string"),
        ("SELECT 1L AS id, interval '1' year AS v", {}, "Spark cannot hand over"),
        ("SELECT 1L AS id, array() AS v", {}, r"'v', array<void>; .* CAST\(v AS array<int>\)"),
    ],
)
def test_a_write_is_refused(
    spark: Any,
    where: dict[str, str],
    client: txnkv.Client,
    select: str,
    options: dict[str, str],
    words: str,
) -> None:
    source = txnkv.spark.TxnkvDataSource(where | options)
    with pytest.raises((ValueError, txnkv.TxnkvError)) as refused:
        source.writer(spark.sql(select).schema, overwrite=False)
    close_clients()
    assert re.search(words, repr(refused.value))
    assert client.transactions() == []


@pytest.mark.parametrize(
    ("select", "options", "words"),
    [
        ("SELECT 1L AS id, 'a' AS v", {"token": "forged"}, "InvalidTokenError"),
        ("SELECT 1L AS id, 1L AS v", {}, "SchemaError: column 'v' is string, the data has int64"),
    ],
)
def test_a_write_is_refused_in_planning(
    spark: Any,
    save: Callable[..., None],
    client: txnkv.Client,
    select: str,
    options: dict[str, str],
    words: str,
) -> None:
    from pyspark.errors import AnalysisException

    with pytest.raises(AnalysisException, match=words):
        save(spark.sql(select), **options)
    assert client.transactions() == []


def test_data_without_columns(where: dict[str, str]) -> None:
    from pyspark.sql.types import StructType

    with pytest.raises(txnkv.SchemaError, match=r"; it has none$"):
        txnkv.spark.TxnkvDataSource(where).writer(StructType([]), overwrite=False)
    close_clients()


def test_a_table_of_sparks_own_is_refused(spark: Any, where: dict[str, str]) -> None:
    """Spark names its options `option.table` and so on, or hands over none."""
    from pyspark.errors import AnalysisException

    options = ", ".join(f"{name} '{value}'" for name, value in where.items())
    with pytest.raises(AnalysisException, match=r"NotSupportedError.* createOrReplaceTempView"):
        spark.sql(f"CREATE TABLE own USING txnkv OPTIONS ({options})")
    with pytest.raises(ValueError, match=r"is missing.*take a temporary view"):
        txnkv.spark.TxnkvDataSource({}).schema()


@pytest.mark.parametrize("op", ["update", "update_ignore", "delete", "delete_ignore"])
def test_overwrite_leaves_nothing_to(op: str) -> None:
    with pytest.raises(ValueError, match=f"mode overwrite leaves no rows to {op}: take mode"):
        Settings.of_write(PLACE | {"operation": op}, overwrite=True)


def test_a_table_is_no_stream(spark: Any, where: dict[str, str], tmp_path: Path) -> None:
    from pyspark.errors import PySparkException

    stream = spark.readStream.format("txnkv").options(**where).load().writeStream.format("noop")
    stream = stream.option("checkpointLocation", str(tmp_path / "checkpoints"))
    with pytest.raises(PySparkException, match="a table is no stream: read what changes in it"):
        stream.start().awaitTermination(300)


def test_a_schema_of_the_callers_must_fit(spark: Any, where: dict[str, str]) -> None:
    from pyspark.errors import AnalysisException

    reader = spark.read.format("txnkv").options(**where)
    assert reader.schema("v string, id bigint").load().columns == ["v", "id"]
    assert reader.schema("v string, id bigint").load().collect() == []
    with pytest.raises(AnalysisException, match="the schema given says int"):
        reader.schema("id int").load().collect()


def test_a_type_that_spark_has_not(client: txnkv.Client, load: Callable[..., Any]) -> None:
    from pyspark.errors import AnalysisException

    schema = txnkv.Schema({"id": "int64", "d": "decimal128(5, -2)?"}, primary_key=["id"])
    client.create_table("odd", schema)
    with pytest.raises(AnalysisException, match="Spark has no type for: leave it out by option"):
        load(table="odd")
    assert load(table="odd", columns="id").collect() == []


def test_columns_with_commas_and_blanks(client: txnkv.Client, load: Callable[..., Any]) -> None:
    schema = txnkv.Schema({"id": "int64", "x,y": "int64", " z": "int64"}, primary_key=["id"])
    client.create_table("odd", schema)
    client.run(lambda txn: txn.insert("odd", (1, 2, 3)))
    (row,) = load(table="odd", columns='["x,y", " z"]').collect()
    assert row.asDict() == {"x,y": 2, " z": 3}


def test_options_join_a_transaction(client: txnkv.Client, where: dict[str, str]) -> None:
    with client.transaction() as txn:
        made = txnkv.spark.options(txn, client.table("t"))
        assert made == where | {"token": str(txn.serialize())}
        with pytest.raises(txnkv.TableNotFoundError):
            txnkv.spark.options(txn, "nobody")
    with pytest.raises(txnkv.InvalidTxnStateError, match="cannot hand it to Spark"):
        txnkv.spark.options(txn, "t")


def test_registering_by_hand_does_no_harm(
    spark: Any, save: Callable[..., None], rows: Callable[..., Any], ids: Callable[..., list[int]]
) -> None:
    txnkv.spark.register(spark)
    save(rows(1, 3))
    assert ids() == [1, 2, 3]
