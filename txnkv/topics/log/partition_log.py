"""The log of a partition: batches in, batches out, and what they say of transactions.

A log is dense: it holds every offset in [start, end). Everything about it lies in one LMDB
environment and changes in one LMDB transaction, so that after a crash log, state and indexes
are those of one moment: see `partition_state` for what they mean, `log_state` for where they
lie. A `PartitionLog` holds nothing itself: each call takes the LMDB transaction that it is to
be made in, of the environment that it was made with.

    environment.write(lambda txn: log.put(txn, [batch]))
    with environment.read() as txn:
        records = b"".join(log.read(txn, 0, 1 << 20))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import lmdb

from txnkv.core import CoreError, all_data, decode, sound, within
from txnkv.errors import CorruptionError, OffsetOutOfRangeError
from txnkv.storage import Environment
from txnkv.topics.log.log_chunks import (
    KEY,
    ChunkReader,
    base_at,
    below,
    damaged,
    first_length,
    is_side_list,
    next_offset,
    whole,
)
from txnkv.topics.log.log_indexes import compare
from txnkv.topics.log.log_rewriter import LogPiece, PieceRewriter, Wanted
from txnkv.topics.log.log_state import (
    ABORTED,
    DATABASES,
    LOG,
    LogParts,
    LogState,
    Rewritten,
    Segment,
)
from txnkv.topics.log.log_writer import LogCutter, LogOptions, LogWriter, replayed, walked
from txnkv.topics.log.partition_state import AbortedEntry, CommitEntry, OpenTxn, PartitionState

T = TypeVar("T")

Buffer: TypeAlias = Any
"""Any object with the buffer protocol."""

Expand: TypeAlias = Callable[[lmdb.Transaction, bytes, int, int], list[Buffer]]
"""The data batches that a SIDE_LIST marker stands for, placed at its offsets.

