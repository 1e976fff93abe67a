"""The view of a reader: a snapshot, and inside a transaction also its own writes.

What it sees of a tablet, layer above layer, is a `TabletView`. While it reads, its pins keep its
snapshot and the row sets of its manifest from being collected. A pin is published in the runtime
file before the list of row sets is read; who collects looks at the pins after it has published a
newer list. So either the reader sees the newer list, or the collector sees the pin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from txnkv import core
from txnkv.coordinator import Timestamp, status_table
from txnkv.storage import Runtime
from txnkv.tables.maintenance import history
from txnkv.tables.read_set import ReadSet
from txnkv.tables.tables import Tables
from txnkv.tables.tablets import RowSetInfo, Tablet, TabletView, manifest


class OwnWrites(Protocol):
    """The writes that a transaction holds in memory."""

    memories: dict[int, core.MemRowSet]
    statements: int

    def memory(self, tablet_id: int) -> core.MemRowSet | None:
        """Its entries for a tablet; None when there are none."""


class OwnThen:
    """The writes that a transaction held when this was made, whatever it wrote since."""

    def __init__(self, own: OwnWrites) -> None:
        self.memories, self.statements = dict(own.memories), own.statements

    def memory(self, tablet_id: int) -> core.MemRowSet | None:
        """See `OwnWrites`."""
        found = self.memories.get(tablet_id)
        return None if found is None else found.copy(0, self.statements)


@dataclass(frozen=True)
class ReadView:
    """A snapshot and a transaction's own writes.

    Attributes:
        snapshot: everything that committed at or below it is seen.
        txn_id: the transaction whose staged rows are seen too, or None.
        own: what it has in memory.
        reads: takes what is read, for a serializable transaction.
        upto: of the staged rows, those up to a point; None for all.
    """

    snapshot: Timestamp
    txn_id: int | None = None
    own: OwnWrites | None = None
    reads: ReadSet | None = None
    upto: manifest.Upto | None = None

    def until_now(self, tables: Tables) -> ReadView:
        """The same; what its transaction stages from here on is left out."""
        if self.txn_id is None or self.upto is not None:
            return self
        with tables.store.status.read() as cur:
            return replace(self, upto=manifest.upto_now(cur, self.txn_id))

    def of(
        self, tables: Tables, tablet: Tablet, sought: manifest.Sought | None = None
    ) -> TabletView:
        """Return the part of a tablet that this view sees.

        Args:
            sought: as `manifest.staged`, of the own row sets.

        Raises:
            TxnNotFoundError, InvalidTxnStateError: the transaction is not OPEN.
            HistoryExpiredError: what the snapshot needs may have been collected.
        """
        staged: Sequence[RowSetInfo] = ()
        if self.txn_id is not None:
            with tables.store.status.read() as cur:
                # Aborted by another process, it would read as if it had written nothing.
                status_table.get_open(cur, self.txn_id, "read")
                staged = manifest.staged(cur, self.txn_id, tablet.id, None, self.upto, sought)
        state = tablet.state(self.snapshot)
        require_history(tables, tablet, self.snapshot)
        own = None if self.own is None else self.own.memory(tablet.id)
        return TabletView.of(tablet, self.snapshot, state, own, staged, sought=sought)

    def pinned(self, tables: Tables, tablets: Sequence[Tablet]) -> tuple[list[TabletView], Pins]:
        """Return the views of some tablets, by one manifest version, and the pins that keep that
        readable while they are held.

        Raises:
            As `of`.
        """
        while True:
            version = min((tablet.state(self.snapshot).version for tablet in tablets), default=0)
            pins = Pins(tables.store.runtime, self.snapshot, version)
            try:
                tables.log.latest()  # what was published before the pins were is seen from here on
                views = [self.of(tables, tablet) for tablet in tablets]
            except BaseException:
                pins.release()
                raise
            if all(view.state.version == version for view in views):
                return views, pins
            pins.release()


def require_history(tables: Tables, tablet: Tablet, snapshot: Timestamp) -> None:
    """Refuse a snapshot of which versions may be gone; asked after the state was taken.

    Raises:
        HistoryExpiredError: it lies below the history floor.
    """
    if snapshot < tablet.floor:
        table = tablet.table.name if tablet.has_own_history else None
        raise history.expired(tables.coordinator, snapshot, tablet.floor, table)


class Pins:
    """Pins a snapshot and a manifest version until it is dropped or released."""

    def __init__(self, runtime: Runtime, snapshot: Timestamp, version: int) -> None:
        self.snapshot = snapshot
        self.version = version
        self._held = runtime.hold_snapshot(snapshot), runtime.hold_manifest(version)

    def release(self) -> None:
        """Take the pins back. Twice is fine."""
        for one in self._held:
            one.end()
