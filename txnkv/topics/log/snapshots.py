"""Snapshots of a partition's state: where a replay of the log may begin.

The state is kept in LMDB together with the log, so opening a partition replays nothing.
A snapshot is for going back: a truncation takes the last one at or below its offset and
replays the batches from there; a check does the same and compares.

One is taken at the base of every segment, and in between after so many changes, or so many
seconds with a change. Those in between are dropped when their segment is two behind.

LMDB key: the offset up to which the log is in it, u64 big-endian. Value, little-endian:

    u32 crc (of what follows, seeded with that of the key) | u16 version | u16 0
    u64 low water mark | u64 n | n x { u64 transaction, u64 first offset, i64 since }
"""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

import lmdb

from txnkv.core import crc32c
from txnkv.topics.log.log_chunks import KEY, delete_range, seek_at_or_below
from txnkv.topics.log.partition_state import MemoryOpenTxns, OpenTxn, PartitionState

_VERSION: Final = 1
_CRC: Final = struct.Struct("<I")
_START: Final = struct.Struct("<HHQQ")
_OPEN: Final = struct.Struct("<QQq")


class Snapshot(NamedTuple):
    """The state after all batches below an offset.

    Attributes:
        offset: the log's end, then.
        low_water_mark: the highest that a control batch had carried.
        open: the open transactions by first offset.
    """

    offset: int
    low_water_mark: int
    open: tuple[OpenTxn, ...]

    def state(self) -> PartitionState:
        """A state in memory that goes on from here."""
        return PartitionState(self.offset, self.low_water_mark, MemoryOpenTxns(self.open))

    def pack(self) -> bytes:
        """The LMDB value."""
        parts = [_START.pack(_VERSION, 0, self.low_water_mark, len(self.open))]
        parts += [_OPEN.pack(*txn) for txn in self.open]
        body = b"".join(parts)
        return _CRC.pack(crc32c(body, crc32c(KEY.pack(self.offset)))) + body

    @classmethod
    def unpack(cls, offset: int, data: Any) -> Snapshot | None:
        """A snapshot as it was stored; None when it is damaged or cannot be read."""
        body = memoryview(data)[_CRC.size :]
        if len(body) < _START.size:
            return None
        if crc32c(body, crc32c(KEY.pack(offset))) != _CRC.unpack_from(data)[0]:
            return None
        version, _, mark, n = _START.unpack_from(body)
        if version != _VERSION or len(body) != _START.size + n * _OPEN.size:
            return None
        txns = _OPEN.iter_unpack(body[_START.size :])
        return cls(offset, mark, tuple(OpenTxn(*txn) for txn in txns))


class Snapshots:
    """The snapshots of a log inside an LMDB transaction."""

    def __init__(self, txn: lmdb.Transaction, db: Any) -> None:
        self._txn = txn
        self._db = db

    def offsets(self) -> list[int]:
        """List the offsets of the snapshots, ascending; of damaged ones too."""
        with self._txn.cursor(db=self._db) as cursor:
            return [KEY.unpack(key)[0] for key in cursor.iternext(values=False)]

    def put(self, snapshot: Snapshot) -> None:
        """Writes a snapshot; one that was there at this offset is replaced."""
        self._txn.put(KEY.pack(snapshot.offset), snapshot.pack(), db=self._db)

    def at_or_below(self, offset: int) -> Snapshot | None:
        """The last one at or below an offset that is whole; damaged ones are passed over."""
        with self._txn.cursor(db=self._db) as cursor:
            found = seek_at_or_below(cursor, KEY.pack(offset))
            while found:
                snapshot = Snapshot.unpack(KEY.unpack(cursor.key())[0], cursor.value())
                if snapshot is not None:
                    return snapshot
                found = cursor.prev()
        return None

    def drop_behind(self, offset: int) -> None:
        """Removes those behind an offset."""
        delete_range(self._txn, self._db, KEY.pack(offset + 1), None)

    def drop_below(self, offset: int) -> None:
        """Removes those below an offset."""
        delete_range(self._txn, self._db, b"", KEY.pack(offset))

    def drop_between(self, low: int, high: int) -> None:
        """Removes those behind `low` and below `high`."""
        delete_range(self._txn, self._db, KEY.pack(low + 1), KEY.pack(high))
