"""A client of bare requests in Kafka's protocol: of our server, or of any broker."""

from __future__ import annotations

import itertools
import socket
import struct
from typing import Any

from txnkv import core
from txnkv.kafka.api_tables import APIS
from txnkv.kafka.wire_codec import _fields_of, _Reader, _Writer

BY_NAME = {api.name: api for api in APIS.values()}


class Wire:
    """A connection that asks, one request after the other."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.socket = socket.create_connection((host, port))
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
        wanted: dict[str, Any] = {"partition": partition, "fetch_offset": offset}
        wanted["partition_max_bytes"] = 1 << 20
        wanted |= dict.fromkeys(("current_leader_epoch", "last_fetched_epoch"), -1)
        wanted["log_start_offset"] = -1
        asked: dict[str, Any] = {
            "replica_id": -1,
            "session_epoch": -1,
            "max_bytes": 1 << 20,
            "rack_id": "",
        }
        topics = [{"topic": topic, "partitions": [wanted]}]
        answer = self.ask("Fetch", **(asked | body), topics=topics)
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


def batch_of(
    *values: bytes | None,
    producer: tuple[int, int] = (-1, -1),
    first: int = -1,
    open: bool = False,
    header: bytes | None = None,
) -> bytes:
    """A batch of messages as a producer sends it, each perhaps with an empty header of a name."""
    records = b"".join(_record(number, value, header) for number, value in enumerate(values))
    count = len(values)
    attributes = 0x10 if open else 0
    ids = struct.pack(">qhii", *producer, first, count)
    checked = struct.pack(">hiqq", attributes, count - 1, 1000, 1000) + ids + records
    head = struct.pack(">qiib", 0, len(checked) + 9, -1, 2)
    return head + struct.pack(">I", core.crc32c(checked)) + checked


def _record(number: int, value: bytes | None, header: bytes | None) -> bytes:
    said = _zigzag(-1) if value is None else _zigzag(len(value)) + value
    headers = b"\0" if header is None else b"\2" + _zigzag(len(header)) + header + _zigzag(-1)
    body = b"\0" + _zigzag(0) + _zigzag(number) + _zigzag(-1) + said + headers
    return _zigzag(len(body)) + body


def _zigzag(number: int) -> bytes:
    left = number * 2 if number >= 0 else -number * 2 - 1
    out = bytearray()
    while left > 0x7F:
        out.append((left & 0x7F) | 0x80)
        left >>= 7
    return bytes([*out, left])


class Seen:
    """The batches of a fetch.

    Attributes:
        batches: of each its base and last offset, attributes, producer, number of records.
        values: of all messages; markers have none.
        records: of each batch the values of its messages; of a marker the bytes of its key.
    """

    def __init__(self, records: Any) -> None:
        self.batches: list[tuple[int, int, int, int, int]] = []
        self.records: list[list[bytes | None]] = []
        data = bytes(records or b"")
        at = 0
        while at < len(data):
            base, length, *_ = struct.unpack_from(">qi", data, at)
            crc, attributes, last, millis, _, producer, _, _, count = struct.unpack_from(
                ">Ihiqqqhii", data, at + 17
            )
            end = at + 12 + length
            if end > len(data):
                break  # cut off by the size of the answer
            assert core.crc32c(data[at + 21 : end]) == crc
            self.batches.append((base, base + last, attributes, producer, count))
            self.records.append([])
            if count == last + 1:
                rows = core.decode_records(data[at + 61 : end], count, max(millis, 0))
                kind = "key" if attributes & 0x20 else "value"
                self.records[-1] = rows.column(kind).to_pylist()
            at = end

    @property
    def values(self) -> list[bytes | None]:
        pairs = zip(self.batches, self.records, strict=True)
        return [each for batch, some in pairs if not batch[2] & 0x20 for each in some]
