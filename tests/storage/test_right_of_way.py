"""The right of way: who has it, who waits for it, and for how long at most."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from txnkv.storage import Runtime, clock
from txnkv.storage.right_of_way import CONFLICTS, LEASE, RightOfWay, Turn


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The time, in its only item."""
    micros = [clock.monotonic_micros()]
    monkeypatch.setattr(clock, "monotonic_micros", lambda: micros[0])
    return micros


@pytest.fixture
def way(tmp_path: Path, now: list[int]) -> Iterator[RightOfWay]:
    runtime = Runtime.open(tmp_path / "runtime")
    yield RightOfWay(runtime)
    runtime.close()


def losing(way: RightOfWay) -> Turn:
    """One that is about to take it."""
    turn = Turn(way)
    for _ in range(CONFLICTS):
        turn.lost()
    return turn


def test_taken_after_conflicts(way: RightOfWay) -> None:
    turn, other = Turn(way), Turn(way)
    for _ in range(CONFLICTS):
        assert not turn.take()
        assert not other.blocked
        turn.lost()
    assert turn.take()
    assert other.blocked
    assert not turn.blocked
    turn.end()
    assert not other.blocked
    turn.end()


def test_one_has_it(way: RightOfWay) -> None:
    first, second = losing(way), losing(way)
    assert first.take()
    assert not second.take()
    second.end()  # what it has not it cannot give up
    assert second.blocked
    first.end()
    assert second.take()
    assert first.blocked


def test_another_attempt_has_it_longer(way: RightOfWay, now: list[int]) -> None:
    turn, other = losing(way), Turn(way)
    assert turn.take()
    now[0] += LEASE - 1
    assert turn.take()
    now[0] += LEASE - 1
    assert other.blocked


def test_who_died_with_it_keeps_nobody(way: RightOfWay, now: list[int]) -> None:
    dead, other, losers = losing(way), Turn(way), losing(way)
    assert dead.take()
    assert other.blocked
    now[0] += LEASE
    assert not other.blocked
    assert losers.take()
    dead.end()  # it lives after all, and has it no more
    assert other.blocked


def test_a_wait_ends_by_itself(way: RightOfWay) -> None:
    # The clock stands still, so the lease does not run out.
    assert losing(way).take()
    other = Turn(way)
    began = time.monotonic()
    other.wait()
    assert other.blocked
    assert time.monotonic() - began >= LEASE / 1e6


def test_a_clock_that_went_back(way: RightOfWay, now: list[int]) -> None:
    assert losing(way).take()
    now[0] -= 1
    assert not Turn(way).blocked


def test_what_begins_in_its_midst_goes_on(way: RightOfWay) -> None:
    assert losing(way).take(threading.get_ident())
    assert not Turn(way).blocked
    seen = []
    thread = threading.Thread(target=lambda: seen.append(Turn(way).blocked))
    thread.start()
    thread.join()
    assert seen == [True]


def test_of_another_process(way: RightOfWay, tmp_path: Path, python) -> None:
    """It dies with it; its clock is this machine's, which stands still here."""
    told = python(
        """
        from pathlib import Path
        from txnkv.storage import Runtime, clock
        from txnkv.storage.right_of_way import *
        now = int(sys.argv[2])
        clock.monotonic_micros = lambda: now
        turn = Turn(RightOfWay(Runtime.open(Path(sys.argv[1]))))
        turn.lost(), turn.lost()
        say(turn.take())
        """,
        tmp_path / "runtime",
        clock.monotonic_micros(),
    ).finish()
    assert told == ["True"]
    assert Turn(way).blocked
