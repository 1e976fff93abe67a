from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from txnkv.storage.locks import SharedGate


def test_users_share() -> None:
    gate, together = SharedGate(), threading.Barrier(3)

    def use() -> None:
        with gate.use():
            together.wait(60)

    with ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(use) for _ in range(3)]:
            future.result()


def test_drain_waits_for_users_and_keeps_newcomers_out() -> None:
    gate, inside, leave = SharedGate(), threading.Event(), threading.Event()
    order: list[str] = []

    def use() -> None:
        with gate.use():
            inside.set()
            leave.wait(60)
            order.append("user left")

    def drain() -> None:
        with gate.drained():
            order.append("drained")

    with ThreadPoolExecutor(2) as pool:
        user = pool.submit(use)
        inside.wait(60)
        assert not gate.drain(timeout=0)
        drainer = pool.submit(drain)
        leave.set()
        user.result()
        drainer.result()
    assert order == ["user left", "drained"]


def test_user_enters_again_while_another_waits_to_drain() -> None:
    # If the second entry waited for the drain, and the drain for the first, both would hang.
    gate, draining = SharedGate(), threading.Event()

    def drain() -> None:
        draining.set()
        with gate.drained():
            pass

    with ThreadPoolExecutor(1) as pool:
        with gate.use():
            drainer = pool.submit(drain)
            draining.wait(60)
            while gate._joining.acquire(blocking=False):
                gate._joining.release()
            with gate.use():
                assert not drainer.done()
        drainer.result(60)


def test_user_cannot_drain() -> None:
    gate = SharedGate()
    with gate.use(), pytest.raises(RuntimeError, match="leave it first"):
        gate.drain()
    assert gate.drain(timeout=0)


def test_failed_drain_leaves_the_gate_open() -> None:
    gate, inside, leave = SharedGate(), threading.Event(), threading.Event()

    def use() -> None:
        with gate.use():
            inside.set()
            leave.wait(60)

    with ThreadPoolExecutor(1) as pool:
        user = pool.submit(use)
        inside.wait(60)
        assert not gate.drain(timeout=0.01)
        with gate.use():
            pass
        leave.set()
        user.result()


def test_user_may_wait_for_what_a_newcomer_has() -> None:
    # The user waits for the lock, its holder at the gate, and the drain for the user.
    gate, lock, inside = SharedGate(), threading.Lock(), threading.Event()

    def use() -> None:
        with gate.use():
            inside.set()
            with lock:
                pass

    with ThreadPoolExecutor(2) as pool:
        with lock:
            user = pool.submit(use)
            inside.wait(60)
            drainer = pool.submit(gate.drain)
            while gate._joining.acquire(blocking=False):
                gate._joining.release()
            with gate.use():
                assert not user.done()
        user.result(60)
        assert drainer.result(60)


def test_reset_forgets_users() -> None:
    gate = SharedGate()
    gate.enter()
    gate.reset()
    assert gate.drain(timeout=0)
