"""Messages one by one and in bulk: what is taken, what is refused at the call, what is read."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from txnkv.storage.faults import arm, disarm

Messages = Callable[..., list[txnkv.Message]]
Values = Callable[..., list[bytes | None]]

WHEN = datetime(2026, 3, 1, 12, 30, 15, 123456, tzinfo=UTC)


@pytest.fixture
def events(client: txnkv.Client) -> txnkv.Topic:
    return client.create_topic("events", partitions=3)


# -- the catalog -----------------------------------------------------------------------


def test_topics_are_made_found_listed_and_dropped(client: txnkv.Client) -> None:
    made = client.create_topic("b", partitions=2, buffer="sidecar", compression="zstd")
    client.create_topic("a")
    assert (made.name, made.partitions, made.buffer) == ("b", 2, "sidecar")
    assert client.topics() == ["a", "b"]
    assert client.topic("b").info == made.info
    with pytest.raises(txnkv.TopicExistsError, match="exists_ok"):
        client.create_topic("a")
    client.drop_topic(made)
    assert client.topics() == ["a"]
    with pytest.raises(txnkv.TopicNotFoundError, match="the topics are: a"):
        client.topic("b")
    with pytest.raises(txnkv.TopicNotFoundError):
        client.drop_topic("b")
    client.drop_topic("b", missing_ok=True)


def test_exists_ok_gives_the_topic_that_was_made_alike(client: txnkv.Client) -> None:
    made = client.create_topic("a", partitions=2, compression="lz4")
    again = client.create_topic("a", partitions=2, compression="lz4", exists_ok=True)
    assert again.info == made.info
    for other in ({"partitions": 3}, {"buffer": "sidecar"}, {"retention_seconds": 1.0}):
        options: dict[str, Any] = {"partitions": 2, "compression": "lz4"} | other
        with pytest.raises(txnkv.TopicExistsError):
            client.create_topic("a", exists_ok=True, **options)


@pytest.mark.parametrize("text", [pa.large_string(), pa.string_view()])
@pytest.mark.parametrize("kind", ["list", "large list", "map"])
def test_headers_in_other_types_of_text(
    client: txnkv.Client, events: txnkv.Topic, messages: Messages, text: pa.DataType, kind: str
) -> None:
    pair = pa.struct([("name", text), ("value", pa.large_binary())])
    lists = {"list": pa.list_(pair), "large list": pa.large_list(pair)}
    headers = pa.array([[("a", b"1"), ("b", b"")], None], pa.map_(text, pa.large_binary()))
    if kind != "map":
        rows = [[{"name": "a", "value": b"1"}, {"name": "b", "value": b""}], None]
        headers = pa.array(rows, lists[kind])
    client.new_session().send_batch(events, pa.table({"value": ["x", "y"], "headers": headers}))
    assert [m.headers for m in messages(events)] == [[("a", b"1"), ("b", b"")], []]


@pytest.mark.parametrize(
    "options",
    [
        {"name": ""},
        {"name": 5},
        {"partitions": 0},
        {"partitions": 1.5},
        {"buffer": "none"},
        {"compression": "gzip"},
        {"retention_seconds": -1.0},
        {"retention_bytes": -1},
    ],
    ids=str,
)
def test_topics_that_make_no_sense(client: txnkv.Client, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        client.create_topic(**{"name": "t"} | options)
    assert client.topics() == []


def test_a_table_and_a_topic_may_share_a_name(client: txnkv.Client, table: txnkv.Table) -> None:
    client.create_topic("t")
    with client.transaction() as txn:
        txn.insert("t", {"id": 1, "v": "a"})
        txn.send("t", b"m")
    assert client.tables() == client.topics() == ["t"]


def test_read_only_clients_make_no_topics(client: txnkv.Client, connect: Any) -> None:
    with connect(read_only=True) as reader, pytest.raises(txnkv.NotSupportedError):
        reader.create_topic("a")


# -- one by one ------------------------------------------------------------------------


def test_all_parts_of_a_message_come_back(
    client: txnkv.Client, events: txnkv.Topic, messages: Messages
) -> None:
    headers = [("trace", b"\x00\x01"), ("trace", b""), ("n\u00e4me", b"x")]
    with client.transaction() as txn:
        txn.send(events, b"value", key=b"key", partition=2, headers=headers, timestamp=WHEN)
        txn.send(events, b"", partition=2)
        txn.send(events, None, key=b"", partition=2)
    first, second, third = messages(events)
    assert (first.value, first.key, first.headers) == (b"value", b"key", headers)
    assert (first.timestamp, first.partition, first.offset) == (WHEN, 2, 0)
    assert first.id == txnkv.MessageId(2, 0)
    assert first.txn_id == txn.id
    assert (second.value, second.key, second.headers, second.offset) == (b"", None, [], 1)
    assert (third.value, third.key) == (None, b"")
    assert abs(second.timestamp - datetime.now(UTC)) < timedelta(minutes=1)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (b"bytes", b"bytes"),
        ("t\u00e9xt", "t\u00e9xt".encode()),
        (bytearray(b"array"), b"array"),
        (memoryview(b"view"), b"view"),
        (None, None),
    ],
    ids=lambda given: type(given).__name__,
)
def test_what_is_taken_as_value_and_key(
    client: txnkv.Client, events: txnkv.Topic, messages: Messages, given: Any, found: Any
) -> None:
    with client.transaction() as txn:
        txn.send(events, given, given)
        txn.send("events", given, headers={"h": given or b""})
    first, second = messages(events)
    if first.key != found:
        first, second = second, first
    assert (first.value, first.key, second.value) == (found, found, found)
    assert second.headers == [("h", found or b"")]


def test_a_timestamp_of_another_zone(
    client: txnkv.Client, events: txnkv.Topic, messages: Messages
) -> None:
    with client.transaction() as txn:
        txn.send(events, b"a", timestamp=WHEN.astimezone(timezone(timedelta(hours=5))))
        txn.send(events, b"b", timestamp=txnkv.Timestamp.from_datetime(WHEN))
    assert [message.timestamp for message in messages(events)] == [WHEN, WHEN]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"value": 5}, TypeError),
        ({"value": ["a"]}, TypeError),
        ({"value": {"a": 1}}, TypeError),
        ({"key": 5}, TypeError),
        ({"partition": "0"}, TypeError),
        ({"partition": True}, TypeError),
        ({"partition": 1.0}, TypeError),
        ({"partition": -1}, ValueError),
        ({"partition": 3}, ValueError),
        ({"headers": "h"}, TypeError),
        ({"headers": 5}, TypeError),
        ({"headers": [("a",)]}, TypeError),
        ({"headers": [(b"a", b"b")]}, TypeError),
        ({"headers": [("a", None)]}, TypeError),
        ({"headers": [("a", 5)]}, TypeError),
        ({"headers": [("a" * 70_000, b"")]}, ValueError),
        ({"timestamp": 5}, TypeError),
        ({"timestamp": "2026-01-01"}, TypeError),
        ({"timestamp": datetime(2026, 1, 1)}, ValueError),
        ({"topic": "other"}, txnkv.TopicNotFoundError),
        ({"topic": 5}, TypeError),
        ({"topic": b"events"}, TypeError),
    ],
    ids=str,
)
def test_a_wrong_argument_is_refused_at_the_call_and_costs_nothing(
    client: txnkv.Client,
    events: txnkv.Topic,
    values: Values,
    arguments: dict[str, Any],
    error: type[Exception],
) -> None:
    with client.transaction() as txn:
        txn.send(events, b"before", partition=0)
        with pytest.raises(error):
            txn.send(**{"topic": events, "value": b"v"} | arguments)
        txn.send(events, b"after", partition=0)
    assert values(events) == [b"before", b"after"]


def test_messages_of_one_partition_keep_their_order(
    client: txnkv.Client, events: txnkv.Topic, messages: Messages
) -> None:
    """All shapes in turn, over several flushes: the order of the calls is that of the offsets."""
    shapes: list[dict[str, Any]] = [
        {}, {"key": b"k"}, {"headers": {"a": b"b"}}, {"timestamp": WHEN}, {"key": "t"},
    ]  # fmt: skip
    with client.transaction() as txn:
        for n in range(60):
            txn.send(events, b"%d" % n, partition=1, **shapes[n % len(shapes)])
            if n % 13 == 0:
                txn.flush()
    found = messages(events)
    assert [message.value for message in found] == [b"%d" % n for n in range(60)]
    assert [message.offset for message in found] == list(range(60))
    assert [message.key for message in found[:5]] == [None, b"k", None, None, b"t"]


def test_messages_of_one_key_meet_in_one_partition(
    client: txnkv.Client, events: txnkv.Topic, messages: Messages
) -> None:
    """Whatever way they come: one by one, many at once, as Arrow."""
    keys = [b"key %d" % n for n in range(40)]
    for key in keys:
        with client.transaction() as txn:
            txn.send(events, b"one", key)
    with client.transaction() as txn:
        for key in keys:
            txn.send(events, b"many", key)
        txn.send_batch(events, pa.table({"value": ["arrow"] * 40, "key": keys}))
    found = messages(events)
    assert len(found) == 120
    places = {key: {m.partition for m in found if m.key == key} for key in keys}
    assert all(len(place) == 1 for place in places.values())
    assert {number for place in places.values() for number in place} == {0, 1, 2}


def test_where_keys_go_is_frozen(
    client: txnkv.Client, events: txnkv.Topic, messages: Messages
) -> None:
    """A program of another version must find the messages of a key where they are."""
    with client.transaction() as txn:
        for n in range(12):
            txn.send(events, b"", key=b"%d" % n)
    found = {message.key: message.partition for message in messages(events)}
    assert [found[b"%d" % n] for n in range(12)] == [2, 1, 0, 1, 2, 1, 0, 2, 1, 2, 0, 0]


def test_messages_that_say_nothing_go_together_and_elsewhere_the_next_time(
    client: txnkv.Client, events: txnkv.Topic, messages: Messages
) -> None:
    session = client.new_session()
    for turn in range(3):
        for _ in range(5):
            session.send(events, b"%d" % turn)
        session.flush()
    places = [{m.partition for m in messages(events) if m.value == b"%d" % t} for t in range(3)]
    assert sorted(number for place in places for number in place) == [0, 1, 2]
    session.close()


def test_keyless_and_placed_messages_in_one_flush(
    client: txnkv.Client, events: txnkv.Topic, messages: Messages
) -> None:
    with client.transaction() as txn:
        for n in range(30):
            txn.send(events, b"none")
            txn.send(events, b"key", key=b"%d" % n)
            txn.send(events, b"placed", key=b"%d" % n, partition=n % 3)
    found = messages(events)
    assert len({m.partition for m in found if m.value == b"none"}) == 1
    assert [m.key for m in found if m.value == b"placed" and m.partition == 1] == [
        b"%d" % n for n in range(1, 30, 3)
    ]


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_large_messages_come_back_whole(
    client: txnkv.Client, values: Values, messages: Messages, compression: str | None
) -> None:
    topic = client.create_topic("large", compression=compression)
    large = bytes(range(256)) * 13_000
    with client.transaction() as txn:
        txn.send(topic, b"before")
        txn.send(topic, large, key=b"k", headers={"h": b"v"}, timestamp=WHEN)
        txn.send(topic, b"after")
    with client.new_session() as session:
        session.send(topic, large)
    assert values(topic) == [b"before", large, b"after", large]
    found = messages(topic)[1]
    assert (found.key, found.headers, found.timestamp) == (b"k", [("h", b"v")], WHEN)


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("bulk", [True, False])
def test_much_at_once_outside_of_a_transaction(
    client: txnkv.Client, messages: Messages, partitions: int, bulk: bool
) -> None:
    """To one partition it is appended in one piece, to several in a transaction of its own."""
    topic = client.create_topic("much", partitions=partitions)
    data = {"value": [b"%06d" % n * 30 for n in range(20_000)]}
    data |= {"key": [b"%d" % n for n in range(20_000)]} if partitions > 1 else {}
    with client.new_session() as session:
        if bulk:
            assert session.send_batch(topic, pa.table(data)).sent == 20_000
        else:
            for n, value in enumerate(data["value"]):
                session.send(topic, value, data["key"][n] if partitions > 1 else None)
            assert session.flush().sent == 20_000
    found = messages(topic)
    assert sorted(m.value for m in found if m.value is not None) == data["value"]
    assert {m.txn_id is None for m in found} == {partitions == 1}
    for number in range(partitions):
        own = [m.value for m in found if m.partition == number]
        assert own == sorted(filter(None, own))


# -- in bulk ---------------------------------------------------------------------------

PAIRS = pa.list_(pa.struct([("name", pa.string()), ("value", pa.binary())]))


@pytest.mark.parametrize(
    "data",
    [
        pa.table({"value": pa.array([b"a", None, b"c"]), "key": ["x", None, "z"]}),
        pa.record_batch({"value": pa.array(["a", None, "c"]), "key": pa.array([b"x", None, b"z"])}),
        pa.table({"value": pa.array(["a", None, "c"], pa.large_string()),
                  "key": pa.array(["x", None, "z"]).dictionary_encode()}),
        pa.table({"key": pa.array(["-", "x", None, "z"]).slice(1),
                  "value": pa.chunked_array([["a"], [None, "c"]])}),
        pa.table({"value": pa.array([b"a", None, b"c"], pa.binary_view()),
                  "key": pa.array([b"x", None, b"z"], pa.large_binary())}),
    ],
    ids=["table", "batch", "other types", "sliced", "views"],
)  # fmt: skip
def test_arrow_data_in_many_dresses(client: txnkv.Client, messages: Messages, data: Any) -> None:
    topic = client.create_topic("one")
    with client.transaction() as txn:
        assert txn.send_batch(topic, data).sent == 3
    assert [(m.value, m.key) for m in messages(topic)] == [
        (b"a", b"x"),
        (None, None),
        (b"c", b"z"),
    ]


def test_arrow_data_with_all_columns(
    client: txnkv.Client, events: txnkv.Topic, messages: Messages
) -> None:
    data = pa.table(
        {
            "value": ["a", "b", "c"],
            "headers": pa.array([[{"name": "h", "value": b"v"}], None, []], PAIRS),
            "timestamp": pa.array([WHEN, None, WHEN], pa.timestamp("ns", "Europe/Paris")),
            "partition": pa.array([2, 2, 2], pa.uint8()),
        }
    )
    with client.new_session() as session:
        assert session.send_batch("events", data).sent == 3
    found = messages(events)
    assert [m.headers for m in found] == [[("h", b"v")], [], []]
    assert [m.timestamp == WHEN for m in found] == [True, False, True]
    assert [m.id for m in found] == [txnkv.MessageId(2, n) for n in range(3)]
    assert all(m.txn_id is None for m in found)


def test_what_a_reader_gives_can_be_sent_on(
    client: txnkv.Client, events: txnkv.Topic, messages: Messages
) -> None:
    other = client.create_topic("other", partitions=3)
    with client.transaction() as txn:
        for n in range(20):
            txn.send(events, b"%d" % n, key=b"%d" % n, headers={"n": b"%d" % n}, timestamp=WHEN)
    with events.consumer() as consumer, client.transaction() as txn:
        batch = consumer.poll_batch(timeout=0)
        wanted = ["partition", "timestamp", "key", "value", "headers"]
        assert txn.send_batch(other, batch.select(wanted)).sent == 20
    sent, found = messages(events), messages(other)
    assert [(m.id, m.value, m.key, m.headers, m.timestamp) for m in sent] == [
        (m.id, m.value, m.key, m.headers, m.timestamp) for m in found
    ]


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (pa.table({"key": ["a"]}), txnkv.SchemaError),
        (pa.table({"value": [1]}), txnkv.SchemaError),
        (pa.table({"value": ["a"], "key": [1.5]}), txnkv.SchemaError),
        (pa.table({"value": ["a"], "extra": ["b"]}), txnkv.SchemaError),
        (pa.Table.from_arrays([pa.array(["a"])] * 2, ["value", "value"]), txnkv.SchemaError),
        (pa.table({"value": ["a"], "timestamp": [datetime(2026, 1, 1)]}), txnkv.SchemaError),
        (pa.table({"value": ["a"], "timestamp": [5]}), txnkv.SchemaError),
        (pa.table({"value": ["a"], "headers": [5]}), txnkv.SchemaError),
        (pa.table({"value": ["a"], "headers": [b"nonsense"]}), txnkv.SchemaError),
        (pa.table({"value": ["a"], "headers": pa.array([[{"name": None, "value": b""}]], PAIRS)}),
         txnkv.SchemaError),
        (pa.table({"value": ["a"], "partition": ["0"]}), txnkv.SchemaError),
        (pa.table({"value": ["a", "b"], "partition": [0, 3]}), ValueError),
        (pa.table({"value": ["a", "b"], "partition": [0, -1]}), ValueError),
        (5, TypeError),
        ([b"a"], TypeError),
    ],
)  # fmt: skip
def test_data_that_does_not_fit_is_refused_whole(
    client: txnkv.Client, events: txnkv.Topic, values: Values, data: Any, error: type[Exception]
) -> None:
    with client.transaction() as txn:
        txn.send(events, b"before", partition=0)
        with pytest.raises(error):
            txn.send_batch(events, data)
        txn.send(events, b"after", partition=0)
    assert values(events) == [b"before", b"after"]


def test_no_messages_at_all(client: txnkv.Client, events: txnkv.Topic, values: Values) -> None:
    with client.transaction() as txn:
        assert txn.send_batch(events, pa.table({"value": pa.array([], pa.binary())})).sent == 0
    assert txn.commit() == txn.snapshot
    assert values(events) == []


def test_a_stream_is_sent_as_it_comes(
    client: txnkv.Client, events: txnkv.Topic, values: Values
) -> None:
    schema = pa.schema([("value", pa.string()), ("partition", pa.int32())])

    def batches() -> Any:
        for n in range(5):
            yield pa.record_batch([[f"{n}"] * 3, [0] * 3], schema=schema)

    with client.transaction() as txn:
        txn.send(events, b"first", partition=0)
        reader = pa.RecordBatchReader.from_batches(schema, batches())
        assert txn.send_batch(events, reader).sent == 15
    assert values(events) == [b"first"] + [b"%d" % n for n in range(5) for _ in range(3)]


def test_polars_and_pandas(client: txnkv.Client, values: Values) -> None:
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    topic = client.create_topic("one")
    with client.transaction() as txn:
        txn.send_batch(topic, polars.DataFrame({"value": ["a", "b"]}))
        txn.send_batch(topic, pandas.DataFrame({"value": ["c"], "key": ["k"]}))
    assert values(topic) == [b"a", b"b", b"c"]


# -- sessions --------------------------------------------------------------------------


def test_flush_says_what_was_sent(make: Any, client: txnkv.Client, values: Values) -> None:
    topic = client.create_topic("one")
    client.create_table("t", txnkv.Schema({"id": "int64"}, primary_key=["id"]))
    session, end = make()
    session.send(topic, b"a")
    session.send(topic, b"b", headers={"h": b"v"})
    session.insert("t", {"id": 1})
    assert session.has_pending
    result = session.flush()
    assert (result.sent, result.inserted, result.acked) == (2, 1, 0)
    assert session.flush() == txnkv.WriteResult()
    assert not session.has_pending
    end()
    assert values(topic) == [b"a", b"b"]


def test_each_call_is_a_flush_in_auto_sync(make: Any, client: txnkv.Client, values: Values) -> None:
    topic = client.create_topic("one")
    session, end = make("auto_sync")
    session.send(topic, b"a")
    assert not session.has_pending
    session.send(topic, b"b")
    end()
    assert values(topic) == [b"a", b"b"]


def test_a_thread_flushes_in_auto_background(
    make: Any, client: txnkv.Client, values: Values, until: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("txnkv.transaction.session_buffer._BACKGROUND_ROWS", 10)
    topic = client.create_topic("one")
    session, end = make("auto_background")
    for n in range(10):
        session.send(topic, b"%d" % n)
    until(lambda: not session.has_pending)
    session.send(topic, b"last")
    session.flush()
    end()
    assert values(topic) == [b"%d" % n for n in range(10)] + [b"last"]


def test_a_closed_session_sends_nothing_more(make: Any, client: txnkv.Client) -> None:
    topic = client.create_topic("one")
    session, _ = make()
    session.send(topic, b"a")
    session.close()
    with pytest.raises(txnkv.ClosedError):
        session.send(topic, b"b")
    with pytest.raises(txnkv.ClosedError):
        session.send_batch(topic, pa.table({"value": ["b"]}))
    assert session.has_pending is False


def test_a_session_left_by_an_exception_sends_nothing(
    client: txnkv.Client, events: txnkv.Topic, values: Values
) -> None:
    def leave() -> None:
        with client.new_session() as session:
            session.send(events, b"a")
            raise KeyError

    with pytest.raises(KeyError):
        leave()
    assert values(events) == []


@pytest.mark.parametrize("point", ["log.written", "log.durable"])
def test_a_flush_that_breaks_off_neither_loses_nor_doubles(
    client: txnkv.Client, events: txnkv.Topic, values: Values, point: str
) -> None:
    """The session finds out whether its commit came through: the messages go once."""
    session = client.new_session()
    session.send(events, b"a", partition=0)
    session.send(events, b"b", partition=1)
    arm(point, "error")
    if point == "log.written":
        with pytest.raises(txnkv.UnavailableError, match="Nothing was written"):
            session.flush()
    else:
        assert session.flush().sent == 2
    disarm()
    session.send(events, b"c", partition=0)
    assert session.flush().sent == (3 if point == "log.written" else 1)
    assert values(events) == [b"a", b"c", b"b"]
    session.close()


def test_a_client_that_reads_only_takes_no_part(
    client: txnkv.Client, connect: Callable[..., txnkv.Client]
) -> None:
    """Also beside one in the same process that writes, and shares the store with it."""
    client.create_topic("t")
    reader = connect(read_only=True)
    with pytest.raises(txnkv.NotSupportedError, match="read_only=True"):
        reader.topic("t").subscribe("s")
    with pytest.raises(txnkv.NotSupportedError, match="read_only=True"):
        reader.topic("t").producer("p")
