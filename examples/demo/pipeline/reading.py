"""The state of the pipeline's store at one moment, as the store tells it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime

import txnkv
from examples.demo.pipeline import layout
from txnkv.topics import overview


@dataclass(frozen=True)
class Log:
    """A partition of a topic.

    Attributes:
        end: the high watermark.
        stable: the last stable offset.
        lag: offsets that its subscription has not acknowledged.
    """

    topic: str
    number: int
    end: int
    stable: int
    lag: int


@dataclass(frozen=True)
class Open:
    """A transaction that has not ended.

    Attributes:
        age: seconds since its begin.
        participants: tablets, partitions and subscriptions that it has touched.
    """

    id: int
    state: str
    age: float
    participants: int


@dataclass(frozen=True)
class Reading:
    """The store at one moment.

    Attributes:
        at: seconds of the monotonic clock.
        logs: the partitions of both topics.
        words, mails: rows of the tables.
        open: transactions that have not ended, oldest first.
    """

    at: float
    logs: tuple[Log, ...] = ()
    words: int = 0
    mails: int = 0
    open: tuple[Open, ...] = ()

    def offsets(self, topic: str) -> int:
        """Offsets in a topic: messages, and the markers of transactions."""
        return sum(log.end for log in self.logs if log.topic == topic)

    def lag(self, topic: str) -> int:
        """Offsets in a topic that its subscription has not acknowledged."""
        return sum(log.lag for log in self.logs if log.topic == topic)


def read(client: txnkv.Client) -> Reading:
    """Look at the store."""
    if layout.MAILS not in client.tables() or layout.ALERTS not in client.topics():
        return Reading(time.monotonic())  # the first program is making them
    return Reading(
        time.monotonic(),
        tuple(log for topic in (layout.LINES, layout.ALERTS) for log in _logs(client, topic)),
        client.table(layout.COUNTS).count(),
        client.table(layout.MAILS).count(),
        tuple(_open(client)),
    )


def _logs(client: txnkv.Client, topic: str) -> list[Log]:
    found = overview.overview_of(client.instance.topics, client.topic_info(topic))
    lag = found.subscriptions[0].lag if found.subscriptions else {}
    return [
        Log(topic, each.number, each.end, each.last_stable_offset, lag.get(each.number, each.end))
        for each in found.partitions
    ]


def _open(client: txnkv.Client) -> list[Open]:
    now = datetime.now(UTC)
    found = [
        Open(info.id.local, info.state.name, age, info.participants)
        for info in client.transactions()
        if info.state not in (txnkv.TxnState.COMMITTED, txnkv.TxnState.ABORTED)
        for age in [(now - info.begin.datetime).total_seconds()]
    ]
    return sorted(found, key=lambda each: -each.age)
