"""Spark by the address of a server: on a standalone cluster, and in one process, beside the folder.

    a standalone master, two workers of one core  ->  txnkv serve
    Spark in local mode, of two cores             ->  txnkv serve
    Spark in local mode, of two cores             ->  the folder

Each Spark is a program of its own (`drive`), which stays up, and does what it is told.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import txnkv.spark
from tools.processes import tree
from tools.spark_cluster import spark_cluster

from .harness import Contestant, Line, race
from .remote import started
from .spark_session import CORES, session
from .spark_tables import Tables

CLUSTER: Final = "a cluster, by txnkv serve"
LOCAL: Final = "local mode, by txnkv serve"
FOLDER: Final = "local mode, the folder opened directly"
_MEMORY: Final = "1200M"
_EXECUTOR: Final = {"spark.executor.memory": "1g", "spark.driver.host": "127.0.0.1"}


class Driver:
    """A Spark in a program of its own.

    Args:
        stack: ends it.
        log: the file of its errors.
        master: where its tasks run.
        conf: of it, beside the defaults.
        rows: that it writes, and reads.
    """

    def __init__(
        self, stack: ExitStack, log: Path, master: str, conf: dict[str, str], rows: int
    ) -> None:
        self._rows = rows
        self._log = log
        drive = f"from {__name__} import drive; drive({master!r}, {conf!r}, {rows})"
        with log.open("ab") as errors:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", drive],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            )
        stack.enter_context(self._popen)
        stack.callback(self._end)
        self._hear()

    def do(self, what: str, options: dict[str, str]) -> int:
        """Have it write or read the table that options tell; return the number of rows."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(json.dumps([what, options]) + "\n")
        self._popen.stdin.flush()
        self._hear()
        return self._rows

    def _hear(self) -> None:
        assert self._popen.stdout is not None
        while (line := self._popen.stdout.readline()) != "done\n":
            if not line:
                raise RuntimeError(f"a Spark ended: {self._log.read_text()[-3000:]}")

    def _end(self) -> None:
        for each in reversed(tree(self._popen.pid)):
            os.kill(each.pid, 9)


def drive(master: str, conf: dict[str, str], rows: int) -> None:
    """Write and read as lines of standard input tell, until there are no more."""
    with session(master=master, conf=conf) as spark:
        print("done", flush=True)
        data = spark.range(0, rows, numPartitions=2 * CORES).selectExpr(
            "id", "cast(id AS double) * 0.5 AS x", f"{rows - 1} - id AS n"
        )
        for line in sys.stdin:
            what, options = json.loads(line)
            if what == "writes":
                data.write.format("txnkv").options(**options).mode("append").save()
            else:
                frame = spark.read.format("txnkv").options(**options).load()
                frame.write.format("noop").mode("overwrite").save()
            print("done", flush=True)


def over_server(rows: int, rounds: int, base: Path | None) -> list[Line]:
    """Writes and reads of each; the table is emptied before each write."""
    txnkv.spark.require_java()
    place = Path(tempfile.mkdtemp(prefix="txnkv-spark-", dir=base))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, place, ignore_errors=True)
        tables = Tables(place / "served")
        stack.callback(tables.client.close)
        serve = ["-m", "txnkv", "serve", str(place / "served"), "--listen", "grpc://127.0.0.1:0"]
        _, port = started(stack, serve)
        far = {"path": f"grpc://127.0.0.1:{port}", "table": "rows", "direct": "false"}
        work = place / "work"
        work.mkdir()
        master = stack.enter_context(spark_cluster(work, memory=_MEMORY))
        cluster = Driver(stack, work / "cluster-driver.log", master, _EXECUTOR, rows)
        local = Driver(stack, work / "local-driver.log", f"local[{CORES}]", {}, rows)

        lines = []
        for what in ("writes", "reads"):

            def contestant(
                name: str, driver: Driver, options: dict[str, str], what: str = what
            ) -> Contestant:
                before: Any = tables.empty if what == "writes" else _nothing
                return Contestant(name, lambda: driver.do(what, options), before)

            lines += race(
                f"Spark {what} {rows:,} rows over a server",
                contestant(CLUSTER, cluster, far),
                [
                    contestant(FOLDER, local, tables.options),
                    contestant(LOCAL, local, far),
                ],
                rounds=rounds,
                ratios={FOLDER: 0.7},
            )
            tables.check(rows)
        return lines


def _nothing() -> None:
    """Leave the rows of the race before."""
