"""`python -m benchmarks [names] [--quick] [--json FILE]`: one table of ratios.

Ctrl-C ends the race that runs; what the others before it found is shown and written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import (
    beside,
    few,
    growth,
    indexed,
    logs,
    many,
    memory,
    points,
    remote,
    small,
    tables,
    topics,
    ycsb,
)
from .harness import Line, report, watched, write_json
from .kafka import Broker
from .tpcc.race import tpcc
from .tpcc.schema import Scale

ROWS = 10_000_000
MEMORY_ROWS = 50_000_000
TINY_ROWS = 20_000
SIZES = [1_000_000, 10_000_000]
FULL_SIZES = [*SIZES, 100_000_000]
TINY_SIZES = [1000, 2000]
_ABORTED = [1, 1000, 100_000, 1_000_000]
_MANY = [10, 100, 1000, 10_000]
_CLIENTS = [1, 16, 64]
_OPEN = [100_000, 1_000_000, 10_000_000]
QUICK = 20
"""`--quick` has this part of the data, and one round: enough to see what has changed much."""

Race = Callable[[], list[Line]]


def races(
    tiny: bool,
    rounds: int,
    base: Path | None,
    full: bool,
    plots: Path | None,
    warehouses: int,
    broker: Broker | None = None,
    postgres: Path | None = None,
    quick: bool = False,
) -> dict[str, Race]:
    """All races by name."""

    def size(small: int, normal: int) -> int:
        return small if tiny else max(small, normal // QUICK) if quick else normal

    def several(small: list[int], normal: list[int]) -> list[int]:
        return small if tiny else normal[: max(len(normal) // 2, 1)] if quick else normal

    rows = size(TINY_ROWS, ROWS)
    sizes = several(TINY_SIZES, FULL_SIZES if full else SIZES)
    crowds = several([1, 2], _CLIENTS)
    scale = Scale(2, 200, 30, 30) if tiny else Scale(warehouses)
    return {
        "insert-sorted": lambda: tables.insert_sorted(rows, rounds, base),
        "insert-random": lambda: tables.insert_random(rows, rounds, base),
        "scan": lambda: tables.scan(rows, rounds, base),
        "spark": lambda: _spark(rows, rounds, base),
        "remote-spark": lambda: _remote_spark(rows, rounds, base),
        "streaming": lambda: _streaming(tiny or quick, rounds, base, plots),
        "memory": lambda: memory.memory(size(TINY_ROWS, MEMORY_ROWS), base),
        "commit": lambda: small.commit(size(20, 1000), size(200, 100_000), rounds, base),
        "commit-threads": lambda: small.commit_threads(size(5, 200), rounds, base),
        "commit-processes": lambda: small.commit_processes(size(10, 500), rounds, base),
        "get": lambda: points.get(rows, size(50, 5000), rounds, base),
        "indexed": lambda: indexed.indexed(size(500, 1_000_000), size(30, 2000), rounds, base),
        "few": lambda: few.few(size(500, 1_000_000), size(30, 2000), rounds, base),
        "executemany": lambda: points.executemany(size(2000, 200_000), rounds, base),
        "ycsb": lambda: ycsb.ycsb(size(1000, 1_000_000), size(30, 2000), rounds, base),
        "tpcc": lambda: tpcc(scale, size(10, 300), rounds, base),
        "scan-beside": lambda: beside.scan_beside(rows, size(2, 20), rounds, base),
        "compaction-latency": lambda: beside.compaction_latency(
            size(2000, 2_000_000), size(50, 2000), rounds, base
        ),
        "produce": lambda: topics.produce(size(1 << 16, 64 << 20), rounds, base, broker),
        "send": lambda: topics.send(size(2000, 1_000_000), rounds, base),
        "fetch": lambda: topics.fetch(size(1 << 20, 1 << 28), rounds, base, broker),
        "consume": lambda: topics.consume(size(2000, 1_000_000), rounds, base, broker),
        "pass-on": lambda: topics.pass_on(size(10, 1000), rounds, base, broker),
        "aborted": lambda: logs.aborted(several([1, 10], _ABORTED), rounds, base),
        "open-log": lambda: logs.opening(size(20, 100_000), rounds, base),
        "open-transaction": lambda: logs.open_transaction(several([100, 1000], _OPEN), base, plots),
        "many": lambda: many.many(several([2, 4], _MANY), base, plots),
        "life": lambda: many.life(
            size(40, 1_000_000), size(20, 1000), size(20, 10_000), base, plots
        ),
        "remote-scan": lambda: remote.scan(rows, rounds, base, postgres),
        "remote-write": lambda: remote.write(rows, rounds, base, postgres),
        "remote-transaction": lambda: remote.transaction(
            size(10, 500), crowds, rounds, base, postgres
        ),
        "remote-get": lambda: remote.get(
            size(10, 1000), size(1000, 1_000_000), crowds, rounds, base, postgres
        ),
        "remote-clients": lambda: remote.clients(size(4, 1000), size(2, 200), size(1, 60), base),
        "growth": lambda: growth.growth(sizes, size(20, 500), rounds, base, plots),
    }


def _spark(rows: int, rounds: int, base: Path | None) -> list[Line]:
    from .spark_bench import spark_races  # the other races run without Spark and Java

    return spark_races(rows, rounds, base)


def _remote_spark(rows: int, rounds: int, base: Path | None) -> list[Line]:
    from .remote_spark import over_server

    return over_server(rows, rounds, base)


def _streaming(tiny: bool, rounds: int, base: Path | None, plots: Path | None) -> list[Line]:
    from .streaming.__main__ import streaming_races

    return streaming_races((), tiny=tiny, rounds=rounds, base=base, plots=plots)


@click.command()
@click.argument("names", nargs=-1)
@click.option("--tiny", is_flag=True, help="Small data: checks that the benchmarks work.")
@click.option("--quick", is_flag=True, help=f"One round of 1/{QUICK} of the data: minutes for all.")
@click.option("--rounds", default=5, show_default=True, help="Counted rounds of each race.")
@click.option("--full", is_flag=True, help="Growth up to 100 M rows: takes minutes, 20 GB.")
@click.option("--warehouses", default=4, show_default=True, help="Of TPC-C, a thread each.")
@click.option("--plots", type=click.Path(path_type=Path), help="Draw growth into this directory.")
@click.option("--kafka", help="host:port of a Kafka broker to compare topics with.")
@click.option(
    "--postgres",
    type=click.Path(path_type=Path, exists=True),
    help="The programs of a PostgreSQL server to compare servers with.",
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write JSON here.")
@click.option("--dir", "base", type=click.Path(path_type=Path), help="Where the stores are made.")
def main(
    names: tuple[str, ...],
    tiny: bool,
    quick: bool,
    rounds: int,
    full: bool,
    warehouses: int,
    plots: Path | None,
    kafka: str | None,
    postgres: Path | None,
    json_file: Path | None,
    base: Path | None,
) -> None:
    """Run the races of these names, or all."""
    broker = Broker(kafka) if kafka else None
    rounds = 1 if tiny or quick else rounds
    known = races(tiny, rounds, base, full, plots, warehouses, broker, postgres, quick)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise click.UsageError(f"no race {', '.join(unknown)}; there are {', '.join(known)}")
    asked = names or list(known)
    lines: list[Line] = []
    try:
        run(asked, known, lines, json_file)
    except KeyboardInterrupt:
        report(lines, json_file)
        raise Stopped(f"stopped; of {len(asked)} races these are done: {_done(lines)}") from None
    report(lines, json_file)


def run(
    names: Sequence[str], known: dict[str, Race], lines: list[Line], json_file: Path | None
) -> None:
    """Run races one after another; what they find is in `lines` and the file at once."""
    console = Console(stderr=True)
    columns = (MofNCompleteColumn(), BarColumn(20), TimeElapsedColumn())
    texts = TextColumn("{task.description}")
    with Progress(*columns, texts, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(names))
        with watched(lambda what: progress.update(task, description=what)):
            for name in names:
                progress.update(task, description=name)
                begin = time.monotonic()
                lines += known[name]()
                write_json(lines, json_file)
                progress.advance(task)
                console.print(f"{name}: {time.monotonic() - begin:.1f} s", highlight=False)


def _done(lines: list[Line]) -> str:
    return ", ".join(dict.fromkeys(line.race for line in lines)) or "none"


class Stopped(click.ClickException):
    """Ctrl-C."""

    exit_code = 130


if __name__ == "__main__":
    main()
