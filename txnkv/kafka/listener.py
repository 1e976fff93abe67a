"""The socket to which Kafka's clients connect: a thread for each connection.

A connection is answered in the order of its requests, as clients expect. What is no request closes
it, and it alone: no memory was taken for a length that was only announced, and nobody else waits.

    frame       length i32, then so many bytes; at most `_MOST_BYTES`, before a log-in far fewer
    memory      large requests, and what they become, share two rooms: a user who has some waits
                where it finds no more; what comes slowly is given up
    turns       of requests with thousands of elements one is read, and one answer written, at once
    unknown     a kind or version that is not spoken closes the connection, but for ApiVersions,
                which is answered with the versions that are
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from txnkv.errors import UnavailableError
from txnkv.kafka import group_requests, log_requests, topic_requests, transaction_requests
from txnkv.kafka.answer_codes import Code, KafkaError, code_of
from txnkv.kafka.api_tables import API_VERSIONS, APIS
from txnkv.kafka.broker import Broker, ByteRoom, Handler, MemoryHold, Peer
from txnkv.kafka.wire_codec import (
    KafkaRequest,
    MalformedError,
    UnknownVersionError,
    read_request,
    write_answer,
)
from txnkv.server import Users
from txnkv.storage import new_lock

_log = logging.getLogger("txnkv.server")

_MOST_BYTES: Final = 64 << 20
_MOST_BYTES_BEFORE: Final = 64 << 10
"""The most of a request of somebody who has not said who it is."""

_PRODUCE: Final = 0
_MOST_BYTES_OTHERS: Final = 2 << 20
"""The most of a request that brings no messages."""

_LARGE_BYTES: Final = 64 << 10
_LARGE_ROOM: Final = 256 << 20
"""Requests of more than `_LARGE_BYTES` have so much together."""

_MOST_CONNECTIONS: Final = 500
_PIECE: Final = 1 << 18
_IDLE_SECONDS: Final = 600.0
_STUCK_SECONDS: Final = 60.0
_LEAST_RATE: Final = 1 << 20
"""Bytes of a request that come in each second, behind the first `_STUCK_SECONDS`."""
_HANDSHAKE_SECONDS: Final = 10.0
_PAUSE: Final = 0.05
_BEFORE_LOGIN: Final = {API_VERSIONS, 17, 36}

HANDLERS: Final[dict[int, Handler]] = {
    **log_requests.HANDLERS,
    **topic_requests.HANDLERS,
    **transaction_requests.HANDLERS,
    **group_requests.HANDLERS,
}


class _Connection:
    """A connection with its thread; `channel` is the encrypted one, where it is."""

    thread: threading.Thread

    def __init__(self, peer: Peer, channel: socket.socket) -> None:
        self.peer = peer
        self.channel = channel


class KafkaServer:
    """A store served to Kafka's clients.

    Args:
        path: the store's directory.
        host: at which it listens.
        port: 0 takes a free one.
        users: those who may; None: everybody may all.
        tls: of the connections; None: they are not encrypted.
        new_partitions: of topics that are made by being asked for; 0: none are.

    Attributes:
        host, port: where it listens.

    Raises:
        StoreNotFoundError: there is none.
        UnavailableError: it cannot listen there.
    """

    def __init__(
        self,
        path: str,
        host: str,
        port: int,
        users: Users | None = None,
        tls: ssl.SSLContext | None = None,
        new_partitions: int = 0,
    ) -> None:
        self.host = host
        self._tls = tls
        self._lock = new_lock()
        self._open: set[_Connection] = set()
        self._closing = False
        self._broker = Broker(path, users, new_partitions)
        self._large = ByteRoom(_LARGE_ROOM)
        self._turns = ByteRoom(1)
        try:
            self._socket = socket.create_server((host, port), backlog=128)
        except OSError as error:
            self._broker.close()
            raise UnavailableError(f"cannot listen at {host}:{port}: {error}") from None
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="txnkv-kafka", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop: connections are closed, what was not acknowledged counts as lost."""
        with self._lock:
            self._closing = True
            every = list(self._open)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for each in every:
            each.peer.closing.set()
            with suppress(OSError):
                each.channel.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for each in every:
            each.thread.join()
        self._broker.close()

    # -- connections -------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._socket.accept()
            except OSError:
                if self._closing:
                    return
                time.sleep(_PAUSE)  # no descriptor is free, perhaps
                continue
            host, port = connection.getsockname()[:2]
            peer = Peer(host, port, str(address[0]), self._broker.work, self._broker.newcomer())
            made = _Connection(peer, connection)
            made.thread = threading.Thread(
                target=self._serve, args=(made,), name="txnkv-kafka-client", daemon=True
            )
            with self._lock:
                if self._closing or len(self._open) >= _MOST_CONNECTIONS:
                    connection.close()
                    continue
                self._open.add(made)
                try:
                    made.thread.start()
                except RuntimeError:  # no thread is free: the others go on
                    self._open.discard(made)
                    connection.close()

    def _serve(self, connection: _Connection) -> None:
        peer = connection.peer
        try:
            connection.channel.settimeout(_HANDSHAKE_SECONDS)
            connection.channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                channel = connection.channel = self._tls.wrap_socket(
                    connection.channel, server_side=True, do_handshake_on_connect=False
                )
                channel.do_handshake()
            while not peer.closing.is_set() and self._answer(connection.channel, peer):
                pass
        except MalformedError as error:
            _log.warning("%s is closed: %s", peer.remote, error)
        except (OSError, EOFError) as error:
            _log.debug("%s is gone: %s", peer.remote, error)
        except Exception:
            _log.exception("a connection of %s failed", peer.remote)
        finally:
            peer.closing.set()
            with self._lock:
                self._open.discard(connection)
            with suppress(OSError):
                connection.channel.close()

    def _answer(self, channel: socket.socket, peer: Peer) -> bool:
        """Answer one request; False when the client has none any more."""
        large, turn = peer.hold(self._large), peer.hold(self._turns)
        try:
            data = self._read(channel, peer, large)
            return data is not None and self._answer_to(data, channel, peer, large, turn)
        finally:
            for hold in (peer.work, large, turn):
                hold.keep(0)

    def _answer_to(
        self,
        data: bytearray,
        channel: socket.socket,
        peer: Peer,
        large: MemoryHold,
        turn: MemoryHold,
    ) -> bool:
        def many() -> None:
            turn.take(1)
            peer.require_running()

        try:
            request = read_request(data, many)
        except UnknownVersionError as error:
            if error.key != API_VERSIONS:
                raise
            body = _api_versions(Code.UNSUPPORTED_VERSION)
            _send(channel, write_answer(APIS[API_VERSIONS], 0, error.correlation, body))
            return True
        turn.keep(0)
        if request.api.key != _PRODUCE:
            large.keep(0)  # it may wait for others, for long
        found = self._answer_of(request, peer)
        if found is not None:
            api, version, number = request.api, request.version, request.correlation
            parts = write_answer(api, version, number, found, many)
            turn.keep(0)
            _send(channel, parts)
        return True

    def _answer_of(self, request: KafkaRequest, peer: Peer) -> Mapping[str, Any] | None:
        key = request.api.key
        peer.client_id = (request.client_id or "")[:255]
        if key == API_VERSIONS:
            return _api_versions(Code.NONE)
        handler = HANDLERS.get(key)
        if handler is None:
            raise UnknownVersionError(key, request.version, request.correlation)
        if peer.user is None and key not in _BEFORE_LOGIN:
            raise MalformedError(f"{request.api.name} before the client has said who it is")
        try:
            return handler(self._broker, peer, request)
        except KafkaError as error:
            if not any(field.name == "error_code" for field in request.api.answer):
                raise MalformedError(f"{request.api.name}: {error}") from None
            return {"error_code": code_of(error)[0], "error_message": str(error)}

    def _read(self, channel: socket.socket, peer: Peer, large: MemoryHold) -> bytearray | None:
        known = peer.user is not None
        channel.settimeout(_IDLE_SECONDS if known else _HANDSHAKE_SECONDS)
        head = channel.recv(4)
        if not head:
            return None
        patience = _STUCK_SECONDS if known else _HANDSHAKE_SECONDS
        head += bytes(_exactly(channel, 4 - len(head), patience))
        size = int.from_bytes(head, "big", signed=True)
        _require_size(size, _MOST_BYTES if known else _MOST_BYTES_BEFORE)
        data = _exactly(channel, min(size, 2), patience)
        if int.from_bytes(data, "big") != _PRODUCE:
            _require_size(size, _MOST_BYTES_OTHERS)
        if size > _LARGE_BYTES:
            large.take(size)
        data += _exactly(channel, size - len(data), patience + size / _LEAST_RATE)
        channel.settimeout(_STUCK_SECONDS)
        return data


