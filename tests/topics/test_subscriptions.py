"""Subscriptions: who gets which message, when it comes again, and what survives whom."""

from __future__ import annotations

import gc
import os
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import txnkv
from txnkv.topics.acks import exclusive
from txnkv.topics.delivery import redelivery
from txnkv.topics.messages.message import MessageId
from txnkv.topics.topic_catalog import TopicOptions


@pytest.fixture
def topic(client: txnkv.Client) -> txnkv.Topic:
    return client.create_topic("events")


def send(client: txnkv.Client, *values: Any, topic: str = "events", **options: Any) -> None:
    with client.transaction() as txn:
        for value in values:
            txn.send(topic, str(value), **options)


def received(sub: txnkv.Subscription, most: int = 1000) -> list[str]:
    return [(m.value or b"").decode() for m in sub.receive_many(most, timeout=0)]


def take(sub: txnkv.Subscription) -> Any:
    found = sub.receive(timeout=0)
    assert found is not None
    return found


def cursor_rows(client: txnkv.Client) -> list[tuple[Any, ...]]:
    with client.instance.store.status.read() as cur:
        return (
            cur.execute("SELECT mark_delete FROM cursors").fetchall()
            + cur.execute("SELECT first, last FROM acked_ranges").fetchall()
        )


def left_over(client: txnkv.Client) -> int:
    """Rows that only unfinished business has."""
    tables = ("pending_acks", "leases", "returned_acks", "acked_ranges")
    with client.instance.store.status.read() as cur:
        return sum(cur.execute(f"SELECT count(*) FROM {name}").get for name in tables)


# -- subscribing -----------------------------------------------------------------------


def test_it_begins_where_it_was_told_to(client: txnkv.Client, topic: txnkv.Topic) -> None:
    send(client, 0, 1, 2)
    early, late = topic.subscribe("early"), topic.subscribe("late", start="latest")
    third = topic.subscribe("third", start={0: 2})
    send(client, 3)
    assert received(early) == ["0", "1", "2", "3"]
    assert received(late) == ["3"]
    assert received(third) == ["2", "3"]


def test_latest_leaves_out_no_message_of_an_open_transaction(
    client: txnkv.Client, topic: txnkv.Topic
) -> None:
    txn = client.new_transaction()
    txn.serialize()
    txn.send(topic, "open")
    txn.flush()
    sub = topic.subscribe("s", start="latest")
    txn.commit()
    assert received(sub) == ["open"]


def test_a_subscription_goes_on_where_it_was(client: txnkv.Client, topic: txnkv.Topic) -> None:
    send(client, 0, 1, 2)
    with topic.subscribe("s") as sub:
        sub.ack(take(sub))
        take(sub)
    assert received(topic.subscribe("s", start="latest")) == ["1", "2"]


@pytest.mark.parametrize("stored", [False, True])
def test_subscriptions_are_independent(
    client: txnkv.Client, topic: txnkv.Topic, stored: bool
) -> None:
    send(client, 0, 1)
    one, two = topic.subscribe("one"), topic.subscribe("two", type="shared")
    for end in ("rollback", "commit"):
        txn = client.new_transaction()
        if stored:
            txn.serialize()
        txn.ack(one, take(one))
        txn.ack(two, take(two))
        getattr(txn, end)()
        if end == "rollback":
            for sub in (one, two):
                sub.nack(sub.receive_many(2, timeout=0))
    assert received(one) == received(two) == ["1"]
    assert one.lag() == two.lag() == {0: 1}


@pytest.mark.parametrize(
    "options",
    [
        {"type": "key_shared"},
        {"start": "now"},
        {"start": {5: 0}},
        {"partitions": []},
        {"partitions": [1]},
        {"lease_seconds": 0},
        {"max_deliveries": 0},
        {"dead_letter": "dead"},
        {"max_deliveries": 1, "dead_letter": "events"},
        {"redelivery_delay": -1},
        {"ack_timeout": 0},
        {"type": "shared", "ack_timeout": 1},
    ],
)
def test_options_that_make_no_sense_are_refused(
    topic: txnkv.Topic, options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError):
        topic.subscribe("s", **options)


def test_the_type_of_a_subscription_stays(topic: txnkv.Topic) -> None:
    topic.subscribe("s").close()
    with pytest.raises(ValueError, match="exclusive"):
        topic.subscribe("s", type="shared")


