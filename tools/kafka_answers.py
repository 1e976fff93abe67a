"""Answers of a Kafka broker to scripts of requests, as a table that tests compare ours with.

    python -m tools.kafka_answers 127.0.0.1:9092 tests/kafka/broker_answers.json

Two kinds of scripts, each on a topic of its own with one partition:

    states         a transactional producer in each state that it can be in, the requests that it
                   may send then, and the code of each answer
    interleavings  three transactional producers A, B, C and a plain one, P, in 40 orders that
                   chance has chosen. After each step: its answer, the high watermark, the last
                   stable offset, and what a reader of each level has read and where it stands

A step is one word: `+A` A adds the partition to a transaction, `A3` A sends three messages, `P2`
the plain one two, `A!` A commits, `A~` A aborts. Of what is read its count and checksum are kept.
Where a broker does its work later (markers, for one) the recorder waits until it is done.
"""

from __future__ import annotations

import json
import random
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from tools.kafka_wire import Seen, Wire, batch_of

TABLE: Final = Path(__file__).resolve().parent.parent / "tests" / "kafka" / "broker_answers.json"
INTERLEAVINGS, STEPS = 40, 20
_BUSY: Final = {14, 15, 16, 19, 51}
"""Codes that say "soon": a coordinator loads or moves, the last transaction is still ending."""

_PATIENCE: Final = 60.0
_PARTITION: Final = {"replica_id": -1}
_LEVELS: Final = (0, 1)


def soon(ask: Callable[[], Any], done: Callable[[Any], bool]) -> Any:
    """Ask until the answer is one.

    Raises:
        TimeoutError: it never was.
    """
    end = time.monotonic() + _PATIENCE
    while not done(found := ask()):
        if time.monotonic() > end:
            raise TimeoutError(f"still {found}")
        time.sleep(0.01)
    return found


class Producer:
    """A producer of a topic's one partition, by bare requests.

    Args:
        wire: to the broker.
        topic: to which it sends.
        name: its transactional id.
    """

    def __init__(self, wire: Wire, topic: str, name: str, timeout_millis: int = 60_000) -> None:
        self.wire, self.topic, self.name = wire, topic, name
        self.sequence = 0
        self.timeout_millis = timeout_millis
        # At the first one a broker makes the topic in which it keeps them.
        wire.ask("FindCoordinator", coordinator_keys=[name], key_type=1)
        self.who: dict[str, Any] = {"transactional_id": name, "producer_id": -1}
        self.who["producer_epoch"] = -1

    def begin(self) -> int:
        """Become the one of the name; the code."""
        found = self.init()
        self.who["producer_id"] = found["producer_id"]
        self.who["producer_epoch"] = found["producer_epoch"]
        self.sequence = 0
        return int(found["error_code"])

    def init(self, **other: Any) -> dict[str, Any]:
        nobody: dict[str, Any] = {"producer_id": -1, "producer_epoch": -1}
        nobody["transactional_id"] = self.name
        asked = nobody | {"transaction_timeout_ms": self.timeout_millis} | other
        answer: dict[str, Any] = soon(
            lambda: self.wire.ask("InitProducerId", **asked),
            lambda found: found["error_code"] not in _BUSY,
        )
        return answer

    def _until(self, ask: Callable[[], int]) -> int:
        return int(soon(ask, lambda code: code not in _BUSY))

    def add(self, partition: int = 0) -> int:
        topics = [{"name": self.topic, "partitions": [partition]}]

        def ask() -> int:
            found = self.wire.ask("AddPartitionsToTxn", **self.who, topics=topics)
            code = found["results_by_topic"][0]["results_by_partition"][0]["partition_error_code"]
            return int(code)

        return self._until(ask)

    def add_offsets(self) -> int:
        def ask() -> int:
            found = self.wire.ask("AddOffsetsToTxn", **self.who, group_id=f"g{self.name}")
            return int(found["error_code"])

        return self._until(ask)

    def commit_offset(self) -> int:
        place = {"partition_index": 0, "committed_offset": 0, "committed_leader_epoch": -1}
        topics = [{"name": self.topic, "partitions": [place | {"committed_metadata": ""}]}]
        group: dict[str, Any] = {"group_id": f"g{self.name}", "generation_id": -1, "member_id": ""}
        self.wire.ask("FindCoordinator", coordinator_keys=[group["group_id"]], key_type=0)

        def ask() -> int:
            found = self.wire.ask("TxnOffsetCommit", **self.who, **group, topics=topics)
            return int(found["topics"][0]["partitions"][0]["error_code"])

        return self._until(ask)

    def send(self, count: int = 1, partition: int = 0, first: int | None = None) -> tuple[int, int]:
        """Send messages; the code and the first one's offset."""
        first = self.sequence if first is None else first
        values = [b"%s%d" % (self.name[-1].encode(), first + n) for n in range(count)]
        producer = (self.who["producer_id"], self.who["producer_epoch"])
        batch = batch_of(*values, producer=producer, first=first, open=True)

        def ask() -> dict[str, Any]:
            return self.wire.produce(self.topic, batch, partition, transactional_id=self.name)

        found = soon(ask, lambda answer: answer["error_code"] not in _BUSY)
        if found["error_code"] == 0:
            self.sequence = max(self.sequence, first + count)
        return found["error_code"], found["base_offset"]

    def end(self, *, commit: bool) -> int:
        def ask() -> int:
            return int(self.wire.ask("EndTxn", **self.who, committed=commit)["error_code"])

        return self._until(ask)


