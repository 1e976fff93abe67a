"""Rewriting a piece of a log: batches with fewer messages, in place of those that are there.

A log stays dense, and its messages keep their offsets. A batch may take more offsets than it has
messages; so what is left of a batch takes its place, and says where its messages are. What was a
batch that has none left goes with the one before:

    offset     0    1    2    3    4    5    6    7    8         P1, P2: of transactions
    before   [ a    b    c    d ][P2 ][P1   x ][C1 ][A2 ]        P2 aborted, a, c and x wanted
    after    [ a         c           ][P1   x ][C1 ][fil]
               count 5, places 0 and 2     count 2, place 1

    decided     batches without messages go; so do FILLERs
    committed   what has no message left goes with its COMMIT marker. While one is left the marker
                stays, and the first batch, without messages if need be: where a transaction begins
                is in the marker and in the index of commits
    aborted     goes, with its ABORT marker and its entry in the aborted index
    over an edge    what begins before the piece or ends behind it keeps first batch and marker

What goes and has no batch of messages before it becomes a FILLER. The control batch that brings the
low water mark to what it is at the end stays, as a FILLER at least. So the state of transactions at
both edges is what it was, which is checked before anything is written, and the indexes within are
made anew from the batches. Snapshots within go: a replay begins at the edge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import lmdb
import pyarrow as pa

from txnkv.core import (
    BatchHeader,
    Control,
    ControlType,
    CoreError,
    Spans,
    check_batch,
    decode,
    emptied,
    encode_batch,
    encode_control,
    place,
    read_control,
    read_header,
    resized,
)
from txnkv.core import compute as pc
from txnkv.errors import CorruptionError
from txnkv.storage import Environment, declare_fault_point, fault_point
from txnkv.topics.log.log_chunks import KEY, base_at, delete_range, gathered
from txnkv.topics.log.log_state import LogParts
from txnkv.topics.log.log_writer import counted_segment, walked
from txnkv.topics.log.partition_state import CONTROL, MemoryOpenTxns, PartitionState

Wanted: TypeAlias = Callable[[BatchHeader, Any], pa.UInt32Array | None]
"""Which messages of a committed batch stay, by their numbers in it, ascending; None: all."""

declare_fault_point("log.rewritten", "a piece of a log is rewritten, not committed")

_MOST: Final = (1 << 31) - 1


NOTHING: Final = pa.nulls(0, pa.uint32())

_Span: TypeAlias = tuple[int, int]
"""A transaction, and where it begins: one that sends again behind its end begins again."""


@dataclass
class _Batch:
    """A batch of the piece.

    Attributes:
        span: of the transaction whose end decides about it.
        rows: what is wanted of its messages; None: all.
        stays: as it is, or without messages.
    """

    header: BatchHeader
    data: memoryview
    control: Control | None
    span: _Span | None = None
    rows: pa.UInt32Array | None = field(default_factory=lambda: NOTHING)
    stays: bool = False

    @property
    def has_rows(self) -> bool:
        return bool(self.header.rows and (self.rows is None or len(self.rows)))


@dataclass
class _Out:
    """Batches as they are put together: the last one may take more offsets yet.

    Attributes:
        made: batches, placed.
        last: the last one, with how many offsets it is to take.
    """

    made: list[Any] = field(default_factory=list)
    _last: Any = None
    _count: int = 0
    _grows: bool = False
    _filler: tuple[int, int, int] | None = None  # base, timestamp, low water mark

    def add(self, data: Any, header: BatchHeader) -> None:
        """Take a batch."""
        self.end()
        self._last, self._count = data, header.count
        self._grows = not (header.is_control or header.is_chunk)

    def skip(self, base: int, count: int, timestamp: int, mark: int = 0) -> None:
        """Take offsets that hold nothing any more; with a low water mark they need a FILLER."""
        grows = self._grows and not mark if self._filler is None else True
        if not grows or self._count + count > _MOST:
            self.end()
            self._filler = base, timestamp, mark
        elif self._filler is not None:
            self._filler = *self._filler[:2], max(self._filler[2], mark)
        self._count += count

    def end(self) -> list[Any]:
        """Make the last one, and return all."""
        if self._filler is not None:
            base, timestamp, mark = self._filler
            filler = encode_control(
                ControlType.FILLER, count=self._count, timestamp=timestamp, low_water_mark=mark
            )
            self.made.append(place(filler, base))
        elif self._last is not None:
            grown = self._count != read_header(self._last).count
            self.made.append(resized(self._last, self._count) if grown else self._last)
        self._last, self._filler, self._grows, self._count = None, None, False, 0
        return self.made


class PieceRewriter:
    """A piece of a log on its way to fewer messages.

    Args:
        state: of the log where the piece begins; it goes on to its end.
        aborted: transactions, with their first offsets, that are aborted at or behind the piece's
            end. All others that do not end in it are committed.
        wanted: what stays of committed messages.
        codec: of batches that are made anew.
    """

    def __init__(
        self,
        state: PartitionState,
        aborted: Iterable[_Span],
        wanted: Wanted,
        codec: str | None = None,
    ) -> None:
        self._state = state
        self._low = state.end
        self._aborted = set(aborted)
        self._wanted = wanted
        self._codec = codec

    def run(self, chunks: Iterable[Any]) -> LogPiece:
        """Return the piece as it is to be; what stays points into the chunks.

        Raises:
            CorruptionError: a batch is damaged, or the state would not be what it is.
        """
        after = copied(self._state)
        batches = list(self._read(chunks))
        self._decide(batches)
        made = self._put_together(batches)
        for batch in made:
            header = read_header(batch)
            after.apply(header, _control(batch, 0, header))
        if _told(after) != _told(self._state):
            raise CorruptionError(
                f"log: the state at offset {self._state.end} would change by rewriting what is "
                f"behind {self._low}. Nothing was changed; `txnkv check` says more"
            )
        # One with fewer messages may have as many bytes.
        changed = [*map(id, made)] != [id(each.data) for each in batches]
        dropped = sum(each.header.rows for each in batches)
        dropped -= sum(read_header(batch).rows for batch in made)
        return LogPiece(self._low, after.end, made, after, changed, dropped)

    # -- what is there -----------------------------------------------------------------

    def _read(self, chunks: Iterable[Any]) -> Iterator[_Batch]:
        """The batches, each with the transaction that decides about it."""
        state = self._state
        state.commits, state.aborted = [], []
        self._ends: dict[_Span, int] = {}
        """Transactions that end in the piece, and the offset of the batch that ends each."""
        self._raised = -1
        for chunk in chunks:
            for at, header in walked(chunk):
                _require_intact(chunk, at)
                control = _control(chunk, at, header)
                mark, base = state.low_water_mark, header.base_offset
                state.apply(header, control)
                batch = _Batch(header, chunk[at : at + header.length], control)
                for aborted in state.aborted:
                    self._ends[aborted[:2]] = base
                    self._aborted.add(aborted[:2])
                if control is not None:
                    for commit in state.commits:
                        self._ends[commit.txn_id, commit.first_offset] = base
                    if state.low_water_mark > mark:
                        self._raised = base
                elif header.is_transactional and not header.is_decided:
                    opened = state.open.get(header.txn_id)
                    first = base if opened is None else opened.first_offset
                    batch.span = header.txn_id, first
                state.commits, state.aborted = [], []
                yield batch

    def _decide(self, batches: list[_Batch]) -> None:
        """Say of each batch what stays of it."""
        full = set[_Span]()
        for batch in batches:
            if batch.control is None and batch.span not in self._aborted:
                batch.rows = self._wanted(batch.header, batch.data)
                if batch.span is not None and batch.has_rows:
                    full.add(batch.span)
        whole = {span for span in self._ends if span[1] >= self._low}
        gone = whole - full
        needed = {end for span, end in self._ends.items() if span not in gone}
        for batch in batches:
            base, span = batch.header.base_offset, batch.span
            if batch.control is not None:
                batch.stays = base in needed or batch.control.type is ControlType.SIDE_LIST
            else:
                batch.stays = span is not None and span not in gone and base == span[1]

    # -- what there is to be -----------------------------------------------------------

    def _put_together(self, batches: list[_Batch]) -> list[Any]:
        out = _Out()
        for batch in batches:
            header = batch.header
            keeps_all = batch.rows is None and header.rows
            if keeps_all or (batch.stays and (batch.control is not None or not header.rows)):
                out.add(batch.data, header)
            elif batch.has_rows or batch.stays:
                self._put_rows(out, batch)
            else:
                raises = header.base_offset == self._raised
                mark = batch.control.low_water_mark if raises and batch.control else 0
                out.skip(header.base_offset, header.count, header.max_timestamp, mark)
        return out.end()

    def _put_rows(self, out: _Out, batch: _Batch) -> None:
        """Put the messages that are wanted in the batch's place, at their offsets."""
        header, data = batch.header, batch.data
        if not batch.has_rows:
            out.add(emptied(data, header.count), header)
            return
        rows = decode(data, Spans.of([(0, header.length)]), 0, checked=True).take(batch.rows)
        places = pc.subtract(rows.column("offset"), pa.scalar(header.base_offset, pa.uint64()))
        made = encode_batch(
            rows.select(["timestamp", "key", "value", "headers"]),
            timestamp=header.base_timestamp,
            txn_id=header.txn_id,
            decided=header.is_decided,
            producer_id=header.producer_id,
            epoch=header.epoch,
            base_sequence=header.base_sequence,
            codec=header.codec or self._codec,
            places=places.cast(pa.uint32()),
            count=header.count,
        )
        out.add(place(made, header.base_offset, header.commit_ts), header)


