"""The setting of all races of streams: Spark, a place, sizes, and the peers that are there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

import txnkv
from benchmarks.kafka import Broker
from benchmarks.spark_session import CORES
from benchmarks.topics import messages

WORTH = 0.8
"""The share that is to be left of what a source or sink that does nothing reaches."""
MESSAGE = 100
TASKS = 2 * CORES
PARTITIONS = 2
_CHUNK = 10_000


@dataclass(frozen=True)
class Setting:
    """The place where the races are run, and their length.

    Attributes:
        base: a directory for all that they write.
        rounds: counted rounds.
        tiny: whether they are only to be seen to work.
        broker: of Kafka, where there is one.
        plots: a directory for charts; None for none.
        scale: of the rows, 1 for as many as the goals are for.
    """

    spark: SparkSession
    base: Path
    rounds: int
    tiny: bool
    broker: Broker | None = None
    plots: Path | None = None
    scale: float = 1.0

    def size(self, tiny: int, normal: int) -> int:
        """One of the two."""
        return tiny if self.tiny else normal

    def rows(self, tiny: int, normal: int) -> int:
        """Rows of a query, in round thousands."""
        return tiny if self.tiny else max(int(normal * self.scale) // 1000, 10) * 1000

    @property
    def batches(self) -> int:
        """Micro batches of a query."""
        return self.size(2, 5)

    def connect(self, name: str) -> txnkv.Client:
        """A client of a store below `base`."""
        return txnkv.connect(self.base / name)

    def topic(self, client: txnkv.Client, topic: str, **options: str) -> DataFrame:
        """A topic as a stream."""
        reader = self.spark.readStream.format("txnkv").options(**options)
        return reader.option("path", str(client.path)).option("topic", topic).load()


def standing(topic: txnkv.Topic) -> int:
    """Count the messages of a topic that are committed."""
    found = 0
    with topic.consumer() as consumer:
        while some := consumer.poll_batch(max_messages=1 << 18, timeout=0.0).num_rows:
            found += int(some)
    return found


def chunks(
    count: int, columns: Callable[[range], dict[str, Any]] | None = None
) -> Iterator[pa.Table]:
    """So many messages of 100 bytes, in batches of a MiB, each for one of two partitions.

    Args:
        count: messages.
        columns: others of the messages with these numbers, besides value and partition.
    """
    for number, at in enumerate(range(0, count, _CHUNK)):
        some = range(at, min(at + _CHUNK, count))
        partition = np.full(len(some), number % PARTITIONS, np.int32)
        given = {"value": messages(len(some), MESSAGE, at), **(columns(some) if columns else {})}
        yield pa.table({**given, "partition": partition})
