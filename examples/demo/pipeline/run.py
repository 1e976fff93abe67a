"""All of the pipeline: started, killed at random, watched, and counted in the end."""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.live import Live
from rich.text import Text

import txnkv
from examples.demo.pipeline import layout
from examples.demo.pipeline.checking import claims
from examples.demo.pipeline.program import Program
from examples.demo.pipeline.reading import read
from examples.demo.pipeline.watch import EVERY, Window
from examples.demo.pipeline.writing import Writer
from examples.demo.report import Claim, Event
from examples.demo.sources import Input, find_input

SECONDS: Final = 60.0
RATE: Final = 2_000.0
KILLS: Final = 4
_PATIENCE: Final = 300.0
"""Seconds for what should take a few."""


@dataclass
class Outcome:
    """The outcome of a run of the pipeline.

    Attributes:
        lines: that were written to the files.
        seconds: from when the first words were counted until all was counted and mailed.
        kills: by program.
        claims: what must hold in the end.
    """

    source: str
    store: str
    kept: bool
    lines: int = 0
    seconds: float = 0.0
    kills: dict[str, int] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Every claim does."""
        return bool(self.claims) and all(claim.holds for claim in self.claims)

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "input": self.source,
            "store": self.store if self.kept else None,
            "lines": self.lines,
            "seconds": round(self.seconds, 3),
            "kills": self.kills,
            "events": [{"at": round(e.at, 3), "what": e.what} for e in self.events],
            "claims": [claim.__dict__ for claim in self.claims],
            "ok": self.holds,
        }

    def print(self, console: Console) -> None:
        """For people."""
        kills = ", ".join(f"{name} {count}x" for name, count in self.kills.items() if count)
        console.print(
            Text(
                f"{self.lines:,} lines were written, counted and mailed in {self.seconds:.0f} s; "
                f"killed with SIGKILL: {kills or 'nobody'}"
            )
        )
        for claim in self.claims:
            mark = ("✓ ", "bold green") if claim.holds else ("✗ ", "bold red")
            console.print(Text.assemble(mark, claim.what, f": {claim.numbers}"), crop=False)
        where = f"the store is {self.store}" if self.kept else "the store is gone; --keep leaves it"
        console.print(Text(where))


class Run:
    """One run.

    Args:
        root: a directory of its own.
        store: the store's directory.
        source: what is written to the files.
        seconds: for how long it runs, once the first lines are counted.
        kills: how many programs are killed meanwhile.
        console: where the window is, or plain lines; None for neither.
        address: of a server of the store, for the programs; None: they open the directory.
    """

    def __init__(
        self,
        root: Path,
        store: Path,
        source: Input,
        seconds: float,
        kills: int,
        console: Console | None,
        address: str | None = None,
    ) -> None:
        text = root / "text"
        text.mkdir()
        self._text = text
        self._store = str(store)
        self._console = console
        self._window = Window()
        self._writer = Writer(source, text, RATE)
        self._seconds = seconds
        self._programs = {
            name: Program(name, [address or self._store, *arguments], root / f"{name}.log")
            for name, arguments in (
                ("feed", [str(text)]),
                ("count", [str(root / "checkpoint")]),
                ("mail", []),
            )
        }
        self._random = random.Random()
        # Not before Spark is up, nor so late that nothing is left to do.
        self._kills = sorted(self._random.uniform(0.15, 0.95) * seconds for _ in range(kills))
        self._events: list[Event] = []
        self._begin = 0.0
        self._live: Live | None = None
        self._shown = 0.0

    def run(self, outcome: Outcome) -> None:
        """Do it.

        Raises:
            RuntimeError: a program ended by itself, or the pipeline does not come to its end.
        """
        with txnkv.connect(self._store) as client:
            layout.make(client)
            try:
                self._writer.start()
                for program in self._programs.values():
                    program.start()
                with self._watched(client):
                    self._until(client, lambda: self._window.last.words > 0, "the first words")
                    self._begin = time.monotonic()
                    self._until(client, self._is_over, "the end of its time")
                    self._writer.stop()
                    self._until(client, lambda: self._is_done(client), "the end of the text")
                    outcome.seconds = time.monotonic() - self._begin
            finally:
                self._writer.stop()
                for program in self._programs.values():
                    program.stop()
            outcome.lines = self._writer.lines
            outcome.kills = {name: program.kills for name, program in self._programs.items()}
            outcome.events = self._events
            outcome.claims = claims(client, self._text)

    @contextmanager
    def _watched(self, client: txnkv.Client) -> Iterator[None]:
        self._window.add(read(client))
        if self._console is None or not self._console.is_terminal:
            yield
            return
        with Live(self._window.render(self._states()), console=self._console) as self._live:
            yield

    def _states(self) -> list[tuple[str, str]]:
        return [(program.name, program.state) for program in self._programs.values()]

    def _until(self, client: txnkv.Client, done: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + self._seconds + _PATIENCE
        while not done():
            if time.monotonic() > until:
                raise RuntimeError(f"the pipeline did not come to {what} in time")
            for program in self._programs.values():
                if told := program.died():
                    raise RuntimeError(told)
            self._kill_one()
            time.sleep(EVERY)
            self._window.add(read(client))
            self._show()
            for program in self._programs.values():
                program.start()  # those that were killed

    def _show(self) -> None:
        if self._live is not None:
            self._live.update(self._window.render(self._states()))
        elif self._console is not None and time.monotonic() - self._shown > 1.0:
            self._shown = time.monotonic()
            self._console.print(self._window.plain(), highlight=False, crop=False, soft_wrap=True)

    def _kill_one(self) -> None:
        passed = time.monotonic() - self._begin
        if self._begin and self._kills and passed >= self._kills[0]:
            self._kills.pop(0)
            program = self._random.choice(list(self._programs.values()))
            whole = self._random.random() < 0.5
            program.kill(whole=whole)
            what = "with all that it has started" if whole else "by itself"
            self._events.append(Event(passed, f"{program.name} was killed, {what}"))

    def _is_over(self) -> bool:
        return time.monotonic() - self._begin > self._seconds

    def _is_done(self, client: txnkv.Client) -> bool:
        places = client.table(layout.FILES).scan(columns=["name", "position"])
        found = {row["name"]: row["position"] for row in places}
        written = {path.name: path.stat().st_size for path in self._text.iterdir()}
        now = self._window.last
        return found == written and not now.lag(layout.LINES) and not now.lag(layout.ALERTS)


def run(
    input: str | None,
    store: str | None,
    keep: bool,
    seconds: float,
    kills: int,
    console: Console | None,
) -> Outcome:
    """Run the pipeline for a while, and count.

    Args:
        input: a directory of text files; None for the sources of Python's standard library.
        store: where the store is made, and left; None for a temporary one.
        keep: leave also a temporary one.
        seconds: for how long it runs, once the first lines are counted.
        kills: how many programs are killed meanwhile, at random.
        console: for the window; None for none.

    Raises:
        ValueError: the input is no directory of text, or there is a store already.
        NotSupportedError: there is no Java that runs Spark.
        RuntimeError: a program of the pipeline ended by itself.
    """
    from txnkv.spark import require_java

    require_java()
    source = find_input(input)
    if source.kind != "text":
        raise ValueError(f"{input}: the streaming demo reads a directory of text files")
    if store is not None and Path(store).exists():
        raise ValueError(f"{store} is there already: name a place where nothing is")
    root = Path(tempfile.mkdtemp(prefix="txnkv-pipeline-"))
    place = Path(store) if store is not None else root / "store"
    outcome = Outcome(str(source), str(place), keep or store is not None)
    try:
        Run(root, place, source, seconds, kills, console).run(outcome)
    finally:
        if not (keep and store is None):
            shutil.rmtree(root, ignore_errors=True)
    return outcome


def main() -> int:
    """With defaults. Returns the exit status."""
    console = Console()
    outcome = run(None, None, False, SECONDS, KILLS, console)
    outcome.print(console)
    return 0 if outcome.holds else 1


if __name__ == "__main__":
    sys.exit(main())