class LogPiece(NamedTuple):
    """Batches in the place of those of a piece, which begins and ends at the edges of chunks.

    Attributes:
        low, high: the offsets of both.
        batches: one behind the other.
        state: behind them, with the entries of both indexes.
        changed: they differ from those that are there.
        dropped: messages that are not in them.
    """

    low: int
    high: int
    batches: list[Any]
    state: PartitionState
    changed: bool
    dropped: int

    def put(self, txn: lmdb.Transaction, environment: Environment) -> None:
        """Put it in its place; it lies in one segment."""
        parts = LogParts(txn, environment)
        delete_range(txn, parts.log, KEY.pack(self.low), KEY.pack(self.high))
        for some in gathered(self.batches):
            chunk = some[0] if len(some) == 1 else b"".join(some)
            txn.put(KEY.pack(base_at(chunk, 0)), chunk, db=parts.log)
        parts.commits.replace(self.low, self.high, self.state.commits)
        parts.aborted.replace(self.low, self.high, self.state.aborted)
        parts.snapshots.drop_between(self.low, self.high)
        segment, record = parts.segments.before(self.low + 1), parts.record()
        assert segment is not None
        assert record is not None
        following = parts.segments.after(segment.base)
        end = record.end if following is None else following.base
        parts.segments.put(counted_segment(parts, segment.base, end))
        rewritten = parts.rewritten()
        parts.store_rewritten(rewritten._replace(pieces=rewritten.pieces + 1))
        fault_point("log.rewritten")


def _require_intact(chunk: Any, at: int) -> None:
    try:
        check_batch(chunk, at)
    except CoreError as error:
        raise CorruptionError(f"log: {error}") from None


def _control(chunk: Any, at: int, header: BatchHeader) -> Control | None:
    return read_control(chunk, at) if header.attributes & CONTROL else None


def copied(state: PartitionState) -> PartitionState:
    """A state that goes on by itself."""
    assert isinstance(state.open, MemoryOpenTxns)
    return PartitionState(state.end, state.low_water_mark, MemoryOpenTxns(state.open.all()))


def _told(state: PartitionState) -> tuple[Any, ...]:
    assert isinstance(state.open, MemoryOpenTxns)
    return state.end, state.low_water_mark, [each[:2] for each in state.open.all()]
