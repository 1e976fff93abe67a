"""The committed MemRowSets of this process: what small commits changed and no flush wrote yet.

One for each tablet, filled by the commit log: by this process's commits as they are made, by
those of others when the log is tailed. Entries that a flush has put into row sets are dropped by
making a new MemRowSet of the rest; readers that hold the old one go on with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from txnkv import core
from txnkv.coordinator import MAX_TIMESTAMP, Key, Section, Timestamp
from txnkv.storage import new_epoch


class CommittedMemory:
    """By tablet id. Changed under the commit log's lock alone.

    Args:
        width_of: the key width of a tablet; None when it was dropped and is gone.
        on_flushed: called for each tablet with entries when a flush has taken place.

    Attributes:
        damaged: by tablet, the commits that it lacks, for they are damaged in the commit log, and
            why.
    """

    def __init__(
        self,
        width_of: Callable[[int], int | None],
        on_flushed: Callable[[int, Timestamp], object],
    ) -> None:
        self._sets: dict[int, core.MemRowSet] = {}
        self._dropped: dict[int, Timestamp] = {}
        self.damaged: dict[int, dict[int, str]] = {}
        self._width_of = width_of
        self._on_flushed = on_flushed

    def of(self, tablet_id: int, width: int) -> core.MemRowSet:
        """The committed MemRowSet of a tablet whose keys have this width."""
        found = self._sets.get(tablet_id)
        if found is None:
            found = self._sets.setdefault(tablet_id, core.MemRowSet(width))
        return found

    def is_current(self, tablet_id: int, memory: core.MemRowSet) -> bool:
        """Return True when this is the tablet's MemRowSet still."""
        return self._sets.get(tablet_id) is memory

    @property
    def tablet_ids(self) -> list[int]:
        """Tablets that have entries, or lack some."""
        return sorted({id for id, memory in list(self._sets.items()) if memory.n} | {*self.damaged})

    @property
    def nbytes(self) -> int:
        """Bytes that all of them hold."""
        return sum(memory.nbytes for memory in list(self._sets.values()))

    def drop_flushed(self, tablet_id: int, upto: Timestamp) -> None:
        """Keep the entries above `upto`, in a new MemRowSet."""
        memory = self._sets.get(tablet_id)
        if memory is not None and memory.n and upto > self._dropped.get(tablet_id, 0):
            self._sets[tablet_id] = memory.copy(upto, MAX_TIMESTAMP)
            new_epoch()
            self._dropped[tablet_id] = upto

    def forget(self, tablet_id: int) -> None:
        """A tablet is gone for good."""
        self._sets.pop(tablet_id, None)
        new_epoch()
        self._dropped.pop(tablet_id, None)
        self.damaged.pop(tablet_id, None)

    def damage(self, tablet_id: int, upto: Timestamp) -> str | None:
        """Return what is damaged in the commit log of what commits at or below `upto` changed in a
        tablet; None when nothing is.
        """
        found = self.damaged.get(tablet_id, {})
        return next((error for stamp, error in found.items() if stamp <= upto), None)

    # -- as a member of the commit log -------------------------------------------------

    def apply(self, id: int, data: bytes, stamp: int) -> None:
        """Take in what one commit changes in a tablet."""
        memory = self._sets.get(id)
        if memory is None:
            width = self._width_of(id)
            if width is None:
                return
            memory = self.of(id, width)
        memory.apply(data, stamp)

    def lose(self, section: Section, stamp: int, error: str) -> None:
        """Remember that a tablet lacks what one commit changed in it."""
        if self._width_of(section.id) is not None:
            self.damaged.setdefault(section.id, {})[stamp] = error
            new_epoch()

    def undo(self, ids: set[int], upto: int) -> None:
        """Drop entries above `upto`."""
        for id in ids:
            if id in self._sets:
                self._sets[id] = self._sets[id].copy(0, upto)
                new_epoch()

    def write_out(self, upto: Timestamp) -> dict[Key, str]:
        """Nothing: the flush writes row sets itself."""
        return {}

    def flushed(self, upto: Timestamp, held: Collection[int]) -> None:
        """Let the tablets pair their memory with the new row sets."""
        for id in self.tablet_ids:
            if id not in held:
                self._on_flushed(id, upto)

    def reset(self) -> None:
        """Forget all: in a forked child the log reads it again."""
        new_epoch()
        self._sets = {}
        self._dropped = {}
        self.damaged = {}
