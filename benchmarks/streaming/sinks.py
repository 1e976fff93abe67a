"""Streams into a table and into a topic, beside sinks that do nothing.

The rows come from Spark's own `rate-micro-batch`, made in the JVM, so that nothing but the sink
costs much. Each query is one micro batch, into an empty table or topic. txnkv's is on the disk
when the batch is done; Parquet files are not synced by Spark.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

from pyspark.sql import DataFrame

from benchmarks.data import SCHEMA
from benchmarks.harness import Line

from .kafka import KafkaOut
from .nothing import FORMAT
from .queries import Batch, Streamer, drain, race_queries
from .setting import MESSAGE, PARTITIONS, TASKS, WORTH, Setting, standing

NOTHING = "sink that does nothing"


def sinks(setting: Setting) -> list[Line]:
    """Both races."""
    return [*table(setting), *topic(setting)]


def table(setting: Setting) -> list[Line]:
    """Rows of 24 bytes, inserted: the keys of each task ascend, and are apart from the others'."""
    rows = setting.rows(10_000, 4_000_000)
    data = _numbers(setting, rows).selectExpr("id", "cast(id AS double) * 0.5 AS x", "n")
    files = setting.base / "rows.parquet"
    with closing(setting.connect("sink-table")) as client:

        def empty() -> None:
            client.drop_table("rows", missing_ok=True)
            client.create_table("rows", SCHEMA)

        def check(expected: int) -> None:
            found = client.table("rows").scan().to_arrow()
            if len(found) != expected or len(found["n"].unique()) != expected:
                raise RuntimeError(f"the table has {len(found)} rows, not {expected}")

        streamers = [
            _streamer(
                setting,
                data,
                "txnkv",
                lambda: {"path": str(client.path), "table": "rows"},
                prepare=empty,
                check=check,
            ),
            _streamer(setting, data, FORMAT, lambda: {"rows": str(rows)}, name=NOTHING),
            _streamer(
                setting,
                data,
                "parquet",
                lambda: {"path": str(files)},
                name="parquet, in the JVM",
                prepare=lambda: shutil.rmtree(files, ignore_errors=True),
            ),
        ]
        return _race(setting, f"a stream into a table, {rows:,} rows", streamers, rows)


def topic(setting: Setting) -> list[Line]:
    """Messages of 100 bytes, without keys, into two partitions."""
    rows = setting.rows(10_000, 4_000_000)
    message = f"cast(lpad(cast(n AS string), {MESSAGE}, 'x') AS binary) AS value"
    data = _numbers(setting, rows).selectExpr(message)
    with ExitStack() as stack:
        client = stack.enter_context(closing(setting.connect("sink-topic")))

        def empty() -> None:
            client.drop_topic("messages", missing_ok=True)
            client.create_topic("messages", partitions=PARTITIONS)

        def check(expected: int) -> None:
            found = standing(client.topic("messages"))
            if found != expected:
                raise RuntimeError(f"the topic has {found} messages, not {expected}")

        streamers = [
            _streamer(
                setting,
                data,
                "txnkv",
                lambda: {"path": str(client.path), "topic": "messages"},
                prepare=empty,
                check=check,
            ),
            _streamer(setting, data, FORMAT, lambda: {"rows": str(rows)}, name=NOTHING),
        ]
        broker = setting.broker
        outs = [KafkaOut(broker, synced=synced) for synced in (True, False)] if broker else []
        for out in outs:
            stack.enter_context(closing(out))
            streamers.append(
                _streamer(
                    setting,
                    data,
                    "kafka",
                    out.options,
                    name=f"{out.name}, in the JVM",
                    prepare=out.empty,
                    check=out.check,
                )
            )
        return _race(setting, f"a stream into a topic, {rows:,} messages", streamers, rows)


def _numbers(setting: Setting, rows: int) -> DataFrame:
    """Columns id, ascending within a task and apart from those of others, and n, 0 to rows - 1."""
    each = rows // TASKS
    source = setting.spark.readStream.format("rate-micro-batch")
    stream = source.option("rowsPerBatch", rows).option("numPartitions", TASKS).load()
    # Task p has the numbers p, p + TASKS, p + 2 TASKS and so on.
    return stream.selectExpr(f"value % {TASKS} * {each} + value div {TASKS} AS id", "value AS n")


def _streamer(
    setting: Setting,
    data: DataFrame,
    format: str,
    options: Callable[[], dict[str, str]],
    *,
    name: str | None = None,
    prepare: Callable[[], None] = lambda: None,
    check: Callable[[int], None] = lambda rows: None,
) -> Streamer:
    checkpoint: Path = setting.base / "checkpoint"

    def run() -> list[Batch]:
        return drain(data.writeStream.format(format).options(**options()), checkpoint)

    return Streamer(name or format, run, prepare, check)


def _race(setting: Setting, title: str, streamers: list[Streamer], rows: int) -> list[Line]:
    return race_queries(
        title,
        streamers,
        rows,
        rounds=setting.rounds,
        warm=not setting.tiny,
        ratios={NOTHING: WORTH},
    )
