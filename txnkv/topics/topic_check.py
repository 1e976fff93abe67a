"""Checks that the logs of topics are what status.db says, batch by batch and together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any, Final

from txnkv.coordinator import DAMAGE, status_table
from txnkv.core import CoreError, check_batch, walk
from txnkv.errors import CorruptionError, StoreNotFoundError, TxnkvError
from txnkv.topics import end_markers, topic_catalog
from txnkv.topics.acks import SubscriptionInfo
from txnkv.topics.delivery import held_messages
from txnkv.topics.log import log_check
from txnkv.topics.partition import Partition
from txnkv.topics.partition_participants import open_in
from txnkv.topics.read import OffsetReader, bounds
from txnkv.topics.sidecar import side_problems
from txnkv.topics.tail import TailEntry
from txnkv.topics.topic_engine import TopicEngine
from txnkv.topics.topics import Topics


def stats(engine: TopicEngine) -> dict[str, Any]:
    """Numbers about each topic, by name; sizes in bytes."""
    return {name: _topic_stats(engine, name) for name in engine.names()}


def _topic_stats(engine: TopicEngine, name: str) -> dict[str, Any]:
    topic = engine.get(name)
    latest = engine.log.latest()
    partitions = engine.partitions(topic)
    found = [_partition_stats(engine, partition, latest) for partition in partitions]
    damaged = [each.number for each, of in zip(partitions, found, strict=True) if of["damaged"]]
    return {
        "buffer": topic.buffer,
        "partitions": len(found),
        "offsets": sum(each["next_offset"] - each["start"] for each in found),
        "bytes": sum(each["bytes"] for each in found),
        "tail_bytes": sum(each["tail_bytes"] for each in found),
        "open_transactions": sum(each["open"] for each in found),
        "segments": sum(each["segments"] for each in found),
        "damaged": damaged,
        "subscriptions": {
            info.name: subscription_stats(engine, info, damaged)
            for info in engine.subscriptions.of_topic(topic)
        },
    }


def subscription_stats(
    engine: TopicEngine, info: SubscriptionInfo, but: Collection[int] = ()
) -> dict[str, Any]:
    """Numbers about a subscription: what is left to do, and how much of it somebody has; without
    some partitions.
    """
    found = held_messages(engine, info)
    counts = Counter({"leased": 0, "free": 0, "pending": 0, "kept": 0})
    for each in found.held:
        counts[each.state] += each.last - each.first
    return {
        "type": info.type,
        "lag": sum(engine.subscriptions.lag(info, but).values()),
        "lost": sum(engine.subscriptions.lost(info, but).values()),
        "consumer_pid": found.consumer_pid,
        **counts,
    }


def _partition_stats(engine: TopicEngine, partition: Partition, latest: Any) -> dict[str, int]:
    tail = engine.tail.entries(partition.id, 0, latest)
    numbers = {
        "next_offset": engine.look(partition.id).next_offset,
        "tail_bytes": sum(len(entry.data) for entry in tail),
        "start": 0,
        "bytes": 0,
        "open": 0,
        "segments": 0,
        "damaged": 0,
    }
    if not partition.exists:
        return numbers
    try:
        log = partition.log
        with partition.environment.read() as txn:
            segments = log.segments(txn)
            return numbers | {
                "start": log.start(txn),
                "bytes": sum(segment.bytes for segment in segments),
                "open": len(log.open_transactions(txn)),
                "segments": len(segments),
            }
    except DAMAGE:
        return numbers | {"start": numbers["next_offset"], "damaged": 1}


def partition_ids(engine: TopicEngine) -> list[int]:
    """Partitions of topics that were not dropped."""
    with engine.store.status.read() as cur:
        return sorted(topic_catalog.live_partitions(cur))


def check_partition(engine: TopicEngine, id: int) -> Iterator[str]:
    """Read every batch of a partition, in its log and in its tail.

    Yields:
        What is wrong, one line each.
    """
    partition = engine.partition(id)
    if partition is None:
        return
    try:
        latest = engine.log.latest()
        # The tail first: what leaves it meanwhile is in the log by then.
        entries = engine.tail.entries(id, 0, latest)
        end = 0
        if partition.exists:
            with partition.environment.read() as txn:
                end = partition.log.end(txn)
                for problem in log_check.problems(partition.log, txn):
                    yield f"{partition.label}: {problem}"
                if partition.side is not None:
                    for problem in side_problems(partition.side, partition.log, txn):
                        yield f"{partition.label}: {problem}"
        with engine.store.status.read() as cur:
            upto = topic_catalog.next_offset(cur, id)
            noted = end_markers.between(cur, id, end, upto)
    except StoreNotFoundError:
        return  # dropped meanwhile
    except TxnkvError as error:
        yield f"{partition.label}: {error}"
        return
    for problem in _unknown(engine, partition):
        yield f"{partition.label}: {problem}"
    if entries and entries[-1].next_offset > upto:
        given = entries[-1].next_offset - 1
        yield f"{partition.label}: a small commit has offset {given}, the next one is {upto}"
    if end > upto and partition.topic.options.replica_of is None:
        yield f"{partition.label}: its log ends at {end}, above the next offset, {upto}"
    for problem in _tail(entries, [(m.first_offset, m.next_offset) for m in noted]):
        yield f"{partition.label}: {problem}"
    for problem in value_problems(engine, partition):
        yield f"{partition.label}: {problem}"


def _unknown(engine: TopicEngine, partition: Partition) -> Iterator[str]:
    """Transactions that a log has open and nobody will end."""
    if partition.topic.options.replica_of is not None:
        return  # they are another store's
    ended = []
    there = open_in(partition)
    with engine.store.status.read() as cur:
        for txn_id in there:
            row = status_table.find(cur, txn_id)
            if (row is None or row.state.ended) and not end_markers.is_noted(
                cur, partition.id, txn_id
            ):
                ended.append((txn_id, "does not know it" if row is None else row.state.name))
    # Its marker was in the log before status.db forgot it: one that is open still has none.
    still = open_in(partition) if ended else {}
    for txn_id, said in ended:
        if txn_id in still:
            yield (
                f"transaction {txn_id} is open in its log, by status.db: {said}. Readers may wait "
                "for it; `txnkv txn abort` ends one that is not known"
            )


def _tail(entries: list[TailEntry], noted: list[tuple[int, int]]) -> Iterator[str]:
    taken = [(entry.base_offset, entry.next_offset) for entry in entries]
    before = 0
    for first, following in sorted(taken + noted):
        if first < before:
            yield f"offset {first} was given twice"
        before = following
    for entry in entries:
        try:
            for at, header in walk(entry.data):
                check_batch(entry.data, at)
                if header.commit_ts != entry.stamp:
                    yield f"the batch at {header.base_offset} is of another commit"
        except CoreError as error:
            yield f"in the commit log, at offset {entry.base_offset}: {error}"


_ROWS: Final = 1 << 16


def value_problems(topics: Topics, partition: Partition) -> Iterator[str]:
    """Yield what is wrong with the values of a partition, one line each.

    It ends with the first batch that is damaged itself, which others report.
    """
    codec = partition.topic.options.codec
    if codec is None:
        return
    try:
        offset = bounds(topics, partition).start
        reader = OffsetReader(topics, partition, offset, "read_uncommitted")
        while reader.load() or reader.moved:
            if reader.moved:
                continue
            rows = reader.take(_ROWS)
            try:
                codec.decode(rows.column("value"))
            except CorruptionError as error:
                yield f"from offset {rows.column('offset')[0]} on: {error}"
    except TxnkvError:
        return  # damaged, or gone meanwhile
