"""Putting batches into a log: chunks, state, indexes, segments and snapshots in one LMDB write."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import lmdb

from txnkv.core import BatchHeader, CoreError, read_control, walk
from txnkv.errors import CorruptionError
from txnkv.storage import Environment, clock, declare_fault_point, fault_point
from txnkv.topics.log.log_chunks import CHUNK_BYTES, KEY, base_at
from txnkv.topics.log.log_indexes import Aborted, Commits
from txnkv.topics.log.log_state import (
    ABORTED,
    COMMITS,
    LOG,
    OPEN,
    SEGMENTS,
    SNAPSHOTS,
    SPANS,
    STATE,
    LogState,
    StoredOpenTxns,
)
from txnkv.topics.log.partition_state import CONTROL, PartitionState
from txnkv.topics.log.segments import Segment, Segments
from txnkv.topics.log.side_format import side_bytes
from txnkv.topics.log.snapshots import Snapshot, Snapshots

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
        db = environment.db
        self._txn = txn
        self._log = db(LOG)
        self._record_db = db(STATE)
        self._commits = Commits(txn, db(COMMITS))
        self._aborted = Aborted(txn, db(ABORTED), db(SPANS))
        self._segments = Segments(txn, db(SEGMENTS))
        self._snapshots = Snapshots(txn, db(SNAPSHOTS))
        self._open = StoredOpenTxns(txn, db(OPEN))
        self._max_bytes = options.segment_bytes
        self._max_age = int(options.segment_seconds * 1e6)
        self._options = options
        record = LogState.load(txn, self._record_db)
        self._record = record or LogState()
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
        record.store(self._txn, self._record_db)
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
            self._txn.put(KEY.pack(base_at(pending[0], 0)), chunk, db=self._log, append=True)
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
        snapshot = Snapshot(state.end, state.low_water_mark, tuple(self._open.all()))
        self._snapshots.put(snapshot)
        state.changes = 0
        self._snapshot_micros = clock.now_micros()
        fault_point("partition.snapshot")


def _walked(view: memoryview) -> Iterable[tuple[int, BatchHeader]]:
    try:
        return walk(view)
    except CoreError as error:
        raise CorruptionError(f"put into a log: {error}. Nothing was put") from None
