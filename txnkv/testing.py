"""Fixtures for tests of programs that use a store: a plugin of pytest, which finds it by itself.

    def test_an_order(txnkv_client):                 a store of this test, checked at its end
        ...

    def test_it_expires(txnkv_client, txnkv_clock):
        txnkv_clock.forward(3600)                    an hour, at once

    def test_it_dies(txnkv_killed, txnkv_connect):
        txnkv_killed(shop.checkout, "before commit")     in a child that is killed there
        assert shop.open_carts(txnkv_connect()) == 1

Nothing of txnkv is loaded before a fixture is used.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Literal

import pytest

import txnkv


class MovedClock:
    """The time of this process and of those that it forks, ahead of the machine's.

    Attributes:
        ahead: seconds.
    """

    def __init__(self) -> None:
        self.ahead = 0.0

    def forward(self, seconds: float) -> None:
        """Let time pass without waiting.

        Raises:
            ValueError: it would go back.
        """
        if seconds < 0:
            raise ValueError(f"time goes forward, not by {seconds!r} seconds")
        self.ahead += seconds


@pytest.fixture
def txnkv_path(tmp_path: Path) -> Path:
    """The folder of this test's store, which is made when it is opened."""
    return tmp_path / "txnkv-store"


@pytest.fixture
def txnkv_connect(txnkv_path: Path) -> Iterator[Callable[..., txnkv.Client]]:
    """Opens this test's store, with options of `txnkv.connect`; closed at the end of the test."""
    with ExitStack() as opened:

        def connect(**options: Any) -> txnkv.Client:
            return opened.enter_context(txnkv.connect(txnkv_path, **options))

        yield connect


@pytest.fixture
def txnkv_client(txnkv_connect: Callable[..., txnkv.Client]) -> Iterator[txnkv.Client]:
    """A client of this test's store. What is wrong in the store when the test ends fails it."""
    client = txnkv_connect()
    yield client
    if client.is_open:
        problems = client.check().problems
        assert not problems, "\n".join(map(str, problems))


KillPoint = Literal["before commit", "after commit"]
"""Before a commit is durable; or behind that, before anybody is told that it is."""

_POINTS: Final = {
    "before commit": ("log.written", "commit.in_point"),
    "after commit": ("log.durable", "commit.decided"),
}


@pytest.fixture
def txnkv_killed(txnkv_path: Path) -> Callable[..., None]:
    """Does work in a child process that is killed at a commit, as by `kill -9`.

    `killed(work, at, nth=1)` calls `work(client)` in a forked child, with a client of this test's
    store, and returns when the child was killed at its nth commit: "before commit", when it is
    not durable and will never have been; or "after commit", when it is, and the child was not told.
    A child that ends otherwise fails the test.
    """

    def killed(work: Callable[[txnkv.Client], object], at: KillPoint, nth: int = 1) -> None:
        if at not in _POINTS:
            raise ValueError(f"a child is killed {' or '.join(map(repr, _POINTS))}, not {at!r}")
        with warnings.catch_warnings():  # of Python, for who forks beside threads
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            _work(work, at, nth, txnkv_path)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            pytest.fail(f"the child was not killed {at}: it ended before its commit {nth}")

    return killed


def _work(work: Callable[[txnkv.Client], object], at: KillPoint, nth: int, path: Path) -> None:
    """Do work in a child, which ends with it."""
    try:
        from txnkv.storage import arm

        with txnkv.connect(path) as client:
            for point in _POINTS[at]:
                arm(point, f"kill@{nth}")
            work(client)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


@pytest.fixture
def txnkv_clock() -> Iterator[MovedClock]:
    """The clock by which txnkv goes in this process: `forward(seconds)`."""
    from txnkv.storage import clock

    moved = MovedClock()
    wall, monotonic = clock.now_micros, clock.monotonic_micros
    with clock.replaced(
        wall=lambda: wall() + int(moved.ahead * 1e6),
        monotonic=lambda: monotonic() + int(moved.ahead * 1e6),
    ):
        yield moved
