"""Truncation: cutting the end of a log off, with all that knows of it.

A message is known in five places: the log and its indexes and state (LMDB), the tail of every
process, the next offset, what subscriptions have done, what producers have sent (status.db).
LMDB and status.db cannot change in one step, so the order is one in which every moment is a
sound store:

    1. flush            nothing of the partition is in any tail
    2. cut              LMDB: log, indexes, state, side logs
       between them     the log ends below the next offset: a hole, which anybody may fill
    3. lower            status.db, under LMDB's lock, if nobody filled the hole: next offset,
                        producers

A death between 2 and 3 leaves the hole: its offsets are filled and not given again. Truncating
once more does the rest.

A partition with subscriptions is not lowered at all: a consumer may hold a message that is cut,
and its ack, coming later, would delete another one under the same offset. So the hole is filled.

What must not be cut is refused, and nothing changes: messages of an open transaction, for they
would be missing when it commits; the end marker of a transaction whose messages stay, for nobody
would write it again and the last stable offset would wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import lmdb

from txnkv.coordinator import one
from txnkv.core import walk
from txnkv.errors import InvalidTxnStateError, OffsetOutOfRangeError, UnavailableError
from txnkv.storage import declare_fault_point, fault_point
from txnkv.topics import topic_catalog
from txnkv.topics.log import whole
from txnkv.topics.partition import Partition
from txnkv.topics.topics import Topics
from txnkv.topics.write import producers, roll_forward

declare_fault_point("truncate.cut", "the end of a log is cut off, the next offset is as it was")
declare_fault_point("truncate.lowered", "the next offset is lowered to the end of a cut log")

_TRIES: Final = 20
_READ_BYTES: Final = 4 << 20


class _Cut(NamedTuple):
    """The result of a cut: the new end of the log, and the next offset as it was."""

    end: int
    next_offset: int


def truncate(topics: Topics, partition: Partition, offset: int, flush: Callable[[], object]) -> int:
    """Cut the end of a partition's log off.

    Args:
        topics: of the store.
        partition: of a topic that is not dropped.
        offset: of the first message that goes. Batches, and what a transaction put into a side
            log, go whole: if one of them holds it, all of that goes.
        flush: writes what small transactions committed out of memory, in all processes.

    Returns:
        The end of the log now: where it was cut, or behind offsets that are not given again.

    Raises:
        OffsetOutOfRangeError: the log does not hold the offset. Nothing was cut.
        InvalidTxnStateError: it would take messages of an open transaction, or leave those of one
            that has ended without their end. Nothing was cut.
        UnavailableError: others wrote all the time. Nothing was cut; try again.
    """
    for _ in range(_TRIES):
        flush()
        roll_forward.complete(topics, partition)
        cut = partition.environment.write(lambda txn: _cut(topics, txn, partition, offset))
        if cut is not None:
            fault_point("truncate.cut")
            break
    else:
        raise UnavailableError(
            f"{partition.label} cannot be truncated to {offset}: others write to it all the time. "
            "Nothing was cut, try again when they are done"
        )
    lowered = partition.environment.write(lambda txn: _lower(topics, txn, partition, cut))
    fault_point("truncate.lowered")
    return cut.end if lowered else roll_forward.complete(topics, partition)


def _cut(topics: Topics, txn: lmdb.Transaction, partition: Partition, offset: int) -> _Cut | None:
    log = partition.log
    start, end = log.start(txn), log.end(txn)
    if not start <= offset <= end:
        raise OffsetOutOfRangeError(
            f"{partition.label} holds [{start}, {end}): it cannot be truncated to {offset}"
        )
    with topics.store.status.read() as cur:
        waiting = roll_forward.look(topics, cur, partition, offset)
        topic_catalog.require_live(cur, partition.topic)
    if waiting.upto != end or waiting.entries:
        return None  # something came since the flush
    before = {each.txn_id: each for each in log.open_transactions(txn)}
    for each in log.open_transactions(txn):
        if each.first_offset >= offset or _has_batches(txn, partition, each.txn_id, offset, end):
            raise InvalidTxnStateError(
                f"{partition.label} cannot be truncated to {offset}: transaction {each.txn_id} is "
                f"open and has messages there, the first at {each.first_offset}. Commit or abort "
                "it first"
            )
    cut = log.truncate(txn, offset)
    if partition.side is not None:
        partition.side.truncate(txn, cut)
    for each in log.open_transactions(txn):
        if each.txn_id not in before:
            raise InvalidTxnStateError(
                f"{partition.label} cannot be truncated to {offset}: transaction {each.txn_id} "
                f"began at {each.first_offset} and ended behind it. Truncate to "
                f"{each.first_offset} or below, or behind its end"
            )
    return _Cut(cut, end)


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


def _lower(topics: Topics, txn: lmdb.Transaction, partition: Partition, cut: _Cut) -> bool:
    """Lower the next offset to the end after a cut; tell whether it is that now."""
    if partition.log.end(txn) != cut.end:
        return False
    with topics.store.status.write() as cur:
        producers.truncate(cur, partition.id, cut.end, cut.next_offset)
        (subscribed,) = one(
            cur, "SELECT EXISTS (SELECT 1 FROM cursors WHERE partition_id = ?)", (partition.id,)
        )
        if subscribed or topic_catalog.next_offset(cur, partition.id) != cut.next_offset:
            return False
        cur.execute("UPDATE partitions SET next_offset = ? WHERE id = ?", (cut.end, partition.id))
        cur.execute(
            "DELETE FROM end_markers WHERE partition_id = ? AND first_offset >= ?",
            (partition.id, cut.end),
        )
    return True
