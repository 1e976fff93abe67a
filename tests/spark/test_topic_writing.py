"""Batch writes into topics: whole or not at all, each message once, keys together and in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import astuple
from typing import Any

import pyarrow as pa
import pytest

import txnkv
import txnkv.spark
from txnkv import TxnState
from txnkv.spark import worker_client

from .conftest import SCHEMA

pytestmark = pytest.mark.spark


@pytest.fixture(params=["marker", "sidecar"])
def events(client: txnkv.Client, request: pytest.FixtureRequest) -> txnkv.Topic:
    """Topic e of three partitions."""
    return client.create_topic("e", partitions=3, buffer=request.param)


IN_SPARK = pytest.mark.parametrize(
    "events", ["marker", pytest.param("sidecar", marks=pytest.mark.slow)], indirect=True
)


@pytest.fixture
def place(client: txnkv.Client, events: txnkv.Topic) -> dict[str, str]:
    return {"path": client.path, "topic": "e"}


@pytest.fixture
def as_a_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is all of Spark's: no keepers; it gives up its clients at the end."""
    monkeypatch.setenv("SPARK_REUSE_WORKER", "1")
    yield
    while worker_client._clients:
        worker_client._clients.popitem()[1][1].close()


def read(topic: txnkv.Topic) -> list[txnkv.Message]:
    """All committed messages, partition by partition."""
    found: list[txnkv.Message] = []
    with topic.consumer() as consumer:
        while some := consumer.poll(timeout=0):
            found += some
    return sorted(found, key=lambda m: (m.partition, m.offset))


def append(frame: Any, **options: str) -> None:
    frame.write.format("txnkv").options(**options).mode("append").save()


def test_headers_of_large_types(
    spark: Any, events: txnkv.Topic, place: dict[str, str], nothing_is_left: Callable[[], None]
) -> None:
    large = "spark.sql.execution.arrow.useLargeVarTypes"
    headers = "array(named_struct('name', 'h', 'value', X'01')) AS headers"
    spark.conf.set(large, "true")
    try:
        append(spark.range(2).selectExpr("'v' AS value", "'k' AS key", headers), **place)
    finally:
        spark.conf.unset(large)
    assert [(m.value, m.headers) for m in read(events)] == [(b"v", [("h", b"\1")])] * 2
    nothing_is_left()


@IN_SPARK
def test_messages_with_all_that_they_have(
    spark: Any,
    client: txnkv.Client,
    events: txnkv.Topic,
    place: dict[str, str],
    nothing_is_left: Callable[[], None],
) -> None:
    """Keys in order, headers and times kept, partitions obeyed; then a job that fails."""
    frame = spark.range(0, 300, numPartitions=4).selectExpr(
        "concat('v', id) AS value",
        "if(id % 10 = 9, null, cast(id % 7 AS string)) AS key",
        "if(id % 10 = 9, 2, null) AS partition",
        "if(id = 0, array(named_struct('name', 'h', 'value', X'01')), null) AS headers",
        "timestamp_millis(id) AS timestamp",
    )
    append(frame, **place)
    found = read(events)
    assert len(found) == 300
    numbers = [int(m.value[1:]) for m in found]
    assert sorted(numbers) == list(range(300))
    homes: dict[bytes, set[int]] = {}
    for key in {m.key for m in found}:
        same = [m for m in found if m.key == key]
        homes[key or b""] = {m.partition for m in same}
        assert [int(m.value[1:]) for m in same] == sorted(int(m.value[1:]) for m in same)
    assert all(len(home) == 1 for home in homes.values())
    assert homes[b""] == {2}
    (first,) = [m for m in found if m.headers]
    assert (first.value, first.headers) == (b"v0", [("h", b"\x01")])
    assert all(m.timestamp.timestamp() * 1000 == int(m.value[1:]) for m in found)
    assert [info.state for info in client.transactions()] == [TxnState.COMMITTED]

    fails = "if(id = 299, raise_error('this task always fails'), 'x') AS value"
    with pytest.raises(Exception, match="this task always fails"):
        append(spark.range(0, 300, numPartitions=4).selectExpr(fails), **place)
    assert len(read(events)) == 300
    nothing_is_left()


@IN_SPARK
def test_tables_and_topics_under_one_token(
    spark: Any, client: txnkv.Client, events: txnkv.Topic, place: dict[str, str]
) -> None:
    client.create_table("t", SCHEMA)
    frame = spark.range(0, 10, numPartitions=2)
    with client.transaction(timeout=None) as txn:
        append(frame.selectExpr("id"), **txnkv.spark.options(txn, table="t"))
        append(frame.selectExpr("cast(id AS string) value"), **txnkv.spark.options(txn, topic="e"))
        txn.send("e", b"mine")
        assert read(events) == []
    assert client.table("t").count() == 10
    assert sorted(m.value for m in read(events)) == [
        *(str(n).encode() for n in range(10)),
        b"mine",
    ]


def writer(place: dict[str, str], like: pa.RecordBatch) -> Any:
    """A writer into a topic or table as Spark would make it."""
    from pyspark.sql.pandas.types import from_arrow_schema

    from txnkv.spark.settings import Settings, TopicWrite
    from txnkv.spark.writing import JobWriter

    of = TopicWrite.of_batch if "topic" in place else Settings.of_write
    return JobWriter.start(of(place), from_arrow_schema(like.schema))


