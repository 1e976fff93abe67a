"""A program of the pipeline, run as a process, and started again when it was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

_PATIENCE: Final = 30.0


class Program:
    """One of them.

    Args:
        name: of its module.
        arguments: of its command line.
        log: what it prints goes there.
    """

    def __init__(self, name: str, arguments: list[str], log: Path) -> None:
        self.name = name
        self.kills = 0
        self._arguments = arguments
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def state(self) -> str:
        """For people."""
        if self._process is None or self._process.poll() is not None:
            return "killed"
        return "runs" if not self.kills else f"runs, killed {self.kills}x"

    def start(self) -> None:
        """Start it, when it does not run."""
        if self._process is not None and self._process.poll() is None:
            return
        with self._log.open("ab") as log:
            self._process = self._popen(log)

    def kill(self, *, whole: bool) -> None:
        """Kill it (SIGKILL): with all processes that it has started, or by itself."""
        assert self._process is not None
        if whole:
            os.killpg(self._process.pid, signal.SIGKILL)
        else:
            self._process.kill()
        self._process.wait()
        self.kills += 1

    def stop(self) -> None:
        """End it as one ends a program; whatever of it is left goes too."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def died(self) -> str | None:
        """Return the last words of the program, when it ended by itself; else None."""
        if self._process is None or self._process.poll() in (None, -signal.SIGKILL):
            return None
        told = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"{self.name} ended with status {self._process.returncode}: {' '.join(told[-3:])}"

    def _popen(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        module = f"examples.demo.pipeline.{self.name}"
        return subprocess.Popen(
            [sys.executable, "-m", module, *self._arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
