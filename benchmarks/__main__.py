"""`python -m benchmarks [names] [--tiny] [--json FILE]`: one table of ratios."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import click
from rich.console import Console

from . import memory, tables
from .harness import Line, as_json, show

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
        "memory": lambda: memory.memory(TINY_ROWS if tiny else MEMORY_ROWS, base),
    }


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
    show(lines, Console(width=None if Console().is_terminal else 130))
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(as_json(lines), indent=1))


if __name__ == "__main__":
    main()
