"""Messages and acks one by one: `Delivery` and `AckRun` by themselves."""

from __future__ import annotations

import os
import threading
from array import array
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from txnkv.core import AckRun, Delivery, MessageFields, SharedWords, StoreWords
from txnkv.metrics import Counter
from txnkv.topics.ranges import Ranges

TOPIC, PARTITION = 5, 3
FOR_EVER = 1 << 62


def message(offset: int, partition: int = PARTITION, topic: int = TOPIC) -> MessageFields:
    return MessageFields(b"v", None, None, 1, partition, offset, None, None, topic)


class Consumer:
    """A store at change number 10, a delivery that knows it, and what transactions have."""

    def __init__(self, *offsets: int) -> None:
        self.memory = array("Q", [10, 0, 0, 0, 0, 0])
        store = StoreWords()
        store.aim(SharedWords(self.memory), (0, 1, 2, 3, 4, 5))
        self.delivered, self.acked = Counter("d"), Counter("a")
        self.delivery = Delivery(store, self.delivered, threading.get_ident())
        self.delivery.know(10)
        self.ready = deque(map(message, offsets))
        if offsets:
            self.delivery.offer(PARTITION, self.ready)
        self.info = object()
        self.pending = Ranges()
        self.now = 7
        self.time: Callable[[], int] = lambda: self.now

    def run(
        self,
        own: Ranges,
        begin: int = 0,
        end: int = 100,
        deadline: int | None = 9,
        partition: int = PARTITION,
        more: AckRun | None = None,
    ) -> AckRun:
        where, clock = (TOPIC, partition, begin, end), SimpleNamespace(monotonic_micros=self.time)
        sets = own.bounds, self.pending.bounds
        return AckRun(self.delivery, self.acked, self.info, where, *sets, clock, deadline, more)

    def take(self, run: AckRun, offset: int, **other: int) -> bool:
        return run.take(SimpleNamespace(info=self.info), message(offset, **other))

    def receive(self) -> int | None:
        found = self.delivery.receive()
        if found is None:
            return None
        self.delivery.unsure = None
        return int(found.offset)


def test_messages_are_given_in_order_and_counted() -> None:
    consumer = Consumer(4, 6, 7)
    assert [consumer.receive() for _ in range(4)] == [4, 6, 7, None]
    assert consumer.delivered.value == 3


def test_no_message_is_given_without_a_look() -> None:
    consumer = Consumer(1, 2)
    consumer.memory[0] = 11  # a writer is at it
    assert consumer.receive() is None
    consumer.memory[0] = 12
    assert consumer.receive() is None
    consumer.delivery.know(12)
    assert consumer.receive() == 1
    consumer.delivery.know(None)
    assert consumer.receive() is None
    consumer.delivery.know(12)
    consumer.delivery.end()
    assert consumer.receive() is None
    assert [one.offset for one in consumer.ready] == [2]


def test_one_that_may_not_have_come_keeps_back_the_next() -> None:
    consumer = Consumer(1, 2, 3)
    assert consumer.delivery.receive() is consumer.delivery.unsure
    assert consumer.receive() is None
    other = threading.Thread(target=consumer.delivery.receive)  # which no signal interrupts
    other.start()
    other.join()
    assert [one.offset for one in consumer.ready] == [3]
    assert consumer.delivery.unsure.offset == 1
    consumer.delivery.unsure = None
    assert consumer.receive() == 3


@pytest.mark.parametrize(
    ("partition", "upto", "given"),
    [
        (PARTITION, 0, 2),
        (PARTITION, 2, 2),
        (PARTITION, 3, None),
        (PARTITION + 16, 3, 2),
        (None, 2, 2),
        (None, FOR_EVER, None),
    ],
)
def test_what_changes_messages_that_wait(
    partition: int | None, upto: int, given: int | None
) -> None:
    consumer = Consumer(1, 2)
    assert consumer.receive() == 1
    consumer.delivery.withdraw(partition, upto)
    assert consumer.receive() == given


def test_acks_go_to_both_sets() -> None:
    consumer, own = Consumer(), Ranges([(2, 3)])
    consumer.pending.add(2, 3)
    run = consumer.run(own)
    assert [consumer.take(run, offset) for offset in (3, 4, 7, 8)] == [True] * 4
    assert list(own) == list(consumer.pending) == [(2, 5), (7, 9)]
    assert consumer.acked.value == 4


def test_two_transactions_by_turns() -> None:
    consumer, one, two = Consumer(), Ranges(), Ranges()
    runs = consumer.run(one), consumer.run(two)
    assert [consumer.take(runs[n % 2], n) for n in range(4)] == [True] * 4
    assert [consumer.take(runs[n], 2) for n in (0, 1)] == [False, False]
    assert (list(one), list(two)) == ([(0, 1), (2, 3)], [(1, 2), (3, 4)])
    assert list(consumer.pending) == [(0, 4)]


