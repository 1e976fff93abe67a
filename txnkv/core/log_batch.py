"""Record batches: their header, and what is asked of them without a look at their rows.

The words: a *batch* is the unit of a log, an 80-byte header and a body; it takes `count`
offsets from `base_offset` on. A *data* batch holds messages, a *control* batch says what became
of a transaction or stands for offsets that hold nothing. Offsets and the commit timestamp stand
outside of the checksum: they are set (`place`) when they are known, long after the body was
sealed. Byte by byte: docs/format-topics.md.

A fetch is filtered by batches. READ_UNCOMMITTED shows every data batch. READ_COMMITTED leaves out
those of aborted transactions: of the fetch's list (transaction, first offset) the least first
offset stands on top of a heap; when the walk reaches it, the transaction joins the set of aborted
ones, and leaves it with its ABORT marker. So a reader keeps one entry for an aborted transaction
that it is in the middle of, and none for an open one, however long it is.

    offset     0   1   2   3         4   5
    batch     P1  P1  P2  P1 commit  P2  P2 abort      aborted list: (P2, 2)
    shown      x   x
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from enum import IntEnum, IntFlag
from itertools import chain
from typing import Any, NamedTuple

from txnkv.core.native import CoreError, check, ffi, lib, place_batches, readable, writable

HEADER_BYTES = 80
CHUNK_BYTES = 24
CODECS: tuple[str | None, ...] = (None, "lz4", "zstd")

_HEADER = struct.Struct("<QQ4xI2xHIQqqQiH2xII")
CONTROL_BODY = struct.Struct("<HHIQQ")
CHUNK_HEAD = struct.Struct("<QIIQ")
_ALL = 0xFFFFFFFF
_NO_ROWS_BYTES = 8  # of the ends of no values
_PLACES = ffi.typeof("uint64_t[3]")
_C_HEADER = ffi.typeof("batch_header_t *")
_TWO = ffi.typeof("uint64_t[2]")
ROW_BYTES: int = lib.BATCH_ROW_BYTES
"""Bytes that a decoded message takes in memory, at least, beside what stands in its batch."""


class Attributes(IntFlag):
    """The flags of a batch; bits 0 to 2 are the number of its codec in `CODECS`."""

    CODEC = 7
    TRANSACTIONAL = 8
    CONTROL = 16
    DECIDED = 32  # transactional and committed: no marker comes
    KEYS = 64
    HEADERS = 128
    TIMES = 256
    NULL_VALUES = 512
    CHUNK = 1024  # the rows are pieces of one large message
    PLACES = 2048  # message i has not place i among the offsets taken


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
        """True for a control batch."""
        return bool(self.attributes & 16)

    @property
    def is_transactional(self) -> bool:
        """True when a transaction wrote the batch."""
        return bool(self.attributes & 8)

    @property
    def is_decided(self) -> bool:
        """True when the batch's transaction is committed without a marker."""
        return bool(self.attributes & 32)

    @property
    def is_chunk(self) -> bool:
        """True when the rows are pieces of one large message."""
        return bool(self.attributes & 1024)

    @property
    def has_places(self) -> bool:
        """True when offsets without a message lie before or between its messages."""
        return bool(self.attributes & 2048)

    @property
    def codec(self) -> str | None:
        """The name of its compression."""
        return CODECS[self.attributes & 7]

    @property
    def last_offset(self) -> int:
        """The last offset that it takes."""
        return self.base_offset + self.count - 1

    @property
    def decoded_bytes(self) -> int:
        """Bytes that the batch takes in memory when it is decoded."""
        return HEADER_BYTES + self.raw_bytes + ROW_BYTES * self.rows

    @property
    def next_offset(self) -> int:
        """The offset behind it."""
        return self.base_offset + self.count


class ControlType(IntEnum):
    """The kinds of control batches."""

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
    memory = readable(buf)
    if not 0 <= at <= len(memory):
        raise CoreError(f"reading a batch at {at} of {len(memory)} bytes. Check the position.")
    if lib.batch_parse(memory + at, len(memory) - at, ffi.new(_C_HEADER)):
        raise CoreError(
            f"reading a batch at {at} of {len(memory)} bytes: the header makes no sense, or the "
            "batch is cut off. Check the store that it came from."
        )
    return _unpack(buf, at)


