"""Waiting: one looks for all, and nobody sleeps through what concerns it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import txnkv
from tests import internals
from tests.topics.subscriptions.subscription_tools import send, take
from txnkv.coordinator import Timestamp
from txnkv.topics import LeaseReader, waiting


@pytest.fixture
def receivers() -> Any:
    """Starts threads that receive once; answers what they were given."""
    threads: list[threading.Thread] = []

    def start(sub: txnkv.Subscription, timeout: float | None = 60) -> list[Any]:
        found: list[Any] = []

        def receive() -> None:
            try:
                found.append(sub.receive(timeout=timeout))
            except txnkv.TxnkvError as error:
                found.append(error)

        threads.append(threading.Thread(target=receive, name="receiver"))
        threads[-1].start()
        return found

    yield start
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()


def until(there: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not there():
        assert time.monotonic() < end
        time.sleep(0.005)


def asleep(client: txnkv.Client) -> int:
    return len(internals.topics(client).watch._asleep)


def subscribed(topic: txnkv.Topic, n: int) -> list[txnkv.Subscription]:
    return [
        topic.subscribe(f"s{i}", type="shared" if i % 2 else "exclusive", lease_seconds=0.5)
        for i in range(n)
    ]


def test_one_looks_for_all_that_wait(
    client: txnkv.Client, topic: txnkv.Topic, receivers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred that waited cost a quarter of a core: each looked a hundred times a second."""
    lookers: list[threading.Thread] = []
    watch = internals.topics(client).watch
    real = watch.nap

    def nap(*args: Any) -> None:
        lookers.append(threading.current_thread())
        real(*args)

    subs = subscribed(topic, 20)
    found = [receivers(sub) for sub in subs]
    until(lambda: asleep(client) == 19)
    with monkeypatch.context() as counted:
        counted.setattr(watch, "nap", nap)
        start = internals.store(client).runtime.change_number()
        until(lambda: len(lookers) > 20)
        assert len({*lookers}) == 1
        assert internals.store(client).runtime.change_number() == start
    send(client, "for all")
    until(lambda: all(found))
    assert {each[0].value for each in found} == {b"for all"}


def test_another_leads_when_the_first_has_its_message(
    client: txnkv.Client, topic: txnkv.Topic, receivers: Any
) -> None:
    other = client.create_topic("other")
    first = receivers(other.subscribe("s"))
    until(lambda: internals.topics(client).watch._leader is not None)
    rest = [receivers(sub) for sub in subscribed(topic, 6)]
    until(lambda: asleep(client) == 6)
    send(client, "other", topic="other")
    until(lambda: bool(first))
    until(lambda: asleep(client) == 5)
    send(client, "rest")
    until(lambda: all(rest))


def test_one_that_leads_and_gives_up_leaves_it_to_another(
    client: txnkv.Client, topic: txnkv.Topic, receivers: Any
) -> None:
    one, two, three = subscribed(topic, 3)
    leads = receivers(one, timeout=0.3)
    found = [receivers(two), receivers(three)]
    until(lambda: bool(leads))
    assert leads == [None]
    send(client, "rest")
    until(lambda: all(found))


@pytest.mark.parametrize("kind", ["rollback", "lease", "close"])
def test_what_no_change_shows_wakes_whom_it_concerns(
    client: txnkv.Client, topic: txnkv.Topic, receivers: Any, kind: str
) -> None:
    send(client, 0)
    exclusive, shared = subscribed(topic, 2)
    txn = client.new_transaction()
    txn.ack(exclusive, take(exclusive))
    take(shared)
    receivers(client.create_topic("other").subscribe("s"))
    until(lambda: internals.topics(client).watch._leader is not None)
    concerned = shared if kind == "lease" else exclusive
    found = receivers(concerned)
    if kind == "rollback":
        txn.rollback()
    elif kind == "close":
        until(lambda: asleep(client) == 1)
        concerned.close()
    until(lambda: bool(found))
    if kind == "close":
        assert isinstance(found[0], txnkv.ClosedError)
    else:
        assert found[0].value == b"0"
    send(client, "end", topic="other")


# -- whom a change concerns ------------------------------------------------------------

