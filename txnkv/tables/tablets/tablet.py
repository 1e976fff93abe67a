"""A tablet: one partition of a table, its LMDB environment and its row sets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from txnkv import core
from txnkv.coordinator import CommitLog, Timestamp, held
from txnkv.errors import CorruptionError
from txnkv.storage import GATE, Store, shielded
from txnkv.tables.table_catalog import TableInfo
from txnkv.tables.tablets import manifest
from txnkv.tables.tablets.manifest import RowSetInfo
from txnkv.tables.tablets.memory import CommittedMemory
from txnkv.tables.tablets.row_set import RowSet
from txnkv.tables.tablets.tablet_files import TabletFiles


@dataclass(frozen=True)
class TabletState:
    """All of a tablet that is committed: row sets, and the memory that goes with them.

    Complete for every snapshot that this process knew when it was taken.

    Attributes:
        version: of the manifest.
        flushed: of `memory`, entries above it count; those at or below are in row sets too.
        infos: row sets by id; those that are not `resolved` hide rows of others by key.
        memory: what small commits changed.
    """

    version: int
    flushed: Timestamp
    infos: tuple[RowSetInfo, ...]
    memory: core.MemRowSet

    @cached_property
    def unresolved(self) -> tuple[RowSetInfo, ...]:
        """Those that hide rows of others by key, latest first."""
        return tuple(sorted((i for i in self.infos if not i.resolved), key=_latest_first))

    @cached_property
    def settled(self) -> tuple[RowSetInfo, ...]:
        """Rows whose own stamps and deletes say who sees them, latest first."""
        return tuple(sorted((i for i in self.infos if i.resolved), key=_latest_first))

    @cached_property
    def highest(self) -> Timestamp:
        """The highest insert stamp of all; 0 when there are no row sets."""
        return max((i.stamp for i in self.infos if i.stamp is not None), default=Timestamp(0))


def _latest_first(info: RowSetInfo) -> tuple[int, int, int]:
    return (-(info.stamp or 0), -info.staged_seq, -info.id)


class Tablet(TabletFiles):
    """One tablet in this process. Shared by threads."""

    def __init__(
        self, store: Store, table: TableInfo, number: int, log: CommitLog, memory: CommittedMemory
    ) -> None:
        super().__init__(store, table, number)
        self._log = log
        self._memory = memory
        self._state: TabletState | None = None
        self._row_sets: dict[int, RowSet] = {}
        self.chains: Any = None  # of `point_many`

    # -- row sets ----------------------------------------------------------------------

    def state(self, snapshot: Timestamp) -> TabletState:
        """Return the state, complete for `snapshot`. No I/O while the manifest does not change.

        Raises:
            CorruptionError: a small commit at or below `snapshot` is damaged in the commit log.
        """
        self._log.tail(snapshot)
        if self._memory.damaged:
            self.require_whole(snapshot)
        state = self._state
        if (
            state is None
            or state.version < self._log.version
            or not self._memory.is_current(self.id, state.memory)
        ):
            return self.reload()
        return state

    def require_whole(self, upto: Timestamp) -> None:
        """Refuse to read or flush a tablet that lacks a commit.

        Raises:
            CorruptionError: a small commit at or below `upto` is damaged in the commit log.
        """
        error = self._memory.damage(self.id, upto)
        if error is not None:
            raise CorruptionError(f"{self.label}: {error}{held.accept_loss(self.part)}")

    @shielded
    def reload(self) -> TabletState:
        """The state as status.db has it now."""
        with GATE.use(), self._log.lock:
            with self._store.status.read(durable=False) as cur:
                found = manifest.committed_state(cur, self.id)
            self._log.raise_floor(found.floor)
            self._memory.drop_flushed(self.id, found.flushed)
            memory = self._memory.of(self.id, self.codec.width)
            state = self._state = TabletState(found.version, found.flushed, found.infos, memory)
            # What is left out here is loaded again for who still reads it: an older state, a
            # transaction of its own. Kept, it would never go in a process that only reads.
            live = {info.id for info in found.infos}
            self._row_sets = {id: each for id, each in self._row_sets.copy().items() if id in live}
            return state

    def row_set(self, info: RowSetInfo) -> RowSet:
        found = self._row_sets.get(info.id)
        if found is None:
            found = self._row_sets.setdefault(info.id, RowSet(self, info))
        elif found.info is not info:
            found.adopt(info)
        return found

    def forget(self, row_set_ids: Iterable[int]) -> None:
        for id in row_set_ids:
            self._row_sets.pop(id, None)
