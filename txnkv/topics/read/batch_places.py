"""Places of the batches of transactions that stand mixed in a log: each is looked at once.

A reader in the order of commits reads one transaction after the other, and the batches of each out
of a range that all share. So what is looked through for the first is noted for the others:

    log      P1  P2  P3  P1  P2  P3  C1  C2  C3
    read P1  looks through [0, 6)                 P1: 0 3    P2: 1 4    P3: 2 5
    read P2  has [1, 7) but for C1: takes 1 and 4 where they lie

A *place* is a run of batches of one transaction in one chunk. Chunks only grow, at their end, as
long as the log is not cut; so a place is good in later LMDB transactions, and what lies there says
whose it is. Places of what was aborted are never asked for: when there are too many, all are
forgotten, and the next one looks again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import Any, Final, NamedTuple

from txnkv.core import read_header, sound, walk
from txnkv.errors import CorruptionError
from txnkv.topics.log import damaged
from txnkv.topics.ranges import Ranges
from txnkv.topics.read.log_view import LogView

_MOST: Final = 1 << 18
"""Places, and ranges that were looked through, that are remembered."""
_PLACE_BYTES: Final = 256 << 10
"""Decoded bytes of a place, at most, unless it is one batch."""
_SCAN_BYTES: Final = 64 << 20
"""Bytes of the log to be looked through in one look."""


class _Place(NamedTuple):
    """Bytes [at, at + length) of the chunk of a key: offsets [base, next_offset), `decoded` bytes
    in memory.
    """

    base: int
    next_offset: int
    key: int
    at: int
    length: int
    decoded: int


class BatchPlaces:
    """The places that one reader knows of a log. Not for two threads at a time."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all: the reader goes elsewhere, or the log is another."""
        self._places: dict[int, list[_Place]] = {}
        self._seen = Ranges()
        self._count = 0
        self._last = 0  # the transaction that was read last: its places go with the next one

    def read(
        self, view: LogView, txn_id: int, at: int, upto: int, max_bytes: int
    ) -> tuple[list[Any], int]:
        """Batches of a transaction out of [at, upto) of the log, others left where they are.

        Args:
            view: of the log.
            txn_id: of a transaction that has ended.
            at: where to begin; not behind where the last call for this transaction got.
            upto: its end marker.
            max_bytes: of all together when they are decoded; one place is given, however large
                it is.

        Returns:
            The batches, in views that end with the log's; and up to where these are all.

        Raises:
            OffsetOutOfRangeError: retention took some of them.
            CorruptionError: the log makes no sense.
        """
        if txn_id != self._last:
            self._count -= len(self._places.pop(self._last, ()))
            self._last = txn_id
        if self._count + len(self._seen) > _MOST:
            self.clear()
        reach = self._look_through(view, txn_id, at, upto, max_bytes)
        places = self._places.get(txn_id, [])
        found: list[Any] = []
        for i in range(bisect_right(places, at, key=_next_offset), len(places)):
            place = places[i]
            if place.base >= reach:
                break
            if found and place.decoded > max_bytes:
                return found, place.base
            part = self._part(view, txn_id, place)
            if part is None:
                self.clear()
                return [], at
            found.append(part)
            max_bytes -= place.decoded
        return found, reach

    def _part(self, view: LogView, txn_id: int, place: _Place) -> Any:
        """Return the batches at a place; None when something else is there by now."""
        view.require(place.next_offset - 1)  # what begins before the log is there whole
        chunk = view.chunk(place.key)
        if chunk is None or len(chunk) < place.at + place.length:
            return None
        part = chunk[place.at : place.at + place.length]
        header = read_header(part)
        return part if (header.base_offset, header.txn_id) == (place.base, txn_id) else None

    def _look_through(self, view: LogView, txn_id: int, at: int, upto: int, max_bytes: int) -> int:
        """Note what lies in [at, upto), until it is enough. Up to where all is noted."""
        left, room, begin = max_bytes, _SCAN_BYTES, at
        while True:
            low, limit = self._seen.gap_from(at)
            if low >= upto:
                return upto
            left -= self._noted(txn_id, at, low)
            for key, chunk in view.chunks(low, min(limit, upto)):
                if left <= 0 or room <= 0:
                    return low
                low, whole, more = self._note(txn_id, key, chunk, low, limit)
                if not whole and low > begin:
                    return low
                if not whole:
                    raise damaged(low)
                left -= more
                room -= len(chunk)
            if low <= at:
                raise CorruptionError(f"offset {at}: no batch is there")
            at = low

    def _noted(self, txn_id: int, at: int, upto: int) -> int:
        """Decoded bytes of a transaction that are noted in [at, upto)."""
        places = self._places.get(txn_id, [])
        low = bisect_right(places, at, key=_next_offset)
        high = bisect_left(places, upto, key=_base)
        return sum(place.decoded for place in places[low:high])

    def _note(
        self, txn_id: int, key: int, chunk: memoryview, low: int, limit: int
    ) -> tuple[int, bool, int]:
        """Note the batches of a chunk in [low, limit): what is as it was written.

        Returns:
            Behind the last, whether no damage comes there, and decoded bytes of `txn_id`.
        """
        reach, own = low, 0
        start, stop, end = sound(chunk, key, low) if key <= low else (0, 0, low)
        for at, header in walk(chunk[start:stop]):
            if header.base_offset >= limit:
                break
            reach = header.next_offset
            if header.is_transactional and not (header.is_control or header.is_decided):
                size = header.decoded_bytes
                place = _Place(header.base_offset, reach, key, start + at, header.length, size)
                self._add(header.txn_id, place)
                own += size if header.txn_id == txn_id else 0
        self._seen.add(low, reach)
        return reach, stop == len(chunk) or reach < end, own

    def _add(self, txn_id: int, place: _Place) -> None:
        places = self._places.setdefault(txn_id, [])
        last = places[-1] if places else None
        if last is None or last.base < place.base:
            if last is not None and _joins(last, place):
                places[-1] = last._replace(
                    next_offset=place.next_offset,
                    length=last.length + place.length,
                    decoded=last.decoded + place.decoded,
                )
                return
            places.append(place)
        else:
            insort(places, place)
        self._count += 1


def _joins(last: _Place, place: _Place) -> bool:
    there = last.key, last.at + last.length, last.next_offset
    small = last.decoded + place.decoded <= _PLACE_BYTES
    return small and there == (place.key, place.at, place.base)


def _base(place: _Place) -> int:
    return place.base


def _next_offset(place: _Place) -> int:
    return place.next_offset
