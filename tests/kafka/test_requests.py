"""Requests one by one: what is no request, sequence numbers, offsets of messages and markers."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tools.kafka_wire import BY_NAME, Seen, Wire, batch_of, request
from txnkv import core
from txnkv.kafka import KafkaServer
from txnkv.kafka.api_tables import Code
from txnkv.kafka.listener import HANDLERS
from txnkv.kafka.wire_codec import MalformedError, read_request
from txnkv.server import Users, add_user

Dial = Callable[[KafkaServer], Wire]

NOBODY: dict[str, Any] = {"transactional_id": None, "producer_id": -1, "producer_epoch": -1}

SAMPLES: dict[str, dict[str, Any]] = {
    "Produce": {
        "transactional_id": "t",
        "topics": [{"name": "t", "partitions": [{"index": 0, "records": batch_of(b"v")}]}],
    },
    "Fetch": {"topics": [{"topic": "t", "partitions": [{"fetch_offset": 0}]}], "rack_id": "r"},
    "Metadata": {"topics": [{"name": "t"}]},
    "JoinGroup": {"group_id": "g", "protocols": [{"name": "range", "metadata": b"m"}]},
    "CreateTopics": {"topics": [{"name": "t", "configs": [{"name": "a", "value": "b"}]}]},
    "OffsetFetch": {"group_id": "g", "groups": [{"group_id": "g", "topics": None}]},
    "TxnOffsetCommit": {"transactional_id": "x", "topics": [{"name": "t", "partitions": [{}]}]},
}


@pytest.mark.parametrize("name", [api.name for api in BY_NAME.values()])
def test_every_request_cut_anywhere_is_refused(name: str) -> None:
    """In each version: cut at each byte, and each byte set to its most; what is left is read or
    refused, with no other error.
    """
    api = BY_NAME[name]
    for version in range(api.first, api.last + 1):
        whole = request(name, version, **SAMPLES.get(name, {}))[4:]
        assert read_request(whole).version == version
        for cut in range(len(whole)):
            with pytest.raises(MalformedError):
                read_request(whole[:cut])
        assert read_request(whole + b"\0").version == version
        for at in range(8, len(whole)):
            for byte in (0x00, 0x7F, 0x80, 0xFF):
                with suppress(MalformedError):
                    read_request(whole[:at] + bytes([byte]) + whole[at + 1 :])


@pytest.mark.parametrize(
    "data",
    [
        b"\x7f\xff\xff\xff",
        b"\xff\xff\xff\xff",
        struct.pack(">ihhi", 8, 999, 0, 1),
        struct.pack(">ihhi", 8, 3, 99, 1),
        struct.pack(">ihhih", 10, 3, 1, 1, 0x7FFF),
        struct.pack(">ihhihi", 14, 3, 1, 1, -1, 0x7FFFFFFF),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_no_request_closes_its_connection_alone(
    server: KafkaServer, wire: Wire, dial: Dial, data: bytes
) -> None:
    other = dial(server)
    other.socket.sendall(data)
    with pytest.raises((EOFError, ConnectionError)):
        other.read()
    assert wire.ask("Metadata", topics=[])["brokers"][0]["port"] == server.port


def test_versions_are_told_in_answer_to_any(wire: Wire) -> None:
    told = {each["api_key"]: each for each in wire.ask("ApiVersions")["api_keys"]}
    assert set(told) == {18, *HANDLERS}
    wire.socket.sendall(struct.pack(">ihhih", 10, 18, 77, 5, -1))
    answer = wire.read()
    assert struct.unpack_from(">ih", answer) == (5, Code.UNSUPPORTED_VERSION)
    assert wire.ask("ApiVersions", 0)["error_code"] == 0


def test_a_producer_s_batch_counts_once(store: txnkv.Client, wire: Wire) -> None:
    topic = store.create_topic("t", partitions=2)
    id = wire.ask("InitProducerId", **NOBODY)["producer_id"]
    first = batch_of(b"a", b"b", producer=(id, 0), first=0)
    assert wire.produce("t", first)["base_offset"] == 0
    second = batch_of(b"c", producer=(id, 0), first=2)
    assert wire.produce("t", second)["base_offset"] == 2
    assert wire.produce("t", first)["base_offset"] == 0
    gap = batch_of(b"e", producer=(id, 0), first=9)
    assert wire.produce("t", gap)["error_code"] == Code.OUT_OF_ORDER_SEQUENCE_NUMBER
    later = batch_of(b"d", producer=(id, 1), first=0)
    assert wire.produce("t", later)["base_offset"] == 3
    assert wire.produce("t", second)["error_code"] == Code.INVALID_PRODUCER_EPOCH
    assert [m.value for m in topic.consumer().poll(timeout=0)] == [b"a", b"b", b"c", b"d"]


def test_a_producer_s_batch_counts_once_over_servers(
    store: txnkv.Client, serve: Callable[..., KafkaServer], dial: Dial
) -> None:
    topic = store.create_topic("t")
    wire = dial(serve())
    id = wire.ask("InitProducerId", **NOBODY)["producer_id"]
    batch = batch_of(b"a", producer=(id, 0), first=0)
    assert wire.produce("t", batch)["base_offset"] == 0
    other = dial(serve())
    assert other.produce("t", batch)["base_offset"] == 0
    assert other.ask("InitProducerId", **NOBODY)["producer_id"] != id
    assert topic.end_offsets() == {0: 1}


def test_damaged_batches_are_refused(store: txnkv.Client, wire: Wire) -> None:
    topic = store.create_topic("t")
    whole = batch_of(b"value", b"other")
    for at in range(len(whole)):
        bad = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        code = wire.produce("t", bad)["error_code"]
        # The base offset and the leader's epoch are the broker's to say.
        assert (code == 0) == (at < 8 or 12 <= at < 16), at
        assert wire.produce("t", whole[:at])["error_code"] != 0
    assert topic.end_offsets() == {0: 2 * 12}
    assert wire.produce("nobody", whole)["error_code"] == Code.UNKNOWN_TOPIC_OR_PARTITION
    assert wire.produce("t", whole, 7)["error_code"] == Code.UNKNOWN_TOPIC_OR_PARTITION


def _packed(codec: int, body: bytes, count: int) -> bytes:
    """A batch that says that its records are `body` without the compression."""
    checked = struct.pack(">hiqqqhii", codec, count - 1, 1, 1, -1, -1, -1, count) + body
    head = struct.pack(">qiib", 0, len(checked) + 9, -1, 2)
    return head + struct.pack(">I", core.crc32c(checked)) + checked


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_what_is_small_and_becomes_large_is_refused(
    store: txnkv.Client, wire: Wire, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few KiB that are megabytes without their compression; and a length that is a lie."""
    monkeypatch.setattr("txnkv.kafka.log_requests.MOST_BYTES", 2 << 20)
    store.create_topic("t")
    zeros = bytes(3 << 20)
    number = ["gzip", "snappy", "lz4", "zstd"].index(codec) + 1
    body = pa.compress(zeros, codec, asbytes=True) if codec != "lz4" else _lz4(zeros)
    assert len(body) < 1 << 20
    found = wire.produce("t", _packed(number, body, 1))
    assert found["error_code"] == Code.MESSAGE_TOO_LARGE
    lie = _packed(2, b"\xff\xff\xff\x1f" + bytes(8), 1)
    assert wire.produce("t", lie)["error_code"] == Code.CORRUPT_MESSAGE
    assert wire.produce("t", batch_of(b"on"))["error_code"] == 0


