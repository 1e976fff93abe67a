"""A server that is killed and started again under clients that do not know of it.

A producer with numbers sends what it has no answer for again; the numbers that came are in the
commit that appended the messages, so each counts once, in its order. A transaction that is open
goes on with the next server, and clients see no more than a pause.

The Java client is tested where its jars are: TXNKV_KAFKA_JARS names their folder.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import txnkv

pytest.importorskip("confluent_kafka", exc_type=ImportError)

from confluent_kafka import Producer

from tools.bounces.run import COMBINATIONS, Combination, run
from tools.bounces.server import Serving

PATIENCE = 120.0


@pytest.fixture
def serving(store: txnkv.Client, store_path: Path) -> Iterator[Serving]:
    made = Serving(store_path)
    made.start()
    yield made
    made.end(signal.SIGKILL)


def _options(serving: Serving, **more: Any) -> dict[str, Any]:
    found = {
        "bootstrap.servers": f"127.0.0.1:{serving.port}",
        "reconnect.backoff.max.ms": 200,
        "message.timeout.ms": int(PATIENCE * 1000),
    }
    return found | {key.replace("_", "."): value for key, value in more.items()}


class Killing:
    """Kills and starts the server in a thread, so many times or until it is stopped.

    Args:
        serving: the server.
        times: how often.
        least: seconds after each start; up to 1.5 more pass, by chance.
    """

    def __init__(self, serving: Serving, times: int, least: float) -> None:
        self._done = threading.Event()
        self._killed = 0

        def run() -> None:
            while self._killed < times:
                if self._done.wait(least + 1.5 * random.random()):
                    return
                serving.end(signal.SIGKILL)
                serving.start()
                self._killed += 1

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def stop(self) -> int:
        """Stop, and tell how often it was killed."""
        self._done.set()
        self._thread.join()
        return self._killed


@pytest.mark.slow
def test_each_message_counts_once_and_in_order(store: txnkv.Client, serving: Serving) -> None:
    topic = store.create_topic("t")
    count = 20_000
    producer = Producer(_options(serving, enable_idempotence=True, linger_ms=1, batch_size=4000))
    killing = Killing(serving, 4, 0.5)
    failed: list[Any] = []
    for number in range(count):
        while True:
            try:
                producer.produce(
                    "t", b"%d" % number, on_delivery=lambda error, _: error and failed.append(error)
                )
                break
            except BufferError:
                producer.poll(0.1)
        if number % 500 == 0:
            producer.poll(0)
            time.sleep(0.1)
    assert producer.flush(PATIENCE) == 0
    killing.stop()
    assert failed == []
    rows = [m.value for m in _all(topic.consumer())]
    assert rows == [b"%d" % number for number in range(count)]


def _all(consumer: Any) -> Iterator[Any]:
    while found := consumer.poll(max_messages=10_000, timeout=1.0):
        yield from found


def _python(servers: str, count: int, folder: Path) -> list[str]:
    return [sys.executable, "-m", "tests.kafka.copying", servers, str(count)]


def _java(servers: str, count: int, folder: Path) -> list[str]:
    jars = os.environ.get("TXNKV_KAFKA_JARS")
    if not jars or not shutil.which("javac"):
        pytest.skip("the Java client needs a JDK, and TXNKV_KAFKA_JARS with kafka-clients' jars")
    source = Path(__file__).with_name("Copying.java")
    subprocess.run(
        ["javac", "-cp", f"{jars}/*", "-d", str(folder), str(source)], check=True, timeout=300
    )
    return ["java", "-Xmx256m", "-cp", f"{folder}:{jars}/*", "Copying", servers, str(count)]


@pytest.mark.slow
@pytest.mark.parametrize("client", [_python, _java])
def test_what_is_read_and_sent_on_counts_once(
    client: Callable[[str, int, Path], list[str]],
    store: txnkv.Client,
    serving: Serving,
    tmp_path: Path,
) -> None:
    """Messages and the offsets of those that were read are one transaction, over many kills."""
    source, out = store.create_topic("in"), store.create_topic("out")
    count = 3_000
    with store.transaction() as txn:
        for number in range(count):
            txn.send(source, b"%d" % number)
    command = client(f"127.0.0.1:{serving.port}", count, tmp_path)
    said = tmp_path / "said"
    with said.open("w") as into:
        copier = subprocess.Popen(command, stdout=into, stderr=subprocess.STDOUT)
        killing = Killing(serving, 12, 0.3)
        try:
            copier.wait(6 * PATIENCE)
        except subprocess.TimeoutExpired:
            pytest.fail(f"after {6 * PATIENCE:.0f} s it had said:\n{_tail(said)}")
        finally:
            copier.kill()
            killed = killing.stop()
    lines = said.read_text().splitlines()
    errors = [line for line in lines if " at " not in line and not line.startswith("%")]
    print(f"killed {killed} times; the client told:", *errors, sep="\n  ")
    assert copier.returncode == 0, _tail(said)
    assert killed >= 3, f"killed {killed} times only: {_tail(said)}"
    assert [m.value for m in _all(out.consumer())] == [b"%d" % n for n in range(count)]
    row = store.table("kafka_offsets").get(("copiers", "in", 0))
    assert row is not None
    assert row["offset"] == count


@pytest.mark.slow
@pytest.mark.parametrize("how", [COMBINATIONS[0], COMBINATIONS[-1]], ids=str)
def test_nothing_is_lost_or_doubled_when_everything_is_ended(
    how: Combination, tmp_path: Path
) -> None:
    """Two of the runs of `python -m tools.bounces`, which has sixteen, of more messages."""
    bounced = run(tmp_path / "bounces", how, 4_000, 9, seed=1)
    assert set(bounced) == {"source", "copier", "server"}


def _tail(path: Path) -> str:
    return "\n".join(path.read_text().splitlines()[-30:])
