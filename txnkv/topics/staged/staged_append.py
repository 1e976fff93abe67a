"""From staged files into the logs, when a job is committed.

What counts of the accepted attempts is appended as any large transaction's messages are: open,
until the transaction's end markers. In a partition it stands attempt by attempt, and within one as
it was sent. Partitions go side by side.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from txnkv.coordinator import TxnRow
from txnkv.errors import TopicNotFoundError
from txnkv.storage import new_event
from txnkv.topics.partition import Partition
from txnkv.topics.staged import staged_file
from txnkv.topics.staged.staged_file import Frame
from txnkv.topics.staged.staged_rows import StagedFile
from txnkv.topics.staged.staged_sends import StagedSendsFolder
from txnkv.topics.write import append_runs

APPEND_BYTES: Final = 16 << 20
"""Bytes that are appended to a log at once, about."""

_THREADS: Final = 4

Wanted = list[tuple[StagedFile, list[Frame]]]
"""The frames of one partition, in the order in which they are appended."""


class StagedLots:
    """The frames to be appended, by partition. No batch is read before `append`.

    Args:
        folder: of the staged files.
        files: in the order in which they count.

    Raises:
        CorruptionError: a file is missing, too short or damaged, or was lost with a boot.
        TopicNotFoundError: a topic was dropped.
    """

    def __init__(self, folder: StagedSendsFolder, files: Sequence[StagedFile]) -> None:
        self.files = list(files)
        self._folder = folder
        self._wanted: dict[int, Wanted] = {}
        for file in files:
            staged_file.require_boot(file)
            found: dict[int, list[Frame]] = {}
            for frame in staged_file.frames(folder.path(file), file):
                found.setdefault(frame.partition_id, []).append(frame)
            for id, frames in found.items():
                self._wanted.setdefault(id, []).append((file, frames))
        self._partitions = [self._partition(id) for id in self._wanted]

    def _partition(self, id: int) -> Partition:
        partition = self._folder.topics.partition(id)
        if partition is None:
            raise TopicNotFoundError(
                f"an attempt of the job has sent to a topic (partition {id}) that was dropped "
                "since: commit the job without that attempt, or roll the transaction back"
            )
        self._folder.topics.require_writable(partition.topic)
        return partition

    def append(self, row: TxnRow) -> None:
        """Append all of it for a transaction.

        Raises:
            CorruptionError: a file is damaged.
            InvalidTxnStateError: the transaction is not OPEN.
            TopicNotFoundError: a topic was dropped.
            StorageFullError: the disk is full.

        After an error some of it is in the logs: the transaction must not commit.
        """
        stop = new_event()

        def append_to(partition: Partition) -> None:
            try:
                self._append_to(row, partition, stop)
            except BaseException:
                stop.set()
                raise

        if len(self._partitions) < 2:
            for partition in self._partitions:
                append_to(partition)
            return
        with ThreadPoolExecutor(min(_THREADS, len(self._partitions)), "txnkv-append") as pool:
            try:
                for _ in pool.map(append_to, self._partitions):
                    pass
            finally:
                stop.set()

    def _append_to(self, row: TxnRow, partition: Partition, stop: threading.Event) -> None:
        memory = bytearray()  # of all groups: new memory for each would cost as much as reading
        for group in _grouped(self._wanted[partition.id]):
            if stop.is_set():
                return
            size = sum(frame.bytes for _, frames in group for frame in frames)
            if size > len(memory):
                memory = bytearray(size)
            append_runs(self._folder.topics, row, partition, self._read(group, memoryview(memory)))

    def _read(self, group: Wanted, memory: memoryview) -> list[tuple[memoryview, int]]:
        runs = []
        for file, frames in group:
            size = sum(frame.bytes for frame in frames)
            path = self._folder.path(file)
            runs += staged_file.read(path, file, frames, memory[:size])
            memory = memory[size:]
        return runs


def _grouped(wanted: Wanted) -> Iterator[Wanted]:
    """The same in groups of about `APPEND_BYTES`."""
    group: Wanted = []
    size = 0
    for file, frames in wanted:
        some: list[Frame] = []
        for frame in frames:
            if size and size + frame.bytes > APPEND_BYTES:
                yield [*group, (file, some)] if some else group
                group, some, size = [], [], 0
            some.append(frame)
            size += frame.bytes
        if some:
            group.append((file, some))
    if group:
        yield group
