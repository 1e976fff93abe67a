"""Messages that are sent with `deliver_at`: shared subscriptions deliver them no sooner."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import txnkv
from tests import internals
from tests.topics.subscriptions.subscription_tools import cursor_rows, left_over, received, take
from txnkv.storage.clocks import EPOCH_SECONDS, clock
from txnkv.topics import subscription_catalog
from txnkv.topics.messages.message import MessageId
from txnkv.topics.overview import held_messages

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Clocks:
    """The two clocks of this process, each so many seconds ahead of the real one."""

    def __init__(self) -> None:
        self.wall = self.monotonic = 0.0

    def forward(self, seconds: float) -> None:
        self.wall += seconds
        self.monotonic += seconds


@pytest.fixture
def clocks() -> Iterator[Clocks]:
    moved = Clocks()
    wall, monotonic = clock.now_micros, clock.monotonic_micros
    with clock.replaced(
        wall=lambda: wall() + int(moved.wall * 1e6),
        monotonic=lambda: monotonic() + int(moved.monotonic * 1e6),
    ):
        yield moved


def later(seconds: float) -> datetime:
    return EPOCH + timedelta(seconds=EPOCH_SECONDS + seconds, microseconds=clock.now_micros())


def send(client: txnkv.Client, *messages: tuple[str, float | None], topic: str = "events") -> None:
    with client.transaction() as txn:
        for value, seconds in messages:
            txn.send(topic, value, deliver_at=None if seconds is None else later(seconds))


@pytest.fixture
def sub(topic: txnkv.Topic) -> txnkv.Subscription:
    return topic.subscribe("s", type="shared", lease_seconds=3600)


def test_a_message_waits_for_its_time_and_keeps_no_other_waiting(
    client: txnkv.Client, sub: txnkv.Subscription, clocks: Clocks
) -> None:
    send(client, ("late", 3000), ("now", None), ("soon", 1000), ("past", -60))
    assert received(sub) == ["now", "past"]
    clocks.forward(900)
    assert received(sub) == []
    clocks.forward(101)
    soon = take(sub)
    assert (soon.value, soon.redelivery_count) == (b"soon", 0)
    clocks.forward(2000)
    late = take(sub)
    assert (late.value, late.redelivery_count) == (b"late", 0)
    assert received(sub) == []
    sub.ack([MessageId(0, offset) for offset in range(4)])
    assert left_over(client) == 0
    assert [mark for (mark,) in cursor_rows(client)] == [4]


@pytest.mark.parametrize(
    "options", [{}, {"type": "failover"}, {"max_deliveries": 9}, {"ack_timeout": 3600}]
)
def test_subscriptions_in_the_order_of_offsets_do_not_wait(
    client: txnkv.Client, topic: txnkv.Topic, options: dict[str, Any]
) -> None:
    send(client, ("late", 60), ("now", None))
    assert received(topic.subscribe("s", **options)) == ["late", "now"]


def test_a_consumer_does_not_wait_and_sees_the_time(
    client: txnkv.Client, topic: txnkv.Topic
) -> None:
    at = datetime(2099, 5, 17, 12, 0, 0, 250, tzinfo=UTC)
    with client.transaction() as txn:
        txn.send(topic, "a", headers=[("h", b"1")], deliver_at=at)
        txn.send(topic, "b")
        txn.send(topic, "c", headers={"h": b"2"})
    with topic.producer() as producer:
        producer.send("d", deliver_at=at.astimezone()).result(60)
    with topic.consumer() as consumer:
        a, b, c, d = consumer.poll(timeout=60)
    assert [each.deliver_at for each in (a, b, c, d)] == [at, None, None, at]
    assert a.headers == [("h", b"1"), ("txnkv-deliver-at", b"4082702400000250")]


def test_passing_a_message_on_gives_it_its_new_time(
    client: txnkv.Client, topic: txnkv.Topic
) -> None:
    first, second = datetime(2098, 1, 1, tzinfo=UTC), datetime(2099, 1, 1, tzinfo=UTC)
    with client.transaction() as txn:
        txn.send(topic, "a", deliver_at=first)
    with topic.consumer() as consumer:
        (message,) = consumer.poll(timeout=60)
        with client.transaction() as txn:
            txn.send(topic, message.value, headers=message.headers, deliver_at=second)
        (again,) = consumer.poll(timeout=60)
    assert (again.deliver_at, len(again.headers)) == (second, 1)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"1", EPOCH + timedelta(microseconds=1)),
        (b"253402300799999999", datetime.max.replace(tzinfo=UTC)),
        (b"999999999999999999", datetime.max.replace(tzinfo=UTC)),
        (b"9999999999999999999", None),
        (b"", None),
        (b"-1", None),
        (b"tomorrow", None),
        (b"\xb2", None),
    ],
)
def test_the_header_may_be_given_by_hand(
    client: txnkv.Client,
    topic: txnkv.Topic,
    sub: txnkv.Subscription,
    value: bytes,
    expected: datetime | None,
) -> None:
    with client.transaction() as txn:
        txn.send(topic, "a", headers={"txnkv-deliver-at": value})
    with topic.consumer() as consumer:
        (message,) = consumer.poll(timeout=60)
    assert message.deliver_at == expected
    waits = expected is not None and expected > datetime.now(UTC)
    assert received(sub) == ([] if waits else ["a"])


@pytest.mark.parametrize(
    ("given", "error"),
    [(datetime(2099, 1, 1), ValueError), ("soon", TypeError), (60, TypeError)],
)
def test_a_time_without_zone_is_an_error(
    client: txnkv.Client, topic: txnkv.Topic, given: Any, error: type[Exception]
) -> None:
    with client.transaction() as txn:
        with pytest.raises(error, match="deliver_at"):
            txn.send(topic, "a", deliver_at=given)
        with topic.producer() as producer, pytest.raises(error, match="deliver_at"):
            producer.send("a", deliver_at=given)
    assert topic.end_offsets() == {0: 0}


@pytest.mark.parametrize("buffer", ["marker", "sidecar"])
def test_with_transactions(client: txnkv.Client, size: str, buffer: Any, clocks: Clocks) -> None:
    topic = client.create_topic("others", buffer=buffer)
    sub = topic.subscribe("s", type="shared", lease_seconds=3600)
    aborted, slow = client.new_transaction(timeout=None), client.new_transaction(timeout=None)
    aborted.send(topic, "aborted", deliver_at=later(10))
    slow.send(topic, "slow", deliver_at=later(10))
    send(client, ("quick", 10), topic="others")
    aborted.rollback()
    assert received(sub) == []
    clocks.forward(11)
    slow.flush()
    assert received(sub) == ["quick"]
    slow.commit()
    assert received(sub)[-1:] == ["slow"]
    clocks.forward(1000)
    assert received(sub) == []


def test_redelivery_asks_for_no_time(
    client: txnkv.Client, sub: txnkv.Subscription, clocks: Clocks
) -> None:
    send(client, ("a", 10))
    assert received(sub) == []
    clocks.forward(11)
    sub.nack(take(sub))
    again = take(sub)
    assert again.redelivery_count == 1
    txn = client.new_transaction()
    txn.ack(sub, again)
    txn.rollback()
    assert received(sub) == ["a"]


def test_an_ack_before_the_time_counts(
    client: txnkv.Client, sub: txnkv.Subscription, clocks: Clocks
) -> None:
    send(client, ("a", 10), ("b", 10), ("c", 10))
    assert received(sub) == []
    sub.ack(MessageId(0, 0))
    with client.transaction() as txn:
        txn.ack(sub, MessageId(0, 1))
    clocks.forward(11)
    assert received(sub) == ["c"]


def test_an_abort_gives_back_no_message_before_its_time(
    client: txnkv.Client, sub: txnkv.Subscription, clocks: Clocks
) -> None:
    send(client, ("a", 10), ("b", 10))
    txn = client.new_transaction()
    txn.ack(sub, MessageId(0, 0))
    assert received(sub) == []  # here the leases of both are made
    txn.ack(sub, MessageId(0, 1))
    txn.rollback()
    assert received(sub) == []
    clocks.forward(11)
    assert sorted(received(sub)) == ["a", "b"]
    assert received(sub) == []


def test_the_wall_clock_decides_however_it_jumps(
    client: txnkv.Client, sub: txnkv.Subscription, clocks: Clocks
) -> None:
    send(client, ("a", 100), ("b", 200))
    assert received(sub) == []
    clocks.monotonic += 1000
    assert received(sub) == []
    clocks.wall -= 500
    clocks.forward(300)
    assert received(sub) == []
    clocks.wall += 301
    assert received(sub) == ["a"]
    clocks.wall -= 1000  # what was delivered stays so, and its lease is of the other clock
    assert received(sub) == []
    clocks.wall += 1100
    assert received(sub) == ["b"]


def test_a_restart_of_the_machine_frees_no_message_before_its_time(
    connect: Callable[..., txnkv.Client], monkeypatch: pytest.MonkeyPatch, clocks: Clocks
) -> None:
    client = connect()
    topic = client.create_topic("events")
    send(client, ("a", 100), ("b", None))
    assert received(topic.subscribe("s", type="shared")) == ["b"]
    client.close()
    monkeypatch.setattr(subscription_catalog, "boot_id", lambda: "another")
    sub = connect().topic("events").subscribe("s", type="shared")
    assert received(sub) == ["b"]
    clocks.forward(101)
    assert received(sub)[:1] == ["a"]


def test_a_killed_consumer_frees_no_message_before_its_time(
    client: txnkv.Client,
    sub: txnkv.Subscription,
    process: Callable[..., Any],
    clocks: Clocks,
) -> None:
    send(client, ("late", 3600), ("now", None))
    other = process(
        """
        sub = client.topic("events").subscribe("s", type="shared", lease_seconds=3600)
        sub.receive_many(9, timeout=0)
        """,
        fault="leases.claimed=kill",
    )
    other.finish(-9)
    deadline = time.monotonic() + 60
    found: list[str] = []
    while not found and time.monotonic() < deadline:
        found = received(sub)
    assert found == ["now"]
    clocks.forward(3601)
    assert sorted({*received(sub), *found}) == ["late", "now"]


def test_one_that_waits_is_woken_when_the_time_comes(
    client: txnkv.Client, sub: txnkv.Subscription, topic: txnkv.Topic
) -> None:
    other = topic.subscribe("s", type="shared")
    found: list[Any] = []
    waiting = [
        threading.Thread(target=lambda one=one: found.append(one.receive(timeout=4)))
        for one in (sub, other)
    ]
    for thread in waiting:
        thread.start()
    at = datetime.now(UTC) + timedelta(seconds=1)
    with client.transaction() as txn:
        txn.send(topic, "a", deliver_at=at)
    while not found:
        time.sleep(0.001)
    assert timedelta(0) <= datetime.now(UTC) - at < timedelta(seconds=2)
    for thread in waiting:
        thread.join()
    assert sorted(each is None for each in found) == [False, True]


def test_seek_asks_for_the_time_again(
    client: txnkv.Client, sub: txnkv.Subscription, clocks: Clocks
) -> None:
    send(client, ("a", 10), ("b", None))
    assert received(sub) == ["b"]
    sub.seek(0, 0)
    assert received(sub) == ["b"]
    clocks.forward(11)
    assert received(sub) == ["a"]


def test_retention_takes_what_waits(client: txnkv.Client, clocks: Clocks) -> None:
    topic = client.create_topic("short")
    sub = topic.subscribe("s", type="shared", lease_seconds=3600)
    send(client, ("a", 10), ("b", 10), topic="short")
    assert received(sub) == []
    topic.truncate(1)
    clocks.forward(11)
    assert received(sub) == ["b"]
    sub.ack(MessageId(0, 1))
    assert left_over(client) == 0


def test_what_waits_is_shown(client: txnkv.Client, sub: txnkv.Subscription, clocks: Clocks) -> None:
    send(client, ("a", 100))
    assert received(sub) == []
    (held,) = held_messages(internals.topics(client), sub.info).held
    assert (held.state, held.pid, held.deliveries) == ("delayed", None, 0)
    assert held.seconds_left is not None
    assert 90 < held.seconds_left <= 100
    clocks.forward(101)
    (held,) = held_messages(internals.topics(client), sub.info).held
    assert held.state == "free"


def test_over_a_server(store_path: Path, client: txnkv.Client, topic: txnkv.Topic) -> None:
    from txnkv.server import Server

    at = datetime.now(UTC) + timedelta(hours=1)
    server = Server(str(store_path), "grpc://127.0.0.1:0")
    try:
        with txnkv.connect(f"grpc://127.0.0.1:{server.port}") as far:
            sub = far.topic("events").subscribe("s", type="shared")
            with far.transaction() as txn:
                txn.send("events", "late", headers={"h": b"1"}, deliver_at=at)
                txn.send("events", "now", deliver_at=datetime.now(UTC))
            far.topic("events").producer().send("late", deliver_at=at).result(60)
            first = sub.receive(timeout=60)
            assert first is not None
            assert first.value == b"now"
            assert sub.receive(timeout=0.2) is None
            with far.topic("events").consumer() as consumer:
                times = [each.deliver_at for each in consumer.poll(timeout=60)]
            assert times == [at, first.deliver_at, at]
            sub.close()
    finally:
        server.close()
