"""Offsets that are given and not yet in a log: the tail of small commits, and end markers.

    LMDB     [ 0 ............ 40 )
    tail                     [ 40-41 | 42 | 43-50 )        commits at 812, 815 and 816
    reader at snapshot 815   [ 40-41 | 42 )

Their offsets were given inside the commits' SQLite transactions, so entries stand in the order
of their commits, and their bytes are those that the log will hold. Filled by the commit log, in
every process. Whoever has the log's write lock may write them into the log at any time; they
stay here until a flush has told everybody, so a reader that takes the tail first and the log
second misses nothing.

End markers of large transactions are noted in status.db inside the commit point, until they are in
their logs.
"""

from __future__ import annotations

import operator
import struct
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple, TypeAlias

import apsw

from txnkv.coordinator import Key, Section, Timestamp, one
from txnkv.core import ControlType, encode_control, place, walk
from txnkv.storage import Store

_EXTENT = struct.Struct("<Q12xI4xI")
"""Base offset, length, offsets taken: of a batch header. One commit, one look: no call into C."""
_CRC_AT: Final = 16
"""The place of its checksum."""


WriteOut: TypeAlias = Callable[[list[int]], dict[Key, str]]
"""Bring the logs of partitions up to their tails; return those that could not be, and why."""


class TailEntry(NamedTuple):
    """The batches that one commit added to a partition.

    Attributes:
        base_offset: of its first batch.
        count: offsets of all its batches.
        data: the batches one behind the other, with their offsets and commit timestamp.
        stamp: the commit timestamp.
    """

    base_offset: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    data: bytes
    stamp: int

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.count


_BASE_OFFSET: Final = operator.itemgetter(0)


