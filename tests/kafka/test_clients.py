"""librdkafka's client, as it is: messages, transactions, groups, topics."""

from __future__ import annotations

import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import txnkv
from txnkv.cli.serve import without_names
from txnkv.kafka import KafkaServer
from txnkv.server import Users, add_user

pytest.importorskip("confluent_kafka", exc_type=ImportError)

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic

PATIENCE = 60.0


class Programs:
    """Clients of one server, closed at the end."""

    def __init__(self, server: KafkaServer) -> None:
        self.server = server
        self._consumers: list[Any] = []

    def options(self, **more: Any) -> dict[str, Any]:
        found = {"bootstrap.servers": f"127.0.0.1:{self.server.port}"}
        return found | {key.replace("_", "."): value for key, value in more.items()}

    def producer(self, **more: Any) -> Any:
        return Producer(self.options(linger_ms=0, **more))

    def consumer(self, group: str = "g", **more: Any) -> Any:
        own = {"auto_offset_reset": "earliest", "enable_auto_commit": False, "group_id": group}
        made = Consumer(self.options(**(own | more)))
        self._consumers.append(made)
        return made

    def admin(self) -> Any:
        return AdminClient(self.options())

    def leave(self, consumer: Any) -> None:
        self._consumers.remove(consumer)
        consumer.close()

    def close(self) -> None:
        for each in self._consumers:
            each.close()


@pytest.fixture
def programs(server: KafkaServer) -> Iterator[Programs]:
    made = Programs(server)
    yield made
    made.close()


def take(consumer: Any, count: int) -> list[Any]:
    """Poll until there are so many messages."""
    found: list[Any] = []
    until = time.monotonic() + PATIENCE
    while len(found) < count and time.monotonic() < until:
        message = consumer.poll(0.1)
        if message is not None:
            assert message.error() is None, message.error()
            found.append(message)
    assert len(found) == count
    return found


def send(producer: Any, topic: str, *values: bytes, **more: Any) -> list[int]:
    """Produce, and return the offsets."""
    offsets: list[int] = []

    def told(error: Any, message: Any) -> None:
        assert error is None, error
        offsets.append(message.offset())

    for value in values:
        producer.produce(topic, value, on_delivery=told, **more)
    assert producer.flush(PATIENCE) == 0
    return offsets


@pytest.mark.parametrize(
    ("codec", "idempotent"),
    [("none", False), *((codec, True) for codec in ("none", "gzip", "snappy", "lz4", "zstd"))],
)
def test_messages_both_ways(
    store: txnkv.Client, programs: Programs, codec: str, idempotent: bool
) -> None:
    topic = store.create_topic("t")
    producer = programs.producer(compression_type=codec, enable_idempotence=idempotent)
    values = [b"value %d " % number * 20 for number in range(500)]
    assert send(producer, "t", *values[:300], key=b"k", headers=[("h", b"1"), ("g", b"")]) == [
        *range(300)
    ]
    with store.transaction() as txn:
        for value in values[300:]:
            txn.send(topic, value, headers=[("from", b"python")])
    here = [message for _ in range(2) for message in topic.consumer().poll(max_messages=500)][:500]
    assert [message.value for message in here] == values
    assert here[0].key == b"k"
    assert here[0].headers == [("h", b"1"), ("g", b"")]
    consumer = programs.consumer()
    consumer.assign([TopicPartition("t", 0, OFFSET_BEGINNING)])
    there = take(consumer, 500)
    assert [message.value() for message in there] == values
    assert [message.offset() for message in there] == [*range(500)]
    assert there[0].headers() == [("h", b"1"), ("g", b"")]
    assert there[0].timestamp()[1] == int(here[0].timestamp.timestamp() * 1000)
    assert there[400].headers() == [("from", b"python")]
    assert there[400].key() is None


def test_no_answer_is_asked_for(store: txnkv.Client, programs: Programs) -> None:
    topic = store.create_topic("t")
    producer = programs.producer(acks="0")
    producer.produce("t", None, b"deleted")
    producer.produce("t", b"")
    assert producer.flush(PATIENCE) == 0
    consumer = topic.consumer()
    found = consumer.poll(timeout=PATIENCE) + consumer.poll(timeout=1.0)
    assert [(message.key, message.value) for message in found] == [(b"deleted", None), (None, b"")]


