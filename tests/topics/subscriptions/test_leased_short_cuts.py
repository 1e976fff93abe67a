"""Leased messages that are received and acknowledged one by one: the short cuts against the long
way, as `test_one_by_one` has it of an exclusive subscription.

The same calls are made of two stores. In one of them each receive looks first, each ack asks for
all that may refuse it, and each write has what is known looked at again. Both answer the same.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import txnkv
from tests import internals
from tests.topics.subscriptions.subscription_tools import answer_the_same, send, take
from txnkv.coordinator import Coordinator
from txnkv.coordinator.commit_log import CommitLog
from txnkv.topics import LeaseReader
from txnkv.topics.acks import ack_rows
from txnkv.topics.delivery import TransactionAcks, transaction_acks

NAMES = ("A", "B", "C")
STEPS = 300
_REGISTER_OWN, _KNOWS = ack_rows.register_own, LeaseReader._knows_enough
_BESIDE = Coordinator.write_beside


class Program:
    """Two consumers, three transactions, and a client beside them; answers are plain values."""

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        self.client = txnkv.connect(path)
        self.topic = self.client.create_topic("events")
        self.options = options
        self.subs = [self.topic.subscribe("s", **options) for _ in self.places]
        self.had: list[txnkv.Message] = []
        self.open: dict[str, txnkv.Transaction] = {}
        self.n = 0

    @property
    def places(self) -> range:
        return range(1 if self.options["type"] == "exclusive" else 2)

    def send(self, count: int, commit: bool) -> None:
        txn = self.client.new_transaction()
        for _ in range(count):
            self.n += 1
            txn.send(self.topic, b"%d" % self.n)
        (txn.commit if commit else txn.rollback)()

    def txn(self, name: str) -> txnkv.Transaction:
        if name not in self.open:
            self.open[name] = self.client.new_transaction()
        return self.open[name]

    def receive(self, which: int, most: int) -> Any:
        sub = self.subs[which % len(self.subs)]
        found = sub.receive_many(most, timeout=0) if most else [sub.receive(timeout=0)]
        got = [one for one in found if one is not None]
        self.had += got
        return [(one.offset, one.value, one.redelivery_count) for one in got]

    def end(self, name: str, how: str) -> None:
        if (txn := self.open.pop(name, None)) is not None:
            getattr(txn, how)()

    def again(self, which: int) -> None:
        which %= len(self.subs)
        self.subs[which].close()
        self.subs[which] = self.topic.subscribe("s", **self.options)

    def close(self) -> None:
        for txn in self.open.values():
            with suppress(txnkv.TxnkvError):
                txn.rollback()
        self.client.close()


def step(rng: random.Random) -> Callable[[Program], Any]:
    kind, name, which, n = rng.random(), rng.choice(NAMES), rng.randrange(2), rng.randint(1, 5)
    at = rng.random()

    def chosen(program: Program) -> txnkv.Message:
        return program.had[-1 - int(at * at * len(program.had))]

    if kind < 0.35:
        return lambda p: p.receive(which, 0)
    if kind < 0.65:
        return lambda p: p.txn(name).ack(p.subs[0], chosen(p))
    if kind < 0.70:
        return lambda p: p.txn(name).ack(p.subs[which % len(p.subs)], p.had[-n:])
    return rng.choice(
        [
            lambda p: p.send(n, commit=True),
            lambda p: p.send(n, commit=at < 0.7),
            lambda p: p.receive(which, n),
            lambda p: p.end(name, "commit"),
            lambda p: p.end(name, "commit"),
            lambda p: p.end(name, "rollback"),
            lambda p: p.subs[0].ack(chosen(p)),
            lambda p: p.subs[0].nack(chosen(p)),
            lambda p: p.subs[0].seek(0, "earliest" if at < 0.5 else "latest"),
            lambda p: p.again(which),
            lambda p: p.txn(name).serialize() is None,
            lambda p: p.txn(name).upsert("rows", (n, which)),
        ]
    )


@pytest.fixture
def long_way(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    def write(coordinator: Coordinator) -> Any:
        return coordinator.store.status.write(sync=False)

    def switch(on: bool) -> None:
        monkeypatch.setattr(
            ack_rows, "register_own", (lambda *_, **__: None) if on else _REGISTER_OWN
        )
        monkeypatch.setattr(LeaseReader, "_knows_enough", (lambda _: False) if on else _KNOWS)
        monkeypatch.setattr(Coordinator, "write_beside", write if on else _BESIDE)

    return switch


@pytest.mark.parametrize(
    "options",
    [{"type": "shared"}, {"type": "exclusive", "max_deliveries": 1000}],
    ids=["shared", "counted"],
)
@pytest.mark.parametrize("seed", range(6))
def test_the_long_way_answers_the_same(
    tmp_path: Path, long_way: Callable[[bool], None], options: dict[str, Any], seed: int
) -> None:
    rng = random.Random(seed)
    short, long = (Program(tmp_path / name, options) for name in ("short", "long"))
    schema = txnkv.Schema({"id": "int64", "v": "int64"}, primary_key=["id"])
    try:
        for program in short, long:
            program.client.create_table("rows", schema)
        answer_the_same(short, long, [step(rng) for _ in range(STEPS)], long_way)
        for program in short, long:
            for sub in program.subs[1:]:
                sub.close()
        assert short.receive(0, 10_000) == long.receive(0, 10_000)
        assert rows(short) == rows(long)
    finally:
        short.close()
        long.close()


def rows(program: Program) -> list[Any]:
    """The truth: what is deleted, leased and pending, and of the table."""
    with internals.status(program.client).read() as cur:
        return [
            *cur.execute("SELECT mark_delete, dispatched FROM cursors").fetchall(),
            *cur.execute("SELECT first, last FROM acked_ranges").fetchall(),
            *cur.execute("SELECT message, deliveries FROM leases").fetchall(),
            *cur.execute("SELECT first, last FROM pending_acks").fetchall(),
            *program.client.table("rows").scan(ordered=True).to_arrow().to_pylist(),
        ]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the calls that read or ask what the short cuts do without."""
    found = Counter[str]()
    for owner, name in (
        (LeaseReader, "_look"),
        (TransactionAcks, "_write_checked"),
        (CommitLog, "_catch_up"),
    ):
        was = getattr(owner, name)

        def counted(
            *args: Any, name: str = name, was: Callable[..., Any] = was, **more: Any
        ) -> Any:
            found[name] += 1
            return was(*args, **more)

        monkeypatch.setattr(owner, name, counted)
    return found


