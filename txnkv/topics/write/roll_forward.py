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
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import apsw
import lmdb

from txnkv.coordinator import EPOCH, FAILING, Key, Timestamp, held, payload, reach
from txnkv.core import ControlType, encode_control, place
from txnkv.errors import (
    CorruptionError,
    TxnkvError,
)
from txnkv.storage import DeniedError, clock, declare_fault_point, fault_point
from txnkv.topics import topic_catalog
from txnkv.topics.tail import (
    EndMarker,
    TailEntry,
    forget_markers,
    marked_partitions,
    markers_between,
)
from txnkv.topics.topics import Partition, Topics

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
        CorruptionError: a small commit that is to be written is damaged in the commit log; or the
            log has what status.db does not know of.
    """
    # Also commits that are not durable yet are taken in: they are before this log's commit is.
    latest = topics.log.catch_up(cur)
    upto = topic_catalog.next_offset(cur, partition.id)
    if end > upto and partition.topic.options.replica_of is None:
        raise CorruptionError(
            f"{partition.label}: its log ends at {end}, above the next offset, {upto}: status.db "
            f"lacks what was there{held.accept_loss(partition.part)}"
        )
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
            # Nothing is open: the note of a marker came back that was cut off the log.
            cut = partition.log.first_offset_of(txn, piece.txn_id) is None
            plain += fillers(piece.first_offset, piece.next_offset) if cut else [_end_marker(piece)]
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
    errors = topics.each(ids, "a flush", partial(complete, topics), FAILING, side_by_side=True)
    found = {}
    for id, error in errors.items():
        partition = topics.partition(id)
        label = f"partition {id}" if partition is None else partition.label
        found[payload.TOPIC, id] = held.why(label, error)
    return found


_LOG = logging.getLogger("txnkv")
_ALL = 1 << 62

declare_fault_point("offsets.regained", "offsets that only a log knew are given in status.db again")


def regain(topics: Topics) -> None:
    """Give the offsets that logs have, unless somebody did since the machine was started.

    Raises:
        StorageFullError: no room; nothing was changed.
        UnavailableError: the disk failed.
        DeniedError: this user may not open all logs.
    """
    runtime = topics.store.runtime
    if runtime.regained:
        return
    ahead = [partition for partition in _partitions(topics) if _is_ahead(topics, partition)]
    if ahead:
        with topics.store.status.write() as cur:
            topics.coordinator.damage.each(ahead, "its end", lambda each: regain_offsets(cur, each))
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
    except DeniedError:
        raise  # whoever may open it has yet to do it
    except TxnkvError as error:
        # Those who use the partition are told; all others go on.
        _LOG.warning("%s cannot be looked at: %s", partition.label, error)
        return False
    return end > given


def regain_offsets(cur: apsw.Cursor, partition: Partition) -> None:
    """Give the offsets that a log has. Inside a write of status.db."""
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
