"""Writing a disk row set, and deletes of its rows.

Sorted rows become blocks, blocks become LMDB values. Blocks are encoded outside of LMDB's write
lock, by one thread while another puts those of the row set before; they are put in batches, so that
a write transaction is short. A row set that is merged of others is built as its rows come, a few
blocks at a time.

Deletes are kept beside each block, which is immutable, as a sparse delta. Nothing undecided is
written there: a delta says that a row was deleted by a commit that has its timestamp. So it is
right whenever it becomes readable, and writing it twice changes nothing.

    1. take the state of the tablet; find the rows
    2. put_deletes: LMDB, durable                            readers may see them from now on
    3. in one SQLite transaction: every target must still be committed, else begin again with
       what took its place; note the counts, a new manifest version

Where a row has a stamp already, the earlier one stays: a row dies once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import lmdb
import pyarrow as pa

from txnkv import core
from txnkv.coordinator import Timestamp
from txnkv.core import compute as pc
from txnkv.errors import CorruptionError
from txnkv.storage import declare_fault_point, fault_point
from txnkv.tables.tablets.manifest import RowSetInfo
from txnkv.tables.tablets.row_set import RowSetRetired
from txnkv.tables.tablets.row_set_format import (
    BLOOM,
    COLUMNS,
    DELETES,
    HEADER,
    INSERTS,
    KEYS,
    BlockInfo,
    Header,
    HeaderError,
    block_key,
    delta_summary,
    pack_delta,
    row_set_range,
    rows_per_block,
    unpack_delta,
)
from txnkv.tables.tablets.tablet import Tablet

declare_fault_point("stage.blocks", "a batch of a row set's blocks is durable, others are not")

WRITE_BYTES: Final = 32 << 20
"""Bytes of blocks in one LMDB write transaction."""

BUILD_BYTES: Final = 4 << 20
"""The same where flush and compaction write: commits wait for the disk beside them."""

Check = Callable[[lmdb.Transaction], None]
Value = tuple[bytes, pa.Buffer | bytes]


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
        """Return True when the key ranges meet."""
        return self.low <= keys.key(keys.n - 1) and keys.key(0) <= self.high


@dataclass(frozen=True)
class EncodedRowSet:
    """A row set ready to be put: what status.db will know of it, and its LMDB values."""

    tablet: Tablet
    info: RowSetInfo
    values: tuple[Value, ...]


def encode_row_set(
    tablet: Tablet,
    claim: RowSetInfo,
    rows: SortedRows,
    inserts: pa.UInt64Array | None = None,
    deletes: pa.UInt64Array | None = None,
) -> EncodedRowSet:
    """The blocks of a claimed row set.

    Args:
        tablet: where it will be.
        claim: the row set's id.
        rows: ascending by key, at least one; strictly, unless they have stamps.
        inserts: an insert stamp for each key, where they may differ; the versions of a key
            stand newest first.
        deletes: a delete stamp for each key, `STAMP_NEVER` where it has none.
    """
    builder = _Encoder(tablet, claim)
    names = [name for name in rows.batch.schema.names if name not in tablet.schema.primary_key]
    columns = {name: rows.batch.column(name) for name in names}
    if inserts is not None:
        least = pc.min_max(inserts).as_py()
        if least["min"] == least["max"]:
            claim = builder.info = replace(
                claim, stamp=Timestamp(least["min"]), min_stamp=Timestamp(least["min"])
            )
            inserts = None
    part = RowPart(rows.keys, columns, rows.order, inserts, deletes)
    values = tuple(builder.encode(part, part.step))
    header = builder.header()
    return EncodedRowSet(tablet, builder.info, (*values, header))


def put_row_set(encoded: EncodedRowSet, check: Check) -> None:
    """Write the blocks, durably.

    Args:
        encoded: the row set.
        check: called in each LMDB write transaction before anything is put.

    Raises:
        StorageFullError: the disk is full; blocks already written are swept by the abort.
        What `check` raises.
    """
    environment = encoded.tablet.to_write()
    batch: list[Value] = []
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


class RowSetBuilder:
    """A row set that is written as its rows come, in key order; a few blocks are in memory.

    Args:
        tablet: where it will be.
        claim: the row set's id; with its stamp when it is to be uniform.
        point: the fault point that is passed after each batch of blocks.
    """

    def __init__(self, tablet: Tablet, claim: RowSetInfo, point: str) -> None:
        self._tablet = tablet
        self._encoder = _Encoder(tablet, claim)
        self._point = point
        self._parts: list[RowPart] = []
        self._values: list[Value] = []
        self._waiting = 0
        self.rows = 0

    def add(self, part: RowPart) -> None:
        """Append rows, none of them below the last key."""
        self._parts.append(part)
        self.rows += part.keys.n
        step = part.step
        if sum(each.keys.n for each in self._parts) >= step:
            whole = RowPart.concat(self._parts)
            full = whole.keys.n // step * step
            self._encode(whole.slice(0, full), step)
            self._parts = [whole.slice(full, whole.keys.n - full)] if full < whole.keys.n else []

    def finish(self) -> RowSetInfo:
        """Write what is left; all is durable then.

        Returns:
            What status.db is to know of the row set.
        """
        if self._parts:
            whole = RowPart.concat(self._parts)
            self._encode(whole, whole.step)
        self._values.append(self._encoder.header())
        self._write()
        return self._encoder.info

    def _encode(self, part: RowPart, step: int) -> None:
        for value in self._encoder.encode(part, step):
            self._values.append(value)
            self._waiting += _size(value)
            if self._waiting >= min(WRITE_BYTES, BUILD_BYTES):
                self._write()

    def _write(self) -> None:
        environment = self._tablet.to_write()
        environment.write(_put(self._tablet, self._values, _unchecked))
        self._values, self._waiting = [], 0
        fault_point(self._point)


@dataclass(frozen=True)
class RowPart:
    """Some rows of a row set: their keys, ascending, value columns and stamps.

    Attributes:
        columns: by name; in the order of `keys`, or that of `order`.
        order: from the columns to the keys; None when they agree.
        inserts: insert stamps in the order of the keys; None in a uniform row set.
        deletes: delete stamps, as `inserts`; None when nothing was deleted.
    """

    keys: core.Keys
    columns: Mapping[str, pa.Array]
    order: core.Rows | None
    inserts: pa.UInt64Array | None
    deletes: pa.UInt64Array | None

    @property
    def step(self) -> int:
        """Rows of a block."""
        n = max(self.keys.n, 1)
        widths = [array.nbytes / max(len(array), 1) for array in self.columns.values()]
        return rows_per_block([*widths, self.keys.nbytes / n])

    def slice(self, lo: int, n: int) -> RowPart:
        """Rows [lo, lo + n), without a copy."""
        columns, order = self.columns, self.order
        if order is None:
            columns = {name: array.slice(lo, n) for name, array in columns.items()}
        else:
            order = order.slice(lo, n)
        return RowPart(
            self.keys.slice(lo, n),
            columns,
            order,
            None if self.inserts is None else self.inserts.slice(lo, n),
            None if self.deletes is None else self.deletes.slice(lo, n),
        )

    @staticmethod
    def concat(parts: Sequence[RowPart]) -> RowPart:
        """Parts in key order, none with an order of its own, one behind the other."""
        if len(parts) == 1:
            return parts[0]
        inserts = [part.inserts for part in parts if part.inserts is not None]
        deletes = [_dense(part) for part in parts]
        names = parts[0].columns
        return RowPart(
            core.Keys.concat([part.keys for part in parts]),
            {name: pa.concat_arrays([part.columns[name] for part in parts]) for name in names},
            None,
            pa.concat_arrays(inserts) if inserts else None,
            pa.concat_arrays(deletes),
        )


def _dense(part: RowPart) -> pa.UInt64Array:
    return core.Delta.none().expand(part.keys.n) if part.deletes is None else part.deletes


class _Encoder:
    """Blocks of one row set, numbered as they come; `info` learns of them."""

    def __init__(self, tablet: Tablet, claim: RowSetInfo) -> None:
        self.info = replace(claim, rows=0, size=0, deleted=0, max_delete=0, versioned=False)
        self._tablet = tablet
        self._blocks: list[BlockInfo] = []
        self._columns: tuple[int, ...] = ()

    def encode(self, part: RowPart, step: int) -> Iterator[Value]:
        """The values of some rows, in blocks of `step`."""
        schema = self._tablet.schema
        self._columns = tuple(schema.ids[name] for name in part.columns)
        for lo in range(0, part.keys.n, step):
            for value in self._block(part.slice(lo, min(step, part.keys.n - lo))):
                self.info = replace(self.info, size=self.info.size + _size(value))
                yield value

    def _block(self, part: RowPart) -> Iterator[Value]:
        schema, number, keys = self._tablet.schema, len(self._blocks), part.keys
        zones = {}
        key = self._key(KEYS)
        yield key, keys.to_block(core.crc32c(key), 0, keys.n)
        key = self._key(BLOOM)
        yield key, core.bloom_build(keys, core.crc32c(key))
        for name, array in part.columns.items():
            key = self._key(COLUMNS + schema.ids[name])
            block = core.encode_block(array, core.crc32c(key), part.order)
            zones[schema.ids[name]] = core.zone(block, schema.columns[name].type)
            yield key, block
        if part.inserts is not None:
            key = self._key(INSERTS)
            yield key, core.encode_block(part.inserts, core.crc32c(key), plain=True)
        dead = self._note(part, zones)
        if dead.n:
            key = block_key(self.info.id, DELETES, number)
            yield key, pack_delta(dead, core.crc32c(key))

    def _key(self, section: int) -> bytes:
        return block_key(self.info.id, section, len(self._blocks))

    def _note(self, part: RowPart, zones: dict[int, core.Zone]) -> core.Delta:
        """Count a block in; answers its deletes."""
        keys, info = part.keys, self.info
        dead = core.Delta.none()
        if part.deletes is not None:
            gone = pc.less(part.deletes, pa.scalar(core.STAMP_NEVER, pa.uint64()))
            rows = core.Bitmap.from_arrow(gone).positions().to_arrow()
            dead = core.Delta(rows, part.deletes.take(rows))
        if part.inserts is not None:
            least = pc.min_max(part.inserts).as_py()
            info = replace(
                info,
                stamp=Timestamp(max(info.stamp or 0, least["max"])),
                min_stamp=Timestamp(min(info.min_stamp or least["min"], least["min"])),
            )
        first, last = keys.key(0), keys.key(keys.n - 1)
        again = bool(self._blocks) and self._blocks[-1].last == first
        self.info = replace(
            info,
            rows=info.rows + keys.n,
            min_key=info.min_key if self._blocks else first,
            max_key=last,
            deleted=info.deleted + dead.n,
            max_delete=max(info.max_delete, pc.max(dead.stamps).as_py() or 0),
            versioned=info.versioned
            or again
            or (dead.n > 0 and core.mark_duplicates(keys, None).count > 0),
        )
        self._blocks.append(BlockInfo(info.rows, keys.n, first, last, zones))
        return dead

    def header(self) -> Value:
        """The header, once all blocks are encoded."""
        header = Header(self.info.rows, self._columns, tuple(self._blocks))
        key = block_key(self.info.id, HEADER, 0)
        value = header.pack(core.crc32c(key))
        self.info = replace(self.info, size=self.info.size + len(value))
        return key, value


def _size(value: Value) -> int:
    return len(value[1]) if isinstance(value[1], bytes) else int(value[1].size)


def _unchecked(_: lmdb.Transaction) -> None:
    """Check nothing: a writer under a lock of maintenance needs no fence."""


def _put(tablet: Tablet, values: list[Value], check: Check) -> Callable[[lmdb.Transaction], None]:
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


# -- deletes ---------------------------------------------------------------------------

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
        room = WRITE_BYTES
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