def _lz4(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "lz4") as stream:
        stream.write(data)
    packed: bytes = sink.getvalue().to_pybytes()
    return packed


def _begin(wire: Wire, name: str = "x", topic: str = "t") -> dict[str, Any]:
    asked = NOBODY | {"transactional_id": name, "transaction_timeout_ms": 60_000}
    given = wire.ask("InitProducerId", **asked)
    assert given["error_code"] == 0, given
    return _named(name, given["producer_id"], given["producer_epoch"])


def _named(name: str, id: int, epoch: int) -> dict[str, Any]:
    return {"transactional_id": name, "producer_id": id, "producer_epoch": epoch}


def _add(wire: Wire, who: dict[str, Any], topic: str = "t") -> int:
    answer = wire.ask("AddPartitionsToTxn", **who, topics=[{"name": topic, "partitions": [0]}])
    code: int = answer["results_by_topic"][0]["results_by_partition"][0]["partition_error_code"]
    return code


def _send(wire: Wire, who: dict[str, Any], first: int, *values: bytes) -> dict[str, Any]:
    producer = (who["producer_id"], who["producer_epoch"])
    batch = batch_of(*values, producer=producer, first=first, open=True)
    return wire.produce("t", batch, transactional_id=who["transactional_id"])


def _end(wire: Wire, who: dict[str, Any], commit: bool) -> int:
    code: int = wire.ask("EndTxn", **who, committed=commit)["error_code"]
    return code


