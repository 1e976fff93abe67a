"""The right of way: who has it, who waits for it, and for how long at most."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from txnkv.storage import Runtime, clock, right_of_way
from txnkv.storage.right_of_way import CONFLICTS, LEASE, Contender, RightOfWay


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


def losing(way: RightOfWay) -> Contender:
    """One that is about to take it."""
    turn = Contender(way)
    for _ in range(CONFLICTS):
        turn.lost()
    return turn


def test_taken_after_conflicts(way: RightOfWay) -> None:
    turn, other = Contender(way), Contender(way)
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
    losing(way).end()  # what it has not it cannot give up
    assert second.blocked
    first.end()
    assert second.take()
    assert Contender(way).blocked


def test_another_attempt_has_it_longer(way: RightOfWay, now: list[int]) -> None:
    turn, other = losing(way), Contender(way)
    assert turn.take()
    now[0] += LEASE - 1
    assert turn.take()
    now[0] += LEASE - 1
    assert other.blocked


def test_who_died_with_it_keeps_nobody(way: RightOfWay, now: list[int]) -> None:
    dead, other, losers = losing(way), Contender(way), losing(way)
    assert dead.take()
    assert other.blocked
    now[0] += LEASE
    assert not other.blocked
    assert losers.take()
    dead.end()  # it lives after all, and has it no more
    assert other.blocked


def test_who_needs_longer_goes_without_it(way: RightOfWay, now: list[int]) -> None:
    turn, other = losing(way), Contender(way)
    assert turn.take()
    now[0] += LEASE
    turn.lost()  # all others waited, and it did not help
    assert not turn.take()
    assert not other.blocked


def test_an_attempt_that_begins_after_the_end(way: RightOfWay) -> None:
    """As that of a task of asyncio that was cancelled, on its thread."""
    late = losing(way)
    late.end()
    assert not late.take()


def test_the_end_after_the_store_was_closed(tmp_path: Path) -> None:
    runtime = Runtime.open(tmp_path / "another")
    turn = losing(RightOfWay(runtime))
    assert turn.take()
    runtime.close()
    turn.end()


def test_threads_that_have_others_to_do(way: RightOfWay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(right_of_way, "_LOOK", -1.0)  # who waits fails
    assert losing(way).take()
    with ThreadPoolExecutor(1, initializer=right_of_way.has_others_to_do) as pool:
        pool.submit(Contender(way).wait).result()
    with pytest.raises(ValueError, match="sleep"):
        Contender(way).wait()


def test_a_wait_ends_by_itself(way: RightOfWay) -> None:
    # The clock stands still, so the lease does not run out.
    assert losing(way).take()
    other = Contender(way)
    began = time.monotonic()
    other.wait()
    assert other.blocked
    assert time.monotonic() - began >= LEASE / 1e6


def test_a_clock_that_went_back(way: RightOfWay, now: list[int]) -> None:
    assert losing(way).take()
    now[0] -= 1
    assert not Contender(way).blocked


def test_what_begins_in_its_midst_goes_on(way: RightOfWay) -> None:
    assert losing(way).take(threading.get_ident())
    assert not Contender(way).blocked
    seen = []
    thread = threading.Thread(target=lambda: seen.append(Contender(way).blocked))
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
        turn = Contender(RightOfWay(Runtime.open(Path(sys.argv[1]))))
        turn.lost(), turn.lost()
        say(turn.take())
        """,
        tmp_path / "runtime",
        clock.monotonic_micros(),
    ).finish()
    assert told == ["True"]
    assert Contender(way).blocked
