"""Messages of a job's attempts: only those of the named ones count, all at the job's end."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pytest

import txnkv
from txnkv.job import Job


@pytest.fixture(params=["marker", "sidecar"])
def topic(request: pytest.FixtureRequest, client: txnkv.Client) -> txnkv.Topic:
    return client.create_topic("events", partitions=2, buffer=request.param)


@pytest.fixture
def txn(client: txnkv.Client, topic: txnkv.Topic) -> txnkv.Transaction:
    return client.new_transaction(timeout=None)


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


def staged(client: txnkv.Client) -> list[str]:
    folder = client.instance.topics.staged.folder
    return sorted(file.name for file in folder.iterdir()) if folder.exists() else []


def test_only_named_attempts_count(
    client: txnkv.Client, topic: txnkv.Topic, txn: txnkv.Transaction
) -> None:
    job = Job.start(txn)
    stage(job, "0.0", b"a", b"b")
    stage(job, "1.0", b"never")
    stage(job, "1.1", b"c", partition=1)
    stage(job, "2.0", b"d")
    assert topic.end_offsets() == {0: 0, 1: 0}
    assert len(staged(client)) == 4
    assert client.check().ok
    job.commit(["2.0", "0.0", "1.1"])
    assert staged(client) == []
    assert read(topic) == []
    txn.commit()
    assert (read(topic), read(topic, 1)) == ([b"d", b"a", b"b"], [b"c"])
    assert client.check().ok


def test_an_attempt_sends_batches_too(topic: txnkv.Topic, txn: txnkv.Transaction) -> None:
    job = Job.start(txn)
    with job.session("0") as session:
        session.send("events", b"first", partition=1)
        data = pa.table({"value": [b"%d" % i for i in range(1000)], "partition": [1] * 1000})
        assert session.send_batch("events", data).sent == 1000
        session.send("events", b"last", partition=1)
        assert session.flush().sent == 1
    job.commit(["0"])
    txn.commit()
    wanted = [b"first", *(b"%d" % i for i in range(1000)), b"last"]
    assert read(topic, 1) == wanted


def test_an_aborted_job_leaves_nothing(
    client: txnkv.Client, topic: txnkv.Topic, txn: txnkv.Transaction
) -> None:
    job = Job.start(txn)
    stage(job, "0", b"never")
    job.abort()
    assert staged(client) == []
    txn.send(topic, b"of the transaction", partition=0)
    txn.commit()
    assert read(topic) == [b"of the transaction"]


def test_a_rolled_back_transaction_leaves_nothing(
    client: txnkv.Client, topic: txnkv.Topic, txn: txnkv.Transaction
) -> None:
    job, other = Job.start(txn), Job.start(txn)
    stage(job, "0", b"never")
    stage(other, "0", b"nor that")
    other.commit(["0"])
    txn.rollback()
    assert staged(client) == []
    assert read(topic) == []
    assert client.check().ok
