"""The index of the transactions in a side log, and its reverse.

    side_transactions    transaction -> what it has here, its state, where its marker stands
    side_by_marker       first offset of a marker -> transaction: those committed, in commit order
    side_garbage         transactions whose batches are to be removed

A transaction is OPEN from its first batch; COMMITTED when its marker is in the log; GARBAGE when
it was aborted, when the log's start has passed its messages, or when its marker was cut off. It
is forgotten when nothing of it is left here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, Final, NamedTuple

import lmdb

from txnkv.errors import CorruptionError
from txnkv.storage import Environment
from txnkv.topics.log import OWN, SHARED, SideRun

SIDE: Final = b"side"
TRANSACTIONS: Final = b"side_transactions"
BY_MARKER: Final = b"side_by_marker"
GARBAGE: Final = b"side_garbage"
DATABASES: Final = (SIDE, TRANSACTIONS, BY_MARKER, GARBAGE)

_ID: Final = struct.Struct(">Q")
_TXN: Final = struct.Struct("<IIQQQQQQQq")


class SideState(IntEnum):
    """The state of a transaction in a side log."""

    OPEN = 0
    COMMITTED = 1
    GARBAGE = 2


_STATES: Final = frozenset(SideState)


class SideTxn(NamedTuple):
    """A transaction in a side log.

    Attributes:
        state: where it stands.
        has_own: whether it has a side log of its own.
        shared_count: messages that went to the partition's side log; the rest is in its own.
        shared_bytes: of the batches of these that are there still.
        own_count: messages in its own.
        own_bytes: of their batches.
        moved: messages that compaction has put into the log, from index 0 on.
        marker_offset: where the marker's offsets begin; 0 while it is OPEN.
        commit_ts: of the commit; 0 while it is OPEN.
        max_timestamp: the greatest of its messages, microseconds since 1970.
    """

    state: SideState = SideState.OPEN
    has_own: bool = False
    shared_count: int = 0
    shared_bytes: int = 0
    own_count: int = 0
    own_bytes: int = 0
    moved: int = 0
    marker_offset: int = 0
    commit_ts: int = 0
    max_timestamp: int = 0

    @property
    def count(self) -> int:  # type: ignore[override]  # hides tuple.count
        """Its messages."""
        return self.shared_count + self.own_count

    @property
    def end_offset(self) -> int:
        """The offset behind its messages, once it is committed."""
        return self.marker_offset + self.count

    @property
    def runs(self) -> list[SideRun]:
        """Its side batches that compaction has not put into the log."""
        left = self.shared_count - self.moved
        shared = SideRun(SHARED, self.moved, left, self.shared_bytes)
        return [shared, SideRun(OWN, self.shared_count, self.own_count, self.own_bytes)]


class SideIndex:
    """The indexes of a side log, in one LMDB transaction.

    Args:
        txn: the transaction; a write makes the databases where they are missing.
        environment: the partition's.

    Raises:
        KeyError: a read of a partition that never had a side log.
    """

    def __init__(self, txn: lmdb.Transaction, environment: Environment) -> None:
        self.txn = txn
        self._transactions = environment.db(TRANSACTIONS)
        self._by_marker = environment.db(BY_MARKER)
        self._garbage = environment.db(GARBAGE)

    def get(self, txn_id: int) -> SideTxn | None:
        """A transaction; None when nothing of it is here."""
        stored = self.txn.get(_ID.pack(txn_id), db=self._transactions)
        return None if stored is None else _unpack(stored, txn_id)

    def put(self, txn_id: int, side: SideTxn) -> None:
        """Stores a transaction."""
        self.txn.put(_ID.pack(txn_id), _TXN.pack(*side), db=self._transactions)

    def commit(self, txn_id: int, side: SideTxn) -> None:
        """Stores a committed transaction and its place in commit order."""
        self.put(txn_id, side)
        marker = _ID.pack(side.marker_offset)
        self.txn.put(marker, _ID.pack(txn_id), db=self._by_marker)

    def discard(self, txn_id: int, side: SideTxn) -> None:
        """Makes a transaction garbage, whatever it was."""
        if side.state is SideState.COMMITTED:
            self._forget_marker(side)
        self.put(txn_id, side._replace(state=SideState.GARBAGE))
        self.txn.put(_ID.pack(txn_id), b"", db=self._garbage)

    def forget(self, txn_id: int) -> None:
        """Forgets a transaction of which nothing is left."""
        side = self.get(txn_id)
        if side is not None and side.state is SideState.COMMITTED:
            self._forget_marker(side)
        self.txn.delete(_ID.pack(txn_id), db=self._transactions)
        self.txn.delete(_ID.pack(txn_id), db=self._garbage)

    def all(self) -> Iterator[tuple[int, SideTxn]]:
        """All transactions, by id. Nothing may be written meanwhile."""
        with self.txn.cursor(db=self._transactions) as cursor:
            for stored, value in cursor:
                yield _id(stored), _unpack(value, _id(stored))

    def committed(self, offset: int = 0) -> Iterator[tuple[int, int]]:
        """Marker offsets from `offset` on, each with its transaction.

        What was given may be changed meanwhile, what comes may not.
        """
        found = True
        while found:
            with self.txn.cursor(db=self._by_marker) as cursor:
                found = cursor.set_range(_ID.pack(offset))
                if found:
                    marker, txn_id = _id(cursor.key()), _id(cursor.value())
            if found:
                yield marker, txn_id
                offset = marker + 1

    def committed_before(self, offset: int) -> tuple[int, int] | None:
        """The last marker below an offset, and its transaction."""
        with self.txn.cursor(db=self._by_marker) as cursor:
            there = cursor.prev() if cursor.set_range(_ID.pack(offset)) else cursor.last()
            return (_id(cursor.key()), _id(cursor.value())) if there else None

    def garbage(self) -> int | None:
        """A transaction whose batches are to be removed; None when there is none."""
        with self.txn.cursor(db=self._garbage) as cursor:
            return _id(cursor.key()) if cursor.first() else None

    def _forget_marker(self, side: SideTxn) -> None:
        self.txn.delete(_ID.pack(side.marker_offset), db=self._by_marker)


def _id(stored: Any) -> int:
    found: int = _ID.unpack(stored)[0]
    return found


def _unpack(stored: Any, txn_id: int) -> SideTxn:
    state, has_own, *numbers = _TXN.unpack(stored)
    if state not in _STATES or has_own not in (0, 1):
        raise CorruptionError(
            f"side log: the row of transaction {txn_id} is damaged. `txnkv check` says more; "
            "restore the store from a backup"
        )
    return SideTxn(SideState(state), bool(has_own), *numbers)
