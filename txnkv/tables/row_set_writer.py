"""Writing a disk row set: sorted rows become blocks, blocks become LMDB values.

Blocks are encoded outside of LMDB's write lock and put in batches, so that a write
transaction is short and a large row set does not sit in memory as dirty pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import lmdb
import pyarrow as pa

from txnkv import core
from txnkv.storage.seam import declare_fault_point, fault_point
from txnkv.tables.manifest import RowSetInfo
from txnkv.tables.row_set_format import (
    BLOOM,
    COLUMNS,
    HEADER,
    KEYS,
    BlockInfo,
    Header,
    block_key,
    row_set_range,
    rows_per_block,
)

if TYPE_CHECKING:
    from txnkv.tables.tablet import Tablet

declare_fault_point("stage.blocks", "a batch of a row set's blocks is durable, others are not")

WRITE_BYTES: Final = 64 << 20
"""Bytes of blocks in one LMDB write transaction."""

Check = Callable[[lmdb.Transaction], None]


@dataclass(frozen=True)
class SortedRows:
    """Rows in key order: `keys` ascending, `batch` as it came, `order` from one to the other.

    `order` is None when the batch is in key order already.
    """

    keys: core.Keys
    batch: pa.RecordBatch
    order: core.Rows | None


def write_row_set(tablet: Tablet, info: RowSetInfo, rows: SortedRows, check: Check) -> RowSetInfo:
    """Write the blocks of a claimed row set, durably.

    Args:
        tablet: where to.
        info: the claim.
        rows: strictly ascending by key, at least one.
        check: called in each LMDB write transaction before anything is put.

    Returns:
        `info` with rows, bytes and key range.

    Raises:
        StorageFullError: the disk is full; blocks already written are swept by the abort.
        What `check` raises.
    """
    environment = tablet.environment(create=True)
    size = 0
    pending: list[tuple[bytes, pa.Buffer | bytes]] = []
    waiting = 0
    for key, value in _encode(tablet, info.id, rows):
        pending.append((key, value))
        length = len(value) if isinstance(value, bytes) else value.size
        waiting += length
        size += length
        if waiting >= WRITE_BYTES:
            environment.write(_put(tablet, pending, check))
            fault_point("stage.blocks")
            pending, waiting = [], 0
    if pending:
        environment.write(_put(tablet, pending, check))
    return replace(
        info,
        rows=rows.keys.n,
        size=size,
        min_key=rows.keys.key(0),
        max_key=rows.keys.key(rows.keys.n - 1),
    )


def _put(
    tablet: Tablet, values: list[tuple[bytes, pa.Buffer | bytes]], check: Check
) -> Callable[[lmdb.Transaction], None]:
    def put(txn: lmdb.Transaction) -> None:
        check(txn)
        for key, value in values:
            txn.put(key, value, db=tablet.blocks_db)

    return put


def delete_row_set(txn: lmdb.Transaction, tablet: Tablet, row_set_id: int) -> None:
    """Remove all blocks of a row set; its pages are free for use again."""
    low, high = row_set_range(row_set_id)
    with txn.cursor(db=tablet.blocks_db) as cursor:
        found = cursor.set_range(low)
        while found and bytes(cursor.key()) < high:
            found = cursor.delete()


def _encode(
    tablet: Tablet, row_set_id: int, rows: SortedRows
) -> Iterator[tuple[bytes, pa.Buffer | bytes]]:
    schema = tablet.schema
    n = rows.keys.n
    names = [name for name in rows.batch.schema.names if name not in schema.primary_key]
    arrays = {name: rows.batch.column(name) for name in names}
    widths = [array.nbytes / max(len(array), 1) for array in arrays.values()]
    step = rows_per_block([*widths, rows.keys.data.size / max(n, 1)])
    blocks: list[BlockInfo] = []
    for number, lo in enumerate(range(0, n, step)):
        count = min(step, n - lo)
        keys = rows.keys.slice(lo, count)
        key = block_key(row_set_id, KEYS, number)
        yield key, keys.to_block(core.crc32c(key), 0, count)
        key = block_key(row_set_id, BLOOM, number)
        yield key, core.bloom_build(keys, core.crc32c(key))
        zones = {}
        for name, array in arrays.items():
            id = schema.ids[name]
            key = block_key(row_set_id, COLUMNS + id, number)
            seed = core.crc32c(key)
            if rows.order is None:
                block = core.encode_block(array, seed, None, lo, count)
            else:
                block = core.encode_block(array, seed, rows.order.slice(lo, count))
            zones[id] = core.zone(block, schema.columns[name].type)
            yield key, block
        blocks.append(BlockInfo(lo, count, keys.key(0), keys.key(count - 1), zones))
    header = Header(n, tuple(schema.ids[name] for name in names), tuple(blocks))
    key = block_key(row_set_id, HEADER, 0)
    yield key, header.pack(core.crc32c(key))
