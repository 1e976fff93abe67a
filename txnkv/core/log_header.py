"""The header of a record batch, and what is asked of batches without a look at their rows.

The words: a *batch* is the unit of a log, an 80-byte header and a body; it takes `count`
offsets from `base_offset` on. A *data* batch holds messages, a *control* batch says what became
of a transaction or stands for offsets that hold nothing. Offsets and the commit timestamp stand
outside of the checksum: they are set (`place`) when they are known, long after the body was
sealed. Byte by byte: docs/format-topics.md.
"""

from __future__ import annotations

import struct
from enum import IntEnum, IntFlag
from typing import Any, NamedTuple

from txnkv.core.checksum import crc32c
from txnkv.core.native import CoreError

HEADER_BYTES = 80
MAGIC = 1
CODECS: tuple[str | None, ...] = (None, "lz4", "zstd")

HEADER = struct.Struct("<QQIIHHIQqqQiHHII")
_PLACE = struct.Struct("<QQ")


class Attributes(IntFlag):
    """What stands in a batch; bits 0 to 2 are the number of its codec in `CODECS`."""

    CODEC = 7
    TRANSACTIONAL = 8
    CONTROL = 16
    DECIDED = 32  # transactional and committed: no marker comes
    KEYS = 64
    HEADERS = 128
    TIMES = 256
    NULL_VALUES = 512
    CHUNK = 1024  # the rows are pieces of one large message


class BatchHeader(NamedTuple):
    """The header of a batch, as `read_header` gives it; timestamps are microseconds."""

    base_offset: int
    commit_ts: int  # 0: not known, or a marker says it
    length: int  # bytes of the whole batch
    attributes: int
    count: int  # type: ignore[assignment]  # offsets taken; hides tuple.count
    txn_id: int  # 0: none
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    base_sequence: int  # -1: none
    epoch: int
    rows: int
    raw_bytes: int  # of the body before compression

    @property
    def is_control(self) -> bool:
        """Whether it is a control batch."""
        return bool(self.attributes & 16)

    @property
    def is_transactional(self) -> bool:
        """Whether a transaction wrote it."""
        return bool(self.attributes & 8)

    @property
    def is_decided(self) -> bool:
        """Whether its transaction is committed without a marker."""
        return bool(self.attributes & 32)

    @property
    def is_chunk(self) -> bool:
        """Whether its rows are pieces of one large message."""
        return bool(self.attributes & 1024)

    @property
    def codec(self) -> str | None:
        """The name of its compression."""
        return CODECS[self.attributes & 7]

    @property
    def last_offset(self) -> int:
        """The last offset that it takes."""
        return self.base_offset + self.count - 1

    @property
    def next_offset(self) -> int:
        """The offset behind it."""
        return self.base_offset + self.count


class ControlType(IntEnum):
    """What a control batch says."""

    ABORT = 0
    COMMIT = 1
    FILLER = 2  # the offsets were reserved and never written
    SIDE_LIST = 3  # a commit whose messages lie in a side log; the body names them


class Control(NamedTuple):
    """The body of a control batch."""

    type: ControlType
    low_water_mark: int
    first_offset: int  # of the transaction in this log; of ABORT and COMMIT
    body: bytes  # what follows: the list of a SIDE_LIST


class Chunk(NamedTuple):
    """Which piece of a large message a batch holds."""

    message_id: int
    piece: int
    pieces: int
    total_bytes: int


def read_header(buf: Any, at: int = 0) -> BatchHeader:
    """The header of the batch at byte `at`, without a look at its checksum.

    Raises:
        CoreError: this is no batch, or it is cut off.
    """
    view = memoryview(buf).cast("B")
    if at < 0 or len(view) - at < HEADER_BYTES:
        raise CoreError(f"reading a batch at {at} of {len(view)} bytes: too few for a header")
    fields = HEADER.unpack_from(view, at)
    base, ts, _, length, magic, attributes, count, txn = fields[:8]
    reserved, rows, raw = fields[13:]
    codec = attributes & 7
    control = bool(attributes & 16)
    good = (
        magic == MAGIC
        and reserved == 0
        and HEADER_BYTES <= length <= len(view) - at
        and attributes < 2048
        and codec < len(CODECS)
        and 1 <= count <= 0x7FFFFFFF
        and rows <= count
        and base <= (1 << 63) - 1 - count
        and (txn != 0) == bool(attributes & 8)
        and not (attributes & 32 and not attributes & 8)
        and not (control and (rows or codec or attributes & ~0x38 or length < HEADER_BYTES + 24))
        and (codec or raw == length - HEADER_BYTES - (24 if attributes & 1024 else 0))
    )
    if not good:
        raise CoreError(
            f"reading a batch at {at} of {len(view)} bytes: the header makes no sense. "
            "Check the store that it came from."
        )
    return BatchHeader(base, ts, length, attributes, count, txn, *fields[8:13], rows, raw)


def check_batch(buf: Any, at: int = 0) -> None:
    """Whether the batch at byte `at` is what was written, by its checksum.

    Raises:
        CoreError: it is not.
    """
    header = read_header(buf, at)
    view = memoryview(buf).cast("B")
    if crc32c(view[at + 20 : at + header.length]) != HEADER.unpack_from(view, at)[2]:
        raise CoreError(
            f"the batch at offset {header.base_offset} is damaged: its checksum differs. "
            "Check the store that it came from."
        )


def walk(buf: Any, start: int = 0) -> list[tuple[int, BatchHeader]]:
    """The batches that stand one behind the other from byte `start` to the end of a buffer.

    Returns:
        For each, where it begins and its header.

    Raises:
        CoreError: there is something else between them, or the last one is cut off.
    """
    found = []
    size = memoryview(buf).nbytes
    while start < size:
        header = read_header(buf, start)
        found.append((start, header))
        start += header.length
    return found


def place(buf: Any, base_offset: int, commit_ts: int = 0) -> bytes:
    """A copy of batches, one behind the other, with their offsets set.

    Args:
        buf: the batches.
        base_offset: of the first; the others follow without a gap.
        commit_ts: what to set where it is known; 0 leaves what stands there.

    Raises:
        CoreError: these are no batches, or the offsets pass 2^63.
    """
    out = bytearray(buf)
    for at, header in walk(out):
        _PLACE.pack_into(out, at, base_offset, commit_ts or header.commit_ts)
        base_offset += header.count
    return bytes(out)


def read_control(buf: Any, at: int = 0) -> Control:
    """What the control batch at byte `at` says.

    Raises:
        CoreError: it is damaged, or no control batch.
    """
    check_batch(buf, at)
    header = read_header(buf, at)
    if not header.is_control:
        raise CoreError(f"the batch at offset {header.base_offset} holds messages, no control")
    view = memoryview(buf).cast("B")
    version, kind, zero, low, first = struct.unpack_from("<HHIQQ", view, at + HEADER_BYTES)
    if version or zero or kind > 3:
        raise CoreError(
            f"the control batch at offset {header.base_offset} is version {version}, type {kind}, "
            "which this version does not know"
        )
    return Control(ControlType(kind), low, first, bytes(view[at + 104 : at + header.length]))


def read_chunk(buf: Any, at: int = 0) -> Chunk | None:
    """Which piece of a large message the batch at byte `at` holds; None: it holds whole ones.

    Raises:
        CoreError: this is no batch.
    """
    header = read_header(buf, at)
    if not header.is_chunk:
        return None
    return Chunk(*struct.unpack_from("<QIIQ", memoryview(buf).cast("B"), at + HEADER_BYTES))
