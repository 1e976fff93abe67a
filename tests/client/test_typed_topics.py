"""Topics with a value schema: rows and columns in, rows and columns out, in every way."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import txnkv
from tests import internals
from tests.topics.test_values import typed_batches
from txnkv import core
from txnkv.topics.messages.message import Message

ORDERS = {"id": "int64", "total": "float64?", "note": "string?"}
ROWS = [
    {"id": 1, "total": 2.5, "note": "a"},
    {"id": 2, "total": None, "note": None},
    None,
    {"id": 3, "total": -1.0, "note": ""},
]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[txnkv.Client]:
    with txnkv.connect(tmp_path / "store") as client:
        yield client


@pytest.fixture(params=["marker", "sidecar"])
def topic(client: txnkv.Client, request: pytest.FixtureRequest) -> txnkv.Topic:
    return client.create_topic("orders", buffer=request.param, value_schema=ORDERS)


def read(topic: txnkv.Topic, **options: Any) -> list[Message]:
    with topic.consumer(**options) as consumer:
        found: list[Message] = []
        while some := consumer.poll(timeout=0):
            found += some
    return found


def columns(topic: txnkv.Topic) -> pa.Table:
    with topic.consumer() as consumer:
        parts = [consumer.poll_batch(timeout=0)]
        while parts[-1].num_rows:
            parts.append(consumer.poll_batch(timeout=0))
    return pa.Table.from_batches(parts)


# -- declaring -------------------------------------------------------------------------


def test_what_was_declared_is_told(client: txnkv.Client, tmp_path: Path) -> None:
    topic = client.create_topic("orders", value_schema=ORDERS)
    wanted = pa.schema(
        [pa.field("id", pa.int64(), False), ("total", pa.float64()), ("note", pa.string())]
    )
    assert topic.value_schema == wanted
    assert client.create_topic("plain").value_schema is None
    with txnkv.connect(tmp_path / "store") as other:
        assert other.topic("orders").value_schema == wanted
        assert other.topic("plain").value_schema is None
    arrow = pa.schema(
        [("at", pa.timestamp("ns", "UTC")), ("tags", pa.large_list(pa.large_string()))],
        metadata={"from": "elsewhere"},
    )
    taken = client.create_topic("arrow", value_schema=arrow).value_schema
    assert taken == pa.schema([("at", pa.timestamp("us", "UTC")), ("tags", pa.list_(pa.string()))])


def test_one_made_alike_is_the_same(client: txnkv.Client) -> None:
    client.create_topic("orders", value_schema=ORDERS)
    again = client.create_topic("orders", value_schema=ORDERS, exists_ok=True)
    assert again.value_schema == client.topic("orders").value_schema
    for other in (None, {**ORDERS, "note": "string"}, dict(reversed(ORDERS.items()))):
        with pytest.raises(txnkv.TopicExistsError):
            client.create_topic("orders", value_schema=other, exists_ok=True)


def test_what_cannot_be_declared_is_refused(client: txnkv.Client) -> None:
    refused: list[tuple[Any, str]] = [
        ({"key": "int64"}, "Take another name"),
        ({"a": "int65"}, "not a column type"),
        ({}, "at least one column"),
        ({"a": txnkv.Column("int8", default=300)}, "the default of"),
        (pa.schema([("a", pa.struct([("b", pa.int64())]))]), "json holds such values"),
    ]
    for schema, said in refused:
        with pytest.raises(txnkv.SchemaError, match=said):
            client.create_topic("no", value_schema=schema)
    with pytest.raises(TypeError, match="a mapping of names to types"):
        client.create_topic("no", value_schema=["a"])  # type: ignore[arg-type]
    assert client.topics() == []


# -- sending ---------------------------------------------------------------------------


@dataclass
class Order:
    id: int
    total: float | None = None
    note: str | None = None


class Named(NamedTuple):
    id: int
    total: float | None
    note: str | None


def test_rows_of_any_kind_come_back_as_dicts(client: txnkv.Client, topic: txnkv.Topic) -> None:
    with client.transaction() as txn:
        txn.send(topic, {"id": 1, "total": 2.5, "note": "a"}, key="k")
        txn.send(topic, {"note": None, "id": 2}, headers={"h": b"1"})
        txn.send(topic, None, key=b"gone")
        txn.send("orders", (3, -1, ""))
        txn.send("orders", Order(4))
        txn.send(topic, Named(5, 0.0, "ü"))
    found = read(topic)
    assert [message.value for message in found] == [
        *ROWS,
        {"id": 4, "total": None, "note": None},
        {"id": 5, "total": 0.0, "note": "ü"},
    ]
    assert [message.key for message in found][:3] == [b"k", None, b"gone"]
    assert found[1].headers == [("h", b"1")]
    assert "'note': 'a'" in repr(found[0])


def test_a_session_a_producer_and_columns_send_the_same(
    client: txnkv.Client, topic: txnkv.Topic
) -> None:
    with client.new_session() as session:
        for row in ROWS:
            session.send(topic, row)
        session.flush()
    with topic.producer() as producer:
        for row in ROWS:
            producer.send(row)
    batch = pa.Table.from_pylist([row or dict.fromkeys(ORDERS) for row in ROWS])
    with client.transaction() as txn:
        assert txn.send_batch(topic, batch.select(["note", "id", "total"])).sent == 4
    found = read(topic)
    assert [message.value for message in found] == ROWS * 3
    assert len({(m.raw, i % 4) for i, m in enumerate(found)}) == 4


def test_columns_come_beside_what_every_message_has(
    client: txnkv.Client, topic: txnkv.Topic
) -> None:
    at = datetime(2026, 5, 1, tzinfo=UTC)
    with client.transaction() as txn:
        txn.send_batch(
            topic,
            pa.table(
                {
                    "id": pa.array([1, None], pa.int32()),
                    "key": ["a", "b"],
                    "headers": [[{"name": "h", "value": b"1"}], None],
                    "timestamp": pa.array([at, at], pa.timestamp("us", "UTC")),
                    "partition": [0, 0],
                }
            ),
        )
    found = columns(topic)
    assert found.schema.names == [
        "offset", "partition", "timestamp", "key", "id", "total", "note", "headers", "txn_id",
    ]  # fmt: skip
    assert found.schema.field("id").nullable
    rows = found.to_pylist()
    assert [row["id"] for row in rows] == [1, None]
    assert [row["key"] for row in rows] == [b"a", b"b"]
    assert [row["timestamp"] for row in rows] == [at, at]
    assert core.decode_headers(rows[0]["headers"]) == [("h", b"1")]
    assert [message.value for message in read(topic)] == [{**ROWS[1], "id": 1}, None]


def test_nothing_is_there_at_the_end_with_the_same_columns(
    client: txnkv.Client, topic: txnkv.Topic
) -> None:
    with topic.consumer() as consumer:
        empty = consumer.poll_batch(timeout=0)
        with client.transaction() as txn:
            txn.send(topic, ROWS[0])
        assert empty.num_rows == 0
        assert consumer.poll_batch(timeout=0).schema == empty.schema


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"id": "x"}, "'id' is int64"),
        ({"id": 1.5}, "'id' is int64"),
        ({"id": None}, "not nullable"),
        ({"total": 1.0}, "'id' is not nullable"),
        ({"id": 1, "other": 2}, "no column 'other'"),
        ((1, 2.0), "this one has 2"),
        ({"id": 1 << 63}, "id"),
        (b"bytes", "not bytes"),
        ("text", "not str"),
        (7, "not int"),
    ],
)
def test_what_does_not_fit_is_refused_at_the_call(
    client: txnkv.Client, value: Any, said: str
) -> None:
    topic = client.create_topic("orders", value_schema=ORDERS)
    with client.new_session() as session, topic.producer() as producer:
        session.send(topic, ROWS[0])
        for send in (session.send, session.send):
            with pytest.raises(txnkv.SchemaError, match=said):
                send(topic, value)
        with pytest.raises(txnkv.SchemaError, match=said):
            producer.send(value)
        assert session.flush().sent == 1
    assert [message.value for message in read(topic)] == ROWS[:1]


def test_columns_that_do_not_fit_are_refused_whole(client: txnkv.Client) -> None:
    topic = client.create_topic("orders", value_schema=ORDERS)
    with client.transaction() as txn:
        for table, said in [
            ({"value": [b"x"]}, "do not have: value"),
            ({"id": [1], "offset": [1]}, "do not have: offset"),
            ({"note": ["a"]}, "no column 'id'"),
            ({"id": [1, None], "note": ["a", "b"]}, "not nullable"),
            ({"id": [1], "partition": ["a"]}, "an integer"),
        ]:
            with pytest.raises(txnkv.SchemaError, match=said):
                txn.send_batch(topic, pa.table(table))
    assert read(topic) == []


def test_a_plain_topic_takes_no_rows(client: txnkv.Client) -> None:
    topic = client.create_topic("plain")
    with client.new_session() as session:
        with pytest.raises(TypeError, match="not dict"):
            session.send(topic, {"id": 1})
        typed = client.create_topic("typed", value_schema={"id": "int64"})
        session.send(typed, {"id": 1})
        session.send(topic, b"1")
        session.send(typed, {"id": 2})
        session.flush()
    assert [message.value for message in read(typed)] == [{"id": 1}, {"id": 2}]
    assert [message.value for message in read(topic)] == [b"1"]


# -- property --------------------------------------------------------------------------


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    typed_batches(max_rows=40),
    st.sampled_from([None, "lz4", "zstd"]),
    st.sampled_from(["marker", "sidecar"]),
    st.sampled_from([16, 200, 1 << 20]),
    st.data(),
)
def test_any_batch_comes_back_by_dict_and_by_batch(
    client: txnkv.Client, made: Any, compression: str, buffer: str, most: int, data: Any
) -> None:
    schema, batch = made
    from txnkv.topics.topic_catalog import TopicOptions

    options = TopicOptions(compression=compression, max_message_bytes=most, value_schema=schema)
    topics = internals.topics(client)
    client.drop_topic("any", missing_ok=True)
    topics.create("any", 1, buffer, options)
    topic = client.topic("any")
    # A row of nothing but nulls is no value; and one that may be null alone is not told from it.
    rows = [
        None if all(each is None for each in row.values()) else row for row in batch.to_pylist()
    ]
    with client.transaction() as txn:
        if data.draw(st.booleans()):
            txn.serialize()  # it becomes a large one
        for row in rows:
            txn.send(topic, row)
        txn.send_batch(topic, batch)
    assert [message.value for message in read(topic)] == rows * 2
    values = columns(topic).select(schema.names)
    assert values.to_pylist() == batch.to_pylist() * 2


# -- reading otherwise -----------------------------------------------------------------


@pytest.mark.parametrize("type_", ["exclusive", "shared"])
def test_subscriptions_deliver_rows_again_and_to_the_dead_letters(
    client: txnkv.Client, topic: txnkv.Topic, type_: str
) -> None:
    with client.transaction() as txn:
        for row in ROWS:
            txn.send(topic, row)
    with topic.subscribe("s", type_) as sub:
        found = sub.receive_many(timeout=0)
        assert [message.value for message in found] == ROWS
        sub.nack(found[1])
        again = sub.receive(timeout=1)
        assert again is not None
        assert again.value == ROWS[1]
        sub.ack(again)
    with topic.subscribe("d", "shared", max_deliveries=1) as sub:
        for message in sub.receive_many(timeout=0):
            sub.nack(message)
        assert sub.receive(timeout=0) is None
    letters = client.topic("orders.d.dead")
    assert letters.value_schema == topic.value_schema
    assert [message.value for message in read(letters)] == ROWS


def test_a_message_survives_pickling(client: txnkv.Client, topic: txnkv.Topic) -> None:
    with client.transaction() as txn:
        txn.send(topic, ROWS[0], key=b"k", headers={"a": b"b"})
    (message,) = read(topic)
    twin = pickle.loads(pickle.dumps(message))
    assert twin == message
    assert twin.value == ROWS[0]
    assert (twin.id, twin.headers, twin.txn_id) == (message.id, message.headers, message.txn_id)


class Noted(txnkv.Message):
    """A message with something that is its user's."""

    note: Any


