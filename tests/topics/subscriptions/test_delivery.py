"""Delivery when something fails, and what it costs when nothing is to be delivered."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import txnkv
from tests import internals
from tests.topics.subscriptions.subscription_tools import received, send, take
from txnkv.errors import CorruptionError, StorageFullError
from txnkv.topics.delivery import leases, redelivery
from txnkv.topics.messages.message import MessageId
from txnkv.topics.read.offset_reader import OffsetReader
from txnkv.topics.topic_catalog import TopicOptions
from txnkv.transaction.transaction import Transaction

KINDS: list[dict[str, Any]] = [{}, {"type": "shared"}, {"max_deliveries": 9}]


class Failing:
    """A function that fails at chosen calls.

    Attributes:
        calls: so many there were.
    """

    def __init__(self, real: Any, error: Exception, *at: int) -> None:
        self._real = real
        self._error = error
        self._at = at
        self.calls = 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls in self._at:
            raise self._error
        return self._real(*args, **options)


def tolerant(sub: txnkv.Subscription, rounds: int = 20) -> list[str]:
    """Return what a consumer is given in some rounds, whatever is raised in between."""
    found: list[str] = []
    for _ in range(rounds):
        try:
            found += received(sub, 4)
        except txnkv.TxnkvError:
            continue
    return found


# -- nothing loses its place -----------------------------------------------------------


@pytest.mark.parametrize("type", ["exclusive", "shared"])
@pytest.mark.parametrize("first", [True, False])
def test_a_dead_letter_that_cannot_be_written_loses_no_place(
    client: txnkv.Client,
    topic: txnkv.Topic,
    type: Any,
    first: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`receive_many` had claimed five messages, raised for one, and forgot the other four."""
    send(client, *range(5))
    sub = topic.subscribe("s", type=type, max_deliveries=1)
    given = sub.receive_many(5, timeout=0)
    spent = given[:1] if first else given[3:4]
    sub.nack(spent)
    sub.ack([m for m in given if m not in spent])
    send(client, *range(5, 9))
    failing = Failing(Transaction.begin, StorageFullError("no room"), *range(1, 4))
    monkeypatch.setattr(Transaction, "begin", failing)
    with caplog.at_level(logging.WARNING, "txnkv"):
        assert received(sub) == ["5", "6", "7", "8"]
    assert "cannot give up" in caplog.text
    for _ in range(2):
        with pytest.raises(StorageFullError):
            received(sub)
    assert received(sub) == []
    dead = received(client.topic("events.s.dead").subscribe("look"))
    assert dead == [(m.value or b"").decode() for m in spent]


def letters(client: txnkv.Client) -> list[str]:
    found = client.topic("events.s.dead").consumer().poll(max_messages=10_000, timeout=0)
    return [(m.value or b"").decode() for m in found]


def spent(client: txnkv.Client, topic: txnkv.Topic, n: int, **options: Any) -> txnkv.Subscription:
    """A consumer of a subscription whose first messages are to be given up; one more is good."""
    send(client, *range(n))
    sub = topic.subscribe("s", max_deliveries=1, **options)
    given: list[txnkv.Message] = []
    while len(given) < n:
        given += sub.receive_many(n, timeout=0)
    sub.nack(given)
    send(client, "good")
    return sub


