"""Messages in record batches: from Arrow columns into batches and back; and control batches.

The headers of messages stand in a batch as u16 n, then n names and values. What is read is copied
into memory of its own. Of the messages of a topic that keeps the last one of each key, `LastKeys`
says which these are.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import chain
from typing import Any

import pyarrow as pa

from txnkv.core import compute as pc
from txnkv.core.log_batch import (
    CHUNK_BYTES,
    CHUNK_HEAD,
    CODECS,
    CONTROL_BODY,
    HEADER_BYTES,
    Chunk,
    ControlType,
    Spans,
    read_header,
    writable_bytes,
)
from txnkv.core.native import CoreError, allocate, check, ffi, lib, pointer, readable

# -- headers of messages -----------------------------------------------------------------

_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
_PAIR = [pa.field("key", pa.string(), False), pa.field("value", pa.binary(), False)]
_ITEM = pa.field("element", pa.struct(_PAIR), False)


def encode_headers(headers: Sequence[tuple[str, bytes]]) -> bytes:
    """The headers of a message as bytes; none of them are none.

    Raises:
        TypeError: a name is no string, or a value no bytes.
        ValueError: there are more than 65535, or a name is longer than that in UTF-8.
    """
    if not headers:
        return b""
    if len(headers) > 0xFFFF:
        raise ValueError(f"{len(headers)} headers on a message; 65535 are the most")
    parts = [_U16.pack(len(headers))]
    for name, value in headers:
        if not isinstance(name, str) or not isinstance(value, bytes | bytearray | memoryview):
            raise TypeError(f"header {name!r}: a str and bytes, not {type(value).__name__}")
        utf8 = name.encode()
        if len(utf8) > 0xFFFF:
            raise ValueError(f"a header's name of {len(utf8)} bytes; 65535 are the most")
        parts += [_U16.pack(len(utf8)), utf8, _U32.pack(len(value)), value]
    return b"".join(parts)


def join_headers(lists: pa.Array) -> pa.BinaryArray:
    """The headers of messages as bytes, `encode_headers` in bulk.

    Args:
        lists: list<struct<name: string, value: binary>>, or a map of the same.

    Returns:
        Null where there are no headers.

    Raises:
        ValueError: a header, its name or its value is null; one has too many or too long a name.
        pa.ArrowException: the columns are of other types, or take more than 2 GiB.
    """
    if pa.types.is_map(lists.type):
        pair = [("name", lists.type.key_type), ("value", lists.type.item_type)]
        lists = lists.cast(pa.list_(pa.struct(pair)))
    pairs = lists.flatten()
    names, values = (pairs.field(i).cast(pa.binary()) for i in range(2))
    if pairs.null_count or names.null_count or values.null_count:
        raise ValueError("a header has a name and a value, not null")
    counts = pc.fill_null(pc.list_value_length(lists), 0)
    lengths = pc.binary_length(names)
    for most, what in ((counts, "headers on a message"), (lengths, "bytes of a header's name")):
        if (pc.max(most).as_py() or 0) > 0xFFFF:
            raise ValueError(f"{pc.max(most)} {what}; 65535 are the most")
    none = pa.scalar(b"")
    sizes = (
        _little_endian(lengths, pa.uint16()),
        _little_endian(pc.binary_length(values), pa.uint32()),
    )
    each = pc.binary_join_element_wise(sizes[0], names, sizes[1], values, none)
    ends = pa.concat_arrays([pa.array([0], pa.int32()), pc.cumulative_sum(counts).cast(pa.int32())])
    joined = pc.binary_join(pa.ListArray.from_arrays(ends, each), none)
    rows = pc.binary_join_element_wise(_little_endian(counts, pa.uint16()), joined, none)
    return pc.if_else(pc.equal(counts, 0), pa.scalar(None, pa.binary()), rows)


def _little_endian(numbers: pa.Array, kind: pa.DataType) -> pa.BinaryArray:
    made = numbers.cast(kind)
    width = pa.binary(kind.bit_width // 8)
    bytes_ = pa.Array.from_buffers(width, len(made), [None, made.buffers()[1]], offset=made.offset)
    return bytes_.cast(pa.binary())


def decode_headers(blob: bytes | None) -> list[tuple[str, bytes]]:
    """Return the headers that `encode_headers` was given; None and no bytes are no headers. What
    is no UTF-8 in a name, as other clients may have sent it, is U+FFFD.

    Raises:
        CoreError: the bytes are damaged.
    """
    if not blob:
        return []
    headers, at = [], 2
    try:
        (n,) = _U16.unpack_from(blob)
        for _ in range(n):
            end = at + 2 + _U16.unpack_from(blob, at)[0]
            name = str(blob[at + 2 : end], "utf-8", "replace")
            at = end + 4 + _U32.unpack_from(blob, end)[0]
            headers.append((name, bytes(blob[end + 4 : at])))
    except struct.error as error:
        raise CoreError(f"the headers of a message are damaged: {error}") from error
    if at != len(blob):
        raise CoreError(f"the headers of a message are damaged: {len(blob)} bytes, not {at}")
    return headers


def split_headers(blobs: pa.BinaryArray, *, errors: str = "replace") -> pa.ListArray:
    """The headers of messages as lists, of names (string) and values (binary).

    Args:
        blobs: of each message what `encode_headers` gave; null: none.
        errors: of names that are no UTF-8; "strict" refuses them.

    Returns:
        list<struct<key: string, value: binary>>, null where there are none. Nothing points into
        `blobs`.

    Raises:
        CoreError: the bytes are damaged, or a column would pass 2 GiB.
        UnicodeDecodeError: a name is no UTF-8, where that is refused.
    """
    if blobs.offset:
        blobs = pa.concat_arrays([blobs, blobs.slice(0, 0)])
    n = len(blobs)
    validity, ends, data = blobs.buffers()
    memory = ffi.NULL if data is None else pointer(data)
    sizes = ffi.new("headers_sizes_t *")
    begins = ffi.cast("uint32_t *", pointer(ends))
    size = 0 if data is None else data.size
    check(lib.headers_size(begins, n, memory, size, sizes), "looking at the headers of messages")
    count = sizes.count
    lists, name_ends, value_ends = (allocate(4 * (k + 1)) for k in (n, count, count))
    names, values = allocate(sizes.name_bytes), allocate(sizes.value_bytes)
    out = [ffi.cast("uint32_t *", pointer(each)) for each in (lists, name_ends, value_ends)]
    lib.headers_split(begins, n, memory, out[0], out[1], pointer(names), out[2], pointer(values))
    key = pa.Array.from_buffers(pa.string(), count, [None, name_ends, names], 0)
    try:
        key.validate(full=True)
    except pa.ArrowInvalid:
        found = key.cast(pa.binary()).to_pylist()
        key = pa.array([str(name, "utf-8", errors) for name in found], pa.string())
    value = pa.Array.from_buffers(pa.binary(), count, [None, value_ends, values], 0)
    pairs = pa.StructArray.from_arrays([key, value], fields=_PAIR)
    return pa.Array.from_buffers(
        pa.list_(_ITEM), n, [validity, lists], blobs.null_count, children=[pairs]
    )


# -- writing -----------------------------------------------------------------------------

ARROW_CODECS = {"lz4": "lz4_raw", "zstd": "zstd"}

_TIMESTAMP = pa.timestamp("us", "UTC")
_STRINGS = {pa.binary().id, pa.string().id}
_COLUMNS = {"value": 0, "key": 1, "headers": 2, "timestamp": 3}
_NONE = (0, 0, 0, 0, 0, 0, 0)
# messages_t, packed here: filling it field by field took most of the time of a small batch.
_FIELDS = struct.Struct("@29Qq2I")
assert _FIELDS.size == ffi.sizeof("messages_t")
_MESSAGES = ffi.typeof("messages_t *")
_PLAN = ffi.typeof("messages_plan_t *")
_HEADER = ffi.typeof("batch_header_t *")
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
    places: pa.UInt32Array | None = None,
    count: int | None = None,
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
        places: of the messages among the offsets that the batch takes, ascending; None: 0, 1, 2.
        count: offsets that it takes; None: as many as messages.

    Raises:
        CoreError: more data than a batch can hold (2 GiB).
        OverflowError: a number is out of its range.
        ValueError: there are no messages, a column is none of the above, or an array is broken.
    """
    if codec not in CODECS:
        raise ValueError(f"codec {codec!r}; there are None, 'lz4' and 'zstd'")
    if decided and not txn_id:
        raise ValueError("a decided batch without a transaction; give its txn_id")
    taken = messages.num_rows if count is None else count
    reach = messages.num_rows if places is None else places[-1].as_py() + 1
    if reach > taken:
        raise ValueError(f"messages up to place {reach - 1} of {taken}; give more offsets")
    if reach == messages.num_rows:
        places = None  # they are 0, 1, 2
    held, source = message_source(messages, timestamp, places)
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
        ffi.memmove(memory + HEADER_BYTES, CHUNK_HEAD.pack(*chunk), CHUNK_BYTES)
    del held
    n, times = plan.rows, (plan.base_timestamp, plan.max_timestamp)
    ids = (producer_id, base_sequence, epoch, 0)
    fields = [0, 0, 0, 0, 0, flags, taken, txn_id, *times, *ids, n, plan.raw_bytes]
    lib.batch_seal(ffi.new(_HEADER, fields), memory, len(out))
    return out