def _commit_offset(wire: Wire, who: dict[str, Any], offset: int, metadata: str = "m") -> int:
    told = {"partition_index": 0, "committed_offset": offset, "committed_metadata": metadata}
    topics = [{"name": "t", "partitions": [told]}]
    group = {"group_id": "g", "generation_id": -1, "member_id": ""}
    answer = wire.ask("TxnOffsetCommit", **who, **group, topics=topics)
    code: int = answer["topics"][0]["partitions"][0]["error_code"]
    return code


def _offset(wire: Wire, stable: bool = True) -> tuple[int, int]:
    """Of the group, with the code of the answer."""
    topics = [{"name": "t", "partition_indexes": [0]}]
    groups = [{"group_id": "g", "topics": topics}]
    answer = wire.ask("OffsetFetch", groups=groups, require_stable=stable)
    found = answer["groups"][0]["topics"][0]["partitions"][0]
    return found["committed_offset"], found["error_code"]


def test_transactions_stand_in_the_log_as_kafka_has_them(store: txnkv.Client, wire: Wire) -> None:
    """Two transactions and a plain message: offsets, markers, LSO and the aborted list."""
    topic = store.create_topic("t")
    one, two = _begin(wire, "one"), _begin(wire, "two")
    assert _add(wire, one) == _add(wire, two) == 0
    assert _send(wire, one, 0, b"a", b"b")["base_offset"] == 0
    assert _send(wire, two, 0, b"c")["base_offset"] == 2
    assert _send(wire, one, 0, b"a", b"b")["base_offset"] == 0  # again
    assert wire.produce("t", batch_of(b"plain"))["base_offset"] == 3
    found = wire.fetch("t", 0, isolation_level=1)
    assert (found["high_watermark"], found["last_stable_offset"]) == (4, 0)
    assert not found["records"]
    assert _end(wire, two, commit=False) == 0
    assert topic.end_offsets() == {0: 5}
    assert topic.last_stable_offsets() == {0: 0}
    assert _end(wire, one, commit=True) == 0
    assert _end(wire, one, commit=True) == 0
    assert _end(wire, one, commit=False) == Code.INVALID_TXN_STATE
    found = wire.fetch("t", 0, isolation_level=1)
    assert (found["high_watermark"], found["last_stable_offset"]) == (6, 6)
    seen = Seen(found["records"])
    (aborted,) = found["aborted_transactions"]
    batches = [(base, last, attributes) for base, last, attributes, _, _ in seen.batches]
    assert batches == [(0, 1, 0x10), (2, 2, 0x10), (3, 3, 0), (4, 4, 0x30), (5, 5, 0x30)]
    producers = [producer for _, _, _, producer, _ in seen.batches]
    assert producers[0] == producers[4] != producers[1] == producers[3] == aborted["producer_id"]
    assert aborted["first_offset"] == 2
    assert seen.values == [b"a", b"b", b"c", b"plain"]
    assert [m.value for m in topic.consumer().poll(timeout=0)] == [b"a", b"b", b"plain"]
    assert wire.fetch("t", 0)["aborted_transactions"] is None


def test_a_successor_ends_its_predecessor_s_transaction(store: txnkv.Client, wire: Wire) -> None:
    topic = store.create_topic("t")
    elder = _begin(wire)
    assert _add(wire, elder) == 0
    _send(wire, elder, 0, b"never")
    younger = _begin(wire)
    assert younger["producer_epoch"] == elder["producer_epoch"] + 1
    assert younger["producer_id"] == elder["producer_id"]
    assert _add(wire, elder) == Code.PRODUCER_FENCED
    assert _send(wire, elder, 1, b"never")["error_code"] == Code.INVALID_PRODUCER_EPOCH
    assert _end(wire, elder, commit=True) == Code.PRODUCER_FENCED
    assert _add(wire, younger) == 0
    assert _send(wire, younger, 0, b"once")["base_offset"] == 2
    assert _end(wire, younger, commit=True) == 0
    assert [m.value for m in topic.consumer().poll(timeout=0)] == [b"once"]


