"""The socket to which Kafka's clients connect: a thread for each connection.

A connection is answered in the order of its requests, as clients expect. What is no request closes
it, and it alone: no memory was taken for a length that was only announced, and nobody else waits.

    frame       length i32, then so many bytes; at most `_MOST_BYTES`, before a log-in far fewer
    together    small Produce requests that have come when one is read are read too, and share a
                commit and its sync; nobody waits for one that has not come
    memory      large requests, and what they become, share two rooms: a user who has some waits
                where it finds no more; what comes slowly is given up
    turns       of requests with thousands of elements one is read, and one answer written, at once
    unknown     a kind or version that is not spoken closes the connection, but for ApiVersions,
                which is answered with the versions that are
"""

from __future__ import annotations

import logging
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from txnkv.errors import TxnkvError, UnavailableError
from txnkv.kafka import group_requests, log_requests, topic_requests, transaction_requests
from txnkv.kafka.api_tables import API_VERSIONS, APIS, Code, KafkaError, code_of
from txnkv.kafka.broker import Broker, ByteRoom, Handler, MemoryHold, Peer
from txnkv.kafka.wire_codec import (
    KafkaRequest,
    MalformedError,
    UnknownVersionError,
    read_request,
    write_answer,
)
from txnkv.server import Users
from txnkv.storage import descriptor_limit, new_lock, no_thread, with_descriptor

_log = logging.getLogger("txnkv.server")

_MOST_BYTES: Final = 64 << 20
_MOST_BYTES_BEFORE: Final = 64 << 10
"""The most of a request of somebody who has not said who it is."""

_LENGTH: Final = 4
_PRODUCE: Final = 0
_PRODUCE_KEY: Final = b"\0\0"
_MOST_BYTES_OTHERS: Final = 2 << 20
"""The most of a request that brings no messages."""

_LARGE_BYTES: Final = 64 << 10
_LARGE_ROOM: Final = 256 << 20
"""Requests of more than `_LARGE_BYTES` have so much together."""

_AHEAD_BYTES: Final = _LARGE_BYTES + 4
"""Bytes of a connection that are read before they are asked for, at most."""

_MOST_TOGETHER: Final = 64
"""Requests that are read at once, behind the first."""

_MOST_CONNECTIONS: Final = 500
_PIECE: Final = 1 << 18
_IDLE_SECONDS: Final = 600.0
_STUCK_SECONDS: Final = 60.0
_LEAST_RATE: Final = 1 << 20
"""Bytes of a request that come in each second, behind the first `_STUCK_SECONDS`."""
_HANDSHAKE_SECONDS: Final = 10.0
_PAUSE: Final = 0.05
_QUIET_SECONDS: Final = 10.0
_TIMEVAL: Final = struct.Struct("@ll")
_HANGS_UP: Final = getattr(select, "POLLRDHUP", select.POLLHUP)
"""Seen also behind requests that are not read yet; macOS says it with the other."""

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


