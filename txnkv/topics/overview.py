"""Looking on: what partitions hold, who holds them back, how far subscriptions are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from txnkv.coordinator import DAMAGE
from txnkv.storage import StaleHandleError
from txnkv.topics.log import OpenTxn
from txnkv.topics.partition import Partition
from txnkv.topics.read import bounds
from txnkv.topics.topic_catalog import TopicInfo
from txnkv.topics.topic_engine import TopicEngine


@dataclass(frozen=True)
class PartitionOverview:
    """A partition as it is now.

    Attributes:
        number: of the partition.
        start: the least offset that is readable.
        end: the high watermark.
        last_stable_offset: below it all is decided.
        bytes: of its batches, in the log and beside it.
        open: transactions with messages in the log and no end, by first offset.
        waiting: messages in side logs by transaction; they hold nothing back.
        error: why it cannot be looked at, if it is damaged; the others say nothing then.
    """

    number: int
    start: int
    end: int
    last_stable_offset: int
    bytes: int
    open: tuple[OpenTxn, ...]
    waiting: dict[int, int]
    error: str | None = None

    @property
    def held_by(self) -> OpenTxn | None:
        """The transaction that readers of committed messages wait for."""
        return self.open[0] if self.open and self.last_stable_offset < self.end else None


@dataclass(frozen=True)
class SubscriptionOverview:
    """A subscription as it is now.

    Attributes:
        name: of the subscription.
        type: "exclusive" or "shared".
        lag: offsets that are decided and not acknowledged, by partition.
        lost: messages that retention took before they were acknowledged, by partition.
    """

    name: str
    type: str
    lag: dict[int, int]
    lost: dict[int, int]


@dataclass(frozen=True)
class TopicOverview:
    """A topic as it is now."""

    topic: TopicInfo
    partitions: tuple[PartitionOverview, ...]
    subscriptions: tuple[SubscriptionOverview, ...]


class SentTo(NamedTuple):
    """The messages that an undecided transaction has in a partition.

    Attributes:
        topic: name of the topic.
        partition: number of the partition.
        first_offset: of its messages in the log; None: they wait in a side log.
        messages: that wait in a side log; None: they are in the log, where nobody counts them.
        holds_back: readers of committed messages wait for it there.
    """

    topic: str
    partition: int
    first_offset: int | None
    messages: int | None
    holds_back: bool


def look(engine: TopicEngine, topic: TopicInfo) -> TopicOverview:
    """A topic that was not dropped, as it is now."""
    subscriptions = engine.subscriptions
    found = tuple(look_at_partition(engine, each) for each in engine.partitions(topic))
    damaged = damaged_in(found)
    return TopicOverview(
        topic,
        found,
        tuple(
            SubscriptionOverview(
                info.name,
                info.type,
                subscriptions.lag(info, damaged),
                subscriptions.lost(info, damaged),
            )
            for info in subscriptions.of_topic(topic)
        ),
    )


def damaged_in(partitions: Iterable[PartitionOverview]) -> set[int]:
    """The numbers of those that cannot be looked at."""
    return {each.number for each in partitions if each.error is not None}


def look_at_partition(engine: TopicEngine, partition: Partition) -> PartitionOverview:
    """A partition as it is now."""
    while True:
        try:
            return _look_at(engine, partition)
        except StaleHandleError:
            continue  # a thread has just made its side log
        except DAMAGE as error:
            said = str(error).removeprefix(f"{partition.label}: ")
            return PartitionOverview(partition.number, 0, 0, 0, 0, (), {}, said)


def _look_at(engine: TopicEngine, partition: Partition) -> PartitionOverview:
    found = bounds(engine, partition)
    open_: tuple[OpenTxn, ...] = ()
    waiting: dict[int, int] = {}
    size = sum(len(e.data) for e in engine.tail.entries(partition.id, 0, engine.log.latest()))
    if partition.exists:
        with partition.environment.read() as txn:
            open_ = tuple(partition.log.open_transactions(txn))
            size += sum(segment.bytes for segment in partition.log.segments(txn))
            if partition.side is not None:
                sides = partition.side.open_transactions(txn)
                waiting = {txn_id: side.count for txn_id, side in sides}
                size += sum(side.shared_bytes + side.own_bytes for _, side in sides)
    return PartitionOverview(
        partition.number,
        found.start,
        found.high_watermark,
        found.last_stable_offset,
        size,
        open_,
        waiting,
    )


def sent_to(engine: TopicEngine) -> dict[int, list[SentTo]]:
    """Return what undecided transactions have in topics, by the transaction's local id.

    What a small transaction has sent is in the memory of its process until it commits.
    """
    found: defaultdict[int, list[SentTo]] = defaultdict(list)
    for name in engine.names():
        topic = engine.find(name)
        for partition in () if topic is None else engine.partitions(topic):
            try:
                if not partition.exists:
                    continue
            except DAMAGE:
                continue
            seen = look_at_partition(engine, partition)
            for at, each in enumerate(seen.open):
                found[each.txn_id].append(
                    SentTo(name, seen.number, each.first_offset, None, at == 0)
                )
            for txn_id, count in seen.waiting.items():
                found[txn_id].append(SentTo(name, seen.number, None, count, False))
    return dict(found)
