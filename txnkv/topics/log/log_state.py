"""The layout of a log in its LMDB environment: its record, open transactions, segments, snapshots.

Databases, each by offset (u64 big-endian) but for `state` and `open`:

    log        chunks of batches              log_chunks
    state      one record, under "log": start, end, low water mark, the last snapshot; beside it
               what subscriptions have lost                            retention
               and "rewritten", u32 crc (of what follows) | u64 looked up to | u64 pieces
    open       "i" + transaction -> first offset, since;  "o" + first offset -> transaction
    aborted    last offset, first offset -> an entry of 34 bytes       log_indexes
    spans      level, bin, last offset, first offset of an entry       log_indexes
    commits    first marker offset -> entries of one put               log_indexes
    segments   base offset -> i64 created | i64 max timestamp | u64 bytes, little-endian
    snapshots  end offset -> the state at that end, little-endian:
               u32 crc (of what follows, seeded with that of the key) | u16 version | u16 0
               u64 low water mark | u64 n | n x { u64 transaction, u64 first offset, i64 since }

All of them change with the batches that change them, in one LMDB transaction.

A *segment* is how a log is cut, so that it can be given back in pieces. It begins at a batch and
ends where the next one begins. It is made by size, by the age of its messages, or on demand, and
its end is never changed again. What belongs to it lies under offsets in it: chunks, aborted entries
(by marker), commits, snapshots. So dropping the oldest is dropping everything below the base of the
next. Size and age are taken from the batches alone, so a follower cuts its log at the same offsets.

A *snapshot* is where a replay may begin. Opening a partition replays nothing, as the state is kept
with the log; going back does: a truncation takes the last snapshot at or below its offset and
replays the batches from there; a check does the same and compares. One is taken at the base of
every segment, and in between after so many changes, or so many seconds with a change. Those in
between are dropped when their segment is two behind.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, Final, NamedTuple

import lmdb

from txnkv.core import crc32c
from txnkv.errors import CorruptionError
from txnkv.storage import Environment
from txnkv.topics.log.log_chunks import (
    KEY,
    ChunkReader,
    LogPart,
    delete_range,
    seek_at_or_below,
    unlike,
)
from txnkv.topics.log.log_indexes import Aborted, Commits
from txnkv.topics.log.partition_state import MemoryOpenTxns, OpenTxn, PartitionState

LOG: Final = b"log"
STATE: Final = b"state"
OPEN: Final = b"open"
ABORTED: Final = b"aborted"
SPANS: Final = b"spans"
COMMITS: Final = b"commits"
SEGMENTS: Final = b"segments"
SNAPSHOTS: Final = b"snapshots"
DATABASES: Final = (LOG, STATE, OPEN, ABORTED, SPANS, COMMITS, SEGMENTS, SNAPSHOTS)

_NAME: Final = b"log"
_REWRITTEN: Final = b"rewritten"
_LOOKED: Final = struct.Struct("<QQ")
_VERSION: Final = 1
_CRC: Final = struct.Struct("<I")
_RECORD: Final = struct.Struct("<HHQQQqQ")
_DAMAGED: Final = "log: the record of its state is damaged. Restore the store from a backup"
_ID: Final = struct.Struct(">cQ")
_BEGUN: Final = struct.Struct("<Qq")
_U64: Final = struct.Struct("<Q")


class LogState(NamedTuple):
    """The record of a log.

    Attributes:
        start: the least offset that is readable.
        end: the offset behind the last batch.
        low_water_mark: the highest that a control batch carried.
        snapshot_micros: wall time of the last snapshot.
        changes: opened and ended transactions since then.
    """

    start: int = 0
    end: int = 0
    low_water_mark: int = 0
    snapshot_micros: int = 0
    changes: int = 0

    def store(self, txn: lmdb.Transaction, db: Any) -> None:
        """Writes the record."""
        body = _RECORD.pack(_VERSION, 0, *self)
        txn.put(_NAME, _CRC.pack(crc32c(body)) + body, db=db)

    @classmethod
    def load(cls, txn: lmdb.Transaction, db: Any) -> LogState | None:
        """The record; None when there is none.

        Raises:
            CorruptionError: it is damaged or of another version.
        """
        found = txn.get(_NAME, db=db)
        return None if found is None else _checked(bytes(found))


@lru_cache(256)
def _checked(data: bytes) -> LogState:
    """The record of these bytes, which a look at a log asks for several times."""
    if len(data) != _CRC.size + _RECORD.size or (
        crc32c(memoryview(data)[_CRC.size :]) != _CRC.unpack_from(data)[0]
    ):
        raise CorruptionError(_DAMAGED)
    version, _, *fields = _RECORD.unpack_from(data, _CRC.size)
    if version != _VERSION:
        raise CorruptionError(
            f"log: the record of its state has version {version}, this program reads "
            f"{_VERSION}; use a newer one"
        )
    return LogState(*fields)


class Rewritten(NamedTuple):
    """The record of key compaction.

    Attributes:
        upto: all below was looked at: what a message below it hides is gone.
        pieces: how many were put in the place of others. Who remembers where batches lie asks
            whether it is the same.
    """

    upto: int = 0
    pieces: int = 0


_NOT_REWRITTEN: Final = Rewritten()


class StoredOpenTxns:
    """The open transactions of a log inside an LMDB transaction."""

    def __init__(self, txn: lmdb.Transaction, db: Any) -> None:
        self._txn = txn
        self._db = db

    def get(self, txn_id: int) -> OpenTxn | None:
        """The open transaction of this id."""
        found = self._txn.get(_ID.pack(b"i", txn_id), db=self._db)
        return None if found is None else OpenTxn(txn_id, *_BEGUN.unpack(found))

    def add(self, txn: OpenTxn) -> None:
        """One more."""
        put = self._txn.put
        put(_ID.pack(b"i", txn.txn_id), _BEGUN.pack(txn.first_offset, txn.since), db=self._db)
        put(_ID.pack(b"o", txn.first_offset), _U64.pack(txn.txn_id), db=self._db)

    def remove(self, txn: OpenTxn) -> None:
        """It has ended."""
        self._txn.delete(_ID.pack(b"i", txn.txn_id), db=self._db)
        self._txn.delete(_ID.pack(b"o", txn.first_offset), db=self._db)

    def first(self, but: int = 0) -> int | None:
        """The least first offset, one transaction left out."""
        with self._txn.cursor(db=self._db) as cursor:
            found = cursor.set_range(b"o")
            if found and but and _U64.unpack(cursor.value())[0] == but:
                found = cursor.next()
            if not found:
                return None
            first, txn_id = _ID.unpack(cursor.key())[1], _U64.unpack(cursor.value())[0]
        begun = self.get(txn_id)
        if begun is None or begun.first_offset != first:
            raise unlike(first, "list of open transactions")
        return int(first)

    def below(self, txn_id: int) -> list[OpenTxn]:
        """Those with a lower id."""
        txns = []
        with self._txn.cursor(db=self._db) as cursor:
            found = cursor.set_range(b"i")
            while found:
                kind, id = _ID.unpack(cursor.key())
                if kind != b"i" or id >= txn_id:
                    break
                txns.append(OpenTxn(id, *_BEGUN.unpack(cursor.value())))
                found = cursor.next()
        return txns

    def all(self) -> list[OpenTxn]:
        """All, by first offset."""
        return sorted(self.below(1 << 64), key=lambda txn: txn.first_offset)

    def replace(self, txns: list[OpenTxn]) -> None:
        """These, and no others."""
        self._txn.drop(self._db, delete=False)
        for txn in txns:
            self.add(txn)


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


class Segments(LogPart):
    """The segments of a log inside an LMDB transaction."""

    def all(self) -> list[Segment]:
        """All, oldest first."""
        with self._txn.cursor(db=self._db) as cursor:
            return [_segment(key, value) for key, value in cursor]

    def last(self) -> Segment | None:
        """The one that is written to."""
        with self._txn.cursor(db=self._db) as cursor:
            return _segment(*cursor.item()) if cursor.last() else None

    def get(self, base: int) -> Segment:
        """The one that begins at an offset.

        Raises:
            CorruptionError: none does.
        """
        value = self._txn.get(KEY.pack(base), db=self._db)
        if value is None:
            raise CorruptionError(f"log: no segment begins at offset {base}. Check the store")
        return _segment(KEY.pack(base), value)

    def before(self, offset: int) -> Segment | None:
        """The last that begins below an offset."""
        with self._txn.cursor(db=self._db) as cursor:
            found = cursor.prev() if cursor.set_range(KEY.pack(offset)) else cursor.last()
            return _segment(*cursor.item()) if found else None

    def after(self, offset: int) -> Segment | None:
        """The first that begins behind an offset."""
        with self._txn.cursor(db=self._db) as cursor:
            found = cursor.set_range(KEY.pack(offset + 1))
            return _segment(*cursor.item()) if found else None

    def put(self, segment: Segment) -> None:
        """Writes what is known of a segment."""
        value = _SEGMENT.pack(segment.created, segment.max_timestamp, segment.bytes)
        self._txn.put(KEY.pack(segment.base), value, db=self._db)


def _segment(key: Any, value: Any) -> Segment:
    created, max_timestamp, size = _SEGMENT.unpack(value)
    return Segment(KEY.unpack(key)[0], created, size, max_timestamp)


_SNAPSHOT_VERSION: Final = 1
_SNAPSHOT: Final = struct.Struct("<HHQQ")
_OPEN: Final = struct.Struct("<QQq")


class StateSnapshot(NamedTuple):
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
        parts = [_SNAPSHOT.pack(_SNAPSHOT_VERSION, 0, self.low_water_mark, len(self.open))]
        parts += [_OPEN.pack(*txn) for txn in self.open]
        body = b"".join(parts)
        return _CRC.pack(crc32c(body, crc32c(KEY.pack(self.offset)))) + body

    @classmethod
    def unpack(cls, offset: int, data: Any) -> StateSnapshot | None:
        """A snapshot as it was stored; None when it is damaged or cannot be read."""
        body = memoryview(data)[_CRC.size :]
        if len(body) < _SNAPSHOT.size:
            return None
        if crc32c(body, crc32c(KEY.pack(offset))) != _CRC.unpack_from(data)[0]:
            return None
        version, _, mark, n = _SNAPSHOT.unpack_from(body)
        if version != _SNAPSHOT_VERSION or len(body) != _SNAPSHOT.size + n * _OPEN.size:
            return None
        txns = _OPEN.iter_unpack(body[_SNAPSHOT.size :])
        return cls(offset, mark, tuple(OpenTxn(*txn) for txn in txns))


class Snapshots(LogPart):
    """The snapshots of a log inside an LMDB transaction."""

    def offsets(self) -> list[int]:
        """List the offsets of the snapshots, ascending; of damaged ones too."""
        with self._txn.cursor(db=self._db) as cursor:
            return [KEY.unpack(key)[0] for key in cursor.iternext(values=False)]

    def put(self, snapshot: StateSnapshot) -> None:
        """Writes a snapshot; one that was there at this offset is replaced."""
        self._txn.put(KEY.pack(snapshot.offset), snapshot.pack(), db=self._db)

    def at_or_below(self, offset: int) -> StateSnapshot | None:
        """The last one at or below an offset that is whole; damaged ones are passed over."""
        with self._txn.cursor(db=self._db) as cursor:
            found = seek_at_or_below(cursor, KEY.pack(offset))
            while found:
                snapshot = StateSnapshot.unpack(KEY.unpack(cursor.key())[0], cursor.value())
                if snapshot is not None:
                    return snapshot
                found = cursor.prev()
        return None

    def drop_between(self, low: int, high: int) -> None:
        """Removes those behind `low` and below `high`."""
        delete_range(self._txn, self._db, KEY.pack(low + 1), KEY.pack(high))


class LogParts:
    """The parts of a log, as one LMDB transaction sees them.

    Args:
        txn: the transaction.
        environment: the log's; what asks for a part whose database was never made gets a KeyError.
    """

    def __init__(self, txn: lmdb.Transaction, environment: Environment) -> None:
        self.txn = txn
        self._db = environment.db

    @property
    def log(self) -> Any:
        """The database of the chunks."""
        return self._db(LOG)

    def chunks(self) -> ChunkReader:
        """Another reader of the chunks."""
        return ChunkReader(self.txn, self._db(LOG))

    def record(self) -> LogState | None:
        """The record of the log; None when nothing was ever put.

        Raises:
            CorruptionError: it is damaged, of another version, or gone: something was put.
        """
        try:
            found = LogState.load(self.txn, self._db(STATE))
        except KeyError:
            found = None
        if found is None and (self._has(LOG) or self._has(SEGMENTS)):
            raise CorruptionError(_DAMAGED)
        return found

    def _has(self, name: bytes) -> bool:
        """Return True when a database was made and holds something."""
        try:
            return bool(self.txn.stat(self._db(name))["entries"])
        except KeyError:  # nothing was ever put, and the store may be open to read only
            return False

    def store(self, record: LogState) -> None:
        """Writes the record."""
        record.store(self.txn, self._db(STATE))

    def rewritten(self) -> Rewritten:
        """The record of key compaction; one that is damaged says that nothing was looked at."""
        found = self.txn.get(_REWRITTEN, db=self._db(STATE))
        if found is None:
            return _NOT_REWRITTEN
        body = bytes(found)[_CRC.size :]
        if len(body) != _LOOKED.size or crc32c(body) != _CRC.unpack_from(found)[0]:
            return _NOT_REWRITTEN
        return Rewritten(*_LOOKED.unpack(body))

    def store_rewritten(self, rewritten: Rewritten) -> None:
        """Writes it."""
        body = _LOOKED.pack(*rewritten)
        self.txn.put(_REWRITTEN, _CRC.pack(crc32c(body)) + body, db=self._db(STATE))

    @property
    def open(self) -> StoredOpenTxns:
        """The open transactions."""
        return StoredOpenTxns(self.txn, self._db(OPEN))

    @property
    def commits(self) -> Commits:
        """The index of commits."""
        return Commits(self.txn, self._db(COMMITS))

    @property
    def aborted(self) -> Aborted:
        """The aborted index."""
        return Aborted(self.txn, self._db(ABORTED), self._db(SPANS))

    @property
    def segments(self) -> Segments:
        """The segments."""
        return Segments(self.txn, self._db(SEGMENTS))

    @property
    def snapshots(self) -> Snapshots:
        """The snapshots."""
        return Snapshots(self.txn, self._db(SNAPSHOTS))

    def drop_all(self) -> None:
        """Removes everything but the record, and what subscriptions have lost."""
        for name in DATABASES:
            if name != STATE:
                self.txn.drop(self._db(name), delete=False)
