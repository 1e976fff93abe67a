"""Batches from Arrow columns, and control batches."""

from __future__ import annotations

import struct
from itertools import chain
from typing import Any

import pyarrow as pa

from txnkv.core.log_header import (
    CHUNK_BYTES,
    CODECS,
    HEADER_BYTES,
    Chunk,
    ControlType,
    writable_bytes,
)
from txnkv.core.native import allocate, check, ffi, lib, pointer

ARROW_CODECS = {"lz4": "lz4_raw", "zstd": "zstd"}

_STAMP = pa.timestamp("us", "UTC")
_STRINGS = {pa.binary().id, pa.string().id}
_COLUMNS = {"value": 0, "key": 1, "headers": 2, "timestamp": 3}
_NONE = (0, 0, 0, 0, 0, 0, 0)
_CONTROL = struct.Struct("<HHIQQ")
_CHUNK = struct.Struct("<QIIQ")
# messages_t, packed here: filling it field by field took most of the time of a small batch.
_FIELDS = struct.Struct("@28Qq2I")
assert _FIELDS.size == ffi.sizeof("messages_t")
_MESSAGES = ffi.typeof("messages_t *")
_PLAN = ffi.typeof("messages_plan_t *")
_HEADER = ffi.typeof("batch_header_t *")
_NO_HEADER = bytes(HEADER_BYTES)
_ENDS = struct.Struct("<II")
_BITS = (bytes(8), b"\x01" + bytes(7))
"""A bitmap of one message, null or not."""


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
        codec: None, "lz4" or "zstd"; a batch that it would not make smaller goes without.
        chunk: which piece of a large message this is.

    Raises:
        CoreError: more data than a batch can hold (2 GiB).
        OverflowError: a number is out of its range.
        ValueError: there are no messages, a column is none of the above, or an array is broken.
    """
    if codec not in CODECS:
        raise ValueError(f"codec {codec!r}; there are None, 'lz4' and 'zstd'")
    if decided and not txn_id:
        raise ValueError("a decided batch without a transaction; give its txn_id")
    held, source = _source(messages, timestamp)
    plan = ffi.new(_PLAN)
    check(lib.messages_plan(source, plan), f"encoding {messages.num_rows} messages")
    flags = plan.attributes | (8 if txn_id else 0) | (32 if decided else 0)
    head = HEADER_BYTES if chunk is None else HEADER_BYTES + CHUNK_BYTES
    body = None if codec is None else _compressed(source, plan, ARROW_CODECS[codec])
    if body is None:
        out = bytes(head + plan.raw_bytes)
        memory = writable_bytes(out)
        lib.messages_encode(source, plan, memory + head, plan.raw_bytes)
    else:
        flags |= CODECS.index(codec)
        out = bytes(head + body.size)
        memory = writable_bytes(out)
        ffi.memmove(memory + head, pointer(body), body.size)
    if chunk is not None:
        flags |= 1024
        ffi.memmove(memory + HEADER_BYTES, _CHUNK.pack(*chunk), CHUNK_BYTES)
    del held
    n, times = plan.rows, (plan.base_timestamp, plan.max_timestamp)
    ids = (producer_id, base_sequence, epoch, 0)
    fields = [0, 0, 0, 0, 0, flags, n, txn_id, *times, *ids, n, plan.raw_bytes]
    lib.batch_seal(ffi.new(_HEADER, fields), memory, len(out))
    return out


def encode_message(
    value: bytes | None,
    key: bytes | None,
    *,
    timestamp: int,
    txn_id: int = 0,
    decided: bool = False,
) -> bytes:
    """Encode one message without headers: the bytes of `encode_batch`, at a third of the cost.

    Args:
        value: None: no value.
        key: None: no key.
        timestamp: of the message, microseconds since 1970.
        txn_id: the local id of the transaction that writes; 0 for none.
        decided: the transaction commits with this batch, no marker will come.
    """
    size = 0 if value is None else len(value)
    flags = (8 if txn_id else 0) | (32 if decided else 0)
    parts = [_NO_HEADER, _ENDS.pack(0, size)]
    if value is None:
        flags |= 512
        parts.append(_BITS[0])
    if key is not None:
        flags |= 64
        parts += (_BITS[1], _ENDS.pack(0, len(key)))
    if value:
        parts += (value, _BITS[0][: -size & 7])
    if key:
        parts += (key, _BITS[0][: -len(key) & 7])
    out = b"".join(parts)
    raw = len(out) - HEADER_BYTES
    fields = (0, 0, 0, 0, 0, flags, 1, txn_id, timestamp, timestamp, 0, -1, 0, 0, 1, raw)
    lib.batch_seal(ffi.new(_HEADER, fields), writable_bytes(out), len(out))
    return out


def _source(messages: pa.RecordBatch, timestamp: int) -> tuple[list[Any], Any]:
    """The columns as the core takes them, and what must live as long."""
    if not messages.num_rows:
        raise ValueError("a batch of no messages; give it one at least")
    columns: list[tuple[int, ...]] = [(), _NONE, _NONE, _NONE]
    held: list[Any] = []
    for i, name in enumerate(messages.schema.names):
        at = _COLUMNS.get(name)
        if at is None:
            raise ValueError(f"column {name!r} of messages; there are {', '.join(_COLUMNS)}")
        columns[at] = _column(messages.column(i), at == 3, held)
    if not columns[0]:
        raise ValueError(f"messages of {messages.schema.names}; a column 'value' is missing")
    packed = _FIELDS.pack(*chain.from_iterable(columns), timestamp, messages.num_rows, 0)
    held.append(packed)
    return held, ffi.cast(_MESSAGES, ffi.from_buffer(packed))


def _column(column: pa.Array, is_time: bool, held: list[Any]) -> tuple[int, ...]:
    type_ = column.type
    if is_time and (type_.id != _STAMP.id or type_.unit != "us"):
        column = column.cast(_STAMP)
    elif not is_time and type_.id not in _STRINGS:
        column = column.cast(pa.binary())
    buffers = column.buffers()
    held.append(buffers)
    ends = (0, 0) if is_time else _place(buffers[1])
    return (*_place(buffers[-1]), *ends, *_place(buffers[0]), column.offset)


def _place(buffer: pa.Buffer | None) -> tuple[int, int]:
    return (0, 0) if buffer is None else (buffer.address, buffer.size)


def _compressed(source: Any, plan: Any, codec: str) -> pa.Buffer | None:
    raw = allocate(plan.raw_bytes)
    lib.messages_encode(source, plan, pointer(raw), raw.size)
    body = pa.compress(raw, codec)
    return body if body.size < raw.size else None


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

    Raises:
        OverflowError: a number is out of its range.
        ValueError: `count` is not in [1, 2^31), or the body is longer than 1 GiB.
    """
    if not 1 <= count <= lib.BATCH_COUNT_MAX:
        raise ValueError(f"a control batch of {count} offsets; 1 to 2^31 - 1 are possible")
    if len(body) > 1 << 30:
        raise ValueError(f"the body of a control batch has {len(body)} bytes; 1 GiB is the most")
    content = _CONTROL.pack(0, ControlType(type), 0, low_water_mark, first_offset)
    out = b"".join((bytes(HEADER_BYTES), content, body))
    flags = lib.BATCH_CONTROL | (8 if txn_id else 0)
    raw = len(out) - HEADER_BYTES
    fields = [0, 0, 0, 0, 0, flags, count, txn_id, timestamp, timestamp, 0, -1, 0, 0, 0, raw]
    lib.batch_seal(ffi.new(_HEADER, fields), writable_bytes(out), len(out))
    return out
