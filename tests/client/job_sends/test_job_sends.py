"""Messages of a job's attempts: only those of the named ones count, all at the job's end."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from tests.client.job_sends.job_sends_tools import (
    BrokenOff,
    ByHand,
    break_off,
    read,
    rows,
    send,
    stage,
    staged,
)
from txnkv import core
from txnkv.storage.faults import arm, disarm
from txnkv.topics.topic_catalog import TopicOptions
from txnkv.topics.write import staged_files, staged_sends
from txnkv.transaction.job import Job

# -- what counts -----------------------------------------------------------------------


def test_only_named_attempts_count(
    client: txnkv.Client, topic: txnkv.Topic, txn: txnkv.Transaction, job: Job
) -> None:
    stage(job, "0.0", b"a", b"b")
    stage(job, "1.0", b"never")
    stage(job, "1.1", b"c", partition=1)
    stage(job, "2.0", b"d")
    assert topic.end_offsets() == {0: 0, 1: 0}
    assert len(staged(client)) == 4
    job.commit(["2.0", "0.0", "1.1"])
    assert (staged(client), rows(client)) == ([], [])
    assert read(topic) == []
    txn.commit()
    assert (read(topic), read(topic, 1)) == ([b"d", b"a", b"b"], [b"c"])


def test_attempts_that_come_first_stand_first_and_each_once(
    topic: txnkv.Topic, txn: txnkv.Transaction, job: Job
) -> None:
    for attempt in ("0", "1", "2"):
        stage(job, attempt, attempt.encode())
    job.commit(["0", "2", "1", "0"], first=["2", "2"])
    txn.commit()
    assert read(topic) == [b"2", b"0", b"1"]


def test_sessions_of_one_attempt_follow_one_another(
    topic: txnkv.Topic, txn: txnkv.Transaction, job: Job
) -> None:
    one, two = job.session("0"), job.session("0")
    one.send(topic, b"a", partition=0)
    one.flush()
    two.send(topic, b"b", partition=0)
    two.flush()
    one.send(topic, b"A", partition=0)
    one.close()
    two.close()
    job.commit(["0"])
    txn.commit()
    assert read(topic) == [b"a", b"A", b"b"]


def test_names_of_attempts_may_be_anything(
    topic: txnkv.Topic, txn: txnkv.Transaction, job: Job
) -> None:
    names = ["", ".", "..", "a/b", "../../etc", "ö\0\n", "x" * 5000]
    for name in names:
        stage(job, name, name.encode())
    job.commit(names)
    txn.commit()
    assert read(topic) == [name.encode() for name in names]


def test_messages_are_whole_whatever_they_are(
    client: txnkv.Client, messages: Any, txn: txnkv.Transaction, job: Job
) -> None:
    """Keys, headers, timestamps, nulls, compression, and one in pieces."""
    options = TopicOptions(compression="zstd", max_message_bytes=1000)
    internals.topics(client).create("packed", 1, "marker", options)
    packed = client.topic("packed")
    when = txnkv.Timestamp.from_micros(5_000_000).datetime
    large = os.urandom(4500)
    with job.session("0") as session:
        session.send(packed, b"a" * 500, key=b"k", headers={"h": b"1"}, timestamp=when)
        session.send(packed, None, key=b"k")
        session.send(packed, large, key=b"large")
    job.commit(["0"])
    txn.commit()
    first, none, last = messages(packed)
    assert (first.value, first.key, first.headers) == (b"a" * 500, b"k", [("h", b"1")])
    assert first.timestamp == when
    assert (none.value, none.key) == (None, b"k")
    assert (last.value, last.key, last.txn_id) == (large, b"large", txn.id)


def test_batches_and_messages_keep_their_order(
    topic: txnkv.Topic, txn: txnkv.Transaction, job: Job
) -> None:
    with job.session("0") as session:
        session.send("events", b"first", partition=1)
        data = pa.table({"value": [b"%d" % i for i in range(1000)], "partition": [1] * 1000})
        assert session.send_batch("events", data).sent == 1000
        session.send("events", b"last", partition=1)
        assert session.flush().sent == 1
    job.commit(["0"])
    txn.commit()
    assert read(topic, 1) == [b"first", *(b"%d" % i for i in range(1000)), b"last"]


def test_many_frames_go_in_several_appends(
    topic: txnkv.Topic, txn: txnkv.Transaction, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_sends, "FRAME_BYTES", 1000)
    monkeypatch.setattr(staged_sends, "APPEND_BYTES", 3000)
    wanted = []
    for attempt in range(4):
        with job.session(str(attempt)) as session:
            for part in range(12):
                values = [b"%d-%d-%d" % (attempt, part, i) for i in range(20)]
                session.send_batch(topic, pa.table({"value": values, "partition": [0, 1] * 10}))
                wanted += values
    job.commit(str(attempt) for attempt in range(4))
    txn.commit()
    assert read(topic) == wanted[::2]
    assert read(topic, 1) == wanted[1::2]


def test_rows_and_messages_come_together(
    topic: txnkv.Topic, table: txnkv.Table, txn: txnkv.Transaction, job: Job
) -> None:
    for attempt in ("0.0", "0.1"):
        with job.session(attempt) as session:
            session.insert(table, (1, attempt))
            session.send(topic, attempt.encode(), partition=0)
            result = session.flush()
            assert (result.inserted, result.sent) == (1, 1)
    job.commit(["0.1"])
    txn.send(topic, b"of the transaction", partition=0)
    txn.commit()
    assert [row["v"] for row in table.scan()] == ["0.1"]
    assert read(topic) == [b"0.1", b"of the transaction"]


# -- what does not ---------------------------------------------------------------------


def test_an_aborted_job_leaves_nothing(
    client: txnkv.Client, topic: txnkv.Topic, txn: txnkv.Transaction, job: Job
) -> None:
    stage(job, "0", b"never")
    job.abort()
    assert (staged(client), rows(client)) == ([], [])
    txn.send(topic, b"of the transaction", partition=0)
    txn.commit()
    assert read(topic) == [b"of the transaction"]


def test_a_rolled_back_transaction_leaves_nothing(
    client: txnkv.Client, topic: txnkv.Topic, txn: txnkv.Transaction, job: Job
) -> None:
    other = Job.start(txn)
    stage(job, "0", b"never")
    stage(other, "0", b"nor that")
    other.commit(["0"])
    assert len(staged(client)) == 1
    txn.rollback()
    assert (staged(client), rows(client)) == ([], [])
    assert read(topic) == []


def test_the_commit_waits_for_the_job(txn: txnkv.Transaction, job: Job) -> None:
    stage(job, "0", b"a")
    with pytest.raises(txnkv.InvalidTxnStateError, match=f"job that still runs: {job.id}"):
        txn.commit()
    assert txn.state is txnkv.TxnState.OPEN
    job.commit([])
    job.commit([])
    txn.commit()


def test_a_session_that_is_left_by_an_error_sends_no_more(
    topic: txnkv.Topic, txn: txnkv.Transaction, job: Job
) -> None:
    session = job.session("0")
    send(session, topic, b"counts")
    session.send(topic, b"was not flushed", partition=0)
    session.__exit__(RuntimeError, RuntimeError(), None)
    job.commit(["0"])
    txn.commit()
    assert read(topic) == [b"counts"]


def test_a_batch_that_fails_on_the_way_counts_for_nothing(
    client: txnkv.Client, topic: txnkv.Topic, txn: txnkv.Transaction, job: Job
) -> None:
    """It comes as a stream, so its first part is staged before the second is looked at."""

    def batches() -> Iterator[pa.RecordBatch]:
        for number in (0, 1, 7):
            yield pa.record_batch({"value": [b"never"], "partition": [number]})

    schema = pa.schema({"value": pa.binary(), "partition": pa.int64()})
    session = job.session("0")
    send(session, topic, b"a")
    with pytest.raises(ValueError, match="no partition 7"):
        session.send_batch(topic, pa.RecordBatchReader.from_batches(schema, batches()))
    send(session, topic, b"b")
    session.close()
    job.commit(["0"])
    txn.commit()
    assert (read(topic), read(topic, 1)) == ([b"a", b"b"], [])


def test_a_flush_that_fails_on_the_way_goes_on_the_next_time(
    client: txnkv.Client,
    topic: txnkv.Topic,
    txn: txnkv.Transaction,
    job: Job,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first of two topics has its messages already; they are there once."""
    other = client.create_topic("other")
    session = job.session("0")
    session.send(topic, b"a", partition=0)
    session.send(other, b"b")
    extend, calls = staged_files.extend, []

    def full(*args: Any) -> int:
        calls.append(args)
        if len(calls) == 2:
            raise txnkv.StorageFullError("no room")
        return extend(*args)

    monkeypatch.setattr(staged_files, "extend", full)
    with pytest.raises(txnkv.StorageFullError):
        session.flush()
    session.close()
    assert len(calls) == 3
    job.commit(["0"])
    txn.commit()
    assert (read(topic), read(other)) == ([b"a"], [b"b"])


