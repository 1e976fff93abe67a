"""Errors that a new user meets first: for wrong options, types and paths; and what they say."""

from __future__ import annotations

import inspect
import math
import pickle
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pytest

import txnkv
from txnkv import client as client_room

NAN = math.nan
ID = txnkv.Schema({"id": "int64"}, primary_key=["id"])


# -- paths -----------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["http://store-host:8815", "s3://shop"])
def test_an_address_of_no_server_names_those_there_are(address: str) -> None:
    with pytest.raises(txnkv.NotSupportedError, match=r"grpc://HOST:PORT or grpc\+tls://"):
        txnkv.connect(address)


@pytest.mark.parametrize("path", [":memory:", ""])
def test_a_store_is_a_directory(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="TemporaryDirectory"):
        txnkv.connect(path)
    assert list(tmp_path.iterdir()) == []


# -- schemas ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        (int, "'int64'"), (float, "'float64'"), (str, "'string'"), (bytes, "'binary'"),
        (bool, "'bool'"), (date, "'date32'"), (datetime, "tz=UTC"), (Decimal, "decimal128"),
        (object, "there are bool"), (None, "there are bool"), ([], "there are bool"),
    ],
)  # fmt: skip
def test_python_types_are_no_column_types(given: Any, hint: str) -> None:
    with pytest.raises(txnkv.SchemaError, match=f"column 'id': .* is no column type.*{hint}"):
        txnkv.Schema({"id": given}, primary_key=["id"])


def test_columns_are_a_mapping() -> None:
    with pytest.raises(TypeError, match="mapping of names to types"):
        txnkv.Schema([("id", "int64")], primary_key=["id"])  # type: ignore[arg-type]


def test_an_operator_of_python_is_refused(client: txnkv.Client) -> None:
    table = client.create_table("t", ID)
    with pytest.raises(txnkv.SchemaError, match="'==' is no operator: write '='"):
        table.scan(where=[("id", "==", 1)])


# -- exists_ok -------------------------------------------------------------------------

TABLE = {"id": "int64", "total": "float64?", "note": txnkv.Column("string", default="x")}


@pytest.mark.parametrize(
    ("columns", "key", "by", "words"),
    [
        ({**TABLE, "total": "int64?"}, "id", None, "column 'total' is double\\?, not int64\\?"),
        ({**TABLE, "total": "float64"}, "id", None, "column 'total' is double\\?, not double"),
        ({**TABLE, "note": "string"}, "id", None, "string with default 'x', not string"),
        ({**TABLE, "more": "int8"}, "id", None, "it has no column 'more'"),
        ({"id": "int64"}, "id", None, "has a column 'total'; it has a column 'note'"),
        (dict(reversed(TABLE.items())), "id", None, "columns are in the order id, total, note"),
        (TABLE, ("id", "note"), None, r"primary key is \(id\), not \(id, note\)"),
        (TABLE, "id", txnkv.hash_partition("id", 4), "one tablet, not by hash_partition"),
        (TABLE, "id", txnkv.range_partition("id", [5]), r"not by range_partition\(\['id'\], \["),
    ],
)
def test_exists_ok_names_the_differences_of_tables(
    client: txnkv.Client, columns: Any, key: Any, by: Any, words: str
) -> None:
    client.create_table("t", txnkv.Schema(TABLE, primary_key="id"))
    with pytest.raises(txnkv.TableExistsError, match=words) as caught:
        client.create_table("t", txnkv.Schema(columns, primary_key=key), by, exists_ok=True)
    assert "exists_ok" not in str(caught.value)


def test_exists_ok_takes_a_table_that_was_made_alike(client: txnkv.Client) -> None:
    by = [txnkv.range_partition("id", [5, 10]), txnkv.hash_partition(["id"], 2)]
    made = client.create_table("t", ID, by)
    again = client.create_table("t", ID, list(reversed(by)), exists_ok=True)
    assert again.info == made.info


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"partitions": 3}, "its partitions is 1, not 3"),
        ({"buffer": "sidecar"}, "its buffer is 'marker', not 'sidecar'"),
        ({"retention_seconds": 5.0}, "its retention_seconds is None, not 5.0"),
        ({"retain_unacknowledged": True}, "its retain_unacknowledged is False, not True"),
        ({"compression": "zstd"}, "its compression is None, not 'zstd'"),
        ({"value_schema": {"id": "int64"}}, r"its value_schema is None, not '\(id int64\)'"),
    ],
)
def test_exists_ok_names_the_differences_of_topics(
    client: txnkv.Client, asked: Any, words: str
) -> None:
    client.create_topic("t")
    with pytest.raises(txnkv.TopicExistsError, match=words) as caught:
        client.create_topic("t", exists_ok=True, **asked)
    assert "exists_ok" not in str(caught.value)


