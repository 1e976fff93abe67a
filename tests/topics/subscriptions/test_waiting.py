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

    def nap(waiting: Any, seconds: float) -> None:
        lookers.append(threading.current_thread())
        real(waiting, seconds)

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
    until(lambda: internals.topics(client).watch._led)
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
    until(lambda: internals.topics(client).watch._led)
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
