"""Transactions under a name: a successor ends its predecessor."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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


def received(client: txnkv.Client) -> tuple[txnkv.Topic, txnkv.Subscription, txnkv.Message]:
    """A message before any transaction, and who has received it."""
    topic = client.create_topic("events")
    with client.new_session() as session:
        session.send(topic, b"before")
    subscription = topic.subscribe("s")
    message = subscription.receive()
    assert message is not None
    return topic, subscription, message


def test_a_successor_ends_its_predecessor(
    client: txnkv.Client, table: txnkv.Table, connect: Connect, size: str
) -> None:
    """What it does from then on is refused; small writes, which wait in memory, with its commit."""
    other = connect()
    topic, subscription, message = received(client)
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
        # The row of the name is taken over, the OPEN row stored, its id put into the row.
        *((f"status.before_commit=kill@{n}", False) for n in range(2, 7)),
        *((f"status.after_commit=kill@{n}", False) for n in range(2, 7)),
        *((f"log.{step}=kill@{n}", False) for step in ("written", "durable") for n in (1, 2)),
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
        assert (txn.get(table, 1) is not None) == there
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


def test_small_ones_follow_each_other_without_any_other_write(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    """Each was stored, and named in a row of its own: a hundred times what a plain one takes."""
    client.run(lambda txn: txn.upsert(table, (0, "a")), name="n")
    (row,) = client.table(NAMES_TABLE).scan()
    before = client.instance.coordinator.metrics.commits.value
    for number in range(1, 20):
        with client.transaction(name="n") as txn:
            txn.upsert(table, (number, "a"))
    with client.transaction(name="n") as txn:
        assert txn.get(table, 19) == {"id": 19, "v": "a"}
    assert client.instance.coordinator.metrics.commits.value == before + 19
    assert list(client.table(NAMES_TABLE).scan()) == [row]
    with pytest.raises(txnkv.TxnNotFoundError):
        client.instance.coordinator.get(txn.id.local)


@pytest.mark.parametrize("step", ["commit", "serialize", "state", "ack", "send", "scan", "nothing"])
def test_another_process_takes_the_name(
    client: txnkv.Client, table: txnkv.Table, elsewhere: Callable[..., Any], step: str
) -> None:
    """The first is small: nobody else knows of it, and the row of the name refuses it."""
    topic, subscription, message = received(client)
    first = client.new_transaction(name="n")
    if step != "nothing":
        first.insert(table, (1, "never"))
        first.flush()
    elsewhere("client.run(lambda txn: txn.insert('t', (2, 'there')), name='n'); say(1)")
    calls: dict[str, Callable[[], Any]] = {
        "serialize": first.serialize,
        "ack": lambda: first.ack(subscription, message),
        "send": lambda: (first.send(topic, b"never"), first.flush()),
        "scan": lambda: list(first.scan(table)),
    }
    if step == "state":
        assert first.state is txnkv.TxnState.ABORTED
    for call in (calls.get(step, first.commit), first.commit):
        with pytest.raises(ProducerFencedError, match="another transaction 'n' has begun"):
            call()
    first.rollback()
    with pytest.raises(ProducerFencedError, match="has taken this name over"):
        client.new_transaction(name="n")
    assert keys(client) == [2]
    assert [found.value for found in topic.consumer().poll(timeout=0)] == [b"before"]


def test_a_forked_child_takes_the_name(
    client: txnkv.Client, table: txnkv.Table, process: Callable[..., Any]
) -> None:
    """It has the claim of its parent, and none of its transactions: each is refused by the row."""
    forked = process(
        "first = client.new_transaction(name='n')\n"
        "first.insert('t', (1, 'never'))\n"
        "if not (child := os.fork()):\n"
        "    with client.transaction(name='n') as txn:\n"
        "        txn.insert('t', (2, 'a'))\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "try:\n"
        "    first.commit()\n"
        "except txnkv.ProducerFencedError:\n"
        "    with client.transaction(name='n') as txn:\n"
        "        txn.insert('t', (3, 'a'))\n"
        "say(1)\n"
    )
    assert forked.finish() == 1
    assert keys(client) == [2, 3]


def test_one_that_is_dropped_keeps_nothing(client: txnkv.Client, table: txnkv.Table) -> None:
    txn: txnkv.Transaction | None = client.new_transaction(name="n")
    assert txn is not None
    txn.insert(table, (1, "never"))
    dropped = weakref.ref(txn.context)
    del txn
    gc.collect()
    assert dropped() is None
    with client.transaction(name="n") as other:
        other.insert(table, (2, "a"))
    assert keys(client) == [2]


def test_names_that_are_many(
    client: txnkv.Client, table: txnkv.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is known of them is forgotten, and they are looked up."""
    monkeypatch.setattr(attempts, "_KEPT_NAMES", 3)
    open_ = client.new_transaction(name="n")
    open_.insert(table, (100, "never"))
    for number in range(10):
        with client.transaction(name=f"n{number}") as txn:
            txn.insert(table, (number, "a"))
    client.new_transaction(name="n").rollback()
    with pytest.raises(ProducerFencedError):
        open_.commit()
    assert len(client.instance.names) <= 4
    assert keys(client) == [*range(10)]


def test_a_table_of_names_that_is_dropped(
    client: txnkv.Client, table: txnkv.Table, elsewhere: Callable[..., Any]
) -> None:
    """A name in another table of names is no hold on one in this."""
    first = client.new_transaction(name="n")
    first.insert(table, (1, "never"))
    client.drop_table(NAMES_TABLE)
    elsewhere("client.run(lambda txn: txn.insert('t', (2, 'there')), name='n'); say(1)")
    with pytest.raises(ProducerFencedError):
        first.commit()
    assert keys(client) == [2]


