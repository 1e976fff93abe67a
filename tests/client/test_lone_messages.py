"""The first message of a transaction, which waits without a session: as all others, to its user."""

from __future__ import annotations

import random
import re
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from txnkv.storage.faults import arm, disarm

SCHEMA = txnkv.Schema({"id": "int64", "v": "string?"}, primary_key=["id"])
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


READS: dict[str, Then] = {
    "get": lambda txn, table, topic: txn.get(table, 1),
    "get_many": lambda txn, table, topic: txn.get_many(table, [1]),
    "scan": lambda txn, table, topic: list(txn.scan(table)),
    "get_by": lambda txn, table, topic: txn.get_by(table, "v", "a"),
    "flush": lambda txn, table, topic: txn.flush(),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize(
    "op", ["insert", "insert_ignore", "upsert", "update", "update_ignore", "delete_ignore"]
)
@pytest.mark.parametrize("there", [False, True])
def test_rows_that_wait_beside_it_are_written_without_it(
    store_path: Path, op: str, read: str, there: bool, values: Values
) -> None:
    """Those that take more than a look wait until a read, which leaves the message where it is."""
    with txnkv.connect(store_path) as client:
        table = client.create_table("t", SCHEMA)
        client.create_index("t", ["v"])
        client.create_topic("e")
        if there or op == "update":
            table.insert((1, "x"))
    with txnkv.connect(store_path) as client:
        table, topic = client.table("t"), client.topic("e")
        if there and op == "insert":
            table.delete(1)
        with client.transaction() as txn:
            txn.send(topic, b"a")
            getattr(txn, op)(table, 1 if op == "delete_ignore" else (1, "a"))
            READS[read](txn, table, topic)
        assert values(topic) == [b"a"]


@pytest.mark.parametrize("then", ["commit", "flush", "get"])
def test_a_bound_method_sends_in_order(
    client: txnkv.Client, table: txnkv.Table, topic: txnkv.Topic, values: Values, then: str
) -> None:
    with client.transaction() as txn:
        send = txn.send
        for number in range(5):
            send(topic, b"%d" % number)
        if then != "commit":
            READS[then](txn, table, topic)
    assert values(topic) == [b"%d" % number for number in range(5)]


def test_threads_that_share_a_transaction(
    client: txnkv.Client, topic: txnkv.Topic, values: Values
) -> None:
    """Whoever of them sends first."""
    for _ in range(30):
        together = threading.Barrier(3)
        with client.transaction() as txn, ThreadPoolExecutor(3) as threads:

            def send(first: int, to: Any = txn, at: Any = together) -> None:
                at.wait()
                for number in range(first, first + 3):
                    to.send(topic, b"%d" % number)

            list(threads.map(send, (0, 3, 6)))
            assert txn.flush().sent == 9
    found = [int(value or b"") for value in values(topic)]
    assert sorted(found) == sorted([*range(9)] * 30)


class Interrupted(BaseException):
    """Raised by a handler."""


def test_interruptions_of_the_second_send(
    client: txnkv.Client, topic: txnkv.Topic, values: Values
) -> None:
    """The first message is in its buffer, whatever becomes of the second; and goes before it."""
    chance = random.Random(7)

    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(300):
            txn = client.new_transaction()
            txn.send(topic, b"a")
            with suppress(Interrupted):
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, 5e-5))
                txn.send(topic, b"b")
                while True:
                    pass
            txn.send(topic, b"c")
            txn.commit()
    finally:
        signal.signal(signal.SIGALRM, before)
    found = b"".join(value or b"" for value in values(topic))
    assert re.fullmatch(b"(ab?c){300}", found)


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
