from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any

import pytest

from tests.threads import still_waits
from txnkv.core import Handlers
from txnkv.storage import threads
from txnkv.storage.threads import (
    TaskThread,
    brief,
    go_on,
    is_exposed,
    lengthy,
    shielded,
    shielded_steps,
    shielded_unless,
)


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


@contextmanager
def _bell(*, raises: bool = True) -> Iterator[list[str]]:
    """A handler that says when it runs."""
    heard: list[str] = []

    def ring(*_: object) -> None:
        heard.append("rung")
        if raises:
            raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    try:
        yield heard
    finally:
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


@pytest.mark.parametrize("way", [shielded, brief, lengthy])
def test_what_a_call_had_goes_with_its_error(way: Any) -> None:
    """Not when the collector comes, which may be in another thread: locks are of one."""

    class Held:
        pass

    there: list[weakref.ref[Held]] = []

    def fails() -> None:
        held = Held()
        there.append(weakref.ref(held))
        raise ValueError(held.__class__)

    gc.disable()
    try:
        for _ in range(3):
            with suppress(ValueError):
                way(fails)()
            until = time.monotonic() + 10
            while there[-1]() is not None and time.monotonic() < until:
                time.sleep(0.001)  # the thread has it for a moment longer
            assert there[-1]() is None
    finally:
        gc.enable()


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


def test_no_call_waits_behind_one_that_nobody_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt came when the thread had the call, and was counted as free."""
    has, goes_on, ended = threading.Event(), threading.Event(), threading.Event()

    class Held(SimpleQueue[Any]):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            item = super().get()
            has.set()
            assert goes_on.wait(60)
            return item

    monkeypatch.setattr(threads, "_threads", threads._Threads())
    monkeypatch.setattr(threads._threads, "_calls", Held())
    first = threads._Call(ended.wait, (60,), {})
    threads._threads.take(first)
    assert has.wait(60)
    threads._threads.take(threads._Call(ended.set, (), {}))
    goes_on.set()
    assert first.done.acquire(timeout=120)
    assert first.result


# -- brief calls: handlers are put off ------------------------------------------------------


def _ring_here() -> None:
    signal.raise_signal(signal.SIGALRM)


def _ring_by_a_thread() -> None:
    """Another thread takes the signal, as it may that of a terminal."""
    thread = threading.Thread(
        target=lambda: signal.pthread_kill(threading.get_ident(), signal.SIGALRM)
    )
    thread.start()
    thread.join()


@pytest.mark.parametrize("ring", [_ring_here, _ring_by_a_thread])
def test_a_handler_runs_when_a_brief_call_has_ended(ring: Any) -> None:
    steps: list[str] = []

    @brief
    def work() -> None:
        ring()
        for number in range(1000):  # calls and jumps back, where handlers would run
            str(number)
        time.sleep(0.001)
        steps.append("done")
        steps.extend(heard)

    with _bell() as heard:
        with pytest.raises(Alarm):
            work()
        assert (steps, heard) == (["done"], ["rung"])
        work_again = brief(lambda: "result")
        assert work_again() == "result"
    assert threading.get_ident() == brief(threading.get_ident)()  # no other thread has it


def test_a_handler_that_raises_nothing_changes_nothing() -> None:
    @brief
    def work() -> str:
        _ring_here()
        return "result"

    @brief
    def fail() -> None:
        _ring_here()
        raise KeyError("x")

    with _bell(raises=False) as heard:
        assert work() == "result"
        with pytest.raises(KeyError, match="x"):
            fail()
        assert heard == ["rung", "rung"]


def test_the_exception_of_a_handler_counts_more_than_that_of_the_call() -> None:
    @brief
    def fail() -> None:
        _ring_here()
        raise KeyError("x")

    with _bell(), pytest.raises(Alarm):
        fail()


def test_a_result_that_nobody_takes_is_given_back() -> None:
    gone = threading.Event()

    class Held:
        def __del__(self) -> None:
            gone.set()

    @brief
    def work() -> Held:
        _ring_here()
        return Held()

    with _bell(), pytest.raises(Alarm):
        work()
    assert gone.is_set()


def test_inside_of_a_brief_call() -> None:
    @brief
    def work() -> tuple[int, bool]:
        return _where(), is_exposed()

    assert work() == (threading.get_ident(), False)
    assert is_exposed()


def test_a_lengthy_part_of_a_brief_call_can_be_left() -> None:
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    @lengthy
    def wait_for_others() -> None:
        begun.set()
        go_on.wait(60)
        ended.set()

    left: list[bool] = []

    @brief
    def work() -> None:
        try:
            wait_for_others()
        finally:
            left.append(is_exposed())

    with pytest.raises(Alarm), _alarm_in(0.05):
        work()
    assert begun.is_set()
    assert not ended.is_set()
    assert left == [False]  # its end is undisturbed as its beginning was
    assert is_exposed()
    go_on.set()
    assert ended.wait(60)


def test_a_lengthy_part_is_done_whenever_the_signal_came() -> None:
    """A commit waited in the queue, and nobody was there who would lead it."""

    @brief
    def work() -> None:
        _ring_here()
        lengthy(done.set)()
        raise AssertionError("it waits no more")

    done = threading.Event()
    with _bell(), pytest.raises(Alarm):
        work()
    assert done.wait(60)


def test_brief_or_shielded_by_its_arguments() -> None:
    @shielded_unless(lambda is_brief: is_brief)
    def where(is_brief: bool) -> int:
        return threading.get_ident()

    assert where(True) == threading.get_ident()
    assert where(False) != threading.get_ident()


def test_threads_know_nothing_of_it() -> None:
    found: list[Any] = []

    def look() -> None:
        found.extend((is_exposed(), brief(threading.get_ident)(), lengthy(threading.get_ident)()))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [False, thread.ident, thread.ident]


def test_a_fork_by_another_thread_inside_of_a_brief_call() -> None:
    """The child's only thread is its main one, whose handlers run."""
    found: list[int] = []

    def fork() -> None:
        pid = os.fork()
        if pid == 0:
            right = is_exposed() and not brief(is_exposed)() and is_exposed()
            os._exit(0 if right and _where() != threading.get_ident() else 1)
        found.append(os.waitpid(pid, 0)[1])

    @brief
    def work() -> None:
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()

    work()
    assert found == [0]
    assert is_exposed()


