"""Bringing a log up to the offsets that were given: by whoever has its write lock.

Offsets are given in status.db, the log is written later. What lies between its end and the next
offset is one of three, and all processes see it alike:

    status.db     next offset                                        58
    LMDB          [ 0 ...... 40 )
    tail                     [ 40-41 ]        [ 45-49 ]                   small commits
    end markers                      [ 42 ]            [ 50 ]             decided, unmarked
    nobody                               [ 43-44 ]          [ 51-57 ]     reserved by the dead

Offsets for batches that go to LMDB directly are reserved under LMDB's write lock, and written
before it is given back. So who holds that lock and finds offsets that are neither in the tail
nor an end marker's knows that their owner died, or failed: a filler takes their place.

All of it is durable in status.db before the log's commit is.

**After a power loss** (`regain`) a log may have offsets that status.db does not know to be given.
An append is durable in its log while the reservation of its offsets is still on the way to the
disk (`append`), and the power may go just then:

    status.db     next offset            58           the reservation of [58, 64) is lost
    LMDB          [ 0 .................. 58 ..... 64 )

Nobody was told that these messages are there, and somebody may have read them. So they stay, and
what their reservation had said is said again: the next offset, and a clock that is not behind
their commit. Whoever opens the store first after the machine was started does it, before it gives
an offset to anybody; in a store in use a log never ends above its next offset.

**Truncation** cuts the end of a log off, with all that knows of it. A message is known in five
places: the log and its indexes and state (LMDB), the tail of every process, the next offset, what
subscriptions have done, what producers have sent (status.db). LMDB and status.db cannot change in
one step, so the order is one in which every moment is a sound store:

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

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, NamedTuple

import apsw
import lmdb

from txnkv.coordinator import DAMAGE, EPOCH, Key, Timestamp, held, one, payload, reach
from txnkv.core import ControlType, encode_control, place, walk
from txnkv.errors import (
    CorruptionError,
    InvalidTxnStateError,
    OffsetOutOfRangeError,
    TxnkvError,
    UnavailableError,
)
from txnkv.storage import clock, declare_fault_point, fault_point
from txnkv.topics import topic_catalog
from txnkv.topics.log import whole
from txnkv.topics.tail import (
    EndMarker,
    TailEntry,
    forget_markers,
    marked_partitions,
    markers_between,
)
from txnkv.topics.topics import Partition, Topics
from txnkv.topics.write import producers

declare_fault_point("log.completed", "what waited for a log is in it, durable")

EPOCH_MICROS = int(EPOCH.timestamp()) * 1_000_000
_MOST = (1 << 31) - 1
"""Offsets that one filler may take: what a batch can count."""
_MOST_FILLERS = 1024
"""Fillers in one hole, at most: nobody reserves that much, so a longer one is damage."""


class LogGap(NamedTuple):
    """Entries and markers that a log lacks, in one look at status.db under the log's write lock.

    Attributes:
        upto: the log ends there when all of it is written.
        entries: of the tail.
        markers: to be written.
    """

    upto: int
    entries: list[TailEntry]
    markers: list[EndMarker]


def look(topics: Topics, cur: apsw.Cursor, partition: Partition, end: int) -> LogGap:
    """Find what lies between `end`, where the log ends, and the next offset.

    Args:
        topics: of the topics.
        cur: of a read or a write of status.db, begun under the log's write lock.
        partition: the partition.
        end: of its log.

    Raises:
        CorruptionError: a small commit that is to be written is damaged in the commit log.
    """
    # Also commits that are not durable yet are taken in: they are before this log's commit is.
    latest = topics.log.catch_up(cur)
    upto = topic_catalog.next_offset(cur, partition.id)
    entries = topics.tail.entries(partition.id, end, latest)
    while entries and entries[-1].base_offset >= upto:  # memory may be ahead of this view
        entries.pop()
    damaged = topics.tail.damaged(partition.id)
    for entry in entries if damaged else ():
        if entry.stamp in damaged:
            error = damaged[entry.stamp]
            raise CorruptionError(f"{partition.label}: {error}{held.accept_loss(partition.part)}")
    return LogGap(upto, entries, markers_between(cur, partition.id, end, upto))


def write(txn: lmdb.Transaction, partition: Partition, waiting: LogGap) -> None:
    """Write what a log lacks. Inside its write transaction, the one that `end` was asked in."""
    log = partition.log
    plain: list[bytes] = []
    for piece in _in_order(log.end(txn), waiting):
        if isinstance(piece, bytes):
            plain.append(piece)
            continue
        if piece.type != ControlType.SIDE_LIST:
            plain.append(_end_marker(piece))
            continue
        if plain:
            log.put(txn, plain)
        plain = []
        _write_side_list(txn, partition, piece)
    if plain:
        log.put(txn, plain)


def complete(topics: Topics, partition: Partition) -> int:
    """Bring a log up to the next offset; any process may, at any time.

    Not inside a transaction on the partition's environment.

    Returns:
        The end of the log.

    Raises:
        StorageFullError: the disk is full; nothing changed.
    """
    if topics.store.directory.read_only:
        if not partition.exists:
            return 0
        with partition.environment.read() as txn:
            return partition.log.end(txn)

    def bring_up(txn: lmdb.Transaction) -> int:
        end = partition.log.end(txn)
        with topics.store.status.read() as cur:  # what it sees is durable when it ends
            waiting = look(topics, cur, partition, end)
        write(txn, partition, waiting)
        return max(waiting.upto, end)

    reached = partition.environment.write(bring_up)
    fault_point("log.completed")
    return reached


def _in_order(end: int, waiting: LogGap) -> Iterator[bytes | EndMarker]:
    """All pieces from `end` on, by offset, without a gap."""
    pieces: list[TailEntry | EndMarker] = [*waiting.entries, *waiting.markers]
    pieces.sort(key=_start)
    at = end
    for piece in pieces:
        yield from fillers(at, _start(piece))
        at = piece.next_offset
        yield piece.data if isinstance(piece, TailEntry) else piece
    yield from fillers(at, waiting.upto)


def _start(piece: TailEntry | EndMarker) -> int:
    return piece.base_offset if isinstance(piece, TailEntry) else piece.first_offset


def fillers(at: int, upto: int, timestamp: int | None = None) -> Iterator[bytes]:
    """Batches that take [at, upto) and hold nothing.

    Args:
        timestamp: of each, microseconds since 1970; None: now.

    Raises:
        CorruptionError: nobody ever reserves so many offsets.
    """
    if timestamp is None:
        timestamp = clock.now_micros() + EPOCH_MICROS
    if upto - at > _MOST * _MOST_FILLERS:
        raise CorruptionError(
            f"offsets [{at}, {upto}) of a log were given to nobody, more than anybody reserves: "
            "status.db is damaged. Check the store, or restore it from a backup"
        )
    while at < upto:
        count = min(upto - at, _MOST)
        yield place(encode_control(ControlType.FILLER, count=count, timestamp=timestamp), at)
        at += count


def _end_marker(marker: EndMarker, timestamp: int | None = None, body: bytes = b"") -> bytes:
    if timestamp is None:
        timestamp = Timestamp(marker.commit_ts).micros + EPOCH_MICROS
    return place(
        encode_control(
            ControlType(marker.type),
            txn_id=marker.txn_id,
            count=marker.count,
            timestamp=timestamp,
            low_water_mark=marker.low_water_mark,
            first_offset=marker.txn_first_offset,
            body=body,
        ),
        marker.first_offset,
        0 if marker.type == ControlType.ABORT else marker.commit_ts,
    )


def _write_side_list(txn: lmdb.Transaction, partition: Partition, marker: EndMarker) -> None:
    side = partition.side
    assert side is not None, f"{partition.label} has no side log"
    # As old as the messages it stands for: retention goes by that.
    timestamp = side.max_timestamp(txn, marker.txn_id)
    body = side.marker_body(txn, marker.txn_id)
    if not body:  # the note of a marker came back that was cut off the log
        partition.log.put(txn, fillers(marker.first_offset, marker.next_offset))
        return
    partition.log.put(txn, [_end_marker(marker, timestamp, body)])
    side.committed(txn, marker.txn_id, marker.first_offset, Timestamp(marker.commit_ts))


def complete_marked(topics: Topics, txn_id: int | None = None) -> dict[int, Exception]:
    """Write end markers that are noted into their logs: of one transaction, or all.

    Returns:
        Errors, by partition.
    """
    with topics.store.status.read() as cur:
        ids = marked_partitions(cur, txn_id)
    written: list[tuple[int, int]] = []

    def complete_one(partition: Partition) -> None:
        with partition.environment.read() as txn:
            end = partition.log.end(txn)
        if topics.look(partition.id).marker_end > end:
            end = complete(topics, partition)
        written.append((end, partition.id))

    errors = topics.each(ids, "its end markers", complete_one)
    if written:
        forget_markers(topics.store, written)
    return errors


def write_out(topics: Topics, partition_ids: list[int]) -> dict[Key, str]:
    """Bring partitions of the tail up to their ends, for a flush.

    Returns:
        Those that could not be, and why.
    """
    with topics.store.status.read() as cur:
        live = topic_catalog.live_partitions(cur)
    ids = [id for id in partition_ids if id in live]
    errors = topics.each(ids, "a flush", partial(complete, topics), DAMAGE, side_by_side=True)
    found = {}
    for id, error in errors.items():
        partition = topics.partition(id)
        label = f"partition {id}" if partition is None else partition.label
        found[payload.TOPIC, id] = f"{label} is damaged: {error}"
    return found


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
    with topics.store.log_cuts():
        return _truncate(topics, partition, offset, flush)


def _truncate(
    topics: Topics, partition: Partition, offset: int, flush: Callable[[], object]
) -> int:
    for _ in range(_TRIES):
        flush()
        complete(topics, partition)
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
    return cut.end if lowered else complete(topics, partition)


def _cut(topics: Topics, txn: lmdb.Transaction, partition: Partition, offset: int) -> _Cut | None:
    log = partition.log
    start, end = log.start(txn), log.end(txn)
    if not start <= offset <= end:
        raise OffsetOutOfRangeError(
            f"{partition.label} holds [{start}, {end}): it cannot be truncated to {offset}"
        )
    with topics.store.status.read() as cur:
        waiting = look(topics, cur, partition, offset)
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


_LOG = logging.getLogger("txnkv")
_ALL = 1 << 62

declare_fault_point("offsets.regained", "offsets that only a log knew are given in status.db again")


def regain(topics: Topics) -> None:
    """Give the offsets that logs have, unless somebody did since the machine was started.

    Raises:
        StorageFullError: no room; nothing was changed.
        UnavailableError: the disk failed.
    """
    runtime = topics.store.runtime
    if runtime.regained:
        return
    ahead = [partition for partition in _partitions(topics) if _is_ahead(topics, partition)]
    if ahead:
        with topics.store.status.write() as cur:
            topics.coordinator.damage.each(ahead, "its end", lambda each: _regain(cur, each))
        fault_point("offsets.regained")
    runtime.note_regained()


def _partitions(topics: Topics) -> list[Partition]:
    with topics.store.status.read() as cur:
        found = [topic_catalog.get(cur, name) for name in topic_catalog.names(cur)]
    return [partition for topic in found for partition in topics.partitions(topic)]


def _is_ahead(topics: Topics, partition: Partition) -> bool:
    with topics.store.status.read() as cur:
        given = topic_catalog.next_offset(cur, partition.id)
    try:
        if not partition.exists:
            return False
        environment = partition.environment
        with environment.read() as txn:
            end = partition.log.end(txn)
        environment.close(timeout=0)  # there may be many, and few are used soon
    except TxnkvError as error:
        # Those who use the partition are told; all others go on.
        _LOG.warning("%s cannot be looked at: %s", partition.label, error)
        return False
    return end > given


def _regain(cur: apsw.Cursor, partition: Partition) -> None:
    # Read again: another process may have done it meanwhile, and gone on.
    given = topic_catalog.next_offset(cur, partition.id)
    with partition.environment.read() as txn:
        end = partition.log.end(txn)
        commits = partition.log.commits(txn, given, _ALL) if end > given else []
    if end <= given:
        return
    topic_catalog.take_offsets(cur, partition.id, end - given)
    reach(cur, Timestamp(max((entry.commit_ts for entry in commits), default=0)))
    _LOG.warning("%s: %d messages outlived their offsets", partition.label, end - given)
