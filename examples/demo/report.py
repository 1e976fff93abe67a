"""The report of the demo at its end."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table as Grid
from rich.text import Text

from examples.demo.look import Look


@dataclass(frozen=True)
class Event:
    """Something that the driver did.

    Attributes:
        at: seconds since the start.
    """

    at: float
    what: str


@dataclass(frozen=True)
class Claim:
    """A claim that must hold, whether it does, and the numbers behind it."""

    what: str
    holds: bool
    numbers: str = ""


@dataclass
class Report:
    """The report of a run of the demo.

    Attributes:
        looks: what the reader saw, in seconds since the start.
        kept: the store stays when the demo has ended.
        program: how the command line is called from here.
    """

    input: str
    store: str
    kept: bool
    program: str = "txnkv"
    rows: dict[str, int] = field(default_factory=dict)
    write_seconds: dict[str, float] = field(default_factory=dict)
    commit_seconds: float = 0.0
    total_seconds: float = 0.0
    events: list[Event] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Every claim does."""
        return all(claim.holds for claim in self.claims)

    @property
    def commands(self) -> list[str]:
        """Commands that look at the store."""
        store = shlex.quote(self.store)
        return [
            f"{self.program} tables {store}",
            f"{self.program} scan {store} files --ordered --limit 10",
            f'{self.program} scan {store} words --where "count > 500"',
            f"{self.program} txn list {store}",
        ]

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "input": self.input,
            "store": self.store if self.kept else None,
            "rows": self.rows,
            "write_seconds": {k: round(v, 3) for k, v in self.write_seconds.items()},
            "commit_seconds": round(self.commit_seconds, 3),
            "total_seconds": round(self.total_seconds, 3),
            "events": [{"at": round(e.at, 3), "what": e.what} for e in self.events],
            "reader": [{**look.__dict__, "counts": list(look.counts)} for look in self.looks],
            "claims": [claim.__dict__ for claim in self.claims],
            "ok": self.holds,
        }

    def render(self) -> Group:
        """For people."""
        return Group(
            Text.assemble(("txnkv demo: ", "bold"), self.input),
            "",
            self._tables(),
            "",
            self._timeline(),
            "",
            *self._claims(),
            "",
            *self._outlook(),
        )

    def _tables(self) -> Grid:
        grid = _grid("table", ">rows", ">seconds", "")
        notes = {"words": "to write, with a worker killed on the way", "files": "to write"}
        for name, seconds in self.write_seconds.items():
            grid.add_row(name, f"{self.rows[name]:,}", f"{seconds:.2f}", notes.get(name, ""))
        both = f"{sum(self.rows.values()):,}"
        grid.add_row("both", both, f"{self.commit_seconds:.2f}", "to commit")
        return grid

    def _timeline(self) -> Grid:
        grid = _grid(">seconds", "what happened", ">files seen", ">words seen")
        appeared = [
            Event(look.first, "the reader sees them, all at once") for look in self.looks[1:]
        ]
        for event in sorted([*self.events, *appeared], key=lambda event: event.at):
            style = "bold green" if event in appeared else ""
            seen = _shown(self._seen_at(event.at))
            grid.add_row(*(Text(cell, style) for cell in (f"{event.at:.2f}", event.what, *seen)))
        return grid

    def _seen_at(self, at: float) -> Look | None:
        return next((look for look in reversed(self.looks) if look.first <= at), None)

    def _claims(self) -> list[Text]:
        lines = []
        for claim in self.claims:
            mark = ("✓ ", "bold green") if claim.holds else ("✗ ", "bold red")
            numbers = f": {claim.numbers}" if claim.numbers else ""
            lines.append(Text.assemble(mark, claim.what, numbers))
        return lines

    def _outlook(self) -> list[Text]:
        if not self.kept:
            return [Text("The store is gone; --keep or --store PATH leaves it to look at.")]
        lines = [Text("Look at the store:", "bold")]
        return lines + [Text(f"  {command}") for command in self.commands]


def _grid(*names: str) -> Grid:
    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for name in names:
        grid.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left")
    return grid


def _shown(look: Look | None) -> tuple[str, str]:
    if look is None:
        return "", ""
    files, words = (f"{count:,}" if count else "none" for count in look.counts)
    return files, words


def print_report(report: Report, console: Console) -> None:
    """Print it; wide tables of a pipe are not cut."""
    console.print(report.render(), crop=False)