def _require_size(size: int, most: int) -> None:
    if not 0 <= size <= most:
        raise MalformedError(f"a request of {size:,} bytes; {most:,} are the most")


def _send(channel: socket.socket, parts: list[bytes]) -> None:
    """Send an answer; a large part as it is, without a copy of all."""
    small: list[bytes] = []
    for part in parts:
        if len(part) < _LARGE_BYTES:
            small.append(part)
            continue
        if small:
            channel.sendall(b"".join(small))
            small = []
        channel.sendall(part)
    if small:
        channel.sendall(b"".join(small))


def _exactly(channel: socket.socket, size: int, seconds: float) -> bytearray:
    """So many bytes, within a time; memory is taken as they come.

    Raises:
        TimeoutError: they did not come.
    """
    end = time.monotonic() + seconds
    data = bytearray()
    while len(data) < size:
        channel.settimeout(max(end - time.monotonic(), 0.001))
        piece = channel.recv(min(size - len(data), _PIECE))
        if not piece:
            raise EOFError("the connection ended within a request")
        data += piece
    return data


def _api_versions(code: Code) -> dict[str, Any]:
    spoken = [APIS[key] for key in sorted({API_VERSIONS, *HANDLERS})]
    return {
        "error_code": code,
        "api_keys": [
            # librdkafka compresses for brokers only that say Produce begins at 0.
            {
                "api_key": api.key,
                "min_version": api.first if api.key else 0,
                "max_version": api.last,
            }
            for api in spoken
        ],
    }