Takes the transaction, the marker, an offset in it and a number of bytes; answers batches from
the one that holds the offset on, at least one, until so many bytes are passed."""

_EMPTY = LogState()


class PartitionLog:
    """The log of a partition. Shared by threads; it holds no state of its own.

    Args:
        environment: where it lies.
        options: how it is cut.
        expand: of a log with a side log; readers get the batches in place of their marker.

    Attributes:
        environment, options, expand: as given.
    """

    def __init__(
        self, environment: Environment, options: LogOptions, expand: Expand | None = None
    ) -> None:
        self.environment = environment
        self.options = options
        self.expand = expand

    def prepare(self) -> None:
        """Makes the databases. To be called once outside of any transaction of the environment.

        Raises:
            NotSupportedError: they are not there, and the store is open to read only.
        """
        environment = self.environment
        with environment.read():
            made = all(environment.has(name) for name in DATABASES)
        if not made:
            environment.write(lambda _: [environment.db(name) for name in DATABASES])

    # -- writing -----------------------------------------------------------------------

    def put(self, txn: lmdb.Transaction, batches: Iterable[Buffer]) -> None:
        """Puts batches at the end of the log, each buffer one or more, one behind the other.

        Raises:
            ValueError: they do not begin at the end, or leave a gap between them.
            CorruptionError: these are no batches.

        After an error the LMDB transaction must not be committed: a part may be put.
        """
        writer = LogWriter(txn, self.environment, self.options)
        for buffer in batches:
            writer.add(buffer)
        writer.finish()

    def roll(self, txn: lmdb.Transaction) -> None:
        """Begins another segment, unless the last one is empty."""
        writer = LogWriter(txn, self.environment, self.options)
        writer.roll()
        writer.finish()

    def truncate(self, txn: lmdb.Transaction, offset: int) -> int:
        """Removes the batch that holds an offset and all behind it; the state goes back.

        A start of the log inside of that batch goes back to where the batch began.

        Returns:
            The end of the log now: the offset, or where its batch began.

        Raises:
            ValueError: the offset is not in [start, end]; nothing was changed.
        """
        return LogCutter(txn, self.environment).truncate(offset)

    def advance_start(self, txn: lmdb.Transaction, offset: int) -> None:
        """Makes an offset the least that is readable; segments wholly below it are removed.

        Behind the end of the log everything is removed, and the log goes on at the offset.

        Raises:
            ValueError: the offset is below the start; nothing was changed.
        """
        LogCutter(txn, self.environment).advance_start(offset)

    def begin_at(self, txn: lmdb.Transaction, offset: int) -> None:
        """Removes everything; the log goes on at an offset, also one below its start."""
        LogCutter(txn, self.environment).begin_at(offset)

    def replace(self, txn: lmdb.Transaction, offset: int, batches: Sequence[Buffer]) -> None:
        """Puts batches in the place of the SIDE_LIST marker at an offset: what it stands for.

        Args:
            txn: the write transaction.
            offset: of the marker.
            batches: placed, of the very same offsets; each becomes a chunk. They are decided, or
                a SIDE_LIST marker of those that are left.

        Raises:
            ValueError: there is no such marker, or the offsets are others; nothing was changed.
        """
        LogCutter(txn, self.environment).replace(offset, batches)

    def piece(
        self,
        txn: lmdb.Transaction,
        state: PartitionState,
        high: int,
        wanted: Wanted,
        codec: str | None,
    ) -> LogPiece:
        """Return a piece of the log as it is to be, without messages that are not wanted.

        Args:
            txn: any transaction; what stays points into it.
            state: where the piece begins, see `state_at`; it goes on to its end.
            high: the end: the edge of a chunk, at or below the last stable offset, in one segment.
            wanted: what stays of committed messages.
            codec: of batches that are made anew.

        Raises:
            CorruptionError: a batch is damaged.
        """
        low = state.end
        aborted = self._of(txn).aborted.overlapping(low, high, self.end(txn))
        spans = [(each.txn_id, each.first_offset) for each in aborted]
        found = (chunk for _, chunk in self.chunks(txn).between(low, high))
        return PieceRewriter(state, spans, wanted, codec).run(found)

    def state_at(self, txn: lmdb.Transaction, offset: int) -> PartitionState:
        """The state of the batches below an offset, at which one begins."""
        return replayed(self._of(txn), offset)

    def rewritten(self, txn: lmdb.Transaction) -> Rewritten:
        """The record of key compaction."""
        try:
            return self._of(txn).rewritten()
        except KeyError:  # nothing was ever put, and the store may be open to read only
            return Rewritten()

    def note_rewritten(self, txn: lmdb.Transaction, upto: int) -> None:
        """Note that key compaction has looked at all below an offset."""
        parts = self._of(txn)
        parts.store_rewritten(parts.rewritten()._replace(upto=upto))

    def look(self, see: Callable[[lmdb.Transaction], T]) -> tuple[T] | None:
        """`see(txn)` in a short read of the calling thread; see `Environment.look`."""
        return self.environment.look(LOG, lambda txn, *_: (see(txn),))

    # -- the state ---------------------------------------------------------------------

    def state(self, txn: lmdb.Transaction) -> LogState:
        """The record of the log, for those who ask for several things of one transaction.

        Raises:
            CorruptionError: it is damaged, or gone.
        """
        return self._of(txn).record() or _EMPTY

    def start(self, txn: lmdb.Transaction) -> int:
        """The least offset that is readable."""
        return self.state(txn).start

    def end(self, txn: lmdb.Transaction) -> int:
        """The offset behind the last batch."""
        return self.state(txn).end

    def low_water_mark(self, txn: lmdb.Transaction) -> int:
        """The highest that a control batch carried: transactions below it have ended."""
        return self.state(txn).low_water_mark

    def last_stable_offset(self, txn: lmdb.Transaction) -> int:
        """The first offset of the first open transaction, else the end; not below the start."""
        return self.bounds(txn)[2]

    def bounds(self, txn: lmdb.Transaction, state: LogState | None = None) -> tuple[int, int, int]:
        """Start, end and last stable offset, with one look at the record."""
        record = state or self.state(txn)
        start, end = record.start, record.end
        if end == start:
            return start, end, end
        first = self._of(txn).open.first()
        return start, end, end if first is None else max(first, start)

    def open_transactions(self, txn: lmdb.Transaction) -> list[OpenTxn]:
        """Transactions with messages here and no end marker yet, by first offset."""
        if self.state(txn) is _EMPTY:
            return []
        return self._of(txn).open.all()

    def open_at(self, txn: lmdb.Transaction, offset: int) -> list[OpenTxn]:
        """Transactions that the batches below an offset, at which one begins, leave open."""
        return self.state_at(txn, offset).open.below(1 << 64)

    def first_offset_of(self, txn: lmdb.Transaction, txn_id: int) -> int | None:
        """The first offset of an open transaction; None when it has nothing open here."""
        if self.state(txn) is _EMPTY:
            return None
        found = self._of(txn).open.get(txn_id)
        return None if found is None else found.first_offset

    # -- reading -----------------------------------------------------------------------

    def read(
        self,
        txn: lmdb.Transaction,
        offset: int,
        max_bytes: int,
        upto: int | None = None,
        *,
        raw: bool = False,
        state: LogState | None = None,
    ) -> list[Buffer]:
        """Whole batches, from the one that holds an offset on.

        Args:
            txn: a read or a write transaction; the views end with it.
            offset: in [start, end].
            max_bytes: of all together when they are decoded; one batch is given, however
                large it is. It may be less when there is more: the read ends with a chunk.
            upto: batches at or above this offset are left out; it is at a batch's edge.
            raw: SIDE_LIST markers as they are, not the batches that they stand for.
            state: of the log, if it is known.

        Returns:
            Views of LMDB's map, in offset order, each of one or more batches. Nothing when
            there is no batch at the offset yet.

        Only headers and offsets are looked at: who decodes them asks for checksums (`intact`).

        Raises:
            OffsetOutOfRangeError: the log does not hold the offset.
            CorruptionError: no batch is there that makes sense. What stands before that is given.
        """
        record = state or self.state(txn)
        if not record.start <= offset <= record.end:
            raise OffsetOutOfRangeError(
                f"read at offset {offset} of a log that holds [{record.start}, {record.end}): "
                "begin at one of these"
            )
        end = record.end if upto is None or upto > record.end else upto
        if offset >= end:
            return []
        found: list[Buffer] = []
        room = max_bytes
        try:
            for part in self._parts(txn, offset, end, max_bytes, raw):
                fit, decoded = within(part, room)
                if fit < len(part):
                    # A chunk is cut only if there would be little without it, so that a reader goes
                    # from chunk to chunk and the next read begins with a whole one.
                    if not found or room > max_bytes // 2:
                        cut = fit or (0 if found else first_length(part))
                        found += [part[:cut]] if cut else []
                    break
                found.append(part)
                room -= decoded
        except CorruptionError:
            if not found:
                raise
            # What stands before the damage is given first; the next read begins with it.
        return found

    def chunks(self, txn: lmdb.Transaction) -> ChunkReader:
        """The chunks of a log that holds something, as they lie."""
        return self._of(txn).chunks()

    def _parts(
        self,
        txn: lmdb.Transaction,
        offset: int,
        end: int,
        max_bytes: int,
        raw: bool = False,
    ) -> Iterator[memoryview]:
        """Batches in [offset, end), in views as long as may be, for as long as they are taken.

        Raises:
            CorruptionError: the header of the batch that comes next makes no sense.
        """
        expand = None if raw else self.expand
        chunks = self._of(txn).chunks()
        found = chunks.at(offset)
        at = offset
        while found is not None and found[0] <= at < end:
            base, chunk = found
            start, stop, following = sound(chunk, base, at, checksums=False)
            is_whole = stop == len(chunk)
            if start == stop:
                at = following
                break
            if expand is not None and is_whole and is_side_list(chunk):
                yield from self._expanded(txn, chunk, at, end, max_bytes)
            else:
                part = chunk[start:stop] if start or not is_whole else chunk
                yield from below(part, end) if following > end else (part,)
            at = following
            found = chunks.next() if is_whole else None
        if at < end:
            raise damaged(at)

    def _expanded(
        self, txn: lmdb.Transaction, marker: memoryview, offset: int, end: int, max_bytes: int
    ) -> Iterator[memoryview]:
        assert self.expand is not None
        copy = bytes(marker)
        end = min(end, next_offset(copy))
        while offset < end:
            begin = offset
            for part, base in self._side_batches(txn, copy, offset, max_bytes):
                _, size, following = sound(part, base, base, checksums=False)
                if size:
                    yield from below(part[:size], end)
                if size < len(part):
                    raise damaged(following)
                offset = following
                if offset >= end:
                    return
            if offset == begin:
                raise damaged(offset)

    def _side_batches(
        self, txn: lmdb.Transaction, marker: bytes, offset: int, max_bytes: int
    ) -> Iterator[tuple[memoryview, int]]:
        """Yield the batches that a marker stands for, from an offset on, and the offset of each."""
        assert self.expand is not None
        try:
            for batches in self.expand(txn, marker, offset, max_bytes):
                part = memoryview(batches).cast("B")
                yield part, base_at(part, 0)
        except (CorruptionError, CoreError) as error:
            raise CorruptionError(f"offset {offset}: {error}") from None

    # -- the indexes -------------------------------------------------------------------

    def has_aborted(self, txn: lmdb.Transaction, offset: int) -> bool:
        """Tell whether an aborted transaction ends at or behind an offset."""
        with txn.cursor(db=self.environment.db(ABORTED)) as cursor:
            return bool(cursor.set_range(KEY.pack(offset)))

    def aborted(self, txn: lmdb.Transaction, offset: int, upto: int) -> list[AbortedEntry]:
        """The aborted transactions that may have batches in [offset, upto), by last offset.

        Those that begin below `upto` and end at or behind `offset`. The cost grows with them,
        and not with what was aborted before, behind or around them.
        """
        record = self.state(txn)
        if record is _EMPTY:
            return []
        found = self._of(txn).aborted.overlapping(offset, upto, record.end)
        chunks = self.chunks(txn) if found else None
        for entry in found:
            if entry.first_offset >= record.start and chunks is not None:
                chunks.compare(entry)
        return found

    def commits(self, txn: lmdb.Transaction, offset: int, limit: int) -> list[CommitEntry]:
        """List where messages become visible, by position: at most so many, from an offset on.

        COMMIT markers, SIDE_LIST markers, batches that were decided when they were written, and
        batches outside of transactions (id 0); those that take an offset at or above `offset`.
        """
        record = self.state(txn)
        if record is _EMPTY:
            return []
        found: list[CommitEntry] = []
        passed: CommitEntry | None = None
        for entry in self._of(txn).commits.around(offset):
            if entry.marker_offset + entry.count <= offset:
                passed = entry
                continue
            found.append(entry)
            if len(found) >= limit:
                break
        # One that were not where it is noted would be passed in silence. In order, it is the last.
        if passed is not None:
            self.verify(txn, passed)
        return found

    def verify(self, txn: lmdb.Transaction, entry: CommitEntry) -> None:
        """Compare an entry of the index of commits with what the log has there.

        Raises:
            CorruptionError: they differ, or the log is damaged there.
        """
        start = self.state(txn).start
        if entry.marker_offset >= start:
            compare(self.chunks(txn), entry, start, has_side=self.expand is not None)

    def commit_before(self, txn: lmdb.Transaction, offset: int) -> CommitEntry | None:
        """Return the last of `commits` below an offset; see `Commits.last_before`."""
        if self.state(txn) is _EMPTY:
            return None
        commits = self._of(txn).commits
        found = commits.last_before(offset)
        # As in `commits`: it and the next one say that nothing was left out between them.
        begin = 0 if found is None else found.marker_offset
        for entry in commits.around(begin):
            if entry.marker_offset >= begin:
                self.verify(txn, entry)
            if entry.marker_offset >= offset:
                break
        return found

    def segments(self, txn: lmdb.Transaction) -> list[Segment]:
        """All segments, oldest first."""
        if self.state(txn) is _EMPTY:
            return []
        return self._of(txn).segments.all()

    def aborted_index(self, txn: lmdb.Transaction, segment_base: int) -> bytes:
        """The aborted index of the segment that begins at an offset: entries of 34 bytes."""
        if self.state(txn) is _EMPTY:
            return b""
        following = self._of(txn).segments.after(segment_base)
        high = self.end(txn) if following is None else following.base
        return self._of(txn).aborted.between(segment_base, high)

    def offset_for_time(self, txn: lmdb.Transaction, micros: int) -> int | None:
        """The first readable message that is not older than a time; None when all are.

        Args:
            micros: microseconds since 1970.
        """
        record = self.state(txn)
        for segment in self.segments(txn):
            if segment.max_timestamp < micros:
                continue
            following = self._of(txn).segments.after(segment.base)
            low = max(segment.base, record.start)
            high = record.end if following is None else following.base
            for part in self._parts(txn, low, high, 1 << 20):
                found = first_not_older(whole(part), low, micros)
                if found is not None:
                    return found
        return None

    # -- databases ---------------------------------------------------------------------

    def _of(self, txn: lmdb.Transaction) -> LogParts:
        return LogParts(txn, self.environment)


def first_not_older(batches: Any, low: int, micros: int) -> int | None:
    """The offset of the first message at or behind `low` that is not older than a time.

    Args:
        batches: one or more whole ones.
        low: an offset.
        micros: microseconds since 1970.

    Returns:
        None when all are older.
    """
    for at, header in walked(batches):
        if header.max_timestamp < micros or not header.rows or header.next_offset <= low:
            continue
        if header.base_timestamp >= micros and not header.has_places:
            return max(header.base_offset, low)
        found = _inside(batches[at : at + header.length], low, micros)
        if found is not None:
            return found
    return None


def _inside(batch: Any, low: int, micros: int) -> int | None:
    rows = decode(batch, all_data(batch, low, 1 << 63), low, None)
    times = rows.column("timestamp").cast("int64").to_pylist()
    offsets = rows.column("offset").to_pylist()
    pairs = zip(offsets, times, strict=True)
    return next((offset for offset, time in pairs if time >= micros), None)
