"""A server for Kafka's clients of the test's store."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import txnkv
from tools.kafka_wire import Wire
from txnkv.kafka import KafkaServer
from txnkv.server import Users


@pytest.fixture
def certificate(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1, or of a name alone, and its key."""
    name = getattr(request, "param", "IP:127.0.0.1")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj",
         "/CN=server", "-addext", f"subjectAltName={name}", "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


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