# -- too late --------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["commit", "abort", "rollback"])
@pytest.mark.parametrize("begun", [True, False])
def test_who_comes_too_late_is_refused(
    end: str, begun: bool, client: txnkv.Client, topic: txnkv.Topic, job: Job
) -> None:
    session = job.session("0")
    if begun:
        session.send(topic, b"counts", partition=0)
        session.flush()
    _end(job, end)
    with pytest.raises(txnkv.InvalidTxnStateError):
        send(session, topic, b"late")
    with pytest.raises(txnkv.InvalidTxnStateError):
        session.send_batch(topic, pa.table({"value": [b"late"]}))
    if end != "rollback":
        job.txn.commit()
    assert read(topic) == ([b"counts"] if begun and end == "commit" else [])
    assert (staged(client), rows(client)) == ([], [])


@pytest.mark.parametrize("point", ["staged.registered", "staged.written"])
@pytest.mark.parametrize("end", ["commit", "abort", "rollback"])
def test_a_zombie_in_the_midst_of_a_send_leaves_nothing(
    end: str, point: str, client: txnkv.Client, topic: txnkv.Topic, job: Job
) -> None:
    """Everything of the job is removed while the attempt is stopped; then it goes on."""
    stage(job, "1", b"counts")
    arm(point, lambda: _end(job, end))
    with pytest.raises(txnkv.InvalidTxnStateError):
        stage(job, "0", b"late")
    disarm()
    if end != "rollback":
        job.txn.commit()
    assert read(topic) == ([b"counts"] if end == "commit" else [])
    assert (staged(client), rows(client)) == ([], [])


