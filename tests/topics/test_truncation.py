"""The end of a log that is cut off: log, index, state, tail, readers, producers."""

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
from txnkv import core
from txnkv.errors import InvalidTxnStateError, OffsetOutOfRangeError
from txnkv.storage import arm, disarm
from txnkv.topics import outbox
from txnkv.topics.log.log_check import problems
from txnkv.topics.topic_catalog import TopicOptions
from txnkv.topics.write import roll_forward
from txnkv.topics.write.producer_sender import Sender

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
def test_what_is_behind_goes_and_no_offset_is_given_again(keep: int, to: Writer) -> None:
    for i in range(20):
        to.small(f"old {i}")
    assert to.truncate(keep) == 20
    assert state(to) == (0, 20, 20, 20)
    to.small("new")
    assert texts(to) == [*(f"old {i}" for i in range(keep)), "new"]
    assert [each.offset for each in stored(to.client, TOPIC)] == [*range(keep), 20]
    assert to.truncate(max(keep + 1, 20)) == 21  # where the first cut has left nothing
    assert to.truncate(min(keep + 1, 19)) == 21
    assert texts(to) == [f"old {i}" for i in range(min(keep, 19))][: keep + 1]


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
    to.small("new")
    reader.tell()
    assert reader.hear() == 6
    assert texts(to) == ["0", "1", "new"]


def test_what_was_committed_together_stays_together(to: Writer) -> None:
    to.small("a", "b", "c")
    to.small("d", "e", "f")
    for offset in (4, 5):
        with pytest.raises(OffsetOutOfRangeError, match=r"from 3 on were .* Truncate after 2"):
            to.truncate(offset)
    assert texts(to) == list("abcdef")
    to.truncate(3)
    assert texts(to) == ["a", "b", "c"]


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
    assert state(to) == (0, 6, 6, 6)


def test_markers_that_are_noted_still_do_not_come_back(to: Writer) -> None:
    """As after a power loss, which their deletion from status.db does not outlive."""
    for end in (to.abort, to.commit):
        txn = to.begin()
        to.append(txn, "a")
        end(txn)
    with internals.status(to.client).write() as cur:
        for offset, kind in ((1, core.ControlType.ABORT), (3, core.ControlType.COMMIT)):
            cur.execute(
                "INSERT OR REPLACE INTO end_markers (partition_id, first_offset, count, type, "
                "txn_id, commit_ts, low_water_mark, txn_first_offset) "
                "VALUES (?, ?, 1, ?, ?, 5, 0, ?)",
                (to.partitions[0].id, offset, int(kind), 12345 + offset, offset - 1),
            )
    to.truncate(0)
    log = to.partitions[0].log
    with to.partitions[0].environment.read() as txn:
        assert log.aborted(txn, 0, 100) == []
        assert log.commits(txn, 0, 100) == []
    assert state(to) == (0, 4, 4, 4)


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
    assert to.truncate(4) == 5
    to.commit(txn)
    assert texts(to) == ["a", "b", "c", "d"]
    assert state(to) == (0, 6, 6, 6)


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
    assert to.truncate(4) == to.truncate(1) == 5
    assert texts(to) == ["a"]


@pytest.mark.parametrize("offset", [-1, 4, 100])
def test_an_offset_that_is_not_there(offset: int, to: Writer) -> None:
    for text in "abc":
        to.small(text)
    with pytest.raises(OffsetOutOfRangeError, match=r"\[0, 3\)"):
        to.truncate(offset)
    assert texts(to) == ["a", "b", "c"]


@pytest.mark.parametrize("after", [19, 24, 29])
def test_a_log_that_begins_inside_of_a_filler(after: int, to: Writer) -> None:
    for i in range(30):
        to.small(f"{i}")
    to.truncate(10)
    for i in range(5):
        to.small(f"new {i}")
    assert to.client.topic(TOPIC).truncate(20) == {0: 20}
    assert to.truncate(after + 1) == 35
    assert state(to) == (20, 35, 35, 35)
    assert texts(to) == []
    to.small("newer")
    assert texts(to) == ["newer"]


