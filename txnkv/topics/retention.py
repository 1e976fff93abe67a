"""Retention: what a log gives up at its beginning, by age and by size.

Only whole segments go, the oldest first, and only what is decided: never past the last stable
offset, so the messages of an open transaction stay however long it takes.

    segments     [0, 40)  [40, 90)  [90, 130)  [130, 160)        LSO 120
    too old         x         x         x                        the last one is written to
    given up        x         x                                  [90, 130) reaches past the LSO

A segment is too old when its *newest* message is; a log is too large when it would still have
`retention_bytes` without its oldest segment. If even the last segment is too old, another one is
begun first, so an idle log becomes empty.

What a subscription has not acknowledged goes, too, and is counted and warned of; in a topic with
`retain_unacknowledged` it stays: the limit is then the least mark of its cursors, if that is below
the LSO. It is read under LMDB's write lock, and who makes or moves a subscription waits for that
lock once its cursors are there (`await_cuts`): a cut that did not see them is done by then.

Readers behind the new start get OffsetOutOfRangeError. What a side log keeps for the messages that
went goes with its next sweep. The order in which a crash can come does not matter: a log that
has given up less than it may gives up the rest next time.

A count of what each subscription has lost lies in the partition's database `state`, under "lost" +
the id of the subscription (u64 big-endian), as u64 little-endian. It changes in the LMDB
transaction that takes the messages, so that it counts each of them once, whoever dies.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias

import lmdb

from txnkv.coordinator import Lease
from txnkv.storage import declare_fault_point, fault_point
from txnkv.topics import subscription_catalog
from txnkv.topics.acks import Cursor, ack_rows
from txnkv.topics.log import NEVER, STATE, Segment
from txnkv.topics.messages import now_micros
from txnkv.topics.ranges import Ranges
from txnkv.topics.read import OffsetReader
from txnkv.topics.subscription_catalog import SubscriptionInfo
from txnkv.topics.topic_catalog import TopicOptions
from txnkv.topics.topics import Partition, Topics

_LITTLE: Final = 4 << 10
"""Bytes of a fetch that looks for one message."""

Lost: TypeAlias = list[tuple[SubscriptionInfo, int]]
"""Subscriptions, and how many messages are taken of them."""

_KEY: Final = struct.Struct(">4sQ")
_COUNT: Final = struct.Struct("<Q")


def count_unacknowledged(
    topics: Topics, partition: Partition, cursor: Cursor, first: int, last: int
) -> int:
    """Offsets in [first, last) that are not deleted, from the first message of each range of them
    on: 0 when all messages are deleted. All of it is decided, and in the log.
    """
    left = Ranges([(max(first, cursor.mark), last)])
    left.difference_update(cursor.deleted)
    return sum(last - _next_message(topics, partition, first, last) for first, last in left)


def _next_message(topics: Topics, partition: Partition, first: int, last: int) -> int:
    """The first message in [first, last), or its end: markers and aborted ones are none."""
    reader = OffsetReader(topics, partition, first, "read_committed", _LITTLE)
    rows = next(reader.batches(last, 1), None)
    return last if rows is None else int(rows.column("offset")[0].as_py())


def unacknowledged_in(topics: Topics, partition: Partition, first: int, last: int) -> Lost:
    """Subscriptions that have not acknowledged all of [first, last), and how many they have not;
    acks of open transactions do not count.
    """
    found = []
    with topics.store.status.read() as cur:
        subscriptions = subscription_catalog.of_topic(cur, partition.topic)
    for info in subscriptions:
        with topics.store.status.read() as cur:
            cursor = ack_rows.load_cursors(cur, info.id).get(partition.id)
        left = 0 if cursor is None else count_unacknowledged(topics, partition, cursor, first, last)
        if left:
            found.append((info, left))
    return found


def count_lost(txn: lmdb.Transaction, partition: Partition, lost: Lost) -> None:
    """Count what the LMDB transaction takes."""
    db = partition.environment.db(STATE)
    for info, more in lost:
        total = _lost_count(txn, db, info.id) + more
        txn.put(_KEY.pack(b"lost", info.id), _COUNT.pack(total), db=db)


def tell_lost(topics: Topics, partition: Partition, lost: Lost, taken: str) -> None:
    """Warn of what was taken."""
    for info, count in lost:
        topics.coordinator.metrics.messages_lost_to_retention.add(count)
        _log.warning(
            "%s: %s that %s had not acknowledged, %d of them. Keep messages longer, drop the "
            "subscription, or give the topic retain_unacknowledged=True",
            partition.label, taken, info, count,
        )  # fmt: skip


def lost_messages(partition: Partition, subscription_id: int) -> int:
    """Count the messages that a subscription had not acknowledged when they were taken."""
    if not partition.exists:
        return 0
    with partition.environment.read() as txn:
        if not partition.environment.has(STATE):
            return 0
        return _lost_count(txn, partition.environment.db(STATE), subscription_id)


def _lost_count(txn: lmdb.Transaction, db: Any, subscription_id: int) -> int:
    found = txn.get(_KEY.pack(b"lost", subscription_id), db=db)
    return 0 if found is None else int(_COUNT.unpack(found)[0])


_log: Final = logging.getLogger("txnkv")

declare_fault_point("retention.dropped", "an old segment is taken out of a log, durably")
declare_fault_point("retention.rolled", "the last segment of an idle log is closed, durably")


class Surplus(NamedTuple):
    """The segments that a log may give up.

    Attributes:
        starts: new starts of the log, one for each segment that goes, ascending.
        roll: the last segment is too old, too: it is to be closed, and looked at again.
    """

    starts: list[int]
    roll: bool


def surplus(
    segments: Sequence[Segment], end: int, limit: int, now: int, options: TopicOptions
) -> Surplus:
    """Find the segments that may go.

    Args:
        segments: of the log, oldest first.
        end: of the log.
        limit: nothing at or above it goes.
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
        if following.base > limit or not (old or large):
            return Surplus(starts, False)
        starts.append(following.base)
        total -= segment.bytes
    last = segments[-1] if segments else None
    idle = (
        last is not None
        and oldest is not None
        and NEVER < last.max_timestamp < oldest
        and end <= limit
    )
    return Surplus(starts, idle)