def message_source(
    messages: pa.RecordBatch, timestamp: int, places: pa.UInt32Array | None = None
) -> tuple[list[Any], Any]:
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
    address = 0
    if places is not None:
        held.append(places)
        address = places.buffers()[1].address + 4 * places.offset
    fields = (address, timestamp, messages.num_rows, 0)
    packed = _FIELDS.pack(*chain.from_iterable(columns), *fields)
    held.append(packed)
    return held, ffi.cast(_MESSAGES, ffi.from_buffer(packed))


def _column(column: pa.Array, is_time: bool, held: list[Any]) -> tuple[int, ...]:
    type_ = column.type
    if is_time and (type_.id != _TIMESTAMP.id or type_.unit != "us"):
        column = column.cast(_TIMESTAMP)
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
    content = CONTROL_BODY.pack(0, ControlType(type), 0, low_water_mark, first_offset)
    out = b"".join((bytes(HEADER_BYTES), content, body))
    flags = lib.BATCH_CONTROL | (8 if txn_id else 0)
    raw = len(out) - HEADER_BYTES
    fields = [0, 0, 0, 0, 0, flags, count, txn_id, timestamp, timestamp, 0, -1, 0, 0, 0, raw]
    lib.batch_seal(ffi.new(_HEADER, fields), writable_bytes(out), len(out))
    return out


