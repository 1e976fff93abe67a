"""A server that is killed and started again under clients that do not know of it.

A producer with numbers sends what it has no answer for again; the numbers that came are in the
commit that appended the messages, so each counts once, in its order.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import txnkv

pytest.importorskip("confluent_kafka", exc_type=ImportError)

from confluent_kafka import Producer

PATIENCE = 120.0


class Serving:
    """`txnkv serve --kafka` as a process, at one port whenever it is started again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.popen: subprocess.Popen[str] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "txnkv", "serve", str(self._path)]
        command += ["--listen", "grpc://127.0.0.1:0", "--kafka", f"127.0.0.1:{self.port}"]
        self.popen = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ
        )
        assert self.popen.stdout is not None
        lines = [self.popen.stdout.readline() for _ in range(2)]
        assert re.search(rf"Kafka's clients at 127.0.0.1:{self.port}$", lines[1].strip()), lines

    def kill(self) -> None:
        assert self.popen is not None
        self.popen.send_signal(signal.SIGKILL)
        self.popen.communicate(timeout=60)

    def kill_and_start(self, times: int, seconds: float, done: threading.Event) -> None:
        for _ in range(times):
            if done.wait(seconds):
                return
            self.kill()
            self.start()


@pytest.fixture
def serving(store: txnkv.Client, store_path: Path) -> Iterator[Serving]:
    made = Serving(store_path)
    made.start()
    yield made
    made.kill()


def _options(serving: Serving, **more: Any) -> dict[str, Any]:
    found = {
        "bootstrap.servers": f"127.0.0.1:{serving.port}",
        "reconnect.backoff.max.ms": 200,
        "message.timeout.ms": int(PATIENCE * 1000),
    }
    return found | {key.replace("_", "."): value for key, value in more.items()}


def _killing(serving: Serving, times: int, seconds: float) -> tuple[threading.Thread, Any]:
    done = threading.Event()
    thread = threading.Thread(target=serving.kill_and_start, args=(times, seconds, done))
    thread.start()
    return thread, done


@pytest.mark.slow
def test_each_message_counts_once_and_in_order(store: txnkv.Client, serving: Serving) -> None:
    topic = store.create_topic("t")
    count = 20_000
    producer = Producer(_options(serving, enable_idempotence=True, linger_ms=1, batch_size=4000))
    thread, done = _killing(serving, 4, 1.0)
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
    done.set()
    thread.join()
    assert failed == []
    rows = [m.value for m in _all(topic.consumer())]
    assert rows == [b"%d" % number for number in range(count)]


def _all(consumer: Any) -> Iterator[Any]:
    while found := consumer.poll(max_messages=10_000, timeout=1.0):
        yield from found
