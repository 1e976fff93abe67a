"""The headers of messages, as they stand in a batch: u16 n, then n names and values."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pyarrow as pa

from txnkv.core import compute as pc
from txnkv.core.native import CoreError, allocate, check, ffi, lib, pointer

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
    """Return the headers that `encode_headers` was given; None and no bytes are no headers.

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
            name = str(blob[at + 2 : end], "utf-8")
            at = end + 4 + _U32.unpack_from(blob, end)[0]
            headers.append((name, bytes(blob[end + 4 : at])))
    except (struct.error, UnicodeDecodeError) as error:
        raise CoreError(f"the headers of a message are damaged: {error}") from error
    if at != len(blob):
        raise CoreError(f"the headers of a message are damaged: {len(blob)} bytes, not {at}")
    return headers


def split_headers(blobs: pa.BinaryArray) -> pa.ListArray:
    """The headers of messages as lists, of names (string) and values (binary).

    Args:
        blobs: of each message what `encode_headers` gave; null: none.

    Returns:
        list<struct<key: string, value: binary>>, null where there are none. Nothing points into
        `blobs`.

    Raises:
        CoreError: the bytes are damaged, or a column would pass 2 GiB.
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
    value = pa.Array.from_buffers(pa.binary(), count, [None, value_ends, values], 0)
    pairs = pa.StructArray.from_arrays([key, value], fields=_PAIR)
    return pa.Array.from_buffers(
        pa.list_(_ITEM), n, [validity, lists], blobs.null_count, children=[pairs]
    )