@pytest.mark.usefixtures("as_a_worker")
def test_attempts_that_are_not_named_leave_nothing(
    client: txnkv.Client,
    events: txnkv.Topic,
    place: dict[str, str],
    nothing_is_left: Callable[[], None],
) -> None:
    data = pa.record_batch({"value": ["a", "b"], "key": ["k", "k"]})
    one = writer(place, data)
    chosen, other = one.write(iter([data, data])), one.write(iter([data]))
    assert (chosen.sent, other.sent) == (4, 2)
    assert read(events) == []
    one.commit([chosen])
    assert [m.value for m in read(events)] == [b"a", b"b", b"a", b"b"]
    with pytest.raises(txnkv.InvalidTxnStateError):
        one.write(iter([data]))
    rolled_back = writer(place, data)
    rolled_back.abort([rolled_back.write(iter([data])), None])
    assert len(read(events)) == 4
    nothing_is_left()


COMMITS = """
from txnkv.spark.settings import Settings, TopicWrite
from txnkv.spark.writing import Begun, JobWriter, TableTarget, TopicTarget, Written
settings = (TopicWrite.of_batch if "topic" in place else Settings.of_write)(place)
target = TopicTarget("e") if "topic" in place else TableTarget("t")
writer = JobWriter(settings, target, Begun(*begun), own=own)
writer.commit([Written(0, attempt)])
"""


def ids(one: Any) -> dict[str, Any]:
    return {"begun": astuple(one._begun), "own": one._own}


@pytest.mark.usefixtures("as_a_worker")
@pytest.mark.parametrize("events", ["marker"], indirect=True)
@pytest.mark.parametrize("kind", ["table", "topic"])
def test_the_committer_dies_before_its_answer(
    client: txnkv.Client,
    events: txnkv.Topic,
    process: Callable[..., Any],
    kind: str,
    nothing_is_left: Callable[[], None],
) -> None:
    """Spark takes the job for failed, so it is run again: both would count."""
    client.create_table("t", txnkv.Schema({"value": "string"}, primary_key=["value"]))
    data = pa.record_batch({"value": pa.array(["a"])})
    txn = client.new_transaction(timeout=None)
    place = txnkv.spark.options(txn, **{kind: "t" if kind == "table" else "e"})
    one = writer(place, data)
    attempt = one.write(iter([data])).attempt
    dead = process(COMMITS, fault="job.ended=kill", place=place, **ids(one), attempt=attempt)
    dead.finish(-9)
    for told in (lambda: one.abort([None]), txn.commit):
        with pytest.raises(txnkv.InvalidTxnStateError, match="told that it failed: roll"):
            told()
    txn.rollback()
    assert (read(events), client.table("t").count()) == ([], 0)
    nothing_is_left()


@pytest.mark.usefixtures("as_a_worker")
@pytest.mark.parametrize("events", ["marker"], indirect=True)
def test_a_write_that_raised_says_that_it_is_committed(
    events: txnkv.Topic, place: dict[str, str], process: Callable[..., Any]
) -> None:
    data = pa.record_batch({"value": ["a", "b"], "partition": [0, 1]})
    one = writer(place, data)
    attempt = one.write(iter([data])).attempt
    dead = process(COMMITS, fault="commit.decided=kill", place=place, **ids(one), attempt=attempt)
    dead.finish(-9)
    with pytest.raises(txnkv.InvalidTxnStateError, match=r"is committed, .* do not write it again"):
        one.abort([None])
    assert [m.value for m in read(events)] == [b"a", b"b"]


@pytest.mark.usefixtures("as_a_worker")
def test_values_of_declared_columns(client: txnkv.Client, store_path: Any) -> None:
    """Spark holds uint64 in decimals."""
    kind = {"n": "uint64?", "note": "string?"}
    topic = client.create_topic("typed", value_schema=kind)
    place = {"path": str(store_path), "topic": "typed"}
    data = pa.record_batch(
        {
            "note": ["a", "b"],
            "n": pa.array([2**64 - 1, None], pa.uint64()).cast(pa.decimal128(20, 0)),
            "key": ["k", None],
        }
    )
    one = writer(place, data)
    one.commit([one.write(iter([data]))])
    assert [(m.value, m.key) for m in read(topic)] == [
        ({"n": 2**64 - 1, "note": "a"}, b"k"),
        ({"n": None, "note": "b"}, None),
    ]
    with pytest.raises(txnkv.SchemaError, match="values of the topic do not have: value"):
        writer(place, pa.record_batch({"value": ["a"]}))


@pytest.mark.usefixtures("as_a_worker")
def test_what_is_refused_while_planning(
    client: txnkv.Client, events: txnkv.Topic, place: dict[str, str]
) -> None:
    for data, says in [
        (pa.record_batch({"id": [1]}), "messages have value, key"),
        (pa.record_batch({"key": ["k"]}), "no column 'value'"),
        (pa.record_batch({"value": [1]}), "'value' of messages is binary or string"),
        (pa.record_batch({"value": ["a"], "partition": ["0"]}), "'partition' of messages"),
    ]:
        with pytest.raises(txnkv.SchemaError, match=says):
            writer(place, data)
    data = pa.record_batch({"value": ["a"], "partition": [3]})
    with pytest.raises(txnkv.TopicNotFoundError):
        writer(place | {"topic": "nowhere"}, data)
    assert client.transactions() == []
    one = writer(place, data)
    with pytest.raises(ValueError, match="there is no partition 3"):
        one.write(iter([data]))
    one.abort([None])
