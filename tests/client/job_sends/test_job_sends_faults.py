"""Messages of a job whose commit breaks off, or whose files are damaged; full disks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from tests.client.job_sends.job_sends_tools import (
    BrokenOff,
    break_off,
    read,
    rows,
    send,
    stage,
    staged,
)
from txnkv.storage.faults import arm, disarm
from txnkv.topics.write import staged_files, staged_sends
from txnkv.transaction.job import Job

# -- a commit of the job that breaks off -----------------------------------------------


@pytest.mark.parametrize(
    ("point", "sent"), [("job.ending", False), ("job.appended", True), ("append.", True)]
)
def test_a_job_whose_commit_broke_off_can_only_be_rolled_back(
    point: str, sent: bool, client: txnkv.Client, topic: txnkv.Topic, job: Job
) -> None:
    txn = job.txn
    stage(job, "0", b"never")
    stage(job, "0", b"never", partition=1)
    if point == "append.":
        point = "append.side" if topic.buffer == "sidecar" else "append.written"
    arm(point, break_off)
    with pytest.raises(BrokenOff):
        job.commit(["0"])
    disarm()
    assert sent is (txn.id.local in _participants(client))
    again: list[Callable[[], None]] = [lambda: job.commit(["0"]), lambda: job.commit([]), job.abort]
    for call in again:
        with pytest.raises(txnkv.InvalidTxnStateError, match=r"roll transaction \d+ back"):
            call()
    with pytest.raises(txnkv.InvalidTxnStateError, match="broke off"):
        txn.commit()
    with pytest.raises(txnkv.InvalidTxnStateError, match="ending"):
        stage(job, "1", b"late")
    assert client.check().problems == []
    txn.rollback()
    assert (staged(client), rows(client)) == ([], [])
    assert (read(topic), read(topic, 1)) == ([], [])


def _participants(client: txnkv.Client) -> set[int]:
    with internals.status(client).read() as cur:
        found = cur.execute("SELECT txn_id FROM participants WHERE kind = 'partition'")
        return {id for (id,) in found}


@pytest.mark.parametrize("point", ["job.ending", "append.", "job.appended"])
def test_the_transaction_ends_while_the_job_is_committed(
    point: str, client: txnkv.Client, topic: txnkv.Topic, job: Job
) -> None:
    """Its files are removed before they are read, in the midst of it, or behind it."""
    for number in (0, 1):
        stage(job, "0", b"never", partition=number)
    if point == "append.":
        point = "append.side" if topic.buffer == "sidecar" else "append.written"
    arm(point, lambda: client.abort_transaction(job.txn.id))
    with pytest.raises(txnkv.InvalidTxnStateError, match="not open: ABORT"):
        job.commit(["0"])
    disarm()
    assert (read(topic), read(topic, 1)) == ([], [])
    assert (staged(client), rows(client)) == ([], [])


def test_the_transaction_ended_before_the_job(job: Job) -> None:
    stage(job, "0", b"a")
    job.txn.rollback()
    with pytest.raises(txnkv.InvalidTxnStateError, match="rolled back"):
        job.commit(["0"])


def test_a_topic_that_was_dropped(
    client: txnkv.Client, topic: txnkv.Topic, txn: txnkv.Transaction, job: Job
) -> None:
    kept = client.create_topic("kept")
    stage(job, "0", b"never")
    with job.session("1") as session:
        session.send(kept, b"a")
    client.drop_topic(topic)
    with pytest.raises(txnkv.TopicNotFoundError, match="dropped"):
        job.commit(["0", "1"])
    with pytest.raises(txnkv.TopicNotFoundError):
        stage(job, "2", b"never")
    job.commit(["1"])
    txn.commit()
    assert read(kept) == [b"a"]


# -- damage ----------------------------------------------------------------------------


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def _flip(at: int) -> Callable[[Path], None]:
    def flip(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[at] ^= 1
        file.write_bytes(data)

    return flip


@pytest.mark.parametrize(
    ("damage", "what", "ends"),
    [
        (Path.unlink, "missing", False),
        (_cut, "bytes, of", False),
        (_flip(0), "header", False),
        (_flip(12), "header", False),
        (_flip(staged_files.HEADER_BYTES), "frame at byte 32 is damaged", False),
        (_flip(staged_files.HEADER_BYTES + 10), "frame at byte 32 is damaged", False),
        (
            _flip(staged_files.HEADER_BYTES + staged_files.FRAME_BYTES + 18),
            "frame at byte 32",
            True,
        ),
        (_flip(-1), "frame at byte 32", True),
    ],
)
def test_a_damaged_file_is_told_and_nothing_of_it_counts(
    damage: Callable[[Path], None],
    what: str,
    ends: bool,
    client: txnkv.Client,
    topic: txnkv.Topic,
    job: Job,
) -> None:
    stage(job, "0", b"never", b"never")
    stage(job, "1", b"counts")
    first = staged(client)[0]
    damage(first)
    (problem,) = client.check().problems
    assert str(first) in problem
    assert what in problem
    with pytest.raises(txnkv.CorruptionError, match=what):
        job.commit(["1", "0"])
    txn = job.txn
    if ends:  # only reading the batches has shown it: the job is ENDING
        txn.rollback()
        assert read(topic) == []
    else:
        job.commit(["1"])
        txn.commit()
        assert read(topic) == [b"counts"]
    assert (staged(client), rows(client)) == ([], [])


def test_what_stands_behind_what_counts_is_nothing(
    client: txnkv.Client, topic: txnkv.Topic, txn: txnkv.Transaction, job: Job
) -> None:
    stage(job, "0", b"a")
    with open(staged(client)[0], "ab") as file:
        file.write(b"of a writer that died")
    assert client.check().problems == []
    job.commit(["0"])
    txn.commit()
    assert read(topic) == [b"a"]


def test_a_file_of_another_transaction_is_not_taken(
    client: txnkv.Client, topic: txnkv.Topic, job: Job
) -> None:
    """Its batches are sound, and of the right length."""
    with client.transaction(timeout=None) as other:
        its = Job.start(other)
        stage(its, "0", b"a")
        stage(job, "0", b"b")
        one, two = staged(client)
        data, header = one.read_bytes(), two.read_bytes()[: staged_files.HEADER_BYTES]
        two.write_bytes(header + data[staged_files.HEADER_BYTES :])
        with pytest.raises(txnkv.CorruptionError, match="of transaction"):
            job.commit(["0"])
        its.commit(["0"])
    job.txn.rollback()
    assert read(topic) == [b"a"]


def test_what_was_sent_before_the_machine_was_started_anew_is_not_trusted(
    client: txnkv.Client,
    topic: txnkv.Topic,
    txn: txnkv.Transaction,
    job: Job,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage(job, "0", b"never")
    staged(client)[0].unlink()
    monkeypatch.setattr(staged_files, "boot_id", lambda: "another")
    with pytest.raises(txnkv.CorruptionError, match="started anew"):
        job.commit(["0"])
    job.commit([])
    txn.commit()
    assert read(topic) == []


# -- full disk -------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["batch", "message"])
def test_no_room_to_stage(
    how: str,
    client: txnkv.Client,
    topic: txnkv.Topic,
    txn: txnkv.Transaction,
    job: Job,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing of the send that failed counts, and what was sent before does."""
    write = os.pwritev

    def full(descriptor: int, buffers: Any, at: int) -> int:
        write(descriptor, [buffers[0]], at)
        raise OSError(28, "no space")

    session = job.session("0")
    session.send(topic, b"a", partition=0)
    session.flush()
    size = staged(client)[0].stat().st_size
    monkeypatch.setattr(os, "pwritev", full)
    batch = pa.table({"value": [b"b"], "partition": [0]})
    with pytest.raises(txnkv.StorageFullError):
        session.send_batch(topic, batch) if how == "batch" else send(session, topic, b"b")
    assert staged(client)[0].stat().st_size == size
    with pytest.raises(txnkv.StorageFullError):
        stage(job, "1", b"nothing at all")
    assert len(staged(client)) == 1
    monkeypatch.undo()
    if how == "batch":
        session.send_batch(topic, batch)
    session.close()  # messages that could not be flushed are flushed now
    stage(job, "1", b"c")
    job.commit(["0", "1"])
    txn.commit()
    assert read(topic) == [b"a", b"b", b"c"]


def test_no_room_in_the_log(
    client: txnkv.Client,
    topic: txnkv.Topic,
    txn: txnkv.Transaction,
    job: Job,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage(job, "0", b"never")

    def full(*_: object) -> None:
        raise txnkv.StorageFullError("no room")

    monkeypatch.setattr(staged_sends, "append_runs", full)
    with pytest.raises(txnkv.StorageFullError):
        job.commit(["0"])
    monkeypatch.undo()
    txn.rollback()
    assert read(topic) == []
    assert (staged(client), rows(client)) == ([], [])
