"""What admins ask: options of topics, transactions and producers."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import txnkv
from tests.kafka.test_limits import log_in
from tests.kafka.test_requests import NOBODY, Dial, _add, _begin, _end, _send
from tools.kafka_wire import Wire, batch_of
from txnkv.client import MEMBERS_TABLE, NAMES_TABLE, OFFSETS_TABLE
from txnkv.errors import SchemaError
from txnkv.kafka import KafkaServer, api_tables
from txnkv.kafka.api_tables import Code
from txnkv.remote import RIGHTS
from txnkv.server import Users, add_user

TOPIC = 2


# -- topics ----------------------------------------------------------------------------


def asked_for(wire: Wire, name: str, **body: Any) -> tuple[int, int]:
    """Code and partitions of a topic that is asked for."""
    (found,) = wire.ask("Metadata", topics=[{"name": name}], **body)["topics"]
    return found["error_code"], len(found["partitions"])


def test_a_wrong_value_of_an_option_is_told_from_an_option_that_there_is_not(wire: Wire) -> None:
    for name, value, words in (
        ("cleanup.policy", "compacted", "cleanup.policy has no value 'compacted'"),
        ("retention.ms", "long", "retention.ms has no value 'long'"),
        ("segment.bytes", "0", "segment.bytes has no value '0'"),
        ("min.insync.replicas", "2", "min.insync.replicas=2 cannot be had: leave it away"),
        ("none", "1", "none=1 cannot be had: leave it away"),
    ):
        topic = {"name": "t", "num_partitions": 1, "replication_factor": 1}
        topic["configs"] = [{"name": name, "value": value}]
        (made,) = wire.ask("CreateTopics", topics=[topic])["topics"]
        assert (made["error_code"], made["error_message"]) == (Code.INVALID_CONFIG, words)


def test_topics_are_made_by_being_asked_for_where_the_server_is_told_so(
    store: txnkv.Client,
    serve: Callable[..., KafkaServer],
    dial: Callable[[KafkaServer], Wire],
    tmp_path: Path,
) -> None:
    users = tmp_path / "users.toml"
    token = add_user(users, "ann", "write", ["*"], ["*"])
    allowed = {"allow_auto_topic_creation": True}
    missing = Code.UNKNOWN_TOPIC_OR_PARTITION, 0
    assert asked_for(dial(serve()), "t", **allowed) == missing
    wire = dial(serve(new_partitions=3))
    assert asked_for(wire, "t", allow_auto_topic_creation=False) == missing
    assert wire.ask("Metadata", topics=None, **allowed)["topics"] == []
    assert asked_for(wire, "t", **allowed) == asked_for(wire, "t") == (0, 3)
    assert store.topic("t").partitions == 3
    for name in ("..", "a/b", "ä"):
        assert asked_for(wire, name, **allowed) == (Code.INVALID_TOPIC, 0)
    assert store.topics() == ["t"]
    wire = log_in(dial(serve(Users(users), new_partitions=3)), token)
    assert asked_for(wire, "t", **allowed) == (0, 3)
    assert asked_for(wire, "u", **allowed) == missing


@pytest.mark.parametrize("only", [True, False])
def test_what_is_only_validated_is_refused_as_what_is_done(
    store: txnkv.Client, wire: Wire, only: bool
) -> None:
    def create(count: int, *placed: tuple[int, int]) -> int:
        at = [{"partition_index": number, "broker_ids": [node]} for number, node in placed]
        topic = {"name": "u", "num_partitions": count, "replication_factor": 1, "assignments": at}
        (told,) = wire.ask("CreateTopics", topics=[topic], validate_only=only)["topics"]
        return int(told["error_code"])

    store.create_topic("t")
    for count in (0, 1025, (1 << 31) - 1):
        assert create(count) == Code.INVALID_PARTITIONS
    for placed in (((0, 55),), ((1, 0),), ((0, 0), (0, 0))):
        assert create(-1, *placed) == Code.INVALID_REPLICA_ASSIGNMENT
    more = {"name": "t", "count": 1025, "assignments": None}
    (told,) = wire.ask("CreatePartitions", topics=[more], validate_only=only)["results"]
    assert told["error_code"] == Code.INVALID_PARTITIONS
    assert create(-1, (1, 0), (0, 0)) == 0
    assert store.topics() == (["t"] if only else ["t", "u"])


def test_a_topic_that_comes_twice_in_a_request_is_left_alone(
    store: txnkv.Client, wire: Wire
) -> None:
    """And has one answer: clients take two for an answer that is damaged."""

    def asked(kind: str, of: str, to: str, *items: Any) -> dict[str, int]:
        found = wire.ask(kind, **{of: list(items)})[to]
        assert len(found) == len({each["name"] for each in found})
        return {each["name"]: each["error_code"] for each in found}

    def made(name: str, count: int) -> dict[str, Any]:
        return {"name": name, "num_partitions": count, "replication_factor": 1}

    twice = made("t", 1), made("u", 1), made("t", 2)
    wanted = {"t": Code.INVALID_REQUEST, "u": 0}
    assert asked("CreateTopics", "topics", "topics", *twice) == wanted
    assert store.topics() == ["u"]
    store.create_topic("t")
    more = [{"name": name, "count": 3, "assignments": None} for name in "tut"]
    assert asked("CreatePartitions", "topics", "results", *more) == wanted
    assert [store.topic(name).partitions for name in "tu"] == [1, 3]
    assert asked("DeleteTopics", "topic_names", "responses", *"tut") == wanted
    assert store.topics() == ["t"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("too many"), Code.INVALID_PARTITIONS),
        (txnkv.StorageFullError("the disk is full"), Code.KAFKA_STORAGE_ERROR),
        (None, 0),
    ],
)
def test_a_topic_that_cannot_be_made_has_its_own_error(
    store: txnkv.Client,
    serve: Callable[..., KafkaServer],
    dial: Dial,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception | None,
    code: int,
) -> None:
    store.create_topic("there")
    server = serve(new_partitions=1)
    if error is not None:
        monkeypatch.setattr(server._broker.client, "create_topic", Mock(side_effect=error))
    names = [{"name": "there"}, {"name": "new"}]
    topics = dial(server).ask("Metadata", topics=names, allow_auto_topic_creation=True)["topics"]
    assert {each["name"]: each["error_code"] for each in topics} == {"there": 0, "new": code}


def metadata_of(wire: Wire, **topic: Any) -> dict[str, Any]:
    found: dict[str, Any]
    (found,) = wire.ask("Metadata", topics=[topic])["topics"]
    return found


def test_a_topic_made_again_has_another_id(store: txnkv.Client, wire: Wire) -> None:
    store.create_topic("t", partitions=3)
    store.create_topic("u")
    before = metadata_of(wire, name="t")["topic_id"]
    found = metadata_of(wire, name=None, topic_id=before)
    assert (found["name"], len(found["partitions"]), found["topic_id"]) == ("t", 3, before)
    assert metadata_of(wire, name="u")["topic_id"] != before
    store.drop_topic("t")
    store.create_topic("t")
    after = metadata_of(wire, name="t")["topic_id"]
    assert after not in (before, bytes(16))
    missing = metadata_of(wire, name=None, topic_id=before)
    assert (missing["name"], missing["error_code"]) == (None, Code.UNKNOWN_TOPIC_ID)
    assert wire.ask("Metadata", 9, topics=[{"name": "t"}])["topics"][0]["error_code"] == 0


def test_who_may_not_see_a_topic_is_told_nothing_by_its_id(
    store: txnkv.Client, serve: Callable[..., KafkaServer], dial: Dial, tmp_path: Path
) -> None:
    """Ids can be worked out: of the cluster's and of a small number."""
    for name in ("secret", "ours"):
        store.create_topic(name)
    token = add_user(tmp_path / "users.toml", "joe", "read", [], ["ours"])
    wire = dial(serve(Users(tmp_path / "users.toml")))
    assert wire.ask("SaslHandshake", mechanism="PLAIN")["error_code"] == 0
    said = b"\0joe\0" + token.encode()
    assert wire.ask("SaslAuthenticate", auth_bytes=said)["error_code"] == 0
    cluster = wire.ask("Metadata", topics=[])["cluster_id"]
    ids = [sha256(f"{cluster}/{number}".encode()).digest()[:16] for number in range(10)]
    found = wire.ask("Metadata", topics=[{"name": None, "topic_id": id} for id in ids])["topics"]
    assert sorted(each["name"] or "" for each in found) == [""] * 9 + ["ours"]
    assert [each["error_code"] for each in found].count(Code.UNKNOWN_TOPIC_ID) == 9
    for name, code in ((None, "CLUSTER"), ("t", "TRANSACTIONAL_ID")):
        asked = {"transactional_id": name, "transaction_timeout_ms": 1000}
        refused = wire.ask("InitProducerId", **asked)["error_code"]
        assert refused == Code[f"{code}_AUTHORIZATION_FAILED"]


