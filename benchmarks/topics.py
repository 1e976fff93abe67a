"""Topics: what is produced, fetched and passed on a second."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

import txnkv
from txnkv import core

from .harness import EACH, MICROSECONDS, Contestant, Line, race
from .kafka import Broker, KafkaQueue
from .kafka_fetch import RawConsumer
from .kafka_transactions import Passing, fill
from .queues import Queue, TxnkvQueue, queues

BATCH_BYTES = 1 << 20
_STATE = txnkv.Schema({"id": "int64", "n": "int64"}, primary_key=["id"])
_FETCH = 4 << 20


def messages(count: int, size: int, seed: int = 0) -> pa.Array:
    """So many messages of `size` random bytes."""
    data = np.random.default_rng(seed).bytes(count * size)
    offsets = np.arange(0, (count + 1) * size, size, dtype=np.int32)
    return pa.Array.from_buffers(
        pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )


def produce(
    total_bytes: int, rounds: int, base: Path | None, broker: Broker | None = None
) -> list[Line]:
    """Batches of a MiB, each durable before the next, of small and of larger messages.

    Args:
        total_bytes: a round.
        rounds: counted rounds.
        base: where the stores are made.
        broker: of Kafka, where there is one.
    """
    lines: list[Line] = []
    for size in (100, 1024):
        each = min(BATCH_BYTES, total_bytes) // size
        batches = [messages(each, size, seed) for seed in range(max(total_bytes // BATCH_BYTES, 1))]
        with ExitStack() as stack:
            there = [stack.enter_context(closing(queue)) for queue in queues(base, broker)]
            ours, *peers = [_producer(queue, batches) for queue in there]
            lines += race(
                f"produce, messages of {size} bytes, batches of 1 MiB",
                ours,
                peers,
                rounds=rounds,
                ratios={"the disk, with the same fsyncs": 0.5},
            )
            _require_all(there, each * len(batches))
    return lines


def _producer(queue: Queue, batches: list[pa.Array]) -> Contestant:
    def run() -> int:
        for batch in batches:
            queue.produce(batch)
        return sum(map(len, batches))

    return Contestant(queue.name, run, queue.empty)


def _require_all(there: list[Queue], count: int) -> None:
    for queue in there:
        if queue.count() != count:
            raise RuntimeError(f"{queue.name} has {queue.count()} messages, not {count}")


def send(count: int, rounds: int, base: Path | None) -> list[Line]:
    """One message a call, all in one transaction, committed at the end."""
    values = messages(count, 100).to_pylist()
    with closing(TxnkvQueue(base)) as queue:

        def run() -> int:
            with queue.client.transaction(timeout=None) as txn:
                topic = queue.topic
                for value in values:
                    txn.send(topic, value)
            return count

        ours = Contestant("txnkv", run, queue.empty)
        lines = race(
            f"send, {count:,} messages of 100 bytes one by one, and commit",
            ours,
            [],
            rounds=rounds,
            at_least=0.3e6,
        )
        _require_all([queue], count)
    return lines


def fetch(
    total_bytes: int, rounds: int, base: Path | None, broker: Broker | None = None
) -> list[Line]:
    """Raw batches from memory, all of them, and those of committed transactions, of which one in
    a hundred was aborted. A row is a byte. Kafka's come through a socket, and are not filtered.
    """
    each = 64 << 10
    count = max(total_bytes // each, 100)
    with closing(TxnkvQueue(base)) as queue:
        batch = pa.record_batch({"value": messages(each // 1024, 1024)})
        for number in range(count):
            txn = queue.client.new_transaction()
            txn.serialize()  # large: batches of its own in the log, and a marker
            txn.send_batch(queue.topic, batch)
            if number % 100 == 50:
                txn.rollback()
            else:
                txn.commit()

        def committed() -> int:
            found, offset, filter = 0, 0, core.CommittedFilter()
            while True:
                got = queue.topic.fetch(0, offset, _FETCH, "read_committed")
                if not got.records:
                    return found
                aborted = [(each.producer_id, each.first_offset) for each in got.aborted or ()]
                spans = filter.keep(got.records, aborted, offset, got.last_stable_offset)
                found += len(got.records)
                offset = spans.next_offset

        def all_there_is() -> int:
            found, offset = 0, 0
            while True:
                got = queue.topic.fetch(0, offset, _FETCH, "read_uncommitted")
                if not got.records:
                    return found
                spans = core.all_data(got.records, offset, got.high_watermark)
                found += len(got.records)
                offset = spans.next_offset

        if committed() != all_there_is():
            raise RuntimeError("the two fetches do not read the same log")
        with ExitStack() as stack:
            peers = _kafka_fetches(broker, batch["value"], count, stack) if broker else []
            lines = race(
                "fetch, bytes",
                Contestant("txnkv, read_committed, 1% aborted", committed),
                [Contestant("txnkv, read_uncommitted", all_there_is), *peers],
                rounds=rounds,
                ratios={"txnkv, read_uncommitted": 0.9},
            )
        lines[0].goal, lines[0].reached = ">= 2000 M/s", lines[0].rate >= 2e9
    return lines


def _kafka_fetches(
    broker: Broker, values: pa.Array, count: int, stack: ExitStack
) -> list[Contestant]:
    topic = fill(broker, values, count)
    stack.callback(broker.drop, topic)

    def contestant(name: str, *, committed: bool) -> Contestant:
        consumer = stack.enter_context(RawConsumer(broker.server, topic, committed=committed))

        def run() -> int:
            found, offset = 0, 0
            while True:
                got, offset = consumer.fetch(offset, _FETCH)
                if not got:
                    return found
                found += got

        if run() < values.nbytes * count:
            raise RuntimeError("Kafka did not give all that was sent")
        return Contestant(name, run)

    return [
        contestant("kafka, read_committed, 1% aborted", committed=True),
        contestant("kafka, read_uncommitted", committed=False),
    ]


def consume(count: int, rounds: int, base: Path | None, broker: Broker | None = None) -> list[Line]:
    """All messages of 100 bytes of a topic, committed, as Python objects and as Arrow batches.

    Args:
        count: messages.
        rounds: counted rounds.
        base: where the stores are made.
        broker: of Kafka, where there is one.
    """
    batches = _in_batches(count)
    with ExitStack() as stack:
        queue = stack.enter_context(closing(TxnkvQueue(base)))
        there: list[Queue] = [queue]
        if broker is not None:
            kafka = stack.enter_context(closing(KafkaQueue(broker, synced=False)))
            there.append(kafka)
        for one in there:
            for batch in batches:
                one.produce(batch)
        _require_all(there, count)

        def poll() -> int:
            found = 0
            with queue.topic.consumer() as consumer:
                while found < count:
                    found += len(consumer.poll(max_messages=10_000))
            return found

        peers = [Contestant("txnkv, poll_batch", queue.count)]
        if broker is not None:
            peers.append(Contestant("kafka, consume", lambda: _consume(broker, kafka.topic, count)))
        return race(
            f"consume, {count:,} messages of 100 bytes",
            Contestant("txnkv, poll", poll),
            peers,
            rounds=rounds,
        )


def _consume(broker: Broker, topic: str, count: int) -> int:
    consumer = broker.consumer(topic)
    found = 0
    while found < count:
        found += len(consumer.consume(min(10_000, count - found), timeout=5.0))
    consumer.close()
    return found


def pass_on(count: int, rounds: int, base: Path | None, broker: Broker | None = None) -> list[Line]:
    """Consume, upsert state, produce and acknowledge in one transaction.

    Args:
        count: transactions a round.
        rounds: counted rounds.
        base: where the stores are made.
        broker: of Kafka, where there is one.
    """
    return [*_one_by_one(count, rounds, base, broker), *_in_hundreds(count, rounds, base, broker)]


@contextmanager
def _kafka_passings(
    broker: Broker | None, count: int, transactions: int, rounds: int
) -> Iterator[list[Contestant]]:
    """Each kind of Kafka, passing on `count` messages a round in so many transactions."""
    if broker is None:
        yield []
        return
    batches = _in_batches(count * (rounds + 1))
    with ExitStack() as stack:
        there = [
            stack.enter_context(closing(Passing(broker, batches, synced=synced)))
            for synced in (True, False)
        ]
        stack.enter_context(broker.own_settings_kept())
        each = count // transactions
        yield [Contestant(one.name, partial(one.some, count, each), one.prepare) for one in there]
        for one in there:
            one.require_all()


def _one_by_one(count: int, rounds: int, base: Path | None, broker: Broker | None) -> list[Line]:
    with (
        closing(_Passing(count * (rounds + 1), base)) as passing,
        _kafka_passings(broker, count, count, rounds) as kafkas,
    ):
        rows = passing.client.create_table("rows", _STATE)

        def alone() -> int:
            for number in range(count):
                with passing.client.transaction() as txn:
                    txn.upsert(rows, {"id": number % 1000, "n": number})
            return count

        lines = race(
            "consume, upsert, produce, acknowledge: a message each",
            Contestant("txnkv", lambda: passing.some(count, 1)),
            [Contestant("txnkv, a row alone", alone), *kafkas],
            rounds=rounds,
            ratios={"txnkv, a row alone": 1 / 1.5},
            unit=MICROSECONDS,
        )
        passing.require_all()
    return lines


def _in_hundreds(count: int, rounds: int, base: Path | None, broker: Broker | None) -> list[Line]:
    count *= 100
    with (
        closing(_Passing(count * (rounds + 1), base)) as passing,
        _kafka_passings(broker, count, count // 100, rounds) as kafkas,
    ):
        lines = race(
            "consume, upsert, produce, acknowledge: 100 messages each",
            Contestant("txnkv", lambda: passing.some(count, 100)),
            kafkas,
            rounds=rounds,
            unit=EACH,
        )
        passing.require_all()
    lines[0].goal, lines[0].reached = ">= 50,000 /s", lines[0].rate >= 50_000
    return lines


def _in_batches(count: int) -> list[pa.Array]:
    return [messages(min(10_000, count - at), 100, at) for at in range(0, count, 10_000)]


class _Passing:
    """A topic with messages, and what takes them from there to another, counting by key."""

    def __init__(self, count: int, base: Path | None) -> None:
        self._count = count
        self._queue = TxnkvQueue(base)
        self.client = self._queue.client
        self._out = self.client.create_topic("out", partitions=1)
        self._state = self.client.create_table("state", _STATE)
        for batch in _in_batches(count):
            self._queue.produce(batch)
        self._subscription = self._queue.topic.subscribe("passer")

    def some(self, count: int, each: int) -> int:
        """Pass so many on, at most `each` in a transaction."""
        done = 0
        while done < count:
            found = self._subscription.receive_many(max_messages=each, timeout=5.0)
            with self.client.transaction() as txn:
                for message in found:
                    txn.upsert(self._state, {"id": message.offset % 1000, "n": done})
                    txn.send(self._out, message.value)
                txn.ack(self._subscription, found)
            done += len(found)
        return done

    def require_all(self) -> None:
        """Refuse a race in which messages were lost or doubled."""
        if sum(self._out.end_offsets().values()) != self._count:
            raise RuntimeError("messages were lost or doubled")

    def close(self) -> None:
        """Give all up."""
        self._subscription.close()
        self._queue.close()
