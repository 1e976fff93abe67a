"""A topic as a batch and as a stream, by the calls that Spark makes; no Spark is started."""

from __future__ import annotations

import json
import os
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows

import txnkv
from tests import internals
from txnkv.spark.query_progress import lag
from txnkv.topics.read.topic_planner import share
from txnkv.topics.topic_catalog import TopicOptions

from .topic_tools import (
    BUFFERS,
    ORDERS,
    Query,
    batch_read,
    flat,
    opened,
    options,
    schema_of,
    send,
    values,
)

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("clients_are_closed")]


# -- batches -----------------------------------------------------------------------------


@BUFFERS
@ORDERS
def test_a_batch_has_what_is_committed(client: txnkv.Client, buffer: str, order: str) -> None:
    client.create_topic("events", 2, buffer)
    send(client, "a", "b")
    send(client, "c", partition=1)
    opened(client, "x").rollback()
    open_ = opened(client, "y")
    send(client, "d")
    rows = flat(batch_read(options(client, order=order)))
    waits = buffer == "marker" and order == "offset"
    assert sorted(values(rows)) == [b"a", b"b", b"c"] + ([] if waits else [b"d"])
    open_.commit()
    rows = flat(batch_read(options(client, order=order)))
    assert sorted(values(rows)) == [b"a", b"b", b"c", b"d", b"y"]


def test_the_columns_of_a_row(client: txnkv.Client) -> None:
    topic = client.create_topic("events", 2)
    with client.transaction() as txn:
        txn.send(topic, b"v", key=b"k", partition=1, headers=[("h", b"1"), ("h", b"2")])
        txn.send(topic, None, partition=1)
        local = txn.id.local
    with client.new_session() as session:
        session.send(topic, b"plain", partition=1)
    (task,) = batch_read(options(client))
    sent = topic.consumer().poll()
    first, second, plain = task
    assert first == {
        "key": b"k",
        "value": b"v",
        "headers": [{"key": "h", "value": b"1"}, {"key": "h", "value": b"2"}],
        "partition": 1,
        "offset": 0,
        "timestamp": sent[0].timestamp,
        "txn_id": local,
    }
    assert (second["key"], second["value"], second["headers"]) == (None, None, None)
    assert (plain["value"], plain["txn_id"]) == (b"plain", None)
    schema = schema_of(options(client))
    assert {field.name: field.nullable for field in schema} == {
        "key": True, "value": True, "headers": True, "partition": False, "offset": False,
        "timestamp": False, "txn_id": True,
    }  # fmt: skip


def test_columns_are_picked(client: txnkv.Client) -> None:
    client.create_topic("events")
    send(client, "a", "b")
    (task,) = batch_read(options(client, columns="offset,value"))
    assert task == [{"offset": 0, "value": b"a"}, {"offset": 1, "value": b"b"}]
    (task,) = batch_read(options(client, columns="partition"))
    assert task == [{"partition": 0}] * 2


def test_declared_columns_stand_in_place_of_the_value(client: txnkv.Client) -> None:
    declared = {"id": "int64", "small": "uint8?", "tags": "list<string>?"}
    topic = client.create_topic("events", value_schema=declared)
    with client.transaction() as txn:
        txn.send(topic, {"id": 7, "small": 200, "tags": ["a", "b"]}, key=b"k")
        txn.send(topic, None)
    (task,) = batch_read(options(client))
    assert list(task[0]) == [
        "id", "small", "tags", "key", "headers", "partition", "offset", "timestamp", "txn_id",
    ]  # fmt: skip
    assert [(row["id"], row["small"], row["tags"], row["key"]) for row in task] == [
        (7, 200, ["a", "b"], b"k"),
        (None, None, None, None),
    ]
    assert schema_of(options(client)).field("small").type == pa.int16()
    (task,) = batch_read(options(client, columns="offset,small"))
    assert task == [{"offset": 0, "small": 200}, {"offset": 1, "small": None}]


