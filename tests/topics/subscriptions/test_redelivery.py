"""Messages that come again: negative acks, leases, dead letters, attempts that fail."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import apsw
import pyarrow as pa
import pytest

import txnkv
from tests.topics.subscriptions.subscription_tools import (
    cursor_rows,
    left_over,
    received,
    send,
    take,
)
from txnkv.storage.faults import arm, disarm
from txnkv.topics.acks import ack_rows
from txnkv.topics.delivery.leases import LeaseReader
from txnkv.topics.messages.message import MessageId

# -- negative acks, leases, dead letters -----------------------------------------------


@pytest.mark.parametrize("kind", ["exclusive", "shared", "key_shared"])
@pytest.mark.parametrize("offset", [1 << 63, 1 << 70, -(1 << 70)])
def test_a_negative_ack_of_an_offset_that_no_log_has(
    client: txnkv.Client, topic: txnkv.Topic, kind: Any, offset: int
) -> None:
    """It did not fit into a row of a shared subscription, which raised OverflowError."""
    send(client, 0)
    sub = topic.subscribe("s", kind)
    sub.nack([take(sub), MessageId(0, offset)])
    assert received(sub) == ["0"]


@pytest.mark.parametrize("options", [{}, {"type": "shared"}, {"max_deliveries": 9}])
def test_a_negative_ack_comes_back_after_its_delay(
    client: txnkv.Client, topic: txnkv.Topic, now: Any, options: dict[str, Any]
) -> None:
    send(client, 0, 1)
    sub = topic.subscribe("s", redelivery_delay=30, lease_seconds=3600, **options)
    first = take(sub)
    sub.nack(first)
    assert received(sub) == ["1"]
    now.forward(20)
    assert received(sub) == []
    now.forward(11)
    assert received(sub) == ["0"]
    sub.ack([first, MessageId(0, 1)])
    sub.nack(first)
    now.forward(100)
    assert received(sub) == []


@pytest.mark.parametrize("options", [{}, {"type": "shared"}, {"max_deliveries": 9}])
@pytest.mark.parametrize("delay", [0, 30])
def test_two_negative_acks_deliver_once(
    client: txnkv.Client, topic: txnkv.Topic, now: Any, options: dict[str, Any], delay: int
) -> None:
    send(client, 0)
    sub = topic.subscribe("s", redelivery_delay=delay, lease_seconds=3600, **options)
    first = take(sub)
    sub.nack(first)
    now.forward(delay / 2)
    sub.nack([first, first])
    now.forward(delay * 2)
    assert received(sub) == ["0"]
    now.forward(delay * 2)
    assert received(sub) == []


@pytest.mark.parametrize("tries", [0, 1])
def test_acks_come_back_after_the_deadline_though_a_commit_failed(
    client: txnkv.Client, topic: txnkv.Topic, now: Any, tries: int
) -> None:
    """Nothing was committed, and the handle was kept, and forgotten."""

    def no_room() -> None:
        raise txnkv.StorageFullError("no room")

    send(client, 0)
    sub = topic.subscribe("s")
    txn = client.new_transaction(timeout=60)
    txn.ack(sub, take(sub))
    txn.flush()
    arm("log.written", no_room)
    for _ in range(tries):
        with pytest.raises(txnkv.StorageFullError):
            txn.commit()
    disarm()
    assert txn.state is txnkv.TxnState.OPEN
    now.forward(62)
    assert received(sub) == ["0"]
    with pytest.raises(txnkv.TransactionTimedOutError):
        txn.commit()


def test_a_lease_that_runs_out_goes_to_another(
    client: txnkv.Client, topic: txnkv.Topic, now: Any
) -> None:
    send(client, 0, 1, 2)
    one = topic.subscribe("s", type="shared", lease_seconds=10)
    two = topic.subscribe("s", type="shared", lease_seconds=10)
    first = take(one)
    second = take(one)
    assert received(two) == ["2"]
    one.ack(first)
    now.forward(11)
    assert received(two) == ["1", "2"]
    one.ack(second)  # late, and right all the same
    now.forward(11)
    assert received(one) == ["2"]


def test_an_exclusive_message_that_nobody_acknowledges_comes_again_after_its_timeout(
    client: txnkv.Client, topic: txnkv.Topic
) -> None:
    send(client, *range(4))
    with topic.subscribe("s", ack_timeout=0.05) as sub:
        got = sub.receive_many(3, timeout=0)
        sub.ack(got[0])
        txn = client.new_transaction()
        txn.ack(sub, got[1])
        assert take(sub).offset in (3, 2)  # 2 where its time has passed already
        again = set()
        while len(again) < 2:
            for message in sub.receive_many(10, timeout=60):
                if message.redelivery_count:
                    again.add(message.offset)
        assert again == {2, 3}
        assert client.metrics()["messages_timed_out"] >= 2
        sub.ack([MessageId(0, 2), MessageId(0, 3)])
        txn.rollback()
        last = sub.receive(timeout=60)
        assert last is not None
        assert last.offset == 1
        sub.ack_cumulative(last)
        assert sub.lag() == {0: 0}


def test_a_pending_ack_outlasts_its_lease(
    client: txnkv.Client, topic: txnkv.Topic, now: Any
) -> None:
    send(client, 0, 1)
    sub = topic.subscribe("s", type="shared", lease_seconds=10)
    txn = client.new_transaction(timeout=None)
    txn.ack(sub, take(sub))
    now.forward(60)
    assert received(sub) == ["1"]
    txn.commit()
    now.forward(60)
    assert received(sub) == ["1"]


def test_consumers_of_one_process_share(client: txnkv.Client, topic: txnkv.Topic) -> None:
    send(client, *range(6))
    subs = [topic.subscribe("s", type="shared") for _ in range(3)]
    found = [take(sub).value for sub in subs for _ in range(2)]
    assert sorted(found) == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert [received(sub) for sub in subs] == [[], [], []]
    subs[1].close()
    assert received(subs[0]) == ["2", "3"]


@pytest.mark.parametrize("type", ["exclusive", "shared"])
def test_after_so_many_deliveries_a_message_goes_to_the_dead_letter_topic(
    client: txnkv.Client, topic: txnkv.Topic, type: str
) -> None:
    send(client, "good", key="k", headers=[("h", b"1")])
    send(client, "bad", key="k", headers=[("h", b"1")])
    sub = topic.subscribe("s", type=type, max_deliveries=3, dead_letter="dead")
    sub.ack(take(sub))
    for _ in range(3):
        bad = take(sub)
        assert bad.value == b"bad"
        sub.nack(bad)
    assert received(sub) == []
    (dead,) = client.topic("dead").subscribe("look").receive_many(10, timeout=0)
    assert (dead.value, dead.key, dead.timestamp) == (b"bad", b"k", bad.timestamp)
    assert dead.headers == [
        ("h", b"1"),
        ("txnkv-topic", b"events"),
        ("txnkv-partition", b"0"),
        ("txnkv-offset", b"1"),
        ("txnkv-deliveries", b"3"),
    ]
    assert cursor_rows(client)[:1] == [(2,)]
    assert left_over(client) == 0


def test_the_dead_letter_topic_has_a_name_of_its_own(
    client: txnkv.Client, topic: txnkv.Topic
) -> None:
    send(client, 0)
    sub = topic.subscribe("s", max_deliveries=1)
    sub.nack(take(sub))
    assert received(sub) == []
    assert received(client.topic("events.s.dead").subscribe("s")) == ["0"]


def test_an_abort_counts_as_a_delivery_that_failed(
    client: txnkv.Client, topic: txnkv.Topic
) -> None:
    send(client, 0)
    sub = topic.subscribe("s", type="shared", max_deliveries=2)
    for _ in range(2):
        txn = client.new_transaction()
        txn.ack(sub, take(sub))
        txn.rollback()
    assert received(sub) == []
    assert received(client.topic("events.s.dead").subscribe("s")) == ["0"]


# -- client.run ------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"type": "shared"}])
@pytest.mark.parametrize("stored", [False, True])
def test_what_a_failed_attempt_acknowledged_stays_leased_until_run_ends(
    client: txnkv.Client,
    topic: txnkv.Topic,
    table: txnkv.Table,
    options: dict[str, Any],
    stored: bool,
) -> None:
    send(client, 0, 1, 2)
    sub = topic.subscribe("s", **options)
    message, other = take(sub), take(sub)
    with client.transaction() as txn:
        txn.insert(table, {"id": 1, "v": "a"})
    seen: list[list[str]] = []

    def attempt(txn: txnkv.Transaction) -> None:
        if stored:
            txn.serialize()
        seen.append(received(sub))
        row = txn.get(table, 1)
        assert row is not None
        txn.ack(sub, message)
        if len(seen) == 1:
            txn.ack(sub, other)
            with client.transaction() as first:
                first.upsert(table, {"id": 1, "v": "first"})
        txn.upsert(table, {"id": 1, "v": "mine"})

    client.run(attempt)
    assert seen == [["2"], []]
    assert received(sub) == ["1"]  # of the failed attempt alone
    assert sub.lag() == {0: 2}


@pytest.mark.parametrize("options", [{}, {"type": "shared"}])
def test_what_run_gave_up_on_is_delivered_again(
    client: txnkv.Client, topic: txnkv.Topic, options: dict[str, Any]
) -> None:
    send(client, 0)
    sub = topic.subscribe("s", **options)
    message = take(sub)

    def attempt(txn: txnkv.Transaction) -> None:
        txn.ack(sub, message)
        assert received(sub) == []
        raise txnkv.UnavailableError("try again")

    with pytest.raises(txnkv.UnavailableError):
        client.run(attempt, attempts=3)
    assert received(sub) == ["0"]


def test_a_conflict_of_acks_is_not_tried_again(client: txnkv.Client, topic: txnkv.Topic) -> None:
    send(client, 0)
    sub = topic.subscribe("s")
    message = take(sub)
    sub.ack(message)
    attempts = []

    def attempt(txn: txnkv.Transaction) -> None:
        attempts.append(txn)
        txn.ack(sub, message)

    with pytest.raises(txnkv.AckConflictError):
        client.run(attempt)
    assert len(attempts) == 1


# -- transactions that end by themselves -----------------------------------------------


@pytest.mark.parametrize("options", [{}, {"type": "shared"}])
def test_acks_of_a_transaction_past_its_timeout_come_back(
    client: txnkv.Client, topic: txnkv.Topic, now: Any, options: dict[str, Any]
) -> None:
    send(client, 0)
    sub = topic.subscribe("s", lease_seconds=1, **options)
    txn = client.new_transaction(timeout=5)
    txn.ack(sub, take(sub))
    assert received(sub) == []
    now.forward(10)
    assert received(sub) == ["0"]
    with pytest.raises(txnkv.TransactionTimedOutError):
        txn.commit()


@pytest.mark.parametrize("options", [{}, {"type": "shared"}])
@pytest.mark.parametrize("stored", [False, True])
def test_an_ack_past_the_timeout_of_its_transaction_is_refused(
    client: txnkv.Client, topic: txnkv.Topic, now: Any, options: dict[str, Any], stored: bool
) -> None:
    send(client, 0)
    sub = topic.subscribe("s", **options)
    message = take(sub)
    txn = client.new_transaction(timeout=1)
    if stored:
        txn.serialize()
    now.forward(5)
    with pytest.raises(txnkv.TransactionTimedOutError), txn:
        txn.ack(sub, message)
    assert sub.lag() == {0: 1}


@pytest.mark.parametrize("options", [{}, {"type": "shared"}])
def test_acks_of_a_dropped_transaction_come_back(
    client: txnkv.Client, topic: txnkv.Topic, until: Callable[..., Any], options: dict[str, Any]
) -> None:
    send(client, 0)
    sub = topic.subscribe("s", **options)
    txn = client.new_transaction()
    txn.ack(sub, take(sub))
    del txn
    gc.collect()
    assert until(lambda: received(sub)) == ["0"]


@pytest.mark.parametrize("options", [{}, {"type": "shared"}])
def test_acks_of_a_stored_transaction_without_heartbeat_come_back(
    client: txnkv.Client,
    topic: txnkv.Topic,
    by_hand: Callable[[txnkv.Client], None],
    now: Any,
    options: dict[str, Any],
) -> None:
    send(client, 0)
    sub = topic.subscribe("s", **options)
    txn = client.new_transaction(keepalive=False)
    txn.serialize()
    txn.ack(sub, take(sub))
    now.forward(20)
    assert received(sub) == []
    now.forward(3600)
    by_hand(client)
    assert received(sub) == ["0"]


@pytest.mark.parametrize("year", [-20_000, 20_000])
def test_a_message_of_a_time_that_no_datetime_holds_is_given_up_as_others(
    client: txnkv.Client, topic: txnkv.Topic, year: int
) -> None:
    micros = (year - 1970) * 31_556_952 * 1_000_000
    client.create_topic("dead")
    sub = topic.subscribe("s", max_deliveries=1, dead_letter="dead")
    times = pa.array([micros, 0], pa.timestamp("us", tz="UTC"))
    with client.transaction() as txn:
        txn.send_batch(topic, pa.table({"value": [b"bad", b"good"], "timestamp": times}))
    bad = sub.receive(timeout=0)
    assert bad is not None
    assert bad.timestamp.year == (1 if year < 0 else 9999)
    sub.nack(bad)
    following = sub.receive(timeout=0)
    assert following is not None
    assert following.value == b"good"
    assert [each.value for each in client.topic("dead").consumer().poll(timeout=0)] == [b"bad"]


def test_a_message_whose_header_has_a_name_that_is_no_utf_8_is_given_up_as_others(
    client: txnkv.Client, topic: txnkv.Topic
) -> None:
    """Kafka's clients could send them; the subscription stood before it for ever."""
    blob = b"\1\0" + b"\1\0\xe9" + b"\1\0\0\0x"
    client.create_topic("dead")
    sub = topic.subscribe("s", max_deliveries=1, dead_letter="dead")
    with client.transaction() as txn:
        txn.send_batch(topic, pa.table({"value": [b"bad", b"good"], "headers": [blob, None]}))
    bad = take(sub)
    assert bad.headers == [("\ufffd", b"x")]
    sub.nack(bad)
    assert take(sub).value == b"good"
    (dead,) = client.topic("dead").consumer().poll(timeout=0)
    assert dead.headers[0] == ("\ufffd", b"x")


