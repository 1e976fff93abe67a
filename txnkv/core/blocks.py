"""Rows of blocks: scattered ones found and read in one call for all, one alone in a call each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from txnkv.core import compute as pc
from txnkv.core.block import block_layout, decode_block
from txnkv.core.keys import Keys
from txnkv.core.native import CoreError, allocate, check, ffi, lib, pointer
from txnkv.core.row_layout import RowLayout, is_opaque
from txnkv.core.rows import NULL_ROW, Rows

_BYTES = ffi.typeof("uint8_t[]")
_LIST = ffi.typeof("block_bytes_t[]")
_LISTS = ffi.typeof("block_bytes_t *[]")
_U32 = ffi.typeof("uint32_t *")
_NULLS = ffi.typeof("uint32_t *")
_BLOCK = ffi.typeof("block_t *")
_ABSENT = (ffi.NULL, 0)


class BlockList:
    """Verified blocks as the core takes many of them: their addresses.

    It borrows the blocks' memory: for views into LMDB it is good for as long as they are.

    Attributes:
        n: how many.
    """

    __slots__ = ("_blocks", "_column", "c", "n")

    def __init__(self, blocks: Sequence[Any]) -> None:
        """Takes the addresses of buffer objects; None for a block that is not there."""
        self.n = len(blocks)
        self._blocks: list[Any] | None = list(blocks)
        self._column: tuple[BlockTable, int] | None = None
        # No export is held longer: see `native.readable`.
        views = [None if block is None else _view(_BYTES, block) for block in blocks]
        self.c = ffi.new(_LIST, [_ABSENT if view is None else (view, len(view)) for view in views])

    @property
    def blocks(self) -> list[Any]:
        """The buffer objects; None where there is no block."""
        if self._blocks is None:
            assert self._column is not None
            table, column = self._column
            self._blocks = [row and row.blocks[column] for row in table.rows]
        return self._blocks

    def put(self, i: int, block: Any) -> None:
        """Puts another block in the place of the i-th; not while others read.

        Raises:
            IndexError: i is not in [0, n).
            ValueError: the list is a column of a table.
        """
        if not 0 <= i < self.n:
            raise IndexError(f"block {i} of {self.n}")
        if self._column is not None:
            raise ValueError("a column of a table is as it is; put the block into its row")
        view = None if block is None else _view(_BYTES, block)
        self.c[i] = _ABSENT if view is None else (view, len(view))
        self.blocks[i] = block


class BlockTable:
    """Blocks as rows of several columns, to take column by column.

    Each row is the `BlockList` of what belongs together: one block a column, as a `RowReader`
    takes them; or a `Probe`, whose column 0 are its keys and 1 its filter.
    """

    __slots__ = ("_columns", "_lists", "_n", "rows")

    def __init__(self, rows: Sequence[BlockList | None]) -> None:
        """Takes rows of as many blocks each; None for one without blocks."""
        self.rows = rows
        self._n = len(rows)
        self._columns = min([row.n for row in rows if row is not None], default=0)
        self._lists = ffi.new(_LISTS, [ffi.NULL if row is None else row.c for row in rows])

    def column(self, i: int) -> BlockList:
        """The blocks of a column, one of each row.

        Raises:
            IndexError: a row has no such column.
        """
        if not 0 <= i < self._columns:
            raise IndexError(f"column {i} of rows of {self._columns} blocks")
        found = BlockList.__new__(BlockList)
        found.n = self._n
        found.c = ffi.new(_LIST, self._n)
        found._column = (self, i)
        found._blocks = None
        lib.blocks_pick(self._lists, self._n, i, found.c)
        return found


def find_in_blocks(
    blocks: BlockList, firsts: Keys, probes: Keys
) -> tuple[pa.UInt32Array, pa.UInt32Array]:
    """Find keys in blocks of ascending keys that follow each other.

    Args:
        blocks: key blocks; in one that is not there no key is found.
        firsts: the first key of each block.
        probes: keys in any order; ascending ones go faster.

    Returns:
        For each probe the number of its block and its row there (the first, if the key is there
        several times), `NULL_ROW` twice where it is absent.

    Raises:
        CoreError: a block holds no keys.
        ValueError: there are not as many firsts as blocks.
    """
    if blocks.n != firsts.n:
        raise ValueError(f"{firsts.n} first keys of {blocks.n} blocks")
    numbers, rows = allocate(4 * probes.n), allocate(4 * probes.n)
    out = pointer(numbers, _U32), pointer(rows, _U32)
    if status := lib.blocks_find(blocks.c, firsts.c, probes.c, *out):
        check(status, f"finding {probes.n} keys in {blocks.n} blocks")
    return _numbers(numbers, probes.n), _numbers(rows, probes.n)


def gather_blocks(
    blocks: BlockList,
    type_: pa.DataType,
    block_of_row: pa.UInt32Array | Rows,
    row_in_block: pa.UInt32Array | Rows,
) -> pa.Array:
    """Rows of many blocks of one column, in the order asked for, copied.

    Args:
        blocks: verified; rows of one that is not there are null.
        type_: of the column.
        block_of_row: the block of each row; `NULL_ROW` gives a null. `Rows` save a microsecond.
        row_in_block: the row in it.

    Raises:
        CoreError: a block is damaged or not of this type, or the strings pass 2 GiB.
        IndexError: a block or row is not there.
        TypeError: the numbers are not uint32.
        ValueError: the numbers have nulls, or are not as many.
    """
    numbers = block_of_row if isinstance(block_of_row, Rows) else Rows.from_arrow(block_of_row)
    rows = row_in_block if isinstance(row_in_block, Rows) else Rows.from_arrow(row_in_block)
    n = numbers.n
    if n != rows.n:
        raise ValueError(f"{n} numbers of blocks for {rows.n} rows")
    kind, width = block_layout(type_)
    if kind == lib.BLOCK_OPAQUE:
        return _gather_opaque(blocks, type_, numbers.to_arrow(), rows.to_arrow())
    of = pointer(numbers.buffer, _U32), pointer(rows.buffer, _U32)
    offsets, ends = None, ffi.NULL
    size = (n + 7) // 8 if kind == lib.BLOCK_BIT else n * width
    if kind == lib.BLOCK_VARLEN:
        offsets = allocate(4 * (n + 1))
        ends = pointer(offsets, _U32)
        if status := lib.blocks_gather_ends(blocks.c, blocks.n, *of, n, ends):
            check(status, f"gathering {n} rows of {type_}")
        size = ends[n]
    values, validity, nulls = allocate(size), allocate((n + 7) // 8), ffi.new(_NULLS)
    out = (ends, pointer(validity), pointer(values), nulls)
    if status := lib.blocks_gather(blocks.c, blocks.n, kind, width, *of, n, *out):
        check(status, f"gathering {n} rows of {type_}")
    count = nulls[0]
    buffers = [validity if count else None, values]
    if offsets is not None:
        buffers.insert(1, offsets)
    return pa.Array.from_buffers(type_, n, buffers, count)


def _gather_opaque(
    blocks: BlockList, type_: pa.DataType, block_of_row: pa.Array, row_in_block: pa.Array
) -> pa.Array:
    """Gather rows of opaque blocks: take them from one array of the blocks that are asked for."""
    asked = [number for number in pc.unique(block_of_row).to_pylist() if number != NULL_ROW]
    if any(number >= blocks.n for number in asked):
        raise IndexError(f"block {max(asked)} of {blocks.n}")
    asked = [number for number in asked if blocks.blocks[number] is not None]
    parts = [decode_block(blocks.blocks[number], type_) for number in asked]
    if not parts:
        return pa.nulls(len(block_of_row), type_)
    lengths = pa.array([len(part) for part in parts], pa.uint64())
    starts = pc.subtract(pc.cumulative_sum(lengths), lengths)
    which = pc.index_in(block_of_row, value_set=pa.array(asked, pa.uint32()))
    inside = pc.less(row_in_block.cast(pa.uint64()), lengths.take(which))
    if not pc.all(inside, min_count=0).as_py():
        raise IndexError(f"gathering {len(which)} rows of {type_}: a row is not in its block")
    return pa.concat_arrays(parts).take(pc.add(starts.take(which), row_in_block))


def _numbers(buffer: pa.Buffer, n: int) -> pa.UInt32Array:
    return pa.Array.from_buffers(pa.uint32(), n, [None, buffer], 0)


# -- single rows -------------------------------------------------------------------------

_ADDRESS = ffi.typeof("uintptr_t")
_FIRST_BYTES = 512
_MOST_BYTES = 1 << 16
_view = ffi.from_buffer
_buffer = ffi.buffer
_find, _row, _get = lib.point_find, lib.point_row, lib.point_get


def address(view: Any) -> int:
    """Return the address of a buffer object's bytes: another one means that they moved."""
    return int(ffi.cast(_ADDRESS, _view(_BYTES, view)))


