"""The two indexes of a log inside its LMDB environment: of commits, and of what was aborted.

The index of commits says where in a log messages became visible: at the COMMIT marker of a
transaction, at a batch that was decided when it was written, at a batch outside of any
transaction. A reader in commit order goes from one to the next and never looks at what is open
between them. Entries of one chunk share an LMDB value, little-endian:

    key    the first marker offset, u64 big-endian
    value  n x { u64 marker | u32 count | u64 transaction | u64 first offset | u64 commit ts }
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final

import lmdb

from txnkv.topics.aborted_index import AbortedEntry
from txnkv.topics.log_chunks import KEY, delete_range, seek_at_or_below
from txnkv.topics.partition_state import CommitEntry

_COMMIT: Final = struct.Struct("<QIQQQ")
_ENDS: Final = struct.Struct(">QQ")


class Commits:
    """The index of commits inside an LMDB transaction."""

    def __init__(self, txn: lmdb.Transaction, db: Any) -> None:
        self._txn = txn
        self._db = db

    def put(self, entries: Sequence[CommitEntry]) -> None:
        """Adds entries behind all others."""
        value = b"".join([_COMMIT.pack(*entry) for entry in entries])
        self._txn.put(KEY.pack(entries[0].marker_offset), value, db=self._db, append=True)

    def from_offset(self, offset: int) -> Iterator[CommitEntry]:
        """Entries whose marker or batch ends behind an offset, by position."""
        with self._txn.cursor(db=self._db) as cursor:
            found = seek_at_or_below(cursor, KEY.pack(offset)) or cursor.first()
            while found:
                for fields in _COMMIT.iter_unpack(cursor.value()):
                    entry = CommitEntry(*fields)
                    if entry.marker_offset + entry.count > offset:
                        yield entry
                found = cursor.next()

    def truncate(self, offset: int) -> None:
        """Removes entries at or behind an offset, where a batch begins."""
        delete_range(self._txn, self._db, KEY.pack(offset), None)
        with self._txn.cursor(db=self._db) as cursor:
            if not cursor.last():
                return
            group = [CommitEntry(*fields) for fields in _COMMIT.iter_unpack(cursor.value())]
        kept = [entry for entry in group if entry.marker_offset < offset]
        if len(kept) < len(group):
            value = b"".join([_COMMIT.pack(*entry) for entry in kept])
            self._txn.put(KEY.pack(kept[0].marker_offset), value, db=self._db)

    def drop_below(self, offset: int) -> None:
        """Removes those below an offset at which a chunk begins."""
        delete_range(self._txn, self._db, b"", KEY.pack(offset))


class Aborted:
    """The aborted index inside an LMDB transaction."""

    def __init__(self, txn: lmdb.Transaction, db: Any) -> None:
        self._txn = txn
        self._db = db

    def put(self, entry: AbortedEntry) -> None:
        """Adds an entry."""
        key = _ENDS.pack(entry.last_offset, entry.first_offset)
        self._txn.put(key, entry.pack(), db=self._db)

    def from_offset(self, offset: int) -> Iterator[AbortedEntry]:
        """Entries that end at or behind an offset."""
        with self._txn.cursor(db=self._db) as cursor:
            found = cursor.set_range(KEY.pack(offset))
            while found:
                yield AbortedEntry.unpack(cursor.value())
                found = cursor.next()

    def between(self, low: int, high: int) -> bytes:
        """The entries that end in [low, high), one behind the other."""
        parts = []
        with self._txn.cursor(db=self._db) as cursor:
            found = cursor.set_range(KEY.pack(low))
            while found and bytes(cursor.key()) < KEY.pack(high):
                parts.append(bytes(cursor.value()))
                found = cursor.next()
        return b"".join(parts)

    def truncate(self, offset: int) -> None:
        """Removes entries that end at or behind an offset."""
        delete_range(self._txn, self._db, KEY.pack(offset), None)

    def drop_below(self, offset: int) -> None:
        """Removes entries that end below an offset."""
        delete_range(self._txn, self._db, b"", KEY.pack(offset))
