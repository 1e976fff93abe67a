"""The cost of a commit and of a get as the table grows: near flat, if all is well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import rows
from .harness import Line
from .latency import Operation, race_each
from .row_stores import RowStore, SqliteRows, TxnkvRows, opened, require_equal, warm
from .svg import Series, chart

FLAT = 1.5
"""The ratio to the time on the smallest table that is still called flat."""

_PLOTS = {"transaction": "growth-commit.svg", "get": "growth-get.svg"}
_STEP = 2_000_000
_COMPARED = 100_000


@dataclass(frozen=True)
class _Point:
    """The contestants at one size."""

    what: str
    size: int
    lines: list[Line]


def growth(
    sizes: list[int], count: int, rounds: int, base: Path | None, plots: Path | None
) -> list[Line]:
    """One-row transactions and gets of random keys at each size, on one store that grows.

    Args:
        sizes: rows of the table, ascending.
        count: transactions a round, and four times as many gets.
        rounds: counted rounds.
        base: where the stores are made.
        plots: a directory for `growth-commit.svg` and `growth-get.svg`; None for none.
    """
    found: list[_Point] = []
    with opened([TxnkvRows, SqliteRows], base) as stores:
        there = 0
        for size in sizes:
            for store in stores:
                for first in range(there, size, _STEP):
                    store.load(np.arange(first, min(first + _STEP, size)))
            there = size
            warm(stores, np.arange(there))
            for what, operations in (
                ("transaction", [_puts(store, size, count) for store in stores]),
                ("get", [_gets(store, size, count * 4) for store in stores]),
            ):
                title = f"one-row {what}, {size:,} rows"
                found.append(_Point(what, size, race_each(title, operations, rounds=rounds)))
        if there <= _COMPARED:
            require_equal(stores)
    for what in _PLOTS:
        points = [point for point in found if point.what == what]
        _judge(points[0].lines[0], points[-1].lines[0])
        if plots is not None:
            plots.mkdir(parents=True, exist_ok=True)
            _plot(points, plots / _PLOTS[what])
    return [line for point in found for line in point.lines]


def _puts(store: RowStore, size: int, count: int) -> Operation:
    def arguments(number: int) -> list[rows.Row]:
        return [rows.row(key, number + 1) for key in _keys(size, count)(number)]

    return Operation(store.name, store.put, arguments)


def _gets(store: RowStore, size: int, count: int) -> Operation:
    return Operation(store.name, store.get, _keys(size, count))


def _keys(size: int, count: int) -> Callable[[int], list[int]]:
    def keys(number: int) -> list[int]:
        chance = np.random.default_rng(number)
        return chance.integers(0, size, count).tolist()  # type: ignore[no-any-return]

    return keys


def _judge(smallest: Line, largest: Line) -> None:
    """Say at the largest size how much dearer it is than at the smallest."""
    dearer = smallest.rate / largest.rate
    largest.goal, largest.reached = f"time <= {FLAT:g}x of the smallest", dearer <= FLAT
    largest.extra["time over that of the smallest"] = f"{dearer:.2f}"


def _plot(points: list[_Point], file: Path) -> None:
    named: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        for line in point.lines:
            named.setdefault(line.name, []).append((point.size, 1e6 / line.rate))
    series = [Series(name, found) for name, found in named.items()]
    title = f"one-row {points[0].what}, random keys"
    file.write_text(chart(title, "rows of the table", "us, median", series))