@BUFFERS
@ORDERS
def test_starting_and_ending_offsets(client: txnkv.Client, buffer: str, order: str) -> None:
    client.create_topic("events", 2, buffer)
    for i in range(6):
        send(client, f"{i}")
    send(client, "other", partition=1)

    def read(start: str = "earliest", end: str = "latest") -> list[bytes]:
        place = options(client, order=order, startingOffsets=start, endingOffsets=end)
        return values(flat(batch_read(place)))

    assert read('{"0": 2}') == [b"2", b"3", b"4", b"5", b"other"]
    assert read('{"0": 2, "1": -1}') == [b"2", b"3", b"4", b"5"]
    assert read('{"0": 2, "1": -1}', '{"0": 4}') == [b"2", b"3"]
    assert read('{"0": 2, "1": 1}', '{"0": -1, "1": 1}') == [b"2", b"3", b"4", b"5"]
    assert read('{"0": 6, "1": 1}') == []
    for start, end, error, words in [
        ('{"2": 0}', "latest", ValueError, "names partition 2: topic 'events' has 2"),
        ('{"0": 3}', '{"0": 2}', ValueError, "lies before its start"),
        ('{"0": 7}', "latest", txnkv.OffsetOutOfRangeError, "option startingOffsets names offset"),
        ('{"0": 7}', "latest", txnkv.OffsetOutOfRangeError, "at 6. Give one from 0 to 6, or -1"),
        ("earliest", '{"1": 2}', txnkv.OffsetOutOfRangeError, "which ends at 1. Give one from 0"),
    ]:
        with pytest.raises(error, match=words):
            read(start, end)


@BUFFERS
def test_offsets_of_options_cut_no_transaction_in_commit_order(
    client: txnkv.Client, buffer: str
) -> None:
    """Two reads that meet at an offset give each transaction once, whole."""
    topic = client.create_topic("events", 1, buffer)
    send(client, "a", "a", "a")
    late = opened(client, "b", "b")
    send(client, "c", "c")
    late.commit()
    with client.new_session() as session:
        send(client, "d", "d", txn=session)
    (end,) = topic.end_offsets().values()
    counts = set()
    for at in range(end + 1):
        place = json.dumps({"0": at})
        below = values(flat(batch_read(options(client, order="commit", endingOffsets=place))))
        above = options(client, order="commit", startingOffsets=place)
        rest = values(flat(batch_read(above)))
        assert below + rest == [b"a", b"a", b"a", b"c", b"c", b"b", b"b", b"d", b"d"], at
        assert values(Query(above).drain().rows()) == rest
        counts.add(len(below))
    assert counts == {0, 3, 5, 7, 9}


def test_an_end_that_is_not_decided_is_refused(client: txnkv.Client) -> None:
    client.create_topic("events")
    send(client, "a")
    txn = opened(client, "b")
    with pytest.raises(txnkv.OffsetOutOfRangeError, match="is decided up to 1: end there"):
        batch_read(options(client, endingOffsets='{"0": 2}'))
    txn.commit()
    (task,) = batch_read(options(client, endingOffsets='{"0": 2}'))
    assert values(task) == [b"a", b"b"]


def test_a_topic_of_nothing(client: txnkv.Client) -> None:
    client.create_topic("events", 3)
    assert batch_read(options(client)) == []
    query = Query(options(client))
    assert not query.trigger()
    assert query.offsets == []


