"""Messages that a log gives up: by age and by size, and at either end as somebody asks.

**Retention** takes whole segments, the oldest first, and only what is decided: never past the last
stable offset, so the messages of an open transaction stay however long it takes.

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

**Below an offset** (`delete_below`) what goes is decided, as with retention.

**The end** of a log is cut off (`delete_after`) with all that knows of it. A message is known in
four places: the log with its indexes and state (LMDB), the tail of every process, the next offset,
what subscriptions have done (status.db). The offsets are never given again: consumers, acks,
checkpoints and copies have them, and would take another message for the one that they know. So the
cut leaves a hole, and it is filled as that of a writer who died:

    1. flush, complete      nothing of the partition is in any tail
    2. cut                  LMDB: log, indexes, state, side log, what subscriptions lose
       between them         the log ends below the next offset: a hole, which anybody may fill
    3. complete             a filler takes the offsets

A death between 2 and 3 leaves the hole to whoever comes next. End markers that were cut may be
noted in status.db still: their transactions have nothing open in the log, so fillers take their
places, too (`roll_forward`).

What must not be cut is refused, and nothing changes: messages of an open transaction, for they
would be missing when it commits; the end marker of a transaction whose messages stay, for nobody
would write it again and the last stable offset would wait for ever; some messages of those that
were committed together. Inside of a filler it cuts where that begins, or at the start of the log.

Producers keep their numbers: what they sent was sent, as with messages that retention took.
"""

from __future__ import annotations

import logging
import struct
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias

import apsw
import lmdb

from txnkv.coordinator import Lease, aging_micros
from txnkv.core import ControlType, read_control, walk
from txnkv.errors import InvalidTxnStateError, OffsetOutOfRangeError, UnavailableError
from txnkv.storage import declare_fault_point, fault_point
from txnkv.topics import subscription_catalog, topic_catalog
from txnkv.topics.acks import Cursor, ack_rows
from txnkv.topics.log import NEVER, STATE, Segment, whole
from txnkv.topics.ranges import Ranges
from txnkv.topics.read import OffsetReader
from txnkv.topics.subscription_catalog import SubscriptionInfo
from txnkv.topics.topic_catalog import TopicInfo, TopicOptions
from txnkv.topics.topics import Partition, Topics
from txnkv.topics.write import roll_forward

_LITTLE: Final = 4 << 10
"""Bytes of a fetch that looks for one message."""

Lost: TypeAlias = list[tuple[SubscriptionInfo, int]]
"""Subscriptions, and how many messages are taken of them."""

_KEY: Final = struct.Struct(">4sQ")
_COUNT: Final = struct.Struct("<Q")


def count_unacknowledged(
    topics: Topics, partition: Partition, cursor: Cursor, first: int, last: int, isolation: str
) -> int:
    """Offsets in [first, last) that are not deleted, from the first message of each range of them
    on: 0 when all messages are deleted. All of it is in the log, and decided for "read_committed".
    """
    if last <= cursor.mark:
        return 0
    left = Ranges([(max(first, cursor.mark), last)])
    left.difference_update(cursor.deleted)
    return sum(last - at for at, last in _begun_with_messages(topics, partition, left, isolation))


def _begun_with_messages(
    topics: Topics, partition: Partition, ranges: Iterable[tuple[int, int]], isolation: str
) -> Iterator[tuple[int, int]]:
    """Ranges, ascending, each from its first message on, and without those that have none: markers
    are none, and aborted ones. What is read at a time answers all the ranges that lie in it.
    """
    reader = OffsetReader(topics, partition, 0, isolation, _LITTLE)
    offsets: Sequence[int] = ()  # of the messages below the reader's position
    for first, last in ranges:
        if reader.position < first:
            reader.seek(first)
            offsets = ()
        while (at := bisect_left(offsets, first)) == len(offsets):
            if reader.position >= last:
                break
            if reader.load():
                column = reader.take(sys.maxsize).column("offset")
                at, end = 8 * column.offset, 8 * (column.offset + len(column))
                offsets = memoryview(column.buffers()[1])[at:end].cast("Q")
            elif not reader.moved:
                return  # it is at the end
        else:
            if (begin := offsets[at]) < last:
                yield begin, last


def unacknowledged_in(topics: Topics, partition: Partition, first: int, last: int) -> Lost:
    """Subscriptions that have not acknowledged all of [first, last), and how many they have not;
    acks of open transactions do not count.
    """
    found = []
    with topics.store.status.read() as cur:
        subscriptions = subscription_catalog.of_topic(cur, partition.topic)
    for info in subscriptions:
        with topics.store.status.read() as cur:
            mark = ack_rows.mark_delete(cur, info.id, partition.id)
            deleted = ack_rows.deleted_in(cur, info.id, partition.id, first, last)
        if mark is None:
            continue
        cursor = Cursor(mark, deleted)
        if left := count_unacknowledged(topics, partition, cursor, first, last, info.isolation):
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
    newest = segments[-1].max_timestamp if segments else NEVER
    idle = oldest is not None and NEVER < newest < oldest and end <= limit
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
    if not is_limited(partition.topic) or not partition.exists:
        return 0
    environment, log, now = partition.environment, partition.log, aging_now(topics)

    def found(txn: lmdb.Transaction) -> Surplus:
        stable, kept = log.last_stable_offset(txn), kept_from(topics, partition)
        limit = stable if kept is None else min(stable, kept)
        return surplus(log.segments(txn), log.end(txn), limit, now, options)

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


