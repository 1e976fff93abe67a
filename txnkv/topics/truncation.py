"""Truncation: the beginning of a log, or its end, given up as somebody asks.

**Below an offset** what goes is decided, as with retention.

**The end** of a log is cut off with all that knows of it. A message is known in four places: the
log with its indexes and state (LMDB), the tail of every process, the next offset, what
subscriptions have done (status.db). The offsets are never given again: consumers, acks, checkpoints
and copies have them, and would take another message for the one that they know. So the cut leaves a
hole, and it is filled as that of a writer who died:

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
were committed together. Inside of a filler it cuts where that begins.

Producers keep their numbers: what they sent was sent, as with messages that retention took.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import lmdb

from txnkv.core import ControlType, read_control, walk
from txnkv.errors import InvalidTxnStateError, OffsetOutOfRangeError, UnavailableError
from txnkv.storage import declare_fault_point, fault_point
from txnkv.topics import retention, topic_catalog
from txnkv.topics.log import whole
from txnkv.topics.topics import Partition, Topics
from txnkv.topics.write import roll_forward

declare_fault_point("topic.truncated", "the beginning of a log was given up, nobody was told")
declare_fault_point("truncate.cut", "the end of a log is cut off, its offsets are not filled")

_TRIES: Final = 20
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
        kept = retention.kept_from(topics, partition)
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
            kept = retention.kept_from(topics, partition)  # who made one since waits for this
            return kept is None or upto <= kept

        if wanted == end:  # its file has nothing left, and goes
            environment.write(lambda txn: log.roll(txn) if log.end(txn) == end else None)
        if not retention.give_up(topics, partition, wanted, may_go, "truncation"):
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
        for _ in range(_TRIES):
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
        raise OffsetOutOfRangeError(
            f"{_no_cut(partition, last)}it holds [{start}, {end}). Name one of these"
        )
    lost = retention.unacknowledged_in(topics, partition, last + 1, end)

    def cut(txn: lmdb.Transaction) -> bool:
        with topics.store.status.read() as cur:
            waiting = roll_forward.look(topics, cur, partition, last + 1)
            topic_catalog.require_live(cur, partition.topic)
        if waiting.upto != end or waiting.entries:
            return False  # something came since the flush
        kept = retention.kept_from(topics, partition)
        if kept is not None and kept < end:
            raise OffsetOutOfRangeError(f"{_no_cut(partition, last)}{_kept(kept)}")
        _cut_log(txn, partition, last, end)
        retention.count_lost(txn, partition, lost)
        return True

    if not partition.environment.write(cut):
        return False
    retention.tell_lost(topics, partition, lost, f"truncation took messages behind offset {last}")
    return True


def _cut_log(txn: lmdb.Transaction, partition: Partition, last: int, end: int) -> None:
    """Cut a log, or raise what forbids it. Inside of its write transaction."""
    log = partition.log
    last = min(last, _filler_at(txn, partition, last + 1) - 1)
    before = {each.txn_id for each in log.open_transactions(txn)}
    for each in log.open_transactions(txn):
        if each.first_offset > last or _has_batches(txn, partition, each.txn_id, last + 1, end):
            raise InvalidTxnStateError(
                f"{_no_cut(partition, last)}transaction {each.txn_id} is open and has messages "
                f"there, the first at {each.first_offset}. Commit or abort it first"
            )
    at = log.truncate(txn, last + 1)
    if at <= last:
        raise OffsetOutOfRangeError(
            f"{_no_cut(partition, last)}messages from {at} on were committed together with it. "
            f"Truncate after {at - 1}, or behind them"
        )
    if partition.side is not None:
        partition.side.truncate(txn, at)
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
