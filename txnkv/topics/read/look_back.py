"""Large messages for readers that begin in the middle of one: the pieces before.

    offset   10   11   12   13   14        F: a message in three pieces, at the offset of its last
    batch    F0   F1   b    F2   c
    given              | b(12) F(13) c     to one that begins at 12, and looks back as far as 10

So a position is one number, behind what was given, wherever large messages have begun.
"""

from __future__ import annotations

from typing import Any, Final

from txnkv.core import Spans, all_data, read_chunk, read_header, walk
from txnkv.errors import OffsetOutOfRangeError
from txnkv.topics.log import whole
from txnkv.topics.messages import Reassembly
from txnkv.topics.partition import Partition
from txnkv.topics.read.log_view import LogView, look_at
from txnkv.topics.topics import Topics

_END: Final = 1 << 63
_FIRST_REACH: Final = 64
"""Offsets, for the first look back; each further one goes four times as far."""


class LookBack:
    """For one reader of a partition.

    Args:
        topics: of the store.
        partition: where it reads.
        reassembly: the reader's, which takes the pieces in.
        begin: what lies below is not looked for.
        max_bytes: of one look at the log, about.
        skip_lost: leave out what retention took a part of, rather than raise.
    """

    def __init__(
        self,
        topics: Topics,
        partition: Partition,
        reassembly: Reassembly,
        *,
        begin: int,
        max_bytes: int,
        skip_lost: bool,
    ) -> None:
        self._topics = topics
        self._partition = partition
        self._reassembly = reassembly
        self._begin = begin
        self._max_bytes = max_bytes
        self._skip_lost = skip_lost
        self._lost: set[int] = set()

    def complete(self, records: Any, spans: Spans) -> None:
        """Take in the pieces that lie before these batches, of messages that go on in them.

        Raises:
            OffsetOutOfRangeError: retention took some of them since the reader began.
        """
        seen: set[int] = set()
        for place, _ in spans if spans.has_chunks else ():
            chunk = read_chunk(records, place)
            if chunk is None:
                continue
            id = chunk.message_id
            known = chunk.piece == 0 or id in seen or id in self._lost or self._reassembly.has(id)
            if not known and not self._look_back(id, read_header(records, place).base_offset):
                self._lost.add(id)
            seen.add(id)
            if chunk.piece + 1 == chunk.pieces:
                self._lost.discard(id)

    def _look_back(self, message_id: int, before: int) -> bool:
        reach = _FIRST_REACH
        while True:
            low = max(self._begin, before - reach)
            start, found = look_at(
                self._topics,
                self._partition,
                lambda view, low=low: self._pieces(view, message_id, low, before),  # type: ignore[misc]
            )
            if found and read_chunk(found[0]).piece == 0:  # type: ignore[union-attr]
                for piece in found:
                    self._reassembly.decode(piece, all_data(piece, 0, _END), 0)
                return True
            if start > low and not self._skip_lost:
                raise OffsetOutOfRangeError(
                    f"{self._partition.label} begins at offset {start} now, in the middle of a "
                    f"large message that is read at {before}: retention took its first pieces"
                )
            if start > low or low == self._begin:
                return False  # it had no beginning when the reader began, or has none any more
            reach *= 4

    def _pieces(
        self, view: LogView, message_id: int, low: int, before: int
    ) -> tuple[int, list[bytes]]:
        """Find where the log begins, and the pieces of a message in [low, before)."""
        at = max(low, view.start)
        found: list[bytes] = []
        while at < before:
            for part in view.read(at, self._max_bytes, view.high_watermark):
                if at >= before:
                    break
                checked = whole(part)
                for place, header in walk(checked):
                    at = header.next_offset
                    if header.base_offset >= before:
                        break
                    if not header.is_chunk:
                        continue
                    chunk = read_chunk(checked, place)
                    if chunk is not None and chunk.message_id == message_id:
                        found.append(bytes(checked[place : place + header.length]))
                if len(checked) < len(part):
                    break  # the next read begins with what is damaged
        return view.start, found
