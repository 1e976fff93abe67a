"""The fence of a tablet's environment: who may still write there.

A row set is claimed in status.db, written to LMDB, then marked staged in status.db. A
process that is stopped between claim and write, and goes on after its transaction ended
and was swept, would leave blocks that nobody knows of:

    worker: claims row set 7 of transaction T ... stopped ...            writes blocks of 7
    leader:                                       aborts T, sweeps 7

So check and write are one: the sweep first writes "T has ended" into the environment, and
every writer looks for that inside its own LMDB write transaction. Ended ids below the low
water mark are covered by the mark itself.

A leader has no entry here. What it writes into a tablet is right whenever it comes, so that who
leads next has nothing to write into each of thousands of tablets first:

    flush, compaction     under a lock that a stopped process keeps and a dead one gives back
    delete stamps         of a commit that is decided; writing them twice changes nothing
    removal of row sets   that ended; their ids are never given again
"""

from __future__ import annotations

import struct
from typing import Any, Final

import lmdb

from txnkv.errors import InvalidTxnStateError

FENCE_DB: Final = b"fence"
_MARK, _ENDED = b"mark", b"ended"
_U64 = struct.Struct(">Q")


def check_writer(txn: lmdb.Transaction, db: Any, txn_id: int) -> None:
    """Refuse the write of a transaction that has ended.

    Raises:
        InvalidTxnStateError: it has; nothing was written.
    """
    mark = txn.get(_MARK, db=db)
    ended = txn.get(_ENDED + _U64.pack(txn_id), db=db)
    if ended is not None or (mark is not None and txn_id < _U64.unpack(mark)[0]):
        raise InvalidTxnStateError(
            f"cannot stage rows: transaction {txn_id} has ended meanwhile. Nothing was written"
        )


def mark_ended(txn: lmdb.Transaction, db: Any, txn_id: int, low_water_mark: int) -> None:
    """Refuse `txn_id`, and all below the mark, from now on."""
    txn.put(_ENDED + _U64.pack(txn_id), b"", db=db)
    stored = txn.get(_MARK, db=db)
    if stored is not None and _U64.unpack(stored)[0] >= low_water_mark:
        return
    txn.put(_MARK, _U64.pack(low_water_mark), db=db)
    with txn.cursor(db=db) as cursor:
        found = cursor.set_range(_ENDED)
        while found and bytes(cursor.key()) < _ENDED + _U64.pack(low_water_mark):
            found = cursor.delete()