def test_a_long_log_is_cut_into_tasks(
    client: txnkv.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = client.create_topic("events", 2)
    for partition, rows in ((0, 4000), (1, 40)):
        data = pa.record_batch({"value": pa.array([b"v" * 1000] * rows, pa.binary())})
        for _ in range(5):
            with client.transaction() as txn:
                numbers = pa.array([partition] * rows, pa.int32())
                txn.send_batch(topic, data.append_column("partition", numbers))
    internals.flush(client)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    tasks = batch_read(options(client, columns="partition,offset"))
    assert 4 <= len(tasks) <= 6
    rows = [(row["partition"], row["offset"]) for task in tasks for row in task]
    expected = [(0, topic.end_offsets()[0]), (1, topic.end_offsets()[1])]
    assert len(rows) == len(set(rows)) == 20200
    assert max(rows) < expected[1]
    assert sorted(rows)[20000 - 1] < expected[0]
    assert max(map(len, tasks)) < 8000


def test_small_partitions_share_a_task(client: txnkv.Client) -> None:
    client.create_topic("events", 16)
    for number in range(16):
        send(client, f"{number}", partition=number)
    (task,) = batch_read(options(client))
    assert [row["partition"] for row in task] == list(range(16))


# -- streams -----------------------------------------------------------------------------


@BUFFERS
@ORDERS
def test_batches_follow_each_other(client: txnkv.Client, buffer: str, order: str) -> None:
    client.create_topic("events", 2, buffer)
    query = Query(options(client, order=order))
    for i in range(3):
        send(client, f"{i}a", f"{i}b")
        send(client, f"{i}c", partition=1)
        assert query.trigger()
        assert not query.trigger()
        assert sorted(values(query.batches[-1][0])) == [b"%da" % i, b"%db" % i, b"%dc" % i]
    assert query.start().reportLatestOffset()["offsets"] == {"0": 6, "1": 3}


def test_latest_begins_with_what_comes(client: txnkv.Client) -> None:
    client.create_topic("events")
    send(client, "old")
    for order in ("offset", "commit"):
        query = Query(options(client, order=order, startingOffsets="latest"))
        at = json.dumps(query.start().initialOffset())
        send(client, "new")
        end = json.dumps(query.start().latestOffset(json.loads(at), ReadAllAvailable()))
        assert values(query.planned(at, end)[0]) == [b"new"]


@ORDERS
def test_the_first_batch_again_begins_where_it_did(client: txnkv.Client, order: str) -> None:
    """Spark keeps no start of a query's first batch: it asks for another one."""
    client.create_topic("events")
    send(client, "old")
    query = Query(options(client, order=order, startingOffsets="latest"))
    begun = query.start().initialOffset()
    send(client, "new")
    query.offsets.append(json.dumps(query.start().latestOffset(begun, ReadAllAvailable())))
    send(client, "newer")
    (task,) = query.restarted().replay(0)
    assert values(task) == [b"new"]


@BUFFERS
@ORDERS
def test_a_batch_again_gives_the_same(client: txnkv.Client, buffer: str, order: str) -> None:
    """Whatever was decided, flushed or compacted meanwhile."""
    client.create_topic("events", 1, buffer)
    query = Query(options(client, order=order, maxOffsetsPerTrigger="4"))
    txns = [opened(client, f"{i}a", f"{i}b") for i in range(6)]
    for i, txn in enumerate(txns):
        send(client, f"small{i}")
        (txn.rollback if i % 3 == 1 else txn.commit)()
        query.drain()
    assert len(query.batches) > 4
    opened(client, "late").rollback()
    internals.flush(client)
    internals.maintenance(client).round(resume_all=True)
    assert query.same_again()
    assert sorted(values(query.rows())) == sorted(
        [b"small%d" % i for i in range(6)]
        + [b"%d%c" % (i, letter) for i in (0, 2, 3, 5) for letter in b"ab"]
    )


def test_an_open_transaction_holds_back_offset_order_alone(client: txnkv.Client) -> None:
    client.create_topic("events")
    by_offset = Query(options(client))
    by_commit = Query(options(client, order="commit"))
    txn = opened(client, "a")
    send(client, "b")
    assert not by_offset.trigger()
    assert by_commit.trigger()
    assert values(by_commit.rows()) == [b"b"]
    txn.commit()
    assert values(by_offset.drain().rows()) == [b"a", b"b"]
    assert values(by_commit.drain().rows()) == [b"b", b"a"]


@BUFFERS
def test_commit_order_has_whole_transactions_over_partitions(
    client: txnkv.Client, buffer: str
) -> None:
    client.create_topic("events", 3, buffer)
    txns = []
    for i in range(12):
        txn = client.new_transaction(timeout=None)
        for partition in range(3):
            send(client, f"{i}.{partition}", partition=partition, txn=txn)
        if i % 2:
            txn.serialize()
        txn.flush()
        txns.append(txn)
    for txn in txns[::-1]:
        txn.commit()
    query = Query(options(client, order="commit")).drain(most=7)
    assert len(query.batches) > 3
    order = []
    for batch in query.batches:
        rows = [row["value"].split(b".")[0] for row in flat(batch)]
        assert all(rows.count(name) == 3 for name in rows)
        order += sorted(set(rows), key=lambda name: -int(name))
    assert order == [b"%d" % i for i in reversed(range(12))]


def test_large_messages_go_over_ends_of_batches(client: txnkv.Client) -> None:
    small = TopicOptions(max_message_bytes=1000)
    internals.topics(client).create("events", 1, "marker", small)
    txn = opened(client, "a", "F" * 5500, "b")
    opened(client, "x" * 3500).rollback()
    send(client, "G" * 2500)
    txn.commit()
    expected = [b"a", b"F" * 5500, b"b", b"G" * 2500]
    for most in (1, 2, 3, 5, 100):
        query = Query(options(client)).drain(most)
        assert values(query.rows()) == expected, most
        assert query.same_again()


# -- limits, lag, ends -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("most", "there", "expected"),
    [
        (10, {0: 3, 1: 4}, {0: 3, 1: 4}),
        (10, {0: 30, 1: 70}, {0: 3, 1: 7}),
        (10, {0: 1000, 1: 1}, {0: 9, 1: 1}),
        (1, {0: 50, 1: 50, 2: 0}, {0: 1, 1: 1, 2: 0}),
        (10, {0: 0}, {0: 0}),
    ],
)
def test_how_a_limit_is_shared(most: int, there: dict[int, int], expected: dict[int, int]) -> None:
    assert share(most, there) == expected


