"""Locks in a forked child: all are free there, whoever held them in the parent. Sets of threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from txnkv.storage import locks

InChild = Callable[[Callable[[], object]], int]


@contextmanager
def held(lock: Any) -> Iterator[None]:
    """Another thread has the lock for the block."""
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(60)
    yield
    done.set()
    thread.join()


@pytest.mark.parametrize("make", [locks.new_lock, locks.new_rlock, locks.new_condition])
def test_what_another_thread_holds_is_free_in_the_child(
    make: Callable[[], Any], in_child: InChild
) -> None:
    lock = make()

    def check() -> None:
        assert lock.acquire(timeout=10)
        lock.release()

    with held(lock):
        assert in_child(check) == 0
        assert not lock.acquire(timeout=0.01), "the parent's thread still has it"


def test_what_waits_for_a_condition_is_not_in_the_child(in_child: InChild) -> None:
    condition = locks.new_condition()

    def wait() -> None:
        with condition:
            condition.wait(60)

    thread = threading.Thread(target=wait)
    thread.start()
    while not condition._waiters:  # type: ignore[attr-defined]
        pass

    def check() -> None:
        with condition:
            assert not condition._waiters  # type: ignore[attr-defined]

    assert in_child(check) == 0
    with condition:
        condition.notify()
    thread.join()


def test_the_thread_that_forks_keeps_what_it_has(in_child: InChild) -> None:
    lock = locks.new_rlock()

    def check() -> None:
        lock.release()
        assert lock.acquire(blocking=False)

    with lock:
        assert in_child(check) == 0


def test_a_lock_goes_with_its_owner() -> None:
    before = len(locks._made)
    lock = locks.new_lock()
    assert len(locks._made) == before + 1
    del lock
    assert len(locks._made) == before


def test_no_handler_runs_where_a_set_forgets_what_was_dropped() -> None:
    """Python prints what is raised in a callback of Python's, and goes on: Ctrl-C was lost."""

    class Thing:
        pass

    every = locks.SharedWeakSet[Thing]()
    thing = Thing()
    every.add(thing)
    events: list[str] = []
    sys.setprofile(lambda frame, event, arg: events.append(event))
    del thing
    sys.setprofile(None)
    assert "call" not in events
    assert list(every) == []


def test_a_set_is_looked_through_while_others_add_to_it() -> None:
    """Of those that were there each one that is left, once."""

    class Thing:
        pass

    things = [Thing() for _ in range(100)]
    every = locks.SharedWeakSet[Thing]()
    for each in things:
        every.add(each)
    seen = []
    for each in every:
        seen.append(each)
        things.append(Thing())
        every.add(things[-1])
        every.discard(each)
    assert set(seen) == set(things[:100])
    del each, seen, things[:150]
    assert len(list(every)) == 50
