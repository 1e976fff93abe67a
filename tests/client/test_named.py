"""Transactions under a name: a successor ends its predecessor."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from txnkv.client import attempts
from txnkv.client.attempts import NAMES_TABLE
from txnkv.errors import ProducerFencedError
from txnkv.storage.faults import arm, disarm

Connect = Callable[..., txnkv.Client]


def keys(client: txnkv.Client) -> list[int]:
    return [row["id"] for row in client.table("t").scan(ordered=True)]


def test_a_successor_ends_its_predecessor(
    client: txnkv.Client, table: txnkv.Table, connect: Connect, size: str
) -> None:
    """What it does from then on is refused; small writes, which wait in memory, with its commit."""
    other = connect()
    topic = client.create_topic("events")
    with client.new_session() as session:
        session.send(topic, b"before")
    subscription = topic.subscribe("s")
    message = subscription.receive()
    first = client.new_transaction(name="n")
    first.insert(table, (1, "never"))
    first.send(topic, b"never")
    first.ack(subscription, message)
    first.flush()
    second = other.new_transaction(name="n")
    assert topic.last_stable_offsets() == topic.end_offsets()
    assert first.state is txnkv.TxnState.ABORTED
    steps: list[Callable[[], Any]] = [
        lambda: first.ack(subscription, message),
        first.commit,
        first.commit,
    ]
    if size == "large":
        steps.insert(0, lambda: (first.insert(table, (2, "never")), first.flush()))
        steps.insert(0, lambda: (first.send(topic, b"never"), first.flush()))
    for step in steps:
        with pytest.raises(ProducerFencedError, match="another transaction 'n' has begun"):
            step()
    first.rollback()
    second.insert(table, (3, "there"))
    second.commit()
    assert keys(client) == [3]
    assert subscription.receive(timeout=10) == message


@pytest.mark.parametrize("point", ["stage.claimed", "stage.written"])
def test_a_write_in_whose_midst_the_name_is_taken_says_so(
    client: txnkv.Client, table: txnkv.Table, connect: Connect, point: str
) -> None:
    """It said that the transaction has ended, of no class that a program looks for."""
    other = connect()
    first = client.new_transaction(name="n")
    arm(point, lambda: other.new_transaction(name="n"))
    with pytest.raises(ProducerFencedError, match="another transaction 'n' has begun"):
        first.write(table, pa.table({"id": range(20_000)}))
    disarm()
    assert keys(client) == []


def test_a_client_whose_name_was_taken_begins_no_more(
    client: txnkv.Client, table: txnkv.Table, connect: Connect
) -> None:
    other = connect()
    with client.transaction(name="n") as txn:
        txn.insert(table, (1, "a"))
    with other.transaction(name="n") as txn:
        txn.insert(table, (2, "b"))
        for begin in (
            lambda: client.new_transaction(name="n"),
            lambda: client.run(lambda txn: None, name="n"),
        ):
            with pytest.raises(ProducerFencedError, match="'n': another client has taken this"):
                begin()
    with client.transaction(name="m") as txn:
        txn.insert(table, (3, "another name"))
    with connect().transaction(name="n") as txn:
        txn.insert(table, (4, "begun anew"))
    with pytest.raises(ProducerFencedError):
        other.new_transaction(name="n")
    assert keys(client) == [1, 2, 3, 4]


def test_one_after_the_other_of_one_client(client: txnkv.Client, table: txnkv.Table) -> None:
    for number in range(3):
        with client.transaction(name="n") as txn:
            txn.insert(table, (number, "a"))
    open_ = client.new_transaction(name="n")
    open_.insert(table, (8, "never"))
    assert client.run(lambda txn: txn.insert(table, (9, "a")), name="n") is None
    with pytest.raises(ProducerFencedError):
        open_.commit()
    (row,) = client.table(NAMES_TABLE).scan()
    assert (row["name"], row["epoch"]) == ("n", 0)
    assert keys(client) == [0, 1, 2, 9]


def test_attempts_under_a_name(client: txnkv.Client, table: txnkv.Table) -> None:
    tries = []

    def work(txn: txnkv.Transaction) -> None:
        tries.append(txn.id)
        txn.upsert(table, (1, str(len(tries))))
        if len(tries) < 3:
            raise txnkv.TransactionConflictError("made up")

    client.run(work, name="n")
    assert len(set(tries)) == 3
    assert table.get(1) == {"id": 1, "v": "3"}


@pytest.mark.parametrize("name", ["", 7, b"n"])
def test_what_is_no_name(client: txnkv.Client, name: Any) -> None:
    with pytest.raises(ValueError, match="non-empty string or None"):
        client.new_transaction(name=name)
    assert client.tables() == []


def test_who_begin_at_once(client: txnkv.Client, table: txnkv.Table, connect: Connect) -> None:
    """All but one are ended, in whatever order they come."""
    clients = [connect() for _ in range(6)]
    with ThreadPoolExecutor(len(clients)) as others:
        begun = list(others.map(lambda each: each.new_transaction(name="n"), clients))
        assert [txn.state for txn in begun].count(txnkv.TxnState.OPEN) == 1

        def commits(txn: txnkv.Transaction) -> bool:
            try:
                txn.insert(table, (begun.index(txn), "a"))
                txn.commit()
            except ProducerFencedError:
                return False
            return True

        assert list(others.map(commits, begun)).count(True) == 1
    assert len(keys(client)) == 1


@pytest.mark.parametrize(
    ("fault", "there"),
    [
        ("commit.started=kill", True),
        ("commit.decided=kill", True),
        ("status.before_commit=kill@3", False),
        ("status.after_commit=kill@3", False),
        ("status.after_commit=kill@4", False),
    ],
)
def test_after_a_death(
    client: txnkv.Client,
    table: txnkv.Table,
    process: Callable[..., Any],
    fault: str,
    there: bool,
) -> None:
    """A commit that had begun is finished, and its rows are in the successor's snapshot."""
    client.new_transaction(name="n").rollback()
    dead = process(
        "txn = client.new_transaction(name='n')\n"
        "token = txn.serialize()\n"
        "with txnkv.Transaction.deserialize(client, token) as joined:\n"
        "    joined.insert('t', (1, 'a'))\n"
        "txn.commit()\n",
        fault,
    )
    dead.finish(code=-9)
    with txnkv.connect(client.path) as other, other.transaction(name="n") as txn:
        assert (txn.get(table, 1) is not None) in ({there} if there else {True, False})
        txn.upsert(table, (2, "b"))
    assert keys(client)[-1] == 2


