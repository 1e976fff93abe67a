"""Retention: what a log gives up at its beginning, by age and by size.

Only whole segments go, the oldest first, and only what is decided: never past the last stable
offset, so the messages of an open transaction stay however long it takes.

    segments     [0, 40)  [40, 90)  [90, 130)  [130, 160)        LSO 120
    too old         x         x         x                        the last one is written to
    given up        x         x                                  [90, 130) reaches past the LSO

A segment is too old when its *newest* message is; a log is too large when it would still have
`retention_bytes` without its oldest segment. If even the last segment is too old, another one is
begun first, so an idle log becomes empty.

Readers behind the new start get OffsetOutOfRangeError. What a side log keeps for the messages that
went goes with its next sweep. The order in which a crash can come does not matter: a log that
has given up less than it may gives up the rest next time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import lmdb

from txnkv.coordinator.lease import Lease
from txnkv.storage.seam import declare_fault_point, fault_point
from txnkv.topics.catalog import TopicOptions
from txnkv.topics.messages import now_micros
from txnkv.topics.partition import Partition
from txnkv.topics.segments import NEVER, Segment

if TYPE_CHECKING:
    from txnkv.topics.engine import TopicEngine

declare_fault_point("retention.dropped", "an old segment is taken out of a log, durably")
declare_fault_point("retention.rolled", "the last segment of an idle log is closed, durably")


class Surplus(NamedTuple):
    """What a log may give up.

    Attributes:
        starts: new starts of the log, one for each segment that goes, ascending.
        roll: the last segment is too old, too: it is to be closed, and looked at again.
    """

    starts: list[int]
    roll: bool


def surplus(
    segments: Sequence[Segment], end: int, stable: int, now: int, options: TopicOptions
) -> Surplus:
    """What may go.

    Args:
        segments: of the log, oldest first.
        end: of the log.
        stable: its last stable offset.
        now: microseconds since 1970.
        options: of the topic.
    """
    seconds, most = options.retention_seconds, options.retention_bytes
    oldest = None if seconds is None else now - int(seconds * 1e6)
    total = sum(segment.bytes for segment in segments)
    starts: list[int] = []
    for segment, following in pairwise(segments):
        old = oldest is not None and segment.max_timestamp < oldest
        large = most is not None and total - segment.bytes >= most
        if following.base > stable or not (old or large):
            return Surplus(starts, False)
        starts.append(following.base)
        total -= segment.bytes
    last = segments[-1] if segments else None
    idle = (
        last is not None
        and oldest is not None
        and NEVER < last.max_timestamp < oldest
        and end <= stable
    )
    return Surplus(starts, idle)


def enforce(partition: Partition, check: Callable[[], None] = lambda: None) -> int:
    """Give up what a partition's options do not keep.

    Args:
        partition: of a topic that is not dropped.
        check: called inside each LMDB write; raises to stop.

    Returns:
        How many segments went.
    """
    options = partition.topic.options
    if options.retention_seconds is None and options.retention_bytes is None:
        return 0
    if not partition.exists:
        return 0
    environment, log = partition.environment, partition.log

    def found(txn: lmdb.Transaction) -> Surplus:
        stable = log.last_stable_offset(txn)
        return surplus(log.segments(txn), log.end(txn), stable, now_micros(), options)

    def drop_one(txn: lmdb.Transaction) -> bool:
        check()
        starts = found(txn).starts
        if starts:
            log.advance_start(txn, max(starts[0], log.start(txn)))
        return bool(starts)

    def roll(txn: lmdb.Transaction) -> None:
        check()
        if found(txn).roll:
            log.roll(txn)

    with environment.read() as txn:
        gone, idle = found(txn)
    if idle:
        environment.write(roll)
        fault_point("retention.rolled")
    dropped = 0
    while (gone or idle) and environment.write(drop_one):
        fault_point("retention.dropped")
        dropped += 1
    return dropped


def enforce_all(engine: TopicEngine, check: Callable[[], None] = lambda: None) -> int:
    """`enforce` for every topic of a store. Answers how many segments went."""
    dropped = 0
    for name in engine.names():
        topic = engine.find(name)
        if topic is None:  # dropped meanwhile
            continue
        for partition in engine.partitions(topic):
            dropped += enforce(partition, check)
    return dropped


def checked_by(engine: TopicEngine, lease: Lease) -> Callable[[], None]:
    """Raises LeaseLostError once another process leads."""

    def check() -> None:
        with engine.store.status.read() as cur:
            lease.confirm(cur)

    return check