def make_topic(wire: Wire, topic: str) -> None:
    """Make a topic of one partition, and wait until it can be used."""
    asked = {"name": topic, "num_partitions": 1, "replication_factor": 1}
    made = wire.ask("CreateTopics", topics=[asked], timeout_ms=30_000)
    assert made["topics"][0]["error_code"] == 0, made

    def has_leader() -> bool:
        found = wire.ask("Metadata", topics=[{"name": topic}])["topics"][0]
        return not found["error_code"] and found["partitions"][0]["leader_id"] >= 0

    soon(has_leader, bool)
    soon(lambda: wire.fetch(topic, 0)["error_code"], lambda code: code == 0)


# -- states ----------------------------------------------------------------------------


def _requests(producer: Producer) -> Iterator[tuple[str, Callable[[], int]]]:
    """What a producer may ask, each with its code; the ends come last."""
    yield "Produce", lambda: producer.send()[0]
    yield "TxnOffsetCommit", producer.commit_offset
    yield "EndTxn commit", lambda: producer.end(commit=True)
    yield "EndTxn abort", lambda: producer.end(commit=False)


def _adding(producer: Producer) -> Iterator[tuple[str, Callable[[], int]]]:
    yield "AddPartitionsToTxn", producer.add
    yield "AddOffsetsToTxn", producer.add_offsets
    yield from _requests(producer)


def states(wire: Wire, tag: str) -> Iterator[tuple[str, str, int]]:
    """Each state, each request in it, and the code of the answer.

    Args:
        wire: to the broker.
        tag: makes names that nobody has.
    """
    topic = f"states-{tag}"
    make_topic(wire, topic)

    def made(name: str, timeout_millis: int = 60_000) -> Producer:
        producer = Producer(wire, topic, f"{name}-{tag}", timeout_millis)
        assert producer.begin() == 0
        return producer

    nobody = Producer(wire, topic, f"nobody-{tag}")
    nobody.who |= {"producer_id": 1 << 40, "producer_epoch": 0}
    for asked, ask in _adding(nobody):
        yield "of a name that nobody has", asked, ask()
    other = made("other")
    other.who["producer_id"] += 1 << 40
    for asked, ask in _adding(other):
        yield "under another id", asked, ask()
    elder = made("elder")
    made("elder")
    for asked, ask in _adding(elder):
        yield "after its successor", asked, ask()
    early = made("early")
    early.who["producer_epoch"] += 1
    for asked, ask in _adding(early):
        yield "in an epoch that is not yet", asked, ask()
    for asked, ask in _requests(made("new")):
        yield "before any transaction", asked, ask()
    offsets = made("offsets")
    yield "at its begin", "AddOffsetsToTxn", offsets.add_offsets()
    yield "with offsets alone", "Produce", offsets.send()[0]
    yield "with offsets alone", "TxnOffsetCommit", offsets.commit_offset()
    yield "with offsets alone", "EndTxn commit", offsets.end(commit=True)
    for commit in (True, False):
        ended = made(f"ended{commit}")
        yield "at its begin", "AddPartitionsToTxn", ended.add()
        yield "open", "AddPartitionsToTxn", ended.add()
        yield "open", "Produce", ended.send()[0]
        yield "open", "Produce of a batch that came", ended.send(first=0)[0]
        yield "open", "Produce behind a gap", ended.send(first=7)[0]
        yield "open", "EndTxn", ended.end(commit=commit)
        ended.end(commit=commit)  # is answered when a broker has done all of it
        for asked, ask in _requests(ended):
            yield "committed" if commit else "aborted", asked, ask()
    late = made("late", 1000)
    assert late.add() == 0
    assert late.send()[0] == 0
    soon(late.add, lambda code: code != 0)
    for asked, ask in _adding(late):
        yield "after its timeout", asked, ask()
    known = {key: late.who[key] for key in ("producer_id", "producer_epoch")}
    yield "after its timeout", "InitProducerId", late.init(**known)["error_code"]
    yield from _inits(made("init"))


def _inits(producer: Producer) -> Iterator[tuple[str, str, int]]:
    known = {key: producer.who[key] for key in ("producer_id", "producer_epoch")}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("without a name", {"transactional_id": ""}),
        ("with no timeout", {"transaction_timeout_ms": 0}),
        ("with a timeout of years", {"transaction_timeout_ms": 2**31 - 1}),
        ("under another id", known | {"producer_id": 1 << 40}),
        ("in an epoch that is not yet", known | {"producer_epoch": 9}),
        ("again", known),
        ("again, for the answer was lost", known),
    ]
    for state, asked in cases:
        yield state, "InitProducerId", producer.init(**asked)["error_code"]


