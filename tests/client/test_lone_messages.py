"""The first message of a transaction, which waits without a session: as all others, to its user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from txnkv.storage.faults import arm, disarm

Values = Callable[..., list[bytes | None]]
Then = Callable[[txnkv.Transaction, txnkv.Table, txnkv.Topic], Any]


def _session(txn: txnkv.Transaction, table: txnkv.Table, topic: txnkv.Topic) -> None:
    with txn.new_session() as session:
        session.send(topic, b"b")


BATCH = pa.table({"value": pa.array([b"b"])})
LARGE = b"b" * (2 << 20)
THEN: dict[str, tuple[Then, list[bytes]]] = {
    "nothing": (lambda txn, table, topic: None, [b"a"]),
    "a flush": (lambda txn, table, topic: txn.flush(), [b"a"]),
    "a row": (lambda txn, table, topic: txn.insert(table, (1, "a")), [b"a"]),
    "a read": (lambda txn, table, topic: txn.get_many(table, [1]), [b"a"]),
    "more": (lambda txn, table, topic: txn.send(topic, b"b"), [b"a", b"b"]),
    "headers": (lambda txn, table, topic: txn.send(topic, b"b", headers={"h": b""}), [b"a", b"b"]),
    "a batch": (lambda txn, table, topic: txn.send_batch(topic, BATCH), [b"a", b"b"]),
    "a token": (lambda txn, table, topic: txn.serialize(), [b"a"]),
    "growth": (
        lambda txn, table, topic: txn.send(topic, b"b" * (2 << 20)),
        [b"a", b"b" * (2 << 20)],
    ),
}


@pytest.mark.parametrize("then", THEN)
@pytest.mark.parametrize("given", [{}, {"headers": {"h": b"1"}}, {"partition": 0}], ids=str)
def test_what_comes_behind_it(
    client: txnkv.Client,
    table: txnkv.Table,
    topic: txnkv.Topic,
    values: Values,
    then: str,
    given: dict[str, Any],
) -> None:
    do, wanted = THEN[then]
    with client.transaction() as txn:
        txn.send(topic, b"a", **given)
        do(txn, table, topic)
        assert values(topic) == []
    assert values(topic) == wanted


def test_another_session_goes_before_or_behind(
    client: txnkv.Client, table: txnkv.Table, topic: txnkv.Topic, values: Values
) -> None:
    with client.transaction() as txn:
        txn.send(topic, b"a")
        _session(txn, table, topic)
    assert sorted(filter(None, values(topic))) == [b"a", b"b"]


def test_messages_that_say_nothing_go_to_one_partition(client: txnkv.Client) -> None:
    """Also the first, however many partitions there are."""
    topic = client.create_topic("wide", partitions=16)
    for _ in range(20):
        with client.transaction() as txn:
            txn.send(topic, b"a")
            txn.send(topic, b"b")
    found = topic.consumer().poll(max_messages=100, timeout=0)
    by_partition: dict[int, list[bytes | None]] = {}
    for message in found:
        by_partition.setdefault(message.partition, []).append(message.value)
    assert all(some == [b"a", b"b"] * (len(some) // 2) for some in by_partition.values())
    assert len(found) == 40


def test_keys_go_where_they_always_go(client: txnkv.Client) -> None:
    topic = client.create_topic("wide", partitions=16)
    keys = [b"%d" % n for n in range(40)]
    for key in keys:
        with client.transaction() as txn:
            txn.send(topic, b"", key)
    with client.transaction() as txn:
        for key in keys:
            txn.send(topic, b"", key)
    places: dict[bytes | None, set[int]] = {}
    for message in topic.consumer().poll(max_messages=100, timeout=0):
        places.setdefault(message.key, set()).add(message.partition)
    assert [len(places[key]) for key in keys] == [1] * len(keys)


def test_a_flush_counts_it(client: txnkv.Client, topic: txnkv.Topic) -> None:
    subscription = topic.subscribe("s")
    with client.transaction() as txn:
        txn.send(topic, b"0")
    txn = client.new_transaction()
    txn.send(topic, b"a")
    txn.ack(subscription, subscription.receive(timeout=5))
    told = txn.flush()
    assert (told.sent, told.acked) == (1, 1)
    assert (txn.flush().sent, txn.flush().acked) == (0, 0)
    txn.commit()
    assert subscription.receive(timeout=5).value == b"a"


def test_it_waits_for_the_commit(client: txnkv.Client, topic: txnkv.Topic, values: Values) -> None:
    txn = client.new_transaction()
    txn.send(topic, b"a")
    with pytest.raises(txnkv.InvalidTxnStateError, match="Flush it first"):
        txn.start_commit()
    txn.commit_async().result(60)
    assert values(topic) == [b"a"]
    with pytest.raises(txnkv.InvalidTxnStateError):
        txn.send(topic, b"b")


@pytest.mark.parametrize("end", ["rollback", "exception", "timeout"])
def test_it_goes_with_its_transaction(
    client: txnkv.Client, topic: txnkv.Topic, values: Values, end: str
) -> None:
    txn = client.new_transaction(timeout=1e-6 if end == "timeout" else 60)
    if end == "timeout":
        with pytest.raises(txnkv.TransactionTimedOutError):
            txn.send(topic, b"a")
        return
    txn.send(topic, b"a")
    if end == "rollback":
        txn.rollback()
    else:
        with pytest.raises(KeyError), txn:
            raise KeyError
    assert values(topic) == []


def test_a_topic_that_is_dropped(client: txnkv.Client, table: txnkv.Table) -> None:
    topic = client.create_topic("gone")
    txn = client.new_transaction()
    txn.insert(table, (1, "a"))
    txn.send(topic, b"a")
    client.drop_topic("gone")
    with pytest.raises(txnkv.TopicNotFoundError):
        txn.commit()
    assert txn.state is txnkv.TxnState.ABORTED
    assert table.get(1) is None


def test_partitions_that_come_meanwhile(client: txnkv.Client, values: Values) -> None:
    topic = client.create_topic("grows")
    txn = client.new_transaction()
    txn.send(topic, b"a", b"key")
    topic.alter(partitions=8)
    txn.commit()
    assert values(client.topic("grows")) == [b"a"]


def test_a_commit_for_which_there_is_no_room_is_made_again(
    client: txnkv.Client, topic: txnkv.Topic, values: Values
) -> None:
    txn = client.new_transaction()
    txn.send(topic, b"a")

    def full() -> None:
        raise txnkv.StorageFullError("no room")

    arm("log.written", full)
    with pytest.raises(txnkv.StorageFullError):
        txn.commit()
    disarm()
    txn.commit()
    assert values(topic) == [b"a"]