def test_a_dropped_topic_is_refused(client: txnkv.Client, topic: txnkv.Topic) -> None:
    send(client, 0)
    sub = topic.subscribe("s")
    message = take(sub)
    client.drop_topic("events")
    with pytest.raises(txnkv.TopicNotFoundError):
        topic.subscribe("other")
    with pytest.raises(txnkv.TopicNotFoundError):
        sub.receive(timeout=0)
    with pytest.raises(txnkv.TopicNotFoundError):
        sub.ack(message)


@pytest.mark.parametrize("options", [{}, {"type": "shared"}])
def test_a_dropped_subscription_is_refused(
    client: txnkv.Client, topic: txnkv.Topic, options: dict[str, Any]
) -> None:
    send(client, 0, 1)
    sub = topic.subscribe("s", **options)
    first = take(sub)
    assert client.instance.topics.subscriptions.drop(sub.info)
    with pytest.raises(txnkv.TopicNotFoundError, match="dropped"):
        sub.receive(timeout=0)
    sub.ack(first)  # of no effect
    sub.close()
    assert received(topic.subscribe("s", **options)) == ["0", "1"]


@pytest.mark.parametrize("options", [{}, {"type": "shared"}])
@pytest.mark.parametrize("stored", [False, True])
def test_dropping_a_topic_aborts_who_acknowledged_its_messages(
    client: txnkv.Client,
    topic: txnkv.Topic,
    table: txnkv.Table,
    options: dict[str, Any],
    stored: bool,
) -> None:
    send(client, 0)
    sub = topic.subscribe("s", **options)
    txn = client.new_transaction()
    if stored:
        txn.serialize()
    txn.ack(sub, take(sub))
    txn.insert(table, {"id": 1})
    client.drop_topic("events")
    with pytest.raises(txnkv.InvalidTxnStateError):
        txn.commit()
    assert txn.state is txnkv.TxnState.ABORTED
    assert table.count() == 0


def test_a_closed_consumer_is_refused(client: txnkv.Client, topic: txnkv.Topic) -> None:
    sub = topic.subscribe("s")
    sub.close()
    sub.close()
    with pytest.raises(txnkv.ClosedError):
        sub.receive(timeout=0)


# -- receiving -------------------------------------------------------------------------


def test_partitions_are_shared_out(client: txnkv.Client) -> None:
    topic = client.create_topic("wide", partitions=3)
    for number in range(3):
        send(client, f"a{number}", f"b{number}", topic="wide", partition=number)
    sub = topic.subscribe("s", partitions=[0, 2])
    assert sorted(received(sub)) == ["a0", "a2", "b0", "b2"]
    sub.ack_cumulative(MessageId(2, 1))
    assert topic.subscribe("other").lag() == {0: 2, 1: 2, 2: 2}
    assert sub.lag() == {0: 2, 1: 2, 2: 0}


@pytest.mark.parametrize("type", ["exclusive", "shared"])
def test_a_receiver_waits(client: txnkv.Client, topic: txnkv.Topic, type: str) -> None:
    sub = topic.subscribe("s", type=type)
    assert sub.receive(timeout=0.02) is None
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(sub.receive(timeout=30)))
    thread.start()
    send(client, "late")
    thread.join()
    assert found[0].value == b"late"


@pytest.mark.parametrize("type", ["exclusive", "shared"])
def test_a_receiver_waits_for_what_comes_back(
    client: txnkv.Client, topic: txnkv.Topic, type: str
) -> None:
    send(client, 0)
    sub = topic.subscribe("s", type=type)
    txn = client.new_transaction()
    txn.ack(sub, take(sub))
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(sub.receive(timeout=30)))
    thread.start()
    txn.rollback()
    thread.join()
    assert found[0].value == b"0"


def test_what_is_not_committed_is_not_delivered(client: txnkv.Client, topic: txnkv.Topic) -> None:
    sub = topic.subscribe("s")
    for end in ("rollback", "commit"):
        txn = client.new_transaction()
        txn.serialize()
        txn.send(topic, end)
        txn.flush()
        assert received(sub) == []
        getattr(txn, end)()
    assert received(sub) == ["commit"]


