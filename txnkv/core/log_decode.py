"""Messages out of batches, as Arrow columns in memory of their own."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from txnkv.core.log_encode import ARROW_CODECS
from txnkv.core.log_filter import Spans
from txnkv.core.log_header import CHUNK_BYTES, HEADER_BYTES, read_header
from txnkv.core.native import CoreError, allocate, check, ffi, lib, pointer, readable

MESSAGES = pa.schema(
    [
        ("offset", pa.uint64()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", pa.binary()),
        ("txn_id", pa.uint64()),
    ]
)

_TYPES = {field.name: field.type for field in MESSAGES}
_UNLIMITED = (1 << 64) - 1


def decode(buf: Any, spans: Spans, from_offset: int, limit: int | None = None) -> pa.RecordBatch:
    """The messages of batches at and above an offset.

    Args:
        buf: what the spans were made of.
        spans: the batches.
        from_offset: the first offset that is wanted.
        limit: how many messages at most; None for all. Batches behind are not looked at.

    Returns:
        Columns `offset`, `timestamp`, `key` (null: none), `value` (may be null), `headers`
        (null: none; else for `decode_headers`), `txn_id` (0: none). Nothing points into `buf`.

    Raises:
        CoreError: a batch is damaged, or there are more than 2 GiB of messages.
    """
    memory = readable(buf)
    most = _UNLIMITED if limit is None else limit
    where = ffi.new("uint32_t[2]")
    asked = (memory, len(memory), spans.c, len(spans), from_offset, most)
    check(lib.messages_select(*asked, where, where + 1), "looking for messages")
    c, n = spans.c + where[0], where[1]
    held, bodies = _bodies(memory, c, n)
    source = ffi.new("messages_source_t *", [memory, len(memory), c, n, bodies, from_offset, most])
    sizes = ffi.new("messages_sizes_t *")
    if status := lib.messages_decode_size(source, sizes):
        check(status, f"decoding messages from offset {from_offset} on")
    batch = _decode(source, sizes)
    del held
    return batch


def _bodies(memory: Any, spans: Any, n: int) -> tuple[list[Any], Any]:
    """The checksums are right; what was compressed, without that, and what holds it."""
    packed, packed_n = ffi.new("uint32_t[]", n), ffi.new("uint32_t *")
    check(lib.messages_check(memory, spans, n, packed, packed_n), "checking a batch")
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
    out = ffi.new("messages_out_t *")
    bits = (n + 7) // 8
    offset, timestamp, txn_id = (allocate(8 * n) for _ in range(3))
    out.offset = pointer(offset, "uint64_t *")
    out.timestamp = pointer(timestamp, "int64_t *")
    out.txn_id = pointer(txn_id, "uint64_t *")
    values, value_ends = allocate(sizes.value_bytes), allocate(4 * (n + 1))
    out.values, out.value_ends = pointer(values), pointer(value_ends, "uint32_t *")
    value_bits = allocate(bits) if flags & lib.BATCH_NULL_VALUES else None
    out.value_validity = pointer(value_bits)
    keys: list[Any] = []
    if flags & lib.BATCH_KEYS:
        keys = [allocate(bits), allocate(4 * (n + 1)), allocate(sizes.key_bytes)]
        out.key_validity, out.keys = pointer(keys[0]), pointer(keys[2])
        out.key_ends = pointer(keys[1], "uint32_t *")
    headers: list[Any] = []
    if flags & lib.BATCH_HEADERS:
        headers = [allocate(bits), allocate(4 * (n + 1)), allocate(sizes.header_bytes)]
        out.header_validity, out.headers = pointer(headers[0]), pointer(headers[2])
        out.header_ends = pointer(headers[1], "uint32_t *")
    lib.messages_decode(source, sizes, out)
    columns = {
        "offset": _array("offset", n, [None, offset], 0),
        "timestamp": _array("timestamp", n, [None, timestamp], 0),
        "key": _array("key", n, keys, out.null_keys),
        "value": _array("value", n, [value_bits, value_ends, values], out.null_values),
        "headers": _array("headers", n, headers, out.null_headers),
        "txn_id": _array("txn_id", n, [None, txn_id], 0),
    }
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=MESSAGES)


def _array(name: str, n: int, buffers: list[pa.Buffer | None], nulls: int) -> pa.Array:
    if not buffers:
        return pa.nulls(n, pa.binary())
    if not nulls:
        buffers[0] = None
    return pa.Array.from_buffers(_TYPES[name], n, buffers, nulls)
