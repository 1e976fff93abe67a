"""The metadata store of the coordinator, by Pulsar's tables for one (peers, 2.8).

TransactionMetadataStoreProviderTest and TransactionMetadataStoreServiceTest: what NOTFOUND and
BADSTATUS are there, TxnNotFoundError and InvalidTxnStateError are here.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.threads import at_once
from txnkv.coordinator import status_table
from txnkv.coordinator.ids import Timestamp
from txnkv.coordinator.status_table import MOVES, PARTITION, TxnRow, TxnState, past_timeout
from txnkv.errors import InvalidTxnStateError, TxnNotFoundError
from txnkv.storage.clocks import clock

OPEN, COMMITTING, COMMITTED = TxnState.OPEN, TxnState.COMMIT_IN_PROGRESS, TxnState.COMMITTED
PATHS = {
    TxnState.OPEN: [],
    TxnState.COMMIT_IN_PROGRESS: [TxnState.COMMIT_IN_PROGRESS],
    TxnState.FINALIZE_IN_PROGRESS: [TxnState.COMMIT_IN_PROGRESS, TxnState.FINALIZE_IN_PROGRESS],
    TxnState.COMMITTED: [TxnState.COMMITTED],
    TxnState.ABORT_IN_PROGRESS: [TxnState.ABORT_IN_PROGRESS],
    TxnState.ABORTED: [TxnState.ABORT_IN_PROGRESS, TxnState.ABORTED],
}
"""The moves by which a transaction gets into each state."""


SUBSCRIPTION = "subscription"


class MetadataStore:
    """The steps of PIP-31 on the status table, each in a transaction of status.db of its own."""

    def __init__(self, world: Any) -> None:
        self._world = world

    def _write(self, step: Any, *args: Any, **options: Any) -> Any:
        with self._world.coordinator.store.status.write() as cur:
            return step(cur, *args, **options)

    def new_transaction(self, row: TxnRow) -> None:
        self._write(status_table.insert, row)

    def get(self, txn_id: int) -> TxnRow:
        return self._write(status_table.get, txn_id)

    def participants(self, txn_id: int) -> dict[str, list[int]]:
        return self._write(status_table.participants, txn_id)

    def add_partitions(self, txn_id: int, ids: list[int]) -> None:
        self._write(status_table.join, txn_id, PARTITION, ids, "send messages")

    def add_subscriptions(self, txn_id: int, ids: list[int]) -> None:
        self._write(status_table.join, txn_id, SUBSCRIPTION, ids, "acknowledge")

    def update_status(self, *args: Any, **options: Any) -> TxnRow:
        return self._write(status_table.advance, *args, **options)

    def timeouts(self) -> list[TxnRow]:
        return [row for row in self._write(status_table.select, [OPEN]) if past_timeout(row)]


@pytest.fixture
def metadata(world: Any) -> MetadataStore:
    return MetadataStore(world)


def new(world: Any, timeout: float | None = 60) -> int:
    """An OPEN transaction that the store has."""
    row = world.coordinator.begin(
        timeout=timeout, isolation="snapshot", locking="optimistic", keepalive=30
    )
    MetadataStore(world).new_transaction(row)
    return int(row.txn_id)


def bring(metadata: MetadataStore, txn_id: int, state: TxnState) -> None:
    now = OPEN
    for following in PATHS[state]:
        metadata.update_status(txn_id, now, following)
        now = following


def test_one_that_is_not_known_is_not_found(metadata: MetadataStore) -> None:
    for ask in (
        lambda: metadata.get(4711),
        lambda: metadata.add_partitions(4711, [1]),
        lambda: metadata.add_subscriptions(4711, [1]),
        lambda: metadata.update_status(4711, OPEN, COMMITTING),
    ):
        with pytest.raises(TxnNotFoundError, match="4711"):
            ask()


def test_a_new_one_is_open(world: Any, metadata: MetadataStore) -> None:
    txn_id = new(world)
    assert metadata.get(txn_id).state is OPEN
    assert metadata.participants(txn_id) == {}
    metadata.new_transaction(metadata.get(txn_id))
    assert metadata.get(txn_id).state is OPEN


def test_ids_are_of_one_coordinator_and_never_the_same(world: Any) -> None:
    found = [new(world) for _ in range(10)]
    assert found == sorted(set(found))
    assert {world.coordinator.txn_id(id).tcid for id in found} == {world.coordinator.tcid}


def test_it_commits_step_by_step(world: Any, metadata: MetadataStore) -> None:
    txn_id = new(world)
    assert metadata.update_status(txn_id, OPEN, COMMITTING).state is COMMITTING
    with pytest.raises(InvalidTxnStateError, match="COMMIT_IN_PROGRESS, not OPEN"):
        metadata.update_status(txn_id, OPEN, TxnState.ABORT_IN_PROGRESS)
    assert metadata.get(txn_id).state is COMMITTING


def test_a_commit_does_not_pass_over_participants(world: Any, metadata: MetadataStore) -> None:
    """OPEN -> COMMITTED is BADSTATUS; here it is for who has nobody to tell."""
    txn_id = new(world)
    metadata.add_partitions(txn_id, [3])
    with pytest.raises(InvalidTxnStateError, match="OPEN to COMMITTED past its participants"):
        metadata.update_status(txn_id, OPEN, COMMITTED)
    assert metadata.get(txn_id).state is OPEN
    assert metadata.update_status(
        txn_id, OPEN, COMMITTED, commit_ts=Timestamp(7)
    ).commit_ts == Timestamp(7)


@pytest.mark.parametrize(("start", "end"), list(itertools.product(TxnState, TxnState)))
def test_every_move_that_is_not_in_the_table_is_refused(
    world: Any, metadata: MetadataStore, start: TxnState, end: TxnState
) -> None:
    """TxnStatusTest: the whole matrix."""
    txn_id = new(world)
    bring(metadata, txn_id, start)
    if end in MOVES[start]:
        assert metadata.update_status(txn_id, start, end).state is end
        return
    with pytest.raises(InvalidTxnStateError):
        metadata.update_status(txn_id, start, end)
    assert metadata.get(txn_id).state is start


@pytest.mark.parametrize(("start", "expected"), list(itertools.permutations(TxnState, 2)))
def test_a_wrong_expectation_changes_nothing(
    world: Any, metadata: MetadataStore, start: TxnState, expected: TxnState
) -> None:
    txn_id = new(world)
    bring(metadata, txn_id, start)
    for end in MOVES[expected]:
        with pytest.raises(InvalidTxnStateError, match=f"not {expected.name}"):
            metadata.update_status(txn_id, expected, end)
    assert metadata.get(txn_id).state is start


def test_partitions_and_subscriptions_are_kept_once_and_sorted(
    world: Any, metadata: MetadataStore
) -> None:
    txn_id = new(world)
    metadata.add_partitions(txn_id, [5, 2])
    metadata.add_partitions(txn_id, [9, 2, 1])
    metadata.add_subscriptions(txn_id, [4, 3, 4])
    metadata.add_subscriptions(txn_id, [])
    assert metadata.participants(txn_id) == {PARTITION: [1, 2, 5, 9], SUBSCRIPTION: [3, 4]}
    assert metadata.get(txn_id).state is OPEN


@pytest.mark.parametrize("state", [state for state in TxnState if state is not OPEN])
def test_nothing_is_added_to_one_that_is_not_open(
    world: Any, metadata: MetadataStore, state: TxnState
) -> None:
    txn_id = new(world)
    bring(metadata, txn_id, state)
    for add in (metadata.add_partitions, metadata.add_subscriptions):
        with pytest.raises(InvalidTxnStateError, match=f"not open: {state.name}"):
            add(txn_id, [1])
    assert metadata.participants(txn_id) == {}


def test_steps_inside_one_write_are_done_together(world: Any) -> None:
    metadata = MetadataStore(world)
    txn_id = new(world)

    def steps() -> None:
        with world.coordinator.store.status.write() as cur:
            status_table.join(cur, txn_id, PARTITION, [1], "send messages")
            status_table.advance(cur, txn_id, OPEN, COMMITTING)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        steps()
    assert metadata.get(txn_id).state is OPEN
    assert metadata.participants(txn_id) == {}


def test_a_thousand_time_out(world: Any, now: Any) -> None:
    """testTimeoutTracker: 1000 transactions of one timeout, none is left."""
    metadata = MetadataStore(world)
    options = {"isolation": "snapshot", "locking": "optimistic", "keepalive": 30}
    rows = [world.coordinator.begin(timeout=60, **options) for _ in range(1000)]
    with world.coordinator.store.status.write() as cur:
        for row in rows:
            status_table.insert(cur, row)
    assert metadata.timeouts() == []
    now.forward(61)
    assert len(metadata.timeouts()) == 1000


def test_timeouts_of_several_threads_come_one_after_the_other(world: Any, now: Any) -> None:
    """testTimeoutTrackerMultiThreading: 4 x 25, each with a timeout of its own."""
    at_once(*(lambda s=s: [new(world, s) for _ in range(25)] for s in (60, 120, 180, 240)))
    metadata = MetadataStore(world)
    left = []
    now.forward(30)
    for _ in range(5):
        left.append(100 - len(metadata.timeouts()))
        now.forward(60)
    assert left == [100, 75, 50, 25, 0]


def test_who_has_no_timeout_has_none(world: Any, now: Any) -> None:
    new(world, None)
    now.forward(1e6)
    assert MetadataStore(world).timeouts() == []


def test_timeouts_hold_after_the_machine_was_started_again(world: Any, now: Any) -> None:
    """transactionTimeoutRecoverTest: the monotonic clock began anew; wall time counts then."""
    txn_id = new(world, 60)
    with world.coordinator.store.status.write() as cur:
        cur.execute("UPDATE transactions SET boot = 'before', deadline = 1")
    assert MetadataStore(world).timeouts() == []
    now.forward(61)
    assert [row.txn_id for row in MetadataStore(world).timeouts()] == [txn_id]


def test_it_is_there_after_a_restart(world: Any) -> None:
    """MLTransactionMetadataStoreTest: replay restores owner, partitions, acks, COMMITTING."""
    txn_id = new(world)
    MetadataStore(world).add_partitions(txn_id, [2, 1])
    MetadataStore(world).add_subscriptions(txn_id, [8])
    MetadataStore(world).update_status(txn_id, OPEN, COMMITTING)
    before = MetadataStore(world).get(txn_id)
    world.restart()
    assert MetadataStore(world).get(txn_id) == before
    assert MetadataStore(world).participants(txn_id) == {
        PARTITION: [1, 2],
        SUBSCRIPTION: [8],
    }
    assert new(world) > txn_id


def test_the_deadline_is_of_the_monotonic_clock(world: Any) -> None:
    txn_id = new(world, 5)
    deadline = MetadataStore(world).get(txn_id).deadline
    assert deadline is not None
    assert 0 < deadline - clock.monotonic_micros() <= 5_000_000
