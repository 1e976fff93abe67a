"""Programs that are killed: trees of processes, of which one, some or all die."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from tools.children import ROOT

EMPTY: Final[Mapping[str, str]] = MappingProxyType({})
PATIENCE: Final = 300.0
"""Seconds for what takes a few on a machine that has nothing else to do."""


@dataclass(frozen=True)
class Proc:
    """A process that is there."""

    pid: int
    parent: int
    command: str


def processes() -> dict[int, Proc]:
    """All of this machine, by their ids; those that are dead and not yet awaited left out."""
    command = ["ps", "-A", "-ww", "-o", "pid=,ppid=,stat=,command="]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {}
    for line in told.splitlines():
        fields = line.split(None, 3)
        if len(fields) == 4 and not fields[2].startswith("Z"):
            found[int(fields[0])] = Proc(int(fields[0]), int(fields[1]), fields[3])
    return found


def tree(root: int) -> list[Proc]:
    """A process and all that descend from it, parents first."""
    there = processes()
    found = [there[root]] if root in there else []
    for parent in found:  # it grows
        found += [each for each in there.values() if each.parent == parent.pid]
    return found


def send(signal_: int, some: Sequence[Proc]) -> None:
    """A signal to each; those that are gone are gone."""
    for each in some:
        with suppress(ProcessLookupError):
            os.kill(each.pid, signal_)


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


@contextmanager
def spark_cluster(folder: Path, hidden: Path | None = None) -> Iterator[str]:
    """The address of a standalone master with two workers, which take themselves for two machines.

    Args:
        folder: for their work and log.
        hidden: a folder that none of them sees; needs root.
    """
    from pyspark.find_spark_home import _find_spark_home

    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        port = some.getsockname()[1]
    master = f"spark://127.0.0.1:{port}"
    parts = [["master.Master", "--host", "127.0.0.1", "--port", str(port)]]
    parts += [
        ["worker.Worker", "--host", host, "-c", "1", "-m", "600M", "-d", str(folder), master]
        for host in ("127.0.0.2", "127.0.0.3")
    ]
    started = []
    with (folder / "cluster.log").open("ab") as log:
        for name, *options in parts:
            program = f"{_find_spark_home()}/bin/spark-class"
            command = [program, f"org.apache.spark.deploy.{name}", *options, "--webui-port", "0"]
            environment = {**os.environ, "SPARK_LOCAL_IP": options[1]}
            environment["PYSPARK_PYTHON"] = sys.executable
            command = blind(hidden, command)
            started.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
    try:
        yield master
    finally:
        for each in started:
            send(signal.SIGKILL, tree(each.pid))
            each.wait()


def blind(hidden: Path | None, command: list[str]) -> list[str]:
    """Return a command that runs another one where a folder is empty."""
    if hidden is None:
        return command
    mount = 'mount -t tmpfs none "$0" && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", mount, str(hidden), *command]
