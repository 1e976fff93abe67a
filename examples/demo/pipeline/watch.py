"""A window on the pipeline: throughput, lag, stable offsets and transactions, as they go.

python -m examples.demo.pipeline.watch STORE
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import txnkv
from examples.demo.pipeline import layout
from examples.demo.pipeline.reading import Open, Reading, read

EVERY: Final = 0.5
_KEPT: Final = 40
_OVER: Final = 4
"""Readings that a rate is taken over."""
_BARS: Final = "▁▂▃▄▅▆▇█"
_SHOWN: Final = 4
"""Transactions that are listed."""


class Window:
    """The window that is shown, drawn from the last readings."""

    def __init__(self) -> None:
        self._readings: deque[Reading] = deque(maxlen=_KEPT)
        self._begin = time.monotonic()

    @property
    def last(self) -> Reading:
        """The newest reading."""
        return self._readings[-1]

    def add(self, reading: Reading) -> None:
        """Add a reading."""
        self._readings.append(reading)

    def render(self, programs: Sequence[tuple[str, str]] = ()) -> Panel:
        """The window.

        Args:
            programs: names of the programs, and how each is.
        """
        parts: list[Table | Text] = [self._stages(), Text(), self._partitions(), Text()]
        parts.append(_transactions(self.last.open))
        if programs:
            line = Text("programs  ", "bold")
            for name, state in programs:
                style = "green" if state.startswith("runs") else "bold red"
                line.append(f"{name} ", "default").append(f"{state}   ", style)
            parts += [Text(), line]
        title = f"[bold]txnkv pipeline[/bold]  {time.monotonic() - self._begin:.0f} s"
        return Panel(Group(*parts), title=title, title_align="left", box=box.ROUNDED, width=88)

    def plain(self) -> str:
        """One line, for what is no terminal."""
        now = self.last
        return (
            f"{time.monotonic() - self._begin:5.0f} s  "
            f"lines {now.offsets(layout.LINES):,} ({self._rates(_fed)[-1]:,.0f}/s)  "
            f"lag {now.lag(layout.LINES):,}  counted {self._rates(_counted)[-1]:,.0f}/s  "
            f"words {now.words:,}  mails {now.mails:,}  "
            f"open {len(now.open)}"
        )

    def _stages(self) -> Table:
        now = self.last
        grid = _grid("stage", ">now", ">in all", ">waiting", "last 20 s")
        fed, counted, mailed = self._rates(_fed), self._rates(_counted), self._rates(_mailed)
        lines = now.offsets(layout.LINES)
        grid.add_row("lines fed", _rate(fed), f"{lines:,}", "", _sparkline(fed))
        left = now.lag(layout.LINES)
        grid.add_row(
            "counted", _rate(counted), f"{lines - left:,}", f"{left:,}", _sparkline(counted)
        )
        left = now.lag(layout.ALERTS)
        grid.add_row("mailed", _rate(mailed), f"{now.mails:,}", f"{left:,}", _sparkline(mailed))
        grid.add_row("words known", "", f"{now.words:,}", "", "")
        return grid

    def _partitions(self) -> Table:
        grid = _grid("partition", ">end", ">stable", ">lag", "")
        for log in self.last.logs:
            held = log.end - log.stable
            note = Text(f"{held:,} wait for an open transaction", "yellow") if held else Text()
            cells = f"{log.topic}/{log.number}", f"{log.end:,}", f"{log.stable:,}", f"{log.lag:,}"
            grid.add_row(*cells, note)
        return grid

    def _rates(self, amount: Callable[[Reading], int]) -> list[float]:
        """Per second, between each reading and one a little before."""
        found = [0.0]
        readings = list(self._readings)
        for index in range(1, len(readings)):
            old, new = readings[max(0, index - _OVER)], readings[index]
            found.append(max(0.0, (amount(new) - amount(old)) / (new.at - old.at)))
        return found


def _fed(reading: Reading) -> int:
    return reading.offsets(layout.LINES)


def _counted(reading: Reading) -> int:
    return reading.offsets(layout.LINES) - reading.lag(layout.LINES)


def _mailed(reading: Reading) -> int:
    return reading.mails


def _rate(rates: Sequence[float]) -> str:
    return f"{rates[-1]:,.0f}/s"


def _sparkline(values: Sequence[float]) -> Text:
    top = max(values) or 1.0
    bars = (_BARS[math.ceil(value / top * (len(_BARS) - 1))] for value in values)
    return Text("".join(bars), "cyan", no_wrap=True)


def _transactions(open_: Sequence[Open]) -> Table:
    grid = _grid("open transaction", "state", ">age", ">participants")
    for each in open_[:_SHOWN]:
        grid.add_row(f"{each.id}", each.state, f"{each.age:.1f} s", f"{each.participants}")
    if len(open_) > _SHOWN:
        grid.add_row(f"and {len(open_) - _SHOWN} more", "", "", "")
    for _ in range(max(0, _SHOWN - len(open_))):  # the window keeps its height
        grid.add_row("", "", "", "")
    return grid


def _grid(*names: str) -> Table:
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for name in names:
        grid.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left")
    return grid


def main() -> None:
    parser = argparse.ArgumentParser(description="A window on the pipeline.")
    parser.add_argument("store")
    given = parser.parse_args()
    console = Console()
    window = Window()
    with txnkv.connect(given.store, create=False, read_only=True) as client:
        if not console.is_terminal:
            while True:
                window.add(read(client))
                print(window.plain(), flush=True)
                time.sleep(1.0)
        window.add(read(client))
        with Live(window.render(), console=console, refresh_per_second=4) as live:
            while True:
                time.sleep(EVERY)
                window.add(read(client))
                live.update(window.render())


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(0)
