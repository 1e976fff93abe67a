"""A server of the test's store, in this process or one of its own, and clients of it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import txnkv
from tests.conftest import is_stopped
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

    def start(
        users: Users | None = None, limits: Limits | None = None, port: int = 0, **tls: Any
    ) -> Server:
        scheme = "grpc+tls" if tls else "grpc"
        location = f"{scheme}://127.0.0.1:{port}"
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
import os, signal, sys, threading, time
from txnkv import cli, storage
point, number, flag = sys.argv[1:4]
del sys.argv[1:4]
def hit():
    storage.disarm()
    signal.pthread_kill(threading.get_ident(), int(number))  # this one goes no further
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
        return self.popen.poll() is not None or is_stopped(self.popen.pid)

    def signal(self, number: int) -> None:
        assert self.popen is not None
        self.popen.send_signal(number)
        if number == signal.SIGSTOP:  # its other threads may go on for a moment
            os.waitpid(self.popen.pid, os.WUNTRACED)

    def kill(self) -> None:
        """Kill it as by kill -9; return when it is gone."""
        self.signal(signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        assert self.popen is not None
        self.popen.communicate(timeout=60)
        return int(self.popen.returncode)


_REQUEST_BYTES = 100
"""At least; HTTP/2's own pings and windows are shorter."""


class Wire:
    """Passes bytes between clients and a server, and cuts the connections when it is told to.

    Args:
        port: of the server.
        latency: seconds for which bytes are on their way, either way.
    """

    def __init__(self, port: int, latency: float = 0.0) -> None:
        self._port = port
        self._latency = latency
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.answers = True
        self.asked, self.kept_back = threading.Event(), threading.Event()
        self.late = 0.0
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                here, _ = self._listening.accept()
                time.sleep(self.late)
                try:
                    there = socket.create_connection(("127.0.0.1", self._port))
                except OSError:  # it is down
                    here.close()
                    continue
                self._open += [here, there]
                for one, other, answers in ((here, there, False), (there, here, True)):
                    threading.Thread(
                        target=self._pass, args=(one, other, answers), daemon=True
                    ).start()

    def _pass(self, one: socket.socket, other: socket.socket, answers: bool) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                if not self.answers and not answers and len(data) > _REQUEST_BYTES:
                    self.asked.set()
                if answers and not self.answers:
                    if self.asked.is_set():
                        self.kept_back.set()
                    continue
                time.sleep(self._latency)
                other.sendall(data)
        with suppress(OSError):
            other.shutdown(socket.SHUT_RDWR)
        one.close()

    @property
    def address(self) -> str:
        return f"grpc://127.0.0.1:{self.port}"

    def cut_at_an_answer(self) -> None:
        """Keep the answer to the next request back, and cut all connections then."""

        def cut() -> None:
            assert self.kept_back.wait(60)
            self.answers = True
            self.cut()

        self.asked.clear()
        self.kept_back.clear()
        self.answers = False
        threading.Thread(target=cut, daemon=True).start()

    def cut(self) -> None:
        """Cut all connections; the next ones pass everything."""
        opened, self._open = self._open, []
        for one in opened:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listening.close()
        self.cut()


@pytest.fixture
def serving(store: txnkv.Client, store_path: Path) -> Iterator[Serving]:
    """A server in a process of its own, not started yet."""
    made = Serving(store_path)
    yield made
    if made.popen is not None and made.popen.poll() is None:
        made.signal(signal.SIGCONT)
        made.kill()