class TopicTail:
    """By partition id. Changed under the commit log's lock alone, read without one.

    Args:
        on_write_out: called by a flush.
    """

    def __init__(self, on_write_out: WriteOut) -> None:
        # Lists grow at their end, or are replaced: who reads one goes on with it.
        self._entries: dict[int, list[TailEntry]] = {}
        self._on_write_out = on_write_out
        self._nbytes = 0
        self._damaged: dict[int, dict[int, str]] = {}

    @property
    def partition_ids(self) -> list[int]:
        """Partitions that have entries."""
        return sorted(id for id, entries in list(self._entries.items()) if entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return self._nbytes

    def entries(self, partition_id: int, offset: int, upto: Timestamp) -> list[TailEntry]:
        """Entries that end above `offset`, committed at or before `upto`, ascending.

        Those of later commits may not be durable yet.
        """
        entries = self._entries.get(partition_id)
        if not entries or entries[-1].next_offset <= offset:
            return []
        first = max(bisect_right(entries, offset, key=_BASE_OFFSET) - 1, 0)
        found = entries[first:]
        if found and found[0].next_offset <= offset:
            del found[0]
        while found and found[-1].stamp > upto:
            found.pop()
        return found

    def end(self, partition_id: int) -> int:
        """The offset behind the last entry; 0 when there is none."""
        entries = self._entries.get(partition_id)
        return entries[-1].next_offset if entries else 0

    def damaged(self, partition_id: int) -> dict[int, str]:
        """Commits whose messages are damaged in the commit log, and why: their entries hold a batch
        of the same offsets that no checksum fits.
        """
        return self._damaged.get(partition_id, {})

    # -- as a member of the commit log -------------------------------------------------

    def apply(self, id: int, data: bytes, stamp: int) -> None:
        """Take in what one commit adds to a partition."""
        base, count = _extent(data)
        entries = self._entries.setdefault(id, [])
        if entries and entries[-1].next_offset > base:
            at = bisect_right(entries, base, key=_BASE_OFFSET) - 1
            if entries[at].base_offset == base and entries[at].stamp == stamp:
                return
            # What stands there had a COMMIT that failed, and is about to be undone.
            kept = [entry for entry in entries if entry.next_offset <= base]
            self._replace(id, kept)
            entries = kept
        entries.append(TailEntry(base, count, data, stamp))
        self._nbytes += len(data)

    def lose(self, section: Section, stamp: int, error: str) -> None:
        """Take in that the messages of a commit are damaged."""
        self._damaged.setdefault(section.id, {})[stamp] = error
        filler = encode_control(ControlType.FILLER, count=section.offsets, timestamp=0)
        batch = bytearray(place(filler, section.first, stamp))
        batch[_CRC_AT] ^= 0xFF
        self.apply(section.id, bytes(batch), stamp)

    def forget(self, id: int) -> None:
        """Forget the entries of a partition."""
        self._replace(id, [])
        self._damaged.pop(id, None)

    def undo(self, ids: set[int], upto: int) -> None:
        """Drop entries above `upto`."""
        for id in ids:
            self._replace(id, [e for e in self._entries.get(id, ()) if e.stamp <= upto])

    def write_out(self, upto: Timestamp) -> dict[Key, str]:
        """Write entries at or below `upto` into the logs, durably, but for damaged ones."""
        ids = [id for id in self.partition_ids if self._entries[id][0].stamp <= upto]
        return self._on_write_out(ids) if ids else {}

    def flushed(self, upto: Timestamp, held: Collection[int]) -> None:
        """Drop entries at or below `upto`: they are in the logs, but for those that are held."""
        for id in self.partition_ids:
            if id in held:
                continue
            self._replace(id, [entry for entry in self._entries[id] if entry.stamp > upto])
            if id in self._damaged:  # the log had it before it was damaged here
                self._damaged[id] = {at: e for at, e in self._damaged[id].items() if at > upto}

    def reset(self) -> None:
        """Forget all: in a forked child the log reads it again."""
        self._entries = {}
        self._nbytes = 0
        self._damaged = {}

    def _replace(self, id: int, entries: list[TailEntry]) -> None:
        self._nbytes += sum(len(entry.data) for entry in entries)
        self._nbytes -= sum(len(entry.data) for entry in self._entries.get(id, ()))
        self._entries[id] = entries


def _extent(data: bytes) -> tuple[int, int]:
    """The first offset of placed batches, and how many they take."""
    base, length, count = _EXTENT.unpack_from(data)
    if length == len(data):  # one batch
        return base, count
    last = walk(data)[-1][1]
    return base, last.next_offset - base


class EndMarker(NamedTuple):
    """A row of `end_markers`: how a transaction ends in one log."""

    first_offset: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    txn_id: int
    type: int
    commit_ts: int  # of an abort, when it was
    low_water_mark: int
    txn_first_offset: int

    @property
    def next_offset(self) -> int:
        return self.first_offset + self.count


_MARKER = "first_offset, count, txn_id, type, commit_ts, low_water_mark, txn_first_offset"


def note_marker(cur: apsw.Cursor, partition_id: int, marker: EndMarker) -> None:
    """Note an end marker whose offsets were just taken."""
    cur.execute(
        f"INSERT INTO end_markers (partition_id, {_MARKER}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (partition_id, *marker),
    )


def markers_between(cur: apsw.Cursor, partition_id: int, offset: int, upto: int) -> list[EndMarker]:
    """End markers at or above `offset` and below `upto`, ascending."""
    return [
        EndMarker(*row)
        for row in cur.execute(
            f"SELECT {_MARKER} FROM end_markers WHERE partition_id = ? AND first_offset >= ? "
            "AND first_offset < ? ORDER BY first_offset",
            (partition_id, offset, upto),
        )
    ]


def marked_partitions(cur: apsw.Cursor, txn_id: int | None = None) -> list[int]:
    """Partitions that have end markers noted: of one transaction, or of any."""
    found = cur.execute(
        "SELECT DISTINCT partition_id FROM end_markers WHERE txn_id = coalesce(?, txn_id)",
        (txn_id,),
    )
    return [id for (id,) in found]


def is_noted(cur: apsw.Cursor, partition_id: int, txn_id: int) -> bool:
    """Tell whether an end marker of a transaction waits to be written into a log."""
    found = cur.execute(
        "SELECT 1 FROM end_markers WHERE partition_id = ? AND txn_id = ?", (partition_id, txn_id)
    )
    return found.fetchone() is not None


def last_marker_end(cur: apsw.Cursor, partition_id: int) -> tuple[bool, int]:
    """Tell whether a partition has end markers noted, and where the last one ends."""
    (end,) = one(
        cur,
        "SELECT max(first_offset + count) FROM end_markers WHERE partition_id = ?",
        (partition_id,),
    )
    return end is not None, end or 0


def forget_markers(store: Store, written: Sequence[tuple[int, int]]) -> None:
    """Forget end markers that are in their logs.

    Args:
        store: the store.
        written: the end of each log, and the partition's id.
    """
    # Not synced: one that comes back is below its log's end, and nobody minds it.
    with store.status.write(sync=False) as cur:
        cur.executemany(
            "DELETE FROM end_markers WHERE first_offset < ? AND partition_id = ?", written
        )