def test_a_message_of_a_subclass_is_collected_and_copied() -> None:
    died: list[int] = []
    message = Noted(b"value", None, None, 5, 0, 7, None)
    message.note = {"of": "mine"}
    twin = copy.copy(message)
    assert (twin, twin.note) == (message, message.note)
    message.note = [message]
    weakref.finalize(message, died.append, 1)
    del message
    gc.collect()
    assert died == [1]


def test_a_follower_takes_the_schema_over(
    client: txnkv.Client, topic: txnkv.Topic, tmp_path: Path
) -> None:
    with client.transaction() as txn:
        txn.send(topic, ROWS[0])
    for _ in range(2):
        txnkv.replicate(client, tmp_path / "copy")
    with txnkv.connect(tmp_path / "copy") as copy:
        assert copy.topic("orders").value_schema == topic.value_schema
        assert [message.value for message in read(copy.topic("orders"))] == ROWS[:1]
    assert not txnkv.connect(tmp_path / "copy").check().problems


def test_what_is_no_value_of_the_schema_is_a_corruption_alone(client: txnkv.Client) -> None:
    """Written by who went past the checks: the bytes are told, and the others are read."""
    from txnkv.topics.messages.values import Encoded

    topic = client.create_topic("orders", value_schema=ORDERS)
    good = client.create_topic("amounts", value_schema={"x": "decimal128(5, 2)"})
    with client.transaction() as txn:
        txn.send(topic, ROWS[0])
        txn.send(topic, Encoded(b"\x01\x01\x00"), key=b"k")
        txn.send(topic, ROWS[3])
        txn.send(good, {"x": Decimal("1.25")})
    first, broken, last = read(topic)
    assert (first.value, last.value) == (ROWS[0], ROWS[3])
    with pytest.raises(txnkv.CorruptionError, match=r"partition 0, offset 1: .*reading a row"):
        print(broken.value)
    assert (broken.raw, broken.key) == (b"\x01\x01\x00", b"k")
    assert "x01" in repr(broken)
    with topic.consumer() as consumer:
        with pytest.raises(txnkv.CorruptionError, match="'orders', partition 0, from offset 0"):
            consumer.poll_batch(timeout=0)
        assert consumer.position(0) == 3
    assert [message.value for message in read(good)] == [{"x": Decimal("1.25")}]
    (problem,) = client.check().problems
    assert "topic 'orders', partition 0: from offset 0 on: value 1 of 3" in problem