# -- row errors ------------------------------------------------------------------------


def _insert_in_a_block(client: txnkv.Client, *, flush: bool) -> None:
    with client.transaction() as txn:
        txn.insert("t", (1,))
        txn.insert("t", (2,))
        if flush:
            txn.flush()


def test_row_errors_say_what_became_of_the_others(client: txnkv.Client) -> None:
    """In a `with` block that rolls everything back the others do not stand."""
    table = client.create_table("t", ID)
    with client.new_session() as session:
        session.insert(table, (1,))
    with pytest.raises(txnkv.RowErrors, match="1 row refused, any others stand: ") as caught:
        client.new_session("auto_sync").insert(table, (1,))
    assert caught.value.txn_id is None
    for flush in (False, True):
        with pytest.raises(txnkv.RowErrors, match="rolled back with all others") as caught:
            _insert_in_a_block(client, flush=flush)
        assert caught.value.txn_id is not None
        assert pickle.loads(pickle.dumps(caught.value)).rolled_back
    txn = client.new_transaction()
    txn.insert(table, (1,))
    txn.insert(table, (2,))
    with pytest.raises(txnkv.RowErrors, match="in the transaction, which is still open"):
        txn.commit()
    txn.commit()
    assert table.count() == 2


def test_row_errors_of_others_are_not_taken_for_the_transactions(client: txnkv.Client) -> None:
    table = client.create_table("t", ID)
    with client.new_session() as session:
        session.insert(table, (1,))
    with pytest.raises(txnkv.RowErrors, match="any others stand"), client.transaction():
        client.new_session("auto_sync").insert(table, (1,))


# -- options are types -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "name", "alias"),
    [
        (txnkv.Client.new_transaction, "isolation", "Isolation"),
        (txnkv.Client.new_transaction, "locking", "Locking"),
        (txnkv.Client.new_session, "flush_mode", "FlushMode"),
        (txnkv.Client.create_topic, "buffer", "Buffer"),
        (txnkv.Session.write, "op", "Operation"),
        (txnkv.Transaction.write, "op", "Operation"),
        (txnkv.Transaction.new_session, "flush_mode", "FlushMode"),
        (txnkv.Topic.consumer, "isolation", "ReadIsolation"),
        (txnkv.Topic.consumer, "order", "Order"),
        (txnkv.Topic.fetch, "isolation", "FetchIsolation"),
        (txnkv.Topic.subscribe, "type", "SubscriptionType"),
    ],
)
def test_options_have_the_types_of_their_words(
    call: Callable[..., Any], name: str, alias: str
) -> None:
    parameter = inspect.signature(call).parameters[name]
    assert parameter.annotation == alias
    assert parameter.default in get_args(getattr(client_room, alias))


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("timeout", lambda c, t: c.new_transaction(timeout="5")),
        ("lock_timeout", lambda c, t: c.new_transaction(lock_timeout=[5])),
        ("attempts", lambda c, t: c.run(lambda txn: None, attempts="5")),
        ("deadline", lambda c, t: c.run(lambda txn: None, deadline="5")),
        ("keep", lambda c, t: c.drop_table("t", keep="5")),
        ("buffer_bytes", lambda c, t: c.new_session(buffer_bytes="5")),
        ("retention_seconds", lambda c, t: c.create_topic("new", retention_seconds="5")),
        ("segment_bytes", lambda c, t: c.create_topic("new", segment_bytes=True)),
        ("retention_seconds", lambda c, t: c.create_topic("new", retention_seconds=False)),
        ("retention_bytes", lambda c, t: t.alter(retention_bytes=False)),
        ("tombstone_seconds", lambda c, t: t.alter(tombstone_seconds=np.False_)),
        ("redelivery_delay", lambda c, t: t.subscribe("s", "shared", redelivery_delay=False)),
        ("timeout", lambda c, t: c.new_transaction(timeout=np.True_)),
        ("deadline", lambda c, t: c.run(lambda txn: None, deadline=False)),
        ("timeout", lambda c, t: t.consumer().poll(timeout="5")),
        ("offset", lambda c, t: t.consumer().seek(0, 0.5)),
        ("timeout", lambda c, t: c.new_transaction(timeout=True)),
        ("lock_timeout", lambda c, t: c.new_transaction(lock_timeout=False)),
        ("attempts", lambda c, t: c.run(lambda txn: None, attempts=1.5)),
        ("cache_bytes", lambda c, t: txnkv.connect("none", cache_bytes=math.inf)),
        ("timeout", lambda c, t: t.subscribe("s").receive(timeout="5")),
        ("offset", lambda c, t: t.fetch(0, None)),
        ("offset", lambda c, t: t.fetch(0, "latest")),
        ("max_bytes", lambda c, t: t.fetch(0, 0, max_bytes="5")),
        ("max_bytes", lambda c, t: t.fetch(0, 0, max_bytes=1e6)),
    ],
)
def test_what_is_no_number_is_named(
    client: txnkv.Client, table: txnkv.Table, what: str, call: Callable[..., object]
) -> None:
    topic = client.create_topic("e")
    with pytest.raises(TypeError, match=f"^{what} is a number"):
        call(client, topic)
    assert (client.tables(), client.topics()) == (["t"], ["e"])


