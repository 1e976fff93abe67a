"""The Spark of the benchmarks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final

import click
from pyspark.sql import SparkSession

import txnkv.spark

CORES: Final = 2
_NONE: Final[Mapping[str, str]] = MappingProxyType({})


@contextmanager
def session(
    jars: str | None = None, master: str = f"local[{CORES}]", conf: Mapping[str, str] = _NONE
) -> Iterator[SparkSession]:
    """The Spark that runs, or one of its own for as long as the block lasts.

    Args:
        jars: more jars for the JVM, with commas between.
        master: where its tasks run.
        conf: of it, beside what is set here.
    """
    txnkv.spark.require_java()
    os.environ["PYSPARK_PYTHON"] = sys.executable  # not the first one in PATH
    there = SparkSession.getActiveSession()
    builder = SparkSession.builder.master(master)
    for key, value in conf.items():
        builder = builder.config(key, value)
    spark = there or (
        builder.config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "2g")
        .config("spark.sql.shuffle.partitions", CORES)
        .config("spark.jars", jars or "")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    try:
        yield spark
    finally:
        if there is None:
            spark.stop()


def require_kafka(spark: SparkSession) -> None:
    """Refuse to go on without Spark's Kafka connector.

    Raises:
        click.ClickException: Spark does not know format kafka.
    """
    reader = spark.read.format("kafka").option("kafka.bootstrap.servers", "x:1")
    try:
        reader.option("subscribe", "x").load()
    except Exception as error:
        raise click.ClickException(
            f"--kafka needs Spark's Kafka connector, spark-sql-kafka-0-10 of Spark {spark.version} "
            "and what it depends on: give the jars by --jars a.jar,b.jar"
        ) from error
