"""Topics of a Kafka broker, read and written by Spark's own connector."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
from pyspark.sql import DataFrame

from benchmarks.kafka import NOT_SYNCED, SYNCED, Broker

from .setting import PARTITIONS, Setting


class KafkaOut:
    """A topic of two partitions that a query writes; Spark's sink is at-least-once.

    Args:
        broker: that has it.
        synced: whether each batch of messages is on the disk before it is acknowledged.
    """

    def __init__(self, broker: Broker, *, synced: bool) -> None:
        self.name = SYNCED if synced else NOT_SYNCED
        self._broker = broker
        self._synced = synced
        self._topic = broker.create(synced=synced, partitions=PARTITIONS)

    def empty(self) -> None:
        """Begin with nothing."""
        self._broker.drop(self._topic)
        self._topic = self._broker.create(synced=self._synced, partitions=PARTITIONS)

    def options(self) -> dict[str, str]:
        """Return the options of Spark's sink."""
        return {
            "kafka.bootstrap.servers": self._broker.server,
            "kafka.acks": "all",
            "topic": self._topic,
        }

    def count(self) -> int:
        """The messages that are there."""
        return self._broker.end(self._topic, PARTITIONS)

    def check(self, expected: int) -> None:
        """Refuse a race in which messages were lost or doubled."""
        if self.count() != expected:
            raise RuntimeError(f"{self.name} has {self.count()} messages, not {expected}")

    def close(self) -> None:
        """Drop the topic."""
        self._broker.drop(self._topic)


def stream(setting: Setting, topic: str, start: str = "earliest", **options: str) -> DataFrame:
    """A topic of the broker as a stream; what is committed alone."""
    assert setting.broker is not None
    reader = setting.spark.readStream.format("kafka").options(**options)
    reader = reader.option("kafka.bootstrap.servers", setting.broker.server)
    reader = reader.option("kafka.isolation.level", "read_committed")
    return reader.option("subscribe", topic).option("startingOffsets", start).load()


def fill(broker: Broker, chunks: Iterable[pa.Table]) -> str:
    """A topic of two partitions with these messages."""
    topic = broker.create(synced=False, partitions=PARTITIONS)
    producer = broker.producer()
    for chunk in chunks:
        producer.produce_batch(topic, chunk.to_pylist())
        if producer.flush(30.0):
            raise RuntimeError("the broker did not take all messages")
    return topic
