"""A check of a partition's log: is everything beside the batches what the batches say?"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

import lmdb

from txnkv.core import CoreError, check_batch
from txnkv.errors import CorruptionError
from txnkv.topics.log.log_state import (
    DATABASES,
    LogParts,
    LogState,
    Segment,
)
from txnkv.topics.log.log_writer import bytes_of, replay, walked
from txnkv.topics.log.partition_log import PartitionLog
from txnkv.topics.log.partition_state import CommitEntry, MemoryOpenTxns


def problems(log: PartitionLog, txn: lmdb.Transaction) -> Iterator[str]:
    """Everything that is wrong in a log, one line each; nothing if all is well.

    Every checksum is verified, offsets are dense, the segments count what they hold, and a
    replay from every snapshot gives the state, the aborted index and the index of commits that
    are stored.
    """
    try:
        parts = LogParts(txn, log.environment)
        record = parts.record()
        for name in DATABASES:
            log.environment.db(name)
    except KeyError:
        return
    except CorruptionError as error:
        yield str(error)
        return
    if record is None:
        return
    # Each goes on where another one met damage.
    for found in (
        _batches(parts, record),
        _segments(parts, record, bool(log.expand)),
        _replays(parts, record),
        _commits(parts, record, bool(log.expand)),
    ):
        try:
            yield from found
        except (CorruptionError, CoreError) as error:
            yield str(error)
        except (LookupError, ValueError, struct.error) as error:
            yield f"damaged: {error}"


def _batches(parts: LogParts, record: LogState) -> Iterator[str]:
    expected = None
    for base, chunk in parts.chunks().between(0, 1 << 63):
        expected = base if expected is None else expected
        if base != expected:
            yield f"a chunk at offset {base} follows one that ends at {expected}"
        for at, header in walked(chunk):
            if header.base_offset != expected:
                yield f"a batch at offset {header.base_offset} follows one that ends at {expected}"
            expected = header.next_offset
            try:
                check_batch(chunk, at)
            except CoreError as error:
                yield str(error)
    if expected is not None and expected != record.end:
        yield f"the log ends at {expected}, its state at {record.end}"


def _segments(parts: LogParts, record: LogState, has_side: bool) -> Iterator[str]:
    segments = parts.segments.all()
    ends = [segment.base for segment in segments[1:]] + [record.end]
    for segment, end in zip(segments, ends, strict=False):
        counted = Segment.empty(segment.base)
        for _, chunk in parts.chunks().between(segment.base, end):
            for at, header in walked(chunk):
                size = counted.bytes + bytes_of(chunk, at, header)
                newest = max(counted.max_timestamp, header.max_timestamp)
                created = counted.created if counted.bytes else header.max_timestamp
                counted = Segment(segment.base, created, size, newest)
        if has_side:  # a segment that began with a marker may begin with its messages now
            counted = counted._replace(created=segment.created)
        if counted != segment:
            yield f"{segment} holds {counted}"
        if not record.start <= end:
            yield f"{segment} lies below the start of the log, {record.start}"
    whole = set(parts.snapshots.offsets())
    for segment in segments:
        if segment.base not in whole:
            yield f"no snapshot at the base of {segment}"


def _replays(parts: LogParts, record: LogState) -> Iterator[str]:
    stored = parts.open.all()
    aborted = parts.aborted
    index = list(aborted.from_offset(0))
    if [(entry.last_offset, entry.first_offset) for entry in index] != aborted.bins():
        yield "the aborted index and its bins differ"
    offsets = parts.snapshots.offsets()
    for offset in offsets:
        snapshot = parts.snapshots.at_or_below(offset)
        if snapshot is None or snapshot.offset != offset:
            yield f"the snapshot at offset {offset} is damaged"
            continue
        state = replay(parts, snapshot, record.end)
        assert isinstance(state.open, MemoryOpenTxns)
        if state.open.all() != stored:
            yield f"replay from {offset}: open are {state.open.all()}, stored {stored}"
        if state.low_water_mark != record.low_water_mark or state.end != record.end:
            yield f"replay from {offset}: the low water mark or the end differ"
        if state.aborted != [entry for entry in index if entry.last_offset >= offset]:
            yield f"replay from {offset}: the aborted index differs"


def _commits(parts: LogParts, record: LogState, has_side: bool) -> Iterator[str]:
    """The index of commits says what the batches say, from the first whole snapshot on."""
    snapshots = parts.snapshots
    first = next(iter(snapshots.offsets()), None)
    snapshot = None if first is None else snapshots.at_or_below(first)
    if snapshot is None:
        return
    start = max(record.start, snapshot.offset)
    stored = _places(parts.commits.from_offset(start), start, has_side)
    there = _places(replay(parts, snapshot, record.end).commits, start, has_side)
    for entry in sorted(there - stored):
        yield f"the index of commits lacks {CommitEntry(*entry)}"
    for entry in sorted(stored - there):
        yield f"the index of commits has {CommitEntry(*entry)}, the log has not"


def _places(entries: Iterable[CommitEntry], start: int, has_side: bool) -> set[CommitEntry]:
    """Entries from an offset on. In a log with a side log one becomes several as time goes by:
    there those of a commit that follow each other are one, and first offsets count from the marker.
    """
    found: list[CommitEntry] = []
    for entry in entries:
        end = entry.marker_offset + entry.count
        if end <= start:
            continue
        if has_side:
            at, begins = max(entry.marker_offset, start), entry.first_offset - entry.marker_offset
            entry = CommitEntry(at, end - at, entry.txn_id, begins, entry.commit_ts)
            if found and found[-1][2:] == entry[2:] and sum(found[-1][:2]) == at:
                last = found.pop()
                entry = last._replace(count=end - last.marker_offset)
        found.append(entry)
    return set(found)
