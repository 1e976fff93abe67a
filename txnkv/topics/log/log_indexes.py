"""The two indexes of a log inside its LMDB environment: of commits, and of what was aborted.

The index of commits says where in a log messages became visible: at the COMMIT marker of a
transaction, at a batch that was decided when it was written, at a batch outside of any
transaction. A reader in commit order goes from one to the next and never looks at what is open
between them. Entries of one chunk share an LMDB value, little-endian:

    key    the first marker offset, u64 big-endian
    value  n x { u64 marker | u32 count | u64 transaction | u64 first offset | u64 commit ts }

The aborted index is sought by last offset. What ends behind a fetch and begins before its end is
not found so, and the last stable offsets of entries, which would tell, have no checksum. So entries
are in *bins* too. A bin of level n is 8^n offsets, aligned; an entry lies in the smallest bin
that holds all of it. What goes over an offset is then in one of the few bins, one a level,
that hold the offset; and of the others in those, only a bin's seven inner edges are crossed.

    level 1   |0......7|8.....15|16....23|        [3, 6] in 1:0     [6, 9] in 2:0
    level 2   |0..............................63|    over 8: look in 1:1 and 2:0, find [6, 9]

    key    u8 level | u64 bin | u64 last offset | u64 first offset, big-endian
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final

import lmdb

from txnkv.core import ControlType, read_control, read_header, walk
from txnkv.errors import CorruptionError
from txnkv.topics.log.log_chunks import (
    KEY,
    ChunkReader,
    LogPart,
    delete_range,
    seek_at_or_below,
    unlike,
)
from txnkv.topics.log.partition_state import AbortedEntry, CommitEntry, unpack_entries

_COMMIT: Final = struct.Struct("<QIQQQ")
_ENDS: Final = struct.Struct(">QQ")
_BIN: Final = struct.Struct(">BQQQ")
_BITS: Final = 3
_TOGETHER: Final = 256
"""Entries of one value, where they are not those of a chunk."""


class Commits(LogPart):
    """The index of commits inside an LMDB transaction."""

    def put(self, entries: Sequence[CommitEntry]) -> None:
        """Adds entries behind all others."""
        value = b"".join([_COMMIT.pack(*entry) for entry in entries])
        self._txn.put(KEY.pack(entries[0].marker_offset), value, db=self._db, append=True)

    def replace(self, low: int, high: int, entries: Sequence[CommitEntry]) -> None:
        """Put entries in the place of those in [low, high), at whose ends batches begin."""
        there: list[CommitEntry] = []
        with self._txn.cursor(db=self._db) as cursor:
            found = seek_at_or_below(cursor, KEY.pack(low)) or cursor.first()
            while found and bytes(cursor.key()) < KEY.pack(high):
                there += _unpacked(cursor.key(), cursor.value())
                found = cursor.next()
        if there:
            first = KEY.pack(there[0].marker_offset)
            delete_range(self._txn, self._db, first, KEY.pack(high))
        before = [entry for entry in there if entry.marker_offset < low]
        behind = [entry for entry in there if entry.marker_offset >= high]
        for kept in (before, entries, behind):  # each is in a segment, and goes with it
            for at in range(0, len(kept), _TOGETHER):
                some = kept[at : at + _TOGETHER]
                value = b"".join([_COMMIT.pack(*entry) for entry in some])
                self._txn.put(KEY.pack(some[0].marker_offset), value, db=self._db)

    def around(self, offset: int) -> Iterator[CommitEntry]:
        """Entries by position, from one that begins at or below an offset on, if there is one.

        Raises:
            CorruptionError: they do not stand in order.
        """
        end = stamp = 0
        with self._txn.cursor(db=self._db) as cursor:
            found = seek_at_or_below(cursor, KEY.pack(offset)) or cursor.first()
            while found:
                entries = _unpacked(cursor.key(), cursor.value())
                for entry in entries:
                    marker = entry.marker_offset
                    in_order = end <= marker and (not entry.commit_ts or stamp <= entry.commit_ts)
                    if not in_order or not entry.count or entry.first_offset > marker:
                        raise unlike(entry.marker_offset, "index of commits")
                    end = entry.marker_offset + entry.count
                    stamp = entry.commit_ts or stamp
                    yield entry
                found = cursor.next()

    def from_offset(self, offset: int) -> Iterator[CommitEntry]:
        """Entries whose marker or batch ends behind an offset, by position."""
        for entry in self.around(offset):
            if entry.marker_offset + entry.count > offset:
                yield entry

    def last_before(self, offset: int) -> CommitEntry | None:
        """The last entry whose marker or batch begins below an offset.

        One without a timestamp gets that of the one before it.
        """
        last: CommitEntry | None = None
        with self._txn.cursor(db=self._db) as cursor:
            found = offset > 0 and seek_at_or_below(cursor, KEY.pack(offset - 1))
            while found:
                for entry in reversed(_unpacked(cursor.key(), cursor.value())):
                    if entry.marker_offset >= offset:
                        continue
                    last = last or entry
                    if entry.commit_ts:
                        return last._replace(commit_ts=entry.commit_ts)
                found = cursor.prev()
        return last

    def truncate(self, offset: int) -> None:
        """Removes entries at or behind an offset, where a batch begins."""
        self.drop_from(offset)
        with self._txn.cursor(db=self._db) as cursor:
            if not cursor.last():
                return
            group = [CommitEntry(*fields) for fields in _COMMIT.iter_unpack(cursor.value())]
        kept = [entry for entry in group if entry.marker_offset < offset]
        if len(kept) < len(group):
            value = b"".join([_COMMIT.pack(*entry) for entry in kept])
            self._txn.put(KEY.pack(kept[0].marker_offset), value, db=self._db)


def compare(chunks: ChunkReader, entry: CommitEntry, start: int, *, has_side: bool) -> None:
    """See that an entry of the index of commits is what the log has there.

    Args:
        start: of the log, not behind the entry's marker.

    Raises:
        CorruptionError: it is not, or the log is damaged there.
    """
    marker = entry.marker_offset
    header, batch = chunks.batch(marker)
    first, stamp = marker, header.commit_ts or entry.commit_ts
    if header.is_control:
        control = read_control(batch)
        if control.type is ControlType.COMMIT:
            first = control.first_offset or _first_of(chunks, entry, start)
    there = CommitEntry(header.base_offset, header.count, header.txn_id, first, stamp)
    if has_side and header.count < entry.count:
        # Compaction has put several batches in the place of a marker.
        last, _ = chunks.batch(marker + entry.count - 1)
        if (last.next_offset, last.commit_ts) == (marker + entry.count, header.commit_ts):
            there = there._replace(count=entry.count)
    if there != entry:
        raise unlike(marker, "index of commits")


def _first_of(chunks: ChunkReader, entry: CommitEntry, start: int) -> int:
    """Find where a transaction begins whose marker says 0, perhaps because nobody told it."""
    if entry.first_offset < start:
        return entry.first_offset  # retention took the batch that says it
    found = chunks.at(0)
    begins = found is not None and found[0] == 0 and read_header(found[1]).txn_id == entry.txn_id
    if begins and not _ended(chunks, entry.txn_id, entry.first_offset):
        return 0
    header, _ = chunks.batch(entry.first_offset)
    return header.base_offset if header.txn_id == entry.txn_id else -1


def _ended(chunks: ChunkReader, txn_id: int, offset: int) -> bool:
    """Tell whether a transaction at offset 0 ends before an offset, as one that begins again."""
    found = chunks.at(0) if offset else None
    while found is not None and found[0] < offset:
        for _, header in walk(found[1]):
            if header.base_offset >= offset:
                return False
            if header.is_control and header.txn_id == txn_id:
                return True
        found = chunks.next()
    return False


def _unpacked(key: Any, value: Any) -> list[CommitEntry]:
    base = KEY.unpack(key)[0]
    entries = [CommitEntry(*fields) for fields in _COMMIT.iter_unpack(value)]
    if not entries or entries[0].marker_offset != base:
        raise unlike(base, "index of commits")
    return entries


class Aborted(LogPart):
    """The aborted index inside an LMDB transaction.

    Args:
        txn: of LMDB.
        db: of the entries.
        spans: of the bins.
    """

    def __init__(self, txn: lmdb.Transaction, db: Any, spans: Any) -> None:
        super().__init__(txn, db)
        self._spans = spans

    def put(self, entry: AbortedEntry) -> None:
        """Adds an entry."""
        self._txn.put(_ends(entry), entry.pack(), db=self._db)
        self._txn.put(_bin_key(entry), b"", db=self._spans)

    def from_offset(self, offset: int) -> Iterator[AbortedEntry]:
        """Entries that end at or behind an offset."""
        with self._txn.cursor(db=self._db) as cursor:
            found = cursor.set_range(KEY.pack(offset))
            while found:
                yield _at(cursor.key(), cursor.value())
                found = cursor.next()

    def overlapping(self, offset: int, upto: int, end: int) -> list[AbortedEntry]:
        """Entries that have a part in [offset, upto), by last offset.

        Args:
            offset: the first offset.
            upto: the one behind the last.
            end: of the log.
        """
        found: list[AbortedEntry] = []
        for entry in self.from_offset(offset):
            if entry.last_offset >= upto:
                return found + self._over(upto, end)
            found.append(entry)
        return found

    def _over(self, offset: int, end: int) -> list[AbortedEntry]:
        """Entries that begin below an offset and end at or behind it, by last offset."""
        ends = []
        with self._txn.cursor(db=self._spans) as cursor:
            for level in range(1, end.bit_length() // _BITS + 2):
                place = offset >> (_BITS * level)
                found = cursor.set_range(_BIN.pack(level, place, offset, 0))
                while found:
                    at, bin, last, first = _BIN.unpack(cursor.key())
                    if (at, bin) != (level, place):
                        break
                    if first < offset:
                        ends.append((last, first))
                    found = cursor.next()
        return [self._get(last, first) for last, first in sorted(ends)]

    def _get(self, last: int, first: int) -> AbortedEntry:
        found = self._txn.get(_ENDS.pack(last, first), db=self._db)
        if found is None:
            raise CorruptionError(
                f"aborted index: the entry [{first}, {last}] is gone. Check the store"
            )
        return _at(_ENDS.pack(last, first), found)

    def bins(self) -> list[tuple[int, int]]:
        """Last and first offset of all entries that are in bins."""
        with self._txn.cursor(db=self._spans) as cursor:
            keys = [_BIN.unpack(key) for key in cursor.iternext(values=False)]
        return sorted((last, first) for _, _, last, first in keys)

    def between(self, low: int, high: int) -> bytes:
        """The entries that end in [low, high), one behind the other."""
        parts = []
        with self._txn.cursor(db=self._db) as cursor:
            found = cursor.set_range(KEY.pack(low))
            while found and bytes(cursor.key()) < KEY.pack(high):
                parts.append(bytes(cursor.value()))
                found = cursor.next()
        return b"".join(parts)

    def replace(self, low: int, high: int, entries: Sequence[AbortedEntry]) -> None:
        """Put entries in the place of those that end in [low, high)."""
        self._drop(low, high)
        for entry in entries:
            self.put(entry)

    def truncate(self, offset: int) -> None:
        """Removes entries that end at or behind an offset."""
        self._drop(offset, 1 << 63)

    def drop_below(self, offset: int) -> None:
        """Removes entries that end below an offset."""
        self._drop(0, offset)

    def _drop(self, low: int, high: int) -> None:
        for entry in unpack_entries(self.between(low, high)):
            self._txn.delete(_bin_key(entry), db=self._spans)
        delete_range(self._txn, self._db, KEY.pack(low), KEY.pack(high))


def _at(key: Any, value: Any) -> AbortedEntry:
    last, first = _ENDS.unpack(key)
    try:
        entry = AbortedEntry.unpack(value)
    except CorruptionError as error:
        raise CorruptionError(f"offset {first}: {error}") from None
    if (last, first) != (entry.last_offset, entry.first_offset):
        raise unlike(first, "aborted index")
    return entry


def _ends(entry: AbortedEntry) -> bytes:
    return _ENDS.pack(entry.last_offset, entry.first_offset)


def _bin_key(entry: AbortedEntry) -> bytes:
    first, last = entry.first_offset, entry.last_offset
    level = -(-(first ^ last).bit_length() // _BITS)
    return _BIN.pack(level, first >> (_BITS * level), last, first)