def test_iteration(client: txnkv.Client, topic: txnkv.Topic) -> None:
    send(client, *range(5))
    sub = topic.subscribe("s")
    found = []
    for message in sub:
        found.append(message.value)
        sub.ack(message)
        if len(found) == 5:
            break
    assert found == [b"0", b"1", b"2", b"3", b"4"]
    assert cursor_rows(client) == [(5,)]


@pytest.mark.parametrize("type", ["exclusive", "shared"])
@pytest.mark.parametrize("stored", [False, True])
def test_pending_messages_do_not_hold_up_the_rest(
    client: txnkv.Client,
    topic: txnkv.Topic,
    type: str,
    stored: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redelivery, "AHEAD", 2)
    send(client, *range(9))
    sub = topic.subscribe("s", type=type)
    txn = client.new_transaction()
    if stored:
        txn.serialize()
    for _ in range(4):
        txn.ack(sub, take(sub))
    assert received(sub) == ["4", "5", "6", "7", "8"]
    txn.commit()
    assert received(sub) == []


# -- cursors ---------------------------------------------------------------------------


@pytest.mark.parametrize("type", ["exclusive", "shared"])
def test_a_cursor_stays_short_over_markers_and_aborted_messages(
    client: txnkv.Client, topic: txnkv.Topic, type: str
) -> None:
    sub = topic.subscribe("s", type=type)
    for number in range(6):
        txn = client.new_transaction()
        txn.serialize()
        txn.send(topic, f"m{number}")
        txn.flush()
        (txn.rollback if number % 3 == 2 else txn.commit)()
    assert received(sub) == ["m0", "m1", "m3", "m4"]
    ends = topic.end_offsets()[0]
    assert ends == 12
    found = [MessageId(0, offset) for offset in (0, 2, 6, 8)]
    for id in reversed(found):
        with client.transaction() as txn:
            txn.ack(sub, id)
    sub.close()
    if type == "exclusive":
        assert cursor_rows(client) == [(12,)]
        assert topic.subscribe("s").lag() == {0: 0}
    else:
        assert cursor_rows(client) == [(9,)]
    assert left_over(client) == 0


@pytest.mark.parametrize("type", ["exclusive", "shared"])
def test_a_cursor_over_a_large_message(client: txnkv.Client, type: str) -> None:
    client.instance.topics.create("events", 1, "marker", TopicOptions(max_message_bytes=1000))
    topic = client.topic("events")
    send(client, "a")
    send(client, "x" * 5000)
    send(client, "b")
    sub = topic.subscribe("s", type=type)
    first, large, last = sub.receive_many(3, timeout=0)
    assert len(large.value or b"") == 5000
    sub.ack([first, last])
    sub.close()
    sub = topic.subscribe("s", type=type)
    (again,) = sub.receive_many(3, timeout=0)
    assert again == large
    sub.nack(again)
    assert take(sub) == large
    with client.transaction() as txn:
        txn.ack(sub, large)
    assert received(sub) == []
    assert cursor_rows(client) == [(last.offset + 1,)]
    assert sub.lag() == {0: 0}


def test_cursors_follow_retention(
    client: txnkv.Client, topic: txnkv.Topic, by_hand: Callable[[txnkv.Client], None]
) -> None:
    send(client, *range(10))
    client.instance.engine.flush()
    sub, shared = topic.subscribe("s"), topic.subscribe("shared", type="shared")
    sub.ack(take(sub))
    late = topic.subscribe("late", type="shared")
    first = take(late)
    (partition,) = client.instance.topics.partitions(topic.info)
    partition.environment.write(lambda txn: partition.log.advance_start(txn, 10))
    send(client, "next")
    by_hand(client)
    assert received(shared) == ["next"]
    assert [m.offset for m in sub.receive_many(100, timeout=0)][-1] == 10
    assert sub.lag()[0] <= 1
    late.nack(first)
    assert received(late) == ["next"]
    assert received(topic.subscribe("new")) == ["next"]


# -- negative acks, leases, dead letters -----------------------------------------------


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
        assert [m.offset for m in (take(sub),)] == [3]
        again = {}
        while len(again) < 2:
            for message in sub.receive_many(10, timeout=60):
                again[message.offset] = message.redelivery_count
        assert set(again) == {2, 3}
        assert all(count > 0 for count in again.values())
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


# -- one consumer ----------------------------------------------------------------------


