"""Cutting messages into batches, and one that is too large for a batch into pieces; and back.

    rows     [a b c][d e][F: 3 MiB][g]
    batches  [a b c][d e] F0 F1 F2 [g]        F0..F2: CHUNK batches of one row each

The pieces of a message share a random id of 64 bits and stand one behind the other; key, headers
and timestamp stand in the first. A reader gives the message whole, at the offset of its last piece:

    offset   10    11   12   13   14   15        F: a message in three pieces, of one transaction
    batch    a     F0   F1   b    F2   c
    given    a(10)           b(13) F(14) c(15)   F: key, headers and time of F0

The pieces stand in one transaction, so a reader of committed messages finds all of them; others'
batches may stand between. One who began in the middle looks back for the pieces before
(`offset_reader`); a message of which retention took some is left out. A reader of what is not
committed may wait for pieces of a transaction that ends without them: its end marker says so.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from txnkv.core import MESSAGES, ROW_BYTES, Chunk, Spans, decode, read_chunk, read_header, walk
from txnkv.core import compute as pc

MAX_ROWS: Final = 1 << 16
"""Messages of a batch, at most."""


def cut(messages: pa.RecordBatch, most: int) -> Iterator[tuple[pa.RecordBatch, Chunk | None]]:
    """Messages in parts that a batch holds, in their order.

    Args:
        messages: column value and maybe others.
        most: bytes of a batch in memory, keys and headers counted, unless it is of one message.

    Returns:
        Parts, and of a piece of a large message which one it is.
    """
    if fit(messages.nbytes, messages.num_rows, most):
        yield messages, None
        return
    values = messages.column("value")
    large = pc.indices_nonzero(pc.fill_null(pc.greater(pc.binary_length(values), most), False))
    at = 0
    for row in large.to_pylist():
        yield from runs(messages.slice(at, row - at), most)
        yield from _pieces(messages.slice(row, 1), most)
        at = row + 1
    yield from runs(messages.slice(at), most)


def fit(size: int, rows: int, most: int) -> bool:
    """Tell whether so many messages, whose columns have so many bytes, are one batch."""
    return size + ROW_BYTES * rows <= most and rows <= MAX_ROWS


def runs(messages: pa.RecordBatch, most: int) -> Iterator[tuple[pa.RecordBatch, None]]:
    """Messages in parts that a batch holds, none of them in pieces; see `cut`."""
    n = messages.num_rows
    at = 0
    while at < n:
        begin = at

        def size(end: int, begin: int = begin) -> int:
            return int(messages.slice(begin, end - begin).nbytes) + ROW_BYTES * (end - begin)

        last = min(begin + MAX_ROWS, n)
        end = max(bisect_right(range(begin, last + 1), most, key=size) - 1 + begin, begin + 1)
        yield messages.slice(at, end - at), None
        at = end


def _pieces(message: pa.RecordBatch, most: int) -> Iterator[tuple[pa.RecordBatch, Chunk]]:
    value = message.column("value")[0].as_buffer()
    place = message.schema.get_field_index("value")
    id = int.from_bytes(os.urandom(8), "little")
    count = -(-value.size // most)
    for piece in range(count):
        part = value.slice(piece * most, min(most, value.size - piece * most))
        column = pa.Array.from_buffers(pa.binary(), 1, [None, _offsets(part.size), part])
        chunk = Chunk(id, piece, count, value.size)
        if piece == 0:
            yield message.set_column(place, "value", column), chunk
        else:
            yield pa.RecordBatch.from_arrays([column], ["value"]), chunk


def _offsets(size: int) -> pa.Buffer:
    return pa.array([0, size], pa.int32()).buffers()[1]


@dataclass
class _Partial:
    first_offset: int
    txn_id: int
    head: pa.RecordBatch
    values: list[pa.Buffer]


class Reassembly:
    """The messages of one reader in one partition that have begun and are not complete.

    Attributes:
        completed: of the last `decode`: the offset of each large message, with that of its first
            piece.
    """

    def __init__(self) -> None:
        self._partials: dict[int, _Partial] = {}
        self.completed: dict[int, int] = {}

    def reset(self) -> None:
        """Forgets all: the reader goes elsewhere."""
        self._partials.clear()

    @property
    def begun(self) -> set[int]:
        """The first offsets of messages that have begun and are not complete."""
        return {each.first_offset for each in self._partials.values()}

    @property
    def has_begun(self) -> bool:
        """A message has begun that is not complete."""
        return bool(self._partials)

    def has(self, message_id: int) -> bool:
        """This one has begun and is not complete."""
        return message_id in self._partials

    def decode(self, buf: Any, spans: Spans, from_offset: int) -> pa.RecordBatch:
        """Decode as `core.decode` does, with large messages whole.

        Args:
            buf: what the spans were made of; `intact`.
            spans: the batches that are shown, all behind those of the call before.
            from_offset: the first offset that is wanted.
        """
        self.completed = {}
        if not spans.has_chunks:
            return decode(buf, spans, from_offset, checked=True)
        parts: list[pa.RecordBatch] = []
        begin = 0
        for i, (at, _) in enumerate(spans):
            chunk = read_chunk(buf, at)
            if chunk is None:
                continue
            if begin < i:
                parts.append(decode(buf, spans[begin:i], from_offset, checked=True))
            begin = i + 1
            whole = self._add(buf, at, spans[i : i + 1], chunk, from_offset)
            if whole is not None:
                parts.append(whole)
        if begin < len(spans):
            parts.append(decode(buf, spans[begin:], from_offset, checked=True))
        return joined(parts)

    def end_transactions(self, buf: Any) -> None:
        """Gives up messages of transactions whose end marker is in a buffer."""
        if not self._partials:
            return
        ended = {header.txn_id for _, header in walk(buf) if header.is_control} - {0}
        self._partials = {
            id: each for id, each in self._partials.items() if each.txn_id not in ended
        }

    def _add(
        self, buf: Any, at: int, span: Spans, chunk: Chunk, from_offset: int
    ) -> pa.RecordBatch | None:
        """Take a piece; the message when it is the last one."""
        header = read_header(buf, at)
        if header.base_offset < from_offset:
            return None
        row = decode(buf, span, from_offset, checked=True)
        value = row.column("value")[0].as_buffer()
        if chunk.piece == 0:
            partial = _Partial(header.base_offset, header.txn_id, row, [value])
            self._partials[chunk.message_id] = partial
        else:
            found = self._partials.get(chunk.message_id)
            if found is None or len(found.values) != chunk.piece:
                self._partials.pop(chunk.message_id, None)
                return None
            partial = found
            partial.values.append(value)
        if chunk.piece + 1 < chunk.pieces:
            return None
        del self._partials[chunk.message_id]
        self.completed[header.last_offset] = partial.first_offset
        return _whole(partial, row)


def joined(parts: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Batches one behind the other as one."""
    if len(parts) == 1:
        return parts[0]
    return pa.concat_batches(parts) if parts else pa.RecordBatch.from_pylist([], schema=MESSAGES)


def _whole(partial: _Partial, last: pa.RecordBatch) -> pa.RecordBatch:
    columns: dict[str, Any] = dict(zip(MESSAGES.names, partial.head.columns, strict=True))
    value = b"".join(partial.values)
    columns["value"] = pa.array([value], pa.binary())
    columns["offset"] = last.column("offset")
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=MESSAGES)
