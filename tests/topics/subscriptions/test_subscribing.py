"""Subscribing: who is refused changes nothing, and what is not named stays as it is."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

import txnkv
import txnkv.aio
from tests import internals
from tests.topics.subscriptions.subscription_tools import received, send, take
from txnkv.topics.delivery.leases import LeaseReader
from txnkv.topics.messages.message import MessageId
from txnkv.topics.subscription_catalog import SubscriptionInfo
from txnkv.topics.topic_catalog import TopicOptions


def rows(client: txnkv.Client) -> dict[str, list[Any]]:
    """All that status.db has of topics and subscriptions."""
    tables = ("topics", "subscriptions", "cursors", "leases", "acked_ranges", "returned_acks")
    with internals.status(client).read() as cur:
        return {name: cur.execute(f"SELECT * FROM {name}").fetchall() for name in tables}


def info_of(client: txnkv.Client, topic: txnkv.Topic) -> SubscriptionInfo:
    (found,) = internals.topics(client).subscriptions.of_topic(topic.info)
    return found


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, txnkv.UnavailableError),
        ({"max_deliveries": 9}, txnkv.UnavailableError),
        ({"max_deliveries": None}, txnkv.UnavailableError),
        ({"max_deliveries": 9, "dead_letter": "elsewhere"}, txnkv.UnavailableError),
        ({"lease_seconds": 5}, txnkv.UnavailableError),
        ({"type": "shared"}, ValueError),
        ({"type": "shared", "lease_seconds": 5}, ValueError),
        ({"redelivery_delay": -1}, ValueError),
        ({"partitions": [7], "redelivery_delay": 5}, ValueError),
        ({"max_deliveries": 1, "dead_letter": "typed"}, txnkv.UnavailableError),
    ],
)
def test_who_is_refused_changes_nothing(
    client: txnkv.Client, topic: txnkv.Topic, options: dict[str, Any], error: type[Exception]
) -> None:
    """A second consumer of an exclusive subscription was refused, and had by then wiped the
    leases of the first, rewritten the options and made a dead letter topic.
    """
    client.create_topic("typed", value_schema={"n": "int64"})
    send(client, 0, 1, 2)
    sub = topic.subscribe("s", max_deliveries=2)
    had = take(sub)
    before = rows(client)
    with pytest.raises(error):
        topic.subscribe("s", **options)
    assert rows(client) == before
    sub.nack(had)
    assert received(sub) == ["0", "1", "2"]


def test_a_dead_letter_topic_that_does_not_fit_is_refused_whole(
    client: txnkv.Client, topic: txnkv.Topic
) -> None:
    client.create_topic("typed", value_schema={"n": "int64"})
    before = rows(client)
    with pytest.raises(ValueError, match="value schema"):
        topic.subscribe("s", max_deliveries=1, dead_letter="typed")
    assert rows(client) == before
    topic.subscribe("s")


def test_a_dead_letter_topic_with_options_of_its_own_is_taken_as_it_is(
    client: txnkv.Client, topic: txnkv.Topic
) -> None:
    dead = client.create_topic("dead", 3, "sidecar", retention_seconds=1e6, compression="zstd")
    send(client, 0)
    sub = topic.subscribe("s", max_deliveries=1, dead_letter="dead")
    sub.nack(take(sub))
    assert received(sub) == []
    assert received(dead.subscribe("look")) == ["0"]


@pytest.mark.parametrize("named", [{"max_deliveries": 1}, {"dead_letter": "dead"}])
def test_a_dead_letter_topic_that_was_dropped_is_made_again_where_it_is_named(
    client: txnkv.Client, topic: txnkv.Topic, named: dict[str, Any]
) -> None:
    """It was not, as long as the options were those of before, and dead letters had no way out."""
    send(client, 0)
    topic.subscribe("s", max_deliveries=1, dead_letter="dead").close()
    client.drop_topic("dead")
    topic.subscribe("s").close()
    assert client.topics() == ["events"]
    sub = topic.subscribe("s", **named)
    assert client.topics() == ["dead", "events"]
    sub.nack(take(sub))
    assert received(sub) == []
    assert received(client.topic("dead").subscribe("look")) == ["0"]


def test_options_that_are_not_named_stay(client: txnkv.Client, topic: txnkv.Topic) -> None:
    topic.subscribe("s", lease_seconds=5, max_deliveries=3, redelivery_delay=2).close()
    topic.subscribe("s").close()
    found = info_of(client, topic)
    assert (found.lease_seconds, found.max_deliveries, found.redelivery_delay) == (5, 3, 2)
    assert found.dead_letter == "events.s.dead"
    topic.subscribe("s", max_deliveries=None, redelivery_delay=0).close()
    found = info_of(client, topic)
    assert (found.lease_seconds, found.max_deliveries, found.redelivery_delay) == (5, None, 0)
    assert found.dead_letter is None


def test_an_option_that_there_is_not_is_refused(topic: txnkv.Topic) -> None:
    with pytest.raises(TypeError, match="lease_seconds"):
        topic.subscribe("s", id=7)  # type: ignore[call-arg]


@pytest.mark.parametrize("seconds", [float("inf"), 1e300, 1e9 + 1, float("nan"), -1])
@pytest.mark.parametrize("option", ["lease_seconds", "ack_timeout", "redelivery_delay"])
def test_times_that_no_clock_has_are_refused(
    client: txnkv.Client, topic: txnkv.Topic, option: Any, seconds: float
) -> None:
    """They were kept, and from then on nothing could be received."""
    options: Any = {option: seconds}
    with pytest.raises(ValueError, match=f"{option} is .* at most 1,000,000,000 seconds, not"):
        topic.subscribe("s", "exclusive" if option == "ack_timeout" else "shared", **options)
    assert topic.subscriptions() == []
    with pytest.raises(TypeError, match=f"{option} is a number of seconds"):
        topic.subscribe("s", **{option: "7"})


@pytest.mark.parametrize("wrong", ["3", 1.5, True])
def test_a_number_of_deliveries_is_one(topic: txnkv.Topic, wrong: Any) -> None:
    with pytest.raises(TypeError, match="max_deliveries is a number, not the"):
        topic.subscribe("s", max_deliveries=wrong)
    assert topic.subscriptions() == []


def test_a_dead_letter_topic_is_a_name(topic: txnkv.Topic) -> None:
    wrong: Any = topic
    with pytest.raises(TypeError, match="dead_letter is the name of a topic, not <Topic"):
        topic.subscribe("s", max_deliveries=1, dead_letter=wrong)
    with pytest.raises(ValueError, match="dead_letter is the name of a topic, not ''"):
        topic.subscribe("s", max_deliveries=1, dead_letter="")
    assert topic.subscriptions() == []


def test_a_dead_letter_topic_without_a_name_was_let_pass(
    client: txnkv.Client, topic: txnkv.Topic
) -> None:
    """Stores have such a subscription: its dead letters are for the topic of its own."""
    topic.subscribe("s", max_deliveries=1).close()
    with internals.status(client).write() as cur:
        ((options,),) = cur.execute("SELECT options FROM subscriptions").fetchall()
        cur.execute("UPDATE subscriptions SET options = ?", (options.replace("events.s.dead", ""),))
    send(client, 0)
    with topic.subscribe("s") as subscription:
        for _ in range(2):
            if (message := subscription.receive(timeout=0)) is not None:
                subscription.nack(message)
    (dead,) = client.topic("events.s.dead").consumer().poll()
    assert int(dead.value) == 0


def test_a_start_beyond_the_end_is_refused(client: txnkv.Client, topic: txnkv.Topic) -> None:
    send(client, 0, 1)
    for start in ({0: 3}, {0: -1}):
        with pytest.raises(txnkv.OffsetOutOfRangeError, match=r"\[0, 2\)"):
            topic.subscribe("s", start=start)
    assert internals.topics(client).subscriptions.of_topic(topic.info) == []
    sub = topic.subscribe("s", start={0: 2})
    send(client, 2)
    assert received(sub) == ["2"]


def test_committed_is_where_a_new_consumer_begins(client: txnkv.Client) -> None:
    topic = client.create_topic("wide", partitions=2)
    send(client, 0, 1, 2, topic="wide", partition=1)
    sub = topic.subscribe("s", start={1: 1})
    assert sub.committed() == {0: 0, 1: 1}
    first, second = sub.receive_many(2, timeout=0)
    sub.ack(second)
    assert sub.committed() == {0: 0, 1: 1}
    sub.ack(first)
    assert sub.committed() == {0: 0, 1: 3}


# -- seeking ---------------------------------------------------------------------------

KINDS = pytest.mark.parametrize(
    "kind",
    [
        {},
        {"max_deliveries": 9},
        {"type": "shared"},
        {"type": "failover"},
    ],
    ids=["exclusive", "counted", "shared", "failover"],
)


@KINDS
@pytest.mark.parametrize(
    ("to", "given"),
    [
        (0, "012345"),
        (2, "2345"),
        (3, "345"),
        (5, "5"),
        (6, ""),
        ("earliest", "012345"),
        ("latest", ""),
    ],
)
def test_seek_delivers_all_from_there_on_and_nothing_below(
    client: txnkv.Client, topic: txnkv.Topic, kind: dict[str, Any], to: Any, given: str
) -> None:
    """Deleted, in the consumer's hands, given back, or not delivered yet: it is all the same."""
    send(client, *range(6))
    sub = topic.subscribe("s", **kind)
    got = sub.receive_many(5, timeout=0)
    sub.ack([got[0], got[1], got[3]])
    sub.nack(got[2])
    sub.seek(0, to)
    begin = 6 - len(given)
    assert (sub.committed(), sub.lag()) == ({0: begin}, {0: len(given)})
    again = sub.receive_many(10, timeout=0)
    assert "".join((m.value or b"").decode() for m in again) == given
    assert {m.redelivery_count for m in again} <= {0}
    sub.ack(again)
    send(client, "more")
    assert received(sub) == ["more"]
    sub.close()
    with topic.subscribe("s", **kind) as sub:
        assert received(sub) == ["more"]
        assert sub.committed() == {0: 6}


