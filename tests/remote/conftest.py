"""A server of the test's store, in this process or one of its own, and clients of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
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


_ARMED_LATER = """
import os, sys, threading, time
from txnkv import cli, storage
point, number, flag = sys.argv[1:4]
del sys.argv[1:4]
def hit():
    storage.disarm()
    os.kill(os.getpid(), int(number))
def wait():
    while not os.path.exists(flag):
        time.sleep(0.01)
    storage.arm(point, hit)
    os.remove(flag)
threading.Thread(target=wait, daemon=True).start()
cli.main()
"""


class Serving:
    """`txnkv serve` as a process, at one port whenever it is started again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._flag = path.with_name(f"{path.name}.armed")
        self.port = 0
        self.popen: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        return f"grpc://127.0.0.1:{self.port}"

    def start(self, *options: str, fault: str = "", at: tuple[str, int] | None = None) -> None:
        """Return when it listens.

        Args:
            options: of `txnkv serve`.
            fault: as TXNKV_FAULT.
            at: a fault point and the signal that it sends itself there, once `arm` was called.
        """
        run = ["-m", "txnkv"]
        if at is not None:
            run = ["-c", _ARMED_LATER, at[0], str(int(at[1])), str(self._flag)]
        command = [sys.executable, *run, "serve", str(self._path)]
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

    def arm(self) -> None:
        """Arm the fault point of `start`; return when it is armed."""
        self._flag.touch()
        while self._flag.exists():
            time.sleep(0.01)

    def stopped(self) -> bool:
        """Whether it is stopped by a signal, or gone."""
        assert self.popen is not None
        if self.popen.poll() is not None:
            return True
        state = Path(f"/proc/{self.popen.pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state in "TZ"

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
