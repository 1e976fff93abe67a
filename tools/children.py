"""Python processes in step with whoever started them: they say lines and are told lines.

    with Children() as children:
        child = children.start("say('ready'); wait(); say('done')")
        assert child.line() == "ready"
        child.tell()
        assert child.finish() == ["done"]

In the environment of `STAGE_ALL` their transactions are large ones from the first row on. The code
runs with `say`, `wait`, `stop`, `os`, `sys`, `txnkv`, `pa` and everything of
`tools.crash_scenarios` imported; its arguments are `args`, as texts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Final

from tools.forked import Popen
from txnkv.transaction.connection import Closing

STAGE_ALL: Final = "TXNKV_TEST_STAGE_ALL"
ROOT: Final = Path(__file__).parent.parent
PATIENCE: Final = 120.0
"""Seconds after which a child that does not end is taken to hang."""

_PRELUDE: Final = """
import os, signal, sys, threading, time
import pyarrow as pa
import txnkv
from txnkv.transaction import instance
from txnkv.storage import arm
from tools.crash_scenarios import *
args = sys.argv[1:]
if "{stage_all}" in os.environ:
    stage_all()
def wait():
    return sys.stdin.readline().strip()
def stop():
    # Not while another thread has the turn to write status.db: everybody would wait for it.
    turns = [each.store.status._queue._lock for each in instance._instances.values()]
    held = [turn for turn in turns if turn.acquire(timeout=5)]
    # To this thread: one to the process may reach another thread first, and this one goes on a
    # little, into the LMDB write lock perhaps.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    for turn in held:
        turn.release()
""".replace("{stage_all}", STAGE_ALL)


class ChildEndedError(Exception):
    """The child ended otherwise than was expected of it; holds what it wrote to stderr."""


class Child:
    """One process."""

    def __init__(self, program: list[str], args: tuple[object, ...], fault: str) -> None:
        self.popen = Popen(
            [sys.executable, *program, *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "TXNKV_FAULT": fault,
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            },
        )

    @property
    def pid(self) -> int:
        return self.popen.pid

    def line(self) -> str:
        """The next line it says.

        Raises:
            ChildEndedError: it ended without one.
        """
        assert self.popen.stdout is not None
        text = self.popen.stdout.readline()
        if not text:
            _, errors = self.popen.communicate(timeout=PATIENCE)
            raise ChildEndedError(f"it ended with {self.popen.returncode}: {errors}")
        return text.strip()

    def tell(self, word: str = "go") -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(word + "\n")
        self.popen.stdin.flush()

    def until_stopped(self) -> None:
        """Wait until it has stopped itself with SIGSTOP."""
        while True:
            _, status = os.waitpid(self.pid, os.WUNTRACED)
            if os.WIFSTOPPED(status):
                return
            raise ChildEndedError(f"it did not stop, it ended with status {status}")

    def go_on(self) -> None:
        """SIGCONT."""
        self.popen.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.popen.send_signal(signal.SIGKILL)
        self.popen.communicate(timeout=PATIENCE)

    def finish(self, code: int = 0) -> list[str]:
        """Wait for its end and return the lines it said last.

        Raises:
            ChildEndedError: it ended with another exit status.
        """
        out, errors = self.popen.communicate(timeout=PATIENCE)
        if self.popen.returncode != code:
            raise ChildEndedError(f"it ended with {self.popen.returncode}: {errors}")
        return out.splitlines()


class Children(Closing):
    """Starts processes; all are gone when the `with` block ends."""

    def __init__(self) -> None:
        self._started: list[Child] = []

    def start(self, code: str, *args: object, fault: str = "") -> Child:
        """Run Python code in a process of its own, with a fault as in TXNKV_FAULT."""
        return self._keep(Child(["-c", _PRELUDE + textwrap.dedent(code)], args, fault))

    def start_file(self, path: Path, code: str, *args: object, fault: str = "") -> Child:
        """The same from a file, as multiprocessing needs it; the file is written first."""
        path.write_text(_PRELUDE + textwrap.dedent(code))
        return self._keep(Child([str(path)], args, fault))

    def _keep(self, child: Child) -> Child:
        self._started.append(child)
        return child

    def close(self) -> None:
        """Kill those that still run."""
        for child in self._started:
            if child.popen.poll() is None:
                child.popen.kill()
            child.popen.communicate()
