"""Messages that are received and acknowledged one by one: the short cuts against the long way.

The same calls are made of two stores. In one of them nothing is offered to `Delivery.receive` and
`AckRun.take`, so that each call looks for itself. Both answer the same.
"""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from tests.topics.subscriptions.subscription_tools import answer_the_same, send
from tools.interrupts import Interruption
from txnkv.topics import Exclusive, ExclusiveReader
from txnkv.transaction.context import TxnContext

Answer = Any
NAMES = ("A", "B", "C")
STEPS = 250


class Program:
    """One consumer, three transactions, and a client beside them; answers are plain values."""

    def __init__(self, path: Path, partitions: int) -> None:
        self.client = txnkv.connect(path)
        self.topic = self.client.create_topic("events", partitions=partitions)
        self.partitions = partitions
        self.sub = self.topic.subscribe("s")
        self.had: list[txnkv.Message] = []
        self.open: dict[str, txnkv.Transaction] = {}
        self.n = 0

    def send(self, count: int) -> None:
        with self.client.transaction() as txn:
            for _ in range(count):
                self.n += 1
                txn.send(self.topic, b"%d" % self.n, partition=self.n % self.partitions)

    def txn(self, name: str) -> txnkv.Transaction:
        if name not in self.open:
            self.open[name] = self.client.new_transaction()
        return self.open[name]

    def note(self, found: list[txnkv.Message]) -> Answer:
        self.had += found
        return [(one.partition, one.offset, one.value, one.redelivery_count) for one in found]

    def receive(self) -> Answer:
        found = self.sub.receive(timeout=0)
        return self.note([] if found is None else [found])

    def chosen(self, at: float) -> txnkv.Message:
        return self.had[-1 - int(at * at * len(self.had))]

    def unseen(self) -> list[txnkv.Message]:
        with self.topic.consumer() as consumer:
            return consumer.poll(max_messages=10_000, timeout=0)

    def end(self, name: str, how: str) -> Answer:
        txn = self.open.pop(name, None)
        if txn is None:
            return None
        return len(str(getattr(txn, how)())) > 0

    def again(self) -> None:
        self.sub.close()
        self.sub = self.topic.subscribe("s")

    def close(self) -> None:
        for txn in self.open.values():
            with suppress(txnkv.TxnkvError):
                txn.rollback()
        self.client.close()


def step(rng: random.Random) -> Callable[[Program], Answer]:
    kind, name, at, n = rng.random(), rng.choice(NAMES), rng.random(), rng.randint(1, 9)
    if kind < 0.30:
        return lambda p: [p.receive() for _ in range(n)]
    if kind < 0.55:
        return lambda p: [p.txn(name).ack(p.sub, one) for one in p.had[-n:]] if p.had else None
    if kind < 0.62:
        return lambda p: p.txn(name).ack(p.sub, p.chosen(at)) if p.had else None
    if kind < 0.66:  # of one that was not received, maybe
        return lambda p: [p.txn(name).ack(p.sub, one) for one in p.unseen()[-n:]]
    return rng.choice(
        [
            lambda p: p.send(n),
            lambda p: p.note(p.sub.receive_many(n, timeout=0)),
            lambda p: p.end(name, "commit"),
            lambda p: p.end(name, "commit"),
            lambda p: p.end(name, "rollback"),
            lambda p: p.txn(name).ack_cumulative(p.sub, p.chosen(at)) if p.had else None,
            lambda p: p.sub.ack(p.chosen(at)) if p.had else None,
            lambda p: p.sub.nack(p.chosen(at)) if p.had else None,
            lambda p: p.sub.nack(p.unseen()[-n:]),
            lambda p: p.sub.unreceive(),
            lambda p: p.sub.seek(0, "earliest" if at < 0.5 else "latest"),
            lambda p: p.again(),
            lambda p: p.txn(name).serialize() is None,
        ]
    )


