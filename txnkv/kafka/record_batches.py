"""Batches of a producer: their header, checksum and compression; `core` reads what is inside.

    61 bytes of header | records, compressed as one piece: gzip, snappy, lz4 frames or zstd

A producer sends one batch for each partition of a request. Its header says who sent it, in which
epoch, and the sequence number of its first message.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import pyarrow as pa

from txnkv.core import CoreError, LimitError, crc32c, decode_records, split_headers
from txnkv.kafka.api_tables import Code, KafkaError

_HEADER: Final = struct.Struct(">qiibIhiqqqhii")
_CHECKED_FROM: Final = 21
_FORMAT: Final = 2
MOST_BYTES: Final = 64 << 20
"""The most of a request's batches without their compression."""

_FREE_BYTES: Final = 1 << 20
"""Batches of more than that ask for memory before they are there."""

_CODEC, _TRANSACTIONAL, _CONTROL = 7, 0x10, 0x20
_XERIAL: Final = b"\x82SNAPPY\0"
_SNAPPY_RATIO: Final = 22
"""Three bytes of a block make 64 at most."""


class ProducerBatch(NamedTuple):
    """One batch of a producer.

    Attributes:
        rows: its messages, as `core.encode_batch` takes them.
        producer_id: -1: of no idempotent producer.
        sequence: of the first message.
    """

    rows: pa.RecordBatch
    producer_id: int
    epoch: int
    sequence: int
    transactional: bool


def read_batch(records: memoryview | None, most: int, take: Callable[[], None]) -> ProducerBatch:
    """Return the one batch that a producer sent for a partition.

    Args:
        records: as they came.
        most: bytes that they may have without their compression.
        take: is called before memory for a large batch is taken.

    Raises:
        KafkaError: it is none, is damaged, or of an old format.
    """
    if not records or len(records) < _HEADER.size:
        raise KafkaError(Code.CORRUPT_MESSAGE, "the batch is cut off")
    fields = _HEADER.unpack_from(records)
    _, length, _, form, crc, attributes, last, base_millis, _, producer, epoch, first, n = fields
    if form != _FORMAT:
        raise KafkaError(
            Code.UNSUPPORTED_FOR_MESSAGE_FORMAT, f"a batch of format {form}: 2 is spoken"
        )
    if length + 12 != len(records):
        raise KafkaError(Code.INVALID_RECORD, "there is one batch for a partition in a request")
    if crc32c(records[_CHECKED_FROM:]) != crc:
        raise KafkaError(Code.CORRUPT_MESSAGE, "the checksum of the batch differs")
    if attributes & _CONTROL or n <= 0 or last != n - 1:
        raise KafkaError(Code.INVALID_RECORD, "a producer sends messages, numbered from 0 on")
    if producer >= 0 and (epoch < 0 or first < 0):
        raise KafkaError(Code.INVALID_RECORD, "a producer has an epoch, and numbers its messages")
    try:
        packed, codec = records[_HEADER.size :], attributes & _CODEC
        body = _decompressed(packed, codec, min(most, _FREE_BYTES))
        if body is None:
            take()
            body = _decompressed(packed, codec, most)
        if body is None:
            raise KafkaError(
                Code.MESSAGE_TOO_LARGE,
                f"batches of more than {MOST_BYTES:,} bytes in a request: send smaller ones",
            )
        rows = decode_records(body, n, max(base_millis, 0))
        if "headers" in rows.schema.names:
            split_headers(rows.column("headers"), errors="strict")
    except UnicodeDecodeError:
        raise KafkaError(Code.INVALID_RECORD, "a header's name is no UTF-8") from None
    except LimitError:  # not as damaged: clients send that again, with all that waits behind it
        raise KafkaError(
            Code.INVALID_RECORD,
            "a message has more than 65,535 headers, a header's name of more than 65,535 bytes, or "
            "a time whose microseconds are no 64-bit number",
        ) from None
    except (CoreError, OSError, zlib.error, pa.ArrowException, EOFError) as error:
        raise KafkaError(Code.CORRUPT_MESSAGE, f"the records make no sense: {error}") from None
    if base_millis < 0:  # without times
        rows = rows.drop_columns(["timestamp"])
    return ProducerBatch(rows, producer, epoch, first, bool(attributes & _TRANSACTIONAL))


def _decompressed(body: memoryview, codec: int, most: int) -> Any:
    """The records; None where they are more than `most` bytes."""
    if codec == 0:
        return body
    if codec == 1:
        found: Any = zlib.decompressobj(31).decompress(body, most + 1)
    elif codec == 2:
        found = _snappy(body, most)
    elif codec in (3, 4):
        source = pa.BufferReader(pa.py_buffer(body))
        with pa.CompressedInputStream(source, "lz4" if codec == 3 else "zstd") as stream:
            found = stream.read(most + 1)
    else:
        raise KafkaError(Code.UNSUPPORTED_COMPRESSION_TYPE, f"there is no compression {codec}")
    return None if found is None or len(found) > most else found


def _snappy(body: memoryview, most: int) -> bytes | None:
    """One block, or as Java writes it: a head of 16 bytes, then blocks behind their lengths."""
    if bytes(body[: len(_XERIAL)]) != _XERIAL:
        return _snappy_block(body, most)
    parts = []
    at, total = 16, 0
    while at < len(body):
        size = int.from_bytes(body[at : at + 4], "big")
        block = body[at + 4 : at + 4 + size]
        if len(block) < size or not size:
            raise CoreError("a block is cut off")
        part = _snappy_block(block, most - total)
        if part is None:
            return None
        parts.append(part)
        total += len(part)
        at += 4 + size
    return b"".join(parts)


def _snappy_block(block: memoryview, most: int) -> bytes | None:
    size = shift = 0
    for byte in block[:5]:
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    if size > _SNAPPY_RATIO * len(block):
        raise CoreError("a block says that it is longer than it can be")
    if size > most:
        return None
    found: bytes = pa.decompress(pa.py_buffer(block), size, "snappy", asbytes=True)
    return found
