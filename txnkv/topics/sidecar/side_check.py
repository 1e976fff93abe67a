"""A check of a partition's side logs: is everything there that was sent, and known of it right?"""

from __future__ import annotations

from collections.abc import Iterator

import lmdb

from txnkv.core import CoreError, check_batch
from txnkv.errors import CorruptionError
from txnkv.topics.log import PartitionLog, batches_of, is_side_list, read_marker
from txnkv.topics.sidecar.side_index import SideIndex, SideState, SideTxn
from txnkv.topics.sidecar.side_logs import SideLogs


def problems(side: SideLogs, log: PartitionLog, txn: lmdb.Transaction) -> Iterator[str]:
    """Everything that is wrong in side logs, one line each; nothing if all is well.

    Every checksum is verified; each transaction has as many messages as are counted; each
    committed one has its marker in the log, and the reverse index knows it.

    Args:
        side: the side logs.
        log: of the partition.
        txn: a read transaction of its environment.
    """
    try:
        index = SideIndex(txn, side.environment)
    except KeyError:
        return
    by_marker = {txn_id: marker for marker, txn_id in index.committed()}
    start = log.start(txn)
    for txn_id, found in index.all():
        if found.state is SideState.GARBAGE:
            continue
        try:
            if found.state is SideState.COMMITTED and found.end_offset > start:
                yield from _marker(log, txn, txn_id, found)
            if by_marker.pop(txn_id, None) != _expected(found):
                yield f"side log: transaction {txn_id} is not in the index by marker as it is"
            yield from _batches(side, txn, txn_id, found)
        except (CorruptionError, CoreError) as error:
            yield str(error)
    for txn_id, marker in by_marker.items():
        yield f"side log: the marker at {marker} is of transaction {txn_id}, which is not there"


def _expected(found: SideTxn) -> int | None:
    return found.marker_offset if found.state is SideState.COMMITTED else None


def _marker(log: PartitionLog, txn: lmdb.Transaction, txn_id: int, found: SideTxn) -> Iterator[str]:
    at = max(found.marker_offset + found.moved, log.start(txn))
    parts = log.read(txn, at, 1, raw=True)
    if not parts or not is_side_list(parts[0]):
        yield f"side log: transaction {txn_id} is committed and has no marker at {at}"
        return
    marker = read_marker(bytes(parts[0]))
    runs = tuple(run for run in found.runs if run.count)
    if marker.header.txn_id != txn_id or marker.runs != runs:
        yield f"side log: the marker at {at} names {marker.runs}, there are {runs}"


def _batches(side: SideLogs, txn: lmdb.Transaction, txn_id: int, found: SideTxn) -> Iterator[str]:
    for run in found.runs:
        count = size = 0
        for chunk in side.chunks_of(txn, txn_id, run) if run.count else ():
            for at, header in batches_of(chunk):
                check_batch(chunk, at)
                count, size = count + header.count, size + header.length
                if header.txn_id != txn_id or not header.is_decided:
                    yield f"side log: a batch of transaction {txn_id} is of {header.txn_id}"
        if (count, size) != (run.count, run.bytes):
            yield (
                f"side log: transaction {txn_id} has {count} messages of {size} bytes, "
                f"{run.count} of {run.bytes} are counted"
            )
