"""Timing single operations: the median and the tail, not only how many a second."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .harness import MICROSECONDS, Line, compare


@dataclass
class Operation:
    """Somebody in a race of single operations.

    Attributes:
        do: does one, for one of the arguments.
        arguments: those of a round, by its number.
    """

    name: str
    do: Callable[[Any], object]
    arguments: Callable[[int], Iterable[Any]]


def times(do: Callable[[Any], object], arguments: Iterable[Any]) -> list[float]:
    """The seconds that each call took."""
    clock = time.perf_counter
    found = []
    for argument in arguments:
        start = clock()
        do(argument)
        found.append(clock() - start)
    return found


def percentile(seconds: list[float], share: float) -> float:
    """The time that this share of them stayed at or below."""
    ordered = sorted(seconds)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def race_each(
    title: str,
    operations: list[Operation],
    *,
    rounds: int,
    ratios: dict[str, float] | None = None,
    each: int = 1,
) -> list[Line]:
    """Time every operation of all in turn, ours first, and compare the medians.

    Args:
        title: name of the race.
        operations: the contestants.
        rounds: counted rounds.
        ratios: for a peer's name, by how much ours should be faster.
        each: rows that one operation does: the figure shown is the time of one row.
    """
    rates: dict[str, list[float]] = {operation.name: [] for operation in operations}
    everything: dict[str, list[float]] = {operation.name: [] for operation in operations}
    for number in range(rounds + 1):
        for operation in operations:
            arguments = list(operation.arguments(number))
            gc.collect()
            found = times(operation.do, arguments)
            if number:
                rates[operation.name].append(each / statistics.median(found))
                everything[operation.name] += found
    lines = compare(title, rates, ratios=ratios, unit=MICROSECONDS)
    for line in lines:
        line.extra["p99"] = f"{percentile(everything[line.name], 0.99) / each * 1e6:,.1f} us"
    return lines