@pytest.fixture
def long_way(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """Have subscriptions of this process offer no short cuts, or as ever."""
    offer, more = Exclusive.offer, Exclusive.more

    def switch(on: bool) -> None:
        monkeypatch.setattr(Exclusive, "offer", (lambda *_: None) if on else offer)
        monkeypatch.setattr(Exclusive, "more", (lambda *_, **__: None) if on else more)

    return switch


def counted(client: txnkv.Client) -> tuple[int, int]:
    metrics = internals.coordinator(client).metrics
    return metrics.messages_delivered.value, metrics.messages_acked.value


@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_the_long_way_answers_the_same(
    tmp_path: Path, long_way: Callable[[bool], None], partitions: int, seed: int
) -> None:
    rng = random.Random(seed)
    short, long = (Program(tmp_path / name, partitions) for name in ("short", "long"))
    try:
        answer_the_same(short, long, [step(rng) for _ in range(STEPS)], long_way)
        for program in short, long:
            program.again()
        assert short.note(short.sub.receive_many(10_000, timeout=0)) == long.note(
            long.sub.receive_many(10_000, timeout=0)
        )
        assert counted(short.client) == counted(long.client)
    finally:
        short.close()
        long.close()


def test_most_calls_are_short(
    client: txnkv.Client, topic: txnkv.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 300 messages that follow each other a few take a look: calls are counted, not time."""
    looks = Counter[str]()
    take, acknowledge = ExclusiveReader.take, TxnContext.acknowledge

    def counted_take(*args: Any) -> Any:
        looks["receive"] += 1
        return take(*args)

    def counted_acknowledge(*args: Any, **options: Any) -> None:
        looks["ack"] += 1
        acknowledge(*args, **options)

    monkeypatch.setattr(ExclusiveReader, "take", counted_take)
    monkeypatch.setattr(TxnContext, "acknowledge", counted_acknowledge)
    sub = topic.subscribe("s")
    for number in range(300):  # each with a marker behind it
        with client.transaction() as txn:
            txn.send(topic, b"%d" % number)
    with client.transaction() as txn:
        for number in range(300):
            message = sub.receive(timeout=1)
            assert message is not None
            assert message.value == b"%d" % number
            txn.ack(sub, message)
    assert max(looks.values()) <= 5, looks
    assert sub.receive(timeout=0) is None
    assert sub.lag() == {0: 0}


def test_acks_of_many_threads(client: txnkv.Client, topic: txnkv.Topic) -> None:
    """One thread receives; others acknowledge, each in transactions of its own, of which some are
    rolled back: each message is deleted once.
    """
    sub, count, workers = topic.subscribe("s"), 400, 4
    send(client, *range(count))
    waiting, done, lock = list[txnkv.Message](), Counter[int](), threading.Lock()
    ended = threading.Event()

    def work(seed: int) -> None:
        rng = random.Random(seed)
        while not ended.is_set():
            with lock:
                some = [waiting.pop(0) for _ in range(min(len(waiting), rng.randint(1, 20)))]
            txn = client.new_transaction()
            for message in some:
                txn.ack(sub, message)
            if rng.random() < 0.3:
                txn.rollback()
            else:
                txn.commit()
                with lock:
                    done.update(message.offset for message in some)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(workers)]
    for thread in threads:
        thread.start()
    try:
        while done.total() < count and all(thread.is_alive() for thread in threads):
            if (message := sub.receive(timeout=0.01)) is not None:
                with lock:
                    waiting.append(message)
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert sorted(done.elements()) == list(range(count))
    assert sub.committed() == {0: count}


@pytest.mark.parametrize("kind", ["exclusive", "shared", "key_shared"])
@pytest.mark.parametrize("most", [1, 7])
def test_threads_that_receive(client: txnkv.Client, kind: Any, most: int) -> None:
    """A message on its way to one of them was taken for one that a signal has kept from its caller,
    and given again.
    """
    topic, count = client.create_topic("events", partitions=2), 400
    sub, seen, lock = topic.subscribe("s", kind), Counter[bytes](), threading.Lock()
    for first in range(0, count, 40):
        with client.transaction() as txn:
            for number in range(first, first + 40):
                txn.send(topic, b"%d" % number, key=b"%d" % (number % 9))

    def receive() -> None:
        while seen.total() < count:
            if most == 1:
                found = [one] if (one := sub.receive(timeout=0.05)) else []
            else:
                found = sub.receive_many(most, timeout=0.05)
            with lock:
                seen.update(one.value for one in found)
            sub.ack(found)

    threads = [threading.Thread(target=receive) for _ in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        receive()
    finally:
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()
    assert seen == Counter(b"%d" % number for number in range(count))


def test_what_ends_the_short_cuts(client: txnkv.Client, topic: txnkv.Topic) -> None:
    """They are offered, and then the transaction, the consumer or the client is not open."""
    send(client, *range(9))
    sub = topic.subscribe("s")
    had = [sub.receive(timeout=1) for _ in range(5)]
    txn = client.new_transaction()
    for message in had[:2]:
        txn.ack(sub, message)
    txn.commit()
    with pytest.raises(txnkv.InvalidTxnStateError):
        txn.ack(sub, had[2])
    late = client.new_transaction(timeout=0.05)
    for message in had[2:4]:
        late.ack(sub, message)
    time.sleep(0.06)
    with pytest.raises(txnkv.TransactionTimedOutError):
        late.ack(sub, had[4])
    late.rollback()
    soon: Any = "soon"
    with pytest.raises(TypeError):
        sub.receive(timeout=soon)
    other = txnkv.connect(client.path)
    txn = other.new_transaction()
    for message in had[2:4]:
        txn.ack(sub, message)
    other.close()
    with pytest.raises(txnkv.ClosedError):
        txn.ack(sub, had[4])
    sub.close()
    with pytest.raises(txnkv.ClosedError):
        sub.receive(timeout=0)


@pytest.mark.parametrize("calls", [(1, 1, 1), (1, 2, 1), (2, 1, 1)])
def test_a_signal_keeps_no_message_back(
    client: txnkv.Client, topic: txnkv.Topic, calls: tuple[int, ...]
) -> None:
    """At each instant of a few calls: those that follow give all, once and in order."""
    send(client, *range(6))

    def interrupted(n: int) -> Interruption:
        interruption, seen = Interruption(n), list[int]()
        with topic.subscribe("s") as sub:

            def receive() -> None:
                for most in calls:
                    if most == 1:
                        found: Any = sub.receive(timeout=0)
                        seen.append(found.offset)
                    else:
                        seen.extend(one.offset for one in sub.receive_many(most, timeout=0))

            interruption.run(receive)
            inmost = (interruption.where or "").split(" < ")[0]
            delivery = sub._delivery
            assert delivery is not None
            quick = delivery.unsure is not None
            while (message := sub.receive(timeout=0)) is not None:
                seen.append(message.offset)
        # Where a call of Python returns, as to `receive` from `receive_many`, no handler runs.
        if quick or not ("Subscription.receive " in inmost or __file__ in inmost):
            assert seen == [*range(6)], interruption.where
        return interruption

    for n in range(1, interrupted(1 << 40).passed + 1):
        interrupted(n)


def test_another_thread_does_not_forget_what_the_main_one_may_not_have(
    client: txnkv.Client, topic: txnkv.Topic
) -> None:
    send(client, *range(5))
    sub = topic.subscribe("s")
    seen = [sub.receive(timeout=0)]
    delivery = sub._delivery
    assert delivery is not None
    assert delivery.receive() is delivery.unsure  # as if interrupted before it has the message
    thread = threading.Thread(target=lambda: seen.extend(sub.receive_many(2, timeout=0)))
    thread.start()
    thread.join()
    seen += [sub.receive(timeout=0) for _ in range(2)]
    assert sorted(one.offset for one in seen if one is not None) == [0, 1, 2, 3, 4]


def test_a_run_that_was_replaced_takes_no_more(client: txnkv.Client, topic: txnkv.Topic) -> None:
    """Another thread may have it in its hand while the transaction commits."""
    subs = [topic.subscribe(name) for name in "ab"]
    send(client, *range(9))
    had = [[sub.receive(timeout=0) for _ in range(9)] for sub in subs]
    txn = client.new_transaction()
    for number in range(3):
        txn.ack(subs[0], had[0][number])
    run = txn.context.local.acks
    assert run is not None
    for number in range(3):
        txn.ack(subs[1], had[1][number])
    assert txn.context.local.acks is not run
    assert not run.take(subs[0], had[0][3])
    txn.ack(subs[0], had[0][4])
    txn.commit()
    assert [sub.committed()[0] for sub in subs] == [3, 3]
    assert not run.take(subs[0], had[0][5])
    subs[0].close()
    left = topic.subscribe("a").receive_many(9, timeout=0)
    assert [one.offset for one in left] == [3, 5, 6, 7, 8]


def test_an_ack_while_messages_are_offered(
    client: txnkv.Client, topic: txnkv.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one of them, by another thread, between the look whether all are free and the offer."""
    send(client, *range(8))
    with topic.consumer() as consumer:
        every = consumer.poll(timeout=0)
    sub, txn = topic.subscribe("s"), client.new_transaction()
    first = sub.receive_many(3, timeout=0)
    for message in first[:2]:
        txn.ack(sub, message)
    run, look, taken = txn.context.local.acks, Exclusive.first_taken, list[bool]()
    assert run is not None

    def first_taken(state: Exclusive, id: int, first: int, last: int) -> int | None:
        found = look(state, id, first, last)
        if last - first > 8 and state.delivery is sub._delivery and first == 4:
            taken.append(run.take(sub, every[6]))
        return found

    monkeypatch.setattr(Exclusive, "first_taken", first_taken)
    given = []
    while (one := sub.receive(timeout=0)) is not None:
        given.append(one.offset)
    assert taken == [False]
    assert given == [3, 4, 5, 6, 7]


def test_what_is_undone_after_a_look_that_failed(
    client: txnkv.Client, topic: txnkv.Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(client, *range(4))
    sub = topic.subscribe("s")
    assert [sub.receive(timeout=0) is not None for _ in range(4)] == [True] * 4
    with monkeypatch.context() as patched:
        patched.setattr(ExclusiveReader, "_gather", Mock(side_effect=txnkv.UnavailableError("no")))
        with pytest.raises(txnkv.UnavailableError):
            sub.receive(timeout=0)
    sub.unreceive()
    assert [one.offset for one in sub.receive_many(9, timeout=0)] == [3]


def test_a_value_that_refers_to_the_consumer(client: txnkv.Client) -> None:
    topic = client.create_topic("typed", value_schema=pa.schema([("a", pa.int64())]))
    with client.transaction() as txn:
        for number in range(3):
            txn.send(topic, {"a": number})
    sub = topic.subscribe("s")
    for _ in range(2):
        message = sub.receive(timeout=0)
        assert message is not None
        message.value["by"] = sub
    gone = weakref.ref(sub)
    del sub, message
    gc.collect()
    assert gone() is None
