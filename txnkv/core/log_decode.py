"""Messages out of batches, as Arrow columns in memory of their own."""

from __future__ import annotations

import struct
from typing import Any

import pyarrow as pa

from txnkv.core.log_filter import Spans
from txnkv.core.log_header import CODECS, HEADER_BYTES, Attributes, check_batch, read_header
from txnkv.core.native import CoreError

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


def decode(buf: Any, spans: Spans, from_offset: int, limit: int | None = None) -> pa.RecordBatch:
    """The messages of batches at and above an offset.

    Args:
        buf: what the spans were made of.
        spans: the batches.
        from_offset: the first offset that is wanted.
        limit: how many messages at most; None for all.

    Returns:
        Columns `offset`, `timestamp`, `key` (null: none), `value` (may be null), `headers`
        (null: none; else for `decode_headers`), `txn_id` (0: none). Nothing points into `buf`.

    Raises:
        CoreError: a batch is damaged.
    """
    out: list[tuple[Any, ...]] = []
    view = memoryview(buf).cast("B")
    for at, _ in spans:
        check_batch(view, at)
        header = read_header(view, at)
        for i, row in enumerate(_rows(view, at, header)):
            if header.base_offset + i >= from_offset:
                out.append((header.base_offset + i, *row, header.txn_id))
    out = out[:limit]
    columns = list(zip(*out, strict=True)) if out else [()] * len(MESSAGES)
    arrays = [pa.array(c, f.type) for c, f in zip(columns, MESSAGES, strict=True)]
    return pa.record_batch(arrays, schema=MESSAGES)


def _rows(view: memoryview, at: int, header: Any) -> list[tuple[Any, ...]]:
    flags, n = header.attributes, header.rows
    start = at + HEADER_BYTES + (24 if flags & Attributes.CHUNK else 0)
    body = bytes(view[start : at + header.length])
    codec = CODECS[flags & 7]
    if codec:
        body = pa.decompress(body, header.raw_bytes, _name(codec), asbytes=True)
    where = 0

    def take(size: int) -> bytes:
        nonlocal where
        if where + size > len(body):
            raise CoreError(f"the batch at offset {header.base_offset} is damaged")
        piece = body[where : where + size]
        where += (size + 7) // 8 * 8
        return piece

    def numbers(kind: str, count: int, width: int) -> tuple[int, ...]:
        return struct.unpack(f"<{count}{kind}", take(count * width))

    def bits(present: bool) -> list[bool]:
        bitmap = take((n + 7) // 8) if present else b"\xff" * ((n + 7) // 8)
        return [bool(bitmap[i >> 3] >> (i & 7) & 1) for i in range(n)]

    ends = numbers("I", n + 1, 4)
    valid = bits(bool(flags & Attributes.NULL_VALUES))
    has_keys, has_headers = bool(flags & Attributes.KEYS), bool(flags & Attributes.HEADERS)
    keyed = bits(True) if has_keys else [False] * n
    key_ends = numbers("I", n + 1, 4) if has_keys else (0,) * (n + 1)
    header_ends = numbers("I", n + 1, 4) if has_headers else (0,) * (n + 1)
    times = numbers("q", n, 8) if flags & Attributes.TIMES else (header.base_timestamp,) * n
    values, keys, blobs = take(ends[n]), take(key_ends[n]), take(header_ends[n])
    if where != len(body):
        raise CoreError(f"the batch at offset {header.base_offset} is damaged")
    return [
        (
            times[i],
            keys[key_ends[i] : key_ends[i + 1]] if keyed[i] else None,
            values[ends[i] : ends[i + 1]] if valid[i] else None,
            blobs[header_ends[i] : header_ends[i + 1]] or None,
        )
        for i in range(n)
    ]


def _name(codec: str) -> str:
    return "lz4_raw" if codec == "lz4" else codec