HALF = "a\udcff"
"""Python's text for a byte that is none, of which UTF-8 knows nothing."""


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (ValueError, "timeout is a number of seconds", lambda c, t: t.consumer().poll(timeout=NAN)),
        (ValueError, "timeout is a number", lambda c, t: t.subscribe("s").receive(timeout=NAN)),
        (ValueError, "deadline is None or", lambda c, t: c.run(lambda txn: None, deadline=NAN)),
        (ValueError, "keepalive_time=nan", lambda c, t: txnkv.connect("none", keepalive_time=NAN)),
        (TypeError, "an offset is a number", lambda c, t: t.consumer(start={0: "latest"})),
        (TypeError, "a partition is a number", lambda c, t: t.consumer(start={"0": 1})),
        (TypeError, "an offset is a num", lambda c, t: t.subscribe("s", start={0: "latest"})),
        (
            TypeError,
            "a partition is a number, not the str",
            lambda c, t: t.consumer(partitions=["0"]),
        ),
        (TypeError, "a partition is", lambda c, t: t.subscribe("s", partitions=[0.0])),
        (TypeError, "a time is a Snapshot", lambda c, t: c.snapshot(at=True)),
        (
            TypeError,
            "primary_key is a list",
            lambda c, t: txnkv.Schema({"i": "int8"}, None),
        ),
        (TypeError, "partition_by is a list of", lambda c, t: c.create_table("n", ID, 5)),
        (TypeError, "columns is a list of names", lambda c, t: txnkv.hash_partition(5, 2)),
        (TypeError, "bounds is a list of values", lambda c, t: txnkv.range_partition("id", 5)),
        (ValueError, "a message's value has '.udcff' at 1", lambda c, t: _send(c, t, HALF)),
        (ValueError, "a message's key has", lambda c, t: _send(c, t, "v", HALF)),
        (ValueError, "header's name has", lambda c, t: _send(c, t, "v", headers={HALF: ""})),
        (ValueError, "a table's name has", lambda c, t: c.create_table(HALF, ID)),
        (ValueError, "a topic's name has", lambda c, t: c.create_topic(HALF)),
        (ValueError, "a topic's name has", lambda c, t: c.topic(HALF)),
        (ValueError, "a subscription's name has", lambda c, t: t.subscribe(HALF)),
        (ValueError, "a group's name has", lambda c, t: c.consumer(t, HALF)),
        (ValueError, "a transaction's name has", lambda c, t: c.new_transaction(name=HALF)),
        (ValueError, "an application id has", lambda c, t: c.applied(HALF)),
        (txnkv.SchemaError, "its name has", lambda c, t: txnkv.Schema({HALF: "int8"}, ["i"])),
        (
            txnkv.SchemaError,
            r"^column 'i': 'decimal128\(39,1\)'",
            lambda c, t: txnkv.Schema({"i": "decimal128(39,1)"}, ["i"]),
        ),
    ],
)
def test_what_makes_no_sense_is_named(
    client: txnkv.Client, error: type[Exception], words: str, call: Callable[..., object]
) -> None:
    topic = client.create_topic("e")
    with pytest.raises(error, match=words):
        call(client, topic)
    assert (client.tables(), client.topics()) == ([], ["e"])


def _send(client: txnkv.Client, topic: txnkv.Topic, *given: Any, **options: Any) -> None:
    client.run(lambda txn: txn.send(topic, *given, **options))


def test_times_without_end_are_taken(client: txnkv.Client, tmp_path: Path) -> None:
    client.new_transaction(timeout=1e308).rollback()
    topic = client.create_topic("e")
    with client.consumer(topic, "g", max_poll_seconds=1e300) as member:
        assert member.poll(timeout=0) == []
    assert topic.consumer().poll(timeout=-1e308) == []
    with txnkv.connect(tmp_path / "other", keepalive_time=math.inf) as other:
        other.new_transaction().rollback()