# -- interleavings ---------------------------------------------------------------------


class Step(NamedTuple):
    """One step, and what there is after it.

    Attributes:
        word: the step.
        answer: its offset or code.
        high_watermark, last_stable_offset: of the partition.
        levels: of readers of all and of what is committed: messages, their checksum, position.
    """

    word: str
    answer: int
    high_watermark: int
    last_stable_offset: int
    levels: list[tuple[int, int, int]]


def words_of(seed: int) -> list[str]:
    """The steps of one interleaving; at its end all transactions are."""
    chance = random.Random(seed)
    open: set[str] = set()
    words = []
    for _ in range(STEPS):
        name = chance.choice("ABCP")
        if name == "P":
            words.append(f"P{chance.randint(1, 3)}")
        elif name not in open:
            open.add(name)
            words.append(f"+{name}")
        elif chance.random() < 0.6:
            words.append(f"{name}{chance.randint(1, 3)}")
        else:
            open.discard(name)
            words.append(name + chance.choice("!~"))
    return words + [name + chance.choice("!~") for name in sorted(open)]


class Play:
    """One interleaving on a broker.

    Args:
        wire: to it.
        topic: a new one.
    """

    def __init__(self, wire: Wire, topic: str) -> None:
        self.wire, self.topic = wire, topic
        make_topic(wire, topic)
        self._producers = {name: Producer(wire, topic, f"{topic}-{name}") for name in "ABC"}
        for each in self._producers.values():
            assert each.begin() == 0
        self._end = 0
        self._sent = 0

    def step(self, word: str) -> Step:
        answer = self._do(word)
        soon(lambda: self.wire.fetch(self.topic, self._end), self._has_come)
        levels = [self._read(level) for level in _LEVELS]
        found = self.wire.fetch(self.topic, self._end, isolation_level=0)
        marks = found["high_watermark"], found["last_stable_offset"]
        return Step(word, answer, *marks, levels)

    def _has_come(self, found: dict[str, Any]) -> bool:
        return bool(found["high_watermark"] == self._end)

    def _do(self, word: str) -> int:
        if word[0] == "P":
            values = [b"P%d" % (self._sent + n) for n in range(int(word[1:]))]
            self._sent += len(values)
            self._end += len(values)
            sent = self.wire.produce(self.topic, batch_of(*values))
            assert sent["error_code"] == 0, sent
            return int(sent["base_offset"])
        if word[0] == "+":
            return self._producers[word[1]].add()
        producer = self._producers[word[0]]
        if word[1] in "!~":
            self._end += 1
            return producer.end(commit=word[1] == "!")
        code, offset = producer.send(int(word[1:]))
        assert code == 0, code
        self._end += int(word[1:])
        return offset

    def _read(self, level: int) -> tuple[int, int, int]:
        """What a client of a level is given from the beginning on."""
        at, count, sum = 0, 0, 0
        dropped: set[int] = set()
        while True:
            found = self.wire.fetch(self.topic, at, isolation_level=level)
            assert found["error_code"] == 0, found
            seen = Seen(found["records"])
            if not seen.batches:
                return count, sum, at
            aborted = {
                (each["producer_id"], each["first_offset"])
                for each in found["aborted_transactions"] or ()
            }
            for (base, last, kind, producer, _), some in zip(
                seen.batches, seen.records, strict=True
            ):
                dropped |= {id for id, first in aborted if id == producer and first <= base}
                if kind & 0x20:
                    dropped.discard(producer)
                    aborted = {each for each in aborted if each[0] != producer or each[1] > last}
                    sum = zlib.crc32(b"%d %s" % (base, some[0]), sum)
                elif producer not in dropped:
                    for offset, value in enumerate(some, base):
                        count += 1
                        sum = zlib.crc32(b"%d %d %s" % (offset, kind & 0x10, value), sum)
                at = last + 1


def interleaving(wire: Wire, tag: str, seed: int) -> Iterator[Step]:
    """All steps of one interleaving, as a broker answers them."""
    play = Play(wire, f"interleaving-{tag}-{seed}")
    for word in words_of(seed):
        yield play.step(word)


def record(address: str) -> dict[str, Any]:
    """The table of a broker."""
    host, _, port = address.rpartition(":")
    wire = Wire(int(port), host)
    tag = f"{time.time_ns():x}"
    return {
        "states": list(states(wire, tag)),
        "interleavings": [list(interleaving(wire, tag, seed)) for seed in range(INTERLEAVINGS)],
    }


def as_text(table: dict[str, Any]) -> str:
    """The table as JSON, with a line for each row."""
    rows = ",\n".join(json.dumps(each) for each in table["states"])
    plays = ",\n".join(
        "[" + ",\n".join(json.dumps(each, separators=(",", ":")) for each in play) + "]"
        for play in table["interleavings"]
    )
    return f'{{"states": [\n{rows}\n],\n"interleavings": [\n{plays}\n]}}\n'


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(as_text(record(sys.argv[1])))
