"""Side logs on their way into a backup: those of committed transactions, whose markers stand for
them. What is open is given up by the restored store, and garbage is garbage.

One file for each such transaction, of entries of two databases: `side`, its chunks in the
partition's side log, and `own`, those in a side log of its own.
"""

from __future__ import annotations

from typing import Final

import lmdb

from txnkv.core import CoreError, check_batch
from txnkv.errors import CorruptionError
from txnkv.storage import EntryFile, each_between
from txnkv.topics.sidecar.side_logs import SideLogs
from txnkv.topics.sidecar.side_store import (
    BY_MARKER,
    SIDE,
    TRANSACTIONS,
    SideState,
    SideTxn,
    batches_of,
    chunk_key,
    packed_id,
    packed_row,
    read_chunk_key,
)

OWN_DATABASE: Final = b"own"


def committed_rows(side: SideLogs, txn: lmdb.Transaction, upto: int) -> dict[int, SideTxn]:
    """The transactions whose markers stand below an offset, by id.

    Args:
        side: the side logs.
        txn: a read.
        upto: the offset.
    """
    return {
        txn_id: found
        for txn_id, found in side.rows(txn)
        if found.state is SideState.COMMITTED and found.marker_offset < upto
    }


def put_rows(rows: dict[int, SideTxn], file: EntryFile) -> None:
    """Put the rows of transactions, and their places in commit order."""
    for txn_id, row in sorted(rows.items()):
        file.put(TRANSACTIONS, packed_id(txn_id), packed_row(row))
    for marker, txn_id in sorted((row.marker_offset, txn_id) for txn_id, row in rows.items()):
        file.put(BY_MARKER, packed_id(marker), packed_id(txn_id))


def put_chunks(side: SideLogs, txn_id: int, row: SideTxn, file: EntryFile) -> None:
    """Put the batches of a committed transaction, each compared with its checksum.

    Raises:
        CorruptionError: one is damaged, or missing.
    """
    for environment, database, first, last in (
        (side.environment, SIDE, row.moved, row.shared_count),
        (side.own.environment(txn_id) if row.own_count else None, OWN_DATABASE,
         row.shared_count, row.count),
    ):  # fmt: skip
        if environment is None or first >= last:
            continue
        reached = first

        def take(key: bytes, value: bytes, database: bytes = database) -> None:
            nonlocal reached
            at, count = read_chunk_key(key)[1], 0
            for begin, header in batches_of(value):
                check_batch(value, begin)
                count += header.count
            reached = at + count if at == reached else -1
            file.put(database, key, value)

        try:
            each_between(environment, SIDE, chunk_key(txn_id, first), chunk_key(txn_id, last), take)
        except CoreError as error:
            raise _damaged(txn_id, str(error)) from None
        if reached != last:
            raise _damaged(txn_id, "a part of it is missing")


def _damaged(txn_id: int, what: str) -> CorruptionError:
    return CorruptionError(f"the side log of transaction {txn_id}: {what}")
