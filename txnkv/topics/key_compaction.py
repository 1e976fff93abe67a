"""Key compaction: of the messages of a key the last committed one stays, at its offset.

    offset     0    1    2    3    4    5    6    7         last stable offset 8
    log        a=1  b=1  a=2  c=1  b=-  C    a=3  d=1       b=- : a tombstone, a message without
    kept                      c=1  b=-       a=3  d=1       value; C: a marker

A pass looks at the messages that have come since the last one, and notes the last offset of each
key. Then it goes through the log from its beginning, a piece at a time, and leaves out what a later
message hides; each piece is put in one LMDB transaction (`log_rewriter`). At the end it notes how
far it has looked. So whoever dies leaves a log in which every key has its last value, and some
have earlier ones still; the next pass begins with the same look.

    below the mark      no two messages of a key; what is hidden is hidden by what lies behind it
    [mark, end)         looked at; at most `_MOST_KEYS` keys at a time, then the next pass
    behind the end      the last segment, to which messages are added, and what is not decided

Messages without a key stay. A tombstone goes `tombstone_seconds` behind its timestamp, when it is
the last message of its key: those before it went in the same pass, earlier, or in one before. A
reader that is less behind than that sees the tombstone of each value that it was given.

A large message is all of its pieces, at the offset of the last one; its key is in the first. All
stay or all go. One whose end is not looked at yet stays.

Copies of topics of other stores are compacted by themselves, but for their last segments.

`Store.log_cuts` is held for a piece, and given back between two. What may come between: the log is
cut off or rewritten by others, which its record says, the topic is dropped or keeps all messages
from now on: then the pass ends. Retention takes the beginning, which hides nothing. Keys are noted
without the lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import lmdb
import pyarrow as pa

from txnkv.core import BatchHeader, LastKeys, Spans, decode, read_chunk
from txnkv.storage import declare_fault_point, fault_point
from txnkv.topics import retention
from txnkv.topics.log import NOTHING, Rewritten, declare_places, next_offset
from txnkv.topics.read import OffsetReader
from txnkv.topics.topic_catalog import TopicInfo
from txnkv.topics.topics import Partition, Topics
from txnkv.topics.write import roll_forward

declare_fault_point("compaction.put", "a piece of a compacted log is durable")
declare_fault_point("compaction.marked", "how far a log is compacted is noted, durably")

_MOST_KEYS: Final = 1 << 20
"""Keys that a pass notes, about."""

_PIECE_BYTES: Final = 1 << 20
"""Bytes of batches of a piece, about: others wait so long."""

_MOST_BYTES: Final = 256 << 20
"""Bytes of memory for them, about."""

_READ_BYTES: Final = 1 << 20


@dataclass
class HiddenLeftOut:
    """The result of compaction.

    Attributes:
        messages: that went.
        bytes_before, bytes_after: of the batches that were rewritten.
    """

    messages: int = 0
    bytes_before: int = 0
    bytes_after: int = 0

    def add(self, more: HiddenLeftOut) -> None:
        self.messages += more.messages
        self.bytes_before += more.bytes_before
        self.bytes_after += more.bytes_after


def compact_all(
    topics: Topics, check: Callable[[], None] = lambda: None, *, force: bool = False
) -> HiddenLeftOut:
    """Compact every topic of a store that is to be; see `compact`."""
    done = HiddenLeftOut()
    for topic in compacted(topics):
        topics.partitions(topic)  # they have its options from here on
        topics.each(
            topic.partitions,
            "compaction",
            lambda partition: done.add(compact(topics, partition, check, force=force)),
        )
    return done


def compacted(topics: Topics) -> list[TopicInfo]:
    """Return the topics that are to be compacted."""
    found = [topics.find(name) for name in topics.names()]
    return [each for each in found if each is not None and each.options.cleanup == "compact"]


def compact(
    topics: Topics,
    partition: Partition,
    check: Callable[[], None] = lambda: None,
    *,
    force: bool = False,
) -> HiddenLeftOut:
    """Leave out what later messages of the same key hide.

    Args:
        topics: of the store.
        partition: of a topic that is not dropped.
        check: called with each read and inside each LMDB write; raises to stop.
        force: all that is decided; else only closed segments, when half of their bytes have come
            since the last pass.
    """
    options = partition.topic.options
    done = HiddenLeftOut()
    if options.cleanup != "compact" or not partition.exists:
        return done
    if force and options.replica_of is not None:
        return done  # its end is how the next copy knows where it goes on
    if force:
        roll_forward.complete(topics, partition)
    while True:
        made = _Pass(topics, partition, check).run(force=force)
        if made is None:
            return done
        done.add(made.done)
        if made.is_last:
            return done


@dataclass
class _Large:
    """Large messages that end in what a pass looks at.

    Attributes:
        ends: their last offsets, by the first.
        begun: offsets of pieces of those whose end lies behind it.
        open: transactions that end behind it.
        gone: ids of those that go.
    """

    ends: dict[int, int] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    open: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)


class _Pass:
    """One look at the keys and one way through the log."""

    def __init__(self, topics: Topics, partition: Partition, check: Callable[[], None]) -> None:
        self._topics = topics
        self._partition = partition
        self._log = partition.log
        self._environment = partition.environment
        self._check = check
        self._last = LastKeys()
        self._large = _Large()
        kept = int(partition.topic.options.tombstone_seconds * 1e6)
        self._oldest = retention.aging_now(topics) - kept
        self.done = HiddenLeftOut()
        self.is_last = True
        self._known = Rewritten()

    def run(self, *, force: bool) -> _Pass | None:
        """Do it; None when there is nothing to do."""
        with self._environment.read() as txn:
            start, self._known = self._log.start(txn), self._log.rewritten(txn)
            mark = self._known.upto
            upto = self._limit(txn, force=force)
            if upto <= start or not (force or self._is_worth_it(txn, mark, upto)):
                return None
        upto = self._note_keys(max(mark, start), upto)
        store = self._topics.store
        for low, high in self._pieces(upto):
            with store.log_cuts(wait=force):
                if not (self._is_wanted_still() and self._rewrite(low, high)):
                    return self  # what hides messages there must stay, too
        with store.log_cuts(wait=force):
            if self._environment.write(lambda txn: self._note_mark(txn, upto)):
                fault_point("compaction.marked")
        return self

    def _is_wanted_still(self) -> bool:
        topics, topic = self._topics, self._partition.topic
        found = topics.find(topic.name)
        if found is None or found.id != topic.id:
            return False
        topics.partitions(found)  # they have its options from here on
        return found.options.cleanup == "compact"

    # -- how far -----------------------------------------------------------------------

    def _limit(self, txn: lmdb.Transaction, *, force: bool) -> int:
        """The end of the last chunk in which all may be looked at."""
        limit = self._log.last_stable_offset(txn)
        segments = self._log.segments(txn)
        if not force:
            limit = min(limit, segments[-1].base if segments else 0)
        kept = retention.kept_from(self._topics, self._partition)
        return self._edge(txn, limit if kept is None else min(limit, kept))

    def _edge(self, txn: lmdb.Transaction, limit: int) -> int:
        """The last edge of chunks at or below an offset."""
        if limit >= self._log.end(txn):
            return limit
        found = self._log.chunks(txn).at(limit)
        return 0 if found is None else min(found[0], limit)

    def _is_worth_it(self, txn: lmdb.Transaction, mark: int, upto: int) -> bool:
        segments = [each for each in self._log.segments(txn) if each.base < upto]
        fresh = sum(each.bytes for each in segments if each.base >= mark)
        return fresh * 2 >= sum(each.bytes for each in segments) and fresh > 0

    # -- keys --------------------------------------------------------------------------

    def _note_keys(self, begin: int, upto: int) -> int:
        """Note the last offset of each key in [begin, upto); up to where that was done."""
        reader = OffsetReader(
            self._topics, self._partition, begin, "read_committed", _READ_BYTES, skip_lost=True
        )
        last, large = self._last, self._large
        for rows in reader.batches(upto):
            self._check()
            large.ends |= {pieces[0]: end for end, pieces in reader.large.items()}
            last.note(rows)
            seen = rows.column("offset")[-1].as_py() + 1
            is_full = len(last) > _MOST_KEYS or last.nbytes > _MOST_BYTES
            if is_full and seen < upto:
                with self._environment.read() as txn:
                    nearer = self._edge(txn, seen)
                if nearer > begin:
                    upto, self.is_last = nearer, False
                    break
        large.begun = reader.begun
        with self._environment.read() as txn:
            state = self._log.state_at(txn, upto)
        large.open = {each.txn_id for each in state.open.below(1 << 64)}
        return upto

    def _note_mark(self, txn: lmdb.Transaction, upto: int) -> bool:
        self._check()
        if self._log.rewritten(txn) != self._known:
            return False
        self._log.note_rewritten(txn, upto)
        return True

    # -- pieces ------------------------------------------------------------------------

    def _pieces(self, upto: int) -> Iterator[tuple[int, int]]:
        """Ranges of offsets, at the edges of chunks, each in one segment."""
        with self._environment.read() as txn:
            bases = [each.base for each in self._log.segments(txn) if each.base < upto]
        for base, end in pairwise([*bases, upto]):
            low = base
            while low < end:
                high = self._piece_end(low, end)
                yield low, high
                low = high

    def _piece_end(self, low: int, end: int) -> int:
        size, high = 0, low
        with self._environment.read() as txn:
            for _, chunk in self._log.chunks(txn).between(low, end):
                size += len(chunk)
                high = next_offset(chunk)
                if size >= _PIECE_BYTES:
                    break
        return min(high, end)

    def _rewrite(self, low: int, high: int) -> bool:
        """Rewrite a piece; False when somebody else has, meanwhile."""
        self._check()
        with self._environment.read() as txn:
            known = self._known
            if self._log.rewritten(txn) != known:
                return False
            if self._log.segments(txn)[0].base > low:
                return True  # retention has taken it
            state = self._log.state_at(txn, low)
            codec = self._partition.topic.options.compression
            piece = self._log.piece(txn, state, high, self._wanted, codec)
            if not piece.changed:
                return True
            piece = piece._replace(batches=[bytes(batch) for batch in piece.batches])
            before = sum(len(chunk) for _, chunk in self._log.chunks(txn).between(low, high))

        for batch in piece.batches:
            declare_places(self._topics.store, batch)

        def put(txn: lmdb.Transaction) -> bool:
            self._check()
            if self._log.rewritten(txn) != known or self._log.segments(txn)[0].base > low:
                return False
            piece.put(txn, self._environment)
            return True

        if not self._environment.write(put):
            return False
        self._known = known._replace(pieces=known.pieces + 1)
        self.done.add(HiddenLeftOut(piece.dropped, before, sum(map(len, piece.batches))))
        fault_point("compaction.put")
        return True

    # -- messages ----------------------------------------------------------------------

    def _wanted(self, header: BatchHeader, batch: Any) -> pa.UInt32Array | None:
        """The messages of a batch that no later one hides; None: all."""
        chunk = read_chunk(batch)
        if chunk is not None and chunk.piece:
            return NOTHING if chunk.message_id in self._large.gone else None
        if not header.rows:
            return NOTHING
        rows = decode(batch, Spans.of([(0, header.length)]), 0, checked=True)
        if chunk is not None:
            if not self._is_large_hidden(header, rows):
                return None
            self._large.gone.add(chunk.message_id)
            return NOTHING
        kept = self._last.choose(rows, self._oldest)
        return None if len(kept) == header.rows else kept

    def _is_large_hidden(self, header: BatchHeader, rows: pa.RecordBatch) -> bool:
        base, large = header.base_offset, self._large
        if base in large.begun or header.txn_id in large.open:
            return False
        end = large.ends.get(base, base)
        return self._last.last(rows.column("key")[0].as_py()) > end
