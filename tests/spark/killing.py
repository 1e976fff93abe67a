"""Programs that are killed: trees of processes, of which one, some or all die."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from tools.children import ROOT
from tools.processes import Proc, processes, send, tree

EMPTY: Final[Mapping[str, str]] = MappingProxyType({})
PATIENCE: Final = 300.0
"""Seconds for what takes a few on a machine that has nothing else to do."""


def is_java(each: Proc) -> bool:
    """Tell whether a process is a Spark's JVM."""
    return "java" in each.command.split()[0] and "SparkSubmit" in each.command


def is_worker(each: Proc) -> bool:
    """Tell whether a process does Spark's work in Python: plans, runs a task, or commits."""
    return "pyspark" in each.command and not is_java(each)


class Program:
    """A program of `tests.spark.copying` that says lines of JSON and is told some.

    Args:
        folder: where its errors are written.
        name: of the function.
        environment: of it, beside that of this process.
        arguments: of the function, as keywords.
    """

    def __init__(
        self, folder: Path, name: str, environment: Mapping[str, str] = EMPTY, **arguments: Any
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._known: dict[int, Proc] = {}
        self._said: queue.Queue[Any] = queue.Queue()
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.copying", name, json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                    "PYSPARK_PYTHON": sys.executable,
                    **environment,
                },
            )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        """To its end, and that of all that have its output from it: its JVM, say."""
        assert self.popen.stdout is not None
        with self.popen.stdout:
            for line in self.popen.stdout:
                with suppress(ValueError):  # somebody else's line, or half of one
                    self._said.put(json.loads(line))
        self._said.put(None)

    def heard(self) -> list[Any]:
        """Return what the program has said since it was last asked."""
        found = []
        while not self._said.empty():
            found.append(self._said.get())
        return [each for each in found if each is not None]

    def hear(self, what: str) -> Any:
        """The next that it says with this key; what it says else is passed over.

        Raises:
            RuntimeError: it ended.
        """
        while True:
            said = self._said.get(timeout=PATIENCE)
            if said is None:
                raise RuntimeError(f"{self.name} ended, did not say {what!r}: {self.errors()}")
            if what in said:
                return said[what]

    def tell(self, **order: Any) -> None:
        """Something to do; nothing when it is dead."""
        assert self.popen.stdin is not None
        with suppress(OSError):
            self.popen.stdin.write(json.dumps(order) + "\n")
            self.popen.stdin.flush()

    def errors(self) -> str:
        """The end of what it wrote to standard error."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-3000:]

    def runs(self) -> bool:
        """Tell whether the program has not ended."""
        return self.popen.poll() is None

    def tree(self) -> list[Proc]:
        """Its processes."""
        found = tree(self.popen.pid)
        self._known.update((each.pid, each) for each in found)
        return found

    def kill(self, spare: Sequence[int] = ()) -> None:
        """All of its processes at once, but those."""
        send(signal.SIGKILL, [each for each in self.tree() if each.pid not in spare])
        self.await_end()

    def terminate(self) -> None:
        """Send SIGTERM, as one ends a program; the program has to end by itself."""
        self.popen.terminate()
        self.await_end()

    def await_end(self) -> None:
        """Return when it is gone.

        Raises:
            TimeoutExpired: it does not end.
        """
        self.popen.wait(PATIENCE)
        assert self.popen.stdin is not None
        with suppress(OSError):
            self.popen.stdin.close()

    def close(self) -> None:
        """Whatever is left of it goes; also what outlived its parents."""
        self.tree()
        there = processes()
        known = self._known.values()
        left = [each for each in known if _same(there.get(each.pid), each)]
        send(signal.SIGKILL, left)
        self.popen.kill()
        self.await_end()
        self._listener.join(PATIENCE)


def _same(now: Proc | None, then: Proc) -> bool:
    return now is not None and now.command == then.command