@pytest.mark.parametrize("type", ["exclusive", "failover", "shared", "key_shared"])
@pytest.mark.parametrize("before", [True, False])
def test_seek_in_a_partition_that_was_added_since(
    client: txnkv.Client, topic: txnkv.Topic, type: Any, before: bool
) -> None:
    """Shared consumers raised IndexError, when the cursor was moved; and each kind at a `nack`."""
    sub = topic.subscribe("s", type=type)
    assert not before or received(sub) == []
    topic.alter(partitions=2)
    send(client, *range(4), partition=1)
    sub.nack(MessageId(1, 0))
    sub.seek(1, 2)
    assert (sub.committed(), received(sub)) == ({0: 0, 1: 2}, ["2", "3"])


@KINDS
def test_what_a_seek_moved_survives_its_consumer(
    client: txnkv.Client, topic: txnkv.Topic, kind: dict[str, Any]
) -> None:
    send(client, *range(6))
    with topic.subscribe("s", **kind) as sub:
        sub.ack(sub.receive_many(4, timeout=0))
        sub.seek(0, 1)
    with topic.subscribe("s", **kind) as sub:
        assert received(sub) == ["1", "2", "3", "4", "5"]


@KINDS
@pytest.mark.parametrize("where", ["small", "stored"])
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_no_seek_over_pending_acks(
    client: txnkv.Client, kind: dict[str, Any], where: str, end: str
) -> None:
    topic = client.create_topic("wide", partitions=2)
    for partition in (0, 1):
        send(client, 0, 1, 2, topic="wide", partition=partition)
    sub = topic.subscribe("s", **kind)
    got = sub.receive_many(6, timeout=0)
    txn = client.new_transaction()
    if where == "stored":
        txn.serialize()
    txn.ack(sub, [m for m in got if m.partition == 0][1])
    before = rows(client)
    for to in (0, 3):
        with pytest.raises(txnkv.InvalidTxnStateError, match="pending"):
            sub.seek(0, to)
    assert rows(client) == before
    sub.seek(1, 2)
    assert received(sub) == ["2"]
    getattr(txn, end)()
    sub.seek(0, 0)
    assert received(sub) == ["0", "1", "2"]


