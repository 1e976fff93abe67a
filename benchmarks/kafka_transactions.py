"""Transactions of a Kafka broker: what is consumed, what is produced, and the offsets, in one."""

from __future__ import annotations

import uuid

import pyarrow as pa

from .kafka import NOT_SYNCED, SYNCED, Broker, KafkaQueue

_SECONDS = 30.0


class Passing:
    """A topic with messages, and what takes them from there to another, counting by key.

    The counts go to a third topic, as those of Kafka Streams go to its changelog.

    Args:
        broker: to use.
        batches: the messages.
        synced: whether every write is on the disk before it counts.
    """

    def __init__(self, broker: Broker, batches: list[pa.Array], *, synced: bool) -> None:
        self.name = SYNCED if synced else NOT_SYNCED
        self._broker = broker
        self._synced = synced
        self._count = sum(map(len, batches))
        self._done = 0
        self._queue = KafkaQueue(broker, synced=synced)
        for batch in batches:
            self._queue.produce(batch)
        self._out = broker.create(synced=synced)
        self._state = broker.create(synced=synced)
        self._producer = broker.producer(**{"transactional.id": uuid.uuid4().hex})
        self._producer.init_transactions(_SECONDS)
        self._consumer = broker.consumer(self._queue.topic)
        self._consumer.commit(
            offsets=[broker.client.TopicPartition(self._queue.topic, 0, 0)], asynchronous=False
        )  # only now the broker's topic of offsets is there

    def prepare(self) -> None:
        """Tell the broker how to write its own topics from now on."""
        self._broker.sync_transactions(self._synced)

    def some(self, count: int, each: int) -> int:
        """Pass so many on, at most `each` in a transaction."""
        done = 0
        producer, consumer = self._producer, self._consumer
        while done < count:
            found = consumer.consume(each, timeout=_SECONDS)
            if not found or any(message.error() for message in found):
                raise RuntimeError(f"the broker gave {[message.error() for message in found]}")
            producer.begin_transaction()
            for message in found:
                key = b"%d" % (message.offset() % 1000)
                producer.produce(self._state, key=key, value=b"%d" % done)
                producer.produce(self._out, message.value())
            last = self._broker.client.TopicPartition(self._queue.topic, 0, found[-1].offset() + 1)
            metadata = consumer.consumer_group_metadata()
            producer.send_offsets_to_transaction([last], metadata, _SECONDS)
            producer.commit_transaction(_SECONDS)
            done += len(found)
        self._done += done
        return done

    def require_all(self) -> None:
        """Refuse a race in which messages were lost or doubled."""
        found, consumer = 0, self._broker.consumer(self._out)
        while found < self._done:
            some = consumer.consume(min(10_000, self._done - found), timeout=5.0)
            if not some:
                break
            found += len(some)
        consumer.close()
        if found != self._done or self._done != self._count:
            raise RuntimeError(f"{self.name} passed on {found} messages of {self._count}")

    def close(self) -> None:
        """Drop all topics."""
        self._consumer.close()
        self._broker.drop(self._out, self._state)
        self._queue.close()


def fill(broker: Broker, batch: pa.Array, count: int) -> str:
    """A topic with so many transactions of one batch each, of which one in a hundred aborted."""
    topic = broker.create(synced=False)
    producer = broker.producer(**{"transactional.id": uuid.uuid4().hex})
    producer.init_transactions(_SECONDS)
    values = [{"value": value} for value in batch.to_pylist()]
    for number in range(count):
        producer.begin_transaction()
        producer.produce_batch(topic, [dict(value) for value in values])
        if number % 100 == 50:
            producer.flush(_SECONDS)  # else an abort throws away what was not sent
            producer.abort_transaction(_SECONDS)
        else:
            producer.commit_transaction(_SECONDS)
    return topic
