"""Handles of what was dropped, of what has another name now, and of another store."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from txnkv.errors import TableNotFoundError, TopicNotFoundError
from txnkv.server import Server

SCHEMA = txnkv.Schema({"id": "int64"}, ["id"])


@pytest.fixture
def other(tmp_path: Path, host: str) -> Iterator[txnkv.Client]:
    """A client of a second store, where ids are those of the first."""
    with ExitStack() as stack:
        client = stack.enter_context(txnkv.connect(tmp_path / "other"))
        if host == "elsewhere":
            server = stack.enter_context(closing(Server(client.path, "grpc://127.0.0.1:0")))
            client = stack.enter_context(txnkv.connect(f"grpc://127.0.0.1:{server.port}"))
        yield client


def test_a_handle_of_what_was_dropped_drops_no_namesake(client: txnkv.Client) -> None:
    table, topic = client.create_table("t", SCHEMA), client.create_topic("e")
    client.drop_table(table)
    client.drop_topic(topic)
    client.create_table("t", SCHEMA)
    client.create_topic("e")
    with pytest.raises(TableNotFoundError, match="there is no table 't' to drop"):
        client.drop_table(table)
    with pytest.raises(TopicNotFoundError, match="there is no topic 'e' to drop"):
        client.drop_topic(topic)
    client.drop_table(table, missing_ok=True)
    client.drop_topic(topic, missing_ok=True)
    assert (client.tables(), client.topics()) == (["t"], ["e"])
    with pytest.raises(TopicNotFoundError, match="was dropped"):
        client.consumer(topic, group="g")


@pytest.mark.parametrize("namesake", [True, False])
def test_a_handle_is_of_its_table_whatever_the_name(
    connect: Callable[..., txnkv.Client], namesake: bool
) -> None:
    """Over a server another table, which had the name by then, was renamed and lost its index."""
    client, second, third = connect(), connect(), connect()
    table = second.create_table("t", SCHEMA)
    client.rename_table("t", "u")
    there = ["t"] if namesake else []
    new = client.create_table("t", SCHEMA) if namesake else None
    renamed = client.table("u")
    assert client.table(table).name == table.name == "u"
    second.create_index(table, "id")
    third.create_index(table=table, columns=["id"], unique=False, progress=None)
    assert [each.columns for each in renamed.indexes] == [("id",)]
    if new is not None:
        assert new.indexes == []
        client.create_index(new, "id")
    second.drop_index(table, "id")
    assert renamed.indexes == []
    assert new is None or new.indexes
    assert second.rename_table(table, "v").name == table.name == "v"
    assert second.tables() == [*there, "v"]
    client.rename_table(renamed, "w")
    assert (table.schema, table.name) == (SCHEMA, "w")
    second.drop_table(table)
    assert client.tables() == there


@pytest.mark.parametrize("wrong", [None, 5, object()])
def test_what_is_no_handle(client: txnkv.Client, wrong: Any) -> None:
    for ask in (client.table, client.drop_table):
        with pytest.raises(TypeError, match="a table is a name or a Table, not"):
            ask(wrong)
    for ask in (client.topic, client.drop_topic, lambda topic: client.consumer(topic, group="g")):
        with pytest.raises(TypeError, match="a topic is a name or a Topic, not"):
            ask(wrong)


def test_handles_of_another_store_are_refused(client: txnkv.Client, other: txnkv.Client) -> None:
    for each in (client, other):
        each.create_table("t", SCHEMA).insert({"id": 1})
        each.create_topic("e").subscribe("s").close()
        with each.transaction() as txn:
            txn.send("e", "v")
    table, topic = other.table("t"), other.topic("e")
    subscription = topic.subscribe("s")
    message = subscription.receive(timeout=0)
    assert message is not None
    rows, values = pa.table({"id": [2]}), pa.table({"value": [b"w"]})
    asks: list[Callable[[txnkv.Transaction], Any]] = [
        lambda txn: txn.upsert(table, {"id": 1}),
        lambda txn: txn.write(table, rows),
        lambda txn: txn.get(table, 1),
        lambda txn: txn.send(topic, "w"),
        lambda txn: txn.send_batch(topic, values),
        lambda txn: txn.ack(subscription, message),
        lambda txn: txn.ack(subscription.info, message),
        lambda txn: txn.ack_cumulative(pickle.loads(pickle.dumps(subscription.info)), message),
        lambda txn: subscription.ack(message, txn),
        lambda _: client.new_session().ack(subscription, message),
        lambda _: client.new_session().send(topic, "w"),
        lambda _: client.table(table),
        lambda _: client.topic(topic),
        lambda _: client.drop_table(table),
        lambda _: client.rename_table(table, "u"),
        lambda _: client.create_index(table, "id"),
        lambda _: client.drop_index(table, "id"),
        lambda _: client.drop_topic(topic),
        lambda _: client.consumer(topic, group="g"),
        lambda _: client.snapshot().get(table, 1),
        lambda _: list(client.snapshot().scan(table)),
        lambda _: client.table("t").get(1, snapshot=other.snapshot()),
    ]
    for ask in asks:
        txn = client.new_transaction()
        with pytest.raises(ValueError, match=r"is one of the store .*, and this is .*: take "):
            ask(txn)
        txn.rollback()
    assert client.table("t").count() == 1
    assert client.topic("e").end_offsets() == {0: 1}
    assert client.topic("e").subscribe("s").receive(timeout=0) is not None


def test_a_subscription_of_another_store_is_refused_over_a_server(
    client: txnkv.Client, other: txnkv.Client
) -> None:
    """A message of the one was acknowledged for that of the other, which nobody had seen."""
    both = (client, other)
    for each in both:
        each.create_topic("e").subscribe("s", "shared").close()
        with each.transaction() as txn:
            for _ in both:
                txn.send("e", "v")
    with ExitStack() as stack:
        servers = [
            stack.enter_context(closing(Server(each.path, "grpc://127.0.0.1:0"))) for each in both
        ]
        here, there = (
            stack.enter_context(txnkv.connect(f"grpc://127.0.0.1:{each.port}")) for each in servers
        )
        subscription = there.topic("e").subscribe("s", "shared")
        messages = subscription.receive_many(2, timeout=0)
        for wrong in (here, client):
            for given in (subscription, subscription.info):
                with wrong.new_transaction() as txn:
                    with pytest.raises(ValueError, match=r"is one of the store .*, and this"):
                        txn.ack(given, messages[0])
                    txn.rollback()
        for own, message in zip((there, other), messages, strict=True):
            with own.transaction() as txn:
                txn.ack(subscription.info, message)
        assert subscription.lag() == {0: 0}
        assert here.topic("e").subscribe("s", "shared").lag() == {0: 2}


def test_a_snapshot_of_another_client_is_that_one(
    client: txnkv.Client, connect: Callable[..., txnkv.Client]
) -> None:
    """Over a server its number may be that of a snapshot of this client."""
    table = client.create_table(
        "t", txnkv.Schema({"id": "int64", "v": "int64"}, primary_key=["id"])
    )
    other = connect()
    table.insert((1, 1))
    own = client.snapshot()
    table.update((1, 2))
    theirs = other.snapshot()
    table.update((1, 3))
    assert [table.get(1, snapshot=at)["v"] for at in (own, theirs, None)] == [1, 2, 3]
    assert table.scan(snapshot=theirs).to_arrow()["v"].to_pylist() == [2]
    (change,) = table.diff(theirs, other.snapshot()).read_all().to_pylist()
    assert change["v"] == 3