def test_integers_of_numpy_are_integers(client: txnkv.Client, tmp_path: Path) -> None:
    one, two = np.int64(1), np.int64(2)
    topic = client.create_topic("e", partitions=two)
    topic.alter(partitions=np.int64(3))
    client.create_table("t", ID, txnkv.hash_partition("id", two))
    _send(client, topic, "v", partition=one)
    assert topic.fetch(one, np.int64(0)).high_watermark == 1
    for options in ({"start": {one: np.int64(0)}}, {"partitions": np.array([1])}):
        found = topic.consumer(**options).poll(timeout=0)
        assert [(message.partition, message.value) for message in found] == [(1, b"v")]
    now = client.snapshot().timestamp
    assert client.snapshot(at=np.int64(now)).timestamp == now
    txnkv.connect(tmp_path / "other", cache_bytes=np.int64(1 << 20)).close()


@pytest.mark.parametrize("read", ["consumer", "subscribe"])
def test_where_to_read_is_named(client: txnkv.Client, read: str) -> None:
    topic = client.create_topic("e")
    options = {"name": "s"} if read == "subscribe" else {}
    for start in (None, 5, "middle"):
        with pytest.raises(ValueError, match=rf"^start is 'earliest', .* not {start!r}$"):
            getattr(topic, read)(start=start, **options)
    for numbers in (0, 1, "0"):
        with pytest.raises(TypeError, match=r"^partitions is a list of numbers, "):
            getattr(topic, read)(partitions=numbers, **options)


@pytest.mark.parametrize("host", ["here", "elsewhere"], indirect=True)
def test_several_are_given_by_an_iterator(host: str, client: txnkv.Client) -> None:
    table = client.create_table("t", txnkv.Schema({"id": "int64", "v": "int64"}, ["id"]))
    topic = client.create_topic("e", partitions=2)
    with client.transaction() as txn:
        for number in range(4):
            txn.insert(table, (number, number))
        assert txn.get_many(table, iter([2, 1]))["id"].to_pylist() == [2, 1]
    assert table.get_many(key for key in [3]).to_pylist() == [{"id": 3, "v": 3}]
    assert table.count([("id", "in", iter([1, 2, 9]))]) == 2
    assert table.count(where=[("id", ">", 0), ("v", "in", (1, 3))]) == 2
    scan = table.scan(columns=iter(["v"]), where=[("v", "in", iter([1]))])
    for _ in range(2):
        assert list(scan) == scan.to_arrow().to_pylist() == [{"v": 1}]
    assert len(table.diff(0, columns=iter(["id"])).read_all().column_names) == 3
    assert topic.consumer(partitions=iter([1])).partitions == [1]
    topic.subscribe("s", partitions=iter([1])).close()
    assert table.alter(drop=iter(["v"])).names == ["id"]


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("a time is a Snapshot, .* not the Client", lambda c, t: t.scan(snapshot=c).to_arrow()),
        ("timeout is a number of", lambda c, t: c.new_transaction(timeout=True)),
        (
            r"schema is a txnkv.Schema \(see Schema.from_arrow\), not pyarrow.Schema",
            lambda c, t: c.create_table("u", pa.schema([("id", pa.int64())])),
        ),
        ("schema is a txnkv.Schema .*, not dict", lambda c, t: c.create_table("u", {})),
        ("lock_timeout is a num", lambda c, t: c.new_transaction(lock_timeout=True)),
        (
            "txn is a Transaction, not str",
            lambda c, t: c.create_topic("e").subscribe("s").ack(txnkv.MessageId(0, 0), txn="x"),
        ),
        ("a time is a Snapshot, .* not the Client", lambda c, t: t.get(1, snapshot=c)),
        ("a time is a Snapshot, .* not the Client", lambda c, t: list(t.diff(c, None))),
        ("columns is a name or a list of names, not None", lambda c, t: c.create_index(t, None)),
        ("columns is a name or a list of names, not 5", lambda c, t: c.drop_index(t, 5)),
        (
            r"a client is what txnkv.connect\(...\) gives, not str",
            lambda c, t: txnkv.Transaction.deserialize("x", c.new_transaction().serialize()),
        ),
        (r"a client is .* not NoneType", lambda c, t: t.scan().tokens()[0].open(None)),
        (r"a client is .* not str", lambda c, t: t.diff_tokens(0)[0].open("x")),
    ],
)
@pytest.mark.parametrize("host", ["here", "elsewhere"], indirect=True)
def test_what_is_none_is_named(
    host: str, client: txnkv.Client, words: str, call: Callable[..., object]
) -> None:
    table = client.create_table("t", ID)
    table.insert((1,))
    with pytest.raises(TypeError, match=words):
        call(client, table)
