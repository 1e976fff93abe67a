"""Topics and tables in one transaction: what reads and rows decide holds for messages."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import txnkv
from tests import internals
from tools.crash_topics import committed
from tools.topic_contents import partitions


def test_reads_of_a_serializable_transaction_count_where_it_only_sends(
    client: txnkv.Client, table: txnkv.Table, size: str
) -> None:
    events = client.create_topic("events")
    with client.transaction() as txn:
        txn.insert(table, (1, "one"))
    txn = client.new_transaction(isolation="serializable")
    assert txn.get(table, 1) == {"id": 1, "v": "one"}
    txn.send(events, b"it was one")
    txn.flush()
    assert txn.context.stored == (size == "large")
    with client.transaction() as other:
        other.update(table, (1, "two"))
    with pytest.raises(txnkv.TransactionConflictError):
        txn.commit()
    assert committed(client, partitions(client, "events")[0]) == []


@pytest.mark.parametrize("buffer", ["marker", "sidecar"])
def test_a_conflict_of_rows_takes_the_messages_along(
    client: txnkv.Client, table: txnkv.Table, large: None, buffer: str
) -> None:
    events = client.create_topic("events", buffer=buffer)
    with client.transaction() as txn:
        txn.insert(table, (1, "one"))
    first, second = client.new_transaction(), client.new_transaction()
    for txn, word in ((first, "first"), (second, "second")):
        txn.update(table, (1, word))
        txn.send(events, word.encode())
        txn.flush()
    first.commit()
    with pytest.raises(txnkv.TransactionConflictError):
        second.commit()
    assert committed(client, partitions(client, "events")[0]) == [b"first"]


def test_a_store_without_tables_looks_after_its_topics(
    client: txnkv.Client, by_hand: Callable[[txnkv.Client], None]
) -> None:
    events = client.create_topic("events")
    for i in range(3):
        with client.transaction() as txn:
            txn.send(events, b"%d" % i)
    internals.flush(client)
    by_hand(client)
    assert client.stats()["log_commits"] == 0
    assert client.stats()["topics"]["events"]["tail_bytes"] == 0
    assert client.stats()["topics"]["events"]["offsets"] == 3
    assert client.check().partitions == 1
    assert committed(client, partitions(client, "events")[0]) == [b"0", b"1", b"2"]


def test_damage_in_a_log_is_found(
    client: txnkv.Client, connect: Callable[..., txnkv.Client]
) -> None:
    events = client.create_topic("events")
    with client.transaction() as txn:
        txn.send(events, b"all is well")
    internals.flush(client)
    partition = partitions(client, "events")[0]

    def damage(txn: object) -> None:
        log = partition.log
        with txn.cursor(db=partition.environment.db(b"log")) as cursor:  # type: ignore[attr-defined]
            assert cursor.first()
            data = bytearray(cursor.value())
            data[data.index(b"well")] ^= 1
            cursor.put(bytes(cursor.key()), bytes(data))
        assert log is partition.log

    partition.environment.write(damage)
    problems = client.check().problems
    assert len(problems) == 1
    assert problems[0].startswith("topic 'events', partition 0: ")
    client.drop_topic("events")