def test_messages_need_an_open_transaction(store: txnkv.Client, wire: Wire) -> None:
    store.create_topic("t")
    who = _begin(wire)
    assert _send(wire, who, 0, b"a")["error_code"] == Code.INVALID_TXN_STATE
    assert _end(wire, who, commit=True) == Code.INVALID_TXN_STATE
    strange = _named("nobody", 1, 0)
    assert _add(wire, strange) == Code.INVALID_PRODUCER_ID_MAPPING
    assert _add(wire, who, "no topic") == Code.UNKNOWN_TOPIC_OR_PARTITION


def test_a_server_that_starts_again_knows_how_transactions_ended(
    store: txnkv.Client, serve: Callable[..., KafkaServer], dial: Dial
) -> None:
    """The answer of a commit is lost with its server: it is answered again. What is open goes on,
    its batches count once, and nobody is told offsets that it may yet commit.
    """
    topic = store.create_topic("t")
    first = serve()
    wire = dial(first)
    who = _begin(wire)
    assert _add(wire, who) == 0
    _send(wire, who, 0, b"kept")
    assert _end(wire, who, commit=True) == 0
    first.close()
    second = serve()
    wire = dial(second)
    assert _end(wire, who, commit=True) == 0
    assert _end(wire, who, commit=False) == Code.INVALID_TXN_STATE
    assert _add(wire, who) == 0
    sent = _send(wire, who, 1, b"before")
    assert _commit_offset(wire, who, 5) == 0
    second.close()
    third = serve()
    wire = dial(third)
    assert _offset(wire) == (-1, Code.UNSTABLE_OFFSET_COMMIT)
    assert _send(wire, who, 1, b"before") == sent
    assert _send(wire, who, 3, b"gap")["error_code"] == Code.OUT_OF_ORDER_SEQUENCE_NUMBER
    _send(wire, who, 2, b"after")
    assert _end(wire, who, commit=True) == 0
    assert _offset(wire) == (5, 0)
    assert _add(wire, who) == 0
    _send(wire, who, 3, b"unwanted")
    assert _end(wire, who, commit=False) == 0
    third.close()
    wire = dial(serve())
    assert _end(wire, who, commit=False) == 0
    assert _end(wire, who, commit=True) == Code.INVALID_TXN_STATE
    values = [m.value for m in topic.consumer().poll(timeout=0)]
    assert values == [b"kept", b"before", b"after"]


def test_who_has_lost_its_transaction_is_fenced(store: txnkv.Client, wire: Wire) -> None:
    store.create_topic("t")
    who = _begin(wire)
    assert _add(wire, who) == 0
    _send(wire, who, 0, b"lost")
    (open,) = [each for each in store.transactions() if each.state is txnkv.TxnState.OPEN]
    store.abort_transaction(open.id)
    assert _send(wire, who, 1, b"more")["error_code"] == Code.INVALID_PRODUCER_EPOCH
    assert _commit_offset(wire, who, 5) == Code.INVALID_PRODUCER_EPOCH
    assert _add(wire, who) == Code.PRODUCER_FENCED
    assert _end(wire, who, commit=True) == Code.PRODUCER_FENCED
    assert _end(wire, who, commit=False) == Code.PRODUCER_FENCED
    anew = wire.ask("InitProducerId", **who, transaction_timeout_ms=60_000)
    assert anew["error_code"] == 0
    assert anew["producer_epoch"] > who["producer_epoch"]


def test_of_two_servers_the_one_with_the_earlier_epoch_is_refused(
    store: txnkv.Client, serve: Callable[..., KafkaServer], dial: Dial
) -> None:
    store.create_topic("t")
    here, there = dial(serve()), dial(serve())
    elder = _begin(here)
    younger = _begin(there)
    assert younger["producer_epoch"] == elder["producer_epoch"] + 1
    assert _add(here, elder) == Code.PRODUCER_FENCED
    assert _add(here, younger) == 0
    assert _end(here, younger, commit=True) == 0


def test_bumping_the_epoch_is_answered_again(store: txnkv.Client, wire: Wire) -> None:
    who = _begin(wire)
    bumped = wire.ask("InitProducerId", **who, transaction_timeout_ms=60_000)
    assert bumped["producer_epoch"] == who["producer_epoch"] + 1
    again = wire.ask("InitProducerId", **who, transaction_timeout_ms=60_000)
    assert again == bumped
    _begin(wire)
    fenced = wire.ask("InitProducerId", **who, transaction_timeout_ms=60_000)
    assert fenced["error_code"] == Code.PRODUCER_FENCED


