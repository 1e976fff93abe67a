"""What one client can take, and for how long: never what others need."""

from __future__ import annotations

import errno
import socket
import ssl
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import txnkv
from tests.kafka.test_groups import asking, refused, running, until
from tests.kafka.test_requests import _begin, _commit_offset, _end
from tools.kafka_wire import Wire, batch_of, request
from txnkv.kafka import KafkaServer, consumer_groups, listener, log_requests
from txnkv.kafka.api_tables import Code
from txnkv.kafka.consumer_groups import STABLE, ConsumerGroup, Groups
from txnkv.kafka.wire_codec import MalformedError, _varint, read_request
from txnkv.server import Users, add_user
from txnkv.storage import faults

Serve = Callable[..., KafkaServer]
Dial = Callable[[KafkaServer], Wire]
MEBIBYTE = 1 << 20


def log_in(wire: Wire, token: str) -> Wire:
    assert wire.ask("SaslHandshake", mechanism="PLAIN")["error_code"] == 0
    said = f"\0{token.partition('.')[0]}\0{token}".encode()
    assert wire.ask("SaslAuthenticate", auth_bytes=said)["error_code"] == 0
    return wire


def announced(size: int) -> bytes:
    """A Produce of so many bytes, of which two come."""
    return struct.pack(">ih", size, 0)


def test_a_user_that_keeps_all_memory_holds_up_itself(
    store: txnkv.Client, serve: Serve, dial: Dial, tmp_path: Path
) -> None:
    store.create_topic("t")
    path = tmp_path / "users.toml"
    ann, bob = (add_user(path, name, "write", ["*"], ["*"]) for name in ("ann", "bob"))
    server = serve(Users(path))
    for _ in range(4):
        log_in(dial(server), ann).socket.sendall(announced(64 * MEBIBYTE))
    until(lambda: server._large._used["ann"] == 256 * MEBIBYTE)
    other = log_in(dial(server), bob)
    other.socket.settimeout(10)
    assert other.produce("t", batch_of(bytes(100_000)))["error_code"] == 0


