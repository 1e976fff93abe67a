"""A server of the test's store, in this process or one of its own, and clients of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import txnkv
from txnkv.server import Limits, Server, Users

SCHEMA = txnkv.Schema({"id": "int64", "v": "string?"}, primary_key=["id"])


@pytest.fixture
def store(connect: Callable[..., txnkv.Client]) -> txnkv.Client:
    """The store as the server's host has it; checked at the end."""
    client = connect()
    client.create_table("t", SCHEMA)
    client.create_topic("events")
    return client


@pytest.fixture
def serve(store: txnkv.Client, store_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers in this process, closed at the end."""
    made: list[Server] = []

    def start(users: Users | None = None, limits: Limits | None = None, **tls: Any) -> Server:
        scheme = "grpc+tls" if tls else "grpc"
        location = f"{scheme}://127.0.0.1:0"
        made.append(Server(str(store_path), location, users, limits, **tls))
        return made[-1]

    yield start
    for server in made:
        server.close()


@pytest.fixture
def remote(serve: Callable[..., Server]) -> Iterator[Callable[..., txnkv.Client]]:
    """Opens clients of one server in this process."""
    servers: list[Server] = []
    made: list[txnkv.Client] = []

    def open_client(**options: Any) -> txnkv.Client:
        if not servers:
            servers.append(serve())
        made.append(txnkv.connect(f"grpc://127.0.0.1:{servers[0].port}", **options))
        return made[-1]

    yield open_client
    for client in made:
        client.close()


class Serving:
    """`txnkv serve` as a process, at one port whenever it is started again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.port = 0
        self.popen: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        return f"grpc://127.0.0.1:{self.port}"

    def start(self, *options: str, fault: str = "") -> None:
        """Return when it listens."""
        command = [sys.executable, "-m", "txnkv", "serve", str(self._path)]
        listen = ["--listen", f"grpc://127.0.0.1:{self.port}"]
        self.popen = subprocess.Popen(
            [*command, *listen, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "TXNKV_FAULT": fault},
        )
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        found = re.search(r":(\d+)$", line.strip())
        assert found, line
        self.port = int(found[1])

    def signal(self, number: int) -> None:
        assert self.popen is not None
        self.popen.send_signal(number)

    def kill(self) -> None:
        """Kill it as by kill -9; return when it is gone."""
        self.signal(signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        assert self.popen is not None
        self.popen.communicate(timeout=60)
        return int(self.popen.returncode)


@pytest.fixture
def serving(store: txnkv.Client, store_path: Path) -> Iterator[Serving]:
    """A server in a process of its own, not started yet."""
    made = Serving(store_path)
    yield made
    if made.popen is not None and made.popen.poll() is None:
        made.signal(signal.SIGCONT)
        made.kill()
