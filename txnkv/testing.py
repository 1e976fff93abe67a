"""Fixtures for tests of programs that use a store: a plugin of pytest, which finds it by itself.

    def test_an_order(txnkv_client):                 a store of this test, checked at its end
        ...

    def test_it_expires(txnkv_client, txnkv_clock):
        txnkv_clock.forward(3600)                    an hour, at once

Nothing of txnkv is loaded before a fixture is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

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
