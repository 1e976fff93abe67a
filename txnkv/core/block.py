"""Blocks: one column of a row set in the lightest encoding for what is in it, with a checksum.

Types that have no layout of their own in a block (lists and other nested ones) go as an
opaque block that holds one Arrow IPC record batch message.

Bloom filters over keys, and zone maps of values, tell something of a block without reading it: a
filter never says no of a key that is there, and yes of one absent key in a hundred; a zone map has
the least and the greatest value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from txnkv.core import compute as pc
from txnkv.core.keys import Keys
from txnkv.core.native import CoreError, allocate, check, ffi, lib, pointer, readable
from txnkv.core.rows import NULL_ROW, Bitmap, Rows, rows_pointer
from txnkv.core.value_codecs import key_type

# -- writing -----------------------------------------------------------------------


def encode_block(
    array: pa.Array,
    seed: int,
    rows: Rows | None = None,
    lo: int = 0,
    n: int | None = None,
    *,
    plain: bool = False,
) -> pa.Buffer:
    """A column, or some rows of it, as a block.

    Args:
        array: the column; nulls and any Arrow offset are fine.
        seed: of the checksum, a uint32; `verify_block` wants the same.
        rows: the rows to take, in this order.
        lo: without `rows`, the first row.
        n: without `rows`, how many; None for all from `lo` on.
        plain: in Arrow's memory layout, whatever is in it.

    Raises:
        CoreError: more than 2 GiB of strings.
        IndexError: a row is not in the array.
        ValueError: a buffer of the array is too short, or its offsets fall.
    """
    n = _count(len(array), rows, lo, n)
    kind, width = block_layout(array.type)
    if kind == lib.BLOCK_OPAQUE:
        return _encode_opaque(array, seed, rows, lo, n)
    column, held = _column(array, kind, width)
    picked = (rows_pointer(rows), lo, n)
    size = ffi.new("uint64_t *")
    if status := lib.block_encode_size(column, picked, size):
        check(status, f"encoding a block of {n} rows of {array.type}")
    block = pa.allocate_buffer(size[0], resizable=True)
    out = (seed, pointer(block), block.size)
    if plain:
        check(lib.block_encode(column, picked, *out), "encoding a block")
    else:
        used = ffi.new("size_t *")
        check(lib.encode_column(column, picked, *out, used), "encoding a block")
        block.resize(used[0], shrink_to_fit=True)
    del held
    return block


def _count(length: int, rows: Rows | None, lo: int, n: int | None) -> int:
    if rows is not None:
        return rows.n
    n = length - lo if n is None else n
    if lo < 0 or n < 0 or lo + n > length:
        raise IndexError(f"rows [{lo}, {lo + n}) of {length}")
    return n


_LAYOUTS: dict[int, tuple[int, int]] = {
    pa.bool_().id: (lib.BLOCK_BIT, 0),
    pa.string().id: (lib.BLOCK_VARLEN, 0),
    pa.binary().id: (lib.BLOCK_VARLEN, 0),
    pa.decimal128(38).id: (lib.BLOCK_FIXED, 16),
    pa.binary(16).id: (lib.BLOCK_FIXED, 16),  # of UUIDs
}


def block_layout(type_: pa.DataType) -> tuple[int, int]:
    """The kind of a type's blocks, and the bytes of a value (0 unless fixed)."""
    if isinstance(type_, pa.BaseExtensionType):
        type_ = type_.storage_type
    layout = _LAYOUTS.get(type_.id)
    if layout is None:
        fixed = pa.types.is_primitive(type_)
        layout = (lib.BLOCK_FIXED, type_.bit_width // 8) if fixed else (lib.BLOCK_OPAQUE, 0)
        _LAYOUTS[type_.id] = layout
    return layout


def _column(array: pa.Array, kind: int, width: int) -> tuple[Any, list[pa.Buffer | None]]:
    buffers = array.buffers()
    validity, values = buffers[0], buffers[-1]
    offsets = buffers[1] if kind == lib.BLOCK_VARLEN else None
    fields: list[Any] = [kind, width]
    for buffer in (values, offsets, validity):
        fields += [pointer(buffer), 0 if buffer is None else buffer.size]
    fields += [array.offset, len(array)]
    return ffi.new("block_column_t *", fields), buffers


def _encode_opaque(array: pa.Array, seed: int, rows: Rows | None, lo: int, n: int) -> pa.Buffer:
    part = array.slice(lo, n) if rows is None else array.take(rows.to_arrow())
    message = pa.record_batch([part], names=["column"]).serialize()
    block = allocate(lib.block_size_of_opaque(message.size))
    lib.block_encode_opaque(
        pointer(message), message.size, n, part.null_count, seed, pointer(block), block.size
    )
    return block


# -- reading -----------------------------------------------------------------------


def decode_block(block: Any, type_: pa.DataType, lo: int = 0, n: int | None = None) -> pa.Array:
    """Rows [lo, lo + n) of a block, copied into memory that Arrow owns.

    Args:
        block: verified, any buffer object.
        type_: what it was encoded from.
        lo: the first row.
        n: how many; None for all from `lo` on.

    Raises:
        CoreError: the block is damaged, or not of this type.
        IndexError: the rows are not all in the block.
    """
    view = _parse(block, type_)
    n = _count(view.rows, None, lo, n)
    if view.kind == lib.BLOCK_OPAQUE:
        return _opaque_array(view, type_).slice(lo, n)
    return _read(view, type_, (ffi.NULL, lo, n), n)


_INTEGERS = {lib.KEY_I32: 4, lib.KEY_U32: 4, lib.KEY_I64: 8, lib.KEY_U64: 8}


def decode_key_block(
    block: Any, type_: pa.DataType, lo: int, n: int, gone: Rows | None = None
) -> pa.Array | None:
    """Rows [lo, lo + n) of a block of keys of one integer column, copied; None where they have to
    be taken as keys first.

    Args:
        block: verified, any buffer object.
        type_: of the column.
        lo: the first row.
        n: how many, with those that are left out.
        gone: rows of the block to leave out, strictly ascending, all in [lo, lo + n).

    Raises:
        CoreError: the block is damaged.
        IndexError: the rows are not all in the block, or `gone` is not as it should be.
    """
    memory = readable(block)
    view = ffi.new("block_t *")
    if status := lib.block_parse(memory, len(memory), view):
        check(status, f"reading keys of {type_}")
    kind = key_type(type_)
    if view.encoding != lib.BLOCK_PACKED or _INTEGERS.get(kind) != view.width:
        return None
    n = _count(view.rows, None, lo, n)
    values = allocate(n * view.width)
    signed = kind in (lib.KEY_I32, lib.KEY_I64)
    but = (rows_pointer(gone), 0 if gone is None else gone.n)
    check(
        lib.unpack_integers(view, signed, lo, n, *but, pointer(values)), f"reading keys of {type_}"
    )
    left = n - but[1]
    return pa.Array.from_buffers(type_, left, [None, values.slice(0, left * view.width)], 0)


def decode_block_without(
    block: Any, type_: pa.DataType, gone: Rows, lo: int = 0, n: int | None = None
) -> pa.Array:
    """Rows [lo, lo + n) of a block but for some, copied in the runs between these.

    Args:
        block: verified, any buffer object.
        type_: what it was encoded from.
        gone: rows of the block to leave out, strictly ascending, all in [lo, lo + n).
        lo: the first row.
        n: how many, with those that are left out; None for all from `lo` on.

    Raises:
        CoreError: the block is damaged, or not of this type.
        IndexError: the rows are not all in the block, or `gone` is not as it should be.
    """
    view = _parse(block, type_)
    n = _count(view.rows, None, lo, n)
    left = n - gone.n
    asked = (lo, n, rows_pointer(gone), gone.n)
    if view.kind == lib.BLOCK_OPAQUE:
        kept = Bitmap.of(view.rows, gone.to_arrow()).zeros().slice(lo, left)
        return _opaque_array(view, type_).take(kept.to_arrow())
    size = ffi.new("uint64_t *")
    if status := lib.block_decode_but_size(view, *asked, size):
        check(status, f"reading {left} of {n} rows of {type_} from a block")
    values, validity = allocate(size[0]), allocate((left + 7) // 8)
    offsets = allocate(4 * (left + 1)) if view.kind == lib.BLOCK_VARLEN else None
    nulls = ffi.new("uint32_t *")
    out = (pointer(validity), pointer(offsets, "uint32_t *"), pointer(values), values.size, nulls)
    check(lib.block_decode_but(view, *asked, *out), "reading a block")
    return _array(type_, left, validity, offsets, values, nulls[0])


def gather_block(block: Any, type_: pa.DataType, rows: Rows) -> pa.Array:
    """The rows of a list, in its order, copied; `NULL_ROW` (2^32 - 1) gives a null.

    Raises:
        CoreError: the block is damaged, or not of this type.
        IndexError: a row is not in the block.
    """
    view = _parse(block, type_)
    if view.kind == lib.BLOCK_OPAQUE:
        numbers = rows.to_arrow()
        absent = pc.equal(numbers, pa.scalar(NULL_ROW, pa.uint32()))
        return _opaque_array(view, type_).take(pc.if_else(absent, None, numbers))
    return _read(view, type_, (rows_pointer(rows), 0, rows.n), rows.n)


def gather_keys(keys_block: Any, rows: Rows) -> Keys:
    """The keys at the rows of a list, in its order, copied.

    Args:
        keys_block: verified, any buffer object.
        rows: of the block.

    Raises:
        CoreError: the block is damaged.
        IndexError: a row is not in the block.
    """
    memory = readable(keys_block)
    view = ffi.new("block_t *")
    check(lib.block_parse(memory, len(memory), view), "reading keys")
    _, offsets, keys, _ = _decoded(view, (rows_pointer(rows), 0, rows.n), rows.n, "keys")
    return Keys.adopt(keys, offsets, view.width, rows.n)


def verify_block(block: Any, seed: int) -> bool:
    """Return True when a block is the bytes that were written: header sane, checksum right."""
    memory = readable(block)
    return bool(lib.block_verify(memory, len(memory), seed) == lib.STATUS_OK)


def lower_bound_in(keys_block: Any, key: bytes) -> int:
    """Return how many keys of a verified block of ascending ones are below `key`.

    Raises:
        CoreError: it is no block of keys.
    """
    memory = readable(keys_block)
    view, row = ffi.new("block_t *"), ffi.new("uint32_t *")
    check(lib.block_parse(memory, len(memory), view), "finding a key in a block")
    check(lib.access_lower_bound(view, key, len(key), row), "finding a key in a block")
    return int(row[0])


def match_block(
    keys_block: Any, some: Keys, *, versioned: bool = False
) -> tuple[pa.UInt32Array, pa.UInt32Array]:
    """Rows of a verified block of ascending keys that have one of `some`.

    Args:
        keys_block: any buffer object.
        some: ascending. Few are searched in the block as it lies.
        versioned: equal keys may stand together in the block.

    Returns:
        The rows, ascending, and the position in `some` of the key of each.

    Raises:
        CoreError: it is no block of keys, or damaged.
    """
    memory = readable(keys_block)
    view, count = ffi.new("block_t *"), ffi.new("uint32_t *")
    check(lib.block_parse(memory, len(memory), view), "matching keys with a block")
    room = view.rows if versioned else min(view.rows, some.n)
    rows, positions = allocate(4 * room), allocate(4 * room)
    out = (pointer(rows, "uint32_t *"), pointer(positions, "uint32_t *"), count)
    found = lib.match_block(view, some.c, versioned, room, *out)
    check(found, f"matching {some.n} keys with a block")
    return Rows(rows, count[0]).to_arrow(), Rows(positions, count[0]).to_arrow()


def block_rows(block: Any) -> int:
    """The number of rows in a block.

    Raises:
        CoreError: the header is damaged.
    """
    memory = readable(block)
    view = ffi.new("block_t *")
    check(lib.block_parse(memory, len(memory), view), "reading the header of a block")
    return int(view.rows)


def _parse(block: Any, type_: pa.DataType) -> Any:
    memory = readable(block)
    view = ffi.new("block_t *")
    if status := lib.block_parse(memory, len(memory), view):
        check(status, f"reading a block of {type_}")
    if (view.kind, view.width) != block_layout(type_):
        raise CoreError(
            f"reading a block of {type_}: found kind {view.kind}, width {view.width}. "
            "Check that column and type belong together."
        )
    return view


def _read(view: Any, type_: pa.DataType, picked: Any, n: int) -> pa.Array:
    return _array(type_, n, *_decoded(view, picked, n, type_))


def _decoded(
    view: Any, picked: Any, n: int, what: object
) -> tuple[pa.Buffer, pa.Buffer | None, pa.Buffer, int]:
    """Validity, offsets, values, and the number of nulls."""
    size = ffi.new("uint64_t *")
    if status := lib.block_decode_size(view, picked, size):
        check(status, f"reading {n} rows of {what} from a block")
    values, validity = allocate(size[0]), allocate((n + 7) // 8)
    offsets = allocate(4 * (n + 1)) if view.kind == lib.BLOCK_VARLEN else None
    nulls = ffi.new("uint32_t *")
    ends = pointer(offsets, "uint32_t *")
    out = (pointer(validity), ends, pointer(values), values.size, nulls)
    check(lib.block_decode(view, picked, *out), "reading a block")
    return validity, offsets, values, nulls[0]


def _array(
    type_: pa.DataType,
    n: int,
    validity: pa.Buffer,
    offsets: pa.Buffer | None,
    values: pa.Buffer,
    nulls: int,
) -> pa.Array:
    buffers = [validity if nulls else None, values]
    if offsets is not None:
        buffers.insert(1, offsets)
    return pa.Array.from_buffers(type_, n, buffers, nulls)


def _opaque_array(view: Any, type_: pa.DataType) -> pa.Array:
    # A copy: arrays read from a message point into it, and it may lie in LMDB.
    message = pa.py_buffer(bytes(ffi.buffer(view.data, view.data_len)))
    try:
        batch = pa.ipc.read_record_batch(message, pa.schema([pa.field("column", type_)]))
        batch.validate(full=True)
    except (pa.ArrowInvalid, OSError) as error:
        raise CoreError(
            f"reading a block of {type_}: {error}. Check the store that it came from."
        ) from error
    if batch.num_rows != view.rows:
        raise CoreError(
            f"reading a block of {type_}: the header says {view.rows} rows, "
            f"the data {batch.num_rows}. Check the store that it came from."
        )
    return batch.column(0)


# -- what is told without reading ---------------------------------------------------


def bloom_build(keys: Keys, seed: int) -> pa.Buffer:
    """A filter of the keys at 10 bits each, as an opaque block.

    Args:
        keys: in any order.
        seed: of the block's checksum, a uint32.
    """
    bits = allocate(lib.bloom_size(keys.n))
    lib.bloom_build(keys.c, pointer(bits), bits.size)
    block = allocate(lib.block_size_of_opaque(bits.size))
    lib.block_encode_opaque(pointer(bits), bits.size, keys.n, 0, seed, pointer(block), block.size)
    return block


def bloom_probe(block: Any, probes: Keys) -> Bitmap:
    """Return a bit for each probe. 0: it is in no set that the filter was built of. 1: it may be.

    Raises:
        CoreError: the block is no filter.
    """
    view = _filter(block)
    bits = allocate((probes.n + 7) // 8)
    count = ffi.new("uint32_t *")
    lib.bloom_probe_batch(view.data, view.data_len, probes.c, pointer(bits), count)
    return Bitmap(probes.n, bits, count[0])


def _filter(block: Any) -> Any:
    memory = readable(block)
    view = ffi.new("block_t *")
    check(lib.block_parse(memory, len(memory), view), "reading a Bloom filter")
    if view.kind != lib.BLOCK_OPAQUE or view.data_len == 0 or view.data_len % 32:
        raise CoreError("reading a Bloom filter: this block is none. Check where it came from.")
    return view


@dataclass(frozen=True, slots=True)
class Zone:
    """The range of a block's values, encoded as the last column of a key, cut to 16 bytes.

    Attributes:
        min: at or below every value; None when there is none, or no order is known.
        max: the greatest value; when not `exact`, every value that begins with it is possible.
        null_count: how many rows are null.
        exact: whether nothing was cut. False with no min: the type has no order, and nothing
            is known.
    """

    min: bytes | None
    max: bytes | None
    null_count: int
    exact: bool

    def overlaps(self, low: bytes | None, high: bytes | None) -> bool:
        """Return True when a value v with low <= v <= high may be in the block.

        Args:
            low: an encoded value, not cut; None for no bound.
            high: the same.
        """
        if self.min is None or self.max is None:
            return not self.exact
        if high is not None and self.min > high:
            return False
        if low is None or low <= self.max:
            return True
        return not self.exact and low.startswith(self.max)


def zone(block: Any, type_: pa.DataType) -> Zone:
    """The zone map of a verified block.

    Args:
        block: what `encode_block` made, any buffer object.
        type_: of its values.

    Raises:
        CoreError: the block is damaged, or not of this type.
    """
    memory = readable(block)
    view = ffi.new("block_t *")
    check(lib.block_parse(memory, len(memory), view), f"mapping a block of {type_}")
    kind = key_type(type_)
    if kind is None:
        return Zone(None, None, view.null_count, exact=view.rows == view.null_count)
    out = ffi.new("zone_t *")
    if status := lib.zone_compute(view, kind, out):
        check(status, f"mapping a block of {type_}")
    if not out.has_values:
        return Zone(None, None, out.null_count, exact=True)
    return Zone(
        bytes(ffi.buffer(out.min, out.min_len)),
        bytes(ffi.buffer(out.max, out.max_len)),
        out.null_count,
        bool(out.exact),
    )