def _end(job: Job, end: str) -> None:
    if end == "commit":
        job.commit(["0", "1"])
    elif end == "abort":
        job.abort()
    else:
        job.txn.rollback()


def test_an_attempt_that_goes_on_while_the_job_is_committed_is_looked_at_again(
    topic: txnkv.Topic, txn: txnkv.Transaction, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the first look at the files and the move of the job."""
    stage(job, "0", b"a")
    lots = staged_sends.StagedLots.__init__

    def look(self: Any, *args: Any) -> None:
        lots(self, *args)
        monkeypatch.setattr(staged_sends.StagedLots, "__init__", lots)
        stage(job, "1", b"b")

    monkeypatch.setattr(staged_sends.StagedLots, "__init__", look)
    job.commit(["0", "1"])
    txn.commit()
    assert read(topic) == [b"a", b"b"]


# -- what is left ----------------------------------------------------------------------


def test_the_leader_removes_what_the_dead_left(
    client: txnkv.Client, topic: txnkv.Topic, txn: txnkv.Transaction, job: Job, by_hand: ByHand
) -> None:
    stage(job, "0", b"a")
    (kept,) = staged(client)
    (kept.parent / "4711").write_bytes(b"of a writer that was stopped")
    other = Job.start(txn)
    stage(other, "0", b"a")
    arm("staged.removed", break_off)
    with pytest.raises(BrokenOff):
        other.abort()
    disarm()
    assert len(rows(client)) == 2
    by_hand(client)
    assert staged(client) == [kept]
    assert len(rows(client)) == 1
    job.commit(["0"])
    txn.commit()
    assert read(topic) == [b"a"]


def test_files_of_an_abandoned_transaction_go_with_it(
    connect: Callable[..., txnkv.Client], topic: txnkv.Topic, by_hand: ByHand, now: Any
) -> None:
    client = connect()
    txn = client.new_transaction(timeout=5.0)
    stage(Job.start(txn), "0", b"never")
    now.forward(60)
    by_hand(client)
    assert txn.state is txnkv.TxnState.ABORTED
    assert (staged(client), rows(client)) == ([], [])


def test_stats_and_check_know_staged_files(
    client: txnkv.Client, topic: txnkv.Topic, txn: txnkv.Transaction, job: Job
) -> None:
    stage(job, "0", b"a")
    stats = client.stats()
    assert stats["staged_files"] == 1
    assert stats["staged_file_bytes"] == staged(client)[0].stat().st_size
    assert client.check().staged_files == 1
    job.commit(["0"])
    stats = client.stats()
    assert (stats["staged_files"], stats["staged_file_bytes"]) == (0, 0)


def test_files_are_their_owners_alone(client: txnkv.Client, job: Job) -> None:
    stage(job, "0", b"a")
    (file,) = staged(client)
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_the_format_of_a_file_is_frozen(
    client: txnkv.Client, topic: txnkv.Topic, txn: txnkv.Transaction, job: Job
) -> None:
    """The format is the one in docs/format-topics.md."""
    stage(job, "0", b"a", b"b", partition=1)
    data = staged(client)[0].read_bytes()
    header = struct.pack("<IQQ", 1, int(staged(client)[0].name), txn.id.local)
    assert data[:32] == b"txnkvsnd" + struct.pack("<I", core.crc32c(header)) + header
    partition = internals.topics(client).get("events").partitions[1]
    frame = struct.pack("<IQQ", 0, partition, len(data) - 56)
    assert data[32:56] == struct.pack("<I", core.crc32c(frame)) + frame
    batch = core.read_header(data, 56)
    assert (batch.length, batch.txn_id, batch.count) == (len(data) - 56, txn.id.local, 2)
    assert batch.is_decided is (topic.buffer == "sidecar")


def test_a_copy_of_the_store_without_its_staged_files_opens(
    client: txnkv.Client, topic: txnkv.Topic, job: Job, tmp_path: Path, now: Any
) -> None:
    """Only the job's attempts are lost, which no copy could go on with."""
    stage(job, "0", b"a")
    internals.status(client).checkpoint()
    source = internals.store(client).directory.path
    shutil.copytree(source, tmp_path / "copy", ignore=shutil.ignore_patterns("staged", "runtime"))
    now.forward(3600)
    with txnkv.connect(tmp_path / "copy") as copy:
        internals.maintenance(copy).round(resume_all=True)
        copy.abort_transaction(job.txn.id)
        assert rows(copy) == []
        assert copy.check().problems == []
