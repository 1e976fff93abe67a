"""One local Spark for all tests, of two cores and four attempts a task."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tools.forked import NO_THREADS, ROOT
from txnkv.spark import require_java

from . import worker_start

KEEP_QUIET = (
    ("spark.ui.enabled", "false"),
    ("spark.ui.showConsoleProgress", "false"),
    ("spark.sql.shuffle.partitions", "2"),
    ("spark.sql.session.timeZone", "America/New_York"),
    ("spark.log.level", "OFF"),
)
SCHEMA = txnkv.Schema({"id": "int64", "v": "string?"}, primary_key=["id"])


@pytest.fixture(scope="session", autouse=True)
def java() -> None:
    """Without Java there is no Spark to test."""
    pytest.importorskip("pyspark")
    try:
        require_java()
    except txnkv.NotSupportedError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def worker_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The program that Spark takes for Python; see worker_start."""
    folder = tmp_path_factory.mktemp("worker")
    program, path = folder / "python", folder / "forks"
    python = shlex.quote(sys.executable)
    start = shlex.join([sys.executable, worker_start.__file__, str(path)])
    program.write_text(
        "#!/bin/sh\n"
        'case "$1 $2" in\n'
        f'"-m pyspark."*) shift; exec {start} "$@" ;;\n'
        f'*) exec {python} "$@" ;;\n'
        "esac\n"
    )
    program.chmod(0o755)
    if sys.platform != "linux":
        yield program
        return
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(100)
        popen = subprocess.Popen(
            [sys.executable, worker_start.__file__, "serve", str(listener.fileno())],
            pass_fds=[listener.fileno()],
            env={**os.environ, **NO_THREADS, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"},
        )
    # Spark looks for data sources but once, and in a limited time.
    with socket.socket(socket.AF_UNIX) as asked:
        asked.connect(str(path))
        asked.shutdown(socket.SHUT_WR)
        asked.recv(1)
    yield program
    popen.kill()
    popen.wait()


@pytest.fixture(autouse=True)
def not_directly(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server, which is of this process, seems to be another machine's: no process of Spark
    takes its folder for its own.
    """
    if host == "elsewhere":
        monkeypatch.setattr("txnkv.client.planning.boot_id", lambda: "another machine")


@pytest.fixture(scope="session")
def spark(java: None, worker_python: Path) -> Iterator[Any]:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2,4]")
    for key, value in KEEP_QUIET:
        builder = builder.config(key, value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", str(worker_python))
        session = builder.getOrCreate()
    yield session
    session.stop()


@pytest.fixture
def clients_are_closed() -> Iterator[None]:
    """Afterwards, those of readers that ran in this process."""
    from .topic_tools import close_clients  # it takes pyspark

    yield
    close_clients()


@pytest.fixture
def where(client: txnkv.Client) -> dict[str, str]:
    """Options for table t (id int64, v string?), which is there."""
    client.create_table("t", SCHEMA, txnkv.hash_partition("id", 2))
    return {"path": client.path, "table": "t"}


@pytest.fixture
def rows(spark: Any) -> Callable[..., Any]:
    """Rows with these ids for table t, as a data frame of two partitions."""

    def make(first: int, last: int, partitions: int = 2) -> Any:
        frame = spark.range(first, last + 1, numPartitions=partitions)
        return frame.selectExpr("concat('v', id) AS v", "id")

    return make


@pytest.fixture
def save(where: dict[str, str]) -> Callable[..., None]:
    """Appends a data frame to table t, or with other options."""

    def append(frame: Any, format: str = "txnkv", **options: str) -> None:
        frame.write.format(format).options(**(where | options)).mode("append").save()

    return append


@pytest.fixture
def load(spark: Any, where: dict[str, str]) -> Callable[..., Any]:
    """Table t as a data frame, or with other options."""

    def read(**options: str) -> Any:
        return spark.read.format("txnkv").options(**(where | options)).load()

    return read


@pytest.fixture
def ids(client: txnkv.Client) -> Callable[..., list[int]]:
    """The ids in a table, in their order; a key that is there twice would show."""

    def read(table: str = "t") -> list[int]:
        found = client.table(table).scan(["id"]).to_arrow()
        return sorted(found["id"].to_pylist())

    return read


@pytest.fixture
def nothing_is_left(client: txnkv.Client) -> Callable[[], None]:
    """No transaction is open, nothing is staged, and every block is in order."""

    def check() -> None:
        assert {info.state for info in client.transactions()} <= {
            txnkv.TxnState.COMMITTED,
            txnkv.TxnState.ABORTED,
        }
        assert client.stats()["staged_row_sets"] == 0
        assert client.check().ok

    return check


def batch(*ids: int) -> pa.RecordBatch:
    """Rows for table t, as Spark would hand them over."""
    return pa.record_batch({"v": [f"v{id}" for id in ids], "id": pa.array(ids, pa.int64())})
