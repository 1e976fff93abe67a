"""Subscriptions: who gets which message, when it comes again, and what survives whom."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import txnkv
from tests import internals
from tests.topics.subscriptions.subscription_tools import (
    cursor_rows,
    left_over,
    received,
    send,
    take,
)
from txnkv.topics import subscription_catalog
from txnkv.topics.delivery import redelivery
from txnkv.topics.messages.message import MessageId
from txnkv.topics.topic_catalog import TopicOptions

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
        {"type": "sticky"},
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
        {"type": "key_shared", "partitions": [0]},
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
    assert internals.topics(client).subscriptions.drop(sub.info)
    with pytest.raises(txnkv.TopicNotFoundError, match="dropped"):
        sub.receive(timeout=0)
    for ask in (
        sub.lag,
        sub.committed,
        sub.lost,
        partial(sub.ack, first),
        partial(sub.nack, first),
    ):
        with pytest.raises(txnkv.TopicNotFoundError, match="dropped"):
            ask()
    with (
        pytest.raises(txnkv.TopicNotFoundError, match="dropped"),
        client.new_session() as session,
    ):
        session.ack(sub, first)
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


def test_dropping_a_subscription_reads_no_other(
    topic: txnkv.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        topic.subscribe(name).close()
    with monkeypatch.context() as patch:
        patch.setattr(subscription_catalog, "of_topic", None)
        topic.drop_subscription("a")
        topic.drop_subscription("a", missing_ok=True)
    with pytest.raises(txnkv.TopicNotFoundError, match="no subscription 'a' to drop; it has: b"):
        topic.drop_subscription("a")


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
    internals.topics(client).create("events", 1, "marker", TopicOptions(max_message_bytes=1000))
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
    internals.flush(client)
    sub, shared = topic.subscribe("s"), topic.subscribe("shared", type="shared")
    sub.ack(take(sub))
    late = topic.subscribe("late", type="shared")
    first = take(late)
    (partition,) = internals.topics(client).partitions(topic.info)
    partition.environment.write(lambda txn: partition.log.advance_start(txn, 10))
    send(client, "next")
    by_hand(client)
    assert received(shared) == ["next"]
    assert [m.offset for m in sub.receive_many(100, timeout=0)][-1] == 10
    assert sub.lag()[0] <= 1
    late.nack(first)
    assert received(late) == ["next"]
    assert received(topic.subscribe("new")) == ["next"]
