"""Copies under way: a store, its programs, and whoever kills them."""

from __future__ import annotations

import random
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import txnkv
from tools.processes import send

from .conftest import KEEP_QUIET
from .copying import COPIED, COUNTED, PRODUCED
from .killing import PATIENCE, Program, is_java, is_worker

FAULTS: Final = re.compile(
    r"CorruptionError|OutOfRangeError|RowErrors|NotFoundError|SchemaError|ValueError|TypeError|"
    r"AssertionError|AttributeError|KeyError|STATE_STORE"
)
"""Errors that no kill may bring about in a query."""
WAYS: Final = ("all", "driver", "jvm", "worker", "between")
"""Ways to kill a Spark: all its processes at once; the driver's Python; its JVM; one of the Python
processes that work for it; all, between a sink's commit and Spark's note of it."""


@dataclass(frozen=True)
class Query:
    """One that copies.

    Attributes:
        kind: its target: "topic", "table", or "each" for several.
        app: its application.
        path: of the store.
        checkpoint: its directory.
    """

    kind: str
    app: str
    path: str
    checkpoint: Path
    most: int
    by_key: bool = False
    order: str = "offset"
    suffix: str = ""
    format: str = "txnkv"
    spread: int = 0

    def orders(self) -> dict[str, Any]:
        """For the program."""
        return vars(self) | {"checkpoint": str(self.checkpoint)}

    def again(self, suffix: str) -> Query:
        """The same into other targets, from the beginning."""
        checkpoint = self.checkpoint.with_name(self.checkpoint.name + suffix)
        return replace(self, suffix=suffix, app=self.app + suffix, checkpoint=checkpoint)


@dataclass
class Spark:
    """A Spark with queries, which is started again when it was killed.

    Attributes:
        queries: that should run, by application.
        environment: of its processes, beside that of this one.
        failures: how queries failed.
        killed: how often something was.
    """

    folder: Path
    conf: dict[str, str] = field(default_factory=dict)
    master: str = "local[2,4]"
    environment: dict[str, str] = field(default_factory=dict)
    queries: dict[str, Query] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    killed: int = 0
    between: int = 0
    program: Program | None = None
    _old: list[Program] = field(default_factory=list)

    def up(self) -> Program:
        """The program, started if it does not run."""
        if self.program is None or not self.program.runs():
            if self.program is not None:
                self.program.await_end()
                self._old.append(self.program)
            conf = dict(KEEP_QUIET) | self.conf
            self.program = Program(
                self.folder, "spark", self.environment, conf=conf, master=self.master
            )
            self.program.hear("ready")
            for query in self.queries.values():
                self._start(query)
        return self.program

    def start(self, *queries: Query) -> None:
        """Begin queries."""
        for query in queries:
            self.queries[query.app] = query
        was_there = self.program is not None and self.program.runs()
        self.up()
        for query in queries if was_there else ():
            self._start(query)

    def _start(self, query: Query) -> None:
        assert self.program is not None
        self.program.tell(do="start", name=query.app, **query.orders())

    def tend(self) -> list[str]:
        """Start what ended; answers which queries have finished.

        Raises:
            RuntimeError: a query failed as no kill could make it fail, or again and again.
        """
        program = self.up()
        finished = []
        for said in program.heard():
            if "finished" in said:
                finished.append(said["finished"])
            elif said.get("error") and said["ended"] in self.queries:
                self._failed(said["ended"], said["error"])
                self._start(self.queries[said["ended"]])
        return finished

    def _failed(self, app: str, error: str) -> None:
        self.failures.append(f"{app}: {error}")
        if FAULTS.search(error) or len(self.failures) > 5 * self.killed + 5:
            raise RuntimeError(f"after {self.killed} kills query {app} failed: {error}")

    def finish(self) -> None:
        """Let the queries do all that is there, and end."""
        asked: Program | None = None
        failed = -1
        until = time.monotonic() + 2 * PATIENCE
        while self.queries:
            for app in self.tend():
                self.queries.pop(app, None)
            if asked is not self.program or len(self.failures) != failed:
                asked, failed = self.up(), len(self.failures)
                for app in self.queries:
                    asked.tell(do="finish", name=app)
            if time.monotonic() > until:
                raise RuntimeError(f"queries do not end: {', '.join(self.queries)}")
            time.sleep(0.02)

    # -- kills -------------------------------------------------------------------------

    def kill(self, how: str, client: txnkv.Client | None = None) -> None:
        """Kill some of it; "between" is of a random query, and needs the store's client."""
        program = self.up()
        self.killed += 1
        if how == "worker":
            workers = [each for each in program.tree() if is_worker(each)]
            send(signal.SIGKILL, random.sample(workers, min(1, len(workers))))
            return
        if how == "between":
            assert client is not None
            self.between += self._stop_between(client, random.choice([*self.queries.values()]))
        if how == "jvm":
            send(signal.SIGKILL, [each for each in program.tree() if is_java(each)])
        if how in ("driver", "jvm"):  # the others go by themselves, in their own time
            program.tree()
            program.popen.kill()
        else:
            program.kill()
        program.await_end()

    def end_cleanly(self) -> None:
        """Stop the queries as a program does that is told to end."""
        self.killed += 1
        self.up().terminate()

    def _stop_between(self, client: txnkv.Client, query: Query) -> bool:
        """Stop the JVM when a batch is committed and Spark has not noted it."""
        program = self.up()
        jvms = [each for each in program.tree() if is_java(each)]
        version = applied(client, query.app)
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until and program.runs():
            if (now := applied(client, query.app)) > version:
                send(signal.SIGSTOP, jvms)
                if not (query.checkpoint / "commits" / str(now)).exists():
                    return True
                send(signal.SIGCONT, jvms)
                version = now
            self.tend()
        return False

    def close(self) -> None:
        """Nothing of it is left."""
        for program in [*self._old, self.program]:
            if program is not None:
                program.close()


