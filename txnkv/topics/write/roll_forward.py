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
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import apsw
import lmdb

from txnkv.coordinator import DAMAGE, EPOCH, Key, Timestamp, held, payload
from txnkv.core import ControlType, encode_control, place
from txnkv.errors import CorruptionError
from txnkv.storage import clock, declare_fault_point, fault_point
from txnkv.topics import end_markers, topic_catalog
from txnkv.topics.end_markers import EndMarker
from txnkv.topics.partition import Partition
from txnkv.topics.tail import TailEntry
from txnkv.topics.topics import Topics

declare_fault_point("log.completed", "what waited for a log is in it, durable")

_EPOCH_MICROS = int(EPOCH.timestamp()) * 1_000_000
_MOST = (1 << 31) - 1
"""Offsets that one filler may take: what a batch can count."""
_MOST_FILLERS = 1024
"""Fillers in one hole, at most: nobody reserves that much, so a longer one is damage."""


class Waiting(NamedTuple):
    """Entries and markers that a log lacks, in one look at status.db under the log's write lock.

    Attributes:
        upto: the log ends there when all of it is written.
        entries: of the tail.
        markers: to be written.
    """

    upto: int
    entries: list[TailEntry]
    markers: list[EndMarker]


def look(topics: Topics, cur: apsw.Cursor, partition: Partition, end: int) -> Waiting:
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
    return Waiting(upto, entries, end_markers.between(cur, partition.id, end, upto))


def write(txn: lmdb.Transaction, partition: Partition, waiting: Waiting) -> None:
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


def _in_order(end: int, waiting: Waiting) -> Iterator[bytes | EndMarker]:
    """All pieces from `end` on, by offset, without a gap."""
    pieces: list[TailEntry | EndMarker] = [*waiting.entries, *waiting.markers]
    pieces.sort(key=_start)
    at = end
    for piece in pieces:
        yield from _fillers(at, _start(piece))
        at = piece.next_offset
        yield piece.data if isinstance(piece, TailEntry) else piece
    yield from _fillers(at, waiting.upto)


def _start(piece: TailEntry | EndMarker) -> int:
    return piece.base_offset if isinstance(piece, TailEntry) else piece.first_offset


def _fillers(at: int, upto: int) -> Iterator[bytes]:
    if upto - at > _MOST * _MOST_FILLERS:
        raise CorruptionError(
            f"offsets [{at}, {upto}) of a log were given to nobody, more than anybody reserves: "
            "status.db is damaged. Check the store, or restore it from a backup"
        )
    while at < upto:
        count = min(upto - at, _MOST)
        yield place(
            encode_control(
                ControlType.FILLER, count=count, timestamp=clock.now_micros() + _EPOCH_MICROS
            ),
            at,
        )
        at += count


def _end_marker(marker: EndMarker, timestamp: int | None = None, body: bytes = b"") -> bytes:
    if timestamp is None:
        timestamp = Timestamp(marker.commit_ts).micros + _EPOCH_MICROS
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
        partition.log.put(txn, _fillers(marker.first_offset, marker.next_offset))
        return
    partition.log.put(txn, [_end_marker(marker, timestamp, body)])
    side.committed(txn, marker.txn_id, marker.first_offset, Timestamp(marker.commit_ts))


def complete_marked(topics: Topics, txn_id: int | None = None) -> dict[int, Exception]:
    """Write end markers that are noted into their logs: of one transaction, or all.

    Returns:
        Errors, by partition.
    """
    with topics.store.status.read() as cur:
        ids = end_markers.partitions_of(cur, txn_id)
    written: list[tuple[int, int]] = []

    def complete_one(partition: Partition) -> None:
        with partition.environment.read() as txn:
            end = partition.log.end(txn)
        if topics.look(partition.id).marker_end > end:
            end = complete(topics, partition)
        written.append((end, partition.id))

    errors = topics.each(ids, "its end markers", complete_one)
    if written:
        end_markers.forget(topics.store, written)
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