def _unpack(buf: Any, at: int) -> BatchHeader:
    base, commit_ts, length, *rest = _HEADER.unpack_from(buf, at)
    return BatchHeader(base, commit_ts, length, *rest)


def check_batch(buf: Any, at: int = 0) -> None:
    """Check by its checksum that the batch at byte `at` is what was written.

    Raises:
        CoreError: the checksum differs, or there is no whole batch.
    """
    memory = readable(buf)
    if 0 <= at <= len(memory) and not lib.batch_check(memory + at, len(memory) - at):
        return
    raise CoreError(
        f"the batch at offset {read_header(buf, at).base_offset} is damaged: its checksum "
        "differs. Check the store that it came from."
    )


def intact(buf: Any) -> Any:
    """The first of some batches, as many as are what was written by their checksums.

    Readers ask before they filter or decode, for a header that changed would mislead both. What
    comes behind is read next, and begins with what is damaged.

    Raises:
        CoreError: the first one is damaged.
    """
    memory = readable(buf)
    size = lib.batch_intact(memory, len(memory))
    if size == len(memory):
        return buf
    if not size:
        check_batch(buf)
    return memoryview(buf)[:size]


def sound(
    buf: Any, base_offset: int, offset: int = 0, most: int = _ALL, *, checksums: bool = True
) -> tuple[int, int, int]:
    """Find the batches, from the one that holds an offset on, that are as they were written.

    Args:
        buf: the batches.
        base_offset: of the first.
        offset: what lies below is passed by its headers, which have to follow each other.
        most: batches.
        checksums: without them, only headers and their offsets are looked at.

    Returns:
        Where the batch that holds the offset begins, where what is whole ends, and the offset
        there. If it ends too soon, the batch of that offset is damaged or gone.
    """
    memory = readable(buf)
    out = ffi.new(_PLACES)
    lib.batch_sound(memory, len(memory), base_offset, offset, most, checksums, out)
    return out[0], out[1], out[2]


def walk(buf: Any, start: int = 0) -> list[tuple[int, BatchHeader]]:
    """The batches that stand one behind the other from byte `start` to the end of a buffer.

    Returns:
        For each, where it begins and its header.

    Raises:
        CoreError: there is something else between them, or the last one is cut off.
    """
    memory = readable(buf)
    if not 0 <= start <= len(memory):
        raise CoreError(f"reading batches at {start} of {len(memory)} bytes. Check the position.")
    n = count_batches(memory, start)
    positions = ffi.new("uint64_t[]", n)
    check(lib.batch_walk(memory + start, len(memory) - start, positions, n), "reading batches")
    return [(start + at, _unpack(buf, start + at)) for at in positions]


def count_batches(memory: Any, start: int = 0) -> int:
    """Count the batches that fill what `readable` gave, from byte `start` on.

    Raises:
        CoreError: there is something else.
    """
    n = ffi.new("uint32_t *")
    check(lib.batch_count(memory + start, len(memory) - start, n), "reading batches")
    return int(n[0])


def within(buf: Any, room: int) -> tuple[int, int]:
    """The first of some batches that are so many bytes at most in memory, decoded.

    Returns:
        How many bytes of the buffer they are, and how many when they are decoded. From what is
        no batch on, bytes count as they are, and together: who reads them says what is wrong.
    """
    memory = readable(buf)
    found = ffi.new(_TWO)
    lib.batch_within(memory, len(memory), max(room, 0), found, found + 1)
    return found[0], found[1]


def place(buf: Any, base_offset: int, commit_ts: int = 0) -> bytes:
    """A copy of batches, one behind the other, with their offsets set.

    Args:
        buf: the batches.
        base_offset: of the first; the others follow without a gap.
        commit_ts: what to set where it is known; 0 leaves what stands there.

    Raises:
        CoreError: these are no batches, or the offsets pass 2^63.
    """
    made = place_batches(bytes(buf), base_offset, commit_ts)
    if isinstance(made, int):
        _refuse(made, base_offset)
    assert isinstance(made, bytes)
    return made


def place_here(buf: Any, base_offset: int, commit_ts: int = 0) -> None:
    """Set the offsets of batches as `place` does, in a buffer that may be written: no copy.

    Raises:
        CoreError: as for `place`; nothing was changed then.
    """
    memory = writable(buf)
    _refuse(lib.batch_place(memory, len(memory), base_offset, commit_ts), base_offset)