def test_a_python_that_cannot_put_handlers_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brief calls are shielded ones there."""
    with pytest.raises(RuntimeError, match="main thread"):
        Handlers(1)
    for name in ("_put_off", "_let"):
        monkeypatch.setattr(threads, name, threads._run)
    monkeypatch.setattr(threads, "is_calm", bool)
    monkeypatch.setattr(threads, "is_exposed", threads._is_main)
    assert brief(threading.get_ident)() != threading.get_ident()
    here, there = brief(lambda: (threading.get_ident(), lengthy(threading.get_ident)()))()
    assert here == there
    with pytest.raises(Alarm), _alarm_in(0.05):
        brief(time.sleep)(60)


def test_put_off_takes_a_call() -> None:
    handlers: Any = threads._handlers
    assert handlers is not None, "this Python is one of those that tests run with"
    for wrong in ((), (print,), (print, [], {}), (print, (), None)):
        with pytest.raises(TypeError):
            handlers.put_off(*wrong)
        with pytest.raises(TypeError):
            handlers.let(*wrong)


def test_who_closes_waits_for_what_another_thread_took_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A task held the thread while it was closed: what came behind was not waited for."""
    monkeypatch.setattr(threads, "_HELD", 600.0)
    tasks, first, second = TaskThread("tasks"), threading.Event(), threading.Event()
    begun = threading.Event()
    tasks.hand(first.wait)
    tasks.hand(lambda: (begun.set(), second.wait()))
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(tasks.close)
        still_waits(closing)
        tasks._replace()  # as after that time
        assert begun.wait(60)
        first.set()
        still_waits(closing)
        second.set()
        closing.result(60)
