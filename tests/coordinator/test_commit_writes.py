"""Changes of a small commit in status.db itself, and sections given at the last moment."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import apsw
import pytest

from txnkv.coordinator.commit_queue import SmallCommit
from txnkv.coordinator.held import Key
from txnkv.coordinator.ids import Timestamp
from txnkv.coordinator.payload import Section
from txnkv.coordinator.status_schema import one
from txnkv.errors import TransactionConflictError, TxnkvError
from txnkv.storage import arm

KIND = 7


class Shelf:
    """A log member that keeps (stamp, bytes) by id."""

    def __init__(self) -> None:
        self.held: dict[int, dict[int, bytes]] = {}
        self.written_out: list[int] = []
        self.on_undo: Callable[[], None] = lambda: None

    def apply(self, id: int, data: bytes, stamp: int) -> None:
        self.held.setdefault(id, {})[stamp] = data

    def undo(self, ids: set[int], upto: int) -> None:
        self.on_undo()
        for id in ids:
            self.held[id] = {stamp: data for stamp, data in self.held[id].items() if stamp <= upto}

    def write_out(self, upto: Timestamp) -> dict[Key, str]:
        self.written_out.append(upto)
        return {}

    def flushed(self, upto: Timestamp, held: Collection[int]) -> None:
        """Nothing."""

    def reset(self) -> None:
        self.held.clear()


@pytest.fixture
def shelf(world: Any) -> Shelf:
    shelf = Shelf()
    world.coordinator.log.add_member(KIND, shelf)
    with world.store.status.write() as cur:
        cur.execute("CREATE TABLE numbers (next INTEGER NOT NULL)")
        cur.execute("INSERT INTO numbers VALUES (0)")
    return shelf


def allow(cur: apsw.Cursor, latest: Timestamp) -> None:
    """Refuses nothing."""


def counting(cur: apsw.Cursor, stamp: Timestamp) -> Sequence[Section]:
    """The next number, as a section."""
    (number,) = one(cur, "UPDATE numbers SET next = next + 1 RETURNING next")
    return [Section(KIND, 1, b"%d of %d" % (number, stamp))]


def number(world: Any) -> int:
    with world.store.status.read() as cur:
        return int(one(cur, "SELECT next FROM numbers")[0])


def test_sections_are_given_inside_the_commit(world: Any, shelf: Shelf) -> None:
    log = world.coordinator.log
    first = log.commit(SmallCommit(5, [], allow, counting))
    second = log.commit(SmallCommit(6, [Section(KIND, 2, b"known")], allow, counting))
    assert shelf.held == {
        1: {first: b"1 of %d" % first, second: b"2 of %d" % second},
        2: {second: b"known"},
    }


def test_members_of_a_group_write_one_after_the_other(world: Any, shelf: Shelf) -> None:
    log = world.coordinator.log
    futures = [log.commit_async(SmallCommit(i, [], allow, counting)) for i in range(1, 50)]
    stamps = [future.result(timeout=60) for future in futures]
    assert list(shelf.held[1].values()) == [b"%d of %d" % (i, s) for i, s in enumerate(stamps, 1)]


def test_who_is_refused_writes_nothing(world: Any, shelf: Shelf) -> None:
    def refuse(cur: apsw.Cursor, latest: Timestamp) -> None:
        raise TransactionConflictError("no")

    with pytest.raises(TransactionConflictError):
        world.coordinator.log.commit(SmallCommit(5, [], refuse, counting))
    assert number(world) == 0
    assert shelf.held == {}


@pytest.mark.parametrize("point", ["log.written", "status.before_commit"])
def test_what_was_written_goes_with_a_commit_that_fails(
    world: Any, shelf: Shelf, point: str
) -> None:
    """And memory is as before by the time that the next writer has its turn."""
    log, queue = world.coordinator.log, world.store.status._queue
    seen: list[bool] = []
    shelf.on_undo = lambda: seen.append(queue._lock.locked())
    arm(point, "error@1")
    with pytest.raises(TxnkvError):
        log.commit(SmallCommit(5, [], allow, counting))
    assert seen == [True]
    assert number(world) == 0
    assert shelf.held == {1: {}}
    stamp = log.commit(SmallCommit(6, [], allow, counting))
    assert shelf.held == {1: {stamp: b"1 of %d" % stamp}}


def test_a_commit_that_changes_status_db_alone_has_its_row(world: Any, shelf: Shelf) -> None:
    """Somebody may ask for the outcome of a transaction; of a write outside of one, nobody."""

    def change(cur: apsw.Cursor, stamp: Timestamp) -> Sequence[Section]:
        counting(cur, stamp)
        return []

    log = world.coordinator.log
    before = log.latest()
    with_id = log.commit(SmallCommit(5, [], allow, change))
    without = log.commit(SmallCommit(0, [], allow, change))
    assert before < with_id < without == log.latest()
    assert number(world) == 2
    with world.store.status.read() as cur:
        assert cur.execute("SELECT commit_ts FROM commit_log").fetchall() == [(with_id,)]


def test_members_write_out_what_they_hold(world: Any, shelf: Shelf) -> None:
    stamp = world.coordinator.log.commit(SmallCommit(5, [], allow, counting))
    world.coordinator.log.write_out(stamp)
    assert shelf.written_out == [stamp]