def test_a_limit_is_kept(client: txnkv.Client) -> None:
    client.create_topic("events", 2)
    for i in range(30):
        send(client, f"{i}", partition=i % 3 // 2)
    query = Query(options(client, maxOffsetsPerTrigger="6"))
    assert query.start().getDefaultReadLimit() == ReadMaxRows(6)
    query.drain()
    assert [sum(map(len, batch)) for batch in query.batches] == [6, 6, 6, 6, 6]
    assert len({row["partition"] for row in query.batches[0][0]}) == 2
    assert Query(options(client)).start().getDefaultReadLimit() == ReadAllAvailable()
    with pytest.raises(txnkv.NotSupportedError, match="not by ReadMaxBytes"):
        query.start().latestOffset(json.loads(query.offsets[-1]), ReadMaxBytes(5))


@ORDERS
def test_available_now_ends(client: txnkv.Client, order: str) -> None:
    client.create_topic("events")
    for i in range(10):
        send(client, f"{i}")
    query = Query(options(client, order=order, maxOffsetsPerTrigger="4"))
    query.start().prepareForTriggerAvailableNow()
    while query.trigger():
        send(client, "later")
    assert values(query.rows()) == [b"%d" % i for i in range(10)]
    assert query.restarted().drain().batches[-1]


def test_lag(client: txnkv.Client) -> None:
    client.create_topic("events", 2)
    query = Query(options(client))
    send(client, "a", "b")
    query.trigger()
    send(client, "c", "d", "e")
    send(client, "f", partition=1)

    def progress(*others: Any) -> dict[str, Any]:
        latest = query.start().reportLatestOffset()
        return {"sources": [{"endOffset": json.loads(query.offsets[-1]), "latestOffset": latest},
                            *others]}  # fmt: skip

    assert lag(progress()) == {0: 3, 1: 1}
    rate = {"endOffset": "5", "latestOffset": None}
    assert lag(progress(rate), topic="events") == {0: 3, 1: 1}
    text = {name: json.dumps(at) for name, at in progress()["sources"][0].items()}
    assert lag({"sources": [text]}) == {0: 3, 1: 1}
    query.trigger()
    assert lag(progress()) == {0: 0, 1: 0}
    assert lag(type("Query", (), {"lastProgress": None})()) == {}
    with pytest.raises(ValueError, match="does not read topic 'nobody'"):
        lag(progress(), "nobody")
    other = {name: at | {"topic": "two"} for name, at in progress()["sources"][0].items()}
    with pytest.raises(ValueError, match="reads the topics events, two: name one"):
        lag(progress(other))
