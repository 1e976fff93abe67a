"""Groups of Kafka's clients and of programs of the store: one kind of members after the other."""

from __future__ import annotations

import time
from typing import Any

import pytest

import txnkv
from tests.kafka.test_clients import PATIENCE, Programs, take
from txnkv.errors import TransactionConflictError
from txnkv.kafka import KafkaServer

pytest.importorskip("confluent_kafka", exc_type=ImportError)

from confluent_kafka import ConsumerGroupState, KafkaError, KafkaException, TopicPartition


@pytest.fixture
def programs(server: KafkaServer) -> Any:
    made = Programs(server)
    yield made
    made.close()


def test_one_kind_goes_on_where_the_other_was(store: txnkv.Client, programs: Programs) -> None:
    topic = store.create_topic("t", partitions=2)
    with store.transaction() as txn:
        for number in range(6):
            txn.send(topic, b"%d" % number, partition=number % 2)
    with store.consumer(topic, group="g") as member:
        found = member.poll(max_messages=3, timeout=0)
        with store.transaction() as txn:
            member.commit(txn)
    consumer = programs.consumer()
    consumer.subscribe(["t"])
    rest = take(consumer, 6 - len(found))
    assert sorted([m.value for m in found] + [m.value() for m in rest]) == [
        b"%d" % number for number in range(6)
    ]
    consumer.commit(asynchronous=False)
    programs.leave(consumer)
    with store.consumer(topic, group="g") as member:
        assert member.poll(timeout=0) == []
        assert member.committed() == {0: 3, 1: 3}


def test_members_of_the_store_go_before_those_of_kafka(
    store: txnkv.Client, programs: Programs
) -> None:
    """They are told so, and what they commit is refused: in a transaction the whole of it."""
    topic = store.create_topic("t")
    with store.transaction() as txn:
        txn.send(topic, b"a")
    late = programs.consumer()
    late.subscribe(["t"])
    assert [m.value() for m in take(late, 1)] == [b"a"]
    producer = programs.producer(transactional_id="x")
    producer.init_transactions(PATIENCE)
    producer.begin_transaction()
    producer.produce("t", b"never")
    with store.consumer(topic, group="g") as member:
        assert [m.value for m in member.poll(timeout=0)] == [b"a"]
        positions = late.position(late.assignment())
        with pytest.raises(KafkaException):
            producer.send_offsets_to_transaction(
                positions, late.consumer_group_metadata(), PATIENCE
            )
        producer.abort_transaction(PATIENCE)
        with pytest.raises(KafkaException):
            late.commit(asynchronous=False)
        programs.leave(late)
        other = programs.consumer()
        other.subscribe(["t"])
        until = time.monotonic() + PATIENCE
        while (found := other.poll(0.1)) is None:
            assert time.monotonic() < until
        assert found.error().code() == KafkaError.INCONSISTENT_GROUP_PROTOCOL
        programs.leave(other)
        with store.transaction() as txn:
            member.commit(txn)
        assert member.committed() == {0: 1}
        admin = programs.admin()
        described = admin.describe_consumer_groups(["g"])["g"].result(PATIENCE)
        assert described.state is ConsumerGroupState.STABLE
        (one,) = described.members
        assert one.client_id == "txnkv"
        assert one.assignment.topic_partitions == [TopicPartition("t", 0)]
        with pytest.raises(KafkaException, match="NON_EMPTY_GROUP"):
            admin.delete_consumer_groups(["g"])["g"].result(PATIENCE)
    admin.delete_consumer_groups(["g"])["g"].result(PATIENCE)
    assert store.table("kafka_offsets").count() == 0


def test_a_transaction_of_kafka_s_and_a_claim_are_one_after_the_other(
    store: txnkv.Client, programs: Programs
) -> None:
    topic = store.create_topic("t")
    with store.transaction() as txn:
        txn.send(topic, b"a")
    consumer = programs.consumer()
    consumer.subscribe(["t"])
    take(consumer, 1)
    producer = programs.producer(transactional_id="x")
    producer.init_transactions(PATIENCE)
    producer.begin_transaction()
    producer.produce("t", b"never")
    positions = consumer.position(consumer.assignment())
    producer.send_offsets_to_transaction(positions, consumer.consumer_group_metadata(), PATIENCE)
    with store.consumer(topic, group="g") as member:
        assert [m.value for m in member.poll(timeout=0)] == [b"a"]
        with pytest.raises(KafkaException):
            producer.commit_transaction(PATIENCE)
        producer.abort_transaction(PATIENCE)
        with store.transaction() as txn:
            member.commit(txn)
        try:
            assert member.poll(timeout=0) == []
        except TransactionConflictError:  # pragma: no cover
            pytest.fail("its position was moved")
