"""Running contestants in turn, and a table of medians and ratios.

Contestants of one race run A B C A B C ..., so that a machine whose speed drifts slows all of
them. The first round is a warm-up and not counted. Figures are medians; what is judged is the
ratio.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


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
        rate: rows a second, the median over the rounds.
        ratio: our rate over this contestant's.
        goal: what was to be reached, in words; empty when nothing was.
    """

    race: str
    name: str
    rate: float
    spread: tuple[float, float]
    ratio: float | None = None
    goal: str = ""
    reached: bool | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def race(
    title: str,
    ours: Contestant,
    peers: list[Contestant],
    *,
    rounds: int,
    at_least: float | None = None,
    ratios: dict[str, float] | None = None,
) -> list[Line]:
    """Run all in turn and compare.

    Args:
        title: name of the race.
        ours: txnkv.
        peers: the others.
        rounds: counted rounds.
        at_least: rows a second that ours should reach.
        ratios: for a peer's name, by how much ours should be faster.
    """
    contestants = [ours, *peers]
    rates: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for number in range(rounds + 1):
        for contestant in contestants:
            contestant.prepare()
            gc.collect()
            start = time.perf_counter()
            rows = contestant.run()
            seconds = time.perf_counter() - start
            if number:
                rates[contestant.name].append(rows / seconds)
    medians = {name: statistics.median(found) for name, found in rates.items()}
    lines = []
    for contestant in contestants:
        name = contestant.name
        line = Line(title, name, medians[name], (min(rates[name]), max(rates[name])))
        if name == ours.name:
            if at_least is not None:
                line.goal = f">= {at_least / 1e6:g} M/s"
                line.reached = medians[name] >= at_least
        else:
            line.ratio = medians[ours.name] / medians[name]
            wanted = (ratios or {}).get(name)
            if wanted is not None:
                line.goal = f">= {wanted:g}x"
                line.reached = line.ratio >= wanted
        lines.append(line)
    return lines


def show(lines: list[Line], console: Console) -> None:
    table = Table(title="txnkv beside what else one would take (medians; ratio = txnkv / peer)")
    for heading in ("race", "who", "rows/s", "min .. max", "ratio", "goal", ""):
        table.add_column(heading, justify="left" if heading in ("race", "who") else "right")
    before = ""
    for line in lines:
        table.add_row(
            line.race if line.race != before else "",
            line.name,
            f"{line.rate / 1e6:,.2f} M" if line.rate else "",
            f"{line.spread[0] / 1e6:,.2f} .. {line.spread[1] / 1e6:,.2f}" if line.rate else "",
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
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps([asdict(line) for line in lines], indent=1))
