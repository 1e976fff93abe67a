"""The cost of a long log: aborted transactions before a fetch, opening, an open transaction."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pyarrow as pa

import txnkv
from txnkv import core
from txnkv.core import ControlType
from txnkv.topics.topics import Partition
from txnkv.topics.write import roll_forward

from .harness import Line
from .latency import Operation, race_each
from .queues import TxnkvQueue
from .svg import Series, chart
from .topics import messages

FLAT = 1.5
_EACH = 100
_CHUNK = 1000
_FETCH = 64 << 10


def aborted(sizes: list[int], rounds: int, base: Path | None) -> list[Line]:
    """A fetch of committed messages behind so many aborted transactions.

    Args:
        sizes: of aborted transactions, ascending.
        rounds: counted rounds.
        base: where the stores are made.
    """
    lines: list[Line] = []
    with closing(TxnkvQueue(base)) as queue:
        there = 0
        for size in sizes:
            last = _fill(queue, range(there, size), ControlType.ABORT, each=1)
            there = size

            def fetch(_: int, last: int = last) -> None:
                found = queue.topic.fetch(0, last, _FETCH)
                assert found.aborted is not None
                assert found.records

            lines += race_each(
                f"fetch behind {size:,} aborted transactions",
                [Operation("txnkv", fetch, lambda _: range(200))],
                rounds=rounds,
            )
    _judge(lines)
    return lines


def opening(transactions: int, rounds: int, base: Path | None) -> list[Line]:
    """Opening a store, and reading the last message of a partition with 100 messages for each of
    so many transactions.
    """
    with closing(TxnkvQueue(base)) as queue:
        _fill(queue, range(transactions), ControlType.COMMIT, each=_EACH)
        with queue.client.transaction() as txn:
            txn.send(queue.topic, b"last")
        last = queue.topic.end_offsets()[0] - 1
        path = queue.client.path
        queue.client.close()

        def open_and_read(_: int) -> None:
            with (
                txnkv.connect(path) as client,
                client.topic("t").consumer(start={0: last}) as consumer,
            ):
                (message,) = consumer.poll(timeout=5.0)
                assert message.value == b"last"

        lines = race_each(
            f"open, {transactions * _EACH:,} messages, {transactions:,} transactions",
            [Operation("txnkv", open_and_read, lambda _: range(3))],
            rounds=rounds,
        )
    lines[0].goal, lines[0].reached = "under 1 s", lines[0].rate > 1
    return lines


def open_transaction(sizes: list[int], base: Path | None, plots: Path | None) -> list[Line]:
    """Memory while one transaction stays open and others send and are read, message by message.

    Args:
        sizes: messages that were sent meanwhile, ascending.
        base: where the stores are made.
        plots: a directory for `open-transaction.svg`; None for none.
    """
    process = psutil.Process()
    points: list[tuple[float, float]] = []
    lines: list[Line] = []
    with closing(TxnkvQueue(base)) as queue:
        slow = queue.client.new_transaction(timeout=None)
        slow.serialize()
        slow.send_batch(queue.topic, pa.table({"value": [b"slow"]}))
        there, next_id = 0, 1 << 20
        offset = 0
        for size in sizes:
            count = max((size - there) // _EACH, 1)
            _fill(queue, range(next_id, next_id + count), ControlType.COMMIT, each=_EACH)
            next_id += count
            there = size
            while True:
                found = queue.topic.fetch(0, offset, 4 << 20, "read_uncommitted")
                if not found.records:
                    break
                offset = core.all_data(found.records, offset, found.high_watermark).next_offset
            if queue.topic.last_stable_offsets()[0] != 0:
                raise RuntimeError("the open transaction does not hold the last stable offset")
            used = _anonymous(process)
            points.append((size, used / 1e6))
            lines.append(
                Line(f"one open transaction, {size:,} messages behind it", "txnkv", 0.0, (0.0, 0.0))
            )
            lines[-1].extra["memory of the process alone"] = f"{used / 1e6:,.0f} MB"
        slow.rollback()
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)
        title = "memory of a reader while one transaction stays open"
        (plots / "open-transaction.svg").write_text(
            chart(title, "messages behind it", "MB", [Series("txnkv", points)])
        )
    return lines


def _anonymous(process: psutil.Process) -> int:
    """Bytes without the pages of the log that are mapped, which are the system's page cache."""
    if sys.platform != "linux":
        return int(process.memory_full_info().uss)
    return sum(each.anonymous for each in process.memory_maps())


def _fill(queue: TxnkvQueue, ids: range, end: ControlType, *, each: int) -> int:
    """Write transactions into the log as the engine would, without its commits. Answers the
    offset of the last marker.
    """
    engine = queue.client.instance.topics
    (partition,) = engine.partitions(queue.topic.info)
    at = roll_forward.complete(engine, partition)
    values = pa.record_batch({"value": messages(each, 100)})
    made: list[bytes] = []
    for batch in _transactions(ids, end, values):
        made.append(core.place(batch, at, 1 if end is ControlType.COMMIT else 0))
        at += core.read_header(batch).count
        if len(made) >= _CHUNK:
            _put(partition, made)
            made = []
    if made:
        _put(partition, made)
    with engine.store.status.write() as cur:
        cur.execute("UPDATE partitions SET next_offset = ? WHERE id = ?", (at, partition.id))
    return at - 1


def _transactions(ids: range, end: ControlType, values: pa.RecordBatch) -> Iterator[bytes]:
    for txn_id in ids:
        yield core.encode_batch(values, timestamp=1, txn_id=txn_id + 1)
        yield core.encode_control(end, txn_id=txn_id + 1, timestamp=1)


def _put(partition: Partition, batches: list[bytes]) -> None:
    partition.environment.write(lambda txn: partition.log.put(txn, batches))


def _judge(lines: list[Line]) -> None:
    dearer = lines[0].rate / lines[-1].rate
    lines[-1].goal, lines[-1].reached = f"time <= {FLAT:g}x of the first", dearer <= FLAT
    lines[-1].extra["time over that of the first"] = f"{dearer:.2f}"