@pytest.mark.parametrize("type", ["exclusive", "shared", "key_shared"])
def test_dead_letters_are_written_together(
    client: txnkv.Client, topic: txnkv.Topic, type: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each was a transaction of its own: 4,000 took 4 to 12 s."""
    sub = spent(client, topic, 1200, type=type)
    begins = Failing(Transaction.begin, RuntimeError())
    monkeypatch.setattr(Transaction, "begin", begins)
    assert [m.value for m in sub.receive_many(10, timeout=60)] == [b"good"]
    assert begins.calls <= 3
    assert letters(client) == [str(n) for n in range(1200)]


@pytest.mark.parametrize("type", ["shared", "key_shared"])
@pytest.mark.parametrize("most", [1, 2000])
def test_leases_do_not_run_out_behind_dead_letters(
    client: txnkv.Client, topic: txnkv.Topic, now: Any, monkeypatch: pytest.MonkeyPatch,
    type: Any, most: int,
) -> None:  # fmt: skip
    """Good messages came when all dead letters were written: then others had claimed them."""
    sub = spent(client, topic, 1500, type=type, lease_seconds=100)
    real = Transaction.begin

    def slow(*args: Any) -> Any:
        now.forward(45)
        return real(*args)

    monkeypatch.setattr(Transaction, "begin", slow)
    found = sub.receive_many(most, timeout=1000)
    assert [(m.value, m.redelivery_count) for m in found] == [(b"good", 0)]
    assert topic.subscribe("s", type=type).receive(timeout=0) is None
    sub.ack(found)
    while len(letters(client)) < 1500:
        assert received(sub) == []
    assert sorted(map(int, letters(client))) == list(range(1500))
    assert sub.lag() == {0: 0}


def test_dead_letters_go_alone_where_one_was_acknowledged_after_all(
    client: txnkv.Client, topic: txnkv.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    sub = spent(client, topic, 5, type="shared")
    real, calls = Transaction.begin, iter(range(100))

    def late(*args: Any) -> Any:
        if next(calls) == 0:
            sub.ack(MessageId(0, 2))
        return real(*args)

    monkeypatch.setattr(Transaction, "begin", late)
    assert received(sub) == ["good"]
    assert letters(client) == ["0", "1", "3", "4"]
    assert next(calls) == 6


def test_dead_letters_do_not_wait_for_what_cannot_be_read(
    client: txnkv.Client, topic: txnkv.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    sub = spent(client, topic, 5, type="shared")
    take = Failing(redelivery.DeliveryReader.take, CorruptionError("damaged"), 2)
    monkeypatch.setattr(redelivery.DeliveryReader, "take", lambda self, most: take(self, most))
    with pytest.raises(CorruptionError):
        sub.receive_many(5, timeout=0)
    assert letters(client) == ["0", "1", "2", "3", "4"]
    assert received(sub) == ["good"]


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("at", range(1, 5))
def test_damage_in_the_midst_of_a_round_loses_no_place(
    client: txnkv.Client,
    options: dict[str, Any],
    at: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic = client.create_topic("wide", partitions=3)
    for number in range(3):
        send(client, f"{number}a", f"{number}b", topic="wide", partition=number)
    sub = topic.subscribe("s", **options)
    half = sub.receive_many(3, timeout=0)
    sub.nack(half)
    damage = CorruptionError("damaged")
    failing = Failing(OffsetReader.load, damage, at, at + 1)
    monkeypatch.setattr(OffsetReader, "load", lambda self, **more: failing(self, **more))
    every = ["0a", "0b", "1a", "1b", "2a", "2b"]
    assert sorted(tolerant(sub)) == every
    assert failing.calls > at


@pytest.mark.parametrize("options", KINDS[1:])
@pytest.mark.parametrize("at", [1, 2])
def test_a_disk_that_is_full_while_messages_are_claimed_loses_no_place(
    client: txnkv.Client,
    topic: txnkv.Topic,
    options: dict[str, Any],
    at: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send(client, *range(6))
    sub = topic.subscribe("s", **options)
    sub.nack(sub.receive_many(2, timeout=0))
    failing = Failing(leases.new_lease, StorageFullError("no room"), at)
    monkeypatch.setattr(leases, "new_lease", failing)
    assert sorted(tolerant(sub)) == ["0", "1", "2", "3", "4", "5"]
    assert failing.calls > at


@pytest.mark.parametrize("options", KINDS)
def test_a_message_that_is_damaged_keeps_no_other_back(
    client: txnkv.Client,
    topic: txnkv.Topic,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send(client, *range(3))
    sub = topic.subscribe("s", **options)
    first = take(sub)
    sub.nack(first)
    real = redelivery.read_range

    def read_range(engine: Any, partition: Any, begin: int, end: int, isolation: str) -> Any:
        if begin <= first.offset < end:
            raise CorruptionError("damaged")
        return real(engine, partition, begin, end, isolation)

    with monkeypatch.context() as damaged:
        damaged.setattr(redelivery, "read_range", read_range)
        damaged.setattr(leases, "read_range", read_range)
        found = tolerant(sub)
        with pytest.raises(CorruptionError):
            received(sub)
    assert sorted(found + received(sub)) == ["0", "1", "2"]


# -- large messages --------------------------------------------------------------------


@pytest.mark.parametrize("options", KINDS)
def test_a_large_message_between_others_comes_back(
    client: txnkv.Client, options: dict[str, Any]
) -> None:
    """Pieces of one stand among the messages of another transaction: a consumer that went on
    behind the first pieces never had it.
    """
    internals.topics(client).create("events", 1, "marker", TopicOptions(max_message_bytes=1000))
    topic = client.topic("events")
    txn = client.new_transaction()
    txn.serialize()
    txn.send(topic, "x" * 1500)
    txn.flush()
    send(client, "between")
    txn.send(topic, "y" * 2500)
    txn.flush()
    txn.commit()
    send(client, "behind")
    sub = topic.subscribe("s", **options)
    given = sub.receive_many(9, timeout=0)
    assert [len(m.value or b"") for m in given] == [1500, 7, 2500, 6]
    sub.ack([given[1], given[3]])
    sub.nack(given[2])
    assert take(sub) == given[2]
    sub.close()
    again = topic.subscribe("s", **options)
    assert again.receive_many(9, timeout=0) == [given[0], given[2]]


def test_two_consumers_share_a_large_message_and_what_lies_between(client: txnkv.Client) -> None:
    internals.topics(client).create("events", 1, "marker", TopicOptions(max_message_bytes=1000))
    topic = client.topic("events")
    one, two = (topic.subscribe("s", type="shared") for _ in range(2))
    send(client, "x" * 1500, "y" * 1500)
    first = take(one)
    assert len(take(two).value) == 1500
    one.ack(first)
    assert one.receive(timeout=0) is two.receive(timeout=0) is None


# -- looks and writes ------------------------------------------------------------------


def writes(client: txnkv.Client) -> int:
    number = internals.store(client).runtime.change_number()
    assert number is not None
    return number


def test_a_shared_consumer_that_has_nothing_to_claim_writes_nothing(client: txnkv.Client) -> None:
    """One that reads partition 0 claimed again and again while leases of partition 1 were due:
    446 writes of status.db in 5 s.
    """
    topic = client.create_topic("wide", partitions=2)
    send(client, 0, topic="wide", partition=1)
    other = topic.subscribe("s", type="shared", partitions=[1])
    other.nack(take(other))
    held = topic.subscribe("s", type="shared", partitions=[0])
    send(client, 1, topic="wide", partition=0)
    txn = client.new_transaction()
    txn.ack(held, take(held))
    before = writes(client)
    for _ in range(20):
        assert held.receive(timeout=0.002) is None
    assert writes(client) == before
    txn.rollback()
    assert received(held) == ["1"]


def test_a_receive_looks_at_no_more_leases_than_it_takes(
    client: txnkv.Client, topic: txnkv.Topic, now: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each `receive` had read all leases that were due: 35 ms with 20,000 of them."""
    send(client, *range(500))
    sub = topic.subscribe("s", type="shared", lease_seconds=10)
    assert len(received(sub)) == 500
    now.forward(11)
    leased = Failing(leases._lease, AssertionError())
    monkeypatch.setattr(leases, "_lease", leased)
    steps = 0
    for number in range(10):
        before = leased.calls
        assert received(sub, 1) == [str(number)]
        steps += leased.calls - before
    assert steps == 10
    assert received(sub) == [str(number) for number in range(10, 500)]


def test_a_lease_that_runs_out_while_others_are_read_gives_its_message_once(
    client: txnkv.Client, topic: txnkv.Topic, now: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(client, *range(10))
    sub = topic.subscribe("s", type="shared", lease_seconds=10)
    sub.nack(sub.receive_many(10, timeout=0))
    real, calls = leases.LeaseReader._read_again, iter(range(100))

    def slow(*args: Any) -> Any:
        if next(calls) == 5:
            now.forward(11)
        return real(*args)

    monkeypatch.setattr(leases.LeaseReader, "_read_again", slow)
    assert sorted(received(sub)) == [str(n) for n in range(10)]


@pytest.mark.parametrize(("seconds", "claims"), [(1, 3), (3, 1), (11, 2), (30, 1)])
def test_a_receive_ends_where_claiming_takes_longer_than_a_lease(
    client: txnkv.Client, topic: txnkv.Topic, now: Any, monkeypatch: pytest.MonkeyPatch,
    seconds: int, claims: int,
) -> None:  # fmt: skip
    """Its own leases ran out, were claimed again, and so on for ever."""
    send(client, *range(100))
    sub = topic.subscribe("s", type="shared", lease_seconds=10)
    real, calls = leases.LeaseReader._claim, iter(range(20))

    def slow(*args: Any) -> Any:
        next(calls)
        found = real(*args)
        now.forward(seconds)
        return found

    monkeypatch.setattr(redelivery, "AHEAD", 10)
    monkeypatch.setattr(leases.LeaseReader, "_claim", slow)
    found = sub.receive_many(100, timeout=0)
    assert next(calls) == claims
    assert [m.offset for m in found] == list(range(len(found)))
    assert found


@pytest.mark.parametrize(("type", "module"), [("shared", leases), ("exclusive", redelivery)])
def test_messages_that_come_again_are_read_together(
    client: txnkv.Client, topic: txnkv.Topic, monkeypatch: pytest.MonkeyPatch,
    type: Any, module: Any,
) -> None:  # fmt: skip
    for n in range(100):
        send(client, n)
    sub = topic.subscribe("s", type=type)
    given = sub.receive_many(100, timeout=0)
    sub.nack(given[::2])
    reads = Failing(module.read_range, RuntimeError())
    monkeypatch.setattr(module, "read_range", reads)
    assert received(sub) == [str(n) for n in range(0, 100, 2)]
    assert reads.calls == 1
    sub.nack(given[::3])
    assert [received(sub, 1) for _ in given[::3]] == [[str(n)] for n in range(0, 100, 3)]
    assert received(sub) == []


def test_damage_between_messages_that_come_again_holds_them_back_once(
    client: txnkv.Client, topic: txnkv.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(client, *range(4))
    sub = topic.subscribe("s")
    sub.nack(sub.receive_many(4, timeout=0)[::2])
    real = redelivery.read_range

    def damaged(*args: Any) -> Any:
        for message in real(*args):
            if message.offset == 1:
                raise CorruptionError("damaged")
            yield message

    monkeypatch.setattr(redelivery, "read_range", damaged)
    assert [received(sub), received(sub), received(sub)] == [["0"], ["2"], []]


@pytest.mark.parametrize("type", ["shared", "key_shared"])
def test_markers_between_looks_leave_no_rows(
    client: txnkv.Client, topic: txnkv.Topic, type: Any
) -> None:
    """A consumer that keeps up passes each marker with nothing behind it. It left a row of acked
    ranges for each transaction, and each claim read them all.
    """
    internals.topics(client).create("large", 1, "marker", TopicOptions(max_message_bytes=50))
    with client.topic("large").subscribe("s", type) as sub:
        for number in range(20):
            with client.transaction() as txn:
                txn.serialize()  # it has a marker
                txn.send("large", "x" * (200 if number % 3 == 1 else 1))
            while found := sub.receive_many(9, timeout=0):
                sub.ack(found)
        with internals.status(client).read() as cur:
            rows = cur.execute("SELECT count(*) FROM acked_ranges").get
        assert rows <= 1
        end = client.topic("large").end_offsets()[0]
        assert sub.committed()[0] >= end - 2


# -- what is not to be delivered -------------------------------------------------------


@pytest.mark.parametrize("order", ["offset", "commit"])
@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_messages_that_are_acknowledged_before_they_are_read(
    client: txnkv.Client, topic: txnkv.Topic, order: Any, at_once: int
) -> None:
    """One by one, some of them in a transaction that is open, or is rolled back."""
    early = client.new_transaction()
    early.send(topic, "0", partition=0)
    early.serialize()  # it has its offset from here on
    send(client, *range(1, 10), partition=0)
    sub = topic.subscribe("s", order=order)
    early.commit()
    places = {message.value: message.id for message in _all(topic)}
    txn = client.new_transaction()
    txn.ack(sub, [places[b"0"], places[b"4"]])
    sub.ack(places[b"7"])
    order_of = list(map(str, [*range(1, 10), 0] if order == "commit" else range(10)))
    given: list[str] = []
    while some := received(sub, at_once):
        given += some
    assert given == [value for value in order_of if value not in "047"]
    txn.rollback()
    assert received(sub, 10) == ["0", "4"]


def test_messages_below_a_cumulative_ack(client: txnkv.Client, topic: txnkv.Topic) -> None:
    """Of an open transaction: nobody is given them while it is open."""
    send(client, *range(8), partition=0)
    sub = topic.subscribe("s")
    places = [message.id for message in _all(topic)]
    txn = client.new_transaction()
    txn.ack_cumulative(sub, places[4])
    assert received(sub, 2) == ["5", "6"]
    txn.rollback()
    assert received(sub, 10) == ["0", "1", "2", "3", "4", "7"]


def test_what_an_attempt_has_acknowledged_waits_for_the_run(
    client: txnkv.Client, topic: txnkv.Topic
) -> None:
    """It is the run's, whose next attempt takes it again: it is not given again in between."""
    send(client, *range(3), partition=0)
    sub = topic.subscribe("s")
    message = take(sub)
    seen: list[list[str]] = []

    def attempt(txn: txnkv.Transaction) -> None:
        if seen:
            sub.nack(message)
            seen.append(received(sub, 1))
        txn.ack(sub, message)
        if not seen:
            seen.append([])
            raise txnkv.TransactionConflictError("once more")

    client.run(attempt)
    assert seen == [[], ["1"]]
    assert received(sub, 5) == ["2"]


def _all(topic: txnkv.Topic) -> list[txnkv.Message]:
    with topic.consumer() as consumer:
        return sorted(consumer.poll(max_messages=100, timeout=0), key=lambda message: message.id)
