"""Messages that are received and acknowledged one by one: the short cuts against the long way.

The same calls are made of two stores. In one of them nothing is offered to `Delivery.receive` and
`AckRun.take`, so that each call looks for itself. Both answer the same.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import txnkv
from tests import internals
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


def asked(program: Program, call: Callable[[Program], Answer]) -> Answer:
    try:
        return call(program)
    except (txnkv.TxnkvError, IndexError) as error:
        for name, txn in list(program.open.items()):
            if txn.state is not txnkv.TxnState.OPEN:
                del program.open[name]
        return type(error)


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
        for number in range(STEPS):
            call = step(rng)
            found = asked(short, call)
            long_way(True)
            wanted = asked(long, call)
            long_way(False)
            assert found == wanted, number
        for program in short, long:
            for name in NAMES:
                asked(program, lambda p, name=name: p.end(name, "rollback"))
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
    with client.transaction() as txn:
        for number in range(count):
            txn.send(topic, b"%d" % number)
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


def test_what_ends_the_short_cuts(client: txnkv.Client, topic: txnkv.Topic) -> None:
    """They are offered, and then the transaction, the consumer or the client is not open."""
    with client.transaction() as txn:
        for number in range(9):
            txn.send(topic, b"%d" % number)
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
    with pytest.raises(TypeError):
        sub.receive(timeout="soon")  # type: ignore[call-overload]
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
