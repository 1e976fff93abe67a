"""Reads the log of `record.c` into operations with a begin and an end."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final

_HEADER: Final = struct.Struct("<IHHQQqQII")
_MAGIC: Final = 0x53534C50

NEVER: Final = 1 << 62
"""The position of what did not happen within the log."""


class Kind(IntEnum):
    """The kind of event that a record tells of; the numbers are those of `record.c`."""

    END = 0
    WRITE = 1
    TRUNCATE = 2
    ALLOCATE = 3
    SYNC = 4
    OPEN = 5
    MKDIR = 6
    RENAME = 7
    REMOVE = 8
    LINK = 9
    MMAP = 10
    MARK = 11


DATA_ONLY: Final = 1
"""Flag of SYNC: fdatasync."""

DURABLE: Final = 2
"""Flag of WRITE: the descriptor has O_DSYNC or O_SYNC."""

TRUNCATES: Final = 4
"""Flag of OPEN: O_TRUNC."""


@dataclass
class Operation:
    """One call. Positions are numbers of records, so they order all calls of a run.

    Attributes:
        kind: what it did.
        flags: see the constants of this module.
        begin: position at which it was called.
        end: position at which it had returned; NEVER when the log ends before.
        inode: of the file; of the new name for OPEN, MKDIR, RENAME and LINK.
        offset: where a WRITE begins, how long a TRUNCATE makes the file, where it ends at least
            after an ALLOCATE.
        data: of a WRITE or MARK.
        path: absolute; the old one of a RENAME or LINK.
        other: the new path of a RENAME or LINK.
    """

    kind: Kind
    flags: int
    begin: int
    end: int
    inode: int
    offset: int
    data: bytes
    path: str
    other: str


@dataclass(frozen=True)
class Log:
    """The log of a run: all that happened in it.

    Attributes:
        operations: in the order of their begins; failed ones are left out.
        length: how many positions there are.
    """

    operations: list[Operation]
    length: int

    def marks(self) -> list[tuple[int, str]]:
        """The lines that the run wrote to its file of marks, with their positions."""
        return [
            (op.begin, line)
            for op in self.operations
            if op.kind is Kind.MARK
            for line in op.data.decode().splitlines()
        ]

    def boundaries(self) -> list[int]:
        """The cuts that matter: before and behind each sync, and behind each mark.

        Before a sync most is unsynced; behind a mark most was promised. A cut `n` means that the
        first `n` records happened.
        """
        cuts = {0, self.length}
        for op in self.operations:
            if op.kind is Kind.SYNC or (op.kind is Kind.WRITE and op.flags & DURABLE):
                cuts |= {op.begin, op.begin + 1}
                if op.end != NEVER:
                    cuts.add(op.end + 1)
            elif op.kind is Kind.MARK:
                cuts.add(op.begin + 1)
        return sorted(cuts)


def read(path: Path) -> Log:
    """Reads a whole log.

    Raises:
        ValueError: the file is no log, or a process died while it wrote a record.
    """
    if os.path.getsize(path) == 0:
        return Log([], 0)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return _collect(_records(content))


def _records(content: mmap.mmap) -> Iterator[tuple[int, Operation]]:
    at, position = 0, 0
    while at < len(content):
        if at + _HEADER.size > len(content):
            raise ValueError(f"the log breaks off at byte {at}; was a process killed?")
        magic, kind, flags, call, inode, offset, data_bytes, path_bytes, other_bytes = (
            _HEADER.unpack_from(content, at)
        )
        texts = at + _HEADER.size
        data = texts + path_bytes + other_bytes
        if magic != _MAGIC or data + data_bytes > len(content):
            raise ValueError(f"no whole record at byte {at} of the log; was a process killed?")
        yield (
            call,
            Operation(
                Kind(kind),
                flags,
                position,
                NEVER,
                inode,
                offset,
                content[data : data + data_bytes],
                os.fsdecode(content[texts : texts + path_bytes]),
                os.fsdecode(content[texts + path_bytes : data]),
            ),
        )
        at, position = data + data_bytes, position + 1


def _collect(records: Iterator[tuple[int, Operation]]) -> Log:
    operations: list[Operation] = []
    running: dict[int, Operation] = {}
    failed: set[int] = set()
    length = 0
    for call, record in records:
        length = record.begin + 1
        if record.kind is not Kind.END:
            operations.append(record)
            running[call] = record
            continue
        op = running.pop(call)
        op.end, result = record.begin, record.offset
        op.inode = record.inode or op.inode
        if result < 0:
            failed.add(op.begin)
        elif op.kind is Kind.WRITE:
            op.data = op.data[:result]
    return Log([op for op in operations if op.begin not in failed], length)