def test_offsets_of_a_group_in_a_transaction(store: txnkv.Client, wire: Wire) -> None:
    store.create_topic("t")
    who = _begin(wire)
    assert wire.ask("AddOffsetsToTxn", **who, group_id="g")["error_code"] == 0
    assert _commit_offset(wire, who, 5) == 0
    assert _offset(wire) == (-1, Code.UNSTABLE_OFFSET_COMMIT)
    assert _offset(wire, stable=False) == (-1, 0)
    assert _end(wire, who, commit=False) == 0
    assert _offset(wire) == (-1, 0)
    assert wire.ask("AddOffsetsToTxn", **who, group_id="g")["error_code"] == 0
    assert _commit_offset(wire, who, 7) == 0
    assert _end(wire, who, commit=True) == 0
    assert _offset(wire) == (7, 0)
    assert store.table("kafka_offsets").get(("g", "t", 0))["metadata"] == "m"


def test_fetch_over_what_nobody_reads(store: txnkv.Client, wire: Wire) -> None:
    """A position behind the end is refused; markers move a reader on."""
    topic = store.create_topic("t")
    assert wire.fetch("t", 1)["error_code"] == Code.OFFSET_OUT_OF_RANGE
    txn = store.new_transaction()
    txn.serialize()
    txn.send(topic, b"never")
    txn.flush()
    txn.rollback()
    seen = Seen(wire.fetch("t", 1)["records"])
    assert [each[:3] for each in seen.batches] == [(1, 1, 0x30)]
    assert not wire.fetch("t", 2)["records"]


def test_messages_of_the_store_and_large_ones(store: txnkv.Client, wire: Wire) -> None:
    topic = store.create_topic("t", compression="zstd")
    large = b"x" * (3 << 20)
    with store.transaction() as txn:
        txn.send(topic, b"small", key=b"k", headers=[("h", b"1")])
        txn.send(topic, large)
        txn.send(topic, b"last")
    wanted = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 8 << 20}
    at, values = 0, []
    for _ in range(10):
        wanted["fetch_offset"] = at
        topics = [{"topic": "t", "partitions": [wanted]}]
        answer = wire.ask("Fetch", max_bytes=8 << 20, topics=topics)
        found = answer["responses"][0]["partitions"][0]
        seen = Seen(found["records"])
        if not seen.batches:
            break
        at = seen.batches[-1][1] + 1
        values += [base for base, *_ in seen.batches]
    assert at == found["high_watermark"] == topic.end_offsets()[0]


def test_sidecar_topics_are_read_too(store: txnkv.Client, wire: Wire) -> None:
    store.create_topic("t", buffer="sidecar")
    who = _begin(wire)
    assert _add(wire, who) == 0
    assert _send(wire, who, 0, b"a", b"b")["base_offset"] == -1
    assert wire.produce("t", batch_of(b"plain"))["base_offset"] == 0
    assert _end(wire, who, commit=True) == 0
    found = wire.fetch("t", 0, isolation_level=1)
    assert Seen(found["records"]).values == [b"plain", b"a", b"b"]


def test_users(
    store: txnkv.Client, serve: Callable[..., KafkaServer], dial: Dial, tmp_path: Path
) -> None:
    for name in ("ours", "theirs"):
        store.create_topic(name)
    path = tmp_path / "users.toml"
    token = add_user(path, "ann", "write", ["*"], ["ours"])
    wire = dial(serve(Users(path)))
    assert wire.ask("ApiVersions")["error_code"] == 0
    assert wire.ask("SaslHandshake", mechanism="GSSAPI")["error_code"] != 0
    assert wire.ask("SaslHandshake", mechanism="PLAIN")["error_code"] == 0
    assert wire.ask("SaslAuthenticate", auth_bytes=b"\0ann\0wrong.token")["error_code"] == 58
    assert wire.ask("SaslHandshake", mechanism="PLAIN")["error_code"] == 0
    said = b"\0ann\0" + token.encode()
    assert wire.ask("SaslAuthenticate", auth_bytes=said)["error_code"] == 0
    told = wire.ask("Metadata", topics=None)["topics"]
    assert [each["name"] for each in told] == ["ours"]
    assert wire.produce("ours", batch_of(b"v"))["error_code"] == 0
    refused = wire.produce("theirs", batch_of(b"v"))["error_code"]
    assert refused == Code.TOPIC_AUTHORIZATION_FAILED
    made = wire.ask("CreateTopics", topics=[{"name": "mine", "num_partitions": 1}])
    assert made["topics"][0]["error_code"] == Code.TOPIC_AUTHORIZATION_FAILED


