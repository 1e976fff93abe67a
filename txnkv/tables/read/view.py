"""The view of a reader on a tablet: a snapshot, and inside a transaction also its own writes.

A key is looked for in sources one above the other; what is found in one hides the key in those
below, be it a row or the mark that it was deleted:

    own memory            what the transaction wrote, while it is small
    own staged row sets   what it wrote since, the newest first
    committed memory      entries with flushed < stamp <= snapshot
    unresolved row sets   of commits whose finalization goes on, the newest first
    settled row sets      rows with insert <= snapshot < delete

Settled row sets hide nothing: where a row of one was replaced, it has a delete stamp. A row set
is unresolved while those stamps may be missing, and so hides by its keys the rows that are older
than it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from txnkv import core
from txnkv.coordinator import MAX_TIMESTAMP, Timestamp, status_table
from txnkv.tables.maintenance import history
from txnkv.tables.read.pins import Pins
from txnkv.tables.read_set import ReadSet
from txnkv.tables.tables import Tables
from txnkv.tables.tablets import TOMBSTONES, RowSetInfo, Tablet, TabletState, manifest

EVERY_STAMP: Final = int(MAX_TIMESTAMP)
"""Entries of a transaction's own memory are stamped by its statements: all count."""


class OwnWrites(Protocol):
    """The writes that a transaction holds in memory."""

    def memory(self, tablet_id: int) -> core.MemRowSet | None:
        """Its entries for a tablet; None when there are none."""


@dataclass(frozen=True)
class ReadView:
    """A snapshot and a transaction's own writes.

    Attributes:
        snapshot: everything that committed at or below it is seen.
        txn_id: the transaction whose staged rows are seen too, or None.
        own: what it has in memory.
        reads: takes what is read, for a serializable transaction.
    """

    snapshot: Timestamp
    txn_id: int | None = None
    own: OwnWrites | None = None
    reads: ReadSet | None = None

    def sight(self, tables: Tables, tablet: Tablet) -> Sight:
        """Return the part of a tablet that this view sees.

        Raises:
            TxnNotFoundError, InvalidTxnStateError: the transaction is not OPEN.
            HistoryExpiredError: what the snapshot needs may have been collected.
        """
        staged: Sequence[RowSetInfo] = ()
        if self.txn_id is not None:
            with tables.store.status.read() as cur:
                # Aborted by another process, it would read as if it had written nothing.
                status_table.get_open(cur, self.txn_id, "read")
                staged = manifest.staged(cur, self.txn_id, tablet.id)
        state = tablet.state(self.snapshot)
        require_history(tables, self.snapshot)
        memory = None if self.own is None else self.own.memory(tablet.id)
        return Sight.of(tablet, self.snapshot, state, memory, staged)

    def pinned(self, tables: Tables, tablets: Sequence[Tablet]) -> tuple[list[Sight], Pins]:
        """Return the sights of some tablets, by one manifest version, and the pins that keep that
        readable while they are held.

        Raises:
            As `sight`.
        """
        while True:
            version = min((tablet.state(self.snapshot).version for tablet in tablets), default=0)
            pins = Pins(tables.store.runtime, self.snapshot, version)
            try:
                tables.log.latest()  # what was published before the pins were is seen from here on
                sights = [self.sight(tables, tablet) for tablet in tablets]
            except BaseException:
                pins.release()
                raise
            if all(sight.state.version == version for sight in sights):
                return sights, pins
            pins.release()


def require_history(tables: Tables, snapshot: Timestamp) -> None:
    """Refuse a snapshot of which versions may be gone; asked after the state was taken.

    Raises:
        HistoryExpiredError: it lies below the history floor.
    """
    if snapshot < tables.log.history_floor:
        history.require(tables.coordinator, snapshot)


@dataclass(frozen=True)
class Sight:
    """The part of one tablet that a view sees.

    Attributes:
        own: the transaction's memory, or None.
        staged: its row sets, the newest first.
        unresolved: row sets that hide what is older by their keys, the newest first.
        settled: all other committed row sets that the snapshot sees, the newest first.
    """

    tablet: Tablet
    snapshot: Timestamp
    state: TabletState
    own: core.MemRowSet | None
    staged: tuple[RowSetInfo, ...]
    unresolved: tuple[RowSetInfo, ...]
    settled: tuple[RowSetInfo, ...]

    @classmethod
    def of(
        cls,
        tablet: Tablet,
        snapshot: Timestamp,
        state: TabletState,
        own: core.MemRowSet | None,
        staged: Sequence[RowSetInfo],
    ) -> Sight:
        """Sort the row sets of a state by what they hide."""
        unresolved, settled = committed_at(state, snapshot)
        newest = sorted(staged, key=lambda info: (info.staged_seq, info.id), reverse=True)
        if own is not None and own.n == 0:
            own = None
        return cls(tablet, snapshot, state, own, tuple(newest), unresolved, settled)

    @property
    def after(self) -> int:
        """Entries of committed memory at or below it lie in row sets too."""
        return int(self.state.flushed)

    @property
    def has_memory(self) -> bool:
        """True when committed memory may have something that is seen."""
        return self.state.memory.n > 0 and self.state.flushed < self.snapshot

    @property
    def readable(self) -> tuple[RowSetInfo, ...]:
        """The row sets that hold rows, the newest first."""
        return tuple(
            info
            for info in (*self.staged, *self.unresolved, *self.settled)
            if info.kind != TOMBSTONES
        )


def committed_at(
    state: TabletState, snapshot: Timestamp
) -> tuple[tuple[RowSetInfo, ...], tuple[RowSetInfo, ...]]:
    """The unresolved and the settled row sets that a snapshot sees, the newest first."""
    if snapshot >= state.highest:
        return state.unresolved, state.settled
    return (
        tuple(info for info in state.unresolved if first_stamp(info) <= snapshot),
        tuple(info for info in state.settled if first_stamp(info) <= snapshot),
    )


def first_stamp(info: RowSetInfo) -> int:
    """The lowest insert stamp of a committed row set."""
    return int(info.min_stamp if info.min_stamp is not None else info.stamp or 0)


def rank(info: RowSetInfo) -> tuple[int, int, int]:
    """Among committed row sets of which one is uniform: which hides the other."""
    return int(info.stamp or 0), info.staged_seq or 0, info.id


def hides(info: RowSetInfo) -> bool:
    """Return True when a row set that is not resolved hides older rows by its keys."""
    return info.supersedes or info.kind == TOMBSTONES


def hidden_before(mask: RowSetInfo, info: RowSetInfo) -> int:
    """Rows of `info` inserted below this stamp are hidden by an unresolved row set; 0: none."""
    if info.uniform or not info.resolved:
        return EVERY_STAMP if rank(mask) > rank(info) else 0
    stamp = int(mask.stamp or 0)
    if int(info.stamp or 0) < stamp:
        return EVERY_STAMP
    return stamp if first_stamp(info) < stamp else 0