def test_no_seek_over_a_cumulative_ack_or_an_attempt_of_run(
    client: txnkv.Client, topic: txnkv.Topic
) -> None:
    send(client, *range(3))
    sub = topic.subscribe("s")
    got = sub.receive_many(3, timeout=0)
    txn = client.new_transaction()
    txn.ack_cumulative(sub, got[1])
    with pytest.raises(txnkv.InvalidTxnStateError):
        sub.seek(0, 0)
    txn.rollback()
    attempts = []

    def attempt(txn: txnkv.Transaction) -> None:
        attempts.append(txn)
        if len(attempts) == 1:
            txn.ack(sub, got[0])
            raise txnkv.TransactionConflictError("again")
        with pytest.raises(txnkv.InvalidTxnStateError):
            sub.seek(0, 0)

    client.run(attempt)
    assert len(attempts) == 2
    sub.seek(0, 1)
    assert received(sub) == ["1", "2"]


def test_a_seek_back_while_another_consumer_is_about_to_claim(
    client: txnkv.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What that has looked at is no longer the first that is due."""
    topic = client.create_topic("events")
    send(client, *range(10))
    one = topic.subscribe("s", type="shared")
    one.ack(one.receive_many(100, timeout=0))
    two = topic.subscribe("s", type="shared")
    assert received(two) == []
    send(client, 10)
    claim = LeaseReader._claim

    def late(self: LeaseReader, *args: Any) -> bool:
        monkeypatch.undo()
        one.seek(0, "earliest")
        return claim(self, *args)

    monkeypatch.setattr(LeaseReader, "_claim", late)
    assert sorted(map(int, received(two) + received(two))) == list(range(11))


def test_a_commit_after_a_seek_in_another_partition_stands(client: txnkv.Client) -> None:
    topic = client.create_topic("wide", partitions=2)
    for partition in (0, 1):
        send(client, 0, 1, topic="wide", partition=partition)
    sub = topic.subscribe("s")
    with client.transaction() as txn:
        txn.ack(sub, [m for m in sub.receive_many(4, timeout=0) if m.partition == 0])
        sub.seek(1, 1)
    assert sub.committed() == {0: 2, 1: 1}
    assert received(sub) == ["1"]


@pytest.mark.parametrize("to", [-1, 4, "now", 1.0, None, True])
def test_a_seek_elsewhere_is_refused(client: txnkv.Client, topic: txnkv.Topic, to: Any) -> None:
    send(client, 0, 1, 2)
    sub = topic.subscribe("s")
    wrong = {int: txnkv.OffsetOutOfRangeError, str: ValueError}.get(type(to), TypeError)
    before, part = rows(client), cast(int, 0.0)
    with pytest.raises(wrong, match="offset"):
        sub.seek(0, to)
    with pytest.raises(ValueError, match="no partition"):
        sub.seek(1, 0)
    with pytest.raises(TypeError, match="a partition is a number"):
        sub.seek(part, 0)
    assert rows(client) == before
    assert received(sub) == ["0", "1", "2"]


@KINDS
def test_seek_to_a_large_message(client: txnkv.Client, kind: dict[str, Any]) -> None:
    internals.topics(client).create("events", 1, "marker", TopicOptions(max_message_bytes=100))
    topic = client.topic("events")
    send(client, "a", "x" * 1000, "b")
    sub = topic.subscribe("s", **kind)
    a, large, b = sub.receive_many(3, timeout=0)
    sub.ack([a, large, b])
    for place, given in ((large, 2), (b, 1), (a, 3)):
        sub.seek(0, place.offset)
        found = sub.receive_many(3, timeout=0)
        assert [m.offset for m in found] == [m.offset for m in (a, large, b)][-given:]
        sub.ack(found)
        assert sub.lag() == {0: 0}


def test_who_waits_for_the_place_seeks_when_it_has_it(
    client: txnkv.Client, topic: txnkv.Topic
) -> None:
    send(client, 0, 1, 2)
    active, standby = (topic.subscribe("s", "failover") for _ in range(2))
    active.ack(active.receive_many(3, timeout=0))
    with pytest.raises(txnkv.UnavailableError, match="place"):
        standby.seek(0, 0)
    active.close()
    standby.seek(0, 1)
    assert received(standby) == ["1", "2"]


@pytest.mark.parametrize(("to", "given"), [(1, [b"1", b"2", b"3"]), (3, [b"3"])])
def test_shared_consumers_of_other_processes_follow_a_seek(
    client: txnkv.Client, topic: txnkv.Topic, process: Any, to: int, given: list[bytes]
) -> None:
    send(client, 0, 1, 2, 3)
    child = process(
        """
sub = client.topic("events").subscribe("s", "shared")
say([m.value for m in sub.receive_many(9, timeout=0)])
found = []
while len(found) < count:
    found += sub.receive_many(9, timeout=60)
sub.ack(found)
say([m.value for m in found])
""",
        count=len(given),
    )
    assert child.hear() == [b"0", b"1", b"2", b"3"]
    with topic.subscribe("s", "shared") as sub:
        sub.seek(0, to)
    assert child.finish() == given
    assert topic.subscribe("s", "shared").committed() == {0: 4}


def test_a_consumer_in_another_process_keeps_seeks_away(
    client: txnkv.Client, topic: txnkv.Topic, process: Any
) -> None:
    """Acks of that consumer in small transactions are known in its process alone."""
    child = process('sub = client.topic("events").subscribe("s"); say(1); wait()')
    assert child.hear() == 1
    with pytest.raises(txnkv.UnavailableError):
        topic.subscribe("s")
    child.kill()
    topic.subscribe("s").seek(0, "latest")


async def _seek_and_look(path: Any) -> None:
    async with await txnkv.aio.connect(path) as client:
        topic = await client.create_topic("events")
        async with client.transaction() as txn:
            for value in (b"0", b"1", b"2"):
                await txn.send(topic, value)
        async with await topic.subscribe("s") as sub:
            await sub.ack(await sub.receive_many(3, timeout=0))
            await sub.seek(0, 1)
            assert await sub.committed() == {0: 1}
            assert [m.value for m in await sub.receive_many(3, timeout=0)] == [b"1", b"2"]


def test_seek_and_committed_of_asyncio(tmp_path: Any) -> None:
    asyncio.run(_seek_and_look(tmp_path / "store"))


def test_a_new_subscription_touches_no_other_one(client: txnkv.Client, topic: txnkv.Topic) -> None:
    others = [topic.subscribe(f"s{number}") for number in range(3)]
    before = rows(client)
    others.append(topic.subscribe("new"))
    after = rows(client)
    assert after["subscriptions"][:3] == before["subscriptions"]
    assert after["cursors"][:3] == before["cursors"]
    assert len(after["cursors"]) == len(others)
