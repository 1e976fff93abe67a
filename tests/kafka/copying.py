"""A program that copies a topic, each message once: reads, sends on and commits in transactions.

    python -m tests.kafka.copying SERVERS COUNT

From partition 0 of `in` to partition 0 of `out`; the offsets that it has read go with the
messages. When a transaction is to be aborted it is, and done again; when the client says that it
cannot go on, another one is made, which goes on at the offset that was committed.
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

PATIENCE = 60.0


def settings(servers: str) -> dict[str, Any]:
    return {
        "bootstrap.servers": servers,
        "reconnect.backoff.max.ms": 200,
        # From 2.11 on the client gives up the only broker of a cluster when it is down, and keeps
        # waiting for it in what it has cached of coordinators.
        "metadata.recovery.strategy": "none",
    }


class Copier:
    """One consumer and one producer."""

    def __init__(self, servers: str) -> None:
        asked = settings(servers) | {"group.id": "copiers", "enable.auto.commit": False}
        self.consumer = Consumer(asked | {"isolation.level": "read_committed"})
        self.producer = Producer(settings(servers) | {"transactional.id": "copier"})
        self.producer.init_transactions(PATIENCE)
        self.rewind()

    def rewind(self) -> None:
        """Go on at the offset that was committed."""
        (found,) = self.consumer.committed([TopicPartition("in", 0)], PATIENCE)
        self.at = max(found.offset, 0)
        self.consumer.assign([TopicPartition("in", 0, self.at)])

    def copy(self) -> None:
        """Copy some in one transaction.

        Raises:
            KafkaException: it is not committed, or it is not known.
        """
        found = [m for m in self.consumer.consume(random.randint(1, 20), 1.0) if not m.error()]
        if not found:
            return
        self.producer.begin_transaction()
        for message in found:
            self.producer.produce("out", message.value(), partition=0)
            if random.random() < 0.2:
                self.producer.flush(0.01)
        place = TopicPartition("in", 0, found[-1].offset() + 1)
        group = self.consumer.consumer_group_metadata()
        self.producer.send_offsets_to_transaction([place], group, PATIENCE)
        self.producer.commit_transaction(PATIENCE)
        self.at = place.offset


def main(servers: str, count: int) -> None:
    began = time.monotonic()

    def tell(*what: object) -> None:
        print(f"{time.monotonic() - began:.1f}", *what, flush=True)

    copier = Copier(servers)
    while copier.at < count:
        try:
            copier.copy()
            tell("at", copier.at)
        except KafkaException as failed:
            error = failed.args[0]
            tell(error.name(), error.str(), "fatal" if error.fatal() else "")
            if error.txn_requires_abort() and not error.fatal():
                copier.producer.abort_transaction(PATIENCE)
                copier.rewind()
            else:
                copier.consumer.close()
                copier = Copier(servers)
    copier.consumer.close()
    tell("done")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
