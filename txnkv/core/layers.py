"""The layers of a tablet as C reads keys and short ranges in them: csrc/tablet/layers.h.

Blocks are parsed once, where they lie. Those in LMDB's map are good as long as the map and the row
set are; whoever makes them sees to that. Small ones, which LMDB moves, are copied.

    Layers ── steps ──> LayerRowSet ── blocks ──> LayerBlock      row sets, the newest first
           └─ memory ─> MemRowSet
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa

from txnkv.core.block import decode_block
from txnkv.core.keys import Keys
from txnkv.core.mem_row_set import Delta, MemRowSet
from txnkv.core.native import CoreError, allocate, check, ffi, lib, pointer, readable
from txnkv.core.row_layout import SLICE_BYTES, RowLayout, is_opaque
from txnkv.core.rows import Bitmap, Rows, rows_pointer

_BLOCK: Final = ffi.typeof("layer_block_t *")
_BLOCKS: Final = ffi.typeof("block_t[]")
_FOUND: Final = ffi.typeof("layer_found_t[]")
_RANGE: Final = ffi.typeof("layers_range_t *")
_GONE: Final = ffi.typeof("gone_t *")
_SLICES: Final = ffi.typeof("row_slice_t *")
FEW: Final[int] = lib.LAYERS_FEW
"""A range of so many rows is no short one."""
_new_range: Final = ffi.new_allocator(should_clear_after_alloc=False)
_ROW_BYTES: Final = 96
_MORE: Final = 1 << 16
_buffer = ffi.buffer

Load = Callable[[int, int], None]
"""Gives a step's row set one of its blocks: the number of the step, staged ones first, and that of
the block."""


class LayerBlock:
    """One block of a row set: its keys, filter, stamps, deletes and columns.

    Args:
        keys: verified blocks, any buffer objects,
        filter, inserts: None where there is none.
        columns: of the value columns; None for one that the row set does not have.
        deletes: None for no row.
        least: bytes from which on a block stays where it is; others are copied.

    Raises:
        CoreError: a block is damaged.
    """

    __slots__ = ("_held", "c", "columns")

    def __init__(
        self,
        keys: Any,
        filter: Any | None,
        inserts: Any | None,
        columns: Sequence[Any | None],
        deletes: Delta | None,
        least: int,
    ) -> None:
        parsed = ffi.new(_BLOCKS, len(columns))
        c = self.c = ffi.new(_BLOCK)
        self._held: list[Any] = [parsed]
        for block, to in ((keys, c.keys), (filter, c.filter), (inserts, c.inserts)):
            self._parse(block, ffi.addressof(to), least)
        self.columns = [self._parse(block, parsed + i, least) for i, block in enumerate(columns)]
        c.columns = parsed
        self._delete(deletes)

    def _parse(self, block: Any | None, to: Any, least: int) -> Any | None:
        if block is None:
            return None
        if len(block) < least:
            block = bytes(block)
        self._held.append(block)
        memory = readable(block)
        check(lib.block_parse(memory, len(memory), to), "reading the header of a block")
        return block

    def _delete(self, deletes: Delta | None) -> None:
        self._held.append(deletes)
        if deletes is not None:
            self.c.deletes = deletes.c[0]

    def with_deletes(self, deletes: Delta | None) -> LayerBlock:
        """The same block with other deletes."""
        if deletes is self._held[-1]:
            return self
        made = LayerBlock.__new__(LayerBlock)
        made.c = ffi.new(_BLOCK, self.c[0])
        made.c.deletes.n = 0
        made.columns, made._held = self.columns, self._held[:-1]
        made._delete(deletes)
        return made


class LayerRowSet:
    """A row set. Blocks are added to it, by whichever thread reads them first.

    Args:
        firsts, lasts: the first and the last key of each block.
        stamps: the lowest and the highest insert stamp; None for one that a transaction staged.
        versioned: a key may be there several times.
        tombstones: its keys are deleted ones.
    """

    __slots__ = ("_list", "blocks", "c", "firsts", "lasts")

    def __init__(
        self,
        firsts: Keys,
        lasts: Keys,
        stamps: tuple[int, int] | None,
        *,
        versioned: bool,
        tombstones: bool,
    ) -> None:
        self.firsts, self.lasts = firsts, lasts
        self.blocks: dict[int, LayerBlock] = {}
        self._list = ffi.new("layer_block_t const *[]", firsts.n)
        stamps = stamps or (0, 0)
        self.c = ffi.new(
            "layer_row_set_t *",
            (firsts.c[0], lasts.c[0], self._list, *stamps, versioned, tombstones, 0, 0),
        )
        lib.layers_init_row_set(self.c)

    def put(self, number: int, block: LayerBlock) -> None:
        """Give it a block; one that is there stays."""
        # Also one that was there: whoever put it may have been interrupted in between.
        lib.layers_set_block(self.c, number, self.blocks.setdefault(number, block).c)


class LayerStep(NamedTuple):
    """A row set in which a key is looked for when its turn has come; see `tablets.Step`."""

    row_set: LayerRowSet
    before: int = 0
    hides: bool = False


class Layers:
    """The layers in which keys are looked for. Shared by threads.

    Attributes:
        nested: some values are such as the core does not know.
        row: what the core is told of rows.

    Args:
        layout: of the value columns.
        defaults: a row of it, for columns that a row set does not have.
        memory: committed rows; those with a stamp above `flushed` count.
        steps: committed row sets, in their order.
        staged: those of a transaction, the newest first, which all hide.
    """

    __slots__ = ("_defaults", "_held", "c", "layout", "nested", "row", "steps")

    def __init__(
        self,
        layout: RowLayout,
        defaults: bytes,
        memory: MemRowSet,
        flushed: int,
        steps: Sequence[LayerStep],
        staged: Sequence[LayerStep] = (),
    ) -> None:
        self.layout, self._defaults = layout, defaults
        self.nested = any(is_opaque(type_) for type_ in layout.types)
        self.row = layout.c, defaults, len(defaults)
        self.steps = [*staged, *steps]
        lists = [
            ffi.new("layer_step_t[]", [(step.row_set.c, step.before, step.hides) for step in some])
            for some in (staged, steps)
        ]
        gone = ffi.gc(ffi.new(_GONE), lib.gone_clear)
        self._held = (lists, memory, gone)
        counts = len(staged), len(steps)
        self.c = ffi.new("layers_t *", (*lists, memory.c, flushed, *counts, gone))

    @property
    def addresses(self) -> tuple[int, int, bytes]:
        """Return the addresses of these and of the layout, good as long as this lives; defaults."""
        return (
            int(ffi.cast("uintptr_t", self.c)),
            int(ffi.cast("uintptr_t", self.layout.c)),
            self._defaults,
        )

    def find(
        self, own: MemRowSet | None, keys: Keys, rows: Rows | None, snapshot: int, load: Load
    ) -> FoundRows:
        """The rows of some keys that a snapshot sees.

        Args:
            own: what a transaction has in memory; None for nothing.
            keys: in any order.
            rows: which of them; None for all.
            snapshot: what is seen.
            load: gives a row set the block that is needed.

        Raises:
            CoreError: a block is damaged.
            What `load` raises.
        """
        n = keys.n if rows is None else rows.n
        found = ffi.new(_FOUND, n)
        done = 0
        asked = self.c, _memory(own), keys.c, rows_pointer(rows)
        while (done := lib.layers_find_many(*asked, done, n, snapshot, found)) < n:
            self._load(found[done], load)
        return FoundRows(self, found, n, (own, keys))

    def range(
        self,
        own: MemRowSet | None,
        low: bytes,
        high: bytes | None,
        snapshot: int,
        load: Load,
        most: int = FEW,
        *,
        descending: bool = False,
    ) -> tuple[Keys, FoundRows] | None:
        """The rows with low <= key < high (None: no bound) that a snapshot sees, ascending.

        Args:
            own, snapshot, load: as of `find`.
            low, high: encoded keys.
            most: the first of them that are wanted; with `FEW`, all of them.
            descending: the last ones are, the last of all first.

        Returns:
            None when they are many, or too much lies between them.

        Raises:
            As `find`.
        """
        out = _new_range(_RANGE)
        bound = (ffi.NULL, 0) if high is None else (high, len(high))
        asked = _memory(own), low, len(low), *bound, snapshot, most, descending
        while status := lib.layers_range(self.c, *asked, out):
            if status == lib.LAYERS_RANGE_LONG:
                return None
            self._load(out.found[out.n], load)
        n, width = out.n, self._held[1].width
        keys = bytes(_buffer(out.keys, out.ends[n]))
        if width and n:
            taken = Keys.fixed(keys, width)
        else:
            taken = Keys.variable(keys, bytes(_buffer(out.ends, 4 * (n + 1))))
        return taken, FoundRows(self, out.found, n, (own, out))

    def nested_row(self, found: Any) -> bytes:
        """A row in a block, with values that the core does not know."""
        block = self.steps[found.step].row_set.blocks[found.number]
        given = self.layout.decode_one(self._defaults)
        values = [
            default if column is None else decode_block(column, type_, found.row, 1)[0].as_py()
            for default, column, type_ in zip(given, block.columns, self.layout.types, strict=True)
        ]
        return self.layout.encode_one(values)

    def _load(self, found: Any, load: Load) -> None:
        if found.state == lib.LAYERS_CORRUPT:
            raise CoreError("finding a key: a block is damaged. Check the store that it came from.")
        load(found.step, found.number)


def _memory(own: MemRowSet | None) -> Any:
    return ffi.NULL if own is None else own.c


class FoundRows:
    """Rows that were found, or not; good as long as the blocks in which they lie.

    Attributes:
        n: keys that were asked for.
    """

    __slots__ = ("_found", "_held", "_layers", "n")

    def __init__(self, layers: Layers, found: Any, n: int, held: object) -> None:
        self._layers, self._found, self._held = layers, found, held
        self.n = n

    def present(self) -> Bitmap:
        """A bit for each key: its row was found."""
        bits = allocate((self.n + 7) // 8)
        count = lib.layers_present(self._found, self.n, pointer(bits))
        return Bitmap(self.n, bits, count)

    def rows(self, since: int, adapt: Callable[[int, bytes], bytes]) -> RowSlices:
        """The bytes of the rows, copied out of the blocks.

        Args:
            since: committed rows of memory below this stamp have another layout,
            adapt: which brings the stamp and the bytes of one into this.

        Raises:
            CoreError: a block is damaged.
        """
        of, n = self._layers, self.n
        slices = allocate(SLICE_BYTES * n)
        at = pointer(slices, _SLICES)
        held: list[Any] = [self]
        done, space = 0, n * _ROW_BYTES
        while done < n and not of.nested:
            out = allocate(space)
            held.append(out)
            done = lib.layers_rows(*of.row, self._found, done, n, pointer(out), out.size, at)
            if done < 0:
                raise CoreError("reading rows: a block is damaged. Check the store.")
            space = max(_MORE, 4 * space)
        if of.nested or since:
            for i in range(n):
                row = self._apart(self._found[i], since, adapt)
                if row is not None:
                    memory = ffi.from_buffer(row)
                    held += [row, memory]
                    at[i] = (ffi.cast("uint8_t *", memory) if row else ffi.NULL, len(row))
        return RowSlices(of.layout, slices, n, held)

    def _apart(self, found: Any, since: int, adapt: Callable[[int, bytes], bytes]) -> bytes | None:
        """A row that the core does not know: of a former layout, or with nested values."""
        nested, state = self._layers.nested, found.state
        if state == lib.LAYERS_MEMORY and found.entry.stamp < since:
            return adapt(found.entry.stamp, _row_of(found.entry))
        if not nested or state == lib.LAYERS_ABSENT:
            return b"" if nested else None
        if state != lib.LAYERS_BLOCK:
            return _row_of(found.entry)
        return self._layers.nested_row(found)


class RowSlices:
    """Rows as byte strings, some of which are not there."""

    __slots__ = ("_held", "_layout", "_slices", "n")

    def __init__(self, layout: RowLayout, slices: pa.Buffer, n: int, held: object) -> None:
        self._layout, self._slices, self._held = layout, slices, held
        self.n = n

    def row(self, i: int) -> bytes:
        """Row i, which is there."""
        found = pointer(self._slices, _SLICES)[i]
        return bytes(_buffer(found.data, found.len))

    def slice(self, lo: int, n: int) -> RowSlices:
        """Rows [lo, lo + n)."""
        some = self._slices.slice(lo * SLICE_BYTES, n * SLICE_BYTES)
        return RowSlices(self._layout, some, n, self._held)

    def columns(self, numbers: Sequence[int]) -> list[pa.Array]:
        """Some columns of the rows, by their numbers; nulls where there is no row."""
        return self._layout.decode_slices(self._slices, self.n, numbers)


def _row_of(entry: Any) -> bytes:
    return bytes(_buffer(entry.row, entry.row_len))
