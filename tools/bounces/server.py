"""`txnkv serve --kafka` as a process, at one port whenever it is started again."""

from __future__ import annotations

import random
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

from tools.forked import Popen

PATIENCE: Final = 60.0
_PROGRAM: Final = """
import faulthandler, signal
faulthandler.register(signal.SIGUSR1)
from txnkv.__main__ import main
main()
"""


def _free_port() -> int:
    """A port that no connection gets by chance while the server is away: systems take theirs from
    above these.
    """
    for port in random.sample(range(20_000, 32_000), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError("no port is free")


class Serving:
    """A server of a store; `start` starts it.

    Args:
        path: the store's directory.
        log: to which it writes what goes wrong, and where it is when it does not stop.
        options: further ones of `txnkv serve`.
    """

    def __init__(self, path: Path, log: IO[str] | None = None, *options: str) -> None:
        self._path = path
        self._log = log
        self._options = options
        self.port = _free_port()
        self.popen: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, and wait until it listens."""
        command = [sys.executable, "-c", _PROGRAM, "serve", str(self._path), *self._options]
        command += ["--listen", "grpc://127.0.0.1:0", "--kafka", self.address]
        self.popen = Popen(
            command, stdout=subprocess.PIPE, stderr=self._log or subprocess.DEVNULL, text=True
        )
        assert self.popen.stdout is not None
        lines = [self.popen.stdout.readline() for _ in range(2)]
        assert re.search(rf"Kafka's clients at {self.address}$", lines[1].strip()), lines

    def end(self, number: signal.Signals) -> None:
        """Send it a signal, and wait until it is gone.

        Raises:
            AssertionError: it does not stop, or not well, when it is asked to.
        """
        assert self.popen is not None
        self.popen.send_signal(number)
        try:
            self.popen.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            self.popen.send_signal(signal.SIGUSR1)  # it tells where its threads are
            time.sleep(1)
            self.popen.kill()
            self.popen.communicate()
            raise AssertionError(f"the server does not stop in {PATIENCE:.0f} s") from None
        expected = (0,) if number == signal.SIGTERM else (-number,)
        code = self.popen.returncode
        assert code in expected, f"the server ended with {code}"
