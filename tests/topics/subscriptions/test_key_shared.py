"""Key_shared subscriptions: a key is one consumer's at a time, in order. After Pulsar's tests."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import txnkv
from tests import internals
from tests.topics.subscriptions.subscription_tools import cursor_rows, left_over
from txnkv.topics.delivery.key_shared import (
    TOP_HASH,
    KeySharedReader,
    join_sharers,
    leave_sharers,
    load_sharers,
    part_of,
)
from txnkv.topics.messages.message import Message, MessageId
from txnkv.topics.subscription_catalog import Place

KEYS = [f"key-{number}" for number in range(24)]


def subscribe(topic: txnkv.Topic, **options: Any) -> txnkv.Subscription:
    return topic.subscribe("s", type="key_shared", **{"lease_seconds": 3600, **options})


def send(
    client: txnkv.Client, count: int, keys: Sequence[str | None] = KEYS, begin: int = 0
) -> None:
    """Send numbers from `begin` on, the keys in turn."""
    with client.transaction() as txn:
        for number in range(begin, begin + count):
            txn.send("events", str(number), key=keys[number % len(keys)])


def take(sub: txnkv.Subscription, most: int = 1000) -> list[Message]:
    return sub.receive_many(most, timeout=0)


def numbers(messages: Sequence[Message]) -> list[int]:
    return [int(message.value) for message in messages]


def by_key(messages: Sequence[Message]) -> dict[Any, list[int]]:
    found = defaultdict(list)
    for message in messages:
        found[message.key].append(int(message.value))
    return found


def in_order(messages: Sequence[Message]) -> bool:
    return all(sorted(found) == found for found in by_key(messages).values())


@pytest.mark.parametrize("buffer", ["marker", "sidecar"])
@pytest.mark.parametrize("partitions", [1, 3])
def test_each_key_has_one_consumer(client: txnkv.Client, partitions: int, buffer: Any) -> None:
    topic = client.create_topic("events", partitions=partitions, buffer=buffer)
    subs = [subscribe(topic) for _ in range(3)]
    send(client, 240)
    taken = [[message for _ in range(5) for message in take(sub, 20)] for sub in subs]
    send(client, 240, begin=240)
    taken = [some + take(sub) for some, sub in zip(taken, subs, strict=True)]
    assert sorted(number for some in taken for number in numbers(some)) == list(range(480))
    keys = [set(by_key(some)) for some in taken]
    assert sum(map(len, keys)) == len(KEYS)
    assert all(keys)
    assert all(map(in_order, taken))
    for sub, some in zip(subs, taken, strict=True):
        sub.ack(some)
    assert subs[0].lag() == dict.fromkeys(range(partitions), 0)
    assert left_over(client) == 0


def test_messages_without_keys_are_shared(client: txnkv.Client, topic: txnkv.Topic) -> None:
    one, two = subscribe(topic), subscribe(topic)
    send(client, 100, [None])
    first, second = numbers(take(one)), numbers(take(two))
    assert sorted(first + second) == list(range(100))
    assert min(len(first), len(second)) > 20


def test_who_joins_waits_for_what_others_have(client: txnkv.Client, topic: txnkv.Topic) -> None:
    one = subscribe(topic)
    send(client, 24)
    had = take(one)
    two = subscribe(topic)
    send(client, 24, begin=24)
    assert take(two) == []
    more = take(one)
    kept = set(by_key(more))
    assert 0 < len(kept) < len(KEYS)
    assert take(two) == []
    one.close()
    found = take(two)
    assert sorted(numbers(found)) == list(range(48))
    assert in_order(found)
    assert {each.redelivery_count for each in found} == {0, 1}
    assert len([each for each in found if each.redelivery_count]) == len(had) + len(more)


def two_with_a_key_between(
    client: txnkv.Client, topic: txnkv.Topic, **options: Any
) -> tuple[txnkv.Subscription, txnkv.Subscription, list[Message]]:
    """Two consumers; the first has message 0 of a key that is in the part of the second, which
    would have message 1.
    """
    one = subscribe(topic, **options)
    send(client, len(KEYS))
    had = take(one)
    two = subscribe(topic, **options)
    send(client, len(KEYS), begin=len(KEYS))
    hers = set(by_key(had)) - set(by_key(take(one)))
    key = sorted(hers)[0]
    one.ack([each for each in had if each.key != key])
    assert key not in by_key(take(two))
    return one, two, [each for each in had if each.key == key]


@pytest.mark.parametrize("how", ["ack", "commit", "stored", "nack", "abort", "expire", "close"])
def test_a_key_moves_when_its_messages_are_done_or_given_back(
    client: txnkv.Client, topic: txnkv.Topic, now: Any, how: str
) -> None:
    one, two, (message,) = two_with_a_key_between(client, topic)
    again = how not in ("ack", "commit", "stored")
    if how == "ack":
        one.ack(message)
    elif how in ("commit", "stored", "abort"):
        txn = client.new_transaction(timeout=None)
        if how == "stored":
            txn.serialize()
        txn.ack(one, message)
        assert take(two) == []  # it is pending: nobody knows yet
        assert take(one) == []
        txn.rollback() if how == "abort" else txn.commit()
    elif how == "nack":
        one.nack(message)
    elif how == "expire":
        now.forward(3601)
        assert numbers(take(one)) != numbers([message])
    else:
        one.close()
    found = [each for each in take(two) if each.key == message.key]
    first = int(message.value)
    assert numbers(found) == ([first] if again else []) + [first + len(KEYS)]
    assert [each.redelivery_count for each in found] == ([1] if again else []) + [0]


def test_a_slow_consumer_keeps_no_other_waiting(client: txnkv.Client, topic: txnkv.Topic) -> None:
    slow, quick = subscribe(topic), subscribe(topic)
    send(client, 240)
    found = take(quick)
    quick.ack(found)
    for begin in range(240, 2400, 240):
        send(client, 240, begin=begin)
        more = take(quick)
        quick.ack(more)
        found += more
    keys = set(by_key(found))
    assert len(found) == 100 * len(keys)
    assert 0 < len(keys) < len(KEYS)
    rest = [message for _ in range(100) for message in take(slow, 100)]
    assert len(rest) == 100 * (len(KEYS) - len(keys))
    assert in_order(rest)


def test_what_came_back_is_given_before_what_follows(
    client: txnkv.Client, topic: txnkv.Topic, now: Any
) -> None:
    sub = subscribe(topic, redelivery_delay=30)
    send(client, 4, ["a", "b"])
    a0, _, a2, _ = take(sub)
    sub.nack(a0)
    send(client, 4, ["a", "b"], begin=4)
    assert numbers(take(sub)) == [5, 7]
    sub.nack(a2)
    now.forward(20)
    sub.nack(a0)  # it is given back already
    assert take(sub) == []
    now.forward(11)
    assert numbers(take(sub)) == [0, 2, 4, 6]


def test_one_that_comes_back_later_keeps_those_behind_it_waiting(
    client: txnkv.Client, topic: txnkv.Topic, now: Any
) -> None:
    sub = subscribe(topic, redelivery_delay=30)
    send(client, 3, ["a", "a", "b"])
    first, second, other = take(sub)
    sub.nack([second, other])
    now.forward(20)
    sub.nack(first)
    now.forward(11)
    assert numbers(take(sub)) == [2]
    now.forward(20)
    assert numbers(take(sub)) == [0, 1]


def test_a_delayed_message_keeps_none_of_its_key_waiting(
    client: txnkv.Client, topic: txnkv.Topic, now: Any
) -> None:
    one = subscribe(topic)
    with client.transaction() as txn:
        at = datetime.now(UTC) + timedelta(seconds=1000)
        txn.send(topic, "0", key="a", deliver_at=at)
        txn.send(topic, "1", key="a")
    assert numbers(take(one)) == [1]
    now.forward(1001)
    assert numbers(take(one)) == [0]


def test_a_delayed_message_goes_to_who_has_its_key(
    client: txnkv.Client, topic: txnkv.Topic, now: Any
) -> None:
    one = subscribe(topic)
    with client.transaction() as txn:
        at = datetime.now(UTC) + timedelta(seconds=1000)
        for number, key in enumerate(KEYS):
            txn.send(topic, str(number), key=key, deliver_at=at)
    send(client, 24, begin=24)
    had = take(one)
    assert len(had) == 24
    two = subscribe(topic)
    now.forward(1001)
    assert take(two) == []
    more = take(one)
    one.ack(had)
    assert sorted(numbers(more + take(two))) == list(range(24))
    assert more


def test_dead_letters(client: txnkv.Client, topic: txnkv.Topic) -> None:
    sub = subscribe(topic, max_deliveries=2, dead_letter="dead")
    send(client, 2, ["a"])
    for _ in range(2):
        sub.nack(take(sub))
    assert take(sub) == []
    with client.topic("dead").consumer() as consumer:
        assert numbers(consumer.poll(timeout=60)) == [0, 1]
    assert sub.lag() == {0: 0}


def test_a_seek_is_of_all_consumers(client: txnkv.Client, topic: txnkv.Topic) -> None:
    one, two = subscribe(topic), subscribe(topic)
    send(client, 48)
    taken = [take(one), take(two)]
    one.ack(taken[0])
    two.ack(taken[1])
    one.seek(0, 0)
    assert [numbers(take(sub)) for sub in (one, two)] == list(map(numbers, taken))
    one.seek(0, "latest")
    assert [take(sub) for sub in (one, two)] == [[], []]
    one.seek(0, 24)
    assert sorted(numbers(take(one) + take(two))) == list(range(24, 48))


def test_acks_of_what_was_not_delivered_leave_no_gap(
    client: txnkv.Client, topic: txnkv.Topic
) -> None:
    sub = subscribe(topic)
    for begin in range(3):  # each with its marker, where transactions are large
        with client.transaction() as txn:
            txn.serialize()
            txn.send(topic, str(begin), key="a")
    (first,) = take(sub, 1)
    assert first.value == b"0"
    ids = []
    with topic.consumer() as consumer:
        ids = [message.id for message in consumer.poll(timeout=60)]
    sub.ack(ids[1])
    assert numbers(take(sub)) == [2]
    sub.ack([ids[0], ids[2]])
    assert sub.lag() == {0: 0}
    assert len(cursor_rows(client)) == 1


def test_partitions_that_are_added(client: txnkv.Client, topic: txnkv.Topic) -> None:
    one, two = subscribe(topic), subscribe(topic)
    send(client, 24)
    found = take(one) + take(two)
    topic.alter(partitions=3)
    send(client, 240, begin=24)
    found += take(one) + take(two)
    assert sorted(numbers(found)) == list(range(264))
    one.ack(found)
    assert set(one.lag().values()) == {0}


def test_the_next_consumer_begins_at_the_cursor(
    connect: Callable[..., txnkv.Client], now: Any
) -> None:
    client = connect()
    topic = client.create_topic("events")
    sub = subscribe(topic)
    send(client, 48)
    found = take(sub)
    sub.ack(found[::2])
    client.close()
    client = connect()
    with subscribe(client.topic("events")) as sub:
        assert sorted(numbers(take(sub))) == sorted(numbers(found[1::2]))
    assert client.check().problems == []


@pytest.mark.parametrize("words", ["", "two.ack(had)"])
def test_a_killed_consumer_gives_its_part_and_its_messages(
    client: txnkv.Client, topic: txnkv.Topic, process: Any, until: Any, words: str
) -> None:
    one = subscribe(topic)
    other = process(
        f"""
        two = client.topic("events").subscribe("s", type="key_shared", lease_seconds=3600)
        say()
        wait()
        had = two.receive_many(1000, timeout=0)
        {words}
        say([int(message.value) for message in had])
        wait()
        """
    )
    other.hear()
    send(client, 48)
    other.tell()
    hers = other.hear()
    mine = numbers(take(one))
    assert sorted(mine + hers) == list(range(48))
    send(client, 48, begin=48)
    more = numbers(take(one))
    assert len(more) == len(mine)
    other.kill()
    found: list[int] = []
    wanted = set(range(48, 96)) - set(more) | (set() if words else set(hers))
    until(lambda: found.extend(numbers(take(one))) or len(found) >= len(wanted))
    assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize("point", ["status.before_commit", "status.after_commit", "leases.claimed"])
def test_killed_at_each_write_of_the_first_one(
    client: txnkv.Client, topic: txnkv.Topic, process: Any, point: str
) -> None:
    send(client, 24)
    other = process(
        f"""
        from txnkv.storage.faults import arm
        arm({point!r}, "kill")
        sub = client.topic("events").subscribe("s", type="key_shared")
        sub.receive_many(1000, timeout=0)
        """
    )
    other.finish(-9)
    sub = subscribe(topic)
    found = take(sub)
    assert sorted(numbers(found)) == list(range(24))
    assert in_order(found)
    sub.ack(found)
    assert left_over(client) == 0


def test_workers_that_come_and_go_at_once_keep_the_order(
    client: txnkv.Client, topic: txnkv.Topic, process: Any, until: Any
) -> None:
    client.create_topic("out")
    worker = """
        import random
        def join():
            return client.topic("events").subscribe("s", type="key_shared", lease_seconds=3600)
        sub = join()
        say()
        while True:
            for message in sub.receive_many(4, timeout=1):
                with client.transaction() as txn:
                    txn.send("out", message.value, key=message.key)
                    txn.ack(sub, message)
            if random.random() < 0.2:
                sub.receive_many(3, timeout=0)
                sub.close()
                sub = join()
        """
    workers = [process(worker) for _ in range(3)]
    for each in workers:
        each.hear()
    for begin in range(0, 480, 48):
        send(client, 48, begin=begin)
        if begin == 192:
            workers.pop().kill()
            workers.append(process(worker))
    out = client.topic("out")
    until(lambda: out.end_offsets()[0] >= 480)
    assert [each.popen.poll() for each in workers] == [None] * 3
    for each in workers:
        each.kill()
    with out.consumer(order="commit") as consumer:
        found = consumer.poll(max_messages=1000, timeout=60)
    assert sorted(numbers(found)) == list(range(480))
    assert in_order(found)


def test_one_that_waits_for_others_writes_nothing(client: txnkv.Client, topic: txnkv.Topic) -> None:
    one, two, (message,) = two_with_a_key_between(client, topic)
    before = internals.store(client).runtime.change_number()
    assert two.receive(timeout=0.3) is None
    assert internals.store(client).runtime.change_number() == before
    one.ack(message)
    found = two.receive(timeout=60)
    assert found is not None
    assert found.key == message.key


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda topic, sub: sub.ack_cumulative(MessageId(0, 0)), txnkv.NotSupportedError),
        (lambda topic, sub: topic.subscribe("s", type="shared"), ValueError),
        (lambda topic, sub: subscribe(topic, partitions=[0]), ValueError),
        (lambda topic, sub: subscribe(topic, ack_timeout=1.0), ValueError),
        (lambda topic, sub: topic.subscribe("t", type="sticky"), ValueError),
    ],
)
def test_refused(client: txnkv.Client, topic: txnkv.Topic, call: Any, error: Any) -> None:
    sub = subscribe(topic)
    send(client, 1)
    with pytest.raises(error):
        call(topic, sub)
    assert numbers(take(sub)) == [0]


def test_a_store_says_that_it_has_had_one(client: txnkv.Client, store_path: Path) -> None:
    topic = client.create_topic("events")
    topic.subscribe("other", type="shared")
    for features in ([], ["key_shared"]):
        assert json.loads((store_path / "FORMAT").read_text())["features"] == features
        subscribe(topic)


def test_over_a_server_and_by_asyncio(
    client: txnkv.Client, topic: txnkv.Topic, store_path: Path
) -> None:
    from txnkv.server import Server

    server = Server(str(store_path), "grpc://127.0.0.1:0")
    try:
        with txnkv.connect(f"grpc://127.0.0.1:{server.port}") as far:
            one, two = subscribe(topic), subscribe(far.topic("events"))
            send(client, 48)
            mine, hers = take(one), two.receive_many(1000, timeout=60)
            assert sorted(numbers(mine) + numbers(hers)) == list(range(48))
            assert not set(by_key(mine)) & set(by_key(hers))
            two.ack(hers)
            two.close()
            one.ack(mine)
    finally:
        server.close()
    one.close()

    async def work() -> list[int]:
        async with txnkv.aio.connect(store_path) as far:
            events = await far.topic("events")
            async with await events.subscribe("s", type="key_shared") as sub:
                found = await sub.receive_many(1000, timeout=60)
                await sub.ack(found)
                return numbers(found)

    send(client, 24, begin=48)
    assert sorted(asyncio.run(work())) == list(range(48, 72))


# -- the parts of the keys -------------------------------------------------------------


def test_parts_are_all_and_move_little(client: txnkv.Client, topic: txnkv.Topic) -> None:
    id = subscribe(topic).info.id
    places = [Place(900, 0, number) for number in range(20)]
    with internals.status(client).write() as cur:
        for each in load_sharers(cur, id):
            leave_sharers(cur, id, each.place)
        joined: list[Place] = []
        for step in [*range(20), 0, 7, 1, 19, 12, 0, 7, *range(20)]:
            place, before = places[step], load_sharers(cur, id)
            if place in joined:
                joined.remove(place)
                leave_sharers(cur, id, place)
            else:
                joined.append(place)
                join_sharers(cur, id, place)
            found = load_sharers(cur, id)
            parts = [part_of(found, each.place) for each in found]
            assert {each.place for each in found} == set(joined)
            assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
            if parts:
                assert (parts[0].start, parts[-1].stop) == (0, TOP_HASH)
            changed = [
                each.place
                for each in before
                if each.place != place and part_of(before, each.place) != part_of(found, each.place)
            ]
            assert len(changed) <= 1
        assert part_of(found, Place(901, 0, 0)) == range(0)


def test_many_that_are_done_with_keep_nobody_from_what_is_behind(
    client: txnkv.Client, topic: txnkv.Topic
) -> None:
    """More of them than are read ahead: who comes later reads on until there is something."""
    undone = client.new_transaction()
    undone.send(topic, "undone", partition=0)
    undone.serialize()
    undone.rollback()  # what it sent is a gap, and keeps the cursor
    with client.transaction() as txn:
        for n in range(3500):
            txn.send(topic, str(n), key=str(n), partition=0)
    with topic.consumer() as consumer:
        ids = [message.id for message in consumer.poll(max_messages=5000, timeout=0)]
    sub = topic.subscribe("s", "key_shared")
    sub.ack(ids[:3495])
    assert [message.id for message in sub.receive_many(100, timeout=0)] == ids[3495:]


def test_one_of_many_that_wait_is_given_without_a_look_at_the_others(
    client: txnkv.Client, topic: txnkv.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(client, 600)
    looks = []
    known = KeySharedReader._is_known

    def counted(self: KeySharedReader, *args: Any) -> bool:
        looks.append(args)
        return known(self, *args)

    monkeypatch.setattr(KeySharedReader, "_is_known", counted)
    sub = subscribe(topic)
    found = [sub.receive() for _ in range(50)]
    assert in_order(found)
    assert len(looks) <= 3 * len(found)
    assert sorted(numbers(found + take(sub))) == list(range(600))


def test_what_is_due_is_asked_for_where_a_time_has_come(
    client: txnkv.Client, topic: txnkv.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    rows = KeySharedReader._due_rows

    def counted(self: KeySharedReader, *args: Any) -> Any:
        looks.append(args)
        return rows(self, *args)

    monkeypatch.setattr(KeySharedReader, "_due_rows", counted)
    one = subscribe(topic)
    send(client, 48)
    for _ in range(12):
        assert one.receive(timeout=0) is not None
    assert looks == []
    one.close()
    two = subscribe(topic)
    found = [number for _ in range(12) for number in numbers(take(two, 1))]
    assert found == list(range(12))
    assert len(looks) <= 2 * len(found)