def test_the_message_with_the_latest_time(store: txnkv.Client, wire: Wire) -> None:
    def newest() -> tuple[int, int]:
        asked = {"partition_index": 0, "timestamp": -3, "current_leader_epoch": -1}
        topics = [{"name": "t", "partitions": [asked]}]
        (found,) = wire.ask("ListOffsets", replica_id=-1, topics=topics)["topics"][0]["partitions"]
        return found["offset"], found["timestamp"]

    store.create_topic("t")
    assert newest() == (-1, -1)
    for millis in (100, 400, 400, 250):
        when = datetime.fromtimestamp(millis / 1000, UTC)
        with store.new_session() as session:
            session.send("t", b"v", timestamp=when)
    assert newest() == (1, 400)


def test_the_message_with_the_latest_time_is_one_that_may_be_read(
    store: txnkv.Client, wire: Wire
) -> None:
    """As of a broker: of an open transaction none is told, and no earlier one instead of it."""

    def newest(isolation: int) -> tuple[int, int]:
        asked = {"partition_index": 0, "timestamp": -3, "current_leader_epoch": -1}
        topics = [{"name": "t", "partitions": [asked]}]
        answer = wire.ask("ListOffsets", replica_id=-1, isolation_level=isolation, topics=topics)
        (found,) = answer["topics"][0]["partitions"]
        return found["offset"], found["timestamp"]

    store.create_topic("t")
    txn = store.new_transaction()
    txn.serialize()  # else its messages are in memory until the commit
    for at, to in ((100, store), (400, txn), (250, store)):
        with to.new_session() as session:
            session.send("t", b"v", timestamp=datetime.fromtimestamp(at / 1000, UTC))
    assert [newest(0), newest(1)] == [(1, 400), (-1, -1)]
    txn.commit()
    assert [newest(0), newest(1)] == [(1, 400)] * 2