def test_an_exclusive_subscription_has_one_consumer(
    client: txnkv.Client, topic: txnkv.Topic, process: Callable[..., Any]
) -> None:
    sub = topic.subscribe("s")
    with pytest.raises(txnkv.UnavailableError, match="this process"):
        topic.subscribe("s")
    code = """
try:
    client.topic("events").subscribe("s")
except txnkv.UnavailableError as error:
    say(str(error))
"""
    assert f"process {os.getpid()}" in process(code).finish()
    sub.close()
    topic.subscribe("s").close()


@pytest.mark.parametrize("options", [{}, {"ack_timeout": 3600}])
def test_consumers_of_a_failover_subscription_wait_for_the_place(
    client: txnkv.Client, topic: txnkv.Topic, options: dict[str, Any]
) -> None:
    send(client, *range(3))
    first = topic.subscribe("s", "failover", **options)
    second, third = (topic.subscribe("s", "failover") for _ in range(2))
    assert received(second) == received(third) == []
    got = first.receive_many(3, timeout=0)
    first.ack(got[0])
    assert (first.is_active, second.is_active) == (True, False)
    second.nack(got[1])  # of no effect
    with pytest.raises(txnkv.UnavailableError, match="has a consumer"):
        topic.subscribe("s", "failover", redelivery_delay=7.0)
    found: list[str] = []
    waiting = threading.Thread(target=lambda: found.extend([str(second.receive(timeout=60))]))
    waiting.start()
    txn = client.new_transaction()
    txn.ack(first, got[1])
    first.close()
    waiting.join(60)
    assert "0:2" in found[0]
    assert received(third) == []
    second.ack_cumulative(MessageId(0, 0))
    txn.rollback()
    assert received(second) == ["1"]
    second.close()
    assert received(third) == ["1", "2"]
    third.close()


def test_a_killed_consumer_is_followed_by_one_that_waits(
    client: txnkv.Client, topic: txnkv.Topic, process: Callable[..., Any]
) -> None:
    send(client, 0)
    code = """
sub = client.topic("events").subscribe("s", "failover")
say(sub.receive(timeout=60).offset)
wait()
"""
    killed = process(code)
    assert killed.hear() == 0
    with topic.subscribe("s", "failover") as sub:
        assert received(sub) == []
        killed.kill()
        message = sub.receive(timeout=60)
        assert message is not None
        assert message.offset == 0


def test_a_dropped_consumer_gives_its_place(
    client: txnkv.Client, topic: txnkv.Topic, until: Callable[..., Any]
) -> None:
    send(client, 0)
    sub = topic.subscribe("s")
    take(sub)
    del sub

    def again() -> Any:
        try:
            return topic.subscribe("s")
        except txnkv.UnavailableError:
            return None

    assert received(until(again)) == ["0"]


@pytest.mark.parametrize("options", [{}, {"type": "shared"}, {"max_deliveries": 9}])
def test_what_a_killed_consumer_had_is_delivered_at_once(
    client: txnkv.Client, topic: txnkv.Topic, process: Callable[..., Any], options: dict[str, Any]
) -> None:
    send(client, *range(5))
    child = process(
        """
sub = client.topic("events").subscribe("s", **how)
got = sub.receive_many(3, timeout=0)
sub.ack(got[0])
txn = client.new_transaction()
txn.ack(sub, got[1])
say([m.value for m in got])
wait()
""",
        how=options,
    )
    assert child.hear() == [b"0", b"1", b"2"]
    other = topic.subscribe("s", **options) if options.get("type") == "shared" else None
    if other is not None:
        assert received(other) == ["3", "4"]
        other.ack([MessageId(0, 3), MessageId(0, 4)])
    child.kill()
    if other is not None:
        for value in (b"1", b"2"):  # what was acknowledged may come back before what was leased
            assert [m.value for m in other.receive_many(1, timeout=20)] == [value]
    else:
        assert received(topic.subscribe("s", **options)) == ["1", "2", "3", "4"]


def test_a_stored_transaction_of_a_killed_consumer_keeps_its_acks(
    client: txnkv.Client, topic: txnkv.Topic, process: Callable[..., Any]
) -> None:
    send(client, *range(3))
    for type in ("exclusive", "shared"):
        child = process(
            """
sub = client.topic("events").subscribe(type, type)
got = sub.receive_many(3, timeout=0)
txn = client.new_transaction()
token = str(txn.serialize())
txn.ack(sub, got[1])
say(token)
wait()
""",
            type=type,
        )
        token = child.hear()
        child.kill()
        sub = topic.subscribe(type, type)
        found = [m.value for m in sub.receive_many(5, timeout=20)]
        assert found == [b"0", b"2"]
        txnkv.Transaction.deserialize(client, token).rollback()
        assert [m.value for m in sub.receive_many(5, timeout=20)] == [b"1"]


