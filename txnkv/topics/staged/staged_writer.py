"""The sends of one session of a job's attempt: encoded at once, into a staged file of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import pyarrow as pa

from txnkv import core
from txnkv.coordinator import TxnRow
from txnkv.errors import InvalidTxnStateError, StorageFullError, TxnkvError, TxnNotFoundError
from txnkv.storage import declare_fault_point, fault_point
from txnkv.topics.messages import chunking, now_micros
from txnkv.topics.staged import staged_file, staged_rows
from txnkv.topics.staged.staged_rows import StagedFile
from txnkv.topics.staged.staged_sends import StagedSendsFolder
from txnkv.topics.topic_catalog import TopicInfo

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
                staged_rows.count(cur, file, end)
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
            file = staged_rows.register(cur, self._row.txn_id, self._job_id, self._attempt)
        fault_point("staged.registered")
        self._counted = self._end = staged_file.create(staged.path(file), file)
        self._file = file
        return file

    def _extend(self, file: StagedFile, lots: Sequence[tuple[int, Sequence[bytes]]]) -> int:
        path = self._folder.path(file)
        try:
            return staged_file.extend(path, self._end, lots)
        except FileNotFoundError:
            with self._folder.topics.store.status.read() as cur:  # the job's end has removed it
                staged_rows.require_running(cur, file.txn_id, file.job_id)
            raise staged_file.missing(path, file) from None

    def _remove_late(self, file: StagedFile) -> None:
        """Remove the file if a late writer has made it anew after all of the job was removed."""
        with suppress(TxnkvError):
            self._folder.remove_unknown(file)


def _portions(topic: TopicInfo, messages: pa.RecordBatch, txn_id: int) -> list[list[bytes]]:
    portions: list[list[bytes]] = []
    size = FRAME_BYTES
    at = now_micros()
    for part, chunk in chunking.cut(messages, topic.options.max_message_bytes):
        batch = core.encode_batch(
            part,
            timestamp=at,
            txn_id=txn_id,
            decided=topic.buffer == "sidecar",  # as a side log has them
            codec=topic.options.compression,
            chunk=chunk,
        )
        if size + len(batch) > FRAME_BYTES:
            portions.append([])
            size = 0
        portions[-1].append(batch)
        size += len(batch)
    return portions