def test_transactions(store: txnkv.Client, programs: Programs) -> None:
    topic = store.create_topic("t", partitions=2)
    producer = programs.producer(transactional_id="x")
    producer.init_transactions(PATIENCE)
    for number, commit in enumerate((True, False, True)):
        producer.begin_transaction()
        for partition in range(2):
            producer.produce("t", b"%d" % number, partition=partition)
        if commit:
            producer.commit_transaction(PATIENCE)
        else:
            producer.flush(PATIENCE)
            producer.abort_transaction(PATIENCE)
    consumer = programs.consumer()
    consumer.assign([TopicPartition("t", n, OFFSET_BEGINNING) for n in range(2)])
    found = sorted((m.partition(), m.offset(), m.value()) for m in take(consumer, 4))
    assert found == [(0, 0, b"0"), (0, 4, b"2"), (1, 0, b"0"), (1, 4, b"2")]
    every = programs.consumer(isolation_level="read_uncommitted")
    every.assign([TopicPartition("t", 0, OFFSET_BEGINNING)])
    assert [m.offset() for m in take(every, 3)] == [0, 2, 4]
    assert sorted(m.value for m in topic.consumer().poll()) == [b"0", b"0", b"2", b"2"]
    assert topic.end_offsets() == {0: 6, 1: 6}
    programs.producer(transactional_id="x").init_transactions(PATIENCE)
    producer.begin_transaction()
    producer.produce("t", b"never")
    with pytest.raises(KafkaException, match=r"(?i)fenced"):
        producer.commit_transaction(PATIENCE)


def test_what_is_read_and_what_is_sent_count_once(store: txnkv.Client, programs: Programs) -> None:
    """Read, send and commit the offsets in one transaction; the first try is aborted."""
    store.create_topic("in")
    out = store.create_topic("out")
    send(programs.producer(), "in", b"1", b"2", b"3")
    producer = programs.producer(transactional_id="x")
    producer.init_transactions(PATIENCE)
    for commit in (False, True):
        consumer = programs.consumer()
        consumer.subscribe(["in"])
        found = take(consumer, 3)
        producer.begin_transaction()
        for message in found:
            producer.produce("out", message.value() * 2)
        positions = consumer.position(consumer.assignment())
        producer.send_offsets_to_transaction(
            positions, consumer.consumer_group_metadata(), PATIENCE
        )
        if commit:
            producer.commit_transaction(PATIENCE)
        else:
            producer.abort_transaction(PATIENCE)
        programs.leave(consumer)
    assert [m.value for m in out.consumer().poll()] == [b"11", b"22", b"33"]
    assert store.table("kafka_offsets").get(("g", "in", 0))["offset"] == 3


def test_a_group_shares_partitions(store: txnkv.Client, programs: Programs) -> None:
    store.create_topic("t", partitions=4)
    one, two = (programs.consumer(client_id=name) for name in ("one", "two"))
    one.subscribe(["t"])
    until = time.monotonic() + PATIENCE
    while len(one.assignment()) < 4 and time.monotonic() < until:
        one.poll(0.1)
    two.subscribe(["t"])
    shares: list[set[int]] = []
    while list(map(len, shares)) != [2, 2] and time.monotonic() < until:
        for member in (one, two):
            member.poll(0.1)
        shares = [{each.partition for each in member.assignment()} for member in (one, two)]
    assert [len(share) for share in shares] == [2, 2]
    assert shares[0] | shares[1] == {0, 1, 2, 3}
    producer = programs.producer()
    for partition in range(4):
        producer.produce("t", b"%d" % partition, partition=partition)
    producer.flush(PATIENCE)
    for member, share in zip((one, two), shares, strict=True):
        assert {m.partition() for m in take(member, 2)} == share
        member.commit(asynchronous=False)
    rows = {row["partition"]: row["offset"] for row in store.table("kafka_offsets").scan()}
    assert rows == {0: 1, 1: 1, 2: 1, 3: 1}
    admin = programs.admin()
    (described,) = [
        each.result(PATIENCE) for each in admin.describe_consumer_groups(["g"]).values()
    ]
    assert {member.client_id for member in described.members} == {"one", "two"}
    groups = admin.list_consumer_groups().result(PATIENCE).valid
    assert [group.group_id for group in groups] == ["g"]