# -- reading -----------------------------------------------------------------------------

_OFFSET = pa.uint64()
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


# -- the last message of each key ------------------------------------------------------

_TWO = ffi.typeof("uint64_t[2]")
_NO_KEY: int = (1 << 64) - 1
_KEY_COLUMNS = ["value", "key", "timestamp"]


class LastKeys:
    """A table of the keys of messages, each with the last offset that was noted for it.

    Rows are given as `decode` gives them. One thread at a time.
    """

    def __init__(self) -> None:
        made = lib.last_keys_create()
        if made == ffi.NULL:
            raise MemoryError("a table of keys: no memory")
        self._c = ffi.gc(made, lib.last_keys_destroy)

    def __len__(self) -> int:
        return self._held()[0]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self._held()[1]

    def note(self, rows: pa.RecordBatch) -> None:
        """Note the offset of each message that has a key, in place of an earlier one."""
        if rows.num_rows:
            held, source = message_source(rows.select(_KEY_COLUMNS), 0)
            status = lib.last_keys_note(self._c, source, _offsets(rows))
            check(status, f"noting the keys of {rows.num_rows} messages")
            del held

    def last(self, key: bytes | None) -> int:
        """The last offset of a key; -1: it has none."""
        if key is None:
            return -1
        found: int = lib.last_keys_find(self._c, readable(key), len(key))
        return -1 if found == _NO_KEY else found

    def choose(self, rows: pa.RecordBatch, oldest: int) -> pa.UInt32Array:
        """Return the places of the messages that stay: without a key, or the last of theirs.

        Args:
            rows: some messages.
            oldest: microseconds since 1970; a last one without a value that is older goes.
        """
        n = rows.num_rows
        out, found = allocate(4 * n), ffi.new("uint32_t *")
        if n:
            held, source = message_source(rows.select(_KEY_COLUMNS), 0)
            chosen = pointer(out, "uint32_t *")
            status = lib.last_keys_choose(self._c, source, _offsets(rows), oldest, chosen, found)
            check(status, f"looking for the keys of {n} messages")
            del held
        return pa.Array.from_buffers(pa.uint32(), found[0], [None, out])

    def _held(self) -> tuple[int, int]:
        found = ffi.new(_TWO)
        lib.last_keys_held(self._c, found, found + 1)
        return found[0], found[1]


def _offsets(rows: pa.RecordBatch) -> object:
    column = rows.column("offset")
    return ffi.cast("uint64_t *", column.buffers()[1].address + 8 * column.offset)
