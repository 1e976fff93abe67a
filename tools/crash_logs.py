"""A partition's log under the crash driver: one scenario, and what must be true after a death.

The child does a fixed row of operations on a bare log, each in one LMDB transaction, and says
after each how many are done. After a death the log is as after that many, or one more: never
between two. From there the rest of the row gives the very log that was never killed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from txnkv import core
from txnkv.core import ControlType
from txnkv.storage import Environments, StoreDirectory
from txnkv.topics.log.log_check import problems
from txnkv.topics.log.log_writer import LogOptions
from txnkv.topics.log.partition_log import PartitionLog

OPTIONS: Final = LogOptions(segment_bytes=1200, snapshot_changes=3, snapshot_seconds=1e9)
_NAME: Final = "logs/bare"
_TIME: Final = 1_000_000

Operation = Callable[[PartitionLog, Any], object]


def change(path: str, say: Callable[..., None]) -> None:
    """Put, roll, truncate and trim a log, step by step."""
    with _Bare(Path(path)) as bare:
        for number, operation in enumerate(operations(), 1):
            bare.do(operation)
            say("done", number)


def examine(path: Path, said: Sequence[str]) -> list[str]:
    """List what is wrong with the log of a child that died in `change`."""
    done = int(said[-1].split()[1]) if said else 0
    expected = _seen_after_each()
    with _Bare(path) as bare:
        found = bare.problems()
        seen = bare.seen()
        if seen not in expected[done : done + 2]:
            return [*found, f"after {done} operations the log is {seen}"]
        for operation in operations()[expected.index(seen, done) :]:
            bare.do(operation)
        if bare.seen() != expected[-1]:
            found.append(f"gone on after {done} operations the log is {bare.seen()}")
        return found + bare.problems()


def operations() -> list[Operation]:
    """The row of operations; the same each time."""
    commit, abort = ControlType.COMMIT, ControlType.ABORT
    puts = [
        [_data(1), _data(1), _data(2), _marker(commit, 1), _data(2), _marker(abort, 2)],
        [_data(3), _data(4), _data(0, 5)],
        [_marker(abort, 3), _data(5), _marker(commit, 5), _data(6), _data(4)],
        [_data(9, 3, decided=True)] * 4,
        [_marker(commit, 4, mark=6), _data(3), _marker(abort, 6)],
    ]
    row: list[Operation] = [partial(_put, batches=batches) for batches in puts]
    row.append(lambda log, txn: log.roll(txn))
    row += [partial(_put, batches=puts[1]), partial(_put, batches=puts[2])]
    row.append(lambda log, txn: log.truncate(txn, log.end(txn) - 3))
    row.append(lambda log, txn: log.advance_start(txn, log.end(txn) // 2))
    row.append(partial(_put, batches=puts[3]))
    row.append(lambda log, txn: log.truncate(txn, log.start(txn) + 4))
    row += [partial(_put, batches=puts[0]), partial(_put, batches=puts[4])]
    row.append(lambda log, txn: log.advance_start(txn, log.end(txn)))
    row.append(partial(_put, batches=puts[2]))
    row.append(lambda log, txn: log.advance_start(txn, log.end(txn) + 10))
    row.append(partial(_put, batches=puts[0]))
    return row


def _data(txn: int, n: int = 2, *, decided: bool = False) -> bytes:
    rows = pa.record_batch({"value": pa.array([b"a message"] * n, pa.binary())})
    return core.encode_batch(rows, timestamp=_TIME, txn_id=txn, decided=decided)


def _marker(kind: ControlType, txn: int, *, mark: int = 0) -> bytes:
    return core.encode_control(kind, txn_id=txn, timestamp=_TIME, low_water_mark=mark)


def _put(log: PartitionLog, txn: Any, batches: Sequence[bytes]) -> None:
    log.put(txn, [core.place(b"".join(batches), log.end(txn))])


class _Bare:
    """A log without an engine, in a folder of its own below the store."""

    def __init__(self, path: Path) -> None:
        self._environments = Environments(StoreDirectory.open(path / "bare"))
        self._environment = self._environments.get(_NAME, create=True)
        self._log = PartitionLog(self._environment, OPTIONS)
        self._log.prepare()

    def __enter__(self) -> _Bare:
        return self

    def __exit__(self, *_: object) -> None:
        self._environments.close_all()

    def do(self, operation: Operation) -> None:
        self._environment.write(lambda txn: operation(self._log, txn))

    def seen(self) -> tuple[object, ...]:
        """All that a reader can see."""
        log = self._log
        with self._environment.read() as txn:
            start, end = log.start(txn), log.end(txn)
            segments = log.segments(txn)
            return (
                start, end, log.last_stable_offset(txn), log.low_water_mark(txn), segments,
                log.open_transactions(txn), log.commits(txn, 0, 1000),
                [log.aborted_index(txn, segment.base).hex() for segment in segments],
                core.crc32c(b"".join(log.read(txn, start, 1 << 30))),
            )  # fmt: skip

    def problems(self) -> list[str]:
        with self._environment.read() as txn:
            return list(problems(self._log, txn))


@cache
def _seen_after_each() -> list[tuple[object, ...]]:
    with tempfile.TemporaryDirectory() as folder, _Bare(Path(folder)) as bare:
        seen = [bare.seen()]
        for operation in operations():
            bare.do(operation)
            seen.append(bare.seen())
    return seen
