"""Threads of a test: they begin at one moment, and the error of one is the test's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import pytest

import txnkv

T = TypeVar("T")


def at_once(*calls: Callable[[], T]) -> list[T]:
    """Make each call in a thread of its own; what they returned, in order."""
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], T]) -> T:
        start.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


class Held:
    """A function that stands still where it is called first, until it is let go."""

    def __init__(self, was: Callable[..., Any]) -> None:
        self.there, self.go_on, self._was = threading.Event(), threading.Event(), was

    def __call__(self, *args: Any, **named: Any) -> Any:
        if not self.there.is_set():
            self.there.set()
            assert self.go_on.wait(60)
        return self._was(*args, **named)


@contextmanager
def held(of: Any, name: str) -> Iterator[Held]:
    """In the block a function of `of` stands still once; it is let go at the end."""
    with pytest.MonkeyPatch.context() as patch:
        made = Held(getattr(of, name))
        patch.setattr(of, name, lambda *args, **named: made(*args, **named))
        try:
            yield made
        finally:
            made.go_on.set()


def still_waits(future: Future[Any]) -> None:
    """A call that waits for others has not ended; on a busy machine that shows nothing."""
    with suppress(TimeoutError):
        pytest.fail(f"it was done meanwhile: {future.result(0.1)!r}")


def shared(client: txnkv.Client, size: str) -> txnkv.Transaction:
    """A small or large transaction that has a session."""
    txn = client.new_transaction(timeout=None)
    if size == "large":
        txn.serialize()
    txn.flush()
    return txn


def committed(table: txnkv.Table, topic: txnkv.Topic) -> tuple[list[int], list[int]]:
    """The ids of the rows, and the numbers that the messages are."""
    consumer, found = topic.consumer(), list[txnkv.Message]()
    while some := consumer.poll(max_messages=10_000, timeout=0):
        found += some
    ids = [row["id"] for row in table.scan(ordered=True)]
    return ids, sorted(int(message.value or b"") for message in found)