COUNTS = """
import random, time
chance = random.Random(seed)
made, fenced = [], 0
while len(made) < 40:
    try:
        with txnkv.connect(client.path) as own:
            for _ in range(chance.randrange(1, 12)):
                with own.transaction(name="n") as txn:
                    if chance.random() < 0.15:
                        txn.serialize()
                    count = sum(1 for _ in txn.scan("t"))
                    key = seed * 1_000_000 + len(made)
                    txn.insert("t", (key, str(count)))
                    time.sleep(chance.random() / 500)
                    if chance.random() < 0.15:
                        txn.flush()
                        txn.serialize()
                made.append(key)
    except txnkv.ProducerFencedError:
        fenced += 1
say([made, fenced])
"""


def test_transactions_of_a_name_follow_each_other(
    client: txnkv.Client, table: txnkv.Table, process: Callable[..., Any]
) -> None:
    """Each has seen all that were committed before it, in whichever process, small or stored."""
    running = [process(COUNTS, seed=seed) for seed in range(1, 4)]
    told = [one.finish() for one in running]
    made = [key for keys, _ in told for key in keys]
    assert any(fenced for _, fenced in told)
    rows = [*client.table("t").scan()]
    assert sorted(made) == sorted(row["id"] for row in rows)
    assert sorted(int(row["v"]) for row in rows) == [*range(len(made))]


@pytest.mark.parametrize("do", ["get", "upsert", "flush", "scan"])
def test_a_handler_that_begins_under_the_name_it_interrupts(
    client: txnkv.Client, table: txnkv.Table, do: str
) -> None:
    """It waited for a lock that the code has which it interrupted."""
    ends = time.monotonic() + 1.0
    begun = 0

    def ring(*_: object) -> None:
        nonlocal begun
        client.new_transaction(name="n").rollback()
        begun += 1
        signal.setitimer(signal.ITIMER_REAL, 0.005)  # not within this call, however long it takes

    calls: dict[str, Callable[[txnkv.Transaction], Any]] = {
        "get": lambda txn: txn.get(table, 1),
        "upsert": lambda txn: txn.upsert(table, (1, "a")),
        "flush": lambda txn: (txn.upsert(table, (1, "a")), txn.flush()),
        "scan": lambda txn: list(txn.scan(table)),
    }
    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.005)
        while time.monotonic() < ends:
            with suppress(txnkv.InvalidTxnStateError):
                txn = client.new_transaction(name="n")
                for _ in range(50):
                    calls[do](txn)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert begun


def test_a_callback_that_begins_under_the_name_of_its_transaction(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    """It was called with the name's lock held, by who ended the one before."""
    client.new_transaction(name="n").rollback()
    other = client.create_table("other", txnkv.Schema({"id": "int64"}, primary_key=["id"]))
    first = client.new_transaction(name="n")
    first.insert(table, (1, "never"))
    holder = client.new_transaction(locking="partition")
    holder.insert(table, (5, "a"))
    holder.flush()
    pending, called = first.commit_async(), threading.Event()

    def again(done: Any) -> None:
        assert isinstance(done.exception(), ProducerFencedError)
        with client.transaction(name="n") as txn:
            txn.insert(other, {"id": 2})
        called.set()

    pending.add_done_callback(again)
    client.new_transaction(name="n")
    holder.commit()
    assert called.wait(60)
    assert keys(client) == [5]
    assert other.count() == 1


@pytest.mark.parametrize("kept", [True, False])
def test_one_whose_commit_broke_off(client: txnkv.Client, table: txnkv.Table, kept: bool) -> None:
    """It counts, and is seen by the next one; or does not, whoever has its handle."""

    def broken_off() -> txnkv.Transaction | None:
        txn = client.new_transaction(name="n")
        txn.insert(table, (1, "perhaps"))
        arm("status.after_commit", "error")
        with pytest.raises(txnkv.CommitOutcomeUnknownError):
            txn.commit()
        disarm()
        return txn if kept else None

    client.new_transaction(name="n").rollback()
    held = broken_off()
    gc.collect()
    with client.transaction(name="n") as txn:
        seen = [row["id"] for row in txn.scan(table)]
        txn.insert(table, (2, "a"))
    assert keys(client) == [*seen, 2]
    assert (held is not None) == kept


@pytest.mark.parametrize("ended", [True, False])
def test_a_begin_within_a_begin(
    client: txnkv.Client, table: txnkv.Table, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    """As of a finalizer of the program's: the inner one counts and is seen, or is refused."""
    client.new_transaction(name="n").rollback()
    begin, inner = attempts.NamedTransaction.begin, []

    def begins(*args: Any, **options: Any) -> Any:
        txn = begin(*args, **options)
        if not inner:
            inner.append(None)
            inner[0] = client.new_transaction(name="n")
            inner[0].insert(table, (1, "inner"))
            if ended:
                inner[0].commit()
        return txn

    with ThreadPoolExecutor(1) as others:  # a call there is none of those that are put off
        with monkeypatch.context() as patch:
            patch.setattr(attempts.NamedTransaction, "begin", begins)
            txn = others.submit(client.new_transaction, name="n").result()
        seen = [row["id"] for row in txn.scan(table)]
        txn.insert(table, (2, "outer"))
        txn.commit()
    if not ended:
        with pytest.raises(ProducerFencedError):
            inner[0].commit()
    assert seen == ([1] if ended else [])
    assert keys(client) == [*seen, 2]
