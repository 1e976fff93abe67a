"""The moves between states: the table of the design, and a machine that tries all others.

In the machine several processes read a state, wait, and then move by what they read; the
model is a dict of states and the moves below.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from txnkv.coordinator import coordinator as coordination
from txnkv.coordinator import status_table
from txnkv.coordinator.coordinator import Coordinator
from txnkv.coordinator.ids import Timestamp, next_timestamp
from txnkv.coordinator.status_schema import SCHEMA
from txnkv.coordinator.status_table import MOVES, TxnState
from txnkv.storage.store import Store

OPEN, ABORTED = TxnState.OPEN, TxnState.ABORTED
COMMITTING, COMMITTED = TxnState.COMMIT_IN_PROGRESS, TxnState.COMMITTED
FINALIZING, ABORTING = TxnState.FINALIZE_IN_PROGRESS, TxnState.ABORT_IN_PROGRESS

ALLOWED = {
    (OPEN, COMMITTING),
    (OPEN, COMMITTED),
    (OPEN, ABORTING),
    (COMMITTING, FINALIZING),
    (COMMITTING, ABORTING),
    (FINALIZING, COMMITTED),
    (ABORTING, ABORTED),
}


@pytest.mark.parametrize("old", TxnState, ids=lambda state: state.name)
def test_moves_are_those_of_the_design(old: TxnState) -> None:
    assert MOVES[old] == {new for before, new in ALLOWED if before is old}


def test_numbers_are_kudus() -> None:
    assert {state.name: int(state) for state in TxnState} == {
        "OPEN": 1,
        "ABORTED": 2,
        "COMMIT_IN_PROGRESS": 3,
        "COMMITTED": 4,
        "ABORT_IN_PROGRESS": 5,
        "FINALIZE_IN_PROGRESS": 6,
    }


@pytest.mark.parametrize(
    ("state", "ended", "committing", "decided"),
    [
        (OPEN, False, False, False),
        (COMMITTING, False, True, False),
        (FINALIZING, False, True, True),
        (COMMITTED, True, True, True),
        (ABORTING, False, False, True),
        (ABORTED, True, False, True),
    ],
)
def test_what_a_state_means(state: TxnState, ended: bool, committing: bool, decided: bool) -> None:
    assert (state.ended, state.committing, state.decided) == (ended, committing, decided)


class Moves(RuleBasedStateMachine):
    """Random moves by processes that may have read the state long ago."""

    transactions: Bundle[int] = Bundle("transactions")
    reads: Bundle[tuple[int, TxnState]] = Bundle("reads")

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.store = Store.open(
            self.directory / "store",
            create=True,
            read_only=False,
            schema_sql=SCHEMA,
            initialise=coordination.initialise,
        )
        self.coordinator = Coordinator(self.store, 900.0)
        self.coordinator.maintenance.close()
        self.model: dict[int, TxnState] = {}
        self.commits: dict[int, Timestamp] = {}

    def teardown(self) -> None:
        self.coordinator.close()
        self.store.close()
        shutil.rmtree(self.directory)

    @rule(target=transactions)
    def begin(self) -> int:
        row = self.coordinator.write_open(
            self.coordinator.begin(
                timeout=None, isolation="snapshot", locking="optimistic", keepalive=30.0
            )
        )
        assert row.txn_id not in self.model
        self.model[row.txn_id] = OPEN
        return row.txn_id

    @rule(txn_id=transactions)
    def begin_again(self, txn_id: int) -> None:
        """A row that is written twice stays as it was."""
        with self.store.status.write() as cur:
            row = status_table.get(cur, txn_id)
            status_table.insert(cur, row)

    @rule(target=reads, txn_id=transactions)
    def look(self, txn_id: int) -> tuple[int, TxnState]:
        with self.store.status.read() as cur:
            return txn_id, status_table.get(cur, txn_id).state

    @rule(read=reads, new=st.sampled_from(list(TxnState)))
    def move(self, read: tuple[int, TxnState], new: TxnState) -> None:
        txn_id, expected = read
        if (expected, new) not in ALLOWED:
            with pytest.raises(ValueError, match="no transaction moves"), self._writing() as cur:
                status_table.move(cur, txn_id, expected, new)
            return
        with self._writing() as cur:
            stamp = next_timestamp(cur) if new is FINALIZING else None
            moved = status_table.move(cur, txn_id, expected, new, commit_ts=stamp)
        assert moved == (self.model[txn_id] is expected)
        if moved:
            self.model[txn_id] = new
            if stamp is not None:
                self.commits[txn_id] = stamp

    @rule(txn_id=transactions)
    def move_that_is_rolled_back(self, txn_id: int) -> None:
        """A process dies inside of the SQLite transaction: nothing happened."""
        expected = self.model[txn_id]
        for new in sorted(MOVES[expected]):
            with suppress(KeyError), self._writing() as cur:
                assert status_table.move(cur, txn_id, expected, new)
                raise KeyError

    def _writing(self) -> Any:
        return self.store.status.write()

    @invariant()
    def the_table_is_as_the_model(self) -> None:
        with self.store.status.read() as cur:
            rows = status_table.select(cur)
            live = status_table.live(cur)
        assert {row.txn_id: row.state for row in rows} == self.model
        assert [row.txn_id for row in rows] == sorted(self.model)
        assert {row.txn_id for row in live} == {
            id for id, state in self.model.items() if state not in (COMMITTED, ABORTED)
        }

    @invariant()
    def a_commit_timestamp_never_changes(self) -> None:
        with self.store.status.read() as cur:
            rows = status_table.select(cur)
        found = {row.txn_id: row.commit_ts for row in rows if row.txn_id in self.commits}
        assert found == self.commits
        assert len(set(found.values())) == len(found)

    @invariant()
    def only_open_transactions_have_a_heartbeat(self) -> None:
        with self.store.status.read() as cur:
            rows = status_table.select(cur)
        beating = {row.txn_id: row.heartbeat_slot for row in rows if row.heartbeat_slot is not None}
        assert set(beating) == {id for id, state in self.model.items() if state is OPEN}
        assert len(set(beating.values())) == len(beating)


TestMoves = Moves.TestCase
TestMoves.settings = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_the_model_has_no_way_out_of_an_end() -> None:
    assert not [
        pair for pair in itertools.product((COMMITTED, ABORTED), TxnState) if pair in ALLOWED
    ]