def aging_now(topics: Topics) -> int:
    """`aging_micros`, since 1970."""
    with topics.store.status.read() as cur:
        return aging_micros(cur) + roll_forward.EPOCH_MICROS


def is_limited(topic: TopicInfo) -> bool:
    """Return True where a topic does not retain all of its messages."""
    options = topic.options
    return options.retention_seconds is not None or options.retention_bytes is not None


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
    with topics.store.status.read() as cur:
        least = ack_rows.least_mark(cur, partition.id)
    if least is not None and least < offset:  # what key compaction hides may be read ahead, too
        with topics.store.status.write(sync=False) as cur:  # the leader's sweep does it, too
            raise_marks(cur, partition.id, offset)
    return True


def raise_marks(cur: apsw.Cursor, partition_id: int, start: int) -> None:
    """Delete in all subscriptions what a log has lost: what was read ahead of it is not given any
    more, as each consumer sees with its next look.
    """
    behind: list[Any] = cur.execute(
        "SELECT subscription_id FROM cursors WHERE partition_id = ? AND mark_delete < ?",
        (partition_id, start),
    ).fetchall()
    for (id,) in behind:
        ack_rows.delete(cur, id, partition_id, 0, start)
        cur.execute(
            "UPDATE cursors SET dispatched = max(dispatched, ?) WHERE subscription_id = ? "
            "AND partition_id = ?",
            (start, id, partition_id),
        )
        cur.execute(
            "DELETE FROM leases WHERE subscription_id = ? AND partition_id = ? AND message < ?",
            (id, partition_id, start),
        )
        ack_rows.bump(cur, id)


def enforce_all(
    topics: Topics, check: Callable[[], None] = lambda: None, *, force: bool = False
) -> int:
    """`enforce` for every topic of a store; with `force` also of what is in no log yet. Answers how
    many segments went.
    """
    dropped = 0

    def one(partition: Partition) -> None:
        nonlocal dropped
        if force and is_limited(partition.topic):
            roll_forward.complete(topics, partition)
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


# -- as somebody asks ------------------------------------------------------------------

declare_fault_point("topic.truncated", "the beginning of a log was given up, nobody was told")
declare_fault_point("truncate.cut", "the end of a log is cut off, its offsets are not filled")

_CUT_TRIES: Final = 20
_READ_BYTES: Final = 4 << 20


def delete_below(topics: Topics, partition: Partition, offset: int | None) -> int:
    """Give up the messages below an offset, durably, as somebody asks; only what is decided goes.

    Args:
        topics: of the store.
        partition: of a topic that is not dropped.
        offset: the least that stays; None: all that is decided goes, but for what the topic keeps
            for subscriptions.

    Returns:
        The least offset that is readable now.

    Raises:
        OffsetOutOfRangeError: the partition does not hold the offset; an open transaction has
            messages below it, or the topic keeps some for a subscription. Nothing went.
        NotSupportedError: the topic is a copy.
    """
    topic_catalog.require_writable(partition.topic, "truncate")
    with topics.store.log_cuts():
        roll_forward.complete(topics, partition)
        if not partition.exists:
            if offset:
                raise _out_of_range(partition, 0, 0, offset)
            return 0
        environment, log = partition.environment, partition.log
        with environment.read() as txn:
            start, end, stable = log.start(txn), log.end(txn), log.last_stable_offset(txn)
        kept = kept_from(topics, partition)
        limit = stable if kept is None else min(stable, kept)
        wanted = limit if offset is None else offset
        if not 0 <= wanted <= end:
            raise _out_of_range(partition, start, end, wanted)
        if wanted > limit:
            raise OffsetOutOfRangeError(
                f"{partition.label} cannot be truncated to {wanted}: "
                + (
                    f"an open transaction has messages from {stable} on; end it first"
                    if limit == stable
                    else _kept(kept)
                )
            )
        if wanted <= start:
            return start

        def may_go(txn: lmdb.Transaction, upto: int) -> bool:
            kept = kept_from(topics, partition)  # who made one since waits for this
            return kept is None or upto <= kept

        if wanted == end:  # its file has nothing left, and goes
            environment.write(lambda txn: log.roll(txn) if log.end(txn) == end else None)
        if not give_up(topics, partition, wanted, may_go, "truncation"):
            return start
        fault_point("topic.truncated")
        return wanted