def test_acks_of_many_partitions_by_turns() -> None:
    consumer, sets, run, others = Consumer(), [Ranges() for _ in range(20)], None, []
    for partition in range(20):
        run = consumer.run(sets[partition], partition=partition, more=run)
        others.append(run)
        consumer.pending = Ranges()
    assert run is not None
    assert [consumer.take(run, 5, partition=n) for n in range(20)] == [False] * 4 + [True] * 16
    consumer.delivery.withdraw(7, 0)  # and 23, which is as good as the same
    assert [consumer.take(run, 6, partition=n) for n in (6, 7, 8)] == [True, False, True]
    own = Ranges()
    run = consumer.run(own, partition=7, more=run)
    assert [consumer.take(run, 7, partition=n) for n in (6, 7, 8)] == [True] * 3
    assert not consumer.take(others[7], 9, partition=7)
    assert [list(each) for each in (sets[6], sets[7], sets[8], own)] == [
        [(5, 8)], [(5, 6)], [(5, 8)], [(7, 8)],
    ]  # fmt: skip
    consumer.delivery.withdraw(None, 0)
    assert not any(consumer.take(run, 9, partition=n) for n in range(20))
    run.withdraw()
    assert not any(consumer.take(each, 50, partition=n) for n, each in enumerate(others))


@pytest.mark.parametrize(
    ("offset", "other"),
    [(9, {}), (30, {}), (12, {"partition": 2}), (12, {"topic": 6}), (-1, {}), (1 << 62, {})],
)
def test_acks_of_other_messages(offset: int, other: dict[str, int]) -> None:
    consumer, own = Consumer(), Ranges()
    run = consumer.run(own, 10, 30)
    assert not consumer.take(run, offset, **other)
    assert consumer.take(run, 12)
    assert list(own) == [(12, 13)]


def test_acks_that_look_first() -> None:
    consumer, own = Consumer(5), Ranges()

    def refused(run: AckRun, offset: int = 1) -> bool:
        return not consumer.take(run, offset) and not own and not consumer.pending

    run = consumer.run(own)
    assert refused(run, 5)  # it is not given yet
    consumer.now = 10
    assert refused(run)
    consumer.now = 9
    consumer.memory[0] = 12
    assert refused(run)
    consumer.memory[0] = 10
    consumer.delivery.withdraw(PARTITION, 0)
    assert refused(run)
    run = consumer.run(own, deadline=None)
    assert not run.take(object(), message(1))
    assert not run.take(consumer, "no message")
    assert not run.take(SimpleNamespace(info=object()), message(1))
    run.withdraw()
    assert refused(run)
    assert consumer.take(consumer.run(own, deadline=None), 1)


def test_a_clock_that_withdraws_and_one_that_fails() -> None:
    consumer, own = Consumer(), Ranges()
    run = consumer.run(own)

    def withdrawn() -> int:
        run.withdraw()
        return 1

    def failed() -> int:
        raise OSError

    consumer.time = withdrawn
    run = consumer.run(own)
    assert not consumer.take(run, 1)
    consumer.time = failed
    with pytest.raises(OSError, match=r"^$"):
        consumer.take(consumer.run(own), 1)
    assert not own
    assert not consumer.pending


def test_a_forked_child_gets_nothing() -> None:
    consumer, own = Consumer(1), Ranges()
    run = consumer.run(own)
    if (child := os.fork()) == 0:
        os._exit(consumer.receive() is not None or consumer.take(run, 0))
    assert os.waitpid(child, 0)[1] == 0
    assert consumer.receive() == 1
    assert consumer.take(run, 1)


@pytest.mark.parametrize(
    "call",
    [
        lambda c: Delivery(object(), c.delivered, 0),
        lambda c: c.delivery.offer(0, deque()),
        lambda c: c.delivery.offer(0, deque([1])),
        lambda c: c.delivery.withdraw("x", 1),
        lambda c: c.delivery.withdraw(1),
        lambda c: c.delivery.withdraw(None, None),
        lambda c: c.delivery.know(-1),
        lambda c: c.run(SimpleNamespace(bounds=(1, 2))),
        lambda c: c.run(SimpleNamespace(bounds=None)),
        lambda c: AckRun(c, c.acked, c.info, (1, 2, 3, 4), ([], []), ([], []), c, None, None),
        lambda c: c.run(Ranges(), more=c),
        lambda c: c.run(Ranges()).take(c),
    ],
)
def test_wrong_arguments(call: Any) -> None:
    with pytest.raises((TypeError, OverflowError, IndexError)):
        call(Consumer())
