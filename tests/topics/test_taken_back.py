"""Messages that a consumer gave and takes back, as of cancelled calls: they come again, once."""

from __future__ import annotations

import random
from typing import Any

import pytest

import txnkv
from tests.topics.reading_tools import drained, looped
from tools.interrupts import Interruption


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["offset", "commit", "serializable", "group"])
def test_what_is_taken_back_is_given_again(client: txnkv.Client, kind: Any, seed: int) -> None:
    """Polls of any size, undone or not, and seeks, beside a model: from where on is it given."""
    counts, chosen = (17, 9), random.Random(seed)
    topic = client.create_topic("events", partitions=2)
    with client.transaction() as txn:
        for number, count in enumerate(counts):
            for _ in range(count):
                txn.send(topic, b"", partition=number)
    consumer: Any = {
        "group": lambda: client.consumer(topic, group="g"),
        "serializable": lambda: topic.consumer("serializable"),
    }.get(kind, lambda: topic.consumer(order=kind))()
    at, before = [0, 0], [0, 0]
    with consumer:
        consumer.poll(max_messages=5, timeout=0)
        consumer.unpoll()
        for _ in range(60):
            step, number = chosen.random(), chosen.randrange(2)
            if step < 0.3:
                consumer.unpoll()
                at = list(before)
            elif step < 0.4 and kind != "serializable":
                at[number] = before[number] = chosen.randrange(counts[number])
                consumer.seek(number, at[number])
            else:
                before = list(at)
                for message in consumer.poll(max_messages=chosen.randint(1, 12), timeout=0):
                    assert message.offset == at[message.partition]
                    at[message.partition] += 1
            if kind in ("offset", "group"):  # others go on behind whole transactions
                # A marker stands behind the messages.
                known = [consumer.position(n) for n in (0, 1)]
                assert [min(*pair) for pair in zip(known, counts, strict=True)] == at
        left = sum(counts) - sum(at)
        assert len(drained(consumer)) == left


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("order", ["offset", "commit", "serializable"])
def test_a_loop_that_is_left_is_gone_on_with(client: txnkv.Client, order: Any, seed: int) -> None:
    """What was polled and not given by the loop was passed over, and `position` was behind it."""
    topic = client.create_topic("events", partitions=2)
    for _ in range(10):
        with client.transaction() as txn:
            for number in (0, 1) if seed % 2 else (0, 0, 1):
                txn.send(topic, b"", partition=number)
    counts = [10, 10] if seed % 2 else [20, 10]
    serial = order == "serializable"
    looped(
        topic.consumer("serializable") if serial else topic.consumer(order=order),
        counts,
        order,
        seed,
    )
    member: Any = topic.consumer()
    for message in member:
        member.close()
        assert message.offset == 0


def test_a_signal_in_a_loop_passes_nothing_over(client: txnkv.Client) -> None:
    """One that came before the first message of a poll lost all of them."""
    topic = client.create_topic("events")
    with client.transaction() as txn:
        for _ in range(5):
            txn.send(topic, b"")

    def interrupted(n: int) -> Interruption:
        consumer, seen = topic.consumer(), list[int]()
        messages = iter(consumer)  # kept: what is raised where it is dropped is printed and lost

        def loop() -> None:
            for message in messages:
                seen.append(message.offset)
                if len(seen) == 2:
                    break

        interruption = Interruption(n)
        interruption.run(loop)
        seen += [message.offset for message in drained(consumer)]
        assert seen == [*range(5)], interruption.where
        return interruption

    instants = range(1, interrupted(1 << 40).passed + 1)
    for n in instants:
        interrupted(n)


def test_a_loop_goes_on_from_where_it_was_moved(client: txnkv.Client) -> None:
    """By a poll or a seek in it: what it has left of its own poll is given once, or not at all."""
    topic = client.create_topic("events")
    with client.transaction() as txn:
        for _ in range(9):
            txn.send(topic, b"")
    with topic.consumer() as consumer:
        found = []
        for message in consumer:
            found.append(message.offset)
            if len(found) == 1:
                found += [each.offset for each in consumer.poll(max_messages=2)]
            if len(found) == 6:
                consumer.seek(0, 8)
            if found[-1] == 8:
                break
        assert found == [0, 1, 2, 3, 4, 5, 8]