def test_for_asyncio(client: txnkv.Client, table: txnkv.Table) -> None:
    async def work() -> None:
        async with txnkv.aio.connect(client.path) as one, txnkv.aio.connect(client.path) as two:
            first = await one.new_transaction(name="n")
            await first.insert("t", (1, "never"))
            async with two.transaction(name="n") as second:
                await second.insert("t", (2, "a"))
            with pytest.raises(ProducerFencedError):
                await first.commit()
            with pytest.raises(ProducerFencedError):
                await one.new_transaction(name="n")

    asyncio.run(work())
    assert keys(client) == [2]


def test_a_restored_store_ends_no_other_transaction(
    client: txnkv.Client, table: txnkv.Table, tmp_path: Path
) -> None:
    open_ = client.new_transaction(name="n")
    open_.insert(table, (1, "a"))
    client.backup(tmp_path / "backup")
    txnkv.restore(tmp_path / "backup", tmp_path / "restored")
    with txnkv.connect(tmp_path / "restored") as restored:
        others = [restored.new_transaction() for _ in range(50)]
        for number, txn in enumerate(others):
            txn.insert("t", (number, "a"))
            txn.serialize()
        with restored.transaction(name="n") as txn:
            txn.insert("t", (100, "a"))
        for txn in others:
            txn.commit()
        assert restored.table("t").count() == 51
    open_.commit()
    assert keys(client) == [1]


@pytest.mark.parametrize(
    ("of", "before"), [(attempts, "_move"), (attempts.NamedTransaction, "begin")]
)
def test_who_was_overtaken_looks_again(
    client: txnkv.Client,
    table: txnkv.Table,
    monkeypatch: pytest.MonkeyPatch,
    of: Any,
    before: str,
) -> None:
    """Between its look at the name and its write of it, or its begin: it has the name no more."""
    client.new_transaction(name="n").rollback()
    if before == "_move":
        client.instance.names.clear()  # as where another process began
    step, steps = getattr(of, before), []

    def overtaken(*what: Any, **more: Any) -> Any:
        steps.append(what)
        assert len(steps) < 5
        if len(steps) == 1:
            client.table(NAMES_TABLE).update({"name": "n", "epoch": 1})
        return step(*what, **more)

    monkeypatch.setattr(of, before, overtaken)
    with pytest.raises(ProducerFencedError, match="has taken this name over"):
        client.new_transaction(name="n")


def test_a_name_whose_epochs_are_used_up_has_another_number(client: txnkv.Client) -> None:
    """Kafka's clients take an epoch of 32,767 for the end."""
    first = attempts.claim_name(client, "n")
    client.table(NAMES_TABLE).update({"name": "n", "epoch": 32_765})
    assert attempts.claim_name(client, "n") == (first.id, 32_766)
    second = attempts.claim_name(client, "n")
    assert second.id != first.id
    assert second.epoch == 0


def test_threads_of_one_client_that_begin_at_once(
    client: txnkv.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim of the first was set over that of the second, and the client was locked out."""
    move, moved = attempts._move, threading.Event()

    def slowly(*what: Any) -> bool:
        found = move(*what)
        if moved.is_set():
            moved.clear()
        else:
            moved.set()
            time.sleep(0.3)
        return found

    monkeypatch.setattr(attempts, "_move", slowly)
    with ThreadPoolExecutor(1) as others:
        first = others.submit(client.new_transaction, name="n")
        assert moved.wait(10)
        client.new_transaction(name="n").rollback()
        first.result().rollback()
    client.new_transaction(name="n").rollback()
    assert [row["epoch"] for row in client.table(NAMES_TABLE).scan()] == [0]


def test_a_first_begin_that_is_interrupted(
    client: txnkv.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on, and the claim that it makes is that of the next begin, not one to fence it."""
    move, times = attempts._move, iter([0.6])

    def slowly(*what: Any) -> bool:
        found = move(*what)
        time.sleep(next(times, 0))
        return found

    def ring(*_: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(attempts, "_move", slowly)
    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(InterruptedError):
            client.new_transaction(name="n")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    for _ in range(3):
        client.new_transaction(name="n").rollback()
    assert [row["epoch"] for row in client.table(NAMES_TABLE).scan()] == [0]
