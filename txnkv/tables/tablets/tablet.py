"""A tablet: one partition of a table, and the order of the layers that its rows lie in.

A key is looked for in layers one above the other. What is found in one hides the key in those
below, be it a row or the mark that it was deleted:

    own memory            what a transaction wrote, while it is small
    in flight             the chunk of a write that is not staged yet
    own staged row sets   what it wrote since, the newest first
    committed memory      entries with flushed < stamp <= snapshot
    unresolved row sets   of commits whose finalization goes on, the newest first
    settled row sets      rows with insert <= snapshot < delete

Settled row sets hide nothing: where a row of one was replaced, it has a delete stamp. A row set
is unresolved while those stamps may be missing, and so hides by its keys the rows that are older
than it. A settled row set that was written or merged since may hold newer rows and older ones:
those rows of it that are newer than an unresolved row set are looked for before that.

    unresolved, at 12     a b c
    settled, 5 to 20      a@5  b@20         1. settled from 12 on: b   2. unresolved: a, c
                                            3. settled, the rest

`TabletView.steps` and `TabletView.above` are this order, for who looks for keys and for who reads
a row set whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, NamedTuple

from txnkv import core
from txnkv.coordinator import MAX_TIMESTAMP, CommitLog, Timestamp, held
from txnkv.errors import CorruptionError
from txnkv.storage import EPOCH, GATE, READ_ID, CachedProperty, Store, brief, new_lock, new_rlock
from txnkv.tables import table_history
from txnkv.tables.table_catalog import TableInfo
from txnkv.tables.tablets import manifest
from txnkv.tables.tablets.manifest import TOMBSTONES, KnownKeys, RowSetInfo, Sought
from txnkv.tables.tablets.memory import CommittedMemory
from txnkv.tables.tablets.row_set import FEW_KEYS, RowSet
from txnkv.tables.tablets.tablet_files import Pages, TabletFiles

EVERY_STAMP: Final = int(MAX_TIMESTAMP)
"""Entries of a transaction's own memory are stamped by its statements: all count."""


class Step(NamedTuple):
    """A row set in which a key is looked for, when its turn has come.

    Attributes:
        before: rows inserted below this stamp are hidden by a later step.
        hides: no key of it is looked for any further, whether its row is seen or not.
    """

    info: RowSetInfo
    before: int = 0
    hides: bool = False


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

    @CachedProperty
    def unresolved(self) -> tuple[RowSetInfo, ...]:
        """Those that hide rows of others by key, latest first."""
        return tuple(sorted((i for i in self.infos if not i.resolved), key=_latest_first))

    @CachedProperty
    def settled(self) -> tuple[RowSetInfo, ...]:
        """Rows whose own stamps and deletes say who sees them, latest first."""
        return tuple(sorted((i for i in self.infos if i.resolved), key=_latest_first))

    @CachedProperty
    def highest(self) -> Timestamp:
        """The highest insert stamp of all; 0 when there are no row sets."""
        return max((i.stamp for i in self.infos if i.stamp is not None), default=Timestamp(0))

    @CachedProperty
    def newest(self) -> int:
        """The highest stamp of an insert or a delete in a row set; 0 when there are none."""
        return max((max(i.stamp or 0, i.max_delete) for i in self.infos), default=0)

    def steps(self, snapshot: int) -> tuple[Step, ...]:
        """The row sets that a snapshot sees, in the order in which a key is looked for."""
        return self.every_step if snapshot >= self.highest else _steps(*self.seen_at(snapshot))

    @CachedProperty
    def every_step(self) -> tuple[Step, ...]:
        """The same for a snapshot that sees all of them."""
        return _steps(self.unresolved, self.settled)

    def seen_at(self, snapshot: int) -> tuple[tuple[RowSetInfo, ...], tuple[RowSetInfo, ...]]:
        """The unresolved and the settled row sets that a snapshot sees, the newest first."""
        if snapshot >= self.highest:
            return self.unresolved, self.settled
        return (
            tuple(info for info in self.unresolved if first_stamp(info) <= snapshot),
            tuple(info for info in self.settled if first_stamp(info) <= snapshot),
        )


