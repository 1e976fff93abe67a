"""Spark's own source and sink for Kafka, with a store as the broker: batches, and streams.

It needs the connector: TXNKV_SPARK_KAFKA_JARS names the folder of its jars (spark-sql-kafka-0-10,
spark-token-provider-kafka-0-10, kafka-clients, commons-pool2).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import txnkv
from tests.kafka.test_killed import Serving, serving

__all__ = ["serving"]

PATIENCE = 400.0
SCHEMA = txnkv.Schema({"id": "int64", "v": "string"}, primary_key=["id"])

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "TXNKV_SPARK_KAFKA_JARS" not in os.environ,
        reason="TXNKV_SPARK_KAFKA_JARS names no folder of the connector's jars",
    ),
]


class Programs:
    """Runs of spark_program."""

    def __init__(self, serving: Serving, store: Path, folder: Path) -> None:
        self._own = [f"127.0.0.1:{serving.port}", str(store), str(folder)]
        self.said = folder / "said"

    def start(self, mode: str, *more: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.kafka.spark_program", mode, *self._own, *more]
        with self.said.open("ab") as into:
            return subprocess.Popen(
                command, stdout=into, stderr=subprocess.STDOUT, start_new_session=True
            )

    def run(self, mode: str, *more: str) -> None:
        """Run one to its end."""
        popen = self.start(mode, *more)
        try:
            assert popen.wait(PATIENCE) == 0, self.tail()
        except subprocess.TimeoutExpired:
            pytest.fail(f"{mode} does not end:\n{self.tail()}")
        finally:
            self.kill(popen)

    def kill(self, popen: subprocess.Popen[bytes]) -> None:
        """End a run, its JVM and its workers too."""
        with suppress(ProcessLookupError):
            os.killpg(popen.pid, signal.SIGKILL)
        popen.wait()

    def stream_until(
        self, done: Callable[[], bool], running: subprocess.Popen[bytes] | None = None
    ) -> subprocess.Popen[bytes]:
        """Run a stream, again where it fails, until something is done; it goes on."""
        end = time.monotonic() + PATIENCE
        running = running or self.start("stream")
        while not done():
            if time.monotonic() > end:
                self.kill(running)
                pytest.fail(f"the stream stands still:\n{self.tail()}")
            if running.poll() is not None:
                running = self.start("stream")
            time.sleep(0.1)
        return running

    def tail(self) -> str:
        return self.said.read_text()[-6000:]


@pytest.fixture
def programs(serving: Serving, store_path: Path, tmp_path: Path) -> Programs:
    return Programs(serving, store_path, tmp_path)


def _send(store: txnkv.Client, numbers: range) -> None:
    """Messages to topic `in`, and between them others that are never committed."""
    for first in range(numbers.start, numbers.stop, 100):
        with store.transaction() as txn:
            for number in range(first, min(first + 100, numbers.stop)):
                txn.send("in", b"%d" % number)
        other = store.new_transaction()
        other.serialize()
        other.send("in", b"never")
        other.flush()
        other.rollback()


def test_batches(store: txnkv.Client, programs: Programs) -> None:
    for name in ("sent", "read"):
        store.create_table(name, SCHEMA)
    for name in ("in", "from_spark"):
        store.create_topic(name)
    with store.transaction() as txn:
        for number in range(5_000):
            txn.insert("sent", (number, f"v{number}"))
    _send(store, range(1_000))
    programs.run("batch")
    assert "read 5000 5000" in programs.tail()
    values = sorted(m.value for m in _all(store, "from_spark"))
    assert values == sorted(b"v%d" % n for n in range(5_000))
    rows = store.table("read").scan(ordered=True).to_arrow()
    assert rows.column("v").to_pylist() == [str(n) for n in range(1_000)]


def test_a_stream_copies_each_message_once(
    store: txnkv.Client, serving: Serving, programs: Programs
) -> None:
    """Spark's process and the server are killed at moments of chance; the copy is exact."""
    table = store.create_table("copied", SCHEMA)
    for name in ("in", "echo"):
        store.create_topic(name)
    count, total = 0, 3_000
    for victim in ("spark", "server", "spark", "server"):
        _send(store, range(count, count + 600))
        count += 600
        running = programs.stream_until(_has(table, count - 500))
        time.sleep(random.random())
        if victim == "server":
            serving.kill()
            serving.start()
            running = programs.stream_until(_has(table, count - 200), running)
        programs.kill(running)
    _send(store, range(count, total))
    programs.run("stream", "once")
    values = table.scan(ordered=True).to_arrow().column("v").to_pylist()
    assert values == [str(n) for n in range(total)]
    # The connector's sink sends at least once.
    assert {m.value for m in _all(store, "echo")} == {b"%d" % n for n in range(total)}


def _has(table: txnkv.Table, rows: int) -> Callable[[], bool]:
    return lambda: table.count() >= rows


def _all(store: txnkv.Client, topic: str) -> list[txnkv.Message]:
    found: list[txnkv.Message] = []
    consumer = store.topic(topic).consumer()
    while some := consumer.poll(max_messages=10_000, timeout=1.0):
        found += some
    return found
