"""The two programs: one that numbers messages, one that sends on what it reads.

Each goes on where its committed offsets say, whatever became of the one before. When a transaction
is to be aborted it is; when the client cannot go on, another one is made. SIGTERM: it ends behind
the transaction that it is in.
"""

from __future__ import annotations

import random
import signal
import time
from abc import ABC, abstractmethod
from typing import Any, Final

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

IN: Final = "in"
OUT: Final = "out"
PARTITIONS: Final = 4
SOURCES: Final = 2
COPIERS: Final = 2
COPYING: Final = "copiers"
"""The group of the copiers."""

_KEYS: Final = 32
_PATIENCE: Final = 60.0
_SOME: Final = 600
"""Messages of a transaction, at most."""
_ABORTS: Final = 0.05
"""So many transactions of one are aborted by the program itself."""


def key_of(number: int) -> bytes:
    """Return the key of a message: always of one source, and so in the order of its numbers."""
    return b"%d" % (number % _KEYS)


def partition_of(number: int) -> int:
    return number % _KEYS // SOURCES % PARTITIONS


def settings(address: str) -> dict[str, Any]:
    """Return what every client of a server that is started again is told."""
    return {
        "bootstrap.servers": address,
        "reconnect.backoff.ms": 50,
        "reconnect.backoff.max.ms": 200,
        # From 2.11 on the client gives up the only broker of a cluster when it is down, and keeps
        # waiting for it in what it has cached of coordinators.
        "metadata.recovery.strategy": "none",
        "allow.auto.create.topics": False,
    }


class _Program(ABC):
    """A consumer and a producer, made anew when they cannot go on."""

    def __init__(self, name: str, address: str, group: str) -> None:
        self.name = name
        self._settings = settings(address)
        self._group = group
        self._began = time.monotonic()
        self._stopped = False
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, *_: object) -> None:
        self._stopped = True

    def tell(self, *what: object) -> None:
        print(f"{time.monotonic() - self._began:8.2f} {self.name}", *what, flush=True)

    def run(self) -> None:
        """Go on until there is nothing more to do, or it is told to end."""
        self.tell("begins")
        while not self._stopped:
            try:
                self._make()
                while not self._stopped:
                    if not self._once():
                        self._stopped = True
            except KafkaException as failed:
                error = failed.args[0]
                self.tell(error.name(), error.str(), "fatal" if error.fatal() else "")
            self.consumer.close()
        self.tell("ends")

    def _make(self) -> None:
        asked = self._settings | {
            "group.id": self._group,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "session.timeout.ms": 6000,
            "heartbeat.interval.ms": 500,
        }
        self.consumer = Consumer(asked)
        self.producer = Producer(
            self._settings
            | {
                "transactional.id": self.name,
                "transaction.timeout.ms": 60_000,
                "linger.ms": 2,
                "batch.num.messages": 50,
            }
        )
        self.producer.init_transactions(_PATIENCE)
        self._rewind()

    def _once(self) -> bool:
        """Do one transaction; False when there is nothing more to do."""
        try:
            return self._transact()
        except KafkaException as failed:
            error = failed.args[0]
            if not error.txn_requires_abort() or error.fatal():
                raise
            self.tell("aborts:", error.name(), error.str())
            self.producer.abort_transaction(_PATIENCE)
            self._rewind()
            return True

    def _commit(self, places: list[TopicPartition]) -> bool:
        """Commit, or abort now and then; True: it is committed."""
        if random.random() < _ABORTS:
            self.producer.flush(random.choice((0.0, _PATIENCE)))
            self.producer.abort_transaction(_PATIENCE)
            self._rewind()
            return False
        group = self.consumer.consumer_group_metadata()
        self.producer.send_offsets_to_transaction(places, group, _PATIENCE)
        self.producer.commit_transaction(_PATIENCE)
        return True

    @abstractmethod
    def _transact(self) -> bool:
        """Do one transaction; False when there is nothing more to do."""

    @abstractmethod
    def _rewind(self) -> None:
        """Go on at the offsets that are committed."""


class _Source(_Program):
    def __init__(self, index: int, address: str, count: int) -> None:
        super().__init__(f"source-{index}", address, f"source-{index}")
        self._index = index
        self._count = count

    def _rewind(self) -> None:
        (found,) = self.consumer.committed([TopicPartition(IN, self._index)], _PATIENCE)
        self._next = max(found.offset, 0)

    def _transact(self) -> bool:
        """Send numbers; the next of this source, divided by the sources, is what it commits."""
        mine = range(self._index, self._count, SOURCES)
        if self._next >= len(mine):
            return False
        upto = min(self._next + random.randint(1, _SOME), len(mine))
        self.producer.begin_transaction()
        for number in mine[self._next : upto]:
            self.producer.produce(IN, b"%d" % number, key_of(number), partition_of(number))
        if self._commit([TopicPartition(IN, self._index, upto)]):
            self._next = upto
        return True


class _Copier(_Program):
    def __init__(self, index: int, address: str, shared: bool) -> None:
        super().__init__(f"copier-{index}", address, COPYING)
        self._own = list(range(index, PARTITIONS, COPIERS))
        self._shared = shared
        self._subscribed: Consumer | None = None

    def _rewind(self) -> None:
        if self._shared and self._subscribed is not self.consumer:
            self._subscribed = self.consumer
            self.consumer.subscribe([IN])
            return
        own = [TopicPartition(IN, number) for number in self._own]
        mine = self.consumer.assignment() if self._shared else own
        places = self.consumer.committed(mine, _PATIENCE) if mine else []
        for place in places:
            place.offset = max(place.offset, 0)
        if not self._shared:
            self.consumer.assign(places)
            return
        for place in places:
            self.consumer.seek(place)

    def _transact(self) -> bool:
        read: list[Any] = self.consumer.consume(random.randint(1, _SOME), 0.2)
        for message in read:
            if message.error():
                self.tell("reads:", message.error().str())
        found = [message for message in read if not message.error()]
        if not found:
            return True
        self.producer.begin_transaction()
        ends: dict[int, int] = {}
        for message in found:
            number = message.partition()
            self.producer.produce(OUT, message.value(), message.key(), number)
            ends[number] = message.offset() + 1
        self._commit([TopicPartition(IN, number, end) for number, end in ends.items()])
        return True


def main(kind: str, index: str, address: str, what: str) -> None:
    """Run one.

    Args:
        kind: "source" or "copier".
        index: which of that kind.
        address: of the server.
        what: messages of all sources together; of a copier "group", or "own" for its own
            partitions.
    """
    if kind == "source":
        _Source(int(index), address, int(what)).run()
    else:
        _Copier(int(index), address, what == "group").run()
