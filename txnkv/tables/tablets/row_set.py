"""A disk row set: its header, columns, stamps and deletes; keys in it, and what was done to them.

    row     0      1      2      3      4
    key     ant    bee    bee    cat    dog       bee has two versions, the newest first
    insert  10     30     10     10     20        one stamp for all in a uniform row set
    delete  -      -      30     25     -         only of rows that were deleted: the delta

A snapshot at 27 sees the rows with insert <= 27 < delete: ant, bee of row 2, dog. Those it sees
are strictly ascending by key. Blocks never change, but for the delta of each, which grows.

Most row sets are uniform and without deletes: then nothing of this is looked at.

Everything that is asked of many keys at once goes block by block in C: the keys that may be in
a block are a slice of those asked for, matched with the block's by merge or search. What a
match yields is a pair of numbers, and the stamps of the row decide who sees it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

import pyarrow as pa

from txnkv import core
from txnkv.coordinator import MAX_TIMESTAMP
from txnkv.core import compute as pc
from txnkv.errors import CorruptionError, InvalidTxnStateError, TxnkvError, UnavailableError
from txnkv.storage import new_lock
from txnkv.tables.schema import widened
from txnkv.tables.tablets.manifest import RowSetInfo
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
    unpack_delta,
)
from txnkv.tables.tablets.tablet_files import Pages, TabletFiles

# -- blocks ----------------------------------------------------------------------------

T = TypeVar("T")

_FEW: Final = 8
"""Below one key for so many of a block they are taken from it as it lies."""

FEW_KEYS: Final = 32
"""Keys of a row set that are kept in memory, and that are looked for in such ones."""
_STAMPS_AT = 32
"""The offset in bytes at which the values of a block of stamps begin: behind its header."""


class RowSetRetired(UnavailableError):
    """A flush or compaction replaced the row set and its blocks are gone: take a fresh state of
    the tablet and begin again. Programs meet it where others cannot see what they read.
    """

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} was replaced while it was read: read again")


def until_there(look: Callable[[], T], refresh: Callable[[], object]) -> T:
    """Return what `look` gives, which takes the state of a tablet for itself; once more after each
    `refresh` when a row set of that state is gone.
    """
    while True:
        try:
            return look()
        except RowSetRetired:
            refresh()


class RowSetBlocks:
    """One row set of a tablet, block by block. Shared by threads.

    A block's checksum is verified once a process and remembered, and so are the deltas, until
    the row set's `delta_seq` is seen to have changed.
    """

    def __init__(self, tablet: TabletFiles, info: RowSetInfo) -> None:
        self.info = info
        self.id = info.id
        self._tablet = tablet
        self._verified: set[tuple[int, int]] = set()
        self._lock = new_lock()
        self._header: Header | None = None
        self.firsts: list[bytes] = []
        self.lasts: list[bytes] = []
        self.layer: Any = None  # of `read.point`
        self._there_at: int | None = None
        self._deltas: dict[int, core.Delta | None] = {}
        self._deltas_from: int | None = None

    def adopt(self, info: RowSetInfo) -> None:
        """Learn what status.db says of the row set by now; what is older changes nothing."""
        known = self.info
        if info.delta_seq < known.delta_seq or (info.stamp is None and known.stamp is not None):
            return
        with self._lock:
            if info.delta_seq > self.info.delta_seq:
                self._deltas, self._deltas_from = {}, None
            self.info = info

    # -- blocks ------------------------------------------------------------------------

    def header(self, pages: Pages) -> Header:
        """The header, read once.

        Raises:
            CorruptionError: it is missing or damaged.
            InvalidTxnStateError: it was staged by a transaction that was aborted meanwhile.
            RowSetRetired: it was replaced meanwhile.
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
                self.firsts = [block.first for block in header.blocks]
                self.lasts = [block.last for block in header.blocks]
                self._header = header
        return self._header

    def require_there(self, pages: Pages) -> None:
        """Refuse a row set that is removed; LMDB is asked once while nothing is written.

        Raises:
            As `header`.
        """
        txn = pages.txn.id()
        if self._there_at != txn:
            with pages.txn.cursor(db=pages.blocks) as cursor:
                if not cursor.set_key(block_key(self.id, HEADER, 0)):
                    raise self._missing("header", 0)
            self._there_at = txn

    def block(self, pages: Pages, section: int, number: int, *, again: bool = False) -> memoryview:
        """A verified block, as it lies in LMDB: valid inside `pages` alone.

        Args:
            again: verify it although it was verified before.

        Raises:
            As `header`.
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
        """The keys of one block, pointing into LMDB: valid inside `pages` alone. In a versioned
        row set equal ones stand together.
        """
        return core.Keys.from_block(self.block(pages, KEYS, number))

    def keys_at(self, pages: Pages, number: int, rows: core.Rows) -> core.Keys:
        """The keys at some rows of a block, in their order, copied."""
        if rows.n * _FEW < self.header(pages).blocks[number].rows:
            return core.gather_keys(self.block(pages, KEYS, number), rows)
        return self.keys(pages, number).gather(rows)

    def blocks_between(self, pages: Pages, low: bytes | None, high: bytes | None) -> range:
        """Numbers of the blocks that may hold keys with low <= key < high."""
        blocks = self.header(pages).blocks
        start = 0 if low is None else bisect_left(self.lasts, low)
        stop = len(blocks) if high is None else bisect_left(self.firsts, high)
        return range(start, max(start, stop))

    def read(
        self,
        pages: Pages,
        block: BlockInfo,
        number: int,
        columns: Sequence[str],
        lo: int,
        n: int,
        gone: core.Rows | None = None,
    ) -> list[pa.Array]:
        """Rows [lo, lo + n) of a block, copied into memory that Arrow owns.

        Args:
            pages: a read.
            block, number: of the row set.
            columns: names.
            lo, n: which rows,
            gone: without these of them, ascending.
        """
        tablet, schema = self._tablet, self._tablet.schema
        keys: core.Keys | None = None
        arrays = []
        for name in columns:
            if name in schema.primary_key:
                key = self._key_column(pages, number, lo, n, gone)
                if key is not None:
                    arrays.append(key)
                    continue
                if keys is None:
                    keys = self.keys(pages, number)
                position = schema.primary_key.index(name)
                if gone is None:
                    arrays.append(tablet.codec.decode(keys, position, lo, n))
                else:
                    arrays.append(tablet.codec.decode_without(keys, position, gone, lo, n))
            elif (found := schema.stored(name, block.zones)) is not None:
                id, kind = found
                data = self.block(pages, COLUMNS + id, number)
                if gone is None:
                    array = core.decode_block(data, kind, lo, n)
                else:
                    array = core.decode_block_without(data, kind, gone, lo, n)
                arrays.append(widened(array, schema.columns[name].type))
            else:
                arrays.append(tablet.filler(name, n if gone is None else n - gone.n))
        return arrays

    def _key_column(
        self, pages: Pages, number: int, lo: int, n: int, gone: core.Rows | None
    ) -> pa.Array | None:
        """The key column, where it is the only one and an integer in packed keys."""
        types = self._tablet.codec.types
        if len(types) > 1 or self._tablet.codec.width not in (4, 8):
            return None
        return core.decode_key_block(self.block(pages, KEYS, number), types[0], lo, n, gone)

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
                    keys = self.keys_at(pages, number, rows)
                arrays.append(self._tablet.codec.decode(keys, schema.primary_key.index(name)))
            elif (found := schema.stored(name, block.zones)) is not None:
                array = core.gather_block(
                    self.block(pages, COLUMNS + found[0], number), found[1], rows
                )
                arrays.append(widened(array, schema.columns[name].type))
            else:
                arrays.append(self._tablet.filler(name, rows.n))
        return arrays

    # -- stamps and deletes ------------------------------------------------------------

    def inserts(self, pages: Pages, number: int) -> pa.UInt64Array | None:
        """The insert stamps of a block, copied; None when all rows have `info.stamp`."""
        if self.info.uniform:
            return None
        return core.decode_block(self.block(pages, INSERTS, number), pa.uint64())

    def deletes(self, pages: Pages, number: int) -> tuple[pa.UInt32Array, pa.UInt64Array] | None:
        """Which rows of a block were deleted, ascending, and when; None for no row."""
        delta = self.delta(pages, number)
        return None if delta is None else (delta.rows, delta.stamps)

    def delta(self, pages: Pages, number: int) -> core.Delta | None:
        """Return the deletes of a block; None for no row. Deletes newer than those of `info` may be
        among them.
        """
        if not self.info.deleted:
            return None
        deltas = self._deltas
        if number in deltas:
            return deltas[number]
        # What another thread reads, in an LMDB snapshot from before the deletes that it was told
        # of here came, must not be kept for those who rely on them:
        #   A: begins a read ...                                  reads the delta, keeps it
        #   B:                   deletes rows, delta_seq 5 -> 6 (adopted here)        ... too old
        since = self._since()
        delta = self.stored_delta(pages, number)
        if pages.txn.id() >= since:
            deltas[number] = delta
        return delta

    def stored_delta(self, pages: Pages, number: int) -> core.Delta | None:
        """The deletes of a block as they are stored now; not remembered."""
        key = block_key(self.id, DELETES, number)
        data = pages.get(key)
        if data is None:
            return None
        rows = self.header(pages).blocks[number].rows
        try:
            return unpack_delta(data, core.crc32c(key), rows)
        except HeaderError as error:
            raise self._corrupt("deletes", number, str(error)) from None

    def _since(self) -> int:
        """The LMDB transaction from which on reads have all deletes that `info` speaks of."""
        since = self._deltas_from
        if since is None:
            told = self.info.delta_seq
            since = self._tablet.look(lambda pages: pages.txn.id())
            with self._lock:
                if self.info.delta_seq == told:  # else it is too early for what came meanwhile
                    self._deltas_from = since
        return since

    def seen(self, pages: Pages, number: int, snapshot: int) -> pa.BooleanArray | None:
        """A bit for each row of a block that says whether a snapshot sees it; None for all."""
        info = self.info
        if info.stamp is None:
            return None
        n = self.header(pages).blocks[number].rows
        delta = self.delta(pages, number)
        if info.stamp <= snapshot:
            dead = None if delta is None else delta.dead(n, snapshot)
            return pc.invert(dead.to_arrow()) if dead is not None and dead.count else None
        if info.uniform:
            return core.Bitmap.none(n).to_arrow()
        inserts = self.block(pages, INSERTS, number)[_STAMPS_AT:]
        deletes = None if delta is None else delta.expand(n).buffers()[1]
        bits, _ = core.visible(inserts, deletes, n, snapshot, 0)
        return None if bits.count == n else bits.to_arrow()

    def visible(self, pages: Pages, number: int, snapshot: int) -> core.Rows | None:
        """The rows of a block that a snapshot sees, ascending; None for all."""
        info = self.info
        if info.stamp is None or (not info.deleted and info.stamp <= snapshot):
            return None
        seen = self.seen(pages, number, snapshot)
        return None if seen is None else core.Bitmap.from_arrow(seen).positions()

    def changed(self, pages: Pages, number: int, after: int) -> pa.BooleanArray | None:
        """A bit for each row of a block that says whether it was inserted or deleted above
        `after`; None for all.
        """
        info = self.info
        if info.stamp is None:
            return None
        n = self.header(pages).blocks[number].rows
        if info.stamp <= after:
            fresh = None
        elif info.uniform or (info.min_stamp is not None and info.min_stamp > after):
            return None
        else:
            fresh = pc.greater(self.inserts(pages, number), pa.scalar(after, pa.uint64()))
        delta = self.delta(pages, number)
        gone = (core.Delta.none() if delta is None else delta).between(n, after, MAX_TIMESTAMP - 1)
        return gone.to_arrow() if fresh is None else pc.or_(fresh, gone.to_arrow())

    def stamps_of(
        self, pages: Pages, number: int, rows: pa.UInt32Array
    ) -> tuple[pa.UInt64Array, pa.UInt64Array]:
        """Insert and delete stamps of some rows of a block, `STAMP_NEVER` where not deleted."""
        inserts = self.inserts(pages, number)
        if inserts is None:
            found = pa.repeat(pa.scalar(int(self.info.stamp or 0), pa.uint64()), len(rows))
        else:
            found = inserts.take(rows)
        delta = self.delta(pages, number)
        if delta is None:
            return found, pa.repeat(pa.scalar(core.STAMP_NEVER, pa.uint64()), len(rows))
        return found, delta.expand(self.header(pages).blocks[number].rows).take(rows)

    # -- what is not there -------------------------------------------------------------

    def _missing(self, column: str, block: int) -> Exception:
        # An abort by another process takes the blocks away between the list of the row sets and
        # the look at them, and so does the collection of a row set that was replaced: no damage.
        if self.info.stamp is None:
            if self._tablet.is_swept(self.id):
                return self._aborted()
        elif self._tablet.is_retired(self.id):
            return RowSetRetired(f"{self._tablet.label}, row set {self.id}")
        if self._tablet.is_unseen:
            return RowSetRetired(f"{self._tablet.label}, row set {self.id}")
        return self._corrupt(column, block, "it is missing")

    def _aborted(self) -> TxnkvError:
        return InvalidTxnStateError(
            f"cannot read {self._tablet.label}, row set {self.id}: its transaction was aborted "
            "meanwhile and what it staged was removed. Begin a new transaction"
        )

    def _corrupt(self, column: str, block: int, what: str) -> CorruptionError:
        return CorruptionError(
            f"store {self._tablet.store_path}, {self._tablet.label}, row set {self.id}, "
            f"column {column}, block {block}: {what}. Nothing of it was returned. Restore the "
            "store from a backup, or drop the table; `txnkv check` lists all damage"
        )


# -- keys ------------------------------------------------------------------------------

_PROBE_SHARE = 64
"""Below one probe for so many rows of a block, its Bloom filter is asked first."""

_U32, _U64 = pa.uint32(), pa.uint64()


class RowSet(RowSetBlocks):
    """One row set of a tablet. Shared by threads."""

    # -- many keys ---------------------------------------------------------------------

    def find_many(
        self, pages: Pages, probes: core.Keys, snapshot: int | None
    ) -> Iterator[tuple[int, int, pa.UInt32Array]]:
        """Find those of `probes` (strictly ascending) that a snapshot sees here; None: all.

        Yields:
            Block number, position of the first probe, and for it and those behind it the
            row in the block, null where absent.
        """
        for number, start, some in self._promising(pages, probes):
            positions, rows = self._seen_matches(pages, number, some, snapshot)
            if len(rows) == 0:
                continue
            if len(rows) < some.n:
                asked = core.Rows.range(some.n).to_arrow()
                rows = rows.take(pc.index_in(asked, value_set=positions))
            yield number, start, rows

    def common(self, pages: Pages, keys: core.Keys, snapshot: int | None = None) -> pa.UInt32Array:
        """Positions of those of `keys` (strictly ascending) that a snapshot sees here; without one
        of all that are here, whatever their stamps.
        """
        found: list[pa.Array] = []
        for number, start, some in self._promising(pages, keys):
            if snapshot is None:
                _, positions = core.match_block(self.block(pages, KEYS, number), some)
            else:
                positions, _ = self._seen_matches(pages, number, some, snapshot)
            if len(positions):
                found.append(_raised(positions, start))
        return _joined(found)

    def locate(
        self, pages: Pages, keys: core.Keys, snapshot: int | pa.UInt64Array | None
    ) -> tuple[pa.UInt32Array, pa.UInt32Array]:
        """Find those of `keys` (strictly ascending) that a snapshot sees here.

        Args:
            pages: a read.
            keys: what to look for.
            snapshot: one for all keys, or one for each; None for all rows, whatever their stamps.

        Returns:
            Positions of keys, ascending, and the number in the row set of the row of each.
        """
        found: list[pa.Array] = []
        numbers: list[pa.Array] = []
        blocks = self.header(pages).blocks
        for number, start, some in self._promising(pages, keys):
            if snapshot is None:
                positions, rows = self.matches(pages, number, some)
            else:
                at = snapshot if isinstance(snapshot, int) else snapshot.slice(start, some.n)
                positions, rows = self._seen_matches(pages, number, some, at)
            if len(rows):
                found.append(_raised(positions, start))
                numbers.append(_raised(rows, blocks[number].start))
        return _joined(found), _joined(numbers)

    def _seen_matches(
        self, pages: Pages, number: int, some: core.Keys, snapshot: int | pa.UInt64Array | None
    ) -> tuple[pa.UInt32Array, pa.UInt32Array]:
        """Positions of `some` and rows of a block that have the same key and are seen."""
        positions, rows = self.matches(pages, number, some)
        if len(rows) == 0 or snapshot is None or self.info.stamp is None:
            return positions, rows
        if isinstance(snapshot, int):
            seen = self.seen(pages, number, snapshot)
            if seen is None:
                return positions, rows
            kept = seen.take(rows)
        else:
            inserts, deletes = self.stamps_of(pages, number, rows)
            own = snapshot.take(positions)
            kept = pc.and_(pc.less_equal(inserts, own), pc.greater(deletes, own))
        return positions.filter(kept), rows.filter(kept)

    def matches(
        self, pages: Pages, number: int, some: core.Keys
    ) -> tuple[pa.UInt32Array, pa.UInt32Array]:
        """Positions of `some` and rows of a block that have the same key, both ascending."""
        keys = self.block(pages, KEYS, number)
        rows, positions = core.match_block(keys, some, versioned=self.info.versioned)
        return positions, rows

    # -- changes -----------------------------------------------------------------------

    def touched(self, pages: Pages, keys: core.Keys, after: int) -> int:
        """The position of the first of `keys` (strictly ascending) that was inserted or deleted
        here above `after`, or -1.
        """
        if not self._changed_after(after):
            return -1
        for number, start, some in self._promising(pages, keys):
            positions, rows = self.matches(pages, number, some)
            if len(rows) == 0:
                continue
            changed = self.changed(pages, number, after)
            if changed is not None:
                positions = positions.filter(changed.take(rows))
            if len(positions):
                return start + int(positions[0].as_py())
        return -1

    def touched_range(
        self, pages: Pages, low: bytes | None, high: bytes | None, after: int
    ) -> bytes | None:
        """The first key with low <= key < high that was inserted or deleted here above `after`."""
        if not self._changed_after(after):
            return None
        for number in self.blocks_between(pages, low, high):
            keys = self.block(pages, KEYS, number)
            lo = 0 if low is None else core.lower_bound_in(keys, low)
            hi = core.block_rows(keys) if high is None else core.lower_bound_in(keys, high)
            if lo >= hi:
                continue
            changed = self.changed(pages, number, after)
            at = 0 if changed is None else pc.index(changed.slice(lo, hi - lo), True).as_py()
            if at >= 0:
                return self.keys(pages, number).key(lo + at)
        return None

    def _changed_after(self, after: int) -> bool:
        info = self.info
        return info.stamp is None or info.stamp > after or info.max_delete > after

    # -- which blocks ------------------------------------------------------------------

    def _promising(self, pages: Pages, keys: core.Keys) -> Iterator[tuple[int, int, core.Keys]]:
        """Blocks that may hold some of `keys`: which, the position of the first, and those keys.

        A Bloom filter is asked where they are few for the block, for its key block is larger.
        """
        if keys.n == 0:
            return
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
        numbers: set[int] = set()
        for i in range(keys.n):
            key = keys.key(i)
            numbers.update(range(bisect_left(self.lasts, key), bisect_right(self.firsts, key)))
        return sorted(numbers)


def _where(mask: pa.BooleanArray) -> pa.UInt32Array:
    return core.Bitmap.from_arrow(mask).positions().to_arrow()


def _raised(positions: pa.Array, by: int) -> pa.Array:
    return positions if by == 0 else pc.add(positions, pa.scalar(by, _U32))


def _joined(parts: list[pa.Array]) -> pa.UInt32Array:
    if len(parts) == 1:
        return parts[0]
    return pa.concat_arrays(parts) if parts else pa.nulls(0, _U32)