def test_rights_are_told_where_they_are_asked_for(
    store: txnkv.Client,
    serve: Callable[..., KafkaServer],
    dial: Callable[[KafkaServer], Wire],
    tmp_path: Path,
) -> None:
    for name in ("ours", "theirs"):
        store.create_topic(name)
    token = add_user(tmp_path / "users.toml", "ann", "write", ["*"], ["ours"])
    wire = dial(serve(Users(tmp_path / "users.toml")))
    wire.ask("SaslHandshake", mechanism="PLAIN")
    wire.ask("SaslAuthenticate", auth_bytes=f"\0ann\0{token}".encode())
    read, write, describe, see = 1 << 3, 1 << 4, 1 << 8, 1 << 10

    def told(answer: dict[str, Any]) -> int:
        found: int = answer["topics"][0]["topic_authorized_operations"]
        return found

    names = [{"name": "ours"}]
    asked = {"include_topic_authorized_operations": True}
    assert told(wire.ask("Metadata", topics=names)) == -(1 << 31)
    assert told(wire.ask("Metadata", topics=names, **asked)) == read | write | describe | see
    everybody = dial(serve())
    assert told(everybody.ask("Metadata", topics=names, **asked)).bit_count() == 8
    cluster = everybody.ask("DescribeCluster", include_cluster_authorized_operations=True)
    assert cluster["cluster_authorized_operations"].bit_count() == 7
    group = {"groups": ["g"], "include_authorized_operations": True}
    (found,) = everybody.ask("DescribeGroups", **group)["groups"]
    assert found["authorized_operations"] == read | describe | 1 << 6


# -- offsets of groups -----------------------------------------------------------------


