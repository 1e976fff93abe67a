"""A transaction over a server begins before whatever its client reads, also by a stream, and what
its threads give it while one of them asks goes there once.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest

import txnkv
from tests.threads import committed, held, shared
from txnkv.remote import channel
from txnkv.remote.remote_session import RemoteSession
from txnkv.server import Limits, Server


def scanned(_: txnkv.Client, table: txnkv.Table) -> Callable[[], Any]:
    scan = table.scan(where=[("id", "=", 1)])
    return lambda: scan.to_arrow().num_rows


def by_token(client: txnkv.Client, table: txnkv.Table) -> Callable[[], Any]:
    (token,) = table.scan().tokens()
    return lambda: token.open(client).to_arrow().num_rows


def diffed(_: txnkv.Client, table: txnkv.Table) -> Callable[[], Any]:
    return lambda: table.diff(0).read_all().num_rows


def diffed_by_token(client: txnkv.Client, table: txnkv.Table) -> Callable[[], Any]:
    (token,) = table.diff_tokens(0)
    return lambda: token.open(client).read_all().num_rows


@pytest.mark.parametrize("prepared", [scanned, by_token, diffed, diffed_by_token])
def test_what_is_read_after_the_begin_is_not_overwritten(
    store: txnkv.Client, remote: Callable[..., txnkv.Client], prepared: Any
) -> None:
    """What a scan that was made before had read, or a diff, another had changed meanwhile."""
    client = remote()
    table = client.table("t")
    table.insert((1, "10"))
    read = prepared(client, table)
    txn = client.new_transaction()
    assert read() == 1
    store.table("t").update((1, "110"))
    txn.update(table, (1, "11"))
    with pytest.raises(txnkv.TransactionConflictError):
        txn.commit()
    assert table.get(1) == {"id": 1, "v": "110"}


def _added_meanwhile(txn: Any, name: str, held: Any, do: Callable[[], Any]) -> Any:
    """Do something; while a function has its value, other threads read, and add row 2. Return what
    became of the row.
    """
    was, told = getattr(held, name), []

    def add() -> None:
        try:
            txn.upsert("t", (2, "2"))
            txn.send("events", b"2")
            told.append("taken")
        except txnkv.InvalidTxnStateError:
            told.append("refused")

    def read() -> None:
        with suppress(txnkv.InvalidTxnStateError):
            txn.get("t", 1)

    others = [threading.Thread(target=add), threading.Thread(target=read)]

    def held_up(*args: Any) -> Any:
        found = was(*args)
        setattr(held, name, was)
        for each in others:
            each.start()
        for each in others:
            each.join(0.2)  # those that do not wait for this one have ended
        return found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(held, name, held_up)
        do()
    for each in others:
        each.join()
    return told[0]


@pytest.mark.parametrize("what", ["get", "scan", "serialize"])
def test_a_row_that_is_added_while_another_thread_asks_is_not_lost(
    store: txnkv.Client, remote: Callable[..., txnkv.Client], what: str
) -> None:
    """The answer took it for sent; and what waited went with each request of any thread."""
    client = remote()
    txn = client.new_transaction()
    assert txn.id
    txn.upsert("t", (1, "1"))
    txn.send("events", b"1")
    table, scan = client.table("t"), txn.scan("t")
    asks: dict[str, Callable[[], object]] = {
        "get": lambda: txn.get(table, 1),
        "scan": scan.to_arrow,
        "serialize": txn.serialize,
    }
    assert _added_meanwhile(txn, "unpack", channel, asks[what]) == "taken"
    txn.commit()
    assert sorted(row["id"] for row in store.table("t").scan()) == [1, 2]
    assert sorted(m.value for m in store.topic("events").consumer().poll()) == [b"1", b"2"]


def test_a_row_that_is_added_while_a_commit_gathers_them_is_refused_or_committed(
    store: txnkv.Client, remote: Callable[..., txnkv.Client]
) -> None:
    client = remote()
    txn = client.new_transaction()
    txn.upsert("t", (1, "1"))
    txn.send("events", b"1")
    told = _added_meanwhile(txn, "calls", RemoteSession, txn.commit)
    there = [1, 2] if told == "taken" else [1]
    assert [row["id"] for row in store.table("t").scan(ordered=True)] == there
    assert [int(m.value) for m in store.topic("events").consumer().poll()] == there


def test_what_a_commit_that_is_on_its_way_has_is_not_sent_beside_it(
    store: txnkv.Client, remote: Any
) -> None:
    """A session that was closed behind `commit_async` sent its messages a second time."""
    client = remote()
    client.new_transaction().commit_async().result()
    txn = client.new_transaction()
    session = txn.new_session()
    session.send("events", b"session")
    txn.send("events", b"own")
    with client.committer._sending:
        committing = txn.commit_async()
        session.flush()
        session.close()
        txn.flush()
        for ask in (lambda: txn.get("t", 1), txn.serialize):
            with pytest.raises(txnkv.InvalidTxnStateError, match="being committed"):
                ask()
    committing.result()
    found = store.topic("events").consumer().poll()
    assert sorted(m.value for m in found) == [b"own", b"session"]


class _Before:
    """A lock before which something is done, once."""

    def __init__(self, lock: Any, do: Callable[[], None]) -> None:
        self._lock, self._do = lock, [do]

    def __enter__(self) -> None:
        if self._do:
            self._do.pop()()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@pytest.mark.parametrize("what", ["get", "get_many", "scan", "serialize"])
def test_a_commit_that_begins_while_another_thread_asks_sends_alone(
    store: txnkv.Client, remote: Callable[..., txnkv.Client], what: str
) -> None:
    """It began between the look for one and the rows, and both sent these."""
    client: Any = remote()
    client.new_transaction().commit_async().result()
    txn = client.new_transaction()
    session, futures = txn.new_session(), list[Any]()
    session.send("events", b"1")
    session.insert("t", (1, "1"))
    scan = txn.scan("t")
    asks: dict[str, Callable[[], object]] = {
        "get": lambda: txn.get("t", 1),
        "get_many": lambda: txn.get_many("t", [1]),
        "scan": scan.to_arrow,
        "serialize": txn.serialize,
    }
    with client.committer._sending:
        session._lock = _Before(session._lock, lambda: futures.append(txn.commit_async()))
        with pytest.raises(txnkv.InvalidTxnStateError, match="being committed"):
            asks[what]()
    assert futures[0].result(30) > 0
    assert [m.value for m in store.topic("events").consumer().poll()] == [b"1"]
    assert [row["id"] for row in store.table("t").scan()] == [1]


def test_a_commit_whose_caller_was_interrupted_is_made_once(
    store: txnkv.Client, remote: Callable[..., txnkv.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception of a signal handler came out of it; the next sent all again."""

    class Stop(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stop

    client, was, stopped = remote(), channel.unpack, threading.Event()

    def answered(*args: Any) -> Any:
        found = was(*args)
        monkeypatch.setattr(channel, "unpack", was)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stopped.wait(30)
        return found

    before = signal.signal(signal.SIGUSR1, stop)
    txn = client.new_transaction()
    assert txn.id
    txn.insert("t", (1, "1"))
    txn.send("events", b"1")
    monkeypatch.setattr(channel, "unpack", answered)
    with suppress(Stop):
        txn.commit()
    signal.signal(signal.SIGUSR1, before)
    stopped.set()
    assert txn.commit() > txn.snapshot
    assert [m.value for m in store.topic("events").consumer().poll()] == [b"1"]
    assert [row["id"] for row in store.table("t").scan()] == [1]


@pytest.mark.parametrize("whole", [True, False])
def test_an_id_that_was_asked_about_is_none_of_the_next_transaction(
    store: txnkv.Client, remote: Callable[..., txnkv.Client], whole: bool
) -> None:
    """The client had it for that, and none was to begin by it any more; so the next one failed."""
    client = remote()
    with client.transaction() as txn:
        txn.upsert("t", (1, "1"))
    for n in range(1, 4):
        with pytest.raises(txnkv.TxnNotFoundError):
            client.transaction_state((txn.id if whole else txn.id.local) + n)
    with client.transaction() as txn:
        txn.upsert("t", (2, "2"))
    assert store.table("t").count() == 2


def test_an_id_of_another_store_is_of_no_transaction_of_this_client(
    store: txnkv.Client, remote: Any
) -> None:
    client = remote()
    txn = client.new_transaction()
    txn.upsert("t", (1, "1"))
    id = int(txn.id)
    for ask in (client.transaction_state, client.abort_transaction, client.keep_transaction_alive):
        with pytest.raises(txnkv.TxnNotFoundError, match="the ids of this store begin with"):
            ask(id ^ 1 << 112)
    client.outcome(id ^ 1 << 112)
    for next in range(id + 1, id + 4):
        with pytest.raises(txnkv.TxnNotFoundError):
            client.transaction_state(next ^ 1 << 112)
    txn.commit()
    with client.transaction() as txn:
        txn.upsert("t", (2, "2"))
    assert store.table("t").count() == 2


class Odd:
    """A value that no request can have."""


def test_a_request_that_is_not_sent_loses_nothing_of_others(
    store: txnkv.Client, remote: Any
) -> None:
    """The begins that waited in front of it were gone, and so were handles to be given up."""
    client = remote()
    table, channel = client.table("t"), client.channel
    txn, session = client.new_transaction(), client.new_session()
    txn.insert(table, (1, "a"))
    session.insert(table, (2, "b"))
    waited = list(channel._waiting)
    assert len(waited) == 2
    channel.drop(1 << 40)
    with pytest.raises(TypeError, match="cannot be sent"):
        table.get(Odd())
    assert channel._waiting == waited
    assert 1 << 40 in channel._dropped
    txn.commit()
    session.close()
    assert store.table("t").count() == 2


def test_one_that_cannot_begin_is_in_front_of_nothing_for_ever(
    store: txnkv.Client, remote: Any
) -> None:
    client = remote()
    table, txn = client.table("t"), client.new_transaction()
    txn.insert(table, (1, "a"))
    with pytest.raises(TypeError, match="cannot be sent"):
        client.run(lambda other: other.get(table, 1), timeout=Odd())
    txn.commit()
    assert store.table("t").count() == 1


def test_a_request_that_is_refused_as_a_whole_loses_nothing_of_others(
    store: txnkv.Client, serve: Callable[..., Server]
) -> None:
    with txnkv.connect(f"grpc://127.0.0.1:{serve(limits=Limits(message_bytes=9000)).port}") as one:
        table, txn = one.table("t"), one.new_transaction()
        txn.insert(table, (1, "a"))
        with pytest.raises(ValueError, match="takes up to 9,000"):
            table.get_many(range(9000))
        txn.commit()
    assert store.table("t").count() == 1


def test_threads_that_take_what_waits_at_once_share_it() -> None:
    """The one that came last to the last of them raised IndexError out of any call."""

    class Raced(deque[int]):
        def __bool__(self) -> bool:
            return True  # as before another thread took it

    assert channel.Channel._some(Raced([1, 2])) == [1, 2]


def test_heartbeats_go_on_whatever_one_meets(remote: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their thread ended with an error that it had not thought of, and the client was given up."""
    client = remote(keepalive_time=0.5)
    txn = client.new_transaction()
    txn.serialize()
    revived, again = list[Any](), threading.Event()

    def revive(txn: Any) -> None:
        revived.append(txn)
        if len(revived) == 1:
            raise RuntimeError("no way")
        again.set()

    monkeypatch.setattr(type(txn), "revive", revive)
    assert again.wait(60)


def test_heartbeats_revive_what_is_shared_while_others_share(
    remote: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another thread may at each step that it takes to copy them all."""
    client = remote()
    first = [client.new_transaction() for _ in range(3)]
    others = [client.new_transaction() for _ in range(30)]
    for txn in first:
        txn.serialize()
    revived, coming, pauses = list[Any](), iter(others), iter([False, True])
    monkeypatch.setattr(type(first[0]), "revive", lambda txn: revived.append(txn))

    def share(frame: Any, *_: object) -> None:
        for txn in islice(coming, "weakref" in frame.f_code.co_filename):
            txn._keep_token(first[0]._token)

    stop = SimpleNamespace(wait=lambda _: next(pauses))
    sys.setprofile(share)
    try:
        channel._heartbeats(weakref.ref(client.channel), stop, 0.0)
    finally:
        sys.setprofile(None)
    assert set(first) <= set(revived)


def test_a_row_that_comes_behind_the_commit_is_refused_to_who_gave_it(
    store: txnkv.Client, remote: Callable[..., txnkv.Client], until: Any
) -> None:
    """The request of another thread took it along, which was told, and who gave it was not."""
    client = remote()
    txn, table = client.new_transaction(), client.table("t")
    txn.upsert(table, (1, "a"))
    txn.commit()
    with held(RemoteSession, "flush") as flush, ThreadPoolExecutor(1) as threads:
        adding = threads.submit(txn.upsert, table, (2, "late"))
        until(lambda: flush.there.is_set() or adding.done())
        flush.there.set()
        with suppress(txnkv.InvalidTxnStateError):
            txn.flush()
        flush.go_on.set()
        with pytest.raises(txnkv.InvalidTxnStateError):
            adding.result(60)
    assert store.table("t").count() == 1


@pytest.mark.parametrize("seed", range(3))
def test_what_threads_give_it_beside_the_commit_is_taken_or_refused(
    store: txnkv.Client, remote: Callable[..., txnkv.Client], seed: int
) -> None:
    """Some write, send, read and flush; one ends it in the midst of that."""
    client, chance = remote(), random.Random(seed)
    table, topic = client.table("t"), client.topic("events")
    taken, given = [list[int](), list[int]()], itertools.count()
    for round_ in range(16):
        txn = client.new_transaction(timeout=None) if round_ % 3 else shared(client, "large")

        def work(seed: int, of: Any = txn) -> None:
            dice = random.Random(seed)
            with suppress(txnkv.InvalidTxnStateError):
                session = of.new_session()
                for id in islice(given, 60):
                    by, kind = dice.choice([of, session]), dice.randrange(2)
                    by.upsert(table, (id, "a")) if kind == 0 else by.send(topic, b"%d" % id)
                    taken[kind].append(id)
                    what = dice.random()
                    if what < 0.15:
                        assert of.get(table, id) or kind
                    elif what < 0.25:
                        by.flush()

        with ThreadPoolExecutor(3) as threads:
            workers = [threads.submit(work, chance.random()) for _ in range(3)]
            wait = sum(map(len, taken)) + chance.choice([0, 1, 5, 40])
            while sum(map(len, taken)) < wait and not all(each.done() for each in workers):
                pass
            txn.commit() if round_ % 2 else txn.commit_async().result(60)
            for each in workers:
                each.result(60)
    assert committed(store.table("t"), store.topic("events")) == (
        sorted(taken[0]),
        sorted(taken[1]),
    )