@pytest.mark.parametrize("buffer", ["marker", "sidecar"])
def test_a_log_that_begins_inside_of_a_batch(buffer: Any, client: txnkv.Client) -> None:
    """What was given up of the batch does not come back with the rest of it."""
    to = Writer(client, TOPIC, buffer=buffer)
    row = to.begin()
    to.append(row, *"abcdef")
    to.commit(row) if buffer == "sidecar" else to.abort(row)
    to.small(*"ghijkl")
    start = 3 if buffer == "sidecar" else 9
    client.topic(TOPIC).truncate(start)
    with pytest.raises(OffsetOutOfRangeError, match=f"from {start} on were .* after {start - 1},"):
        to.truncate(start + 1)
    end = to.engine.look(to.partitions[0].id).next_offset
    assert to.truncate(start) == end
    assert state(to) == (start, end, end, end)
    to.small("new")
    assert texts(to) == ["new"]


def test_below_the_start_nothing_can_be_cut(to: Writer) -> None:
    for i in range(30):
        to.small(f"{i}".ljust(100, "."))
    partition = to.partitions[0]
    roll_forward.complete(to.engine, partition)
    partition.environment.write(lambda txn: partition.log.advance_start(txn, 15))
    with pytest.raises(OffsetOutOfRangeError):
        to.truncate(14)
    assert to.truncate(15) == 30
    assert state(to) == (15, 30, 30, 30)


def test_producers_go_on(to: Writer) -> None:
    by = Sender(to.engine, to.topic, "p")

    def send(text: str) -> int:
        return by.deliver([(0, pa.record_batch({"value": [text.encode()]}))])[0].base

    for text in "abc":
        send(text)
    before = dict(by._next)
    to.truncate(1)
    assert send("d") == 3
    by._next = {id: number - 1 for id, number in before.items()}
    assert send("c") == 2  # it was sent
    assert texts(to) == ["a", "d"]


def test_a_side_log_is_cut_with_its_log(client: txnkv.Client) -> None:
    to = Writer(client, TOPIC, buffer="sidecar")
    for i in range(4):
        txn = to.begin()
        to.append(txn, f"{i}a", f"{i}b")
        to.commit(txn)
    with pytest.raises(OffsetOutOfRangeError, match="Truncate after 3"):
        to.truncate(5)
    assert to.truncate(4) == 8
    assert texts(to) == ["0a", "0b", "1a", "1b"]
    txn = to.begin()
    to.append(txn, "new")
    to.commit(txn)
    assert texts(to) == ["0a", "0b", "1a", "1b", "new"]


def test_who_writes_meanwhile_loses_nothing_that_comes_later(to: Writer) -> None:
    """A commit between the cut and the filling."""
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


def test_who_writes_between_the_flush_and_the_cut_is_cut_too(to: Writer) -> None:
    for i in range(6):
        to.small(f"{i}")
    late = ["late"]
    arm("log.completed", lambda: to.small(late.pop()) if late else None)
    assert to.truncate(3) == 7
    disarm()
    assert texts(to) == ["0", "1", "2"]


def test_offsets_that_a_subscription_knows_are_not_given_again(to: Writer) -> None:
    for i in range(6):
        to.small(f"{i}")
    with to.client.topic(TOPIC).subscribe("mailer") as subscription:
        held = subscription.receive_many(6, timeout=5.0)
        assert len(held) == 6
        assert to.truncate(3) == 6
        assert subscription.lost() == {0: 3}
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
    ],
)
def test_killed_and_done_again(
    point: str, left: int, to: Writer, process: Callable[..., Any]
) -> None:
    for i in range(6):
        to.small(f"{i}")
    process(
        """
        client.topic("events").truncate(after=2)
        """,
        fault=f"{point}=kill",
    ).finish(-signal.SIGKILL)
    assert texts(to) == [str(i) for i in range(left)]
    to.small("between")
    assert texts(to) == [*(str(i) for i in range(left)), "between"]
    assert to.truncate(3) == 7
    assert state(to) == (0, 7, 7, 7)
    to.small("after")
    assert texts(to) == ["0", "1", "2", "after"]


@pytest.mark.parametrize("point", ["status.before_commit", "status.after_commit"])
def test_killed_while_subscriptions_are_told(
    point: str, to: Writer, process: Callable[..., Any], by_hand: Callable[..., Any]
) -> None:
    """The log begins at the cut already; the leader's next round tells them."""
    for i in range(6):
        to.small(f"{i}")
    with to.client.topic(TOPIC).subscribe("s") as subscription:
        subscription.ack(subscription.receive(timeout=5.0))
        process(
            """
            from txnkv.storage.faults import arm

            topic = client.topic("events")
            arm(point, "kill")
            topic.truncate(4)
            """,
            point=point,
        ).finish(-signal.SIGKILL)
        assert state(to)[0] == 4
        by_hand(to.client)
        given = list(iter(lambda: subscription.receive(timeout=0), None))
        assert [message.offset for message in given] == [4, 5]
        assert subscription.lost() == {0: 3}
    assert to.client.check().ok