def test_offsets_with_epochs_are_forgotten_one_by_one(store: txnkv.Client, wire: Wire) -> None:
    store.create_topic("t", partitions=2)
    committed = [
        {"partition_index": n, "committed_offset": n, "committed_leader_epoch": 6 + n}
        for n in range(2)
    ]
    group = {"group_id": "g", "generation_id_or_member_epoch": -1, "member_id": ""}
    wire.ask("OffsetCommit", **group, topics=[{"name": "t", "partitions": committed}])

    def left() -> list[tuple[int, int]]:
        topics = [{"name": "t", "partition_indexes": [0, 1]}]
        answer = wire.ask("OffsetFetch", groups=[{"group_id": "g", "topics": topics}])
        rows = answer["groups"][0]["topics"][0]["partitions"]
        return [(row["committed_offset"], row["committed_leader_epoch"]) for row in rows]

    def forget(name: str, group: str = "g") -> int:
        topics = [{"name": name, "partitions": [{"partition_index": 1}]}]
        answer = wire.ask("OffsetDelete", group_id=group, topics=topics)
        found: int = answer["error_code"] or answer["topics"][0]["partitions"][0]["error_code"]
        return found

    assert left() == [(0, 6), (1, 7)]
    assert forget("t", "nobody") == Code.GROUP_ID_NOT_FOUND
    assert forget("none") == Code.UNKNOWN_TOPIC_OR_PARTITION
    with store.consumer("t", group="g") as member:
        member.poll(timeout=0)
        assert forget("t") == Code.GROUP_SUBSCRIBED_TO_TOPIC
    subscription = b"\0\1\0\0\0\1\0\1t\xff\xff\xff\xff"
    joined = {"group_id": "g", "session_timeout_ms": 6000, "rebalance_timeout_ms": 6000}
    protocols = [{"name": "range", "metadata": subscription}]
    kind = {"member_id": "", "protocol_type": "consumer", "protocols": protocols}
    member_id = wire.ask("JoinGroup", 3, **joined, **kind)["member_id"]
    assert forget("t") == Code.GROUP_SUBSCRIBED_TO_TOPIC
    wire.ask("LeaveGroup", 2, group_id="g", member_id=member_id)
    assert (forget("t"), left()) == (0, [(0, 6), (-1, -1)])
    (listed,) = wire.ask("ListGroups", types_filter=["Classic"])["groups"]
    assert (listed["group_id"], listed["group_type"]) == ("g", "classic")
    assert wire.ask("ListGroups", types_filter=["consumer"])["groups"] == []


def committed(wire: Wire, group: str, *topics: str) -> None:
    part = {"partition_index": 0, "committed_offset": 3, "committed_leader_epoch": -1}
    told = [{"name": name, "partitions": [part]} for name in topics]
    member = {"generation_id_or_member_epoch": -1, "member_id": ""}
    answer = wire.ask("OffsetCommit", group_id=group, **member, topics=told)
    assert {each["partitions"][0]["error_code"] for each in answer["topics"]} == {0}


def test_groups_go_by_who_may_administer_all_their_topics(
    store: txnkv.Client, serve: Callable[..., KafkaServer], dial: Dial, tmp_path: Path
) -> None:
    for name in ("ours", "theirs"):
        store.create_topic(name)
    path = tmp_path / "users.toml"
    some = add_user(path, "ann", "admin", ["*"], ["ours"])
    every = add_user(path, "root", "admin", ["*"], ["*"])
    server = serve(Users(path))
    ann, root = log_in(dial(server), some), log_in(dial(server), every)
    committed(root, "one", "ours")
    committed(root, "both", "ours", "theirs")

    def deleted(wire: Wire) -> list[int]:
        results = wire.ask("DeleteGroups", groups_names=["both", "one", "none"])["results"]
        return [each["error_code"] for each in results]

    refused, missing = Code.GROUP_AUTHORIZATION_FAILED, Code.GROUP_ID_NOT_FOUND
    assert deleted(ann) == [refused, 0, missing]
    assert store.table("kafka_offsets").count() == 2
    assert deleted(root) == [0, missing, missing]
    assert store.table("kafka_offsets").count() == 0


OWN = txnkv.Schema({"id": "int64", "group": "string"}, primary_key=["id"])


