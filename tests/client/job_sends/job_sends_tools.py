"""Messages of a job's attempts: staged, read, and what is left of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import txnkv
from tests import internals
from txnkv.topics.write import staged_files
from txnkv.transaction.job import Job

ByHand = Callable[[txnkv.Client], None]


def stage(job: Job, attempt: str, *values: bytes, partition: int = 0) -> None:
    with job.session(attempt) as session:
        for value in values:
            session.send("events", value, partition=partition)


def read(topic: txnkv.Topic, partition: int = 0) -> list[bytes]:
    found: list[bytes] = []
    with topic.consumer(partitions=[partition]) as consumer:
        while some := consumer.poll(timeout=0):
            found += [message.value for message in some if message.value is not None]
    return found


def staged(client: txnkv.Client) -> list[Path]:
    folder = internals.topics(client).staged.folder
    return sorted(folder.iterdir()) if folder.exists() else []


def rows(client: txnkv.Client) -> list[staged_files.StagedFile]:
    with internals.status(client).read() as cur:
        return staged_files.all_files(cur)


class BrokenOff(Exception):
    pass


def break_off() -> None:
    raise BrokenOff


def send(session: txnkv.Session, topic: txnkv.Topic, value: bytes) -> None:
    session.send(topic, value, partition=0)
    session.flush()
