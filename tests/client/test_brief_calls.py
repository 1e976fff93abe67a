"""Calls that end soon, of the main thread, while another one writes: what the rest sees of them."""

from __future__ import annotations

import asyncio
import errno
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import txnkv
from tests import internals
from txnkv.coordinator import Timestamp
from txnkv.coordinator.commit_queue import CommitQueue, CommitRequest, SmallCommit
from txnkv.storage import brief, threads
from txnkv.storage.faults import arm, disarm, storage_full
from txnkv.topics import Waiting
from txnkv.topics.delivery.subscriptions import SubscriptionParticipants
from txnkv.transaction import commit_protocols


@contextmanager
def writing(client: txnkv.Client) -> Iterator[threading.Event]:
    """Somebody has the turn to write, until the event is set."""
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with internals.status(client).write():
            held.set()
            let_go.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(60)
    try:
        yield let_go
    finally:
        let_go.set()
        holder.join()


@pytest.mark.parametrize("how", ["commit", "commit_async"])
def test_a_commit_that_another_thread_asks_for_too(
    client: txnkv.Client, table: txnkv.Table, how: str
) -> None:
    """It was told of the failure of the first try, and the transaction was committed."""
    answers: list[object] = []

    def ask() -> None:
        while txn.context.local.attempt is None:
            time.sleep(0.001)
        try:
            found = getattr(txn, how)()
            answers.append(found if how == "commit" else found.result(60))
        except txnkv.TxnkvError as error:
            answers.append(error)

    txn = client.new_transaction()
    txn.upsert(table, {"id": 1, "v": "x"})
    asking = threading.Thread(target=ask)
    with writing(client) as let_go:
        asking.start()
        threading.Timer(0.2, let_go.set).start()
        stamp = txn.commit()
    asking.join()
    assert answers == [stamp]
    assert table.get(1) == {"id": 1, "v": "x"}


def test_a_conflict_behind_another_writer(client: txnkv.Client, table: txnkv.Table) -> None:
    """It was told as a transaction that is not open."""
    table.upsert((1, "a"))
    txn = client.new_transaction()
    txn.update(table, {"id": 1, "v": "b"})
    table.upsert((1, "c"))
    with writing(client) as let_go:
        threading.Timer(0.1, let_go.set).start()
        with pytest.raises(txnkv.TransactionConflictError):
            txn.commit()
    assert txn.state is txnkv.TxnState.ABORTED


@pytest.mark.parametrize("disturbed", ["another writer", "a full disk"])
def test_a_rollback_gives_shared_messages_back(
    client: txnkv.Client, table: txnkv.Table, until: Any, disturbed: str
) -> None:
    """What it held stayed held, for as long as the process lived."""
    topic = client.create_topic("e")
    with client.transaction() as txn:
        txn.send(topic, b"x")
    sub = topic.subscribe("s", type="shared")
    message = sub.receive(timeout=0)
    assert message is not None
    txn = client.new_transaction(timeout=None)
    txn.ack(sub, message)
    if disturbed == "another writer":
        with writing(client):
            txn.rollback()
    else:
        full = storage_full(Path("status.db"), errno.ENOSPC)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(internals.status(client), "begin_write", Mock(side_effect=full))
            txn.rollback()
    assert txn.state is txnkv.TxnState.ABORTED
    again = until(lambda: sub.receive(timeout=0))
    assert again.id == message.id


@pytest.mark.parametrize("type", ["shared", "key_shared"])
@pytest.mark.parametrize("tried_again", [False, True], ids=["given up", "tried again"])
def test_what_a_run_had_that_failed_beside_another_writer(
    client: txnkv.Client, until: Any, type: str, tried_again: bool
) -> None:
    """It was kept until the process died; another attempt met it as another transaction's."""
    sub, message = one_received(client, type)
    tries: list[txnkv.Transaction] = []
    with ExitStack() as stack:

        def fn(txn: txnkv.Transaction) -> None:
            txn.ack(sub, message)
            tries.append(txn)
            if len(tries) == 1:
                threading.Timer(0.2, stack.enter_context(writing(client)).set).start()
                if tried_again:
                    raise txnkv.TransactionConflictError("as if another was faster")
                raise ValueError

        with nullcontext() if tried_again else pytest.raises(ValueError):
            client.run(fn)
    assert sub.lag() == {0: 0 if tried_again else 1}
    if not tried_again:
        again = until(lambda: sub.receive(timeout=0))
        assert again.id == message.id