def _latest_first(info: RowSetInfo) -> tuple[int, int, int]:
    return (-(info.stamp or 0), -info.staged_seq, -info.id)


def _steps(unresolved: Sequence[RowSetInfo], settled: Sequence[RowSetInfo]) -> tuple[Step, ...]:
    steps = []
    for mask in unresolved:
        newer = ((info, hidden_before(mask, info)) for info in settled)
        steps += [Step(info, before) for info, before in newer if before != EVERY_STAMP]
        steps.append(Step(mask, hides=True))
    return (*steps, *map(Step, settled))


def first_stamp(info: RowSetInfo) -> int:
    """The lowest insert stamp of a committed row set."""
    return int(info.min_stamp if info.min_stamp is not None else info.stamp or 0)


def _rank(info: RowSetInfo) -> tuple[int, int, int]:
    """Among committed row sets of which one is uniform: which hides the other."""
    return int(info.stamp or 0), info.staged_seq or 0, info.id


def hidden_before(mask: RowSetInfo, info: RowSetInfo) -> int:
    """Rows of `info` inserted below this stamp are hidden by an unresolved row set; 0: none."""
    if info.uniform or not info.resolved:
        return EVERY_STAMP if _rank(mask) > _rank(info) else 0
    stamp = int(mask.stamp or 0)
    if int(info.stamp or 0) < stamp:
        return EVERY_STAMP
    return stamp if first_stamp(info) < stamp else 0


@dataclass(frozen=True)
class InFlight:
    """A chunk of the same write that is not staged yet.

    Attributes:
        deletes: its keys are gone, not there.
    """

    keys: core.Keys
    deletes: bool


@dataclass(frozen=True)
class TabletView:
    """The layers of a tablet for a snapshot, or for a transaction at one.

    Attributes:
        state: what is committed.
        own: the transaction's memory; None when there is nothing in it.
        staged: its row sets, the newest first.
        flight: the chunk that it is staging.
        unresolved: row sets that hide what is older by their keys, the newest first.
        settled: all other committed row sets that the snapshot sees, the newest first.
        sought: keys that were looked for in its row sets before.
    """

    tablet: Tablet
    snapshot: Timestamp
    state: TabletState
    own: core.MemRowSet | None
    staged: tuple[RowSetInfo, ...]
    flight: InFlight | None
    unresolved: tuple[RowSetInfo, ...]
    settled: tuple[RowSetInfo, ...]
    sought: Sought | None = None

    @classmethod
    def of(
        cls,
        tablet: Tablet,
        snapshot: Timestamp,
        state: TabletState | None,
        own: core.MemRowSet | None = None,
        staged: Sequence[RowSetInfo] = (),
        flight: InFlight | None = None,
        sought: Sought | None = None,
    ) -> TabletView:
        """Sort the row sets by what they hide.

        Args:
            state: None for a writer that sees nothing of what is committed.
            sought: of the own row sets these are those that may have these keys.
        """
        state = state or TabletState(0, snapshot, (), core.MemRowSet(tablet.codec.width))
        newest = sorted(staged, key=lambda info: (info.staged_seq, info.id), reverse=True)
        if own is not None and own.n == 0:
            own = None
        layers = own, tuple(newest), flight, *state.seen_at(snapshot)
        return cls(tablet, snapshot, state, *layers, sought)

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
        every = (*self.staged, *self.unresolved, *self.settled)
        return tuple(info for info in every if info.kind != TOMBSTONES)

    def staged_steps(self, keys: core.Keys) -> tuple[list[Step], core.Rows | None]:
        """The own row sets that may have some of `keys`, in the order in which these are looked
        for; and the positions of the keys that may be in these. None: all of them.
        """
        if not self.staged or keys.n == 0:
            return [], None
        known = self.sought.known if self.sought and self.sought.keys is keys else None
        known = known or self.tablet.known_staged(keys)
        steps = [Step(info, hides=True) for info in self.staged if not known.lacks(info.id)]
        every = all(known.has(step.info.id) for step in steps)
        return steps, known.positions if every and known.positions.n < keys.n else None

    @property
    def steps(self) -> tuple[Step, ...]:
        """The committed row sets in the order in which a key is looked for."""
        return self.state.steps(self.snapshot)

    def above(self, info: RowSetInfo) -> list[tuple[RowSetInfo, int]]:
        """The row sets whose keys hide rows of another, and below which insert stamp."""
        if info.stamp is None:
            return self.above_memory[: self._newer[info.id]]
        unresolved = [(mask, hidden_before(mask, info)) for mask in self.unresolved]
        return [*self.above_memory, *((mask, before) for mask, before in unresolved if before)]

    @CachedProperty
    def above_memory(self) -> list[tuple[RowSetInfo, int]]:
        """The row sets whose keys hide entries of committed memory, as `above`."""
        return [(mask, EVERY_STAMP) for mask in self.staged if _hides(mask)]

    @CachedProperty
    def _newer(self) -> dict[int, int]:
        """By staged row set, how many of `above_memory` are newer."""
        before = accumulate(map(_hides, self.staged), initial=0)
        return {info.id: n for info, n in zip(self.staged, before, strict=False)}


