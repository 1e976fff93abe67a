"""One run: the server, the programs and the watcher, what befalls them, and what is there then."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from confluent_kafka import Consumer, TopicPartition

import txnkv
from tools.bounces import programs
from tools.bounces.programs import COPIERS, COPYING, IN, OUT, PARTITIONS, SOURCES
from tools.bounces.server import PATIENCE, Serving
from tools.forked import Popen
from txnkv.coordinator import TxnState

_STUCK: Final = 180.0
"""Seconds without a message that is sent on, after which something is stuck."""

_GIVEN_UP: Final = 90.0
"""Seconds, within which what nobody goes on with is aborted."""

_PROGRAM: Final = "import sys; from tools.bounces import programs; programs.main(*sys.argv[1:])"


class Combination(NamedTuple):
    """How each kind is ended, "clean" or "hard", and whether the group shares the partitions."""

    sources: str
    copiers: str
    server: str
    group: bool

    def __str__(self) -> str:
        how = f"sources {self.sources}, copiers {self.copiers}, server {self.server}"
        return f"{how}, {'a group' if self.group else 'own partitions'}"


_WAYS: Final = ("clean", "hard")
COMBINATIONS: Final = [
    Combination(sources, copiers, server, group)
    for sources, copiers, server, group in product(_WAYS, _WAYS, _WAYS, (False, True))
]

_SIGNALS: Final = {"clean": signal.SIGTERM, "hard": signal.SIGKILL}


class BouncesError(Exception):
    """Something was lost, doubled, out of order, stuck or ended by itself."""


def run(
    folder: Path,
    how: Combination,
    count: int,
    bounces: int,
    seed: int,
    show: Callable[[int], None] = lambda done: None,
) -> Counter[str]:
    """Send `count` messages all the way, and look at what is there then.

    Args:
        folder: of the store and of what the programs say; made.
        how: what is done to whom.
        count: messages.
        bounces: how many, about.
        seed: of the bounces.
        show: is told how many have come.

    Returns:
        How often each kind was ended.

    Raises:
        BouncesError: it is not as it should be.
    """
    folder.mkdir(parents=True)
    with txnkv.connect(folder / "store") as client:
        for name in (IN, OUT):
            client.create_topic(name, PARTITIONS)
        with ExitStack() as stack:
            log = stack.enter_context((folder / "log").open("a"))
            place = _Place(folder, log, how, count)
            stack.callback(place.close)
            place.start()
            bounced = _endure(place, bounces, random.Random(seed), show)
            place.finish()
            problems = [*_problems(place, client)]
        report = client.check()
        if not report.ok:
            problems.append(f"check: {report}")
    if problems:
        raise BouncesError("\n".join(problems))
    return bounced


class _Watcher(threading.Thread):
    """Reads what is committed in a topic, all the while.

    Attributes:
        seen: offset and value, by partition.
        count: how many.
    """

    def __init__(self, address: str, topic: str) -> None:
        super().__init__(name=f"watcher of {topic}")
        self.seen: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
        self.count = 0
        self._ends = threading.Event()
        self._consumer = _reader(address, topic)

    def run(self) -> None:
        while not self._ends.is_set():
            for message in self._consumer.consume(1000, 0.2):
                if not message.error():
                    self.seen[message.partition()].append((message.offset(), message.value()))
                    self.count += 1
        self._consumer.close()

    def end(self) -> None:
        self._ends.set()
        self.join()


def _reader(address: str, topic: str) -> Any:
    more = {"group.id": "watcher", "enable.auto.commit": False, "enable.partition.eof": True}
    made = Consumer(
        programs.settings(address) | more | {"isolation.level": "read_committed"},
    )
    made.assign([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
    return made


class _Place:
    """The processes of a run.

    Attributes:
        server: of the store.
        running: the programs that have not come to their end, by name.
        watchers: of what they send, by topic.
    """

    def __init__(self, folder: Path, log: IO[str], how: Combination, count: int) -> None:
        self.folder = folder
        self.how = how
        self.count = count
        self._log = log
        self.server = Serving(folder / "store", log)
        self.running: dict[str, subprocess.Popen[str]] = {}
        self.watchers = {topic: _Watcher(self.server.address, topic) for topic in (IN, OUT)}
        for watcher in self.watchers.values():
            watcher.start()

    def start(self) -> None:
        self.server.start()
        for name in [f"source-{n}" for n in range(SOURCES)]:
            self._start(name)
        for name in [f"copier-{n}" for n in range(COPIERS)]:
            self._start(name)

    def _start(self, name: str) -> None:
        kind, index = name.split("-")
        what = str(self.count) if kind == "source" else "group" if self.how.group else "own"
        command = [sys.executable, "-c", _PROGRAM, kind, index, self.server.address, what]
        self.running[name] = Popen(command, stdout=self._log, stderr=self._log, text=True)

    def bounce(self, kind: str, chance: random.Random) -> bool:
        """End one of a kind and start it again; False: there is none any more."""
        if kind == "server":
            self.server.end(_SIGNALS[self.how.server])
            time.sleep(chance.choice((0.0, chance.random())))
            self.server.start()
            return True
        names = [name for name in self.running if name.startswith(kind)]
        if not names:
            return False
        name = chance.choice(names)
        self._end(name, self.how.sources if kind == "source" else self.how.copiers)
        time.sleep(chance.choice((0.0, chance.random())))
        self._start(name)
        return True

    def look(self) -> None:
        """See that no program has ended by itself but those that are through.

        Raises:
            BouncesError: one has.
        """
        for name, popen in list(self.running.items()):
            code = popen.poll()
            if code is None:
                continue
            if code or not name.startswith("source"):
                raise BouncesError(f"{name} ended with {code}")
            del self.running[name]

    def _end(self, name: str, how: str) -> None:
        popen = self.running.pop(name)
        popen.send_signal(_SIGNALS[how])
        try:
            code = popen.wait(2 * PATIENCE)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.wait()
            raise BouncesError(f"{name} does not stop in {2 * PATIENCE:.0f} s") from None
        # One that has just begun does not know the signal.
        if code not in (0, -_SIGNALS[how]):
            raise BouncesError(f"{name} ended with {code}")

    def finish(self) -> None:
        """Let the programs come to their end."""
        for name in list(self.running):
            self._end(name, "clean")
        self._end_watchers()

    def _end_watchers(self) -> None:
        for watcher in self.watchers.values():
            watcher.end()

    def close(self) -> None:
        for popen in self.running.values():
            popen.kill()
            popen.wait()
        self._end_watchers()
        if self.server.popen is not None and self.server.popen.poll() is None:
            self.server.end(signal.SIGTERM)


def _endure(
    place: _Place, bounces: int, chance: random.Random, show: Callable[[int], None]
) -> Counter[str]:
    """Bounce one after the other, as messages come on, until all have come."""
    bounced: Counter[str] = Counter()
    waiting: list[str] = []
    apart = 2 * place.count / (bounces + 1)
    last, due, moved = 0, apart * chance.random(), time.monotonic()
    while (done := place.watchers[OUT].count) < place.count:
        place.look()
        show(done)
        time.sleep(0.02)
        both = done + place.watchers[IN].count
        if both > last:
            last, moved = both, time.monotonic()
        if time.monotonic() > moved + _STUCK:
            raise BouncesError(f"{done:,} have come, and none in {_STUCK:.0f} s")
        if both < due:
            continue
        due = both + apart * 2 * chance.random()
        if not waiting:
            waiting = ["source", "copier", "server"]
            chance.shuffle(waiting)
        time.sleep(chance.random() / 2)
        kind = waiting.pop()
        bounced[kind] += place.bounce(kind, chance)
    show(done)
    return bounced


# -- what is there ---------------------------------------------------------------------


def _problems(place: _Place, client: txnkv.Client) -> Iterator[str]:
    """What is not as it should be."""
    address = place.server.address
    there = {topic: _read(address, topic) for topic in (IN, OUT)}
    for topic, found in there.items():
        yield from _wrong_numbers(topic, found, place.count)
        own = _read_here(client, topic)
        if own != found:
            yield f"{topic}: the store's consumer reads {_counts(own)}, Kafka's {_counts(found)}"
        watched = place.watchers[topic].seen
        if dict(watched) != found:
            yield f"{topic}: the watcher read {_counts(watched)}, there are {_counts(found)}"
    for number in range(PARTITIONS):
        sent, copied = there[IN][number], there[OUT][number]
        if [value for _, value in sent] != [value for _, value in copied]:
            yield f"partition {number}: {OUT!r} has not what {IN!r} has, or not in its order"
    until = time.monotonic() + _GIVEN_UP
    while (open := _open(client)) and time.monotonic() < until:
        time.sleep(0.5)
    if open:
        yield f"open: {open}"
    for group, number, expected in _ends(there[IN], place.count):
        row = client.table("kafka_offsets").get((group, IN, number))
        if row is None or row["offset"] != expected:
            yield f"{group}, partition {number}: {row}, where {expected} is the end"


def _open(client: txnkv.Client) -> list[txnkv.TxnInfo]:
    """The transactions that are open: one that a server that was killed had just begun, of which
    nobody knows yet, is given up in a while.
    """
    return [each for each in client.transactions() if each.state is TxnState.OPEN]


def _counts(found: dict[int, list[tuple[int, bytes]]]) -> dict[int, int]:
    return {number: len(messages) for number, messages in sorted(found.items())}


def _wrong_numbers(
    topic: str, found: dict[int, list[tuple[int, bytes]]], count: int
) -> Iterator[str]:
    times: Counter[int] = Counter()
    last: dict[bytes, int] = {}
    for partition, messages in found.items():
        for offset, value in messages:
            number = int(value)
            times[number] += 1
            key = programs.key_of(number)
            place = f"{topic}, partition {partition}, offset {offset}: {number}"
            if programs.partition_of(number) != partition:
                yield f"{place} is of partition {programs.partition_of(number)}"
            if last.get(key, -1) >= number:
                yield f"{place} comes behind {last[key]}, of the same key"
            last[key] = number
    lost = [number for number in range(count) if number not in times]
    doubled = [number for number, n in times.items() if n > 1]
    if lost:
        yield f"{topic}: {len(lost):,} are lost, the first is {lost[0]}"
    if doubled:
        yield f"{topic}: {len(doubled):,} are doubled, the first is {min(doubled)}"
    if len(times) - count + len(lost):
        yield f"{topic}: {len(times) - count + len(lost)} were never sent"


def _read(address: str, topic: str) -> dict[int, list[tuple[int, bytes]]]:
    """All that is committed, by Kafka's client."""
    consumer = _reader(address, topic)
    found: dict[int, list[tuple[int, bytes]]] = {number: [] for number in range(PARTITIONS)}
    ends = set[int]()
    until = time.monotonic() + _STUCK
    while len(ends) < PARTITIONS and time.monotonic() < until:
        for message in consumer.consume(1000, 0.5):
            if message.error():
                ends.add(message.partition())
            else:
                found[message.partition()].append((message.offset(), message.value()))
    consumer.close()
    return found


def _read_here(client: txnkv.Client, topic: str) -> dict[int, list[tuple[int, bytes]]]:
    found: dict[int, list[tuple[int, bytes]]] = {number: [] for number in range(PARTITIONS)}
    with client.topic(topic).consumer() as consumer:
        while messages := consumer.poll(max_messages=10_000, timeout=1.0):
            for message in messages:
                assert isinstance(message.value, bytes)
                found[message.partition].append((message.offset, message.value))
    return found


def _ends(sent: dict[int, list[tuple[int, bytes]]], count: int) -> Iterator[tuple[str, int, int]]:
    """Group, partition and offset of what is to be committed."""
    for source in range(SOURCES):
        yield f"source-{source}", source, len(range(source, count, SOURCES))
    for number, messages in sent.items():
        if messages:
            yield COPYING, number, messages[-1][0] + 1
