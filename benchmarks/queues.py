"""Those who take messages: txnkv, a table of SQLite, Redis Streams, Kafka, and the bare disk."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import apsw
import pyarrow as pa

import txnkv
from txnkv.topics import Buffer

from .kafka import Broker, KafkaQueue
from .stores import Store


class Queue(Protocol):
    """Takes batches of messages, each durable before the next."""

    name: str

    def empty(self) -> None:
        """Begin with nothing."""

    def produce(self, batch: pa.Array) -> None:
        """Take all of a batch."""

    def count(self) -> int:
        """The messages that are there."""

    def close(self) -> None: ...


class TxnkvQueue(Store):
    """A topic of one partition; each batch is a write of its own."""

    name = "txnkv"

    def __init__(self, base: Path | None = None, buffer: Buffer = "marker") -> None:
        super().__init__(base)
        self._buffer = buffer
        self.client = txnkv.connect(self.path / "store")
        self.empty()

    def empty(self) -> None:
        """Begin with nothing."""
        self.client.drop_topic("t", missing_ok=True)
        self.topic = self.client.create_topic("t", partitions=1, buffer=self._buffer)
        self.session = self.client.new_session()

    def produce(self, batch: pa.Array) -> None:
        """Take all of a batch."""
        self.session.send_batch(self.topic, pa.record_batch({"value": batch}))

    def count(self) -> int:
        """The messages that are there."""
        with self.topic.consumer() as consumer:
            found = 0
            while rows := consumer.poll_batch(max_messages=1 << 20, timeout=0.0).num_rows:
                found += int(rows)
            return found

    def close(self) -> None:
        self.client.close()
        super().close()


class SqliteQueue(Store):
    """A table by rowid, WAL, synchronous FULL."""

    name = "sqlite executemany"

    def __init__(self, base: Path | None = None) -> None:
        super().__init__(base)
        self._db = apsw.Connection(str(self.path / "queue.db"))
        self._db.execute("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL")
        self.empty()

    def empty(self) -> None:
        """Begin with nothing."""
        self._db.execute("DROP TABLE IF EXISTS q")
        self._db.execute("CREATE TABLE q (id INTEGER PRIMARY KEY, value BLOB)")

    def produce(self, batch: pa.Array) -> None:
        """Take all of a batch."""
        values = [(value,) for value in batch.to_pylist()]
        with self._db:
            self._db.executemany("INSERT INTO q (value) VALUES (?)", values)

    def count(self) -> int:
        """The messages that are there."""
        ((found,),) = self._db.execute("SELECT count(*) FROM q")
        return int(found)

    def close(self) -> None:
        self._db.close()
        super().close()


class DiskQueue(Store):
    """The least that a queue has to do: append the bytes to a file, and one fdatasync a batch."""

    name = "the disk, appended and synced"

    def __init__(self, base: Path | None = None) -> None:
        super().__init__(base)
        self._file: int | None = None
        self._count = 0
        self.empty()

    def empty(self) -> None:
        """Begin with nothing."""
        self._drop()
        self._file = os.open(self.path / "disk", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self._count = 0

    def produce(self, batch: pa.Array) -> None:
        """Take all of a batch."""
        assert self._file is not None
        data = batch.buffers()[2]
        assert data is not None
        left = memoryview(data)
        while left:
            left = left[os.write(self._file, left) :]
        os.fdatasync(self._file)
        self._count += len(batch)

    def count(self) -> int:
        """The messages that are there."""
        return self._count

    def close(self) -> None:
        self._drop()
        super().close()

    def _drop(self) -> None:
        if self._file is not None:
            os.close(self._file)


class TwiceSyncedDiskQueue(DiskQueue):
    """With the syncs that txnkv has one after the other: the batch, then what says it is there."""

    name = "the disk, with the same fsyncs"

    def produce(self, batch: pa.Array) -> None:
        """Take all of a batch."""
        super().produce(batch)
        assert self._file is not None
        os.pwrite(self._file, self._count.to_bytes(8, "little"), 0)
        os.fdatasync(self._file)


class RedisQueue(Store):
    """A stream of a server of its own, appendfsync always, commands of a batch in one pipeline."""

    name = "redis stream"

    def __init__(self, base: Path | None = None) -> None:
        super().__init__(base)
        self._folder = tempfile.mkdtemp(prefix="txnkv-redis-")
        where = Path(self._folder) / "socket"  # a short name: there is a limit
        self._server = subprocess.Popen(
            [
                *("redis-server", "--port", "0", "--unixsocket", str(where)),
                *("--dir", str(self.path), "--save", ""),
                *("--appendonly", "yes", "--appendfsync", "always"),
            ],
            stdout=subprocess.DEVNULL,
        )
        self._socket = socket.socket(socket.AF_UNIX)
        for _ in range(200):
            try:
                self._socket.connect(str(where))
                break
            except OSError:
                time.sleep(0.05)
        self._answers = self._socket.makefile("rb")

    def empty(self) -> None:
        """Begin with nothing."""
        self._ask([(b"FLUSHALL",)])

    def produce(self, batch: pa.Array) -> None:
        """Take all of a batch."""
        self._ask([(b"XADD", b"t", b"*", b"v", value) for value in batch.to_pylist()])

    def count(self) -> int:
        """The messages that are there."""
        (answer,) = self._ask([(b"XLEN", b"t")])
        return int(answer[1:])

    def close(self) -> None:
        self._socket.close()
        self._server.terminate()
        self._server.wait()
        shutil.rmtree(self._folder)
        super().close()

    def _ask(self, commands: list[tuple[bytes, ...]]) -> list[bytes]:
        self._socket.sendall(b"".join(map(_command, commands)))
        return [self._answer() for _ in commands]

    def _answer(self) -> bytes:
        line = self._answers.readline().rstrip()
        if line.startswith(b"$"):
            self._answers.read(int(line[1:]) + 2)
        if line.startswith(b"-"):
            raise RuntimeError(line.decode())
        return bytes(line)


def _command(words: tuple[bytes, ...]) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in words)


def queues(base: Path | None, broker: Broker | None = None) -> Iterator[Queue]:
    """All contestants that can be had here, ours first."""
    yield TxnkvQueue(base)
    yield DiskQueue(base)
    yield TwiceSyncedDiskQueue(base)
    yield SqliteQueue(base)
    if shutil.which("redis-server"):
        yield RedisQueue(base)
    if broker is not None:
        yield KafkaQueue(broker, synced=True)
        yield KafkaQueue(broker, synced=False)
