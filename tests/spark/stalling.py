"""Format `stalling`: format txnkv, of which some task attempts hang, fail, or come too late.

What they do is told by files of the folder in the environment's TXNKV_TEST_STALL:

    stop        the next attempt that has rows takes the file away, stages half of its rows and
                stops its process. When that goes on: the other half, and file `outcome`.
    slow        the first attempt of task 0 waits until another one has staged; the first of
                task 1 fails when it has staged. File `staged-<task>-<attempt>` for each that has.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyspark import TaskContext

from txnkv.spark.source import TxnkvDataSource
from txnkv.spark.streams.stream_writer import StreamWriter
from txnkv.transaction import instance

FOLDER: Final = "TXNKV_TEST_STALL"
_WAIT: Final = 120.0


class Stalling(TxnkvDataSource):
    """The format."""

    @classmethod
    def name(cls) -> str:
        """For Spark."""
        return "stalling"

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:  # noqa: N802
        """The sink of streams."""
        made = super().streamWriter(schema, overwrite)
        made.__class__ = StallingWriter  # type: ignore[assignment]
        return made


class StallingWriter(StreamWriter):
    """The sink; of batches that have rows."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Any:
        """One attempt."""
        folder = Path(os.environ[FOLDER])
        batches = [batch for batch in iterator if batch.num_rows]
        if batches and _take(folder / "stop"):
            return self._late(folder, batches)
        if batches and (folder / "slow").exists():
            return self._slow(folder, batches)
        return super().write(iter(batches))

    def _late(self, folder: Path, batches: list[pa.RecordBatch]) -> Any:
        # Whoever ends Spark's workers does it by signals, which a stopped process gets later. And
        # of a group whose parent dies the kernel wakes those that are stopped.
        os.setsid()
        for each in (signal.SIGHUP, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        try:
            done = super().write(_halves(folder, batches))
            (folder / "outcome").write_text("staged")
        except BaseException as error:
            (folder / "outcome").write_text(f"{type(error).__name__}: {error}")
            raise
        return done

    def _slow(self, folder: Path, batches: list[pa.RecordBatch]) -> Any:
        task = TaskContext.get()
        assert task is not None
        number, attempt = task.partitionId(), task.attemptNumber()
        if number == 0 and attempt == 0:
            until = time.monotonic() + _WAIT
            while not list(folder.glob("staged-0-*")) and time.monotonic() < until:
                time.sleep(0.05)
        done = super().write(iter(batches))
        (folder / f"staged-{number}-{attempt}").touch()
        if number == 1 and attempt == 0:
            raise RuntimeError("this attempt fails when it has staged")
        return done


def _halves(folder: Path, batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    half = -(-batches[0].num_rows // 2)
    yield batches[0].slice(0, half)
    part = folder / "pid.part"
    part.write_text(str(os.getpid()))
    part.rename(folder / "pid")
    _stop()
    yield batches[0].slice(half)
    yield from batches[1:]


def _take(path: Path) -> bool:
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def _stop() -> None:
    """Stop like SIGSTOP, but never while a thread of the process holds what all others wait for."""
    turns = [each.store.status._queue._lock for each in instance._instances.values()]
    held = [turn for turn in turns if turn.acquire(timeout=5)]
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    for turn in held:
        turn.release()
