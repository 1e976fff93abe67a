"""Messages from the attempts of a job's tasks to the committer, and which attempts count."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage

from txnkv.errors import InvalidTxnStateError
from txnkv.transaction import WriteResult


@dataclass
class Written(WriterCommitMessage):
    """The message from a task attempt to the committer.

    Attributes:
        partition: the task's partition; None outside of a task.
        attempt: the attempt's name in its job.
        inserted, updated, deleted, ignored: rows.
        sent: messages.
    """

    partition: int | None
    attempt: str
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    ignored: int = 0
    sent: int = 0

    def count(self, result: WriteResult) -> None:
        """Add the numbers of what was staged."""
        self.inserted += result.inserted
        self.updated += result.updated
        self.deleted += result.deleted
        self.ignored += result.ignored
        self.sent += result.sent


def attempt_of_task() -> tuple[int | None, str]:
    """The partition of the task that runs here, and a name that no other attempt ever has."""
    task = TaskContext.get()
    number = "0" if task is None else f"{task.partitionId()}.{task.attemptNumber()}"
    return None if task is None else task.partitionId(), f"{number}.{uuid.uuid4().hex[:12]}"


def one_each(messages: Sequence[WriterCommitMessage | None]) -> list[str]:
    """The attempts that count, one for each partition, in the order of the messages.

    Raises:
        InvalidTxnStateError: a task has no message, so what it wrote is missing.
    """
    chosen: dict[int | str, str] = {}
    for message in messages:
        if not isinstance(message, Written):
            raise InvalidTxnStateError(
                f"cannot commit the write: a task answered {message!r} in place of what it wrote"
            )
        key = message.attempt if message.partition is None else message.partition
        chosen.setdefault(key, message.attempt)
    return list(chosen.values())


def again(first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """All of them, where the first was taken to look at it."""
    yield first
    yield from rest
