"""Which keys are there, for a transaction that is about to change them.

A key is looked for in layers, the newest first; the first that knows it decides:

    own memory              rows and tombstones of a small transaction
    the chunk in flight     of the same write, not yet staged
    own staged row sets     the last one first; TOMBSTONES say that a key is gone
    committed memory        entries that are not flushed, up to the snapshot
    being finalized         row sets of other transactions past their commit point
    disk row sets           those never have a key twice at one snapshot

All of it goes by sorted keys, many at a time. Where the key lies is kept, so that columns which
an update leaves out can be gathered from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from txnkv import core
from txnkv.coordinator import Timestamp
from txnkv.core import compute as pc
from txnkv.tables.tablets import LARGE_CHECK, TOMBSTONES, RowSetInfo, Tablet, TabletState

Gather = Callable[[Sequence[str]], list[pa.Array]]
"""The values of some columns, of the rows that were found in one place."""

_NONE: Final = pa.nulls(0, pa.uint32())


@dataclass(frozen=True)
class Hit:
    """Rows that were found in one place.

    Attributes:
        positions: of the keys asked for, ascending.
        own: the transaction wrote them itself.
        gather: reads columns of these rows, in this order.
    """

    positions: pa.UInt32Array
    own: bool
    gather: Gather


@dataclass
class Presence:
    """The result of a look for n keys, strictly ascending: which are there, and where.

    Attributes:
        hits: where rows were found; no key is in two of them.
    """

    n: int
    hits: list[Hit] = field(default_factory=list)
    _decided: core.Bitmap | None = None

    @property
    def positions(self) -> pa.UInt32Array:
        """The keys that are there, ascending."""
        if not self.hits:
            return _NONE
        if len(self.hits) == 1:
            return self.hits[0].positions
        return self.bitmap.positions().to_arrow()

    @property
    def bitmap(self) -> core.Bitmap:
        """A bit for each key that is there."""
        if not self.hits:
            return core.Bitmap.none(self.n)
        return core.Bitmap.of(self.n, pa.concat_arrays([hit.positions for hit in self.hits]))

    def undecided(self, positions: pa.UInt32Array) -> pa.BooleanArray | None:
        """Which of these no newer layer has decided; None for all."""
        if self._decided is None:
            return None
        return pc.invert(self._decided.to_arrow().take(positions))

    def decide(self, positions: pa.UInt32Array) -> None:
        """Whatever older layers have of these is hidden."""
        if len(positions):
            known = core.Bitmap.of(self.n, positions)
            self._decided = known if self._decided is None else self._decided.or_(known)


@dataclass(frozen=True)
class InFlight:
    """A chunk of the same write that is not staged yet.

    Attributes:
        deletes: its keys are gone, not there.
    """

    keys: core.Keys
    deletes: bool


@dataclass(frozen=True)
class Layers:
    """The layers in which a transaction's keys are looked for, in one tablet.

    Attributes:
        state: what is committed, for `snapshot`; None for a writer that sees nothing of it.
        staged: the transaction's own row sets, the oldest first.
        own: its memory.
        flight: the chunk in flight.
    """

    tablet: Tablet
    snapshot: Timestamp
    state: TabletState | None
    staged: Sequence[RowSetInfo] = ()
    own: core.MemRowSet | None = None
    flight: InFlight | None = None

    def look(self, keys: core.Keys) -> Presence:
        """Which of `keys`, strictly ascending, are there.

        Raises:
            RowSetRetired: the state is too old; take a new one.
        """
        found = Presence(keys.n)
        if keys.n == 0:
            return found
        if self.own is not None:
            _from_memory(found, self.tablet, self.own, keys, 0, core.STAMP_NEVER, own=True)
        if self.flight is not None:
            self._from_flight(found, self.flight, keys)
        self._from_row_sets(found, list(reversed(self.staged)), keys, own=True)
        if self.state is not None:
            memory, after = self.state.memory, self.state.flushed
            _from_memory(found, self.tablet, memory, keys, after, self.snapshot, own=False)
            infos = committed_layers(self.state, self.snapshot)
            self._from_row_sets(found, infos, keys, own=False)
        return found

    def _from_flight(self, found: Presence, flight: InFlight, keys: core.Keys) -> None:
        doubles = core.mark_common(keys, flight.keys)
        if not doubles.count:
            return
        positions = doubles.positions().to_arrow()
        if not flight.deletes:
            found.hits.append(Hit(positions, True, _not_staged))
        found.decide(positions)

    def _from_row_sets(
        self, found: Presence, infos: Sequence[RowSetInfo], keys: core.Keys, *, own: bool
    ) -> None:
        low, high = keys.key(0), keys.key(keys.n - 1)
        infos = [info for info in infos if info.overlaps(low, high)]
        large = sum(info.rows for info in infos) * len(low) > LARGE_CHECK
        for info in infos:
            row_set = self.tablet.row_set(info)
            with self.tablet.read(once=large) as pages:
                positions = row_set.common(pages, keys, self.snapshot)
            if not len(positions):
                continue
            fresh = found.undecided(positions)
            if fresh is not None:
                positions = positions.filter(fresh)
            if len(positions) and info.kind != TOMBSTONES:
                found.hits.append(Hit(positions, own, self._gather(info, keys, positions)))
            if own or not info.resolved:
                found.decide(positions)

    def _gather(self, info: RowSetInfo, keys: core.Keys, positions: pa.UInt32Array) -> Gather:
        def gather(names: Sequence[str]) -> list[pa.Array]:
            probes = keys.gather(core.Rows.from_arrow(positions))
            row_set = self.tablet.row_set(info)
            pieces: list[list[pa.Array]] = [[] for _ in names]
            with self.tablet.read(once=info.size > LARGE_CHECK) as pages:
                for number, _, hits in row_set.find_many(pages, probes, self.snapshot):
                    rows = core.Rows.from_arrow(hits.drop_null())
                    arrays = row_set.gather(pages, number, names, rows)
                    for piece, array in zip(pieces, arrays, strict=True):
                        piece.append(array)
            return [pa.concat_arrays(piece) for piece in pieces]

        return gather


def committed_layers(state: TabletState, snapshot: Timestamp) -> list[RowSetInfo]:
    """The committed row sets that a snapshot may see rows of; what hides others stands first.

    Nothing that is flushed or compacted has rows on both sides of a row set that still hides
    others: both first settle what is being finalized at or below their highest stamp.
    """
    seen = [
        info
        for info in state.infos
        if info.stamp is not None and (info.min_stamp or info.stamp) <= snapshot
    ]
    if any(not info.resolved for info in seen):
        seen.sort(key=lambda info: (info.stamp or 0, info.staged_seq, info.id), reverse=True)
    return seen


def _from_memory(
    found: Presence,
    tablet: Tablet,
    memory: core.MemRowSet,
    keys: core.Keys,
    after: int,
    upto: int,
    *,
    own: bool,
) -> None:
    entries, where = _entries_of(memory, keys, after, upto)
    if entries is None:
        return
    positions = where
    kinds = entries.kinds
    rows = core.Rows.range(entries.n).to_arrow()
    known = pc.and_(pc.greater(kinds, 0), pc.is_valid(positions))
    fresh = found.undecided(pc.fill_null(positions, 0))
    if fresh is not None:
        known = pc.and_(known, fresh)
    if not known.true_count:
        return
    there = pc.and_(known, pc.equal(kinds, 1))
    if there.true_count:
        picked = core.Rows.from_arrow(rows.filter(there))

        def gather(names: Sequence[str]) -> list[pa.Array]:
            columns = [tablet.value_names.index(name) for name in names]
            return list(entries.columns(tablet.layout, columns, picked))

        found.hits.append(Hit(positions.filter(there), own, gather))
    found.decide(positions.filter(known))


def _entries_of(
    memory: core.MemRowSet, keys: core.Keys, after: int, upto: int
) -> tuple[Any, pa.UInt32Array]:
    """Entries, and for each the position of its key in `keys`, null where it is not one."""
    if memory.n == 0 or upto <= after:
        return None, _NONE
    if memory.n >= keys.n:
        entries = memory.lookup(keys, after, upto)
        return entries, core.Rows.range(keys.n).to_arrow()
    entries = memory.select(keys.key(0), keys.key(keys.n - 1) + b"\0", after, upto)
    if entries.n == 0:
        return None, _NONE
    where = core.find(keys, entries.keys)
    where = pc.if_else(pc.greater_equal(where, 0), where, pa.scalar(None, pa.int32()))
    return entries, where.cast(pa.uint32())


def _not_staged(names: Sequence[str]) -> list[pa.Array]:
    raise AssertionError("rows in flight are staged before their columns are asked for")


def by_position(hits: Sequence[tuple[pa.UInt32Array, list[pa.Array]]]) -> Iterator[pa.Array]:
    """Columns of rows from several places, put together in the order of their positions."""
    if len(hits) == 1:
        yield from hits[0][1]
        return
    order = pc.sort_indices(pa.concat_arrays([positions for positions, _ in hits]))
    for pieces in zip(*(arrays for _, arrays in hits), strict=True):
        yield pa.concat_arrays(pieces).take(order)
