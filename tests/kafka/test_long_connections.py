"""Clients that stay connected while users, topics and positions change."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

import txnkv
from tests import internals
from tools.kafka_wire import Seen, Wire, batch_of
from txnkv.kafka import KafkaServer
from txnkv.kafka.api_tables import Code
from txnkv.server import Users, add_user

Dial = Callable[[KafkaServer], Wire]


def test_a_user_whose_entry_is_changed_is_turned_out(
    store: txnkv.Client,
    serve: Callable[..., KafkaServer],
    dial: Dial,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store.create_topic("t")
    path = tmp_path / "users.toml"
    token = add_user(path, "ann", "write", ["*"], ["*"])
    server = serve(Users(path))

    def logged_in() -> Wire:
        wire = dial(server)
        assert wire.ask("SaslHandshake", mechanism="PLAIN")["error_code"] == 0
        said = b"\0ann\0" + token.encode()
        assert wire.ask("SaslAuthenticate", auth_bytes=said)["error_code"] == 0
        return wire

    wire = logged_in()
    add_user(path, "bob", "read", ["*"], ["*"])
    assert wire.produce("t", batch_of(b"v"))["error_code"] == 0, "others are no matter of hers"
    path.write_text(path.read_text().replace('"write"', '"read"'))
    with pytest.raises((EOFError, ConnectionError)):
        wire.produce("t", batch_of(b"v"))
    wire = logged_in()
    assert wire.produce("t", batch_of(b"v"))["error_code"] == Code.TOPIC_AUTHORIZATION_FAILED
    right = path.read_text()
    path.write_text("")
    with pytest.raises((EOFError, ConnectionError)):
        wire.fetch("t", 0)
    path.write_text(right)
    wire = logged_in()
    path.write_text("users = 3")
    with pytest.raises((EOFError, ConnectionError)):
        wire.fetch("t", 0)
    wire = dial(server)
    assert wire.ask("SaslHandshake", mechanism="PLAIN")["error_code"] == 0
    refused = wire.ask("SaslAuthenticate", auth_bytes=b"\0ann\0" + token.encode())["error_code"]
    assert refused == Code.SASL_AUTHENTICATION_FAILED
    assert not [each for each in caplog.records if each.exc_info]
    path.write_text(right)
    assert logged_in().fetch("t", 0)["error_code"] == 0


def test_a_fetch_goes_on_in_the_topic_of_the_same_name(
    store: txnkv.Client, server: KafkaServer, dial: Dial
) -> None:
    store.create_topic("t")
    reader, writer = dial(server), dial(server)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(reader.fetch, "t", 0, max_wait_ms=60_000, min_bytes=1)
        assert not wait((waiting,), 0.3).done
        store.drop_topic("t")
        store.create_topic("t")
        writer.produce("t", batch_of(b"new"))
        found = waiting.result(50)
    gone = found["error_code"] == Code.UNKNOWN_TOPIC_OR_PARTITION  # it looked in between
    assert gone or Seen(found["records"]).values == [b"new"]


def test_partitions_without_room_in_an_answer_have_their_bounds(
    store: txnkv.Client, wire: Wire
) -> None:
    store.create_topic("t", partitions=2)
    for number in (0, 1):
        wire.produce("t", batch_of(bytes(100_000)), number)
    parts = [
        {"partition": n, "fetch_offset": 0, "partition_max_bytes": 1 << 20, "log_start_offset": -1,
         "current_leader_epoch": -1, "last_fetched_epoch": -1}
        for n in (0, 1)
    ]  # fmt: skip
    answer = wire.ask("Fetch", replica_id=-1, session_epoch=-1, max_bytes=50_000, rack_id="",
                      topics=[{"topic": "t", "partitions": parts}])  # fmt: skip
    first, second = answer["responses"][0]["partitions"]
    assert len(first["records"]) > 100_000
    assert len(second["records"]) == 0
    names = "error_code", "high_watermark", "last_stable_offset", "log_start_offset"
    assert [second[name] for name in names] == [0, 1, 1, 0]


def test_positions_go_with_their_topic(store: txnkv.Client, wire: Wire) -> None:
    """One that has the name of another is read from its begin, also where a drop broke off."""
    store.create_topic("t")

    def commit() -> None:
        parts = [{"partition_index": 0, "committed_offset": 3}]
        topics = [{"name": "t", "partitions": parts}]
        asked = {"generation_id_or_member_epoch": -1, "member_id": "", "topics": topics}
        wire.ask("OffsetCommit", group_id="g", **asked)

    def committed() -> int:
        topics = [{"name": "t", "partition_indexes": [0]}]
        answer = wire.ask("OffsetFetch", groups=[{"group_id": "g", "topics": topics}])
        found: int = answer["groups"][0]["topics"][0]["partitions"][0]["committed_offset"]
        return found

    commit()
    assert committed() == 3
    store.drop_topic("t")
    assert committed() == -1
    store.create_topic("t")
    commit()
    internals.topics(store).drop("t")
    store.create_topic("t")
    assert committed() == -1