def point_find(keys_block: Any, bloom_block: Any | None, key: bytes) -> int:
    """The row of a key in a block of ascending keys; -1 when it is not there.

    Args:
        keys_block: verified, any buffer object.
        bloom_block: its filter, which is asked first; None for none.
        key: an encoded key. Of several such keys the first is found.

    Raises:
        CoreError: a block is not what it should be.
    """
    keys = _view(_BYTES, keys_block)
    if bloom_block is None:
        found = _find(keys, len(keys), ffi.NULL, 0, key, len(key))
    else:
        bloom = _view(_BYTES, bloom_block)
        found = _find(keys, len(keys), bloom, len(bloom), key, len(key))
    if found < -1:
        raise _damaged_keys()
    return int(found)


def lower_bound_in(keys_block: Any, key: bytes) -> int:
    """Return how many keys of a block of ascending ones are below `key`.

    Args:
        keys_block: verified, any buffer object.
        key: an encoded key.

    Raises:
        CoreError: it is no block of keys.
    """
    keys = _view(_BYTES, keys_block)
    view, row = ffi.new(_BLOCK), ffi.new(_NULLS)
    if lib.block_parse(keys, len(keys), view) or lib.access_lower_bound(view, key, len(key), row):
        raise _damaged_keys()
    return int(row[0])


