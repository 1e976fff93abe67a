"""commit_async: one thread with many commits on their way."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, as_completed, wait
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

import txnkv
from tests import internals
from tools.interrupts import Interruption
from txnkv.coordinator import ShieldedFuture
from txnkv.storage import is_calm
from txnkv.storage.faults import arm, disarm

ABORTED, COMMITTED = txnkv.TxnState.ABORTED, txnkv.TxnState.COMMITTED


def _begin(client: txnkv.Client, table: txnkv.Table, *keys: int) -> txnkv.Transaction:
    txn = client.new_transaction()
    for key in keys:
        txn.insert(table, (key, str(key)))
    return txn


def test_thousands_share_a_few_groups(client: txnkv.Client, table: txnkv.Table) -> None:
    """They wait for the disk together, not one after the other."""
    metrics = internals.coordinator(client).metrics
    before = metrics.commit_groups.read()
    txns = [_begin(client, table, id) for id in range(2000)]
    asked = threading.Event()
    arm("status.before_commit", lambda: asked.wait(60))
    futures = [txn.commit_async() for txn in txns]
    disarm()
    asked.set()
    stamps = [future.result(60) for future in futures]
    assert stamps == sorted(set(stamps))  # in the order in which they were asked for
    assert metrics.commit_groups.read() - before < 10
    assert table.count() == 2000


def test_a_future_tells_of_the_conflict(client: txnkv.Client, table: txnkv.Table) -> None:
    first, second = _begin(client, table, 1), _begin(client, table, 1)
    done, refused = first.commit_async(), second.commit_async()
    assert done.result(20) > first.snapshot
    assert isinstance(refused.exception(20), txnkv.TransactionConflictError)
    assert (first.state, second.state) == (COMMITTED, ABORTED)


@pytest.mark.usefixtures("size")
def test_rows_that_are_refused_leave_it_open(client: txnkv.Client, table: txnkv.Table) -> None:
    _begin(client, table, 1).commit()
    txn = _begin(client, table, 1, 2)
    error = txn.commit_async().exception(20)
    assert isinstance(error, txnkv.RowErrors)
    assert [refused.key for refused in error.errors] == [1]
    assert txn.state is txnkv.TxnState.OPEN
    assert txn.commit_async().result(20) > txn.snapshot
    assert table.count() == 2


@pytest.mark.usefixtures("size")
def test_asked_twice_it_is_one_commit(client: txnkv.Client, table: txnkv.Table) -> None:
    txn = _begin(client, table, 1)
    futures = [txn.commit_async(), txn.commit_async()]
    assert futures[0].result(20) == futures[1].result(20) == txn.commit()
    assert txn.commit_async().result(20) == txn.commit()


@pytest.mark.usefixtures("size")
@pytest.mark.parametrize("end", ["commit", "commit_async", "with"])
def test_an_end_behind_it_is_the_same_commit(
    client: txnkv.Client, table: txnkv.Table, end: str
) -> None:
    """Over a server the rows and messages went along with the second one too."""
    topic = client.create_topic("events", partitions=1)
    for id in range(10):
        with client.transaction() as txn:
            txn.insert(table, (id, None))
            txn.send(topic, b"%d" % id)
            future = txn.commit_async()
            if end == "commit":
                assert txn.commit() == future.result(20)
            elif end == "commit_async":
                assert txn.commit_async().result(20) == future.result(20)
        assert future.result(20) == txn.commit()
    assert [m.value for m in topic.consumer().poll()] == [b"%d" % id for id in range(10)]
    assert table.count() == 10


@pytest.mark.usefixtures("size")
@pytest.mark.parametrize("end", ["commit", "with"])
def test_an_end_behind_one_that_is_refused_rows_commits_the_others(
    client: txnkv.Client, table: txnkv.Table, end: str
) -> None:
    """The future tells of those, and nobody is told that it was rolled back."""
    table.insert((1, None))
    with client.transaction() as txn:
        txn.insert(table, (1, None))
        txn.insert(table, (2, None))
        future = txn.commit_async()
        if end == "commit":
            txn.commit()
    error = future.exception(20)
    assert isinstance(error, txnkv.RowErrors)
    assert [refused.key for refused in error.errors] == [1]
    assert txn.state is COMMITTED
    assert table.count() == 2


def test_it_is_not_rolled_back_behind_it(client: txnkv.Client, table: txnkv.Table) -> None:
    txn = _begin(client, table, 1)
    future = txn.commit_async()
    with pytest.raises(txnkv.InvalidTxnStateError, match="COMMITTED"):
        txn.rollback()
    assert future.result(20) == txn.commit()
    for id in range(2, 12):
        with suppress(KeyError), client.transaction() as txn:
            txn.insert(table, (id, None))
            future = txn.commit_async()
            raise KeyError(id)
        assert future.result(20) == txn.commit()
    assert table.count() == 11


def test_it_is_on_its_way_until_the_disk_has_it(
    client: txnkv.Client, table: txnkv.Table, until: Any
) -> None:
    go_on = threading.Event()
    txn = _begin(client, table, 1)
    arm("status.before_commit", lambda: go_on.wait(30))
    future = txn.commit_async()
    assert txn.state is txnkv.TxnState.COMMIT_IN_PROGRESS
    assert not txn.is_commit_complete()
    assert not future.cancel()
    with pytest.raises(txnkv.InvalidTxnStateError, match="COMMIT_IN_PROGRESS"):
        txn.insert(table, (2, None))
    disarm()
    go_on.set()
    future.result(20)
    assert txn.is_commit_complete()
    with pytest.raises(txnkv.InvalidTxnStateError, match="COMMITTED"):
        txn.rollback()


CALLS: dict[str, Callable[[Future[int]], object]] = {
    "result": lambda future: future.result(0.01),
    "exception": lambda future: future.exception(0.01),
    "done": lambda future: (future.done(), future.running(), future.cancelled()),
    "add_done_callback": lambda future: future.add_done_callback(lambda _: None),
    "cancel": lambda future: future.cancel(),
    "repr": repr,
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("done", [False, True])
def test_an_interruption_leaves_the_future_free(call: str, done: bool) -> None:
    """Or the thread that completes it would wait for ever, and with it all others of its group."""

    def ask() -> None:
        with suppress(TimeoutError):
            CALLS[call](future)

    for n in itertools.count(1):
        future = ShieldedFuture[int]().begun()
        if done:
            future.set_result(1)
        interruption = Interruption(n)
        interruption.run(ask)
        end = future.done if done else partial(future.set_result, 1)
        complete = threading.Thread(target=end, daemon=True)
        complete.start()
        complete.join(30)
        assert not complete.is_alive(), interruption.where
        assert future.result(30) == 1
        if interruption.where is None:
            break


def test_it_is_given_such_a_future(client: txnkv.Client, table: txnkv.Table) -> None:
    large, small = _begin(client, table, 1), _begin(client, table, 2)
    large.serialize()
    small_one, large_one = small.commit_async(), large.commit_async()
    futures = [small_one, large_one, client.new_transaction().commit_async()]
    assert {type(future) for future in futures} == {ShieldedFuture}
    assert {future.result(30) for future in as_completed(futures, 30)} == {
        future.result() for future in futures
    }


def test_such_a_future_is_one_as_others_are() -> None:
    future = ShieldedFuture[int]()
    heard: list[Future[int]] = []
    future.add_done_callback(heard.append)
    with pytest.raises(TimeoutError):
        future.result(0)

    async def wrapped() -> int:
        waiting = asyncio.wrap_future(future)
        await asyncio.sleep(0)
        threading.Thread(target=future.set_result, args=(1,)).start()
        return await waiting

    assert asyncio.run(wrapped()) == future.result() == 1
    assert future.exception() is None
    future.add_done_callback(heard.append)
    assert heard == [future, future]
    calm: list[bool] = []
    future.add_done_callback(lambda _: calm.append(is_calm()))
    assert calm == [False]  # a handler may interrupt what takes long
    assert ShieldedFuture[int]().cancel()


def test_an_error_that_was_raised_keeps_no_future() -> None:
    future = ShieldedFuture[int]().begun()
    future.take(int, "one")
    gc.collect()
    gc.disable()
    try:
        with suppress(ValueError):
            future.result(30)
        dropped = weakref.ref(future)
        del future
        assert dropped() is None
    finally:
        gc.enable()


def test_nothing_written_is_done_at_once(client: txnkv.Client, table: txnkv.Table) -> None:
    txn = client.new_transaction()
    future = txn.commit_async()
    assert future.done()
    assert future.result() == txn.snapshot


def test_a_large_one_commits_on_a_thread(client: txnkv.Client, table: txnkv.Table) -> None:
    txn = _begin(client, table, 1)
    txn.serialize()
    assert txn.commit_async().result(20) > txn.snapshot
    assert table.count() == 1


def test_close_waits_for_all_that_are_on_their_way(connect: Any) -> None:
    """Groups that come after the one that is being written, too."""
    client = connect()
    table = client.create_table("t", txnkv.Schema({"id": "int64", "v": "string?"}, ["id"]))
    client.new_transaction().rollback()  # the range of ids
    futures = [_begin(client, table, id).commit_async() for id in range(300)]
    client.close()
    assert all(future.done() for future in futures)
    assert len({future.result() for future in futures}) == 300
    assert connect().table("t").count() == 300


def test_close_waits_for_a_large_one(connect: Any, until: Any) -> None:
    """It was asked to commit: the client that is closed behind it does not take that back, nor is
    its future cancelled, and the transaction left as it stands.
    """
    client = connect()
    table = client.create_table("t", txnkv.Schema({"id": "int64", "v": "string?"}, ["id"]))
    txn = _begin(client, table, 1)
    txn.serialize()
    go_on = threading.Event()
    for _ in range(4):  # all threads there are
        client.instance.pool.submit(go_on.wait, 30)
    future = txn.commit_async()
    closing = threading.Thread(target=client.close)
    closing.start()
    until(lambda: not client.is_open)
    assert not future.cancel()
    go_on.set()
    closing.join(30)
    assert future.result(30) > txn.snapshot
    assert connect().table("t").count() == 1


def test_past_its_timeout_the_future_says_so(
    client: txnkv.Client, table: txnkv.Table, now: Any
) -> None:
    txn = client.new_transaction(timeout=5)
    txn.insert(table, (1, None))
    txn.flush()
    now.forward(6)
    with pytest.raises(txnkv.TransactionTimedOutError):
        txn.commit_async().result(20)


def test_a_disk_that_fails_is_told_to_each(client: txnkv.Client, table: txnkv.Table) -> None:
    txns = [_begin(client, table, id) for id in range(5)]
    arm("status.before_commit", "error@1")
    futures: list[Future[txnkv.Timestamp]] = [txn.commit_async() for txn in txns]
    wait(futures, 20)
    disarm()
    for txn, future in zip(txns, futures, strict=True):
        error = future.exception()
        if error is None:
            assert txn.state is COMMITTED
        else:
            assert isinstance(error, txnkv.CommitOutcomeUnknownError)
            assert client.transaction_state(error.txn_id) is ABORTED
    assert any(future.exception() for future in futures)
    assert table.count() == sum(future.exception() is None for future in futures)