def test_fetch_gives_the_bytes(client: txnkv.Client, topic: txnkv.Topic) -> None:
    with client.transaction() as txn:
        txn.send(topic, ROWS[0])
    records = topic.fetch(0, 0).records
    spans = core.all_data(records, 0, 1 << 60)
    (value,) = core.decode(records, spans, 0).column("value").to_pylist()
    assert topic.info.options.codec is not None
    assert topic.info.options.codec.decode_one(value) == ROWS[0]


def test_with_asyncio(tmp_path: Path) -> None:
    async def play() -> None:
        async with await txnkv.aio.connect(tmp_path / "store") as client:
            topic = await client.create_topic("orders", value_schema=ORDERS)
            assert topic.value_schema == client.blocking.topic("orders").value_schema
            async with client.transaction() as txn:
                await txn.send(topic, ROWS[0])
                await txn.send_batch(topic, pa.table({"id": [2]}))
                with pytest.raises(txnkv.SchemaError):
                    await txn.send(topic, {"id": "x"})
            async with await topic.producer() as producer:
                await producer.send(None)
                await producer.send((3, -1.0, ""))
            async with await topic.consumer() as consumer:
                assert [message.value for message in await consumer.poll()] == ROWS
            async with await topic.subscribe("s") as sub:
                assert [message.value for message in await sub.receive_many()] == ROWS
            async with await topic.consumer() as consumer:
                batch = await consumer.poll_batch()
                assert batch.column("id").to_pylist() == [1, 2, None, 3]

    asyncio.run(play())
