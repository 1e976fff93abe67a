"""Deletes of rows that lie in immutable row sets: kept beside each block, as a sparse delta.

Nothing undecided is written here: a delta says that a row was deleted by a commit that has its
timestamp. So it is right whenever it becomes readable, and writing it twice changes nothing.

    1. take the state of the tablet; find the rows
    2. put_deletes: LMDB, durable                            readers may see them from now on
    3. in one SQLite transaction: every target must still be committed, else begin again with
       what took its place; note the counts, a new manifest version

Where a row has a stamp already, the earlier one stays: a row dies once.
"""

from __future__ import annotations

from typing import Any

import lmdb
import pyarrow as pa

from txnkv import core
from txnkv.errors import CorruptionError
from txnkv.tables.tablets import row_set_writer
from txnkv.tables.tablets.row_set_blocks import RowSetRetired
from txnkv.tables.tablets.row_set_format import (
    DELETES,
    HEADER,
    Header,
    HeaderError,
    block_key,
    delta_summary,
    pack_delta,
    unpack_delta,
)
from txnkv.tables.tablets.row_set_writer import Check
from txnkv.tables.tablets.tablet import Tablet

Deletes = dict[int, tuple[pa.UInt32Array, pa.UInt64Array]]
"""By row set id: rows, ascending, numbered over the whole row set, and their delete stamps."""

Counts = dict[int, tuple[int, int]]
"""By row set id: how many of its rows are deleted, and the highest of their stamps (or 0)."""


def put_deletes(tablet: Tablet, deletes: Deletes, check: Check) -> Counts:
    """Merge deletes into those that are there; durable when it returns.

    Args:
        tablet: of the row sets.
        deletes: what to add.
        check: called in each LMDB write transaction before anything is put.

    Returns:
        How it is after that, for `manifest.set_deleted`.

    Raises:
        StorageFullError: the disk is full; some of the deletes may be there.
        RowSetRetired: a row set is not there any more; some of the deletes may be there.
        CorruptionError: a header or a delta is damaged; that row set was left as it is.
        What `check` raises.
    """
    work = _Work(tablet, check, [(id, core.Delta(*given)) for id, given in deletes.items()])
    environment = tablet.to_write()
    found: Counts = {}
    at: tuple[int, int] | None = (0, 0) if work.deltas else None
    while at is not None:
        at, counts = environment.write(lambda txn, at=at: work.put(txn, at))  # type: ignore[misc]
        found |= counts
    return found


def stored_counts(tablet: Tablet, row_set_ids: list[int]) -> Counts:
    """Count the deletes of some row sets as they are stored: `status.db` may not know them yet."""
    with tablet.read() as pages:
        return {id: _counted(pages.txn, pages.blocks, id) for id in row_set_ids}


class _Work:
    """Deltas of some row sets, put in as many LMDB transactions as it takes."""

    def __init__(self, tablet: Tablet, check: Check, deltas: list[tuple[int, core.Delta]]) -> None:
        self.deltas = deltas
        self._tablet = tablet
        self._check = check

    def put(
        self, txn: lmdb.Transaction, at: tuple[int, int]
    ) -> tuple[tuple[int, int] | None, Counts]:
        """Go on at an entry of a delta; answers where to go on then, and what is counted."""
        self._check(txn)
        counts: Counts = {}
        blocks_db = self._tablet.blocks_db
        number, entry = at
        room = row_set_writer.WRITE_BYTES
        while number < len(self.deltas):
            id, delta = self.deltas[number]
            header = self._header(txn, blocks_db, id)
            while entry < delta.n:
                if room <= 0:
                    return (number, entry), counts
                entry, size = self._put_block(txn, blocks_db, id, header, delta, entry)
                room -= size
            counts[id] = _counted(txn, blocks_db, id)
            number, entry = number + 1, 0
        return None, counts

    def _header(self, txn: lmdb.Transaction, blocks_db: Any, id: int) -> Header:
        key = block_key(id, HEADER, 0)
        data = txn.get(key, db=blocks_db)
        if data is None:
            # Left out in silence, the deletes would be lost: what took its place lacks them.
            raise RowSetRetired(f"{self._tablet.label}, row set {id}")
        try:
            return Header.unpack(bytes(data), core.crc32c(key))
        except HeaderError as error:
            raise self._corrupt(id, f"the header: {error}") from None

    def _put_block(
        self,
        txn: lmdb.Transaction,
        blocks_db: Any,
        id: int,
        header: Header,
        delta: core.Delta,
        entry: int,
    ) -> tuple[int, int]:
        """Merge the entries of one block; answers the next entry, and bytes written."""
        number, start, rows = header.block_of(delta.row(entry))
        stop = delta.find(start + rows)
        own = delta.slice(entry, stop - entry, start)
        key = block_key(id, DELETES, number)
        seed = core.crc32c(key)
        data = txn.get(key, db=blocks_db)
        if data is not None:
            try:
                own = unpack_delta(data, seed, rows).merge(own)
            except HeaderError as error:
                raise self._corrupt(id, f"deletes of block {number}: {error}") from None
        value = pack_delta(own, seed)
        txn.put(key, value, db=blocks_db)
        return stop, len(value)

    def _corrupt(self, id: int, what: str) -> CorruptionError:
        return CorruptionError(
            f"store {self._tablet.store_path}, {self._tablet.label}, row set {id}, {what}. "
            "Nothing was deleted there. Restore the store from a backup, or drop the table"
        )


def _counted(txn: lmdb.Transaction, blocks_db: Any, id: int) -> tuple[int, int]:
    rows = highest = 0
    with txn.cursor(db=blocks_db) as cursor:
        found = cursor.set_range(block_key(id, DELETES, 0))
        end = block_key(id, DELETES + 1, 0)
        while found and bytes(cursor.key()) < end:
            n, stamp = delta_summary(cursor.value())
            rows, highest = rows + n, max(highest, stamp)
            found = cursor.next()
    return rows, highest