def test_topics_of_an_admin(store: txnkv.Client, programs: Programs) -> None:
    admin = programs.admin()
    made = admin.create_topics([NewTopic("t", 3, 1, config={"retention.ms": "60000"})])
    made["t"].result(PATIENCE)
    assert store.topic("t").partitions == 3
    assert set(admin.list_topics(timeout=PATIENCE).topics) == {"t"}
    resource = ConfigResource(ConfigResource.Type.TOPIC, "t")
    (found,) = admin.describe_configs([resource]).values()
    assert found.result(PATIENCE)["retention.ms"].value == "60000"
    cluster = admin.describe_cluster().result(PATIENCE)
    assert [node.id for node in cluster.nodes] == [0]
    admin.delete_topics(["t"])["t"].result(PATIENCE)
    assert store.topics() == []
    with pytest.raises(KafkaException):
        admin.delete_topics(["t"])["t"].result(PATIENCE)


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256"])
def test_who_it_is(
    store: txnkv.Client, serve: Callable[..., KafkaServer], tmp_path: Path, mechanism: str
) -> None:
    topic = store.create_topic("t")
    token = add_user(tmp_path / "users.toml", "ann", "write", ["*"], ["*"])
    programs = Programs(serve(Users(tmp_path / "users.toml")))
    producer = programs.producer(
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism=mechanism,
        sasl_username="ann",
        sasl_password=token,
    )
    send(producer, "t", b"known")
    assert [m.value for m in topic.consumer().poll()] == [b"known"]


@pytest.mark.parametrize("certificate", ["IP:127.0.0.1", "DNS:localhost"], indirect=True)
def test_encrypted(
    store: txnkv.Client,
    serve: Callable[..., KafkaServer],
    tmp_path: Path,
    certificate: tuple[Path, Path],
    request: pytest.FixtureRequest,
) -> None:
    """Who trusts the certificate is served; others, and those that do not encrypt, are not.

    Where it is of a name alone, the broker is told by that name, and the group's coordinator too.
    """
    host = request.node.callspec.params["certificate"].partition(":")[2]
    topic = store.create_topic("t")
    token = add_user(tmp_path / "users.toml", "ann", "write", ["*"], ["*"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    programs = Programs(serve(Users(tmp_path / "users.toml"), tls=context))
    options = {
        "bootstrap_servers": f"{host}:{programs.server.port}",
        "broker_address_family": "v4",
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "PLAIN",
        "sasl_username": "ann",
        "sasl_password": token,
        "ssl_ca_location": str(certificate[0]),
    }
    producer = programs.producer(**options)
    send(producer, "t", b"x" * 900_000, b"known")
    assert [len(m.value) for m in topic.consumer().poll()] == [900_000, 5]
    consumer = programs.consumer(**options)
    consumer.assign([TopicPartition("t", 0, OFFSET_BEGINNING)])
    assert [len(m.value()) for m in take(consumer, 2)] == [900_000, 5]
    consumer.commit(asynchronous=False)
    programs.close()
    plain = options | {"security_protocol": "SASL_PLAINTEXT"}
    stranger = {key: value for key, value in options.items() if key != "ssl_ca_location"}
    for refused in (plain, stranger):
        with pytest.raises(KafkaException):
            programs.producer(**refused, log_level=0).list_topics(timeout=1)


@pytest.mark.parametrize("certificate", ["DNS:localhost"], indirect=True)
def test_names_that_are_not_ascii_are_told_to_nobody(
    serve: Callable[..., KafkaServer],
    certificate: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each was five lines of Python's, before anybody had to say who he is."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", without_names(told.append))
    server = serve(None, tls=context)
    sent = ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), sent, False, "qqqq.example")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    hello = sent.read().replace(b"qqqq", b"\xff\xff\xff\xff")
    with socket.create_connection(("127.0.0.1", server.port)) as channel:
        channel.sendall(hello)
        channel.recv(100)
    assert not told
