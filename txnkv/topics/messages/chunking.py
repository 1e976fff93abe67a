"""Cutting messages into batches, and one that is too large for a batch into pieces.

    rows     [a b c][d e][F: 3 MiB][g]
    batches  [a b c][d e] F0 F1 F2 [g]        F0..F2: CHUNK batches of one row each

The pieces of a message share a random id of 64 bits and stand one behind the other; key, headers
and timestamp stand in the first. They are of one transaction, so a reader finds all or none.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator
from typing import Final

import pyarrow as pa

from txnkv.core import ROW_BYTES, Chunk
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
        yield from _runs(messages.slice(at, row - at), most)
        yield from _pieces(messages.slice(row, 1), most)
        at = row + 1
    yield from _runs(messages.slice(at), most)


def fit(size: int, rows: int, most: int) -> bool:
    """Tell whether so many messages, whose columns have so many bytes, are one batch."""
    return size + ROW_BYTES * rows <= most and rows <= MAX_ROWS


def _runs(messages: pa.RecordBatch, most: int) -> Iterator[tuple[pa.RecordBatch, None]]:
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
