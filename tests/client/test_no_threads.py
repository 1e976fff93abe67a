"""A machine that gives no more threads: what is committed is told so, and nothing hangs."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import txnkv
from tests import internals
from tests.threads import Held, still_waits
from txnkv.aio.calls import Calls
from txnkv.coordinator import maintenance
from txnkv.kafka import KafkaServer
from txnkv.storage import BusyError, sqlite_connection, threads


@contextmanager
def no_threads(named: str = "txnkv") -> Iterator[pytest.MonkeyPatch]:
    """The library gets no thread, and has none that it could use again."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(named):
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
    assert not checkpointer._thread.is_alive()


@contextmanager
def beginning(named: str) -> Iterator[Held]:
    """A thread of the library stands still in its start."""
    start = threading.Thread.start
    made = Held(start)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            threading.Thread, "start", lambda self: (made if self.name == named else start)(self)
        )
        try:
            yield made
        finally:
            made.go_on.set()


def test_a_close_beside_a_checkpoint_that_begins(
    client: txnkv.Client, table: txnkv.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = internals.status(client)._checkpointer
    monkeypatch.setattr(sqlite_connection, "REUSE_BYTES", 0)
    with ThreadPoolExecutor(2) as pool, beginning("txnkv-checkpoint") as held:
        put = pool.submit(table.insert, (1, "a"))
        assert held.there.wait(60)
        waits = pool.submit(checkpointer.wait)
        still_waits(waits)
        held.go_on.set()
        put.result(60)
        waits.result(60)


def test_a_close_beside_slow_work_that_begins() -> None:
    beside = maintenance._Beside("txnkv-beside", lambda: None)
    with ThreadPoolExecutor(1) as pool, beginning("txnkv-beside") as held:
        begins = pool.submit(beside.begin)
        assert held.there.wait(60)
        beside.join()
        held.go_on.set()
        begins.result(60)
    beside.join()


def test_a_commit_behind_others(client: txnkv.Client, table: txnkv.Table) -> None:
    queue = internals.coordinator(client).log.queue
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
    with no_threads():
        worker.start()
    assert worker.thread is None
    worker.start()
    done = threading.Event()
    worker.queue.put((done.set, ()))
    assert done.wait(60)


def test_a_message_of_a_producer(client: txnkv.Client) -> None:
    """Its future was never answered."""
    producer = client.create_topic("e").producer(linger=60)
    with no_threads():
        future = elsewhere(producer.send, b"x")
        assert future.result(60).offset == 0


def test_a_subscription_has_its_place(client: txnkv.Client) -> None:
    """The place was taken, and nobody had it, for as long as the process lived."""
    topic = client.create_topic("e")
    with no_threads() as patch:
        patch.setattr(threads, "_worker", threads._Worker())
        elsewhere(elsewhere(topic.subscribe, "s").close)
    topic.subscribe("s").close()


def test_a_transaction_is_stored_with_a_heart_alone(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    """It was stored all the same, and a second call gave a token of what nobody kept alive."""
    txn = client.new_transaction(timeout=None)
    txn.upsert(table, {"id": 1, "v": "x"})
    heartbeats = internals.coordinator(client).heartbeats
    for _ in range(2):
        with (
            no_threads(),
            pytest.raises(txnkv.UnavailableError, match="no thread could be started"),
        ):
            elsewhere(txn.serialize)
    assert heartbeats._thread is None
    assert txn.serialize()
    assert heartbeats._thread is not None
    assert len(heartbeats._beating) == 1
    txn.commit()


def test_the_main_thread_is_told(client: txnkv.Client, table: txnkv.Table) -> None:
    with no_threads(), pytest.raises(txnkv.UnavailableError, match="no thread could be started"):
        client.compact()
    client.compact()


def test_bulk_writes_and_scans(client: txnkv.Client, table: txnkv.Table) -> None:
    rows = pa.table({"id": range(300_000), "v": ["x"] * 300_000})
    txn = client.new_transaction()
    txn.serialize()
    with no_threads():
        elsewhere(txn.write, table, rows)
    txn.commit()
    internals.flush(client)
    with no_threads():
        assert elsewhere(table.scan().to_arrow).num_rows == 300_000
    assert client.check().problems == []


def test_a_server_for_kafka_s_clients(client: txnkv.Client, store_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with (
        no_threads("txnkv-kafka"),
        pytest.raises(txnkv.UnavailableError, match="no thread could be started"),
    ):
        KafkaServer(str(store_path), "127.0.0.1", port)
    KafkaServer(str(store_path), "127.0.0.1", port).close()


def test_a_call_of_asyncio_that_is_refused_is_not_made_later(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    made: list[str] = []
    calls = Calls()
    with no_threads(), pytest.raises(txnkv.UnavailableError, match="no thread could be started"):
        asyncio.run(_called(calls, made, "refused"))
    asyncio.run(_called(calls, made, "made"))
    with no_threads():  # but for one that is there
        asyncio.run(_called(calls, made, "again"))
    assert made == ["made", "again"]
    calls.close()


async def _called(calls: Calls, made: list[str], word: str) -> None:
    await calls(made.append, word)
