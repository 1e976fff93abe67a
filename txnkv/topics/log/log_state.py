"""The layout of a log's state in its LMDB environment, beside the log.

Databases, each by offset (u64 big-endian) but for `state` and `open`:

    log        chunks of batches              log_chunks
    state      one record, under "log": start, end, low water mark, the last snapshot; beside it
               what subscriptions have lost                            unacknowledged
    open       "i" + transaction -> first offset, since;  "o" + first offset -> transaction
    aborted    last offset, first offset -> an entry of 34 bytes       log_indexes
    spans      level, bin, last offset, first offset of an entry       log_indexes
    commits    first marker offset -> entries of one put               log_indexes
    segments   base offset -> bytes and timestamps                     segments
    snapshots  end offset -> the state at that end                     snapshots

All of them change with the batches that change them, in one LMDB transaction.
"""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

import lmdb

from txnkv.core import crc32c
from txnkv.errors import CorruptionError
from txnkv.topics.log.log_chunks import unlike
from txnkv.topics.log.partition_state import OpenTxn

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
_VERSION: Final = 1
_CRC: Final = struct.Struct("<I")
_RECORD: Final = struct.Struct("<HHQQQqQ")
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
        """The record; None when nothing was ever put.

        Raises:
            CorruptionError: it is damaged or of another version.
        """
        found = txn.get(_NAME, db=db)
        if found is None:
            return None
        data = bytes(found)
        if len(data) != _CRC.size + _RECORD.size or (
            crc32c(memoryview(data)[_CRC.size :]) != _CRC.unpack_from(data)[0]
        ):
            raise CorruptionError(
                "log: the record of its state is damaged. Restore the store from a backup"
            )
        version, _, *fields = _RECORD.unpack_from(data, _CRC.size)
        if version != _VERSION:
            raise CorruptionError(
                f"log: the record of its state has version {version}, this program reads "
                f"{_VERSION}; use a newer one"
            )
        return cls(*fields)


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
