"""Rows of the status table (Kudu's txn_status_tablet-test and txn_status_manager-test)."""

from __future__ import annotations

from typing import Any

import apsw
import pytest

import txnkv
from tests.threads import at_once
from txnkv.coordinator import status_table
from txnkv.coordinator.status_table import TxnState

OPEN, ABORTED = TxnState.OPEN, TxnState.ABORTED
COMMITTING, COMMITTED = TxnState.COMMIT_IN_PROGRESS, TxnState.COMMITTED
FINALIZING, ABORTING = TxnState.FINALIZE_IN_PROGRESS, TxnState.ABORT_IN_PROGRESS

# What each call answers in each state: an error's kind with words of its message, or the
# state afterwards. (TestUpdateTransactionState, TestRegisterParticipantsWithStates,
# KeepTransactionAlive, SystemClientCommitAndAbortTransaction, and the table of errors.)
INVALID = txnkv.InvalidTxnStateError
RULES: dict[str, dict[TxnState, TxnState | str]] = {
    "begin_commit": {
        OPEN: COMMITTING,
        COMMITTING: COMMITTING,
        FINALIZING: FINALIZING,
        COMMITTED: COMMITTED,
        ABORTING: "not open: ABORT_IN_PROGRESS",
        ABORTED: "not open: ABORTED",
    },
    "abort": {
        OPEN: ABORTING,
        COMMITTING: ABORTING,
        FINALIZING: "cannot abort: .* FINALIZE_IN_PROGRESS",
        COMMITTED: "cannot abort: .* COMMITTED",
        ABORTING: ABORTING,
        ABORTED: ABORTED,
    },
    "abort_if_open": {
        OPEN: ABORTING,
        COMMITTING: "cannot abort: .* COMMIT_IN_PROGRESS",
        FINALIZING: "cannot abort: .* FINALIZE_IN_PROGRESS",
        COMMITTED: "cannot abort: .* COMMITTED",
        ABORTING: ABORTING,
        ABORTED: ABORTED,
    },
    "keep_alive": {
        OPEN: OPEN,
        COMMITTING: "is in commit phase",
        FINALIZING: "is in commit phase",
        COMMITTED: "is not available for further commits",
        ABORTING: "is not available for further commits",
        ABORTED: "is not available for further commits",
    },
    "register": {
        OPEN: OPEN,
        COMMITTING: "not open: COMMIT_IN_PROGRESS",
        FINALIZING: "not open: FINALIZE_IN_PROGRESS",
        COMMITTED: "not open: COMMITTED",
        ABORTING: "not open: ABORT_IN_PROGRESS",
        ABORTED: "not open: ABORTED",
    },
    "start_job": {
        OPEN: OPEN,
        COMMITTING: "not open: COMMIT_IN_PROGRESS",
        FINALIZING: "not open: FINALIZE_IN_PROGRESS",
        COMMITTED: "not open: COMMITTED",
        ABORTING: "not open: ABORT_IN_PROGRESS",
        ABORTED: "not open: ABORTED",
    },
    "finish": {
        OPEN: "is still open",
        COMMITTING: COMMITTED,
        FINALIZING: COMMITTED,
        COMMITTED: COMMITTED,
        ABORTING: ABORTED,
        ABORTED: ABORTED,
    },
}
CASES = [(call, state, answer) for call, rule in RULES.items() for state, answer in rule.items()]


def _call(world: Any, call: str, txn_id: int) -> None:
    orchestrator = world.coordinator.orchestrator
    match call:
        case "begin_commit":
            orchestrator.start_commit(txn_id)
        case "abort":
            orchestrator.start_abort(txn_id, "test")
        case "abort_if_open":
            orchestrator.start_abort(txn_id, "test", only_open=True)
        case "keep_alive":
            world.coordinator.keep_alive(txn_id)
        case "register":
            world.register(txn_id, 7)
        case "start_job":
            world.start_job(txn_id, f"job-{txn_id}")
        case "finish":
            orchestrator.finish(txn_id)