def test_before_a_log_in_nothing_is_answered(
    store: txnkv.Client, serve: Callable[..., KafkaServer], dial: Dial, tmp_path: Path
) -> None:
    add_user(tmp_path / "users.toml", "ann", "write", ["*"], ["*"])
    server = serve(Users(tmp_path / "users.toml"))
    wire = dial(server)
    with pytest.raises((EOFError, ConnectionError)):
        wire.ask("Metadata", topics=None)
    wire = dial(server)
    wire.socket.sendall(struct.pack(">i", 1 << 20))
    with pytest.raises((EOFError, ConnectionError)):
        wire.read()


def test_topics_are_made_and_dropped(store: txnkv.Client, wire: Wire) -> None:
    def make(name: str, count: int = 3, factor: int = 1, **configs: str) -> dict[str, Any]:
        told = [{"name": key.replace("_", "."), "value": value} for key, value in configs.items()]
        topic = {"name": name, "num_partitions": count, "replication_factor": factor}
        found = wire.ask("CreateTopics", topics=[topic | {"configs": told}])["topics"][0]
        assert isinstance(found, dict)
        return found

    made = make("t", retention_ms="60000", compression_type="lz4")
    assert made["error_code"] == 0
    assert ("retention.ms", "60000") in [(e["name"], e["value"]) for e in made["configs"]]
    assert make("t")["error_code"] == Code.TOPIC_ALREADY_EXISTS
    assert "up to 249 letters" in make("a b")["error_message"]
    assert "not . or .. alone" in make("..")["error_message"]
    assert make("u", factor=3)["error_code"] == Code.INVALID_REPLICATION_FACTOR
    assert make("u", count=0)["error_code"] == Code.INVALID_PARTITIONS
    info = store.topic("t").info
    assert (len(info.partitions), info.options.retention_seconds) == (3, 60.0)
    asked = {"resource_type": 2, "resource_name": "t", "configuration_keys": ["retention.ms"]}
    (found,) = wire.ask("DescribeConfigs", resources=[asked])["results"]
    assert [(each["name"], each["value"]) for each in found["configs"]] == [
        ("retention.ms", "60000")
    ]
    assert wire.ask("DeleteTopics", topic_names=["t"])["responses"][0]["error_code"] == 0
    assert store.topics() == []


def test_partitions_are_added(store: txnkv.Client, wire: Wire) -> None:
    """A producer of the connection, an idempotent one and one with a transaction send there."""
    store.create_topic("t", 2)

    def add(count: int, placed: Any = None, **more: Any) -> int:
        topic = {"name": "t", "count": count, "assignments": placed}
        found = wire.ask("CreatePartitions", topics=[topic], **more)["results"]
        return int(found[0]["error_code"])

    mine, named = wire.ask("InitProducerId", **NOBODY), _begin(wire)
    assert wire.produce("t", batch_of(b"early"))["error_code"] == 0
    sent = wire.produce("t", batch_of(b"a", producer=(mine["producer_id"], 0), first=0))
    assert sent["error_code"] == 0
    assert add(4, validate_only=True) == 0
    assert store.topic("t").partitions == 2
    assert add(2) == add(1) == add(5000) == Code.INVALID_PARTITIONS
    assert add(4, [{"broker_ids": [0]}]) == Code.INVALID_REPLICA_ASSIGNMENT
    assert add(4, [{"broker_ids": [0]}] * 2) == 0
    assert len(wire.ask("Metadata", topics=[{"name": "t"}])["topics"][0]["partitions"]) == 4
    assert wire.produce("t", batch_of(b"late"), partition=3)["base_offset"] == 0
    batch = batch_of(b"b", producer=(mine["producer_id"], 0), first=0)
    assert wire.produce("t", batch, partition=2)["base_offset"] == 0
    added = [{"name": "t", "partitions": [3]}]
    wire.ask("AddPartitionsToTxn", **named, topics=added)
    batch = batch_of(b"c", producer=(named["producer_id"], 0), first=0, open=True)
    sent = wire.produce("t", batch, partition=3, transactional_id=named["transactional_id"])
    assert sent["base_offset"] == 1
    assert _end(wire, named, commit=True) == 0
    topic = {"name": "gone", "count": 4, "assignments": None}
    (answer,) = wire.ask("CreatePartitions", topics=[topic])["results"]
    assert answer["error_code"] == Code.UNKNOWN_TOPIC_OR_PARTITION


