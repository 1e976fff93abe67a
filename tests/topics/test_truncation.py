"""Truncation as the engine does it: log, index, state, next offset, tail, producers."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from tools.topic_contents import raw, stored, values
from tools.topic_writing import Writer
from txnkv.errors import InvalidTxnStateError, OffsetOutOfRangeError, OutOfOrderSequenceError
from txnkv.storage import arm, disarm
from txnkv.topics.log.log_check import problems
from txnkv.topics.topic_catalog import TopicOptions
from txnkv.topics.write import roll_forward
from txnkv.topics.write.producer_sender import Sender
from txnkv.topics.write.roll_forward import truncate

TOPIC = "events"


@pytest.fixture
def to(client: txnkv.Client) -> Writer:
    return Writer(client, TOPIC, options=TopicOptions(segment_bytes=2000))


def state(to: Writer) -> tuple[int, int, int, int]:
    """Start, end, last stable offset of the log; the next offset."""
    partition = to.partitions[0]
    with partition.environment.read() as txn:
        log = partition.log
        found = (log.start(txn), log.end(txn), log.last_stable_offset(txn))
        assert list(problems(log, txn)) == []
    return (*found, to.engine.look(partition.id).next_offset)


def texts(to: Writer) -> list[str]:
    return [(value or b"").decode() for value in values(to.client, TOPIC)]


@pytest.mark.parametrize("keep", [0, 1, 7, 19, 20])
def test_what_is_behind_goes_and_the_offsets_are_given_again(keep: int, to: Writer) -> None:
    for i in range(20):
        to.small(f"old {i}")
    assert to.truncate(keep) == keep
    assert state(to) == (0, keep, keep, keep)
    to.small("new")
    assert texts(to) == [*(f"old {i}" for i in range(keep)), "new"]
    assert [each.offset for each in stored(to.client, TOPIC)] == list(range(keep + 1))


def test_messages_in_the_tail_of_every_process_go(to: Writer, process: Callable[..., Any]) -> None:
    reader = process(
        """
        from txnkv.topics.read.log_view import look_at
        engine = client.instance.topics
        partition = engine.partitions(engine.get("events"))[0]
        while wait():
            say(look_at(engine, partition, lambda view: view.high_watermark))
        """
    )
    for i in range(5):
        to.small(f"{i}")
    reader.tell()
    assert reader.hear() == 5
    to.truncate(2)
    reader.tell()
    assert reader.hear() == 2
    to.small("new")
    reader.tell()
    assert reader.hear() == 3
    assert texts(to) == ["0", "1", "new"]


def test_a_batch_goes_whole(to: Writer) -> None:
    to.small("a", "b", "c")
    to.small("d", "e", "f")
    assert to.truncate(4) == 3
    assert texts(to) == ["a", "b", "c"]
    assert state(to)[3] == 3


def test_index_and_state_go_back(to: Writer) -> None:
    first = to.begin()
    to.append(first, "a")
    to.abort(first)  # 0, marker 1
    second = to.begin()
    to.append(second, "b", "c")
    to.abort(second)  # 2-3, marker 4
    to.small("d")  # 5
    log = to.partitions[0].log
    to.truncate(2)
    with to.partitions[0].environment.read() as txn:
        assert [entry.first_offset for entry in log.aborted(txn, 0, 100)] == [0]
        assert [entry.marker_offset for entry in log.commits(txn, 0, 100)] == []
    assert state(to) == (0, 2, 2, 2)


def test_an_open_transaction_keeps_its_messages(to: Writer) -> None:
    to.small("a")
    txn = to.begin()
    to.append(txn, "b")
    to.small("c")
    to.append(txn, "d")
    to.small("e")
    before = raw(to.client, TOPIC)
    for offset in (0, 1, 2, 3):
        with pytest.raises(InvalidTxnStateError, match=f"transaction {txn.txn_id} is open"):
            to.truncate(offset)
    assert raw(to.client, TOPIC) == before
    assert to.truncate(4) == 4
    to.commit(txn)
    assert texts(to) == ["a", "b", "c", "d"]
    assert state(to) == (0, 5, 5, 5)


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_a_transaction_and_its_end_stay_together(end: str, to: Writer) -> None:
    to.small("a")
    txn = to.begin()
    to.append(txn, "b")
    to.small("c")
    getattr(to, end)(txn)  # 3
    to.small("d")
    for offset in (2, 3):
        with pytest.raises(InvalidTxnStateError, match="began at 1"):
            to.truncate(offset)
    assert state(to) == (0, 5, 5, 5)
    assert to.truncate(4) == 4
    assert to.truncate(1) == 1
    assert texts(to) == ["a"]


@pytest.mark.parametrize("offset", [-1, 4, 100])
def test_an_offset_that_is_not_there(offset: int, to: Writer) -> None:
    for text in "abc":
        to.small(text)
    with pytest.raises(OffsetOutOfRangeError, match=r"\[0, 3\)"):
        to.truncate(offset)
    assert texts(to) == ["a", "b", "c"]


def test_below_the_start_nothing_can_be_cut(to: Writer) -> None:
    for i in range(30):
        to.small(f"{i}".ljust(100, "."))
    partition = to.partitions[0]
    roll_forward.complete(to.engine, partition)
    partition.environment.write(lambda txn: partition.log.advance_start(txn, 15))
    with pytest.raises(OffsetOutOfRangeError):
        to.truncate(14)
    assert to.truncate(15) == 15
    to.small("new")
    roll_forward.complete(to.engine, partition)
    assert state(to) == (15, 16, 16, 16)


def test_producers_know_what_is_gone(to: Writer) -> None:
    by = Sender(to.engine, to.topic, "p")

    def send(text: str) -> int:
        return by.deliver([(0, pa.record_batch({"value": [text.encode()]}))])[0].base

    for text in "abc":
        send(text)
    numbers = dict(by._next)
    to.truncate(2)
    with pytest.raises(OutOfOrderSequenceError):
        send("d")
    by._unsure = False
    by._next = {id: number - 1 for id, number in numbers.items()}
    assert send("c") == 2
    by._next = {id: number - 2 for id, number in numbers.items()}
    assert send("b") == 1  # a duplicate of what is still there
    assert texts(to) == ["a", "b", "c"]


def test_a_side_log_is_cut_with_its_log(client: txnkv.Client) -> None:
    to = Writer(client, TOPIC, buffer="sidecar")
    for i in range(4):
        txn = to.begin()
        to.append(txn, f"{i}a", f"{i}b")
        to.commit(txn)
    assert to.truncate(5) == 4  # a transaction goes whole
    assert texts(to) == ["0a", "0b", "1a", "1b"]
    txn = to.begin()
    to.append(txn, "new")
    to.commit(txn)
    assert texts(to) == ["0a", "0b", "1a", "1b", "new"]


def test_who_writes_meanwhile_loses_nothing_that_comes_later(to: Writer) -> None:
    """A commit between the cut and the lowering: its offset is its own, the hole is filled."""
    for i in range(6):
        to.small(f"{i}")
    cut = to.engine.look(to.partitions[0].id).next_offset
    arm("truncate.cut", lambda: to.small("late"))
    assert to.truncate(3) == 7
    disarm()
    assert cut == 6
    assert texts(to) == ["0", "1", "2", "late"]
    assert [each.offset for each in stored(to.client, TOPIC)] == [0, 1, 2, 6]
    assert state(to) == (0, 7, 7, 7)


def test_offsets_that_a_subscription_knows_are_not_given_again(to: Writer) -> None:
    for i in range(6):
        to.small(f"{i}")
    with to.client.topic(TOPIC).subscribe("mailer") as subscription:
        held = subscription.receive_many(6, timeout=5.0)
        assert len(held) == 6
        assert to.truncate(3) == 6
        to.small("new")
        subscription.ack(held[5])  # of a message that is gone
        found = subscription.receive(timeout=5.0)
        assert found is not None
        assert (found.offset, found.value) == (6, b"new")
    assert texts(to) == ["0", "1", "2", "new"]


@pytest.mark.parametrize(
    ("point", "left"),
    [
        ("partition.truncated", 6),
        ("truncate.cut", 3),
        ("truncate.lowered", 3),
    ],
)
def test_killed_and_done_again(
    point: str, left: int, to: Writer, process: Callable[..., Any]
) -> None:
    for i in range(6):
        to.small(f"{i}")
    process(
        """
        from txnkv.topics.write.roll_forward import truncate
        engine = client.instance.topics
        partition = engine.partitions(engine.get("events"))[0]
        truncate(engine, partition, 3, client.instance.engine.flush)
        """,
        fault=f"{point}=kill",
    ).finish(-signal.SIGKILL)
    assert texts(to) == [str(i) for i in range(left)]
    to.small("between")
    assert texts(to) == [*(str(i) for i in range(left)), "between"]
    assert to.truncate(3) == 3
    assert state(to) == (0, 3, 3, 3)
    to.small("after")
    assert texts(to) == ["0", "1", "2", "after"]


def test_a_dropped_topic_is_not_truncated(to: Writer) -> None:
    to.small("a")
    partition = to.partitions[0]
    roll_forward.complete(to.engine, partition)
    with internals.status(to.client).write() as cur:
        cur.execute("UPDATE topics SET dropped_ts = 1")
    with pytest.raises(txnkv.TopicNotFoundError):
        truncate(to.engine, partition, 0, internals.tables(to.client).flush)
    with internals.status(to.client).write() as cur:
        cur.execute("UPDATE topics SET dropped_ts = NULL")