def test_what_came_back_to_a_consumer_does_not_pile_up(
    client: txnkv.Client, topic: txnkv.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row stayed for each ack of a stored transaction that was aborted."""
    monkeypatch.setattr(exclusive, "_MANY", 5)
    send(client, "x")
    sub = topic.subscribe("s")
    for _ in range(23):
        message = take(sub)
        assert left_over(client) <= 5
        txn = client.new_transaction()
        txn.serialize()
        txn.ack(sub, message)
        txn.rollback()
    assert received(sub) == ["x"]


# -- other processes -------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"type": "shared"}])
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_acks_by_token_from_another_process(
    client: txnkv.Client,
    topic: txnkv.Topic,
    elsewhere: Callable[..., Any],
    options: dict[str, Any],
    end: str,
) -> None:
    send(client, *range(4))
    sub = topic.subscribe("s", **options)
    got = sub.receive_many(4, timeout=0)
    txn = client.new_transaction()
    txn.ack(sub, got[0])
    code = """
import pickle
joined = txnkv.Transaction.deserialize(client, token)
joined.ack(pickle.loads(info), id)
joined.flush()
"""
    token, info = str(txn.serialize()), pickle.dumps(sub.info)
    elsewhere(code, token=token, info=info, id=got[2].id)
    with pytest.raises(txnkv.AckConflictError):
        sub.ack(got[2], client.new_transaction())
    sub.ack(got[2])  # dropped
    assert received(sub) == []
    getattr(txn, end)()
    assert received(sub) == ([] if end == "commit" else ["0", "2"])
    sub.close()
    left = received(topic.subscribe("s", **options))
    assert left == (["1", "3"] if end == "commit" else ["0", "1", "2", "3"])


@pytest.mark.parametrize("options", [{}, {"type": "shared"}])
def test_a_late_ack_by_token_is_refused(
    client: txnkv.Client,
    topic: txnkv.Topic,
    elsewhere: Callable[..., Any],
    options: dict[str, Any],
) -> None:
    """In Pulsar it stayed pending until a later transaction committed."""
    send(client, *range(3))
    sub = topic.subscribe("s", **options)
    got = sub.receive_many(3, timeout=0)
    txn = client.new_transaction()
    token = str(txn.serialize())
    txn.ack(sub, got[0])
    txn.commit()
    code = """
late = txnkv.Transaction.deserialize(client, token)
try:
    late.ack(info, id)
    late.flush()
except txnkv.InvalidTxnStateError:
    say("refused")
"""
    assert elsewhere(code, token=token, info=sub.info, id=got[1].id) == "refused"
    assert left_over(client) == (2 if options else 0)  # leases
    sub.close()
    assert received(topic.subscribe("s", **options)) == ["1", "2"]


def test_an_ack_elsewhere_wins_over_a_later_one_here(
    client: txnkv.Client, topic: txnkv.Topic, elsewhere: Callable[..., Any]
) -> None:
    send(client, 0)
    sub = topic.subscribe("s")
    message = take(sub)
    first, second = client.new_transaction(), client.new_transaction()
    code = """
import pickle
joined = txnkv.Transaction.deserialize(client, token)
joined.ack(pickle.loads(info), id)
"""
    token, info = str(first.serialize()), pickle.dumps(sub.info)
    elsewhere(code, token=token, info=info, id=message.id)
    with pytest.raises(txnkv.AckConflictError):
        second.ack(sub, message)
    assert second.state is txnkv.TxnState.ABORTED
    first.commit()
    assert received(sub) == []


def test_many_processes_share_without_loss_or_double(
    client: txnkv.Client, topic: txnkv.Topic, process: Callable[..., Any]
) -> None:
    count = 200
    send(client, *range(count))
    out = client.create_topic("out")
    code = """
sub = client.topic("events").subscribe("s", type="shared")
done = 0
while (message := sub.receive(timeout=1.0)) is not None:
    with client.transaction() as txn:
        txn.send("out", message.value)
        txn.ack(sub, message)
    done += 1
say(done)
"""
    children = [process(code) for _ in range(3)]
    done = [child.finish() for child in children]
    assert sum(done) == count
    assert sorted(map(int, received(out.subscribe("look")))) == list(range(count))
    assert topic.subscribe("s", type="shared").lag() == {0: 0}


def test_killed_workers_lose_and_double_nothing(
    client: txnkv.Client, topic: txnkv.Topic, process: Callable[..., Any]
) -> None:
    count = 60
    send(client, *range(count))
    out = client.create_topic("out")
    code = """
sub = client.topic("events").subscribe("s", type="shared")
while (message := sub.receive(timeout=30)) is not None:
    with client.transaction() as txn:
        txn.send("out", message.value)
        txn.ack(sub, message)
    say()
"""
    for killed in range(4):
        child = process(code)
        for _ in range(3 + killed):
            child.hear()
        child.kill()
    sub = topic.subscribe("s", type="shared")
    while (message := sub.receive(timeout=0.5)) is not None:
        with client.transaction() as txn:
            txn.send("out", message.value)
            txn.ack(sub, message)
    assert sorted(map(int, received(out.subscribe("look")))) == list(range(count))


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


# -- threads ---------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"type": "shared"}])
def test_threads_acknowledge_what_one_receives(
    client: txnkv.Client, topic: txnkv.Topic, options: dict[str, Any]
) -> None:
    count = 120
    send(client, *range(count))
    sub = topic.subscribe("s", **options)
    messages = sub.receive_many(count, timeout=0)

    def work(part: list[Any]) -> None:
        for number, message in enumerate(part):
            if number % 3 == 0:
                sub.ack(message)
            elif number % 3 == 1:
                with client.transaction() as txn:
                    txn.ack(sub, message)
            else:
                txn = client.new_transaction()
                txn.ack(sub, message)
                txn.rollback()

    threads = [threading.Thread(target=work, args=(messages[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    back = [int(value) for value in received(sub)]
    assert sorted(back) == sorted(
        int(m.value or b"") for i in range(4) for m in messages[i::4][2::3]
    )
    sub.ack([MessageId(0, offset) for offset in back])
    assert sub.lag() == {0: 0}
    assert left_over(client) == 0


@pytest.mark.parametrize("options", [{}, {"type": "shared"}])
def test_threads_send_and_acknowledge_in_one_transaction(
    client: txnkv.Client, topic: txnkv.Topic, options: dict[str, Any]
) -> None:
    send(client, *range(300))
    sub = topic.subscribe("s", **options)
    messages = sub.receive_many(300, timeout=0)
    txn = client.new_transaction()
    errors: list[BaseException] = []

    def work(part: list[Any]) -> None:
        try:
            for message in part:
                txn.send(topic, "again")
                txn.ack(sub, message)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(messages[i::30],)) for i in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    txn.commit()
    assert received(sub) == ["again"] * 300
    assert sub.lag() == {0: 300}


def test_two_transactions_that_race_for_a_message(client: txnkv.Client, topic: txnkv.Topic) -> None:
    send(client, *range(30))
    sub = topic.subscribe("s")
    messages = sub.receive_many(30, timeout=0)
    won: list[int] = []
    start = threading.Barrier(3)

    def race() -> None:
        for message in messages:
            start.wait()
            txn = client.new_transaction()
            try:
                txn.ack(sub, message)
                txn.commit()
            except txnkv.AckConflictError:
                continue
            won.append(message.offset)

    threads = [threading.Thread(target=race) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == list(range(30))
    assert received(sub) == []


def test_an_ack_is_durable_when_it_returns(client: txnkv.Client, topic: txnkv.Topic) -> None:
    send(client, 0, 1)
    sub = topic.subscribe("s")
    sub.ack(take(sub))
    assert client.instance.store.runtime.all_synced()


def test_time_is_not_wasted_on_an_idle_subscription(
    client: txnkv.Client, topic: txnkv.Topic
) -> None:
    sub = topic.subscribe("s", type="shared")
    before = client.instance.store.runtime.change_word()
    began = time.process_time()
    assert sub.receive(timeout=0.3) is None
    assert client.instance.store.runtime.change_word() == before
    assert time.process_time() - began < 0.3