def _damaged_keys() -> CoreError:
    return CoreError("finding a key: a block is damaged. Check the store that it came from.")


class Probe(BlockList):
    """A key block and its filter, to find single keys in: `point_find` with less to do."""

    __slots__ = ("_asked",)

    def __init__(self, keys_block: Any, bloom_block: Any | None) -> None:
        """Takes two verified blocks, any buffer objects; no filter when None."""
        super().__init__((keys_block, bloom_block))
        self._asked = [part for each in self.c for part in (each.bytes, each.len)]

    def find(self, key: bytes) -> int:
        """Return the row of a key, -1 when it is not there; see `point_find`."""
        found: int = _find(*self._asked, key, len(key))
        if found < -1:
            raise _damaged_keys()
        return found


class RowReader:
    """Reads one row out of one block a column, as Python objects.

    A value is what `decode_block(block, type_)[row].as_py()` gives. Make one for the columns of a
    table and keep it; it may be shared by threads.
    """

    __slots__ = ("_decode", "_layout", "_nested", "_space", "_spare", "types")

    def __init__(self, types: Sequence[pa.DataType]) -> None:
        """Makes a reader of rows of these columns."""
        self.types = list(types)
        self._nested = [i for i, type_ in enumerate(types) if is_opaque(type_)]
        plain = [pa.binary() if is_opaque(type_) else type_ for type_ in types]
        layout = RowLayout(plain)
        self._layout = layout
        self._decode = layout.decode_one
        self._space = max(_FIRST_BYTES, 2 * int(layout.c.head))
        self._spare = [ffi.new(_BYTES, self._space)]

    def __call__(self, blocks: BlockList | Sequence[Any], row: int) -> tuple[Any, ...]:
        """The values at `row`; None for a null, and where there is no block.

        Args:
            blocks: verified, one a column. A `BlockList` that is used again saves a microsecond.
            row: its number in all of them.

        Raises:
            CoreError: a block is damaged, or not of its column's type.
            IndexError: the row is not in a block.
        """
        some = blocks if isinstance(blocks, BlockList) else BlockList(blocks)
        out = self._taken()
        used = _row(self._layout.c, some.c, row, out, len(out))
        if used > len(out):
            out = self._longer(used)
            used = _row(self._layout.c, some.c, row, out, len(out))
        if used < 0:
            if used == lib.POINT_RANGE:
                raise IndexError(f"row {row} is not in a block of {len(self.types)} columns")
            raise self._damaged(f"row {row}")
        values = self._decode(_buffer(out, used)[:])
        if used <= _MOST_BYTES:
            self._spare.append(out)
        return self._with_nested(values, some, row) if self._nested else values

    def get(self, probe: Probe, blocks: BlockList, key: bytes) -> tuple[Any, ...] | None:
        """The values of the row with a key, found and read in one call; None when it is absent.

        Args:
            probe: the key block; of several such keys the first is taken.
            blocks: as for a call of the reader.
            key: an encoded key.

        Raises:
            CoreError: a block is damaged, or not of its column's type.
        """
        if self._nested:
            row = probe.find(key)
            return None if row < 0 else self(blocks, row)
        out = self._taken()
        asked = (self._layout.c, probe.c, blocks.c, key, len(key))
        used = _get(*asked, out, len(out))
        if used > len(out):
            out = self._longer(used)
            used = _get(*asked, out, len(out))
        if used < -1:
            raise self._damaged("the row of a key")
        values = None if used < 0 else self._decode(_buffer(out, used)[:])
        if used <= _MOST_BYTES:
            self._spare.append(out)
        return values

    def _taken(self) -> Any:
        """Space for a row, of nobody else's."""
        try:
            return self._spare.pop()
        except IndexError:  # other threads have them all
            return ffi.new(_BYTES, self._space)

    def _longer(self, used: int) -> Any:
        self._space = max(self._space, min(2 * used, _MOST_BYTES))
        return ffi.new(_BYTES, max(used, self._space))

    def _with_nested(self, values: tuple[Any, ...], blocks: BlockList, row: int) -> tuple[Any, ...]:
        whole = list(values)
        for i in self._nested:
            if blocks.blocks[i] is not None:
                whole[i] = decode_block(blocks.blocks[i], self.types[i], row, 1)[0].as_py()
        return tuple(whole)

    def _damaged(self, what: str) -> CoreError:
        return CoreError(
            f"reading {what} of {len(self.types)} columns: a block is damaged, or not of its "
            "column's type. Check the store that it came from."
        )
