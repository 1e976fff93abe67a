"""Resolution: what a commit replaced gets delete stamps, and its row sets hide nothing any more.

Between its commit point and its end a bulk transaction's row sets hide by key the rows that they
replace or delete. Readers pay for that, so finalization looks up where those rows lie, once, and
puts delete stamps beside them:

    row set 7    k1  k2  k3  k4                  row set 7    k1  k2      k3  k4
    row set 9        k2'      (10, replaces)  ->               delete 10
    row set 10           k3   (10, deletes)      row set 9        k2'        delete 10

The stamps are those of a commit that is decided, so they are true from the moment that anybody
can read them, and putting them twice changes nothing: every process may finalize at any time,
and go on after another died.

Two things are kept so that the right row is found:

- Deletes go to COMMITTED row sets alone (and the transaction's own). Whatever committed before
  and is still being finalized is finalized first: `settle`.
- A compaction may retire a row set between the look and the note in status.db. The note says so,
  and the work is done again in that tablet, against what took its place.

A transaction may have thousands of small row sets of its own, each of which replaces rows of those
before. Keys of one that meets many are looked for together with those of others: united in pairs,
the later half in the earlier one, so that a row set is asked as often as the pairs are deep.

Threads that finalize in one tablet of a process take turns: the first does what all of them would
do, and the others find little left. Nothing rests on it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice
from typing import Final

import pyarrow as pa

from txnkv import core
from txnkv.coordinator import Timestamp, TxnRow, TxnState, status_table
from txnkv.core import compute as pc
from txnkv.errors import UnavailableError
from txnkv.storage import declare_fault_point, fault_point
from txnkv.tables.tables import Tables
from txnkv.tables.tablets import (
    KIND,
    ROWS,
    TOMBSTONES,
    Counts,
    Deletes,
    RowSetInfo,
    RowSetRetired,
    Tablet,
    TabletState,
    keys_of,
    manifest,
    put_deletes,
)

_ROWS_AT_ONCE: Final = 1 << 18
"""So many delete stamps are gathered before they are put."""

_SMALL_ROWS: Final = 1 << 16
_SMALL_BYTES: Final = 8 << 20
"""Row sets of less are looked for together."""

_KEYS_AT_ONCE: Final = 16 << 20
"""Bytes of keys that are looked for together, about."""

_MANY: Final = 64
"""Own row sets that keys are looked for in by themselves, at most."""

_NEAR: Final = 4
"""So many of the newest before are asked first: what is written over and over is found there."""

_FEW: Final = 32
"""One of so many keys is looked for on and on: to take it out would copy the others."""

declare_fault_point("resolve.put", "some of a commit's delete stamps are durable")
declare_fault_point("resolve.resolved", "all of a commit's delete stamps are durable")


def settle(tables: Tables, tablet_ids: Sequence[int], upto: Timestamp) -> bool:
    """Finalize all that committed at or below `upto` in these tablets, the earliest first.

    Returns:
        False when that failed in some tablet: see `require_settled`.
    """
    decided = _decided(tables, tablet_ids, upto)
    for _, txn_id in decided:
        tables.coordinator.orchestrator.finish(txn_id)
    return not decided or not _decided(tables, tablet_ids, upto)


def require_settled(tables: Tables, tablet: Tablet, upto: Timestamp) -> None:
    """Refuse a tablet in which `settle` failed.

    Raises:
        TxnkvError: why.
    """
    for _, txn_id in _decided(tables, [tablet.id], upto):
        with tables.store.status.read() as cur:
            left = manifest.staged(cur, txn_id, tablet.id)
        if left:
            raise tables.coordinator.damage.error(tablet.label) or UnavailableError(
                f"{tablet.label}: what transaction {txn_id} committed there is not in its place "
                "yet. Try it again"
            )


def _decided(
    tables: Tables, tablet_ids: Sequence[int], upto: Timestamp
) -> list[tuple[Timestamp, int]]:
    """Return the commit timestamps, ascending, and ids of transactions that committed in these
    tablets at or below `upto` and are not finalized in all of theirs.
    """
    with tables.store.status.read() as cur:
        return status_table.decided(cur, KIND, tablet_ids, upto)


def supersede(
    tablet: Tablet, state: TabletState, keys: core.Keys, stamps: int | pa.UInt64Array
) -> Deletes:
    """Find the rows that newer versions of these keys replace.

    Args:
        state: committed row sets; those that are visible just before a key's stamp are looked
            through.
        keys: strictly ascending.
        stamps: commit timestamps, of each key or of all.

    Returns:
        Row numbers and delete stamps by row set.

    Raises:
        RowSetRetired: the state is too old; take a new one.
    """
    deletes: Deletes = {}
    if keys.n == 0:
        return deletes
    low, high = keys.key(0), keys.key(keys.n - 1)
    one = pa.scalar(1, pa.uint64())
    before: int | pa.UInt64Array = (
        stamps - 1 if isinstance(stamps, int) else pc.subtract(stamps, one)
    )
    highest = before if isinstance(before, int) else pc.max(before).as_py()
    for info in state.infos:
        least = info.min_stamp if info.min_stamp is not None else info.stamp
        if info.kind != ROWS or not info.overlaps(low, high) or (least or 0) > highest:
            continue
        with tablet.read() as pages:
            positions, rows = tablet.row_set(info).locate(pages, keys, before)
        if len(rows):
            killed = (
                pa.repeat(pa.scalar(stamps, pa.uint64()), len(rows))
                if isinstance(stamps, int)
                else stamps.take(positions)
            )
            deletes[info.id] = (rows, killed)
    return deletes


@contextmanager
def _turns(tables: Tables, tablet_ids: Sequence[int]) -> Iterator[None]:
    """Have the turn in these tablets. They are waited for in one order; inside, where an earlier
    commit is finalized first, those of its tablets that others have are not waited for.
    """
    tablets = [each for each in map(tables.tablet, sorted(tablet_ids)) if each is not None]
    inside = _here.inside
    with ExitStack() as held:
        for tablet in tablets:
            if tablet.turn.acquire(blocking=not inside):
                held.callback(tablet.turn.release)
        _here.inside = True
        held.callback(setattr, _here, "inside", inside)
        yield


class _Here(threading.local):
    inside = False


_here: Final = _Here()


class _Replaced(Exception):
    """A row set of a tablet was replaced before the deletes that it got were noted. No error of the
    store's, so that `Damage.each` does not take it for damage.
    """

    def __init__(self, tablet_id: int) -> None:
        super().__init__(tablet_id)
        self.tablet_id = tablet_id


class Resolution:
    """The resolution of one transaction that is past its commit point.

    Args:
        row: of the transaction.
        ids: of its tablets.
    """

    def __init__(self, tables: Tables, row: TxnRow, ids: Sequence[int]) -> None:
        assert row.commit_ts is not None
        self._tables = tables
        self._row = row
        self._ids = ids
        self._commit_ts = row.commit_ts
        self._staged: dict[int, list[RowSetInfo]] = {}
        self._gone: dict[int, Sequence[RowSetInfo]] = {}  # where one was, by tablet

    def finalize(self) -> dict[int, Exception]:
        """Stamp what was replaced, give the transaction's rows their plain stamp.

        Returns:
            Errors by tablet. There nothing is stamped: its row sets go on hiding rows by key.
        """
        with _turns(self._tables, self._look()):
            return self._finalize()

    def _look(self) -> list[int]:
        """Look at what is left to do; return the tablets in which something is replaced."""
        with self._tables.store.status.read() as cur:
            self._staged = {
                id: _in_order(manifest.staged(cur, self._row.txn_id, id)) for id in self._ids
            }
        return [id for id, infos in self._staged.items() if any(map(_replaces, infos))]

    def _finalize(self) -> dict[int, Exception]:
        noted: dict[int, Counts] = {}
        while True:
            replacing = self._look()  # another thread may have done it when its turn came before
            left = [id for id in replacing if id not in noted]
            try:  # a compaction, or another process that finalizes the same, may be quicker
                failed = self._resolve(left, noted) if left else {}
                for id in failed:
                    del self._staged[id]
                self._note(noted)
                return failed
            except _Replaced as error:
                noted.pop(error.tablet_id, None)

    def _note(self, noted: Mapping[int, Counts]) -> None:
        """One change of the manifest, of all or of nothing."""
        with self._tables.store.status.write() as cur:
            if status_table.get(cur, self._row.txn_id).state is not TxnState.FINALIZE_IN_PROGRESS:
                return  # another process has ended it
            for tablet_id, counts in noted.items():
                for id, (deleted, last) in counts.items():
                    if not manifest.set_deleted(cur, id, deleted, last):
                        raise _Replaced(tablet_id)
            tombstones = [
                info.id
                for infos in self._staged.values()
                for info in infos
                if info.kind == TOMBSTONES
            ]
            if tombstones:
                manifest.retire(cur, tombstones, manifest.bump(cur))
            manifest.finalize(cur, self._row.txn_id, self._commit_ts, self._staged)

    def _resolve(self, tablet_ids: Sequence[int], noted: dict[int, Counts]) -> dict[int, Exception]:
        """Put the delete stamps.

        Args:
            noted: takes what is counted, by tablet.

        Returns:
            Errors by tablet.

        Raises:
            _Replaced: a compaction was quicker in a tablet; those before it are done.
        """

        def resolve(tablet: Tablet) -> None:
            if not settled:
                require_settled(self._tables, tablet, before)
            tablet.state(self._commit_ts)  # all that committed before is known here
            state = tablet.reload()
            try:
                noted[tablet.id] = self._put(tablet, state)
            except RowSetRetired:
                if self._gone.get(tablet.id) == state.infos:  # and nothing takes its place
                    raise
                self._gone[tablet.id] = state.infos
                raise _Replaced(tablet.id) from None

        before = Timestamp(self._commit_ts - 1)
        settled = settle(self._tables, tablet_ids, before)
        failed = self._tables.each(tablet_ids, "what a commit replaced", resolve)
        fault_point("resolve.resolved")
        return failed

    def _put(self, tablet: Tablet, state: TabletState) -> Counts:
        # With its stamp a row set is what other readers of this process have it for.
        own = [
            replace(info, stamp=self._commit_ts, min_stamp=self._commit_ts)
            for info in self._staged[tablet.id]
        ]
        noted: Counts = {}
        dead: dict[int, list[pa.UInt32Array]] = {}
        gathered = 0

        def put() -> None:
            nonlocal gathered
            deletes: Deletes = {}
            for id, some in dead.items():
                every = pa.concat_arrays(some)  # some of them twice, in no order
                bits = core.Bitmap.of(pc.max(every).as_py() + 1, every)
                rows = bits.positions().to_arrow()
                deletes[id] = rows, pa.repeat(pa.scalar(self._commit_ts, pa.uint64()), len(rows))
            dead.clear()
            gathered = 0
            if deletes:
                noted.update(put_deletes(tablet, deletes, lambda txn: None))
                fault_point("resolve.put")

        def dies(id: int, rows: pa.UInt32Array) -> None:
            nonlocal gathered
            if len(rows):
                dead.setdefault(id, []).append(rows)
                gathered += len(rows)

        def look(earlier: Sequence[RowSetInfo], keys: core.Keys) -> None:
            left = _find(tablet, earlier, keys, dies)
            for id, (rows, _) in supersede(tablet, state, left, self._commit_ts).items():
                dies(id, rows)
            if gathered >= _ROWS_AT_ONCE:
                put()

        _look_for_all(tablet, own, look, dies)
        put()
        return noted


_Dies = Callable[[int, pa.UInt32Array], None]
"""Told of a row set, by its id, and of rows in it that something replaces; of some twice."""


def _look_for_all(
    tablet: Tablet,
    own: Sequence[RowSetInfo],
    look: Callable[[Sequence[RowSetInfo], core.Keys], None],
    dies: _Dies,
) -> None:
    """Look for what own row sets replace: for the keys of a small one, above many that it meets,
    together with those of others, for each look asks all these.
    """
    run: list[tuple[RowSetInfo, core.Keys | None]] = []
    size = 0
    for number, info in enumerate(own):
        keys, earlier = None, own[:number]
        met = _met(info, earlier) if _replaces(info) else []
        if len(met) > _MANY and info.rows <= _SMALL_ROWS and info.size <= _SMALL_BYTES:
            every = core.Keys.concat(list(keys_of(tablet, info)))
            keys = _find(tablet, earlier[-_NEAR:], every, dies)
            size += keys.nbytes
        elif _replaces(info):
            for some in keys_of(tablet, info):
                look(met if len(met) <= _MANY else earlier, some)
        run.append((info, keys))
        if size > _KEYS_AT_ONCE or number == len(own) - 1:
            if (united := _united(tablet, run, dies)) is not None:
                look(own[: number + 1 - len(run)], united)
            run, size = [], 0


def _met(info: RowSetInfo, earlier: Sequence[RowSetInfo]) -> list[RowSetInfo]:
    """Those whose key ranges meet that of a row set; of many the first."""
    low, high = info.min_key, info.max_key
    return list(islice((each for each in earlier if each.overlaps(low, high)), _MANY + 1))


def _united(
    tablet: Tablet, run: Sequence[tuple[RowSetInfo, core.Keys | None]], dies: _Dies
) -> core.Keys | None:
    """Return the keys of a run of row sets; what they replace in each other dies."""
    if len(run) == 1:
        keys = run[0][1]
        return keys if keys is not None and keys.n else None
    half = len(run) // 2
    later = _united(tablet, run[half:], dies)
    if later is not None:
        _find(tablet, [info for info, _ in run[:half]], later, dies)
    earlier = _united(tablet, run[:half], dies)
    if earlier is None or later is None:
        return later if earlier is None else earlier
    return _union(earlier, later)


def _union(a: core.Keys, b: core.Keys) -> core.Keys:
    if b.key(b.n - 1) < a.key(0):
        a, b = b, a
    both = core.Keys.concat([a, b])
    if a.key(a.n - 1) < b.key(0):
        return both
    merger, order = core.Merger([a, b]), []
    while not merger.done:
        for source in merger.exhausted:
            merger.finish(source)
        sources, rows = merger.next(both.n)
        order.append(pc.if_else(pc.equal(sources, 1), pc.add(rows, _u32(a.n)), rows))
    both = both.gather(core.Rows.from_arrow(pa.concat_arrays(order)))
    doubles = core.mark_duplicates(both, None)
    return both.gather(doubles.zeros()) if doubles.count else both


def _u32(number: int) -> pa.UInt32Scalar:
    return pa.scalar(number, pa.uint32())


def _find(tablet: Tablet, infos: Sequence[RowSetInfo], keys: core.Keys, dies: _Dies) -> core.Keys:
    """Find rows of own row sets that have these keys, which later ones replace.

    Returns:
        The keys without most of those that these row sets replace as well: what is older is found
        when their turn comes.
    """
    for info in reversed(infos):
        if keys.n == 0:
            break
        if not info.overlaps(keys.key(0), keys.key(keys.n - 1)):
            continue
        with tablet.read() as pages:
            positions, rows = tablet.row_set(info).locate(pages, keys, None)
        if info.kind == ROWS:
            dies(info.id, rows)
        if _replaces(info) and len(positions) > keys.n // _FEW:
            keys = keys.without(core.Rows.from_arrow(positions))
    return keys


def _in_order(infos: Sequence[RowSetInfo]) -> list[RowSetInfo]:
    """The earliest first. An attempt's row sets came to count at once; their ids go up."""
    return sorted(infos, key=lambda info: (info.staged_seq, info.id))


def _replaces(info: RowSetInfo) -> bool:
    return info.supersedes or info.kind == TOMBSTONES