def delete_after(
    topics: Topics, partition: Partition, last: int, flush: Callable[[], object]
) -> int:
    """Give up the messages behind an offset, durably, as somebody asks.

    Args:
        topics: of the store.
        partition: of a topic that is not dropped.
        last: the offset of the last message that stays.
        flush: writes what small transactions committed out of memory, in all processes.

    Returns:
        The end of the log: the offset that the next message gets. None is given again.

    Raises:
        OffsetOutOfRangeError: the log does not hold the offset; messages on both sides of the cut
            were committed together; or the topic keeps some for a subscription. Nothing was cut.
        InvalidTxnStateError: it would take messages of an open transaction, or leave those of one
            that has ended without their end. Nothing was cut.
        NotSupportedError: the topic is a copy.
        UnavailableError: others wrote all the time. Nothing was cut; try again.
    """
    topic_catalog.require_writable(partition.topic, "truncate")
    with topics.store.log_cuts():
        for _ in range(_CUT_TRIES):
            flush()
            end = roll_forward.complete(topics, partition)
            if last + 1 == end:
                return end
            if _cut(topics, partition, last, end):
                fault_point("truncate.cut")
                return roll_forward.complete(topics, partition)
    raise UnavailableError(
        f"{_no_cut(partition, last)}others write to it all the time. Nothing was cut, try again "
        "when they are done"
    )


def _cut(topics: Topics, partition: Partition, last: int, end: int) -> bool:
    """Cut what is behind `last`; tell whether the log had its end there."""
    start = 0
    if partition.exists:
        with partition.environment.read() as txn:
            start = partition.log.start(txn)
    if not start <= last + 1 < end:
        there = f"[{start}, {end}). Name one of these" if start < end else "no messages"
        raise OffsetOutOfRangeError(f"{_no_cut(partition, last)}it holds {there}")
    lost = unacknowledged_in(topics, partition, last + 1, end)

    def cut(txn: lmdb.Transaction) -> bool:
        with topics.store.status.read() as cur:
            waiting = roll_forward.look(topics, cur, partition, last + 1)
            topic_catalog.require_live(cur, partition.topic)
        if waiting.upto != end or waiting.entries:
            return False  # something came since the flush
        kept = kept_from(topics, partition)
        if kept is not None and kept < end:
            raise OffsetOutOfRangeError(f"{_no_cut(partition, last)}{_kept(kept)}")
        _cut_log(txn, partition, last, end)
        count_lost(txn, partition, lost)
        return True

    if not partition.environment.write(cut):
        return False
    tell_lost(topics, partition, lost, f"truncation took messages behind offset {last}")
    return True


def _cut_log(txn: lmdb.Transaction, partition: Partition, last: int, end: int) -> None:
    """Cut a log, or raise what forbids it. Inside of its write transaction."""
    log = partition.log
    start = log.start(txn)
    last = max(min(last, _filler_at(txn, partition, last + 1) - 1), start - 1)
    before = {each.txn_id for each in log.open_transactions(txn)}
    for each in log.open_transactions(txn):
        if each.first_offset > last or _has_batches(txn, partition, each.txn_id, last + 1, end):
            raise InvalidTxnStateError(
                f"{_no_cut(partition, last)}transaction {each.txn_id} is open and has messages "
                f"there, the first at {each.first_offset}. Commit or abort it first"
            )
    at = log.truncate(txn, last + 1)
    if (least := max(at, start)) <= last:
        raise OffsetOutOfRangeError(
            f"{_no_cut(partition, last)}messages from {least} on were committed together with it. "
            f"Truncate after {least - 1}, or behind them"
        )
    if partition.side is not None:
        partition.side.truncate(txn, at)
    if at < start:  # the start was inside of that batch; it does not go back
        log.put(txn, roll_forward.fillers(at, start))
        log.advance_start(txn, start)
    for each in log.open_transactions(txn):
        if each.txn_id not in before:
            raise InvalidTxnStateError(
                f"{_no_cut(partition, last)}transaction {each.txn_id} began at "
                f"{each.first_offset} and ended behind it. Truncate after {each.first_offset - 1} "
                "or below, or behind its end"
            )


def _no_cut(partition: Partition, last: int) -> str:
    return f"{partition.label} cannot be truncated after {last}: "


def _filler_at(txn: lmdb.Transaction, partition: Partition, offset: int) -> int:
    """Return where the filler begins that holds an offset; the offset, if none does."""
    found = b"".join(whole(part) for part in partition.log.read(txn, offset, 1, raw=True))
    for at, header in walk(found)[:1]:
        if header.is_control and read_control(found, at).type == ControlType.FILLER:
            return header.base_offset
    return offset


def _has_batches(
    txn: lmdb.Transaction, partition: Partition, txn_id: int, offset: int, end: int
) -> bool:
    while offset < end:
        for part in partition.log.read(txn, offset, _READ_BYTES, raw=True):
            checked = whole(part)
            for _, header in walk(checked):
                offset = header.next_offset
                if header.txn_id == txn_id and not header.is_control:
                    return True
            if len(checked) < len(part):
                break  # the next read begins with what is damaged
    return False


def _kept(kept: int | None) -> str:
    return (
        f"it keeps what is not acknowledged, from {kept} on; acknowledge that, drop the "
        "subscription, or alter the topic with retain_unacknowledged=False"
    )


def _out_of_range(partition: Partition, start: int, end: int, offset: int) -> OffsetOutOfRangeError:
    return OffsetOutOfRangeError(
        f"{partition.label} holds [{start}, {end}): it cannot be truncated to {offset}. Name one "
        "of these, or the end"
    )
