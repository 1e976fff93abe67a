"""The low water mark: the least id that may still stage anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import txnkv
from tests import internals
from txnkv import core
from txnkv.coordinator.ids import RANGE
from txnkv.coordinator.status_table import TxnState


def test_no_open_transaction_goes_below_it(world: Any) -> None:
    first, second = world.begin(1), world.begin(2)
    assert world.coordinator.low_water_mark() <= first
    world.coordinator.abort(first, "test")
    assert first < world.coordinator.low_water_mark() <= second


def test_a_transaction_that_is_not_stored_holds_it(world: Any) -> None:
    row = world.row()
    later = [world.begin(1) for _ in range(3)]
    for txn_id in later:
        world.coordinator.abort(txn_id, "test")
    assert world.coordinator.low_water_mark() <= row.txn_id
    world.coordinator.ids.ended(row.txn_id)
    last = world.begin(1)
    assert row.txn_id < world.coordinator.low_water_mark() <= last


def test_middle_states_hold_it(world: Any) -> None:
    for state in (
        TxnState.COMMIT_IN_PROGRESS,
        TxnState.FINALIZE_IN_PROGRESS,
        TxnState.ABORT_IN_PROGRESS,
    ):
        txn_id = world.begin(1)
        world.put_into(txn_id, state)
        world.begin(2)
        assert world.coordinator.low_water_mark() <= txn_id
        world.coordinator.orchestrator.finish(txn_id)
        world.begin(2)
        assert world.coordinator.low_water_mark() > txn_id or state is not TxnState.COMMITTED
        for row in list(_live(world)):
            if row.state is TxnState.OPEN:
                world.coordinator.abort(row.txn_id, "test")


def test_a_write_beside_does_not_forget_a_range_that_was_just_taken(world: Any) -> None:
    """Another thread writes when the range is stored, and its ids are not to be given yet."""
    ids, status = world.coordinator.ids, world.store.status

    class Beside(core.IdSet):
        def give(self, first: int, end: int) -> None:
            with status.write() as cur:
                ids.record(cur)
            super().give(first, end)

    ids.numbers = Beside()
    row = world.row()
    world.begin(1)
    assert world.coordinator.low_water_mark() <= row.txn_id


def test_it_never_falls(world: Any) -> None:
    marks, rows = [], []
    for i in range(40):
        rows.append(world.begin(1) if i % 3 else world.row().txn_id)
        if i % 4 == 3:
            txn_id = rows.pop(0)
            if any(row.txn_id == txn_id for row in _live(world)):
                world.coordinator.abort(txn_id, "test")
            world.coordinator.ids.ended(txn_id)
        marks.append(world.coordinator.low_water_mark())
    assert marks == sorted(marks)


def test_a_used_up_range_is_forgotten(world: Any) -> None:
    rows = [world.row() for _ in range(RANGE)]
    for row in rows:
        world.coordinator.ids.ended(row.txn_id)
    txn_id = world.begin(1)
    assert world.coordinator.low_water_mark() == txn_id
    with world.store.status.read() as cur:
        ranges = cur.execute("SELECT first FROM id_ranges").fetchall()
    assert ranges == [(rows[-1].txn_id + 1,)]


def test_an_empty_store_has_a_mark_at_the_next_id(world: Any) -> None:
    mark = world.coordinator.low_water_mark()
    assert world.row().txn_id >= mark


def test_ranges_of_a_killed_process_are_forgotten(
    client: txnkv.Client, process: Callable[..., Any], by_hand: Callable[[txnkv.Client], None]
) -> None:
    """Its ids hold the mark until the leader sees that it is gone."""
    other = process("txn = client.new_transaction(); say(txn.id.local); wait()")
    txn_id = other.hear()
    assert internals.coordinator(client).low_water_mark() <= txn_id
    other.kill()
    by_hand(client)
    assert internals.coordinator(client).low_water_mark() > txn_id


def test_a_store_closed_well_leaves_no_range(world: Any) -> None:
    txn_id = world.row().txn_id
    world.restart()
    with world.store.status.read() as cur:
        assert cur.execute("SELECT count(*) FROM id_ranges").fetchall() == [(0,)]
    assert world.row().txn_id > txn_id


def _live(world: Any) -> Any:
    from txnkv.coordinator import status_table

    with world.store.status.read() as cur:
        return status_table.live(cur)
