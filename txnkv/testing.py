"""Fixtures for tests of programs that use a store: a plugin of pytest, which finds it by itself.

    def test_an_order(txnkv_client):                 a store of this test, checked at its end
        ...

    def test_it_expires(txnkv_client, txnkv_clock):
        txnkv_clock.forward(3600)                    an hour, at once

    def test_a_death(txnkv_client, txnkv_killed):
        txnkv_killed(place_order, "committed")       by kill -9, in a process of its own: the commit
        assert txnkv_client.table("orders").count() == 1                     is there, nobody heard

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
from typing import Any, Final, Literal, TypeAlias

import pytest

import txnkv

Moment: TypeAlias = Literal["committing", "committed"]

MOMENTS: Final[dict[str, tuple[str, ...]]] = {
    "committing": ("log.written", "commit.in_point"),
    "committed": ("log.durable", "commit.decided"),
}
"""By moment the places where a process is killed: of a small transaction and of a large one."""


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


@pytest.fixture
def txnkv_killed(
    txnkv_path: Path,
) -> Callable[[Callable[[txnkv.Client], object], Moment], None]:
    """Runs a function with a client of this test's store, in a forked process that is killed.

    `txnkv_killed(work, at)` returns when it is dead: "committing", its first commit is written and
    counts for nothing; or "committed", it is durable and nobody heard of it. The next one who opens
    the store, or has it open, finds it so.
    """

    def run(work: Callable[[txnkv.Client], object], at: Moment) -> None:
        if at not in MOMENTS:
            raise ValueError(f"at is one of {', '.join(MOMENTS)}, not {at!r}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
            pid = os.fork()
        if pid == 0:
            _die(txnkv_path, work, at)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code != -signal.SIGKILL:
            what = "it raised; see above" if code == 1 else "it did not commit"
            pytest.fail(f"{work!r} was not killed when it was {at}: {what}")

    return run


def _die(path: Path, work: Callable[[txnkv.Client], object], at: Moment) -> None:
    code = 1
    try:
        from txnkv.storage import arm

        with txnkv.connect(path) as client:
            for place in MOMENTS[at]:
                arm(place, "kill")
            work(client)
        code = 2
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)
