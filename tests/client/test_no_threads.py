"""A machine that gives no more threads: what is committed is told so, and nothing hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

import txnkv
from tests import internals
from txnkv.storage import BusyError, sqlite_connection, threads


@contextmanager
def no_threads() -> Iterator[pytest.MonkeyPatch]:
    """The library gets no thread, and has none that it could use again."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("txnkv"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        patch.setattr(threads, "_threads", threads._Threads())
        yield patch


@contextmanager
def written_by_another(client: txnkv.Client, until: Callable[[], Any]) -> Iterator[None]:
    """Another thread has the write lock, until something is so."""
    has, waiting = threading.Event(), threading.Event()

    def write() -> None:
        with internals.status(client).write():
            has.set()
            while not until():
                waiting.wait(0.001)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(write)
        assert has.wait(60)
        yield
        done.result(60)


def elsewhere(call: Callable[..., Any], *args: Any) -> Any:
    """In a thread of the test, which needs none of the library."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call, *args).result(60)


def test_what_follows_a_commit(client: txnkv.Client, table: txnkv.Table) -> None:
    maintenance = internals.maintenance(client)
    client.new_transaction().rollback()
    maintenance._thread = None
    with no_threads():
        elsewhere(table.insert, (1, "a"))
        assert table.get(1) == {"id": 1, "v": "a"}
    table.insert((2, "a"))
    assert maintenance._thread is not None


def test_a_read_behind_a_few_rows_asks_no_thread(
    client: txnkv.Client, table: txnkv.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    with client.transaction() as txn:
        txn.insert(table, (0, "first"))  # makes the session, which takes its time
        monkeypatch.setattr(threads._threads, "run", asked.append)
        for i in range(1, 5):
            txn.insert(table, (i, "a"))
            txn.update(table, {"id": i, "v": "b"})
            assert txn.get(table, i) == {"id": i, "v": "b"}
        assert asked == []
        monkeypatch.undo()
    assert table.count() == 5


def test_a_checkpoint_that_is_due(
    client: txnkv.Client, table: txnkv.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = internals.status(client)._checkpointer
    monkeypatch.setattr(sqlite_connection, "REUSE_BYTES", 0)
    client.new_transaction().rollback()
    checkpointer.wait()
    with no_threads():
        elsewhere(table.insert, (1, "a"))
        assert table.get(1) == {"id": 1, "v": "a"}
    checkpointer.wait()
    table.insert((2, "a"))
    checkpointer.wait()
    assert checkpointer._thread is None


def test_a_commit_behind_others(client: txnkv.Client, table: txnkv.Table) -> None:
    queue = internals.coordinator(client).log._queue
    txn = client.new_transaction()
    txn.insert(table, (1, "a"))
    with (
        ThreadPoolExecutor(1) as pool,
        written_by_another(client, lambda: len(queue._queue) == 2),
    ):
        first = pool.submit(table.insert, (2, "a"))
        while not queue._queue:
            threading.Event().wait(0.001)
        with no_threads():
            stamp = txn.commit()
        first.result(60)
        assert pool.submit(table.get, 1).result(60) == {"id": 1, "v": "a"}
        pool.submit(table.insert, (3, "a")).result(60)
    assert txn.commit() == stamp


def test_a_commit_that_nobody_waits_for(client: txnkv.Client, table: txnkv.Table) -> None:
    txn = client.new_transaction()
    txn.insert(table, (1, "a"))
    with no_threads():
        assert elsewhere(txn.commit_async).result(60) == elsewhere(txn.commit)
    again = client.new_transaction()
    again.insert(table, (2, "a"))
    assert again.commit_async().result(60) > txn.commit()


def test_a_commit_with_a_timeout_that_finds_the_lock_taken(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    status, busy = internals.status(client), threading.Event()
    txn = client.new_transaction(timeout=600)
    txn.insert(table, (1, "a"))
    begin = status.begin_write

    def begin_write(*, wait: bool = True) -> Any:
        try:
            return begin(wait=wait)
        except BusyError:
            busy.set()
            raise

    with written_by_another(client, busy.is_set), no_threads() as patch:
        patch.setattr(status, "begin_write", begin_write)
        txn.commit()
    table.insert((2, "a"))
    assert table.count() == 2


def test_objects_that_are_dropped() -> None:
    worker = threads._Worker()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            worker.start()
    worker.start()
    done = threading.Event()
    worker.queue.put((done.set, ()))
    assert done.wait(60)
