"""A local Spark that keeps quiet: what it and its workers say goes to a file."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

LOG: Final = "spark.log"
WORKERS: Final = 2
PARTS: Final = 4
_ATTEMPTS: Final = 4


@contextmanager
def local_spark(scratch: Path) -> Iterator[Any]:
    """A session with two workers at a time, in which a task may be tried four times.

    Args:
        scratch: for what Spark writes; its log is spark.log there.
    """
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    builder = SparkSession.builder.master(f"local[{WORKERS},{_ATTEMPTS}]").appName("txnkv demo")
    for name, value in _settings(scratch).items():
        builder = builder.config(name, value)
    with _output_to(scratch / LOG):
        spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    try:
        with warnings.catch_warnings():
            # Of pyspark about the pandas that is installed; the demo uses none.
            warnings.simplefilter("ignore", FutureWarning)
            yield spark
    finally:
        spark.stop()


def _settings(scratch: Path) -> dict[str, str]:
    return {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.local.dir": str(scratch),
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        "spark.sql.shuffle.partitions": str(PARTS),
        # Two workers at least, however little there is to read.
        "spark.sql.adaptive.coalescePartitions.enabled": "false",
    }


@contextmanager
def _output_to(log: Path) -> Iterator[None]:
    """Processes started inside write to a file what they write, for all their lives."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [(number, os.dup(number)) for number in (1, 2)]
    with log.open("ab") as file:
        try:
            for number, _ in kept:
                os.dup2(file.fileno(), number)
            yield
        finally:
            for number, copy in kept:
                os.dup2(copy, number)
                os.close(copy)
