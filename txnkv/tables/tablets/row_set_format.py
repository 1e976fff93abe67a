"""The keys and the header of a disk row set in its tablet's LMDB environment.

A row set is immutable: rows sorted by key, cut into blocks of up to 64 Ki rows, one LMDB
value for each block of each column. Keys of the values, big-endian:

     0        8       10          14
    +--------+-------+-----------+     section 0 header, 1 keys, 2 Bloom filter,
    | row set|section| block     |             3 insert stamps, 4 deletes,
    +--------+-------+-----------+             16 + column id: a value column

The key columns stand in the key block alone, in their memcomparable form. Each block is
sealed by a CRC32C seeded with that of its LMDB key, so a block in a wrong place is found.

The header names, for each block, its rows, first and last key, and the zone map of each
value column. Little-endian:

    u32 crc | u16 version | u16 columns | u32 blocks | u64 rows
    columns x u32 column id
    blocks  x { u32 rows, key first, key last, columns x zone }
    key:  u32 length, bytes
    zone: u8 flags (1 has bounds, 2 exact), u32 null count, u8 length, min, u8 length, max

Insert stamps are there only where the rows of the row set have several: a block of u64, a
commit timestamp for each row. Deletes are all of a row set that is ever written again, and
only where a row of the block was deleted: rows of the block, ascending, and their stamps.

    u32 crc | u16 version | u16 reserved | u32 n | u32 reserved | u64 highest stamp
    n x u64 stamp | n x u32 row

A versioned row set may hold a key several times: its versions stand together, newest first,
and may go over from one block into the next.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from txnkv import core
from txnkv.core import compute as pc

VERSION: Final = 1
HEADER, KEYS, BLOOM, INSERTS, DELETES, COLUMNS = 0, 1, 2, 3, 4, 16
BLOCK_ROWS: Final = 1 << 16
BLOCK_BYTES: Final = 1 << 21

_KEY = struct.Struct(">QHI")
_START = struct.Struct("<HHIQ")
_U32 = struct.Struct("<I")
_ZONE = struct.Struct("<BI")
_DELTA = struct.Struct("<HHIIQ")
_DELTA_VERSION = 1
_HAS_BOUNDS, _EXACT = 1, 2


class HeaderError(Exception):
    """The bytes of a header, or of deletes, make no sense."""


def block_key(row_set_id: int, section: int, block: int) -> bytes:
    return _KEY.pack(row_set_id, section, block)


def row_set_range(row_set_id: int) -> tuple[bytes, bytes]:
    """The LMDB keys of one row set: from the first up to the second."""
    return _KEY.pack(row_set_id, 0, 0), _KEY.pack(row_set_id + 1, 0, 0)


@dataclass(frozen=True)
class BlockInfo:
    """One block of rows.

    Attributes:
        start: number of its first row in the row set.
        rows: how many rows it has.
        first, last: encoded keys.
        zones: by column id.
    """

    start: int
    rows: int
    first: bytes
    last: bytes
    zones: dict[int, core.Zone]


@dataclass(frozen=True)
class Header:
    rows: int
    columns: tuple[int, ...]
    blocks: tuple[BlockInfo, ...]

    def block_of(self, row: int) -> tuple[int, int, int]:
        """Find the block that has a row of the row set: its number, first row and count of rows."""
        number = bisect_right(self.blocks, row, key=lambda block: block.start) - 1
        block = self.blocks[number]
        return number, block.start, block.rows

    def pack(self, seed: int) -> bytes:
        parts = [_START.pack(VERSION, len(self.columns), len(self.blocks), self.rows)]
        parts.extend(_U32.pack(column) for column in self.columns)
        for block in self.blocks:
            parts.append(_U32.pack(block.rows))
            for key in (block.first, block.last):
                parts += (_U32.pack(len(key)), key)
            parts.extend(_pack_zone(block.zones[column]) for column in self.columns)
        body = b"".join(parts)
        return _U32.pack(core.crc32c(body, seed)) + body

    @classmethod
    def unpack(cls, data: bytes, seed: int) -> Header:
        """Read a header.

        Raises:
            HeaderError: the checksum does not match, or the version is unknown.
        """
        if len(data) < 4 + _START.size or core.crc32c(data[4:], seed) != _U32.unpack_from(data)[0]:
            raise HeaderError("its checksum does not match")
        version, width, count, rows = _START.unpack_from(data, 4)
        if version != VERSION:
            raise HeaderError(f"it has format version {version}, this program reads {VERSION}")
        reader = _Reader(data, 4 + _START.size)
        columns = tuple(reader.u32() for _ in range(width))
        blocks: list[BlockInfo] = []
        start = 0
        for _ in range(count):
            block_rows = reader.u32()
            first, last = reader.bytes(reader.u32()), reader.bytes(reader.u32())
            zones = {column: reader.zone() for column in columns}
            blocks.append(BlockInfo(start, block_rows, first, last, zones))
            start += block_rows
        return cls(rows, columns, tuple(blocks))


def _pack_zone(zone: core.Zone) -> bytes:
    if zone.min is None or zone.max is None:
        return _ZONE.pack(0, zone.null_count)
    flags = _HAS_BOUNDS | (_EXACT if zone.exact else 0)
    return b"".join(
        (
            _ZONE.pack(flags, zone.null_count),
            bytes([len(zone.min)]),
            zone.min,
            bytes([len(zone.max)]),
            zone.max,
        )
    )


class _Reader:
    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self._at = at

    def u32(self) -> int:
        (value,) = _U32.unpack_from(self._data, self._at)
        self._at += 4
        return int(value)

    def bytes(self, length: int) -> bytes:
        found = self._data[self._at : self._at + length]
        self._at += length
        return found

    def zone(self) -> core.Zone:
        flags, nulls = _ZONE.unpack_from(self._data, self._at)
        self._at += _ZONE.size
        if not flags & _HAS_BOUNDS:
            return core.Zone(None, None, nulls, False)
        bounds = []
        for _ in range(2):
            length = self._data[self._at]
            self._at += 1
            bounds.append(self.bytes(length))
        return core.Zone(bounds[0], bounds[1], nulls, bool(flags & _EXACT))


def pack_delta(delta: core.Delta, seed: int) -> bytes:
    """The deletes of one block as an LMDB value."""
    body = b"".join(
        (
            _DELTA.pack(_DELTA_VERSION, 0, delta.n, 0, pc.max(delta.stamps).as_py() or 0),
            _little_endian(delta.stamps, 8),
            _little_endian(delta.rows, 4),
        )
    )
    return _U32.pack(core.crc32c(body, seed)) + body


def _little_endian(array: pa.Array, width: int) -> memoryview:
    if len(array) == 0:
        return memoryview(b"")
    return memoryview(array.buffers()[1])[
        width * array.offset : width * (array.offset + len(array))
    ]


def unpack_delta(data: bytes | memoryview, seed: int, rows: int) -> core.Delta:
    """Read the deletes of a block of so many rows; the bytes are copied.

    Raises:
        HeaderError: the checksum does not match, or they make no sense.
    """
    copy = bytes(data)
    start = _U32.size + _DELTA.size
    if len(copy) < start or core.crc32c(memoryview(copy)[4:], seed) != _U32.unpack_from(copy)[0]:
        raise HeaderError("its checksum does not match")
    version, _, n, _, _ = _DELTA.unpack_from(copy, 4)
    if version != _DELTA_VERSION or len(copy) != start + 12 * n:
        raise HeaderError(f"it has format version {version} and {len(copy)} bytes for {n} rows")
    whole = pa.py_buffer(copy)
    stamps = pa.Array.from_buffers(pa.uint64(), n, [None, whole.slice(start, 8 * n)])
    numbers = pa.Array.from_buffers(pa.uint32(), n, [None, whole.slice(start + 8 * n, 4 * n)])
    delta = core.Delta(numbers, stamps)
    try:
        delta.check(rows)
    except core.CoreError as error:
        raise HeaderError(str(error)) from None
    return delta


def delta_summary(data: bytes | memoryview) -> tuple[int, int]:
    """Return the number of the deletes of a block, and their highest stamp; not verified."""
    _, _, n, _, highest = _DELTA.unpack_from(data, 4)
    return n, highest


def rows_per_block(widths: Sequence[float]) -> int:
    """Rows of a block, so that the widest column (bytes a row) stays near 2 MiB."""
    widest = max(widths, default=8.0)
    return max(1, min(BLOCK_ROWS, int(BLOCK_BYTES / max(widest, 1.0))))
