"""Raw fetches from a Kafka broker: record batches as they come over the socket, unfiltered."""

from __future__ import annotations

import socket
import struct
from typing import Final, Self

_FETCH: Final = 1
_VERSION: Final = 4
_CLIENT: Final = b"txnkv-bench"
_HEADER: Final = struct.Struct(">qi11xi")
"""The head of a record batch: first offset, length of what follows, last offset less the first."""
_BEFORE: Final = 12
"""Bytes of a record batch that its length does not count."""


class RawConsumer:
    """Fetches one partition of a topic in the order of offsets.

    Args:
        server: host and port of the broker.
        topic: with one partition.
        committed: whether to read only what is committed.
    """

    def __init__(self, server: str, topic: str, *, committed: bool) -> None:
        host, _, port = server.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=30)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._topic = topic.encode()
        self._committed = committed
        self._answer = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def fetch(self, offset: int, max_bytes: int) -> tuple[int, int]:
        """Fetch from `offset` on.

        Returns:
            Bytes of whole batches that came, and the offset after them.

        Raises:
            RuntimeError: the broker refused.
        """
        self._socket.sendall(self._request(offset, max_bytes))
        return self._batches(self._receive(), offset)

    def _request(self, offset: int, max_bytes: int) -> bytes:
        head = struct.pack(">hhih", _FETCH, _VERSION, 0, len(_CLIENT)) + _CLIENT
        # Replica, longest wait in ms, least bytes, most bytes, isolation, one topic.
        body = struct.pack(">iiiibi", -1, 0, 0, max_bytes, self._committed, 1)
        body += struct.pack(">h", len(self._topic)) + self._topic
        body += struct.pack(">iiqi", 1, 0, offset, max_bytes)  # one partition: the first
        return struct.pack(">i", len(head) + len(body)) + head + body

    def _receive(self) -> memoryview:
        length = struct.unpack(">i", self._read(4))[0]
        return self._read(length)

    def _read(self, length: int) -> memoryview:
        if len(self._answer) < length:
            self._answer = bytearray(length)
        view = memoryview(self._answer)[:length]
        at = 0
        while at < length:
            got = self._socket.recv_into(view[at:])
            if not got:
                raise RuntimeError("the broker closed the connection")
            at += got
        return view

    def _batches(self, answer: memoryview, offset: int) -> tuple[int, int]:
        # Correlation, throttling, one topic: its name; one partition: its number.
        at = 12 + 2 + len(self._topic) + 4
        _, error, _, _, aborted = struct.unpack_from(">ihqqi", answer, at)
        if error:
            raise RuntimeError(f"the broker refused a fetch with error {error}")
        at += 26 + max(aborted, 0) * 16
        (length,) = struct.unpack_from(">i", answer, at)
        at += 4
        found, end = 0, at + max(length, 0)
        while at + _HEADER.size <= end:
            first, rest, last = _HEADER.unpack_from(answer, at)
            if at + _BEFORE + rest > end:
                break  # cut off by the limit
            at += _BEFORE + rest
            found += _BEFORE + rest
            offset = first + last + 1
        return found, offset
