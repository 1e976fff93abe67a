"""commit_async: one thread with many commits on their way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import pytest

import txnkv
from tests import internals
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
    """It was asked to commit: the client that is closed behind it does not take that back."""
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


def _in_a_callback(txn: txnkv.Transaction, fn: Callable[[], object]) -> Future[object]:
    """The outcome of a callback of the transaction's commit that calls `fn`."""
    answer: Future[object] = Future()
    go_on = threading.Event()

    def callback(_: object) -> None:
        try:
            answer.set_result(fn())
        except BaseException as error:
            answer.set_exception(error)

    arm("status.before_commit", lambda: go_on.wait(30))  # else it is called here
    txn.commit_async().add_done_callback(callback)
    disarm()
    go_on.set()
    return answer


@pytest.mark.parametrize("way", ["commit", "commit_async", "upsert", "close"])
def test_a_callback_may_commit_too(client: txnkv.Client, table: txnkv.Table, way: str) -> None:
    """Whoever waits for the thread that it holds is led by another."""

    def act() -> object:
        others = [_begin(client, table, 100 + at).commit_async() for at in range(3)]
        if way == "commit":
            return _begin(client, table, 1000).commit(), others
        if way == "commit_async":
            return _begin(client, table, 1000).commit_async().result(30), others
        if way == "upsert":
            return table.upsert({"id": 1000, "v": "x"}), others
        return client.close(), others

    found = _in_a_callback(_begin(client, table, 1), act).result(60)
    assert isinstance(found, tuple)
    assert len({other.result(30) for other in found[1]}) == 3
    if way != "close":
        assert table.count() == 5


def test_a_callback_that_is_slow_holds_nobody_up(client: txnkv.Client, table: txnkv.Table) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> bool:
        begun.set()
        return go_on.wait(60)

    answer = _in_a_callback(_begin(client, table, 1), slow)
    assert begun.wait(30)
    behind = _begin(client, table, 2).commit_async()
    table.upsert({"id": 3, "v": "x"})
    time.sleep(0.1)  # what waits for the thread has waited for long
    assert _begin(client, table, 4).commit_async().result(30) > behind.result(30)
    assert [_begin(client, table, id).commit_async().result(30) for id in range(5, 10)]
    assert not answer.done()
    go_on.set()
    assert answer.result(30)
