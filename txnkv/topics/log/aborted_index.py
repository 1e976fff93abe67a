"""The aborted index: which transactions of a log were aborted, and from where to where.

An entry is written when an abort marker comes, into the segment that holds the marker. It has
34 bytes, big-endian, the layout of Kafka's transaction index:

     0         2               10             18            26                  34
    +---------+---------------+--------------+-------------+-------------------+
    | version | transaction   | first offset | last offset | last stable       |
    | i16 = 0 | i64           | i64          | i64         | offset, i64       |
    +---------+---------------+--------------+-------------+-------------------+

The last offset is the marker's. The last stable offset is that of the log *after* this abort,
exclusive: the first offset of the next open transaction, or the marker's offset + 1. It is what
lets a search end:

    entries by last offset  ->   5: [2, 5] lso 6      9: [6, 9] lso 7      20: [7, 20] lso 21
    a fetch of [0, 5) adds the first and stops there: 6 >= 5, so every transaction that ends
    later begins at 6 or behind it, and the fetch ends at 5.

Entries are sought by last offset, so what a fetch costs does not grow with the transactions
that were aborted before it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from txnkv.errors import CorruptionError

ENTRY_BYTES: Final = 34
_ENTRY: Final = struct.Struct(">hqqqq")
_VERSION: Final = 0


class AbortedEntry(NamedTuple):
    """One aborted transaction of a log.

    Attributes:
        txn_id: the local id of the transaction.
        first_offset: of its first batch.
        last_offset: of the abort marker.
        last_stable_offset: of the log as it is after this abort, exclusive.
    """

    txn_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int

    def pack(self) -> bytes:
        """The 34 bytes of the entry."""
        return _ENTRY.pack(_VERSION, *self)

    @classmethod
    def unpack(cls, data: bytes | memoryview, at: int = 0) -> AbortedEntry:
        """The entry at byte `at`.

        Raises:
            CorruptionError: it is cut off, or of a version this program does not know.
        """
        if len(data) - at < ENTRY_BYTES:
            raise CorruptionError(
                f"aborted index: an entry at byte {at} of {len(data)} is cut off; truncate the "
                "log before it, or restore the store from a backup"
            )
        version, *fields = _ENTRY.unpack_from(data, at)
        if version != _VERSION:
            raise CorruptionError(
                f"aborted index: the entry at byte {at} has version {version}, this program reads "
                f"{_VERSION}; use a newer one"
            )
        return cls(*fields)


def unpack_entries(data: bytes | memoryview) -> list[AbortedEntry]:
    """Entries that stand one behind the other.

    Raises:
        CorruptionError: one of them cannot be read.
    """
    return [AbortedEntry.unpack(data, at) for at in range(0, len(data), ENTRY_BYTES)]


def collect(
    entries: Iterable[AbortedEntry], offset: int, upto: int
) -> tuple[list[AbortedEntry], bool]:
    """The aborted transactions that may have batches in [offset, upto).

    Args:
        entries: in the order of the index; those that end below `offset` may be left out.
        offset: where the fetch begins.
        upto: where it ends, exclusive.

    Returns:
        The entries, and whether all are known: if not, later entries may belong to them.
    """
    found = []
    for entry in entries:
        if entry.last_offset >= offset and entry.first_offset < upto:
            found.append(entry)
        if entry.last_stable_offset >= upto:
            return found, True
    return found, False


class TransactionIndex:
    """The aborted index of one segment as a file: a copy of it outside of a store.

    The file is made by the first append. `PartitionLog.aborted_index` gives the same bytes.

    Args:
        path: of the file.
        base_offset: of the segment; no entry ends below it.
    """

    def __init__(self, path: Path, base_offset: int = 0) -> None:
        self.path = path
        self.base_offset = base_offset
        self.last_offset: int | None = None

    def entries(self) -> list[AbortedEntry]:
        """All entries.

        Raises:
            CorruptionError: one of them cannot be read.
        """
        try:
            return unpack_entries(self.path.read_bytes())
        except FileNotFoundError:
            return []

    @property
    def is_empty(self) -> bool:
        """Tell whether the index has no entries."""
        return not self.path.exists() or self.path.stat().st_size == 0

    def append(self, entry: AbortedEntry) -> None:
        """Adds an entry at the end.

        Raises:
            ValueError: it does not end behind the entry that was appended last.
        """
        if self.last_offset is not None and entry.last_offset <= self.last_offset:
            raise ValueError(
                f"aborted index {self.path}: an entry that ends at {entry.last_offset} after one "
                f"that ends at {self.last_offset}; append them in the order of their markers"
            )
        with self.path.open("ab") as file:
            file.write(entry.pack())
        self.last_offset = entry.last_offset

    def collect(self, offset: int, upto: int) -> tuple[list[AbortedEntry], bool]:
        """Do what the function `collect` does, with the entries of this segment alone."""
        return collect(self.entries(), offset, upto)

    def truncate(self, offset: int) -> None:
        """Cuts the file at the first entry that ends at or behind an offset."""
        kept = 0
        last = None
        entries = self.entries()
        for entry in entries:
            if entry.last_offset >= offset:
                break
            kept, last = kept + 1, entry.last_offset
        if kept < len(entries):
            with self.path.open("r+b") as file:
                file.truncate(kept * ENTRY_BYTES)
            self.last_offset = last

    def reset(self) -> None:
        """Removes all entries; a file that was never made is not made now."""
        if self.path.exists():
            self.path.write_bytes(b"")
        self.last_offset = None

    def rename(self, path: Path) -> None:
        """Gives the file another name; appends go there from now on."""
        if self.path.exists():
            self.path.rename(path)
        self.path = path

    def delete(self) -> bool:
        """Removes the file; false when there was none."""
        there = self.path.exists()
        self.path.unlink(missing_ok=True)
        return there

    def check(self) -> None:
        """Looks whether every entry lies in the segment.

        Raises:
            CorruptionError: one of them ends before the segment begins, or cannot be read.
        """
        for entry in self.entries():
            if entry.last_offset < self.base_offset:
                raise CorruptionError(
                    f"aborted index {self.path}: transaction {entry.txn_id} ends at "
                    f"{entry.last_offset}, below the segment, which begins at {self.base_offset}; "
                    "build it again from the log"
                )
