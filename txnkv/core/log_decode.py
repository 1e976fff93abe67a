"""Messages out of batches, as Arrow columns in memory of their own."""

from __future__ import annotations

import struct
from typing import Any

import pyarrow as pa

from txnkv.core.log_encode import ARROW_CODECS
from txnkv.core.log_filter import Spans
from txnkv.core.log_header import CHUNK_BYTES, HEADER_BYTES, read_header
from txnkv.core.native import CoreError, allocate, check, ffi, lib, pointer, readable

_OFFSET = pa.uint64()
_TIMESTAMP = pa.timestamp("us", "UTC")
_BINARY = pa.binary()

MESSAGES = pa.schema(
    [
        ("offset", _OFFSET),
        ("timestamp", _TIMESTAMP),
        ("key", _BINARY),
        ("value", _BINARY),
        ("headers", _BINARY),
        ("txn_id", _OFFSET),
    ]
)

_UNLIMITED = (1 << 64) - 1
_ABSENT: list[pa.Buffer | None] = [None, None, None]
_SOURCE = ffi.typeof("messages_source_t *")
_SIZES = ffi.typeof("messages_sizes_t *")
_WHERE = ffi.typeof("uint32_t[2]")
_MESSAGES_OUT = ffi.typeof("messages_out_t *")
# messages_out_t, packed here: its fields one by one cost more than decoding a few messages.
_OUT = struct.Struct("@12Q3Q")
_NULLS = struct.Struct("@3Q")
assert _OUT.size == ffi.sizeof("messages_out_t")


def decode(
    buf: Any, spans: Spans, from_offset: int, limit: int | None = None, *, checked: bool = False
) -> pa.RecordBatch:
    """The messages of batches at and above an offset.

    Args:
        buf: what the spans were made of.
        spans: the batches.
        from_offset: the first offset that is wanted.
        limit: how many messages at most; None for all. Batches behind are not looked at.
        checked: the batches are what `intact` gave: their checksums are not looked at again.

    Returns:
        Columns `offset`, `timestamp`, `key` (null: none), `value` (may be null), `headers`
        (null: none; else for `decode_headers`), `txn_id` (0: none). Nothing points into `buf`.

    Raises:
        CoreError: a batch is damaged, or there are more than 2 GiB of messages.
    """
    memory = readable(buf)
    most = _UNLIMITED if limit is None else limit
    where = ffi.new(_WHERE)
    asked = (memory, len(memory), spans.c, len(spans), from_offset, most)
    check(lib.messages_select(*asked, where, where + 1), "looking for messages")
    c, n = spans.c + where[0], where[1]
    held, bodies = _bodies(memory, c, n, checked)
    source = ffi.new(_SOURCE, [memory, len(memory), c, n, bodies, from_offset, most])
    sizes = ffi.new(_SIZES)
    if status := lib.messages_decode_size(source, sizes):
        check(status, f"decoding messages from offset {from_offset} on")
    batch = _decode(source, sizes)
    del held
    return batch


def _bodies(memory: Any, spans: Any, n: int, checked: bool) -> tuple[list[Any], Any]:
    """The checksums are right; what was compressed, without that, and what holds it."""
    packed, packed_n = ffi.new("uint32_t[]", n), ffi.new("uint32_t *")
    check(lib.messages_check(memory, spans, n, checked, packed, packed_n), "checking a batch")
    if not packed_n[0]:
        return [], ffi.NULL
    bodies = ffi.new("uint8_t *[]", n)
    held: list[Any] = [bodies]
    for i in packed[0 : packed_n[0]]:
        body = _decompressed(ffi.buffer(memory), spans[i].position)
        bodies[i] = pointer(body)
        held.append(body)
    return held, ffi.cast("uint8_t **", bodies)


def _decompressed(buf: Any, at: int) -> pa.Buffer:
    header = read_header(buf, at)
    start = at + HEADER_BYTES + (CHUNK_BYTES if header.is_chunk else 0)
    body = memoryview(buf)[start : at + header.length]
    try:
        codec = ARROW_CODECS[header.codec or ""]
        return pa.decompress(pa.py_buffer(body), header.raw_bytes, codec)
    except (OSError, pa.ArrowInvalid) as error:
        raise CoreError(
            f"the batch at offset {header.base_offset} does not decompress: {error}. "
            "Check the store that it came from."
        ) from error


def _decode(source: Any, sizes: Any) -> pa.RecordBatch:
    n, flags = sizes.rows, sizes.attributes
    offset, timestamp, txn_id = allocate(8 * n), allocate(8 * n), allocate(8 * n)
    bits = allocate((n + 7) // 8) if flags & lib.BATCH_NULL_VALUES else None
    value = [bits, allocate(4 * (n + 1)), allocate(sizes.value_bytes)]
    key = _strings(n, sizes.key_bytes) if flags & lib.BATCH_KEYS else _ABSENT
    headers = _strings(n, sizes.header_bytes) if flags & lib.BATCH_HEADERS else _ABSENT
    buffers = (offset, timestamp, txn_id, *value, *key, *headers)
    packed = bytearray(_OUT.size)
    _OUT.pack_into(packed, 0, *[0 if b is None else b.address for b in buffers], 0, 0, 0)
    lib.messages_decode(source, sizes, ffi.cast(_MESSAGES_OUT, ffi.from_buffer(packed)))
    null_values, null_keys, null_headers = _NULLS.unpack_from(packed, _OUT.size - _NULLS.size)
    columns = [
        pa.Array.from_buffers(_OFFSET, n, [None, offset], 0),
        pa.Array.from_buffers(_TIMESTAMP, n, [None, timestamp], 0),
        _binary(n, key, null_keys),
        _binary(n, value, null_values),
        _binary(n, headers, null_headers),
        pa.Array.from_buffers(_OFFSET, n, [None, txn_id], 0),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=MESSAGES)


def _strings(n: int, size: int) -> list[pa.Buffer | None]:
    return [allocate((n + 7) // 8), allocate(4 * (n + 1)), allocate(size)]


def _binary(n: int, buffers: list[pa.Buffer | None], nulls: int) -> pa.Array:
    if buffers is _ABSENT:
        return pa.nulls(n, _BINARY)
    if not nulls:
        buffers[0] = None
    return pa.Array.from_buffers(_BINARY, n, buffers, nulls)