# -- as users see it ---------------------------------------------------------------------


@pytest.mark.parametrize("order", ["offset", "commit"])
def test_readers_behind_the_cut_go_on_where_they_are(to: Writer, order: Any) -> None:
    """One that has read some, one that has read all, and one in the midst of a transaction."""
    for i in range(3):
        to.small(f"{i}")
    txn = to.begin()
    for i in range(3):
        to.append(txn, f"large {i}")  # 3 to 5
    to.commit(txn)  # 6
    topic = to.client.topic(TOPIC)
    some, all_of_it, midst = (topic.consumer(order=order) for _ in range(3))
    assert len(some.poll(max_messages=1, timeout=0)) == 1
    assert len(iter_all(all_of_it)) == 6
    midst = topic.consumer(order=order, max_bytes=1)
    while midst.poll(max_messages=1, timeout=0)[0].value != b"large 0":
        pass
    assert topic.truncate(after=1) == {0: 7}
    to.small("new")
    for reader in (all_of_it, midst, some):
        left = [each.value for each in iter_all(reader)]
        assert left[-1] == b"new", left
        assert len(left) == 1 or reader is not all_of_it
    assert [each.value for each in iter_all(topic.consumer(order=order))] == [b"0", b"1", b"new"]
    assert to.client.check().ok


def iter_all(reader: txnkv.Consumer) -> list[txnkv.Message]:
    found = []
    while messages := reader.poll(timeout=0):
        found += messages
    return found


def test_of_several_partitions(client: txnkv.Client) -> None:
    topic = client.create_topic(TOPIC, partitions=3)
    for i in range(9):
        with client.transaction() as txn:
            txn.send(topic, b"%d" % i, partition=i % 3)
    with pytest.raises(ValueError, match=r"say which, as truncate\(after=\{0: 1\}\)"):
        topic.truncate(after=1)
    with pytest.raises(ValueError, match="one of before= and after="):
        topic.truncate({0: 1}, after={0: 1})
    with pytest.raises(ValueError, match="one of before= and after="):
        topic.truncate()
    with pytest.raises(TypeError, match="an offset is a number"):
        topic.truncate(after={0: "latest"})  # type: ignore[dict-item]
    with pytest.raises(OffsetOutOfRangeError, match=r"truncated after 3: it holds \[0, 3\)"):
        topic.truncate(after={0: 1, 1: 3})
    assert topic.truncate(after={2: -1, 1: 0}) == {1: 3, 2: 3}
    with topic.consumer() as consumer:
        found = sorted((m.partition, m.offset) for m in iter_all(consumer))
    assert found == [(0, 0), (0, 1), (1, 0)]
    empty = client.create_topic("empty")
    assert empty.truncate(after=-1) == {0: 0}
    with pytest.raises(OffsetOutOfRangeError, match="it holds no messages"):
        empty.truncate(after=0)


@pytest.mark.parametrize("type", ["exclusive", "shared", "key_shared"])
def test_a_subscription_does_not_get_what_it_had_not_got(client: txnkv.Client, type: Any) -> None:
    """What it holds may still be acknowledged; given back it does not come again."""
    topic = client.create_topic(TOPIC)
    for i in range(8):
        with client.transaction() as txn:
            txn.send(topic, b"%d" % i, key=b"k")
    with topic.subscribe("s", type=type) as subscription:
        held = subscription.receive_many(5, timeout=5)
        subscription.ack(held[0])
        topic.truncate(after=1)
        assert subscription.lost() == {0: 6}
        subscription.nack(held[1])
        subscription.nack(held[2])
        subscription.ack(held[3])
        with client.transaction() as txn:
            txn.send(topic, b"new", key=b"k")
            txn.ack(subscription, held[4])
    with topic.subscribe("s", type=type) as subscription:  # has read nothing ahead
        found = subscription.receive_many(9, timeout=5)
        while len(found) < 2:
            found += subscription.receive_many(9, timeout=5)
        assert [(m.offset, m.value) for m in found] == [(1, b"1"), (8, b"new")]
        for message in found:
            subscription.ack(message)
        assert sum(subscription.lag().values()) == 0
    assert client.check().ok


