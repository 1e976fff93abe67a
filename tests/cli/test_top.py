"""`txnkv top`: a store in use, seen by another."""

from __future__ import annotations

import os
from contextlib import suppress

import pytest

import txnkv
from txnkv.cli.top import _rates, _share
from txnkv.metrics import Metrics
from txnkv.topics import outbox
from txnkv.topics.delivery.subscriptions import Subscriptions


@pytest.fixture
def busy(store, monkeypatch):
    """A store with rows, messages of which one holds up three, and a subscription that lags."""
    with txnkv.connect(store) as client:
        table = client.create_table("orders", txnkv.Schema({"id": "int64"}, ["id"]))
        events = client.create_topic("events")
        events.subscribe("mailer").close()
        with client.transaction() as txn:
            txn.insert(table, (1,))
            txn.send(events, b"first")
            txn.mark_applied("daily", 17)
        holder = client.new_transaction(timeout=600)
        with monkeypatch.context() as patch:
            patch.setattr(outbox, "MAX_BYTES", -1)
            holder.send(events, b"held")
            holder.flush()
        with client.transaction() as txn:
            txn.send(events, b"behind")
        yield client, holder
        with suppress(txnkv.ClosedError):
            holder.rollback()


def test_it_tells_who_holds_up_whom(busy, store, run):
    _, holder = busy
    view = run("top", store, "--json", "--interval", 0.2).json
    (transaction,) = view["transactions"]
    assert (transaction["id"], transaction["state"]) == (holder.id.local, "OPEN")
    assert (transaction["timeout"], transaction["holds_up"]) == (600.0, ["events/0 @1"])
    assert view["held_up"] == [
        {"partition": "events/0", "stable": 1, "end": 3, "held_up_by": holder.id.local}
    ]
    (subscription,) = view["subscriptions"]
    assert (subscription["name"], subscription["lag"]) == ("mailer", 1)
    (stream,) = view["applications"]
    assert (stream["name"], stream["version"]) == ("daily", 17)
    assert 0 <= stream["seconds"] < 600
    assert view["tables"]["orders"]["rows"] == 1
    assert view["oldest_snapshot"]["pid"] == os.getpid()
    shown = run("top", store, "--interval", 0.2).out
    for part in ("transactions", "events/0 @1", "mailer", "daily", "orders",
                 "oldest", f"txnkv txn abort {store} {holder.id.local}"):  # fmt: skip
        assert part in shown


def test_it_asks_each_subscription_once_a_look(busy, store, run, monkeypatch):
    """Whose lag took a second took three."""
    asked = []
    lag = Subscriptions.lag
    monkeypatch.setattr(Subscriptions, "lag", lambda *args: asked.append(args) or lag(*args))
    run("top", store, "--once", "--interval", 1.5)
    assert len(asked) == 3


def test_a_terminal_that_draws_nothing_gets_one_look(busy, store, run, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    assert "events/0 @1" in run("top", store, "--interval", 0.2).out


def test_processes_tell_their_numbers_while_somebody_watches(busy, store, run, until):
    client, holder = busy
    files = store / "runtime"
    assert not list(files.glob("metrics-*"))

    def told():
        with client.transaction() as txn:
            txn.upsert("orders", (2,))
        view = run("top", store, "--json", "--interval", 0.2).json
        return view["processes"] == [os.getpid()] and view["memory_bytes"] > 0

    until(told, 300)
    assert (
        len(list(files.glob("metrics-*"))) == len(list(files.glob(f"metrics-{os.getpid()}-*"))) == 1
    )
    holder.rollback()
    client.close()
    assert not list(files.glob("metrics-*"))


def test_rates_are_of_processes_that_are_in_both_samples():
    def numbers(commits, lengths):
        metrics = Metrics()
        metrics.commits.add(commits)
        metrics.memory_bytes.set(10)
        for seconds in lengths:
            metrics.commit_seconds.observe(seconds)
        return dict(metrics.snapshot())

    one, two, dead, new = (1, "a"), (1, "b"), (3, "c"), (4, "d")  # two of containers, with one PID
    before = {one: numbers(100, [0.5]), two: numbers(7, []), dead: numbers(50, [])}
    after = {
        one: numbers(160, [0.5, 0.0001, 0.0001]),
        two: numbers(37, [0.03]),
        new: numbers(9, [5.0]),
    }
    found = _rates(10.0, before, 12.0, after)
    assert found["processes"] == [1, 1, 4]
    assert found["per_second"]["commits"] == 45.0
    assert found["memory_bytes"] == 30
    assert found["commit_seconds"] == {"p50": 1e-4, "p99": 5e-2}
    assert _rates(10.0, {}, 12.0, {})["commit_seconds"] == {"p50": None, "p99": None}
    assert _share({0.1: 0, 0.2: 3, 0.5: 1}, 0.75) == 0.2
