"""A server for Kafka's clients of the test's store, and a client of bare requests."""

from __future__ import annotations

import itertools
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import txnkv
from txnkv import core
from txnkv.kafka import KafkaServer
from txnkv.kafka.api_tables import APIS
from txnkv.kafka.wire_codec import _fields_of, _Reader, _Writer
from txnkv.server import Users

BY_NAME = {api.name: api for api in APIS.values()}


@pytest.fixture
def store(connect: Callable[..., txnkv.Client]) -> txnkv.Client:
    """The store as the server's host has it; checked at the end."""
    return connect()


@pytest.fixture
def serve(store: txnkv.Client, store_path: Path) -> Iterator[Callable[..., KafkaServer]]:
    """Starts servers in this process, closed at the end."""
    made: list[KafkaServer] = []

    def start(users: Users | None = None, **options: Any) -> KafkaServer:
        made.append(KafkaServer(str(store_path), "127.0.0.1", 0, users, **options))
        return made[-1]

    yield start
    for server in made:
        server.close()


@pytest.fixture
def server(serve: Callable[..., KafkaServer]) -> KafkaServer:
    return serve()


class Wire:
    """A connection that asks, one request after the other."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.settimeout(60)
        self._numbers = itertools.count()

    def ask(self, name: str, version: int | None = None, **body: Any) -> dict[str, Any]:
        """Return the answer; in the latest version, unless one is named."""
        api = BY_NAME[name]
        version = api.last if version is None else version
        self.socket.sendall(request(name, version, next(self._numbers), **body))
        reader = _Reader(memoryview(self.read()))
        reader.number(struct.Struct(">i"))
        reader.flexible = version >= api.flexible
        if reader.flexible and name != "ApiVersions":
            reader.tags()
        found = reader.struct(_fields_of(api.key, version, True))
        assert reader.at == len(reader.data)
        return found

    def read(self) -> bytes:
        """Return the bytes of an answer.

        Raises:
            EOFError: the connection was closed.
        """
        size = int.from_bytes(self._exactly(4), "big")
        return self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self.socket.recv(size - len(data))
            if not piece:
                raise EOFError
            data += piece
        return data

    # -- shortcuts -----------------------------------------------------------------------

    def produce(self, topic: str, batch: bytes, partition: int = 0, **body: Any) -> dict[str, Any]:
        """Send one batch; the answer of its partition."""
        topics = [{"name": topic, "partitions": [{"index": partition, "records": batch}]}]
        answer = self.ask("Produce", acks=-1, timeout_ms=9000, topics=topics, **body)
        found: dict[str, Any] = answer["responses"][0]["partition_responses"][0]
        return found

    def fetch(self, topic: str, offset: int, partition: int = 0, **body: Any) -> dict[str, Any]:
        """The answer of one partition, at once."""
        wanted = {"partition": partition, "fetch_offset": offset, "partition_max_bytes": 1 << 20}
        topics = [{"topic": topic, "partitions": [wanted]}]
        answer = self.ask("Fetch", max_bytes=1 << 20, topics=topics, **body)
        found: dict[str, Any] = answer["responses"][0]["partitions"][0]
        return found


def request(name: str, version: int, number: int = 0, **body: Any) -> bytes:
    """A request with its length before it."""
    api = BY_NAME[name]
    writer = _Writer(version >= api.flexible)
    writer.parts.append(struct.pack(">hhih4s", api.key, version, number, 4, b"test"))
    if writer.flexible:
        writer.parts.append(b"\0")
    writer.struct(_fields_of(api.key, version, False), body)
    data = b"".join(writer.parts)
    return struct.pack(">i", len(data)) + data


@pytest.fixture
def dial() -> Iterator[Callable[[KafkaServer], Wire]]:
    """Connects to servers; closed at the end."""
    made: list[Wire] = []

    def connect(server: KafkaServer) -> Wire:
        made.append(Wire(server.port))
        return made[-1]

    yield connect
    for each in made:
        each.socket.close()


@pytest.fixture
def wire(server: KafkaServer, dial: Callable[[KafkaServer], Wire]) -> Wire:
    return dial(server)


def batch_of(
    *values: bytes | None, producer: tuple[int, int] = (-1, -1), first: int = -1, open: bool = False
) -> bytes:
    """A batch of messages as a producer sends it."""
    records = b"".join(_record(number, value) for number, value in enumerate(values))
    count = len(values)
    attributes = 0x10 if open else 0
    ids = struct.pack(">qhii", *producer, first, count)
    checked = struct.pack(">hiqq", attributes, count - 1, 1000, 1000) + ids + records
    head = struct.pack(">qiib", 0, len(checked) + 9, -1, 2)
    return head + struct.pack(">I", core.crc32c(checked)) + checked


def _record(number: int, value: bytes | None) -> bytes:
    said = _zigzag(-1) if value is None else _zigzag(len(value)) + value
    body = b"\0" + _zigzag(0) + _zigzag(number) + _zigzag(-1) + said + _zigzag(0)
    return _zigzag(len(body)) + body


def _zigzag(number: int) -> bytes:
    left = number * 2 if number >= 0 else -number * 2 - 1
    out = bytearray()
    while left > 0x7F:
        out.append((left & 0x7F) | 0x80)
        left >>= 7
    return bytes([*out, left])


class Seen:
    """The batches of a fetch: base and last offset, attributes, producer, number of records."""

    def __init__(self, records: Any) -> None:
        self.batches: list[tuple[int, int, int, int, int]] = []
        self.values: list[bytes | None] = []
        data = bytes(records or b"")
        at = 0
        while at < len(data):
            base, length, *_ = struct.unpack_from(">qi", data, at)
            crc, attributes, last, millis, _, producer, _, _, count = struct.unpack_from(
                ">Ihiqqqhii", data, at + 17
            )
            end = at + 12 + length
            assert core.crc32c(data[at + 21 : end]) == crc
            self.batches.append((base, base + last, attributes, producer, count))
            if not attributes & 0x20 and count == last + 1:
                rows = core.decode_records(data[at + 61 : end], count, millis)
                self.values += rows.column("value").to_pylist()
            at = end
        assert at == len(data)