@pytest.mark.parametrize("restarted", [False, True], ids=["", "restarted"])
@pytest.mark.parametrize(
    ("call", "state", "answer"), CASES, ids=[f"{c}-{s.name}" for c, s, _ in CASES]
)
def test_end_rules(
    world: Any, call: str, state: TxnState, answer: TxnState | str, restarted: bool
) -> None:
    txn_id = world.begin(1, 2)
    world.put_into(txn_id, state)
    if restarted:
        world.restart()
    if isinstance(answer, TxnState):
        _call(world, call, txn_id)
        assert world.state(txn_id) is answer
        _call(world, call, txn_id) if call != "start_job" else None
        assert world.state(txn_id) is answer
        return
    before = world.coordinator.get(txn_id), _participants(world, txn_id)
    with pytest.raises(INVALID, match=answer) as caught:
        _call(world, call, txn_id)
    assert str(txn_id) in str(caught.value)
    assert (world.coordinator.get(txn_id), _participants(world, txn_id)) == before


@pytest.mark.parametrize("call", RULES)
def test_unknown_id(world: Any, call: str) -> None:
    """TestSystemClientRegisterParticipantErrors, KeepTransactionAliveNonExistingTxnId."""
    with pytest.raises(txnkv.TxnNotFoundError, match="transaction 123 was not found; the highest"):
        _call(world, call, 123)
    with world.store.status.read() as cur:
        assert status_table.select(cur) == []


def test_commit_again_keeps_its_timestamp(world: Any) -> None:
    """TestSystemClientCommitSequence: calls are idempotent."""
    txn_id = world.begin(1)
    orchestrator = world.coordinator.orchestrator
    orchestrator.start_commit(txn_id)
    first = orchestrator.finish(txn_id)
    world.restart()
    orchestrator = world.coordinator.orchestrator
    assert orchestrator.start_commit(txn_id) == first
    assert orchestrator.finish(txn_id).commit_ts == first.commit_ts is not None


def test_start_transactions(world: Any) -> None:
    """TestStartTransactions: rows, participants once each, all as before after a restart."""
    a, b = world.begin(2, 1), world.begin()
    world.register(a, 1, 2, 1)
    assert _participants(world, a) == {"page": [1, 2]}
    assert _participants(world, b) == {}
    with world.store.status.read() as cur:
        rows = status_table.select(cur)
    world.restart()
    with world.store.status.read() as cur:
        assert status_table.select(cur) == rows
    assert _participants(world, a) == {"page": [1, 2]}
    assert world.coordinator.highest_id() >= b


def test_get_transaction_status(world: Any) -> None:
    """GetTransactionStatus: the state after each step, before and after a restart."""
    for state in TxnState:
        txn_id = world.begin(1)
        world.put_into(txn_id, state)
        assert world.state(txn_id) is state
        world.restart()
        assert world.state(txn_id) is state


def test_empty_transaction_is_committed_at_once(world: Any) -> None:
    """No participants: OPEN to COMMITTED directly, without a commit timestamp."""
    txn_id, latest = world.begin(), world.latest()
    row = world.coordinator.orchestrator.start_commit(txn_id)
    assert (row.state, row.commit_ts) == (COMMITTED, None)
    assert world.pages.calls == []
    assert world.latest() == latest


def test_select_by_state_in_order(world: Any) -> None:
    """TestWriteTransactions: sorted by id, the last state counts."""
    ids = [world.begin(1) for _ in range(6)]
    for txn_id, state in zip(ids, TxnState, strict=True):
        world.put_into(txn_id, state)
    with world.store.status.read() as cur:
        assert [row.txn_id for row in status_table.select(cur)] == ids
        for txn_id, state in zip(ids, TxnState, strict=True):
            assert [row.txn_id for row in status_table.select(cur, [state])] == [txn_id]
        assert len(status_table.select(cur, [OPEN, ABORTED])) == 2
        assert status_table.select(cur, []) == []