def test_an_answer_has_one_batch_more_than_there_is_room_at_most(
    store: txnkv.Client, wire: Wire
) -> None:
    """The first that is not empty: clients take no answer that is larger than they said."""
    store.create_topic("t", 3)
    for partition in (1, 2):
        for _ in range(2):
            batch = batch_of(bytes(100_000))
            assert wire.produce("t", batch, partition)["error_code"] == 0
    wanted = [
        {"partition": each, "fetch_offset": 0, "partition_max_bytes": MEBIBYTE} for each in range(3)
    ]

    def sizes(most: int) -> list[int]:
        topics = [{"topic": "t", "partitions": wanted}]
        answer = wire.ask("Fetch", max_bytes=most, min_bytes=1, max_wait_ms=10_000, topics=topics)
        found = answer["responses"][0]["partitions"]
        return [len(each["records"]) // 100_000 for each in found]

    assert sizes(10) == sizes(150_000) == [0, 1, 0]
    assert sizes(210_000) == [0, 2, 0]
    assert sizes(350_000) == [0, 2, 1]
    assert sizes(MEBIBYTE) == [0, 2, 2]


def test_a_request_that_comes_byte_by_byte_is_given_up(
    store: txnkv.Client, server: KafkaServer, dial: Dial, monkeypatch: Any
) -> None:
    """Each byte was a sign of life: it kept its memory for as long as it wanted."""
    monkeypatch.setattr(listener, "_STUCK_SECONDS", 0.2)
    monkeypatch.setattr(listener, "_LEAST_RATE", 1 << 30)
    slow = dial(server).socket
    slow.sendall(announced(64 * MEBIBYTE))
    slow.settimeout(0.01)
    end = time.monotonic() + 30
    with suppress(OSError):  # the server has closed it
        while time.monotonic() < end:
            with suppress(TimeoutError):
                assert slow.recv(1) == b""
                break
            slow.sendall(b"\0")
    assert time.monotonic() < end
    until(lambda: not server._large._used)


def test_who_waits_for_a_round_keeps_no_memory_of_large_requests(
    store: txnkv.Client, server: KafkaServer, dial: Dial
) -> None:
    def join(wire: Wire) -> Any:
        known = [{"name": "range", "metadata": bytes(100_000)}]
        times = {"session_timeout_ms": 60_000, "rebalance_timeout_ms": 60_000}
        asked = {"group_id": "g", "protocol_type": "consumer", "protocols": known}
        return wire.ask("JoinGroup", 3, **asked, **times, member_id="")

    with ThreadPoolExecutor(1) as pool:
        join(dial(server))
        second = dial(server)
        waiting = pool.submit(join, second)
        until(lambda: len(server._broker.groups.get("g").members) == 2)
        assert not server._large._used
        assert not waiting.done()
        server._broker.groups.get("g").leave(*_first(server))
        assert waiting.result(60)["generation_id"] == 2


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("what", ["JoinGroup", "SyncGroup", "Fetch"])
def test_who_hangs_up_while_it_waits_keeps_no_connection(
    store: txnkv.Client,
    serve: Serve,
    dial: Dial,
    certificate: tuple[Path, Path],
    monkeypatch: Any,
    what: str,
    encrypted: bool,
) -> None:
    """Five hundred of them kept everybody out, for as long as a round may take."""
    monkeypatch.setattr(log_requests, "_MOST_WAIT_MILLIS", 600_000)
    monkeypatch.setattr(consumer_groups, "_GATHER", 0)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    server = serve(tls=context if encrypted else None)

    def connect() -> Wire:
        wire = dial(server)
        if encrypted:
            trusting = ssl.create_default_context(cafile=certificate[0])
            wire.socket = trusting.wrap_socket(wire.socket, server_hostname="127.0.0.1")
        return wire

    store.create_topic("t")
    group = {"group_id": "g", "protocol_type": "consumer"}
    times = {"session_timeout_ms": 600_000, "rebalance_timeout_ms": 600_000}
    asked = group | times | {"protocols": [{"name": "range", "metadata": b""}]}
    leader, gone = connect(), connect()
    if what == "Fetch":
        wanted = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": MEBIBYTE}
        topics = [{"topic": "t", "partitions": [wanted]}]
        limits = {"max_wait_ms": 600_000, "min_bytes": 1, "max_bytes": MEBIBYTE}
        call = request("Fetch", 4, **limits, isolation_level=0, replica_id=-1, topics=topics)
    else:
        one = leader.ask("JoinGroup", 3, **asked, member_id="")["member_id"]
        call = request("JoinGroup", 3, **asked, member_id="")
    if what == "SyncGroup":
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(gone.ask, "JoinGroup", 3, **asked, member_id="")
            until(lambda: len(server._broker.groups.get("g").members) == 2)
            leader.ask("JoinGroup", 3, **asked, member_id=one)
            two = joined.result(60)["member_id"]
        call = request("SyncGroup", 3, group_id="g", generation_id=2, member_id=two, assignments=[])
    gone.socket.sendall(call + request("ApiVersions", 0))  # which stays unread
    gone.socket.close()
    until(lambda: len(server._open) == 1)
    assert leader.ask("ApiVersions", 0)["error_code"] == 0


def _first(server: KafkaServer) -> tuple[str, None]:
    return next(iter(server._broker.groups.get("g").members)), None


def test_only_messages_are_many_bytes(server: KafkaServer, dial: Dial) -> None:
    wire = dial(server)
    wire.socket.sendall(struct.pack(">ih", 3 * MEBIBYTE, 11))
    with pytest.raises((EOFError, ConnectionError)):
        wire.read()


def test_a_crowd_of_requests_for_thousands_is_answered_in_turns(
    server: KafkaServer, dial: Dial
) -> None:
    """Hundreds of them at once kept whoever asked for a little waiting for more than a minute."""
    peer = dial(server)
    assert peer.ask("Metadata", topics=[])["topics"] == []
    (one,) = server._open
    turn = one.peer.hold(server._turns)
    turn.take(1)
    with ThreadPoolExecutor(1) as pool:
        many = pool.submit(dial(server).ask, "Metadata", topics=[{"name": "no"}] * 1_001)
        assert len(peer.ask("Metadata", topics=[{"name": "no"}] * 900)["topics"]) == 900
        assert not many.done()
        turn.keep(0)
        assert len(many.result(60)["topics"]) == 1_001


def test_a_server_stops_in_the_midst_of_a_handshake(
    store: txnkv.Client, serve: Serve, certificate: tuple[Path, Path], monkeypatch: Any
) -> None:
    monkeypatch.setattr(listener, "_HANDSHAKE_SECONDS", 1000.0)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    server = serve(tls=context)
    with socket.create_connection(("127.0.0.1", server.port)), ThreadPoolExecutor(1) as pool:
        until(lambda: any(isinstance(each.channel, ssl.SSLSocket) for each in server._open))
        pool.submit(server.close).result(60)


def test_who_speaks_no_tls_is_told_of_now_and_then(
    serve: Serve, certificate: tuple[Path, Path], caplog: Any
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    server = serve(tls=context)
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", server.port)) as one, suppress(OSError):
            one.sendall(b"GET / HTTP/1.1\r\n\r\n")
            one.recv(1)
    until(lambda: not server._open)
    (told,) = caplog.messages
    assert told.startswith("127.0.0.1 is closed: no TLS with it: ")
    assert "HTTP_REQUEST" in told


class Lacking:
    """A socket that finds no descriptor for a connection, while files have all of them."""

    def __init__(self, of: socket.socket) -> None:
        self.of = of
        self.files = ["idle"]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of, name)

    def accept(self) -> Any:
        if self.files:
            raise OSError(errno.EMFILE, "Too many open files")
        return self.of.accept()


def test_idle_files_make_room_for_connections(
    server: KafkaServer, dial: Dial, monkeypatch: Any, caplog: Any
) -> None:
    lacking: Any = Lacking(server._socket)
    server._socket = lacking
    with monkeypatch.context() as patch:
        patch.setattr(faults, "CLOSE_IDLE", [lacking.files.clear])
        dial(server)  # was waited for before
        assert dial(server).ask("ApiVersions", 0)["error_code"] == 0
        until(lambda: len(server._open) == 2)
    assert caplog.messages == []
    lacking.files.append("in use")
    dial(server)
    waiting = dial(server)
    until(lambda: caplog.messages)
    lacking.files.clear()
    assert waiting.ask("ApiVersions", 0)["error_code"] == 0
    (told,) = caplog.messages
    assert told.startswith("new connections wait: [Errno 24] Too many open files")


def test_connections_leave_descriptors_to_the_store(
    server: KafkaServer, dial: Dial, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(listener, "descriptor_limit", lambda: 5)
    for _ in range(2):
        assert dial(server).ask("ApiVersions", 0)["error_code"] == 0
    with pytest.raises((EOFError, ConnectionError)):
        dial(server).ask("ApiVersions", 0)
    assert caplog.messages == ["127.0.0.1 is refused: 2 connections are the most"]


def test_who_does_not_say_who_it_is_is_not_waited_for(
    store: txnkv.Client, serve: Serve, dial: Dial, tmp_path: Path, monkeypatch: Any
) -> None:
    add_user(tmp_path / "users.toml", "ann", "write", ["*"], ["*"])
    monkeypatch.setattr(listener, "_HANDSHAKE_SECONDS", 0.1)
    wire = dial(serve(Users(tmp_path / "users.toml")))
    with pytest.raises((EOFError, ConnectionError)):
        wire.read()


def test_groups_whose_members_are_gone_make_room(monkeypatch: Any) -> None:
    """Nobody asks for them any more, and so nobody saw that their members give no sign."""
    monkeypatch.setattr(consumer_groups, "_MOST_GROUPS", 3)
    groups = Groups()
    for name in "abc":
        groups.get(name, keep=True).join(asking(name), running)
    refused(Code.GROUP_MAX_SIZE_REACHED, lambda: groups.get("d", keep=True))
    (member,) = groups.get("b").members.values()
    member.seen -= 31
    groups.get("d", keep=True)
    assert sorted(groups.names()) == ["a", "c", "d"]


def test_a_leader_that_is_in_time_stays() -> None:
    """Its assignment came while the one who waits for it was not running, until after the time."""
    group = ConsumerGroup("g")
    with ThreadPoolExecutor(2) as pool:
        one, _ = group.join(asking("a"), running)
        group.sync(one, None, 1, {}, running)
        second = pool.submit(group.join, asking("b"), running)
        until(lambda: len(group.members) == 2)
        group.join(asking("a", one), running)
        two, _ = second.result(60)

    def synced(_: Any) -> None:
        group.state, group._until = STABLE, 0.0

    group._wait = synced  # type: ignore[method-assign]
    assert group.sync(two, None, 2, {}, running) == b""
    assert one in group.members
    assert group.state == STABLE


def test_offsets_of_topics_are_for_those_who_may_read_them(
    store: txnkv.Client, serve: Serve, dial: Dial, tmp_path: Path
) -> None:
    for name in ("t", "mine"):
        store.create_topic(name)
    path = tmp_path / "users.toml"
    ann = add_user(path, "ann", "write", ["*"], ["*"])
    bob = add_user(path, "bob", "read", [], ["mine"])
    server = serve(Users(path))
    wire = log_in(dial(server), ann)
    who = _begin(wire)
    assert wire.ask("AddOffsetsToTxn", **who, group_id="g")["error_code"] == 0
    assert _commit_offset(wire, who, 5) == 0
    assert _end(wire, who, commit=True) == 0
    other = log_in(dial(server), bob)
    for topics, seen in (
        (None, []),
        ([{"name": "t", "partition_indexes": [0]}], [(-1, "", Code.TOPIC_AUTHORIZATION_FAILED)]),
    ):
        answer = other.ask("OffsetFetch", groups=[{"group_id": "g", "topics": topics}])
        found = [
            (each["committed_offset"], each["metadata"], each["error_code"])
            for topic in answer["groups"][0]["topics"]
            for each in topic["partitions"]
        ]
        assert found == seen


@pytest.mark.parametrize(("epoch", "first"), [(-1, 0), (0, -1), (0, -(1 << 31))])
def test_a_producer_numbers_from_0_on(
    store: txnkv.Client, wire: Wire, epoch: int, first: int
) -> None:
    topic = store.create_topic("t")
    batch = batch_of(b"v", producer=(7, epoch), first=first)
    assert wire.produce("t", batch)["error_code"] == Code.INVALID_RECORD
    assert topic.end_offsets() == {0: 0}


def test_names_that_are_longer_than_texts_can_be_break_no_answer(
    store: txnkv.Client, wire: Wire
) -> None:
    """Programs of the store may have some; nobody was told of any topic or group any more."""
    name = "\u20ac" * 20_000
    with store.consumer(store.create_topic(name), group=name) as member:
        member.poll(timeout=0)
        store.create_topic("t")
        for version in range(1, 13):
            found = wire.ask("Metadata", version, topics=None)["topics"]
            assert [each["name"] for each in found] == ["t"]
        for version in range(6):
            (group,) = wire.ask("ListGroups", version)["groups"]
            assert group["group_id"] == name[: 0x7FFF // 3]
    long = {"name": "\0" * 20_000, "num_partitions": 1, "replication_factor": 1}
    for version in (4, 6):  # its error has the name four times as long
        (refused,) = wire.ask("CreateTopics", version, topics=[long])["topics"]
        assert refused["error_code"] == Code.INVALID_TOPIC


def test_texts_that_no_16_bits_count_are_no_request() -> None:
    head = struct.pack(">hhih", 8, 8, 0, -1) + b"\0"  # OffsetCommit in version 8
    with pytest.raises(MalformedError, match="40,000 bytes: 32,767 are the most"):
        read_request(head + _varint(40_001) + b"g" * 40_000)


def test_a_topic_has_a_name_before_topics_have_ids(
    server: KafkaServer, dial: Dial, caplog: pytest.LogCaptureFixture
) -> None:
    for version in range(10):
        wire = dial(server)
        wire.socket.sendall(request("Metadata", version, topics=[{"name": None}]))
        with pytest.raises((EOFError, ConnectionError)):
            wire.read()
    assert {each.getMessage().partition(": ")[2] for each in caplog.records} == {
        "a topic without a name, before topics have ids"
    }


@pytest.mark.parametrize(("name", "code"), [("\u00e9".encode(), 0), (b"\xe9", Code.INVALID_RECORD)])
def test_a_header_s_name_is_utf_8(store: txnkv.Client, wire: Wire, name: bytes, code: int) -> None:
    """Other clients send any bytes; nobody could read such a message, or go on behind it."""
    topic = store.create_topic("t")
    assert wire.produce("t", batch_of(b"v", header=name))["error_code"] == code
    found = [message.headers for message in topic.consumer().poll(timeout=0)]
    assert found == ([] if code else [[("\u00e9", b"")]])


@pytest.mark.parametrize("large", ["name", "count", "time"])
def test_a_message_above_a_limit_holds_up_no_other(
    store: txnkv.Client, server: KafkaServer, large: str
) -> None:
    """Answered as damage, it was sent again and again; of an idempotent producer it was "there"."""
    kafka = pytest.importorskip("confluent_kafka", exc_type=ImportError)
    topic = store.create_topic("t")
    told: list[tuple[bytes, int | None]] = []
    producer = kafka.Producer(
        {"bootstrap.servers": f"127.0.0.1:{server.port}", "enable.idempotence": True}
    )

    def note(error: Any, message: Any) -> None:
        told.append((message.value(), None if error is None else error.code()))

    headers = {"name": [("n" * 70_000, b"")], "count": [("n", b"")] * 70_000}.get(large)
    time = {"timestamp": (1 << 63) // 1000 + 1} if large == "time" else {}
    producer.produce("t", b"bad", headers=headers, on_delivery=note, **time)
    producer.flush(30)
    producer.produce("t", b"good", on_delivery=note)
    producer.flush(30)
    assert told == [(b"bad", Code.INVALID_RECORD), (b"good", None)]
    assert [message.value for message in topic.consumer().poll(timeout=0)] == [b"good"]
