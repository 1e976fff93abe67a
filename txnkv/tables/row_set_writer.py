"""Writing a disk row set: sorted rows become blocks, blocks become LMDB values.

Blocks are encoded outside of LMDB's write lock, by one thread while another puts those of
the row set before; they are put in batches, so that a write transaction is short.
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

WRITE_BYTES: Final = 32 << 20
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

    @property
    def low(self) -> bytes:
        return self.keys.key(0)

    @property
    def high(self) -> bytes:
        return self.keys.key(self.keys.n - 1)

    def overlaps(self, keys: core.Keys) -> bool:
        """Whether the key ranges meet."""
        return self.low <= keys.key(keys.n - 1) and keys.key(0) <= self.high


@dataclass(frozen=True)
class EncodedRowSet:
    """A row set ready to be put: what status.db will know of it, and its LMDB values."""

    tablet: Tablet
    info: RowSetInfo
    values: tuple[tuple[bytes, pa.Buffer | bytes], ...]


def encode_row_set(tablet: Tablet, claim: RowSetInfo, rows: SortedRows) -> EncodedRowSet:
    """The blocks of a claimed row set.

    Args:
        tablet: where it will be.
        claim: the row set's id.
        rows: strictly ascending by key, at least one.
    """
    values = tuple(_encode(tablet, claim.id, rows))
    info = replace(
        claim,
        rows=rows.keys.n,
        size=sum(map(_size, values)),
        min_key=rows.low,
        max_key=rows.high,
    )
    return EncodedRowSet(tablet, info, values)


def put_row_set(encoded: EncodedRowSet, check: Check) -> None:
    """Write the blocks, durably.

    Args:
        encoded: the row set.
        check: called in each LMDB write transaction before anything is put.

    Raises:
        StorageFullError: the disk is full; blocks already written are swept by the abort.
        What `check` raises.
    """
    environment = encoded.tablet.environment(create=True)
    batch: list[tuple[bytes, pa.Buffer | bytes]] = []
    waiting = 0
    for value in encoded.values:
        batch.append(value)
        waiting += _size(value)
        if waiting >= WRITE_BYTES:
            environment.write(_put(encoded.tablet, batch, check))
            fault_point("stage.blocks")
            batch, waiting = [], 0
    if batch:
        environment.write(_put(encoded.tablet, batch, check))


def _size(value: tuple[bytes, pa.Buffer | bytes]) -> int:
    return len(value[1]) if isinstance(value[1], bytes) else int(value[1].size)


def _put(
    tablet: Tablet, values: list[tuple[bytes, pa.Buffer | bytes]], check: Check
) -> Callable[[lmdb.Transaction], None]:
    def put(txn: lmdb.Transaction) -> None:
        check(txn)
        blocks = tablet.blocks_db
        for key, value in values:
            txn.put(key, value, db=blocks)

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