def kept_from(topics: Topics, partition: Partition) -> int | None:
    """From where on a topic keeps messages for subscriptions; None: it keeps none for them."""
    if not partition.topic.options.retain_unacknowledged:
        return None
    with topics.store.status.read() as cur:
        return ack_rows.least_mark(cur, partition.id)


def await_cuts(partitions: Sequence[Partition]) -> None:
    """From here on, nothing goes that cursors which are in status.db now still need."""
    for partition in partitions:
        if partition.topic.options.retain_unacknowledged and partition.exists:
            partition.environment.write(lambda _: None)


def enforce(topics: Topics, partition: Partition, check: Callable[[], None] = lambda: None) -> int:
    """Give up what a partition's options do not keep.

    Args:
        topics: of the store.
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
        stable, kept = log.last_stable_offset(txn), kept_from(topics, partition)
        limit = stable if kept is None else min(stable, kept)
        return surplus(log.segments(txn), log.end(txn), limit, now_micros(), options)

    def look() -> Surplus:
        with environment.read() as txn:
            return found(txn)

    def roll(txn: lmdb.Transaction) -> None:
        check()
        if found(txn).roll:
            log.roll(txn)

    def may_go(txn: lmdb.Transaction, offset: int) -> bool:
        check()
        return offset in found(txn).starts

    if look().roll:
        environment.write(roll)
        fault_point("retention.rolled")
    dropped = 0
    while (starts := look().starts) and give_up(topics, partition, starts[0], may_go):
        fault_point("retention.dropped")
        dropped += 1
    return dropped


def give_up(
    topics: Topics,
    partition: Partition,
    offset: int,
    may_go: Callable[[lmdb.Transaction, int], bool],
    by: str = "retention",
) -> bool:
    """Make an offset the start of a log, count what subscriptions lose by it, and warn of that.

    Args:
        topics: of the store.
        partition: of a topic that is not dropped.
        offset: all below is decided, and in the log.
        may_go: called inside the LMDB write: whether what is below the offset may go.
        by: what takes them, for the warning.

    Returns:
        Whether it went.
    """
    with partition.environment.read() as txn:
        start = partition.log.start(txn)
    lost = unacknowledged_in(topics, partition, start, offset)

    def cut(txn: lmdb.Transaction) -> bool:
        if not may_go(txn, offset):
            return False
        partition.log.advance_start(txn, max(offset, partition.log.start(txn)))
        count_lost(txn, partition, lost)
        return True

    if not partition.environment.write(cut):
        return False
    tell_lost(topics, partition, lost, f"{by} took messages below offset {offset}")
    return True


def enforce_all(topics: Topics, check: Callable[[], None] = lambda: None) -> int:
    """`enforce` for every topic of a store. Answers how many segments went."""
    dropped = 0

    def one(partition: Partition) -> None:
        nonlocal dropped
        dropped += enforce(topics, partition, check)

    for name in topics.names():
        topic = topics.find(name)
        if topic is not None:  # else dropped meanwhile
            topics.partitions(topic)  # they have its options from here on
            topics.each(topic.partitions, "retention", one)
    return dropped


def checked_by(topics: Topics, lease: Lease) -> Callable[[], None]:
    """Raises LeaseLostError once another process leads."""

    def check() -> None:
        with topics.store.status.read() as cur:
            lease.confirm(cur)

    return check
