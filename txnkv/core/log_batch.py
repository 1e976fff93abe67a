"""Record batches, the unit of a topic's log: made here, and all that reads them at one door."""

from __future__ import annotations

import struct
from typing import Any

import pyarrow as pa

from txnkv.core.checksum import crc32c
from txnkv.core.log_decode import MESSAGES, decode
from txnkv.core.log_filter import CommittedFilter, Spans, all_data
from txnkv.core.log_header import (
    CODECS,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    Attributes,
    BatchHeader,
    Chunk,
    Control,
    ControlType,
    check_batch,
    place,
    read_chunk,
    read_control,
    read_header,
    walk,
)
from txnkv.core.log_headers import decode_headers, encode_headers

__all__ = [
    "CODECS",
    "HEADER_BYTES",
    "MESSAGES",
    "Attributes",
    "BatchHeader",
    "Chunk",
    "CommittedFilter",
    "Control",
    "ControlType",
    "Spans",
    "all_data",
    "check_batch",
    "decode",
    "decode_headers",
    "encode_batch",
    "encode_control",
    "encode_headers",
    "place",
    "read_chunk",
    "read_control",
    "read_header",
    "walk",
]


def encode_batch(
    messages: pa.RecordBatch,
    *,
    timestamp: int,
    txn_id: int = 0,
    decided: bool = False,
    producer_id: int = 0,
    epoch: int = 0,
    base_sequence: int = -1,
    codec: str | None = None,
    chunk: Chunk | None = None,
) -> bytes:
    """Messages as one batch, without its offset, which `place` sets.

    Args:
        messages: columns `value` (binary, may be null) and, where they are, `key` (binary,
            null: none), `headers` (binary by `encode_headers`, null: none), `timestamp`
            (timestamp[us, UTC], null: as `timestamp`). At least one row.
        timestamp: of messages without one, microseconds since 1970.
        txn_id: the local id of the transaction that writes; 0 for none.
        decided: the transaction commits with this batch, no marker will come.
        producer_id: of an idempotent producer.
        epoch: its epoch.
        base_sequence: its sequence number of the first message; -1 for none.
        codec: None, "lz4" or "zstd".
        chunk: which piece of a large message this is.

    Raises:
        CoreError: more data than a batch can hold (2 GiB).
        ValueError: there are no messages, or an argument is out of its range.
    """
    n = messages.num_rows
    if not n:
        raise ValueError("a batch of no messages")
    data = messages.to_pydict()
    values = data["value"]
    keys = data.get("key", [None] * n)
    blobs = [b or b"" for b in data.get("headers", [None] * n)]
    times = [timestamp] * n
    if "timestamp" in data:
        stamps = messages.column("timestamp").cast(pa.int64()).to_pylist()
        times = [timestamp if t is None else t for t in stamps]
    flags = CODECS.index(codec) | (8 if txn_id else 0) | (32 if decided else 0)
    parts = [_ends([v or b"" for v in values])]
    if None in values:
        flags |= Attributes.NULL_VALUES
        parts.append(_bitmap([v is not None for v in values]))
    if any(k is not None for k in keys):
        flags |= Attributes.KEYS
        parts += [_bitmap([k is not None for k in keys]), _ends([k or b"" for k in keys])]
    if any(blobs):
        flags |= Attributes.HEADERS
        parts.append(_ends(blobs))
    if min(times) != max(times):
        flags |= Attributes.TIMES
        parts.append(struct.pack(f"<{n}q", *times))
    parts += [b"".join(v or b"" for v in values), b"".join(k or b"" for k in keys)]
    parts.append(b"".join(blobs))
    body = b"".join(p + bytes(-len(p) % 8) for p in parts)
    raw = len(body)
    if codec:
        body = pa.compress(body, "lz4_raw" if codec == "lz4" else codec, asbytes=True)
    if chunk is not None:
        flags |= Attributes.CHUNK
        body = struct.pack("<QIIQ", *chunk) + body
    return _seal(
        body, flags, n, txn_id, min(times), max(times), producer_id, base_sequence, epoch, n, raw
    )


def encode_control(
    type: ControlType,
    *,
    txn_id: int = 0,
    count: int = 1,
    timestamp: int,
    low_water_mark: int = 0,
    first_offset: int = 0,
    body: bytes = b"",
) -> bytes:
    """A control batch, without its offset, which `place` sets.

    Args:
        type: what it says.
        txn_id: the local id of the transaction that it ends; 0 for none.
        count: how many offsets it takes.
        timestamp: microseconds since 1970.
        low_water_mark: the least transaction id that may still be open.
        first_offset: of the transaction in this log.
        body: what follows; the list of a SIDE_LIST.
    """
    content = struct.pack("<HHIQQ", 0, type, 0, low_water_mark, first_offset) + body
    flags = Attributes.CONTROL | (8 if txn_id else 0)
    return _seal(content, flags, count, txn_id, timestamp, timestamp, 0, -1, 0, 0, len(content))


def _seal(body: bytes, flags: int, count: int, txn_id: int, *rest: Any) -> bytes:
    length = HEADER_BYTES + len(body)
    least, most, producer, sequence, epoch, rows, raw = rest
    fields = (MAGIC, flags, count, txn_id, least, most, producer, sequence, epoch, 0, rows, raw)
    batch = bytearray(HEADER.pack(0, 0, 0, length, *fields) + body)
    struct.pack_into("<I", batch, 16, crc32c(memoryview(batch)[20:]))
    return bytes(batch)


def _ends(items: list[bytes]) -> bytes:
    ends, at = [0], 0
    for item in items:
        at += len(item)
        ends.append(at)
    return struct.pack(f"<{len(ends)}I", *ends)


def _bitmap(valid: list[bool]) -> bytes:
    bits = bytearray((len(valid) + 7) // 8)
    for i, bit in enumerate(valid):
        bits[i >> 3] |= bit << (i & 7)
    return bytes(bits)
