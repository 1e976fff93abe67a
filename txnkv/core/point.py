"""Reads of one row: where a key stands, and the values of the row, in a call each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from txnkv.core.block import decode_block
from txnkv.core.blocks import BlockList
from txnkv.core.native import CoreError, ffi, lib
from txnkv.core.row_layout import RowLayout
from txnkv.core.row_one import is_opaque

_BYTES = ffi.typeof("uint8_t[]")
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


def _damaged_keys() -> CoreError:
    return CoreError("finding a key: a block is damaged. Check the store that it came from.")


class Probe(BlockList):
    """A key block and its filter, to find single keys in: `point_find` with less to do."""

    __slots__ = ("_asked",)

    def __init__(self, keys_block: Any, bloom_block: Any | None) -> None:
        """Takes two verified blocks, any buffer objects; no filter when None."""
        super().__init__((keys_block, bloom_block))
        keys, bloom = self._held
        self._asked = (keys, len(keys), *((ffi.NULL, 0) if bloom is None else (bloom, len(bloom))))

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
