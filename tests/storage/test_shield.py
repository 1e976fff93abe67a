from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import pytest

from txnkv.storage import threads
from txnkv.storage.threads import go_on, shielded, shielded_steps


class Alarm(Exception):
    pass


@contextmanager
def _alarm_in(seconds: float) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@shielded
def _where() -> int:
    return threading.get_ident()


def test_the_main_thread_has_its_work_done_elsewhere() -> None:
    assert _where() != threading.get_ident()


def test_other_threads_do_it_themselves() -> None:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(_where() == threading.get_ident()))
    thread.start()
    thread.join()
    assert found == [True]


def test_a_shielded_call_inside_of_another_stays_where_it_is() -> None:
    @shielded
    def outer() -> tuple[int, int]:
        return threading.get_ident(), _where()

    here, there = outer()
    assert here == there


def test_errors_come_back() -> None:
    @shielded
    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError, match="x") as caught:
        fail()
    assert any(entry.name == "fail" for entry in caught.traceback)


def test_what_is_interrupted_goes_on_to_its_end() -> None:
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    @shielded
    def work() -> None:
        begun.set()
        go_on.wait(60)
        ended.set()

    with pytest.raises(Alarm), _alarm_in(0.05):
        work()
    assert begun.is_set()
    assert not ended.is_set()
    assert _where() != threading.get_ident()  # another thread is there for the next call
    go_on.set()
    assert ended.wait(60)


def test_steps_of_a_generator() -> None:
    def numbers() -> Iterator[int]:
        yield threading.get_ident()
        yield 2

    there, two = shielded_steps(numbers())
    assert there != threading.get_ident()
    assert two == 2


def test_threads_are_used_again() -> None:
    for _ in range(50):
        _where()
    before = threading.active_count()
    for _ in range(50):
        _where()
    assert threading.active_count() <= before + 1


def test_a_forked_child_has_threads_of_its_own() -> None:
    _where()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if _where() != threading.get_ident() else 1)
    assert os.waitpid(pid, 0)[1] == 0


@shielded
def _endless(ended: threading.Event) -> None:
    try:
        while True:
            go_on()
            time.sleep(0.001)
    finally:
        ended.set()


def test_long_work_ends_when_nobody_waits_for_it() -> None:
    ended = threading.Event()

    with pytest.raises(Alarm), _alarm_in(0.05):
        _endless(ended)
    assert ended.wait(60)
    go_on()  # here somebody waits


def test_work_ends_also_when_it_was_only_just_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call went on for ever: the interrupt came before the wait for it."""
    ended = threading.Event()

    class Interrupted(SimpleQueue[Any]):
        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            super().put(item)
            raise Alarm

    monkeypatch.setattr(threads, "_threads", threads._Threads())
    monkeypatch.setattr(threads._threads, "_calls", Interrupted())
    with pytest.raises(Alarm):
        _endless(ended)
    assert ended.wait(60)
