"""Running contestants in turn, and a table of medians and ratios.

Contestants of one race run A B C A B C ..., so that a machine whose speed drifts slows all of
them. The first round is a warm-up and not counted. Figures are medians; what is judged is the
ratio: how many times as fast as the peer txnkv is, so more is better, also where the figure
shown is a time.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

ROWS: Final = "M rows/s"
EACH: Final = "/s"
MICROSECONDS: Final = "us"
MILLISECONDS: Final = "ms"
_TIMES: Final = (MICROSECONDS, MILLISECONDS)


_watching: list[Callable[[str], object]] = []


@contextmanager
def watched(tell: Callable[[str], object]) -> Iterator[None]:
    """Have told who of a race runs, in which round."""
    _watching.append(tell)
    try:
        yield
    finally:
        _watching.remove(tell)


@dataclass
class Contestant:
    """Somebody in a race.

    Attributes:
        run: does the work once and returns the rows it did; preparing is not timed.
        prepare: called before each run.
    """

    name: str
    run: Callable[[], int]
    prepare: Callable[[], None] = lambda: None


@dataclass
class Line:
    """One line of the result table.

    Attributes:
        rate: rows, operations or transactions a second, the median over the rounds.
        ratio: our rate over this contestant's.
        goal: what was to be reached, in words; empty when nothing was.
        unit: how the rate is shown: `ROWS`, `EACH`, or `MICROSECONDS` or `MILLISECONDS` for the
            time of one.
    """

    race: str
    name: str
    rate: float
    spread: tuple[float, float]
    ratio: float | None = None
    goal: str = ""
    reached: bool | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    unit: str = ROWS

    def figure(self, rate: float) -> str:
        """A rate as this line shows it."""
        if self.unit == MICROSECONDS:
            return f"{1e6 / rate:,.1f} us"
        if self.unit == MILLISECONDS:
            return f"{1e3 / rate:,.0f} ms"
        return f"{rate:,.0f} /s" if self.unit == EACH else f"{rate / 1e6:,.2f} M/s"


def race(
    title: str,
    ours: Contestant,
    peers: list[Contestant],
    *,
    rounds: int,
    at_least: float | None = None,
    ratios: dict[str, float] | None = None,
    unit: str = ROWS,
) -> list[Line]:
    """Run all in turn and compare.

    Args:
        title: name of the race.
        ours: txnkv.
        peers: the others.
        rounds: counted rounds.
        at_least: rows a second that ours should reach.
        ratios: for a peer's name, by how much ours should be faster.
        unit: how rates are shown.
    """
    contestants = [ours, *peers]
    rates: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for number in range(rounds + 1):
        for contestant in contestants:
            for watch in _watching:
                which = f"round {number} of {rounds}" if number else "warming up"
                watch(f"{title}, {which}: {contestant.name}")
            contestant.prepare()
            gc.collect()
            start = time.perf_counter()
            rows = contestant.run()
            seconds = time.perf_counter() - start
            if number:
                rates[contestant.name].append(rows / seconds)
    lines = compare(title, rates, ratios=ratios, unit=unit)
    if at_least is not None:
        lines[0].goal = f">= {at_least / 1e6:g} M/s"
        lines[0].reached = lines[0].rate >= at_least
    return lines


def compare(
    title: str,
    rates: dict[str, list[float]],
    *,
    ratios: dict[str, float] | None = None,
    unit: str = ROWS,
) -> list[Line]:
    """The lines of a race from its rates by name, ours first, one for each round."""
    medians = {name: statistics.median(found) for name, found in rates.items()}
    ours = next(iter(medians.values()))
    lines = [
        Line(title, name, medians[name], (min(found), max(found)), unit=unit)
        for name, found in rates.items()
    ]
    for line in lines[1:]:
        line.ratio = ours / line.rate
        wanted = (ratios or {}).get(line.name)
        if wanted is not None:
            is_time = unit in _TIMES and wanted <= 1
            line.goal = f"time <= {1 / wanted:g}x" if is_time else f">= {wanted:g}x"
            line.reached = line.ratio >= wanted
    return lines


def _ascending(line: Line) -> tuple[float, float]:
    low, high = line.spread
    return (high, low) if line.unit in _TIMES else (low, high)


def show(lines: list[Line], console: Console) -> None:
    table = Table(title="txnkv beside what else one would take (medians; ratio = txnkv / peer)")
    for heading in ("race", "who", "median", "min .. max", "ratio", "goal", ""):
        table.add_column(heading, justify="left" if heading in ("race", "who") else "right")
    before = ""
    for line in lines:
        table.add_row(
            line.race if line.race != before else "",
            line.name,
            line.figure(line.rate) if line.rate else "",
            " .. ".join(map(line.figure, _ascending(line))) if line.rate else "",
            "" if line.ratio is None else f"{line.ratio:.2f}x",
            line.goal,
            {None: "", True: "[green]reached[/]", False: "[red]missed[/]"}[line.reached],
            end_section=False,
        )
        for name, value in line.extra.items():
            table.add_row("", f"  {name}", str(value), "", "", "", "")
        before = line.race
    console.print(table)


def report(lines: list[Line], json_file: Path | None) -> None:
    """Print the table, and write the lines as JSON."""
    show(lines, Console(width=None if Console().is_terminal else 130))
    write_json(lines, json_file)


def write_json(lines: list[Line], json_file: Path | None) -> None:
    """Write the lines as JSON, if there is a place for it."""
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps([asdict(line) for line in lines], indent=1))
