"""Looking after side logs: garbage, retention, compaction. Any process may; one does at a time.

Each step is one LMDB transaction of a few MiB, so writers of the partition wait for
milliseconds, and after a death at any place what was done is done and the next sweep goes on.

    own logs      of garbage go first, as folders; then their rows. A folder without a row is of
                  a writer that died in its first append
    garbage       batches, 16 MiB a step; the row when nothing is left
    retention     committed transactions whose messages are all below the log's start: garbage
    compaction    the least marker first, 4 MiB a step, into the log

Nothing is written, and no write lock taken, when there is nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import lmdb

from txnkv.core import ControlType, encode_control, place
from txnkv.storage import Environment, StaleHandleError, declare_fault_point, fault_point
from txnkv.topics.log import PartitionLog, gathered, pack_runs
from txnkv.topics.sidecar.side_store import (
    SIDE,
    OwnLogs,
    SideChunks,
    SideIndex,
    SideState,
    SideTxn,
)

T = TypeVar("T")

COMPACT_BYTES = 4 << 20
"""Bytes that compaction moves in a step."""
GARBAGE_BYTES = 16 << 20
"""Bytes that are removed in a step."""
_RETIRED_A_STEP: Final = 1000

declare_fault_point("side.retired", "retention gave side batches up, durable")
declare_fault_point("side.dropped", "an own side log is gone, its row is there")
declare_fault_point("side.removed", "a step of garbage is removed from a side log, durable")
declare_fault_point("side.moving", "a step of compaction is in the log, not committed")
declare_fault_point("side.compacted", "a step of compaction is in the log, durable")


@dataclass
class SideSwept:
    """The result of a sweep.

    Attributes:
        moved_bytes: put into the log by compaction.
        removed_bytes: of batches that were given up.
        dropped: side logs of their own that went.
    """

    moved_bytes: int = 0
    removed_bytes: int = 0
    dropped: int = 0


class SideSweep:
    """One sweep over the side logs of a partition.

    Args:
        environment: the partition's.
        own: its own side logs.
        log: of the partition.
        check: called inside of each write; what it raises ends the sweep.
    """

    def __init__(
        self,
        environment: Environment,
        own: OwnLogs,
        log: PartitionLog,
        check: Callable[[], object],
    ) -> None:
        self._environment = environment
        self._own = own
        self._log = log
        self._check = check
        self._done = SideSwept()

    def run(self) -> SideSwept:
        """Does all there is to do."""
        self._own.remove_left()
        if self._needs(self._is_retired):
            while self._environment.write(self._retire):
                fault_point("side.retired")
            fault_point("side.retired")
        if self._needs(_has_garbage):
            self._remove_garbage()
        self._remove_strays()
        if self._needs(_is_movable):
            self._compact()
        return self._done

    def _needs(self, question: Callable[[lmdb.Transaction, SideIndex], bool]) -> bool:
        return self._ask(question) or False

    def _ask(self, question: Callable[[lmdb.Transaction, SideIndex], T]) -> T | None:
        """An answer from the indexes; None while there are none."""
        while True:
            with self._environment.read() as txn:
                try:
                    index = SideIndex(txn, self._environment)
                except KeyError:
                    return None
                except StaleHandleError:
                    continue  # a thread has just made them
                return question(txn, index)

    def _index(self, txn: lmdb.Transaction) -> SideIndex:
        return SideIndex(txn, self._environment)

    # -- retention ---------------------------------------------------------------------

    def _is_retired(self, txn: lmdb.Transaction, index: SideIndex) -> bool:
        start = self._log.start(txn)
        return any(_known(index, txn_id).end_offset <= start for _, txn_id in _first(index))

    def _retire(self, txn: lmdb.Transaction) -> bool:
        """Gives up some; true when there may be more."""
        self._check()
        index, start = self._index(txn), self._log.start(txn)
        for n, (_, txn_id) in enumerate(index.committed()):
            side = _known(index, txn_id)
            if side.end_offset > start:
                return False
            index.discard(txn_id, side)
            if n + 1 == _RETIRED_A_STEP:
                return True
        return False

    # -- garbage -----------------------------------------------------------------------

    def _remove_garbage(self) -> None:
        more = True
        while more:
            dropped = self._owners()
            for txn_id in dropped:
                self._own.drop(txn_id)
                self._done.dropped += 1
                fault_point("side.dropped")
            removed, more = self._environment.write(
                lambda txn, dropped=dropped: self._remove(txn, dropped)  # type: ignore[misc]
            )
            self._done.removed_bytes += removed
            fault_point("side.removed")

    def _owners(self) -> set[int]:
        """Garbage that has a side log of its own."""

        def found(_: lmdb.Transaction, index: SideIndex) -> set[int]:
            return {
                id for id, side in index.all() if side.state is SideState.GARBAGE and side.has_own
            }

        return self._ask(found) or set()

    def _remove(self, txn: lmdb.Transaction, dropped: set[int]) -> tuple[int, bool]:
        """Removes some; how many bytes, and whether there is more."""
        self._check()
        index = self._index(txn)
        chunks = SideChunks(txn, self._environment.db(SIDE))
        removed = 0
        while (txn_id := index.garbage()) is not None:
            if _known(index, txn_id).has_own and txn_id not in dropped:
                return removed, True
            removed += chunks.delete(txn_id, 0, None, GARBAGE_BYTES - removed)
            if removed >= GARBAGE_BYTES:
                return removed, True
            index.forget(txn_id)
        return removed, False

    def _remove_strays(self) -> None:
        if self._strays():
            # Under the write lock no append is on its way to the row of its own side log.
            self._environment.write(lambda txn: self._drop_strays(txn))

    def _drop_strays(self, txn: lmdb.Transaction) -> None:
        self._check()
        index = self._index(txn)
        for txn_id in self._own.names():
            side = index.get(txn_id)
            if side is None or not side.has_own:
                self._own.drop(txn_id)

    def _strays(self) -> set[int]:
        names = set(self._own.names())
        if not names:
            return names

        def owners(_: lmdb.Transaction, index: SideIndex) -> set[int]:
            return {txn_id for txn_id, side in index.all() if side.has_own}

        return names - (self._ask(owners) or set())

    # -- compaction --------------------------------------------------------------------

    def _compact(self) -> None:
        moved = COMPACT_BYTES
        while moved >= COMPACT_BYTES:
            moved = self._environment.write(self._move)
            self._done.moved_bytes += moved
            fault_point("side.compacted")

    def _move(self, txn: lmdb.Transaction) -> int:
        """Moves batches of the least markers; how many bytes: a whole step when there is more."""
        self._check()
        index = self._index(txn)
        moved = 0
        for _, txn_id in index.committed():
            side = _known(index, txn_id)
            if side.moved < side.shared_count:
                moved += self._move_one(txn, index, txn_id, side, COMPACT_BYTES - moved)
            if moved >= COMPACT_BYTES:
                break
        fault_point("side.moving")
        return moved

    def _move_one(
        self, txn: lmdb.Transaction, index: SideIndex, txn_id: int, side: SideTxn, room: int
    ) -> int:
        chunks = SideChunks(txn, self._environment.db(SIDE))
        placed: list[bytes] = []
        moved, upto = 0, side.shared_count
        for at, chunk in chunks.read(txn_id, side.moved, side.shared_count):
            if moved >= room:
                upto = at
                break
            placed.append(place(chunk, side.marker_offset + at, side.commit_ts))
            moved += len(chunk)
        rest = side._replace(moved=upto, shared_bytes=side.shared_bytes - moved)
        batches = [b"".join(each) for each in gathered(placed)]
        if upto < side.count:
            batches.append(_marker(txn_id, rest))
        self._log.replace(txn, side.marker_offset + side.moved, batches)
        chunks.delete(txn_id, side.moved, upto)
        if upto < side.count:
            index.put(txn_id, rest)
        else:
            index.forget(txn_id)
        return moved


def _marker(txn_id: int, side: SideTxn) -> bytes:
    """The marker of what compaction has not moved."""
    batch = encode_control(
        ControlType.SIDE_LIST,
        txn_id=txn_id,
        count=side.count - side.moved,
        timestamp=side.max_timestamp,
        body=pack_runs(side.runs),
    )
    return place(batch, side.marker_offset + side.moved, side.commit_ts)


def _known(index: SideIndex, txn_id: int) -> SideTxn:
    side = index.get(txn_id)
    assert side is not None, f"side log: transaction {txn_id} has a marker and no row"
    return side


def _first(index: SideIndex) -> list[tuple[int, int]]:
    found = next(index.committed(), None)
    return [] if found is None else [found]


def _has_garbage(txn: lmdb.Transaction, index: SideIndex) -> bool:
    return index.garbage() is not None


def _is_movable(txn: lmdb.Transaction, index: SideIndex) -> bool:
    sides = (_known(index, txn_id) for _, txn_id in index.committed())
    return any(side.moved < side.shared_count for side in sides)
