"""`python -m benchmarks.streaming [names] [--tiny]`: one table of ratios."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import click

from benchmarks.harness import Line, report
from benchmarks.kafka import Broker
from benchmarks.spark_session import require_kafka, session

from .nothing import Nothing
from .pipeline import pipeline
from .setting import Setting
from .sinks import sinks
from .source import source
from .trigger import trigger

RACES: dict[str, Callable[[Setting], list[Line]]] = {
    "source": source,
    "sinks": sinks,
    "pipeline": pipeline,
    "trigger": trigger,
}


def streaming_races(
    names: tuple[str, ...],
    *,
    tiny: bool,
    rounds: int,
    base: Path | None,
    plots: Path | None = None,
    broker: Broker | None = None,
    jars: str | None = None,
    scale: float = 1.0,
) -> list[Line]:
    """The races of these names, or all, in a directory of their own below `base`."""
    place = Path(tempfile.mkdtemp(prefix="txnkv-streaming-", dir=base)).resolve()
    try:
        with session(jars) as spark:
            spark.dataSource.register(Nothing)
            if broker is not None:
                require_kafka(spark)
            setting = Setting(spark, place, 1 if tiny else rounds, tiny, broker, plots, scale)
            return [line for name in names or RACES for line in RACES[name](setting)]
    finally:
        shutil.rmtree(place, ignore_errors=True)


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(RACES)))
@click.option("--tiny", is_flag=True, help="Small data: checks that the benchmarks work.")
@click.option("--rounds", default=5, show_default=True, help="Counted rounds of each race.")
@click.option("--scale", default=1.0, show_default=True, help="Of the rows: 0.1 is a tenth.")
@click.option("--plots", type=click.Path(path_type=Path), help="Draw triggers into this directory.")
@click.option("--kafka", help="host:port of a Kafka broker to compare with.")
@click.option("--jars", help="Spark's Kafka connector and what it needs, with commas between.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write JSON here.")
@click.option("--dir", "base", type=click.Path(path_type=Path), help="Where the stores are made.")
def main(
    names: tuple[str, ...],
    tiny: bool,
    rounds: int,
    scale: float,
    plots: Path | None,
    kafka: str | None,
    jars: str | None,
    json_file: Path | None,
    base: Path | None,
) -> None:
    """Run the races of these names, or all."""
    broker = Broker(kafka) if kafka else None
    lines = streaming_races(
        names,
        tiny=tiny,
        rounds=rounds,
        base=base,
        plots=plots,
        broker=broker,
        jars=jars,
        scale=scale,
    )
    report(lines, json_file)


if __name__ == "__main__":
    main()