def _refuse(status: int, base_offset: int) -> None:
    """Raise for batches that cannot be placed."""
    if status == lib.STATUS_LIMIT:
        raise CoreError(f"placing batches at offset {base_offset}: offsets end at 2^63")
    check(status, "placing batches")


def resized(batch: Any, count: int) -> bytes:
    """Copy a batch as one that takes so many offsets; those behind its messages hold nothing."""
    out = bytes(memoryview(batch))
    memory = writable_bytes(out)
    header = ffi.new(_C_HEADER)
    ffi.memmove(header, memory, HEADER_BYTES)
    header.count = count
    lib.batch_seal(header, memory, len(out))
    return out


def emptied(batch: Any, count: int) -> bytes:
    """Copy a batch as one without messages that takes so many offsets."""
    header = ffi.new(_C_HEADER)
    ffi.memmove(header, readable(batch), HEADER_BYTES)
    header.attributes &= lib.BATCH_TRANSACTIONAL | lib.BATCH_DECIDED
    header.count, header.rows, header.raw_bytes = count, 0, _NO_ROWS_BYTES
    out = bytes(HEADER_BYTES + _NO_ROWS_BYTES)
    lib.batch_seal(header, writable_bytes(out), len(out))
    return out


def writable_bytes(fresh: bytes) -> Any:
    """The `uint8_t *` of a bytes object that was just made and that nobody else has seen.

    Batches travel as `bytes`; made any other way, each would be copied once more.
    """
    return ffi.cast("uint8_t *", ffi.from_buffer(fresh))


def read_control(buf: Any, at: int = 0) -> Control:
    """Return the body of the control batch at byte `at`.

    Raises:
        CoreError: it is damaged, or no control batch.
    """
    check_batch(buf, at)
    header = _unpack(buf, at)
    if not header.is_control:
        raise CoreError(f"the batch at offset {header.base_offset} holds messages, no control")
    body = bytes(memoryview(buf)[at + HEADER_BYTES : at + header.length])
    version, kind, zero, low, first = CONTROL_BODY.unpack_from(body)
    if version or zero or kind > ControlType.SIDE_LIST:
        raise CoreError(
            f"the control batch at offset {header.base_offset} is version {version}, type {kind}, "
            "which this version does not know"
        )
    return Control(ControlType(kind), low, first, body[CONTROL_BODY.size :])


def read_chunk(buf: Any, at: int = 0) -> Chunk | None:
    """Which piece of a large message the batch at byte `at` holds; None: it holds whole ones.

    Raises:
        CoreError: this is no batch.
    """
    header = read_header(buf, at)
    return Chunk(*CHUNK_HEAD.unpack_from(buf, at + HEADER_BYTES)) if header.is_chunk else None


_SPANS = ffi.typeof("messages_span_t[]")
_SHOWN = ffi.typeof("committed_shown_t *")
_ABORTED = ffi.typeof("committed_aborted_t *")


class Spans(Sequence[tuple[int, int]]):
    """The batches of a buffer that a reader is shown: (position, length), in offset order.

    Attributes:
        rows: the messages of all of them, those below the reader's offset included; -1: unknown.
        attributes: the attributes of all of them, joined by or, and perhaps others.
        next_offset: where to read on: behind the last batch that was looked at, shown or not.
    """

    __slots__ = ("_c", "_n", "_whole", "attributes", "next_offset", "rows")

    def __init__(self, c: Any, n: int, rows: int, attributes: int, next_offset: int) -> None:
        """Made by `CommittedFilter.keep`, `all_data`, `decided`, `of` and by slicing."""
        self._c = c
        self._n = n
        self._whole: Any = c  # a slice points into it
        self.rows = rows
        self.attributes = attributes
        self.next_offset = next_offset

    @classmethod
    def of(cls, pairs: Sequence[tuple[int, int]]) -> Spans:
        """Batches that a caller chose from a `walk`: (position, length), in offset order.

        What else there is to know of them is not known; `next_offset` is 0.
        """
        c = ffi.new(_SPANS, [(at, length, 0) for at, length in pairs])
        return cls(c, len(pairs), -1, lib.BATCH_ATTRIBUTES, 0)

    @property
    def c(self) -> Any:
        """The `messages_span_t *` of the core; this object must outlive its use."""
        return self._c

    @property
    def has_chunks(self) -> bool:
        """True when there may be pieces of large messages among the batches."""
        return bool(self.attributes & lib.BATCH_CHUNK)

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._slice(*index.indices(self._n))
        at = index + self._n if index < 0 else index
        if not 0 <= at < self._n:
            raise IndexError(f"span {index} of {self._n}")
        return self._c[at].position, self._c[at].length

    def _slice(self, lo: int, hi: int, step: int) -> Spans:
        if step != 1:
            raise ValueError(f"a slice of spans by {step}; they stand in offset order")
        n = max(hi - lo, 0)
        part = Spans(self._c + lo, n, -1, self.attributes, self.next_offset)
        part._whole = self._whole
        return part

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return (self[i] for i in range(self._n))

    def __repr__(self) -> str:
        return f"Spans({self._n}, next_offset={self.next_offset})"


