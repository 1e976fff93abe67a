"""The chunks of a side log: batches of transactions, each under its id and an index.

    key    u64 transaction, u64 index in it of the chunk's first message, both big-endian
    value  one or more whole batches, without offsets

A transaction's chunks stand one behind the other, whatever was written between them, so that a
run of them is found by a seek and read in order. The same layout serves the partition's side
log and a transaction's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import lmdb

from txnkv.core import check_batch, read_header
from txnkv.errors import CorruptionError
from txnkv.topics.log import batches_of, gathered, key, read_key


class SideChunks:
    """The chunks of a side log in one LMDB transaction.

    Args:
        txn: the transaction.
        db: the database of the chunks.
    """

    def __init__(self, txn: lmdb.Transaction, db: Any) -> None:
        self._txn = txn
        self._db = db

    def put(self, txn_id: int, index: int, batches: Sequence[bytes]) -> int:
        """Puts batches of a transaction from an index on; the index behind them.

        What stands there and behind it is replaced: it is of a writer that died before what it
        wrote counted.
        """
        self.delete(txn_id, index, None)
        for chunk in gathered(batches):
            self._txn.put(key(txn_id, index), b"".join(chunk), db=self._db)
            index += sum(read_header(batch).count for batch in chunk)
        return index

    def read(self, txn_id: int, index: int, upto: int) -> Iterator[tuple[int, memoryview]]:
        """Batches that hold messages of a transaction in [index, upto), by chunks.

        Yields:
            The index of a chunk's first message, and a view of the chunk. The first chunk
            begins with the batch that holds `index`.

        Raises:
            CorruptionError: a part of them is missing.
        """
        with self._txn.cursor(db=self._db) as cursor:
            first, chunk = self._holding(cursor, txn_id, index)
            while True:
                count = sum(header.count for _, header in batches_of(chunk))
                at, first_batch = _position(chunk, index - first) if first < index else (0, 0)
                yield first + first_batch, chunk[at:]
                index = first + count
                if index >= upto:
                    return
                if not cursor.next() or read_key(cursor.key()) != (txn_id, index):
                    raise self._missing(txn_id, index)
                first, chunk = index, cursor.value()  # type: ignore[assignment]

    def end(self, txn_id: int) -> int:
        """The index behind the last message of a transaction; 0 when there is none."""
        with self._txn.cursor(db=self._db) as cursor:
            there = cursor.prev() if cursor.set_range(key(txn_id + 1, 0)) else cursor.last()
            if not there or read_key(cursor.key())[0] != txn_id:
                return 0
            count = sum(header.count for _, header in batches_of(cursor.value()))
            return int(read_key(cursor.key())[1]) + count

    def delete(self, txn_id: int, index: int, upto: int | None, most: int = 1 << 62) -> int:
        """Removes the chunks of a transaction that begin in [index, upto), None: all behind.

        Args:
            txn_id: of the transaction.
            index: where to begin.
            upto: where to stop.
            most: bytes after which to stop.

        Returns:
            How many bytes were removed: `most` or more when it stopped there.
        """
        low = key(txn_id, index)
        high = key(txn_id + 1, 0) if upto is None else key(txn_id, upto)
        removed = 0
        with self._txn.cursor(db=self._db) as cursor:
            found = cursor.set_range(low)
            while found and removed < most and low <= bytes(cursor.key()) < high:
                removed += len(cursor.value())
                found = cursor.delete()
        return removed

    def _holding(self, cursor: Any, txn_id: int, index: int) -> tuple[int, memoryview]:
        wanted = key(txn_id, index)
        found = cursor.set_range(wanted)
        if not found or bytes(cursor.key()) != wanted:
            found = cursor.prev() if found else cursor.last()
        if found:
            owner, first = read_key(cursor.key())
            chunk = cursor.value()
            if owner == txn_id and index < first + sum(h.count for _, h in batches_of(chunk)):
                return first, chunk
        raise self._missing(txn_id, index)

    def _missing(self, txn_id: int, index: int) -> CorruptionError:
        return CorruptionError(
            f"side log: message {index} of transaction {txn_id} is missing. Check the store, or "
            "restore it from a backup"
        )


def _position(chunk: memoryview, index: int) -> tuple[int, int]:
    """Find where the batch begins that holds a message, by index, and the index of its first."""
    at = first = 0
    while True:
        header = read_header(chunk, at)
        if first + header.count > index:
            return at, first
        check_batch(chunk, at)  # its count says where the next one is placed
        at, first = at + header.length, first + header.count