def _hides(info: RowSetInfo) -> bool:
    """Return True when a row set that is not resolved hides older rows by its keys."""
    return info.supersedes or info.kind == TOMBSTONES


_NOTED_ROWS: Final = 1 << 16
_NOTED_KEYS: Final = 1 << 23


class _StagedKeys:
    """The keys of small row sets that are staged, as far as they were looked into; about 8 bytes
    each, up to `_NOTED_KEYS`. Shared by threads.
    """

    def __init__(self) -> None:
        self._lock = new_lock()
        self._begin()

    def _begin(self) -> None:
        self._owners = core.KeyOwners()
        self._numbers: dict[int, int] = {}
        self._rows: dict[int, int] = {}
        self._due = _NOTED_KEYS // 16

    def __contains__(self, id: int) -> bool:
        return id in self._numbers

    def to_look_at(self) -> set[int]:
        """Ids of the row sets, once for so many keys more: those that are gone are to be forgotten;
        else none.
        """
        with self._lock:
            if self._owners.n < self._due:
                return set()
            self._due = self._owners.n + _NOTED_KEYS // 16
            return set(self._rows)

    def add(self, id: int, keys: Sequence[core.Keys]) -> None:
        """Take in the keys of a row set, by its id."""
        rows = sum(some.n for some in keys)
        with self._lock:
            if id not in self._numbers and self._owners.n + rows <= _NOTED_KEYS:
                number = len(self._numbers)
                for some in keys:
                    self._owners.add(some, number)
                self._numbers[id], self._rows[id] = number, rows

    def look(self, keys: core.Keys) -> KnownKeys:
        """Look for some keys."""
        with self._lock:
            below = len(self._numbers)
            found = self._owners.find(keys, below)
            if found is None:
                return KnownKeys({}, 0, frozenset(), core.Rows.range(keys.n))
            may = frozenset(found[0].to_arrow().to_pylist())
            return KnownKeys(self._numbers, below, may, found[1])

    def forget(self, ids: Collection[int]) -> None:
        """Forget row sets that are not staged any more; the rest too, where little is left."""
        with self._lock:
            for id in self._rows.keys() & ids:
                del self._rows[id]
            if self._owners.n > 2 * sum(self._rows.values()):
                self._begin()
            elif self._owners.n > _NOTED_KEYS // 2:
                self._due = 0


