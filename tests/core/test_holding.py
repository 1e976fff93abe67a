"""What transactions hold: pins and ids, against a Counter and a set."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from txnkv.core import Holding, IdSet, PinSet, SharedWords

NOTHING = (1 << 64) - 1
TOLD, CHANGE = 1, 2


@pytest.fixture
def words() -> memoryview:
    return memoryview(bytearray(64)).cast("Q")


def aimed(words: memoryview) -> PinSet:
    pins = PinSet()
    pins.aim(SharedWords(words), TOLD, CHANGE)
    return pins


def shown(known: int, latest: int, *flight: int) -> memoryview:
    first, second = flight or (NOTHING, NOTHING)
    found = memoryview(bytearray(40)).cast("Q")
    found[0], found[1], found[2], found[3] = known, latest, first, second
    return found


@pytest.mark.parametrize("seed", range(5))
def test_the_least_pin_is_told(seed: int, words: memoryview) -> None:
    pins, model = aimed(words), Counter[int]()
    assert words[TOLD] == NOTHING
    rng = random.Random(seed)
    for step in range(3000):
        value = rng.choice((step, rng.randrange(50)))  # most at the end, some between
        if rng.random() < 0.5:
            pins.pin(value)
            model[value] += 1
        else:
            value = rng.choice((min(+model, default=0), value))
            assert pins.unpin(value) == (model[value] > 0)
            model[value] -= model[value] > 0
        assert words[TOLD] == min(+model, default=NOTHING)
        assert len(pins) == len(+model)


def test_pins_that_are_told_elsewhere_or_nowhere(words: memoryview) -> None:
    pins = aimed(words)
    pins.pin(7)
    pins.aim(None, 0, 0)
    pins.unpin(7)
    pins.pin(9)
    assert words[TOLD] == 7
    pins.aim(SharedWords(words), 3, CHANGE)
    assert (words[TOLD], words[3]) == (7, 9)
    with pytest.raises(ValueError, match="there is no pin"):
        pins.pin(NOTHING)
    with pytest.raises(OverflowError):
        pins.pin(-1)
    with pytest.raises(TypeError, match="Words are needed"):
        pins.aim(words, 0, 0)  # type: ignore[arg-type]
    for word in (-1, 8):
        with pytest.raises(IndexError, match="of 8"):
            pins.aim(SharedWords(words), word, CHANGE)


@pytest.mark.parametrize("seed", range(5))
def test_ids_are_given_once_and_live_until_they_end(seed: int) -> None:
    ids, live, next = IdSet(), set[int](), 0
    rng = random.Random(seed)
    for _ in range(3000):
        if rng.random() < 0.5:
            if not ids.left:
                assert ids.take() is None
                ids.give(next, next + 10)
            assert ids.take() == next
            live.add(next)
            next += 1
        else:
            ended = rng.randrange(next + 1)
            ids.ended(ended)
            live.discard(ended)
        assert len(ids) == len(live)
        low = rng.randrange(next + 1)
        there = live | set(range(next, next + ids.left))
        expected = min((id for id in there if low <= id <= low + 9), default=None)
        assert ids.least(low, low + 9) == expected
        assert (low in ids) == (low in live)


def test_a_holding_is_given_back_once(words: memoryview) -> None:
    pins, ids = aimed(words), IdSet()
    ids.give(5, 7)
    words[CHANGE] = 40
    held = Holding(pins, ids)
    assert held.begin(shown(40, 1000), 1000, None)
    assert (held.snapshot, held.txn_id, words[TOLD]) == (1000, 5, 1000)
    with pytest.raises(TypeError, match="once"):
        held.begin(shown(40, 1000), 0, None)
    other = Holding(pins, ids)
    assert other.begin(shown(38, 1000, 39, 40), 0, 77)  # this process's own group is on its way
    held.end()
    held.end()
    assert (held.snapshot, held.txn_id, words[TOLD]) == (None, None, 1000)
    assert 5 not in ids
    del other
    assert (words[TOLD], len(pins), len(ids)) == (NOTHING, 0, 0)


@pytest.mark.parametrize(
    ("known", "floor", "left", "told"),
    [
        (shown(40, 1000), 1001, 1, True),
        (shown(38, 1000), 0, 1, True),
        (shown(NOTHING, 1000), 0, 1, True),
        (shown(40, 1000), 0, 0, True),
        (shown(40, 1000), 0, 1, False),
    ],
    ids=["below the floor", "not the latest", "not known", "no ids", "told nowhere"],
)
def test_what_is_to_be_looked_for_holds_nothing(
    known: memoryview, floor: int, left: int, told: bool, words: memoryview
) -> None:
    pins, ids = aimed(words) if told else PinSet(), IdSet()
    ids.give(5, 5 + left)
    words[CHANGE] = 40
    held = Holding(pins, ids)
    assert not held.begin(known, floor, None)
    assert (held.snapshot, held.txn_id, len(pins), len(ids)) == (None, None, 0, 0)
    held.pin(900)
    held.pin(800)
    assert held.take(None) == bool(left)
    assert (held.snapshot, len(pins)) == (800, 1)
    assert words[TOLD] == (800 if told else 0)
    held.end()
    assert (len(pins), len(ids)) == (0, 0)


def test_wrong_arguments_are_refused(words: memoryview) -> None:
    pins, ids = aimed(words), IdSet()
    for given in ((ids, pins), (pins, None)):
        with pytest.raises(TypeError, match="a PinSet, and an IdSet"):
            Holding(*given)  # type: ignore[arg-type]
    alone = Holding(pins)
    with pytest.raises(TypeError, match="of a snapshot alone"):
        alone.take(None)
    with pytest.raises(TypeError, match="begin"):
        alone.begin(shown(1, 1), 0, None)
    held = Holding(pins, ids)
    with pytest.raises(TypeError, match="begin"):
        held.begin(shown(1, 1), 0)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="five words"):
        held.begin(memoryview(bytes(8)), 0, None)
    words[CHANGE] = 1
    with pytest.raises(OverflowError):
        held.begin(shown(1, 1), 0, -1)
    assert (len(pins), held.txn_id) == (0, None)