ACK_BY_TOKEN = """
joined = txnkv.Transaction.deserialize(client, token)
joined.ack(info, id)
joined.flush()
"""


class Polls:
    """A consumer that receives as a subscription does."""

    def __init__(self, topic: txnkv.Topic) -> None:
        self.consumer = topic.consumer()

    def receive(self, timeout: float | None) -> txnkv.Message:
        return self.consumer.poll(timeout=timeout)[0]


def waiter(topic: txnkv.Topic, kind: str) -> Any:
    return Polls(topic) if kind == "consumer" else topic.subscribe("s")


@pytest.mark.parametrize("kind", ["consumer", "subscription"])
@pytest.mark.parametrize("leads", [True, False])
def test_a_change_elsewhere_wakes_nobody(
    client: txnkv.Client,
    topic: txnkv.Topic,
    receivers: Any,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    leads: bool,
) -> None:
    """Of fifty that waited each looked at each commit, and the last began 8 ms later."""
    there = waiter(topic, kind)
    looks: list[int] = []
    looking, name = (there.consumer, "_gather") if kind == "consumer" else (there, "_take")
    real = getattr(looking, name)

    def look(most: int) -> Any:
        looks.append(most)
        return real(most)

    monkeypatch.setattr(looking, name, look)
    other = client.create_topic("other").subscribe("s")
    client.create_topic("third")
    watch = internals.topics(client).watch
    if leads:
        found = receivers(there)
        until(lambda: watch._leader is not None)
    else:
        receivers(other)
        until(lambda: watch._leader is not None)
        found = receivers(there)
        until(lambda: asleep(client) == 1)
    before = len(looks)
    for _ in range(5):
        send(client, "elsewhere", topic="third")
        until(lambda: watch.noticed == watch.now())
    assert len(looks) == before
    assert not found
    send(client, "here")
    until(lambda: bool(found))
    assert found[0].value == b"here"
    send(client, "end", topic="other")


@pytest.mark.parametrize("leads", [True, False])
@pytest.mark.parametrize(
    ("kind", "event"),
    [
        *(("consumer", event) for event in ("message", "partition", "topic")),
        *(("subscription", event) for event in ("message", "partition", "topic", "dropped", "ack")),
    ],
)
def test_nobody_sleeps_through_what_concerns_it(
    client: txnkv.Client,
    topic: txnkv.Topic,
    receivers: Any,
    elsewhere: Any,
    kind: str,
    event: str,
    leads: bool,
) -> None:
    there = waiter(topic, kind)
    txn = client.new_transaction()
    if event == "ack":  # by another process, and given back
        send(client, "back")
        elsewhere(ACK_BY_TOKEN, token=str(txn.serialize()), info=there.info, id=take(there).id)
    watch = internals.topics(client).watch
    if not leads:
        receivers(client.create_topic("other").subscribe("s"))
        until(lambda: watch._leader is not None)
    found = receivers(there)
    until(lambda: asleep(client) == 1 if not leads else watch._leader is not None)
    if event == "message":
        elsewhere("client.topic('events').producer().send(b'x').result(60)")
    elif event == "partition":
        elsewhere(
            "client.topic('events').alter(partitions=2)\n"
            "with client.transaction() as txn: txn.send('events', b'x', partition=1)"
        )
    elif event == "topic":
        elsewhere("client.drop_topic('events')")
    elif event == "dropped":
        elsewhere("client.topic('events').drop_subscription('s')")
    else:
        txn.rollback()
    until(lambda: bool(found))
    if event in ("topic", "dropped"):
        assert isinstance(found[0], txnkv.TxnkvError)
        assert "dropped" in str(found[0])
    else:
        assert found[0].value == (b"back" if event == "ack" else b"x")
    if not leads:
        send(client, "end", topic="other")


# -- groups ----------------------------------------------------------------------------


