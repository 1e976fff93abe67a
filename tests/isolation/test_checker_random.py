"""The checker against random histories: serial ones are clean, what is done to them is found."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tools.isolation.checker import ORDERS, check
from tools.isolation.cycles import parts, shortest
from tools.isolation.histories import Append, Op, Outcome, Read, ReadList, Txn, Write, dump, parse

KEYS = ("a", "b", "c")
PLANS = st.lists(
    st.lists(st.tuples(st.sampled_from(KEYS), st.booleans()), min_size=1, max_size=5),
    min_size=1,
    max_size=12,
)
"""Transactions of (key, whether it is written or read)."""


def serial(plans: list[list[tuple[str, bool]]], lists: bool, last: bool = True) -> list[Txn]:
    """A history of transactions that ran one after the other; the last one reads all."""
    state: dict[str, list[int]] = {key: [] for key in KEYS}
    history = []
    value = 0
    for at, plan in enumerate([*plans, [(key, False) for key in KEYS]] if last else plans):
        ops: list[Op] = []
        for key, writes in plan:
            if writes:
                value += 1
                state[key].append(value)
                ops.append(Append(key, value) if lists else Write(key, value))
            elif lists:
                ops.append(ReadList(key, tuple(state[key])))
            else:
                ops.append(Read(key, state[key][-1] if state[key] else None))
        history.append(
            Txn(f"T{at}", tuple(ops), session=f"p{at % 3}", invoked=10 * at, completed=10 * at + 5)
        )
    return history


@given(PLANS, st.booleans(), st.randoms())
def test_serial_histories_are_clean(
    plans: list[list[tuple[str, bool]]], lists: bool, random: random.Random
) -> None:
    history = serial(plans, lists)
    random.shuffle(history)
    for order in ORDERS:
        assert check(history, order).names == set()
    assert check(parse(dump(history))).names == set()


Corrupt = Callable[[list[Txn], random.Random], list[Txn] | None]


def replaced(history: list[Txn], at: int, place: int, op: Op) -> list[Txn]:
    txn = history[at]
    ops = (*txn.ops[:place], op, *txn.ops[place + 1 :])
    return [*history[:at], replace(txn, ops=ops), *history[at + 1 :]]


def some(
    history: list[Txn], chance: random.Random, wanted: Callable[[Op], bool]
) -> tuple[int, int] | None:
    """Return the place of one of the operations that are wanted; None when there is none."""
    found = [
        (at, place)
        for at, txn in enumerate(history)
        for place, op in enumerate(txn.ops)
        if wanted(op)
    ]
    return chance.choice(found) if found else None


def forget_the_end_of_a_read(history: list[Txn], chance: random.Random) -> list[Txn] | None:
    where = some(history, chance, lambda op: isinstance(op, ReadList) and bool(op.values))
    if where is None:
        return None
    op = history[where[0]].ops[where[1]]
    assert isinstance(op, ReadList)
    return replaced(history, *where, ReadList(op.key, op.values[:-1]))


def swap_elements(history: list[Txn], chance: random.Random) -> list[Txn] | None:
    where = some(history, chance, lambda op: isinstance(op, ReadList) and len(op.values) > 1)
    if where is None:
        return None
    op = history[where[0]].ops[where[1]]
    assert isinstance(op, ReadList)
    at = chance.randrange(len(op.values) - 1)
    first, second = op.values[at : at + 2]
    values = (*op.values[:at], second, first, *op.values[at + 2 :])
    return replaced(history, *where, ReadList(op.key, values))


def read_something_else(history: list[Txn], chance: random.Random) -> list[Txn] | None:
    """A register as it was before, or will be, or what nobody wrote."""
    where = some(history, chance, lambda op: isinstance(op, Read))
    if where is None:
        return None
    op = history[where[0]].ops[where[1]]
    assert isinstance(op, Read)
    values = [each.value for txn in history for each in txn.ops if isinstance(each, Write)]
    found = [value for value in [*values, None, 999] if value != op.value]
    return replaced(history, *where, Read(op.key, chance.choice(found)))


def abort_what_was_read(history: list[Txn], chance: random.Random) -> list[Txn] | None:
    """The last transaction reads all keys, so what wrote to a list was read."""
    found = [
        at for at, txn in enumerate(history[:-1]) if any(isinstance(op, Append) for op in txn.ops)
    ]
    if not found:
        return None
    at = chance.choice(found)
    return [*history[:at], replace(history[at], outcome=Outcome.ABORTED), *history[at + 1 :]]


def lose_a_write(history: list[Txn], chance: random.Random) -> list[Txn] | None:
    """A committed append that nobody ever read, though all lists are read later."""
    found = [at for at, txn in enumerate(history[:-1]) if txn.ops]
    if not found:
        return None
    at = chance.choice(found)
    ops = (*history[at].ops, Append(chance.choice(KEYS), 999))
    return [*history[:at], replace(history[at], ops=ops), *history[at + 1 :]]


def swap_the_times(history: list[Txn], chance: random.Random) -> list[Txn] | None:
    """A transaction and a later one that read what it wrote change places in time."""
    pairs = [
        (one, other)
        for one, first in enumerate(history)
        for other in range(one + 1, len(history))
        for op in first.ops
        for read in history[other].ops
        if isinstance(op, Append) and isinstance(read, ReadList) and op.value in read.values
    ]
    if not pairs:
        return None
    one, other = chance.choice(pairs)
    swapped = list(history)
    for at, by in ((one, other), (other, one)):
        swapped[at] = replace(
            history[at], invoked=history[by].invoked, completed=history[by].completed
        )
    return swapped


CORRUPTIONS: list[tuple[bool, Corrupt]] = [
    (True, forget_the_end_of_a_read),
    (True, swap_elements),
    (True, abort_what_was_read),
    (True, lose_a_write),
    (True, swap_the_times),
    (False, read_something_else),
]


@pytest.mark.parametrize(
    ("lists", "corrupt"), CORRUPTIONS, ids=[c.__name__ for _, c in CORRUPTIONS]
)
@given(plans=PLANS, chance=st.randoms(use_true_random=False))
@settings(deadline=None)
def test_corrupted_histories_are_found(
    lists: bool, corrupt: Corrupt, plans: list[list[tuple[str, bool]]], chance: random.Random
) -> None:
    history = corrupt(serial(plans, lists), chance)
    assume(history is not None)
    assert history is not None
    report = check(history)
    assert not report.satisfies("snapshot"), dump(history)
    assert not report.satisfies("serializable")


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=20))
def test_parts_and_paths_of_a_graph(edges: list[tuple[int, int]]) -> None:
    """Against the closure of the edges."""
    after = {a: sorted({b for x, b in edges if x == a}) for a in range(8)}
    reach = {a: {a} | set(after[a]) for a in range(8)}
    for _ in range(8):
        reach = {a: set().union(*(reach[b] for b in reach[a])) for a in reach}
    expected = {frozenset(b for b in range(8) if b in reach[a] and a in reach[b]) for a in range(8)}
    found = [frozenset(part) for part in parts(range(8), lambda node: iter(after[node]))]
    assert len(found) == len(set(found))
    assert set(found) == {part for part in expected if len(part) > 1}
    for a in range(8):
        for b in range(8):
            path = shortest(a, b, lambda node: iter(after[node]))
            assert bool(path) == (b in reach[a])
            assert all(y in after[x] for x, y in pairwise(path))