@pytest.mark.parametrize("name", [OFFSETS_TABLE, MEMBERS_TABLE])
def test_a_table_of_another_shape_in_place_of_groups(
    store: txnkv.Client, wire: Wire, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Each request about a group has an error of its own, and the log one line for all."""
    store.create_topic("t")
    store.create_table(name, OWN)
    part = {"partition_index": 0, "committed_offset": 3}
    parts = {"topics": [{"name": "t", "partitions": [part]}], "member_id": "m", "group_id": "g"}
    once = {"generation_id_or_member_epoch": -1, "generation_id": -1}
    wanted = {"group_id": "g", "topics": [{"name": "t", "partition_indexes": [0]}]}
    kind = {"protocol_type": "consumer", "protocols": [{"name": "range", "metadata": b""}]}
    join = {**kind, "member_id": "", "session_timeout_ms": 6000, "rebalance_timeout_ms": 6000}
    offsets = [
        lambda: wire.ask("OffsetFetch", groups=[wanted])["groups"][0],
        lambda: wire.ask("OffsetFetch", 7, **wanted),
        lambda: wire.ask("ListGroups"),
    ]
    members = [
        lambda: wire.ask("JoinGroup", 3, group_id="g", **join),
        lambda: wire.ask("Heartbeat", member_id="m", group_id="g", generation_id=1),
    ]
    both = [
        lambda: wire.ask("OffsetCommit", **parts, **once)["topics"][0]["partitions"][0],
        lambda: wire.ask("DescribeGroups", groups=["g"])["groups"][0],
        lambda: wire.ask("DeleteGroups", groups_names=["g"])["results"][0],
        lambda: wire.ask("OffsetDelete", **{**parts, "group_id": "g"}),
    ]
    api_tables._tell.cache_clear()
    for ask in (offsets if name == OFFSETS_TABLE else members) + both:
        assert ask()["error_code"] == Code.UNKNOWN_SERVER_ERROR
    (line,) = caplog.records
    assert line.exc_info is None
    for word in (repr(name), "id, group", f"client.rename_table({name!r}, ...)"):
        assert word in line.message
    store.rename_table(name, "mine")
    committed(wire, "g", "t")
    assert wire.ask("DescribeGroups", groups=["g"])["groups"][0]["group_state"] == "Empty"


def test_a_table_of_another_shape_in_place_of_names(
    store: txnkv.Client, serve: Callable[..., KafkaServer], dial: Dial
) -> None:
    """The server starts beside open transactions, and answers where it needs none of the names."""
    store.create_table(NAMES_TABLE, OWN)
    told = r"names of transactions .* id, group: .*rename_table\('transaction_names'"
    with pytest.raises(SchemaError, match=told), store.transaction(name="n"):
        pass
    open = store.new_transaction()
    open.serialize()
    wire = dial(serve())
    assert wire.ask("InitProducerId", **NOBODY)["error_code"] == Code.UNKNOWN_SERVER_ERROR
    (found,) = wire.ask("DescribeTransactions", transactional_ids=["x"])["transaction_states"]
    assert found["error_code"] == Code.TRANSACTIONAL_ID_NOT_FOUND
    store.rename_table(NAMES_TABLE, "mine")
    assert wire.ask("InitProducerId", **NOBODY)["error_code"] == 0
    open.rollback()


def test_groups_without_members_or_offsets_are_listed_by_nobody(
    store: txnkv.Client, wire: Wire
) -> None:
    store.create_topic("t")
    committed(wire, "g", "t")
    kind = {"protocol_type": "consumer", "protocols": [{"name": "range", "metadata": b""}]}
    join = {**kind, "member_id": "", "session_timeout_ms": 6000, "rebalance_timeout_ms": 6000}
    asked = wire.ask("JoinGroup", 4, group_id="asked", **join)
    assert asked["error_code"] == Code.MEMBER_ID_REQUIRED
    for states, expected in (([], ["g"]), (["empty"], ["g"]), (["STABLE"], [])):
        found = wire.ask("ListGroups", states_filter=states)["groups"]
        assert [each["group_id"] for each in found] == expected


# -- options ---------------------------------------------------------------------------


def described(wire: Wire, name: str = "t") -> dict[str, tuple[str, bool, int]]:
    asked = {"resource_type": TOPIC, "resource_name": name, "configuration_keys": None}
    (found,) = wire.ask("DescribeConfigs", resources=[asked])["results"]
    return {
        each["name"]: (each["value"], each["read_only"], each["config_source"])
        for each in found["configs"]
    }


def altered(wire: Wire, how: str, configs: list[dict[str, Any]], **body: Any) -> int:
    asked = {"resource_type": TOPIC, "resource_name": "t", "configs": configs, **body}
    (found,) = wire.ask(how, resources=[asked], validate_only=body.get("only", False))["responses"]
    return int(found["error_code"])


def test_options_are_changed_one_by_one(store: txnkv.Client, wire: Wire) -> None:
    topic = store.create_topic("t", retention_bytes=1000)

    def change(name: str, value: str | None, kind: int = 0, **body: Any) -> int:
        told = {"name": name, "value": value, "config_operation": kind}
        return altered(wire, "IncrementalAlterConfigs", [told], **body)

    assert described(wire)["retention.ms"] == ("-1", False, 5)
    assert described(wire)["segment.ms"] == ("604800000", True, 5)
    assert change("retention.ms", "60000") == change("compression.type", "zstd") == 0
    assert change("retention.ms", "1", only=True) == 0
    assert described(wire)["retention.ms"] == ("60000", False, 1)
    assert topic.options == {
        "compression": "zstd",
        "retention_seconds": 60.0,
        "retention_bytes": 1000,
        "retain_unacknowledged": False,
        "cleanup": "delete",
        "tombstone_seconds": 86400.0,
    }
    assert change("retention.bytes", None, kind=1) == change("retention.ms", "-1") == 0
    assert change("compression.type", "producer") == change("cleanup.policy", "delete") == 0
    assert topic.options == store.create_topic("u").options
    for name, value, kind in (
        ("retention.ms", "-7", 0),
        ("retention.ms", "long", 0),
        ("retention.ms", None, 0),
        ("compression.type", "gzip", 0),
        ("cleanup.policy", "compacted", 0),
        ("cleanup.policy", None, 0),
        ("segment.ms", "7", 0),
        ("segment.ms", None, 1),
        ("txnkv.buffer", "sidecar", 0),
        ("retention.ms", "7", 2),
        ("no.such.option", "7", 0),
    ):
        assert change(name, value, kind) == Code.INVALID_CONFIG, (name, value)
    assert change("retention.ms", "7", resource_name="none") == Code.UNKNOWN_TOPIC_OR_PARTITION
    assert change("retention.ms", "7", resource_type=4) == Code.INVALID_REQUEST
    assert topic.options["retention_seconds"] is None


def test_options_are_changed_together(store: txnkv.Client, wire: Wire) -> None:
    """Those that are not named are as by default."""
    topic = store.create_topic("t", retention_bytes=1000, compression="lz4")
    told = [{"name": "retention.ms", "value": "5000"}, {"name": "segment.ms", "value": "604800000"}]
    assert altered(wire, "AlterConfigs", told) == 0
    assert topic.options["retention_seconds"] == 5.0
    assert topic.options["retention_bytes"] is topic.options["compression"] is None


# -- transactions ----------------------------------------------------------------------


def listed(wire: Wire, **filters: Any) -> dict[str, str]:
    found = wire.ask("ListTransactions", **{"duration_filter": -1, **filters})
    return {
        each["transactional_id"]: each["transaction_state"] for each in found["transaction_states"]
    }


def test_transactions_are_listed_and_described(store: txnkv.Client, wire: Wire) -> None:
    store.create_topic("t", 3)
    open_, done = _begin(wire, "open"), _begin(wire, "done")
    _begin(wire, "idle")
    for who in (open_, done):
        assert _add(wire, who) == 0
        _send(wire, who, 0, b"a")
    assert _end(wire, done, commit=True) == 0
    with store.transaction() as txn:
        txn.send("t", b"of the store", partition=2)
        txn.serialize()
        txn.flush()
        own = f"txnkv-{txn.id.local}"
        every = {"open": "Ongoing", "done": "CompleteCommit", "idle": "Empty", own: "Ongoing"}
        assert listed(wire) == every
        assert listed(wire, state_filters=["Ongoing"]).keys() == {"open", own}
        assert listed(wire, producer_id_filters=[done["producer_id"]]).keys() == {"done"}
        assert listed(wire, duration_filter=600_000) == {}
        found = wire.ask("ListTransactions", state_filters=["Dead", "Odd"], duration_filter=-1)
        assert (found["unknown_state_filters"], found["transaction_states"]) == (["Odd"], [])
        states = wire.ask("DescribeTransactions", transactional_ids=["open", "idle", own, "none"])
        first, idle, mine, none = states["transaction_states"]
        assert first["producer_id"] == open_["producer_id"]
        assert first["transaction_timeout_ms"] == 60_000
        assert first["transaction_start_time_ms"] > 1_600_000_000_000
        assert first["topics"] == [{"topic": "t", "partitions": [0]}]
        assert (idle["transaction_state"], idle["transaction_start_time_ms"]) == ("Empty", -1)
        assert mine["topics"] in ([{"topic": "t", "partitions": [2]}], [])
        assert none["error_code"] == Code.TRANSACTIONAL_ID_NOT_FOUND


def test_transactions_of_the_store_are_shown_to_admins_alone(
    store: txnkv.Client, serve: Callable[..., KafkaServer], dial: Dial, tmp_path: Path
) -> None:
    path = tmp_path / "users.toml"
    store.create_topic("t")
    tokens = {right: add_user(path, right, right, ["*"], ["t"]) for right in RIGHTS[1:]}
    server = serve(Users(path))
    wires = {right: log_in(dial(server), token) for right, token in tokens.items()}
    _begin(wires["write"], "x")
    with store.transaction() as txn:
        txn.serialize()
        own = f"txnkv-{txn.id.local}"
        found = {right: listed(wire).keys() for right, wire in wires.items()}
        assert found == {"read": set(), "write": {"x"}, "admin": {"x", own}}
        for right, code in (("write", Code.TRANSACTIONAL_ID_NOT_FOUND), ("admin", 0)):
            told = wires[right].ask("DescribeTransactions", transactional_ids=["x", own])
            assert [each["error_code"] for each in told["transaction_states"]] == [0, code]


def test_producers_of_a_partition_and_the_end_of_one(store: txnkv.Client, wire: Wire) -> None:
    topic = store.create_topic("t", 2)
    plain = wire.ask("InitProducerId", **NOBODY)["producer_id"]
    assert wire.produce("t", batch_of(b"a", b"b", producer=(plain, 0), first=0))["error_code"] == 0
    who = _begin(wire)
    assert _add(wire, who) == 0
    assert _send(wire, who, 0, b"never")["base_offset"] == 2

    def active(number: int) -> list[dict[str, Any]]:
        asked = [{"name": "t", "partition_indexes": [number]}]
        (found,) = wire.ask("DescribeProducers", topics=asked)["topics"][0]["partitions"]
        return found["active_producers"] if not found["error_code"] else [found]

    found = {each["producer_id"]: each for each in active(0)}
    assert found[plain]["last_sequence"] == 1
    assert found[plain]["current_txn_start_offset"] == -1
    assert found[who["producer_id"]]["current_txn_start_offset"] == 2
    assert active(1) == []
    assert active(7)[0]["error_code"] == Code.UNKNOWN_TOPIC_OR_PARTITION

    def mark(epoch: int, commit: bool) -> int:
        topics = [{"name": "t", "partition_indexes": [0]}]
        marker = {"producer_id": who["producer_id"], "producer_epoch": epoch, "topics": topics}
        told = [marker | {"transaction_result": commit, "coordinator_epoch": -1}]
        (answer,) = wire.ask("WriteTxnMarkers", markers=told)["markers"]
        return int(answer["topics"][0]["partitions"][0]["error_code"])

    assert mark(0, commit=True) == Code.INVALID_REQUEST
    assert mark(1, commit=False) == Code.INVALID_PRODUCER_EPOCH
    assert topic.last_stable_offsets()[0] == 2
    assert mark(0, commit=False) == 0
    assert topic.last_stable_offsets()[0] == 4
    assert mark(0, commit=False) == Code.INVALID_PRODUCER_EPOCH
    assert listed(wire) == {"x": "CompleteAbort"}
    assert _end(wire, who, commit=True) != 0
    with topic.consumer() as consumer:
        assert [each.value for each in consumer.poll(timeout=0)] == [b"a", b"b"]


@pytest.mark.parametrize("buffer", ["sidecar"])
def test_producers_beside_the_log(store: txnkv.Client, wire: Wire, buffer: Any) -> None:
    store.create_topic("t", 1, buffer)
    asked = [{"name": "t", "partition_indexes": [0]}]
    with store.transaction() as txn:
        txn.serialize()
        txn.send("t", b"a")
        txn.flush()
        (found,) = wire.ask("DescribeProducers", topics=asked)["topics"][0]["partitions"]
        assert found["active_producers"] == []
