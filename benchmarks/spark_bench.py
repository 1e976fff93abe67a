"""Spark reads and writes beside a source and a sink that do nothing, and beside Parquet.

    python -m benchmarks.spark_bench [--tiny] [--rows N] [--rounds N] [--json FILE]

The source that does nothing answers each task with batches that it has in memory; the sink
that does nothing counts the rows that it is given. What they reach is the limit of any data
source written in Python. Parquet is read and written by Spark's own code, in the JVM.

Each write begins with an empty table and ends when the rows are committed, in a transaction
of the job's own. Rows are 24 bytes: int64 key, float64, int64. What is read goes to Spark's
"noop" sink, so that nothing but the source is timed.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from txnkv.spark.reading import TASK_ROWS

from .data import ascending
from .harness import Contestant, Line, race, report
from .spark_session import CORES, session
from .spark_tables import Tables

ROWS = 10_000_000
TINY_ROWS = 20_000
BATCH = 1 << 16
WORTH = 0.8
"""The share that is to be left of what a source or sink that does nothing reaches."""


# -- a source and a sink that do nothing -----------------------------------------------


class Slice(InputPartition):
    """So many rows."""

    def __init__(self, rows: int) -> None:
        super().__init__(None)
        self.rows = rows


class NothingReader(DataSourceReader):
    """Answers with one batch again and again."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def partitions(self) -> Sequence[InputPartition]:
        """Cut the rows into as many tasks as txnkv would make."""
        tasks = max(2 * CORES, -(-self._rows // TASK_ROWS))
        step = -(-self._rows // tasks)
        return [Slice(min(step, self._rows - lo)) for lo in range(0, self._rows, step)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task."""
        assert isinstance(partition, Slice)
        batch = ascending(0, BATCH).combine_chunks().to_batches()[0]
        for lo in range(0, partition.rows, BATCH):
            yield batch.slice(0, min(BATCH, partition.rows - lo))


@dataclass
class Counted(WriterCommitMessage):
    """Rows that a task got."""

    rows: int


class NothingWriter(DataSourceArrowWriter):
    """Counts rows."""

    def __init__(self, expected: int) -> None:
        self._expected = expected

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Counted:
        """One task."""
        return Counted(sum(batch.num_rows for batch in iterator))

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Check that all rows came."""
        rows = sum(message.rows for message in messages if isinstance(message, Counted))
        if rows != self._expected:
            raise AssertionError(f"{rows} rows came, {self._expected} were sent")


class Nothing(DataSource):
    """Format "nothing"."""

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "nothing"

    def schema(self) -> str:
        """That of the benchmark's rows."""
        return "id BIGINT NOT NULL, x DOUBLE NOT NULL, n BIGINT NOT NULL"

    def reader(self, schema: StructType) -> DataSourceReader:
        """The source that does nothing."""
        return NothingReader(int(self.options["rows"]))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """The sink that does nothing."""
        return NothingWriter(int(self.options["rows"]))


# -- the races -------------------------------------------------------------------------


def write(spark: SparkSession, rows: int, rounds: int, base: Path) -> list[Line]:
    """From Spark's own range into each sink."""
    data = spark.range(0, rows, numPartitions=2 * CORES).selectExpr(
        "id", "cast(id AS double) * 0.5 AS x", f"{rows - 1} - id AS n"
    )
    tables = Tables(base / "written")

    def save(format: str, mode: str = "append", **options: str) -> int:
        data.write.format(format).options(**options).mode(mode).save()
        return rows

    lines = race(
        f"Spark writes {rows:,} rows",
        Contestant("txnkv", lambda: save("txnkv", **tables.options), tables.empty),
        [
            Contestant("sink that does nothing", lambda: save("nothing", rows=str(rows))),
            Contestant(
                "parquet, in the JVM",
                lambda: save("parquet", mode="overwrite", path=str(base / "written.parquet")),
            ),
        ],
        rounds=rounds,
        ratios={"sink that does nothing": WORTH},
    )
    tables.check(rows)
    tables.client.close()
    return lines


def read(spark: SparkSession, rows: int, rounds: int, base: Path) -> list[Line]:
    """From each source into Spark's own sink that does nothing."""
    tables = Tables(base / "read")
    with tables.client.new_session() as target:
        target.write("rows", ascending(0, rows))
    parquet = str(base / "read.parquet")
    ours = spark.read.format("txnkv").options(**tables.options).load()
    ours.write.parquet(parquet)

    def drain(frame: DataFrame) -> int:
        frame.write.format("noop").mode("overwrite").save()
        return rows

    nothing = spark.read.format("nothing").option("rows", str(rows)).load()
    lines = race(
        f"Spark reads {rows:,} rows",
        Contestant("txnkv", lambda: drain(ours)),
        [
            Contestant("source that does nothing", lambda: drain(nothing)),
            Contestant("parquet, in the JVM", lambda: drain(spark.read.parquet(parquet))),
        ],
        rounds=rounds,
        ratios={"source that does nothing": WORTH},
    )
    found: Any = ours.selectExpr("count(*)", "sum(id)", "sum(n)", "max(x)").first()
    total = rows * (rows - 1) // 2
    assert tuple(found) == (rows, total, total, (rows - 1) * 0.5), found
    tables.client.close()
    return lines


def spark_races(rows: int, rounds: int, base: Path | None) -> list[Line]:
    """All races, in a directory of their own below `base`."""
    place = Path(tempfile.mkdtemp(prefix="txnkv-spark-", dir=base))
    try:
        with session() as spark:
            spark.dataSource.register(Nothing)
            return read(spark, rows, rounds, place) + write(spark, rows, rounds, place)
    finally:
        shutil.rmtree(place, ignore_errors=True)


@click.command()
@click.option("--tiny", is_flag=True, help="Small data: checks that the benchmark works.")
@click.option("--rows", default=ROWS, show_default=True)
@click.option("--rounds", default=5, show_default=True, help="Counted rounds.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write JSON here.")
@click.option("--dir", "base", type=click.Path(path_type=Path), help="Where the store is made.")
def main(
    tiny: bool,
    rows: int,
    rounds: int,
    json_file: Path | None,
    base: Path | None,
) -> None:
    """Spark reads and writes, in one table of ratios."""
    rows, rounds = (TINY_ROWS, 1) if tiny else (rows, rounds)
    lines = spark_races(rows, rounds, base)
    report(lines, json_file)


if __name__ == "__main__":
    main()