def test_participants_states_and_order(world: Any) -> None:
    """TestWriteParticipants: once each, sorted, the last state counts, the first timestamp."""
    txn_id, other = world.begin(3, 1, 2, 3), world.begin(1)
    with world.store.status.write() as cur:
        for state in (COMMITTING, FINALIZING):
            stamp = world.coordinator.get(txn_id).begin_ts + int(state)
            status_table.set_participants(cur, txn_id, "page", state, stamp)
        found = cur.execute(
            "SELECT txn_id, id, state, begin_commit_ts FROM participants ORDER BY txn_id, id"
        ).fetchall()
    first = world.coordinator.get(txn_id).begin_ts + int(COMMITTING)
    assert found == [
        *[(txn_id, id, int(FINALIZING), first) for id in (1, 2, 3)],
        (other, 1, int(OPEN), None),
    ]


def test_transactions_of_a_participant(world: Any) -> None:
    both, one, ended = world.begin(1, 2), world.begin(2), world.begin(2)
    world.coordinator.abort(ended, "test")
    with world.store.status.read() as cur:
        assert status_table.transactions_of(cur, "page", [1]) == [both]
        assert status_table.transactions_of(cur, "page", [2, 1]) == [both, one]
        assert status_table.transactions_of(cur, "page", [9]) == []
        assert status_table.transactions_of(cur, "book", [1, 2]) == []


def test_decided_are_those_between_commit_point_and_their_end(world: Any) -> None:
    """None of those that are open is looked at: ending many would cost the square of them."""
    first, second = world.begin(1, 2), world.begin(2)
    open_ones = [world.begin(2) for _ in range(300)]
    steps = 0

    def step() -> bool:
        nonlocal steps
        steps += 1
        return False

    with world.store.status.write() as cur:
        for txn_id, stamp in ((second, 70), (first, 80)):
            assert status_table.move(cur, txn_id, OPEN, COMMITTING)
            assert status_table.move(cur, txn_id, COMMITTING, FINALIZING, commit_ts=stamp)
    with world.store.status.read() as cur:
        cur.connection.set_progress_handler(step, 1)
        assert status_table.decided(cur, "page", [2, 1], 80) == [(70, second), (80, first)]
        cur.connection.set_progress_handler(None)
        assert status_table.decided(cur, "page", [2], 79) == [(70, second)]
        assert status_table.decided(cur, "page", [9], 80) == []
        assert status_table.decided(cur, "book", [2], 80) == []
    assert steps < len(open_ones)


def test_begin_is_lazy(world: Any) -> None:
    """The OPEN row is written when somebody else needs it; begin alone writes a range of ids."""
    world.row()
    writes = world.store.runtime.change_number()
    for _ in range(50):
        world.coordinator.ids.ended(world.row().txn_id)
    assert world.store.runtime.change_number() == writes
    with world.store.status.read() as cur:
        assert status_table.select(cur) == []


def test_multithreaded_access(world: Any) -> None:
    """TestMultithreadedAccess: 10 threads, 5 participants each; visits agree."""
    seen: list[bool] = []

    def work() -> None:
        txn_id = world.begin()
        for page in range(5):
            world.register(txn_id, page)
            seen.append(_participants(world, txn_id) == {"page": list(range(page + 1))})

    at_once(*[work] * 10)
    assert seen == [True] * 50
    with world.store.status.read() as cur:
        assert len(status_table.select(cur)) == 10


def test_a_participant_needs_its_transaction(world: Any) -> None:
    """TestFailedVisitor: 'missing transaction status entry' cannot come about."""
    with (
        pytest.raises((apsw.ConstraintError, txnkv.TxnkvError)),
        world.store.status.write() as cur,
    ):
        status_table.register_participant(cur, 99, "page", [1])
    with world.store.status.read() as cur:
        assert cur.execute("SELECT count(*) FROM participants").fetchall() == [(0,)]


def _participants(world: Any, txn_id: int) -> dict[str, list[int]]:
    with world.store.status.read() as cur:
        return status_table.participants(cur, txn_id)