def test_a_queue_worked_on_one_by_one_looks_seldom(
    client: txnkv.Client, looks: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txnkv.topics.delivery.leases._APART", 1 << 40)
    topic = client.create_topic("jobs")
    sub = topic.subscribe("s", type="shared")
    send(client, *range(200), topic="jobs")
    take(sub)
    looks.clear()
    for _ in range(199):
        message = take(sub)
        with client.transaction() as txn:
            txn.ack(sub, message)
    assert sum(looks.values()) < 10, looks
    assert sub.receive(timeout=0) is None


@pytest.mark.parametrize("type", ["exclusive", "shared"])
def test_a_message_that_was_just_sent_is_acknowledged_without_a_look(
    client: txnkv.Client, monkeypatch: pytest.MonkeyPatch, type: Any
) -> None:
    topic = client.create_topic("jobs", partitions=2)
    sub = topic.subscribe("s", type=type)
    monkeypatch.setattr(transaction_acks, "bounds", None)  # it would be called
    for number in range(20):
        send(client, number, topic="jobs")
        message = take(sub)
        with client.transaction() as txn:
            txn.ack(sub, message)
    monkeypatch.undo()
    with pytest.raises(txnkv.OffsetOutOfRangeError), client.transaction() as txn:
        txn.ack(sub, txnkv.MessageId(0, message.offset + 1000))


def test_what_others_commit_between_two_leases_is_seen(
    client: txnkv.Client, process: Callable[..., Any]
) -> None:
    """A lease keeps what is known of the store as known, but not over others' commits."""
    topic = client.create_topic("jobs")
    schema = txnkv.Schema({"id": "int64", "v": "int64"}, primary_key=["id"])
    table = client.create_table("rows", schema)
    sub = topic.subscribe("s", type="shared")
    send(client, *range(30), topic="jobs")
    other = process(
        """
        client = txnkv.connect(_path, **_options)
        say()
        while (word := wait()) != "end":
            with client.transaction() as txn:
                txn.upsert("rows", (1, int(word)))
            say()
        """
    )
    other.hear()
    for number in range(15):
        message = take(sub)
        other.tell(str(number))
        other.hear()
        assert table.get(1) == {"id": 1, "v": number}
        with client.transaction() as txn:
            assert txn.get(table, 1) == {"id": 1, "v": number}
            txn.ack(sub, message)
            take(sub)
        assert table.get(1) == {"id": 1, "v": number}
    other.tell("end")
    other.finish()


def test_who_finds_that_others_were_first_writes_nothing(client: txnkv.Client) -> None:
    """Or all that wait would look again, one after the other."""
    topic = client.create_topic("jobs")
    first, second = (topic.subscribe("s", type="shared") for _ in range(2))
    runtime = internals.coordinator(client).store.runtime
    for number in range(5):
        send(client, number, topic="jobs")
        assert first.receive(timeout=0) is not None
        before = runtime.change_number()
        assert second.receive(timeout=0) is None
        second.nack(txnkv.MessageId(0, number))
        assert runtime.change_number() == before


def test_an_ack_of_a_lease_is_refused_where_its_topic_was_dropped(client: txnkv.Client) -> None:
    topic = client.create_topic("jobs")
    sub = topic.subscribe("s", type="shared")
    send(client, 1, 2, topic="jobs")
    first, second = take(sub), take(sub)
    txn = client.new_transaction()
    txn.ack(sub, first)
    client.drop_topic("jobs")
    with pytest.raises(txnkv.TopicNotFoundError):
        txn.ack(sub, second)
    with pytest.raises((txnkv.TopicNotFoundError, txnkv.InvalidTxnStateError)):
        txn.commit()
