"""Large messages put together: a message in pieces comes whole, at the offset of its last piece.

    offset   10    11   12   13   14   15        F: a message in three pieces, of one transaction
    batch    a     F0   F1   b    F2   c
    given    a(10)           b(13) F(14) c(15)   F: key, headers and time of F0

The pieces of a message stand in one transaction, so a reader of committed messages finds all of
them; others' batches may stand between. One who began in the middle looks back for the pieces
before (`look_back`); a message of which retention took some is left out.
A reader of what is not committed may wait for pieces of a transaction that ends without them: its
end marker says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from txnkv.core import MESSAGES, Chunk, Spans, decode, read_chunk, read_header, walk


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