class _Channel:
    """The bytes of a connection, which are waited for with patience.

    What is not encrypted is waited for in the kernel: a timeout of Python's costs three calls where
    one does, in each of which another thread may take the interpreter.

    Args:
        connection: its socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._encrypted = isinstance(connection, ssl.SSLSocket)
        self._patience = 0.0
        if not self._encrypted:
            connection.settimeout(None)
            self._allow(socket.SO_SNDTIMEO, _STUCK_SECONDS)

    def receive(self, size: int, seconds: float) -> bytes:
        """Wait for some bytes, at most so many; empty at the end.

        Raises:
            TimeoutError: none came.
        """
        if self._encrypted:
            self._socket.settimeout(seconds)
        elif seconds != self._patience:
            self._allow(socket.SO_RCVTIMEO, seconds)
            self._patience = seconds
        try:
            return self._socket.recv(size)
        except BlockingIOError:
            raise TimeoutError("nothing came") from None

    def receive_at_once(self, size: int) -> bytes:
        """Return bytes that are there; empty where none are."""
        with suppress(OSError):  # none are, or the next `receive` tells
            if not self._encrypted:
                return self._socket.recv(size, socket.MSG_DONTWAIT)
            self._socket.settimeout(0)
            return self._socket.recv(size)
        return b""

    def has_hung_up(self) -> bool:
        """Tell whether the client sends nothing any more; nothing is read."""
        poll = select.poll()
        poll.register(self._socket, _HANGS_UP)
        return bool(poll.poll(0))

    def send(self, data: bytes) -> None:
        """Send all of it.

        Raises:
            TimeoutError: it was not taken.
        """
        end = time.monotonic() + _STUCK_SECONDS
        if self._encrypted:
            self._socket.settimeout(_STUCK_SECONDS)
        try:
            sent = self._socket.send(data)
            while sent < len(data):
                if time.monotonic() > end:
                    raise TimeoutError("the client takes its answers too slowly")
                sent += self._socket.send(memoryview(data)[sent:])
        except BlockingIOError:
            raise TimeoutError("the client takes no answers") from None

    def _allow(self, option: int, seconds: float) -> None:
        whole, rest = divmod(int(seconds * 1e6), 1_000_000)
        self._socket.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(whole, rest))


class _Requests:
    """The requests of a connection, as they come.

    Args:
        channel: the connection.
        peer: who has connected.
    """

    def __init__(self, channel: _Channel, peer: Peer) -> None:
        self.channel = channel
        self._peer = peer
        self._come = bytearray()

    def wait(self, large: MemoryHold) -> bytearray | None:
        """Wait for a request; None when the client has none any more.

        Args:
            large: takes the memory of a large one, before it is read.

        Raises:
            MalformedError: it is longer than one may be.
            TimeoutError: it came too slowly.
        """
        channel, data, known = self.channel, self._come, self._peer.user is not None
        if not data:
            data += channel.receive(_AHEAD_BYTES, _IDLE_SECONDS if known else _HANDSHAKE_SECONDS)
            if not data:
                return None
        patience = _STUCK_SECONDS if known else _HANDSHAKE_SECONDS
        _receive(channel, data, _LENGTH, _AHEAD_BYTES, patience)
        size = int.from_bytes(data[:_LENGTH], "big", signed=True)
        _require_size(size, _MOST_BYTES if known else _MOST_BYTES_BEFORE)
        _receive(channel, data, _LENGTH + min(size, 2), _AHEAD_BYTES, patience)
        if data[_LENGTH : _LENGTH + 2] != _PRODUCE_KEY:
            _require_size(size, _MOST_BYTES_OTHERS)
        end, most = _LENGTH + size, _AHEAD_BYTES
        if size > _LARGE_BYTES:
            large.take(size)
            most = end  # no more than it is read
        _receive(channel, data, end, most, patience + size / _LEAST_RATE)
        self._come = data[end:]
        del data[end:], data[:_LENGTH]
        return data

    def further(self) -> Iterator[KafkaRequest]:
        """Produce requests that are there whole; what is none, or has many elements, stays."""

        def many() -> None:
            raise MalformedError

        data = self._come
        while len(data) < _AHEAD_BYTES and (
            piece := self.channel.receive_at_once(_AHEAD_BYTES - len(data))
        ):
            data += piece
        for _ in range(_MOST_TOGETHER):
            end = _LENGTH + int.from_bytes(data[:_LENGTH], "big", signed=True)
            if not _LENGTH + 2 <= end <= len(data) or data[_LENGTH : _LENGTH + 2] != _PRODUCE_KEY:
                return
            try:
                request = read_request(data[_LENGTH:end], many)
            except MalformedError:
                return
            del data[:end]
            yield request


class KafkaServer:
    """A store served to Kafka's clients.

    Args:
        path: the store's directory.
        host: at which it listens.
        port: 0 takes a free one.
        users: those who may; None: everybody may all.
        tls: of the connections; None: they are not encrypted.
        new_partitions: of topics that are made by being asked for; 0: none are.
        advertise: host and port that clients are told; None: those at which they have come.

    Attributes:
        port: where it listens.

    Raises:
        StoreNotFoundError: there is none.
        UnavailableError: it cannot listen there, or gets no thread.
    """

    def __init__(
        self,
        path: str,
        host: str,
        port: int,
        users: Users | None = None,
        tls: ssl.SSLContext | None = None,
        new_partitions: int = 0,
        advertise: tuple[str, int] | None = None,
    ) -> None:
        self._tls = tls
        self._advertise = advertise
        if tls is not None and advertise is None:
            tls.sni_callback = _note_name
        self._lock = new_lock()
        self._open: set[_Connection] = set()
        self._closing = False
        self._warned: dict[str, float] = {}
        self._broker = Broker(path, users, new_partitions)
        self._large = ByteRoom(_LARGE_ROOM)
        self._turns = ByteRoom(1)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            self._broker.close()
            text = f"cannot listen at port {port} of {host}: {error}"
            raise UnavailableError(text) from None
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="txnkv-kafka", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._socket.close()
            self._broker.close()
            raise no_thread(error) from error

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
                connection, address = with_descriptor(self._socket.accept)
            except OSError as error:
                if self._closing:
                    return
                self._warn(
                    "new connections wait: %s; this process may have %d files open "
                    "(RLIMIT_NOFILE, LimitNOFILE= of systemd)", error, descriptor_limit()
                )  # fmt: skip
                time.sleep(_PAUSE)
                continue
            host, port = self._advertise or connection.getsockname()[:2]
            peer = Peer(host, port, str(address[0]), self._broker.work, self._broker.newcomer())
            made = _Connection(peer, connection)
            made.thread = threading.Thread(
                target=self._serve, args=(made,), name="txnkv-kafka-client", daemon=True
            )
            with self._lock:
                most = min(_MOST_CONNECTIONS, descriptor_limit() // 2)
                if self._closing or len(self._open) >= most:
                    self._warn("%s is refused: %d connections are the most", peer.remote, most)
                    connection.close()
                    continue
                self._open.add(made)
                try:
                    made.thread.start()
                except RuntimeError:  # no thread is free: the others go on
                    self._open.discard(made)
                    connection.close()

    def _warn(self, text: str, *args: object) -> None:
        """Warn in these words, but not often: whoever comes again and again fills no log."""
        now = time.monotonic()
        if now >= self._warned.get(text, now):
            self._warned[text] = now + _QUIET_SECONDS
            _log.warning(text, *args)

    def _serve(self, connection: _Connection) -> None:
        peer = connection.peer
        try:
            connection.channel.settimeout(_HANDSHAKE_SECONDS)
            connection.channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.channel.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self._tls is not None:
                channel = connection.channel = self._tls.wrap_socket(
                    connection.channel, server_side=True, do_handshake_on_connect=False
                )
                channel.do_handshake()
                peer.host = channel.server_hostname or peer.host
            requests = _Requests(_Channel(connection.channel), peer)
            peer.has_hung_up = requests.channel.has_hung_up
            while not peer.closing.is_set() and self._answer(requests, peer):
                pass
        except ssl.SSLEOFError as error:
            _log.debug("%s is gone: %s", peer.remote, error)
        except ssl.SSLError as error:
            self._warn("%s is closed: no TLS with it: %s", peer.remote, error)
        except MalformedError as error:
            self._warn("%s is closed: %s", peer.remote, error)
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

    def _answer(self, requests: _Requests, peer: Peer) -> bool:
        """Answer a request, or several; False when the client has none any more."""
        large, turn = peer.hold(self._large), peer.hold(self._turns)
        try:
            data = requests.wait(large)
            return data is not None and self._answer_to(data, requests, peer, large, turn)
        finally:
            for hold in (peer.work, large, turn):
                hold.keep(0)

    def _answer_to(
        self,
        data: bytearray,
        requests: _Requests,
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
            parts = write_answer(APIS[API_VERSIONS], 0, error.correlation, body)
            _send(requests.channel, parts)
            return True
        turn.keep(0)
        self._broker.require_known(peer)
        every, answers = [request], None
        if request.api.key != _PRODUCE:
            large.keep(0)  # it may wait for others, for long
        elif peer.user is not None:
            every += requests.further()
            answers = log_requests.produce_together(self._broker, peer, every)
        parts = []
        try:
            for each in every:
                found = self._answer_of(each, peer) if answers is None else next(answers)
                if found is not None:
                    parts += write_answer(each.api, each.version, each.correlation, found, many)
        finally:  # what was appended before a request that fails is acknowledged
            turn.keep(0)
            _send(requests.channel, parts)
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
        except (KafkaError, TxnkvError) as error:
            code, text = code_of(error)
            if not any(field.name == "error_code" for field in request.api.answer):
                raise MalformedError(f"{request.api.name}: {text}") from None
            return {"error_code": code, "error_message": text}


def _note_name(channel: Any, name: str | None, _: ssl.SSLContext) -> None:
    """Note the name that a client has connected to, under which it finds the certificate right."""
    channel.server_hostname = name


def _require_size(size: int, most: int) -> None:
    if not 0 <= size <= most:
        raise MalformedError(f"a request of {size:,} bytes; {most:,} are the most")


def _send(channel: _Channel, parts: list[bytes]) -> None:
    """Send an answer; a large part as it is, without a copy of all."""
    small: list[bytes] = []
    for part in parts:
        if len(part) < _LARGE_BYTES:
            small.append(part)
            continue
        if small:
            channel.send(b"".join(small))
            small = []
        channel.send(part)
    if small:
        channel.send(b"".join(small))


def _receive(channel: _Channel, data: bytearray, size: int, most: int, seconds: float) -> None:
    """Add what comes to `data` until it has so many bytes, within a time; memory is taken then.

    Args:
        channel: the connection.
        data: at its end.
        size: the bytes that it has to have.
        most: the bytes that it may have.
        seconds: of the time.

    Raises:
        TimeoutError: they did not come.
    """
    end = time.monotonic() + seconds
    while len(data) < size:
        left = max(end - time.monotonic(), 0.001)
        piece = channel.receive(min(most - len(data), _PIECE), left)
        if not piece:
            raise EOFError("the connection ended within a request")
        data += piece


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
