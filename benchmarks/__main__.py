"""`python -m benchmarks [names] [--tiny] [--json FILE]`: one table of ratios."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from . import memory, tables
from .harness import Line, report

ROWS = 10_000_000
MEMORY_ROWS = 50_000_000
TINY_ROWS = 20_000

Race = Callable[[], list[Line]]


def races(tiny: bool, rounds: int, base: Path | None) -> dict[str, Race]:
    """All races by name."""
    rows = TINY_ROWS if tiny else ROWS
    return {
        "insert-sorted": lambda: tables.insert_sorted(rows, rounds, base),
        "insert-random": lambda: tables.insert_random(rows, rounds, base),
        "scan": lambda: tables.scan(rows, rounds, base),
        "spark": lambda: _spark(rows, rounds, base),
        "memory": lambda: memory.memory(TINY_ROWS if tiny else MEMORY_ROWS, base),
    }


def _spark(rows: int, rounds: int, base: Path | None) -> list[Line]:
    from .spark_bench import spark_races  # the other races run without Spark and Java

    return spark_races(rows, rounds, base)


@click.command()
@click.argument("names", nargs=-1)
@click.option("--tiny", is_flag=True, help="Small data: checks that the benchmarks work.")
@click.option("--rounds", default=5, show_default=True, help="Counted rounds of each race.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write JSON here.")
@click.option("--dir", "base", type=click.Path(path_type=Path), help="Where the stores are made.")
def main(
    names: tuple[str, ...], tiny: bool, rounds: int, json_file: Path | None, base: Path | None
) -> None:
    """Run the races of these names, or all."""
    known = races(tiny, 1 if tiny else rounds, base)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise click.UsageError(f"no race {', '.join(unknown)}; there are {', '.join(known)}")
    lines: list[Line] = []
    for name in names or known:
        lines += known[name]()
    report(lines, json_file)


if __name__ == "__main__":
    main()