def applied(client: txnkv.Client, app: str) -> int:
    """The last batch of a query that is there."""
    found = client.applied(app)
    return -1 if found is None else found.version


def make(client: txnkv.Client, buffers: Sequence[str], partitions: Sequence[int]) -> None:
    """The topics and tables.

    Args:
        buffers: of source and copies.
        partitions: of source and copies.
    """
    client.create_topic("in", partitions=partitions[0], buffer=buffers[0])
    client.create_table("produced", PRODUCED)
    targets(client, buffers[1], partitions[1])


def targets(client: txnkv.Client, buffer: str, partitions: int, suffix: str = "") -> None:
    """Make the topics and tables that copies go to."""
    for name in ("out", "each"):
        client.create_topic(name + suffix, partitions=partitions, buffer=buffer)
    client.create_table(f"mirror{suffix}", COPIED, txnkv.hash_partition("n", 2))
    client.create_table(f"copied{suffix}", COPIED, txnkv.hash_partition("n", 2))
    client.create_table(f"counted{suffix}", COUNTED)


@dataclass
class Producer:
    """The producer, which is started again when it was killed.

    Attributes:
        arguments: of the program.
        sent: how many messages it has said to be committed.
    """

    folder: Path
    arguments: dict[str, Any]
    sent: int = 0
    done: bool = False
    program: Program | None = None

    def tend(self) -> None:
        """Start it when it has not done all.

        Raises:
            RuntimeError: it ended otherwise than by a kill.
        """
        if self.program is not None:
            for said in self.program.heard():
                self.sent = said.get("at", self.sent)
                self.done = self.done or "done" in said
            if self.program.runs() or self.done:
                return
            if self.program.popen.returncode not in (-signal.SIGKILL, -signal.SIGTERM, 0):
                raise RuntimeError(f"the producer failed: {self.program.errors()}")
        self.program = Program(self.folder, "producer", **self.arguments)

    def kill(self, hard: bool) -> None:
        """Kill it, or tell it to end."""
        assert self.program is not None
        if hard:
            self.program.kill()
        else:
            self.program.terminate()

    def close(self) -> None:
        """It is gone."""
        if self.program is not None:
            self.program.close()


def marks(total: int, kills: int) -> list[int]:
    """Return numbers of copies at which to kill, at random, neither too early nor too late."""
    return sorted(int(total * random.uniform(0.1, 0.8)) for _ in range(kills))


def copy_while(topic: txnkv.Topic, total: int, tend: Callable[[int], None]) -> None:
    """Watch the copies come, until all are there or nothing comes any more.

    Args:
        topic: the copies.
        total: how many are wanted.
        tend: called again and again, with how many are there.
    """
    count = 0
    until = time.monotonic() + PATIENCE
    with topic.consumer() as consumer:
        while count < total and time.monotonic() < until:
            found = consumer.poll_batch(timeout=0.05).num_rows
            count += found
            if found:
                until = time.monotonic() + PATIENCE
            tend(count)