class Tablet(TabletFiles):
    """One tablet in this process. Shared by threads.

    Attributes:
        turn: of the thread that finalizes commits in it, see `intents`.
    """

    def __init__(
        self, store: Store, table: TableInfo, number: int, log: CommitLog, memory: CommittedMemory
    ) -> None:
        super().__init__(store, table, number)
        self.turn = new_rlock()
        self._log = log
        self._memory = memory
        self._state: TabletState | None = None
        self._own_floor: Timestamp | None = None
        self._row_sets: dict[int, RowSet] = {}
        self._staged_keys = _StagedKeys()
        self.published: Any = None  # of `read.point`
        self.at_hand = core.PublishedRows(EPOCH, log.shown, READ_ID)

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

    @property
    def has_own_history(self) -> bool:
        """The floor is that of the table's own history."""
        return self._own_floor is not None

    @property
    def floor(self) -> Timestamp:
        """No snapshot below it can be read here, as of the state that was taken last."""
        return self._log.history_floor if self._own_floor is None else self._own_floor

    @brief
    def reload(self) -> TabletState:
        """The state as status.db has it now."""
        with GATE.use(), self._log.lock:
            with self._store.status.read(durable=False) as cur:
                found = manifest.committed_state(cur, self.id)
                own = table_history.of_table(cur, self.table.history_id)
            self._log.raise_floor(found.floor)
            self._own_floor = None if own is None else own.floor
            self._memory.drop_flushed(self.id, found.flushed)
            memory = self._memory.of(self.id, self.codec.width)
            self.published = None
            self.at_hand.take_away()
            state = self._state = TabletState(found.version, found.flushed, found.infos, memory)
            # What is left out here is loaded again for who still reads it: an older state, a
            # transaction of its own. Kept, it would never go in a process that only reads.
            live = {info.id for info in found.infos}
            self._row_sets = {id: each for id, each in self._row_sets.copy().items() if id in live}
            self._staged_keys.forget(live)
            return state

    def row_set(self, info: RowSetInfo) -> RowSet:
        found = self._row_sets.get(info.id)
        if found is None:
            found = self._row_sets.setdefault(info.id, RowSet(self, info))
        elif found.info is not info:
            found.adopt(info)
        return found

    def sought(self, keys: core.Keys) -> Sought:
        """Keys (at least one; more than `FEW_KEYS` ascending) to look for in own row sets."""
        ends = keys.key(0), keys.key(keys.n - 1)
        if keys.n <= FEW_KEYS:
            few = [keys.key(i) for i in range(keys.n)]
            ends = min(few), max(few)
        return Sought(keys, *ends, self.known_staged(keys))

    def that_may_have(self, keys: core.Keys, infos: Sequence[RowSetInfo]) -> list[RowSetInfo]:
        """Those of some row sets that may have one of the keys."""
        known = self.known_staged(keys)
        return [info for info in infos if not known.lacks(info.id)]

    def known_staged(self, keys: core.Keys) -> KnownKeys:
        """Tell what is known of keys in small row sets that are staged."""
        return self._staged_keys.look(keys)

    def note_staged(self, row_set: RowSet, pages: Pages) -> None:
        """Remember the keys of a small row set that is staged: a transaction may have thousands,
        and each of its writes asks them all.
        """
        info = row_set.info
        if info.stamp is None and info.rows <= _NOTED_ROWS and info.id not in self._staged_keys:
            blocks = row_set.header(pages).blocks
            self._staged_keys.add(info.id, [row_set.keys(pages, i) for i in range(len(blocks))])
            if ids := self._staged_keys.to_look_at():  # others may have ended their transactions
                with self._store.status.read() as cur:
                    self._staged_keys.forget(ids - manifest.known_ids(cur, self.id))

    def forget(self, row_set_ids: Iterable[int]) -> None:
        ids = set(row_set_ids)
        for id in ids:
            self._row_sets.pop(id, None)
        self._staged_keys.forget(ids)
