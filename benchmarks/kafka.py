"""A Kafka broker as a contestant, where one is there: `--kafka host:port`.

Every topic is made for the benchmark, with one replica, and dropped afterwards. A producer asks
for acks=all and is idempotent. Two kinds are told apart:

    synced       flush.messages=1: a batch is on the disk before it is acknowledged, as txnkv's is
    not synced   Kafka's default: the operating system writes when it likes; durable by replicas

For the transactions of the synced kind the broker's own topics, of transactions and of consumed
offsets, are synced as well; what was set there before is set again at the end.
"""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import click
import pyarrow as pa

SYNCED: Final = "kafka, synced"
NOT_SYNCED: Final = "kafka, not synced"
_FLUSH: Final = "flush.messages"
_ALWAYS: Final = "1"
_NEVER: Final = str(2**63 - 1)
_BATCH: Final = 2_000_000
_OWN: Final = ("__transaction_state", "__consumer_offsets")
_SECONDS: Final = 30.0


class Broker:
    """A broker of one node, through confluent-kafka.

    Args:
        server: its host and port.

    Raises:
        click.ClickException: the Python client is not installed, or nobody answers.
    """

    def __init__(self, server: str) -> None:
        self.server = server
        try:
            self.client: Any = importlib.import_module("confluent_kafka")
            self._admin: Any = importlib.import_module("confluent_kafka.admin")
        except ModuleNotFoundError as error:
            raise click.ClickException(
                "--kafka needs the Python client of Kafka: install confluent-kafka"
            ) from error
        self.admin = self._admin.AdminClient({"bootstrap.servers": server, "log_level": 0})
        try:
            self.admin.list_topics(timeout=10)
        except self.client.KafkaException as error:
            raise click.ClickException(
                f"no Kafka broker answers at {server}: {error}; start one, or leave out --kafka"
            ) from error

    def create(self, *, synced: bool, partitions: int = 1) -> str:
        """Make a topic, and answer its name."""
        name = f"txnkv-bench-{uuid.uuid4().hex[:12]}"
        config = {"max.message.bytes": str(_BATCH), _FLUSH: _ALWAYS if synced else _NEVER}
        topic = self._admin.NewTopic(name, partitions, 1, config=config)
        self._wait(self.admin.create_topics([topic]))
        return name

    def drop(self, *names: str) -> None:
        """Drop topics."""
        self._wait(self.admin.delete_topics(list(names)))

    def producer(self, **config: Any) -> Any:
        """A producer that sends what it has at each flush, in batches as large as may be."""
        return self.client.Producer(
            {
                "bootstrap.servers": self.server,
                "log_level": 0,
                "acks": "all",
                "enable.idempotence": True,
                "retry.backoff.ms": 1,  # else each transaction waits 100 ms for the last one's end
                "socket.nagle.disable": True,
                "message.max.bytes": _BATCH,
                "batch.size": _BATCH,
                "batch.num.messages": 1_000_000,
                "queue.buffering.max.messages": 10_000_000,
                "queue.buffering.max.kbytes": 1 << 20,
                **config,
            }
        )

    def consumer(self, topic: str, **config: Any) -> Any:
        """A consumer of all of a topic of one partition, from its beginning."""
        consumer = self.client.Consumer(
            {
                "bootstrap.servers": self.server,
                "log_level": 0,
                "group.id": topic,
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                **config,
            }
        )
        consumer.assign([self.client.TopicPartition(topic, 0, 0)])
        return consumer

    def end(self, topic: str, partitions: int = 1) -> int:
        """The end offset of a topic, or the sum of those of its partitions."""
        consumer = self.consumer(topic, **{"isolation.level": "read_uncommitted"})
        try:
            ends = [
                consumer.get_watermark_offsets(
                    self.client.TopicPartition(topic, number), timeout=_SECONDS
                )
                for number in range(partitions)
            ]
        finally:
            consumer.close()
        return sum(int(high) for _, high in ends)

    def sync_transactions(self, synced: bool) -> None:
        """Have transactions and consumed offsets synced as they are written from now on, or not."""
        for name in _OWN:
            self._set_flush(name, _ALWAYS if synced else _NEVER)

    @contextmanager
    def own_settings_kept(self) -> Iterator[None]:
        """Afterwards the broker's own topics are set as before."""
        before = {name: self._get_flush(name) for name in _OWN}
        try:
            yield
        finally:
            for name, value in before.items():
                self._set_flush(name, value)

    def _get_flush(self, topic: str) -> str | None:
        """Return the `flush.messages` that is set for the topic itself; None when none is."""
        resource = self._admin.ConfigResource(self._admin.ResourceType.TOPIC, topic)
        (future,) = self.admin.describe_configs([resource]).values()
        entry = future.result(_SECONDS)[_FLUSH]
        own = entry.source == self._admin.ConfigSource.DYNAMIC_TOPIC_CONFIG.value
        return str(entry.value) if own else None

    def _set_flush(self, topic: str, value: str | None) -> None:
        operation = self._admin.AlterConfigOpType
        entry = self._admin.ConfigEntry(
            _FLUSH,
            value,
            incremental_operation=operation.DELETE if value is None else operation.SET,
        )
        resource = self._admin.ConfigResource(
            self._admin.ResourceType.TOPIC, topic, incremental_configs=[entry]
        )
        self._wait(self.admin.incremental_alter_configs([resource]))

    def _wait(self, futures: dict[Any, Any]) -> None:
        for future in futures.values():
            future.result(_SECONDS)


class KafkaQueue:
    """A topic of one partition; a batch is acknowledged before the next is sent."""

    def __init__(self, broker: Broker, *, synced: bool) -> None:
        self.name = SYNCED if synced else NOT_SYNCED
        self._broker = broker
        self._synced = synced
        # A batch goes as one, at the flush.
        self._producer = broker.producer(**{"linger.ms": 1000})
        self.topic = broker.create(synced=synced)

    def empty(self) -> None:
        """Begin with nothing."""
        self._broker.drop(self.topic)
        self.topic = self._broker.create(synced=self._synced)

    def produce(self, batch: pa.Array) -> None:
        """Take all of a batch."""
        values = [{"value": value} for value in batch.to_pylist()]
        self._producer.produce_batch(self.topic, values)
        if self._producer.flush(_SECONDS):
            raise RuntimeError("the broker did not take all messages")

    def count(self) -> int:
        """The messages that are there."""
        return self._broker.end(self.topic)

    def close(self) -> None:
        """Drop the topic."""
        self._broker.drop(self.topic)