def test_one_of_those_that_share_looks_for_a_message(
    client: txnkv.Client, topic: txnkv.Topic, receivers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All woke at each commit, and queued for the write lock: 500 took 53 s for 500 messages."""
    monkeypatch.setattr(waiting, "_ROUND", 1 << 60)  # nobody looks but for a message
    internals.topics(client).watch._next_round = 1 << 62
    subs = [topic.subscribe("s", type="shared") for _ in range(20)]
    found = [receivers(sub) for sub in subs]
    until(lambda: asleep(client) == 19)
    lookers: list[Any] = []
    real = LeaseReader.take

    def take(reader: LeaseReader, most: int) -> Any:
        lookers.append(reader)
        return real(reader, most)

    with monkeypatch.context() as counted:
        counted.setattr(LeaseReader, "take", take)
        send(client, 0)
        until(lambda: any(found))
        time.sleep(0.2)
        assert len({*lookers}) < 10  # and who comes next, and who leads, late ones too
    for n in range(1, 20):
        send(client, n)
    until(lambda: all(found))
    assert sorted(int(each[0].value) for each in found) == list(range(20))


def test_those_that_share_keys_all_get_what_is_theirs(
    client: txnkv.Client, topic: txnkv.Topic, receivers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a round that would mend it."""
    monkeypatch.setattr(waiting, "_ROUND", 1 << 60)
    internals.topics(client).watch._next_round = 1 << 62
    subs = [topic.subscribe("s", type="key_shared") for _ in range(8)]
    found = [receivers(sub) for sub in subs]
    until(lambda: asleep(client) == 7)
    n = 0
    while not all(found):
        send(client, n, key=str(n))
        n += 1
        assert n < 2000
    taken = [each[0].offset for each in found]
    assert len({*taken}) == 8


class Told:
    """Waits of one group, as tasks have them, in a store that changes when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, n: int, *, each_its_own: bool) -> None:
        monkeypatch.setattr(waiting, "_ROUND", 1 << 60)
        self.woken: list[int] = []
        self.number = 2
        store: Any = self  # what a watch asks of the runtime and the log
        self.watch = waiting.Watch(store, store)
        self.watch._next_round = 1 << 62
        self.watch._onlooker = waiting._Onlooker(self.watch, None)  # it does nothing
        self.waits = [
            waiting.Waiting(self.watch, None, group="g", each_its_own=each_its_own)
            for _ in range(n)
        ]
        self.sleepers: dict[Any, Any] = {}
        for i in range(n):
            self.look(i)

    def change_word(self) -> int:
        return self.number

    def latest(self) -> Timestamp:
        return Timestamp(self.number)

    def look(self, i: int) -> None:
        """One of them looks, finds nothing, and waits."""
        self.waits[i].mark()
        self.waits[i].tell(lambda: self.woken.append(i))

    def change(self) -> None:
        self.number += 2
        self.watch.notice()


def test_the_next_of_a_group_is_woken_when_one_has_found_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = Told(monkeypatch, 5, each_its_own=False)
    assert told.woken == []
    told.change()
    told.change()
    assert told.woken == [0]
    told.waits[0].end()
    assert told.woken == [0, 1]
    told.look(1)
    assert told.woken == [0, 1]
    told.change()
    assert told.woken == [0, 1, 2]  # they have not looked for longer
    told.waits[3].end()  # gives up, and has no turn to pass on
    assert told.woken == [0, 1, 2]
    told.waits[2].mark()
    told.number += 2  # behind its look
    told.watch.notice()
    assert told.woken == [0, 1, 2]
    told.waits[2].tell(lambda: told.woken.append(2))
    assert told.woken == [0, 1, 2, 2]


def test_each_of_a_group_looks_in_its_turn_where_each_has_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = Told(monkeypatch, 4, each_its_own=True)
    told.change()
    for _ in range(3):
        told.look(told.woken[-1])
    assert told.woken == [0, 1, 2, 3]
    told.change()
    told.look(3)
    assert told.woken == [0, 1, 2, 3, 0]


def test_a_turn_that_is_lost_comes_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many that cannot run, those of a loop that is blocked, each kept the free ones waiting."""
    told = Told(monkeypatch, 8, each_its_own=False)
    monkeypatch.setattr(waiting, "_ROUND", 0)
    for _ in range(3):
        told.change()
    assert told.woken == [0, 1, 2, 3, 4, 5, 6]
    told.look(6)
    assert told.woken == [0, 1, 2, 3, 4, 5, 6]
    told.change()
    assert told.woken == [0, 1, 2, 3, 4, 5, 6, 7]  # one at a time again
