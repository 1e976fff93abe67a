"""Groups of Kafka's clients and of programs of the store: one kind of members after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
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


def test_offsets_in_a_transaction_are_of_the_topic_that_was_read(
    store: txnkv.Client, programs: Programs
) -> None:
    """One was dropped, another has its name: its first messages were taken for worked on."""
    topic = store.create_topic("t")
    with store.transaction() as txn:
        txn.send(topic, b"a")
        txn.send(topic, b"b")
    consumer = programs.consumer()
    consumer.subscribe(["t"])
    take(consumer, 2)
    store.create_topic("out")
    producer = programs.producer(transactional_id="x")
    producer.init_transactions(PATIENCE)
    producer.begin_transaction()
    producer.produce("out", b"both")
    positions = consumer.position(consumer.assignment())
    producer.send_offsets_to_transaction(positions, consumer.consumer_group_metadata(), PATIENCE)
    store.drop_topic("t")
    store.create_topic("t")
    producer.commit_transaction(PATIENCE)
    assert [m.value for m in store.topic("out").consumer().poll(timeout=0)] == [b"both"]
    assert store.table("kafka_offsets").count() == 0
    programs.leave(consumer)


def _drop(store: txnkv.Client) -> None:
    store.drop_table("kafka_offsets")


def _rename(store: txnkv.Client) -> None:
    store.rename_table("kafka_offsets", "aside")


def _alter(store: txnkv.Client) -> None:
    store.table("kafka_offsets").alter(add={"note": "string?"})


@pytest.mark.parametrize(("change", "expected"), [(_drop, b"a"), (_rename, b"a"), (_alter, b"b")])
def test_the_table_of_offsets_is_changed_beside_the_server(
    store: txnkv.Client,
    programs: Programs,
    change: Callable[[txnkv.Client], None],
    expected: bytes,
) -> None:
    """No group got an answer any more, or it went on in a table apart."""
    topic = store.create_topic("t")
    with store.transaction() as txn:
        txn.send(topic, b"a")
        txn.send(topic, b"b")

    def next_one() -> bytes:
        consumer = programs.consumer()
        consumer.subscribe(["t"])
        (found,) = take(consumer, 1)
        consumer.commit(found, asynchronous=False)
        programs.leave(consumer)
        row = store.table("kafka_offsets").get(("g", "t", 0))
        assert row is not None
        assert row["offset"] == found.offset() + 1
        return bytes(found.value())

    assert next_one() == b"a"
    change(store)
    assert next_one() == expected
    with store.consumer(topic, group="g") as member:
        assert len(member.poll(timeout=0)) == (expected == b"a")


def test_numbers_of_producers_are_never_given_again(
    store: txnkv.Client, programs: Programs
) -> None:
    """Logs remember batches by them: those of another were taken for duplicates of its own."""
    topic = store.create_topic("t")
    for value in (b"a", b"b"):
        producer = programs.producer(enable_idempotence=True)
        producer.produce("t", value)
        producer.flush(PATIENCE)
        producer = programs.producer(transactional_id="x")
        producer.init_transactions(PATIENCE)
        producer.begin_transaction()
        producer.produce("t", value)
        producer.commit_transaction(PATIENCE)
        store.drop_table("transaction_names")
    assert [m.value for m in topic.consumer().poll(timeout=0)] == [b"a", b"a", b"b", b"b"]


def test_a_name_whose_row_is_gone_is_written_again(store: txnkv.Client, programs: Programs) -> None:
    store.create_topic("t")
    producer = programs.producer(transactional_id="x")
    producer.init_transactions(PATIENCE)
    for value in (b"a", b"b"):
        producer.begin_transaction()
        producer.produce("t", value)
        producer.commit_transaction(PATIENCE)
        store.drop_table("transaction_names")
    assert store.topic("t").consumer().poll(timeout=0)[1].value == b"b"