@pytest.mark.parametrize("options", [
    {"type": "exclusive"}, {"type": "exclusive", "max_deliveries": 3}, {"type": "shared"},
    {"type": "key_shared"}, {"type": "exclusive", "order": "commit"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("where", ["here", "elsewhere"])
@pytest.mark.usefixtures("by_hand")
def test_what_was_read_ahead_below_the_beginning_is_not_given(
    where: str, options: Any, client: txnkv.Client, elsewhere: Callable[..., Any]
) -> None:
    topic = client.create_topic(TOPIC)
    for _ in range(2):
        with client.transaction() as txn:
            txn.send_batch(topic, pa.table({"value": [b"v"] * 1500, "key": [b"k"] * 1500}))
    with topic.subscribe("s", **options) as subscription:
        for _ in range(3):
            subscription.ack(subscription.receive(timeout=5))
        held = subscription.receive(timeout=5)
        if where == "here":
            topic.truncate(2000)
        else:
            elsewhere("client.topic('events').truncate(2000)")
        assert subscription.lost() == {0: 1997}
        subscription.ack(held)
        given = iter(lambda: subscription.receive(timeout=0), None)
        offsets = []
        for message in given:
            offsets.append(message.offset)
            subscription.ack(message)
        assert offsets == list(range(2000, 3000))
        topic.truncate("latest")
        assert subscription.lost() == {0: 1997}
        assert subscription.lag() == {0: 0}
    assert client.check().ok


@pytest.mark.parametrize("buffer", ["marker", "sidecar"])
@pytest.mark.parametrize("most", [-1, outbox.MAX_BYTES], ids=["large", "small"])
def test_readers_in_the_order_of_transactions_get_what_is_left(
    client: txnkv.Client, monkeypatch: pytest.MonkeyPatch, buffer: Any, most: int
) -> None:
    """The end of one of two partitions goes: of later transactions their other messages come."""
    monkeypatch.setattr(outbox, "MAX_BYTES", most)
    topic = client.create_topic(TOPIC, partitions=2, buffer=buffer)

    def send(value: bytes) -> None:
        with client.transaction() as txn:
            for number in range(2):
                txn.send(topic, value, partition=number)

    for i in range(3):
        send(b"%d" % i)
    reader = topic.consumer(isolation="serializable")
    first = reader.poll(max_messages=2, timeout=5)
    assert [(m.partition, m.value) for m in first] == [(0, b"0"), (1, b"0")]
    after = first[1].offset + (1 if most < 0 and buffer == "marker" else 0)
    topic.truncate(after={1: after})
    send(b"new")
    left = [(0, b"1"), (0, b"2"), (0, b"new"), (1, b"new")]
    found = [(m.partition, m.value) for m in iter_all(topic.consumer(isolation="serializable"))]
    assert found == [(0, b"0"), (1, b"0"), *left]
    held = [(m.partition, m.value) for m in iter_all(reader)]
    assert [each for each in held if each in left] == left
    assert client.check().ok


def test_what_a_topic_keeps_for_a_subscription_stays(client: txnkv.Client) -> None:
    topic = client.create_topic(TOPIC, retain_unacknowledged=True)
    for i in range(3):
        with client.transaction() as txn:
            txn.send(topic, b"%d" % i)
    with topic.subscribe("s") as subscription:
        with pytest.raises(OffsetOutOfRangeError, match="keeps what is not acknowledged, from 0"):
            topic.truncate(after=1)
        subscription.ack_cumulative(subscription.receive_many(3, timeout=5)[-1])
        assert topic.truncate(after=1) == {0: 3}


def test_a_dropped_topic_is_not_truncated(to: Writer) -> None:
    to.small("a")
    partition = to.partitions[0]
    roll_forward.complete(to.engine, partition)
    with internals.status(to.client).write() as cur:
        cur.execute("UPDATE topics SET dropped_ts = 1")
    with pytest.raises(txnkv.TopicNotFoundError):
        to.truncate(0)
    with internals.status(to.client).write() as cur:
        cur.execute("UPDATE topics SET dropped_ts = NULL")
