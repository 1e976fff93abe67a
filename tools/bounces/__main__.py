"""All combinations, one after the other; see the package."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tools.bounces.run import COMBINATIONS, BouncesError, Combination, run


def main() -> int:
    """Run them; 1 when something was wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bounces",
        description="Kafka's clients in transactions, while everything is stopped and killed.",
    )
    parser.add_argument("folder", type=Path, help="made; what was wrong stays in it")
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--bounces", type=int, default=24, help="of a run, about")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--only", type=int, action="append", metavar="N", help="this combination, from 1 to 16"
    )
    options = parser.parse_args()
    numbers = options.only or range(1, len(COMBINATIONS) + 1)
    failed = sum(not _done(options, number, COMBINATIONS[number - 1]) for number in numbers)
    print(f"{failed} of {len(numbers)} went wrong" if failed else "nothing was lost or doubled")
    return 1 if failed else 0


def _done(options: argparse.Namespace, number: int, how: Combination) -> bool:
    folder = options.folder / str(number)
    began = time.monotonic()
    with _bar() as bar:
        task = bar.add_task(str(how), total=options.messages)
        try:
            bounced = run(
                folder, how, options.messages, options.bounces, options.seed + number,
                lambda done: bar.update(task, completed=done),
            )  # fmt: skip
        except (BouncesError, AssertionError) as error:
            print(f"{number}. {how}: WRONG\n{error}\nsee {folder / 'log'}", flush=True)
            return False
    shutil.rmtree(folder)
    took = time.monotonic() - began
    times = ", ".join(f"{kind} {n}" for kind, n in sorted(bounced.items()))
    print(f"{number}. {how}: {options.messages:,} in {took:.0f} s; bounced: {times}", flush=True)
    return True


def _bar() -> Progress:
    """A bar, to a terminal alone."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


if __name__ == "__main__":
    sys.exit(main())
