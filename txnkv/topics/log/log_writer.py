"""The changes of a log, each one LMDB write of chunks, state, indexes, segments and snapshots.

    LogWriter    batches in, at the end
    LogCutter    the end or the start away; batches in the place of a marker

Cutting the end takes the state back to an earlier offset: it is replayed from a snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import lmdb

from txnkv.core import BatchHeader, CoreError, read_control, walk
from txnkv.errors import CorruptionError
from txnkv.storage import Environment, clock, declare_fault_point, fault_point
from txnkv.topics.log.log_chunks import (
    CHUNK_BYTES,
    KEY,
    base_at,
    delete_range,
    is_side_list,
    next_offset,
    position_of,
    side_bytes,
)
from txnkv.topics.log.log_state import (
    LogParts,
    LogState,
    Rewritten,
    Segment,
    StateSnapshot,
)
from txnkv.topics.log.partition_state import CONTROL, MemoryOpenTxns, PartitionState

declare_fault_point("partition.rolled", "a log's new segment and snapshot are put, not committed")
declare_fault_point("partition.snapshot", "a snapshot of a log's state is put, not committed")
declare_fault_point("partition.put", "batches and the state of a log are put, not committed")

_SIDE_LIST: Final = 3


@dataclass(frozen=True)
class LogOptions:
    """The options of a log: how it is cut and how often its state is kept.

    Attributes:
        segment_bytes: a batch that would make a segment longer begins the next one.
        segment_seconds: so does one that is so much younger than the segment's first.
        snapshot_changes: a snapshot is taken after so many opened and ended transactions,
        snapshot_seconds: or with the first put so long after the last one, if there were any.
    """

    segment_bytes: int = 64 << 20
    segment_seconds: float = 604800.0
    snapshot_changes: int = 1000
    snapshot_seconds: float = 5.0


class LogWriter:
    """One put: batches in, then `finish`. Lives in one LMDB write transaction.

    Args:
        txn: the write transaction.
        environment: the log's.
        options: of the log.
    """

    def __init__(self, txn: lmdb.Transaction, environment: Environment, options: LogOptions):
        self._parts = parts = LogParts(txn, environment)
        self._log = parts.log
        self._commits = parts.commits
        self._aborted = parts.aborted
        self._segments = parts.segments
        self._snapshots = parts.snapshots
        self._open = parts.open
        self._max_bytes = options.segment_bytes
        self._max_age = int(options.segment_seconds * 1e6)
        self._options = options
        self._record = parts.record() or LogState()
        self._state = PartitionState(self._record.end, self._record.low_water_mark, self._open)
        self._state.changes = self._record.changes
        self._snapshot_micros = self._record.snapshot_micros
        self._pending: list[memoryview] = []
        self._pending_bytes = 0
        segment = self._segments.last()
        if segment is None:
            segment = self._begin_segment()
        self._segment = segment

    @property
    def end(self) -> int:
        """The offset behind the last batch."""
        return self._state.end

    def add(self, batches: Any) -> None:
        """One or more whole batches, one behind the other; the first begins at `end`.

        Raises:
            ValueError: it does not, or there is a gap between them.
            CorruptionError: these are no batches.
        """
        view = memoryview(batches).cast("B")
        begin = 0
        state, segment = self._state, self._segment
        size, newest = segment.bytes, segment.max_timestamp
        for at, header in _walked(view):
            if header.base_offset != state.end:
                raise self._misplaced(header)
            length, timestamp = header.length, header.max_timestamp
            control = None
            if header.attributes & CONTROL:
                control = read_control(view, at)
                if control.type == _SIDE_LIST:
                    length += side_bytes(bytes(view[at : at + length]))
            if size and (
                size + length > self._max_bytes or timestamp - segment.created > self._max_age
            ):
                self._take(view[begin:at])
                self._segment = segment._replace(bytes=size, max_timestamp=newest)
                segment = self._roll()
                begin, size, newest = at, 0, segment.max_timestamp
            elif at + header.length - begin > CHUNK_BYTES and at > begin:
                self._take(view[begin:at])
                begin = at
            if not size:
                segment = segment._replace(created=timestamp)
            if control is not None and control.type == _SIDE_LIST:
                self._take_alone(view[begin:at], view[at : at + header.length])
                begin = at + header.length
            state.apply(header, control)
            size += length
            if timestamp > newest:
                newest = timestamp
            if state.changes >= self._options.snapshot_changes:
                self._snapshot()
        self._take(view[begin:])
        self._segment = segment._replace(bytes=size, max_timestamp=newest)

    def roll(self) -> None:
        """Begins another segment, if there is anything in this one."""
        if self._segment.bytes:
            self._roll()

    def finish(self) -> None:
        """Writes all that is not yet written. Nothing is added after it."""
        self._flush()
        self._segments.put(self._segment)
        state = self._state
        if state.changes:
            waited = clock.now_micros() - self._snapshot_micros
            if not 0 <= waited < self._options.snapshot_seconds * 1e6:
                self._snapshot()
        record = LogState(
            self._record.start, state.end, state.low_water_mark, self._snapshot_micros,
            state.changes,
        )  # fmt: skip
        self._parts.store(record)
        fault_point("partition.put")

    # -- chunks ------------------------------------------------------------------------

    def _take(self, part: memoryview) -> None:
        size = len(part)
        if not size:
            return
        if self._pending and self._pending_bytes + size > CHUNK_BYTES:
            self._flush()
        self._pending.append(part)
        self._pending_bytes += size

    def _take_alone(self, before: memoryview, part: memoryview) -> None:
        self._take(before)
        self._flush()
        self._take(part)
        self._flush()

    def _flush(self) -> None:
        pending = self._pending
        if pending:
            chunk = pending[0] if len(pending) == 1 else b"".join(pending)
            self._parts.txn.put(KEY.pack(base_at(pending[0], 0)), chunk, db=self._log, append=True)
            self._pending, self._pending_bytes = [], 0
        state = self._state
        if state.commits:
            self._commits.put(state.commits)
            state.commits = []
        if state.aborted:
            for entry in state.aborted:
                self._aborted.put(entry)
            state.aborted = []

    def _misplaced(self, header: BatchHeader) -> ValueError:
        return ValueError(
            f"put of a batch at offset {header.base_offset} into a log that ends at "
            f"{self._state.end}: batches come in offset order without a gap. Nothing was put"
        )

    # -- segments and snapshots --------------------------------------------------------

    def _roll(self) -> Segment:
        self._flush()
        closed = self._segment
        self._segments.put(closed)
        earlier = self._segments.before(closed.base)
        if earlier is not None:
            self._snapshots.drop_between(earlier.base, closed.base)
        self._segment = self._begin_segment()
        fault_point("partition.rolled")
        return self._segment

    def _begin_segment(self) -> Segment:
        segment = Segment.empty(self._state.end)
        self._segments.put(segment)
        self._snapshot()
        return segment

    def _snapshot(self) -> None:
        state = self._state
        snapshot = StateSnapshot(state.end, state.low_water_mark, tuple(self._open.all()))
        self._snapshots.put(snapshot)
        state.changes = 0
        self._snapshot_micros = clock.now_micros()
        fault_point("partition.snapshot")


def _walked(view: memoryview) -> Iterable[tuple[int, BatchHeader]]:
    try:
        return walk(view)
    except CoreError as error:
        raise CorruptionError(f"put into a log: {error}. Nothing was put") from None


declare_fault_point("partition.truncated", "the end of a log is cut off, not committed")
declare_fault_point("partition.trimmed", "the start of a log is given back, not committed")


class LogCutter:
    """Takes a log's end or start away. Lives in one LMDB write transaction.

    Args:
        txn: the write transaction.
        environment: the log's.
    """

    def __init__(self, txn: lmdb.Transaction, environment: Environment) -> None:
        self._txn = txn
        self._parts = LogParts(txn, environment)
        self._record = self._parts.record() or LogState()

    def truncate(self, offset: int) -> int:
        """Removes the batch that holds an offset and all behind it.

        Returns:
            The end of the log now: the offset, or where its batch began.

        Raises:
            ValueError: the offset is not in [start, end] of the log.
        """
        record = self._record
        if not record.start <= offset <= record.end:
            raise ValueError(
                f"truncate to {offset} of a log that holds [{record.start}, {record.end}): name "
                "an offset of these; nothing was changed"
            )
        if offset == record.end:
            return offset
        parts = self._parts
        commits = parts.commits
        holding = next(commits.from_offset(offset), None)
        if holding is not None and holding.marker_offset < offset:
            offset = holding.marker_offset  # its batches may have been put in a marker's place
        end = self._cut_chunks(offset)
        state = replayed(parts, end)
        parts.aborted.truncate(end)
        commits.truncate(end)
        parts.snapshots.drop_from(end + 1)
        self._cut_segments(end)
        assert isinstance(state.open, MemoryOpenTxns)
        parts.open.replace(state.open.all())
        parts.store(record._replace(
            start=min(record.start, end), end=end, low_water_mark=state.low_water_mark,
            changes=state.changes,
        ))  # fmt: skip
        self._note_rewritten(end)
        fault_point("partition.truncated")
        return end

    def advance_start(self, offset: int) -> None:
        """Takes what is below an offset away: whole segments from the files, the rest from view.

        Raises:
            ValueError: the offset is below the start of the log.
        """
        record = self._record
        if offset < record.start:
            raise ValueError(
                f"a start of {offset} for a log that holds [{record.start}, {record.end}): what "
                "was given up does not come back; nothing was changed"
            )
        if offset > record.end:
            self.begin_at(offset)
        else:
            self._drop_below(offset)
            self._parts.store(record._replace(start=offset))
        fault_point("partition.trimmed")

    def begin_at(self, offset: int) -> None:
        """Takes all away; the log goes on at an offset."""
        self._parts.drop_all()
        self._parts.store(LogState(offset, offset))
        self._note_rewritten(offset)

    def replace(self, offset: int, batches: Sequence[Any]) -> None:
        """Puts batches in the place of the SIDE_LIST marker at an offset.

        Raises:
            ValueError: there is no such marker, or the batches take other offsets.
        """
        log = self._parts.log
        marker = self._txn.get(KEY.pack(offset), db=log)
        if marker is None or not is_side_list(marker):
            raise ValueError(f"replace at {offset}: no list of side batches there; nothing changed")
        end = next_offset(marker)
        at = offset
        for batch in batches:
            if base_at(batch, 0) != at:
                raise ValueError(f"replace of [{offset}, {end}): a batch at {base_at(batch, 0)}")
            at = next_offset(batch)
        if at != end:
            raise ValueError(f"replace of [{offset}, {end}) by batches that end at {at}")
        size = -counted(memoryview(bytes(marker)))
        for batch in batches:
            self._txn.put(KEY.pack(base_at(batch, 0)), batch, db=log)
            size += counted(memoryview(batch).cast("B"))
        segment = self._parts.segments.before(offset + 1)
        assert segment is not None
        self._parts.segments.put(segment._replace(bytes=segment.bytes + size))

    def _note_rewritten(self, end: int) -> None:
        """Note that other batches may come to the offsets behind the end."""
        rewritten = self._parts.rewritten()
        self._parts.store_rewritten(Rewritten(min(rewritten.upto, end), rewritten.pieces + 1))

    def _drop_below(self, offset: int) -> None:
        parts = self._parts
        holding = parts.segments.before(offset + 1)
        if holding is not None:
            first = holding.base
            delete_range(self._txn, parts.log, b"", KEY.pack(first))
            for part in (parts.aborted, parts.commits, parts.segments, parts.snapshots):
                part.drop_below(first)

    def _cut_chunks(self, offset: int) -> int:
        found = self._parts.chunks().at(offset)
        if found is None:
            raise CorruptionError(f"log: no chunk holds offset {offset}. Check the store")
        base, chunk = found
        at = position_of(chunk, offset)
        end = base_at(chunk, at)
        kept = bytes(chunk[:at])
        delete_range(self._txn, self._parts.log, KEY.pack(base), None)
        if kept:
            self._txn.put(KEY.pack(base), kept, db=self._parts.log, append=True)
        return end

    def _cut_segments(self, end: int) -> None:
        """Leaves at least one: the first stays when the log is empty now."""
        holding = self._parts.segments.before(end) or Segment.empty(end)
        self._parts.segments.drop_from(holding.base)
        self._parts.segments.put(counted_segment(self._parts, holding.base, end))


def counted_segment(parts: LogParts, base: int, end: int) -> Segment:
    """The segment of a base, as the batches below an offset make it."""
    segment = Segment.empty(base)
    for header, size in sizes(parts, base, end):
        segment = Segment(
            segment.base,
            segment.created if segment.bytes else header.max_timestamp,
            segment.bytes + size,
            max(segment.max_timestamp, header.max_timestamp),
        )
    return segment


def sizes(parts: LogParts, low: int, high: int) -> Iterator[tuple[BatchHeader, int]]:
    """The headers of the batches in [low, high), both at a batch's edge, and their bytes.

    Raises:
        CorruptionError: there is something else in the log.
    """
    for _, chunk in parts.chunks().between(low, high):
        for at, header in walked(chunk):
            if low <= header.base_offset < high:
                yield header, bytes_of(chunk, at, header)


def counted(chunk: memoryview) -> int:
    """Bytes of a chunk as its segment counts them."""
    return sum(bytes_of(chunk, at, header) for at, header in walked(chunk))


def bytes_of(chunk: memoryview, at: int, header: BatchHeader) -> int:
    """Bytes of a batch as a segment counts them: with what it stands for in a side log."""
    if header.attributes & CONTROL and is_side_list(chunk[at:]):
        return header.length + side_bytes(bytes(chunk[at : at + header.length]))
    return header.length


def replayed(parts: LogParts, end: int) -> PartitionState:
    """The state of a log at a batch's edge, from the last snapshot before it.

    Without a whole snapshot it begins with the first segment: what opened before that has no
    batches left but those it sent later, and opens there.

    Raises:
        CorruptionError: there is something else in the log.
    """
    snapshot = parts.snapshots.at_or_below(end)
    if snapshot is None:
        segments = parts.segments.all()
        snapshot = StateSnapshot(segments[0].base if segments else end, 0, ())
    return replay(parts, snapshot, end)


def replay(parts: LogParts, snapshot: StateSnapshot, end: int) -> PartitionState:
    """The state that the batches in [snapshot, end) make of a snapshot.

    Raises:
        CorruptionError: there is something else in the log.
    """
    state = snapshot.state()
    for _, chunk in parts.chunks().between(snapshot.offset, end):
        for at, header in walked(chunk):
            if snapshot.offset <= header.base_offset < end:
                control = read_control(chunk, at) if header.attributes & CONTROL else None
                state.apply(header, control)
    return state


def walked(chunk: memoryview) -> list[tuple[int, BatchHeader]]:
    """The batches of a chunk.

    Raises:
        CorruptionError: there is something else in it.
    """
    try:
        return walk(chunk)
    except CoreError as error:
        raise CorruptionError(f"log: {error}") from None
