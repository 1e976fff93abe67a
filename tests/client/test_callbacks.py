"""Callbacks of commits' futures: what a program does there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import pytest

import txnkv


def _begin(client: txnkv.Client, table: txnkv.Table, key: int) -> txnkv.Transaction:
    txn = client.new_transaction()
    txn.insert(table, (key, None))
    return txn


def _in_a_callback(
    client: txnkv.Client, table: txnkv.Table, fn: Callable[[], object]
) -> Future[object]:
    """The outcome of `fn`, called in a callback on the library's thread."""
    here = threading.get_ident()
    for key in range(-1000, 0):
        answer: Future[object] = Future()

        def callback(_: object, answer: Future[object] = answer) -> None:
            if threading.get_ident() == here:  # it was committed already
                answer.cancel()
                return
            try:
                answer.set_result(fn())
            except BaseException as error:
                answer.set_exception(error)

        _begin(client, table, key).commit_async().add_done_callback(callback)
        if not answer.cancelled():
            return answer
    raise AssertionError("each was committed before its callback was added")


@pytest.mark.parametrize("way", ["commit", "commit_async", "upsert", "close"])
def test_a_callback_may_commit_too(client: txnkv.Client, table: txnkv.Table, way: str) -> None:
    """Whoever waits for the thread that it holds is led by another."""

    def act() -> list[Future[txnkv.Timestamp]]:
        others = [_begin(client, table, key).commit_async() for key in range(3)]
        if way == "commit":
            _begin(client, table, 10).commit()
        elif way == "commit_async":
            _begin(client, table, 10).commit_async().result(30)
        elif way == "upsert":
            table.upsert({"id": 10, "v": "x"})
        else:
            client.close()
        return others

    others = _in_a_callback(client, table, act).result(60)
    assert isinstance(others, list)
    assert len({other.result(30) for other in others}) == 3
    if way != "close":
        assert table.count(where=[("id", ">=", 0)]) == 4


def test_a_callback_that_is_slow_holds_nobody_up(client: txnkv.Client, table: txnkv.Table) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> bool:
        begun.set()
        return go_on.wait(60)

    answer = _in_a_callback(client, table, slow)
    assert begun.wait(30)
    behind = _begin(client, table, 2).commit_async()
    table.upsert({"id": 3, "v": "x"})
    time.sleep(0.1)  # what waits for the thread has waited for long
    assert _begin(client, table, 4).commit_async().result(30) > behind.result(30)
    assert [_begin(client, table, key).commit_async().result(30) for key in range(5, 10)]
    assert not answer.done()
    go_on.set()
    assert answer.result(30)
