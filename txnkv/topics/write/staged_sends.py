"""Staged sends: the messages of a job's attempts, until the job ends.

A job runs in tasks, a task in attempts, and an attempt may fail, be tried again or run twice. Its
messages count only if the driver names it when it commits the job; so they may not be in a log
before. They wait in staged files (`staged_files`), one for each session of an attempt:

    attempts    3.0  [file 1: P0 a b | P1 c]         RUNNING: they come and go as they like
                3.1  [file 2: P0 a b | P1 c]         the same task again
                4.0  [file 3: P0 d]
    driver      commit(["3.1", "4.0"])               RUNNING -> ENDING: what counts is fixed
                P0:  a b d      P1: c                appended to the logs, attempt by attempt
                                                     ENDING -> COMMITTED, rows of the tables too
                files 1, 2, 3 are removed            and the transaction may commit

So the last stable offset of a log is not held back while a job runs, what an attempt sent in vain
never touches a log, and the late file of one that was thought dead is never read.

A commit of the transaction is refused while a job is RUNNING or ENDING. When the driver dies in
ENDING some of its messages are in the logs, open; the transaction can only abort, and they with
it. Files go when the job ends, or with the abort; what the dead leave is swept by the leader.

    row in status.db, file                  a session began to send
    file, then bytes in the row             each flush, or batch: these count now
    job over, file gone, row gone           in this order
    no row, a file                          of a writer that was stopped in between: garbage

What counts of the accepted attempts is appended as any large transaction's messages are: open,
until the transaction's end markers. In a partition it stands attempt by attempt, and within one as
it was sent. Partitions go side by side.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

import pyarrow as pa

from txnkv import core
from txnkv.coordinator import CommitLog, Lease, Participants, TxnRow
from txnkv.errors import (
    InvalidTxnStateError,
    StorageFullError,
    TopicNotFoundError,
    TxnkvError,
    TxnNotFoundError,
)
from txnkv.storage import boot_id, declare_fault_point, fault_point, new_event, numbers_in
from txnkv.topics.log import gathered
from txnkv.topics.messages import cut_messages, now_micros
from txnkv.topics.topic_catalog import TopicInfo
from txnkv.topics.topics import Partition, Topics
from txnkv.topics.write import staged_files
from txnkv.topics.write.append import append_runs
from txnkv.topics.write.staged_files import KIND, Frame, StagedFile

declare_fault_point("staged.removed", "staged files of a job are gone, status.db still has them")


class StagedSendsFolder:
    """The staged files of a store. Shared by threads.

    Attributes:
        handler: removes those of a transaction that aborts.
    """

    def __init__(self, topics: Topics) -> None:
        self.topics = topics
        self._store = topics.store
        self.folder = topics.store.directory.path / "staged"
        self.handler = StagedParticipants(self, topics.log)

    def path(self, file: StagedFile) -> Path:
        """Return the path where a file is, or would be."""
        return self.folder / str(file.id)

    # -- removing ----------------------------------------------------------------------

    def remove(self, files: Iterable[StagedFile]) -> None:
        """Remove files that nobody will read, then forget them; twice is fine."""
        gone = list(files)
        if not gone:
            return
        for file in gone:
            self.path(file).unlink(missing_ok=True)
        fault_point("staged.removed")
        # Not synced: a row that comes back is of a job that has ended, and is swept.
        with self._store.status.write(sync=False) as cur:
            staged_files.forget(cur, gone)

    def remove_transaction(self, txn_id: int) -> None:
        """Remove all files of a transaction that has ended, or will abort."""
        with self._store.status.read() as cur:
            files = staged_files.of_transaction(cur, txn_id)
        self.remove(files)

    def remove_unknown(self, file: StagedFile) -> None:
        """Remove a file that status.db has forgotten: no other will ever have its id."""
        with self._store.status.read() as cur:
            known = {other.id for other in staged_files.of_transaction(cur, file.txn_id)}
        if file.id not in known:
            self.path(file).unlink(missing_ok=True)

    def sweep(self, lease: Lease) -> None:
        """Remove what dead processes left: garbage stays garbage, so no term is asked for."""
        there = self._names()  # first: a row comes before its file
        with self._store.status.read() as cur:
            known = staged_files.all_files(cur)
            wanted = {file.id for file in staged_files.wanted_files(cur)} if known else set()
        for id in there - {file.id for file in known}:
            (self.folder / str(id)).unlink(missing_ok=True)
        self.remove(file for file in known if file.id not in wanted)

    def _names(self) -> set[int]:
        try:
            return numbers_in(self.folder)
        except FileNotFoundError:
            return set()

    # -- looking -----------------------------------------------------------------------

    def files(self) -> list[StagedFile]:
        """Those that may still come to count."""
        with self._store.status.read() as cur:
            return staged_files.wanted_files(cur)

    def problem(self, file: StagedFile) -> str | None:
        """Read what counts of a file: what is wrong with it.

        Of one from before the machine was started anew something may be missing; no job takes it.
        """
        if not file.bytes or file.boot != boot_id():
            return None
        try:
            for frame in staged_files.frames(self.path(file), file):
                memory = memoryview(bytearray(frame.bytes))
                staged_files.read(self.path(file), file, [frame], memory)
        except TxnkvError as error:
            still = {other.id for other in self.files()}  # else its job ended meanwhile
            return str(error) if file.id in still else None
        return None


class StagedParticipants(Participants):
    """Files of attempts: an abort removes them. A commit finds none, for it is refused while a job
    that may have some has not ended.
    """

    kind = KIND

    def __init__(self, staged: StagedSendsFolder, log: CommitLog) -> None:
        super().__init__(log)
        self._staged = staged

    def finalize_commit(self, row: TxnRow, ids: Sequence[int]) -> None:
        """Remove what a job that was aborted has left."""
        self._staged.remove_transaction(row.txn_id)

    def abort(self, row: TxnRow, ids: Sequence[int]) -> None:
        """Remove all files of the transaction."""
        self._staged.remove_transaction(row.txn_id)


declare_fault_point("staged.registered", "a staged file is noted in status.db, it is not there")
declare_fault_point("staged.written", "batches are in a staged file, they do not count yet")
declare_fault_point("staged.counted", "batches of a staged file count")

FRAME_BYTES: Final = 8 << 20
"""A frame is at most so long, if a batch is not longer."""


class StagedSends:
    """The messages of one session of an attempt. Not for two threads at a time.

    Args:
        folder: of the staged files.
        row: of the transaction, whose OPEN row is stored.
        job_id: of the job.
        attempt: as row sets name it: job and attempt.
    """

    def __init__(self, folder: StagedSendsFolder, row: TxnRow, job_id: str, attempt: str) -> None:
        self._folder = folder
        self._row = row
        self._job_id = job_id
        self._attempt = attempt
        self._file: StagedFile | None = None
        self._counted = self._end = 0
        self._broken: TxnkvError | None = None

    def send(self, topic: TopicInfo, parts: Sequence[tuple[int, pa.RecordBatch]]) -> None:
        """Stage messages for partitions of a topic; they count from the next `settle` on.

        After an error nothing is staged that did not count before.

        Args:
            topic: to which.
            parts: by number of the partition, as `core.encode_batch` takes them.

        Raises:
            TopicNotFoundError: the topic was dropped.
            InvalidTxnStateError: the transaction is not open, or the job has ended.
            StorageFullError: no room.
            UnavailableError: the disk failed.
        """
        if self._broken is not None:
            raise self._broken
        try:
            self._folder.topics.require_writable(topic)
            lots = [
                (topic.partitions[number], batches)
                for number, messages in parts
                for batches in _portions(topic, messages, self._row.txn_id)
            ]
            if lots:
                self._end = self._extend(self._file or self._begin(), lots)
                fault_point("staged.written")
        except BaseException:
            self.take_back()
            raise

    def take_back(self) -> None:
        """Drop what does not count yet: it never will."""
        self._end = self._counted

    def settle(self) -> None:
        """From now on all counts that was sent.

        Raises:
            InvalidTxnStateError: the transaction is not open, or the job has ended.
            StorageFullError: no room; what did not count before never will.
            UnavailableError: the disk failed. The attempt cannot send any more.
        """
        file, end = self._file, self._end
        if file is None or end == self._counted:
            return
        try:
            with self._folder.topics.store.status.write(sync=False) as cur:
                staged_files.count_upto(cur, file, end)
        except StorageFullError:
            self.take_back()
            raise
        except (InvalidTxnStateError, TxnNotFoundError) as error:
            self._broken = error
            self._remove_late(file)
            raise
        except TxnkvError as error:  # it counts or not, and nobody knows
            self._broken = error
            raise
        self._counted = end
        fault_point("staged.counted")

    def _begin(self) -> StagedFile:
        staged, status = self._folder, self._folder.topics.store.status
        # Durable, other than the file: after a power loss it says what is missing.
        with status.write() as cur:
            file = staged_files.register(cur, self._row.txn_id, self._job_id, self._attempt)
        fault_point("staged.registered")
        self._counted = self._end = staged_files.create(staged.path(file), file)
        self._file = file
        return file

    def _extend(self, file: StagedFile, lots: Sequence[tuple[int, Sequence[bytes]]]) -> int:
        path = self._folder.path(file)
        try:
            return staged_files.extend(path, self._end, lots)
        except FileNotFoundError:
            with self._folder.topics.store.status.read() as cur:  # the job's end has removed it
                staged_files.require_running(cur, file.txn_id, file.job_id)
            raise staged_files.missing(path, file) from None

    def _remove_late(self, file: StagedFile) -> None:
        """Remove the file if a late writer has made it anew after all of the job was removed."""
        with suppress(TxnkvError):
            self._folder.remove_unknown(file)


def _portions(topic: TopicInfo, messages: pa.RecordBatch, txn_id: int) -> list[list[bytes]]:
    at = now_micros()
    batches = (
        core.encode_batch(
            part,
            timestamp=at,
            txn_id=txn_id,
            decided=topic.buffer == "sidecar",  # as a side log has them
            codec=topic.options.compression,
            chunk=chunk,
        )
        for part, chunk in cut_messages(messages, topic.options.max_message_bytes)
    )
    return list(gathered(batches, FRAME_BYTES))


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
            staged_files.require_boot(file)
            found: dict[int, list[Frame]] = {}
            for frame in staged_files.frames(folder.path(file), file):
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
            runs += staged_files.read(path, file, frames, memory[:size])
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
