"""Segments: how a log is cut, so that it can be given back in pieces.

A segment begins at a batch and ends where the next one begins. It is made by size, by the age
of its messages, or on demand, and its end is never changed again. What belongs to a segment
lies under offsets in it: chunks, aborted entries (by marker), commits, snapshots. So dropping
the oldest is dropping everything below the base of the next.

LMDB key: base offset, u64 big-endian. Value, little-endian:

    i64 created | i64 max timestamp | u64 bytes

Size and age are taken from the batches alone, so a follower cuts its log at the same offsets.
"""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

import lmdb

from txnkv.errors import CorruptionError
from txnkv.topics.log.log_chunks import KEY, delete_range

_SEGMENT: Final = struct.Struct("<qqQ")
NEVER: Final = -(1 << 63)
"""The timestamps of a segment without batches."""


class Segment(NamedTuple):
    """A piece of a log.

    Attributes:
        base: its first offset.
        created: timestamp of its first batch, microseconds since 1970; `NEVER` when it is empty.
        bytes: of its batches.
        max_timestamp: the highest of its messages and markers.
    """

    base: int
    created: int
    bytes: int
    max_timestamp: int

    @classmethod
    def empty(cls, base: int) -> Segment:
        """One without batches."""
        return cls(base, NEVER, 0, NEVER)


class Segments:
    """The segments of a log inside an LMDB transaction."""

    def __init__(self, txn: lmdb.Transaction, db: Any) -> None:
        self._txn = txn
        self._db = db

    def all(self) -> list[Segment]:
        """All, oldest first."""
        with self._txn.cursor(db=self._db) as cursor:
            return [_unpack(key, value) for key, value in cursor]

    def last(self) -> Segment | None:
        """The one that is written to."""
        with self._txn.cursor(db=self._db) as cursor:
            return _unpack(*cursor.item()) if cursor.last() else None

    def get(self, base: int) -> Segment:
        """The one that begins at an offset.

        Raises:
            CorruptionError: none does.
        """
        value = self._txn.get(KEY.pack(base), db=self._db)
        if value is None:
            raise CorruptionError(f"log: no segment begins at offset {base}. Check the store")
        return _unpack(KEY.pack(base), value)

    def before(self, offset: int) -> Segment | None:
        """The last that begins below an offset."""
        with self._txn.cursor(db=self._db) as cursor:
            found = cursor.prev() if cursor.set_range(KEY.pack(offset)) else cursor.last()
            return _unpack(*cursor.item()) if found else None

    def after(self, offset: int) -> Segment | None:
        """The first that begins behind an offset."""
        with self._txn.cursor(db=self._db) as cursor:
            found = cursor.set_range(KEY.pack(offset + 1))
            return _unpack(*cursor.item()) if found else None

    def put(self, segment: Segment) -> None:
        """Writes what is known of a segment."""
        value = _SEGMENT.pack(segment.created, segment.max_timestamp, segment.bytes)
        self._txn.put(KEY.pack(segment.base), value, db=self._db)

    def drop_from(self, base: int) -> None:
        """Removes those that begin at or behind an offset."""
        delete_range(self._txn, self._db, KEY.pack(base), None)

    def drop_below(self, base: int) -> None:
        """Removes those that begin below an offset."""
        delete_range(self._txn, self._db, b"", KEY.pack(base))


def _unpack(key: Any, value: Any) -> Segment:
    created, max_timestamp, size = _SEGMENT.unpack(value)
    return Segment(KEY.unpack(key)[0], created, size, max_timestamp)