def test_records_are_deleted_up_to_what_is_decided(store: txnkv.Client, wire: Wire) -> None:
    topic = store.create_topic("t")
    wire.produce("t", batch_of(b"a", b"b", b"c"))
    who = _begin(wire)
    assert _add(wire, who) == 0
    _send(wire, who, 0, b"open")

    def delete(offset: int) -> tuple[int, int]:
        partitions = [{"partition_index": 0, "offset": offset}]
        answer = wire.ask("DeleteRecords", topics=[{"name": "t", "partitions": partitions}])
        found = answer["topics"][0]["partitions"][0]
        return found["error_code"], found["low_watermark"]

    assert delete(2) == (0, 2)
    assert delete(1) == (0, 2)
    assert delete(4) == (Code.OFFSET_OUT_OF_RANGE, -1)
    assert [m.value for m in topic.consumer(isolation="read_uncommitted").poll()] == [b"c", b"open"]
    assert delete(-1) == (0, 3)
    assert wire.fetch("t", 2)["error_code"] == Code.OFFSET_OUT_OF_RANGE
    assert _end(wire, who, commit=True) == 0
    assert delete(-1) == (0, 5)
    assert wire.produce("t", batch_of(b"on"))["base_offset"] == 5


def test_offsets_by_time(store: txnkv.Client, wire: Wire) -> None:
    store.create_topic("t")
    wire.produce("t", batch_of(b"a", b"b"))  # at one second
    asked = [-2, -1, 0, 1000, 1001]
    found = []
    for millis in asked:
        partitions = [{"partition_index": 0, "timestamp": millis}]
        topics = [{"name": "t", "partitions": partitions}]
        answer = wire.ask("ListOffsets", topics=topics)["topics"][0]["partitions"][0]
        found.append((answer["offset"], answer["timestamp"]))
    assert found == [(0, -1), (2, -1), (0, 1000), (0, 1000), (-1, -1)]


def test_a_flood_of_connections(server: KafkaServer, wire: Wire) -> None:
    """Those of too many are closed at once; the others go on."""
    opened = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
    for each in opened[:50]:
        each.sendall(b"\0\0\0\x10half")
    for each in opened:
        each.close()
    assert wire.ask("Metadata", topics=[])["controller_id"] == 0


def test_names_are_those_of_the_store_s_own_transactions(store: txnkv.Client, wire: Wire) -> None:
    """A program of the store fences a producer, and the other way round."""
    topic = store.create_topic("t")
    who = _begin(wire)
    assert _add(wire, who) == 0
    _send(wire, who, 0, b"never")
    with store.transaction(name="x") as txn:
        txn.send(topic, b"of the store")
        assert _send(wire, who, 1, b"never")["error_code"] == Code.INVALID_PRODUCER_EPOCH
        assert _end(wire, who, commit=True) == Code.PRODUCER_FENCED
    left = store.new_transaction(name="x")
    left.send(topic, b"never")
    again = _begin(wire)
    assert again["producer_id"] == who["producer_id"]
    assert again["producer_epoch"] == who["producer_epoch"] + 2
    with pytest.raises(txnkv.ProducerFencedError):
        left.commit()
    assert _add(wire, again) == 0
    _send(wire, again, 0, b"of the producer")
    assert _end(wire, again, commit=True) == 0
    with pytest.raises(txnkv.ProducerFencedError, match="another client has taken"):
        store.new_transaction(name="x")
    with topic.consumer() as consumer:
        values = [each.value for each in consumer.poll(timeout=0)]
    assert values == [b"of the store", b"of the producer"]


def test_a_server_leaves_alone_what_programs_of_the_store_have_left(
    store: txnkv.Client, serve: Callable[..., KafkaServer], elsewhere: Callable[..., Any]
) -> None:
    """It goes on with transactions of its own clients alone: others end with their heartbeats."""
    local = elsewhere("t = client.new_transaction(name='x'); t.serialize(); say(int(t.id))")
    known = serve()._broker.ids._find("x")
    assert known is not None
    assert (known.last, known.txn) == (local, None)
    store.abort_transaction(local)