class CommittedFilter:
    """The state of one READ_COMMITTED reader in one partition; it lives on over fetches.

    It belongs to one thread at a time.
    """

    __slots__ = ("_c",)

    def __init__(self) -> None:
        """Begins without aborted transactions.

        Raises:
            MemoryError: there is none.
        """
        c = lib.committed_create()
        if c == ffi.NULL:
            raise MemoryError("making a filter: no memory")
        self._c = ffi.gc(c, lib.committed_destroy)

    def reset(self) -> None:
        """Forgets all: the reader goes elsewhere."""
        lib.committed_reset(self._c)

    @property
    def held(self) -> tuple[int, int]:
        """Two counts of aborted transactions: those ahead, and those the reader is inside of."""
        numbers = ffi.new("uint64_t[3]")
        lib.committed_held(self._c, numbers, numbers + 1, numbers + 2)
        return numbers[0], numbers[1]

    @property
    def nbytes(self) -> int:
        """The memory of the state, in bytes."""
        numbers = ffi.new("uint64_t[3]")
        lib.committed_held(self._c, numbers, numbers + 1, numbers + 2)
        return int(numbers[2])

    def keep(
        self, buf: Any, aborted: Sequence[tuple[int, int]], from_offset: int, upto: int
    ) -> Spans:
        """The data batches of a fetch that are committed and hold offsets in [from_offset, upto).

        Args:
            buf: whole batches in offset order.
            aborted: (transaction, first offset) of those that are aborted, as the fetch gave it.
            from_offset: where the reader stands.
            upto: the last stable offset; batches that end behind it are not looked at.

        Raises:
            CoreError: the bytes are damaged. The state is as before.
        """
        memory = readable(buf)
        pairs = array("Q", chain.from_iterable(aborted))
        entries = ffi.cast(_ABORTED, ffi.from_buffer(pairs))
        n = count_batches(memory)
        spans, shown = ffi.new(_SPANS, n), ffi.new(_SHOWN)
        listed = (entries, len(pairs) // 2)
        asked = (memory, len(memory), *listed, from_offset, upto, spans, n, shown)
        check(lib.committed_keep(self._c, *asked), "filtering a fetch")
        return Spans(spans, shown.n, shown.rows, shown.attributes, shown.next_offset)


def all_data(buf: Any, from_offset: int, upto: int) -> Spans:
    """The data batches of a fetch with offsets in [from_offset, upto): READ_UNCOMMITTED.

    Raises:
        CoreError: the bytes are damaged.
    """
    return _plain(buf, lib.COMMITTED_ALL, from_offset, upto)


def decided(buf: Any, from_offset: int, upto: int) -> Spans:
    """Return the batches of `all_data` for which no marker comes: decided or of no transaction.

    Raises:
        CoreError: the bytes are damaged.
    """
    return _plain(buf, lib.COMMITTED_DECIDED, from_offset, upto)


def _plain(buf: Any, which: int, from_offset: int, upto: int) -> Spans:
    memory = readable(buf)
    n = count_batches(memory)
    spans, shown = ffi.new(_SPANS, n), ffi.new(_SHOWN)
    asked = (memory, len(memory), which, from_offset, upto, spans, n, shown)
    check(lib.committed_plain(*asked), "walking through a fetch")
    return Spans(spans, shown.n, shown.rows, shown.attributes, shown.next_offset)