@pytest.mark.parametrize("type", ["shared", "key_shared"])
def test_acks_that_transactions_hold_are_not_looked_at_for_each_message(
    client: txnkv.Client, topic: txnkv.Topic, monkeypatch: pytest.MonkeyPatch, type: Any
) -> None:
    with client.transaction() as txn:
        for number in range(400):
            txn.send(topic, str(number), key=str(number))
    first, second = (topic.subscribe("s", type=type) for _ in range(2))
    holder, looks = client.new_transaction(), []
    for message in first.receive_many(150, timeout=0)[::2]:
        holder.ack(first, message)
    lives = ack_rows._lives

    def counted(*args: Any) -> bool:
        looks.append(args)
        return lives(*args)

    monkeypatch.setattr(ack_rows, "_lives", counted)
    other = client.new_transaction()
    for _ in range(20):
        message = second.receive(timeout=0)
        assert message is not None
        other.ack(second, message)
    assert len(looks) <= 20
    other.commit()
    holder.commit()


@pytest.mark.parametrize("partitions", [1, 3])
def test_what_comes_back_at_once_is_not_sorted_to_be_given(
    client: txnkv.Client, partitions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = client.create_topic("events", partitions=partitions)
    plans: list[str] = []
    rows = LeaseReader._due_rows

    class Explained:
        """A cursor that notes how SQLite does what it is asked."""

        def __init__(self, cur: apsw.Cursor) -> None:
            self._cur = cur

        def execute(self, sql: str, args: Any) -> apsw.Cursor:
            plans.extend(row[-1] for row in self._cur.execute(f"EXPLAIN QUERY PLAN {sql}", args))
            return self._cur.execute(sql, args)

    monkeypatch.setattr(
        LeaseReader, "_due_rows", lambda self, cur, *args: rows(self, Explained(cur), *args)
    )
    with topic.subscribe("s", type="shared") as sub:
        send(client, *range(9))
        assert len(received(sub)) == 9
    with topic.subscribe("s", type="shared") as sub:
        assert len(received(sub)) == 9
    assert any("leases_by_time" in each for each in plans)
    assert not any("TEMP B-TREE" in each for each in plans), plans
