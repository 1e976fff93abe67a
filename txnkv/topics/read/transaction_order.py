"""Several partitions as one stream of transactions: each whole, in the order of their commits.

    partition 0    T1@10          T3@12   T4@15
    partition 1            T2@11  T3@12              T5@21
    snapshot 15    T1 | T2 | T3 (both its parts) | T4          then a later snapshot: T5

Each partition is read in commit order, and the streams are merged by commit timestamp, which
all parts of a transaction share. A merge is sound only up to a *snapshot*: everything that
committed at or below it is in the logs as they are read afterwards, in all partitions, so no
part of a transaction can be missing and no earlier one can turn up. When all is given up to
one snapshot, the next one is taken.

What is given at once ends at the end of a transaction, so none is begun that does not fit; one
that is larger than all that was asked for comes in parts, with nothing between them.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from txnkv.errors import CorruptionError
from txnkv.topics.read.commit_reader import CommitReader
from txnkv.topics.topics import Topics


class WholeOrder:
    """Readers of partitions merged by commit timestamp. One thread at a time.

    Args:
        topics: of the store.
        readers: by partition number.
    """

    def __init__(self, topics: Topics, readers: Mapping[int, CommitReader]) -> None:
        self._topics = topics
        self._readers = dict(sorted(readers.items()))
        self.restart()

    def restart(self) -> None:
        """After a seek of one of the readers: begin with a new snapshot."""
        self._snapshot: int | None = None
        self._exhausted: set[int] = set()
        self._inside: int | None = None  # the commit that was given in parts

    def gather(self, most: int, room: int) -> list[tuple[int, pa.RecordBatch]]:
        """The next messages in commit order, with their partitions' numbers: `most` at most,
        of `room` bytes unless one, or the parts of a transaction in several partitions, have more.
        """
        given: list[tuple[int, pa.RecordBatch]] = []
        if self._snapshot is not None:
            self._gather(most, room, given)
        if not given:  # all is given up to that snapshot: there may be more since
            self._snapshot = self._topics.log.latest()
            self._exhausted = set()
            self._gather(most, room, given)
        return given

    def _gather(self, most: int, room: int, given: list[tuple[int, pa.RecordBatch]]) -> None:
        while most > 0 and room > 0:
            try:
                heads = self._heads()
            except CorruptionError:
                if given:
                    break  # what was taken is given first; the next call raises
                raise
            if not heads:
                self._snapshot = None
                break
            before = len(given)
            fit = self._readers[heads[0][1]].within(room)
            count = self._give(heads, most if fit is None else min(most, fit), given)
            if count == 0:
                break
            most -= count
            room -= sum(rows.nbytes for _, rows in given[before:])

    def _heads(self) -> list[tuple[int, int]]:
        """Timestamp and partition of what comes next in each, the earliest first."""
        heads = []
        for number, reader in self._readers.items():
            if number in self._exhausted:
                continue
            while not reader.load(self._snapshot):
                if reader.is_behind:
                    return []  # what is missing there may be earlier than what others have
                if not reader.moved:
                    self._exhausted.add(number)
                    break
            else:
                heads.append((reader.head[0], number))
        heads.sort()
        return heads

    def _give(
        self, heads: list[tuple[int, int]], room: int, given: list[tuple[int, pa.RecordBatch]]
    ) -> int:
        """Append what comes next to `given`; how many messages."""
        ts, first = heads[0]
        reader = self._readers[first]
        shared = [number for other, number in heads if other == ts]
        if len(shared) == 1:
            after = heads[1][0] if len(heads) > 1 else None
            rows = reader.fitting(room, after)
        else:
            rows = self._together(shared, room)
        if rows and len(shared) == 1:
            given.append((first, reader.take(rows)))
        elif rows:
            given += [
                (each, self._readers[each].take(self._readers[each].head[1])) for each in shared
            ]
        elif given and self._inside != ts:
            return 0  # it does not fit behind the others: next time it comes first
        else:
            self._inside = ts
            rows = min(room, reader.head[1])
            given.append((first, reader.take(rows)))
        return rows

    def _together(self, numbers: list[int], room: int) -> int:
        """Messages of a transaction in these partitions; 0: not all are at hand, or too many."""
        heads = [self._readers[number].head for number in numbers]
        rows = sum(head[1] for head in heads)
        return rows if rows <= room and all(head[2] for head in heads) else 0
