"""Reading a disk row set: its header, blocks, and the keys it holds."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from txnkv import core
from txnkv.errors import CorruptionError, InvalidTxnStateError, TxnkvError
from txnkv.tables.manifest import RowSetInfo
from txnkv.tables.row_set_format import (
    BLOOM,
    COLUMNS,
    HEADER,
    KEYS,
    BlockInfo,
    Header,
    HeaderError,
    block_key,
)

if TYPE_CHECKING:
    from txnkv.tables.tablet import Pages, Tablet

_PROBE_SHARE = 64
"""Below one probe for so many rows of a block, its Bloom filter is asked first."""


class RowSet:
    """One immutable row set of a tablet. Shared by threads.

    A block's checksum is verified once a process and remembered.
    """

    def __init__(self, tablet: Tablet, info: RowSetInfo) -> None:
        self.info = info
        self.id = info.id
        self._tablet = tablet
        self._verified: set[tuple[int, int]] = set()
        self._lock = threading.Lock()
        self._header: Header | None = None
        self._firsts: list[bytes] = []
        self._lasts: list[bytes] = []

    def header(self, pages: Pages) -> Header:
        """The header, read once.

        Raises:
            CorruptionError: it is missing or damaged.
            InvalidTxnStateError: it was staged by a transaction that was aborted meanwhile.
        """
        if self._header is None:
            key = block_key(self.id, HEADER, 0)
            data = pages.get(key)
            if data is None:
                raise self._missing("header", 0)
            try:
                header = Header.unpack(bytes(data), core.crc32c(key))
            except HeaderError as error:
                raise self._corrupt("header", 0, str(error)) from None
            with self._lock:
                self._firsts = [block.first for block in header.blocks]
                self._lasts = [block.last for block in header.blocks]
                self._header = header
        return self._header

    def block(self, pages: Pages, section: int, number: int, *, again: bool = False) -> memoryview:
        """A verified block, as it lies in LMDB: valid inside `pages` alone.

        Args:
            again: verify it although it was verified before.
        """
        key = block_key(self.id, section, number)
        data = pages.get(key)
        if data is None:
            raise self._missing(self._tablet.section_name(section), number)
        if again or (section, number) not in self._verified:
            if not core.verify_block(data, core.crc32c(key)):
                raise self._corrupt(
                    self._tablet.section_name(section), number, "its checksum does not match"
                )
            self._verified.add((section, number))
        return data

    def keys(self, pages: Pages, number: int) -> core.Keys:
        """The keys of one block, pointing into LMDB: valid inside `pages` alone."""
        return core.Keys.from_block(self.block(pages, KEYS, number))

    def blocks_between(self, pages: Pages, low: bytes | None, high: bytes | None) -> range:
        """Numbers of the blocks that may hold keys with low <= key < high."""
        blocks = self.header(pages).blocks
        start = 0 if low is None else bisect_left(self._lasts, low)
        stop = len(blocks) if high is None else bisect_left(self._firsts, high)
        return range(start, max(start, stop))

    def read(
        self,
        pages: Pages,
        block: BlockInfo,
        number: int,
        columns: Sequence[str],
        lo: int,
        n: int,
    ) -> list[pa.Array]:
        """Rows [lo, lo + n) of a block, copied into memory that Arrow owns."""
        schema = self._tablet.schema
        keys: core.Keys | None = None
        arrays = []
        for name in columns:
            if name in schema.primary_key:
                if keys is None:
                    keys = self.keys(pages, number)
                position = schema.primary_key.index(name)
                arrays.append(self._tablet.codec.decode(keys, position, lo, n))
            elif schema.ids[name] in block.zones:
                data = self.block(pages, COLUMNS + schema.ids[name], number)
                arrays.append(core.decode_block(data, schema.columns[name].type, lo, n))
            else:
                arrays.append(self._tablet.filler(name, n))
        return arrays

    def gather(
        self, pages: Pages, number: int, columns: Sequence[str], rows: core.Rows
    ) -> list[pa.Array]:
        """Some rows of a block, in the order of `rows`."""
        schema = self._tablet.schema
        block = self.header(pages).blocks[number]
        keys: core.Keys | None = None
        arrays = []
        for name in columns:
            if name in schema.primary_key:
                if keys is None:
                    keys = self.keys(pages, number).gather(rows)
                arrays.append(self._tablet.codec.decode(keys, schema.primary_key.index(name)))
            elif schema.ids[name] in block.zones:
                data = self.block(pages, COLUMNS + schema.ids[name], number)
                arrays.append(core.gather_block(data, schema.columns[name].type, rows))
            else:
                arrays.append(self._tablet.filler(name, rows.n))
        return arrays

    def find_one(self, pages: Pages, key: bytes) -> tuple[int, int] | None:
        """Block number and row in it of a key, or None."""
        self.header(pages)
        number = bisect_right(self._firsts, key) - 1
        if number < 0 or key > self._lasts[number]:
            return None
        if not core.bloom_may_contain(self.block(pages, BLOOM, number), key):
            return None
        keys = self.keys(pages, number)
        row = core.lower_bound(keys, key)
        return (number, row) if row < keys.n and keys.key(row) == key else None

    def find_many(
        self, pages: Pages, probes: core.Keys
    ) -> Iterator[tuple[int, int, pa.UInt32Array]]:
        """Where those of `probes` (ascending) lie that are here.

        Yields:
            Block number, position of the first probe, and for it and those behind it the
            row in the block, null where absent.
        """
        for number, start, some in self._promising(pages, probes):
            rows = core.find(self.keys(pages, number), some)
            rows = pc.if_else(pc.greater_equal(rows, 0), rows, pa.scalar(None, pa.int32()))
            if rows.null_count < len(rows):
                yield number, start, rows.cast(pa.uint32())

    def common(self, pages: Pages, keys: core.Keys) -> pa.UInt32Array:
        """Positions of those of `keys` (strictly ascending) that are in this row set."""
        if keys.n == 0:
            return pa.array([], pa.uint32())
        found: list[pa.Array] = []
        for number, start, probes in self._promising(pages, keys):
            hits = core.mark_common(probes, self.keys(pages, number))
            if hits.count:
                found.append(_shifted(hits.positions().to_arrow(), start))
        return pa.concat_arrays(found) if found else pa.array([], pa.uint32())

    def _promising(self, pages: Pages, keys: core.Keys) -> Iterator[tuple[int, int, core.Keys]]:
        """Blocks that may hold some of `keys`: which, the position of the first, and those keys.

        A Bloom filter is asked where they are few for the block, for its key block is larger.
        """
        blocks = self.header(pages).blocks
        for number in self._candidates(pages, keys):
            block = blocks[number]
            start = core.lower_bound(keys, block.first)
            stop = core.lower_bound(keys, block.last + b"\0")
            if start == stop:
                continue
            some = keys.slice(start, stop - start)
            if some.n * _PROBE_SHARE < block.rows:
                maybe = core.bloom_probe(self.block(pages, BLOOM, number), some)
                if maybe.count == 0:
                    continue
            yield number, start, some

    def _candidates(self, pages: Pages, keys: core.Keys) -> Sequence[int]:
        """Blocks whose key range may meet `keys`; by key where the keys are few."""
        span = self.blocks_between(pages, keys.key(0), keys.key(keys.n - 1) + b"\0")
        if keys.n >= len(span):
            return span
        numbers = {bisect_right(self._firsts, keys.key(i)) - 1 for i in range(keys.n)}
        return sorted(number for number in numbers if number in span)

    def _missing(self, column: str, block: int) -> TxnkvError:
        # An abort by another process takes the blocks away between the list of the row sets and
        # the look at them: no damage, but the end of the transaction that reads.
        if self.info.stamp is None and self._tablet.is_swept(self.id):
            return InvalidTxnStateError(
                f"cannot read {self._tablet.label}, row set {self.id}: its transaction was aborted "
                "meanwhile and what it staged was removed. Begin a new transaction"
            )
        return self._corrupt(column, block, "it is missing")

    def _corrupt(self, column: str, block: int, what: str) -> CorruptionError:
        return CorruptionError(
            f"store {self._tablet.store_path}, {self._tablet.label}, row set {self.id}, "
            f"column {column}, block {block}: {what}. Nothing of it was returned. Restore the "
            "store from a backup, or drop the table; `txnkv check` lists all damage"
        )


def _shifted(positions: pa.Array, by: int) -> pa.Array:
    if by == 0:
        return positions
    return pc.add(positions, pa.scalar(by, pa.uint32()))
