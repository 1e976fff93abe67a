"""Topics: what is produced, fetched and passed on a second."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pyarrow as pa

import txnkv
from txnkv import core

from .harness import EACH, MICROSECONDS, Contestant, Line, race
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


def produce(total_bytes: int, rounds: int, base: Path | None) -> list[Line]:
    """Batches of a MiB, each durable before the next, of small and of larger messages.

    Args:
        total_bytes: a round.
        rounds: counted rounds.
        base: where the stores are made.
    """
    lines: list[Line] = []
    for size in (100, 1024):
        each = min(BATCH_BYTES, total_bytes) // size
        batches = [messages(each, size, seed) for seed in range(max(total_bytes // BATCH_BYTES, 1))]
        with ExitStack() as stack:
            there = [stack.enter_context(closing(queue)) for queue in queues(base)]
            ours, *peers = [_producer(queue, batches) for queue in there]
            lines += race(
                f"produce, messages of {size} bytes, batches of 1 MiB",
                ours,
                peers,
                rounds=rounds,
                ratios={"the disk, appended and synced": 0.5},
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


def fetch(total_bytes: int, rounds: int, base: Path | None) -> list[Line]:
    """Raw batches from memory, all of them, and those of committed transactions, of which one in
    a hundred was aborted. A row is a byte.
    """
    each = 64 << 10
    with closing(TxnkvQueue(base)) as queue:
        batch = pa.record_batch({"value": messages(each // 1024, 1024)})
        for number in range(max(total_bytes // each, 100)):
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
        lines = race(
            "fetch, bytes",
            Contestant("txnkv, read_committed, 1% aborted", committed),
            [Contestant("txnkv, read_uncommitted", all_there_is)],
            rounds=rounds,
            ratios={"txnkv, read_uncommitted": 0.9},
        )
        lines[0].goal, lines[0].reached = ">= 2000 M/s", lines[0].rate >= 2e9
    return lines


def pass_on(count: int, rounds: int, base: Path | None) -> list[Line]:
    """Consume, upsert state, produce and acknowledge in one transaction.

    Args:
        count: transactions a round.
        rounds: counted rounds.
        base: where the stores are made.
    """
    return [*_one_by_one(count, rounds, base), *_in_hundreds(count, rounds, base)]


def _one_by_one(count: int, rounds: int, base: Path | None) -> list[Line]:
    with closing(_Passing(count * (rounds + 1), base)) as passing:
        rows = passing.client.create_table("rows", _STATE)

        def alone() -> int:
            for number in range(count):
                with passing.client.transaction() as txn:
                    txn.upsert(rows, {"id": number % 1000, "n": number})
            return count

        lines = race(
            "consume, upsert, produce, acknowledge: a message each",
            Contestant("txnkv", lambda: passing.some(count, 1)),
            [Contestant("txnkv, a row alone", alone)],
            rounds=rounds,
            ratios={"txnkv, a row alone": 1 / 1.5},
            unit=MICROSECONDS,
        )
        passing.require_all()
    return lines


def _in_hundreds(count: int, rounds: int, base: Path | None) -> list[Line]:
    with closing(_Passing(count * 100 * (rounds + 1), base)) as passing:
        (line,) = race(
            "consume, upsert, produce, acknowledge: 100 messages each",
            Contestant("txnkv", lambda: passing.some(count * 100, 100)),
            [],
            rounds=rounds,
            unit=EACH,
        )
        passing.require_all()
    line.goal, line.reached = ">= 50,000 /s", line.rate >= 50_000
    return [line]


class _Passing:
    """A topic with messages, and what takes them from there to another, counting by key."""

    def __init__(self, count: int, base: Path | None) -> None:
        self._count = count
        self._queue = TxnkvQueue(base)
        self.client = self._queue.client
        self._out = self.client.create_topic("out", partitions=1)
        self._state = self.client.create_table("state", _STATE)
        for first in range(0, count, 10_000):
            self._queue.produce(messages(min(10_000, count - first), 100, first))
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
