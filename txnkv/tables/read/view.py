"""The view of a reader: a snapshot, and inside a transaction also its own writes.

What it sees of a tablet, layer above layer, is a `TabletView`. While it reads, its pins keep its
snapshot and the row sets of its manifest from being collected. A pin is published in the runtime
file before the list of row sets is read; who collects looks at the pins after it has published a
newer list. So either the reader sees the newer list, or the collector sees the pin.

A mask is the keys of one source of a scan that hide rows of the sources below it;
`TabletView.above` says which. It is tried on one block of keys at a time: those of its keys that
lie within the block's are searched in it, so that a few masked rows cost little on a large table,
and the other way round a large mask is never in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import pyarrow as pa

from txnkv import core
from txnkv.coordinator import Timestamp, status_table
from txnkv.core import compute as pc
from txnkv.storage import CachedProperty, Runtime
from txnkv.tables.maintenance import history
from txnkv.tables.read_set import ReadSet
from txnkv.tables.tables import Tables
from txnkv.tables.tablets import (
    EVERY_STAMP,
    Pages,
    RowSet,
    RowSetInfo,
    Tablet,
    TabletView,
    keys_between,
    manifest,
)


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


# -- what hides rows -----------------------------------------------------------------------


@dataclass(frozen=True)
class KeyMask:
    """Keys in memory, strictly ascending."""

    keys: core.Keys
    before: int = EVERY_STAMP

    def between(self, pages: Pages, low: bytes, high: bytes) -> Iterator[core.Keys]:
        """The keys with low <= key <= high."""
        found = keys_between(self.keys, low, high)
        if found.n:
            yield found


@dataclass(frozen=True)
class RowSetMask:
    """The keys of a row set on disk.

    Attributes:
        before: rows inserted below this stamp are hidden.
    """

    row_set: RowSet
    before: int = EVERY_STAMP

    def between(self, pages: Pages, low: bytes, high: bytes) -> Iterator[core.Keys]:
        """The keys with low <= key <= high, in pieces."""
        info = self.row_set.info
        if info.max_key < low or high < info.min_key:
            return
        for number in self.row_set.blocks_between(pages, low, high + b"\0"):
            found = keys_between(self.row_set.keys(pages, number), low, high)
            if found.n:
                yield found


Mask = KeyMask | RowSetMask


class Masks:
    """The masks of one view, for scans: which of them a source has above it.

    Args:
        own: the entries of the transaction's memory, in the range that is read.
        memory: the entries of committed memory that are seen, in that range.
    """

    def __init__(
        self, view: TabletView, own: core.Entries | None, memory: core.Entries | None
    ) -> None:
        self._view = view
        self._own = [KeyMask(own.keys)] if own is not None and own.n else []
        self._memory = [KeyMask(memory.keys)] if memory is not None and memory.n else []

    @property
    def over_memory(self) -> list[Mask]:
        """Above committed memory."""
        return [*self._own, *self._row_sets(self._view.above_memory)]

    def over(self, info: RowSetInfo) -> list[Mask]:
        """Above one row set, those alone whose keys may meet its own."""
        memory = self._own if info.stamp is None else [*self._own, *self._memory]
        low, high, above = info.min_key, info.max_key, self._view.above(info)
        near: list[Mask] = [mask for mask in memory if _meets(mask, info)]
        if info.stamp is not None:
            return near + self._row_sets([one for one in above if one[0].overlaps(low, high)])
        there = zip(self._staged, above, strict=False)  # the newest come first in both
        return near + [mask for mask, (one, _) in there if one.overlaps(low, high)]

    @CachedProperty
    def _staged(self) -> list[Mask]:
        return self._row_sets(self._view.above_memory)

    def _row_sets(self, above: Sequence[tuple[RowSetInfo, int]]) -> list[Mask]:
        return [RowSetMask(self._view.tablet.row_set(info), before) for info, before in above]


def _meets(mask: KeyMask, info: RowSetInfo) -> bool:
    keys = mask.keys
    return info.overlaps(keys.key(0), keys.key(keys.n - 1))


def hidden(
    pages: Pages,
    masks: Sequence[Mask],
    low: bytes,
    high: bytes,
    n: int,
    rows_of: Callable[[core.Keys], pa.UInt32Array],
    inserts: pa.UInt64Array | None = None,
) -> core.Rows | None:
    """Which of some rows in the order of their keys masks hide, ascending; None when none is.

    Args:
        pages: a read, for masks that lie on disk.
        masks: what is above.
        low, high: the first and last key of the rows.
        n: how many rows.
        rows_of: those that have one of some keys, ascending.
        inserts: the insert stamps of the rows; needed by masks that hide older rows alone, and
            None where all rows have the same, which those masks are known to hide then.
    """
    found: list[pa.Array] = []
    for mask in masks:
        for some in mask.between(pages, low, high):
            hits = rows_of(some)
            if mask.before != EVERY_STAMP and inserts is not None:
                older = pc.less(inserts.take(hits), pa.scalar(mask.before, pa.uint64()))
                hits = hits.filter(older)
            if len(hits):
                found.append(hits)
    if not found:
        return None
    if len(found) == 1:
        return core.Rows.from_arrow(found[0])
    return core.Bitmap.of(n, pa.concat_arrays(found)).positions()