def test_a_run_that_ends_on_a_full_disk_gives_back_later(client: txnkv.Client, until: Any) -> None:
    """It raised that the disk is full in the place of what the function raised, and kept all."""
    sub, message = one_received(client, "shared")
    full = storage_full(Path("status.db"), errno.ENOSPC)
    with pytest.MonkeyPatch.context() as patch:

        def fn(txn: txnkv.Transaction) -> None:
            txn.ack(sub, message)
            patch.setattr(internals.status(client), "begin_write", Mock(side_effect=full))
            raise ValueError

        with pytest.raises(ValueError):
            client.run(fn)
    again = until(lambda: sub.receive(timeout=0))
    assert again.id == message.id


def test_a_stored_attempt_whose_acks_come_back_after_its_run(
    client: txnkv.Client, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were kept for a run that was over."""
    sub, message = one_received(client, "shared")
    abort, ids, full = SubscriptionParticipants.abort, list[int](), threading.Event()

    def late(*args: Any) -> None:
        if full.is_set():
            raise storage_full(Path("status.db"), errno.ENOSPC)
        abort(*args)

    monkeypatch.setattr(SubscriptionParticipants, "abort", late)

    def fn(txn: txnkv.Transaction) -> None:
        txn.serialize()
        txn.ack(sub, message)
        ids.append(int(txn.id))
        full.set()
        raise ValueError

    with pytest.raises(ValueError):
        client.run(fn)
    assert sub.receive(timeout=0) is None
    full.clear()
    client.abort_transaction(ids[0])
    again = until(lambda: sub.receive(timeout=0))
    assert again.id == message.id


def test_a_commit_that_fails_after_its_run_is_over(
    client: txnkv.Client, table: txnkv.Table, until: Any
) -> None:
    """What it had acknowledged was kept for the run until the process died."""
    sub, message = one_received(client, "exclusive")
    table.upsert((1, "a"))
    with ExitStack() as stack:

        def fn(txn: txnkv.Transaction) -> None:
            txn.ack(sub, message)
            txn.update(table, {"id": 1, "v": "b"})
            table.upsert((1, "c"))
            stack.enter_context(writing(client))
            txn.commit_async()
            raise ValueError

        with pytest.raises(ValueError):
            client.run(fn)
    again = until(lambda: sub.receive(timeout=0))
    assert again.id == message.id


def one_received(client: txnkv.Client, type: Any) -> tuple[txnkv.Subscription, txnkv.Message]:
    """A subscription, and the one message of its topic."""
    topic = client.create_topic("e")
    with client.transaction() as txn:
        txn.send(topic, b"x", key="k")
    sub = topic.subscribe("s", type)
    message = sub.receive(timeout=0)
    assert message is not None
    return sub, message


def test_callbacks_of_an_attempt_that_was_joined_run_in_no_brief_call(
    client: txnkv.Client, table: txnkv.Table
) -> None:
    found: list[str] = []

    def join(*_: object) -> None:
        disarm()
        begun = commit_protocols.begin(txn.context)
        future = commit_protocols.submit_small(txn.context, begun)
        assert future is not None
        future.add_done_callback(lambda _: found.append(threading.current_thread().name))

    txn = client.new_transaction()
    txn.upsert(table, {"id": 1, "v": "x"})
    arm("log.durable", join)
    txn.commit()
    client.close()
    assert [name.startswith("txnkv-commit") for name in found] == [True]


def test_callbacks_of_futures_run_in_no_brief_call() -> None:
    """What they wrote there was refused where it was much, and no signal was handled."""
    others: list[Any] = []

    def commit_group(group: list[CommitRequest], wait: bool) -> None:
        others.append(queue.submit(SmallCommit(2, (), lambda *_: None)))
        others[0].add_done_callback(lambda _: others.append(threading.current_thread().name))
        queue.take(group)
        for each in group:
            each.given = Timestamp(7)

    queue = CommitQueue(commit_group)
    assert brief(queue.offer)(SmallCommit(1, (), lambda *_: None)).stamp == 7
    assert others[0].result(60) == 7
    queue.close()
    assert others[1].startswith("txnkv-commit")


def test_tasks_that_wait_for_a_lock_keep_none_from_looking(
    client: txnkv.Client, store_path: Path
) -> None:
    """Two of them kept all others of the client from it."""
    for name in ("leased", "plain"):
        topic = client.create_topic(name)
        with client.transaction() as txn:
            txn.send(topic, b"x")

    async def main() -> None:
        async with txnkv.aio.connect(store_path) as own:
            leased, plain = await own.topic("leased"), await own.topic("plain")
            subs = [await leased.subscribe(f"s{i}", type="shared") for i in range(6)]
            consumer = await plain.consumer()
            with writing(client) as let_go:
                tasks = [asyncio.ensure_future(sub.receive()) for sub in subs]
                await asyncio.sleep(0.1)
                assert len(await asyncio.wait_for(consumer.poll(timeout=0), 30)) == 1
                assert not let_go.is_set()
                assert not any(task.done() for task in tasks)
            found = await asyncio.wait_for(asyncio.gather(*tasks), 60)
            assert [message.value for message in found] == [b"x"] * 6

    asyncio.run(main())


def test_tasks_of_a_closed_loop_are_collected_where_a_lock_is_held(
    client: txnkv.Client, store_path: Path
) -> None:
    """Their finalizer wanted the lock of its own thread: nobody waited any more."""
    topic = client.create_topic("e")
    watch = internals.topics(client).watch

    async def main() -> Any:
        own = await txnkv.aio.connect(store_path)
        sub = await (await own.topic("e")).subscribe("s", type="shared")
        tasks.append(asyncio.ensure_future(sub.receive()))
        while not watch._told:
            await asyncio.sleep(0.001)
        return own

    def collect() -> None:
        tasks.clear()
        while task() is not None:  # the thread that looks may have it just now
            with watch._lock:
                watch._told.clear()
                gc.collect()
        done.set()

    tasks: list[asyncio.Task[Any]] = []
    done = threading.Event()
    loop = asyncio.new_event_loop()
    kept = loop.run_until_complete(main())
    task = weakref.ref(tasks[0])
    loop.close()
    del loop
    threading.Thread(target=collect, daemon=True).start()
    assert done.wait(60)
    assert topic.subscribe("q").receive(timeout=0) is None
    asyncio.run(kept.close())


def test_a_wait_that_a_signal_breaks_off_leads_no_more(
    client: txnkv.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its `leave` was interrupted before it began: others saw messages seconds later."""
    watch = internals.topics(client).watch
    sub = client.create_topic("e").subscribe("s")

    def interrupted(waiting: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watch, "leave", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sub.receive(timeout=0.02)
    assert (watch._leader, watch._asleep, dict(watch._log.sleepers)) == (None, {}, {})


def test_what_a_handler_raises_comes_out_of_a_wait_that_looks_for_others(
    client: txnkv.Client,
) -> None:
    """A time limit was taken for an error of another's wait."""
    watch = internals.topics(client).watch
    raised: list[Exception] = [TimeoutError("the time is over")]

    def check() -> bool:
        raise raised[0]

    other, baton = Waiting(watch, None, check), threading.Lock()
    other.mark()
    baton.acquire()
    watch._asleep[other] = baton
    with pytest.raises(TimeoutError, match="the time is over"):
        watch.notice()
    assert baton.locked()
    raised[0], watch._next_round = txnkv.ClosedError("it was closed"), 0
    watch.notice()
    assert not baton.locked()
    other.end()


def test_what_ends_soon_is_handed_to_no_thread(
    client: txnkv.Client, table: txnkv.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The close of a session and of a snapshot, and the state of a transaction, were."""
    handed: list[object] = []
    run = threads._run
    with monkeypatch.context() as patch:
        patch.setattr(threads, "_run", lambda *call: (handed.append(call), run(*call))[1])
        patch.setattr(threads._threads, "run", handed.append)
        with client.new_session() as session:
            session.upsert(table, (1, "a"))
        with client.snapshot() as snapshot:
            assert snapshot.get(table, 1) is not None
            rows = snapshot.scan(table)
            assert len(list(rows)) == 1
            rows.close()
        with client.transaction() as txn:
            txn.upsert(table, (2, "b"))
            assert txn.state is txnkv.TxnState.OPEN
        assert txn.state is txnkv.TxnState.COMMITTED
    assert not handed
