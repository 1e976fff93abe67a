"""Kafka's client against `txnkv serve --kafka`, and against a broker: the same client, one run.

    python -m benchmarks.kafka_clients --kafka 127.0.0.1:9092

The server is a process of its own on a new store, as the broker is. Contestants take turns; of
each figure the median is shown. Without `--kafka` ours are measured alone.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import click

import txnkv

from .harness import EACH, MICROSECONDS, Line, compare, report
from .kafka import NOT_SYNCED, SYNCED, Broker
from .svg import bars

OURS: Final = "txnkv serve, synced"
_SECONDS: Final = 60.0
_RATE: Final = 1000
_SIZES: Final = (100, 1024)

Rates = dict[str, list[float]]


class Side:
    """One contestant.

    Args:
        name: of it.
        broker: its clients.
        synced: whether what is acknowledged is on the disk; of a broker alone.
    """

    def __init__(self, name: str, broker: Broker, *, synced: bool = True) -> None:
        self.name, self.broker, self.synced = name, broker, synced

    def topic(self) -> str:
        return self.broker.create(synced=self.synced)

    def produce(self, size: int, count: int) -> tuple[str, float]:
        """Send messages; the topic, and messages a second until the last is acknowledged.

        One is sent before: a producer waits half a second for its number where it asks too soon.
        """
        topic = self.topic()
        producer = self.broker.producer(**{"linger.ms": 5, "batch.size": 1_000_000})
        producer.list_topics(topic, timeout=_SECONDS)
        value = os.urandom(size)
        producer.produce(topic, value)
        producer.flush(_SECONDS)
        start = time.perf_counter()
        for _ in range(count):
            producer.produce(topic, value)
        left = producer.flush(_SECONDS)
        seconds = time.perf_counter() - start
        if left:
            raise RuntimeError(f"{self.name} did not take all messages")
        return topic, count / seconds

    def fetch(self, topic: str, count: int) -> float:
        """Read so many messages of a topic behind its first; messages a second."""
        # A consumer that has 100,000 messages asks for more a second later.
        options = {"fetch.message.max.bytes": 8 << 20, "fetch.queue.backoff.ms": 1}
        consumer = self.broker.consumer(topic, **options)
        consumer.consume(1, _SECONDS)
        start = time.perf_counter()
        got = 0
        while got < count:
            found = consumer.consume(min(10_000, count - got), _SECONDS)
            got += len(found)
            if not found:
                raise RuntimeError(f"{self.name} gave {got} of {count} messages")
        seconds = time.perf_counter() - start
        consumer.close()
        return count / seconds

    def latency(self, seconds: float) -> list[float]:
        """Send 1,000 messages a second; the seconds that each takes to its reader, in order."""
        topic = self.topic()
        producer = self.broker.producer(**{"linger.ms": 0})
        consumer = self.broker.consumer(topic, **{"fetch.wait.max.ms": 100})
        count = int(seconds * _RATE)
        producer.produce(topic, b"0")
        producer.flush(_SECONDS)
        consumer.consume(1, _SECONDS)

        def send() -> None:
            start = time.perf_counter()
            for number in range(count):
                pause = start + number / _RATE - time.perf_counter()
                if pause > 0:
                    time.sleep(pause)
                producer.produce(topic, b"%d" % time.perf_counter_ns())
                producer.poll(0)

        sender = threading.Thread(target=send)
        sender.start()
        taken: list[float] = []
        while len(taken) < count:
            message = consumer.poll(_SECONDS)  # back as soon as one is there
            taken.append((time.perf_counter_ns() - int(message.value())) / 1e9)
        sender.join()
        producer.flush(_SECONDS)
        consumer.close()
        return sorted(taken)

    def transactions(self, size: int, count: int) -> float:
        """Commit transactions of so many messages; transactions a second."""
        topic = self.topic()
        producer = self.broker.producer(**{"transactional.id": topic, "linger.ms": 0})
        producer.init_transactions(_SECONDS)
        value = os.urandom(100)
        start = time.perf_counter()
        for _ in range(count):
            producer.begin_transaction()
            for _ in range(size):
                producer.produce(topic, value)
            producer.commit_transaction(_SECONDS)
        return count / (time.perf_counter() - start)


class Served(Broker):
    """A server of a store; a topic has no option for syncs, for all is synced."""

    def create(self, *, synced: bool, partitions: int = 1) -> str:
        name = f"bench-{time.time_ns():x}"
        self._wait(self.admin.create_topics([self._admin.NewTopic(name, partitions, 1)]))
        return name


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """A server of a new store; its address for Kafka's clients."""
    store = folder / "store"
    txnkv.connect(store).close()
    command = [sys.executable, "-m", "txnkv", "serve", str(store), "--kafka", "127.0.0.1:0"]
    command += ["--listen", "grpc://127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            lines = (re.search(r"Kafka's clients at (\S+)$", line) for line in server.stdout)
            yield next(found[1] for found in lines if found)
        finally:
            server.terminate()


def _wake(broker: Broker) -> None:
    """Have a broker make the topics in which it keeps transactions and offsets."""
    Side("", broker).transactions(1, 1)
    topic = broker.create(synced=False)
    consumer = broker.consumer(topic)
    consumer.commit(offsets=[broker.client.TopicPartition(topic, 0, 0)], asynchronous=False)
    consumer.close()


def _turns(
    sides: list[Side], rounds: int, run: Callable[[Side], dict[str, float]]
) -> Iterator[Any]:
    """Rates by figure and side; the first round is not counted."""
    rates: dict[str, Rates] = {}
    for number in range(rounds + 1):
        for side in sides:
            with side.broker.own_settings_kept() if side.name != OURS else nullcontext():
                if side.name != OURS:
                    side.broker.sync_transactions(side.synced)
                found = run(side)
            for figure, rate in found.items():
                if number:
                    rates.setdefault(figure, {}).setdefault(side.name, []).append(rate)
    yield from rates.items()


def races(sides: list[Side], rounds: int, scale: float) -> Iterator[Line]:
    """All figures of all contestants."""
    for size in _SIZES:
        count = int(20_000_000 * scale) // size

        def both(side: Side, size: int = size, count: int = count) -> dict[str, float]:
            topic, sent = side.produce(size, count)
            return {
                f"produce {size} B": sent,
                f"fetch {size} B": side.fetch(topic, count),
            }

        for figure, rates in _turns(sides, rounds, both):
            yield from compare(figure, rates, unit=EACH)

    def latency(side: Side) -> dict[str, float]:
        taken = side.latency(max(5 * scale, 0.2))
        return {
            f"latency, {name}": 1 / taken[int(len(taken) * share)]
            for name, share in (("median", 0.5), ("99 of 100", 0.99))
        }

    for figure, rates in _turns(sides, rounds, latency):
        yield from compare(figure, rates, unit=MICROSECONDS)
    for size, count in ((1, 200), (100, 100), (10_000, 5)):
        most = max(int(count * scale), 2)

        def some(side: Side, size: int = size, most: int = most) -> dict[str, float]:
            return {f"transactions of {size:,}": side.transactions(size, most)}

        for figure, rates in _turns(sides, rounds, some):
            yield from compare(figure, rates, unit=EACH)


@click.command()
@click.option("--kafka", help="host:port of a Kafka broker.")
@click.option("--rounds", default=3, show_default=True, help="Counted rounds.")
@click.option("--tiny", is_flag=True, help="Small data: checks that it works.")
@click.option("--base", type=click.Path(path_type=Path), help="Where the store is made.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write lines there.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the ratios there, as SVG.")
def main(
    kafka: str | None,
    rounds: int,
    tiny: bool,
    base: Path | None,
    json_file: Path | None,
    plot: Path | None,
) -> None:
    """Compare `txnkv serve --kafka` with a broker."""
    with tempfile.TemporaryDirectory(dir=base) as folder, serving(Path(folder)) as address:
        sides = [Side(OURS, Served(address))]
        if kafka is not None:
            broker = Broker(kafka)
            _wake(broker)
            sides += [Side(SYNCED, broker), Side(NOT_SYNCED, broker, synced=False)]
        lines = list(races(sides, rounds, 0.001 if tiny else 1.0))
        report(lines, json_file)
    if plot is not None and kafka is not None:
        rows: dict[str, dict[str, float]] = {line.race: {} for line in lines}
        for line in lines:
            if line.ratio is not None:
                rows[line.race][f"beside {line.name}"] = line.ratio
        plot.write_text(bars("txnkv serve, times as fast as a broker", list(rows.items())))


if __name__ == "__main__":
    main()
