"""Topics of cleanup.policy=compact, as Kafka's clients make, fill, describe and read them."""

from __future__ import annotations

from typing import Any

import pytest

import txnkv
from tests import internals
from tests.kafka.test_admin_requests import altered, described
from tests.kafka.test_requests import _add, _begin, _send
from tools.kafka_wire import Wire, batch_of
from txnkv.kafka import KafkaServer
from txnkv.kafka.api_tables import Code

POLICY = "cleanup.policy"


def create(wire: Wire, name: str, **configs: str) -> int:
    told = [{"name": key.replace("_", "."), "value": value} for key, value in configs.items()]
    topic = {
        "name": name, "num_partitions": 1, "replication_factor": 1, "assignments": [],
        "configs": told,
    }  # fmt: skip
    (found,) = wire.ask("CreateTopics", topics=[topic])["topics"]
    return int(found["error_code"])


def test_options(store: txnkv.Client, wire: Wire) -> None:
    assert create(wire, "t", cleanup_policy="compact", delete_retention_ms="5000") == 0
    assert described(wire)[POLICY] == ("compact", False, 1)
    assert described(wire)["delete.retention.ms"] == ("5000", False, 1)
    options = store.topic("t").options
    assert (options["cleanup"], options["tombstone_seconds"]) == ("compact", 5.0)
    both = {"cleanup_policy": "delete, compact", "retention_ms": "7000", "segment_bytes": "1000"}
    assert create(wire, "u", **both, segment_ms="9000") == 0
    found = described(wire, "u")
    assert (found[POLICY][0], found["retention.ms"][0]) == ("compact,delete", "7000")
    assert (found["segment.bytes"][0], found["segment.ms"][0]) == ("1000", "9000")
    for wrong in (
        {"cleanup_policy": "compacted"},
        {"cleanup_policy": "compact", "txnkv_buffer": "sidecar"},
        {"delete_retention_ms": "-1"},
        {"segment_bytes": "much"},
        {"segment_bytes": "0"},
        {"segment_ms": "-1"},
    ):
        assert create(wire, "v", **wrong) == Code.INVALID_CONFIG, wrong
    assert create(wire, "side", txnkv_buffer="sidecar") == 0

    def change(name: str, value: str, kind: int = 0, **body: Any) -> int:
        told = {"name": name, "value": value, "config_operation": kind}
        return altered(wire, "IncrementalAlterConfigs", [told], **body)

    assert change(POLICY, "delete") == 0
    assert described(wire)[POLICY] == ("delete", False, 5)
    for kind, value in ((2, "compact"), (2, "compact"), (3, "delete")):
        assert change(POLICY, value, kind) == 0
        assert described(wire)[POLICY] == ("compact", False, 1)
    assert change(POLICY, "compact", 3) == 0
    assert described(wire)[POLICY] == ("delete", False, 5)
    assert change("retention.ms", "7", 2) == Code.INVALID_CONFIG
    assert change("retention.ms", "60000") == change(POLICY, "compact") == 0
    assert described(wire)[POLICY] == ("compact", False, 1)
    assert described(wire)["retention.ms"][0] == "-1"  # a compacted one keeps what is last
    assert change(POLICY, "compact", resource_name="side") == Code.INVALID_CONFIG
    for name in ("retention.ms", "retention.bytes"):  # it took messages that are their keys' last
        assert change(name, "60000") == change(name, "-1") == change(name, "", 1) == 0
        assert change(name, "60000") == 0
        found = described(wire)
        assert (found[POLICY][0], found[name][0]) == ("compact", "-1")
    assert change("retention.ms", "long") == Code.INVALID_CONFIG
    limit = {"name": "retention.ms", "value": "60000", "config_operation": 0}
    policy = {"name": POLICY, "value": "compact,delete", "config_operation": 0}
    assert altered(wire, "IncrementalAlterConfigs", [limit, policy]) == 0
    assert change("retention.ms", "70000") == 0
    found = described(wire)
    assert (found[POLICY][0], found["retention.ms"][0]) == ("compact,delete", "70000")


def test_messages_without_a_key_are_refused(store: txnkv.Client, wire: Wire) -> None:
    store.create_topic("t", cleanup="compact")
    refused = wire.produce("t", batch_of(b"a", b"b"))
    assert refused["error_code"] == Code.INVALID_RECORD
    assert [each["batch_index"] for each in refused["record_errors"]] == [0, 1]
    who = _begin(wire)
    assert _add(wire, who) == 0
    assert _send(wire, who, 0, b"a")["error_code"] == Code.INVALID_RECORD
    assert store.topic("t").end_offsets() == {0: 0}


def test_reading(store: txnkv.Client, server: KafkaServer) -> None:
    """What is left comes at its offsets, to readers of both levels, up to the end."""
    kafka = pytest.importorskip("confluent_kafka", exc_type=ImportError)
    address = {"bootstrap.servers": f"127.0.0.1:{server.port}"}
    topic = store.create_topic("t", cleanup="compact")
    for number in range(30):  # one by one, and every third of them in vain
        producer = kafka.Producer({**address, "transactional.id": "id", "linger.ms": 0})
        producer.init_transactions()
        producer.begin_transaction()
        producer.produce("t", f"{number}", key=f"{number % 5}")
        producer.flush()
        (producer.abort_transaction if number % 3 == 2 else producer.commit_transaction)()
        if number == 20:
            internals.flush(store)
            store.compact()
    store.compact()
    with topic.consumer() as consumer:
        expected = [(m.offset, m.key, m.value) for m in consumer.poll(timeout=0)]
    assert [int(value) for _, _, value in expected] == [21, 24, 25, 27, 28]
    for level in ("read_committed", "read_uncommitted"):
        own = {"group.id": "g", "isolation.level": level, "enable.partition.eof": True}
        reader = kafka.Consumer({**address, **own, "auto.offset.reset": "earliest"})
        reader.assign([kafka.TopicPartition("t", 0, 0)])
        found = []
        while (message := reader.poll(10)) is not None and not message.error():
            found.append((message.offset(), message.key(), message.value()))
        assert message is not None
        assert message.offset() == topic.end_offsets()[0]
        assert found == expected
        reader.close()
